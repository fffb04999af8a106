/*
Tests of llmc/ops/cpu_ops.h. In double: each forward pass against a formula written another way, each backward
pass against finite differences of its forward pass. In float: against double. Both: same bits on any number
of threads. At the end every output of every op is scaled by 1.01, one at a time: some test must notice.

    make build/test_cpu_ops && build/test_cpu_ops
*/
#include <math.h>       // gives: sqrt, sqrtl, isfinite, isnan
#ifdef _OPENMP
#include <omp.h>        // gives: omp_set_num_threads
#endif

#include <deque>        // gives: std::deque
#include <set>          // gives: std::set

#include "child.h"              // gives: run_child
#include "test.h"               // gives: TEST, CHECK
#include "llmc/ops/ops.h"       // gives: GPT2_OPS, op_outputs

// ---- the hook at the end of every twin: it knows who computed what, and can make one output wrong ----

struct Output {
    std::string name;               // OP.OUTPUT
    std::set<size_t> groups;        // of tests that look at it
};
static std::vector<Output> outputs;             // of every op
static size_t group_now = 0;                    // which of `groups` runs
static const char* broken = nullptr;            // the name of what is made wrong

struct Named { std::string name; std::vector<double> values; };
static std::vector<Named>* recorded = nullptr;  // where all outputs go; null: nowhere

template <class Args> static void list_outputs(const Args& args) {
    op_outputs(args, [](const char* op, const char* output, auto, size_t) {
        outputs.push_back({std::string(op) + "." + output, {}});
    });
}
template <class Real> static Real* data_of(Real* data) { return data; }
template <class Real> static Real* data_of(const GradOf<Real>& grad) { return grad.data; }
template <class Real> static Real* data_of(const ResidualOf<Real>& residual) { return residual.data; }
template <class Args> static void output_hook(const Args& args) {
    op_outputs(args, [](const char* op, const char* output, auto where, size_t count) {
        if (!data_of(where)) { return; }
        const std::string name = std::string(op) + "." + output;
        for (Output& o : outputs) { if (o.name == name && !recorded) { o.groups.insert(group_now); } }
        if (recorded) { recorded->push_back({name, {data_of(where), data_of(where) + count}}); }
        if (!broken || name != broken) { return; }
        if (test_failed > 0) { _exit(1); }          // it has been noticed
        for (size_t k = 0; k < count; k++) { data_of(where)[k] *= 1.01f; }
    });
}
#define OP_DONE(args) output_hook(args)

#include "llmc/ops/cpu_ops.h"       // gives: the twins
#include "llmc/ops/token_buckets.h" // gives: build_token_buckets

// ---- tensors between sentinels ----

static int overruns = 0;            // tensors that some op wrote beside

// What is used everywhere is not inlined: compiled with the sanitizers, that takes a third less time.
#define NOINLINE __attribute__((noinline))

template <class Real> struct Tensor {       // full of NaN until something is stored
    static constexpr size_t kGuard = 16;
    static constexpr Real kSentinel = (Real)-12345678;
    size_t n;
    std::vector<Real> all;                  // guard, n elements, guard
    NOINLINE explicit Tensor(size_t n) : n(n), all(n + 2 * kGuard, (Real)NAN) {
        for (size_t i = 0; i < kGuard; i++) { all[i] = all[kGuard + n + i] = kSentinel; }
    }
    NOINLINE Tensor(const Tensor& other) : n(other.n), all(other.all) {}
    NOINLINE Tensor& operator=(const Tensor& other) {
        check_guards();
        n = other.n;
        all = other.all;
        return *this;
    }
    NOINLINE ~Tensor() { check_guards(); }
    void check_guards() const {
        bool whole = true;
        for (size_t i = 0; i < kGuard; i++) {
            whole = whole && all[i] == kSentinel && all[kGuard + n + i] == kSentinel;
        }
        if (!whole) { overruns++; }
    }
    operator Real*() { return all.data() + kGuard; }
    operator const Real*() const { return all.data() + kGuard; }
    NOINLINE bool operator==(const Tensor& other) const {
        return n == other.n && memcmp(all.data(), other.all.data(), all.size() * sizeof(Real)) == 0;
    }
};
typedef Tensor<double> Doubles;

static uint32_t random_id = 0;              // each random tensor takes the next stream
static double uniform(uint32_t id, size_t i) { return 2.0 * rand_unit(7, RAND_SAMPLE, id, i) - 1.0; }

