/*
FP8 numbers: bytes, and the powers of two that tensors are multiplied by before they are rounded to them.
Both builds use it; the CUDA kernels convert with the GPU's own instructions, to the same bytes.

    const float scale = fp8_scale(amax, kFp8Headroom);          // a power of two
    const uint8_t byte = fp8_encode(x * scale, format);
    const float rounded = fp8_decode(byte, format) / scale;

The formats are those of Micikevicius et al., "FP8 formats for deep learning", 2022:
    e4m3  a sign, 4 bits of exponent and 3 of mantissa: 0, then 2^-9 to 448. S.1111.111 is NaN.
    e5m2  a sign, 5 bits of exponent and 2 of mantissa: 0, then 2^-16 to 57,344. S.11111.01 to .11 are NaN.
*/
#pragma once

#include <stdint.h>     // gives: uint8_t, uint32_t

#include "../rand.h"    // gives: LLMC_HD, bits_of, float_of

enum class Fp8Format { E4m3, E5m2 };
constexpr float kFp8Max = 448.0f;       // of e4m3
constexpr float kFp8Dlogits = 0x1p15f;  // what dloss * loss_scale, the most that dlogits can be, is in e5m2
constexpr int kFp8Window = 14;          // steps whose largest elements decide about the next step's scale
constexpr int kFp8Headroom = 1;         // a tensor may grow by 2^this against them before it saturates
constexpr float kFp8MaxSaturated = 1e-3f;       // of a tensor's elements: more of them skip the update

// What byte 1 stands for, the bits of mantissa, the largest number and its byte.
struct Fp8Grid { float step; int mantissa; float largest; uint8_t max; };
static inline Fp8Grid fp8_grid(Fp8Format format) {
    return format == Fp8Format::E4m3 ? Fp8Grid{0x1p-9f, 3, kFp8Max, 0x7E}
                                     : Fp8Grid{0x1p-16f, 2, 57344.0f, 0x7B};
}

// To nearest, ties to even. What is larger than the largest number becomes that: it saturates. NaN stays NaN.
static inline uint8_t fp8_encode(float x, Fp8Format format = Fp8Format::E4m3) {
    const Fp8Grid grid = fp8_grid(format);
    const uint32_t bits = bits_of(x), magnitude = bits & 0x7FFFFFFFu;
    const uint8_t sign = (uint8_t)(bits >> 31 << 7);
    if (magnitude > 0x7F800000u) { return 0x7F; }
    if (magnitude >= bits_of(grid.largest)) { return sign | grid.max; }
    const float normal = grid.step * (float)(1 << grid.mantissa);       // the smallest
    if (magnitude < bits_of(normal)) {         // below: next to 2^23 steps a float has only whole steps
        const float base = grid.step * 0x1p23f;
        return (uint8_t)(sign | (bits_of(float_of(magnitude) + base) - bits_of(base)));
    }
    const int shift = 23 - grid.mantissa;
    const uint32_t rounded = magnitude + (1u << (shift - 1)) - 1 + (magnitude >> shift & 1);
    return (uint8_t)(sign | (((rounded - bits_of(normal)) >> shift) + (1u << grid.mantissa)));
}

static inline float fp8_decode(uint8_t byte, Fp8Format format = Fp8Format::E4m3) {
    const Fp8Grid grid = fp8_grid(format);
    const uint32_t magnitude = byte & 0x7Fu, sign = (uint32_t)byte >> 7 << 31;
    const float normal = grid.step * (float)(1 << grid.mantissa);
    const float size = magnitude > grid.max ? float_of(0x7FC00000u)
                     : magnitude >> grid.mantissa == 0 ? (float)magnitude * grid.step
                     : float_of(bits_of(normal) + ((magnitude - (1u << grid.mantissa)) <<
                                                     (23 - grid.mantissa)));
    return float_of(bits_of(size) | sign);
}

// The largest power of two, from 2^-60 to 2^60, that keeps amax * scale * 2^headroom <= 448; 1 for amax 0.
LLMC_HD static inline float fp8_scale(float amax, int headroom) {
    const uint32_t bits = bits_of(amax);
    if (bits == 0) { return 1.0f; }
    const int exponent = (int)(bits >> 23) - 127, fits = (bits & 0x7FFFFFu) <= 0x600000u;  // 448 = 1.75 * 2^8
    const int power = 7 + fits - exponent - headroom;
    return float_of((uint32_t)(127 + (power < -60 ? -60 : power > 60 ? 60 : power)) << 23);
}

// One tensor that is cast, of one layer. Scales change between steps only, so a step's bits do not depend on
// how ranks and micro-steps share the batch. A checkpoint holds these numbers.
struct alignas(16) Fp8Tensor {          // cuBLASLt reads `inverse` and wants it aligned so
    float inverse, scale;               // the bytes are those of x * scale; x is about the bytes * inverse
    float amax[kFp8Window];             // largest |x| of the last steps, the newest first; 0: none yet
};
constexpr int kFp8TensorFloats = sizeof(Fp8Tensor) / sizeof(float);

// What a step's casts of a tensor have seen: maxima and counts, which no order changes.
struct Fp8Stats {
    uint64_t elements, saturated;       // saturated: |x * scale| > 448
    uint32_t amax, unused;              // bits of the largest |x|; a NaN is larger than all else
};

LLMC_HD static inline void fp8_add(Fp8Stats* sum, const Fp8Stats& s) {
    sum->elements += s.elements;
    sum->saturated += s.saturated;
    sum->amax = s.amax > sum->amax ? s.amax : sum->amax;
}
LLMC_HD static inline float fp8_saturated(const Fp8Stats& s) {      // the part of the elements that did
    return s.elements > 0 ? (float)((double)s.saturated / (double)s.elements) : 0.0f;
}

LLMC_HD static inline void fp8_set_scale(Fp8Tensor* t, float scale) {
    t->scale = scale;
    t->inverse = 1.0f / scale;
}

// After a step: takes its amax into the history and sets the next step's scale. An amax that is not finite
// says nothing about the next step.
LLMC_HD static inline bool fp8_is_finite(uint32_t amax) { return amax < 0x7F800000u; }
LLMC_HD static inline void fp8_next_scale(Fp8Tensor* t, uint32_t amax) {
    if (fp8_is_finite(amax)) {
        for (int i = kFp8Window - 1; i > 0; i--) { t->amax[i] = t->amax[i - 1]; }
        t->amax[0] = float_of(amax);
    }
    float most = 0.0f;
    for (int i = 0; i < kFp8Window; i++) { most = t->amax[i] > most ? t->amax[i] : most; }
    fp8_set_scale(t, fp8_scale(most, kFp8Headroom));
}

// Whether layer l of L is in FP8: all but the first and the last, if there are others.
static inline bool fp8_layer(int l, int L) { return L <= 2 || (l > 0 && l < L - 1); }
