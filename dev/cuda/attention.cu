/*
Ladder of the attention kernels (section 6.9): every step is checked against the plain kernels (fp32
arithmetic), then timed on rotated buffers. Step 0 is what training runs.
Build and run, from the repository root (BF16, for sm_90a):
    make build/cuda/attention && build/cuda/attention [B [T [NH]]]        e.g. build/cuda/attention 64 1024 12
*/
#define main train_gpt2_main
#include "train_gpt2.cu"
#undef main
#include <algorithm>     // gives: std::sort

#ifdef ENABLE_FP32
#error "the ladder is about the 16-bit kernels: build it without -DENABLE_FP32"
#endif

constexpr int kHS = 64;
constexpr int kBuffers = 2;     // rotated; each set is many times the L2 at the default size

struct Buffers {
    AttentionForward<floatX, float> forward;
    AttentionBackward<floatX, float> backward;
};

static int B = 64, T = 1024, NH = 12;

// The steps. Template arguments as in section 6.9 of train_gpt2.cu.
static void forward_plain(const Buffers& b) { attention_forward_plain<2>(b.forward, 0); }
template <int kGroups> static void forward_mma(const Buffers& b) {
    attention_forward_mma<kHS, kGroups, 64, 2>(b.forward, 0);
}
template <int kStages, int kMinBlocks> static void forward_sm90(const Buffers& b) {
    attention_forward_sm90<kStages, kMinBlocks>(b.forward, 0);
}
static void forward_shipped(const Buffers& b) { attention_forward(b.forward, 0); }

static void backward_plain(const Buffers& b) { attention_backward_plain<2>(b.backward, 0); }
template <int kGroups, int kTile, int kMinBlocks> static void backward_mma(const Buffers& b) {
    attention_backward_dq_mma<kHS, kGroups, kTile, kMinBlocks>(b.backward, 0);
    attention_backward_dkv_mma<kHS, kGroups, kTile, 2>(b.backward, 0);
}
static void backward_sm90_dq(const Buffers& b) { attention_backward_dq_sm90<2, 4>(b.backward, 0); }
static void backward_sm90(const Buffers& b) {
    backward_sm90_dq(b);
    attention_backward_dkv_sm90<3, 3>(b.backward, 0);
}
static void backward_shipped(const Buffers& b) { attention_backward(b.backward, 0); }

