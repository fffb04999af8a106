/*
Reads a model as Hugging Face's transformers save it: model.safetensors, or the files that a
model.safetensors.index.json names, with config.json beside. Host only. The classes are GPT2LMHeadModel and,
for family Llama, LlamaForCausalLM, Qwen3ForCausalLM and NanoChatForCausalLM.

    if (hf_is(path)) {
        const Config config = hf_read_config(path, table);      // dies if the model is of no such class
        hf_read(path, table, config, [&](int i, int l, const float* values) { ... });   // each tensor, layer
    }

`table` gives the tensors of a model, and GPT-2's names in these files (ParamTable in layout.h).
*/
#pragma once

#include "../check.h"               // gives: die, format, shown
#include "../facts.h"               // gives: facts_find
#include "../model/layout.h"        // gives: ParamSpec, ParamTable
#include "../model/model_config.h"  // gives: Config, config_error, check_same_model
#include "../numbers.h"             // gives: parse_int, parse_double
#include "json.h"                   // gives: json_file_read
#include "safetensors.h"            // gives: SafeTensors, safetensors_open

constexpr const char *kHfEnd = ".safetensors", *kHfIndex = ".safetensors.index.json";
constexpr const char* kHfHead = "lm_head.weight";

static inline bool ends_with(const std::string& text, const std::string& end) {
    return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}
static inline bool hf_is(const char* path) { return ends_with(path, kHfEnd) || ends_with(path, kHfIndex); }

// ---- config.json ----
struct HfClass { const char *type, *name, *activation; };
constexpr HfClass kHfClasses[] = {{"gpt2", "GPT-2", "gelu_new"}, {"llama", "Llama", "silu"},
                                  {"qwen3", "Qwen3", "silu"}, {"nanochat", "NanoChat", "relu2"}};
struct HfModel {
    Config config;
    const char* name;           // of the class
    bool tied;                  // the file need not hold the head
};

static inline Facts hf_read_json(const std::string& path) {
    Facts values;
    const std::string error = json_file_read(path, &values);
    if (!error.empty()) { die("'%s' %s", path.c_str(), error.c_str()); }
    return values;
}

// Dies if a value means another computation than the class has here. A missing key means the default of
// transformers, which is `allowed`.
static inline const HfClass& hf_check_class(const std::string& path, const Facts& values) {
    const std::string* type = facts_find(values, "model_type");
    const HfClass* is = kHfClasses;
    while (type && is < std::end(kHfClasses) && *type != is->type) { is++; }
    if (is == std::end(kHfClasses)) {
        die("'%s': model_type is %s; gpt2, llama, qwen3 and nanochat are built, nothing else", path.c_str(),
            type->c_str());
    }
    const struct { const char *key, *allowed, *another; } plain[] = {
        {"activation_function", is->activation, "gelu_pytorch_tanh"}, {"hidden_act", is->activation, ""},
        {"layer_norm_epsilon", "1e-05", ""}, {"scale_attn_weights", "true", ""},
        {"scale_attn_by_inverse_layer_idx", "false", ""}, {"reorder_and_upcast_attn", "false", ""},
        {"add_cross_attention", "false", ""}, {"quantization_config", "null", ""},
        {"attention_bias", "false", ""}, {"mlp_bias", "false", ""}, {"use_sliding_window", "false", ""},
        {"layer_types", "full_attention", "null"}, {"rope_interleaved", "false", ""},
        {"partial_rotary_factor", "1", ""}, {"rope_parameters.partial_rotary_factor", "1", ""},
        {"rope_parameters.rope_type", "default", ""}, {"rope_scaling.rope_type", "default", ""},
        {"rope_scaling.type", "default", ""}};
    auto number_of = [](const std::string& text) {
        double x;
        return parse_double(text, &x) ? x : NAN;
    };
    for (const auto& value : values) {
        for (const auto& p : plain) {
            const std::string key = p.key;
            const bool named = value.first == key || value.first.compare(0, key.size() + 1, key + ".") == 0;
            if (!named || value.second == p.allowed || value.second == p.another ||
                number_of(value.second) == number_of(p.allowed)) { continue; }
            die("'%s': %s is %s; %s has %s, nothing else is built", path.c_str(), value.first.c_str(),
                value.second.c_str(), is->name, p.allowed);
        }
    }
    return *is;
}

