/*
A run's folder: the model to read (-e FOLDER), the run to resume (-y 1), the place to write (-o). Host only.

    launch_resume();                                    // -y 1: takes --gpus from run.json
    Checkpoint c = find_resumed(&bad, build);           // -y 1: the last checkpoint, and the run's settings
    if (model_is_folder()) { folder_resolve(); }        // -e FOLDER: run.model becomes its newest model
    run_folder_check(run.output_dir);                   // dies if the run cannot write there
    folder_taken_up(c, retention, max_steps);           // -y 1: says where the run goes on, and tidies
    print_folder(argv[0], stopped, chats);              // a run's last lines: how to resume it
*/
#pragma once

#include "../checked_files.h"       // gives: die, shown, file_size, file_text
#include "../facts.h"               // gives: Facts, facts_find, fact_number
#include "../numbers.h"             // gives: parse_int
#include "../comm/comm.h"           // gives: comm, comm_broadcast, comm_foreign, warn
#include "../files/checkpoints.h"   // gives: checkpoint_model, checkpoint_retain, Retention
#include "../files/json.h"          // gives: json_file_read
#include "../files/resume.h"        // gives: Checkpoint, checkpoint_find, checkpoint_mark_again
#include "../model/model_config.h"  // gives: weights_hint
#include "run_config.h"             // gives: run, settings, kFlags, say, settings_known

// ---- -e FOLDER: a run's folder ----
// It stands for its newest undamaged model. With -x 0, its run.json gives the settings. The states hold them,
// too, but states are large, and users delete them first.

// "d12" is a descriptor even if there is a folder d12, which is then written ./d12.
static inline bool reads_as_descriptor(const char* text) {
    int64_t n;
    return !strchr(text, '/') && ((text[0] == 'd' && parse_int(text + 1, &n)) ||
                                  strncmp(text, "gpt3:", 5) == 0 || strchr(text, ','));
}

static inline bool model_is_folder() {
    struct stat st;
    return !reads_as_descriptor(run.model) && path_stat(run.model, &st) && S_ISDIR(st.st_mode);
}

// A folder's newest undamaged model, with a marker if possible. Rank 0 checks the checksums.
static inline std::string newest_model(const std::string& folder) {
    std::vector<std::pair<bool, int64_t>> models;           // has a marker; step
    for (const std::string& name : folder_names(folder)) {
        const int64_t step = checkpoint_step(name, "model_", ".bin");
        if (step < 0 || file_size((folder + "/" + name).c_str()) < 0) { continue; }
        models.push_back({file_size(checkpoint_marker(folder, step).c_str()) >= 0, step});
    }
    std::sort(models.begin(), models.end());
    int64_t newest = -1;
    std::vector<std::string> faults;
    for (size_t i = models.size(); comm.rank == 0 && newest < 0 && i-- > 0;) {
        const std::string path = checkpoint_model(folder, models[i].second);
        uint64_t sum;
        const std::string error = model_file_error(path, &sum);
        if (error.empty()) { newest = models[i].second; }
        else { faults.push_back(shown(path) + " " + error); }
    }
    comm_broadcast(&newest, sizeof(newest));
    if (newest < 0 && models.empty() && file_size((folder + "/config.json").c_str()) >= 0) {
        die("-e %s: this is a folder of transformers, which is imported once\nhint: %s", folder.c_str(),
            weights_hint(shown(folder)).c_str());
    }
    if (newest < 0) {
        const bool is_run = file_size((folder + "/run.json").c_str()) >= 0;
        die("-e %s: there is no %smodel_*.bin in this folder%s\nhint: %s", folder.c_str(),
            models.empty() ? "" : "whole ", faults.empty() ? "" : (": " + faults[0]).c_str(),
            is_run && models.empty()
            ? "this run has saved no model yet: it saves every -n steps, at its end, and on Ctrl-C"
            : "-e takes a folder of a run or by dev/hf.py import, a model_*.bin, or a name such as d12");
    }
    for (const std::string& fault : faults) { warn("passed over: %s", fault.c_str()); }
    return checkpoint_model(folder, newest);
}

