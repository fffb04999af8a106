/*
A model's file, model_*.bin: 256 int32 header, then the tensors in the table's order, tight. Host only.

    const Config config = model_read_config(path, table);   // dies if the file is no model
    model_read(path, table, config, [&](int i, int l, const float* values) { ... });    // each tensor, layer

    ModelWriter out = model_begin(path, config, true);          // true: bf16
    for (...) { model_write(&out, data, n, "f32"); }            // each tensor and layer, or part, in order
    model_commit(&out);

`table` gives the tensors of a model (ParamTable in layout.h).

Version 3 holds fp32, version 5 bf16 (llm.c's numbers); any build loads both. A model that is not GPT-2 has
version 103 or 105, so that nobody loads it as GPT-2. Two more words of its header name its block and norm.
One of family Llama has 203 or 205, and its shape in words 10 to 18; with biases of q, k and v, with scaled
positions or value embeddings 303 or 305, and numbers of its shape also in words 52 to 55. Windows add 1000
to any: word 19 is Config::window, and words 20 to 51 are the pattern's letters, a byte each, zeros behind.
The version also stands for the meaning of the ops: another GELU or another epsilon needs new versions,
because the tensors look the same.

The last two words of the header are a checksum of the file; other programs leave them 0. The word before them
is 1 in files of earlier programs that kept the residual stream in fp32. The stream's type only rounds the
same function differently, so such a file is read, with a note. Word 252 is Config::chat.
*/
#pragma once

#include "../atomic_files.h"        // gives: AtomicFile, die, format, fopen_check
#include "../checksum.h"            // gives: Checksum
#include "../comm/comm.h"           // gives: comm
#include "../model/layout.h"        // gives: ParamSpec, ParamTable
#include "../model/model_config.h"  // gives: Config, config_error, check_same_model
#include "../rand.h"                // gives: bf16_to_float, bf16_round_nearest, half_to_float, bits_of

constexpr int kModelMagic = 20240326, kModelFp32 = 3, kModelBf16 = 5, kModelVariant = 100, kModelLlama = 200;
constexpr int kModelLlamaLater = 300, kModelWindows = 1000, kModelWindowWord = 19;
#define MODEL_VERSIONS "3 (fp32) and 5 (bf16), 103 and 105 of what is not GPT-2, 203, 205, 303 and 305 of " \
                       "family llama, and 1000 more with windows"

// What a file's version says. version: 3 or 5; any other number: it is not known.
struct ModelKind { int version; bool variant, llama, later, windows; };
static inline ModelKind model_kind(int version) {
    const bool windows = version >= kModelWindows;
    const int rest = version - (windows ? kModelWindows : 0), kind = rest / 100 * 100;
    const bool later = kind == kModelLlamaLater, llama = later || kind == kModelLlama;
    return {kind <= kModelLlamaLater ? rest - kind : -1, kind == kModelVariant, llama, later, windows};
}

// ---- the checksum ----

// Words 254 and 255 of the header hold the XXH64 of the file with zeros in these words. Zero: no checksum.
constexpr int kModelChecksumWord = 254, kModelResidualWord = kModelChecksumWord - 1;
constexpr int kModelChatWord = kModelResidualWord - 1;

static inline uint64_t model_checksum(const int* header /*(256)*/) {
    uint64_t sum;
    memcpy(&sum, header + kModelChecksumWord, sizeof(sum));
    return sum;
}

// Checks the checksum. Returns the error, or "". *sum: the checksum in the header, 0 if it has none.
static inline std::string model_file_error(const std::string& path, uint64_t* sum) {
    FILE* f = fopen(path.c_str(), "rb");
    if (!f) { absent_or_die("open", path); return format("cannot be opened: %s", strerror(errno)); }
    int header[256];
    std::vector<char> part(1 << 20);
    Checksum c;
    std::string error;
    *sum = 0;
    if (fread(header, sizeof(header), 1, f) != 1) { error = "is truncated"; }
    else if ((*sum = model_checksum(header)) != 0) {
        memset(header + kModelChecksumWord, 0, sizeof(*sum));
        checksum_add(&c, header, sizeof(header));
        for (size_t n; (n = fread(part.data(), 1, part.size(), f)) > 0;) { checksum_add(&c, part.data(), n); }
        if (checksum_end(&c) != *sum) { error = "is damaged: it does not have the checksum in its header"; }
    }
    if (ferror(f)) { error = format("cannot be read: %s", strerror(errno)); }
    fclose(f);
    return error;
}

