/*
Starts the N processes of a job on this machine, as `--gpus N` asks, and waits for them. Host only.

    comm_launch(4, argv);           // never returns: ends with the job's exit code
    CommChild child;                // in a process that it started
    if (comm_child(&child)) { ... }

A rank is a copy of this program with the same arguments. It inherits its connections to rank 0 and a page of
shared memory, so nothing listens and there is no secret. Rank 0 has the terminal; the others print nothing on
stdout. The launcher does nothing but wait. It passes signals on to rank 0, which is to tell the others
(comm_any), so that all stop at the same step. When a rank fails, the others get kCommGrace seconds to end by
themselves before they are killed. If the launcher is killed, so are they.
*/
#ifndef LLMC_COMM_LAUNCH_H
#define LLMC_COMM_LAUNCH_H

#include <errno.h>          // gives: errno
#include <fcntl.h>          // gives: open, fcntl
#include <poll.h>           // gives: poll
#include <sched.h>          // gives: sched_getaffinity
#include <signal.h>         // gives: sigaction, kill
#include <stdint.h>         // gives: int64_t
#include <stdio.h>          // gives: fprintf
#include <stdlib.h>         // gives: setenv, getenv
#include <string.h>         // gives: strerror, strsignal
#include <sys/mman.h>       // gives: memfd_create, mmap
#include <sys/prctl.h>      // gives: prctl, PR_SET_PDEATHSIG
#include <sys/socket.h>     // gives: socketpair
#include <sys/wait.h>       // gives: waitpid
#include <time.h>           // gives: clock_gettime
#include <unistd.h>         // gives: fork, execve

#include <algorithm>        // gives: std::min
#include <atomic>           // gives: std::atomic
#include <string>           // gives: std::string
#include <vector>           // gives: std::vector

#include "../check.h"       // gives: die, format

static const int kCommMaxLocal = 64;            // ranks that one launcher starts
static const double kCommGrace = 5;             // seconds that ranks have to end after one has failed
static const double kCommAfter = 20;            // and after rank 0 has ended well
static const char kCommChild[] = "LLMC_COMM_CHILD";     // environment: "rank world page control data ..."

// What the ranks of a local job and their launcher share.
struct CommPage {
    std::atomic<int> spoken;                    // the one error message was printed
    std::atomic<unsigned> forwarded;            // a bit for each signal that the launcher has passed on
    std::atomic<int64_t> step[kCommMaxLocal];
};
static_assert(std::atomic<int64_t>::is_always_lock_free, "a lock in shared memory would be another's");

static inline double comm_now() {               // seconds; a machine's sleep does not count
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline CommPage* comm_map_page(int fd) {
    void* p = mmap(nullptr, sizeof(CommPage), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return p == MAP_FAILED ? nullptr : (CommPage*)p;
}

// ---- in a rank ----

struct CommChild { int rank, world, page; std::vector<int> control, data; };    // rank 0: world-1 links

// False: this process is not a launcher's. The variable stays, for die() before comm_start needs it.
static inline bool comm_child(CommChild* child) {
    const char* text = getenv(kCommChild);
    if (!text) { return false; }
    std::vector<int> n;
    for (char* end; *text; text = end) {
        n.push_back((int)strtol(text, &end, 10));
        if (end == text) { return false; }
    }
    const size_t links = n.size() < 3 ? 0 : n[0] == 0 ? n[1] - 1 : 1;
    if (links == 0 || n.size() != 3 + 2 * links) { return false; }
    *child = {n[0], n[1], n[2], {}, {}};
    for (size_t i = 0; i < links; i++) {
        child->control.push_back(n[3 + 2 * i]);
        child->data.push_back(n[4 + 2 * i]);
    }
    return fcntl(child->page, F_GETFD) >= 0;    // else someone else's variable
}

// ---- the launcher ----

static int comm_wake[2];                        // signal handlers write the signal's number here
static inline void comm_on_signal(int number) {
    const int e = errno;
    const unsigned char byte = (unsigned char)number;
    if (write(comm_wake[1], &byte, 1) < 0) { errno = e; }       // full: the launcher wakes anyway
    errno = e;
}

struct CommLaunch {
    std::vector<pid_t> pids;                    // 0: has ended
    std::vector<int> ends;                      // two links for each rank but 0: theirs, then rank 0's
    CommPage* page;
    int page_fd;
    int code;                                   // exit code of the first that failed
    std::string killed;                         // what to say if that one could not, and nobody else did
    bool killing;                               // from now on the launcher itself kills
};

static inline void comm_kill_all(const CommLaunch& l) {
    for (pid_t pid : l.pids) { if (pid > 0) { kill(pid, SIGKILL); } }
}

// Between fork and exec only what a signal handler may call: other threads may hold any lock.
__attribute__((noreturn)) static inline void comm_child_exec(int rank, const std::vector<int>& keep,
                                                             pid_t parent, char** argv, char** env) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) { _exit(EXIT_FAILURE); }       // it is gone already
    setpgid(0, 0);                              // a terminal's Ctrl-C reaches the launcher only
    signal(SIGTTOU, SIG_IGN);                   // printing from the background is all right (stty tostop)
    signal(SIGTTIN, SIG_IGN);
    if (rank > 0) {
        const int null = open("/dev/null", O_RDWR);
        dup2(null, STDIN_FILENO);
        dup2(null, STDOUT_FILENO);
        if (null > STDERR_FILENO) { close(null); }
    }
    for (int fd : keep) { fcntl(fd, F_SETFD, 0); }
    execve("/proc/self/exe", argv, env);
    _exit(127);
}

