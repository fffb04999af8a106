/*
A job of several processes, its ranks: start, messages through host memory, and an end together. Host only.

    comm_start(options, argc, argv);                // before memory is taken; with --gpus N never returns in the
    comm_check_same({{"-b", "4"}, ...});            // process that starts the others
    for (step...) {
        comm_progress(step);
        comm_all_gather(shards, bytes);             // (world, bytes), each rank fills its part
        if (comm_any(stop_requested)) { break; }
    }
    comm_end();

Rank 0 is the hub of a star (llmc/comm_start.h). The main threads use the data links, one collective at a time;
what goes from rank to rank goes through rank 0. A process that was not started as one of several is rank 0 of
1, has no threads and no sockets, and all of this returns at once.

Failure: each rank has a watchdog thread, which sends a heartbeat over the control link every second with the
step and whether the main thread makes progress. Rank 0 watches all, the others watch rank 0. Who dies, is
stopped, stands still or calls die() takes all ranks down: one message for the whole job, exit code 1. A main
thread that finds its peer gone waits for the watchdog, which knows more.
*/
#ifndef LLMC_COMM_H
#define LLMC_COMM_H

#include <pthread.h>        // gives: pthread_sigmask
#include <sys/eventfd.h>    // gives: eventfd

#include <atomic>           // gives: std::atomic
#include <mutex>            // gives: std::mutex
#include <string>           // gives: std::string
#include <thread>           // gives: std::thread
#include <utility>          // gives: std::pair
#include <vector>           // gives: std::vector

#include "check.h"          // gives: die, die_report, format
#include "comm_start.h"     // gives: CommOptions, CommJob, comm_find, comm_read, comm_write

// What this process is. Written by comm_start.
struct Comm { int rank = 0, world = 1, local_rank = 0, local_world = 1; };
static Comm comm;

// Set by the CUDA side. health: NCCL's asynchronous error or "", asked by the watchdog every second. abort:
// ncclCommAbort, called once before the process ends on a failure; if it hangs, the end comes all the same.
static std::string (*comm_health)() = nullptr;
static void (*comm_abort)() = nullptr;

// Seconds; tests lower them.
static struct {
    double beat = 1;                // between heartbeats
    double silence = 10;            // without one: stopped or unreachable
    double still = 20;              // without progress, or still_factor times the longest step if that is more
    double still_factor = 10;
    double first = 600;             // before the second comm_progress: loading, compiling, warming up
    double health = 2;              // an NCCL error waits so long for the death that it may come from
    double abort = 3;               // for comm_abort and printing
} comm_limits;

// ---- state of a started job ----

enum : uint32_t { kCommBeat = 1, kCommBye, kCommError, kCommEnd };

// On control links; `bytes` of text follow.
struct CommMessage {
    uint32_t word, bytes;
    int64_t step;
    uint64_t progress, calls;       // comm_progress and collectives so far
    double still;                   // seconds without progress, if that is too long; else 0
    int64_t waiting;                // the main thread waits for other ranks
};

struct CommSeen {                   // what the watchdog knows of a peer; `last` of this process too
    double heard = 0;
    bool closed = false, bye = false;
    std::string unread;
    CommMessage last = {kCommBeat, 0, -1, 0, 0, 0, 0};
};

// Never freed: threads may look at it until the process is gone.
struct CommState {
    CommJob job;
    std::vector<CommSeen> seen;     // like job.peers
    std::thread watchdog;
    std::mutex sending;             // on control links
    int wake = -1;                  // eventfd: the watchdog shall look at `over`
    std::atomic<bool> over{false};  // comm_end has come through
    std::atomic<int> byes{0};
    std::atomic<int64_t> step{-1};
    std::atomic<uint64_t> progress{0}, calls{0};
    std::atomic<int> waiting{0};
    std::atomic<double> since{0}, allowed{0};   // last progress, and how long after it all is well
    std::atomic<bool> patient{false};
    double longest = 0;             // between two comm_progress
};
static CommState* comm_state = nullptr;         // of a job of several ranks
static std::atomic<int> comm_spoken{0};         // where no page is shared

// True for the one that prints the job's message.
static inline bool comm_claim() {
    CommPage* page = comm_state ? comm_state->job.page : nullptr;
    return (page ? page->spoken : comm_spoken).exchange(1) == 0;
}

// While the main thread waits for other ranks, it is not the one to blame if nothing goes on. The collectives
// here do this; whoever waits for NCCL may, too.
struct CommWait {
    CommWait() { if (comm_state) { comm_state->waiting++; } }
    ~CommWait() { if (comm_state) { comm_state->waiting--; } }
};

