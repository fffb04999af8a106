/*
How much memory this process may still take. Host only.

    size_t bytes = host_memory_free();              // of the machine, or of what contains this process
    size_t size = proc_bytes("/proc/self/status", "VmSize");
*/
#ifndef LLMC_HOST_MEMORY_H
#define LLMC_HOST_MEMORY_H

#include <stdio.h>      // gives: fopen, fgets
#include <stdlib.h>     // gives: strtoull
#include <string.h>     // gives: strncmp
#include <sys/resource.h> // gives: getrlimit

#include <algorithm>    // gives: std::min
#include <string>       // gives: std::string

// What a line `field: number kB` of such a file says (unit 1: `field number`), in bytes; 0: there is none.
static inline size_t proc_bytes(const char* path, const char* field, size_t unit = 1024) {
    FILE* f = fopen(path, "r");
    char line[256];
    size_t number = 0, length = strlen(field);
    while (f && fgets(line, sizeof(line), f)) {
        if (strncmp(line, field, length) == 0 && line[length] == (unit == 1 ? ' ' : ':')) {
            number = strtoull(line + length + 1, nullptr, 10);
        }
    }
    if (f) { fclose(f); }
    return number * unit;
}

// The number that a file holds; -1: there is no such file, or it holds a word (memory.max: "max").
static inline long long number_in(const std::string& path) {
    FILE* f = fopen(path.c_str(), "r");
    long long number = -1;
    if (f && fscanf(f, "%lld", &number) != 1) { number = -1; }
    if (f) { fclose(f); }
    return number;
}

// What the control groups (version 2) around this process leave: containers and schedulers limit memory so,
// and end who takes more. Files that may be dropped from memory (the kernel's cache) count as taken there,
// but are not. root: where groups are found, another in tests.
static inline size_t cgroup_memory_free(const std::string& root = "/sys/fs/cgroup",
                                        const char* self = "/proc/self/cgroup") {
    size_t left = (size_t)-1;
    std::string group = "/";
    FILE* f = fopen(self, "r");
    char line[4096];
    while (f && fgets(line, sizeof(line), f)) {
        if (strncmp(line, "0::/", 4) == 0) { group = std::string(line + 3, strcspn(line + 3, "\n")); }
    }
    if (f) { fclose(f); }
    if (group.find("..") != std::string::npos) { group = "/"; }     // not to be seen from in here
    for (;; group.erase(group.rfind('/'))) {        // this group, and all that it is in
        const std::string at = root + (group == "/" ? "" : group);
        const long long most = number_in(at + "/memory.max"), used = number_in(at + "/memory.current");
        if (most >= 0 && used >= 0) {
            const long long cache = (long long)proc_bytes((at + "/memory.stat").c_str(), "inactive_file", 1);
            left = std::min(left, (size_t)std::max(1LL, most - used + cache));
        }
        if (group.empty() || group == "/") { return left; }
    }
}

// Under such a limit (ulimit -v) more memory may be free than can be had, and libraries may wait for theirs
// for ever (llmc/ops/cpu_device.h).
static inline bool addresses_limited() {
    struct rlimit most;
    return getrlimit(RLIMIT_AS, &most) == 0 && most.rlim_cur != RLIM_INFINITY;
}

static inline size_t host_memory_free() {
    return std::min(proc_bytes("/proc/meminfo", "MemAvailable"), cgroup_memory_free());
}

#endif  // LLMC_HOST_MEMORY_H
