/*
Tests of llmc/data/tokenizer.h and of the tokenize program.

    g++ -std=c++17 -O2 -pthread dev/test/test_tokenizer.cpp -o build/test_tokenizer
    build/test_tokenizer                        # without build/tokenize its part is skipped

The expected ids come from tiktoken: the fixture dev/test/fixtures/tokenizer.{txt,ids} was written by
`python3 dev/test/test_tiktoken.py` (tiktoken 0.14.0). The tests run in a folder of their own.
*/
#include <sys/resource.h>   // gives: rusage
#include <time.h>           // gives: clock

#include <random>           // gives: std::mt19937

#include "llmc/data/tokenizer.h"    // the subject
#include "dev/data/tokenizer_tool.h"    // gives: TokenizerCache, tokenizer_can_cut, tokenizer_write
#include "child.h"                  // gives: folder, run_child, check_dies, CHECK_TEXT
#include "test.h"                   // gives: CHECK, TEST

typedef std::vector<uint32_t> Ids;
typedef std::vector<std::string> Strings;

static Tokenizer bpe;
static std::string vocab_path;      // of the repository's merges
static std::string fixture_text, fixture_ids;

static Ids encode(const std::string& text, TokenizerCache* cache = nullptr) {
    Ids ids;
    tokenizer_encode(&bpe, text.data(), text.size(), ids, cache);
    return ids;
}

static std::string decode(const Ids& ids) {
    std::string text;
    for (uint32_t id : ids) { text += tokenizer_decode(&bpe, id); }
    return text;
}

static Ids joined(Ids head, const Ids& tail) {
    head.insert(head.end(), tail.begin(), tail.end());
    return head;
}

// The pieces of text, put between bars.
static std::string pieces(const std::string& text) {
    std::string s = "|";
    const uint8_t* p = (const uint8_t*)text.data();
    for (size_t i = 0, n; i < text.size(); i += n) {
        n = tokenizer_piece(&bpe, p + i, text.size() - i);
        s += text.substr(i, n) + "|";
    }
    return s;
}

// About `size` bytes, drawn from some texts.
static std::string drawn_text(uint32_t stream, const Strings& from, size_t size) {
    std::mt19937 draw(stream);
    std::string text;
    while (text.size() < size) { text += from[draw() % from.size()]; }
    return text;
}

// ---- text or not ----

// Is text_fault what utf8_decode says, character by character? Returns where the fault is.
static size_t check_fault(const std::string& text, bool nul_separates) {
    const uint8_t* s = (const uint8_t*)text.data();
    size_t want = 0;
    for (size_t width; want < text.size(); want += width) {
        const int32_t c = utf8_decode(s + want, text.size() - want, &width);
        if (c < 0 || (c == 0 && !nul_separates)) { break; }
    }
    const size_t got = text_fault(s, 0, text.size(), nul_separates);
    if (got != want) { CHECK_IS(got, want); }
    return want;
}

static void test_faults() {
    const Strings some = {"a", "bcdefgh", "\xC3\xA9", "\xE2\x82\xAC", "\xF0\x9F\x98\x80", "\x7F", "\x01",
                          std::string(60, 'x'), "\xED\xA0\x80", "\xFF", "\x80", std::string(1, '\0')};
    int faults = 0;
    for (uint32_t k = 0; k < 3000; k++) {
        const Strings from(some.begin(), some.end() - (k % 5));     // without faults in a fifth of the texts
        const Strings few = {"abc", std::string(61, 'x'), from[k % from.size()]};
        const std::string text = drawn_text(k, k % 2 ? from : few, k % 300);
        faults += check_fault(text, false) < text.size();
        check_fault(text, true);
    }
    CHECK(faults > 500 && faults < 2500, "%d of 3000 texts have a fault", faults);
    int good = 0;                               // every lead and second byte, over the end of 64 bytes
    for (int pair = 0; pair < 65536; pair++) {
        std::string text = std::string(62 + pair % 3, 'x') + (char)(pair >> 8) + (char)pair;
        text += pair >> 8 < 0xE0 ? "" : pair >> 8 < 0xF0 ? "\x80" : "\x80\x80";
        text += std::string(64, 'x');
        good += check_fault(text, false) == text.size();
    }
    // two of ASCII; U+80 to U+7FF; U+800 to U+FFFF without surrogates, by 64; the others, by 4096
    CHECK_IS(good, 127 * 127 + 1920 + (65536 - 2048 - 2048) / 64 + (0x110000 - 65536) / 4096);
    const struct { std::string text; size_t want; } ends[] = {
        {"", 0}, {"a", 1}, {"a\xC3", 1}, {"a\xC3\xA9", 1}, {"a\xE2\x82", 1}, {"\xF0\x9F\x98", 0},
        {"\xC3\xA9z", 3}, {"\x80\x80\x80\x80\x80", 5}};
    for (const auto& e : ends) {
        CHECK_IS(text_unfinished((const uint8_t*)e.text.data(), e.text.size()), e.want);
    }
}

// ---- encoding ----

static void test_fixture() {
    CHECK(fixture_text.size() > 30000 && fixture_ids.size() > 20000, "the fixture is missing");
    Ids want;
    for (size_t i = 0; i + 1 < fixture_ids.size(); i += 2) {
        want.push_back((uint8_t)fixture_ids[i] | (uint32_t)(uint8_t)fixture_ids[i + 1] << 8);
    }
    TokenizerCache cache;
    Ids appended = {bpe.eot};
    tokenizer_encode(&bpe, "Hello", 5, appended);
    CHECK_TEXT(numbers(appended), "50256 15496");
    for (TokenizerCache* c : {(TokenizerCache*)nullptr, &cache, &cache}) {     // the last time from the cache
        const Ids ids = encode(fixture_text, c);
        const size_t same = std::mismatch(ids.begin(), ids.begin() + std::min(ids.size(), want.size()),
                                          want.begin()).first - ids.begin();
        const std::string before = decode(Ids(ids.begin(), ids.begin() + same));
        CHECK(ids == want, "token %zu of %zu differs, after '%s'", same, want.size(),
              before.substr(before.size() - std::min(before.size(), (size_t)20)).c_str());
        CHECK(decode(ids) == fixture_text, "the fixture does not decode to itself");
    }
    std::string bytes(5000, '\0');             // what is no UTF-8, too
    std::mt19937 draw(9);
    for (char& c : bytes) { c = (char)draw(); }
    CHECK(decode(encode(bytes, &cache)) == bytes, "random bytes do not come back");
    for (size_t n : {3, 2}) {                   // in the cache they differ in nothing but their length
        CHECK(encode(std::string(n, '\0'), &cache) == encode(std::string(n, '\0')), "%zu zero bytes", n);
    }
}