// Reads the config.json beside the weights; dies if it describes no model that is built here.
static inline HfModel hf_read_model(const std::string& weights) {
    const std::string path = weights.substr(0, weights.rfind('/') + 1) + "config.json";
    if (file_size(path.c_str()) < 0) {
        die("'%s' has no config.json beside it, which says how many heads the model has",
            shown(weights.c_str()).c_str());
    }
    const Facts values = hf_read_json(path);
    const HfClass& is = hf_check_class(path, values);
    const std::string type = is.type;
    auto text_of = [&](const char* key) {
        const std::string* text = facts_find(values, key);
        return text && *text != "null" ? text : nullptr;
    };
    auto number = [&](const char* key, int otherwise = -1) {
        const std::string* text = text_of(key);
        int64_t n = 0;
        if (!text && otherwise >= 0) { return otherwise; }
        if (!text || !parse_int(*text, &n)) { die("'%s' lacks a whole number for %s", path.c_str(), key); }
        return (int)std::max<int64_t>(-1, std::min<int64_t>(n, INT_MAX));
    };
    auto real = [&](const char* key, double otherwise) {
        const std::string* text = text_of(key);
        if (text && !parse_double(*text, &otherwise)) {
            die("'%s' lacks a number for %s", path.c_str(), key);
        }
        return (float)otherwise;
    };
    const std::string* tie = facts_find(values, "tie_word_embeddings");
    const bool tied = tie ? *tie == "true" : type == "gpt2";
    Config c = {};
    c.V = number("vocab_size");
    if (type == "gpt2") {
        c.maxT = number("n_positions"), c.L = number("n_layer");
        c.NH = number("n_head"), c.C = number("n_embd");
        const std::string* inner = text_of("n_inner");
        if (inner && *inner != format("%lld", 4LL * c.C)) {
            die("'%s': n_inner is %s; GPT-2 has 4 x n_embd, %lld", path.c_str(), inner->c_str(), 4LL * c.C);
        }
    } else {
        c.family = Family::Llama, c.norm = NormKind::Rms;
        c.maxT = number("max_position_embeddings"), c.L = number("num_hidden_layers");
        c.NH = number("num_attention_heads"), c.C = number("hidden_size");
        const bool nanochat = type == "nanochat", qwen3 = type == "qwen3";
        Config::Shape& s = c.llama;
        // where a Qwen3 lacks these keys, its class has numbers of its own
        const bool lacks_NKV = qwen3 && !facts_find(values, "num_key_value_heads");
        s.NKV = number("num_key_value_heads", lacks_NKV ? 32 : c.NH), s.F = number("intermediate_size");
        s.HS = number("head_dim", qwen3 ? 128 : c.C / std::max(c.NH, 1));
        s.mlp = nanochat ? Mlp::Relu2 : Mlp::SwiGlu;
        s.qk_norm = type != "llama", s.norm_weights = !nanochat, s.embed_norm = nanochat, s.tied = tied;
        s.eps = real("rms_norm_eps", 1e-6);
        s.theta = real("rope_theta", 1e4);
        s.theta = real("rope_parameters.rope_theta", real("rope_scaling.rope_theta", s.theta));
        const std::string* cap = facts_find(values, "final_logit_softcapping");
        s.softcap = nanochat && !(cap && *cap == "null") ? real("final_logit_softcapping", 15.0) : 0.0f;
    }
    c.Vp = padded_vocab(c.V);
    const std::string wrong = config_error(c);
    if (!wrong.empty()) { die("'%s': %s", path.c_str(), wrong.c_str()); }
    return {c, is.name, tied};
}

// ---- tensors ----
// The parts of a tensor of ours that are tensors of theirs, one below the other.
static inline Parts hf_parts(const Config& c, const ParamSpec& s) {
    return c.is_llama() && !s.parts.empty() ? s.parts : Parts{{"", s.live_rows}};
}

static inline bool hf_is_nanochat(const Config& c) { return c.is_llama() && c.llama.mlp == Mlp::Relu2; }

