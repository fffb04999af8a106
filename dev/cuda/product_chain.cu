/*
Weight gradients whose bits do not depend on how a step's rows are cut into micro-steps: an experiment, which
nothing in the trainer calls. dev/bench/NOTES.md, "Bits that do not depend on -b", has what it gave.

    dweight (OC,C) += dout^T inp        dout (rows,OC), inp (rows,C)

A k-tile is 64 rows. It has a number in the step, and belongs to a chain: number modulo `chains`. A thread
block owns 128 x 256 sums of some neighbouring chains, a piece, and adds the piece's k-tiles in the order of
their numbers. The sums stay in fp32 memory between micro-steps and are loaded into the accumulators again. So
they have the bits of one long product, however rows are cut. A step's end adds up the pieces.

The table also has cuBLASLt called once for each part of the rows. A trainer whose parts always have, say, 8
texts would have bits that -b does not change, as long as it is a multiple of 8. That also asks that rows of
the forward and of input gradients do not depend on how many rows there are: the last table.

    make build/cuda/product_chain && build/cuda/product_chain       BF16, an H100 or H200, 2 minutes, 16 GB
*/
#define main train_gpt2_main
#include "train_gpt2.cu"
#undef main
#include <algorithm>     // gives: std::sort
#include <functional>    // gives: std::function

// == the kernel ==
// The blocks of a cluster have tiles one below the other, a pair. Copies and stages are as in ProductLoop of
// train_gpt2.cu, but here both operands lie with k as the slower index.
constexpr int kStages = 4, kTileFloats = kProductRows * kProductColumns;

struct Piece { int pair, first, end; };         // chains [first, end) of a pair of tiles
struct Chain {
    const Piece* pieces;        // of cluster 0, then of cluster 1, ...
    const int* begin;           // (clusters+1) a cluster's first piece
    float* sums;                // (pieces,2,kTileFloats) a thread's 128 sums in groups of 4
    int across, chains;         // tiles side by side; chains that the step's k-tiles are dealt to
    int first, tiles;           // the first k-tile's number in the step; k-tiles of this launch
    bool begins;                // the sums begin with zeros
};
struct ChainMaps { CUtensorMap dout, inp; };
struct ChainShared {
    alignas(1024) floatX a[kStages][kProductRows * kProductK];          // (64 k, 64 columns) twice
    floatX b[kStages][kProductColumns * kProductK];                     // (64 k, 64 columns) four times
    uint64_t full[kStages], empty[kStages];
};

// d (64,256) += A (16,64)^T B (16,256), both in shared memory with k as the slower index.
__device__ __forceinline__ void wgmma_turned_256(float (&d)[32][4], uint64_t a, uint64_t b) {
    asm volatile(WGMMA_SHAPE("256", WGMMA_REGS_256) "%128, %129, 1, 1, 1, 1, 1;"
                 : WGMMA_OPS_256("+f", d)
                 : "l"(a), "l"(b));
}

__device__ __forceinline__ bool owns(const Piece& p, int chain) { return p.first <= chain && chain < p.end; }

// How many of the launch's k-tiles belong to a piece.
__device__ __forceinline__ int piece_steps(const Chain& c, const Piece& p) {
    const int whole = c.tiles / c.chains;
    int steps = whole * (p.end - p.first);
    for (int t = whole * c.chains; t < c.tiles; t++) { steps += owns(p, (c.first + t) % c.chains); }
    return steps;
}

