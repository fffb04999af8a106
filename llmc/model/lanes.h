/*
Lanes: groups of a step's micro-steps. The gradient is summed lane by lane and then over a binary tree of
lanes, so its bits do not depend on the number of ranks (train_gpt2.cu, section 8, draws it). How many lanes
there are, and in which buffer each is summed.

    const int64_t lanes = lanes_default(micro_steps, world);
    const std::string error = lanes_error(lanes, micro_steps, world);               // "": allowed
    float* sum = buffers[lane_buffer(lane)];        // a lane's; then lane_merges(lane, lanes) additions
*/
#pragma once

#include "../errors.h"          // gives: format
#include "../numbers.h"         // gives: is_power_of_two
#include "../ops/op_types.h"    // gives: kMaxLevels

// The default number of lanes: `world`, doubled while below 8 and as long as lanes divide the micro-steps.
static inline int64_t lanes_default(int64_t micro_steps, int world) {
    int64_t lanes = world;
    while (lanes < 8 && micro_steps % (2 * lanes) == 0) { lanes *= 2; }
    return lanes;
}

// Returns why the micro-steps cannot be cut into this number of lanes, or "".
static inline std::string lanes_error(int64_t lanes, int64_t micro_steps, int world) {
    if (lanes < 1 || micro_steps % lanes != 0) {
        return format("a step's %lld micro-steps cannot be cut into %lld equal lanes", (long long)micro_steps,
                      (long long)lanes);
    }
    if (lanes % world != 0 || !is_power_of_two(lanes / world)) {
        return format("%d ranks cannot share %lld lanes: each takes 1, 2, 4, 8 ... of them", world,
                      (long long)lanes);
    }
    if (lanes / world >= (int64_t)1 << kMaxLevels) {
        return format("%lld lanes are too many", (long long)lanes);
    }
    return "";
}

// A rank sums its lanes like a binary counter, over a stack of buffers. Lane i is summed in buffer
// lane_buffer(i), the top of the stack. Then the topmost buffer is added to the one below it, lane_merges(i)
// times: once for each pair that lane i completes. After the last lane, all buffers are added into buffer 0.
static inline int lane_buffer(int lane) { return __builtin_popcount((unsigned)lane); }
static inline int lane_merges(int lane, int lanes) {
    return lane == lanes - 1 ? lane_buffer(lane) : __builtin_ctz(~(unsigned)lane);
}
static inline int lane_buffers(int lanes) {     // number of buffers: 1 + floor(log2(lanes))
    int count = 1;
    for (; lanes > 1; lanes /= 2) { count++; }
    return count;
}
