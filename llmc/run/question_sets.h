/*
eval RUN --all: every set of questions that is there, beside chance and what GPT-2 has. Host only.

    for (const std::string& path : question_files()) { ... }    // or the one set of --eval-data
    question_row("dev/data/piqa/piqa_val.bin", score);          // a line of the table; keeps its JSON
    printf("%s}\n", question_json.c_str());                      // with --verbose -1, which has no table
*/
#pragma once

#include "../data/evalloader.h"     // gives: EvalScore
#include "../files/json.h"          // gives: json_quote, json_number
#include "run_config.h"             // gives: run, run_given, say

// What a set is compared by, chance, and the score of OpenAI's 124M as somebody published it; NAN: no such
// figure was found. lm-eval's `acc` is ours, and llm.c's HellaSwag and MMLU are, too (docs/evaluate.md).
struct QuestionSet { const char *name, *file, *measure; double chance, gpt2; const char* source; };
static const QuestionSet kQuestionSets[] = {
    {"hellaswag", "/hellaswag_val.bin", "acc_norm", 0.25, 0.2955, "llm.c, dev/data/hellaswag.py"},
    {"mmlu", "/mmlu_test.bin", "acc_norm", 0.25, 0.2721, "llm.c, dev/data/mmlu.py"},
    {"arc-easy", "/arc_easy_test.bin", "acc", 0.25, NAN, "none was found"},
    {"piqa", "/piqa_val.bin", "acc", 0.5, 0.6289, "lm-eval, huggingface.co/crumb/gpt2023"},
    {"winogrande", "/winogrande_val.bin", "acc", 0.5, 0.5161, "lm-eval, huggingface.co/crumb/gpt2023"},
    {"lambada", "/lambada_test.bin", "acc", 0.0, 0.3256, "lm-eval, its issue 2159"}};

static inline std::vector<std::string> question_files() {
    if (!run.all_questions) { return {run.eval_data}; }
    const std::string folder = run_given("eval-data") ? run.eval_data : "dev/data";
    if (file_size(folder.c_str()) >= 0) {
        die("--all takes a folder of sets, and --eval-data %s is a file\n"
            "hint: without --all, -h 1 --eval-data %s answers it", folder.c_str(), folder.c_str());
    }
    std::vector<std::string> files;
    for (const QuestionSet& set : kQuestionSets) {
        const std::string path = folder + "/" + set.name + set.file;
        if (file_size(path.c_str()) >= 0) { files.push_back(path); }
    }
    if (files.empty()) {
        die("--all: there are no questions in '%s'\nhint: python3 dev/data/get.py hellaswag makes some; "
            "--eval-data FOLDER names another place", folder.c_str());
    }
    return files;
}

static std::string question_json;       // of all rows so far
static inline void question_row(const std::string& path, const EvalScore& score) {
    const char* row = "%-10s  %-8s  %-17s  %-6s  %-6s  %s\n";
    if (question_json.empty()) { say(row, "questions", "measure", "score", "chance", "GPT-2", "by"); }
    const QuestionSet* set = kQuestionSets;
    while (path.find(std::string(set->name) + set->file) == std::string::npos) { set++; }
    question_json += (question_json.empty() ? "{" : ", ") + json_quote(set->name) + ": {";
    for (const EvalMeasure& m : score.measures) {
        const std::string value = json_number(m.value), error = json_number(m.error);
        question_json += format("\"%s\": %s, \"%s_error\": %s, ", m.name, value.c_str(), m.name,
                                error.c_str());
        if (strcmp(m.name, set->measure) != 0) { continue; }
        say(row, set->name, m.name, format("%.4f +- %.4f", m.value, m.error).c_str(),
            format("%g", set->chance).c_str(), isnan(set->gpt2) ? "-" : format("%.4f", set->gpt2).c_str(),
            set->source);
    }
    question_json += format("\"measure\": \"%s\", \"chance\": %g, \"gpt2\": %s, \"gpt2_by\": %s}",
                            set->measure, set->chance, json_number(set->gpt2).c_str(),
                            json_quote(set->source).c_str());
    fflush(stdout);
}
