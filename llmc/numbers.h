/*
Division that rounds up, and numbers in texts of users and files.

    int64_t n;
    if (!parse_int(text, &n)) { die("'%s' is no whole number", text); }

A whole number is 0, or digits that do not begin with 0, with or without a minus. A double may also have a
point, with digits on at least one side, and an exponent: .5 5. 1e-4 2.5E+8. Everything else is refused: a
plus or blanks in front, 007, hexadecimal, inf, nan, and values too large for 64 bits or a double.
*/
#pragma once

#include <charconv>     // gives: std::from_chars

#include "errors.h"     // gives: format
#include "rand.h"       // gives: LLMC_HD

template <class Int> LLMC_HD constexpr Int ceil_div(Int a, Int b) { return (a + b - 1) / b; }
template <class Int> constexpr Int round_up(Int a, Int b) { return ceil_div(a, b) * b; }
constexpr bool is_power_of_two(int64_t n) { return n > 0 && (n & (n - 1)) == 0; }
constexpr int64_t kLargestCount = 1000000000000000;     // of steps, tokens, samples

static inline std::string bytes_text(size_t bytes) {
    const double MiB = 1048576.0, GiB = 1073741824.0;
    return bytes >= GiB ? format("%.2f GiB", bytes / GiB) : format("%.2f MiB", bytes / MiB);
}

// Parses a whole number. False if the text is none, or it needs more than 64 bits.
static inline bool parse_int(const std::string& text, int64_t* value) {
    const char* end = text.data() + text.size();
    const bool zero_first = text[text[0] == '-'] == '0' && text.size() > 1;
    const auto read = std::from_chars(text.data(), end, *value);
    return read.ec == std::errc() && read.ptr == end && !zero_first;
}

// strtod decides, but it takes more: blanks, a plus, zeros in front, hexadecimal numbers, inf and nan.
static inline bool is_number(const std::string& text) {
    const char* digits = text.c_str() + (text[0] == '-');
    const bool zeros_first = digits[0] == '0' && digits[1] >= '0' && digits[1] <= '9';
    const bool plain = text[0] != '+' && text.find_first_not_of("0123456789.eE+-") == std::string::npos;
    char* end;
    strtod(text.c_str(), &end);
    return plain && !zeros_first && !text.empty() && end == text.c_str() + text.size();
}

// Parses a number. False if the text is none, or no double can hold it.
static inline bool parse_double(const std::string& text, double* value) {
    if (!is_number(text)) { return false; }
    errno = 0;
    *value = strtod(text.c_str(), nullptr);
    return errno == 0;
}

// For 1e5 or 100.0 where a whole number is needed: a hint how to spell it. "" if the text is no whole number.
static inline std::string parse_int_hint(const std::string& text) {
    double x;
    bool exact = parse_double(text, &x) && fabs(x) < 9e15 && x == floor(x);
    return exact ? format("write it in digits only: %.0f", x) : "";
}
