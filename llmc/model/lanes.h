/*
How many lanes a step has. Lanes are groups of its micro-steps. The gradient is summed lane by lane and then
over a binary tree of lanes, so its bits do not depend on the number of ranks (train_gpt2.cu, section 8).

    const int64_t lanes = lanes_default(micro_steps, world, zero);
    const std::string error = lanes_error(lanes, micro_steps, world, zero);         // "": allowed
*/
#pragma once

#include "../check.h"           // gives: format
#include "../numbers.h"         // gives: is_power_of_two
#include "../ops/op_types.h"    // gives: kMaxLevels

// The default number of lanes: `world`, doubled while below 8 and as long as lanes divide the micro-steps.
static inline int64_t lanes_default(int64_t micro_steps, int world, int zero) {
    if (zero == 2) { return micro_steps; }
    int64_t lanes = world;
    while (lanes < 8 && micro_steps % (2 * lanes) == 0) { lanes *= 2; }
    return lanes;
}

// Returns why the micro-steps cannot be cut into this number of lanes, or "".
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
