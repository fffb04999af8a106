/*
Starts the N processes of a job on this machine, as `--gpus N` asks, and waits for them. Host only.

    comm_launch(4, argv);           // never returns: exits with the job's code
    CommChild child;
    if (comm_child(&child)) { ... } // true in a process that a launcher started

A rank is a copy of this program with the same arguments. Its environment holds the loopback port where rank 0
listens and a random job key. The ranks share a page of memory. Rank 0 has the terminal, and the others print
nothing on stdout. The launcher only waits and passes signals on to rank 0. Rank 0 tells the other ranks
(comm_any), so that all stop at the same step. A signal to a rank itself stops the job as well, but only what
the launcher passes on counts as a second Ctrl-C (comm_signals_counted). When a rank fails, the others get
kCommGrace seconds to end by themselves; then the launcher kills them. If the launcher is killed, the kernel
kills the ranks.
*/
#pragma once

#include <sys/mman.h>       // gives: memfd_create, mmap
#include <sys/prctl.h>      // gives: prctl, PR_SET_PDEATHSIG
#include <sys/random.h>     // gives: getrandom
#include <sys/wait.h>       // gives: waitpid

#include "../check.h"       // gives: die, format
#include "../host_cores.h"  // gives: share_cores
#include "net.h"            // gives: comm_listen, comm_now, comm_need_files

static const int kCommMaxLocal = 64;            // ranks that one launcher starts
static const double kCommGrace = 5;             // seconds that ranks have to end after one has failed
static double comm_after_s = 20;                // seconds after rank 0 has ended well; tests lower it
static const char kCommChild[] = "LLMC_COMM_CHILD";     // environment: "rank world page listener port key"

// Shared memory of a local job's ranks and their launcher.
struct CommPage {
    std::atomic<int> spoken;                    // 1: the job's error message was printed
    std::atomic<unsigned> forwarded;            // a bit for each signal that the launcher has passed on
    std::atomic<unsigned> uncounted[32];        // by number: passed on, and not yet counted by rank 0
    std::atomic<int> stopping;                  // 1: a rank has said that the run stops
    std::atomic<int64_t> step[kCommMaxLocal];
};
static_assert(std::atomic<int64_t>::is_always_lock_free, "a lock would not be shared between processes");

static inline CommPage* comm_map_page(int fd) {
    void* p = mmap(nullptr, sizeof(CommPage), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return p == MAP_FAILED ? nullptr : (CommPage*)p;
}

static inline uint64_t comm_random_key() {
    uint64_t key;
    if (getrandom(&key, sizeof(key), 0) != sizeof(key)) { die("no random numbers: %s", strerror(errno)); }
    return key;
}

// ---- in a rank ----

struct CommChild { int rank, world, page, listener, port; unsigned long long key; };

// False: no launcher started this process. The variable stays set: die() reads it until comm_start is done.
static inline bool comm_child(CommChild* c) {
    const char* text = getenv(kCommChild);
    return text && sscanf(text, "%d %d %d %d %d %llx", &c->rank, &c->world, &c->page, &c->listener, &c->port,
                          &c->key) == 6 && fcntl(c->page, F_GETFD) >= 0;    // else an ancestor was the rank
}

// ---- the launcher ----

struct CommLaunch {
    std::vector<pid_t> pids;                    // by rank; 0: has ended
    CommPage* page;
    sigset_t awaited, before;                   // signals that the launcher handles; the ranks' first mask
    int code;                                   // exit code of the first rank that failed
    std::string killed;                         // message, if that rank was killed and no rank prints one
    bool killing;                               // the launcher has begun to kill ranks
};

static inline void comm_kill_all(const CommLaunch& l) {
    for (pid_t pid : l.pids) { if (pid > 0) { kill(pid, SIGKILL); } }
}

// Between fork and exec only async-signal-safe calls are allowed: other threads may have held any lock.
__attribute__((noreturn)) static inline void comm_child_exec(const CommLaunch& l, const CommChild& c,
                                                             pid_t parent, char** argv) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) { _exit(EXIT_FAILURE); }       // the launcher ended before the prctl
    setpgid(0, 0);                              // a terminal's Ctrl-C reaches the launcher only
    signal(SIGTTOU, SIG_IGN);                   // printing must not stop a background process (stty tostop)
    signal(SIGTTIN, SIG_IGN);
    sigprocmask(SIG_SETMASK, &l.before, nullptr);
    fcntl(c.page, F_SETFD, 0);
    if (c.rank == 0) { fcntl(c.listener, F_SETFD, 0); }
    else {
        const int null = open("/dev/null", O_RDWR);
        dup2(null, STDIN_FILENO);
        dup2(null, STDOUT_FILENO);
        if (null > STDERR_FILENO) { close(null); }
    }
    execve("/proc/self/exe", argv, environ);
    _exit(127);
}

