/*
A run's lines on the terminal: its model, the mean of the last steps, progress, validations, skipped updates.
Host only.

    report_model(config, specs, uses_muon, false);              // at the start
    Report report = {max_steps, tokens_per_step, 10, 0};        // a line every 10 steps, no GPU telemetry
    report_add(&report, {step, loss, lr, norm, tokens, ms, tokens_per_s});      // after each step
    const std::string gpu = report_gpu(&report);                // fields for metrics.jsonl
    report_show(&report);                                       // prints a line if one is due, else progress
    report_line(&report);                                       // at the end: the line of the last steps
    report_val(logger, 18000, 3.28);                            // `val loss 3.280000 @18000 (best, ...`
    report_eval(score);                                         // of the questions
    report_end(report, 3.28, 18000);                            // and the run's last figures
*/
#pragma once

#include "../errors.h"          // gives: format, progress_clear, terminal_columns
#include "../model/layout.h"    // gives: ParamSpec
#include "../model/model_config.h"      // gives: Config, BLOCK_NAMES, NORM_NAMES
#include "../ops/fp8.h"         // gives: kFp8MaxSaturated
#include "../ops/op_types.h"    // gives: UpdateState, kWindow
#include "flags.h"              // gives: flags_split
#include "logger.h"             // gives: Logger, TrainMetrics, logger_number, EvalScore
#include "progress.h"           // gives: progress_show, progress_bar, progress_sparkline, text_columns
#include "telemetry.h"          // gives: Telemetry, telemetry_read

struct Report {
    int64_t max_steps = 0, total_batch = 0;     // steps of the run; tokens of a step
    int log_every = 1, log_gpu = 0;             // steps between lines; between readings of the GPU, 0: none
    Telemetry telemetry = {};
    double peak_speed = 0.0;                    // tokens/s at the GPUs' peak; 0: not known
    double begun_s = comm_now();
    int64_t steps = 0, first = 0;               // of this start, and how many were done before it
    int64_t tokens = 0;                         // of the run
    double loss = 0.0;                          // of the last step
    // Step times, without the first step, which also loads kernels.
    bool seen_first = false;
    double ms_sum = 0.0;
    int64_t ms_count = 0;
    // For the next line: sums over the steps since the previous line; step and lr of the last step.
    struct { int64_t steps, last; double loss, norm, ms, lr; } line = {};
    std::string gpu = "";                       // telemetry for the next line
    // The sparkline: means of a hundredth of the run each, and the sum for the next one.
    bool sparks = false;
    std::vector<double> marks = {};
    double mark_sum = 0.0;
    int64_t mark_steps = 0;
};

constexpr size_t kSparklineColumns = 10;        // then all fields of its line fit into 80 columns

static inline std::string duration_text(double seconds) {
    const int64_t s = (int64_t)(seconds + 0.5);
    return format("%lld:%02d:%02d", (long long)(s / 3600), (int)(s / 60 % 60), (int)(s % 60));
}

// The number of parameters, padding not counted.
static inline size_t report_parameters(const std::vector<ParamSpec>& specs) {
    size_t count = 0;
    for (const ParamSpec& s : specs) { count += s.layers.size() * s.live_rows * s.cols; }
    return count;
}

static inline void report_model(const Config& c, const std::vector<ParamSpec>& specs, bool muon,
                                bool details) {
    size_t decayed = 0, muons = 0;
    const size_t all = report_parameters(specs);
    for (const ParamSpec& s : specs) {
        decayed += is_2d(s.kind) ? s.layers.size() * s.live_rows * s.cols : 0;
        muons += s.kind == Kind::Matrix ? s.layers.size() * s.elems : 0;
    }
    if (c.is_llama()) { printf("model: %s, %zu parameters\n", llama_text(c).c_str(), all); }
    else {
        printf("model: L=%d NH=%d C=%d T=%d V=%d%s, %zu parameters\n", c.L, c.NH, c.C, c.maxT, c.V,
               window_text(c).c_str(), all);
    }
    decayed -= (size_t)c.value_rows();
    if (details) {
        printf("%zu with weight decay, %zu without; wte padded to %d rows\n", decayed, all - decayed, c.Vp);
    }
    if (!c.is_llama() && !c.is_gpt2()) {
        printf("not GPT-2: block %s, norm %s\n", flags_split(BLOCK_NAMES, '|')[(int)c.block].c_str(),
               flags_split(NORM_NAMES, '|')[(int)c.norm].c_str());
    }
    if (muon) {
        printf("optimizer: Muon for %zu parameters, the layers' matrices; AdamW for %zu\n", muons,
               all - muons);
    }
}

