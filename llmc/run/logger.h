/*
What a run leaves in its folder, beside the checkpoints. Host only.

    main.log        only `s:STEP trl:LOSS lr:LR norm:NORM`, `s:STEP tel:VAL`, `s:STEP eval:ACC_NORM`:
                    no times, so two equal runs write equal bytes
    metrics.jsonl   one JSON object per line: the same numbers, and what was measured (times, speed)
                    "step" is the number of steps done, as on the terminal and in model_00001000.bin. main.log
                    is llm.c's, which counts training lines from 0: its s:N is the step from weights N on
    run.json        the settings and what the program was built from
    main.log.cut, metrics.jsonl.cut     both as they were when the run went back to a checkpoint, until it has
                    come as far again: a later checkpoint may turn out to be readable after all

    Logger log;
    logger_init(&log, "runs/a");                        // "" logs nowhere
    logger_run(&log, table, count, {{"program", "train_gpt2cpu"}, {"precision", "FP32"}});
    logger_val(&log, step, val_loss);
    logger_train(&log, {step, loss, lr, norm, tokens, ms, tokens_per_s});
    logger_go_back(&log, step);                         // a run goes on from there: later lines are cut
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
#include <stdlib.h>     // gives: atoi

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

static inline void logger_write_file(const std::string& path, const std::string& text) {
    AtomicFile out = atomic_open(path);
    atomic_write(&out, text.data(), text.size());
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
    logger_write_file(log->folder + "/run.json", log->run_json);
}

// "" of a file that is not there.
static inline std::string logger_read(const std::string& path) {
    std::string text;
    if (file_size(path.c_str()) < 0) { return text; }
    FILE* f = fopen_check(path.c_str(), "rb");
    text.resize((size_t)file_size(path.c_str()));
    fread_check(&text[0], 1, text.size(), f, path.c_str());
    fclose(f);
    return text;
}

constexpr char kAbandoned[] = ", \"abandoned\": ";     // and how often the run had gone back then

// Where a log's lines of the first `step` steps end; npos: it lacks the last one. `last`: how that begins.
static inline size_t logger_end(const std::string& text, int64_t step, const std::string& last) {
    if (step == 0) { return 0; }
    for (size_t at = text.rfind(last); at != std::string::npos;
         at = at == 0 ? std::string::npos : text.rfind(last, at - 1)) {
        const size_t end = text.find('\n', at) + 1;
        const bool is_line = end > at && (at == 0 || text[at - 1] == '\n');
        if (is_line && text.substr(at, end - at).find(kAbandoned) == std::string::npos) { return end; }
    }
    return std::string::npos;
}

// Both logs, whether they are those of a checkpoint after `step` steps, before which the run had gone back
// `rewinds` times, and where their lines of these steps end.
struct LoggerTexts { std::string text[2]; size_t end[2]; bool fit; };
static const char* const kLogNames[2] = {"main.log", "metrics.jsonl"};

static inline LoggerTexts logger_texts(const Logger* log, const char* suffix, int64_t step, int rewinds) {
    LoggerTexts t;
    const std::string last[2] = {format("s:%lld trl:", (long long)step - 1),
                                 format("{\"step\": %lld, \"loss\": ", (long long)step)};
    for (int i = 0; i < 2; i++) {
        t.text[i] = logger_read(log->folder + "/" + kLogNames[i] + suffix);
        t.end[i] = logger_end(t.text[i], step, last[i]);
    }
    const bool has_all = t.end[0] != std::string::npos && t.end[1] != std::string::npos;
    const size_t mark = has_all ? t.text[1].substr(0, t.end[1]).rfind(kAbandoned) : std::string::npos;
    const int marks = mark == std::string::npos ? 0 : atoi(&t.text[1][mark + strlen(kAbandoned)]);
    t.fit = has_all && marks == rewinds;
    return t;
}

// Lines of metrics.jsonl with a mark: their steps were done in vain.
static inline std::string logger_abandoned(const std::string& lines, int rewinds) {
    std::string marked;
    for (size_t at = 0, end; (end = lines.find("}\n", at)) != std::string::npos; at = end + 2) {
        const std::string line = lines.substr(at, end - at);
        const bool again = line.find(kAbandoned) != std::string::npos;
        marked += line + (again ? "" : kAbandoned + std::to_string(rewinds)) + "}\n";
    }
    return marked;
}

// The run goes on from a checkpoint after its first `step` steps, before which it had gone back `rewinds`
// times. Lines of later steps are cut, and kept in *.cut if they go farther than what is there. Logs that are
// not those of the checkpoint are put back from there, if that is where they are.
// abandons: not 0: so often the run has gone back now, and metrics.jsonl keeps the cut lines, marked.
static inline void logger_go_back(Logger* log, int64_t step, int rewinds = 0, int abandons = 0) {
    if (log->folder.empty()) { return; }
    if (!log->main_log) { logger_open(log); }
    const LoggerTexts now = logger_texts(log, "", step, rewinds);
    const LoggerTexts kept = logger_texts(log, ".cut", step, rewinds);
    const bool restores = !now.fit && kept.fit;
    if (!restores && now.end[0] < now.text[0].size() && now.text[0].size() > kept.text[0].size()) {
        for (int i = 0; i < 2; i++) {
            logger_write_file(log->folder + "/" + kLogNames[i] + ".cut", now.text[i]);
        }
    }
    for (int i = 0; i < 2; i++) {
        atomic_remove_stale(log->folder + "/" + kLogNames[i] + ".cut");     // of a kill in these lines
        FILE* f = i == 0 ? log->main_log : log->metrics;
        const bool lacks = now.end[i] == std::string::npos;
        const size_t end = restores ? 0 : lacks ? now.text[i].rfind('\n') + 1 : now.end[i];    // no half line
        std::string more = restores ? kept.text[i].substr(0, kept.end[i]) : "";
        if (abandons && i == 1) { more += logger_abandoned(now.text[i].substr(end), abandons); }
        if (lacks && !restores) {
            fprintf(stderr, "warning: '%s/%s' lost its last lines: it goes on behind the gap\n",
                    shown(log->folder).c_str(), kLogNames[i]);
        }
        if (ftruncate(fileno(f), (off_t)end) != 0) {
            die("cannot shorten '%s/%s': %s", log->folder.c_str(), kLogNames[i], strerror(errno));
        }
        logger_write(log, f, kLogNames[i], more);
    }
}

// Has the run come as far again as before it went back?
static inline void logger_forget(const std::string& folder) {
    const std::string main_log = folder + "/main.log", metrics = folder + "/metrics.jsonl";
    if (file_size(main_log.c_str()) < file_size((main_log + ".cut").c_str())) { return; }
    unlink((main_log + ".cut").c_str());
    unlink((metrics + ".cut").c_str());
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
        logger_go_back(log, 0);                         // a start that failed may have left something
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
    if (log->main_log) { logger_forget(log->folder); }
    *log = Logger();
}

#endif  // LLMC_RUN_LOGGER_H
