/*
Where a model's tensors lie in memory. The rows of its two tables (train_gpt2.cu, section 7) become specs.
The buckets of parameters, gradients and optimizer state follow from the specs, and so do each rank's shards.

    const std::vector<ParamSpec> rows = {
        param_spec("wte", 2, Where::Global, Vp, C, Init::Normal, Kind::Embedding, V, {}, 0),
        param_spec("qkvw", 2, Where::Block, 3 * C, C, Init::Normal, Kind::Matrix, 3 * C,
                   {{"q", C}, {"k", C}, {"v", C}}, 4)};
    std::vector<ParamSpec> specs;
    for (int l = 0; l < L; l++) { param_layer(&specs, rows, l); }          // all layers are alike
    param_offsets(&specs, L);
    const Layout layout = param_layout(specs, L, {.rank = 0, .world = 8, .zero = 1}, false, false);
    const ParamAddress at = param_address(specs, layout, 1, l);     // of layer l's qkvw: bucket and element
*/
#pragma once

#include "../errors.h"          // gives: size_t, std::vector
#include "../numbers.h"         // gives: round_up, ceil_div
#include "../ops/op_types.h"    // gives: kChunk, ChunkRange

// Every tensor, and every layer's part of one, begins at a multiple of these bytes, as from cudaMalloc. The
// kernels' vectors need 16 bytes, but cuBLASLt's choice of algorithms depends on the alignment.
constexpr size_t kAlign = 256;
enum class Where { Global, Block };             // one tensor, or one per layer
enum class Init { Zero, One, Normal, Residual };    // Normal: N(0, 0.02); Residual: N(0, 0.02/sqrt(2L))
// A tensor's kind decides its optimizer, its rate and its bucket. AdamW updates all but Matrix, a layer's
// matrix, which may be Muon's. Embedding, with rows that tokens look up, and Head, an LM head of its own,
// have rates of their own. Norm, fp32 in every build, also has the gates of value embeddings.
enum class Kind { Embedding, Matrix, Bias, Norm, Head };
// Kinds whose gradients may be bf16, and whose tensors decay, but for value embeddings (model_update).
static inline bool is_2d(Kind kind) { return kind != Kind::Bias && kind != Kind::Norm; }

// The rows of each matrix in a Matrix tensor, one below the other: {C, C, C} of qkvw. {0}: one, all rows.
typedef std::vector<size_t> Parts;

struct ParamSpec {
    const char* name;
    Where where;
    Init init;
    Kind kind;
    size_t rows, cols, live_rows;       // live_rows: without padding
    Parts parts;            // of a layer's matrix; none: it is no such matrix, and Muon never updates it
    uint32_t id;            // key of the random numbers that its first values are drawn with
    size_t elems;           // rows*cols: one copy, as in files
    size_t padded;          // elems, rounded up to the next tensor's alignment
    size_t elem_bytes;      // bytes of an element of the parameter
    std::vector<int> layers;    // that have the tensor, in order, a copy each; Global: {0}, or none
    size_t offset, stride;  // elements: from the start of its bucket; from copy to copy
};

// The tensors of a model, in the order in which files hold them.
struct Config;
typedef std::vector<ParamSpec> (*ParamTable)(const Config& config);

struct ActSpec {
    const char* name;
    int copies;
    size_t elems, elem_bytes;
    size_t stride;      // elements from copy to copy; layers behind the last copy share it
    size_t offset;      // bytes from the arena's start
    bool is_shared;     // it lies in another tensor's memory
};

// Places arrays one behind the other. Addresses are numbers: for sizes alone, the base is null.
struct Places {
    uintptr_t base, at = base;
    template <class T> void take(T** array, size_t elems) {
        *array = (T*)at;
        at += round_up(elems * sizeof(T), kAlign);
    }
    size_t bytes() const { return at - base; }
};

// A row of MODEL_PARAMS, as a layer has it.
static inline ParamSpec param_spec(const char* name, size_t elem_bytes, Where where, size_t rows, size_t cols,
                                   Init init, Kind kind, size_t live_rows, Parts parts, uint32_t id) {
    assert(parts.empty() == (kind != Kind::Matrix) && (where == Where::Block || kind != Kind::Matrix));
    if (parts.size() == 1) { parts[0] = rows; }
    const size_t elems = rows * cols;
    const size_t padded = round_up(elems, kAlign / 2);  // whole kAlign bytes for 2-byte elements, too
    return {name, where, init, kind, rows, cols, live_rows, parts, id, elems, padded, elem_bytes, {}, 0, 0};
}

