/*
GPT-2 and GPT-3 shaped pretraining in one file: every forward and backward kernel, the model, AdamW, gradient
accumulation, checkpoints, the training loop.

Two builds of this file:
    make train_gpt2cu      nvcc, the CUDA program (PRECISION=BF16|FP16|FP32)
    make train_gpt2cpu     g++ -DGPT2_CPU, the same program in plain loops: llmc/cpu_ops.h specifies every
                           kernel here, and is what runs where there is no GPU
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
vocabulary, L layers, OC output channels, N = B*T rows of a matrix. Index = lower-case letter: b t c nh l; bt
is b*T+t.
*/

// == 1 includes ==
#include <limits.h>     // gives: INT_MAX, PATH_MAX
#include <math.h>       // gives: sqrtf, isfinite
#include <signal.h>     // gives: sigaction, SIGINT
#include <stdint.h>     // gives: int64_t
#include <stdio.h>      // gives: printf
#include <string.h>     // gives: strcmp

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
// floatX is the type of weights and activations. LayerNorm's parameters, statistics, losses, norms and
// optimizer state are fp32 in every build.
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
#ifndef ENABLE_BF16
#define ENABLE_BF16
#endif
#include <cuda_bf16.h>          // gives: __nv_bfloat16
typedef __nv_bfloat16 floatX;
#define PRECISION_NAME "BF16"
#endif

constexpr bool kLowPrecision = sizeof(floatX) == 2;     // parameters may have fp32 master copies
#ifdef ENABLE_FP16
constexpr bool kFp16 = true;
#else
constexpr bool kFp16 = false;
#endif
// FP16: where dynamic loss scaling starts and may return to
constexpr float kMaxLossScale = 65536.0f;
// Bytes: the start of each tensor and of each layer's view
constexpr size_t kAlign = 256;
// Updates skipped for a non-finite gradient before the run stops
constexpr int kMaxSkipsInARow = 20;

template <class Int> constexpr Int ceil_div(Int a, Int b) { return (a + b - 1) / b; }
template <class Int> constexpr Int round_up(Int a, Int b) { return ceil_div(a, b) * b; }

// == 3 shapes and tables ==
// The model is two tables. Everything that walks over tensors (allocation, init, AdamW, norm, checkpoints,
// memory report, tests) walks over these.
struct Config {
    int maxT;           // longest sequence: rows of wpe
    int V, Vp;          // vocabulary; padded to a multiple of 128 so that the LM head's GEMM is aligned
    int L, NH, C;
};

enum class Where { Global, Block };             // one tensor, or one per layer
enum class Init { Zero, One, Normal, Residual };    // Normal: N(0, 0.02); Residual: N(0, 0.02/sqrt(2L))
enum class Decay { No, Yes };                   // weight decay: tensors with two dimensions

// The order is the checkpoint's order: append nothing in the middle. LayerNorm's weights and biases are fp32
// in every build, as in PyTorch's autocast: next to 1 bf16 has steps of 0.0078, in which training's steps
// vanish (dev/bench/NOTES.md: loss +3e-3 after ten steps).
//    name      type    where   rows    cols    init      decay  live rows
#define GPT2_PARAMS(X)                                                  \
    X(wte,      floatX, Global, Vp,     C,      Normal,   Yes,   V)     \
    X(wpe,      floatX, Global, maxT,   C,      Normal,   Yes,   maxT)  \
    X(ln1w,     float,  Block,  1,      C,      One,      No,    1)     \
    X(ln1b,     float,  Block,  1,      C,      Zero,     No,    1)     \
    X(qkvw,     floatX, Block,  3 * C,  C,      Normal,   Yes,   3 * C) \
    X(qkvb,     floatX, Block,  1,      3 * C,  Zero,     No,    1)     \
    X(attprojw, floatX, Block,  C,      C,      Residual, Yes,   C)     \
    X(attprojb, floatX, Block,  1,      C,      Zero,     No,    1)     \
    X(ln2w,     float,  Block,  1,      C,      One,      No,    1)     \
    X(ln2b,     float,  Block,  1,      C,      Zero,     No,    1)     \
    X(fcw,      floatX, Block,  4 * C,  C,      Normal,   Yes,   4 * C) \
    X(fcb,      floatX, Block,  1,      4 * C,  Zero,     No,    1)     \
    X(fcprojw,  floatX, Block,  C,      4 * C,  Residual, Yes,   C)     \
    X(fcprojb,  floatX, Block,  1,      C,      Zero,     No,    1)     \
    X(lnfw,     float,  Global, 1,      C,      One,      No,    1)     \
    X(lnfb,     float,  Global, 1,      C,      Zero,     No,    1)

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

struct Params {                 // one pointer per tensor; per-layer ones stand at a layer
#define X(name, type, ...) const type* name;
    GPT2_PARAMS(X)
#undef X
};
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
    size_t offset;      // elements from the start of the arenas of one type: master weights, m, v
    size_t elem_bytes;  // of the parameter itself
    size_t params;      // bytes from the start of the parameters' arena
};
struct ActSpec {
    const char* name;
    int copies;
    size_t elems, elem_bytes;
    size_t stride;      // elements from layer to layer; 0: all layers share one buffer
    size_t offset;      // bytes from the arena's start
};

// A product of sizes that must not wrap: a table row that asks for more than 2^62 elements is an error with
// its name.
static size_t size_check(const char* name, double elements) {
    if (!(elements < 4.6e18)) {
        die("tensor '%s' would have %.3g elements: too many\nhint: use a smaller model, -b or -t", name,
            elements);
    }
    return (size_t)elements;
}

static size_t param_specs(ParamSpec* specs, const Config& c) {      // returns the arena's size in elements
    const size_t V = c.V, Vp = c.Vp, L = c.L, C = c.C, maxT = c.maxT;
    // Elements: 256 bytes of the narrowest type that uses these offsets
    const size_t align = kAlign / 2;
    size_t offset = 0, params = 0;
    int i = 0;
#define X(name_, type_, where_, rows_, cols_, init_, decay_, live_)                                          \
    {                                                                                                        \
        ParamSpec s = {#name_, Init::init_, Decay::decay_, Where::where_ == Where::Block ? c.L : 1,          \
                       rows_, cols_, live_, 0, 0, offset, sizeof(type_), params};                            \
        size_check(#name_, (double)s.rows * (double)s.cols * s.copies);                                      \
        s.elems = s.rows * s.cols;                                                                           \
        s.stride = round_up(s.elems, align);                                                                 \
        offset += s.stride * s.copies;                                                                       \
        params += s.stride * s.copies * s.elem_bytes;                                                        \
        specs[i++] = s;                                                                                      \
    }
    GPT2_PARAMS(X)
#undef X
    (void)L;
    return offset;
}

static size_t act_specs(ActSpec* specs, const Config& c, int B, int T, int recompute) {     // returns bytes
    const size_t N = (size_t)B * T, C = c.C, NH = c.NH, Vp = c.Vp;
    const bool ALWAYS = true;
    auto SAVED = [recompute](int level) { return recompute < level; };
    size_t offset = 0;
    int i = 0;
#define X(name_, type_, where_, kept_, elems_)                                                               \
    {                                                                                                        \
        bool block = Where::where_ == Where::Block, kept = kept_;                                            \
        ActSpec s = {#name_, block && kept ? c.L : 1, elems_, sizeof(type_), 0, offset};                     \
        size_t bytes = round_up(size_check(#name_, (double)s.elems) * s.elem_bytes, kAlign);                 \
        s.stride = block && kept ? bytes / s.elem_bytes : 0;                                                 \
        size_check(#name_, (double)bytes * s.copies);                                                        \
        offset += bytes * s.copies;                                                                          \
        specs[i++] = s;                                                                                      \
    }
    GPT2_ACTS(X)
#undef X
    return offset;
}

// Where layer l's copy of a parameter begins: bytes from the start of their arena
static size_t param_at(const ParamSpec& s, int l) {
    return s.params + (s.copies > 1 ? l : 0) * s.stride * s.elem_bytes;
}
static size_t params_bytes(const ParamSpec* specs) {
    const ParamSpec& last = specs[NUM_PARAMS - 1];
    return last.params + last.copies * last.stride * last.elem_bytes;
}

static Params param_views(const char* base, const ParamSpec* specs, int l) {
    Params views;
    const void** field = (const void**)&views;
    for (int i = 0; i < NUM_PARAMS; i++) { field[i] = base + param_at(specs[i], l); }
    return views;
}

static Acts act_views(char* base, const ActSpec* specs, int l) {
    Acts views;
    void** field = (void**)&views;
    for (int i = 0; i < NUM_ACTS; i++) {
        field[i] = base + specs[i].offset + l * specs[i].stride * specs[i].elem_bytes;
    }
    return views;
}

#ifdef GPT2_CPU
// == 4-6 in the CPU build ==
// The device runtime and the ops by the same names, in plain C++.
#include "llmc/cpu_device.h"
#else
// == 4 device runtime and checks ==
#include <cuda.h>               // gives: CUtensorMap
#include <cuda_runtime.h>       // gives: cudaMalloc, streams, events
#include <cuda_bf16.h>          // gives: __nv_bfloat16: --grad-dtype bf16 exists in every build
#include <cuda_fp16.h>          // gives: half
#include <cublasLt.h>           // gives: cublasLtMatmul
#include <nvtx3/nvToolsExt.h>   // gives: nvtxRangePushA

typedef cudaStream_t Stream;
typedef cudaEvent_t Event;
constexpr bool kDeviceIsAsync = true;           // a call puts work on a stream and returns

static inline void cuda_check(cudaError_t status, const char* call, const char* file, int line) {
    if (status == cudaSuccess) { return; }
    die("%s at %s:%d: %s", call, file, line, cudaGetErrorString(status));
}
#define cudaCheck(call) cuda_check(call, #call, __FILE__, __LINE__)

static inline void cublas_check(cublasStatus_t status, const char* call, const char* file, int line) {
    if (status == CUBLAS_STATUS_SUCCESS) { return; }
    die("%s at %s:%d: %s", call, file, line, cublasLtGetStatusString(status));
}
#define cublasCheck(call) cublas_check(call, #call, __FILE__, __LINE__)

// A named range in Nsight's timeline for as long as the object lives: one per op.
struct NvtxRange {
    explicit NvtxRange(const char* name) { nvtxRangePushA(name); }
    ~NvtxRange() { nvtxRangePop(); }
    NvtxRange(const NvtxRange&) = delete;
};

struct DeviceInfo { std::string name; size_t memory_free, memory_total; };
// Set by device_init, read by launchers to size persistent grids
static int device_sm_count = 0;

static void device_prepare(char**) {}

static DeviceInfo device_init() {
    int count = 0;
    cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess || count == 0) {
        die("no CUDA GPU can be used: %s\nhint: `make train_gpt2cpu` builds the CPU program",
            status != cudaSuccess ? cudaGetErrorString(status) : "none found");
    }
    cudaCheck(cudaSetDevice(0));
    cudaDeviceProp prop;
    cudaCheck(cudaGetDeviceProperties(&prop, 0));
    if (prop.major < 8) {
        die("%s has compute capability %d.%d; 8.0 or later is needed (A100, RTX 30, H100, ...)", prop.name,
            prop.major, prop.minor);
    }
    device_sm_count = prop.multiProcessorCount;
    DeviceInfo info;
    info.name = format("%s (sm_%d%d, %d SMs)", prop.name, prop.major, prop.minor, prop.multiProcessorCount);
    cudaCheck(cudaMemGetInfo(&info.memory_free, &info.memory_total));
    return info;
}

static void* device_malloc(size_t bytes, const char* what) {
    void* p = nullptr;
    cudaError_t status = cudaMalloc(&p, bytes ? bytes : kAlign);
    if (status != cudaSuccess) {
        die("cannot allocate %.2f GiB of GPU memory for %s: %s", bytes / 1073741824.0, what,
            cudaGetErrorString(status));
    }
    return p;
}
static void device_free(void* p) { cudaCheck(cudaFree(p)); }
static void* pinned_malloc(size_t bytes, const char* what) {
    void* p = nullptr;
    cudaError_t status = cudaMallocHost(&p, bytes ? bytes : kAlign);
    if (status != cudaSuccess) {
        die("cannot pin %zu bytes of host memory for %s: %s", bytes, what, cudaGetErrorString(status));
    }
    return p;
}
static void pinned_free(void* p) { cudaCheck(cudaFreeHost(p)); }
static void device_zero(void* p, size_t bytes, Stream stream) {
    cudaCheck(cudaMemsetAsync(p, 0, bytes, stream));
}
static void copy_to_device(void* device, const void* host, size_t bytes, Stream stream) {
    cudaCheck(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream));
}
static void copy_to_host(void* host, const void* device, size_t bytes, Stream stream) {
    cudaCheck(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream));
}
static Stream stream_create() {
    Stream stream;
    cudaCheck(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}
static void stream_destroy(Stream stream) { cudaCheck(cudaStreamDestroy(stream)); }
static void stream_sync(Stream stream) { cudaCheck(cudaStreamSynchronize(stream)); }
static Event event_create() {
    Event event;
    cudaCheck(cudaEventCreate(&event));
    return event;
}
static void event_destroy(Event event) { cudaCheck(cudaEventDestroy(event)); }
static void event_record(Event event, Stream stream) { cudaCheck(cudaEventRecord(event, stream)); }
static void event_wait(Event event) { cudaCheck(cudaEventSynchronize(event)); }
static double event_ms(Event from, Event to) {      // both have been reached
    float ms;
    cudaCheck(cudaEventElapsedTime(&ms, from, to));
    return ms;
}

// Where one gradient tensor goes: fp32, or bf16 rounded with dither (--grad-dtype). Element i of `data` draws
// the bits of position `first` + i of the whole gradient, whoever computes it. Its readers need that draw
// again, so an element is rounded once a micro-step, and an addition expects to find what the micro-step
// before stored.
struct Grad {
    void* data;         // null: not wanted
    bool is_bf16;
    Accumulate acc;
    RoundKey key;
    size_t first;
};

static Grad make_grad(void* data, bool is_bf16, size_t first, Accumulate acc, RoundKey key) {
    return Grad{data, is_bf16, acc, key, first};
}

#ifdef TESTING      // test_gpt2.cu defines these: --break NAME scales one output by 1.01
static void break_output(const char* name, float* data, size_t count, Stream stream);
#ifndef ENABLE_FP32
static void break_output(const char* name, floatX* data, size_t count, Stream stream);
#endif
static void break_output(const char* name, Grad grad, size_t count, Stream stream);
#define OUTPUT(name, output, count, stream) break_output(name, output, count, stream)
#else
#define OUTPUT(name, output, count, stream)
#endif

// == 5 device helpers ==

constexpr int kWarp = 32;
constexpr float kLog2e = 1.4426950408889634f;

// The unit in which kernels walk along a row: as many elements as make 16 bytes of floatX (8, or 4 in the
// FP32 build), of any element type. Pack<float> beside 16-bit floatX is 32 bytes, moved as two 16-byte
// accesses.
constexpr int kWidth = 16 / (int)sizeof(floatX);
template <class T> struct alignas(sizeof(T) * kWidth < 16 ? sizeof(T) * kWidth : 16) Pack {
    static constexpr int size = kWidth;
    T data[kWidth];
};
typedef Pack<floatX> x128;
static_assert(sizeof(x128) == 16, "one x128 is one 16-byte access");
struct Floats { float at[kWidth]; };                    // a Pack in arithmetic

// Streaming: bytes that nobody reads again before they leave the L2 anyway.
enum class Cache { Default, Streaming };

template <Cache kCache, class Word> __device__ __forceinline__ Word load_word(const Word* p) {
    return kCache == Cache::Streaming ? __ldcs(p) : *p;
}
template <Cache kCache, class Word> __device__ __forceinline__ void store_word(Word* p, Word word) {
    if (kCache == Cache::Streaming) { __stcs(p, word); }
    else { *p = word; }
}

// The one pair of functions that owns the bounds check: elements [i, i + kWidth) of a row or array of n
// elements. What lies beyond n reads as zero and is not written. kVector promises that n and i are multiples
// of kWidth and that p is 16-byte aligned (all tensors are: kAlign); without it elements move one by one, for
// rows such as C = 7.
template <bool kVector, Cache kCache = Cache::Default, class T, class Index>
__device__ __forceinline__ Pack<T> load(const T* p, Index i, Index n) {
    Pack<T> pack;
    if constexpr (!kVector) {
#pragma unroll
        for (int k = 0; k < kWidth; k++) { pack.data[k] = i + k < n ? p[i + k] : (T)0.0f; }
    } else if constexpr (sizeof(pack) == 8) {
        uint2 word = make_uint2(0, 0);
        if (i < n) { word = load_word<kCache>((const uint2*)(p + i)); }
        memcpy(&pack, &word, sizeof(pack));
    } else {
#pragma unroll
        for (int w = 0; w < (int)sizeof(pack) / 16; w++) {
            uint4 word = make_uint4(0, 0, 0, 0);
            if (i < n) { word = load_word<kCache>((const uint4*)(p + i) + w); }
            memcpy((char*)&pack + 16 * w, &word, 16);
        }
    }
    return pack;
}

template <bool kVector, Cache kCache = Cache::Default, class T, class Index>
__device__ __forceinline__ void store(T* p, Index i, Index n, const Pack<T>& pack) {
    if constexpr (!kVector) {
#pragma unroll
        for (int k = 0; k < kWidth; k++) {
            if (i + k < n) { p[i + k] = pack.data[k]; }
        }
    } else if constexpr (sizeof(pack) == 8) {
        uint2 word;
        memcpy(&word, &pack, sizeof(pack));
        if (i < n) { store_word<kCache>((uint2*)(p + i), word); }
    } else {
#pragma unroll
        for (int w = 0; w < (int)sizeof(pack) / 16; w++) {
            uint4 word;
            memcpy(&word, (const char*)&pack + 16 * w, 16);
            if (i < n) { store_word<kCache>((uint4*)(p + i) + w, word); }
        }
    }
}

// Arrays of words stay packed in registers: the compiler gives
__device__ __forceinline__ x128 as_pack(uint4 word) {
    // Each element of an array of 16-bit values a register
    x128 pack;
    memcpy(&pack, &word, sizeof(pack));
    return pack;
}
template <class T> __device__ __forceinline__ Floats to_floats(const Pack<T>& pack) {
    Floats f;
#pragma unroll
    for (int k = 0; k < kWidth; k++) { f.at[k] = (float)pack.data[k]; }
    return f;
}
template <class T> __device__ __forceinline__ Pack<T> to_pack(const Floats& f) {     // rounds to nearest
    Pack<T> pack;
#pragma unroll
    for (int k = 0; k < kWidth; k++) { pack.data[k] = (T)f.at[k]; }
    return pack;
}
template <bool kVector, Cache kCache = Cache::Default, class T, class Index>
__device__ __forceinline__ Floats load_floats(const T* p, Index i, Index n) {
    return to_floats(load<kVector, kCache>(p, i, n));
}

// May kVector be promised for rows of n elements?
static inline bool is_vector(size_t n) { return n % kWidth == 0; }

// Calls f with is_vector(n) as a type, to choose a template argument: f(true_type) or f(false_type).
template <class F> static inline void with_vector(size_t n, F f) {
    if (is_vector(n)) { f(std::true_type()); }
    else { f(std::false_type()); }
}

// ---- sums in a fixed order ----
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int mask = kWarp / 2; mask > 0; mask /= 2) { x += __shfl_xor_sync(0xFFFFFFFFu, x, mask); }
    return x;
}
__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
    for (int mask = kWarp / 2; mask > 0; mask /= 2) { x += __shfl_xor_sync(0xFFFFFFFFu, x, mask); }
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int mask = kWarp / 2; mask > 0; mask /= 2) { x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, mask)); }
    return x;
}

// kCount sums at once: each step halves the values a lane carries, so 8 sums take 9 shuffles instead of 40.
// The lane returns the sum of value number lane / (32 / kCount).
template <int kCount> __device__ __forceinline__ float warp_sums(float (&x)[kCount]) {
    static_assert(kCount >= 1 && kCount <= kWarp && (kCount & (kCount - 1)) == 0,
                  "halved until one value is left");
    const int lane = threadIdx.x % kWarp;
    int mask = kWarp / 2;
#pragma unroll
    for (int count = kCount / 2; count > 0; count /= 2, mask /= 2) {
        const bool upper = (lane & mask) != 0;
#pragma unroll
        for (int i = 0; i < count; i++) {
            float mine = upper ? x[i + count] : x[i];
            float other = upper ? x[i] : x[i + count];
            x[i] = mine + __shfl_xor_sync(0xFFFFFFFFu, other, mask);
        }
    }
#pragma unroll
    for (; mask > 0; mask /= 2) { x[0] += __shfl_xor_sync(0xFFFFFFFFu, x[0], mask); }
    return x[0];
}

// Over a block of whole warps in one dimension; every thread gets the result. `shared` has one element a
// warp.
template <class T> __device__ __forceinline__ T block_sum(T x, T* shared /*(32)*/) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    x = warp_sum(x);
    if (lane == 0) { shared[warp] = x; }
    __syncthreads();
    x = lane < (int)blockDim.x / kWarp ? shared[lane] : (T)0;
    x = warp_sum(x);
    __syncthreads();            // the next call may write `shared`
    return x;
}

