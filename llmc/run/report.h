/*
A run's lines on the terminal: its model, the mean of the last steps, progress, skipped updates. Host only.

    report_model(config, specs, num_specs, uses_muon);          // at the start
    Report report = {max_steps, tokens_per_step, 10, 0};        // a line every 10 steps, no GPU telemetry
    report_add(&report, {step, loss, lr, norm, tokens, ms, tokens_per_s});      // after each step
    const std::string gpu = report_gpu(&report);                // fields for metrics.jsonl
    report_show(&report);                                       // prints a line if one is due, else progress
    report_line(&report);                                       // at the end: the line of the last steps
*/
#ifndef LLMC_RUN_REPORT_H
#define LLMC_RUN_REPORT_H

#include <math.h>       // gives: floor
#include <stdint.h>     // gives: int64_t
#include <stdio.h>      // gives: printf

#include <string>       // gives: std::string

#include "../check.h"           // gives: format, progress_clear
#include "../model/layout.h"    // gives: ParamSpec
#include "../model/model_config.h"      // gives: Config, BLOCK_NAMES, NORM_NAMES
#include "../ops/op_types.h"    // gives: UpdateState, kWindow
#include "flags.h"              // gives: flags_split
#include "logger.h"             // gives: TrainMetrics, logger_number
#include "progress.h"           // gives: progress_show, progress_bar
#include "telemetry.h"          // gives: Telemetry, telemetry_read

struct Report {
    int64_t max_steps = 0, total_batch = 0;     // steps of the run; tokens of a step
    int log_every = 1, log_gpu = 0;             // steps between lines; between readings of the GPU, 0: none
    Telemetry telemetry = {};
    // Step times, without the first step, which also loads kernels.
    bool seen_first = false;
    double ms_sum = 0.0;
    int64_t ms_count = 0;
    // For the next line: sums over the steps since the previous line; step and lr of the last step.
    struct { int64_t steps, last; double loss, norm, ms, lr; } line = {};
    std::string gpu = "";                       // telemetry for the next line
};

static inline std::string duration_text(double seconds) {
    const int64_t s = (int64_t)(seconds + 0.5);
    return format("%lld:%02d:%02d", (long long)(s / 3600), (int)(s / 60 % 60), (int)(s % 60));
}

static inline void report_model(const Config& c, const ParamSpec* specs, int n, bool muon) {
    size_t decayed = 0, others = 0, muons = 0;
    for (const ParamSpec* s = specs; s < specs + n; s++) {
        (s->kind == Kind::Matrix ? decayed : others) += s->copies * s->live_rows * s->cols;
        muons += s->muon ? s->copies * s->elems : 0;
    }
    printf("model: L=%d NH=%d C=%d T=%d V=%d, %zu parameters: %zu with weight decay, %zu without; and %zu "
           "zeros that pad wte to %d rows\n",
           c.L, c.NH, c.C, c.maxT, c.V, decayed + others, decayed, others, (size_t)(c.Vp - c.V) * c.C, c.Vp);
    if (!c.is_gpt2()) {
        printf("not GPT-2: block %s, norm %s\n", flags_split(BLOCK_NAMES, '|')[(int)c.block].c_str(),
               flags_split(NORM_NAMES, '|')[(int)c.norm].c_str());
    }
    if (muon) {
        printf("optimizer: Muon for %zu parameters, the layers' matrices; AdamW for %zu\n", muons,
               decayed + others - muons);
    }
}

static inline void report_add(Report* r, const TrainMetrics& m) {
    if (r->seen_first) { r->ms_sum += m.ms; r->ms_count++; }
    r->seen_first = true;
    r->line = {r->line.steps + 1, m.step, r->line.loss + m.loss, r->line.norm + m.norm, r->line.ms + m.ms,
               m.lr};
}

static inline double report_mean_ms(const Report& r) {
    return r.ms_count > 0 ? r.ms_sum / (double)r.ms_count : r.line.ms / (double)r.line.steps;
}

// The remaining time at the mean speed so far.
static inline std::string report_eta(const Report& r) {
    return duration_text((double)(r.max_steps - r.line.last - 1) * report_mean_ms(r) * 1e-3);
}

// -lg: reads the GPU if it is time. Returns fields for metrics.jsonl and sets r->gpu for the terminal. The
// next step is already enqueued, so the GPU does not wait for this.
static inline std::string report_gpu(Report* r) {
    TelemetrySample sample;
    const bool due = r->log_gpu > 0 && (r->line.last + 1) % r->log_gpu == 0;
    if (!due || !telemetry_read(r->telemetry, &sample)) { return ""; }
    r->gpu = telemetry_text(sample);
    return telemetry_json(sample);
}

// Prints the means of the steps since the previous line, if there are any.
static inline void report_line(Report* r) {
    if (r->line.steps == 0) { return; }
    const double n = (double)r->line.steps, ms = r->line.ms / n;
    progress_clear();
    printf("step %lld/%lld | loss %s | lr %.2e | norm %s | %.1f ms | %.0f tok/s | ETA %s%s%s\n",
           (long long)r->line.last + 1, (long long)r->max_steps,
           logger_number("%.6f", r->line.loss / n).c_str(), r->line.lr,
           logger_number("%.4f", r->line.norm / n).c_str(), ms, (double)r->total_batch / ms * 1e3,
           report_eta(*r).c_str(), r->gpu.empty() ? "" : " | ", r->gpu.c_str());
    fflush(stdout);
    r->line = {};
    r->gpu.clear();
}

// Prints a line if one is due, else shows progress.
static inline void report_show(Report* r) {
    const int64_t done = r->line.last + 1;
    if (done % r->log_every == 0) { report_line(r); return; }
    const double n = (double)r->line.steps;
    progress_show(format("step %lld/%lld ", (long long)done, (long long)r->max_steps) +
                  progress_bar(done, r->max_steps, 20) +
                  format(" %.0f%% | loss %.4f | %.0f tok/s | ETA %s",
                         floor(100.0 * (double)done / (double)r->max_steps), r->line.loss / n,
                         (double)r->total_batch * n / r->line.ms * 1e3, report_eta(*r).c_str()));
}

// If the step's update was skipped, prints why.
static inline void report_skip(int64_t step, float loss, const UpdateState& u) {
    const bool by_loss = u.skip == SKIP_LOSS;
    if (u.skip == SKIP_NO) { return; }
    progress_clear();
    if (u.skip == SKIP_NOT_FINITE) {
        fprintf(stderr, "step %lld: the gradient is not finite (norm %f, loss %f): update skipped\n",
                (long long)step + 1, u.norm, loss);
    } else {
        fprintf(stderr, "step %lld: %s %f is %.1f standard deviations above the mean of the last %d: "
                "update skipped\n", (long long)step + 1, by_loss ? "loss" : "norm",
                by_loss ? loss : u.norm, by_loss ? u.loss_score : u.norm_score, kWindow);
    }
}

#endif  // LLMC_RUN_REPORT_H
