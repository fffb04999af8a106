/*
Matrix products through cuBLASLt: a plan for each shape (descriptors and the algorithm), made once and kept.
The linear layers (train_gpt2.cu, section 6.3) and Muon (6.8) use it. The includer has defined floatX and
PRECISION_NAME.

    gemm_init(stream, workspace, gemm_workspace_bytes(), tf32);
    gemm({.d = d, .a = a, .b = b, .m = m, .n = n, .k = k}, stream);
    gemm_free(stream);

gemm_preferred says which of the library's suggestions a plan takes. No timing takes part, so equal runs take
equal algorithms.
*/
#pragma once

#include <cublasLt.h>           // gives: cublasLtMatmul

#include <array>                // gives: std::array
#include <list>                 // gives: std::list

#include "../errors.h"          // gives: die
#include "../checksum.h"        // gives: checksum
#include "cuda_device.h"        // gives: cublasCheck, Stream, device_is_hopper

// For the partial sums of split-K. The library's manual advises 32 MiB for Hopper, 4 for earlier GPUs. The
// choice of algorithms, and so the bits, may depend on it.
static inline size_t gemm_workspace_bytes() { return (size_t)64 << 20; }

static inline cudaDataType_t cuda_type(float) { return CUDA_R_32F; }
static inline cudaDataType_t cuda_type(__nv_bfloat16) { return CUDA_R_16BF; }
#ifdef ENABLE_FP16
static inline cudaDataType_t cuda_type(half) { return CUDA_R_16F; }
#endif

// D (m,n) = op(A) op(B) [+ C] and an epilogue, column-major as cuBLAS wants it: op(A) is (m,k), op(B) (k,n).
// Leading dimensions follow from that: no matrix has gaps.
struct Gemm {
    void* d = nullptr;
    const void *a, *b, *c = nullptr;    // c: null, or added; layout and type are D's, but for the stride
    const void* bias = nullptr;         // (m), or null; the epilogue must be one that adds it
    int m, n, k;
    bool trans_a = false, trans_b = false;      // op: the stored matrix is (k,m), or (n,k)
    cudaDataType_t d_type = cuda_type(floatX());
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    cudaDataType_t inp_type = cuda_type(floatX());      // of A and B
    bool b_is_e5m2 = false;             // B alone, where inp_type is e4m3
    float alpha = 1.0f, beta = 1.0f;    // D = alpha op(A) op(B) + beta C
    // FP8 operands: on the device, what their bytes are multiplied by. fast: sums may have fewer bits than
    // fp32's.
    const float *a_scale = nullptr, *b_scale = nullptr;
    bool fast = false;
    // A batch of products, whose matrices are the strides apart, in elements. count_all > 0: the batch is a
    // part of count_all products. The algorithm is then chosen for count_all and without split-K, so that a
    // product's bits do not depend on how ranks share the batch.
    int count = 1, count_all = 0;
    size_t a_stride = 0, b_stride = 0, c_stride = 0, d_stride = 0;
};

typedef std::array<int64_t, 22> GemmKey;        // all that an algorithm may depend on; last: Gemm::count
struct GemmPlan {
    GemmKey key;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, c, d;
    cublasLtMatmulAlgo_t algo;
};

// What a stream's products share. They run one after the other, so one workspace serves them all. Products of
// two streams would add up each other's partial sums in it.
struct GemmStream {
    Stream stream;
    void* workspace;
    size_t workspace_bytes;
    cublasComputeType_t compute;
    cublasLtHandle_t handle;
    std::vector<GemmPlan> plans;        // 124M: 13 of them
};
static std::list<GemmStream> gemm_streams;      // one a model

static inline GemmStream& gemm_stream(Stream stream) {
    for (GemmStream& s : gemm_streams) { if (s.stream == stream) { return s; } }
    die("a matrix product on a stream for which gemm_init was not called");
}

static inline void gemm_init(Stream stream, void* workspace, size_t workspace_bytes, bool tf32) {
    const bool rounds = tf32 && sizeof(floatX) == 4;
    gemm_streams.push_back({stream, workspace, workspace_bytes,
                            rounds ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F});
    cublasCheck(cublasLtCreate(&gemm_streams.back().handle));
}

static inline void gemm_free(Stream stream) {
    GemmStream& s = gemm_stream(stream);
    for (GemmPlan& plan : s.plans) {
        cublasCheck(cublasLtMatmulDescDestroy(plan.desc));
        for (cublasLtMatrixLayout_t layout : {plan.a, plan.b, plan.c, plan.d}) {
            cublasCheck(cublasLtMatrixLayoutDestroy(layout));
        }
    }
    cublasCheck(cublasLtDestroy(s.handle));
    gemm_streams.remove_if([=](const GemmStream& it) { return it.stream == stream; });
}