// The end of a hint: the runs beside a folder, the first few by the likeness of their names.
static inline std::string runs_beside(const std::string& folder) {
    const std::string path = folder.substr(0, folder.find_last_not_of('/') + 1);
    const size_t slash = path.rfind('/') + 1;           // npos + 1 is 0
    const std::string parent = path.substr(0, slash), name = path.substr(slash);
    if (access((parent + ".").c_str(), R_OK) != 0) { return ""; }       // it cannot be listed
    std::multimap<int, std::string> runs;
    for (const std::string& other : folder_names(parent + ".")) {
        const bool is_run = access((parent + other + "/run.json").c_str(), F_OK) == 0;
        if (is_run && other[0] != '.') { runs.insert({flags_distance(name, other), other}); }
    }
    std::string names;
    for (const auto& it : runs) {
        if (names.size() < 80) { names += (names.empty() ? "; runs beside it: " : ", ") + shown(it.second); }
    }
    return names;
}

static inline bool is_safetensors(const std::string& text) {
    return text.find(".safetensors") != std::string::npos;
}

static inline bool model_is_file(const std::string& text) {
    return file_size(text.c_str()) >= 0 || text.find('/') != std::string::npos ||
           text.find(".bin") != std::string::npos || is_safetensors(text);
}

// Dies if -e names a file that is not there, or one of transformers, and says where weights come from.
static inline void model_file_check(const std::string& path) {
    if (is_safetensors(path)) {
        const size_t slash = path.rfind('/');
        die("-e %s: this is a file of transformers, which is imported once\nhint: %s", shown(path).c_str(),
            weights_hint(slash == std::string::npos ? "FOLDER" : shown(path.substr(0, slash))).c_str());
    }
    if (access(path.c_str(), F_OK) == 0 || errno != ENOENT) { return; }     // opening it says what is wrong
    const std::string name = path.substr(path.rfind('/') + 1);
    const std::string owner = path.substr(0, path.find('/'));
    const bool is_file = name.find(".bin") != std::string::npos;
    const bool is_repository = path == owner + "/" + name && !is_file && !strchr("./~-", path[0]) &&
                               access(owner.c_str(), F_OK) != 0;
    die("cannot open '%s': %s\nhint: %s", path.c_str(), strerror(ENOENT),
        is_repository ? weights_hint(path).c_str()
        : name.rfind("gpt2_", 0) == 0 ? (weights_hint("gpt2") + "; or llm.c's starter pack has it").c_str()
        : ("-e takes a model_*.bin, a folder of a run or by dev/hf.py import, or a descriptor such as d12" +
           runs_beside(path)).c_str());
}

// Sets flags that are not given from run.json: those that an evaluation needs, or, for a run that begins
// again, or one like it, all but FLAG_NOW. Settings that the run left open are left open again. False: no
// run.json.
enum class Take { Evaluation, Again, Like };
static inline bool settings_take(const std::string& folder, Take what) {
    static std::vector<std::string> texts(kFlags.size());   // static: the flags keep pointing to these texts
    const std::set<std::string> needed = {"train-data", "val-data", "sequence-length", "micro-batch",
                                          "val-batches", "document-mask"};
    const std::string path = folder + "/run.json";
    if (file_size(path.c_str()) < 0) { return false; }
    Facts values;
    const std::string error = json_file_read(path, &values);
    if (!error.empty()) {
        die("'%s' %s\nhint: %s", path.c_str(), error.c_str(),
            what == Take::Again ? "remove it, and the run begins with the flags that are given"
                                : "-e with one of this folder's model_*.bin does without it");
    }
    const bool all = what != Take::Evaluation;
    if (all) { settings_known(&values, "settings.", folder.c_str()); }
    const std::string *start = facts_find(values, "started in"), *open = facts_find(values, "left open");
    const std::vector<std::string> left_open = flags_split(open ? *open : "", ' ');
    for (size_t i = 0; i < kFlags.size(); i++) {
        const Flag& flag = kFlags[i];
        const std::string name = flag.name, *value = facts_find(values, "settings." + name);
        const bool was_open = std::count(left_open.begin(), left_open.end(), name) > 0;
        const bool taken = all ? flag.resume != FLAG_NOW && !was_open : needed.count(name) > 0;
        if (int64_t n; name == "micro-batch" && value && parse_int(*value, &n) && n >= 1 && n <= flag.max) {
            settings.folder_B = (int)n;
        }
        if (flag.given || !value || !taken) { continue; }
        const bool is_data = std::count(std::begin(kDataFlags), std::end(kDataFlags), name) > 0;
        const bool is_file = name == "model" && model_is_file(*value);
        texts[i] = is_data ? data_from_start(*value, start) : is_file ? from_start(*value, start) : *value;
        if (flag.type == FLAG_BOOL) { texts[i] = *value == "true" ? "1" : "0"; }
        flags_set(&flag, texts[i].c_str());
        const bool differs = flags_text(&flag) != flag.def;
        if (what == Take::Again && differs) { flag.given = "run.json"; }
        if (what == Take::Like && differs) { flag.from = "like " + shown(folder); }
    }
    return true;
}

