/*
Every op of a training step and of writing text: what it takes and gives. Two sides implement it: CUDA kernels
(train_gpt2.cu, section 6) and their twins in plain loops (cpu_ops.h, the specification). Both use the structs
below, and a step (section 8) calls either by the same name:

    matmul_forward({out, inp, weight, bias, nullptr, nullptr, N, C, OC}, stream);

The trainer's MatmulForward is MatmulForwardOf<floatX, float>, and so on. X is the type of weights and
activations: floatX, or double where tests run the twins. S is the type of statistics, losses, gradients and
norms' parameters: fp32, or double. `outputs` names an op's outputs, each with a pointer, which is null where
a call does not compute it, and its dimensions. Outputs with gaps between their rows, and encoder_backward's
dwte, whose number of rows the op does not know, are named by row 0 alone. Outputs come first, then scratch,
inputs, sizes; N = B*T rows. Outputs are stored, written =. A GradOf, or an output with an Accumulate beside
it, is stored or added to, as that says: (+)=. Scratch keeps nothing from one op to the next; a function
beside the launcher says how much it needs: norm_backward_scratch_bytes(N, C). A pointer may be null only if
its comment says so.
*/
#pragma once

#include "op_types.h"   // gives: GradOf, Accumulate, Dropout, NormKind, TokenBuckets, UpdateState, Stream
#include "fp8.h"        // gives: Fp8Tensor, Fp8Stats
#include "../errors.h"  // gives: format
#include "../data/sampler.h" // gives: Sampling

template <class X, class S> struct EncoderForwardOf {     // token plus position embedding
    X* out;                             // (B,T,C)
    const int* tokens;                  // (B,T); below 0 it counts as 0
    const X *wte, *wpe;                 // (Vp,C) (maxT,C); wpe: null: the tokens' rows alone, to the bit
    int B, T, C;
    const int* positions = nullptr;     // (B,T), rows of wpe; null: 0 to T - 1
    template <class F> void outputs(F gives) const { gives("out", out, B, T, C); }
};
template <class X, class S> struct EncoderBackwardOf {  // dwte is only added to: a tied head's part, or zeros
    GradOf<S> dwte, dwpe;               // (Vp,C), and (maxT,C) or null; a stored dwpe has zeros from row T on
    S* scratch;
    const X* dout;                      // (B,T,C)
    TokenBuckets buckets;
    int B, T, maxT, C;
    int stride = 0;                     // elements from a row of dout to the next; 0: C. Without dwpe
    template <class F> void outputs(F gives) const { gives("dwte", dwte, C), gives("dwpe", dwpe, maxT, C); }
};

// Norms of the residual stream. Forward: a row's new value is inp plus up to two branches, each after its
// dropout; it is normalised once or twice, with the same statistics. Backward is the reverse.
template <class X, class S> struct NormOutput {
    X* out;                             // (N,C); null in the second, without fp8: there is one norm
    const S *weight, *bias;             // (C), in an RMSNorm null: weights of 1, and no bias
    uint8_t* fp8 = nullptr;             // (N,C) or null; else the bytes of y * scale in e4m3, and no `out`
    const Fp8Tensor* tensor = nullptr;  // with fp8: read
    Fp8Stats* stats = nullptr;          // with fp8: added to
};
template <class X, class S> struct NormForwardOf {
    NormOutput<X, S> y[2];
    S *mean, *rstd;                     // (N); mean: not used by an RMSNorm
    X* sum;                             // (N,C) may be inp or a branch. Null where there are no branches: inp
                                        // is normalised
    const X* inp;                       // (N,C), or null where nothing comes before the branches
    const X* branch[2];                 // (N,C); null: fewer branches
    Dropout dropout[2];                 // of each branch
    NormKind kind;
    int N, C;
    double eps = kNormEps;
    template <class F> void outputs(F gives) const {
        gives("y0", y[0].out, N, C); gives("y1", y[1].out, N, C); gives("fp8_y0", y[0].fp8, N, C);
        gives("fp8_y1", y[1].fp8, N, C); gives("fp8_amax0", y[0].stats ? &y[0].stats->amax : nullptr, 1);
        gives("mean", kind == NormKind::Layer ? mean : nullptr, N); gives("rstd", rstd, N);
        gives("sum", sum, N, C);
    }
};
template <class X, class S> struct NormGrad {
    const X* dout;                      // (N,C); null in the second: there is one norm
    const S* weight;                    // (C) or null: 1
    GradOf<S> dweight, dbias;           // (C) each or null
};
template <class X, class S> struct BranchGrad {         // of what the forward added
    X* dout;                            // (N,C) dresidual through the branch's dropout; null: it is dresidual
                                        // itself, and nothing is dropped
    Dropout dropout;
    GradOf<S> dbias;                    // (C) or null: column sums of the branch's gradient, as stored: the
                                        // bias gradient of the linear layer that the branch ends with
};
template <class X, class S> struct NormBackwardOf {
    X* dresidual;                       // (N,C) gradient of the residual stream
    NormGrad<X, S> y[2];
    BranchGrad<X, S> branch[2];
    S* scratch;
    Accumulate dresidual_acc;
    const X* inp;                       // (N,C) what was normalised; neither it nor a dout is dresidual
    const S *mean, *rstd;               // (N)
    NormKind kind;
    int N, C;
    template <class F> void outputs(F gives) const {
        gives("dresidual", dresidual, N, C); gives("dweight0", y[0].dweight, C);
        gives("dbias0", y[0].dbias, C); gives("dweight1", y[1].dweight, C); gives("dbias1", y[1].dbias, C);
        gives("branch0", branch[0].dout, N, C); gives("branch1", branch[1].dout, N, C);
        gives("branch_bias0", branch[0].dbias, C); gives("branch_bias1", branch[1].dbias, C);
    }
};

