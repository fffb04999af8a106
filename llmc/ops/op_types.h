/*
Types that the ops of both builds share: gradients and where they go, dropout, token buckets, the state of an
update, chunks of the gradient.

    Grad dweight = {data, Accumulate::Yes};     // added to
*/
#pragma once

#include <math.h>       // gives: fminf, fmaxf, fma, sqrt, isfinite
#include <stddef.h>     // gives: size_t
#include <stdint.h>     // gives: uint32_t

#include <type_traits>  // gives: std::is_trivially_copyable

#include "../rand.h"    // gives: RoundKey, DropoutKey, LLMC_HD

#ifdef __CUDACC__
#include <cuda_runtime.h>   // gives: cudaStream_t, int4
typedef cudaStream_t Stream;
#else
typedef int Stream;                             // the twins run at once and ignore it
struct int4 { int x, y, z, w; };                // as the CUDA toolkit has it
#endif

constexpr double kNormEps = 1e-5;               // added to the variance, as in GPT-2 and PyTorch's default
constexpr int kMaxC = 12288;                    // most channels: the norms hold a row in a block's registers
constexpr int kMaxLevels = 24;                   // of the tree that sums lanes: 2^24 lanes a rank
constexpr int kGateChannels = 12;               // that the gate of a value embedding reads
constexpr int kDecodeRows = 64;                 // most texts that are written at once
constexpr float kClipEps = 1e-6f;               // added to the norm in clipping, as in clip_grad_norm_

enum class Kernels { Auto, Portable, Sm90 };    // the best for this GPU; only what sm_80 has; Hopper's
enum class Accumulate { No, Yes };              // No: output = value; Yes: output += value
enum class ClassifierMode { LossOnly, LossAndGrad };

// LayerNorm: (x - mean)*rstd*weight + bias, rstd = 1/sqrt(mean((x - mean)^2) + eps). RMSNorm (Zhang, Sennrich
// 2019) subtracts no mean and has no bias, and may have no weight: x*rstd*weight, rstd = 1/sqrt(mean(x^2) +
// eps).
enum class NormKind { Layer, Rms };

// The MLP's activation, a row each: its struct, its name in reports, its word in descriptors, and whether it
// is gated. One that is not gives act(x). A gated one gives act(gate, up), so it reads twice as many columns
// as it gives: a row is all gates, then all that they act on. The structs are in train_gpt2.cu (6.4) and,
// with Cpu behind the name, in cpu_ops.h; Python's rows are MLPS in dev/reference/formats.py. Files have a
// row's number, so new rows come last.
//     GELU (Hendrycks, Gimpel 2016)      SwiGLU (Shazeer 2020), silu(gate) * up, silu(x) = x / (1 + e^-x)
//     ReLU squared (So and others 2021), max(x, 0)^2
#define MODEL_MLPS(X)                               \
    X(Gelu,     "GELU",     "gelu",     false)      \
    X(SwiGlu,   "SwiGLU",   "swiglu",   true)       \
    X(Relu2,    "ReLU^2",   "relu2",    false)

#define X(act, ...) act,
enum class Mlp { MODEL_MLPS(X) };
#undef X
struct MlpRow { Mlp mlp; const char *name, *word; bool gated; };
#define X(act, ...) {Mlp::act, __VA_ARGS__},
constexpr MlpRow kMlps[] = {MODEL_MLPS(X)};
#undef X
constexpr int kMlpCount = sizeof(kMlps) / sizeof(kMlps[0]);
constexpr bool is_gated(Mlp mlp) { return kMlps[(int)mlp].gated; }
// The columns of what the activation reads, where it gives F
template <class Int> constexpr Int act_columns(Mlp mlp, Int F) { return is_gated(mlp) ? 2 * F : F; }

// Dropout of (N,C): an element becomes 0 with probability dropped/65536. The others are multiplied by
// `scale`, 65536/(65536 - dropped), which keeps the mean. Row n is row first_row + n of the whole job's
// batch, so the mask does not depend on how many ranks and micro-steps share the batch.
struct Dropout {
    uint32_t dropped = 0;       // 0: nothing is done
    float scale = 1.0f;
    DropoutKey key = {};
    uint64_t first_row = 0;
};
static inline Dropout dropout_of(double p, const DropoutKey& key, uint64_t first_row) {     // 0 <= p < 1
    const uint32_t dropped = p > 0.0 ? (uint32_t)fmin(fmax(p * 65536.0 + 0.5, 1.0), 65535.0) : 0;
    return {dropped, (float)(65536.0 / (65536 - dropped)), key, first_row};
}
LLMC_HD static inline float dropout_factor(const Dropout& d, const Rand4& random, int lane) {
    return rand_bits16(random, lane) < d.dropped ? 0.0f : d.scale;
}

