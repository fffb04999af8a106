/*
Errors, and texts from outside in messages. Host only.

Every error a user can cause ends in die(). It prints one sentence on stderr with the value and what is
allowed, then "hint: " and what to do, and exits with code 1.

    die("-b %d: at most %d\nhint: -b %d", B, most, most);
    die_if(config_error(config));                   // "": no error
    printf("%s\n", shown(path).c_str());            // escapes control characters

A program that includes this header also ends in die() when memory runs out or a file hits ulimit -f.
*/
#pragma once

// What headers want of the C library, POSIX and the standard library. Those that include this one do not name
// these again.
#include <assert.h>     // gives: assert
#include <ctype.h>      // gives: isalnum, isdigit, tolower
#include <dirent.h>     // gives: opendir, readdir
#include <errno.h>      // gives: errno
#include <fcntl.h>      // gives: open, fcntl
#include <limits.h>     // gives: INT_MIN, INT_MAX, PATH_MAX
#include <math.h>       // gives: isfinite, exp, INFINITY
#include <signal.h>     // gives: sigaction, raise
#include <stdarg.h>     // gives: va_list
#include <stddef.h>     // gives: size_t
#include <stdint.h>     // gives: int64_t
#include <stdio.h>      // gives: FILE, fprintf
#include <stdlib.h>     // gives: exit, getenv
#include <string.h>     // gives: strerror, memcpy
#include <sys/file.h>   // gives: flock
#include <sys/ioctl.h>  // gives: ioctl, TIOCGWINSZ
#include <sys/resource.h>   // gives: setrlimit
#include <sys/stat.h>   // gives: stat, mkdir
#include <unistd.h>     // gives: fsync, pread, unlink, isatty

#include <algorithm>    // gives: std::sort, std::min
#include <atomic>       // gives: std::atomic
#include <chrono>       // gives: std::chrono::seconds
#include <fstream>      // gives: std::ifstream
#include <functional>   // gives: std::function
#include <map>          // gives: std::map, std::multimap
#include <mutex>        // gives: std::mutex, std::timed_mutex
#include <new>          // gives: std::set_new_handler
#include <set>          // gives: std::set
#include <string>       // gives: std::string
#include <thread>       // gives: std::thread
#include <utility>      // gives: std::pair, std::swap
#include <vector>       // gives: std::vector

static inline std::string vformat(const char* fmt, va_list args) {
    va_list again;
    va_copy(again, args);
    std::string s((size_t)vsnprintf(nullptr, 0, fmt, args), '\0');
    vsnprintf(&s[0], s.size() + 1, fmt, again);
    va_end(again);
    return s;
}

__attribute__((format(printf, 1, 2))) static inline std::string format(const char* fmt, ...) {
    va_list args;
    va_start(args, fmt);
    const std::string s = vformat(fmt, args);
    va_end(args);
    return s;
}

// The code point at s[0], its bytes in *width. If no well-formed UTF-8 sequence begins there: -1 and width 1.
// len >= 1.
static inline int32_t utf8_decode(const uint8_t* s, size_t len, size_t* width) {
    uint32_t lead = s[0];
    *width = 1;
    if (lead < 0x80) { return (int32_t)lead; }
    size_t n = lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
    if (n == 0 || n > len) { return -1; }
    uint32_t cp = lead & (0x7Fu >> n);
    for (size_t i = 1; i < n; i++) {
        if ((s[i] & 0xC0) != 0x80) { return -1; }
        cp = cp << 6 | (s[i] & 0x3Fu);
    }
    bool overlong = (n == 3 && cp < 0x800) || (n == 4 && cp < 0x10000);
    if (overlong || (cp >= 0xD800 && cp < 0xE000) || cp > 0x10FFFF) { return -1; }
    *width = n;
    return (int32_t)cp;
}

