/*
--plan: how long a step would take on a GPU, estimated from its data sheet. Host only.

    const GpuKind* gpu = gpu_kind("NVIDIA H200");                       // nullptr: not in the table
    const StepTime t = plan_step(*gpu, config, params, {64, 1024, 1, 8});   // 64 rows, one GPU, 8 micro-steps
    const double seconds = 8 * t.micro_s + t.update_s;
*/
#pragma once

#include "../errors.h"          // gives: die
#include "../model/model_config.h"      // gives: Config
#include "../ops/fp8.h"         // gives: fp8_layer
#include "../ops/ops.h"         // gives: Mask
#include "run_config.h"         // gives: run, rank_micro_steps

// From NVIDIA's data sheets: dense BF16 and FP16 FLOP/s with sums in fp32, bytes/s, and memory as the driver
// reports it. form: of a chip that has several, other than the usual one.
struct GpuKind { const char *chip, *form; double tflops, gb_per_s, gib; };
static const GpuKind kGpuKinds[] = {
    {"RTX 3090", "", 71, 936, 24}, {"RTX 4090", "", 165, 1008, 24}, {"RTX 5090", "", 209, 1792, 31.8},
    {"A10", "", 125, 600, 22.5}, {"L4", "", 121, 300, 22.5}, {"L40S", "", 362, 864, 45},
    {"A100", "40GB", 312, 1555, 40}, {"A100", "", 312, 2039, 80},
    {"H100", "PCIe", 756, 2000, 80}, {"H100", "NVL", 835, 3900, 94}, {"H100", "", 989, 3350, 80},
    {"H200", "NVL", 835, 4800, 140}, {"H200", "", 989, 4800, 140}, {"B200", "", 2250, 8000, 179}};

static inline std::string gpu_name(const GpuKind& kind) {
    return kind.chip + std::string(*kind.form ? " " : "") + kind.form;
}
static inline std::string gpu_names() {
    std::string names;
    for (const GpuKind& kind : kGpuKinds) { names += (names.empty() ? "" : ", ") + gpu_name(kind); }
    return names;
}

// Takes one of `words` away from the text's start, as often as there is one.
static inline void words_eaten(std::string* text, const std::vector<const char*>& words) {
    for (size_t i = 0; i < words.size();) {
        const bool found = text->compare(0, strlen(words[i]), words[i]) == 0;
        if (found) { text->erase(0, strlen(words[i])); }
        i = found ? 0 : i + 1;
    }
}

// Letters and digits in lower case, without what names begin with: "NVIDIA GeForce RTX 4090" gives "4090".
static inline std::string gpu_word(const std::string& name) {
    std::string word;
    for (char c : name) { if (isalnum((unsigned char)c)) { word += (char)tolower(c); } }
    words_eaten(&word, {"nvidia", "geforce", "rtx", "tesla"});
    return word;
}

// The row of a driver's name ("NVIDIA A100-SXM4-40GB (sm_80, 108 SMs)") or a user's ("a100 40gb", "RTX4090");
// nullptr: none. Behind a chip's name may stand its memory and socket, but no letter that makes it another
// chip: A10G, 4090 D.
static inline const GpuKind* gpu_kind(const std::string& name) {
    const std::string word = gpu_word(name.substr(0, name.find(" (")));
    for (const GpuKind& kind : kGpuKinds) {
        const std::string chip = gpu_word(kind.chip), form = gpu_word(kind.form);
        if (word.compare(0, chip.size(), chip) != 0) { continue; }
        std::string rest = word.substr(chip.size());
        const size_t at = rest.find(form);
        if (at == std::string::npos) { continue; }
        rest.erase(at, form.size());
        words_eaten(&rest, {"sxm4", "sxm5", "sxm6", "sxm", "pcie", "hbm2e", "hbm2", "hbm3e", "hbm3", "24gb",
                            "32gb", "40gb", "48gb", "80gb", "94gb", "141gb", "180gb", "192gb", "80"});
        if (rest.empty()) { return &kind; }
    }
    return nullptr;
}

