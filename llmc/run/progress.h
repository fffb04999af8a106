/*
A line at the bottom of a terminal that rewrites itself. Host only.

    progress_start();                                           // all do nothing if stdout is no terminal
    progress_show("step 12/100 " + progress_bar(12, 100, 20));  // replaces the line
    progress_clear();                                           // erases it, before other output (check.h)
*/
#ifndef LLMC_RUN_PROGRESS_H
#define LLMC_RUN_PROGRESS_H

#include <stdlib.h>     // gives: getenv
#include <string.h>     // gives: strcmp
#include <sys/ioctl.h>  // gives: ioctl, TIOCGWINSZ
#include <time.h>       // gives: clock_gettime
#include <unistd.h>     // gives: isatty, write

#include <algorithm>    // gives: std::min
#include <string>       // gives: std::string

#include "../check.h"   // gives: progress_shown, progress_clear

constexpr double kProgressInterval = 0.1;   // seconds between two updates, at least

static bool progress_on = false;
static double progress_drawn_s = 0.0;

static inline void progress_start() {
    const char* term = getenv("TERM");
    progress_on = isatty(STDOUT_FILENO) == 1 && term && strcmp(term, "dumb") != 0;
}

static inline std::string progress_bar(int64_t done, int64_t total, int width) {
    const int64_t full = total > 0 ? (int64_t)((double)width * (double)done / (double)total) : 0;
    const size_t filled = (size_t)std::max((int64_t)0, std::min((int64_t)width, full));
    return "[" + std::string(filled, '#') + std::string((size_t)width - filled, '.') + "]";
}

// Shows ASCII text, cut to the terminal's width: if it wrapped, only its last line could be erased.
static inline void progress_show(const std::string& text) {
    if (!progress_on) { return; }
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const double now_s = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    if (progress_shown && now_s - progress_drawn_s < kProgressInterval) { return; }
    progress_drawn_s = now_s;
    struct winsize size = {};
    const bool known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
    const std::string line = "\r" + text.substr(0, (known ? size.ws_col : 80) - 1u) + "\033[K";
    progress_shown = true;
    if (write(STDOUT_FILENO, line.data(), line.size()) < 0) { progress_on = false; }
}

#endif  // LLMC_RUN_PROGRESS_H
