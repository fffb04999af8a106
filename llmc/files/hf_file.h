/*
Reads a model as Hugging Face's transformers save it: model.safetensors with config.json beside it. Plain
GPT-2 only. Host only.

    if (hf_is(path)) {
        const Config config = hf_read_config(path, table);      // dies if the model is not GPT-2
        hf_read(path, table, config, [&](int i, int l, const float* values) { ... });   // each tensor, layer
    }

`table` gives the tensors of a model, and their names in these files (ParamTable in layout.h).
*/
#pragma once

#include "../check.h"               // gives: die, format, shown
#include "../facts.h"               // gives: facts_find
#include "../model/layout.h"        // gives: ParamSpec, ParamTable
#include "../model/model_config.h"  // gives: Config, config_error, check_same_model
#include "../numbers.h"             // gives: parse_int, parse_double
#include "json.h"                   // gives: json_file_read
#include "safetensors.h"            // gives: SafeTensors, safetensors_open

constexpr const char *kHfHead = "lm_head.weight", *kHfEmbedding = "wte.weight";

static inline bool ends_with(const std::string& text, const std::string& end) {
    return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}
static inline bool hf_is(const char* path) { return ends_with(path, ".safetensors"); }

static inline std::string hf_name(const ParamSpec& s, int l) {
    const std::string layer = s.where == Where::Block ? format("h.%d.", l) : "";
    return "transformer." + layer + s.hf;
}

// Hugging Face's linear layers are (in,out), ours (out,in).
static inline bool hf_transposed(const ParamSpec& s) {
    return s.kind == Kind::Matrix && s.where == Where::Block;
}

// Reads the config.json beside the weights; dies if it does not describe plain GPT-2. A missing key means the
// default of transformers, which is `allowed`.
static inline Config hf_read_json(const std::string& weights, bool* tied) {
    const std::string path = weights.substr(0, weights.rfind('/') + 1) + "config.json";
    if (file_size(path.c_str()) < 0) {
        die("'%s' has no config.json beside it, which says how many heads the model has",
            shown(weights.c_str()).c_str());
    }
    Facts values;
    const std::string error = json_file_read(path, &values);
    if (!error.empty()) { die("'%s' %s", path.c_str(), error.c_str()); }
    const struct { const char *key, *allowed, *another; } plain[] = {
        {"model_type", "gpt2", ""}, {"activation_function", "gelu_new", "gelu_pytorch_tanh"},
        {"layer_norm_epsilon", "1e-05", ""}, {"scale_attn_weights", "true", ""},
        {"scale_attn_by_inverse_layer_idx", "false", ""}, {"reorder_and_upcast_attn", "false", ""},
        {"add_cross_attention", "false", ""}, {"quantization_config", "null", ""}};
    auto number_of = [](const std::string& text) {
        double x;
        return parse_double(text, &x) ? x : NAN;
    };
    for (const auto& value : values) {
        for (const auto& p : plain) {
            if (value.first.substr(0, value.first.find('.')) != p.key || value.second == p.allowed ||
                value.second == p.another || number_of(value.second) == number_of(p.allowed)) { continue; }
            die("'%s': %s is %s; GPT-2 has %s, nothing else is built", path.c_str(), value.first.c_str(),
                value.second.c_str(), p.allowed);
        }
    }
    auto number = [&](const char* key) {
        const std::string* text = facts_find(values, key);
        int64_t n = 0;
        if (!text || !parse_int(*text, &n)) {
            die("'%s' lacks a whole number for %s", path.c_str(), key);
        }
        return (int)std::max<int64_t>(-1, std::min<int64_t>(n, INT_MAX));
    };
    Config c = {};
    c.maxT = number("n_positions"), c.V = number("vocab_size"), c.L = number("n_layer");
    c.NH = number("n_head"), c.C = number("n_embd");
    const std::string* inner = facts_find(values, "n_inner");
    const std::string* tie = facts_find(values, "tie_word_embeddings");
    if (inner && *inner != "null" && *inner != format("%lld", 4LL * c.C)) {
        die("'%s': n_inner is %s; GPT-2 has 4 x n_embd, %lld", path.c_str(), inner->c_str(), 4LL * c.C);
    }
    *tied = !tie || *tie == "true";
    c.Vp = padded_vocab(c.V);
    const std::string wrong = config_error(c);
    if (!wrong.empty()) { die("'%s': %s", path.c_str(), wrong.c_str()); }
    return c;
}