// Of valid UTF-8 the fixture has more.
static void test_pieces() {
    const char* cases[][2] = {
        {"we're HE'S 'sable", "|we|'re| HE|'|S| '|sable|"},         // only lower case; not after a blank
        {"x  y\n z   ", "|x| | y|\n| z|   |"},
        {" \xC2\xA0x", "| |\xC2\xA0|x|"},                           // a no-break space joins no word
        {"ab12 34!? -x", "|ab|12| 34|!?| -|x|"},
        {"a\xFF\x80 \xC3", "|a|\xFF\x80| \xC3|"},                   // bad bytes are like punctuation
        {"\xED\xA0\x80!", "|\xED\xA0\x80!|"},                       // a surrogate is three bad bytes
        {"a\xC1\x81", "|a|\xC1\x81|"},                              // an overlong A is two bad bytes, or more
        {"a\xE0\x81\x81", "|a|\xE0\x81\x81|"},
        {"a\xF0\x80\x81\x81", "|a|\xF0\x80\x81\x81|"},
        {"\xC2\xA0\xC2", "|\xC2\xA0|\xC2|"},
    };
    for (auto& c : cases) { CHECK_TEXT(pieces(c[0]), c[1]); }
}

static void test_cut() {
    const std::string text = "a b  c\n\nd\xC2\xA0 e\xE3\x80\x80\n\xFF \xE3\x80 '\n";
    int cuts = 0;
    for (size_t i = 0; i <= text.size(); i++) {
        if (!tokenizer_can_cut(&bpe, text.data(), text.size(), i)) { continue; }
        cuts++;
        const std::string head = text.substr(0, i), tail = text.substr(i);
        CHECK(pieces(head) + pieces(tail).substr(1) == pieces(text), "cut at %zu, inside a piece", i);
        CHECK(joined(encode(head), encode(tail)) == encode(text), "cut at %zu changes the tokens", i);
    }
    CHECK(cuts == 6, "%d places to cut, expected 6", cuts);
}

static Ids ids_of_bytes(const std::string& piece) {
    Ids ids;
    for (char c : piece) { ids.push_back(bpe.byte_id[(uint8_t)c]); }
    return ids;
}

// Merges the slow, plain way: what the fast one must equal.
static Ids merge_plain(const std::string& piece) {
    Ids ids = ids_of_bytes(piece);
    for (;;) {
        uint32_t best = kNoMerge;
        size_t at = 0;
        for (size_t i = 0; i + 1 < ids.size(); i++) {
            const uint32_t id = tokenizer_pair(&bpe, ids[i], ids[i + 1]);
            if (id < best) { best = id; at = i; }
        }
        if (best == kNoMerge) { return ids; }
        ids[at] = best;
        ids.erase(ids.begin() + (ptrdiff_t)at + 1);
    }
}

static void test_merges() {
    int wrong = 0;
    for (uint32_t id = 0; id < bpe.eot; id++) { wrong += merge_plain(bpe.bytes[id]) != Ids{id}; }
    CHECK(wrong == 0, "%d tokens do not merge to themselves", wrong);
}

// Some n bytes that make one piece or nearly so, of one class of characters: noise, or a period.
static std::string endless_piece(uint32_t k, size_t n) {
    static const std::vector<Strings> sets = {
        {"a"}, {"e", "t", "a", "o", "i", "n"}, {"q", "x", "z", "j", "v", "w", "k", "y", "b", "p"}, {"-"},
        {"-", "=", "*", "_", "#", "."}, {"0", "1", "2", "3", "4", "5", "6", "7", "8", "9"}, {" "},
        {" ", "\n", "\t"}, {"A", "C", "G", "T"}, {"\xC3\x82"}, {"\xC3\x83", "\xC3\x82"}, {"'", "!"},
        {"\xE3\x83\xBC", "\xE3\x83\xAB", "\xE3\x83\x89"}, {"\xC3\xA9", "\xC3\xA8", "a"},
        {"\xE2", "\x80"}, {"ing", "the", "ness", "tion", "er", "s"}};
    const bool is_noise = k / sets.size() % 2 == 0;
    const std::string unit = drawn_text(k, sets[k % sets.size()], is_noise ? n : 1 + k % 41);
    std::string piece;
    while (piece.size() < n) { piece += unit; }
    return piece.substr(0, n);
}

// A vocabulary whose tokens depend on what comes far behind: with 128 bytes x0 x1 x2 ..., x1x2 merges before
// x0x1, x2x3 before that, and so on, so that the parity of the last one decides about all.
static void test_far_dependence() {
    Tokenizer chain;
    tokenizer_init_bytes(&chain);
    Strings tokens = chain.bytes;
    for (int i = 126; i >= 0; i--) { tokens.push_back({(char)(0x80 + i), (char)(0x81 + i)}); }
    chain = Tokenizer();
    chain.bytes = tokens;
    chain.eot = (uint32_t)tokens.size();
    tokenizer_build(&chain, "chain");
    std::string bytes;
    for (int i = 0; i < 5 * 128; i++) { bytes += (char)(0x80 + i % 128); }
    const uint8_t* const s = (const uint8_t*)bytes.data();
    auto row = [&](size_t from, size_t to) {
        Ids ids;
        tokenizer_merge(&chain, s + from, to - from, ids);
        return ids;
    };
    int cuts = 0;
    for (size_t n = 2 * 128; n < 4 * 128; n++) {
        const size_t cut = tokenizer_cut_inside(&chain, s, n);
        if (cut == 0) { continue; }
        cuts++;
        for (size_t end : {n, n + 1, n + 2, n + 63, n + 128}) {
            CHECK(joined(row(0, cut), row(cut, end)) == row(0, end),
                  "%zu bytes cut at %zu, then %zu: other tokens", n, cut, end);
        }
    }
    CHECK(cuts > 100, "%d of 256 could be cut", cuts);
}