template <class X, class S> struct MatmulForwardOf {    // out = inp weight^T + bias + residual
    X* out;                             // (N,OC), of a gated activation (N,OC/2)
    const X *inp, *weight, *bias;       // (N,C) (OC,C) (OC) or null
    const X* residual = nullptr;        // (N,OC) or null; not `out`
    X* pre_act = nullptr;               // (N,OC) or null; else pre_act = the sum and out = the activation of
                                        // it as stored, without a residual
    int N, C, OC;
    Mlp mlp = Mlp::Gelu;                // the activation
    template <class F> void outputs(F gives) const {
        gives("out", out, N, pre_act && is_gated(mlp) ? OC / 2 : OC); gives("pre_act", pre_act, N, OC);
    }
};
template <class X, class S> struct MatmulBackwardInputOf {        // dinp = dout weight + residual
    X* dinp;                            // (N,C), of a gated activation (N,2C)
    const X *dout, *weight;             // (N,OC) (OC,C)
    const X* residual = nullptr;        // (N,C) or null: another gradient of the input; not `dinp`
    const X* pre_act = nullptr;         // as dinp, or null; else the layer's input was the activation of
                                        // pre_act, which it may be, without a residual
    int N, C, OC;
    GradOf<S> dbias = {};               // (C) or null: column sums of dinp, as stored, of an activation that
                                        // is not gated
    S* scratch = nullptr;               // where dbias is wanted
    X* dact = nullptr;                  // (N,C) scratch for the rounded product. Null: dinp serves, but not
                                        // where it is pre_act or a gated activation's
    Mlp mlp = Mlp::Gelu;                // the activation
    template <class F> void outputs(F gives) const {
        gives("dinp", dinp, N, pre_act ? act_columns(mlp, C) : C); gives("dbias", dbias, C);
    }
};
template <class X, class S> struct MatmulBackwardWeightOf {       // dweight (+)= dout^T inp
    GradOf<S> dweight;                  // (OC,C)
    S* scratch;                         // (OC,C) where dweight is bf16, else not used
    const X *dout, *inp;                // (N,OC) (N,C)
    int N, C, OC;
    template <class F> void outputs(F gives) const { gives("dweight", dweight, OC, C); }
};
// The keys' bias adds one number to all scores of a row. Softmax ignores it, so its gradient is 0. It is
// stored as 0, whatever the columns of qkv's gradient (N,3C), the middle third, sum to. C is a multiple of 8.
LLMC_HD static inline bool is_keys(int column, int columns) { return column / (columns / 3) == 1; }
template <class X, class S> struct BiasBackwardOf {       // dbias (+)= column sums of dout
    GradOf<S> dbias;                    // (OC)
    S* scratch;
    const X* dout;                      // (N,OC)
    int N, OC;
    bool of_qkv = false;                // dout is qkv's: the keys' dbias is 0
    template <class F> void outputs(F gives) const { gives("dbias", dbias, OC); }
};
template <class X, class S> struct GradAccumulateOf {     // grad (+)= values, rounded once
    GradOf<S> grad;                     // (n)
    const S* values;                    // (n)
    size_t n;
    template <class F> void outputs(F gives) const { gives("grad", grad, n); }
};

