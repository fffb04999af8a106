/*
Starts the N processes of a job on this machine, as `--gpus N` asks, and waits for them. Host only.

    comm_launch(4, argv);           // never returns: exits with the job's code
    CommChild child;
    if (comm_child(&child)) { ... } // true in a process that a launcher started

A rank is a copy of this program with the same arguments. Its environment holds the loopback port where rank
0 listens, a random job key, and a pipe to the launcher. Rank 0 has the terminal, and the others print nothing
on stdout.

The launcher passes signals on to all ranks, which stop at the same step (comm_any). A rank that gets one
directly stops the job as well. Only the launcher counts requests: SIGQUIT tells the ranks to end at once.

A rank whose error ends the job writes the message into the pipe. When all ranks are gone, the launcher
prints the first one. When a rank has failed, the others get kCommGrace seconds to end by themselves; then the
launcher kills them. If the launcher is killed, the kernel kills the ranks.
*/
#pragma once

#include <sys/prctl.h>      // gives: prctl, PR_SET_PDEATHSIG
#include <sys/random.h>     // gives: getrandom
#include <sys/wait.h>       // gives: waitpid

#include "../errors.h"      // gives: die, format
#include "../host_cores.h"  // gives: share_cores
#include "net.h"            // gives: comm_listen, comm_now

static const int kCommMaxLocal = 64;            // ranks that one launcher starts
static const double kCommGrace = 5;             // seconds that ranks have to end after one has failed
static double comm_after_s = 20;                // seconds after rank 0 has ended well; tests lower it
static const char kCommChild[] = "LLMC_COMM_CHILD";     // environment: "rank world listener port key errors"

static inline uint64_t comm_random_key() {
    uint64_t key;
    if (getrandom(&key, sizeof(key), 0) != sizeof(key)) { die("no random numbers: %s", strerror(errno)); }
    return key;
}

// ---- in a rank ----

struct CommChild { int rank, world, listener, port; unsigned long long key; int errors; };

// False: no launcher started this process. The variable stays set: die() reads it until comm_start is done.
static inline bool comm_child(CommChild* c) {
    const char* text = getenv(kCommChild);
    return text && sscanf(text, "%d %d %d %d %llx %d", &c->rank, &c->world, &c->listener, &c->port, &c->key,
                          &c->errors) == 6 && fcntl(c->errors, F_GETFD) >= 0;   // else an ancestor was it
}

// Where the error goes that ends a job: the launcher's pipe, if there is one.
static int comm_errors = STDERR_FILENO;
static inline bool comm_launched() { return comm_errors != STDERR_FILENO; }

// Flushes stdout before, unless a stuck thread has locked it or it is a pipe that nobody reads.
static inline void comm_print_error(int rank, const std::string& text) {
    struct pollfd out = {STDOUT_FILENO, POLLOUT, 0};
    if (poll(&out, 1, 1000) == 1 && ftrylockfile(stdout) == 0) {
        fflush(stdout);
        funlockfile(stdout);
    }
    const std::string line = (rank == 0 ? "error: " : format("error: rank %d: ", rank)) + text + "\n";
    if (write(comm_errors, line.data(), line.size()) < 0) {}        // nothing is left to do
}

// ---- the launcher ----

struct CommLaunch {
    std::vector<pid_t> pids;                    // by rank; 0: has ended
    sigset_t awaited, before;                   // signals that the launcher handles; the ranks' first mask
    unsigned passed;                            // a bit for each signal that was passed on
    bool asked;                                 // such a signal has ended a rank: that is no failure
    int code;                                   // exit code of the first rank that failed
    std::string ended;                          // message, if no rank has one
    bool killing;                               // the launcher has begun to kill ranks
};

