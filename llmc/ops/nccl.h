/*
The CUDA side of the seam: data between the ranks of a job, through NCCL. cpu_device.h has the same names
over sockets. Without -DUSE_NCCL there is one rank, and asking for more is an error that says what to install.

    device_comm_init();                                     // after comm_start() and device_init()
    char* grads = (char*)device_comm_malloc(bytes, "gradients");    // all ranks at once, with the same size
    device_all_to_all(recv, send, bytes, stream);       // (world,bytes) each: part r of send goes to rank r
    device_all_gather(all, bytes, stream);              // (world,bytes): in place, part r is rank r's
    device_comm_end();

Buffers come from device_comm_malloc, which registers them with NCCL on all GPUs ("symmetric windows"). Inside
a host the copy engines then move the data, and no SM is taken from the step's kernels. On 4 H200s a 154 MB
bucket takes 0.36 ms that way, and GEMMs beside it take 3 % longer; with NCCL's own kernels it is 0.37 ms and
22 % (dev/bench/NOTES.md).
*/
#pragma once

#include "../errors.h"      // gives: die
#include "../comm/comm.h"   // gives: comm, comm_broadcast, comm_health, CommWait
#include "cuda_device.h"    // gives: Stream, cudaCheck

#ifdef USE_NCCL
#include <nccl.h>           // gives: ncclAlltoAll, ncclCommInitRankConfig

constexpr bool kDeviceHasNccl = true;

static struct {
    ncclComm_t comm = nullptr;
    std::mutex asked;                           // held while the watchdog asks about comm, or comm goes
    std::map<void*, ncclWindow_t> windows;      // of device_comm_malloc's buffers
} nccl_state;

static inline void nccl_check(ncclResult_t status, const char* call) {
    if (status == ncclSuccess || status == ncclInProgress) { return; }
    const bool window = strstr(call, "Window") != nullptr;
    // The hint is a file: NCCL prints to stdout, and only rank 0 has one.
    die("%s: %s (%s)\nhint: NCCL_DEBUG=INFO NCCL_DEBUG_FILE=nccl.%%h.%%p makes NCCL say more%s", call,
        ncclGetErrorString(status), ncclGetLastError(nccl_state.comm),
        window ? "; NCCL_WIN_ENABLE=0 does without windows" : "");
}
#define ncclCheck(call) nccl_check(call, #call)

// For the watchdog's thread: what went wrong in the background, or "".
static inline std::string nccl_health() {
    std::lock_guard<std::mutex> lock(nccl_state.asked);
    ncclResult_t status = ncclSuccess;
    if (nccl_state.comm && ncclCommGetAsyncError(nccl_state.comm, &status) == ncclSuccess &&
        status != ncclSuccess && status != ncclInProgress) {
        return format("NCCL: %s", ncclGetErrorString(status));
    }
    return "";
}
static inline void nccl_abort() {
    if (nccl_state.comm) { ncclCommAbort(nccl_state.comm); }
}

static inline void device_comm_init() {
    if (comm.world == 1) { return; }
    // Ranks that share a GPU would wait for each other for ever. The UUID tells GPUs apart; bus numbers do
    // not if hosts share a name.
    struct { char host[64], gpu[64]; cudaUUID_t uuid; } mine = {}, *all;
    int device;
    cudaDeviceProp prop;
    cudaCheck(cudaGetDevice(&device));
    cudaCheck(cudaGetDeviceProperties(&prop, device));
    mine.uuid = prop.uuid;
    gethostname(mine.host, sizeof(mine.host) - 1);
    cudaCheck(cudaDeviceGetPCIBusId(mine.gpu, sizeof(mine.gpu), device));
    std::vector<char> ranks((size_t)comm.world * sizeof(mine));
    memcpy(&ranks[comm.rank * sizeof(mine)], &mine, sizeof(mine));
    comm_all_gather(ranks.data(), sizeof(mine));
    all = (decltype(all))ranks.data();
    for (int r = 0; r < comm.rank; r++) {
        if (memcmp(&all[r].uuid, &mine.uuid, sizeof(mine.uuid)) == 0) {
            die("ranks %d and %d are both on GPU %s of %s\nhint: one rank a GPU", r, comm.rank, mine.gpu,
                mine.host);
        }
    }
    ncclUniqueId id;
    if (comm.rank == 0) { ncclCheck(ncclGetUniqueId(&id)); }
    comm_broadcast(&id, sizeof(id));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0)
    config.CTAPolicy = NCCL_CTA_POLICY_ZERO;        // copy engines where they can do it
#endif
    CommWait waiting;                               // here and below: NCCL may wait for other ranks
    ncclCheck(ncclCommInitRankConfig(&nccl_state.comm, comm.world, id, comm.rank, &config));
    comm_health = nccl_health;
    comm_abort = nccl_abort;
}

static inline void* device_comm_malloc(size_t bytes, const char* what) {
    CommWait waiting;
    void* p = nullptr;
    bytes = bytes ? bytes : 1;
    const ncclResult_t status = ncclMemAlloc(&p, bytes);
    if (status != ncclSuccess) {
        die("cannot allocate %.2f GiB of GPU memory for %s: %s", bytes / 1073741824.0, what,
            ncclGetErrorString(status));
    }
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0)
    ncclCheck(ncclCommWindowRegister(nccl_state.comm, p, bytes, &nccl_state.windows[p],
                                     NCCL_WIN_COLL_SYMMETRIC));
#endif
    return p;
}
static inline void device_comm_free(void* p) {
    CommWait waiting;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0)
    ncclCheck(ncclCommWindowDeregister(nccl_state.comm, nccl_state.windows[p]));
    nccl_state.windows.erase(p);
#endif
    ncclCheck(ncclMemFree(p));
}

static inline void device_all_to_all(void* recv, const void* send, size_t bytes, Stream stream) {
    NvtxRange range("all_to_all");
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0)
    ncclCheck(ncclAlltoAll(send, recv, bytes, ncclInt8, nccl_state.comm, stream));
#else
    ncclCheck(ncclGroupStart());
    for (int r = 0; r < comm.world; r++) {
        ncclCheck(ncclSend((const char*)send + r * bytes, bytes, ncclInt8, r, nccl_state.comm, stream));
        ncclCheck(ncclRecv((char*)recv + r * bytes, bytes, ncclInt8, r, nccl_state.comm, stream));
    }
    ncclCheck(ncclGroupEnd());
#endif
}
static inline void device_all_gather(void* all, size_t bytes, Stream stream) {
    NvtxRange range("all_gather");
    ncclCheck(ncclAllGather((char*)all + comm.rank * bytes, all, bytes, ncclInt8, nccl_state.comm, stream));
}

static inline void device_comm_end() {
    ncclComm_t ended;
    {
        std::lock_guard<std::mutex> lock(nccl_state.asked);
        ended = nccl_state.comm;
        nccl_state.comm = nullptr;
    }
    CommWait waiting;
    if (ended) { ncclCheck(ncclCommDestroy(ended)); }
}

#else   // one rank
constexpr bool kDeviceHasNccl = false;
static inline void device_comm_init() {
    if (comm.world > 1) {
        die("%d ranks need NCCL, which this program was built without\n"
            "hint: install NCCL (libnccl-dev on Debian and Ubuntu) and run make again", comm.world);
    }
}
static inline void* device_comm_malloc(size_t bytes, const char* what) { return device_malloc(bytes, what); }
static inline void device_comm_free(void* p) { device_free(p); }
static inline void device_all_to_all(void*, const void*, size_t, Stream) {}
static inline void device_all_gather(void*, size_t, Stream) {}
static inline void device_comm_end() {}
#endif
