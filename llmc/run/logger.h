/*
What a run leaves in its folder, beside the checkpoints. Host only.

    main.log        only `s:STEP trl:LOSS lr:LR norm:NORM`, `s:STEP tel:VAL`, `s:STEP eval:ACC_NORM`:
                    no times, so two equal runs write equal bytes
    metrics.jsonl   one JSON object per line: the same numbers, and what was measured (times, speed)
                    "step" is the number of steps done, as on the terminal and in model_00001000.bin. main.log
                    is llm.c's, which counts training lines from 0: its s:N is the step from weights N on
    run.json        the settings and what the program was built from

    Logger log;
    logger_init(&log, "runs/a");                        // "" logs nowhere
    logger_run(&log, table, count, {{"program", "train_gpt2cpu"}, {"precision", "FP32"}});
    logger_val(&log, step, val_loss);
    logger_train(&log, {step, loss, lr, norm, tokens, ms, tokens_per_s});
    LoggerPlace place = logger_place(&log);             // at a checkpoint,
    logger_go_back(&log, place);                        // from which a run goes on: later lines are removed
    logger_free(&log);

The folder and its files are made when the first step is done: a run that fails before leaves no trace. Every
line is flushed, so a kill loses none. A write that fails stops the run, and so does another process that
writes the same run.
*/
#ifndef LLMC_RUN_LOGGER_H
#define LLMC_RUN_LOGGER_H

#include <math.h>       // gives: isfinite
#include <stdint.h>     // gives: int64_t
#include <stdio.h>      // gives: FILE, fprintf

#include <string>       // gives: std::string
#include <utility>      // gives: std::pair
#include <vector>       // gives: std::vector

#include "../check.h"   // gives: mkdir_check, die, AtomicFile
#include "flags.h"      // gives: flags_json
#include "../files/json.h" // gives: json_quote, json_number

struct Logger {
    std::string folder;         // "": nothing is written
    FILE* main_log = nullptr;
    FILE* metrics = nullptr;
    std::string run_json;       // the whole file
    std::string early_text, early_json;     // lines from before the files were made
};

struct LoggerPlace { int64_t main_log, metrics; };      // bytes of both

struct TrainMetrics {
    int64_t step;               // done before it
    double loss, lr, norm;
    int64_t tokens;             // trained on since the first step of the run, this one included
    double ms, tokens_per_s;    // of this step
};

struct EvalMetrics { double acc_norm, acc, loss; };     // of multiple-choice questions: evalloader.h

typedef std::vector<std::pair<std::string, std::string>> RunInfo;

static inline void logger_init(Logger* log, const char* folder) {
    *log = Logger();
    log->folder = folder;
}

static inline void logger_write(const Logger* log, FILE* f, const char* name, const std::string& text) {
    if (fputs(text.c_str(), f) >= 0 && fflush(f) == 0) { return; }
    die("cannot write '%s/%s': %s\nhint: free some space or choose another folder with -o",
        log->folder.c_str(), name, strerror(errno));
}

static inline void logger_write_run(const Logger* log) {
    AtomicFile out = atomic_open(log->folder + "/run.json");
    atomic_write(&out, log->run_json.data(), log->run_json.size());
    atomic_commit(&out);
}

