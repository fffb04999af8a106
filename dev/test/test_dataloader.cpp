/*
Tests of data/dataloader.h and data/mixture.h: who sees which token in which order, positions, and every way
in which a file or a mixture can be wrong. The expected order is computed here again, straight from the
definition; that it looks random is test_host's (rand_permuted).
*/
#include <memory>                   // gives: std::make_unique
#include <numeric>                  // gives: std::accumulate

#include "llmc/data/dataloader.h"   // gives: what is tested
#include "child.h"                  // gives: folder, check_dies, shard_text
#include "test.h"                   // gives: TEST, CHECK

typedef std::vector<uint16_t> Tokens;

static std::string write_shard(const std::string& name, const Tokens& tokens, int tokenizer = 0) {
    write_text(in_folder(name), shard_text(tokens, tokenizer));
    return in_folder(name);
}

// Token number n of a set is `next` + n, across its shards, so that a token tells where it came from.
static std::string write_set(const std::string& name, const std::vector<int>& sizes, uint16_t next = 0) {
    for (size_t s = 0; s < sizes.size(); s++) {
        Tokens tokens((size_t)sizes[s]);
        for (uint16_t& token : tokens) { token = next++; }
        write_shard(format("%s_%03zu.bin", name.c_str(), s), tokens);
    }
    return in_folder(name + "_*.bin");
}

// A loader that is freed at its block's end.
struct Loader : DataLoader {
    Loader(const std::string& pattern, int B, int T, bool shuffle = false, uint64_t seed = 0,
           int vocab = 65536, DataShare share = {}) {
        dataloader_init(this, pattern.c_str(), B, T, shuffle, seed, vocab, share);
    }
    ~Loader() { dataloader_free(this); }
    void next(int batches = 1) { while (batches-- > 0) { dataloader_next(this); } }
    bool next_is(const int* rows) {         // their first tokens; targets are one further on
        next();
        bool same = true;
        const int T = prefetch->T;
        for (int i = 0; i < prefetch->B * T; i++) {
            const int token = rows[i / T] + i % T;
            same = same && inputs[i] == token && targets[i] == token + 1;
        }
        return same;
    }
};

// ---- order and positions ----

// The definition, once more: the first token of each window of a set, in order.
static std::vector<int> windows_of(const std::vector<int>& sizes, int T) {
    std::vector<int> windows;
    int first = 0;                                          // of the shard
    for (int size : sizes) {
        for (int w = 0; (w + 1) * T + 1 <= size; w++) { windows.push_back(first + w * T); }
        first += size;
    }
    return windows;
}

// Epoch after epoch.
static std::vector<int> rows_of(const std::vector<int>& windows, bool shuffle, uint64_t seed, size_t count) {
    const size_t n = windows.size();
    std::vector<int> rows;
    while (rows.size() < count) {
        const size_t i = rows.size() % n, epoch = rows.size() / n;
        rows.push_back(windows[shuffle ? rand_permuted(seed, (uint32_t)epoch, n, i) : i]);
    }
    return rows;
}

static const uint64_t kSeed = (1ull << 32) + 42;            // both of its words count

// In a step that begins at p, wherever that is, row b of a rank's batch j is row p + (rank*run + j)*B + b.
static void test_order(const std::string& pattern, int samples, int T, bool shuffle,
                       const std::vector<int>& rows) {
    struct Shape { int B, world, run; };
    std::vector<Shape> shapes = {{1, 1, 1}, {samples, 1, 1}, {samples + 5, 1, 1}, {11, 5, 1}, {3, 1, 4}};
    for (int world : {2, 3, 8, 64}) {
        for (int run : {1, 2, 3, 8}) { shapes.push_back({1 + (world + run) % 3, world, run}); }
    }
    for (const Shape& s : shapes) {
        const int step = s.B * s.world * s.run;
        int wrong = 0;
        for (int rank = 0; rank < s.world; rank++) {
            Loader loader(pattern, s.B, T, shuffle, kSeed, 65536, {rank, s.world, s.run});
            auto walk = [&](int64_t from, int64_t batches) {        // from the begin of a step
                for (int64_t k = 0; k < batches; k++) {
                    const int64_t first = from + k / s.run * step + (rank * s.run + k % s.run) * s.B;
                    wrong += !loader.next_is(&rows[(size_t)first]);
                    wrong += loader.position != from + (k + 1) * s.world * s.B;
                }
            };
            walk(0, s.run * (2 + 2 * samples / step));              // into the next epochs
            for (int64_t p = 2 * samples; p >= 0; p -= s.world == 1 ? 1 : 17) {
                const int before = loader.inputs[0];
                dataloader_seek(&loader, p);
                wrong += loader.inputs[0] != before;                // the batch stays until the next
                walk(p, 1 + p % (2 * s.run));
                const int64_t here = loader.position;               // also in the middle of a step
                dataloader_seek(&loader, here);
                walk(here, 2);
            }
        }
        CHECK(wrong == 0, "%s: B=%d T=%d world=%d run=%d shuffle=%d: %d wrong batches or positions",
              pattern.c_str(), s.B, T, s.world, s.run, shuffle, wrong);
    }
}

