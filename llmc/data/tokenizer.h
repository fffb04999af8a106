/*
Byte-level BPE, GPT-2's or any other's, text to token ids and back, and the byte tokenizer (V=256). Host only.

    Tokenizer tok;
    tokenizer_init_bpe(&tok, nullptr);                          // or tokenizer_init_bytes, or tokenizer_read
    std::vector<uint32_t> ids = {tok.eot};
    tokenizer_encode(&tok, text.data(), text.size(), ids);      // appends; text may hold any bytes
    for (uint32_t id : ids) { fputs(tokenizer_decode(&tok, id).c_str(), stdout); }
    tokenizer_free(&tok);

A Tokenizer does not change after init, so threads share one. dev/data/tokenizer_tool.h has what `tokenize`
needs for much text and for long pieces.

Encoding has two steps. The text is cut into pieces by GPT-2's pattern, here a scanner written by hand:
    's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
Then the bytes of each piece are merged. As long as two neighbours together form a token, the pair whose token
has the lowest id is replaced by that token; among equal pairs, the leftmost. On valid UTF-8 the ids are those
of tiktoken's encode_ordinary, and by a tokenizer.bin those of the package tokenizers. A byte outside any
well-formed UTF-8 sequence (no overlong forms, no surrogates) counts as one character of class other, like
U+FFFD. Its id keeps the byte, so every string of bytes decodes exactly. No text becomes the end-of-text
token: the caller adds it.
*/
#pragma once

#include <sstream>      // gives: std::istringstream
#include <string_view>  // gives: std::string_view
#include <unordered_map>    // gives: std::unordered_map (only while the pair table is built)

#include "../checked_files.h"   // gives: die, file_text, utf8_decode
#include "../checksum.h"        // gives: checksum
#include "unicode_tables.h"     // gives: CharClass, its ranges

static const uint32_t kGpt2Merges = 50000, kGpt2Eot = 256 + kGpt2Merges;
static const uint32_t kNoMerge = 0xFFFFFFFFu;       // above any id, so "lowest id" needs no special case

// Word 3 of a shard's header, after the count. tokenize writes it, and --decode reads it. llm.c's shards hold
// 0, which is accepted. A larger one is that of a tokenizer.bin, which get.py takes from its contents.
enum TokenizerId : uint32_t { TOKENIZER_UNKNOWN = 0, TOKENIZER_GPT2 = 1, TOKENIZER_BYTES = 2 };

struct Tokenizer {
    uint32_t id;                        //            unknown for merges that are not the repository's
    std::vector<std::string> bytes;     // (V)        the bytes of each token
    size_t longest;                     //            bytes of the longest token
    uint32_t eot;                       //            goes before every document: 50256, or byte 0
    uint16_t byte_id[256];              //            the id of each single byte
    std::vector<uint64_t> pairs;        // (2^k)      hash table: left << 48 | right << 32 | merged; ~0: free;
                                        //            empty: the tokenizer only decodes
    int pair_shift;                     //            a 32-bit hash >> pair_shift is a slot
    std::vector<uint8_t> char_class;    // (0x110000) CharClass of every code point
};

// ---- tables ----

// The pair's slot in the hash table, or the free slot where it belongs.
static inline size_t tokenizer_pair_slot(const Tokenizer* tok, uint32_t left, uint32_t right) {
    uint32_t key = left << 16 | right;
    size_t mask = tok->pairs.size() - 1;
    size_t slot = (key * 0x9E3779B1u) >> tok->pair_shift;
    while (tok->pairs[slot] != ~0ull && tok->pairs[slot] >> 32 != key) { slot = (slot + 1) & mask; }
    return slot;
}

// The token that left and right form, or kNoMerge (the low half of a free slot).
static inline uint32_t tokenizer_pair(const Tokenizer* tok, uint32_t left, uint32_t right) {
    return (uint32_t)tok->pairs[tokenizer_pair_slot(tok, left, right)];
}

