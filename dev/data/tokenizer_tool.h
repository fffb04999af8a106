/*
What tokenize.cpp needs beyond llmc/data/tokenizer.h: bytes that are no text, a cache of words, places where a
long text can be cut, and the vocabulary as llm.c's gpt2_tokenizer.bin. Host only.

    if (text_fault(s, 0, n, false) < n) { ... }                         // UTF-8 without bytes 0?
    TokenizerCache cache;                                               // one for each thread
    tokenizer_encode(&tok, text.data(), text.size(), ids, &cache);      // appends
    if (tokenizer_can_cut(&tok, text.data(), text.size(), i)) { ... }   // [0, i) and [i, size) by themselves
    tokenizer_write(&tok, "gpt2_tokenizer.bin");
*/
#pragma once

#include <stddef.h>     // gives: ptrdiff_t
#include <stdint.h>     // gives: uint32_t, uint64_t
#include <string.h>     // gives: memcpy

#include <algorithm>    // gives: std::copy, std::max, std::min
#include <string>       // gives: std::string
#include <vector>       // gives: std::vector

#include "llmc/atomic_files.h"      // gives: AtomicFile, utf8_decode
#include "llmc/data/tokenizer.h"    // gives: Tokenizer, TokenizerHead, tokenizer_merge, tokenizer_piece

// ---- what is no text ----

// A machine that reads UTF-8 byte by byte without a branch. Its state is a multiple of 6, by which the next
// byte's entry is shifted: the new state then stands in the lowest six bits.
enum Utf8State { UTF8_BEGIN, UTF8_1, UTF8_2, UTF8_3, UTF8_E0, UTF8_ED, UTF8_F0, UTF8_F4, UTF8_BAD };

static constexpr Utf8State utf8_next(int state, int byte) {         // UTF8_n: n more bytes of 80..BF
    switch (state) {
        case UTF8_BEGIN:
            return byte < 0x80 ? UTF8_BEGIN : byte < 0xC2 ? UTF8_BAD : byte < 0xE0 ? UTF8_1
                 : byte == 0xE0 ? UTF8_E0 : byte == 0xED ? UTF8_ED : byte < 0xF0 ? UTF8_2
                 : byte == 0xF0 ? UTF8_F0 : byte < 0xF4 ? UTF8_3 : byte == 0xF4 ? UTF8_F4 : UTF8_BAD;
        case UTF8_1: return byte >= 0x80 && byte < 0xC0 ? UTF8_BEGIN : UTF8_BAD;
        case UTF8_2: return byte >= 0x80 && byte < 0xC0 ? UTF8_1 : UTF8_BAD;
        case UTF8_3: return byte >= 0x80 && byte < 0xC0 ? UTF8_2 : UTF8_BAD;
        case UTF8_E0: return byte >= 0xA0 && byte < 0xC0 ? UTF8_1 : UTF8_BAD;       // else overlong
        case UTF8_ED: return byte >= 0x80 && byte < 0xA0 ? UTF8_1 : UTF8_BAD;       // else a surrogate
        case UTF8_F0: return byte >= 0x90 && byte < 0xC0 ? UTF8_2 : UTF8_BAD;       // else overlong
        case UTF8_F4: return byte >= 0x80 && byte < 0x90 ? UTF8_2 : UTF8_BAD;       // else above U+10FFFF
    }
    return UTF8_BAD;
}

struct Utf8Table { uint64_t of[256]; };
static constexpr Utf8Table utf8_table() {
    Utf8Table table = {};
    for (int byte = 0; byte < 256; byte++) {
        for (int state = 0; state <= UTF8_BAD; state++) {
            table.of[byte] |= (uint64_t)(6 * utf8_next(state, byte)) << 6 * state;
        }
    }
    return table;
}
static constexpr Utf8Table kUtf8 = utf8_table();

