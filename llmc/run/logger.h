/*
The files of a run's folder, except checkpoints. Host only.

    main.log        `s:STEP trl:LOSS lr:LR norm:NORM`, `s:STEP tel:VAL`, `s:STEP eval:ACC_NORM`. It has no
                    times, so two equal runs write equal bytes. As in llm.c, training lines count from 0
    metrics.jsonl   one JSON object per line: these numbers, times and speed. "step" is the number of steps
                    done, as on the terminal and in model_00001000.bin
    run.json        the settings, the program's build, its libraries and their algorithms
    main.log.cut, metrics.jsonl.cut     both logs as they were when the run went back to a checkpoint. They
                    stay until the run has come as far again: a later checkpoint may become readable

    Logger log;
    logger_init(&log, "runs/a");                        // "" logs nowhere
    logger_val(&log, step, val_loss);
    logger_run(&log, table, {{"program", "train_gpt2cpu"}, {"precision", "FP32"}});     // after a step
    logger_train(&log, {step, loss, lr, norm, tokens, ms, tokens_per_s});
    logger_go_back(&log, step);                         // the run continues from `step`: cuts later lines
    logger_free(&log);

The folder and its files are made after the first step, so a run that fails earlier leaves no trace. Every
line is flushed, so a kill loses none. The run ends if a write fails, or if another process writes it, too.
*/
#pragma once

#include "../data/evalloader.h" // gives: EvalScore
#include "../facts.h"   // gives: Facts
#include "../atomic_files.h" // gives: mkdir_check, die, file_text, atomic_file
#include "flags.h"      // gives: flags_json
#include "../files/json.h" // gives: json_quote, json_number

struct Logger {
    std::string folder;         // "": nothing is written
    FILE* main_log = nullptr;
    FILE* metrics = nullptr;
    std::string run_json;       // the whole file, "" before the first step
    std::vector<std::string> copied;        // files of which the folder gets a copy
    std::string early_text, early_json;     // lines before the files exist
    double best_val = INFINITY;             // the run's lowest validation loss so far, after `best_step`
    int64_t best_step = 0;
};

struct TrainMetrics {
    int64_t step;               // number of steps done before this one
    double loss, lr, norm;
    int64_t tokens;             // trained on since the run began, with this step's
    double ms, tokens_per_s;    // of this step
};

static inline void logger_init(Logger* log, const char* folder) {
    *log = Logger();
    log->folder = folder;
}

static inline void logger_write(const Logger* log, FILE* f, const char* name, const std::string& text) {
    if (fputs(text.c_str(), f) >= 0 && fflush(f) == 0) { return; }
    die("cannot write '%s/%s': %s\nhint: free some space or choose another folder with -o",
        log->folder.c_str(), name, strerror(errno));
}