// Where one gradient tensor goes. S is fp32 in the trainer and double where tests run the twins. The CUDA
// build can keep the tensor in bf16, rounded with dither (--grad-dtype bf16; see bf16_encode_dithered in
// rand.h). Element i then draws the random bits of position `first` + i of the whole gradient, on any rank.
// A reader needs the same bits again. So an element is rounded once a micro-step, and an addition expects
// what the micro-step before stored.
template <class S> struct GradOf {
    S* data;                // null: not wanted
    Accumulate acc;
    bool is_bf16 = false;   // data points to bf16
    RoundKey key = {};      // of the micro-step that stores
    size_t first = 0;
};
typedef GradOf<float> Grad;

// A gradient tensor that a GradOf has stored.
struct StoredGrads {
    const void* data;           // S, or bf16
    bool is_bf16 = false;
    RoundKey key = {};          // of the micro-step that stored it
    size_t first = 0;
};

// A tensor of the optimizer's state: S, or bf16 (--state-dtype bf16), which updates round stochastically:
// element i draws as number `first` + i of the update's arguments.
template <class S> struct StateOf {
    void* data;
    bool is_bf16 = false;
};

// The `tensor` of a RoundKey. An element's number counts through all buckets (Bucket::first).
constexpr uint32_t kRoundParams = 16, kRoundGrads = 17, kRoundGradSums = 18, kRoundM = 19, kRoundV = 20;

// Token positions grouped by token id, so that each row of dwte is summed by one owner in a fixed order.
struct TokenBuckets {
    const int* order;           // (B*T) positions bt, sorted by token id, stable
    const int4* segments;       // {token, start in order, length <= 128, slot}, largest buckets first;
                                // slot -1: the whole bucket, added to dwte; else its sum goes to row `slot`
    const int4* splits;         // {token, first slot, slots, 0}: buckets of several segments
    int num_segments, num_splits;
};

// A number's values at the last kWindow updates, which say what is usual for it. A skipped update's do not
// enter: they would widen the deviation, and after a few the next ones would pass. Mean and deviation are
// computed from all values each time, which takes microseconds; running sums would drift.
constexpr int kWindow = 128;
struct Window {
    float values[kWindow];
    long long count;            // values so far; the next one goes to values[count % kWindow]
};

// Why an update is skipped: UpdateState::skip.
enum Skip { SKIP_NO, SKIP_NOT_FINITE, SKIP_LOSS, SKIP_NORM };

// The state behind the decision about an update: on the device, and saved in checkpoints.
struct UpdateState {
    long long t;                // updates done: AdamW's step count, skipped ones not counted
    float loss_scale;           // the loss was multiplied by this (FP16), 1 otherwise
    int good_steps;             // finite steps since the scale last changed
    float norm;                 // gradient norm of the last step, before clipping; may be inf or NaN
    float grad_scale;           // an update multiplies gradients by this: clipping / loss scale
    int skip;                   // a Skip; other than SKIP_NO: nothing is updated
    int skipped_in_a_row;       // for whatever reason
    float loss_score;           // how many standard deviations the last step's loss and norm lay above their
    float norm_score;           // windows' means; 0: UpdatePolicy sets no limit, or it cannot be said
    Window losses, norms;       // of the updates that were done
};
static_assert(std::is_trivially_copyable<UpdateState>::value, "it goes to and from the device as bytes");

// A step's results on the device. The host reads them one step later; the next step starts from them.
struct DeviceState {
    UpdateState update;         // AdamW's t, loss scale, norm, the decision to skip
    float loss;                 // mean over the total batch
    float fp8_saturated;        // the largest part of a tensor that saturated
};

// Calls f(name, first element, count) for each field, in order; files use these names. The elements are long
// long, int or float, and const if the state is.
template <class State, class F> void update_state_fields(State& s, F f) {
    f("t", &s.t, 1);
    f("loss_scale", &s.loss_scale, 1);
    f("good_steps", &s.good_steps, 1);
    f("norm", &s.norm, 1);
    f("grad_scale", &s.grad_scale, 1);
    f("skip", &s.skip, 1);
    f("skipped_in_a_row", &s.skipped_in_a_row, 1);
    f("loss_score", &s.loss_score, 1);
    f("norm_score", &s.norm_score, 1);
    f("losses", s.losses.values, kWindow);
    f("losses_count", &s.losses.count, 1);
    f("norms", s.norms.values, kWindow);
    f("norms_count", &s.norms.count, 1);
}
static_assert(sizeof(UpdateState) == 2 * (sizeof(Window) + sizeof(long long)) + 6 * 4,
              "a new field wants a line above (test_gpt2 sees that every byte is saved)");

struct UpdatePolicy {
    bool dynamic_loss_scale;
    int growth_interval;        // good steps after which the loss scale doubles
    float max_scale;
    float max_loss_score = 0;   // a loss or a norm that lies more standard deviations above its window's mean
    float max_norm_score = 0;   // skips the update; 0: no limit
};

