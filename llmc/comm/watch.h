/*
If one rank of a job fails, all ranks end: one message for the whole job, exit code 1. Host only.

    std::thread(comm_watch).detach();               // comm_start does this when all ranks are there
    comm_progress(step);                            // the main thread calls this in each step
    { CommWait waiting; ... }                       // it waits for other ranks meanwhile
    { DiskWait disk; ... }                          // it may wait for a disk

Each rank has a watchdog thread. Rank 0's watches all ranks, the others' watch rank 0. Once a second each
sends a heartbeat over the control link: the step, and for how long the main thread has made no progress.

    a rank ...              is noticed by
    calls die()             its message to rank 0
    dies                    the end of its connection
    is stopped              10 s without a heartbeat
    makes no progress       its heartbeats: it is beyond its limit and does not wait, or all ranks are beyond
                            their limits and it has come least far

Rank 0 tells all ranks to end and prints the reason. If rank 0 itself is gone, the last rank prints that: in a
job of several hosts, it is on another host. Each rank ends itself. A stopped rank ends when it continues,
unless its launcher has killed it.
*/
#pragma once

#include "../atomic_files.h" // gives: die_report, format, atomic_last_parts
#include "launch.h"         // gives: comm_child, comm_print_error
#include "net.h"            // gives: CommJob
#include "start.h"          // gives: comm_foreign, comm_early_rank

// Set by the CUDA side. comm_health returns NCCL's asynchronous error or ""; the watchdog calls it every
// second. comm_abort is ncclCommAbort, called once before a failed process ends. If it hangs, the process
// ends after comm_limits.abort seconds.
static std::string (*comm_health)() = nullptr;
static void (*comm_abort)() = nullptr;

// Seconds; tests lower them.
static struct {
    double beat = 1;                // between heartbeats
    double silence = 10;            // without a heartbeat: the rank is stopped or unreachable
    double still = 20;              // without progress, or still_factor times the longest micro-step
    double still_factor = 10;
    double first = 600;             // for the first step: loading, compiling, warming up
    double health = 2;              // an NCCL error waits for news of a rank's death, which says more
    unsigned abort = 3;             // for comm_abort and printing
} comm_limits;

// ---- state of a started job ----

enum : int64_t { kCommBeat = 1, kCommError, kCommEnd };

// All messages on control links have this size: nothing is allocated.
struct CommMessage {
    int64_t word, step;
    uint64_t calls;                 // collectives so far: of the ranks that are behind, fewer
    double still;                   // seconds without progress; 0 while within the limit
    int64_t waiting;                // 1: the main thread waits for other ranks
    char text[1200];                // the error's message
};

struct CommSeen {                   // a peer as the watchdog sees it; rank 0's own entry has only `last`
    double heard = 0;
    bool closed = false;
    CommMessage last = {kCommBeat, -1, 0, 0, 0, ""};
};

// Never freed: threads may use it until the process is gone.
struct CommState {
    CommJob job;
    std::vector<CommSeen> seen;     // like job.peers
    std::mutex sending;             // held while a message is sent on a control link
    std::atomic<bool> ending{false}, over{false};   // set by comm_end: when it begins, when all are there
    std::atomic<int64_t> step{-1};
    std::atomic<uint64_t> calls{0};
    std::atomic<int> waiting{0}, disk{0};       // CommWaits, DiskWaits
    std::atomic<double> since{0}, allowed{0};   // time of the last progress; seconds allowed after it
    double longest = 0;             // seconds without progress so far, files left out
    int64_t first_step = -1;
};
static CommState* comm_state = nullptr;         // null in a process that was started alone

// The main thread has come further.
static inline void comm_moves() {
    CommState* s = comm_state;
    const double now = comm_now();
    if (s->first_step >= 0 && s->disk == 0) { s->longest = std::max(s->longest, now - s->since); }
    s->since = now;
}

// While one lives, the main thread waits and is not blamed for a standstill.
struct CommPause {
    typedef std::atomic<int> CommState::*Kind;
    const Kind kind;
    explicit CommPause(Kind kind) : kind(kind) { count(1); }
    ~CommPause() { count(-1); }
    void count(int more) const {
        if (!comm_state) { return; }
        comm_moves();                           // first: the watchdog reads the counts before `since`
        comm_state->*kind += more;
    }
};
// For other ranks.
struct CommWait : CommPause { CommWait() : CommPause(&CommState::waiting) {} };
// For files: a stalled disk must not end the job, within an hour.
constexpr double kDiskPatience = 3600;
struct DiskWait : CommPause { DiskWait() : CommPause(&CommState::disk) {} };

