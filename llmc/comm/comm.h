/*
A job of several processes, its ranks: start, messages through host memory, and an end together. Host only.

    comm_start(options, argv);                      // before large allocations; never returns in the launcher
    comm_check_same({{"-b", "4"}, ...});            // dies if a rank has other flags
    for (step...) {
        comm_progress(step);
        comm_all_gather(shards, bytes);             // (world, bytes), each rank fills its part
        if (comm_any(stop_requested)) { break; }
    }
    comm_end();

Rank 0 is the hub of a star (llmc/comm/net.h). The main threads use the data links, one collective at a time.
Data between two other ranks pass through rank 0. A process that was started alone is rank 0 of 1: it has no
watchdog and no sockets, and every function here returns at once. A start goes through these:

    start.h     which rank of how many this process is, and where rank 0 listens
    launch.h    --gpus N: the process that starts the ranks, and waits for them
    net.h       rank 0 and the others meet
    watch.h     what happens when a rank fails
*/
#pragma once

#include <pthread.h>        // gives: pthread_sigmask

#include "../errors.h"      // gives: die, die_report, format
#include "../facts.h"       // gives: Facts, facts_text, facts_parse
#include "net.h"            // gives: comm_read, comm_write
#include "start.h"          // gives: CommOptions, comm_find
#include "watch.h"          // gives: comm_progress, comm_health, comm_abort, CommWait, DiskWait

// Written by comm_start.
struct Comm { int rank = 0, world = 1, local_rank = 0, local_world = 1; };
static Comm comm;

// Only rank 0 prints a warning: all ranks come to the same one.
__attribute__((format(printf, 1, 2))) static inline void warn(const char* fmt, ...) {
    if (comm.rank != 0) { return; }
    va_list args;
    va_start(args, fmt);
    progress_clear();
    fprintf(stderr, "warning: %s\n", shown_message(vformat(fmt, args)).c_str());
    va_end(args);
}

// ---- collectives: the main thread's, all ranks in the same order ----

// The peer is gone. The watchdog ends this process and says why; only comm_end is for this thread to judge.
__attribute__((noreturn)) static inline void comm_lost(int peer) {
    if (!comm_state->ending) { comm_sleep(comm_limits.silence + 5); }
    if (comm.rank == 0) { comm_fail(0, comm_say(peer, "died")); }
    comm_fail_alone("died");
}

static inline void comm_to(int peer, const void* data, size_t bytes) {
    if (!comm_write(comm_state->job.peers[peer].data, data, bytes)) { comm_lost(peer); }
}
static inline void comm_from(int peer, void* data, size_t bytes) {
    if (!comm_read(comm_state->job.peers[peer].data, data, bytes)) { comm_lost(peer); }
}

// Begins each collective: checks that all ranks call the same one, and returns the sum of their values.
struct CommCall { uint32_t op, value; uint64_t bytes; };
enum : uint32_t { kCommBroadcast = 1, kCommAllGather, kCommAllToAll, kCommAny, kCommLast };

static inline uint32_t comm_meet(uint32_t op, uint64_t bytes, uint32_t value = 0) {
    CommState* s = comm_state;
    assert(!s->over);
    s->calls++;
    CommCall mine = {op, value, bytes}, other;
    if (s->job.rank != 0) {
        comm_to(0, &mine, sizeof(mine));
        comm_from(0, &other, sizeof(other));
        return other.value;
    }
    for (int r = 1; r < s->job.world; r++) {
        comm_from(r, &other, sizeof(other));
        if (other.op != op || other.bytes != bytes) {
            die("rank %d is at operation %u of %llu bytes, rank 0 at %u of %llu", r, other.op,
                (unsigned long long)other.bytes, op, (unsigned long long)bytes);
        }
        mine.value += other.value;
    }
    for (int r = 1; r < s->job.world; r++) { comm_to(r, &mine, sizeof(mine)); }
    return mine.value;
}

static inline bool comm_any(bool mine) {
    if (!comm_state) { return mine; }
    CommWait waiting;
    return comm_meet(kCommAny, 0, mine) > 0;
}

// Moves data from one rank to another, through rank 0. All ranks call it with the same arguments in the same
// order: otherwise one rank would send while its receiver waits for somebody else.
static inline void comm_move(int from, int to, const char* data, char* out, size_t bytes) {
    const int me = comm.rank;
    if (me == from) { comm_to(me == 0 ? to : 0, data, bytes); }
    else if (me == to) { comm_from(me == 0 ? from : 0, out, bytes); }
    else if (me == 0) {
        std::vector<char> piece(std::min(bytes, (size_t)1 << 20));
        for (size_t at = 0, n; at < bytes; at += n) {
            n = std::min(piece.size(), bytes - at);
            comm_from(from, piece.data(), n);
            comm_to(to, piece.data(), n);
        }
    }
}

static inline void comm_broadcast(void* data, size_t bytes) {
    if (!comm_state) { return; }
    CommWait waiting;
    comm_meet(kCommBroadcast, bytes);
    for (int r = 1; r < comm.world; r++) { comm_move(0, r, (char*)data, (char*)data, bytes); }
}

static inline void comm_all_gather(void* all, size_t bytes) {
    if (!comm_state) { return; }
    CommWait waiting;
    comm_meet(kCommAllGather, bytes);
    auto part = [&](int r) { return (char*)all + r * bytes; };
    for (int r = 1; r < comm.world; r++) { comm_move(r, 0, part(r), part(r), bytes); }
    for (int to = 1; to < comm.world; to++) {   // every part but the receiver's own
        comm_move(0, to, part(0), part(0), to * bytes);
        comm_move(0, to, part(to + 1), part(to + 1), (comm.world - 1 - to) * bytes);
    }
}

