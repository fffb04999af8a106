/*
A job of several processes, its ranks: start, messages through host memory, and an end together. Host only.

    comm_start(options, argv);                      // before memory is taken; in the process that
    comm_check_same({{"-b", "4"}, ...});            // --gpus N makes the launcher it never returns
    for (step...) {
        comm_progress(step);
        comm_all_gather(shards, bytes);             // (world, bytes), each rank fills its part
        if (comm_any(stop_requested)) { break; }
    }
    comm_end();

Rank 0 is the hub of a star (llmc/comm/net.h). The main threads use the data links, one collective at a time;
what goes from rank to rank goes through rank 0. A process that was not started as one of several is rank 0 of
1, has no threads and no sockets, and all of this returns at once.

What happens when a rank fails stands in llmc/comm/watch.h. A main thread that finds its peer gone waits for
the watchdog, which knows more.
*/
#ifndef LLMC_COMM_COMM_H
#define LLMC_COMM_COMM_H

#include <pthread.h>        // gives: pthread_sigmask
#include <sys/eventfd.h>    // gives: eventfd

#include <algorithm>        // gives: std::min
#include <string>           // gives: std::string
#include <thread>           // gives: std::thread
#include <utility>          // gives: std::pair
#include <vector>           // gives: std::vector

#include "../check.h"       // gives: die, die_report, format
#include "net.h"            // gives: comm_read, comm_write
#include "start.h"          // gives: CommOptions, comm_find
#include "watch.h"          // gives: comm_progress, comm_patience, comm_health, comm_abort, CommWait

// What this process is. Written by comm_start.
struct Comm { int rank = 0, world = 1, local_rank = 0, local_world = 1; };
static Comm comm;

// ---- start and orderly end ----