// step -1: the first one has not begun.
static inline void comm_progress(int64_t step) {
    CommState* s = comm_state;
    if (!s) { return; }
    comm_moves();
    if (s->first_step < 0) { s->first_step = step; }
    s->step = step;
    // The first step may call this several times. No interval between calls bounds its longest part.
    s->allowed = step <= s->first_step ? comm_limits.first
                                       : std::max(comm_limits.still, comm_limits.still_factor * s->longest);
}

// ---- the end ----

static inline CommMessage comm_message(int64_t word) {
    const CommState* s = comm_state;
    const int64_t waiting = s->waiting > 0;
    const double limit = s->disk > 0 ? kDiskPatience : s->allowed.load(), still = comm_now() - s->since;
    return {word, s->step, s->calls, still > limit ? still : 0, waiting, ""};
}

static inline void comm_send(int peer, int64_t word, const std::string& text = "") {
    CommState* s = comm_state;
    CommMessage m = comm_message(word);
    snprintf(m.text, sizeof(m.text), "%s", text.c_str());
    std::lock_guard<std::mutex> lock(s->sending);
    // The socket's buffer holds minutes of messages: if it is full, the peer hangs.
    send(s->job.peers[peer].control, &m, sizeof(m), MSG_NOSIGNAL | MSG_DONTWAIT);
}
static inline void comm_send_all(int64_t word) {
    for (size_t i = 0; i < comm_state->job.peers.size(); i++) { comm_send((int)i, word); }
}

// Ends this rank after a failure, from any thread. text: the job's error, said by `rank`; "" prints nothing.
__attribute__((noreturn)) static inline void comm_fail(int rank, const std::string& text) {
    static std::atomic<bool> failing(false);
    if (failing.exchange(true)) { for (;;) { pause(); } }
    signal(SIGALRM, [](int) { _exit(EXIT_FAILURE); });      // if something below hangs
    alarm(comm_limits.abort);
    progress_clear();
    if (!text.empty()) { comm_print_error(rank, text); }
    comm_send_all(kCommEnd);                    // last: a scheduler that sees a rank end may kill all
    atomic_remove_parts();
    if (comm_abort) { comm_abort(); }
    atomic_last_parts();                        // another thread may just have begun to save
    _exit(EXIT_FAILURE);
}

// die_report after comm_start, in any thread: rank 0 prints for all.
static inline bool comm_report(const char* text) {
    CommState* s = comm_state;
    if (s->over) {                              // the other ranks may be gone
        comm_print_error(s->job.rank, text);
        return true;
    }
    if (s->job.rank != 0) {
        comm_send(0, kCommError, text);
        atomic_remove_parts();
        sleep(comm_limits.abort);               // our watchdog ends us at rank 0's kCommEnd
    }
    comm_fail(s->job.rank, text);
}

// die_report before comm_start is done. Without a launcher the other ranks give rank 0 time to print its
// error, since often all ranks fail for one reason, and a scheduler time to end them.
static inline bool comm_report_early(const char* text) {
    CommChild child;
    const bool local = comm_child(&child);
    const int rank = local ? child.rank : comm_early_rank >= 0 ? comm_early_rank : comm_foreign().rank;
    if (local) { comm_errors = child.errors; }
    else if (rank == 0) { return false; }
    else { comm_sleep(comm_limits.abort + 0.25 * std::min(rank, 40)); }
    comm_print_error(rank, text);
    return true;
}
static const bool comm_reports_early [[maybe_unused]] = (die_report = comm_report_early) != nullptr;

// ---- the watchdog ----

static inline std::string comm_say(int rank, const std::string& what) {
    const CommState* s = comm_state;
    const int peer = s->job.rank == 0 ? rank : 0;
    const CommHello& h = s->job.peers[peer].who;
    const int64_t step = s->seen[peer].last.step;
    const std::string last = step < 0 ? "it had not begun its first step"
                                      : format("its last step was %lld", (long long)step);
    return format("rank %d (%s, pid %lld) %s; %s", rank, shown(h.host).c_str(), (long long)h.pid,
                  what.c_str(), last.c_str());
}

