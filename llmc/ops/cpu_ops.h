/*
The twins: every op of llmc/ops/ops.h in plain C++, one function each. They are the specification: what an op
computes, which outputs it stores (=) or adds to (+=), and what it does to padding and unused rows. A CUDA
kernel is right when it agrees. Host only.

The trainer's CPU build runs them in float (OpenMP over rows, OpenBLAS where it is found), tests in double:

    matmul_forward_cpu<float>({.out = y, .inp = x, .weight = w, .bias = b, .N = N, .C = C, .OC = OC}, stream);
    bias_backward_cpu<double>({{dbias, Accumulate::Yes}, nullptr, dout, N, OC}, 0);

Rules that hold for every twin:
- Each output element belongs to one thread and is summed in one order: the thread count does not change bits.
- Long sums are taken in double; values are rounded to Real when they are stored.
- Outputs do not overlap inputs unless ops.h says so.
- A GradOf<Real> output is = or += by its `acc`.
- N = B*T rows. Products of two sizes are size_t.

With a stream, each twin does the same and then OP_DONE(a). Tests define that before they include this file,
to disturb an output (--break) and see that a check notices.
*/
#pragma once

#include <assert.h>     // gives: assert
#include <math.h>       // gives: exp, log, sqrt, INFINITY
#include <stddef.h>     // gives: size_t
#include <stdint.h>     // gives: uint32_t
#include <string.h>     // gives: memcpy, strcmp

#include <utility>      // gives: std::swap
#include <vector>       // gives: std::vector

#include "ops.h"        // gives: every op's arguments, Accumulate, Stream
#include "../rand.h"    // gives: rand_unit, dropout_block, bits_of, float_of

#ifdef USE_OPENBLAS
#include <cblas.h>      // gives: cblas_sgemm, openblas_set_num_threads, openblas_get_corename
#endif

#ifndef OP_DONE
#define OP_DONE(a)
#endif

// ---- small helpers ----

static inline double exp_cpu(double x) { return exp(x); }

// expf that a compiler can vectorise (libm's it cannot): e^x = 2^n * e^r with n = round(x / ln 2), so that
// |r| <= ln 2 / 2, where the Taylor series to r^7 is exact to float rounding. Measured: wrong by at most 0.92
// units in the last place. Below -87 it is 0 instead of less than 2^-125; above 88 it is inf.
static inline float exp_cpu(float x) {
    float shifted = x * 1.44269504f + 12582912.0f;      // + 1.5 * 2^23 rounds to an integer, in the low bits
    float n = shifted - 12582912.0f;
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts: n times the first is exact
    float series = 1.0f / 5040;
    series = series * r + 1.0f / 720;
    series = series * r + 1.0f / 120;
    series = series * r + 1.0f / 24;
    series = series * r + 1.0f / 6;
    series = series * r + 0.5f;
    series = series * r + 1.0f;
    series = series * r + 1.0f;
    float y = series * float_of((bits_of(shifted) << 23) + (127u << 23));       // times 2^n
    y = x < -87.0f ? 0.0f : y;
    return x > 88.0f ? (float)INFINITY : y;             // NaN fails both comparisons and comes through
}

template <class Real> static inline void store_grad(GradOf<Real> grad, size_t i, double value) {
    grad.data[i] = (Real)(grad.acc == Accumulate::Yes ? grad.data[i] + value : value);
}

// dsum[c] (=, +=) sum over n of value(n, c), or nothing if dsum is null. A thread owns 64 columns, which are
// whole cache lines, and walks down them row by row; their sums stay in the L1 cache.
template <class Real, class F>
static inline void column_sums(GradOf<Real> dsum, int N, int C, F value) {
    constexpr int kColumns = 64;
    if (!dsum.data) { return; }
    #pragma omp parallel for
    for (int c0 = 0; c0 < C; c0 += kColumns) {
        int columns = C - c0 < kColumns ? C - c0 : kColumns;
        double sum[kColumns] = {0};
        for (int n = 0; n < N; n++) {
            #pragma omp simd
            for (int c = 0; c < columns; c++) { sum[c] += value(n, c0 + c); }
        }
        for (int c = 0; c < columns; c++) { store_grad(dsum, c0 + c, sum[c]); }
    }
}
template <class Real>
static inline void column_sums(GradOf<Real> dsum, const Real* x /*(N,C)*/, int N, int C,
                               bool of_qkv = false) {
    column_sums(dsum, N, C, [=](int n, int c) { return of_qkv && is_keys(c, C) ? 0 : x[(size_t)n * C + c]; });
}

// ---- encoder: token and position embedding ----

// out[b,t,c] = wte[tokens[b,t],c] + wpe[t,c], or wpe[positions[b,t],c], or without wpe
template <class Real> void encoder_forward_cpu(const EncoderForwardOf<Real, Real>& a) {
    const int B = a.B, T = a.T, C = a.C;
    const int N = B * T;
    #pragma omp parallel for
    for (int bt = 0; bt < N; bt++) {
        Real* out_bt = a.out + (size_t)bt * C;
        const Real* wte_ix = a.wte + (size_t)std::max(a.tokens[bt], 0) * C;
        if (!a.wpe) { std::copy_n(wte_ix, C, out_bt); continue; }
        const Real* wpe_t = a.wpe + (size_t)(a.positions ? a.positions[bt] : bt % T) * C;
        #pragma omp simd
        for (int c = 0; c < C; c++) { out_bt[c] = wte_ix[c] + wpe_t[c]; }
    }
}

// dwte[v,c] += sum over positions bt of token v of dout[bt,c]; always added, to the LM head's gradient
// dwpe[t,c] (=, +=) sum over b of dout[b,t,c]; rows t >= T get no gradient, so = makes them zero.
// A bucket of up to 128 positions is one segment. A longer one is several, whose sums go to rows of scratch
// and are added up in order by its entry in `splits`.
template <class Real> void encoder_backward_cpu(const EncoderBackwardOf<Real, Real>& a) {
    const int B = a.B, T = a.T, maxT = a.maxT, C = a.C, stride = a.stride > 0 ? a.stride : C;
    assert(a.dwte.acc == Accumulate::Yes);
    #pragma omp parallel
    {
        std::vector<double> sum(C);
        #pragma omp for
        for (int s = 0; s < a.buckets.num_segments; s++) {
            const int4 segment = a.buckets.segments[s];
            sum.assign(C, 0.0);
            for (int i = segment.y; i < segment.y + segment.z; i++) {
                const Real* dout_bt = a.dout + (size_t)a.buckets.order[i] * stride;
                for (int c = 0; c < C; c++) { sum[c] += dout_bt[c]; }
            }
            for (int c = 0; c < C; c++) {
                if (segment.w < 0) { store_grad(a.dwte, (size_t)segment.x * C + c, sum[c]); }
                else { a.scratch[(size_t)segment.w * C + c] = (Real)sum[c]; }
            }
        }
        #pragma omp for
        for (int s = 0; s < a.buckets.num_splits; s++) {
            const int4 split = a.buckets.splits[s];
            sum.assign(C, 0.0);
            for (int slot = split.y; slot < split.y + split.z; slot++) {
                for (int c = 0; c < C; c++) { sum[c] += a.scratch[(size_t)slot * C + c]; }
            }
            for (int c = 0; c < C; c++) { store_grad(a.dwte, (size_t)split.x * C + c, sum[c]); }
        }
        #pragma omp for
        for (int t = 0; t < (a.dwpe.data ? maxT : 0); t++) {
            sum.assign(C, 0.0);
            for (int b = 0; b < (t < T ? B : 0); b++) {
                const Real* dout_bt = a.dout + ((size_t)b * T + t) * C;
                for (int c = 0; c < C; c++) { sum[c] += dout_bt[c]; }
            }
            for (int c = 0; c < C; c++) { store_grad(a.dwpe, (size_t)t * C + c, sum[c]); }
        }
    }
}

// ---- norms of the residual stream ----

// Calls f(c, factor) for each element of row n; its dropout multiplies the element by `factor`.
template <class F> static inline void dropout_row(const Dropout& d, int n, int C, F f) {
    for (int c0 = 0; c0 < C; c0 += 8) {
        const Rand4 random = dropout_block(d.key, d.first_row + (uint64_t)n, (uint32_t)(c0 / 8));
        for (int c = c0; c < C && c < c0 + 8; c++) { f(c, dropout_factor(d, random, c - c0)); }
    }
}

// sum[c] += branch[c], after its dropout
template <class Real>
static inline void add_branch(double* sum, const Real* branch, const Dropout& d, int n, int C) {
    if (d.dropped == 0) { for (int c = 0; c < C; c++) { sum[c] += branch[c]; } }
    else { dropout_row(d, n, C, [&](int c, float factor) { sum[c] += (double)branch[c] * factor; }); }
}