static void test_long_pieces() {
    int wrong = 0, cuts = 0, cut_wrong = 0, runs_cut = 0;
    for (uint32_t k = 0; k < 240; k++) {
        const std::string piece = endless_piece(k, kShortPiece - 5 + k * 7919 % 400);
        Ids got = {7};                          // what is there stays
        tokenizer_merge(&bpe, (const uint8_t*)piece.data(), piece.size(), got);
        wrong += got != joined({7}, merge_plain(piece));
    }
    CHECK(wrong == 0, "%d of 240 pieces merge wrongly", wrong);
    for (uint32_t k = 0; k < 64; k++) {         // each set of characters in both ways, twice
        size_t n = 1400 + k % 3;
        const std::string text = "x" + endless_piece(k, 2 * n);
        while ((text[n] & 0xC0) == 0x80) { n++; }
        size_t begin = 0, length = 0;           // of a piece that reaches beyond the first n bytes
        const uint8_t* s = (const uint8_t*)text.data();
        for (size_t i = 0; i < n; begin = i, i += length) {
            length = tokenizer_piece(&bpe, s + i, text.size() - i);
        }
        if (n - begin < 600) { continue; }
        size_t cut = tokenizer_cut_inside(&bpe, s + begin, n - begin);
        runs_cut += cut > 0 && k / 16 % 2 == 1;
        if (cut == 0) { continue; }
        cut += begin;
        cuts++;
        const Ids head = encode(text.substr(begin, cut - begin));
        for (size_t stop = n; stop < n + 260; stop += 1 + stop % 97) {
            for (const char* then : {"", "'s", " ", "\n", "x", "\xE2\x82\xAC", "\xFF"}) {
                const Ids tail = encode(text.substr(cut, stop - cut) + then);
                cut_wrong += joined(head, tail) != encode(text.substr(begin, stop - begin) + then);
            }
        }
    }
    CHECK(cuts > 20 && runs_cut > 5, "only %d pieces could be cut, %d of them periodic", cuts, runs_cut);
    CHECK(cut_wrong == 0, "a cut changed the tokens in %d cases", cut_wrong);
}

// A quarter of a megabyte in one piece must take n log n: with n^2 this would be many minutes.
static void test_long_runs() {
    const size_t size = 1 << 18;
    for (const char* unit : {"a", " ", "\n", "=-", "\xC3\xA9", "\xFF", "7"}) {
        const std::string text = drawn_text(0, {unit}, size);
        const clock_t start = clock();          // of this process alone, however busy the machine is
        const Ids ids = encode(text);
        const double s = (double)(clock() - start) / CLOCKS_PER_SEC;
        CHECK(decode(ids) == text, "%zu bytes of '%s' do not come back", size, unit);
        CHECK(s < 5, "%zu bytes of '%s' took %.1f s", size, unit, s);
    }
    // One word of 400,000 letters: any part of its tokens is what the bytes of that part merge to.
    const std::string word = drawn_text(3, {"e", "t", "a", "o", "i", "n", "q", "x"}, 400000);
    const clock_t start = clock();
    Ids ids;
    tokenizer_encode(&bpe, word.data(), word.size(), ids);      // as the trainer encodes a prompt
    const double s = (double)(clock() - start) / CLOCKS_PER_SEC;
    CHECK(decode(ids) == word && s < 5, "a word of 400,000 letters took %.1f s", s);
    size_t at = 0, wrong = 0;
    for (size_t i = 0; i + 200 <= ids.size(); i += 200) {
        const std::string part = decode(Ids(ids.begin() + (ptrdiff_t)i, ids.begin() + (ptrdiff_t)i + 200));
        wrong += merge_plain(part) != Ids(ids.begin() + (ptrdiff_t)i, ids.begin() + (ptrdiff_t)i + 200);
        at += part.size();
    }
    CHECK(wrong == 0 && at > 390000, "%zu parts of a long word have other tokens by themselves", wrong);
    // tiktoken: 64 letters a are 16 times "aaaa"; the rest goes on like that
    for (size_t n : {(size_t)64, size}) {
        CHECK(encode(std::string(n, 'a')) == Ids(n / 4, 24794), "%zu letters a are not tokens of four", n);
    }
}

// ---- files ----

static std::string whole_path(const std::string& path) {
    char* whole = realpath(path.c_str(), nullptr);
    const std::string found = whole ? whole : "";
    free(whole);
    return found;
}

// As llm.c writes it, without a checksum.
static std::string unsealed(std::string data) { return data.replace(1016, 8, std::string(8, '\0')); }

