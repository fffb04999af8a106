/*
Token positions sorted by token, for the embedding's backward: each token's bucket of positions is summed in a
fixed order, so the gradient needs no atomics and is the same in every run. Host only; runs while the device
still works on the micro-step before.

    int order[N]; int4 segments[max_bucket_segments(N)], splits[max_bucket_splits(N)];      // pinned, usually
    TokenBuckets buckets;
    build_token_buckets(&buckets, order, segments, splits, tokens, N, Vp);

124M, B=64, T=1024: 65,536 positions, some 10,000 buckets; the commonest token alone holds a few thousand
positions and is cut into segments of kBucketSegment, so that no thread block of the kernel works much longer
than the others.
*/
#pragma once

#include "../errors.h"  // gives: die
#include "op_types.h"   // gives: TokenBuckets, int4
#include "ops.h"        // gives: Span

constexpr int kBucketSegment = 128;     // positions one thread block sums

// Bounds for n positions. A segment holds at least one position; only buckets longer than kBucketSegment are
// split, into fewer than 2 * length / kBucketSegment slots each.
static inline int64_t max_bucket_segments(int64_t n) { return n; }
static inline int64_t max_bucket_splits(int64_t n) { return n / (kBucketSegment + 1); }
static inline int64_t max_bucket_slots(int64_t n) { return 2 * n / kBucketSegment; }

// Segments and splits come largest bucket first (ties: smaller token first): the long ones start early.
static inline void build_token_buckets(TokenBuckets* buckets, int* order /*(n)*/, int4* segments,
                                       int4* splits, const int* tokens /*(n)*/, int n, int vocab) {
    std::vector<int> start(vocab + 1, 0);               // of each token's bucket in `order`
    for (int i = 0; i < n; i++) {
        if (tokens[i] < 0 || tokens[i] >= vocab) {
            die("token %d at position %d of the batch: allowed are 0 to %d", tokens[i], i, vocab - 1);
        }
        start[tokens[i] + 1]++;
    }
    std::vector<int> by_size;                           // tokens that occur
    for (int token = 0; token < vocab; token++) {
        if (start[token + 1] > 0) { by_size.push_back(token); }
        start[token + 1] += start[token];
    }
    std::vector<int> next(start.begin(), start.end() - 1);
    for (int i = 0; i < n; i++) { order[next[tokens[i]]++] = i; }

    auto length = [&](int token) { return start[token + 1] - start[token]; };
    std::stable_sort(by_size.begin(), by_size.end(), [&](int a, int b) { return length(a) > length(b); });
    int num_segments = 0, num_splits = 0, slot = 0;
    for (int token : by_size) {
        const bool whole = length(token) <= kBucketSegment;
        const int first_slot = slot;
        for (int begin = start[token]; begin < start[token + 1]; begin += kBucketSegment) {
            int4 segment = {token, begin, std::min(kBucketSegment, start[token + 1] - begin),
                            whole ? -1 : slot++};
            segments[num_segments++] = segment;
        }
        if (!whole) {
            int4 split = {token, first_slot, slot - first_slot, 0};
            splits[num_splits++] = split;
        }
    }
    *buckets = {order, segments, splits, num_segments, num_splits};
}

// The document of each position of a row, for attention's Mask. One begins with the row, and at each token
// `end`, which stands before its text. In rows of conversations `end` also stands behind each answer: one
// begins at the second of two. conversations: (rows), or null where no row has any.
static inline void find_documents(Span* documents, const int* tokens /*(rows,T) both*/, int rows, int T,
                                  int end, const char* conversations) {
    for (int b = 0; b < rows; b++, tokens += T, documents += T) {
        const bool talks = conversations && conversations[b];
        auto begins = [=](int t) { return tokens[t] == end && (!talks || tokens[t - 1] == end); };
        for (int first = 0, next; first < T; first = next) {
            next = first + 1;
            while (next < T && !begins(next)) { next++; }
            std::fill(documents + first, documents + next, Span{first, next - 1});
        }
    }
}