// LayerNorm: mean = sum(x)/C, rstd = 1/sqrt(sum((x-mean)^2)/C + eps). RMSNorm: mean is 0.
template <class Real>
static inline void norm_statistics(Real* mean, Real* rstd, const Real* x, NormKind kind, int C,
                                   double eps) {
    double sum = 0.0, squares = 0.0;
    #pragma omp simd reduction(+ : sum)
    for (int c = 0; c < C; c++) { sum += x[c]; }
    const double m = kind == NormKind::Layer ? sum / C : 0.0;
    #pragma omp simd reduction(+ : squares)
    for (int c = 0; c < C; c++) { squares += (x[c] - m) * (x[c] - m); }
    *mean = (Real)m;
    *rstd = (Real)(1.0 / sqrt(squares / C + eps));
}

// out[c] = (x[c]-mean)*rstd*weight[c] + bias[c], without a bias in an RMSNorm
template <class Real>
static inline void norm_row(Real* out, const Real* x, Real mean, Real rstd, const Real* weight,
                            const Real* bias, int C) {
    if (bias) {
        #pragma omp simd
        for (int c = 0; c < C; c++) { out[c] = (x[c] - mean) * rstd * weight[c] + bias[c]; }
    } else {
        for (int c = 0; c < C; c++) { out[c] = (x[c] - mean) * rstd * weight[c]; }
    }
}

// out[i] = byte of x[i] * scale, or null. stats: the largest |x|, and how many were counted and saturated.
template <class Real>
static inline void fp8_rows(uint8_t* out, Fp8Stats* stats, const Real* x, size_t n, float scale) {
    uint32_t amax = stats->amax;
    uint64_t saturated = 0;
    #pragma omp parallel for reduction(max : amax) reduction(+ : saturated)
    for (size_t i = 0; i < n; i++) {
        const uint32_t size = bits_of((float)x[i]) & 0x7FFFFFFFu;
        amax = size > amax ? size : amax;
        if (!out) { continue; }
        out[i] = fp8_encode((float)x[i] * scale);
        saturated += float_of(size) * scale > kFp8Max;
    }
    stats->amax = amax;
    stats->elements += n;
    stats->saturated += saturated;
}

// The same of columns first to last of (N,row).
template <class Real>
static inline void fp8_columns(uint8_t* out, Fp8Stats* stats, const Real* x, size_t N, size_t row,
                               size_t first, size_t last, float scale) {
    for (size_t at = first; at < N * row; at += row) {
        fp8_rows(out + at, stats, x + at, last - first, scale);
    }
}

// sum = inp + both branches after their dropouts, rounded once; then y[i] = norm(sum as stored).
// Without branches: y[i] = norm(inp). mean and rstd of each row are kept for the backward pass. sum may be
// the buffer of inp or of a branch: each element is read before it is written. y[i].fp8: its bytes.
template <class Real> void norm_forward_cpu(const NormForwardOf<Real, Real>& a) {
    const int N = a.N, C = a.C;
    const std::vector<Real> ones(C, 1);
    std::vector<Real> unrounded[2];
    for (int i = 0; i < 2; i++) { unrounded[i].resize(a.y[i].fp8 ? (size_t)N * C : 0); }
    #pragma omp parallel
    {
        std::vector<double> sum(C);
        #pragma omp for
        for (int n = 0; n < N; n++) {
            const size_t row = (size_t)n * C;
            if (a.sum) {
                for (int c = 0; c < C; c++) { sum[c] = a.inp ? a.inp[row + c] : 0.0; }
                for (int i = 0; i < 2; i++) {
                    if (a.branch[i]) { add_branch(sum.data(), a.branch[i] + row, a.dropout[i], n, C); }
                }
                for (int c = 0; c < C; c++) { a.sum[row + c] = (Real)sum[c]; }
            }
            const Real* x = (a.sum ? a.sum : a.inp) + row;
            Real mean;
            norm_statistics(&mean, a.rstd + n, x, a.kind, C, a.eps);
            if (a.kind == NormKind::Layer) { a.mean[n] = mean; }
            for (int i = 0; i < 2 && (a.y[i].out || a.y[i].fp8); i++) {
                Real* out = a.y[i].fp8 ? unrounded[i].data() : a.y[i].out;
                const Real* weight = a.y[i].weight ? a.y[i].weight : ones.data();
                norm_row(out + row, x, mean, a.rstd[n], weight, a.y[i].bias, C);
            }
        }
    }
    for (int i = 0; i < 2; i++) {
        const NormOutput<Real, Real>& y = a.y[i];
        if (y.fp8) { fp8_rows(y.fp8, y.stats, unrounded[i].data(), (size_t)N * C, y.tensor->scale); }
    }
}

// The gradient of row n of the residual stream. dnorm(c): gradient of its normalised value times the weight.
template <class Real, class F>
static inline void norm_backward_row(const NormBackwardOf<Real, Real>& a, int n, F dnorm) {
    const int C = a.C;
    const bool layer = a.kind == NormKind::Layer, add = a.dresidual_acc == Accumulate::Yes;
    const Real* inp_n = a.inp + (size_t)n * C;
    Real* dresidual_n = a.dresidual + (size_t)n * C;
    const Real mean = layer ? a.mean[n] : 0, rstd = a.rstd[n];
    double sum_dnorm = 0.0, sum_dnorm_norm = 0.0;
    #pragma omp simd reduction(+ : sum_dnorm, sum_dnorm_norm)
    for (int c = 0; c < C; c++) {
        const Real d = dnorm(c);
        sum_dnorm += d;
        sum_dnorm_norm += d * ((inp_n[c] - mean) * rstd);
    }
    const Real mean_dnorm = layer ? (Real)(sum_dnorm / C) : 0, mean_dnorm_norm = (Real)(sum_dnorm_norm / C);
    for (int c = 0; c < C; c++) {
        Real norm = (inp_n[c] - mean) * rstd;
        Real dinp = rstd * (dnorm(c) - mean_dnorm - norm * mean_dnorm_norm);
        dresidual_n[c] = add ? dresidual_n[c] + dinp : dinp;
    }
    for (const BranchGrad<Real, Real>& b : a.branch) {
        if (!b.dout) { continue; }
        dropout_row(b.dropout, n, C, [&](int c, float factor) {
            b.dout[(size_t)n * C + c] = (Real)((double)dresidual_n[c] * factor);
        });
    }
}

// With norm[n,c] = (inp[n,c]-mean[n])*rstd[n] and dnorm[n,c] = the sum over both norms of dout*weight[c]:
// dweight[c] (=, +=) sum over n of dout[n,c]*norm[n,c];   dbias[c] (=, +=) sum over n of dout[n,c]
// dresidual[n,c] (=, +=) rstd[n] * (dnorm[n,c] - mean_c(dnorm) - norm[n,c]*mean_c(dnorm*norm)); an RMSNorm
// has no mean_c(dnorm).
// branch[i].dout = the new dresidual, times the factor of the branch's dropout in the forward
// branch[i].dbias[c] (=, +=) sum over n of branch[i].dout[n,c], as stored, or of the new dresidual where dout
// is null
template <class Real> void norm_backward_cpu(const NormBackwardOf<Real, Real>& a) {
    const int N = a.N, C = a.C;
    const bool two = a.y[1].dout;
    const std::vector<Real> ones(C, 1);
    const Real* weight0 = a.y[0].weight ? a.y[0].weight : ones.data();
    const Real* weight1 = a.y[1].weight ? a.y[1].weight : ones.data();
    for (const NormGrad<Real, Real>& y : a.y) {
        if (!y.dout) { continue; }
        column_sums(y.dweight, N, C, [&](int n, int c) {
            const Real mean = a.kind == NormKind::Layer ? a.mean[n] : 0;
            return y.dout[(size_t)n * C + c] * ((a.inp[(size_t)n * C + c] - mean) * a.rstd[n]);
        });
        column_sums(y.dbias, y.dout, N, C);
    }
    #pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const size_t row = (size_t)n * C;
        const Real *dout0 = a.y[0].dout + row, *dout1 = two ? a.y[1].dout + row : nullptr;
        if (two) {
            norm_backward_row(a, n, [=](int c) { return dout0[c] * weight0[c] + dout1[c] * weight1[c]; });
        } else {
            norm_backward_row(a, n, [=](int c) { return dout0[c] * weight0[c]; });
        }
    }
    for (const BranchGrad<Real, Real>& b : a.branch) {
        column_sums(b.dbias, b.dout ? b.dout : a.dresidual, N, C);
    }
}

// ---- the MLP's activations ----
// GELU, the tanh form: gelu(x) = x/2 * (1 + tanh(u)), u = sqrt(2/pi)*(x + 0.044715*x^3). With s = (1 +
// tanh(u))/2 = 1/(1 + e^-2u), s*(1-s) = e/(1+e)^2 for e = e^-2|u| neither function nor derivative subtracts
// near-equal numbers.