static inline void report_add(Report* r, const TrainMetrics& m) {
    if (r->seen_first) { r->ms_sum += m.ms; r->ms_count++; }
    r->seen_first = true;
    if (r->steps++ == 0) { r->first = m.step; }
    r->tokens = m.tokens, r->loss = m.loss;
    if (isfinite(m.loss)) { r->mark_sum += m.loss, r->mark_steps++; }
    if (r->mark_steps * 100 >= std::max(r->max_steps, (int64_t)100)) {
        r->marks.push_back(r->mark_sum / (double)r->mark_steps);
        if (r->marks.size() > kSparklineColumns) { r->marks.erase(r->marks.begin()); }
        r->mark_sum = 0.0, r->mark_steps = 0;
    }
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
    if (r->log_gpu <= 0 || (r->line.last + 1) % r->log_gpu != 0) { return ""; }
    const TelemetrySample sample = telemetry_read(r->telemetry);
    r->gpu = sample.text;
    return sample.json;
}

// Fields with " | " between them, as many as fit, but no fewer than `least`.
static inline std::string report_fields(const std::vector<std::string>& fields, size_t columns,
                                        size_t least = 1) {
    std::string line;
    for (size_t i = 0; i < fields.size(); i++) {
        if (i >= least && text_columns(line) + 3 + fields[i].size() > columns) { break; }
        line += (i ? " | " : "") + fields[i];
    }
    return line;
}

// The mean speed since the previous line, as tokens/s and as a part of what the GPUs could do.
static inline std::vector<std::string> report_speed(const Report& r) {
    const double speed = (double)(r.total_batch * r.line.steps) / r.line.ms * 1e3;
    std::vector<std::string> fields = {format("%.0f tok/s", speed)};
    if (r.peak_speed > 0) { fields.push_back(format("MFU %.1f%%", 100.0 * speed / r.peak_speed)); }
    return fields;
}

// Prints the means of the steps since the previous line, if there are any. The widths are fixed as far as
// scripts allow, which look for `step N/M | loss X` and for `| X ms |`.
static inline void report_line(Report* r) {
    if (r->line.steps == 0) { return; }
    const double n = (double)r->line.steps;
    const std::string last = std::to_string(r->max_steps), norm =
        logger_number(r->line.norm < 1e4 * n ? "%.2f" : "%.1e", r->line.norm / n);
    const std::string loss = format("step %lld/%s | loss %s", (long long)r->line.last + 1, last.c_str(),
                                    logger_number("%.6f", r->line.loss / n).c_str());
    std::vector<std::string> fields = {
        format("%-*s", (int)(2 * last.size()) + 22, loss.c_str()), format("lr %.2e", r->line.lr),
        format("norm %-5s", norm.c_str()), format("%.1f ms", r->line.ms / n)};
    for (const std::string& field : report_speed(*r)) { fields.push_back(field); }
    fields.push_back("ETA " + report_eta(*r));
    progress_clear();
    const size_t least = terminal_columns(0) ? 1 : 5;       // in a file step, loss, lr, norm, ms, tok/s
    const std::string text = report_fields(fields, terminal_columns(100), least);
    const bool fits = text.size() + 3 + r->gpu.size() <= terminal_columns(SIZE_MAX);
    printf("%s%s%s\n", text.c_str(), r->gpu.empty() ? "" : fits ? " | " : "\n    ", r->gpu.c_str());
    fflush(stdout);
    r->line = {};
    r->gpu.clear();
}

// Steps between two lines. On a terminal, which shows progress between them, some 20 lines in all.
static inline int64_t report_every(const Report& r) {
    return r.log_every > 0 ? r.log_every : progress_on ? round_interval(r.max_steps, 20) : 1;
}

// Prints a line if one is due, else shows progress.
static inline void report_show(Report* r) {
    const int64_t done = r->line.last + 1;
    if (done % report_every(*r) == 0) { report_line(r); return; }
    const double n = (double)r->line.steps;
    const std::string sparks = r->sparks && r->marks.size() > 1 ? " " + progress_sparkline(r->marks) : "";
    std::vector<std::string> fields = {format("loss %.4f", r->line.loss / n) + sparks,
                                       format("lr %.2e", r->line.lr), format("norm %.2f", r->line.norm / n)};
    for (const std::string& field : report_speed(*r)) { fields.push_back(field); }
    progress_show(format("step %lld/%lld ", (long long)done, (long long)r->max_steps) +
                  progress_bar(done, r->max_steps, 40) +
                  format(" %.0f%% | ETA %s", floor(100.0 * (double)done / (double)r->max_steps),
                         report_eta(*r).c_str()), report_fields(fields, terminal_columns(80) - 1));
}

