/*
Reports of finished steps. The host enqueues step s+1 before it waits for the results of step s, so the device
always has work.

    Reports reports = {};
    reports_init(&reports, config, parameters, T, device, low_precision);
    reports_begin(&reports, step, stream);                      // enqueued before a step's work
    reports_end(&reports, step, model.state, stream);           // and after it
    while (reports_waiting(reports) > 1) { report_step(&reports, &logger, schedule); }  // prints and logs
    reports_free(&reports);
*/
#pragma once

#include "../errors.h"                  // gives: std::string
#include "../comm/comm.h"               // gives: comm, CommWait, DiskWait
#include "../files/json.h"              // gives: json_number
#include "../model/model_config.h"      // gives: Config
#include "../ops/device.h"              // gives: Stream, Event, copy_to_host, pinned_malloc, DeviceInfo
#include "../ops/op_types.h"            // gives: DeviceState
#include "logger.h"                     // gives: Logger, TrainMetrics, logger_train
#include "plan.h"                       // gives: gpu_kind, step_flops
#include "progress.h"                   // gives: progress_start, progress_utf8
#include "report.h"                     // gives: Report, report_add, report_show, report_skip
#include "run_config.h"                 // gives: run
#include "schedulers.h"                 // gives: LrSchedule, lr_at
#include "telemetry.h"                  // gives: telemetry_start, telemetry_end

struct Reports {
    static const int kSlots = 2;
    DeviceState* states;                    // (kSlots) pinned
    Event begun[kSlots], ended[kSlots];     // the device's clock measures a step: the host may be far ahead
    int64_t first, end;                     // steps [first, end) have ended or will, and wait for a report
    Report report;                          // the terminal's lines
};

// low_precision: the build's type has 16 bits, of which the table of GPUs knows the speed.
static inline void reports_init(Reports* r, const Config& config, double parameters, int T,
                                const DeviceInfo& device, bool low_precision, int64_t max_steps) {
    r->states = (DeviceState*)pinned_malloc(Reports::kSlots * sizeof(DeviceState), "step reports");
    for (int slot = 0; slot < Reports::kSlots; slot++) {
        r->begun[slot] = event_create();
        r->ended[slot] = event_create();
    }
    r->first = r->end = 0;
    r->report = {max_steps, run.total_batch, run.log_every, run.log_gpu};
    if (run.log_gpu > 0 && comm.rank == 0) { r->report.telemetry = telemetry_start(device.bus_id); }
    const GpuKind* gpu = gpu_kind(device.name);
    r->report.peak_speed = !low_precision || !gpu ? 0.0
                         : gpu->tflops * 1e12 * comm.world / step_flops(config, parameters, T);
    r->report.sparks = progress_utf8();
    progress_start();
}

static inline void reports_free(Reports* r) {
    for (int slot = 0; slot < Reports::kSlots; slot++) {
        event_destroy(r->begun[slot]);
        event_destroy(r->ended[slot]);
    }
    telemetry_end(&r->report.telemetry);
    pinned_free(r->states);
}

static inline void reports_begin(Reports* r, int64_t step, Stream stream) {
    event_record(r->begun[step % Reports::kSlots], stream);
}
static inline void reports_end(Reports* r, int64_t step, const DeviceState* state, Stream stream) {
    copy_to_host(&r->states[step % Reports::kSlots], state, sizeof(DeviceState), stream);
    event_record(r->ended[step % Reports::kSlots], stream);
    if (r->first == r->end) { r->first = step; }
    r->end = step + 1;
}

static inline int64_t reports_waiting(const Reports& r) { return r.end - r.first; }

// Waits for the oldest step without a report, prints and logs it. Returns how many updates in a row have been
// skipped by then.
static inline int report_step(Reports* r, Logger* logger, const LrSchedule& schedule) {
    const int64_t step = r->first++;
    const int slot = (int)(step % Reports::kSlots);
    {
        CommWait waiting;                   // it may wait for other ranks
        event_wait(r->ended[slot]);
    }
    const DeviceState state = r->states[slot];
    const double ms = event_ms(r->begun[slot], r->ended[slot]);
    Report* report = &r->report;
    const double tokens_per_s = (double)report->total_batch / ms * 1e3;
    const TrainMetrics metrics = {step, state.loss, lr_at(schedule, step), state.update.norm,
                                  (step + 1) * report->total_batch, ms, tokens_per_s};
    report_add(report, metrics);
    std::string more = report_gpu(report);
    if (run.matmul_dtype != MatmulDtype::Bf16) {
        more += ", \"saturated\": " + json_number(state.fp8_saturated);
    }
    DiskWait disk;                          // for the logs; stdout may be a file, too
    report_show(report);
    logger_train(logger, metrics, more);
    if (comm.rank == 0) { report_skip(step, state.loss, state.update, state.fp8_saturated); }
    return state.update.skipped_in_a_row;
}
