/*
Counter-based random numbers: a value is a pure function of (seed, purpose, position), so it does not depend
on thread count, launch shape, number of GPUs or what was drawn before. Host and device.

Generator: Philox 4x32 with 10 rounds (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2,
3", SC 2011); the test checks it against that paper's known answers.

    Rand4 r = philox4x32(c0, c1, c2, c3, k0, k1);                        // r.w[0..3]: 32 random bits each
    rand_normal4(z, seed, tensor, block);                                // four of N(0,1): initial weights
    RoundKey key = {seed, step, micro, tensor};
    uint16_t b = bf16_round_stochastic(x, round_bits16(key, element));   // unbiased: E[b] = x
    uint16_t d = bf16_encode_dithered(x, round_bits16(key, element));    // unbiased with half the variance,
    float y = bf16_decode_dithered(d, round_bits16(key, element));       // if the reader knows the key
    master_split(x, &weight, &low);                                      // an fp32 master as bf16 and 16 bits
    uint64_t row = rand_permuted(seed, epoch, n, i);                     // i-th of 0 .. n-1 in a random order
*/
#pragma once

#include <math.h>       // gives: log, cos, sqrt, floorf
#include <stdint.h>     // gives: uint32_t, uint64_t
#include <string.h>     // gives: memcpy

#ifdef __CUDACC__
#define LLMC_HD __host__ __device__
#define LLMC_UNROLL_16 _Pragma("unroll 16")
#else
#define LLMC_HD
#define LLMC_UNROLL_16
#endif

LLMC_HD static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
LLMC_HD static inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// The purpose is the last counter word, so that no two uses ever share a number.
enum RandPurpose : uint32_t {
    RAND_INIT = 1,
    RAND_ROUND = 2,
    RAND_SHUFFLE = 3,
    RAND_SAMPLE = 4,
    RAND_STORY = 5,
    RAND_DROPOUT = 6
};

struct Rand4 { uint32_t w[4]; };

LLMC_HD static inline Rand4 philox4x32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0,
                                       uint32_t k1) {
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0;
        uint64_t p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return Rand4{{c0, c1, c2, c3}};
}

// Four words for positions 4*block .. 4*block+3 of the stream (seed, purpose, id).
LLMC_HD static inline Rand4 rand_block(uint64_t seed, RandPurpose purpose, uint32_t id, uint64_t block) {
    return philox4x32((uint32_t)block, (uint32_t)(block >> 32), id, purpose, (uint32_t)seed,
                      (uint32_t)(seed >> 32));
}

LLMC_HD static inline uint32_t rand_u32(uint64_t seed, RandPurpose purpose, uint32_t id, uint64_t i) {
    return rand_block(seed, purpose, id, i / 4).w[i % 4];
}

// In [0, 1).
LLMC_HD static inline double rand_unit(uint64_t seed, RandPurpose purpose, uint32_t id, uint64_t i) {
    return rand_u32(seed, purpose, id, i) * (1.0 / 4294967296.0);
}

// N(0,1) by Box-Muller in double, so that any language with IEEE doubles gets the same floats.
// z[0..3] are elements 4*block .. 4*block+3: words (0,1) make the first two, words (2,3) the other two.
static inline void rand_normal4(float* z, uint64_t seed, uint32_t tensor, uint64_t block) {
    Rand4 r = rand_block(seed, RAND_INIT, tensor, block);
    for (int pair = 0; pair < 2; pair++) {
        double u = (r.w[2 * pair] + 1.0) * (1.0 / 4294967296.0);        // (0, 1]: log is finite
        double phi = r.w[2 * pair + 1] * (6.283185307179586476925286766559 / 4294967296.0);
        double radius = sqrt(-2.0 * log(u));
        z[2 * pair] = (float)(radius * cos(phi));
        z[2 * pair + 1] = (float)(radius * sin(phi));
    }
}

