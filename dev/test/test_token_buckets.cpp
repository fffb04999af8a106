/*
The buckets of llmc/ops/token_buckets.h: every position in one segment, every row of dwte with one owner.

    make build/test_token_buckets && build/test_token_buckets
*/
#include <algorithm>                    // gives: std::is_sorted
#include <vector>                       // gives: std::vector

#include "llmc/rand.h"                  // gives: rand_u32
#include "llmc/ops/token_buckets.h"     // gives: build_token_buckets
#include "child.h"                      // gives: check_dies
#include "test.h"                       // gives: TEST, CHECK, test_summary

struct Built {
    std::vector<int> order;
    std::vector<int4> segments, splits;
    TokenBuckets buckets;
};

static Built build(const std::vector<int>& tokens, int vocab) {
    const int n = (int)tokens.size();
    Built b;
    b.order.assign(n, -1);
    b.segments.resize(max_bucket_segments(n));
    b.splits.resize(max_bucket_splits(n) + 1);
    build_token_buckets(&b.buckets, b.order.data(), b.segments.data(), b.splits.data(), tokens.data(), n,
                        vocab);
    return b;
}

static void check_buckets(const char* name, const std::vector<int>& tokens, int vocab) {
    const int n = (int)tokens.size();
    const Built b = build(tokens, vocab);
    const TokenBuckets& k = b.buckets;
    std::vector<int> count(vocab), segments_of(vocab), covered(n), slots;
    for (int token : tokens) { count[token]++; }
    CHECK(k.num_segments <= max_bucket_segments(n) && k.num_splits <= max_bucket_splits(n),
          "%s: %d segments and %d splits are more than the bounds", name, k.num_segments, k.num_splits);

    bool sorted = true, whole = true, largest_first = true;
    for (int i = 1; i < n; i++) {
        const int before = tokens[b.order[i - 1]], now = tokens[b.order[i]];
        sorted &= before < now || (before == now && b.order[i - 1] < b.order[i]);
    }
    CHECK(sorted, "%s: positions are not in the order of their tokens, then of their own", name);
    for (int s = 0; s < k.num_segments; s++) {
        const int4 segment = b.segments[s];             // token, begin, length, slot
        segments_of[segment.x]++;
        whole &= segment.z >= 1 && segment.z <= kBucketSegment;
        whole &= (segment.w < 0) == (count[segment.x] <= kBucketSegment);
        if (segment.w >= 0) { slots.push_back(segment.w); }
        for (int i = segment.y; i < segment.y + segment.z; i++) {
            covered[i]++;
            whole &= tokens[b.order[i]] == segment.x;
        }
        if (s > 0) {
            const int before = b.segments[s - 1].x, now = segment.x;
            largest_first &= count[before] > count[now] || (count[before] == count[now] && before <= now);
        }
    }
    CHECK(whole, "%s: a segment is too long, holds another token, or adds to a row of several", name);
    CHECK(largest_first, "%s: segments do not begin with the largest bucket", name);
    CHECK(std::count(covered.begin(), covered.end(), 1) == n, "%s: a position in no segment or two", name);

    bool rows = true;
    std::vector<int> read;
    for (int s = 0; s < k.num_splits; s++) {
        const int4 split = b.splits[s];                 // token, first slot, slots
        rows &= split.z == segments_of[split.x] && split.z >= 2;
        for (int slot = split.y; slot < split.y + split.z; slot++) { read.push_back(slot); }
    }
    std::sort(slots.begin(), slots.end());
    std::sort(read.begin(), read.end());
    CHECK(rows && read == slots && std::unique(read.begin(), read.end()) == read.end(),
          "%s: the slots that are written are not those that are added up, once each", name);
    CHECK((int64_t)slots.size() <= max_bucket_slots(n), "%s: %zu slots", name, slots.size());
}

int main() {
    TEST("segments, slots and splits") {
        for (int length : {1, 127, 128, 129, 256, 257, 1000}) {
            check_buckets("one token", std::vector<int>(length, 3), 4);
        }
        for (int vocab : {1, 2, 7, 300}) {
            std::vector<int> tokens, skewed;
            for (uint32_t i = 0; i < 2000; i++) {
                const uint32_t r = rand_u32(1, RAND_SAMPLE, (uint32_t)vocab, i);
                tokens.push_back((int)(r % (uint32_t)vocab));
                skewed.push_back((int)((r >> 16) % 4 ? 0 : r % (uint32_t)vocab));
            }
            check_buckets("random", tokens, vocab);
            check_buckets("skewed", skewed, vocab);
        }
    }
    TEST("tokens that the vocabulary lacks") {
        check_dies("token 4 of 4", [] { build({0, 1, 4}, 4); }, {"token 4", "position 2", "0 to 3"});
        check_dies("a negative token", [] { build({-1}, 4); }, {"token -1", "position 0"});
    }
    return test_summary();
}
