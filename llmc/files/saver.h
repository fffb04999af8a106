/*
The asynchronous writer of checkpoints. It copies pieces of device memory to pinned memory, and a thread
writes them to disk.

    Saver saver = {};
    saver.folder = folder, saver.config = config, ...;              // the fields "set before saver_init"
    saver_init(&saver, pieces, true);
    saver_begin(&saver, step);                                      // all ranks, after the same step
    saver_copy(&saver, facts);                                      // enqueues the copies
    saver_hold(saver);                                              // before each update
    saver_advance(&saver);                                          // all ranks, after each later step
    saver_finish(&saver);                                           // all ranks; waits for the last one
    saver_free(&saver);

The device copies the pieces while the next step runs forward and backward; the step's update waits for the
copies (saver_hold). If pinned memory for the whole checkpoint is not available, or no step follows, the
pieces are saved in groups, and the host waits for each group.
*/
#pragma once

#include "../checked_files.h"       // gives: die, shown, file_size
#include "../comm/comm.h"           // gives: comm, comm_any, comm_now, warn, DiskWait
#include "../host_memory.h"         // gives: host_memory_free, addresses_limited
#include "../model/layout.h"        // gives: Split
#include "../model/model_config.h"  // gives: Config
#include "../numbers.h"             // gives: bytes_text
#include "../worker.h"              // gives: Worker
#include "../ops/device.h"          // gives: Stream, Event, copy_to_host, pinned_malloc
#include "checkpoints.h"            // gives: checkpoint_begin, checkpoint_done, Retention
#include "model_file.h"             // gives: ModelWriter
#include "state_file.h"             // gives: StateRow, StateWriter

struct SavedPiece {
    StateRow row;
    void* device = nullptr;             // null: all ranks call `gather` to get the address
    std::function<const void*()> gather = nullptr;      // fills one shared buffer, on the stream `compute`
    bool in_state = false, in_model = false;    // which of this rank's files hold the piece
    size_t at = 0;              // offset in Saver.memory
    size_t bytes() const { return in_state || in_model ? state_row_bytes(row) : 0; }
};

struct Saver {
    // set before saver_init
    std::string folder;
    Retention retention;
    Config config;
    Split split;
    bool model_is_bf16;
    Stream compute;             // the stream that fills and updates the pieces
    std::function<void()> before_marker, after_marker;      // called by rank 0's writer thread

    std::vector<SavedPiece> pieces;
    std::vector<size_t> groups; // index of each group's first piece, and the number of pieces
    char* memory;
    Stream stream;              // of the copies
    Event ready, copied;        // the pieces hold what is to be saved; the copies have been taken
    Worker* worker;
    StateWriter state;          // only the worker uses these two
    ModelWriter model_file;
    // the last checkpoint
    enum { Idle, Writing, Marking } phase;      // all ranks write files, then rank 0 writes the marker
    int64_t step;               // -1: none yet
    double began_s;
};

static void* (*saver_pin)(size_t bytes) = pinned_try;       // tests replace it with a function that fails

// at_once: steps will follow a checkpoint, so try to allocate memory for a whole one.
static inline void saver_init(Saver* saver, const std::vector<SavedPiece>& pieces, bool at_once) {
    saver->pieces = pieces;
    saver->phase = Saver::Idle;
    saver->step = -1;
    size_t all = 0, largest = 1;                // bytes
    for (const SavedPiece& p : saver->pieces) {
        all += p.bytes();
        largest = std::max(largest, p.bytes());
    }
    // the ranks of this machine share half of the free memory
    const size_t most = addresses_limited() ? 0 : host_memory_free() / 2 / (size_t)comm.local_world;
    size_t capacity = all;
    saver->memory = at_once && all <= most ? (char*)saver_pin(all) : nullptr;
    if (!saver->memory) {
        capacity = largest;
        saver->memory = (char*)pinned_malloc(largest, "checkpoints");
        if (at_once && largest < all) {
            warn("host memory is short: a checkpoint of %s is written in parts, and training waits for it",
                 bytes_text(all).c_str());
        }
    }
    saver->groups = {0};                // one group at least, even if a rank has only padding
    size_t used = 0;
    for (size_t i = 0; i < saver->pieces.size(); i++) {
        if (used + saver->pieces[i].bytes() > capacity) { saver->groups.push_back(i); used = 0; }
        saver->pieces[i].at = used;
        used += saver->pieces[i].bytes();
    }
    saver->groups.push_back(saver->pieces.size());
    saver->stream = stream_create();
    saver->ready = event_create();
    saver->copied = event_create();
    saver->worker = worker_start("writes checkpoints");
}

