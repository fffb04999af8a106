/*
Pretraining of models shaped like GPT-2, GPT-3, Llama and Qwen3 in one file: every forward and backward
kernel, the models, AdamW and Muon, gradient accumulation, several GPUs, checkpoints, the training loop.

Two builds of this file:
    make train_gpt2cu      nvcc, the CUDA program (PRECISION=BF16|FP16|FP32)
    make train_gpt2cpu     g++ -DGPT2_CPU, the same program for CPUs: the plain loops of llmc/ops/cpu_ops.h,
                           which specify every kernel here, do the work
Run:
    ./train_gpt2cu -e d12 -b 64 -t 1024 -z 524288 -i 'shards/train_*.bin' -j 'shards/val_*.bin' -o runs/d12
    ./train_gpt2cu --gpus 8 -zs 1 ...           the same run, to the bit, on eight GPUs
    ./train_gpt2cu eval runs/d12                validation loss of that run's last model; --prompt TEXT: text
    ./train_gpt2cu --help

Sections (search for "// == "):
     1 includes            2 types                  3 limits               4 device runtime
     5 device helpers      6 ops                    7 model               8 a step
     9 writing text       10 checkpoint            11 setting up a run    12 training loop
    13 main
Section 6: 6.1 encoder  6.2 norms  6.3 matmul  6.4 activations, bias, products with
     activations (sm90), FP8  6.5 classifier  6.6 loss
     6.7 gradients: lanes and the norm  6.8 adamw, muon  6.9 attention, the longest: plain, mma.sync, sm90
     6.10 decoding: writes text, token by token  6.11 rotation  6.12 value embeddings
Sections 4 and 5 are headers in llmc/. Read train_step in section 8 first, then the tables in section 7, then
llmc/ops/ops.h and the ops of section 6 that you need.
Letters, everywhere: B batch rows, T tokens a row, C channels, NH heads, NKV heads of keys and values, HS head
size, F the MLP's width, V vocabulary, Vp padded vocabulary, L layers, OC output channels, N = B*T rows of a
matrix; but a product is M x N x K. An index is the lower-case letter: b t c l, and h for a head; bt is b*T+t.
*/

// == 1 includes ==
#include <float.h>      // gives: FLT_MAX

#include <type_traits>  // gives: std::decay_t, std::conditional_t

#include "llmc/checked_files.h"      // gives: die, die_if, format, file_size
#include "llmc/rand.h"               // gives: rand_normal4, rand_unit, RoundKey
#include "llmc/numbers.h"            // gives: ceil_div, round_up, is_power_of_two
#include "llmc/model/model_config.h" // gives: Config, descriptor_config
#include "llmc/model/lanes.h"        // gives: lane_buffer, lane_merges, lane_buffers
#include "llmc/model/layout.h"       // gives: ParamSpec, ActSpec, Layout, Places, param_address
#include "llmc/model/memory_plan.h"  // gives: MemoryItem, memory_fits, memory_check, memory_print
#include "llmc/model/muon_plan.h"    // gives: MuonShare, muon_share, muon_shapes
#include "llmc/ops/ops.h"            // gives: MODEL_OPS, each op's arguments, Grad, ChunkRange
#include "llmc/ops/rotation_table.h" // gives: rotation_table, rotation_table_size
#include "llmc/ops/token_buckets.h"  // gives: build_token_buckets, find_documents
#include "llmc/data/dataloader.h"    // gives: DataLoader
#include "llmc/data/evalloader.h"    // gives: EvalSet
#include "llmc/data/sampler.h"       // gives: Sampling, sample_weight, sample_target
#include "llmc/run/schedulers.h"     // gives: LrSchedule, lr_at, momentum_at
#include "llmc/run/run_config.h"     // gives: run, kFlags, run_task, rank_micro_steps
#include "llmc/run/run_data.h"       // gives: RunData, data_open, data_check_same, data_print, data_free
#include "llmc/run/run_folder.h"     // gives: find_resumed, folder_resolve, run_folder_check
#include "llmc/run/flags.h"          // gives: flags_parse, flags_print
#include "llmc/run/logger.h"         // gives: Logger
#include "llmc/run/plan.h"           // gives: gpu_kind, plan_print_batch, plan_print_time
#include "llmc/run/step_reports.h"   // gives: Reports, reports_begin, reports_end, report_step
#include "llmc/run/report.h"         // gives: report_model, report_line, report_val, report_finite
#include "llmc/run/stop.h"           // gives: catch_signals, stop_agreed, stop_requested
#include "llmc/run/version.h"        // gives: version_asked, version_print
#include "llmc/run/requests.h"       // gives: requests_answer, Request
#include "llmc/run/samples.h"        // gives: write_samples, chat, TextDraw
#include "llmc/files/state_file.h"   // gives: state_row; from facts.h Facts, fact_number
#include "llmc/files/checkpoints.h"  // gives: Retention
#include "llmc/files/model_file.h"   // gives: model_read_config, model_read
#include "llmc/files/saver.h"        // gives: Saver, SavedPiece, saver_advance, saver_finish
#include "llmc/files/resume.h"       // gives: Checkpoint, checkpoint_find, checkpoint_resume, resumed_check
#include "llmc/comm/comm.h"          // gives: comm, comm_start, comm_any, comm_all_gather

// == 2 types ==
// floatX is the type of weights and activations. LayerNorm's parameters, statistics, losses, norms and
// optimizer state are fp32 in every build.
#if defined(GPT2_CPU) || defined(ENABLE_FP32)
typedef float floatX;
#define PRECISION_NAME "FP32"
constexpr bool kFp16 = false;
#elif defined(ENABLE_FP16)
#include <cuda_bf16.h>          // gives: __nv_bfloat16
#include <cuda_fp16.h>          // gives: half
typedef half floatX;
#define PRECISION_NAME "FP16"
constexpr bool kFp16 = true;
template <> struct MuonValue<half> { typedef __nv_bfloat16 type; };
#else
#include <cuda_bf16.h>          // gives: __nv_bfloat16
typedef __nv_bfloat16 floatX;
#define PRECISION_NAME "BF16"
constexpr bool kFp16 = false;
template <class S> struct MasterValue<__nv_bfloat16, S> { typedef uint16_t type; };
#endif

constexpr bool kLowPrecision = sizeof(floatX) == 2;     // parameters may have fp32 master copies
typedef MuonValue<floatX>::type muonX;      // what Muon multiplies
typedef MasterValue<floatX, float>::type masterX;       // beside a bf16 weight its master's lower half
#define X(op, Args) typedef Args##Of<floatX, float> Args;      // the ops' arguments
MODEL_OPS(X)
#undef X
static_assert(sizeof(muonX) == sizeof(floatX), "model_arrays counts its buffers by bytes_floatX");

// == 3 limits ==
// FP16 multiplies the loss by a scale, so that small gradients do not become zero. The loss is a mean over a
// step's tokens, so the scale starts at their number, rounded up to a power of two, or at kFirstLossScale if
// that is more. It doubles after kLossScaleSteps good steps and halves on overflow. kMaxLossScale keeps it
// finite.
constexpr float kFirstLossScale = 65536.0f, kMaxLossScale = 0x1p60f;
constexpr int kLossScaleSteps = 1000;
constexpr int kMaxSkipsInARow = 20;         // skipped updates in a row, after which the run stops

// Limits that only tests change, so that small shapes take the paths of large ones.
static struct TestHooks {
    int norm_blocks = INT_MAX;              // of the norms' backward: with a few, each takes many rounds
} hooks;

// == 4 device runtime, 5 device helpers ==
// In the CPU build, device.h gives the ops, too, by the same names and in plain C++: all of section 6.
#include "llmc/ops/device.h"         // gives: device_malloc, stream_create; CUDA: cudaCheck, OpScope
#ifndef GPT2_CPU
#include "llmc/ops/cuda_helpers.h"   // gives: x128, load, store, block_sum, mma_16x8, wgmma_shared
#include "llmc/ops/cuda_launch.h"    // gives: check_width, allow_shared_memory, tensor_map
#include "llmc/ops/cublaslt.h"       // gives: Gemm, gemm
#include "llmc/ops/nccl.h"           // gives: device_comm_init, device_all_to_all, device_all_gather

// == 6 ops ==
// Each op of ops.h has its maths, its kernels and last its launcher, which has the op's name. A launcher
// checks its arguments, allocates nothing and waits for nothing; its OpScope dies if a launch has failed.
// Kernels walk rows in vectors of kWidth elements: C, OC and Vp are multiples of 8 (config_error); a head's
// size need not be. nvcc unrolls short inner loops by itself; the others say #pragma unroll.
#define X(op, Args) static void op(const Args& a, Stream stream);
MODEL_OPS(X)
#undef X

// The host reads this kernel's thread limit: 128 means that this GPU runs code for sm_90a. A Hopper GPU may
// also run a plain sm_90 or compute_80 build, in which the bodies of the sm90 kernels are traps.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
__global__ void __launch_bounds__(128) sm90_probe_kernel() {}
#else
__global__ void __launch_bounds__(64) sm90_probe_kernel() {}
#endif

// Set once, at start: --kernels portable, and whether an FP32 build may round operands to TF32 (-f).
static bool use_sm90_kernels = true, use_tf32 = false;
static void select_kernels(bool portable_only, bool tf32) {
    use_sm90_kernels = !portable_only;
    use_tf32 = tf32 && sizeof(floatX) == 4;
}

static bool sm90_kernels_run() {
    static const bool built = [] {
        cudaFuncAttributes attributes;
        cudaCheck(cudaFuncGetAttributes(&attributes, sm90_probe_kernel));
        return attributes.maxThreadsPerBlock == 128;
    }();
    return use_sm90_kernels && built;
}

// == 6.1 encoder ==
// Forward:  out[b,t,:] = wte[token[b,t],:] + wpe[t,:], or wpe[position[b,t],:], or without wpe
// Backward: dwte[v,:] += sum of dout[bt,:] over the positions bt where token v stood
//           dwpe[t,:] (+)= sum over b of dout[b,t,:], in order
// Many positions may hold the same token, and adding them atomically would give other bits each run. So the
// host sorts the positions by token (token_buckets.h), and each row of dwte has one owner that adds its
// positions in that order. A token with more than 128 positions is split into segments, each with an owner:
// their sums meet in scratch (slots,C), and a second kernel adds them up, again in order.
constexpr int kEncoderThreads = 128;            // of the backward: wider rows are shared among blocks

// Each threadIdx.y of a block takes one row of out.
__global__ void encoder_forward_kernel(EncoderForward a) {
    const int bt = blockIdx.x * blockDim.y + threadIdx.y, C = a.C;
    if (bt >= a.B * a.T) { return; }
    const int token = max(a.tokens[bt], 0), t = a.positions ? a.positions[bt] : bt % a.T;
    floatX* out_bt = a.out + (size_t)bt * C;
    const floatX *wte_ix = a.wte + (size_t)token * C, *wpe_t = a.wpe + (size_t)t * C;
    for (int c = threadIdx.x * kWidth; c < C; c += blockDim.x * kWidth) {
        Floats sum = load_floats(wte_ix, c, C);
        const Floats b = load_floats(wpe_t, c, a.wpe ? C : 0);
        for (int k = 0; k < kWidth && a.wpe; k++) { sum.at[k] += b.at[k]; }
        store(out_bt, c, C, to_pack<floatX>(sum));
    }
}

// Sum of `count` rows of a matrix with C columns, one after the other, for the columns [c, c + kWidth);
// row_of(i) is the i-th. They are `stride` elements apart. Eight are asked for before the first is added.
template <class T, class RowOf>
__device__ __forceinline__ Floats sum_rows(const T* rows, int count, int c, int C, int stride, RowOf row_of) {
    constexpr int kUnroll = 8;
    Floats sum = {};
    for (int first = 0; first < count; first += kUnroll) {
        Pack<T> x[kUnroll];
        for (int u = 0; u < kUnroll; u++) {
            const bool live = first + u < count;
            const T* row = rows + (live ? (size_t)row_of(first + u) * stride : 0);
            x[u] = load(row, live ? c : C, C);
        }
#pragma unroll
        for (int u = 0; u < kUnroll; u++) {
            for (int k = 0; k < kWidth; k++) { sum.at[k] += (float)x[u].data[k]; }
        }
    }
    return sum;
}

// A block owns one segment (blockIdx.x) and some columns (blockIdx.y), here and in the two kernels below: the
// sum of its positions goes to dwte, or to a slot.
__global__ void encoder_backward_wte_kernel(Grad dwte, float* partial /*(slots,C)*/, const floatX* dout,
                                            const int* order, const int4* segments, int C, int stride) {
    const int4 segment = segments[blockIdx.x];          // {token, start, length, slot or -1}
    const int c = (blockIdx.y * blockDim.x + threadIdx.x) * kWidth;
    if (c >= C) { return; }
    const int* positions = order + segment.y;
    Floats sum = sum_rows(dout, segment.z, c, C, stride, [&](int i) { return positions[i]; });
    if (segment.w < 0) {
        grad_store(dwte, (size_t)segment.x * C + c, (size_t)(segment.x + 1) * C, sum);
    } else {
        store(partial + (size_t)segment.w * C, c, C, to_pack<float>(sum));
    }
}

// A block owns one token that was split: the sum of its slots is added to its row of dwte.
__global__ void encoder_backward_split_kernel(Grad dwte, const float* partial, const int4* splits, int C) {
    const int4 split = splits[blockIdx.x];              // {token, first slot, slots, 0}
    const int c = (blockIdx.y * blockDim.x + threadIdx.x) * kWidth;
    if (c >= C) { return; }
    Floats sum = sum_rows(partial, split.z, c, C, C, [&](int i) { return split.y + i; });
    grad_store(dwte, (size_t)split.x * C + c, (size_t)(split.x + 1) * C, sum);
}

// A block owns one position t.
__global__ void encoder_backward_wpe_kernel(Grad dwpe, const floatX* dout, int B, int T, int C) {
    const int t = blockIdx.x, c = (blockIdx.y * blockDim.x + threadIdx.x) * kWidth;
    if (c >= C) { return; }
    Floats sum = {};                                    // rows t >= T: no token stood there
    if (t < T) { sum = sum_rows(dout, B, c, C, C, [&](int b) { return (size_t)b * T + t; }); }
    grad_store(dwpe, (size_t)t * C + c, (size_t)(t + 1) * C, sum);
}

static void encoder_forward(const EncoderForward& a, Stream stream) {
    OpScope scope(a, stream);
    const int x = std::min(round_up(ceil_div(a.C, kWidth), kWarp), 256);
    const dim3 block(x, 256 / x);               // as many rows as make some 256 threads: C=768, 96 x 2
    check_width(a, a.C);
    encoder_forward_kernel<<<ceil_div(a.B * a.T, (int)block.y), block, 0, stream>>>(a);
}

static size_t encoder_backward_scratch_bytes(int B, int T, int C) {
    return (size_t)max_bucket_slots((int64_t)B * T) * C * sizeof(float);
}

static void encoder_backward(const EncoderBackward& a, Stream stream) {
    OpScope scope(a, stream);
    const int B = a.B, T = a.T, maxT = a.maxT, C = a.C;
    assert(!a.dwte.is_bf16);                        // bf16 is rounded once, by grad_accumulate
    assert(a.dwte.acc == Accumulate::Yes);          // to a tied LM head's part, or to zeros
    check_width(a, C);
    const int threads = std::min(round_up(ceil_div(C, kWidth), kWarp), kEncoderThreads);
    const int slabs = ceil_div(C, threads * kWidth);    // blocks side by side along a row
    encoder_backward_wte_kernel<<<dim3(a.buckets.num_segments, slabs), threads, 0, stream>>>(
        a.dwte, a.scratch, a.dout, a.buckets.order, a.buckets.segments, C, a.stride > 0 ? a.stride : C);
    if (a.buckets.num_splits > 0) {
        encoder_backward_split_kernel<<<dim3(a.buckets.num_splits, slabs), threads, 0, stream>>>(
            a.dwte, a.scratch, a.buckets.splits, C);
    }
    if (!a.dwpe.data) { return; }
    const int rows = a.dwpe.acc == Accumulate::Yes ? T : maxT;
    encoder_backward_wpe_kernel<<<dim3(rows, slabs), threads, 0, stream>>>(a.dwpe, a.dout, B, T, C);
}

// == 6.2 norms of the residual stream ==
// For each row of (N,C), with means over its C elements:
// Forward:  x = inp + branch[0]*f0 + branch[1]*f1, rounded and stored as `sum`; f is 0 or 1/(1-p) where
//           a branch has dropout, else 1. Without branches x = inp.
//           mean = mean(x)   rstd = 1/sqrt(mean((x - mean)^2) + eps)     RMSNorm: mean = 0
//           y[i] = (x - mean)*rstd*weight[i] + bias[i]                 or the bytes of these (fp8)
// Backward: xhat = (x - mean)*rstd     g = the sum over i of dout[i]*weight[i]
//           dresidual (+)= rstd*(g - mean(g) - xhat*mean(g*xhat))        RMSNorm: without mean(g)
//           dweight[i] (+)= column sums of dout[i]*xhat     dbias[i] (+)= column sums of dout[i]
//           branch[i].dout = dresidual*f     branch[i].dbias (+)= its column sums, as stored
// Column sums take two stages: each block sums its rows into a row of partials (blocks,sums,C) in scratch,
// then column_sums_kernel adds those up in order. Dropout masks are recomputed from the Philox counters and
// never stored.
// Whole warps share a row, blockDim.x threads. A thread moves vectors of kWidth columns: its vector v is
// columns [c, c + kWidth) with c = (v*blockDim.x + threadIdx.x)*kWidth. Only what changes registers is a
// template argument; dropout, RMSNorm and a second norm are read from the arguments.
constexpr int kRowThreads = 512;                // most of a row

// values[k] *= what the dropout of element c + k of row n is
__device__ __forceinline__ void apply_dropout(Floats& values, const Dropout& d, int n, int c) {
    const Rand4 block = dropout_block(d.key, d.first_row + n, (uint32_t)(c / 8));
    for (int k = 0; k < kWidth; k++) { values.at[k] *= dropout_factor(d, block, c % 8 + k); }
}

// kCount sums over the threads of a row, in the order of its warps: share_sums leaves each warp's in
// `exchange` (warps,kCount) and ends with a barrier, add_sums adds them up for every thread.
template <int kCount> __device__ __forceinline__ void share_sums(float (&x)[kCount], float* exchange) {
    constexpr int kLanes = kWarp / kCount;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const float sum = warp_sums(x);
    if (lane % kLanes == 0) { exchange[warp * kCount + lane / kLanes] = sum; }
    __syncthreads();
}
template <int kCount> __device__ __forceinline__ void add_sums(float (&x)[kCount], const float* exchange) {
    for (int i = 0; i < kCount; i++) { x[i] = 0.0f; }
    for (int w = 0; w < (int)blockDim.x / kWarp; w++) {
        for (int i = 0; i < kCount; i++) { x[i] += exchange[w * kCount + i]; }
    }
}
template <int kCount> __device__ __forceinline__ void row_sums(float (&x)[kCount], float* exchange) {
    if (kCount == 1 && blockDim.x == kWarp) {           // no barrier: C=768 gains 5 % of a copy
        x[0] = warp_sum(x[0]);
    } else {
        share_sums(x, exchange);
        add_sums(x, exchange);
    }
}

static_assert(kWidth <= 8, "kOnes has a vector");
__device__ alignas(32) const float kOnes[8] = {1, 1, 1, 1, 1, 1, 1, 1};
__device__ __forceinline__ Floats load_weights(const float* weight /*(C) or null: 1*/, int c, int C) {
    return load_floats(weight ? weight : kOnes, weight ? c : 0, C);
}

// The forward. A block takes kRows rows, which stay in registers as words; after keep_packed their floats are
// computed again. Two rows share the loads of weight and bias. kAdds: there may be branches. With up to 4
// vectors an SM has room for 1024 threads, else for 512.
template <int kRows, int kVectors, bool kAdds>
__global__ void __launch_bounds__(kRowThreads, kRows * kVectors * (kAdds ? 2 : 1) > 4 ? 1 : 2)
    norm_forward_kernel(NormForward a) {
    __shared__ float exchange[2][kRowThreads / kWarp * kRows];
    const int C = a.C, first = blockIdx.x * kRows, c0 = threadIdx.x * kWidth, c_step = blockDim.x * kWidth;
    const bool rms = a.kind == NormKind::Rms;
    const float inverse_C = 1.0f / C;
    const floatX* inp = a.inp;
    floatX* stored = a.sum;

    // 1. Load: all loads are on their way before the first is needed. What is missing is zeros.
    uint4 x[kRows][kVectors], branch[2][kRows][kVectors];
#pragma unroll
    for (int r = 0; r < kRows; r++) {
        const size_t at = (size_t)(first + r) * C;
        const int end = first + r < a.N ? C : 0;
#pragma unroll
        for (int v = 0; v < kVectors; v++) {
            const int c = c0 + v * c_step;
            const x128 pack = load(inp + at, c, !kAdds || inp ? end : 0);
            memcpy(&x[r][v], &pack, sizeof(pack));
            for (int i = 0; i < (kAdds ? 2 : 0); i++) {
                const x128 added = load(a.branch[i] + at, c, a.branch[i] ? end : 0);
                memcpy(&branch[i][r][v], &added, sizeof(added));
            }
        }
    }
    auto vector = [&](int r, int v) { return to_floats(as_pack(x[r][v])); };

    // 2. Add the branches, round and store.
#pragma unroll
    for (int m = 0; m < (kAdds ? kRows * kVectors : 0); m++) {
        const int r = m / kVectors, v = m % kVectors, c = c0 + v * c_step;
        Floats sum = vector(r, v);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (!a.branch[i]) { continue; }
            Floats added = to_floats(as_pack(branch[i][r][v]));
            if (a.dropout[i].dropped > 0) { apply_dropout(added, a.dropout[i], first + r, c); }
            for (int k = 0; k < kWidth; k++) { sum.at[k] += added.at[k]; }
        }
        const x128 rounded = to_pack<floatX>(sum);
        store(stored + (size_t)(first + r) * C, c, stored && first + r < a.N ? C : 0, rounded);
        memcpy(&x[r][v], &rounded, sizeof(rounded));
    }

    // 3. Mean, and the variance around it without what lies beyond C.
    float mean[kRows] = {}, rstd[kRows] = {};
    keep_packed(x);
#pragma unroll
    for (int m = 0; m < kRows * kVectors; m++) {
        const Floats values = vector(m / kVectors, m % kVectors);
        for (int k = 0; k < kWidth; k++) { mean[m / kVectors] += values.at[k]; }
    }
    keep_packed(x);
    row_sums(mean, exchange[0]);
    for (int r = 0; r < kRows; r++) { mean[r] = rms ? 0.0f : divide(mean[r], C, inverse_C); }
#pragma unroll
    for (int m = 0; m < kRows * kVectors; m++) {
        const int r = m / kVectors, v = m % kVectors;
        if (c0 + v * c_step >= C) { continue; }
        const Floats values = vector(r, v);
        for (int k = 0; k < kWidth; k++) { rstd[r] += (values.at[k] - mean[r]) * (values.at[k] - mean[r]); }
    }
    keep_packed(x);
    row_sums(rstd, exchange[1]);
#pragma unroll
    for (int r = 0; r < kRows; r++) {
        rstd[r] = 1.0f / sqrtf(divide(rstd[r], C, inverse_C) + (float)a.eps);
        if (threadIdx.x > 0 || first + r >= a.N) { continue; }
        if (!rms) { a.mean[first + r] = mean[r]; }
        a.rstd[first + r] = rstd[r];
    }

    // 4. Normalise, once or twice.
#pragma unroll 1
    for (int i = 0; i < 2 && (a.y[i].out || a.y[i].fp8); i++) {
        const NormOutput<floatX, float>& to = a.y[i];
        const float scale = to.fp8 ? to.tensor->scale : 0.0f;
        const uint32_t so_far = to.fp8 ? fp8_amax_so_far(to.stats) : 0;
        Fp8Counts counts;
        keep_packed(x);
#pragma unroll
        for (int v = 0; v < kVectors; v++) {
            const int c = c0 + v * c_step;
            const Floats weight = load_weights(to.weight, c, C);
            const Floats bias = load_floats(to.bias, c, rms ? 0 : C);
#pragma unroll
            for (int r = 0; r < kRows; r++) {
                Floats y = vector(r, v);
                for (int k = 0; k < kWidth; k++) {
                    y.at[k] = fmaf((y.at[k] - mean[r]) * rstd[r], weight.at[k], bias.at[k]);
                }
                const int end = first + r < a.N ? C : 0;
                const size_t at = (size_t)(first + r) * C;
                if (!to.fp8) { store(to.out + at, c, end, to_pack<floatX>(y)); }
                else if (c < end) { store(to.fp8 + at, c, end, counts.round(y, scale)); }
            }
        }
        if (!to.fp8) { continue; }
        const uint2 of_warp = counts.of_warp();
        if (threadIdx.x % kWarp == 0) { fp8_count(to.stats, so_far, of_warp.x, of_warp.y); }
        if (blockIdx.x + threadIdx.x == 0) { to.stats->elements += (size_t)a.N * C; }
    }
}

// The second stage of every column sum, here and in 6.4: out[i][c] (+)= sum over p of partial[p,i,c], in a
// fixed order. A block of (32,32) threads owns 32 columns of tensor i = blockIdx.y; thread row y takes p = y,
// y + 32, ...; thread row 0 adds up what the 32 have.
struct ColumnSums { Grad out[6]; };
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
}

// The backward. A thread walks down the rows, kRows at a time, always with the same kVectors vectors of
// columns; blockDim.y groups of threads work on different rows. Column sums stay in registers from the first
// row to the last, 24 of them for one norm at 16 bits. Only the two sums along a row cross threads: those of
// kRows rows with one exchange and one barrier. A step is the rows that all blocks take at once; i is this
// group's first row:
//
//     copies       | rows i + 2 steps (cp.async, into this thread's slots) | rows i + 3 steps
//     this thread  | rows i: sums -> exchange -> barrier -> dresidual      | rows i + 1 step: sums -> ...
//
// A slot in shared memory belongs to one thread, so a thread waits for its own copies only. With plain loads
// into registers the memory would idle during the arithmetic: 177 us instead of 104 for C=768, 124M.
// Longer rows are norm_backward_long_kernel's. kCount is 1 for one norm and one branch, and 2 for everything
// else. With kCount 2, a missing norm or branch reads as zeros, and its sums are not stored.
template <int kCount> struct NormSlots {                                // of a thread, 16 bytes each
    static constexpr int kRows = kCount == 1 ? 2 : 1;                   // two norms have no registers for two
    static constexpr int kStages = 2;                                   // more have no shared memory
    static constexpr int kTensors = 2 + kCount;                         // inp, douts, dresidual
    static constexpr int kAll = kStages * kRows * kTensors;
    static constexpr int exchange_bytes(int warps) { return 2 * warps * 2 * kRows * (int)sizeof(float); }
    static_assert(kAll * sizeof(x128) * kRowThreads + exchange_bytes(kRowThreads / kWarp) <= kPortableShared,
                  "what every GPU's blocks may have of shared memory");
};

// g of a vector of columns.
template <int kCount>
__device__ __forceinline__ Floats norm_gradient(const Floats (&dout)[kCount],
                                                const Floats (&weight)[kCount]) {
    Floats g;
#pragma unroll
    for (int k = 0; k < kWidth; k++) {
        g.at[k] = dout[0].at[k] * weight[0].at[k];
        for (int i = 1; i < kCount; i++) { g.at[k] = fmaf(dout[i].at[k], weight[i].at[k], g.at[k]); }
    }
    return g;
}

// The gradient of row n's sum at columns [c, c + kWidth), and of the branches behind a dropout. totals (+)=
// what is stored, for the branches' biases. Nothing where c is `end` or beyond.
template <int kCount>
__device__ __forceinline__ void norm_store(const NormBackward& a, const Floats& result, int n, int c, int end,
                                           Floats* totals /*(kCount)*/) {
    const size_t at = (size_t)n * a.C;
    const x128 rounded = to_pack<floatX>(result);
    store(a.dresidual + at, c, end, rounded);
#pragma unroll
    for (int i = 0; i < kCount; i++) {
        Floats stored = to_floats(rounded);
        if (a.branch[i].dout) {
            Floats masked = result;
            if (a.branch[i].dropout.dropped > 0) { apply_dropout(masked, a.branch[i].dropout, n, c); }
            const x128 branch = to_pack<floatX>(masked);
            store(a.branch[i].dout + at, c, end, branch);
            stored = to_floats(branch);
        }
        for (int k = 0; k < kWidth; k++) { totals[i].at[k] += stored.at[k]; }
    }
}

template <int kCount>
__global__ void __launch_bounds__(kRowThreads)
    norm_backward_kernel(NormBackward a, float* partial /*(gridDim.x,2*norms+branches,C)*/, int norms,
                         int branches) {
    typedef NormSlots<kCount> Slots;
    constexpr int kRows = Slots::kRows, kTensors = Slots::kTensors;
    constexpr int kDresidual = kTensors - 1, kRowSums = 2 * kRows;
    extern __shared__ x128 staged[];                    // (stage, row, tensor, thread), then the exchange
    const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
    const int C = a.C, c = threadIdx.x * kWidth;
    const int step = gridDim.x * blockDim.y * kRows;
    const bool add = a.dresidual_acc == Accumulate::Yes, rms = a.kind == NormKind::Rms;
    const float inverse_C = 1.0f / C;
    float* exchange = (float*)(staged + Slots::kAll * threads);         // (2, group, warp, kRowSums)
    const int exchanged = blockDim.x / kWarp * kRowSums;                // of a group
    Floats weight[kCount], total[3 * kCount] = {};                      // of dweight, dbias; then of branches
#pragma unroll
    for (int i = 0; i < kCount; i++) { weight[i] = load_weights(a.y[i].weight, c, i < norms ? C : 0); }

    // Starts the copies of kRows rows from `first` on into stage s. Rows beyond N, columns beyond C and a
    // missing norm become zeros, which add nothing.
    auto stage = [&](int first, int s) {
#pragma unroll
        for (int r = 0; r < kRows; r++) {
            x128* slot = staged + (s * kRows + r) * kTensors * threads + thread;
            const bool live = first + r < a.N && c < C;
            const size_t at = live ? (size_t)(first + r) * C + c : 0;
            cp_async_16_or_zero(slot, a.inp + at, live);
#pragma unroll
            for (int i = 0; i < kCount; i++) {
                cp_async_16_or_zero(slot + (1 + i) * threads, a.y[i].dout + at, live && i < norms);
            }
            cp_async_16_or_zero(slot + kDresidual * threads, a.dresidual + at, live && add);
        }
        cp_async_commit();
    };
    // The numbers of a row come one step ahead, in registers.
    struct { float mean, rstd; } next[kRows];
    auto load_statistics = [&](int row) {
        for (int r = 0; r < kRows; r++) {
            next[r].mean = row + r < a.N && !rms ? a.mean[row + r] : 0.0f;
            next[r].rstd = row + r < a.N ? a.rstd[row + r] : 0.0f;
        }
    };
    int first = (blockIdx.x * blockDim.y + threadIdx.y) * kRows;
    for (int s = 0; s < Slots::kStages; s++) { stage(first + s * step, s); }
    load_statistics(first);

    // All groups of a block take the same number of rounds, because they wait for each other at barriers.
    // base: the block's first row; s: this round's stage; turn: this round's half of the exchange.
    int s = 0, turn = 0;
    for (int base = blockIdx.x * blockDim.y * kRows; base < a.N; base += step, first += step) {
        // This round's rows into registers, as words: see as_pack. xhat = inp*rstd + shift.
        cp_async_wait<Slots::kStages - 1>();
        uint4 words[kRows][kTensors];
        float rstd[kRows], shift[kRows], sums[kRowSums] = {};
        for (int r = 0; r < kRows; r++) { rstd[r] = next[r].rstd, shift[r] = -next[r].mean * next[r].rstd; }
        load_statistics(first + step);
        Floats x, d[kCount], g;
        auto unpack = [&](const uint4 (&row)[kTensors]) {
            x = to_floats(as_pack(row[0]));
#pragma unroll
            for (int i = 0; i < kCount; i++) { d[i] = to_floats(as_pack(row[1 + i])); }
            g = norm_gradient(d, weight);
        };

        // First pass over the rows: their sums of g and of g*xhat, and the columns of dweight and dbias.
#pragma unroll
        for (int r = 0; r < kRows; r++) {
            const x128* slot = staged + (s * kRows + r) * kTensors * threads + thread;
#pragma unroll
            for (int i = 0; i < kTensors; i++) { words[r][i] = *(const uint4*)(slot + i * threads); }
            unpack(words[r]);
#pragma unroll
            for (int k = 0; k < kWidth; k++) {
                const float xhat = fmaf(x.at[k], rstd[r], shift[r]);
                sums[2 * r] += g.at[k];
                sums[2 * r + 1] = fmaf(g.at[k], xhat, sums[2 * r + 1]);
#pragma unroll
                for (int i = 0; i < kCount; i++) {
                    total[2 * i].at[k] = fmaf(d[i].at[k], xhat, total[2 * i].at[k]);
                    total[2 * i + 1].at[k] += d[i].at[k];
                }
            }
        }

        // The warps of a row exchange their sums. One barrier a round is enough: the next round writes the
        // other half of the exchange, and the one after that comes only when all have read this one. A stage
        // is free for a later round's copies once its rows are in registers.
        float* half = exchange + (turn * blockDim.y + threadIdx.y) * exchanged;
        share_sums(sums, half);
        stage(first + Slots::kStages * step, s);
        add_sums(sums, half);
        s = s + 1 == Slots::kStages ? 0 : s + 1;
        turn ^= 1;

        // Second pass: the gradient of x, added to the residual stream's; that of a branch behind a dropout;
        // and the columns of what is stored.
#pragma unroll
        for (int r = 0; r < kRows; r++) {
            const float minus_g = rms ? 0.0f : divide(-rstd[r] * sums[2 * r], C, inverse_C),
                        minus_gx = divide(-rstd[r] * sums[2 * r + 1], C, inverse_C);
            Floats result = to_floats(as_pack(words[r][kDresidual]));
            unpack(words[r]);
            for (int k = 0; k < kWidth; k++) {
                const float xhat = fmaf(x.at[k], rstd[r], shift[r]);
                result.at[k] += fmaf(g.at[k], rstd[r], fmaf(xhat, minus_gx, minus_g));
            }
            norm_store<kCount>(a, result, first + r, c, first + r < a.N ? C : 0, total + 2 * kCount);
        }
    }
    cp_async_wait<0>();

    // Group 0 adds the column sums of the other groups, one after the other, and stores the block's row of
    // partials. The slots have room for a group's sums.
    static_assert(2 * Slots::kAll * sizeof(x128) >= 3 * kCount * sizeof(Pack<float>), "of two groups");
    float* group_sums = (float*)staged;                 // (3*kCount, columns of the block)
    const int columns = blockDim.x * kWidth;
    for (int group = 1; group < (int)blockDim.y; group++) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 3 * kCount; i++) {
            const int end = (int)threadIdx.y == group ? columns : 0;
            store(group_sums + i * columns, c, end, to_pack<float>(total[i]));
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 3 * kCount; i++) {
            const Floats other = load_floats(group_sums + i * columns, c, threadIdx.y == 0 ? columns : 0);
            for (int k = 0; k < kWidth; k++) { total[i].at[k] += other.at[k]; }
        }
    }
    if (threadIdx.y > 0) { return; }
    partial += (size_t)blockIdx.x * (2 * norms + branches) * C;
#pragma unroll
    for (int i = 0; i < 3 * kCount; i++) {
        const bool of_norm = i < 2 * kCount, wanted = of_norm ? i < 2 * norms : i - 2 * kCount < branches;
        float* to = partial + (size_t)(of_norm ? i : i - 2 * kCount + 2 * norms) * C;
        store(to, c, wanted ? C : 0, to_pack<float>(total[i]));
    }
}

// The plain form, for rows of any length: C > 4096 in 16 bits. A block takes row after row, first its sums
// and then, from vector to vector, its gradients. It adds the column sums to its row of partials.
__global__ void __launch_bounds__(kRowThreads)
    norm_backward_long_kernel(NormBackward a, float* partial /*(gridDim.x,2*norms+branches,C)*/, int norms,
                              int branches) {
    __shared__ float shared[kWarp];
    const int C = a.C;
    const bool rms = a.kind == NormKind::Rms, add = a.dresidual_acc == Accumulate::Yes;
    partial += (size_t)blockIdx.x * (2 * norms + branches) * C;
    for (int n = blockIdx.x; n < a.N; n += gridDim.x) {
        const size_t at = (size_t)n * C;
        const float mean = rms ? 0.0f : a.mean[n], rstd = a.rstd[n];
        Floats xhat, d[2], g, weight[2];
        auto read = [&](int c) {
            const Floats x = load_floats(a.inp + at, c, C);
            for (int i = 0; i < 2; i++) {
                d[i] = load_floats(a.y[i].dout + at, c, i < norms ? C : 0);
                weight[i] = load_weights(a.y[i].weight, c, i < norms ? C : 0);
            }
            g = norm_gradient(d, weight);
            for (int k = 0; k < kWidth; k++) { xhat.at[k] = (x.at[k] - mean) * rstd; }
        };
        float sum_g = 0.0f, sum_gx = 0.0f;
        for (int c = threadIdx.x * kWidth; c < C; c += kRowThreads * kWidth) {
            read(c);
            for (int k = 0; k < kWidth; k++) { sum_g += g.at[k], sum_gx = fmaf(g.at[k], xhat.at[k], sum_gx); }
        }
        const float mean_g = block_sum(rms ? 0.0f : sum_g, shared) / C;
        const float mean_gx = block_sum(sum_gx, shared) / C;
        for (int c = threadIdx.x * kWidth; c < C; c += kRowThreads * kWidth) {
            read(c);
            Floats result = load_floats(a.dresidual + at, c, add ? C : 0);
            Floats total[6] = {};                                       // of dweight, dbias; then of branches
            for (int k = 0; k < kWidth; k++) {
                result.at[k] += rstd * (g.at[k] - mean_g - xhat.at[k] * mean_gx);
                for (int i = 0; i < 4; i++) { total[i].at[k] = d[i / 2].at[k] * (i % 2 ? 1.0f : xhat.at[k]); }
            }
            norm_store<2>(a, result, n, c, C, total + 4);
#pragma unroll
            for (int i = 0; i < 6; i++) {
                const bool wanted = i < 4 ? i < 2 * norms : i - 4 < branches;
                float* to = partial + (size_t)(i < 4 ? i : i - 4 + 2 * norms) * C;
                const Floats before = load_floats(to, c, wanted && n >= (int)gridDim.x ? C : 0);
                for (int k = 0; k < kWidth; k++) { total[i].at[k] += before.at[k]; }
                store(to, c, wanted ? C : 0, to_pack<float>(total[i]));
            }
        }
    }
}

// a.sum may be inp or a branch: each element is read before it is written, by the same thread.
static void norm_forward(const NormForward& a, Stream stream) {
    OpScope scope(a, stream);
    check_width(a, a.C);
    if (a.C > kMaxC) { die("norm_forward: C=%d; at most %d is possible", a.C, kMaxC); }
    if (!a.inp && !a.branch[0]) { die("norm_forward: nothing is added to nothing"); }
    const int vectors = a.C / kWidth;
    auto launch = [&](auto kernel, int rows, int held) {                // held: vectors of a thread
        kernel<<<ceil_div(a.N, rows), round_up(ceil_div(vectors, held), kWarp), 0, stream>>>(a);
    };
    constexpr int kMost = ceil_div(kMaxC, kRowThreads * kWidth);        // 3 in 16 bits, 6 in FP32 builds
    if (a.branch[0] && vectors <= kRowThreads) { launch(norm_forward_kernel<2, 1, true>, 2, 1); }
    else if (a.branch[0]) { launch(norm_forward_kernel<1, kMost, true>, 1, kMost); }
    else if (vectors > kMost * kWarp && vectors <= 2 * kRowThreads) {
        launch(norm_forward_kernel<2, 2, false>, 2, 2);
    } else {
        launch(norm_forward_kernel<1, kMost, false>, 1, kMost);         // C=768: a warp a row
    }
}

// The most blocks of the backward, and so the most rows of partials: 3 for each of the GPU's SMs.
static int norm_most_blocks() { return std::min(3 * device_sm_count, hooks.norm_blocks); }
// sums: of columns, two for each norm and one for each branch.
static size_t norm_backward_scratch_bytes(int N, int C, int sums) {
    return (size_t)std::min(N, norm_most_blocks()) * sums * C * sizeof(float);
}

// Returns the number of blocks, a row of partials each.
template <int kCount>
static int norm_backward_launch(const NormBackward& a, int norms, int branches, Stream stream) {
    typedef NormSlots<kCount> Slots;
    // Narrow rows share a block of some 192 threads: C=768 (124M) has 96 x 2.
    const int x = round_up(ceil_div(a.C, kWidth), kWarp), y = std::max(1, 192 / x);
    // As many blocks as fit the GPU at once: an SM has registers for 512 threads, 128 each. For one norm 480
    // is better: C=2048 with dropout reaches 96 % of a copy, and with two blocks of 256 on an SM 86 %.
    const int fit = device_sm_count * std::max(1, (kCount == 1 ? 480 : 512) / (x * y));
    const int blocks = std::min({fit, norm_most_blocks(), ceil_div(a.N, y * Slots::kRows)});
    const int bytes = Slots::kAll * x * y * (int)sizeof(x128) + y * Slots::exchange_bytes(x / kWarp);
    allow_shared_memory(norm_backward_kernel<kCount>, bytes);
    norm_backward_kernel<kCount><<<blocks, dim3(x, y), bytes, stream>>>(a, a.scratch, norms, branches);
    return blocks;
}

static void norm_backward(const NormBackward& a, Stream stream) {
    OpScope scope(a, stream);
    check_width(a, a.C);
    const int norms = a.y[1].dout ? 2 : 1;
    const int branches = a.branch[1].dout || a.branch[1].dbias.data ? 2 : 1;
    int blocks = std::min(norm_most_blocks(), a.N);
    if (a.C > kRowThreads * kWidth) {
        norm_backward_long_kernel<<<blocks, kRowThreads, 0, stream>>>(a, a.scratch, norms, branches);
    } else {
        const bool two = norms == 2 || branches == 2;
        blocks = (two ? norm_backward_launch<2> : norm_backward_launch<1>)(a, norms, branches, stream);
    }
    ColumnSums grads = {};
    for (int i = 0; i < 2 * norms; i++) { grads.out[i] = i % 2 == 0 ? a.y[i / 2].dweight : a.y[i / 2].dbias; }
    for (int i = 0; i < branches; i++) { grads.out[2 * norms + i] = a.branch[i].dbias; }
    column_sums(grads, 2 * norms + branches, a.scratch, blocks, a.C, stream);
}

// == 6.3 matmul ==
// Linear layers through cuBLASLt. Row-major (R,C) is cuBLAS's column-major C x R with leading dimension C, so
//     forward      out (N,OC) = inp weight^T + bias (+ residual)     D = W^T inp   (m,n,k) = (OC,N,C)
//     input grad   dinp (N,C) = dout weight (+ residual)             D = W dout            = (C,N,OC)
//     weight grad  dweight (OC,C) (+)= dout^T inp, fp32              D = inp dout^T        = (C,OC,N)
// bias and residual (as the C matrix, beta = 1) ride in the epilogue. The MLP's activation and its derivative
// ride in that of a kernel of our own (6.4), or follow the product. cuBLASLt's bias-gradient epilogues do not
// pay (BGRADB +25 to 60 %): column sums come from norm_backward, activate_backward and bias_backward.
// Descriptors and the algorithm are looked up once per shape and kept (llmc/ops/cublaslt.h).
//     grad_accumulate   grad (+)= values
// A weight gradient that is kept in bf16 is first computed in fp32, in scratch; grad_accumulate then adds it
// and rounds once.

// One vector a thread.
__global__ void grad_accumulate_kernel(Grad grad, const float* values, size_t n) {
    const size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * kWidth;
    if (i < n) { grad_store(grad, i, n, load_floats(values, i, n)); }
}

static void grad_accumulate(const GradAccumulate& a, Stream stream) {
    OpScope scope(a, stream);
    check_width(a, a.n);
    const size_t threads = 256, blocks = ceil_div(a.n, threads * kWidth);
    grad_accumulate_kernel<<<(unsigned)blocks, (unsigned)threads, 0, stream>>>(a.grad, a.values, a.n);
}

// A product with its activation in one kernel (6.4). False, and nothing done, where none serves the shape.
static bool matmul_forward_sm90(const MatmulForward& a, Stream stream);
static bool matmul_backward_input_sm90(const MatmulBackwardInput& a, Stream stream);

static void matmul_forward(const MatmulForward& a, Stream stream) {
    OpScope scope(a, stream);
    if (a.pre_act && a.residual) { die("matmul_forward: an activation and a residual do not go together"); }
    if (a.pre_act && matmul_forward_sm90(a, stream)) { return; }
    gemm({.d = a.pre_act ? a.pre_act : a.out, .a = a.weight, .b = a.inp, .c = a.residual, .bias = a.bias,
          .m = a.OC, .n = a.N, .k = a.C, .trans_a = true,
          .epilogue = a.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT}, stream);
    if (a.pre_act) { activate({a.out, a.pre_act, a.N, is_gated(a.mlp) ? a.OC / 2 : a.OC, a.mlp}, stream); }
}

static void matmul_backward_input(const MatmulBackwardInput& a, Stream stream) {
    OpScope scope(a, stream);
    if (a.pre_act && a.residual) { die("matmul_backward_input: no residual goes with an activation"); }
    if (a.pre_act && matmul_backward_input_sm90(a, stream)) { return; }
    floatX* product = a.dact ? a.dact : a.dinp;
    gemm({.d = product, .a = a.weight, .b = a.dout, .c = a.residual, .m = a.C, .n = a.N, .k = a.OC}, stream);
    if (!a.pre_act) { return; }
    activate_backward({a.dinp, product, a.pre_act, a.N, a.C, a.mlp, a.dbias, a.scratch}, stream);
}

// grad (+)= the product. For a bf16 gradient the product goes to scratch first, so that it is rounded once.
static void gemm_to_grad(Gemm g, const Grad& grad, float* scratch, Stream stream) {
    g.d = grad.is_bf16 ? scratch : grad.data, g.d_type = CUDA_R_32F;
    if (!grad.is_bf16 && grad.acc == Accumulate::Yes) { g.c = g.d; }
    gemm(g, stream);
    if (grad.is_bf16) { grad_accumulate({grad, scratch, (size_t)g.m * g.n}, stream); }
}

static void matmul_backward_weight(const MatmulBackwardWeight& a, Stream stream) {
    OpScope scope(a, stream);
    gemm_to_grad({.a = a.inp, .b = a.dout, .m = a.C, .n = a.OC, .k = a.N, .trans_b = true}, a.dweight,
                 a.scratch, stream);
}

// == 6.4 activations, bias ==
// activate:           out = act(inp), or act(gate, up)
//     gelu(x) = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))        relu2(x) = max(x,0)^2
//     swiglu(gate, up) = gate*s*up, s = 1/(1 + e^-gate)
// activate_backward:  dinp = dout*act'(inp), and in passing dbias (+)= column sums of dinp, as stored
//     swiglu      dgate = dout*up*s*(1 + gate*(1 - s))     dup = dout*gate*s
// bias_backward:      dbias (+)= column sums of dout (N,OC); of qkv's dout the keys' third is not read
// bias_backward and activate_backward share a kernel, but for gated activations. Its column sums take two
// stages: each block adds up one chunk of rows into a row of partials, then column_sums_kernel (6.2) adds the
// partials.
constexpr int kColumnBlocks = 1056;             // 8 an SM of an H200; fixed, so the bits depend on no GPU
constexpr int kColumnRows = 8;                  // rows a block works on at a time, one a warp

// With u = sqrt(2/pi) (x + 0.044715 x^3), x/2 (1 + tanh(u)) is x sigmoid(2u). Written so, nothing cancels for
// negative x, where 1 + tanh(u) would lose all digits of a fast tanh. 2u = x (kGelu1 + kGelu3 x^2).
constexpr float kGelu1 = 2 * 0.7978845608028654f, kGelu3 = kGelu1 * 0.044715f;
// unit: a power of two, by which the result is divided.
__device__ __forceinline__ float gelu_sigmoid(float x, float unit = 1.0f) {
    const float e = exp2_fast(x * fmaf(-kLog2e * kGelu3, x * x, -kLog2e * kGelu1));
    return reciprocal_fast(fmaf(e, unit, unit));
}
__device__ __forceinline__ float gelu(float x, float unit = 1.0f) { return x * gelu_sigmoid(x, unit); }
__device__ __forceinline__ float gelu_grad(float x) {
    const float s = gelu_sigmoid(x), two_du = fmaf(3.0f * kGelu3, x * x, kGelu1);
    return fmaf(x * two_du, fmaf(-s, s, s), s);
}
__device__ __forceinline__ float sigmoid(float x, float unit = 1.0f) {
    return reciprocal_fast(exp2_fast(-kLog2e * x) * unit + unit);
}

// A struct for each row of MODEL_MLPS. value: what it gives, divided by `unit`, a power of two. slope: its
// derivative; slopes, of a gated one: the gradients of gate and of up, from that of the value.
struct Gelu {
    static constexpr bool kGated = false;
    static __device__ __forceinline__ float value(float x, float unit = 1.0f) { return gelu(x, unit); }
    static __device__ __forceinline__ float slope(float x) { return gelu_grad(x); }
};
struct SwiGlu {
    static constexpr bool kGated = true;
    static __device__ __forceinline__ float value(float gate, float up, float unit = 1.0f) {
        return gate * sigmoid(gate, unit) * up;
    }
    static __device__ __forceinline__ float2 slopes(float dout, float gate, float up) {
        const float s = sigmoid(gate);
        return make_float2(dout * up * s * fmaf(gate, 1.0f - s, 1.0f), dout * gate * s);
    }
};
struct Relu2 {                                  // x < 0 is false for NaN, which so comes through
    static constexpr bool kGated = false;
    static __device__ __forceinline__ float value(float x) { return x < 0.0f ? 0.0f : x * x; }
    static __device__ __forceinline__ float value(float x, float unit) {
        return value(x) * reciprocal_fast(unit);
    }
    static __device__ __forceinline__ float slope(float x) { return x < 0.0f ? 0.0f : 2.0f * x; }
};
struct NoAct { static constexpr bool kGated = false; };         // where a kernel does without
#define X(act, ...) static_assert(act::kGated == is_gated(Mlp::act), "as its row says");
MODEL_MLPS(X)
#undef X

// f(Gelu()) and so on
template <class F> static auto with_act(Mlp mlp, F f) {
    switch (mlp) {
#define X(act, ...) case Mlp::act: return f(act());
        MODEL_MLPS(X)
#undef X
    }
    die("activation %d is not built", (int)mlp);
}

template <class Act> __global__ void activate_kernel(floatX* out, const floatX* inp, size_t n) {
    const size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * kWidth;
    Floats x = load_floats(inp, i, n);
    for (int k = 0; k < kWidth; k++) { x.at[k] = Act::value(x.at[k]); }
    store(out, i, n, to_pack<floatX>(x));
}

// Gated. A block takes some vectors (blockIdx.y) of a row (blockIdx.x).
constexpr int kGatedThreads = 256;              // at most

template <class Act> __global__ void __launch_bounds__(kGatedThreads) gated_kernel(Activate a) {
    const int F = a.F, f = (blockIdx.y * blockDim.x + threadIdx.x) * kWidth;
    const floatX* gate_up = a.inp + (size_t)blockIdx.x * 2 * F;         // (2,F)
    const Floats gate = load_floats(gate_up, f, F), up = load_floats(gate_up + F, f, F);
    Floats y;
    for (int k = 0; k < kWidth; k++) { y.at[k] = Act::value(gate.at[k], up.at[k]); }
    store(a.out + (size_t)blockIdx.x * F, f, F, to_pack<floatX>(y));
}

// dinp may be inp: a thread reads its elements before it writes them.
template <class Act>
__global__ void __launch_bounds__(kGatedThreads) gated_backward_kernel(ActivateBackward a) {
    const int F = a.F, f = (blockIdx.y * blockDim.x + threadIdx.x) * kWidth;
    const size_t row = (size_t)blockIdx.x * 2 * F;
    const Floats gate = load_floats(a.inp + row, f, F), up = load_floats(a.inp + row + F, f, F);
    const Floats dout = load_floats(a.dout + (size_t)blockIdx.x * F, f, F);
    Floats dgate, dup;
    for (int k = 0; k < kWidth; k++) {
        const float2 slopes = Act::slopes(dout.at[k], gate.at[k], up.at[k]);
        dgate.at[k] = slopes.x, dup.at[k] = slopes.y;
    }
    store(a.dinp + row, f, F, to_pack<floatX>(dgate));
    store(a.dinp + row + F, f, F, to_pack<floatX>(dup));
}

template <class Args> static void gated_launch(void (*kernel)(Args), const Args& a, Stream stream) {
    const int vectors = a.F / kWidth, slabs = ceil_div(vectors, kGatedThreads);
    kernel<<<dim3(a.N, slabs), round_up(ceil_div(vectors, slabs), kWarp), 0, stream>>>(a);
}

// The first stage. A block of (32,8) threads owns 32 vectors of columns (blockIdx.x) of one chunk of rows
// (blockIdx.y) and takes 8 rows at a time, a warp a row. With an activation dinp = dout times its slope, each
// element by the thread that reads it: dinp may be dout or inp. of_qkv: the keys' columns count as zeros.
template <class Act>
__global__ void __launch_bounds__(kWarp * kColumnRows)
    partial_sums_kernel(float* partial /*(gridDim.y,OC) or null*/, floatX* dinp, const floatX* dout,
                        const floatX* inp, int N, int OC, bool of_qkv, int chunk_rows) {
    constexpr bool kActs = !std::is_same_v<Act, NoAct>;
    constexpr int kUnroll = 4;                          // of a warp's rows in flight
    __shared__ Floats shared[kColumnRows][kWarp];
    const int c = (blockIdx.x * kWarp + threadIdx.x) * kWidth;
    const int begin = blockIdx.y * chunk_rows;
    const int end = of_qkv && is_keys(c, OC) ? begin : min(begin + chunk_rows, N);
    Floats sum = {};
    for (int first = begin + threadIdx.y; first < end; first += kColumnRows * kUnroll) {
        // Ask for kUnroll rows before the first is used; what lies beyond the chunk is zero.
        x128 x[kUnroll], y[kUnroll];
        for (int u = 0; u < kUnroll; u++) {
            const int row = first + u * kColumnRows, columns = row < end ? OC : 0;
            const size_t at = row < end ? (size_t)row * OC : 0;
            x[u] = load(dout + at, c, columns);
            if (kActs) { y[u] = load(inp + at, c, columns); }
        }
        // dinp, rounded and stored; what is summed is what was stored.
#pragma unroll
        for (int u = 0; u < kUnroll; u++) {
            if constexpr (kActs) {
                for (int k = 0; k < kWidth; k++) {
                    x[u].data[k] = (floatX)((float)x[u].data[k] * Act::slope((float)y[u].data[k]));
                }
                const int row = first + u * kColumnRows, columns = row < end ? OC : 0;
                store(dinp + (row < end ? (size_t)row * OC : 0), c, columns, x[u]);
            }
            for (int k = 0; k < kWidth; k++) { sum.at[k] += (float)x[u].data[k]; }
        }
    }

    // The warps' sums meet in the first warp, which adds them in order.
    if (!partial) { return; }
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0) { return; }
#pragma unroll
    for (int y = 1; y < kColumnRows; y++) {
#pragma unroll
        for (int k = 0; k < kWidth; k++) { sum.at[k] += shared[y][threadIdx.x].at[k]; }
    }
    store(partial + (size_t)blockIdx.y * OC, c, OC, to_pack<float>(sum));
}

// The number of chunks of rows: enough for kColumnBlocks blocks, but of at least kColumnRows rows each.
static int column_chunks(int N, int OC) {
    const int slabs = ceil_div(OC, kWarp * kWidth);
    return std::min(std::max(kColumnBlocks / slabs, 1), ceil_div(N, kColumnRows));
}

static size_t bias_backward_scratch_bytes(int N, int OC) {
    return (size_t)column_chunks(N, OC) * OC * sizeof(float);
}

template <class Act>
static void column_pass(Grad dbias, float* scratch, floatX* dinp, const floatX* dout, const floatX* inp,
                        int N, int OC, bool of_qkv, Stream stream) {
    const int chunk_rows = ceil_div(N, column_chunks(N, OC)), chunks = ceil_div(N, chunk_rows);
    float* partial = dbias.data ? scratch : nullptr;
    const dim3 grid(ceil_div(OC, kWarp * kWidth), chunks), block(kWarp, kColumnRows);
    partial_sums_kernel<Act><<<grid, block, 0, stream>>>(partial, dinp, dout, inp, N, OC, of_qkv, chunk_rows);
    if (dbias.data) { column_sums({{dbias}}, 1, partial, chunks, OC, stream); }
}

static void bias_backward(const BiasBackward& a, Stream stream) {
    OpScope scope(a, stream);
    check_width(a, a.OC);
    column_pass<NoAct>(a.dbias, a.scratch, nullptr, a.dout, nullptr, a.N, a.OC, a.of_qkv, stream);
}

static void activate(const Activate& a, Stream stream) {
    OpScope scope(a, stream);
    check_width(a, a.F);
    with_act(a.mlp, [&](auto act) {
        typedef decltype(act) Act;
        if constexpr (Act::kGated) { gated_launch(gated_kernel<Act>, a, stream); }
        else {
            const size_t n = (size_t)a.N * a.F, threads = 256, blocks = ceil_div(n, threads * kWidth);
            activate_kernel<Act><<<(unsigned)blocks, (unsigned)threads, 0, stream>>>(a.out, a.inp, n);
        }
    });
}

static void activate_backward(const ActivateBackward& a, Stream stream) {
    OpScope scope(a, stream);
    check_width(a, a.F);
    with_act(a.mlp, [&](auto act) {
        typedef decltype(act) Act;
        if constexpr (Act::kGated) { gated_launch(gated_backward_kernel<Act>, a, stream); }
        else { column_pass<Act>(a.dbias, a.scratch, a.dinp, a.dout, a.inp, a.N, a.F, false, stream); }
    });
}

// ---- sm90: a product and its activation in one kernel (wgmma, TMA) ----
// ProductLoop computes tiles of 128 x 256 sums, and does not know what follows. An epilogue rounds a tile's
// sums, and computes and stores the rest:
//     ActivationForward    pre_act (N,OC) = inp weight^T + bias, and out = act(pre_act)
//         gated            gate, up (N,2F) = inp weight^T, and out (N,F) = act(gate, up)
//     ActivationBackward   dinp (N,C) = (dout weight) * act'(pre_act), and dbias (+)= sums of its columns
//         gated            dgate, dup (N,2F) from dact (N,F) = dout weight
// Each is made of an activation and of how it stores: Store16 in 16 bits, StoreBytes in FP8.
// Two warpgroups each own 64 rows of a tile, whose sums fill 128 registers of a thread. Of the third, one
// thread starts all copies, some stages of 64 k ahead. A cluster of two blocks takes two tiles of the same
// columns; each block fetches half of the weights' part of a stage, for both. A tile's sums are rounded into
// 64 registers, and are finished in slices, which are spread over the stages of the next tile: activation,
// staging in shared memory, and after each 64 columns a store by the copy engine.
//
//     copies            | 0 | 1 | 2 | ...              124M: 12 stages a tile
//     wgmma                 | 0 | 1 | 2 | ... | 11 |       | 0 | 1 | ... of the next tile
//     ordinary cores        | slices of the tile before | take | slices 0, 1, ...
//
//     full[stage]    an mbarrier that hears of the copies' bytes       empty[stage]  all 16 warps are done
//     loaded[...]    backward: a block of 64 columns of pre_act is in staging
//
// Activations read rounded values, and dbias sums stored values. So the bits equal those of a product by
// cuBLASLt and the ops above, wherever cuBLASLt adds k = 0, 1, 2, ... in order. Only dbias differs: it is
// summed in groups of 64 rows.
constexpr int kProductRows = 128, kProductColumns = 256, kProductK = 64;
constexpr int kProductCluster = 2, kProductThreads = 3 * 4 * kWarp;

// What a kernel multiplies, and what its epilogue reads and writes.
struct Product {
    const floatX *rows, *weight;        // inp or dout (N,K); (pre_columns,K), in the backward (K,columns)
    const floatX* bias;                 // forward: (columns) or null
    const floatX *pre_act, *out;        // (N,pre_columns) (N,out_columns) the forward writes both, the
                                        // backward out
    float* partial;                     // backward: (ceil(N/64),columns) sums of out's columns, or null
    int N, K, columns, pre_columns, out_columns;        // of gate, up and their gradients: 2 columns
    // FP8: rows (N,2K) and weight (..,2K) are bytes. Written are out's bytes and their transpose
    uint8_t *bytes, *transposed;        // (N,out_columns) (out_columns,N)
    const Fp8Tensor *rows8, *weight8, *bytes8;
    Fp8Stats* stats;                    // of bytes
};
struct ProductMaps { CUtensorMap rows, weight, pre_act, out, out_t; };          // out_t: of FP8's bytes

// Shared memory of a block, with the epilogue E, and what a warpgroup's epilogue has of it beside staging.
union EpilogueOwn {
    uint32_t bias[kProductColumns / 2]; // forward: in pairs
    float sums[4][64];                  // backward: each warp's, of a block's columns
};
template <class E> struct ProductShared {
    alignas(1024) floatX a[E::kStages][kProductRows * kProductK];       // rows
    floatX b[E::kStages][kProductColumns * kProductK];                  // weight, in blocks of 64 columns
    floatX staging[2][E::kBuffers][64 * 64];                            // of each warpgroup
    EpilogueOwn own[2];
    uint64_t full[E::kStages], empty[E::kStages], loaded[2][2];
};

// How many tiles a cluster's blocks take each, all clusters together.
template <class E> LLMC_HD static inline int product_tiles(const Product& p) {
    constexpr int kRows = kProductRows * kProductCluster;
    return ceil_div(p.N, kRows) * (p.columns / E::kColumns);
}

// The block's part of the cluster's tile number t. Consecutive tiles share their rows, so these are read from
// memory once.
struct ProductTile { int row, column; };
template <class E> __device__ __forceinline__ ProductTile product_tile(const Product& p, int t) {
    const int across = p.columns / E::kColumns, rank = blockIdx.x % kProductCluster;
    return {(t / across * kProductCluster + rank) * kProductRows, t % across * E::kColumns};
}

// The main loop. The epilogue E says how the operands lie. kTransB: weight is (K,columns). kFp8: both are
// bytes. kColumns = 128: a tile has 128 columns of the weight's first half, gate, and the same ones of its
// second half, up.
template <class E> struct ProductLoop {
    static constexpr int kStages = E::kStages, kPart = kProductColumns / kProductCluster;
    ProductShared<E>& shared;
    const ProductMaps& maps;
    const Product& p;
    // the tiles of the cluster's blocks, and the steps of a tile
    const int begin = blockIdx.x / kProductCluster, stride = gridDim.x / kProductCluster;
    const int tiles = product_tiles<E>(p), steps = ceil_div(p.K, kProductK);
    // the stage whose turn it is, and the parity of its barriers' phase
    int stage = 0, parity = 0;
    __device__ __forceinline__ void next_stage() {
        if (++stage == kStages) { stage = 0, parity ^= 1; }
    }

    // The thread that starts the copies.
    __device__ __forceinline__ void produce() {
        const int rank = blockIdx.x % kProductCluster;
        for (int t = begin; t < tiles; t += stride) {
            const ProductTile tile = product_tile<E>(p, t);
            const int column = tile.column + rank * (E::kColumns == kPart ? p.columns : kPart);
#pragma unroll 1
            for (int k = 0; k < steps; k++, next_stage()) {
                uint64_t* full = &shared.full[stage];
                mbarrier_wait(&shared.empty[stage], parity ^ 1);
                mbarrier_expect(full, sizeof(shared.a[0]) + sizeof(shared.b[0]));
                floatX *a = shared.a[stage], *b = shared.b[stage] + rank * kPart * kProductK;
                constexpr int kAll = (1 << kProductCluster) - 1;
                const int at = k * kProductK;
                if (E::kFp8) {          // behind the end of a row are zeros: K may be 1600, a stage has 128
                    tma_load_5d_multicast(a, &maps.rows, full, at, 0, 0, 0, tile.row / 16, 1 << rank);
                    tma_load_5d_multicast(b, &maps.weight, full, at, 0, 0, 0, column / 16, kAll);
                } else {
                    const int row = E::kTransB ? at : column, block = E::kTransB ? column / 64 : k;
                    tma_load_4d(a, &maps.rows, full, 0, tile.row, k, 0);
                    tma_load_4d_multicast(b, &maps.weight, full, 0, row, block, 0, kAll);
                }
            }
        }
    }

    // Starts d (64,256) = or += the products of the stage.
    __device__ __forceinline__ void multiply(float (&d)[32][4], bool adds) {
        constexpr int kStep = E::kTransB ? 128 : 2;     // 16 k (of bytes 32): 32 bytes of a row; or 16 rows
        const uint64_t a = wgmma_descriptor(shared.a[stage] + threadIdx.x / 128 * 64 * kProductK);
        const uint64_t b = wgmma_descriptor(shared.b[stage], E::kTransB ? 64 * 64 * (int)sizeof(floatX) : 16);
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < 4; kk++) {
            if constexpr (E::kFp8) { wgmma_e4m3_256(d, a + 2 * kk, b + kStep * kk, adds || kk > 0); }
            else { wgmma_shared_256<E::kTransB>(d, a + 2 * kk, b + kStep * kk, adds || kk > 0); }
        }
        wgmma_commit();
    }

    // The warp is done with a stage, for both blocks.
    __device__ __forceinline__ void release(int done) {
        const int lane = threadIdx.x % kWarp;
        if (lane < kProductCluster) { mbarrier_arrive_at(&shared.empty[done], lane); }
    }

    // A warpgroup that multiplies: its half of the block's tiles, one after the other.
    __device__ __forceinline__ void run() {
        E epilogue(shared, maps, p);
        ProductTile before = product_tile<E>(p, begin);
        for (int t = begin; t < tiles; t += stride) {
            const ProductTile tile = product_tile<E>(p, t);
            epilogue.begin(tile);
            float d[32][4];
            int k = 0, last = 0;

            // A stage is released when the products of the next one have begun.
            auto step = [&] {
                mbarrier_wait(&shared.full[stage], parity);
                multiply(d, k > 0);
                if (k > 0) {
                    wgmma_wait<1>();
                    release(last);
                }
                last = stage;
                next_stage();
            };
            // Slice s of the tile before has its turn when its share of the steps has begun.
#pragma unroll
            for (int s = 0; s < E::kSlices; s++) {
#pragma unroll 1
                for (; k * E::kSlices <= s * steps; k++) { step(); }
                if (t > begin) { epilogue.finish(before, s); }
            }
            epilogue.load(tile);
#pragma unroll 1
            for (; k < steps; k++) { step(); }
            epilogue.meet();
            wgmma_wait<0>();
            pin_registers(d);
            release(last);
            epilogue.take(d);
            before = tile;
        }
#pragma unroll
        for (int s = 0; s < E::kSlices; s++) { epilogue.finish(before, s); }
        epilogue.end();
    }
};

// What epilogues have in common. ProductLoop calls, in each warpgroup:
//     begin(tile)       before the tile's products begin
//     finish(tile, s)   slice s of the tile before
//     load(tile)        these slices are over: copies into staging may begin
//     meet()            all products of the tile have begun
//     take(d)           they have ended: d (64,256) is rounded into `packed`
//     end()             after the last tile
// A slice is 16 or 32 of the tile's columns. Slices fill blocks of 64 columns, and these are stored.
struct Epilogue {
    static constexpr bool kFp8 = false, kTransB = false;
    static constexpr int kColumns = kProductColumns;    // of the result that a tile gives
    static constexpr int kBlock = 64 * 64 * sizeof(floatX);     // bytes of a block of 64 columns in staging
    const ProductMaps& maps;
    const Product& p;
    floatX (*const staging)[64 * 64];
    EpilogueOwn& own;
    uint64_t* const loaded;
    const int group = threadIdx.x / 128, warp = threadIdx.x % 128 / kWarp, lane = threadIdx.x % kWarp;
    const bool leads = threadIdx.x % 128 == 0;          // starts the warpgroup's copies
    uint32_t packed[16][4];             // a tile's sums, rounded: 16 columns each, as stmatrix takes them
    uint32_t bias_pair = 0;

    template <class E>
    __device__ __forceinline__ Epilogue(ProductShared<E>& shared, const ProductMaps& maps, const Product& p)
        : maps(maps), p(p), staging(shared.staging[threadIdx.x / 128]), own(shared.own[threadIdx.x / 128]),
          loaded(shared.loaded[threadIdx.x / 128]) {}
    __device__ __forceinline__ void begin(const ProductTile&) {}
    __device__ __forceinline__ void load(const ProductTile&) {}
    __device__ __forceinline__ void meet() {}
    __device__ __forceinline__ void end() {
        if (leads) { tma_store_wait<0>(); }             // shared memory goes with the block
    }
    __device__ __forceinline__ void barrier() { named_barrier(1 + group, 128); }        // of the warpgroup

    // The warpgroup's rows of a tile begin here.
    __device__ __forceinline__ int row_of(const ProductTile& tile) { return tile.row + group * 64; }

    // Each thread asks for two columns' bias, and puts it where `pack` looks for the thread's number `at`.
    __device__ __forceinline__ void ask_bias(const ProductTile& tile) {
        const uint32_t* bias = (const uint32_t*)(p.bias + tile.column);
        bias_pair = p.bias ? bias[threadIdx.x % 128] : 0;
    }
    __device__ __forceinline__ void share_bias(int at) {
        own.bias[at] = bias_pair;
        barrier();
    }
    // packed = d scale + bias, rounded; the n-th of d has two columns of a lane, in two rows.
    __device__ __forceinline__ void pack(const float (&d)[32][4], float scale, bool biased) {
#pragma unroll
        for (int n = 0; n < 32; n++) {
            const float2 b = biased ? unpack_pair(own.bias[4 * n + lane % 4]) : make_float2(0.0f, 0.0f);
            packed[n / 2][n % 2 * 2] = pack_pair(fmaf(d[n][0], scale, b.x), fmaf(d[n][1], scale, b.y));
            packed[n / 2][n % 2 * 2 + 1] = pack_pair(fmaf(d[n][2], scale, b.x), fmaf(d[n][3], scale, b.y));
        }
    }

    // ldmatrix and stmatrix move 8 x 8 values four times: the upper and the lower half of the warp's 16 rows,
    // and beside them the next 8 columns. Each lane names a row of one, here of the n-th 16 columns of a
    // block, which is in the 128-byte swizzle.
    __device__ __forceinline__ uint32_t place(const floatX* block, int n) {
        const int row8 = lane % 8, half = lane / 8 % 2, beside = lane / 16;
        return smem_address(block) + (warp * 16 + half * 8 + row8) * 128 + ((n % 4 * 2 + beside) ^ row8) * 16;
    }

    // The leader starts the copy of block i of a tile's pre_act; blocks of gate and of up: 2 parts. It comes
    // into staging[i % 2 * parts]. Later all wait for it, while the next one is on its way.
    __device__ __forceinline__ void load_pre_act(const ProductTile& tile, int i, int parts) {
        if (!leads) { return; }
        mbarrier_expect(&loaded[i % 2], parts * kBlock);
#pragma unroll
        for (int part = 0; part < parts; part++) {
            tma_load_4d(staging[i % 2 * parts + part], &maps.pre_act, &loaded[i % 2], 0, row_of(tile),
                        (tile.column + part * p.columns) / 64 + i, 0);
        }
    }
    __device__ __forceinline__ void await_pre_act(const ProductTile& tile, int i, int parts) {
        if (i < 3) { load_pre_act(tile, i + 1, parts); }
        mbarrier_wait(&loaded[i % 2], i / 2);
    }
    // The lane has four of 16 columns, in two rows, which are added up.
    __device__ __forceinline__ void add_rows(float* sum, const float2 (&f)[4]) {
        for (int j = 0; j < 2; j++) {
            sum[2 * j] = f[2 * j].x + f[2 * j + 1].x;
            sum[2 * j + 1] = f[2 * j].y + f[2 * j + 1].y;
        }
    }
    // The warps' sums of a block's columns meet.
    __device__ __forceinline__ void store_sums(int row, int column, float unit) {
        const int c = threadIdx.x % 128;
        const float (&sums)[4][64] = own.sums;
        if (p.partial && c < 64 && row < p.N) {
            p.partial[(size_t)(row / 64) * p.columns + column + c] =
                (((sums[0][c] + sums[1][c]) + sums[2][c]) + sums[3][c]) * unit;
        }
    }
    // Staging may be written again: the last store has read it. Staging is written: it may be stored.
    __device__ __forceinline__ void begin_block() {
        if (leads) { tma_store_wait<0>(); }
        barrier();
    }
    __device__ __forceinline__ void end_block() {
        tma_store_fence();
        barrier();
    }
    __device__ __forceinline__ void store_block(const CUtensorMap& map, int buffer, int row, int column) {
        tma_store_4d(&map, staging[buffer], 0, row, column / 64, 0);
    }
};

// How an epilogue stores, in groups of 16 columns, of which a lane has four in each of two rows: f[4], pairs
// of columns. Both ways have
//     kGroups            groups in a slice of a forward
//     bias_place         where share_bias puts a thread's two columns
//     scale, dact_scale  what a forward's and a backward's sums are multiplied by; unit: what sums of out are
//     value(Act(), ...)  an activation
//     put_sums, get      group n of `packed` into a block of staging, and of pre_act from a block
//     round              f becomes words; f is then what dbias sums
//     put, store_out     the words of the groups from n on into a block of staging, and the block into out
//     sum_place          the column, of 32, whose sum warp_sums leaves in a lane
struct Store16 : Epilogue {
    static constexpr int kGroups = 1;
    static constexpr float scale = 1.0f, dact_scale = 1.0f, unit = 1.0f;
    struct Words { uint32_t at[4]; };
    using Epilogue::Epilogue;
    __device__ __forceinline__ int bias_place() { return threadIdx.x % 128; }
    __device__ __forceinline__ int sum_place() { return lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2; }
    template <class Act, class... X> __device__ __forceinline__ float value(Act, X... x) {
        return Act::value(x...);
    }
    __device__ __forceinline__ void put_sums(int buffer, int n) {
        stmatrix_x4(place(staging[buffer], n), packed[n]);
    }
    __device__ __forceinline__ void get(float2 (&x)[4], int buffer, int n) {
        uint32_t words[4];
        ldmatrix_x4(words, place(staging[buffer], n));
        for (int m = 0; m < 4; m++) { x[m] = unpack_pair(words[m]); }
    }
    template <int kCount>
    __device__ __forceinline__ void round(Words (&words)[kCount], float2 (&f)[kCount][4]) {
#pragma unroll
        for (int k = 0; k < 4 * kCount; k++) {
            uint32_t& word = words[k / 4].at[k % 4];
            word = pack_pair(f[k / 4][k % 4].x, f[k / 4][k % 4].y);
            f[k / 4][k % 4] = unpack_pair(word);
        }
    }
    template <int kCount>
    __device__ __forceinline__ void put(const Words (&words)[kCount], int buffer, int n) {
#pragma unroll
        for (int k = 0; k < kCount; k++) { stmatrix_x4(place(staging[buffer], n + k), words[k].at); }
    }
    __device__ __forceinline__ void store_out(int buffer, int row, int column) {
        store_block(maps.out, buffer, row, column);
    }
};

// FP8: rows and weight are bytes, 128 k a stage, both with k as the faster index. Stored are the bytes of out
// and their transpose (fp8_cast below); dbias sums the values before they become bytes. In each 16 x 16 part
// of a tile, a lane needs two neighbouring rows of four neighbouring columns: two words of bytes, which two
// __byte_perm transpose. But wgmma gives it rows r and r + 8 and columns c, c + 1, c + 8 and c + 9. So the
// copies permute the operands' rows (product_bytes_map). A slice has 32 columns; their bytes fill an
// stmatrix.
struct StoreBytes : Epilogue {
    static constexpr bool kFp8 = true;
    static constexpr int kGroups = 2;
    struct Words { uint32_t at[2]; };
    // Values are scaled to the bytes' unit from the start, in the backward as soon as they are packed.
    Fp8Counts counts;
    const float unit = p.bytes8->inverse, scale = p.rows8->inverse * p.weight8->inverse;
    const float dact_scale = scale * p.bytes8->scale;
    const uint32_t so_far = fp8_amax_so_far(p.stats);
    using Epilogue::Epilogue;
    __device__ __forceinline__ int bias_place() {       // a lane's columns are 4q to 4q + 3 of 16
        const int pair = threadIdx.x % 128;
        return pair / 8 * 8 + pair % 2 * 4 + pair % 8 / 2;
    }
    __device__ __forceinline__ int sum_place() { return lane / 16 * 16 + lane % 4 * 4 + lane / 4 % 4; }
    template <class Act, class... X> __device__ __forceinline__ float value(Act, X... x) {
        return Act::value(x..., unit);
    }

    // Where a block has the lane's four of the n-th 16 columns, in its upper or lower row.
    __device__ __forceinline__ uint2& quad_of(floatX* block, int n, int lower) {
        const int row = warp * 16 + lane / 4 * 2 + lower, chunk = (n % 4 * 2 + lane % 4 / 2) ^ row % 8;
        return *(uint2*)(block + row * 64 + chunk * 8 + lane % 2 * 4);
    }

    __device__ __forceinline__ void put_sums(int buffer, int n) {
        for (int lower = 0; lower < 2; lower++) {
            quad_of(staging[buffer], n, lower) = make_uint2(packed[n][lower], packed[n][lower + 2]);
        }
    }
    __device__ __forceinline__ void get(float2 (&x)[4], int buffer, int n) {
        for (int lower = 0; lower < 2; lower++) {
            const uint2 quad = quad_of(staging[buffer], n, lower);
            x[lower] = unpack_pair(quad.x), x[lower + 2] = unpack_pair(quad.y);
        }
    }

    // words[k]: f[k] as four bytes of the upper row, and four of the lower one
    __device__ __forceinline__ void round(Words (&words)[2], const float2 (&f)[2][4]) {
        Floats all[2];                  // each: the upper row's four columns, the lower one's
        Pack<uint8_t> bytes[2];
#pragma unroll
        for (int k = 0; k < 16; k++) {
            const float2& two = f[k / 8][k / 2 % 2 * 2 + k / 4 % 2];
            all[k / 8].at[k % 8] = k % 2 == 0 ? two.x : two.y;
        }
        counts.round(bytes, all, 1.0f);
        memcpy(words, bytes, sizeof(words));
    }

    // The warp's bytes of 16 rows and 32 columns into staging, two matrices of (64,64) in the 64-byte
    // swizzle: rows, then columns.
    __device__ __forceinline__ void put(const Words (&words)[2], int buffer, int n) {
        const int slice = n / 2 % 2;
        const uint32_t rows[4] = {words[0].at[0], words[0].at[1], words[1].at[0], words[1].at[1]};
        uint32_t columns[4];            // of each pair the first two and the others, two rows of a column
#pragma unroll
        for (int i = 0; i < 4; i++) {
            columns[i] = __byte_perm(rows[i / 2 * 2], rows[i / 2 * 2 + 1], i % 2 == 0 ? 0x5140 : 0x7362);
        }
        const uint32_t to = smem_address(staging[buffer]);
        const int pair = lane / 16, second = lane / 8 % 2, i = lane % 8;        // stmatrix: row i of a matrix
        const int row = warp * 16 + 2 * i + second;
        const int column = slice * 32 + pair * 16 + i / 2 * 4 + second * 2 + i % 2;
        stmatrix_x4(to + row * 64 + ((slice * 2 + pair) ^ row / 2 % 4) * 16, rows);
        stmatrix_x4_trans(to + 64 * 64 + column * 64 + (warp ^ column / 2 % 4) * 16, columns);
    }
    __device__ __forceinline__ void store_out(int buffer, int row, int column) {
        tma_store_4d(&maps.out, staging[buffer], 0, row, column / 64, 0);
        tma_store_4d(&maps.out_t, staging[buffer] + 64 * 32, 0, column, row / 64, 0);
    }

    __device__ __forceinline__ void end() {
        Epilogue::end();
        counts.amax *= unit;
        const uint2 of_warp = counts.of_warp();
        if (lane == 0) { fp8_count(p.stats, so_far, of_warp.x, of_warp.y); }
        if (blockIdx.x + threadIdx.x == 0) { p.stats->elements += (size_t)p.N * p.out_columns; }
    }
};

// pre_act = the sums + bias, or gate, up = the sums; out = their activation. Gated: the tile's first 128
// columns are gate, the others are up, of the same 128 columns of out. So a thread has both of an element.
template <class Act, class Store> struct ActivationForward : Store {
    static constexpr bool kGated = Act::kGated;
    static constexpr int kParts = kGated ? 2 : 1, kColumns = kProductColumns / kParts;
    static constexpr int kBuffers = kParts + 1, kStages = kBuffers > 2 ? 3 : 4;     // pre_act's parts; out
    static constexpr int kGroups = Store::kGroups, kSlices = kColumns / 16 / kGroups, kInBlock = 4 / kGroups;
    using Store::Store, Store::maps, Store::p, Store::leads, Store::packed;
    __device__ __forceinline__ void begin(const ProductTile& tile) {
        if (!kGated) { this->ask_bias(tile); }
    }
    __device__ __forceinline__ void meet() {
        if (!kGated) { this->share_bias(this->bias_place()); }
    }
    __device__ __forceinline__ void take(const float (&d)[32][4]) { this->pack(d, this->scale, !kGated); }

    __device__ __forceinline__ void finish(const ProductTile& tile, int s) {
        const int row = this->row_of(tile), column = tile.column + s / kInBlock * 64, first = s * kGroups;
        if (Store::kFp8 && !kGated && row >= p.N) {
            // nothing is stored: the activation of a bias is no element
            this->barrier();            // all have read the tile's bias before the next one replaces it
            return;
        }
        float2 f[kGroups][4];
#pragma unroll
        for (int k = 0; k < 4 * kGroups; k++) {
            const int n = first + k / 4, m = k % 4;
            const float2 x = unpack_pair(packed[n][m]);
            if constexpr (kGated) {
                const float2 up = unpack_pair(packed[n + 8][m]);
                f[k / 4][m] = make_float2(this->value(Act(), x.x, up.x), this->value(Act(), x.y, up.y));
            } else {
                f[k / 4][m] = make_float2(this->value(Act(), x.x), this->value(Act(), x.y));
            }
        }
        typename Store::Words words[kGroups];
        this->round(words, f);

        if (s % kInBlock == 0) { this->begin_block(); }
#pragma unroll
        for (int k = 0; k < kGroups * kParts; k++) {
            this->put_sums(k % kParts, first + k / kParts + k % kParts * 8);
        }
        this->put(words, kParts, first);
        if (s % kInBlock < kInBlock - 1) { return; }
        this->end_block();
        if (!leads) { return; }
        for (int part = 0; part < kParts; part++) {
            this->store_block(maps.pre_act, part, row, column + part * p.columns);
        }
        this->store_out(kParts, row, column);
        tma_store_commit();
    }
};

// dact = the sums, rounded; out = dact times act'(pre_act), and the sums of out's columns. Or out is the
// gradients of gate and of up. Two blocks of pre_act are in staging, or two of gate and two of up, and out
// replaces them. But a warp's bytes lie where others read pre_act. So they have a block of their own; or, of
// gate and up, where that does not fit, the first slice of a block waits until all have read the second. A
// slice has 32 columns: the backward waits longer than the forward (ldmatrix, shuffles); more columns hide
// more of it.
template <class Act, class Store> struct ActivationBackward : Store {
    static constexpr bool kGated = Act::kGated, kTransB = !Store::kFp8;
    static constexpr bool kApart = Store::kFp8 && !kGated, kWait = Store::kFp8 && kGated;
    static constexpr int kParts = kGated ? 2 : 1, kSlices = 8;
    static constexpr int kBuffers = 2 * kParts + kApart, kStages = kBuffers > 2 ? 3 : 4;
    using Store::Store, Store::maps, Store::p, Store::leads, Store::packed, Store::own, Store::warp;
    typename Store::Words words[2][kParts][2];          // of a block's slices, their groups
    __device__ __forceinline__ void load(const ProductTile& tile) { this->load_pre_act(tile, 0, kParts); }
    __device__ __forceinline__ void take(const float (&d)[32][4]) { this->pack(d, this->dact_scale, false); }

    __device__ __forceinline__ void finish(const ProductTile& tile, int s) {
        const int i = s / 2, half = s % 2, row = this->row_of(tile), column = tile.column + i * 64;
        const int from = i % 2 * kParts, to = kApart ? 2 : from;
        if (half == 0) {                // the next block overwrites what the last store has to have read
            if (!kApart && leads) { tma_store_wait<0>(); }
            this->await_pre_act(tile, i, kParts);
        }
        float2 x[kParts][2][4];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            for (int part = 0; part < kParts; part++) { this->get(x[part][n], from + part, 2 * s + n); }
        }
        float sum[8];
#pragma unroll
        for (int r = 0; r < kParts; r++) {              // two groups: gate's r-th and up's, or both
            float2 f[2][4];
#pragma unroll
            for (int k = 0; k < 8 / kParts; k++) {
                const int n = kGated ? r : k / 4, m = k % 4;
                const float2 d = unpack_pair(packed[2 * s + n][m]), y = x[0][n][m];
                if constexpr (kGated) {
                    const float2 up = x[1][n][m];
                    const float2 one = Act::slopes(d.x, y.x, up.x), two = Act::slopes(d.y, y.y, up.y);
                    f[0][m] = make_float2(one.x, two.x), f[1][m] = make_float2(one.y, two.y);
                } else {
                    f[n][m] = make_float2(d.x * Act::slope(y.x), d.y * Act::slope(y.y));
                }
            }
            typename Store::Words rounded[2];
            this->round(rounded, f);
            for (int k = 0; k < 2; k++) {
                words[half][kGated ? k : 0][kGated ? r : k] = rounded[k];
                this->add_rows(sum + 4 * k, f[k]);
            }
        }

        if (kWait && half == 0) { return; }
        if (kWait) { this->barrier(); }                             // all have read gate and up
        else if (kApart && half == 0) { this->begin_block(); }      // all have read the last sums, too
        else if (!kGated && half == 0) { this->barrier(); }         // all have read the last block's sums
#pragma unroll
        for (int h = kWait ? 0 : half; h <= half; h++) {
            for (int part = 0; part < kParts; part++) { this->put(words[h][part], to + part, h * 2); }
        }
        if (!kGated) { own.sums[warp][half * 32 + this->sum_place()] = warp_sums<4>(sum); }
        if (half == 0) { return; }
        this->end_block();
        if (leads) {
            for (int part = 0; part < kParts; part++) {
                this->store_out(to + part, row, column + part * p.columns);
            }
            tma_store_commit();
        }
        if (!kGated) { this->store_sums(row, column, this->unit); }
    }
};

template <class E>
__global__ void __launch_bounds__(kProductThreads, 1)
    product_sm90_kernel(const __grid_constant__ ProductMaps maps, const Product p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char sm90_bytes[];
    auto& shared = *(ProductShared<E>*)sm90_bytes;
    if (threadIdx.x == 0) {
        for (int i = 0; i < E::kStages; i++) {
            mbarrier_init(&shared.full[i], 1);
            mbarrier_init(&shared.empty[i], 8 * kProductCluster);
        }
        for (int i = 0; i < 4; i++) { mbarrier_init(&shared.loaded[i / 2][i % 2], 1); }
        mbarrier_fence_init();
    }
    cluster_barrier();                                  // the barriers exist, in both blocks

    // All begin with 168 registers; a warpgroup's sums are 128 and its packed ones 64
    ProductLoop<E> loop = {shared, maps, p};
    if (threadIdx.x / 128 == 2) {
        registers_give<40>();
        if (threadIdx.x % 128 == 0) { loop.produce(); }
    } else {
        registers_take<232>();
        loop.run();
    }
    __syncwarp();
    cluster_barrier();                                  // the other block's copies and arrivals have come
#else
    __trap();
#endif
}

// Of matmul_backward_input with dbias, and of activate_backward.
static size_t activate_backward_scratch_bytes(int N, int OC) {
    return std::max(bias_backward_scratch_bytes(N, OC), (size_t)ceil_div(N, 64) * OC * sizeof(float));
}

// Whether these kernels serve a product. Sums of fewer than 512 terms were not timed in a step.
static bool products_activate(int K, int columns) {
    const bool whole = K % kProductK == 0 && K >= 512 && columns % kProductColumns == 0;
    return kLowPrecision && whole && sm90_kernels_run();
}
// The most terms of a sum in SwiGLU's forward in 16 bits. Of longer sums, cuBLASLt's product gains more time
// than the op costs: K=2048 took 1.30 ms in one kernel and 1.23 apart; K=768 .73 and .89.
constexpr int kMaxGatedTerms = 1024;

// Where a model computes its MLP's activation, for the printed line. Both passes have sums of C terms.
static const char* activation_form(Mlp mlp, int C, int F, bool fp8) {
    if (!products_activate(C, F)) { return "apart"; }
    const bool backward_only = is_gated(mlp) && C > kMaxGatedTerms && !fp8;
    return backward_only ? "in the backward's product (sm90)" : "in its products (sm90)";
}

// A map of bytes (rows,2K) that permutes each group of 16 rows; a box has 8 groups. kRows: row 2m + p goes to
// 8p + m, because wgmma gives a lane rows m and m + 8. Else row 4q + 2j + e goes to 8j + 2q + e, because
// lane q has columns 2q + e and 8 + 2q + e.
template <bool kRows> static CUtensorMap product_bytes_map(const void* bytes, int rows, int K) {
    static_assert(kProductRows == 8 * 16 && kProductColumns / kProductCluster == 8 * 16, "a box");
    const size_t row = 2 * (size_t)K;
    return encode_map<5>(bytes, {{(size_t)K, 2, kProductK}, {2, row * (kRows ? 2 : 1), 2}, {4, row * 4, 4},
                                 {2, row * (kRows ? 1 : 2), 2}, {(size_t)rows / 16, row * 16, 8}});
}

template <class E> static ProductMaps product_maps(const Product& p) {
    constexpr int kPart = kProductColumns / kProductCluster;
    ProductMaps maps = {.pre_act = tensor_map(p.pre_act, 1, p.N, p.pre_columns / 64)};
    if (E::kFp8) {
        maps.rows = product_bytes_map<true>(p.rows, p.N, p.K);
        const int rows = p.columns * kProductColumns / E::kColumns;         // of weight
        maps.weight = product_bytes_map<false>(p.weight, rows, p.K);
        maps.out = tensor_map(p.bytes, 1, p.N, p.out_columns / 64, 64, 1, 32);
        maps.out_t = tensor_map(p.transposed, 1, p.out_columns, p.N / 64, 64, 1, 32);
    } else {
        maps.rows = tensor_map(p.rows, 1, p.N, p.K / 64, kProductRows);
        maps.weight = E::kTransB ? tensor_map(p.weight, 1, p.K, p.columns / 64, kProductK, kPart / 64)
                                 : tensor_map(p.weight, 1, p.pre_columns, p.K / 64, kPart);
        maps.out = tensor_map(p.out, 1, p.N, p.out_columns / 64);
    }
    return maps;
}

// Runs the product with epilogue E. False, and nothing done, where the kernel does not serve it.
template <class E> static bool product_sm90([[maybe_unused]] const Product& p, Stream stream) {
    if constexpr (kLowPrecision) {
        if (!products_activate(E::kFp8 ? 2 * p.K : p.K, p.columns)) { return false; }
        if (E::kFp8 && p.N % 64 != 0) { return false; }
        const ProductMaps maps = product_maps<E>(p);
        const auto kernel = product_sm90_kernel<E>;
        constexpr int kShared = sizeof(ProductShared<E>);
        allow_shared_memory(kernel, kShared, kSm90Shared);
        cudaLaunchAttribute cluster = {};
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim = {kProductCluster, 1, 1};
        const int clusters = std::min(product_tiles<E>(p), device_sm_count / kProductCluster);
        const cudaLaunchConfig_t config = {dim3(clusters * kProductCluster), dim3(kProductThreads),
                                           kShared, stream, &cluster, 1};
        cudaCheck(cudaLaunchKernelEx(&config, kernel, maps, p));
        return true;
    }
    return false;
}

// Whether the product with its activation was one kernel.
static bool matmul_forward_sm90(const MatmulForward& a, Stream stream) {
    return with_act(a.mlp, [&](auto act) {
        typedef decltype(act) Act;
        const int columns = Act::kGated ? a.OC / 2 : a.OC;
        const Product p = {.rows = a.inp, .weight = a.weight, .bias = a.bias, .pre_act = a.pre_act,
                           .out = a.out, .N = a.N, .K = a.C, .columns = columns, .pre_columns = a.OC,
                           .out_columns = columns};
        if (Act::kGated && (a.bias || p.K > kMaxGatedTerms)) { return false; }
        return product_sm90<ActivationForward<Act, Store16>>(p, stream);
    });
}
static bool matmul_backward_input_sm90(const MatmulBackwardInput& a, Stream stream) {
    return with_act(a.mlp, [&](auto act) {
        typedef decltype(act) Act;
        const int wide = act_columns(a.mlp, a.C);
        const Product p = {.rows = a.dout, .weight = a.weight, .pre_act = a.pre_act, .out = a.dinp,
                           .partial = a.dbias.data ? a.scratch : nullptr, .N = a.N, .K = a.OC,
                           .columns = a.C, .pre_columns = wide, .out_columns = wide};
        if (!product_sm90<ActivationBackward<Act, Store16>>(p, stream)) { return false; }
        if (p.partial) { column_sums({{a.dbias}}, 1, p.partial, ceil_div(a.N, 64), a.C, stream); }
        return true;
    });
}

// ---- FP8: casts, products, scales ----
// Products of FP8 bytes (llmc/ops/fp8.h). Hopper's FP8 units read both operands along K alone. So each
// product is a b^T of row-major matrices, and a cast also writes the transpose:
//     forward      out (N,OC) = inp weight^T         input grad   dinp (N,C) = dout (weight^T)^T
//     weight grad  dweight (OC,C) (+)= dout^T (inp^T)^T
// A block of fp8_cast takes a tile of 128 rows and columns. A thread converts a vector of each of four rows,
// transposes each 4 x 4 bytes in registers and puts them into shared memory, where a word holds a quad: four
// rows of a column. A warp then stores a column, 128 bytes. The kernel also computes activations and their
// gradients (a gated one's has two tiles: gate's and up's), and a bias's gradient by column sums: a tile's
// sums are a row of partials, as in partial_sums_kernel.
constexpr int kCastTile = 128, kCastThreads = 256, kCastQuads = kCastTile / 4;
typedef uint32_t CastTile[kCastTile][kCastQuads];           // (column, quad)
// Where a column has a quad. A warp stores eight vectors of kVector columns, side by side, of four quads. The
// columns of each vector have another order, which puts these 32 words into different banks.
template <int kVector> __device__ __forceinline__ int quad_place(int column, int quad) {
    return quad ^ column / kVector % 8 * 4;
}

// Stores a vector of each of a quad's rows.
template <int kWords>
__device__ __forceinline__ void store_turned(CastTile& tile, int column, int quad,
                                             const uint32_t (&words)[4][kWords]) {
    uint32_t* to = &tile[column][quad_place<4 * kWords>(column, quad)];
#pragma unroll
    for (int w = 0; w < kWords; w++, to += 4 * kCastQuads) {
        const uint32_t ab = __byte_perm(words[0][w], words[1][w], 0x5140);
        const uint32_t ab2 = __byte_perm(words[0][w], words[1][w], 0x7362);
        const uint32_t cd = __byte_perm(words[2][w], words[3][w], 0x5140);
        const uint32_t cd2 = __byte_perm(words[2][w], words[3][w], 0x7362);
        to[0] = __byte_perm(ab, cd, 0x5410);
        to[kCastQuads] = __byte_perm(ab, cd, 0x7632);
        to[2 * kCastQuads] = __byte_perm(ab2, cd2, 0x5410);
        to[3 * kCastQuads] = __byte_perm(ab2, cd2, 0x7632);
    }
}

// Stores the block's tile into out (C,N).
template <int kVector>
__device__ __forceinline__ void store_columns(uint8_t* out, const CastTile& tile, int N, int C) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int row = blockIdx.y * kCastTile + 4 * lane, column_0 = blockIdx.x * kCastTile;
#pragma unroll 8
    for (int c = warp; c < kCastTile; c += kCastThreads / kWarp) {
        if (column_0 + c < C && row < N) {
            *(uint32_t*)(out + (size_t)(column_0 + c) * N + row) = tile[c][quad_place<kVector>(c, lane)];
        }
    }
}

// kSource: Plain stands for Weight, too.
template <Fp8Source kSource, class Act>
__global__ void __launch_bounds__(kCastThreads) fp8_cast_kernel(Fp8Cast a) {
    constexpr int kGroups = kCastTile / kWidth, kWarps = kCastThreads / kWarp, kWords = kWidth / 4;
    constexpr bool kGated = Act::kGated, kBefore = kSource == Fp8Source::Slope;
    constexpr int kHalves = kBefore && kGated ? 2 : 1;                  // of a row of out
    __shared__ CastTile tiles[kHalves];
    __shared__ float sums[8][kCastTile];                                // of 16 rows each
    __shared__ uint2 stats[kWarps];                                     // of each warp: amax, saturated
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int row_0 = blockIdx.y * kCastTile, column_0 = blockIdx.x * kCastTile;
    const bool first = blockIdx.x + blockIdx.y + threadIdx.x == 0;
    const bool casts = a.out || a.out_t, sets_scale = a.source == Fp8Source::Weight && casts;
    const float scale = sets_scale ? fp8_scale(__uint_as_float(a.stats->amax), 0) : a.tensor->scale;
    const uint32_t so_far = fp8_amax_so_far(a.stats);
    Fp8Counts counts;
#pragma unroll
    for (int part = warp; part < kGroups; part += kWarps) {             // of 4 quads of rows and 8 vectors
        const int quad = part / (kGroups / 8) * 4 + lane / 8, group = part % (kGroups / 8) * 8 + lane % 8;
        const int row = row_0 + 4 * quad, c = column_0 + group * kWidth, end = row < a.N ? a.C : 0;
        const size_t at = row < a.N ? (size_t)row * a.C : 0;
        uint32_t words[kHalves][4][kWords];
        x128 x[4], before[4], up[4];                                    // gated: gate is in before or x
        Floats sum = {};
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const size_t row_at = at + (end ? (size_t)r * a.C : 0), wide_at = (kGated ? 2 : 1) * row_at;
            x[r] = load(a.inp + (kBefore ? row_at : wide_at), c, end);
            if (kBefore) { before[r] = load(a.before + wide_at, c, end); }
            if (kGated) { up[r] = load((kBefore ? a.before : a.inp) + wide_at + (end ? a.C : 0), c, end); }
        }
#pragma unroll
        for (int r = 0; r < 4; r++) {
            Floats f[kHalves] = {to_floats(x[r])};
            const Floats y = to_floats(kBefore ? before[r] : x[r]), z = to_floats(kGated ? up[r] : x[r]);
#pragma unroll
            for (int k = 0; k < kWidth; k++) {
                float& value = f[0].at[k];
                if constexpr (kBefore && kGated) {
                    const float2 d = Act::slopes(value, y.at[k], z.at[k]);
                    value = d.x, f[1].at[k] = d.y;
                }
                else if constexpr (kBefore) { value *= Act::slope(y.at[k]); }
                else if constexpr (kGated) { value = Act::value(value, z.at[k]); }
                else if constexpr (kSource == Fp8Source::Act) { value = Act::value(value); }
                sum.at[k] += value;
            }
            Pack<uint8_t> bytes[kHalves];
            counts.round(bytes, f, scale);
            uint8_t* out = a.out + kHalves * (at + (size_t)r * a.C);
            for (int half = 0; half < kHalves; half++) {
                memcpy(words[half][r], &bytes[half], sizeof(bytes[half]));
                store(out + (size_t)half * a.C, c, a.out ? end : 0, bytes[half]);
            }
        }
        if (!casts) { continue; }
        if (a.dbias.data) {                         // lanes of one group have 4 quads, one below the other
            for (int k = 0; k < kWidth; k++) {
                for (int distance = 8; distance < kWarp; distance *= 2) {
                    sum.at[k] += __shfl_xor_sync(~0u, sum.at[k], distance);
                }
                if (lane < 8) { sums[quad / 4][group * kWidth + k] = sum.at[k]; }
            }
        }
        for (int h = 0; h < kHalves; h++) { store_turned(tiles[h], group * kWidth, quad, words[h]); }
    }

    const uint2 of_warp = counts.of_warp();
    if (lane == 0) { stats[warp] = of_warp; }
    __syncthreads();
    if (threadIdx.x < kWarps) {
        constexpr unsigned kLanes = (1u << kWarps) - 1;
        const uint32_t most = __reduce_max_sync(kLanes, stats[lane].x);
        const uint32_t count = __reduce_add_sync(kLanes, stats[lane].y);
        if (lane == 0) { fp8_count(a.stats, so_far, most, casts ? count : 0); }
    }
    if (first) { a.stats->elements += (size_t)a.N * kHalves * a.C; }
    if (first && sets_scale) { fp8_set_scale(a.tensor, scale); }
    if (!casts) { return; }
    const int column = column_0 + threadIdx.x;
    if (a.dbias.data && threadIdx.x < kCastTile && column < a.C) {
        float sum = 0.0f;
        for (int i = 0; i < 8; i++) { sum += sums[i][threadIdx.x]; }
        a.scratch[(size_t)blockIdx.y * a.C + column] = sum;
    }
    for (int h = 0; h < kHalves && a.out_t; h++) {
        store_columns<kWidth>(a.out_t + (size_t)h * a.C * a.N, tiles[h], a.N, a.C);
    }
}

static size_t fp8_cast_scratch_bytes(int N, int C) {
    return (size_t)ceil_div(N, kCastTile) * C * sizeof(float);
}

// Why the casts cannot run here, or "". Older GPUs have no FP8, and code compiled for them has none.
static std::string fp8_error() {
    cudaFuncAttributes attributes;
    cudaCheck(cudaFuncGetAttributes(&attributes, fp8_cast_kernel<Fp8Source::Plain, NoAct>));
    if (attributes.ptxVersion >= 89) { return ""; }
    return format("--matmul-dtype fp8 needs a GPU of compute capability 8.9 or later (RTX 40, H100, ...) and "
                  "a program compiled for it; the code that runs here is sm_%d's", attributes.ptxVersion);
}

static void fp8_cast(const Fp8Cast& a, Stream stream) {
    OpScope scope(a, stream);
    if (a.N % 16 != 0 || a.C % 16 != 0) { die("fp8_cast: %d x %d is not a multiple of 16", a.N, a.C); }
    const dim3 grid(ceil_div(a.C, kCastTile), ceil_div(a.N, kCastTile));
    const auto launch = [&](auto kernel) { kernel<<<grid, kCastThreads, 0, stream>>>(a); };
    switch (a.source) {
        case Fp8Source::Plain:
        case Fp8Source::Weight: launch(fp8_cast_kernel<Fp8Source::Plain, NoAct>); break;
        case Fp8Source::Act:
            with_act(a.mlp, [&](auto act) { launch(fp8_cast_kernel<Fp8Source::Act, decltype(act)>); });
            break;
        case Fp8Source::Slope:
            with_act(a.mlp, [&](auto act) { launch(fp8_cast_kernel<Fp8Source::Slope, decltype(act)>); });
            break;
    }
    if (a.dbias.data) { column_sums({{a.dbias}}, 1, a.scratch, grid.y, a.C, stream); }
}

// Writes the transpose of bytes that norms, attention or the classifier have stored: the same tiles. A thread
// takes 16 columns of four rows. The sums of columns are of these bytes, a warp's of 16 columns.
__global__ void __launch_bounds__(kCastThreads) fp8_transpose_kernel(Fp8Transpose a) {
    constexpr int kVector = 16;
    __shared__ CastTile tile;
    const int column = threadIdx.x % 8 * kVector, quad = threadIdx.x / 8;
    const int c = blockIdx.x * kCastTile + column;
    uint32_t words[4][kVector / 4] = {};
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const size_t row = blockIdx.y * kCastTile + 4 * quad + r;
        if (row >= a.N || c >= a.C) { continue; }
        const uint4 bytes = *(const uint4*)(a.inp + row * a.C + c);
        memcpy(words[r], &bytes, sizeof(bytes));
    }
    store_turned(tile, column, quad, words);
    __syncthreads();
    store_columns<kVector>(a.out, tile, a.N, a.C);
    if (!a.dbias.data) { return; }
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int c8 = warp * 16 + lane / 4;
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < kCastQuads / 4; i++) {              // lanes' words are in different banks
        const int at = quad_place<kVector>(c8, (lane + 4 * i) % kCastQuads);
        add_e4m3_rows(sums, tile[c8][at], tile[c8 + 8][at]);
    }
    const int of = blockIdx.x * kCastTile + c8 + lane % 4 * 8;
    if (lane % 4 < 2 && of < a.C) {
        const float sum = (lane % 4 == 0 ? sums[0] : sums[2]) * a.tensor->inverse;
        a.scratch[(size_t)blockIdx.y * a.C + of] = a.of_qkv && is_keys(of, a.C) ? 0.0f : sum;
    }
}

static void fp8_transpose(const Fp8Transpose& a, Stream stream) {
    OpScope scope(a, stream);
    if (a.N % 16 != 0 || a.C % 16 != 0) { die("fp8_transpose: %d x %d is not a multiple of 16", a.N, a.C); }
    const dim3 grid(ceil_div(a.C, kCastTile), ceil_div(a.N, kCastTile));
    fp8_transpose_kernel<<<grid, kCastThreads, 0, stream>>>(a);
    if (a.dbias.data) { column_sums({{a.dbias}}, 1, a.scratch, grid.y, a.C, stream); }
}

// Whether the product and the cast of its output were one kernel (6.4).
static bool fp8_matmul_sm90(const Fp8Matmul& a, Stream stream) {
    const Fp8Cast& to = a.cast;
    if (!to.stats || !to.out || !a.fast || a.a_format != Fp8Format::E4m3 || a.residual) { return false; }
    if (to.source != Fp8Source::Act && to.source != Fp8Source::Slope) { return false; }
    return with_act(to.mlp, [&](auto act) {
        typedef decltype(act) Act;
        const Product p = {.rows = (const floatX*)a.a, .weight = (const floatX*)a.b, .bias = a.bias,
                           .pre_act = to.before ? to.before : a.out,
                           .partial = to.dbias.data ? to.scratch : nullptr, .N = a.M, .K = a.K / 2,
                           .columns = to.C, .pre_columns = act_columns(to.mlp, to.C),
                           .out_columns = to.width(), .bytes = to.out, .transposed = to.out_t,
                           .rows8 = a.a_tensor, .weight8 = a.b_tensor, .bytes8 = to.tensor,
                           .stats = to.stats};
        if (!to.before) {
            return !(Act::kGated && a.bias) && product_sm90<ActivationForward<Act, StoreBytes>>(p, stream);
        }
        if (!product_sm90<ActivationBackward<Act, StoreBytes>>(p, stream)) { return false; }
        if (p.partial) { column_sums({{to.dbias}}, 1, p.partial, ceil_div(a.M, 64), a.N, stream); }
        return true;
    });
}

static void fp8_matmul(const Fp8Matmul& a, Stream stream) {
    OpScope scope(a, stream);
    if (fp8_matmul_sm90(a, stream)) { return; }
    Gemm g = {.d = a.out, .a = a.b, .b = a.a, .c = a.residual, .bias = a.bias, .m = a.N, .n = a.M, .k = a.K,
              .trans_a = true, .epilogue = a.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT,
              .inp_type = CUDA_R_8F_E4M3, .b_is_e5m2 = a.a_format == Fp8Format::E5m2,
              .a_scale = &a.b_tensor->inverse, .b_scale = &a.a_tensor->inverse, .fast = a.fast};
    if (a.out) { gemm(g, stream); }
    else { gemm_to_grad(g, a.grad, a.scratch, stream); }
    if (a.cast.stats) { fp8_cast(a.cast, stream); }
}

// One block; a thread has every 256th tensor.
__global__ void fp8_scales_kernel(Fp8Scales a) {
    __shared__ float shared[kWarp];
    float worst = 0.0f;
    for (int i = threadIdx.x; i < a.count; i += blockDim.x) {
        Fp8Stats all = {};
        for (int r = 0; r < a.ranks; r++) {
            Fp8Stats* stats = (Fp8Stats*)(a.records + r * a.record_bytes + a.stats_at) + i;
            fp8_add(&all, *stats);
            if (r == a.rank) { *stats = {}; }
        }
        worst = fmaxf(worst, fp8_is_finite(all.amax) ? fp8_saturated(all) : INFINITY);
        fp8_next_scale(a.tensors + i, all.amax);
    }
    worst = block_max(worst, shared);
    if (threadIdx.x > 0) { return; }
    *a.saturated = worst;
    if (worst > kFp8MaxSaturated) { *(double*)a.records = INFINITY; }
}

static void fp8_scales(const Fp8Scales& a, Stream stream) {
    OpScope scope(a, stream);
    fp8_scales_kernel<<<1, 256, 0, stream>>>(a);
}

// == 6.5 classifier ==
// Row by row of logits x (N,Vp), over the first V columns:
//     losses = log(sum(exp(x))) - x[target]
//     LossAndGrad: x = (softmax(x) - onehot(target)) * dloss * loss_scale, and zeros into columns V and up
// A target of -1 is not counted: its loss is 0, and so is its row of the gradient.
// With a softcap y = softcap * tanh(x / softcap) takes the place of x, and the gradient has the factor
// 1 - (y / softcap)^2. Texts that are written have sample_capped (sampler.h).
// 124M, B=64: 6.6 GB of logits. The streaming kernel reads each row once and keeps it in registers, up to
// kClassifierVectors vectors a thread: 57,344 elements. The other one, for longer rows and softcaps, reads it
// twice.
// LossOnly does not write. With fp8_grad the gradient goes there as e5m2 bytes, times kFp8Dlogits: a fixed
// scale, because |softmax - onehot| is at most 1.
constexpr int kClassifierThreads = 1024, kClassifierVectors = 7;
// Where a maximum starts. A thread whose columns are all padding keeps it. It must be finite, also times
// log2(e), because inf - inf would turn the whole row into NaN.
constexpr float kLowest = -FLT_MAX / 4;

// Columns V and up get no probability.
template <class T> __device__ __forceinline__ void mask_padding(Pack<T>* x, int c, int V) {
    if (c + kWidth <= V) { return; }
    for (int k = 0; k < kWidth; k++) {
        if (c + k >= V) { x->data[k] = (T)-INFINITY; }
    }
}

// The largest element. NaN is ignored here; the sum of exp() keeps it.
template <class T> __device__ __forceinline__ float pack_max(const Pack<T>& x) {
    T top = x.data[0];
    for (int k = 1; k < kWidth; k++) {
        if constexpr (sizeof(T) == 4) { top = fmaxf(top, x.data[k]); }
        else { top = __hmax(top, x.data[k]); }
    }
    return (float)top;
}

// sum of exp(x - top)
template <class T> __device__ __forceinline__ float exp_sum(const Pack<T>& x, float top) {
    float sum = 0.0f;
    for (int k = 0; k < kWidth; k++) { sum += exp2_fast(fmaf((float)x.data[k], kLog2e, -top * kLog2e)); }
    return sum;
}

// Combines the threads' (max, sum of exp(x - max)) into the row's, and returns that to every thread. It has
// one barrier. `parts` must not be written again before the next barrier.
__device__ __forceinline__ void softmax_combine(float& top, float& sum, float2* parts /*(32)*/) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    float row_top = warp_max(top);
    float row_sum = warp_sum(sum * exp2_fast((top - row_top) * kLog2e));
    if (lane == 0) { parts[warp] = make_float2(row_top, row_sum); }
    __syncthreads();
    const float2 part = lane < (int)blockDim.x / kWarp ? parts[lane] : make_float2(kLowest, 0.0f);
    top = warp_max(part.x);
    sum = warp_sum(part.y * exp2_fast((part.x - top) * kLog2e));
}

// The factor of softmax(x) - onehot(target). With FP8 it is kFp8Dlogits; the products multiply by the
// tensor's inverse, which makes dloss * loss_scale of it.
__device__ __forceinline__ float dlogits_scale(const Classifier& a, bool fp8) {
    const float scale = a.dloss * (a.loss_scale ? *a.loss_scale : 1.0f);
    if (!fp8) { return scale; }
    if (blockIdx.x + threadIdx.x == 0) { a.fp8_tensor->inverse = scale / kFp8Dlogits; }
    return kFp8Dlogits;
}

// The gradient of one vector of logits, columns [c, c + kWidth): scale * (softmax(x) - onehot(target)).
template <class T>
__device__ __forceinline__ Floats softmax_grad(const Pack<T>& x, float top, float scale_over_sum, int c,
                                               int target, float scale) {
    Floats d;
    for (int k = 0; k < kWidth; k++) {
        d.at[k] = exp2_fast(fmaf((float)x.data[k], kLog2e, -top * kLog2e)) * scale_over_sum;
    }
    if (target >= c && target < c + kWidth) {
        for (int k = 0; k < kWidth; k++) {
            if (c + k == target) { d.at[k] -= scale; }
        }
    }
    return d;
}

// Persistent, one block an SM. Rows pass through two slots of shared memory (200 KB) into registers. The next
// row is copied during the arithmetic of this one, so the memory never idles. A thread reads only what it
// copied itself, and waits for its own copies only; a row's one barrier is in softmax_combine.
//
//     copies       | row i+1 into slot 1                                     | row i+2 into slot 0
//     this thread  | row i: slot 0 -> registers -> max, sum -> barrier -> d  | row i+1: slot 1 -> ...
template <bool kGrad, bool kFp8>
__global__ void __launch_bounds__(kClassifierThreads, 1) classifier_stream_kernel(Classifier a) {
    extern __shared__ x128 staged[];                    // (2, Vp/kWidth)
    __shared__ float2 parts[2][kWarp];
    __shared__ float target_logit[2];
    const int N = a.N, V = a.V, Vp = a.Vp, vectors = Vp / kWidth, first = threadIdx.x;
    const float counted_scale = kGrad ? dlogits_scale(a, kFp8) : 0.0f;
    // Where this thread's first vector of a row is; its others are kClassifierThreads vectors apart.
    auto row_at = [&](int row) { return a.logits + (size_t)row * Vp + first * kWidth; };
    auto stage = [&](int row, int slot) {
        if (row < N) {
            const floatX* x_row = row_at(row);
            x128* slot_at = staged + slot * vectors + first;
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
        // Into registers, padding masked, and this thread's maximum.
        const int target = a.targets[row];
        x128* slot_at = staged + slot * vectors + first;
        cp_async_wait<1>();
        uint4 row_x[kClassifierVectors];                // as words, see as_pack
        float top = kLowest;
#pragma unroll
        for (int j = 0; j < kClassifierVectors; j++) {
            const int v = j * kClassifierThreads;
            if (first + v >= vectors) { continue; }
            mask_padding(slot_at + v, (first + v) * kWidth, V);     // there, not in registers: see `row_x`
            row_x[j] = *(const uint4*)(slot_at + v);
            top = fmaxf(top, pack_max(as_pack(row_x[j])));
        }
        if (target >= 0 && target / kWidth % kClassifierThreads == first) {
            target_logit[slot] = (float)((const floatX*)(staged + slot * vectors))[target];
        }
        // The maximum and the sum of exp(x - max): of this thread's columns, then of the row.
        float sum = 0.0f;
        for (int j = 0; j < kClassifierVectors; j++) {
            if (first + j * kClassifierThreads < vectors) { sum += exp_sum(as_pack(row_x[j]), top); }
        }
        softmax_combine(top, sum, parts[slot]);
        stage(row + 2 * gridDim.x, slot);               // every read of this slot was before that barrier
        if (first == 0) { a.losses[row] = target < 0 ? 0.0f : logf(sum) + top - target_logit[slot]; }

        // The gradient, over the logits or as bytes.
        if (kGrad) {
            floatX* d_row = row_at(row);
            const float scale = target < 0 ? 0.0f : counted_scale, scale_over_sum = scale / sum;
#pragma unroll
            for (int j = 0; j < kClassifierVectors; j++) {
                const int v = j * kClassifierThreads, c = (first + v) * kWidth;
                if (first + v >= vectors) { continue; }
                const Floats d = softmax_grad(as_pack(row_x[j]), top, scale_over_sum, c, target, scale);
                if (kFp8) { store(a.fp8_grad + (size_t)row * Vp, c, Vp, to_fp8<Fp8Format::E5m2>(d)); }
                else { store(d_row, v * kWidth, Vp, to_pack<floatX>(d)); }
            }
        }
    }
}

// softcap * tanh(x / softcap), with tanh(|z|) = (1 - e)/(1 + e), e = exp(-2|z|)
__device__ __forceinline__ float capped(float x, float softcap) {
    const float e = exp2_fast(fabsf(x) * (-2.0f * kLog2e / softcap));
    return copysignf(softcap * (1.0f - e) * reciprocal_fast(1.0f + e), x);
}

// What softmax takes of columns [c, c + kWidth) of a row.
template <bool kCap>
__device__ __forceinline__ auto load_logits(const Classifier& a, const floatX* x_row, int c) {
    Pack<std::conditional_t<kCap, float, floatX>> x;
    const x128 stored = load(x_row, c, a.Vp);
    if constexpr (kCap) {
        for (int k = 0; k < kWidth; k++) { x.data[k] = capped((float)stored.data[k], a.softcap); }
    } else {
        x = stored;
    }
    mask_padding(&x, c, a.V);
    return x;
}

// Any number of columns: one block a row, read twice (the second time from cache).
template <bool kGrad, bool kCap> __global__ void classifier_kernel(Classifier a) {
    __shared__ float2 parts[kWarp];
    const int V = a.V, Vp = a.Vp, row = blockIdx.x, target = a.targets[row];
    const int first = threadIdx.x * kWidth, step = blockDim.x * kWidth;
    floatX* x_row = a.logits + (size_t)row * Vp;
    // Read before the barrier in softmax_combine, after which the row is written.
    float target_logit = threadIdx.x == 0 && target >= 0 ? (float)x_row[target] : 0.0f;
    if (kCap) { target_logit = capped(target_logit, a.softcap); }
    float top = kLowest, sum = 0.0f;
    for (int c = first; c < V; c += step) {
        const auto x = load_logits<kCap>(a, x_row, c);
        const float higher = fmaxf(top, pack_max(x));
        sum = sum * exp2_fast((top - higher) * kLog2e) + exp_sum(x, higher);
        top = higher;
    }
    softmax_combine(top, sum, parts);
    if (threadIdx.x == 0) { a.losses[row] = target < 0 ? 0.0f : logf(sum) + top - target_logit; }
    if (kGrad) {
        const float counted_scale = dlogits_scale(a, a.fp8_grad);
        const float scale = target < 0 ? 0.0f : counted_scale, scale_over_sum = scale / sum;
        for (int c = first; c < Vp; c += step) {
            const auto x = load_logits<kCap>(a, x_row, c);
            Floats d = softmax_grad(x, top, scale_over_sum, c, target, scale);
            for (int k = 0; k < kWidth && kCap; k++) {          // the slope of padding, -inf, becomes 0
                const float z = (float)x.data[k] / a.softcap;
                d.at[k] *= fmaxf(fmaf(-z, z, 1.0f), 0.0f);
            }
            if (a.fp8_grad) { store(a.fp8_grad + (size_t)row * Vp, c, Vp, to_fp8<Fp8Format::E5m2>(d)); }
            else { store(x_row, c, Vp, to_pack<floatX>(d)); }
        }
    }
}

// True for 16-bit rows that fit registers and two slots of shared memory (GPT-2's 50,304 columns fit the
// 227 KB of an H200, but not the 163 KB of an A100), and are long enough to keep all threads busy. --kernels
// portable takes what every GPU has, and so runs the kernel that a 4090 runs.
static bool classifier_streams(int Vp, float softcap) {
    return sizeof(floatX) == 2 && softcap == 0.0f && Vp >= kClassifierThreads * kWidth &&
           Vp <= kClassifierVectors * kClassifierThreads * kWidth &&
           2 * Vp * sizeof(floatX) + 1024 <=                            // 1024: the static part
               (use_sm90_kernels ? shared_memory_limit() : kPortableShared);
}

static void classifier(const Classifier& a, Stream stream) {
    OpScope scope(a, stream);
    check_width(a, a.Vp);
    const bool grad = a.mode == ClassifierMode::LossAndGrad;
    if (classifier_streams(a.Vp, a.softcap)) {
        auto kernel = !grad        ? classifier_stream_kernel<false, false>
                      : a.fp8_grad ? classifier_stream_kernel<true, true>
                                   : classifier_stream_kernel<true, false>;
        const int shared = 2 * a.Vp * (int)sizeof(floatX);
        allow_shared_memory(kernel, shared, use_sm90_kernels ? kSm90Shared : kPortableShared);
        kernel<<<std::min(a.N, device_sm_count), kClassifierThreads, shared, stream>>>(a);
    } else {
        const bool cap = a.softcap > 0.0f;
        auto kernel = cap ? (grad ? classifier_kernel<true, true> : classifier_kernel<false, true>)
                          : (grad ? classifier_kernel<true, false> : classifier_kernel<false, false>);
        const int threads = std::min(round_up(ceil_div(a.Vp, kWidth), kWarp), kClassifierThreads);
        kernel<<<a.N, threads, 0, stream>>>(a);
    }
}

// A block looks for a token that is likelier than the row's target, or as likely and before it. The logits
// are read once more, in evaluations alone. NaN marks nothing.
__global__ void mark_likeliest_kernel(MarkLikeliest a) {
    const int row = blockIdx.x, target = a.targets[row];
    const floatX* x_row = a.logits + (size_t)row * a.Vp;
    const float own = (float)x_row[target];
    bool beaten = false;
    for (int c = threadIdx.x; c < a.V; c += blockDim.x) {
        const float x = (float)x_row[c];
        beaten |= !(x < own || (x == own && c >= target));
    }
    beaten = __syncthreads_or(beaten);
    if (threadIdx.x == 0) { a.likeliest[row] = !beaten; }
}

static void mark_likeliest(const MarkLikeliest& a, Stream stream) {
    OpScope scope(a, stream);
    mark_likeliest_kernel<<<a.N, 512, 0, stream>>>(a);
}

// == 6.6 loss ==
// mean (+)= weight * sum of losses. One block; the sum is exact to double precision, in a fixed order.
__global__ void loss_sum_kernel(float* mean, const float* losses, float weight, Accumulate acc, int N) {
    __shared__ double shared[kWarp];
    double sum = 0.0;
    for (int i = threadIdx.x; i < N; i += blockDim.x) { sum += losses[i]; }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) { *mean = (float)((acc == Accumulate::Yes ? (double)*mean : 0.0) + weight * sum); }
}

static void loss_sum(const LossSum& a, Stream stream) {
    OpScope scope(a, stream);
    loss_sum_kernel<<<1, 1024, 0, stream>>>(a.mean, a.losses, a.weight, a.acc, a.N);
}

// == 6.7 gradients: lanes and the norm ==
// out = chain[0] + (chain[1] + (... + tree of the pieces)). A thread adds up its elements' pieces like a
// binary counter: piece r pops one earlier sum from a stack for each trailing one bit of r, adds it, and
// pushes the result. At the end the sums on the stack are added, the last one first. So its pairs are those
// of the twin.
constexpr int kLaneThreads = 256;
constexpr int kMaxPieceLevels = 13;
static_assert(kCommMaxWorld <= 1 << (kMaxPieceLevels - 1), "a piece from each rank");

// Elements [i, i + kWidth) of stored gradients, the first of which has number `first` in the whole.
__device__ __forceinline__ Floats load_stored(const void* grads, bool is_bf16, size_t i, size_t n,
                                              const RoundKey& key, size_t first) {
    if (is_bf16) { return load_dithered((const __nv_bfloat16*)grads, i, n, key, first); }
    return load_floats((const float*)grads, i, n);
}

template <bool kPiecesBf16>
__device__ __forceinline__ Floats load_piece(const LaneSum& a, int r, size_t i) {
    const size_t at = (size_t)r * a.n;
    if (!kPiecesBf16) { return load_floats((const float*)a.pieces.data + at, i, a.n); }
    RoundKey key = a.pieces.key;
    key.micro += (uint32_t)r * a.piece_micros;
    const __nv_bfloat16* piece = (const __nv_bfloat16*)a.pieces.data + at;
    return load_dithered(piece, i, a.n, key, a.pieces.first);
}

__device__ __forceinline__ void add_to(Floats* sum, const Floats& left) {
    for (int k = 0; k < kWidth; k++) { sum->at[k] = left.at[k] + sum->at[k]; }
}

// kPieces: their number, where it is one of the common ones: the stack then stays in registers. 0: any.
template <int kPieces, bool kPiecesBf16>
__global__ void __launch_bounds__(kLaneThreads) lane_sum_kernel(LaneSum a) {
    const int pieces = kPieces > 0 ? kPieces : a.num_pieces;
    const size_t step = (size_t)gridDim.x * blockDim.x * kWidth;
    for (size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * kWidth; i < a.n; i += step) {
        Floats sum;
        if constexpr (kPieces > 0) {
            Floats x[kPieces];
#pragma unroll
            for (int r = 0; r < kPieces; r++) { x[r] = load_piece<kPiecesBf16>(a, r, i); }
#pragma unroll
            for (int gap = 1; gap < kPieces; gap *= 2) {
#pragma unroll
                for (int r = 0; r < kPieces; r += 2 * gap) { add_to(&x[r], x[r + gap]); }
            }
            sum = x[0];
        } else {
            Floats stack[kMaxPieceLevels];
            int height = 0;
            for (int r = 0; r < pieces; r++) {
                sum = load_piece<kPiecesBf16>(a, r, i);
                for (int bits = r; bits & 1; bits >>= 1) { add_to(&sum, stack[--height]); }
                stack[height++] = sum;
            }
            while (--height > 0) { add_to(&stack[height - 1], stack[height]); }
            sum = stack[0];
        }
        for (int k = a.num_chain - 1; k >= 0; k--) {
            add_to(&sum, load_floats(a.chain[k], i, a.n));
        }
        grad_store(a.out, i, a.n, sum);
    }
}

// The kernel for this number of pieces.
template <bool kPiecesBf16> static auto lane_sum_for(int pieces) {
    switch (pieces) {
        case 1: return lane_sum_kernel<1, kPiecesBf16>;
        case 2: return lane_sum_kernel<2, kPiecesBf16>;
        case 4: return lane_sum_kernel<4, kPiecesBf16>;
        case 8: return lane_sum_kernel<8, kPiecesBf16>;
        default: return lane_sum_kernel<0, kPiecesBf16>;
    }
}

static void lane_sum(const LaneSum& a, Stream stream) {
    OpScope scope(a, stream);
    if (a.n % kChunk != 0 || a.num_pieces < 1 || a.num_pieces > 1 << (kMaxPieceLevels - 1)) {
        die("lane_sum: %zu elements in each of %d pieces", a.n, a.num_pieces);
    }
    const size_t needed = a.n / (kLaneThreads * kWidth);
    const int blocks = (int)std::min(needed, (size_t)device_sm_count * 8);
    auto kernel = a.pieces.is_bf16 ? lane_sum_for<true>(a.num_pieces) : lane_sum_for<false>(a.num_pieces);
    kernel<<<blocks, kLaneThreads, 0, stream>>>(a);
}

// A block sums the squares of a chunk: in fp32 within a thread (32 elements), in double from there on.
constexpr int kNormThreads = 256;

template <bool kBf16>
__global__ void __launch_bounds__(kNormThreads) square_sums_kernel(SquareSums a) {
    __shared__ double shared[kWarp];
    constexpr int kVectors = kChunk / (kNormThreads * kWidth);
    static_assert(kVectors * kNormThreads * kWidth == kChunk, "a chunk is whole vectors of every thread");
    const char* data = (const char*)a.grads.data + blockIdx.y * a.rows.grads;
    const size_t position = a.grads.first + blockIdx.y * a.rows.first;
    const size_t first = blockIdx.x * kChunk + threadIdx.x * kWidth;
    Floats x[kVectors];                                 // all are asked for before the first is used
#pragma unroll
    for (int u = 0; u < kVectors; u++) {
        const size_t i = first + (size_t)u * kNormThreads * kWidth;
        x[u] = load_stored(data, kBf16, i, a.n, a.grads.key, position);
    }
    float squares = 0.0f;
#pragma unroll
    for (int u = 0; u < kVectors; u++) {
        float sum = 0.0f;       // a vector's squares meet before the larger sum: less is rounded away
        for (int k = 0; k < kWidth; k++) { sum = fmaf(x[u].at[k], x[u].at[k], sum); }
        squares += sum;
    }
    const double sum = block_sum((double)squares, shared);
    if (threadIdx.x == 0) { a.sums[(size_t)blockIdx.y * gridDim.x + blockIdx.x] = sum; }
}

static void square_sums(const SquareSums& a, Stream stream) {
    OpScope scope(a, stream);
    if (a.n % kChunk != 0) { die("square_sums: %zu elements are not whole chunks", a.n); }
    auto kernel = a.grads.is_bf16 ? square_sums_kernel<true> : square_sums_kernel<false>;
    const dim3 grid((unsigned)(a.n / kChunk), a.rows.count);
    kernel<<<grid, kNormThreads, 0, stream>>>(a);
}

// Takes the sums that this update's decision needs, and decides, on the device; the host reads the result a
// step later. One block. Which thread adds a chunk or a lane depends only on its number in the job.
constexpr int kDecisionThreads = 1024;

__global__ void update_decision_kernel(UpdateDecision a) {
    __shared__ double shared[kWarp];
    double sum = 0.0, loss = 0.0;
    size_t before = 0;                                  // chunks of earlier buckets
    for (int k = 0; k < a.num_ranges; k++) {
        const ChunkRange range = a.ranges[k];
        const size_t skip = (threadIdx.x + blockDim.x - before % blockDim.x) % blockDim.x;
        for (size_t c = skip; c < range.chunks; c += blockDim.x) {
            const char* record = a.records + c / range.per_rank * a.record_bytes;
            sum += ((const double*)record)[range.at + c % range.per_rank];
        }
        before += range.chunks;
    }
    for (int g = threadIdx.x; g < a.ranks * a.lanes; g += blockDim.x) {
        const int rank = g / a.lanes, lane = g % a.lanes;
        loss += ((const float*)(a.records + (size_t)rank * a.record_bytes + a.lanes_at))[lane];
    }
    sum = block_sum(sum, shared);
    loss = block_sum(loss, shared);
    if (threadIdx.x > 0) { return; }
    *a.loss = (float)loss;
    decide_update(a.state, a.policy, a.max_norm, sum, (float)loss);
}

static void update_decision(const UpdateDecision& a, Stream stream) {
    OpScope scope(a, stream);
    update_decision_kernel<<<1, kDecisionThreads, 0, stream>>>(a);
}

// == 6.8 adamw, muon ==
// Both compute with the master copies, or with the parameters where there are none. The master copy of a bf16
// parameter is the parameter and 16 more bits beside it (rand.h).
constexpr int kUpdateThreads = 256;

// Elements [i, i + kWidth) of n. master: null if there are no copies.
template <class Param>
__device__ __forceinline__ Floats load_weights(const Param* params, const masterX* master, size_t i,
                                               size_t n) {
    const Pack<Param> weights = load(params, i, n);
    if (!master) { return to_floats(weights); }
    const Pack<masterX> kept = load(master, i, n);
    Floats p;
    for (int k = 0; k < kWidth; k++) {
        uint16_t upper;
        memcpy(&upper, &weights.data[k], sizeof(upper));
        p.at[k] = sizeof(masterX) == 2 ? master_join(upper, (uint16_t)kept.data[k]) : (float)kept.data[k];
    }
    return p;
}

// Rounds to 16 bits without losing small steps; fp32 stays as it is. x.at[k] draws as number position + k.
template <class X>
__device__ __forceinline__ Pack<X> round_stochastic(const Floats& x, const RoundKey& key, size_t position) {
    Pack<X> rounded = to_pack<X>(x);
    if (sizeof(X) == 2) {
        const Draws draws = round_draws(key, position);
        for (int k = 0; k < kWidth; k++) { store_stochastic(&rounded.data[k], x.at[k], draws.at[k]); }
    }
    return rounded;
}
template <class StateX>
__device__ __forceinline__ void store_state(StateX* state, size_t i, size_t n, const Floats& x, RoundKey key,
                                            uint32_t tensor, size_t position) {
    key.tensor = tensor;
    store(state, i, n, round_stochastic<StateX>(x, key, position));
}

// Rounds to the parameter's type: to nearest where there is a master copy, else stochastically.
template <class Param>
__device__ __forceinline__ void store_weights(Param* params, masterX* master, size_t i, size_t n,
                                              const Floats& p, const RoundKey& key, size_t position) {
    if (!master) { return store(params, i, n, round_stochastic<Param>(p, key, position)); }
    Pack<Param> weights = to_pack<Param>(p);
    Pack<masterX> kept;
    for (int k = 0; k < kWidth; k++) {
        uint16_t *upper = (uint16_t*)&weights.data[k], *lower = (uint16_t*)&kept.data[k];
        if (sizeof(masterX) == 2) { master_split(p.at[k], upper, lower); }
        else { kept.data[k] = (masterX)p.at[k]; }
    }
    store(master, i, n, kept);
    store(params, i, n, weights);
}

// The grid for `rows` rows of n elements, a row for each blockIdx.y. Two blocks an SM are fastest on an H200.
static dim3 update_blocks(const char* op, size_t n, size_t first, int rows) {
    if (n % 8 != 0 || first % 8 != 0) {
        die("%s: %zu elements from number %zu on: both must be multiples of 8", op, n, first);
    }
    const size_t needed = ceil_div(n, (size_t)kUpdateThreads * kWidth);
    return dim3((unsigned)std::min(needed, (size_t)ceil_div(device_sm_count * 2, rows)), rows);
}

// AdamW:
// g = grad*grad_scale;  m = m + (1-beta1) (g - m);  v = beta2 v + (1-beta2) g^2;
// p = p (1 - lr wd) - lr/(1-beta1^t) m / (sqrt(v)/sqrt(1-beta2^t) + eps), rounded in the order in which
// PyTorch's AdamW rounds (its foreach form), constants taken in double: from equal gradients, equal weights.
// A launch for each kind of bucket, of all layers at once; p is the master copy, or the parameter itself
// (fp32), or the 16-bit parameter, rounded stochastically. Gaps between tensors are zeros and stay zeros.
// Param: floatX or float. StateX, of m and v: float or bf16.
template <class Param, bool kGradsBf16, bool kMaster, class StateX>
__global__ void __launch_bounds__(kUpdateThreads) adamw_kernel(AdamW a) {
    if (a.state->skip) { return; }

    // The factors of this step, in double: t is on the device, so the host cannot prepare them.
    __shared__ float shared[2];
    if (threadIdx.x == 0) {
        shared[0] = (float)(-a.lr / (1.0 - power(a.beta1, a.state->t)));
        shared[1] = (float)sqrt(1.0 - power(a.beta2, a.state->t));
    }
    __syncthreads();
    const float minus_rate = shared[0], v_correction = shared[1], grad_scale = a.state->grad_scale;
    const float m_part = (float)(1.0 - a.beta1), v_part = (float)(1.0 - a.beta2), v_keep = (float)a.beta2,
                eps = (float)a.eps, decay = (float)(1.0 - a.lr * a.weight_decay);

    const int row = blockIdx.y;
    Param* params = (Param*)((char*)a.params + row * a.rows.params);
    const void* grads = (const char*)a.grads.data + row * a.rows.grads;
    masterX* master = kMaster ? a.master + row * a.n : nullptr;
    StateX *ms = (StateX*)a.m.data + row * a.n, *vs = (StateX*)a.v.data + row * a.n;
    const size_t first = row * a.rows.first;
    const size_t step = (size_t)gridDim.x * blockDim.x * kWidth;
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * kWidth;
    for (; i < a.n; i += step) {
        const Floats g = load_stored(grads, kGradsBf16, i, a.n, a.grads.key, a.grads.first + first);
        Floats m = load_floats(ms, i, a.n), v = load_floats(vs, i, a.n);
        Floats p = load_weights(params, master, i, a.n);

        const float p_keep = i < a.decays ? decay : 1.0f;
#pragma unroll
        for (int k = 0; k < kWidth; k++) {
            const float grad = g.at[k] * grad_scale;
            m.at[k] = fmaf(m_part, grad - m.at[k], m.at[k]);
            v.at[k] = fmaf(v_part, grad * grad, __fmul_rn(v.at[k], v_keep));
            const float update = m.at[k] / (sqrtf(v.at[k]) / v_correction + eps);
            p.at[k] = fmaf(minus_rate, update, __fmul_rn(p.at[k], p_keep));
        }

        const size_t position = a.first + first + i;
        store_state(ms, i, a.n, m, a.key, kRoundM, position);
        store_state(vs, i, a.n, v, a.key, kRoundV, position);
        store_weights(params, master, i, a.n, p, a.key, position);
    }
}
template <bool kGradsBf16, class StateX> static auto adamw_kernel_of(const AdamW& a) {
    return a.params_fp32 ? adamw_kernel<float, kGradsBf16, false, StateX>
           : a.master    ? adamw_kernel<floatX, kGradsBf16, kLowPrecision, StateX>
                         : adamw_kernel<floatX, kGradsBf16, false, StateX>;
}

static void adamw_update(const AdamW& a, Stream stream) {
    OpScope scope(a, stream);
    const dim3 blocks = update_blocks("adamw_update", a.n, a.first, a.rows.count);
    typedef __nv_bfloat16 bf16;
    auto kernel = a.grads.is_bf16
                      ? (a.m.is_bf16 ? adamw_kernel_of<true, bf16>(a) : adamw_kernel_of<true, float>(a))
                      : (a.m.is_bf16 ? adamw_kernel_of<false, bf16>(a) : adamw_kernel_of<false, float>(a));
    kernel<<<blocks, kUpdateThreads, 0, stream>>>(a);
}

// Muon, as ops.h has it: momentum, then Newton-Schulz steps by cuBLASLt, then the update of the weights.
// One call multiplies all matrices of a shape: q, k, v and attproj of all layers (124M: 48), fc (12), fcproj
// (12). Only the last product takes a call for each part, because it stores into the buckets. Both additions
// are cuBLAS's C matrix, with a factor. In column-major terms, with x stored (rows,cols):
//     wide or square   gram = x x^T (k = rows)    G = X^T X    x' = a x + poly x    X' = a X + X P
//     tall             gram = x^T x (k = cols)    G = X X^T    x' = a x + x poly    X' = a X + P X
//     poly = b gram + c gram gram
// A step of a matrix of (m,n), m <= n, takes 4 m m n + 2 m^3 FLOPs: 60 C^3 for a layer, so 1.63 TFLOPs for
// 124M's five steps. The forward and backward of 65,536 tokens take some 53.
template <class StateX>
__global__ void __launch_bounds__(kUpdateThreads) muon_momentum_kernel(MuonMomentum a) {
    if (a.state->skip) { return; }
    const float part = (float)(1.0 - a.momentum), ahead = (float)a.momentum, scale = a.state->grad_scale;
    const int row = blockIdx.y;
    const void* grads = (const char*)a.grads.data + row * a.rows.grads;
    StateX* ms = (StateX*)a.m.data + row * a.n;
    const size_t first = row * a.rows.first, step = (size_t)gridDim.x * blockDim.x * kWidth;
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * kWidth;
    for (; i < a.n; i += step) {
        const Floats g = load_stored(grads, a.grads.is_bf16, i, a.n, a.grads.key, a.grads.first + first);
        Floats m = load_floats(ms, i, a.n), update;
        for (int k = 0; k < kWidth; k++) {
            const float grad = g.at[k] * scale;
            m.at[k] = fmaf(part, grad - m.at[k], m.at[k]);
            update.at[k] = fmaf(ahead, m.at[k] - grad, grad);
        }
        store_state(ms, i, a.n, m, a.key, kRoundM, a.first + first + i);
        store(a.update + row * a.update_row, i, a.n, to_pack<muonX>(update));
    }
}

static void muon_momentum(const MuonMomentum& a, Stream stream) {
    OpScope scope(a, stream);
    const dim3 blocks = update_blocks("muon_momentum", a.n, a.grads.first, a.rows.count);
    auto kernel = a.m.is_bf16 ? muon_momentum_kernel<__nv_bfloat16> : muon_momentum_kernel<float>;
    kernel<<<blocks, kUpdateThreads, 0, stream>>>(a);
}

// x = inp / |inp| takes two kernels. In each, a block has a chunk of matrix number blockIdx.y, n elements.
// The first stores the chunk's sum of squares, in double, because gradients may be as small as bf16's least.
__global__ void __launch_bounds__(kUpdateThreads)
    muon_sums_kernel(double* sums /*(count,chunks)*/, const muonX* inp, size_t n,
                     const __grid_constant__ MuonPlaces places) {
    __shared__ double shared[kWarp];
    const size_t end = min(n, (blockIdx.x + 1) * kChunk);
    inp += places.of(blockIdx.y);
    double sum = 0.0;
    for (size_t i = blockIdx.x * kChunk + threadIdx.x * kWidth; i < end; i += blockDim.x * kWidth) {
        const Floats x = load_floats(inp, i, n);
        for (int k = 0; k < kWidth; k++) { sum += (double)x.at[k] * x.at[k]; }
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) { sums[(size_t)blockIdx.y * gridDim.x + blockIdx.x] = sum; }
}

// The second adds up the chunks' sums and divides. In `out` the matrices stand next to each other.
__global__ void __launch_bounds__(kUpdateThreads)
    muon_normalise_kernel(muonX* out /*(count,n)*/, const muonX* inp, const double* sums /*(count,chunks)*/,
                          size_t n, const __grid_constant__ MuonPlaces places) {
    __shared__ double shared[kWarp];
    inp += places.of(blockIdx.y);
    out += blockIdx.y * n;
    double sum = 0.0;
    for (unsigned c = threadIdx.x; c < gridDim.x; c += blockDim.x) {
        sum += sums[(size_t)blockIdx.y * gridDim.x + c];
    }
    sum = block_sum(sum, shared);
    const double factor = sum > 0.0 ? 1.0 / sqrt(sum) : 0.0;
    const size_t end = min(n, (blockIdx.x + 1) * kChunk);
    for (size_t i = blockIdx.x * kChunk + threadIdx.x * kWidth; i < end; i += blockDim.x * kWidth) {
        Floats x = load_floats(inp, i, n);
        for (int k = 0; k < kWidth; k++) { x.at[k] = (float)(x.at[k] * factor); }
        store(out, i, n, to_pack<muonX>(x));
    }
}

// Normalises into x. Then a step makes gram of x, poly of gram, and x' of both, in y; x and y change places.
static void muon_orthogonalise(const MuonOrthogonalise& a, Stream stream) {
    OpScope scope(a, stream);
    const bool tall = a.rows > a.cols;
    const int k = tall ? a.cols : a.rows, n = tall ? a.rows : a.cols, parts = a.places.parts;
    const size_t size = (size_t)a.rows * a.cols, square = (size_t)k * k;
    if (size % 8 != 0) {
        die("muon_orthogonalise: matrices of %d x %d: their size must be a multiple of 8", a.rows, a.cols);
    }
    const dim3 blocks((unsigned)ceil_div(size, kChunk), a.places.count());
    muon_sums_kernel<<<blocks, kUpdateThreads, 0, stream>>>(a.sums, a.inp, size, a.places);
    muon_normalise_kernel<<<blocks, kUpdateThreads, 0, stream>>>(a.x, a.inp, a.sums, size, a.places);

    // The algorithm is chosen for the matrices of the whole job and has no split-K. So the bits of a matrix
    // depend neither on the rank that multiplies it nor on the number of matrices in the call.
    auto multiply = [&](Gemm g, int parts) {
        g.d_type = g.inp_type = cuda_type(muonX());
        g.count = parts * a.places.layers, g.count_all = parts * a.layers_all;
        gemm(g, stream);
    };
    const float scale = tall ? (float)sqrt((double)a.rows / a.cols) : 1.0f;
    muonX *x = a.x, *y = a.y;
    for (int step = 0; step < a.steps; step++, std::swap(x, y)) {
        const bool is_last = step + 1 == a.steps;
        const float last = is_last ? scale : 1.0f;
        const float keep = last * (float)kMuonA, b = last * (float)kMuonB, c = last * (float)kMuonC;
        multiply({.d = a.gram, .a = x, .b = x, .m = k, .n = k, .k = n, .trans_a = !tall, .trans_b = tall,
                  .a_stride = size, .b_stride = size, .d_stride = square}, parts);
        multiply({.d = a.poly, .a = a.gram, .b = a.gram, .c = a.gram, .m = k, .n = k, .k = k, .alpha = c,
                  .beta = b, .a_stride = square, .b_stride = square, .c_stride = square, .d_stride = square},
                 parts);
        // x' goes into y, or at the end part by part to where the update is read
        for (int part = 0; part < (is_last ? parts : 1); part++) {
            const size_t first = (size_t)part * a.places.layers;
            const muonX *from = x + first * size, *poly = a.poly + first * square;
            multiply({.d = is_last ? a.out + a.places.at[part] : y, .a = tall ? poly : from,
                      .b = tall ? from : poly, .c = from, .m = a.cols, .n = a.rows, .k = k, .beta = keep,
                      .a_stride = tall ? square : size, .b_stride = tall ? size : square, .c_stride = size,
                      .d_stride = is_last ? a.places.stride : size}, is_last ? 1 : parts);
        }
    }
}

__global__ void __launch_bounds__(kUpdateThreads) muon_update_kernel(MuonUpdate a) {
    if (a.state->skip) { return; }
    const float keep = (float)(1.0 - a.lr * a.weight_decay), minus_rate = (float)-a.lr;
    const int row = blockIdx.y;
    floatX* params = (floatX*)((char*)a.params + row * a.rows.params);
    masterX* master = a.master ? a.master + row * a.n : nullptr;
    const size_t first = a.first + row * a.rows.first, step = (size_t)gridDim.x * blockDim.x * kWidth;
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * kWidth;
    for (; i < a.n; i += step) {
        const Floats update = load_floats(a.update + row * a.update_row, i, a.n);
        Floats p = load_weights(params, master, i, a.n);
        for (int k = 0; k < kWidth; k++) { p.at[k] = fmaf(minus_rate, update.at[k], p.at[k] * keep); }
        store_weights(params, master, i, a.n, p, a.key, first + i);
    }
}

static void muon_update(const MuonUpdate& a, Stream stream) {
    OpScope scope(a, stream);
    const dim3 blocks = update_blocks("muon_update", a.n, a.first, a.rows.count);
    muon_update_kernel<<<blocks, kUpdateThreads, 0, stream>>>(a);
}

// == 6.9 attention ==
// Self-attention of each head, straight on the packed output of the qkv linear layer:
//     S = Q K^T / sqrt(HS)     P = softmax(S) over the keys that the query sees     O = P V
// Mask (ops.h) says what a query sees: itself, nothing later, and earlier keys without a gap. A kernel comes
// for each of Hides: bounds take up to 11 registers more, and those from memory up to 27 in all.
// Forward:  qkv (B,T,NH+2*NKV,HS) -> out (B,T,NH,HS) =, lse (B,NH,T) = ln sum exp S.
// Backward: D = rowsum(dO * O)     P = exp(S - lse)     dS = P * (dO V^T - D)
//     dQ = dS K / sqrt(HS)     dK = dS^T Q / sqrt(HS)     dV = P^T dO     dqkv (B,T,NH+2*NKV,HS) =
//
// A group of NH / NKV heads of queries, neighbours, shares a head of K and V. Its dK and dV are sums over the
// group.
//
// Nothing of shape (T,T) is ever stored. A block owns rows of one side, queries or keys, and walks over tiles
// of the other side. The piece of S where the two meet lives in registers only. The backward computes P
// again, from S and lse.
//
//                 own a, b   other a, b   S = own a * other a^T   dP = own b * other b^T   sums
//     forward     Q          K, V         Q K^T                                            O += P V
//     backward    Q, dO      K, V         Q K^T                   dO V^T                   dQ += dS K
//     backward    K, V       Q, dO        K Q^T = S^T             V dO^T = dP^T            dK += dS^T Q
//                                                                                          dV += P^T dO
//
// The backward is one kernel, written for either side and launched for both. That costs 7 matrix products;
// a single pass with atomic additions into dQ needs 5. But here every output has one owner that sums in a
// fixed order, so two runs have the same bits, and no fp32 dQ is cleared, added to and converted.
//
// The launch for queries also computes {lse, D} of each query, and stores them for the launch for keys, in
// scratch (B,NH,padded_T). Tensor-core forms store lse * log2(e), and zeros behind T, as they copy whole
// tiles.
//
// There are three forms, from the simplest to the fastest:
//     plain       fp32 arithmetic on the ordinary cores: any type, any head size up to 512
//     mma.sync    tensor cores of sm_80 and later: 16 bits or TF32, head sizes up to 128, multiples of kWidth
//     sm90        Hopper's tensor cores and copy engine (wgmma, TMA): 16 bits, head sizes 48 64 80 96 112 128
// The last two are built from the same tile functions.


// The rows of one head in a tensor. head(i): those of the i-th head behind it.
template <class X> struct HeadRows {
    X* data;                    // (T,HS), `stride` elements from one row to the next
    size_t stride;
    int T, HS;
    __device__ __forceinline__ HeadRows head(int i) const { return {data + i * HS, stride, T, HS}; }
};
typedef HeadRows<const floatX> InputRows;

// What one side brings: {Q, dO} or {K, V}.
template <class Rows> struct Pair {
    Rows a, b;
    __device__ __forceinline__ Pair head(int i) const { return {a.head(i), b.head(i)}; }
};

enum class Own { Queries, Keys };

// Which of the earlier keys a mask may hide: none, those before a window, or those of other documents, too.
enum class Hides { Nothing, Window, Documents };

// Whether the rows of a tile, all together, see its columns: not one pair, some pairs, or all.
enum class Cover { None, Part, All };

// Rows a head of the backward's scratch: T, padded to whole tiles of every kernel.
LLMC_HD static inline size_t padded_T(int T) { return ((size_t)T + 127) / 128 * 128; }

// The work of a thread block: Shape::kOwned rows of one head on side kOwn, and a walk over the tiles of the
// other side, Shape::kTile rows each. The walk starts at the diagonal; it goes left if the block owns
// queries, down if it owns keys, as far as one of its rows sees:
//
//     diagonal | tiles that all rows see | `far` tiles that only some rows see, or see in part
//
// Only the two ends are masked; a causal mask has no far end. As every query sees itself, in the forward its
// maximum is finite from the first tile on. A block that owns keys walks over each query head of the group,
// one after the other, so its sums have a fixed order.
//
// A grid is (heads of a section, blocks of a head, sections). Blocks start in this order, x first, so in a
// section the longest walks come first. A section's K and V (32 heads at T=1024, HS=64) stay in the L2 while
// its blocks run, and short walks fill the end of the grid. The last section may have too many heads.
constexpr int kSectionBytes = 8 << 20;

template <Own kOwn, class Shape, Hides kHides> struct AttentionBlock {
    static constexpr bool kQueries = kOwn == Own::Queries;
    int T, NH, NKV, HS;
    Mask mask;                  // of row b; what kHides rules out, the compiler knows
    bool exists;
    int b;
    int h;                      // a head of queries: the block's own, or the first of the group
    int kv;                     // its head of keys and values
    int row0;                   // the first row of its own
    int tile0, tiles, far;      // of a head: the lowest tile of the walk; how many; of these, at its far end
    int steps;                  // of the walk: a tile each

    template <class Args>
    __device__ __forceinline__ explicit AttentionBlock(const Args& a)
        : T(a.T), NH(a.NH), NKV(a.NKV), HS(a.HS) {
        const int own_heads = kQueries ? NH : NKV, group = NH == NKV ? 1 : NH / NKV;
        const int bh = blockIdx.z * gridDim.x + blockIdx.x, head = bh % own_heads;
        exists = bh < a.B * own_heads;
        b = bh / own_heads;
        if (kHides == Hides::Window) { mask.window = a.mask.window; }
        if (kHides == Hides::Documents) {
            if (!exists) { return; }                        // nor do documents of this row
            mask = a.mask.row(b, T);
        }
        h = kQueries ? head : head * group;
        kv = kQueries && group > 1 ? head / group : head;
        const int blocks = gridDim.y, rank = blockIdx.y;    // 0: the longest walk
        row0 = (kQueries ? blocks - 1 - rank : rank) * Shape::kOwned;
        const Span top = sees(row0), bottom = sees(min(row0 + Shape::kOwned, T) - 1);
        const Span some = Span{top.first, bottom.last}.within(T);
        tile0 = some.first / Shape::kTile;
        tiles = ceil_div(some.last + 1, Shape::kTile) - tile0;
        if (kQueries) { far = bottom.first <= 0 ? 0 : ceil_div(bottom.first, Shape::kTile) - tile0; }
        else { far = top.last >= T - 1 ? 0 : tile0 + tiles - (top.last + 1) / Shape::kTile; }
        steps = tiles * (kQueries ? 1 : group);
    }

    // What one of the block's rows sees of the other side. Rows from T on do not count; documents lack them.
    __device__ __forceinline__ Span sees(int row) const {
        if (kHides == Hides::Documents) {
            __builtin_assume(mask.documents);
            row = min(row, T - 1);
        }
        return kQueries ? mask.keys(row) : mask.queries(row);
    }
    // What `rows` rows from `row` on see of a tile of `columns` columns from `column` on.
    __device__ __forceinline__ Cover cover(int row, int rows, int column, int columns) const {
        const Span top = sees(row), bottom = sees(row + rows - 1);
        const int last = column + columns - 1;
        if (column > bottom.last || last < top.first) { return Cover::None; }
        return column >= bottom.first && last <= top.last ? Cover::All : Cover::Part;
    }
    // Whether a tile lies at the far end. left: how many tiles of its head are still to come, and this one.
    __device__ __forceinline__ bool is_far(int left) const { return far > 0 && left <= far; }

    // Of a step: how many heads behind the walk's first its tile is, and the tile's first row.
    __device__ __forceinline__ int head(int it) const { return kQueries || it < tiles ? 0 : it / tiles; }
    __device__ __forceinline__ int row(int it) const {
        return (tile0 + (kQueries ? tiles - 1 - it : it - head(it) * tiles)) * Shape::kTile;
    }

    // A head's rows in qkv or dqkv (B,T,NH+2*NKV,HS), and in out or dout (B,T,NH,HS). In qkv Q's head is h,
    // K's is k_head, and V's lies NKV heads behind that.
    __device__ __forceinline__ int k_head() const { return NH + kv; }
    template <class X> __device__ __forceinline__ HeadRows<X> rows(X* data, int of_heads, int head) const {
        const size_t stride = (size_t)of_heads * HS;
        return {data + b * (T * stride) + (size_t)head * HS, stride, T, HS};
    }
    template <class X> __device__ __forceinline__ HeadRows<X> q(X* qkv) const {
        return rows(qkv, NH + 2 * NKV, h);
    }
    template <class X> __device__ __forceinline__ HeadRows<X> k(X* qkv) const {
        return rows(qkv, NH + 2 * NKV, k_head());
    }
    template <class X> __device__ __forceinline__ HeadRows<X> v(X* qkv) const { return k(qkv).head(NKV); }
    template <class X> __device__ __forceinline__ HeadRows<X> out(X* out) const { return rows(out, NH, h); }
    // What the block owns in the backward, and what it sees.
    __device__ __forceinline__ Pair<InputRows> own(const AttentionBackward& a) const {
        return kQueries ? Pair<InputRows>{q(a.qkv), out(a.dout)} : Pair<InputRows>{k(a.qkv), v(a.qkv)};
    }
    __device__ __forceinline__ Pair<InputRows> other(const AttentionBackward& a) const {
        return kQueries ? Pair<InputRows>{k(a.qkv), v(a.qkv)} : Pair<InputRows>{q(a.qkv), out(a.dout)};
    }
    // The part of head h in lse (B,NH,T), and in the backward's scratch (B,NH,padded_T).
    template <class X> __device__ __forceinline__ X* lse(X* lse) const {
        return lse + (size_t)(b * NH + h) * T;
    }
    __device__ __forceinline__ float2* stats(float* scratch) const {
        return (float2*)scratch + (b * NH + h) * padded_T(T);
    }
};

static size_t attention_backward_scratch_bytes(int B, int T, int NH) {
    return (size_t)B * NH * padded_T(T) * sizeof(float2);
}

// Launches a kernel of any form. maps: what only sm90 kernels take.
template <Own kOwn, class Shape, class Args, class... Maps>
static void attention_launch(void (*kernel)(Args, float, Maps...), const Args& a, size_t shared_bytes,
                             Stream stream, const Maps&... maps) {
    const int heads = a.B * (kOwn == Own::Queries ? a.NH : a.NKV), blocks = ceil_div(a.T, Shape::kOwned);
    const int most = std::max(1, kSectionBytes / 2 / (int)sizeof(floatX) / a.HS / a.T);
    const int sections = ceil_div(heads, most);
    if (a.T < 1 || heads < 1 || blocks > 65535 || sections > 65535) {
        die("attention: B=%d T=%d NH=%d; all must be positive, and at most 65535 blocks a head", a.B, a.T,
            a.NH);
    }
    constexpr size_t kMost = sizeof...(Maps) > 0 ? kSm90Shared : kPortableShared;
    if (shared_bytes > 0) { allow_shared_memory(kernel, shared_bytes, kMost); }
    const dim3 grid(ceil_div(heads, sections), blocks, sections);
    kernel<<<grid, Shape::kThreads, shared_bytes, stream>>>(a, 1.0f / sqrtf(a.HS), maps...);
}

// Functors that round an output: to floatX, or to FP8.
struct ToFloatX {
    __device__ __forceinline__ x128 operator()(const Floats& x) const { return to_pack<floatX>(x); }
};
struct ToFp8 {
    float scale;
    Fp8Counts counts = {};
    __device__ __forceinline__ Pack<uint8_t> operator()(const Floats& x) { return counts.round(x, scale); }
};

// Ends a warp's backward with one of its gradients: calls store(dqkv, round) for an output of floatX, or of
// FP8 bytes.
enum class Gradient { Q, K, V };
template <class Store>
__device__ __forceinline__ void store_gradient(const AttentionBackward& a, Gradient of, Store store) {
    if (!a.fp8 || (a.only_v && of != Gradient::V)) { return store(a.dqkv, ToFloatX()); }
    const uint32_t so_far = fp8_amax_so_far(a.stats);
    ToFp8 round = {a.tensor->scale};
    store(a.fp8, round);
    const uint2 of_warp = round.counts.of_warp();
    if (threadIdx.x % kWarp == 0) { fp8_count(a.stats, so_far, of_warp.x, of_warp.y); }
    if (blockIdx.x + blockIdx.y + blockIdx.z + threadIdx.x > 0) { return; }
    a.stats->elements += (of == Gradient::Q ? a.NH : a.NKV) * (size_t)a.B * a.T * a.HS;
}

// ---- plain: any element type and head size up to 512, fp32 arithmetic ----
// The shape of the maths, and what the other forms are held against: nothing is tiled, nothing overlaps. A
// warp owns one row and sees the rows of the other side 32 at a time, each lane one:
//     dots      lanes share the columns of 32 products; the sums then lie one a lane
//     softmax   of one row: maximum and sum over the lanes
//     add       lanes share the columns of the result; the 32 weights come from their lanes by shuffles
// The warp's rows and results lie in shared memory, and each lane touches only its own columns of them.
struct PlainShape { static constexpr int kOwned = 4, kThreads = kOwned * kWarp, kTile = kWarp; };
constexpr int kPlainMaxHeadSize = 512;
typedef float PlainRow[kPlainMaxHeadSize];

// A row as fp32.
__device__ __forceinline__ void plain_load(PlainRow& row, const InputRows& from, int at, int lane) {
    for (int d = lane; d < from.HS; d += kWarp) { row[d] = (float)from.data[at * from.stride + d]; }
}
template <class X, class Round = ToFloatX>
__device__ __forceinline__ void plain_store(const HeadRows<X>& to, int at, const PlainRow& row, float scale,
                                            int lane, Round&& round = {}) {
    for (int d = lane; d < to.HS; d += kWarp) {
        to.data[at * to.stride + d] = round(Floats{row[d] * scale}).data[0];
    }
}
__device__ __forceinline__ void plain_clear(PlainRow& row, int HS, int lane) {
    for (int d = lane; d < HS; d += kWarp) { row[d] = 0.0f; }
}

// Returns to lane j the product of `row` and row first + j of a matrix, or of its last row beyond the end.
__device__ __forceinline__ float plain_dots(const PlainRow& row, const InputRows& matrix, int first,
                                            int lane) {
    float result = 0.0f;
    for (int j0 = 0; j0 < kWarp; j0 += 8) {
        float part[8] = {};
        for (int d = lane; d < matrix.HS; d += kWarp) {
            for (int j = 0; j < 8; j++) {
                const int at = min(first + j0 + j, matrix.T - 1);
                part[j] += row[d] * (float)matrix.data[at * matrix.stride + d];
            }
        }
        __syncwarp();
        const float sum = __shfl_sync(0xFFFFFFFFu, warp_sums(part), lane % 8 * 4);
        if (lane / 8 == j0 / 8) { result = sum; }
    }
    return result;
}

// row = row * factor + the sum of rows first + j of a matrix, times lane j's weight.
__device__ __forceinline__ void plain_add(PlainRow& row, float factor, float weight, const InputRows& matrix,
                                          int first, int lane) {
    for (int d0 = 0; d0 < matrix.HS; d0 += kWarp) {
        const int d = min(d0 + lane, matrix.HS - 1);
        float sum = 0.0f;
#pragma unroll 8
        for (int j = 0; j < kWarp; j++) {
            sum += __shfl_sync(0xFFFFFFFFu, weight, j) *
                   (float)matrix.data[min(first + j, matrix.T - 1) * matrix.stride + d];
        }
        if (d0 + lane < matrix.HS) { row[d] = row[d] * factor + sum; }
    }
}

template <Hides kHides>
__global__ void __launch_bounds__(PlainShape::kThreads)
    attention_forward_plain_kernel(const AttentionForward a, float scale) {
    __shared__ PlainRow q[PlainShape::kOwned], o[PlainShape::kOwned];
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const AttentionBlock<Own::Queries, PlainShape, kHides> block(a);
    if (!block.exists) { return; }
    const int query = block.row0 + warp;
    if (query >= a.T) { return; }
    plain_load(q[warp], block.q(a.qkv), query, lane);
    plain_clear(o[warp], a.HS, lane);

    float row_max = -INFINITY, row_sum = 0.0f;              // row_sum: this lane's share
    const Span seen = block.sees(query);                    // its last is the query
    for (int k0 = max(seen.first, 0) / kWarp * kWarp; k0 <= seen.last; k0 += kWarp) {
        // S, and the softmax so far: earlier sums are rescaled to the new maximum
        const int key = k0 + lane;
        const float dot = plain_dots(q[warp], block.k(a.qkv), k0, lane);
        const float s = seen.has(key) ? dot * scale : -INFINITY;
        const float new_max = fmaxf(row_max, warp_max(s));
        const float correction = expf(row_max - new_max), p = expf(s - new_max);
        row_max = new_max;
        row_sum = row_sum * correction + p;

        // O += P V
        plain_add(o[warp], correction, p, block.v(a.qkv), k0, lane);
    }
    const float sum = warp_sum(row_sum);
    plain_store(block.out(a.out), query, o[warp], 1.0f / sum, lane);
    if (lane == 0) { block.lse(a.lse)[query] = row_max + logf(sum); }
}

template <Own kOwn, Hides kHides>
__global__ void __launch_bounds__(PlainShape::kThreads)
    attention_backward_plain_kernel(const AttentionBackward a, float scale) {
    constexpr bool kQueries = kOwn == Own::Queries;
    __shared__ PlainRow own_a[PlainShape::kOwned], own_b[PlainShape::kOwned];
    __shared__ PlainRow grad_a[PlainShape::kOwned], grad_b[PlainShape::kOwned];     // not yet scaled
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const AttentionBlock<kOwn, PlainShape, kHides> block(a);
    if (!block.exists) { return; }
    const int row = block.row0 + warp;
    if (row >= a.T) { return; }
    const Pair<InputRows> own = block.own(a);
    plain_load(own_a[warp], own.a, row, lane);
    plain_load(own_b[warp], own.b, row, lane);
    plain_clear(grad_a[warp], a.HS, lane);
    if (!kQueries) { plain_clear(grad_b[warp], a.HS, lane); }

    // The query's {lse, D}, also for the launch for keys
    float2 stats;
    if (kQueries) {
        const InputRows out = block.out(a.out);
        float sum = 0.0f;
        for (int d = lane; d < a.HS; d += kWarp) {
            sum += (float)out.data[row * out.stride + d] * own_b[warp][d];
        }
        stats = make_float2(block.lse(a.lse)[row], warp_sum(sum));
        if (lane == 0) { block.stats(a.scratch)[row] = stats; }
    }

    const Span seen = block.sees(row).within(a.T);
    for (int head = 0; head * block.tiles < block.steps; head++) {
        const Pair<InputRows> other = block.other(a).head(head);
        const float2* all_stats = block.stats(a.scratch) + head * padded_T(a.T);
        for (int first = seen.first / kWarp * kWarp; first <= seen.last; first += kWarp) {
            // P, dP and dS
            if (!kQueries) { stats = all_stats[min(first + lane, a.T - 1)]; }
            const float s = plain_dots(own_a[warp], other.a, first, lane) * scale;
            const float dp = plain_dots(own_b[warp], other.b, first, lane);
            const float p = seen.has(first + lane) ? expf(s - stats.x) : 0.0f;
            const float ds = p * (dp - stats.y);

            // dQ += dS K, or dV += P^T dO and dK += dS^T Q
            if (!kQueries) { plain_add(grad_b[warp], 1.0f, p, other.b, first, lane); }
            plain_add(grad_a[warp], 1.0f, ds, other.a, first, lane);
        }
    }
    store_gradient(a, kQueries ? Gradient::Q : Gradient::K, [&](auto* dqkv, auto&& round) {
        plain_store(kQueries ? block.q(dqkv) : block.k(dqkv), row, grad_a[warp], scale, lane, round);
    });
    if (kQueries) { return; }
    store_gradient(a, Gradient::V, [&](auto* dqkv, auto&& round) {
        plain_store(block.v(dqkv), row, grad_b[warp], 1.0f, lane, round);
    });
}

// ---- tile functions: what a warp does with its part of S, P, dP and dS, for mma.sync and sm90 alike ----
// A tile has 16 * kGroups rows and 8 * kN columns, in the accumulators of the tensor cores. Its rows are of
// the side that the block owns, its columns of the other. PTX ISA, "Matrix Fragments for mma.m16n8k16" and,
// for wgmma, "Register Fragments for wgmma.mma_async.m64nNk16": with g = lane / 4 and c = 2 * (lane % 4), a
// lane has of each 16 rows and 8 columns the elements (g,c) (g,c+1) (g+8,c) (g+8,c+1).
//
// In the code, m counts the groups of 16 rows, n the accumulators along a row (8 columns each), i a lane's
// four elements of an accumulator, and r its two rows, g and g + 8.
template <int kGroups, int kN> using Tile = float[kGroups][kN][4];

__device__ __forceinline__ int tile_row(int m, int i, int lane) { return m * 16 + lane / 4 + i / 2 * 8; }
__device__ __forceinline__ int tile_column(int n, int i, int lane) { return n * 8 + lane % 4 * 2 + i % 2; }

// f(element, m, n, i) for each element of a lane.
template <int kGroups, int kN, class F>
__device__ __forceinline__ void for_tile(Tile<kGroups, kN>& tile, F f) {
#pragma unroll
    for (int n = 0; n < kN; n++) {
#pragma unroll
        for (int m = 0; m < kGroups; m++) {
            for (int i = 0; i < 4; i++) { f(tile[m][n][i], m, n, i); }
        }
    }
}

// f(m, r) for each row of a lane.
template <int kGroups, class F> __device__ __forceinline__ void for_rows(F f) {
    for (int m = 0; m < kGroups; m++) {
        for (int r = 0; r < 2; r++) { f(m, r); }
    }
}

// S becomes -inf where the query does not see the key, so that P is 0 there. row0, column0: what the tile's
// first row and column are in the sequence. kFar: the tile lies at the walk's far end, so a row's near bound,
// which is its own position, plays no part.
template <bool kFar = false, int kGroups, int kN, class Block>
__device__ __forceinline__ void hide(Tile<kGroups, kN>& s, const Block& block, int row0, int column0,
                                     int lane) {
    Span seen[kGroups][2];                                  // by the lane's rows
    bool all = true;
    for_rows<kGroups>([&](int m, int r) {
        seen[m][r] = block.sees(row0 + tile_row(m, 2 * r, lane));
        all = all && seen[m][r].first <= column0 && seen[m][r].last >= column0 + 8 * kN - 1;
    });
    if (__all_sync(0xFFFFFFFFu, all)) { return; }
    for_tile(s, [&](float& x, int m, int n, int i) {
        const int column = column0 + tile_column(n, i, lane);
        const bool low = (!kFar || Block::kQueries) && column < seen[m][i / 2].first;
        const bool high = (!kFar || !Block::kQueries) && column > seen[m][i / 2].last;
        x = low | high ? -INFINITY : x;
    });
}

template <int kGroups, int kN>
__device__ __forceinline__ void scale_rows(Tile<kGroups, kN>& acc, const float (&factor)[kGroups][2]) {
    for_tile(acc, [&](float& x, int m, int, int i) { x *= factor[m][i / 2]; });
}

// Sum or maximum over the four lanes that share the rows of an accumulator.
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
    return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}

// The softmax of rows whose columns come tile by tile.
template <int kGroups> struct OnlineSoftmax {
    float max[kGroups][2];          // what is subtracted before the exponential
    float sum[kGroups][2];          // this lane's share
    float correction[kGroups][2];   // from the maximum before to this one

    __device__ __forceinline__ OnlineSoftmax() {
        for_rows<kGroups>([&](int m, int r) { max[m][r] = -INFINITY, sum[m][r] = 0.0f; });
    }

    // S becomes P = exp((S - max) * scale). True: what was summed before has to be scaled by `correction`.
    // kLazy: max follows the true maximum only when some row of the warp is more than 2^8 above it. P <= 256
    // costs no accuracy, and most tiles then leave O alone (2 to 4 % of the sm90 kernel).
    template <bool kLazy, int kN>
    __device__ __forceinline__ bool add(Tile<kGroups, kN>& s, float scale_log2) {
        // 2^8 in units of S at head size 64, where scale is 1/8; 2^6 at 128, 2^9 at 48. A constant: a
        // division at run time branches, and the compiler put it between the first products and their commit,
        // where ptxas then added a fence (C7519)
        constexpr float kSlack = 8.0f / (0.125f * kLog2e);
        float new_max[kGroups][2];
        bool above = false;
        for_rows<kGroups>([&](int m, int r) {
            float row_max = max[m][r];
            for (int n = 0; n < kN; n++) {
                row_max = fmaxf(row_max, fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
            }
            new_max[m][r] = quad_max(row_max);
            above = above || new_max[m][r] - max[m][r] > kSlack;
        });
        const bool rescale = !kLazy || __any_sync(0xFFFFFFFFu, above);
        if (rescale) {
            for_rows<kGroups>([&](int m, int r) {
                correction[m][r] = exp2_fast((max[m][r] - new_max[m][r]) * scale_log2);
                max[m][r] = new_max[m][r];
                sum[m][r] *= correction[m][r];
            });
        }
        for_rows<kGroups>([&](int m, int r) {
            const float max_log2 = max[m][r] * scale_log2;
            for (int n = 0; n < kN; n++) {
                float &x = s[m][n][2 * r], &y = s[m][n][2 * r + 1];
                x = exp2_fast(fmaf(x, scale_log2, -max_log2));
                y = exp2_fast(fmaf(y, scale_log2, -max_log2));
                sum[m][r] += x + y;
            }
        });
        return rescale;
    }

    // Divides O, whose rows start at row0, by the sums, and stores lse.
    __device__ __forceinline__ void finish(float (&factor)[kGroups][2], float* lse, int row0, int T,
                                           float scale, int lane) const {
        for_rows<kGroups>([&](int m, int r) {
            const float total = quad_sum(sum[m][r]);
            const int row = row0 + tile_row(m, 2 * r, lane);
            factor[m][r] = 1.0f / total;
            if (lane % 4 == 0 && row < T) { lse[row] = max[m][r] * scale + logf(total); }
        });
    }
};

// {lse * log2(e), D} of the query that element (m, n, i) of a tile belongs to.
template <Own kOwn, int kGroups> struct QueryStats {
    float2 rows[kGroups][2];        // where rows are queries: in registers for the whole walk
    const float2* columns;          // where columns are: in shared memory, from the lane's first column on

    __device__ __forceinline__ float2 of(int m, int n, int i) const {
        if constexpr (kOwn == Own::Queries) { return rows[m][i / 2]; }
        const float4 two = *(const float4*)(columns + n * 8);
        return i % 2 == 0 ? make_float2(two.x, two.y) : make_float2(two.z, two.w);
    }

    // Computes these for rows from row0 on, two lanes a row: D = rowsum(dO * O). Stores them for the launch
    // for keys, as zeros for rows from T on. P is exp2(0) = 1 there, and is multiplied by rows of zeros only.
    template <int kHS, class Block>
    __device__ __forceinline__ void load_rows(const Block& block, const AttentionBackward& a, int row0,
                                              int lane) {
        const InputRows out = block.out(a.out), dout = block.out(a.dout);
#pragma unroll
        for (int m = 0; m < kGroups; m++) {
            const int row = row0 + m * 16 + lane / 2;
            float sum = 0.0f, lse2 = 0.0f;
            if (row < a.T) {
#pragma unroll
                for (int chunk = lane % 2; chunk < kHS / kWidth; chunk += 2) {
                    const Floats x = load_floats(out.data + row * out.stride, chunk * kWidth, out.HS);
                    const Floats y = load_floats(dout.data + row * dout.stride, chunk * kWidth, out.HS);
                    for (int k = 0; k < kWidth; k++) { sum += x.at[k] * y.at[k]; }
                }
                lse2 = block.lse(a.lse)[row] * kLog2e;
            }
            sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
            const bool stores = lane % 2 == 0 && row < padded_T(a.T);
            if (stores) { block.stats(a.scratch)[row] = make_float2(lse2, sum); }
            for (int r = 0; r < 2; r++) {
                const int source = 2 * tile_row(0, 2 * r, lane);
                rows[m][r] = make_float2(__shfl_sync(0xFFFFFFFFu, lse2, source),
                                         __shfl_sync(0xFFFFFFFFu, sum, source));
            }
        }
    }
};

// S becomes P = exp(S - lse).
template <int kGroups, int kN, class Stats>
__device__ __forceinline__ void probabilities(Tile<kGroups, kN>& s, const Stats& stats, float scale_log2) {
    for_tile(s, [&](float& x, int m, int n, int i) {
        x = exp2_fast(fmaf(x, scale_log2, -stats.of(m, n, i).x));
    });
}

// dP becomes dS = P * (dP - D).
template <int kGroups, int kN, class Stats>
__device__ __forceinline__ void score_gradients(Tile<kGroups, kN>& dp, const Tile<kGroups, kN>& p,
                                                const Stats& stats) {
    for_tile(dp, [&](float& x, int m, int n, int i) { x = p[m][n][i] * (x - stats.of(m, n, i).y); });
}

// A tile, rounded, as the A operand of the next product: two neighbouring accumulators of 16 bits are one
// (16,16). So P of O += P V and dS of dQ += dS K never leave the registers, and neither do P^T and dS^T of a
// block that owns keys. TF32: see mma_times_columns.
template <int kGroups, int kN, int kK>
__device__ __forceinline__ void to_fragments(uint32_t (&a)[kGroups][kK][4], const Tile<kGroups, kN>& acc) {
    static_assert(kK * kMmaK == kN * 8, "as many columns");
#pragma unroll
    for (int m = 0; m < kGroups; m++) {
#pragma unroll
        for (int n = 0; n < kN; n++) {
            const float (&x)[4] = acc[m][n];
            if constexpr (sizeof(floatX) == 2) {
                a[m][n / 2][n % 2 * 2] = pack_pair(x[0], x[1]);
                a[m][n / 2][n % 2 * 2 + 1] = pack_pair(x[2], x[3]);
            } else {
                for (int i = 0; i < 4; i++) { a[m][n][i % 2 * 2 + i / 2] = to_tf32(x[i]); }
            }
        }
    }
}

// How a tile of kHS columns lies in shared memory: element (row, column) at Layout::at. Padded: rows are 16
// bytes longer, so the 16-byte chunks of 8 consecutive rows start in 8 different groups of banks. ldmatrix
// then has no conflicts, and every offset is a constant. Swizzled, as TMA and wgmma have it: chunk c of row r
// sits at chunk c ^ (r % 8).
template <int kHS> struct Padded {
    static constexpr int kStride = kHS + kWidth;
    static __device__ __forceinline__ int at(int row, int column) { return row * kStride + column; }
};
struct Swizzled {
    static __device__ __forceinline__ int at(int row, int column) {
        return row * 64 + (column ^ (row % 8 * 8));
    }
};

// Stores the warp's tile times `factor`, rounded by `round`, to rows row0.. of a head. The tile goes through
// the warp's own rows of shared memory (`staging`), so that global stores are vectors of whole rows.
template <class Layout, class X, int kGroups, int kN, class Round = ToFloatX>
__device__ __forceinline__ void store_tile(const HeadRows<X>& to, int row0, floatX* staging,
                                           const Tile<kGroups, kN>& acc, float factor, int lane,
                                           Round&& round = {}) {
    typedef std::conditional_t<sizeof(X) == 1, uint16_t,
                               std::conditional_t<sizeof(X) == 2, uint32_t, float2>> Two;
    X* rows = (X*)staging;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < kGroups; m++) {
#pragma unroll
        for (int n = 0; n < kN; n += kWidth / 4) {
            Floats x;
            for (int k = 0; k < kWidth; k++) { x.at[k] = acc[m][n + k / 4][k % 4] * factor; }
            const Pack<X> rounded = round(x);
            Two twos[kWidth / 2];
            memcpy(twos, &rounded, sizeof(rounded));
            for (int k = 0; k < kWidth; k += 2) {
                *(Two*)(rows + Layout::at(tile_row(m, k % 4, lane), tile_column(n + k / 4, 0, lane))) =
                    twos[k / 2];
            }
        }
    }
    __syncwarp();
    constexpr int kChunks = 8 * kN / kWidth;                // of a row
#pragma unroll
    for (int i = lane; i < 16 * kGroups * kChunks; i += kWarp) {
        const int row = i / kChunks, column = i % kChunks * kWidth;
        if (row0 + row < to.T && column < to.HS) {
            *(PackWord<X>*)(to.data + (row0 + row) * to.stride + column) =
                *(const PackWord<X>*)(rows + Layout::at(row, column));
        }
    }
}

// ---- mma.sync: tensor cores of sm_80 and later ----
// A block is 4 warps and owns kOwned = 4 * 16 * kGroups rows, 16 * kGroups a warp; the other side comes in
// tiles of kTile rows, in two stages. Every thread starts copies (cp.async) that land while it calculates:
//
//     copies in flight | Q, K0 V0 | K1 V1                       | K2 V2                       | K3 V3 ...
//     into stage       |   0      |   1                         |   0                         |   1
//     4 warps          |          | S0 | softmax | O += P0 V0   | S1 | softmax | O += P1 V1   | S2 ...
//                                 ^ wait_group 0, barrier       ^ the same                    ^
//
// At the top of a step each thread waits for its own copies. The barrier behind that says two things at
// once: the tile of this step has landed for everybody, and everybody is done with the tile before, into
// whose stage the next copies go.
//
// Kernels exist for head sizes kHS of 32, 64, 96 and 128. A head size between two of them takes the larger:
// its missing columns are zeros in shared memory, and are not stored.
//
// All of it is written for floatX of 16 bits and of 32. An fp32 operand is rounded to TF32 (10 bits after the
// point) on its way from shared memory to the tensor core, so FP32 builds come here only with -f 1.

// Head size, groups of 16 rows a warp, rows of a tile, and blocks on an SM, which limits the registers (255 a
// thread at 2 blocks, 168 at 3). Two groups halve a product's reads from shared memory, but accumulators take
// HS / 2 registers a group, and those of dK and dV twice that.
template <int kHeadSize, int kRowGroups, int kTileRows, int kBlocks> struct MmaShape {
    static constexpr int kHS = kHeadSize, kGroups = kRowGroups, kTile = kTileRows, kMinBlocks = kBlocks;
    static constexpr int kWarps = 4, kThreads = kWarps * kWarp;
    static constexpr int kRows = 16 * kGroups, kOwned = kWarps * kRows;         // of a warp, of a block
};

// Starts the copy of rows row0.. of a head into a tile (kRows, kHS), Padded. Rows from T on and columns from
// HS on become zero; their addresses are not read.
template <class Shape, int kRows>
__device__ __forceinline__ void load_tile(floatX* tile, const InputRows& from, int row0) {
    constexpr int kThreads = Shape::kThreads, kChunks = Shape::kHS / kWidth, kTotal = kRows * kChunks;
#pragma unroll
    for (int first = 0; first < kTotal; first += kThreads) {
        const int i = first + (int)threadIdx.x;
        if (kTotal % kThreads == 0 || i < kTotal) {
            const int row = i / kChunks, column = i % kChunks * kWidth;
            const bool live = row0 + row < from.T && column < from.HS;
            cp_async_16_or_zero(tile + Padded<Shape::kHS>::at(row, column),
                                from.data + (row0 + row) * from.stride + column, live);
        }
    }
}

// The address that a lane passes to ldmatrix_x4, to load an A operand (16,kMmaK) from the start of `rows`. It
// is a row of one of four matrices of 8 rows of 16 bytes: rows 0-7 and 8-15 of the first 16 bytes, then of
// the next 16.
template <int kHS> __device__ __forceinline__ uint32_t fragment_address(const floatX* rows, int lane) {
    return smem_address(rows + Padded<kHS>::at(lane % 16, lane / 16 * kWidth));
}

// The warp's rows of a tile (.,kHS) as A operands: the first kK * kMmaK columns.
template <int kHS, int kGroups, int kK>
__device__ __forceinline__ void load_fragments(uint32_t (&a)[kGroups][kK][4], const floatX* rows, int lane) {
    const uint32_t address = fragment_address<kHS>(rows, lane);
#pragma unroll
    for (int m = 0; m < kGroups; m++) {
        for (int kk = 0; kk < kK; kk++) {
            ldmatrix_x4(a[m][kk], address + Padded<kHS>::at(m * 16, kk * kMmaK) * (int)sizeof(floatX));
            round_operands(a[m][kk]);
        }
    }
}

// acc += A B^T, with B the first columns of a tile (8 * kN, kHS).
template <int kHS, int kGroups, int kN, int kK>
__device__ __forceinline__ void mma_times_rows(Tile<kGroups, kN>& acc, const uint32_t (&a)[kGroups][kK][4],
                                               const floatX* tile, int lane) {
    const uint32_t address =
        smem_address(tile + Padded<kHS>::at(lane % 8 + lane / 16 * 8, lane / 8 % 2 * kWidth));
#pragma unroll
    for (int kk = 0; kk < kK; kk++) {
#pragma unroll
        for (int n = 0; n < kN; n += 2) {
            uint32_t b[4];
            ldmatrix_x4(b, address + Padded<kHS>::at(n * 8, kk * kMmaK) * (int)sizeof(floatX));
            round_operands(b);
            for (int m = 0; m < kGroups; m++) {
                mma_16x8(acc[m][n], a[m][kk], b[0], b[1]);
                mma_16x8(acc[m][n + 1], a[m][kk], b[2], b[3]);
            }
        }
    }
}

// Rows of more than 32 registers an operand (TF32 only) are fetched a step of the sum at a time.
template <int kGroups, int kHS> constexpr bool kLongRows = kGroups * kHS * sizeof(floatX) > 256;

// The same with A in shared memory as well: the warp's `rows` of a tile.
template <int kHS, int kGroups, int kN>
__device__ __forceinline__ void mma_rows_times_rows(Tile<kGroups, kN>& acc, const floatX* rows,
                                                    const floatX* tile, int lane) {
    constexpr int kColumns = kLongRows<kGroups, kHS> ? kMmaK : kHS;
    for (int column = 0; column < kHS; column += kColumns) {
        uint32_t a[kGroups][kColumns / kMmaK][4];
        load_fragments<kHS>(a, rows + column, lane);
        mma_times_rows<kHS>(acc, a, tile + column, lane);
    }
}

// acc (.,kHS) += A B, with B a tile (.,kHS) in shared memory. B is needed by columns: ldmatrix transposes
// 16-bit elements. It cannot do so with fp32; there a lane reads its elements one by one, and TF32's
// fragments have columns lane % 4 and lane % 4 + 4 of A where an accumulator has 2 * (lane % 4) and the one
// after. The order of a sum does not matter: A stays as it is, under other names for its columns, and B's
// rows are read by the same names.
template <int kHS, int kGroups, int kK>
__device__ __forceinline__ void mma_times_columns(Tile<kGroups, kHS / 8>& acc,
                                                  const uint32_t (&a)[kGroups][kK][4], const floatX* tile,
                                                  int lane) {
    const uint32_t address = fragment_address<kHS>(tile, lane);
    const floatX* own = tile + Padded<kHS>::at(lane % 4 * 2, lane / 4);
#pragma unroll
    for (int kk = 0; kk < kK; kk++) {
#pragma unroll
        for (int n = 0; n < kHS / 8; n += 2) {
            const int at = Padded<kHS>::at(kk * kMmaK, n * 8);
            uint32_t b[4];
            if constexpr (sizeof(floatX) == 2) {
                ldmatrix_x4_trans(b, address + at * (int)sizeof(floatX));
            } else {
                for (int i = 0; i < 4; i++) { b[i] = to_tf32(own[at + Padded<kHS>::at(i % 2, i / 2 * 8)]); }
            }
            for (int m = 0; m < kGroups; m++) {
                mma_16x8(acc[m][n], a[m][kk], b[0], b[1]);
                mma_16x8(acc[m][n + 1], a[m][kk], b[2], b[3]);
            }
        }
    }
}

// The block's own tiles, Q or a pair, which at the end are the staging of stores; and two stages for pairs of
// the other side. Where tiles leave no room for the queries' statistics, these are read from global memory:
// TF32's at head size 128 take kPortableShared to the byte.
template <int kOwnTiles, class Shape> struct MmaShared {
    static constexpr int kStride = Padded<Shape::kHS>::kStride;
    static constexpr size_t kTileBytes =
        (kOwnTiles * Shape::kOwned + 4 * Shape::kTile) * kStride * sizeof(floatX);
    static constexpr bool kHoldsStats = kTileBytes + 2 * Shape::kTile * sizeof(float2) <= kPortableShared;
    alignas(16) floatX own[kOwnTiles][Shape::kOwned * kStride];     // (kOwned, HS)
    floatX a[2][Shape::kTile * kStride];                            // (stage, kTile, HS)
    floatX b[2][Shape::kTile * kStride];
    alignas(16) float2 stats[2][Shape::kTile];      // (stage, kTile) {lse * log2(e), D}, if queries come

    // What a block asks for.
    static constexpr size_t bytes() {
        static_assert(kTileBytes <= kPortableShared, "what every GPU's blocks may have of shared memory");
        return kHoldsStats ? sizeof(MmaShared) : offsetof(MmaShared, stats);
    }

    // Starts the copies of a step's tile. other, all_stats: of the walk's first head; all_stats may be null.
    template <class Block>
    __device__ __forceinline__ void load(const Block& block, int it, const Pair<InputRows>& other,
                                         const float2* all_stats = nullptr) {
        static_assert(Shape::kTile <= 2 * Shape::kThreads, "a thread copies the statistics of two queries");
        const int stage = it % 2, head = block.head(it), row0 = block.row(it), i = 2 * (int)threadIdx.x;
        load_tile<Shape, Shape::kTile>(a[stage], other.a.head(head), row0);
        load_tile<Shape, Shape::kTile>(b[stage], other.b.head(head), row0);
        if (kHoldsStats && all_stats && i < Shape::kTile) {
            cp_async_16_or_zero(&stats[stage][i], all_stats + head * padded_T(block.T) + row0 + i, true);
        }
        cp_async_commit();
    }
    // Waits for a step's tile, starts the copies of the next one, and returns the tile's stage.
    template <class Block>
    __device__ __forceinline__ int wait(const Block& block, int it, const Pair<InputRows>& other,
                                        const float2* all_stats = nullptr) {
        cp_async_wait<0>();
        __syncthreads();
        if (it + 1 < block.steps) { load(block, it + 1, other, all_stats); }
        return it % 2;
    }
};

template <class Shape, Hides kHides>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kMinBlocks)
    attention_forward_mma_kernel(const AttentionForward a, float scale) {
    constexpr int kHS = Shape::kHS, kGroups = Shape::kGroups, kTile = Shape::kTile;
    static_assert(kTile % Shape::kRows == 0, "a warp's rows must not straddle the first column of a tile");
    extern __shared__ __align__(16) unsigned char mma_bytes[];
    auto& shared = *(MmaShared<1, Shape>*)mma_bytes;

    const int lane = threadIdx.x % kWarp, warp_row = threadIdx.x / kWarp * Shape::kRows;
    const AttentionBlock<Own::Queries, Shape, kHides> block(a);
    if (!block.exists) { return; }
    const int row0 = block.row0 + warp_row;                 // the warp's first query
    const Pair<InputRows> other = {block.k(a.qkv), block.v(a.qkv)};
    load_tile<Shape, Shape::kOwned>(shared.own[0], block.q(a.qkv), block.row0);
    shared.load(block, 0, other);

    const float scale_log2 = scale * kLog2e;                // exp(x) is calculated as exp2(x * log2(e))
    floatX* q_rows = shared.own[0] + Padded<kHS>::at(warp_row, 0);
    uint32_t q_frag[kGroups][kHS / kMmaK][4];
    Tile<kGroups, kHS / 8> o = {};                          // not yet divided by the row's sum
    OnlineSoftmax<kGroups> softmax;
    for (int it = 0; it < block.steps; it++) {
        const int stage = shared.wait(block, it, other), k0 = block.row(it);
        if (it == 0) { load_fragments<kHS>(q_frag, q_rows, lane); }
        if (block.cover(row0, Shape::kRows, k0, kTile) == Cover::None) { continue; }    // for this warp

        // S = Q K^T
        Tile<kGroups, kTile / 8> s = {};
        mma_times_rows<kHS>(s, q_frag, shared.a[stage], lane);
        hide(s, block, row0, k0, lane);

        // P = exp(S - maximum so far). Earlier sums are rescaled to a new maximum
        softmax.template add<false>(s, scale_log2);
        scale_rows(o, softmax.correction);

        // O += P V
        uint32_t p_frag[kGroups][kTile / kMmaK][4];
        to_fragments(p_frag, s);
        mma_times_columns<kHS>(o, p_frag, shared.b[stage], lane);
    }
    float factor[kGroups][2];
    softmax.finish(factor, block.lse(a.lse), row0, a.T, scale, lane);
    scale_rows(o, factor);
    store_tile<Padded<kHS>>(block.out(a.out), row0, q_rows, o, 1.0f, lane);
}

// The backward for either side. The same pipeline, with more products a step:
//     | S = own a * other a^T | dP = own b * other b^T | P = exp(S - lse), dS = P * (dP - D) |
//     | dV += P * other b, if keys own | dQ or dK += dS * other a |
template <Own kOwn, class Shape, Hides kHides>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kMinBlocks)
    attention_backward_mma_kernel(const AttentionBackward a, float scale) {
    constexpr bool kQueries = kOwn == Own::Queries;
    constexpr int kHS = Shape::kHS, kGroups = Shape::kGroups, kTile = Shape::kTile;
    static_assert(128 % kTile == 0, "padded_T makes whole tiles");
    // The block's own operands stay in registers, but two accumulators of kHS columns leave none for that
    constexpr bool kKeepsOperands = kQueries && !kLongRows<kGroups, kHS>;
    extern __shared__ __align__(16) unsigned char mma_bytes[];
    auto& shared = *(MmaShared<2, Shape>*)mma_bytes;

    const int lane = threadIdx.x % kWarp, warp_row = threadIdx.x / kWarp * Shape::kRows;
    const AttentionBlock<kOwn, Shape, kHides> block(a);
    if (!block.exists) { return; }
    const int row0 = block.row0 + warp_row;                 // the warp's
    const Pair<InputRows> own = block.own(a), other = block.other(a);
    const float2* all_stats = kQueries ? nullptr : block.stats(a.scratch);
    load_tile<Shape, Shape::kOwned>(shared.own[0], own.a, block.row0);
    load_tile<Shape, Shape::kOwned>(shared.own[1], own.b, block.row0);
    shared.load(block, 0, other, all_stats);
    QueryStats<kOwn, kGroups> stats;                        // queries': calculated while the copies fly
    if constexpr (kQueries) { stats.template load_rows<kHS>(block, a, row0, lane); }

    const float scale_log2 = scale * kLog2e;
    floatX* a_rows = shared.own[0] + Padded<kHS>::at(warp_row, 0);
    floatX* b_rows = shared.own[1] + Padded<kHS>::at(warp_row, 0);
    uint32_t a_frag[kGroups][kHS / kMmaK][4], b_frag[kGroups][kHS / kMmaK][4];
    Tile<kGroups, kHS / 8> grad_a = {}, grad_b = {};        // dQ; or dK and dV. Not yet scaled
    for (int it = 0; it < block.steps; it++) {
        const int stage = shared.wait(block, it, other, all_stats), column0 = block.row(it);
        if (it == 0 && kKeepsOperands) {
            load_fragments<kHS>(a_frag, a_rows, lane);
            load_fragments<kHS>(b_frag, b_rows, lane);
        }
        if (block.cover(row0, Shape::kRows, column0, kTile) == Cover::None) { continue; }   // for this warp

        // S and dP
        Tile<kGroups, kTile / 8> s = {}, dp = {};
        if constexpr (kKeepsOperands) {
            mma_times_rows<kHS>(s, a_frag, shared.a[stage], lane);
            mma_times_rows<kHS>(dp, b_frag, shared.b[stage], lane);
        } else {
            mma_rows_times_rows<kHS>(s, a_rows, shared.a[stage], lane);
            mma_rows_times_rows<kHS>(dp, b_rows, shared.b[stage], lane);
        }

        // P in place of S, dS in place of dP
        hide(s, block, row0, column0, lane);
        if constexpr (!kQueries) {
            const float2* tile_stats = shared.stats[stage];
            if (!shared.kHoldsStats) { tile_stats = all_stats + block.head(it) * padded_T(a.T) + column0; }
            stats.columns = tile_stats + tile_column(0, 0, lane);
        }
        probabilities(s, stats, scale_log2);
        score_gradients(dp, s, stats);

        // dQ += dS K; or dV += P^T dO, dK += dS^T Q
        uint32_t frag[kGroups][kTile / kMmaK][4];
        if constexpr (!kQueries) {
            to_fragments(frag, s);
            mma_times_columns<kHS>(grad_b, frag, shared.b[stage], lane);
        }
        to_fragments(frag, dp);
        mma_times_columns<kHS>(grad_a, frag, shared.a[stage], lane);
    }
    store_gradient(a, kQueries ? Gradient::Q : Gradient::K, [&](auto* dqkv, auto&& round) {
        store_tile<Padded<kHS>>(kQueries ? block.q(dqkv) : block.k(dqkv), row0, a_rows, grad_a, scale, lane,
                                round);
    });
    if constexpr (!kQueries) {
        store_gradient(a, Gradient::V, [&](auto* dqkv, auto&& round) {
            store_tile<Padded<kHS>>(block.v(dqkv), row0, b_rows, grad_b, 1.0f, lane, round);
        });
    }
}

// ---- sm90: Hopper's tensor cores (wgmma) and copy engine (TMA) ---- A warpgroup (4 warps) owns 64 rows.
// wgmma reads its operands from shared memory and runs on its own, and one thread starts the copies of a
// whole tile; so the pipeline is drawn by what is under way. The forward, with two stages, of which each has
// a K, and the V of the tile before:
//
//     one thread     K0, K1 V0                       K2 V1                       K3 V2
//     wgmma          | S0 |           | S1 | O += P0 V0 |    | S2 | O += P1 V1 |    | S3 | O += P2 V2 |
//     ordinary cores      | P0=exp(S0)|    | P1=exp(S1) |         | P2=exp(S2) |         | P3=...
//                    ^ full[0]        ^ full[1]         ^ release ^ full[0]     ^ release
//
//     full[stage]    an mbarrier in shared memory that hears of the copy's bytes: all there, its phase ends
//     wgmma_end      waits until only the last group of wgmma, <1>, or none, <0>, is under way: for S, for O
//     release        all warps are done with a stage; the next copy into it may start
//
// The backward has no such overlap of one step's product with the next step's exponentials (it measured no
// faster); dV += P^T dO runs under the arithmetic of dS. Two to four blocks of one warpgroup share an SM and
// fill each other's waits. Only the forward at head size 128 takes two warpgroups on one walk, which halves
// what is read of K and V: walks of 64 queries measured 10 to 20 % slower. A third warpgroup then copies, so
// that the two need not wait for each other, and gives them its registers; empty[stage] counts the warps that
// are done.
//
// A tile is blocks of 64 columns, (rows,64) each, Swizzled. Columns from HS on are zeros, so that the kernels
// of 64 and 128 columns serve all sizes from 48 on. The block's own rows in registers as A operands would
// spare shared memory a third of its reads, but ptxas 13.0.88 then puts P into the registers that still hold
// Q: wrong from the second tile on.
template <int kColumns, int kGroups, int kRows, int kNumStages, int kBlocks> struct Sm90Shape {
    static constexpr int kHS = kColumns, kWarpgroups = kGroups, kOwned = 64 * kGroups, kTile = kRows;
    static constexpr bool kCopiers = kGroups > 1;                           // a warpgroup that copies
    static constexpr int kThreads = (kGroups + kCopiers) * 4 * kWarp;
    static constexpr int kStages = kNumStages, kMinBlocks = kBlocks;        // blocks on an SM
    typedef Tile<1, kTile / 8> Scores;                  // a warp's 16 rows of S or dP (64,kTile)
    typedef Tile<1, kHS / 8> Sums;                      // of O or a gradient (64,kHS)
    typedef uint32_t Fragments[1][kTile / 16][4];       // P or dS as an operand
};

// The rows of one head as the copy engine knows them: a slot of a tensor_map. qkv's slots are the heads
// of Q, of K, of V.
struct Sm90Rows {
    const CUtensorMap* map;
    int slot;
    __device__ __forceinline__ Sm90Rows head(int i) const { return {map, slot + i}; }
};

// The block's own tiles, Q or a pair, which at the end are the staging of stores; and kStages for pairs of
// the other side. kLag: how many steps b is behind a; a walk over n tiles has n + kLag steps.
template <int kOwnTiles, class Shape> struct Sm90Shared {
    static constexpr int kLag = kOwnTiles == 1, kStages = Shape::kStages;
    alignas(1024) floatX own[kOwnTiles][Shape::kOwned * Shape::kHS];
    floatX a[kStages][Shape::kTile * Shape::kHS];
    floatX b[kStages][Shape::kTile * Shape::kHS];
    alignas(16) float2 stats[kLag ? 1 : kStages][Shape::kTile]; // {lse * log2(e), D} of queries that come by
    uint64_t own_full, full[kStages], empty[kStages];           // mbarriers

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    // One thread: starts the copies of kRows rows of a head.
    template <int kRows>
    static __device__ __forceinline__ void copy(floatX* tile, uint64_t* barrier, const Sm90Rows& from,
                                                int row0, int b) {
        for (int column = 0; column < Shape::kHS; column += 64) {
            for (int row = 0; row < kRows; row += 64) {
                tma_load_4d(tile + column * kRows + row * 64, from.map, barrier, column, row0 + row,
                            from.slot, b);
            }
        }
    }
    // One thread: starts the copies of a step. other, all_stats: of the walk's first head; all_stats may be
    // null.
    template <class Block>
    __device__ __forceinline__ void load(const Block& block, int it, const Pair<Sm90Rows>& other,
                                         const float2* all_stats) {
        const int stage = it % kStages, head = block.head(it), row0 = block.row(it);
        const bool has_a = it < block.steps, has_b = it >= kLag;
        const int stats_bytes = all_stats ? sizeof(stats[0]) : 0;
        mbarrier_expect(&full[stage], (has_a + has_b) * sizeof(a[stage]) + stats_bytes);
        if (has_a) { copy<Shape::kTile>(a[stage], &full[stage], other.a.head(head), row0, block.b); }
        if (all_stats) {
            bulk_load(stats[stage], all_stats + head * padded_T(block.T) + row0, &full[stage], stats_bytes);
        }
        if (has_b) {
            copy<Shape::kTile>(b[stage], &full[stage], other.b.head(head), block.row(it - kLag), block.b);
        }
    }
    // Starts the copies: the block's own rows and the first steps. A `full` expects one arrival a phase, that
    // of the thread which starts copies.
    template <class Block>
    __device__ __forceinline__ void start(const Block& block, const Sm90Rows (&from)[kOwnTiles],
                                          const Pair<Sm90Rows>& other, const float2* all_stats = nullptr) {
        if (threadIdx.x == 0) {
            mbarrier_init(&own_full, 1);
            for (int i = 0; i < kStages; i++) {
                mbarrier_init(&full[i], 1);
                mbarrier_init(&empty[i], Shape::kOwned / 16);
            }
            mbarrier_fence_init();
            mbarrier_expect(&own_full, sizeof(own));
            for (int i = 0; i < kOwnTiles; i++) {
                copy<Shape::kOwned>(own[i], &own_full, from[i], block.row0, block.b);
            }
            const int first = min(kStages, block.steps + kLag);
            for (int it = 0; it < first; it++) { load(block, it, other, all_stats); }
        }
        __syncthreads();                                // the barriers exist
    }
    // Copiers, one thread: starts the copies of all further steps.
    template <class Block>
    __device__ __forceinline__ void produce(const Block& block, const Pair<Sm90Rows>& other) {
        for (int it = kStages; it < block.steps + kLag; it++) {
            mbarrier_wait(&empty[it % kStages], it / kStages % 2 ^ 1);
            load(block, it, other, nullptr);
        }
    }
    // Waits for the copies of a step and returns its stage.
    __device__ __forceinline__ int wait(int it) {
        mbarrier_wait(&full[it % kStages], it / kStages % 2);
        return it % kStages;
    }
    // The warp is done with a step. Where no others copy: waits for all, and starts the copies of a later
    // step.
    template <class Block>
    __device__ __forceinline__ void release(const Block& block, int it, const Pair<Sm90Rows>& other,
                                            const float2* all_stats = nullptr) {
        if constexpr (Shape::kCopiers) {
            __syncwarp();
            if (threadIdx.x % kWarp == 0) { mbarrier_arrive(&empty[it % kStages]); }
        } else {
            __syncthreads();
            const int next = it + kStages;
            if (threadIdx.x == 0 && next < block.steps + kLag) { load(block, next, other, all_stats); }
        }
    }
#endif
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Starts d (64,kTile) = A B^T, a warpgroup's rows of the own tile and a tile, and closes the group. 16
// columns are 32 bytes, a block of 64 is 128 bytes a row; a descriptor counts in 16 bytes.
template <class Shape>
__device__ __forceinline__ void wgmma_rows(typename Shape::Scores& d, const floatX* own, const floatX* tile) {
    const uint64_t a = wgmma_descriptor(own), b = wgmma_descriptor(tile);
    wgmma_shared<false>(d[0], a, b);
#pragma unroll
    for (int k = 1; k < Shape::kHS / 16; k++) {
        wgmma_shared<true>(d[0], a + k / 4 * Shape::kOwned * 8 + k % 4 * 2,
                           b + k / 4 * Shape::kTile * 8 + k % 4 * 2);
    }
    wgmma_commit();
}

// Starts d (64,kHS) += A (64,kTile) B, A in registers, B a tile, and closes the group. 16 rows are 2048
// bytes.
template <class Shape>
__device__ __forceinline__ void wgmma_columns(typename Shape::Sums& d, const typename Shape::Fragments& a,
                                              const floatX* tile) {
    const uint64_t b = wgmma_descriptor(tile, Shape::kTile * 128);
#pragma unroll
    for (int k = 0; k < Shape::kTile / 16; k++) { wgmma_registers(d[0], a[0][k], b + 128 * k); }
    wgmma_commit();
}

// Waits until at most the last kPending groups are under way: the others have left these registers.
template <int kPending, class... Registers>
__device__ __forceinline__ void wgmma_end(Registers&... registers) {
    wgmma_wait<kPending>();
    (pin_registers(registers[0]), ...);
}

// store_tile of each block of 64 columns, through the warp's rows of an own tile.
template <class Shape, class X, class Round = ToFloatX>
__device__ __forceinline__ void sm90_store(const HeadRows<X>& to, int row0, floatX* own,
                                           typename Shape::Sums& acc, float factor, Round&& round = {}) {
    floatX* const staging = own + threadIdx.x % 128 / kWarp * 16 * 64;
#pragma unroll
    for (int c = 0; c < Shape::kHS / 64; c++) {
        store_tile<Swizzled>(HeadRows<X>{to.data + c * 64, to.stride, to.T, to.HS - c * 64}, row0,
                             staging + c * Shape::kOwned * 64, *(Tile<1, 8>*)&acc[0][c * 8], factor,
                             threadIdx.x % kWarp, round);
    }
}
#endif

template <class Shape, Hides kHides>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kMinBlocks)
    attention_forward_sm90_kernel(const AttentionForward args, float scale,
                                  const __grid_constant__ CUtensorMap qkv_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char sm90_bytes[];
    auto& shared = *(Sm90Shared<1, Shape>*)sm90_bytes;
    const AttentionBlock<Own::Queries, Shape, kHides> block(args);
    if (!block.exists) { return; }
    const Pair<Sm90Rows> other = {{&qkv_map, block.k_head()}, {&qkv_map, block.k_head() + args.NKV}};
    shared.start(block, {{&qkv_map, block.h}}, other);
    const int lane = threadIdx.x % kWarp, warpgroup = threadIdx.x / 128;
    if constexpr (Shape::kCopiers) {                    // all begin with 168 registers
        if (warpgroup == Shape::kWarpgroups) {
            registers_give<24>();
            if (threadIdx.x % 128 == 0) { shared.produce(block, other); }
            return;
        }
        registers_take<240>();
    }
    const int row0 = block.row0 + threadIdx.x / kWarp * 16;     // the warp's first query
    floatX* const q = shared.own[0] + warpgroup * 64 * 64;

    const float scale_log2 = scale * kLog2e;            // exp(x) is calculated as exp2(x * log2(e))
    typename Shape::Sums o = {};                        // not yet divided by the row's sum
    typename Shape::Scores s;
    typename Shape::Fragments p_frag;
    OnlineSoftmax<1> softmax;

    // The tile on the diagonal: S, mask, P
    static_assert(Shape::kTile == Shape::kOwned, "the diagonal is one tile, with a key for each row");
    mbarrier_wait(&shared.own_full, 0);
    int stage = shared.wait(0);
    wgmma_fence();
    wgmma_rows<Shape>(s, q, shared.a[stage]);
    wgmma_end<0>(s);
    shared.release(block, 0, other);
    hide(s, block, row0, block.row0, lane);
    softmax.template add<true>(s, scale_log2);
    to_fragments(p_frag, s);

    // Each further tile: its S, and then O += P V of the tile before, which runs under this tile's softmax
    for (int it = 1; it < block.steps; it++) {
        stage = shared.wait(it);
        wgmma_fence();
        wgmma_rows<Shape>(s, q, shared.a[stage]);
        wgmma_columns<Shape>(o, p_frag, shared.b[stage]);
        wgmma_end<1>(s);
        if (block.is_far(block.steps - it)) { hide<true>(s, block, row0, block.row(it), lane); }
        const bool rescale = softmax.template add<true>(s, scale_log2);
        wgmma_end<0>(o, p_frag);
        shared.release(block, it, other);
        if (rescale) { scale_rows(o, softmax.correction); }
        to_fragments(p_frag, s);
    }
    stage = shared.wait(block.steps);
    wgmma_fence();
    wgmma_columns<Shape>(o, p_frag, shared.b[stage]);
    wgmma_end<0>(o, p_frag);

    float factor[1][2];
    softmax.finish(factor, block.lse(args.lse), row0, args.T, scale, lane);
    scale_rows(o, factor);
    named_barrier(1 + warpgroup, 128);                  // all are done with Q
    sm90_store<Shape>(block.out(args.out), row0, q, o, 1.0f);
#else
    __trap();
#endif
}

// The backward for either side. A step:
//     wgmma           | S | dP |                 | only keys: dV += P^T dO | dQ += dS K or dK += dS^T Q |
//     ordinary cores      | P = exp(S - lse), packed | dS, packed          |            release, copy |
//                     ^ full[stage]
template <Own kOwn, class Shape, Hides kHides>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kMinBlocks)
    attention_backward_sm90_kernel(const AttentionBackward args, float scale,
                                   const __grid_constant__ CUtensorMap qkv_map,
                                   const __grid_constant__ CUtensorMap dout_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    static_assert(!Shape::kCopiers && Shape::kTile == Shape::kOwned, "a head's diagonal is one tile");
    constexpr bool kQueries = kOwn == Own::Queries;
    extern __shared__ __align__(1024) unsigned char sm90_bytes[];
    auto& shared = *(Sm90Shared<2, Shape>*)sm90_bytes;
    const AttentionBlock<kOwn, Shape, kHides> block(args);
    if (!block.exists) { return; }
    const int lane = threadIdx.x % kWarp, warp_row = threadIdx.x / kWarp * 16;
    const int row0 = block.row0 + warp_row;             // the warp's first
    const Pair<Sm90Rows> queries = {{&qkv_map, block.h}, {&dout_map, block.h}};
    const Pair<Sm90Rows> keys = {{&qkv_map, block.k_head()}, {&qkv_map, block.k_head() + args.NKV}};
    const Pair<Sm90Rows>&own = kQueries ? queries : keys, &other = kQueries ? keys : queries;
    const float2* all_stats = kQueries ? nullptr : block.stats(args.scratch);
    shared.start(block, {own.a, own.b}, other, all_stats);
    QueryStats<kOwn, 1> stats;                          // queries': calculated while the copies fly
    if constexpr (kQueries) { stats.template load_rows<Shape::kHS>(block, args, row0, lane); }

    const float scale_log2 = scale * kLog2e;
    typename Shape::Sums grad_a = {}, grad_b = {};      // dQ; or dK and dV. Not yet scaled
    typename Shape::Scores s, dp;
    typename Shape::Fragments p_frag, ds_frag;
    mbarrier_wait(&shared.own_full, 0);
    for (int it = 0, next_head = 0; it < block.steps; it++) {
        // S and dP start together; P is calculated from S while dP is under way
        const int stage = shared.wait(it);
        if constexpr (!kQueries) { stats.columns = shared.stats[stage] + tile_column(0, 0, lane); }
        wgmma_fence();
        wgmma_rows<Shape>(s, shared.own[0], shared.a[stage]);
        wgmma_rows<Shape>(dp, shared.own[1], shared.b[stage]);
        wgmma_end<1>(s);
        if (it == next_head) {                          // on the diagonal
            hide(s, block, row0, block.row0, lane);
            next_head += block.tiles;
        } else if (block.is_far(next_head - it)) {
            hide<true>(s, block, row0, block.row(it), lane);
        }
        probabilities(s, stats, scale_log2);

        // dV += P^T dO runs under the arithmetic of dS, which takes the place of dP
        if constexpr (!kQueries) { to_fragments(p_frag, s); }
        wgmma_end<0>(dp);
        if constexpr (!kQueries) {
            wgmma_fence();
            wgmma_columns<Shape>(grad_b, p_frag, shared.b[stage]);
        }
        score_gradients(dp, s, stats);

        // dQ += dS K or dK += dS^T Q
        to_fragments(ds_frag, dp);
        wgmma_fence();
        wgmma_columns<Shape>(grad_a, ds_frag, shared.a[stage]);
        if constexpr (kQueries) { wgmma_end<0>(grad_a, ds_frag); }
        else { wgmma_end<0>(grad_b, grad_a, p_frag, ds_frag); }
        shared.release(block, it, other, all_stats);
    }
    store_gradient(args, kQueries ? Gradient::Q : Gradient::K, [&](auto* dqkv, auto&& round) {
        sm90_store<Shape>(kQueries ? block.q(dqkv) : block.k(dqkv), row0, shared.own[0], grad_a, scale,
                          round);
    });
    if constexpr (!kQueries) {
        store_gradient(args, Gradient::V, [&](auto* dqkv, auto&& round) {
            sm90_store<Shape>(block.v(dqkv), row0, shared.own[1], grad_b, 1.0f, round);
        });
    }
#else
    __trap();
#endif
}

// ---- launchers of each form, and which form runs ----
template <Hides kHides> static void attention_plain(const AttentionForward& a, Stream stream) {
    attention_launch<Own::Queries, PlainShape>(attention_forward_plain_kernel<kHides>, a, 0, stream);
}
template <Hides kHides> static void attention_plain(const AttentionBackward& a, Stream stream) {
    attention_launch<Own::Queries, PlainShape>(attention_backward_plain_kernel<Own::Queries, kHides>, a, 0,
                                               stream);
    attention_launch<Own::Keys, PlainShape>(attention_backward_plain_kernel<Own::Keys, kHides>, a, 0,
                                            stream);
}

// The shapes of the mma.sync kernels. NOTES.md and dev/cuda/attention.cu have others.
template <int kHS> struct MmaShapes {
    static constexpr bool k16Bits = sizeof(floatX) == 2;
    static constexpr int kGroups = kHS <= 64 ? 2 : 1, kTile = k16Bits || kHS == 32 ? 64 : 32;
    static constexpr int kBlocks = k16Bits && kHS == 32 ? 3 : 2;
    typedef MmaShape<kHS, kGroups, kTile, kBlocks> Forward;
    typedef MmaShape<kHS, kGroups, k16Bits && kHS == 96 ? kTile : kTile / 2, kBlocks> Dq;
    typedef MmaShape<kHS, kGroups, kTile / 2, kBlocks> Dkv;
};

// The shapes of the sm90 kernels, which copy whole tiles of 64 or 128 columns. NOTES.md has others, too.
// NearForward: walks of a few tiles, that is of a window up to kNear.
[[maybe_unused]] constexpr int kNear = 512;
template <int kHS> struct Sm90Shapes {
    typedef Sm90Shape<64, 1, 64, 2, 4> Forward, NearForward, Dq;
    typedef Sm90Shape<64, 1, 64, 2, 3> Dkv;
};
template <> struct Sm90Shapes<128> {
    typedef Sm90Shape<128, 2, 128, 2, 1> Forward;
    typedef Sm90Shape<128, 1, 64, 2, 2> NearForward;
    typedef Sm90Shape<128, 1, 64, 1, 3> Dq;
    typedef Sm90Shape<128, 1, 64, 2, 2> Dkv;
};

// Multiples of 16 are whole sectors of 32 bytes: at 40 a head takes 1.6 times as long as at 48. Of 16
// and 32, at least half of what is multiplied would be zeros.
static bool attention_uses_sm90(int HS) {
    return sizeof(floatX) == 2 && sm90_kernels_run() && HS >= 48 && HS <= 128 && HS % 16 == 0;
}

// The head size of the mma.sync kernels that serve HS here: the next multiple of 32. 0: there are none.
static int mma_head_size(int HS) {
    const int size = round_up(HS, 32);
    return size > 128 || HS % kWidth != 0 || (sizeof(floatX) == 4 && !use_tf32) ? 0 : size;
}

// The name of the form that runs here, for the printed line.
static const char* attention_form(int HS) {
    if (attention_uses_sm90(HS)) { return "sm90 (wgmma)"; }
    if (mma_head_size(HS) == 0) { return "plain"; }
    return sizeof(floatX) == 4 ? "mma.sync (TF32)" : "mma.sync";
}

// Why such heads cannot run, or nothing.
static std::string attention_error(int NH, int NKV, int HS) {
    const std::string error = attention_heads_error(NH, NKV);
    if (!error.empty() || (HS >= 1 && HS <= kPlainMaxHeadSize)) { return error; }
    return format("attention: head size %d; 1 to %d are possible\n"
                  "hint: choose more heads (head size = C / NH)", HS, kPlainMaxHeadSize);
}

template <class Shape, Hides kHides>
static void attention_forward_sm90(const AttentionForward& a, Stream stream) {
    attention_launch<Own::Queries, Shape>(attention_forward_sm90_kernel<Shape, kHides>, a,
                                          sizeof(Sm90Shared<1, Shape>), stream,
                                          tensor_map(a.qkv, a.B, a.T, a.NH + 2 * a.NKV, 64, 1, a.HS));
}
template <class Shapes, Hides kHides>
static void attention_sm90(const AttentionForward& a, Stream stream) {
    if constexpr (kHides == Hides::Window) {
        if (a.mask.window <= kNear) {
            return attention_forward_sm90<typename Shapes::NearForward, kHides>(a, stream);
        }
    }
    attention_forward_sm90<typename Shapes::Forward, kHides>(a, stream);
}
template <class Shapes, Hides kHides>
static void attention_sm90(const AttentionBackward& a, Stream stream) {
    typedef typename Shapes::Dq Dq;
    typedef typename Shapes::Dkv Dkv;
    const CUtensorMap qkv = tensor_map(a.qkv, a.B, a.T, a.NH + 2 * a.NKV, 64, 1, a.HS);
    const CUtensorMap dout = tensor_map(a.dout, a.B, a.T, a.NH, 64, 1, a.HS);
    attention_launch<Own::Queries, Dq>(attention_backward_sm90_kernel<Own::Queries, Dq, kHides>, a,
                                       sizeof(Sm90Shared<2, Dq>), stream, qkv, dout);
    attention_launch<Own::Keys, Dkv>(attention_backward_sm90_kernel<Own::Keys, Dkv, kHides>, a,
                                     sizeof(Sm90Shared<2, Dkv>), stream, qkv, dout);
}

template <class Shapes, Hides kHides>
static void attention_mma(const AttentionForward& a, Stream stream) {
    typedef typename Shapes::Forward Shape;
    attention_launch<Own::Queries, Shape>(attention_forward_mma_kernel<Shape, kHides>, a,
                                          MmaShared<1, Shape>::bytes(), stream);
}
template <class Shapes, Hides kHides>
static void attention_mma(const AttentionBackward& a, Stream stream) {
    typedef typename Shapes::Dq Dq;
    typedef typename Shapes::Dkv Dkv;
    static_assert(Dq::kOwned % Dkv::kTile == 0, "dQ's blocks write all statistics of dK/dV's last tile");
    attention_launch<Own::Queries, Dq>(attention_backward_mma_kernel<Own::Queries, Dq, kHides>, a,
                                       MmaShared<2, Dq>::bytes(), stream);
    attention_launch<Own::Keys, Dkv>(attention_backward_mma_kernel<Own::Keys, Dkv, kHides>, a,
                                     MmaShared<2, Dkv>::bytes(), stream);
}

// Either pass, in the form that attention_form names.
template <Hides kHides, class Args> static void attention_by_form(const Args& a, Stream stream) {
    if constexpr (sizeof(floatX) == 2) {
        if (attention_uses_sm90(a.HS)) {            // FP32 builds have no such kernels
            return a.HS <= 64 ? attention_sm90<Sm90Shapes<64>, kHides>(a, stream)
                              : attention_sm90<Sm90Shapes<128>, kHides>(a, stream);
        }
    }
    switch (mma_head_size(a.HS)) {
        case 32: return attention_mma<MmaShapes<32>, kHides>(a, stream);
        case 64: return attention_mma<MmaShapes<64>, kHides>(a, stream);
        case 96: return attention_mma<MmaShapes<96>, kHides>(a, stream);
        case 128: return attention_mma<MmaShapes<128>, kHides>(a, stream);
        default: attention_plain<kHides>(a, stream);
    }
}
template <class Args> static void attention(const Args& a, Stream stream) {
    OpScope scope(a, stream);
    die_if(attention_error(a.NH, a.NKV, a.HS));
    // a window that hides nothing has the kernels, and so the bits, of none
    if (!a.mask.hides(a.T)) { return attention_by_form<Hides::Nothing>(a, stream); }
    return a.mask.documents ? attention_by_form<Hides::Documents>(a, stream)
                            : attention_by_form<Hides::Window>(a, stream);
}
static void attention_forward(const AttentionForward& a, Stream s) { attention(a, s); }
static void attention_backward(const AttentionBackward& a, Stream s) { attention(a, s); }

// == 6.10 decoding ==
// The ops that write text: one new token of each of N rows, N <= kDecodeRows. Before them comes 6.1's
// encoder, and between them 6.2's norms, which also add the branches to the residual stream.
//     decode_matmul       out (N,OC) = inp weight^T + bias, or gelu of it
//     decode_attention    stores k and v of the new position; out[n,h] = softmax(q K^T / sqrt(HS)) V over it
//                         and those before
//     cache_store         k and v of a forward over a prompt
//     sample_tokens       draws the next tokens (sampler.h) and moves positions on
// Memory bandwidth sets the time: with one row, each weight serves one product, 248 MB a token for 124M.
// Positions and tokens are read from the device, so one CUDA graph serves all steps. A row is summed in an
// order that does not depend on N, so a text is the same alone and in a batch; cuBLASLt splits sums by N.
//
// On Hopper a kernel begins while the one before it still runs ("programmatic dependent launch"). It fetches
// weights and earlier keys and values, which no kernel of the step writes, to the L2. Then it waits, before
// it reads what others write, and before it writes.

// The kernel may begin before its predecessor ends, so it must call await_last_kernel().
template <class Args>
static void decode_launch(void (*kernel)(Args), dim3 grid, int threads, Stream stream, const Args& args) {
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    const unsigned attributes = sm90_kernels_run() ? 1 : 0;
    const cudaLaunchConfig_t config = {grid, dim3(threads), 0, stream, &early, attributes};
    cudaCheck(cudaLaunchKernelEx(&config, kernel, args));
}

static void decode_check(int N) {
    if (N < 1 || N > kDecodeRows) { die("decoding: %d rows; 1 to %d are possible", N, kDecodeRows); }
}

// A warp computes a tile of the output, kRows x kOutputs: each lane sums over its vectors of C, and warp_sums
// adds up the lanes. One text takes tiles of 1 x 1. More take 8 x 4, so that a weight in registers serves 8
// products and an input 4. Both forms take an element's sum in the same order.
constexpr int kDecodeWarps = 4;                         // of a block
template <int kRows, int kOutputs>
__global__ void __launch_bounds__(kDecodeWarps * kWarp, 3)
    decode_matmul_kernel(DecodeMatmul a) {
    constexpr int kVectors = kRows == 1 ? 4 : 1;        // of C, that a lane loads in a round
    constexpr int kLanes = kWarp / (kRows * kOutputs);  // lane kLanes * i stores element i
    const int C = a.C, lane = threadIdx.x % kWarp, tiles = ceil_div(a.N, kRows);
    const int first_n = blockIdx.x % tiles * kRows;     // blocks with the same weights are neighbours
    const int first_o = (blockIdx.x / tiles * kDecodeWarps + threadIdx.x / kWarp) * kOutputs;
    if (first_o >= a.OC) { return; }

    // 1. While the kernel before runs: the rows of weights, which lie one behind the other, and the bias.
    next_kernel_may_begin();
    const floatX* weight = a.weight + (size_t)first_o * C;              // (kOutputs,C)
    const int outputs = min(kOutputs, a.OC - first_o), line = 128 / (int)sizeof(floatX);
    for (int i = lane * line; i < outputs * C; i += kWarp * line) { prefetch_l2(weight + i); }
    const int n = first_n + lane / kLanes / kOutputs, o = first_o + lane / kLanes % kOutputs;
    const float bias = a.bias && o < a.OC ? (float)a.bias[o] : 0.0f;
    await_last_kernel();

    // 2. The products of this lane's vectors. All loads of a round are on their way at once. Behind the last
    // output and the last row these are read again, and their sums are not stored.
    float sums[kRows * kOutputs] = {};                  // (kRows,kOutputs)
    for (int start = lane * kWidth; start < C; start += kVectors * kWarp * kWidth) {
        x128 w[kVectors][kOutputs], x[kVectors][kRows];
#pragma unroll
        for (int v = 0; v < kVectors; v++) {
            const int c = start + v * kWarp * kWidth;
            for (int j = 0; j < kOutputs; j++) {
                w[v][j] = load(weight + (size_t)min(j, outputs - 1) * C, c, C);
            }
            for (int i = 0; i < kRows; i++) {
                x[v][i] = load(a.inp + (size_t)min(first_n + i, a.N - 1) * C, c, C);
            }
        }
#pragma unroll
        for (int v = 0; v < kVectors; v++) {
#pragma unroll
            for (int i = 0; i < kRows * kOutputs; i++) {
                const Floats x_i = to_floats(x[v][i / kOutputs]), w_j = to_floats(w[v][i % kOutputs]);
                for (int k = 0; k < kWidth; k++) { sums[i] = fmaf(x_i.at[k], w_j.at[k], sums[i]); }
            }
        }
    }

    // 3. Their sums over the lanes. What GELU reads is rounded first, as in training.
    float sum = warp_sums(sums) + bias;
    if (lane % kLanes != 0 || n >= a.N || o >= a.OC) { return; }
    if (a.gelu) { sum = gelu((float)(floatX)sum); }
    a.out[(size_t)n * a.OC + o] = (floatX)sum;
}

static void decode_matmul(const DecodeMatmul& a, Stream stream) {
    OpScope scope(a, stream);
    decode_check(a.N);
    check_width(a, a.C);
    const int rows = a.N == 1 ? 1 : 8, outputs = a.N == 1 ? 1 : 4;
    const int blocks = ceil_div(a.N, rows) * ceil_div(a.OC, kDecodeWarps * outputs);
    decode_launch(a.N == 1 ? decode_matmul_kernel<1, 1> : decode_matmul_kernel<8, 4>, dim3(blocks),
                  kDecodeWarps * kWarp, stream, a);
}

// A block a position, for all rows.
__global__ void cache_store_kernel(CacheStore a) {
    const size_t t = blockIdx.x, C = (size_t)a.NKV * a.HS;
    const floatX* keys = a.qkv + (t * (a.NH + 2 * a.NKV) + a.NH) * a.HS;        // then values
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        const floatX k = keys[c], v = keys[C + c];
        for (int n = 0; n < a.rows; n++) {
            a.keys[((size_t)n * a.T + t) * C + c] = k;
            a.values[((size_t)n * a.T + t) * C + c] = v;
        }
    }
}

static void cache_store(const CacheStore& a, Stream stream) {
    OpScope scope(a, stream);
    cache_store_kernel<<<a.count, 256, 0, stream>>>(a);
}

// Attention of one query: a block takes a head of a row. Its warps take turns with the positions,
// kDecodeAtOnce each, and keep an online softmax in powers of two: the largest score so far, and relative to
// it the sum and the output. At the end the warps' parts are merged. A lane holds elements lane, lane + 32,
// ... of the head, kElements at most: no head size needs aligned rows.
constexpr int kDecodeSplits = 16, kDecodeAtOnce = 4;    // warps of a block, positions

template <int kElements>
__global__ void __launch_bounds__(kDecodeSplits * kWarp)
    decode_attention_kernel(DecodeAttention a) {
    __shared__ float2 parts[kDecodeSplits];                             // a warp's largest score and sum
    __shared__ float outs[kDecodeSplits][kElements * kWarp];
    const int HS = a.HS, h = blockIdx.x, n = blockIdx.y, warp = threadIdx.x / kWarp;
    const int lane = threadIdx.x % kWarp, t = a.positions[n];           // set in the step before
    const int kv = h / (a.NH / a.NKV);                                  // its head of keys and values
    const size_t C = (size_t)a.NKV * HS, head = (size_t)n * a.T * C + (size_t)kv * HS;
    const floatX* q = a.qkv + ((size_t)n * (a.NH + 2 * a.NKV) + h) * HS;
    const floatX *new_key = q + (size_t)(a.NH + kv - h) * HS, *new_value = new_key + C;
    floatX *keys = a.keys + head, *values = a.values + head;
    const float scale = kLog2e / sqrtf((float)HS);
    const Span seen = Mask{a.mask.window}.keys(t).within(t + 1);    // its last is t; a text is one document

    // 1. While the kernel before runs: the keys and values so far.
    next_kernel_may_begin();
    for (int u = seen.first + threadIdx.x; u < seen.last; u += blockDim.x) {
        for (int i = 0; i < HS; i += 128 / (int)sizeof(floatX)) {
            prefetch_l2(keys + u * C + i);
            prefetch_l2(values + u * C + i);
        }
    }
    await_last_kernel();

    // 2. The new position joins them. Heads that share keys store the same.
    for (int i = threadIdx.x; i < HS; i += blockDim.x) {
        keys[t * C + i] = new_key[i];
        values[t * C + i] = new_value[i];
    }
    __syncthreads();

    // 3. This warp's positions. element: lane's j-th of a head, 0 beyond it.
    auto element = [=](const floatX* row, int j) {
        return lane + j * kWarp < HS ? (float)row[lane + j * kWarp] : 0.0f;
    };
    float query[kElements], out[kElements] = {}, max = -FLT_MAX, sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kElements; j++) { query[j] = element(q, j); }
    const int warp_first = seen.first + warp * kDecodeAtOnce;
    for (int first = warp_first; first <= seen.last; first += kDecodeSplits * kDecodeAtOnce) {
        float scores[kDecodeAtOnce], v[kDecodeAtOnce][kElements], new_max = max;
#pragma unroll
        for (int b = 0; b < kDecodeAtOnce; b++) {
            const size_t at = min(first + b, seen.last) * C;
            float dot = 0.0f;
#pragma unroll
            for (int j = 0; j < kElements; j++) {
                v[b][j] = element(values + at, j);
                dot = fmaf(query[j], element(keys + at, j), dot);
            }
            scores[b] = warp_sum(dot) * scale;
            if (first + b > seen.last) { scores[b] = -INFINITY; }
            new_max = fmaxf(new_max, scores[b]);
        }
        const float rescale = exp2_fast(max - new_max);
        max = new_max;
        sum *= rescale;
#pragma unroll
        for (int j = 0; j < kElements; j++) { out[j] *= rescale; }
#pragma unroll
        for (int b = 0; b < kDecodeAtOnce; b++) {
            const float p = exp2_fast(scores[b] - max);
            sum += p;
#pragma unroll
            for (int j = 0; j < kElements; j++) { out[j] = fmaf(p, v[b][j], out[j]); }
        }
    }

    // 4. The warps' parts, in order. A warp without positions has a sum of 0.
    if (lane == 0) { parts[warp] = {max, sum}; }
#pragma unroll
    for (int j = 0; j < kElements; j++) { outs[warp][lane + j * kWarp] = out[j]; }
    __syncthreads();
    for (int i = threadIdx.x; i < HS; i += blockDim.x) {
        float most = -FLT_MAX, total = 0.0f, x = 0.0f;
        for (int w = 0; w < kDecodeSplits; w++) { most = fmaxf(most, parts[w].x); }
        for (int w = 0; w < kDecodeSplits; w++) {
            const float factor = exp2_fast(parts[w].x - most);
            total = fmaf(factor, parts[w].y, total);
            x = fmaf(factor, outs[w][i], x);
        }
        a.out[((size_t)n * a.NH + h) * HS + i] = (floatX)(x / total);
    }
}

static void decode_attention(const DecodeAttention& a, Stream stream) {
    OpScope scope(a, stream);
    decode_check(a.N);
    die_if(attention_error(a.NH, a.NKV, a.HS));
    auto kernel = a.HS <= 4 * kWarp ? decode_attention_kernel<4>
                                    : decode_attention_kernel<kPlainMaxHeadSize / kWarp>;
    decode_launch(kernel, dim3(a.NH, a.N), kDecodeSplits * kWarp, stream, a);
}

// Draws as sample_token() does (sampler.h) and takes the same token, a block a row. A logit's key is a whole
// number that grows with it. One search halves a range of keys until it has the key at which top-k or top-p
// cuts, the other a range of ids until it has the token. Weights are whole numbers, so their sums do not
// depend on the order.
constexpr int kSampleThreads = 1024;
constexpr int kKeyShift = sizeof(floatX) == 4 ? 0 : kFp16 ? 13 : 16;    // bits of fp32 that floatX lacks
typedef unsigned long long Weight64;

// 0 for NaN; zeros have one key.
__device__ __forceinline__ uint32_t sample_key(float x) {
    if (isnan(x)) { return 0; }
    const uint32_t bits = x == 0.0f ? 0u : __float_as_uint(x);
    return (bits & 0x80000000u ? ~bits : bits | 0x80000000u) >> kKeyShift;
}
__device__ __forceinline__ float sample_value(uint32_t key) {
    const uint32_t bits = key << kKeyShift;
    return __uint_as_float(bits & 0x80000000u ? bits & 0x7FFFFFFFu : ~(bits | ((1u << kKeyShift) - 1u)));
}

struct SampleCut {                      // what is left: larger keys, and the first `fits` ids with this key
    uint32_t key;
    Weight64 fits;
};
struct SampleRow {                      // as a block sees it
    const floatX* logits;               // (V)
    int V;
    Weight64* shared;                   // (32)

    // The sum of f(id, key, logit) over ids [first, end). Every thread gets it.
    template <class F> __device__ __forceinline__ Weight64 sum(uint32_t first, uint32_t end, F f) const {
        Weight64 x = 0;
#pragma unroll 8
        for (uint32_t i = first + threadIdx.x; i < end; i += kSampleThreads) {
            const float logit = (float)logits[i];
            x += f(i, sample_key(logit), logit);
        }
        return block_sum(x, shared);
    }

    // The smallest i below `n` such that part(0, i + 1) exceeds *target, which loses part(0, i); n - 1 if
    // none does. part(i, j): what numbers i to j - 1 weigh.
    template <class Part>
    __device__ __forceinline__ uint32_t find(uint32_t n, Weight64* target, Part part) const {
        uint32_t low = 0;
        while (n - low > 1) {
            const uint32_t middle = low + (n - low) / 2;
            const Weight64 lower = part(low, middle);
            if (lower > *target) { n = middle; }
            else { low = middle, *target -= lower; }
        }
        return low;
    }
    template <class F> __device__ __forceinline__ uint32_t find_id(Weight64 target, F f) const {
        return find(V, &target, [=](uint32_t i, uint32_t j) { return sum(i, j, f); });
    }

    // Finds the fewest likeliest tokens whose f(logit) add up to `wanted`. The search counts keys downwards:
    // number i is best - i, from `best`, the row's largest, to `low`. Ids with the key that it finds share
    // what larger keys leave of `wanted`. NaN, which has key 0, never fits.
    template <class F>
    __device__ __forceinline__ SampleCut cut(uint32_t low, uint32_t best, Weight64 wanted, F f) const {
        Weight64 rest = wanted - 1;
        const uint32_t key = best - find(best - low + 1, &rest, [=](uint32_t i, uint32_t j) {
            return sum(0, V, [=](uint32_t, uint32_t key, float x) -> Weight64 {
                return key <= best - i && key > best - j ? f(x) : 0;
            });
        });
        return {key, key > 0 ? rest / f(sample_value(key)) + 1 : 0};
    }
};

__global__ void __launch_bounds__(kSampleThreads, 1) sample_tokens_kernel(SampleTokens a) {
    __shared__ Weight64 shared[kWarp];
    await_last_kernel();
    const int n = blockIdx.x, V = a.V;
    const SampleRow row = {a.logits + (size_t)n * V, V, shared};
    const Sampling& s = a.sampling;

    // 1. The likeliest token: the largest key, and of its ids the lowest.
    Weight64 likeliest = 0;
#pragma unroll 8
    for (int i = threadIdx.x; i < V; i += kSampleThreads) {
        const uint32_t key = sample_key((float)row.logits[i]);
        if (key > 0) { likeliest = max(likeliest, (Weight64)key << 32 | (0xFFFFFFFFu - i)); }
    }
    likeliest = block_max(likeliest, shared);
    const uint32_t best = (uint32_t)(likeliest >> 32);
    const float largest = sample_value(best);
    int token = best == 0 ? -1 : (int)(0xFFFFFFFFu - (uint32_t)likeliest);

    if (best > 0 && s.temperature > 0.0f && s.top_k != 1) {
        // 2. The tokens that top-k and top-p keep.
        SampleCut cut = {0, 0};
        auto weight = [=](float x) -> Weight64 { return sample_weight(x, largest, s); };
        auto total = [&] {
            const uint32_t limit = cut.key;
            const Weight64 larger = row.sum(0, V, [=](uint32_t, uint32_t key, float x) {
                return key > limit ? weight(x) : 0;
            });
            return larger + cut.fits * weight(sample_value(limit));
        };
        if (s.top_k > 0 && s.top_k < V) {
            cut = row.cut(0, best, s.top_k, [](float) -> Weight64 { return 1; });
        }
        if (s.top_p < 1.0f) { cut = row.cut(cut.key, best, sample_kept(total(), s.top_p), weight); }

        // 3. The token at which the weights of these, added up in the order of ids, exceed the target.
        const SampleCut kept = cut;
        const Weight64 target = sample_target(total(), rand_unit(a.seed, RAND_SAMPLE, a.ids[n], a.draws[n]));
        uint32_t last = 0;                      // of the ids that fit
        if (kept.fits > 0) {
            last = row.find_id(kept.fits - 1,
                               [=](uint32_t, uint32_t key, float) -> Weight64 { return key == kept.key; });
        }
        token = (int)row.find_id(target, [=](uint32_t i, uint32_t key, float x) {
            return key > kept.key || (key == kept.key && kept.fits > 0 && i <= last) ? weight(x) : 0;
        });
    }
    if (threadIdx.x == 0) {
        a.tokens[n] = token;
        a.positions[n]++;
        a.draws[n]++;
    }
}

static void sample_tokens(const SampleTokens& a, Stream stream) {
    OpScope scope(a, stream);
    decode_check(a.N);
    decode_launch(sample_tokens_kernel, dim3(a.N), kSampleThreads, stream, a);
}

// == 6.11 rotation ==
// rotate_forward_inplace:   for each head x of q and k in qkv (N,NH+2*NKV,HS), with j = i + HS/2:
//                           y = x*rstd*weight, rstd = 1/sqrt(mean(x^2) + eps)         without QK-norm: y = x
//                           x[i] = y[i]*cos[i] - y[j]*sin[i]     x[j] = y[j]*cos[i] + y[i]*sin[i]
// rotate_backward_inplace:  y from x, and dy from d, are turned back; xhat = y/weight, or 0 where weight is 0
//                           d = rstd*(dy*weight - xhat*mean(dy*y))                    without QK-norm: d = dy
//                           dweight (+)= column sums of dy*xhat, over rows and heads

// Rotation. A lane has kWidth elements of a head's lower half and their partners in the upper half, so only
// the sum over a head crosses lanes. blockDim.x lanes, a power of two, share a head: in 16 bits 8 for HS=128,
// 4 for 64; of the 8 for HS=96 two have nothing to do. threadIdx.y and blockIdx.y say which head of q and k.
constexpr int kRotateThreads = 256, kMaxRotatedHead = 256;
struct Halves { Floats at[2]; };                // lower, upper; `end`: half, or 0 for zeros and no store

template <class T> __device__ __forceinline__ Halves load_halves(const T* head, int i, int half, int end) {
    return {load_floats(head, i, end), load_floats(head + half, i, end)};
}
__device__ __forceinline__ void store_halves(floatX* head, int i, int half, int end, const Halves& x) {
    store(head, i, end, to_pack<floatX>(x.at[0]));
    store(head + half, i, end, to_pack<floatX>(x.at[1]));
}
__device__ __forceinline__ Halves load_weight(const float* weight /*(HS) or null: 1*/, int i, int half) {
    Halves w = load_halves(weight, i, half, weight ? half : 0);
    for (int k = 0; k < 2 * kWidth; k++) { w.at[k / kWidth].at[k % kWidth] += weight ? 0.0f : 1.0f; }
    return w;
}

// By the angles of turn (cosines, sines) or, where sign is -1, back.
__device__ __forceinline__ Halves rotated(const Halves& x, const Halves& turn, float sign) {
    Halves y;
    for (int k = 0; k < kWidth; k++) {
        const float cos = turn.at[0].at[k], sin = sign * turn.at[1].at[k];
        y.at[0].at[k] = x.at[0].at[k] * cos - x.at[1].at[k] * sin;
        y.at[1].at[k] = x.at[1].at[k] * cos + x.at[0].at[k] * sin;
    }
    return y;
}

// 1 / weight; 0 for 0 and for subnormals.
__device__ __forceinline__ float inverse(float w) { return fabsf(w) < FLT_MIN ? 0.0f : reciprocal_fast(w); }

// The mean of x*y over a head.
__device__ __forceinline__ float head_mean(const Halves& x, const Halves& y, int HS) {
    float sum = 0.0f;
    for (int s = 0; s < 2; s++) {
        for (int k = 0; k < kWidth; k++) { sum = fmaf(x.at[s].at[k], y.at[s].at[k], sum); }
    }
    for (int mask = blockDim.x / 2; mask > 0; mask /= 2) { sum += __shfl_xor_sync(0xFFFFFFFFu, sum, mask); }
    return sum * (1.0f / HS);
}

// A block takes heads of one place: a position in kRotateTexts texts. A lane's angles and weights are the
// same in all of these. With `positions`, each row is a position, and there is one text.
constexpr int kRotateTexts = 4;
LLMC_HD static inline int rotate_places(int N, int T) { return T * ceil_div(N, T * kRotateTexts); }

__global__ void __launch_bounds__(kRotateThreads) rotate_forward_inplace_kernel(RotateForward a) {
    const int h = blockIdx.y * blockDim.y + threadIdx.y, i = threadIdx.x * kWidth, heads = a.NH + a.NKV;
    const int HS = a.HS, half = HS / 2, end = h < heads ? half : 0, T = a.positions ? a.N : a.T;
    const int first = blockIdx.x % T + blockIdx.x / T * kRotateTexts * T;
    x128 words[kRotateTexts][2];
#pragma unroll
    for (int u = 0; u < kRotateTexts; u++) {
        const int n = first + u * T;
        const floatX* head = a.qkv + ((size_t)n * (heads + a.NKV) + h) * HS;
        for (int s = 0; s < 2; s++) { words[u][s] = load(head + s * half, i, n < a.N ? end : 0); }
    }
    const int t = a.positions ? a.positions[first] : first % T;
    const Halves turn = load_halves(a.table + (size_t)t * HS, i, half, half);
    const Halves w = load_weight(h < a.NH ? a.q_weight : a.k_weight, i, half);
#pragma unroll
    for (int u = 0; u < kRotateTexts; u++) {
        const int n = first + u * T;
        if (n >= a.N) { break; }
        Halves x = {to_floats(words[u][0]), to_floats(words[u][1])};
        if (a.rstd) {
            const float rstd = rsqrtf(head_mean(x, x, HS) + a.eps);
            for (int s = 0; s < 2; s++) {
                for (int k = 0; k < kWidth; k++) { x.at[s].at[k] *= rstd * w.at[s].at[k]; }
            }
            if (h < heads && i == 0) { a.rstd[(size_t)n * heads + h] = rstd; }
        }
        store_halves(a.qkv + ((size_t)n * (heads + a.NKV) + h) * HS, i, half, end, rotated(x, turn, 1.0f));
    }
}

// A block takes heads of places blockIdx.x, blockIdx.x + gridDim.x, ... A lane's sums for dweight stay in
// registers; the block's, of all its heads of q and of all of k, are a row of partials.
__global__ void __launch_bounds__(kRotateThreads, 2)
    rotate_backward_inplace_kernel(RotateBackward a, float* partial /*(blocks,2,HS) or null*/) {
    __shared__ float shared[kRotateThreads * 2 * kWidth];               // (blockDim.y,HS)
    const int first = blockIdx.y * blockDim.y, h = first + threadIdx.y, i = threadIdx.x * kWidth;
    const int HS = a.HS, half = HS / 2, NH = a.NH, heads = NH + a.NKV;
    const int end = h < heads ? half : 0;
    const float scale = a.fp8 ? a.tensor->scale : 1.0f;
    const uint32_t so_far = a.fp8 ? fp8_amax_so_far(a.stats) : 0;
    Fp8Counts counts;
    const Halves w = load_weight(h < NH ? a.q_weight : a.k_weight, i, half);
    Halves w_inverse, sums = {};
    for (int k = 0; k < 2 * kWidth; k++) {
        w_inverse.at[k / kWidth].at[k % kWidth] = inverse(w.at[k / kWidth].at[k % kWidth]);
    }
    for (int at = blockIdx.x; at < rotate_places(a.N, a.T); at += gridDim.x) {
        const int t = at % a.T, begin = t + at / a.T * kRotateTexts * a.T;
        const Halves turn = load_halves(a.table + (size_t)t * HS, i, half, half);
        for (int n = begin; n < min(begin + kRotateTexts * a.T, a.N); n += a.T) {
            const size_t head = ((size_t)n * (heads + a.NKV) + h) * HS;
            Halves dy = load_halves(a.dqkv + head, i, half, end);
            Halves y = load_halves(a.qkv + head, i, half, a.rstd ? end : 0);
            dy = rotated(dy, turn, -1.0f);
            if (a.rstd) {
                y = rotated(y, turn, -1.0f);
                const float rstd = h < heads ? a.rstd[(size_t)n * heads + h] : 0.0f;
                const float mean = head_mean(dy, y, HS);
                for (int k = 0; k < 2 * kWidth; k++) {
                    const int s = k / kWidth, e = k % kWidth;
                    float &d = dy.at[s].at[e], y_k = y.at[s].at[e];
                    sums.at[s].at[e] = fmaf(d, y_k, sums.at[s].at[e]);
                    d = rstd * (d * w.at[s].at[e] - y_k * w_inverse.at[s].at[e] * mean);
                }
            }
            if (a.fp8) {
                Pack<uint8_t> bytes[2];
                counts.round(bytes, dy.at, scale);
                for (int s = 0; s < 2; s++) { store(a.fp8 + head + s * half, i, end, bytes[s]); }
            } else {
                store_halves(a.dqkv + head, i, half, end, dy);
            }
        }
    }
    if (a.fp8) {
        const uint2 of_warp = counts.of_warp();
        const int thread = threadIdx.y * blockDim.x + threadIdx.x;
        if (thread % kWarp == 0) { fp8_count(a.stats, so_far, of_warp.x, of_warp.y); }
        if (blockIdx.x + blockIdx.y + thread == 0) { a.stats->elements += (size_t)a.N * heads * HS; }
    }
    if (!partial) { return; }

    // The sums are divided by the weight here, at last. Heads are added in order.
    for (int k = 0; k < 2 * kWidth && i < half; k++) {
        const int s = k / kWidth, e = k % kWidth;
        shared[threadIdx.y * HS + s * half + i + e] = sums.at[s].at[e] * w_inverse.at[s].at[e];
    }
    __syncthreads();
    partial += ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * 2 * HS;
    const int threads = blockDim.x * blockDim.y;
    for (int c = threadIdx.y * blockDim.x + threadIdx.x; c < 2 * HS; c += threads) {
        const int begin = max(c < HS ? 0 : NH, first);
        const int stop = min(c < HS ? NH : heads, first + (int)blockDim.y);
        float sum = 0.0f;
        for (int g = begin; g < stop; g++) { sum += shared[(g - first) * HS + c % HS]; }
        partial[c] = sum;
    }
}

// A block's lanes and heads, and how many blocks a row takes.
struct RotateGrid { dim3 block; int slabs; };
static RotateGrid rotate_grid(const char* op, int heads, int HS) {
    if (HS < 1 || HS % (2 * kWidth) != 0 || HS > kMaxRotatedHead) {
        die("%s: head size %d; multiples of %d up to %d are possible", op, HS, 2 * kWidth, kMaxRotatedHead);
    }
    int lanes = 1;
    while (lanes * 2 * kWidth < HS) { lanes *= 2; }
    const int slabs = ceil_div(heads * lanes, kRotateThreads);
    return {dim3(lanes, round_up(ceil_div(heads, slabs), ceil_div(kWarp, lanes))), slabs};
}

static void rotate_forward_inplace(const RotateForward& a, Stream stream) {
    OpScope scope(a, stream);
    const RotateGrid grid = rotate_grid(op_name(a), a.NH + a.NKV, a.HS);
    const int places = rotate_places(a.N, a.positions ? a.N : a.T);
    rotate_forward_inplace_kernel<<<dim3(places, grid.slabs), grid.block, 0, stream>>>(a);
}

// Blocks of the backward: 512 threads an SM of an H200, whatever the GPU is.
static int rotate_blocks(int threads) { return 132 * std::max(1, 512 / threads); }
static size_t rotate_backward_scratch_bytes(int HS) { return rotate_blocks(kWarp) * 2 * HS * sizeof(float); }

static void rotate_backward_inplace(const RotateBackward& a, Stream stream) {
    OpScope scope(a, stream);
    const RotateGrid grid = rotate_grid(op_name(a), a.NH + a.NKV, a.HS);
    const int most = rotate_blocks(grid.block.x * grid.block.y) / grid.slabs;
    const int blocks = std::min(most, rotate_places(a.N, a.T));
    float* partial = a.dq_weight.data || a.dk_weight.data ? a.scratch : nullptr;
    rotate_backward_inplace_kernel<<<dim3(blocks, grid.slabs), grid.block, 0, stream>>>(a, partial);
    if (partial) {
        column_sums({{a.dq_weight, a.dk_weight}}, 2, partial, blocks * grid.slabs, a.HS, stream);
    }
}

// == 6.12 value embeddings ==
// For each head v of a row n, with e its row of the table by token:
// Forward:  v += gate*e, gate = 3*s, s = sigmoid(sum over j < kGateChannels of weight[j]*inp[n,j])
// Backward: dz = gate*(1-s)*sum(dv*e)   dv = gate*dv
//           dinp[n,j] += sum over heads of dz*weight[j]     dweight[j] (+)= sum over rows of dz*inp[n,j]
constexpr int kGateRows = 64;                   // that a block of the gates' backward sums

__device__ __forceinline__ float gate_input(const ValueEmbed& a, int n, int j) {
    if (!a.inp_t8) { return (float)a.inp[(size_t)n * a.C + j]; }
    return (float)((const __nv_fp8_e4m3*)a.inp_t8)[(size_t)j * a.N + n] * a.inp_tensor->inverse;
}

// Lanes and heads are as in 6.11. A lane takes rows blockIdx.x, blockIdx.x + gridDim.x, ... of one head; its
// weights stay in registers. All lanes of a head compute its gate. Of a backward, scratch gets dz (N,NKV).
__global__ void __launch_bounds__(kRotateThreads) value_embed_kernel(ValueEmbed a) {
    const int h = blockIdx.y * blockDim.y + threadIdx.y, i = threadIdx.x * kWidth;
    const int NKV = a.NKV, HS = a.HS, half = HS / 2, end = h < NKV ? half : 0;
    const float inverse = a.dv8 ? a.dv_tensor->inverse : 1.0f;
    float weight[kGateChannels];
    for (int j = 0; j < kGateChannels; j++) { weight[j] = h < NKV ? a.weight[h * kGateChannels + j] : 0.0f; }
    for (int n = blockIdx.x; n < a.N; n += gridDim.x) {
        const size_t head = a.values(n) + (size_t)h * HS, token = max(a.tokens[n], 0);
        const Halves e = load_halves(a.table + (token * NKV + h) * HS, i, half, end);
        Halves v = a.dv8 ? load_halves((const __nv_fp8_e4m3*)a.dv8 + head, i, half, end)
                         : load_halves(a.qkv + head, i, half, end);
        float z = 0.0f;
#pragma unroll
        for (int j = 0; j < kGateChannels; j++) { z = fmaf(weight[j], gate_input(a, n, j), z); }
        const float s = sigmoid(z), gate = 3.0f * s;
        if (a.dinp) {
            const float sum = head_mean(v, e, HS) * HS * inverse;
            if (h < NKV && i == 0) { a.scratch[(size_t)n * NKV + h] = gate * (1.0f - s) * sum; }
        }
        for (int k = 0; k < 2 * kWidth; k++) {
            float& v_k = v.at[k / kWidth].at[k % kWidth];
            v_k = a.dinp ? gate * inverse * v_k : fmaf(gate, e.at[k / kWidth].at[k % kWidth], v_k);
        }
        store_halves(a.qkv + head, i, half, end, v);
    }
}

// A block owns kGateRows rows. It stores their sums for dweight as one row of partials, then adds to dinp.
__global__ void value_gate_backward_kernel(ValueEmbed a, float* partial /*(blocks,NKV,kGateChannels)*/) {
    const int NKV = a.NKV, first = blockIdx.x * kGateRows, rows = min(kGateRows, a.N - first);
    const float* dz = a.scratch + (size_t)first * NKV;
    for (int c = threadIdx.x; c < NKV * kGateChannels; c += blockDim.x) {
        const int h = c / kGateChannels, j = c % kGateChannels;
        float sum = 0.0f;
        for (int r = 0; r < rows; r++) { sum = fmaf(dz[r * NKV + h], gate_input(a, first + r, j), sum); }
        partial[(size_t)blockIdx.x * NKV * kGateChannels + c] = sum;
    }
    for (int c = threadIdx.x; c < rows * kGateChannels; c += blockDim.x) {
        const int r = c / kGateChannels, j = c % kGateChannels;
        floatX* dinp = a.dinp + (size_t)(first + r) * a.C + j;
        float sum = (float)*dinp;
        for (int h = 0; h < NKV; h++) { sum = fmaf(dz[r * NKV + h], a.weight[h * kGateChannels + j], sum); }
        *dinp = (floatX)sum;
    }
}

static size_t value_embed_scratch_bytes(int N, int NKV) {
    return ((size_t)N + ceil_div(N, kGateRows) * kGateChannels) * NKV * sizeof(float);
}

static void value_embed(const ValueEmbed& a, Stream stream) {
    OpScope scope(a, stream);
    const RotateGrid grid = rotate_grid(op_name(a), a.NKV, a.HS);
    const int most = 132 * 2048 / (grid.block.x * grid.block.y), blocks = ceil_div(a.N, kGateRows);
    value_embed_kernel<<<dim3(std::min(a.N, most), grid.slabs), grid.block, 0, stream>>>(a);
    if (!a.dinp) { return; }
    float* partial = a.scratch + (size_t)a.N * a.NKV;
    value_gate_backward_kernel<<<blocks, 128, 0, stream>>>(a, partial);
    column_sums({{a.dweight}}, 1, partial, blocks, a.NKV * kGateChannels, stream);
}

#endif  // GPT2_CPU

// == 7 model: shapes and tables ==
// The model is two tables. Everything that walks over tensors (allocation, init, AdamW, norm, checkpoints,
// memory report, tests) walks over these. llmc/model/layout.h explains the columns.

// Bytes of an element of the tables' types. --plan in the CPU build counts with a BF16 program's.
static size_t bytes_floatX = sizeof(floatX);
constexpr size_t bytes_float = sizeof(float), bytes_uint8_t = 1, bytes_masterX = kFp16 ? 4 : 2;

// Rows stand in the order of a checkpoint; a new one goes to the end. Norms' weights and biases are fp32 in
// every build, as in PyTorch's autocast. Near 1 bf16 has steps of 0.0078, which swallow an update
// (dev/bench/NOTES.md: loss +3e-3 after ten steps). A model or a layer lacks a tensor that has no rows there.
//   rows, cols  names of sizes: QC, QKVC and FCC are the columns of q, of qkv and of fch; F those of act.
//               Names that are 0 or 1: `biased`, LayerNorm; `second`, a norm ln2, which a tied block lacks;
//               `learned` positions and `added` biases, which Llama's family lacks, though it may have
//               `qkv_bias`; `weighted` norms; `qk_norm`; an LM head of its own, `untied`; `value_embed`
//   kind        names the optimizer and its rate (layout.h)
//   live        rows that count. The others are padding: they are zero, and are not counted as parameters
//   parts       a layer's matrix may be several, one below the other, each with a height; --optimizer muon
//               updates them one by one
//   id          the key of the random numbers that its first values are drawn with. It never changes,
//               whatever tensors are added
//    name      type    where   rows    cols    init        kind    live    parts  id
#define MODEL_PARAMS(X)                                                                                      \
    X(wte,      floatX, Global, Vp,     C,      Normal,     Embedding, V,   NONE,  0)                        \
    X(wpe,      floatX, Global, learned * maxT, C, Normal, Embedding, learned * maxT, NONE, 1)               \
    X(ln1w,     float,  Block,  weighted, C,    One,        Norm,   weighted, NONE, 2)                       \
    X(ln1b,     float,  Block,  biased, C,      Zero,       Norm,   biased, NONE,  3)                        \
    X(qkvw,     floatX, Block,  QKVC,   C,      Normal,     Matrix, QKVC,   QKV,   4)                        \
    X(qkvb,     floatX, Block,  qkv_bias, QKVC, Zero,       Bias,   qkv_bias, NONE, 5)                       \
    X(attprojw, floatX, Block,  C,      QC,     Projection, Matrix, C,      WHOLE, 6)                        \
    X(attprojb, floatX, Block,  added,  C,      Zero,       Bias,   added,  NONE,  7)                        \
    X(ln2w,     float,  Block,  second * weighted, C, One, Norm, second * weighted, NONE, 8)                 \
    X(ln2b,     float,  Block,  second * biased, C, Zero,   Norm,   second * biased, NONE, 9)                \
    X(fcw,      floatX, Block,  FCC,    C,      Normal,     Matrix, FCC,    FC,    10)                       \
    X(fcb,      floatX, Block,  added,  FCC,    Zero,       Bias,   added,  NONE,  11)                       \
    X(fcprojw,  floatX, Block,  C,      F,      Projection, Matrix, C,      WHOLE, 12)                       \
    X(fcprojb,  floatX, Block,  added,  C,      Zero,       Bias,   added,  NONE,  13)                       \
    X(lnfw,     float,  Global, weighted, C,    One,        Norm,   weighted, NONE, 14)                      \
    X(lnfb,     float,  Global, biased, C,      Zero,       Norm,   biased, NONE,  15)                       \
    X(qnw,      float,  Block,  qk_norm, HS,    One,        Norm,   qk_norm, NONE, 16)                       \
    X(knw,      float,  Block,  qk_norm, HS,    One,        Norm,   qk_norm, NONE, 17)                       \
    X(headw,    floatX, Global, untied * Vp, C, Zero,       Head,   untied * V, NONE, 18)                    \
    X(vew,      floatX, Block,  value_embed * Vp, NKV * HS, Normal, Embedding, value_embed * V, NONE, 19)    \
    X(vegw,     float,  Block,  value_embed * NKV, kGateChannels, Zero, Norm, value_embed * NKV, NONE, 20)

// A Block's tensor has a copy per layer, kept for the backward pass. NAME_8 are FP8's bytes of a tensor, row
// by row; NAME_t8 the same, transposed. Bytes of weights are kept for all layers only at -r 0; otherwise each
// forward and backward casts a layer's weights when it comes to the layer.
//   kept        how many copies. SAVED(r): one per layer while the recompute level (-r) is below r; otherwise
//               all layers share one, and the backward recomputes it. ENDS(r): the same, but with FP8 only
//               the first and the last layer have copies, and the others keep bytes. A model that does not
//               train keeps nothing: its layers share all buffers
//   IN(other)   the tensor lies in the memory of another row, and lives until another tensor is written
//               there. A DEBUG build fills most of such memory with NaN first
//   elements    names that are 0 or 1: `sequential` and `parallel`, the kind of block; `second`, a norm ln2,
//               which a tied block lacks; `trains`; `dropout`; `qk_norm`; `embed_norm`, a norm behind the
//               embedding; `fp8` and `fp8_head`
//    name        type    where   kept    elements
#define MODEL_ACTS(X)                                                                                       \
    X(embedded,   floatX, Global, ALWAYS, N * C)            /* (B,T,C) */                                   \
    X(raw,        floatX, Global, ALWAYS, embed_norm * N * C)           /* (B,T,C) rows of wte */           \
    X(raw_rstd,   float,  Global, ALWAYS, embed_norm * N)               /* (B,T) */                         \
    X(ln1,        floatX, Block,  ENDS(2),  N * C)          /* (B,T,C) */                                   \
    X(ln1_mean,   float,  Block,  ALWAYS, N)                /* (B,T) */                                     \
    X(ln1_rstd,   float,  Block,  ALWAYS, N)                                                                \
    X(qkv,        floatX, Block,  SAVED(3), N * QKVC)       /* (B,T,NH+2*NKV,HS) */                         \
    X(qk_rstd,    float,  Block,  ALWAYS, qk_norm * N * (NH + NKV))     /* (B,T,NH+NKV) */                  \
    X(att_lse,    float,  Block,  ALWAYS, N * NH)           /* (B,NH,T) log-sum-exp of the scores */        \
    X(atty,       floatX, Block,  SAVED(3), N * QC)         /* (B,T,NH,HS) attention's output */            \
    X(x_mid,      floatX, Block,  sequential ? SAVED(3) : 1, N * C)     /* (B,T,C) after attention */       \
    X(ln2,        floatX, Block,  ENDS(2),  second * N * C)                                                 \
    X(ln2_mean,   float,  Block,  ALWAYS, sequential * N)               /* else ln1's: the same rows */     \
    X(ln2_rstd,   float,  Block,  ALWAYS, sequential * N)                                                   \
    X(fch,        floatX, Block,  SAVED(3), N * FCC)        /* (B,T,F) before act; gated (B,T,2F) */        \
    X(act,        floatX, Block,  ENDS(1),  N * F)          /* (B,T,F) after it; GPT-2: F = 4C */           \
    X(x_out,      floatX, Block,  ALWAYS, N * C)            /* (B,T,C) after the layer */                   \
    X(lnf,        floatX, Global, ALWAYS, N * C)                                                            \
    X(lnf_mean,   float,  Global, ALWAYS, N)                                                                \
    X(lnf_rstd,   float,  Global, ALWAYS, N)                                                                \
    X(logits,     floatX, Global, ALWAYS, head_rows(o, B * T) * Vp) /* (rows,Vp), then their gradient */    \
    X(losses,     float,  Global, ALWAYS, N)                /* (B,T) */                                     \
    X(dx,         floatX, Global, ALWAYS, trains * N * C)   /* (B,T,C) gradient of the residual stream */   \
    X(dbranch,    floatX, Global, ALWAYS, trains * dropout * N * C)     /* dx through a branch's dropout */ \
    X(dbranch2,   floatX, Global, ALWAYS, trains * dropout * parallel * N * C)                              \
    X(narrow,     floatX, Global, ALWAYS, N * std::max(C, QC))          /* never two of these at once: */   \
    X(waiting,    floatX, Global, IN(narrow), N * C)        /* (B,T,C) a branch that a norm will add */     \
    X(counted,    floatX, Global, IN(narrow), N * C)        /* an evaluation's rows of lnf */               \
    X(dlnf,       floatX, Global, IN(narrow), N * C)                                                        \
    X(dln1,       floatX, Global, IN(narrow), N * C)                                                        \
    X(datty,      floatX, Global, IN(narrow), N * QC)                                                       \
    X(dbranch_8,  uint8_t, Global, dropout ? ALWAYS : IN(narrow), fp8 * N * C)      /* -r 3: waiting, too */ \
    X(narrow2,    floatX, Global, ALWAYS, parallel * N * C)                                                 \
    X(waiting2,   floatX, Global, IN(narrow2), parallel * N * C)                                            \
    X(dln2,       floatX, Global, parallel ? IN(narrow2) : IN(narrow), N * C)                               \
    X(wide,       floatX, Global, ALWAYS, trains * N * std::max(F, QKVC))                                   \
    X(dact,       floatX, Global, IN(wide), trains * N * F)             /* (B,T,F) */                       \
    X(dqkv,       floatX, Global, IN(wide), trains * N * QKVC)          /* (B,T,NH+2*NKV,HS) */             \
    X(ln1_8,      uint8_t, Block, IN(ln1), fp8 * N * C)     /* (B,T,C) */                                   \
    X(ln1_t8,     uint8_t, Block, SAVED(2), fp8 * N * C)    /* (C,B,T) */                                   \
    X(ln2_8,      uint8_t, Block, IN(ln2), fp8 * second * N * C)                                            \
    X(ln2_t8,     uint8_t, Block, SAVED(2), fp8 * second * N * C)                                           \
    X(act_t8,     uint8_t, Block, SAVED(1), fp8 * N * F)    /* (F,B,T) */                                   \
    X(lnf_8,      uint8_t, Global, IN(lnf), fp8_head * N * C)                                               \
    X(lnf_t8,     uint8_t, Global, ALWAYS, fp8_head * N * C)                                                \
    X(rows8,      uint8_t, Global, ALWAYS, fp8 * N * std::max({FCC, QKVC, fp8_head * Vp}))                  \
    X(act_8,      uint8_t, Global, IN(rows8), fp8 * N * F)                                                  \
    X(dfch_8,     uint8_t, Global, IN(rows8), fp8 * N * FCC)                                                \
    X(dqkv_8,     uint8_t, Global, IN(rows8), fp8 * N * QKVC)                                               \
    X(dlogits_8,  uint8_t, Global, IN(rows8), fp8_head * N * Vp)                                            \
    X(columns8,   uint8_t, Global, ALWAYS, fp8 * N * std::max({C, FCC, QKVC}))                              \
    X(dbranch_t8, uint8_t, Global, IN(columns8), fp8 * N * C)                                               \
    X(dfch_t8,    uint8_t, Global, IN(columns8), fp8 * N * FCC)                                             \
    X(dqkv_t8,    uint8_t, Global, IN(columns8), fp8 * N * QKVC)                                            \
    X(dlogits_t8, uint8_t, Global, IN(logits), fp8_head * N * Vp)                                           \
    X(qkvw_8,     uint8_t, Block, SAVED(1), fp8 * QKVC * C) /* (QKVC,C) */                                  \
    X(qkvw_t8,    uint8_t, Block, SAVED(1), fp8 * QKVC * C) /* (C,QKVC) */                                  \
    X(fcw_8,      uint8_t, Block, SAVED(1), fp8 * FCC * C)                                                  \
    X(fcw_t8,     uint8_t, Block, SAVED(1), fp8 * FCC * C)                                                  \
    X(fcprojw_8,  uint8_t, Block, SAVED(1), fp8 * C * F)                                                    \
    X(fcprojw_t8, uint8_t, Block, SAVED(1), fp8 * C * F)                                                    \
    X(headw_8,    uint8_t, Global, ALWAYS, fp8_head * Vp * C)           /* wte's, or headw's */             \
    X(headw_t8,   uint8_t, Global, ALWAYS, fp8_head * Vp * C)

#define X(name, ...) PARAM_##name,
enum ParamId { MODEL_PARAMS(X) NUM_PARAMS };
#undef X
#define X(name, type, where, rows, cols, init, kind, ...) \
    && (Kind::kind != Kind::Embedding || PARAM_##name <= PARAM_vew)
static_assert(true MODEL_PARAMS(X), "vew, which does not decay, is last in its bucket: model_update");
#undef X
#define X(name, ...) ACT_##name,
enum ActId { MODEL_ACTS(X) NUM_ACTS };
#undef X

// One pointer per tensor; a Block's points to one layer's copy (act_views).
struct Acts {
#define X(name, type, ...) type* name;
    MODEL_ACTS(X)
#undef X
};
static_assert(sizeof(Acts) == NUM_ACTS * sizeof(void*), "act_views addresses the fields by row");

// Columns of q, of qkv, of what the MLP's first linear layer gives, and of what its second one takes.
struct Widths { size_t QC, QKVC, FCC, F; };
static Widths model_widths(const Config& c) {
    const Config::Shape s = c.shape();
    const size_t HS = s.HS, F = s.F;
    return {c.NH * HS, (c.NH + 2 * s.NKV) * HS, act_columns(s.mlp, F), F};
}

// The rows of the parameters as numbers, as layer l has them, and as the whole model has them.
static std::vector<ParamSpec> param_rows(const Config& c, int l) {
    const Config::Shape s = c.layer(l);
    const size_t V = c.V, Vp = c.Vp, C = c.C, maxT = c.maxT, HS = s.HS, NKV = s.NKV;
    const auto [QC, QKVC, FCC, F] = model_widths(c);
    const size_t biased = c.norm == NormKind::Layer, second = c.block != Block::ParallelTied;
    const size_t learned = !c.is_llama(), added = !c.is_llama(), untied = !s.tied;
    const size_t qkv_bias = added || s.qkv_bias, value_embed = s.value_embed;
    const size_t weighted = s.norm_weights, qk_norm = s.qk_norm && weighted;
    const Parts NONE = {}, WHOLE = {0}, QKV = {QC, NKV * HS, NKV * HS};
    const Parts FC = is_gated(s.mlp) ? Parts{F, F} : WHOLE;             // gate and up
    const Init Zero = Init::Zero, One = Init::One, Normal = Init::Normal;
    const Init Projection = c.is_llama() ? Init::Zero : Init::Residual;
    std::vector<ParamSpec> specs;
#define X(name_, type_, where_, rows_, cols_, init_, kind_, live_, parts_, id_)                              \
    static_assert(Kind::kind_ != Kind::Norm || sizeof(type_) == sizeof(float), "norms are fp32");            \
    specs.push_back(param_spec(#name_, bytes_##type_, Where::where_, rows_, cols_, init_, Kind::kind_,       \
                               live_, parts_, id_));
    MODEL_PARAMS(X)
#undef X
    return specs;
}
static std::vector<ParamSpec> param_table(const Config& c) {
    std::vector<ParamSpec> specs;
    for (int l = 0; l < c.L; l++) { param_layer(&specs, param_rows(c, l), l); }
    param_offsets(&specs, c.L);
    return specs;
}

// What a run may choose; fixed after model_allocate.
struct Options : ModelSettings {
    bool trains = true;         // else forward only: gradients and optimizer have no memory
    bool fp8 = false, fp8_head = false;         // the layers' matrix products, and the LM head's, in FP8
    int muon_steps = 5;         // of Newton-Schulz
    size_t muon_bytes = (size_t)576 << 20;      // that Muon may work in: see muon_share
    float loss_scale = kFirstLossScale;         // FP16: the first one
    int text_rows = 0;          // texts that can be written at once; 0: none
    Sampling sampling = {};     // how their tokens are drawn
    Split split = {};           // this rank's part of the job
    int lanes = 1;              // of this rank; all have the same number of micro-steps (see the exchange)
    bool graphs = true;         // on one GPU a micro-step is a CUDA graph
    int document_end = -1;      // the token at which a document begins; -1: a row is one document
    size_t state_bytes() const { return state_bf16 ? 2 : sizeof(float); }       // of an element of m or v
};

// Of N rows of logits, those that are in memory at once.
static int head_rows(const Options& o, int N) {
    return std::min(N, round_up(ceil_div(N, o.head_chunks), 64));
}

// Fills specs, for a pass over (B,T), and returns where the activations end if they begin at `offset`.
static size_t act_specs(ActSpec* specs, const Config& c, int B, int T, const Options& o, size_t offset = 0) {
    const size_t N = (size_t)B * T, C = c.C, NH = c.NH, Vp = c.Vp;
    const auto [QC, QKVC, FCC, F] = model_widths(c);
    const size_t NKV = c.shape().NKV, qk_norm = c.shape().qk_norm;
    const size_t embed_norm = c.shape().embed_norm;
    const size_t sequential = c.block == Block::Sequential, parallel = !sequential;
    const size_t second = c.block != Block::ParallelTied, trains = o.trains, dropout = o.dropout > 0.0;
    const size_t fp8 = o.fp8, fp8_head = o.fp8_head;
    const int ALWAYS = trains ? c.L : 1;
    auto SAVED = [=](int level) { return o.recompute < level ? ALWAYS : 1; };
    auto ENDS = [=](int level) { return fp8 ? std::min(2, SAVED(level)) : SAVED(level); };
    int i = 0;
#define IN(other) act_in(ACT_##other)
#define X(name_, type_, where_, kept_, elems_)                                                               \
    specs[i++] = act_spec(#name_, bytes_##type_, elems_, Where::where_, kept_, specs, &offset);
    MODEL_ACTS(X)
#undef X
#undef IN
    return offset;
}

static Acts act_views(char* base, const ActSpec* specs, int l) {
    Acts views;
    for (int i = 0; i < NUM_ACTS; i++) {
        const int copy = std::min(l, specs[i].copies - 1);
        ((void**)&views)[i] = base + specs[i].offset + copy * specs[i].stride * specs[i].elem_bytes;
    }
    return views;
}

// == 7.1 memory, and tensors by name ==
// One batch: on the device, or in a staging slot of pinned memory, with the same layout.
struct Inputs {
    int *tokens, *targets;      // (B,T)
    int* order;                 // (B,T) positions sorted by token, for the embedding's backward
    int* counted;               // an evaluation's positions whose losses count; in order's memory
    int* likeliest;             // is a counted target the likeliest token? Written over `counted`
    int4 *segments, *splits;    // see TokenBuckets
    Span* documents;            // (B,T) see Mask
    size_t bytes;
};

struct Optimizer {              // state. From ZeRO stage 1 on, a rank has that of its shards only
    masterX* master;            // null at -w 0 and in FP32 builds; fp32 parameters leave their part empty
    char *m, *v;                // v lies behind m, in one array; fp32, or bf16 with state_bf16
    char* muon_updates;         // null without Muon and on one GPU, see model_update_muon
    ChunkRange* ranges;         // (buckets)
};

struct Activations {
    ActSpec specs[NUM_ACTS];
    char* data;                 // see MODEL_ACTS; Muon works in this memory, too, and between steps texts are
                                // written there
    size_t bytes, muon_bytes, text_bytes;       // of data; of these, what only Muon needs, and only texts
    float* scratch;             // one op at a time uses it: the largest need of any op. With bf16 gradients
                                // a sum is at its start, see Backward::sum
    void* workspace;            // cuBLASLt's
};

struct Feed {
    Inputs inputs;                      // on the device
    TokenBuckets buckets;               // of the batch in `inputs`; pointers on the device
    const Span* documents;              // likewise; null: a row is one
    static const int kSlots = 2;        // staging slots: the host may run this many micro-steps ahead
    Inputs staging[kSlots];
    Event staged[kSlots];               // the slot's last copy has left it
    int64_t count;                      // batches so far
};

// The exchange between ranks. A job of one rank uses only the records.
struct BucketExchange {
    Event arrived;              // the gradients of all ranks are here
    Event gathered;             // the updated parameters of all ranks' shards are here
    char* inbox;                // one of Exchange's three: where the gradients arrive
};
struct Exchange {
    Stream stream;
    std::vector<BucketExchange> buckets;
    Event handover;             // of stream_follow
    char* inboxes;              // three, for other ranks' gradients
    uint32_t next_inbox;        // counts up: buckets take inboxes 0 and 1 in turn; the embedding has inbox 2
    int bucket_in_flight;       // the bucket that is being exchanged; -1: none
    char* records;              // (world,record_bytes) what the ranks tell each other about a step
    char* record;               // this rank's
    size_t record_bytes, losses_at;     // a record: sums of squares of the rank's chunks, its lanes' losses,
    size_t stats_at;                    // with FP8 what its casts have seen
};

// --matmul-dtype fp8. First come two tensors for each linear layer, its input and its output's gradient, and
// these are saved. Then one for each weight: its scale follows from the weight. The last is for the logits'
// gradient, whose scale is fixed. The classifier sets its inverse in each micro-step, so it is not saved:
// what is saved may change in the update alone.
struct Fp8 {
    int linears;                // the layers' linear layers, then the LM head
    Fp8Tensor* tensors;         // (3*linears + 1), of which (2*linears) are saved
};

struct Model {
    Config config;
    Options options;
    std::vector<ParamSpec> param_specs;
    Layout layout;
    char* params;               // bucket by bucket (llmc/model/layout.h)
    Optimizer opt;              // all null, as in grads, where nothing is trained
    char* grads;                // lane_buffers(lanes) arenas of all buckets
    Activations acts;
    Feed feed;
    Exchange exchange;
    Fp8 fp8;
    MuonShare muon;
    DeviceState* state;
    float* rotation;            // (maxT,2,HS/2) of rotary positions
    Stream stream;
    Graph micro_graphs[2][2];   // of a micro-step: [adds to gradients][has a split token]
    uint32_t step;              // steps done, skipped updates too: a key of stochastic rounding and dropout
};

static size_t decoder_bytes(const Config& c, int T, int rows);     // section 9: what writing texts needs

static Inputs inputs_layout(char* base, int B, int T) {
    const size_t N = (size_t)B * T;
    Places places = {(uintptr_t)base};
    Inputs in;
    places.take(&in.tokens, N), places.take(&in.targets, N), places.take(&in.order, N);
    in.counted = in.likeliest = in.order;
    places.take(&in.segments, (size_t)max_bucket_segments((int64_t)N));
    places.take(&in.splits, (size_t)max_bucket_splits((int64_t)N));
    places.take(&in.documents, N);
    in.bytes = places.bytes();
    return in;
}

static size_t model_scratch_bytes(const Config& c, const Options& options) {
    const int B = options.B, T = options.T, N = B * T;
    const Config::Shape s = c.shape();
    const int NKV = s.value_embed * s.NKV;      // 0 without value embeddings
    if (!options.trains) { return 0; }          // only backward passes need any
    // GPT-2: a norm's weight and bias and a branch's bias; other blocks have up to two of each. qkvb and fcb:
    // the narrower one may be summed in more chunks and then needs more
    size_t bytes = std::max({encoder_backward_scratch_bytes(B, T, std::max(c.C, NKV * s.HS)),
                             norm_backward_scratch_bytes(N, c.C, c.is_gpt2() ? 3 : 6),
                             bias_backward_scratch_bytes(N, (int)model_widths(c).QKVC),
                             activate_backward_scratch_bytes(N, 4 * c.C),
                             attention_backward_scratch_bytes(B, T, c.NH),
                             rotate_backward_scratch_bytes(s.HS),
                             value_embed_scratch_bytes(N, NKV)});
    if (options.fp8) {
        const int widest = std::max(4 * c.C, (int)model_widths(c).QKVC);
        bytes = std::max(bytes, fp8_cast_scratch_bytes(N, widest));
    }
    if (options.grads_bf16) {                   // a weight gradient in fp32, behind that of wte
        const std::vector<ParamSpec> specs = param_table(c);
        for (int i = 0; i < NUM_PARAMS; i++) {
            if (i != PARAM_wte) { bytes = std::max(bytes, specs[i].elems * sizeof(float)); }
        }
        const size_t slots = encoder_backward_scratch_bytes(B, T, NKV * s.HS);      // behind vew's
        bytes = std::max(bytes, specs[PARAM_vew].elems * sizeof(float) + slots);
        bytes += specs[PARAM_wte].elems * sizeof(float);
    }
    return bytes;
}

// ---- memory ----
enum class Memory { Plain, Zeroed, Shared };    // Shared: zeroed, and exchanged with other ranks

// Every array that a model has on the device: visit(name, pointer to it, bytes, Memory). The memory plan, the
// allocation and the release each walk over this list. 0 bytes: the model lacks the array, which is null.
template <class Visit> static void model_arrays(Model* model, Visit visit) {
    const Config& c = model->config;
    const Options& o = model->options;
    const Layout& layout = model->layout;
    const Memory shared = o.split.world > 1 ? Memory::Shared : Memory::Zeroed;
    visit("parameters", &model->params, layout.params_bytes, shared);
    visit("activations", &model->acts.data, model->acts.bytes, Memory::Plain);
    visit("scratch", &model->acts.scratch, model_scratch_bytes(c, o), Memory::Plain);
    visit("matmul workspace", &model->acts.workspace, gemm_workspace_bytes(), Memory::Plain);
    visit("inputs", &model->feed.inputs.tokens, inputs_layout(nullptr, o.B, o.T).bytes, Memory::Plain);
    visit("state", &model->state, sizeof(DeviceState), Memory::Plain);
    visit("rotation", &model->rotation,
          c.is_llama() ? rotation_table_size(c.maxT, c.llama.HS) * sizeof(float) : 0, Memory::Plain);
    if (!o.trains) { return; }

    visit("gradients", &model->grads, layout.grads_bytes * lane_buffers(o.lanes), shared);
    visit("records", &model->exchange.records, model->exchange.record_bytes * o.split.world, shared);
    // an inbox for the embedding's bucket and two for the others: one is filled while the other is summed
    const size_t inboxes = layout.buckets[layout.embedding()].padded + 2 * layout.largest_but_first;
    visit("exchange", &model->exchange.inboxes, o.split.world > 1 ? inboxes * sizeof(float) : 0,
          shared);

    visit("master weights", &model->opt.master,
          bytes_floatX == 2 && o.master ? layout.state_elems * bytes_masterX : 0, Memory::Zeroed);
    visit(o.muon ? "m and AdamW's v" : "AdamW m and v", &model->opt.m,
          (layout.state_elems + layout.v_elems) * o.state_bytes(), Memory::Zeroed);
    visit("chunk ranges", &model->opt.ranges, layout.buckets.size() * sizeof(ChunkRange), Memory::Plain);
    visit("FP8 scales", &model->fp8.tensors, o.fp8 * (3 * model->fp8.linears + 1) * sizeof(Fp8Tensor),
          Memory::Zeroed);
    visit("Muon's updates", &model->opt.muon_updates,
          o.muon && o.split.world > 1 ? model->muon.elems * bytes_floatX : 0, shared);
}

// Fills in the model's description and the sizes of its parts; allocates nothing.
static void model_describe(Model* model, const Config& config, const Options& options) {
    *model = {};
    model->config = config;
    model->options = options;
    model->param_specs = param_table(config);
    // --grad-dtype bf16 leaves LayerNorms and biases in fp32: 0.1 % of the gradients, and sums over all
    // tokens, which have the most digits to lose
    model->layout = param_layout(model->param_specs, config.L, options.split, options.grads_bf16,
                                 options.muon);
    model->muon = muon_share(model->layout, model->param_specs, options.split, bytes_floatX,
                             options.muon_bytes);
    Activations& acts = model->acts;
    const size_t passes = act_specs(acts.specs, config, options.B, options.T, options);
    const size_t muon = options.trains && options.muon ? model->muon.bytes(bytes_floatX) : 0;
    acts.bytes = std::max({passes, muon, decoder_bytes(config, options.T, options.text_rows)});
    acts.muon_bytes = std::max(passes, muon) - passes;
    acts.text_bytes = acts.bytes - passes - acts.muon_bytes;
    model->fp8.linears = 4 * config.L + 1;
    Exchange& e = model->exchange;
    e.losses_at = model->layout.shard_elems / kChunk * sizeof(double);
    e.stats_at = round_up(e.losses_at + options.lanes * sizeof(float), sizeof(Fp8Stats));
    e.record_bytes = round_up(e.stats_at + options.fp8 * 3 * model->fp8.linears * sizeof(Fp8Stats), kAlign);
}

// Every byte that the run will take on the device, by name. Each tensor of the activations has a line.
static std::vector<MemoryItem> model_memory_plan(const Config& c, const Options& options) {
    Model model;
    model_describe(&model, c, options);
    std::vector<MemoryItem> plan;
    model_arrays(&model, [&](const char* name, auto** at, size_t bytes, Memory) {
        if ((void*)at != (void*)&model.acts.data) { plan.push_back({name, bytes}); }
    });
    for (const ActSpec& a : model.acts.specs) {
        if (!a.is_shared) { plan.push_back({a.name, round_up(a.elems * a.elem_bytes, kAlign) * a.copies}); }
    }
    plan.push_back({"Muon's products", model.acts.muon_bytes});
    plan.push_back({"keys and values of texts", model.acts.text_bytes});
    if (kDeviceIsCuda) { return plan; }
    if (bytes_floatX != sizeof(floatX)) {       // of the CUDA program
        plan.push_back({"cuBLASLt's workspace", (size_t)64 << 20});
        return plan;
    }
    // Here the host's own buffers take the same memory: staged inputs, each loader's two batches of tokens
    // and targets (without training there is one loader), and one tensor on its way from or to a file, in
    // fp32 and in its type.
    size_t largest = 0;
    for (const ParamSpec& s : model.param_specs) { largest = std::max(largest, s.elems); }
    const int B = options.B, T = options.T;
    const size_t batches = (options.trains ? 2 : 1) * 2 * 2 * sizeof(int) * (size_t)B * T;
    plan.push_back({"host buffers", Feed::kSlots * inputs_layout(nullptr, B, T).bytes + batches +
                                        largest * (sizeof(float) + sizeof(uint16_t))});
    return plan;
}

// The memory that the plan may take, and a reserve: for the driver, cuBLASLt's own buffers, fragmentation and
// NCCL.
static MemoryRoom memory_room(const DeviceInfo& device) {
    const size_t nccl = kDeviceHasNccl && comm.world > 1 ? (size_t)512 << 20 : 0;
    return {device.name, device.memory_free, device.memory_total / 100 + nccl};
}

// The flags that need less memory, from the least to the most costly. A resumed run may choose those that
// keep the bits.
struct MemoryFlag { const char* text; bool keeps_bits; void (*apply)(Options* o); };
static const MemoryFlag kMemoryFlags[] = {
    {"-zs 1", true, [](Options* o) { o->split.zero = std::max(o->split.zero, (int)(o->split.world > 1)); }},
    {"-r 1", true, [](Options* o) { o->recompute = std::max(o->recompute, 1); }},
    {"-r 2", true, [](Options* o) { o->recompute = std::max(o->recompute, 2); }},
    {"--head-chunks 8", false, [](Options* o) { if (!o->fp8_head) { o->head_chunks = 8; } }},
    {"--state-dtype bf16", false, [](Options* o) { o->state_bf16 = true; }},
    {"--grad-dtype bf16", false, [](Options* o) {
        o->grads_bf16 = kDeviceIsCuda || bytes_floatX == 2;
        if (o->grads_bf16) { o->lanes = 1; }
    }},
    {"-r 3", true, [](Options* o) { o->recompute = 3; }},
    {"-w 0", false, [](Options* o) { o->master = 0; }}};

// The flags that make this plan smaller.
static std::vector<MemoryFlag> memory_flags(const Config& c, const Options& options, bool resumed) {
    std::vector<MemoryFlag> flags;
    for (const MemoryFlag& flag : kMemoryFlags) {
        Options with = options;
        flag.apply(&with);
        const size_t bytes = memory_total(model_memory_plan(c, with));
        if (resumed && !flag.keeps_bits) { continue; }
        if (bytes < memory_total(model_memory_plan(c, options))) { flags.push_back(flag); }
    }
    return flags;
}
// The plan with B rows, and with the flags whose bits are set.
static std::vector<MemoryItem> model_memory_plan(const Config& c, Options o, int B,
                                                 const std::vector<MemoryFlag>& flags, unsigned with) {
    o.B = B;
    for (const MemoryFlag& flag : flags) {
        if (with & 1) { flag.apply(&o); }
        with /= 2;
    }
    return model_memory_plan(c, o);
}

static void model_check_memory(const Config& c, const Options& options, const DeviceInfo& device,
                               bool resumed = false) {
    const std::vector<MemoryFlag> flags = memory_flags(c, options, resumed);
    memory_check([&](int B, unsigned with) { return model_memory_plan(c, options, B, flags, with); }, flags,
                 memory_room(device), {options.B, options.T, resumed});
}

// ---- allocation ----
static void feed_init(Feed* feed, int B, int T) {
    feed->inputs = inputs_layout((char*)feed->inputs.tokens, B, T);
    for (int i = 0; i < Feed::kSlots; i++) {
        feed->staging[i] = inputs_layout((char*)pinned_malloc(feed->inputs.bytes, "staging"), B, T);
        feed->staged[i] = event_create();
    }
}

static void exchange_init(Exchange* exchange, const Layout& layout, int rank) {
    exchange->record = exchange->records + rank * exchange->record_bytes;
    exchange->stream = stream_create_urgent();
    exchange->handover = event_create();
    exchange->bucket_in_flight = -1;
    for (size_t bucket = 0; bucket < layout.buckets.size(); bucket++) {
        exchange->buckets.push_back({event_create(), event_create(), nullptr});
    }
}

static DeviceState model_read_state(Model* model) {      // waits for the device
    DeviceState state;
    copy_to_host(&state, model->state, sizeof(state), model->stream);
    stream_sync(model->stream);
    return state;
}
static void model_write_state(Model* model, const DeviceState& state) {
    copy_to_device(model->state, &state, sizeof(state), model->stream);
    stream_sync(model->stream);
}
static void model_forget_skips(Model* model) {
    DeviceState state = model_read_state(model);
    state.update.skipped_in_a_row = 0;
    model_write_state(model, state);
}

static void optimizer_init(Model* model) {
    DeviceState state = {};
    state.update.loss_scale = kFp16 ? model->options.loss_scale : 1.0f;
    model_write_state(model, state);
    if (!model->options.trains) { return; }
    model->opt.v = model->opt.m + model->layout.state_elems * model->options.state_bytes();
    const std::vector<ChunkRange> ranges = chunk_ranges(model->layout);
    copy_to_device(model->opt.ranges, ranges.data(), ranges.size() * sizeof(ChunkRange), model->stream);
    stream_sync(model->stream);
}

static void model_allocate(Model* model, const Config& config, const Options& options) {
    model_describe(model, config, options);
    model->stream = stream_create();
    model_arrays(model, [&](const char* name, auto** at, size_t bytes, Memory kind) {
        if (bytes == 0) { return; }
        void* array = kind == Memory::Shared ? device_comm_malloc(bytes, name) : device_malloc(bytes, name);
        *at = (std::decay_t<decltype(*at)>)array;
        // Gaps between tensors take part in the norm and in AdamW: they are zero and stay zero.
        if (kind != Memory::Plain) { device_zero(*at, bytes, model->stream); }
    });
    feed_init(&model->feed, options.B, options.T);
    exchange_init(&model->exchange, model->layout, options.split.rank);
    optimizer_init(model);
    if (model->rotation) {
        const Config::Shape& s = config.llama;
        std::vector<float> table(rotation_table_size(config.maxT, s.HS));
        rotation_table(table.data(), config.maxT, s.HS, s.theta,
                       {s.rope_factor, s.rope_low, s.rope_high, s.rope_original});
        copy_to_device(model->rotation, table.data(), table.size() * sizeof(float), model->stream);
        stream_sync(model->stream);
    }
    gemm_init(model->stream, model->acts.workspace, gemm_workspace_bytes(), options.tf32);
    select_kernels(options.kernels == Kernels::Portable, options.tf32);
    const int HS = config.shape().HS;
    if (options.kernels == Kernels::Sm90 && !attention_uses_sm90(HS)) {
        die("--kernels sm90: no Hopper kernel serves head size %d here\n"
            "hint: they need an H100 or H200, a 16-bit build for sm_90a and a head size of 48, 64, 80, 96, "
            "112 or 128; --kernels auto takes what fits", HS);
    }
}

static void model_free(Model* model) {
    stream_sync(model->stream);
    stream_sync(model->exchange.stream);
    gemm_free(model->stream);
    for (Graph* graphs : model->micro_graphs) { graph_free(&graphs[0]), graph_free(&graphs[1]); }
    for (int i = 0; i < Feed::kSlots; i++) {
        pinned_free(model->feed.staging[i].tokens);
        event_destroy(model->feed.staged[i]);
    }
    for (const BucketExchange& b : model->exchange.buckets) {
        event_destroy(b.arrived);
        event_destroy(b.gathered);
    }
    event_destroy(model->exchange.handover);
    model_arrays(model, [&](const char*, auto** at, size_t, Memory kind) {
        if (*at && kind == Memory::Shared) { device_comm_free(*at); }
        else if (*at) { device_free(*at); }
    });
    stream_destroy(model->exchange.stream);
    stream_destroy(model->stream);
}

// ---- tensors by name: where they are, loading, initialisation ----
static char* model_param_data(const Model* model, int i, int l) {
    const ParamAddress at = param_address(model->param_specs, model->layout, i, l);
    return model->params + model->layout.buckets[at.bucket].params +
           at.offset * model->param_specs[i].elem_bytes;
}

// Elements [begin, end) of layer l's copy of a tensor: this rank has their master weights, m and v.
struct Held { const char *array, *type; void* memory; };    // of element `begin`; null: not in this model
struct HeldPart { size_t begin, end; Held in[3]; };
static HeldPart model_held_part(const Model* model, int i, int l) {
    const ParamAddress address = param_address(model->param_specs, model->layout, i, l);
    const Bucket& b = model->layout.buckets[address.bucket];
    const size_t from = std::max(address.offset, b.held_at);
    const size_t to = std::min(address.offset + model->param_specs[i].elems, b.held_at + b.held);
    if (from >= to) { return {}; }
    auto held = [&](const char* array, const char* type, void* arena, size_t bucket) {
        const size_t at = (bucket + from - b.held_at) * state_type_bytes(type);
        return Held{array, type, arena ? (char*)arena + at : nullptr};
    };
    masterX* master = b.elem_bytes == 2 ? model->opt.master : nullptr;
    const char* state = model->options.state_bf16 ? "bf16" : "f32";
    return {from - address.offset, to - address.offset,
            {sizeof(masterX) == 2 ? held("low", "u16", master, b.state)
                                  : held("master", "f32", master, b.state),
             held("m", state, model->opt.m, b.state),
             held("v", state, b.muon ? nullptr : model->opt.v, b.v)}};
}

static void model_set_param(Model* model, int i, int l, const float* values /*(elems)*/) {
    const ParamSpec& s = model->param_specs[i];
    std::vector<floatX> rounded;
    std::vector<uint16_t> lows;
    const void *data = values, *masters = values;
    if (s.elem_bytes != sizeof(float)) {
        rounded.assign(values, values + s.elems);
        data = rounded.data();
    }
    if (sizeof(masterX) == 2 && model->opt.master && s.elem_bytes == 2) {
        lows.resize(s.elems);
        for (size_t e = 0; e < s.elems; e++) { master_split(values[e], (uint16_t*)&rounded[e], &lows[e]); }
        masters = lows.data();
    }
    copy_to_device(model_param_data(model, i, l), data, s.elems * s.elem_bytes, model->stream);
    const HeldPart part = model_held_part(model, i, l);
    if (part.in[0].memory) {
        copy_to_device(part.in[0].memory, (const masterX*)masters + part.begin,
                       (part.end - part.begin) * sizeof(masterX), model->stream);
    }
    stream_sync(model->stream);
}

// GPT-2's initialisation (Radford et al. 2019, section 2.3: residual projections scaled by 1/sqrt(number of
// residual layers)). Values depend on (seed, tensor, position) alone. Padded rows are zero and stay so.
static void model_init_random(Model* model, uint64_t seed) {
    std::vector<float> values;
    for (int i = 0; i < NUM_PARAMS; i++) {
        const ParamSpec& s = model->param_specs[i];
        const size_t live = s.live_rows * s.cols;
        const float std = s.init == Init::Residual ? (float)(0.02 / sqrt(2.0 * model->config.L)) : 0.02f;
        for (int l : s.layers) {
            values.assign(s.elems, s.init == Init::One ? 1.0f : 0.0f);
            if (s.init == Init::Normal || s.init == Init::Residual) {
                // [first, end): this layer's elements in the tensor of all layers
                const int64_t first = (int64_t)(l * live), end = first + (int64_t)live;
                #pragma omp parallel for schedule(static)
                for (int64_t block = first / 4; block < ceil_div(end, (int64_t)4); block++) {
                    float z[4];
                    rand_normal4(z, seed, s.id, (uint64_t)block);
                    for (int64_t e = std::max(first, 4 * block); e < std::min(end, 4 * block + 4); e++) {
                        values[e - first] = z[e - 4 * block] * std;
                    }
                }
            }
            model_set_param(model, i, l, values.data());
        }
    }
}

// ---- where gradients are ----
// What holds for one micro-step.
struct MicroStep {
    uint32_t number = 0;        // among all of the job's in a step: keys of rounding and dropout
    int count = 1;              // micro-steps of this rank in a step
    int lane = 0;               // of this rank's lanes, the one to whose gradients it belongs
    bool begins_lane = true;    // it stores gradients; the others of a lane add to them
    bool ends_lane = true;
    bool casts_weights = true;  // a step's first: with FP8 the weights have changed
    bool exchanges = false;     // each bucket of gradients goes to the other ranks once it is complete
};

// Where the backward stores a gradient: in the buffer of the micro-step's lane.
static Grad model_grad(const Model* model, ParamId id, int l, const MicroStep& micro) {
    const ParamAddress at = param_address(model->param_specs, model->layout, id, l);
    const Bucket& b = model->layout.buckets[at.bucket];
    const size_t buffer = lane_buffer(micro.lane) * model->layout.grads_bytes;
    char* data = model->grads + buffer + b.grads + at.offset * b.grad_bytes;
    const Accumulate acc = micro.begins_lane ? Accumulate::No : Accumulate::Yes;
    const RoundKey key = {model->options.seed, model->step, micro.number, kRoundGrads};
    return Grad{(float*)data, acc, b.grads_bf16, key, b.first + at.offset};
}

// == 8 a step ==
// train_step, then the functions that it calls, roughly in the order of the calls:
static void model_micro_step(Model* model, const int* tokens, const int* targets, int B, int T, int i,
                             int count, int64_t counted = -1, const char* conversations = nullptr);
static MicroStep micro_step_of(const Model* model, int i, int count);
static void model_feed(Model* model, const int* tokens, const int* targets, int B, int T, ClassifierMode mode,
                       const int* counted = nullptr, const char* conversations = nullptr);
static void model_forward(Model* model, int B, int T, const MicroStep* micro = nullptr);
static void model_head(Model* model, int B, int T, float weight, float* mean, Accumulate acc,
                       const MicroStep* micro = nullptr);        // losses, and the LM head's backward
static void model_backward(Model* model, int B, int T, const MicroStep& micro);
static void model_bucket_complete(Model* model, int bucket, const MicroStep& micro);
static void model_merge_lanes(Model* model, int lane, size_t offset, size_t n);
static void stream_follow(const Model* model, Stream later, Stream earlier);
static void model_sum_bucket(Model* model, int bucket, int count);
static StoredGrads model_summed_grads(const Model* model, int count, int bucket, size_t from);
static void model_await_params(Model* model, int bucket);
static void model_update(Model* model, int count, double lr, double muon_lr = 0.0);
template <class Send> static void model_exchange_now(Model* model, Send send);
static void model_update_muon(Model* model, int count, Rows rows, double lr);
static StateOf<float> model_state(const Model* model, char* arena, size_t at);
static void model_orthogonalise(Model* model, muonX* updates, int layers);
static void model_gather_params(Model* model, int first, int count);

// False: a signal came before the last micro-step. There is no update then, and the run ends.
static bool train_step(Model* model, DataLoader* loader, const Saver& saver, double lr, double muon_lr) {
    const int count = rank_micro_steps();
    const int64_t counted = data_counted_targets(*loader);     // of the whole step, before its first part
    for (int i = 0; i < count; i++) {
        if (stop_agreed(model->step)) { return false; }
        if (run.overfit) { dataloader_seek(loader, 0); }
        data_next(loader);
        model_micro_step(model, loader->inputs, loader->targets, run.B, run.T, i, count, counted,
                         loader->conversations);
    }
    saver_hold(saver);                          // weights change only after a checkpoint has its copies
    model_update(model, count, lr, muon_lr);
    return true;
}

// Adds a micro-step's part to the mean loss over the total batch, and to the gradients; a lane's first
// micro-step stores them. counted: the targets of the total batch that are not -1, of all ranks; -1: all are.
// A step that counts none has loss and gradients 0. conversations: see find_documents.
static void model_micro_step(Model* model, const int* tokens, const int* targets, int B, int T, int i,
                             int count, int64_t counted, const char* conversations) {
    const MicroStep micro = micro_step_of(model, i, count);
    const Accumulate add = micro.begins_lane ? Accumulate::No : Accumulate::Yes;
    if (counted < 0) { counted = (int64_t)B * T * count * model->options.split.world; }
    const float weight = counted > 0 ? (float)(1.0 / (double)counted) : 0.0f;
    float* losses = (float*)(model->exchange.record + model->exchange.losses_at);     // (lanes)
    model_feed(model, tokens, targets, B, T, ClassifierMode::LossAndGrad, nullptr, conversations);
    auto work = [&] {
        model_forward(model, B, T, &micro);
        model_head(model, B, T, weight, losses + micro.lane, add, &micro);
        model_backward(model, B, T, micro);
    };
    // A graph starts each kernel 1 us sooner, which is 0.35 ms for 124M's 350 kernels. Each micro-step
    // records its graph anew, because arguments change. A token that is split (6.1) takes one kernel more, so
    // that is another graph. Ranks use none: an exchange waits for events from outside, which a graph cannot.
    // FP8 uses none: its first step, and the first micro-step of each step, have other kernels.
    if (model->options.graphs && model->options.split.world == 1 && !model->options.fp8) {
        Graph* graphs = model->micro_graphs[add == Accumulate::Yes];
        graph_run(&graphs[model->feed.buckets.num_splits > 0], model->stream, work, true);
    } else {
        work();
    }
    if (micro.ends_lane && !micro.exchanges) { model_merge_lanes(model, micro.lane, 0, model->layout.elems); }
}

// This rank's micro-step number i of `count`. The job's micro-steps are numbered rank by rank. Lanes are
// groups of micro-steps, explained where the exchange begins.
static MicroStep micro_step_of(const Model* model, int i, int count) {
    const Split& split = model->options.split;
    const int per_lane = count / model->options.lanes;
    return {.number = (uint32_t)(split.rank * count + i),
            .count = count,
            .lane = i / per_lane,
            .begins_lane = i % per_lane == 0,
            .ends_lane = i % per_lane == per_lane - 1,
            .casts_weights = i == 0,
            .exchanges = split.world > 1 && i == count - 1};
}

// ---- feed ----
// The host waits, perhaps for work of other ranks. CommWait says so to the watch (llmc/comm/watch.h), which
// then does not take this rank for the one that hangs.
static void await_event(Event event) {
    CommWait waiting;
    event_wait(event);
}

// Copies a batch to the device, asynchronously, through one of two slots of pinned memory. It first waits
// until the slot's last copy has ended. targets: null for a prompt, which is one document. counted: see
// Inputs. For a backward pass it also sorts the token positions for the embedding's gradient. This counting
// sort takes the host 0.6 ms at B=64, while the device still works on the micro-step before.
static void model_feed(Model* model, const int* tokens, const int* targets, int B, int T, ClassifierMode mode,
                       const int* counted, const char* conversations) {
    const size_t N = (size_t)B * T;
    Feed& feed = model->feed;
    const int slot = (int)(feed.count++ % Feed::kSlots);
    const Inputs &host = feed.staging[slot], &device = feed.inputs;
    await_event(feed.staged[slot]);
    auto send = [&](auto* to, const auto* from, size_t n) {
        copy_to_device(to, from, n * sizeof(*to), model->stream);
    };
    auto stage = [&](int* to, int* staged, const int* from) {
        if (!from) { return; }
        memcpy(staged, from, N * sizeof(int));
        send(to, staged, N);
    };
    stage(device.tokens, host.tokens, tokens);
    stage(device.targets, host.targets, targets);
    stage(device.counted, host.counted, counted);
    feed.documents = nullptr;
    if (model->options.document_end >= 0 && targets) {
        find_documents(host.documents, tokens, B, T, model->options.document_end, conversations);
        send(device.documents, host.documents, N);
        feed.documents = device.documents;
    }
    if (mode == ClassifierMode::LossAndGrad) {
        TokenBuckets sorted = {};
        build_token_buckets(&sorted, host.order, host.segments, host.splits, tokens, (int)N,
                            model->config.Vp);
        send(device.order, host.order, N);
        send(device.segments, host.segments, sorted.num_segments);
        send(device.splits, host.splits, sorted.num_splits);
        feed.buckets = {device.order, device.segments, device.splits, sorted.num_segments, sorted.num_splits};
    }
    event_record(feed.staged[slot], model->stream);
}

// ---- a layer's tensors ----
// What a product multiplies: the input of a linear layer, its weight, or the gradient of its output. With
// --matmul-dtype fp8 the product reads bytes (llmc/ops/fp8.h) instead of data. It reads both operands along
// the dimension that it sums over, so an operand has its bytes twice, once transposed.
// A run's first step has no scales yet. It multiplies data and records each operand's largest element, from
// which the second step's scales follow. If the first step is not finite, scales stay 1 until a later step
// has recorded some. Llama's family multiplies data in more steps: its projections and head begin as zeros,
// and the gradients that come through them grow manyfold in each of the first steps. There scales came too
// late, and small models with AdamW skipped updates; none was skipped where bytes began after five steps.
// docs/numerics.md says why the gradient of the logits is e5m2, and why attproj and the first and the last
// layer stay in 16 bits.
constexpr uint32_t kFp8LlamaBegins = 8;         // steps
struct Operand {
    const floatX* data = nullptr;       // a verb gets the memory to write from `to_write`
    uint8_t *bytes = nullptr, *bytes_t = nullptr;   // row by row, and transposed; null: data is multiplied
    Fp8Tensor* tensor = nullptr;        // its scale; null: it is not FP8 in this pass
    Fp8Stats* stats = nullptr;          // what this step's casts of it record
    Fp8Format format = Fp8Format::E4m3;
    bool kept = true;                   // in a backward: what is multiplied is as the forward wrote it; a
                                        // weight: its bytes are those of the step's first micro-step
};

// weight: (OC,C). bias: (OC), null in the LM head.
struct Linear { Operand weight; const floatX* bias; int C, OC; Grad dweight, dbias; };
struct Norm { const float *weight, *bias; float *mean, *rstd; Grad dweight, dbias; };
struct Heads { int NH, NKV, HS; };      // of queries, of keys and values, a head's size
struct Attention {
    Heads heads;
    Mask mask;
    float* lse;
    floatX *keys, *values;              // of the cache, or null
};
// table: rotation_table's, null without rotary positions. rstd and the weights are QK-norm's.
struct Rotation {
    Heads heads;
    float eps;
    const float* table;
    float* rstd;
    const float *q_weight, *k_weight;
    Grad dq_weight, dk_weight;
};
struct Activation { Mlp mlp; int F; };  // F: the columns that it gives

// A branch ends with a linear layer, whose output is added to the residual stream. dout and dbias are this
// linear layer's; norm_backward computes them. place: numbers the branch's dropout mask.
struct Branch { uint32_t place; Grad dbias; Operand dout; };
// The residual stream (B,T,C) at one point: a sum, and the branches that the last addition added to it. The
// embedding has 0 branches; its added[0] has its dropout, and the gradient behind that. kept: as of operands.
struct Sum { floatX* data; int branches; Branch added[2]; bool kept = true; };

struct Layer {
    Sum x, x_mid, x_out;                // before the layer, after its first branch, after the layer
    Operand ln1, ln2, atty, act;        // (B,T,C), and act (B,T,F) = the activation of fch
    Operand qkv, fch;                   // (B,T,NH+2*NKV,HS) (B,T,F), where it is gated (B,T,2F)
    Attention att;
    ValueEmbed values;                  // table: null where the layer has none; the gates read ln1
    Grad dvalues;                       // of the table
    Rotation rotation;
    Activation activation;
    Norm w_ln1, w_ln2;
    Linear w_qkv, w_attproj, w_fc, w_fcproj;
    floatX* dx;                         // (B,T,C) gradient of the residual stream, at x_out, x_mid, then x
    // Gradients of fcproj's and attproj's outputs: dx, or with dropout dx through the branch's mask
    Operand dx_out, dx_mid;             // (B,T,C)
    Operand dfch, dqkv;                 // dfch is written over fch; dqkv has qkv's shape
    floatX *dln1, *dln2, *datty, *dact; // (B,T,C), datty (B,T,NH,HS), dact (B,T,F)
};

struct Head {
    Sum x;                              // (B,T,C) after the last layer
    Operand lnf;                        // (B,T,C)
    Norm w_lnf;
    ParamId w_id;                       // PARAM_wte, or PARAM_headw
    Linear w;
    floatX* logits;                     // (B,T,Vp), then their gradient; of a part of the rows at a time
    float* losses;                      // (B,T)
    const int* targets;                 // (B,T)
    Operand dlogits;
    floatX* dlnf;
};

// Keys and values of the texts that the program writes. A forward over one text copies those of its first
// `count` positions here, for `texts` texts that begin alike.
struct Cache {
    floatX *keys, *values;              // (L,all texts,T,C), at the first of `texts`
    size_t layer_stride;                // elements from layer to layer
    int texts, count;
};

// A forward or backward pass over (B,T). It names what the verbs below work on: layer_of and head_of make
// operands, weights and gradients of the tables' tensors.
struct Pass {
    Model* model;
    int B, T;                           // where neither embedding nor attention runs, B*T alone counts
    const MicroStep* micro = nullptr;   // null: nothing is trained, so there is neither dropout nor FP8
    float* scratch = nullptr;           // of a backward
    const ActSpec* act_specs = model->acts.specs;       // section 9 has its own
    const Cache* cache = nullptr;       // section 9's

    int N() const { return B * T; }
    Stream stream() const { return model->stream; }
    const Config& config() const { return model->config; }
    bool drops() const { return micro && model->options.dropout > 0.0; }
    Acts acts(int l) const { return act_views(model->acts.data, act_specs, l); }
    // In a backward: whether layer l's tensor is as the forward wrote it. No later layer shares its copy.
    bool kept(ActId id, int l) const { return l == config().L - 1 || l < act_specs[id].copies - 1; }
    // Whether layer l has the tensor. RMSNorm has no biases, for one
    bool exists(ParamId id, int l) const {
        if (id == NUM_PARAMS) { return false; }
        const std::vector<int>& layers = model->param_specs[id].layers;
        return std::binary_search(layers.begin(), layers.end(), l);
    }
    // null, and no gradient, where the layer lacks the tensor
    template <class P> P* param(ParamId id, int l) const {
        return exists(id, l) ? (P*)model_param_data(model, id, l) : nullptr;
    }
    Grad grad(ParamId id, int l) const {
        return micro && exists(id, l) ? model_grad(model, id, l, *micro) : Grad{};
    }
    // To be called before a tensor is written. A DEBUG build fills the memory with NaN, in the size of the
    // largest tensor that lies there.
    template <class T> T* fresh(T* tensor) const {
#ifdef DEBUG
        const size_t at = (size_t)((char*)tensor - model->acts.data);
        if (tensor) { device_fill(tensor, 0xFF, act_bytes_at(act_specs, NUM_ACTS, at), stream()); }
#endif
        return tensor;
    }

    // FP8 numbers the linear layers: 4 l + kQkv, kFc or kFcProj, and behind all layers the LM head, 4 L.
    enum { kIn16Bits = -1, kQkv = 0, kFc = 2, kFcProj = 3 };
    enum Fp8Role { kInput, kDout, kWeight };
    Operand operand(const floatX* x, int linear, Fp8Role role, uint8_t* bytes, uint8_t* bytes_t) const {
        const Config& c = config();
        const Options& o = model->options;
        const bool is_head = linear == 4 * c.L;
        Operand y = {.data = x};
        const bool is_dlogits = is_head && role == kDout;
        if (is_dlogits) { y.format = Fp8Format::E5m2; }
        const bool is_fp8 = is_head ? o.fp8_head : linear >= 0 && o.fp8 && fp8_layer(linear / 4, c.L);
        if (!micro || !is_fp8) { return y; }
        const int linears = model->fp8.linears;
        const int number = role == kWeight ? 2 * linears + linear : 2 * linear + (role == kDout);
        y.tensor = model->fp8.tensors + (is_dlogits ? 3 * linears : number);
        y.stats = (Fp8Stats*)(model->exchange.record + model->exchange.stats_at) + number;
        if (model->step >= (c.is_llama() ? kFp8LlamaBegins : 1)) { y.bytes = bytes, y.bytes_t = bytes_t; }
        return y;
    }
    Linear linear_of(ParamId weight, ParamId bias, int l, int linear, uint8_t* bytes = nullptr,
                     uint8_t* bytes_t = nullptr) const {
        const ParamSpec& s = model->param_specs[weight];
        return {operand(param<floatX>(weight, l), linear, kWeight, bytes, bytes_t),
                param<floatX>(bias, l), (int)s.cols, (int)s.rows, grad(weight, l), grad(bias, l)};
    }
    Norm norm_of(ParamId weight, ParamId bias, int l, float* mean, float* rstd) const {
        return {param<float>(weight, l), param<float>(bias, l), mean, rstd, grad(weight, l), grad(bias, l)};
    }

    // Branch k of a sum. Dropout masks are numbered: 0 is the embedding's, then each layer has two.
    Branch branch(int l, bool is_mlp, int k) const {
        const Acts a = acts(0);
        floatX* dout = !drops() ? a.dx : k == 0 ? a.dbranch : a.dbranch2;
        if (l < 0) { return {0, {}, {.data = dout}}; }              // the embedding
        const uint32_t place = 1 + 2 * (uint32_t)l + is_mlp;
        if (!is_mlp) { return {place, grad(PARAM_attprojb, l), {.data = dout}}; }
        return {place, grad(PARAM_fcprojb, l),
                operand(dout, 4 * l + kFcProj, kDout, a.dbranch_8, a.dbranch_t8)};
    }
    Sum after_layer(int l) const {                                  // -1: the embedding
        if (l < 0) { return {acts(0).embedded, 0, {branch(-1, false, 0)}}; }
        if (config().block == Block::Sequential) { return {acts(l).x_out, 1, {branch(l, true, 0)}}; }
        return {acts(l).x_out, 2, {branch(l, false, 0), branch(l, true, 1)}};
    }
    Head head_of() const {
        const Acts a = acts(0);
        const int head = 4 * config().L;
        const ParamId w = exists(PARAM_headw, 0) ? PARAM_headw : PARAM_wte;
        return {after_layer(config().L - 1), operand(a.lnf, head, kInput, a.lnf_8, a.lnf_t8),
                norm_of(PARAM_lnfw, PARAM_lnfb, 0, a.lnf_mean, a.lnf_rstd),
                w, linear_of(w, NUM_PARAMS, 0, head, a.headw_8, a.headw_t8), a.logits, a.losses,
                model->feed.inputs.targets,
                operand(a.logits, head, kDout, a.dlogits_8, a.dlogits_t8), a.dlnf};
    }
    // The residual stream, activations, attention and value embeddings; then weights, gradients, rotation.
    Layer layer_of(int l) const {
        const Acts a = acts(l);
        const int first = 4 * l;                                    // of the layer's linear layers
        Layer y = {};
        y.x = after_layer(l - 1);
        y.x_mid = {a.x_mid, 1, {branch(l, false, 0)}};
        y.x_out = after_layer(l);
        const bool sequential = config().block == Block::Sequential;
        y.x_mid.kept = !sequential || kept(ACT_x_mid, l);           // a parallel block's is of no use later
        y.ln1 = operand(a.ln1, first + kQkv, kInput, a.ln1_8, a.ln1_t8);
        y.ln2 = operand(a.ln2, first + kFc, kInput, a.ln2_8, a.ln2_t8);
        y.qkv = {.data = a.qkv}, y.fch = {.data = a.fch}, y.atty = {.data = a.atty};
        y.act = operand(a.act, first + kFcProj, kInput, a.act_8, a.act_t8);
        y.ln1.kept = kept(y.ln1.bytes ? ACT_ln1_t8 : ACT_ln1, l);
        y.ln2.kept = kept(y.ln2.bytes ? ACT_ln2_t8 : ACT_ln2, l);
        y.act.kept = kept(y.act.bytes ? ACT_act_t8 : ACT_act, l);
        y.qkv.kept = kept(ACT_qkv, l), y.fch.kept = kept(ACT_fch, l), y.atty.kept = kept(ACT_atty, l);
        const Config::Shape s = config().layer(l);
        const Heads heads = {config().NH, s.NKV, s.HS};
        y.att = {heads, {s.window, model->feed.documents}, a.att_lse,
                 cache ? cache->keys + l * cache->layer_stride : nullptr,
                 cache ? cache->values + l * cache->layer_stride : nullptr};
        y.values = {.dweight = grad(PARAM_vegw, l), .table = param<floatX>(PARAM_vew, l), .inp = y.ln1.data,
                    .weight = param<float>(PARAM_vegw, l), .N = N(), .C = config().C, .NH = heads.NH,
                    .NKV = heads.NKV, .HS = heads.HS, .inp_t8 = y.ln1.bytes_t, .inp_tensor = y.ln1.tensor};
        y.dvalues = grad(PARAM_vew, l);
        y.activation = {s.mlp, s.F};
        y.w_ln1 = norm_of(PARAM_ln1w, PARAM_ln1b, l, a.ln1_mean, a.ln1_rstd);
        y.w_ln2 = norm_of(PARAM_ln2w, PARAM_ln2b, l, a.ln2_mean, a.ln2_rstd);
        y.w_qkv = linear_of(PARAM_qkvw, PARAM_qkvb, l, first + kQkv, a.qkvw_8, a.qkvw_t8);
        y.w_attproj = linear_of(PARAM_attprojw, PARAM_attprojb, l, kIn16Bits);
        y.w_fc = linear_of(PARAM_fcw, PARAM_fcb, l, first + kFc, a.fcw_8, a.fcw_t8);
        y.w_fcproj = linear_of(PARAM_fcprojw, PARAM_fcprojb, l, first + kFcProj, a.fcprojw_8, a.fcprojw_t8);
        for (Linear* w : {&y.w_qkv, &y.w_fc, &y.w_fcproj}) {
            w->weight.kept = model->options.recompute == 0;
        }
        y.dx = a.dx;
        y.dx_out = y.x_out.added[y.x_out.branches - 1].dout;
        y.dx_mid = sequential ? y.x_mid.added[0].dout : y.x_out.added[0].dout;
        y.dfch = operand(a.fch, first + kFc, kDout, a.dfch_8, a.dfch_t8);
        y.dqkv = operand(a.dqkv, first + kQkv, kDout, a.dqkv_8, a.dqkv_t8);
        y.dln1 = a.dln1, y.dln2 = a.dln2, y.datty = a.datty, y.dact = a.dact;
        if (config().is_llama()) {
            y.rotation = {heads, s.eps, model->rotation, s.qk_norm ? a.qk_rstd : nullptr,
                          param<float>(PARAM_qnw, l), param<float>(PARAM_knw, l), grad(PARAM_qnw, l),
                          grad(PARAM_knw, l)};
        }
        return y;
    }

    // The cast `a`, into the bytes of an operand. Without bytes (a run's first steps) it only records.
    Fp8Cast cast_to(const Operand& to, Fp8Cast a) const {
        fresh(to.bytes), fresh(to.bytes_t);
        a.out = to.bytes, a.out_t = to.bytes_t, a.tensor = to.tensor, a.stats = to.stats, a.scratch = scratch;
        return a;
    }
    // Casts a branch's gradient. Other operands are only recorded here: the ops that write them cast them.
    void cast(const Operand& y, int C) const {
        if (y.tensor) { fp8_cast(cast_to(y, {.inp = y.data, .N = N(), .C = C}), stream()); }
    }
    // What the MLP's activation gives, as bytes, from what it reads
    Fp8Cast activation_cast(const Operand& out, const floatX* fch, const Activation& f) const {
        return cast_to(out, {.inp = fch, .source = Fp8Source::Act, .N = N(), .C = f.F, .mlp = f.mlp});
    }
    // Casts a weight to bytes, bytes_t or both. A call with neither comes first: it finds the largest value.
    void cast_weight(const Linear& w, uint8_t* bytes, uint8_t* bytes_t) const {
        Operand to = w.weight;
        to.bytes = bytes, to.bytes_t = bytes_t;
        fp8_cast(cast_to(to, {.inp = w.weight.data, .source = Fp8Source::Weight, .N = w.OC, .C = w.C}),
                 stream());
    }
    // bytes_t from bytes
    void transpose(const Operand& y, int C) const {
        if (y.bytes) { fp8_transpose({fresh(y.bytes_t), y.bytes, N(), C}, stream()); }
    }
    Dropout dropout(uint32_t place) const {
        const Model& m = *model;
        return dropout_of(m.options.dropout, {m.options.seed, m.step, place}, (uint64_t)micro->number * N());
    }
};

// ---- the forward's verbs ----
// An engine: the verbs that a page such as sequential_layer calls. The page says what a layer computes. The
// verb decides what is fused, what is multiplied in FP8, and where a sum is taken. A verb whose tensor the
// model lacks does nothing. Decoding in section 9, which writes text, follows the same pages with some verbs
// of its own.
struct Forward : Pass {
    // In a backward the same pages recompute what -r has not kept: norms and activations, or at -r 3 all of a
    // layer but x_out, its end.
    bool recomputes = false;
    // linear_add ends a branch. Its product also adds the branch to the residual stream. With dropout, and
    // in Decoding, the branch instead waits in memory of its own until the next norm adds it to
    // `before`, the sum so far (null: there is none).
    bool waits;
    floatX* waiting_memory[2];          // (N,C) not used otherwise until the backward
    const int *tokens = model->feed.inputs.tokens, *positions = nullptr;        // EncoderForward's
    struct { const floatX* before; const floatX* branch[2]; int count; } waiting = {};

    explicit Forward(const Pass& pass)
        : Pass(pass), waits(drops()), waiting_memory{acts(0).waiting, acts(0).waiting2} {}

    // Where a verb writes its output; null, and the verb does nothing: the output is as the forward wrote it.
    // What a verb reads is const, so it has no other way to its output.
    floatX* to_write(const Operand& out) const {
        return recomputes && out.kept ? nullptr : (floatX*)out.data;
    }
    floatX* to_write(const Sum& out) const { return recomputes && out.kept ? nullptr : out.data; }

    // Parameters of a bucket may still be on their way from other ranks.
    virtual void await(int bucket) {
        if (model->layout.has(bucket)) { model_await_params(model, bucket); }
    }

    NormOutput<floatX, float> norm_output(const Operand& y, const Norm& w) const {
        if (!y.bytes) { return {to_write(y), w.weight, w.bias}; }
        return {nullptr, w.weight, w.bias, y.bytes, y.tensor, y.stats};
    }
    // Arguments for: out, and out2 if it is not {}, = norms of x
    NormForward norms(const Operand& out, const Sum& x, const Norm& w, const Operand& out2,
                      const Norm& w2) const {
        return {.y = {norm_output(out, w), norm_output(out2, w2)}, .mean = w.mean, .rstd = w.rstd,
                .sum = nullptr, .inp = x.data, .branch = {}, .dropout = {}, .kind = config().norm, .N = N(),
                .C = config().C, .eps = config().is_llama() ? config().llama.eps : kNormEps};
    }

    // x = token plus position embedding, or its norm
    void embed(const Sum& x) {
        const Acts a = acts(0);
        const bool normalised = config().shape().embed_norm;
        encoder_forward({.out = normalised ? a.raw : x.data, .tokens = tokens,
                         .wte = param<floatX>(PARAM_wte, 0), .wpe = param<floatX>(PARAM_wpe, 0), .B = B,
                         .T = T, .C = config().C, .positions = positions}, stream());
        const Norm w = {nullptr, nullptr, nullptr, a.raw_rstd, {}, {}};         // without weights
        if (normalised) { norm_forward(norms({x.data}, {a.raw, 0, {}}, w, {}, {}), stream()); }
        if (waits) { waiting = {nullptr, {x.data}, 1}; }            // for its dropout, in place
    }

    // x = before + the branches that wait, if any do. Then out, and out2 if it is given, = norm(x)
    void norm(const Operand& out, const Sum& x, const Norm& w, const Operand& out2 = {},
              const Norm& w2 = {}) {
        if (!to_write(out)) { return; }           // a second norm's rows are kept where the first's are
        NormForward n = norms(out, x, w, out2, w2);
        if (waiting.count > 0) {
            n.sum = x.data, n.inp = waiting.before;
            for (int k = 0; k < waiting.count; k++) {
                n.branch[k] = waiting.branch[k];
                if (drops()) { n.dropout[k] = dropout(x.added[k].place); }
            }
            waiting = {};
        }
        norm_forward(n, stream());
        for (const Operand* y : {&out, &out2}) {
            if (y->bytes) { transpose(*y, config().C); }
            else { cast(*y, config().C); }
        }
    }

    // out = inp weight^T + bias
    void linear(const Operand& out, const Operand& inp, const Linear& w) {
        if (floatX* to = to_write(out)) { product(to, inp, w); }
    }
    // out = inp weight^T + bias + residual
    virtual void product(floatX* out, const Operand& inp, const Linear& w, const floatX* residual = nullptr) {
        if (!inp.bytes) {
            return matmul_forward({.out = out, .inp = inp.data, .weight = w.weight.data, .bias = w.bias,
                                   .residual = residual, .N = N(), .C = w.C, .OC = w.OC}, stream());
        }
        fp8_product(out, inp, w, residual, {});
    }

    // out = act(fch), fch = inp weight^T + bias; act: the MLP's activation
    void linear_activate(const Operand& out, const Operand& fch, const Operand& inp, const Linear& w,
                         const Activation& f) {
        if (floatX* to = to_write(fch)) { product_activate(out, to, inp, w, f); }
        else { activate(out, fch.data, f); }
    }
    virtual void product_activate(const Operand& out, floatX* fch, const Operand& inp, const Linear& w,
                                  const Activation& f) {
        if (inp.bytes) { return fp8_product(fch, inp, w, nullptr, activation_cast(out, fch, f)); }
        matmul_forward({.out = fresh(to_write(out)), .inp = inp.data, .weight = w.weight.data, .bias = w.bias,
                        .pre_act = fch, .N = N(), .C = w.C, .OC = w.OC, .mlp = f.mlp}, stream());
        cast(out, f.F);
    }

    // out = before + (inp weight^T + bias)
    void linear_add(const Sum& out, const Sum& before, const Operand& inp, const Linear& w) {
        floatX* to = to_write(out);
        if (!to) { return; }
        if (!waits) { return product(to, inp, w, before.data); }
        if (waiting.count == 0) { waiting.before = before.data; }
        floatX* branch = fresh(waiting_memory[waiting.count]);
        product(branch, inp, w);
        waiting.branch[waiting.count++] = branch;
    }

    // In place: v of qkv gets the rows of its tokens, times gates
    void embed_values(const Operand& qkv, ValueEmbed a) {
        a.qkv = a.table ? to_write(qkv) : nullptr, a.tokens = tokens;
        if (a.qkv) { value_embed(a, stream()); }
    }

    // In place: q and k of qkv, each head normalised if the model has QK-norm, and rotated by its position
    void rotate(const Operand& qkv, const Rotation& r) {
        floatX* to = r.table ? to_write(qkv) : nullptr;
        if (!to) { return; }
        const auto [NH, NKV, HS] = r.heads;
        rotate_forward_inplace({.qkv = to, .rstd = r.rstd, .q_weight = r.q_weight, .k_weight = r.k_weight,
                                .table = r.table, .positions = positions, .N = N(), .T = T, .NH = NH,
                                .NKV = NKV, .HS = HS, .eps = r.eps}, stream());
    }

    // out = self-attention of qkv
    void attention(const Operand& out, const Operand& qkv, const Attention& att) {
        if (floatX* to = to_write(out)) { attend(to, qkv.data, att); }
    }
    virtual void attend(floatX* out, const floatX* qkv, const Attention& att) {
        const auto [NH, NKV, HS] = att.heads;
        if (cache) {
            cache_store({.keys = att.keys, .values = att.values, .qkv = qkv, .rows = cache->texts,
                         .count = cache->count, .T = model->options.T, .NH = NH, .NKV = NKV, .HS = HS},
                        stream());
        }
        attention_forward({.out = out, .lse = att.lse, .qkv = qkv, .B = B, .T = T, .NH = NH, .NKV = NKV,
                           .HS = HS, .mask = att.mask}, stream());
    }

    // out = act(fch), without the product
    void activate(const Operand& out, const floatX* fch, const Activation& f) {
        floatX* to = to_write(out);
        if (!to) { return; }
        if (out.bytes) { return fp8_cast(activation_cast(out, fch, f), stream()); }
        ::activate({fresh(to), fch, N(), f.F, f.mlp}, stream());
    }

    // linear of bytes. then: what is cast from out in the same kernel; {}: nothing
    void fp8_product(floatX* out, const Operand& inp, const Linear& w, const floatX* residual,
                     const Fp8Cast& then) {
        const Operand& weight = w.weight;
        if (micro->casts_weights) { cast_weight(w, nullptr, nullptr); }
        if (!weight.kept) { cast_weight(w, weight.bytes, nullptr); }
        else if (micro->casts_weights) { cast_weight(w, weight.bytes, weight.bytes_t); }
        fp8_matmul({.out = out, .a = inp.bytes, .b = w.weight.bytes, .a_tensor = inp.tensor,
                    .b_tensor = w.weight.tensor, .bias = w.bias, .residual = residual, .M = N(), .N = w.OC,
                    .K = w.C, .fast = true, .cast = then}, stream());
    }
};

// ---- pages ----
// GPT-2 (Radford et al. 2019): x + attention(norm(x)), then x + mlp(norm(x)). The modern block (LLaMA,
// Touvron et al. 2023; QK-norm: Qwen3, 2025) has rotary positions, grouped queries, other MLPs, and no biases
// but those of q, k and v that Qwen2 (2024) has. v12 and its kin have value embeddings (ops.h) in odd layers.
static void sequential_layer(Forward& e, int l) {
    const Layer a = e.layer_of(l);
    e.norm(a.ln1, a.x, a.w_ln1);                            // (B,T,C)
    e.linear(a.qkv, a.ln1, a.w_qkv);                        // (B,T,NH+2*NKV,HS)
    e.embed_values(a.qkv, a.values);
    e.rotate(a.qkv, a.rotation);
    e.attention(a.atty, a.qkv, a.att);                      // (B,T,NH,HS)
    e.linear_add(a.x_mid, a.x, a.atty, a.w_attproj);        // (B,T,C)
    e.norm(a.ln2, a.x_mid, a.w_ln2);                        // (B,T,C)
    e.linear_activate(a.act, a.fch, a.ln2, a.w_fc, a.activation);       // (B,T,F)
    e.linear_add(a.x_out, a.x_mid, a.act, a.w_fcproj);      // (B,T,C)
}

// Parallel blocks (GPT-J, Wang and Komatsuzaki 2021): x + attention(norm(x)) + mlp(norm2(x)); tied: one norm
static void parallel_layer(Forward& e, int l) {
    const Layer a = e.layer_of(l);
    const bool tied = e.config().block == Block::ParallelTied;
    if (tied) { e.norm(a.ln1, a.x, a.w_ln1); }
    else { e.norm(a.ln1, a.x, a.w_ln1, a.ln2, a.w_ln2); }
    e.linear(a.qkv, a.ln1, a.w_qkv);
    e.attention(a.atty, a.qkv, a.att);
    e.linear_add(a.x_mid, a.x, a.atty, a.w_attproj);
    e.linear_activate(a.act, a.fch, tied ? a.ln1 : a.ln2, a.w_fc, a.activation);
    e.linear_add(a.x_out, a.x_mid, a.act, a.w_fcproj);
}

static void model_layer(Forward& e, int l) {
    if (e.config().block == Block::Sequential) { sequential_layer(e, l); }
    else { parallel_layer(e, l); }
}

// ---- forward ----
// All activations up to lnf, from the inputs on the device. Each bucket of parameters is awaited where it is
// first needed, in the order in which the ranks gather them; the head's is needed next.
static void model_forward(Forward& e) {
    const Layout& layout = e.model->layout;
    for (int bucket : {layout.embedding(), layout.biases(), layout.norms()}) { e.await(bucket); }
    e.embed(e.after_layer(-1));
    for (int l = 0; l < e.config().L; l++) {
        e.await(layout.layer(l));
        model_layer(e, l);
    }
    const Head head = e.head_of();
    e.norm(head.lnf, head.x, head.w_lnf);
    e.await(layout.head());
}
static void model_forward(Model* model, int B, int T, const MicroStep* micro) {
    Forward e({model, B, T, micro, model->acts.scratch});
    model_forward(e);
}

// ---- the backward's verbs ----
// A bias's gradient is the column sums of its linear layer's dout. The verb that computes this dout sums it,
// too: linear_and_activation_backward for fc, attention_backward or rotate_backward for qkv, norm_backward
// for attproj and fcproj.
struct Backward : Pass {
    // A layer's matrices are a bucket. It goes to the other ranks when the last of them has its gradient. The
    // LM head comes before all layers: there weights_left goes below 0, and no bucket is complete.
    int bucket = 0, weights_left = 0;
    // The embedding is by far the largest bucket. It goes to the other ranks before layer 0's last weight
    // gradient is computed, so that this product hides a part of the transfer.
    bool postpones = false;
    struct { Operand dout, inp; Linear w; } postponed;

    // wte's gradient, and an LM head's of its own, have several parts: those of --head-chunks, and the
    // embedding's, last, in wte. A bf16 gradient is rounded once a micro-step. So its parts are summed in
    // fp32, at the start of scratch, and the ops use the rest. The head's sum is stored before wte's begins.
    float* const sum = micro && model->options.grads_bf16 ? scratch : nullptr;

    explicit Backward(const Pass& pass) : Pass(pass) {
        if (sum) { scratch += model->param_specs[PARAM_wte].elems; }
    }
    Grad sum_of(ParamId id) const { return sum ? Grad{sum, Accumulate::No} : grad(id, 0); }
    void store_sum(ParamId id) const {
        if (sum) { grad_accumulate({grad(id, 0), sum, model->param_specs[id].elems}, stream()); }
    }

    // The fp32 gradient that encoder_backward adds to: zeros first, for tokens that are not there.
    Grad begun(const Grad& grad, size_t elems) const {
        if (grad.acc == Accumulate::No) { device_zero(grad.data, elems * sizeof(float), stream()); }
        return {grad.data, Accumulate::Yes};
    }

    // To write an operand. A backward runs once, so it always writes.
    static floatX* to_write(const Operand& y) { return (floatX*)y.data; }

    void weight_backward(const Operand& dout, const Operand& inp, const Linear& w) {
        if (dout.bytes) {
            fp8_matmul({.grad = w.dweight, .scratch = scratch, .a = dout.bytes_t, .b = inp.bytes_t,
                        .a_tensor = dout.tensor, .b_tensor = inp.tensor, .M = w.OC, .N = w.C, .K = N(),
                        .a_format = dout.format}, stream());
        } else {
            matmul_backward_weight({.dweight = w.dweight, .scratch = scratch, .dout = dout.data,
                                    .inp = inp.data, .N = N(), .C = w.C, .OC = w.OC}, stream());
        }
    }
    // dweight (+)= dout^T inp
    void next_weight(const Operand& dout, const Operand& inp, const Linear& w) {
        const bool is_last = --weights_left == 0;
        if (is_last && postpones) { postponed = {dout, inp, w}; return; }
        weight_backward(dout, inp, w);
        if (is_last) { model_bucket_complete(model, bucket, *micro); }
    }

    // dinp = dout weight + residual, and the weight's gradient
    void linear_backward(floatX* dinp, const Operand& dout, const Operand& inp, const Linear& w,
                         const floatX* residual = nullptr) {
        next_weight(dout, inp, w);
        fresh(dinp);
        if (dout.bytes) { return fp8_product(dinp, dout, w, residual, {}); }
        matmul_backward_input({.dinp = dinp, .dout = dout.data, .weight = w.weight.data,
                               .residual = residual, .N = N(), .C = w.C, .OC = w.OC}, stream());
    }

    // w is fcproj, whose weight's gradient comes first. Then dact = dout weight, and dfch = dact * act'(fch),
    // which may be written over fch. dbias: column sums of dfch, the gradient of fc's bias
    void linear_and_activation_backward(const Operand& dfch, const Operand& dout, const Operand& act,
                                        const Linear& w, const Operand& fch, const Activation& f,
                                        const Grad& dbias, floatX* dact) {
        next_weight(dout, act, w);
        fresh(dact);
        if (dout.bytes) {
            const Fp8Cast then = {.dbias = dbias, .inp = dact, .before = fch.data,
                                  .source = Fp8Source::Slope, .N = N(), .C = f.F, .mlp = f.mlp};
            return fp8_product(dact, dout, w, nullptr, cast_to(dfch, then));
        }
        matmul_backward_input({.dinp = to_write(dfch), .dout = dout.data, .weight = w.weight.data,
                               .pre_act = fch.data, .N = N(), .C = w.C, .OC = w.OC, .dbias = dbias,
                               .scratch = scratch, .dact = dact, .mlp = f.mlp}, stream());
        cast(dfch, act_columns(f.mlp, f.F));
    }

    // dqkv from datty. dbias: column sums of dqkv, the gradient of qkv's bias. With rotary positions
    // rotate_backward finishes q and k, so their bytes and the column sums are made there
    void attention_backward(const Operand& dqkv, const floatX* datty, const Operand& atty, const Operand& qkv,
                            const Attention& att, const Grad& dbias, const Rotation& rotation = {}) {
        const auto [NH, NKV, HS] = att.heads;
        const int OC = (NH + 2 * NKV) * HS;
        AttentionBackward a = {.dqkv = fresh(to_write(dqkv)), .scratch = scratch, .dout = datty,
                               .out = atty.data, .qkv = qkv.data, .lse = att.lse, .B = B, .T = T, .NH = NH,
                               .NKV = NKV, .HS = HS, .mask = att.mask};
        if (dqkv.bytes) { a.fp8 = fresh(dqkv.bytes), a.tensor = dqkv.tensor, a.stats = dqkv.stats; }
        a.only_v = rotation.table;
        ::attention_backward(a, stream());
        if (!a.only_v) { qkv_done(dqkv, OC, dbias, true); }
    }
    // The column sums of dqkv, and its transposed bytes or its record. no_keys: the keys' sums are 0, because
    // one vector added to all keys changes no probability. Added before a rotation it does
    void qkv_done(const Operand& dqkv, int OC, const Grad& dbias, bool no_keys) {
        if (dqkv.bytes) {
            return fp8_transpose({.out = fresh(dqkv.bytes_t), .inp = dqkv.bytes, .N = N(), .C = OC,
                                  .dbias = dbias, .scratch = scratch, .tensor = dqkv.tensor,
                                  .of_qkv = no_keys}, stream());
        }
        if (dbias.data) {
            bias_backward({.dbias = dbias, .scratch = scratch, .dout = dqkv.data, .N = N(), .OC = OC,
                           .of_qkv = no_keys}, stream());
        }
        cast(dqkv, OC);
    }

    // In place: gradients of the rotated q and k become those of the linear layer's q and k. Then qkv_done
    void rotate_backward(const Operand& dqkv, const Operand& qkv, const Rotation& r, const Grad& dbias) {
        if (!r.table) { return; }
        const auto [NH, NKV, HS] = r.heads;
        rotate_backward_inplace({.dqkv = to_write(dqkv), .dq_weight = r.dq_weight, .dk_weight = r.dk_weight,
                                 .scratch = scratch, .qkv = qkv.data, .rstd = r.rstd,
                                 .q_weight = r.q_weight, .k_weight = r.k_weight, .table = r.table,
                                 .N = N(), .T = T, .NH = NH, .NKV = NKV, .HS = HS,
                                 .fp8 = dqkv.bytes, .tensor = dqkv.tensor, .stats = dqkv.stats},
                                stream());
        qkv_done(dqkv, (NH + 2 * NKV) * HS, dbias, false);
    }

    // dinp += the gradient through the gates; then the gradients of the gates' weights and of the table. In
    // dqkv gate * dv takes the place of dv. So nothing may read dqkv later, as a postponed product would
    void embed_values_backward(floatX* dinp, const Operand& dqkv, ValueEmbed a, const Grad& dtable) {
        if (!a.table) { return; }
        assert(!postpones);
        a.qkv = to_write(dqkv), a.dinp = dinp, a.scratch = scratch, a.tokens = model->feed.inputs.tokens;
        a.dv8 = dqkv.bytes, a.dv_tensor = dqkv.tensor;
        value_embed(a, stream());
        const size_t elems = model->param_specs[PARAM_vew].elems;
        const Grad grad = begun(sum ? Grad{scratch, Accumulate::No} : dtable, elems);       // behind wte's
        encoder_backward({.dwte = grad, .dwpe = {}, .scratch = scratch + (sum ? elems : 0),
                          .dout = a.qkv + a.values(0), .buckets = model->feed.buckets, .B = B, .T = T,
                          .maxT = 0, .C = a.NKV * a.HS, .stride = (a.NH + 2 * a.NKV) * a.HS}, stream());
        if (sum) { grad_accumulate({dtable, grad.data, elems}, stream()); }
    }

    // dx, the gradient of the residual stream, (+)= the gradient through the norm of x, or through both norms
    // of x. Then dx is also dout of each branch that was added to make x. With dropout, such a branch has a
    // dout of its own: dx through the branch's mask.
    void norm_backward(floatX* dx, const floatX* dout, const Sum& x, const Norm& w,
                       const floatX* dout2 = nullptr, const Norm& w2 = {}, Accumulate acc = Accumulate::Yes) {
        NormBackward n = {};
        n.dresidual = dx, n.dresidual_acc = acc;
        n.y[0] = {dout, w.weight, w.dweight, w.dbias};
        n.y[1] = {dout2, w2.weight, w2.dweight, w2.dbias};
        for (int k = 0; k < std::max(x.branches, 1); k++) {
            const Branch& added = x.added[k];
            n.branch[k].dbias = added.dbias;
            if (!drops()) { continue; }
            n.branch[k].dout = to_write(added.dout), n.branch[k].dropout = dropout(added.place);
        }
        n.scratch = scratch;
        n.inp = x.data, n.mean = w.mean, n.rstd = w.rstd;
        n.kind = config().norm, n.N = N(), n.C = config().C;
        ::norm_backward(n, stream());
        for (int k = 0; k < x.branches; k++) { cast(x.added[k].dout, config().C); }
    }

    // The gradient of the embedding: dout itself, or what its norm makes of it
    const floatX* embed_backward(const floatX* dout) {
        const Acts a = acts(0);
        if (!config().shape().embed_norm) { return dout; }
        NormBackward n = {};
        n.dresidual = fresh(a.dlnf), n.dresidual_acc = Accumulate::No;
        n.y[0].dout = dout, n.scratch = scratch, n.inp = a.raw, n.rstd = a.raw_rstd;
        n.kind = config().norm, n.N = N(), n.C = config().C;
        ::norm_backward(n, stream());
        return n.dresidual;
    }

    void fp8_product(floatX* out, const Operand& dout, const Linear& w, const floatX* residual,
                     const Fp8Cast& then) {
        if (!w.weight.kept) { cast_weight(w, nullptr, w.weight.bytes_t); }
        fp8_matmul({.out = out, .a = dout.bytes, .b = w.weight.bytes_t, .a_tensor = dout.tensor,
                    .b_tensor = w.weight.tensor, .residual = residual, .M = N(), .N = w.C, .K = w.OC,
                    .fast = dout.format == Fp8Format::E4m3, .a_format = dout.format, .cast = then}, stream());
    }
};

// The pages of the backward mirror the forward's, from the last line to the first. Only fcproj and the
// activation before it share a verb here, where in the forward the activation shares one with fc.
static void sequential_layer_backward(Backward& e, int l) {
    const Layer a = e.layer_of(l);
    e.linear_and_activation_backward(a.dfch, a.dx_out, a.act, a.w_fcproj, a.fch, a.activation,
                                     a.w_fc.dbias, a.dact);
    e.linear_backward(a.dln2, a.dfch, a.ln2, a.w_fc);
    e.norm_backward(a.dx, a.dln2, a.x_mid, a.w_ln2);
    e.linear_backward(a.datty, a.dx_mid, a.atty, a.w_attproj);
    e.attention_backward(a.dqkv, a.datty, a.atty, a.qkv, a.att, a.w_qkv.dbias, a.rotation);
    e.rotate_backward(a.dqkv, a.qkv, a.rotation, a.w_qkv.dbias);
    e.linear_backward(a.dln1, a.dqkv, a.ln1, a.w_qkv);
    e.embed_values_backward(a.dln1, a.dqkv, a.values, a.dvalues);
    e.norm_backward(a.dx, a.dln1, a.x, a.w_ln1);
}

static void parallel_layer_backward(Backward& e, int l) {
    const Layer a = e.layer_of(l);
    const bool tied = e.config().block == Block::ParallelTied;
    e.linear_and_activation_backward(a.dfch, a.dx_out, a.act, a.w_fcproj, a.fch, a.activation,
                                     a.w_fc.dbias, a.dact);
    e.linear_backward(a.dln2, a.dfch, tied ? a.ln1 : a.ln2, a.w_fc);
    e.linear_backward(a.datty, a.dx_mid, a.atty, a.w_attproj);
    e.attention_backward(a.dqkv, a.datty, a.atty, a.qkv, a.att, a.w_qkv.dbias);
    e.linear_backward(a.dln1, a.dqkv, a.ln1, a.w_qkv, tied ? a.dln2 : nullptr);
    if (tied) { e.norm_backward(a.dx, a.dln1, a.x, a.w_ln1); }
    else { e.norm_backward(a.dx, a.dln1, a.x, a.w_ln1, a.dln2, a.w_ln2); }
}

static void model_layer_backward(Backward& e, int l) {
    if (e.config().block == Block::Sequential) { sequential_layer_backward(e, l); }
    else { parallel_layer_backward(e, l); }
}

// ---- LM head and loss ----
// The logits are a model's largest tensor: (B,T,151936) of Qwen3. So --head-chunks N takes the rows of lnf in
// N parts: a part's logits, losses and gradients are complete before the next part's logits take their place.
// The head's weight then has the sum of N parts' gradients.

// The head from row `first` on. Its bytes are not moved on: fp8-head takes all rows at once (fp8_check).
static Head head_part(Head head, int first, int C) {
    const size_t at = (size_t)first * C;
    head.lnf.data += at, head.dlnf += at, head.losses += first, head.targets += first;
    assert(!head.w.dweight.is_bf16);                // bf16 is rounded once, by store_sum
    if (first > 0) { head.w.dweight.acc = Accumulate::Yes; }
    return head;
}

// Losses of `count` of the pass's rows. With a micro-step, the gradient of weight * their sum replaces their
// logits, or its FP8 bytes go to dlogits.
static void head_losses(const Pass& pass, const Head& head, float weight, int count) {
    const Config& c = pass.config();
    const Operand& dlogits = head.dlogits;
    Forward(pass).product(head.logits, head.lnf, head.w);
    classifier({.logits = head.logits, .losses = head.losses, .targets = head.targets, .dloss = weight,
                .loss_scale = &pass.model->state->update.loss_scale, .N = count, .V = c.V, .Vp = c.Vp,
                .mode = pass.micro ? ClassifierMode::LossAndGrad : ClassifierMode::LossOnly,
                .fp8_grad = dlogits.bytes, .fp8_tensor = dlogits.bytes ? dlogits.tensor : nullptr,
                .softcap = c.shape().softcap}, pass.stream());
}

// An evaluation's losses and likeliest targets, of `count` positions of the N that the forward was over. The
// LM head, 31 % of 124M's FLOPs, reads only these. Copies of position 0 round their number up to a multiple
// of 256, so few shapes occur, each of whole tiles.
static void model_counted_losses(Model* model, int N, int count) {
    const Config& c = model->config;
    const int rows = std::min(N, round_up(count, 256)), part = head_rows(model->options, N);
    const Pass pass = {model, 1, rows};
    Head head = pass.head_of();
    floatX* counted = pass.acts(0).counted;
    encoder_forward({.out = counted, .tokens = model->feed.inputs.counted, .wte = head.lnf.data,
                     .wpe = nullptr, .B = 1, .T = rows, .C = c.C}, model->stream);   // rows of lnf
    head.lnf.data = counted;
    for (int first = 0; first < count; first += part) {
        const int n = std::min(part, rows - first), live = std::min(n, count - first);
        const Head h = head_part(head, first, c.C);
        head_losses({model, 1, n}, h, 0.0f, live);
        mark_likeliest({model->feed.inputs.likeliest + first, h.logits, h.targets, live, c.V, c.Vp},
                       model->stream);
    }
}

// Losses of all positions, from the rows that the forward has left in lnf, and mean (+)= weight * their sum,
// on the device. With a micro-step also the gradients of the head's weight and of lnf.
static void model_head(Model* model, int B, int T, float weight, float* mean, Accumulate acc,
                       const MicroStep* micro) {
    const int N = B * T, part = head_rows(model->options, N), C = model->config.C;
    Backward e({model, 1, N, micro, model->acts.scratch});
    Head head = e.head_of();
    if (micro) { head.w.dweight = e.sum_of(head.w_id); }
    for (int first = 0; first < N; first += part) {
        const Head h = head_part(head, first, C);
        e.T = std::min(part, N - first);
        head_losses(e, h, weight, e.T);
        if (!micro) { continue; }
        e.transpose(h.dlogits, h.w.OC);
        e.linear_backward(h.dlnf, h.dlogits, h.lnf, h.w);
    }
    if (micro && head.w_id == PARAM_headw) {        // wte's sum waits for the embedding's gradient
        e.store_sum(PARAM_headw);
        model_bucket_complete(model, model->layout.head(), *micro);
    }
    loss_sum({mean, head.losses, weight, acc, N}, model->stream);
}

static void model_loss(Model* model, int B, int T, float weight, float* mean, Accumulate acc) {
    model_forward(model, B, T);
    model_head(model, B, T, weight, mean, acc);
}

// ---- backward ----
// Gradients of all parameters but the LM head's: the last norm, each layer after what -r recomputes of it,
// from last to first, the embedding, and last the product that layer 0 has postponed.
static void model_backward(Model* model, int B, int T, const MicroStep& micro) {
    const Config& c = model->config;
    const Layout& layout = model->layout;
    Backward e({model, B, T, &micro, model->acts.scratch});
    const Head head = e.head_of();
    e.norm_backward(e.acts(0).dx, head.dlnf, head.x, head.w_lnf, nullptr, {}, Accumulate::No);
    Forward recompute(e);                       // the same pass
    recompute.recomputes = true;
    for (int l = c.L - 1; l >= 0; l--) {
        model_layer(recompute, l);
        e.bucket = layout.layer(l), e.weights_left = layout.matrices[l], e.postpones = l == 0;
        model_layer_backward(e, l);
    }

    for (int bucket : {layout.norms(), layout.biases()}) {
        if (layout.has(bucket)) { model_bucket_complete(model, bucket, micro); }
    }
    Grad dwte = e.sum_of(PARAM_wte);
    if (head.w_id == PARAM_wte) { dwte.acc = Accumulate::Yes; }                 // to the head's part
    encoder_backward({.dwte = e.begun(dwte, model->param_specs[PARAM_wte].elems),
                      .dwpe = e.grad(PARAM_wpe, 0), .scratch = e.scratch,
                      .dout = e.embed_backward(e.after_layer(-1).added[0].dout.data),
                      .buckets = model->feed.buckets, .B = B, .T = T, .maxT = c.maxT, .C = c.C}, e.stream());
    e.store_sum(PARAM_wte);
    model_bucket_complete(model, layout.embedding(), micro);
    e.weight_backward(e.postponed.dout, e.postponed.inp, e.postponed.w);        // layer 0's qkv
    model_bucket_complete(model, layout.layer(0), micro);
    model_bucket_complete(model, -1, micro);
}

// ---- exchange between GPUs ----
// A rank is one process with one GPU. All ranks hold the same parameters and work on different parts of the
// batch. A step's micro-steps are numbered over the whole job and cut into G lanes: equally long, contiguous
// groups. A lane belongs to one rank, which sums its gradients in order, in place. The sums of lanes are then
// added in pairs, by a tree:
//     ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))
// So the bits of a run depend on -b, -t, -z and G, but not on the number of ranks.
//
//     G = 8       1 rank                     2 ranks                      4 ranks
//     backward    lanes 0 .. 7               0 .. 3 | 4 .. 7              0 1 | 2 3 | 4 5 | 6 7
//     within a    a pair is summed as soon as both are there: 4 buffers for 8 lanes
//     rank
//     between                                each rank sends shard r of its sum to rank r, which adds the
//     ranks                                  pieces in pairs: the upper levels of the same tree
//
// Buckets (llmc/model/layout.h) are exchanged one by one, by the GPU's copy engines, while the backward of
// earlier layers goes on. A bucket is summed when the next one is complete; rank r then has the sums of shard
// r. ZeRO stage 0 gathers these sums, and every rank updates all parameters. At stage 1 a rank updates its
// shards. The parameters are then gathered bucket by bucket, as the next forward needs them.

// Called when the backward has computed a bucket's gradients. Sends them to the other ranks, and sums the
// gradients of the bucket before, which have arrived in the meantime. bucket -1: no more buckets follow.
static void model_bucket_complete(Model* model, int bucket, const MicroStep& micro) {
    if (!micro.exchanges) { return; }
    Exchange& exchange = model->exchange;
    const int before = exchange.bucket_in_flight;
    exchange.bucket_in_flight = bucket;
    if (bucket >= 0) {
        const Bucket& b = model->layout.buckets[bucket];
        BucketExchange& sent = exchange.buckets[bucket];
        model_merge_lanes(model, micro.lane, b.grads, b.padded);
        stream_follow(model, exchange.stream, model->stream);       // the inbox's last sums are done, too
        const size_t inbox = bucket == model->layout.embedding() ? 2 : exchange.next_inbox++ % 2;
        sent.inbox = exchange.inboxes + inbox * model->layout.largest_but_first * sizeof(float);
        device_all_to_all(sent.inbox, model->grads + b.grads, b.shard * b.grad_bytes, exchange.stream);
        event_record(sent.arrived, exchange.stream);
    }
    if (before >= 0) { model_sum_bucket(model, before, micro.count); }
}

// After a lane: adds the pairs that it completes (lanes.h), in n elements from `offset` bytes on.
// With several lanes on a rank, gradients are fp32.
static void model_merge_lanes(Model* model, int lane, size_t offset, size_t n) {
    const int top = lane_buffer(lane), merges = lane_merges(lane, model->options.lanes);
    if (merges == 0) { return; }
    auto buffer = [&](int k) { return (float*)(model->grads + k * model->layout.grads_bytes + offset); };
    LaneSum a = {.out = {buffer(top - merges), Accumulate::No}, .num_chain = merges,
                 .pieces = {.data = buffer(top)}, .num_pieces = 1, .n = n};
    for (int k = 0; k < merges; k++) { a.chain[k] = buffer(top - merges + k); }
    lane_sum(a, model->stream);
}

// From now on, work enqueued on `later` waits for the work that `earlier` has. A wait is for what the event
// has recorded by then, so one event serves all.
static void stream_follow(const Model* model, Stream later, Stream earlier) {
    event_record(model->exchange.handover, earlier);
    stream_wait(later, model->exchange.handover);
}

// Sums a bucket's gradients of all ranks as soon as they have arrived. Piece r is rank r's sum of its lanes,
// stored by the last of its `count` micro-steps. The kernels run on the backward's stream: on a second one,
// both would wait for each other's SMs (dev/bench/NOTES.md).
static void model_sum_bucket(Model* model, int bucket, int count) {
    const Options& o = model->options;
    const Bucket& b = model->layout.buckets[bucket];
    const BucketExchange& sent = model->exchange.buckets[bucket];
    const StoredGrads sum = model_summed_grads(model, count, bucket, b.mine);
    const RoundKey key = {o.seed, model->step, (uint32_t)count - 1, kRoundGrads};
    stream_wait(model->stream, sent.arrived);
    lane_sum({.out = {(float*)sum.data, Accumulate::No, sum.is_bf16, sum.key, sum.first},
              .pieces = {sent.inbox, sum.is_bf16, key, sum.first}, .piece_micros = (uint32_t)count,
              .num_pieces = o.split.world, .n = b.shard}, model->stream);
    if (o.split.zero == 0) {
        stream_follow(model, model->exchange.stream, model->stream);
        device_all_gather(model->grads + b.grads, b.shard * b.grad_bytes, model->exchange.stream);
    }
}

// A bucket's gradients at the end of a step, summed over all ranks' micro-steps, `count` on each: from
// element `from` on, where this rank's part begins. Their key is that of the job's last micro-step.
static StoredGrads model_summed_grads(const Model* model, int count, int bucket, size_t from) {
    const int world = model->options.split.world;
    const Bucket& b = model->layout.buckets[bucket];
    const RoundKey key = {model->options.seed, model->step, (uint32_t)(world * count - 1),
                          world > 1 ? kRoundGradSums : kRoundGrads};
    return {model->grads + b.grads + from * b.grad_bytes, b.grads_bf16, key, b.first + from};
}

// Makes the model's stream wait until this bucket's parameters have arrived from the other ranks.
static void model_await_params(Model* model, int bucket) {
    const Split& split = model->options.split;
    if (split.world == 1 || split.zero == 0) { return; }
    stream_wait(model->stream, model->exchange.buckets[bucket].gathered);
}
static void model_await_all_params(Model* model) {
    const int count = (int)model->layout.buckets.size();
    for (int bucket = 0; bucket < count; bucket++) { model_await_params(model, bucket); }
}

// Dies if the parameters of two ranks differ: each rank hashes its own, and all compare the hashes.
static void check_ranks(Model* model, int64_t step) {
    if (comm.world == 1) { return; }
    CommWait waiting;                           // the device may wait for other ranks
    const size_t bytes = model->layout.params_bytes;
    model_await_all_params(model);
    std::vector<char> part(std::min(bytes, (size_t)64 << 20));
    Checksum sum;
    for (size_t at = 0; at < bytes; at += part.size()) {
        const size_t n = std::min(part.size(), bytes - at);
        copy_to_host(part.data(), model->params + at, n, model->stream);
        stream_sync(model->stream);
        checksum_add(&sum, part.data(), n);
    }
    std::vector<uint64_t> hashes(comm.world, checksum_end(&sum));
    comm_all_gather(hashes.data(), sizeof(hashes[0]));
    for (int r = 1; r < comm.world; r++) {
        if (hashes[r] == hashes[0]) { continue; }
        die("after %lld steps the parameters of rank %d are not those of rank 0", (long long)step, r);
    }
}

// ---- update ----
// Computes the norm, decides whether to skip, and runs AdamW and Muon: all on the device, from the same
// numbers on every rank. count: this rank's micro-steps in the step.
static void model_update(Model* model, int count, double lr, double muon_lr) {
    const Options& o = model->options;
    const Split& split = o.split;
    const Exchange& exchange = model->exchange;
    const auto order = model->layout.update_order();
    // The buckets that one launch updates, from this one on: all layers' buckets at once, each as a row of
    // the launch (op_types.h, Rows); any other bucket alone.
    auto rows_of = [&](int bucket) {
        const int L = model->config.L, layer = model->layout.layer(0);
        if (bucket != layer || L == 1) { return Rows{}; }
        const Bucket &b = model->layout.buckets[layer], &next = model->layout.buckets[layer + 1];
        return Rows{L, next.params - b.params, next.grads - b.grads, next.first - b.first};
    };

    // this rank's record, of its shards; then the ranks gather all records
    for (int bucket : order) {
        const Bucket& b = model->layout.buckets[bucket];
        square_sums({(double*)exchange.record + b.shards / kChunk,
                     model_summed_grads(model, count, bucket, b.mine), b.shard, rows_of(bucket)},
                    model->stream);
    }
    model_exchange_now(model, [&](Stream stream) {
        device_all_gather(exchange.records, exchange.record_bytes, stream);
    });
    if (o.fp8) {                            // first: it makes the norm infinite where too much has saturated
        fp8_scales({.tensors = model->fp8.tensors, .saturated = &model->state->fp8_saturated,
                    .records = exchange.records, .record_bytes = exchange.record_bytes,
                    .stats_at = exchange.stats_at, .ranks = split.world, .rank = split.rank,
                    .count = 3 * model->fp8.linears}, model->stream);
    }
    update_decision({.state = &model->state->update, .loss = &model->state->loss,
                     .records = exchange.records, .record_bytes = exchange.record_bytes,
                     .lanes_at = exchange.losses_at, .ranks = split.world, .lanes = o.lanes,
                     .ranges = model->opt.ranges, .num_ranges = (int)model->layout.buckets.size(),
                     .max_norm = (float)o.grad_clip,
                     .policy = {kFp16, kLossScaleSteps, kMaxLossScale, (float)o.skip_loss,
                                (float)o.skip_norm}},
                    model->stream);
    for (int bucket : order) {
        const Bucket& b = model->layout.buckets[bucket];
        const Rows rows = rows_of(bucket);
        if (b.muon) { model_update_muon(model, count, rows, muon_lr); continue; }
        const bool has_tables = b.kind == Kind::Embedding && model->config.shape().value_embed;
        const size_t tables = has_tables ? model->param_specs[PARAM_vew].offset : SIZE_MAX;     // are last
        adamw_update({.params = model->params + b.params + b.held_at * b.elem_bytes,
                      .params_fp32 = b.elem_bytes == sizeof(float),
                      .master = model->opt.master ? model->opt.master + b.state : nullptr,
                      .m = model_state(model, model->opt.m, b.state),
                      .v = model_state(model, model->opt.v, b.v),
                      .grads = model_summed_grads(model, count, bucket, b.held_at),
                      .state = &model->state->update, .n = b.held, .rows = rows,
                      .weight_decay = is_2d(b.kind) ? (float)o.weight_decay : 0.0f,
                      .lr = lr * (b.kind == Kind::Embedding ? o.embedding_rate
                                  : b.kind == Kind::Head    ? o.head_rate
                                                            : 1.0),
                      .beta1 = o.beta1, .beta2 = o.beta2, .eps = o.eps,
                      .key = RoundKey{o.seed, model->step, 0, kRoundParams}, .first = b.first + b.held_at,
                      .decays = tables - std::min(tables, b.held_at)}, model->stream);
        model_gather_params(model, bucket, rows.count);
    }
    model->step++;
}

// An exchange between the ranks that the model's stream waits for at once: send(stream) enqueues it.
template <class Send> static void model_exchange_now(Model* model, Send send) {
    if (model->options.split.world == 1) { return; }
    const Stream stream = model->exchange.stream;
    stream_follow(model, stream, model->stream);
    send(stream);
    stream_follow(model, model->stream, stream);
}

// Muon's part of an update, `share.together` layers at a time: momentum, orthogonalisation, weights. Ranks
// gather the results of the second phase, and at ZeRO stage 1 those of the first. One rank
// orthogonalises a whole matrix, so its bits do not depend on the number of ranks. No activation lives while
// weights are updated, so all but what the ranks exchange is in the activations' memory.
static void model_update_muon(Model* model, int count, Rows rows, double lr) {
    const Options& o = model->options;
    const Split& split = o.split;
    const MuonShare& share = model->muon;
    const double momentum = momentum_at(o.muon_momentum, o.muon_warmup, model->step);
    const RoundKey key = {o.seed, model->step, 0, kRoundParams};
    muonX* updates = (muonX*)(split.world > 1 ? model->opt.muon_updates : model->acts.data);
    for (int first = 0; first < model->config.L; first += share.together) {
        const int layers = std::min(share.together, model->config.L - first);
        const int bucket = model->layout.layer(first);
        const Bucket& b = model->layout.buckets[bucket];
        rows.count = layers;
        muon_momentum({.update = updates + b.held_at, .m = model_state(model, model->opt.m, b.state),
                       .grads = model_summed_grads(model, count, bucket, b.held_at),
                       .state = &model->state->update, .n = b.held, .update_row = b.padded, .rows = rows,
                       .momentum = momentum, .key = key, .first = b.first + b.held_at}, model->stream);
        if (split.zero >= 1) {
            model_exchange_now(model, [&](Stream stream) {
                for (int l = 0; l < layers; l++) {
                    device_all_gather(updates + l * b.padded, b.shard * sizeof(muonX), stream);
                }
            });
        }
        const int mine = split.rank * share.each, own = std::min(share.each, layers - mine);
        if (own > 0) { model_orthogonalise(model, updates + mine * b.padded, own); }
        model_exchange_now(model, [&](Stream stream) {
            device_all_gather(updates, share.each * b.padded * sizeof(muonX), stream);
        });
        muon_update({.params = model->params + b.params + b.held_at * b.elem_bytes,
                     .master = model->opt.master ? model->opt.master + b.state : nullptr,
                     .update = updates + b.held_at, .state = &model->state->update, .n = b.held,
                     .update_row = b.padded, .rows = rows, .weight_decay = o.muon_decay, .lr = lr,
                     .key = key, .first = b.first + b.held_at}, model->stream);
        model_gather_params(model, bucket, layers);
    }
}

// This rank's m or v, from element `at` of the arena on.
static StateOf<float> model_state(const Model* model, char* arena, size_t at) {
    return {arena + at * model->options.state_bytes(), model->options.state_bf16 != 0};
}

// Orthogonalises the matrices of `layers` layers in place, one shape after the other. updates: the bucket of
// the first of these layers.
static void model_orthogonalise(Model* model, muonX* updates, int layers) {
    const size_t stride = model->layout.buckets[model->layout.layer(0)].padded;
    char* products = model->acts.data + model->muon.elems * sizeof(muonX);
    auto product = [&](int i) { return products + i * model->muon.product; };
    for (const MuonShape& s : muon_shapes(model->param_specs, stride, layers)) {
        muon_orthogonalise({.out = updates, .inp = updates, .x = (muonX*)product(0), .y = (muonX*)product(1),
                            .gram = (muonX*)product(2), .poly = (muonX*)product(3),
                            .sums = (double*)product(4), .places = s.places, .rows = s.rows, .cols = s.cols,
                            .steps = model->options.muon_steps, .layers_all = model->config.L},
                           model->stream);
    }
}

// Gathers the updated parameters of `count` buckets from `first` on, while the next forward runs.
static void model_gather_params(Model* model, int first, int count) {
    const Split& split = model->options.split;
    if (split.world == 1 || split.zero == 0) { return; }
    const Exchange& exchange = model->exchange;
    stream_follow(model, exchange.stream, model->stream);
    for (int bucket = first; bucket < first + count; bucket++) {
        const Bucket& b = model->layout.buckets[bucket];
        device_all_gather(model->params + b.params, b.shard * b.elem_bytes, exchange.stream);
        event_record(exchange.buckets[bucket].gathered, exchange.stream);
    }
}

// == 9 writing text ==
// Writes several texts at once. Each text is a row, of the cache and of every other array here. All of this
// is in the memory of the activations: those of a forward over one text, those of a step, then the arrays.
struct Decoder {
    Model* model;
    int rows;
    ActSpec text_specs[NUM_ACTS], step_specs[NUM_ACTS];     // (1,T) and (rows,1)
    Cache cache;                        // of all rows
    int *tokens, *positions;            // (rows)
    uint64_t* draws;                    // (rows)
    uint32_t* ids;                      // (rows)
    size_t bytes;
    Graph step;
    static const int kAhead = kDeviceIsAsync ? 8 : 1;   // steps that the host may be ahead of the device
    int* drawn;                         // (kAhead,rows) pinned: tokens of the last steps
    Event ready[kAhead];
};

static Decoder decoder_layout(char* base, const Config& c, int T, int rows) {
    Decoder d = {};
    d.rows = rows;
    Options forward = {};
    forward.trains = false;
    const size_t text_end = act_specs(d.text_specs, c, 1, T, forward);
    const size_t step_end = act_specs(d.step_specs, c, rows, 1, forward, text_end);
    Places p = {(uintptr_t)base, (uintptr_t)base + step_end};
    d.cache.layer_stride = (size_t)rows * T * c.shape().NKV * c.shape().HS;
    p.take(&d.cache.keys, c.L * d.cache.layer_stride), p.take(&d.cache.values, c.L * d.cache.layer_stride);
    p.take(&d.tokens, rows), p.take(&d.positions, rows), p.take(&d.draws, rows), p.take(&d.ids, rows);
    d.bytes = rows > 0 ? p.bytes() : 0;
    return d;
}

static size_t decoder_bytes(const Config& c, int T, int rows) {
    return decoder_layout(nullptr, c, T, rows).bytes;
}

static void decoder_init(Decoder* d, Model* model) {
    *d = decoder_layout(model->acts.data, model->config, model->options.T, model->options.text_rows);
    d->model = model;
    d->drawn = (int*)pinned_malloc(Decoder::kAhead * d->rows * sizeof(int), "drawn tokens");
    for (Event& e : d->ready) { e = event_create(); }
}

static void decoder_free(Decoder* d) {
    stream_sync(d->model->stream);
    graph_free(&d->step);
    pinned_free(d->drawn);
    for (Event e : d->ready) { event_destroy(e); }
}

// Fills rows [row, row + rows) of the cache, whose texts are equal. A forward over one of them computes the
// keys and values of all tokens but the last. T is rounded up, so that few shapes occur; no token sees later
// ones.
static void decoder_prefill(Decoder* d, const std::vector<int>& text, int row, int rows) {
    Model* model = d->model;
    const int count = (int)text.size() - 1, T = std::min(model->options.T, round_up(count, 64));
    if (count == 0) { return; }
    std::vector<int> tokens(text.begin(), text.end() - 1);
    tokens.resize(T, 0);
    const Config::Shape s = model->config.shape();
    const size_t at = (size_t)row * model->options.T * s.NKV * s.HS;
    const Cache cache = {d->cache.keys + at, d->cache.values + at, d->cache.layer_stride, rows, count};
    model_feed(model, tokens.data(), nullptr, 1, T, ClassifierMode::LossOnly);
    Forward e({.model = model, .B = 1, .T = T, .act_specs = d->text_specs, .cache = &cache});
    model_forward(e);
}

// Prepares the next step of every text and returns its position; all texts have the same number of tokens. A
// text longer than T keeps its last T/2 tokens. Their positions change, so the cache is computed anew.
static int decoder_begin(Decoder* d, const std::vector<std::vector<int>>& texts, uint32_t first_id,
                         uint64_t first_draw) {
    Model* model = d->model;
    const int n = (int)texts[0].size(), kept = n <= model->options.T ? n : std::max(1, model->options.T / 2);
    model_await_all_params(model);
    bool equal = true;
    for (const auto& text : texts) { equal = equal && text == texts[0]; }
    std::vector<int> tokens, positions(d->rows, kept - 1);
    std::vector<uint32_t> ids;
    for (int row = 0; row < d->rows; row++) {
        const std::vector<int> end(texts[row].end() - kept, texts[row].end());
        if (row == 0 || !equal) { decoder_prefill(d, end, row, equal ? d->rows : 1); }
        tokens.push_back(end.back());
        ids.push_back(first_id + (uint32_t)row);
    }
    const std::vector<uint64_t> draws(d->rows, first_draw + (uint64_t)n);
    auto send = [&](auto* to, const auto& from) {
        copy_to_device(to, from.data(), from.size() * sizeof(*to), model->stream);
    };
    send(d->tokens, tokens);
    send(d->positions, positions);
    send(d->ids, ids);
    send(d->draws, draws);
    stream_sync(model->stream);                 // the vectors end here
    return kept - 1;
}

// The engine that writes text: the pages' B*T rows are here one new token of each text.
struct Decoding : Forward {
    Decoder* d;

    explicit Decoding(Decoder* d)
        : Forward({.model = d->model, .B = d->rows, .T = 1, .act_specs = d->step_specs, .cache = &d->cache}),
          d(d) { waits = true, tokens = d->tokens, positions = d->positions; }
    void await(int) override {}                 // decoder_begin has waited for all
    void product(floatX* out, const Operand& inp, const Linear& w, const floatX* = nullptr) override {
        decode_matmul({.out = out, .inp = inp.data, .weight = w.weight.data, .bias = w.bias, .gelu = false,
                       .N = N(), .C = w.C, .OC = w.OC}, stream());
    }
    void product_activate(const Operand& out, floatX* fch, const Operand& inp, const Linear& w,
                          const Activation& f) override {
        if (f.mlp != Mlp::Gelu) {
            product(fch, inp, w);
            return activate(out, fch, f);
        }
        decode_matmul({.out = to_write(out), .inp = inp.data, .weight = w.weight.data, .bias = w.bias,
                       .gelu = true, .N = N(), .C = w.C, .OC = w.OC}, stream());
    }
    void attend(floatX* out, const floatX* qkv, const Attention& att) override {
        const auto [NH, NKV, HS] = att.heads;
        decode_attention({.out = out, .keys = att.keys, .values = att.values, .qkv = qkv,
                          .positions = d->positions, .N = N(), .T = model->options.T, .NH = NH, .NKV = NKV,
                          .HS = HS, .mask = att.mask}, stream());
    }
};

// Enqueues one step: one more token of every text. The tokens arrive in drawn[i] (rows).
static void decoder_step(Decoder* d, int i) {
    Model* model = d->model;
    const Config& c = model->config;
    Stream stream = model->stream;
    const int n = d->rows;
    Sampling sampling = model->options.sampling;
    sampling.softcap = c.shape().softcap;
    graph_run(&d->step, stream, [&] {
        Decoding e(d);
        model_forward(e);
        Head head = e.head_of();
        head.w.OC = c.V;                        // padding has no logits here
        e.product(head.logits, head.lnf, head.w);
        sample_tokens({.tokens = d->tokens, .positions = d->positions, .draws = d->draws, .ids = d->ids,
                       .logits = head.logits, .sampling = sampling,
                       .seed = model->options.seed, .N = n, .V = c.V}, stream);
    });
    copy_to_host(d->drawn + i * n, d->tokens, n * sizeof(int), stream);
    event_record(d->ready[i], stream);
}

// Continues `prompt` in options.text_rows texts, each by `count` tokens or up to one of `ends`. Token n of
// text k is drawn with the random number (first_id + k, first_draw + n). So a text depends neither on the
// others nor on how the host waits. on_token(row, token) gets each token, that one too; false
// stops all texts. Weights and the state of training do not change.
static void decoder_write(Decoder* d, const std::vector<int>& prompt, int count, const std::vector<int>& ends,
                          uint32_t first_id, uint64_t first_draw, const OnToken& on_token) {
    const int T = d->model->options.T;
    std::vector<std::vector<int>> texts(d->rows, prompt);
    std::vector<bool> over(d->rows, false);
    int position = decoder_begin(d, texts, first_id, first_draw), asked = 0, live = d->rows;
    for (int read = 0; read < count && live > 0; read++) {
        // the host enqueues up to kAhead steps before it reads the first; a full text waits for its tokens
        if (position == T && read == asked) { position = decoder_begin(d, texts, first_id, first_draw); }
        for (; asked < count && asked - read < Decoder::kAhead && position < T; position++) {
            decoder_step(d, asked++ % Decoder::kAhead);
        }
        const int* drawn = d->drawn + read % Decoder::kAhead * d->rows;
        await_event(d->ready[read % Decoder::kAhead]);
        for (int row = 0; row < d->rows; row++) {
            const int token = drawn[row];
            texts[row].push_back(std::max(token, 0));   // after its end, too: all texts have the same length
            if (over[row]) { continue; }
            if (token < 0) {
                die("cannot sample: all %d logits are NaN\n"
                    "hint: this model has diverged; load an earlier one", d->model->config.V);
            }
            over[row] = std::count(ends.begin(), ends.end(), token) > 0;
            live -= over[row];
            if (!on_token(row, token)) { return; }
        }
    }
}

// == 10 checkpoint ==
// A checkpoint is a model (model_file.h) and a state (state_file.h). checkpoints.h names these files, and the
// marker that comes last.
constexpr bool kModelIsBf16 = kLowPrecision && !kFp16;

static Config checkpoint_config(const char* path) { return model_read_config(path, param_table); }

static void checkpoint_load(Model* model, const char* path) {
    auto on_tensor = [=](int i, int l, const float* values) {
        model_set_param(model, i, l, values);
        comm_progress(-1);
    };
    model_read(path, param_table, model->config, on_tensor);
}

// ---- saving ----
// All master weights of a tensor (bf16: their lower halves), on the device, valid until the next call. From
// ZeRO stage 1 on it gathers the shards, so all ranks must call it at the same time.
static const masterX* model_whole_master(Model* model, int i, int l) {
    const ParamAddress at = param_address(model->param_specs, model->layout, i, l);
    const Bucket& b = model->layout.buckets[at.bucket];
    if (model->options.split.zero == 0) { return model->opt.master + b.state + at.offset; }
    masterX* all = (masterX*)model->exchange.inboxes;
    copy_on_device(all + b.mine, model->opt.master + b.state, b.shard * sizeof(masterX), model->stream);
    device_all_gather(all, b.shard * sizeof(masterX), model->stream);
    return all + at.offset;
}

// The pieces of this rank's state. Resuming reads those that have an address here. Of these, each rank saves
// the master weights, m and v that no other rank saves; rank 0 also saves the parameters. FP16 builds write
// fp32 models, from the master weights.
static std::vector<SavedPiece> state_pieces(Model* model) {
    const bool sharded = model->options.split.zero >= 1, first = model->options.split.rank == 0;
    std::vector<SavedPiece> pieces;
    for (int i = 0; i < NUM_PARAMS; i++) {
        const ParamSpec& s = model->param_specs[i];
        const bool from_master = kFp16 && model->opt.master && s.elem_bytes == 2;
        const char* type = s.elem_bytes == sizeof(float) ? "f32" : kFp16 ? "f16" : "bf16";
        for (int l : s.layers) {
            auto row = [&](const char* array, const char* type, size_t begin, size_t end) {
                const std::string layer = s.layers.size() > 1 ? format(".%d", l) : "";         // "m.qkvw.3"
                return state_row(format("%s.%s", array, s.name) + layer, type, s.rows, s.cols, begin,
                                 end - begin);
            };
            pieces.push_back({.row = row("param", type, 0, s.elems), .device = model_param_data(model, i, l),
                              .in_state = first, .in_model = first && !from_master});
            const HeldPart part = model_held_part(model, i, l);
            for (const Held& held : part.in) {
                if (!held.memory) { continue; }
                const bool is_master = &held == &part.in[0];
                pieces.push_back({.row = row(held.array, held.type, part.begin, part.end),
                                  .device = held.memory, .in_state = sharded || first,
                                  .in_model = first && is_master && from_master && !sharded});
            }
            if (from_master && sharded) {
                pieces.push_back({.row = row("master", "f32", 0, s.elems),
                                  .gather = [=] { return (const void*)model_whole_master(model, i, l); },
                                  .in_model = first});
            }
        }
    }
    if (model->options.fp8) {
        const size_t tensors = 2 * model->fp8.linears, floats = tensors * kFp8TensorFloats;
        pieces.push_back({.row = state_row("fp8", "f32", tensors, kFp8TensorFloats, 0, floats),
                          .device = model->fp8.tensors, .in_state = first});
    }
    return pieces;
}

static void model_saver_init(Saver* saver, Model* model, const Logger* logger, const std::string& folder,
                             bool at_once, const Retention& retention) {
    saver->folder = folder;
    saver->retention = retention;
    saver->config = model->config;
    saver->split = model->options.split;
    saver->model_is_bf16 = kModelIsBf16;
    saver->compute = model->stream;
    saver->before_marker = [=] { logger_sync(logger); };
    saver->after_marker = [=] { logger_forget(folder); };
    saver_init(saver, state_pieces(model), at_once);
}

// All ranks save after the same step. facts: what the state file says beside its tensors.
static void model_save(Model* model, Saver* saver, int64_t step, const Facts& facts) {
    saver_begin(saver, step);
    model_await_all_params(model);
    saver_copy(saver, facts);
}

// ---- resuming ----
static Facts model_facts(Model* model) {
    Facts facts = {{"precision", PRECISION_NAME}, {"step", std::to_string(model->step)}};
    config_facts(model->config, &facts);
    update_facts(model_read_state(model).update, &facts);
    return facts;
}

// Loads parameters, master weights, m, v and the update's state into a model that has been allocated for
// these shapes. Returns an error of the files, which leaves the model half loaded, or "".
static std::string model_load_state(Model* model, const Checkpoint* c) {
    const PieceIndex index = checkpoint_index(*c);
    std::vector<char> data;
    for (const SavedPiece& piece : state_pieces(model)) {
        if (!piece.device) { continue; }
        DiskWait disk;
        const std::string error = checkpoint_read(*c, index, piece.row, &data);
        if (!error.empty()) { return error; }
        copy_to_device(piece.device, data.data(), data.size(), model->stream);
        stream_sync(model->stream);
    }
    DeviceState state = {};
    const std::string error = facts_update(c->facts, &state.update);
    if (!error.empty()) { return error; }
    model_write_state(model, state);
    model->step = (uint32_t)c->step;
    return "";
}

// == 11 setting up a run ==
// In the order in which main calls these functions. Flags and their checks are in llmc/run/run_config.h.
constexpr Build kBuild = {PRECISION_NAME, kDeviceIsCuda};

// A run: its parts, and how far it is, between two steps.
struct Training {
    Model model = {};
    Decoder decoder = {};
    RunData data;
    Logger logger;
    Saver saver = {};
    bool saves = false;         // -o was given
    DeviceInfo device;
    std::string program;        // hash of the program, taken at the start: later its file may be gone
    std::string start;          // the working directory: relative names of files belong to it
    int64_t step = 0;           // steps done
    int64_t position = 0;       // of the next step's data, as data.train counts
};

// Files settle what the flags leave open: the checkpoint to resume from, or the folder or file of -e. Returns
// the model. After this `run` does not change.
static Config settle(const Checkpoint& resumed = {}, const Build& build = kBuild) {
    if (!run.resumed && model_is_folder()) { folder_resolve(); }
    const bool is_file = !run.resumed && model_is_file(run.model);
    if (is_file) { model_file_check(run.model); }
    Config c = run.resumed ? facts_config(resumed.facts)
             : is_file ? checkpoint_config(run.model) : descriptor_config(run.model);
    settings_settle(&c, !run.resumed && !is_file, build);
    return c;
}

static Options run_options() {
    Options o = {run};
    o.trains = run_task() == Task::Train;
    o.fp8 = o.trains && run.matmul_dtype != MatmulDtype::Bf16;
    o.fp8_head = o.fp8 && run.matmul_dtype == MatmulDtype::Fp8Head;
    o.loss_scale = std::max(kFirstLossScale, (float)exp2(ceil(log2((double)run.total_batch))));
    const int at_once = run.chat || run.serves ? 1 : std::min(run.num_samples, kDecodeRows);
    o.text_rows = run_writes_text() ? at_once : 0;
    o.sampling = {(float)run.temperature, run.top_k, (float)run.top_p};
    o.split = {comm.rank, comm.world, comm.world > 1 && o.trains ? run.zero : 0};
    o.lanes = run.lanes / comm.world;
    return o;
}

// Where memory is short, lowers the number of texts that are written at once, then that of lanes: each takes
// a buffer for gradients, and the run then has the bits of fewer lanes. A run that trains takes no memory for
// texts but the activations'; other runs may use all that the device has.
static void fit(const Config& config, Options* o, const DeviceInfo& device) {
    auto fits = [&] { return memory_fits(model_memory_plan(config, *o), memory_room(device)); };
    auto texts_fit = [&] {
        Model model;
        model_describe(&model, config, *o);
        return o->trains ? model.acts.text_bytes == 0 : fits();
    };
    while (o->text_rows > 1 && !texts_fit()) { o->text_rows /= 2; }
    while (o->trains && !run_given("lanes") && o->lanes > 1 && !fits()) { o->lanes /= 2; }
}

// Chooses the GPU and finds out whether the model fits, before any memory is taken. Returns the model's
// options: the run's, with as many lanes and texts as there is memory for.
static Options take_device(Training* t, const Config& config) {
    Options options = run_options();
    gpus_check(device_count());
    t->device = device_init(comm.local_rank);
    fit(config, &options, t->device);
    if (options.trains) {                   // all ranks get as many lanes as the one with the least room
        std::vector<int> lanes(comm.world, options.lanes);
        comm_all_gather(lanes.data(), sizeof(int));
        options.lanes = *std::min_element(lanes.begin(), lanes.end());
        lanes_lowered_print(options.lanes * comm.world);
    }
    model_check_memory(config, options, t->device, run.resumed);
    die_if(attention_error(config.NH, config.shape().NKV, config.shape().HS));
    if (options.fp8) { die_if(fp8_error()); }
    return options;
}

// Facts that are saved with a run. If they differ when it is resumed, its bits may.
static Facts origin_facts(const Training& t) {
    return {{"program", t.program}, {"device", t.device.name},
            {"training data", dataloader_facts(&t.data.train)}, {"training data sample", t.data.sample}};
}

static void print_model(const Model& model) {
    if (run.verbose < 0) { return; }
    const Config& c = model.config;
    const Split& split = model.options.split;
    if (split.world > 1 && model.options.trains) {
        printf("ranks: %d, ZeRO stage %d, gradients summed over %d lanes\n", split.world, split.zero,
               model.options.lanes * split.world);
    }
    report_model(c, model.param_specs, model.options.muon, run.verbose > 0);
    if (model.options.fp8) {
        printf("matrix products: FP8, %s the LM head's\n", model.options.fp8_head ? "also" : "but for");
    }
    memory_print(model_memory_plan(c, model.options), comm.world, run.verbose > 0);
    const Config::Shape s = c.shape();
    printf("kernels: attention %s, %s %s\n", attention_form(s.HS), kMlps[(int)s.mlp].name,
           activation_form(s.mlp, c.C, s.F, model.options.fp8));
}

// Allocates the model. Its parameters are a checkpoint's, a model file's, or random.
static void load_model(Training* t, const Config& config, const Options& options, Checkpoint* resumed) {
    Model* model = &t->model;
    device_comm_init();
    model_allocate(model, config, options);
    decoder_init(&t->decoder, model);
    print_model(*model);
    if (run.resumed) {
        checkpoint_resume(resumed, run.output_dir, resumable_steps(), &t->saver.retention.bad,
                          [=](const Checkpoint& c) { return model_load_state(model, &c); });
        if (resumed->step < 0) { die("-o %s: none of its checkpoints can be used", run.output_dir); }
    }
    else if (file_size(run.model) >= 0) { checkpoint_load(model, run.model); }
    else { model_init_random(model, options.seed); }
    check_ranks(model, model->step);
}

// Starts the logs and the checkpoints' writer, and finds where a resumed run goes on.
static void begin_run(Training* t, const Checkpoint& resumed) {
    const std::string folder = run.output_dir;
    t->saves = !folder.empty();
    logger_init(&t->logger, comm.rank == 0 ? run.output_dir : "");
    char here[PATH_MAX];
    t->start = getcwd(here, sizeof(here)) ? here : "";
    t->logger.copied = t->data.tokenizer_files;
    if (t->saves) {
        const bool at_once = run.checkpoint_every > 0 && run.checkpoint_every < t->data.max_steps;
        model_saver_init(&t->saver, &t->model, &t->logger, folder, at_once,
                         {run.keep, run.major_every, t->saver.retention.bad});
    }
    if (run.resumed) {
        t->step = t->saver.step = resumed.step;
        t->position = fact_number(resumed.facts, "position", 0, kLargestCount);
        logger_go_back(&t->logger, t->step);
        const int skipped = model_read_state(&t->model).update.skipped_in_a_row;
        if (skipped >= kMaxSkipsInARow) { model_forget_skips(&t->model); }       // it stopped for these
        folder_taken_up(resumed, t->saver.retention, t->data.max_steps);
    }
    if (run.own_launch) {
        say("launch: --gpus %d, as the run was started; --gpus N says otherwise\n", run.comm.gpus);
    }
    catch_signals(t->saves);
    data_print(t->data);
}

// Rank 0 writes run.json after its first step, which has chosen the algorithms of matrix products. Libraries
// and algorithms are facts of this file and not of the states: those of equal runs are equal.
static void log_run(Training* t) {
    if (!t->saves || comm.rank != 0) { return; }
    DiskWait disk;
    const Facts before = run.resumed ? run_json(run.output_dir) : Facts();
    const std::string now = gemm_algorithms(t->model.stream), *then = facts_find(before, "algorithms");
    resumed_check(before, {{"set of libraries", t->device.libraries}}, run.output_dir);
    if (then && choices_differ(now, *then)) {
        warn("cuBLASLt chooses other algorithms than before: the run's bits may differ");
    }
    logger_run(&t->logger, kFlags,
               {{"left open", settings_left_open()}, {"precision", PRECISION_NAME},
                {"lanes", std::to_string(t->model.options.lanes * comm.world)},     // as memory allows
                {"device", t->device.name}, {"program", t->program}, {"started in", t->start},
                {"set of libraries", t->device.libraries}, {"algorithms", now}});
}

// --plan GPU: prints what the run would take there, and trains nothing. The CPU build plans for the CUDA
// program in BF16.
static void print_plan() {
    const bool here = strcmp(run.plan, "auto") == 0;
    const Build build = kBuild.is_cuda ? kBuild : Build{"BF16", true};
    const GpuKind* gpu = here ? nullptr : plan_gpu(run.plan);
    if (here && !kBuild.is_cuda) { die("--plan auto needs the CUDA program: this one has no GPU"); }
    if (!kBuild.is_cuda) { bytes_floatX = 2; }
    comm.world = std::max({1, run.comm.gpus, run.comm.processes});
    like_take();
    settings_keep();
    const Config config = settle({}, build);
    Options options = run_options();
    DeviceInfo device;
    if (here) {
        device = device_init();
        gpu = gpu_kind(device.name);
    } else {
        device.name = gpu->tflops > 0 ? gpu_name(*gpu) : format("%g GiB", gpu->gib);
        device.memory_total = (size_t)(gpu->gib * (1 << 30));
        device.memory_free = device.memory_total - ((size_t)3 << 29);   // 1.5 GiB: driver, libraries, NCCL
    }
    fit(config, &options, device);
    Options least = options;
    if (!run_given("lanes")) { least.lanes = 1; }

    const std::vector<ParamSpec> specs = param_table(config);
    printf("plan: %s on %d x %s, %s\n", shown(run.model).c_str(), comm.world, device.name.c_str(),
           build.precision);
    report_model(config, specs, options.muon, false);
    memory_print(model_memory_plan(config, options), comm.world, run.verbose > 0);
    const MemoryRoom room = memory_room(device);
    const std::vector<MemoryFlag> flags = memory_flags(config, least, false);
    auto plan_of = [&](int B, unsigned with) { return model_memory_plan(config, least, B, flags, with); };
    const int largest = memory_largest([&](int B) { return plan_of(B, 0); }, room,
                                       std::min(65536, INT_MAX / run.T));
    const std::string advice = memory_advice(plan_of, flags, room, run.B, largest);
    plan_print_batch(largest, advice, options.lanes * comm.world);
    if (!gpu || gpu->tflops == 0 || !strcmp(build.precision, "FP32")) { return; }   // 16-bit figures alone
    plan_print_time(*gpu, config, (double)report_parameters(specs),
                    {run.B, run.T, comm.world, rank_micro_steps(), run.recompute, run.muon != 0,
                     options.split.zero > 0, options.fp8, options.fp8_head, run.state_bf16 != 0},
                    run_max_steps(), run.price);
}

// == 12 training loop ==
// ---- validation, questions, texts ----
// Calls work(i) for i < count; ranks take turns. Then waits for the device. False: a signal ended it early.
template <class Work> static bool take_turns(Model* model, int64_t count, Work work) {
    bool stopped = false;
    for (int64_t first = 0; first < count && !stopped; first += comm.world) {
        stopped = stop_agreed(model->step);
        if (!stopped && first + comm.rank < count) { work(first + comm.rank); }
    }
    CommWait waiting;                       // the device may wait for other ranks
    stream_sync(model->stream);
    return !stopped;
}

// The mean loss over the first rows of a source of the set (val_rows in run_config.h), or over all if there
// are fewer, of the targets that count. Each row is taken once, so the last batch may be smaller. Ranks take
// batches in turns; their sums are added in the batches' order. Gradients and weights do not change. False: a
// signal ended it early.
static bool validation_loss(float* loss, Model* model, DataLoader* loader, int source) {
    const int64_t B = run.B, T = run.T, rows = data_val_rows(data_sources(*loader)[source]);
    const int64_t batches = ceil_div(rows, B);
    dataloader_seek(loader, 0, source);
    const float weight = (float)(1.0 / (double)dataloader_counted(loader, 0, rows));   // > 0: see data_open
    float* losses = (float*)pinned_malloc(batches * sizeof(float), "validation losses");
    memset(losses, 0, batches * sizeof(float));
    const bool done = take_turns(model, batches, [&](int64_t i) {
        const int live = (int)std::min(B, rows - i * B);
        data_next(loader);                  // always B rows: the first ones follow the last
        model_feed(model, loader->inputs, loader->targets, live, T, ClassifierMode::LossOnly, nullptr,
                   loader->conversations);
        model_loss(model, live, T, weight, &model->state->loss, Accumulate::No);
        copy_to_host(&losses[i], &model->state->loss, sizeof(float), model->stream);
    });
    std::vector<double> all(losses, losses + batches);
    pinned_free(losses);
    if (!done) { return false; }
    comm_merge(&all);
    double sum = 0.0;
    for (double part : all) { sum += part; }
    *loss = (float)sum;
    return true;
}

// Prints and logs the validation loss. That of a mixture is the mean of its sources' losses, by their shares.
// False: it is not finite.
static bool validate(Model* model, RunData* data, Logger* logger, int64_t step) {
    SourceLosses each;
    double loss = 0.0, bits = 0.0;
    for (const DataSource& source : data_sources(data->val)) {
        float own;
        if (!validation_loss(&own, model, &data->val, (int)each.size())) { return true; }
        each.push_back({source.name, own, own * data->bits[each.size()]});
        loss += source.share * own;
        bits += source.share * each.back().bits;
    }
    if (each.size() == 1) { each.clear(); }
    DiskWait disk;
    report_val(*logger, run_task() == Task::Train ? step : -1, loss, each, bits);
    logger_val(logger, step, loss, each, bits);
    return report_finite("the validation loss is", loss);
}

// Of each row of the set what evalset_sum gives. Ranks take batches in turns. Gradients and weights do not
// change. False: a signal ended it early.
static bool model_evaluate(std::vector<double>* sums, std::vector<double>* found, Model* model,
                           const EvalSet* set) {
    const size_t room = (size_t)set->B * set->T, batches = set->batches.size();
    std::vector<int> inputs(room), counted(room), targets(room);
    const size_t positions = evalset_positions(set);
    float* losses = (float*)pinned_malloc(positions * sizeof(float), "evaluation losses");
    int* likeliest = (int*)pinned_malloc(positions * sizeof(int), "evaluation targets");
    size_t at = 0;                                      // in both: this rank's batches lie in a row
    const bool done = take_turns(model, (int64_t)batches, [&](int64_t i) {
        const EvalBatch& batch = set->batches[i];
        const int count = evalset_fill(set, batch, inputs.data(), counted.data(), targets.data());
        model_feed(model, inputs.data(), targets.data(), batch.rows, batch.T, ClassifierMode::LossOnly,
                   counted.data());
        Forward e({model, batch.rows, batch.T});
        model_forward(e);
        model_counted_losses(model, batch.rows * batch.T, count);
        copy_to_host(losses + at, e.acts(0).losses, count * sizeof(float), model->stream);
        copy_to_host(likeliest + at, model->feed.inputs.likeliest, count * sizeof(int), model->stream);
        at += count;
    });
    sums->assign(set->rows.size(), 0.0);
    found->assign(set->rows.size(), 0.0);
    at = 0;
    for (size_t i = comm.rank; i < batches && done; i += comm.world) {
        const EvalBatch& batch = set->batches[i];
        at += evalset_sum(set, batch, losses + at, likeliest + at, &(*sums)[batch.first],
                          &(*found)[batch.first]);
    }
    pinned_free(losses);
    pinned_free(likeliest);
    if (done) { comm_merge(sums), comm_merge(found); }
    return done;
}

// Answers the questions, prints and logs the score. False: a loss is not finite.
static bool evaluate(Model* model, const std::vector<EvalSet>& sets, Logger* logger, int64_t step) {
    bool fine = true;
    for (const EvalSet& set : sets) {
        std::vector<double> sums, found;
        if (!model_evaluate(&sums, &found, model, &set)) { return true; }
        const EvalScore score = evalset_score(&set, sums, found);
        DiskWait disk;
        if (run.all_questions) { question_row(set.path, score); }
        else { report_eval(score), logger_eval(logger, step, score); }
        fine = report_finite("losses of the evaluation are", score.measures[0].value) && fine;
    }
    if (run.all_questions && run.verbose < 0) { printf("%s}\n", question_json.c_str()); }
    return fine;
}

// Draws tokens for llmc/run/samples.h. A step's texts have random numbers of their own.
static TextDraw text_draw(Training* t) {
    return [=](const std::vector<int>& prompt, int count, const std::vector<int>& ends, uint32_t first_id,
               const OnToken& on_token) {
        decoder_write(&t->decoder, prompt, count, ends, first_id, (uint64_t)t->step << 24,
                      [&](int row, int token) {
            DiskWait disk;                      // stdout may be a file
            return on_token(row, token);
        });
    };
}

// Writes samples, as many at once as memory allows. Rank 0 writes; the others wait at the next exchange.
static void generate(Training* t) {
    if (comm.rank != 0 || stopping) { return; }
    write_samples(t->data.text_task(),
                  {run.num_samples, t->decoder.rows, t->step, run.prompt, run_task() == Task::Train},
                  text_draw(t));
}

// ---- checkpoints ----
// Facts that a checkpoint has beside its tensors.
static Facts run_facts(Training* t) {
    Facts facts = model_facts(&t->model);
    const struct { const char* name; int64_t value; } numbers[] = {
        {"position", t->position}, {"ranks", comm.world},
        {"lanes", t->model.options.lanes * comm.world}, {"T", run.T}, {"total_batch", run.total_batch},
        {"tokens", t->step * run.total_batch}};
    for (const auto& n : numbers) { facts.push_back({n.name, std::to_string(n.value)}); }
    const Facts origin = origin_facts(*t);
    facts.insert(facts.end(), origin.begin(), origin.end());
    facts.push_back({"started in", t->start});
    if (run.dropout > 0.0) { facts.push_back({kDropoutFact, "the embedding's and the branches' outputs"}); }
    for (size_t i = 0; i < kFlags.size(); i++) {
        facts.push_back({std::string("flag.") + kFlags[i].name, run_texts[i]});
    }
    return facts;
}

static void save(Training* t) {
    if (!t->saves || t->saver.step == t->step) { return; }
    if (t->step == 0) {
        printf("no step was completed: nothing is saved\n");
        return;
    }
    model_save(&t->model, &t->saver, t->step, run_facts(t));
}

// After too many skipped updates in a row: saves and dies. All ranks see the same losses, so all call this.
[[noreturn]] static void give_up(Training* t) {
    const char* cure = run.skip_loss > 0 || run.skip_norm > 0 ? "a larger -sl or -sg skips less"
                                                              : "a smaller -l or a longer -u";
    save(t);                                // the weights are those from before the skipped updates
    if (t->saves) { saver_finish(&t->saver); }
    comm_any(false);                        // no rank dies before rank 0 has printed what was skipped
    die("%d updates in a row were skipped: the run stops after step %lld, and %s\n"
        "hint: %slook at the data; %s", kMaxSkipsInARow, (long long)t->step,
        t->saves ? "its state is saved" : "there is no checkpoint",
        t->saves ? "-y 1 goes on behind these data; " : "", cure);
}

// ---- the loop ----
static bool due(int every, int64_t step) { return every > 0 && step % every == 0; }

static void train(Training* t) {
    Model* model = &t->model;
    const LrSchedule schedule = t->data.schedule(run.lr), muon_schedule = t->data.schedule(run.muon_lr);
    Reports reports = {};
    reports_init(&reports, model->config, (double)report_parameters(model->param_specs), run.T, t->device,
                 kLowPrecision, t->data.max_steps);
    // Reports all steps but the newest `behind`.
    auto report = [&](int behind) {
        while (reports_waiting(reports) > behind) {
            if (report_step(&reports, &t->logger, schedule) < kMaxSkipsInARow) { continue; }
            while (reports_waiting(reports) > 0) { report_step(&reports, &t->logger, schedule); }
            report_line(&reports.report);       // the steps that led here
            give_up(t);
        }
    };

    dataloader_seek(&t->data.train, t->position);
    const int64_t first = t->step;
    while (t->step < t->data.max_steps && !stop_agreed(t->step)) {
        const int64_t step = t->step;
        const bool val_due = due(run.val_every, step);
        const bool eval_due = run.evaluate && due(run.eval_every > 0 ? run.eval_every : run.val_every, step);
        const bool sample_due = step > 0 && due(run.sample_every, step);
        const bool save_due = t->saves && step > 0 && due(run.checkpoint_every, step);
        if (t->saves) { saver_advance(&t->saver); }
        if (val_due || eval_due || sample_due || save_due) { report(0); }
        if (save_due) { save(t); }
        if (val_due || eval_due || sample_due) { report_line(&reports.report); }    // the steps up to here
        if (val_due) { validate(model, &t->data, &t->logger, step); }
        if (eval_due) { evaluate(model, t->data.questions, &t->logger, step); }
        if (sample_due) { generate(t); }

        reports_begin(&reports, step, model->stream);
        const double lr = lr_at(schedule, step), muon_lr = lr_at(muon_schedule, step);
        if (!train_step(model, &t->data.train, t->saver, lr, muon_lr)) { break; }
        if (t->step++ == first) { log_run(t); }
        t->position = t->data.train.position;
        reports_end(&reports, step, model->state, model->stream);
        report(kDeviceIsAsync ? 1 : 0);
    }
    report(0);
    report_line(&reports.report);               // the last steps, fewer than --log-every
    if (t->step < t->data.max_steps) { printf("stopped by a signal after step %lld\n", (long long)t->step); }
    check_ranks(model, t->step);                // a model on which the ranks disagree is not saved
    save(t);                                    // first: the rest takes time
    if (t->saves) { saver_finish(&t->saver); }
    if (run.val_every > 0) { validate(model, &t->data, &t->logger, t->step); }
    if (run.evaluate) { evaluate(model, t->data.questions, &t->logger, t->step); }
    if (run.sample_every > 0) { generate(t); }
    if (run.verbose >= 0) { report_end(reports.report, t->logger.best_val, t->logger.best_step); }
    reports_free(&reports);
}

// == 13 main ==
#ifndef TESTING
// -x 0 without --prompt. False: the loss is not finite.
static bool validate_alone(Training* t) {
    const DataLoader& loader = t->data.val;
    say("evaluating %s on %s: %lld of %lld rows of %d tokens\n", shown(run.model).c_str(),
        shown(run.val_data).c_str(), (long long)data_val_rows(loader), (long long)loader.samples_per_epoch,
        run.T);
    fflush(stdout);
    return validate(&t->model, &t->data, &t->logger, 0);
}

// serve: the first line tells another program what it talks to. A text is drawn as its request says, and the
// graph has the arguments of the one before.
static void serve(Training* t) {
    Model* model = &t->model;
    printf("ready V=%d T=%d chat=%d model=%s\n", model->config.V, run.T, model->config.chat, run.model);
    fflush(stdout);
    requests_answer(model->config.V, run.T, [=](const Request& r, const OnToken& on_token) {
        stream_sync(model->stream);
        graph_free(&t->decoder.step);
        model->options.sampling = r.sampling, model->options.seed = r.seed;
        decoder_write(&t->decoder, r.prompt, r.tokens, {}, 0, 0, on_token);
    });
}

// -x 0 with --prompt, or chat, or serve.
static void write_alone(Training* t) {
    if (!run.chat && !run.serves) { generate(t); }
    else if (comm.rank == 0 && run.serves) { serve(t); }
    // without -g a text goes on to the end of a sentence
    else if (comm.rank == 0) {
        chat(t->data.text_task(), run.model, !run_given("sample-tokens"), text_draw(t));
    }
}

int main(int argc, char** argv) {
    if (version_asked(argc, argv)) { version_print(PRECISION_NAME); return 0; }
    device_prepare(argv);
    settings_parse(argc, argv);
    if (run.plan[0] != '\0') {
        print_plan();
        stdout_check();
        return 0;
    }
    launch_resume();                        // -y 1: the run's number of GPUs
    comm_start(run.comm, argv);
    comm_check_same(flag_facts());          // now: a rank with -y would wait below for those without it

    Training t;
    Checkpoint resumed = find_resumed(&t.saver.retention.bad, kBuild);
    Config config = settle(resumed);        // from here on `run` is fixed
    const Task task = run_task();

    // errors in sizes, files and the prompt are found before any memory is taken or any file written
    if (run.output_dir[0] != '\0' && comm.rank == 0) { run_folder_check(run.output_dir); }
    t.program = executable_hash();
    Options options = take_device(&t, config);
    data_open(&t.data, &config);
    options.document_end = t.data.document_end;
    data_check_same(t.data, t.program);
    if (run.resumed) { resumed_check(resumed.facts, origin_facts(t), run.output_dir); }

    say("device: %s, precision %s\n", t.device.name.c_str(), PRECISION_NAME);
    if (task == Task::Train && run.verbose >= 0) { flags_print(kFlags, run.verbose > 0); }
    load_model(&t, config, options, &resumed);
    for (const EvalSet& set : t.data.questions) { if (run.verbose >= 0) { evalset_print(&set); } }
    surprises_print(t.data.prompted(), t.data.max_steps);   // settings that hardly do what was meant

    bool fine = true;
    if (task == Task::Train) {
        begin_run(&t, resumed);
        train(&t);
        saver_free(&t.saver);
        if (t.saves && t.step > 0) { print_folder(argv[0], t.step < t.data.max_steps, config.chat != 0); }
    } else {
        if (run_validates()) { fine = validate_alone(&t); }
        if (run.evaluate) { fine = evaluate(&t.model, t.data.questions, &t.logger, 0) && fine; }
        if (task == Task::Write) { write_alone(&t); }
    }

    data_free(&t.data);
    logger_free(&t.logger);
    comm_any(false);                        // all ranks wait here, and not in NCCL, for rank 0's last sample
    decoder_free(&t.decoder);
    model_free(&t.model);
    device_comm_end();
    comm_end();
    if (!stop_requested) { stdout_check(); }    // after a SIGPIPE nobody reads stdout
    return fine ? 0 : 1;
}
#endif
