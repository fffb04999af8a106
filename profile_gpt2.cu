/*
Where a training step's time goes: every op of the model at its own shape, beside what the GPU can do. Random
tokens, no data files, the trainer's flags.

    make profile_gpt2cu
    ./profile_gpt2cu -e d12 -b 64                   # `make bench-ops`; -x N: steps, the second half is timed
    ./profile_gpt2cu -e L1,NH64,C4096 -b 12 --block parallel --dropout 0.1      # other norms, other rows
    nsys profile -o step ./profile_gpt2cu -x 3      # each op is an NVTX range, with its shape inside

`make profile` adds ncu's counters of the last step. The ceilings are measured in the same run: copies, and
the step's own matrix products again and again for seconds, at the clock that the power limit leaves.
*/
#define PROFILING
#define main train_gpt2_main
#include "train_gpt2.cu"
#undef main
#include <cuda_profiler_api.h>      // gives: cudaProfilerStart
#include <functional>               // gives: std::function

// ---- what an op has to do ----
struct Work { double bytes, flops; };       // bytes: if each operand moves once; flops: of products alone

constexpr double kX = sizeof(floatX), kS = sizeof(float);
static double width(const Grad& g) {        // bytes of an element
    return g.data ? (g.is_bf16 ? 2 : kS) * (g.acc == Accumulate::Yes ? 2 : 1) : 0;
}
static double width(const StateOf<float>& s) { return s.is_bf16 ? 2 : kS; }
static double width(const StoredGrads& g) { return g.is_bf16 ? 2 : kS; }
static double elements(const Rows& rows, size_t n) { return (double)rows.count * (double)n; }
// inp, weight, out: bytes of an element, with those of tensors that have its shape.
static Work product(double N, double C, double OC, double inp, double weight, double out) {
    return {N * C * inp + C * OC * weight + N * OC * out, 2 * N * C * OC};
}
// Tensors of the queries' and of the keys' heads, in floatX, and products. Causal: half of each product, and
// of that the visited tiles.
template <class Args>
static Work attention_work(const Args& a, double of_queries, double of_keys, double products) {
    const double rows = (double)a.B * a.T * a.HS;
    const double scores = rows * a.NH * a.T * visited_tiles(Mask{a.mask.window}, a.T);
    return {kX * rows * (of_queries * a.NH + of_keys * a.NKV), products * scores};
}

