/*
Times the norms of the residual stream (section 6.2), every member of the family that training can meet,
beside the copy of a tensor in the same run: microseconds, GB/s, and percent of what the copy reaches. A part
of profile_gpt2.cu, which is compiled anyway:

    make profile_gpt2cu && ./profile_gpt2cu norms           # `make bench-ops` calls it; 20 s on an H200

Tensors have 50M elements, 100 MB in 16 bits: twice an H200's L2, so what one run leaves there is of no use to
the next. What the kernels compute is the business of test_gpt2.
*/
#ifndef DEV_CUDA_NORMS_H
#define DEV_CUDA_NORMS_H

static double norms_median_us(const std::function<void()>& op) {
    constexpr int kRuns = 15;
    cudaEvent_t events[kRuns + 1];
    for (cudaEvent_t& event : events) { cudaCheck(cudaEventCreate(&event)); }
    for (int i = 0; i < 3; i++) { op(); }
    cudaCheck(cudaEventRecord(events[0], 0));
    for (int i = 0; i < kRuns; i++) {
        op();
        cudaCheck(cudaEventRecord(events[i + 1], 0));
    }
    cudaCheck(cudaDeviceSynchronize());
    std::vector<float> ms(kRuns);
    for (int i = 0; i < kRuns; i++) { cudaCheck(cudaEventElapsedTime(&ms[i], events[i], events[i + 1])); }
    for (cudaEvent_t& event : events) { cudaCheck(cudaEventDestroy(event)); }
    std::sort(ms.begin(), ms.end());
    return 1000.0 * ms[kRuns / 2];
}

__global__ void norms_fill_kernel(floatX* data, size_t n, uint32_t seed) {
    const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    const uint32_t draw = philox4x32((uint32_t)i, 0, 0, seed, 1, 2).w[0];
    if (i < n) { data[i] = (floatX)((draw >> 8) * 0x1p-23f - 1.0f); }
}

// branches: that are added; drops: each has dropout. fp32: the stream, in 16-bit builds.
struct NormTimed { const char* name; int norms, branches; bool drops, rms, fp32 = false; };

