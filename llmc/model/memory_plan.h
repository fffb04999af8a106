/*
Checks that a run fits into a device's memory before anything is allocated, and says with which flags or rows
it would. Host only.

    typedef std::vector<MemoryItem> Plan;
    auto plan_of = [&](int B, unsigned with) { return Plan{{"params", 248 << 20}, {"ln1", size(B, with)}}; };
    const MemoryFlag flags[] = {{"-r 1"}, {"-r 2"}};        // of bits 0 and 1 of `with`
    const MemoryRoom room = {"NVIDIA H200", free_bytes, reserve_bytes};
    memory_check(plan_of, flags, room, {64, 1024, false});  // dies with a hint if 64 rows do not fit
    memory_print(plan_of(64, 0), 1, true);                  // "memory: 312.000 MiB in all", and a table
*/
#pragma once

#include "../errors.h"      // gives: die, format
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

// Says with which of `flags` B rows fit. If not even all of them do: with which a row more than `without`
// fits, and with which the most rows do; "": with none. `without` rows fit as they are. The flags, which have
// a `text` each, come from the least to the most costly: one is taken only where all before it do not do.
// plan_of(B, with): the plan with the flags whose bits are set.
template <class Plan, class Flags>
static inline std::string memory_advice(Plan plan_of, const Flags& flags, const MemoryRoom& room, int B,
                                        int without) {
    const unsigned sets = 1u << std::size(flags);
    auto largest = [&](unsigned with) {
        return memory_largest([&](int b) { return plan_of(b, with); }, room, B);
    };
    auto advice = [&](int rows) {
        unsigned with = 0;
        while (largest(with) < rows) { with++; }
        std::string text = format("-b %d fits with", largest(with));
        for (size_t i = 0; i < std::size(flags); i++) {
            if (with >> i & 1) { text += std::string(" ") + flags[i].text; }
        }
        return text;
    };
    const int most = largest(sets - 1);
    if (most <= without) { return ""; }
    const std::string few = advice(most == B ? B : without + 1), many = advice(most);
    return few == many ? many : few + "; " + many;
}

// The user's batch. keeps: B cannot become smaller.
struct MemoryBatch { int B, T; bool keeps; };

// Dies if `batch` does not fit, with a hint what would.
template <class Plan, class Flags>
static inline void memory_check(Plan plan_of, const Flags& flags, const MemoryRoom& room,
                                const MemoryBatch& batch) {
    if (memory_fits(plan_of(batch.B, 0), room)) { return; }
    const int largest = memory_largest([&](int B) { return plan_of(B, 0); }, room, batch.B - 1);
    const std::string advice = memory_advice(plan_of, flags, room, batch.B,
                                             batch.keeps ? batch.B - 1 : largest);
    std::string hint = format("the largest micro-batch that fits is -b %d", largest);
    if (largest == 0) { hint = "not even -b 1 fits"; }
    if (batch.keeps) { hint = "a resumed run keeps its -b: more GPUs with -zs 1 or 2 share its state out"; }
    else if (largest == 0 && advice.empty()) { hint += ": choose a smaller model or -t"; }
    if (!advice.empty()) { hint += "; " + advice; }
    const size_t wanted = memory_total(plan_of(batch.B, 0)) + room.reserve;
    die("-b %d -t %d needs %s of memory on %s, which has %s free\nhint: %s", batch.B, batch.T,
        bytes_text(wanted).c_str(), room.device.c_str(), bytes_text(room.free).c_str(), hint.c_str());
}

// Prints the total of each of the ranks and, if they are wanted, the ten largest items, a line each.
static inline void memory_print(std::vector<MemoryItem> plan, int ranks, bool items) {
    std::stable_sort(plan.begin(), plan.end(),
                     [](const MemoryItem& a, const MemoryItem& b) { return a.bytes > b.bytes; });
    const size_t total = memory_total(plan);
    const bool gib = total >= (size_t)1 << 30;
    const double unit = gib ? 1073741824.0 : 1048576.0;
    printf("memory: %.3f %s %s\n", total / unit, gib ? "GiB" : "MiB", ranks > 1 ? "on each rank" : "in all");
    for (size_t i = 0; items && i < plan.size() && i < 10; i++) {
        printf("%16.3f  %s\n", plan[i].bytes / unit, plan[i].name.c_str());
    }
}