static void test_positions() {
    const struct { std::vector<int> sizes; int T; size_t windows; } sets[] = {
        {{101, 7, 64, 8, 0, 5, 250, 9, 33, 1}, 8, 12 + 0 + 7 + 0 + 0 + 0 + 31 + 1 + 4 + 0},
        {{9}, 8, 1}, {{0, 3, 0, 1, 3, 0}, 1, 4}, {{2}, 1, 1}};
    for (const auto& set : sets) {
        const std::string pattern = write_set(format("order%d", (int)(&set - sets)), set.sizes);
        const std::vector<int> windows = windows_of(set.sizes, set.T);
        const int samples = (int)windows.size();
        const Loader loader(pattern, 1, set.T);
        CHECK(windows.size() == set.windows && loader.samples_per_epoch == samples &&
              loader.tokens == std::accumulate(set.sizes.begin(), set.sizes.end(), 0),
              "%lld samples, %lld tokens", (long long)loader.samples_per_epoch, (long long)loader.tokens);
        for (bool shuffle : {false, true}) {
            const std::vector<int> rows = rows_of(windows, shuffle, kSeed, 4000 + 2 * 64 * 8 * 3);
            test_order(pattern, samples, set.T, shuffle, rows);
        }
    }
}

// ---- mixtures ----

// Row g of a mixture, counted from the definition: who lags most behind its share gets the row.
static std::vector<MixtureRow> mixed(const std::vector<int64_t>& weights, size_t count) {
    const int64_t W = std::accumulate(weights.begin(), weights.end(), (int64_t)0);
    std::vector<int64_t> counts(weights.size());
    std::vector<MixtureRow> rows;
    while (rows.size() < count) {
        const int64_t end = (int64_t)rows.size() + 1;
        int64_t most = INT64_MIN;
        int source = 0;
        for (size_t k = 0; k < weights.size(); k++) {
            const int64_t lag = end * weights[k] - counts[k] * W;
            if (lag > most) { most = lag, source = (int)k; }
        }
        rows.push_back({source, counts[(size_t)source]++});
    }
    return rows;
}

static void test_shares() {
    std::vector<std::vector<int64_t>> cases = {{1}, {7, 3}, {1, 1, 1}, {1, 999999}, {999, 1, 9000}};
    for (uint32_t i = 0; i < 40; i++) {
        cases.push_back({});
        for (uint32_t k = 0; k < 2 + i % 9; k++) {
            cases.back().push_back(1 + rand_u32(1, RAND_INIT, i, k) % (i < 20 ? 9 : 999));
        }
    }
    for (const std::vector<int64_t>& weights : cases) {
        const Mixture m = mixture_init(weights);
        const int64_t W = std::accumulate(weights.begin(), weights.end(), (int64_t)0);
        const std::vector<MixtureRow> want = mixed(weights, (size_t)(2 * W + 2));
        std::vector<int64_t> counts(weights.size());
        int wrong = 0, ahead = 0, inexact = 0;
        for (int64_t g = 0; g < 2 * W + 2; g++) {
            const MixtureRow r = mixture_row(m, g), far = mixture_row(m, g + (W << 40));
            const size_t k = (size_t)r.source;
            wrong += r.source != want[(size_t)g].source || r.number != want[(size_t)g].number ||
                     r.number != counts[k]++ || far.source != r.source ||
                     far.number != r.number + (weights[k] << 40);
            ahead += counts[k] * W - (g + 1) * weights[k] >= W;
            for (size_t j = 0; j < weights.size() && (g + 1) % W == 0; j++) {
                inexact += counts[j] * W != (g + 1) * weights[j];
            }
        }
        CHECK(wrong == 0 && ahead == 0 && inexact == 0, "%zu sources, W = %lld: %d wrong rows, %d rows ahead "
              "of a share, %d inexact shares", weights.size(), (long long)W, wrong, ahead, inexact);
    }
}

