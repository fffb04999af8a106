/*
The checkpoints in a run's folder, and the thread that writes them. Host only.

    model_00001000.bin          the model, for everybody; its header's last words may hold a checksum
    state_00001000_00000.bin    what else a resumed run needs (state_file.h), of each rank that had some
    DONE_00001000               comes last: names, sizes and checksums of the others

    for (int64_t step : checkpoint_steps(folder)) { ... }       // those with a DONE, oldest first
    std::vector<std::string> states;
    std::string error = checkpoint_check(folder, step, &states);    // "": whole, up to the tensors' checksums
    checkpoint_done(folder, step, states);              // when all its files are on disk
    checkpoint_retain(folder, step, {3, 1000, {}});     // keeps the last three and each thousandth

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

static inline std::vector<int64_t> checkpoint_steps(const std::string& folder) {
    std::vector<int64_t> steps;
    for (const std::string& name : folder_names(folder)) {
        const int64_t step = checkpoint_number(name, "DONE_", "");
        if (step >= 0 && checkpoint_marker("", step) == "/" + name) { steps.push_back(step); }
    }
    std::sort(steps.begin(), steps.end());
    return steps;
}

// ---- a model's checksum ----
// Words 254 and 255 of a model file's header of 256 int32 hold the XXH64 of the file as it is with zeros
// there. Zero: the file has none.
constexpr int kModelChecksumWord = 254;

static inline uint64_t model_checksum(const int* header /*(256)*/) {
    uint64_t sum;
    memcpy(&sum, header + kModelChecksumWord, sizeof(sum));
    return sum;
}

static inline std::string checksum_text(uint64_t sum) { return format("%016llx", (unsigned long long)sum); }

// What is wrong with a file's bytes, or "". *sum: its checksum, 0 if it has none.
static inline std::string model_file_error(const std::string& path, uint64_t* sum) {
    FILE* f = fopen(path.c_str(), "rb");
    if (!f) { return format("cannot be opened: %s", strerror(errno)); }
    int header[256];
    std::vector<char> part(1 << 20);
    Checksum c;
    std::string error;
    *sum = 0;
    if (fread(header, sizeof(header), 1, f) != 1) { error = "is truncated"; }
    else if ((*sum = model_checksum(header)) != 0) {
        memset(header + kModelChecksumWord, 0, sizeof(*sum));
        checksum_add(&c, header, sizeof(header));
        for (size_t n; (n = fread(part.data(), 1, part.size(), f)) > 0;) { checksum_add(&c, part.data(), n); }
        if (checksum_end(&c) != *sum) { error = "is damaged: it does not have the checksum in its header"; }
    }
    if (ferror(f)) { error = format("cannot be read: %s", strerror(errno)); }
    fclose(f);
    return error;
}

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
}

constexpr int64_t kMarkerMost = 1 << 24;        // bytes; a rank's line is some 60

// What is wrong with a checkpoint, as far as its marker and the starts of its files can tell, or "".
static inline std::string checkpoint_check(const std::string& folder, int64_t step,
                                           std::vector<std::string>* states) {
    const std::string marker = checkpoint_marker(folder, step);
    const std::string marker_name = marker.substr(folder.size() + 1);
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
    std::set<int64_t> bad;              // these are none, as they were found damaged
};

// The marker goes first: what is half removed is no checkpoint.
static inline void checkpoint_remove(const std::string& folder, int64_t step) {
    unlink(checkpoint_marker(folder, step).c_str());
    unlink(checkpoint_model(folder, step).c_str());
    const std::string prefix = checkpoint_state_prefix(step);
    for (const std::string& name : folder_names(folder)) {
        if (checkpoint_number(name, prefix.c_str(), ".bin") >= 0) { unlink((folder + "/" + name).c_str()); }
    }
}

// Removes what is older than the last `keep` of those up to `newest`, which has just been written and stays.
// Later ones belong to a future that the run went back from; they are written anew when it comes there.
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

// What a run has left that was killed in a save, or while it removed a checkpoint: files that are half
// written, and the model and states of a step without a marker. A model alone may be somebody's, and stays.
static inline void checkpoint_clean(const std::string& folder) {
    for (const std::string& name : folder_names(folder)) {
        std::string whole = name;                   // without .PID.N.part
        const bool ours = name.compare(0, 5, "DONE_") == 0 || name.find(".bin.") != std::string::npos;
        if (ours && name.compare(name.size() - 5, 5, ".part") == 0) {
            for (int i = 0; i < 3; i++) { whole.resize(std::min(whole.rfind('.'), whole.size())); }
            atomic_remove_stale(folder + "/" + whole);
        }
        const size_t rank = whole.rfind('_');
        if (rank == std::string::npos || checkpoint_number(whole.substr(rank), "_", ".bin") < 0) { continue; }
        const int64_t step = checkpoint_number(whole.substr(0, rank), "state_", "");
        if (step >= 0 && file_size(checkpoint_marker(folder, step).c_str()) < 0) {
            checkpoint_remove(folder, step);
        }
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
