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

// What one tree of control groups leaves to a group in it: the least of this one and of all around it.
// Files that may be dropped from memory (the kernel's cache) count as taken there, but are not.
static inline size_t cgroup_tree_free(const std::string& root, std::string group, const char* limit,
                                      const char* usage, const char* cached) {
    size_t left = (size_t)-1;
    if (group.find("..") != std::string::npos) { group = "/"; }     // not to be seen from in here
    for (;; group.erase(group.rfind('/'))) {
        const std::string at = root + (group == "/" ? "" : group) + "/";
        const long long most = number_in(at + limit), used = number_in(at + usage);
        if (most >= 0 && used >= 0) {
            const long long cache = (long long)proc_bytes((at + "memory.stat").c_str(), cached, 1);
            left = std::min(left, (size_t)std::max(1LL, most - used + cache));
        }
        if (group.empty() || group == "/") { return left; }
    }
}

// Containers and schedulers limit memory by control groups, and end who takes more. self: lines
// ID:CONTROLLERS:GROUP; that of version 2 names no controllers, and version 1 has a tree for each. root:
// where the trees are, another in tests.
static inline size_t cgroup_memory_free(const std::string& root = "/sys/fs/cgroup",
                                        const char* self = "/proc/self/cgroup") {
    size_t left = (size_t)-1;
    FILE* f = fopen(self, "r");
    char line[4096];
    while (f && fgets(line, sizeof(line), f)) {
        const std::string text(line, strcspn(line, "\n"));
        const size_t first = text.find(':'), second = text.find(':', first + 1);
        if (second == std::string::npos) { continue; }
        const std::string group = text.substr(second + 1);
        const std::string controllers = "," + text.substr(first + 1, second - first - 1) + ",";
        if (controllers == ",,") {
            left = std::min(left, cgroup_tree_free(root, group, "memory.max", "memory.current",
                                                   "inactive_file"));
        } else if (controllers.find(",memory,") != std::string::npos) {
            left = std::min(left, cgroup_tree_free(root + "/memory", group, "memory.limit_in_bytes",
                                                   "memory.usage_in_bytes", "total_inactive_file"));
        }
    }
    if (f) { fclose(f); }
    return left;
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
