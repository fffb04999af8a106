/*
The asynchronous writer of checkpoints: pieces of device memory go to pinned memory, then a thread writes
them.

    Saver saver = {};
    saver.folder = folder, saver.config = config, ...;              // its first fields
    saver_init(&saver, pieces, true);
    saver_begin(&saver, step);                                      // all ranks, after the same step
    saver_copy(&saver, facts);                                      // the pieces hold this step's values
    saver_advance(&saver, step, false);                             // all ranks, after each later step
    saver_free(&saver);

The device copies what is saved into pinned memory while the following steps go on, of which only the next
update waits for it (`copied`); then the thread writes it. Where there is no memory for all of it, or nothing
follows, it goes in groups, and the host waits for each.
*/
#ifndef LLMC_FILES_SAVER_H
#define LLMC_FILES_SAVER_H

#include <errno.h>      // gives: errno
#include <stdint.h>     // gives: int64_t
#include <stdio.h>      // gives: printf
#include <string.h>     // gives: strerror

#include <algorithm>    // gives: std::max
#include <functional>   // gives: std::function
#include <string>       // gives: std::string
#include <vector>       // gives: std::vector

#include "../check.h"               // gives: die, shown, progress_clear
#include "../comm/comm.h"           // gives: comm, comm_any, comm_now, warn, DiskWait
#include "../host_memory.h"         // gives: host_memory_free, addresses_limited
#include "../model/layout.h"        // gives: Split
#include "../model/model_config.h"  // gives: Config
#include "../numbers.h"             // gives: bytes_text
#ifdef GPT2_CPU
#include "../ops/cpu_device.h"      // gives: Stream, Event, copy_to_host, pinned_malloc
#else
#include "../ops/cuda_device.h"     // gives: the same
#endif
#include "checkpoints.h"            // gives: checkpoint_begin, checkpoint_done, Retention, Worker
#include "model_file.h"             // gives: ModelWriter
#include "state_file.h"             // gives: StateRow, StateWriter

struct SavedPiece {
    StateRow row;
    const void* device;         // null: all ranks call `gather` for it when its turn comes
    std::function<const void*()> gather;        // the same memory each time, filled on `compute`
    bool in_state, in_model;    // of this rank's files
    size_t at;                  // in its group's memory
    size_t bytes() const { return in_state || in_model ? state_row_bytes(row) : 0; }
};

struct Saver {
    // set before saver_init
    std::string folder;
    Retention retention;
    Config config;
    Split split;
    bool model_is_bf16;
    Stream compute;             // of what fills the pieces
    Event copied;               // what changes the pieces waits for it
    std::function<void()> before_marker, after_marker;      // the thread of rank 0 calls them

    std::vector<SavedPiece> pieces;
    std::vector<size_t> groups; // index of each group's first piece, and the number of pieces
    char* memory;
    Stream stream;
    Event ready;
    Worker* worker;
    StateWriter state;          // of the worker
    ModelWriter model_file;
    // the last checkpoint
    enum { Idle, Writing, Marking } phase;      // files of all ranks; then, on rank 0, the marker
    int64_t step;               // -1: none yet
    double began_s;
};

static void* (*saver_pin)(size_t bytes) = pinned_try;       // tests put one that fails in its place

// The saver's first fields have been set. at_once: there should be memory for a whole checkpoint, as steps
// will follow one.
static inline void saver_init(Saver* saver, const std::vector<SavedPiece>& pieces, bool at_once) {
    saver->pieces = pieces;
    saver->phase = Saver::Idle;
    saver->step = -1;
    size_t all = 0, largest = 1;                // bytes
    for (const SavedPiece& p : saver->pieces) {
        all += p.bytes();
        largest = std::max(largest, p.bytes());
    }
    // half of what is free, for all ranks of this machine
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
    saver->groups = {0};                // one at least: a rank may have nothing but padding
    size_t used = 0;
    for (size_t i = 0; i < saver->pieces.size(); i++) {
        if (used + saver->pieces[i].bytes() > capacity) { saver->groups.push_back(i); used = 0; }
        saver->pieces[i].at = used;
        used += saver->pieces[i].bytes();
    }
    saver->groups.push_back(saver->pieces.size());
    saver->stream = stream_create();
    saver->ready = event_create();
    saver->worker = worker_start();
}

// The thread's part: one group, when its copies have been taken.
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

static inline void saver_wait(Saver* saver, int64_t now) {     // until the thread is idle
    DiskWait disk(now);
    worker_wait(saver->worker);
}

// Asked by all ranks between steps: has everybody written what belongs to the last checkpoint? Then rank 0
// puts the marker beside it, and removes what is too old. now: the step that the job is at. wait: until all
// this is done.
static inline void saver_advance(Saver* saver, int64_t now, bool wait) {
    if (saver->phase == Saver::Idle) { return; }
    const std::string folder = saver->folder;
    const int64_t step = saver->step;
    std::vector<std::string> states;
    for (int r = 0; r < (saver->split.zero == 0 ? 1 : comm.world); r++) {
        states.push_back(checkpoint_state(folder, step, r));
    }
    if (wait) { saver_wait(saver, now); }
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
        if (wait) { saver_wait(saver, now); }
    }
    if (saver->phase != Saver::Marking || worker_busy(saver->worker)) { return; }
    saver->phase = Saver::Idle;
    DiskWait disk(now);
    int64_t bytes = file_size(checkpoint_model(folder, step).c_str());
    for (const std::string& path : states) { bytes += file_size(path.c_str()); }
    progress_clear();
    printf("saved %s and its state: %s in %.1f s\n", shown(checkpoint_model(folder, step)).c_str(),
           bytes_text((size_t)bytes).c_str(), comm_now() - saver->began_s);
    fflush(stdout);
}

// A checkpoint begins: the one before is done, and all ranks see the folder.
static inline void saver_begin(Saver* saver, int64_t step) {
    saver_advance(saver, step, true);
    saver->phase = Saver::Writing;
    saver->step = step;
    saver->began_s = comm_now();
    saver->retention.bad.erase(step);
    if (saver->split.rank == 0) {
        DiskWait disk(step);
        if (!checkpoint_begin(saver->folder, step)) {
            die("cannot begin a checkpoint in '%s': %s", saver->folder.c_str(), strerror(errno));
        }
    }
    comm_any(false);                                // and rank 0 has made the folder, at its first report
}

// Enqueues the copies of all pieces; facts: what else is to be saved.
static inline void saver_copy(Saver* saver, const Facts& facts) {
    const int64_t step = saver->step;
    for (size_t group = 0; group + 1 < saver->groups.size(); group++) {
        if (group > 0) { saver_wait(saver, step); } // the memory is free again
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
            if (!p.device) {                        // its place is filled anew for the next one
                event_record(saver->copied, saver->stream);
                stream_wait(saver->compute, saver->copied);
            }
        }
        event_record(saver->copied, saver->stream);
        worker_post(saver->worker, [=] { saver_write(saver, group, step, facts); });
    }
}

static inline void saver_free(Saver* saver) {
    if (!saver->worker) { return; }
    stream_sync(saver->stream);
    stream_destroy(saver->stream);
    event_destroy(saver->ready);
    pinned_free(saver->memory);
}

#endif  // LLMC_FILES_SAVER_H
