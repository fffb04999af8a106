/*
A model's configuration: its sizes, its kind of block and of norm, from a descriptor.

    const Config config = descriptor_config("d12");             // 124M; a bad name is one sentence and exit 1
    const std::string error = config_error(config);             // "": this program can train it
*/
#pragma once

#include "../errors.h"          // gives: die, format
#include "../data/chat_template.h"      // gives: kChatTemplates
#include "../numbers.h"         // gives: parse_int, round_up
#include "../ops/op_types.h"    // gives: NormKind, Mlp, kMlps

enum class Block { Sequential, Parallel, ParallelTied };        // see sequential_layer
enum class Family { Gpt2, Llama };              // see sequential_layer
struct Config {
    int maxT;           // longest sequence: GPT-2's rows of wpe
    int V, Vp;          // vocabulary, and padded: padded_vocab(V), or as a file has it
    int L, NH, C;
    Block block = Block::Sequential;
    NormKind norm = NormKind::Layer;
    Family family = Family::Gpt2;
    int chat = 0;       // template of the conversations that it has learned (chat_template.h); 0: none
    // What GPT-2 fixes, and Llama's family chooses
    struct Shape {
        int NKV, HS, F;                 // heads of keys and values, a head's size, the MLP's width
        Mlp mlp = Mlp::Gelu;
        bool qk_norm = false;           // an RMSNorm of each head of q and k
        bool norm_weights = true;       // RMSNorms have weights
        bool embed_norm = false;        // an RMSNorm without weights behind the embedding
        bool tied = true;               // the LM head's weight is wte
        float theta = 0.0f;             // of the rotary positions; 0: learned positions
        float eps = 1e-5f;              // of the norms
        float softcap = 0.0f;           // logits become softcap * tanh(logits / softcap); 0: they stay
        bool qkv_bias = false;          // q, k and v have biases
        bool value_embed = false;       // of layer(l): it has value embeddings; of a model: odd layers do
        // Rotary positions of longer texts, see RopeScaling; 0: as they are
        float rope_factor = 0.0f, rope_low = 0.0f, rope_high = 0.0f, rope_original = 0.0f;
        int window = 0;                 // of layer(l): what its attention sees, as Mask has it
    } llama = {};
    int window = 0;                     // of layers that are an S of the pattern, which is repeated; 0: none
    std::string pattern = {};           // S and L, which sees all before it

    bool is_llama() const { return family == Family::Llama; }
    bool is_gpt2() const { return !is_llama() && block == Block::Sequential && norm == NormKind::Layer; }
    Shape shape() const { return is_llama() ? llama : Shape{NH, C / NH, 4 * C}; }
    // Words of family Llama that model files of its first versions do not have
    bool has_later_words() const { return llama.qkv_bias || llama.value_embed || llama.rope_factor != 0.0f; }
    Shape layer(int l) const {          // layers differ in windows and value embeddings alone
        Shape s = shape();
        s.window = window > 0 && pattern[(size_t)l % pattern.size()] == 'S' ? window : 0;
        s.value_embed = s.value_embed && l % 2 == 1;
        return s;
    }
    // Parameters in tables of value embeddings, which are only looked up
    double value_rows() const { return llama.value_embed ? (double)(L / 2) * V * llama.NKV * llama.HS : 0; }
};
constexpr int kMaxT = 1 << 24, kMaxPattern = 128;
// The words of a shape that are there or not. Their order numbers the bits of a model file's word.
typedef bool Config::Shape::*OneFlag;       // typedefs, because nvcc's host code warns of `T S::*name`
typedef float Config::Shape::*OneFloat;
struct ShapeFlag { const char* word; OneFlag flag; bool means; };
constexpr ShapeFlag kShapeFlags[] = {{"qk_norm", &Config::Shape::qk_norm, true},
                                     {"no_norm_weights", &Config::Shape::norm_weights, false},
                                     {"embed_norm", &Config::Shape::embed_norm, true},
                                     {"tied", &Config::Shape::tied, true},
                                     {"qkv_bias", &Config::Shape::qkv_bias, true},
                                     {"value_embed", &Config::Shape::value_embed, true}};
