/*
Learning rate as a function of the optimizer step (0, 1, 2, ...): a linear warm-up to the peak, then one of
four shapes. Muon's momentum, too. Host only.

    LrSchedule s = {LR_COSINE, 6e-4, 700, 18865, 0.1};    // kind, peak, warm-up, total, final fraction
    double lr = lr_at(s, step);
    double momentum = momentum_at(0.95, 300, step);       // the last, warm-up

Step k of a warm-up over W steps gets peak*(k+1)/W: the first step already learns, step W-1 is at the peak.
From step `total` on the rate is peak*final_fraction; the last trained step, total-1, is just before that.
*/
#pragma once

#include "../errors.h"  // gives: int64_t, std::max

enum LrKind { LR_COSINE, LR_LINEAR, LR_CONSTANT, LR_WSD };
static const char* const kLrKinds = "cosine|linear|constant|wsd";      // for the flag table, in enum order

struct LrSchedule {
    int kind;                   // LrKind
    double peak;
    int64_t warmup, total;      // steps; the warm-up may be longer than the run
    double final_fraction;      // of the peak; unused by `constant`
    double cooldown = 0.0;      // part of the run, at its end, in which the rate of `wsd` falls
};

static inline double lr_at(const LrSchedule& s, int64_t step) {
    if (step < s.warmup) { return s.peak * (double)(step + 1) / (double)s.warmup; }
    if (s.kind == LR_CONSTANT) { return s.peak; }

    // wsd (warm-up, stable, decay) keeps the peak until the cooldown. Its decay is 1 - sqrt(x), which reached
    // a lower loss than a linear one in Haegele et al., "Scaling laws and compute-optimal training beyond
    // fixed training durations", 2024.
    int64_t start = s.warmup;
    if (s.kind == LR_WSD) { start = std::max(start, s.total - (int64_t)((double)s.total * s.cooldown)); }
    double x = 1.0;                                     // 0 where the decay starts, 1 from `total` on
    if (step < s.total) { x = step <= start ? 0.0 : (double)(step - start) / (double)(s.total - start); }
    double left = s.kind == LR_COSINE ? 0.5 * (1.0 + cos(x * 3.14159265358979323846))
                : s.kind == LR_LINEAR ? 1.0 - x
                : 1.0 - sqrt(x);
    const double last = s.peak * s.final_fraction;
    return last + left * (s.peak - last);
}

// The least of 1, 2, 5, 10, 20 ... that divides the steps into `parts` at most.
static inline int64_t round_interval(int64_t steps, int parts) {
    int64_t every = 1;
    for (int i = 0; every * parts < steps; i++) { every = every * (i % 3 == 1 ? 5 : 4) / 2; }
    return every;
}

// Rises over `warmup` steps from 0.85, or stays where it is lower: early gradients are soon out of date.
static inline double momentum_at(double last, int64_t warmup, int64_t step) {
    const double first = std::min(last, 0.85);
    return step < warmup ? first + (last - first) * (double)step / (double)warmup : last;
}