// Matrix products of FP8 bytes (--matmul-dtype fp8). A tensor is multiplied by a power of two and rounded; a
// product divides by its operands' powers again. A weight's scale follows from the weight's largest element,
// which a call without outputs has found. Other tensors keep a scale for a step. The logits' gradient has a
// bound, and so a fixed scale: classifier writes it. What is cast, to e4m3:
//     Plain     x = inp          Act      x = act(inp), of a gated one act(gate, up): inp is (N,2C)
//     Weight    x = inp          Slope    x = inp * act'(before). Gated: `before` is gate, up; x (N,2C) is
//                                         their gradients
enum class Fp8Source { Plain, Weight, Act, Slope };
template <class X, class S> struct Fp8CastOf {
    // (N,width) (width,N): bytes of x * scale, or null. Both null: only amax is taken
    uint8_t *out = nullptr, *out_t = nullptr;
    Fp8Stats* stats = nullptr;          // added to
    Fp8Tensor* tensor = nullptr;        // read; Weight: first set from stats->amax, where bytes are wanted
    GradOf<S> dbias = {};               // (C) or null: column sums of x; null where x is (N,2C)
    S* scratch = nullptr;               // where dbias is wanted
    const X* inp;                       // (N,C), or gate, up (N,2C)
    const X* before = nullptr;          // Slope: (N,C), or gate, up (N,2C); else null
    Fp8Source source = Fp8Source::Plain;
    int N, C;                           // multiples of 16
    Mlp mlp = Mlp::Gelu;                // Act, Slope: the activation
    int width() const { return source == Fp8Source::Slope ? act_columns(mlp, C) : C; }      // of x
    template <class F> void outputs(F gives) const {
        gives("out", out, N, width()); gives("out_t", out_t, width(), N);
        gives("amax", stats ? &stats->amax : nullptr, 1); gives("dbias", dbias, C);
    }
};
template <class X, class S> struct Fp8TransposeOf {
    uint8_t* out;                       // (C,N)
    const uint8_t* inp;                 // (N,C)
    int N, C;                           // multiples of 16
    GradOf<S> dbias = {};               // (C) or null: column sums of what inp stands for; inp is e4m3 then
    S* scratch = nullptr;               // where dbias is wanted
    const Fp8Tensor* tensor = nullptr;  // likewise: inp's
    bool of_qkv = false;                // inp is qkv's gradient: the keys' dbias is 0
    template <class F> void outputs(F gives) const { gives("out", out, C, N), gives("dbias", dbias, C); }
};
template <class X, class S> struct Fp8MatmulOf {          // a b^T, divided by both scales
    X* out = nullptr;                   // (M,N) = the product + bias + residual; null: grad is wanted
    GradOf<S> grad = {};                // (M,N) (+)= the product
    S* scratch = nullptr;               // (M,N) where grad is bf16, else not used
    const uint8_t *a, *b;               // (M,K) (N,K)
    const Fp8Tensor *a_tensor, *b_tensor;
    const X *bias = nullptr, *residual = nullptr;       // (N) (M,N), or null; of out
    int M, N, K;                        // multiples of 16
    bool fast = false;                  // a GPU may add up some products with fewer bits than fp32's
    Fp8Format a_format = Fp8Format::E4m3;       // b's is E4m3
    // If it has stats: the cast of out. With an activation's gradient out is undefined afterwards.
    Fp8CastOf<X, S> cast = {};
    template <class F> void outputs(F gives) const {
        gives("out", cast.before ? nullptr : out, M, N); gives("grad", grad, M, N);
        gives("cast", cast.out, M, cast.width()); gives("cast_t", cast.out_t, cast.width(), M);
        gives("dbias", cast.dbias, N);
    }
};
template <class X, class S> struct Fp8ScalesOf {          // after a step: the next one's scales
    Fp8Tensor* tensors;                 // (count) their histories and scales
    S* saturated;                       // one value: the largest part of a tensor that has saturated, or
                                        // infinite where a tensor was not finite
    char* records;                      // (ranks,record_bytes) at stats_at: a rank's Fp8Stats, (count). This
                                        // rank's become 0. The first number of records becomes infinite, and
                                        // so the gradient's norm, if *saturated is above kFp8MaxSaturated:
                                        // update_decision then skips the update
    size_t record_bytes, stats_at;
    int ranks, rank, count;
    template <class F> void outputs(F gives) const {
        gives("scale", tensors ? &tensors->scale : nullptr, 1); gives("saturated", saturated, 1);
    }
};

