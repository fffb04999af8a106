/*
Ladder of the attention kernels (section 6.9): every step is checked against the plain kernels (fp32
arithmetic), then timed on rotated buffers. "shipped" is what training runs here; the first mma.sync step of a
kind is what it runs where there is no sm90 form.
Build and run, from the repository root:
    make build/cuda/attention && build/cuda/attention [B [T [HS [NH [WINDOW [MEAN]]]]]]     e.g. 64 1024 64 12
        without HS: every head size that has steps, C = 768 (or the next multiple of HS below) for all
        without a window, or with 0, a token sees all before it; MEAN: of its document, the mean length
TF32:
    nvcc -std=c++17 -O3 -I. -DENABLE_FP32 -gencode arch=compute_90a,code=sm_90a dev/cuda/attention.cu \
        -o build/cuda/attention.FP32 -lcublasLt && build/cuda/attention.FP32 16
Beside PyTorch's: dev/bench/attention.py, which loads this file as a library, without the ladder.
*/
#define main train_gpt2_main
#include "train_gpt2.cu"
#undef main
#include <algorithm>     // gives: std::sort

// == what dev/bench/attention.py calls: what training runs, on PyTorch's memory and stream ==
extern "C" {
void attention_library_init() {         // on the first GPU that this process sees
    device_init();
    select_kernels(false, true);
}
size_t attention_library_scratch_bytes(int B, int T, int NH) {
    return attention_backward_scratch_bytes(B, T, NH);
}
void attention_library_forward(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, int HS,
                               int window, const Span* documents, Stream stream) {
    attention_forward({out, lse, qkv, B, T, NH, NH, HS, {window, documents}}, stream);
}
void attention_library_backward(floatX* dqkv, float* scratch, const floatX* dout, const floatX* out,
                                const floatX* qkv, const float* lse, int B, int T, int NH, int HS, int window,
                                const Span* documents, Stream stream) {
    attention_backward({dqkv, scratch, dout, out, qkv, lse, B, T, NH, NH, HS, {window, documents}}, stream);
}
}

#ifndef ATTENTION_LIBRARY       // the ladder

constexpr int kBuffers = 2;     // rotated; each set is many times the L2 at the default size

struct Buffers {
    AttentionForward forward;
    AttentionBackward backward;
};

static int B = 64, T = 1024;
static int mean;                // length of documents; 0: none
static Mask mask;

// The kernel that such a mask takes.
#define KERNEL(...)                                                   \
    (mask.documents   ? __VA_ARGS__, Hides::Documents>                \
     : mask.hides(T)  ? __VA_ARGS__, Hides::Window>                   \
                      : __VA_ARGS__, Hides::Nothing>)

// What a step computes. The dK/dV kernel needs the statistics that a tensor-core dQ kernel left in scratch.
enum class AttentionPass { Forward, Backward, Dq, Dkv };
struct Step {
    int HS;             // 0: any
    AttentionPass pass;
    const char* name;
    void (*run)(const Buffers&);
};

template <int kHS, int kGroups, int kTile, int kBlocks> static void forward_mma(const Buffers& b) {
    typedef MmaShape<kHS, kGroups, kTile, kBlocks> Shape;
    attention_launch<Own::Queries, Shape>(KERNEL(attention_forward_mma_kernel<Shape), b.forward,
                                          MmaShared<1, Shape>::bytes(), 0);
}
template <Own kOwn, int kHS, int kGroups, int kTile, int kBlocks> static void backward_mma(const Buffers& b) {
    typedef MmaShape<kHS, kGroups, kTile, kBlocks> Shape;
    attention_launch<kOwn, Shape>(KERNEL(attention_backward_mma_kernel<kOwn, Shape), b.backward,
                                  MmaShared<2, Shape>::bytes(), 0);
}
template <int... kShape> static void forward_sm90(const Buffers& b) {
    typedef Sm90Shape<kShape...> Shape;
    const AttentionForward& a = b.forward;
    attention_launch<Own::Queries, Shape>(KERNEL(attention_forward_sm90_kernel<Shape), a,
                                          sizeof(Sm90Shared<1, Shape>), 0,
                                          tensor_map(a.qkv, B, T, a.NH + 2 * a.NKV, 64, 1, a.HS));
}
template <Own kOwn, int... kShape> static void backward_sm90(const Buffers& b) {
    typedef Sm90Shape<kShape...> Shape;
    const AttentionBackward& a = b.backward;
    attention_launch<kOwn, Shape>(KERNEL(attention_backward_sm90_kernel<kOwn, Shape), a,
                                  sizeof(Sm90Shared<2, Shape>), 0,
                                  tensor_map(a.qkv, B, T, a.NH + 2 * a.NKV, 64, 1, a.HS),
                                  tensor_map(a.dout, B, T, a.NH, 64, 1, a.HS));
}
template <class Args> static void plain(const Args& a) {        // a window of 0 hides nothing
    mask.documents ? attention_plain<Hides::Documents>(a, 0) : attention_plain<Hides::Window>(a, 0);
}
static void forward_plain(const Buffers& b) { plain(b.forward); }
static void backward_plain(const Buffers& b) { plain(b.backward); }
static void forward_shipped(const Buffers& b) { attention_forward(b.forward, 0); }
static void backward_shipped(const Buffers& b) { attention_backward(b.backward, 0); }