static void test_files() {
    CHECK(symlink("dev", "dev") == 0, "cannot make a link");    // cannot be looked at, and is passed over
    CHECK_TEXT(whole_path(tokenizer_default_path()), vocab_path);
    tokenizer_write(&bpe, "good.bin");
    Tokenizer back;
    tokenizer_read(&back, "good.bin");
    CHECK(back.bytes == bpe.bytes && back.eot == bpe.eot, "gpt2_tokenizer.bin does not read back");
    Ids ids;
    const std::string text = "It's naïve: 1 + 1 = 11, isn't it?\n";
    tokenizer_encode(&back, text.data(), text.size(), ids);
    CHECK(ids == encode(text), "a vocabulary that was read encodes differently");
    tokenizer_free(&back);
    CHECK(back.bytes.empty(), "tokenizer_free leaves tokens behind");

    Tokenizer few;
    few.bytes.assign(bpe.bytes.begin(), bpe.bytes.begin() + 300);
    few.eot = 299;
    tokenizer_write(&few, "few.bin");
    std::string good = read_text("few.bin");
    const std::string merges = read_text(vocab_path);
    auto with_int = [&](size_t index, uint32_t value) {
        std::string data = good;
        memcpy(&data[4 * index], &value, 4);
        return data;
    };
    uint32_t header[4];
    memcpy(header, good.data(), sizeof(header));
    CHECK_TEXT(numbers(Ids(header, header + 4)), "20240328 2 300 299");
    // One bit is another: of each word in use, of a free one, the checksum, a token, the last byte.
    for (size_t bit : {3, 32, 70, 101, 130, 161, 200, 8 * 1016 + 60, 8 * 1100, 8 * (int)good.size() - 1}) {
        std::string data = good;
        data[bit / 8] = (char)(data[bit / 8] ^ 1 << bit % 8);
        write_text("t.bin", data);
        check_dies(format("bit %zu", bit), [&] {
            Tokenizer t;
            bit % 2 ? (void)tokenizer_head("t.bin") : tokenizer_read(&t, "t.bin");
        }, {"'t.bin' is damaged", "checksum"});
    }
    const std::string half_a_sum = good.substr(0, 1020);
    good = unsealed(good);
    std::string twice = good;
    twice[1024 + 3] = twice[1024 + 1];
    const std::string half = merges.substr(0, merges.rfind('\n', merges.size() / 2) + 1);
    const std::string but_one = merges.substr(0, merges.rfind('\n', merges.size() - 2) + 1);
    const struct { const char *what, *path; std::string data; const char* words; } files[] = {
        {"empty", "t.bin", "", "truncated"}, {"half a sum", "t.bin", half_a_sum, "truncated"},
        {"magic", "t.bin", with_int(0, 20240520), "no tokenizer file"},
        {"version", "t.bin", with_int(1, 1), "no tokenizer file"},
        {"huge count", "t.bin", with_int(2, 0xFFFFFFFF), "4294967295 tokens"},
        {"small count", "t.bin", with_int(2, 299), "299 tokens"},
        {"a token less", "t.bin", with_int(2, 301), "end after"},
        {"end of text", "t.bin", with_int(3, 300), "end of text 300"},
        {"cut short", "t.bin", good.substr(0, good.size() - 1), "end after"},
        {"too long", "t.bin", good + "x", "end after"}, {"a token twice", "t.bin", twice, "twice"},
        {"no merges", "v.bpe", "", "0 merges"}, {"half a list", "v.bpe", half, "GPT-2 has 50000"},
        {"one word", "v.bpe", "#version: 0.2\nabc\n", "line 2"},
        {"three words", "v.bpe", "#version: 0.2\na b c\n", "line 2"},
        {"not a byte", "v.bpe", "#version: 0.2\nh e\n\xE6\x97\xA5 x\n", "line 3"},
        {"a merge twice", "v.bpe", but_one + "h e\n", "twice"},
        {"no file", "nowhere/t.bin", "", "nowhere/t.bin"}, {"no list", "nowhere/v.bpe", "", "nowhere/v.bpe"}};
    for (const auto& f : files) {
        const std::string path = f.path;
        if (path.find('/') == std::string::npos) { write_text(path, f.data); }
        check_dies(f.what, [&] {
            Tokenizer t;
            path.back() == 'n' ? tokenizer_read(&t, f.path) : tokenizer_init_bpe(&t, f.path);
        }, {f.words});
    }
    check_dies("id too large", [] { tokenizer_decode(&bpe, 50257); }, {"50257"});
}

// ---- tokenizer.bin ----

// bytes, then "bc", "ab", "abc", an added token and the end of text. lefts: of these, with MERGES_LISTED.
static std::string own_file(uint32_t id, uint32_t merges, const std::string& lefts = "") {
    const Strings more = {"bc", "ab", "abc", "a b", "<|endoftext|>"};
    const uint32_t V = 256 + (uint32_t)more.size();
    TokenizerHead head = {kTokenizerMagic, kTokenizerVersion, V, V - 1, id, merges, {}, 0};
    std::string data((const char*)&head, sizeof(head));
    for (int b = 0; b < 256; b++) { data += std::string("\1") + (char)b; }
    for (const std::string& token : more) { data += (char)token.size() + token; }
    return merges == MERGES_LISTED ? data + std::string(256, '\0') + lefts : data;
}

static void test_own_merges() {
    auto ids_of = [](const std::string& file, const std::string& text) {
        write_text("own.bin", file);
        Tokenizer own;
        tokenizer_read(&own, "own.bin");
        CHECK(own.id == 7 && own.eot == 260 && own.bytes[259] == "a b", "a token is not as written");
        Ids ids;
        if (own.pairs.empty()) { return ids; }
        tokenizer_encode(&own, text.data(), text.size(), ids);
        return ids;
    };
    const std::string lefts = std::string("\1\1\2\0\0", 5);
    // "abc" is "ab" and "c" alone: where "bc" comes first, "a" is left over. In llm.c's file any pair merges.
    CHECK_TEXT(numbers(ids_of(own_file(7, MERGES_LISTED, lefts), "abc")), "97 256");
    CHECK_TEXT(numbers(ids_of(own_file(7, MERGES_LISTED, lefts), "ab")), "257");
    CHECK_TEXT(numbers(ids_of(own_file(7, MERGES_ALL), "abc")), "258");
    CHECK_TEXT(numbers(ids_of(own_file(7, MERGES_LISTED, lefts), "a b")), "97 32 98");
    CHECK_TEXT(numbers(ids_of(own_file(7, MERGES_NONE), "abc")), "");
}