// ---- maths ----
__device__ __forceinline__ float exp2_fast(float x) {       // 2 ulp (PTX ex2.approx); exp2(-inf) = 0
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// GELU, tanh form: x/2 (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3). Written as x sigmoid(2u): no
// cancellation for negative x, where 1 + tanh(u) would lose all digits of a fast tanh.
constexpr float kGeluScale = 0.7978845608028654f, kGeluCubic = 0.044715f;
__device__ __forceinline__ float gelu_sigmoid(float x) {
    float u = kGeluScale * x * fmaf(kGeluCubic * x, x, 1.0f);
    return __fdividef(1.0f, 1.0f + exp2_fast(-2.0f * kLog2e * u));
}
__device__ __forceinline__ float gelu(float x) { return x * gelu_sigmoid(x); }
__device__ __forceinline__ float gelu_grad(float x) {
    float s = gelu_sigmoid(x);
    float du = kGeluScale * fmaf(3.0f * kGeluCubic * x, x, 1.0f);
    return fmaf(2.0f * x * du, s * (1.0f - s), s);
}

// ---- stochastic rounding: E[result] = x ----
__device__ __forceinline__ void store_stochastic(__nv_bfloat16* p, float x, uint32_t bits16) {
    *(uint16_t*)p = bf16_round_stochastic(x, bits16);
}
__device__ __forceinline__ void store_stochastic(float* p, float x, uint32_t) { *p = x; }
#ifdef ENABLE_FP16
// Between the two neighbours of x: the one towards zero, and the next away from it with probability (distance
// from the first) / gap. Beyond the largest half (65504) there is no next one.
__device__ __forceinline__ void store_stochastic(half* p, float x, uint32_t bits16) {
    half low = __float2half_rz(x);
    half high = __ushort_as_half((unsigned short)(__half_as_ushort(low) + 1));
    float part = (x - __half2float(low)) / (__half2float(high) - __half2float(low));
    *p = part * 65536.0f > (float)bits16 ? high : low;      // NaN and inf: the comparison is false, low is x
}
#endif

// Draws of the elements [first, first + kWidth), first a multiple of kWidth: one block of eight has them all.
struct Draws { uint32_t at[kWidth]; };
__device__ __forceinline__ Draws round_draws(const RoundKey& key, size_t first) {
    const Rand4 block = round_block(key, first / 8);
    Draws draws;
#pragma unroll
    for (int k = 0; k < kWidth; k++) {
        const int lane = (int)(first % 8) + k;
        draws.at[k] = (block.w[lane / 2] >> (16 * (lane % 2))) & 0xFFFFu;
    }
    return draws;
}

// ---- gradients: every load of bf16 gradients and every store to a Grad is one of these ----
__device__ __forceinline__ RoundKey previous_micro_step(RoundKey key) {
    key.micro--;
    return key;
}

// Elements [i, i + kWidth) of n; `first` is the position of element 0, `key` that of the micro-step that
// stored them.
template <Cache kCache = Cache::Default>
__device__ __forceinline__ Floats load_dithered(const __nv_bfloat16* p, size_t i, size_t n,
                                                const RoundKey& key, size_t first) {
    const Pack<__nv_bfloat16> pack = load<true, kCache>(p, i, n);
    const Draws draws = round_draws(key, first + i);
    Floats f;
#pragma unroll
    for (int k = 0; k < kWidth; k++) {
        f.at[k] = bf16_decode_dithered(__bfloat16_as_ushort(pack.data[k]), draws.at[k]);
    }
    return f;
}

__device__ __forceinline__ void grad_store(const Grad& grad, size_t i, float value) {
    if (grad.is_bf16) {
        uint16_t* p = (uint16_t*)grad.data + i;
        const size_t position = grad.first + i;
        if (grad.acc == Accumulate::Yes) {
            value += bf16_decode_dithered(*p, round_bits16(previous_micro_step(grad.key), position));
        }
        *p = bf16_encode_dithered(value, round_bits16(grad.key, position));
    } else {
        float* p = (float*)grad.data + i;
        *p = grad.acc == Accumulate::Yes ? *p + value : value;
    }
}

// Elements [i, i + kWidth), those below `end`. kVector promises that `first` is a multiple of kWidth as well.
template <bool kVector>
__device__ __forceinline__ void grad_store(const Grad& grad, size_t i, size_t end, Floats value) {
    const bool add = grad.acc == Accumulate::Yes;
    if constexpr (!kVector) {
#pragma unroll
        for (int k = 0; k < kWidth; k++) {
            if (i + k < end) { grad_store(grad, i + k, value.at[k]); }
        }
    } else if (grad.is_bf16) {
        __nv_bfloat16* p = (__nv_bfloat16*)grad.data;
        Floats old = {};
        if (add) { old = load_dithered(p, i, end, previous_micro_step(grad.key), grad.first); }
        const Draws draws = round_draws(grad.key, grad.first + i);
        Pack<__nv_bfloat16> pack;
#pragma unroll
        for (int k = 0; k < kWidth; k++) {
            pack.data[k] = __ushort_as_bfloat16(bf16_encode_dithered(old.at[k] + value.at[k], draws.at[k]));
        }
        store<true>(p, i, end, pack);
    } else {
        float* p = (float*)grad.data;
        if (add) {
            Floats old = load_floats<true>(p, i, end);
#pragma unroll
            for (int k = 0; k < kWidth; k++) { value.at[k] += old.at[k]; }
        }
        store<true>(p, i, end, to_pack<float>(value));
    }
}

// ---- asynchronous copies to shared memory (PTX cp.async, sm_80+) ----
__device__ __forceinline__ void cp_async_16(void* shared, const void* global) {
    uint32_t address = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
}
// Zeros if not live
__device__ __forceinline__ void cp_async_16_or_zero(void* shared, const void* global, bool live) {
    uint32_t address = (uint32_t)__cvta_generic_to_shared(shared);
    // Read from `global`; the rest of the 16 is filled with zeros
    const int bytes = live ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All but the last kPending groups
template <int kPending> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// == 6 ops ==

// == 6.1 encoder ==
// out[b,t,:] = wte[token[b,t],:] + wpe[t,:]
// Backward: dwte[token,:] += sum of dout[bt,:] over the token's positions bt, in the order of the sorted
// list; dwpe[t,:] (+)= sum over b of dout[b,t,:], in order. Partial sums of long buckets go through scratch
// (slots,C).
constexpr int kEncoderThreads = 128;

template <bool kVector>
__global__ void encoder_forward_kernel(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe,
                                       int N, int T, int C) {
    const int bt = blockIdx.x * blockDim.y + threadIdx.y;
    if (bt >= N) { return; }
    floatX* out_bt = out + (size_t)bt * C;
    const floatX* wte_ix = wte + (size_t)tokens[bt] * C;
    const floatX* wpe_t = wpe + (size_t)(bt % T) * C;
    for (int c = threadIdx.x * kWidth; c < C; c += blockDim.x * kWidth) {
        Floats a = load_floats<kVector>(wte_ix, c, C), b = load_floats<kVector>(wpe_t, c, C);
#pragma unroll
        for (int k = 0; k < kWidth; k++) { a.at[k] += b.at[k]; }
        store<kVector>(out_bt, c, C, to_pack<floatX>(a));
    }
}

// Sum of `count` rows of (.,C) from column c on, one after the other; row_of(i) says which row comes i-th.
// Several loads are in flight before the first add.
template <bool kVector, class T, class RowOf>
__device__ __forceinline__ Floats sum_rows(const T* rows, int count, int c, int C, RowOf row_of) {
    constexpr int kUnroll = 8;
    Floats sum = {};
    for (int first = 0; first < count; first += kUnroll) {
        Pack<T> x[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; u++) {
            const bool live = first + u < count;
            const T* row = rows + (live ? (size_t)row_of(first + u) * C : 0);
            x[u] = load<kVector>(row, live ? c : C, C);
        }
#pragma unroll
        for (int u = 0; u < kUnroll; u++) {
#pragma unroll
            for (int k = 0; k < kWidth; k++) { sum.at[k] += (float)x[u].data[k]; }
        }
    }
    return sum;
}

template <bool kVector>
__global__ void encoder_backward_wte_kernel(Grad dwte, float* partial /*(slots,C)*/, const floatX* dout,
                                            const int* order, const int4* segments, int C) {
    const int4 segment = segments[blockIdx.x];          // {token, start, length, slot or -1}
    const int c = (blockIdx.y * blockDim.x + threadIdx.x) * kWidth;
    if (c >= C) { return; }
    const int* positions = order + segment.y;
    Floats sum = sum_rows<kVector>(dout, segment.z, c, C, [&](int i) { return positions[i]; });
    if (segment.w < 0) {
        grad_store<kVector>(dwte, (size_t)segment.x * C + c, (size_t)(segment.x + 1) * C, sum);
    } else {
        store<kVector>(partial + (size_t)segment.w * C, c, C, to_pack<float>(sum));
    }
}

template <bool kVector>
__global__ void encoder_backward_split_kernel(Grad dwte, const float* partial, const int4* splits, int C) {
    const int4 split = splits[blockIdx.x];              // {token, first slot, slots, 0}
    const int c = (blockIdx.y * blockDim.x + threadIdx.x) * kWidth;
    if (c >= C) { return; }
    Floats sum = sum_rows<kVector>(partial, split.z, c, C, [&](int i) { return split.y + i; });
    grad_store<kVector>(dwte, (size_t)split.x * C + c, (size_t)(split.x + 1) * C, sum);
}

template <bool kVector>
__global__ void encoder_backward_wpe_kernel(Grad dwpe, const floatX* dout, int B, int T, int C) {
    const int t = blockIdx.x, c = (blockIdx.y * blockDim.x + threadIdx.x) * kWidth;
    if (c >= C) { return; }
    Floats sum = {};                                    // rows t >= T: no token stood there
    if (t < T) { sum = sum_rows<kVector>(dout, B, c, C, [&](int b) { return (size_t)b * T + t; }); }
    grad_store<kVector>(dwpe, (size_t)t * C + c, (size_t)(t + 1) * C, sum);
}

static void encoder_forward(floatX* out /*(B,T,C)*/, const int* tokens /*(B,T)*/,
                            const floatX* wte /*(Vp,C)*/, const floatX* wpe /*(maxT,C)*/, int B, int T, int C,
                            Stream stream) {
    NvtxRange range("encoder_forward");
    const int N = B * T;
    const int x = std::min(round_up(ceil_div(C, kWidth), kWarp), 256);
    const dim3 block(x, 256 / x);
    with_vector(C, [&](auto vector) {
        encoder_forward_kernel<vector.value>
            <<<ceil_div(N, (int)block.y), block, 0, stream>>>(out, tokens, wte, wpe, N, T, C);
    });
    cudaCheck(cudaGetLastError());
    OUTPUT("encoder_forward.out", out, (size_t)N * C, stream);
}

static size_t encoder_backward_scratch_bytes(int B, int T, int C) {
    return (size_t)max_bucket_slots((int64_t)B * T) * C * sizeof(float);
}

static void encoder_backward(Grad dwte /*(Vp,C)*/, Grad dwpe /*(maxT,C)*/, float* scratch /*(slots,C)*/,
                             const floatX* dout /*(B,T,C)*/, const TokenBuckets& buckets, int B, int T,
                             int maxT, int C, Stream stream) {
    NvtxRange range("encoder_backward");
    if (dwte.is_bf16) {
        die("encoder_backward adds to rows of dwte: bf16 must be rounded as a whole, by grad_accumulate");
    }
    if (dwte.acc != Accumulate::Yes) {
        die("encoder_backward only adds to dwte: the LM head has stored its part before");
    }
    const int threads = std::min(round_up(ceil_div(C, kWidth), kWarp), kEncoderThreads);
    const int slabs = ceil_div(C, threads * kWidth);
    with_vector(C, [&](auto vector) {
        constexpr bool kVector = vector.value;
        encoder_backward_wte_kernel<kVector><<<dim3(buckets.num_segments, slabs), threads, 0, stream>>>(
            dwte, scratch, dout, buckets.order, buckets.segments, C);
        cudaCheck(cudaGetLastError());
        if (buckets.num_splits > 0) {
            encoder_backward_split_kernel<kVector><<<dim3(buckets.num_splits, slabs), threads, 0, stream>>>(
                dwte, scratch, buckets.splits, C);
            cudaCheck(cudaGetLastError());
        }
        const int rows = dwpe.acc == Accumulate::Yes ? T : maxT;
        encoder_backward_wpe_kernel<kVector><<<dim3(rows, slabs), threads, 0, stream>>>(dwpe, dout, B, T, C);
        cudaCheck(cudaGetLastError());
    });
    // Row 0: how many rows there are is not known here
    OUTPUT("encoder_backward.dwte", dwte, (size_t)C, stream);
    OUTPUT("encoder_backward.dwpe", dwpe, (size_t)maxT * C, stream);
}

// == 6.2 layernorm ==
// mean = sum(x)/C, rstd = 1/sqrt(sum((x - mean)^2)/C + eps), out = (x - mean)*rstd*weight + bias, row by row
// of (N,C). residual_layernorm_forward: x = inp1 + inp2, rounded and stored as `residual` first. Backward:
// xhat = (x - mean)*rstd, g = dout*weight,
//     dresidual (+)= rstd*(g - mean(g) - xhat*mean(g*xhat)),  dweight (+)= colsum(dout*xhat),  dbias (+)=
//     colsum(dout), dcolsum (+)= colsum(new dresidual, as stored): the bias gradient of the linear layer
//     whose output was added to this residual stream, free of charge while the tensor passes by.
// Column sums: each block sums its rows into (kLayernormBlocks,3,C) partials, then column_sums_kernel adds
// those up.
constexpr int kLayernormBlocks = 396;           // most blocks of the backward: 3 an SM of an H200
constexpr int kLayernormWarps = 8;              // rows a block of the forward works on
// Most vectors a lane holds: rows up to 2048 (16-bit) stay in registers
constexpr int kLayernormVectors = 8;

// One warp a row, the row in registers: two passes over it (mean, then variance) cost no memory traffic.
template <int kVectors, bool kResidual>
__global__ void __launch_bounds__(kLayernormWarps* kWarp)
    layernorm_forward_kernel(floatX* residual, floatX* out, float* mean, float* rstd, const floatX* inp1,
                             const floatX* inp2, const float* weight, const float* bias, int N, int C) {
    const int row = blockIdx.x * kLayernormWarps + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    if (row >= N) { return; }
    const size_t at = (size_t)row * C;
    x128 pack[kVectors], pack2[kVectors];
#pragma unroll
    for (int j = 0; j < kVectors; j++) {
        const int c = (j * kWarp + lane) * kWidth;
        pack[j] = load<true>(inp1 + at, c, C);
        if (kResidual) { pack2[j] = load<true>(inp2 + at, c, C); }
    }

    Floats x[kVectors];
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kVectors; j++) {
        if (kResidual) {
#pragma unroll
            for (int k = 0; k < kWidth; k++) {
                pack[j].data[k] = (floatX)((float)pack[j].data[k] + (float)pack2[j].data[k]);
            }
            store<true>(residual + at, (j * kWarp + lane) * kWidth, C, pack[j]);
        }
        x[j] = to_floats(pack[j]);
#pragma unroll
        for (int k = 0; k < kWidth; k++) { sum += x[j].at[k]; }
    }
    const float m = warp_sum(sum) / C;

    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < kVectors; j++) {
        if ((j * kWarp + lane) * kWidth < C) {
#pragma unroll
            for (int k = 0; k < kWidth; k++) { squares += (x[j].at[k] - m) * (x[j].at[k] - m); }
        }
    }
    const float s = 1.0f / sqrtf(warp_sum(squares) / C + (float)kLayernormEps);

#pragma unroll
    for (int j = 0; j < kVectors; j++) {
        const int c = (j * kWarp + lane) * kWidth;
        Floats w = load_floats<true>(weight, c, C), b = load_floats<true>(bias, c, C);
#pragma unroll
        for (int k = 0; k < kWidth; k++) { x[j].at[k] = fmaf((x[j].at[k] - m) * s, w.at[k], b.at[k]); }
        store<true>(out + at, c, C, to_pack<floatX>(x[j]));
    }
    if (lane == 0) {
        mean[row] = m;
        rstd[row] = s;
    }
}

// Any C: one block a row, which is read three times (from L1 after the first).
template <bool kVector, bool kResidual>
__global__ void layernorm_forward_any_kernel(floatX* residual, floatX* out, float* mean, float* rstd,
                                             const floatX* inp1, const floatX* inp2, const float* weight,
                                             const float* bias, int C) {
    __shared__ float shared[kWarp];
    const int row = blockIdx.x, first = threadIdx.x * kWidth, step = blockDim.x * kWidth;
    const size_t at = (size_t)row * C;
    const floatX* x_row = kResidual ? residual + at : inp1 + at;
    float sum = 0.0f;
    for (int c = first; c < C; c += step) {
        Floats x = load_floats<kVector>(inp1 + at, c, C);
        if (kResidual) {
            Floats y = load_floats<kVector>(inp2 + at, c, C);
#pragma unroll
            for (int k = 0; k < kWidth; k++) { x.at[k] += y.at[k]; }
            x128 rounded = to_pack<floatX>(x);
            store<kVector>(residual + at, c, C, rounded);       // the same thread reads it again below
            x = to_floats(rounded);
        }
#pragma unroll
        for (int k = 0; k < kWidth; k++) { sum += x.at[k]; }
    }
    const float m = block_sum(sum, shared) / C;

    float squares = 0.0f;
    for (int c = first; c < C; c += step) {
        Floats x = load_floats<kVector>(x_row, c, C);
#pragma unroll
        for (int k = 0; k < kWidth; k++) { squares += c + k < C ? (x.at[k] - m) * (x.at[k] - m) : 0.0f; }
    }
    const float s = 1.0f / sqrtf(block_sum(squares, shared) / C + (float)kLayernormEps);

    for (int c = first; c < C; c += step) {
        Floats x = load_floats<kVector>(x_row, c, C);
        Floats w = load_floats<kVector>(weight, c, C), b = load_floats<kVector>(bias, c, C);
#pragma unroll
        for (int k = 0; k < kWidth; k++) { x.at[k] = fmaf((x.at[k] - m) * s, w.at[k], b.at[k]); }
        store<kVector>(out + at, c, C, to_pack<floatX>(x));
    }
    if (threadIdx.x == 0) {
        mean[row] = m;
        rstd[row] = s;
    }
}

// Second stage of every column sum: out[i][c] (+)= sum over p of partial[p,i,c], p in a fixed order. Block
// (32,32): 32 columns of one of the tensors, thread row y takes p = y, y + 32, ...
struct ColumnSums { Grad out[3]; };
__global__ void column_sums_kernel(ColumnSums sums, const float* partial /*(partials,tensors,C)*/,
                                   int partials, int C) {
    __shared__ float shared[kWarp][kWarp];
    const int c = blockIdx.x * kWarp + threadIdx.x, i = blockIdx.y;
    const Grad& out = sums.out[i];
    if (!out.data) { return; }
    float sum = 0.0f;
    if (c < C) {
#pragma unroll 4
        for (int p = threadIdx.y; p < partials; p += kWarp) {
            sum += partial[((size_t)p * gridDim.y + i) * C + c];
        }
    }
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || c >= C) { return; }
#pragma unroll
    for (int y = 1; y < kWarp; y++) { sum += shared[y][threadIdx.x]; }
    grad_store(out, c, sum);
}

static void column_sums(const ColumnSums& sums, int tensors, const float* partial, int partials, int C,
                        Stream stream) {
    column_sums_kernel<<<dim3(ceil_div(C, kWarp), tensors), dim3(kWarp, kWarp), 0, stream>>>(sums, partial,
                                                                                               partials, C);
    cudaCheck(cudaGetLastError());
}

struct LayernormBackward {
    floatX* dresidual;                  // (N,C)
    Grad dweight, dbias, dcolsum;       // (C); dcolsum.data may be null
    float* scratch;
    Accumulate dresidual_acc;
    const floatX *dout, *inp;           // (N,C); neither may be dresidual
    const float* weight;                // (C)
    const float *mean, *rstd;           // (N)
    int N, C;
};

// A thread owns one vector of columns and walks over rows, kLayernormRows at a time; blockDim.x threads
// (whole warps) make a row, blockDim.y groups work on different rows. Rows stream through slots of shared
// memory that belong to one thread each, so the memory stays busy during the arithmetic (plain loads into
// registers: 177 us instead of 104 for C=768, 124M). Column sums stay in 24 registers from the first row to
// the last; only the two sums of a row cross threads, those of kLayernormRows rows with one exchange and one
// barrier.
constexpr int kLayernormRows = 2, kLayernormStages = 2, kLayernormMaxThreads = 512;

__global__ void __launch_bounds__(kLayernormMaxThreads)
layernorm_backward_kernel(LayernormBackward a, float* partial /*(gridDim.x,3,C)*/) {
    constexpr int kRows = kLayernormRows, kStages = kLayernormStages, kSums = 2 * kRows;
    extern __shared__ x128 staged[];                    // (stage, row, inp|dout|dresidual, thread)
    const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
    float* sums_shared = (float*)(staged + kStages * kRows * 3 * threads);     // (2, group, warp, kSums)
    const int C = a.C, c = threadIdx.x * kWidth, step = gridDim.x * blockDim.y * kRows;
    const int warps = blockDim.x / kWarp, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const bool add = a.dresidual_acc == Accumulate::Yes;
    const Floats weight = load_floats<true>(a.weight, c, C);
    Floats dweight = {}, dbias = {}, dcolsum = {};

    // Rows beyond N and columns beyond C become zeros: they add nothing
    auto stage = [&](int first, int s) {
        x128* at = staged + s * kRows * 3 * threads + thread;
#pragma unroll
        for (int r = 0; r < kRows; r++) {
            const bool live = first + r < a.N && c < C;
            const size_t offset = live ? (size_t)(first + r) * C + c : 0;
            cp_async_16_or_zero(at + (3 * r) * threads, a.inp + offset, live);
            cp_async_16_or_zero(at + (3 * r + 1) * threads, a.dout + offset, live);
            cp_async_16_or_zero(at + (3 * r + 2) * threads, a.dresidual + offset, live && add);
        }
        cp_async_commit();
    };
    int first = (blockIdx.x * blockDim.y + threadIdx.y) * kRows;
    float next_mean[kRows], next_rstd[kRows];
    auto load_statistics = [&](int row) {
#pragma unroll
        for (int r = 0; r < kRows; r++) {
            next_mean[r] = row + r < a.N ? a.mean[row + r] : 0.0f;
            next_rstd[r] = row + r < a.N ? a.rstd[row + r] : 0.0f;
        }
    };
#pragma unroll
    for (int s = 0; s < kStages; s++) { stage(first + s * step, s); }
    load_statistics(first);

    int s = 0, slot = 0;
    for (int base = blockIdx.x * blockDim.y * kRows; base < a.N; base += step, first += step, slot ^= 1) {
        cp_async_wait<kStages - 1>();
        const x128* at = staged + s * kRows * 3 * threads + thread;
        uint4 inp[kRows], dout[kRows], old[kRows];
        // Xhat = inp*rstd + shift; sums: of g and of g*xhat, per row
        float rstd[kRows], shift[kRows], sums[kSums];
#pragma unroll
        for (int r = 0; r < kRows; r++) {
            inp[r] = *(const uint4*)(at + (3 * r) * threads);
            dout[r] = *(const uint4*)(at + (3 * r + 1) * threads);
            old[r] = *(const uint4*)(at + (3 * r + 2) * threads);
            rstd[r] = next_rstd[r];
            shift[r] = -next_mean[r] * next_rstd[r];
        }
        load_statistics(first + step);
#pragma unroll
        for (int r = 0; r < kRows; r++) {
            const Floats x = to_floats(as_pack(inp[r])), d = to_floats(as_pack(dout[r]));
            sums[2 * r] = sums[2 * r + 1] = 0.0f;
#pragma unroll
            for (int k = 0; k < kWidth; k++) {
                const float xhat = fmaf(x.at[k], rstd[r], shift[r]), g = d.at[k] * weight.at[k];
                sums[2 * r] += g;
                sums[2 * r + 1] = fmaf(g, xhat, sums[2 * r + 1]);
                dbias.at[k] += d.at[k];
                dweight.at[k] = fmaf(d.at[k], xhat, dweight.at[k]);
            }
        }
        float* exchange = sums_shared + (slot * blockDim.y + threadIdx.y) * warps * kSums;
        constexpr int kLanesPerSum = kWarp / kSums;
        const float total = warp_sums(sums);
        if (lane % kLanesPerSum == 0) { exchange[warp * kSums + lane / kLanesPerSum] = total; }
        // The other slot of sums is written next: one barrier is enough
        __syncthreads();
        stage(first + kStages * step, s);
        s = s + 1 == kStages ? 0 : s + 1;

        float row_sums[kSums] = {};
        for (int w = 0; w < warps; w++) {
#pragma unroll
            for (int i = 0; i < kSums; i++) { row_sums[i] += exchange[w * kSums + i]; }
        }
#pragma unroll
        for (int r = 0; r < kRows; r++) {
            const Floats x = to_floats(as_pack(inp[r])), d = to_floats(as_pack(dout[r]));
            Floats result = to_floats(as_pack(old[r]));
            const float minus_g = -rstd[r] * row_sums[2 * r] / C,
                        minus_gx = -rstd[r] * row_sums[2 * r + 1] / C;
#pragma unroll
            for (int k = 0; k < kWidth; k++) {
                const float xhat = fmaf(x.at[k], rstd[r], shift[r]), g = d.at[k] * weight.at[k];
                result.at[k] += fmaf(g, rstd[r], fmaf(xhat, minus_gx, minus_g));
            }
            const x128 rounded = to_pack<floatX>(result);
            const bool live = first + r < a.N;
            store<true>(a.dresidual + (live ? (size_t)(first + r) * C : 0), c, live ? C : 0, rounded);
#pragma unroll
            for (int k = 0; k < kWidth; k++) { dcolsum.at[k] += (float)rounded.data[k]; }
        }
    }
    cp_async_wait<0>();

    // groups of the block, in order, then one partial row a block
    float* group_sums = (float*)staged;                 // (3, blockDim.x*kWidth)
    const int row = blockDim.x * kWidth;
    Floats* const mine[3] = {&dweight, &dbias, &dcolsum};
    for (int group = 1; group < (int)blockDim.y; group++) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 3; i++) {
            if ((int)threadIdx.y == group) {
                store<true>(group_sums + i * row, c, row, to_pack<float>(*mine[i]));
            }
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 3; i++) {
            if (threadIdx.y > 0) { continue; }
            const Floats other = load_floats<true>(group_sums + i * row, c, row);
#pragma unroll
            for (int k = 0; k < kWidth; k++) { mine[i]->at[k] += other.at[k]; }
        }
    }
    if (threadIdx.y > 0) { return; }
#pragma unroll
    for (int i = 0; i < 3; i++) {
        store<true>(partial + ((size_t)blockIdx.x * 3 + i) * C, c, C, to_pack<float>(*mine[i]));
    }
}

// Rows that are not whole vectors, or longer than kLayernormMaxThreads of them (4096 at 16 bits: 24 sums a
// thread do not fit the registers of larger blocks): one block a row, then a second pass for the columns.
template <bool kVector> __global__ void layernorm_backward_long_kernel(LayernormBackward a) {
    __shared__ float shared[kWarp];
    const int row = blockIdx.x, C = a.C, first = threadIdx.x * kWidth, step = blockDim.x * kWidth;
    const size_t at = (size_t)row * C;
    const float mean = a.mean[row], rstd = a.rstd[row];
    float sum_g = 0.0f, sum_gx = 0.0f;
    for (int c = first; c < C; c += step) {
        Floats x = load_floats<kVector>(a.inp + at, c, C), d = load_floats<kVector>(a.dout + at, c, C);
        Floats w = load_floats<kVector>(a.weight, c, C);
#pragma unroll
        for (int k = 0; k < kWidth; k++) {
            float g = d.at[k] * w.at[k];
            sum_g += g;
            sum_gx = fmaf(g, (x.at[k] - mean) * rstd, sum_gx);
        }
    }
    const float mean_g = block_sum(sum_g, shared) / C, mean_gx = block_sum(sum_gx, shared) / C;
    for (int c = first; c < C; c += step) {
        Floats x = load_floats<kVector>(a.inp + at, c, C), d = load_floats<kVector>(a.dout + at, c, C);
        Floats w = load_floats<kVector>(a.weight, c, C);
        Floats old = load_floats<kVector>(a.dresidual + at, c, a.dresidual_acc == Accumulate::Yes ? C : 0);
#pragma unroll
        for (int k = 0; k < kWidth; k++) {
            float xhat = (x.at[k] - mean) * rstd;
            old.at[k] = fmaf(rstd, d.at[k] * w.at[k] - mean_g - xhat * mean_gx, old.at[k]);
        }
        store<kVector>(a.dresidual + at, c, C, to_pack<floatX>(old));
    }
}
template <bool kVector>
__global__ void layernorm_backward_columns_kernel(LayernormBackward a, float* partial /*(gridDim.y,3,C)*/) {
    const int C = a.C, c = (blockIdx.x * blockDim.x + threadIdx.x) * kWidth;
    if (c >= C) { return; }
    Floats dweight = {}, dbias = {}, dcolsum = {};
    for (int row = blockIdx.y; row < a.N; row += gridDim.y) {
        const size_t at = (size_t)row * C;
        Floats x = load_floats<kVector>(a.inp + at, c, C), d = load_floats<kVector>(a.dout + at, c, C);
        Floats result = load_floats<kVector>(a.dresidual + at, c, C);
        const float mean = a.mean[row], rstd = a.rstd[row];
#pragma unroll
        for (int k = 0; k < kWidth; k++) {
            dweight.at[k] = fmaf(d.at[k], (x.at[k] - mean) * rstd, dweight.at[k]);
            dbias.at[k] += d.at[k];
            dcolsum.at[k] += result.at[k];
        }
    }
    float* partial_block = partial + (size_t)blockIdx.y * 3 * C;
    store<kVector>(partial_block, c, C, to_pack<float>(dweight));
    store<kVector>(partial_block + C, c, C, to_pack<float>(dbias));
    store<kVector>(partial_block + 2 * C, c, C, to_pack<float>(dcolsum));
}

template <int kVectors, bool kResidual>
static void layernorm_forward_launch(floatX* residual, floatX* out, float* mean, float* rstd,
                                     const floatX* inp1, const floatX* inp2, const float* weight,
                                     const float* bias, int N, int C, Stream stream) {
    if (kVectors > kLayernormVectors || !is_vector(C)) {
        with_vector(C, [&](auto vector) {
            const int threads = std::min(round_up(ceil_div(C, kWidth), kWarp), 512);
            layernorm_forward_any_kernel<vector.value, kResidual>
                <<<N, threads, 0, stream>>>(residual, out, mean, rstd, inp1, inp2, weight, bias, C);
        });
    } else if (C > kVectors * kWarp * kWidth) {         // one more vector a lane
        constexpr int kMore = kVectors <= kLayernormVectors ? kVectors + 1 : kVectors;
        layernorm_forward_launch<kMore, kResidual>(residual, out, mean, rstd, inp1, inp2, weight, bias, N, C,
                                                   stream);
    } else {
        constexpr int kFits = kVectors <= kLayernormVectors ? kVectors : 1;
        layernorm_forward_kernel<kFits, kResidual>
            <<<ceil_div(N, kLayernormWarps), kLayernormWarps * kWarp, 0, stream>>>(
                residual, out, mean, rstd, inp1, inp2, weight, bias, N, C);
    }
    cudaCheck(cudaGetLastError());
}

static void layernorm_forward(floatX* out /*(N,C)*/, float* mean /*(N)*/, float* rstd /*(N)*/,
                              const floatX* inp /*(N,C)*/, const float* weight /*(C)*/,
                              const float* bias /*(C)*/, int N, int C, Stream stream) {
    NvtxRange range("layernorm_forward");
    layernorm_forward_launch<1, false>(nullptr, out, mean, rstd, inp, nullptr, weight, bias, N, C, stream);
    OUTPUT("layernorm_forward.out", out, (size_t)N * C, stream);
    OUTPUT("layernorm_forward.mean", mean, (size_t)N, stream);
    OUTPUT("layernorm_forward.rstd", rstd, (size_t)N, stream);
}

// residual may be inp1 or inp2: each element is read before it is written, by the same thread.
static void residual_layernorm_forward(floatX* residual /*(N,C)*/, floatX* out /*(N,C)*/, float* mean,
                                       float* rstd, const floatX* inp1 /*(N,C)*/,
                                       const floatX* inp2 /*(N,C)*/, const float* weight, const float* bias,
                                       int N, int C, Stream stream) {
    NvtxRange range("residual_layernorm_forward");
    layernorm_forward_launch<1, true>(residual, out, mean, rstd, inp1, inp2, weight, bias, N, C, stream);
    OUTPUT("residual_layernorm_forward.residual", residual, (size_t)N * C, stream);
    OUTPUT("residual_layernorm_forward.out", out, (size_t)N * C, stream);
    OUTPUT("residual_layernorm_forward.mean", mean, (size_t)N, stream);
    OUTPUT("residual_layernorm_forward.rstd", rstd, (size_t)N, stream);
}

static size_t layernorm_backward_scratch_bytes(int N, int C) {
    return (size_t)std::min(N, kLayernormBlocks) * 3 * C * sizeof(float);
}

// Returns the number of partials
static int layernorm_backward_stream(const LayernormBackward& args, Stream stream) {
    const int x = round_up(ceil_div(args.C, kWidth), kWarp), y = std::max(1, 192 / x);
    // as many blocks as fit an SM of an H200; not asked of the GPU, so that the bits do not depend on it
    const int wanted = std::min(kLayernormBlocks, 132 * std::max(1, 480 / (x * y)));
    const int blocks = std::min(wanted, ceil_div(args.N, y * kLayernormRows));
    const size_t slots = (size_t)kLayernormStages * kLayernormRows * 3 * x * y * sizeof(x128);
    const size_t sums = (size_t)2 * y * (x / kWarp) * 2 * kLayernormRows * sizeof(float);
    static_assert(kLayernormStages * kLayernormRows * sizeof(x128) >= kWidth * sizeof(float),
                  "group_sums reuses the slots");
    cudaCheck(cudaFuncSetAttribute(layernorm_backward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   (int)(slots + sums)));
    layernorm_backward_kernel<<<blocks, dim3(x, y), slots + sums, stream>>>(args, args.scratch);
    cudaCheck(cudaGetLastError());
    return blocks;
}

static void layernorm_backward(LayernormBackward args, Stream stream) {
    NvtxRange range("layernorm_backward");
    const int vectors = ceil_div(args.C, kWidth);
    int partials;
    if (is_vector(args.C) && vectors <= kLayernormMaxThreads) {
        partials = layernorm_backward_stream(args, stream);
    } else {
        partials = std::min(args.N, kLayernormBlocks);
        with_vector(args.C, [&](auto vector) {
            layernorm_backward_long_kernel<vector.value><<<args.N, 512, 0, stream>>>(args);
            cudaCheck(cudaGetLastError());
            layernorm_backward_columns_kernel<vector.value>
                <<<dim3(ceil_div(vectors, 128), partials), 128, 0, stream>>>(args, args.scratch);
            cudaCheck(cudaGetLastError());
        });
    }
    column_sums({{args.dweight, args.dbias, args.dcolsum}}, 3, args.scratch, partials, args.C, stream);
    OUTPUT("layernorm_backward.dresidual", args.dresidual, (size_t)args.N * args.C, stream);
    OUTPUT("layernorm_backward.dweight", args.dweight, (size_t)args.C, stream);
    OUTPUT("layernorm_backward.dbias", args.dbias, (size_t)args.C, stream);
    OUTPUT("layernorm_backward.dcolsum", args.dcolsum, (size_t)args.C, stream);
}