// What --plan names: a row, or a card of which only the memory is known, "48GiB". Dies if it is neither.
static inline const GpuKind* plan_gpu(const std::string& text) {
    if (const GpuKind* kind = gpu_kind(text)) { return kind; }
    static GpuKind card = {"card", "", 0, 0, 0};
    const size_t digits = std::min(text.find_first_not_of("0123456789."), text.size());
    const std::string word = gpu_word(text), unit = gpu_word(text.substr(digits));
    const bool is_size = unit == "gib" || unit == "gb" || unit == "g";
    if (is_size && parse_double(text.substr(0, digits), &card.gib) && card.gib >= 2 && card.gib <= 10000) {
        return &card;
    }
    for (const char* old : {"t4", "v100", "p100", "p40", "k80", "gtx", "titan", "quadro", "206", "207", "208",
                            "mi", "amd", "instinct", "radeon"}) {
        if (word.compare(0, strlen(old), old) != 0) { continue; }
        die("--plan %s: it cannot run this program, which wants an NVIDIA GPU of compute capability 8.0 or "
            "later\nhint: such as %s", text.c_str(), gpu_names().c_str());
    }
    die("--plan %s: choose auto, a memory from 2GiB to 10000GiB, or one of %s", text.c_str(),
        gpu_names().c_str());
}

// Which share of the tiles up to the diagonal attention visits: 1 without a window. Of a model: its layers'
// mean.
static inline double visited_tiles(const Mask& mask, int T) {
    const int kTile = 64, tiles = ceil_div(T, kTile);
    double visited = 0;
    for (int i = 0; i < tiles; i++) { visited += i + 1 - mask.keys(i * kTile).within(T).first / kTile; }
    return visited / (0.5 * tiles * (tiles + 1));
}
static inline double visited_tiles(const Config& c, int T) {
    double shares = 0;
    for (int l = 0; l < c.L; l++) { shares += visited_tiles(Mask{c.layer(l).window}, T); }
    return shares / c.L;
}

// Of a token, forward and backward, as llm.c counts: attention is causal, so half of 12*L*Q*T, where Q, the
// width of all heads, is GPT-2's C; of that the visited tiles. Value embeddings, and an embedding that
// is not also the LM head, are only looked up.
static inline double step_flops(const Config& c, double parameters, int T) {
    const double looked_up = c.value_rows() + (c.shape().tied ? 0.0 : (double)c.V * c.C);
    return 6.0 * (parameters - looked_up) + 6.0 * (double)c.L * c.NH * c.shape().HS * T * visited_tiles(c, T);
}

struct PlanBatch {
    int B, T, world, micro_steps;       // rows and tokens of a GPU's micro-step; GPUs; micro-steps of each
    int recompute;
    bool muon, shards_state;
    bool fp8 = false, fp8_head = false, state_bf16 = false;
};
struct StepTime { double micro_s, update_s; };      // of a micro-step; of what each step adds to those