static void test_weights() {
    auto weights = [](const std::string& text) {
        const std::vector<MixturePart> parts = mixture_split(text);
        std::string said;
        const std::vector<int64_t> numbers = mixture_weights(text, parts);
        for (size_t k = 0; k < parts.size(); k++) {
            said += format("%s%s*%lld", k ? " " : "", parts[k].pattern.c_str(), (long long)numbers[k]);
        }
        return said;
    };
    write_shard("file:0.5", Tokens(9));
    const std::string file = in_folder("file:0.5");
    const std::string texts[][2] = {
        {"a_*.bin", "a_*.bin*1"}, {"a:0.7,b:0.3", "a*7 b*3"}, {"a:2,b:4,c:6", "a*1 b*2 c*3"}, {"a:1", "a*1"},
        {"a:0.000001,b:0.999999", "a*1 b*999999"}, {"a:99999,b:1", "a*99999 b*1"}, {"a:5e-1,b:.5", "a*1 b*1"},
        {"a:1,b:1,c:1", "a*1 b*1 c*1"}, {"a:0.1,b:0.2,c:0.3,d:0.4", "a*1 b*2 c*3 d*4"},
        // a colon begins a weight only if a number follows one of them
        {"d:1/a_*.bin", "d:1/a_*.bin*1"}, {"a:b,c.bin", "a:b,c.bin*1"}, {"a,b", "a,b*1"}, {"a:", "a:*1"},
        {"a:nan", "a:nan*1"}, {file, file + "*1"}, {"d:e/a:2,b:1", "d:e/a*2 b*1"},
        {"a\\:b\\,c:2,\\\\:1", "a\\:b\\,c*2 \\\\*1"}, {"a\\:5", "a\\:5*1"}};
    for (const auto& t : texts) { CHECK_TEXT(weights(t[0]), t[1]); }
    auto names = [](const std::string& text) {
        std::string said;
        for (const std::string& name : mixture_names(mixture_split(text))) { said += " " + name; }
        return said;
    };
    const std::string short_names[][2] = {
        {"d/web_val_*.bin:1,code_val_*.bin:1", " web code"}, {"/d/web_*.bin:1,/a/code_*.bin:2", " web code"},
        {"x/web/val_*.bin:1,x/code/val_*.bin:1", " web code"}, {"val_1.bin:1,val_22.bin:1", " 1 22"},
        {"a.bin:1,a_a.bin:1,b.bin:1", " a a_a b"}, {"d/a:1", " a"},
        {"weba.bin:1,webb.bin:1", " weba webb"}, {"a/x/*.bin:1,a/x/y/*.bin:1,y/*.bin:1", " a/x x/y y"}};
    for (const auto& t : short_names) { CHECK_TEXT(names(t[0]), t[1]); }
    const struct { std::string text; std::vector<std::string> words; } bad[] = {
        {"a:0.7,b", {"'a:0.7,b'", "'b' has no weight", "'web_*.bin:0.7,code_*.bin:0.3'"}},
        {"a:0.7,b:", {"'b' has no weight"}}, {":0.5,b:0.5", {"has no pattern"}}, {"a:1,", {"has no pattern"}},
        {"a:0.7,b:x", {"weight 'x' of 'b'", "above 0"}}, {"a:1,b:inf", {"'inf'", "above 0"}},
        {"a:0,b:1", {"weight '0' of 'a'", "above 0"}}, {"a:1.3,b:-0.3", {"'-0.3'", "above 0"}},
        {"a:1e-7,b:1", {"'1e-7'", "six decimals"}}, {"a:0.1234567,b:0.9", {"'0.1234567'", "six decimals"}},
        {"a:0,7,b:0,3", {"weight '0' of 'a'"}}, {"a:+1", {"'+1'"}}, {"a:1000001", {"'1000001'", "1000000"}},
        {"a:0.7,b:0.2", {"sum to 0.9", "must sum to 1", "hint: whole numbers"}}, {"a:1.5,b:1", {"to 2.5"}},
        {"a:0.333333,b:0.333333,c:0.333333", {"sum to 0.999999,"}}, {"a:0.5", {"sum to 0.5"}},
        {"a:1000000,b:1", {"sum to 1000001: at most 1000000"}}};
    for (const auto& b : bad) { check_dies(b.text.c_str(), [&] { weights(b.text); }, b.words); }
}

