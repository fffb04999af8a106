/*
How many cores this process may use, and OpenMP's threads. Host only.

    int threads = host_cores();     // of the machine, or fewer: taskset, a scheduler, a container
    share_cores(2);                 // before a program starts: OMP_NUM_THREADS for two that share them
*/
#pragma once

#include <sched.h>      // gives: sched_getaffinity

#include "errors.h"         // gives: std::string, sysconf
#include "host_memory.h"    // gives: cgroup_walk, number_in
#include "numbers.h"        // gives: ceil_div

// `docker --cpus 2` leaves all cores to a process, but stops its threads when they have used the time of two.
// With more threads the others then wait for those that are stopped. INT_MAX: no control group has a quota.
static inline int cgroup_cores(const std::string& root = "/sys/fs/cgroup",
                               const char* self = "/proc/self/cgroup") {
    int cores = INT_MAX;
    cgroup_walk(root, self, "cpu", [&](const std::string& at, bool two) {
        long long quota = -1, period = -1;      // microseconds of all cores, in so many of the clock
        if (two) {
            std::ifstream(at + "cpu.max") >> quota >> period;       // "200000 100000", or "max 100000"
        } else {
            quota = number_in(at + "cpu.cfs_quota_us");
            period = number_in(at + "cpu.cfs_period_us");
        }
        if (quota > 0 && period > 0) { cores = (int)std::min((long long)cores, ceil_div(quota, period)); }
    });
    return cores;
}

static inline int host_cores() {
    cpu_set_t set;                              // for 1024 cores; the call fails where there are more
    const bool known = sched_getaffinity(0, sizeof(set), &set) == 0;
    const int cores = known ? CPU_COUNT(&set) : (int)sysconf(_SC_NPROCESSORS_ONLN);
    return std::max(1, std::min(cores, cgroup_cores()));
}

// Sets OMP_NUM_THREADS for what is started next, unless the user has set it. OpenBLAS reads it, too.
static inline void share_cores(int processes) {
    if (getenv("OMP_NUM_THREADS") && !getenv("LLMC_CORES_SHARED")) { return; }
    setenv("LLMC_CORES_SHARED", "1", 1);        // what is set here is not the user's
    setenv("OMP_NUM_THREADS", std::to_string(std::max(1, host_cores() / processes)).c_str(), 1);
}
