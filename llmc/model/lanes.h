/*
Lanes: how a step's micro-steps are grouped, so that the bits of their sum do not depend on the number of
ranks (train_gpt2.cu, section 8).

    const int64_t lanes = lanes_default(micro_steps, world, zero);
    const std::string error = lanes_error(lanes, micro_steps, world, zero);         // "" or why not
    const int buffer = lane_buffer(lane), merges = lane_merges(lane, lanes);        // see there
*/
#ifndef LLMC_MODEL_LANES_H
#define LLMC_MODEL_LANES_H

#include <stdint.h>     // gives: int64_t

#include <string>       // gives: std::string

#include "../check.h"           // gives: format
#include "../ops/op_types.h"    // gives: kMaxLevels

// How many lanes where the user does not say: the fewest that every rank shares in, but 8 if the list allows
// it.
static inline int64_t lanes_default(int64_t micro_steps, int world, int zero) {
    if (zero == 2) { return micro_steps; }
    int64_t lanes = world;
    while (lanes < 8 && micro_steps % (2 * lanes) == 0) { lanes *= 2; }
    return lanes;
}

static inline bool is_power_of_two(int64_t n) { return n > 0 && (n & (n - 1)) == 0; }

// Why a list of so many micro-steps cannot be cut into so many lanes, or "".
static inline std::string lanes_error(int64_t lanes, int64_t micro_steps, int world, int zero) {
    if (lanes < 1 || micro_steps % lanes != 0) {
        return format("a step's %lld micro-steps cannot be cut into %lld equal lanes", (long long)micro_steps,
                      (long long)lanes);
    }
    if (zero == 2) {
        if (lanes != micro_steps) {
            return format("at -zs 2 each of the %lld micro-steps is a lane of its own",
                          (long long)micro_steps);
        }
    } else if (lanes % world != 0 || !is_power_of_two(lanes / world)) {
        return format("%d ranks cannot share %lld lanes: each takes 1, 2, 4, 8 ... of them", world,
                      (long long)lanes);
    }
    if ((zero == 2 ? lanes : lanes / world) >= (int64_t)1 << kMaxLevels) {
        return format("%lld lanes are too many", (long long)lanes);
    }
    return "";
}

// A rank sums its lanes like a binary counter. Lane i goes into buffer number lane_buffer(i), on top of what
// earlier lanes left; then the last lane_merges(i) buffers below it are added to it, from the top down: pairs
// that it completed, and after the last lane all that is left. Sums end in buffer 0.
static inline int lane_buffer(int lane) { return __builtin_popcount((unsigned)lane); }
static inline int lane_merges(int lane, int lanes) {
    return lane == lanes - 1 ? lane_buffer(lane) : __builtin_ctz(~(unsigned)lane);
}
static inline int lane_buffers(int lanes) {            // how many there are: 1 + floor(log2(lanes))
    int count = 1;
    for (; lanes > 1; lanes /= 2) { count++; }
    return count;
}
// How many of the next `lanes` lanes are a whole part of the tree. They need not be merged one by one: their
// sum goes on top of what lanes before `lane` left, and the merges within it, log2 of their number, are done.
static inline int lane_part(int lane, int lanes) {
    int part = 1;
    while (2 * part <= lanes && lane % (2 * part) == 0) { part *= 2; }
    return part;
}

#endif  // LLMC_MODEL_LANES_H
