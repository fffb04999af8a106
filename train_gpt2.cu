/*
GPT-2 and GPT-3 shaped pretraining in one file: every forward and backward kernel, the model, AdamW, gradient
accumulation, checkpoints, the training loop.

Two builds of this file:
    make train_gpt2cu      nvcc, the CUDA program (PRECISION=BF16|FP16|FP32)
    make train_gpt2cpu     g++ -DGPT2_CPU, the same program in plain loops: llmc/cpu_ops.h is the specification
                           of every kernel here, and what runs where there is no GPU
Run:
    ./train_gpt2cu -e d12 -b 64 -t 1024 -z 524288 -i 'shards/train_*.bin' -j 'shards/val_*.bin' -o runs/d12
    ./train_gpt2cu --help

Sections (search for "// == "), in the order in which data flows:
     1 includes            2 types and limits       3 shapes and tables    4 device runtime and checks
     5 device helpers      6 ops                    7 multi-GPU            8 model
     9 checkpoint         10 run configuration     11 training loop       12 main
Section 6: 6.1 encoder  6.2 layernorm  6.3 matmul  6.4 attention  6.5 gelu  6.6 classifier  6.7 loss
     6.8 global norm  6.9 adamw
Letters, everywhere: B batch rows, T tokens a row, C channels, NH heads, HS head size, V vocabulary, Vp padded
vocabulary, L layers, OC output channels, N = B*T rows of a matrix. Index = lower-case letter: b t c nh l, bt = b*T+t.
*/

// == 1 includes ==
#include <limits.h>     // gives: INT_MAX, PATH_MAX
#include <math.h>       // gives: sqrtf, isfinite
#include <signal.h>     // gives: sigaction, SIGINT
#include <stdint.h>     // gives: int64_t
#include <stdio.h>      // gives: printf
#include <string.h>     // gives: strcmp
#include <time.h>       // gives: clock_gettime

#include <string>       // gives: std::string
#include <vector>       // gives: std::vector

#include "llmc/check.h"         // gives: die, fopen_check, AtomicFile
#include "llmc/rand.h"          // gives: philox4x32, rand_normal4, RoundKey
#include "llmc/op_types.h"      // gives: Accumulate, TokenBuckets, UpdateState, ParamSegment, GPT2_OUTPUTS
#include "llmc/token_buckets.h" // gives: build_token_buckets
#include "llmc/dataloader.h"    // gives: DataLoader
#include "llmc/tokenizer.h"     // gives: Tokenizer
#include "llmc/sampler.h"       // gives: sample_token
#include "llmc/schedulers.h"    // gives: lr_at
#include "llmc/flags.h"         // gives: Flag, flags_parse
#include "llmc/logger.h"        // gives: Logger

// == 2 types and limits ==
// floatX is the type of weights and activations. Statistics, losses, norms and optimizer state are fp32 in every build.
#if defined(GPT2_CPU)
typedef float floatX;
#define PRECISION_NAME "FP32"
#elif defined(ENABLE_FP32)
typedef float floatX;
#define PRECISION_NAME "FP32"
#elif defined(ENABLE_FP16)
#include <cuda_fp16.h>          // gives: half
typedef half floatX;
#define PRECISION_NAME "FP16"
#else
#define ENABLE_BF16
#include <cuda_bf16.h>          // gives: __nv_bfloat16
typedef __nv_bfloat16 floatX;
#define PRECISION_NAME "BF16"
#endif

constexpr bool kLowPrecision = sizeof(floatX) == 2;     // parameters have fp32 master copies
#ifdef ENABLE_FP16
constexpr bool kFp16 = true;
#else
constexpr bool kFp16 = false;
#endif
constexpr float kMaxLossScale = 65536.0f;               // FP16: where dynamic loss scaling starts and may return to
constexpr size_t kAlign = 256;                          // bytes: the start of each tensor and of each layer's view
constexpr int kMaxSkipsInARow = 20;                     // updates skipped for a non-finite gradient before the run stops

template <class Int> constexpr Int ceil_div(Int a, Int b) { return (a + b - 1) / b; }
template <class Int> constexpr Int round_up(Int a, Int b) { return ceil_div(a, b) * b; }

// == 3 shapes and tables ==
// The model is two tables. Everything that walks over tensors (allocation, init, AdamW, norm, checkpoints, memory
// report, tests) walks over these.
struct Config {
    int maxT;           // longest sequence: rows of wpe
    int V, Vp;          // vocabulary; padded to a multiple of 128 so that the LM head's GEMM is aligned
    int L, NH, C;
};

enum class Where { Global, Block };             // one tensor, or one per layer
enum class Init { Zero, One, Normal, Residual };    // Normal: N(0, 0.02); Residual: N(0, 0.02/sqrt(2L))
enum class Decay { No, Yes };                   // weight decay: tensors with two dimensions

// The order is the checkpoint's order: append nothing in the middle.
//    name      where   rows    cols    init      decay  live rows
#define GPT2_PARAMS(X)                                          \
    X(wte,      Global, Vp,     C,      Normal,   Yes,   V)     \
    X(wpe,      Global, maxT,   C,      Normal,   Yes,   maxT)  \
    X(ln1w,     Block,  1,      C,      One,      No,    1)     \
    X(ln1b,     Block,  1,      C,      Zero,     No,    1)     \
    X(qkvw,     Block,  3 * C,  C,      Normal,   Yes,   3 * C) \
    X(qkvb,     Block,  1,      3 * C,  Zero,     No,    1)     \
    X(attprojw, Block,  C,      C,      Residual, Yes,   C)     \
    X(attprojb, Block,  1,      C,      Zero,     No,    1)     \
    X(ln2w,     Block,  1,      C,      One,      No,    1)     \
    X(ln2b,     Block,  1,      C,      Zero,     No,    1)     \
    X(fcw,      Block,  4 * C,  C,      Normal,   Yes,   4 * C) \
    X(fcb,      Block,  1,      4 * C,  Zero,     No,    1)     \
    X(fcprojw,  Block,  C,      4 * C,  Residual, Yes,   C)     \
    X(fcprojb,  Block,  1,      C,      Zero,     No,    1)     \
    X(lnfw,     Global, 1,      C,      One,      No,    1)     \
    X(lnfb,     Global, 1,      C,      Zero,     No,    1)

// SAVED(r): one copy per layer while the recompute level is below r, else one buffer that all layers share.
//    name        type    where   kept    elements
#define GPT2_ACTS(X)                                                                                      \
    X(encoded,    floatX, Global, ALWAYS, N * C)            /* (B,T,C) */                                 \
    X(ln1,        floatX, Block,  SAVED(2), N * C)          /* (B,T,C) */                                 \
    X(ln1_mean,   float,  Block,  ALWAYS, N)                /* (B,T) */                                   \
    X(ln1_rstd,   float,  Block,  ALWAYS, N)                                                              \
    X(qkv,        floatX, Block,  ALWAYS, N * 3 * C)        /* (B,T,3,NH,HS) */                           \
    X(att_lse,    float,  Block,  ALWAYS, N * NH)           /* (B,NH,T) log-sum-exp of the scores */      \
    X(atty,       floatX, Block,  ALWAYS, N * C)            /* (B,T,C) attention's output */              \
    X(residual2,  floatX, Block,  ALWAYS, N * C)            /* (B,T,C) after attention */                 \
    X(ln2,        floatX, Block,  SAVED(2), N * C)                                                        \
    X(ln2_mean,   float,  Block,  ALWAYS, N)                                                              \
    X(ln2_rstd,   float,  Block,  ALWAYS, N)                                                              \
    X(fch,        floatX, Block,  ALWAYS, N * 4 * C)        /* (B,T,4C) before GELU */                    \
    X(fch_gelu,   floatX, Block,  SAVED(1), N * 4 * C)                                                    \
    X(residual3,  floatX, Block,  ALWAYS, N * C)            /* (B,T,C) after the MLP */                   \
    X(lnf,        floatX, Global, ALWAYS, N * C)                                                          \
    X(lnf_mean,   float,  Global, ALWAYS, N)                                                              \
    X(lnf_rstd,   float,  Global, ALWAYS, N)                                                              \
    X(logits,     floatX, Global, ALWAYS, N * Vp)           /* (B,T,Vp), then their gradient */           \
    X(losses,     float,  Global, ALWAYS, N)                /* (B,T) */                                   \
    X(dresidual,  floatX, Global, ALWAYS, N * C)            /* (B,T,C) gradient of the residual stream */ \
    X(dnarrow,    floatX, Global, ALWAYS, N * C)            /* (B,T,C) dlnf, dln2, datty, dln1 */         \
    X(dwide,      floatX, Global, ALWAYS, N * 4 * C)        /* (B,T,4C) dfch; (B,T,3C) dqkv */

#define X(name, ...) PARAM_##name,
enum ParamId { GPT2_PARAMS(X) NUM_PARAMS };
#undef X
#define X(name, ...) ACT_##name,
enum ActId { GPT2_ACTS(X) NUM_ACTS };
#undef X