// Sums what GEMMs, attention, the kernels that move memory, and launches take, as shares of the data sheet's
// figures, which were fitted to the steps in dev/test/test_plan.py.
static inline StepTime plan_step(const GpuKind& gpu, const Config& c, double params, const PlanBatch& batch) {
    const double kGemm = 0.73, kMemory = 0.875, kUpdate = 0.79;
    const double kAttention = c.shape().HS < 128 ? 0.24 : 0.35;
    const double kMoves = 28;           // (B,T,C) 16-bit values that a layer's other kernels read or write
    const double kLaunch = 3e-6, kExposed = 0.03;   // seconds; part of the exchange that is not hidden
    const double kMuonGemm = 0.57;      // of matrices with few tiles
    const double kMuonWeights = 1.01;   // its weights take more power, so the clock is lower
    const double kFp8 = 1.85;           // times faster than 16 bits
    const double kFp8Moves = 6;         // what a layer's casts and transposes move beside kMoves
    const double flops = gpu.tflops * 1e12, bytes = gpu.gb_per_s * 1e9;
    const Config::Shape s = c.shape();
    const double L = c.L, C = c.C, F = s.F, B = batch.B, T = batch.T, N = B * T;
    const double Q = (double)c.NH * s.HS, K = (double)s.NKV * s.HS, FC = act_columns(s.mlp, F);
    double fp8_layers = 0;
    for (int l = 0; batch.fp8 && l < c.L; l++) { fp8_layers += fp8_layer(l, c.L); }

    // elements of a layer's matrices: of qkv, attproj, fc, fcproj. FP8 multiplies all but attproj. -r 3
    // computes attention and the first three products of a forward again
    const double qkv = C * (Q + 2 * K), attproj = Q * C, fc = C * FC, fcproj = F * C;
    const double matrices = qkv + attproj + fc + fcproj, in_fp8 = (matrices - attproj) * (1 - 1 / kFp8);
    const double again = batch.recompute == 3 ? 1 : 0;
    const double redone = L * (matrices - fcproj) - fp8_layers * (qkv + fc) * (1 - 1 / kFp8);
    const double head = (double)c.Vp * C / (batch.fp8_head ? kFp8 : 1);
    const double products = L * matrices - fp8_layers * in_fp8 + again * redone / 3 + head;
    const double gemm = 6 * N * products / (kGemm * flops);
    const double scores = B * T * T * Q * L * visited_tiles(c, batch.T);
    const double attention = (7 + 2 * again) * scores / (kAttention * flops);           // causal
    // Llama's family also rotates q and k, there and back, and a gated MLP's fc is wider than GPT-2's 4*C
    const double more = c.is_llama() ? 5 * (Q + K) + 2 * std::max(0.0, FC - 4 * C) : 0;
    const double embedded = c.value_rows() * (8.0 / c.V + 2 / N);      // rows, and zeros of their gradient
    const double values = C * (L * (kMoves + 8 * batch.recompute) + kFp8Moves * fp8_layers) + L * more +
                          embedded + (2 + 0.5 * batch.fp8_head) * (double)c.Vp;
    // with FP8 and -r a layer's forward and backward each read its weights and write them as bytes
    const double recast = batch.recompute > 0 ? 6 * fp8_layers * (matrices - attproj) : 0;
    const double moved = (2 * N * values + recast) / (kMemory * bytes);
    const double exposed = batch.world > 1 ? kExposed : 0;
    const double micro = (gemm + attention + moved) * (1 + exposed) + kLaunch * (31 * L + 10);

    // per parameter 4 bytes for the norm and 28 for AdamW, of them 16 for m and v
    const double shares = batch.shards_state ? batch.world : 1;
    const double update = params * (4 + (batch.state_bf16 ? 20 : 28) / shares) / (kUpdate * bytes);
    if (!batch.muon) { return {micro, update}; }
    // Newton and Schulz, 5 steps of some 5 C FLOPs an element, which are GPT-2's 60 C^3 a layer, in some 60
    // launches; Muon's passes over a matrix take 2 bytes an element more than AdamW's
    const double elements = L * matrices / batch.world;
    const double muon = 25 * elements * C / (kMuonGemm * flops) + kLaunch * 60 +
                        elements * 2 / (kUpdate * bytes);
    return {micro * kMuonWeights, update + muon};
}

// Prints whether -b fits. largest: the largest that does; 0: none, and then it dies. advice: memory_advice.
static inline void plan_print_batch(int largest, const std::string& advice, int lanes) {
    if (largest == 0) {
        die("not even -b 1 fits\nhint: %s",
            advice.empty() ? "choose a smaller model or -t, or another GPU" : advice.c_str());
    }
    const bool fits = run.B <= largest;
    printf("-b %d %s; the largest that fits is -b %d\n", run.B, fits ? "fits" : "does not fit", largest);
    if (!fits && !advice.empty()) { printf("%s\n", advice.c_str()); }
    printf("a step: %lld tokens, micro-steps: %d, lanes: %d\n", (long long)run.total_batch,
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
    const double dollars = hours * batch.world * price;
    printf("speed: about %.*f ms a step, %.0f tok/s, MFU %.0f%%\n", seconds < 0.001 ? 3 : 1, seconds * 1e3,
           speed, 100.0 * step_flops(c, params, batch.T) * speed / peak);
    const double time_of = hours < 1.0 / 30 ? 1.0 / 3600 : hours < 2 ? 1.0 / 60 : 1;      // a unit, in hours
    printf("time: about %.3g %s for %.3g%s tokens", hours / time_of,
           time_of == 1 ? "hours" : time_of > 0.01 ? "minutes" : "seconds",
           tokens * (tokens < 1e8 ? 1e-6 : 1e-9), tokens < 1e8 ? "M" : "B");
    if (price > 0) { printf(", $%.*f at $%g for an hour of a GPU", dollars < 0.1 ? 4 : 2, dollars, price); }
    printf("\n");
}