// == 6.3 matmul ==
// Linear layers through cuBLASLt. Row-major (R,C) is cuBLAS's column-major C x R with leading dimension C, so
//     forward      out (N,OC) = inp weight^T + bias (+ residual)     D = W^T inp   (m,n,k) = (OC,N,C)
//     input grad   dinp (N,C) = dout weight                          D = W dout            = (C,N,OC)
//     weight grad  dweight (OC,C) (+)= dout^T inp, fp32              D = inp dout^T        = (C,OC,N)
// bias, residual (as the C matrix, beta = 1), GELU and its derivative ride in the epilogue. cuBLASLt's
// bias-gradient epilogues do not pay (DGELU_BGRAD 1.58 ms against .57 for DGELU, BGRADB +25..60 %): column
// sums come from LayerNorm's backward, gelu_backward_inplace and bias_backward. Descriptors and the algorithm
// are looked up once per shape and kept. The choice is the library's first suggestion: no timing takes part,
// so equal runs take equal algorithms.
static size_t matmul_workspace_bytes() { return (size_t)64 << 20; }

struct Gemm {                           // D (m,n) = op(A) op(B) [+ C], column-major as cuBLAS wants it
    void* d;
    const void *a, *b, *c;              // c: null, or added; same layout and type as D
    const void* bias;                   // (m), or null
    void* aux;                          // (m,n): GELU's input, written (GELU_AUX) or read (DGELU); or null
    int m, n, k;
    bool trans_a, trans_b;
    cudaDataType_t d_type;
    cublasLtEpilogue_t epilogue;
};

struct GemmPlan {
    int64_t key[15];                    // all that the choice of an algorithm may depend on
    bool found;                         // false: the library has no algorithm for this
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, d;     // C has D's layout
    cublasLtMatmulAlgo_t algo;
};

static struct {
    cublasLtHandle_t handle;
    void* workspace;
    size_t workspace_bytes;
    cublasComputeType_t compute;
    std::vector<GemmPlan> plans;        // 124M: 13 of them
} matmul_state;

[[maybe_unused]] static cudaDataType_t cuda_type(float) { return CUDA_R_32F; }
#ifdef ENABLE_BF16
static cudaDataType_t cuda_type(__nv_bfloat16) { return CUDA_R_16BF; }
#endif
#ifdef ENABLE_FP16
static cudaDataType_t cuda_type(half) { return CUDA_R_16F; }
#endif

static void matmul_init(void* workspace, size_t workspace_bytes, bool tf32) {
    cublasCheck(cublasLtCreate(&matmul_state.handle));
    matmul_state.workspace = workspace;
    matmul_state.workspace_bytes = workspace_bytes;
    matmul_state.compute = tf32 && sizeof(floatX) == 4 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

static void matmul_free() {
    for (GemmPlan& plan : matmul_state.plans) {
        cublasCheck(cublasLtMatmulDescDestroy(plan.desc));
        for (cublasLtMatrixLayout_t layout : {plan.a, plan.b, plan.d}) {
            cublasCheck(cublasLtMatrixLayoutDestroy(layout));
        }
    }
    matmul_state.plans.clear();
    cublasCheck(cublasLtDestroy(matmul_state.handle));
}

// The largest power of two up to 256 that divides the address
static int64_t pointer_alignment(const void* p) {
    const uintptr_t address = (uintptr_t)p;
    return address == 0 ? 0 : (int64_t)std::min<uintptr_t>(256, address & (~address + 1));
}

// Operand pointers that are part of the descriptor rather than arguments of the call.
static void gemm_set_pointers(cublasLtMatmulDesc_t desc, const Gemm& g) {
    if (g.bias) {
        cublasCheck(
            cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &g.bias, sizeof(g.bias)));
    }
    if (g.aux) {
        cublasCheck(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &g.aux,
                                                   sizeof(g.aux)));
    }
}

// The library's suggestions for this product, best first by its own model; returns how many there are.
static int gemm_candidates(const GemmPlan& plan, const Gemm& g, cublasLtMatmulHeuristicResult_t* results,
                           int max) {
    cublasLtMatmulPreference_t pref;
    cublasCheck(cublasLtMatmulPreferenceCreate(&pref));
    auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
        cublasCheck(cublasLtMatmulPreferenceSetAttribute(pref, attribute, &value, sizeof(value)));
    };
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, matmul_state.workspace_bytes);
    // Split-K partials are added in fp32 in the workspace, in a fixed order; the in-place scheme adds as
    // blocks finish. Where n counts rows (forward, input gradient), fp32 without TF32 takes no split: every
    // algorithm then adds k = 0, 1, 2, ... one after the other (measured: dev/bench/NOTES.md), so a row's
    // result depends neither on how many rows are beside it (splitting a batch changes gradients by 1e-7
    // instead of 2e-6) nor on the library's choice.
    const bool sequential = sizeof(floatX) == 4 && matmul_state.compute == CUBLAS_COMPUTE_32F && !g.trans_b;
    set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
        (uint32_t)(sequential ? CUBLASLT_REDUCTION_SCHEME_NONE : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, (uint32_t)pointer_alignment(g.a));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, (uint32_t)pointer_alignment(g.b));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, (uint32_t)pointer_alignment(g.c ? g.c : g.d));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, (uint32_t)pointer_alignment(g.d));
    int count = 0;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(matmul_state.handle, plan.desc, plan.a, plan.b,
                                                           plan.d, plan.d, pref, max, results, &count);
    cublasCheck(cublasLtMatmulPreferenceDestroy(pref));
    if (status == CUBLAS_STATUS_NOT_SUPPORTED) { return 0; }
    cublasCheck(status);
    return count;
}

static GemmPlan gemm_plan(const Gemm& g) {
    GemmPlan plan = {};
    const cudaDataType_t type = cuda_type(floatX());
    cublasCheck(cublasLtMatmulDescCreate(&plan.desc, matmul_state.compute, CUDA_R_32F));
    auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
        cublasCheck(cublasLtMatmulDescSetAttribute(plan.desc, attribute, &value, sizeof(value)));
    };
    set(CUBLASLT_MATMUL_DESC_TRANSA, g.trans_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, g.trans_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, g.epilogue);
    if (g.bias) { set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type); }
    if (g.aux) {
        set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)g.m);
        set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, type);
    }
    gemm_set_pointers(plan.desc, g);                    // before the search: it reads their alignment
    const int a_rows = g.trans_a ? g.k : g.m, b_rows = g.trans_b ? g.n : g.k;
    cublasCheck(cublasLtMatrixLayoutCreate(&plan.a, type, a_rows, g.trans_a ? g.m : g.k, a_rows));
    cublasCheck(cublasLtMatrixLayoutCreate(&plan.b, type, b_rows, g.trans_b ? g.k : g.n, b_rows));
    cublasCheck(cublasLtMatrixLayoutCreate(&plan.d, g.d_type, g.m, g.n, g.m));
    cublasLtMatmulHeuristicResult_t result;
    plan.found = gemm_candidates(plan, g, &result, 1) > 0;
    if (plan.found) { plan.algo = result.algo; }
    return plan;
}

// False, and nothing done, if the library cannot do this product (odd sizes with a fused epilogue).
static bool gemm(const Gemm& g, Stream stream) {
    const int64_t key[15] = {g.m,
                             g.n,
                             g.k,
                             g.trans_a,
                             g.trans_b,
                             g.d_type,
                             g.epilogue,
                             g.c != nullptr,
                             pointer_alignment(g.a),
                             pointer_alignment(g.b),
                             pointer_alignment(g.c),
                             pointer_alignment(g.d),
                             pointer_alignment(g.bias),
                             pointer_alignment(g.aux),
                             0};
    GemmPlan* plan = nullptr;
    for (GemmPlan& p : matmul_state.plans) {
        if (memcmp(p.key, key, sizeof(key)) == 0) { plan = &p; }
    }
    if (!plan) {
        matmul_state.plans.push_back(gemm_plan(g));
        plan = &matmul_state.plans.back();
        memcpy(plan->key, key, sizeof(key));
    }
    if (!plan->found) { return false; }
    gemm_set_pointers(plan->desc, g);
    const float one = 1.0f, beta = g.c ? 1.0f : 0.0f;
    cublasCheck(cublasLtMatmul(matmul_state.handle, plan->desc, &one, g.a, plan->a, g.b, plan->b, &beta,
                               g.c ? g.c : g.d, plan->d, g.d, plan->d, &plan->algo, matmul_state.workspace,
                               matmul_state.workspace_bytes, stream));
    return true;
}

static void gemm_or_die(const Gemm& g, Stream stream) {
    if (gemm(g, stream)) { return; }
    die("cuBLASLt has no algorithm for a matrix product of %d x %d x %d (m, n, k) in %s\n"
        "hint: channel counts that are multiples of 8 always have one",
        g.m, g.n, g.k, PRECISION_NAME);
}

// One line per product seen so far: what the library chose for it. profile_gpt2.cu prints them.
[[maybe_unused]] static void matmul_print_plans(FILE* f) {
    for (const GemmPlan& p : matmul_state.plans) {
        int id = -1, tile = -1, stages = -1, split_k = -1;
        auto get = [&](cublasLtMatmulAlgoConfigAttributes_t attribute, int* value) {
            size_t written = 0;
            if (p.found) {
                cublasLtMatmulAlgoConfigGetAttribute(&p.algo, attribute, value, sizeof(*value), &written);
            }
        };
        get(CUBLASLT_ALGO_CONFIG_ID, &id);
        get(CUBLASLT_ALGO_CONFIG_TILE_ID, &tile);
        get(CUBLASLT_ALGO_CONFIG_STAGES_ID, &stages);
        get(CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &split_k);
        fprintf(f,
                "gemm m %d n %d k %d %c%c epilogue %d beta %d: algorithm %d tile %d stages %d split-k %d\n",
                (int)p.key[0], (int)p.key[1], (int)p.key[2], p.key[3] ? 'T' : 'N', p.key[4] ? 'T' : 'N',
                (int)p.key[6], (int)p.key[7], id, tile, stages, split_k);
    }
}

// grad (+)= values: the rounding step of a gradient that is kept in bf16.
template <bool kVector> __global__ void grad_accumulate_kernel(Grad grad, const float* values, size_t n) {
    const size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * kWidth;
    if (i < n) { grad_store<kVector>(grad, i, n, load_floats<kVector>(values, i, n)); }
}

static void grad_accumulate(Grad grad /*(n)*/, const float* values /*(n)*/, size_t n, Stream stream) {
    NvtxRange range("grad_accumulate");
    with_vector(n, [&](auto vector) {
        const size_t threads = 256, blocks = ceil_div(n, threads * kWidth);
        grad_accumulate_kernel<vector.value>
            <<<(unsigned)blocks, (unsigned)threads, 0, stream>>>(grad, values, n);
    });
    cudaCheck(cudaGetLastError());
}

struct MatmulForward {
    floatX* out;                        // (N,OC)
    const floatX *inp, *weight, *bias;  // (N,C) (OC,C) (OC) or null
    const floatX* residual;             // (N,OC) added to the output, or null; not `out`
    // (N,OC) or null; else pre_gelu = the layer's output and out = gelu(it)
    floatX* pre_gelu;
    int N, C, OC;
};
struct MatmulBackwardInput {
    floatX* dinp;                       // (N,C) stored
    const floatX *dout, *weight;        // (N,OC) (OC,C)
    const floatX* pre_gelu;             // (N,C) or null; else dinp is multiplied by gelu'(pre_gelu)
    int N, C, OC;
};

static void gelu_forward(floatX* out, const floatX* inp, size_t n, Stream stream);
static void gelu_backward_inplace(floatX* d_inplace, Grad dbias, float* scratch, const floatX* inp, int N,
                                  int OC, Stream stream);

static void matmul_forward(MatmulForward args, Stream stream) {
    NvtxRange range("matmul_forward");
    if (args.pre_gelu && args.residual) { die("matmul_forward: GELU and a residual do not go together"); }
    Gemm g = {args.out, args.weight, args.inp, args.residual, args.bias, nullptr, args.OC, args.N, args.C,
              true, false, cuda_type(floatX()),
              args.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT};
    bool done = false;
    // The library wants rows of aux in multiples of 8 elements
    if (args.pre_gelu && args.OC % 8 == 0) {
        Gemm fused = g;
        fused.aux = args.pre_gelu;
        fused.epilogue = args.bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
        done = gemm(fused, stream);
    }
    if (!done) {
        if (args.pre_gelu) { g.d = args.pre_gelu; }
        gemm_or_die(g, stream);
        if (args.pre_gelu) { gelu_forward(args.out, args.pre_gelu, (size_t)args.N * args.OC, stream); }
    }
    OUTPUT("matmul_forward.out", args.out, (size_t)args.N * args.OC, stream);
    if (args.pre_gelu) { OUTPUT("matmul_forward.pre_gelu", args.pre_gelu, (size_t)args.N * args.OC, stream); }
}

static void matmul_backward_input(MatmulBackwardInput args, Stream stream) {
    NvtxRange range("matmul_backward_input");
    Gemm g = {args.dinp, args.weight, args.dout, nullptr, nullptr, nullptr, args.C, args.N, args.OC, false,
              false, cuda_type(floatX()), CUBLASLT_EPILOGUE_DEFAULT};
    bool done = false;
    if (args.pre_gelu && args.C % 8 == 0) {
        Gemm fused = g;
        fused.aux = const_cast<floatX*>(args.pre_gelu);     // only read by this epilogue
        fused.epilogue = CUBLASLT_EPILOGUE_DGELU;
        done = gemm(fused, stream);
    }
    if (!done) {
        gemm_or_die(g, stream);
        if (args.pre_gelu) {
            gelu_backward_inplace(args.dinp, Grad{}, nullptr, args.pre_gelu, args.N, args.C, stream);
        }
    }
    OUTPUT("matmul_backward_input.dinp", args.dinp, (size_t)args.N * args.C, stream);
}

static void matmul_backward_weight(Grad dweight /*(OC,C)*/, float* scratch /*(OC,C) for bf16 gradients*/,
                                   const floatX* dout /*(N,OC)*/, const floatX* inp /*(N,C)*/, int N, int C,
                                   int OC, Stream stream) {
    NvtxRange range("matmul_backward_weight");
    void* d = dweight.is_bf16 ? scratch : dweight.data;
    const bool add = !dweight.is_bf16 && dweight.acc == Accumulate::Yes;
    gemm_or_die({d, inp, dout, add ? d : nullptr, nullptr, nullptr, C, OC, N, false, true, CUDA_R_32F,
                 CUBLASLT_EPILOGUE_DEFAULT},
                stream);
    const size_t n = (size_t)OC * C;
    if (dweight.is_bf16) { grad_accumulate(dweight, scratch, n, stream); }
    OUTPUT("matmul_backward_weight.dweight", dweight, n, stream);
}

// == 6.4 attention ==
// Causal self-attention of each head, straight on the packed output of the qkv linear layer:
//     S = Q K^T / sqrt(HS)     P = softmax(S) over keys <= query     O = P V
// Forward:  qkv (B,T,3,NH,HS) -> out (B,T,NH,HS) =, lse (B,NH,T) = ln sum exp S.
// Backward: D = rowsum(dO * O)     P = exp(S - lse)     dS = P * (dO V^T - D)
//     dQ = dS K / sqrt(HS)     dK = dS^T Q / sqrt(HS)     dV = P^T dO     dqkv (B,T,3,NH,HS) =
//
// Nothing of shape (T,T) is ever stored: tiles of S live in registers and the backward builds P again from
// lse.
//
// Backward is two kernels, one that owns query rows (dQ, and D on its way) and one that owns key rows (dK,
// dV). That costs 7 matrix products where one kernel with atomic adds into dQ needs 5, but every output has
// one owner that sums in a fixed order (bit-equal runs), and no fp32 dQ buffer is cleared, added to and
// converted.
//
// Scratch of the backward: float2 {lse * log2(e), D} per query (plain kernels: {lse, D}),
// (B,NH,stats_stride(T)): rows of a head are padded with zeros to a multiple of 128, so that whole tiles of
// it can be copied.
//
// Head sizes 64, 80, 96, 128 in 16 bits use tensor cores (mma.sync; 64 on Hopper: wgmma); fp32 and every
// other head size take the plain kernels.

// Work order of the tensor-core kernels: sections of 32 heads, in a section the longest tiles first. A
// section's K and V (8 MB at T=1024, HS=64) stay in L2 while its tiles run, and short tiles fill the end of
// the grid.
constexpr int kSectionHeads = 32;

__host__ __device__ inline size_t stats_stride(int T) { return (static_cast<size_t>(T) + 127) / 128 * 128; }

struct AttentionTile {
    int tile;    // rank in its head, 0 = the longest
    int bh;      // b * NH + h
};

__device__ inline AttentionTile attention_tile(int tiles, int heads) {
    const int per_section = kSectionHeads * tiles;
    const int first_head = static_cast<int>(blockIdx.x / per_section) * kSectionHeads;
    const int rest = static_cast<int>(blockIdx.x % per_section);
    const int section_heads = min(kSectionHeads, heads - first_head);
    return {rest / section_heads, first_head + rest % section_heads};
}

// ---- tensor-core pieces (mma.sync m16n8k16: sm_80 and later). PTX ISA "Matrix Fragments for mma.m16n8k16":
// with g = lane / 4 and c = 2 * (lane % 4), an accumulator holds (g,c) (g,c+1) (g+8,c) (g+8,c+1), so two
// neighbouring 16x8 accumulators, packed, are the A operand of the next product: P and dS never leave
// registers.

// Rows in shared memory are 8 elements longer than HS: 16-byte chunks of 8 consecutive rows then start in 8
// different bank groups, so ldmatrix has no conflicts, and every offset is a constant (a swizzle would need
// XORs).
template <int HS>
constexpr int kTileStride = HS + 8;

__device__ inline uint32_t smem_address(const void* ptr) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(ptr));
}

__device__ inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

template <typename E>
__device__ inline void mma_16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (std::is_same_v<E, half>) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

template <typename E>
__device__ inline uint32_t pack_pair(float low, float high) {
    uint32_t bits;
    if constexpr (std::is_same_v<E, half>) {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    }
    return bits;
}

// Starts the copy of rows row0.. of a (T, HS) matrix with `stride` elements between rows into a tile (ROWS,
// HS); rows from T on become zero.
template <typename E, int HS, int ROWS, int THREADS>
__device__ inline void load_tile(E* tile, const E* matrix, size_t stride, int row0, int T) {
    constexpr int kChunks = HS / 8;
    constexpr int kTotal = ROWS * kChunks;
#pragma unroll
    for (int first = 0; first < kTotal; first += THREADS) {
        const int i = first + static_cast<int>(threadIdx.x);
        if (kTotal % THREADS == 0 || i < kTotal) {
            const int row = i / kChunks;
            const int chunk = i % kChunks;
            const bool valid = row0 + row < T;
            const E* src = matrix + (valid ? row0 + row : 0) * stride + chunk * 8;
            cp_async_16_or_zero(tile + row * kTileStride<HS> + chunk * 8, src, valid);
        }
    }
}

// The warp's rows of a tile as A operands: (16 * MT, HS) from row `row`.
template <int MT, int HS>
__device__ inline void load_fragments(uint32_t (&a)[MT][HS / 16][4], uint32_t tile, int row, int lane) {
    const uint32_t address = tile + ((row + lane % 16) * kTileStride<HS> + lane / 16 * 8) * 2;
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
#pragma unroll
        for (int kk = 0; kk < HS / 16; kk++) {
            ldmatrix_x4(a[mt][kk], address + (mt * 16 * kTileStride<HS> + kk * 16) * 2);
        }
    }
}

// acc (16 * MT, N) += A (16 * MT, HS) B^T with B (N, HS) a tile in shared memory.
template <typename E, int MT, int N, int HS>
__device__ inline void mma_times_rows(float (&acc)[MT][N / 8][4], const uint32_t (&a)[MT][HS / 16][4],
                                      uint32_t tile, int lane) {
    const uint32_t address = tile + ((lane % 8 + lane / 16 * 8) * kTileStride<HS> + lane / 8 % 2 * 8) * 2;
#pragma unroll
    for (int kk = 0; kk < HS / 16; kk++) {
#pragma unroll
        for (int n = 0; n < N / 16; n++) {
            uint32_t b[4];
            ldmatrix_x4(b, address + (n * 16 * kTileStride<HS> + kk * 16) * 2);
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                mma_16816<E>(acc[mt][2 * n], a[mt][kk], b[0], b[1]);
                mma_16816<E>(acc[mt][2 * n + 1], a[mt][kk], b[2], b[3]);
            }
        }
    }
}

// acc (16 * MT, HS) += A (16 * MT, K) B with B (K, HS) a tile in shared memory.
template <typename E, int MT, int K, int HS>
__device__ inline void mma_times_columns(float (&acc)[MT][HS / 8][4], const uint32_t (&a)[MT][K / 16][4],
                                         uint32_t tile, int lane) {
    const uint32_t address = tile + (lane % 16 * kTileStride<HS> + lane / 16 * 8) * 2;
#pragma unroll
    for (int kk = 0; kk < K / 16; kk++) {
#pragma unroll
        for (int n = 0; n < HS / 16; n++) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, address + (kk * 16 * kTileStride<HS> + n * 16) * 2);
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                mma_16816<E>(acc[mt][2 * n], a[mt][kk], b[0], b[1]);
                mma_16816<E>(acc[mt][2 * n + 1], a[mt][kk], b[2], b[3]);
            }
        }
    }
}

// Accumulators (16 * MT, N), rounded to E, as A operands.
template <typename E, int MT, int N>
__device__ inline void to_fragments(uint32_t (&a)[MT][N / 16][4], const float (&acc)[MT][N / 8][4]) {
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
#pragma unroll
        for (int kk = 0; kk < N / 16; kk++) {
            a[mt][kk][0] = pack_pair<E>(acc[mt][2 * kk][0], acc[mt][2 * kk][1]);
            a[mt][kk][1] = pack_pair<E>(acc[mt][2 * kk][2], acc[mt][2 * kk][3]);
            a[mt][kk][2] = pack_pair<E>(acc[mt][2 * kk + 1][0], acc[mt][2 * kk + 1][1]);
            a[mt][kk][3] = pack_pair<E>(acc[mt][2 * kk + 1][2], acc[mt][2 * kk + 1][3]);
        }
    }
}

// Stores the warp's accumulators (16 * MT, HS), rows scaled by `scale`, to rows row0.. of a (T, HS) matrix.
// They go through the warp's own rows `staging` of shared memory (nobody else may use those), so that global
// stores are 16 bytes wide and whole rows.
template <typename E, int MT, int HS>
__device__ inline void store_rows(E* matrix, size_t stride, int row0, int T, E* staging,
                                  const float (&acc)[MT][HS / 8][4], const float (&scale)[MT][2], int lane) {
    __syncwarp();
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
#pragma unroll
        for (int n = 0; n < HS / 8; n++) {
#pragma unroll
            for (int half_tile = 0; half_tile < 2; half_tile++) {
                const int row = mt * 16 + half_tile * 8 + lane / 4;
                const uint32_t pair = pack_pair<E>(acc[mt][n][2 * half_tile] * scale[mt][half_tile],
                                                   acc[mt][n][2 * half_tile + 1] * scale[mt][half_tile]);
                *reinterpret_cast<uint32_t*>(staging + row * kTileStride<HS> + n * 8 + lane % 4 * 2) = pair;
            }
        }
    }
    __syncwarp();
#pragma unroll
    for (int i = lane; i < 16 * MT * HS / 8; i += 32) {
        const int row = i / (HS / 8);
        const int chunk = i % (HS / 8);
        if (row0 + row < T) {
            *reinterpret_cast<uint4*>(matrix + (row0 + row) * stride + chunk * 8) =
                *reinterpret_cast<const uint4*>(staging + row * kTileStride<HS> + chunk * 8);
        }
    }
}

// Sum or maximum over the four lanes that share the rows of an accumulator.
__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

__device__ inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// ---- forward, tensor cores: a block owns BM query rows (16 * MT a warp) and walks the key blocks from the
// diagonal leftwards, so every row's running maximum is finite from its first block on and only diagonal
// blocks are masked.

template <typename E, int HS, int MT, int WARPS, int BN>
struct AttentionForwardShared {
    static constexpr int BM = WARPS * MT * 16;
    alignas(16) E q[BM * kTileStride<HS>];    // (BM, HS), later the staging of out
    E k[2][BN * kTileStride<HS>];             // (stage, BN, HS)
    E v[2][BN * kTileStride<HS>];             // (stage, BN, HS)
};

template <typename E, int HS, int MT, int WARPS, int BN, int MIN_BLOCKS>
__global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
    attention_forward_mma_kernel(E* out, float* lse, const E* qkv, int B, int T, int NH, float scale) {
    static_assert(BN % (16 * MT) == 0, "a warp's rows must not straddle the first column of a key block");
    typedef AttentionForwardShared<E, HS, MT, WARPS, BN> Shared;
    constexpr int BM = Shared::BM;
    constexpr int THREADS = WARPS * 32;
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);

    const int lane = threadIdx.x % 32;
    const int warp_row = threadIdx.x / 32 * (16 * MT);
    const int tiles = (T + BM - 1) / BM;
    const AttentionTile work = attention_tile(tiles, B * NH);
    const int q0 = (tiles - 1 - work.tile) * BM;
    const int b = work.bh / NH;
    const int h = work.bh % NH;
    const size_t C = static_cast<size_t>(NH) * HS;
    const E* q_bh = qkv + b * (T * 3 * C) + h * HS;    // (T, HS), rows 3*C apart
    const E* k_bh = q_bh + C;
    const E* v_bh = k_bh + C;

    const int blocks = (min(q0 + BM, T) + BN - 1) / BN;
    load_tile<E, HS, BM, THREADS>(shared.q, q_bh, 3 * C, q0, T);
    load_tile<E, HS, BN, THREADS>(shared.k[0], k_bh, 3 * C, (blocks - 1) * BN, T);
    load_tile<E, HS, BN, THREADS>(shared.v[0], v_bh, 3 * C, (blocks - 1) * BN, T);
    cp_async_commit();

    const float scale_log2 = scale * kLog2e;
    const int row_first = q0 + warp_row;    // the warp's first query
    uint32_t q_frag[MT][HS / 16][4];
    float o[MT][HS / 8][4] = {};
    float row_max[MT][2], row_sum[MT][2];    // of rows lane/4 and lane/4 + 8
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
        row_max[mt][0] = row_max[mt][1] = -INFINITY;
        row_sum[mt][0] = row_sum[mt][1] = 0.0f;
    }

    for (int it = 0; it < blocks; it++) {
        const int k0 = (blocks - 1 - it) * BN;
        const int stage = it % 2;
        cp_async_wait<0>();
        __syncthreads();    // this stage has landed for all, and all have finished with the other stage
        if (it + 1 < blocks) {
            load_tile<E, HS, BN, THREADS>(shared.k[stage ^ 1], k_bh, 3 * C, k0 - BN, T);
            load_tile<E, HS, BN, THREADS>(shared.v[stage ^ 1], v_bh, 3 * C, k0 - BN, T);
            cp_async_commit();
        }
        if (it == 0) {
            load_fragments<MT, HS>(q_frag, smem_address(shared.q), warp_row, lane);
        }
        if (k0 > row_first + 16 * MT - 1) {
            continue;
        }    // all masked for this warp

        float s[MT][BN / 8][4] = {};
        mma_times_rows<E, MT, BN, HS>(s, q_frag, smem_address(shared.k[stage]), lane);
        if (k0 + BN - 1 > row_first) {
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
#pragma unroll
                for (int n = 0; n < BN / 8; n++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int row = row_first + mt * 16 + lane / 4 + i / 2 * 8;
                        const int column = k0 + n * 8 + lane % 4 * 2 + i % 2;
                        s[mt][n][i] = column > row ? -INFINITY : s[mt][n][i];
                    }
                }
            }
        }