struct Step {
    const char* name;
    void (*run)(const Buffers&);
    double gemms;    // useful products: 2 forward, 5 backward (0: part of a pass, no rate)
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

static float median_ms(const Step& step, const Buffers* buffers) {
    constexpr int kRuns = 100;
    cudaEvent_t events[kRuns + 1];
    for (cudaEvent_t& event : events) { cudaCheck(cudaEventCreate(&event)); }
    for (int i = 0; i < 5; i++) { step.run(buffers[i % kBuffers]); }
    cudaCheck(cudaEventRecord(events[0]));
    for (int i = 0; i < kRuns; i++) {
        step.run(buffers[i % kBuffers]);
        cudaCheck(cudaEventRecord(events[i + 1]));
    }
    cudaCheck(cudaDeviceSynchronize());
    std::vector<float> ms(kRuns);
    for (int i = 0; i < kRuns; i++) { cudaCheck(cudaEventElapsedTime(&ms[i], events[i], events[i + 1])); }
    for (cudaEvent_t& event : events) { cudaCheck(cudaEventDestroy(event)); }
    std::sort(ms.begin(), ms.end());
    return ms[kRuns / 2];
}

template <class T> static T* allocate(size_t n) { return (T*)device_malloc(n * sizeof(T), "the ladder"); }

static Buffers buffers_create(uint32_t seed) {
    const size_t n = (size_t)B * T * NH * kHS;
    floatX *qkv = allocate<floatX>(3 * n), *dqkv = allocate<floatX>(3 * n);     // (B,T,3,NH,HS)
    floatX *out = allocate<floatX>(n), *dout = allocate<floatX>(n);             // (B,T,NH,HS)
    float* lse = allocate<float>(n / kHS);
    float* scratch = (float*)allocate<char>(attention_backward_scratch_bytes(B, T, NH));
    fill_kernel<<<(unsigned)ceil_div(3 * n, (size_t)256), 256, 0, 0>>>(qkv, 3 * n, seed);
    fill_kernel<<<(unsigned)ceil_div(n, (size_t)256), 256, 0, 0>>>(dout, n, seed + 17);
    cudaCheck(cudaGetLastError());
    return {{out, lse, qkv, B, T, NH, kHS}, {dqkv, scratch, dout, out, qkv, lse, B, T, NH, kHS}};
}

int main(int argc, char** argv) {
    if (argc > 1) { B = atoi(argv[1]); }
    if (argc > 2) { T = atoi(argv[2]); }
    if (argc > 3) { NH = atoi(argv[3]); }
    if (argc > 4 || B < 1 || T < 1 || NH < 1) { die("usage: attention [B [T [NH]]], all positive"); }
    const DeviceInfo device = device_init();
    const size_t n_out = (size_t)B * T * NH * kHS;
    Buffers buffers[kBuffers];
    for (int i = 0; i < kBuffers; i++) { buffers[i] = buffers_create((uint32_t)i); }

    std::vector<Step> forward = {{"forward  1 plain", forward_plain, 2},
                                 {"forward  2 mma.sync, 16 rows a warp", forward_mma<1>, 2},
                                 {"forward  3 mma.sync, 32 rows a warp", forward_mma<2>, 2}};
    std::vector<Step> backward = {{"backward 1 plain", backward_plain, 5},
                                  {"backward 2 mma.sync, 16 rows a warp", backward_mma<1, 32, 3>, 5},
                                  {"backward 3 mma.sync, 32 rows a warp", backward_mma<2, 32, 2>, 5}};
    if (attention_uses_sm90(kHS)) {
        forward.push_back({"forward  4 wgmma + TMA, 3 stages", forward_sm90<3, 3>, 2});
        forward.push_back({"forward  5 wgmma + TMA, 2 stages, 4 blocks an SM", forward_sm90<2, 4>, 2});
        backward.push_back({"backward 4 wgmma + TMA", backward_sm90, 5});
        backward.push_back({"           of which dQ", backward_sm90_dq, 0});
    }
    forward.push_back({"forward  0 what training runs", forward_shipped, 2});
    backward.push_back({"backward 0 what training runs", backward_shipped, 5});

    printf("%s, B=%d T=%d NH=%d HS=%d, " PRECISION_NAME "\n", device.name.c_str(), B, T, NH, kHS);
    const Buffers& first = buffers[0];
    int failed = 0;
    for (const std::vector<Step>* pass : {&forward, &backward}) {
        const bool is_forward = pass == &forward;
        floatX* result = is_forward ? first.forward.out : first.backward.dqkv;
        const size_t n = is_forward ? n_out : 3 * n_out;
        std::vector<floatX> reference;
        for (const Step& step : *pass) {
            double error = 0.0;
            if (step.gemms > 0.0) {
                // NaN: an element left out fails the check
                cudaCheck(cudaMemset(result, 0xFF, n * sizeof(floatX)));
                step.run(first);
                cudaCheck(cudaDeviceSynchronize());
                if (reference.empty()) { reference = to_host(result, n); }
                error = relative_distance(result, reference);
                if (!(error <= 1e-2)) { failed++; }
            }
            const float ms = median_ms(step, buffers);
            const double flops = step.gemms * B * NH * (double)T * T * kHS;     // causal half of 2 T^2 HS
            printf("%-50s %7.3f ms  %4.0f TFLOP/s useful  |d|/|plain| %.1e\n", step.name, ms,
                   flops / ms * 1e-9, error);
        }
    }
    printf("%s\n", failed == 0 ? "all steps agree" : "FAILED: a step disagrees with the plain kernels");
    return failed != 0;
}