// One rank has an element's value, and the others have 0. Afterwards all ranks have all values.
static inline void comm_merge(std::vector<double>* x) {
    const size_t n = x->size();
    std::vector<double> all(n * comm.world);
    std::copy(x->begin(), x->end(), all.begin() + n * comm.rank);
    comm_all_gather(all.data(), n * sizeof(double));
    x->assign(n, 0.0);
    for (size_t i = 0; i < all.size(); i++) { (*x)[i % n] += all[i]; }
}

static inline void comm_all_to_all(void* recv, const void* send, size_t bytes) {
    if (!comm_state) { memmove(recv, send, bytes); return; }
    CommWait waiting;
    comm_meet(kCommAllToAll, bytes);
    std::copy_n((const char*)send + comm.rank * bytes, bytes, (char*)recv + comm.rank * bytes);
    for (int from = 0; from < comm.world; from++) {
        for (int to = 0; to < comm.world; to++) {
            if (from == to) { continue; }
            comm_move(from, to, (const char*)send + to * bytes, (char*)recv + from * bytes, bytes);
        }
    }
}

// ---- do all ranks agree? ----

// The part of `value` where it differs from `other`, at most 60 characters.
static inline std::string comm_shorten(const std::string& value, const std::string& other) {
    size_t same = 0;
    while (same < value.size() && same < other.size() && value[same] == other[same]) { same++; }
    const size_t from = value.size() <= 60 || same < 40 ? 0 : same - 20;
    const std::string part = value.substr(from, 60);
    return (from ? "..." : "") + part + (from + part.size() < value.size() ? "..." : "");
}

// Each rank compares its facts with rank 0's.
static inline void comm_check_same(const Facts& facts) {
    if (!comm_state) { return; }
    CommWait waiting;
    std::string text = facts_text(facts);
    uint64_t size = text.size();
    comm_broadcast(&size, sizeof(size));
    if (size > 1 << 24) { die("rank 0 is another program: its facts take %.3g bytes", (double)size); }
    text.resize(size);
    comm_broadcast(&text[0], size);
    Facts of_rank_0;
    facts_parse(text, &of_rank_0);
    of_rank_0.resize(facts.size());
    for (size_t i = 0; i < facts.size(); i++) {
        const auto &[name, value] = of_rank_0[i];
        const auto& mine = facts[i];
        if (name != mine.first) {
            die("it is another program than rank 0: it has '%s' where rank 0 has '%s'", mine.first.c_str(),
                name.c_str());
        }
        if (value == mine.second) { continue; }
        die("the ranks differ in %s: it is '%s' on rank 0 and '%s' on rank %d\nhint: start all of them with "
            "the same flags, files and program; %s", name.c_str(), comm_shorten(value, mine.second).c_str(),
            comm_shorten(mine.second, value).c_str(), comm.rank, kCommApart);
    }
    comm_any(false);                            // waits until all ranks have compared
}

// ---- start and orderly end ----

// The text is equal on ranks that see each other's processes. Two containers on one host do not.
static inline std::string comm_host() {
    char name[256] = "", space[64] = "";
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    gethostname(name, sizeof(name) - 1);
    if (readlink("/proc/self/ns/pid", space, sizeof(space) - 1) < 0) { space[0] = '\0'; }
    return name + boot + space;
}

// Sets local_rank and local_world: this rank's number on its host, and the number of ranks there.
static inline void comm_place(int per_node) {
    std::vector<uint64_t> hosts(comm.world);
    const std::string host = comm_host();
    hosts[comm.rank] = per_node > 0 ? comm.rank / per_node : checksum(host.data(), host.size());
    comm_all_gather(hosts.data(), sizeof(uint64_t));
    for (int r = 0; r < comm.world; r++) {
        const bool here = hosts[r] == hosts[comm.rank];
        comm.local_rank += here && r < comm.rank;
        comm.local_world += here && r != comm.rank;
    }
}

static inline void comm_start(const CommOptions& options, char** argv) {
    CommJob job;
    comm_find(&job, options, argv);
    comm = {job.rank, job.world, 0, 1};
    if (comm.world == 1) { return; }
    CommState* s = new CommState;
    s->job = job;
    s->seen.resize(s->job.peers.size());
    for (CommSeen& seen : s->seen) { seen.heard = comm_now(); }
    s->since = comm_now();
    s->allowed = comm_limits.first;
    comm_state = s;
    die_report = comm_report;
    unsetenv(kCommChild);                       // until here comm_report_early reads it
    const int null = comm.rank == 0 ? -1 : open("/dev/null", O_WRONLY | O_CLOEXEC);
    if (null >= 0) {                            // only rank 0 prints on stdout
        dup2(null, STDOUT_FILENO);
        close(null);
    }
    sigset_t all, before;                       // signals are for the main thread
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread(comm_watch).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    comm_place(options.per_node);
}

// Waits for all ranks. From its begin on, a closed connection is no death: who has left was here.
static inline void comm_end() {
    CommState* s = comm_state;
    if (!s || s->over) { return; }
    s->ending = true;
    {
        CommWait waiting;
        comm_meet(kCommLast, 0);
    }
    s->over = true;                             // the watchdog ends. The connections end with the process
#ifdef USE_MPI
    if (s->job.mpi) { MPI_Finalize(); }
#endif
}
