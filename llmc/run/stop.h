/*
Signals that stop a run, and the agreement of all ranks to stop. Host only.

    catch_signals(true);                                    // the run has a folder, to save in
    while (step < steps && !stop_agreed(step)) { ... }      // all ranks call it at the same places
    save(step);
    if (!stop_requested) { stdout_check(); }                // after SIGPIPE nobody reads stdout

SIGINT, SIGTERM, SIGHUP, SIGUSR1 (which schedulers send before the end) and SIGPIPE (nobody reads stdout) stop
a training run. The loop looks at stop_requested between micro-steps, validation batches and generated tokens.
It drops an incomplete step without an update, because a grace period may be shorter than a step. It saves a
checkpoint of the last complete step and neither validates nor samples. A second SIGINT ends the program at
once. A launcher counts for its ranks, and ends them with SIGQUIT (llmc/comm/launch.h).
*/
#pragma once

#include "../atomic_files.h" // gives: progress_clear, atomic_remove_parts
#include "../comm/comm.h"   // gives: comm_any, comm_launched, comm_progress

static volatile sig_atomic_t stop_requested = 0;
static bool stop_saves = false;     // there is a folder to save in
static inline void stop_print(const char* text) {
    const int e = errno;
    progress_clear();
    if (write(STDERR_FILENO, text, strlen(text)) < 0) {}
    errno = e;
}

// Of the ranks of a launcher only rank 0 says that the run stops.
static inline void stop_say() {
    static std::atomic<bool> said(false);
    if ((comm_launched() && comm.rank != 0) || said.exchange(true)) { return; }
    stop_print(stop_saves ? "stopping and saving; press Ctrl-C again to stop at once, without saving\n"
                          : "stopping; press Ctrl-C again to stop at once\n");
}

static inline void request_stop(int number) {
    static std::atomic<bool> heard(false);  // a process's threads may handle two signals at once
    // In `trainer | tee`, Ctrl-C ends tee as well, so SIGPIPE may come before the first SIGINT and again with
    // each output. A scheduler may send several signals: only a SIGINT ends the program at once.
    const bool unread = number == SIGPIPE, again = !unread && heard.exchange(true);
    if (number == SIGQUIT || (number == SIGINT && again && !comm_launched())) {
        atomic_remove_parts();              // a checkpoint may be half written
        _exit(128 + SIGINT);                // a shell's exit code for a program ended by Ctrl-C
    }
    if (!unread) { stop_say(); }
    else if (!stop_requested) {
        stop_print("nobody reads what is printed: stopping after the last complete step\n");
    }
    stop_requested = 1;
}

// Has any rank received a signal? All ranks call this at the same places and get the same answer.
static bool stopping = false;       // the last answer
static inline bool stop_agreed(int64_t step) {
    comm_progress(step);
    stopping = comm_any(stop_requested != 0);
    if (stopping && !stop_requested && comm.rank == 0) { stop_say(); }
    return stopping;
}

static inline void catch_signals(bool saves) {
    stop_saves = saves;
    struct sigaction action = {};
    action.sa_handler = request_stop;
    action.sa_flags = SA_RESTART;           // an interrupted write continues
    struct sigaction now;
    if (comm_launched()) { sigaction(SIGQUIT, &action, nullptr); }
    for (int number : {SIGINT, SIGTERM, SIGUSR1, SIGHUP, SIGPIPE}) {
        const bool ignored = sigaction(number, nullptr, &now) == 0 && now.sa_handler == SIG_IGN;
        const bool kept = ignored && (number == SIGHUP || number == SIGPIPE);       // started by nohup
        if (!kept) { sigaction(number, &action, nullptr); }
    }
}
