/*
The checkpoints in a run's folder. Host only.

    model_00001000.bin          the model; its header may hold a checksum
    state_00001000_00000.bin    a rank's other data for resuming (state_file.h)
    DONE_00001000               the marker, written last: names, sizes and checksums of the files above
    HALF_00001000               replaces DONE while the files are written or removed. After a kill, the files
                                of a step with HALF are deleted. Files with neither are kept: they may be a
                                copy without its DONE

    for (int64_t step : checkpoint_steps(folder)) { ... }       // steps with a DONE, oldest first
    std::vector<std::string> states;
    std::string error = checkpoint_check(folder, step, &states);    // "": whole, except perhaps tensor data
    checkpoint_begin(folder, step);                     // before the files are written
    checkpoint_done(folder, step, states);              // after all of them are on disk
    checkpoint_retain(folder, step, {3, 1000, 500, {}});    // keeps the last three and each thousandth
*/
#pragma once

#include "../atomic_files.h" // gives: atomic_file, die, folder_names
#include "../checksum.h"    // gives: checksum, checksum_text
#include "model_file.h"     // gives: model_checksum, model_file_error
#include "state_file.h"     // gives: StateHeader

// ---- names ----

static inline std::string checkpoint_model(const std::string& folder, int64_t step) {
    return folder + format("/model_%08lld.bin", (long long)step);
}
static inline std::string checkpoint_state_prefix(int64_t step) {
    return format("state_%08lld_", (long long)step);
}
static inline std::string checkpoint_state(const std::string& folder, int64_t step, int rank) {
    return folder + "/" + checkpoint_state_prefix(step) + format("%05d.bin", rank);
}
static inline std::string checkpoint_marker(const std::string& folder, int64_t step) {
    return folder + format("/DONE_%08lld", (long long)step);
}
static inline std::string checkpoint_half(const std::string& folder, int64_t step) {
    return folder + format("/HALF_%08lld", (long long)step);
}

// The step in a name that is `before`, eight digits or more, `after`; -1 for any other name.
static inline int64_t checkpoint_step(const std::string& name, const char* before, const char* after) {
    const size_t at = std::min(strlen(before), name.size());
    const int64_t step = strtoll(name.c_str() + at, nullptr, 10);
    const bool is_one = name == before + format("%08lld", (long long)step) + after;
    return is_one && step >= 0 && step < 1000000000000000000 ? step : -1;
}

// The step in the name of a state file; -1 for any other name.
static inline int64_t checkpoint_state_step(const std::string& name) {
    const size_t rank = name.rfind('_') + 1;            // npos + 1 is 0
    const int64_t step = checkpoint_step(name.substr(0, rank), "state_", "_");
    return checkpoint_state("", step, atoi(&name[rank])) == "/" + name ? step : -1;
}

// The steps with a DONE, oldest first. unmarked: also those with states, but neither DONE nor HALF.
static inline std::vector<int64_t> checkpoint_steps(const std::string& folder, bool unmarked = false) {
    std::set<int64_t> steps;
    for (const std::string& name : folder_names(folder)) {
        const int64_t done = checkpoint_step(name, "DONE_", ""), of_state = checkpoint_state_step(name);
        if (done >= 0) { steps.insert(done); }
        if (unmarked && of_state >= 0 && file_size(checkpoint_half(folder, of_state).c_str()) < 0) {
            steps.insert(of_state);
        }
    }
    return {steps.begin(), steps.end()};
}

// Does the folder hold the model of a finished save? A run must not overwrite it, even without states.
static inline bool checkpoint_has_models(const std::string& folder) {
    for (const std::string& name : folder_names(folder)) {
        const int64_t step = checkpoint_step(name, "model_", ".bin");
        if (step >= 0 && file_size(checkpoint_half(folder, step).c_str()) < 0) { return true; }
    }
    return false;
}

// ---- the marker of a whole checkpoint ----

