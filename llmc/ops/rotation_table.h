/*
The angles of rotary positions: what the ops rotate_forward_inplace and rotate_backward_inplace (ops.h) turn
heads by. Computed in double and rounded once, so all builds have the same table but for what libm rounds.

    std::vector<float> table(rotation_table_size(maxT, HS));
    rotation_table(table.data(), maxT, HS, 10000.0);        // then to the device, once
*/
#pragma once

#include <math.h>       // gives: cos, sin, pow
#include <stddef.h>     // gives: size_t

static inline size_t rotation_table_size(int maxT, int HS) { return (size_t)maxT * HS; }

// (maxT,2,HS/2): for each position t the cosines of t theta^(-2i/HS), i < HS/2, then the sines.
template <class S> static inline void rotation_table(S* table, int maxT, int HS, double theta) {
    for (int i = 0; i < HS / 2; i++) {
        const double frequency = pow(theta, -2.0 * i / HS);
        for (int t = 0; t < maxT; t++) {
            S* table_t = table + (size_t)t * HS;
            table_t[i] = (S)cos(t * frequency);
            table_t[HS / 2 + i] = (S)sin(t * frequency);
        }
    }
}