// The MLP's activation alone: out = act(inp), of a gated one act(gate, up)
template <class X, class S> struct ActivateOf {
    X* out;                             // (N,F) may be inp, but not of a gated one
    const X* inp;                       // (N,F), of a gated one (N,2F): gate, up
    int N, F;
    Mlp mlp;
    template <class Gives> void outputs(Gives gives) const { gives("out", out, N, F); }
};
template <class X, class S> struct ActivateBackwardOf {   // dinp = dout * act'(inp)
    X* dinp;                            // as inp, which it may be; or dout, but not of a gated one
    const X *dout, *inp;                // (N,F), and as in the forward
    int N, F;
    Mlp mlp;
    GradOf<S> dbias = {};               // (F) or null: column sums of dinp, as stored; null of a gated one
    S* scratch = nullptr;               // where dbias is wanted
    template <class Gives> void outputs(Gives gives) const {
        gives("dinp", dinp, N, act_columns(mlp, F)); gives("dbias", dbias, F);
    }
};

// Rotary positions (Su and others, "RoFormer", 2021) by halves, as in Hugging Face's Llama; before that
// QK-norm, an RMSNorm of each head. In place, in the output of the linear layer qkv: a row has NH heads of q,
// NKV of k, and NKV of v, which stay as they are. A head x of a row at position t becomes
//     y = x * rstd * weight, rstd = 1/sqrt(mean(x^2) + eps)          without QK-norm: y = x
//     out[i] = y[i] cos - y[j] sin     out[j] = y[j] cos + y[i] sin     j = i + HS/2, angle t theta^(-2i/HS)
// The backward reads the forward's output. It turns y back and divides it by the weight. Where a weight is 0,
// the normalised value counts as 0, so this weight's gradient is 0, too. out[i] and out[j] were rounded: a
// weight that is far smaller than its partner's gets a gradient with few digits.
template <class X, class S> struct RotateForwardOf {
    X* qkv;                             // (N,NH+2*NKV,HS)
    S* rstd;                            // (N,NH+NKV) or null: no QK-norm
    const S *q_weight, *k_weight;       // (HS) each, with QK-norm; or null: 1
    const S* table;                     // (maxT,2,HS/2) cosines, then sines: rotation_table.h
    const int* positions;               // (N) below maxT; or null: that of row n is n % T
    int N, T, NH, NKV, HS;              // HS even; on a GPU a multiple of 16, or of 8 in FP32, up to 256
    float eps;
    template <class F> void outputs(F gives) const {
        gives("qkv", qkv, NH + NKV, HS); gives("rstd", rstd, N, NH + NKV);
    }
};
template <class X, class S> struct RotateBackwardOf {   // of a forward without `positions`
    X* dqkv;                            // (N,NH+2*NKV,HS) gradient of the output, then of the input; with
                                        // fp8 then undefined
    GradOf<S> dq_weight, dk_weight;     // (HS) each or null
    S* scratch;                         // where one of these is wanted
    const X* qkv;                       // (N,NH+2*NKV,HS) the output; not read without QK-norm
    const S* rstd;                      // (N,NH+NKV) or null
    const S *q_weight, *k_weight;       // (HS) each or null
    const S* table;                     // (maxT,2,HS/2)
    int N, T, NH, NKV, HS;
    uint8_t* fp8 = nullptr;             // (N,NH+2*NKV,HS) or null; else the bytes of dqkv * scale in e4m3,
                                        // but for those of v, which stay
    const Fp8Tensor* tensor = nullptr;  // with fp8: read
    Fp8Stats* stats = nullptr;          // with fp8: added to
    template <class F> void outputs(F gives) const {
        gives("dqkv", fp8 ? nullptr : dqkv, NH + NKV, HS); gives("fp8_dqkv", fp8, N, NH + 2 * NKV, HS);
        gives("fp8_amax", fp8 ? &stats->amax : nullptr, 1); gives("dq_weight", dq_weight, HS);
        gives("dk_weight", dk_weight, HS);
    }
};