static void test_own_found() {
    auto put = [](const char* folder, uint32_t id) {
        mkdir_check(folder);
        write_text(std::string(folder) + "/tokenizer.bin", own_file(id, MERGES_ALL));
    };
    put("seven", 7); put("eight", 8);
    mkdir_check("none");
    typedef std::vector<TokensOf> Reads;
    const TokensOf seven = {"seven/*", "seven/a.bin", 7}, eight = {"eight/*", "eight/a.bin", 8};
    const TokensOf gpt2 = {"g/*", "seven/g.bin", 1}, lone = {"none/*", "none/a.bin", 7};
    const TokensOf unsaid = {"u/*", "seven/u.bin", 0};
    const TokensOf foreign = {"f/*", "eight/f.bin", 7};         // beside it is a tokenizer.bin of another
    const struct { const char* model; int V; Reads reads; const char* file; uint32_t named; } good[] = {
        {"", 300, {seven}, "seven/tokenizer.bin", 7}, {"", 50257, {seven}, "seven/tokenizer.bin", 7},
        {"", 261, {unsaid, lone, seven}, "seven/tokenizer.bin", 7}, {"", 300, {lone}, "", 7},
        {"", 300, {gpt2}, "", 1}, {"", 50304, {gpt2}, "", 1}, {"", 300, {unsaid}, "", 0},
        {"seven/m.bin", 300, {}, "seven/tokenizer.bin", 7}, {"seven/", 300, {lone}, "seven/tokenizer.bin", 7},
        {"none/m.bin", 300, {eight}, "eight/tokenizer.bin", 8},
        {"", 300, {foreign}, "", 7}, {"", 300, {foreign, seven}, "seven/tokenizer.bin", 7},
        {"none/m.bin", 300, {foreign}, "", 7}, {"seven/m.bin", 300, {foreign}, "seven/tokenizer.bin", 7},
        {"seven/m.bin", 50257, {lone}, "seven/tokenizer.bin", 7}, {"m.bin", 300, {lone}, "", 7}};
    for (const auto& g : good) {
        const TokenizerFile found = tokenizer_find(g.model, g.V, g.reads);
        CHECK_TEXT(found.file, g.file);
        CHECK(found.named == g.named && (found.head.V == 261) == (g.file[0] != 0), "V %u", found.head.V);
    }
    const struct { const char* model; int V; Reads reads; Strings words; } bad[] = {
        {"", 300, {seven, eight}, {"'seven/*' is of tokenizer 7", "'eight/*' of tokenizer 8"}},
        {"", 300, {seven, gpt2}, {"'seven/*'", "'g/*' of GPT-2's tokenizer"}},
        {"eight/m.bin", 300, {seven}, {"'eight/tokenizer.bin' is of tokenizer 8", "'seven/*' of"}},
        {"eight/m.bin", 300, {gpt2}, {"'eight/tokenizer.bin' is of tokenizer 8", "GPT-2's"}},
        {"none/m.bin", 50257, {seven}, {"'seven/*' holds tokens of tokenizer 7", "put its tokenizer.bin"}},
        {"none/m.bin", 50304, {seven}, {"'seven/*' holds tokens of tokenizer 7", "GPT-2's"}},
        {"", 256, {gpt2}, {"the byte tokenizer"}},
        {"", 260, {seven}, {"'seven/tokenizer.bin' has 261 tokens", "vocabulary 260", "V261"}},
        {"seven/m.bin", 260, {}, {"'seven/tokenizer.bin' has 261 tokens"}}};
    for (const auto& b : bad) {
        check_dies(b.words[0], [&] { tokenizer_find(b.model, b.V, b.reads); }, b.words);
    }
}

static void test_whose_tokens() {
    auto check = [](uint32_t id, int V) { return [=] { tokenizer_check(id, V, "a_*.bin"); }; };
    const uint32_t good[][2] = {{0, 256}, {0, 50257}, {1, 50257}, {1, 50304}, {2, 256}, {1, 60000}, {2, 300},
                                {3, 300}};
    for (auto [id, V] : good) {
        check_lives(format("tokenizer %u, V=%u", id, V), check(id, (int)V));
    }
    check_dies("bytes", check(2, 50257), {"'a_*.bin'", "the byte tokenizer", "50257", "GPT-2", "--bytes 0"});
    check_dies("padding", check(2, 50304), {"the byte tokenizer", "50304", "GPT-2"});
    check_dies("GPT-2", check(1, 256), {"'a_*.bin'", "GPT-2", "256", "the byte tokenizer", "--bytes 1"});
    check_dies("a third", check(3, 256), {"tokenizer 3", "the byte tokenizer"});
}

// ---- the program ----

static std::string tool;

// What a child does: becomes the program, with these arguments and this standard input.
static std::function<void()> with_args(const Strings& args, const std::string& input = "") {
    return [=] {
        write_text("stdin", input);
        if (!freopen("stdin", "r", stdin)) { _exit(99); }
        std::vector<char*> argv = {&tool[0]};
        for (const std::string& a : args) { argv.push_back(const_cast<char*>(a.c_str())); }
        argv.push_back(nullptr);
        execv(tool.c_str(), argv.data());
        _exit(98);
    };
}

// All tokens go to _train, unless the flags say otherwise.
static void tool_runs(Strings args, const std::string& input = "") {
    if (std::count(args.begin(), args.end(), "--val-tokens") == 0) {
        args.insert(args.begin(), {"--val-tokens", "0"});
    }
    const Child c = run_child(with_args(args, input));
    CHECK(c.code == 0 && c.err.empty(), "exit code %d: %s", c.code, c.err.c_str());
}

// The tokens of a shard; checks its header and its size.
static Ids shard(const std::string& path, uint32_t tokenizer = TOKENIZER_GPT2) {
    const std::string data = file_size(path.c_str()) < 1024 ? std::string(1024, '\0') : read_text(path);
    std::vector<uint16_t> tokens((data.size() - 1024) / 2);
    memcpy(tokens.data(), &data[1024], 2 * tokens.size());
    const std::string want = shard_text(tokens, (int)tokenizer);
    CHECK(data == want, "%s: %zu bytes, or its header, are not those of %zu tokens of tokenizer %u",
          path.c_str(), data.size(), tokens.size(), tokenizer);
    return Ids(tokens.begin(), tokens.end());
}

// The documents of the text, by lines or bytes 0: what `tokenize` must give.
static Ids encode_documents(const std::string& text, const std::string& separators, TokenizerCache* cache) {
    if (separators == "0") { return encode(text, cache); }
    Ids ids;
    std::string document;
    auto end_document = [&] {
        if (document.empty()) { return; }
        ids.push_back(bpe.eot);
        tokenizer_encode(&bpe, document.data(), document.size(), ids, cache);
        document.clear();
    };
    const char last = separators == "nul" ? '\0' : '\n';
    for (size_t i = 0, end; i < text.size(); i = end) {
        end = std::min(text.find(last, i), text.size() - 1) + 1;
        const std::string line = text.substr(i, end - i);
        if (separators == "nul") { document += line.substr(0, line.find(last)); }
        else if (line.find("<|endoftext|>") != 0 || line.find_first_not_of("\r\n", 13) != std::string::npos) {
            document += line;
            continue;
        }
        end_document();
    }
    end_document();
    return ids;
}

