/*
Which tokens of a shard the loss counts: NAME.mask beside NAME.bin, a byte a token, 1: counted, 0: not. Host
only.

It is a byte and not a bit, so that a row is read as it lies, wherever it begins, and any program can write
and read such a file. Beside 2 or 4 bytes for each token it matters little.

    LossMask mask;                                              // mask.fd < 0: the shard has no such file
    die_if(loss_mask_open(&mask, "qa_train_000001.bin", tokens, T, true));      // true: it must be there
    die_if(loss_mask_apply(mask, "qa_train_000001.bin", w * T, T, targets));    // -1: a target not counted
    mask.counted[w];                                            // how many targets of window w are counted
*/
#pragma once

#include "../checked_files.h"   // gives: format, read_at

struct LossMask {
    int fd = -1;
    std::vector<int> counted;           // of each window of T tokens: its counted targets
};

static inline std::string loss_mask_path(const std::string& shard) {
    const bool named = shard.size() > 4 && shard.compare(shard.size() - 4, 4, ".bin") == 0;
    return (named ? shard.substr(0, shard.size() - 4) : shard) + ".mask";
}

// Opens the mask of a shard of `tokens` tokens and counts. Returns the error, or "".
static inline std::string loss_mask_open(LossMask* mask, const std::string& shard, int64_t tokens, int T,
                                         bool required) {
    const std::string path = loss_mask_path(shard);
    const char* hint = "hint: get.py answers writes both; copy them together";
    mask->fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (mask->fd < 0 && errno == ENOENT && !required) { return ""; }
    if (mask->fd < 0) {
        return format("cannot open '%s', which says which tokens of '%s' count: %s\n%s", path.c_str(),
                      shard.c_str(), strerror(errno), hint);
    }
    struct stat st = {};
    if (fstat(mask->fd, &st) != 0 || !S_ISREG(st.st_mode) || st.st_size != tokens) {
        return format("'%s' has %lld bytes, but '%s' has %lld tokens, and each takes a byte there\n%s",
                      path.c_str(), (long long)st.st_size, shard.c_str(), (long long)tokens, hint);
    }
    const int64_t windows = tokens > 0 ? (tokens - 1) / T : 0;
    mask->counted.assign((size_t)windows, 0);
    std::vector<char> part(1 << 20);
    for (int64_t at = 0; at < tokens;) {
        const ssize_t got = read_at(mask->fd, part.data(), part.size(), at);
        if (got <= 0) {
            return format("cannot read '%s': %s", path.c_str(),
                          got < 0 ? strerror(errno) : "it became shorter");
        }
        for (ssize_t k = 0; k < got; k++, at++) {
            if ((unsigned char)part[(size_t)k] > 1) {
                return format("'%s' holds %d at byte %lld: a token's byte is 1, counted, or 0, not counted",
                              path.c_str(), (unsigned char)part[(size_t)k], (long long)at);
            }
            const int64_t window = (at - 1) / T;        // token `at` is a target of this one
            if (at > 0 && window < windows) { mask->counted[(size_t)window] += part[(size_t)k]; }
        }
    }
    return "";
}

// Makes -1 of each target that is not counted; targets[0] is token first + 1. Returns the error, or "".
static inline std::string loss_mask_apply(const LossMask& mask, const std::string& shard, int64_t first,
                                          int T, int* targets /*(T)*/) {
    std::vector<char> bytes((size_t)T);
    const ssize_t got = read_at(mask.fd, bytes.data(), (size_t)T, first + 1);
    if (got < T) {
        return format("cannot read '%s': %s", loss_mask_path(shard).c_str(),
                      got < 0 ? strerror(errno) : "it was cut short while it was in use");
    }
    for (int t = 0; t < T; t++) {
        if (!bytes[(size_t)t]) { targets[t] = -1; }
    }
    return "";
}