// Fills all fields that follow from tok->bytes and tok->eot. lefts: of each token that a pair forms, how many
// bytes are the left one's, else 0. Null: as in tiktoken, a pair merges whenever its bytes are a token, even
// if the vocabulary lists another pair for that token.
static inline void tokenizer_build(Tokenizer* tok, const char* path, const uint8_t* lefts = nullptr) {
    size_t V = tok->bytes.size();
    std::unordered_map<std::string_view, uint32_t> ids;
    std::vector<bool> byte_seen(256);
    for (size_t id = 0; id < V; id++) {
        tok->longest = std::max(tok->longest, tok->bytes[id].size());
        if (tok->bytes[id].size() == 1) {
            tok->byte_id[(uint8_t)tok->bytes[id][0]] = (uint16_t)id;
            byte_seen[(uint8_t)tok->bytes[id][0]] = true;
        }
        const bool is_apart = lefts && lefts[id] == 0 && tok->bytes[id].size() != 1;
        if (is_apart || (id == tok->eot && V > 256)) { continue; }      // text never merges into these
        if (!ids.emplace(tok->bytes[id], (uint32_t)id).second) {
            die("'%s' has the same token twice: id %zu\nhint: the file is damaged", path, id);
        }
    }
    for (int b = 0; b < 256; b++) {
        if (!byte_seen[(size_t)b]) {
            die("'%s' has no token for the byte 0x%02x\nhint: the file is damaged", path, b);
        }
    }

    std::vector<uint64_t> found;
    for (const auto& entry : ids) {
        std::string_view whole = entry.first;
        for (size_t cut = 1; cut < whole.size(); cut++) {
            if (lefts && cut != lefts[entry.second]) { continue; }
            auto left = ids.find(whole.substr(0, cut)), right = ids.find(whole.substr(cut));
            if (left == ids.end() || right == ids.end()) { continue; }
            found.push_back((uint64_t)left->second << 48 | (uint64_t)right->second << 32 | entry.second);
        }
    }
    int bits = 1;
    while (((size_t)1 << bits) < 2 * found.size()) { bits++; }      // at most half full: short probes
    tok->pairs.assign((size_t)1 << bits, ~0ull);
    tok->pair_shift = 32 - bits;
    for (uint64_t pair : found) {
        tok->pairs[tokenizer_pair_slot(tok, (uint32_t)(pair >> 48), (uint32_t)(pair >> 32) & 0xFFFF)] = pair;
    }

    tok->char_class.assign(0x110000, CHAR_OTHER);
    auto mark = [&](CharClass kind, const char* ranges) {
        std::istringstream words(ranges);
        for (std::string word; words >> word;) {
            unsigned first, last;
            if (sscanf(word.c_str(), "%x-%x", &first, &last) < 2) { last = first; }
            memset(&tok->char_class[first], kind, last - first + 1);
        }
    };
    mark(CHAR_LETTER, kLetters);
    mark(CHAR_NUMBER, kNumbers);
    mark(CHAR_SPACE, kSpaces);
}

static inline void tokenizer_free(Tokenizer* tok) { *tok = Tokenizer(); }

// ---- characters and pieces ----

static inline CharClass tokenizer_class(const Tokenizer* tok, const uint8_t* s, size_t len, size_t* width) {
    int32_t cp = utf8_decode(s, len, width);
    return cp < 0 ? CHAR_OTHER : (CharClass)tok->char_class[(size_t)cp];
}

// End of the run of characters of class `kind` that begins at i.
static inline size_t tokenizer_run(const Tokenizer* tok, const uint8_t* s, size_t i, size_t len,
                                   CharClass kind) {
    size_t width;
    while (i < len && tokenizer_class(tok, s + i, len - i, &width) == kind) { i += width; }
    return i;
}

// Bytes in the first piece of s. len >= 1.
static inline size_t tokenizer_piece(const Tokenizer* tok, const uint8_t* s, size_t len) {
    if (s[0] == '\'' && len >= 2) {
        if (s[1] == 's' || s[1] == 't' || s[1] == 'm' || s[1] == 'd') { return 2; }
        bool pair = len >= 3 && ((s[1] == 'r' && s[2] == 'e') || (s[1] == 'v' && s[2] == 'e') ||
                                 (s[1] == 'l' && s[2] == 'l'));
        if (pair) { return 3; }
    }
    size_t skip = s[0] == ' ' && len >= 2 ? 1 : 0;      // one blank belongs to the word after it
    size_t width;
    CharClass kind = tokenizer_class(tok, s + skip, len - skip, &width);
    if (kind != CHAR_SPACE) { return tokenizer_run(tok, s, skip + width, len, kind); }

    // White space at the end of the text is one piece. Elsewhere its last character goes to the next word.
    size_t end = 0, last = 0;
    while (end < len && tokenizer_class(tok, s + end, len - end, &width) == CHAR_SPACE) {
        last = end;
        end += width;
    }
    return end == len || last == 0 ? end : last;
}