// The first of the bytes i..n-1 that is no UTF-8 or, unless bytes 0 separate documents, is 0; n if none is.
static inline size_t text_fault(const uint8_t* s, size_t i, size_t n, bool nul_separates) {
    const size_t kAtOnce = 64, begin = i;
    for (uint64_t state = 0; i + kAtOnce <= n; i += kAtOnce) {
        uint8_t high = 0, zero = 0;
        for (size_t k = 0; k < kAtOnce; k++) {
            high |= s[i + k];
            zero |= s[i + k] == 0;
        }
        if (zero && !nul_separates) { break; }
        if (high < 0x80 && (state & 63) == 0) { continue; }
        for (size_t k = 0; k < kAtOnce; k++) { state = kUtf8.of[s[i + k]] >> (state & 63); }
        if ((state & 63) == 6 * UTF8_BAD) { break; }
    }
    do { i -= i > begin; } while (i > begin && (s[i] & 0xC0) == 0x80);     // a character may not end there
    while (i < n) {
        size_t width;
        const int32_t c = utf8_decode(s + i, n - i, &width);
        if (c < 0 || (c == 0 && !nul_separates)) { return i; }
        i += width;
    }
    return n;
}

// Where the last character begins if it is not ASCII: it may go on after these n bytes. Else n.
static inline size_t text_unfinished(const uint8_t* s, size_t n) {
    for (size_t back = 1; back <= std::min(n, (size_t)4) && s[n - back] >= 0x80; back++) {
        if (s[n - back] >= 0xC0) { return n - back; }
    }
    return n;
}

// ---- a cache ----

// The ids of recent short pieces: text repeats its words, so most pieces need no merging.
struct TokenizerCache {
    static const size_t kBits = 16, kKey = 15, kIds = 7;
    struct Entry {
        uint64_t key[2];        // the piece's bytes, then zeros; the last byte is its length (0: free)
        uint16_t ids[kIds], count;
    };
    std::vector<Entry> entries = std::vector<Entry>((size_t)1 << kBits, Entry());       // 2 MB
};

static inline TokenizerCache::Entry* tokenizer_cache_entry(TokenizerCache* cache, const uint8_t* piece,
                                                           size_t n, uint64_t key[2]) {
    key[0] = key[1] = 0;
    memcpy(key, piece, n);
    key[1] |= (uint64_t)n << 56;
    uint64_t hash = (key[0] ^ (key[1] << 29 | key[1] >> 35)) * 0x9E3779B97F4A7C15ull;
    return &cache->entries[(hash ^ hash >> 32) * 0x9E3779B97F4A7C15ull >> (64 - TokenizerCache::kBits)];
}

// Appends the ids of text to out. cache: null, or this thread's.
static inline void tokenizer_encode(const Tokenizer* tok, const char* text, size_t len,
                                    std::vector<uint32_t>& out, TokenizerCache* cache) {
    const uint8_t* s = (const uint8_t*)text;
    for (size_t i = 0, n; i < len; i += n) {
        n = tokenizer_piece(tok, s + i, len - i);
        if (!cache || n > TokenizerCache::kKey) {
            tokenizer_merge(tok, s + i, n, out);
            continue;
        }
        uint64_t key[2];
        TokenizerCache::Entry* e = tokenizer_cache_entry(cache, s + i, n, key);
        if (e->key[0] == key[0] && e->key[1] == key[1]) {
            out.insert(out.end(), e->ids, e->ids + e->count);
            continue;
        }
        size_t start = out.size();
        tokenizer_merge(tok, s + i, n, out);
        size_t count = out.size() - start;
        if (count > TokenizerCache::kIds) { continue; }
        memcpy(e->key, key, sizeof(key));
        e->count = (uint16_t)count;
        std::copy(out.begin() + (ptrdiff_t)start, out.end(), e->ids);
    }
}

// ---- where text can be cut ----

// True if a piece surely begins at position i: white space after another character. Text cut at such
// positions encodes to the ids of the whole.
static inline bool tokenizer_can_cut(const Tokenizer* tok, const char* text, size_t len, size_t i) {
    const uint8_t* s = (const uint8_t*)text;
    if (i == 0 || i >= len || s[i] >= 0x80 || tok->char_class[s[i]] != CHAR_SPACE) { return false; }
    size_t back = 1, width;         // to the first byte of the character before i
    while (back < 4 && back < i && (s[i - back] & 0xC0) == 0x80) { back++; }
    CharClass before = tokenizer_class(tok, s + i - back, back, &width);
    return width != back || before != CHAR_SPACE;       // width != back: malformed UTF-8, class other
}