// Opens the file and checks that it has each tensor of the table in its shape, as floats, and no others. Adds
// "transformer." to names without it and ignores attention's masks, because the original GPT-2 files need it.
static inline Config hf_open(SafeTensors* file, const char* path, ParamTable table) {
    const std::string error = safetensors_open(file, path);
    if (!error.empty()) { die("'%s' %s", path, error.c_str()); }
    std::map<std::string, SafeTensor> tensors;
    for (const auto& t : file->tensors) {
        if (ends_with(t.first, ".attn.bias") || ends_with(t.first, ".attn.masked_bias")) { continue; }
        const bool whole = t.first.compare(0, 12, "transformer.") == 0 || t.first == kHfHead;
        const std::string name = whole ? t.first : "transformer." + t.first;
        if (!tensors.insert({name, t.second}).second) { die("'%s' has %s twice", path, name.c_str()); }
    }
    file->tensors = tensors;
    bool tied;
    const Config c = hf_read_json(path, &tied);
    auto take = [&](const std::string& name, const std::vector<int64_t>& shape) {
        const auto found = tensors.find(name);
        if (found == tensors.end()) {
            die("'%s' lacks the tensor %s\n"
                "hint: save_pretrained of transformers makes one file of several", path, name.c_str());
        }
        const SafeTensor& t = found->second;
        if (safetensors_bytes(t.dtype) == 0) {
            die("'%s': %s is of type %s; F32, F16 and BF16 are read", path, name.c_str(), t.dtype.c_str());
        }
        if (t.shape != shape) {
            die("'%s': %s has the shape %s, config.json means %s", path, name.c_str(),
                safetensors_shape(t.shape).c_str(), safetensors_shape(shape).c_str());
        }
        tensors.erase(found);
    };
    for (const ParamSpec& s : table(c)) {
        std::vector<int64_t> shape = {(int64_t)s.elems};
        if (s.kind == Kind::Matrix) { shape = {(int64_t)s.live_rows, (int64_t)s.cols}; }
        if (hf_transposed(s)) { std::swap(shape[0], shape[1]); }
        for (int l = 0; l < s.copies; l++) { take(hf_name(s, l), shape); }
    }
    if (!tied || tensors.count(kHfHead) > 0) { take(kHfHead, {c.V, c.C}); }
    if (!tensors.empty()) {
        die("'%s' has %s, which a GPT-2 of %d layers has not", path, tensors.begin()->first.c_str(), c.L);
    }
    return c;
}

static inline Config hf_read_config(const char* path, ParamTable table) {
    SafeTensors file;
    const Config c = hf_open(&file, path, table);
    safetensors_close(&file);
    return c;
}

// to: (rows,cols); from: (cols,rows).
static inline void hf_transpose(float* to, const float* from, size_t rows, size_t cols) {
    #pragma omp parallel for
    for (size_t row = 0; row < rows; row++) {
        for (size_t col = 0; col < cols; col++) { to[row * cols + col] = from[col * rows + row]; }
    }
}

// Each tensor and layer as floats. expected: the result of hf_read_config.
static inline void hf_read(const char* path, ParamTable table, const Config& expected,
                           const std::function<void(int i, int l, const float* values)>& on_tensor) {
    SafeTensors file;
    check_same_model(hf_open(&file, path, table), expected, path);
    std::vector<float> stored, values;
    auto read = [&](const std::string& name) {
        const SafeTensor& t = file.tensors.at(name);
        stored.resize((size_t)t.count);
        safetensors_read(&file, t, stored.data());
    };
    const std::vector<ParamSpec> specs = table(expected);
    for (int i = 0; i < (int)specs.size(); i++) {
        const ParamSpec& s = specs[(size_t)i];
        for (int l = 0; l < s.copies; l++) {
            read(hf_name(s, l));
            values.assign(s.elems, 0.0f);                   // rows of padding stay 0
            if (hf_transposed(s)) { hf_transpose(values.data(), stored.data(), s.rows, s.cols); }
            else { std::copy(stored.begin(), stored.end(), values.begin()); }
            on_tensor(i, l, values.data());
        }
        if (strcmp(s.hf, kHfEmbedding) != 0 || file.tensors.count(kHfHead) == 0) { continue; }
        read(kHfHead);
        if (memcmp(stored.data(), values.data(), stored.size() * sizeof(float)) != 0) {
            die("'%s': %s differs from wte.weight; GPT-2's head is its embedding", path, kHfHead);
        }
    }
    safetensors_close(&file);
}
