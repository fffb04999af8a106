/*
Ladder of the attention kernels (section 6.4): every step is checked against the plain kernels (fp32
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

typedef floatX E;
constexpr int kHS = 64;
constexpr int kBuffers = 2;    // rotated; each set is many times the L2 at the default size

struct Buffers {
    E *qkv, *dqkv, *out, *dout;    // (B,T,3,NH,HS) twice, (B,T,NH,HS) twice
    float *lse, *scratch;          // (B,NH,T), stats
};

static int B = 64, T = 1024, NH = 12;

// The steps. Template arguments as in section 6.4 of train_gpt2.cu.
static void forward_plain(const Buffers& b) {
    attention_forward_plain<E, 2>(b.out, b.lse, b.qkv, B, T, NH, kHS, 0);
}
template <int kTiles, int kWarps> static void forward_mma(const Buffers& b) {
    attention_forward_mma<E, kHS, kTiles, kWarps, 64, 2>(b.out, b.lse, b.qkv, B, T, NH, 0);
}
template <int kStages, int kBlocks> static void forward_sm90(const Buffers& b) {
    attention_forward_sm90<E, kStages, kBlocks>(b.out, b.lse, b.qkv, B, T, NH, 0);
}
static void forward_shipped(const Buffers& b) { attention_forward({b.out, b.lse, b.qkv, B, T, NH, kHS}, 0); }

static void backward_plain(const Buffers& b) {
    attention_backward_plain<E, 2>(b.dqkv, b.scratch, b.dout, b.out, b.qkv, b.lse, B, T, NH, kHS, 0);
}
template <int kTiles, int kBlock, int kBlocksDq, bool kKeepFragments>
static void backward_mma(const Buffers& b) {
    attention_backward_dq_mma<E, kHS, kTiles, 4, kBlock, kBlocksDq>(b.dqkv, b.scratch, b.dout, b.out, b.qkv,
                                                                    b.lse, B, T, NH, 0);
    attention_backward_dkv_mma<E, kHS, kTiles, 4, kBlock, 2, kKeepFragments>(b.dqkv, b.scratch, b.dout, b.qkv,
                                                                             B, T, NH, 0);
}
static void backward_sm90_dq(const Buffers& b) {
    attention_backward_dq_sm90<E, 2, 4>(b.dqkv, b.scratch, b.dout, b.out, b.qkv, b.lse, B, T, NH, 0);
}
static void backward_sm90(const Buffers& b) {
    backward_sm90_dq(b);
    attention_backward_dkv_sm90<E, 3, 3>(b.dqkv, b.scratch, b.dout, b.qkv, B, T, NH, 0);
}
static void backward_shipped(const Buffers& b) {
    attention_backward({b.dqkv, b.scratch, b.dout, b.out, b.qkv, b.lse, B, T, NH, kHS}, 0);
}

struct Step {
    const char* name;
    void (*run)(const Buffers&);
    double gemms;    // useful products: 2 forward, 5 backward (0: part of a pass, no rate)
};

__global__ void fill_kernel(E* data, size_t n, uint32_t seed) {
    const size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
    if (i < n) {
        uint32_t x = static_cast<uint32_t>(i) * 2654435761u + seed;
        x = (x ^ (x >> 16)) * 0x85ebca6bu;
        x = (x ^ (x >> 13)) * 0xc2b2ae35u;
        data[i] = static_cast<E>(((x ^ (x >> 16)) * 0x1p-32f - 0.5f) * 3.4641016f);    // uniform, variance 1
    }
}

static double relative_distance(const E* a, const std::vector<E>& reference) {
    std::vector<E> ours(reference.size());
    cudaCheck(cudaMemcpy(ours.data(), a, ours.size() * sizeof(E), cudaMemcpyDeviceToHost));
    double distance = 0.0, size = 0.0;
    for (size_t i = 0; i < ours.size(); i++) {
        const double r = static_cast<float>(reference[i]);
        const double d = static_cast<float>(ours[i]) - r;
        distance += d * d;
        size += r * r;
    }
    return sqrt(distance / size);
}

static std::vector<E> to_host(const E* data, size_t n) {
    std::vector<E> host(n);
    cudaCheck(cudaMemcpy(host.data(), data, n * sizeof(E), cudaMemcpyDeviceToHost));
    return host;
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

int main(int argc, char** argv) {
    if (argc > 1) { B = atoi(argv[1]); }
    if (argc > 2) { T = atoi(argv[2]); }
    if (argc > 3) { NH = atoi(argv[3]); }
    if (argc > 4 || B < 1 || T < 1 || NH < 1) {
        die("usage: attention [B [T [NH]]], all positive");
    }
    const DeviceInfo device = device_init();
    const size_t n_out = static_cast<size_t>(B) * T * NH * kHS;
    Buffers buffers[kBuffers];
    for (int i = 0; i < kBuffers; i++) {
        Buffers& b = buffers[i];
        cudaCheck(cudaMalloc(&b.qkv, 3 * n_out * sizeof(E)));
        cudaCheck(cudaMalloc(&b.dqkv, 3 * n_out * sizeof(E)));
        cudaCheck(cudaMalloc(&b.out, n_out * sizeof(E)));
        cudaCheck(cudaMalloc(&b.dout, n_out * sizeof(E)));
        cudaCheck(cudaMalloc(&b.lse, n_out / kHS * sizeof(float)));
        cudaCheck(cudaMalloc(&b.scratch, attention_backward_scratch_bytes(B, T, NH)));
        fill_kernel<<<static_cast<unsigned>(ceil_div(3 * n_out, size_t{256})), 256, 0, 0>>>(b.qkv, 3 * n_out,
                                                                                            i);
        fill_kernel<<<static_cast<unsigned>(ceil_div(n_out, size_t{256})), 256, 0, 0>>>(b.dout, n_out,
                                                                                        17 + i);
        cudaCheck(cudaGetLastError());
    }

    std::vector<Step> forward = {{"forward  1 plain", forward_plain, 2},
                                 {"forward  2 mma.sync, 16 rows a warp", forward_mma<1, 8>, 2},
                                 {"forward  3 mma.sync, 32 rows a warp", forward_mma<2, 4>, 2}};
    std::vector<Step> backward = {{"backward 1 plain", backward_plain, 5},
                                  {"backward 2 mma.sync, 16 rows a warp", backward_mma<1, 64, 3, true>, 5},
                                  {"backward 3 mma.sync, 32 rows a warp", backward_mma<2, 32, 2, false>, 5}};
    if (attention_sm90_ok(kHS)) {
        forward.push_back({"forward  4 wgmma + TMA, 3 stages", forward_sm90<3, 3>, 2});
        forward.push_back({"forward  5 wgmma + TMA, 2 stages, 4 blocks an SM", forward_sm90<2, 4>, 2});
        backward.push_back({"backward 4 wgmma + TMA", backward_sm90, 5});
        backward.push_back({"           of which dQ", backward_sm90_dq, 0});
    }
    forward.push_back({"forward  0 attention_forward", forward_shipped, 2});
    backward.push_back({"backward 0 attention_backward", backward_shipped, 5});

    printf("%s, B=%d T=%d NH=%d HS=%d, " PRECISION_NAME "\n", device.name.c_str(), B, T, NH, kHS);
    const Buffers& first = buffers[0];
    int failed = 0;
    for (const std::vector<Step>* pass : {&forward, &backward}) {
        const bool is_forward = pass == &forward;
        E* result = is_forward ? first.out : first.dqkv;
        const size_t n = is_forward ? n_out : 3 * n_out;
        std::vector<E> reference;
        for (const Step& step : *pass) {
            double error = 0.0;
            if (step.gemms > 0.0) {
                cudaCheck(
                    cudaMemset(result, 0xFF, n * sizeof(E)));    // NaN: an element left out fails the check
                step.run(first);
                cudaCheck(cudaDeviceSynchronize());
                if (reference.empty()) {
                    reference = to_host(result, n);
                }
                error = relative_distance(result, reference);
                if (!(error <= 1e-2)) {
                    failed++;
                }
            }
            const float ms = median_ms(step, buffers);
            const double flops =
                step.gemms * B * NH * static_cast<double>(T) * T * kHS;    // causal half of 2 T^2 HS
            printf("%-50s %7.3f ms  %4.0f TFLOP/s useful  |d|/|plain| %.1e\n", step.name, ms,
                   flops / ms * 1e-9, error);
        }
    }
    printf("%s\n", failed == 0 ? "all steps agree" : "FAILED: a step disagrees with the plain kernels");
    return failed != 0;
}
