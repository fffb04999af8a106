/*
What a run reads beside its model: token shards, questions, a tokenizer and a prompt. Host only.

    RunData data;
    data_open(&data, &config);              // what the task needs; dies if it is not there
    data_check_same(data, program);         // dies if the ranks do not have the same
    surprises_print(data.prompted(), data.max_steps);
    data_print(data);                       // a run's data, batch and schedule
    data_free(&data);
*/
#pragma once

#include "../checked_files.h"       // gives: die, file_size
#include "../facts.h"               // gives: Facts
#include "../comm/comm.h"           // gives: comm, comm_check_same, DiskWait
#include "../data/dataloader.h"     // gives: DataLoader
#include "../data/evalloader.h"     // gives: EvalSet
#include "../data/tokenizer.h"      // gives: Tokenizer, TokenizerFile, tokenizer_find
#include "flags.h"                  // gives: flags_split
#include "question_sets.h"          // gives: question_files
#include "run_config.h"             // gives: run, run_task, run_validates, rank_micro_steps
#include "schedulers.h"             // gives: LrSchedule, kLrKinds
#include "samples.h"                // gives: TextTask, text_init, text_check_encodes, prompt_tokens

struct RunData {
    DataLoader train = {}, val = {};    // empty where the task does not need them
    std::vector<EvalSet> questions;
    Tokenizer tokenizer = {};           // without tokens: texts are printed as token ids
    std::vector<std::string> tokenizer_files;   // of the run's own: tokenizer.bin and its like
    std::vector<int> ends;              // tokens that end a text beside the tokenizer's
    std::vector<int> prompt;            // behind the token that begins a text; empty: no text is written
    std::string sample;                 // of the training data: shows later whether they changed
    std::vector<double> bits;           // of each validation source: see data_bits
    int64_t max_steps = 0;              // of the run: -x, or those of an epoch
    int document_end = -1;              // the token at which a document begins; -1: without --document-mask
    bool answers = false;               // chat RUN: the model has learned conversations

    LrSchedule schedule(double peak) const {
        return {run.schedule, peak, run.warmup, max_steps, run.final_fraction, run.cooldown};
    }
    size_t prompted() const { return prompt.empty() ? 0 : prompt.size() - 1; }
    TextTask text_task() const {
        return {tokenizer.bytes.empty() ? nullptr : &tokenizer, prompt, run.sample_tokens, run.tells_speed,
                answers ? run.prompt : nullptr, ends};
    }
};

static inline void data_open_shards(DataLoader* loader, const char* pattern, bool shuffle, DataShare share,
                                    int V) {
    dataloader_init(loader, pattern, run.B, run.T, shuffle, run.seed, V, share);
}

// The token that stands before each document: the tokenizer's, or that of a known vocabulary.
static inline int data_document_end(const TokenizerFile& own, int V) {
    const uint32_t id = own.named ? own.named : tokenizer_of_vocabulary(V);
    if (own.head.V > 0) { return (int)own.head.eot; }
    if (id == TOKENIZER_GPT2) { return (int)kGpt2Eot; }
    if (id == TOKENIZER_BYTES) { return 0; }
    die("--document-mask 1 needs a tokenizer, whose end-of-text token begins a document: there is no "
        "tokenizer.bin beside the model or the shards, and none for V=%d (%s)\n"
        "hint: put it there, or give --document-mask 0", V, kVocabulariesKnown);
}

static inline void data_open_tokenizer(RunData* d, int V) {
    const std::string model = run.resumed ? std::string(run.output_dir) + "/"
                            : file_size(run.model) >= 0 ? run.model : "";
    std::vector<TokensOf> reads = {{run.train_data, dataloader_path(d->train), d->train.tokenizer},
                                   {run.val_data, dataloader_path(d->val), d->val.tokenizer}};
    for (const EvalSet& set : d->questions) { reads.push_back({set.path, set.path, set.tokenizer}); }
    const TokenizerFile own = tokenizer_find(model, V, reads);
    const int tokens = (int)own.head.V;
    if (tokens > 0) {
        const std::string folder = own.file.substr(0, own.file.rfind('/') + 1);
        for (const char* name : {"tokenizer.bin", "tokenizer.json", "tokenizer_config.json",
                                 "chat_template.jinja", "generation_config.json"}) {    // dev/hf.py's names
            if (file_size((folder + name).c_str()) >= 0) { d->tokenizer_files.push_back(folder + name); }
        }
        const std::string generation = folder + "generation_config.json";
        if (run_writes_text() && file_size(generation.c_str()) >= 0) { d->ends = listed_ends(generation); }
    }
    if (model.empty() && tokens > 0 && V - tokens > tokens / 10) {
        warn("'%s' has %d tokens, the model's vocabulary %d: with -e d12,V%d it has as many",
             own.file.c_str(), tokens, V, tokens);
    }
    const bool lacks = own.named > TOKENIZER_BYTES && tokens == 0;
    if (lacks && run_writes_text() && run.prompt[0] != '\0') {
        die("--prompt needs the tokenizer.bin of %s, which is not beside its shards",
            tokenizer_name(own.named).c_str());
    }
    if (lacks && (run_writes_text() || run_task() == Task::Train)) {
        warn("there is no tokenizer.bin of %s beside its shards: texts are printed as token ids",
             tokenizer_name(own.named).c_str());
    }
    if (run.document_mask) { d->document_end = data_document_end(own, V); }
    if ((run_writes_text() || run_validates()) && !lacks) { text_init(&d->tokenizer, V, own.file); }
}