static inline std::string hf_name(const Config& c, const ParamSpec& s, const Part& part, int l) {
    const bool in_layer = s.where == Where::Block;
    if (!c.is_llama()) { return "transformer." + (in_layer ? format("h.%d.", l) : "") + s.hf; }
    if (s.where == Where::Head) { return kHfHead; }
    static const struct { const char *ours, *theirs, *nanochat; } names[] = {       // *: the part's name
        {"wte", "embed_tokens", ""}, {"ln1w", "input_layernorm", ""}, {"qkvw", "self_attn.*_proj", ""},
        {"attprojw", "self_attn.o_proj", ""}, {"ln2w", "post_attention_layernorm", ""},
        {"fcw", "mlp.*_proj", "mlp.fc1"}, {"fcprojw", "mlp.down_proj", "mlp.fc2"}, {"lnfw", "norm", ""},
        {"qnw", "self_attn.q_norm", ""}, {"knw", "self_attn.k_norm", ""}};
    const auto* n = names;
    while (strcmp(n->ours, s.name) != 0) { n++; assert(n < std::end(names)); }
    std::string name = hf_is_nanochat(c) && n->nanochat[0] ? n->nanochat : n->theirs;
    const size_t star = name.find('*');
    if (star != std::string::npos) { name.replace(star, 1, part.name); }
    return "model." + (in_layer ? format("layers.%d.", l) : "") + name + ".weight";
}

// GPT-2's linear layers are (in,out) there, ours (out,in).
static inline bool hf_transposed(const Config& c, const ParamSpec& s) {
    return !c.is_llama() && s.kind == Kind::Matrix && s.where == Where::Block;
}

static inline std::vector<int64_t> hf_shape(const Config& c, const ParamSpec& s, const Part& part) {
    const int64_t rows = (int64_t)part.rows, cols = (int64_t)s.cols;
    if (s.kind != Kind::Matrix) { return {cols}; }
    return hf_transposed(c, s) ? std::vector<int64_t>{cols, rows} : std::vector<int64_t>{rows, cols};
}

// NanoChat turns heads the other way. With the second halves of q's and k's rows negated the products are the
// same, and its norms, which have no weights, do not see the sign.
static inline void hf_turn(float* rows, const Config& c, const ParamSpec& s, const Part& part) {
    if (!hf_is_nanochat(c) || (strcmp(part.name, "q") != 0 && strcmp(part.name, "k") != 0)) { return; }
    const size_t HS = (size_t)c.llama.HS;
    for (size_t k = 0; k < part.rows * s.cols; k++) {
        if (k / s.cols % HS >= HS / 2) { rows[k] = -rows[k]; }
    }
}

// ---- files ----
struct HfTensor { size_t file; SafeTensor at; };
struct HfFiles {
    std::vector<SafeTensors> files;
    std::map<std::string, HfTensor> tensors;        // by the names that transformers save
};

static inline void hf_close(HfFiles* f) {
    for (SafeTensors& file : f->files) { safetensors_close(&file); }
}

static inline std::set<std::string> hf_paths(const std::string& path) {
    if (!ends_with(path, kHfIndex)) { return {path}; }
    std::set<std::string> paths;
    for (const auto& value : hf_read_json(path)) {
        if (value.first.compare(0, 11, "weight_map.") != 0) { continue; }
        if (value.second.find('/') != std::string::npos || !ends_with(value.second, kHfEnd)) {
            die("'%s': '%s' is not the name of a .safetensors beside it", path.c_str(),
                shown(value.second).c_str());
        }
        paths.insert(path.substr(0, path.rfind('/') + 1) + value.second);
    }
    if (paths.empty()) { die("'%s' has no weight_map, which names the tensors' files", path.c_str()); }
    return paths;
}