// Adds layer l, for which the table has `rows`. A row without elements: the layer does not have the tensor.
static inline void param_layer(std::vector<ParamSpec>* specs, const std::vector<ParamSpec>& rows, int l) {
    specs->resize(rows.size());
    for (size_t i = 0; i < rows.size(); i++) {
        ParamSpec& s = (*specs)[i];
        std::vector<int> layers = s.layers;
        if (layers.empty()) { s = rows[i]; }
        if (rows[i].elems > 0 && (rows[i].where == Where::Block || l == 0)) { layers.push_back(l); }
        assert(rows[i].elems == 0 || rows[i].elems == s.elems);
        s.layers = layers;
    }
}

// A row of MODEL_ACTS, placed at *offset, which moves on. kept: copies of a Block's tensor; or act_in(other),
// for one that lies in the memory of row `other` of specs. No model's bytes reach 2^64: config_error limits
// layers, channels and positions, and a micro-step has less than 2^31 tokens.
static inline int act_in(int other) { return -1 - other; }
static inline ActSpec act_spec(const char* name, size_t elem_bytes, size_t elems, Where where, int kept,
                               const ActSpec* specs, size_t* offset) {
    const size_t bytes = round_up(elems * elem_bytes, kAlign);
    if (kept < 0) {
        const ActSpec& in = specs[act_in(kept)];
        assert(elems * elem_bytes <= in.elems * in.elem_bytes);
        return {name, in.copies, elems, elem_bytes, in.stride * in.elem_bytes / elem_bytes, in.offset, true};
    }
    const int copies = where == Where::Block ? kept : 1;
    const ActSpec spec = {name, copies, elems, elem_bytes, bytes / elem_bytes, *offset, false};
    *offset += bytes * copies;
    return spec;
}

// The bytes of the largest tensor that begins `at` bytes from the arena's start.
static inline size_t act_bytes_at(const ActSpec* specs, int count, size_t at) {
    size_t bytes = 0;
    for (const ActSpec* s = specs; s < specs + count; s++) {
        const size_t copy = s->stride * s->elem_bytes, behind = at - s->offset;
        const bool there = copy > 0 && behind % copy == 0 && behind / copy < (size_t)s->copies;
        if (there) { bytes = std::max(bytes, s->elems * s->elem_bytes); }
    }
    return bytes;
}

// Fills in offset and stride of each tensor in its bucket. Block tensors stand there layer by layer, and
// Global ones follow. The layers' copies of an Embedding stand together instead.
static inline void param_offsets(std::vector<ParamSpec>* specs, int L) {
    for (Kind kind : {Kind::Embedding, Kind::Matrix, Kind::Bias, Kind::Norm, Kind::Head}) {
        const bool together = kind == Kind::Embedding;
        size_t layer = 0;                   // elements of one layer's tensors of this kind, if not together
        for (ParamSpec& s : *specs) {
            if (s.kind != kind || s.where != Where::Block || together) { continue; }
            s.offset = layer;
            layer += s.padded;
        }
        size_t behind = layer * L;
        for (ParamSpec& s : *specs) {
            if (s.kind != kind) { continue; }
            if (s.where == Where::Block && !together) {
                s.stride = kind == Kind::Matrix ? 0 : layer;        // each layer's matrices have a bucket
                continue;
            }
            s.offset = behind, s.stride = s.padded;
            behind += s.padded * s.layers.size();
        }
    }
}

// Files hold a tensor's layers together. Memory holds tensors in buckets; each is reduced, updated and
// gathered at once. The tensors of a bucket are of one kind, so its parameters have one type, and so have its
// gradients. The buckets are, in this order,
//     embeddings | matrices of layer 0 | of layer 1 | ... | all biases, by layers | all norms | untied head
// Each bucket is padded with zeros and cut into `world` equal shards of whole chunks.
struct Bucket {
    Kind kind;
    size_t elem_bytes;      // of a parameter
    size_t elems;           // of its tensors, gaps included
    size_t padded, shard;   // world * shard; a multiple of kChunk
    size_t mine;            // where this rank's shard begins: elements from the start of the bucket
    size_t held_at, held;   // what this rank updates: all of it, or from ZeRO stage 1 on its shard
    size_t first;           // its first element as RoundKey counts them: independent of the number of ranks
    size_t params, grads;   // bytes from the start of the parameters' and of the gradients' arena
    bool grads_bf16;        // else they are fp32
    size_t grad_bytes;      // of a gradient
    size_t state;           // the element at which its `held` ones begin in master weights and in m
    bool muon;              // updated by Muon, which has no v
    size_t v;               // the element at which they begin in v
    size_t shards;          // elements in this rank's shards of all earlier buckets
};

// How a job is divided. At ZeRO stage 0 a rank holds all of the optimizer's state, at stage 1 a shard of it.
struct Split { int rank = 0, world = 1, zero = 0; };

