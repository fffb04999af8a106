/*
How much memory this process may still take. Host only.

    size_t bytes = host_memory_free();              // of the machine, or less if a container limits it
    size_t size = proc_bytes("/proc/self/status", "VmSize");
*/
#pragma once

#include "errors.h"     // gives: std::string, getrlimit

// The number in a file's line `field: number kB`, in bytes (with unit 1: `field number`). 0: no such line.
static inline size_t proc_bytes(const char* path, const char* field, size_t unit = 1024) {
    const std::string start = std::string(field) + (unit == 1 ? ' ' : ':');
    const size_t n = start.size();
    std::ifstream file(path);
    size_t number = 0;
    for (std::string line; std::getline(file, line);) {
        if (line.compare(0, n, start) == 0) { number = strtoull(&line[n], nullptr, 10); }
    }
    return number * unit;
}

// The number that a file holds; -1: there is no such file, or it holds a word (memory.max: "max").
static inline long long number_in(const std::string& path) {
    long long number = -1;
    return std::ifstream(path) >> number ? number : -1;
}

// Calls look(folder, is_version_2) for this process's control group and for all groups that contain it.
// `self` has lines ID:CONTROLLERS:GROUP. The line of version 2 names no controllers; version 1 has a tree for
// each. Tests pass their own `root`, the folder of the trees.
template <class Look>
static inline void cgroup_walk(const std::string& root, const char* self, const std::string& controller,
                               const Look& look) {
    std::ifstream file(self);
    for (std::string text; std::getline(file, text);) {
        const size_t first = text.find(':'), second = text.find(':', first + 1);
        if (second == std::string::npos) { continue; }
        std::string group = text.substr(second + 1);
        const std::string controllers = "," + text.substr(first + 1, second - first - 1) + ",";
        const bool two = controllers == ",,";
        if (!two && controllers.find("," + controller + ",") == std::string::npos) { continue; }
        const std::string tree = two ? root : root + "/" + controller;
        if (group.find("..") != std::string::npos) { group = "/"; }     // the group is outside this container
        for (;; group.erase(group.rfind('/'))) {
            look(tree + (group == "/" ? "" : group) + "/", two);
            if (group.empty() || group == "/") { break; }
        }
    }
}

// Containers and schedulers limit memory by control groups and kill processes that take more. The kernel
// counts cached files as used. It can drop them, so they are free here.
static inline size_t cgroup_memory_free(const std::string& root = "/sys/fs/cgroup",
                                        const char* self = "/proc/self/cgroup") {
    size_t left = (size_t)-1;
    cgroup_walk(root, self, "memory", [&](const std::string& at, bool two) {
        const long long most = number_in(at + (two ? "memory.max" : "memory.limit_in_bytes"));
        const long long used = number_in(at + (two ? "memory.current" : "memory.usage_in_bytes"));
        if (most < 0 || used < 0) { return; }
        const char* cached = two ? "inactive_file" : "total_inactive_file";
        const long long cache = (long long)proc_bytes((at + "memory.stat").c_str(), cached, 1);
        left = std::min(left, (size_t)std::max(1LL, most - used + cache));
    });
    return left;
}

// True under ulimit -v. Allocations may then fail although memory is free, and some libraries retry for ever
// (llmc/ops/cpu_device.h).
static inline bool addresses_limited() {
    struct rlimit most;
    return getrlimit(RLIMIT_AS, &most) == 0 && most.rlim_cur != RLIM_INFINITY;
}

static inline size_t host_memory_free() {
    return std::min(proc_bytes("/proc/meminfo", "MemAvailable"), cgroup_memory_free());
}