// How many standard deviations x, which is not in the window, lies above the window's mean (below: negative).
// 0 until the window is full, because the first losses of a run fall fast. 0 if all values are equal: no
// distance from them is usual or unusual. (A run on one batch at a learning rate of 0, say, would otherwise
// stop at the first rounding error.) In double and in the window's order. fma() is written out: if compilers
// chose where to fuse, two builds could decide differently. One thread of the device computes it.
LLMC_HD static inline float window_score(const Window& w, float x) {
    if (w.count < kWindow) { return 0.0f; }
    double sum = 0.0, squares = 0.0;
    LLMC_UNROLL_16
    for (int i = 0; i < kWindow; i++) { sum += w.values[i]; }
    const double mean = sum / kWindow;
    LLMC_UNROLL_16
    for (int i = 0; i < kWindow; i++) {
        const double d = w.values[i] - mean;
        squares = fma(d, d, squares);
    }
    return squares > 0.0 ? (float)((x - mean) / sqrt(squares / kWindow)) : 0.0f;
}
LLMC_HD static inline void window_add(Window* w, float x) {
    w->values[w->count % kWindow] = x;
    w->count++;
}

// Decides about an update from the gradient's sum of squares and the loss. norm = sqrt(sum) / loss_scale.
// loss or norm not finite: it is skipped, and a dynamic loss scale halves, not below 1.
// loss or norm more than max_loss_score or max_norm_score (0: no limit) standard deviations above the mean of
// their windows: it is skipped. A lasting jump is skipped until the training loop gives up.
// else: t advances, and both enter their windows.
// both finite: grad_scale takes the loss scale out of the gradients and clips their norm to max_norm (0:
// never); after growth_interval good steps a dynamic loss scale doubles, not above max_scale.
LLMC_HD static inline void decide_update(UpdateState* state, const UpdatePolicy& policy, float max_norm,
                                         double sum, float loss) {
    const float scale = state->loss_scale;
    const float norm = (float)(sqrt(sum) / scale);
    state->norm = norm;
    const float max_loss = policy.max_loss_score, max_norm_score = policy.max_norm_score;
    const float loss_score = max_loss > 0.0f ? window_score(state->losses, loss) : 0.0f;
    const float norm_score = max_norm_score > 0.0f ? window_score(state->norms, norm) : 0.0f;
    state->loss_score = loss_score;
    state->norm_score = norm_score;
    const bool finite = isfinite(norm) && isfinite(loss);       // false for NaN
    const int skip = !finite ? SKIP_NOT_FINITE
                     : loss_score > max_loss ? SKIP_LOSS
                     : norm_score > max_norm_score ? SKIP_NORM : SKIP_NO;
    state->skip = skip;
    state->skipped_in_a_row = skip == SKIP_NO ? 0 : state->skipped_in_a_row + 1;
    if (skip == SKIP_NO) {
        state->t++;
        window_add(&state->losses, loss);
        window_add(&state->norms, norm);
    }
    if (!finite) {
        state->good_steps = 0;
        if (policy.dynamic_loss_scale) { state->loss_scale = fmaxf(scale * 0.5f, 1.0f); }
        return;
    }
    const float clip = max_norm / (norm + kClipEps);
    state->grad_scale = (max_norm > 0.0f && clip < 1.0f ? clip : 1.0f) / scale;
    state->good_steps++;
    if (policy.dynamic_loss_scale && state->good_steps >= policy.growth_interval) {
        state->loss_scale = fminf(scale * 2.0f, policy.max_scale);
        state->good_steps = 0;
    }
}

// An op works on a row of n elements in each of several buckets of one kind. These are the distances from row
// to row; tensors without one here (m, v, sums) have no gaps between their rows.
struct Rows {
    int count = 1;
    size_t params = 0, grads = 0;       // bytes
    size_t first = 0;                   // elements, of the keys' positions
};

// The gradient's sum of squares is taken chunk by chunk, and shards are whole chunks, so its bits do not
// depend on the number of ranks.
constexpr size_t kChunk = 8192;

// The type in which Muon multiplies matrices (ops.h): the weights' type, but bf16 for fp16 weights, because
// gradients underflow in fp16. The CUDA build specialises it for them.
template <class X> struct MuonValue { typedef X type; };

// The type of what is kept beside a weight of type X, so that small steps are not lost: its fp32 master copy
// (S). Beside bf16 weights the CUDA build keeps the master's lower 16 bits (rand.h, master_split).
template <class X, class S> struct MasterValue { typedef S type; };

// Where the sums of a bucket's chunks stand among the sums that all ranks send. A bucket is a sequence of
// tensors, cut into equal shards, one a rank. Its live chunks come first; the rest is padding.
struct ChunkRange {
    size_t chunks;              // live chunks of this bucket
    size_t per_rank;            // chunks of a shard
    size_t at;                  // index of a shard's first chunk among all sums of its rank
};
