/*
Texts and numbers for JSON written by printf, and a reader of such JSON. Host only.

    fprintf(f, "{%s: %s}\n", json_quote("loss").c_str(), json_number(loss).c_str());

    Facts values;
    std::string error = json_read(text, &values);       // of {"program": "a", "settings": {"lr": 0.1}}:
    for (auto& v : values) { ... }                      // {"program", "a"}, {"settings.lr", "0.1"}
*/
#pragma once

#include "../checked_files.h" // gives: format, file_text, utf8_decode
#include "../facts.h"   // gives: Facts
#include "../numbers.h" // gives: is_number

// Bytes that are not UTF-8 become \udcXX, which Python turns back into these bytes in a file name.
static inline std::string json_quote(const std::string& text) {
    std::string out = "\"";
    for (size_t i = 0, width; i < text.size(); i += width) {
        const unsigned char byte = (unsigned char)text[i];
        const int32_t c = utf8_decode((const uint8_t*)&text[i], text.size() - i, &width);
        if (c < 0) { out += format("\\udc%02x", byte); }
        else if (c < 0x20 || c == 0x7F) { out += format("\\u%04x", byte); }
        else { out += (c == '"' || c == '\\' ? "\\" : "") + text.substr(i, width); }
    }
    return out + "\"";
}

// inf and NaN become null. 9 digits determine a float.
static inline std::string json_number(double x) { return isfinite(x) ? format("%.9g", x) : "null"; }

// ---- reading ----
// Reads an object: the settings of a run, a table of tensors. The values in its objects and lists have dotted
// names, "settings.lr" or "shape.0". Names that come twice are refused.

struct JsonReader {
    const std::string& text;
    size_t at;
    Facts* values;
    std::set<std::string> names;        // of all values so far
};
constexpr int kJsonDepth = 8;           // objects and lists in each other
constexpr size_t kJsonName = 256;       // bytes of the longest dotted name
constexpr size_t kJsonValues = 1 << 16; // the most of a text

static inline void json_blanks(JsonReader* r) {
    while (r->at < r->text.size() && strchr(" \t\r\n", r->text[r->at]) && r->text[r->at]) { r->at++; }
}

// If `what` comes next, skips it and returns true.
static inline bool json_next(JsonReader* r, const char* what) {
    json_blanks(r);
    const size_t n = strlen(what);
    if (r->text.compare(r->at, n, what) != 0) { return false; }
    r->at += n;
    return true;
}

static inline bool json_hex4(JsonReader* r, unsigned* code) {
    *code = 0;
    for (int k = 0; k < 4; k++, r->at++) {
        const char* digits = "0123456789abcdef";
        const int c = r->at < r->text.size() ? tolower((unsigned char)r->text[r->at]) : 0;
        const char* digit = c ? strchr(digits, c) : nullptr;
        if (!digit) { return false; }
        *code = *code << 4 | (unsigned)(digit - digits);
    }
    return true;
}

// Appends the character behind \u as UTF-8. Two surrogates are one character; \udcXX alone is a byte.
static inline bool json_read_code(JsonReader* r, std::string* out) {
    unsigned code, low;
    if (!json_hex4(r, &code) || code == 0) { return false; }        // no written text holds a zero
    if (code >= 0xDC80 && code <= 0xDCFF) { *out += (char)(code & 0xFF); return true; }
    if (code >= 0xD800 && code <= 0xDBFF) {
        if (r->text.compare(r->at, 2, "\\u") != 0) { return false; }
        r->at += 2;
        if (!json_hex4(r, &low) || low < 0xDC00 || low > 0xDFFF) { return false; }
        code = 0x10000 + ((code - 0xD800) << 10 | (low - 0xDC00));
    } else if (code >= 0xDC00 && code <= 0xDFFF) { return false; }
    const int more = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    const unsigned marks[] = {0, 0xC0, 0xE0, 0xF0};
    *out += (char)(marks[more] | code >> (6 * more));
    for (int k = more - 1; k >= 0; k--) { *out += (char)(0x80 | (code >> (6 * k) & 0x3F)); }
    return true;
}

static inline bool json_read_text(JsonReader* r, std::string* out) {
    if (!json_next(r, "\"")) { return false; }
    out->clear();
    while (r->at < r->text.size()) {
        const char c = r->text[r->at++];
        if (c == '"') { return true; }
        if ((unsigned char)c < 0x20) { return false; }
        if (c != '\\') { *out += c; continue; }
        const char* const kinds = "\"\\/bfnrt";
        const char kind = r->at < r->text.size() ? r->text[r->at++] : '\0';
        const char* found = kind ? strchr(kinds, kind) : nullptr;
        if (found) { *out += "\"\\/\b\f\n\r\t"[found - kinds]; }
        else if (kind != 'u' || !json_read_code(r, out)) { return false; }
    }
    return false;
}

static inline bool json_read_number(JsonReader* r, std::string* out) {
    const size_t end = std::min(r->text.find_first_not_of("+-.0123456789eE", r->at), r->text.size());
    *out = r->text.substr(r->at, end - r->at);
    const size_t point = out->find('.');                // unlike is_number, JSON wants digits on both sides
    auto is_digit = [&](size_t i) { return i < out->size() && isdigit((unsigned char)(*out)[i]); };
    const bool bare = point != std::string::npos && !(is_digit(point - 1) && is_digit(point + 1));
    if (bare || !is_number(*out)) { return false; }
    r->at = end;
    return true;
}

static inline bool json_read_members(JsonReader* r, const std::string& path, int depth, bool is_list);

static inline bool json_read_value(JsonReader* r, const std::string& name, int depth) {
    if (name.size() > kJsonName || !r->names.insert(name).second) { return false; }
    json_blanks(r);
    const char c = r->at < r->text.size() ? r->text[r->at] : '\0';
    if (c == '{' || c == '[') { return json_read_members(r, name + ".", depth + 1, c == '['); }
    std::string value;
    for (const char* word : {"true", "false", "null"}) {
        if (value.empty() && json_next(r, word)) { value = word; }
    }
    const bool known = !value.empty() || (c == '"' ? json_read_text(r, &value) : json_read_number(r, &value));
    r->values->push_back({name, value});
    return known && r->values->size() <= kJsonValues;
}

// An object's values, or a list's, whose names are 0, 1, ...
static inline bool json_read_members(JsonReader* r, const std::string& path, int depth, bool is_list) {
    const char* const end = is_list ? "]" : "}";
    if (depth > kJsonDepth || !json_next(r, is_list ? "[" : "{")) { return false; }
    if (json_next(r, end)) { return true; }
    int count = 0;
    do {
        std::string name = std::to_string(count++);
        if (!is_list && !(json_read_text(r, &name) && json_next(r, ":"))) { return false; }
        if (!json_read_value(r, path + name, depth)) { return false; }
    } while (json_next(r, ","));
    return json_next(r, end);
}

// Returns the error, or "".
static inline std::string json_read(const std::string& text, Facts* values) {
    JsonReader r = {text, 0, values, {}};
    values->clear();
    if (json_read_members(&r, "", 1, false)) {
        json_blanks(&r);
        if (r.at == text.size()) { return ""; }
    }
    return format("is not a JSON object that can be read here, from byte %zu on", r.at);
}

// Reads a file of at most 1 MB. Returns the error, to be printed behind its name, or "".
static inline std::string json_file_read(const std::string& path, Facts* values) {
    return json_read(file_text(path, 1 << 20), values);
}
