/*
Tests of llmc/data/tokenizer.h and of the tokenize program.

    g++ -std=c++17 -O2 -pthread dev/test/test_tokenizer.cpp -o build/test_tokenizer
    build/test_tokenizer [build/tokenize]       # without the program its part is skipped

The expected ids come from tiktoken: the fixture dev/test/fixtures/tokenizer.{txt,ids} was written by
`python3 dev/test/test_tiktoken.py` (tiktoken 0.14.0), the short ones below were read off it as
well.
*/
#include <signal.h>     // gives: kill
#include <sys/resource.h>   // gives: setrlimit
#include <time.h>       // gives: clock

#include "llmc/rand.h"              // gives: rand_u32
#include "llmc/data/tokenizer.h"    // the subject
#include "dev/data/tokenizer_tool.h"    // gives: TokenizerCache, tokenizer_can_cut, tokenizer_write
#include "child.h"                  // gives: folder, run_child, check_dies, CHECK_TEXT
#include "test.h"                   // gives: CHECK, TEST

typedef std::vector<uint32_t> Ids;

static Tokenizer bpe;
static std::string source_root;     // where dev/ is

static Ids encode(const std::string& text, TokenizerCache* cache = nullptr) {
    Ids ids;
    tokenizer_encode(&bpe, text.data(), text.size(), ids, cache);
    return ids;
}

static std::string decode(const Tokenizer* tok, const Ids& ids) {
    std::string text;
    for (uint32_t id : ids) { text += tokenizer_decode(tok, id); }
    return text;
}

