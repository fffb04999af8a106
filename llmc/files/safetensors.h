/*
Reads safetensors, the files of Hugging Face's models. Host only.

A file is the length of a table (8 bytes, little-endian), the table in JSON, {name: {"dtype": "F32", "shape":
[2,3], "data_offsets": [0,24]}, ...}, and the tensors' bytes, where offset 0 is. Every number in the table is
checked against the file's size before memory is allocated for it.

    SafeTensors file;
    std::string error = safetensors_open(&file, "model.safetensors");       // "": no error
    const SafeTensor& wte = file.tensors.at("wte.weight");
    safetensors_read(&file, wte, values);                   // as floats; values: (wte.count)
    safetensors_close(&file);
*/
#pragma once

#include "../check.h"   // gives: format, fopen_check, fread_check, file_size
#include "../numbers.h" // gives: parse_int
#include "../rand.h"    // gives: bf16_to_float, half_to_float
#include "json.h"       // gives: json_read

struct SafeTensor {
    std::string dtype;                          // "F32", "F16" and "BF16" can be read
    std::vector<int64_t> shape, offsets;
    int64_t count = 0;                          // elements; 0 also if the dtype cannot be read
};
struct SafeTensors {
    FILE* f = nullptr;
    std::string path;
    int64_t start = 0;                          // byte where the tensors' data begin
    std::map<std::string, SafeTensor> tensors;  // by name
};

constexpr int64_t kSafeTable = 1 << 20;         // bytes of the longest table; a tensor takes about 120

static inline int safetensors_bytes(const std::string& dtype) {         // of an element; 0: not supported
    return dtype == "F32" ? 4 : dtype == "F16" || dtype == "BF16" ? 2 : 0;
}

static inline std::string safetensors_shape(const std::vector<int64_t>& shape) {        // "(2, 3)"
    std::string text;
    for (int64_t n : shape) { text += format(text.empty() ? "%lld" : ", %lld", (long long)n); }
    return "(" + text + ")";
}

// Parses the table, whose values have names like "wte.weight.dtype" and "wte.weight.shape.0". False: it is
// malformed.
static inline bool safetensors_table(SafeTensors* s, const std::string& text) {
    Facts values;
    if (!json_read(text, &values).empty()) { return false; }
    for (const auto& value : values) {
        if (value.first.compare(0, 13, "__metadata__.") == 0) { continue; }
        size_t dot = value.first.rfind('.');
        int64_t n;
        const bool in_list = dot != std::string::npos && parse_int(value.first.substr(dot + 1), &n);
        const int64_t place = in_list ? n : 0;
        const std::string member = value.first.substr(0, in_list ? dot : std::string::npos);
        dot = member.rfind('.');
        if (dot == std::string::npos) { return false; }
        SafeTensor& t = s->tensors[member.substr(0, dot)];
        const std::string what = member.substr(dot + 1);
        if (what == "dtype" && !in_list) { t.dtype = value.second; continue; }
        if (!in_list || !parse_int(value.second, &n) || n < 0) { return false; }
        if (what != "shape" && what != "data_offsets") { return false; }
        std::vector<int64_t>& list = what == "shape" ? t.shape : t.offsets;
        if (place != (int64_t)list.size()) { return false; }    // an object's members "1" and "0"
        list.push_back(n);
    }
    for (const auto& named : s->tensors) {
        const std::vector<int64_t>& offsets = named.second.offsets;
        if (named.second.dtype.empty() || offsets.size() != 2 || offsets[0] > offsets[1]) { return false; }
    }
    return !s->tensors.empty();
}

// Counts the elements. False if their bytes do not fill the space between the offsets. bytes: of all tensors.
static inline bool safetensors_check(SafeTensor* t, int64_t bytes) {
    const int64_t size = safetensors_bytes(t->dtype);
    if (size == 0) { return true; }
    t->count = 1;
    for (int64_t n : t->shape) {
        if (n > 0 && t->count > bytes / n) { return false; }
        t->count *= n;
    }
    return t->count * size == t->offsets[1] - t->offsets[0];
}

// The tensors must fill bytes 0 to `end`, one behind the other: two that share bytes would both be read.
// Counts their elements. Returns the error, or "".
static inline std::string safetensors_places(SafeTensors* s, int64_t end) {
    std::vector<std::pair<std::vector<int64_t>, std::string>> places;       // offsets, name
    for (const auto& named : s->tensors) { places.push_back({named.second.offsets, named.first}); }
    std::sort(places.begin(), places.end());
    int64_t at = 0;
    for (const auto& p : places) {
        const int64_t from = p.first[0];
        if (from != at) {
            return format("is damaged: %s begins at byte %lld of the tensors, and those before it end at "
                          "%lld", p.second.c_str(), (long long)from, (long long)at);
        }
        if (!safetensors_check(&s->tensors[p.second], end)) {
            return format("is damaged: the place of %s does not fit its shape", p.second.c_str());
        }
        at = p.first[1];
    }
    return "";
}

// Returns the error, to be printed behind the file's name, or "".
static inline std::string safetensors_open(SafeTensors* s, const char* path) {
    *s = SafeTensors();
    s->path = path;
    s->f = fopen_check(path, "rb");
    const int64_t size = file_size(path);
    int64_t length = 0;
    if (size >= 8) { fread_check(&length, 8, 1, s->f, path); }
    if (size < 8 || length < 0 || length > size - 8) {
        return format("is no safetensors file, or a truncated one: %lld bytes", (long long)size);
    }
    if (length > kSafeTable) {
        return format("has a table of %lld bytes; %lld are the most that is read", (long long)length,
                      (long long)kSafeTable);
    }
    std::string text((size_t)length, '\0');
    fread_check(&text[0], 1, text.size(), s->f, path);
    if (!safetensors_table(s, text)) {
        return "is no safetensors file: its table of tensors cannot be read";
    }
    s->start = 8 + length;
    int64_t end = 0;
    for (auto& named : s->tensors) { end = std::max(end, named.second.offsets[1]); }
    if (end != size - s->start) {
        return format("is truncated or damaged: %lld bytes of tensors, its table means %lld",
                      (long long)(size - s->start), (long long)end);
    }
    return safetensors_places(s, end);
}

static inline void safetensors_close(SafeTensors* s) {
    if (s->f) { fclose(s->f); }
    s->f = nullptr;
}

static inline void safetensors_read(SafeTensors* s, const SafeTensor& t, float* to /*(count)*/) {
    const char* path = s->path.c_str();
    if (fseeko(s->f, (off_t)(s->start + t.offsets[0]), SEEK_SET) != 0) {
        die("cannot read '%s': %s", path, strerror(errno));
    }
    if (t.dtype == "F32") { fread_check(to, sizeof(float), (size_t)t.count, s->f, path); return; }
    std::vector<uint16_t> raw((size_t)t.count);
    fread_check(raw.data(), sizeof(uint16_t), raw.size(), s->f, path);
    const bool is_bf16 = t.dtype == "BF16";
    for (size_t i = 0; i < raw.size(); i++) {
        to[i] = is_bf16 ? bf16_to_float(raw[i]) : half_to_float(raw[i]);
    }
}
