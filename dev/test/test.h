/*
The smallest test harness that counts: CHECK per fact, one closing line per program. Host only.

    TEST("shards") { CHECK(n == 7, "n is %d, expected 7", n); }
    int main() { ...; return test_summary(); }     // prints "N passed, N failed, N skipped", 1 if any failed

What takes more than a second says so: where does a suite's time go? Headings come out at once, so that a log
shows where a program was when it was stopped. A check passes only if its condition is true, so write bounds
as CHECK(err <= tol, ...): NaN then fails.
*/
#pragma once

#include <stdio.h>      // gives: printf
#include <string.h>     // gives: strstr
#include <time.h>       // gives: timespec_get

#include "../../llmc/rand.h"    // gives: rand_normal4

static int test_passed = 0, test_failed = 0, test_skipped = 0;

static inline double test_now() {       // s
    struct timespec t;
    timespec_get(&t, TIME_UTC);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
static const char* test_only = nullptr;         // skips tests whose name does not contain it
static inline double test_begin(const char* name) {
    if (test_only && !strstr(name, test_only)) { return 0.0; }
    printf("== %s\n", name);
    fflush(stdout);
    return test_now();
}
static inline double test_end(double began) {
    const double seconds = test_now() - began;
    if (seconds > 1.0) { printf("   %.1f s\n", seconds); }
    return 0.0;
}

#define TEST(name) for (double began_ = test_begin(name); began_ > 0.0; began_ = test_end(began_))

#define CHECK(cond, ...)                                                        \
    do {                                                                        \
        if (cond) { test_passed++; }                                            \
        else {                                                                  \
            test_failed++;                                                      \
            printf("FAIL %s:%d: %s: ", __FILE__, __LINE__, #cond);              \
            printf(__VA_ARGS__);                                                \
            printf("\n");                                                       \
            fflush(stdout);                                                     \
        }                                                                       \
    } while (0)

#define SKIP(count, ...)                     \
    do {                                     \
        test_skipped += (count);             \
        printf("SKIP (%d): ", (int)(count)); \
        printf(__VA_ARGS__);                 \
        printf("\n");                        \
    } while (0)

// The element of rand_normal4's sequence.
static inline float rand_normal(uint64_t seed, uint32_t tensor, uint64_t element) {
    float z[4];
    rand_normal4(z, seed, tensor, element / 4);
    return z[element % 4];
}

static inline int test_summary() {
    const bool none = test_passed + test_failed + test_skipped == 0;
    if (test_only && none) { CHECK(false, "no test's name contains '%s'", test_only); }
    printf("%d passed, %d failed, %d skipped\n", test_passed, test_failed, test_skipped);
    return test_failed ? 1 : 0;
}