#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
#pragma unroll
            for (int half_tile = 0; half_tile < 2; half_tile++) {
                const int i0 = 2 * half_tile;
                float block_max = -INFINITY;
#pragma unroll
                for (int n = 0; n < BN / 8; n++) {
                    block_max = fmaxf(block_max, fmaxf(s[mt][n][i0], s[mt][n][i0 + 1]));
                }
                const float new_max = fmaxf(row_max[mt][half_tile], quad_max(block_max));
                const float correction = exp2_fast((row_max[mt][half_tile] - new_max) * scale_log2);
                const float max_log2 = new_max * scale_log2;
                row_max[mt][half_tile] = new_max;
                float sum = row_sum[mt][half_tile] * correction;
#pragma unroll
                for (int n = 0; n < BN / 8; n++) {
                    s[mt][n][i0] = exp2_fast(fmaf(s[mt][n][i0], scale_log2, -max_log2));
                    s[mt][n][i0 + 1] = exp2_fast(fmaf(s[mt][n][i0 + 1], scale_log2, -max_log2));
                    sum += s[mt][n][i0] + s[mt][n][i0 + 1];
                }
                row_sum[mt][half_tile] = sum;
#pragma unroll
                for (int n = 0; n < HS / 8; n++) {
                    o[mt][n][i0] *= correction;
                    o[mt][n][i0 + 1] *= correction;
                }
            }
        }
        uint32_t p_frag[MT][BN / 16][4];
        to_fragments<E, MT, BN>(p_frag, s);
        mma_times_columns<E, MT, BN, HS>(o, p_frag, smem_address(shared.v[stage]), lane);
    }

    float inverse[MT][2];
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
#pragma unroll
        for (int half_tile = 0; half_tile < 2; half_tile++) {
            const float sum = quad_sum(row_sum[mt][half_tile]);
            const int row = row_first + mt * 16 + half_tile * 8 + lane / 4;
            inverse[mt][half_tile] = 1.0f / sum;
            if (lane % 4 == 0 && row < T) {
                lse[static_cast<size_t>(work.bh) * T + row] = row_max[mt][half_tile] * scale + logf(sum);
            }
        }
    }
    store_rows<E, MT, HS>(out + b * (T * C) + h * HS, C, row_first, T, shared.q + warp_row * kTileStride<HS>,
                          o, inverse, lane);
}

// The statistics of the warp's 16 queries from row0 on: D = rowsum(dO * O), two lanes a row, and lse *
// log2(e), both for this lane's accumulator rows lane / 4 and lane / 4 + 8, and stored for the dK/dV kernel.
// Rows from T on get zeros: their P is exp2(0) = 1, which then meets rows of zeros only.
template <typename E, int HS>
__device__ inline void attention_row_stats(float (&row_lse2)[2], float (&row_d)[2], float2* stats_bh,
                                           const float* lse_bh, const E* out_bh, const E* dout_bh, size_t C,
                                           int row0, int T, int lane) {
    const int row = row0 + lane / 2;
    float sum = 0.0f;
    float lse2 = 0.0f;
    if (row < T) {
#pragma unroll
        for (int chunk = lane % 2; chunk < HS / 8; chunk += 2) {
            alignas(16) E o_chunk[8], do_chunk[8];
            *reinterpret_cast<uint4*>(o_chunk) =
                *reinterpret_cast<const uint4*>(out_bh + row * C + chunk * 8);
            *reinterpret_cast<uint4*>(do_chunk) =
                *reinterpret_cast<const uint4*>(dout_bh + row * C + chunk * 8);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                sum += static_cast<float>(o_chunk[i]) * static_cast<float>(do_chunk[i]);
            }
        }
        lse2 = lse_bh[row] * kLog2e;
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    if (lane % 2 == 0 && row < stats_stride(T)) {
        stats_bh[row] = make_float2(lse2, sum);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int source = 2 * (r * 8 + lane / 4);
        row_lse2[r] = __shfl_sync(0xffffffffu, lse2, source);
        row_d[r] = __shfl_sync(0xffffffffu, sum, source);
    }
}

// ---- backward, tensor cores, 1: dQ and D. Same walk as the forward.

template <typename E, int HS, int MT, int WARPS, int BN>
struct AttentionDqShared {
    static constexpr int BM = WARPS * MT * 16;
    alignas(16) E q[BM * kTileStride<HS>];    // (BM, HS), later the staging of dQ
    E dout[BM * kTileStride<HS>];             // (BM, HS)
    E k[2][BN * kTileStride<HS>];             // (stage, BN, HS)
    E v[2][BN * kTileStride<HS>];             // (stage, BN, HS)
};

template <typename E, int HS, int MT, int WARPS, int BN, int MIN_BLOCKS>
__global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
    attention_backward_dq_mma_kernel(E* dqkv, float2* row_stats, const E* dout, const E* out, const E* qkv,
                                     const float* lse, int B, int T, int NH, float scale) {
    typedef AttentionDqShared<E, HS, MT, WARPS, BN> Shared;
    constexpr int BM = Shared::BM;
    constexpr int THREADS = WARPS * 32;
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);

    const int lane = threadIdx.x % 32;
    const int warp_row = threadIdx.x / 32 * (16 * MT);
    const int tiles = (T + BM - 1) / BM;
    const AttentionTile work = attention_tile(tiles, B * NH);
    const int q0 = (tiles - 1 - work.tile) * BM;
    const int b = work.bh / NH;
    const int h = work.bh % NH;
    const size_t C = static_cast<size_t>(NH) * HS;
    const E* q_bh = qkv + b * (T * 3 * C) + h * HS;    // (T, HS), rows 3*C apart
    const E* k_bh = q_bh + C;
    const E* v_bh = k_bh + C;
    const E* dout_bh = dout + b * (T * C) + h * HS;    // (T, HS), rows C apart
    const E* out_bh = out + b * (T * C) + h * HS;

    const int blocks = (min(q0 + BM, T) + BN - 1) / BN;
    load_tile<E, HS, BM, THREADS>(shared.q, q_bh, 3 * C, q0, T);
    load_tile<E, HS, BM, THREADS>(shared.dout, dout_bh, C, q0, T);
    load_tile<E, HS, BN, THREADS>(shared.k[0], k_bh, 3 * C, (blocks - 1) * BN, T);
    load_tile<E, HS, BN, THREADS>(shared.v[0], v_bh, 3 * C, (blocks - 1) * BN, T);
    cp_async_commit();

    const int row_first = q0 + warp_row;
    const size_t stats_bh = work.bh * stats_stride(T);
    float row_lse2[MT][2], row_d[MT][2];    // of rows lane/4 and lane/4 + 8
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {    // while the tiles are on their way
        attention_row_stats<E, HS>(row_lse2[mt], row_d[mt], row_stats + stats_bh,
                                   lse + static_cast<size_t>(work.bh) * T, out_bh, dout_bh, C,
                                   row_first + mt * 16, T, lane);
    }

    const float scale_log2 = scale * kLog2e;
    uint32_t q_frag[MT][HS / 16][4], do_frag[MT][HS / 16][4];
    float dq[MT][HS / 8][4] = {};
    for (int it = 0; it < blocks; it++) {
        const int k0 = (blocks - 1 - it) * BN;
        const int stage = it % 2;
        cp_async_wait<0>();
        __syncthreads();
        if (it + 1 < blocks) {
            load_tile<E, HS, BN, THREADS>(shared.k[stage ^ 1], k_bh, 3 * C, k0 - BN, T);
            load_tile<E, HS, BN, THREADS>(shared.v[stage ^ 1], v_bh, 3 * C, k0 - BN, T);
            cp_async_commit();
        }
        if (it == 0) {
            load_fragments<MT, HS>(q_frag, smem_address(shared.q), warp_row, lane);
            load_fragments<MT, HS>(do_frag, smem_address(shared.dout), warp_row, lane);
        }
        if (k0 > row_first + 16 * MT - 1) {
            continue;
        }

        float s[MT][BN / 8][4] = {};
        mma_times_rows<E, MT, BN, HS>(s, q_frag, smem_address(shared.k[stage]), lane);
        const bool masked = k0 + BN - 1 > row_first;
        float dp[MT][BN / 8][4] = {};
        mma_times_rows<E, MT, BN, HS>(dp, do_frag, smem_address(shared.v[stage]), lane);
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
#pragma unroll
            for (int n = 0; n < BN / 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float p = exp2_fast(fmaf(s[mt][n][i], scale_log2, -row_lse2[mt][i / 2]));
                    if (masked) {
                        const int row = row_first + mt * 16 + lane / 4 + i / 2 * 8;
                        const int column = k0 + n * 8 + lane % 4 * 2 + i % 2;
                        p = column > row ? 0.0f : p;
                    }
                    dp[mt][n][i] = p * (dp[mt][n][i] - row_d[mt][i / 2]);
                }
            }
        }
        uint32_t ds_frag[MT][BN / 16][4];
        to_fragments<E, MT, BN>(ds_frag, dp);
        mma_times_columns<E, MT, BN, HS>(dq, ds_frag, smem_address(shared.k[stage]), lane);
    }

    float scales[MT][2];
#pragma unroll
    for (int mt = 0; mt < MT; mt++) { scales[mt][0] = scales[mt][1] = scale; }
    store_rows<E, MT, HS>(dqkv + b * (T * 3 * C) + h * HS, 3 * C, row_first, T,
                          shared.q + warp_row * kTileStride<HS>, dq, scales, lane);
}

// ---- backward, tensor cores, 2: dK and dV. A block owns BN key rows and walks the query blocks from the
// diagonal down. It works on S^T = K Q^T, so that P^T and dS^T are A operands where they arise; lse and D are
// per column.

template <typename E, int HS, int MT, int WARPS, int BM>
struct AttentionDkvShared {
    static constexpr int BN = WARPS * MT * 16;
    alignas(16) E k[BN * kTileStride<HS>];    // (BN, HS), later the staging of dK
    E v[BN * kTileStride<HS>];                // (BN, HS), later the staging of dV
    E q[2][BM * kTileStride<HS>];             // (stage, BM, HS)
    E dout[2][BM * kTileStride<HS>];          // (stage, BM, HS)
    float2 stats[2][BM];                      // (stage, BM) {lse * log2(e), D}
};

template <typename E, int HS, int MT, int WARPS, int BM, int MIN_BLOCKS, bool kKeepFragments>
__global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
    attention_backward_dkv_mma_kernel(E* dqkv, const float2* row_stats, const E* dout, const E* qkv, int B,
                                      int T, int NH, float scale) {
    typedef AttentionDkvShared<E, HS, MT, WARPS, BM> Shared;
    constexpr int BN = Shared::BN;
    constexpr int THREADS = WARPS * 32;
    static_assert(BM <= 2 * THREADS && 128 % BM == 0,
                  "a thread loads the statistics of two queries, padded to 128");
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);

    const int lane = threadIdx.x % 32;
    const int warp_row = threadIdx.x / 32 * (16 * MT);
    const AttentionTile work = attention_tile((T + BN - 1) / BN, B * NH);
    const int k0 = work.tile * BN;
    const int b = work.bh / NH;
    const int h = work.bh % NH;
    const size_t C = static_cast<size_t>(NH) * HS;
    const E* q_bh = qkv + b * (T * 3 * C) + h * HS;    // (T, HS), rows 3*C apart
    const E* k_bh = q_bh + C;
    const E* v_bh = k_bh + C;
    const E* dout_bh = dout + b * (T * C) + h * HS;    // (T, HS), rows C apart
    const float2* stats_bh = row_stats + work.bh * stats_stride(T);

    const auto load_queries = [&](int stage, int q0) {
        load_tile<E, HS, BM, THREADS>(shared.q[stage], q_bh, 3 * C, q0, T);
        load_tile<E, HS, BM, THREADS>(shared.dout[stage], dout_bh, C, q0, T);
        if (threadIdx.x < BM / 2) {
            const int row = 2 * static_cast<int>(threadIdx.x);
            cp_async_16_or_zero(&shared.stats[stage][row], stats_bh + q0 + row, true);
        }
        cp_async_commit();
    };
    const int first_q = k0 / BM * BM;
    load_tile<E, HS, BN, THREADS>(shared.k, k_bh, 3 * C, k0, T);
    load_tile<E, HS, BN, THREADS>(shared.v, v_bh, 3 * C, k0, T);
    load_queries(0, first_q);

    const float scale_log2 = scale * kLog2e;
    const int row_first = k0 + warp_row;    // the warp's first key
    uint32_t k_frag[MT][HS / 16][4], v_frag[MT][HS / 16][4];
    float dk[MT][HS / 8][4] = {};
    float dv[MT][HS / 8][4] = {};
    int stage = 0;
    for (int q0 = first_q; q0 < T; q0 += BM, stage ^= 1) {
        cp_async_wait<0>();
        __syncthreads();    // this stage has landed for all, and all have finished with the other stage
        if (q0 + BM < T) {
            load_queries(stage ^ 1, q0 + BM);
        }
        if (kKeepFragments && q0 == first_q) {
            load_fragments<MT, HS>(k_frag, smem_address(shared.k), warp_row, lane);
            load_fragments<MT, HS>(v_frag, smem_address(shared.v), warp_row, lane);
        }
        if (q0 + BM - 1 < row_first) {
            continue;
        }    // all masked for this warp

        float s[MT][BM / 8][4] = {};    // S^T, then P^T
        if (!kKeepFragments) {
            load_fragments<MT, HS>(k_frag, smem_address(shared.k), warp_row, lane);
        }
        mma_times_rows<E, MT, BM, HS>(s, k_frag, smem_address(shared.q[stage]), lane);
        float dp[MT][BM / 8][4] = {};    // dP^T, then dS^T
        if (!kKeepFragments) {
            load_fragments<MT, HS>(v_frag, smem_address(shared.v), warp_row, lane);
        }
        mma_times_rows<E, MT, BM, HS>(dp, v_frag, smem_address(shared.dout[stage]), lane);
        const bool masked = q0 < row_first + 16 * MT - 1;
#pragma unroll
        for (int n = 0; n < BM / 8; n++) {
            const int column = n * 8 + lane % 4 * 2;
            const float4 stats = *reinterpret_cast<const float4*>(&shared.stats[stage][column]);
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float p = exp2_fast(fmaf(s[mt][n][i], scale_log2, i % 2 == 0 ? -stats.x : -stats.z));
                    if (masked) {
                        const int row = row_first + mt * 16 + lane / 4 + i / 2 * 8;
                        p = row > q0 + column + i % 2 ? 0.0f : p;
                    }
                    s[mt][n][i] = p;
                    dp[mt][n][i] = p * (dp[mt][n][i] - (i % 2 == 0 ? stats.y : stats.w));
                }
            }
        }
        uint32_t p_frag[MT][BM / 16][4];
        to_fragments<E, MT, BM>(p_frag, s);
        mma_times_columns<E, MT, BM, HS>(dv, p_frag, smem_address(shared.dout[stage]), lane);
        uint32_t ds_frag[MT][BM / 16][4];
        to_fragments<E, MT, BM>(ds_frag, dp);
        mma_times_columns<E, MT, BM, HS>(dk, ds_frag, smem_address(shared.q[stage]), lane);
    }

    float scales[MT][2], ones[MT][2];
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
        scales[mt][0] = scales[mt][1] = scale;
        ones[mt][0] = ones[mt][1] = 1.0f;
    }
    E* dk_bh = dqkv + b * (T * 3 * C) + C + h * HS;    // (T, HS), rows 3*C apart
    E* dv_bh = dk_bh + C;
    store_rows<E, MT, HS>(dk_bh, 3 * C, row_first, T, shared.k + warp_row * kTileStride<HS>, dk, scales,
                          lane);
    store_rows<E, MT, HS>(dv_bh, 3 * C, row_first, T, shared.v + warp_row * kTileStride<HS>, dv, ones, lane);
}

// ---- Hopper (sm_90a), head size 64: the same three loops on wgmma, tiles fetched by the tensor memory
// accelerator. A block is one warpgroup (4 warps): 64 rows of one side against blocks of 64 rows of the
// other, so the first block is the only masked one. Three or four such blocks share an SM and fill each
// other's waits; that measured faster than two warpgroups on one tile. In the forward the second product of a
// step also runs under the exponentials of the next step; the same in the backward measured no faster.
//
// Tiles are [64][64] in the 128-byte swizzle: 16-byte chunk c of row r sits at chunk c ^ (r % 8).
// (The block's own rows in registers as A operands would spare shared memory a third of its reads, but
// ptxas 13.0.88 then puts P into the registers that still hold Q: wrong from the second block on.)

constexpr int kSm90Tile = 64 * 64;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define WGMMA_REGS_64                                                        \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_OPS_64(IO, d)                                                                                 \
    IO(d[0][0]), IO(d[0][1]), IO(d[0][2]), IO(d[0][3]), IO(d[1][0]), IO(d[1][1]), IO(d[1][2]), IO(d[1][3]), \
        IO(d[2][0]), IO(d[2][1]), IO(d[2][2]), IO(d[2][3]), IO(d[3][0]), IO(d[3][1]), IO(d[3][2]),          \
        IO(d[3][3]), IO(d[4][0]), IO(d[4][1]), IO(d[4][2]), IO(d[4][3]), IO(d[5][0]), IO(d[5][1]),          \
        IO(d[5][2]), IO(d[5][3]), IO(d[6][0]), IO(d[6][1]), IO(d[6][2]), IO(d[6][3]), IO(d[7][0]),          \
        IO(d[7][1]), IO(d[7][2]), IO(d[7][3])

__device__ inline void mbarrier_init(uint64_t* barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(count)
                 : "memory");
}

__device__ inline void mbarrier_expect(uint64_t* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)),
                 "r"(bytes)
                 : "memory");
}

__device__ inline void mbarrier_wait(uint64_t* barrier, int parity) {
    asm volatile(
        "{\n.reg .pred done;\nWAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(smem_address(barrier)),
        "r"(parity)
        : "memory");
}

// 64 rows from t on of slot (h, or NH + h, 2 NH + h) of batch row b; rows past T arrive as zeros.
__device__ inline void tma_load(void* dst, const CUtensorMap* map, uint64_t* barrier, int t, int slot,
                                int b) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(smem_address(dst)),
        "l"(map), "r"(0), "r"(t), "r"(slot), "r"(b), "r"(smem_address(barrier))
        : "memory");
}

__device__ inline void bulk_load(void* dst, const void* src, uint64_t* barrier, int bytes) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            smem_address(dst)),
        "l"(src), "r"(bytes), "r"(smem_address(barrier))
        : "memory");
}

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The compiler does not know that wgmma writes its accumulators until the wait: no use may move across this.
__device__ inline void pin_registers(float (&d)[8][4]) {
#pragma unroll
    for (int n = 0; n < 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) { asm volatile("" : "+f"(d[n][i])::"memory"); }
    }
}

// Matrix descriptor of a swizzled tile (PTX ISA "Matrix Descriptor Format"): groups of 8 rows are 1024 bytes
// apart.
__device__ inline uint64_t wgmma_descriptor(const void* tile) {
    return static_cast<uint64_t>((smem_address(tile) & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) |
           (1ull << 62);
}

// The first step of a product stores ("=f"), the later ones add ("+f"): a "+f" on registers that hold nothing
// yet would make the compiler set them first, and ptxas then serialises the wgmma pipeline (warning C7515).
#define WGMMA_SS(TYPE, IO, ADD)                                                                 \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" WGMMA_REGS_64 \
                 "}, "                                                                          \
                 "%32, %33, " ADD ", 1, 1, 0, 0;"                                               \
                 : WGMMA_OPS_64(IO, d)                                                          \
                 : "l"(a), "l"(b))
#define WGMMA_RS(TYPE)                                                                          \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" WGMMA_REGS_64 \
                 "}, "                                                                          \
                 "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"                                       \
                 : WGMMA_OPS_64("+f", d)                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// d (64, 64) = or += A (64, 16) B (64, 16)^T, both in shared memory.
template <typename E, bool kAdd>
__device__ inline void wgmma_shared(float (&d)[8][4], uint64_t a, uint64_t b) {
    constexpr bool kHalf = std::is_same_v<E, half>;
    if constexpr (kHalf && kAdd) {
        WGMMA_SS("f16", "+f", "1");
    }
    if constexpr (kHalf && !kAdd) {
        WGMMA_SS("f16", "=f", "0");
    }
    if constexpr (!kHalf && kAdd) {
        WGMMA_SS("bf16", "+f", "1");
    }
    if constexpr (!kHalf && !kAdd) {
        WGMMA_SS("bf16", "=f", "0");
    }
}

// Starts d (64, 64) = A (64, 64) B^T, both tiles in shared memory, and closes the group.
template <typename E>
__device__ inline void wgmma_rows(float (&d)[8][4], const E* a_tile, const E* b_tile) {
    const uint64_t a = wgmma_descriptor(a_tile);
    const uint64_t b = wgmma_descriptor(b_tile);
    wgmma_shared<E, false>(d, a, b);
#pragma unroll
    for (int kk = 1; kk < 4; kk++) {
        wgmma_shared<E, true>(d, a + 2 * kk, b + 2 * kk);
    }    // 16 columns: 32 bytes
    wgmma_commit();
}

// Starts d (64, 64) += A (64, 64) B, A in registers, and closes the group.
template <typename E>
__device__ inline void wgmma_columns(float (&d)[8][4], const uint32_t (&a_frag)[4][4], const E* b_tile) {
#pragma unroll
    for (int kk = 0; kk < 4; kk++) {
        const uint32_t(&a)[4] = a_frag[kk];
        const uint64_t b = wgmma_descriptor(b_tile) + 128 * kk;    // 16 rows: 2048 bytes
        if constexpr (std::is_same_v<E, half>) {
            WGMMA_RS("f16");
        } else {
            WGMMA_RS("bf16");
        }
    }
    wgmma_commit();
}

template <typename E>
__device__ inline void pack_fragments(uint32_t (&a)[4][4], const float (&acc)[8][4]) {
#pragma unroll
    for (int n = 0; n < 8; n++) {
        a[n / 2][n % 2 * 2] = pack_pair<E>(acc[n][0], acc[n][1]);
        a[n / 2][n % 2 * 2 + 1] = pack_pair<E>(acc[n][2], acc[n][3]);
    }
}

// Stores the block's accumulators (64, 64) to rows row0.. of a (T, 64) matrix, through a tile that nobody
// reads any more: each warp has its own 16 rows of it.
template <typename E>
__device__ inline void store_swizzled(E* matrix, size_t stride, int row0, int T, E* tile,
                                      const float (&acc)[8][4], float scale0, float scale1) {
    const int lane = threadIdx.x % 32;
    const int warp_row = threadIdx.x / 32 * 16;
    const int g = lane / 4;
    E* staging = tile + warp_row * 64;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        uint32_t* pair = reinterpret_cast<uint32_t*>(staging + g * 64 + (n ^ g) * 8 + lane % 4 * 2);
        pair[0] = pack_pair<E>(acc[n][0] * scale0, acc[n][1] * scale0);
        pair[8 * 32] = pack_pair<E>(acc[n][2] * scale1, acc[n][3] * scale1);
    }
    __syncwarp();
#pragma unroll
    for (int i = lane; i < 16 * 8; i += 32) {
        const int row = i / 8;
        const int t = row0 + warp_row + row;
        if (t < T) {
            *reinterpret_cast<uint4*>(matrix + t * stride + i % 8 * 8) =
                *reinterpret_cast<const uint4*>(staging + row * 64 + (i % 8 ^ row % 8) * 8);
        }
    }
}
#endif

// OWN tiles that stay (q; or q and dout; or k and v), stages of two tiles that come and go.
template <typename E, int OWN, int STAGES>
struct AttentionSm90Shared {
    alignas(1024) E own[OWN][kSm90Tile];
    E a[STAGES][kSm90Tile];                  // k, or q
    E b[STAGES][kSm90Tile];                  // v, or dout
    alignas(16) float2 stats[STAGES][64];    // {lse * log2(e), D} of the queries: dK/dV kernel
    uint64_t own_full, full[STAGES];
};

template <typename E, int STAGES, int MIN_BLOCKS>
__global__ void __launch_bounds__(128, MIN_BLOCKS)
    attention_forward_sm90_kernel(E* out, float* lse, const __grid_constant__ CUtensorMap qkv_map, int B,
                                  int T, int NH, float scale) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char sm90_bytes[];
    auto& shared = *reinterpret_cast<AttentionSm90Shared<E, 1, STAGES>*>(sm90_bytes);
    const int lane = threadIdx.x % 32;
    const int tiles = (T + 63) / 64;
    const AttentionTile work = attention_tile(tiles, B * NH);
    const int last = tiles - 1 - work.tile;    // query tile = its diagonal key block
    const int b = work.bh / NH;
    const int h = work.bh % NH;
    const size_t C = static_cast<size_t>(NH) * 64;

    const auto load_block = [&](int it) {    // key block `last - it`
        const int stage = it % STAGES;
        mbarrier_expect(&shared.full[stage], 2 * kSm90Tile * sizeof(E));
        tma_load(shared.a[stage], &qkv_map, &shared.full[stage], (last - it) * 64, NH + h, b);
        tma_load(shared.b[stage], &qkv_map, &shared.full[stage], (last - it) * 64, 2 * NH + h, b);
    };
    if (threadIdx.x == 0) {
        mbarrier_init(&shared.own_full, 1);
        for (int i = 0; i < STAGES; i++) { mbarrier_init(&shared.full[i], 1); }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        mbarrier_expect(&shared.own_full, kSm90Tile * sizeof(E));
        tma_load(shared.own[0], &qkv_map, &shared.own_full, last * 64, h, b);
        for (int it = 0; it < min(STAGES, last + 1); it++) { load_block(it); }
    }
    __syncthreads();

    const float scale_log2 = scale * kLog2e;
    const float max_slack = 8.0f / scale_log2;
    const int local_row = threadIdx.x / 32 * 16 + lane / 4;    // in the tile; the other row is 8 further
    float o[8][4] = {};
    float s[8][4];
    uint32_t p_frag[4][4];
    float row_max[2] = {-INFINITY, -INFINITY};
    float row_sum[2] = {};
    float correction[2];

    bool rescale;    // by `correction`: O, once its older products are done

    // S -> P and statistics. The subtracted maximum follows the true one only when some row of the warp is
    // more than 2^8 above it: P <= 256 costs no accuracy, and most blocks then leave O alone (2..4 % of the
    // kernel).
    const auto softmax = [&]() {
        float new_max[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            new_max[r] = row_max[r];
#pragma unroll
            for (int n = 0; n < 8; n++) {
                new_max[r] = fmaxf(new_max[r], fmaxf(s[n][2 * r], s[n][2 * r + 1]));
            }
            new_max[r] = quad_max(new_max[r]);
        }
        const bool above = new_max[0] - row_max[0] > max_slack || new_max[1] - row_max[1] > max_slack;
        rescale = __any_sync(0xffffffffu, above);
        if (rescale) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                correction[r] = exp2_fast((row_max[r] - new_max[r]) * scale_log2);
                row_max[r] = new_max[r];
                row_sum[r] *= correction[r];
            }
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float max_log2 = row_max[r] * scale_log2;
#pragma unroll
            for (int n = 0; n < 8; n++) {
                s[n][2 * r] = exp2_fast(fmaf(s[n][2 * r], scale_log2, -max_log2));
                s[n][2 * r + 1] = exp2_fast(fmaf(s[n][2 * r + 1], scale_log2, -max_log2));
                row_sum[r] += s[n][2 * r] + s[n][2 * r + 1];
            }
        }
    };

    mbarrier_wait(&shared.own_full, 0);
    mbarrier_wait(&shared.full[0], 0);
    wgmma_fence();
    wgmma_rows(s, shared.own[0], shared.a[0]);
    wgmma_wait<0>();
    pin_registers(s);
#pragma unroll
    for (int n = 0; n < 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            s[n][i] = n * 8 + lane % 4 * 2 + i % 2 > local_row + i / 2 * 8 ? -INFINITY : s[n][i];
        }
    }
    softmax();
    pack_fragments<E>(p_frag, s);

    int stage = 0;
    for (int it = 1; it <= last; it++) {
        const int next = stage + 1 == STAGES ? 0 : stage + 1;
        mbarrier_wait(&shared.full[next], it / STAGES % 2);
        wgmma_fence();
        wgmma_rows(s, shared.own[0], shared.a[next]);
        wgmma_columns(o, p_frag, shared.b[stage]);    // of the block before, under this block's exponentials
        wgmma_wait<1>();
        pin_registers(s);
        softmax();
        wgmma_wait<0>();
        pin_registers(o);
        if (rescale) {
#pragma unroll
            for (int n = 0; n < 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) { o[n][i] *= correction[i / 2]; }
            }
        }
        pack_fragments<E>(p_frag, s);
        __syncthreads();    // all are done with the old stage
        if (threadIdx.x == 0 && it - 1 + STAGES <= last) {
            load_block(it - 1 + STAGES);
        }
        stage = next;
    }
    wgmma_fence();
    wgmma_columns(o, p_frag, shared.b[stage]);
    wgmma_wait<0>();
    pin_registers(o);

    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float sum = quad_sum(row_sum[r]);
        const int row = last * 64 + local_row + r * 8;
        inverse[r] = 1.0f / sum;
        if (lane % 4 == 0 && row < T) {
            lse[static_cast<size_t>(work.bh) * T + row] = row_max[r] * scale + logf(sum);
        }
    }
    __syncthreads();    // all are done with Q
    store_swizzled(out + b * (T * C) + h * 64, C, last * 64, T, shared.own[0], o, inverse[0], inverse[1]);
