/*
--plan: how long a step would take on a GPU, estimated from its data sheet. Host only.

    const GpuKind* gpu = gpu_kind("NVIDIA H200");                       // nullptr: not in the table
    const StepTime t = plan_step(*gpu, config, params, {64, 1024, 1, 8});   // 64 rows, one GPU, 8 micro-steps
    const double seconds = 8 * t.micro_s + t.update_s;
*/
#pragma once

#include "../check.h"           // gives: die
#include "../model/model_config.h"      // gives: Config
#include "../ops/fp8.h"         // gives: fp8_layer
#include "run_config.h"         // gives: run, rank_micro_steps

// From NVIDIA's data sheets: dense BF16 and FP16 FLOP/s with sums in fp32, bytes/s, and memory as the driver
// reports it.
struct GpuKind { const char* part; double tflops, gb_per_s, gib; };
static const GpuKind kGpuKinds[] = {
    {"A100-SXM4-40GB", 312, 1555, 40}, {"A100-PCIE-40GB", 312, 1555, 40}, {"A100", 312, 2039, 80},
    {"H100 PCIe", 756, 2000, 80}, {"H100 NVL", 835, 3900, 94}, {"H100", 989, 3350, 80},
    {"H200 NVL", 835, 4800, 140}, {"H200", 989, 4800, 140}, {"4090", 165, 1008, 24}};

// The first row whose words are part of a driver's name ("NVIDIA H200") or a user's ("h200"); nullptr: none.
static inline const GpuKind* gpu_kind(const std::string& name) {
    for (const GpuKind& kind : kGpuKinds) {
        const char* found = strcasestr(name.c_str(), kind.part);
        if (!found) { continue; }
        const bool begins = found == name.c_str() || !isalnum((unsigned char)found[-1]);
        if (begins && !isalnum((unsigned char)found[strlen(kind.part)])) { return &kind; }
    }
    return nullptr;
}

static inline std::string gpu_names() {
    std::string names;
    for (const GpuKind& kind : kGpuKinds) { names += (names.empty() ? "" : ", ") + std::string(kind.part); }
    return names;
}

// Of a token, forward and backward, as llm.c counts: attention is causal, so half of 12*L*C*T.
static inline double step_flops(const Config& c, double parameters, int T) {
    return 6.0 * parameters + 6.0 * (double)c.L * c.C * T;
}

struct PlanBatch {
    int B, T, world, micro_steps;       // rows and tokens of a GPU's micro-step; GPUs; micro-steps of each
    int recompute;
    bool muon, shards_state;
    bool fp8 = false, fp8_head = false;
};
struct StepTime { double micro_s, update_s; };      // of a micro-step; of what each step adds to those

// Sums what GEMMs, attention, the kernels that move memory, and launches take, as shares of the data sheet's
// figures, which were fitted to the steps in dev/test/test_plan.py.
static inline StepTime plan_step(const GpuKind& gpu, const Config& c, double params, const PlanBatch& batch) {
    const double kGemm = 0.73, kAttention = 0.24, kMemory = 0.875, kUpdate = 0.79;
    const double kMoves = 28;           // (B,T,C) 16-bit values that a layer's other kernels read or write
    const double kLaunch = 3e-6, kExposed = 0.03;   // seconds; part of the exchange that is not hidden
    const double kFp8 = 1.85;           // times faster than 16 bits
    const double kFp8Moves = 6;         // what a layer's casts and transposes move beside kMoves
    const double flops = gpu.tflops * 1e12, bytes = gpu.gb_per_s * 1e9;
    const double L = c.L, C = c.C, B = batch.B, T = batch.T, N = B * T;
    double fp8_layers = 0;
    for (int l = 0; batch.fp8 && l < c.L; l++) { fp8_layers += fp8_layer(l, c.L); }

    // a layer's matrices have 12 C^2 elements, 11 of which FP8 multiplies
    const double matrices = 12 * L - 11 * fp8_layers + 11 * fp8_layers / kFp8;
    const double gemm = 6 * N * (matrices * C * C + (double)c.Vp * C / (batch.fp8_head ? kFp8 : 1)) /
                        (kGemm * flops);
    const double attention = 7 * B * T * T * C * L / (kAttention * flops);      // causal: half of 14
    const double values = C * (L * (kMoves + 8 * batch.recompute) + kFp8Moves * fp8_layers) +
                          (2 + 0.5 * batch.fp8_head) * (double)c.Vp;
    const double moved = 2 * N * values / (kMemory * bytes);
    const double exposed = batch.world > 1 ? kExposed : 0;
    const double micro = (gemm + attention + moved) * (1 + exposed) + kLaunch * (31 * L + 10);

    // per parameter 4 bytes for the norm and 28 for AdamW; Newton and Schulz, 5 steps of 60 C^3 a layer
    const double shares = batch.shards_state ? batch.world : 1;
    const double muon = batch.muon ? 300 * L * C * C * C / (kGemm * flops) / batch.world : 0;
    return {micro, params * (4 + 28 / shares) / (kUpdate * bytes) + muon};
}

// Prints whether -b fits. largest: the largest that does; 0: none, and then it dies.
static inline void plan_print_batch(int largest, int lanes) {
    if (largest == 0) {
        die("not even -b 1 fits\nhint: choose a smaller model or -t, or another GPU; -r 2 needs less memory");
    }
    printf("-b %d %s; the largest that fits is -b %d\na step: %lld tokens, micro-steps: %d, lanes: %d\n",
           run.B, run.B > largest ? "does not fit" : "fits", largest, (long long)run.total_batch,
           rank_micro_steps(), lanes);
}

// Prints what a step and a run of `steps` take, or a billion tokens if steps is not known, -1. price: dollars
// for an hour of a GPU; 0: not known.
static inline void plan_print_time(const GpuKind& gpu, const Config& c, double params, const PlanBatch& batch,
                                   int64_t steps, double price) {
    const StepTime time = plan_step(gpu, c, params, batch);
    const double seconds = batch.micro_steps * time.micro_s + time.update_s;
    const double batch_tokens = (double)batch.B * batch.T * batch.world * batch.micro_steps;
    const double speed = batch_tokens / seconds, tokens = steps > 0 ? (double)steps * batch_tokens : 1e9;
    const double hours = tokens / speed / 3600, peak = gpu.tflops * 1e12 * batch.world;
    printf("speed: about %.1f ms a step, %.0f tok/s, MFU %.0f%%\n", seconds * 1e3, speed,
           100.0 * step_flops(c, params, batch.T) * speed / peak);
    printf("time: about %.3g hours for %.3gB tokens", hours, tokens * 1e-9);
    if (price > 0) { printf(", $%.2f at $%g for an hour of a GPU", hours * batch.world * price, price); }
    printf("\n");
}