template <class Args> static Work work(const Args&) { return {}; }
#define WORK(Args) static Work work(const Args& a)
WORK(EncoderForward) { return {2 * kX * a.B * a.T * a.C, 0}; }
WORK(EncoderBackward) {
    return {(kX * a.B * a.T + 2 * kS * a.buckets.num_segments + kS * a.maxT) * a.C, 0};
}
WORK(NormForward) {
    const int stream = !!a.inp + !!a.sum;
    const int others = !!a.branch[0] + !!a.branch[1] + !!a.y[0].out + !!a.y[1].out;
    return {(kX * (stream + others) + !!a.y[0].fp8 + !!a.y[1].fp8) * a.N * a.C, 0};
}
WORK(NormBackward) {
    const int stream = a.dresidual_acc == Accumulate::Yes ? 3 : 2;
    const int others = !!a.branch[0].dout + !!a.branch[1].dout + !!a.y[0].dout + !!a.y[1].dout;
    return {kX * (stream + others) * a.N * a.C, 0};
}
WORK(MatmulForward) {                   // of a gated activation (N,OC/2) of out
    const double act = (is_gated(a.mlp) ? 0.5 : 1) * !!a.pre_act;
    return product(a.N, a.C, a.OC, kX, kX, kX * (1 + !!a.residual + act));
}
WORK(MatmulBackwardInput) {             // of a gated activation (N,2C) are read and written
    const double act = (is_gated(a.mlp) ? 3 : 1) * !!a.pre_act;
    return product(a.N, a.C, a.OC, kX * (1 + !!a.residual + act), kX, kX);
}
WORK(MatmulBackwardWeight) { return product(a.N, a.C, a.OC, kX, width(a.dweight), kX); }
WORK(Fp8Matmul) {                       // a slope reads as many values of pre_act as it gives
    const double of_n = a.cast.stats ? (double)a.cast.width() / a.N : 0;        // columns cast for each of N
    const double out = a.out ? kX * (a.cast.before ? of_n : 1 + !!a.residual) : width(a.grad);
    return product(a.M, a.K, a.N, 1, 1, out + 2 * of_n);
}
WORK(Fp8Cast) {
    const double x = a.width(), pre_act = act_columns(a.mlp, a.C);      // columns
    const double read = a.source == Fp8Source::Act ? pre_act : a.C + (a.before ? pre_act : 0);
    return {(kX * read + (!!a.out + !!a.out_t) * x) * a.N, 0};
}
WORK(Fp8Transpose) { return {2.0 * a.N * a.C, 0}; }
WORK(BiasBackward) { return {kX * a.N * a.OC * (a.of_qkv ? 2 / 3.0 : 1), 0}; }
WORK(GradAccumulate) { return {(kS + width(a.grad)) * (double)a.n, 0}; }
WORK(Activate) { return {kX * a.N * (a.F + act_columns(a.mlp, a.F)), 0}; }
WORK(ActivateBackward) { return {kX * a.N * (a.F + 2 * act_columns(a.mlp, a.F)), 0}; }
WORK(RotateForward) { return {2 * kX * a.N * (a.NH + a.NKV) * a.HS, 0}; }
WORK(RotateBackward) {
    return {((a.rstd ? 2 : 1) * kX + (a.fp8 ? 1 : kX)) * a.N * (a.NH + a.NKV) * a.HS, 0};
}
WORK(ValueEmbed) { return {3 * kX * a.N * a.NKV * a.HS, 0}; }
WORK(AttentionForward) { return attention_work(a, 2, 2, 2); }
WORK(AttentionBackward) {
    const double v = a.fp8 ? 1 / kX : 1, q_k = a.only_v ? 1 : v;
    return attention_work(a, 3 + q_k, 2 + q_k + v, 5);
}
WORK(Classifier) {
    const double grad = a.mode == ClassifierMode::LossOnly ? 0 : a.fp8_grad ? 1 : kX;
    return {(kX + grad) * a.N * a.Vp, 0};
}
WORK(MarkLikeliest) { return {kX * a.N * a.Vp, 0}; }
WORK(LossSum) { return {kS * a.N, 0}; }
WORK(LaneSum) {
    return {(double)a.n * (kS * a.num_chain + width(a.pieces) * a.num_pieces + width(a.out)), 0};
}
WORK(SquareSums) { return {elements(a.rows, a.n) * width(a.grads), 0}; }
// An update of weights: both ways, but beside an fp32 master they are only written.
static double weights_width(const masterX* master) {
    return !master ? 2 * kX : sizeof(masterX) == 2 ? 2 * kX + 4 : kX + 8;
}
WORK(AdamW) {                               // m and v both ways, weights one way or both
    const double weights = a.params_fp32 ? 2 * kS : weights_width(a.master);
    return {elements(a.rows, a.n) * (width(a.grads) + 4 * width(a.m) + weights), 0};
}
WORK(MuonMomentum) {
    return {elements(a.rows, a.n) * (width(a.grads) + 2 * width(a.m) + sizeof(muonX)), 0};
}
WORK(MuonOrthogonalise) {
    const double m = std::min(a.rows, a.cols), n = std::max(a.rows, a.cols);
    return {0, a.steps * a.places.count() * (4 * m * m * n + 2 * m * m * m)};
}
WORK(MuonUpdate) { return {elements(a.rows, a.n) * (sizeof(muonX) + weights_width(a.master)), 0}; }
#undef WORK

// ---- what it took ----
struct Timed { std::string name; Work work; Event begin, end; };
static struct {
    bool on = false;
    int depth = 0;                              // an op that another one calls is part of that
    std::vector<Timed> ops;
    std::vector<std::function<void()>> gemms;
    double gemm_flops = 0;
} profile;