#else
    __trap();
#endif
}

template <typename E, int STAGES, int MIN_BLOCKS>
__global__ void __launch_bounds__(128, MIN_BLOCKS)
    attention_backward_dq_sm90_kernel(E* dqkv, float2* row_stats, const E* dout, const E* out,
                                      const float* lse, const __grid_constant__ CUtensorMap qkv_map,
                                      const __grid_constant__ CUtensorMap dout_map, int B, int T, int NH,
                                      float scale) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char sm90_bytes[];
    auto& shared = *reinterpret_cast<AttentionSm90Shared<E, 2, STAGES>*>(sm90_bytes);
    const int lane = threadIdx.x % 32;
    const int tiles = (T + 63) / 64;
    const AttentionTile work = attention_tile(tiles, B * NH);
    const int last = tiles - 1 - work.tile;    // query tile = its diagonal key block
    const int b = work.bh / NH;
    const int h = work.bh % NH;
    const size_t C = static_cast<size_t>(NH) * 64;

    const auto load_block = [&](int it) {    // key block `last - it`
        const int stage = it % STAGES;
        mbarrier_expect(&shared.full[stage], 2 * kSm90Tile * sizeof(E));
        tma_load(shared.a[stage], &qkv_map, &shared.full[stage], (last - it) * 64, NH + h, b);
        tma_load(shared.b[stage], &qkv_map, &shared.full[stage], (last - it) * 64, 2 * NH + h, b);
    };
    if (threadIdx.x == 0) {
        mbarrier_init(&shared.own_full, 1);
        for (int i = 0; i < STAGES; i++) { mbarrier_init(&shared.full[i], 1); }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        mbarrier_expect(&shared.own_full, 2 * kSm90Tile * sizeof(E));
        tma_load(shared.own[0], &qkv_map, &shared.own_full, last * 64, h, b);
        tma_load(shared.own[1], &dout_map, &shared.own_full, last * 64, h, b);
        for (int it = 0; it < min(STAGES, last + 1); it++) { load_block(it); }
    }
    __syncthreads();

    const size_t head = b * (T * C) + h * 64;
    float row_lse2[2], row_d[2];    // while the tiles are on their way
    attention_row_stats<E, 64>(row_lse2, row_d, row_stats + work.bh * stats_stride(T),
                               lse + static_cast<size_t>(work.bh) * T, out + head, dout + head, C,
                               last * 64 + threadIdx.x / 32 * 16, T, lane);

    const float scale_log2 = scale * kLog2e;
    const int local_row = threadIdx.x / 32 * 16 + lane / 4;
    float dq[8][4] = {};
    float s[8][4], dp[8][4];
    uint32_t ds_frag[4][4];

    mbarrier_wait(&shared.own_full, 0);
    for (int it = 0; it <= last; it++) {
        const int stage = it % STAGES;
        mbarrier_wait(&shared.full[stage], it / STAGES % 2);
        wgmma_fence();
        wgmma_rows(s, shared.own[0], shared.a[stage]);
        wgmma_rows(dp, shared.own[1], shared.b[stage]);
        wgmma_wait<1>();
        pin_registers(s);
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) { s[n][i] = exp2_fast(fmaf(s[n][i], scale_log2, -row_lse2[i / 2])); }
        }
        if (it == 0) {
#pragma unroll
            for (int n = 0; n < 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    s[n][i] = n * 8 + lane % 4 * 2 + i % 2 > local_row + i / 2 * 8 ? 0.0f : s[n][i];
                }
            }
        }
        wgmma_wait<0>();
        pin_registers(dp);
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) { dp[n][i] = s[n][i] * (dp[n][i] - row_d[i / 2]); }
        }
        pack_fragments<E>(ds_frag, dp);
        wgmma_fence();
        wgmma_columns(dq, ds_frag, shared.a[stage]);
        wgmma_wait<0>();
        pin_registers(dq);
        __syncthreads();    // all are done with the stage
        if (threadIdx.x == 0 && it + STAGES <= last) {
            load_block(it + STAGES);
        }
    }
    store_swizzled(dqkv + b * (T * 3 * C) + h * 64, 3 * C, last * 64, T, shared.own[0], dq, scale, scale);
#else
    __trap();
#endif
}

template <typename E, int STAGES, int MIN_BLOCKS>
__global__ void __launch_bounds__(128, MIN_BLOCKS)
    attention_backward_dkv_sm90_kernel(E* dqkv, const float2* row_stats,
                                       const __grid_constant__ CUtensorMap qkv_map,
                                       const __grid_constant__ CUtensorMap dout_map, int B, int T, int NH,
                                       float scale) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char sm90_bytes[];
    auto& shared = *reinterpret_cast<AttentionSm90Shared<E, 2, STAGES>*>(sm90_bytes);
    const int lane = threadIdx.x % 32;
    const int tiles = (T + 63) / 64;
    const AttentionTile work = attention_tile(tiles, B * NH);
    const int first = work.tile;           // key tile = its diagonal query block
    const int last = tiles - 1 - first;    // query blocks after that
    const int b = work.bh / NH;
    const int h = work.bh % NH;
    const size_t C = static_cast<size_t>(NH) * 64;
    const float2* stats_bh = row_stats + work.bh * stats_stride(T);

    const auto load_block = [&](int it) {    // query block `first + it`
        const int stage = it % STAGES;
        const int q0 = (first + it) * 64;
        mbarrier_expect(&shared.full[stage], 2 * kSm90Tile * sizeof(E) + sizeof(shared.stats[stage]));
        tma_load(shared.a[stage], &qkv_map, &shared.full[stage], q0, h, b);
        bulk_load(shared.stats[stage], stats_bh + q0, &shared.full[stage], sizeof(shared.stats[stage]));
        tma_load(shared.b[stage], &dout_map, &shared.full[stage], q0, h, b);
    };
    if (threadIdx.x == 0) {
        mbarrier_init(&shared.own_full, 1);
        for (int i = 0; i < STAGES; i++) { mbarrier_init(&shared.full[i], 1); }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        mbarrier_expect(&shared.own_full, 2 * kSm90Tile * sizeof(E));
        tma_load(shared.own[0], &qkv_map, &shared.own_full, first * 64, NH + h, b);
        tma_load(shared.own[1], &qkv_map, &shared.own_full, first * 64, 2 * NH + h, b);
        for (int it = 0; it < min(STAGES, last + 1); it++) { load_block(it); }
    }
    __syncthreads();

    const float scale_log2 = scale * kLog2e;
    const int local_row = threadIdx.x / 32 * 16 + lane / 4;    // key in the tile; the other one is 8 further
    float dk[8][4] = {};
    float dv[8][4] = {};
    float s[8][4], dp[8][4];
    uint32_t p_frag[4][4], ds_frag[4][4];

    mbarrier_wait(&shared.own_full, 0);
    for (int it = 0; it <= last; it++) {
        const int stage = it % STAGES;
        mbarrier_wait(&shared.full[stage], it / STAGES % 2);
        const float2* stats = shared.stats[stage] + lane % 4 * 2;    // of this lane's first two columns
        wgmma_fence();
        wgmma_rows(s, shared.own[0], shared.a[stage]);
        wgmma_rows(dp, shared.own[1], shared.b[stage]);
        wgmma_wait<1>();
        pin_registers(s);
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const float4 lse2_d = *reinterpret_cast<const float4*>(stats + n * 8);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                s[n][i] = exp2_fast(fmaf(s[n][i], scale_log2, i % 2 == 0 ? -lse2_d.x : -lse2_d.z));
            }
        }
        if (it == 0) {
#pragma unroll
            for (int n = 0; n < 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    s[n][i] = local_row + i / 2 * 8 > n * 8 + lane % 4 * 2 + i % 2 ? 0.0f : s[n][i];
                }
            }
        }
        pack_fragments<E>(p_frag, s);
        wgmma_wait<0>();
        pin_registers(dp);
        wgmma_fence();
        wgmma_columns(dv, p_frag, shared.b[stage]);    // runs under the arithmetic of dS
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const float4 lse2_d = *reinterpret_cast<const float4*>(stats + n * 8);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                dp[n][i] = s[n][i] * (dp[n][i] - (i % 2 == 0 ? lse2_d.y : lse2_d.w));
            }
        }
        pack_fragments<E>(ds_frag, dp);
        wgmma_fence();
        wgmma_columns(dk, ds_frag, shared.a[stage]);
        wgmma_wait<0>();
        pin_registers(dv);
        pin_registers(dk);
        __syncthreads();    // all are done with the stage
        if (threadIdx.x == 0 && it + STAGES <= last) {
            load_block(it + STAGES);
        }
    }
    E* dk_bh = dqkv + b * (T * 3 * C) + C + h * 64;    // (T, 64), rows 3*C apart
    store_swizzled(dk_bh, 3 * C, first * 64, T, shared.own[0], dk, scale, scale);
    store_swizzled(dk_bh + C, 3 * C, first * 64, T, shared.own[1], dv, 1.0f, 1.0f);
#else
    __trap();
#endif
}

// ---- plain kernels: any element type and head size up to 512, fp32 arithmetic. A warp owns 4 rows; the
// other side comes in tiles of 32 rows through shared memory. In the products over HS a lane owns one row of
// the tile, in the products over the tile it owns columns lane, lane + 32, ... (kCols of them).

constexpr int kPlainRows = 4;     // rows a warp
constexpr int kPlainWarps = 4;    // warps a block
constexpr int kPlainTile = 32;    // rows of the other side at a time: one a lane
constexpr int kPlainMaxHeadSize = 512;

// Offsets in floats. float4 = the same element of a warp's four rows: one broadcast load feeds four products.
struct PlainShared {
    float4* own_a;       // (warps, HS) of float4: q, or k
    float4* own_b;       // (warps, HS) of float4: dout, or v       (not in the forward)
    float4* weight_a;    // (warps, tile) of float4: p or ds
    float4* weight_b;    // (warps, tile) of float4: ds of the kv side
    float* tile_a;       // (tile, HS | 1): odd row length, so that 32 lanes reading a column hit 32 banks
    float* tile_b;       // (tile, HS | 1)

    __device__ PlainShared(float4* base, int HS) {
        own_a = base;
        own_b = own_a + kPlainWarps * HS;
        weight_a = own_b + kPlainWarps * HS;
        weight_b = weight_a + kPlainWarps * kPlainTile;
        tile_a = reinterpret_cast<float*>(weight_b + kPlainWarps * kPlainTile);
        tile_b = tile_a + kPlainTile * (HS | 1);
    }

    static size_t bytes(int HS) {
        return (2 * kPlainWarps * HS + 2 * kPlainWarps * kPlainTile) * sizeof(float4) +
               2 * kPlainTile * (HS | 1) * sizeof(float);
    }
};

// Rows row0.. of a (T, HS) matrix into a tile; rows from T on become zero. The whole block takes part.
template <typename E>
__device__ inline void plain_load_tile(float* tile, const E* matrix, size_t stride, int row0, int T, int HS) {
    for (int row = threadIdx.x / 32; row < kPlainTile; row += kPlainWarps) {
        for (int d = threadIdx.x % 32; d < HS; d += 32) {
            tile[row * (HS | 1) + d] =
                row0 + row < T ? static_cast<float>(matrix[(row0 + row) * stride + d]) : 0.0f;
        }
    }
}

// The warp's four rows from row0 on, transposed: own[d] = element d of the four.
template <typename E>
__device__ inline void plain_load_own(float4* own, const E* matrix, size_t stride, int row0, int T, int HS,
                                      int lane) {
    for (int d = lane; d < HS; d += 32) {
        float x[kPlainRows];
#pragma unroll
        for (int r = 0; r < kPlainRows; r++) {
            x[r] = row0 + r < T ? static_cast<float>(matrix[(row0 + r) * stride + d]) : 0.0f;
        }
        own[d] = make_float4(x[0], x[1], x[2], x[3]);
    }
}

// dot[r] = the warp's row r times this lane's row of the tile.
__device__ inline void plain_dot(float (&dot)[kPlainRows], const float4* own, const float* tile_row, int HS) {
#pragma unroll
    for (int r = 0; r < kPlainRows; r++) { dot[r] = 0.0f; }
#pragma unroll 4
    for (int d = 0; d < HS; d++) {
        const float4 x = own[d];
        const float y = tile_row[d];
        dot[0] += x.x * y;
        dot[1] += x.y * y;
        dot[2] += x.z * y;
        dot[3] += x.w * y;
    }
}

// acc[c][r] += sum over the tile's rows j of weight[j][r] * tile[j][lane + 32 c]. Columns past HS read the
// last one and are never stored.
template <int kCols>
__device__ inline void plain_accumulate(float (&acc)[kCols][kPlainRows], const float4* weight,
                                        const float* tile, int HS, int lane) {
#pragma unroll 4
    for (int j = 0; j < kPlainTile; j++) {
        const float4 w = weight[j];
#pragma unroll
        for (int c = 0; c < kCols; c++) {
            const float y = tile[j * (HS | 1) + min(lane + 32 * c, HS - 1)];
            acc[c][0] += w.x * y;
            acc[c][1] += w.y * y;
            acc[c][2] += w.z * y;
            acc[c][3] += w.w * y;
        }
    }
}

template <typename E, int kCols>
__device__ inline void plain_store(E* matrix, size_t stride, int row0, int T, int HS,
                                   const float (&acc)[kCols][kPlainRows], const float (&scale)[kPlainRows],
                                   int lane) {
#pragma unroll
    for (int c = 0; c < kCols; c++) {
#pragma unroll
        for (int r = 0; r < kPlainRows; r++) {
            if (lane + 32 * c < HS && row0 + r < T) {
                matrix[(row0 + r) * stride + lane + 32 * c] = static_cast<E>(acc[c][r] * scale[r]);
            }
        }
    }
}

template <typename E, int kCols>
__global__ void __launch_bounds__(kPlainWarps * 32)
    attention_forward_plain_kernel(E* out, float* lse, const E* qkv, int B, int T, int NH, int HS,
                                   float scale) {
    extern __shared__ float4 plain_bytes[];
    const PlainShared shared(plain_bytes, HS);
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    constexpr int kBlockRows = kPlainWarps * kPlainRows;
    const int tiles = (T + kBlockRows - 1) / kBlockRows;
    const int bh = blockIdx.x / tiles;
    const int block_first = (tiles - 1 - static_cast<int>(blockIdx.x % tiles)) * kBlockRows;
    const int row_first = block_first + warp * kPlainRows;
    const size_t C = static_cast<size_t>(NH) * HS;
    const E* q_bh = qkv + bh / NH * (T * 3 * C) + static_cast<size_t>(bh % NH) * HS;
    float4* q_own = shared.own_a + warp * HS;
    float4* p_own = shared.weight_a + warp * kPlainTile;
    plain_load_own(q_own, q_bh, 3 * C, row_first, T, HS, lane);

    float acc[kCols][kPlainRows] = {};
    float row_max[kPlainRows], row_sum[kPlainRows];    // row_sum: this lane's share
#pragma unroll
    for (int r = 0; r < kPlainRows; r++) {
        row_max[r] = -INFINITY;
        row_sum[r] = 0.0f;
    }
    for (int k0 = 0; k0 < min(block_first + kBlockRows, T); k0 += kPlainTile) {
        __syncthreads();
        plain_load_tile(shared.tile_a, q_bh + C, 3 * C, k0, T, HS);
        plain_load_tile(shared.tile_b, q_bh + 2 * C, 3 * C, k0, T, HS);
        __syncthreads();
        if (k0 > row_first) {
            continue;
        }    // a multiple of 32 cannot fall inside four rows

        float s[kPlainRows];
        plain_dot(s, q_own, shared.tile_a + lane * (HS | 1), HS);
#pragma unroll
        for (int r = 0; r < kPlainRows; r++) {
            s[r] = k0 + lane > row_first + r ? -INFINITY : s[r] * scale;
            const float new_max = fmaxf(row_max[r], warp_max(s[r]));
            const float correction = expf(row_max[r] - new_max);
            s[r] = expf(s[r] - new_max);
            row_max[r] = new_max;
            row_sum[r] = row_sum[r] * correction + s[r];
#pragma unroll
            for (int c = 0; c < kCols; c++) { acc[c][r] *= correction; }
        }
        __syncwarp();
        p_own[lane] = make_float4(s[0], s[1], s[2], s[3]);
        __syncwarp();
        plain_accumulate<kCols>(acc, p_own, shared.tile_b, HS, lane);
    }

    float inverse[kPlainRows];
#pragma unroll
    for (int r = 0; r < kPlainRows; r++) {
        const float sum = warp_sum(row_sum[r]);
        inverse[r] = 1.0f / sum;
        if (lane == 0 && row_first + r < T) {
            lse[static_cast<size_t>(bh) * T + row_first + r] = row_max[r] + logf(sum);
        }
    }
    E* out_bh = out + bh / NH * (T * C) + static_cast<size_t>(bh % NH) * HS;
    plain_store<E, kCols>(out_bh, C, row_first, T, HS, acc, inverse, lane);
}

template <typename E, int kCols>
__global__ void __launch_bounds__(kPlainWarps * 32)
    attention_backward_dq_plain_kernel(E* dqkv, float2* row_stats, const E* dout, const E* out, const E* qkv,
                                       const float* lse, int B, int T, int NH, int HS, float scale) {
    extern __shared__ float4 plain_bytes[];
    const PlainShared shared(plain_bytes, HS);
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    constexpr int kBlockRows = kPlainWarps * kPlainRows;
    const int tiles = (T + kBlockRows - 1) / kBlockRows;
    const int bh = blockIdx.x / tiles;
    const int block_first = (tiles - 1 - static_cast<int>(blockIdx.x % tiles)) * kBlockRows;
    const int row_first = block_first + warp * kPlainRows;
    const size_t C = static_cast<size_t>(NH) * HS;
    const size_t head = static_cast<size_t>(bh % NH) * HS;
    const E* q_bh = qkv + bh / NH * (T * 3 * C) + head;
    const E* dout_bh = dout + bh / NH * (T * C) + head;
    const E* out_bh = out + bh / NH * (T * C) + head;
    float4* q_own = shared.own_a + warp * HS;
    float4* do_own = shared.own_b + warp * HS;
    float4* ds_own = shared.weight_a + warp * kPlainTile;
    plain_load_own(q_own, q_bh, 3 * C, row_first, T, HS, lane);
    plain_load_own(do_own, dout_bh, C, row_first, T, HS, lane);

    float row_lse[kPlainRows], row_d[kPlainRows];
#pragma unroll
    for (int r = 0; r < kPlainRows; r++) {
        const int row = row_first + r;
        float sum = 0.0f;
        for (int d = lane; row < T && d < HS; d += 32) {
            sum += static_cast<float>(out_bh[row * C + d]) * static_cast<float>(dout_bh[row * C + d]);
        }
        row_d[r] = warp_sum(sum);
        row_lse[r] = row < T ? lse[static_cast<size_t>(bh) * T + row] : 0.0f;
        if (lane == 0 && row < T) {
            row_stats[bh * stats_stride(T) + row] = make_float2(row_lse[r], row_d[r]);
        }
    }
    float acc[kCols][kPlainRows] = {};
    for (int k0 = 0; k0 < min(block_first + kBlockRows, T); k0 += kPlainTile) {
        __syncthreads();
        plain_load_tile(shared.tile_a, q_bh + C, 3 * C, k0, T, HS);
        plain_load_tile(shared.tile_b, q_bh + 2 * C, 3 * C, k0, T, HS);
        __syncthreads();
        if (k0 > row_first) {
            continue;
        }

        float s[kPlainRows], dp[kPlainRows];
        plain_dot(s, q_own, shared.tile_a + lane * (HS | 1), HS);
        plain_dot(dp, do_own, shared.tile_b + lane * (HS | 1), HS);
#pragma unroll
        for (int r = 0; r < kPlainRows; r++) {
            const float p = k0 + lane > row_first + r ? 0.0f : expf(s[r] * scale - row_lse[r]);
            dp[r] = p * (dp[r] - row_d[r]);
        }
        __syncwarp();
        ds_own[lane] = make_float4(dp[0], dp[1], dp[2], dp[3]);
        __syncwarp();
        plain_accumulate<kCols>(acc, ds_own, shared.tile_a, HS, lane);
    }
    const float scales[kPlainRows] = {scale, scale, scale, scale};
    plain_store<E, kCols>(dqkv + bh / NH * (T * 3 * C) + head, 3 * C, row_first, T, HS, acc, scales, lane);
}

template <typename E, int kCols>
__global__ void __launch_bounds__(kPlainWarps * 32)
    attention_backward_dkv_plain_kernel(E* dqkv, const float2* row_stats, const E* dout, const E* qkv, int B,
                                        int T, int NH, int HS, float scale) {
    extern __shared__ float4 plain_bytes[];
    const PlainShared shared(plain_bytes, HS);
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    constexpr int kBlockRows = kPlainWarps * kPlainRows;
    const int tiles = (T + kBlockRows - 1) / kBlockRows;
    const int bh = blockIdx.x / tiles;
    const int block_first = static_cast<int>(blockIdx.x % tiles) * kBlockRows;
    const int row_first = block_first + warp * kPlainRows;    // the warp's first key
    const size_t C = static_cast<size_t>(NH) * HS;
    const size_t head = static_cast<size_t>(bh % NH) * HS;
    const E* q_bh = qkv + bh / NH * (T * 3 * C) + head;
    const E* dout_bh = dout + bh / NH * (T * C) + head;
    float4* k_own = shared.own_a + warp * HS;
    float4* v_own = shared.own_b + warp * HS;
    float4* p_own = shared.weight_a + warp * kPlainTile;
    float4* ds_own = shared.weight_b + warp * kPlainTile;
    plain_load_own(k_own, q_bh + C, 3 * C, row_first, T, HS, lane);
    plain_load_own(v_own, q_bh + 2 * C, 3 * C, row_first, T, HS, lane);

    float dk[kCols][kPlainRows] = {};
    float dv[kCols][kPlainRows] = {};
    for (int q0 = block_first / kPlainTile * kPlainTile; q0 < T; q0 += kPlainTile) {
        __syncthreads();
        plain_load_tile(shared.tile_a, q_bh, 3 * C, q0, T, HS);
        plain_load_tile(shared.tile_b, dout_bh, C, q0, T, HS);
        __syncthreads();
        const int query = q0 + lane;
        const float2 stats = query < T ? row_stats[bh * stats_stride(T) + query] : make_float2(0.0f, 0.0f);

        float s[kPlainRows], dp[kPlainRows];
        plain_dot(s, k_own, shared.tile_a + lane * (HS | 1), HS);
        plain_dot(dp, v_own, shared.tile_b + lane * (HS | 1), HS);
#pragma unroll
        for (int r = 0; r < kPlainRows; r++) {
            const bool masked = row_first + r > query || query >= T;
            s[r] = masked ? 0.0f : expf(s[r] * scale - stats.x);
            dp[r] = s[r] * (dp[r] - stats.y);
        }
        __syncwarp();
        p_own[lane] = make_float4(s[0], s[1], s[2], s[3]);
        ds_own[lane] = make_float4(dp[0], dp[1], dp[2], dp[3]);
        __syncwarp();
        plain_accumulate<kCols>(dv, p_own, shared.tile_b, HS, lane);
        plain_accumulate<kCols>(dk, ds_own, shared.tile_a, HS, lane);
    }
    const float scales[kPlainRows] = {scale, scale, scale, scale};
    const float ones[kPlainRows] = {1.0f, 1.0f, 1.0f, 1.0f};
    E* dk_bh = dqkv + bh / NH * (T * 3 * C) + C + head;
    plain_store<E, kCols>(dk_bh, 3 * C, row_first, T, HS, dk, scales, lane);
    plain_store<E, kCols>(dk_bh + C, 3 * C, row_first, T, HS, dv, ones, lane);
}

// ---- launchers

// Dynamic shared memory above 48 KB has to be asked for, kernel by kernel.
template <typename Kernel>
static void allow_shared_memory(Kernel kernel, size_t bytes) {
    cudaCheck(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
}

static unsigned attention_grid(int T, int rows, int B, int NH) {
    const size_t blocks = static_cast<size_t>(ceil_div(T, rows)) * B * NH;
    if (blocks > 0x7fffffffu) {
        die("attention: B=%d T=%d NH=%d needs more than 2^31 blocks", B, T, NH);
    }
    return static_cast<unsigned>(blocks);
}

template <typename E, int HS, int MT, int WARPS, int BN, int MIN_BLOCKS>
static void attention_forward_mma(E* out, float* lse, const E* qkv, int B, int T, int NH, Stream stream) {
    typedef AttentionForwardShared<E, HS, MT, WARPS, BN> Shared;
    const auto kernel = attention_forward_mma_kernel<E, HS, MT, WARPS, BN, MIN_BLOCKS>;
    allow_shared_memory(kernel, sizeof(Shared));
    kernel<<<attention_grid(T, Shared::BM, B, NH), WARPS * 32, sizeof(Shared), stream>>>(
        out, lse, qkv, B, T, NH, 1.0f / sqrtf(HS));
    cudaCheck(cudaGetLastError());
}

template <typename E, int HS, int MT, int WARPS, int BN, int MIN_BLOCKS>
static void attention_backward_dq_mma(E* dqkv, float* scratch, const E* dout, const E* out, const E* qkv,
                                      const float* lse, int B, int T, int NH, Stream stream) {
    typedef AttentionDqShared<E, HS, MT, WARPS, BN> Shared;
    const auto kernel = attention_backward_dq_mma_kernel<E, HS, MT, WARPS, BN, MIN_BLOCKS>;
    allow_shared_memory(kernel, sizeof(Shared));
    kernel<<<attention_grid(T, Shared::BM, B, NH), WARPS * 32, sizeof(Shared), stream>>>(
        dqkv, reinterpret_cast<float2*>(scratch), dout, out, qkv, lse, B, T, NH, 1.0f / sqrtf(HS));
    cudaCheck(cudaGetLastError());
}

template <typename E, int HS, int MT, int WARPS, int BM, int MIN_BLOCKS, bool kKeepFragments>
static void attention_backward_dkv_mma(E* dqkv, const float* scratch, const E* dout, const E* qkv, int B,
                                       int T, int NH, Stream stream) {
    typedef AttentionDkvShared<E, HS, MT, WARPS, BM> Shared;
    const auto kernel = attention_backward_dkv_mma_kernel<E, HS, MT, WARPS, BM, MIN_BLOCKS, kKeepFragments>;
    allow_shared_memory(kernel, sizeof(Shared));
    kernel<<<attention_grid(T, Shared::BN, B, NH), WARPS * 32, sizeof(Shared), stream>>>(
        dqkv, reinterpret_cast<const float2*>(scratch), dout, qkv, B, T, NH, 1.0f / sqrtf(HS));
    cudaCheck(cudaGetLastError());
}

// ---- Hopper launchers

// Its thread limit tells the host for which architecture the code that runs on this GPU was compiled: on a
// Hopper GPU that may be a plain sm_90 or a compute_80 build, where the bodies above are traps.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
__global__ void __launch_bounds__(128) sm90_probe_kernel() {}
#else
__global__ void __launch_bounds__(64) sm90_probe_kernel() {}
#endif

static bool use_sm90_kernels = true;    // --kernels portable clears it
static void select_kernels(bool portable_only) { use_sm90_kernels = !portable_only; }

static bool attention_sm90_ok(int HS) {
    static const bool built = [] {
        cudaFuncAttributes attributes;
        cudaCheck(cudaFuncGetAttributes(&attributes, sm90_probe_kernel));
        return attributes.maxThreadsPerBlock == 128;
    }();
    return use_sm90_kernels && built && HS == 64;
}

static bool attention_uses_sm90(int HS) { return sizeof(floatX) == 2 && attention_sm90_ok(HS); }

// A (B, T, slots, 64) tensor in boxes of (64, 64): coordinates {0, t, slot, b}.
template <typename E>
static CUtensorMap attention_tensor_map(const E* tensor, int B, int T, int slots) {
    typedef decltype(&cuTensorMapEncodeTiled) EncodeTiled;
    static EncodeTiled encode = nullptr;
    if (encode == nullptr) {
        void* entry = nullptr;
        cudaDriverEntryPointQueryResult found;
        cudaCheck(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault,
                                                   &found));
        if (found != cudaDriverEntryPointSuccess) {
            die("the CUDA driver has no cuTensorMapEncodeTiled");
        }
        encode = reinterpret_cast<EncodeTiled>(entry);
    }
    const cuuint64_t row_bytes = static_cast<cuuint64_t>(slots) * 64 * sizeof(E);
    const cuuint64_t dims[4] = {64, static_cast<cuuint64_t>(T), static_cast<cuuint64_t>(slots),
                                static_cast<cuuint64_t>(B)};
    const cuuint64_t strides[3] = {row_bytes, 64 * sizeof(E), row_bytes * T};
    const cuuint32_t box[4] = {64, 64, 1, 1};
    const cuuint32_t steps[4] = {1, 1, 1, 1};
    CUtensorMap map;
    const CUtensorMapDataType type =
        std::is_same_v<E, half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    const CUresult result = encode(&map, type, 4, const_cast<E*>(tensor), dims, strides, box, steps,
                                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
        die("attention: tensor map of B=%d T=%d slots=%d at %p refused (CUDA error %d)", B, T, slots,
            static_cast<const void*>(tensor), static_cast<int>(result));
    }
    return map;
}