// Makes folder and files, or opens those that are there.
static inline void logger_open(Logger* log) {
    mkdir_check(log->folder.c_str());
    log->main_log = fopen_check((log->folder + "/main.log").c_str(), "a");
    log->metrics = fopen_check((log->folder + "/metrics.jsonl").c_str(), "a");
    if (flock(fileno(log->main_log), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        die("-o %s: another process is writing this run\nhint: wait for its end, or choose another folder",
            log->folder.c_str());
    }
    logger_write_run(log);
}

static inline LoggerPlace logger_place(const Logger* log) {
    if (!log->main_log) { return {0, 0}; }
    return {(int64_t)ftello(log->main_log), (int64_t)ftello(log->metrics)};
}

// The run goes on from there: what it wrote later is removed. After a power cut there may be less.
static inline void logger_go_back(Logger* log, LoggerPlace place) {
    if (log->folder.empty()) { return; }
    if (!log->main_log) { logger_open(log); }
    const struct { FILE* f; const char* name; int64_t bytes; } files[] = {
        {log->main_log, "main.log", place.main_log}, {log->metrics, "metrics.jsonl", place.metrics}};
    for (const auto& file : files) {
        struct stat st;
        const bool known = fstat(fileno(file.f), &st) == 0;
        if (known && st.st_size < file.bytes) {
            fprintf(stderr, "warning: '%s/%s' lost its last lines: it goes on behind the gap\n",
                    shown(log->folder).c_str(), file.name);
        } else if (!known || ftruncate(fileno(file.f), file.bytes) != 0) {
            die("cannot shorten '%s/%s': %s", log->folder.c_str(), file.name, strerror(errno));
        }
        fseeko(file.f, 0, SEEK_END);
    }
}

// So that the lines that belong to a checkpoint are on disk when it is.
static inline void logger_sync(const Logger* log) {
    for (FILE* f : {log->main_log, log->metrics}) {
        if (f && file_layer.fsync(fileno(f)) != 0) {
            die("cannot write the logs in '%s': %s", log->folder.c_str(), strerror(errno));
        }
    }
}

static inline void logger_line(Logger* log, const std::string& text, const std::string& json) {
    if (log->folder.empty()) { return; }
    if (!log->main_log) {
        log->early_text += text + "\n";
        log->early_json += json + "\n";
        return;
    }
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

// more: further fields of the line in metrics.jsonl, `, "name": value` each.
static inline void logger_train(Logger* log, const TrainMetrics& m, const std::string& more = "") {
    if (!log->main_log && !log->folder.empty()) {       // the first step
        logger_open(log);
        logger_go_back(log, {0, 0});                    // a start that failed may have left something
        logger_write(log, log->main_log, "main.log", log->early_text);
        logger_write(log, log->metrics, "metrics.jsonl", log->early_json);
    }
    std::string text = format("s:%lld", (long long)m.step);
    text += " trl:" + logger_number("%.6f", m.loss);
    text += " lr:" + logger_number("%.6e", m.lr);
    text += " norm:" + logger_number("%.4f", m.norm);
    std::string json = format("{\"step\": %lld", (long long)m.step + 1);
    json += ", \"loss\": " + json_number(m.loss) + ", \"lr\": " + json_number(m.lr);
    json += ", \"norm\": " + json_number(m.norm) + format(", \"tokens\": %lld", (long long)m.tokens);
    json += ", \"ms\": " + json_number(m.ms) + ", \"tokens_per_s\": " + json_number(m.tokens_per_s);
    logger_line(log, text, json + more + "}");
}

static inline void logger_val(Logger* log, int64_t step, double loss) {
    logger_line(log, format("s:%lld tel:%s", (long long)step, logger_number("%.6f", loss).c_str()),
                format("{\"step\": %lld, \"val_loss\": %s}", (long long)step, json_number(loss).c_str()));
}

static inline void logger_eval(Logger* log, int64_t step, const EvalMetrics& m) {
    logger_line(log, format("s:%lld eval:%s", (long long)step, logger_number("%.6f", m.acc_norm).c_str()),
                format("{\"step\": %lld, \"eval_acc_norm\": %s, \"eval_acc\": %s, \"eval_loss\": %s}",
                       (long long)step, json_number(m.acc_norm).c_str(), json_number(m.acc).c_str(),
                       json_number(m.loss).c_str()));
}

static inline void logger_run(Logger* log, const Flag* table, int count, const RunInfo& info) {
    log->run_json = "{\n\"settings\": " + flags_json(table, count);
    for (const auto& item : info) {
        log->run_json += ",\n" + json_quote(item.first) + ": " + json_quote(item.second);
    }
    log->run_json += "\n}\n";
}

static inline void logger_free(Logger* log) {
    if (log->main_log) { fclose(log->main_log); }       // every line was flushed and checked
    if (log->metrics) { fclose(log->metrics); }
    *log = Logger();
}

#endif  // LLMC_RUN_LOGGER_H