// Each source in the order that it has alone, but for the key of its shuffle; one of them many times over.
static void test_mixture() {
    const int T = 8;
    const std::vector<int> sizes[] = {{65, 7, 90}, {30}, {17, 18, 19, 20}};
    const std::vector<int64_t> weights = {5, 3, 2};
    const uint16_t first[] = {0, 1000, 2000};
    std::string patterns[3];
    for (int k = 0; k < 3; k++) { patterns[k] = write_set(format("source%d", k), sizes[k], first[k]); }
    const std::string text = patterns[0] + ":0.5," + patterns[1] + ":0.3," + patterns[2] + ":0.2";
    const size_t count = 4000 + 2 * 64 * 8 * 3;
    for (bool shuffle : {false, true}) {
        std::vector<int> of_source[3], rows;
        for (int k = 0; k < 3; k++) {
            const uint64_t key = kSeed + ((uint64_t)k << 53);
            of_source[k] = rows_of(windows_of(sizes[k], T), shuffle, key, count);
            for (int& row : of_source[k]) { row += first[k]; }
        }
        for (const MixtureRow& r : mixed(weights, count)) {
            rows.push_back(of_source[r.source][(size_t)r.number]);
        }
        const int samples = 19 + 3 + 8;
        CHECK_IS(Loader(text, 1, T).samples_per_epoch, samples);
        test_order(text, samples, T, shuffle, rows);

        Loader loader(text, 4, T, shuffle, kSeed);          // also a source alone, and back
        int wrong = 0;
        for (int source : {2, 0, -1, 1, 1, -1, 0}) {
            for (int64_t p : {0, 3}) {
                const std::vector<int>& want = source < 0 ? rows : of_source[source];
                dataloader_seek(&loader, p, source);
                for (size_t i = 0; i < 3; i++) { wrong += !loader.next_is(&want[(size_t)p + 4 * i]); }
            }
        }
        CHECK(wrong == 0, "a source alone, shuffle=%d: %d wrong batches", shuffle, wrong);
    }
    const Loader all(text, 1, T), same(patterns[1] + ":1", 1, T), alone(patterns[1], 1, T);
    CHECK_TEXT(dataloader_facts(&all), "266 tokens in 8 shards: [5 of 10 rows] source0_000.bin 65 "
               "source0_001.bin 7 source0_002.bin 90 [3 of 10 rows] source1_000.bin 30 [2 of 10 rows] "
               "source2_000.bin 17 source2_001.bin 18 source2_002.bin 19 source2_003.bin 20");
    CHECK_TEXT(dataloader_facts(&same), dataloader_facts(&alone));
    auto load = [&](const std::string& data) { return [=] { Loader(data, 1, T); }; };
    check_dies("a shard twice", load(patterns[0] + ":1," + in_folder("./source0_001.bin") + ":1"),
               {"source0_001.bin' is in two sources", "hint: "});
    check_dies("a source without files", load(patterns[0] + ":1," + in_folder("none_*.bin") + ":1"),
               {"no file matches", "none_*.bin'"});
    check_dies("a source without rows", load(patterns[0] + ":1," + write_set("short", {8, 3}) + ":1"),
               {"short_*.bin' is too short", "8"});
    const std::string x = write_shard("x.bin", Tokens(20), 1), y = write_shard("y.bin", Tokens(20), 2);
    check_dies("two tokenizers", load(x + ":1," + y + ":1"), {"of tokenizer 1", "of 2"});
    check_dies("a colon, but no weight", load(in_folder("a:b_*.bin")), {"no file matches", "write \\: and"});
    mkdir_check(in_folder("a:1,b").c_str());
    write_shard("a:1,b/x.bin", {5, 6, 7});
    CHECK_IS(Loader(in_folder("a\\:1\\,b/x.bin") + ":1," + patterns[0] + ":1", 1, 2).samples_per_epoch, 80);
    CHECK_IS(Loader(in_folder("a\\:1\\,b/*.bin"), 1, 2).samples_per_epoch, 1);
}

// More shards than may be open at the start, in random order: files and threads are given back.
static void test_open_files() {
    const std::vector<int> sizes(260, 17);
    const std::string pattern = write_set("many", sizes);
    const std::vector<int> rows = rows_of(windows_of(sizes, 8), true, 6, 520);
    auto open_now = [] { return (int)names_in("/proc/self/fd").size(); };
    auto threads_now = [] { return (int)names_in("/proc/self/task").size(); };
    const int files = open_now(), threads = threads_now();
    if (files < 2 || threads < 1) { SKIP(5, "no /proc here"); return; }
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = 64;
    for (int round = 0; round < 3; round++) {
        setrlimit(RLIMIT_NOFILE, &limit);
        Loader loader(pattern, 13, 8, true, 6);
        bool same = true;
        for (size_t k = 0; k < 40; k++) { same = loader.next_is(&rows[13 * k]) && same; }
        const int more = open_now() - files;
        CHECK(same && more == 260, "260 shards: another order, or %d files are open", more);
    }
    CHECK(open_now() == files, "a freed loader leaves files open");
    CHECK(threads_now() == threads, "a freed loader leaves a thread");
}

// What is read, and what ranks, a resumed run, and two sets of one command line compare.
static void test_sets() {
    const int plain[] = {16, 24}, odd[] = {5};
    Loader a(write_set("exact", {16, 17, 18}), 1, 8), b(in_folder("./exact_002.bin"), 1, 8);
    CHECK(Loader(in_folder("exact_001.bin"), 2, 8).next_is(plain), "a plain path");
    CHECK(Loader(write_shard("odd[1].bin", {5, 6, 7}), 1, 2).next_is(odd), "a name with brackets");
    const Loader c(write_set("another", {9}), 1, 8);
    CHECK(dataloader_shared_file(&a, &b) != nullptr, "the same file under two names was not noticed");
    CHECK(dataloader_shared_file(&a, &c) == nullptr, "different files were called the same");
    CHECK_TEXT(dataloader_facts(&a),
               "51 tokens in 3 shards: exact_000.bin 16 exact_001.bin 17 exact_002.bin 18");
    dataloader_free(&a);                    // twice, with that at the block's end, is harmless
    CHECK_TEXT(dataloader_facts(&a), "");
    for (size_t size : {100, 200000}) {     // of a short shard every token, of a long one its ends and middle
        Tokens tokens(size, 7);
        auto sample = [&](const char* name) {
            const Loader loader(write_shard(name, tokens), 1, 8);
            return dataloader_sample(&loader);
        };
        const std::string before = sample("sampled.bin");
        CHECK_TEXT(sample("copy.bin"), before);
        const Loader other(write_shard("copy.bin", tokens, 7), 1, 8);
        CHECK(dataloader_sample(&other) != before, "another tokenizer is not seen");
        for (size_t at : {(size_t)0, size - 1, size / 7 * 3 + 50}) {
            tokens[at]++;
            CHECK(sample("sampled.bin") != before, "token %zu of %zu is not seen", at, size);
            tokens[at]--;
        }
    }
}