template <typename E, int STAGES, int MIN_BLOCKS>
static void attention_forward_sm90(E* out, float* lse, const E* qkv, int B, int T, int NH, Stream stream) {
    constexpr size_t kBytes = sizeof(AttentionSm90Shared<E, 1, STAGES>);
    const auto kernel = attention_forward_sm90_kernel<E, STAGES, MIN_BLOCKS>;
    allow_shared_memory(kernel, kBytes);
    kernel<<<attention_grid(T, 64, B, NH), 128, kBytes, stream>>>(
        out, lse, attention_tensor_map(qkv, B, T, 3 * NH), B, T, NH, 1.0f / sqrtf(64.0f));
    cudaCheck(cudaGetLastError());
}

template <typename E, int STAGES, int MIN_BLOCKS>
static void attention_backward_dq_sm90(E* dqkv, float* scratch, const E* dout, const E* out, const E* qkv,
                                       const float* lse, int B, int T, int NH, Stream stream) {
    constexpr size_t kBytes = sizeof(AttentionSm90Shared<E, 2, STAGES>);
    const auto kernel = attention_backward_dq_sm90_kernel<E, STAGES, MIN_BLOCKS>;
    allow_shared_memory(kernel, kBytes);
    kernel<<<attention_grid(T, 64, B, NH), 128, kBytes, stream>>>(
        dqkv, reinterpret_cast<float2*>(scratch), dout, out, lse, attention_tensor_map(qkv, B, T, 3 * NH),
        attention_tensor_map(dout, B, T, NH), B, T, NH, 1.0f / sqrtf(64.0f));
    cudaCheck(cudaGetLastError());
}

template <typename E, int STAGES, int MIN_BLOCKS>
static void attention_backward_dkv_sm90(E* dqkv, const float* scratch, const E* dout, const E* qkv, int B,
                                        int T, int NH, Stream stream) {
    constexpr size_t kBytes = sizeof(AttentionSm90Shared<E, 2, STAGES>);
    const auto kernel = attention_backward_dkv_sm90_kernel<E, STAGES, MIN_BLOCKS>;
    allow_shared_memory(kernel, kBytes);
    kernel<<<attention_grid(T, 64, B, NH), 128, kBytes, stream>>>(
        dqkv, reinterpret_cast<const float2*>(scratch), attention_tensor_map(qkv, B, T, 3 * NH),
        attention_tensor_map(dout, B, T, NH), B, T, NH, 1.0f / sqrtf(64.0f));
    cudaCheck(cudaGetLastError());
}

template <typename E, int kCols>
static void attention_forward_plain(E* out, float* lse, const E* qkv, int B, int T, int NH, int HS,
                                    Stream stream) {
    const auto kernel = attention_forward_plain_kernel<E, kCols>;
    allow_shared_memory(kernel, PlainShared::bytes(HS));
    kernel<<<attention_grid(T, kPlainWarps * kPlainRows, B, NH), kPlainWarps * 32, PlainShared::bytes(HS),
             stream>>>(out, lse, qkv, B, T, NH, HS, 1.0f / sqrtf(HS));
    cudaCheck(cudaGetLastError());
}

template <typename E, int kCols>
static void attention_backward_plain(E* dqkv, float* scratch, const E* dout, const E* out, const E* qkv,
                                     const float* lse, int B, int T, int NH, int HS, Stream stream) {
    float2* row_stats = reinterpret_cast<float2*>(scratch);
    const unsigned grid = attention_grid(T, kPlainWarps * kPlainRows, B, NH);
    const size_t bytes = PlainShared::bytes(HS);
    const float scale = 1.0f / sqrtf(HS);
    const auto dq_kernel = attention_backward_dq_plain_kernel<E, kCols>;
    const auto dkv_kernel = attention_backward_dkv_plain_kernel<E, kCols>;
    allow_shared_memory(dq_kernel, bytes);
    allow_shared_memory(dkv_kernel, bytes);
    dq_kernel<<<grid, kPlainWarps * 32, bytes, stream>>>(dqkv, row_stats, dout, out, qkv, lse, B, T, NH, HS,
                                                         scale);
    cudaCheck(cudaGetLastError());
    dkv_kernel<<<grid, kPlainWarps * 32, bytes, stream>>>(dqkv, row_stats, dout, qkv, B, T, NH, HS, scale);
    cudaCheck(cudaGetLastError());
}

static void attention_check(int B, int T, int NH, int HS) {
    if (B < 1 || T < 1 || NH < 1 || HS < 1 || HS > kPlainMaxHeadSize) {
        die("attention: B=%d T=%d NH=%d head size=%d; all must be positive, the head size at most %d\n"
            "hint: choose more heads (head size = C / NH)",
            B, T, NH, HS, kPlainMaxHeadSize);
    }
}

// True when the tensor-core kernels took the work.
template <typename E>
static bool attention_forward_tensor(E* out, float* lse, const E* qkv, int B, int T, int NH, int HS,
                                     Stream stream) {
    if constexpr (sizeof(E) == 2) {
        if (attention_sm90_ok(HS)) {
            attention_forward_sm90<E, 2, 4>(out, lse, qkv, B, T, NH, stream);
            return true;
        }
        switch (HS) {
            case 64:
                attention_forward_mma<E, 64, 2, 4, 64, 2>(out, lse, qkv, B, T, NH, stream);
                return true;
            case 80:
                attention_forward_mma<E, 80, 1, 4, 64, 3>(out, lse, qkv, B, T, NH, stream);
                return true;
            case 96:
                attention_forward_mma<E, 96, 1, 4, 64, 2>(out, lse, qkv, B, T, NH, stream);
                return true;
            case 128:
                attention_forward_mma<E, 128, 1, 4, 64, 2>(out, lse, qkv, B, T, NH, stream);
                return true;
        }
    }
    return false;
}

template <typename E, int HS, int MT, int BLOCKS, int BN, int BM>
static void attention_backward_mma(E* dqkv, float* scratch, const E* dout, const E* out, const E* qkv,
                                   const float* lse, int B, int T, int NH, Stream stream) {
    attention_backward_dq_mma<E, HS, MT, 4, BN, BLOCKS>(dqkv, scratch, dout, out, qkv, lse, B, T, NH, stream);
    attention_backward_dkv_mma<E, HS, MT, 4, BM, BLOCKS, false>(dqkv, scratch, dout, qkv, B, T, NH, stream);
}

template <typename E>
static bool attention_backward_tensor(E* dqkv, float* scratch, const E* dout, const E* out, const E* qkv,
                                      const float* lse, int B, int T, int NH, int HS, Stream stream) {
    if constexpr (sizeof(E) == 2) {
        if (attention_sm90_ok(HS)) {
            attention_backward_dq_sm90<E, 2, 4>(dqkv, scratch, dout, out, qkv, lse, B, T, NH, stream);
            attention_backward_dkv_sm90<E, 3, 3>(dqkv, scratch, dout, qkv, B, T, NH, stream);
            return true;
        }
        switch (HS) {
            case 64:
                attention_backward_mma<E, 64, 2, 2, 32, 32>(dqkv, scratch, dout, out, qkv, lse, B, T, NH,
                                                            stream);
                return true;
            case 80:
                attention_backward_mma<E, 80, 1, 2, 64, 64>(dqkv, scratch, dout, out, qkv, lse, B, T, NH,
                                                            stream);
                return true;
            case 96:
                attention_backward_mma<E, 96, 1, 2, 64, 32>(dqkv, scratch, dout, out, qkv, lse, B, T, NH,
                                                            stream);
                return true;
            case 128:
                attention_backward_mma<E, 128, 1, 2, 32, 32>(dqkv, scratch, dout, out, qkv, lse, B, T, NH,
                                                             stream);
                return true;
        }
    }
    return false;
}

// out (B,T,C) =, lse (B,NH,T) =. 16-bit pointers must be 16-byte aligned (the arenas align to 256).
static void attention_forward(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, int HS,
                              Stream stream) {
    NvtxRange range("attention_forward");
    attention_check(B, T, NH, HS);
    if (!attention_forward_tensor<floatX>(out, lse, qkv, B, T, NH, HS, stream)) {
        if (HS <= 64) {
            attention_forward_plain<floatX, 2>(out, lse, qkv, B, T, NH, HS, stream);
        } else if (HS <= 128) {
            attention_forward_plain<floatX, 4>(out, lse, qkv, B, T, NH, HS, stream);
        } else {
            attention_forward_plain<floatX, 16>(out, lse, qkv, B, T, NH, HS, stream);
        }
    }
    OUTPUT("attention_forward.out", out, static_cast<size_t>(B) * T * NH * HS, stream);
    OUTPUT("attention_forward.lse", lse, static_cast<size_t>(B) * NH * T, stream);
}

static size_t attention_backward_scratch_bytes(int B, int T, int NH) {
    return static_cast<size_t>(B) * NH * stats_stride(T) * sizeof(float2);
}

// dqkv (B,T,3,NH,HS) =.
static void attention_backward(floatX* dqkv, float* scratch, const floatX* dout, const floatX* out,
                               const floatX* qkv, const float* lse, int B, int T, int NH, int HS,
                               Stream stream) {
    NvtxRange range("attention_backward");
    attention_check(B, T, NH, HS);
    if (!attention_backward_tensor<floatX>(dqkv, scratch, dout, out, qkv, lse, B, T, NH, HS, stream)) {
        const auto plain = HS <= 64    ? attention_backward_plain<floatX, 2>
                           : HS <= 128 ? attention_backward_plain<floatX, 4>
                                       : attention_backward_plain<floatX, 16>;
        plain(dqkv, scratch, dout, out, qkv, lse, B, T, NH, HS, stream);
    }
    OUTPUT("attention_backward.dqkv", dqkv, static_cast<size_t>(B) * T * 3 * NH * HS, stream);
}

// == 6.5 gelu and bias ==
// gelu(x) = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).  bias_backward: dbias (+)= column sums of dout
// (N,OC). gelu_backward_inplace: d = d*gelu'(inp), and dbias (+)= column sums of the new d as stored, in the
// same pass. Column sums: each block adds up one chunk of rows into a partial row, then column_sums_kernel
// adds the partials. 8 an SM of an H200; fixed, so that the bits do not depend on the GPU
constexpr int kColumnBlocks = 1056;
constexpr int kColumnRows = 8;                  // rows a block works on at a time, one a warp

template <bool kVector> __global__ void gelu_forward_kernel(floatX* out, const floatX* inp, size_t n) {
    const size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * kWidth;
    Floats x = load_floats<kVector, Cache::Streaming>(inp, i, n);
#pragma unroll
    for (int k = 0; k < kWidth; k++) { x.at[k] = gelu(x.at[k]); }
    store<kVector>(out, i, n, to_pack<floatX>(x));
}

// Block (32,8): 32 vectors of columns, 8 rows at a time of the rows of chunk blockIdx.y. kGelu: d is updated
// in place, each element by the thread that read it.
template <bool kVector, bool kGelu>
__global__ void __launch_bounds__(kWarp* kColumnRows)
    partial_sums_kernel(float* partial /*(gridDim.y,OC) or null*/, floatX* d_inplace, const floatX* d,
                        const floatX* inp, int N, int OC, int chunk_rows) {
    constexpr int kUnroll = kVector ? 4 : 1;
    __shared__ Floats shared[kColumnRows][kWarp];
    const int c = (blockIdx.x * kWarp + threadIdx.x) * kWidth;
    const int begin = blockIdx.y * chunk_rows, end = min(begin + chunk_rows, N);
    Floats sum = {};
    for (int first = begin + threadIdx.y; first < end; first += kColumnRows * kUnroll) {
        x128 x[kUnroll], y[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; u++) {
            const int row = first + u * kColumnRows, columns = row < end ? OC : 0;
            const size_t at = row < end ? (size_t)row * OC : 0;
            x[u] = load<kVector>(d + at, c, columns);
            if (kGelu) { y[u] = load<kVector, Cache::Streaming>(inp + at, c, columns); }
        }
#pragma unroll
        for (int u = 0; u < kUnroll; u++) {
            if (kGelu) {
#pragma unroll
                for (int k = 0; k < kWidth; k++) {
                    x[u].data[k] = (floatX)((float)x[u].data[k] * gelu_grad((float)y[u].data[k]));
                }
                const int row = first + u * kColumnRows, columns = row < end ? OC : 0;
                store<kVector>(d_inplace + (row < end ? (size_t)row * OC : 0), c, columns, x[u]);
            }
#pragma unroll
            for (int k = 0; k < kWidth; k++) { sum.at[k] += (float)x[u].data[k]; }
        }
    }
    if (!partial) { return; }
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0) { return; }
#pragma unroll
    for (int y = 1; y < kColumnRows; y++) {
#pragma unroll
        for (int k = 0; k < kWidth; k++) { sum.at[k] += shared[y][threadIdx.x].at[k]; }
    }
    store<kVector>(partial + (size_t)blockIdx.y * OC, c, OC, to_pack<float>(sum));
}

static int column_chunks(int N, int OC) {
    const int slabs = ceil_div(OC, kWarp * kWidth);
    return std::min(std::max(kColumnBlocks / slabs, 1), ceil_div(N, kColumnRows));
}

static size_t bias_backward_scratch_bytes(int N, int OC) {
    return (size_t)column_chunks(N, OC) * OC * sizeof(float);
}

template <bool kGelu>
static void column_pass(Grad dbias, float* scratch, floatX* d_inplace, const floatX* d, const floatX* inp,
                        int N, int OC, Stream stream) {
    const int chunk_rows = ceil_div(N, column_chunks(N, OC)), chunks = ceil_div(N, chunk_rows);
    float* partial = dbias.data ? scratch : nullptr;
    with_vector(OC, [&](auto vector) {
        const dim3 grid(ceil_div(OC, kWarp * kWidth), chunks), block(kWarp, kColumnRows);
        partial_sums_kernel<vector.value, kGelu>
            <<<grid, block, 0, stream>>>(partial, d_inplace, d, inp, N, OC, chunk_rows);
    });
    cudaCheck(cudaGetLastError());
    if (dbias.data) { column_sums({{dbias}}, 1, partial, chunks, OC, stream); }
}

static void bias_backward(Grad dbias /*(OC)*/, float* scratch, const floatX* dout /*(N,OC)*/, int N, int OC,
                          Stream stream) {
    NvtxRange range("bias_backward");
    column_pass<false>(dbias, scratch, nullptr, dout, nullptr, N, OC, stream);
    OUTPUT("bias_backward.dbias", dbias, (size_t)OC, stream);
}

static void gelu_forward(floatX* out, const floatX* inp, size_t n, Stream stream) {
    NvtxRange range("gelu_forward");
    with_vector(n, [&](auto vector) {
        const size_t threads = 256, blocks = ceil_div(n, threads * kWidth);
        gelu_forward_kernel<vector.value><<<(unsigned)blocks, (unsigned)threads, 0, stream>>>(out, inp, n);
    });
    cudaCheck(cudaGetLastError());
    OUTPUT("gelu_forward.out", out, n, stream);
}

static void gelu_backward_inplace(floatX* d_inplace /*(N,OC)*/, Grad dbias /*(OC), data may be null*/,
                                  float* scratch, const floatX* inp /*(N,OC)*/, int N, int OC,
                                  Stream stream) {
    NvtxRange range("gelu_backward_inplace");
    column_pass<true>(dbias, scratch, d_inplace, d_inplace, inp, N, OC, stream);
    OUTPUT("gelu_backward_inplace.dinp", d_inplace, (size_t)N * OC, stream);
    OUTPUT("gelu_backward_inplace.dbias", dbias, (size_t)OC, stream);
}

// == 6.6 classifier ==
// Row by row of logits (N,Vp), over the first V columns: losses = log(sum(exp(x))) - x[target]. LossAndGrad
// writes (softmax(x) - onehot(target)) * dloss * loss_scale over the logits, zeros into columns V and up.
// 124M, B=64: 6.6 GB of logits. The first kernel reads each row once; LossOnly does not write.
// Rows of up to 57,344 elements in registers
constexpr int kClassifierThreads = 1024, kClassifierVectors = 7;

// Ignores NaN, which the sum of exp() keeps
__device__ __forceinline__ float pack_max(const Pack<float>& x) {
    float top = x.data[0];
#pragma unroll
    for (int k = 1; k < kWidth; k++) { top = fmaxf(top, x.data[k]); }
    return top;
}
template <class Half> __device__ __forceinline__ float pack_max(const Pack<Half>& x) {
    Half top = x.data[0];
#pragma unroll
    for (int k = 1; k < kWidth; k++) { top = __hmax(top, x.data[k]); }
    return (float)top;
}

__device__ __forceinline__ void mask_padding(x128* x, int c, int V) {   // columns V and up get no probability
    if (c + kWidth <= V) { return; }
#pragma unroll
    for (int k = 0; k < kWidth; k++) {
        if (c + k >= V) { x->data[k] = (floatX)-INFINITY; }
    }
}

__device__ __forceinline__ float exp_sum(const x128& x, float top) {    // sum of exp(x - top)
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kWidth; k++) { sum += exp2_fast(fmaf((float)x.data[k], kLog2e, -top * kLog2e)); }
    return sum;
}

// Each thread's (max, sum of exp(x - max)) becomes the row's, in every thread. One barrier; `parts` must not
// be written again before the next one.
__device__ __forceinline__ void softmax_combine(float& top, float& sum, float2* parts /*(32)*/) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    float row_top = warp_max(top);
    float row_sum = warp_sum(sum * exp2_fast((top - row_top) * kLog2e));
    if (lane == 0) { parts[warp] = make_float2(row_top, row_sum); }
    __syncthreads();
    const float2 part = lane < (int)blockDim.x / kWarp ? parts[lane] : make_float2(-FLT_MAX, 0.0f);
    top = warp_max(part.x);
    sum = warp_sum(part.y * exp2_fast((part.x - top) * kLog2e));
}

__device__ __forceinline__ x128 softmax_grad(const x128& x, float top, float scale_over_sum, int c,
                                             int target, float scale) {
    Floats d;
#pragma unroll
    for (int k = 0; k < kWidth; k++) {
        d.at[k] = exp2_fast(fmaf((float)x.data[k], kLog2e, -top * kLog2e)) * scale_over_sum;
    }
    if (target >= c && target < c + kWidth) {
#pragma unroll
        for (int k = 0; k < kWidth; k++) {
            if (c + k == target) { d.at[k] -= scale; }
        }
    }
    return to_pack<floatX>(d);
}

// Persistent, one block an SM. Rows stream through two slots of shared memory (200 KB) into registers: while
// a row is worked on, the next one is on its way, so the memory never waits for the arithmetic. A thread
// reads only what it copied itself.
template <bool kGrad>
__global__ void __launch_bounds__(kClassifierThreads, 1)
    classifier_stream_kernel(floatX* logits, float* losses, const int* targets, float dloss,
                             const float* loss_scale, int N, int V, int Vp) {
    extern __shared__ x128 staged[];                    // (2, Vp/kWidth)
    __shared__ float2 parts[2][kWarp];
    __shared__ float target_logit[2];
    const int vectors = Vp / kWidth, first = threadIdx.x;
    const float scale = kGrad ? dloss * (loss_scale ? *loss_scale : 1.0f) : 0.0f;
    // This thread's first vector
    auto row_at = [&](int row) { return logits + (size_t)row * Vp + first * kWidth; };
    auto stage = [&](int row, int slot) {
        if (row < N) {
            const floatX* x_row = row_at(row);
            x128* slot_at = staged + slot * vectors + first;
#pragma unroll
            for (int j = 0; j < kClassifierVectors; j++) {
                const int v = j * kClassifierThreads;
                if (first + v < vectors) { cp_async_16(slot_at + v, x_row + v * kWidth); }
            }
        }
        cp_async_commit();
    };
    stage(blockIdx.x, 0);
    stage(blockIdx.x + gridDim.x, 1);
    int slot = 0;
    for (int row = blockIdx.x; row < N; row += gridDim.x, slot ^= 1) {
        const int target = targets[row];
        x128* slot_at = staged + slot * vectors + first;
        cp_async_wait<1>();
        uint4 row_x[kClassifierVectors];                // as words, see as_pack
        // Not -inf: inf - inf would be NaN where all is padding
        float top = -FLT_MAX;
#pragma unroll
        for (int j = 0; j < kClassifierVectors; j++) {
            const int v = j * kClassifierThreads;
            if (first + v >= vectors) { continue; }
            mask_padding(slot_at + v, (first + v) * kWidth, V);     // there, not in registers: see `row_x`
            row_x[j] = *(const uint4*)(slot_at + v);
            top = fmaxf(top, pack_max(as_pack(row_x[j])));
        }
        if (target / kWidth % kClassifierThreads == first) {
            target_logit[slot] = (float)((const floatX*)(staged + slot * vectors))[target];
        }
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < kClassifierVectors; j++) {
            if (first + j * kClassifierThreads < vectors) { sum += exp_sum(as_pack(row_x[j]), top); }
        }
        softmax_combine(top, sum, parts[slot]);
        stage(row + 2 * gridDim.x, slot);               // every read of this slot was before that barrier
        if (first == 0) { losses[row] = logf(sum) + top - target_logit[slot]; }
        if (kGrad) {
            floatX* d_row = row_at(row);
            const float scale_over_sum = scale / sum;
#pragma unroll
            for (int j = 0; j < kClassifierVectors; j++) {
                const int v = j * kClassifierThreads, c = (first + v) * kWidth;
                if (first + v >= vectors) { continue; }
                store<true, Cache::Streaming>(
                    d_row, v * kWidth, Vp,
                    softmax_grad(as_pack(row_x[j]), top, scale_over_sum, c, target, scale));
            }
        }
    }
}

// Any Vp: one block a row, read twice (the second time from cache).
template <bool kVector, bool kGrad>
__global__ void classifier_kernel(floatX* logits, float* losses, const int* targets, float dloss,
                                  const float* loss_scale, int V, int Vp) {
    __shared__ float2 parts[kWarp];
    const int row = blockIdx.x, target = targets[row], first = threadIdx.x * kWidth,
              step = blockDim.x * kWidth;
    floatX* x_row = logits + (size_t)row * Vp;
    // Before the barrier after which rows are written
    float target_logit = threadIdx.x == 0 ? (float)x_row[target] : 0.0f;
    float top = -FLT_MAX, sum = 0.0f;
    for (int c = first; c < V; c += step) {
        x128 x = load<kVector>(x_row, c, Vp);
        mask_padding(&x, c, V);
        const float higher = fmaxf(top, pack_max(x));
        sum = sum * exp2_fast((top - higher) * kLog2e) + exp_sum(x, higher);
        top = higher;
    }
    softmax_combine(top, sum, parts);
    if (threadIdx.x == 0) { losses[row] = logf(sum) + top - target_logit; }
    if (kGrad) {
        const float scale = dloss * (loss_scale ? *loss_scale : 1.0f), scale_over_sum = scale / sum;
        for (int c = first; c < Vp; c += step) {
            x128 x = load<kVector>(x_row, c, Vp);
            mask_padding(&x, c, V);
            store<kVector>(x_row, c, Vp, softmax_grad(x, top, scale_over_sum, c, target, scale));
        }
    }
}