// Its numbers. A descriptor leaves out those that are 0. word: where a model file's header has the number.
struct ShapeFloat { const char* name; OneFloat value; int word; };
constexpr ShapeFloat kShapeFloats[] = {{"theta", &Config::Shape::theta, 16},
                                       {"eps", &Config::Shape::eps, 17},
                                       {"softcap", &Config::Shape::softcap, 18},
                                       {"rope_factor", &Config::Shape::rope_factor, 52},
                                       {"rope_low", &Config::Shape::rope_low, 53},
                                       {"rope_high", &Config::Shape::rope_high, 54},
                                       {"rope_original", &Config::Shape::rope_original, 55}};
// Far below what sampling can add up: V weights of 2^40 in 64 bits.
constexpr int kMaxV = 1 << 20;
// A multiple of 128, so that the LM head's GEMM has whole tiles.
static inline int padded_vocab(int V) { return (int)round_up<int64_t>(V, 128); }
#define BLOCK_NAMES "sequential|parallel|parallel-tied"
#define NORM_NAMES "layernorm|rmsnorm"

// Checks the numbers of a file's header or a descriptor. Returns why they cannot be a model here, or "".
static inline std::string config_error(const Config& c) {
    if (c.maxT < 1 || c.V < 2 || c.L < 1 || c.NH < 1 || c.C < 1) {
        return format("T=%d V=%d L=%d NH=%d C=%d: each must be at least 1, V at least 2", c.maxT, c.V, c.L,
                      c.NH, c.C);
    }
    if (!c.is_llama() && c.C % c.NH != 0) {
        return format("C=%d is not a multiple of NH=%d (C = heads x head size)", c.C, c.NH);
    }
    if (c.C % 8 != 0) {
        return format("C=%d is not a multiple of 8 (kernels move 8 channels at a time)", c.C);
    }
    if (c.V > kMaxV) { return format("V=%d: at most %d tokens", c.V, kMaxV); }
    if (c.Vp < c.V || c.Vp % 8 != 0) {
        return format("the padded vocabulary %d must be a multiple of 8 and at least V=%d", c.Vp, c.V);
    }
    if ((int)c.block < 0 || c.block > Block::ParallelTied || (int)c.norm < 0 || c.norm > NormKind::Rms) {
        return format("block %d or norm %d is not known", (int)c.block, (int)c.norm);
    }
    if (c.chat < 0 || c.chat > kChatTemplates) {
        return format("chat template %d is not known, only %d", c.chat, kChatTemplates);
    }
    const Config::Shape s = c.shape();
    if (c.is_llama() && (s.NKV < 1 || c.NH % s.NKV != 0 || s.HS < 16 || s.HS > 256 || s.HS % 16 != 0)) {
        return format("NH=%d NKV=%d HS=%d: NH must be a multiple of NKV, and HS one of 16, 32, ... 256", c.NH,
                      s.NKV, s.HS);
    }
    if (c.is_llama() && (s.F < 8 || s.F > (1 << 20) || s.F % 8 != 0 || c.NH > 4096)) {
        return format("F=%d NH=%d: F must be a multiple of 8 and at most 2^20, NH at most 4096", s.F, c.NH);
    }
    const bool known_mlp = (int)s.mlp >= 0 && (int)s.mlp < kMlpCount;
    if (c.is_llama() && (!known_mlp || !(s.theta > 0.0f) || !(s.eps > 0.0f) || !(s.softcap >= 0.0f) ||
                         c.block != Block::Sequential || c.norm != NormKind::Rms)) {
        return format("mlp %d, theta=%g, eps=%g, softcap=%g, block %d, norm %d: not of the llama family",
                      (int)s.mlp, s.theta, s.eps, s.softcap, (int)c.block, (int)c.norm);
    }
    if (s.value_embed && c.C < kGateChannels) {
        return format("C=%d: the gates of value_embed read %d channels", c.C, kGateChannels);
    }
    const bool plain = s.rope_low == 0.0f && s.rope_high == 0.0f && s.rope_original == 0.0f;
    const bool by_turns = s.rope_low > 0.0f && s.rope_high > s.rope_low && s.rope_original >= 1.0f;
    const bool factor_fits = s.rope_factor >= 1.0f && s.rope_factor <= 1e6f;
    if (!(s.rope_factor == 0.0f ? plain : factor_fits && (plain || by_turns))) {
        return format("rope_factor=%g rope_low=%g rope_high=%g rope_original=%g: a factor is 1 to 1e6, alone "
                      "or with the other three: low above 0, high above low, original at least 1",
                      s.rope_factor, s.rope_low, s.rope_high, s.rope_original);
    }
    if (c.L > 10000 || c.C > kMaxC || c.maxT > kMaxT) {
        return format("L=%d C=%d T=%d: at most 10000 layers, %d channels, 2^24 positions", c.L, c.C, c.maxT,
                      kMaxC);
    }
    const int letters = (int)c.pattern.size(), most = std::min(kMaxPattern, c.L);
    if (c.window < 0 || c.window > kMaxT || (c.window > 0) != (letters > 0)) {
        return format("window=%d,pattern=%.130s: a window is 1 to %d tokens, and a pattern says whose it is",
                      c.window, c.pattern.c_str(), kMaxT);
    }
    if (letters > most || c.pattern.find_first_not_of("SL") != std::string::npos) {
        return format("pattern=%.130s: a letter for each layer, at most %d here: S has the window, L sees "
                      "all", c.pattern.c_str(), most);
    }
    return "";
}