// ---- merging ----

// Most pieces are a word: to look through all pairs for the best is faster than a heap.
static const size_t kShortPiece = 64;

// Merges ids[0..n), in n^2 steps at most. Returns how many are left. merged: scratch.
static inline size_t tokenizer_merge_short(const Tokenizer* tok, uint32_t* ids, size_t n,
                                           std::vector<uint32_t>& merged) {
    merged.assign(n, kNoMerge);                 // merged[i]: the token of ids[i] and ids[i+1]
    for (size_t i = 0; i + 1 < n; i++) { merged[i] = tokenizer_pair(tok, ids[i], ids[i + 1]); }
    for (;;) {
        size_t best = 0;
        for (size_t i = 1; i < n; i++) { if (merged[i] < merged[best]) { best = i; } }
        if (n == 0 || merged[best] == kNoMerge) { return n; }
        ids[best] = merged[best];
        n--;
        for (size_t i = best + 1; i < n; i++) { ids[i] = ids[i + 1]; merged[i] = merged[i + 1]; }
        merged[best] = best + 1 < n ? tokenizer_pair(tok, ids[best], ids[best + 1]) : kNoMerge;
        if (best > 0) { merged[best - 1] = tokenizer_pair(tok, ids[best - 1], ids[best]); }
    }
}

// The same in n log n steps. A token stays at the place of its first byte; next and last are the places of
// its neighbours. The heap has each pair as merged token << 32 | place, so its least is the best pair, the
// leftmost among equals. A pair that is gone, or merges to another token now, is passed over.
static inline size_t tokenizer_merge_long(const Tokenizer* tok, uint32_t* ids, size_t n,
                                          std::vector<uint32_t>& merged) {
    if (n >= kNoMerge) { die("a word of %zu bytes is longer than the tokenizer can take", n); }
    std::vector<uint32_t> next(n), last(n);
    std::vector<uint64_t> heap;
    const auto least_first = std::greater<uint64_t>();
    merged.assign(n, kNoMerge);
    auto pair_at = [&](size_t i) {
        merged[i] = next[i] < n ? tokenizer_pair(tok, ids[i], ids[next[i]]) : kNoMerge;
        if (merged[i] != kNoMerge) { heap.push_back((uint64_t)merged[i] << 32 | i); }
        return merged[i] != kNoMerge;
    };
    for (size_t i = 0; i < n; i++) { next[i] = (uint32_t)i + 1, last[i] = (uint32_t)i - 1; }
    for (size_t i = 0; i < n; i++) { pair_at(i); }
    std::make_heap(heap.begin(), heap.end(), least_first);
    while (!heap.empty()) {
        std::pop_heap(heap.begin(), heap.end(), least_first);
        const uint32_t id = (uint32_t)(heap.back() >> 32), i = (uint32_t)heap.back();
        heap.pop_back();
        if (merged[i] != id) { continue; }
        ids[i] = id;
        merged[next[i]] = kNoMerge;
        next[i] = next[next[i]];
        if (next[i] < n) { last[next[i]] = i; }
        if (pair_at(i)) { std::push_heap(heap.begin(), heap.end(), least_first); }
        if (i > 0 && pair_at(last[i])) { std::push_heap(heap.begin(), heap.end(), least_first); }
    }
    size_t count = 0;
    for (size_t i = 0; i < n; i = next[i]) { ids[count++] = ids[i]; }
    return count;
}

// Appends the ids of n bytes, merged as one piece.
static inline void tokenizer_merge(const Tokenizer* tok, const uint8_t* bytes, size_t n,
                                   std::vector<uint32_t>& out) {
    static thread_local std::vector<uint32_t> merged;
    const size_t start = out.size();
    for (size_t i = 0; i < n; i++) { out.push_back(tok->byte_id[bytes[i]]); }
    auto* merge = n <= kShortPiece ? tokenizer_merge_short : tokenizer_merge_long;
    out.resize(start + merge(tok, out.data() + start, n, merged));
}

// ---- encode, decode ----

