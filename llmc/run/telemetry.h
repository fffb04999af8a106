/*
A GPU's clock, power, temperature and memory, and what limits its clock. Host only.

    Telemetry t = telemetry_start("0000:1B:00.0");      // its PCI bus id
    TelemetrySample sample;
    if (telemetry_read(t, &sample)) {                   // false: no NVML, or no such GPU
        telemetry_text(sample);                         // "1980 MHz 691 W 63 C 27.1 GiB, power cap"
        telemetry_json(sample);                         // ", \"gpu_mhz\": 1980, ...": fields of a JSON object
    }
    telemetry_end(&t);

The program loads NVML, the driver's library, at run time, so it builds and runs without it. GPUs are found by
bus id because CUDA_VISIBLE_DEVICES numbers them differently from NVML. Values that a GPU or a driver does not
report are left out. The declarations follow NVML's API reference.
*/
#ifndef LLMC_RUN_TELEMETRY_H
#define LLMC_RUN_TELEMETRY_H

#include <dlfcn.h>      // gives: dlopen, dlsym
#include <math.h>       // gives: NAN, isnan
#include <stdint.h>     // gives: uint64_t

#include <string>       // gives: std::string

#include "../check.h"   // gives: format
#include "../files/json.h" // gives: json_number, json_quote

struct Telemetry { void *library, *gpu; };      // gpu: NVML's handle, or nullptr

// In this order on the terminal and in the JSON.
enum Reading { READ_CLOCK, READ_POWER, READ_TEMPERATURE, READ_MEMORY, kReadings };
static const struct { const char *key, *text; } kReadingForms[kReadings] = {
    {"gpu_mhz", "%.0f MHz"}, {"gpu_watts", "%.0f W"}, {"gpu_celsius", "%.0f C"}, {"gpu_gib", "%.1f GiB"}};

struct TelemetrySample {
    double values[kReadings];       // NAN: not reported
    bool knows_limits;
    std::string limits;             // what limits the clock, "": nothing
};

// nvmlClocksEventReasons, without bit 0: the GPU is idle.
static const struct { uint64_t bit; const char* text; } kClockLimits[] = {
    {0x2, "set clocks"}, {0x4, "power cap"}, {0x8, "hardware slowdown"}, {0x10, "sync boost"},
    {0x20, "heat"}, {0x40, "heat (hardware)"}, {0x80, "power brake"}, {0x100, "display clocks"}};

// Calls a function of NVML; false: the library lacks it, or it returned an error.
template <class... Args> static inline bool nvml_call(void* library, const char* name, Args... args) {
    int (*function)(Args...);
    *(void**)&function = dlsym(library, name);
    return function && function(args...) == 0;          // NVML_SUCCESS
}

static inline void telemetry_end(Telemetry* t) {
    if (t->gpu) { nvml_call(t->library, "nvmlShutdown"); }
    if (t->library) { dlclose(t->library); }
    *t = Telemetry();
}

static inline Telemetry telemetry_start(const std::string& bus_id) {
    Telemetry t = {dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL), nullptr};
    if (!t.library || !nvml_call(t.library, "nvmlInit_v2")) { telemetry_end(&t); return t; }
    if (!nvml_call(t.library, "nvmlDeviceGetHandleByPciBusId_v2", bus_id.c_str(), &t.gpu)) {
        nvml_call(t.library, "nvmlShutdown");
        t.gpu = nullptr;
        telemetry_end(&t);
    }
    return t;
}

static inline bool telemetry_read(const Telemetry& t, TelemetrySample* sample) {
    if (!t.gpu) { return false; }
    const int kSmClock = 1, kOnChip = 0;                // NVML_CLOCK_SM, NVML_TEMPERATURE_GPU
    unsigned mhz, milliwatts, celsius;
    struct { unsigned long long total, free, used; } memory;
    unsigned long long reasons = 0;
    auto tells = [&](const char* what, auto... args) {
        return nvml_call(t.library, (std::string("nvmlDeviceGet") + what).c_str(), t.gpu, args...);
    };
    *sample = TelemetrySample();
    sample->values[READ_CLOCK] = tells("ClockInfo", kSmClock, &mhz) ? mhz : NAN;
    sample->values[READ_POWER] = tells("PowerUsage", &milliwatts) ? milliwatts * 1e-3 : NAN;
    sample->values[READ_TEMPERATURE] = tells("Temperature", kOnChip, &celsius) ? celsius : NAN;
    sample->values[READ_MEMORY] = tells("MemoryInfo", &memory) ? (double)memory.used / (1 << 30) : NAN;
    sample->knows_limits = tells("CurrentClocksEventReasons", &reasons) ||
                           tells("CurrentClocksThrottleReasons", &reasons);     // its name before CUDA 12.2
    for (const auto& limit : kClockLimits) {
        if (!(reasons & limit.bit)) { continue; }
        sample->limits += (sample->limits.empty() ? "" : ", ") + std::string(limit.text);
    }
    return true;
}

static inline std::string telemetry_text(const TelemetrySample& sample) {
    std::string text;
    for (int i = 0; i < kReadings; i++) {
        if (isnan(sample.values[i])) { continue; }
        text += (text.empty() ? "" : " ") + format(kReadingForms[i].text, sample.values[i]);
    }
    return text + (sample.limits.empty() ? "" : ", " + sample.limits);
}

static inline std::string telemetry_json(const TelemetrySample& sample) {
    std::string json;
    for (int i = 0; i < kReadings; i++) {
        if (isnan(sample.values[i])) { continue; }
        json += format(", \"%s\": ", kReadingForms[i].key) + json_number(sample.values[i]);
    }
    if (sample.knows_limits) { json += ", \"gpu_limits\": " + json_quote(sample.limits); }
    return json;
}

#endif  // LLMC_RUN_TELEMETRY_H