// Escapes control characters (C0, DEL, C1) in a path or another text from outside, as \n, \x1b and so on:
// printed raw, they could move the cursor, colour the terminal or forge lines. kept: those that may stay.
static inline std::string shown(const std::string& text, const std::string& kept = "") {
    std::string out;
    for (size_t i = 0, width; i < text.size(); i += width) {
        const int32_t c = utf8_decode((const uint8_t*)&text[i], text.size() - i, &width);
        const bool is_control = (c >= 0 && c < 0x20) || (c >= 0x7F && c < 0xA0);
        if (!is_control || kept.find(text[i]) != std::string::npos) { out += text.substr(i, width); }
        else if (c == '\n') { out += "\\n"; }
        else { out += format(c < 0x80 ? "\\x%02x" : "\\u%04x", (unsigned)c); }
    }
    return out;
}

// The same for a message: only "\nhint: " begins a new line.
static inline std::string shown_message(const std::string& text) {
    const std::string hint = "\nhint: ";
    const size_t at = text.rfind(hint);
    const std::string line = shown(text.substr(0, at));
    return at == std::string::npos ? line : line + hint + shown(text.substr(at + hint.size()));
}

// Prints a model's or a user's text on stdout. A pipe or a file gets its bytes; a terminal gets newlines and
// tabs, and other control characters escaped.
static inline void print_text(const std::string& text) {
    const std::string out = isatty(STDOUT_FILENO) ? shown(text, "\n\t") : text;
    fwrite(out.data(), 1, out.size(), stdout);
}

// The width of the terminal that stdout is; `otherwise` if it is none.
static inline size_t terminal_columns(size_t otherwise) {
    struct winsize size = {};
    const bool known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
    return known ? size.ws_col : otherwise;
}

// run/progress.h may show two lines on the terminal that rewrite themselves. Other code that prints, in any
// thread or signal handler, erases them first.
static std::atomic<bool> progress_shown(false);
static inline void progress_clear() {
    if (!progress_shown.exchange(false)) { return; }
    const int e = errno;
    if (write(STDOUT_FILENO, "\r\033[A\033[J", 7) < 0) { errno = e; }    // a line up; erase all from there on
}

// Runs before die() exits. Set once, at start.
static void (*die_hook)() = nullptr;
// In a job of several processes, one of them prints the message for all. comm/ sets this function to pass the
// message on. It returns false if die() shall print the message as usual.
static bool (*die_report)(const char* text) = nullptr;
// A fuzzer (dev/fuzz) continues after an error: it throws from here.
static void (*die_throw)(const char* text) = nullptr;
// Removes unfinished files. atomic_files.h sets it.
static void (*die_unfinished)() = nullptr;

// Only the first thread that calls this prints and exits. Other threads wait here until the process is gone.
__attribute__((noreturn)) static inline void die_now(const char* text) {
    if (die_throw) { die_throw(text); }
    static std::atomic<bool> dying(false);
    static thread_local bool mine = false;
    if (mine) { _exit(EXIT_FAILURE); }          // a second error, while exiting
    if (dying.exchange(true)) { for (;;) { pause(); } }
    mine = true;
    progress_clear();
    if (!die_report || !die_report(text)) {
        fflush(stdout);                         // earlier output appears before the error
        fprintf(stderr, "error: %s\n", text);
    }
    if (die_unfinished) { die_unfinished(); }
    if (die_hook) { die_hook(); }
    if (gettid() != getpid()) { _exit(EXIT_FAILURE); }      // exit() would tear down what main still uses
    exit(EXIT_FAILURE);
}

__attribute__((noreturn, format(printf, 1, 2))) static inline void die(const char* fmt, ...) {
    va_list args;
    va_start(args, fmt);
    const std::string text = shown_message(vformat(fmt, args));
    va_end(args);
    die_now(text.c_str());
}
static inline void die_if(const std::string& error) {      // "": no error
    if (!error.empty()) { die("%s", error.c_str()); }
}

// Out of memory and SIGXFSZ would end a program without a message.
static struct SilentEnds {
    SilentEnds() {
        std::set_new_handler([] {
            die_now("out of memory\nhint: give the program more of it, or less to do: smaller batches or "
                    "models when training, fewer threads when tokenizing");
        });
        signal(SIGXFSZ, SIG_IGN);               // at the limit of ulimit -f, the write now fails instead
    }
} silent_ends [[maybe_unused]];