static Event event_now(Stream stream) {
    const Event event = event_create();
    event_record(event, stream);
    return event;
}
static double ms_between(Event begin, Event end) {
    const double ms = event_ms(begin, end);
    event_destroy(begin);
    event_destroy(end);
    return ms;
}

// The matrix products have their shape in their name, and are kept to be run again.
template <class Args> static std::string profile_name(const Args& a, Stream) { return op_name(a); }
#define NAME(op, Args, inp, out)                                                    \
    static std::string profile_name(const Args& a, Stream stream) {                 \
        profile.gemms.push_back([=] { op(a, stream); });                            \
        profile.gemm_flops += work(a).flops;                                        \
        return format("%s %dx%d", op_name(a), a.inp, a.out);                        \
    }
NAME(matmul_forward, MatmulForward, C, OC)
NAME(matmul_backward_input, MatmulBackwardInput, C, OC)
NAME(matmul_backward_weight, MatmulBackwardWeight, C, OC)
NAME(fp8_matmul, Fp8Matmul, K, N)
#undef NAME

template <class Args> static void profile_begin(const Args& a, Stream stream) {
    if (!profile.on || profile.depth++ > 0) { return; }
    const std::string name = profile_name(a, stream);
    nvtxRangePushA(name.c_str());
    profile.ops.push_back({name, work(a), event_now(stream), nullptr});
}
template <class Args> static void profile_end(const Args&, Stream stream) {
    if (!profile.on || --profile.depth > 0) { return; }
    profile.ops.back().end = event_now(stream);
    nvtxRangePop();
}

// The median of what op takes on its stream, run again and again for `seconds`, without the first quarter.
static double sustained_ms(const std::function<void()>& op, Stream stream, double seconds) {
    std::vector<double> ms;
    for (double sum = 0; sum < 1e3 * seconds; sum += ms.back()) {
        const Event begin = event_now(stream);
        op();
        const Event end = event_now(stream);
        cudaCheck(cudaDeviceSynchronize());
        ms.push_back(ms_between(begin, end));
    }
    ms.erase(ms.begin(), ms.begin() + (ptrdiff_t)ms.size() / 4);
    std::sort(ms.begin(), ms.end());
    return ms[ms.size() / 2];
}

// bytes/s, read and written.
static double copy_rate() {
    constexpr size_t kBytes = (size_t)1 << 29;
    char* buffer = (char*)device_malloc(2 * kBytes, "a copy");
    cudaCheck(cudaMemset(buffer, 1, 2 * kBytes));
    const double ms = sustained_ms([&] {
        for (int i = 0; i < 8; i++) {
            cudaCheck(cudaMemcpyAsync(buffer, buffer + kBytes, kBytes, cudaMemcpyDeviceToDevice, 0));
        }
    }, 0, 0.3);
    device_free(buffer);
    return 8 * 2 * kBytes / ms * 1e3;
}

// A line per plan of llmc/ops/cublaslt.h, with what the library chose (-1: it did not say).
static void print_plans(Stream stream) {
    for (const GemmPlan& p : gemm_stream(stream).plans) {
        auto get = [&](cublasLtMatmulAlgoConfigAttributes_t attribute) {
            int value = -1;
            size_t written = 0;
            cublasLtMatmulAlgoConfigGetAttribute(&p.algo, attribute, &value, sizeof(value), &written);
            return value;
        };
        printf("gemm m %d n %d k %d %c%c epilogue %d beta %d: algorithm %d tile %d stages %d split-k %d\n",
               (int)p.key[0], (int)p.key[1], (int)p.key[2], p.key[3] ? 'T' : 'N', p.key[4] ? 'T' : 'N',
               (int)p.key[6], (int)p.key[7], get(CUBLASLT_ALGO_CONFIG_ID), get(CUBLASLT_ALGO_CONFIG_TILE_ID),
               get(CUBLASLT_ALGO_CONFIG_STAGES_ID), get(CUBLASLT_ALGO_CONFIG_SPLITK_NUM));
    }
}