__device__ __forceinline__ void chain_produce(ChainShared& shared, const ChainMaps& maps, const Chain& c) {
    constexpr int kAll = (1 << kProductCluster) - 1, kHalf = kProductColumns / kProductCluster;
    constexpr int kBytes = sizeof(shared.a[0]) + sizeof(shared.b[0]);
    const int rank = blockIdx.x % kProductCluster, cluster = blockIdx.x / kProductCluster;
    int stage = 0, parity = 0;
    for (int q = c.begin[cluster]; q < c.begin[cluster + 1]; q++) {
        const Piece p = c.pieces[q];
        const int row = (p.pair / c.across * kProductCluster + rank) * kProductRows;
        const int column = p.pair % c.across * kProductColumns + rank * kHalf;
        int until_prefetch = max(piece_steps(c, p) - 32, 0);    // so long will the L2 keep the next sums
#pragma unroll 1
        for (int t = 0, chain = c.first % c.chains; t < c.tiles; t++) {
            const bool mine = owns(p, chain);
            chain = chain + 1 == c.chains ? 0 : chain + 1;
            if (!mine) { continue; }
            if (until_prefetch-- == 0 && !c.begins && q + 1 < c.begin[cluster + 1]) {
                const float* next = c.sums + ((size_t)(q + 1) * kProductCluster + rank) * kTileFloats;
                asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(next),
                             "r"((int)(kTileFloats * sizeof(float))) : "memory");
            }
            mbarrier_wait(&shared.empty[stage], parity ^ 1);
            mbarrier_expect(&shared.full[stage], kBytes);
            tma_load_4d(shared.a[stage], &maps.dout, &shared.full[stage], 0, t * kProductK, row / 64, 0);
            tma_load_4d_multicast(shared.b[stage] + rank * kHalf * kProductK, &maps.inp, &shared.full[stage],
                                  0, t * kProductK, column / 64, 0, kAll);
            if (++stage == kStages) { stage = 0, parity ^= 1; }
        }
    }
}

__device__ __forceinline__ void chain_multiply(ChainShared& shared, const Chain& c) {
    const int rank = blockIdx.x % kProductCluster, cluster = blockIdx.x / kProductCluster;
    const int group = threadIdx.x / 128, lane = threadIdx.x % kWarp;
    float d[32][4];
    int stage = 0, parity = 0;
    auto multiply = [&] {
        mbarrier_wait(&shared.full[stage], parity);
        const uint64_t a = wgmma_descriptor(shared.a[stage] + group * 64 * kProductK);
        const uint64_t b = wgmma_descriptor(shared.b[stage], 64 * kProductK * (int)sizeof(floatX));
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < 4; kk++) { wgmma_turned_256(d, a + 128 * kk, b + 128 * kk); }     // 16 rows
        wgmma_commit();
    };
    // The warp is done with the stage, for both blocks.
    auto release = [&](int done) {
        if (lane < kProductCluster) { mbarrier_arrive_at(&shared.empty[done], lane); }
    };
    auto next_stage = [&] {
        const int last = stage;
        if (++stage == kStages) { stage = 0, parity ^= 1; }
        return last;
    };
    for (int q = c.begin[cluster]; q < c.begin[cluster + 1]; q++) {
        const int steps = piece_steps(c, c.pieces[q]);
        float4* sums = (float4*)(c.sums + ((size_t)q * kProductCluster + rank) * kTileFloats) + threadIdx.x;
        if (steps == 0 && !c.begins) { continue; }
#pragma unroll
        for (int n = 0; n < 32; n++) {
            const float4 sum = c.begins ? float4{} : sums[n * 256];
            d[n][0] = sum.x, d[n][1] = sum.y, d[n][2] = sum.z, d[n][3] = sum.w;
        }
        if (steps > 0) {        // the first step is not in the loop: in there, only wgmma may write d (C7515)
            multiply();
            int last = next_stage();
#pragma unroll 1
            for (int k = 1; k < steps; k++) {
                multiply();
                wgmma_wait<1>();
                release(last);
                last = next_stage();
            }
            wgmma_wait<0>();
            pin_registers(d);
            release(last);
        }
#pragma unroll
        for (int n = 0; n < 32; n++) { sums[n * 256] = make_float4(d[n][0], d[n][1], d[n][2], d[n][3]); }
    }
}

