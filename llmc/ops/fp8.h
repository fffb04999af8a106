/*
FP8 numbers: e4m3 bytes, and the powers of two that tensors are multiplied by before they are rounded to it.
Both builds use it; the CUDA kernels convert with the GPU's own instruction, to the same bytes.

    const float scale = fp8_scale(amax, kFp8Headroom);          // a power of two
    const uint8_t byte = fp8_encode(x * scale);
    const float rounded = fp8_decode(byte) / scale;

An e4m3 byte is a sign, 4 bits of exponent (bias 7) and 3 of mantissa (Micikevicius et al., "FP8 formats for
deep learning", 2022): 0, then 2^-9 to 448. There is no infinity; S.1111.111 is NaN.
*/
#ifndef LLMC_OPS_FP8_H
#define LLMC_OPS_FP8_H

#include <stdint.h>     // gives: uint8_t, uint32_t
#include <string.h>     // gives: memcpy

#include "../rand.h"    // gives: LLMC_HD

constexpr float kFp8Max = 448.0f;
constexpr int kFp8Window = 14;          // steps whose largest elements decide about the next step's scale
constexpr int kFp8Headroom = 1;         // a tensor may grow by 2^this against them before it saturates
constexpr float kFp8MaxSaturated = 1e-3f;       // of a tensor's elements: more of them skip the update

LLMC_HD static inline float fp8_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
LLMC_HD static inline uint32_t fp8_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

// To nearest, ties to even. What is larger than 448, or infinite, becomes 448: it saturates. NaN stays NaN.
static inline uint8_t fp8_encode(float x) {
    const uint32_t bits = fp8_bits(x), magnitude = bits & 0x7FFFFFFFu;
    const uint8_t sign = (uint8_t)(bits >> 31 << 7);
    if (magnitude > 0x7F800000u) { return 0x7F; }
    if (magnitude >= fp8_bits(kFp8Max)) { return sign | 0x7E; }
    if (magnitude < fp8_bits(0x1p-6f)) {        // below the normal numbers: adding 2^14 leaves steps of 2^-9
        return (uint8_t)(sign | (fp8_bits(fp8_float(magnitude) + 0x1p14f) - fp8_bits(0x1p14f)));
    }
    const uint32_t rounded = magnitude + 0x7FFFFu + (magnitude >> 20 & 1);
    return (uint8_t)(sign | ((rounded >> 20) - (120u << 3)));
}

static inline float fp8_decode(uint8_t byte) {
    const uint32_t exponent = byte >> 3 & 15, mantissa = byte & 7, sign = (uint32_t)byte >> 7 << 31;
    const float size = (byte & 0x7F) == 0x7F ? fp8_float(0x7FC00000u)
                     : exponent == 0 ? (float)mantissa * 0x1p-9f
                     : fp8_float((exponent + 120) << 23 | mantissa << 20);
    return fp8_float(fp8_bits(size) | sign);
}

// The largest power of two, from 2^-60 to 2^60, that keeps amax * scale * 2^headroom <= 448; 1 for amax 0.
LLMC_HD static inline float fp8_scale(float amax, int headroom) {
    const uint32_t bits = fp8_bits(amax);
    if (bits == 0) { return 1.0f; }
    const int exponent = (int)(bits >> 23) - 127, fits = (bits & 0x7FFFFFu) <= 0x600000u;  // 448 = 1.75 * 2^8
    const int power = 7 + fits - exponent - headroom;
    return fp8_float((uint32_t)(127 + (power < -60 ? -60 : power > 60 ? 60 : power)) << 23);
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
        t->amax[0] = fp8_float(amax);
    }
    float most = 0.0f;
    for (int i = 0; i < kFp8Window; i++) { most = t->amax[i] > most ? t->amax[i] : most; }
    fp8_set_scale(t, fp8_scale(most, kFp8Headroom));
}

#endif  // LLMC_OPS_FP8_H