template <class Real> static inline Real gelu_sigmoid(Real x, Real* s_times_1_minus_s) {
    const Real u = (Real)0.79788456080286535588 * (x + (Real)0.044715 * x * x * x);
    const Real e = exp_cpu((Real)-2 * (u < 0 ? -u : u));
    const Real inverse = 1 / (1 + e);
    *s_times_1_minus_s = e * inverse * inverse;
    return u < 0 ? e * inverse : inverse;
}

template <class Real> static inline Real gelu(Real x) {
    Real unused;
    return x * gelu_sigmoid(x, &unused);
}

// d gelu(x)/dx = s + x * s*(1-s) * 2 du/dx
template <class Real> static inline Real gelu_derivative(Real x) {
    Real slope;
    const Real s = gelu_sigmoid(x, &slope);
    const Real du = (Real)0.79788456080286535588 * (1 + 3 * (Real)0.044715 * x * x);
    return s + x * slope * 2 * du;
}

template <class Real> static inline Real sigmoid(Real x) { return 1 / (1 + exp_cpu(-x)); }
template <class Real> static inline Real silu(Real x) { return x * sigmoid(x); }
template <class Real> static inline Real silu_derivative(Real x) {
    const Real s = sigmoid(x);
    return s + x * s * (1 - s);
}

// A struct for each row of MODEL_MLPS. value: what it gives. slope: its derivative; slopes, of a gated one:
// the gradients of gate and of up, from that of the value.
struct GeluCpu {
    static constexpr bool kGated = false;
    template <class Real> static inline Real value(Real x) { return gelu(x); }
    template <class Real> static inline Real slope(Real x) { return gelu_derivative(x); }
};
struct SwiGluCpu {
    static constexpr bool kGated = true;
    template <class Real> static inline Real value(Real gate, Real up) { return silu(gate) * up; }
    template <class Real> static inline void slopes(Real d, Real gate, Real up, Real* dgate, Real* dup) {
        *dgate = d * up * silu_derivative(gate);
        *dup = d * silu(gate);
    }
};
struct Relu2Cpu {                       // x < 0 is false for NaN, which so comes through
    static constexpr bool kGated = false;
    template <class Real> static inline Real value(Real x) { return x < 0 ? 0 : x * x; }
    template <class Real> static inline Real slope(Real x) { return x < 0 ? 0 : 2 * x; }
};
#define X(act, ...) static_assert(act##Cpu::kGated == is_gated(Mlp::act), "as its row says");
MODEL_MLPS(X)
#undef X

// f(GeluCpu()) and so on
template <class F> static inline void with_act_cpu(Mlp mlp, F f) {
    switch (mlp) {
#define X(act, ...) case Mlp::act: return f(act##Cpu());
        MODEL_MLPS(X)
#undef X
    }
}

// out[n,f] = act(inp[n,f]), or act(gate[n,f], up[n,f]); a row of inp is then gate, then up
template <class Real> void activate_cpu(const ActivateOf<Real, Real>& a) {
    with_act_cpu(a.mlp, [&](auto act) {
        typedef decltype(act) Act;
        const int F = a.F, columns = act_columns(a.mlp, F);
        #pragma omp parallel for
        for (int n = 0; n < a.N; n++) {
            const Real *x = a.inp + (size_t)n * columns, *up = x + F;
            Real* out = a.out + (size_t)n * F;
            #pragma omp simd
            for (int f = 0; f < F; f++) {
                if constexpr (Act::kGated) { out[f] = Act::value(x[f], up[f]); }
                else { out[f] = Act::value(x[f]); }
            }
        }
    });
}

// dinp[n,f] = dout[n,f] * act'(inp[n,f]), or the gradients of gate[n,f] and of up[n,f]
// dbias[f] (=, +=) sum over n of dinp[n,f], as stored
template <class Real> void activate_backward_cpu(const ActivateBackwardOf<Real, Real>& a) {
    with_act_cpu(a.mlp, [&](auto act) {
        typedef decltype(act) Act;
        const int F = a.F, columns = act_columns(a.mlp, F);
        #pragma omp parallel for
        for (int n = 0; n < a.N; n++) {
            const Real *x = a.inp + (size_t)n * columns, *up = x + F, *dout = a.dout + (size_t)n * F;
            Real *dx = a.dinp + (size_t)n * columns, *dup = dx + F;
            #pragma omp simd
            for (int f = 0; f < F; f++) {
                if constexpr (Act::kGated) { Act::slopes(dout[f], x[f], up[f], &dx[f], &dup[f]); }
                else { dx[f] = dout[f] * Act::slope(x[f]); }
            }
        }
    });
    column_sums(a.dbias, a.dinp, a.N, a.F);
}

// ---- QK-norm and rotary positions ----

// Element i of a head that is turned: by the angles of turn (2,HS/2) or, where sign is -1, back.
template <class Real>
static inline Real rotated(const Real* x /*(HS)*/, const Real* turn, int i, int HS, int sign) {
    const int half = HS / 2;
    const bool lower = i < half;
    const Real cos = turn[lower ? i : i - half], sin = turn[lower ? i + half : i];
    return x[i] * cos + (lower ? -sign : sign) * x[lower ? i + half : i - half] * sin;
}

// For each head x of q and k: y[i] = x[i]*rstd*weight[i], rstd = 1/sqrt(sum(x^2)/HS + eps), or y = x; then
// x[i] = y[i]*cos[i] - y[i+HS/2]*sin[i];   x[i+HS/2] = y[i+HS/2]*cos[i] + y[i]*sin[i],   i < HS/2
template <class Real> void rotate_forward_inplace_cpu(const RotateForwardOf<Real, Real>& a) {
    const int HS = a.HS, heads = a.NH + a.NKV;
    #pragma omp parallel for
    for (int n = 0; n < a.N; n++) {
        const Real* turn = a.table + (size_t)(a.positions ? a.positions[n] : n % a.T) * HS;
        std::vector<Real> y(HS);
        for (int h = 0; h < heads; h++) {
            Real* x = a.qkv + ((size_t)n * (heads + a.NKV) + h) * HS;
            const Real* weight = h < a.NH ? a.q_weight : a.k_weight;
            double squares = 0.0;
            for (int i = 0; i < HS; i++) { squares += (double)x[i] * x[i]; }
            const Real rstd = a.rstd ? (Real)(1.0 / sqrt(squares / HS + a.eps)) : 1;
            if (a.rstd) { a.rstd[(size_t)n * heads + h] = rstd; }
            for (int i = 0; i < HS; i++) { y[i] = x[i] * rstd * (a.rstd && weight ? weight[i] : 1); }
            for (int i = 0; i < HS; i++) { x[i] = rotated(y.data(), turn, i, HS, 1); }
        }
    }
}

// Turned back, a head of qkv is y, and one of dqkv is y's gradient dy. xhat[i] = y[i]/weight[i], or 0 where
// weight[i] is 0.
// dweight[i] (=, +=) sum over rows and heads, of q or of k, of dy[i]*xhat[i]
// dqkv = rstd*(dy[i]*weight[i] - xhat[i]*mean_i(dy*y)), or dy. fp8: the bytes of dqkv. v stays
template <class Real> void rotate_backward_inplace_cpu(const RotateBackwardOf<Real, Real>& a) {
    const int NH = a.NH, NKV = a.NKV, HS = a.HS, heads = NH + NKV, T = a.T;
    auto head = [=](int n, int h) { return ((size_t)n * (heads + NKV) + h) * HS; };
    for (bool keys : {false, true}) {
        const Real* weight = keys ? a.k_weight : a.q_weight;
        const int count = keys ? NKV : NH, first = keys ? NH : 0;
        column_sums(keys ? a.dk_weight : a.dq_weight, a.N * count, HS, [&](int m, int i) -> Real {
            const size_t at = head(m / count, first + m % count);
            const Real* turn = a.table + (size_t)(m / count % T) * HS;
            if (weight[i] == 0) { return 0; }
            return rotated(a.dqkv + at, turn, i, HS, -1) * rotated(a.qkv + at, turn, i, HS, -1) / weight[i];
        });
    }
    #pragma omp parallel for
    for (int n = 0; n < a.N; n++) {
        const Real* turn = a.table + (size_t)(n % T) * HS;
        std::vector<Real> y(HS), dy(HS);
        for (int h = 0; h < heads; h++) {
            const Real* weight = h < NH ? a.q_weight : a.k_weight;
            Real* d = a.dqkv + head(n, h);
            for (int i = 0; i < HS; i++) { dy[i] = rotated(d, turn, i, HS, -1); }
            if (!a.rstd) { memcpy(d, dy.data(), HS * sizeof(Real)); continue; }
            const Real rstd = a.rstd[(size_t)n * heads + h];
            double sum = 0.0;
            for (int i = 0; i < HS; i++) {
                y[i] = rotated(a.qkv + head(n, h), turn, i, HS, -1);
                sum += (double)dy[i] * y[i];
            }
            const Real mean = (Real)(sum / HS);
            for (int i = 0; i < HS; i++) {
                const Real w = weight ? weight[i] : 1, xhat = w == 0 ? 0 : y[i] / w;
                d[i] = rstd * (dy[i] * w - xhat * mean);
            }
        }
    }
    const size_t row = (size_t)(heads + NKV) * HS, end = (size_t)heads * HS;
    if (a.fp8) { fp8_columns(a.fp8, a.stats, a.dqkv, a.N, row, 0, end, a.tensor->scale); }
}

