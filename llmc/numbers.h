/*
Division that rounds up, and numbers in texts of users and files.

    int64_t n;
    if (!parse_int(text, text + strlen(text), &n)) { die("'%s' is no whole number", text); }

A whole number is 0, or digits that do not begin with 0, with or without a minus. A double may also have a
point, with digits on at least one side, and an exponent: .5 5. 1e-4 2.5E+8. Everything else is refused: a
plus or blanks in front, 007, hexadecimal, inf, nan, and values too large for 64 bits or a double.
*/
#ifndef LLMC_NUMBERS_H
#define LLMC_NUMBERS_H

#include <errno.h>      // gives: errno
#include <math.h>       // gives: fabs, floor
#include <stddef.h>     // gives: ptrdiff_t
#include <stdint.h>     // gives: int64_t
#include <stdlib.h>     // gives: strtoll, strtod

#include <string>       // gives: std::string

#include "check.h"      // gives: format

template <class Int> constexpr Int ceil_div(Int a, Int b) { return (a + b - 1) / b; }
template <class Int> constexpr Int round_up(Int a, Int b) { return ceil_div(a, b) * b; }
constexpr int64_t kLargestCount = 1000000000000000;     // of steps, tokens, samples

static inline std::string bytes_text(size_t bytes) {
    const double MiB = 1048576.0, GiB = 1073741824.0;
    return bytes >= GiB ? format("%.2f GiB", bytes / GiB) : format("%.2f MiB", bytes / MiB);
}

// Parses [begin, end) as a whole number. False if it is none, or needs more than 64 bits.
static inline bool parse_int(const char* begin, const char* end, int64_t* value) {
    const char* digits = begin < end && *begin == '-' ? begin + 1 : begin;
    if (digits == end || (*digits == '0' && (end - digits > 1 || digits > begin))) { return false; }
    for (const char* s = digits; s < end; s++) { if (*s < '0' || *s > '9') { return false; } }
    errno = 0;
    *value = strtoll(std::string(begin, end).c_str(), nullptr, 10);
    return errno == 0;
}

static inline bool is_number(const char* begin, const char* end) {
    const char* s = begin;
    auto digits = [&] {                         // skips digits and returns their number
        const char* from = s;
        while (s < end && *s >= '0' && *s <= '9') { s++; }
        return s - from;
    };
    if (s < end && *s == '-') { s++; }
    const bool zero = s < end && *s == '0';
    const ptrdiff_t whole = digits();
    ptrdiff_t fraction = 0;
    if (s < end && *s == '.') { s++; fraction = digits(); }
    if (whole + fraction == 0 || (zero && whole > 1)) { return false; }
    if (s < end && (*s == 'e' || *s == 'E')) {
        s++;
        if (s < end && (*s == '-' || *s == '+')) { s++; }
        if (digits() == 0) { return false; }
    }
    return s == end;
}

// Parses [begin, end) as a number. False if it is none, or no double can hold it.
static inline bool parse_double(const char* begin, const char* end, double* value) {
    if (!is_number(begin, end)) { return false; }
    errno = 0;
    *value = strtod(std::string(begin, end).c_str(), nullptr);
    return errno == 0;
}

// For 1e5 or 100.0 where a whole number is needed: a hint how to spell it. "" if the text is no whole number.
static inline std::string parse_int_hint(const std::string& text) {
    double x;
    bool exact = parse_double(text.data(), text.data() + text.size(), &x) && fabs(x) < 9e15 && x == floor(x);
    return exact ? format("write it in digits only: %.0f", x) : "";
}

#endif  // LLMC_NUMBERS_H
