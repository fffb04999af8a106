/*
A model's configuration: its sizes, its kind of block and of norm, from a descriptor.

    const Config config = descriptor_config("d12");             // 124M; a bad name is one sentence and exit 1
    const std::string error = config_error(config);             // "": this program can train it
*/
#pragma once

#include "../check.h"           // gives: die, format
#include "../numbers.h"         // gives: parse_int, round_up
#include "../ops/op_types.h"    // gives: NormKind

enum class Block { Sequential, Parallel, ParallelTied };        // see gpt2_layer
struct Config {
    int maxT;           // longest sequence: rows of wpe
    int V, Vp;          // vocabulary, and padded: padded_vocab(V), or as a file has it
    int L, NH, C;
    Block block = Block::Sequential;
    NormKind norm = NormKind::Layer;
    bool is_gpt2() const { return block == Block::Sequential && norm == NormKind::Layer; }
};
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
    if (c.C % c.NH != 0) {
        return format("C=%d is not a multiple of NH=%d (C = heads x head size)", c.C, c.NH);
    }
    if (c.C % 8 != 0) {
        return format("C=%d is not a multiple of 8 (kernels move 8 channels at a time)", c.C);
    }
    if (c.V > 65536) { return format("V=%d: token shards hold 16-bit ids, so V is at most 65536", c.V); }
    if (c.Vp < c.V || c.Vp % 8 != 0) {
        return format("the padded vocabulary %d must be a multiple of 8 and at least V=%d", c.Vp, c.V);
    }
    if ((int)c.block < 0 || c.block > Block::ParallelTied || (int)c.norm < 0 || c.norm > NormKind::Rms) {
        return format("block %d or norm %d is not known", (int)c.block, (int)c.norm);
    }
    if (c.L > 10000 || c.C > kMaxC || c.maxT > (1 << 24)) {
        return format("L=%d C=%d T=%d: at most 10000 layers, %d channels, 2^24 positions", c.L, c.C, c.maxT,
                      kMaxC);
    }
    return "";
}

// "d12" (GPT-2: 124M 350M 774M 1558M are d12 d24 d36 d48), "gpt3:c768", or explicit "L4,NH4,C128,T128,V256".
static inline Config descriptor_config(const char* text) {
    // GPT-3: Brown et al. 2020, table 2.1. d6 and c384 are additions for experiments
    static const struct { const char* name; int maxT, L, C, HS; } sizes[] = {
        {"d6", 1024, 6, 384, 64},             {"d12", 1024, 12, 768, 64},
        {"d24", 1024, 24, 1024, 64},          {"d36", 1024, 36, 1280, 64},
        {"d48", 1024, 48, 1600, 64},          {"gpt3:c384", 2048, 6, 384, 64},
        {"gpt3:c768", 2048, 12, 768, 64},     {"gpt3:c1024", 2048, 24, 1024, 64},
        {"gpt3:c1536", 2048, 24, 1536, 96},   {"gpt3:c2048", 2048, 24, 2048, 128},
        {"gpt3:c2560", 2048, 32, 2560, 80},   {"gpt3:c4096", 2048, 32, 4096, 128}};
    const char* hint =
        "\nhint: -e takes a model_*.bin, d6 d12 d24 d36 d48, gpt3:c384 c768 c1024 c1536 c2048 c2560 c4096, "
        "or L4,NH4,C128,T128,V256";
    Config c = {};
    int64_t key;
    const bool is_name = (text[0] == 'd' && parse_int(text + 1, &key)) ||
                         (strncmp(text, "gpt3:c", 6) == 0 && parse_int(text + 6, &key));
    for (const auto& size : sizes) {
        if (strcmp(text, size.name) != 0) { continue; }
        c.maxT = size.maxT, c.V = 50257, c.L = size.L, c.NH = size.C / size.HS, c.C = size.C;
    }
    if (!is_name) {
        // letters in any order, each once
        const char* end = text + strlen(text);
        struct Field { const char* letters; int* value; };
        const Field fields[] = {{"L", &c.L}, {"NH", &c.NH}, {"C", &c.C}, {"T", &c.maxT}, {"V", &c.V}};
        size_t parts = 0, read = 0;
        for (const char* begin = text; begin <= end; parts++) {
            const char* comma = std::find(begin, end, ',');
            const char* number = std::find_if(begin, comma, [](char c) { return strchr("-0123456789", c); });
            int64_t value;
            const bool whole = parse_int(std::string(number, comma), &value);
            for (const Field& field : fields) {
                if (!whole || std::string(begin, number) != field.letters || *field.value != 0) { continue; }
                if (value < 1 || value > INT_MAX) {
                    die("-e '%.80s': %s is %.40s, and must be 1 to %d", text, field.letters,
                        std::string(number, comma).c_str(), INT_MAX);
                }
                *field.value = (int)value;
                read++;
            }
            begin = comma + 1;
        }
        if (read != 5 || parts != 5) {
            die("-e '%.80s' is neither a file nor a model descriptor%s", text, hint);
        }
    }
    if (c.L == 0) { die("-e '%.80s': there is no such size%s", text, hint); }
    c.Vp = padded_vocab(c.V);
    std::string error = config_error(c);
    if (!error.empty()) { die("-e '%.80s': %s", text, error.c_str()); }
    return c;
}

// A model's file is opened twice: for its config before memory is allocated, and for its weights.
static inline void check_same_model(const Config& c, const Config& has, const char* path) {
    if (c.maxT != has.maxT || c.V != has.V || c.L != has.L || c.NH != has.NH || c.C != has.C ||
        c.Vp != has.Vp || c.block != has.block || c.norm != has.norm) {
        die("'%s' is another model than it was at the start", path);
    }
}
