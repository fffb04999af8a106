/*
Resuming: finds the checkpoint of a folder to resume from, and reads its files. Host only.

    std::set<int64_t> bad;                                          // steps found damaged, to be skipped
    Checkpoint c = checkpoint_find(folder, checkpoint_steps(folder, true), &bad);   // all ranks get the same
    const Config config = facts_config(c.facts);                    // c.step is -1 if there is none
    const PieceIndex index = checkpoint_index(c);
    const StateRow row = state_row("m.qkvw.3", "f32", 2304, 768, begin, count);
    std::string error = checkpoint_read(c, index, row, &data);
    if (checkpoint_refused(c.step, error)) { ... }                  // has any rank found a fault?

config_facts and update_facts write facts; facts_config and facts_update read them.
*/
#pragma once

#include <type_traits>  // gives: std::remove_reference_t, std::is_same

#include "../checked_files.h"       // gives: die, format, shown, file_size
#include "../facts.h"               // gives: Facts, facts_find
#include "../comm/comm.h"           // gives: comm, comm_all_gather, comm_broadcast, comm_shorten, warn
#include "../model/model_config.h"  // gives: Config, config_error
#include "../numbers.h"             // gives: kLargestCount
#include "../ops/op_types.h"        // gives: UpdateState, update_state_fields
#include "checkpoints.h"            // gives: checkpoint_check, checkpoint_model, model_file_error
#include "state_file.h"             // gives: StateFile, state_open, state_read

// ---- facts ----

static inline void config_facts(const Config& c, Facts* facts) {
    if (c.chat) { facts->push_back({"chat template", std::to_string(c.chat)}); }
    if (c.is_llama()) { return facts->push_back({"family", llama_text(c)}); }
    // a program without windows finds no model in a state with windows
    facts->push_back({c.window > 0 ? "windowed" : c.is_gpt2() ? "model" : "variant",
                      format("%d %d %d %d %d %d", c.maxT, c.V, c.Vp, c.L, c.NH, c.C)});
    if (!c.is_gpt2()) { facts->push_back({"block and norm", format("%d %d", (int)c.block, (int)c.norm)}); }
    if (c.window > 0) { facts->push_back({"window", std::to_string(c.window)}); }
    if (c.window > 0) { facts->push_back({"pattern", c.pattern}); }
}

static inline Config facts_config(const Facts& facts) {
    Config c = {};
    if (facts_find(facts, "chat template")) {
        c.chat = (int)fact_number(facts, "chat template", 1, kChatTemplates);
    }
    if (const std::string* text = facts_find(facts, "family")) {
        const int chat = c.chat;
        c = descriptor_config(text->c_str()), c.chat = chat;
        return c;
    }
    const std::string *variant = facts_find(facts, "variant"), *kinds = facts_find(facts, "block and norm");
    const std::string *windowed = facts_find(facts, "windowed"), *pattern = facts_find(facts, "pattern");
    const std::string* text = windowed ? windowed : variant ? variant : facts_find(facts, "model");
    if (windowed && pattern) { c.window = (int)fact_number(facts, "window", 1, kMaxT), c.pattern = *pattern; }
    int block = 0, norm = 0;
    if (windowed && !pattern) { text = nullptr; }
    if ((variant || kinds) && (!kinds || sscanf(kinds->c_str(), "%d %d", &block, &norm) != 2)) {
        text = nullptr;
    }
    c.block = (Block)block, c.norm = (NormKind)norm;
    if (!text || sscanf(text->c_str(), "%d %d %d %d %d %d", &c.maxT, &c.V, &c.Vp, &c.L, &c.NH, &c.C) != 6) {
        die("the state to resume from does not say which model it is of");
    }
    const std::string error = config_error(c);
    if (!error.empty()) { die("the state to resume from is of an impossible model: %s", error.c_str()); }
    return c;
}

