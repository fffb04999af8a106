/*
Draws the next token from a row of logits. Host only; a pure function of its arguments: the caller brings the
random number, so the same seed gives the same text.

    std::vector<float> workspace(V);
    double coin = rand_unit(seed, RAND_SAMPLE, id, position);
    int token = sample_token(workspace.data(), logits, V, 0.8f, 40, coin);      // temperature 0.8, top 40

Temperature 0 takes the most likely token; top_k > 0 draws among the k most likely only. Of equal logits the
lower id comes first, in both. A logit of +inf wins over all finite ones, NaN is never drawn.
*/
#ifndef LLMC_SAMPLER_H
#define LLMC_SAMPLER_H

#include <math.h>       // gives: exp, isnan, INFINITY

#include <algorithm>    // gives: std::nth_element
#include <functional>   // gives: std::greater

#include "check.h"      // gives: die

// coin: uniform in [0, 1)
static inline int sample_token(float* workspace /*(V)*/, const float* logits /*(V)*/, int V,
                               float temperature, int top_k, double coin) {
    int best = -1;
    for (int i = 0; i < V; i++) {
        if (!isnan(logits[i]) && (best < 0 || logits[i] > logits[best])) { best = i; }
    }
    if (best < 0) {
        die("cannot sample: all %d logits are NaN\nhint: this model has diverged; load an earlier one", V);
    }
    if (temperature == 0.0f || top_k == 1) { return best; }

    // the k-th largest logit is the threshold; of those equal to it only the first few ids still fit
    float threshold = -INFINITY;
    int at_threshold = V;                               // how many logits equal to the threshold may be drawn
    if (top_k > 0 && top_k < V) {
        for (int i = 0; i < V; i++) { workspace[i] = isnan(logits[i]) ? -INFINITY : logits[i]; }
        std::nth_element(workspace, workspace + (top_k - 1), workspace + V, std::greater<float>());
        threshold = workspace[top_k - 1];
        at_threshold = top_k;
        for (int i = 0; i < V; i++) { at_threshold -= logits[i] > threshold; }
    }

    float largest = logits[best];
    double total = 0.0;
    for (int i = 0; i < V; i++) {
        float x = logits[i], p = 0.0f;
        if (x > threshold || (x == threshold && at_threshold-- > 0)) {
            p = x == largest ? 1.0f : (float)exp(((double)x - largest) / temperature);  // 1: inf - inf is NaN
        }
        workspace[i] = p;
        total += p;
    }
    double target = coin * total, sum = 0.0;
    int token = best;
    for (int i = 0; i < V && sum <= target; i++) {      // stops at the id whose interval holds the target
        if (workspace[i] > 0.0f) { token = i; sum += workspace[i]; }
    }
    return token;
}

#endif  // LLMC_SAMPLER_H