// A sparse file, which takes no room on the disk: its header has the count modulo 2^32.
static bool write_huge(const std::string& path, int64_t tokens) {
    write_text(path, shard_text({}, 0, (int32_t)(uint32_t)(tokens & 0xFFFFFFFF)));
    return truncate(path.c_str(), 1024 + 2 * tokens) == 0;
}

static void mark_token(const std::string& path, int64_t number, uint16_t token) {
    int fd = open(path.c_str(), O_WRONLY);
    bool marked = fd >= 0 && pwrite(fd, &token, 2, 1024 + 2 * number) == 2;
    CHECK(marked, "cannot mark the file: %s", strerror(errno));
    close(fd);
}

// More than 2^32 tokens, offsets beyond 2^32 bytes; 5 * 2^30 rows, whose order as a table would take 80 GB.
static void test_huge() {
    const std::string path = in_folder("huge.bin");
    const int T = 1 << 20;
    const int64_t tokens = (5ll << 30) + 3, last = tokens / T - 1;      // the last window
    const int64_t rows = tokens - 1, epoch = 7, place = 12345;          // where T is 1
    const uint16_t mark = 4321;
    if (!write_huge(path, tokens)) {
        SKIP(6, "no sparse file of 10 GiB here: %s", strerror(errno));
        return;
    }
    mark_token(path, last * T, mark);
    mark_token(path, (int64_t)rand_permuted(3, (uint32_t)epoch, (uint64_t)rows, (uint64_t)place), mark);
    check_lives("the far end of 10 GiB, then the next epoch", [&] {
        Loader loader(path, 1, T);
        dataloader_seek(&loader, last);
        loader.next();
        printf("%lld: %d %d", (long long)loader.tokens, loader.inputs[0], loader.inputs[1]);
        loader.next();
        printf(" %d", loader.inputs[0]);
    }, format("%lld: %d 0 0", (long long)tokens, mark));
    check_lives("shuffling 5 * 2^30 rows", [&] {
        Loader loader(path, 1, 1, true, 3);
        dataloader_seek(&loader, epoch * rows + place);
        loader.next();
        printf("%lld: %d", (long long)loader.samples_per_epoch, loader.inputs[0]);
    }, format("%lld: %d", (long long)rows, mark));
    const int64_t middle = (3ll << 30) + 5;                 // fits 32 bits, but not with a sign
    check_lives("3 * 2^30 tokens", [&] {
        if (!write_huge(path, middle)) { _exit(6); }
        printf("%lld", (long long)Loader(path, 1, T).tokens);
    }, std::to_string(middle));
    unlink(path.c_str());
}

// ---- what goes wrong ----

static void load(const std::string& pattern, int batches = 1, int vocab = 65536, int64_t from = 0) {
    Loader loader(pattern, 2, 8, false, 0, vocab);
    dataloader_seek(&loader, from);
    loader.next(batches);
}

// What word 3 of the headers says: 0 nothing, else all shards must say the same.
static void test_tokenizers() {
    auto set = [](const std::vector<int>& ids) {
        std::string name = "ids";
        for (int id : ids) { name += std::to_string(id); }
        for (size_t s = 0; s < ids.size(); s++) {
            write_shard(format("%s_%zu.bin", name.c_str(), s), Tokens(100), ids[s]);
        }
        return in_folder(name + "_*.bin");
    };
    for (const std::vector<int>& ids : std::vector<std::vector<int>>{{0}, {1}, {0, 2, 2}, {2, 0}, {0, 0}}) {
        const std::string wanted = std::to_string(*std::max_element(ids.begin(), ids.end()));
        check_lives(set(ids), [&] { printf("%u", Loader(set(ids), 1, 8).tokenizer); }, wanted);
    }
    check_dies("two tokenizers", [&] { load(set({0, 1, 0, 2})); },
               {"ids0102_1.bin", "of tokenizer 1", "ids0102_3.bin", "of 2"});
}