static inline void update_facts(const UpdateState& update, Facts* facts) {
    update_state_fields(update, [&](const char* name, auto* values, int count) {
        std::string text;
        for (int i = 0; i < count; i++) { text += format(i ? " %.17g" : "%.17g", (double)values[i]); }
        facts->push_back({std::string("update.") + name, text});
    });
}

// Returns the error, or "".
static inline std::string facts_update(const Facts& facts, UpdateState* update) {
    std::string missing;
    update_state_fields(*update, [&](const char* field, auto* values, int count) {
        const std::string* text = facts_find(facts, std::string("update.") + field);
        const char* at = text ? text->c_str() : "";
        for (int i = 0; i < count; i++) {
            typedef std::remove_reference_t<decltype(values[0])> Number;
            char* end;
            const double value = strtod(at, &end);
            const double most = sizeof(Number) == sizeof(int) ? INT_MAX : (double)kLargestCount;
            const bool fits = std::is_same<Number, float>::value || (value >= 0 && value <= most);
            if (end == at || !fits) { missing = field; } else { values[i] = (Number)value; }
            at = end;
        }
    });
    return missing.empty() ? "" : "the files do not say update." + missing + ", or not as it can be";
}

// ---- which one ----

struct Checkpoint {
    int64_t step = -1;                  // -1: there is none
    std::vector<StateFile> files;       // of all ranks that wrote it
    Facts facts;
};

// True if any rank found an error in the checkpoint. The first such rank prints its error.
static inline bool checkpoint_refused(int64_t step, const std::string& error) {
    std::vector<char> faults((size_t)comm.world, !error.empty());
    comm_all_gather(faults.data(), 1);
    const int first = (int)(std::find(faults.begin(), faults.end(), 1) - faults.begin());
    if (first == comm.rank) {
        const std::string who = comm.world > 1 ? format(" by rank %d", first) : "";
        fprintf(stderr, "warning: the checkpoint of step %lld is skipped%s: %s\n", (long long)step,
                who.c_str(), shown(error).c_str());
    }
    return first < comm.world;
}

// The last of rank 0's `steps` whose checkpoint passes the checks on all ranks, or step -1. Adds the refused
// steps to *bad.
static inline Checkpoint checkpoint_find(const std::string& folder, std::vector<int64_t> steps,
                                         std::set<int64_t>* bad) {
    for (;;) {
        Checkpoint found;
        while (!steps.empty() && bad->count(steps.back())) { steps.pop_back(); }
        int64_t step = steps.empty() ? -1 : steps.back();
        comm_broadcast(&step, sizeof(step));
        if (step < 0) { return found; }
        std::vector<std::string> paths;
        std::string error = checkpoint_check(folder, step, &paths);
        for (size_t k = 0; k < paths.size() && error.empty(); k++) {
            found.files.push_back(StateFile());
            error = state_open(&found.files.back(), paths[k]);
            if (!error.empty()) { error = paths[k].substr(folder.size() + 1) + " " + error; }
        }
        uint64_t sum;
        if (error.empty() && comm.rank == 0) {
            const std::string path = checkpoint_model(folder, step);
            error = model_file_error(path, &sum);
            if (!error.empty()) { error = path.substr(folder.size() + 1) + " " + error; }
        }
        if (!checkpoint_refused(step, error)) {
            found.step = step;
            found.facts = found.files[0].facts;
            return found;
        }
        bad->insert(step);
    }
}

// Loads checkpoint *c, which checkpoint_find found among `steps`: load(*c) returns an error or "". If
// one of its tensors is damaged, the checkpoint before is loaded. All ranks call this and load the same one;
// c->step is -1 if none is left.
template <class Load>
static inline void checkpoint_resume(Checkpoint* c, const std::string& folder,
                                     const std::vector<int64_t>& steps, std::set<int64_t>* bad, Load load) {
    while (c->step >= 0) {
        const int64_t step = c->step;
        if (!checkpoint_refused(step, load(*c))) { return; }    // a rank reads its parts only
        bad->insert(step);
        *c = checkpoint_find(folder, steps, bad);
    }
}