static std::string show(const Ids& ids) {
    std::string s;
    for (uint32_t id : ids) { s += format("%s%u", s.empty() ? "" : " ", id); }
    return s;
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

static std::string file_text(const std::string& path) {     // "" if there is none
    return file_size(path.c_str()) < 0 ? "" : read_text(path);
}

// ---- encoding ----

static void test_fixture() {
    std::string base = source_root + "dev/test/fixtures/tokenizer";
    std::string text = file_text(base + ".txt"), want = file_text(base + ".ids");
    CHECK(text.size() > 30000 && want.size() > 20000, "the fixture is missing: %s.txt", base.c_str());
    TokenizerCache cache;
    for (TokenizerCache* c : {(TokenizerCache*)nullptr, &cache, &cache}) {     // the last time from the cache
        Ids ids = encode(text, c);
        size_t same = 0;
        for (; same < ids.size() && 2 * same + 1 < want.size(); same++) {
            uint16_t id;
            memcpy(&id, &want[2 * same], 2);
            if (id != ids[same]) { break; }
        }
        std::string before = decode(&bpe, Ids(ids.begin(), ids.begin() + (ptrdiff_t)same));
        CHECK(same == ids.size() && 2 * same == want.size(), "token %zu of %zu differs, after '%s'", same,
              want.size() / 2, before.substr(before.size() - std::min(before.size(), (size_t)20)).c_str());
        CHECK(decode(&bpe, ids) == text, "the fixture does not decode to itself");
    }
}

static void test_known_ids() {
    struct { const char* text; Ids ids; } cases[] = {
        {"", {}},
        {"Hello world", {15496, 995}},
        {" ", {220}},
        {"\n\n", {628}},
        {"a\n\nb", {64, 198, 198, 65}},
        {"I'll can't 's", {40, 1183, 460, 470, 705, 82}},
        {"<|endoftext|>", {27, 91, 437, 1659, 5239, 91, 29}},       // text never makes that token
    };
    for (auto& c : cases) { CHECK_TEXT(show(encode(c.text)), show(c.ids)); }
}

static void test_pieces() {
    const char* cases[][2] = {
        {"we're HE'S 'sable", "|we|'re| HE|'|S| '|sable|"},         // only lower case; not after a blank
        {"'s's'", "|'s|'s|'|"},
        {"'ve'd'm'll'x'l", "|'ve|'d|'m|'ll|'|x|'|l|"},
        {"don''t", "|don|''|t|"},                                   // the first ' takes the second along
        {"x  y", "|x| | y|"},
        {"x\n\ny", "|x|\n|\n|y|"},
        {"x \ny", "|x| |\n|y|"},
        {"x\n y", "|x|\n| y|"},
        {"x   ", "|x|   |"},
        {"  ", "|  |"},
        {"\t\tx", "|\t|\t|x|"},
        {" \xC2\xA0x", "| |\xC2\xA0|x|"},                           // a no-break space joins no word
        {"\xE3\x80\x80\xE3\x80\x80x", "|\xE3\x80\x80|\xE3\x80\x80|x|"},
        {"ab12 34!? -x", "|ab|12| 34|!?| -|x|"},
        {"a\x1C" "b", "|a|\x1C|b|"},                                // a space in Python, not in Unicode
        {"\xC3\xA9t\xC3\xA9 \xD0\xBC\xD0\xB8\xD1\x80", "|\xC3\xA9t\xC3\xA9| \xD0\xBC\xD0\xB8\xD1\x80|"},
        {"e\xCC\x81", "|e|\xCC\x81|"},                              // a combining accent is a mark, no letter
        {"\xC2\xBD\xE2\x85\xA7" "7", "|\xC2\xBD\xE2\x85\xA7" "7|"},     // fraction, Roman numeral
        {"a\xFF\x80 \xC3", "|a|\xFF\x80| \xC3|"},                   // bad bytes are like punctuation
        {"\xED\xA0\x80!", "|\xED\xA0\x80!|"},                       // a surrogate is three bad bytes
        {"a\xE0\x81\x81", "|a|\xE0\x81\x81|"},                    // an overlong A is three bad bytes
        {"a\xF0\x80\x81\x81", "|a|\xF0\x80\x81\x81|"},
        {"\xC2\xA0\xC2", "|\xC2\xA0|\xC2|"},
    };
    for (auto& c : cases) { CHECK_TEXT(pieces(c[0]), c[1]); }
}

static void test_cut() {
    const std::string text = "a b  c\n\nd\xC2\xA0 e\xE3\x80\x80\n\xFF \xE3\x80 '\n";
    const uint8_t* s = (const uint8_t*)text.data();
    std::vector<bool> begins(text.size() + 1);
    for (size_t i = 0; i < text.size(); i += tokenizer_piece(&bpe, s + i, text.size() - i)) {
        begins[i] = true;
    }
    int cuts = 0;
    for (size_t i = 0; i <= text.size(); i++) {
        if (!tokenizer_can_cut(&bpe, text.data(), text.size(), i)) { continue; }
        cuts++;
        CHECK(begins[i], "no piece begins at %zu, yet it counts as a place to cut", i);
        Ids whole = encode(text), head = encode(text.substr(0, i)), tail = encode(text.substr(i));
        head.insert(head.end(), tail.begin(), tail.end());
        CHECK(head == whole, "cut at %zu changes the tokens", i);
    }
    CHECK(cuts == 6, "%d places to cut, expected 6", cuts);
}

// Merges the slow, plain way: what both of the fast ones must equal.
static Ids merge_plain(const std::string& piece) {
    Ids ids;
    for (char c : piece) { ids.push_back(bpe.byte_id[(uint8_t)c]); }
    for (;;) {
        uint32_t best = kNoMerge;
        size_t at = 0;
        for (size_t i = 0; i + 1 < ids.size(); i++) {
            uint32_t id = tokenizer_pair(&bpe, ids[i], ids[i + 1]);
            if (id < best) { best = id; at = i; }
        }
        if (best == kNoMerge) { return ids; }
        ids[at] = best;
        ids.erase(ids.begin() + (ptrdiff_t)at + 1);
    }
}

static void test_merges() {
    int wrong = 0;
    for (uint32_t id = 0; id < bpe.eot; id++) {
        wrong += merge_plain(bpe.bytes[id]) != Ids{id};
    }
    CHECK(wrong == 0, "%d tokens do not merge to themselves", wrong);

    int short_wrong = 0, long_wrong = 0;
    const char* letters[] = {"a", "ab", "-=", "etaoinshr", "abcdefghijklmnopqrstuvwxyz"};
    for (uint32_t k = 0; k < 3000; k++) {
        const char* set = letters[k % 5];
        size_t n = 1 + rand_u32(5, RAND_STORY, 1, k) % (k % 2 ? 400 : kShortPiece);
        std::string piece;
        for (size_t i = 0; i < n; i++) { piece += set[rand_u32(5, RAND_STORY, 2 + k, i) % strlen(set)]; }
        Ids want = merge_plain(piece), got;
        for (char c : piece) { got.push_back(bpe.byte_id[(uint8_t)c]); }
        Ids heap = got;
        heap.resize(tokenizer_merge_long(&bpe, heap.data(), n));
        long_wrong += heap != want;
        if (n <= kShortPiece) {
            got.resize(tokenizer_merge_short(&bpe, got.data(), n));
            short_wrong += got != want;
        }
    }
    CHECK(short_wrong == 0, "%d short pieces merge wrongly", short_wrong);
    CHECK(long_wrong == 0, "%d pieces merge wrongly on the heap", long_wrong);
}

// Some n bytes that make one piece or nearly so: noise, periods, runs and long tokens of one class of
// characters each.
static std::string endless_piece(uint32_t k, size_t n) {
    uint32_t draw = 0;
    auto roll = [&](size_t below) { return rand_u32(6, RAND_STORY, k, draw++) % (uint32_t)below; };
    static const std::vector<std::vector<std::string>> sets = {
        {"a"}, {"e", "t", "a", "o", "i", "n"}, {"q", "x", "z", "j", "v", "w", "k", "y", "b", "p"}, {"-"},
        {"-", "=", "*", "_", "#", "."}, {"0", "1", "2", "3", "4", "5", "6", "7", "8", "9"}, {" "},
        {" ", "\n", "\t"}, {"A", "C", "G", "T"}, {"\xC3\x82"}, {"\xC3\x83", "\xC3\x82"}, {"'", "!"},
        {"\xE3\x83\xBC", "\xE3\x83\xAB", "\xE3\x83\x89"}, {"\xC3\xA9", "\xC3\xA8", "a"}, {"\xE2", "\x80"}};
    const std::vector<std::string>& set = sets[k % sets.size()];
    const size_t period = 1 + roll(40), longest_run = 1 + roll(200);
    std::vector<std::string> units;
    for (size_t size = 0; size < n; size += units.back().size()) {
        std::string unit = set[roll(set.size())];
        switch (k / sets.size() % 4) {
            case 0: break;
            case 1: if (units.size() >= period) { unit = units[units.size() - period]; } break;
            case 2: for (size_t i = roll(longest_run); i > 0; i--) { unit += set[0]; } break;
            case 3: {
                const std::string& token = bpe.bytes[roll(bpe.eot)];
                bool letters = token.find_first_not_of("abcdefghijklmnopqrstuvwxyz") == std::string::npos;
                if (letters) { unit = token; }
            }
        }
        units.push_back(unit);
    }
    std::string piece;
    for (const std::string& unit : units) { piece += unit; }
    return piece.substr(0, n);
}

// A vocabulary whose tokens depend on what comes far behind: with 128 bytes x0 x1 x2 ..., x1x2 merges before
// x0x1, x2x3 before that, and so on, so that the parity of the last one decides about all.
static void test_far_dependence() {
    Tokenizer chain;
    tokenizer_init_bytes(&chain);
    for (int i = 126; i >= 0; i--) { chain.bytes.push_back({(char)(0x80 + i), (char)(0x81 + i)}); }
    std::vector<std::string> tokens = chain.bytes;
    chain = Tokenizer();
    chain.bytes = tokens;
    chain.eot = (uint32_t)tokens.size();
    tokenizer_build(&chain, "chain");
    std::string bytes;
    for (int i = 0; i < 5 * 128; i++) { bytes += (char)(0x80 + i % 128); }
    auto row = [&](size_t from, size_t to) {
        Ids ids;
        tokenizer_encode_piece(&chain, (const uint8_t*)&bytes[from], to - from, ids);
        return ids;
    };
    int cuts = 0;
    for (size_t n = 2 * 128; n < 4 * 128; n++) {
        Ids whole, plain = row(0, n);
        tokenizer_merge(&chain, (const uint8_t*)bytes.data(), n, whole);
        CHECK(plain == whole, "%zu bytes merge wrongly in windows", n);
        size_t cut = tokenizer_cut_inside(&chain, (const uint8_t*)bytes.data(), n);
        if (cut == 0) { continue; }
        cuts++;
        for (size_t end : {n, n + 1, n + 2, n + 63, n + 128}) {
            Ids parts = row(0, cut), tail = row(cut, end);
            parts.insert(parts.end(), tail.begin(), tail.end());
            CHECK(parts == row(0, end), "%zu bytes cut at %zu, then %zu: other tokens", n, cut, end);
        }
    }
    CHECK(cuts > 100, "%d of 256 could be cut", cuts);
}

static void test_windows() {
    int wrong = 0, cuts = 0, cut_wrong = 0, runs_cut = 0;
    for (uint32_t k = 0; k < 240; k++) {
        std::string piece = endless_piece(k, 65 + rand_u32(5, RAND_STORY, 9, k) % 900);
        Ids got;
        tokenizer_encode_piece(&bpe, (const uint8_t*)piece.data(), piece.size(), got);
        wrong += got != merge_plain(piece);
    }
    CHECK(wrong == 0, "%d of 240 pieces merge wrongly in windows", wrong);
    for (uint32_t k = 0; k < 60; k++) {         // each set of characters in each of four ways
        size_t n = 2000 + k % 3;
        std::string text = "x" + endless_piece(k, 2 * n);
        while ((text[n] & 0xC0) == 0x80) { n++; }
        size_t begin = 0, length = 0;           // of a piece that reaches beyond the first n bytes
        const uint8_t* s = (const uint8_t*)text.data();
        for (size_t i = 0; i < n; begin = i, i += length) {
            length = tokenizer_piece(&bpe, s + i, text.size() - i);
        }
        if (n - begin < 600) { continue; }
        size_t cut = tokenizer_cut_inside(&bpe, s + begin, n - begin);
        runs_cut += cut > 0 && k / 15 % 4 == 1;
        if (cut == 0) { continue; }
        cut += begin;
        cuts++;
        Ids head = encode(text.substr(0, cut));
        for (size_t stop = n; stop < n + 260; stop += 1 + stop % 23) {
            for (const char* then : {"", "'s", " ", "\n", "x", "\xE2\x82\xAC", "\xFF"}) {
                Ids parts = head, tail = encode(text.substr(cut, stop - cut) + then);
                parts.insert(parts.end(), tail.begin(), tail.end());
                cut_wrong += parts != encode(text.substr(0, stop) + then);
            }
        }
    }
    CHECK(cuts > 20 && runs_cut > 5, "only %d pieces could be cut, %d of them periodic", cuts, runs_cut);
    CHECK(cut_wrong == 0, "a cut changed the tokens in %d cases", cut_wrong);
}

static void test_round_trips() {
    TokenizerCache cache;
    int wrong = 0, cache_wrong = 0;
    for (uint32_t k = 0; k < 2000; k++) {
        std::string text;
        size_t n = rand_u32(9, RAND_STORY, 1, k) % 300;
        uint32_t top = k % 3 == 0 ? 256 : k % 3 == 1 ? 128 : 4;
        for (size_t i = 0; i < n; i++) {
            uint32_t r = rand_u32(9, RAND_STORY, 2 + k, i);
            text += top == 4 ? "\xE2\x80\x82 '"[r % 5] : (char)(r % top);      // an en space, whole or not
        }
        Ids ids = encode(text);
        wrong += decode(&bpe, ids) != text;
        cache_wrong += encode(text, &cache) != ids;
    }
    CHECK(wrong == 0, "%d random strings of bytes did not come back", wrong);
    CHECK(cache_wrong == 0, "%d random strings get other ids with a cache", cache_wrong);

    std::string nul("a\0b\0\0", 5);
    CHECK(decode(&bpe, encode(nul)) == nul, "zero bytes are lost");
    for (const std::string& zeros : {nul, std::string(3, '\0'), std::string(2, '\0')}) {
        CHECK(encode(zeros, &cache) == encode(zeros), "zero bytes confuse the cache");
    }

    Ids appended = {bpe.eot};
    tokenizer_encode(&bpe, "Hello", 5, appended);
    CHECK(appended == (Ids{50256, 15496}), "encode does not append: %s", show(appended).c_str());
}

// A megabyte in one piece must take n log n: with n^2 this would be hours.
static void test_long_runs() {
    for (const char* unit : {"a", " ", "\n", "=-", "\xC3\xA9", "\xFF", "7"}) {
        std::string text;
        while (text.size() < 1 << 20) { text += unit; }
        const clock_t start = clock();          // of this process alone, however busy the machine is
        Ids ids = encode(text);
        const double s = (double)(clock() - start) / CLOCKS_PER_SEC;
        CHECK(decode(&bpe, ids) == text, "1 MB of '%s' does not come back", unit);
        CHECK(s < 20, "1 MB of '%s' took %.1f s", unit, s);
    }
    // tiktoken: 64 letters a are 16 times "aaaa"; the megabyte goes on like that
    Ids few = encode(std::string(64, 'a')), many = encode(std::string(1 << 20, 'a'));
    CHECK(few == Ids(16, 24794), "64 a: %s", show(few).c_str());
    CHECK(many == Ids((1 << 20) / 4, 24794), "1 MB of a: %zu tokens", many.size());
}

static void test_bytes() {
    Tokenizer tok;
    tokenizer_init_bytes(&tok);
    std::string all;
    for (int b = 0; b < 256; b++) { all += (char)b; }
    Ids ids;
    tokenizer_encode(&tok, all.data(), all.size(), ids);
    CHECK(ids.size() == 256 && tok.bytes.size() == 256 && tok.eot == 0, "%zu ids", ids.size());
    CHECK(decode(&tok, ids) == all && std::is_sorted(ids.begin(), ids.end()), "bytes are not their own ids");
    tokenizer_free(&tok);
}

// ---- files ----

static void test_files() {
    std::string path = in_folder("gpt2_tokenizer.bin");
    tokenizer_write(&bpe, path.c_str());
    Tokenizer back;
    tokenizer_read(&back, path.c_str());
    CHECK(back.bytes == bpe.bytes && back.eot == bpe.eot, "gpt2_tokenizer.bin does not read back");
    Ids ids;
    std::string text = "It's naïve: 1 + 1 = 11, isn't it?\n";
    tokenizer_encode(&back, text.data(), text.size(), ids);
    CHECK(ids == encode(text), "a vocabulary that was read encodes differently");
    tokenizer_free(&back);
    CHECK(back.bytes.empty(), "tokenizer_free leaves tokens behind");

    std::string good = file_text(path), bad = in_folder("bad.bin");
    auto read_dies = [&](const char* name, const std::string& data, const char* words) {
        write_text(bad, data);
        check_dies(name, [&] { Tokenizer t; tokenizer_read(&t, bad.c_str()); }, {words});
    };
    auto with_int = [&](size_t index, uint32_t value) {
        std::string data = good;
        memcpy(&data[4 * index], &value, 4);
        return data;
    };
    uint32_t header[4];
    memcpy(header, good.data(), sizeof(header));
    CHECK(header[0] == 20240328 && header[1] == 2 && header[2] == 50257 && header[3] == 50256,
          "header %u %u %u %u", header[0], header[1], header[2], header[3]);
    const struct { const char* what; std::string data; const char* words; } files[] = {
        {"empty", "", "truncated"}, {"magic", with_int(0, 20240520), "no tokenizer file"},
        {"version", with_int(1, 1), "no tokenizer file"},
        {"huge count", with_int(2, 0xFFFFFFFF), "4294967295 tokens"},
        {"small count", with_int(2, 50000), "50000"}, {"end of text", with_int(3, 50257), "50257"},
        {"cut short", good.substr(0, good.size() - 1), "end after"}, {"too long", good + "x", "end after"}};
    for (const auto& f : files) { read_dies(f.what, f.data, f.words); }
    std::string twice = good;
    twice[1024 + 3] = twice[1024 + 1];
    read_dies("same token twice", twice, "twice");
    check_dies("missing", [&] { Tokenizer t; tokenizer_read(&t, "/nowhere/t.bin"); }, {"/nowhere/t.bin"});

    std::string merges = file_text(tokenizer_default_path()), list = in_folder("vocab.bpe");
    auto bpe_dies = [&](const char* name, const std::string& data, const char* words) {
        write_text(list, data);
        check_dies(name, [&] { Tokenizer t; tokenizer_init_bpe(&t, list.c_str()); }, {words});
    };
    bpe_dies("no merges", "", "0 merges");
    bpe_dies("half a list", merges.substr(0, merges.rfind('\n', merges.size() / 2) + 1), "GPT-2 has 50000");
    bpe_dies("one word", "#version: 0.2\nabc\n", "line 2");
    bpe_dies("three words", "#version: 0.2\na b c\n", "line 2");
    bpe_dies("not a byte", "#version: 0.2\nh e\n\xE6\x97\xA5 x\n", "line 3");
    bpe_dies("a merge twice", merges.substr(0, merges.rfind('\n', merges.size() - 2) + 1) + "h e\n", "twice");
    check_dies("missing list", [] { Tokenizer t; tokenizer_init_bpe(&t, "/nowhere/v"); }, {"/nowhere/v"});
    check_dies("id too large", [] { tokenizer_decode(&bpe, 50257); }, {"50257"});
}

// ---- the program ----

static std::string tool;

static void exec_tool(const std::vector<std::string>& args) {
    std::vector<char*> argv = {&tool[0]};
    for (const std::string& a : args) { argv.push_back(const_cast<char*>(a.c_str())); }
    argv.push_back(nullptr);
    execv(tool.c_str(), argv.data());
    _exit(98);
}

// What a child does: becomes the program, with these arguments and this standard input.
static std::function<void()> with_args(const std::vector<std::string>& args, const std::string& input = "") {
    return [=] {
        write_text(in_folder("stdin"), input);
        if (!freopen(in_folder("stdin").c_str(), "r", stdin)) { _exit(99); }
        exec_tool(args);
    };
}

// The program in another process that waits for the rest of its standard input.
struct Running { pid_t pid; int input; };

static Running start_tool(const std::vector<std::string>& args) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) { die("cannot make a pipe: %s", strerror(errno)); }
    fflush(stdout);
    Running r = {fork(), ends[1]};
    if (r.pid == 0) {
        dup2(ends[0], STDIN_FILENO);
        if (!freopen("/dev/null", "w", stdout)) { _exit(99); }
        exec_tool(args);
    }
    close(ends[0]);
    return r;
}