static inline void comm_start_rank(CommLaunch* l, const CommChild& c, char** argv) {
    setenv(kCommChild, format("%d %d %d %d %d %llx", c.rank, c.world, c.page, c.listener, c.port,
                              c.key).c_str(), 1);
    const pid_t parent = getpid(), pid = fork();
    if (pid == 0) { comm_child_exec(*l, c, parent, argv); }
    const int e = errno;
    unsetenv(kCommChild);                       // this is no rank
    if (pid < 0) {
        comm_kill_all(*l);
        die("cannot start rank %d: %s", c.rank, strerror(e));
    }
    l->pids[c.rank] = pid;
}

static inline void comm_rank_ended(CommLaunch* l, int rank, int status) {
    const bool by_signal = WIFSIGNALED(status);
    const int code = by_signal ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    const pid_t pid = l->pids[rank];
    l->pids[rank] = 0;
    // A rank killed by a signal is the cause, even if ranks that noticed its death ended earlier.
    const bool first = l->code == 0 || (by_signal && l->killed.empty() && !l->killing);
    if (code == 0 || !first) { return; }
    l->code = code;
    // A rank ended by a signal that the launcher passed on is no failure to report. Ranks that saw rank 0 die
    // wait for this flag.
    if (code > 128 && code < 160 && (l->page->forwarded >> (code - 128) & 1)) { l->page->spoken = 1; }
    if (by_signal) {
        l->killed = format("rank %d (pid %d) was ended by signal %d (%s)", rank, (int)pid, WTERMSIG(status),
                           strsignal(WTERMSIG(status)));
    }
}

// Passes signals on and waits until the last rank is gone.
static inline void comm_wait_ranks(CommLaunch* l) {
    double kill_at = 0;
    for (size_t alive = l->pids.size(); alive > 0;) {
        const double left = kill_at == 0 ? 3600 : std::max(0.0, kill_at - comm_now());
        const struct timespec wait = {(time_t)left, (long)((left - (double)(time_t)left) * 1e9)};
        const int number = sigtimedwait(&l->awaited, nullptr, &wait);
        if (number > 0 && number != SIGCHLD) {
            l->page->forwarded |= 1u << number;
            l->page->uncounted[number]++;       // before the kill: rank 0's handler reads it
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
        if (kill_at == 0 && l->pids[0] == 0) { kill_at = comm_now() + comm_after_s; }
        if (l->code != 0) { kill_at = std::min(kill_at, comm_now() + kCommGrace); }
        if (kill_at == 0 || comm_now() < kill_at) { continue; }
        for (size_t r = 0; r < l->pids.size() && l->code == 0; r++) {
            if (l->pids[r] == 0) { continue; }
            l->killed = format("rank %zu (pid %d) did not end when rank 0 had", r, (int)l->pids[r]);
            l->code = EXIT_FAILURE;
        }
        l->killing = true;
        comm_kill_all(*l);                      // SIGKILL also ends stopped ranks
        kill_at = comm_now() + 1;
    }
}

__attribute__((noreturn)) static inline void comm_launch(int world, char** argv) {
    assert(world <= kCommMaxLocal);
    comm_need_files(world);
    CommChild child = {0, world, memfd_create("job", MFD_CLOEXEC), -1, 0, comm_random_key()};
    CommLaunch l = {std::vector<pid_t>(world, 0), nullptr, {}, {}, 0, "", false};
    if (ftruncate(child.page, sizeof(CommPage)) == 0) { l.page = comm_map_page(child.page); }
    if (!l.page) { die("cannot prepare %d ranks: %s", world, strerror(errno)); }
    for (auto& step : l.page->step) { step = -1; }
    child.listener = comm_listen({"127.0.0.1", "0", child.key}, &child.port);

    signal(SIGCHLD, SIG_DFL);
    sigemptyset(&l.awaited);
    for (int number : {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2}) {
        struct sigaction action;
        sigaction(number, nullptr, &action);    // nohup: an ignored signal stays ignored in all ranks
        if (action.sa_handler != SIG_IGN) { sigaddset(&l.awaited, number); }
    }
    sigprocmask(SIG_BLOCK, &l.awaited, &l.before);
    share_cores(world);
    fflush(stdout);
    for (child.rank = 0; child.rank < world; child.rank++) { comm_start_rank(&l, child, argv); }
    close(child.listener);
    comm_wait_ranks(&l);
    if (!l.killed.empty() && l.page->spoken.exchange(1) == 0) {
        fprintf(stderr, "error: %s\n", l.killed.c_str());
    }
    _exit(l.code);                              // the launcher has nothing left to print
}