// Element i of a random order of 0 .. n-1 (n: 1 to 2^63); each (seed, id) has an order of its own. It needs
// no table and no sort. A Feistel network permutes the numbers below a power of two >= n, and a result of n
// or more goes through the network again ("cycle walking"). Each Feistel round is invertible, so the network
// is a bijection, and cycle walking makes it one of 0 .. n-1 (Black, Rogaway, "Ciphers with arbitrary finite
// domains", CT-RSA 2002). Philox is the round function.
//
// For n >= 33 the power of two is less than 2n, so a number takes at most two passes on average, well under a
// microsecond. Eight rounds were chosen by a chi-square test over 300,000 orders, of the positions of two
// rows: four fail it (363 sigma at n = 64), six fail at n = 64 only (5 sigma), eight never.
static const uint32_t kPermuteRounds = 8;
static inline uint64_t rand_permuted(uint64_t seed, uint32_t id, uint64_t n, uint64_t i) {
    int bits = 6;                                       // halves shorter than three bits mix badly
    while ((n - 1) >> bits) { bits++; }
    const int low_bits = bits / 2;
    const uint64_t low_mask = (1ull << low_bits) - 1, high_mask = (1ull << (bits - low_bits)) - 1;
    do {
        uint64_t low = i & low_mask, high = i >> low_bits;
        for (uint32_t round = 0; round < kPermuteRounds; round += 2) {
            high += rand_block(seed, RAND_SHUFFLE, id, low | (uint64_t)round << 32).w[0];
            high &= high_mask;
            low += rand_block(seed, RAND_SHUFFLE, id, high | (uint64_t)(round + 1) << 32).w[0];
            low &= low_mask;
        }
        i = high << low_bits | low;
    } while (i >= n);
    return i;
}

// 16 of the bits, for lane 0 .. 7.
template <class Int> LLMC_HD static inline uint32_t rand_bits16(const Rand4& r, Int lane) {
    return (r.w[lane / 2] >> (16 * (lane % 2))) & 0xFFFFu;
}

// ---- dropout ----
struct DropoutKey { uint64_t seed; uint32_t step, place; };     // place: which dropout of the model, < 2^16

// 16 bits for each of the elements 8*block .. 8*block+7 of a row (rows up to 2^48).
LLMC_HD static inline Rand4 dropout_block(const DropoutKey& key, uint64_t row, uint32_t block) {
    return philox4x32(block, (uint32_t)row, key.place | (uint32_t)(row >> 32) << 16, RAND_DROPOUT,
                      (uint32_t)key.seed ^ key.step * 0x9E3779B1u, (uint32_t)(key.seed >> 32) + key.step);
}

// ---- stochastic rounding to bf16 ----
struct RoundKey { uint64_t seed; uint32_t step, micro, tensor; };    // tensor: number of the rounded tensor

// One 16-bit draw per element: a block of four words serves eight neighbouring elements.
LLMC_HD static inline Rand4 round_block(const RoundKey& key, uint64_t element_div_8) {
    // 2^36 elements need 33 bits here; the tensor shares a counter word with them. The step enters the key.
    return philox4x32((uint32_t)element_div_8, (uint32_t)(element_div_8 >> 32) | key.tensor << 8, key.micro,
                      RAND_ROUND, (uint32_t)key.seed ^ key.step * 0x9E3779B1u,
                      (uint32_t)(key.seed >> 32) + key.step);
}

LLMC_HD static inline uint32_t round_bits16(const RoundKey& key, uint64_t element) {
    return rand_bits16(round_block(key, element / 8), (uint32_t)(element % 8));
}

// Rounds up with probability (distance from the lower neighbour) / (gap): bits16 is uniform in [0, 65536).
// Inf stays inf, and NaN stays NaN: adding to their bits would make other values of them.
LLMC_HD static inline uint16_t bf16_round_stochastic(float x, uint32_t bits16) {
    const uint32_t u = bits_of(x);
    if ((u & 0x7F800000u) == 0x7F800000u) { return (uint16_t)((u >> 16) | ((u & 0xFFFFu) ? 0x40u : 0u)); }
    return (uint16_t)((u + bits16) >> 16);
}