// Which targets a mask counts: those that it takes away are -1, and every rank knows the step's number.
static void test_masks() {
    const int T = 8, B = 3;
    auto counts = [](int token) { return token % 5 == 0 || (token > 30 && token < 60); };
    const std::string pattern = write_set("masked", {101, 7, 64, 8});      // 12, 0, 7 and 0 windows
    const std::vector<int> firsts = {0, 101, 108, 172};
    auto write_mask = [&](int shard, int size) {
        std::string mask;
        for (int i = 0; i < size; i++) { mask += (char)counts(firsts[(size_t)shard] + i); }
        write_text(in_folder(format("masked_%03d.mask", shard)), mask);
    };
    write_mask(0, 101), write_mask(1, 7), write_mask(3, 8);         // all targets of shard 2 count
    auto is_counted = [&](int token) { return (token >= 108 && token < 172) || counts(token); };
    for (bool shuffle : {false, true}) {
        for (const DataShare share : {DataShare{0, 1, 1}, DataShare{1, 2, 2}, DataShare{2, 3, 1}}) {
            Loader loader(pattern, B, T, shuffle, kSeed, 65536, share);
            Loader all(pattern, B * share.world * share.run, T, shuffle, kSeed);
            CHECK(loader.masked && loader.samples_per_epoch == 19, "%lld rows",
                  (long long)loader.samples_per_epoch);
            int64_t wrong = 0, sum = 0;
            for (int step = 0; step < 8; step++) {
                const int rows = B * share.world * share.run;
                const int64_t told = dataloader_counted(&loader, loader.position, rows);
                all.next();
                int64_t seen = 0;
                for (int i = 0; i < rows * T; i++) { seen += all.targets[i] >= 0; }
                wrong += told != seen || loader.position != all.position - rows;
                for (int j = 0; j < share.run; j++) {
                    loader.next();
                    for (int i = 0; i < B * T; i++) {
                        const int next = loader.inputs[i] + 1;      // a token is its number in the set
                        wrong += loader.targets[i] != (is_counted(next) ? next : -1);
                    }
                }
            }
            for (int i = 0; i < 19; i++) { sum += dataloader_counted(&loader, i, 1); }
            CHECK(wrong == 0 && sum == loader.counted && sum > 40 && sum < 19 * T,
                  "%lld wrong, %lld of %lld count", (long long)wrong, (long long)sum,
                  (long long)loader.counted);
        }
    }
    {
        const Loader plain(write_set("unmasked", {101}), B, T);     // no thread is left of it: forks follow
        CHECK(!plain.masked && plain.counted == 96 && dataloader_counted(&plain, 5, 7) == 56, "all count");
    }

    // What tells masks apart, and what is wrong with them.
    const std::string path = in_folder("qa.bin"), mask = in_folder("qa.mask");
    auto facts = [&] {
        Loader loader(path, B, T);
        return dataloader_facts(&loader) + dataloader_sample(&loader);
    };
    std::string conversations = shard_text(Tokens(33, 9));
    write_text(path, conversations);
    const std::string none = facts();
    write_text(mask, std::string(33, '\1'));
    const std::string every = facts();
    write_text(mask, std::string(32, '\1') + '\0');
    CHECK(none != every && every != facts(), "masks do not tell sets apart");
    const std::string some(16, '\1'), others(16, '\0');         // as many count, in other rows
    write_text(mask, '\0' + some + others);
    const std::string first = facts();
    write_text(mask, '\0' + others + some);
    CHECK(first != facts(), "masks of equal numbers do not tell sets apart");
    write_text(mask, std::string(32, '\1'));
    check_dies("a mask too short", [&] { load(path); }, {"qa.mask' has 32 bytes", "qa.bin' has 33 tokens"});
    write_text(mask, std::string(34, '\1'));
    check_dies("a mask too long", [&] { load(path); }, {"qa.mask' has 34 bytes", "qa.bin' has 33 tokens"});
    write_text(mask, std::string(20, '\1') + std::string(13, '1'));
    check_dies("text in a mask", [&] { load(path); }, {"qa.mask' holds 49 at byte 20"});
    write_text(mask, std::string(33, '\0'));
    check_dies("an empty mask", [&] { load(path); }, {"qa.bin", "count no token"});
    unlink(mask.c_str());
    check_lives("no mask", [&] { load(path); }, "");
    conversations[4 * kShardChatWord] = 1;
    write_text(path, conversations);
    check_dies("no mask", [&] { load(path); }, {"cannot open", "qa.mask", "get.py answers"});
    write_text(mask, std::string(33, '\1'));
    check_lives("conversations", [&] { printf("%d", Loader(path, B, T).chat); }, "1");
    check_dies("a mask cut short in use", [&] {
        Loader loader(path, 1, T);
        loader.next();
        write_text(mask, std::string(9, '\1'));
        loader.next(3);
    }, {"qa.mask", "cut short"});
}