template <class Real> struct ParamViews {       // one pointer per tensor; per-layer ones stand at a layer
#define X(name, ...) Real* name;
    GPT2_PARAMS(X)
#undef X
};
typedef ParamViews<const floatX> Params;
struct Acts {
#define X(name, type, ...) type* name;
    GPT2_ACTS(X)
#undef X
};
static_assert(sizeof(Params) == NUM_PARAMS * sizeof(void*) && sizeof(Acts) == NUM_ACTS * sizeof(void*),
              "one pointer per table row: the loops below address the fields by row");

struct ParamSpec {
    const char* name;
    Init init;
    Decay decay;
    int copies;         // 1, or L
    size_t rows, cols, live_rows;
    size_t elems;       // rows*cols: one copy, as in files
    size_t stride;      // elements from one layer's copy to the next in the arenas (aligned)
    size_t offset;      // elements from the arena's start
};
struct ActSpec {
    const char* name;
    int copies;
    size_t elems, elem_bytes;
    size_t stride;      // elements from layer to layer; 0: all layers share one buffer
    size_t offset;      // bytes from the arena's start
};

// A product of sizes that must not wrap: a table row that asks for more than 2^62 elements is an error with its name.
static size_t size_check(const char* name, double elements) {
    if (!(elements < 4.6e18)) { die("tensor '%s' would have %.3g elements: too many\nhint: use a smaller model, -b or -t", name, elements); }
    return (size_t)elements;
}

