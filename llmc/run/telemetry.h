/*
A GPU's clock, power, temperature and memory, and what limits its clock. Host only.

    Telemetry t = telemetry_start("0000:1B:00.0");      // its PCI bus id
    TelemetrySample sample = telemetry_read(t);
    telemetry_end(&t);

The program loads NVML, the driver's library, at run time, so it builds and runs without it. GPUs are found by
bus id because CUDA_VISIBLE_DEVICES numbers them differently from NVML. Values that a GPU or a driver does not
report are left out. The declarations follow NVML's API reference.
*/
#pragma once

#include <dlfcn.h>      // gives: dlopen, dlsym

#include "../errors.h"  // gives: format
#include "../files/json.h" // gives: json_number, json_quote

struct Telemetry { void *library, *gpu; };      // gpu: NVML's handle, or nullptr

// For the terminal: "1980 MHz 691 W 63 C 27.1 GiB, power cap". For a JSON object: `, "gpu_mhz": 1980, ...`.
struct TelemetrySample { std::string text, json; };

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

// Both texts are empty without NVML, or if there is no such GPU.
static inline TelemetrySample telemetry_read(const Telemetry& t) {
    TelemetrySample sample;
    if (!t.gpu) { return sample; }
    const int kSmClock = 1, kOnChip = 0;                // NVML_CLOCK_SM, NVML_TEMPERATURE_GPU
    unsigned value;
    struct { unsigned long long total, free, used; } memory;
    unsigned long long reasons = 0;
    auto tells = [&](const char* what, auto... args) {
        return nvml_call(t.library, (std::string("nvmlDeviceGet") + what).c_str(), t.gpu, args...);
    };
    auto add = [&](const char* key, const char* form, double x) {
        sample.text += (sample.text.empty() ? "" : " ") + format(form, x);
        sample.json += format(", \"%s\": ", key) + json_number(x);
    };
    if (tells("ClockInfo", kSmClock, &value)) { add("gpu_mhz", "%.0f MHz", value); }
    if (tells("PowerUsage", &value)) { add("gpu_watts", "%.0f W", value * 1e-3); }
    if (tells("Temperature", kOnChip, &value)) { add("gpu_celsius", "%.0f C", value); }
    if (tells("MemoryInfo", &memory)) { add("gpu_gib", "%.1f GiB", (double)memory.used / (1 << 30)); }
    const bool knows_limits = tells("CurrentClocksEventReasons", &reasons) ||
                              tells("CurrentClocksThrottleReasons", &reasons);  // its name before CUDA 12.2
    std::string limits;
    for (const auto& limit : kClockLimits) {
        if (reasons & limit.bit) { limits += (limits.empty() ? "" : ", ") + std::string(limit.text); }
    }
    if (!limits.empty()) { sample.text += ", " + limits; }
    if (knows_limits) { sample.json += ", \"gpu_limits\": " + json_quote(limits); }
    return sample;
}
