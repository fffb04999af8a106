/*
XXH64, the 64-bit checksum of Collet's xxHash (specified in "xxHash fast digest algorithm", version 0.1.1;
seed 0 here). It runs at memory speed and misses accidental damage with a probability of 2^-64. It does not
protect against an attacker. Host only.

    uint64_t sum = checksum(data, bytes);
    std::string hex = checksum_text(sum);

    Checksum c;                                 // for data that come in parts
    checksum_add(&c, part, part_bytes);
    sum = checksum_end(&c);
*/
#pragma once

#include "errors.h"     // gives: format

constexpr uint64_t kXx1 = 0x9E3779B185EBCA87, kXx2 = 0xC2B2AE3D27D4EB4F, kXx3 = 0x165667B19E3779F9,
                   kXx4 = 0x85EBCA77C2B2AE63, kXx5 = 0x27D4EB2F165667C5;

struct Checksum {
    uint64_t lanes[4] = {kXx1 + kXx2, kXx2, 0, 0 - kXx1};
    uint64_t bytes = 0;                         // added so far
    unsigned char left[32];                     // the last `bytes % 32` bytes, not yet in the lanes
};

static inline uint64_t xx_rotate(uint64_t x, int by) { return x << by | x >> (64 - by); }
static inline uint64_t xx_round(uint64_t lane, uint64_t word) {
    return xx_rotate(lane + word * kXx2, 31) * kXx1;
}
template <class Word> static inline uint64_t xx_word(const unsigned char* at) {      // little-endian
    Word word;
    memcpy(&word, at, sizeof(word));
    return word;
}

static inline void checksum_add(Checksum* c, const void* data, size_t bytes) {
    const unsigned char* at = (const unsigned char*)data;
    const unsigned char* end = at + bytes;
    uint64_t lanes[4] = {c->lanes[0], c->lanes[1], c->lanes[2], c->lanes[3]};
    auto stripe = [&](const unsigned char* s) {
        for (int i = 0; i < 4; i++) { lanes[i] = xx_round(lanes[i], xx_word<uint64_t>(s + 8 * i)); }
    };
    size_t waiting = c->bytes % 32;
    c->bytes += bytes;
    if (waiting > 0 && bytes > 0) {                 // data may be null if bytes is 0
        const size_t more = std::min(bytes, 32 - waiting);
        memcpy(c->left + waiting, at, more);
        at += more;
        waiting += more;
        if (waiting == 32) { stripe(c->left); waiting = 0; }
    }
    for (; end - at >= 32; at += 32) { stripe(at); }
    if (waiting == 0 && at < end) { memcpy(c->left, at, (size_t)(end - at)); }
    memcpy(c->lanes, lanes, sizeof(lanes));
}

static inline uint64_t checksum_end(const Checksum* c) {
    uint64_t sum = kXx5;
    if (c->bytes >= 32) {
        const int rotations[4] = {1, 7, 12, 18};
        sum = 0;
        for (int i = 0; i < 4; i++) { sum += xx_rotate(c->lanes[i], rotations[i]); }
        for (int i = 0; i < 4; i++) { sum = (sum ^ xx_round(0, c->lanes[i])) * kXx1 + kXx4; }
    }
    sum += c->bytes;
    const unsigned char* at = c->left;
    const unsigned char* end = at + c->bytes % 32;
    for (; end - at >= 8; at += 8) {
        sum = xx_rotate(sum ^ xx_round(0, xx_word<uint64_t>(at)), 27) * kXx1 + kXx4;
    }
    if (end - at >= 4) {
        sum = xx_rotate(sum ^ xx_word<uint32_t>(at) * kXx1, 23) * kXx2 + kXx3;
        at += 4;
    }
    for (; at < end; at++) { sum = xx_rotate(sum ^ *at * kXx5, 11) * kXx1; }
    sum = (sum ^ sum >> 33) * kXx2;
    sum = (sum ^ sum >> 29) * kXx3;
    return sum ^ sum >> 32;
}

static inline uint64_t checksum(const void* data, size_t bytes) {
    Checksum c;
    checksum_add(&c, data, bytes);
    return checksum_end(&c);
}

static inline std::string checksum_text(uint64_t sum) { return format("%016llx", (unsigned long long)sum); }
