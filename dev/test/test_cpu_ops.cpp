/*
Tests of llmc/ops/cpu_ops.h, in double: each backward pass against finite differences of its forward pass,
whose values test_gpt2's model mode holds against PyTorch's. test_training.py has branches of the residual
stream and several threads, test_ranks.py records of ranks. test_gpt2's invariance mode has sums of lanes, the
norm, Muon's values and decoding.
*/
#include <math.h>       // gives: sqrt, isfinite, isnan

#include <algorithm>    // gives: std::all_of, std::count, std::is_sorted

#include "child.h"                  // gives: check_dies
#include "test.h"                   // gives: TEST, CHECK
#include "llmc/ops/cpu_ops.h"       // gives: the twins
#include "llmc/ops/rotation_table.h" // gives: rotation_table
#include "llmc/ops/token_buckets.h" // gives: build_token_buckets, find_documents

// ---- tensors ----

// What is used everywhere is not inlined: compiled with the sanitizers, that takes a third less time.
#define NOINLINE __attribute__((noinline))

// Full of NaN until something is stored. ASan sees who reads or writes beside it.
template <class Real> struct Tensor {
    size_t n;
    std::vector<Real> all;
    NOINLINE explicit Tensor(size_t n) : n(n), all(n, (Real)NAN) {}
    NOINLINE Tensor(const Tensor& other) : n(other.n), all(other.all) {}
    NOINLINE Tensor& operator=(const Tensor& other) = default;
    NOINLINE ~Tensor() {}
    operator Real*() { return all.data(); }
    operator const Real*() const { return all.data(); }
    bool operator==(const Tensor& other) const {            // the same bits: NaN is NaN
        return n == other.n && memcmp(all.data(), other.all.data(), n * sizeof(Real)) == 0;
    }
};
typedef Tensor<double> Doubles;
typedef Tensor<float> Floats;

// value(i) of each i below n
template <class F> static Doubles doubles(size_t n, F value) {
    Doubles x(n);
    for (size_t i = 0; i < n; i++) { x[i] = value(i); }
    return x;
}

static uint32_t random_id = 0;              // each random tensor takes the next stream

// Uniform in shift +- scale, and a float's value: float and double twins can start from the same numbers.
template <class Real = double>
static Tensor<Real> random_tensor(size_t n, double scale = 1.0, double shift = 0.0) {
    Tensor<Real> x(n);
    random_id++;
    for (size_t i = 0; i < n; i++) {
        x[i] = (Real)(float)(shift + scale * (2.0 * rand_unit(7, RAND_SAMPLE, random_id, i) - 1.0));
    }
    return x;
}

static std::vector<int> random_ints(size_t n, int below) {
    std::vector<int> x(n);
    random_id++;
    for (size_t i = 0; i < n; i++) { x[i] = (int)(rand_unit(7, RAND_SAMPLE, random_id, i) * below); }
    return x;
}

// |a - b| / |b| over the whole tensor; NaN anywhere comes through
template <class A, class B> static double difference(const A* a, const B* b, size_t n) {
    double squares = 0.0, norm = 0.0;
    for (size_t i = 0; i < n; i++) {
        squares += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        norm += (double)b[i] * b[i];
    }
    return squares == 0.0 ? 0.0 : sqrt(squares / norm);
}
template <class Real> static double difference(const Tensor<Real>& a, const Doubles& b) {
    return difference((const Real*)a, (const double*)b, b.n);
}