// Value embeddings (modded-nanogpt, Jordan and others, 2024), gated as in nanochat (Karpathy, 2025). In the
// output of the linear layer qkv, in place, each head of v gets its token's row of the layer's table:
//     v += gate * table[token], gate = 3 sigmoid(sum over j < kGateChannels of weight[j] * inp[j])
// With dinp it is the backward: dv becomes gate * dv, which encoder_backward adds up by token.
template <class X, class S> struct ValueEmbedOf {
    X* qkv = nullptr;                   // (N,NH+2*NKV,HS), or its gradient; q and k stay as they are
    X* dinp = nullptr;                  // (N,C) or null; += the gates' part, in kGateChannels columns
    GradOf<S> dweight = {};             // (NKV,kGateChannels), with dinp
    S* scratch = nullptr;               // with dinp
    const X *table, *inp;               // (Vp,NKV,HS), and (N,C), what the linear layer qkv reads
    const S* weight;                    // (NKV,kGateChannels)
    const int* tokens = nullptr;        // (N) below 0 it counts as 0
    int N, C, NH, NKV, HS;              // HS as in RotateForward
    const uint8_t *inp_t8 = nullptr, *dv8 = nullptr;    // (C,N), and as qkv, or null; else bytes in e4m3 that
    const Fp8Tensor *inp_tensor = nullptr, *dv_tensor = nullptr;    // are read in place of inp, and of dv
    LLMC_HD size_t values(int n) const { return ((size_t)n * (NH + 2 * NKV) + NH + NKV) * HS; }
    template <class F> void outputs(F gives) const {
        gives("v", dinp ? nullptr : qkv + values(0), NKV, HS); gives("dinp", dinp, kGateChannels);
        gives("dv", dinp ? qkv + values(0) : nullptr, NKV, HS);
        gives("dweight", dinp ? dweight : GradOf<S>{}, NKV, kGateChannels);
    }
};

// What a token may see is decided here alone: attention's kernels, their twins and decoding ask. A token sees
// itself and all before it, or of these those in its window and in its document. Loops over tiles need three
// things of any mask:
//     a query sees itself, nothing later, and no gap: the keys from first_key to its own position
//     first_key and last_query never fall from one position to the next
//     a key is seen by the queries from its own position to last_query, and by no other
// A bound that no position reaches, INT_MIN or INT_MAX, is none. The compiler then drops its comparisons. The
// last tile of a row of tokens has positions from T on, too, and ignores what it is told of these.
struct Span {                           // positions first to last of a row of tokens
    int first, last;
    LLMC_HD bool has(int i) const { return i >= first && i <= last; }
    LLMC_HD Span within(int T) const { return {first > 0 ? first : 0, last < T ? last : T - 1}; }
};
struct Mask {
    int window = 0;                     // a token sees itself and the window - 1 before it; 0: all before it
    const Span* documents = nullptr;    // (B,T) the document that a position belongs to; null: a row is one
    // Of row b of a batch. The functions below are for one row; with documents, for positions below T.
    LLMC_HD Mask row(int b, int T) const { return {window, documents ? documents + (size_t)b * T : nullptr}; }
    LLMC_HD int first_key(int query) const {
        const int first = window > 0 ? query - window + 1 : INT_MIN;
        return documents && documents[query].first > first ? documents[query].first : first;
    }
    LLMC_HD int last_query(int key) const {
        const int last = window > 0 ? key + window - 1 : INT_MAX;
        return documents && documents[key].last < last ? documents[key].last : last;
    }
    LLMC_HD Span keys(int query) const { return {first_key(query), query}; }
    LLMC_HD Span queries(int key) const { return {key, last_query(key)}; }
    // Whether one of T tokens may not see all before it.
    LLMC_HD bool hides(int T) const { return documents || (window > 0 && window < T); }
};

// Self-attention of NH heads. Their keys and values have NKV heads: query head h reads those of head
// h / (NH / NKV). A row of qkv has NH heads of queries, then NKV of keys, then NKV of values.
// attention_heads_error: why such heads cannot run, or nothing.
static inline std::string attention_heads_error(int NH, int NKV) {
    if (NH >= 1 && NKV >= 1 && NH % NKV == 0) { return ""; }
    return format("attention: %d heads of queries, %d of keys; both must be positive, the first a multiple "
                  "of the second\nhint: choose a number of heads of keys that divides %d", NH, NKV, NH);
}
template <class X, class S> struct AttentionForwardOf {
    X* out;                             // (B,T,NH,HS)
    S* lse;                             // (B,NH,T) log-sum-exp of the scores
    const X* qkv;                       // (B,T,NH+2*NKV,HS)
    int B, T, NH, NKV, HS;
    Mask mask = {};
    template <class F> void outputs(F gives) const {
        gives("out", out, B, T, NH, HS); gives("lse", lse, B, NH, T);
    }
};
template <class X, class S> struct AttentionBackwardOf {
    X* dqkv;                            // (B,T,NH+2*NKV,HS) not written where fp8 is
    S* scratch;
    const X *dout, *out, *qkv;          // (B,T,NH,HS) (B,T,NH,HS) (B,T,NH+2*NKV,HS)
    const S* lse;                       // (B,NH,T)
    int B, T, NH, NKV, HS;
    Mask mask = {};                     // the forward's
    uint8_t* fp8 = nullptr;             // (B,T,NH+2*NKV,HS) or null; else the bytes of dqkv * scale in e4m3
    const Fp8Tensor* tensor = nullptr;  // with fp8: read
    Fp8Stats* stats = nullptr;          // with fp8: added to
    bool only_v = false;                // fp8 gets the values' part of dqkv, and dqkv the rest
    template <class F> void outputs(F gives) const {
        gives("dqkv", fp8 && !only_v ? nullptr : dqkv, B, T, NH + 2 * NKV, HS);
        gives("fp8_dqkv", fp8, B, T, NH + 2 * NKV, HS); gives("fp8_amax", stats ? &stats->amax : nullptr, 1);
    }
};