// A checkpoint that has lost its DONE and was found to be whole is marked again. False: it has its DONE.
static inline bool checkpoint_mark_again(const std::string& folder, const Checkpoint& c) {
    if (file_size(checkpoint_marker(folder, c.step).c_str()) >= 0) { return false; }
    std::vector<std::string> states;
    for (const StateFile& file : c.files) { states.push_back(file.path); }
    checkpoint_done(folder, c.step, states);
    return true;
}

// Would the steps to come be those of the run that began in this folder? Both have facts of the same names.
static inline void resumed_check(const Facts& began, const Facts& now, const std::string& folder) {
    for (const auto& fact : now) {
        const std::string* then = facts_find(began, fact.first);
        if (!then || *then == fact.second) { continue; }
        if (fact.first == "training data") {
            die("-i: the training data are not those that the run in -o %s began with: now %s, then %s",
                folder.c_str(), comm_shorten(fact.second, *then).c_str(),
                comm_shorten(*then, fact.second).c_str());
        }
        if (fact.first == "training data sample") {
            die("-i: the training data are not those that the run in -o %s began with: their files have the "
                "same names and sizes, but other tokens\nhint: -i names another place for them",
                folder.c_str());
        }
        warn("the run goes on with another %s than before (now %s, then %s): its bits may differ",
             fact.first.c_str(), fact.second.c_str(), then->c_str());
    }
}

// ---- its tensors ----

typedef std::multimap<std::string, std::pair<size_t, size_t>> PieceIndex;      // name -> file, row

static inline PieceIndex checkpoint_index(const Checkpoint& c) {
    PieceIndex index;
    for (size_t f = 0; f < c.files.size(); f++) {
        const std::vector<StateRow>& rows = c.files[f].rows;
        for (size_t r = 0; r < rows.size(); r++) { index.insert({rows[r].name, {f, r}}); }
    }
    return index;
}

// Reads the piece of a tensor that `wanted` describes from the pieces in the files. Returns the error, or "".
static inline std::string checkpoint_read(const Checkpoint& c, const PieceIndex& index,
                                          const StateRow& wanted, std::vector<char>* to) {
    const size_t elem = state_type_bytes(wanted.type), end = wanted.begin + wanted.count;
    size_t begin = wanted.begin;
    std::vector<char> piece;
    std::vector<std::pair<size_t, size_t>> found;       // parts, [from, until)
    to->resize(state_row_bytes(wanted));
    const auto range = index.equal_range(wanted.name);
    for (auto it = range.first; it != range.second; ++it) {
        const StateFile& file = c.files[it->second.first];
        const StateRow& row = file.rows[it->second.second];
        const std::string file_name = file.path.substr(file.path.rfind('/') + 1);
        if (strcmp(row.type, wanted.type) != 0 || row.rows != wanted.rows || row.cols != wanted.cols) {
            auto text = [](const StateRow& r) {
                return format("%s of %llu x %llu", r.type, (unsigned long long)r.rows,
                              (unsigned long long)r.cols);
            };
            return format("%s has %s as %s, not %s", file_name.c_str(), row.name, text(row).c_str(),
                          text(wanted).c_str());
        }
        const size_t from = std::max(begin, (size_t)row.begin);
        const size_t until = std::min(end, (size_t)(row.begin + row.count));
        if (from >= until) { continue; }
        piece.resize(state_row_bytes(row));
        const std::string error = state_read(&file, it->second.second, piece.data());
        if (!error.empty()) { return file_name + " " + error; }
        memcpy(to->data() + (from - begin) * elem, piece.data() + (from - row.begin) * elem,
               (until - from) * elem);
        found.push_back({from, until});
    }
    std::sort(found.begin(), found.end());
    for (const auto& part : found) {
        if (part.first < begin) { return format("the files have elements of %s twice", wanted.name); }
        if (part.first == begin) { begin = part.second; }
    }
    return begin == end ? "" : std::string("the files do not have all of ") + wanted.name;
}