static inline void comm_start(const CommOptions& options, char** argv) {
    CommState* s = new CommState;
    comm_find(&s->job, options, argv);
    comm = {s->job.rank, s->job.world, s->job.local_rank, s->job.local_world};
    if (comm.world == 1) { delete s; return; }
    s->seen.resize(s->job.peers.size());
    for (CommSeen& seen : s->seen) { seen.heard = comm_now(); }
    s->since = comm_now();
    s->allowed = comm_limits.first;
    s->wake = eventfd(0, EFD_CLOEXEC);
    comm_state = s;
    die_report = comm_report;
    unsetenv(kCommChild);                       // until here die() needed it
    const int null = comm.rank == 0 ? -1 : open("/dev/null", O_WRONLY | O_CLOEXEC);
    if (null >= 0) {                            // rank 0 prints for all, however they were started
        dup2(null, STDOUT_FILENO);
        close(null);
    }
    sigset_t all, before;                       // signals are for the main thread
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    s->watchdog = std::thread(comm_watch);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// All ranks wait here for the last; then nobody takes a closed connection for a death.
static inline void comm_end() {
    CommState* s = comm_state;
    if (!s || s->over) { return; }
    {
        CommWait waiting;
        if (s->job.rank != 0) { comm_send(0, kCommBye); }
        const int all = s->job.rank == 0 ? s->job.world - 1 : 1;
        while (s->byes < all) { usleep(500); }
        for (int r = 1; r < s->job.world && s->job.rank == 0; r++) { comm_send(r, kCommBye); }
    }
    s->over = true;
    const uint64_t one = 1;
    if (write(s->wake, &one, sizeof(one)) < 0) {}       // it looks ten times a second anyway
    s->watchdog.join();
    if (s->job.rank == 0) { comm_drain(); }
    for (const CommPeer& p : s->job.peers) {
        if (p.control >= 0) { close(p.control); close(p.data); }
    }
#ifdef USE_MPI
    if (s->job.mpi) { MPI_Finalize(); }
#endif
}

// ---- collectives: the main thread's, all ranks in the same order ----

// The peer is gone. The watchdog knows why and ends the process; if it does not, something is wrong here.
__attribute__((noreturn)) static inline void comm_lost() {
    usleep((useconds_t)((comm_limits.silence + 5) * 1e6));
    die("the connection to another rank is lost");
}

static inline void comm_to(int peer, const void* data, size_t bytes) {
    if (!comm_write(comm_state->job.peers[peer].data, data, bytes)) { comm_lost(); }
}
static inline void comm_from(int peer, void* data, size_t bytes) {
    if (!comm_read(comm_state->job.peers[peer].data, data, bytes)) { comm_lost(); }
}

// Begins each collective: are all ranks at the same one? Rank 0 gives back the sum of the values, and true if
// this process takes part at all.
struct CommCall { uint32_t op, value; uint64_t bytes; };
enum : uint32_t { kCommBroadcast = 1, kCommAllGather, kCommAllToAll, kCommAny, kCommFacts };

static inline uint32_t comm_meet(uint32_t op, uint64_t bytes, uint32_t value = 0) {
    CommState* s = comm_state;
    assert(!s->over);
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
    const bool any = comm_meet(kCommAny, 0, mine) > 0;
    comm_state->calls++;
    return any;
}

static inline void comm_broadcast(void* data, size_t bytes) {
    if (!comm_state) { return; }
    CommWait waiting;
    comm_meet(kCommBroadcast, bytes);
    if (comm.rank != 0) { comm_from(0, data, bytes); }
    for (int r = 1; r < comm.world && comm.rank == 0; r++) { comm_to(r, data, bytes); }
    comm_state->calls++;
}

// Parts of a rank are relayed in pieces, so that what rank 0 holds of all ranks' messages stays small.
static inline size_t comm_piece(int parts) { return std::max<size_t>(4096, ((size_t)16 << 20) / parts); }

static inline void comm_all_gather(void* all, size_t bytes) {
    if (!comm_state) { return; }
    CommWait waiting;
    comm_meet(kCommAllGather, bytes);
    const size_t piece = comm_piece(comm.world), world = comm.world;
    char* at = (char*)all;
    for (size_t from = 0; from < bytes; from += piece) {
        const size_t n = std::min(piece, bytes - from);
        if (comm.rank != 0) { comm_to(0, at + comm.rank * bytes + from, n); }
        for (size_t r = 1; r < world && comm.rank == 0; r++) { comm_from((int)r, at + r * bytes + from, n); }
        for (size_t part = 0; part < world; part++) {       // all to all but its owner
            char* p = at + part * bytes + from;
            if (comm.rank != 0 && (size_t)comm.rank != part) { comm_from(0, p, n); }
            for (size_t r = 1; r < world && comm.rank == 0; r++) { if (r != part) { comm_to((int)r, p, n); } }
        }
    }
    comm_state->calls++;
}

static inline void comm_all_to_all(void* recv, const void* send, size_t bytes) {
    if (!comm_state) { memmove(recv, send, bytes); return; }
    CommWait waiting;
    comm_meet(kCommAllToAll, bytes);
    const size_t world = comm.world, me = comm.rank, piece = comm_piece((int)(world * world));
    std::vector<char> relay(me == 0 ? world * world * std::min(piece, bytes) : 0);      // (from, to, n)
    for (size_t at = 0; at < bytes; at += piece) {
        const size_t n = std::min(piece, bytes - at);
        for (size_t r = 0; r < world; r++) {
            const char* mine = (const char*)send + r * bytes + at;
            if (r == me) { memcpy((char*)recv + r * bytes + at, mine, n); }
            else if (me != 0) { comm_to(0, mine, n); }
        }
        if (me != 0) {
            for (size_t r = 0; r < world; r++) {
                if (r != me) { comm_from(0, (char*)recv + r * bytes + at, n); }
            }
            continue;
        }
        for (size_t r = 1; r < world; r++) {
            for (size_t to = 0; to < world; to++) {
                char* p = to == 0 ? (char*)recv + r * bytes + at : &relay[(r * world + to) * n];
                if (to != r) { comm_from((int)r, p, n); }
            }
        }
        for (size_t to = 1; to < world; to++) {
            for (size_t r = 0; r < world; r++) {
                const char* p = r == 0 ? (const char*)send + to * bytes + at : &relay[(r * world + to) * n];
                if (r != to) { comm_to((int)to, p, n); }
            }
        }
    }
    comm_state->calls++;
}

// ---- do all ranks mean the same? ----

// Where two values differ, at most 60 characters.
static inline std::string comm_shorten(const std::string& value, const std::string& other) {
    size_t same = 0;
    while (same < value.size() && same < other.size() && value[same] == other[same]) { same++; }
    const size_t from = value.size() <= 60 || same < 40 ? 0 : same - 20;
    const std::string part = value.substr(from, 60);
    return (from ? "..." : "") + part + (from + part.size() < value.size() ? "..." : "");
}

typedef std::vector<std::pair<std::string, std::string>> CommFacts;

static inline void comm_check_same(const CommFacts& facts) {
    if (!comm_state) { return; }
    CommWait waiting;
    comm_meet(kCommFacts, 0);
    std::string text;                           // name \0 value \0 ...
    for (const auto& f : facts) { text += f.first + '\0' + f.second + '\0'; }
    if (comm.rank != 0) {
        const uint64_t size = text.size();
        comm_to(0, &size, sizeof(size));
        comm_to(0, text.data(), size);
    }
    for (int r = 1; r < comm.world && comm.rank == 0; r++) {
        uint64_t size;
        comm_from(r, &size, sizeof(size));
        std::string other(size, '\0'), name, value;
        comm_from(r, &other[0], size);
        size_t at = 0;
        for (const auto& f : facts) {
            for (std::string* s : {&name, &value}) {
                *s = other.c_str() + std::min(at, other.size());
                at += s->size() + 1;
            }
            if (name == f.first && value == f.second) { continue; }
            if (name != f.first) {
                die("rank %d is another program than rank 0: it has '%s' where rank 0 has '%s'", r,
                    name.c_str(), f.first.c_str());
            }
            die("the ranks differ in %s: it is '%s' on rank 0 and '%s' on rank %d\nhint: start all of them "
                "with the same flags, files and program", name.c_str(), comm_shorten(f.second, value).c_str(),
                comm_shorten(value, f.second).c_str(), r);
        }
    }
    comm_meet(kCommFacts, 0);                   // nobody goes on before rank 0 has looked
    comm_state->calls++;
}

#endif  // LLMC_COMM_COMM_H
