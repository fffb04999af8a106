/*
The buckets of llmc/ops/token_buckets.h: every position in one segment, every row of dwte with one owner.

    make build/test_token_buckets && build/test_token_buckets
*/
#include <map>                          // gives: std::map

#include "llmc/rand.h"                  // gives: rand_u32
#include "llmc/ops/token_buckets.h"     // gives: build_token_buckets
#include "child.h"                      // gives: check_dies
#include "test.h"                       // gives: TEST, CHECK, test_summary

struct Built {
    std::vector<int> order;
    std::vector<int4> segments, splits;
    TokenBuckets buckets;
    Built(const std::vector<int>& tokens, int vocab) {
        const int n = (int)tokens.size();
        order.assign(n, -1);
        segments.resize(max_bucket_segments(n));
        splits.resize(max_bucket_splits(n) + 1);
        build_token_buckets(&buckets, order.data(), segments.data(), splits.data(), tokens.data(), n, vocab);
    }
};

static void check_buckets(const char* name, const std::vector<int>& tokens, int vocab) {
    const int n = (int)tokens.size();
    const Built b(tokens, vocab);
    const TokenBuckets& k = b.buckets;
    std::map<int, std::vector<int>> positions;          // of each token, what its bucket must be
    for (int i = 0; i < n; i++) { positions[tokens[i]].push_back(i); }
    std::map<int, std::vector<int>> bucket, slots;      // what its segments hold, the slots they write
    CHECK(k.num_segments <= max_bucket_segments(n) && k.num_splits <= max_bucket_splits(n),
          "%s: %d segments and %d splits are more than the bounds", name, k.num_segments, k.num_splits);

    bool sized = true, largest_first = true;
    int before = -1, slot = 0;                          // the token of the segment before; the next slot
    for (int s = 0; s < k.num_segments; s++) {
        const int token = b.segments[s].x, begin = b.segments[s].y, length = b.segments[s].z;
        const bool several = positions[token].size() > (size_t)kBucketSegment;
        bucket[token].insert(bucket[token].end(), &b.order[begin], &b.order[begin] + length);
        sized &= length >= 1 && length <= kBucketSegment && b.segments[s].w == (several ? slot : -1);
        if (several) { slots[token].push_back(slot++); }
        if (s > 0) {
            const size_t larger = positions[before].size(), now = positions[token].size();
            largest_first &= larger > now || (larger == now && before <= token);
        }
        before = token;
    }
    CHECK(sized, "%s: a segment is too long, or adds to a row of several", name);
    CHECK(largest_first, "%s: segments do not begin with the largest bucket", name);
    CHECK(bucket == positions, "%s: a bucket does not have its token's positions in order", name);
    CHECK(slot <= max_bucket_slots(n), "%s: %d slots", name, slot);
    std::map<int, std::vector<int>> read;               // the slots that are added up
    for (int s = 0; s < k.num_splits; s++) {
        for (int i = 0; i < b.splits[s].z; i++) { read[b.splits[s].x].push_back(b.splits[s].y + i); }
    }
    CHECK(read == slots, "%s: the slots that are written are not those that are added up", name);
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
        check_dies("token 4 of 4", [] { Built({0, 1, 4}, 4); }, {"token 4", "position 2", "0 to 3"});
        check_dies("a negative token", [] { Built({-1}, 4); }, {"token -1", "position 0"});
    }
    return test_summary();
}
