/*
Checks that a run fits into a device's memory before anything is allocated, and suggests a smaller one if it
does not. Host only.

    typedef std::vector<MemoryItem> Plan;
    auto plan_of = [&](int B) { return Plan{{"parameters", 248 << 20}, {"ln1", (size_t)B << 20}}; };
    const MemoryRoom room = {"NVIDIA H200", free_bytes, reserve_bytes};
    memory_check(plan_of, room, {64, 1024, false, true});   // dies with a hint if 64 rows do not fit
    memory_print(plan_of(64), true);                        // "memory: 312.000 MiB in all", and a table
*/
#pragma once

#include "../check.h"       // gives: die, format
#include "../numbers.h"     // gives: bytes_text

struct MemoryItem { std::string name; size_t bytes; };

// In bytes. free: 0 if not known; then everything fits. reserve: memory that no plan may use.
struct MemoryRoom { std::string device; size_t free, reserve; };

static inline size_t memory_total(const std::vector<MemoryItem>& plan) {
    size_t bytes = 0;
    for (const MemoryItem& item : plan) { bytes += item.bytes; }
    return bytes;
}

static inline bool memory_fits(const std::vector<MemoryItem>& plan, const MemoryRoom& room) {
    return room.free == 0 || memory_total(plan) + room.reserve <= room.free;
}

// The largest B up to `most` that fits; 0: none does. plan_of(B): the plan with B rows.
template <class Plan> static inline int memory_largest(Plan plan_of, const MemoryRoom& room, int most) {
    int low = 0, high = most + 1;               // low fits (0 without a check), high does not or is too many
    while (high - low > 1) {
        const int mid = low + (high - low) / 2;
        (memory_fits(plan_of(mid), room) ? low : high) = mid;
    }
    return low;
}

// The user's batch. keeps: B cannot become smaller. may_recompute: -r 2 would need less memory.
struct MemoryBatch { int B, T; bool keeps, may_recompute; };

// Dies if `batch` does not fit, with a hint what would.
template <class Plan>
static inline void memory_check(Plan plan_of, const MemoryRoom& room, const MemoryBatch& batch) {
    if (memory_fits(plan_of(batch.B), room)) { return; }
    const int largest = memory_largest(plan_of, room, batch.B - 1);
    std::string hint = largest > 0 ? format("the largest micro-batch that fits is -b %d", largest)
                               : std::string("not even -b 1 fits: choose a smaller model or -t");
    if (batch.keeps) { hint = "a resumed run keeps its -b: more GPUs with -zs 1 or 2 share its state out"; }
    if (batch.may_recompute) { hint += "; -r 2 needs less memory"; }
    const size_t wanted = memory_total(plan_of(batch.B)) + room.reserve;
    die("-b %d -t %d needs %s of memory on %s, which has %s free\nhint: %s", batch.B, batch.T,
        bytes_text(wanted).c_str(), room.device.c_str(), bytes_text(room.free).c_str(), hint.c_str());
}

// Prints the total and, if they are wanted, the ten largest items, a line each.
static inline void memory_print(std::vector<MemoryItem> plan, bool items) {
    std::stable_sort(plan.begin(), plan.end(),
                     [](const MemoryItem& a, const MemoryItem& b) { return a.bytes > b.bytes; });
    const size_t total = memory_total(plan);
    const bool gib = total >= (size_t)1 << 30;
    const double unit = gib ? 1073741824.0 : 1048576.0;
    printf("memory: %.3f %s in all\n", total / unit, gib ? "GiB" : "MiB");
    for (size_t i = 0; items && i < plan.size() && i < 10; i++) {
        printf("%16.3f  %s\n", plan[i].bytes / unit, plan[i].name.c_str());
    }
}