static inline void comm_signal_all(const CommLaunch& l, int number) {
    for (pid_t pid : l.pids) { if (pid > 0) { kill(pid, number); } }
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
    fcntl(c.errors, F_SETFD, 0);
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
    setenv(kCommChild, format("%d %d %d %d %llx %d", c.rank, c.world, c.listener, c.port, c.key,
                              c.errors).c_str(), 1);
    const pid_t parent = getpid(), pid = fork();
    if (pid == 0) { comm_child_exec(*l, c, parent, argv); }
    const int e = errno;
    unsetenv(kCommChild);                       // this is no rank
    if (pid < 0) {
        comm_signal_all(*l, SIGKILL);
        die("cannot start rank %d: %s", c.rank, strerror(e));
    }
    l->pids[c.rank] = pid;
}

static inline void comm_rank_ended(CommLaunch* l, int rank, int status) {
    const bool by_signal = WIFSIGNALED(status);
    const int code = by_signal ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    const pid_t pid = l->pids[rank];
    l->pids[rank] = 0;
    const bool asked = code > 128 && code < 160 && (l->passed >> (code - 128) & 1);
    // A rank killed by a signal is the cause, even if ranks that noticed its death ended earlier.
    const bool first = l->code == 0 || (by_signal && l->ended.empty() && !l->killing);
    if (code == 0 || l->asked || (!first && !asked)) { return; }
    l->asked = asked;
    l->code = code;
    if (by_signal) {
        l->ended = format("rank %d (pid %d) was ended by signal %d (%s)", rank, (int)pid, WTERMSIG(status),
                          strsignal(WTERMSIG(status)));
    }
}

// A SIGINT after another signal ends the ranks at once.
static inline void comm_pass_on(CommLaunch* l, int number) {
    comm_signal_all(*l, number == SIGINT && l->passed != 0 ? SIGQUIT : number);
    l->passed |= 1u << number;
}

// Passes signals on and waits until the last rank is gone.
static inline void comm_wait_ranks(CommLaunch* l) {
    double kill_at = comm_now() + 1e9;
    for (size_t alive = l->pids.size(); alive > 0;) {
        const double left = std::min(3600.0, std::max(0.0, kill_at - comm_now()));
        const struct timespec wait = {(time_t)left, (long)((left - (double)(time_t)left) * 1e9)};
        const int number = sigtimedwait(&l->awaited, nullptr, &wait);
        if (number > 0 && number != SIGCHLD) { comm_pass_on(l, number); }
        int status;
        for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
            const auto rank = std::find(l->pids.begin(), l->pids.end(), pid);
            if (rank == l->pids.end()) { continue; }
            comm_rank_ended(l, (int)(rank - l->pids.begin()), status);
            alive--;
        }
        if (l->code != 0) { kill_at = std::min(kill_at, comm_now() + kCommGrace); }
        else if (l->pids[0] == 0) { kill_at = std::min(kill_at, comm_now() + comm_after_s); }
        if (comm_now() < kill_at) { continue; }
        for (size_t r = 0; r < l->pids.size() && l->code == 0; r++) {
            if (l->pids[r] == 0) { continue; }
            l->ended = format("rank %zu (pid %d) did not end when rank 0 had", r, (int)l->pids[r]);
            l->code = EXIT_FAILURE;
        }
        l->killing = true;
        comm_signal_all(*l, SIGKILL);           // SIGKILL also ends stopped ranks
        kill_at = comm_now() + 1;
    }
}

__attribute__((noreturn)) static inline void comm_launch(int world, char** argv) {
    assert(world <= kCommMaxLocal);
    CommLaunch l = {std::vector<pid_t>(world, 0), {}, {}, 0, false, 0, "", false};
    int errors[2];                              // O_DIRECT: a read returns what one write wrote
    if (pipe2(errors, O_CLOEXEC | O_DIRECT | O_NONBLOCK) != 0) {
        die("cannot prepare %d ranks: %s", world, strerror(errno));
    }
    CommChild child = {0, world, -1, 0, comm_random_key(), errors[1]};
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
    char first[PIPE_BUF];                       // error of the ranks
    const ssize_t bytes = read(errors[0], first, sizeof(first));
    if (bytes > 0 && !l.asked) { fprintf(stderr, "%.*s", (int)bytes, first); }
    else if (!l.ended.empty() && !l.asked) { fprintf(stderr, "error: %s\n", l.ended.c_str()); }
    _exit(l.code);                              // the launcher has nothing left to print
}
