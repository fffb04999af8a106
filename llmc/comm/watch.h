/*
If one rank of a job fails, all ranks end: one message for the whole job, exit code 1. Host only.

    comm_state = state;                             // llmc/comm/comm.h does this when all ranks are there
    state->watchdog = std::thread(comm_watch);
    comm_progress(step);                            // the main thread calls this in each step
    comm_patience(600);                             // allows 600 s until the next comm_progress

Each rank has a watchdog thread. It sends a heartbeat over the control link every second, with the step and
whether the main thread makes progress. Rank 0 watches all, the others watch rank 0. A rank that dies, is
stopped, stands still or calls die() ends the whole job, and rank 0 prints the reason. If rank 0 itself fails,
the last rank prints it: in a job of several hosts, it is on another host. Each rank ends itself. A stopped
rank ends when it continues, unless its launcher has killed it.
*/
#pragma once

#include <tuple>            // gives: std::make_tuple

#include "../check.h"       // gives: die_report, format
#include "launch.h"          // gives: CommPage, comm_child
#include "net.h"            // gives: CommJob, comm_wait_fd
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
    double still = 20;              // without progress, or still_factor times the longest step if longer
    double still_factor = 10;
    double first = 600;             // for the first step: loading, compiling, warming up
    double health = 2;              // an NCCL error waits for news of a rank's death, which says more
    double abort = 3;               // for comm_abort and printing
} comm_limits;

// ---- state of a started job ----

enum : int64_t { kCommBeat = 1, kCommBye, kCommError, kCommEnd };

// All messages on control links have this size: nothing is allocated.
struct CommMessage {
    int64_t word, step;
    uint64_t progress, calls;       // comm_progress and collectives so far
    double still;                   // seconds without progress; 0 while within the limit
    int64_t waiting;                // 1: the main thread waits for other ranks
    char text[1200];                // the error's message
};

struct CommSeen {                   // a peer as the watchdog sees it; rank 0's own entry has only `last`
    double heard = 0;
    bool closed = false, bye = false;
    CommMessage last = {kCommBeat, -1, 0, 0, 0, 0, ""};
};

// Never freed: threads may use it until the process is gone.
struct CommState {
    CommJob job;
    std::vector<CommSeen> seen;     // like job.peers
    std::thread watchdog;
    std::mutex sending;             // held while a message is sent on a control link
    int wake = -1;                  // eventfd that wakes the watchdog to look at `over`
    std::atomic<bool> over{false};  // set by comm_end
    std::atomic<int> byes{0};
    std::atomic<int64_t> step{-1};
    std::atomic<uint64_t> progress{0}, calls{0};
    std::atomic<int> waiting{0};
    std::atomic<double> since{0}, allowed{0};   // time of the last progress; seconds allowed after it
    std::atomic<bool> patient{false};
    double longest = 0;             // longest time between two comm_progress
    int64_t first_step = 0;
};
static CommState* comm_state = nullptr;         // null in a process that was started alone
static std::atomic<int> comm_spoken{0};         // replaces page->spoken in a job without a launcher

// Returns true once: the caller that gets it prints the job's error message.
static inline bool comm_claim() {
    CommPage* page = comm_state ? comm_state->job.page : nullptr;
    return (page ? page->spoken : comm_spoken).exchange(1) == 0;
}

// How often a signal of this number counts when its handler runs. A rank of a launcher counts only what the
// launcher has passed on: who signals all processes of a job signals both. The kernel may merge the two
// signals, so the launcher counts, and the sender does not matter.
static inline unsigned comm_signals_counted(int number) {
    CommPage* page = comm_state ? comm_state->job.page : nullptr;
    if (!page) { return 1; }
    return comm_state->job.rank == 0 ? page->uncounted[number].exchange(0) : 0;
}

// Returns true once in a launcher's job, or in a process: the caller that gets it says that the run stops.
static inline bool comm_claim_stop() {
    static std::atomic<int> said(0);
    CommPage* page = comm_state ? comm_state->job.page : nullptr;
    return (page ? page->stopping : said).exchange(1) == 0;
}

// While a CommWait lives, the main thread waits for other ranks and is not blamed for a standstill.
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
    if (s->progress++ == 0) { s->first_step = step; }
    // The first step may call this several times. No interval between calls bounds its longest part.
    s->allowed = step <= s->first_step ? comm_limits.first
                                       : std::max(comm_limits.still, comm_limits.still_factor * s->longest);
}

static inline void comm_patience(double seconds) {
    CommState* s = comm_state;
    if (!s) { return; }
    s->patient = true;
    s->allowed = std::max(s->allowed.load(), comm_now() - s->since + seconds);
}