static int end_tool(const Running& r) {         // its exit code, or -signal
    close(r.input);
    int status = 0;
    waitpid(r.pid, &status, 0);
    return exit_code(status);
}

// Files whose name begins and ends so.
static size_t count_files(const std::string& begin, const std::string& end = "") {
    size_t count = 0;
    for (const std::string& name : names_in(folder)) {
        count += name.find(begin) == 0 && name.size() >= begin.size() + end.size() &&
                 name.substr(name.size() - end.size()) == end;
    }
    return count;
}
static size_t unfinished() { return count_files("two", ".part"); }

// Writes text to the program and waits until it holds so many unfinished files.
static void feed_tool(const Running& r, const std::string& text, size_t wanted) {
    for (size_t done = 0; done < text.size();) {
        ssize_t n = write(r.input, text.data() + done, text.size() - done);
        if (n <= 0) { die("cannot write to the program: %s", strerror(errno)); }
        done += (size_t)n;
    }
    for (int i = 0; i < 6000 && unfinished() != wanted; i++) { usleep(10000); }
    CHECK(unfinished() == wanted, "%zu unfinished files, expected %zu", unfinished(), wanted);
}

// All tokens go to _train, unless the flags say otherwise.
static void tool_runs(std::vector<std::string> args, const std::string& input = "") {
    if (std::count(args.begin(), args.end(), "--val-tokens") == 0) {
        args.insert(args.begin(), {"--val-tokens", "0"});
    }
    Child c = run_child(with_args(args, input));
    CHECK(c.code == 0 && c.err.empty(), "exit code %d: %s", c.code, c.err.c_str());
}