// Uniform in shift +- scale, and a float's value: float and double twins can start from the same numbers.
template <class Real = double>
static Tensor<Real> random_tensor(size_t n, double scale = 1.0, double shift = 0.0) {
    Tensor<Real> x(n);
    random_id++;
    for (size_t i = 0; i < n; i++) { x[i] = (Real)(float)(shift + scale * uniform(random_id, i)); }
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

constexpr double kExact = 1e-13;            // two ways to sum the same numbers in double
constexpr double kNumeric = 1e-8;           // derivative against finite differences

// Relative error of `gradient` = d loss / d x at up to 60 elements of x, against differences of fourth order.
static double numeric_error(Doubles& x, const Doubles& gradient, const std::function<double()>& loss) {
    const size_t samples = std::min<size_t>(x.n, 60);
    const double h = 1e-3;
    std::vector<double> numeric, analytic;
    for (size_t s = 0; s < samples; s++) {
        const size_t i = x.n <= samples ? s : (size_t)(rand_unit(7, RAND_SAMPLE, 0, s) * x.n);
        const double x0 = x[i];
        auto at = [&](double step) { x[i] = x0 + step; return loss(); };
        numeric.push_back((at(-2 * h) - 8 * at(-h) + 8 * at(h) - at(2 * h)) / (12 * h));
        analytic.push_back(gradient[i]);
        x[i] = x0;
    }
    return difference(analytic.data(), numeric.data(), samples);
}

#define CHECK_GRADIENT(x, gradient, loss)                                                               \
    do {                                                                                                \
        double error_ = numeric_error(x, gradient, loss);                                               \
        CHECK(error_ <= kNumeric, "%s: %s differs from finite differences by %.2e", shape.c_str(),      \
              #gradient, error_);                                                                       \
    } while (0)

static double dot(const double* x, const double* y, size_t n) {
    double sum = 0.0;
    for (size_t i = 0; i < n; i++) { sum += x[i] * y[i]; }
    return sum;
}

// Runs op(GradOf) with = on NaN and with += on old numbers; returns what = stored.
typedef std::function<void(GradOf<double>)> GradientOp;
static Doubles gradient_of(const std::string& shape, size_t n, const GradientOp& op) {
    Doubles stored(n), added = random_tensor(n), expected = added;
    op({stored, Accumulate::No});
    op({added, Accumulate::Yes});
    for (size_t i = 0; i < n; i++) { expected[i] += stored[i]; }
    CHECK_SAME(added, expected, 1e-15);
    return stored;
}

static Doubles column_sums_of(const Doubles& x, int N, int C) {
    Doubles sums(C);
    for (int c = 0; c < C; c++) {
        sums[c] = 0.0;
        for (int n = N - 1; n >= 0; n--) { sums[c] += x[(size_t)n * C + c]; }
    }
    return sums;
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
    }
};

static void test_encoder(int B, int T, int maxT, int Vp, int C, int different_tokens) {
    const std::string shape = format("encoder B=%d T=%d C=%d tokens=%d", B, T, C, different_tokens);
    const int N = B * T;
    std::vector<int> tokens = random_ints(N, different_tokens);
    Doubles wte = random_tensor((size_t)Vp * C), wpe = random_tensor((size_t)maxT * C), out((size_t)N * C);
    Doubles expected((size_t)N * C);
    encoder_forward_cpu<double>({out, tokens.data(), wte, wpe, B, T, C}, 0);
    for (size_t i = 0; i < expected.n; i++) {
        const int bt = (int)(i / C), c = (int)(i % C);
        expected[i] = wte[(size_t)tokens[bt] * C + c] + wpe[(size_t)(bt % T) * C + c];
    }
    CHECK_SAME(out, expected, 0.0);

    Buckets buckets(tokens, Vp);
    Doubles dout = random_tensor((size_t)N * C);
    Doubles dwte = random_tensor((size_t)Vp * C), dwte_before = dwte, dwte_expected = dwte;
    Doubles dwpe_expected((size_t)maxT * C);
    for (size_t i = 0; i < dwpe_expected.n; i++) { dwpe_expected[i] = 0.0; }
    for (int bt = 0; bt < N; bt++) {
        for (int c = 0; c < C; c++) {
            dwte_expected[(size_t)tokens[bt] * C + c] += dout[(size_t)bt * C + c];
            dwpe_expected[(size_t)(bt % T) * C + c] += dout[(size_t)bt * C + c];
        }
    }
    Doubles scratch((size_t)max_bucket_slots(N) * C);
    Doubles dwpe = gradient_of(shape, dwpe_expected.n, [&](GradOf<double> grad) {
        dwte = dwte_before;
        encoder_backward_cpu<double>({{dwte, Accumulate::Yes}, grad, scratch, dout, buckets.view, B, T, maxT,
                                      C}, 0);
    });
    CHECK_SAME(dwpe, dwpe_expected, kExact);
    CHECK_SAME(dwte, dwte_expected, kExact);
}

// ---- norms of the residual stream ----

// A member of the family: what is added, how often it is normalised, by what.
struct NormCase {
    NormKind kind;
    int norms;                  // 1 or 2
    int branches;               // 0 to 2
    double dropout;             // of the branches
    bool starts;                // nothing comes before the branches
    bool in_place;              // the sum stands where the last branch stood, or inp
};

static double factor_of(const Dropout& d, int n, int C, int c) {
    double factor = 1.0;
    if (d.dropped > 0) { dropout_row(d, n, C, [&](int i, float f) { if (i == c) { factor = f; } }); }
    return factor;
}

// A case with its tensors, the calls of both twins and what they should give.
struct NormTest {
    NormCase is;
    int N, C;
    std::string shape;
    Doubles inp, branch0, branch1, weight0, weight1, bias0, bias1, dout0, dout1, old;
    Doubles residual, y0, y1, mean, rstd;
    Dropout dropout[2];

    NormTest(const NormCase& is, int N, int C)
        : is(is), N(N), C(C), inp(random_tensor((size_t)N * C)), branch0(random_tensor(inp.n, 1.0, 0.5)),
          branch1(random_tensor(inp.n)), weight0(random_tensor(C, 0.5, 1.0)),
          weight1(random_tensor(C, 0.5, 1.0)), bias0(random_tensor(C, 0.5)), bias1(random_tensor(C, 0.5)),
          dout0(random_tensor(inp.n)), dout1(random_tensor(inp.n)), old(random_tensor(inp.n, 1.0, 1.0)),
          residual(inp.n), y0(inp.n), y1(inp.n), mean(N), rstd(N) {
        shape = format("norm N=%d C=%d kind=%d norms=%d branches=%d dropout=%g starts=%d in_place=%d", N, C,
                       (int)is.kind, is.norms, is.branches, is.dropout, is.starts, is.in_place);
        for (uint32_t i = 0; i < 2; i++) {
            dropout[i] = dropout_of(is.dropout, {77, 5, 3 + i}, 1000000007ull << i);
        }
    }
    bool layer() const { return is.kind == NormKind::Layer; }
    bool two() const { return is.norms == 2; }

    void forward() {
        NormForward<double, double> a = {};
        a.y[0] = {y0, weight0, layer() ? (const double*)bias0 : nullptr};
        if (two()) { a.y[1] = {y1, weight1, layer() ? (const double*)bias1 : nullptr}; }
        a.mean = layer() ? (double*)mean : nullptr, a.rstd = rstd;
        a.inp = is.starts ? nullptr : (const double*)inp;
        for (int i = 0; i < is.branches; i++) {
            a.branch[i] = i == 0 ? branch0 : branch1;
            a.dropout[i] = dropout[i];
        }
        Doubles in_place = is.starts ? (is.branches == 2 ? branch1 : branch0) : inp;
        if (is.branches > 0) { a.residual = residual; }
        if (is.branches > 0 && is.in_place) {
            a.residual = in_place;
            if (!is.starts) { a.inp = in_place; }
            else { a.branch[is.branches - 1] = in_place; }
        }
        a.kind = is.kind, a.N = N, a.C = C;
        norm_forward_cpu<double>(a, 0);
        if (is.branches > 0 && is.in_place) { residual = in_place; }
    }
    double x(size_t i) {                        // of the sum
        const int n = (int)(i / C), c = (int)(i % C);
        double sum = is.starts ? 0.0 : inp[i];
        if (is.branches > 0) { sum += branch0[i] * factor_of(dropout[0], n, C, c); }
        if (is.branches > 1) { sum += branch1[i] * factor_of(dropout[1], n, C, c); }
        return sum;
    }
    void check_forward() {
        forward();
        Doubles sums(inp.n), want0(inp.n), want1(inp.n), means(N), rstds(N);
        for (int n = 0; n < N; n++) {
            double sum = 0.0, squares = 0.0;
            for (int c = 0; c < C; c++) {
                const double value = sums[(size_t)n * C + c] = x((size_t)n * C + c);
                sum += value;
                squares += value * value;
            }
            means[n] = layer() ? sum / C : 0.0;
            rstds[n] = pow(squares / C - means[n] * means[n] + 1e-5, -0.5);
            for (int c = 0; c < C; c++) {
                const double norm = (sums[(size_t)n * C + c] - means[n]) * rstds[n];
                want0[(size_t)n * C + c] = norm * weight0[c] + (layer() ? (double)bias0[c] : 0.0);
                want1[(size_t)n * C + c] = norm * weight1[c] + (layer() ? (double)bias1[c] : 0.0);
            }
        }
        if (is.branches > 0) { CHECK_SAME(residual, sums, 1e-15); }
        CHECK_SAME(y0, want0, 1e-12);
        if (two()) { CHECK_SAME(y1, want1, 1e-12); }
        if (layer()) { CHECK_SAME(mean, means, 1e-12); }
        CHECK_SAME(rstd, rstds, 1e-12);
    }
    // What the gradients are taken of; with_old: the sum goes on down the stream, too.
    double loss(bool with_old) {
        forward();
        double sum = dot(y0, dout0, inp.n);
        if (two()) { sum += dot(y1, dout1, inp.n); }
        if (with_old) { sum += dot(is.branches > 0 ? residual : inp, old, inp.n); }
        return sum;
    }

    struct Gradients {
        Doubles dresidual, dweight[2], dbias[2], branch[2], branch_bias[2];
        Gradients(size_t n, int C) : dresidual(n), dweight{Doubles(C), Doubles(C)},
            dbias{Doubles(C), Doubles(C)}, branch{Doubles(n), Doubles(n)},
            branch_bias{Doubles(C), Doubles(C)} {}
    };
    void backward(Gradients& g, Accumulate residual_acc, Accumulate acc) {
        NormBackward<double, double> a = {};
        a.dresidual = g.dresidual;
        a.dresidual_acc = residual_acc;
        for (int i = 0; i < is.norms; i++) {
            a.y[i].dout = i == 0 ? dout0 : dout1;
            a.y[i].weight = i == 0 ? weight0 : weight1;
            a.y[i].dweight = {g.dweight[i], acc};
            if (layer()) { a.y[i].dbias = {g.dbias[i], acc}; }
        }
        for (int i = 0; i < is.branches; i++) {
            if (is.dropout > 0.0) { a.branch[i].dout = g.branch[i]; }
            a.branch[i].dropout = dropout[i];
            a.branch[i].dbias = {g.branch_bias[i], acc};
        }
        a.inp = is.branches > 0 ? residual : inp;
        a.mean = layer() ? (double*)mean : nullptr, a.rstd = rstd;
        a.kind = is.kind, a.N = N, a.C = C;
        norm_backward_cpu<double>(a, 0);
    }
    void check_backward(bool with_old) {
        forward();
        Gradients g(inp.n, C);
        if (with_old) { g.dresidual = old; }
        backward(g, with_old ? Accumulate::Yes : Accumulate::No, Accumulate::No);
        auto loss = [&] { return this->loss(with_old); };
        if (!is.starts) { CHECK_GRADIENT(inp, g.dresidual, loss); }
        CHECK_GRADIENT(weight0, g.dweight[0], loss);
        if (layer()) { CHECK_GRADIENT(bias0, g.dbias[0], loss); }
        if (two()) { CHECK_GRADIENT(weight1, g.dweight[1], loss); }
        if (two() && layer()) { CHECK_GRADIENT(bias1, g.dbias[1], loss); }
        for (int i = 0; i < is.branches; i++) {
            Doubles& branch = is.dropout > 0.0 ? g.branch[i] : g.dresidual;
            CHECK_GRADIENT((i == 0 ? branch0 : branch1), branch, loss);
            Doubles sums = column_sums_of(branch, N, C);
            CHECK_SAME(g.branch_bias[i], sums, 1e-11);      // of a norm's gradient: they nearly cancel
        }
    }
    // += adds what = stores, for each gradient; the gradient of the stream adds, too.
    void check_accumulation() {
        forward();
        Gradients g(inp.n, C), added(inp.n, C), want(inp.n, C);
        auto all = [](Gradients& x) {
            return std::vector<Doubles*>{&x.dweight[0], &x.dweight[1], &x.dbias[0], &x.dbias[1],
                                         &x.branch_bias[0], &x.branch_bias[1]};
        };
        backward(g, Accumulate::No, Accumulate::No);
        for (size_t i = 0; i < all(g).size(); i++) { *all(want)[i] = *all(added)[i] = random_tensor(C); }
        backward(added, Accumulate::No, Accumulate::Yes);
        CHECK(added.dresidual == g.dresidual, "%s: not the same twice", shape.c_str());
        for (size_t i = 0; i < all(g).size(); i++) {
            const double* stored = *all(g)[i];
            if (isnan(stored[0])) { continue; }             // this case has no such gradient
            for (int c = 0; c < C; c++) { (*all(want)[i])[c] += stored[c]; }
            CHECK_SAME(*all(added)[i], *all(want)[i], 1e-15);
        }
        Doubles sum = old;
        for (size_t i = 0; i < sum.n; i++) { sum[i] += g.dresidual[i]; }
        added.dresidual = old;
        backward(added, Accumulate::Yes, Accumulate::No);
        CHECK_SAME(added.dresidual, sum, 1e-15);
    }
};

static void test_norm(const NormCase& is, int N, int C) {
    NormTest test(is, N, C);
    test.check_forward();
    if (is.in_place) { return; }                // a matter of the forward
    test.check_backward(!is.starts);
    test.check_accumulation();
}

static void test_norms() {
    for (int k = 0; k < 96; k++) {              // in_place and starts: where there is something to add
        const NormCase is = {k % 2 ? NormKind::Rms : NormKind::Layer, 1 + k / 2 % 2, k / 4 % 3,
                             k / 12 % 2 ? 0.25 : 0.0, k / 24 % 2 == 1, k / 48 == 1};
        if (is.branches > 0 || k < 12) { test_norm(is, 5, 13); }
    }
    test_norm({NormKind::Layer, 2, 2, 0.25, false, false}, 33, 40);
    test_norm({NormKind::Rms, 1, 2, 0.25, false, true}, 70, 131);
    test_norm({NormKind::Layer, 1, 0, 0.0, false, false}, 1, 40);
    if (broken) { return; }                     // enough to notice anything
    int i = 0;                                  // of the wide rows a few combinations, others for each
    for (int C : {768, 1000, 1600, 5120, 8192, 16384}) {
        const NormKind kind = i % 2 == 0 ? NormKind::Layer : NormKind::Rms;
        NormTest test({kind, 1 + i % 2, 1 + i / 3, i < 3 ? 0.1 : 0.0, false, false}, 2, C);
        test.check_forward();
        if (C <= 1600) { test.check_backward(true); }       // minutes, beyond
        test.check_accumulation();
        i++;
    }
}

// How often elements are kept, what becomes of them, and that no two masks know of each other.
static void test_dropout() {
    const std::string shape = "dropout";
    const int N = 400, C = 100;
    const size_t n = (size_t)N * C;
    auto mask = [&](double p, const DropoutKey& key, uint64_t first_row) {
        Doubles x(n);
        const Dropout d = dropout_of(p, key, first_row);
        for (int row = 0; row < N; row++) {
            dropout_row(d, row, C, [&](int c, float factor) { x[(size_t)row * C + c] = factor; });
        }
        return x;
    };
    for (double p : {1e-9, 0.01, 0.1, 0.5, 0.95}) {
        const Doubles x = mask(p, {1, 2, 3}, 0);
        double kept = 0.0, sum = 0.0, rounded = std::max(1.0, floor(p * 65536 + 0.5)) / 65536;
        bool two_values = true;
        for (size_t i = 0; i < n; i++) {
            const double value = ((const double*)x)[i];
            kept += value != 0.0;
            sum += value;
            two_values = two_values && (value == 0.0 || value == (double)(float)(1.0 / (1.0 - rounded)));
        }
        const double sigma = sqrt(n * rounded * (1 - rounded));
        CHECK(two_values, "p=%g: a value is neither 0 nor 1/(1-p)", p);
        CHECK(fabs(kept - n * (1 - rounded)) <= 5 * sigma, "p=%g: %g of %zu kept", p, kept, n);
        CHECK(fabs(sum - n) <= 5 * sigma / (1 - rounded), "p=%g: the mean factor is %g", p, sum / n);
        for (size_t step : {1, 2, 4, 8, 16, C, 8 * C}) {    // neighbours, draws of one block, rows
            double both = 0.0;
            for (size_t i = 0; i + step < n; i++) {
                both += ((const double*)x)[i] != 0.0 && ((const double*)x)[i + step] != 0.0;
            }
            const double q = (1 - rounded) * (1 - rounded), pairs = (double)(n - step);
            CHECK(fabs(both - pairs * q) <= 5 * sqrt(3 * pairs * q * (1 - q)) + 1, "p=%g: %g pairs at %zu", p,
                  both, step);
        }
    }
    const Doubles base = mask(0.5, {1, 2, 3}, 0);
    const struct { const char* name; DropoutKey key; uint64_t first; } others[] = {
        {"seed", {2, 2, 3}, 0}, {"high seed", {1 + (1ull << 32), 2, 3}, 0}, {"step", {1, 3, 3}, 0},
        {"layer", {1, 2, 5}, 0}, {"branch", {1, 2, 4}, 0}, {"rows of another rank", {1, 2, 3}, N},
        {"rows beyond 2^32", {1, 2, 3}, 1ull << 32}};
    for (const auto& other : others) {
        const Doubles x = mask(0.5, other.key, other.first);
        double same = 0.0;
        for (size_t i = 0; i < n; i++) { same += ((const double*)x)[i] == ((const double*)base)[i]; }
        CHECK(fabs(same - 0.5 * n) <= 2.5 * sqrt((double)n), "another %s: %g of %zu equal", other.name, same,
              n);
    }
    // the same rows, whoever has them: 300 of the batch's rows on
    const Doubles later = mask(0.5, {1, 2, 3}, 300);
    CHECK(memcmp((const double*)later, (const double*)base + 300 * (size_t)C, 100 * (size_t)C * 8) == 0,
          "a row's mask depends on who has the row");
    CHECK(dropout_of(0.0, {}, 0).dropped == 0 && dropout_of(1e-9, {}, 0).dropped == 1, "p of 0, and above");
    // as the comment of dropout_block says it
    const Rand4 block = philox4x32(4, 7, 9 | 2 << 16, RAND_DROPOUT, 11 ^ 6 * 0x9E3779B1u, 1 + 6);
    const Dropout d = dropout_of(0.5, {11 + (1ull << 32), 6, 9}, (2ull << 32) + 7);
    dropout_row(d, 0, 40, [&](int c, float factor) {
        const uint32_t bits = block.w[c % 8 / 2] >> (c % 2 * 16) & 0xffff;
        if (c >= 32) { CHECK((bits < 32768) == (factor == 0.0f), "element %d has another draw", c); }
    });
}

// ---- GELU ----

static double gelu_direct(double x) {
    return 0.5 * x * (1.0 + tanh(sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
}

static void test_gelu(int N, int OC) {
    const std::string shape = format("gelu N=%d OC=%d", N, OC);
    const size_t n = (size_t)N * OC;
    Doubles inp = random_tensor(n, 4.0), out(n), expected(n), dout = random_tensor(n);
    gelu_forward_cpu<double>({out, inp, n}, 0);
    for (size_t i = 0; i < n; i++) { expected[i] = gelu_direct(inp[i]); }
    CHECK_SAME(out, expected, kExact);

    Doubles dinp(n);
    Doubles dbias = gradient_of(shape, OC, [&](GradOf<double> grad) {
        dinp = dout;
        gelu_backward_inplace_cpu<double>({dinp, grad, nullptr, inp, N, OC}, 0);
    });
    Doubles sums = column_sums_of(dinp, N, OC), without = dout;
    CHECK_SAME(dbias, sums, kExact);
    gelu_backward_inplace_cpu<double>({without, {nullptr, Accumulate::No}, nullptr, inp, N, OC}, 0);
    CHECK(without == dinp, "%s: dbias changes dinp", shape.c_str());
    auto loss = [&] {
        gelu_forward_cpu<double>({out, inp, n}, 0);
        return dot(out, dout, n);
    };
    CHECK_GRADIENT(inp, dinp, loss);
}

// ---- matmul ----

static void test_matmul(int N, int C, int OC) {
    const std::string shape = format("matmul N=%d C=%d OC=%d", N, C, OC);
    const size_t n = (size_t)N * OC;
    Doubles inp = random_tensor((size_t)N * C), weight = random_tensor((size_t)OC * C);
    Doubles bias = random_tensor(OC), residual = random_tensor(n), dout = random_tensor(n);
    Doubles products(n), out(n), expected(n), pre_gelu(n), gelu_expected(n);
    for (int i = 0; i < N; i++) {
        for (int o = 0; o < OC; o++) {
            products[(size_t)i * OC + o] = dot(inp + (size_t)i * C, weight + (size_t)o * C, C);
        }
    }
    auto forward = [&](double* out, const double* bias, const double* residual, double* pre_gelu) {
        matmul_forward_cpu<double>({out, inp, weight, bias, residual, pre_gelu, N, C, OC}, 0);
    };
    forward(out, nullptr, nullptr, nullptr);
    CHECK_SAME(out, products, kExact);
    forward(out, bias, nullptr, nullptr);
    for (size_t i = 0; i < n; i++) { expected[i] = products[i] + bias[i % OC]; }
    CHECK_SAME(out, expected, kExact);
    Doubles with_gelu(n);
    forward(with_gelu, bias, nullptr, pre_gelu);
    for (size_t i = 0; i < n; i++) { gelu_expected[i] = gelu_direct(expected[i]); }
    CHECK_SAME(pre_gelu, expected, kExact);
    CHECK_SAME(with_gelu, gelu_expected, kExact);
    forward(out, bias, residual, nullptr);
    for (size_t i = 0; i < n; i++) { expected[i] += residual[i]; }
    CHECK_SAME(out, expected, kExact);

    Doubles dinp((size_t)N * C);
    matmul_backward_input_cpu<double>({dinp, dout, weight, nullptr, nullptr, N, C, OC}, 0);
    Doubles dweight = gradient_of(shape, weight.n, [&](GradOf<double> grad) {
        matmul_backward_weight_cpu<double>({grad, nullptr, dout, inp, N, C, OC}, 0);
    });
    Doubles dbias = gradient_of(shape, OC, [&](GradOf<double> grad) {
        bias_backward_cpu<double>({grad, nullptr, dout, N, OC}, 0);
    });
    auto loss = [&] {
        forward(out, bias, nullptr, nullptr);
        return dot(out, dout, n);
    };
    CHECK_GRADIENT(inp, dinp, loss);
    CHECK_GRADIENT(weight, dweight, loss);
    CHECK_GRADIENT(bias, dbias, loss);
    Doubles other = random_tensor(dinp.n), both(dinp.n), sum = dinp;
    matmul_backward_input_cpu<double>({both, dout, weight, other, nullptr, N, C, OC}, 0);
    for (size_t i = 0; i < sum.n; i++) { sum[i] += other[i]; }
    CHECK_SAME(both, sum, kExact);

    Doubles hidden = random_tensor((size_t)N * C, 2.0), dhidden((size_t)N * C);
    matmul_backward_input_cpu<double>({dhidden, dout, weight, nullptr, hidden, N, C, OC}, 0);
    auto loss_through_gelu = [&] {
        gelu_forward_cpu<double>({inp, hidden, hidden.n}, 0);
        return loss();
    };
    CHECK_GRADIENT(hidden, dhidden, loss_through_gelu);
}

static void test_grad_accumulate(size_t n) {
    const std::string shape = format("grad_accumulate n=%zu", n);
    Doubles values = random_tensor(n);
    Doubles stored = gradient_of(shape, n, [&](GradOf<double> grad) {
        grad_accumulate_cpu<double>({grad, values, n}, 0);
    });
    CHECK(stored == values, "%s: not the values", shape.c_str());
}

// ---- attention ----

static std::vector<uint32_t> kept_bits(const Dropout& d, int B, int T, int NH) {
    std::vector<uint32_t> bits(B * NH * keep_words(T) + 1, 0xABCDABCDu);        // and a sentinel
    attention_dropout_cpu<double>({bits.data(), d, B, T, NH}, 0);
    CHECK(bits.back() == 0xABCDABCDu, "attention_dropout B=%d T=%d NH=%d wrote beside", B, T, NH);
    bits.pop_back();
    return bits;
}

static void test_attention(int B, int T, int NH, int HS, double p_dropped = 0.0) {
    const std::string shape = format("attention B=%d T=%d NH=%d HS=%d dropout=%g", B, T, NH, HS, p_dropped);
    const size_t C = (size_t)NH * HS, n = (size_t)B * T * C, rows = (size_t)B * NH * T;
    Doubles qkv = random_tensor(3 * n, 1.5), out(n), lse(rows), expected(n), lse_expected(rows);
    const Dropout dropout = dropout_of(p_dropped, {3, 4, 5}, 1000000007ull);
    std::vector<uint32_t> bits;
    AttentionKeep keep;
    if (p_dropped > 0.0) {
        bits = kept_bits(dropout, B, T, NH);
        keep = {bits.data(), dropout.scale};
    }
    attention_forward_cpu<double>({out, lse, qkv, B, T, NH, HS, keep}, 0);
    for (int b = 0; b < B; b++) {
        for (int h = 0; h < NH; h++) {
            auto vec = [&](int which, int t) {
                return qkv + ((size_t)b * T + t) * 3 * C + which * C + (size_t)h * HS;
            };
            for (int t = 0; t < T; t++) {
                std::vector<double> p(T, 0.0);          // one row of the explicit matrix
                double sum = 0.0;
                for (int u = 0; u <= t; u++) { sum += p[u] = exp(dot(vec(0, t), vec(1, u), HS) / sqrt(HS)); }
                lse_expected[((size_t)b * NH + h) * T + t] = log(sum);
                if (p_dropped > 0.0) {
                    dropout_row(dropout, (b * NH + h) * T + t, T, [&](int u, float f) { p[u] *= f; });
                }
                for (int i = 0; i < HS; i++) {
                    double value = 0.0;
                    for (int u = 0; u < T; u++) { value += p[u] / sum * vec(2, u)[i]; }
                    expected[((size_t)b * T + t) * C + (size_t)h * HS + i] = value;
                }
            }
        }
    }
    CHECK_SAME(out, expected, kExact);
    CHECK_SAME(lse, lse_expected, kExact);

    Doubles dout = random_tensor(n), dqkv(3 * n), scratch(rows), out2(n), lse2(rows);
    attention_backward_cpu<double>({dqkv, scratch, dout, out, qkv, lse, B, T, NH, HS, keep}, 0);
    auto loss = [&] {
        attention_forward_cpu<double>({out2, lse2, qkv, B, T, NH, HS, keep}, 0);
        return dot(out2, dout, n);
    };
    CHECK_GRADIENT(qkv, dqkv, loss);
}

// Where the bits are, and that they are those of the rows; what these are is test_dropout's.
static void test_attention_dropout() {
    const int B = 2, NH = 3, T = 150;
    for (uint64_t first_row : {0, NH * T}) {
        const Dropout dropout = dropout_of(0.3, {1, 2, 3}, first_row);
        const std::vector<uint32_t> bits = kept_bits(dropout, B, T, NH);
        size_t wrong = 0, ones = 0, kept = 0;
        for (uint32_t word : bits) { ones += (size_t)__builtin_popcount(word); }
        for (int row = 0; row < B * NH * T; row++) {
            const int bh = row / T, t = row % T;
            dropout_row(dropout, row, T, [&](int u, float f) {
                const uint32_t bit = bits[bh * keep_words(T) + u / 32 * padded_T(T) + t] >> u % 32 & 1;
                wrong += bit != (uint32_t)(f != 0.0f && u <= t);
                kept += bit;
            });
        }
        CHECK(wrong == 0, "%zu bits are not those of the rows", wrong);
        CHECK(ones == kept, "%zu bits are set beside the rows'", ones - kept);
    }
}

// Scores of thousands: one key takes all the weight. Also in float, where exp of such a score is inf.
template <class Real> static void test_attention_large() {
    const std::string shape = format("attention, large scores, %d bits", (int)sizeof(Real) * 8);
    const int T = 70, HS = 20;
    Tensor<Real> qkv = random_tensor<Real>((size_t)T * 3 * HS, 100.0);
    Tensor<Real> out((size_t)T * HS), lse(T), dqkv((size_t)T * 3 * HS), scratch(T);
    Tensor<Real> dout = random_tensor<Real>((size_t)T * HS);
    attention_forward_cpu<Real>({out, lse, qkv, 1, T, 1, HS}, 0);
    attention_backward_cpu<Real>({dqkv, scratch, dout, out, qkv, lse, 1, T, 1, HS}, 0);
    bool finite = true, bounded = true;
    for (size_t i = 0; i < dqkv.n; i++) { finite = finite && isfinite(dqkv[i]); }
    for (int t = 0; t < T; t++) { finite = finite && isfinite(lse[t]); }
    for (size_t i = 0; i < out.n; i++) { bounded = bounded && fabs(out[i]) <= 101.01; }
    CHECK(finite, "%s: inf or NaN", shape.c_str());
    CHECK(bounded, "%s: not an average of values", shape.c_str());
}

// ---- classifier and loss ----

static void test_classifier(int N, int V, int Vp) {
    const std::string shape = format("classifier N=%d V=%d Vp=%d", N, V, Vp);
    const float dloss = 0.25f, loss_scale = 8.0f;
    Doubles logits = random_tensor((size_t)N * Vp, 3.0), losses(N), losses_expected(N);
    std::vector<int> targets = random_ints(N, V);
    targets[0] = V - 1;
    Doubles untouched = logits, dlogits = logits;
    auto classify = [&](double* in_place, double* losses, const float* scale, ClassifierMode mode) {
        classifier_cpu<double>({in_place, losses, targets.data(), dloss, scale, N, V, Vp, mode}, 0);
    };
    classify(untouched, losses, nullptr, ClassifierMode::LossOnly);
    CHECK(untouched == logits, "%s: LossOnly changes the logits", shape.c_str());
    for (int n = 0; n < N; n++) {
        const double* row = logits + (size_t)n * Vp;
        double sum = 0.0;
        for (int v = 0; v < V; v++) { sum += exp(row[v] - row[targets[n]]); }
        losses_expected[n] = log(sum);
    }
    CHECK_SAME(losses, losses_expected, 1e-12);

    Doubles losses2(N);
    classify(dlogits, losses2, &loss_scale, ClassifierMode::LossAndGrad);
    CHECK(losses2 == losses, "%s: the losses depend on the mode", shape.c_str());
    auto loss = [&] {
        classify(logits, losses2, nullptr, ClassifierMode::LossOnly);
        double sum = 0.0;
        for (int n = 0; n < N; n++) { sum += losses2[n]; }
        return dloss * loss_scale * sum;
    };
    if (V > 1) { CHECK_GRADIENT(logits, dlogits, loss); }
    for (int n = 0; n < N; n++) {           // each row of a gradient of softmax sums to zero, padding is zero
        double sum = 0.0, padding = 0.0;
        for (int v = 0; v < Vp; v++) { (v < V ? sum : padding) += fabs(dlogits[(size_t)n * Vp + v]); }
        double target_part = -2.0 * dlogits[(size_t)n * Vp + targets[n]];
        CHECK(fabs(sum - target_part) <= 1e-12 * sum, "%s: row %d sums to %g", shape.c_str(), n,
              sum - target_part);
        CHECK(padding == 0.0, "%s: the padding of row %d has a gradient", shape.c_str(), n);
    }
    Doubles other_padding = logits;
    for (size_t i = 0; i < logits.n; i++) {
        if ((int)(i % Vp) >= V) { other_padding[i] = i % 2 ? NAN : 1e9; }
    }
    classify(other_padding, losses2, &loss_scale, ClassifierMode::LossAndGrad);
    CHECK(other_padding == dlogits && losses2 == losses, "%s: the padding's values matter", shape.c_str());
    const float one = 1.0f;                 // no loss scale means 1
    Doubles scaled_by_one = logits, not_scaled = logits;
    classify(scaled_by_one, losses2, &one, ClassifierMode::LossAndGrad);
    classify(not_scaled, losses2, nullptr, ClassifierMode::LossAndGrad);
    CHECK(scaled_by_one == not_scaled, "%s: no loss scale is not a loss scale of 1", shape.c_str());
}

template <class Real> static void test_classifier_large() {
    const std::string shape = format("classifier, logits of 1e4, %d bits", (int)sizeof(Real) * 8);
    const int N = 6, V = 509, Vp = 512;
    Tensor<Real> logits = random_tensor<Real>((size_t)N * Vp, 1e4), losses(N);
    for (int v = 0; v < V; v++) {
        logits[v] = v == 3 ? (Real)1e4 : (Real)-1e4;                    // row 0: certain, right
        logits[Vp + v] = v == 4 ? (Real)1e4 : (Real)-1e4;               // row 1: certain, wrong
        logits[2 * Vp + v] = (Real)-1e4;                                // row 2: undecided
    }
    std::vector<int> targets(N, 3);
    const ClassifierMode mode = ClassifierMode::LossAndGrad;
    classifier_cpu<Real>({logits, losses, targets.data(), 1.0f, nullptr, N, V, Vp, mode}, 0);
    bool finite = true;
    for (size_t i = 0; i < logits.n; i++) { finite = finite && isfinite(logits[i]); }
    for (int n = 0; n < N; n++) { finite = finite && isfinite(losses[n]); }
    CHECK(finite, "%s: inf or NaN", shape.c_str());
    CHECK(losses[0] == 0 && logits[3] == 0, "%s: certain and right: %g", shape.c_str(), (double)losses[0]);
    CHECK(fabs(losses[1] - 2e4) <= 1e-3 && logits[Vp + 4] == 1 && logits[Vp + 3] == -1,
          "%s: certain and wrong: %g", shape.c_str(), (double)losses[1]);
    CHECK(fabs(losses[2] - log(509.0)) <= 1e-5, "%s: undecided: %g", shape.c_str(), (double)losses[2]);
}

static void test_gather_rows(int N, int from, int C) {
    const std::string shape = format("gather_rows N=%d of %d C=%d", N, from, C);
    const std::vector<int> rows = random_ints(N, from);
    Doubles inp = random_tensor((size_t)from * C), out((size_t)N * C), expected((size_t)N * C);
    inp[0] = NAN;                           // to the bit, whatever it is
    gather_rows_cpu<double>({out, inp, rows.data(), N, C}, 0);
    for (int n = 0; n < N; n++) {
        for (int c = 0; c < C; c++) { expected[(size_t)n * C + c] = inp[(size_t)rows[n] * C + c]; }
    }
    CHECK(memcmp(&out[0], &expected[0], out.n * sizeof(double)) == 0, "%s: other rows", shape.c_str());
}

static void test_loss_sum(int N) {
    const std::string shape = format("loss_sum N=%d", N);
    Doubles losses = random_tensor(N, 1.0, 5.0), expected(1);
    expected[0] = 0.0;
    for (int n = N - 1; n >= 0; n--) { expected[0] += 0.125 * losses[n]; }
    Doubles mean = gradient_of(shape, 1, [&](GradOf<double> out) {
        loss_sum_cpu<double>({out.data, losses, 0.125f, out.acc, N}, 0);
    });
    CHECK_SAME(mean, expected, kExact);
}

// ---- update ----

static UpdateState update_state(float loss_scale) {
    UpdateState state = {};
    state.loss_scale = loss_scale;
    return state;
}

template <class Real>
static Real lane_sum_of(const std::vector<Real>& pieces, const std::vector<Real>& chain) {
    Tensor<Real> in(pieces.size()), out(1);
    std::copy(pieces.begin(), pieces.end(), (Real*)in);
    std::vector<Real> sums = chain;
    LaneSum<Real, Real> a = {};
    a.out = {out, Accumulate::No};
    a.pieces = {.data = (Real*)in};
    a.num_pieces = (int)pieces.size();
    a.num_chain = (int)chain.size();
    for (size_t c = 0; c < chain.size(); c++) { a.chain[c] = &sums[c]; }
    a.n = 1;
    lane_sum_cpu<Real>(a, 0);
    return out[0];
}

static void test_lane_sum() {
    const float big = 16777216.0f;      // 2^24: +1 is lost, +2 is not
    const struct { std::vector<float> pieces, chain; float sum; const char* order; } cases[] = {
        {{1, 1, big}, {}, big + 2, "(1+1)+big"},
        {{big, 1, 1}, {}, big, "(big+1)+1"},
        {{big, 1, 1, 1}, {}, big + 2, "(big+1)+(1+1)"},
        {{1, 1, 1, 1, big}, {}, big + 4, "((1+1)+(1+1))+big"},
        {{big, 0, 0, 0, 1, 1}, {}, big + 2, "((big+0)+(0+0))+(1+1)"},
        {{big, 0, 0, 1, 1, 1}, {}, big + 2, "((big+0)+(0+1))+(1+1): the first 1 is lost"},
        {{1, 0, 0, 0, big, 1, 1}, {}, big, "((1+0)+(0+0))+((big+1)+1): each 1 alone"},
        {{1, 1}, {-big, big}, 2, "after the pieces the chain, from its end: -big + (big + (1+1))"},
        {{1, 0}, {-big, big}, 0, "-big + (big + (1+0))"}};
    for (const auto& c : cases) {
        const float sum = lane_sum_of(c.pieces, c.chain);
        CHECK(sum == c.sum, "%s: %.1f, expected %.1f", c.order, sum, c.sum);
    }
    for (size_t pieces = 1; pieces <= 9; pieces++) {
        for (size_t chain = 0; chain <= 3; chain++) {
            const Doubles x = random_tensor(pieces + chain);
            const double* at = x;
            double expected = 0.0;
            for (size_t i = 0; i < x.n; i++) { expected += at[i]; }
            const double sum = lane_sum_of<double>({at, at + pieces}, {at + pieces, at + x.n});
            CHECK(fabs(sum - expected) <= 1e-14, "%zu pieces, a chain of %zu: %g", pieces, chain, sum);
        }
    }
    const std::string shape = "lane_sum of 3 elements, 2 pieces";
    Doubles in = random_tensor(6), out(3), expected(3);
    for (size_t i = 0; i < 3; i++) { expected[i] = in[i] + in[3 + i]; }
    LaneSum<double, double> a = {};
    a.out = {out, Accumulate::No};
    a.pieces = {.data = (double*)in};
    a.num_pieces = 2;
    a.n = 3;
    lane_sum_cpu<double>(a, 0);
    CHECK_SAME(out, expected, 1e-15);
}

static void test_square_sums() {
    const std::string shape = "square_sums";
    Doubles g = random_tensor(6 * kChunk), sums(6), expected(6);
    square_sums_cpu<double>({sums, {.data = (double*)g}, g.n, {}}, 0);
    for (int c = 0; c < 6; c++) { expected[c] = 0.0; }
    for (size_t i = 0; i < g.n; i++) { expected[i / kChunk] += g[i] * g[i]; }
    CHECK_SAME(sums, expected, kExact);
    Doubles four(4), picked(4);                 // of each half two chunks
    const Rows halves = {2, 0, 3 * kChunk * sizeof(double), 0};
    square_sums_cpu<double>({four, {.data = (double*)g}, 2 * kChunk, halves}, 0);
    for (int c = 0; c < 4; c++) { picked[c] = expected[c + c / 2]; }
    CHECK_SAME(four, picked, kExact);
}

// One rank, one bucket, one chunk, one lane. False: the loss is wrong.
struct Record { double sum; float loss; };
template <class Real>
static bool decide_on(UpdateState* state, double squares, float max_norm, UpdatePolicy policy, float loss) {
    Record record = {squares, 0};
    static_assert(sizeof(Record) == 16, "room for a double, too");
    const Real real_loss = (Real)loss;
    memcpy((char*)&record + 8, &real_loss, sizeof(real_loss));
    const ChunkRange range = {1, 1, 0};
    Real mean = 7;
    update_decision_cpu<Real>({state, &mean, (const char*)&record, sizeof(record), 8, 1, 1, false, &range, 1,
                               max_norm, policy}, 0);
    return mean == real_loss || (isnan(mean) && isnan(loss));
}
template <class Real>
static void decide(UpdateState* state, double squares, float max_norm, UpdatePolicy policy) {
    CHECK(decide_on<Real>(state, squares, max_norm, policy, 0.5f), "the loss is not the lane's");
}

static void test_update_decision() {
    const UpdatePolicy fixed = {false, 3, 65536.0f}, dynamic = {true, 3, 16.0f};
    for (double norm : {0.01, 3.0, 1e6}) {
        const double squares = 16.0 * norm * norm;
        UpdateState state = update_state(4.0f);
        decide<double>(&state, squares, 0.0f, fixed);
        CHECK(fabs(state.norm / norm - 1) <= 1e-7, "norm %g, expected %g", state.norm, norm);
        CHECK(state.t == 1 && state.skip == 0 && state.loss_scale == 4.0f, "norm %g: state", norm);
        CHECK(state.grad_scale == 0.25f, "norm %g: without clipping grad_scale is %g", norm,
              state.grad_scale);
        decide<double>(&state, squares, (float)norm * 0.5f, fixed);
        const double half = 0.125 * norm / (norm + kClipEps);
        CHECK(fabs(state.grad_scale / half - 1) <= 2e-7, "norm %g: clipped to half: %.8g, expected %.8g",
              norm, state.grad_scale, half);
        decide<double>(&state, squares, (float)norm * 2.0f, fixed);
        CHECK(state.grad_scale == 0.25f && state.t == 3, "norm %g: clipped below max_norm", norm);
    }

    const struct {              // one run: steps of these squares, and the state behind them
        const char* what;
        int steps;
        double squares;
        UpdatePolicy policy;
        float scale;
        int skip, in_a_row;
        long long t;
    } rows[] = {
        {"3 good steps double the scale", 3, 1.0, dynamic, 8.0f, 0, 0, 3},
        {"inf is skipped and halves it", 1, INFINITY, dynamic, 4.0f, 1, 1, 3},
        {"NaN does so, too", 1, NAN, dynamic, 2.0f, 1, 2, 3},
        {"it does not go below 1", 3, INFINITY, dynamic, 1.0f, 1, 5, 3},
        {"good again", 1, 1.0, dynamic, 1.0f, 0, 0, 4},
        {"it stops at its maximum", 30, 1.0, dynamic, 16.0f, 0, 0, 34},
        {"a fixed one stays", 5, 1.0, fixed, 16.0f, 0, 0, 39},
        {"a fixed one stays after NaN", 1, NAN, fixed, 16.0f, 1, 1, 39}};
    UpdateState state = update_state(4.0f);
    for (const auto& r : rows) {
        for (int i = 0; i < r.steps; i++) { decide<double>(&state, r.squares, 1.0f, r.policy); }
        CHECK(state.loss_scale == r.scale && state.skip == r.skip && state.skipped_in_a_row == r.in_a_row &&
              state.t == r.t, "%s: scale %g, skip %d, %d in a row, t %lld", r.what, state.loss_scale,
              state.skip, state.skipped_in_a_row, state.t);
    }
}

// Plain: the last values in a deque, mean and deviation from their definitions, in long double.
struct PlainWindow {
    std::deque<double> values;
    double score(double x) const {
        if (values.size() < 128) { return 0.0; }
        long double mean = 0, variance = 0;
        for (double value : values) { mean += value / 128.0L; }
        for (double value : values) { variance += (value - mean) * (value - mean) / 128.0L; }
        return variance > 0 ? (double)((x - mean) / sqrtl(variance)) : 0.0;
    }
    void add(double x) {
        values.push_back(x);
        if (values.size() > 128) { values.pop_front(); }
    }
};

// A ring's values from the oldest on.
static std::vector<double> in_order(const Window& w) {
    std::vector<double> values;
    for (long long i = w.count < kWindow ? 0 : w.count - kWindow; i < w.count; i++) {
        values.push_back(w.values[i % kWindow]);
    }
    return values;
}

// Steps of all kinds beside the plain computation: usual ones, outliers above and below, values that are not
// finite, and a level that rises.
template <class Real> static void test_outliers(float max_loss, float max_norm) {
    const char* title = sizeof(Real) == sizeof(double) ? "double" : "float";
    UpdateState state = update_state(4.0f);
    const UpdatePolicy policy = {true, 1 << 20, 65536.0f, max_loss, max_norm};
    PlainWindow losses, norms;
    long long t = 0, in_a_row = 0, good = 0, count[4] = {};
    float loss_scale = 4.0f;
    for (uint32_t step = 0; step < 1500; step++) {
        const double level = 3.0 + step / 750.0, coin = rand_unit(11, RAND_SAMPLE, 0, step);
        float loss = (float)(level + 0.1 * rand_normal(11, 0, step));
        double norm = 1.0 + 0.2 * fabs(rand_normal(11, 1, step));
        if (coin < 0.02) { loss += 1.0f; }
        else if (coin < 0.04) { loss -= 1.0f; }
        else if (coin < 0.06) { norm *= 5.0; }
        else if (coin < 0.08) { norm *= 0.1; }
        else if (coin < 0.10) { norm = coin < 0.09 ? NAN : INFINITY; }
        else if (coin < 0.12) { loss = coin < 0.11 ? NAN : -INFINITY; }
        else if (coin < 0.13) { loss = NAN; norm = NAN; }
        const double scaled = norm * loss_scale;
        const bool right = decide_on<Real>(&state, scaled * scaled, 1.0f, policy, loss);
        norm = state.norm;
        const double loss_score = max_loss > 0 ? losses.score(loss) : 0.0;
        const double norm_score = max_norm > 0 ? norms.score(norm) : 0.0;
        const Skip skip = !isfinite(norm) || !isfinite(loss) ? SKIP_NOT_FINITE
                          : max_loss > 0 && loss_score > max_loss ? SKIP_LOSS
                          : max_norm > 0 && norm_score > max_norm ? SKIP_NORM : SKIP_NO;
        count[skip]++;
        if (skip == SKIP_NO) {
            losses.add(loss);
            norms.add(norm);
            t++;
        }
        in_a_row = skip == SKIP_NO ? 0 : in_a_row + 1;
        good = skip == SKIP_NOT_FINITE ? 0 : good + 1;
        if (skip == SKIP_NOT_FINITE) { loss_scale = loss_scale > 2.0f ? loss_scale / 2 : 1.0f; }
        auto near = [](double got, double want) {
            return isfinite(want) ? fabs(got - want) <= 1e-6 * (1.0 + fabs(want))
                                  : isnan(want) ? isnan(got) : got == want;
        };
        const bool decided = right && state.skip == skip && near(state.loss_score, loss_score) &&
                             near(state.norm_score, norm_score);
        const bool counted = state.t == t && state.skipped_in_a_row == in_a_row && state.good_steps == good &&
                             state.loss_scale == loss_scale;
        if (decided && counted && step % 100 != 0) { continue; }
        CHECK(decided, "%s: step %u, loss %g, norm %g: skip %d by %g and %g, expected %d by %g and %g", title,
              step, loss, norm, state.skip, state.loss_score, state.norm_score, skip, loss_score, norm_score);
        CHECK(counted, "%s: step %u: t %lld, %d in a row, %d good, scale %g; expected %lld, %lld, %lld, %g",
              title, step, state.t, state.skipped_in_a_row, state.good_steps, state.loss_scale, t, in_a_row,
              good, loss_scale);
        CHECK(in_order(state.losses) == std::vector<double>(losses.values.begin(), losses.values.end()) &&
                  in_order(state.norms) == std::vector<double>(norms.values.begin(), norms.values.end()),
              "%s: the windows after step %u", title, step);
    }
    CHECK((max_loss > 0) == (count[SKIP_LOSS] > 10) && (max_norm > 0) == (count[SKIP_NORM] > 10) &&
              count[SKIP_NOT_FINITE] > 50 && count[SKIP_NO] > 1200,
          "%s: skips of all kinds: %lld of losses, %lld of norms, %lld not finite", title, count[SKIP_LOSS],
          count[SKIP_NORM], count[SKIP_NOT_FINITE]);
}

// The facts one by one.
static void test_window() {
    const UpdatePolicy policy = {false, 1, 65536.0f, 3.0f, 3.0f};
    UpdateState state = update_state(1.0f);
    auto step = [&](float loss, float norm) {
        decide_on<double>(&state, (double)norm * norm, 0.0f, policy, loss);
        return state.skip;
    };
    for (int i = 0; i < 127; i++) { step(i % 2 ? 1.0f : 3.0f, i % 2 ? 1.0f : 3.0f); }
    CHECK(step(100.0f, 3.0f) == SKIP_NO && state.t == 128, "127 values are not enough to judge by");
    CHECK(step(100.0f, 100.0f) != SKIP_NO && state.t == 128, "128 are");
    state = update_state(1.0f);
    for (int i = 0; i < 128; i++) { step(i % 2 ? 1.0f : 3.0f, i % 2 ? 1.0f : 3.0f); }  // mean 2, deviation 1
    const UpdateState full = state;
    struct Row { float loss, norm; int skip; const char* what; };
    const Row rows[] = {
        {5.0f, 2.0f, SKIP_NO, "a loss at the limit"},
        {5.00001f, 2.0f, SKIP_LOSS, "a loss above it"},
        {2.0f, 5.0f, SKIP_NO, "a norm at the limit"},
        {2.0f, 5.00001f, SKIP_NORM, "a norm above it"},
        {6.0f, 7.0f, SKIP_LOSS, "both"},
        {-1e30f, 0.0f, SKIP_NO, "far below"},
        {INFINITY, 2.0f, SKIP_NOT_FINITE, "an infinite loss"},
        {NAN, 2.0f, SKIP_NOT_FINITE, "a loss that is no number"},
        {6.0f, INFINITY, SKIP_NOT_FINITE, "a loss above the limit and a norm that is infinite"},
    };
    for (const Row& row : rows) {
        state = full;
        CHECK(step(row.loss, row.norm) == row.skip, "%s: skip %d, expected %d", row.what, state.skip,
              row.skip);
    }
    state = full;
    step(6.0f, 7.0f);
    CHECK(state.loss_score == 4.0f && state.norm_score == 5.0f, "scores %g and %g", state.loss_score,
          state.norm_score);
    state = update_state(1.0f);
    for (int i = 0; i < 200; i++) { step(0.1f, 0.1f); }
    CHECK(step(0.2f, 0.2f) == SKIP_NO, "where all are equal, nothing is unusual");
}

// update_state_fields() names every byte once, and what it reads it can write.
static void test_update_state_fields() {
    UpdateState state, copy;
    for (size_t i = 0; i < sizeof(state); i++) { ((unsigned char*)&state)[i] = (unsigned char)(i * 7 + 1); }
    memset((void*)&copy, 0, sizeof(copy));
    std::vector<std::vector<char>> fields;
    std::set<std::string> field_names;
    size_t bytes = 0;
    update_state_fields((const UpdateState&)state, [&](const char* name, auto* first, size_t count) {
        CHECK((const char*)first == (const char*)&state + bytes, "%s is not what comes next", name);
        CHECK(field_names.insert(name).second, "two fields %s", name);
        bytes += count * sizeof(*first);
        fields.push_back({(const char*)first, (const char*)(first + count)});
    });
    CHECK(bytes == sizeof(state), "%zu bytes have a name, of %zu", bytes, sizeof(state));
    size_t next = 0;
    update_state_fields(copy, [&](const char*, auto* first, size_t) {
        memcpy((void*)first, fields[next].data(), fields[next].size());
        next++;
    });
    CHECK(memcmp(&state, &copy, sizeof(state)) == 0, "read and written again it is another state");
}

// Records of several ranks: every live chunk once, no padding, every lane once, in whatever order they lie.
static void test_records(int ranks, int lanes, bool interleaved) {
    const ChunkRange ranges[] = {{(size_t)(2 * ranks), 2, 0}, {1, 1, 2}, {(size_t)(ranks + 1), 2, 3}};
    const size_t per_rank = 5, lanes_at = per_rank * sizeof(double);
    const size_t bytes = lanes_at + lanes * sizeof(double);
    std::vector<char> records(ranks * bytes);
    std::vector<double> all(per_rank, NAN);
    double squares = 0.0, loss = 0.0;
    for (int r = 0; r < ranks; r++) { memcpy(&records[r * bytes], all.data(), lanes_at); }
    for (const ChunkRange& range : ranges) {
        for (size_t c = 0; c < range.chunks; c++) {
            const double x = 1.0 + (double)c;
            memcpy(&records[c / range.per_rank * bytes + (range.at + c % range.per_rank) * 8], &x, 8);
            squares += x;
        }
    }
    for (int g = 0; g < ranks * lanes; g++) {
        const double x = 1.0 / (1 + g);
        const int rank = interleaved ? g % ranks : g / lanes, lane = interleaved ? g / ranks : g % lanes;
        memcpy(&records[rank * bytes + lanes_at + lane * 8], &x, 8);
        loss += x;
    }
    UpdateState state = update_state(1.0f);
    double mean = 0.0;
    update_decision_cpu<double>({&state, &mean, records.data(), bytes, lanes_at, ranks, lanes, interleaved,
                                 ranges, 3, 0.0f, {false, 1, 1.0f}}, 0);
    CHECK(fabs(state.norm / sqrt(squares) - 1) <= 1e-6, "%d ranks: norm %g, expected %g", ranks, state.norm,
          sqrt(squares));
    CHECK(mean == loss, "%d ranks, %d lanes: loss %.17g, expected %.17g", ranks, lanes, mean, loss);
}

// Ten updates beside the formulas, element by element, in two rows with other things between them; the third
// is skipped.
template <class Real> static void test_updates(bool muon, bool with_master, double decay, double tolerance) {
    const std::string shape = format("%s %d bits%s, decay %g", muon ? "muon" : "adamw", (int)sizeof(Real) * 8,
                                     with_master ? ", master" : "", decay);
    const size_t n = 24, params_row = 40, grads_row = 32, update_row = 56;
    const double lr = 1e-2, beta1 = muon ? 0.95 : 0.9, beta2 = 0.95, eps = 1e-8;
    const Rows rows = {2, params_row * sizeof(Real), grads_row * sizeof(Real), 100};
    Tensor<Real> params = random_tensor<Real>(2 * params_row), master = random_tensor<Real>(2 * n);
    Tensor<Real> m(2 * n), v(2 * n), update(2 * update_row);
    Doubles p_expected(2 * n), m_expected(2 * n), v_expected(2 * n);    // v: Muon's direction
    for (size_t i = 0; i < 2 * n; i++) {
        Real& param = params[i / n * params_row + i % n];
        p_expected[i] = with_master ? master[i] : param;
        if (with_master) { param = (Real)NAN; }         // the master decides, not what params held before
        m[i] = v[i] = 0;
        m_expected[i] = v_expected[i] = 0.0;
    }
    for (size_t i = 0; i < update.n; i++) { update[i] = (Real)7; }
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
            if (muon) {
                v = (1 - beta1) * g + beta1 * m;
                p -= lr * (decay * p + v);
            } else {
                v = beta2 * v + (1 - beta2) * g * g;
                const double m_hat = m / (1 - pow(beta1, state.t)), v_hat = v / (1 - pow(beta2, state.t));
                p -= lr * (m_hat / (sqrt(v_hat) + eps) + decay * p);
            }
        }
        Real* const masters = with_master ? (Real*)master : nullptr;
        if (muon) {
            muon_momentum_cpu<Real>({update, m, {.data = (Real*)grads}, &state, n, update_row, rows, beta1},
                                    0);
            muon_update_cpu<Real>({(Real*)params, masters, update, &state, n, update_row, rows, decay, lr,
                                   RoundKey{}, 0}, 0);
        } else {
            adamw_update_cpu<Real>({(Real*)params, false, masters, m, v, {.data = (Real*)grads}, &state, n,
                                    rows, decay, lr, beta1, beta2, eps, RoundKey{}, 0}, 0);
        }
    }
    Tensor<Real> p(2 * n);
    bool beside = true;
    for (size_t i = 0; i < params.n; i++) {
        if (i % params_row < n) { p[i / params_row * n + i % params_row] = params[i]; }
        else { beside = beside && params[i] == params_before[i]; }
    }
    for (size_t i = 0; i < update.n; i++) {
        if (muon && i % update_row < n) { v[i / update_row * n + i % update_row] = update[i]; }
        else { beside = beside && update[i] == (Real)7; }
    }
    CHECK_SAME(m, m_expected, tolerance);
    CHECK_SAME(v, v_expected, tolerance);
    CHECK_SAME(p, p_expected, tolerance);
    CHECK(!with_master || master == p, "%s: the master copy", shape.c_str());
    CHECK(beside, "%s: written between rows", shape.c_str());
}

// ---- bf16 ----

// Mean and root mean square, over elements, of how far 32 micro-steps accumulated in bf16 are from their sum.
struct Bf16Errors { double mean[2], rms[2]; };      // [0] dithered, [1] rounded to nearest

static Bf16Errors accumulate_bf16(double noise, double first) {
    const size_t n = 20000;
    std::vector<float> add(n);
    std::vector<double> exact(n);
    std::vector<uint16_t> dithered(n), nearest(n);
    for (int micro = 0; micro < 32; micro++) {      // magnitudes over a factor of 8, one of them per element
        for (size_t i = 0; i < n; i++) {
            add[i] = (float)(exp2(1.5 * uniform(900, i)) * (1.0 + noise * uniform(901 + micro, i)));
            if (micro == 0) { add[i] *= (float)first; }
            exact[i] += add[i];
            nearest[i] = bf16_round_nearest((micro == 0 ? 0.0f : bf16_to_float(nearest[i])) + add[i]);
        }
        for (size_t i = 0; i < n; i++) {            // as grad_store of cuda_helpers.h does
            float sum = add[i];
            if (micro > 0) {
                sum += bf16_decode_dithered(dithered[i], round_bits16({1337, 1, (uint32_t)micro - 1, 5}, i));
            }
            dithered[i] = bf16_encode_dithered(sum, round_bits16({1337, 1, (uint32_t)micro, 5}, i));
        }
    }
    Bf16Errors e = {};
    for (size_t i = 0; i < n; i++) {
        for (int k = 0; k < 2; k++) {
            const float sum = k == 0 ? bf16_decode_dithered(dithered[i], round_bits16({1337, 1, 31, 5}, i))
                                     : bf16_to_float(nearest[i]);
            const double error = sum / exact[i] - 1.0;
            e.mean[k] += error / n;
            e.rms[k] += error * error / n;
        }
    }
    for (int k = 0; k < 2; k++) { e.rms[k] = sqrt(e.rms[k]); }
    const double sigma = e.rms[0] / sqrt((double)n);
    printf("noise %.1f, first x%.0f: rms error %.1e dithered, %.1e nearest; mean %.1e and %.1e\n", noise,
           first, e.rms[0], e.rms[1], e.mean[0], e.mean[1]);
    CHECK(fabs(e.mean[0]) <= 4 * sigma, "dithered sums are biased: %.1e, sigma %.1e", e.mean[0], sigma);
    return e;
}

static void test_bf16() {
    // Where micro-steps differ at random, either errs by up to half a unit in the last place, independently
    // each time. Where they agree, rounding to nearest makes the same error 32 times.
    const Bf16Errors random = accumulate_bf16(0.5, 1.0);
    CHECK(random.rms[0] < 1.03 * random.rms[1], "rms error %g dithered, %g nearest", random.rms[0],
          random.rms[1]);
    for (double first : {1.0, 300.0}) {
        Bf16Errors e = accumulate_bf16(0.0, first);
        CHECK(e.rms[0] < e.rms[1], "rms error %g dithered, %g nearest", e.rms[0], e.rms[1]);
    }
}

// ---- float twins ----

// Every op once, on numbers that do not depend on Real; shapes large enough to keep several threads busy.
template <class Real> static std::vector<Named> run_all_ops() {
    random_id = 5000;
    std::vector<Named> results;
    recorded = &results;
    const int B = 3, T = 70, maxT = 80, NH = 2, HS = 20, C = NH * HS, OC = 133, V = 509, Vp = 512, N = B * T;
    const size_t n = (size_t)N * C;
    std::vector<int> tokens = random_ints(N, 5), targets = random_ints(N, V);
    Buckets buckets(tokens, V);
    auto random = [](size_t n, double scale, double shift) { return random_tensor<Real>(n, scale, shift); };

    Tensor<Real> wte = random((size_t)Vp * C, 1, 0), wpe = random((size_t)maxT * C, 1, 0), encoded(n);
    encoder_forward_cpu<Real>({encoded, tokens.data(), wte, wpe, B, T, C}, 0);
    Tensor<Real> dout = random(n, 1, 0), dwte = random((size_t)Vp * C, 1, 0), dwpe((size_t)maxT * C);
    Tensor<Real> scratch((size_t)max_bucket_slots(N) * C);
    encoder_backward_cpu<Real>({{dwte, Accumulate::Yes}, {dwpe, Accumulate::No}, scratch, dout, buckets.view,
                                B, T, maxT, C}, 0);

    Tensor<Real> inp1 = random(n, 1, 0), inp2 = random(n, 1, 0);
    Tensor<Real> weight = random(C, 0.5, 1), bias = random(C, 1, 0), residual(n), ln(n), ln2(n);
    Tensor<Real> mean(N), rstd(N);
    NormForward<Real, Real> forward = {};
    forward.y[0] = {ln, weight, bias}, forward.y[1] = {ln2, bias, weight};
    forward.mean = mean, forward.rstd = rstd, forward.residual = residual, forward.inp = inp1;
    forward.N = N, forward.C = C;
    forward.branch[0] = inp2, forward.branch[1] = dout;
    forward.dropout[1] = dropout_of(0.3, {1, 2, 3}, 5);
    norm_forward_cpu<Real>(forward, 0);
    Tensor<Real> dresidual = random(n, 1, 0), dbranch(n);
    Tensor<Real> dweight(C), dbias(C), dweight1(C), dbias1(C), dsum(C), dsum1(C);
    NormBackward<Real, Real> back = {};
    back.dresidual = dresidual, back.dresidual_acc = Accumulate::Yes;
    back.y[0] = {dout, weight, {dweight, Accumulate::No}, {dbias, Accumulate::No}};
    back.y[1] = {inp1, bias, {dweight1, Accumulate::No}, {dbias1, Accumulate::No}};
    back.branch[0].dbias = {dsum, Accumulate::No};
    back.branch[1] = {dbranch, forward.dropout[1], {dsum1, Accumulate::No}};
    back.inp = residual, back.mean = mean, back.rstd = rstd, back.N = N, back.C = C;
    norm_backward_cpu<Real>(back, 0);

    Tensor<Real> inp = random(n, 1, 0), w = random((size_t)OC * C, 1, 0), b = random(OC, 1, 0);
    Tensor<Real> y((size_t)N * OC), x((size_t)N * OC), dy = random((size_t)N * OC, 1, 0);
    Tensor<Real> dinp(n), dw((size_t)OC * C);
    matmul_forward_cpu<Real>({y, inp, w, b, nullptr, x, N, C, OC}, 0);
    matmul_backward_input_cpu<Real>({dinp, dy, w, nullptr, inp1, N, C, OC}, 0);
    matmul_backward_weight_cpu<Real>({{dw, Accumulate::No}, nullptr, dy, inp, N, C, OC}, 0);
    Tensor<Real> db(OC);
    gelu_backward_inplace_cpu<Real>({dy, {db, Accumulate::No}, nullptr, x, N, OC}, 0);
    gelu_forward_cpu<Real>({y, x, y.n}, 0);

    const size_t rows = (size_t)B * NH * T;
    Tensor<Real> qkv = random(3 * n, 2, 0), att(n), lse(rows), dqkv(3 * n), D(rows);
    attention_forward_cpu<Real>({att, lse, qkv, B, T, NH, HS}, 0);
    attention_backward_cpu<Real>({dqkv, D, dout, att, qkv, lse, B, T, NH, HS}, 0);

    Tensor<Real> logits = random((size_t)N * Vp, 5, 0), losses(N), loss(1);
    const ClassifierMode mode = ClassifierMode::LossAndGrad;
    classifier_cpu<Real>({logits, losses, targets.data(), 1.0f / N, nullptr, N, V, Vp, mode}, 0);
    loss_sum_cpu<Real>({loss, losses, 1.0f / N, Accumulate::No, N}, 0);

    const size_t count = 18 * kChunk;
    Tensor<Real> params = random(count, 1, 0), m = random(count, 0.1, 0), v = random(count, 0.1, 0.2);
    Tensor<Real> grads = random(count, 1, 0), sum(count / 2);
    LaneSum<Real, Real> lanes = {};
    lanes.out = {sum, Accumulate::No};
    lanes.pieces = {.data = (Real*)grads};
    lanes.num_pieces = 2;
    lanes.n = count / 2;
    lane_sum_cpu<Real>(lanes, 0);
    std::vector<double> sums(count / kChunk + 1);
    square_sums_cpu<Real>({sums.data(), {.data = (Real*)grads}, count, {}}, 0);
    UpdateState state = update_state(1.0f);
    const ChunkRange range = {count / kChunk, count / kChunk, 0};
    update_decision_cpu<Real>({&state, loss, (const char*)sums.data(), sums.size() * sizeof(double),
                               (count / kChunk) * sizeof(double), 1, 1, false, &range, 1, 1.0f,
                               {false, 1, 1.0f}}, 0);
    adamw_update_cpu<Real>({(Real*)params, false, nullptr, m, v, {.data = (Real*)grads}, &state, count, {},
                            0.1, 1e-3, 0.9, 0.95, 1e-8, RoundKey{}, 0}, 0);

    Tensor<Real> out(count), gram(64 * 64), poly(64 * 64);
    muon_momentum_cpu<Real>({out, m, {.data = (Real*)grads}, &state, count, count, {}, 0.95}, 0);
    Tensor<Real> square(64 * 64), first(64 * 64), second(64 * 64);
    muon_orthogonalise_cpu<Real>({square, out, first, second, gram, poly, nullptr, {1, 1, {}, 0}, 64, 64, 1,
                                  1}, 0);
    muon_update_cpu<Real>({(Real*)params, nullptr, out, &state, count, count, {}, 0.1, 1e-3, RoundKey{}, 0},
                          0);
    recorded = nullptr;
    return results;
}

static void test_float_against_double() {
    std::vector<Named> floats = run_all_ops<float>(), doubles = run_all_ops<double>();
    for (size_t k = 0; k < doubles.size(); k++) {
        double off = difference(floats[k].values.data(), doubles[k].values.data(), doubles[k].values.size());
        CHECK(off <= 5e-7, "%s: float is off by %.2e", doubles[k].name.c_str(), off);
    }
}

// ---- Muon ----

// `count` orthonormal rows of n elements: random ones, each made orthogonal to those before, twice.
static std::vector<Doubles> orthonormal_rows(int count, int n) {
    std::vector<Doubles> rows;
    for (int i = 0; i < count; i++) {
        Doubles row = random_tensor(n);
        for (int k = 0; k < 2 * i; k++) {
            const double part = dot(row, rows[k % i], n);
            for (int e = 0; e < n; e++) { row[e] -= part * rows[k % i][e]; }
        }
        const double norm = sqrt(dot(row, row, n));
        for (int e = 0; e < n; e++) { row[e] /= norm; }
        rows.push_back(row);
    }
    return rows;
}

// sum over k of values[k] left[k] right[k]^T
static Doubles from_svd(const std::vector<Doubles>& left, const std::vector<double>& values,
                        const std::vector<Doubles>& right, int rows, int cols) {
    Doubles x(rows * cols);
    for (int r = 0; r < rows; r++) {
        for (int c = 0; c < cols; c++) {
            double sum = 0.0;
            for (size_t k = 0; k < values.size(); k++) { sum += values[k] * left[k][r] * right[k][c]; }
            x[r * cols + c] = sum;
        }
    }
    return x;
}

// Two parts of each of two layers with known singular vectors and values, with something between them: the
// vectors stay, and a value s goes to p(p(...(s/|x|))), times sqrt(max(1, rows/cols)).
template <class Real> static void test_orthogonalise(int rows, int cols, int steps, double tolerance) {
    const int k = std::min(rows, cols), parts = std::min(2, kMuonParts), count = 2 * parts;
    const size_t size = (size_t)rows * cols, square = (size_t)k * k, stride = 2 * size + 12;
    MuonPlaces places = {parts, 2, {}, stride};
    for (int part = 0; part < parts; part++) { places.at[part] = 3 + part * (size + 4); }
    const std::string shape = format("muon %d x %d, %d steps, %d bits", rows, cols, steps,
                                     (int)sizeof(Real) * 8);
    Tensor<Real> inp(2 * stride), out(2 * stride), x(count * size), y(count * size);
    Tensor<Real> gram(count * square), poly(count * square);
    std::vector<Doubles> want;
    std::vector<bool> taken(inp.n);
    for (size_t i = 0; i < inp.n; i++) { inp[i] = (Real)3.25; out[i] = (Real)1.5; }
    for (int m = 0; m < count; m++) {
        const std::vector<Doubles> left = orthonormal_rows(k, rows), right = orthonormal_rows(k, cols);
        std::vector<double> values, after;
        double norm = 0.0;
        for (int i = 0; i < k; i++) { values.push_back(0.01 * (m + 1) / (1 + i)); }
        for (double s : values) { norm += s * s; }
        for (double s : values) {
            double x = s / sqrt(norm);
            for (int step = 0; step < steps; step++) {
                x = 3.4445 * x - 4.7750 * x * x * x + 2.0315 * x * x * x * x * x;
            }
            CHECK(steps < 5 || s < 0.02 * sqrt(norm) || (x > 0.66 && x < 1.22), "%s: %g became %g",
                  shape.c_str(), s / sqrt(norm), x);
            after.push_back(x * (rows > cols ? sqrt((double)rows / cols) : 1.0));
        }
        const Doubles start = from_svd(left, values, right, rows, cols);
        const size_t at = m % 2 * stride + (m / 2 == 0 ? 3 : size + 7);     // what places.of(m) should be
        for (size_t i = 0; i < size; i++) {
            inp[at + i] = (Real)start[i];
            taken[at + i] = true;
        }
        want.push_back(from_svd(left, after, right, rows, cols));
    }
    const Tensor<Real> start = inp;
    MuonOrthogonalise<Real, Real> a = {out, inp, x, y, gram, poly, nullptr, places, rows, cols, steps, 12};
    muon_orthogonalise_cpu<Real>(a, 0);
    for (int m = 0; m < count; m++) {
        const double off = difference((Real*)out + places.of(m), (const double*)want[m], size);
        CHECK(off <= tolerance, "%s: matrix %d is off by %.2e", shape.c_str(), m, off);
    }
    for (size_t i = 0; i < out.n; i++) {
        CHECK(taken[i] || out[i] == (Real)1.5, "%s: written beside", shape.c_str());
    }
    CHECK(inp == start, "%s: its input has changed", shape.c_str());
    // A power of two, and another number: what counts is the direction.
    const Tensor<Real> result = out;
    for (double factor : {0x1p-70, 3e-20}) {
        for (size_t i = 0; i < inp.n; i++) { inp[i] = (Real)(start[i] * factor); }
        muon_orthogonalise_cpu<Real>(a, 0);
        const double off = difference((Real*)out, (const Real*)result, out.n);
        CHECK(factor == 0x1p-70 ? out == result : off <= tolerance, "%s: times %g: off by %.2e",
              shape.c_str(), factor, off);
    }
    inp = start;                                        // and where it stood
    a.out = inp;
    muon_orthogonalise_cpu<Real>(a, 0);
    for (size_t i = 0; i < inp.n; i++) {
        CHECK(inp[i] == (taken[i] ? result[i] : start[i]), "%s: in place: other bits", shape.c_str());
    }
    for (size_t i = 0; i < inp.n; i++) { inp[i] = taken[i] ? 0 : inp[i]; }
    muon_orthogonalise_cpu<Real>(a, 0);
    double sum = 0.0;
    for (size_t i = 0; i < inp.n; i++) { sum += taken[i] ? fabs(inp[i]) : 0; }
    CHECK(sum == 0.0, "%s: of zeros it makes %g", shape.c_str(), sum);
}

template <class Real> static void test_threads() {
#ifdef _OPENMP
    const std::vector<Named> alone = run_all_ops<Real>();
    for (int threads : {2, 3}) {
        omp_set_num_threads(threads);
        const std::vector<Named> shared = run_all_ops<Real>();
        for (size_t k = 0; k < alone.size(); k++) {
            CHECK(shared[k].values == alone[k].values, "%s: %d threads change bits", alone[k].name.c_str(),
                  threads);
        }
    }
    omp_set_num_threads(1);
#else
    SKIP(1, "built without OpenMP");
#endif
}

// exp and GELU in float against double, over their whole range.
static void test_float_functions() {
    double worst_exp = 0.0, worst_gelu = 0.0, worst_derivative = 0.0;
    for (double x0 = -86.9; x0 < 87.9; x0 += 0.00173) {
        const float x = (float)x0;
        worst_exp = std::max(worst_exp, fabs(exp_cpu(x) / exp((double)x) - 1.0));
    }
    for (double x0 = -6.0; x0 < 6.0; x0 += 0.00037) {
        const float x = (float)x0;
        worst_gelu = std::max(worst_gelu, fabs(gelu(x) - gelu_direct(x)) / std::max(1.0, fabs((double)x)));
        worst_derivative = std::max(worst_derivative, fabs(gelu_derivative(x) - gelu_derivative((double)x)));
    }
    printf("float: exp off by %.1e (relative), gelu by %.1e, its derivative by %.1e; a rounding: 6.0e-8\n",
           worst_exp, worst_gelu, worst_derivative);
    CHECK(worst_exp <= 1.3e-7, "exp is off by %.2e", worst_exp);
    CHECK(worst_gelu <= 2e-7, "gelu is off by %.2e", worst_gelu);
    CHECK(worst_derivative <= 4e-7, "gelu's derivative is off by %.2e", worst_derivative);
    CHECK(exp_cpu(0.0f) == 1.0f && exp_cpu(-88.0f) == 0.0f && exp_cpu(-1e30f) == 0.0f, "exp at 0 and below");
    CHECK(exp_cpu(-(float)INFINITY) == 0.0f, "exp of -inf");
    CHECK(exp_cpu((float)INFINITY) == INFINITY && exp_cpu(1e30f) == INFINITY && isnan(exp_cpu((float)NAN)),
          "exp far above, and of NaN");
    CHECK(gelu(100.0f) == 100.0f && gelu(-100.0f) == 0.0f && gelu(1e9f) == 1e9f && isnan(gelu((float)NAN)),
          "gelu far out, and of NaN");
    CHECK(gelu_derivative(100.0f) == 1.0f && gelu_derivative(-100.0f) == 0.0f, "gelu's derivative far out");
}

// ---- writing text ----

// One row's token after others, beside the ops that compute whole sequences: a row of `T` positions at once.
static void test_decoding(int T, int NH, int HS, int OC) {
    const std::string shape = format("decoding T=%d NH=%d HS=%d OC=%d", T, NH, HS, OC);
    const int C = NH * HS, N = 3, V = 40;
    std::vector<int> tokens = random_ints(T, V);
    Doubles wte = random_tensor((size_t)V * C), wpe = random_tensor((size_t)T * C), out((size_t)T * C);
    encoder_forward_cpu<double>({out, tokens.data(), wte, wpe, 1, T, C}, 0);
    std::vector<int> last = {tokens[T - 1], tokens[0], -1}, positions = {T - 1, 0, T - 1};
    Doubles embedded((size_t)N * C), wanted((size_t)N * C);
    decode_encoder_cpu<double>({embedded, last.data(), positions.data(), wte, wpe, N, C}, 0);
    for (int c = 0; c < C; c++) {
        wanted[c] = out[(size_t)(T - 1) * C + c];
        wanted[C + c] = out[c];
        wanted[2 * C + c] = wte[c] + wpe[(size_t)(T - 1) * C + c];      // no token is read as the first
    }
    CHECK_SAME(embedded, wanted, 0.0);

    // The matmul without and with a bias, and with GELU.
    Doubles weight = random_tensor((size_t)OC * C), bias = random_tensor(OC), pre((size_t)N * OC);
    for (int form = 0; form < 3; form++) {
        const double* b = form > 0 ? (double*)bias : nullptr;
        Doubles got((size_t)N * OC), expected((size_t)N * OC);
        decode_matmul_cpu<double>({got, embedded, weight, b, form == 2, N, C, OC}, 0);
        double* const pre_gelu = form == 2 ? (double*)pre : nullptr;
        matmul_forward_cpu<double>({expected, embedded, weight, b, nullptr, pre_gelu, N, C, OC}, 0);
        CHECK_SAME(got, expected, kExact);
    }

    // Attention's last position, after a prompt of all but that.
    Doubles qkv = random_tensor((size_t)T * 3 * C), lse((size_t)NH * T), att((size_t)T * C);
    attention_forward_cpu<double>({att, lse, qkv, 1, T, NH, HS}, 0);
    Doubles keys = random_tensor((size_t)N * T * C), values = random_tensor((size_t)N * T * C);
    cache_store_cpu<double>({keys, values, qkv, N, T - 1, T, C}, 0);
    Doubles now((size_t)N * 3 * C), got((size_t)N * C), expected((size_t)N * C);
    for (int n = 0; n < N; n++) {
        positions[n] = T - 1;
        memcpy(now + (size_t)n * 3 * C, qkv + (size_t)(T - 1) * 3 * C, 3 * C * sizeof(double));
        memcpy(expected + (size_t)n * C, att + (size_t)(T - 1) * C, C * sizeof(double));
    }
    decode_attention_cpu<double>({got, keys, values, now, positions.data(), N, T, NH, HS}, 0);
    CHECK_SAME(got, expected, kExact);
    Doubles stored((size_t)2 * N * T * C), original((size_t)2 * N * T * C);
    for (size_t i = 0; i < (size_t)N * T * C; i++) {
        const size_t t = i / C % T, c = i % C, other = (size_t)N * T * C + i;
        stored[i] = keys[i];
        stored[other] = values[i];
        original[i] = qkv[(t * 3 + 1) * C + c];
        original[other] = qkv[(t * 3 + 2) * C + c];
    }
    CHECK_SAME(stored, original, 0.0);
}

static void test_sample_tokens() {
    const int N = 4, V = 300;
    Doubles logits = random_tensor((size_t)N * V, 5.0);
    std::vector<int> tokens(N), positions = {0, 5, 5, 9};
    std::vector<uint64_t> draws = {0, 1, 1ull << 40, 7};
    const std::vector<uint32_t> ids = {0, 0, 1, 2};
    const std::vector<uint64_t> before = draws;
    const Sampling sampling = {1.5f, 200, 0.95f};
    for (int i = 0; i < V; i++) { logits[3 * V + i] = (double)NAN; }
    sample_tokens_cpu<double>({tokens.data(), positions.data(), draws.data(), ids.data(), logits, sampling, 9,
                               N, V}, 0);
    for (int n = 0; n < N; n++) {
        const std::vector<float> row(logits + (size_t)n * V, logits + (size_t)(n + 1) * V);
        const int token = sample_token(row.data(), V, sampling, rand_unit(9, RAND_SAMPLE, ids[n], before[n]));
        CHECK(tokens[n] == token && draws[n] == before[n] + 1, "row %d: token %d, not %d", n, tokens[n],
              token);
    }
    CHECK(tokens[3] == -1, "without logits a token is drawn");
    CHECK(positions == std::vector<int>({1, 6, 6, 10}), "positions do not move on");
}

// ---- all of it ----

struct Group { const char* name; void (*run)(); };
static const Group groups[] = {
    {"encoder", [] {
        test_encoder(2, 33, 40, 512, 40, 509);
        test_encoder(1, 1, 1, 128, 7, 100);
        test_encoder(9, 65, 65, 128, 70, 3);        // three tokens, nearly 200 positions each: split buckets
        test_encoder(2, 100, 128, 128, 5, 1);
    }},
    {"norms", test_norms},
    {"dropout", test_dropout},
    {"gelu", [] {
        test_gelu(33, 70);
        test_gelu(1, 1);
    }},
    {"matmul", [] {
        test_matmul(33, 40, 67);
        test_matmul(1, 40, 7);
        test_matmul(1, 1, 1);
        test_matmul(5, 300, 35);                    // sums longer than gemm_cpu takes in one piece: forward,
        test_matmul(6, 20, 509);                    // backward to the input,
        test_matmul(270, 9, 18);                    // backward to the weight
        test_grad_accumulate(333);
    }},
    {"attention's dropout", test_attention_dropout},
    {"attention", [] {
        test_attention(2, 33, 2, 20);
        test_attention(1, 1, 2, 20);
        test_attention(1, 64, 1, 3);
        test_attention(1, 65, 1, 8);
        test_attention(2, 130, 1, 4);
        test_attention(1, 9, 3, 80);
        test_attention(2, 33, 2, 20, 0.1);
        test_attention(1, 65, 2, 8, 0.5);
        test_attention(2, 130, 1, 4, 0.95);
        test_attention_large<double>();
        test_attention_large<float>();
    }},
    {"classifier", [] {
        test_gather_rows(40, 7, 33);
        test_gather_rows(3, 100, 1);
        test_classifier(33, 509, 512);
        test_classifier(1, 509, 512);
        test_classifier(3, 128, 128);
        test_classifier(2, 600, 640);
        test_classifier(2, 1, 128);
        test_classifier_large<double>();
        test_classifier_large<float>();
    }},
    {"loss_sum", [] {
        test_loss_sum(1);
        test_loss_sum(777);
    }},
    {"lane_sum", test_lane_sum},
    {"square_sums", test_square_sums},
    {"update_decision", [] {
        test_update_decision();
        test_window();
        test_update_state_fields();
        for (float max_loss : {0.0f, 3.0f}) {
            for (float max_norm : {0.0f, 3.0f}) { test_outliers<double>(max_loss, max_norm); }
        }
        test_outliers<float>(4.0f, 5.0f);
        for (int ranks : {1, 2, 3, 8}) {
            for (int lanes : {1, 2, 5}) {
                for (bool interleaved : {false, true}) { test_records(ranks, lanes, interleaved); }
            }
        }
    }},
    {"adamw", [] {
        for (int k = 0; k < 4; k++) {
            test_updates<double>(false, k % 2, k / 2 ? 0.1 : 0.0, 1e-12);
            test_updates<float>(false, k % 2, k / 2 ? 0.1 : 0.0, 5e-7);
        }
    }},
    {"muon", [] {
        for (int with_master : {0, 1}) {
            test_updates<double>(true, with_master, 0.1, 1e-12);
            test_updates<float>(true, with_master, 0.1, 5e-7);
        }
        for (int steps : {1, 4, 5}) {
            test_orthogonalise<double>(8, 8, steps, 1e-11);
            test_orthogonalise<double>(7, 20, steps, 1e-11);
            test_orthogonalise<double>(24, 6, steps, 1e-11);
        }
        test_orthogonalise<double>(1, 1, 5, 1e-11);
        test_orthogonalise<float>(20, 7, 5, 1e-4);
    }},
    {"decoding", [] {
        test_decoding(33, 2, 20, 67);
        test_decoding(1, 1, 3, 5);
        test_sample_tokens();
    }},
    {"bf16", test_bf16},
    {"float functions", test_float_functions},
    {"float against double", test_float_against_double},
    {"thread counts", [] {
        test_threads<float>();
        test_threads<double>();
    }},
};
static const size_t kGroups = sizeof(groups) / sizeof(groups[0]);

// The groups that compute an output, with that output off by 1 %: some test must fail.
static void test_that_tests_can_fail() {
    for (const Output& o : outputs) {
        CHECK(!o.groups.empty(), "no test of %s", o.name.c_str());
        const Child c = run_child([&] {
            broken = o.name.c_str();
            test_failed = 0;
            for (size_t g : o.groups) {
                groups[g].run();
                if (test_failed > 0) { _exit(1); }
            }
        });
        CHECK(c.code == 1, "no test noticed that %s was off by 1 %%", o.name.c_str());
    }
}

int main() {
#define X(op, Args, ...) list_outputs(Args<double, double>{});
    GPT2_OPS(X)
#undef X
#ifdef _OPENMP
    omp_set_num_threads(1);     // tiny tensors: on a busy machine most time would go into waiting for threads
#endif
    for (group_now = 0; group_now < kGroups; group_now++) {
        TEST(groups[group_now].name) { groups[group_now].run(); }
    }
    CHECK(overruns == 0, "%d tensors were written beside", overruns);
    TEST("every output off by 1 % is noticed") { test_that_tests_can_fail(); }
    return test_summary();
}