// Appends the ids of text to out.
static inline void tokenizer_encode(const Tokenizer* tok, const char* text, size_t len,
                                    std::vector<uint32_t>& out) {
    const uint8_t* s = (const uint8_t*)text;
    for (size_t i = 0, n; i < len; i += n) {
        n = tokenizer_piece(tok, s + i, len - i);
        tokenizer_merge(tok, s + i, n, out);
    }
}

static inline const std::string& tokenizer_decode(const Tokenizer* tok, uint32_t id) {
    if (id >= tok->bytes.size()) {
        die("token id %u is outside the tokenizer's vocabulary of %zu", id, tok->bytes.size());
    }
    return tok->bytes[id];
}

// ---- where vocabularies come from ----

// Every byte is its own id. Byte 0, which text does not contain, serves as end of text.
static inline void tokenizer_init_bytes(Tokenizer* tok) {
    *tok = Tokenizer();
    tok->id = TOKENIZER_BYTES;
    for (int b = 0; b < 256; b++) { tok->bytes.push_back(std::string(1, (char)b)); }
    tokenizer_build(tok, "bytes");
}

static inline std::string tokenizer_read_file(const char* path, const char* hint) {
    if (access(path, R_OK) != 0) {
        die("cannot open the vocabulary '%s': %s\nhint: %s", path, strerror(errno), hint);
    }
    return file_text(path);
}

static const char kVocabularyHint[] =
    "dev/data/gpt2_bpe/vocab.bpe is looked for in the current folder, in the program's and in the two"
    " above it; start the program in the repository";

// The repository's vocabulary, seen from the current folder or from the program's.
static inline std::string tokenizer_default_path() {
    const std::string path = "dev/data/gpt2_bpe/vocab.bpe";
    if (access(path.c_str(), F_OK) == 0) { return path; }
    char exe[4096];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof(exe));
    std::string folder(exe, n > 0 ? (size_t)n : 0);
    for (int up = 0; up < 3 && !folder.empty(); up++) {      // the repository, build/, dev/test/
        folder.resize(folder.rfind('/') == std::string::npos ? 0 : folder.rfind('/'));
        if (access((folder + "/" + path).c_str(), F_OK) == 0) { return folder + "/" + path; }
    }
    return path;
}

// Reads GPT-2's list of merges; path nullptr: the repository's. Ids 0-255 are the bytes, then comes one id
// per merge, then end of text. The list writes each byte as one printable character: a printable byte as
// itself, the others as U+0100, U+0101, ... The ids of the bytes follow the order of these characters.
static inline void tokenizer_init_bpe(Tokenizer* tok, const char* path) {
    bool ours = !path || !path[0];
    std::string file = ours ? tokenizer_default_path() : path;
    path = file.c_str();
    std::string data = tokenizer_read_file(path, kVocabularyHint);
    *tok = Tokenizer();
    tok->id = ours ? TOKENIZER_GPT2 : TOKENIZER_UNKNOWN;

    std::vector<int> byte_of_char(0x144, -1);
    for (int pass = 0; pass < 2; pass++) {
        for (int b = 0; b < 256; b++) {
            bool printable = (b > 0x20 && b < 0x7F) || (b > 0xA0 && b != 0xAD);
            if (printable == (pass == 1)) { continue; }
            byte_of_char[pass == 0 ? (size_t)b : tok->bytes.size() - 188 + 256] = b;      // 188 are printable
            tok->bytes.push_back(std::string(1, (char)b));
        }
    }

    size_t line_number = 0;
    for (size_t pos = 0, end; pos < data.size(); pos = end + 1) {
        end = std::min(data.find('\n', pos), data.size());
        line_number++;
        if (line_number == 1 && data.compare(pos, 9, "#version:") == 0) { continue; }
        std::string token;
        int blanks = 0;
        bool bad = end - pos < 3 || data[pos] == ' ' || data[end - 1] == ' ';
        for (size_t i = pos, width; i < end && !bad; i += width) {
            int32_t cp = utf8_decode((const uint8_t*)&data[i], end - i, &width);
            if (cp == ' ') { blanks++; continue; }
            bad = cp < 0 || cp >= 0x144 || byte_of_char[(size_t)cp] < 0;
            if (!bad) { token += (char)byte_of_char[(size_t)cp]; }
        }
        if (bad || blanks != 1) { die("'%s' line %zu is not a merge of two tokens", path, line_number); }
        tok->bytes.push_back(token);
    }
    if (tok->bytes.size() != kGpt2Eot) {
        die("'%s' has %zu merges, GPT-2 has %u\nhint: is the file complete?", path, tok->bytes.size() - 256,
            kGpt2Merges);
    }
    tok->eot = kGpt2Eot;
    tok->bytes.push_back("<|endoftext|>");
    tokenizer_build(tok, path);
}