// The tokens of a shard; checks its header and its size.
static Ids shard(const std::string& path, uint32_t tokenizer = TOKENIZER_GPT2) {
    std::string data = file_text(path);
    uint32_t header[256] = {0};
    if (data.size() >= 1024) { memcpy(header, data.data(), sizeof(header)); }
    size_t n = data.size() >= 1024 ? (data.size() - 1024) / 2 : 0;
    CHECK(header[0] == 20240520 && header[1] == 1 && header[2] == n && data.size() == 1024 + 2 * n,
          "%s: %zu bytes, header %u %u %u", path.c_str(), data.size(), header[0], header[1], header[2]);
    CHECK(header[3] == tokenizer, "%s: tokenizer %u, expected %u", path.c_str(), header[3], tokenizer);
    CHECK(std::count(header + 4, header + 256, 0u) == 252, "%s: the rest is not zero", path.c_str());
    Ids ids(n);
    for (size_t i = 0; i < n; i++) {
        uint16_t id;
        memcpy(&id, &data[1024 + 2 * i], 2);
        ids[i] = id;
    }
    return ids;
}

static void test_whose_tokens() {
    auto check = [](uint32_t id, int V) { return [=] { tokenizer_check(id, V, "a_*.bin"); }; };
    const uint32_t good[][2] = {{0, 256}, {0, 50257}, {1, 50257}, {2, 256}, {1, 60000}, {2, 300}, {3, 300}};
    for (auto [id, V] : good) {
        check_lives(format("tokenizer %u, V=%u", id, V), check(id, (int)V));
    }
    check_dies("bytes", check(2, 50257), {"'a_*.bin'", "the byte tokenizer", "50257", "GPT-2", "--bytes 0"});
    check_dies("GPT-2", check(1, 256), {"'a_*.bin'", "GPT-2", "256", "the byte tokenizer", "--bytes 1"});
    check_dies("a third", check(3, 256), {"tokenizer 3", "the byte tokenizer"});
}

