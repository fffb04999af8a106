/*
What a bigram model reaches: the loss a network must beat to show that it looks further than one token back.

    g++ -std=c++17 -O2 -pthread -I. dev/data/bigram.cpp -o bigram
    ./bigram -i "data/train*.bin" -j "data/val*.bin"        # bigram val loss 2.406382 ...

P(b | a) = (count(a, b) + s P(b)) / (count(a) + s), with P(b) = (count(b) + t) / (count + t V): pairs seen
decide, single tokens fill in, the more the rarer a is. Counts come from the -i shards, the loss in nats per
token from the -j shards. Of several s and t, the best on -j are taken: a fair rival gets its choice.
*/
#include "llmc/data/dataloader.h"   // gives: data_glob, data_shard_open
#include "llmc/run/flags.h"         // gives: flags_parse

#include <math.h>                   // gives: log
#include <stdio.h>                  // gives: printf

#include <algorithm>                // gives: std::sort, std::equal_range
#include <vector>                   // gives: std::vector

static const size_t kMaxIds = 65536;
static const std::vector<double> kPairSmoothing = {0.01, 0.1, 0.3, 1, 2, 4, 8, 16, 32, 64, 128, 256, 1024};
static const std::vector<double> kSingleSmoothing = {0.001, 0.01, 0.1, 1};

// Every pair of neighbours in the shards of the pattern, as (first << 16) | second.
static std::vector<uint32_t> read_pairs(const char* pattern) {
    std::vector<uint32_t> pairs;
    for (const std::string& path : data_glob(pattern)) {
        DataShard shard = {path, 0, 0, 0, 0, 0, 0, -1};
        std::string error = data_shard_open(&shard);
        if (!error.empty()) { die("%s", error.c_str()); }
        close(shard.fd);
        if (shard.token_bytes != 2) { die("'%s' holds tokens of 32 bits, here they have 16", path.c_str()); }
        std::vector<uint16_t> tokens((size_t)shard.tokens);
        FILE* f = fopen_check(path.c_str(), "rb");
        char header[kShardHeaderBytes];
        fread_check(header, 1, sizeof(header), f, path.c_str());
        fread_check(tokens.data(), 2, tokens.size(), f, path.c_str());
        fclose(f);
        for (size_t i = 1; i < tokens.size(); i++) {
            pairs.push_back((uint32_t)tokens[i - 1] << 16 | tokens[i]);
        }
    }
    if (pairs.empty()) { die("'%s' has no two tokens in a row\nhint: give it more text", pattern); }
    return pairs;
}

int main(int argc, char** argv) {
    const char* train_pattern;
    const char* val_pattern;
    const char* train_default = "dev/data/tinyshakespeare/tiny_shakespeare_train.bin";
    const char* val_default = "dev/data/tinyshakespeare/tiny_shakespeare_val.bin";
    const FlagTable table = {
        {"i", "train-data", FLAG_STRING, &train_pattern, train_default, 1, 0, nullptr, "count these (glob)"},
        {"j", "val-data", FLAG_STRING, &val_pattern, val_default, 1, 0, nullptr, "predict these (glob)"},
    };
    flags_parse(table, argc, argv);
    std::vector<uint32_t> train = read_pairs(train_pattern), val = read_pairs(val_pattern);
    std::vector<double> count_first(kMaxIds), count_second(kMaxIds);
    size_t ids = 0;
    for (uint32_t pair : train) {
        count_first[pair >> 16]++;
        count_second[pair & 0xFFFF]++;
        ids = std::max(ids, (size_t)(pair & 0xFFFF) + 1);
    }
    for (uint32_t pair : val) { ids = std::max(ids, (size_t)(pair & 0xFFFF) + 1); }
    std::sort(train.begin(), train.end());      // equal pairs side by side: a count is the length of a run,
    std::sort(val.begin(), val.end());          // and each distinct pair is looked up once
    const size_t nt = kSingleSmoothing.size();
    std::vector<double> loss(kPairSmoothing.size() * nt);
    for (size_t i = 0, end; i < val.size(); i = end) {
        uint32_t pair = val[i];
        for (end = i; end < val.size() && val[end] == pair; end++) {}
        auto run = std::equal_range(train.begin(), train.end(), pair);
        double seen = (double)(run.second - run.first), first = count_first[pair >> 16];
        for (size_t k = 0; k < loss.size(); k++) {
            double s = kPairSmoothing[k / nt], t = kSingleSmoothing[k % nt];
            double single = (count_second[pair & 0xFFFF] + t) / ((double)train.size() + t * (double)ids);
            loss[k] -= (double)(end - i) * log((seen + s * single) / (first + s));
        }
    }
    size_t best = (size_t)(std::min_element(loss.begin(), loss.end()) - loss.begin());
    printf("bigram val loss %.6f (nats per token; %zu pairs counted, %zu predicted, s = %g, t = %g)\n",
           loss[best] / (double)val.size(), train.size(), val.size(), kPairSmoothing[best / nt],
           kSingleSmoothing[best % nt]);
    stdout_check();
    return 0;
}