__global__ void __launch_bounds__(kProductThreads, 1)
    chain_kernel(const __grid_constant__ ChainMaps maps, const Chain c) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char chain_bytes[];
    auto& shared = *(ChainShared*)chain_bytes;
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; i++) {
            mbarrier_init(&shared.full[i], 1);
            mbarrier_init(&shared.empty[i], 8 * kProductCluster);
        }
        mbarrier_fence_init();
    }
    cluster_barrier();
    if (threadIdx.x / 128 == 2) {
        registers_give<40>();
        if (threadIdx.x % 128 == 0) { chain_produce(shared, maps, c); }
    } else {
        registers_take<232>();
        chain_multiply(shared, c);
    }
    __syncwarp();
    cluster_barrier();
#else
    __trap();
#endif
}

// dweight = the sums of each tile's pieces, added in the order of their chains. Block (tile, n / 4); a thread
// has the sums that it had above.
__global__ void __launch_bounds__(256)
    chain_merge_kernel(float* dweight, const float* sums, const int* order, const int* of_pair, int across,
                       int OC, int C) {
    const int pair = blockIdx.x / kProductCluster, rank = blockIdx.x % kProductCluster, t = threadIdx.x;
    const int row = (pair / across * kProductCluster + rank) * kProductRows + t / kWarp * 16 + t % kWarp / 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int n = blockIdx.y * 4 + i, column = pair % across * kProductColumns + n * 8 + t % 4 * 2;
        float4 sum = {};
        for (int at = of_pair[pair]; at < of_pair[pair + 1]; at++) {
            const float* tile = sums + ((size_t)order[at] * kProductCluster + rank) * kTileFloats;
            const float4 x = ((const float4*)tile)[n * 256 + t];
            sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
        }
        float* out = dweight + (size_t)row * C + column;
        if (row < OC) { *(float2*)out = make_float2(sum.x, sum.y); }        // OC is a multiple of 16
        if (row < OC) { *(float2*)(out + 8 * (size_t)C) = make_float2(sum.z, sum.w); }
    }
}

// == on the host ==
constexpr int kN = 65536, kSets = 2;            // rows; sets of operands, which are used by turns
static Stream stream;