// ---- the shape of family Llama: words 10 to 15 of the header, and those that kShapeFloats names ----
static inline void llama_to_header(const Config::Shape& s, int* header) {
    int bits = 0, bit = 0;
    for (const ShapeFlag& f : kShapeFlags) { bits |= (int)(s.*f.flag) << bit++; }
    const int words[] = {(int)Family::Llama, s.NKV, s.HS, s.F, (int)s.mlp, bits};
    std::copy(std::begin(words), std::end(words), header + 10);
    for (const ShapeFloat& f : kShapeFloats) { header[f.word] = (int)bits_of(s.*f.value); }
}
static inline Config::Shape llama_from_header(const int* header) {
    const int* w = header + 11;
    Config::Shape s = {w[0], w[1], w[2], (Mlp)w[3]};
    int bit = 0;
    for (const ShapeFlag& f : kShapeFlags) { s.*f.flag = (w[4] >> bit++ & 1) != 0; }
    for (const ShapeFloat& f : kShapeFloats) { s.*f.value = float_of((uint32_t)header[f.word]); }
    return s;
}

// ---- windows ----
static inline void windows_to_header(const Config& c, int* header) {
    header[kModelWindowWord] = c.window;
    memcpy(header + kModelWindowWord + 1, c.pattern.data(), c.pattern.size());
}
static inline void windows_from_header(const int* header, Config* c) {
    const char* letters = (const char*)(header + kModelWindowWord + 1);
    c->window = header[kModelWindowWord];
    c->pattern.assign(letters, strnlen(letters, kMaxPattern));
}

// ---- reading ----

// The apparent kind of a file that is no model; "" if not known.
static inline const char* other_file_kind(const void* data, size_t bytes) {
    const struct { int magic; const char* kind; } kinds[] = {
        {20240520, "a token shard"}, {20240522, "questions of an evaluation"},
        {20240327, "reference tensors"}, {20240328, "a tokenizer"}};
    int magic = 0;
    memcpy(&magic, data, std::min(bytes, sizeof(magic)));
    for (const auto& k : kinds) { if (k.magic == magic) { return k.kind; } }
    const char* text = (const char*)data;
    for (size_t i = 0; i < bytes; i++) {
        const bool space = text[i] == '\n' || text[i] == '\r' || text[i] == '\t';
        if (((unsigned char)text[i] < 32 && !space) || text[i] == 127) { return ""; }
    }
    return bytes > 0 ? "text" : "empty";
}

// Dies unless the header's first number is a model file's.
static inline void model_check_magic(const char* path, const int* header /*(256)*/, size_t got) {
    if (header[0] == kModelMagic) { return; }
    const std::string kind = other_file_kind(header, got);
    std::string why = kind.empty() ? "" : " but " + kind;
    if (kind != "text" && kind != "empty") {
        why += format(": its first number is %d, expected %d", header[0], kModelMagic);
    }
    die("'%s' is not a model checkpoint%s\nhint: -e takes a model_*.bin or a descriptor such as d12", path,
        why.c_str());
}

// header: a copy of the file's; *version: 3 or 5.
static inline Config model_read_header(const char* path, FILE* f, ParamTable table, int* header /*(256)*/,
                                       int* version) {
    constexpr size_t bytes = 256 * sizeof(int);
    memset(header, 0, bytes);
    const size_t got = fread(header, 1, bytes, f);
    if (ferror(f)) { die("cannot read '%s': %s", path, strerror(errno)); }
    model_check_magic(path, header, got);
    if (got < bytes) {
        die("'%s' is truncated: %zu bytes, a checkpoint's header alone has %zu", path, got, bytes);
    }
    const ModelKind kind = model_kind(header[1]);
    *version = kind.version;
    if ((*version != kModelFp32 && *version != kModelBf16) ||
        (kind.llama && header[10] != (int)Family::Llama)) {
        die("'%s' has checkpoint version %d; this program reads " MODEL_VERSIONS, path, header[1]);
    }
    Config c = {};
    if (kind.llama) { c.family = Family::Llama, c.llama = llama_from_header(header); }
    if (kind.variant || kind.llama) { c.block = (Block)header[8], c.norm = (NormKind)header[9]; }
    c.maxT = header[2], c.V = header[3], c.L = header[4], c.NH = header[5], c.C = header[6], c.Vp = header[7];
    c.chat = header[kModelChatWord];
    if (kind.windows) { windows_from_header(header, &c); }
    std::string error = kind.windows && c.window == 0 ? "window 0" : config_error(c);
    if (error.empty() && kind.later != c.has_later_words()) {
        error = format("version %d does not go with %s", header[1], llama_text(c).c_str());
    }
    if (kind.llama && header[15] >> std::size(kShapeFlags) != 0) {
        error = format("words of its shape, %d, are not all known", header[15]);
    }
    if (header[kModelResidualWord] != 0 && header[kModelResidualWord] != 1) {
        error = format("residual stream %d is not known", header[kModelResidualWord]);
    }
    if (!error.empty()) { die("'%s' has a bad header: %s", path, error.c_str()); }
    int64_t expected = bytes, elem_bytes = *version == kModelFp32 ? 4 : 2;
    for (const ParamSpec& s : table(c)) { expected += (int64_t)(s.elems * s.layers.size()) * elem_bytes; }
    if (file_size(path) != expected) {
        die("'%s' has %lld bytes; its header (L=%d NH=%d C=%d T=%d V=%d, padded %d, version %d) means %lld",
            path, (long long)file_size(path), c.L, c.NH, c.C, c.maxT, c.V, c.Vp, *version,
            (long long)expected);
    }
    return c;
}

