/*
Draws the next token from a row of logits. The caller brings the random number, so a seed determines the text.

    double coin = rand_unit(seed, RAND_SAMPLE, id, position);
    int token = sample_token(logits, V, {0.8f, 40, 0.95f}, coin);       // temperature, top-k, top-p

Temperature 0 takes the most likely token. Otherwise tokens rank by their logit, the lower id first among
equal ones. The first top_k tokens stay (0: all). Of these, the shortest beginning stays that holds the part
top_p of their probability. The token is drawn from it. A logit of +inf beats all finite ones; NaN is never
drawn. A model with a softcap (model_config.h) means capped logits; they rank as the logits do.

The GPU (sample_tokens, train_gpt2.cu) takes the same token. So both sides compute a token's weight, its
probability relative to the likeliest token, in steps that round alike. Weights are whole numbers, whose sum
does not depend on the order.
*/
#pragma once

#include <math.h>       // gives: fabsf, fmaf, isnan
#include <stdint.h>     // gives: uint64_t

#include <algorithm>    // gives: std::nth_element, std::make_heap
#include <vector>       // gives: std::vector

#include "../rand.h"    // gives: LLMC_HD, float_of

struct Sampling {
    float temperature;      // 0: the likeliest token
    int top_k;              // 0: all
    float top_p;            // 1: all
    float softcap = 0.0f;   // of the model; 0: none
};

// e^x * 2^shift for -28 < x <= 0. e^x = 2^n e^r with |r| <= ln 2 / 2, where the Taylor series to r^7 is exact
// to float rounding. Every product is in an fmaf or by a power of two, so a compiler cannot contract any.
LLMC_HD static inline float sample_exp_float(float x, int shift) {
    const float n = fmaf(x, 1.44269504f, 12582912.0f) - 12582912.0f;    // adding 1.5 * 2^23 rounds
    float r = fmaf(n, -0.693359375f, x);                // ln 2 in two parts: n times the first is exact
    r = fmaf(n, 2.12194440e-4f, r);
    float series = 1.0f / 5040;
    series = fmaf(series, r, 1.0f / 720);
    series = fmaf(series, r, 1.0f / 120);
    series = fmaf(series, r, 1.0f / 24);
    series = fmaf(series, r, 1.0f / 6);
    series = fmaf(series, r, 0.5f);
    series = fmaf(series, r, 1.0f);
    series = fmaf(series, r, 1.0f);
    return series * float_of((uint32_t)((int)n + 127 + shift) << 23);               // times 2^(n + shift)
}

// floor(e^x * 2^40) for x <= 0
constexpr uint64_t kFullWeight = (uint64_t)1 << 40;
LLMC_HD static inline uint64_t sample_exp(float x) {
    return x > -28.0f ? (uint64_t)sample_exp_float(x, 40) : 0;          // e^-28 * 2^40 < 1
}

// cap * tanh(x / cap), where x is not NaN
LLMC_HD static inline float sample_capped(float x, float cap) {
    const float z = fabsf(x) / cap, e = z < 14.0f ? sample_exp_float(-2.0f * z, 0) : 0.0f;
    const float y = cap * (1.0f - e) / (1.0f + e);
    return x < 0.0f ? -y : y;
}

// Of a logit that is not NaN. The largest is handled apart because inf - inf is NaN.
LLMC_HD static inline uint64_t sample_weight(float x, float largest, const Sampling& s) {
    if (x == largest) { return kFullWeight; }
    if (s.softcap > 0.0f) { x = sample_capped(x, s.softcap), largest = sample_capped(largest, s.softcap); }
    return sample_exp((x - largest) / s.temperature);
}

// sample_kept: the weight that the tokens kept by top_p must reach. sample_target: the coin's place in it.
LLMC_HD static inline uint64_t sample_kept(uint64_t total, float top_p) {
    const uint64_t kept = (uint64_t)((double)top_p * (double)total);
    return kept < 1 ? 1 : kept > total ? total : kept;
}
LLMC_HD static inline uint64_t sample_target(uint64_t total, double coin) {
    const uint64_t target = (uint64_t)(coin * (double)total);
    return target < total ? target : total - 1;
}

// coin: uniform in [0, 1). -1: all logits are NaN.
static inline int sample_token(const float* logits /*(V)*/, int V, const Sampling& s, double coin) {
    int best = -1;
    for (int i = 0; i < V; i++) {
        if (!isnan(logits[i]) && (best < 0 || logits[i] > logits[best])) { best = i; }
    }
    if (best < 0 || s.temperature == 0.0f || s.top_k == 1) { return best; }

    std::vector<int> ids;                               // that may be drawn
    for (int i = 0; i < V; i++) { if (!isnan(logits[i])) { ids.push_back(i); } }
    auto behind = [&](int a, int b) { return logits[a] != logits[b] ? logits[a] < logits[b] : a > b; };
    if (s.top_k > 0 && s.top_k < (int)ids.size()) {
        const auto end = ids.begin() + s.top_k;
        std::nth_element(ids.begin(), end, ids.end(), [&](int a, int b) { return behind(b, a); });
        ids.erase(end, ids.end());
    }
    std::vector<uint64_t> weights(V, 0);
    uint64_t total = 0;
    for (int i : ids) { total += weights[i] = sample_weight(logits[i], logits[best], s); }

    if (s.top_p < 1.0f) {
        std::make_heap(ids.begin(), ids.end(), behind); // the highest rank on top
        const uint64_t wanted = sample_kept(total, s.top_p);
        uint64_t kept = 0;
        while (kept < wanted) {
            std::pop_heap(ids.begin(), ids.end(), behind);
            kept += weights[ids.back()];
            ids.pop_back();
        }
        for (int i : ids) { weights[i] = 0; }
        total = kept;
    }

    const uint64_t target = sample_target(total, coin);
    uint64_t sum = 0;
    for (int i = 0; i < V; i++) {
        sum += weights[i];
        if (sum > target) { return i; }
    }
    return best;
}
