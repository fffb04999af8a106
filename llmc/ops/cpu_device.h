/*
The CPU side of the seam in train_gpt2.cu: the device runtime in plain C++ and the ops by their launcher
names. The trainer calls matmul_forward(...), device_malloc(...) and so on in both builds; here they are the
twins of llmc/ops/cpu_ops.h and malloc. Everything is synchronous, so streams and events do nothing. To test
the program's waits, -DLAZY_STREAMS replaces them by dev/test/lazy_streams.h.

    #define GPT2_CPU, then #include "cpu_device.h"; compile with g++ -fopenmp.
*/
#pragma once

#include <malloc.h>     // gives: mallopt
#ifdef _OPENMP
#include <omp.h>        // gives: omp_get_max_threads
#endif

#include "../errors.h"  // gives: die, format
#include "../host_cores.h"  // gives: share_cores
#include "../host_memory.h" // gives: host_memory_free, proc_bytes, addresses_limited
#include "../comm/comm.h" // gives: comm_all_to_all, comm_all_gather, comm_now

#ifdef TESTING
template <class Args> static void break_outputs(const Args& args, int stream);     // test_gpt2.cu: --break
#define OP_DONE(args) break_outputs(args, 0)
#endif
#include "cpu_ops.h"        // gives: the twins, MODEL_OPS, Stream, openblas_get_corename, _config
#include "token_buckets.h"  // gives: max_bucket_slots

// ---- device runtime ----
struct DeviceInfo { std::string name; size_t memory_free, memory_total; std::string bus_id, libraries; };

#ifdef LAZY_STREAMS
#include "../../dev/test/lazy_streams.h"   // gives: the names of #else; work runs as late as it may
#else
struct Event { double* seconds; };              // when it was recorded
constexpr bool kDeviceIsAsync = false;          // a call has done its work when it returns
template <class Work> static inline void on_stream(Stream, const Work& work) { work(); }
template <class Args> static inline void run_op(void (*twin)(const Args&, Stream), const Args& a, Stream s) {
    twin(a, s);
}
template <class Work> static inline void in_turn(Stream, const Work& work) { work(); }     // with other ranks
static inline Stream stream_create() { return 0; }
static inline Stream stream_create_urgent() { return 0; }
static inline void stream_wait(Stream, Event) {}
static inline void stream_destroy(Stream) {}
static inline void stream_sync(Stream) {}
static inline void device_sync() {}
static inline Event event_create() { return Event{new double(0.0)}; }
static inline void event_destroy(Event event) { delete event.seconds; }
static inline void event_record(Event event, Stream) { *event.seconds = comm_now(); }
static inline void event_wait(Event) {}
static inline double event_ms(Event from, Event to) { return (*to.seconds - *from.seconds) * 1e3; }
static inline void copy_to_device(void* device, const void* host, size_t bytes, Stream) {
    memcpy(device, host, bytes);
}
static inline void copy_to_host(void* host, const void* device, size_t bytes, Stream) {
    memcpy(host, device, bytes);
}
static inline void pinned_begins(const void*, size_t) {}
static inline void pinned_ends(const void*) {}
struct Graph {};
template <class Work> static inline void graph_run(Graph*, Stream, const Work& work, bool = false) { work(); }
static inline void graph_free(Graph*) {}
static inline void capture_refuses(const char*) {}
#endif

