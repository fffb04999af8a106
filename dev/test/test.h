/*
The smallest test harness that counts: CHECK per fact, one closing line per program. Host only.

    TEST("shards") { CHECK(n == 7, "n is %d, expected 7", n); }
    int main() { ...; return test_summary(); }     // prints "N passed, N failed, N skipped", 1 if any failed

A check passes only if its condition is true, so write bounds as CHECK(err <= tol, ...): NaN then fails.
*/
#ifndef DEV_TEST_H
#define DEV_TEST_H

#include <stdio.h>      // gives: printf

static int test_passed = 0, test_failed = 0, test_skipped = 0;

#define TEST(name) for (int once_ = (printf("== %s\n", name), 1); once_; once_ = 0)

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

static inline int test_summary() {
    printf("%d passed, %d failed, %d skipped\n", test_passed, test_failed, test_skipped);
    return test_failed ? 1 : 0;
}

#endif  // DEV_TEST_H