static inline void data_open_training(RunData* d, const Config& config) {
    const bool has_data = run_given("train-data") || file_size(run.train_data) >= 0;
    if (!has_data && run_given("prompt") && !run_given("max-steps")) {
        die("--prompt: without -x 0 this trains, and there are no training data '%s'\n"
            "hint: -x 0 writes a text after the prompt; -i names training data", run.train_data);
    }
    DataShare share = {comm.rank, comm.world, rank_micro_steps()};
    if (run.overfit) { share = {}; }        // all ranks have the job's first batch
    data_open_shards(&d->train, run.train_data, run.shuffle && !run.overfit, share, config.V);
    d->sample = dataloader_sample(&d->train);
    const int64_t epoch = d->train.samples_per_epoch * run.T / run.total_batch;
    d->max_steps = run_max_steps() < 0 ? std::max((int64_t)1, epoch) : run_max_steps();
    auto_of_data(config, d->max_steps);
}

static inline const std::vector<DataSource>& data_sources(const DataLoader& loader) {
    return loader.prefetch->sources;
}

// The rows that a validation reads of a source (val_rows in run_config.h), or of all sources.
static inline int64_t data_val_rows(const DataSource& source) {
    return std::min(val_rows(), source.samples_per_epoch);
}
static inline int64_t data_val_rows(const DataLoader& loader) {
    int64_t rows = 0;
    for (const DataSource& source : data_sources(loader)) { rows += data_val_rows(source); }
    return rows;
}

// What a source's validation loss is multiplied by to have bits per byte: tokens that count for each byte of
// their text, over ln 2. End of text has no bytes. NaN: there is no tokenizer.
static inline double data_bits(RunData* d, int source) {
    const Tokenizer& tok = d->tokenizer;
    DataPrefetch* p = d->val.prefetch;          // its worker has read a batch, and waits
    std::vector<int> inputs((size_t)run.T), targets((size_t)run.T);
    double counted = 0, bytes = 0;
    std::swap(p->source, source);
    for (int64_t row = 0; row < data_val_rows(p->sources[(size_t)p->source]); row++) {
        die_if(data_read_row(p, row, inputs.data(), targets.data()));
        for (int token : targets) {
            const size_t id = (size_t)token;            // -1, which does not count, is above all
            counted += token >= 0;
            if (id < tok.bytes.size() && id != tok.eot) { bytes += (double)tok.bytes[id].size(); }
        }
    }
    std::swap(p->source, source);
    return bytes > 0 ? counted / bytes / log(2.0) : NAN;
}