template <class X, class S> struct ClassifierOf {       // softmax and cross-entropy over the first V columns
    X* logits;                          // (N,Vp); LossAndGrad: then their gradient times dloss * loss_scale,
                                        // if it does not go to fp8_grad
    S* losses;                          // (N)
    const int* targets;                 // (N); -1: not counted, without loss and gradient
    float dloss;
    const float* loss_scale;            // device scalar; null: 1
    int N, V, Vp;
    ClassifierMode mode;
    uint8_t* fp8_grad = nullptr;        // (N,Vp) or null; the gradient times kFp8Dlogits, in e5m2
    Fp8Tensor* fp8_tensor = nullptr;    // with it: `inverse` is set to what its bytes are multiplied by
    float softcap = 0.0f;               // above 0: softmax takes softcap * tanh(logits / softcap)
    template <class F> void outputs(F gives) const {
        gives("losses", losses, N);
        gives("dlogits", mode == ClassifierMode::LossAndGrad && !fp8_grad ? logits : nullptr, N, Vp);
        gives("fp8_dlogits", fp8_grad, N, Vp);
        gives("fp8_inverse", fp8_tensor ? &fp8_tensor->inverse : nullptr, 1);
    }
};
template <class X, class S> struct MarkLikeliestOf {
    int* likeliest;                     // (N) 1 where no token is likelier than the target, else 0
    const X* logits;                    // (N,Vp)
    const int* targets;                 // (N) of equally likely tokens the first one counts
    int N, V, Vp;
    template <class F> void outputs(F gives) const { gives("likeliest", likeliest, N); }
};
template <class X, class S> struct LossSumOf {            // mean (+)= weight * sum of losses
    S* mean;                            // one value
    const S* losses;                    // (N)
    float weight;
    Accumulate acc;
    int N;
    template <class F> void outputs(F gives) const { gives("mean", mean, 1); }
};

// Gradients of lanes (section 8): out = chain[0] + (chain[1] + (... + sum of the pieces)). Pieces are summed
// in pairs, (0 + 1) + (2 + 3) and so on; the last of an odd number moves up a level. Chain and pieces are
// parts of one tree.
template <class X, class S> struct LaneSumOf {
    GradOf<S> out;                      // (n), stored; may be one of the inputs
    const S* chain[kMaxLevels] = {};    // (n) each
    int num_chain = 0;
    StoredGrads pieces;                 // (num_pieces,n); `first` is that of each piece. In bf16, piece r was
    uint32_t piece_micros = 0;          // stored by micro-step key.micro + r * piece_micros
    int num_pieces;
    size_t n;                           // a multiple of kChunk
    template <class F> void outputs(F gives) const { gives("out", out, n); }
};
template <class X, class S> struct SquareSumsOf {         // of the gradient's chunks
    double* sums;                       // (rows,n/kChunk)
    StoredGrads grads;                  // (rows,n)
    size_t n;                           // a multiple of kChunk
    Rows rows;
    template <class F> void outputs(F gives) const { gives("sums", sums, rows.count, n / kChunk); }
};
template <class X, class S> struct UpdateDecisionOf {     // loss, norm, and the decision about the update
    UpdateState* state;
    S* loss;                            // mean over the total batch: the sum of all lanes'
    const char* records;                // (ranks,record_bytes): each rank's sums and, at lanes_at, its lanes'
    size_t record_bytes, lanes_at;      // losses, of type S
    int ranks, lanes;                   // lanes: of each rank
    const ChunkRange* ranges;           // (num_ranges) on the device
    int num_ranges;
    float max_norm;                     // 0: no clipping
    UpdatePolicy policy;
    template <class F> void outputs(F gives) const {
        gives("loss", loss, 1); gives("norm", state ? &state->norm : nullptr, 1);
        gives("grad_scale", state ? &state->grad_scale : nullptr, 1);
    }
};
template <class X, class S> struct AdamWOf {              // a skipped update changes nothing
    void* params;                       // (rows,n) X, or S
    bool params_fp32;                   // params point to S, and have no master copies
    typename MasterValue<X, S>::type* master;   // (rows,n); null when the parameters are all there is
    StateOf<S> m, v;                    // (rows,n) both bf16, or none
    StoredGrads grads;                  // (rows,n)
    const UpdateState* state;           // t already counts this update
    size_t n;                           // a multiple of 8
    Rows rows;
    double weight_decay, lr, beta1, beta2, eps;
    RoundKey key;                       // rounds bf16 states, and 16-bit parameters without master copies
    size_t first;                       // element i draws, by key, as number first + i
    size_t decays = SIZE_MAX;           // the first `decays` elements of a row decay; a multiple of 8
    template <class F> void outputs(F gives) const {
        gives("params", (X*)params, n); gives("master", master, rows.count, n); gives("m", m, rows.count, n);
        gives("v", v, rows.count, n);
    }
};