// --like RUN, or one of its models.
static inline void like_take() {
    if (!*run.like) { return; }
    const std::string path = run.like, name = path.substr(path.rfind('/') + 1);     // npos + 1 is 0
    const bool is_file = file_size(path.c_str()) >= 0;
    const bool is_model = is_file && checkpoint_step(name, "model_", ".bin") >= 0;
    const std::string folder = !is_model ? path : name == path ? "." : path.substr(0, path.rfind('/'));
    if (settings_take(folder, Take::Like)) { return; }
    die("--like %s: there is no run.json %s\n"
        "hint: --like takes the folder of a run, or a model_*.bin there%s", run.like,
        is_model ? "beside this model" : is_file ? "in it: it is a file" : "in this folder",
        runs_beside(folder).c_str());
}

static inline void folder_resolve() {
    static std::string path;                                // static: run.model keeps pointing to it
    std::string folder = run.model;
    while (folder.size() > 1 && folder.back() == '/') { folder.pop_back(); }
    struct stat from, to;
    if (run.output_dir[0] != '\0' && !run.resume && path_stat(folder, &from) &&
        path_stat(run.output_dir, &to) && from.st_dev == to.st_dev && from.st_ino == to.st_ino) {
        die("-e %s is the folder of -o, too: a new run would be mixed with what is there\n"
            "hint: -y 1 -o %s, without -e, goes on with that run; or choose another folder with -o",
            folder.c_str(), folder.c_str());
    }
    path = newest_model(folder);
    settings.model = path.c_str();
    const bool is_imported = file_size((folder + "/source.json").c_str()) >= 0;     // by dev/hf.py import
    if (!is_imported && run_task() != Task::Train && !settings_take(folder, Take::Evaluation)) {
        warn("%s/run.json is not there: -j, -t, -b and -m are not the run's, but as given or as --help says",
             shown(folder).c_str());
    }
}

// What run.json says. Nothing if it is missing or damaged: a run that goes on does without.
static inline Facts run_json(const std::string& folder) {
    Facts values;
    const std::string path = folder + "/run.json";
    if (file_size(path.c_str()) < 0 || !json_file_read(path, &values).empty()) { values.clear(); }
    return values;
}

// Two texts have pairs KEY:CHOICE, as gemm_algorithms gives them: has a key of both another choice?
static inline bool choices_differ(const std::string& now, const std::string& then) {
    bool differ = false;
    for (const std::string& pair : flags_split(now, ' ')) {
        const size_t at = then.find(pair.substr(0, pair.find(':') + 1));
        differ = differ || (at != std::string::npos && then.compare(at, pair.size(), pair) != 0);
    }
    return differ;
}