// Two libraries read the environment before main() and choose badly on common machines. So the program sets
// the environment and starts itself again, once:
// - Both take a thread for each core, also where a container has a quota for fewer.
// - OpenMP's threads spin while they wait; where other work shares the cores, a step then takes up to 4 times
//   as long.
// - OpenBLAS 0.3.21 (Debian 12) takes CPUs newer than itself for a Prescott and leaves AVX unused: twice as
//   long.
static inline void device_prepare(char** argv) {
    // With limited addresses (ulimit -v) a thread of OpenBLAS may wait for its buffer for ever, and exit()
    // would wait for that thread.
    if (addresses_limited()) { die_hook = [] { _exit(EXIT_FAILURE); }; }
    if (getenv("GPT2_CPU_PREPARED")) { return; }
    setenv("GPT2_CPU_PREPARED", "1", 1);
    setenv("OMP_WAIT_POLICY", "passive", 0);
    share_cores(1);
#if defined(USE_OPENBLAS) && defined(__x86_64__)
    if (strcmp(openblas_get_corename(), "Prescott") == 0) {
        if (__builtin_cpu_supports("avx512vl")) { setenv("OPENBLAS_CORETYPE", "SKYLAKEX", 0); }
        else if (__builtin_cpu_supports("avx2")) { setenv("OPENBLAS_CORETYPE", "HASWELL", 0); }
    }
#endif
    // This returns only if it fails; the program then goes on, slower.
    execv("/proc/self/exe", argv);
}

// Under a limit on addresses (ulimit -v) the free memory is what the limit leaves, less what threads and BLAS
// will take. Their part is kept back, because OpenBLAS without a buffer does not fail but asks for ever.
static inline void limit_memory(DeviceInfo* info, int threads) {
    struct rlimit addresses, stack;
    if (!addresses_limited() || getrlimit(RLIMIT_AS, &addresses) != 0) { return; }
    const bool bounded = getrlimit(RLIMIT_STACK, &stack) == 0 && stack.rlim_cur != RLIM_INFINITY;
    const size_t stack_bytes = bounded ? stack.rlim_cur : 2 << 20;      // glibc's own default
#ifdef USE_OPENBLAS
    const size_t blas_bytes = 128 << 20;        // BUFFER_SIZE of its 64-bit builds, one for each thread
#else
    const size_t blas_bytes = 0;
#endif
    mallopt(M_ARENA_MAX, 1);                    // else each thread that allocates takes 64 MiB of addresses
    // Stacks: OpenMP's threads, OpenBLAS's own, the two that read training and validation data, and the one
    // that writes checkpoints.
    const size_t others = threads * (2 * stack_bytes + blas_bytes) + 3 * stack_bytes;
    const size_t used = proc_bytes("/proc/self/status", "VmSize") + others;
    const size_t left = addresses.rlim_cur > used ? addresses.rlim_cur - used : 1;      // 0: not known
    info->name += ", addresses limited by `ulimit -v`";
    info->memory_free = std::min(info->memory_free, left);
    info->memory_total = std::min(info->memory_total, (size_t)addresses.rlim_cur);
}

static inline int device_count() { return INT_MAX; }       // several ranks share the cores
static inline DeviceInfo device_init(int /*index*/ = 0) {
    int threads = 1;
#ifdef _OPENMP
    threads = omp_get_max_threads();
#endif
#ifdef USE_OPENBLAS
    const char *blas = "OpenBLAS", *version = openblas_get_config();    // and the kind of core it is for
#else
    const char *blas = "no BLAS", *version = blas;
#endif
    char libc[64] = "";
    confstr(_CS_GNU_LIBC_VERSION, libc, sizeof(libc));
    DeviceInfo info = {format("CPU (%d threads, %s)", threads, blas),
                       host_memory_free(), proc_bytes("/proc/meminfo", "MemTotal"), "cpu",     // no GPU's
                       format("%s, %s", version, libc)};
    limit_memory(&info, threads);
    return info;
}

static inline void device_use() {}