// ---- value embeddings ----

// gate = 3*s, s = sigmoid(sum over j of weight[h,j]*inp[n,j])
// v[n,h,i] += gate*e[i], e = table[token[n],h];   or with dinp dz[n,h] = gate*(1-s)*sum(dv*e), dv *= gate,
// dinp[n,j] += sum over h of dz[n,h]*weight[h,j];   dweight[h,j] (=, +=) sum over n of dz[n,h]*inp[n,j]
template <class Real> void value_embed_cpu(const ValueEmbedOf<Real, Real>& a) {
    const int N = a.N, NKV = a.NKV, HS = a.HS, J = kGateChannels;
    auto inp = [&](int n, int j) -> Real {
        if (!a.inp_t8) { return a.inp[(size_t)n * a.C + j]; }
        return fp8_decode(a.inp_t8[(size_t)j * N + n]) * a.inp_tensor->inverse;
    };
    std::vector<Real> dz((size_t)N * NKV);
    #pragma omp parallel for
    for (int nh = 0; nh < N * NKV; nh++) {
        const int n = nh / NKV, h = nh % NKV;
        const size_t at = a.values(n) + (size_t)h * HS;
        const Real* e = a.table + ((size_t)std::max(a.tokens[n], 0) * NKV + h) * HS;
        double z = 0.0, sum = 0.0;
        for (int j = 0; j < J; j++) { z += (double)a.weight[h * J + j] * inp(n, j); }
        const Real s = sigmoid((Real)z), gate = 3 * s;
        for (int i = 0; i < HS; i++) {
            Real& v = a.qkv[at + i];
            if (!a.dinp) { v += gate * e[i]; continue; }
            if (a.dv8) { v = fp8_decode(a.dv8[at + i]) * a.dv_tensor->inverse; }
            sum += (double)v * e[i];
            v *= gate;
        }
        dz[nh] = (Real)(gate * (1 - s) * sum);
    }
    if (!a.dinp) { return; }
    column_sums(a.dweight, N, NKV * J, [&](int n, int c) { return dz[n * NKV + c / J] * inp(n, c % J); });
    for (int i = 0; i < N * J; i++) {
        double sum = 0.0;
        for (int h = 0; h < NKV; h++) { sum += (double)dz[i / J * NKV + h] * a.weight[h * J + i % J]; }
        a.dinp[(size_t)(i / J) * a.C + i % J] += (Real)sum;
    }
}

// ---- matmul: the linear layer ----

enum class Transpose { No, Yes };

// A tile of out: sum[m,n] = sum over k of a_row[m][k*stride] * panel[k,n]. The sums stay in registers: 6 x 16
// floats take 12 of AVX2's. A loaded value is used 16 or 6 times. Inlined into gemm_cpu, the sums would be
// spilled.
constexpr int kTileRows = 6, kTileColumns = 16, kTileDepth = 256;

template <class Real>
__attribute__((noinline)) static void gemm_tile(Real (*sum)[kTileColumns], const Real* const* a_row,
                                                size_t stride, const Real (*panel)[kTileColumns], int depth) {
    Real s[kTileRows][kTileColumns] = {};
    for (int k = 0; k < depth; k++) {
        for (int m = 0; m < kTileRows; m++) {
            const Real a_mk = a_row[m][k * stride];
            #pragma omp simd
            for (int n = 0; n < kTileColumns; n++) { s[m][n] += a_mk * panel[k][n]; }
        }
    }
    memcpy(sum, s, sizeof(s));
}

// out[m,n] (=, +=) sum over k of a[m,k]*b[k,n], out (M,N). a is stored (M,K), or (K,M) if a_transposed; b is
// stored (K,N), or (N,K) if b_transposed. Threads own blocks of out. For its block a thread copies 16 columns
// of b at a time into a contiguous panel and multiplies it with one tile of rows after the other. The block's
// 240 x 256 values of a stay in the L2 cache meanwhile.
template <class Real>
static inline void gemm_cpu(Real* out, Accumulate acc, const Real* a, Transpose a_transposed, const Real* b,
                            Transpose b_transposed, int M, int N, int K) {
    constexpr int kBlockRows = 240, kBlockColumns = 128;
    const bool ta = a_transposed == Transpose::Yes, tb = b_transposed == Transpose::Yes;
    const size_t a_m = ta ? 1 : K, a_k = ta ? M : 1;        // from one element to the next
    const size_t b_k = tb ? 1 : N, b_n = tb ? K : 1;
    #pragma omp parallel for collapse(2) schedule(dynamic)
    for (int m1 = 0; m1 < M; m1 += kBlockRows) {
        for (int n1 = 0; n1 < N; n1 += kBlockColumns) {
            const int m_end = M - m1 < kBlockRows ? M : m1 + kBlockRows;
            const int n_end = N - n1 < kBlockColumns ? N : n1 + kBlockColumns;
            for (int k0 = 0; k0 < K; k0 += kTileDepth) {
                const int depth = K - k0 < kTileDepth ? K - k0 : kTileDepth;
                const bool add = acc == Accumulate::Yes || k0 > 0;
                for (int n0 = n1; n0 < n_end; n0 += kTileColumns) {
                    const int columns = n_end - n0 < kTileColumns ? n_end - n0 : kTileColumns;
                    Real panel[kTileDepth][kTileColumns];   // past the edge of b: zero
                    for (int k = 0; k < depth; k++) {
                        for (int n = 0; n < kTileColumns; n++) {
                            panel[k][n] = n < columns ? b[(k0 + k) * b_k + (n0 + n) * b_n] : (Real)0;
                        }
                    }
                    for (int m0 = m1; m0 < m_end; m0 += kTileRows) {
                        const int rows = m_end - m0 < kTileRows ? m_end - m0 : kTileRows;
                        const Real* a_row[kTileRows];       // past the edge of a: its last row
                        for (int m = 0; m < kTileRows; m++) {
                            a_row[m] = a + (m0 + (m < rows ? m : rows - 1)) * a_m + k0 * a_k;
                        }
                        Real sum[kTileRows][kTileColumns];
                        gemm_tile<Real>(sum, a_row, a_k, panel, depth);
                        for (int m = 0; m < rows; m++) {
                            Real* out_m = out + (size_t)(m0 + m) * N + n0;
                            for (int n = 0; n < columns; n++) { out_m[n] = (add ? out_m[n] : 0) + sum[m][n]; }
                        }
                    }
                }
            }
        }
    }
}

#ifdef USE_OPENBLAS
// OpenMP's threads take blocks of the output, each by a single-threaded sgemm: OpenBLAS's own threads and
// OpenMP's would wait for each other (4 times slower on 2 cores). Block sizes depend on the shape alone, so
// the bits do not depend on the thread count. An OpenBLAS older than the CPU may take it for a "Prescott" and
// run SSE3 code: 18 GFLOPS a core where the loops above reach 90 and the right code 200.
static inline void gemm_cpu(float* out, Accumulate acc, const float* a, Transpose a_transposed,
                            const float* b, Transpose b_transposed, int M, int N, int K) {
    static const bool knows_cpu = [] {
        openblas_set_num_threads(1);
        return strcmp(openblas_get_corename(), "Prescott") != 0;
    }();
    if (!knows_cpu) { return gemm_cpu<float>(out, acc, a, a_transposed, b, b_transposed, M, N, K); }
    const bool ta = a_transposed == Transpose::Yes, tb = b_transposed == Transpose::Yes;
    const int rows = M / 8 > 64 ? M / 8 : 64, columns = N / 4 > 128 ? N / 4 : 128;
    #pragma omp parallel for collapse(2) schedule(dynamic)
    for (int m = 0; m < M; m += rows) {
        for (int n = 0; n < N; n += columns) {
            cblas_sgemm(CblasRowMajor, ta ? CblasTrans : CblasNoTrans, tb ? CblasTrans : CblasNoTrans,
                        M - m < rows ? M - m : rows, N - n < columns ? N - n : columns, K, 1.0f,
                        a + (ta ? (size_t)m : (size_t)m * K), ta ? M : K,
                        b + (tb ? (size_t)n * K : (size_t)n), tb ? K : N,
                        acc == Accumulate::Yes ? 1.0f : 0.0f, out + (size_t)m * N + n, N);
        }
    }
}
#endif

