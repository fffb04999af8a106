/*
How a run is asked to stop, and how all ranks agree that they do. Host only.

    catch_signals();
    while (step < steps && !stop_agreed(step)) { ... }      // all ranks call it at the same places
    save(step);
    if (!stop_requested) { stdout_check(); }                // else its reader may be gone

SIGINT, SIGTERM, SIGHUP, SIGUSR1 (which schedulers send before the end) and SIGPIPE (nobody reads stdout, and
from then on it is not needed) stop a training run. The loop looks at the request between micro-steps,
validation batches and generated tokens. A step that is not complete is dropped without an update, because a
grace period may be shorter than a step. A checkpoint of the last complete one is saved, and nothing is
validated or sampled any more. A second SIGINT does not wait.
*/
#ifndef LLMC_RUN_STOP_H
#define LLMC_RUN_STOP_H

#include <errno.h>      // gives: errno
#include <signal.h>     // gives: sigaction, SIGINT
#include <stdint.h>     // gives: int64_t
#include <string.h>     // gives: strlen
#include <unistd.h>     // gives: write, _exit

#include "../check.h"       // gives: progress_clear, atomic_remove_parts
#include "../comm/comm.h"   // gives: comm_any, comm_progress

static volatile sig_atomic_t stop_requested = 0;
static inline void request_stop(int number) {
    static volatile sig_atomic_t heard = 0;         // a signal that somebody sent
    if (heard && number == SIGINT) {
        atomic_remove_parts();              // of a checkpoint that is being written
        _exit(128 + number);                // what a shell makes of a program that a signal ended
    }
    // A scheduler sends a warning, then its request. Of `trainer | tee`, Ctrl-C ends tee as well: SIGPIPE may
    // come before SIGINT, which is then no second one, and comes again each time something is printed.
    if (heard || (stop_requested && number == SIGPIPE)) { return; }
    stop_requested = 1;
    heard = number != SIGPIPE;
    const char* text = heard ? "stopping after the last complete step; Ctrl-C: at once, unsaved\n"
                             : "nobody reads what is printed: stopping after the last complete step\n";
    const int e = errno;
    progress_clear();
    if (write(STDERR_FILENO, text, strlen(text)) < 0) {}
    errno = e;
}

// Has any rank been told to stop? All ranks ask at the same places and get the same answer.
static bool stopping = false;       // what they got last
static inline bool stop_agreed(int64_t step) {
    comm_progress(step);
    stopping = comm_any(stop_requested != 0);
    return stopping;
}

static inline void catch_signals() {
    struct sigaction action = {};
    action.sa_handler = request_stop;
    action.sa_flags = SA_RESTART;           // a write that the signal meets goes on
    struct sigaction now;
    for (int number : {SIGINT, SIGTERM, SIGUSR1, SIGHUP, SIGPIPE}) {
        const bool ignored = sigaction(number, nullptr, &now) == 0 && now.sa_handler == SIG_IGN;
        const bool kept = ignored && (number == SIGHUP || number == SIGPIPE);       // as nohup wants it
        if (!kept) { sigaction(number, &action, nullptr); }
    }
}

#endif  // LLMC_RUN_STOP_H