// -y 1: takes --gpus from run.json, unless a flag or a scheduler determines the ranks.
static inline void launch_resume() {
    const std::string folder = run.output_dir;
    const CommForeign f = comm_foreign();
    bool is_open = run.resume && !folder.empty() && f.name.empty() && f.wrong.empty();
    for (const char* name : {"gpus", "process-init", "process-server", "process-folder", "processes",
                             "process-rank", "gpus-per-node"}) {
        is_open = is_open && !run_given(name);
    }
    const Facts values = is_open ? run_json(folder) : Facts();
    const std::string* gpus = facts_find(values, "settings.gpus");
    if (!gpus) { return; }
    flags_set(flags_find(kFlags, "--gpus"), gpus->c_str());
    settings.own_launch = run.comm.gpus > 1;
}

// What rank 0 finds counts.
static inline std::vector<int64_t> resumable_steps() {
    return comm.rank == 0 ? checkpoint_steps(run.output_dir, true) : std::vector<int64_t>();
}

// -y 1: the last checkpoint of the run in -o, and the settings that it began with. Where there is none, the
// run begins, again if it has a run.json; but not over checkpoints that only cannot be read.
static inline Checkpoint find_resumed(std::set<int64_t>* bad, const Build& build) {
    const bool resumes = run.resume && run.output_dir[0] != '\0';
    Checkpoint c = resumes ? checkpoint_find(run.output_dir, resumable_steps(), bad) : Checkpoint();
    if (c.step < 0 && !bad->empty()) {
        die("-o %s: none of its checkpoints can be used\n"
            "hint: choose another folder; -e takes a model_*.bin of this one", run.output_dir);
    }
    if (c.step >= 0) { settings_resume(c.facts, facts_config(c.facts), build); return c; }
    settings.again = resumes && settings_take(run.output_dir, Take::Again);
    if (!run.again) { like_take(); }
    settings_keep();
    return c;
}

// ---- -o FOLDER ----

// Does main.log have the line of a step? The leftovers of a failed start are no run.
static inline bool holds_run(const std::string& main_log) {
    return file_size(main_log.c_str()) >= 0 && file_text(main_log).find(" trl:") != std::string::npos;
}

// Dies before anything is computed if -o cannot be used. The folder's files are made after the first step.
static inline void run_folder_check(const std::string& folder) {
    for (const char* name : {"/main.log", "/metrics.jsonl", "/run.json"}) {
        struct stat st;
        if (path_stat(folder + name, &st) && !S_ISREG(st.st_mode)) {
            die("'%s' is not a regular file\nhint: choose another folder with -o",
                (folder + name).c_str());
        }
    }
    const bool holds_checkpoint = !checkpoint_steps(folder, true).empty();
    if (!run.resume && (holds_checkpoint || holds_run(folder + "/main.log"))) {
        die("-o %s already holds a run (%s)\nhint: -y 1 goes on with it; or choose another folder",
            folder.c_str(), holds_checkpoint ? "its checkpoints" : "main.log");
    }
    if (!run.resumed && run.resume) {
        if (checkpoint_has_models(folder)) {
            die("-o %s holds models of a run, but no state_*.bin to go on from\n"
                "hint: choose another folder; -e takes a model_*.bin of this one", folder.c_str());
        }
        // what a new run would be; flags of this start alone do not say that
        const bool is_described = std::any_of(kFlags.begin(), kFlags.end(), [](const Flag& flag) {
            return flag.given && (flag.resume != FLAG_NOW || flag.where == &settings.like);
        });
        if (run.again || holds_run(folder + "/main.log")) {
            warn("the run in -o %s has no checkpoint: it begins anew%s", folder.c_str(),
                 run.again ? ", with the settings in its run.json where no flag says otherwise" : "");
        } else if (is_described) {
            say("-y 1: there is no run in %s, so a new one begins\n", shown(folder).c_str());
        } else {
            die("-o %s: there is no run to go on with\nhint: a new one wants its flags, too, such as -i%s",
                folder.c_str(), runs_beside(folder).c_str());
        }
    }
    const char* last = "/state_1000000000000000_00000.bin.4194304.2147483647.part";
    if (folder.size() + strlen(last) >= PATH_MAX) {
        die("-o %s: a path of %zu bytes leaves no room for its files' names: at most %zu\n"
            "hint: choose a shorter path", flags_show(folder).c_str(), folder.size(),
            PATH_MAX - 1 - strlen(last));
    }
    std::string there = folder;             // the nearest existing folder, from -o upwards
    struct stat st;
    while (stat(there.c_str(), &st) != 0) {
        if (errno != ENOENT) {
            die("cannot create the folder '%s': %s", folder.c_str(), strerror(errno));
        }
        const size_t slash = there.rfind('/');
        there = slash == std::string::npos ? "." : slash == 0 ? "/" : there.substr(0, slash);
    }
    if (!S_ISDIR(st.st_mode)) { die("'%s' is not a folder", there.c_str()); }
    if (access(there.c_str(), W_OK | X_OK) != 0) {
        die("the folder '%s' is not writable: %s", there.c_str(), strerror(errno));
    }
}