static size_t param_specs(ParamSpec* specs, const Config& c) {      // returns the arena's size in elements
    const size_t V = c.V, Vp = c.Vp, L = c.L, C = c.C, maxT = c.maxT;
    const size_t align = kAlign / 2;            // elements: 256 bytes of the narrowest type that uses these offsets
    size_t offset = 0;
    int i = 0;
#define X(name_, where_, rows_, cols_, init_, decay_, live_)                                                       \
    {                                                                                                              \
        ParamSpec s = {#name_, Init::init_, Decay::decay_, Where::where_ == Where::Block ? c.L : 1,                \
                       rows_, cols_, live_, 0, 0, offset};                                                         \
        size_check(#name_, (double)s.rows * (double)s.cols * s.copies);                                            \
        s.elems = s.rows * s.cols;                                                                                 \
        s.stride = round_up(s.elems, align);                                                                       \
        offset += s.stride * s.copies;                                                                             \
        specs[i++] = s;                                                                                            \
    }
    GPT2_PARAMS(X)
#undef X
    (void)V; (void)L;
    return offset;
}

static size_t act_specs(ActSpec* specs, const Config& c, int B, int T, int recompute) {     // returns bytes
    const size_t N = (size_t)B * T, C = c.C, NH = c.NH, Vp = c.Vp;
    const bool ALWAYS = true;
    auto SAVED = [recompute](int level) { return recompute < level; };
    size_t offset = 0;
    int i = 0;
#define X(name_, type_, where_, kept_, elems_)                                                                     \
    {                                                                                                              \
        bool block = Where::where_ == Where::Block, kept = kept_;                                                  \
        ActSpec s = {#name_, block && kept ? c.L : 1, elems_, sizeof(type_), 0, offset};                           \
        size_t bytes = round_up(size_check(#name_, (double)s.elems) * s.elem_bytes, kAlign);                       \
        s.stride = block && kept ? bytes / s.elem_bytes : 0;                                                       \
        size_check(#name_, (double)bytes * s.copies);                                                              \
        offset += bytes * s.copies;                                                                                \
        specs[i++] = s;                                                                                            \
    }
    GPT2_ACTS(X)
#undef X
    return offset;
}

template <class Real> static ParamViews<Real> param_views(Real* base, const ParamSpec* specs, int l) {
    ParamViews<Real> views;
    Real** field = (Real**)&views;
    for (int i = 0; i < NUM_PARAMS; i++) { field[i] = base + specs[i].offset + (specs[i].copies > 1 ? l : 0) * specs[i].stride; }
    return views;
}

static Acts act_views(char* base, const ActSpec* specs, int l) {
    Acts views;
    void** field = (void**)&views;
    for (int i = 0; i < NUM_ACTS; i++) { field[i] = base + specs[i].offset + l * specs[i].stride * specs[i].elem_bytes; }
    return views;
}

#ifdef GPT2_CPU
// == 4-6 in the CPU build ==
// The device runtime and the ops by the same names, in plain C++.
#include "llmc/cpu_device.h"
#else
// CUDA-PART: spliced in by the next commits
#endif  // GPT2_CPU

// == 7 multi-GPU ==
// One process, one GPU so far: the loader, the rounding keys and the batch arithmetic already count in samples of the
// whole job, so that more ranks will not change what is computed.

// == 8 model ==
struct Options {                // what a run may choose; fixed after gpt2_allocate
    int recompute;              // 0: save all activations; 1: recompute GELU in backward; 2: LayerNorms too
    int gelu_fusion;            // 0: GELU by its own kernels; 1: in the forward GEMM's epilogue; 2: in the backward's too
    bool master;                // fp32 master copies of 16-bit parameters
    bool grads_bf16;            // gradients in bf16, rounded stochastically; else fp32
    bool residual_in_gemm;      // residual added in the projection GEMM's epilogue, else fused into the next LayerNorm
    bool tf32;                  // FP32 builds: tensor cores for GEMMs
    float weight_decay;         // on the tensors with two dimensions
    uint64_t seed;
};

// What a step leaves on the device for the host to read one step later, and for the next step to go on from.
struct DeviceState {
    UpdateState update;         // AdamW's t, loss scale, norm, the decision to skip
    float loss;                 // mean over the total batch
};

struct Inputs {                 // one batch on the device, or one staging slot in pinned memory; same layout in both
    int *tokens, *targets;      // (B,T)
    int* order;                 // (B,T) positions sorted by token, for the embedding's backward
    int4 *segments, *splits;
    size_t bytes;
};

struct GPT2 {
    Config config;
    Options options;
    int B, T;                   // what the activations are allocated for; a forward may use less
    ParamSpec param_specs[NUM_PARAMS];
    ActSpec act_specs[NUM_ACTS];
    size_t num_parameters;      // as in the checkpoint: wte with V rows
    size_t arena_elems;         // flat size of parameters, gradients, m and v, gaps between tensors included
    std::vector<ParamSegment> segments;

    floatX* params;
    float *master, *m, *v;      // master: null when the parameters are fp32 themselves or -w 0
    void* grads;
    char* acts;
    float* scratch;             // one op at a time uses it: the largest need of any op
    void* workspace;            // cuBLASLt's
    DeviceState* state;
    ParamSegment* device_segments;
    char* inputs_memory;
    Inputs inputs;

    Stream stream;
    static const int kSlots = 2;        // staging slots: the host may run this many micro-steps ahead
    char* staging_memory[kSlots];
    Inputs staging[kSlots];
    Event staged[kSlots];               // the slot's last copy has left it
    int64_t micro_steps_staged;
    TokenBuckets buckets;               // of the batch in `inputs`; pointers on the device
    uint32_t step, micro;               // keys of stochastic rounding
};

static size_t gpt2_num_parameters(const ParamSpec* specs, Decay decay) {
    size_t count = 0;
    for (int i = 0; i < NUM_PARAMS; i++) {
        if (specs[i].decay == decay) { count += (size_t)specs[i].copies * specs[i].live_rows * specs[i].cols; }
    }
    return count;
}

static Inputs inputs_layout(char* base, int B, int T) {
    const size_t N = (size_t)B * T;
    const size_t ids = round_up(N * sizeof(int), kAlign);
    const size_t segments = round_up((size_t)max_bucket_segments((int64_t)N) * sizeof(int4), kAlign);
    const size_t splits = round_up((size_t)max_bucket_splits((int64_t)N) * sizeof(int4), kAlign);
    Inputs in;
    in.tokens = (int*)base;
    in.targets = (int*)(base + ids);
    in.order = (int*)(base + 2 * ids);
    in.segments = (int4*)(base + 3 * ids);
    in.splits = (int4*)(base + 3 * ids + segments);
    in.bytes = 3 * ids + segments + splits;
    return in;
}

static size_t gpt2_scratch_bytes(const Config& c, const Options& options, int B, int T, const ParamSpec* specs, size_t elems) {
    const int N = B * T;
    size_t bytes = encoder_backward_scratch_bytes(B, T, c.C);
    bytes = std::max(bytes, layernorm_backward_scratch_bytes(N, c.C));
    bytes = std::max(bytes, bias_backward_scratch_bytes(N, 4 * c.C));
    bytes = std::max(bytes, attention_backward_scratch_bytes(B, T, c.NH));
    bytes = std::max(bytes, global_norm_scratch_bytes(elems));
    for (int i = 0; i < NUM_PARAMS && options.grads_bf16; i++) { bytes = std::max(bytes, specs[i].elems * sizeof(float)); }
    return bytes;
}

// Every byte the run will take on the device, by name, before anything is allocated.
struct MemoryItem { std::string name; size_t bytes; };

static std::vector<MemoryItem> gpt2_memory_plan(const Config& c, const Options& options, int B, int T) {
    ParamSpec specs[NUM_PARAMS];
    ActSpec acts[NUM_ACTS];
    size_t elems = param_specs(specs, c);
    act_specs(acts, c, B, T, options.recompute);
    std::vector<MemoryItem> plan;
    plan.push_back({"parameters", elems * sizeof(floatX)});
    if (kLowPrecision && options.master) { plan.push_back({"master weights", elems * sizeof(float)}); }
    plan.push_back({"gradients", elems * (options.grads_bf16 ? 2 : sizeof(float))});
    plan.push_back({"AdamW m and v", elems * 2 * sizeof(float)});
    for (const ActSpec& a : acts) { plan.push_back({a.name, round_up(a.elems * a.elem_bytes, kAlign) * a.copies}); }
    plan.push_back({"scratch", gpt2_scratch_bytes(c, options, B, T, specs, elems)});
    plan.push_back({"matmul workspace", matmul_workspace_bytes()});
    plan.push_back({"inputs", inputs_layout(nullptr, B, T).bytes});
    return plan;
}

static size_t memory_total(const std::vector<MemoryItem>& plan) {
    size_t bytes = 0;
    for (const MemoryItem& item : plan) { bytes += item.bytes; }
    return bytes;
}

// What is left over for the driver, the library's own buffers and fragmentation.
static size_t memory_reserve(const DeviceInfo& device) { return device.memory_total / 100; }

static void gpt2_check_memory(const Config& c, const Options& options, int B, int T, const DeviceInfo& device) {
    auto fits = [&](int b) {
        return memory_total(gpt2_memory_plan(c, options, b, T)) + memory_reserve(device) <= device.memory_free;
    };
    if (device.memory_free == 0 || fits(B)) { return; }
    int low = 0, high = B;                      // low fits (0: taken for granted), high does not
    while (high - low > 1) {
        int mid = low + (high - low) / 2;
        (fits(mid) ? low : high) = mid;
    }
    const double GiB = 1073741824.0;
    double wanted = memory_total(gpt2_memory_plan(c, options, B, T)) / GiB;
    std::string hint = low > 0 ? format("the largest micro-batch that fits is -b %d", low)
                               : std::string("not even -b 1 fits: choose a smaller model or -t");
    if (options.recompute < 2) { hint += "; -r 2 needs less memory"; }
    die("-b %d -t %d needs %.2f GiB on %s, which has %.2f GiB free\nhint: %s", B, T, wanted, device.name.c_str(),
        device.memory_free / GiB, hint.c_str());
}

static void gpt2_print_memory(const Config& c, const Options& options, int B, int T) {
    std::vector<MemoryItem> plan = gpt2_memory_plan(c, options, B, T);
    std::stable_sort(plan.begin(), plan.end(), [](const MemoryItem& a, const MemoryItem& b) { return a.bytes > b.bytes; });
    printf("memory: %.3f GiB in all; the largest:", memory_total(plan) / 1073741824.0);
    for (size_t i = 0; i < plan.size() && i < 10; i++) {
        printf("%s %s %.3f", i ? "," : "", plan[i].name.c_str(), plan[i].bytes / 1073741824.0);
    }
    printf("\n");
}

static void gpt2_allocate(GPT2* model, const Config& config, const Options& options, int B, int T) {
    model->config = config;
    model->options = options;
    model->B = B;
    model->T = T;
    model->arena_elems = param_specs(model->param_specs, config);
    size_t act_bytes = act_specs(model->act_specs, config, B, T, options.recompute);
    model->num_parameters = gpt2_num_parameters(model->param_specs, Decay::Yes) + gpt2_num_parameters(model->param_specs, Decay::No);
    model->segments.clear();
    for (const ParamSpec& s : model->param_specs) {
        model->segments.push_back({s.offset, s.offset + s.stride * s.copies, s.decay == Decay::Yes ? options.weight_decay : 0.0f});
    }

    const size_t n = model->arena_elems;
    const size_t grad_bytes = n * (options.grads_bf16 ? 2 : sizeof(float));
    model->stream = stream_create();
    model->params = (floatX*)device_malloc(n * sizeof(floatX), "parameters");
    model->master = kLowPrecision && options.master ? (float*)device_malloc(n * sizeof(float), "master weights") : nullptr;
    model->m = (float*)device_malloc(2 * n * sizeof(float), "AdamW m and v");
    model->v = model->m + n;
    model->grads = device_malloc(grad_bytes, "gradients");
    model->acts = (char*)device_malloc(act_bytes, "activations");
    model->scratch = (float*)device_malloc(gpt2_scratch_bytes(config, options, B, T, model->param_specs, n), "scratch");
    model->workspace = device_malloc(matmul_workspace_bytes(), "matmul workspace");
    model->state = (DeviceState*)device_malloc(sizeof(DeviceState), "state");
    model->device_segments = (ParamSegment*)device_malloc(NUM_PARAMS * sizeof(ParamSegment), "parameter segments");
    model->inputs_memory = (char*)device_malloc(inputs_layout(nullptr, B, T).bytes, "inputs");
    model->inputs = inputs_layout(model->inputs_memory, B, T);
    for (int i = 0; i < GPT2::kSlots; i++) {
        model->staging_memory[i] = (char*)pinned_malloc(inputs_layout(nullptr, B, T).bytes, "staging");
        model->staging[i] = inputs_layout(model->staging_memory[i], B, T);
        model->staged[i] = event_create();
    }
    matmul_init(model->workspace, matmul_workspace_bytes(), options.tf32);

    // The gaps between tensors take part in norm and AdamW: they are zero and stay zero.
    device_zero(model->params, n * sizeof(floatX), model->stream);
    if (model->master) { device_zero(model->master, n * sizeof(float), model->stream); }
    device_zero(model->m, 2 * n * sizeof(float), model->stream);
    device_zero(model->grads, grad_bytes, model->stream);
    DeviceState state = {};
    state.update.loss_scale = kFp16 ? kMaxLossScale : 1.0f;
    copy_to_device(model->state, &state, sizeof(state), model->stream);
    copy_to_device(model->device_segments, model->segments.data(), NUM_PARAMS * sizeof(ParamSegment), model->stream);
    stream_sync(model->stream);
    model->micro_steps_staged = 0;
    model->step = model->micro = 0;
    model->buckets = TokenBuckets{};
}

static void gpt2_free(GPT2* model) {
    stream_sync(model->stream);
    device_free(model->params);
    if (model->master) { device_free(model->master); }
    device_free(model->m);
    device_free(model->grads);
    device_free(model->acts);
    device_free(model->scratch);
    device_free(model->workspace);
    device_free(model->state);
    device_free(model->device_segments);
    device_free(model->inputs_memory);
    for (int i = 0; i < GPT2::kSlots; i++) {
        pinned_free(model->staging_memory[i]);
        event_destroy(model->staged[i]);
    }
    matmul_free();
    stream_destroy(model->stream);
}

// ---- parameters from and to the host, one copy of one tensor at a time, as fp32 (slow, at start and end only) ----

static void gpt2_set_param(GPT2* model, int i, int l, const float* values /*(elems)*/) {
    const ParamSpec& s = model->param_specs[i];
    const size_t at = s.offset + l * s.stride;
    std::vector<floatX> rounded(s.elems);
    for (size_t k = 0; k < s.elems; k++) { rounded[k] = (floatX)values[k]; }
    copy_to_device(model->params + at, rounded.data(), s.elems * sizeof(floatX), model->stream);
    if (model->master) { copy_to_device(model->master + at, values, s.elems * sizeof(float), model->stream); }
    stream_sync(model->stream);
}

static void gpt2_get_param(GPT2* model, int i, int l, float* values /*(elems)*/, bool from_master) {
    const ParamSpec& s = model->param_specs[i];
    const size_t at = s.offset + l * s.stride;
    if (from_master && model->master) {
        copy_to_host(values, model->master + at, s.elems * sizeof(float), model->stream);
        stream_sync(model->stream);
        return;
    }
    std::vector<floatX> raw(s.elems);
    copy_to_host(raw.data(), model->params + at, s.elems * sizeof(floatX), model->stream);
    stream_sync(model->stream);
    for (size_t k = 0; k < s.elems; k++) { values[k] = (float)raw[k]; }
}

// GPT-2's initialisation (Radford et al. 2019, section 2.3: residual projections scaled by 1/sqrt(number of residual
// layers)). Values depend on (seed, tensor, position) alone. Padded rows of wte are zero and stay so.
static void gpt2_init_random(GPT2* model, uint64_t seed) {
    std::vector<float> values;
    for (int i = 0; i < NUM_PARAMS; i++) {
        const ParamSpec& s = model->param_specs[i];
        const size_t live = s.live_rows * s.cols;
        const float std = s.init == Init::Residual ? (float)(0.02 / sqrt(2.0 * model->config.L)) : 0.02f;
        for (int l = 0; l < s.copies; l++) {
            values.assign(s.elems, s.init == Init::One ? 1.0f : 0.0f);
            if (s.init == Init::Normal || s.init == Init::Residual) {
                const int64_t first = (int64_t)(l * live), end = first + (int64_t)live;     // positions in the whole tensor
                #pragma omp parallel for schedule(static)
                for (int64_t block = first / 4; block < ceil_div(end, (int64_t)4); block++) {
                    float z[4];
                    rand_normal4(z, seed, (uint32_t)i, (uint64_t)block);
                    for (int64_t e = std::max(first, 4 * block); e < std::min(end, 4 * block + 4); e++) {
                        values[e - first] = z[e - 4 * block] * std;
                    }
                }
            }
            gpt2_set_param(model, i, l, values.data());
        }
    }
}

// ---- one micro-step: inputs, forward, loss, backward ----

// Copies a batch to the device, asynchronously. With targets it also sorts the token positions for the embedding's
// backward: counting sort on the host, while the device still works on the micro-step before.
static void gpt2_set_inputs(GPT2* model, const int* tokens, const int* targets /*or null*/, int B, int T) {
    const size_t N = (size_t)B * T;
    const int slot = (int)(model->micro_steps_staged++ % GPT2::kSlots);
    event_wait(model->staged[slot]);
    Inputs& host = model->staging[slot];
    Inputs& device = model->inputs;
    memcpy(host.tokens, tokens, N * sizeof(int));
    copy_to_device(device.tokens, host.tokens, N * sizeof(int), model->stream);
    if (targets) {
        memcpy(host.targets, targets, N * sizeof(int));
        copy_to_device(device.targets, host.targets, N * sizeof(int), model->stream);
        TokenBuckets host_buckets = {};
        build_token_buckets(&host_buckets, host.order, host.segments, host.splits, tokens, (int)N, model->config.Vp);
        copy_to_device(device.order, host.order, N * sizeof(int), model->stream);
        copy_to_device(device.segments, host.segments, host_buckets.num_segments * sizeof(int4), model->stream);
        copy_to_device(device.splits, host.splits, host_buckets.num_splits * sizeof(int4), model->stream);
        model->buckets = {device.order, device.segments, device.splits, host_buckets.num_segments, host_buckets.num_splits};
    }
    event_record(model->staged[slot], model->stream);
}

static Params gpt2_params(const GPT2* model, int l) { return param_views<const floatX>(model->params, model->param_specs, l); }

// Activations of a forward over (B,T) from the inputs on the device, up to lnf.
static void gpt2_forward(GPT2* model, int B, int T) {
    const Config& c = model->config;
    const Options& o = model->options;
    const int N = B * T, C = c.C, NH = c.NH, HS = C / NH;
    const bool gelu_in_gemm = o.gelu_fusion >= 1 && o.recompute == 0;
    Stream stream = model->stream;
    Params p = gpt2_params(model, 0);
    Acts a = act_views(model->acts, model->act_specs, 0);
    encoder_forward(a.encoded, model->inputs.tokens, p.wte, p.wpe, B, T, C, stream);
    layernorm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, a.encoded, p.ln1w, p.ln1b, N, C, stream);
    const floatX* residual = a.encoded;                                             // (B,T,C) into this layer
    for (int l = 0; l < c.L; l++) {
        p = gpt2_params(model, l);
        a = act_views(model->acts, model->act_specs, l);
        matmul_forward({.out = a.qkv, .inp = a.ln1, .weight = p.qkvw, .bias = p.qkvb, .residual = nullptr,
                        .pre_gelu = nullptr, .N = N, .C = C, .OC = 3 * C}, stream);
        attention_forward(a.atty, a.att_lse, a.qkv, B, T, NH, HS, stream);
        if (o.residual_in_gemm) {
            matmul_forward({.out = a.residual2, .inp = a.atty, .weight = p.attprojw, .bias = p.attprojb,
                            .residual = residual, .pre_gelu = nullptr, .N = N, .C = C, .OC = C}, stream);
            layernorm_forward(a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, p.ln2w, p.ln2b, N, C, stream);
        } else {
            matmul_forward({.out = a.dnarrow, .inp = a.atty, .weight = p.attprojw, .bias = p.attprojb,
                            .residual = nullptr, .pre_gelu = nullptr, .N = N, .C = C, .OC = C}, stream);
            residual_layernorm_forward(a.residual2, a.ln2, a.ln2_mean, a.ln2_rstd, residual, a.dnarrow, p.ln2w, p.ln2b,
                                       N, C, stream);
        }
        matmul_forward({.out = gelu_in_gemm ? a.fch_gelu : a.fch, .inp = a.ln2, .weight = p.fcw, .bias = p.fcb,
                        .residual = nullptr, .pre_gelu = gelu_in_gemm ? a.fch : nullptr, .N = N, .C = C, .OC = 4 * C}, stream);
        if (!gelu_in_gemm) { gelu_forward(a.fch_gelu, a.fch, (size_t)N * 4 * C, stream); }

        // the LayerNorm after this layer: the next layer's first, or the final one
        const bool last = l + 1 == c.L;
        Params q = gpt2_params(model, last ? l : l + 1);
        Acts next = act_views(model->acts, model->act_specs, last ? l : l + 1);
        floatX* ln = last ? a.lnf : next.ln1;
        float* mean = last ? a.lnf_mean : next.ln1_mean;
        float* rstd = last ? a.lnf_rstd : next.ln1_rstd;
        const floatX *weight = last ? q.lnfw : q.ln1w, *bias = last ? q.lnfb : q.ln1b;
        if (o.residual_in_gemm) {
            matmul_forward({.out = a.residual3, .inp = a.fch_gelu, .weight = p.fcprojw, .bias = p.fcprojb,
                            .residual = a.residual2, .pre_gelu = nullptr, .N = N, .C = 4 * C, .OC = C}, stream);
            layernorm_forward(ln, mean, rstd, a.residual3, weight, bias, N, C, stream);
        } else {
            matmul_forward({.out = a.dnarrow, .inp = a.fch_gelu, .weight = p.fcprojw, .bias = p.fcprojb,
                            .residual = nullptr, .pre_gelu = nullptr, .N = N, .C = 4 * C, .OC = C}, stream);
            residual_layernorm_forward(a.residual3, ln, mean, rstd, a.residual2, a.dnarrow, weight, bias, N, C, stream);
        }
        residual = a.residual3;
    }
}

// Logits of `rows` rows of lnf from row `first` on, into the start of the logits buffer: (rows, Vp).
static void gpt2_logits(GPT2* model, int first, int rows) {
    const Config& c = model->config;
    Acts a = act_views(model->acts, model->act_specs, 0);
    matmul_forward({.out = a.logits, .inp = a.lnf + (size_t)first * c.C, .weight = gpt2_params(model, 0).wte, .bias = nullptr,
                    .residual = nullptr, .pre_gelu = nullptr, .N = rows, .C = c.C, .OC = c.Vp}, model->stream);
}

// Forward, losses of every position, and state->loss (+)= weight * sum of losses. LossAndGrad leaves dlogits of
// dloss * sum(losses) where the logits were.
static void gpt2_loss(GPT2* model, int B, int T, ClassifierMode mode, float dloss, float weight, Accumulate acc) {
    const int N = B * T;
    gpt2_forward(model, B, T);
    gpt2_logits(model, 0, N);
    Acts a = act_views(model->acts, model->act_specs, 0);
    classifier(a.logits, a.losses, model->inputs.targets, dloss, &model->state->update.loss_scale, N, model->config.V,
               model->config.Vp, mode, model->stream);
    loss_sum(&model->state->loss, a.losses, weight, acc, N, model->stream);
}

static Grad gpt2_grad(GPT2* model, ParamId id, int l, Accumulate acc) {
    const ParamSpec& s = model->param_specs[id];
    RoundKey key = {model->options.seed, model->step, model->micro, (uint32_t)id};
    return make_grad(model->grads, model->options.grads_bf16, s.offset + l * s.stride, acc, key);
}

// Gradients of every parameter from dlogits. The first micro-step stores, later ones add: no memset.
static void gpt2_backward(GPT2* model, int B, int T, Accumulate acc) {
    const Config& c = model->config;
    const Options& o = model->options;
    const int N = B * T, C = c.C, NH = c.NH, HS = C / NH;
    const Grad none = make_grad(nullptr, false, 0, acc, RoundKey{});
    Stream stream = model->stream;
    float* scratch = model->scratch;
    auto grad = [&](ParamId id, int l) { return gpt2_grad(model, id, l, acc); };

    Params p = gpt2_params(model, 0);
    Acts a = act_views(model->acts, model->act_specs, c.L - 1);
    matmul_backward_weight(grad(PARAM_wte, 0), scratch, a.logits, a.lnf, N, C, c.Vp, stream);
    matmul_backward_input({.dinp = a.dnarrow, .dout = a.logits, .weight = p.wte, .pre_gelu = nullptr, .N = N, .C = C,
                           .OC = c.Vp}, stream);
    layernorm_backward({.dresidual = a.dresidual, .dweight = grad(PARAM_lnfw, 0), .dbias = grad(PARAM_lnfb, 0),
                        .dcolsum = grad(PARAM_fcprojb, c.L - 1), .scratch = scratch, .dresidual_acc = Accumulate::No,
                        .dout = a.dnarrow, .inp = a.residual3, .weight = p.lnfw, .mean = a.lnf_mean, .rstd = a.lnf_rstd,
                        .N = N, .C = C}, stream);
    for (int l = c.L - 1; l >= 0; l--) {
        p = gpt2_params(model, l);
        a = act_views(model->acts, model->act_specs, l);
        const floatX* residual = l == 0 ? a.encoded : act_views(model->acts, model->act_specs, l - 1).residual3;
        // MLP
        if (o.recompute >= 1) { gelu_forward(a.fch_gelu, a.fch, (size_t)N * 4 * C, stream); }
        matmul_backward_weight(grad(PARAM_fcprojw, l), scratch, a.dresidual, a.fch_gelu, N, 4 * C, C, stream);
        const bool gelu_in_gemm = o.gelu_fusion >= 2 && o.recompute == 0;
        matmul_backward_input({.dinp = a.dwide, .dout = a.dresidual, .weight = p.fcprojw,
                               .pre_gelu = gelu_in_gemm ? a.fch : nullptr, .N = N, .C = 4 * C, .OC = C}, stream);
        if (gelu_in_gemm) { bias_backward(grad(PARAM_fcb, l), scratch, a.dwide, N, 4 * C, stream); }
        else { gelu_backward_inplace(a.dwide, grad(PARAM_fcb, l), scratch, a.fch, N, 4 * C, stream); }
        if (o.recompute >= 2) { layernorm_forward(a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, p.ln2w, p.ln2b, N, C, stream); }
        matmul_backward_weight(grad(PARAM_fcw, l), scratch, a.dwide, a.ln2, N, C, 4 * C, stream);
        matmul_backward_input({.dinp = a.dnarrow, .dout = a.dwide, .weight = p.fcw, .pre_gelu = nullptr, .N = N, .C = C,
                               .OC = 4 * C}, stream);
        layernorm_backward({.dresidual = a.dresidual, .dweight = grad(PARAM_ln2w, l), .dbias = grad(PARAM_ln2b, l),
                            .dcolsum = grad(PARAM_attprojb, l), .scratch = scratch, .dresidual_acc = Accumulate::Yes,
                            .dout = a.dnarrow, .inp = a.residual2, .weight = p.ln2w, .mean = a.ln2_mean, .rstd = a.ln2_rstd,
                            .N = N, .C = C}, stream);
        // attention
        matmul_backward_weight(grad(PARAM_attprojw, l), scratch, a.dresidual, a.atty, N, C, C, stream);
        matmul_backward_input({.dinp = a.dnarrow, .dout = a.dresidual, .weight = p.attprojw, .pre_gelu = nullptr, .N = N,
                               .C = C, .OC = C}, stream);
        attention_backward(a.dwide, scratch, a.dnarrow, a.atty, a.qkv, a.att_lse, B, T, NH, HS, stream);
        bias_backward(grad(PARAM_qkvb, l), scratch, a.dwide, N, 3 * C, stream);
        if (o.recompute >= 2) { layernorm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, residual, p.ln1w, p.ln1b, N, C, stream); }
        matmul_backward_weight(grad(PARAM_qkvw, l), scratch, a.dwide, a.ln1, N, C, 3 * C, stream);
        matmul_backward_input({.dinp = a.dnarrow, .dout = a.dwide, .weight = p.qkvw, .pre_gelu = nullptr, .N = N, .C = C,
                               .OC = 3 * C}, stream);
        layernorm_backward({.dresidual = a.dresidual, .dweight = grad(PARAM_ln1w, l), .dbias = grad(PARAM_ln1b, l),
                            .dcolsum = l > 0 ? grad(PARAM_fcprojb, l - 1) : none, .scratch = scratch,
                            .dresidual_acc = Accumulate::Yes, .dout = a.dnarrow, .inp = residual, .weight = p.ln1w,
                            .mean = a.ln1_mean, .rstd = a.ln1_rstd, .N = N, .C = C}, stream);
    }
    // wte already holds the LM head's part of its gradient
    encoder_backward(gpt2_grad(model, PARAM_wte, 0, Accumulate::Yes), grad(PARAM_wpe, 0), scratch, a.dresidual,
                     model->buckets, B, T, c.maxT, C, stream);
}

// One micro-step of `micro_steps`: gradients of the mean loss over the total batch.
static void gpt2_micro_step(GPT2* model, const int* tokens, const int* targets, int B, int T, int micro, int micro_steps) {
    const Accumulate acc = micro == 0 ? Accumulate::No : Accumulate::Yes;
    const float weight = (float)(1.0 / ((double)B * T * micro_steps));
    model->micro = (uint32_t)micro;
    gpt2_set_inputs(model, tokens, targets, B, T);
    gpt2_loss(model, B, T, ClassifierMode::LossAndGrad, weight, weight, acc);
    gpt2_backward(model, B, T, acc);
}

// Norm, the decision to skip, AdamW: all decided on the device.
static void gpt2_update(GPT2* model, float lr, float beta1, float beta2, float eps, float max_norm) {
    const UpdatePolicy policy = {kFp16, 1000, kMaxLossScale};
    global_norm(&model->state->update, model->scratch, model->grads, model->options.grads_bf16, model->arena_elems, max_norm,
                policy, model->stream);
    adamw_update({.params = model->params, .master = model->master, .m = model->m, .v = model->v, .grads = model->grads,
                  .grads_bf16 = model->options.grads_bf16, .state = &model->state->update,
                  .segments = model->device_segments, .num_segments = NUM_PARAMS, .n = model->arena_elems, .lr = lr,
                  .beta1 = beta1, .beta2 = beta2, .eps = eps,
                  .key = RoundKey{model->options.seed, model->step, 0, NUM_PARAMS}}, model->stream);
    model->step++;
}

static DeviceState gpt2_read_state(GPT2* model) {       // waits for the device
    DeviceState state;
    copy_to_host(&state, model->state, sizeof(state), model->stream);
    stream_sync(model->stream);
    return state;
}

// Mean loss of the next `batches` batches of the loader, from its first sample. Touches neither gradients nor weights.
static float gpt2_validate(GPT2* model, DataLoader* loader, int B, int T, int batches) {
    const float weight = (float)(1.0 / ((double)B * T * batches));
    dataloader_seek(loader, 0);
    for (int i = 0; i < batches; i++) {
        dataloader_next(loader);
        gpt2_set_inputs(model, loader->inputs, loader->targets, B, T);
        gpt2_loss(model, B, T, ClassifierMode::LossOnly, 0.0f, weight, i == 0 ? Accumulate::No : Accumulate::Yes);
    }
    return gpt2_read_state(model).loss;
}

// == 9 checkpoint ==
// model_%08d.bin: 256 int32 header, then the tensors in table order, tight. Version 3 holds fp32, 5 bf16 (llm.c's
// numbers); either loads in any build. FP16 builds save version 3 from the master weights.
constexpr int kModelMagic = 20240326, kModelFp32 = 3, kModelBf16 = 5;

// A model from a header's numbers or a descriptor's: what the kernels and the file format need, or a sentence why not.
static std::string config_error(const Config& c) {
    if (c.maxT < 1 || c.V < 2 || c.L < 1 || c.NH < 1 || c.C < 1) {
        return format("T=%d V=%d L=%d NH=%d C=%d: each must be at least 1, V at least 2", c.maxT, c.V, c.L, c.NH, c.C);
    }
    if (c.C % c.NH != 0) { return format("C=%d is not a multiple of NH=%d (C = heads x head size)", c.C, c.NH); }
    if (c.V > 65536) { return format("V=%d: token shards hold 16-bit ids, so V is at most 65536", c.V); }
    if (c.Vp < c.V || c.Vp % 8 != 0) { return format("the padded vocabulary %d must be a multiple of 8 and at least V=%d", c.Vp, c.V); }
    if (c.L > 10000 || c.C > (1 << 20) || c.maxT > (1 << 24)) {
        return format("L=%d C=%d T=%d: at most 10000 layers, 2^20 channels, 2^24 positions", c.L, c.C, c.maxT);
    }
    return "";
}

static Config checkpoint_read_header(const char* path, FILE* f, int* version) {
    int header[256];
    fread_check(header, sizeof(int), 256, f, path);
    if (header[0] != kModelMagic) {
        die("'%s' is not a model checkpoint: magic number %d, expected %d\nhint: -e takes a model_*.bin or a descriptor such as d12",
            path, header[0], kModelMagic);
    }
    *version = header[1];
    if (*version != kModelFp32 && *version != kModelBf16) {
        die("'%s' has checkpoint version %d; this program reads 3 (fp32) and 5 (bf16)", path, *version);
    }
    Config c = {};
    c.maxT = header[2], c.V = header[3], c.L = header[4], c.NH = header[5], c.C = header[6], c.Vp = header[7];
    std::string error = config_error(c);
    if (!error.empty()) { die("'%s' has a bad header: %s", path, error.c_str()); }
    ParamSpec specs[NUM_PARAMS];
    param_specs(specs, c);
    int64_t expected = sizeof(header), elem_bytes = *version == kModelFp32 ? 4 : 2;
    for (const ParamSpec& s : specs) { expected += (int64_t)(s.elems * s.copies) * elem_bytes; }
    if (file_size(path) != expected) {
        die("'%s' has %lld bytes; its header (L=%d NH=%d C=%d T=%d V=%d, padded %d, version %d) means %lld", path,
            (long long)file_size(path), c.L, c.NH, c.C, c.maxT, c.V, c.Vp, *version, (long long)expected);
    }
    return c;
}

static Config checkpoint_config(const char* path) {
    FILE* f = fopen_check(path, "rb");
    int version;
    Config c = checkpoint_read_header(path, f, &version);
    fclose(f);
    return c;
}

static void checkpoint_load(GPT2* model, const char* path) {
    FILE* f = fopen_check(path, "rb");
    int version;
    checkpoint_read_header(path, f, &version);
    std::vector<float> values;
    std::vector<uint16_t> raw;
    for (int i = 0; i < NUM_PARAMS; i++) {
        const ParamSpec& s = model->param_specs[i];
        values.resize(s.elems);
        for (int l = 0; l < s.copies; l++) {
            if (version == kModelFp32) {
                fread_check(values.data(), sizeof(float), s.elems, f, path);
            } else {
                raw.resize(s.elems);
                fread_check(raw.data(), sizeof(uint16_t), s.elems, f, path);
                for (size_t k = 0; k < s.elems; k++) { values[k] = bf16_to_float(raw[k]); }
            }
            // whatever a file holds in the padded vocabulary, it must not leak into the sums
            for (size_t k = s.live_rows * s.cols; k < s.elems; k++) { values[k] = 0.0f; }
            gpt2_set_param(model, i, l, values.data());
        }
    }
    fclose(f);
}

static void checkpoint_save(GPT2* model, const std::string& path) {
    const Config& c = model->config;
    const bool bf16 = strcmp(PRECISION_NAME, "BF16") == 0;
    int header[256] = {kModelMagic, bf16 ? kModelBf16 : kModelFp32, c.maxT, c.V, c.L, c.NH, c.C, c.Vp};
    AtomicFile out = atomic_open(path);
    atomic_write(&out, header, sizeof(header));
    std::vector<float> values;
    std::vector<uint16_t> raw;
    for (int i = 0; i < NUM_PARAMS; i++) {
        const ParamSpec& s = model->param_specs[i];
        values.resize(s.elems);
        for (int l = 0; l < s.copies; l++) {
            gpt2_get_param(model, i, l, values.data(), !bf16);
            if (!bf16) { atomic_write(&out, values.data(), s.elems * sizeof(float)); continue; }
            raw.resize(s.elems);
            for (size_t k = 0; k < s.elems; k++) { raw[k] = bf16_round_nearest(values[k]); }    // exact: bf16 already
            atomic_write(&out, raw.data(), s.elems * sizeof(uint16_t));
        }
    }
    atomic_commit(&out);
}

// ---- descriptors ----
// "d12" (GPT-2: 124M 350M 774M 1558M are d12 d24 d36 d48), "gpt3:c768", or explicit "L4,NH4,C128,T128,V256".
static Config descriptor_config(const char* text) {
    struct Size { int key, L, C, HS; };
    static const Size gpt2_sizes[] = {{6, 6, 384, 64}, {12, 12, 768, 64}, {24, 24, 1024, 64}, {36, 36, 1280, 64}, {48, 48, 1600, 64}};
    // GPT-3 (Brown et al. 2020, table 2.1), by channels; c384 is a smaller one for experiments
    static const Size gpt3_sizes[] = {{384, 6, 384, 64}, {768, 12, 768, 64}, {1024, 24, 1024, 64}, {1536, 24, 1536, 96},
                                      {2048, 24, 2048, 128}, {2560, 32, 2560, 80}, {4096, 32, 4096, 128}};
    const char* hint = "\nhint: -e takes a model_*.bin, d6 d12 d24 d36 d48, gpt3:c384 c768 c1024 c1536 c2048 c2560 c4096, or L4,NH4,C128,T128,V256";
    Config c = {};
    int key = 0, used = 0;
    const size_t length = strlen(text);
    auto from_table = [&](const Size* sizes, size_t count, int maxT) {
        for (size_t i = 0; i < count; i++) {
            if (sizes[i].key == key) { c.maxT = maxT, c.V = 50257, c.L = sizes[i].L, c.C = sizes[i].C, c.NH = sizes[i].C / sizes[i].HS; }
        }
    };
    if (sscanf(text, "d%d%n", &key, &used) == 1 && (size_t)used == length) {
        from_table(gpt2_sizes, sizeof(gpt2_sizes) / sizeof(Size), 1024);
    } else if (sscanf(text, "gpt3:c%d%n", &key, &used) == 1 && (size_t)used == length) {
        from_table(gpt3_sizes, sizeof(gpt3_sizes) / sizeof(Size), 2048);
    } else {
        // letters in any order, each once
        struct Field { const char* letters; int* value; } fields[] = {{"L", &c.L}, {"NH", &c.NH}, {"C", &c.C}, {"T", &c.maxT}, {"V", &c.V}};
        int seen = 0;
        for (const char* s = text; *s != '\0';) {
            char letters[3] = {};
            int value = 0;
            if (sscanf(s, "%2[A-Z]%9d%n", letters, &value, &used) != 2) { seen = -1; break; }
            bool known = false;
            for (Field& field : fields) {
                if (strcmp(letters, field.letters) == 0 && *field.value == 0) { *field.value = value; known = true; seen++; }
            }
            s += used;
            if (!known || (*s != '\0' && *s++ != ',')) { seen = -1; break; }
        }
        if (seen != 5) { die("-e '%.80s' is neither a file nor a model descriptor%s", text, hint); }
    }
    if (c.L == 0) { die("-e '%.80s': there is no such size%s", text, hint); }
    c.Vp = (int)round_up((int64_t)c.V, (int64_t)128);
    std::string error = config_error(c);
    if (!error.empty()) { die("-e '%.80s': %s", text, error.c_str()); }
    return c;
}

// == 10 run configuration ==
struct RunConfig {
    const char *train_data, *val_data, *model, *output_dir, *max_steps_text, *prompt;
    int B, T, recompute, gelu_fusion, residual, grad_dtype;
    int64_t total_batch;            // tokens per optimizer step
    int64_t max_steps;
    int val_every, val_batches, sample_every, sample_tokens, num_samples, top_k;
    float temperature;
    float lr, final_fraction, weight_decay, beta1, beta2, eps, grad_clip;
    int64_t warmup;
    int schedule, overfit, tf32, master, shuffle;
    int64_t seed;
};
static RunConfig run;

#define DATA_DIR "dev/data/tinyshakespeare/"
static const Flag kFlags[] = {
    // letters name            type         where                default                       min max  options, help
    {"i",   "train-data",      FLAG_STRING, &run.train_data,     DATA_DIR "tiny_shakespeare_train.bin", 1, 0, nullptr,
        "training shards (glob)"},
    {"j",   "val-data",        FLAG_STRING, &run.val_data,       DATA_DIR "tiny_shakespeare_val.bin", 1, 0, nullptr,
        "validation shards (glob)"},
    {"e",   "model",           FLAG_STRING, &run.model,          "d12",     1, 0, nullptr,
        "checkpoint model_*.bin, or d12 d24 d36 d48, gpt3:c768, L4,NH4,C128,T128,V256"},
    {"o",   "output-dir",      FLAG_STRING, &run.output_dir,     "",        0, 0, nullptr,
        "folder for main.log, metrics.jsonl, run.json, model_*.bin (none: nothing is written)"},
    {"b",   "micro-batch",     FLAG_INT,    &run.B,              "4",       1, 65536, nullptr,
        "rows per GPU per micro-step (B)"},
    {"t",   "sequence-length", FLAG_INT,    &run.T,              "0",       0, 1 << 24, nullptr,
        "tokens per row (T); 0: the model's longest"},
    {"z,d", "total-batch",     FLAG_INT64,  &run.total_batch,    "0",       0, 1e15, nullptr,
        "tokens per optimizer step, a multiple of B*T; 0: B*T, one micro-step"},
    {"x",   "max-steps",       FLAG_STRING, &run.max_steps_text, "epoch",   1, 0, nullptr,
        "optimizer steps, or `epoch`: once through the training data; 0: evaluate, or generate with --prompt"},
    {"l",   "learning-rate",   FLAG_FLOAT,  &run.lr,             "3e-4",    0, 100, nullptr,
        "peak learning rate"},
    {"k",   "lr-schedule",     FLAG_ENUM,   &run.schedule,       "cosine",  0, 0, kLrKinds,
        "learning rate schedule"},
    {"u",   "warmup",          FLAG_INT64,  &run.warmup,         "0",       0, 1e15, nullptr,
        "steps of linear warm-up"},
    {"q",   "final-fraction",  FLAG_FLOAT,  &run.final_fraction, "0",       0, 1, nullptr,
        "learning rate at the last step, as a fraction of the peak"},
    {"c",   "weight-decay",    FLAG_FLOAT,  &run.weight_decay,   "0",       0, 10, nullptr,
        "AdamW's decay of tensors with two dimensions"},
    {"",    "beta1",           FLAG_FLOAT,  &run.beta1,          "0.9",     0, 0.9999999, nullptr, "AdamW"},
    {"",    "beta2",           FLAG_FLOAT,  &run.beta2,          "0.95",    0, 0.9999999, nullptr, "AdamW"},
    {"",    "eps",             FLAG_FLOAT,  &run.eps,            "1e-8",    0, 1, nullptr, "AdamW"},
    {"",    "grad-clip",       FLAG_FLOAT,  &run.grad_clip,      "1",       0, 1e30, nullptr,
        "largest gradient norm; 0: no clipping"},
    {"",    "seed",            FLAG_INT64,  &run.seed,           "1337",    0, 9e15, nullptr,
        "initial weights, data order, samples, stochastic rounding"},
    {"",    "shuffle",         FLAG_BOOL,   &run.shuffle,        "1",       0, 1, nullptr,
        "training rows in an order shuffled by the seed, another one each epoch; 0: as they lie in the shards"},
    {"v",   "val-every",       FLAG_INT,    &run.val_every,      "20",      0, INT_MAX, nullptr,
        "validate every so many steps, and at the end; 0: never"},
    {"m",   "val-batches",     FLAG_INT,    &run.val_batches,    "20",      1, INT_MAX, nullptr,
        "batches per validation, at most the whole set"},
    {"s",   "sample-every",    FLAG_INT,    &run.sample_every,   "20",      0, INT_MAX, nullptr,
        "generate text every so many steps, and at the end; 0: never"},
    {"g",   "sample-tokens",   FLAG_INT,    &run.sample_tokens,  "64",      1, 1 << 24, nullptr,
        "tokens per sample"},
    {"",    "prompt",          FLAG_STRING, &run.prompt,         "",        0, 0, nullptr,
        "text that samples go on from; empty: a new document"},
    {"",    "num-samples",     FLAG_INT,    &run.num_samples,    "1",       1, 1000000, nullptr, "samples each time"},
    {"",    "temperature",     FLAG_FLOAT,  &run.temperature,    "1",       0, 100, nullptr,
        "of sampling; 0: always the likeliest token"},
    {"",    "top-k",           FLAG_INT,    &run.top_k,          "0",       0, 65536, nullptr,
        "sample among the k likeliest tokens; 0: among all"},
    {"a",   "overfit",         FLAG_BOOL,   &run.overfit,        "0",       0, 1, nullptr,
        "train on the first batch over and over"},
    {"f",   "tf32",            FLAG_BOOL,   &run.tf32,           "1",       0, 1, nullptr,
        "TF32 tensor cores for the GEMMs of an FP32 build"},
    {"w",   "master-weights",  FLAG_BOOL,   &run.master,         "1",       0, 1, nullptr,
        "fp32 master copies of 16-bit weights; 0: weights are rounded stochastically"},
    {"r",   "recompute",       FLAG_INT,    &run.recompute,      "0",       0, 2, nullptr,
        "in backward: 0 nothing, 1 GELU, 2 GELU and LayerNorms (less memory, more time)"},
    {"ge",  "gelu-fusion",     FLAG_INT,    &run.gelu_fusion,    "0",       0, 2, nullptr,
        "GELU in the GEMM's epilogue: 0 no, 1 forward, 2 forward and backward (needs -r 0)"},
    {"",    "residual",        FLAG_ENUM,   &run.residual,       "gemm",    0, 0, "gemm|layernorm",
        "where the residual is added: in the projection GEMM's epilogue, or in the next LayerNorm"},
    {"",    "grad-dtype",      FLAG_ENUM,   &run.grad_dtype,     "fp32",    0, 0, "fp32|bf16",
        "gradient accumulation; bf16 sums are rounded stochastically"},
};
constexpr int kNumFlags = sizeof(kFlags) / sizeof(kFlags[0]);

// Checks over more than one flag, before anything is allocated.
static Config config_check() {
    Config c = file_size(run.model) >= 0 || strchr(run.model, '/') || strstr(run.model, ".bin")
             ? checkpoint_config(run.model) : descriptor_config(run.model);
    if (flags_given(kFlags, kNumFlags, "total-batch") && run.total_batch <= 3) {
        die("-z %lld: -z is the total batch in tokens per step, not a ZeRO stage\nhint: the ZeRO stage will be -zs, which "
            "this version does not have; give -z a multiple of B*T or leave it out", (long long)run.total_batch);
    }
    if (run.T == 0) { run.T = c.maxT; }
    if (run.T > c.maxT) {
        die("-t %d is longer than the model's longest sequence, %d\nhint: use -t %d or less, or a model with more positions",
            run.T, c.maxT, c.maxT);
    }
    const int64_t tokens = (int64_t)run.B * run.T;
    if (tokens > INT_MAX) { die("-b %d x -t %d = %lld tokens in a micro-step: at most %d", run.B, run.T, (long long)tokens, INT_MAX); }
    if (run.total_batch == 0) { run.total_batch = tokens; }
    if (run.total_batch % tokens != 0) {
        const int64_t below = run.total_batch / tokens * tokens;
        die("-z %lld is not a multiple of B*T = %d*%d = %lld\nhint: use -z %lld", (long long)run.total_batch, run.B, run.T,
            (long long)tokens, (long long)(below > 0 ? below : tokens));
    }
    if (run.gelu_fusion > 0 && run.recompute > 0) {
        die("-ge %d needs -r 0: a recomputed GELU works on rounded values and would differ from the fused one", run.gelu_fusion);
    }
#ifdef GPT2_CPU
    if (run.grad_dtype != 0) { die("--grad-dtype bf16 needs the CUDA program; the CPU build accumulates in fp32"); }
    if (run.gelu_fusion != 0) { die("-ge %d needs the CUDA program; the CPU build has no GEMM epilogues", run.gelu_fusion); }
#endif
    run.max_steps = -1;
    if (strcmp(run.max_steps_text, "epoch") != 0) {
        char* end;
        errno = 0;
        run.max_steps = strtoll(run.max_steps_text, &end, 10);
        if (end == run.max_steps_text || *end != '\0' || errno != 0 || run.max_steps < 0) {
            die("-x %.40s: wants a whole number of steps, 0 or more, or `epoch`", run.max_steps_text);
        }
    }
    if (run.max_steps == 0 && run.output_dir[0] != '\0') { die("-x 0 trains nothing, so there is nothing to write to -o %s", run.output_dir); }
    return c;
}

static Options run_options() {
    Options o = {};
    o.recompute = run.recompute;
    o.gelu_fusion = run.gelu_fusion;
    o.master = run.master != 0;
    o.grads_bf16 = run.grad_dtype == 1;
    o.residual_in_gemm = run.residual == 0;
    o.tf32 = run.tf32 != 0;
    o.weight_decay = run.weight_decay;
    o.seed = (uint64_t)run.seed;
    return o;
}

// == 11 training loop ==
static volatile sig_atomic_t stop_requested = 0;
static void request_stop(int) { stop_requested = 1; }

static double seconds_now() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// The tokenizer that fits the vocabulary: GPT-2's for 50257, bytes for 256, none otherwise (samples are printed as ids).
static bool text_init(Tokenizer* tokenizer, int V) {
    if (V == 256) { tokenizer_init_bytes(tokenizer); return true; }
    if (V != 50257) { return false; }
    if (file_size(tokenizer_default_path().c_str()) < 0) {
        fprintf(stderr, "warning: %s is not there: samples are printed as token ids\n", tokenizer_default_path().c_str());
        return false;
    }
    tokenizer_init_bpe(tokenizer, nullptr);
    return true;
}

// Text after the prompt, token by token. The whole prefix is run again for each token; T is rounded up, so that few
// shapes occur, with tokens that a causal model does not see. Draws from its own random stream and touches neither
// weights nor training's state, so training's bits do not depend on it.
static void generate(GPT2* model, const Tokenizer* tokenizer, bool has_text, int64_t step) {
    const Config& c = model->config;
    const int limit = model->T;
    const int start = has_text ? (int)tokenizer->eot : 0;       // what stands before each document
    std::vector<uint32_t> prompt;
    if (run.prompt[0] != '\0') {
        if (!has_text) { die("--prompt needs a tokenizer: there is none for V=%d (256: bytes, 50257: GPT-2)", c.V); }
        tokenizer_encode(tokenizer, run.prompt, strlen(run.prompt), prompt);
    }
    if ((int)prompt.size() + 1 >= limit) {
        die("the prompt has %zu tokens; with -t %d at most %d fit", prompt.size(), limit, limit - 2);
    }
    std::vector<float> logits(c.V);
    std::vector<floatX> raw(c.V);
    std::vector<float> workspace(c.V);
    for (int sample = 0; sample < run.num_samples; sample++) {
        std::vector<int> tokens(limit, start);
        int n = 1;
        for (uint32_t id : prompt) { tokens[n++] = (int)id; }
        const int end = std::min(limit, n + run.sample_tokens);
        printf("sample %d at step %lld:\n%s", sample + 1, (long long)step, run.prompt);
        for (; n < end; n++) {
            const int T = std::min(limit, round_up(n, 64));
            gpt2_set_inputs(model, tokens.data(), nullptr, 1, T);
            gpt2_forward(model, 1, T);
            gpt2_logits(model, n - 1, 1);
            copy_to_host(raw.data(), act_views(model->acts, model->act_specs, 0).logits, c.V * sizeof(floatX), model->stream);
            stream_sync(model->stream);
            for (int i = 0; i < c.V; i++) { logits[i] = (float)raw[i]; }
            const double coin = rand_unit((uint64_t)run.seed, RAND_SAMPLE, (uint32_t)sample, (uint64_t)step << 24 | (uint64_t)n);
            const int token = sample_token(workspace.data(), logits.data(), c.V, run.temperature, run.top_k, coin);
            if (token == start) { break; }      // the document is over
            tokens[n] = token;
            if (has_text) {
                const std::string& bytes = tokenizer_decode(tokenizer, (uint32_t)token);
                fwrite(bytes.data(), 1, bytes.size(), stdout);
            } else {
                printf("%d ", token);
            }
            fflush(stdout);
        }
        printf("\n---\n");
    }
}

static std::string duration_text(double seconds) {
    const int64_t s = (int64_t)(seconds + 0.5);
    return format("%lld:%02d:%02d", (long long)(s / 3600), (int)(s / 60 % 60), (int)(s % 60));
}

// What a finished step reports. The host enqueues step s+1 before it waits for the report of step s, so the device
// always has work.
struct Reports {
    static const int kSlots = 2;
    DeviceState* slots;         // pinned
    Event ready[kSlots];
    int64_t pending;            // the step whose report is still out; -1: none
    double last_time;           // when the step before was seen to end
    double ms_sum;
    int64_t ms_count;
};

static void report_step(Reports* r, Logger* logger, const LrSchedule& schedule) {
    if (r->pending < 0) { return; }
    const int64_t step = r->pending;
    r->pending = -1;
    const int slot = (int)(step % Reports::kSlots);
    event_wait(r->ready[slot]);
    const DeviceState state = r->slots[slot];
    const double now = seconds_now(), ms = (now - r->last_time) * 1e3;
    r->last_time = now;
    if (step > 0) { r->ms_sum += ms; r->ms_count++; }      // the first step also loads kernels
    const double lr = lr_at(schedule, step);
    const double tokens_per_s = (double)run.total_batch / ms * 1e3;
    const double mean_ms = r->ms_count > 0 ? r->ms_sum / (double)r->ms_count : ms;
    printf("step %lld/%lld | loss %.6f | lr %.2e | norm %.4f | %.1f ms | %.0f tok/s | ETA %s\n", (long long)step + 1,
           (long long)run.max_steps, state.loss, lr, state.update.norm, ms, tokens_per_s,
           duration_text((double)(run.max_steps - step - 1) * mean_ms * 1e-3).c_str());
    fflush(stdout);
    logger_train(logger, {step, state.loss, lr, state.update.norm, (step + 1) * run.total_batch, ms, tokens_per_s});
    if (state.update.skip) {
        fprintf(stderr, "step %lld: the gradient is not finite (norm %f, loss %f): update skipped\n", (long long)step + 1,
                state.update.norm, state.loss);
        if (state.update.skipped_in_a_row >= kMaxSkipsInARow) {
            die("%d updates in a row were skipped for a non-finite gradient: the run stops and writes nothing\nhint: a smaller "
                "-l or a longer -u; look at the data", state.update.skipped_in_a_row);
        }
    }
}

static void train(GPT2* model, DataLoader* train_loader, DataLoader* val_loader, Logger* logger) {
    Tokenizer tokenizer;
    const bool has_text = text_init(&tokenizer, model->config.V);
    const LrSchedule schedule = {run.schedule, run.lr, run.warmup, run.max_steps, run.final_fraction};
    const int micro_steps = (int)(run.total_batch / ((int64_t)run.B * run.T));
    Reports reports = {};
    reports.slots = (DeviceState*)pinned_malloc(Reports::kSlots * sizeof(DeviceState), "step reports");
    for (Event& e : reports.ready) { e = event_create(); }
    reports.pending = -1;

    for (int64_t step = 0; step <= run.max_steps; step++) {
        const bool last = step == run.max_steps || stop_requested;
        const bool validate = run.val_every > 0 && (step % run.val_every == 0 || last);
        const bool sample = run.sample_every > 0 && ((step > 0 && step % run.sample_every == 0) || last);
        if (validate || sample || last) { report_step(&reports, logger, schedule); }
        if (validate) {
            const int64_t whole = val_loader->samples_per_epoch / run.B;
            const float loss = gpt2_validate(model, val_loader, run.B, run.T,
                                             (int)std::max((int64_t)1, std::min((int64_t)run.val_batches, whole)));
            printf("val loss %.6f\n", loss);
            fflush(stdout);
            logger_val(logger, step, loss);
        }
        if (sample) { generate(model, &tokenizer, has_text, step); }
        if (last) {
            if (stop_requested) { printf("stopped by a signal after step %lld\n", (long long)step); }
            break;
        }
        if (reports.pending < 0) { reports.last_time = seconds_now(); }
        for (int micro = 0; micro < micro_steps; micro++) {
            if (run.overfit) { dataloader_seek(train_loader, 0); }
            dataloader_next(train_loader);
            gpt2_micro_step(model, train_loader->inputs, train_loader->targets, run.B, run.T, micro, micro_steps);
        }
        gpt2_update(model, lr_at(schedule, step), run.beta1, run.beta2, run.eps, run.grad_clip);
        report_step(&reports, logger, schedule);     // of the step before
        copy_to_host(&reports.slots[step % Reports::kSlots], model->state, sizeof(DeviceState), model->stream);
        event_record(reports.ready[step % Reports::kSlots], model->stream);
        reports.pending = step;
    }
    if (reports.ms_count > 0) {
        const double mean_ms = reports.ms_sum / (double)reports.ms_count;
        printf("mean step time %.1f ms, %.0f tokens/s over %lld steps\n", mean_ms, (double)run.total_batch / mean_ms * 1e3,
               (long long)reports.ms_count);
    }
    if (run.output_dir[0] != '\0') {
        const std::string path = format("%s/model_%08d.bin", run.output_dir, (int)model->step);
        checkpoint_save(model, path);
        printf("saved %s\n", path.c_str());
    }
    for (Event& e : reports.ready) { event_destroy(e); }
    pinned_free(reports.slots);
    if (has_text) { tokenizer_free(&tokenizer); }
}

// == 12 main ==
#ifndef TESTING
int main(int argc, char** argv) {
    flags_parse(kFlags, kNumFlags, argc, argv);
    const Config config = config_check();
    const Options options = run_options();
    const bool evaluate_only = run.max_steps == 0, generate_only = evaluate_only && run.prompt[0] != '\0';

    // everything that can be wrong with files is found before memory is taken
    DataLoader train_loader, val_loader;
    if (!evaluate_only) {
        dataloader_init(&train_loader, run.train_data, run.B, run.T, 0, 1, run.shuffle && !run.overfit, (uint64_t)run.seed, config.V);
        if (run.max_steps < 0) { run.max_steps = std::max((int64_t)1, train_loader.samples_per_epoch * run.T / run.total_batch); }
    }
    const bool needs_val = !generate_only && (run.val_every > 0 || evaluate_only);
    if (needs_val) { dataloader_init(&val_loader, run.val_data, run.B, run.T, 0, 1, false, 0, config.V); }
    const DeviceInfo device = device_init();
    gpt2_check_memory(config, options, run.B, run.T, device);
    Logger logger;
    if (run.output_dir[0] != '\0') {
        if (file_size(format("%s/main.log", run.output_dir).c_str()) >= 0) {
            die("-o %s already holds a run (main.log)\nhint: choose another folder, or remove that one", run.output_dir);
        }
        logger_init(&logger, run.output_dir);
        logger_run(&logger, kFlags, kNumFlags, {{"precision", PRECISION_NAME}, {"device", device.name}});
    }
    printf("device: %s, precision %s\n", device.name.c_str(), PRECISION_NAME);
    flags_print(kFlags, kNumFlags);
    GPT2 model;
    gpt2_allocate(&model, config, options, run.B, run.T);
    printf("model: L=%d NH=%d C=%d T=%d V=%d (padded %d), %zu parameters: %zu with weight decay, %zu without (wte with padded rows)\n",
           config.L, config.NH, config.C, config.maxT, config.V, config.Vp, model.num_parameters,
           gpt2_num_parameters(model.param_specs, Decay::Yes) + (size_t)(config.Vp - config.V) * config.C,
           gpt2_num_parameters(model.param_specs, Decay::No));
    gpt2_print_memory(config, options, run.B, run.T);
    if (file_size(run.model) >= 0) { checkpoint_load(&model, run.model); }
    else { gpt2_init_random(&model, options.seed); }

    if (evaluate_only) {
        if (generate_only) {
            Tokenizer tokenizer;
            const bool has_text = text_init(&tokenizer, config.V);
            generate(&model, &tokenizer, has_text, 0);
        } else {
            const int64_t whole = val_loader.samples_per_epoch / run.B;
            printf("val loss %.6f\n", gpt2_validate(&model, &val_loader, run.B, run.T,
                   (int)std::max((int64_t)1, std::min((int64_t)run.val_batches, whole))));
        }
    } else {
        printf("data: %lld training tokens (%lld rows of %d), %d micro-steps a step, %lld steps\n",
               (long long)train_loader.tokens, (long long)train_loader.samples_per_epoch, run.T,
               (int)(run.total_batch / ((int64_t)run.B * run.T)), (long long)run.max_steps);
        struct sigaction action = {};
        action.sa_handler = request_stop;
        sigaction(SIGINT, &action, nullptr);
        sigaction(SIGTERM, &action, nullptr);
        train(&model, &train_loader, &val_loader, &logger);
        dataloader_free(&train_loader);
    }
    if (needs_val) { dataloader_free(&val_loader); }
    logger_free(&logger);
    gpt2_free(&model);
    return 0;
}
#endif