static void test_tool_documents() {
    write_text("0.txt", "");
    write_text("1.txt", "<|endoftext|>\none\n<|endoftext|>\r\n<|endoftext|>\n"         // one, nothing,
                        "two <|endoftext|>\n<|endoftext|>x\n<|endoftext|>");            // two, nothing
    write_text("2.txt", "one\n");
    write_text("a.txt", "Hel");
    write_text("b.txt", "lo world");
    write_text("bom.txt", "\xEF\xBB\xBFone\n");
    write_text("own.bpe", read_text(vocab_path));       // nobody knows what a list from elsewhere means
    const std::string text = read_text("1.txt"), nuls("a\n\0\0 b\0<|", 10);
    const Ids one = encode("one\n"), two = encode("two <|endoftext|>\n<|endoftext|>x\n"), eot = {bpe.eot};
    const Ids documents = joined(joined(joined(eot, one), joined(eot, two)), joined(eot, one));
    const Ids hello = encode("Hello world");
    const struct { Strings args; std::string input, path; uint32_t tokenizer; Ids want; } rows[] = {
        {{"1.txt", "0.txt", "2.txt", "-o", "sub/doc"}, "", "sub/doc_train.bin", TOKENIZER_GPT2, documents},
        {{"-", "-o", "plain", "--separators", "0"}, text, "plain_train.bin", TOKENIZER_GPT2, encode(text)},
        {{"-", "-o", "byte", "--bytes", "1"}, "hi\n<|endoftext|>\n\xC3\xA9", "byte_train.bin",
         TOKENIZER_BYTES, {0, 'h', 'i', '\n', 0, 0xC3, 0xA9}},
        // a byte order mark is dropped where a file begins
        {{"bom.txt", "2.txt", "bom.txt", "-o", "bom"}, "", "bom_train.bin", TOKENIZER_GPT2,
         joined(joined(joined(eot, one), joined(eot, one)), joined(eot, one))},
        {{"-", "-o", "mark", "--bytes", "1"}, "\xEF\xBB\xBF\xEF\xBB\xBF!", "mark_train.bin",
         TOKENIZER_BYTES, {0, 0xEF, 0xBB, 0xBF, '!'}},
        {{"-", "-o", "nulm", "--bytes", "1", "--separators", "nul"}, "\xEF\xBB\xBF!", "nulm_train.bin",
         TOKENIZER_BYTES, {0, 0xEF, 0xBB, 0xBF, '!'}},
        {{"-", "-o", "nul", "--bytes", "1", "--separators", "nul"}, nuls, "nul_train.bin", TOKENIZER_BYTES,
         {0, 'a', '\n', 0, ' ', 'b', 0, '<', '|'}},
        {{"2.txt", "-o", "own", "--vocab", "own.bpe"}, "", "own_train.bin", TOKENIZER_UNKNOWN,
         joined(eot, one)},
        // without separators a word may go over the end of a file; files and flags come in any order
        {{"a.txt", "b.txt", "--separators", "0", "-o", "1"}, "", "1_train.bin", TOKENIZER_GPT2, hello},
        {{"--separators", "0", "-o", "2", "a.txt", "b.txt"}, "", "2_train.bin", TOKENIZER_GPT2, hello},
        {{"-o", "3", "a.txt", "--separators=0", "b.txt"}, "", "3_train.bin", TOKENIZER_GPT2, hello},
        {{"-o", "4", "--separators", "0", "--", "a.txt", "b.txt"}, "", "4_train.bin", TOKENIZER_GPT2, hello}};
    for (const auto& r : rows) {
        tool_runs(r.args, r.input);
        CHECK_TEXT(r.path + ": " + numbers(shard(r.path, r.tokenizer)), r.path + ": " + numbers(r.want));
    }
    tool_runs({"-", "-o", "first", "--separators", "0", "--val-tokens", "5"}, text);
    CHECK(joined(shard("first_val.bin"), shard("first_train.bin")) == encode(text) &&
          shard("first_val.bin").size() == 5, "without separators the first tokens are for validation");
}

static void test_tool_decode() {
    const std::string text = "<|endoftext|>\nhi\n<|endoftext|>\n\xC3\xA9" "b\n";
    for (bool bytes : {false, true}) {
        const std::string flag = bytes ? "1" : "0";
        tool_runs({"-", "-o", "d", "--bytes", flag}, text);
        std::string data = read_text("d_train.bin");
        memset(&data[12], 0, 4);        // a shard that names no tokenizer: GPT-2's unless the flag says bytes
        write_text("old.bin", data);
        const Strings as_written = {"--decode", "d_train.bin"};
        const Strings as_said = {"--decode", "old.bin", "--bytes", flag};
        for (const Strings& args : {as_written, as_said}) {
            const Child e = run_child(with_args(args));
            CHECK(e.code == 0 && e.out == text && e.err.empty(), "%d: %s%s", e.code, e.out.c_str(),
                  e.err.c_str());
        }
        const Child e = run_child(with_args({"--decode", "old.bin"}));
        CHECK((e.out == text) == !bytes && holds(e.err, "--bytes 1") == bytes, "decoded: %s, %s",
              e.out.c_str(), e.err.c_str());
        data[12] = 3;
        write_text("old.bin", data);
        check_dies("of the future", with_args({"--decode", "old.bin"}), {"old.bin", "tokenizer 3"});
    }
    write_text("ends.txt", "one\n<|endoftext|>\ntwo");      // a separator begins a line
    tool_runs({"ends.txt", "2.txt", "-o", "d"});
    CHECK_TEXT(run_child(with_args({"--decode", "d_train.bin"})).out,
               "<|endoftext|>\none\n<|endoftext|>\ntwo\n<|endoftext|>\none\n");
}

static void test_tool_shards() {
    const size_t xs = (1 << 20) + 60000;                        // more than a block, which cannot be cut
    std::string big, document = fixture_text + "\n";
    std::replace(document.begin(), document.end(), '\0', '0');    // the program takes no bytes 0
    Ids one = joined({bpe.eot}, encode(document)), want;
    while (big.size() < 1 << 20) {
        big += document + "<|endoftext|>\n";
        want = joined(want, one);
    }
    big += std::string(xs, 'x');
    want = joined(joined(want, {bpe.eot}), encode(std::string(xs, 'x')));
    write_text("big.txt", big);
    for (const char* threads : {"1", "3"}) {
        // equal documents: which are drawn cannot be seen
        tool_runs({"big.txt", "-o", "big", "-j", threads, "--val-tokens", std::to_string(3 * one.size() + 1),
                   "--shard-tokens", "150000", "--all", "1"});
        CHECK(shard("big_all.bin") == want, "-j %s: wrong tokens", threads);
        Ids all = shard("big_val_000000.bin");
        CHECK(all.size() == 3 * one.size(), "val has %zu tokens, not three documents of %zu", all.size(),
              one.size());
        const size_t files = (want.size() - all.size() + 149999) / 150000;
        for (size_t i = 0; i < files; i++) {
            const Ids part = shard(format("big_train_%06d.bin", (int)i));
            CHECK(part.size() == 150000 || i + 1 == files, "shard %zu has %zu tokens", i, part.size());
            all = joined(all, part);
        }
        CHECK(files > 2 && all == want, "-j %s: val and train shards are not the text", threads);
        const std::string extra = format("big_train_%06d.bin", (int)files);
        CHECK(file_size(extra.c_str()) < 0, "one shard too many: %s", extra.c_str());
    }
    Child e = run_child(with_args({"big.txt", "-o", "big", "--shard-tokens", "400000", "--val-tokens", "0"}));
    CHECK(e.code == 0 && holds(e.err, "left from an earlier run"), "no warning: %s", e.err.c_str());
    e = run_child(with_args({"--decode", "big_all.bin"}));
    CHECK(e.out == "<|endoftext|>\n" + big, "the decoded shard is not the text");
}