// The largest power of two that divides the address, for a batch the addresses of all its matrices. At most
// 256: the library assumes so much, and kAlign promises it.
static inline int64_t pointer_alignment(const void* p, size_t stride = 0, cudaDataType_t type = CUDA_R_32F) {
    const uintptr_t bits = (uintptr_t)p | stride * (type == CUDA_R_32F ? sizeof(float) : 2);
    return !p ? 0 : (int64_t)std::min<uintptr_t>(256, bits & (~bits + 1));
}
struct GemmAlignments { int64_t a, b, c, d; };
static inline GemmAlignments gemm_alignments(const Gemm& g) {
    return {pointer_alignment(g.a, g.a_stride, g.inp_type), pointer_alignment(g.b, g.b_stride, g.inp_type),
            pointer_alignment(g.c, g.c_stride, g.d_type), pointer_alignment(g.d, g.d_stride, g.d_type)};
}

// Which algorithm each of the stream's products has so far: hashes, as KEY:ALGORITHM with blanks between
// them. A key's last number is left out: the number of ranks decides it.
static inline std::string gemm_algorithms(Stream stream) {
    std::string text;
    for (const GemmPlan& plan : gemm_stream(stream).plans) {
        uint32_t config[CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID + 1] = {};
        for (int i = 0; i <= CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID; i++) {
            const size_t bytes = i < CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID ? 4 : 2;
            const auto which = (cublasLtMatmulAlgoConfigAttributes_t)i;     // 0 where a version lacks it
            cublasLtMatmulAlgoConfigGetAttribute(&plan.algo, which, &config[i], bytes, nullptr);
        }
        const uint64_t key = checksum(&plan.key, sizeof(plan.key) - sizeof(plan.key.back()));
        text += format(text.empty() ? "%08x:%08x" : " %08x:%08x", (unsigned)key,
                       (unsigned)checksum(config, sizeof(config)));
    }
    return text;
}

// The operands that are part of the descriptor rather than arguments of the call.
static inline void gemm_set_pointers(cublasLtMatmulDesc_t desc, const Gemm& g) {
    auto set = [&](cublasLtMatmulDescAttributes_t attribute, const void* p) {
        if (p) { cublasCheck(cublasLtMatmulDescSetAttribute(desc, attribute, &p, sizeof(p))); }
    };
    set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, g.bias);
    set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, g.a_scale);
    set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, g.b_scale);
}

// Which of the library's suggestions a plan takes. The library puts that first which it computes to be the
// fastest. But a training step runs at the GPU's power limit. There its usual firsts, tiles of 192 x 192 and
// 128 x 256, take up to 21 % longer than the best (dev/bench/NOTES.md). Products below 2^34 multiplications
// keep the first, the best for most of 124M's at B=4. So do FP32 and GPUs other than Hopper's, where nothing
// was measured.
static inline int gemm_preferred(const Gemm& g, const cublasLtMatmulHeuristicResult_t* suggestions,
                                 int count) {
    const bool is_large = (double)g.m * g.n * g.k >= 0x1p34, is_fp8 = g.inp_type == CUDA_R_8F_E4M3;
    if (!is_large || g.inp_type == CUDA_R_32F || !device_is_hopper) { return 0; }
    auto config = [&](int i, cublasLtMatmulAlgoConfigAttributes_t which) {
        int32_t value = 0;
        cublasCheck(cublasLtMatmulAlgoConfigGetAttribute(&suggestions[i].algo, which, &value, sizeof(value),
                                                         nullptr));
        return value;
    };
    const int first = config(0, CUBLASLT_ALGO_CONFIG_TILE_ID), wide = CUBLASLT_MATMUL_TILE_256x128;
    if (first != CUBLASLT_MATMUL_TILE_192x192 && first != CUBLASLT_MATMUL_TILE_128x256) { return 0; }
    // The LM head's forward (for FP8's the library has no 128 x 160) and FP8's input gradients. Also FP8's
    // weight gradients that are stored, not added; but from 124M to 1558M their first is neither tile.
    const bool is_bare = g.trans_a && !g.bias && !g.c;
    const int best = !is_bare ? wide : is_fp8 ? CUBLASLT_MATMUL_TILE_128x160 : CUBLASLT_MATMUL_TILE_176x128;
    for (int tile : {best, wide}) {
        for (int i = 1; i < count; i++) {
            if (config(i, CUBLASLT_ALGO_CONFIG_TILE_ID) == tile &&
                config(i, CUBLASLT_ALGO_CONFIG_SPLITK_NUM) <= 1) { return i; }
        }
    }
    return 0;
}

