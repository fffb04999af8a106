/*
The checkpoints in a run's folder, and the thread that writes them. Host only.

    model_00001000.bin          the model, for everybody; its header's last words may hold a checksum
    state_00001000_00000.bin    what else a resumed run needs (state_file.h), of each rank that had some
    DONE_00001000               comes last: names, sizes and checksums of the others
    HALF_00001000               instead of DONE, while the others are written or removed: what a kill leaves
                                of them may go. Files with neither have lost their DONE, and stay

    for (int64_t step : checkpoint_steps(folder)) { ... }       // those with a DONE, oldest first
    std::vector<std::string> states;
    std::string error = checkpoint_check(folder, step, &states);    // "": whole, up to the tensors' checksums
    checkpoint_begin(folder, step);                     // before its files are written,
    checkpoint_done(folder, step, states);              // and when all of them are on disk
    checkpoint_retain(folder, step, {3, 1000, 500, {}});    // keeps the last three and each thousandth

    Worker* worker = worker_start();
    worker_post(worker, [=] { ... });                   // when it is idle; one thing at a time
    worker_wait(worker);
*/
#ifndef LLMC_FILES_CHECKPOINTS_H
#define LLMC_FILES_CHECKPOINTS_H

#include <algorithm>            // gives: std::sort
#include <condition_variable>   // gives: std::condition_variable
#include <functional>           // gives: std::function
#include <mutex>                // gives: std::mutex
#include <set>                  // gives: std::set
#include <string>               // gives: std::string
#include <system_error>         // gives: std::system_error
#include <thread>               // gives: std::thread
#include <vector>               // gives: std::vector

#include "../check.h"           // gives: AtomicFile, die
#include "../checksum.h"        // gives: Checksum
#include "model_file.h"         // gives: model_checksum, model_file_error
#include "state_file.h"         // gives: StateHeader

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

// The number between `before` and `after` in a name that has nothing else; -1: it is another name.
static inline int64_t checkpoint_number(const std::string& name, const char* before, const char* after) {
    const size_t b = strlen(before), a = strlen(after);
    if (name.size() <= b + a || name.compare(0, b, before) != 0 ||
        name.compare(name.size() - a, a, after) != 0) { return -1; }
    const std::string digits = name.substr(b, name.size() - a - b);
    if (digits.size() > 18 || digits.find_first_not_of("0123456789") != std::string::npos) { return -1; }
    return std::stoll(digits);
}

static inline std::vector<std::string> folder_names(const std::string& folder) {
    std::vector<std::string> names;
    DIR* dir = opendir(folder.c_str());
    while (struct dirent* entry = dir ? readdir(dir) : nullptr) { names.push_back(entry->d_name); }
    if (dir) { closedir(dir); }
    std::sort(names.begin(), names.end());
    return names;
}

// The step of a state's name; -1: it is another name.
static inline int64_t checkpoint_state_step(const std::string& name) {
    const size_t rank = name.rfind('_');
    if (rank == std::string::npos) { return -1; }
    const int64_t step = checkpoint_number(name.substr(0, rank), "state_", "");
    const bool is_one = step >= 0 &&
                        checkpoint_number(name, checkpoint_state_prefix(step).c_str(), ".bin") >= 0;
    return is_one ? step : -1;
}

// Oldest first. unmarked: also those that have states, but neither DONE nor HALF.
static inline std::vector<int64_t> checkpoint_steps(const std::string& folder, bool unmarked = false) {
    std::set<int64_t> steps;
    for (const std::string& name : folder_names(folder)) {
        const int64_t done = checkpoint_number(name, "DONE_", ""), of_state = checkpoint_state_step(name);
        if (done >= 0 && checkpoint_marker("", done) == "/" + name) { steps.insert(done); }
        if (unmarked && of_state >= 0 && file_size(checkpoint_half(folder, of_state).c_str()) < 0) {
            steps.insert(of_state);
        }
    }
    return {steps.begin(), steps.end()};
}

// Is there a model of a finished save? Without states it is no checkpoint, but it is not to be overwritten.
static inline bool checkpoint_has_models(const std::string& folder) {
    for (const std::string& name : folder_names(folder)) {
        const int64_t step = checkpoint_number(name, "model_", ".bin");
        const bool is_one = step >= 0 && checkpoint_model("", step) == "/" + name;
        if (is_one && file_size(checkpoint_half(folder, step).c_str()) < 0) { return true; }
    }
    return false;
}