// Muon (Keller Jordan and others, "Muon: An optimizer for hidden layers in neural networks", 2024,
// kellerjordan.github.io/posts/muon) is three ops, for matrices that stand in buckets of rows like AdamW's:
//     u = g + momentum (m - g), after m has taken g in: Nesterov's look ahead     muon_momentum
//     o = u with all its singular values near 1, times scale                      muon_orthogonalise
//     p = p (1 - lr wd) - lr o                                                    muon_update
// o comes from a few Newton-Schulz steps. With x = u / |u| (Frobenius), so that no singular value is above 1,
//     x = a x + (b G + c G G) x, G = x x^T; if x is tall     x = a x + x (b G + c G G), G = x^T x
// leaves singular vectors as they are and maps each singular value s to a s + b s^3 + c s^5. The writeup has
// these a, b, c, and scale = sqrt(max(1, rows/cols)). Singular values do not converge to 1, but five steps
// bring all except tiny ones to between 0.7 and 1.2. m is an average, m += (1 - momentum) (g - m), and wd is
// Muon's own, apart from AdamW's: all as in torch.optim.Muon.
constexpr double kMuonA = 3.4445, kMuonB = -4.7750, kMuonC = 2.0315;

template <class X, class S> struct MuonMomentumOf {       // a skipped update changes nothing
    typename MuonValue<X>::type* update;        // (rows,n), update_row elements from row to row
    StateOf<S> m;                       // (rows,n)
    StoredGrads grads;                  // (rows,n)
    const UpdateState* state;
    size_t n, update_row;               // n: a multiple of 8
    Rows rows;
    double momentum;
    RoundKey key;                       // as AdamW's
    size_t first;
    template <class F> void outputs(F gives) const {
        gives("update", update, n); gives("m", m, rows.count, n);
    }
};
// Matrices of one shape, `parts` of them in each of `layers` buckets. In scratch they have no gaps, and all
// layers of one part come before those of the next, so that one call can multiply them all.
constexpr int kMuonParts = 4;           // at most: GPT-2's q, k, v and attproj
struct MuonPlaces {
    int parts, layers;
    size_t at[kMuonParts];              // elements: of each part from its bucket's start
    size_t stride;                      // from bucket to bucket
    LLMC_HD int count() const { return parts * layers; }
    LLMC_HD size_t of(int i) const { return at[i / layers] + i % layers * stride; }    // of matrix i
};
template <class X, class S> struct MuonOrthogonaliseOf {
    typename MuonValue<X>::type* out;           // matrix i, (rows,cols), at places.of(i); may be inp
    const typename MuonValue<X>::type* inp;     // as out
    typename MuonValue<X>::type *x, *y;         // scratch: (count,rows,cols) each
    typename MuonValue<X>::type *gram, *poly;   // scratch: (count,k,k), k the smaller of rows and cols
    double* sums;                       // scratch: (count,ceil(rows*cols/kChunk))
    MuonPlaces places;
    int rows, cols, steps;
    int layers_all;                     // the whole job's layers; a call on a part of them has the same bits
    template <class F> void outputs(F gives) const { gives("out", out, rows, cols); }
};
template <class X, class S> struct MuonUpdateOf {         // a skipped update changes nothing
    void* params;                       // (rows,n) X
    typename MasterValue<X, S>::type* master;   // (rows,n); null when the parameters are all there is
    const typename MuonValue<X>::type* update;  // (rows,n), update_row elements from row to row
    const UpdateState* state;
    size_t n, update_row;               // n: a multiple of 8
    Rows rows;
    double weight_decay, lr;
    RoundKey key;                       // as AdamW's
    size_t first;
    template <class F> void outputs(F gives) const {
        gives("params", (X*)params, n); gives("master", master, rows.count, n);
    }
};