template <class T> static T* allocate(size_t n) { return (T*)device_malloc(n * sizeof(T), "the experiment"); }
template <class T> static T* to_device(const std::vector<T>& host) {
    T* data = allocate<T>(host.size());
    cudaCheck(cudaMemcpy(data, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    cudaCheck(cudaDeviceSynchronize());         // the copy may return before it has ended
    return data;
}

// How tiles and chains are shared among 66 clusters. even: each piece has one chain; clusters take pieces by
// turns, those of a chain at the same time. Else each cluster takes the same number of neighbouring chains of
// neighbouring pairs, and a pair is divided among a few clusters.
struct Plan {
    int chains, across, pairs, count;
    bool even;
    Piece* pieces;                      // (count)
    int *begin, *order, *of_pair;       // see Chain and chain_merge_kernel
};
static Plan plan_create(int chains, bool even, int OC, int C) {
    const int clusters = 132 / kProductCluster, across = C / kProductColumns;
    const int pairs = ceil_div(OC, kProductRows * kProductCluster) * across, units = pairs * chains;
    std::vector<Piece> pieces;
    std::vector<int> begin = {0}, order, of_pair(pairs + 1);
    for (int cluster = 0; cluster < clusters; cluster++) {
        for (int u = cluster; even && u < units; u += clusters) {
            pieces.push_back({u % pairs, u / pairs, u / pairs + 1});
        }
        const int end = (int)((int64_t)units * (cluster + 1) / clusters);
        for (int u = (int)((int64_t)units * cluster / clusters), next; !even && u < end; u = next) {
            next = std::min(end, (u / chains + 1) * chains);
            pieces.push_back({u / chains, u % chains, u % chains + next - u});
        }
        begin.push_back((int)pieces.size());
    }
    for (int i = 0; i < (int)pieces.size(); i++) {
        order.push_back(i);
        for (int pair = pieces[i].pair; pair < pairs; pair++) { of_pair[pair + 1]++; }
    }
    auto key = [&](int i) { return pieces[i].pair * chains + pieces[i].first; };
    std::sort(order.begin(), order.end(), [&](int a, int b) { return key(a) < key(b); });
    return {chains, across, pairs, (int)pieces.size(), even, to_device(pieces), to_device(begin),
            to_device(order), to_device(of_pair)};
}
static void plan_free(const Plan& p) {
    device_free(p.pieces), device_free(p.begin), device_free(p.order), device_free(p.of_pair);
}

struct Weight { const char* name; int OC, C; };
struct Operands { floatX *dout, *inp; };
constexpr size_t kMaxSums = (size_t)1 << 28;     // floats
static float *sums, *dweight;                   // (kMaxSums) of pieces; (OC,C)

// The gradient of kN rows in `cuts` equal launches.
static void chain_gradient(const Plan& plan, const Weight& w, const Operands& x, int cuts) {
    allow_shared_memory(chain_kernel, sizeof(ChainShared), kSm90Shared);
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {kProductCluster, 1, 1};
    const cudaLaunchConfig_t config = {dim3(132), dim3(kProductThreads), sizeof(ChainShared), stream,
                                       &cluster, 1};
    const int rows = kN / cuts, tiles = rows / kProductK;
    for (int i = 0; i < cuts; i++) {
        const size_t row = (size_t)i * rows;
        const ChainMaps maps = {tensor_map(x.dout + row * w.OC, 1, rows, w.OC / 64, kProductK, 2),
                                tensor_map(x.inp + row * w.C, 1, rows, w.C / 64, kProductK, 2)};
        const Chain chain = {plan.pieces, plan.begin, sums, plan.across, plan.chains, i * tiles, tiles,
                             i == 0};
        cudaCheck(cudaLaunchKernelEx(&config, chain_kernel, maps, chain));
    }
    chain_merge_kernel<<<dim3(plan.pairs * kProductCluster, 8), 256, 0, stream>>>(
        dweight, sums, plan.order, plan.of_pair, plan.across, w.OC, w.C);
    cudaCheck(cudaGetLastError());
}
static void library_gradient(const Weight& w, const Operands& x, int cuts) {
    const int rows = kN / cuts;
    for (int i = 0; i < cuts; i++) {
        const size_t row = (size_t)i * rows;
        const Accumulate acc = i == 0 ? Accumulate::No : Accumulate::Yes;
        matmul_backward_weight({.dweight = {dweight, acc}, .scratch = nullptr, .dout = x.dout + row * w.OC,
                                .inp = x.inp + row * w.C, .N = rows, .C = w.C, .OC = w.OC}, stream);
    }
}

__global__ void fill_kernel(floatX* data, size_t n, uint32_t seed) {    // uniform, variance 1
    const size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += step) {
        data[i] = (floatX)((round_block({seed, 0, 0, 0}, i).w[0] * 0x1p-32f - 0.5f) * 3.4641016f);
    }
}
static floatX* random_values(size_t n, uint32_t seed) {
    floatX* data = allocate<floatX>(n);
    fill_kernel<<<1056, 256, 0, stream>>>(data, n, seed);
    return data;
}
template <class T> static std::vector<T> to_host(const T* data, size_t n) {
    std::vector<T> host(n);
    cudaCheck(cudaStreamSynchronize(stream));
    cudaCheck(cudaMemcpy((void*)host.data(), data, n * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
}

// squares[block] = squares of an element's distance from its sum in double, and of this sum.
__global__ void distance_kernel(double2* squares, const float* dweight, Operands x, int OC, int C) {
    __shared__ double shared[kWarp];
    const int row = (int)(blockIdx.x * 7919u % OC), column = (int)(blockIdx.x * 104729u % C);
    double sum = 0.0;
    for (int n = threadIdx.x; n < kN; n += blockDim.x) {
        sum += (double)(float)x.dout[(size_t)n * OC + row] * (double)(float)x.inp[(size_t)n * C + column];
    }
    sum = block_sum(sum, shared);
    const double d = dweight[(size_t)row * C + column] - sum;
    if (threadIdx.x == 0) { squares[blockIdx.x] = make_double2(d * d, sum * sum); }
}
static double distance(const Weight& w, const Operands& x) {
    constexpr int kElements = 1024;
    static double2* squares = allocate<double2>(kElements);
    distance_kernel<<<kElements, 256, 0, stream>>>(squares, dweight, x, w.OC, w.C);
    double distance = 0.0, size = 0.0;
    for (const double2& both : to_host(squares, kElements)) { distance += both.x, size += both.y; }
    return sqrt(distance / size);
}

// Milliseconds of a call, in a graph. It runs for some time before: the power limiter has to settle for it.
typedef std::function<void(int set)> Run;
static float settled_ms(const Run& run, float warm_ms, float measured_ms) {
    static const Event begin = event_create(), end = event_create();
    Graph graph;
    float ms = 0.0f;
    for (float time : {0.0f, 0.0f, warm_ms, measured_ms}) {     // the first time graph_run only runs it
        event_record(begin, stream);
        const int count = 1 + (time > 0.0f ? (int)(time / ms) : 0);
        for (int i = 0; i < count; i++) {
            graph_run(&graph, stream, [&] { for (int set = 0; set < kSets; set++) { run(set); } });
        }
        event_record(end, stream);
        event_wait(end);
        ms = (float)event_ms(begin, end) / count;
    }
    graph_free(&graph);
    return ms / kSets;
}
// Medians of three turns.
static std::vector<float> by_turns(const std::vector<Run>& runs) {
    std::vector<float> medians;
    std::vector<std::vector<float>> ms(runs.size());
    for (int turn = 0; turn < 3; turn++) {
        for (size_t i = 0; i < runs.size(); i++) { ms[i].push_back(settled_ms(runs[i], 60, 150)); }
    }
    for (std::vector<float>& m : ms) {
        std::sort(m.begin(), m.end());
        medians.push_back(m[1]);
    }
    return medians;
}

// == the tables ==
// One weight. Returns the times of kRuns: the library's in 1, 4, 8 and 16 parts, and ours in 1, 4 and 16.
static constexpr int kCuts[] = {1, 4, 8, 16, 1, 4, 16}, kLibrary = 4, kRuns = 7;
static int failed = 0;
static std::vector<float> weight_row(const Weight& w) {
    const size_t n = (size_t)w.OC * w.C;
    Operands x[kSets];
    for (int i = 0; i < kSets; i++) {
        x[i] = {random_values((size_t)kN * w.OC, 2 * i), random_values((size_t)kN * w.C, 2 * i + 1)};
    }
    printf("%-12s plans, ms:", w.name);
    Plan best = {};
    float best_ms = INFINITY;
    for (int chains : {1, 2, 3, 4, 5, 7, 9, 11, -6, -11, -22}) {        // negative: not even
        Plan plan = plan_create(abs(chains), chains > 0, w.OC, w.C);
        if ((size_t)plan.count * 2 * kTileFloats <= kMaxSums) {
            const float ms = settled_ms([&](int i) { chain_gradient(plan, w, x[i], 1); }, 30, 60);
            printf(" %s%d %.3f", plan.even ? "even " : "shared ", plan.chains, ms);
            if (ms < best_ms) { std::swap(best, plan), best_ms = ms; }
        }
        plan_free(plan);
    }

    std::vector<Run> runs;
    for (int r = 0; r < kRuns; r++) {
        runs.push_back([&, r](int i) {
            if (r < kLibrary) { library_gradient(w, x[i], kCuts[r]); }
            else { chain_gradient(best, w, x[i], kCuts[r]); }
        });
    }
    // Cut or not, the same bits; and as near to sums in double as the library's.
    printf("\n             distance from double:");
    std::vector<float> whole;
    bool good = true;
    for (int r = 0; r < kRuns; r++) {
        cudaCheck(cudaMemsetAsync(dweight, 0xFF, n * sizeof(float), stream));
        runs[r](0);
        const double d = distance(w, x[0]);
        printf(" %s%.1e", r == kLibrary ? "| " : "", d);
        good = good && d <= 1e-3;
        if (r == kLibrary) { whole = to_host(dweight, n); }
        if (r > kLibrary) { good = good && memcmp(to_host(dweight, n).data(), whole.data(), n * 4) == 0; }
    }
    printf("; %s\n             TFLOP/s (parts):", good ? "ours: equal bits" : "FAILED");
    failed += !good;
    const std::vector<float> ms = by_turns(runs);
    for (int r = 0; r < kRuns; r++) {
        if (r == kLibrary) { printf(" | ours, %s %d:", best.even ? "even" : "shared", best.chains); }
        printf(" %.0f (%d)", 2e-9 * kN * n / ms[r], kCuts[r]);
    }
    printf("; %.0f MB of sums, gradient %.0f\n", best.count * 2 * kTileFloats * 4e-6, n * 4e-6);
    fflush(stdout);
    plan_free(best);
    for (const Operands& each : x) { device_free(each.dout), device_free(each.inp); }
    return ms;
}

// The library's forward (trans_a) and input gradients: do rows have other bits among more rows? Own: with the
// algorithm that the trainer takes for this number of rows. Unsplit: with one that has no split-K. Fixed:
// with the trainer's for kFew rows.
struct RowProduct { const char* name; int m, k; bool forward, bias, residual; };
constexpr int kFew = 4096;
enum class Choice { Own, Unsplit, Fixed };
static const char* const kChoices[] = {"own", "unsplit", "fixed"};
static void rows_row(const RowProduct& r) {
    floatX *weight = random_values((size_t)r.m * r.k, 1), *inp = random_values((size_t)kN * r.k, 2);
    floatX *bias = random_values(r.m, 3), *residual = random_values((size_t)kN * r.m, 4);
    floatX* out = allocate<floatX>((size_t)kN * r.m);
    auto product = [&](int n, Choice choice, int row = 0) {
        return Gemm{.d = out + (size_t)row * r.m, .a = weight, .b = inp + (size_t)row * r.k,
                    .c = r.residual ? residual + (size_t)row * r.m : nullptr, .bias = r.bias ? bias : nullptr,
                    .m = r.m, .n = n, .k = r.k, .trans_a = r.forward,
                    .epilogue = r.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT,
                    .count_all = choice == Choice::Unsplit};
    };
    const GemmStream& library = gemm_stream(stream);
    const GemmPlan few = gemm_plan(product(kFew, Choice::Own), library);
    int32_t splits = 0;
    cublasCheck(cublasLtMatmulAlgoConfigGetAttribute(&few.algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &splits,
                                                     sizeof(splits), nullptr));
    // The first kFew rows of a product of n.
    const size_t count = (size_t)kFew * r.m;
    auto first_rows = [&](int n, Choice choice) {
        const Gemm g = product(n, choice);
        const GemmPlan plan = gemm_plan(g, library);
        const float beta = g.c ? 1.0f : 0.0f;
        cublasCheck(cublasLtMatmul(library.handle, plan.desc, &g.alpha, g.a, plan.a, g.b, plan.b, &beta,
                                   g.c ? g.c : g.d, plan.c, g.d, plan.d,
                                   choice == Choice::Fixed ? &few.algo : &plan.algo, library.workspace,
                                   library.workspace_bytes, stream));
        return to_host(out, count);
    };
    auto equal = [&](const std::vector<floatX>& x, const std::vector<floatX>& y) {
        return memcmp(x.data(), y.data(), count * sizeof(floatX)) == 0;
    };
    printf("%-15s split-K of 4K rows: %d; in 8K, 16K, 64K rows as in 4K:", r.name, splits);
    std::vector<floatX> first[3];
    for (int i = 0; i < 3; i++) {
        first[i] = first_rows(kFew, (Choice)i);
        printf("%s %s", i > 0 ? "," : "", kChoices[i]);
        for (int n : {2 * kFew, 4 * kFew, kN}) {
            printf(" %s", equal(first_rows(n, (Choice)i), first[i]) ? "yes" : "NO");
        }
    }
    std::vector<Run> runs;
    for (int n : {kFew, kN}) {
        for (Choice choice : {Choice::Own, Choice::Unsplit}) {
            const int step = n < kN ? kN / kSets : 0;
            runs.push_back([=](int set) { gemm(product(n, choice, set * step), stream); });
        }
    }
    const std::vector<float> ms = by_turns(runs);
    printf("; own %s unsplit\n                us, own and unsplit: 4K rows %.1f %.1f; 64K rows %.0f %.0f\n",
           equal(first[0], first[1]) ? "=" : "is NOT", ms[0] * 1e3, ms[1] * 1e3, ms[2] * 1e3, ms[3] * 1e3);
    fflush(stdout);
    for (floatX* p : {weight, inp, bias, residual, out}) { device_free(p); }
}

int main() {
    const DeviceInfo device = device_init();
    if (!device_is_hopper || device_sm_count != 132) { die("%s: this is for 132 SMs", device.name.c_str()); }
    printf("%s; %d rows\n", device.name.c_str(), kN);
    stream = stream_create();
    gemm_init(stream, allocate<char>(gemm_workspace_bytes()), gemm_workspace_bytes(), false);
    constexpr Weight kWeights[] = {{"qkv", 2304, 768}, {"attproj", 768, 768}, {"fc", 3072, 768},
                                   {"fcproj", 768, 3072}, {"m12 fc", 4096, 768}, {"m12 fcproj", 768, 2048},
                                   {"head", 50304, 768}};
    sums = allocate<float>(kMaxSums);
    dweight = allocate<float>((size_t)50304 * 768);
    std::vector<std::vector<float>> ms;
    for (const Weight& w : kWeights) { ms.push_back(weight_row(w)); }
    for (bool m12 : {false, true}) {
        printf("all of a step of %s, ms (parts):", m12 ? "m12" : "124M");
        for (int r = 0; r < kRuns; r++) {
            const float layer = ms[0][r] + ms[1][r] + ms[m12 ? 4 : 2][r] + ms[m12 ? 5 : 3][r];
            printf("%s %.2f (%d)", r == kLibrary ? " | ours:" : "", 12 * layer + ms[6][r], kCuts[r]);
        }
        printf("\n");
    }
    constexpr RowProduct kRowProducts[] = {
        {"qkv", 2304, 768, true, true, false}, {"attproj", 768, 768, true, true, true},
        {"fcproj", 768, 3072, true, true, true}, {"m12 fcproj", 768, 2048, true, false, true},
        {"head", 50304, 768, true, false, false}, {"qkv, input", 768, 2304, false, false, false},
        {"attproj, input", 768, 768, false, false, false}, {"fc, input", 768, 3072, false, false, false},
        {"m12 fc, input", 768, 4096, false, false, false}, {"head, input", 768, 50304, false, false, false}};
    for (const RowProduct& r : kRowProducts) { rows_row(r); }
    printf("%s\n", failed == 0 ? "all sums agree" : "FAILED: a sum depends on the parts, or it is wrong");
    return failed != 0;
}