static inline std::string checksum_text(uint64_t sum) { return format("%016llx", (unsigned long long)sum); }

// ---- the marker of a whole checkpoint ----

// One line of the marker: a file's name, size and own checksum, which it has in its header. "": it cannot be
// read.
static inline std::string checkpoint_line(const std::string& path) {
    int header[256] = {};
    FILE* f = fopen(path.c_str(), "rb");
    const size_t got = f ? fread(header, 1, sizeof(header), f) : 0;
    if (f) { fclose(f); }
    const bool is_state = memcmp(header, kStateMagic, sizeof(kStateMagic)) == 0;
    if (got < (is_state ? sizeof(StateHeader) : sizeof(header))) { return ""; }
    uint64_t sum = model_checksum(header);
    if (is_state) { memcpy(&sum, (char*)header + offsetof(StateHeader, checksum), sizeof(sum)); }
    return format("%s %lld %s\n", path.substr(path.rfind('/') + 1).c_str(),
                  (long long)file_size(path.c_str()), checksum_text(sum).c_str());
}

// Files of this step are no checkpoint from now on, until checkpoint_done. False: nothing was changed.
static inline bool checkpoint_begin(const std::string& folder, int64_t step) {
    const std::string half = checkpoint_half(folder, step);
    if (file_layer.rename(checkpoint_marker(folder, step).c_str(), half.c_str()) == 0) { return true; }
    if (errno != ENOENT) { return false; }
    const int fd = open(half.c_str(), O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (fd >= 0) { close(fd); }
    return fd >= 0;
}

// All files of the checkpoint are on disk. Of several ranks' files some may not be seen from here.
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
    AtomicFile out = atomic_open(checkpoint_marker(folder, step));
    atomic_write(&out, text.data(), text.size());
    atomic_commit(&out);
    unlink(checkpoint_half(folder, step).c_str());
}

constexpr int64_t kMarkerMost = 1 << 24;        // bytes; a rank's line is some 60