// ---- tokenizer.bin ----
// llm.c's gpt2_tokenizer.bin, with more words in its header: 256 int32 {20240328, 2, V, end of text, id,
// merges, 0..., checksum}, then for each token one length byte and its bytes. The checksum is the XXH64 of
// the file with zeros in its place; llm.c's files have 0. Word 6 is for dev/eval/export_hf.py. get.py writes
// such files.

enum TokenizerMerges : uint32_t {
    MERGES_ALL = 0,         // any two tokens whose bytes are a token merge (llm.c's file)
    MERGES_LISTED = 1,      // V bytes follow, the `lefts` of tokenizer_build
    MERGES_NONE = 2         // text is not cut by GPT-2's pattern: the file only decodes
};
static const uint32_t kTokenizerMagic = 20240328, kTokenizerVersion = 2, kTokenizerMost = 1 << 20;

struct TokenizerHead { uint32_t magic, version, V, eot, id, merges, zero[248]; uint64_t checksum; };
static_assert(sizeof(TokenizerHead) == 1024, "256 words");

static inline uint64_t tokenizer_checksum(std::string data) {
    memset(&data[offsetof(TokenizerHead, checksum)], 0, sizeof(uint64_t));
    return checksum(data.data(), data.size());
}

// The header of these bytes of a file. Dies if they do not have the checksum that it holds.
static inline TokenizerHead tokenizer_head_of(const std::string& data, const char* path) {
    TokenizerHead head = {};
    memcpy(&head, data.data(), std::min(data.size(), sizeof(head)));
    const bool is_ours = head.magic == kTokenizerMagic || head.version == kTokenizerVersion;   // one: damaged
    const bool has_sum = data.size() >= sizeof(head) && head.checksum != 0;
    if (is_ours && has_sum && tokenizer_checksum(data) != head.checksum) {
        die("'%s' is damaged: it does not have the checksum in its header\n"
            "hint: copy the tokenizer's two files anew, from beside the shards", path);
    }
    return head;
}

// All words are 0 if there is no such file.
static inline TokenizerHead tokenizer_head(const std::string& path) {
    return tokenizer_head_of(file_size(path.c_str()) < 0 ? "" : file_text(path), path.c_str());
}

static inline void tokenizer_read(Tokenizer* tok, const char* path) {
    std::string data = tokenizer_read_file(path, "dev/data/get.py and tokenize --write-vocab FILE make one");
    const TokenizerHead head = tokenizer_head_of(data, path);
    if (data.size() < sizeof(head)) {
        die("'%s' is truncated: its header takes 1024 bytes, the file has %zu", path, data.size());
    }
    if (head.magic != kTokenizerMagic || head.version != kTokenizerVersion || head.merges > MERGES_NONE) {
        die("'%s' is no tokenizer file: it begins %u %u, expected %u %u", path, head.magic, head.version,
            kTokenizerMagic, kTokenizerVersion);
    }
    const uint32_t V = head.V, least = head.merges == MERGES_NONE ? 1 : 256;
    const uint32_t most = head.merges == MERGES_NONE ? kTokenizerMost : 65536;
    if (V < least || V > most || head.eot >= V) {
        die("'%s' has %u tokens and end of text %u; allowed are %u to %u tokens and an id below that",
            path, V, head.eot, least, most);
    }
    *tok = Tokenizer();
    tok->id = head.id;
    tok->eot = head.eot;
    size_t pos = sizeof(head);
    while (tok->bytes.size() < V && pos < data.size() && pos + 1 + (uint8_t)data[pos] <= data.size()) {
        tok->bytes.push_back(data.substr(pos + 1, (uint8_t)data[pos]));
        pos += 1 + (uint8_t)data[pos];
    }
    const bool listed = head.merges == MERGES_LISTED;
    if (tok->bytes.size() < V || pos + (listed ? V : 0) != data.size()) {
        die("'%s' has %zu bytes; its %u tokens end after %zu of them", path, data.size(), V, pos);
    }
    if (head.merges == MERGES_NONE) { return; }
    tokenizer_build(tok, path, listed ? (const uint8_t*)&data[pos] : nullptr);
}