static void test_tool_documents() {
    Ids a = encode("one\n"), b = encode("two <|endoftext|>\n"), eot = {bpe.eot}, want;
    for (const Ids* part : {&eot, &a, &eot, &b, &eot, &a}) {
        want.insert(want.end(), part->begin(), part->end());
    }
    std::string first = "<|endoftext|>\none\n<|endoftext|>\r\n<|endoftext|>\n"     // one, nothing,
                        "two <|endoftext|>\n<|endoftext|>";                         // two, nothing
    write_text(in_folder("1.txt"), first);
    write_text(in_folder("2.txt"), "one\n");
    write_text(in_folder("0.txt"), "");
    tool_runs({in_folder("1.txt"), in_folder("0.txt"), in_folder("2.txt"), "-o", in_folder("sub/doc")});
    Ids got = shard(in_folder("sub/doc_train.bin"));
    CHECK(got == want, "documents: %s, expected %s", show(got).c_str(), show(want).c_str());

    Child e = run_child(with_args({"--decode", in_folder("sub/doc_train.bin")}));
    std::string back = "<|endoftext|>\none\n<|endoftext|>\ntwo <|endoftext|>\n<|endoftext|>\none\n";
    CHECK_TEXT(e.out, back);

    tool_runs({"-", "-o", in_folder("first"), "--separators", "0", "--val-tokens", "5"}, first);
    got = shard(in_folder("first_val.bin"));
    for (uint32_t id : shard(in_folder("first_train.bin"))) { got.push_back(id); }
    CHECK(got == encode(first), "without separators the first tokens are for validation");
    tool_runs({"-", "-o", in_folder("plain"), "--separators", "0"}, first);
    CHECK(shard(in_folder("plain_train.bin")) == encode(first), "--separators 0 is not the plain text");

    tool_runs({"-", "-o", in_folder("byte"), "--bytes", "1"}, "hi\n<|endoftext|>\n\xFF");
    got = shard(in_folder("byte_train.bin"), TOKENIZER_BYTES);
    CHECK(got == (Ids{0, 'h', 'i', '\n', 0, 0xFF}), "bytes: %s", show(got).c_str());

    // a word that goes over the end of a file is one word without separators
    write_text(in_folder("a.txt"), "Hel");
    write_text(in_folder("b.txt"), "lo world");
    tool_runs({in_folder("a.txt"), in_folder("b.txt"), "-o", in_folder("join"), "--separators", "0"});
    CHECK(shard(in_folder("join_train.bin")) == encode("Hello world"), "files are not joined");
}

// A byte 0 between documents, which are taken to the byte wherever the blocks are cut.
static void test_tool_nul() {
    tool_runs({"-", "-o", in_folder("nul"), "--bytes", "1", "--separators", "nul"},
              std::string("a\n\0\0 b\0<|endoftext|>\n", 21));
    Ids want = {0, 'a', '\n', 0, ' ', 'b', 0};
    for (char c : std::string("<|endoftext|>\n")) { want.push_back((uint8_t)c); }
    Ids got = shard(in_folder("nul_train.bin"), TOKENIZER_BYTES);
    CHECK(got == want, "%s, expected %s", show(got).c_str(), show(want).c_str());

    const std::vector<std::vector<std::string>> kinds = {
        {"word", " word", "!", " ", "\n", std::string(1, '\0')}, {"!", "?", std::string(1, '\0')},
        {" ", std::string(1, '\0')}, {"\xE6\x98\xAF", std::string(1, '\0'), std::string(300000, 'a')}};
    TokenizerCache cache;
    for (uint32_t k = 0; k < kinds.size(); k++) {
        std::string text;
        for (uint32_t i = 0; text.size() < 2500000; i++) {
            text += kinds[k][rand_u32(9, RAND_STORY, k, i) % kinds[k].size()];
        }
        want.clear();
        for (size_t from = 0, to; from < text.size(); from = to + 1) {
            to = std::min(text.find('\0', from), text.size());
            if (to == from) { continue; }
            want.push_back(bpe.eot);
            tokenizer_encode(&bpe, text.data() + from, to - from, want, &cache);
        }
        tool_runs({"-", "-o", in_folder("nul"), "-j", "2", "--separators", "nul"}, text);
        CHECK(shard(in_folder("nul_train.bin")) == want, "text %u: wrong tokens", k);
    }
}