// The same for a checkpoint that lost its marker, as copies of *.bin do. Its states are of ranks 0, 1, 2, ...
// and of one save; whether they hold all of each tensor is seen when they are read.
static inline std::string checkpoint_check_unmarked(const std::string& folder, int64_t step,
                                                    std::vector<std::string>* states) {
    const std::string prefix = checkpoint_state_prefix(step);
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

// What is wrong with a checkpoint, as far as its marker and the starts of its files can tell, or "".
static inline std::string checkpoint_check(const std::string& folder, int64_t step,
                                           std::vector<std::string>* states) {
    const std::string marker = checkpoint_marker(folder, step);
    const std::string marker_name = marker.substr(folder.size() + 1);
    if (access(marker.c_str(), F_OK) != 0 && errno == ENOENT) {
        return checkpoint_check_unmarked(folder, step, states);
    }
    FILE* f = file_size(marker.c_str()) >= 0 ? fopen(marker.c_str(), "rb") : nullptr;
    if (!f) { return marker_name + " cannot be opened"; }
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
    int keep;                           // so many of the last ones; 0: all
    int major;                          // and all whose step is a multiple of this; 0: none
    int every;                          // the run goes back to multiples of this only; at least 1
    std::set<int64_t> bad;              // these are none, as they were found damaged
};

// A whole number that a checkpoint's first state knows; 0: it does not know it. -1: it cannot be read.
static inline int64_t checkpoint_fact(const std::string& folder, int64_t step, const char* key) {
    StateFile file;
    if (!state_open(&file, checkpoint_state(folder, step, 0)).empty()) { return -1; }
    const std::string* text = facts_find(file.facts, key);
    return text ? std::max(0ll, strtoll(text->c_str(), nullptr, 10)) : 0;
}

// Is it from before a series of skipped updates? What cannot be read may be.
static inline bool checkpoint_is_calm(const std::string& folder, int64_t step) {
    return checkpoint_fact(folder, step, "update.skipped_in_a_row") <= 0;
}

// A file that cannot be removed is named; HALF stays with it, so that the next resume tries again.
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

// Removes what is older than the last `keep` of those up to `newest`, which has just been written and stays.
// So does the newest one to which --on-bad-loss rewind would go back.
// Later ones are from before a rewind; the run writes them anew when it comes there.
static inline void checkpoint_retain(const std::string& folder, int64_t newest, const Retention& r) {
    if (r.keep == 0) { return; }
    std::vector<int64_t> steps = checkpoint_steps(folder);
    int kept = 0;
    bool has_calm = false;
    for (size_t i = steps.size(); i-- > 0;) {
        const int64_t step = steps[i];
        if (step > newest || r.bad.count(step)) { continue; }
        const bool major = r.major > 0 && step % r.major == 0;
        const bool first_calm = !has_calm && step % r.every == 0 && checkpoint_is_calm(folder, step);
        has_calm = has_calm || first_calm;
        if (kept++ >= r.keep && !major && !first_calm) { checkpoint_remove(folder, step); }
    }
}

// Checkpoints to resume from, best last. After a rewind a smaller step may be newer: `rewinds` counts first.
// One that cannot be read now may be the newest.
static inline std::vector<int64_t> checkpoint_newest(const std::string& folder) {
    std::vector<std::pair<uint64_t, int64_t>> order;        // -1 becomes the largest
    for (int64_t step : checkpoint_steps(folder, true)) {
        order.push_back({(uint64_t)checkpoint_fact(folder, step, "rewinds"), step});
    }
    std::sort(order.begin(), order.end());
    std::vector<int64_t> steps;
    for (const auto& it : order) { steps.push_back(it.second); }
    return steps;
}

// To go back to from a series of skipped updates, best last. A checkpoint from within the series has the
// weights of its begin, and steps would be lost. A signal may have left one between multiples of `every`: the
// run goes back as if it were not there.
static inline std::vector<int64_t> checkpoint_before(const std::string& folder, int64_t from, int every) {
    std::vector<std::pair<int, int64_t>> order;
    for (int64_t step : checkpoint_steps(folder, true)) {
        if (step > from) { continue; }
        order.push_back({2 * (step % every == 0) + checkpoint_is_calm(folder, step), step});
    }
    std::sort(order.begin(), order.end());
    std::vector<int64_t> steps;
    for (const auto& it : order) { steps.push_back(it.second); }
    return steps;
}

// Removes what a killed run left of a save or a removal: half-written files, and the files of a step with
// HALF. Files with neither HALF nor DONE stay: they may be a copy that lost its DONE.
static inline void checkpoint_clean(const std::string& folder) {
    for (const std::string& name : folder_names(folder)) {
        std::string whole = name;                   // without .PID.N.part
        const bool ours = name.compare(0, 5, "DONE_") == 0 || name.find(".bin.") != std::string::npos;
        if (ours && name.compare(name.size() - 5, 5, ".part") == 0) {
            for (int i = 0; i < 3; i++) { whole.resize(std::min(whole.rfind('.'), whole.size())); }
            atomic_remove_stale(folder + "/" + whole);
        }
        const int64_t step = checkpoint_number(name, "HALF_", "");
        if (step < 0 || checkpoint_half("", step) != "/" + name) { continue; }
        const bool whole_now = file_size(checkpoint_marker(folder, step).c_str()) >= 0;
        if (whole_now) { unlink(checkpoint_half(folder, step).c_str()); }
        else { checkpoint_remove(folder, step); }
    }
}

// ---- a thread for what takes long ----

// Never freed: the thread may be at work when exit() tears the program down.
struct Worker {
    std::mutex mutex;
    std::condition_variable changed;
    std::function<void()> work;         // empty: idle
    std::thread thread;
};

static inline void worker_loop(Worker* w) {
    std::unique_lock<std::mutex> lock(w->mutex);
    for (;;) {
        w->changed.wait(lock, [w] { return (bool)w->work; });
        std::function<void()> work = w->work;
        lock.unlock();
        work();
        lock.lock();
        w->work = nullptr;
        w->changed.notify_all();
    }
}

static inline Worker* worker_start() {
    Worker* w = new Worker();
    try { w->thread = std::thread(worker_loop, w); }
    catch (const std::system_error& e) {
        die("cannot start the thread that writes checkpoints: %s\nhint: give the program more memory or more "
            "threads (ulimit -a)", e.what());
    }
    return w;
}

static inline bool worker_busy(Worker* w) {
    std::lock_guard<std::mutex> lock(w->mutex);
    return (bool)w->work;
}

static inline void worker_wait(Worker* w) {
    std::unique_lock<std::mutex> lock(w->mutex);
    w->changed.wait(lock, [w] { return !w->work; });
}

static inline void worker_post(Worker* w, std::function<void()> work) {
    std::lock_guard<std::mutex> lock(w->mutex);
    assert(!w->work);
    w->work = work;
    w->changed.notify_all();
}

#endif  // LLMC_FILES_CHECKPOINTS_H