// Writing text: each of N rows is one new token of its own text, whose earlier keys and values are kept. A
// row's bits do not depend on the other rows or on their number.
template <class X, class S> struct DecodeMatmulOf {       // out = inp weight^T + bias
    X* out;                             // (N,OC)
    const X *inp, *weight, *bias;       // (N,C) (OC,C) (OC) or null
    bool gelu;                          // out = gelu of the sum, rounded first
    int N, C, OC;                       // C a multiple of 8
    template <class F> void outputs(F gives) const { gives("out", out, N, OC); }
};
template <class X, class S> struct DecodeAttentionOf {    // of each row's query, over positions that it sees
    X* out;                             // (N,NH,HS)
    X *keys, *values;                   // (N,T,NKV,HS): those of this position are stored first
    const X* qkv;                       // (N,NH+2*NKV,HS)
    const int* positions;               // (N) below T
    int N, T, NH, NKV, HS;
    Mask mask = {};
    template <class F> void outputs(F gives) const {
        gives("out", out, N, NH, HS); gives("keys", keys, N, T, NKV, HS);
        gives("values", values, N, T, NKV, HS);
    }
};
template <class X, class S> struct CacheStoreOf {       // keys and values of a forward over `count` positions
    X *keys, *values;                   // (rows,T,NKV,HS): each row's first `count` positions, all alike
    const X* qkv;                       // (count,NH+2*NKV,HS)
    int rows, count, T, NH, NKV, HS;
    template <class F> void outputs(F gives) const {
        gives("keys", keys, rows, T, NKV, HS); gives("values", values, rows, T, NKV, HS);
    }
};
template <class X, class S> struct SampleTokensOf {       // sample_token() of each row
    int* tokens;                        // (N) -1: all logits are NaN
    int* positions;                     // (N) one more than before
    uint64_t* draws;                    // (N) number of the row's random number; one more than before
    const uint32_t* ids;                // (N) a row's stream of random numbers
    const X* logits;                    // (N,V)
    Sampling sampling;
    uint64_t seed;
    int N, V;
    template <class F> void outputs(F gives) const { gives("tokens", tokens, N); }
};

// The table of ops, each op(const Arguments& a, Stream stream). Both builds declare the ops by it, and the
// tests' --break OP.OUTPUT disturbs an output.
#define MODEL_OPS(X)                                \
    X(encoder_forward, EncoderForward)              \
    X(encoder_backward, EncoderBackward)            \
    X(norm_forward, NormForward)                    \
    X(norm_backward, NormBackward)                  \
    X(matmul_forward, MatmulForward)                \
    X(matmul_backward_input, MatmulBackwardInput)   \
    X(matmul_backward_weight, MatmulBackwardWeight) \
    X(bias_backward, BiasBackward)                  \
    X(grad_accumulate, GradAccumulate)              \
    X(fp8_cast, Fp8Cast)                            \
    X(fp8_transpose, Fp8Transpose)                  \
    X(fp8_matmul, Fp8Matmul)                        \
    X(fp8_scales, Fp8Scales)                        \
    X(activate, Activate)                           \
    X(activate_backward, ActivateBackward)          \
    X(rotate_forward_inplace, RotateForward)        \
    X(rotate_backward_inplace, RotateBackward)      \
    X(value_embed, ValueEmbed)                      \
    X(attention_forward, AttentionForward)          \
    X(attention_backward, AttentionBackward)        \
    X(classifier, Classifier)                       \
    X(mark_likeliest, MarkLikeliest)                \
    X(loss_sum, LossSum)                            \
    X(lane_sum, LaneSum)                            \
    X(square_sums, SquareSums)                      \
    X(update_decision, UpdateDecision)              \
    X(adamw_update, AdamW)                          \
    X(muon_momentum, MuonMomentum)                  \
    X(muon_orthogonalise, MuonOrthogonalise)        \
    X(muon_update, MuonUpdate)                      \
    X(decode_matmul, DecodeMatmul)                  \
    X(decode_attention, DecodeAttention)            \
    X(cache_store, CacheStore)                      \
    X(sample_tokens, SampleTokens)

// op_name(a) is the op's name. op_outputs(a, f) calls f(op, output, where, elements) for each of its outputs.
#define X(op, Args) \
    template <class Real, class S> constexpr const char* op_name(const Args##Of<Real, S>&) { return #op; }
MODEL_OPS(X)
#undef X
template <class Args, class F> void op_outputs(const Args& a, F f) {
    a.outputs([&](const char* output, auto where, auto... dimensions) {
        f(op_name(a), output, where, (1 * ... * (size_t)dimensions));
    });
}