static void test_tool_shards() {
    std::string text = file_text(source_root + "dev/test/fixtures/tokenizer.txt"), big;
    while (big.size() < 5 << 20) { big += text + "\n<|endoftext|>\n"; }       // several blocks
    big += std::string(3 << 20, 'x');                                           // and one that cannot be cut
    write_text(in_folder("big.txt"), big);
    Ids one_document = encode(text + "\n"), want;
    one_document.insert(one_document.begin(), bpe.eot);
    for (size_t n = 0; n + (3 << 20) < big.size(); n += text.size() + 15) {
        want.insert(want.end(), one_document.begin(), one_document.end());
    }
    Ids tail = encode(std::string(3 << 20, 'x'));
    want.push_back(bpe.eot);
    want.insert(want.end(), tail.begin(), tail.end());

    for (const char* threads : {"1", "3"}) {
        const size_t one = one_document.size();         // equal documents: which are drawn cannot be seen
        tool_runs({in_folder("big.txt"), "-o", in_folder("big"), "-j", threads, "--val-tokens",
                   std::to_string(3 * one + 1), "--shard-tokens", "300000", "--all", "1"});
        CHECK(shard(in_folder("big_all.bin")) == want, "-j %s: wrong tokens", threads);
        Ids joined = shard(in_folder("big_val_000000.bin"));
        CHECK(joined.size() == 3 * one, "val has %zu tokens, not three documents of %zu", joined.size(), one);
        size_t files = (want.size() - 3 * one + 299999) / 300000;
        for (size_t i = 0; i < files; i++) {
            Ids part = shard(in_folder(format("big_train_%06d.bin", (int)i)));
            CHECK(part.size() == 300000 || i + 1 == files, "shard %zu has %zu tokens", i, part.size());
            joined.insert(joined.end(), part.begin(), part.end());
        }
        CHECK(joined == want, "-j %s: val and train shards are not the text", threads);
        std::string extra = in_folder(format("big_train_%06d.bin", (int)files));
        CHECK(file_size(extra.c_str()) < 0, "one shard too many: %s", extra.c_str());
    }
    Child e = run_child(with_args({in_folder("big.txt"), "-o", in_folder("big"), "--shard-tokens", "1000000",
                                   "--val-tokens", "0"}));
    CHECK(e.code == 0 && e.err.find("left from an earlier run") != std::string::npos, "no warning: %s",
          e.err.c_str());
    e = run_child(with_args({"--decode", in_folder("big_all.bin")}));
    CHECK(e.out == "<|endoftext|>\n" + big, "the decoded shard is not the text");
}

// The documents of the text, by lines: what `tokenize` must give.
static Ids encode_documents(const std::string& text, TokenizerCache* cache) {
    Ids ids;
    std::string document;
    auto flush = [&] {
        if (document.empty()) { return; }
        ids.push_back(bpe.eot);
        tokenizer_encode(&bpe, document.data(), document.size(), ids, cache);
        document.clear();
    };
    for (size_t i = 0, end; i < text.size(); i = end) {
        end = std::min(text.find('\n', i), text.size() - 1) + 1;
        std::string line = text.substr(i, end - i);
        if (line == "<|endoftext|>" || line == "<|endoftext|>\n" || line == "<|endoftext|>\r\n") { flush(); }
        else { document += line; }
    }
    flush();
    return ids;
}

// Text without places that are easy to cut.
static void test_tool_endless() {
    std::vector<std::vector<std::string>> kinds = {
        {std::string(300000, 'a'), std::string(700000, ' '), std::string(500000, '7'), "\n<|endoftext|>\n",
         "<|endoftext|>", "\r\n", std::string(400000, '<'), "<|endoftext|>\r\n"},
        {"\"key\":", "12345,", "{\"a\":[", "],", "bar", "'s", "'", "<|endoftext|>", "\xFF", "\xE3\x80"},
        {"\xE7\x9A\x84", "\xE4\xB8\x80", "\xE6\x98\xAF", "\xE6\x97\xA5", "\xE6\x9C\xAC"},
        {"\xC3\xA9", "\xC3\xA8", "\xC3\xBC"}, {"'s"}, {"'"}, {"\xF0\x9F\x98\x80", "\xE2\x82\xAC"}, {"-"},
        {"\xE3\x80\x80"}, {"\x80"}};
    TokenizerCache cache;
    for (uint32_t k = 0; k < kinds.size(); k++) {
        std::string text, path = in_folder("endless.txt");
        for (uint32_t i = 0; text.size() < 2500000; i++) {
            text += kinds[k][rand_u32(8, RAND_STORY, k, i) % kinds[k].size()];
        }
        write_text(path, text);
        for (const char* separators : {"0", "1"}) {
            tool_runs({path, "-o", in_folder("endless"), "-j", "2", "--separators", separators});
            Ids want = separators[0] == '0' ? encode(text, &cache) : encode_documents(text, &cache);
            CHECK(shard(in_folder("endless_train.bin")) == want, "text %u, --separators %s: wrong tokens", k,
                  separators);
        }
    }
    long memory[2];                             // KB, of one thread
    for (int many : {0, 1}) {
        write_text(in_folder("endless.txt"), std::string(many ? 20 << 20 : 1000, 'a'));
        pid_t pid = fork();
        if (pid == 0) {
            if (!freopen("/dev/null", "w", stdout)) { _exit(99); }
            with_args({in_folder("endless.txt"), "-o", in_folder("endless"), "-j", "1"})();
        }
        int status;
        struct rusage usage;
        CHECK(wait4(pid, &status, 0, &usage) == pid && status == 0, "the program failed: %d", status);
        memory[many] = usage.ru_maxrss;
    }
    CHECK(memory[1] - memory[0] < 3 * 20 * 1024, "20 MB of one letter take %ld KB", memory[1] - memory[0]);
}