// Ops of one name together, the longest first. The ceiling is what an op's bytes take at a copy's rate, or
// its FLOPs at that of the matrix products, whichever is longer.
static void print_ops(int steps, double step_ms, double copy, double gemm) {
    struct Row { std::string name; int calls; double ms, bytes, flops, floor; };
    std::vector<Row> rows;
    Row all = {"all", 0, 0, 0, 0, 0};
    for (const Timed& op : profile.ops) {
        auto row = std::find_if(rows.begin(), rows.end(), [&](const Row& r) { return r.name == op.name; });
        if (row == rows.end()) { row = rows.insert(row, {op.name, 0, 0, 0, 0, 0}); }
        const double ms = ms_between(op.begin, op.end);
        const double floor = 1e3 * std::max(op.work.bytes / copy, op.work.flops / gemm);
        for (Row* r : {&*row, &all}) {
            r->calls++, r->ms += ms, r->bytes += op.work.bytes, r->flops += op.work.flops, r->floor += floor;
        }
    }
    std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.ms > b.ms; });
    rows.push_back(all);
    printf("%-36s %5s %9s %7s %7s %8s %12s\n", "op", "calls", "ms", "share", "GB/s", "TFLOP/s",
           "of ceiling");
    for (const Row& r : rows) {
        printf("%-36s %5d %9.3f %5.1f %% %7.0f %8.0f %10.1f %%\n", r.name.c_str(), r.calls / steps,
               r.ms / steps, 100 * r.ms / steps / step_ms, r.bytes / r.ms * 1e-6, r.flops / r.ms * 1e-9,
               100 * r.floor / r.ms);
    }
}

int main(int argc, char** argv) {
    flags_parse(kFlags, argc, argv, kFlagGroups);
    const Config c = settle();
    Options options = run_options();
    options.graphs = false;                     // a graph's kernels are in no op's range
    const int B = run.B, T = run.T, steps = run_max_steps() > 0 ? (int)run_max_steps() : 40;
    const DeviceInfo device = device_init();
    if (options.fp8) { die_if(fp8_error()); }
    model_check_memory(c, options, device);
    Model model;
    model_allocate(&model, c, options);
    model_init_random(&model, options.seed);
    std::vector<int> x((size_t)B * T), y((size_t)B * T);
    for (size_t i = 0; i < x.size(); i++) {
        x[i] = (int)(rand_u32(1, RAND_SAMPLE, 0, i) % (uint32_t)c.V);
        y[i] = (int)(rand_u32(1, RAND_SAMPLE, 1, i) % (uint32_t)c.V);
    }
    const int timed = std::max(1, steps / 2), micro_steps = rank_micro_steps();
    double step_ms = 0;
    for (int step = 0; step < steps; step++) {
        profile.on = step >= steps - timed;
        profile.gemms.clear();
        profile.gemm_flops = 0;
        if (step == steps - 1) { cudaCheck(cudaProfilerStart()); }      // for ncu --profile-from-start off
        const Event begin = event_now(model.stream);
        for (int i = 0; i < micro_steps; i++) {
            model_micro_step(&model, x.data(), y.data(), B, T, i, micro_steps);
        }
        model_update(&model, micro_steps, run.lr, run.muon_lr);
        const Event end = event_now(model.stream);
        model_read_state(&model);                                        // waits
        const double ms = ms_between(begin, end);
        if (profile.on) { step_ms += ms / timed; }
    }
    cudaCheck(cudaProfilerStop());
    profile.on = false;

    const double gemm_ms =
        sustained_ms([] { for (const auto& gemm : profile.gemms) { gemm(); } }, model.stream, 4);
    if (run.verbose > 0) { print_plans(model.stream); }
    model_free(&model);
    const double copy = copy_rate(), gemm = profile.gemm_flops / gemm_ms * 1e3;
    printf("%s, %s, B=%d, T=%d, " PRECISION_NAME "\n", device.name.c_str(), run.model, B, T);
    printf("step %.3f ms, of it its matrix products alone %.3f ms\n", step_ms, gemm_ms);
    printf("ceilings: %.0f TFLOP/s, copy %.0f GB/s\n", gemm * 1e-12, copy * 1e-9);
    print_ops(timed, step_ms, copy, gemm);
    return 0;
}