// x[n,o] = sum over c of inp[n,c]*weight[o,c] + bias[o] + residual[n,o]
// out = x; or, where pre_act is wanted, pre_act = x and out = act(x).
template <class Real> void matmul_forward_cpu(const MatmulForwardOf<Real, Real>& a) {
    const int N = a.N, C = a.C, OC = a.OC;
    Real* x = a.pre_act ? a.pre_act : a.out;
    gemm_cpu(x, Accumulate::No, a.inp, Transpose::No, a.weight, Transpose::Yes, N, OC, C);
    #pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const size_t row = (size_t)n * OC;
        Real* x_n = x + row;
        if (a.bias) { for (int o = 0; o < OC; o++) { x_n[o] += a.bias[o]; } }
        if (a.residual) { for (int o = 0; o < OC; o++) { x_n[o] += a.residual[row + o]; } }
    }
    if (a.pre_act) { activate_cpu<Real>({a.out, x, N, is_gated(a.mlp) ? OC / 2 : OC, a.mlp}); }
}

// x[n,c] = sum over o of dout[n,o]*weight[o,c] + residual[n,c]
// dinp = x; or, where pre_act is given, the gradient of pre_act where x is that of act(pre_act).
// dbias[c] (=, +=) sum over n of dinp[n,c], as stored
template <class Real> void matmul_backward_input_cpu(const MatmulBackwardInputOf<Real, Real>& a) {
    const size_t n = (size_t)a.N * a.C;
    Real* x = a.dact ? a.dact : a.dinp;
    gemm_cpu(x, Accumulate::No, a.dout, Transpose::No, a.weight, Transpose::No, a.N, a.C, a.OC);
    if (a.residual) {
        #pragma omp parallel for simd
        for (size_t i = 0; i < n; i++) { x[i] += a.residual[i]; }
    }
    if (a.pre_act) { activate_backward_cpu<Real>({a.dinp, x, a.pre_act, a.N, a.C, a.mlp, a.dbias}); }
}

// dweight[o,c] (=, +=) sum over n of dout[n,o]*inp[n,c]
template <class Real> void matmul_backward_weight_cpu(const MatmulBackwardWeightOf<Real, Real>& a) {
    gemm_cpu(a.dweight.data, a.dweight.acc, a.dout, Transpose::Yes, a.inp, Transpose::No, a.OC, a.C, a.N);
}

// grad[i] (=, +=) values[i]
template <class Real> void grad_accumulate_cpu(const GradAccumulateOf<Real, Real>& a) {
    const bool add = a.grad.acc == Accumulate::Yes;
    #pragma omp parallel for simd
    for (size_t i = 0; i < a.n; i++) { a.grad.data[i] = add ? a.grad.data[i] + a.values[i] : a.values[i]; }
}

template <class Real> static inline std::vector<Real> fp8_values(const uint8_t* bytes, size_t n,
                                                                 const Fp8Tensor& tensor, Fp8Format format) {
    Real value_of[256];
    for (int i = 0; i < 256; i++) { value_of[i] = fp8_decode((uint8_t)i, format) * tensor.inverse; }
    std::vector<Real> values(n);
    for (size_t i = 0; i < n; i++) { values[i] = value_of[bytes[i]]; }
    return values;
}

// out[c,n] = inp[n,c]; dbias[c] (=, +=) sum over n of inp[n,c], divided by the tensor's scale. With
// of_qkv the keys' dbias is 0.
template <class Real> void fp8_transpose_cpu(const Fp8TransposeOf<Real, Real>& a) {
    #pragma omp parallel for
    for (int c = 0; c < a.C; c++) {
        for (int n = 0; n < a.N; n++) { a.out[(size_t)c * a.N + n] = a.inp[(size_t)n * a.C + c]; }
    }
    if (!a.dbias.data) { return; }
    column_sums(a.dbias, fp8_values<Real>(a.inp, (size_t)a.N * a.C, *a.tensor, Fp8Format::E4m3).data(), a.N,
                a.C, a.of_qkv);
}

// out[n,c] and out_t[c,n] = byte of x[n,c] * scale; dbias[c] (=, +=) sum over n of x[n,c]. stats: the largest
// |x|, and how many were counted and how many saturated.
template <class Real> void fp8_cast_cpu(const Fp8CastOf<Real, Real>& a) {
    const int N = a.N, C = a.C, wide = a.width();
    const bool casts = a.out || a.out_t;
    if (a.source == Fp8Source::Weight && casts) {
        fp8_set_scale(a.tensor, fp8_scale(float_of(a.stats->amax), 0));
    }
    std::vector<Real> x(a.inp, a.inp + (size_t)N * C);
    x.resize((size_t)N * wide);
    Real* y = x.data();
    switch (a.source) {
        case Fp8Source::Plain: case Fp8Source::Weight: break;
        case Fp8Source::Act: activate_cpu<Real>({y, a.inp, N, C, a.mlp}); break;
        case Fp8Source::Slope: activate_backward_cpu<Real>({y, a.inp, a.before, N, C, a.mlp}); break;
    }
    std::vector<uint8_t> rows(casts && !a.out ? x.size() : 0);
    uint8_t* out = rows.empty() ? a.out : rows.data();
    fp8_rows(out, a.stats, y, x.size(), a.tensor->scale);
    if (a.out_t) { fp8_transpose_cpu<Real>({a.out_t, out, N, wide}); }
    column_sums(a.dbias, y, N, C);
}

// x[m,n] = sum over k of a[m,k]*b[n,k], each byte divided by its tensor's scale
// out = x + bias[n] + residual[m,n], or grad (=, +=) x
template <class Real> void fp8_matmul_cpu(const Fp8MatmulOf<Real, Real>& a) {
    const std::vector<Real> left = fp8_values<Real>(a.a, (size_t)a.M * a.K, *a.a_tensor, a.a_format);
    const std::vector<Real> right = fp8_values<Real>(a.b, (size_t)a.N * a.K, *a.b_tensor, Fp8Format::E4m3);
    gemm_cpu(a.out ? a.out : a.grad.data, a.out ? Accumulate::No : a.grad.acc, left.data(), Transpose::No,
             right.data(), Transpose::Yes, a.M, a.N, a.K);
    for (int m = 0; m < a.M && a.out; m++) {
        Real* out_m = a.out + (size_t)m * a.N;
        for (int n = 0; n < a.N; n++) {
            out_m[n] += (a.bias ? a.bias[n] : 0) + (a.residual ? a.residual[(size_t)m * a.N + n] : 0);
        }
    }
    if (!a.cast.stats) { return; }
    // A GPU's kernel casts the first tiles while it still reads a for the others.
    const uint8_t *to = a.cast.out, *end = to + (size_t)a.M * a.cast.width();
    if (to && to < a.a + (size_t)a.M * a.K && a.a < end) { die("fp8_matmul: its cast would replace its a"); }
    fp8_cast_cpu(a.cast);
}

template <class Real> void fp8_scales_cpu(const Fp8ScalesOf<Real, Real>& a) {
    auto stats_of = [&](int rank) { return (Fp8Stats*)(a.records + rank * a.record_bytes + a.stats_at); };
    float worst = 0.0f;
    for (int i = 0; i < a.count; i++) {
        Fp8Stats all = {};
        for (int r = 0; r < a.ranks; r++) { fp8_add(&all, stats_of(r)[i]); }
        stats_of(a.rank)[i] = {};
        worst = fmaxf(worst, fp8_is_finite(all.amax) ? fp8_saturated(all) : INFINITY);
        fp8_next_scale(&a.tensors[i], all.amax);
    }
    *a.saturated = (Real)worst;
    if (worst > kFp8MaxSaturated) { *(double*)a.records = INFINITY; }
}

// dbias[o] (=, +=) sum over n of dout[n,o]; with of_qkv the keys' dbias is 0
template <class Real> void bias_backward_cpu(const BiasBackwardOf<Real, Real>& a) {
    column_sums(a.dbias, a.dout, a.N, a.OC, a.of_qkv);
}

// ---- self-attention ----
// q, k, v of position t and query head h are the HS values at qkv[b,t,h,:], qkv[b,t,NH+kv,:] and
// qkv[b,t,NH+NKV+kv,:], with kv = h / (NH / NKV).
// s[t,u] = q[t].k[u] / sqrt(HS) for u in mask.keys(t);   lse[t] = log(sum over u of exp(s[t,u]))
// p[t,u] = exp(s[t,u] - lse[t]);   out[t] = sum over u of p[t,u]*v[u]
// No (T,T) matrix is kept. Keys are taken kKeys at a time so that the exponentials vectorise.