struct Layout {
    std::vector<Bucket> buckets;
    std::vector<int> matrices;          // in each layer's bucket
    size_t elems, shard_elems;          // of all buckets, padded; of this rank's shards
    size_t state_elems, v_elems;        // of master weights and m, and of v, on this rank
    size_t params_bytes, grads_bytes;
    size_t largest_but_first;           // padded elements of a bucket other than the embedding's
    int L;

    // the buckets' numbers
    int embedding() const { return 0; }
    int layer(int l) const { return 1 + l; }
    int biases() const { return 1 + L; }
    int norms() const { return 2 + L; }
    int head() const { return 3 + L; }      // of an untied LM head
    int bucket_of(Kind kind, int l) const {
        switch (kind) {
            case Kind::Embedding: return embedding();
            case Kind::Matrix: return layer(l);
            case Kind::Bias: return biases();
            case Kind::Norm: return norms();
            case Kind::Head: return head();
        }
        return -1;
    }
    // As a forward needs the parameters. layer(0) stands for all layers, which are updated together.
    std::vector<int> update_order() const {
        std::vector<int> order;
        for (int bucket : {norms(), biases(), embedding(), layer(0), head()}) {
            if (has(bucket)) { order.push_back(bucket); }
        }
        return order;
    }
    bool has(int bucket) const { return bucket < (int)buckets.size() && buckets[bucket].elems > 0; }
};

// First adds up each bucket's tensors, then places the buckets in all arrays. grads_bf16: is_2d's gradients
// are bf16. muon: Muon updates the layers' matrices.
static inline Layout param_layout(const std::vector<ParamSpec>& specs, int L, const Split& split,
                                  bool grads_bf16, bool muon) {
    Layout layout = {};
    layout.L = L;
    bool has_head = false;
    for (const ParamSpec& s : specs) { has_head = has_head || (s.kind == Kind::Head && s.elems > 0); }
    layout.buckets.resize(L + 3 + has_head);
    layout.matrices.resize(L);
    for (const ParamSpec& s : specs) {
        for (size_t copy = 0; copy < s.layers.size(); copy++) {
            const int l = s.layers[copy];
            Bucket& b = layout.buckets[layout.bucket_of(s.kind, l)];
            b.kind = s.kind;
            b.elem_bytes = s.elem_bytes;
            b.muon = muon && s.kind == Kind::Matrix;
            b.elems = std::max(b.elems, s.offset + copy * s.stride + s.padded);
            layout.matrices[l] += s.kind == Kind::Matrix;
        }
    }
    size_t first = 0;
    for (int i = 0; i < (int)layout.buckets.size(); i++) {
        Bucket& b = layout.buckets[i];
        b.shard = round_up(ceil_div(b.elems, (size_t)split.world), kChunk);
        b.padded = b.shard * split.world;
        b.mine = b.shard * split.rank;
        b.held_at = split.zero >= 1 ? b.mine : 0;
        b.held = split.zero >= 1 ? b.shard : b.padded;
        b.grads_bf16 = grads_bf16 && is_2d(b.kind);
        b.grad_bytes = b.grads_bf16 ? 2 : sizeof(float);
        b.first = first;
        b.params = layout.params_bytes;
        b.grads = layout.grads_bytes;
        b.state = layout.state_elems;
        b.v = layout.v_elems;
        b.shards = layout.shard_elems;
        first += round_up(b.elems, kChunk);
        layout.elems += b.padded;
        layout.shard_elems += b.shard;
        layout.state_elems += b.held;
        layout.v_elems += b.muon ? 0 : b.held;
        if (i > 0) { layout.largest_but_first = std::max(layout.largest_but_first, b.padded); }
        layout.params_bytes += b.padded * b.elem_bytes;
        layout.grads_bytes += b.padded * b.grad_bytes;
    }
    return layout;
}

// Of each bucket: where the sums of its chunks stand in the ranks' records.
static inline std::vector<ChunkRange> chunk_ranges(const Layout& layout) {
    std::vector<ChunkRange> ranges;
    for (const Bucket& b : layout.buckets) {
        ranges.push_back({ceil_div(b.elems, kChunk), b.shard / kChunk, b.shards / kChunk});
    }
    return ranges;
}

// Where layer l's copy of tensor i begins: its bucket, and the elements before it there.
struct ParamAddress { int bucket; size_t offset; };
static inline ParamAddress param_address(const std::vector<ParamSpec>& specs, const Layout& layout, int i,
                                         int l) {
    const ParamSpec& s = specs[i];
    const size_t copy = std::lower_bound(s.layers.begin(), s.layers.end(), l) - s.layers.begin();
    return {layout.bucket_of(s.kind, l), s.offset + copy * s.stride};
}