// Text without places that are easy to cut, of more than one block.
static void test_tool_endless() {
    const std::string nul(1, '\0'), line = "<|endoftext|>";
    const struct { const char* separators; Strings from; } kinds[] = {
        {"1", {std::string(300000, 'a'), std::string(700000, ' '), std::string(500000, '7'), line,
               "\r\n", "\n" + line + "\n", std::string(400000, '<'), line + "\r\n"}},
        {"nul", {"word", " word", "!", " ", "\n", nul}}, {"nul", {"!", "?", nul}}, {"nul", {" ", nul}},
        {"nul", {"\xE6\x98\xAF", nul, std::string(300000, 'a')}},
        {"1", {"\"key\":", "12345,", "{\"a\":[", "],", "bar", "'s", "'", line, "\xC2\xA0", "\xE3\x80\x80"}},
        {"1", {"\xE7\x9A\x84", "\xE4\xB8\x80", "\xE6\x98\xAF", "\xE6\x97\xA5", "\xE6\x9C\xAC"}},
        {"0", {"\xC3\xA9", "\xC3\xA8", "\xC3\xBC"}}, {"1", {"\xF0\x9F\x98\x80", "\xE2\x82\xAC"}},
        {"0", {"'s"}}, {"1", {"\xE3\x80\x80"}}};
    TokenizerCache cache;
    for (const auto& kind : kinds) {
        const uint32_t k = (uint32_t)(&kind - kinds);
        const std::string text = drawn_text(k, kind.from, (1 << 20) + 60000);
        tool_runs({"-", "-o", "endless", "-j", "2", "--separators", kind.separators}, text);
        CHECK(shard("endless_train.bin") == encode_documents(text, kind.separators, &cache),
              "text %u, --separators %s: wrong tokens", k, kind.separators);
    }
    for (const std::string& end : {std::string("'ll"), line + "\n"}) {
        for (size_t seen : {2, 9}) {            // bytes of it in the first block
            std::string text;
            while (text.size() + seen < 1 << 20) { text += "ab!?"[text.size() % 4]; }
            text += end + "ab";
            tool_runs({"-", "-o", "endless"}, text);
            CHECK(shard("endless_train.bin") == encode_documents(text, "1", &cache),
                  "a block ends %zu bytes into %s: wrong tokens", seen, end.c_str());
        }
    }
    const long size = 6 << 20;
    const char* const texts[] = {"short.txt", "endless.txt"};
    for (int many : {0, 1}) { write_text(texts[many], std::string(many ? size : 1000, 'a')); }
    long memory[2];                             // KB, of one thread and what both inherit
    for (int many : {0, 1}) {
        const pid_t pid = fork();
        if (pid == 0) {
            if (!freopen("/dev/null", "w", stdout)) { _exit(99); }
            with_args({texts[many], "-o", "endless", "-j", "1"})();
        }
        int status;
        struct rusage usage;
        CHECK(wait4(pid, &status, 0, &usage) == pid && status == 0, "the program failed: %d", status);
        memory[many] = usage.ru_maxrss;
    }
    CHECK(memory[1] - memory[0] < 3 * size / 1024, "%ld bytes of one letter take %ld KB", size,
          memory[1] - memory[0]);
}

// U+FFFD for each byte that is no text, over the ends of blocks and of files, too.
static void test_tool_replace() {
    const std::string bad = "\xEF\xBF\xBD", xs((1 << 20) - 2, 'x');
    const struct { std::string text, want; int count; } rows[] = {
        {"a\xFF\xC3", "a" + bad + bad, 2}, {std::string("a\0b", 3), "a" + bad + "b", 1},
        {xs + "\xE3\x81" + "\x82", xs + "\xE3\x81\x82", 0}, {xs + "\xE3\x81" + "a", xs + bad + bad + "a", 2},
        {xs + "\xF0\x9F", xs + bad + bad, 2}, {xs + " " + "\xFF\xFF ", xs + " " + bad + bad + " ", 2},
        {std::string(1 << 20, '\xFF') + "a", drawn_text(0, {bad}, 3 << 20) + "a", 1 << 20}};
    for (const auto& r : rows) {
        const Child c = run_child(with_args({"-", "-o", "fffd", "--bytes", "1", "--errors", "replace",
                                             "--separators", "0", "--val-tokens", "0"}, r.text));
        CHECK_TEXT(c.err, "");
        CHECK(shard("fffd_train.bin", TOKENIZER_BYTES) == Ids((const uint8_t*)r.want.data(),
              (const uint8_t*)r.want.data() + r.want.size()), "%d bad bytes: wrong text", r.count);
        CHECK(holds(c.out, format("replaced: %d bytes", r.count)) == (r.count > 0), "%s", c.out.c_str());
    }
}