static inline void* device_try(size_t bytes) {
    capture_refuses("an allocation");
    return aligned_alloc(256, (bytes + 255) / 256 * 256 + 256);
}
static inline void* device_malloc(size_t bytes, const char* what) {
    void* p = device_try(bytes);
    if (!p) {
        die("out of memory: wanted %zu bytes for %s\nhint: use a smaller model, -b or -t", bytes, what);
    }
    return p;
}
static inline void device_free(void* p) { device_sync(); free(p); }
static inline void* pinned_try(size_t bytes) {      // null: not enough memory
    void* p = device_try(bytes);
    if (p) { pinned_begins(p, bytes); }
    return p;
}
static inline void* pinned_malloc(size_t bytes, const char* what) {
    void* p = device_malloc(bytes, what);
    pinned_begins(p, bytes);
    return p;
}
static inline void pinned_free(void* p) { device_sync(); pinned_ends(p); free(p); }
static inline void device_fill(void* p, int byte, size_t bytes, Stream stream) {
    on_stream(stream, [=] { memset(p, byte, bytes); });
}
static inline void device_zero(void* p, size_t bytes, Stream stream) { device_fill(p, 0, bytes, stream); }
static inline void copy_on_device(void* to, const void* from, size_t bytes, Stream stream) {
    on_stream(stream, [=] { memcpy(to, from, bytes); });
}
// Data between ranks, over the connections of llmc/comm/comm.h. Each call waits for the other ranks.
static inline void device_comm_init() {}
static inline void device_comm_end() {}
static inline void* device_comm_malloc(size_t bytes, const char* what) { return device_malloc(bytes, what); }
static inline void device_comm_free(void* p) { device_free(p); }
static inline void device_all_to_all(void* recv, const void* send, size_t bytes, Stream stream) {
    in_turn(stream, [=] { comm_all_to_all(recv, send, bytes); });
}
static inline void device_all_gather(void* all, size_t bytes, Stream stream) {
    in_turn(stream, [=] { comm_all_gather(all, bytes); });
}
constexpr bool kDeviceHasNccl = false, kDeviceIsCuda = false;

// Names of llmc/ops/cublaslt.h and section 6.9 that the model calls: there is nothing to do here.
static inline size_t gemm_workspace_bytes() { return 0; }
static inline void gemm_init(Stream, void*, size_t, bool) {}
static inline void gemm_free(Stream) {}
static inline std::string gemm_algorithms(Stream) { return ""; }
static inline void select_kernels(bool, bool) {}
static inline bool attention_uses_sm90(int) { return false; }
static inline const char* attention_form(int) { return "plain loops"; }
static inline const char* activation_form(Mlp, int, int, bool) { return "apart"; }
static inline std::string attention_error(int NH, int NKV, int) { return attention_heads_error(NH, NKV); }
static inline std::string fp8_error() { return ""; }

// ---- ops: the launcher's name, the twin's code ----
#define X(op, Args)                                                          \
    static inline void op(const Args##Of<float, float>& a, Stream stream) { \
        run_op(op##_cpu<float>, a, stream);                                  \
    }
MODEL_OPS(X)
#undef X

// Two of the twins need scratch: the embedding's backward for the sums of split buckets, attention's for D.
static inline size_t encoder_backward_scratch_bytes(int B, int T, int C) {
    return (size_t)max_bucket_slots((int64_t)B * T) * C * sizeof(float);
}
static inline size_t norm_backward_scratch_bytes(int, int, int) { return 0; }
static inline size_t bias_backward_scratch_bytes(int, int) { return 0; }
static inline size_t activate_backward_scratch_bytes(int, int) { return 0; }
static inline size_t rotate_backward_scratch_bytes(int) { return 0; }
static inline size_t value_embed_scratch_bytes(int, int) { return 0; }
static inline size_t fp8_cast_scratch_bytes(int, int) { return 0; }
static inline size_t attention_backward_scratch_bytes(int B, int T, int NH) {
    return (size_t)B * T * NH * sizeof(float);
}

#ifdef LAZY_STREAMS     // what follows calls the host's collectives by these names
#define comm_any(...) (LazyHostTurn(), comm_any(__VA_ARGS__))
#define comm_all_gather(...) (LazyHostTurn(), comm_all_gather(__VA_ARGS__))
#define comm_broadcast(...) (LazyHostTurn(), comm_broadcast(__VA_ARGS__))
#endif