// ---- whose tokens ----

static const char kVocabulariesKnown[] = "256: bytes, 50257 and 50304: GPT-2";

// The tokenizer of a vocabulary that has no tokenizer.bin. 50304 are GPT-2's tokens and padding.
static inline uint32_t tokenizer_of_vocabulary(int V) {
    return V == 256 ? TOKENIZER_BYTES : V == (int)kGpt2Eot + 1 || V == 50304 ? TOKENIZER_GPT2
         : TOKENIZER_UNKNOWN;
}

static inline std::string tokenizer_name(uint32_t id) {
    return id == TOKENIZER_GPT2 ? "GPT-2's tokenizer" : id == TOKENIZER_BYTES ? "the byte tokenizer"
         : format("tokenizer %u", id);
}

// Dies if the shards of `pattern` name (by `id`) another tokenizer than that of a vocabulary of V. An unknown
// vocabulary or tokenizer passes: for these the loader only checks that the token ids are below V.
static inline void tokenizer_check(uint32_t id, int V, const char* pattern) {
    const uint32_t wanted = tokenizer_of_vocabulary(V);
    if (id == TOKENIZER_UNKNOWN || wanted == TOKENIZER_UNKNOWN || id == wanted) { return; }
    const bool is_own = id > TOKENIZER_BYTES;
    die("'%s' holds tokens of %s, but the model's %d are those of %s\n"
        "hint: choose a model with the other vocabulary (-e), or make shards for this one: "
        "build/tokenize FILE -o NAME --bytes %d%s", pattern, tokenizer_name(id).c_str(), V,
        tokenizer_name(wanted).c_str(), wanted == TOKENIZER_BYTES,
        is_own ? "; or, if the model was trained on it, put its tokenizer.bin beside the model" : "");
}

// What a run reads, and the tokenizer that it names. pattern: of the user; path: its first file.
struct TokensOf { std::string pattern, path; uint32_t id; };
// A run's tokenizer.bin, or "" and zeros; and the tokenizer that is named, 0: none is.
struct TokenizerFile { std::string file; TokenizerHead head; uint32_t named; };

// Finds it in the model's folder, else beside the shards that name it. model: its file, "" for a new one.
// Dies if model, shards and questions do not agree. A new model may have any vocabulary that is large enough.
static inline TokenizerFile tokenizer_find(const std::string& model, int V,
                                           const std::vector<TokensOf>& reads) {
    auto beside = [](const std::string& path) {
        TokenizerFile t = {path.substr(0, path.rfind('/') + 1) + "tokenizer.bin", {}, 0};
        t.head = tokenizer_head(t.file);
        return t.head.magic == kTokenizerMagic && t.head.id > TOKENIZER_BYTES ? t : TokenizerFile();
    };
    TokenizerFile found = model.empty() ? TokenizerFile() : beside(model);
    const bool is_models = !found.file.empty();
    TokensOf first = {found.file, found.file, found.head.id};
    for (const TokensOf& r : reads) {
        if (r.id == TOKENIZER_UNKNOWN) { continue; }
        if (first.id == TOKENIZER_UNKNOWN) { first = r; }
        if (r.id != first.id) {
            die("'%s' is of %s, and '%s' of %s\n"
                "hint: a run has one tokenizer: get.py --tokenizer makes shards and questions anew",
                first.pattern.c_str(), tokenizer_name(first.id).c_str(), r.pattern.c_str(),
                tokenizer_name(r.id).c_str());
        }
        const bool is_own = r.id > TOKENIZER_BYTES;
        if (!is_models && (!is_own || !model.empty())) { tokenizer_check(r.id, V, r.pattern.c_str()); }
        if (is_own && found.file.empty()) { found = beside(r.path); }
        if (found.head.id != r.id) { found = TokenizerFile(); }
    }
    if (found.head.V > (uint32_t)V) {
        die("'%s' has %u tokens, and the model's vocabulary %d\nhint: -e d12,V%u has as many",
            found.file.c_str(), found.head.V, V, found.head.V);
    }
    found.named = first.id;
    return found;
}
