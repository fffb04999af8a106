/*
--plan: how long a step would take on a GPU, estimated from its data sheet. Host only.

    const GpuKind* gpu = gpu_kind("NVIDIA H200");                       // nullptr: not in the table
    const StepTime t = plan_step(*gpu, config, params, {64, 1024, 1});  // 64 rows, one micro-step, one GPU
    const double seconds = t.micro_s + t.update_s;
*/
#ifndef LLMC_RUN_PLAN_H
#define LLMC_RUN_PLAN_H

#include <string>       // gives: std::string
#include <strings.h>    // gives: strcasecmp

#include "../model/model_config.h"      // gives: Config

// From NVIDIA's data sheets: dense BF16 and FP16 FLOP/s with sums in fp32, bytes/s, and memory as the driver
// reports it.
struct GpuKind { const char* part; double tflops, gb_per_s, gib; };
static const GpuKind kGpuKinds[] = {
    {"A100-SXM4-40GB", 312, 1555, 40}, {"A100-PCIE-40GB", 312, 1555, 40}, {"A100", 312, 2039, 80},
    {"H100 PCIe", 756, 2000, 80}, {"H100 NVL", 835, 3900, 94}, {"H100", 989, 3350, 80},
    {"H200 NVL", 835, 4800, 140}, {"H200", 989, 4800, 140}, {"RTX 4090", 165, 1008, 24}};

// The GPU whose name contains a row's, or which the user calls so ("h200", "4090"); nullptr: not known.
static inline const GpuKind* gpu_kind(const std::string& name) {
    for (const GpuKind& kind : kGpuKinds) {
        if (name.find(kind.part) != std::string::npos) { return &kind; }
    }
    for (const GpuKind& kind : kGpuKinds) {
        const std::string part = kind.part, number = part.substr(part.find(' ') + 1);
        for (const std::string& called : {part, number}) {
            if (strcasecmp(called.c_str(), name.c_str()) == 0) { return &kind; }
        }
    }
    return nullptr;
}

static inline std::string gpu_names() {
    std::string names = "auto, for the GPU in this machine,";
    for (const GpuKind& kind : kGpuKinds) { names += std::string(" ") + kind.part + ","; }
    names.pop_back();
    return names;
}

struct PlanBatch { int B, T, world; int recompute = 0; bool muon = false, shards_state = false; };
struct StepTime { double micro_s, update_s; };      // of a micro-step; of what each step adds to those

// Sums what GEMMs, attention, the kernels that move memory, and launches take. The shares of the data sheet's
// figures are an H200's: 124M to 1558M are within 3 % of what was measured there.
static inline StepTime plan_step(const GpuKind& gpu, const Config& c, double params, const PlanBatch& batch) {
    const double kGemm = 0.665, kAttention = 0.35, kMemory = 0.875, kUpdate = 0.79;
    const double kMoves = 48;           // (B,T,C) 16-bit values that a layer's other kernels read or write
    const double kLaunch = 3e-6, kExposed = 0.03;   // seconds; part of the exchange that is not hidden
    const double flops = gpu.tflops * 1e12, bytes = gpu.gb_per_s * 1e9;
    const double L = c.L, C = c.C, B = batch.B, T = batch.T, N = B * T;

    const double gemm = 6 * N * (12 * L * C * C + (double)c.Vp * C) / (kGemm * flops);
    const double attention = 7 * B * T * T * C * L / (kAttention * flops);      // causal: half of 14
    const double moved = 2 * N * (C * L * (kMoves + 8 * batch.recompute) + 2 * c.Vp) / (kMemory * bytes);
    const double exposed = batch.world > 1 ? kExposed : 0;
    const double micro = (gemm + attention + moved) * (1 + exposed) + kLaunch * (31 * L + 10);

    // per parameter 4 bytes for the norm and 30 for AdamW; Newton and Schulz, 5 steps of 60 C^3 a layer
    const double shares = batch.shards_state ? batch.world : 1;
    const double muon = batch.muon ? 300 * L * C * C * C / (kGemm * flops) / batch.world : 0;
    return {micro, params * (4 + 30 / shares) / (kUpdate * bytes) + muon};
}

#endif  // LLMC_RUN_PLAN_H
