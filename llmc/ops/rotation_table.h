/*
The angles of rotary positions: what the ops rotate_forward_inplace and rotate_backward_inplace (ops.h) turn
heads by. Computed in double and rounded once, so all builds have the same table but for what libm rounds.

    std::vector<float> table(rotation_table_size(maxT, HS));
    rotation_table(table.data(), maxT, HS, 10000.0, {});    // then to the device, once
*/
#pragma once

#include <math.h>       // gives: cos, sin, pow
#include <stddef.h>     // gives: size_t

#include <algorithm>    // gives: std::clamp

// Models that have learned texts of `original` tokens take longer ones with frequencies divided by `factor`.
// Llama 3.1 keeps those that turn at least `high` times in `original` tokens, divides those that turn at most
// `low` times, and blends between. original 0: all are divided ("linear"). factor 0: none is.
struct RopeScaling { double factor, low, high, original; };
static inline double scaled_frequency(double frequency, const RopeScaling& s) {
    if (s.factor == 0.0) { return frequency; }
    const double turns = s.original * frequency / (2.0 * M_PI);
    const double kept = s.original == 0.0 ? 0.0 : std::clamp((turns - s.low) / (s.high - s.low), 0.0, 1.0);
    return frequency * ((1.0 - kept) / s.factor + kept);
}

static inline size_t rotation_table_size(int maxT, int HS) { return (size_t)maxT * HS; }

// (maxT,2,HS/2): for each position t the cosines of t theta^(-2i/HS), i < HS/2, then the sines.
template <class S>
static inline void rotation_table(S* table, int maxT, int HS, double theta, const RopeScaling& scaling) {
    for (int i = 0; i < HS / 2; i++) {
        const double frequency = scaled_frequency(pow(theta, -2.0 * i / HS), scaling);
        for (int t = 0; t < maxT; t++) {
            S* table_t = table + (size_t)t * HS;
            table_t[i] = (S)cos(t * frequency);
            table_t[HS / 2 + i] = (S)sin(t * frequency);
        }
    }
}

