/*
The CUDA side of the seam in train_gpt2.cu: the device runtime. cpu_device.h has the same names in plain
C++, so the model and the training loop are written once.

    const DeviceInfo device = device_init();            // GPU 0; dies if there is none
    Stream stream = stream_create();
    float* x = (float*)device_malloc(bytes, "x");       // at start only: nothing on the step's path allocates
    copy_to_device(x, host, bytes, stream);             // asynchronous when `host` is pinned

Everything is asynchronous on the stream it is given, unless its name or comment says that it waits.
*/
#pragma once

#include <cublasLt.h>           // gives: cublasStatus_t
#include <cuda_runtime.h>       // gives: cudaMalloc, streams, events
#include <nvtx3/nvToolsExt.h>   // gives: nvtxRangePushA

#include "../errors.h"          // gives: die, format
#include "ops.h"                // gives: op_name, Stream

typedef cudaEvent_t Event;
constexpr bool kDeviceIsCuda = true;
constexpr bool kDeviceIsAsync = true;           // a call puts work on a stream and returns

static inline void cuda_check(cudaError_t status, const char* call, const char* file, int line) {
    if (status == cudaSuccess) { return; }
    if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorUnsupportedPtxVersion) {
        die("this program holds no code that this GPU or its driver can run (%s)\n"
            "hint: run make again on this machine, or with ARCH= this GPU's compute capability",
            cudaGetErrorString(status));
    }
    const char* hint =
        status == cudaErrorMemoryAllocation ? "somebody else has taken this GPU's memory since the start"
        : status == cudaErrorECCUncorrectable || status == cudaErrorDevicesUnavailable ||
          status == cudaErrorLaunchFailure || status == cudaErrorUnknown
        ? "the GPU may have failed: the kernel's log (dmesg) then has an Xid; -y 1 goes on from the last "
          "checkpoint" : "";
    die("%s at %s:%d: %s%s%s", call, file, line, cudaGetErrorString(status), hint[0] ? "\nhint: " : "", hint);
}
#define cudaCheck(call) cuda_check(call, #call, __FILE__, __LINE__)

static inline void cublas_check(cublasStatus_t status, const char* call, const char* file, int line) {
    if (status == CUBLAS_STATUS_SUCCESS) { return; }
    die("%s at %s:%d: %s", call, file, line, cublasLtGetStatusString(status));
}
#define cublasCheck(call) cublas_check(call, #call, __FILE__, __LINE__)

// A named range in Nsight's timeline for as long as the object lives: one per op.
struct NvtxRange {
    explicit NvtxRange(const char* name) { nvtxRangePushA(name); }
    ~NvtxRange() { nvtxRangePop(); }
    NvtxRange(const NvtxRange&) = delete;
};

// At the top of every launcher: gives the op its range in Nsight's timeline. At the launcher's end it dies if
// a launch has failed, and lets the tests disturb one of the op's outputs (--break). profile_gpt2.cu times
// what lies between.
#ifdef TESTING
template <class Args> static void break_outputs(const Args& args, Stream stream);     // of test_gpt2.cu
#endif
#ifdef PROFILING
template <class Args> static void profile_begin(const Args& args, Stream stream);     // of profile_gpt2.cu
template <class Args> static void profile_end(const Args& args, Stream stream);
#endif
template <class Args> struct OpScope {
    NvtxRange range;
    const Args& args;
    Stream stream;
    OpScope(const Args& args, Stream stream) : range(op_name(args)), args(args), stream(stream) {
#ifdef PROFILING
        profile_begin(args, stream);
#endif
    }
    ~OpScope() {
        cuda_check(cudaGetLastError(), op_name(args), __FILE__, __LINE__);
#ifdef TESTING
        break_outputs(args, stream);
#endif
#ifdef PROFILING
        profile_end(args, stream);
#endif
    }
};

