/*
The two things JSON gets wrong when printf writes it: text and numbers. Host only.

    fprintf(f, "{%s: %s}\n", json_quote("loss").c_str(), json_number(loss).c_str());
*/
#ifndef LLMC_JSON_H
#define LLMC_JSON_H

#include <math.h>       // gives: isfinite

#include <string>       // gives: std::string

#include "check.h"      // gives: format

// Bytes that are not UTF-8 become \udcXX, which Python reads back as the very same file name.
static inline std::string json_quote(const std::string& text) {
    std::string out = "\"";
    for (size_t i = 0; i < text.size();) {
        unsigned char c = (unsigned char)text[i];
        int more = c >= 0xF0 && c <= 0xF4 ? 3 : c >= 0xE0 ? 2 : c >= 0xC2 ? 1 : 0;
        unsigned code = more == 0 ? c : c & (0x3Fu >> more);
        bool valid = c < 0x80 || (more > 0 && c <= 0xF4 && i + (size_t)more < text.size());
        for (int k = 1; valid && k <= more; k++) {
            unsigned char next = (unsigned char)text[i + (size_t)k];
            valid = (next & 0xC0) == 0x80;
            code = code << 6 | (next & 0x3Fu);
        }
        if (more == 2) { valid = valid && code >= 0x800 && (code < 0xD800 || code > 0xDFFF); }
        if (more == 3) { valid = valid && code >= 0x10000 && code <= 0x10FFFF; }
        size_t length = valid ? (size_t)more + 1 : 1;
        if (!valid) { out += format("\\udc%02x", c); }
        else if (c == '"' || c == '\\') { out += '\\'; out += (char)c; }
        else if (c < 0x20 || c == 0x7F) { out += format("\\u%04x", c); }
        else { out += text.substr(i, length); }
        i += length;
    }
    return out + "\"";
}

// JSON has no word for inf and NaN: they become null. 9 digits: every float reads back.
static inline std::string json_number(double x) { return isfinite(x) ? format("%.9g", x) : "null"; }

#endif  // LLMC_JSON_H
