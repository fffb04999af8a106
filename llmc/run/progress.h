/*
Two lines at the bottom of a terminal that rewrite themselves. Host only.

    progress_start();                                           // all do nothing if stdout is no terminal
    progress_show("step 12/100 " + progress_bar(12, 100, 20), "loss 3.2");      // replaces the lines
    progress_clear();                                           // erases them, before other output (check.h)
*/
#ifndef LLMC_RUN_PROGRESS_H
#define LLMC_RUN_PROGRESS_H

#include <stdlib.h>     // gives: getenv
#include <string.h>     // gives: strcmp
#include <unistd.h>     // gives: isatty, write

#include <algorithm>    // gives: std::min, std::max
#include <string>       // gives: std::string

#include "../check.h"   // gives: progress_shown, progress_clear, terminal_columns
#include "../comm/net.h"    // gives: comm_now

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

// Shows two lines, cut to the terminal's width: if they wrapped, too little would be erased.
static inline void progress_show(const std::string& first, const std::string& second) {
    const double now = comm_now();
    if (!progress_on || (progress_shown && now - progress_drawn_s < kProgressInterval)) { return; }
    progress_drawn_s = now;
    const size_t most = terminal_columns(80) - 1;
    const std::string text = (progress_shown ? "\r\033[A" : "\r") + first.substr(0, most) +
                             "\033[K\n" + second.substr(0, most) + "\033[K";
    progress_shown = true;
    if (write(STDOUT_FILENO, text.data(), text.size()) < 0) { progress_on = false; }
}

#endif  // LLMC_RUN_PROGRESS_H