// A model that is trained on conversations is one that chats: config->chat.
static inline void data_open(RunData* d, Config* config) {
    const int V = config->V;
    const bool trains = run_task() == Task::Train;
    if (trains) { data_open_training(d, *config); }
    if (run_validates()) { data_open_shards(&d->val, run.val_data, false, {comm.rank, comm.world}, V); }
    const char* shared = trains && run_validates() ? dataloader_shared_file(&d->train, &d->val) : nullptr;
    if (shared) {
        die("'%s' is both training data (-i) and validation data (-j)\nhint: -v 0 trains without validation",
            shared);
    }
    for (size_t k = 0; run_validates() && k < data_sources(d->val).size(); k++) {
        const DataSource& source = data_sources(d->val)[k];
        dataloader_seek(&d->val, 0, (int)k);
        if (dataloader_counted(&d->val, 0, data_val_rows(source)) > 0) { continue; }
        die("the masks of '%s' count no token of the rows that are validated on\nhint: -m N takes more rows",
            source.pattern.c_str());
    }
    if (d->train.chat != 0) {
        config->chat = d->train.chat;
        auto_set("document-mask", 1, "conversations");      // which may be short
    }
    if (d->train.row_tokens != 0 && d->train.row_tokens != run.T) {
        warn("the conversations fill rows of %d tokens, and -t %d cuts them\n"
             "hint: get.py answers --row-tokens %d", d->train.row_tokens, run.T, run.T);
    }
    const std::string error = config_error(*config);
    if (!error.empty()) { die("'%s': %s", run.train_data, error.c_str()); }
    if (run.evaluate) {
        for (const std::string& path : question_files()) {
            d->questions.emplace_back();
            evalset_init(&d->questions.back(), path.c_str(), V, run.B, run.T);
        }
    }
    if (run.serves) { return; }             // requests have token ids
    data_open_tokenizer(d, V);
    for (size_t k = 0; run_validates() && k < data_sources(d->val).size(); k++) {
        d->bits.push_back(d->tokenizer.bytes.empty() ? NAN : data_bits(d, (int)k));
    }
    if (!run_writes_text()) { return; }
    const Tokenizer* tokenizer = d->text_task().tokenizer;
    if (run.chat) { text_check_encodes(tokenizer, "chat", V); }
    d->answers = run.chat && config->chat != 0;
    d->prompt = prompt_tokens(tokenizer, d->answers ? "" : run.prompt, V, run.T);
}

// Ranks that differ in program, data or flags would train nonsense, or wait for each other for ever.
static inline void data_check_same(const RunData& d, const std::string& program) {
    if (comm.world == 1) { return; }
    Facts facts = {{"the program", program}, {"training data", dataloader_facts(&d.train)},
                   {"a sample of the training data", d.sample},
                   {"validation data", dataloader_facts(&d.val)},
                   {"a sample of the validation data", dataloader_sample(&d.val)}};
    for (const EvalSet& set : d.questions) { facts.push_back({"evaluation data", evalset_facts(&set)}); }
    for (const auto& fact : flag_facts()) { facts.push_back(fact); }
    comm_check_same(facts);
}

static inline void data_print(const RunData& d) {
    const int64_t rows = d.train.samples_per_epoch;
    const char* each = comm.world > 1 ? "on each rank " : "";
    double most = 0.0;                      // epochs of a source
    const std::string counted = !d.train.masked ? "" :
        format(", of which %lld count", (long long)d.train.counted);
    say("data: %lld training tokens (%lld rows of %d)%s\n"
        "batch: %lld tokens a step; %s%d rows at once, micro-steps a step: %d\n"
        "schedule: %lld steps, %.3g epochs; lr %g, %s, warm-up %lld steps\n",
        (long long)d.train.tokens, (long long)rows, run.T, counted.c_str(), (long long)run.total_batch, each,
        run.B, rank_micro_steps(), (long long)d.max_steps,
        (double)d.max_steps * (double)run.total_batch / ((double)rows * run.T), run.lr,
        flags_split(kLrKinds, '|')[(size_t)run.schedule].c_str(), (long long)run.warmup);
    for (const DataSource& source : data_sources(d.train)) {
        const double epochs = source.share * (double)d.max_steps * (double)run.total_batch /
                              ((double)source.samples_per_epoch * run.T);
        most = std::max(most, epochs);
        if (source.share == 1.0) { continue; }
        say("source: %.4g%% of the rows, %.3g epochs of %lld rows: %s\n", 100 * source.share, epochs,
            (long long)source.samples_per_epoch, shown(source.pattern).c_str());
    }
    if (most > 4.0 && !run.overfit && !flags_lettered(kFlags)) {
        warn("%.3g epochs: after some four a text is learned by heart, and the validation loss rises\n"
             "hint: fewer steps (--max-steps %.0f), or more text", most,
             floor(4.0 * (double)d.max_steps / most));
    }
    fflush(stdout);                         // the first step may take long
}

// Targets that count in the job's next step. Every rank finds the same number by itself.
static inline int64_t data_counted_targets(const DataLoader& loader) {
    const int64_t rows = run.total_batch / run.T;
    if (run.overfit) { return dataloader_counted(&loader, 0, run.B) * (rows / run.B); }
    return dataloader_counted(&loader, loader.position, rows);
}

// The next batch. A stalled disk must not end the job.
static inline void data_next(DataLoader* loader) {
    DiskWait disk;
    dataloader_next(loader);
}

static inline void data_free(RunData* d) {
    dataloader_free(&d->train);
    dataloader_free(&d->val);
    tokenizer_free(&d->tokenizer);
}