static void test_bad_files() {
    const Tokens tokens(100, 9), few(8, 9);
    const std::string good = shard_text(tokens), line = "To be or not to be\n", path = in_folder("bad.bin");
    const std::vector<std::string> not_shard = {"not a token shard", "`make tokenize`",
                                                "`build/tokenize FILE -o NAME`"};
    auto with_word = [&](size_t word, int32_t value) {      // of the header
        std::string bytes = good;
        memcpy(&bytes[4 * word], &value, 4);
        return bytes;
    };
    std::string lines = line;
    while (lines.size() < 19000) { lines += line; }
    const struct { const char* what; std::string bytes; std::vector<std::string> words; } files[] = {
        {"zero-length file", "", {"empty", "0 bytes"}},
        {"file shorter than a header", good.substr(0, 200), {"truncated", "200 bytes"}},
        {"wrong magic", with_word(0, 20240326), {"20240326", "20240520"}},
        {"a text shorter than a header", line, not_shard},
        {"a text longer than a header", lines, not_shard},
        {"wrong version", with_word(1, 2), {"version 2", "version 1"}},
        {"negative count", with_word(2, -7), {"negative", "-7 tokens", "100"}},
        {"huge count", with_word(2, 0x7FFFFFFF), {"truncated", "2147483647 tokens"}},
        {"a token less than promised", with_word(2, 101), {"truncated", "101", "100"}},
        {"a token more than promised", with_word(2, 99), {"99 tokens", "100"}},
        {"half a token more than promised", good + "x", {"100 tokens", "1225 bytes"}},
        {"no window", shard_text(few), {"too short", "9 tokens", "8"}},
        {"no tokens", shard_text({}), {"too short"}}};
    auto dies = [&](const char* what, const std::string& file, std::vector<std::string> words) {
        words.push_back(file);
        check_dies(what, [&] { load(file); }, words);
    };
    for (const auto& f : files) {
        write_text(path, f.bytes);
        dies(f.what, path, f.words);
    }
    unlink(path.c_str());
    dies("missing file", path, {"no file matches", "get.py makes shards"});
    dies("empty glob", in_folder("nothing_*.bin"), {"no file matches", "get.py makes shards"});
    dies("no default", "dev/data/tinyshakespeare/none.bin", {"hint: `make tinyshakespeare`", "-v 0"});
    dies("folder", folder, {"is a folder", "hint: a pattern in quotes names its shards", "_val*.bin"});
    dies("a device", "/dev/zero", {"not a regular file"});
    CHECK(mkfifo(path.c_str(), 0600) == 0, "cannot make a pipe");
    dies("a pipe that nobody writes", path, {"not a regular file"});
    unlink(path.c_str());
    write_text(path, good);
    if (geteuid() != 0) {
        chmod(path.c_str(), 0);
        dies("unreadable file", path, {"Permission denied"});
        chmod(path.c_str(), 0600);
    }
    write_text(in_folder("among_0.bin"), good);
    write_text(in_folder("among_1.bin"), with_word(0, 7));
    check_dies("one bad file among good ones", [] { load(in_folder("among_*.bin")); }, {"among_1.bin", "7"});
    const std::string loop = in_folder("loop");             // which cannot be followed
    CHECK(symlink(loop.c_str(), loop.c_str()) == 0, "cannot make a link");
    const std::string patterns[] = {loop + "/*.bin", in_folder("l*p/*.bin"), in_folder("l*/x.bin"), loop,
                                    folder + "*/loop/x.bin"};
    for (const std::string& pattern : patterns) {
        check_dies("what cannot be looked at", [&] { load(pattern); }, {"cannot ", "'" + loop, "links"});
    }
    check_dies("a folder that cannot be opened", [] {
        open_no_more();
        data_glob(in_folder("b*.bin").c_str());
    }, {"cannot list the folder '" + folder, "Too many open files"});
    check_dies("a folder that cannot be read to its end", [] {
        refuse_call(LIST, 4, EIO);
        load(in_folder("b*.bin"));
    }, {"cannot list the folder '" + folder, "Input/output error"});
    unlink(loop.c_str());
    mkdir_check(in_folder("lost").c_str());
    CHECK(symlink("nowhere", in_folder("lost/x.bin").c_str()) == 0, "cannot make a link");
    check_dies("a link to nothing is no match less", [] { load(in_folder("los?/x.bin")); },
               {"cannot open '" + in_folder("lost/x.bin"), "No such"});

    // found by the thread, reported by the caller
    write_text(in_folder("bae.bin"), good);
    const struct { const char *what, *pattern, *changed; std::string bytes, word; } changes[] = {
        {"cut while in use", "bad.bin", "bad.bin", good.substr(0, 1024 + 50), "cut short"},
        {"replaced while in use", "ba?.bin", "bae.bin", shard_text({1, 2, 3}), "cut short"}};
    for (const auto& c : changes) {
        write_text(path, good);
        check_dies(c.what, [&] {
            Loader loader(in_folder(c.pattern), 2, 8);
            loader.next();
            write_text(in_folder(c.changed), c.bytes);
            loader.next(24);
        }, {c.changed, c.word});
    }
}

