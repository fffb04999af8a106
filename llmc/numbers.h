/*
Division that rounds up; numbers in text, wherever a user or a file spells one.

    int64_t n;
    if (!parse_int(text, text + strlen(text), &n)) { die("'%s' is no whole number", text); }

A whole number is 0, or digits that do not begin with 0, perhaps behind a minus. Another number may also have
a point, with digits on at least one side of it, and an exponent: .5 5. 1e-4 2.5E+8. Nothing else is a number:
no plus or blanks in front, no 007, no hexadecimal, no inf or nan, nothing too large for 64 bits or a double.
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

// The whole number that [begin, end) spells. False if it spells none, or one of more than 64 bits.
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
    auto digits = [&] {                         // how many come next
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

// The number that [begin, end) spells. False if it spells none, or one that no double can hold.
static inline bool parse_double(const char* begin, const char* end, double* value) {
    if (!is_number(begin, end)) { return false; }
    errno = 0;
    *value = strtod(std::string(begin, end).c_str(), nullptr);
    return errno == 0;
}

// What to write instead of 1e5 or 100.0 where only a whole number will do; "" if there is nothing to propose.
static inline std::string parse_int_hint(const std::string& text) {
    double x;
    bool exact = parse_double(text.data(), text.data() + text.size(), &x) && fabs(x) < 9e15 && x == floor(x);
    return exact ? format("write it in digits only: %.0f", x) : "";
}

#endif  // LLMC_NUMBERS_H