// Round to nearest, ties to even: what a plain cast does.
LLMC_HD static inline uint16_t bf16_round_nearest(float x) {
    return bf16_round_stochastic(x, 0x7FFFu + (bits_of(x) >> 16 & 1));
}

LLMC_HD static inline float bf16_to_float(uint16_t b) { return float_of((uint32_t)b << 16); }

// ---- exact masters of bf16 weights ----
// A bf16 weight is its fp32 master, rounded to nearest, ties away from zero. The master's lower 16 bits are
// kept beside it, and both halves give the master back, to the bit: the weight is the master's upper half, or
// one more if the lower half is 0x8000 or more. Inf stays inf. The largest finite masters round to weights of
// inf, as in any rounding to nearest, and come back finite. A NaN becomes that of the bits 0x7FC00000:
// rounding others up could make numbers of them.
LLMC_HD static inline void master_split(float master, uint16_t* weight, uint16_t* low) {
    const uint32_t u = master == master ? bits_of(master) : 0x7FC00000u;
    *weight = (uint16_t)((u + 0x8000u) >> 16);
    *low = (uint16_t)u;
}
LLMC_HD static inline float master_join(uint16_t weight, uint16_t low) {
    return float_of((((uint32_t)weight - (low >> 15)) << 16) | low);
}

// Subtractive dither (Roberts 1962 for images; Schuchman 1964 says which noise works), for readers that know
// the random draw u. The encoder adds u before it cuts off the low 16 bits, and the decoder subtracts u. This
// moves the bf16 grid by u: x goes to the nearest point of a randomly placed grid. Let
// r = (bits(x) + u) mod 2^16, in units of fp32's last place. The decoded value is x + 2^15 - r, and r is
// uniform for any x. So the error is uniform over one gap, with mean zero and variance gap^2/12. Rounding to
// nearest has this variance and a bias; stochastic rounding, whose readers do not know u, has gap^2/6.
// Each step has a draw of its own, so the errors along a running sum are independent.
//
// At a power of two P the gap doubles, so an error upwards would weigh twice as much as one downwards. Let b
// be bits(x) - bits(P) in units of 2^16, |b| <= 1/2. The unit of length below is the gap under P. The mean
// decoded value would be P + b^2/2 + 3/2 b + 1/8. But x is P + v, with v = b below P and v = 2b above it. The
// encoder therefore replaces b by the b' whose mean is v: b' = sqrt(2 + 2v) - 3/2.
LLMC_HD static inline uint16_t bf16_encode_dithered(float x, uint32_t bits16) {
    uint32_t u = bits_of(x);
    const uint32_t exponent = u & 0x7F800000u, near = (u + 0x8000u) & 0x7FFFFFu;
    if (near <= 0xFFFFu && exponent > 0x00800000u && exponent != 0x7F800000u) {
        const int b = (int)near - 0x8000;
        const float v = (b < 0 ? b : 2 * b) * (1.0f / 65536.0f);
        u += (uint32_t)((int)floorf((sqrtf(2.0f + 2.0f * v) - 1.5f) * 65536.0f + 0.5f) - b);
    }
    return bf16_round_stochastic(float_of(u), bits16);
}

// Zero, denormals, inf and NaN are decoded without dither, so padding stays zero.
LLMC_HD static inline float bf16_decode_dithered(uint16_t q, uint32_t bits16) {
    const uint32_t exponent = q & 0x7F80u;
    uint32_t u = (uint32_t)q << 16;
    if (exponent != 0 && exponent != 0x7F80u) { u += 0x8000u - bits16; }
    float x;
    memcpy(&x, &u, 4);
    return x;
}

static inline float half_to_float(uint16_t h) {         // IEEE binary16
    const int exponent = h >> 10 & 31, mantissa = h & 1023;
    const float size = exponent == 0 ? ldexpf((float)mantissa, -24)
                     : exponent < 31 ? ldexpf((float)(1024 + mantissa), exponent - 25)
                     : mantissa == 0 ? INFINITY : NAN;
    return h >> 15 ? -size : size;
}