static void test_token_range() {
    Tokens tokens(100, 254);
    tokens[37] = 256;
    tokens[35] = 255;                       // the largest id that V = 256 has
    const std::string path = write_shard("range.bin", tokens);
    const std::vector<std::string> words = {path, "token id 256", "byte 1098 ", "number 37", "0..255"};
    check_dies("id = V in the third batch", [&] { load(path, 3, 256); }, words);
    check_dies("id = V after a seek", [&] { load(path, 1, 256, 4); }, words);
    check_lives("a bad batch that was read ahead, which nobody asks for", [&] {
        Loader loader(path, 2, 8, false, 0, 256);
        loader.next(2);
        dataloader_seek(&loader, 0);
        loader.next();
        printf("%d at %lld", loader.inputs[0], (long long)loader.position);
    }, "254 at 2");
    tokens[37] = 255;
    tokens[96] = 65535;                     // only ever a target: the last token of the last window
    write_shard("range.bin", tokens);
    check_dies("id 65535 as the last target", [&] { load(path, 6, 50257); }, {path, "65535", "number 96"});
    check_lives("all ids of 16 bits", [&] { load(path, 6, 65536); });
    tokens[96] = 255;
    tokens[97] = 65535;                     // in no window
    write_shard("range.bin", tokens);
    check_lives("an id beyond the last window, and V - 1 before", [&] {
        Loader loader(path, 12, 8, false, 0, 256);
        loader.next();
        printf("%d", *std::max_element(loader.targets, loader.targets + 12 * 8));
    }, "255");
}

// Tokens of 32 bits, alone and in a set with those of 16.
static void test_wide() {
    const int V = 151936;
    std::vector<uint32_t> tokens(100);
    for (size_t i = 0; i < tokens.size(); i++) { tokens[i] = (uint32_t)(V - 1 - 1000 * (int)i); }
    const std::string path = in_folder("wide_1.bin"), good = wide_shard_text(tokens);
    write_text(path, good);
    write_shard("wide_0.bin", Tokens(17, 5));               // two windows of 8
    {
        Loader loader(in_folder("wide_*.bin"), 14, 8, false, 0, V);
        loader.next();
        bool same = loader.tokens == 117 && loader.samples_per_epoch == 14;
        for (int i = 0; i < 14 * 8; i++) {
            const int from = i - 16;
            same = same && loader.inputs[i] == (from < 0 ? 5 : (int)tokens[(size_t)from]) &&
                   loader.targets[i] == (from < 0 ? 5 : (int)tokens[(size_t)from + 1]);
        }
        CHECK(same, "a token of 32 bits is another one");
    }
    const std::string sample = dataloader_sample(&*std::make_unique<Loader>(path, 1, 8, false, 0, V));
    tokens[99]--;
    write_text(in_folder("wide_2.bin"), wide_shard_text(tokens));
    CHECK(sample != dataloader_sample(&*std::make_unique<Loader>(in_folder("wide_2.bin"), 1, 8, false, 0, V)),
          "another last token, the same checksum");
    check_dies("id = V of 32 bits", [&] { load(path, 1, V - 1); },
               {path, "token id 151935", "byte 1024 ", "number 0", "0..151934"});
    tokens[3] = 0x80000001u;
    write_text(in_folder("wide_2.bin"), wide_shard_text(tokens));
    check_dies("an id with the sign bit", [&] { load(in_folder("wide_2.bin"), 1, V); },
               {"token id 2147483649", "byte 1036 "});
    std::string bad = good;
    bad[4] = 1;
    write_text(path, bad);
    check_dies("version 1 with tokens of 32 bits", [&] { load(path, 1, V); }, {"version 1", "version 7"});
    write_text(path, good + "xy");
    check_dies("half a token of 32 bits", [&] { load(path, 1, V); }, {"100 tokens", "1426 bytes"});
}

int main() {
    folder_begin("dataloader");
    TEST("every row once per epoch, by one rank, in the promised order; any row may be sought") {
        test_positions();
    }
    TEST("mixtures: whose row is next, in exact shares") { test_shares(); }
    TEST("mixtures: weights and patterns") { test_weights(); }
    TEST("mixtures: every row of each source, in the promised order") { test_mixture(); }
    TEST("open files and threads") { test_open_files(); }
    TEST("patterns, what tells sets apart") { test_sets(); }
    TEST("more than 2^31 tokens") { test_huge(); }
    TEST("tokens of 32 bits") { test_wide(); }
    TEST("tokenizers") { test_tokenizers(); }
    TEST("masks") { test_masks(); }
    TEST("bad files") { test_bad_files(); }
    TEST("token range") { test_token_range(); }
    return folder_end();
}