// A row of tokens is stable if merging its bytes gives exactly this row.
//  1. Any part of a stable row is stable. No merge crossed its two ends, so its bytes alone would have made
//     the merges inside it, in the same order.
//  2. A row is stable if every two neighbours in it are. Otherwise merging its bytes has a first merge across
//     the boundary of two tokens. Until then each of the two had only merges of its own. So these two
//     neighbours alone would have come to this merge, too, and were not stable.
// Let two stable rows overlap and share one token (equal bytes at one position). Then the first row up to
// that token and the second row from there form one stable row.

// Token i of row a and token j of row b begin at one byte. Moves i and j on to the first shared token, or
// returns false.
static inline bool tokenizer_common(const Tokenizer* tok, const std::vector<uint32_t>& a, size_t* i,
                                    const std::vector<uint32_t>& b, size_t* j) {
    size_t at_a = 0, at_b = 0;
    while (*i < a.size() && *j < b.size()) {
        if (at_a == at_b && a[*i] == b[*j]) { return true; }
        bool move_a = at_a <= at_b, move_b = at_b <= at_a;
        if (move_a) { at_a += tok->bytes[a[(*i)++]].size(); }
        if (move_b) { at_b += tok->bytes[b[(*j)++]].size(); }
    }
    return false;
}

// `piece` holds the first n bytes of a piece whose end is not known. Returns a position where the text can be
// cut and encoded in parts, whatever follows, or 0 if none was found.
// No token is longer than `longest`, so in the whole piece some token ends at a byte e of the last `longest`
// bytes. The tokens up to e are those of these bytes alone. If for every e they share a token with the row of
// all n bytes, the tokens before it do not depend on what follows.
static inline size_t tokenizer_cut_inside(const Tokenizer* tok, const uint8_t* piece, size_t n) {
    std::vector<uint32_t> ids, part;
    tokenizer_merge(tok, piece, n, ids);
    size_t longest = std::max(tok->longest, (size_t)4);     // white space leaves its last character
    for (size_t back = 2 * longest; back < n / 2; back *= 2) {
        size_t cut = n, first = ids.size();     // the token that begins at least `back` bytes before n
        while (first > 0 && n - cut < back) { cut -= tok->bytes[ids[--first]].size(); }
        // the rest must be one piece by itself: it must not begin inside a character, or like 's
        while (first > 0 && tokenizer_piece(tok, piece + cut, n - cut) != n - cut) {
            cut -= tok->bytes[ids[--first]].size();
        }
        bool sure = first > 0;
        for (size_t e = n - longest + 1; e < n && sure; e++) {
            part.clear();
            tokenizer_merge(tok, piece + cut, e - cut, part);
            size_t i = first, j = 0;
            sure = tokenizer_common(tok, ids, &i, part, &j);
        }
        if (sure) { return cut; }
    }
    return 0;
}

// ---- tokenizer.bin ----

// As llm.c's gpt2_tokenizer.bin: tokenizer_read derives the merges from the tokens.
static inline void tokenizer_write(const Tokenizer* tok, const char* path) {
    TokenizerHead head = {kTokenizerMagic, kTokenizerVersion, (uint32_t)tok->bytes.size(), tok->eot, 0,
                          MERGES_ALL, {}, 0};
    std::string data((const char*)&head, sizeof(head));
    for (const std::string& token : tok->bytes) { data += (char)token.size() + token; }     // 128 at most
    head.checksum = tokenizer_checksum(data);
    data.replace(0, sizeof(head), (const char*)&head, sizeof(head));
    AtomicFile out = atomic_open(path);
    atomic_write(&out, data.data(), data.size());
    atomic_commit(&out);
}