static inline void comm_progress(int64_t step) {
    CommState* s = comm_state;
    if (!s) { return; }
    const double now = comm_now(), took = now - s->since;
    s->step = step;
    if (s->job.page) { s->job.page->step[s->job.rank] = step; }
    if (s->progress > 0 && !s->patient) { s->longest = std::max(s->longest, took); }
    s->patient = false;
    s->since = now;
    s->allowed = ++s->progress < 2 ? comm_limits.first
                                   : std::max(comm_limits.still, comm_limits.still_factor * s->longest);
}

static inline void comm_patience(double seconds) {
    CommState* s = comm_state;
    if (!s) { return; }
    s->patient = true;
    s->allowed = std::max(s->allowed.load(), comm_now() - s->since + seconds);
}

// ---- the end ----

static inline void comm_send(int peer, uint32_t word, const std::string& text = "") {
    CommState* s = comm_state;
    CommMessage m = {word, (uint32_t)std::min<size_t>(text.size(), 8000), s->step, s->progress, s->calls, 0,
                     s->waiting > 0};
    const double still = comm_now() - s->since;
    if (still > s->allowed) { m.still = still; }
    const std::string whole = std::string((const char*)&m, sizeof(m)) + text.substr(0, m.bytes);
    std::lock_guard<std::mutex> lock(s->sending);
    // Half a message happens only if the peer has read nothing for hours.
    send(s->job.peers[peer].control, whole.data(), whole.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

// Ends the process at the latest then, whatever the thread that calls this meets on its way.
static inline void comm_end_within(double seconds) {
    try {
        std::thread([seconds] { usleep((useconds_t)(seconds * 1e6)); _exit(EXIT_FAILURE); }).detach();
    } catch (...) {}                            // no thread to be had: the way is short
}

// stdout may be locked by a thread that is stuck, or a pipe that nobody reads.
static inline void comm_flush() {
    struct pollfd p = {STDOUT_FILENO, POLLOUT, 0};
    if (poll(&p, 1, 1000) == 1 && ftrylockfile(stdout) == 0) {
        fflush(stdout);
        funlockfile(stdout);
    }
}

// Until the others have seen our last message and closed, or a second has passed: a socket that is closed with
// something unread in it may take back what it has sent.
static inline void comm_drain() {
    const double limit = comm_now() + 1;
    for (const CommPeer& p : comm_state->job.peers) {
        char rest[4096];
        if (p.control < 0) { continue; }
        shutdown(p.control, SHUT_WR);
        while (comm_wait_fd(p.control, POLLIN, limit) && recv(p.control, rest, sizeof(rest), MSG_DONTWAIT) > 0) {}
    }
}

// The failed end of this rank, from any thread. text: what to print if nobody has said anything; "" is silent.
// victim: a stopped rank, which cannot end itself.
__attribute__((noreturn)) static inline void comm_fail(const std::string& text, const CommHello* victim = nullptr) {
    static std::atomic<bool> failing(false);
    CommState* s = comm_state;
    if (failing.exchange(true)) { for (;;) { pause(); } }
    comm_end_within(comm_limits.abort);
    comm_flush();
    if (!text.empty() && comm_claim()) { fprintf(stderr, "error: %s\n", text.c_str()); }
    for (size_t i = 0; i < s->job.peers.size(); i++) {
        if (s->job.peers[i].control >= 0) { comm_send((int)i, kCommEnd); }
    }
    // A launcher kills its ranks itself; here only what is surely the same process on this host.
    if (victim && !s->job.page && comm_same_host(*victim, comm_hello(s->job, CommSecret{}, 0)) &&
        victim->pid > 1 && comm_started(victim->pid) == victim->started) {
        kill((pid_t)victim->pid, SIGKILL);
    }
    atomic_remove_parts();
    if (comm_abort) { comm_abort(); }
    comm_drain();
    _exit(EXIT_FAILURE);
}

// die() of a started job, in any thread: rank 0 speaks for all.
static inline bool comm_report(const char* text) {
    CommState* s = comm_state;
    const std::string named = s->job.rank == 0 ? text : format("rank %d: %s", s->job.rank, text);
    if (s->over) {                              // the others may be gone
        if (!comm_claim()) { return true; }
        fflush(stdout);
        fprintf(stderr, "error: %s\n", named.c_str());
        return true;
    }
    if (s->job.rank != 0) {
        comm_send(0, kCommError, named);
        atomic_remove_parts();
        usleep((useconds_t)(comm_limits.abort * 1e6));      // the watchdog ends the process when rank 0 says so
    }
    comm_fail(named);
}

// die() before the job has started. All ranks will often fail alike, so those of a scheduler's job give rank 0
// time to say it, and the scheduler to end them.
static inline bool comm_report_early(const char* text) {
    CommChild child;
    const bool local = comm_child(&child);
    const int rank = local ? child.rank : comm_foreign().rank;
    CommPage* page = local ? comm_map_page(child.page) : nullptr;
    if (page && rank == 0) { return page->spoken.exchange(1) != 0; }
    if (rank == 0) { return false; }
    const double until = comm_now() + comm_limits.abort + 0.25 * std::min(rank, 40);
    while (comm_now() < until && !(page && page->spoken)) { usleep(20000); }
    if (page && page->spoken.exchange(1)) { return true; }
    fprintf(stderr, "error: rank %d: %s\n", rank, text);
    return true;
}
static const bool comm_reports_early [[maybe_unused]] = (die_report = comm_report_early) != nullptr;

// ---- the watchdog ----

static inline std::string comm_name(int rank) {
    const CommState* s = comm_state;
    const bool hub = s->job.rank == 0;
    const CommHello& h = s->job.peers[hub ? rank : 0].who;
    int64_t step = s->seen[hub ? rank : 0].last.step;
    if (s->job.page) { step = s->job.page->step[rank]; }
    const std::string last = step < 0 ? "it had not begun its first step"
                                      : format("its last step was %lld", (long long)step);
    return format("rank %d (%s, pid %lld) %%s; %s", rank, shown(h.host).c_str(), (long long)h.pid, last.c_str());
}

static inline std::string comm_say(int rank, const std::string& what) {
    std::string text = comm_name(rank);
    return text.replace(text.find("%s"), 2, what);
}

static inline void comm_got(int peer, const CommMessage& m, const std::string& text) {
    CommState* s = comm_state;
    CommSeen& seen = s->seen[peer];
    seen.last = m;
    if (m.word == kCommBye && !seen.bye) { seen.bye = true; s->byes++; }
    if (m.word == kCommError) { comm_fail(text); }
    if (m.word == kCommEnd) { comm_fail(""); }
}

// All that has come, without waiting.
static inline void comm_receive_control(int peer) {
    CommSeen& seen = comm_state->seen[peer];
    char buffer[16384];
    const ssize_t n = recv(comm_state->job.peers[peer].control, buffer, sizeof(buffer), MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) { return; }
    if (n <= 0) { seen.closed = true; return; }
    seen.heard = comm_now();
    seen.unread.append(buffer, (size_t)n);
    CommMessage m;
    while (seen.unread.size() >= sizeof(m)) {
        memcpy(&m, seen.unread.data(), sizeof(m));
        if (seen.unread.size() < sizeof(m) + m.bytes) { break; }
        const std::string text = seen.unread.substr(sizeof(m), m.bytes);
        seen.unread.erase(0, sizeof(m) + m.bytes);
        comm_got(peer, m, text);
    }
}

static inline std::string comm_silent() {
    return format("is stopped or unreachable: no sign of life for %.0f s", comm_limits.silence);
}

// Rank 0: the one that all wait for is the one with the least progress; of several, one that does not wait
// itself. As long as it may take its time, so may all.
static inline int comm_slowest() {
    CommState* s = comm_state;
    int slowest = -1;
    for (int r = 0; r < s->job.world; r++) {
        if (s->seen[r].bye) { continue; }
        const CommMessage &m = s->seen[r].last, &w = s->seen[slowest < 0 ? r : slowest].last;
        const auto key = std::make_tuple(m.progress, m.calls, m.waiting, m.still == 0 ? 0 : 1);
        if (slowest < 0 || key < std::make_tuple(w.progress, w.calls, w.waiting, w.still == 0 ? 0 : 1)) {
            slowest = r;
        }
    }
    return slowest >= 0 && s->seen[slowest].last.still > 0 ? slowest : -1;
}

static inline void comm_judge_ranks() {
    CommState* s = comm_state;
    const double now = comm_now();
    for (int r = 1; r < s->job.world; r++) {
        if (s->seen[r].closed && !s->seen[r].bye) { comm_fail(comm_say(r, "died")); }
    }
    for (int r = 1; r < s->job.world; r++) {
        if (s->seen[r].bye || now - s->seen[r].heard < comm_limits.silence) { continue; }
        comm_fail(comm_say(r, comm_silent()), &s->job.peers[r].who);
    }
    // What is known of the others is up to a beat old, so the verdict must stand for some.
    static int suspect = -1;
    static double suspect_since;
    const int r = comm_slowest();
    if (r != suspect) { suspect = r; suspect_since = now; }
    if (r < 0 || now - suspect_since < 2.5 * comm_limits.beat) { return; }
    comm_fail(comm_say(r, format("makes no progress for %.0f s", s->seen[r].last.still)));
}

// The others. Who speaks for a rank 0 that is gone: in a local job the first that lives, else the deputy.
static inline void comm_judge_hub() {
    CommState* s = comm_state;
    static double gone_since;
    CommSeen& hub = s->seen[0];
    const double now = comm_now();
    const bool silent = now - hub.heard > comm_limits.silence;
    if (hub.bye || (!hub.closed && !silent)) { gone_since = 0; return; }
    if (gone_since == 0) { gone_since = now; }
    // The launcher may know that this was a signal of the user's; an mpirun may want to end us, too.
    const bool mine = s->job.page || s->job.rank == s->job.deputy;
    const double delay = s->job.page ? 0.3 + 0.1 * std::min(s->job.rank, 20) : mine ? 0.3 : 1.5;
    if (now - gone_since < delay) { return; }
    const std::string text = comm_say(0, hub.closed ? "died" : comm_silent());
    comm_fail(mine ? text : "", mine && !hub.closed ? &s->job.peers[0].who : nullptr);
}

static inline void comm_ask_health() {
    static double sick_since, reported;
    static std::string text;
    CommState* s = comm_state;
    const double now = comm_now();
    if (comm_health && text.empty()) {
        text = comm_health();
        sick_since = now;
    }
    if (text.empty() || now - sick_since < comm_limits.health) { return; }
    const std::string named = s->job.rank == 0 ? text : format("rank %d: %s", s->job.rank, text.c_str());
    if (s->job.rank == 0 || (reported != 0 && now - reported > comm_limits.abort)) { comm_fail(named); }
    if (reported == 0) {
        comm_send(0, kCommError, named);
        reported = now;
    }
}

static inline void comm_watch() {
    CommState* s = comm_state;
    const int me = s->job.rank, peers = (int)s->job.peers.size();
    double beat_at = 0, looked = comm_now();
    while (!s->over) {
        std::vector<struct pollfd> polled = {{s->wake, POLLIN, 0}};
        for (int i = 0; i < peers; i++) {
            const bool open = (me != 0 || i != 0) && !s->seen[i].closed;
            polled.push_back({open ? s->job.peers[i].control : -1, POLLIN, 0});
        }
        poll(polled.data(), polled.size(), std::min(100, (int)(comm_limits.beat * 500)));
        if (s->over) { break; }
        const double now = comm_now();
        if (now - looked > 3 * comm_limits.beat) {      // this process itself was stopped: nobody is to blame
            for (CommSeen& seen : s->seen) { seen.heard = now; }
            s->since = now;
        }
        looked = now;
        for (int i = 0; i < peers; i++) { if (polled[i + 1].revents) { comm_receive_control(i); } }
        if (now >= beat_at) {
            beat_at = now + comm_limits.beat;
            for (int i = 0; i < peers; i++) {
                if (s->seen[i].closed || (me == 0 && i == 0)) { continue; }
                comm_send(i, kCommBeat);
            }
            comm_ask_health();
        }
        if (me != 0) { comm_judge_hub(); continue; }
        const double still = now - s->since;
        s->seen[0].last = {kCommBeat, 0, s->step, s->progress, s->calls, still > s->allowed ? still : 0,
                           s->waiting > 0};
        comm_judge_ranks();
    }
}

// ---- start and orderly end ----

static inline void comm_start(const CommOptions& options, int argc, char** argv) {
    (void)argc;
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
            for (size_t r = 0; r < world; r++) { if (r != me) { comm_from(0, (char*)recv + r * bytes + at, n); } }
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
            die("the ranks differ in %s: it is '%s' on rank 0 and '%s' on rank %d\nhint: start all of them with "
                "the same flags, files and program", name.c_str(), comm_shorten(f.second, value).c_str(),
                comm_shorten(value, f.second).c_str(), r);
        }
    }
    comm_meet(kCommFacts, facts.size());        // nobody goes on before rank 0 has looked
    comm_state->calls++;
}

#endif  // LLMC_COMM_H