static int norms_bench() {
    static const NormTimed kinds[] = {
        {"layernorm (GPT-2)", 1, 0, false, false},
        {"rmsnorm", 1, 0, false, true},
        {"two layernorms (parallel)", 2, 0, false, false},
        {"+ dropout(branch), layernorm", 1, 1, true, false},
        {"+ dropout(two branches), two layernorms", 2, 2, true, false},
        {"+ dropout(two branches), layernorm (tied)", 1, 2, true, false},
        {"+ branch, layernorm, stream in fp32", 1, 1, false, false, kLowPrecision},
        {"+ two branches, two layernorms, stream in fp32", 2, 2, false, false, kLowPrecision}};
    constexpr size_t kElements = (size_t)65536 * 768;
    constexpr int kTensors = 7;
    floatX *x[kTensors], *stream[3];            // stream: floatX, or fp32
    for (int i = 0; i < kTensors; i++) {
        x[i] = (floatX*)device_malloc(kElements * sizeof(floatX), "a tensor");
        norms_fill_kernel<<<(unsigned)(kElements / 256), 256, 0, 0>>>(x[i], kElements, (uint32_t)i);
    }
    for (floatX*& s : stream) {
        s = (floatX*)device_malloc(kElements * sizeof(float), "a tensor of the stream");
        cudaCheck(cudaMemset(s, 0, kElements * sizeof(float)));
    }
    cudaCheck(cudaGetLastError());
    float* vectors = (float*)device_malloc((size_t)12 * kMaxC * sizeof(float), "vectors");
    const std::vector<float> ones((size_t)12 * kMaxC, 1.0f);
    copy_to_device(vectors, ones.data(), ones.size() * sizeof(float), 0);
    float* rows = (float*)device_malloc(2 * kElements / 768 * sizeof(float), "statistics");
    float* scratch = (float*)device_malloc(norm_backward_scratch_bytes(65536, kMaxC, 6), "scratch");
    auto vector = [&](int i) { return vectors + i * kMaxC; };
    auto sum = [&](int i) { return Grad{vector(i), Accumulate::No}; };
    const double copy_us = norms_median_us([&] {
        cudaCheck(cudaMemcpyAsync(x[0], x[1], kElements * sizeof(floatX), cudaMemcpyDeviceToDevice, 0));
    });
    const double copy = 2.0 * kElements * sizeof(floatX) / copy_us * 1e-3;
    printf("copy of %.0f MB: %.0f us, %.0f GB/s (" PRECISION_NAME ")\n", kElements * sizeof(floatX) * 1e-6,
           copy_us, copy);
    for (int C : {768, 1024, 1280, 1600, 2048, 4096, 8192, kMaxC}) {
        const int N = (int)(kElements / C);
        printf("C=%d, N=%d%*sforward us  GB/s  %% copy   backward us  GB/s  %% copy\n", C, N, 22, "");
        for (const NormTimed& kind : kinds) {
            const NormKind norm = kind.rms ? NormKind::Rms : NormKind::Layer;
            const Dropout drop = dropout_of(kind.drops ? 0.1 : 0.0, {1337, 1, 2}, 0);
            NormForward<floatX, float> f = {};
            NormBackward<floatX, float> b = {};
            f.mean = rows, f.rstd = rows + N, f.inp = x[0], f.kind = norm, f.N = N, f.C = C;
            b.mean = rows, b.rstd = rows + N, b.inp = x[0], b.kind = norm, b.N = N, b.C = C;
            b.dresidual = x[1], b.dresidual_acc = Accumulate::Yes, b.scratch = scratch;
            for (int i = 0; i < kind.norms; i++) {
                f.y[i] = {x[1 + i], vector(0), kind.rms ? nullptr : vector(1)};
            }
            for (int i = 0; i < kind.norms; i++) {
                b.y[i] = {x[2 + i], vector(0), sum(2 + 2 * i), {}};
                if (!kind.rms) { b.y[i].dbias = sum(3 + 2 * i); }
            }
            for (int i = 0; i < kind.branches; i++) {
                f.branch[i] = x[3 + i], f.dropout[i] = drop;
                if (kind.drops) { b.branch[i].dout = x[4 + i]; }
                b.branch[i].dropout = drop, b.branch[i].dbias = sum(6 + i);
            }
            if (kind.branches > 0) { f.residual = x[5]; }
            if (kind.fp32) {
                f.residual_fp32 = b.residual_fp32 = true;
                f.inp = stream[0], f.residual = stream[1], b.inp = stream[0], b.dresidual = stream[2];
                for (int i = 0; i < kind.branches; i++) { b.branch[i].dout = x[4 + i]; }
            }
            const int wide = kind.fp32 ? 2 : 1, apart = kind.drops || kind.fp32 ? kind.branches : 0;
            const double tensor = (double)N * C * sizeof(floatX);
            const int added = kind.branches > 0;
            const double forward_bytes = tensor * (wide * (1 + added) + kind.branches + kind.norms);
            const double backward_bytes = tensor * (wide * 3 + kind.norms + apart);
            const double forward = norms_median_us([&] { norm_forward(f, 0); });
            const double backward = norms_median_us([&] { norm_backward(b, 0); });
            const double f_rate = forward_bytes / forward * 1e-3, b_rate = backward_bytes / backward * 1e-3;
            printf("  %-46s %7.0f %5.0f %6.1f %%  %11.0f %5.0f %6.1f %%\n", kind.name, forward, f_rate,
                   100 * f_rate / copy, backward, b_rate, 100 * b_rate / copy);
            fflush(stdout);
        }
    }
    return 0;
}

#endif  // DEV_CUDA_NORMS_H