// The shortest text that is read back as this number.
static inline std::string float_text(float x) {
    int digits = 6;
    while (digits < 9 && strtof(format("%.*g", digits, x).c_str(), nullptr) != x) { digits++; }
    return format("%.*g", digits, x);
}

// What a descriptor says of windows.
static inline std::string window_text(const Config& c) {
    return c.window > 0 ? format(",window=%d,pattern=%s", c.window, c.pattern.c_str()) : "";
}

// Of family Llama: the descriptor that means this model, as descriptor_config reads it.
static inline std::string llama_text(const Config& c) {
    const Config::Shape& s = c.llama;
    std::string text = format("llama:L%d,NH%d,NKV%d,HS%d,C%d,F%d,T%d,V%d", c.L, c.NH, s.NKV, s.HS, c.C, s.F,
                              c.maxT, c.V);
    if (s.mlp != Mlp::SwiGlu) { text += std::string(",") + kMlps[(int)s.mlp].word; }
    for (const ShapeFlag& f : kShapeFlags) {
        if (s.*f.flag == f.means) { text += std::string(",") + f.word; }
    }
    for (const ShapeFloat& f : kShapeFloats) {
        if (s.*f.value != 0.0f) { text += format(",%s=", f.name) + float_text(s.*f.value); }
    }
    return text + window_text(c);
}

// Reads one part of a descriptor, such as L12 or theta=1e4; false: it is none, or has come before.
static inline bool config_part(const char* text, const std::string& part, Config* c) {
    Config::Shape& s = c->llama;
    const size_t equals = part.find('=');
    if (part.substr(0, equals) == "pattern" && equals < part.size() - 1 && c->pattern.empty()) {
        c->pattern = part.substr(equals + 1);
        return true;
    }
    double number;
    if (c->is_llama() && equals != std::string::npos && parse_double(part.substr(equals + 1), &number)) {
        for (const ShapeFloat& f : kShapeFloats) {
            if (part.substr(0, equals) == f.name) { s.*f.value = (float)number; return true; }
        }
    }
    for (const ShapeFlag& f : kShapeFlags) {
        if (c->is_llama() && part == f.word) { s.*f.flag = f.means; return true; }
    }
    for (const MlpRow& row : kMlps) {
        if (c->is_llama() && part == row.word) { s.mlp = row.mlp; return true; }
    }
    const size_t digits = std::min(part.find_first_of("-0123456789"), part.size());
    const std::string letters = part.substr(0, digits);
    struct { const char* letters; int* value; bool llama; } fields[] = {
        {"L", &c->L, false}, {"NH", &c->NH, false}, {"C", &c->C, false}, {"T", &c->maxT, false},
        {"V", &c->V, false}, {"window=", &c->window, false}, {"NKV", &s.NKV, true}, {"HS", &s.HS, true},
        {"F", &s.F, true}};
    int64_t value;
    for (const auto& field : fields) {
        if (letters != field.letters || *field.value != 0 || (field.llama && !c->is_llama())) { continue; }
        if (!parse_int(part.substr(digits), &value)) { return false; }
        if (value < 1 || value > INT_MAX) {
            die("-e '%.80s': %s is %.40s, and must be 1 to %d", text,
                letters.substr(0, letters.find('=')).c_str(), part.substr(digits).c_str(), INT_MAX);
        }
        *field.value = (int)value;
        return true;
    }
    return false;
}

