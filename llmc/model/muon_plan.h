/*
What Muon does with the layers' matrices: how many layers at a time, which of them a rank has, and how much
memory that takes. Host only.

    const MuonShare share = muon_share(layout, specs, split, sizeof(float), (size_t)576 << 20);
    for (int first = 0; first < L; first += share.together) {
        ...                                     // rank r: layers first + r * share.each and on, share.each
        for (const MuonShape& s : muon_shapes(specs, stride, layers)) { ... }           // of one shape each
    }
*/
#pragma once

#include "../errors.h"      // gives: std::vector, std::find_if
#include "../numbers.h"     // gives: ceil_div, round_up
#include "../ops/ops.h"     // gives: MuonPlaces, kMuonParts, kChunk
#include "layout.h"         // gives: Layout, ParamSpec, Split, kAlign

// Matrices of `layers` layers that have the same shape are multiplied in one call. stride: elements from a
// layer's bucket to the next one's.
struct MuonShape { int rows, cols; MuonPlaces places; };
static inline std::vector<MuonShape> muon_shapes(const std::vector<ParamSpec>& specs, size_t stride,
                                                 int layers) {
    std::vector<MuonShape> shapes;
    for (const ParamSpec& s : specs) {
        size_t above = 0;                       // rows of the parts before
        for (const size_t part : s.parts) {
            const int rows = (int)part, cols = (int)s.cols;
            auto same = [&](const MuonShape& m) {
                return m.rows == rows && m.cols == cols && m.places.parts < kMuonParts;
            };
            auto it = std::find_if(shapes.begin(), shapes.end(), same);
            if (it == shapes.end()) { it = shapes.insert(it, {rows, cols, {0, layers, {}, stride}}); }
            it->places.at[it->places.parts++] = s.offset + above * s.cols;
            above += part;
        }
    }
    return shapes;
}

// Muon works on `together` layers at a time, as many as fit into `most_bytes`, but at least one a rank. Each
// rank orthogonalises the matrices of `each` of these layers; rank 0 has the first ones. One buffer holds the
// matrices of all these layers, a bucket's padded elements a layer: first the momentum's updates, then the
// orthogonalised ones. The ranks gather their shards of both. Orthogonalising takes four products, each with
// room for all matrices of one shape. Layers cost alike, so the ranks' work differs by at most `each` layers:
// of 12 layers on 8 ranks, six ranks have two each. One GPU, 16 bits: 396 MB for 124M, 573 MB for 1558M.
struct MuonShare {
    int each, together;
    size_t elems;           // of the buffer
    size_t product, sums;   // bytes of one of the four products, and of sums
    // of all these; elem_bytes: of an element of the buffer
    size_t bytes(size_t elem_bytes) const { return elems * elem_bytes + 4 * product + sums; }
};
static inline MuonShare muon_share(const Layout& layout, const std::vector<ParamSpec>& specs,
                                   const Split& split, size_t elem_bytes, size_t most_bytes) {
    size_t elems = 0, chunks = 0;               // of the shape that needs most, in one layer
    for (const MuonShape& s : muon_shapes(specs, 0, 1)) {
        const size_t size = (size_t)s.rows * s.cols;
        elems = std::max(elems, s.places.parts * size);
        chunks = std::max(chunks, s.places.parts * ceil_div(size, kChunk));
    }
    const size_t padded = layout.buckets[layout.layer(0)].padded;
    const size_t least = (split.world * padded + 4 * elems) * elem_bytes;          // with a layer each
    const int at_once = ceil_div(layout.L, split.world);                // if there is memory
    const int most = (int)std::min((size_t)at_once, std::max((size_t)1, most_bytes / least));
    const int each = ceil_div(at_once, ceil_div(at_once, most));        // turns of equal length
    return {each, each * split.world, each * split.world * padded,
            round_up(each * elems * elem_bytes, kAlign), each * chunks * sizeof(double)};
}