// Rows short enough for registers and for two slots, and long enough to keep all threads busy.
static bool classifier_streams(int Vp) {
    int shared_limit = 0;
    cudaCheck(cudaDeviceGetAttribute(&shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    return sizeof(floatX) == 2 && is_vector(Vp) && Vp >= 8192 &&
           Vp <= kClassifierVectors * kClassifierThreads * kWidth &&
           2 * Vp * (int)sizeof(floatX) + 1024 <= shared_limit;    // 1024: the static part
}

template <bool kGrad>
static void classifier_launch(floatX* logits, float* losses, const int* targets, float dloss,
                              const float* loss_scale, int N, int V, int Vp, Stream stream) {
    if (classifier_streams(Vp)) {
        const int shared = 2 * Vp * (int)sizeof(floatX);
        cudaCheck(cudaFuncSetAttribute(classifier_stream_kernel<kGrad>,
                                       cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
        classifier_stream_kernel<kGrad><<<std::min(N, device_sm_count), kClassifierThreads, shared, stream>>>(
            logits, losses, targets, dloss, loss_scale, N, V, Vp);
    } else {
        const int threads = std::min(round_up(ceil_div(Vp, kWidth), kWarp), 1024);
        with_vector(Vp, [&](auto vector) {
            classifier_kernel<vector.value, kGrad>
                <<<N, threads, 0, stream>>>(logits, losses, targets, dloss, loss_scale, V, Vp);
        });
    }
    cudaCheck(cudaGetLastError());
}

static void classifier(floatX* logits_inplace /*(N,Vp)*/, float* losses /*(N)*/, const int* targets /*(N)*/,
                       float dloss, const float* loss_scale /*device scalar; null: 1*/, int N, int V, int Vp,
                       ClassifierMode mode, Stream stream) {
    NvtxRange range("classifier");
    if (mode == ClassifierMode::LossOnly) {
        classifier_launch<false>(logits_inplace, losses, targets, dloss, loss_scale, N, V, Vp, stream);
        OUTPUT("classifier.losses", losses, (size_t)N, stream);
        return;
    }
    classifier_launch<true>(logits_inplace, losses, targets, dloss, loss_scale, N, V, Vp, stream);
    OUTPUT("classifier.losses", losses, (size_t)N, stream);
    OUTPUT("classifier.dlogits", logits_inplace, (size_t)N * Vp, stream);
}

// == 6.7 loss ==
// mean (+)= weight * sum of losses. One block; the sum is exact to double precision, in a fixed order.
__global__ void loss_sum_kernel(float* mean, const float* losses, float weight, Accumulate acc, int N) {
    __shared__ double shared[kWarp];
    double sum = 0.0;
    for (int i = threadIdx.x; i < N; i += blockDim.x) { sum += losses[i]; }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) { *mean = (float)((acc == Accumulate::Yes ? (double)*mean : 0.0) + weight * sum); }
}

static void loss_sum(float* mean, const float* losses /*(N)*/, float weight, Accumulate acc, int N,
                     Stream stream) {
    NvtxRange range("loss_sum");
    loss_sum_kernel<<<1, 1024, 0, stream>>>(mean, losses, weight, acc, N);
    cudaCheck(cudaGetLastError());
    OUTPUT("loss_sum.mean", mean, 1, stream);
}

// == 6.8 global norm ==
// norm = sqrt(sum of squares of all gradients) / loss_scale, then the decision about this update, all on the
// device: the host reads both a step later. Gaps between tensors must hold zeros. Gradients of which some are
// bf16 are found by their segments, as in AdamW below.
constexpr int kNormBlocks = 1056, kNormThreads = 256;   // fixed, so that the bits do not depend on the GPU

// The last segment that begins at or before i.
__device__ __forceinline__ ParamSegment segment_of(const ParamSegment* segments, int num_segments, size_t i) {
    int low = 0, high = num_segments;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (segments[middle].begin <= i) { low = middle; }
        else { high = middle; }
    }
    return segments[low];
}

// Gradients of the elements [i, i + kWidth) of the flat fp32 buffers, which lie in this segment.
template <Cache kCache = Cache::Default>
__device__ __forceinline__ Floats load_grads(const void* grads, const ParamSegment& segment, size_t i,
                                             const RoundKey& key) {
    const void* data = (const char*)grads + segment.grads;
    const size_t n = segment.end - segment.begin;
    if (!segment.grads_bf16) { return load_floats<true, kCache>((const float*)data, i - segment.begin, n); }
    return load_dithered<kCache>((const __nv_bfloat16*)data, i - segment.begin, n, key, segment.begin);
}

template <bool kBf16, bool kVector> __global__ void global_norm_kernel(double* partial, GlobalNorm a) {
    __shared__ double shared[kWarp];
    const size_t n = a.n;
    float squares = 0.0f;                               // 124M: 460 elements a thread
    const size_t step = (size_t)gridDim.x * blockDim.x * kWidth;
    for (size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * kWidth; i < n; i += 4 * step) {
        Floats x[4];
#pragma unroll
        for (int u = 0; u < 4; u++) {
            const size_t at = i + u * step;
            if (!kBf16) {
                x[u] = load_floats<kVector>((const float*)a.grads, at, n);
                continue;
            }
            x[u] = Floats{};
            if (at >= n) { continue; }
            const ParamSegment segment = segment_of(a.segments, a.num_segments, at);
            if (at >= segment.begin && at < segment.end) {
                x[u] = load_grads(a.grads, segment, at, a.grad_key);
            }
        }
#pragma unroll
        for (int u = 0; u < 4; u++) {
            float sum = 0.0f;
#pragma unroll
            for (int k = 0; k < kWidth; k++) { sum = fmaf(x[u].at[k], x[u].at[k], sum); }
            squares += sum;
        }
    }
    const double sum = block_sum((double)squares, shared);
    if (threadIdx.x == 0) { partial[blockIdx.x] = sum; }
}

__global__ void update_decision_kernel(UpdateState* state, const double* partial, int partials,
                                       float max_norm, UpdatePolicy policy) {
    __shared__ double shared[kWarp];
    double sum = 0.0;
    for (int i = threadIdx.x; i < partials; i += blockDim.x) { sum += partial[i]; }
    sum = block_sum(sum, shared);
    if (threadIdx.x > 0) { return; }
    const float scale = state->loss_scale;
    const float norm = (float)(sqrt(sum) / scale);
    state->norm = norm;
    if (!isfinite(norm)) {
        state->skip = 1;
        state->skipped_in_a_row++;
        state->good_steps = 0;
        if (policy.dynamic_loss_scale) { state->loss_scale = fmaxf(scale * 0.5f, 1.0f); }
        return;
    }
    state->skip = 0;
    state->skipped_in_a_row = 0;
    state->t++;
    const float clip = max_norm / (norm + kClipEps);
    state->grad_scale = (max_norm > 0.0f && clip < 1.0f ? clip : 1.0f) / scale;
    state->good_steps++;
    if (policy.dynamic_loss_scale && state->good_steps >= policy.growth_interval) {
        state->loss_scale = fminf(scale * 2.0f, policy.max_scale);
        state->good_steps = 0;
    }
}

static size_t global_norm_scratch_bytes(size_t) { return kNormBlocks * sizeof(double); }

static void global_norm(const GlobalNorm& args, Stream stream) {
    NvtxRange range("global_norm");
    double* partial = (double*)args.scratch;
    if (args.grads_bf16) {
        if (!is_vector(args.n)) { die("global_norm: %zu elements, not a multiple of %d", args.n, kWidth); }
        global_norm_kernel<true, true><<<kNormBlocks, kNormThreads, 0, stream>>>(partial, args);
    } else {
        with_vector(args.n, [&](auto vector) {
            global_norm_kernel<false, vector.value><<<kNormBlocks, kNormThreads, 0, stream>>>(partial, args);
        });
    }
    cudaCheck(cudaGetLastError());
    update_decision_kernel<<<1, 1024, 0, stream>>>(args.state, partial, kNormBlocks, args.max_norm,
                                                     args.policy);
    cudaCheck(cudaGetLastError());
    OUTPUT("global_norm.norm", &args.state->norm, 1, stream);
    OUTPUT("global_norm.grad_scale", &args.state->grad_scale, 1, stream);
}

// == 6.9 adamw ==
// g = grad*grad_scale;  m = m + (1-beta1) (g - m);  v = beta2 v + (1-beta2) g^2;
// p = p (1 - lr wd) - lr/(1-beta1^t) m / (sqrt(v)/sqrt(1-beta2^t) + eps), rounded in the order in which
// PyTorch's AdamW rounds (its foreach form), constants taken in double: from equal gradients, equal weights.
// One launch over the flat fp32 buffers; p is the master copy, or the parameter itself (fp32), or the 16-bit
// parameter, rounded stochastically. A skipped update changes nothing.
struct AdamW {
    void* params;                       // (n) of floatX or fp32, as the segments say
    float *master, *m, *v;              // (n); master: null when params are fp32, or for stochastic rounding
    const void* grads;                  // (n) fp32, or as the segments say
    bool grads_bf16;                    // some segments' are
    const UpdateState* state;           // t already counts this update
    const ParamSegment* segments;       // on the device; ascending, each begins at a multiple of 8
    int num_segments;
    size_t n;
    double lr, beta1, beta2, eps;
    RoundKey key;                       // of the parameters' rounding
    RoundKey grad_key;                  // of the micro-step that stored the gradients
};

__device__ inline double power(double x, long long n) {     // x^n by squaring: the same bits on every GPU
    double result = 1.0;
    for (; n > 0; n /= 2, x *= x) {
        if (n % 2 == 1) { result *= x; }
    }
    return result;
}

template <bool kGradsBf16, bool kMaster> __global__ void __launch_bounds__(256) adamw_kernel(AdamW a) {
    if (a.state->skip) { return; }
    __shared__ float shared[2];
    if (threadIdx.x == 0) {
        shared[0] = (float)(-a.lr / (1.0 - power(a.beta1, a.state->t)));
        shared[1] = (float)sqrt(1.0 - power(a.beta2, a.state->t));
    }
    __syncthreads();
    const float minus_rate = shared[0], v_correction = shared[1], grad_scale = a.state->grad_scale;
    const float m_part = (float)(1.0 - a.beta1), v_part = (float)(1.0 - a.beta2), v_keep = (float)a.beta2,
                eps = (float)a.eps;

    const size_t step = (size_t)gridDim.x * blockDim.x * kWidth;
    for (size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * kWidth; i < a.n; i += step) {
        Floats g;
        if (!kGradsBf16) { g = load_floats<true, Cache::Streaming>((const float*)a.grads, i, a.n); }
        Floats m = load_floats<true, Cache::Streaming>(a.m, i, a.n),
               v = load_floats<true, Cache::Streaming>(a.v, i, a.n);
        const ParamSegment segment = segment_of(a.segments, a.num_segments, i);
        if (i < segment.begin || i >= segment.end) { continue; }
        // The parameters lie in the segment's own type: element j of size
        const size_t j = i - segment.begin, size = segment.end - segment.begin;
        const bool fp32 = sizeof(floatX) == 4 || segment.params_fp32;
        float* param_fp32 = (float*)((char*)a.params + segment.params);
        floatX* param = (floatX*)((char*)a.params + segment.params);
        Floats p;
        if (kMaster) { p = load_floats<true, Cache::Streaming>(a.master, i, a.n); }
        else if (fp32) { p = load_floats<true>(param_fp32, j, size); }
        else { p = load_floats<true>(param, j, size); }
        if (kGradsBf16) { g = load_grads<Cache::Streaming>(a.grads, segment, i, a.grad_key); }
        const float decay = (float)(1.0 - a.lr * segment.weight_decay);
#pragma unroll
        for (int k = 0; k < kWidth; k++) {
            const float grad = g.at[k] * grad_scale;
            m.at[k] = fmaf(m_part, grad - m.at[k], m.at[k]);
            v.at[k] = fmaf(v_part, grad * grad, __fmul_rn(v.at[k], v_keep));
            const float update = m.at[k] / (sqrtf(v.at[k]) / v_correction + eps);
            p.at[k] = fmaf(minus_rate, update, __fmul_rn(p.at[k], decay));
        }

        x128 rounded = to_pack<floatX>(p);
        if (!kMaster && sizeof(floatX) == 2) {
            const Draws draws = round_draws(a.key, i);
#pragma unroll
            for (int k = 0; k < kWidth; k++) { store_stochastic(&rounded.data[k], p.at[k], draws.at[k]); }
        }
        if (i + kWidth <= segment.end) {
            store<true, Cache::Streaming>(a.m, i, a.n, to_pack<float>(m));
            store<true, Cache::Streaming>(a.v, i, a.n, to_pack<float>(v));
            if (kMaster) { store<true, Cache::Streaming>(a.master, i, a.n, to_pack<float>(p)); }
            if (fp32) { store<true>(param_fp32, j, size, to_pack<float>(p)); }
            else { store<true>(param, j, size, rounded); }
        // The last elements of a segment: what follows is not touched
        } else {
            store<false>(a.m, i, segment.end, to_pack<float>(m));
            store<false>(a.v, i, segment.end, to_pack<float>(v));
            if (kMaster) { store<false>(a.master, i, segment.end, to_pack<float>(p)); }
            if (fp32) { store<false>(param_fp32, j, size, to_pack<float>(p)); }
            else { store<false>(param, j, size, rounded); }
        }
    }
}

static void adamw_update(AdamW args, Stream stream) {
    NvtxRange range("adamw_update");
    if (!is_vector(args.n)) {
        die("adamw_update: the flat buffers have %zu elements, not a multiple of %d", args.n, kWidth);
    }
    const int threads = 256;
    const int blocks =
        (int)std::min<size_t>(ceil_div(args.n, (size_t)threads * kWidth), (size_t)device_sm_count * 8);
    if (args.grads_bf16) {
        if (args.master) { adamw_kernel<true, true><<<blocks, threads, 0, stream>>>(args); }
        else { adamw_kernel<true, false><<<blocks, threads, 0, stream>>>(args); }
    } else {
        if (args.master) { adamw_kernel<false, true><<<blocks, threads, 0, stream>>>(args); }
        else { adamw_kernel<false, false><<<blocks, threads, 0, stream>>>(args); }
    }
    cudaCheck(cudaGetLastError());
    // as if all of them were floatX: inside the arena, whatever the segments say
    OUTPUT("adamw_update.params", (floatX*)args.params, args.n, stream);
    if (args.master) { OUTPUT("adamw_update.master", args.master, args.n, stream); }
    OUTPUT("adamw_update.m", args.m, args.n, stream);
    OUTPUT("adamw_update.v", args.v, args.n, stream);
}
#endif  // GPT2_CPU

// == 7 multi-GPU ==
// One process, one GPU so far: the loader, the rounding keys and the batch arithmetic already count in
// samples of the whole job, so that more ranks will not change what is computed.

// == 8 model ==
enum class Kernels { Auto, Portable, Sm90 };    // best for this GPU; sm_80's and later; Hopper's or an error
struct Options {                // what a run may choose; fixed after gpt2_allocate
    int recompute;              // 0: save all activations; 1: recompute GELU in backward; 2: LayerNorms too
    // 0: GELU by its own kernels; 1: in the forward GEMM's epilogue; 2: in the backward's too
    int gelu_fusion;
    bool master;                // fp32 master copies of 16-bit parameters
    // Gradients of tensors with two dimensions in bf16, rounded with dither; else fp32
    bool grads_bf16;
    // Residual added in the projection GEMM's epilogue, else fused into the next LayerNorm
    bool residual_in_gemm;
    Kernels kernels;            // which kernels an op with several may use
    bool tf32;                  // FP32 builds: tensor cores for GEMMs
    float weight_decay;         // on the tensors with two dimensions
    uint64_t seed;
};

// What a step leaves on the device for the host to read one step later, and for the next step to go on from.
struct DeviceState {
    UpdateState update;         // AdamW's t, loss scale, norm, the decision to skip
    float loss;                 // mean over the total batch
};

// One batch on the device, or one staging slot in pinned memory; same layout in both
struct Inputs {
    int *tokens, *targets;      // (B,T)
    int* order;                 // (B,T) positions sorted by token, for the embedding's backward
    int4 *segments, *splits;
    size_t bytes;
};

struct GPT2 {
    Config config;
    Options options;
    int T;                      // what the activations are allocated for; a forward may use less
    ParamSpec param_specs[NUM_PARAMS];
    ActSpec act_specs[NUM_ACTS];
    size_t arena_elems;         // flat size of master weights, gradients, m and v, gaps included
    std::vector<ParamSegment> segments;

    char* params;               // see GPT2_PARAMS
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
    uint32_t step, micro;               // keys of stochastic rounding; micro: of the last micro-step
};

// The `tensor` of a RoundKey; elements count through the flat fp32 buffers.
constexpr uint32_t kRoundParams = NUM_PARAMS, kRoundGrads = NUM_PARAMS + 1;

static size_t gpt2_num_parameters(const ParamSpec* specs, Decay decay) {
    size_t count = 0;
    for (int i = 0; i < NUM_PARAMS; i++) {
        if (specs[i].decay == decay) {
            count += (size_t)specs[i].copies * specs[i].live_rows * specs[i].cols;
        }
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

static size_t gpt2_scratch_bytes(const Config& c, const Options& options, int B, int T,
                                 const ParamSpec* specs, size_t elems) {
    const int N = B * T;
    size_t bytes = encoder_backward_scratch_bytes(B, T, c.C);
    bytes = std::max(bytes, layernorm_backward_scratch_bytes(N, c.C));
    // qkv's and fc's: the narrower one may need more, in more chunks
    bytes = std::max(bytes, bias_backward_scratch_bytes(N, 3 * c.C));
    bytes = std::max(bytes, bias_backward_scratch_bytes(N, 4 * c.C));
    bytes = std::max(bytes, attention_backward_scratch_bytes(B, T, c.NH));
    bytes = std::max(bytes, global_norm_scratch_bytes(elems));
    for (int i = 0; i < NUM_PARAMS && options.grads_bf16; i++) {
        bytes = std::max(bytes, specs[i].elems * sizeof(float));
    }
    if (options.grads_bf16) {                   // both parts of dwte meet in scratch
        const size_t wte = specs[PARAM_wte].elems * sizeof(float);
        bytes = std::max(bytes, wte + encoder_backward_scratch_bytes(B, T, c.C));
    }
    return bytes;
}

// One segment a tensor, and the bytes of all gradients. --grad-dtype bf16 leaves LayerNorms and biases in
// fp32: 0.1 % of the gradients, and sums over all tokens, which have the most digits to lose.
static size_t gpt2_segments(std::vector<ParamSegment>* segments, const ParamSpec* specs,
                            const Options& options) {
    size_t bytes = 0;
    segments->clear();
    for (int i = 0; i < NUM_PARAMS; i++) {
        const ParamSpec& s = specs[i];
        const bool matrix = s.decay == Decay::Yes, bf16 = options.grads_bf16 && matrix;
        const size_t elems = s.stride * s.copies;
        segments->push_back({.begin = s.offset, .end = s.offset + elems,
                             .weight_decay = matrix ? options.weight_decay : 0.0f, .grads_bf16 = bf16,
                             .grads = bytes, .params_fp32 = s.elem_bytes == sizeof(float),
                             .params = s.params});
        bytes += elems * (bf16 ? 2 : sizeof(float));
    }
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
    plan.push_back({"parameters", params_bytes(specs)});
    if (kLowPrecision && options.master) { plan.push_back({"master weights", elems * sizeof(float)}); }
    std::vector<ParamSegment> segments;
    plan.push_back({"gradients", gpt2_segments(&segments, specs, options)});
    plan.push_back({"AdamW m and v", elems * 2 * sizeof(float)});
    for (const ActSpec& a : acts) {
        plan.push_back({a.name, round_up(a.elems * a.elem_bytes, kAlign) * a.copies});
    }
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

static void gpt2_check_memory(const Config& c, const Options& options, int B, int T,
                              const DeviceInfo& device) {
    auto fits = [&](int b) {
        return memory_total(gpt2_memory_plan(c, options, b, T)) + memory_reserve(device) <=
               device.memory_free;
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
    die("-b %d -t %d needs %.2f GiB on %s, which has %.2f GiB free\nhint: %s", B, T, wanted,
        device.name.c_str(), device.memory_free / GiB, hint.c_str());
}

static void gpt2_print_memory(const Config& c, const Options& options, int B, int T) {
    std::vector<MemoryItem> plan = gpt2_memory_plan(c, options, B, T);
    std::stable_sort(plan.begin(), plan.end(),
                     [](const MemoryItem& a, const MemoryItem& b) { return a.bytes > b.bytes; });
    const size_t total = memory_total(plan);
    const bool gib = total >= (size_t)1 << 30;
    const double unit = gib ? 1073741824.0 : 1048576.0;
    printf("memory: %.3f %s in all; the largest:", total / unit, gib ? "GiB" : "MiB");
    for (size_t i = 0; i < plan.size() && i < 10; i++) {
        printf("%s %s %.3f", i ? "," : "", plan[i].name.c_str(), plan[i].bytes / unit);
    }
    printf("\n");
}

static void gpt2_allocate(GPT2* model, const Config& config, const Options& options, int B, int T) {
    model->config = config;
    model->options = options;
    model->T = T;
    model->arena_elems = param_specs(model->param_specs, config);
    size_t act_bytes = act_specs(model->act_specs, config, B, T, options.recompute);
    const size_t grad_bytes = gpt2_segments(&model->segments, model->param_specs, options);

    const size_t n = model->arena_elems;
    model->stream = stream_create();
    model->params = (char*)device_malloc(params_bytes(model->param_specs), "parameters");
    model->master = kLowPrecision && options.master
                        ? (float*)device_malloc(n * sizeof(float), "master weights")
                        : nullptr;
    model->m = (float*)device_malloc(2 * n * sizeof(float), "AdamW m and v");
    model->v = model->m + n;
    model->grads = device_malloc(grad_bytes, "gradients");
    model->acts = (char*)device_malloc(act_bytes, "activations");
    model->scratch =
        (float*)device_malloc(gpt2_scratch_bytes(config, options, B, T, model->param_specs, n), "scratch");
    model->workspace = device_malloc(matmul_workspace_bytes(), "matmul workspace");
    model->state = (DeviceState*)device_malloc(sizeof(DeviceState), "state");
    model->device_segments =
        (ParamSegment*)device_malloc(NUM_PARAMS * sizeof(ParamSegment), "parameter segments");
    model->inputs_memory = (char*)device_malloc(inputs_layout(nullptr, B, T).bytes, "inputs");
    model->inputs = inputs_layout(model->inputs_memory, B, T);
    for (int i = 0; i < GPT2::kSlots; i++) {
        model->staging_memory[i] = (char*)pinned_malloc(inputs_layout(nullptr, B, T).bytes, "staging");
        model->staging[i] = inputs_layout(model->staging_memory[i], B, T);
        model->staged[i] = event_create();
    }
    matmul_init(model->workspace, matmul_workspace_bytes(), options.tf32);
    select_kernels(options.kernels == Kernels::Portable);
    if (options.kernels == Kernels::Sm90 && !attention_uses_sm90(config.C / config.NH)) {
        die("--kernels sm90: no Hopper kernel serves head size %d here\n"
            "hint: they need an H100 or H200, a 16-bit build for sm_90a and head size 64; --kernels auto "
            "takes what fits",
            config.C / config.NH);
    }

    // The gaps between tensors take part in norm and AdamW: they are zero and stay zero.
    device_zero(model->params, params_bytes(model->param_specs), model->stream);
    if (model->master) { device_zero(model->master, n * sizeof(float), model->stream); }
    device_zero(model->m, 2 * n * sizeof(float), model->stream);
    device_zero(model->grads, grad_bytes, model->stream);
    DeviceState state = {};
    state.update.loss_scale = kFp16 ? kMaxLossScale : 1.0f;
    copy_to_device(model->state, &state, sizeof(state), model->stream);
    copy_to_device(model->device_segments, model->segments.data(), NUM_PARAMS * sizeof(ParamSegment),
                   model->stream);
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

// ---- parameters from and to the host, one copy of one tensor at a time, as fp32 (slow, at start and end
// only) ----

static void gpt2_set_param(GPT2* model, int i, int l, const float* values /*(elems)*/) {
    const ParamSpec& s = model->param_specs[i];
    std::vector<floatX> rounded;
    const void* data = values;
    if (s.elem_bytes != sizeof(float)) {
        rounded.resize(s.elems);
        for (size_t k = 0; k < s.elems; k++) { rounded[k] = (floatX)values[k]; }
        data = rounded.data();
    }
    copy_to_device(model->params + param_at(s, l), data, s.elems * s.elem_bytes, model->stream);
    if (model->master) {
        copy_to_device(model->master + s.offset + l * s.stride, values, s.elems * sizeof(float),
                       model->stream);
    }
    stream_sync(model->stream);
}

static void gpt2_get_param(GPT2* model, int i, int l, float* values /*(elems)*/, bool from_master) {
    const ParamSpec& s = model->param_specs[i];
    const void* device = model->params + param_at(s, l);
    if (from_master && model->master) { device = model->master + s.offset + l * s.stride; }
    else if (s.elem_bytes != sizeof(float)) {
        std::vector<floatX> raw(s.elems);
        copy_to_host(raw.data(), device, s.elems * s.elem_bytes, model->stream);
        stream_sync(model->stream);
        for (size_t k = 0; k < s.elems; k++) { values[k] = (float)raw[k]; }
        return;
    }
    copy_to_host(values, device, s.elems * sizeof(float), model->stream);
    stream_sync(model->stream);
}

// GPT-2's initialisation (Radford et al. 2019, section 2.3: residual projections scaled by 1/sqrt(number of
// residual layers)). Values depend on (seed, tensor, position) alone. Padded rows of wte are zero and stay
// so.
static void gpt2_init_random(GPT2* model, uint64_t seed) {
    std::vector<float> values;
    for (int i = 0; i < NUM_PARAMS; i++) {
        const ParamSpec& s = model->param_specs[i];
        const size_t live = s.live_rows * s.cols;
        const float std = s.init == Init::Residual ? (float)(0.02 / sqrt(2.0 * model->config.L)) : 0.02f;
        for (int l = 0; l < s.copies; l++) {
            values.assign(s.elems, s.init == Init::One ? 1.0f : 0.0f);
            if (s.init == Init::Normal || s.init == Init::Residual) {
                // Positions in the whole tensor
                const int64_t first = (int64_t)(l * live), end = first + (int64_t)live;
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

// Copies a batch to the device, asynchronously. With targets it also sorts the token positions for the
// embedding's backward: counting sort on the host, while the device still works on the micro-step before.
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
        build_token_buckets(&host_buckets, host.order, host.segments, host.splits, tokens, (int)N,
                            model->config.Vp);
        copy_to_device(device.order, host.order, N * sizeof(int), model->stream);
        copy_to_device(device.segments, host.segments, host_buckets.num_segments * sizeof(int4),
                       model->stream);
        copy_to_device(device.splits, host.splits, host_buckets.num_splits * sizeof(int4), model->stream);
        model->buckets = {device.order, device.segments, device.splits, host_buckets.num_segments,
                          host_buckets.num_splits};
    }
    event_record(model->staged[slot], model->stream);
}

static Params gpt2_params(const GPT2* model, int l) {
    return param_views(model->params, model->param_specs, l);
}

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
            residual_layernorm_forward(a.residual2, a.ln2, a.ln2_mean, a.ln2_rstd, residual, a.dnarrow,
                                       p.ln2w, p.ln2b, N, C, stream);
        }
        matmul_forward({.out = gelu_in_gemm ? a.fch_gelu : a.fch, .inp = a.ln2, .weight = p.fcw,
                        .bias = p.fcb, .residual = nullptr, .pre_gelu = gelu_in_gemm ? a.fch : nullptr,
                        .N = N, .C = C, .OC = 4 * C}, stream);
        if (!gelu_in_gemm) { gelu_forward(a.fch_gelu, a.fch, (size_t)N * 4 * C, stream); }

        // the LayerNorm after this layer: the next layer's first, or the final one
        const bool last = l + 1 == c.L;
        Params q = gpt2_params(model, last ? l : l + 1);
        Acts next = act_views(model->acts, model->act_specs, last ? l : l + 1);
        floatX* ln = last ? a.lnf : next.ln1;
        float* mean = last ? a.lnf_mean : next.ln1_mean;
        float* rstd = last ? a.lnf_rstd : next.ln1_rstd;
        const float *weight = last ? q.lnfw : q.ln1w, *bias = last ? q.lnfb : q.ln1b;
        if (o.residual_in_gemm) {
            matmul_forward({.out = a.residual3, .inp = a.fch_gelu, .weight = p.fcprojw, .bias = p.fcprojb,
                            .residual = a.residual2, .pre_gelu = nullptr, .N = N, .C = 4 * C, .OC = C},
                           stream);
            layernorm_forward(ln, mean, rstd, a.residual3, weight, bias, N, C, stream);
        } else {
            matmul_forward({.out = a.dnarrow, .inp = a.fch_gelu, .weight = p.fcprojw, .bias = p.fcprojb,
                            .residual = nullptr, .pre_gelu = nullptr, .N = N, .C = 4 * C, .OC = C}, stream);
            residual_layernorm_forward(a.residual3, ln, mean, rstd, a.residual2, a.dnarrow, weight, bias, N,
                                       C, stream);
        }
        residual = a.residual3;
    }
}

// Logits of `rows` rows of lnf from row `first` on, into the start of the logits buffer: (rows, Vp).
static void gpt2_logits(GPT2* model, int first, int rows) {
    const Config& c = model->config;
    Acts a = act_views(model->acts, model->act_specs, 0);
    matmul_forward({.out = a.logits, .inp = a.lnf + (size_t)first * c.C, .weight = gpt2_params(model, 0).wte,
                    .bias = nullptr, .residual = nullptr, .pre_gelu = nullptr, .N = rows, .C = c.C,
                    .OC = c.Vp}, model->stream);
}

// Forward, losses of every position, and state->loss (+)= weight * sum of losses. LossAndGrad leaves dlogits
// of dloss * sum(losses) where the logits were.
static void gpt2_loss(GPT2* model, int B, int T, ClassifierMode mode, float dloss, float weight,
                      Accumulate acc) {
    const int N = B * T;
    gpt2_forward(model, B, T);
    gpt2_logits(model, 0, N);
    Acts a = act_views(model->acts, model->act_specs, 0);
    classifier(a.logits, a.losses, model->inputs.targets, dloss, &model->state->update.loss_scale, N,
               model->config.V, model->config.Vp, mode, model->stream);
    loss_sum(&model->state->loss, a.losses, weight, acc, N, model->stream);
}

// Key of the last micro-step's gradients.
static RoundKey gpt2_grad_key(const GPT2* model) {
    return RoundKey{model->options.seed, model->step, model->micro, kRoundGrads};
}

static Grad gpt2_grad(GPT2* model, ParamId id, int l, Accumulate acc) {
    const ParamSpec& s = model->param_specs[id];
    const ParamSegment& segment = model->segments[id];
    char* data =
        (char*)model->grads + segment.grads + l * s.stride * (segment.grads_bf16 ? 2 : sizeof(float));
    return make_grad(data, segment.grads_bf16, s.offset + l * s.stride, acc, gpt2_grad_key(model));
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
    matmul_backward_input({.dinp = a.dnarrow, .dout = a.logits, .weight = p.wte, .pre_gelu = nullptr, .N = N,
                           .C = C, .OC = c.Vp}, stream);
    layernorm_backward({.dresidual = a.dresidual, .dweight = grad(PARAM_lnfw, 0),
                        .dbias = grad(PARAM_lnfb, 0), .dcolsum = grad(PARAM_fcprojb, c.L - 1),
                        .scratch = scratch, .dresidual_acc = Accumulate::No, .dout = a.dnarrow,
                        .inp = a.residual3, .weight = p.lnfw, .mean = a.lnf_mean, .rstd = a.lnf_rstd, .N = N,
                        .C = C}, stream);
    for (int l = c.L - 1; l >= 0; l--) {
        p = gpt2_params(model, l);
        a = act_views(model->acts, model->act_specs, l);
        const floatX* residual =
            l == 0 ? a.encoded : act_views(model->acts, model->act_specs, l - 1).residual3;
        // MLP
        if (o.recompute >= 1) { gelu_forward(a.fch_gelu, a.fch, (size_t)N * 4 * C, stream); }
        matmul_backward_weight(grad(PARAM_fcprojw, l), scratch, a.dresidual, a.fch_gelu, N, 4 * C, C, stream);
        const bool gelu_in_gemm = o.gelu_fusion >= 2 && o.recompute == 0;
        matmul_backward_input({.dinp = a.dwide, .dout = a.dresidual, .weight = p.fcprojw,
                               .pre_gelu = gelu_in_gemm ? a.fch : nullptr, .N = N, .C = 4 * C, .OC = C},
                              stream);
        if (gelu_in_gemm) { bias_backward(grad(PARAM_fcb, l), scratch, a.dwide, N, 4 * C, stream); }
        else { gelu_backward_inplace(a.dwide, grad(PARAM_fcb, l), scratch, a.fch, N, 4 * C, stream); }
        if (o.recompute >= 2) {
            layernorm_forward(a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, p.ln2w, p.ln2b, N, C, stream);
        }
        matmul_backward_weight(grad(PARAM_fcw, l), scratch, a.dwide, a.ln2, N, C, 4 * C, stream);
        matmul_backward_input({.dinp = a.dnarrow, .dout = a.dwide, .weight = p.fcw, .pre_gelu = nullptr,
                               .N = N, .C = C, .OC = 4 * C}, stream);
        layernorm_backward({.dresidual = a.dresidual, .dweight = grad(PARAM_ln2w, l),
                            .dbias = grad(PARAM_ln2b, l), .dcolsum = grad(PARAM_attprojb, l),
                            .scratch = scratch, .dresidual_acc = Accumulate::Yes, .dout = a.dnarrow,
                            .inp = a.residual2, .weight = p.ln2w, .mean = a.ln2_mean, .rstd = a.ln2_rstd,
                            .N = N, .C = C}, stream);
        // attention
        matmul_backward_weight(grad(PARAM_attprojw, l), scratch, a.dresidual, a.atty, N, C, C, stream);
        matmul_backward_input({.dinp = a.dnarrow, .dout = a.dresidual, .weight = p.attprojw,
                               .pre_gelu = nullptr, .N = N, .C = C, .OC = C}, stream);
        attention_backward(a.dwide, scratch, a.dnarrow, a.atty, a.qkv, a.att_lse, B, T, NH, HS, stream);
        bias_backward(grad(PARAM_qkvb, l), scratch, a.dwide, N, 3 * C, stream);
        if (o.recompute >= 2) {
            layernorm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, residual, p.ln1w, p.ln1b, N, C, stream);
        }
        matmul_backward_weight(grad(PARAM_qkvw, l), scratch, a.dwide, a.ln1, N, C, 3 * C, stream);
        matmul_backward_input({.dinp = a.dnarrow, .dout = a.dwide, .weight = p.qkvw, .pre_gelu = nullptr,
                               .N = N, .C = C, .OC = 3 * C}, stream);
        layernorm_backward({.dresidual = a.dresidual, .dweight = grad(PARAM_ln1w, l),
                            .dbias = grad(PARAM_ln1b, l),
                            .dcolsum = l > 0 ? grad(PARAM_fcprojb, l - 1) : none, .scratch = scratch,
                            .dresidual_acc = Accumulate::Yes, .dout = a.dnarrow, .inp = residual,
                            .weight = p.ln1w, .mean = a.ln1_mean, .rstd = a.ln1_rstd, .N = N, .C = C},
                           stream);
    }
    // wte: the LM head's part, then the embedding's. bf16 is rounded once, so there they meet in scratch.
    const size_t wte_elems = model->param_specs[PARAM_wte].elems;
    Grad dwte = o.grads_bf16 ? make_grad(scratch, false, 0, Accumulate::No, RoundKey{}) : grad(PARAM_wte, 0);
    matmul_backward_weight(dwte, scratch, a.logits, a.lnf, N, C, c.Vp, stream);
    dwte.acc = Accumulate::Yes;
    float* free_scratch = o.grads_bf16 ? scratch + wte_elems : scratch;
    encoder_backward(dwte, grad(PARAM_wpe, 0), free_scratch, a.dresidual, model->buckets, B, T, c.maxT, C,
                     stream);
    if (o.grads_bf16) { grad_accumulate(grad(PARAM_wte, 0), scratch, wte_elems, stream); }
}

// One micro-step of `micro_steps`: gradients of the mean loss over the total batch.
static void gpt2_micro_step(GPT2* model, const int* tokens, const int* targets, int B, int T, int micro,
                            int micro_steps) {
    const Accumulate acc = micro == 0 ? Accumulate::No : Accumulate::Yes;
    const float weight = (float)(1.0 / ((double)B * T * micro_steps));
    model->micro = (uint32_t)micro;
    gpt2_set_inputs(model, tokens, targets, B, T);
    gpt2_loss(model, B, T, ClassifierMode::LossAndGrad, weight, weight, acc);
    gpt2_backward(model, B, T, acc);
}

// Norm, the decision to skip, AdamW: all decided on the device.
static void gpt2_update(GPT2* model, double lr, double beta1, double beta2, double eps, float max_norm) {
    const UpdatePolicy policy = {kFp16, 1000, kMaxLossScale};
    global_norm({.state = &model->state->update, .scratch = model->scratch, .grads = model->grads,
                 .grads_bf16 = model->options.grads_bf16, .grad_key = gpt2_grad_key(model),
                 .segments = model->device_segments, .num_segments = NUM_PARAMS, .n = model->arena_elems,
                 .max_norm = max_norm, .policy = policy}, model->stream);
    adamw_update({.params = (floatX*)model->params, .master = model->master, .m = model->m, .v = model->v,
                  .grads = model->grads, .grads_bf16 = model->options.grads_bf16,
                  .state = &model->state->update, .segments = model->device_segments,
                  .num_segments = NUM_PARAMS, .n = model->arena_elems, .lr = lr, .beta1 = beta1,
                  .beta2 = beta2, .eps = eps,
                  .key = RoundKey{model->options.seed, model->step, 0, kRoundParams},
                  .grad_key = gpt2_grad_key(model)}, model->stream);
    model->step++;
}

static DeviceState gpt2_read_state(GPT2* model) {       // waits for the device
    DeviceState state;
    copy_to_host(&state, model->state, sizeof(state), model->stream);
    stream_sync(model->stream);
    return state;
}

// Mean loss of the loader's first batches: as many as it has, at least one and at most `most`. Touches
// neither gradients nor weights.
static float gpt2_validate(GPT2* model, DataLoader* loader, int B, int T, int most) {
    const int batches = (int)std::max((int64_t)1, std::min((int64_t)most, loader->samples_per_epoch / B));
    const float weight = (float)(1.0 / ((double)B * T * batches));
    dataloader_seek(loader, 0);
    for (int i = 0; i < batches; i++) {
        dataloader_next(loader);
        gpt2_set_inputs(model, loader->inputs, loader->targets, B, T);
        gpt2_loss(model, B, T, ClassifierMode::LossOnly, 0.0f, weight,
                  i == 0 ? Accumulate::No : Accumulate::Yes);
    }
    return gpt2_read_state(model).loss;
}

// == 9 checkpoint ==
// model_%08d.bin: 256 int32 header, then the tensors in table order, tight. Version 3 holds fp32, 5 bf16
// (llm.c's numbers); either loads in any build. FP16 builds save version 3 from the master weights.
constexpr int kModelMagic = 20240326, kModelFp32 = 3, kModelBf16 = 5;

// A model from a header's numbers or a descriptor's: what the kernels and the file format need, or a sentence
// why not.
static std::string config_error(const Config& c) {
    if (c.maxT < 1 || c.V < 2 || c.L < 1 || c.NH < 1 || c.C < 1) {
        return format("T=%d V=%d L=%d NH=%d C=%d: each must be at least 1, V at least 2", c.maxT, c.V, c.L,
                      c.NH, c.C);
    }
    if (c.C % c.NH != 0) {
        return format("C=%d is not a multiple of NH=%d (C = heads x head size)", c.C, c.NH);
    }
    if (c.V > 65536) { return format("V=%d: token shards hold 16-bit ids, so V is at most 65536", c.V); }
    if (c.Vp < c.V || c.Vp % 8 != 0) {
        return format("the padded vocabulary %d must be a multiple of 8 and at least V=%d", c.Vp, c.V);
    }
    if (c.L > 10000 || c.C > (1 << 20) || c.maxT > (1 << 24)) {
        return format("L=%d C=%d T=%d: at most 10000 layers, 2^20 channels, 2^24 positions", c.L, c.C,
                      c.maxT);
    }
    return "";
}

static Config checkpoint_read_header(const char* path, FILE* f, int* version) {
    int header[256];
    fread_check(header, sizeof(int), 256, f, path);
    if (header[0] != kModelMagic) {
        die("'%s' is not a model checkpoint: magic number %d, expected %d\nhint: -e takes a model_*.bin or a "
            "descriptor such as d12",
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
        die("'%s' has %lld bytes; its header (L=%d NH=%d C=%d T=%d V=%d, padded %d, version %d) means %lld",
            path, (long long)file_size(path), c.L, c.NH, c.C, c.maxT, c.V, c.Vp, *version,
            (long long)expected);
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
            for (size_t k = 0; k < s.elems; k++) { raw[k] = bf16_round_nearest(values[k]); }
            atomic_write(&out, raw.data(), s.elems * sizeof(uint16_t));
        }
    }
    atomic_commit(&out);
}

// ---- descriptors ----
// "d12" (GPT-2: 124M 350M 774M 1558M are d12 d24 d36 d48), "gpt3:c768", or explicit "L4,NH4,C128,T128,V256".
static Config descriptor_config(const char* text) {
    struct Size { int key, L, C, HS; };
    static const Size gpt2_sizes[] = {
        {6, 6, 384, 64}, {12, 12, 768, 64}, {24, 24, 1024, 64}, {36, 36, 1280, 64}, {48, 48, 1600, 64}};
    // GPT-3 (Brown et al. 2020, table 2.1), by channels; c384 is a smaller one for experiments
    static const Size gpt3_sizes[] = {{384, 6, 384, 64},    {768, 12, 768, 64},    {1024, 24, 1024, 64},
                                      {1536, 24, 1536, 96}, {2048, 24, 2048, 128}, {2560, 32, 2560, 80},
                                      {4096, 32, 4096, 128}};
    const char* hint =
        "\nhint: -e takes a model_*.bin, d6 d12 d24 d36 d48, gpt3:c384 c768 c1024 c1536 c2048 c2560 c4096, "
        "or L4,NH4,C128,T128,V256";
    Config c = {};
    const char* end = text + strlen(text);
    int64_t key = 0;
    auto from_table = [&](const Size* sizes, size_t count, int maxT) {
        for (size_t i = 0; i < count; i++) {
            if (sizes[i].key == key) {
                c.maxT = maxT, c.V = 50257, c.L = sizes[i].L, c.C = sizes[i].C,
                c.NH = sizes[i].C / sizes[i].HS;
            }
        }
    };
    if (text[0] == 'd' && parse_int(text + 1, end, &key)) {
        from_table(gpt2_sizes, sizeof(gpt2_sizes) / sizeof(Size), 1024);
    } else if (strncmp(text, "gpt3:c", 6) == 0 && parse_int(text + 6, end, &key)) {
        from_table(gpt3_sizes, sizeof(gpt3_sizes) / sizeof(Size), 2048);
    } else {
        // letters in any order, each once
        struct Field { const char* letters; int* value; };
        const Field fields[] = {{"L", &c.L}, {"NH", &c.NH}, {"C", &c.C}, {"T", &c.maxT}, {"V", &c.V}};
        const std::vector<std::string> parts = flags_split(text, ',');
        size_t read = 0;
        for (const std::string& part : parts) {
            const size_t letters = std::min(part.find_first_of("-0123456789"), part.size());
            const char* number = part.c_str() + letters;
            int64_t value;
            const bool whole = parse_int(number, part.c_str() + part.size(), &value);
            for (const Field& field : fields) {
                if (!whole || part.substr(0, letters) != field.letters || *field.value != 0) { continue; }
                if (value < 1 || value > INT_MAX) {
                    die("-e '%.80s': %s is %.40s, and must be 1 to %d", text, field.letters, number, INT_MAX);
                }
                *field.value = (int)value;
                read++;
            }
        }
        if (read != 5 || parts.size() != 5) {
            die("-e '%.80s' is neither a file nor a model descriptor%s", text, hint);
        }
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
    double temperature;
    double lr, final_fraction, weight_decay, beta1, beta2, eps, grad_clip;
    int64_t warmup;
    int schedule, overfit, tf32, master, shuffle, kernels;
    int64_t seed;
};
static RunConfig run;

#define DATA_DIR "dev/data/tinyshakespeare/"
static const Flag kFlags[] = {
    // letters, name           type         where                default   min, max, options
    //     help
    {"i",   "train-data",      FLAG_STRING, &run.train_data,
        DATA_DIR "tiny_shakespeare_train.bin", 1, 0, nullptr, "training shards (glob)"},
    {"j",   "val-data",        FLAG_STRING, &run.val_data,
        DATA_DIR "tiny_shakespeare_val.bin", 1, 0, nullptr, "validation shards (glob)"},
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
        "optimizer steps, or `epoch`: once through the data; 0: evaluate, or generate with --prompt"},
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
    {"",    "eps",             FLAG_FLOAT,  &run.eps,            "1e-8",    1e-30, 1, nullptr, "AdamW"},
    {"",    "grad-clip",       FLAG_FLOAT,  &run.grad_clip,      "1",       0, 1e30, nullptr,
        "largest gradient norm; 0: no clipping"},
    {"",    "seed",            FLAG_INT64,  &run.seed,           "1337",    0, 9e15, nullptr,
        "initial weights, data order, samples, stochastic rounding"},
    {"",    "shuffle",         FLAG_BOOL,   &run.shuffle,        "1",       0, 1, nullptr,
        "training rows in an order drawn from the seed, another each epoch; 0: as they lie in the shards"},
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
    {"",    "num-samples",     FLAG_INT,    &run.num_samples,    "1",       1, 1000000, nullptr,
        "samples each time"},
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
    {"",    "kernels",         FLAG_ENUM,   &run.kernels,        "auto",    0, 0, "auto|portable|sm90",
        "kernels of ops that have several: the best for this GPU, sm_80's, or Hopper's (or an error)"},
    {"",    "grad-dtype",      FLAG_ENUM,   &run.grad_dtype,     "fp32",    0, 0, "fp32|bf16",
        "gradient accumulation; bf16: 2-D gradients in bf16, rounded without bias, others in fp32"},
};
constexpr int kNumFlags = sizeof(kFlags) / sizeof(kFlags[0]);

// Checks over more than one flag, before anything is allocated.
static Config config_check() {
    Config c = file_size(run.model) >= 0 || strchr(run.model, '/') || strstr(run.model, ".bin")
             ? checkpoint_config(run.model) : descriptor_config(run.model);
    if (flags_given(kFlags, kNumFlags, "total-batch") && run.total_batch <= 3) {
        die("-z %lld: -z is the total batch in tokens per step, not a ZeRO stage\n"
            "hint: the ZeRO stage will be -zs, which this version does not have; give -z a multiple of B*T "
            "or leave it out",
            (long long)run.total_batch);
    }
    if (run.T == 0) { run.T = c.maxT; }
    if (run.T > c.maxT) {
        die("-t %d is longer than the model's longest sequence, %d\nhint: use -t %d or less, or a model with "
            "more positions",
            run.T, c.maxT, c.maxT);
    }
    const int64_t tokens = (int64_t)run.B * run.T;
    if (tokens > INT_MAX) {
        die("-b %d x -t %d = %lld tokens in a micro-step: at most %d", run.B, run.T, (long long)tokens,
            INT_MAX);
    }
    if (run.total_batch == 0) { run.total_batch = tokens; }
    if (run.total_batch % tokens != 0) {
        const int64_t below = run.total_batch / tokens * tokens;
        die("-z %lld is not a multiple of B*T = %d*%d = %lld\nhint: use -z %lld", (long long)run.total_batch,
            run.B, run.T, (long long)tokens, (long long)(below > 0 ? below : tokens));
    }
    if (run.total_batch / tokens > INT_MAX) {
        die("-z %lld is %lld micro-steps of B*T = %lld tokens: at most %d", (long long)run.total_batch,
            (long long)(run.total_batch / tokens), (long long)tokens, INT_MAX);
    }
    if (run.gelu_fusion > 0 && run.recompute > 0) {
        die("-ge %d needs -r 0: a recomputed GELU works on rounded values and would differ from the fused "
            "one",
            run.gelu_fusion);
    }
#ifdef GPT2_CPU
    if (run.grad_dtype != 0) {
        die("--grad-dtype bf16 needs the CUDA program; the CPU build accumulates in fp32");
    }
    if (run.gelu_fusion != 0) {
        die("-ge %d needs the CUDA program; the CPU build has no GEMM epilogues", run.gelu_fusion);
    }
#endif
    run.max_steps = -1;
    if (strcmp(run.max_steps_text, "epoch") != 0) {
        const char* text = run.max_steps_text;
        const int64_t most = 1000000000000000;      // as for -u
        if (!parse_int(text, text + strlen(text), &run.max_steps) || run.max_steps < 0 ||
            run.max_steps > most) {
            const std::string digits = parse_int_hint(text);
            die("-x (--max-steps) wants a whole number, 0 to %lld, or `epoch`, not '%s'%s%s", (long long)most,
                flags_show(text).c_str(), digits.empty() ? "" : "\nhint: ", digits.c_str());
        }
    }
    if (run.max_steps == 0 && run.output_dir[0] != '\0') {
        die("-x 0 trains nothing, so there is nothing to write to -o %s", run.output_dir);
    }
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
    o.kernels = (Kernels)run.kernels;
    o.weight_decay = (float)run.weight_decay;
    o.seed = (uint64_t)run.seed;
    return o;
}

// == 11 training loop ==
static volatile sig_atomic_t stop_requested = 0;
static void request_stop(int) { stop_requested = 1; }

// The tokenizer that fits the vocabulary: GPT-2's for 50257, bytes for 256, none otherwise (samples are
// printed as ids).
static bool text_init(Tokenizer* tokenizer, int V) {
    if (V == 256) { tokenizer_init_bytes(tokenizer); return true; }
    if (V != 50257) { return false; }
    if (file_size(tokenizer_default_path().c_str()) < 0) {
        fprintf(stderr, "warning: %s is not there: samples are printed as token ids\n",
                tokenizer_default_path().c_str());
        return false;
    }
    tokenizer_init_bpe(tokenizer, nullptr);
    return true;
}

// --prompt as token ids, or the error why it cannot be sampled from.
static std::vector<uint32_t> prompt_tokens(const Tokenizer* tokenizer, bool has_text, int V, int T) {
    std::vector<uint32_t> prompt;
    if (run.prompt[0] == '\0') { return prompt; }
    if (!has_text) {
        die("--prompt needs a tokenizer: there is none for V=%d (256: bytes, 50257: GPT-2)", V);
    }
    tokenizer_encode(tokenizer, run.prompt, strlen(run.prompt), prompt);
    if ((int64_t)prompt.size() > T - 2) {       // T positions: one before the prompt, one at least after it
        die("the prompt has %zu tokens; with -t %d at most %d fit", prompt.size(), T, std::max(0, T - 2));
    }
    return prompt;
}

// Text after the prompt, token by token. The whole prefix is run again for each token; T is rounded up, so
// that few shapes occur, with tokens that a causal model does not see. Draws from its own random stream and
// touches neither weights nor training's state, so training's bits do not depend on it.
static void generate(GPT2* model, const Tokenizer* tokenizer, bool has_text, int64_t step) {
    const Config& c = model->config;
    const int limit = model->T;
    const int start = has_text ? (int)tokenizer->eot : 0;       // what stands before each document
    const std::vector<uint32_t> prompt = prompt_tokens(tokenizer, has_text, c.V, limit);
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
            copy_to_host(raw.data(), act_views(model->acts, model->act_specs, 0).logits, c.V * sizeof(floatX),
                         model->stream);
            stream_sync(model->stream);
            for (int i = 0; i < c.V; i++) { logits[i] = (float)raw[i]; }
            const double coin = rand_unit((uint64_t)run.seed, RAND_SAMPLE, (uint32_t)sample,
                                          (uint64_t)step << 24 | (uint64_t)n);
            const int token =
                sample_token(workspace.data(), logits.data(), c.V, (float)run.temperature, run.top_k, coin);
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

// What a finished step reports. The host enqueues step s+1 before it waits for the report of step s, so the
// device always has work.
struct Reports {
    static const int kSlots = 2;
    DeviceState* slots;         // pinned
    Event ready[kSlots];
    int64_t pending;            // the step whose report is still out; -1: none
    Event started;              // the device was idle and this step was its next work
    // Where the pending step's time begins: the end of the step before, or `started`
    Event since;
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
    // The device's clock: the host may be far ahead
    const double ms = event_ms(r->since, r->ready[slot]);
    r->since = r->ready[slot];
    if (step > 0) { r->ms_sum += ms; r->ms_count++; }      // the first step also loads kernels
    const double lr = lr_at(schedule, step);
    const double tokens_per_s = (double)run.total_batch / ms * 1e3;
    const double mean_ms = r->ms_count > 0 ? r->ms_sum / (double)r->ms_count : ms;
    printf("step %lld/%lld | loss %.6f | lr %.2e | norm %.4f | %.1f ms | %.0f tok/s | ETA %s\n",
           (long long)step + 1, (long long)run.max_steps, state.loss, lr, state.update.norm, ms, tokens_per_s,
           duration_text((double)(run.max_steps - step - 1) * mean_ms * 1e-3).c_str());
    fflush(stdout);
    logger_train(logger,
                 {step, state.loss, lr, state.update.norm, (step + 1) * run.total_batch, ms, tokens_per_s});
    if (state.update.skip) {
        fprintf(stderr, "step %lld: the gradient is not finite (norm %f, loss %f): update skipped\n",
                (long long)step + 1, state.update.norm, state.loss);
        if (state.update.skipped_in_a_row >= kMaxSkipsInARow) {
            die("%d updates in a row were skipped for a non-finite gradient: the run stops and writes "
                "nothing\nhint: a smaller -l or a longer -u; look at the data",
                state.update.skipped_in_a_row);
        }
    }
}

static void train(GPT2* model, DataLoader* train_loader, DataLoader* val_loader, const Tokenizer* tokenizer,
                  bool has_text, Logger* logger) {
    const LrSchedule schedule = {run.schedule, run.lr, run.warmup, run.max_steps, run.final_fraction};
    const int micro_steps = (int)(run.total_batch / ((int64_t)run.B * run.T));
    Reports reports = {};
    reports.slots = (DeviceState*)pinned_malloc(Reports::kSlots * sizeof(DeviceState), "step reports");
    for (Event& e : reports.ready) { e = event_create(); }
    reports.started = event_create();
    reports.pending = -1;

    for (int64_t step = 0; step <= run.max_steps; step++) {
        const bool last = step == run.max_steps || stop_requested;
        const bool validate = run.val_every > 0 && (step % run.val_every == 0 || last);
        const bool sample = run.sample_every > 0 && ((step > 0 && step % run.sample_every == 0) || last);
        if (validate || sample || last) { report_step(&reports, logger, schedule); }
        if (validate) {
            const float loss = gpt2_validate(model, val_loader, run.B, run.T, run.val_batches);
            printf("val loss %.6f\n", loss);
            fflush(stdout);
            logger_val(logger, step, loss);
        }
        if (sample) { generate(model, tokenizer, has_text, step); }
        if (last) {
            if (stop_requested) { printf("stopped by a signal after step %lld\n", (long long)step); }
            break;
        }
        if (reports.pending < 0) {
            event_record(reports.started, model->stream);
            reports.since = reports.started;
        }
        for (int micro = 0; micro < micro_steps; micro++) {
            if (run.overfit) { dataloader_seek(train_loader, 0); }
            dataloader_next(train_loader);
            gpt2_micro_step(model, train_loader->inputs, train_loader->targets, run.B, run.T, micro,
                            micro_steps);
        }
        gpt2_update(model, lr_at(schedule, step), run.beta1, run.beta2, run.eps, (float)run.grad_clip);
        if (kDeviceIsAsync) { report_step(&reports, logger, schedule); }        // of the step before
        copy_to_host(&reports.slots[step % Reports::kSlots], model->state, sizeof(DeviceState),
                     model->stream);
        event_record(reports.ready[step % Reports::kSlots], model->stream);
        reports.pending = step;
        if (!kDeviceIsAsync) { report_step(&reports, logger, schedule); }
    }
    if (reports.ms_count > 0) {
        const double mean_ms = reports.ms_sum / (double)reports.ms_count;
        printf("mean step time %.1f ms, %.0f tokens/s over %lld steps\n", mean_ms,
               (double)run.total_batch / mean_ms * 1e3, (long long)reports.ms_count);
    }
    if (run.output_dir[0] != '\0') {
        const std::string path = format("%s/model_%08d.bin", run.output_dir, (int)model->step);
        checkpoint_save(model, path);
        printf("saved %s\n", path.c_str());
    }
    for (Event& e : reports.ready) { event_destroy(e); }
    event_destroy(reports.started);
    pinned_free(reports.slots);
}

// == 12 main ==
#ifndef TESTING
int main(int argc, char** argv) {
    device_prepare(argv);
    flags_parse(kFlags, kNumFlags, argc, argv);
    const Config config = config_check();
    const Options options = run_options();
    const bool evaluate_only = run.max_steps == 0, generate_only = evaluate_only && run.prompt[0] != '\0';

    // what can be wrong with sizes, files and the prompt is found before memory is taken and before anything
    // is written
    const DeviceInfo device = device_init();
    gpt2_check_memory(config, options, run.B, run.T, device);
    DataLoader train_loader, val_loader;
    if (!evaluate_only) {
        dataloader_init(&train_loader, run.train_data, run.B, run.T, 0, 1, run.shuffle && !run.overfit,
                        (uint64_t)run.seed, config.V);
        if (run.max_steps < 0) {
            run.max_steps = std::max((int64_t)1, train_loader.samples_per_epoch * run.T / run.total_batch);
        }
    }
    const bool needs_val = !generate_only && (run.val_every > 0 || evaluate_only);
    if (needs_val) { dataloader_init(&val_loader, run.val_data, run.B, run.T, 0, 1, false, 0, config.V); }
    if (needs_val && !evaluate_only) {
        const char* shared = dataloader_shared_file(&train_loader, &val_loader);
        if (shared) {
            die("'%s' is both training data (-i) and validation data (-j)\nhint: -v 0 trains without "
                "validation",
                shared);
        }
    }
    const bool sampling = generate_only || (!evaluate_only && run.sample_every > 0);
    Tokenizer tokenizer;
    const bool has_text = sampling && text_init(&tokenizer, config.V);
    if (sampling) { prompt_tokens(&tokenizer, has_text, config.V, run.T); }
    Logger logger;
    if (run.output_dir[0] != '\0') {
        if (file_size(format("%s/main.log", run.output_dir).c_str()) >= 0) {
            die("-o %s already holds a run (main.log)\nhint: choose another folder, or remove that one",
                run.output_dir);
        }
        logger_init(&logger, run.output_dir);
        logger_run(&logger, kFlags, kNumFlags, {{"precision", PRECISION_NAME}, {"device", device.name}});
    }
    printf("device: %s, precision %s\n", device.name.c_str(), PRECISION_NAME);
    flags_print(kFlags, kNumFlags);
    GPT2 model;
    gpt2_allocate(&model, config, options, run.B, run.T);
    const size_t decayed = gpt2_num_parameters(model.param_specs, Decay::Yes);      // wte with V rows
    const size_t others = gpt2_num_parameters(model.param_specs, Decay::No);
    printf(
        "model: L=%d NH=%d C=%d T=%d V=%d (padded %d), %zu parameters: %zu with weight decay, %zu without "
        "(wte with padded rows)\n",
        config.L, config.NH, config.C, config.maxT, config.V, config.Vp, decayed + others,
        decayed + (size_t)(config.Vp - config.V) * config.C, others);
    gpt2_print_memory(config, options, run.B, run.T);
    printf("kernels: attention %s\n",
           attention_uses_sm90(config.C / config.NH) ? "sm90 (wgmma)" : "portable");
    if (file_size(run.model) >= 0) { checkpoint_load(&model, run.model); }
    else { gpt2_init_random(&model, options.seed); }

    if (evaluate_only) {
        if (generate_only) {
            generate(&model, &tokenizer, has_text, 0);
        } else {
            printf("val loss %.6f\n", gpt2_validate(&model, &val_loader, run.B, run.T, run.val_batches));
        }
    } else {
        printf("data: %lld training tokens (%lld rows of %d), %d micro-steps a step, %lld steps\n",
               (long long)train_loader.tokens, (long long)train_loader.samples_per_epoch, run.T,
               (int)(run.total_batch / ((int64_t)run.B * run.T)), (long long)run.max_steps);
        struct sigaction action = {};
        action.sa_handler = request_stop;
        action.sa_flags = SA_RESTART;       // a write that the signal meets goes on
        sigaction(SIGINT, &action, nullptr);
        sigaction(SIGTERM, &action, nullptr);
        train(&model, &train_loader, &val_loader, &tokenizer, has_text, &logger);
        dataloader_free(&train_loader);
    }
    if (needs_val) { dataloader_free(&val_loader); }
    if (has_text) { tokenizer_free(&tokenizer); }
    logger_free(&logger);
    gpt2_free(&model);
    return 0;
}
#endif