// The loss as perplexity, and as bits per byte.
static inline std::string report_units(double loss, double bits) {
    if (!isfinite(loss)) { return ""; }
    return format(loss < 20 ? " | ppl %.2f" : " | ppl %.2e", exp(loss)) +
           (isfinite(bits) ? format(" | bpb %.4f", bits) : "");
}

// A validation after `step` steps of a run; step -1: of a model alone. Each source of a mixture has a line of
// its own. Scripts look for `val loss X`.
static inline void report_val(const Logger& log, int64_t step, double loss,
                              const SourceLosses& sources = {}, double bits = NAN) {
    progress_clear();
    printf("val loss %s", logger_number("%.6f", loss).c_str());
    if (step >= 0) { printf(" @%lld", (long long)step); }
    const double more = loss - log.best_val;
    if (isfinite(more) && more < 0) { printf(" (best, %.4f)", more); }
    else if (isfinite(more)) { printf(" (%+.4f, best @%lld)", more, (long long)log.best_step); }
    printf("%s\n", report_units(loss, bits).c_str());
    for (const SourceLoss& source : sources) {
        printf("    loss %s%s | %s\n", logger_number("%.6f", source.loss).c_str(),
               report_units(source.loss, source.bits).c_str(), shown(source.name).c_str());
    }
    fflush(stdout);
}

// Scripts look for `eval acc_norm X`.
static inline void report_eval(const EvalScore& score) {
    const char* before = "eval";
    for (const EvalMeasure& m : score.measures) {
        const char* digits = m.value < 1000 ? "%.6f" : "%.2f";
        printf("%s %s %s +- %s", before, m.name, logger_number(digits, m.value).c_str(),
               logger_number(digits, m.error).c_str());
        before = " |";
    }
    printf("\n");
    fflush(stdout);
}

// False, with a warning, for a loss that is not finite. what: "the validation loss is"
static inline bool report_finite(const char* what, double loss) {
    if (isfinite(loss)) { return true; }
    warn("%s not finite: the weights hold NaN or far too large numbers", what);
    return false;
}

// The run's last figures: steps, time and speed are of this start.
static inline void report_end(const Report& r, double best_val, int64_t best_step) {
    if (r.steps == 0) { return; }
    printf("end: loss %s", logger_number("%.6f", r.loss).c_str());
    if (isfinite(best_val)) {
        printf(", best validation loss %.6f @%lld", best_val, (long long)best_step);
    }
    printf("\n%lld tokens in %s", (long long)(r.steps * r.total_batch),
           duration_text(comm_now() - r.begun_s).c_str());
    if (r.first > 0) {
        printf(" since step %lld; %lld tokens in all", (long long)r.first, (long long)r.tokens);
    }
    printf("\n");
    if (r.ms_count > 0) {
        const double ms = report_mean_ms(r);
        printf("mean step time %.1f ms, %.0f tokens/s over %lld steps\n", ms,
               (double)r.total_batch / ms * 1e3, (long long)r.ms_count);
    }
}

// If the step's update was skipped, prints why.
static inline void report_skip(int64_t step, float loss, const UpdateState& u, float saturated = 0.0f) {
    const bool by_loss = u.skip == SKIP_LOSS;
    if (u.skip == SKIP_NO) { return; }
    progress_clear();
    if (u.skip == SKIP_NOT_FINITE && saturated > kFp8MaxSaturated && saturated <= 1.0f) {
        fprintf(stderr, "step %lld: %.2f %% of a tensor was too large for its FP8 scale: update skipped\n",
                (long long)step + 1, 100.0 * saturated);
    } else if (u.skip == SKIP_NOT_FINITE) {
        fprintf(stderr, "step %lld: the gradient is not finite (norm %f, loss %f): update skipped\n",
                (long long)step + 1, u.norm, loss);
    } else {
        fprintf(stderr, "step %lld: %s %f is %.1f standard deviations above the mean of the last %d: "
                "update skipped\n", (long long)step + 1, by_loss ? "loss" : "norm",
                by_loss ? loss : u.norm, by_loss ? u.loss_score : u.norm_score, kWindow);
    }
}
