/*
One training step for a profiler: no data files, no logs, random tokens.

    make profile_gpt2cu
    ncu --set full --clock-control none -o step ./profile_gpt2cu            # every kernel of one micro-step
    nsys profile -o step ./profile_gpt2cu d12 64 1024 3                     # model, B, T, steps
    ./profile_gpt2cu norms                                                  # times of dev/cuda/norms.h

Every op is an NVTX range with its own name. The first step loads kernels and picks GEMM algorithms, so the
last one is the one to look at: ncu's --nvtx --nvtx-include "profiled/" keeps only that.
*/
#define main train_gpt2_main
#include "train_gpt2.cu"
#undef main
#include <functional>               // gives: std::function
#include "dev/cuda/norms.h"         // gives: norms_bench

// A line per plan of llmc/ops/cublaslt.h, with what the library chose (-1: it did not say).
static void print_plans() {
    for (const GemmPlan& p : gemm_state.plans) {
        auto get = [&](cublasLtMatmulAlgoConfigAttributes_t attribute) {
            int value = -1;
            size_t written = 0;
            if (p.found) {
                cublasLtMatmulAlgoConfigGetAttribute(&p.algo, attribute, &value, sizeof(value), &written);
            }
            return value;
        };
        printf("gemm m %d n %d k %d %c%c epilogue %d beta %d: algorithm %d tile %d stages %d split-k %d\n",
               (int)p.key[0], (int)p.key[1], (int)p.key[2], p.key[3] ? 'T' : 'N', p.key[4] ? 'T' : 'N',
               (int)p.key[6], (int)p.key[7], get(CUBLASLT_ALGO_CONFIG_ID), get(CUBLASLT_ALGO_CONFIG_TILE_ID),
               get(CUBLASLT_ALGO_CONFIG_STAGES_ID), get(CUBLASLT_ALGO_CONFIG_SPLITK_NUM));
    }
}

int main(int argc, char** argv) {
    const char* model_name = argc > 1 ? argv[1] : "d12";
    if (argc == 2 && strcmp(model_name, "norms") == 0) {
        printf("%s\n", device_init().name.c_str());
        return norms_bench();
    }
    const Config c = descriptor_config(model_name);
    int64_t numbers[3] = {64, 1024, 2};
    bool good = argc <= 5;
    for (int i = 2; i < argc && good; i++) {
        int64_t* n = &numbers[i - 2];
        good = parse_int(argv[i], argv[i] + strlen(argv[i]), n) && *n >= 1 && *n <= 65536;
    }
    const int B = (int)numbers[0], T = (int)numbers[1], steps = (int)numbers[2];
    if (!good || T > c.maxT) {
        die("usage: profile_gpt2cu [MODEL [B [T [STEPS]]]], 1 to 65536 each, with T at most %d", c.maxT);
    }
    Options options = {};
    options.master = options.tf32 = true;
    options.graphs = false;                     // a graph's kernels are in no op's range
    options.seed = 1337;
    const DeviceInfo device = device_init();
    gpt2_check_memory(c, options, B, T, device);
    GPT2 model;
    gpt2_allocate(&model, c, options, B, T);
    gpt2_init_random(&model, options.seed);
    std::vector<int> x((size_t)B * T), y((size_t)B * T);
    for (size_t i = 0; i < x.size(); i++) {
        x[i] = (int)(rand_u32(1, RAND_SAMPLE, 0, i) % (uint32_t)c.V);
        y[i] = (int)(rand_u32(1, RAND_SAMPLE, 1, i) % (uint32_t)c.V);
    }
    for (int step = 0; step < steps; step++) {
        NvtxRange range(step + 1 == steps ? "profiled" : "warm-up");
        gpt2_micro_step(&model, x.data(), y.data(), B, T, 0, 1);
        gpt2_update(&model, 1e-4);
        printf("loss %.6f\n", gpt2_read_state(&model).loss);
    }
    print_plans();
    gpt2_free(&model);
    return 0;
}