// The thread writes one group, as soon as its copies have arrived.
static inline void saver_write(Saver* saver, size_t group, int64_t step, const Facts& facts) {
    const Split& split = saver->split;
    const bool has_state = split.zero >= 1 || split.rank == 0, has_model = split.rank == 0;
    if (group == 0 && has_state) {
        std::vector<StateRow> rows;
        for (const SavedPiece& p : saver->pieces) { if (p.in_state) { rows.push_back(p.row); } }
        saver->state = state_begin(checkpoint_state(saver->folder, step, split.rank), facts, rows);
    }
    if (group == 0 && has_model) {
        saver->model_file = model_begin(checkpoint_model(saver->folder, step), saver->config,
                                        saver->model_is_bf16);
    }
    device_use();
    event_wait(saver->copied);
    for (size_t i = saver->groups[group]; i < saver->groups[group + 1]; i++) {
        const SavedPiece& p = saver->pieces[i];
        if (p.in_state) { state_write(&saver->state, saver->memory + p.at); }
        if (p.in_model) { model_write(&saver->model_file, saver->memory + p.at, p.row.count, p.row.type); }
    }
    if (group + 2 < saver->groups.size()) { return; }
    if (has_model) { model_commit(&saver->model_file); }
    if (has_state) { state_commit(&saver->state); }
}

static inline void saver_wait(Saver* saver) {      // until the thread is idle
    DiskWait disk;
    worker_wait(saver->worker);
}

// All ranks call this between steps. When all have written their files of the last checkpoint, rank 0 writes
// the marker and removes old checkpoints.
static inline void saver_advance(Saver* saver) {
    if (saver->phase == Saver::Idle) { return; }
    const std::string folder = saver->folder;
    const int64_t step = saver->step;
    std::vector<std::string> states;
    for (int r = 0; r < (saver->split.zero == 0 ? 1 : comm.world); r++) {
        states.push_back(checkpoint_state(folder, step, r));
    }
    if (saver->phase == Saver::Writing && !comm_any(worker_busy(saver->worker))) {
        saver->phase = comm.rank == 0 ? Saver::Marking : Saver::Idle;
        const Retention retention = saver->retention;
        if (comm.rank != 0) { return; }
        const std::function<void()> before = saver->before_marker, after = saver->after_marker;
        worker_post(saver->worker, [=] {
            before();
            checkpoint_done(folder, step, states);
            after();
            checkpoint_retain(folder, step, retention);
        });
    }
    if (saver->phase != Saver::Marking || worker_busy(saver->worker)) { return; }
    saver->phase = Saver::Idle;
    DiskWait disk;
    int64_t bytes = file_size(checkpoint_model(folder, step).c_str());
    for (const std::string& path : states) { bytes += file_size(path.c_str()); }
    progress_clear();
    printf("saved %s and its state: %s in %.1f s\n", shown(checkpoint_model(folder, step)).c_str(),
           bytes_text((size_t)bytes).c_str(), comm_now() - saver->began_s);
    fflush(stdout);
}

// The same, until the last checkpoint is done.
static inline void saver_finish(Saver* saver) {
    while (saver->phase != Saver::Idle) {
        saver_wait(saver);
        saver_advance(saver);
    }
}

// Finishes the previous checkpoint and begins one.
static inline void saver_begin(Saver* saver, int64_t step) {
    saver_finish(saver);
    saver->phase = Saver::Writing;
    saver->step = step;
    saver->began_s = comm_now();
    saver->retention.bad.erase(step);
    if (saver->split.rank == 0) {
        DiskWait disk;
        if (!checkpoint_begin(saver->folder, step)) {
            die("cannot begin a checkpoint in '%s': %s", saver->folder.c_str(), strerror(errno));
        }
    }
    comm_any(false);                                // all ranks wait: the folder and HALF exist now
}

// Enqueues the copies of all pieces, which hold this step's values. facts go into the state file.
static inline void saver_copy(Saver* saver, const Facts& facts) {
    const int64_t step = saver->step;
    for (size_t group = 0; group + 1 < saver->groups.size(); group++) {
        if (group > 0) { saver_wait(saver); } // until the memory is free again
        event_record(saver->ready, saver->compute);
        stream_wait(saver->stream, saver->ready);
        for (size_t i = saver->groups[group]; i < saver->groups[group + 1]; i++) {
            const SavedPiece& p = saver->pieces[i];
            const void* device = p.device;
            if (!device) {
                device = p.gather();
                event_record(saver->ready, saver->compute);
                stream_wait(saver->stream, saver->ready);
            }
            if (p.bytes() > 0) { copy_to_host(saver->memory + p.at, device, p.bytes(), saver->stream); }
            if (!p.device) {                        // the next gather overwrites the shared buffer
                event_record(saver->copied, saver->stream);
                stream_wait(saver->compute, saver->copied);
            }
        }
        event_record(saver->copied, saver->stream);
        worker_post(saver->worker, [=] { saver_write(saver, group, step, facts); });
    }
}

// What changes the pieces comes after this on `compute`: it waits until the last copies have been taken.
static inline void saver_hold(const Saver& saver) {
    if (saver.worker) { stream_wait(saver.compute, saver.copied); }
}

static inline void saver_free(Saver* saver) {
    if (!saver->worker) { return; }
    stream_sync(saver->stream);
    stream_destroy(saver->stream);
    event_destroy(saver->ready);
    event_destroy(saver->copied);
    pinned_free(saver->memory);
}