static void test_tool_errors() {
    std::string o = in_folder("err");
    write_text(in_folder("1.txt"), "some text\n");
    write_text(in_folder("0.txt"), "");
    write_text(in_folder("junk.bin"), "junk");
    const std::string text = in_folder("1.txt"), empty = in_folder("0.txt"), junk = in_folder("junk.bin");
    const struct { const char* what; std::vector<std::string> args; const char *said, *input; } rows[] = {
        {"nothing", {}, "no text", ""},
        {"no -o", {text}, "-o", ""},
        {"missing", {text, in_folder("none.txt"), "-o", o}, "none.txt", ""},
        {"folder", {folder, "-o", o}, "is a folder", ""},
        {"empty", {empty, "-o", o}, "there is no text", ""},
        {"only separators", {"-", "-o", o}, "no text", "<|endoftext|>\n<|endoftext|>\n"},
        {"unknown flag", {text, "-o", o, "--vall-tokens", "3"}, "--val-tokens", ""},
        {"below 0", {text, "-o", o, "--val-tokens", "-1"}, "--val-tokens -1", ""},
        {"all val", {text, "-o", o, "--val-tokens", "100"}, "--val-tokens 100", ""},
        {"no value", {text, "-o", "--bytes", "1"}, "needs a value", ""},
        {"a dash", {text, "-o", o, "--", "-n"}, "'-n'", ""},
        {"unwritable", {text, "-o", "/proc/nowhere/x"}, "/proc/nowhere", ""},
        {"no vocabulary", {text, "-o", o, "--vocab", "none.bpe"}, "none.bpe", ""},
        {"decode junk", {"--decode", junk}, "truncated", ""},
        {"decode and text", {text, "--decode", junk}, "1.txt", ""}};
    for (const auto& r : rows) { check_dies(r.what, with_args(r.args, r.input), {r.said}); }
    CHECK(count_files("err") == 0, "an error left %zu files behind", count_files("err"));
    Child e = run_child(with_args({"--help"}));
    CHECK(e.code == 0 && e.out.find("--shard-tokens") != std::string::npos, "--help: %s", e.out.c_str());
}

static void test_tool_decode() {
    const std::string text = "<|endoftext|>\nhi\n<|endoftext|>\n\xFF" "b\n", path = in_folder("d_train.bin");
    std::string old = in_folder("old.bin");
    struct { const char* bytes; uint32_t id; } kinds[] = {{"0", TOKENIZER_GPT2}, {"1", TOKENIZER_BYTES}};
    for (auto& kind : kinds) {
        tool_runs({"-", "-o", in_folder("d"), "--bytes", kind.bytes}, text);
        shard(path, kind.id);
        Child e = run_child(with_args({"--decode", path}));
        CHECK(e.code == 0 && e.out == text && e.err.empty(), "%d: %s%s", e.code, e.out.c_str(),
              e.err.c_str());
        // shards from before there was a tokenizer in the header: GPT-2's unless the flag says bytes
        std::string data = file_text(path);
        memset(&data[12], 0, 4);
        write_text(old, data);
        e = run_child(with_args({"--decode", old, "--bytes", kind.bytes}));
        CHECK(e.code == 0 && e.out == text && e.err.empty(), "%d: %s%s", e.code, e.out.c_str(),
              e.err.c_str());
        bool bytes = kind.id == TOKENIZER_BYTES;
        e = run_child(with_args({"--decode", old}));
        CHECK((e.out == text) == !bytes, "decoded: %s", e.out.c_str());
        CHECK((e.err.find("--bytes 1") != std::string::npos) == bytes, "stderr: %s", e.err.c_str());
        data[12] = 3;
        write_text(old, data);
        check_dies("a tokenizer of the future", with_args({"--decode", old}), {"old.bin", "tokenizer 3"});
    }
    // a list of merges from elsewhere: nobody knows what its ids mean
    std::string list = in_folder("other.bpe");
    write_text(list, file_text(tokenizer_default_path()));
    tool_runs({"-", "-o", in_folder("d"), "--vocab", list}, text);
    shard(path, TOKENIZER_UNKNOWN);
}

static void test_tool_command_line() {
    write_text(in_folder("1.txt"), "one ");
    write_text(in_folder("2.txt"), "two");
    Ids want = encode("one two");
    std::string one = in_folder("1.txt"), two = in_folder("2.txt"), o = in_folder("line");
    std::vector<std::vector<std::string>> lines = {
        {one, two, "--separators", "0", "-o", o}, {"--separators", "0", "-o", o, one, two},
        {"-o", o, one, "--separators=0", two}, {"-o", o, "--separators", "0", "--", one, two}};
    for (const std::vector<std::string>& line : lines) {
        unlink((o + "_train.bin").c_str());
        tool_runs(line);
        CHECK(shard(o + "_train.bin") == want, "'%s %s %s ...' gives other tokens", line[0].c_str(),
              line[1].c_str(), line[2].c_str());
    }
}