static inline void comm_start_rank(CommLaunch* l, int rank, char** argv) {
    const int world = (int)l->pids.size();
    std::string text = format("%d %d %d", rank, world, l->page_fd);
    std::vector<int> keep = {l->page_fd};
    for (int r = 1; r < world; r++) {
        if (rank != 0 && rank != r) { continue; }
        for (int link = 0; link < 2; link++) {
            keep.push_back(l->ends[4 * (r - 1) + 2 * link + (rank == 0)]);
            text += format(" %d", keep.back());
        }
    }
    setenv(kCommChild, text.c_str(), 1);
    const pid_t parent = getpid(), pid = fork();
    if (pid == 0) { comm_child_exec(rank, keep, parent, argv, environ); }
    const int e = errno;
    unsetenv(kCommChild);                       // this is no rank
    if (pid < 0) {
        comm_kill_all(*l);
        die("cannot start rank %d: %s", rank, strerror(e));
    }
    l->pids[rank] = pid;
}

static inline void comm_rank_ended(CommLaunch* l, int rank, int status) {
    const bool by_signal = WIFSIGNALED(status);
    const int code = by_signal ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    const pid_t pid = l->pids[rank];
    l->pids[rank] = 0;
    // Who was killed failed before those that saw it, in whatever order they are gone.
    const bool first = l->code == 0 || (by_signal && l->killed.empty() && !l->killing);
    if (code == 0 || !first) { return; }
    l->code = code;
    // What a signal of the user's ended is no failure to speak of. The witnesses of rank 0's death wait for
    // this word.
    if (code > 128 && code < 160 && (l->page->forwarded >> (code - 128) & 1)) { l->page->spoken = 1; }
    if (by_signal) {
        l->killed = format("rank %d (pid %d) was ended by signal %d (%s)", rank, (int)pid, WTERMSIG(status),
                           strsignal(WTERMSIG(status)));
    }
}

// Until the last rank is gone.
static inline void comm_wait_ranks(CommLaunch* l) {
    double kill_at = 0;
    size_t alive = l->pids.size();
    while (alive > 0) {
        struct pollfd p = {comm_wake[0], POLLIN, 0};
        const double left = kill_at - comm_now();
        poll(&p, 1, kill_at == 0 ? -1 : left > 0 ? (int)(left * 1e3) + 1 : 0);
        for (unsigned char number; read(comm_wake[0], &number, 1) == 1;) {
            if (number == SIGCHLD) { continue; }
            l->page->forwarded |= 1u << number;
            if (l->pids[0] > 0) { kill(l->pids[0], number); }
        }
        int status;
        for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
            for (size_t r = 0; r < l->pids.size(); r++) {
                if (l->pids[r] != pid) { continue; }
                comm_rank_ended(l, (int)r, status);
                alive--;
            }
        }
        if (kill_at == 0 && l->code != 0) { kill_at = comm_now() + kCommGrace; }
        if (kill_at == 0 && l->pids[0] == 0) { kill_at = comm_now() + kCommAfter; }
        if (l->code != 0) { kill_at = std::min(kill_at, comm_now() + kCommGrace); }
        if (kill_at == 0 || comm_now() < kill_at) { continue; }
        for (size_t r = 0; r < l->pids.size() && l->code == 0; r++) {
            if (l->pids[r] == 0) { continue; }
            l->killed = format("rank %zu (pid %d) did not end when rank 0 had", r, (int)l->pids[r]);
            l->code = EXIT_FAILURE;
        }
        l->killing = true;
        comm_kill_all(*l);                      // SIGKILL ends those that are stopped, too
        kill_at = comm_now() + 1;
    }
}

__attribute__((noreturn)) static inline void comm_launch(int world, char** argv) {
    CommLaunch l = {std::vector<pid_t>(world, 0), std::vector<int>(4 * (world - 1)), nullptr, -1, 0, "",
                    false};
    if (world > kCommMaxLocal) { die("--gpus %d: at most %d", world, kCommMaxLocal); }
    l.page_fd = memfd_create("job", MFD_CLOEXEC);
    if (l.page_fd >= 0 && ftruncate(l.page_fd, sizeof(CommPage)) == 0) { l.page = comm_map_page(l.page_fd); }
    bool fine = l.page && pipe2(comm_wake, O_CLOEXEC | O_NONBLOCK) == 0;
    for (size_t i = 0; i < l.ends.size() && fine; i += 2) {
        fine = socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, &l.ends[i]) == 0;
    }
    if (!fine) { die("cannot prepare %d ranks: %s", world, strerror(errno)); }
    for (auto& step : l.page->step) { step = -1; }

    for (int number : {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2}) {
        struct sigaction action = {}, before;
        action.sa_handler = comm_on_signal;
        action.sa_flags = SA_RESTART;
        sigaction(number, nullptr, &before);
        if (number != SIGCHLD && before.sa_handler == SIG_IGN) { continue; }    // nohup: stays so everywhere
        sigaction(number, &action, nullptr);
    }
    // All ranks together use this machine's cores once.
    cpu_set_t cores;
    const int count = sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 1;
    setenv("OMP_NUM_THREADS", std::to_string(std::max(1, count / world)).c_str(), 0);
    fflush(stdout);
    for (int r = 0; r < world; r++) { comm_start_rank(&l, r, argv); }
    for (int fd : l.ends) { close(fd); }
    comm_wait_ranks(&l);
    if (!l.killed.empty() && l.page->spoken.exchange(1) == 0) {
        fprintf(stderr, "error: %s\n", l.killed.c_str());
    }
    _exit(l.code);                              // the ranks have printed all there is; nothing here waits
}

#endif  // LLMC_COMM_LAUNCH_H