// One line of the marker: a file's name, its size, and the checksum in its header. "": it cannot be read.
static inline std::string checkpoint_line(const std::string& path) {
    int header[256] = {};
    FILE* f = fopen(path.c_str(), "rb");
    if (!f) { absent_or_die("open", path); return ""; }
    const size_t got = fread(header, 1, sizeof(header), f);
    fclose(f);
    const bool is_state = memcmp(header, kStateMagic, sizeof(kStateMagic)) == 0;
    if (got < (is_state ? sizeof(StateHeader) : sizeof(header))) { return ""; }
    uint64_t sum = model_checksum(header);
    if (is_state) { memcpy(&sum, (char*)header + offsetof(StateHeader, checksum), sizeof(sum)); }
    return format("%s %lld %s\n", path.substr(path.rfind('/') + 1).c_str(),
                  (long long)file_size(path.c_str()), checksum_text(sum).c_str());
}

// Turns DONE into HALF: the step is no checkpoint until checkpoint_done. False: nothing was changed.
static inline bool checkpoint_begin(const std::string& folder, int64_t step) {
    const std::string half = checkpoint_half(folder, step);
    if (file_layer.rename(checkpoint_marker(folder, step).c_str(), half.c_str()) == 0) { return true; }
    if (errno != ENOENT) { return false; }
    const int fd = open(half.c_str(), O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (fd >= 0) { close(fd); }
    return fd >= 0;
}

// Writes the marker, when all files of the checkpoint are on disk. Dies if a file cannot be read here.
static inline void checkpoint_done(const std::string& folder, int64_t step,
                                   const std::vector<std::string>& states) {
    std::vector<std::string> paths = {checkpoint_model(folder, step)};
    paths.insert(paths.end(), states.begin(), states.end());
    std::string text;
    for (const std::string& path : paths) {
        const std::string line = checkpoint_line(path);
        if (line.empty()) {
            die("'%s' is written, but cannot be read here\nhint: all ranks need the same folder for -o",
                path.c_str());
        }
        text += line;
    }
    text += "sum " + checksum_text(checksum(text.data(), text.size())) + "\n";
    atomic_file(checkpoint_marker(folder, step), text);
    unlink(checkpoint_half(folder, step).c_str());
}

constexpr int64_t kMarkerMost = 1 << 24;        // bytes; a line has about 60

// Checks a checkpoint without a marker (a copy of *.bin only): there must be states of ranks 0, 1, 2, ... of
// one save. Missing parts of a tensor are found when it is read. Returns the error, or "".
static inline std::string checkpoint_check_unmarked(const std::string& folder, int64_t step,
                                                    std::vector<std::string>* states) {
    std::string first_position;
    size_t count = 0;
    states->clear();
    for (const std::string& name : folder_names(folder)) {
        if (checkpoint_state_step(name) == step) { count++; }
    }
    if (count == 0) { return checkpoint_marker("", step).substr(1) + " cannot be opened"; }
    if (file_size(checkpoint_model(folder, step).c_str()) < 0) {
        return checkpoint_model("", step).substr(1) + " is missing";
    }
    for (size_t rank = 0; rank < count; rank++) {
        const std::string path = checkpoint_state(folder, step, (int)rank);
        const std::string name = path.substr(folder.size() + 1);
        StateFile file;
        if (file_size(path.c_str()) < 0) { return name + " is missing"; }
        const std::string error = state_open(&file, path);
        if (!error.empty()) { return name + " " + error; }
        const std::string *its_step = facts_find(file.facts, "step"),
                          *position = facts_find(file.facts, "position");
        const std::string its_position = position ? *position : "";
        if (rank == 0) { first_position = its_position; }
        if (!its_step || *its_step != std::to_string(step) || its_position != first_position) {
            return name + " is of another save";
        }
        states->push_back(path);
    }
    return "";
}

// Checks a checkpoint's marker and the starts of its files, but no tensor data. Returns the error, or "".
static inline std::string checkpoint_check(const std::string& folder, int64_t step,
                                           std::vector<std::string>* states) {
    const std::string marker = checkpoint_marker(folder, step);
    const std::string marker_name = marker.substr(folder.size() + 1);
    struct stat st;
    if (!path_stat(marker, &st)) { return checkpoint_check_unmarked(folder, step, states); }
    if (!S_ISREG(st.st_mode)) { return marker_name + " is " + not_regular(st.st_mode); }
    FILE* f = fopen_check(marker.c_str(), "rb");
    std::string text((size_t)std::min<int64_t>(file_size(marker.c_str()), kMarkerMost), '\0');
    text.resize(fread(&text[0], 1, text.size(), f));
    fclose(f);
    const size_t end = text.rfind("sum ");
    if (end == std::string::npos ||
        text.substr(end) != "sum " + checksum_text(checksum(text.data(), end)) + "\n") {
        return marker_name + " is damaged";
    }
    const std::string state_prefix = checkpoint_state_prefix(step);
    states->clear();
    for (size_t from = 0; from < end;) {
        const size_t line_end = text.find('\n', from) + 1;
        const std::string line = text.substr(from, line_end - from), name = line.substr(0, line.find(' '));
        const std::string path = folder + "/" + name;
        from = line_end;
        if (path != checkpoint_model(folder, step) && name.find(state_prefix) != 0) {
            return marker_name + " is of another checkpoint: it names " + name;
        }
        if (file_size(path.c_str()) < 0) { return name + " is missing"; }
        if (checkpoint_line(path) != line) {
            return name + " is not the file that was written: its size or checksum is another";
        }
        if (name.find(state_prefix) == 0) { states->push_back(path); }
    }
    return states->empty() ? marker_name + " names no state" : "";
}

// ---- which ones stay ----

struct Retention {
    int keep;                           // number of last checkpoints to keep; 0: all
    int major;                          // keep all steps that are multiples of this; 0: none
    std::set<int64_t> bad;              // found damaged, so they do not count
};

// Warns of a file that cannot be removed. HALF then stays, so that the next resume tries again.
static inline void checkpoint_remove(const std::string& folder, int64_t step) {
    auto failed = [](const std::string& path) {
        progress_clear();
        fprintf(stderr, "warning: cannot remove '%s': %s\n", shown(path).c_str(), strerror(errno));
    };
    if (!checkpoint_begin(folder, step)) { failed(checkpoint_marker(folder, step)); return; }
    bool gone = true;
    for (const std::string& name : folder_names(folder)) {
        const std::string path = folder + "/" + name;
        const bool its_file = path == checkpoint_model(folder, step) || checkpoint_state_step(name) == step;
        if (!its_file || unlink(path.c_str()) == 0 || errno == ENOENT) { continue; }
        failed(path);
        gone = false;
    }
    if (gone) { unlink(checkpoint_half(folder, step).c_str()); }
}

// Of the checkpoints up to `newest`, which was just written, keeps the last `keep` and the major ones, and
// removes the others. Where there are some after `newest`, a run went back behind a damaged one: it will
// overwrite them.
static inline void checkpoint_retain(const std::string& folder, int64_t newest, const Retention& r) {
    if (r.keep == 0) { return; }
    std::vector<int64_t> steps = checkpoint_steps(folder);
    int kept = 0;
    for (size_t i = steps.size(); i-- > 0;) {
        const int64_t step = steps[i];
        if (step > newest || r.bad.count(step)) { continue; }
        const bool major = r.major > 0 && step % r.major == 0;
        if (kept++ >= r.keep && !major) { checkpoint_remove(folder, step); }
    }
}

// Removes the leftovers of a killed run: .part files, and the files of a step with HALF but no DONE.
static inline void checkpoint_clean(const std::string& folder) {
    for (const std::string& name : folder_names(folder)) {
        std::string whole = name;                   // without .PID.N.part
        const bool ours = name.compare(0, 5, "DONE_") == 0 || name.find(".bin.") != std::string::npos;
        if (ours && name.compare(name.size() - 5, 5, ".part") == 0) {
            for (int i = 0; i < 3; i++) { whole.resize(std::min(whole.rfind('.'), whole.size())); }
            atomic_remove_stale(folder + "/" + whole);
        }
        const int64_t step = checkpoint_step(name, "HALF_", "");
        if (step < 0) { continue; }
        const bool whole_now = file_size(checkpoint_marker(folder, step).c_str()) >= 0;
        if (whole_now) { unlink(checkpoint_half(folder, step).c_str()); }
        else { checkpoint_remove(folder, step); }
    }
}