// Sets the plan's algorithm. Dies if the library has none.
static inline void gemm_choose(GemmPlan* plan, const Gemm& g, const GemmStream& s) {
    cublasLtMatmulPreference_t pref;
    cublasCheck(cublasLtMatmulPreferenceCreate(&pref));
    auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
        cublasCheck(cublasLtMatmulPreferenceSetAttribute(pref, attribute, &value, sizeof(value)));
    };
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, s.workspace_bytes);
    // Split-K partials are added in fp32 in the workspace, in a fixed order; the in-place scheme adds as
    // blocks finish. Where n counts rows (forward, input gradient), fp32 without TF32 takes no split: every
    // algorithm then adds k = 0, 1, 2, ... one after the other (measured: dev/bench/NOTES.md), so a row's
    // result depends neither on how many rows are beside it (splitting a batch changes gradients by 1e-7
    // instead of 2e-6) nor on the library's choice.
    const bool sequential = g.count_all > 0 || (sizeof(floatX) == 4 && !g.trans_b &&
                                                s.compute == CUBLAS_COMPUTE_32F);
    set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
        (uint32_t)(sequential ? CUBLASLT_REDUCTION_SCHEME_NONE : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    const GemmAlignments at = gemm_alignments(g);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, (uint32_t)at.a);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, (uint32_t)at.b);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, (uint32_t)(g.c ? at.c : at.d));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, (uint32_t)at.d);
    int count = 0;
    cublasLtMatmulHeuristicResult_t suggestions[8] = {};        // it makes no more
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(s.handle, plan->desc, plan->a, plan->b,
                                                           plan->c, plan->d, pref, 8, suggestions, &count);
    cublasCheck(cublasLtMatmulPreferenceDestroy(pref));
    if (status != CUBLAS_STATUS_NOT_SUPPORTED) { cublasCheck(status); }
    if (count == 0) {
        die("cuBLASLt has no algorithm for a matrix product of %d x %d x %d (m, n, k) in %s\n"
            "hint: channel counts that are multiples of 8 always have one",
            g.m, g.n, g.k, PRECISION_NAME);
    }
    plan->algo = suggestions[gemm_preferred(g, suggestions, count)].algo;
}

// Sets how many products the plan's layouts describe.
static inline void gemm_set_count(const GemmPlan& plan, const Gemm& g, int32_t count) {
    const struct { cublasLtMatrixLayout_t layout; size_t stride; } all[] = {
        {plan.a, g.a_stride}, {plan.b, g.b_stride}, {plan.c, g.c ? g.c_stride : g.d_stride},
        {plan.d, g.d_stride}};
    for (const auto& it : all) {
        const int64_t stride = (int64_t)it.stride;
        cublasCheck(cublasLtMatrixLayoutSetAttribute(it.layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count,
                                                     sizeof(count)));
        cublasCheck(cublasLtMatrixLayoutSetAttribute(
            it.layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof(stride)));
    }
}

static inline GemmPlan gemm_plan(const Gemm& g, const GemmStream& s) {
    GemmPlan plan = {};
    const cudaDataType_t type = g.inp_type;
    cublasCheck(cublasLtMatmulDescCreate(&plan.desc, s.compute, CUDA_R_32F));
    auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
        cublasCheck(cublasLtMatmulDescSetAttribute(plan.desc, attribute, &value, sizeof(value)));
    };
    set(CUBLASLT_MATMUL_DESC_TRANSA, g.trans_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, g.trans_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, g.epilogue);
    if (g.fast) { set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, (int8_t)1); }
    if (g.bias) { set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, cuda_type(floatX())); }
    gemm_set_pointers(plan.desc, g);                    // before the search: it reads their alignment
    const int a_rows = g.trans_a ? g.k : g.m, b_rows = g.trans_b ? g.n : g.k;
    cublasCheck(cublasLtMatrixLayoutCreate(&plan.a, type, a_rows, g.trans_a ? g.m : g.k, a_rows));
    cublasCheck(cublasLtMatrixLayoutCreate(&plan.b, g.b_is_e5m2 ? CUDA_R_8F_E5M2 : type, b_rows,
                                           g.trans_b ? g.k : g.n, b_rows));
    for (cublasLtMatrixLayout_t* layout : {&plan.c, &plan.d}) {
        cublasCheck(cublasLtMatrixLayoutCreate(layout, g.d_type, g.m, g.n, g.m));
    }
    if (g.count_all > 0) { gemm_set_count(plan, g, g.count_all); }
    gemm_choose(&plan, g, s);
    if (g.count_all > 0) { gemm_set_count(plan, g, g.count); }
    return plan;
}

static inline void gemm(const Gemm& g, Stream stream) {
    const GemmAlignments at = gemm_alignments(g);
    const GemmKey key = {
        g.m, g.n, g.k, g.trans_a, g.trans_b, g.d_type, g.epilogue, g.c != nullptr, at.a, at.b, at.c, at.d,
        pointer_alignment(g.bias), g.inp_type, g.count_all, (int64_t)g.a_stride, (int64_t)g.b_stride,
        (int64_t)g.c_stride, (int64_t)g.d_stride, g.fast, g.b_is_e5m2, g.count};
    GemmStream& s = gemm_stream(stream);
    GemmPlan* plan = nullptr;
    for (GemmPlan& p : s.plans) {
        if (p.key == key) { plan = &p; }
    }
    if (!plan) {
        s.plans.push_back(gemm_plan(g, s));
        plan = &s.plans.back();
        plan->key = key;
    }
    gemm_set_pointers(plan->desc, g);
    const float beta = g.c ? g.beta : 0.0f;
    cublasCheck(cublasLtMatmul(s.handle, plan->desc, &g.alpha, g.a, plan->a, g.b, plan->b, &beta,
                               g.c ? g.c : g.d, plan->c, g.d, plan->d, &plan->algo, s.workspace,
                               s.workspace_bytes, stream));
}