// Adds the tensors of a file, without what torch.compile and DataParallel put in front of names, and with
// what bare models lack there. Leaves out attention's masks and frequencies, which older programs wrote.
static inline void hf_add_file(HfFiles* f, const std::string& path, const std::string& front) {
    f->files.push_back(SafeTensors());
    const std::string error = safetensors_open(&f->files.back(), path.c_str());
    if (!error.empty()) { die("'%s' %s", path.c_str(), error.c_str()); }
    for (const auto& t : f->files.back().tensors) {
        std::string name = t.first;
        bool ignored = false;
        for (const char* end : {".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"}) {
            ignored = ignored || ends_with(name, end);
        }
        for (const std::string wrapper : {"module.", "_orig_mod.", "module."}) {
            if (name.compare(0, wrapper.size(), wrapper) == 0) { name = name.substr(wrapper.size()); }
        }
        if (name != kHfHead && name.compare(0, front.size(), front) != 0) { name = front + name; }
        if (!ignored && !f->tensors.insert({name, {f->files.size() - 1, t.second}}).second) {
            die("'%s' has %s twice", path.c_str(), name.c_str());
        }
    }
}

// Opens the files and checks that they have each tensor of the table in its shape, as floats, and no others.
static inline HfModel hf_open(HfFiles* f, const char* path, ParamTable table) {
    const std::set<std::string> paths = hf_paths(path);
    const HfModel model = hf_read_model(path);
    const Config& c = model.config;
    for (const std::string& file : paths) { hf_add_file(f, file, c.is_llama() ? "model." : "transformer."); }
    std::map<std::string, HfTensor> left = f->tensors;
    auto take = [&](const std::string& name, const std::vector<int64_t>& shape) {
        const auto found = left.find(name);
        if (found == left.end()) { die("'%s' lacks the tensor %s", path, name.c_str()); }
        const SafeTensor& t = found->second.at;
        if (safetensors_bytes(t.dtype) == 0) {
            die("'%s': %s is of type %s; F32, F16 and BF16 are read", path, name.c_str(), t.dtype.c_str());
        }
        if (t.shape != shape) {
            die("'%s': %s has the shape %s, config.json means %s", path, name.c_str(),
                safetensors_shape(t.shape).c_str(), safetensors_shape(shape).c_str());
        }
        left.erase(found);
    };
    for (const ParamSpec& s : table(c)) {
        for (int l = 0; l < s.copies; l++) {
            for (const Part& part : hf_parts(c, s)) { take(hf_name(c, s, part, l), hf_shape(c, s, part)); }
        }
    }
    if (c.shape().tied && (!model.tied || left.count(kHfHead) > 0)) { take(kHfHead, {c.V, c.C}); }
    if (!left.empty()) {
        die("'%s' has %s, which a %s of %d layers has not", path, left.begin()->first.c_str(), model.name,
            c.L);
    }
    return model;
}

static inline Config hf_read_config(const char* path, ParamTable table) {
    HfFiles files;
    const HfModel model = hf_open(&files, path, table);
    hf_close(&files);
    return model.config;
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
    HfFiles f;
    const HfModel model = hf_open(&f, path, table);
    const Config& c = model.config;
    check_same_model(c, expected, path);
    std::vector<float> stored, values;
    auto read = [&](const std::string& name) {
        const HfTensor& t = f.tensors.at(name);
        stored.resize((size_t)t.at.count);
        safetensors_read(&f.files[t.file], t.at, stored.data());
    };
    const std::vector<ParamSpec> specs = table(c);
    for (int i = 0; i < (int)specs.size(); i++) {
        const ParamSpec& s = specs[(size_t)i];
        for (int l = 0; l < s.copies; l++) {
            values.assign(s.elems, 0.0f);                   // rows of padding stay 0
            float* to = values.data();
            for (const Part& part : hf_parts(c, s)) {
                read(hf_name(c, s, part, l));
                if (hf_transposed(c, s)) { hf_transpose(to, stored.data(), part.rows, s.cols); }
                else { std::copy(stored.begin(), stored.end(), to); }
                hf_turn(to, c, s, part);
                to += part.rows * s.cols;
            }
            on_tensor(i, l, values.data());
        }
        if (strcmp(s.name, "wte") != 0 || !c.shape().tied || f.tensors.count(kHfHead) == 0) { continue; }
        read(kHfHead);
        if (memcmp(stored.data(), values.data(), stored.size() * sizeof(float)) != 0) {
            die("'%s': %s differs from the embedding, which is the head of this %s", path, kHfHead,
                model.name);
        }
    }
    hf_close(&f);
}