constexpr int kKeys = 64;

template <class Real> static inline Real dot_cpu(const Real* x, const Real* y, int n) {
    Real sum = 0;
    #pragma omp simd reduction(+ : sum)
    for (int i = 0; i < n; i++) { sum += x[i] * y[i]; }
    return sum;
}

// Online softmax: while keys go by, `max` is the largest score so far; sum and out are relative to exp(max).
template <class Real> void attention_forward_cpu(const AttentionForwardOf<Real, Real>& a) {
    const int B = a.B, T = a.T, NH = a.NH, NKV = a.NKV, HS = a.HS;
    const size_t row = (size_t)(NH + 2 * NKV) * HS;         // of qkv
    const Real scale = (Real)(1.0 / sqrt((double)HS));
    #pragma omp parallel for collapse(2) schedule(dynamic)
    for (int b = 0; b < B; b++) {
        for (int h = 0; h < NH; h++) {
            const Real* q = a.qkv + b * T * row + (size_t)h * HS;
            const Real* k = a.qkv + b * T * row + (size_t)(NH + h / (NH / NKV)) * HS;
            const Real* v = k + (size_t)NKV * HS;
            const Mask mask = a.mask.row(b, T);
            for (int t = 0; t < T; t++) {
                const Span seen = mask.keys(t).within(T);
                const Real* q_t = q + t * row;
                Real* out_t = a.out + (((size_t)b * T + t) * NH + h) * HS;
                for (int i = 0; i < HS; i++) { out_t[i] = 0; }
                Real max = (Real)-INFINITY, sum = 0;
                for (int u0 = seen.first; u0 <= seen.last; u0 += kKeys) {
                    const int keys = seen.last + 1 - u0 < kKeys ? seen.last + 1 - u0 : kKeys;
                    Real p[kKeys], old_max = max, tile_sum = 0;
                    for (int u = 0; u < keys; u++) {
                        p[u] = scale * dot_cpu(q_t, k + (u0 + u) * row, HS);
                        max = p[u] > max ? p[u] : max;
                    }
                    #pragma omp simd reduction(+ : tile_sum)
                    for (int u = 0; u < keys; u++) {
                        p[u] = exp_cpu(p[u] - max);
                        tile_sum += p[u];
                    }
                    const Real rescale = exp_cpu(old_max - max);    // 0 for the first tile: from -inf
                    sum = sum * rescale + tile_sum;
                    for (int i = 0; i < HS; i++) { out_t[i] *= rescale; }
                    for (int u = 0; u < keys; u++) {
                        const Real* v_u = v + (u0 + u) * row;
                        #pragma omp simd
                        for (int i = 0; i < HS; i++) { out_t[i] += p[u] * v_u[i]; }
                    }
                }
                for (int i = 0; i < HS; i++) { out_t[i] /= sum; }
                a.lse[((size_t)b * NH + h) * T + t] = max + (Real)log((double)sum);
            }
        }
    }
}

// With p from lse and D[t] = sum over i of dout[t,i]*out[t,i] (= sum over u of p[t,u]*dp[t,u]):
// dp[t,u] = dout[t].v[u];   ds[t,u] = p[t,u] * (dp[t,u] - D[t]) / sqrt(HS)
// dq[t] = sum over u of ds[t,u]*k[u], and over each t that sees u:
// dk[u] = sum of ds[t,u]*q[t];   dv[u] = sum of p[t,u]*dout[t]
// dk and dv sum over the query heads that read them, one after the other. fp8: the bytes of these, or of dv.
template <class Real> void attention_backward_cpu(const AttentionBackwardOf<Real, Real>& a) {
    const int B = a.B, T = a.T, NH = a.NH, NKV = a.NKV, HS = a.HS, group = NH / NKV;
    const size_t row = (size_t)(NH + 2 * NKV) * HS;         // of qkv
    const Real scale = (Real)(1.0 / sqrt((double)HS));
    std::vector<Real> unrounded(a.fp8 && !a.only_v ? B * T * row : 0);
    Real* dqkv = a.fp8 && !a.only_v ? unrounded.data() : a.dqkv;
    #pragma omp parallel for collapse(2) schedule(dynamic)
    for (int b = 0; b < B; b++) {
        for (int kv = 0; kv < NKV; kv++) {
            const size_t first = b * T * row, keys_at = first + (size_t)(NH + kv) * HS;
            const Real *k = a.qkv + keys_at, *v = k + (size_t)NKV * HS;
            Real *dk = dqkv + keys_at, *dv = dk + (size_t)NKV * HS;
            const Mask mask = a.mask.row(b, T);

            // Every query adds to its own dq, and to dk and dv of all keys that it sees: they start at zero.
            for (int t = 0; t < T; t++) {
                for (int i = 0; i < HS; i++) { dk[t * row + i] = dv[t * row + i] = 0; }
            }
            for (int ht = 0; ht < group * T; ht++) {        // query heads, and in them rows
                const int h = kv * group + ht / T, t = ht % T;
                const size_t at = (((size_t)b * T + t) * NH + h) * HS, stat = ((size_t)b * NH + h) * T + t;
                const Span seen = mask.keys(t).within(T);
                const Real *q_t = a.qkv + first + t * row + (size_t)h * HS, *dout_t = a.dout + at;
                Real* dq_t = dqkv + first + t * row + (size_t)h * HS;
                for (int i = 0; i < HS; i++) { dq_t[i] = 0; }
                const Real D = a.scratch[stat] = dot_cpu(dout_t, a.out + at, HS);
                for (int u0 = seen.first; u0 <= seen.last; u0 += kKeys) {
                    const int keys = seen.last + 1 - u0 < kKeys ? seen.last + 1 - u0 : kKeys;
                    // p and ds of this query and a tile of keys, then what they add to the gradients.
                    Real p[kKeys], ds[kKeys];
                    for (int u = 0; u < keys; u++) {
                        p[u] = scale * dot_cpu(q_t, k + (u0 + u) * row, HS);
                        ds[u] = dot_cpu(dout_t, v + (u0 + u) * row, HS);
                    }
                    #pragma omp simd
                    for (int u = 0; u < keys; u++) {
                        p[u] = exp_cpu(p[u] - a.lse[stat]);
                        ds[u] = p[u] * (ds[u] - D) * scale;
                    }
                    for (int u = 0; u < keys; u++) {
                        const size_t key = (u0 + u) * row;
                        #pragma omp simd
                        for (int i = 0; i < HS; i++) {
                            dq_t[i] += ds[u] * k[key + i];
                            dk[key + i] += ds[u] * q_t[i];
                            dv[key + i] += p[u] * dout_t[i];
                        }
                    }
                }
            }
        }
    }
    const size_t first = a.only_v ? (size_t)(NH + NKV) * HS : 0;
    if (a.fp8) { fp8_columns(a.fp8, a.stats, dqkv, (size_t)B * T, row, first, row, a.tensor->scale); }
}

// ---- classifier: softmax, cross-entropy and its gradient, in place ----

// sum over i of exp(x[i] - max): 512 at once in Real, which vectorises, added up in double
template <class Real> static inline double sum_exp(const Real* x, Real max, int n) {
    constexpr int kAtOnce = 512;
    double sum = 0.0;
    for (int i0 = 0; i0 < n; i0 += kAtOnce) {
        const int end = n - i0 < kAtOnce ? n : i0 + kAtOnce;
        Real part = 0;
        #pragma omp simd reduction(+ : part)
        for (int i = i0; i < end; i++) { part += exp_cpu(x[i] - max); }
        sum += part;
    }
    return sum;
}