// A hint: how a model of Hugging Face's hub, or a folder of transformers, becomes an argument of -e.
static inline std::string weights_hint(const std::string& name) {
    const std::string folder = name.substr(0, name.find_last_not_of('/') + 1);
    return "`python3 dev/hf.py import " + folder + "`, then -e models/" +
           folder.substr(folder.rfind('/') + 1);
}

// Of "m12", or "v12" with value embeddings: 12, a depth of nanochat's dial, as in "m12,V256". 0: no such.
static inline int dial_depth(const std::string& text) {
    const std::string name = text.substr(0, text.find(','));
    int64_t depth;
    if ((name[0] != 'm' && name[0] != 'v') || !parse_int(name.substr(1), &depth)) { return 0; }
    if (depth < 2 || depth > kMaxC / 64 || depth % 2 != 0) {
        die("-e %.80s: a depth is an even number from 2 to %d, for C = 64 x depth has heads of 128",
            text.c_str(), kMaxC / 64);
    }
    return (int)depth;
}

// "d12" (GPT-2: 124M 350M 774M 1558M are d12 d24 d36 d48), "gpt3:c768", or explicit "L4,NH4,C128,T128,V256".
// "d12,V32768" is the size with another vocabulary. "d12,window=256,pattern=SSSL": of each four layers three
// see 256 tokens, and the fourth all; without a pattern all layers have the window.
// Of family Llama: "m12", "v12", "qwen3:0.6B" and the like, or explicit, see llama_text.
static inline Config descriptor_config(const char* text) {
    // GPT-3: Brown et al. 2020, table 2.1. d6 and c384 are additions for experiments. The others as on
    // Hugging Face; smollm2 and tinyllama have GPT-2's vocabulary.
    static const struct { const char *name, *means; } sizes[] = {
        {"d6", "L6,NH6,C384,T1024,V50257"},             {"d12", "L12,NH12,C768,T1024,V50257"},
        {"d24", "L24,NH16,C1024,T1024,V50257"},         {"d36", "L36,NH20,C1280,T1024,V50257"},
        {"d48", "L48,NH25,C1600,T1024,V50257"},         {"gpt3:c384", "L6,NH6,C384,T2048,V50257"},
        {"gpt3:c768", "L12,NH12,C768,T2048,V50257"},    {"gpt3:c1024", "L24,NH16,C1024,T2048,V50257"},
        {"gpt3:c1536", "L24,NH16,C1536,T2048,V50257"},  {"gpt3:c2048", "L24,NH16,C2048,T2048,V50257"},
        {"gpt3:c2560", "L32,NH32,C2560,T2048,V50257"},  {"gpt3:c4096", "L32,NH32,C4096,T2048,V50257"},
        {"smollm2:135M", "llama:L30,NH9,NKV3,HS64,C576,F1536,T2048,V50257,tied,theta=1e5"},
        {"smollm2:360M", "llama:L32,NH15,NKV5,HS64,C960,F2560,T2048,V50257,tied,theta=1e5"},
        {"qwen3:0.6B", "llama:L28,NH16,NKV8,HS128,C1024,F3072,T2048,V151936,qk_norm,tied,theta=1e6,eps=1e-6"},
        {"qwen3:1.7B", "llama:L28,NH16,NKV8,HS128,C2048,F6144,T2048,V151936,qk_norm,tied,theta=1e6,eps=1e-6"},
        {"tinyllama:1.1B", "llama:L22,NH32,NKV4,HS64,C2048,F5632,T2048,V50257"}};
    const char* hint =
        "\nhint: -e takes a model_*.bin, a folder of a run or by dev/hf.py import, d6 d12 d24 d36 d48, "
        "gpt3:c384 c768 c1024 c1536 c2048 c2560 c4096, m12, v12 and other even depths, smollm2:135M 360M, "
        "qwen3:0.6B 1.7B, tinyllama:1.1B, L4,NH4,C128,T128,V256, or "
        "llama:L4,NH4,NKV2,HS32,C128,F256,T128,V256; ,window=256,pattern=SSSL may follow";
    std::string means = text, changes;
    const std::string name = means.substr(0, means.find(','));
    for (const auto& size : sizes) {
        if (name == size.name) { changes = means.substr(name.size()); means = size.means; break; }
    }
    if (const int depth = dial_depth(text)) {       // F = 8/3 C, rounded up to 128
        changes = means.substr(name.size());
        means = format("llama:L%d,NH%d,NKV%d,HS128,C%d,F%d,T1024,V50257,qk_norm%s", depth, depth / 2,
                       depth / 2, 64 * depth, round_up(ceil_div(8 * 64 * depth, 3), 128),
                       text[0] == 'v' ? ",value_embed" : "");
    }
    Config c = {};
    int64_t key;
    const bool is_name = (text[0] == 'd' && parse_int(text + 1, &key)) ||
                         (strncmp(text, "gpt3:c", 6) == 0 && parse_int(text + 6, &key));
    if (is_name && means == text) { die("-e '%.80s': there is no such size%s", text, hint); }
    if (means.rfind("llama:", 0) == 0) {
        c.family = Family::Llama, c.norm = NormKind::Rms;
        c.llama = {}, c.llama.mlp = Mlp::SwiGlu, c.llama.tied = false, c.llama.theta = 10000.0f;
        means = means.substr(6);
    }
    if (changes.find(",V") != std::string::npos) {
        const size_t at = means.find(",V");
        means.erase(at, means.find(',', at + 1) - at);
    }
    const size_t end_of_size = means.size();
    means += changes;
    bool whole = true;
    for (size_t begin = 0; begin <= means.size();) {
        const size_t comma = std::min(means.find(',', begin), means.size());
        const std::string part = means.substr(begin, comma - begin);
        const std::string word = part.substr(0, part.find('='));
        const bool may_follow = part[0] == 'V' || word == "window" || word == "pattern";
        whole = whole && (begin <= end_of_size || may_follow) && config_part(text, part, &c);
        begin = comma + 1;
    }
    if (c.window > 0 && c.pattern.empty()) { c.pattern = "S"; }
    const bool all = c.L && c.NH && c.C && c.maxT && c.V;
    if (!whole && strncmp(text, "gpt2", 4) == 0) {
        die("-e %.80s: there is no such file or folder\n"
            "hint: %s; -e d12 is the shape of gpt2, with new weights", text, weights_hint(text).c_str());
    }
    if (!whole || !all || (c.is_llama() && !(c.llama.NKV && c.llama.HS && c.llama.F))) {
        die("-e '%.80s' is neither a file nor a model descriptor%s", text, hint);
    }
    c.Vp = padded_vocab(c.V);
    std::string error = config_error(c);
    if (!error.empty()) { die("-e '%.80s': %s", text, error.c_str()); }
    return c;
}

// A model's file is opened twice: for its config before memory is allocated, and for its weights.
static inline void check_same_model(const Config& c, const Config& has, const char* path) {
    if (c.maxT != has.maxT || c.V != has.V || c.L != has.L || c.NH != has.NH || c.C != has.C ||
        c.Vp != has.Vp || c.block != has.block || c.norm != has.norm || c.family != has.family ||
        window_text(c) != window_text(has) || (c.is_llama() && llama_text(c) != llama_text(has))) {
        die("'%s' is another model than it was at the start", path);
    }
}