#define CHECK_SAME(got, expected, tolerance)                                                            \
    do {                                                                                                \
        double difference_ = difference(got, expected);                                                 \
        CHECK(difference_ <= (tolerance), "%s: %s is off by %.2e", shape.c_str(), #got, difference_);   \
    } while (0)

// Against a formula of the element's index i.
#define CHECK_EACH(got, tolerance, ...)                                                                 \
    CHECK_SAME(got, doubles((got).n, [&](size_t i) { return __VA_ARGS__; }), tolerance)

constexpr double kExact = 1e-13;            // two ways to sum the same numbers in double
constexpr double kNumeric = 1e-8;           // derivative against finite differences

static double dot(const double* x, const double* y, size_t n) {
    double sum = 0.0;
    for (size_t i = 0; i < n; i++) { sum += x[i] * y[i]; }
    return sum;
}

// How far the sum of gradient * direction is from the loss's derivative along a random direction of x, by
// differences of fourth order. Relative to what an error in one element of the gradient would be.
static double numeric_error(Doubles& x, const Doubles& gradient, const std::function<double()>& loss) {
    const Doubles x0 = x, direction = random_tensor(x.n);
    const double *from = x0, *by = direction, *g = gradient, h = 1e-3;
    auto at = [&](double step) {
        for (size_t i = 0; i < x.n; i++) { x[i] = from[i] + step * by[i]; }
        return loss();
    };
    const double numeric = (at(-2 * h) - 8 * at(-h) + 8 * at(h) - at(2 * h)) / (12 * h);
    x = x0;
    const double analytic = dot(g, by, x.n);
    return numeric == analytic ? 0.0 : fabs(numeric - analytic) / sqrt(dot(g, g, x.n));
}

#define CHECK_GRADIENT(x, gradient, loss)                                                               \
    do {                                                                                                \
        double error_ = numeric_error(x, gradient, loss);                                               \
        CHECK(error_ <= kNumeric, "%s: %s differs from finite differences by %.2e", shape.c_str(),      \
              #gradient, error_);                                                                       \
    } while (0)

// Runs op(GradOf) with = on NaN and with += on old numbers; returns what = stored.
typedef std::function<void(GradOf<double>)> GradientOp;
static Doubles gradient_of(const std::string& shape, size_t n, const GradientOp& op) {
    Doubles stored(n), added = random_tensor(n), old = added;
    op({stored, Accumulate::No});
    op({added, Accumulate::Yes});
    CHECK_EACH(added, 1e-15, old[i] + stored[i]);
    return stored;
}

static Doubles column_sums_of(const Doubles& x, int N, int C) {
    return doubles(C, [&](size_t c) {
        double sum = 0.0;
        for (int n = N - 1; n >= 0; n--) { sum += x[n * C + c]; }
        return sum;
    });
}

// ---- encoder ----

struct Buckets {                            // TokenBuckets with the memory that they point to
    std::vector<int> order;
    std::vector<int4> segments, splits;
    TokenBuckets view;
    Buckets(const std::vector<int>& tokens, int vocab) {
        const int n = (int)tokens.size();
        order.resize(n);
        segments.resize(max_bucket_segments(n));
        splits.resize(max_bucket_splits(n) + 1);
        build_token_buckets(&view, order.data(), segments.data(), splits.data(), tokens.data(), n, vocab);
        auto before = [&](const int4& a, const int4& b) {       // the largest bucket first, then by token
            const long sizes[] = {std::count(tokens.begin(), tokens.end(), a.x),
                                  std::count(tokens.begin(), tokens.end(), b.x)};
            return sizes[0] > sizes[1] || (sizes[0] == sizes[1] && a.x < b.x);
        };
        CHECK(view.num_segments <= max_bucket_segments(n) && view.num_splits <= max_bucket_splits(n),
              "%d segments, %d splits of %d tokens", view.num_segments, view.num_splits, n);
        CHECK(std::is_sorted(&segments[0], &segments[0] + view.num_segments, before), "another order");
        for (int i = 0; i < view.num_splits; i++) { CHECK(splits[i].z > 1, "a split of one segment"); }
    }
};

static void test_encoder(int B, int T, int maxT, int Vp, int C, int different_tokens) {
    const std::string shape = format("encoder B=%d T=%d C=%d tokens=%d", B, T, C, different_tokens);
    const size_t n = (size_t)B * T * C;
    const std::vector<int> tokens = random_ints(B * T, different_tokens);
    Doubles wte = random_tensor((size_t)Vp * C), wpe = random_tensor((size_t)maxT * C), out(n);
    auto forward = [&] { encoder_forward_cpu<double>({out, tokens.data(), wte, wpe, B, T, C}, 0); };
    forward();
    CHECK_EACH(out, 0.0, wte[tokens[i / C] * C + i % C] + wpe[i / C % T * C + i % C]);

    Buckets buckets(tokens, Vp);
    Doubles dout = random_tensor(n), scratch((size_t)max_bucket_slots(B * T) * C);
    Doubles before = random_tensor(wte.n), dwte = before;
    const Doubles dwpe = gradient_of(shape, wpe.n, [&](GradOf<double> grad) {
        dwte = before;                          // which is only ever added to
        encoder_backward_cpu<double>({{dwte, Accumulate::Yes}, grad, scratch, dout, buckets.view, B, T, maxT,
                                      C}, 0);
    });
    const Doubles added = doubles(wte.n, [&](size_t i) { return dwte[i] - before[i]; });
    auto loss = [&] { forward(); return dot(out, dout, n); };
    CHECK_GRADIENT(wte, added, loss);
    CHECK_GRADIENT(wpe, dwpe, loss);
}

// Rows of a text, each at its own place; where no token was drawn, it is read as the first.
static void test_encoder_positions() {
    const std::string shape = "encoder positions";
    const int C = 5, tokens[] = {6, 2, -1}, places[] = {0, 8, 3};
    Doubles wte = random_tensor(7 * C), wpe = random_tensor(9 * C), out(3 * C);
    encoder_forward_cpu<double>({out, tokens, wte, wpe, 3, 1, C, places}, 0);
    CHECK_EACH(out, 0.0, wte[std::max(tokens[i / C], 0) * C + i % C] + wpe[places[i / C] * C + i % C]);
}

// ---- activations ----

// Away from 0, where ReLU has a kink: there finite differences are no gradient.
static void leave_zero(Doubles& x) {
    for (size_t i = 0; i < x.n; i++) { x[i] += x[i] < 0 ? -0.1 : 0.1; }
}

// What it gives of (N,F) or gate, up (N,2F), and its gradient: into memory of its own, and in place.
static void test_activation(Mlp mlp, int N, int F) {
    const std::string shape = format("%s N=%d F=%d", kMlps[(int)mlp].name, N, F);
    const int columns = act_columns(mlp, F);
    Doubles inp = random_tensor((size_t)N * columns, 4.0), out((size_t)N * F), dout = random_tensor(out.n);
    leave_zero(inp);
    Doubles dinp(inp.n), inplace = inp;
    auto forward = [&] { activate_cpu<double>({out, inp, N, F, mlp}, 0); };
    auto loss = [&] { forward(); return dot(out, dout, out.n); };
    activate_backward_cpu<double>({dinp, dout, inp, N, F, mlp}, 0);
    CHECK_GRADIENT(inp, dinp, loss);
    activate_backward_cpu<double>({inplace, dout, inplace, N, F, mlp}, 0);
    CHECK(inplace == dinp, "%s: in place, other bits", shape.c_str());
    if (!is_gated(mlp)) {
        const Doubles dbias = gradient_of(shape, F, [&](GradOf<double> grad) {
            inplace = dout;
            activate_backward_cpu<double>({inplace, inplace, inp, N, F, mlp, grad}, 0);
        });
        CHECK(inplace == dinp, "%s: in dout's place, with dbias, other bits", shape.c_str());
        const Doubles sums = column_sums_of(dinp, N, F);
        CHECK_SAME(dbias, sums, kExact);
    }
    inp[0] = NAN;
    forward();
    activate_backward_cpu<double>({dinp, dout, inp, N, F, mlp}, 0);
    CHECK(isnan(out[0]) && isnan(dinp[0]), "%s of NaN", shape.c_str());
}

static void test_silu_far_out() {
    const float far[] = {100.0f, -100.0f, 3e38f, -3e38f, NAN};
    CHECK(silu(far[0]) == 100.0f && silu(far[1]) == 0.0f && silu(far[2]) == far[2] && silu(far[3]) == 0.0f &&
          isnan(silu(far[4])) && silu_derivative(far[0]) == 1.0f && silu_derivative(far[1]) == 0.0f,
          "silu far out");
}

// ---- QK-norm and rotary positions ----

// Rows at places of their own are those of a longer text. Of the weights, one is 0.
static void test_rotate(int B, int T, int NH, int NKV, int HS, bool norm, bool weights) {
    const std::string shape = format("rotate B=%d T=%d NH=%d NKV=%d HS=%d norm=%d weights=%d", B, T, NH, NKV,
                                     HS, norm, weights);
    const int N = B * T, heads = NH + NKV, all = heads + NKV, maxT = T + 5;
    const size_t n = (size_t)N * all * HS;
    const float eps = 1e-3f;
    Doubles raw = random_tensor(n, 1.0, 0.3), qkv = raw, rstd((size_t)N * heads);
    Doubles q_weight = random_tensor(HS, 0.5, 1.0), k_weight = random_tensor(HS, 0.5, 1.0);
    Doubles table(rotation_table_size(maxT, HS));
    rotation_table((double*)table, maxT, HS, 100.0, {});
    double *const stored = norm ? (double*)rstd : nullptr, *const q = weights ? (double*)q_weight : nullptr;
    double* const k = weights ? (double*)k_weight : nullptr;
    auto forward = [&](const int* positions) {
        qkv = raw;
        rotate_forward_inplace_cpu<double>({qkv, stored, q, k, table, positions, N, T, NH, NKV, HS, eps}, 0);
    };
    forward(nullptr);
    const Doubles in_turn = qkv;
    std::vector<int> positions;
    for (int n = 0; n < N; n++) { positions.push_back(n % T); }
    forward(positions.data());
    CHECK(qkv == in_turn, "%s: other bits with places given", shape.c_str());
    const Doubles dout = random_tensor(n);
    Doubles dqkv(n), dk_weight(HS);
    auto backward = [&](GradOf<double> dq, GradOf<double> dk) {
        dqkv = dout;
        rotate_backward_inplace_cpu<double>({dqkv, dq, dk, nullptr, qkv, stored, q, k, table, N, T, NH, NKV,
                                             HS}, 0);
    };
    auto loss = [&] { forward(nullptr); return dot(qkv, dout, n); };
    if (!weights) {
        backward({}, {});
        const Doubles want = dqkv;              // as bytes: these numbers, rounded; v's are not written
        std::vector<uint8_t> bytes(n, 0xFF);
        Fp8Tensor tensor = {};
        Fp8Stats stats = {};
        fp8_set_scale(&tensor, 64.0f);
        dqkv = dout;
        rotate_backward_inplace_cpu<double>({dqkv, {}, {}, nullptr, qkv, stored, q, k, table, N, T, NH, NKV,
                                             HS, bytes.data(), &tensor, &stats}, 0);
        size_t wrong = 0, written = 0;
        for (size_t i = 0; i < n; i++) {
            const bool is_v = i / HS % (NH + 2 * NKV) >= (size_t)(NH + NKV);
            wrong += bytes[i] != (is_v ? 0xFF : fp8_encode((float)want[i] * 64.0f)), written += !is_v;
        }
        CHECK(wrong == 0 && stats.elements == written && stats.amax > 0, "%s: %zu bytes are wrong",
              shape.c_str(), wrong);
        CHECK_GRADIENT(raw, want, loss);
        return;
    }
    const Doubles of_q = gradient_of(shape, HS, [&](GradOf<double> grad) {
        backward(grad, {dk_weight, Accumulate::No});
    });
    CHECK_GRADIENT(raw, dqkv, loss);
    CHECK_GRADIENT(q_weight, of_q, loss);
    CHECK_GRADIENT(k_weight, dk_weight, loss);
    q_weight[1] = 0.0;                          // its gradient counts as 0, and the others stay as they are
    forward(nullptr);
    Doubles of_zero(HS);
    backward({of_zero, Accumulate::No}, {});
    CHECK_EACH(of_zero, kExact, i == 1 ? 0.0 : of_q[i]);
    CHECK(std::all_of((double*)dqkv, dqkv + n, [](double x) { return isfinite(x); }), "%s: a weight of 0",
          shape.c_str());
}

// ---- value embeddings ----

static void test_value_embed(int N, int V, int NH, int NKV, int HS) {
    const std::string shape = format("value_embed N=%d V=%d NH=%d NKV=%d HS=%d", N, V, NH, NKV, HS);
    const int C = 16, K = NKV * HS, row = (NH + 2 * NKV) * HS;
    const std::vector<int> tokens = random_ints(N, V);
    Doubles raw = random_tensor((size_t)N * row), qkv = raw, dout = random_tensor(raw.n), dqkv = dout;
    Doubles table = random_tensor((size_t)V * K), weight = random_tensor(NKV * kGateChannels);
    Doubles inp = random_tensor((size_t)N * C), before = random_tensor(inp.n), dinp = before;
    ValueEmbedOf<double, double> of = {};
    of.table = table, of.weight = weight, of.inp = inp, of.tokens = tokens.data();
    of.N = N, of.C = C, of.NH = NH, of.NKV = NKV, of.HS = HS;
    auto run = [](ValueEmbedOf<double, double> a, double* qkv, double* dinp = nullptr,
                  GradOf<double> dweight = {}) {
        a.qkv = qkv, a.dinp = dinp, a.dweight = dweight;
        value_embed_cpu<double>(a, 0);
    };
    auto loss = [&] {
        qkv = raw;
        run(of, qkv);
        return dot(qkv, dout, qkv.n);
    };
    loss();
    CHECK_EACH(qkv, kExact, [&](int n, int k) {
        double z = 0.0;
        for (int j = 0; j < 12 && k >= 0; j++) { z += weight[k / HS * 12 + j] * inp[n * C + j]; }
        return raw[i] + (k < 0 ? 0.0 : 3.0 / (1.0 + exp(-z)) * table[tokens[n] * K + k]);
    }((int)(i / row), (int)(i % row) - (NH + NKV) * HS));

    const Doubles dweight = gradient_of(shape, weight.n, [&](GradOf<double> grad) {
        dqkv = dout, dinp = before;
        run(of, dqkv, dinp, grad);
    });
    const Doubles added = doubles(inp.n, [&](size_t i) { return dinp[i] - before[i]; });
    CHECK_GRADIENT(weight, dweight, loss);
    CHECK_GRADIENT(inp, added, loss);
    Buckets buckets(tokens, V);
    Doubles dtable = doubles(table.n, [](size_t) { return 0.0; }), scratch((size_t)max_bucket_slots(N) * K);
    encoder_backward_cpu<double>({{dtable, Accumulate::Yes}, {}, scratch, dqkv + of.values(0), buckets.view,
                                  1, N, 0, K, row}, 0);
    CHECK_GRADIENT(table, dtable, loss);

    // of bytes: the same, to the bit, as of the numbers that they stand for
    std::vector<uint8_t> inp_t(inp.n), dv(dout.n);
    Fp8Tensor scales[2];
    fp8_set_scale(&scales[0], 64.0f), fp8_set_scale(&scales[1], 32.0f);
    for (size_t i = 0; i < inp.n; i++) { inp_t[i % C * N + i / C] = fp8_encode((float)inp[i] * 64.0f); }
    for (size_t i = 0; i < inp.n; i++) { inp[i] = fp8_decode(inp_t[i % C * N + i / C]) / 64.0f; }
    for (size_t i = 0; i < dv.size(); i++) { dv[i] = fp8_encode((float)dout[i] * 32.0f); }
    for (size_t i = 0; i < dv.size(); i++) { dout[i] = fp8_decode(dv[i]) / 32.0f; }
    ValueEmbedOf<double, double> of_bytes = of;
    of_bytes.inp = nullptr, of_bytes.inp_t8 = inp_t.data(), of_bytes.inp_tensor = &scales[0];
    loss();
    const Doubles of_numbers = qkv;
    qkv = raw;
    run(of_bytes, qkv);
    CHECK(qkv == of_numbers, "%s: other bits of bytes", shape.c_str());
    Doubles dw(weight.n), dw_bytes = dw, dinp_bytes = dinp, dqkv_bytes = dout;
    dqkv = dout;
    run(of, dqkv, dinp, {dw, Accumulate::No});
    of_bytes.dv8 = dv.data(), of_bytes.dv_tensor = &scales[1];
    for (int n = 0; n < N; n++) { std::fill_n(dqkv_bytes + of.values(n), K, NAN); }
    run(of_bytes, dqkv_bytes, dinp_bytes, {dw_bytes, Accumulate::No});
    CHECK(dqkv == dqkv_bytes && dinp == dinp_bytes && dw == dw_bytes, "%s: other gradients of bytes",
          shape.c_str());
}

// ---- norms of the residual stream: epsilons, and RMSNorms without weights ----

static void test_norm(NormKind kind, int N, int C, int norms, bool weights) {
    const std::string shape = format("norm %d N=%d C=%d norms=%d weights=%d", (int)kind, N, C, norms,
                                     weights);
    const size_t n = (size_t)N * C;
    const double eps = 0.05;
    const bool layer = kind == NormKind::Layer;
    Doubles x = random_tensor(n, 1.0, 0.3), y0(n), y1(n), mean(N), rstd(N), bias = random_tensor(C);
    Doubles weight0 = random_tensor(C, 0.5, 1.0), weight1 = random_tensor(C, 0.5, 1.0);
    double *const w0 = weights ? (double*)weight0 : nullptr, *const w1 = weights ? (double*)weight1 : nullptr;
    double* const b = layer ? (double*)bias : nullptr;
    NormForwardOf<double, double> f = {};
    f.y[0] = {y0, w0, b}, f.mean = mean, f.rstd = rstd, f.inp = x, f.kind = kind;
    f.N = N, f.C = C, f.eps = eps;
    if (norms == 2) { f.y[1] = {y1, w1, b}; }
    auto forward = [&] { norm_forward_cpu<double>(f, 0); };
    forward();
    const Doubles dout0 = random_tensor(n), dout1 = random_tensor(n);
    Doubles dx(n);
    NormBackwardOf<double, double> d = {};
    d.dresidual = dx, d.y[0] = {dout0, w0, {}, {}}, d.dresidual_acc = Accumulate::No;
    d.inp = x, d.mean = mean, d.rstd = rstd, d.kind = kind, d.N = N, d.C = C;
    if (norms == 2) { d.y[1] = {dout1, w1, {}, {}}; }
    norm_backward_cpu<double>(d, 0);
    auto loss = [&] {
        forward();
        return dot(y0, dout0, n) + (norms == 2 ? dot(y1, dout1, n) : 0.0);
    };
    CHECK_GRADIENT(x, dx, loss);
    if (!weights) { return; }
    forward();
    const Doubles dweight = gradient_of(shape, C, [&](GradOf<double> grad) {
        d.y[0].dweight = grad;
        norm_backward_cpu<double>(d, 0);
    });
    CHECK_GRADIENT(weight0, dweight, loss);
}

// ---- matmul ----

static void test_matmul(int N, int C, int OC) {
    const std::string shape = format("matmul N=%d C=%d OC=%d", N, C, OC);
    const size_t n = (size_t)N * OC;
    Doubles inp = random_tensor((size_t)N * C), weight = random_tensor((size_t)OC * C);
    Doubles bias = random_tensor(OC), residual = random_tensor(n), out(n), pre_act(n);
    auto forward = [&](const double* bias, const double* residual, double* pre_act) {
        matmul_forward_cpu<double>({out, inp, weight, bias, residual, pre_act, N, C, OC}, 0);
    };
    const Doubles products = doubles(n, [&](size_t i) {
        return dot(inp + i / OC * C, weight + i % OC * C, C);
    });
    forward(nullptr, nullptr, nullptr);
    CHECK_SAME(out, products, kExact);
    forward(bias, residual, nullptr);
    CHECK_EACH(out, kExact, products[i] + bias[i % OC] + residual[i]);
    forward(bias, nullptr, pre_act);
    CHECK_EACH(pre_act, kExact, products[i] + bias[i % OC]);
    CHECK_EACH(out, kExact, gelu(products[i] + bias[i % OC]));

    Doubles dout = random_tensor(n), dinp(inp.n), other = random_tensor(inp.n), both(inp.n);
    matmul_backward_input_cpu<double>({dinp, dout, weight, nullptr, nullptr, N, C, OC}, 0);
    matmul_backward_input_cpu<double>({both, dout, weight, other, nullptr, N, C, OC}, 0);
    CHECK_EACH(both, kExact, dinp[i] + other[i]);
    const Doubles dweight = gradient_of(shape, weight.n, [&](GradOf<double> grad) {
        matmul_backward_weight_cpu<double>({grad, nullptr, dout, inp, N, C, OC}, 0);
    });
    const Doubles dbias = gradient_of(shape, OC, [&](GradOf<double> grad) {
        bias_backward_cpu<double>({grad, nullptr, dout, N, OC}, 0);
    });
    auto loss = [&] { forward(bias, nullptr, nullptr); return dot(out, dout, n); };
    CHECK_GRADIENT(inp, dinp, loss);
    CHECK_GRADIENT(weight, dweight, loss);
    CHECK_GRADIENT(bias, dbias, loss);

    Doubles hidden = random_tensor(inp.n, 2.0), dhidden(inp.n);
    const Doubles dhidden_bias = gradient_of(shape, C, [&](GradOf<double> grad) {
        matmul_backward_input_cpu<double>({dhidden, dout, weight, nullptr, hidden, N, C, OC, grad}, 0);
    });
    const Doubles hidden_sums = column_sums_of(dhidden, N, C);
    CHECK_SAME(dhidden_bias, hidden_sums, kExact);
    auto loss_through_gelu = [&] {
        activate_cpu<double>({inp, hidden, N, C, Mlp::Gelu}, 0);
        return loss();
    };
    CHECK_GRADIENT(hidden, dhidden, loss_through_gelu);
}

// Both linear layers of an MLP without biases: the first with its activation, the second back through it.
static void test_mlp(Mlp mlp, int N, int C, int F) {
    const int FCC = act_columns(mlp, F);
    const std::string shape = format("mlp %s N=%d C=%d F=%d", kMlps[(int)mlp].name, N, C, F);
    Doubles inp = random_tensor((size_t)N * C), weight = random_tensor((size_t)FCC * C);
    Doubles weight2 = random_tensor((size_t)C * F), act((size_t)N * F), pre_act((size_t)N * FCC);
    Doubles out(inp.n), dout = random_tensor(inp.n), dact(act.n), product(pre_act.n);
    auto activate = [&] { activate_cpu<double>({act, pre_act, N, F, mlp}, 0); };
    matmul_forward_cpu<double>({product, inp, weight, nullptr, nullptr, nullptr, N, C, FCC}, 0);
    matmul_forward_cpu<double>({act, inp, weight, nullptr, nullptr, pre_act, N, C, FCC, mlp}, 0);
    CHECK_SAME(pre_act, product, kExact);
    const Doubles fused = act;
    activate();
    CHECK(fused == act, "%s: not the activation of the product", shape.c_str());

    leave_zero(pre_act);
    Doubles inplace = pre_act;
    matmul_backward_input_cpu<double>({inplace, dout, weight2, nullptr, inplace, N, F, C, {}, nullptr, dact,
                                       mlp}, 0);
    auto loss = [&] {
        activate();
        matmul_forward_cpu<double>({out, act, weight2, nullptr, nullptr, nullptr, N, F, C}, 0);
        return dot(out, dout, out.n);
    };
    CHECK_GRADIENT(pre_act, inplace, loss);
}

static void test_grad_accumulate(size_t n) {
    const std::string shape = format("grad_accumulate n=%zu", n);
    const Doubles values = random_tensor(n);
    const Doubles stored = gradient_of(shape, n, [&](GradOf<double> grad) {
        grad_accumulate_cpu<double>({grad, values, n}, 0);
    });
    CHECK(stored == values, "%s: not the values", shape.c_str());
}

// ---- FP8 ----

// The formats as their definitions say it; e5m2 without its infinity.
static double fp8_direct(int byte, Fp8Format format = Fp8Format::E4m3) {
    const bool e5m2 = format == Fp8Format::E5m2;
    const int bits = e5m2 ? 2 : 3, ones = 1 << bits, exponent = (byte & 127) >> bits, mantissa = byte % ones;
    const double size = (byte & 127) > (e5m2 ? 123 : 126) ? NAN
                      : ldexp(exponent ? ones + mantissa : mantissa,
                              (exponent ? exponent - 1 : 0) - (e5m2 ? 16 : 9));
    return byte & 128 ? -size : size;
}

static void test_fp8_numbers(Fp8Format format) {
    auto encode = [&](float x) { return fp8_encode(x, format); };
    const int largest = format == Fp8Format::E5m2 ? 123 : 126;
    for (int i = 0; i < 256; i++) {
        const float x = fp8_decode((uint8_t)i, format);
        if ((i & 127) > largest) {
            CHECK(isnan(x) && encode(x) == 127, "byte %d: NaN", i);
            continue;
        }
        CHECK(x == fp8_direct(i, format) && !signbit(x) == (i < 128), "byte %d stands for %g", i, x);
        CHECK(encode(x) == i, "%g becomes byte %d, not %d", x, encode(x), i);
        if ((i & 127) == largest) { continue; }
        const float next = (float)fp8_direct(i + 1, format), middle = 0.5f * (x + next);    // away from zero
        const int even = i % 2 == 0 ? i : i + 1;
        CHECK(encode(middle) == even, "%g is a tie and becomes byte %d", middle, encode(middle));
        CHECK(encode(nextafterf(middle, x)) == i && encode(nextafterf(middle, next)) == i + 1,
              "beside the tie %g", middle);
    }
    const float most = format == Fp8Format::E5m2 ? 57344.0f : 448.0f;
    for (float x : {most, nextafterf(most, INFINITY), 1.1f * most, 1e30f, INFINITY}) {
        CHECK(encode(x) == largest && encode(-x) == largest + 128, "%g saturates to %d", x, encode(x));
    }
}

static void test_fp8_scale() {
    for (int k = 0; k < 2000; k++) {
        const float amax = (float)ldexp(1.0 + rand_unit(7, RAND_SAMPLE, 90, k), k % 100 - 50);
        for (int headroom : {0, 1}) {
            const float scale = fp8_scale(amax, headroom), most = amax * scale * (float)(1 << headroom);
            int exponent;
            CHECK(frexpf(scale, &exponent) == 0.5f && most <= 448.0f && 2 * most > 448.0f,
                  "amax %g: scale %g", amax, scale);
        }
    }
    for (float x : {448.0f, 3.5f, 0x1.cp-20f}) {
        CHECK(fp8_scale(x, 0) * x == 448.0f && fp8_scale(nextafterf(x, 1e9f), 0) * x == 224.0f, "%g", x);
    }
    CHECK(fp8_scale(0.0f, 1) == 1.0f && fp8_scale(1e-40f, 1) == 0x1p60f && fp8_scale(3e38f, 0) == 0x1p-60f,
          "scales of 0 and of numbers far out");
}

static void test_fp8_cast(int N, int C) {
    const size_t n = (size_t)N * C;
    const Doubles inp = random_tensor(n, 3.0);
    std::vector<uint8_t> out(n), out_t(n);
    Fp8Tensor tensor = {};
    fp8_set_scale(&tensor, 256.0f);             // 448/256 = 1.75: of +-3 many saturate
    Fp8Stats stats = {100, 10, 0, 0};
    fp8_cast_cpu<double>({out.data(), out_t.data(), &stats, &tensor, {}, nullptr, inp, nullptr,
                          Fp8Source::Plain, N, C}, 0);
    float amax = 0.0f;
    uint64_t saturated = 10;
    size_t wrong = 0;
    for (size_t i = 0; i < n; i++) {
        amax = std::max(amax, fabsf((float)inp[i]));
        saturated += fabs(inp[i] * 256.0) > 448.0;
        wrong += out[i] != fp8_encode((float)inp[i] * 256.0f) || out_t[i % C * N + i / C] != out[i];
    }
    CHECK(wrong == 0, "fp8_cast %d x %d: %zu elements are wrong", N, C, wrong);
    CHECK(float_of(stats.amax) == amax && stats.saturated == saturated && stats.elements == n + 100,
          "fp8_cast %d x %d: amax %g, not %g; %lld saturated, not %lld", N, C, float_of(stats.amax), amax,
          (long long)stats.saturated, (long long)saturated);
    std::vector<uint8_t> turned(n);
    const std::string shape = format("fp8_cast, fp8_transpose %d x %d", N, C);
    const Doubles values = doubles(n, [&](size_t i) { return fp8_direct(out[i]) / 256.0; });
    const Doubles dbias = gradient_of(shape, C, [&](GradOf<double> grad) {
        fp8_transpose_cpu<double>({turned.data(), out.data(), N, C, grad, nullptr, &tensor}, 0);
    });
    CHECK(turned == out_t, "%s: not the cast's", shape.c_str());
    const Doubles sums_of_bytes = column_sums_of(values, N, C);
    CHECK_SAME(dbias, sums_of_bytes, kExact);
    if (C % 3 == 0) {
        const Doubles qkv_dbias = gradient_of(shape, C, [&](GradOf<double> grad) {
            fp8_transpose_cpu<double>({turned.data(), out.data(), N, C, grad, nullptr, &tensor, true}, 0);
        });
        CHECK_EACH(qkv_dbias, kExact, (int)i / (C / 3) == 1 ? 0.0 : sums_of_bytes[i]);
    }

    // a weight: a call for its amax, then one with the scale for it
    stats = {};
    fp8_cast_cpu<double>({nullptr, nullptr, &stats, &tensor, {}, nullptr, inp, nullptr, Fp8Source::Weight, N,
                          C}, 0);
    CHECK(float_of(stats.amax) == amax && tensor.scale == 256.0f, "amax alone");
    fp8_cast_cpu<double>({out.data(), out_t.data(), &stats, &tensor, {}, nullptr, inp, nullptr,
                          Fp8Source::Weight, N, C}, 0);
    CHECK(tensor.scale == fp8_scale(amax, 0) && tensor.inverse * tensor.scale == 1.0f &&
              stats.saturated == 0, "a weight's scale is %g", tensor.scale);
    for (size_t i = 0; i < n; i++) { wrong += out[i] != fp8_encode((float)inp[i] * tensor.scale); }
    CHECK(wrong == 0, "%zu weights are wrong", wrong);
    std::vector<uint8_t> rows(n), columns(n);
    for (uint8_t* one : {rows.data(), columns.data()}) {
        fp8_set_scale(&tensor, 1.0f);
        fp8_cast_cpu<double>({one == rows.data() ? one : nullptr, one == rows.data() ? nullptr : one, &stats,
                              &tensor, {}, nullptr, inp, nullptr, Fp8Source::Weight, N, C}, 0);
    }
    CHECK(rows == out && columns == out_t, "a weight's rows or columns alone");

    // activations and their gradients: what the ops give, rounded, and the sums of columns
    fp8_set_scale(&tensor, 64.0f);
    for (const MlpRow& row : kMlps) {
        const int wide = act_columns(row.mlp, C);
        const Doubles pre_act = random_tensor((size_t)N * wide, 2.0);
        Doubles act(n), slope(pre_act.n);
        activate_cpu<double>({act, pre_act, N, C, row.mlp}, 0);
        activate_backward_cpu<double>({slope, inp, pre_act, N, C, row.mlp}, 0);
        for (Fp8Source source : {Fp8Source::Act, Fp8Source::Slope}) {
            const bool is_act = source == Fp8Source::Act;
            const Doubles& want = is_act ? act : slope;
            const size_t width = is_act ? C : wide;
            std::vector<uint8_t> rows(want.n), columns(want.n);
            auto cast = [&](GradOf<double> dbias) {
                stats = {};
                fp8_cast_cpu<double>({rows.data(), columns.data(), &stats, &tensor, dbias, nullptr,
                                      is_act ? pre_act : inp, is_act ? nullptr : (const double*)pre_act,
                                      source, N, C, row.mlp}, 0);
            };
            cast({});
            for (size_t i = 0; i < want.n; i++) {
                wrong += rows[i] != fp8_encode((float)want[i] * 64.0f) ||
                         columns[i % width * N + i / width] != rows[i];
            }
            CHECK(wrong == 0 && stats.elements == want.n, "%s %s %d: %zu elements are wrong", shape.c_str(),
                  row.name, (int)source, wrong);
            if (width > (size_t)C) { continue; }
            const Doubles sums = gradient_of(shape, C, cast), expected = column_sums_of(want, N, C);
            CHECK_SAME(sums, expected, 1e-12);
        }
    }
}

static void test_fp8_matmul(int M, int N, int K, Fp8Format a_format) {
    const std::string shape = format("fp8_matmul %d x %d x %d", M, N, K);
    auto bytes = [](size_t n) {
        std::vector<uint8_t> b(n);
        for (int k : random_ints(n, 248)) { b[--n] = (uint8_t)(k < 124 ? k : k + 4); }      // no NaN
        return b;
    };
    const std::vector<uint8_t> a = bytes((size_t)M * K), b = bytes((size_t)N * K);
    const Doubles bias = random_tensor(N), residual = random_tensor((size_t)M * N);
    Fp8Tensor s = {}, t = {};
    fp8_set_scale(&s, 64.0f), fp8_set_scale(&t, 0.25f);
    Doubles out((size_t)M * N);
    auto multiply = [&](double* out, GradOf<double> grad, const double* bias, const double* residual) {
        fp8_matmul_cpu<double>({.out = out, .grad = grad, .scratch = nullptr, .a = a.data(), .b = b.data(),
                                .a_tensor = &s, .b_tensor = &t, .bias = bias, .residual = residual, .M = M,
                                .N = N, .K = K, .fast = out != nullptr, .a_format = a_format}, 0);
    };
    multiply(out, {}, bias, residual);
    const Doubles grad = gradient_of(shape, out.n, [&](GradOf<double> grad) {
        multiply(nullptr, grad, nullptr, nullptr);
    });
    const Doubles product = doubles((size_t)M * N, [&](size_t i) {
        double sum = 0.0;
        for (int k = 0; k < K; k++) {
            sum += fp8_direct(a[i / N * K + k], a_format) * fp8_direct(b[i % N * K + k]);
        }
        return sum / 16;
    });
    CHECK_SAME(grad, product, 1e-13);
    CHECK_EACH(out, 1e-13, product[i] + bias[i % N] + residual[i]);
}

// A step of two tensors on three ranks; returns what the decision reads.
static void test_fp8_scales() {
    const int ranks = 3, count = 2;
    struct { double sum; Fp8Stats stats[2]; } records[ranks] = {};
    Fp8Tensor tensors[count] = {};
    double saturated = 0.0;
    auto step = [&](float amax, uint64_t over, uint32_t other_bits) {
        for (int r = 0; r < ranks; r++) {
            records[r].sum = 1.0;
            records[r].stats[0] = {1000, r == 1 ? over : 0, bits_of(r == 2 ? amax : amax / 2), 0};
            records[r].stats[1] = {500, 0, r == 1 ? other_bits : 0, 0};
        }
        fp8_scales_cpu<double>({tensors, &saturated, (char*)records, sizeof(records[0]), sizeof(double),
                                ranks, 1, count}, 0);
        CHECK(records[1].stats[0].elements == 0 && records[1].stats[1].amax == 0 &&
                  records[0].stats[0].elements == 1000, "rank 1 begins again, and knows of no other's");
        return records[0].sum;
    };
    for (int i = 0; i < 40; i++) {              // of 14 steps the largest is remembered
        const float amax = i == 3 ? 100.0f : i == 20 ? 10.0f : 1.0f;
        CHECK(step(amax, 3, bits_of(2.0f)) == 1.0 && saturated == (double)(0.001f), "step %d", i);
        const float most = i >= 3 && i < 17 ? 100.0f : i >= 20 && i < 34 ? 10.0f : 1.0f;
        CHECK(tensors[0].scale == fp8_scale(most, kFp8Headroom) && tensors[0].amax[0] == amax &&
                  tensors[0].inverse == 1.0f / tensors[0].scale && tensors[1].scale == fp8_scale(2.0f, 1),
              "step %d: scale %g", i, tensors[0].scale);
    }
    const Fp8Tensor before = tensors[1];
    CHECK(step(8.0f, 4, bits_of(INFINITY)) == INFINITY && saturated == INFINITY, "infinite");
    CHECK(memcmp(&before, &tensors[1], sizeof(before)) == 0 && tensors[0].amax[0] == 8.0f,
          "an infinite amax says nothing; another tensor's does");
    CHECK(step(8.0f, 0, bits_of(NAN)) == INFINITY && saturated == INFINITY, "NaN");
    CHECK(step(8.0f, 4, 0) == INFINITY && fabs(saturated - 4.0 / 3000) < 1e-9, "too many saturate");
}

// ---- attention ----

// What loops over tiles take for granted of a mask. Kernels that own keys ask queries(), all else keys().
static void test_mask(const Mask& mask, int T) {
    for (int q = 0; q < T; q++) {
        const Span keys = mask.keys(q).within(T);
        CHECK(keys.has(q) && keys.last == q, "query %d sees %d to %d", q, keys.first, keys.last);
        for (int k = 0; k < T; k++) {
            CHECK(mask.keys(q).has(k) == keys.has(k) && mask.queries(k).has(q) == keys.has(k),
                  "query %d, key %d", q, k);
        }
        if (q == 0) { continue; }
        CHECK(mask.first_key(q - 1) <= mask.first_key(q) && mask.last_query(q - 1) <= mask.last_query(q),
              "a bound falls at %d", q);
    }
}

// Documents of `size` tokens; in each row they begin one token earlier than in the row before.
static std::vector<Span> even_documents(int B, int T, int size) {
    std::vector<int> tokens;
    for (int b = 0; b < B; b++) {
        for (int t = 0; t < T; t++) { tokens.push_back((t + b) % size == 0); }
    }
    std::vector<Span> documents((size_t)B * T);
    find_documents(documents.data(), tokens.data(), B, T, 1, nullptr);
    return documents;
}

static void test_documents() {
    const struct { const char *tokens, *begins; bool conversations; } rows[] = {
        {"abcd", "0000", false}, {"aEbc", "0111", false}, {"Eabc", "0000", false}, {"abcE", "0003", false},
        {"EEEE", "0123", false}, {"aEEb", "0122", false},
        {"EaEbE", "00000", true}, {"aEEbE", "00222", true}, {"EEEE", "0123", true}, {"bEEE", "0023", true}};
    for (const auto& r : rows) {
        const int T = (int)strlen(r.tokens);
        const std::vector<int> tokens(r.tokens, r.tokens + T);
        std::vector<Span> found((size_t)T);
        const char conversations = r.conversations;
        find_documents(found.data(), tokens.data(), 1, T, 'E', &conversations);
        for (int t = 0; t < T; t++) {
            const char* begin = r.begins + t;
            const int last = (int)(strrchr(r.begins, *begin) - r.begins);
            CHECK(found[t].first == *begin - '0' && found[t].last == last, "%s at %d: %d to %d", r.tokens, t,
                  found[t].first, found[t].last);
        }
    }
    for (int size : {1, 2, 33, 64, 70, 71}) {
        const std::vector<Span> documents = even_documents(2, 70, size);
        for (int window : {0, 1, 20, 64}) {
            for (int b : {0, 1}) { test_mask(Mask{window, documents.data()}.row(b, 70), 70); }
        }
    }
}

static void test_attention(int B, int T, int NH, int NKV, int HS, int window = 0, int document = 0) {
    const std::string shape = format("attention B=%d T=%d NH=%d NKV=%d HS=%d window %d document %d", B, T, NH,
                                     NKV, HS, window, document);
    const std::vector<Span> documents = even_documents(B, T, document > 0 ? document : T);
    const Mask mask = {window, document > 0 ? documents.data() : nullptr};
    const size_t C = (size_t)NH * HS, n = (size_t)B * T * C, rows = (size_t)B * NH * T;
    const size_t width = C + 2 * NKV * HS, all = (size_t)B * T * width;         // of qkv: a row, and all
    Doubles qkv = random_tensor(all, 1.5), out(n), lse(rows);
    auto forward = [&] { attention_forward_cpu<double>({out, lse, qkv, B, T, NH, NKV, HS, mask}, 0); };
    forward();
    Doubles dout = random_tensor(n), dqkv(all), scratch(rows);
    attention_backward_cpu<double>({dqkv, scratch, dout, out, qkv, lse, B, T, NH, NKV, HS, mask}, 0);

    // as bytes: these numbers, rounded
    std::vector<uint8_t> bytes(all);
    Fp8Tensor tensor = {};
    Fp8Stats stats = {};
    fp8_set_scale(&tensor, 64.0f);
    attention_backward_cpu<double>({nullptr, scratch, dout, out, qkv, lse, B, T, NH, NKV, HS, mask,
                                    bytes.data(), &tensor, &stats}, 0);
    size_t wrong = 0;
    for (size_t i = 0; i < all; i++) { wrong += bytes[i] != fp8_encode((float)dqkv[i] * 64.0f); }
    CHECK(wrong == 0 && stats.elements == all, "%s: %zu bytes of %lld are wrong", shape.c_str(), wrong,
          (long long)stats.elements);
    Doubles dqk(all);                           // bytes of v alone
    std::vector<uint8_t> of_v(all);
    stats = {};
    attention_backward_cpu<double>({dqk, scratch, dout, out, qkv, lse, B, T, NH, NKV, HS, mask,
                                    of_v.data(), &tensor, &stats, true}, 0);
    for (size_t i = 0; i < all; i++) {
        const bool is_v = i / HS % (NH + 2 * NKV) >= (size_t)(NH + NKV);
        wrong += is_v ? of_v[i] != bytes[i] : of_v[i] != 0 || dqk[i] != dqkv[i];
    }
    CHECK(wrong == 0 && stats.elements == (size_t)B * T * NKV * HS, "%s: bytes of v alone", shape.c_str());
    auto loss = [&] { forward(); return dot(out, dout, n); };
    CHECK_GRADIENT(qkv, dqkv, loss);
    if (NKV < NH) { return; }

    // The keys' columns of dqkv sum to 0 but for rounding, and with of_qkv to 0.
    const Doubles dbias = gradient_of(shape, 3 * C, [&](GradOf<double> grad) {
        bias_backward_cpu<double>({grad, nullptr, dqkv, B * T, (int)(3 * C), true}, 0);
    });
    const Doubles sums = column_sums_of(dqkv, B * T, (int)(3 * C));
    CHECK_SAME(dbias, sums, kExact);
    CHECK(std::count(&dbias[C], &dbias[2 * C], 0.0) == (long)C, "%s: keys' dbias", shape.c_str());
}

// A query's window is all that there is: what the last of a row that begins with it has, to the bit, and what
// decoding has.
static void test_window(int T, int window) {
    constexpr int NH = 4, NKV = 2, HS = 8, C = NKV * HS;
    constexpr size_t width = (size_t)(NH + 2 * NKV) * HS, heads = (size_t)NH * HS;
    Doubles qkv = random_tensor(T * width, 1.5), out(T * heads), lse((size_t)NH * T);
    Doubles alone(T * heads), lse_alone((size_t)NH * T);
    Doubles keys((size_t)T * C), values((size_t)T * C), next(heads);
    attention_forward_cpu<double>({out, lse, qkv, 1, T, NH, NKV, HS, {window}}, 0);
    cache_store_cpu<double>({keys, values, qkv, 1, T, T, NH, NKV, HS}, 0);
    size_t differ = 0;
    double worst = 0.0;
    for (int t = 0; t < T; t++) {
        const int first = std::max(0, t - window + 1), count = t - first + 1;
        attention_forward_cpu<double>({alone, lse_alone, &qkv[first * width], 1, count, NH, NKV, HS}, 0);
        decode_attention_cpu<double>({next, keys, values, &qkv[t * width], &t, 1, T, NH, NKV, HS, {window}},
                                     0);
        for (size_t i = 0; i < heads; i++) {
            differ += out[t * heads + i] != alone[(count - 1) * heads + i];
            worst = std::max(worst, fabs(next[i] - out[t * heads + i]));
        }
        for (int h = 0; h < NH; h++) { differ += lse[(size_t)h * T + t] != lse_alone[(h + 1) * count - 1]; }
    }
    CHECK(differ == 0 && worst < 1e-12, "T=%d window %d: %zu differ, decoding by %g", T, window, differ,
          worst);
}

// Attention and its gradients of a document in a row are those of a row of its own, to the bit.
static void test_packed(int T, int window) {
    const std::string shape = format("packed documents, T=%d window %d", T, window);
    constexpr int NH = 4, NKV = 2, HS = 8;
    constexpr size_t width = (size_t)(NH + 2 * NKV) * HS, heads = (size_t)NH * HS;
    Doubles qkv = random_tensor(T * width, 1.5), out(T * heads), lse((size_t)NH * T), scratch((size_t)NH * T);
    Doubles dout = random_tensor(T * heads), dqkv(T * width), own_out(T * heads), own_dqkv(T * width);
    const int cuts[] = {0, 1, 2, T / 3, T - 5, T};
    std::vector<Span> documents;
    for (int k = 0; k < 5; k++) { documents.resize((size_t)cuts[k + 1], Span{cuts[k], cuts[k + 1] - 1}); }
    const Mask mask = {window, documents.data()};
    attention_forward_cpu<double>({out, lse, qkv, 1, T, NH, NKV, HS, mask}, 0);
    attention_backward_cpu<double>({dqkv, scratch, dout, out, qkv, lse, 1, T, NH, NKV, HS, mask}, 0);
    for (int k = 0; k < 5; k++) {
        const int n = cuts[k + 1] - cuts[k];
        double *in = &qkv[cuts[k] * width], *its_out = &own_out[cuts[k] * heads];
        attention_forward_cpu<double>({its_out, lse, in, 1, n, NH, NKV, HS, {window}}, 0);
        attention_backward_cpu<double>({&own_dqkv[cuts[k] * width], scratch, &dout[cuts[k] * heads], its_out,
                                        in, lse, 1, n, NH, NKV, HS, {window}}, 0);
    }
    CHECK_SAME(out, own_out, 0.0);
    CHECK_SAME(dqkv, own_dqkv, 0.0);
}

static bool all_finite(const Floats& x) {
    return std::all_of(x.all.begin(), x.all.end(), [](float value) { return isfinite(value); });
}

// Scores of thousands, whose exp is inf: one key takes all the weight.
static void test_attention_large() {
    const int T = 70, HS = 20;
    Floats qkv = random_tensor<float>((size_t)T * 3 * HS, 100.0), dout = random_tensor<float>((size_t)T * HS);
    Floats out((size_t)T * HS), lse(T), dqkv((size_t)T * 3 * HS), scratch(T);
    attention_forward_cpu<float>({out, lse, qkv, 1, T, 1, 1, HS}, 0);
    attention_backward_cpu<float>({dqkv, scratch, dout, out, qkv, lse, 1, T, 1, 1, HS}, 0);
    bool bounded = true;
    for (size_t i = 0; i < out.n; i++) { bounded = bounded && fabsf(out[i]) <= 101.01f; }
    CHECK(all_finite(dqkv) && all_finite(lse) && bounded, "inf, NaN, or not an average of values");
}

// ---- classifier and loss ----

static void test_classifier(int N, int V, int Vp, float softcap = 0.0f) {
    const std::string shape = format("classifier N=%d V=%d Vp=%d softcap %g", N, V, Vp, softcap);
    const float dloss = 0.25f, loss_scale = 8.0f, one = 1.0f;
    Doubles logits = random_tensor((size_t)N * Vp, 3.0), losses(N), losses2(N);
    std::vector<int> targets = random_ints(N, V);
    targets[0] = V - 1;
    auto classify = [&](double* in_place, double* losses, const float* scale, ClassifierMode mode) {
        classifier_cpu<double>({in_place, losses, targets.data(), dloss, scale, N, V, Vp, mode, nullptr,
                                nullptr, softcap}, 0);
    };
    const Doubles before = logits;
    classify(logits, losses, nullptr, ClassifierMode::LossOnly);
    CHECK(logits == before, "%s: LossOnly changes the logits", shape.c_str());

    // What is done to logits: the gradient. Padding has none, and its values do not matter.
    Doubles dlogits = logits, scaled_by_one = logits, not_scaled = logits;
    Doubles other_padding = doubles(logits.n, [&](size_t i) {
        return (int)(i % Vp) < V ? logits[i] : i % 2 ? NAN : 1e9;
    });
    const ClassifierMode both = ClassifierMode::LossAndGrad;
    classify(dlogits, losses2, &loss_scale, both);
    CHECK(losses2 == losses, "%s: the losses depend on the mode", shape.c_str());
    auto loss = [&] {
        classify(logits, losses2, nullptr, ClassifierMode::LossOnly);
        return dloss * loss_scale * dot(losses2, doubles(N, [](size_t) { return 1.0; }), N);
    };
    CHECK_GRADIENT(logits, dlogits, loss);
    classify(other_padding, losses2, &loss_scale, both);
    CHECK(other_padding == dlogits && losses2 == losses, "%s: the padding's values matter", shape.c_str());
    classify(scaled_by_one, losses2, &one, both);
    classify(not_scaled, losses2, nullptr, both);
    CHECK(scaled_by_one == not_scaled, "%s: no loss scale is not a loss scale of 1", shape.c_str());

    // As bytes, which are multiplied by powers of two alone: the very numbers, rounded.
    std::vector<uint8_t> bytes(logits.n);
    Fp8Tensor tensor = {};
    classifier_cpu<double>({logits, losses2, targets.data(), dloss, &loss_scale, N, V, Vp, both, bytes.data(),
                            &tensor, softcap}, 0);
    size_t wrong = 0;
    for (size_t i = 0; i < logits.n; i++) {
        wrong += bytes[i] != fp8_encode((float)dlogits[i] / tensor.inverse, Fp8Format::E5m2);
    }
    CHECK(wrong == 0 && tensor.inverse == dloss * loss_scale / kFp8Dlogits && losses2 == losses &&
              logits == before, "%s: %zu bytes are wrong, times %g", shape.c_str(), wrong, tensor.inverse);
}

// Targets that are not counted: as if these rows were not there, but for zeros in their gradients.
static void test_mark_likeliest() {
    const double logits[] = {1, 3, 3, 9, 3, 1, 3, 9, -1, -2, -3, 9};       // (3,4), the last column padding
    const int targets[] = {1, 2, 0};
    int likeliest[] = {7, 7, 7};
    mark_likeliest_cpu<double>({likeliest, logits, targets, 3, 3, 4}, 0);
    CHECK(likeliest[0] == 1 && likeliest[1] == 0 && likeliest[2] == 1, "%d %d %d", likeliest[0], likeliest[1],
          likeliest[2]);
}

static void test_classifier_uncounted(float softcap) {
    const int N = 6, V = 61, Vp = 64;
    const float scale = 8.0f;
    const Doubles logits = random_tensor((size_t)N * Vp, 3.0);
    std::vector<int> targets = random_ints(N, V), masked = targets;
    masked[0] = masked[3] = masked[5] = -1;
    for (ClassifierMode mode : {ClassifierMode::LossOnly, ClassifierMode::LossAndGrad}) {
        Doubles all = logits, some = logits, losses(N), counted(N);
        classifier_cpu<double>({all, losses, targets.data(), 0.25f, &scale, N, V, Vp, mode, nullptr, nullptr,
                                softcap}, 0);
        classifier_cpu<double>({some, counted, masked.data(), 0.25f, &scale, N, V, Vp, mode, nullptr, nullptr,
                                softcap}, 0);
        const bool grad = mode == ClassifierMode::LossAndGrad;
        size_t wrong = 0;
        for (size_t i = 0; i < logits.n; i++) {
            wrong += some[i] != (masked[i / Vp] >= 0 ? all[i] : grad ? 0.0 : logits[i]);
        }
        for (int n = 0; n < N; n++) { wrong += counted[n] != (masked[n] >= 0 ? losses[n] : 0.0); }
        CHECK(wrong == 0, "mode %d, softcap %g: %zu values are wrong", (int)mode, softcap, wrong);
    }
    std::vector<uint8_t> bytes(logits.n, 0xFF);
    Fp8Tensor tensor = {};
    Doubles same = logits, losses(N);
    classifier_cpu<double>({same, losses, masked.data(), 0.25f, &scale, N, V, Vp, ClassifierMode::LossAndGrad,
                            bytes.data(), &tensor, softcap}, 0);
    size_t wrong = 0;
    for (size_t i = 0; i < logits.n; i++) { wrong += masked[i / Vp] < 0 && bytes[i] != 0; }
    CHECK(wrong == 0 && tensor.inverse == 2.0f / kFp8Dlogits, "%zu bytes are not 0, inverse %g", wrong,
          tensor.inverse);
}

static void test_classifier_large() {
    const int N = 6, V = 509, Vp = 512;
    Floats logits = random_tensor<float>((size_t)N * Vp, 1e4), losses(N);
    for (int v = 0; v < V; v++) {
        logits[v] = v == 3 ? 1e4f : -1e4f;                      // row 0: certain, right
        logits[Vp + v] = v == 4 ? 1e4f : -1e4f;                 // row 1: certain, wrong
        logits[2 * Vp + v] = -1e4f;                             // row 2: undecided
    }
    std::vector<int> targets(N, 3);
    const ClassifierMode mode = ClassifierMode::LossAndGrad;
    classifier_cpu<float>({logits, losses, targets.data(), 1.0f, nullptr, N, V, Vp, mode}, 0);
    CHECK(all_finite(logits) && all_finite(losses), "inf or NaN");
    CHECK(losses[0] == 0 && logits[3] == 0, "certain and right: %g", losses[0]);
    CHECK(losses[1] == 2e4f && logits[Vp + 4] == 1 && logits[Vp + 3] == -1, "and wrong: %g", losses[1]);
    CHECK(fabs(losses[2] - log(509.0)) <= 1e-5, "undecided: %g", losses[2]);

    // Far beyond a softcap: the losses have a bound, and the gradients are 0.
    logits = random_tensor<float>((size_t)N * Vp, 1e4, 2e4);
    for (int v = 0; v < V; v++) { logits[v] = v == 3 ? INFINITY : -INFINITY; }
    classifier_cpu<float>({logits, losses, targets.data(), 1.0f, nullptr, N, V, Vp, mode, nullptr, nullptr,
                           2.0f}, 0);
    CHECK(fabs(losses[0] - log(1 + 508 * exp(-4.0))) <= 1e-5 && fabs(losses[1] - log(509.0)) <= 1e-5,
          "beyond a softcap: %g %g", losses[0], losses[1]);
    CHECK(std::all_of((float*)logits, logits + logits.n, [](float x) { return x == 0; }), "with gradients");
}

// ---- update ----

static UpdateState update_state(float loss_scale) {
    UpdateState state = {};
    state.loss_scale = loss_scale;
    return state;
}

// One rank, one bucket, one chunk, one lane.
static void decide(UpdateState* state, double squares, float loss, float max_norm,
                   const UpdatePolicy& policy) {
    const double record[] = {squares, loss};
    const ChunkRange range = {1, 1, 0};
    double mean = 7;
    update_decision_cpu<double>({state, &mean, (const char*)record, sizeof(record), 8, 1, 1, &range, 1,
                                 max_norm, policy}, 0);
    CHECK(mean == loss || (isnan(mean) && isnan(loss)), "loss %g, not the lane's %g", mean, loss);
}

static void test_update_decision() {
    const UpdatePolicy fixed = {false, 3, 65536.0f}, dynamic = {true, 3, 16.0f};
    for (double norm : {0.01, 3.0, 1e6}) {
        for (double limit : {0.0, 0.5, 2.0}) {                  // no clipping, to half, not reached
            UpdateState state = update_state(4.0f);
            decide(&state, 16.0 * norm * norm, 0.5f, (float)(limit * norm), fixed);
            const double clip = limit == 0.5 ? 0.5 * norm / (norm + kClipEps) : 1.0;
            CHECK(fabs(state.norm / norm - 1) <= 1e-7 && fabs(4 * state.grad_scale / clip - 1) <= 2e-7,
                  "norm %g to %g times that: %g, scaled by %.8g, expected %.8g", norm, limit, state.norm,
                  4 * state.grad_scale, clip);
        }
    }
    const struct {              // one run: steps of these squares and losses, and the state behind them
        const char* what;
        int steps;
        double squares;
        float loss;
        UpdatePolicy policy;
        float scale;
        int skip, in_a_row, good;
        long long t;
    } rows[] = {
        {"2 good steps", 2, 1.0, 1, dynamic, 4.0f, 0, 0, 2, 2},
        {"a third doubles the scale", 1, 1.0, 1, dynamic, 8.0f, 0, 0, 0, 3},
        {"inf is skipped and halves it", 1, INFINITY, 1, dynamic, 4.0f, 1, 1, 0, 3},
        {"NaN does so, too", 1, NAN, 1, dynamic, 2.0f, 1, 2, 0, 3},
        {"it does not go below 1", 3, INFINITY, 1, dynamic, 1.0f, 1, 5, 0, 3},
        {"good again", 1, 1.0, 1, dynamic, 1.0f, 0, 0, 1, 4},
        {"a loss that is not finite", 1, 1.0, -INFINITY, dynamic, 1.0f, 1, 1, 0, 4},
        {"a loss that is no number", 1, 1.0, NAN, dynamic, 1.0f, 1, 2, 0, 4},
        {"it stops at its maximum", 30, 1.0, 1, dynamic, 16.0f, 0, 0, 0, 34},
        {"a fixed one stays", 5, 1.0, 1, fixed, 16.0f, 0, 0, 5, 39},
        {"a fixed one stays after NaN", 1, NAN, 1, fixed, 16.0f, 1, 1, 0, 39}};
    UpdateState state = update_state(4.0f);
    for (const auto& r : rows) {
        for (int i = 0; i < r.steps; i++) { decide(&state, r.squares, r.loss, 1.0f, r.policy); }
        CHECK(state.loss_scale == r.scale && state.skip == r.skip && state.skipped_in_a_row == r.in_a_row &&
              state.good_steps == r.good && state.t == r.t,
              "%s: scale %g, skip %d, %d in a row, %d good, t %lld", r.what, state.loss_scale, state.skip,
              state.skipped_in_a_row, state.good_steps, state.t);
    }
}

// Losses and norms that are not what the last 128 were.
static void test_unusual() {
    const UpdatePolicy none = {false, 1, 1.0f}, both = {false, 1, 1.0f, 3.0f, 3.0f};
    const UpdatePolicy of_losses = {false, 1, 1.0f, 3.0f, 0.0f}, of_norms = {false, 1, 1.0f, 0.0f, 3.0f};
    UpdateState state = update_state(1.0f);
    auto step = [&](float loss, float norm, const UpdatePolicy& policy) {
        decide(&state, (double)norm * norm, loss, 0.0f, policy);
        return state.skip;
    };
    auto usual = [&](int steps, float mean) {                   // the deviation is 1
        for (int i = 0; i < steps; i++) { step(mean + (i % 2 ? 1 : -1), mean + (i % 2 ? 1 : -1), both); }
    };
    usual(127, 2.0f);
    CHECK(step(100.0f, 3.0f, both) == SKIP_NO && state.t == 128, "127 values are not enough to judge by");
    CHECK(step(100.0f, 100.0f, both) != SKIP_NO && state.t == 128, "128 are");
    state = update_state(1.0f);
    usual(50, 9.0f);                                            // forgotten after 128 more
    usual(128, 2.0f);
    const UpdateState full = state;
    const struct { float loss, norm; UpdatePolicy policy; int skip; float loss_score, norm_score; } rows[] = {
        {5.0f, 4.0f, both, SKIP_NO, 3, 2}, {5.00001f, 2.0f, both, SKIP_LOSS, 3.00001f, 0},
        {2.0f, 5.0f, both, SKIP_NO, 0, 3}, {2.0f, 5.00001f, both, SKIP_NORM, 0, 3.00001f},
        {6.0f, 7.0f, both, SKIP_LOSS, 4, 5}, {-98.0f, 0.0f, both, SKIP_NO, -100, -2},
        {6.0f, 7.0f, of_losses, SKIP_LOSS, 4, 0}, {2.0f, 7.0f, of_losses, SKIP_NO, 0, 0},
        {6.0f, 7.0f, of_norms, SKIP_NORM, 0, 5}, {6.0f, 2.0f, of_norms, SKIP_NO, 0, 0},
        {6.0f, 7.0f, none, SKIP_NO, 0, 0}, {6.0f, INFINITY, both, SKIP_NOT_FINITE, 4, INFINITY}};
    for (const auto& r : rows) {
        state = full;
        step(r.loss, r.norm, r.policy);
        CHECK(state.skip == r.skip && fabs(state.loss_score - r.loss_score) <= 1e-6 &&
              (state.norm_score == r.norm_score || fabs(state.norm_score - r.norm_score) <= 1e-6),
              "loss %g, norm %g: skip %d by %g and %g, expected %d by %g and %g", r.loss, r.norm, state.skip,
              state.loss_score, state.norm_score, r.skip, r.loss_score, r.norm_score);
        const bool done = r.skip == SKIP_NO;
        CHECK(state.losses.count == full.losses.count + done && state.norms.count == full.norms.count + done,
              "loss %g, norm %g: skip %d, but the windows say otherwise", r.loss, r.norm, state.skip);
    }
    state = update_state(1.0f);
    for (int i = 0; i < 200; i++) { step(0.1f, 0.1f, both); }
    CHECK(step(0.2f, 0.2f, both) == SKIP_NO, "where all are equal, nothing is unusual");
}

// Ten updates beside the formula, element by element, in two rows with other things between them; the third
// is skipped.
template <class Real> static void test_adamw(bool with_master, double decay, double tolerance) {
    const std::string shape = format("adamw %d bits%s, decay %g", (int)sizeof(Real) * 8,
                                     with_master ? ", master" : "", decay);
    const size_t n = 24, decays = 16, params_row = 40, grads_row = 32;
    const double lr = 1e-2, beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
    const Rows rows = {2, params_row * sizeof(Real), grads_row * sizeof(Real), 100};
    Tensor<Real> params = random_tensor<Real>(2 * params_row), master = random_tensor<Real>(2 * n);
    Tensor<Real> m(2 * n), v(2 * n), p(2 * n);
    Doubles p_expected(2 * n), m_expected(2 * n), v_expected(2 * n);
    for (size_t i = 0; i < 2 * n; i++) {
        Real& param = params[i / n * params_row + i % n];
        p_expected[i] = with_master ? master[i] : param;
        if (with_master) { param = (Real)NAN; }         // the master decides, not what params held before
        m[i] = v[i] = 0;
        m_expected[i] = v_expected[i] = 0.0;
    }
    const Tensor<Real> params_before = params;
    UpdateState state = update_state(1.0f);
    for (int step = 1; step <= 10; step++) {
        Tensor<Real> grads = random_tensor<Real>(2 * grads_row, 0.1);
        state.grad_scale = step % 2 ? 0.5f : 1.0f;
        state.skip = step == 3;                         // changes nothing
        state.t += !state.skip;
        if (state.skip) { grads[3] = (Real)NAN; }
        for (size_t i = 0; i < 2 * n && !state.skip; i++) {
            const double g = (double)grads[i / n * grads_row + i % n] * state.grad_scale;
            double &p = p_expected[i], &m = m_expected[i], &v = v_expected[i];
            m = beta1 * m + (1 - beta1) * g;
            v = beta2 * v + (1 - beta2) * g * g;
            const double m_hat = m / (1 - pow(beta1, state.t)), v_hat = v / (1 - pow(beta2, state.t));
            p -= lr * (m_hat / (sqrt(v_hat) + eps) + (i % n < decays ? decay * p : 0.0));
        }
        adamw_update_cpu<Real>({(Real*)params, false, with_master ? (Real*)master : nullptr, {(Real*)m},
                                {(Real*)v}, {.data = (Real*)grads}, &state, n, rows, decay, lr, beta1, beta2,
                                eps, RoundKey{}, 0, decays}, 0);
    }
    bool beside = true;
    for (size_t i = 0; i < params.n; i++) {
        if (i % params_row < n) { p[i / params_row * n + i % params_row] = params[i]; }
        else { beside = beside && params[i] == params_before[i]; }
    }
    CHECK_SAME(m, m_expected, tolerance);
    CHECK_SAME(v, v_expected, tolerance);
    CHECK_SAME(p, p_expected, tolerance);
    CHECK(!with_master || master == p, "%s: the master copy", shape.c_str());
    CHECK(beside, "%s: written between rows", shape.c_str());
}

// bf16 states are what an fp32 update of them gives, rounded stochastically: each tensor and element by its
// own draw. The weights come from before rounding.
static void test_bf16_state() {
    const std::string shape = "bf16 states";
    const size_t n = 24, first = 1000;
    const Rows rows = {2, n * sizeof(float), n * sizeof(float), 40};
    const RoundKey key = {1337, 7, 0, kRoundParams};
    UpdateState state = update_state(1.0f);
    state.t = 3;
    Floats grads = random_tensor<float>(2 * n), wide_m(2 * n), wide_v(2 * n);
    std::vector<uint16_t> m(2 * n), v(2 * n);
    for (size_t i = 0; i < 2 * n; i++) {
        m[i] = bf16_round_nearest(0.01f * (float)i - 0.2f), wide_m[i] = bf16_to_float(m[i]);
        v[i] = bf16_round_nearest(1e-4f * (float)i), wide_v[i] = bf16_to_float(v[i]);
    }
    typedef std::vector<uint16_t> Halves;
    auto expect = [&](const Halves& got, const Floats& wide, uint32_t tensor, const char* what) {
        int wrong = 0, nearest = 0;
        for (size_t i = 0; i < 2 * n; i++) {
            const RoundKey own = {key.seed, key.step, key.micro, tensor};
            const uint32_t draw = round_bits16(own, first + i / n * rows.first + i % n);
            wrong += got[i] != bf16_round_stochastic(wide[i], draw);
            nearest += got[i] == bf16_round_nearest(wide[i]);
        }
        CHECK(wrong == 0 && nearest < 2 * (int)n, "%s: %d of %s are wrong", shape.c_str(), wrong, what);
    };
    auto update = [&](Floats& params, StateOf<float> m, StateOf<float> v) {
        adamw_update_cpu<float>({(float*)params, false, nullptr, m, v, {.data = (float*)grads}, &state, n,
                                 rows, 0.1, 1e-2, 0.9, 0.95, 1e-8, key, first}, 0);
    };
    auto momentum = [&](Floats& updates, StateOf<float> m) {
        muon_momentum_cpu<float>({updates, m, {.data = (float*)grads}, &state, n, n, rows, 0.95, key, first},
                                 0);
    };
    Floats params = random_tensor<float>(2 * n), same = params;
    update(params, {(float*)wide_m}, {(float*)wide_v});
    update(same, {m.data(), true}, {v.data(), true});
    expect(m, wide_m, kRoundM, "m");
    expect(v, wide_v, kRoundV, "v");
    CHECK(params == same, "%s: other weights", shape.c_str());
    for (size_t i = 0; i < 2 * n; i++) { wide_m[i] = bf16_to_float(m[i]); }
    momentum(params, {(float*)wide_m});
    momentum(same, {m.data(), true});
    expect(m, wide_m, kRoundM, "Muon's momentum");
    CHECK(params == same, "%s: other updates", shape.c_str());
}

// ---- Muon ----

// Two parts of each of two layers, with something between them that stays. What counts of a matrix is its
// direction, and zeros stay zeros; values are test_gpt2's.
static void test_orthogonalise(int rows, int cols) {
    const std::string shape = format("muon %d x %d", rows, cols);
    const size_t k = (size_t)std::min(rows, cols), size = (size_t)rows * cols, stride = 2 * size + 12;
    const MuonPlaces places = {2, 2, {3, 3 + size + 4}, stride};
    Floats inp(2 * stride), out(inp), x(4 * size), y(4 * size), gram(4 * k * k), poly(4 * k * k);
    for (size_t i = 0; i < inp.n; i++) { inp[i] = out[i] = 3.25f; }
    for (int m = 0; m < 4; m++) {
        const Floats values = random_tensor<float>(size, 1e-2);
        std::copy((const float*)values, (const float*)values + size, inp + places.of(m));
    }
    const Floats start = inp;
    MuonOrthogonaliseOf<float, float> a = {out, inp, x, y, gram, poly, nullptr, places, rows, cols, 5, 12};
    auto changes = [&](double factor) {         // of the elements that are a matrix's
        for (size_t i = 0; i < inp.n; i++) { inp[i] = out[i] == 3.25f ? 3.25f : (float)(start[i] * factor); }
        muon_orthogonalise_cpu<float>(a, 0);
    };
    muon_orthogonalise_cpu<float>(a, 0);
    const Floats result = out;
    CHECK(inp == start, "%s: its input has changed", shape.c_str());
    const auto beside = std::count((float*)out, out + out.n, 3.25f);
    CHECK((size_t)beside == out.n - 4 * size, "%s: other numbers between matrices", shape.c_str());
    changes(0x1p-70);
    CHECK(out == result, "%s: times a power of two: other bits", shape.c_str());
    changes(0.0);
    CHECK((size_t)std::count((float*)out, out + out.n, 0.0f) == 4 * size, "%s: zeros change", shape.c_str());
    inp = start, a.out = inp;                   // where it stood
    muon_orthogonalise_cpu<float>(a, 0);
    CHECK(inp == result, "%s: in place: other bits", shape.c_str());
}

// With a master copy, which decides; the CPU build has none.
static void test_muon_update() {
    const std::string shape = "muon_update";
    Doubles master = random_tensor(6), params(10), update = random_tensor(8), stored(6);
    const Doubles before = master;
    UpdateState state = update_state(1.0f);
    muon_update_cpu<double>({(double*)params, (double*)master, update, &state, 3, 4,
                             {2, 5 * sizeof(double), 0, 0}, 0.5, 0.1, RoundKey{}, 0}, 0);
    for (size_t i = 0; i < 6; i++) { stored[i] = params[i / 3 * 5 + i % 3]; }
    CHECK_EACH(master, 1e-15, before[i] * 0.95 - 0.1 * update[i / 3 * 4 + i % 3]);
    CHECK(stored == master && isnan(params[3]), "%s: params are not the master's", shape.c_str());
}

// ---- float ----

// exp and GELU in float against double, over their whole range.
static void test_float_functions() {
    double worst_exp = 0.0, worst_gelu = 0.0, worst_derivative = 0.0;
    for (double x0 = -86.9; x0 < 87.9; x0 += 0.00173) {
        const float x = (float)x0;
        worst_exp = std::max(worst_exp, fabs(exp_cpu(x) / exp((double)x) - 1.0));
    }
    for (double x0 = -6.0; x0 < 6.0; x0 += 0.00037) {
        const float x = (float)x0;
        worst_gelu = std::max(worst_gelu, fabs(gelu(x) - gelu((double)x)) / std::max(1.0, fabs((double)x)));
        worst_derivative = std::max(worst_derivative, fabs(gelu_derivative(x) - gelu_derivative((double)x)));
    }
    printf("float: exp off by %.1e (relative), gelu by %.1e, its derivative by %.1e; a rounding: 6.0e-8\n",
           worst_exp, worst_gelu, worst_derivative);
    CHECK(worst_exp <= 1.3e-7, "exp is off by %.2e", worst_exp);
    CHECK(worst_gelu <= 2e-7, "gelu is off by %.2e", worst_gelu);
    CHECK(worst_derivative <= 4e-7, "gelu's derivative is off by %.2e", worst_derivative);
    const float inf = (float)INFINITY;
    const struct { float x, want; } exps[] = {{0, 1}, {-88, 0}, {-1e30f, 0}, {-inf, 0}, {1e30f, inf},
                                              {inf, inf}};
    for (auto [x, want] : exps) { CHECK(exp_cpu(x) == want, "exp of %g is %g", x, exp_cpu(x)); }
    CHECK(gelu(100.0f) == 100.0f && gelu(-100.0f) == 0.0f && gelu(1e9f) == 1e9f, "gelu far out");
    CHECK(gelu_derivative(100.0f) == 1.0f && gelu_derivative(-100.0f) == 0.0f, "gelu's derivative far out");
    CHECK(isnan(exp_cpu((float)NAN)) && isnan(gelu((float)NAN)), "exp and gelu of NaN");
}

int main() {
    TEST("encoder") {
        test_encoder(2, 33, 40, 512, 40, 509);
        test_encoder(1, 1, 1, 128, 7, 100);
        test_encoder(9, 65, 65, 128, 70, 3);        // three tokens, nearly 200 positions each: split buckets
        test_encoder(2, 100, 128, 128, 5, 1);
        for (int T : {128, 129}) { test_encoder(1, T, T, 128, 3, 1); }      // a segment, and one more
        check_dies("token 4 of 4", [] { Buckets({0, 1, 4}, 4); }, {"token 4", "position 2", "0 to 3"});
        check_dies("a negative token", [] { Buckets({-1}, 4); }, {"token -1", "position 0"});
        test_encoder_positions();
    }
    TEST("activations") {
        for (const MlpRow& row : kMlps) { test_activation(row.mlp, 33, 70), test_activation(row.mlp, 1, 1); }
        test_silu_far_out();
    }
    TEST("rotation") {
        for (int k = 0; k < 3; k++) {
            test_rotate(2, 9, 3, 1, 20, k > 0, k > 1);
            test_rotate(1, 1, 1, 1, 2, k > 0, k > 1);
            test_rotate(3, 5, 4, 2, 80, k > 0, k > 1);
        }
    }
    TEST("value embeddings") {
        test_value_embed(1, 1, 1, 1, 2);
        test_value_embed(7, 3, 4, 2, 6);
        test_value_embed(300, 2, 3, 1, 4);          // tokens that are split
        test_value_embed(20, 50, 4, 4, 16);
    }
    TEST("norms") {
        for (int norms : {1, 2}) {
            test_norm(NormKind::Layer, 5, 40, norms, true);
            for (bool weights : {true, false}) { test_norm(NormKind::Rms, 5, 40, norms, weights); }
        }
    }
    TEST("matmul") {
        test_matmul(33, 40, 67);
        test_matmul(1, 40, 7);
        test_matmul(1, 1, 1);
        test_matmul(5, 300, 35);                    // sums longer than gemm_cpu takes in one piece: forward,
        test_matmul(6, 20, 509);                    // backward to the input,
        test_matmul(270, 9, 18);                    // backward to the weight
        for (const MlpRow& row : kMlps) { test_mlp(row.mlp, 5, 12, 23); }
        test_grad_accumulate(333);
    }
    TEST("attention") {
        for (int window : {0, 1, 2, 63, 64, 65, 69, 70, 71, 1 << 24}) { test_mask({window}, 70); }
        test_attention(2, 33, 2, 2, 20);
        test_attention(1, 1, 2, 2, 20);
        test_attention(1, 64, 1, 1, 3);
        test_attention(1, 65, 1, 1, 8);
        test_attention(2, 130, 1, 1, 4);
        test_attention(1, 9, 3, 3, 80);
        test_attention(2, 17, 6, 2, 5);
        test_attention(1, 65, 4, 1, 8);
        test_attention(2, 70, 3, 1, 20);
        for (int window : {1, 2, 63, 64, 65, 69, 70}) { test_attention(1, 70, 2, 1, 4, window); }
        for (int window : {1, 5, 63, 64, 65, 127, 128, 129, 130}) { test_window(130, window); }
        test_documents();
        for (int size : {1, 5, 64, 70}) { test_attention(2, 70, 2, 1, 4, 0, size); }
        test_attention(2, 40, 2, 2, 4, 7, 16);
        for (int window : {0, 1, 40}) { test_packed(130, window); }
        for (int keys : {0, -1, 5, 7}) {
            CHECK(!attention_heads_error(6, keys).empty(), "6 heads, %d of keys: taken", keys);
        }
        for (int keys : {1, 2, 6}) { CHECK_TEXT(attention_heads_error(6, keys), ""); }
        const struct { double p; uint32_t dropped; } rows[] = {     // a p that is given drops, and not all
            {0.0, 0}, {1e-9, 1}, {0.1, 6554}, {1 - 1e-9, 65535}};
        for (const auto& r : rows) { CHECK_IS(dropout_of(r.p, {}, 0).dropped, r.dropped); }
        test_attention_large();
    }
    TEST("fp8") {
        for (Fp8Format format : {Fp8Format::E4m3, Fp8Format::E5m2}) {
            test_fp8_numbers(format);
            test_fp8_matmul(5, 7, 30, format);
            test_fp8_matmul(1, 33, 16, format);
        }
        test_fp8_cast(5, 13);
        test_fp8_cast(40, 48);
        test_fp8_scale();
        test_fp8_scales();
    }
    TEST("classifier") {
        test_mark_likeliest();
        test_classifier(33, 509, 512);
        test_classifier(1, 509, 512);
        test_classifier(3, 128, 128);
        test_classifier(2, 600, 640);
        test_classifier(2, 1, 128);
        test_classifier(5, 509, 512, 1.5f);
        test_classifier(3, 128, 128, 15.0f);
        test_classifier_uncounted(0.0f);
        test_classifier_uncounted(2.0f);
        test_classifier_large();
    }
    TEST("updates") {
        test_update_decision();
        test_unusual();
        for (int k = 0; k < 4; k++) {
            test_adamw<double>(k % 2, k / 2 ? 0.1 : 0.0, 1e-12);
            test_adamw<float>(k % 2, k / 2 ? 0.1 : 0.0, 5e-7);
        }
        test_bf16_state();
        test_muon_update();
        for (auto [rows, cols] : {std::pair(8, 8), std::pair(7, 20), std::pair(24, 6), std::pair(1, 1)}) {
            test_orthogonalise(rows, cols);
        }
    }
    TEST("float functions") { test_float_functions(); }
    return test_summary();
}