static void test_tool_odd_files() {
    std::string o = in_folder("odd"), pipe = in_folder("pipe"), text = in_folder("1.txt");
    write_text(text, "some text\n");
    CHECK(mkfifo(pipe.c_str(), 0600) == 0, "cannot make a pipe");
    auto dies_soon = [](const char* what, const std::vector<std::string>& args, const char* words) {
        check_dies(what, [&] { alarm(60); with_args(args)(); }, {words, "pipe"});
    };
    dies_soon("a pipe to read", {pipe, "-o", o}, "standard input");
    dies_soon("a pipe to decode", {"--decode", pipe}, "regular file");
    dies_soon("a pipe of merges", {text, "-o", o, "--vocab", pipe}, "regular file");
    CHECK(rename(pipe.c_str(), (o + "_train.bin").c_str()) == 0, "cannot rename the pipe");
    pipe = o + "_train.bin";
    dies_soon("a pipe to write", {text, "-o", o}, "regular file");
    unlink(pipe.c_str());
    CHECK(symlink(text.c_str(), pipe.c_str()) == 0, "cannot make a link");
    check_dies("a link to write", with_args({text, "-o", o}), {"symbolic link"});
    unlink(pipe.c_str());
    check_dies("control characters", with_args({"\x1b[2J\nx", "-o", o}), {"\\x1b[2J\\nx"});

    tool_runs({text, "-o", o});
    auto full = [&](const std::vector<std::string>& args) {
        return [=] {
            if (!freopen("/dev/full", "w", stdout)) { _exit(99); }
            with_args(args)();
        };
    };
    check_dies("decode to a full disk", full({"--decode", o + "_train.bin"}), {"output", "No space"});
    write_text(text, std::string(3 << 20, 'x'));        // found by a write, not only by the last flush
    tool_runs({text, "-o", o});
    check_dies("much to a full disk", full({"--decode", o + "_train.bin"}), {"standard output"});
    check_dies("a report to a full disk", full({text, "-o", o}), {"standard output", "No space"});
}

static void test_tool_processes() {
    std::string o = in_folder("two"), result = o + "_train.bin";
    std::string a, b;                           // enough blocks for the first to be written
    for (int line = 0; line < 120000; line++) { a += format("%9d", line) + std::string(90, '.') + "\n"; }
    b = a + a;
    std::vector<std::string> args = {"-", "-o", o, "--separators", "0", "-j", "1", "--bytes", "1",
                                     "--val-tokens", "0"};
    Running first = start_tool(args), second = start_tool(args);
    feed_tool(first, a + "x", 1);
    feed_tool(second, b + "y", 2);
    CHECK(end_tool(first) == 0, "the first of two writers failed");
    Ids ids = shard(result, TOKENIZER_BYTES);
    CHECK(ids.size() == a.size() + 1 && ids.back() == 'x', "the first writer's shard is not its text");
    CHECK(end_tool(second) == 0, "the second of two writers failed");
    ids = shard(result, TOKENIZER_BYTES);
    CHECK(ids.size() == b.size() + 1 && ids.back() == 'y', "the second writer's shard is not its text");

    for (int number : {SIGTERM, SIGINT}) {
        Running r = start_tool(args);
        feed_tool(r, a + "x", 1);
        kill(r.pid, number);
        CHECK(end_tool(r) == -number, "signal %d did not end the program", number);
        CHECK(unfinished() == 0, "signal %d left an unfinished file", number);
    }
    CHECK(shard(result, TOKENIZER_BYTES) == ids, "a signal changed the shard");
}

// Whatever the limit, the program ends well or with one sentence.
static void test_tool_memory() {
    std::string o = in_folder("mem");
    write_text(in_folder("1.txt"), std::string(4 << 20, 'x'));
    int well = 0, out_of_memory = 0;
    for (rlim_t mb = 8; mb < 2000; mb += 1 + mb / 3) {
        Child c = run_child([&] {
            struct rlimit limit = {mb << 20, mb << 20};
            setrlimit(RLIMIT_AS, &limit);
            with_args({in_folder("1.txt"), "-o", o, "-j", "2"})();
        });
        bool loaded = c.code != 127 && c.code != 98;        // below that, not even the libraries fit
        bool one_sentence = c.err.find("error: ") == 0 && std::count(c.err.begin(), c.err.end(), '\n') <= 3;
        CHECK(!loaded || c.code == 0 || (c.code == 1 && one_sentence), "%d MB: exit code %d: %s", (int)mb,
              c.code, c.err.c_str());
        well += c.code == 0;
        out_of_memory += c.err.find("out of memory") != std::string::npos;
    }
    CHECK(well > 0 && out_of_memory > 0, "%d runs ended well, %d without memory", well, out_of_memory);
}

int main(int argc, char** argv) {
    folder_begin("tokenizer");
    std::string vocab = tokenizer_default_path();
    source_root = vocab.substr(0, vocab.size() - strlen("dev/data/gpt2_bpe/vocab.bpe"));
    tokenizer_init_bpe(&bpe, nullptr);

    TEST("fixture from tiktoken") { test_fixture(); }
    TEST("known ids") { test_known_ids(); }
    TEST("pieces") { test_pieces(); }
    TEST("places to cut") { test_cut(); }
    TEST("merges") { test_merges(); }
    TEST("windows, cuts inside of pieces") { test_windows(); test_far_dependence(); }
    TEST("round trips") { test_round_trips(); }
    TEST("long runs") { test_long_runs(); }
    TEST("bytes") { test_bytes(); }
    TEST("vocabulary files") { test_files(); }

    tool = argc >= 2 ? argv[1] : "build/tokenize";
    if (access(tool.c_str(), X_OK) != 0) {
        SKIP(9, "%s is not built", tool.c_str());
    } else {
        TEST("whose tokens") { test_whose_tokens(); }
        TEST("tokenize: documents") { test_tool_documents(); }
        TEST("tokenize: documents between bytes 0") { test_tool_nul(); }
        TEST("tokenize: shards and threads") { test_tool_shards(); }
        TEST("tokenize: text without an end") { test_tool_endless(); }
        TEST("tokenize: errors") { test_tool_errors(); }
        TEST("tokenize: shards back to text") { test_tool_decode(); }
        TEST("tokenize: order of the command line") { test_tool_command_line(); }
        TEST("tokenize: pipes, links, full disks") { test_tool_odd_files(); }
        TEST("tokenize: several writers, signals") { test_tool_processes(); }
        TEST("tokenize: no memory left") { test_tool_memory(); }
    }
    return folder_end();
}