// The text as one word of a shell command.
static inline std::string shell_quoted(const std::string& text) {
    bool plain = !text.empty();
    for (char c : text) { plain = plain && (isalnum((unsigned char)c) || strchr("/._-+,:@%", c)); }
    if (plain) { return text; }
    // Control characters are written as \012 in $'...'.
    const bool escapes = shown(text) != text;
    std::string quoted = escapes ? "$'" : "'";
    for (char c : text) {
        const bool harmless = c >= ' ' && c < 127 && c != '\'' && c != '\\';
        if (escapes) { quoted += harmless ? std::string(1, c) : format("\\%03o", (unsigned char)c); }
        else { quoted += c == '\'' ? "'\\''" : std::string(1, c); }
    }
    return quoted + "'";
}

// A run of max_steps goes on from checkpoint c: says so. Rank 0 tidies the folder, which a kill may have left
// without a marker or with checkpoints that are no longer kept.
static inline void folder_taken_up(const Checkpoint& c, const Retention& retention, int64_t max_steps) {
    const std::string folder = run.output_dir;
    const long long step = (long long)c.step;
    if (comm.rank == 0) {
        if (checkpoint_mark_again(folder, c)) {
            say("the checkpoint of step %lld had no DONE file, but it is whole: it is marked again\n", step);
        }
        checkpoint_clean(folder);
        checkpoint_retain(folder, c.step, retention);
    }
    say("resumed: %s goes on after step %lld\n", shown(folder).c_str(), step);
    const int then = (int)fact_number(c.facts, "ranks", 1, INT_MAX);
    if (then != comm.world) { say("launch: ranks now %d, before %d\n", comm.world, then); }
    if (c.step >= max_steps) {
        say("-x %lld: the run has come so far already; a larger -x makes it longer\n", (long long)max_steps);
    }
}

// A run's last lines: how to resume it if it was stopped, and how to use its folder. chats: by `chat`, too.
static inline void print_folder(const char* program, bool stopped, bool chats) {
    const bool as_path = run.output_dir[0] == '-' || reads_as_descriptor(run.output_dir);
    const std::string folder = shell_quoted((as_path ? "./" : "") + std::string(run.output_dir));
    const std::string self = shell_quoted(program);
    const bool other_launch = comm.world > 1 && run.comm.gpus == 0;
    if (stopped) {
        say("`%s -y 1 -o %s`%s goes on with this run\n", self.c_str(), folder.c_str(),
            other_launch ? ", on its ranks as before," : "");
    }
    say("`%s eval %s` evaluates this run\n", self.c_str(), folder.c_str());
    say("`%s sample %s` writes (--prompt TEXT: goes on from TEXT)\n", self.c_str(), folder.c_str());
    if (chats) { say("`%s chat %s` asks it\n", self.c_str(), folder.c_str()); }
    say("`python3 dev/data/plot_log.py %s` draws it\n", folder.c_str());
}