// form: mma, with head size, groups of 16 rows a warp, rows of a tile, blocks on an SM, as in MmaShape; or
// sm90, with columns, warpgroups, rows of a tile, stages, blocks on an SM, as in Sm90Shape. An MmaShape that
// asks for more than kPortableShared does not compile.
#define STEP(pass, text, form, run, HS, ...) \
    {HS, AttentionPass::pass, text " " #form " <" #HS ", " #__VA_ARGS__ ">", run}
#define FORWARD(form, HS, ...) \
    STEP(Forward, "forward", form, (forward_##form<HS, __VA_ARGS__>), HS, __VA_ARGS__)
#define DQ(form, HS, ...) \
    STEP(Dq, "dQ", form, (backward_##form<Own::Queries, HS, __VA_ARGS__>), HS, __VA_ARGS__)
#define DKV(form, HS, ...) \
    STEP(Dkv, "dK/dV", form, (backward_##form<Own::Keys, HS, __VA_ARGS__>), HS, __VA_ARGS__)

static const Step kSteps[] = {
    {0, AttentionPass::Forward, "forward plain", forward_plain},
    {0, AttentionPass::Backward, "backward plain", backward_plain},
    {0, AttentionPass::Forward, "forward shipped", forward_shipped},
    {0, AttentionPass::Backward, "backward shipped", backward_shipped},
#ifdef ENABLE_FP32
    FORWARD(mma, 32, 2, 64, 2), FORWARD(mma, 32, 2, 32, 3), FORWARD(mma, 32, 1, 64, 3),
    DQ(mma, 32, 2, 32, 2), DQ(mma, 32, 2, 32, 3), DQ(mma, 32, 1, 32, 3),
    DKV(mma, 32, 2, 32, 2), DKV(mma, 32, 1, 32, 3),
    FORWARD(mma, 64, 2, 32, 2), FORWARD(mma, 64, 1, 64, 2), FORWARD(mma, 64, 1, 32, 3),
    DQ(mma, 64, 2, 16, 2), DQ(mma, 64, 1, 32, 2), DQ(mma, 64, 1, 32, 3),
    DKV(mma, 64, 2, 16, 2), DKV(mma, 64, 1, 32, 2), DKV(mma, 64, 1, 32, 3),
    FORWARD(mma, 96, 1, 32, 2), FORWARD(mma, 96, 1, 16, 2),
    DQ(mma, 96, 1, 16, 2), DKV(mma, 96, 1, 16, 2),
    FORWARD(mma, 128, 1, 32, 2), FORWARD(mma, 128, 1, 16, 2),
    DQ(mma, 128, 1, 16, 2), DKV(mma, 128, 1, 16, 2),
#else
    FORWARD(sm90, 64, 1, 64, 2, 4), FORWARD(sm90, 64, 1, 64, 3, 3), FORWARD(sm90, 64, 2, 128, 3, 1),
    DQ(sm90, 64, 1, 64, 2, 4), DQ(sm90, 64, 1, 64, 1, 4),
    DKV(sm90, 64, 1, 64, 2, 3), DKV(sm90, 64, 1, 64, 3, 3),
    FORWARD(sm90, 128, 2, 128, 2, 1), FORWARD(sm90, 128, 1, 64, 2, 2),
    DQ(sm90, 128, 1, 64, 1, 3), DQ(sm90, 128, 1, 64, 2, 2),
    DKV(sm90, 128, 1, 64, 2, 2), DKV(sm90, 128, 1, 64, 1, 2),
    FORWARD(mma, 32, 2, 64, 3), FORWARD(mma, 32, 2, 64, 2), FORWARD(mma, 32, 1, 64, 4),
    DQ(mma, 32, 2, 32, 3), DQ(mma, 32, 2, 32, 2), DQ(mma, 32, 1, 64, 3),
    DKV(mma, 32, 2, 32, 3), DKV(mma, 32, 2, 32, 2), DKV(mma, 32, 1, 64, 3),
    FORWARD(mma, 64, 2, 64, 2), FORWARD(mma, 64, 1, 64, 3),
    DQ(mma, 64, 2, 32, 2), DQ(mma, 64, 1, 32, 3),
    DKV(mma, 64, 2, 32, 2), DKV(mma, 64, 1, 32, 3),
    FORWARD(mma, 96, 1, 64, 2), FORWARD(mma, 96, 1, 32, 3),
    DQ(mma, 96, 1, 64, 2), DQ(mma, 96, 1, 32, 2),
    DKV(mma, 96, 1, 32, 2),
    FORWARD(mma, 128, 1, 64, 2), FORWARD(mma, 128, 1, 32, 2),
    DQ(mma, 128, 1, 32, 2),
    DKV(mma, 128, 1, 32, 2), DKV(mma, 128, 1, 16, 2),
#endif
};

__global__ void fill_kernel(floatX* data, size_t n, uint32_t seed) {
    const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i < n) {
        uint32_t x = (uint32_t)i * 2654435761u + seed;
        x = (x ^ (x >> 16)) * 0x85ebca6bu;
        x = (x ^ (x >> 13)) * 0xc2b2ae35u;
        data[i] = (floatX)(((x ^ (x >> 16)) * 0x1p-32f - 0.5f) * 3.4641016f);       // uniform, variance 1
    }
}

static std::vector<floatX> to_host(const floatX* data, size_t n) {
    std::vector<floatX> host(n);
    cudaCheck(cudaMemcpy(host.data(), data, n * sizeof(floatX), cudaMemcpyDeviceToHost));
    return host;
}

static double relative_distance(const floatX* data, const std::vector<floatX>& reference) {
    const std::vector<floatX> ours = to_host(data, reference.size());
    double distance = 0.0, size = 0.0;
    for (size_t i = 0; i < ours.size(); i++) {
        const double r = (float)reference[i], d = (float)ours[i] - r;
        distance += d * d;
        size += r * r;
    }
    return sqrt(distance / size);
}

static float median_ms(void (*run)(const Buffers&), const Buffers* buffers) {
    constexpr int kRuns = 30;
    cudaEvent_t events[kRuns + 1];
    for (cudaEvent_t& event : events) { cudaCheck(cudaEventCreate(&event)); }
    for (int i = 0; i < 5; i++) { run(buffers[i % kBuffers]); }
    cudaCheck(cudaEventRecord(events[0]));
    for (int i = 0; i < kRuns; i++) {
        run(buffers[i % kBuffers]);
        cudaCheck(cudaEventRecord(events[i + 1]));
    }
    cudaCheck(cudaGetLastError());          // of the launches
    cudaCheck(cudaDeviceSynchronize());
    std::vector<float> ms(kRuns);
    for (int i = 0; i < kRuns; i++) { cudaCheck(cudaEventElapsedTime(&ms[i], events[i], events[i + 1])); }
    for (cudaEvent_t& event : events) { cudaCheck(cudaEventDestroy(event)); }
    std::sort(ms.begin(), ms.end());
    return ms[kRuns / 2];
}

template <class T> static T* allocate(size_t n) { return (T*)device_malloc(n * sizeof(T), "the ladder"); }

static Buffers buffers_create(int NH, int HS, uint32_t seed) {
    const size_t n = (size_t)B * T * NH * HS;
    floatX *qkv = allocate<floatX>(3 * n), *dqkv = allocate<floatX>(3 * n);     // (B,T,3,NH,HS)
    floatX *out = allocate<floatX>(n), *dout = allocate<floatX>(n);             // (B,T,NH,HS)
    float* lse = allocate<float>(n / HS);
    float* scratch = (float*)allocate<char>(attention_backward_scratch_bytes(B, T, NH));
    fill_kernel<<<(unsigned)ceil_div(3 * n, (size_t)256), 256, 0, 0>>>(qkv, 3 * n, seed);
    fill_kernel<<<(unsigned)ceil_div(n, (size_t)256), 256, 0, 0>>>(dout, n, seed + 17);
    cudaCheck(cudaGetLastError());
    return {{out, lse, qkv, B, T, NH, NH, HS, mask},
            {dqkv, scratch, dout, out, qkv, lse, B, T, NH, NH, HS, mask}};
}
static void buffers_free(const Buffers& b) {
    for (void* p : {(void*)b.forward.out, (void*)b.forward.lse, (void*)b.forward.qkv, (void*)b.backward.dqkv,
                    (void*)b.backward.scratch, (void*)b.backward.dout}) {
        device_free(p);
    }
}

// Runs the step once where its result was NaN, and returns the distance from `reference`. dQ and dK/dV alone:
// the other part of dqkv is what the whole backward wrote.
static double step_error(const Step& step, const Buffers& b, const std::vector<floatX>& reference) {
    const size_t C = (size_t)b.forward.NH * b.forward.HS, N = (size_t)B * T, row = C * sizeof(floatX);
    if (step.pass == AttentionPass::Forward) {
        cudaCheck(cudaMemset(b.forward.out, 0xFF, N * row));
        step.run(b);
        return relative_distance(b.forward.out, reference);
    }
    backward_shipped(b);
    const size_t first = step.pass == AttentionPass::Dkv ? 1 : 0;
    const size_t count = step.pass == AttentionPass::Dq ? 1 : 3 - first;
    cudaCheck(cudaMemset2D(b.backward.dqkv + first * C, 3 * row, 0xFF, count * row, N));
    step.run(b);
    return relative_distance(b.backward.dqkv, reference);
}

// On the device. Each token begins one with the same probability.
static const Span* random_documents() {
    std::vector<int> tokens((size_t)B * T);
    for (size_t i = 0; i < tokens.size(); i++) { tokens[i] = rand_u32(5, RAND_SAMPLE, 0, i) % mean == 0; }
    std::vector<Span> documents(tokens.size());
    find_documents(documents.data(), tokens.data(), B, T, 1, nullptr);
    Span* on_device = allocate<Span>(documents.size());
    copy_to_device(on_device, documents.data(), documents.size() * sizeof(Span), 0);
    stream_sync(0);
    return on_device;
}

static int run_head_size(int HS, int NH) {
    printf("B=%d T=%d NH=%d HS=%d window %d, documents of %d, " PRECISION_NAME ", shipped: %s\n", B, T, NH,
           HS, mask.window, mean, attention_form(HS));
    Buffers buffers[kBuffers];
    for (int i = 0; i < kBuffers; i++) {
        buffers[i] = buffers_create(NH, HS, (uint32_t)i);
        forward_plain(buffers[i]);
        backward_plain(buffers[i]);
    }
    const Buffers& b = buffers[0];
    const size_t n = (size_t)B * T * NH * HS;
    const std::vector<floatX> out = to_host(b.forward.out, n), dqkv = to_host(b.backward.dqkv, 3 * n);
    int failed = 0;
    for (const Step& step : kSteps) {
        const bool sm90 = strstr(step.name, "sm90") != nullptr;
        if ((step.HS != 0 && step.HS != HS) || (sm90 && !attention_uses_sm90(HS))) { continue; }
        // What the dK/dV kernels read must come from a tensor-core dQ kernel, whatever ran before
        for (const Buffers& each : buffers) { backward_shipped(each); }
        const double error = step_error(step, b, step.pass == AttentionPass::Forward ? out : dqkv);
        if (!(error <= 1e-2)) { failed++; }
        const float ms = median_ms(step.run, buffers);
        // Useful products: 2 forward, 5 backward; of the backward's kernels alone, those that they calculate
        const double gemms = step.pass == AttentionPass::Forward    ? 2
                             : step.pass == AttentionPass::Backward ? 5
                             : step.pass == AttentionPass::Dq       ? 3
                                                                    : 4;
        // causal half of 2 T^2 HS, and of that what the window leaves, in tiles; documents leave less
        const double flops = gemms * B * NH * (double)T * T * HS * visited_tiles(Mask{mask.window}, T);
        printf("  %-50s %7.3f ms  %4.0f TFLOP/s  |d|/|plain| %.1e%s\n", step.name, ms, flops / ms * 1e-9,
               error, error <= 1e-2 ? "" : "  FAILED");
        fflush(stdout);
    }
    for (const Buffers& each : buffers) { buffers_free(each); }
    return failed;
}

int main(int argc, char** argv) {
    if (argc > 1) { B = atoi(argv[1]); }
    if (argc > 2) { T = atoi(argv[2]); }
    const int only = argc > 3 ? atoi(argv[3]) : 0, heads = argc > 4 ? atoi(argv[4]) : 0;
    mask.window = argc > 5 ? atoi(argv[5]) : 0;
    mean = argc > 6 ? atoi(argv[6]) : 0;
    if (argc > 7 || B < 1 || T < 1 || only < 0 || heads < 0 || mask.window < 0 || mean < 0) {
        die("usage: attention [B [T [HS [NH [WINDOW [MEAN]]]]]], all positive");
    }
    const DeviceInfo device = device_init();
    if (mean > 0) { mask.documents = random_documents(); }
    printf("%s\n", device.name.c_str());
    select_kernels(false, true);
    int failed = 0;
    for (int HS = 1; HS <= kPlainMaxHeadSize; HS++) {
        bool has_steps = HS == only;
        for (const Step& step : kSteps) { has_steps = has_steps || (only == 0 && step.HS == HS); }
        if (has_steps) { failed += run_head_size(HS, heads ? heads : std::max(1, 768 / HS)); }
    }
    printf("%s\n", failed == 0 ? "all steps agree" : "FAILED: a step disagrees with the plain kernels");
    return failed != 0;
}
#endif