struct DeviceInfo { std::string name; size_t memory_free, memory_total; std::string bus_id, libraries; };
// Set by device_init. Launchers whose blocks each take several rows read it: blocks for one wave are enough.
// Only norm_backward sums in another order for another number of blocks: its bits depend on the kind of GPU.
static int device_sm_count = 0;
static int device_index = 0;        // which of this machine's GPUs it is
static bool device_is_hopper = false;       // compute capability 9.0

static inline void device_prepare(char**) {}    // the CPU build starts itself again here

static inline int device_count() {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

// GPU number `index` of this machine; a job's ranks count from 0 on each machine.
static inline DeviceInfo device_init(int index = 0) {
    int count = 0;
    cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess || count == 0) {
        int driver = 0;                             // stays 0 where there is none; CUDA's error is the same
        cudaDriverGetVersion(&driver);
        const bool is_old = status == cudaErrorInsufficientDriver && driver > 0;
        die("no CUDA GPU can be used: %s\nhint: %s",
            !status ? "none found" : driver == 0 ? "there is no NVIDIA driver" : cudaGetErrorString(status),
            is_old ? "this program was built with a newer CUDA than the driver knows: update the driver"
                   : "`make train_gpt2cpu` builds the CPU program");
    }
    if (index > 0 && count == 1) { index = 0; }     // srun --gpus-per-task=1 shows each rank its own
    if (index >= count) {
        die("there are %d GPUs here, too few for a rank with number %d on this machine\n"
            "hint: start at most one rank a GPU", count, index);
    }
    cudaDeviceProp prop;
    cudaCheck(cudaGetDeviceProperties(&prop, index));
    if (prop.major < 8) {
        die("%s has compute capability %d.%d; 8.0 or later is needed (A100, RTX 30, H100, ...)\n"
            "hint: `make train_gpt2cpu` builds the CPU program; CUDA_VISIBLE_DEVICES leaves a GPU out",
            prop.name, prop.major, prop.minor);
    }
    cudaCheck(cudaSetDevice(index));
    device_index = index;
    device_sm_count = prop.multiProcessorCount;
    device_is_hopper = prop.major == 9;
    DeviceInfo info;
    info.name = format("%s (sm_%d%d, %d SMs)", prop.name, prop.major, prop.minor, prop.multiProcessorCount);
    cudaCheck(cudaMemGetInfo(&info.memory_free, &info.memory_total));
    char bus_id[32];
    cudaCheck(cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), index));
    info.bus_id = bus_id;
    const int cublas = (int)cublasLtGetVersion();
    int driver = 0;
    cudaCheck(cudaDriverGetVersion(&driver));       // the newest CUDA that it knows
    info.libraries = format("cuBLASLt %d.%d.%d, CUDA %d.%d, its driver %d.%d", cublas / 10000,
                            cublas / 100 % 100, cublas % 100, CUDART_VERSION / 1000,
                            CUDART_VERSION / 10 % 100, driver / 1000, driver / 10 % 100);
    return info;
}

// Every further thread begins with this: CUDA's current device belongs to a thread.
static inline void device_use() { cudaCheck(cudaSetDevice(device_index)); }