// Opens the files for appending, creates what is missing.
static inline void logger_open(Logger* log) {
    mkdir_check(log->folder.c_str());
    log->main_log = fopen_check((log->folder + "/main.log").c_str(), "a");
    log->metrics = fopen_check((log->folder + "/metrics.jsonl").c_str(), "a");
    if (flock(fileno(log->main_log), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        die("-o %s: another process is writing this run\nhint: wait for its end, or choose another folder",
            log->folder.c_str());
    }
    if (!log->run_json.empty()) { atomic_file(log->folder + "/run.json", log->run_json); }
    for (const std::string& from : log->copied) {
        const std::string to = log->folder + "/" + from.substr(from.rfind('/') + 1);
        if (from != to) { atomic_file(to, file_text(from)); }
    }
}

// The end of a log's lines of the first `step` steps; npos: the log lacks the last one, which begins with
// `last`.
static inline size_t logger_end(const std::string& text, int64_t step, const std::string& last) {
    if (step == 0) { return 0; }
    for (size_t at = text.rfind(last); at != std::string::npos;
         at = at == 0 ? std::string::npos : text.rfind(last, at - 1)) {
        const size_t end = text.find('\n', at) + 1;
        if (end > at && (at == 0 || text[at - 1] == '\n')) { return end; }
    }
    return std::string::npos;
}

// Both logs, and the ends of their lines of the first `step` steps.
struct LoggerTexts {
    std::string text[2];
    size_t end[2];
    bool has_all() const { return end[0] != std::string::npos && end[1] != std::string::npos; }
};
static const char* const kLogNames[2] = {"main.log", "metrics.jsonl"};

static inline LoggerTexts logger_texts(const Logger* log, const char* suffix, int64_t step) {
    LoggerTexts t;
    const std::string last[2] = {format("s:%lld trl:", (long long)step - 1),
                                 format("{\"step\": %lld, \"loss\": ", (long long)step)};
    for (int i = 0; i < 2; i++) {
        const std::string path = log->folder + "/" + kLogNames[i] + suffix;
        t.text[i] = file_size(path.c_str()) < 0 ? "" : file_text(path);
        t.end[i] = logger_end(t.text[i], step, last[i]);
    }
    return t;
}

// Finds the best validation in what main.log keeps.
static inline void logger_best(Logger* log, const std::string& text) {
    log->best_val = INFINITY;
    for (size_t at = 0; (at = text.find(" tel:", at)) != std::string::npos; at++) {
        const double loss = atof(&text[at + 5]);
        if (!(loss < log->best_val)) { continue; }
        log->best_val = loss;
        log->best_step = atoll(&text[text.rfind("s:", at) + 2]);
    }
}

// The run continues from the checkpoint of `step`. Cuts the lines of later steps. Saves the logs as *.cut
// first, if they are longer than the *.cut that exist. If the logs lack steps that *.cut have, restores them
// from *.cut.
static inline void logger_go_back(Logger* log, int64_t step) {
    if (log->folder.empty()) { return; }
    if (!log->main_log) { logger_open(log); }
    const LoggerTexts now = logger_texts(log, "", step), kept = logger_texts(log, ".cut", step);
    const bool restores = !now.has_all() && kept.has_all();
    if (!restores && now.end[0] < now.text[0].size() && now.text[0].size() > kept.text[0].size()) {
        for (int i = 0; i < 2; i++) {
            atomic_file(log->folder + "/" + kLogNames[i] + ".cut", now.text[i]);
        }
    }
    for (int i = 0; i < 2; i++) {
        atomic_remove_stale(log->folder + "/" + kLogNames[i] + ".cut");     // left by a kill in this function
        FILE* f = i == 0 ? log->main_log : log->metrics;
        const bool lacks = now.end[i] == std::string::npos;
        const size_t end = restores ? 0 : lacks ? now.text[i].rfind('\n') + 1 : now.end[i];    // no half line
        const std::string more = restores ? kept.text[i].substr(0, kept.end[i]) : "";
        if (step > 0 && i == 0) { logger_best(log, restores ? more : now.text[i].substr(0, end)); }
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

// Removes *.cut when the run has come as far again as before it went back.
static inline void logger_forget(const std::string& folder) {
    const std::string main_log = folder + "/main.log", metrics = folder + "/metrics.jsonl";
    if (file_size(main_log.c_str()) < file_size((main_log + ".cut").c_str())) { return; }
    unlink((main_log + ".cut").c_str());
    unlink((metrics + ".cut").c_str());
}

// Called before a checkpoint's marker is written: its log lines are then on disk, too.
static inline void logger_sync(const Logger* log) {
    for (FILE* f : {log->main_log, log->metrics}) {
        if (f && file_layer.fsync(fileno(f)) != 0) {
            die("cannot write the logs in '%s': %s", log->folder.c_str(), strerror(errno));
        }
    }
}

static inline void logger_line(Logger* log, const std::string& text, const std::string& json) {
    if (log->folder.empty()) { return; }
    const std::string line = text.empty() ? "" : text + "\n";
    if (!log->main_log) {
        log->early_text += line;
        log->early_json += json + "\n";
        return;
    }
    logger_write(log, log->main_log, "main.log", line);
    logger_write(log, log->metrics, "metrics.jsonl", json + "\n");
}

// printf writes "nan" or "-nan", depending on a meaningless sign bit. This always writes "nan".
static inline std::string logger_number(const char* fmt, double x) {
    return isnan(x) ? "nan" : format(fmt, x);
}

// more: further fields for metrics.jsonl, each `, "name": value`.
static inline void logger_train(Logger* log, const TrainMetrics& m, const std::string& more = "") {
    if (!log->main_log && !log->folder.empty()) {       // the first step
        logger_open(log);
        logger_go_back(log, 0);                         // a failed start may have left lines
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

// The validation losses of a mixture's sources, by their short names; empty for data that are no mixture.
// bits: of each byte of the text; NaN: there is no tokenizer.
struct SourceLoss { std::string name; double loss, bits = NAN; };
typedef std::vector<SourceLoss> SourceLosses;

// main.log has no line of the sources, nor bits.
static inline void logger_val(Logger* log, int64_t step, double loss, const SourceLosses& sources = {},
                              double bits = NAN) {
    if (loss < log->best_val) { log->best_val = loss, log->best_step = step; }
    std::string json = format("{\"step\": %lld, \"val_loss\": ", (long long)step) + json_number(loss);
    for (size_t k = 0; k < sources.size(); k++) {
        json += (k ? ", " : ", \"val_losses\": {") + json_quote(sources[k].name) + ": ";
        json += json_number(sources[k].loss);
    }
    if (!sources.empty()) { json += "}"; }
    if (isfinite(bits)) { json += ", \"val_bpb\": " + json_number(bits); }
    logger_line(log, format("s:%lld tel:%s", (long long)step, logger_number("%.6f", loss).c_str()),
                json + "}");
}

// main.log has acc_norm, and no line of questions without a choice (LAMBADA).
static inline void logger_eval(Logger* log, int64_t step, const EvalScore& score) {
    std::string text, json = format("{\"step\": %lld", (long long)step);
    for (const EvalMeasure& m : score.measures) {
        if (!strcmp(m.name, "acc_norm")) {
            text = format("s:%lld eval:%s", (long long)step, logger_number("%.6f", m.value).c_str());
        }
        json += format(", \"eval_%s\": ", m.name) + json_number(m.value);
        json += format(", \"eval_%s_error\": ", m.name) + json_number(m.error);
    }
    logger_line(log, text, json + "}");
}

static inline void logger_run(Logger* log, const FlagTable& table, const Facts& info) {
    log->run_json = "{\n\"settings\": " + flags_json(table);
    for (const auto& item : info) {
        log->run_json += ",\n" + json_quote(item.first) + ": " + json_quote(item.second);
    }
    log->run_json += "\n}\n";
    if (log->main_log) { atomic_file(log->folder + "/run.json", log->run_json); }
}

static inline void logger_free(Logger* log) {
    if (log->main_log) { fclose(log->main_log); }       // every line was flushed and checked
    if (log->metrics) { fclose(log->metrics); }
    if (log->main_log) { logger_forget(log->folder); }
    *log = Logger();
}