// A stalled disk must not end the job. While a DiskWait lives, its rank may wait for files; they may nest.
constexpr double kDiskPatience = 3600;          // seconds for a group of tensors
struct DiskWait {
    inline static int depth = 0;
    const int64_t step;
    explicit DiskWait(int64_t step) : step(step) {
        depth++;
        comm_progress(step);
        comm_patience(kDiskPatience);
    }
    ~DiskWait() {
        comm_progress(step);
        if (--depth > 0) { comm_patience(kDiskPatience); }
    }
};

// ---- the end ----

static inline CommMessage comm_message(int64_t word) {
    const CommState* s = comm_state;
    const double still = comm_now() - s->since;
    return {word, s->step, s->progress, s->calls, still > s->allowed ? still : 0, s->waiting > 0, ""};
}

static inline void comm_send(int peer, int64_t word, const std::string& text = "") {
    CommState* s = comm_state;
    CommMessage m = comm_message(word);
    snprintf(m.text, sizeof(m.text), "%s", text.c_str());
    std::lock_guard<std::mutex> lock(s->sending);
    // The socket's buffer holds minutes of messages, so a full buffer means that the peer hangs.
    send(s->job.peers[peer].control, &m, sizeof(m), MSG_NOSIGNAL | MSG_DONTWAIT);
}

// Ends the process after this time, even if the calling thread hangs.
static inline void comm_end_within(double seconds) {
    try {
        std::thread([seconds] { usleep((useconds_t)(seconds * 1e6)); _exit(EXIT_FAILURE); }).detach();
    } catch (...) {}                            // no thread could be started
}

// Flushes stdout, unless a stuck thread has locked it or it is a pipe that nobody reads.
static inline void comm_flush() {
    struct pollfd p = {STDOUT_FILENO, POLLOUT, 0};
    if (poll(&p, 1, 1000) == 1 && ftrylockfile(stdout) == 0) {
        fflush(stdout);
        funlockfile(stdout);
    }
}

// Waits until the peers have closed their ends, a second at most. Closing a socket with unread data would
// reset the connection, and the peer might lose our last message.
static inline void comm_drain() {
    const double limit = comm_now() + 1;
    for (const CommPeer& p : comm_state->job.peers) {
        char rest[4096];
        if (p.control < 0) { continue; }
        shutdown(p.control, SHUT_WR);
        while (comm_wait_fd(p.control, POLLIN, limit) && recv(p.control, rest, sizeof(rest), 0) > 0) {}
    }
}

// Ends this rank after a failure, from any thread. text is printed if no rank has printed an error; "" never.
__attribute__((noreturn)) static inline void comm_fail(const std::string& text) {
    static std::atomic<bool> failing(false);
    CommState* s = comm_state;
    if (failing.exchange(true)) { for (;;) { pause(); } }
    comm_end_within(comm_limits.abort);
    comm_flush();
    progress_clear();
    if (!text.empty() && comm_claim()) { fprintf(stderr, "error: %s\n", text.c_str()); }
    for (size_t i = 0; i < s->job.peers.size(); i++) {
        if (s->job.peers[i].control >= 0) { comm_send((int)i, kCommEnd); }
    }
    atomic_remove_parts();
    if (comm_abort) { comm_abort(); }
    comm_drain();
    atomic_last_parts();                        // another thread may just have begun to save
    _exit(EXIT_FAILURE);
}

// die_report after comm_start, in any thread: rank 0 prints for all.
static inline bool comm_report(const char* text) {
    CommState* s = comm_state;
    const std::string named = s->job.rank == 0 ? text : format("rank %d: %s", s->job.rank, text);
    if (s->over) {                              // the other ranks may be gone
        if (!comm_claim()) { return true; }
        fflush(stdout);
        fprintf(stderr, "error: %s\n", named.c_str());
        return true;
    }
    if (s->job.rank != 0) {
        comm_send(0, kCommError, named);
        atomic_remove_parts();
        usleep((useconds_t)(comm_limits.abort * 1e6));      // our watchdog ends us at rank 0's kCommEnd
    }
    comm_fail(named);
}

