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
once. A launcher's rank counts those that its launcher passes on (comm_signals_counted).
*/
#pragma once

#include "../check.h"       // gives: progress_clear, atomic_remove_parts
#include "../comm/comm.h"   // gives: comm_any, comm_progress, comm_signals_counted

static volatile sig_atomic_t stop_requested = 0;
static bool stop_saves = false;     // there is a folder to save in
static inline void request_stop(int number) {
    static std::atomic<unsigned> heard(0);      // a process's threads may handle two signals at once
    const unsigned count = number == SIGPIPE ? 0 : comm_signals_counted(number);
    if (heard.fetch_add(count) + count > 1 && count > 0 && number == SIGINT) {
        atomic_remove_parts();              // a checkpoint may be half written
        _exit(128 + number);                // a shell's exit code for a program ended by a signal
    }
    // In `trainer | tee`, Ctrl-C ends tee as well, so SIGPIPE may come before the first SIGINT and again with
    // each output. A scheduler may send several signals: only a SIGINT ends the program at once.
    const bool unread = number == SIGPIPE, says = unread ? !stop_requested : comm_claim_stop();
    stop_requested = 1;
    if (!says) { return; }
    const char* text =
        unread ? "nobody reads what is printed: stopping after the last complete step\n"
        : stop_saves ? "stopping and saving; press Ctrl-C again to stop at once, without saving\n"
                     : "stopping; press Ctrl-C again to stop at once\n";
    const int e = errno;
    progress_clear();
    if (write(STDERR_FILENO, text, strlen(text)) < 0) {}
    errno = e;
}

// Has any rank received a signal? All ranks call this at the same places and get the same answer.
static bool stopping = false;       // the last answer
static inline bool stop_agreed(int64_t step) {
    comm_progress(step);
    stopping = comm_any(stop_requested != 0);
    return stopping;
}

static inline void catch_signals(bool saves) {
    stop_saves = saves;
    struct sigaction action = {};
    action.sa_handler = request_stop;
    action.sa_flags = SA_RESTART;           // an interrupted write continues
    struct sigaction now;
    for (int number : {SIGINT, SIGTERM, SIGUSR1, SIGHUP, SIGPIPE}) {
        const bool ignored = sigaction(number, nullptr, &now) == 0 && now.sa_handler == SIG_IGN;
        const bool kept = ignored && (number == SIGHUP || number == SIGPIPE);       // started by nohup
        if (!kept) { sigaction(number, &action, nullptr); }
    }
}