// Reads all waiting messages of a peer, without blocking.
static inline void comm_receive_control(int peer) {
    CommSeen& seen = comm_state->seen[peer];
    const int fd = comm_state->job.peers[peer].control;
    CommMessage m;
    ssize_t n;
    while ((n = recv(fd, &m, sizeof(m), MSG_PEEK | MSG_DONTWAIT)) == sizeof(m)) {
        comm_read(fd, &m, sizeof(m));
        m.text[sizeof(m.text) - 1] = '\0';
        seen.heard = comm_now();
        seen.last = m;
        if (m.word == kCommError) { comm_fail(peer, shown_message(m.text)); }
        if (m.word == kCommEnd) { comm_fail(0, ""); }
    }
    seen.closed = n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
}

// Why a peer counts as gone, or "". While comm_end waits for all ranks, who was there may have left.
static inline std::string comm_gone(const CommSeen& seen) {
    if (seen.closed) { return comm_state->ending ? "" : "died"; }
    if (comm_now() - seen.heard <= comm_limits.silence) { return ""; }
    return format("is stopped or unreachable: no sign of life for %.0f s", comm_limits.silence);
}

// Returns the rank that holds up the others, or -1.
static inline int comm_slowest(const std::vector<CommSeen>& seen) {
    int slowest = -1;
    bool all_still = true;
    for (int r = 0; r < (int)seen.size(); r++) {
        if (seen[r].closed) { continue; }
        const CommMessage& m = seen[r].last;
        if (m.still > 0 && !m.waiting) { return r; }
        all_still = all_still && m.still > 0;
        if (slowest < 0 || m.calls < seen[slowest].last.calls) { slowest = r; }
    }
    return all_still ? slowest : -1;
}

static inline void comm_judge_ranks() {
    std::vector<CommSeen>& seen = comm_state->seen;
    for (int r = 1; r < (int)seen.size(); r++) {
        const std::string gone = comm_gone(seen[r]);
        if (!gone.empty()) { comm_fail(0, comm_say(r, gone)); }
    }
    seen[0].last = comm_message(kCommBeat);
    const int r = comm_slowest(seen);
    if (r < 0) { return; }
    const CommMessage& m = seen[r].last;
    comm_fail(0, comm_say(r, format("makes no progress for %.0f s%s", m.still,
                                    m.waiting ? ", like all others" : "")));
}

// Rank 0 is gone. The last rank prints that, and the others give it time to do so.
__attribute__((noreturn)) static inline void comm_fail_alone(const std::string& what) {
    const CommJob& job = comm_state->job;
    const bool speaks = job.rank == job.world - 1;
    comm_sleep(speaks ? 0.5 : 2);               // mpirun, which sees the death as well, may end this rank
    comm_fail(0, speaks ? comm_say(0, what) : "");
}

static inline void comm_judge_hub() {
    const std::string gone = comm_gone(comm_state->seen[0]);
    if (!gone.empty()) { comm_fail_alone(gone); }
}

// A rank's death may cause an NCCL error. The watchdogs get time to see the death: their message says more.
static inline void comm_ask_health() {
    const std::string text = comm_health ? comm_health() : "";
    if (text.empty()) { return; }
    comm_health = nullptr;
    std::thread([text] {
        comm_sleep(comm_limits.health);
        die("%s", text.c_str());
    }).detach();
}

static inline void comm_watch() {
    CommState* s = comm_state;
    std::vector<struct pollfd> polled;          // rank 0 has no link to itself: -1, which poll leaves out
    for (const CommPeer& p : s->job.peers) { polled.push_back({p.control, POLLIN, 0}); }
    double beat_at = 0, looked = comm_now();
    while (!s->over) {
        poll(polled.data(), polled.size(), std::min(100, (int)(comm_limits.beat * 500)));
        const double now = comm_now();
        if (now - looked > 3 * comm_limits.beat) {      // this process itself was stopped: nobody is to blame
            for (CommSeen& seen : s->seen) { seen.heard = now; }
            s->since = now;
        }
        looked = now;
        // Rank 0 may block on printing (less, Ctrl-S). That is no failure.
        struct pollfd out = {STDOUT_FILENO, POLLOUT, 0};
        if (s->job.rank == 0 && poll(&out, 1, 0) == 0) { s->since = now; }
        for (size_t i = 0; i < polled.size(); i++) {
            if (polled[i].revents) { comm_receive_control((int)i); }
            if (s->seen[i].closed) { polled[i].fd = -1; }
        }
        if (now >= beat_at) {
            beat_at = now + comm_limits.beat;
            comm_send_all(kCommBeat);
            comm_ask_health();
        }
        if (s->job.rank == 0) { comm_judge_ranks(); } else { comm_judge_hub(); }
    }
}