// losses[n] = -log softmax(logits[n,0:V])[targets[n]]
// LossAndGrad: logits[n,v] = (softmax(logits[n,0:V])[v] - (v == targets[n])) * dloss * loss_scale, and 0 for
// the padding V <= v < Vp, which takes no part. LossOnly: logits stay as they are.
// dloss is 1 / (counted tokens of the total batch); loss_scale is a device scalar, null stands for 1.
// A target of -1 is not counted: its loss and gradient are 0.
// fp8_grad: not the logits, but these bytes hold the gradient, with kFp8Dlogits for dloss * loss_scale.
// softcap: c = softcap * tanh(logits / softcap) takes the logits' place. Their gradient is that of c times
// the slope 1 - (c / softcap)^2. With e = exp(-2|z|), tanh(|z|) = (1 - e) / (1 + e).
template <class Real> void classifier_cpu(const ClassifierOf<Real, Real>& a) {
    const int V = a.V, Vp = a.Vp;
    const Real dlogits = (Real)((double)a.dloss * (a.loss_scale ? *a.loss_scale : 1.0f));
    const Real cap = (Real)a.softcap;
    const Real counted_scale = a.fp8_grad ? (Real)kFp8Dlogits : dlogits;
    if (a.fp8_grad) { a.fp8_tensor->inverse = (float)dlogits / kFp8Dlogits; }
    #pragma omp parallel for
    for (int n = 0; n < a.N; n++) {
        Real* logits = a.logits + (size_t)n * Vp;
        std::vector<Real> capped(cap > 0 ? V : 0);
        for (int v = 0; v < (int)capped.size(); v++) {
            const Real x = logits[v], e = exp_cpu(std::abs(x) * (-2 / cap)), y = cap * (1 - e) / (1 + e);
            capped[v] = x < 0 ? -y : y;
        }
        const Real* x = cap > 0 ? capped.data() : logits;
        Real max = x[0];
        #pragma omp simd reduction(max : max)
        for (int v = 0; v < V; v++) { max = x[v] > max ? x[v] : max; }
        const double sum = sum_exp(x, max, V);
        const int target = a.targets[n];
        const bool counted = target >= 0;
        a.losses[n] = counted ? (Real)(log(sum) - (x[target] - max)) : 0;
        if (a.mode == ClassifierMode::LossOnly) { continue; }
        const Real gradient_scale = counted ? counted_scale : 0;
        const Real factor = (Real)(gradient_scale / sum);
        std::vector<Real> own(a.fp8_grad ? Vp : 0);
        Real* grad = a.fp8_grad ? own.data() : logits;
        #pragma omp simd
        for (int v = 0; v < V; v++) { grad[v] = exp_cpu(x[v] - max) * factor; }
        if (counted) { grad[target] -= gradient_scale; }
        for (int v = 0; v < (int)capped.size(); v++) { grad[v] *= 1 - (x[v] / cap) * (x[v] / cap); }
        for (int v = V; v < Vp; v++) { grad[v] = 0; }
        for (int v = 0; v < (int)own.size(); v++) {
            a.fp8_grad[(size_t)n * Vp + v] = fp8_encode((float)grad[v], Fp8Format::E5m2);
        }
    }
}

// Is targets[n] the first of the largest logits?
template <class Real> void mark_likeliest_cpu(const MarkLikeliestOf<Real, Real>& a) {
    for (int n = 0; n < a.N; n++) {
        const Real* logits = a.logits + (size_t)n * a.Vp;
        a.likeliest[n] = std::max_element(logits, logits + a.V) == logits + a.targets[n];
    }
}

// mean (=, +=) weight * sum over n of losses[n], added in order
template <class Real> void loss_sum_cpu(const LossSumOf<Real, Real>& a) {
    double sum = 0.0;
    for (int n = 0; n < a.N; n++) { sum += a.losses[n]; }
    *a.mean = (Real)((a.acc == Accumulate::Yes ? *a.mean : 0.0) + a.weight * sum);
}

// ---- update: gradient norm, the decision to skip, AdamW ----

// out[i] = chain[0][i] + (chain[1][i] + (... + tree(i))), each sum rounded to Real. tree(i) adds the pieces
// in pairs, level by level, until one is left; the last of an odd number moves up unchanged.
template <class Real> void lane_sum_cpu(const LaneSumOf<Real, Real>& a) {
    assert(!a.out.is_bf16 && !a.pieces.is_bf16);                // the twins keep no 16-bit gradients
    const Real* pieces = (const Real*)a.pieces.data;
    #pragma omp parallel
    {
        std::vector<Real> values((size_t)a.num_pieces);
        #pragma omp for
        for (size_t i = 0; i < a.n; i++) {
            for (int r = 0; r < a.num_pieces; r++) { values[r] = pieces[(size_t)r * a.n + i]; }
            for (int count = a.num_pieces; count > 1; count = (count + 1) / 2) {
                for (int r = 0; r + 1 < count; r += 2) { values[r / 2] = values[r] + values[r + 1]; }
                if (count % 2 == 1) { values[count / 2] = values[count - 1]; }
            }
            Real sum = values[0];
            for (int k = a.num_chain - 1; k >= 0; k--) { sum = a.chain[k][i] + sum; }
            a.out.data[i] = sum;
        }
    }
}

// sums[c] = sum over the kChunk elements of chunk c of grads[i]^2, row by row
template <class Real> void square_sums_cpu(const SquareSumsOf<Real, Real>& a) {
    assert(!a.grads.is_bf16 && a.n % kChunk == 0);
    const size_t chunks = a.n / kChunk;                         // of a row
    #pragma omp parallel for
    for (size_t k = 0; k < a.rows.count * chunks; k++) {
        const Real* g = (const Real*)((const char*)a.grads.data + k / chunks * a.rows.grads);
        const size_t begin = k % chunks * kChunk;
        double sum = 0.0;
        #pragma omp simd reduction(+ : sum)
        for (size_t i = begin; i < begin + kChunk; i++) { sum += (double)g[i] * g[i]; }
        a.sums[k] = sum;
    }
}

// loss = sum of all lanes' losses; the norm is sqrt(sum of all live chunks' sums) / loss_scale. Both decide
// about the update that follows: see decide_update in op_types.h.
template <class Real> void update_decision_cpu(const UpdateDecisionOf<Real, Real>& a) {
    double sum = 0.0, loss = 0.0;
    for (int k = 0; k < a.num_ranges; k++) {
        const ChunkRange& range = a.ranges[k];
        for (size_t c = 0; c < range.chunks; c++) {
            const char* record = a.records + c / range.per_rank * a.record_bytes;
            sum += ((const double*)record)[range.at + c % range.per_rank];
        }
    }
    for (int g = 0; g < a.ranks * a.lanes; g++) {               // in the job's order
        const int rank = g / a.lanes, lane = g % a.lanes;
        loss += ((const Real*)(a.records + (size_t)rank * a.record_bytes + a.lanes_at))[lane];
    }
    *a.loss = (Real)loss;
    decide_update(a.state, a.policy, a.max_norm, sum, (float)loss);
}

// A row of the optimizer's state as Reals: in place, or of bf16 a copy, which store() rounds stochastically.
template <class Real> struct MomentRow {
    uint16_t* bf16;
    size_t n;
    std::vector<Real> copy;
    Real* data;
    MomentRow(const StateOf<Real>& s, int row, size_t n)
        : bf16(s.is_bf16 ? (uint16_t*)s.data + row * n : nullptr), n(n) {
        for (size_t i = 0; i < n && bf16; i++) { copy.push_back((Real)bf16_to_float(bf16[i])); }
        data = bf16 ? copy.data() : (Real*)s.data + row * n;
    }
    void store(RoundKey key, uint32_t tensor, size_t first) const {
        key.tensor = tensor;
        #pragma omp parallel for
        for (size_t i = 0; i < copy.size(); i++) {
            bf16[i] = bf16_round_stochastic((float)copy[i], round_bits16(key, first + i));
        }
    }
};

// Skipped update: nothing changes. Else, with g = grads[i]*grad_scale:
// m = m + (1-beta1)*(g - m);   v = beta2*v + (1-beta2)*g^2;
// p = p*(1 - lr*weight_decay) - lr/(1-beta1^t) * m/(sqrt(v)/sqrt(1-beta2^t) + eps), in the master copy if
// there is one; params = p.
template <class Real> void adamw_update_cpu(const AdamWOf<Real, Real>& a) {
    assert(!a.grads.is_bf16);
    if (a.state->skip) { return; }
    const double t = (double)a.state->t;
    const Real rate = (Real)(a.lr / (1.0 - pow(a.beta1, t))), correction = (Real)sqrt(1.0 - pow(a.beta2, t));
    const Real m_part = (Real)(1.0 - a.beta1), v_part = (Real)(1.0 - a.beta2), beta2 = (Real)a.beta2;
    const Real eps = (Real)a.eps, grad_scale = a.state->grad_scale;
    const Real keep = (Real)(1.0 - a.lr * a.weight_decay);
    for (int row = 0; row < a.rows.count; row++) {
        const Real* grads = (const Real*)((const char*)a.grads.data + row * a.rows.grads);
        Real* params = (Real*)((char*)a.params + row * a.rows.params);
        const MomentRow<Real> m_row(a.m, row, a.n), v_row(a.v, row, a.n);
        Real *ms = m_row.data, *vs = v_row.data;
        Real* weights = a.master ? a.master + row * a.n : params;
        #pragma omp parallel for simd
        for (size_t i = 0; i < a.n; i++) {
            const Real g = grads[i] * grad_scale;
            const Real m = ms[i] = ms[i] + m_part * (g - ms[i]);
            const Real v = vs[i] = beta2 * vs[i] + v_part * g * g;
            const Real kept = i < a.decays ? keep : 1;
            weights[i] = weights[i] * kept - rate * m / ((Real)sqrt(v) / correction + eps);
            params[i] = weights[i];
        }
        m_row.store(a.key, kRoundM, a.first + row * a.rows.first);
        v_row.store(a.key, kRoundV, a.first + row * a.rows.first);
    }
}

