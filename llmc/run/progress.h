/*
Two lines at the bottom of a terminal that rewrite themselves. Host only.

    progress_start();                                           // all do nothing if stdout is no terminal
    const std::string loss = "loss 3.2 " + progress_sparkline({5, 4, 3.2});
    progress_show("step 12/100 " + progress_bar(12, 100, 20), loss);            // replaces the lines
    progress_clear();                                           // erases them, before other output (errors.h)
*/
#pragma once

#include "../errors.h"  // gives: progress_shown, progress_clear, terminal_columns
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

// Does the terminal show UTF-8? The first of these variables that is not empty names the character set.
static inline bool progress_utf8() {
    const char* set = nullptr;
    for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) { set = set && *set ? set : getenv(name); }
    return set && (strcasestr(set, "utf-8") || strcasestr(set, "utf8"));
}

// A column for each value: U+2581 for the least to U+2588 for the greatest.
static inline std::string progress_sparkline(const std::vector<double>& values) {
    const auto ends = std::minmax_element(values.begin(), values.end());
    const double least = *ends.first, range = *ends.second - least;
    std::string text;
    for (double x : values) {
        text += std::string("\xE2\x96") + (char)(0x81 + (range > 0 ? (int)(7.999 * (x - least) / range) : 0));
    }
    return text;
}

// The columns that UTF-8 text takes: bytes that go on with a character are 10xxxxxx.
static inline size_t text_columns(const std::string& text) {
    return (size_t)std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; });
}
static inline std::string text_cut(std::string text, size_t columns) {
    while (text_columns(text) > columns) { text.pop_back(); }
    return text;
}

// Shows two lines, cut to the terminal's width: if they wrapped, too little would be erased.
static inline void progress_show(const std::string& first, const std::string& second) {
    const double now = comm_now();
    if (!progress_on || (progress_shown && now - progress_drawn_s < kProgressInterval)) { return; }
    progress_drawn_s = now;
    const size_t most = terminal_columns(80) - 1;
    const std::string text = (progress_shown ? "\r\033[A" : "\r") + text_cut(first, most) +
                             "\033[K\n" + text_cut(second, most) + "\033[K";
    progress_shown = true;
    if (write(STDOUT_FILENO, text.data(), text.size()) < 0) { progress_on = false; }
}