static void test_tool_errors() {
    write_text("1.txt", "some text\n");
    write_text("latin.txt", "K\xE4se");
    write_text("utf16.txt", std::string("a\0b\0", 4));
    write_text("rows.gz", "\x1F\x8B\x08");
    write_text("rows.txt", "\xEF\xBB\xBF\n{ \"text\": 1}");
    write_text("list.txt", "[\n {\"text\": 1}]");
    write_text("cut.txt", "ab\xE3\x81");
    const std::string two_bad = "\xEF\xBB\xBF" + drawn_text(0, {"text\n"}, 2 << 20) + "\xFF";
    write_text("junk.bin", "junk");
    CHECK(mkfifo("pipe", 0600) == 0 && mkfifo("out_train.bin", 0600) == 0, "cannot make a pipe");
    CHECK(symlink("1.txt", "link_train.bin") == 0, "cannot make a link");
    Strings many(22, "none.txt");
    many.insert(many.end(), {"-o", "err"});
    const struct { const char* what; Strings args, said; const char* input; } rows[] = {
        {"nothing", {}, {"no text"}, ""},
        {"no -o", {"1.txt"}, {"-o"}, ""},
        {"missing", {"1.txt", "none.txt", "-o", "err"}, {"none.txt"}, ""},
        {"folder", {".", "-o", "err"}, {"is a folder"}, ""},
        {"empty", {"0.txt", "-o", "err"}, {"there is no text"}, ""},
        {"only separators", {"-", "-o", "err"}, {"no text"}, "<|endoftext|>\n<|endoftext|>\n"},
        {"below 0", {"1.txt", "-o", "err", "--val-tokens", "-1"}, {"--val-tokens -1"}, ""},
        {"all val", {"1.txt", "-o", "err", "--val-tokens", "4"}, {"--val-tokens 4", "has 4 tokens"}, ""},
        {"unwritable", {"1.txt", "-o", "/proc/nowhere/x"}, {"/proc/nowhere"}, ""},
        {"no vocabulary", {"1.txt", "-o", "err", "--vocab", "none.bpe"}, {"none.bpe"}, ""},
        {"decode junk", {"--decode", "junk.bin"}, {"truncated"}, ""},
        {"decode and text", {"1.txt", "--decode", "junk.bin"}, {"1.txt"}, ""},
        {"a pipe to read", {"pipe", "-o", "err"}, {"standard input", "pipe"}, ""},
        {"all at once", {"1.txt", "latin.txt", "utf16.txt", "rows.gz", "rows.txt", "list.txt", "cut.txt", ".",
                         "none.txt", "pipe", "-o", "err"},
         {"'latin.txt' is no UTF-8 text: byte 1 is 0xe4", "'utf16.txt' is no UTF-8 text: byte 1 is 0x00",
          "'rows.gz' is no UTF-8 text: byte 1 is 0x8b", "'rows.txt' holds JSON", "'list.txt' holds JSON",
          "'cut.txt' is no UTF-8 text: byte 2 is 0xe3", "'.': it is a folder", "'none.txt': No such file",
          "'pipe': it is a pipe", "hint: ", "--encoding", "--errors replace", "get.py"}, ""},
        {"one a line", {"none.txt", ".", "-o", "err"},
         {"error: cannot open 'none.txt': No such file or directory\n       cannot read '.'"}, ""},
        {"too many to name", many, {"and 2 more\n"}, ""},
        {"deep inside", {"-", "-o", "err"}, {"'-' is no UTF-8 text: byte 2097158 is 0xff"}, two_bad.c_str()},
        {"JSON, replaced", {"rows.txt", "-o", "err", "--errors", "replace"}, {"holds JSON"}, ""},
        {"a pipe to decode", {"--decode", "pipe"}, {"regular file", "pipe"}, ""},
        {"a pipe of merges", {"1.txt", "-o", "err", "--vocab", "pipe"}, {"regular file", "pipe"}, ""},
        {"a pipe to write", {"1.txt", "-o", "out"}, {"regular file", "pipe"}, ""},
        {"a link to write", {"1.txt", "-o", "link"}, {"symbolic link"}, ""}};
    for (const auto& r : rows) { check_dies(r.what, with_args(r.args, r.input), r.said); }
    for (const std::string& name : names_in(".")) {
        CHECK(name.find("err") != 0, "an error left %s behind", name.c_str());
    }
    const Child help = run_child(with_args({"--help"}));
    CHECK(help.code == 0 && holds(help.out, "--shard-tokens"), "--help: %s", help.out.c_str());

    write_text("xs.txt", std::string(100000, 'x'));         // found by a write, not only by the last flush
    tool_runs({"1.txt", "-o", "few"});
    tool_runs({"xs.txt", "-o", "many"});
    const struct { Strings args; const char* said; } full[] = {
        {{"--decode", "few_train.bin"}, "No space"}, {{"--decode", "many_train.bin"}, "write"},
        {{"1.txt", "-o", "few"}, "No space"}};
    for (const auto& f : full) {
        check_dies("a full disk", [&] {
            if (!freopen("/dev/full", "w", stdout)) { _exit(99); }
            with_args(f.args)();
        }, {"standard output", f.said});
    }
}

int main() {
    tokenizer_init_bpe(&bpe, nullptr);
    vocab_path = whole_path(tokenizer_default_path());
    tool = whole_path("build/tokenize");
    const std::string root = vocab_path.substr(0, vocab_path.size() - strlen("dev/data/gpt2_bpe/vocab.bpe"));
    fixture_text = read_text(root + "dev/test/fixtures/tokenizer.txt");
    fixture_ids = read_text(root + "dev/test/fixtures/tokenizer.ids");
    folder_begin("tokenizer");
    if (chdir(folder.c_str()) != 0) { die("cannot enter '%s'", folder.c_str()); }

    TEST("text or not") { test_faults(); }
    TEST("fixture from tiktoken") { test_fixture(); }
    TEST("pieces") { test_pieces(); }
    TEST("places to cut") { test_cut(); }
    TEST("merges") { test_merges(); }
    TEST("vocabulary files") { test_files(); }
    TEST("whose tokens") { test_whose_tokens(); }
    TEST("tokenizer.bin: merges") { test_own_merges(); }
    TEST("tokenizer.bin: where it is found") { test_own_found(); }
    if (tool.empty()) {
        SKIP(7, "build/tokenize is not built");
    } else {
        TEST("tokenize: documents") { test_tool_documents(); }
        TEST("tokenize: shards back to text") { test_tool_decode(); }
        TEST("tokenize: shards and threads") { test_tool_shards(); }
        TEST("tokenize: text without an end") { test_tool_endless(); }
        TEST("tokenize: bytes that are no text") { test_tool_replace(); }
        TEST("tokenize: errors") { test_tool_errors(); }
    }
    // Last: a fork copies the tables of the memory that they have used.
    TEST("long pieces, cuts inside of them") { test_long_pieces(); test_far_dependence(); }
    TEST("long runs") { test_long_runs(); }
    return folder_end();
}