// ---- Muon ----

// Skipped update: nothing changes. Else, with g = grads[i]*grad_scale:
// m = m + (1-momentum)*(g - m);   update = g + momentum*(m - g)
template <class Real> void muon_momentum_cpu(const MuonMomentumOf<Real, Real>& a) {
    assert(!a.grads.is_bf16);
    if (a.state->skip) { return; }
    const Real part = (Real)(1.0 - a.momentum), ahead = (Real)a.momentum, grad_scale = a.state->grad_scale;
    for (int row = 0; row < a.rows.count; row++) {
        const Real* grads = (const Real*)((const char*)a.grads.data + row * a.rows.grads);
        const MomentRow<Real> m_row(a.m, row, a.n);
        Real *ms = m_row.data, *update = a.update + row * a.update_row;
        #pragma omp parallel for simd
        for (size_t i = 0; i < a.n; i++) {
            const Real g = grads[i] * grad_scale;
            const Real m = ms[i] = ms[i] + part * (g - ms[i]);
            update[i] = g + ahead * (m - g);
        }
        m_row.store(a.key, kRoundM, a.first + row * a.rows.first);
    }
}

// For each matrix: x = inp / |inp| (zeros stay zeros); `steps` times, with G = x x^T (k,k):
// x = kMuonA x + (kMuonB G + kMuonC G G) x; then out = x * sqrt(max(1, rows/cols)). Where there are more rows
// than columns, G = x^T x and stands on the right of x.
template <class Real> void muon_orthogonalise_cpu(const MuonOrthogonaliseOf<Real, Real>& a) {
    const bool tall = a.rows > a.cols;
    const int k = tall ? a.cols : a.rows, n = tall ? a.rows : a.cols;
    const size_t size = (size_t)a.rows * a.cols, square = (size_t)k * k;
    const double scale = tall ? sqrt((double)a.rows / a.cols) : 1.0;
    const Transpose yes = Transpose::Yes, no = Transpose::No;
    for (int i = 0; i < a.places.count(); i++) {
        const Real* inp = a.inp + a.places.of(i);
        Real *x = a.x + i * size, *y = a.y + i * size;
        Real *gram = a.gram + i * square, *poly = a.poly + i * square;
        double squares = 0.0;
        for (size_t e = 0; e < size; e++) { squares += (double)inp[e] * inp[e]; }
        const double factor = squares > 0.0 ? 1.0 / sqrt(squares) : 0.0;
        for (size_t e = 0; e < size; e++) { x[e] = (Real)(inp[e] * factor); }
        for (int step = 0; step < a.steps; step++, std::swap(x, y)) {
            const bool is_last = step + 1 == a.steps;
            const double last = is_last ? scale : 1.0;
            if (is_last) { y = a.out + a.places.of(i); }
            const Real keep = (Real)(last * kMuonA), b = (Real)(last * kMuonB), c = (Real)(last * kMuonC);
            gemm_cpu(gram, Accumulate::No, x, tall ? yes : no, x, tall ? no : yes, k, k, n);
            gemm_cpu(poly, Accumulate::No, gram, no, gram, no, k, k, k);
            for (size_t e = 0; e < square; e++) { poly[e] = b * gram[e] + c * poly[e]; }
            for (size_t e = 0; e < size; e++) { y[e] = keep * x[e]; }
            gemm_cpu(y, Accumulate::Yes, tall ? x : poly, no, tall ? poly : x, no, a.rows, a.cols, k);
        }
    }
}

// Skipped update: nothing changes. Else p = p*(1 - lr*weight_decay) - lr*update, in the master copy if there
// is one; params = p.
template <class Real> void muon_update_cpu(const MuonUpdateOf<Real, Real>& a) {
    if (a.state->skip) { return; }
    const Real keep = (Real)(1.0 - a.lr * a.weight_decay), rate = (Real)a.lr;
    for (int row = 0; row < a.rows.count; row++) {
        const Real* update = a.update + row * a.update_row;
        Real* params = (Real*)((char*)a.params + row * a.rows.params);
        Real* weights = a.master ? a.master + row * a.n : params;
        #pragma omp parallel for simd
        for (size_t i = 0; i < a.n; i++) {
            weights[i] = weights[i] * keep - rate * update[i];
            params[i] = weights[i];
        }
    }
}

// ---- writing text: one new token of each of N rows ----

// out[n,o] = sum over c of inp[n,c]*weight[o,c] + bias[o], or gelu of it. Plain sums, because BLAS may sum in
// another order for another number of rows.
template <class Real> void decode_matmul_cpu(const DecodeMatmulOf<Real, Real>& a) {
    #pragma omp parallel for
    for (int o = 0; o < a.OC; o++) {
        for (int n = 0; n < a.N; n++) {
            Real sum = dot_cpu(a.inp + (size_t)n * a.C, a.weight + (size_t)o * a.C, a.C);
            if (a.bias) { sum += a.bias[o]; }
            a.out[(size_t)n * a.OC + o] = a.gelu ? gelu(sum) : sum;
        }
    }
}

// keys[n,t] = k and values[n,t] = v of this position t; out = softmax(q.k[u]/sqrt(HS)) v[u], by heads, over
// the u that t sees
template <class Real> void decode_attention_cpu(const DecodeAttentionOf<Real, Real>& a) {
    const int NH = a.NH, NKV = a.NKV, HS = a.HS;
    const size_t C = (size_t)NKV * HS;
    const Real scale = (Real)(1.0 / sqrt((double)HS));
    #pragma omp parallel for
    for (int n = 0; n < a.N; n++) {
        const int t = a.positions[n];
        const Real *qkv = a.qkv + (size_t)n * (NH + 2 * NKV) * HS, *new_keys = qkv + (size_t)NH * HS;
        memcpy(a.keys + ((size_t)n * a.T + t) * C, new_keys, C * sizeof(Real));
        memcpy(a.values + ((size_t)n * a.T + t) * C, new_keys + C, C * sizeof(Real));
    }
    #pragma omp parallel for collapse(2)
    for (int n = 0; n < a.N; n++) {
        for (int h = 0; h < NH; h++) {
            const int t = a.positions[n];
            const Real* q = a.qkv + ((size_t)n * (NH + 2 * NKV) + h) * HS;
            const size_t head = (size_t)n * a.T * C + (size_t)(h / (NH / NKV)) * HS;
            const Real *k = a.keys + head, *v = a.values + head;
            Real* out = a.out + ((size_t)n * NH + h) * HS;
            const Span seen = a.mask.keys(t).within(t + 1);
            std::vector<Real> p(t + 1);
            Real max = (Real)-INFINITY;
            for (int u = seen.first; u <= seen.last; u++) {
                p[u] = scale * dot_cpu(q, k + u * C, HS);
                max = p[u] > max ? p[u] : max;
            }
            double sum = 0.0;
            for (int i = 0; i < HS; i++) { out[i] = 0; }
            for (int u = seen.first; u <= seen.last; u++) {
                p[u] = exp_cpu(p[u] - max);
                sum += p[u];
                #pragma omp simd
                for (int i = 0; i < HS; i++) { out[i] += p[u] * v[u * C + i]; }
            }
            for (int i = 0; i < HS; i++) { out[i] = (Real)(out[i] / sum); }
        }
    }
}

// keys[n,t] = k[t] and values[n,t] = v[t] of qkv, for each row n and t < count
template <class Real> void cache_store_cpu(const CacheStoreOf<Real, Real>& a) {
    const size_t C = (size_t)a.NKV * a.HS, Q = (size_t)a.NH * a.HS;
    for (int n = 0; n < a.rows; n++) {
        for (int t = 0; t < a.count; t++) {
            const Real* keys = a.qkv + t * (Q + 2 * C) + Q;
            memcpy(a.keys + ((size_t)n * a.T + t) * C, keys, C * sizeof(Real));
            memcpy(a.values + ((size_t)n * a.T + t) * C, keys + C, C * sizeof(Real));
        }
    }
}

// tokens[n] = what sample_token draws from row n with its next random number
template <class Real> void sample_tokens_cpu(const SampleTokensOf<Real, Real>& a) {
    #pragma omp parallel for
    for (int n = 0; n < a.N; n++) {
        const Real* row = a.logits + (size_t)n * a.V;
        const std::vector<float> logits(row, row + a.V);
        const double coin = rand_unit(a.seed, RAND_SAMPLE, a.ids[n], a.draws[n]);
        a.tokens[n] = sample_token(logits.data(), a.V, a.sampling, coin);
        a.positions[n]++;
        a.draws[n]++;
    }
}

#define X(op, Args) \
    template <class Real> void op##_cpu(const Args##Of<Real, Real>& a, Stream) { op##_cpu(a); OP_DONE(a); }
MODEL_OPS(X)
#undef X
