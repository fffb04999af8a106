/*
What a run leaves in its folder, beside the checkpoints. Host only.

    main.log        only `s:STEP trl:LOSS lr:LR norm:NORM`, `s:STEP tel:VAL`, `s:STEP eval:ACC_NORM`:
                    no times, so two equal runs write equal bytes
    metrics.jsonl   one JSON object per line: the same numbers, and what was measured (times, speed)
    run.json        the settings and what the program was built from

    Logger log;
    logger_init(&log, "runs/a");                        // makes the folder; "" logs nowhere
    logger_run(&log, table, count, {{"program", "train_gpt2cpu"}, {"precision", "FP32"}});
    logger_train(&log, {step, loss, lr, norm, tokens, ms, tokens_per_s});
    logger_val(&log, step, val_loss);
    logger_free(&log);

Every line is flushed, so a kill loses none. A write that fails stops the run.
*/
#ifndef LLMC_LOGGER_H
#define LLMC_LOGGER_H

#include <math.h>       // gives: isfinite
#include <stdint.h>     // gives: int64_t
#include <stdio.h>      // gives: FILE, fprintf

#include <string>       // gives: std::string
#include <utility>      // gives: std::pair
#include <vector>       // gives: std::vector

#include "check.h"      // gives: mkdir_check, die, AtomicFile
#include "flags.h"      // gives: flags_json
#include "json.h"       // gives: json_quote, json_number

struct Logger {
    std::string folder;         // "": nothing is written
    FILE* main_log = nullptr;
    FILE* metrics = nullptr;
};

struct TrainMetrics {
    int64_t step;
    double loss, lr, norm;
    int64_t tokens;             // trained on since the first step of the run, this one included
    double ms, tokens_per_s;    // of this step
};

typedef std::vector<std::pair<std::string, std::string>> RunInfo;

static inline void logger_init(Logger* log, const char* folder) {
    log->folder = folder;
    if (log->folder.empty()) { return; }
    mkdir_check(folder);
    log->main_log = fopen_check((log->folder + "/main.log").c_str(), "w");
    log->metrics = fopen_check((log->folder + "/metrics.jsonl").c_str(), "w");
}

static inline void logger_write(const Logger* log, FILE* f, const char* name, const std::string& line) {
    if (fputs(line.c_str(), f) >= 0 && fflush(f) == 0) { return; }
    die("cannot write '%s/%s': %s\nhint: free some space or choose another folder with -o",
        log->folder.c_str(), name, strerror(errno));
}

static inline void logger_line(Logger* log, const std::string& text, const std::string& json) {
    if (!log->main_log) { return; }
    logger_write(log, log->main_log, "main.log", text + "\n");
    logger_write(log, log->metrics, "metrics.jsonl", json + "\n");
}

// One spelling for each non-finite value: printf's "nan" or "-nan" depends on a sign bit nobody set.
static inline std::string logger_number(const char* fmt, double x) {
    if (isnan(x)) { return "nan"; }
    char text[400];                                     // the largest double has 309 digits before its point
    snprintf(text, sizeof text, fmt, x);
    return text;
}

static inline void logger_train(Logger* log, const TrainMetrics& m) {
    std::string text = format("s:%lld", (long long)m.step);
    text += " trl:" + logger_number("%.6f", m.loss);
    text += " lr:" + logger_number("%.6e", m.lr);
    text += " norm:" + logger_number("%.4f", m.norm);
    std::string json = format("{\"step\": %lld", (long long)m.step);
    json += ", \"loss\": " + json_number(m.loss) + ", \"lr\": " + json_number(m.lr);
    json += ", \"norm\": " + json_number(m.norm) + format(", \"tokens\": %lld", (long long)m.tokens);
    json += ", \"ms\": " + json_number(m.ms) + ", \"tokens_per_s\": " + json_number(m.tokens_per_s) + "}";
    logger_line(log, text, json);
}

static inline void logger_value(Logger* log, int64_t step, const char* short_name, const char* name,
                                double x) {
    logger_line(log, format("s:%lld %s:%s", (long long)step, short_name, logger_number("%.6f", x).c_str()),
                format("{\"step\": %lld, \"%s\": %s}", (long long)step, name, json_number(x).c_str()));
}

static inline void logger_val(Logger* log, int64_t step, double loss) {
    logger_value(log, step, "tel", "val_loss", loss);
}

static inline void logger_eval(Logger* log, int64_t step, double accuracy) {
    logger_value(log, step, "eval", "eval_acc_norm", accuracy);
}

static inline void logger_run(Logger* log, const Flag* table, int count, const RunInfo& info) {
    if (log->folder.empty()) { return; }
    AtomicFile out = atomic_open(log->folder + "/run.json");
    fprintf(out.f, "{\n\"settings\": ");
    flags_json(out.f, table, count);
    for (const auto& item : info) {
        fprintf(out.f, ",\n%s: %s", json_quote(item.first).c_str(), json_quote(item.second).c_str());
    }
    fprintf(out.f, "\n}\n");
    if (ferror(out.f)) { atomic_fail(&out, "write"); }
    atomic_commit(&out);
}

static inline void logger_free(Logger* log) {
    if (log->main_log) { fclose(log->main_log); }       // every line was flushed and checked
    if (log->metrics) { fclose(log->metrics); }
    *log = Logger();
}

#endif  // LLMC_LOGGER_H