// die_report before comm_start is done. Often all ranks fail for one reason, so the others give rank 0 time
// to print it, and a scheduler time to end them.
static inline bool comm_report_early(const char* text) {
    CommChild child;
    const bool local = comm_child(&child);
    const int rank = local ? child.rank : comm_early_rank >= 0 ? comm_early_rank : comm_foreign().rank;
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

static inline std::string comm_say(int rank, const std::string& what) {
    const CommState* s = comm_state;
    const bool hub = s->job.rank == 0;
    const CommHello& h = s->job.peers[hub ? rank : 0].who;
    int64_t step = s->seen[hub ? rank : 0].last.step;
    if (s->job.page) { step = s->job.page->step[rank]; }
    const std::string last = step < 0 ? "it had not begun its first step"
                                      : format("its last step was %lld", (long long)step);
    return format("rank %d (%s, pid %lld) %s; %s", rank, shown(h.host).c_str(), (long long)h.pid,
                  what.c_str(), last.c_str());
}

// Reads all waiting messages of a peer, without blocking.
static inline void comm_receive_control(int peer) {
    CommState* s = comm_state;
    CommSeen& seen = s->seen[peer];
    const int fd = s->job.peers[peer].control;
    CommMessage m;
    ssize_t n;
    while ((n = recv(fd, &m, sizeof(m), MSG_PEEK | MSG_DONTWAIT)) == sizeof(m)) {
        comm_read(fd, &m, sizeof(m));
        m.text[sizeof(m.text) - 1] = '\0';
        seen.heard = comm_now();
        seen.last = m;
        if (m.word == kCommBye && !seen.bye) { seen.bye = true; s->byes++; }
        if (m.word == kCommError) { comm_fail(shown_message(m.text)); }
        if (m.word == kCommEnd) { comm_fail(""); }
    }
    seen.closed = n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
}

static inline std::string comm_silent() {
    return format("is stopped or unreachable: no sign of life for %.0f s", comm_limits.silence);
}

// Returns the rank that holds up the others, or -1. It has made the least progress of all ranks that do not
// wait, or of all ranks if all wait. While this rank is within its limit, none is blamed: rank 0 may write a
// long sample while ranks with less progress wait for it.
static inline int comm_slowest() {
    CommState* s = comm_state;
    int slowest = -1;
    for (int r = 0; r < s->job.world; r++) {
        if (s->seen[r].bye) { continue; }
        const CommMessage &m = s->seen[r].last, &w = s->seen[slowest < 0 ? r : slowest].last;
        auto key = [](const CommMessage& k) {
            return std::make_tuple(k.waiting, k.progress, k.calls, k.still == 0 ? 0 : 1);
        };
        if (slowest < 0 || key(m) < key(w)) { slowest = r; }
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
        comm_fail(comm_say(r, comm_silent()));
    }
    // Heartbeats are up to a beat old, so a suspect must stay the slowest for 2.5 beats.
    static int suspect = -1;
    static double suspect_since;
    const int r = comm_slowest();
    if (r != suspect) { suspect = r; suspect_since = now; }
    if (r < 0 || now - suspect_since < 2.5 * comm_limits.beat) { return; }
    comm_fail(comm_say(r, format("makes no progress for %.0f s", s->seen[r].last.still)));
}

// Watches rank 0. If it is gone, the last rank prints that, and the others give it time to do so.
static inline void comm_judge_hub() {
    CommState* s = comm_state;
    static double gone_since;
    CommSeen& hub = s->seen[0];
    const double now = comm_now();
    const bool silent = now - hub.heard > comm_limits.silence;
    if (hub.bye || (!hub.closed && !silent)) { gone_since = 0; return; }
    if (gone_since == 0) { gone_since = now; }
    // If a signal that the launcher passed on has ended rank 0, the launcher sets page->spoken. It gets time
    // for that, and mpirun gets time to end this rank.
    const bool speaks = s->job.rank == s->job.world - 1;
    const double first = s->job.page && s->job.page->forwarded ? 0.6 * kCommGrace : 0.3;
    if (now - gone_since < first + (speaks ? 0 : 1.2)) { return; }
    comm_fail(speaks || s->job.page ? comm_say(0, hub.closed ? "died" : comm_silent()) : "");
}

// A rank's death may cause an NCCL error. The watchdogs get time to see the death: their message says more.
static inline void comm_ask_health() {
    static double sick_since;
    static std::string text;
    const double now = comm_now();
    if (comm_health && text.empty()) {
        text = comm_health();
        sick_since = now;
    }
    if (text.empty() || now - sick_since < comm_limits.health) { return; }
    sick_since = now + 1e9;
    std::thread([] { die("%s", text.c_str()); }).detach();
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
        // Rank 0 may block on printing (less, Ctrl-S). That is no failure.
        struct pollfd out = {STDOUT_FILENO, POLLOUT, 0};
        if (me == 0 && poll(&out, 1, 0) == 0) { s->since = now; }
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
        s->seen[0].last = comm_message(kCommBeat);
        comm_judge_ranks();
    }
}