static inline void* device_malloc(size_t bytes, const char* what) {
    void* p = nullptr;
    cudaError_t status = cudaMalloc(&p, bytes ? bytes : 1);
    if (status != cudaSuccess) {
        die("cannot allocate %.2f GiB of GPU memory for %s: %s", bytes / 1073741824.0, what,
            cudaGetErrorString(status));
    }
    return p;
}
static inline void device_free(void* p) { cudaCheck(cudaFree(p)); }
static inline void* pinned_try(size_t bytes) {      // null: not enough memory
    void* p = nullptr;
    if (cudaMallocHost(&p, bytes ? bytes : 1) == cudaSuccess) { return p; }
    cudaGetLastError();                             // else the next launch would report this
    return nullptr;
}
static inline void* pinned_malloc(size_t bytes, const char* what) {
    void* p = nullptr;
    const cudaError_t status = cudaMallocHost(&p, bytes ? bytes : 1);      // may report an earlier kernel's
    if (status != cudaSuccess) {
        die("cannot pin %zu bytes of host memory for %s: %s", bytes, what, cudaGetErrorString(status));
    }
    return p;
}
static inline void pinned_free(void* p) { cudaCheck(cudaFreeHost(p)); }
static inline void device_fill(void* p, int byte, size_t bytes, Stream stream) {
    cudaCheck(cudaMemsetAsync(p, byte, bytes, stream));
}
static inline void device_zero(void* p, size_t bytes, Stream stream) { device_fill(p, 0, bytes, stream); }
static inline void copy_to_device(void* device, const void* host, size_t bytes, Stream stream) {
    cudaCheck(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream));
}
static inline void copy_to_host(void* host, const void* device, size_t bytes, Stream stream) {
    cudaCheck(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream));
}
static inline void copy_on_device(void* to, const void* from, size_t bytes, Stream stream) {
    cudaCheck(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
}
static inline Stream stream_create() {
    Stream stream;
    cudaCheck(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}
// A stream whose work begins before that of ordinary streams if both are ready.
static inline Stream stream_create_urgent() {
    Stream stream;
    int least, greatest;
    cudaCheck(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    cudaCheck(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest));
    return stream;
}
static inline void stream_wait(Stream stream, Event event) {    // until the device has passed the event
    cudaCheck(cudaStreamWaitEvent(stream, event, 0));
}
static inline void stream_destroy(Stream stream) { cudaCheck(cudaStreamDestroy(stream)); }
static inline void stream_sync(Stream stream) { cudaCheck(cudaStreamSynchronize(stream)); }
static inline Event event_create() {
    Event event;
    cudaCheck(cudaEventCreate(&event));
    return event;
}
static inline void event_destroy(Event event) { cudaCheck(cudaEventDestroy(event)); }
static inline void event_record(Event event, Stream stream) { cudaCheck(cudaEventRecord(event, stream)); }
static inline void event_wait(Event event) { cudaCheck(cudaEventSynchronize(event)); }
// A CUDA graph of work that repeats: recorded, then replayed in one call. The work must not wait for events
// from outside, let the host wait, allocate, or copy memory of the host that is not pinned (lazy_streams.h
// sees that in tests); other threads may, because the capture is thread-local. The first run is not recorded:
// a kernel's first launch loads code and may allocate. `changes`: the work's arguments are others each time.
// It is then recorded each time, and the graph takes the new arguments.
struct Graph { cudaGraphExec_t exec = nullptr; bool begun = false; };
static inline void graph_free(Graph* g) {
    if (g->exec) { cudaCheck(cudaGraphExecDestroy(g->exec)); }
    *g = Graph();
}
template <class Work>
static inline void graph_run(Graph* g, Stream stream, const Work& work, bool changes = false) {
    if (!g->begun) { g->begun = true; work(); return; }
    if (!g->exec || changes) {
        cudaGraph_t graph;
        cudaGraphExecUpdateResultInfo info;
        cudaCheck(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        work();
        cudaCheck(cudaStreamEndCapture(stream, &graph));
        if (g->exec && cudaGraphExecUpdate(g->exec, graph, &info) != cudaSuccess) {
            cudaGetLastError();                 // other kernels than before: they take a new graph
            graph_free(g);
            g->begun = true;
        }
        if (!g->exec) { cudaCheck(cudaGraphInstantiateWithFlags(&g->exec, graph, 0)); }
        cudaCheck(cudaGraphDestroy(graph));
    }
    cudaCheck(cudaGraphLaunch(g->exec, stream));
}
static inline double event_ms(Event from, Event to) {       // the device has passed both
    float ms;
    cudaCheck(cudaEventElapsedTime(&ms, from, to));
    return ms;
}