static inline Config model_read_config(const char* path, ParamTable table) {
    FILE* f = fopen_check(path, "rb");
    int header[256], version;
    const Config c = model_read_header(path, f, table, header, &version);
    fclose(f);
    if (header[kModelResidualWord] != 0 && comm.rank == 0) {
        fprintf(stderr, "note: '%s' was trained with --residual-dtype fp32; here the residual stream has the "
                "type of the other activations\n", shown(path).c_str());
    }
    return c;
}

// Each tensor and layer as floats. expected: the result of model_read_config.
static inline void model_read(const char* path, ParamTable table, const Config& expected,
                              const std::function<void(int i, int l, const float* values)>& on_tensor) {
    FILE* f = fopen_check(path, "rb");
    int header[256], version;
    check_same_model(model_read_header(path, f, table, header, &version), expected, path);
    const uint64_t sum_in_header = model_checksum(header);
    memset(header + kModelChecksumWord, 0, sizeof(sum_in_header));
    Checksum sum;
    checksum_add(&sum, header, sizeof(header));
    std::vector<float> values;
    std::vector<uint16_t> raw;
    auto read = [&](void* to, size_t bytes) {
        fread_check(to, 1, bytes, f, path);
        checksum_add(&sum, to, bytes);
    };
    const std::vector<ParamSpec> specs = table(expected);
    for (int i = 0; i < (int)specs.size(); i++) {
        const ParamSpec& s = specs[(size_t)i];
        values.resize(s.elems);
        for (int l : s.layers) {
            if (version == kModelFp32) {
                read(values.data(), s.elems * sizeof(float));
            } else {
                raw.resize(s.elems);
                read(raw.data(), s.elems * sizeof(uint16_t));
                for (size_t k = 0; k < s.elems; k++) { values[k] = bf16_to_float(raw[k]); }
            }
            // the padded vocabulary's rows must not leak into sums, whatever the file holds there
            for (size_t k = s.live_rows * s.cols; k < s.elems; k++) { values[k] = 0.0f; }
            on_tensor(i, l, values.data());
        }
    }
    fclose(f);
    if (sum_in_header != 0 && checksum_end(&sum) != sum_in_header) {
        die("'%s' is damaged: it does not have the checksum in its header\nhint: take an earlier one", path);
    }
}

// ---- writing ----

struct ModelWriter {
    AtomicFile out;
    int header[256];
    Checksum sum;
    bool bf16;
};

static inline ModelWriter model_begin(const std::string& path, const Config& c, bool bf16) {
    const int kind = c.has_later_words() ? kModelLlamaLater : c.is_llama() ? kModelLlama
                     : c.is_gpt2() ? 0 : kModelVariant;
    const int version = (bf16 ? kModelBf16 : kModelFp32) + kind + (c.window > 0 ? kModelWindows : 0);
    ModelWriter w = {atomic_open(path),
                     {kModelMagic, version, c.maxT, c.V, c.L, c.NH, c.C, c.Vp, (int)c.block, (int)c.norm},
                     Checksum(), bf16};
    if (c.is_llama()) { llama_to_header(c.llama, w.header); }
    windows_to_header(c, w.header);
    w.header[kModelChatWord] = c.chat;
    atomic_write(&w.out, w.header, sizeof(w.header));
    checksum_add(&w.sum, w.header, sizeof(w.header));
    return w;
}

// n elements of type "f32", "bf16" or "f16".
static inline void model_write(ModelWriter* w, const void* data, size_t n, const char* type) {
    std::vector<float> values;
    std::vector<uint16_t> raw;
    const uint16_t* half = (const uint16_t*)data;
    const bool is_fp32 = strcmp(type, "f32") == 0, is_bf16 = strcmp(type, "bf16") == 0;
    if (w->bf16 && is_fp32) {
        raw.resize(n);
        for (size_t k = 0; k < n; k++) { raw[k] = bf16_round_nearest(((const float*)data)[k]); }
        data = raw.data();
    } else if (!w->bf16 && !is_fp32) {
        values.resize(n);
        auto* to_float = is_bf16 ? bf16_to_float : half_to_float;
        for (size_t k = 0; k < n; k++) { values[k] = to_float(half[k]); }
        data = values.data();
    }
    assert(!w->bf16 || is_fp32 || is_bf16);
    const size_t bytes = n * (w->bf16 ? sizeof(uint16_t) : sizeof(float));
    atomic_write(&w->out, data, bytes);
    checksum_add(&w->sum, data, bytes);
}

static inline void model_commit(ModelWriter* w) {
    const uint64_t sum = checksum_end(&w->sum);
    memcpy(w->header + kModelChecksumWord, &sum, sizeof(sum));
    atomic_rewind(&w->out);
    atomic_write(&w->out, w->header, sizeof(w->header));
    atomic_commit(&w->out);
}
