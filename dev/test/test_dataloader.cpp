/*
Tests of data/dataloader.h: who sees which token in which order, positions, and every way in which a file can
be wrong. The expected order is computed here again, straight from the definition; that it looks random is
test_host's (rand_permuted).

    make build/test_dataloader && build/test_dataloader
*/
#include <sys/resource.h>           // gives: setrlimit

#include "llmc/data/dataloader.h"   // gives: what is tested
#include "child.h"                  // gives: folder, check_dies
#include "test.h"                   // gives: TEST, CHECK

// ---- making shards ----

static std::string shard_text(const std::vector<uint16_t>& tokens, int magic = 20240520, int version = 1,
                              long long count = -1, int tokenizer = 0) {
    const int32_t header[256] = {magic, version, count == -1 ? (int32_t)tokens.size() : (int32_t)count,
                                 tokenizer};
    return std::string((const char*)header, sizeof(header)) +
           std::string((const char*)tokens.data(), 2 * tokens.size());
}

static std::string write_shard(const std::string& name, const std::vector<uint16_t>& tokens,
                               int tokenizer = 0) {
    write_text(in_folder(name), shard_text(tokens, 20240520, 1, -1, tokenizer));
    return in_folder(name);
}

// Token number n of a set is n itself, across its shards, so that a token tells where it came from.
static std::string write_set(const std::string& name, const std::vector<int>& sizes) {
    uint16_t next = 0;
    for (size_t s = 0; s < sizes.size(); s++) {
        std::vector<uint16_t> tokens;
        for (int i = 0; i < sizes[s]; i++) { tokens.push_back(next++); }
        write_shard(format("%s_%03zu.bin", name.c_str(), s), tokens);
    }
    return in_folder(name + "_*.bin");
}

// ---- order and positions ----

// The definition, once more: the first token of every row, in order, epoch after epoch.
static std::vector<int> expected_rows(const std::vector<int>& sizes, int T, bool shuffle, uint64_t seed,
                                      size_t count) {
    std::vector<int> in_order, firsts;
    int first = 0;                                          // of the shard
    for (int size : sizes) {
        for (int w = 0; (w + 1) * T + 1 <= size; w++) { in_order.push_back(first + w * T); }
        first += size;
    }
    const size_t n = in_order.size();
    while (firsts.size() < count) {
        const size_t i = firsts.size() % n, epoch = firsts.size() / n;
        firsts.push_back(in_order[shuffle ? rand_permuted(seed, (uint32_t)epoch, n, i) : i]);
    }
    return firsts;
}

// What `steps` steps of all ranks hold, `run` batches a rank: the first token of every row, ordered by sample
// number. Checks that every row is a run of consecutive tokens with its targets one further on.
static std::vector<int> collect(const std::string& pattern, int B, int T, int world, int steps, bool shuffle,
                                uint64_t seed, int64_t from = 0, int run = 1) {
    std::vector<int> firsts((size_t)(B * world * run * steps));
    int broken = 0;
    for (int rank = 0; rank < world; rank++) {
        DataLoader loader;
        dataloader_init(&loader, pattern.c_str(), B, T, shuffle, seed, 65536, {rank, world, run});
        dataloader_seek(&loader, from);
        for (int k = 0; k < steps * run; k++) {
            dataloader_next(&loader);
            const int batch = (k / run * world + rank) * run + k % run;     // its number in the job's list
            broken += loader.position != from + (int64_t)(k + 1) * B * world;
            for (int b = 0; b < B; b++) {
                int first = loader.inputs[b * T];
                firsts[(size_t)(batch * B + b)] = first;
                for (int t = 0; t < T; t++) {
                    broken += loader.inputs[b * T + t] != first + t;
                    broken += loader.targets[b * T + t] != first + t + 1;
                }
            }
        }
        dataloader_free(&loader);
    }
    CHECK(broken == 0, "B=%d T=%d world=%d run=%d: %d wrong tokens or positions", B, T, world, run, broken);
    return firsts;
}

static const std::vector<int> kSizes = {101, 7, 64, 8, 0, 5, 250, 9, 33, 1};
static const int kT = 8, kSamples = 12 + 0 + 7 + 0 + 0 + 0 + 31 + 1 + 4 + 0;
static const uint64_t kSeed = (1ull << 32) + 42;            // both of its words count

// All ranks together take the one global order, so a step is the same for every way to cut it.
static void test_order(const std::string& pattern, bool shuffle, const std::vector<int>& expected) {
    struct Shape { int B, world, run; };
    std::vector<Shape> shapes = {{1, 1, 1}, {kSamples, 1, 1}, {kSamples + 5, 1, 1}, {11, 5, 1}};
    for (int world : {1, 2, 3, 5, 8, 16, 63, 64}) {
        for (int run : {1, 2, 3, 8}) { shapes.push_back({1 + (world + run) % 3, world, run}); }
    }
    for (const Shape& s : shapes) {
        const int step = s.B * s.world * s.run, steps = std::max(2, 2 * kSamples / step + 1);
        const int from = s.run == 1 ? 0 : s.world * s.run % kSamples;
        const std::vector<int> got = collect(pattern, s.B, kT, s.world, steps, shuffle, kSeed, from, s.run);
        CHECK(std::equal(got.begin(), got.end(), expected.begin() + from),
              "B=%d world=%d run=%d shuffle=%d: not the promised order", s.B, s.world, s.run, shuffle);
    }
}

// A caller that takes each row of a set once, whatever B, may seek any row; the rows after the set's last one
// are the first ones of the next epoch.
static void test_any_row(const std::string& pattern, bool shuffle, const std::vector<int>& rows) {
    for (int B : {1, 3, kSamples - 1, kSamples, kSamples + 5}) {
        DataLoader loader;
        dataloader_init(&loader, pattern.c_str(), B, kT, shuffle, kSeed, 65536);
        int wrong = 0;
        for (int p = 2 * kSamples; p >= 0; p--) {
            dataloader_seek(&loader, p);
            for (int batch = 0; batch < 2; batch++) {       // the second was read ahead from there
                dataloader_next(&loader);
                if (p % 7 == 0) { dataloader_seek(&loader, p + B); }    // the batch stays until the next
                for (int b = 0; b < B; b++) {
                    wrong += loader.inputs[b * kT] != rows[(size_t)(p + batch * B + b)];
                }
            }
        }
        CHECK(wrong == 0, "B=%d shuffle=%d: %d wrong rows", B, shuffle, wrong);
        dataloader_free(&loader);
    }
}

// A seek in the middle of a step begins a new one, also where the position stays the same.
static void test_seek_in_step(const std::string& pattern, const std::vector<int>& expected) {
    DataLoader loader;
    const int B = 2, rank = 1, world = 3, run = 4;
    dataloader_init(&loader, pattern.c_str(), B, kT, true, kSeed, 65536, {rank, world, run});
    for (int taken = 1; taken <= 2 * run; taken++) {
        const int64_t before = loader.position;
        for (int k = 0; k < taken; k++) { dataloader_next(&loader); }
        CHECK(loader.position == before + taken * world * B, "position %lld", (long long)loader.position);
        const int64_t from = taken % 2 ? loader.position : 17 + taken;
        dataloader_seek(&loader, from);
        bool same = true;
        for (int j = 0; j < run; j++) {
            dataloader_next(&loader);
            for (int b = 0; b < B; b++) {
                same &= loader.inputs[b * kT] == expected[(size_t)(from + (rank * run + j) * B + b)];
            }
        }
        CHECK(same && loader.position == from + run * world * B, "a seek after %d batches", taken);
    }
    CHECK(loader.samples_per_epoch == kSamples, "%lld samples", (long long)loader.samples_per_epoch);
    CHECK(loader.tokens == 478, "%lld tokens", (long long)loader.tokens);
    dataloader_free(&loader);               // with a batch read ahead that nobody asked for
    dataloader_free(&loader);               // twice is harmless
}

static void test_positions() {
    const std::string pattern = write_set("order", kSizes);
    for (bool shuffle : {false, true}) {
        const std::vector<int> expected = expected_rows(kSizes, kT, shuffle, kSeed, 4000 + 2 * 64 * 8 * 3);
        test_order(pattern, shuffle, expected);
        test_any_row(pattern, shuffle, expected);
        if (shuffle) { test_seek_in_step(pattern, expected); }
    }
}

static int count_entries(const char* path) { return (int)names_in(path).size(); }

// More shards than are kept open at once, in random order: files and threads are given back.
static void test_open_files() {
    const std::vector<int> sizes(260, 17);
    const std::string pattern = write_set("many", sizes);
    const int files = count_entries("/proc/self/fd"), threads = count_entries("/proc/self/task");
    if (files < 2 || threads < 1) { SKIP(8, "no /proc here"); return; }
    for (int round = 0; round < 3; round++) {
        DataLoader loader;
        dataloader_init(&loader, pattern.c_str(), 13, 8, true, 6, 65536);
        std::vector<int> firsts;
        for (int k = 0; k < 40; k++) {
            dataloader_next(&loader);
            for (int b = 0; b < 13; b++) { firsts.push_back(loader.inputs[b * 8]); }
        }
        CHECK(firsts == expected_rows(sizes, 8, true, 6, 520), "260 shards: not the promised order");
        const int open_now = count_entries("/proc/self/fd") - files;
        CHECK(open_now >= 1 && open_now <= 100, "%d files are open", open_now);
        dataloader_free(&loader);
    }
    CHECK(count_entries("/proc/self/fd") == files, "a freed loader leaves files open");
    CHECK(count_entries("/proc/self/task") == threads, "a freed loader leaves a thread");
}

static void test_small_sets() {
    struct Row { const char* what; std::vector<int> sizes; int B, T, world; std::vector<int> firsts; };
    const Row rows[] = {
        {"a set of one window repeats it", {9}, 5, 8, 3, std::vector<int>(15, 0)},
        {"T = 1 takes two tokens", {2}, 2, 1, 1, {0, 0}},
        {"T = 1 with empty shards", {0, 3, 0, 1, 3, 0}, 4, 1, 1, {0, 1, 4, 5}},
        {"16 tokens: a second window of 8 lacks a target", {16, 17, 18}, 5, 8, 1, {0, 16, 24, 33, 41}}};
    for (const Row& r : rows) {
        const std::string pattern = write_set(format("small%d", (int)(&r - rows)), r.sizes);
        CHECK(collect(pattern, r.B, r.T, r.world, 1, false, 3) == r.firsts, "%s", r.what);
    }
    CHECK(collect(in_folder("small3_001.bin"), 2, 8, 1, 1, false, 0) == std::vector<int>({16, 24}),
          "a plain path");
    const std::string odd = write_shard("odd[1].bin", {5, 6, 7});
    CHECK(collect(odd, 1, 2, 1, 1, false, 0) == std::vector<int>(1, 5), "a name with brackets");
}

// What ranks compare, and what a resumed run and two sets of one command line compare.
static void test_facts() {
    DataLoader a, b;
    dataloader_init(&a, write_set("exact", {16, 17, 18}).c_str(), 1, 8, false, 0, 65536);
    dataloader_init(&b, in_folder("./exact_002.bin").c_str(), 1, 8, false, 0, 65536);
    CHECK(dataloader_shared_file(&a, &b) != nullptr, "the same file under two names was not noticed");
    dataloader_free(&b);
    dataloader_init(&b, write_set("another", {9}).c_str(), 1, 8, false, 0, 65536);
    CHECK(dataloader_shared_file(&a, &b) == nullptr, "different files were called the same");
    CHECK_TEXT(dataloader_facts(&a),
               "51 tokens in 3 shards: exact_000.bin 16 exact_001.bin 17 exact_002.bin 18");
    dataloader_free(&a);
    dataloader_free(&b);
    CHECK_TEXT(dataloader_facts(&a), "");
    for (size_t size : {100, 200000}) {     // of a short shard every token, of a long one its ends and middle
        std::vector<uint16_t> tokens(size, 7);
        auto sample = [&](const char* name) {
            dataloader_init(&a, write_shard(name, tokens).c_str(), 1, 8, false, 0, 65536);
            const std::string text = dataloader_sample(&a);
            dataloader_free(&a);
            return text;
        };
        const std::string before = sample("sampled.bin");
        CHECK_TEXT(sample("copy.bin"), before);
        for (size_t at : {(size_t)0, size - 1, size / 7 * 3 + 50}) {
            tokens[at]++;
            CHECK(sample("sampled.bin") != before, "token %zu of %zu is not seen", at, size);
            tokens[at]--;
        }
    }
}

// Sanitizers take terabytes of addresses for themselves.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
static const bool kSanitized = true;
#else
static const bool kSanitized = false;
#endif

static void limit_memory(size_t bytes) {
    struct rlimit limit = {bytes, bytes};
    if (!kSanitized) { setrlimit(RLIMIT_AS, &limit); }
}

// A sparse file, which takes no room on the disk: its header has the count modulo 2^32.
static bool write_huge(const std::string& path, int64_t tokens) {
    write_text(path, shard_text({}, 20240520, 1, (int32_t)(uint32_t)(tokens & 0xFFFFFFFF)));
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
    const int64_t tokens = (5ll << 30) + 3;
    if (!write_huge(path, tokens)) {
        SKIP(7, "no sparse file of 10 GiB here: %s", strerror(errno));
        return;
    }
    const uint16_t mark = 4321;
    const int64_t window = tokens / T - 1;                  // the last one; mark its first token
    mark_token(path, window * T, mark);
    DataLoader loader;
    dataloader_init(&loader, path.c_str(), 1, T, false, 0, 50257);
    CHECK(loader.tokens == tokens, "%lld tokens, expected %lld", (long long)loader.tokens, (long long)tokens);
    dataloader_seek(&loader, window);
    dataloader_next(&loader);
    CHECK(loader.inputs[0] == mark && loader.inputs[1] == 0, "token %d at the far end", loader.inputs[0]);
    dataloader_next(&loader);
    CHECK(loader.inputs[0] == 0, "the next epoch begins with token %d", loader.inputs[0]);
    dataloader_free(&loader);

    const int64_t rows = tokens - 1, epoch = 7, place = 12345;
    mark_token(path, (int64_t)rand_permuted(3, (uint32_t)epoch, (uint64_t)rows, (uint64_t)place), mark);
    check_lives("shuffling 5 * 2^30 rows", [&] {
        limit_memory(1ull << 30);
        dataloader_init(&loader, path.c_str(), 1, 1, true, 3, 50257);
        dataloader_seek(&loader, epoch * rows + place);
        dataloader_next(&loader);
        printf("%lld %d", (long long)loader.samples_per_epoch, loader.inputs[0]);
    }, format("%lld %d", (long long)rows, mark));
    const int64_t middle = (3ll << 30) + 5;                 // fits 32 bits, but not with a sign
    check_lives("3 * 2^30 tokens", [&] {
        if (!write_huge(path, middle)) { _exit(6); }
        dataloader_init(&loader, path.c_str(), 1, T, true, 3, 50257);
        printf("%lld", (long long)loader.tokens);
    }, std::to_string(middle));
    unlink(path.c_str());
}

// ---- what goes wrong ----

static void load(const std::string& pattern, int batches = 1, int vocab = 65536, int64_t from = 0) {
    DataLoader loader;
    dataloader_init(&loader, pattern.c_str(), 2, 8, false, 0, vocab);
    dataloader_seek(&loader, from);
    for (int k = 0; k < batches; k++) { dataloader_next(&loader); }
    dataloader_free(&loader);
}

// What word 3 of the headers says: 0 nothing, else all shards must say the same.
static void test_tokenizers() {
    auto set = [&](const std::string& name, const std::vector<int>& ids) {
        for (size_t s = 0; s < ids.size(); s++) {
            write_shard(format("%s_%zu.bin", name.c_str(), s), std::vector<uint16_t>(100), ids[s]);
        }
        return in_folder(name + "_*.bin");
    };
    for (const std::vector<int>& ids : std::vector<std::vector<int>>{{0}, {1}, {0, 2, 2}, {2, 0}, {0, 0}}) {
        const std::string pattern = set(format("ids%d%zu", ids[0], ids.size()), ids);
        DataLoader loader;
        dataloader_init(&loader, pattern.c_str(), 1, 8, false, 0, 50257);
        const uint32_t wanted = (uint32_t)*std::max_element(ids.begin(), ids.end());
        CHECK(loader.tokenizer == wanted, "%s: tokenizer %u", pattern.c_str(), loader.tokenizer);
        dataloader_free(&loader);
    }
    check_dies("two tokenizers", [&] { load(set("mixed", {0, 1, 0, 2})); },
               {"mixed_1.bin", "of tokenizer 1", "mixed_3.bin", "of 2"});
}

static void test_bad_files() {
    const std::vector<uint16_t> tokens(100, 9), few(8, 9);
    const std::string good = shard_text(tokens), line = "To be or not to be\n", path = in_folder("bad.bin");
    std::string lines;
    for (int i = 0; i < 1000; i++) { lines += line; }
    const std::vector<std::string> not_shard = {"not a token shard", "`make tokenize`",
                                                "`build/tokenize FILE -o NAME`"};
    const struct { const char* what; std::string bytes; std::vector<std::string> words; } files[] = {
        {"zero-length file", "", {"empty", "0 bytes"}},
        {"file shorter than a header", good.substr(0, 200), {"truncated", "200 bytes"}},
        {"wrong magic", shard_text(tokens, 20240326), {"20240326", "20240520"}},
        {"a text shorter than a header", line, not_shard},
        {"a text longer than a header", lines, not_shard},
        {"wrong version", shard_text(tokens, 20240520, 2), {"version 2", "version 1"}},
        {"negative count", shard_text(tokens, 20240520, 1, -7), {"negative", "-7 tokens", "100"}},
        {"huge count", shard_text(tokens, 20240520, 1, 0x7FFFFFFF), {"truncated", "2147483647 tokens"}},
        {"a token less than promised", shard_text(tokens, 20240520, 1, 101), {"truncated", "101", "100"}},
        {"a token more than promised", shard_text(tokens, 20240520, 1, 99), {"99 tokens", "100"}},
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
    dies("missing file", path, {"no file matches", "make tinyshakespeare"});
    dies("empty glob", in_folder("nothing_*.bin"), {"no file matches", "make tinyshakespeare"});
    dies("folder", folder, {"not a regular file"});
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
    write_text(in_folder("among_1.bin"), shard_text(tokens, 7));
    check_dies("one bad file among good ones", [&] { load(in_folder("among_*.bin")); }, {"among_1.bin", "7"});
    // found by the thread, reported by the caller
    write_text(in_folder("bae.bin"), good);
    const struct { const char *what, *pattern, *changed; std::string bytes, word; } changes[] = {
        {"cut while in use", "bad.bin", "bad.bin", good.substr(0, 1024 + 50), "cut short"},
        {"replaced while in use", "ba?.bin", "bae.bin", shard_text({1, 2, 3}), "changed"}};
    for (const auto& c : changes) {
        write_text(path, good);
        check_dies(c.what, [&] {
            DataLoader loader;
            dataloader_init(&loader, in_folder(c.pattern).c_str(), 2, 8, false, 0, 65536);
            dataloader_next(&loader);
            write_text(in_folder(c.changed), c.bytes);
            for (int k = 0; k < 24; k++) { dataloader_next(&loader); }
        }, {c.changed, c.word});
    }
}

// A loader that cannot have what it needs says so.
static void test_no_memory() {
    if (kSanitized) {
        SKIP(4, "the sanitizer's own memory cannot be limited");
        return;
    }
    const std::string pattern = write_set("memory", {100});
    check_dies("no room for the thread's stack", [&] {
        FILE* f = fopen("/proc/self/statm", "r");           // pages that the program has now
        size_t pages = 0;
        if (!f || fscanf(f, "%zu", &pages) != 1) { _exit(99); }
        limit_memory(pages * (size_t)sysconf(_SC_PAGESIZE) + (4u << 20));
        load(pattern);
    }, {"cannot start the thread", "hint:"});
}

static void test_token_range() {
    std::vector<uint16_t> tokens(100, 254);
    tokens[37] = 256;
    tokens[35] = 255;                       // the largest id that V = 256 has
    const std::string path = write_shard("range.bin", tokens);
    const std::vector<std::string> words = {path, "token id 256", "byte 1098 ", "number 37", "0..255"};
    check_dies("id = V in the third batch", [&] { load(path, 3, 256); }, words);
    check_dies("id = V after a seek", [&] { load(path, 1, 256, 4); }, words);
    DataLoader loader;                      // reads the bad batch ahead, and nobody asks for it
    dataloader_init(&loader, path.c_str(), 2, 8, false, 0, 256);
    dataloader_next(&loader);
    dataloader_next(&loader);
    CHECK(loader.inputs[0] == 254 && loader.position == 4, "position %lld", (long long)loader.position);
    dataloader_seek(&loader, 0);
    dataloader_next(&loader);
    CHECK(loader.inputs[0] == 254 && loader.position == 2, "a bad batch read ahead spoils the next one");
    dataloader_free(&loader);
    tokens[37] = 255;
    tokens[96] = 65535;                     // only ever a target: the last token of the last window
    write_shard("range.bin", tokens);
    check_dies("id 65535 as the last target", [&] { load(path, 6, 50257); }, {path, "65535", "number 96"});
    load(path, 6, 65536);
    tokens[96] = 255;
    tokens[97] = 65535;                     // in no window
    write_shard("range.bin", tokens);
    dataloader_init(&loader, path.c_str(), 12, 8, false, 0, 256);
    dataloader_next(&loader);
    const int largest = *std::max_element(loader.targets, loader.targets + 12 * 8);
    CHECK(largest == 255, "the id V - 1 came as %d", largest);
    dataloader_free(&loader);
}

int main() {
    folder_begin("dataloader");
    TEST("no memory") { test_no_memory(); }         // first: later, stacks of ended threads are at hand
    TEST("every row once per epoch, by one rank, in the promised order; any row may be sought") {
        test_positions();
    }
    TEST("open files and threads") { test_open_files(); }
    TEST("small sets") { test_small_sets(); }
    TEST("what tells sets apart") { test_facts(); }
    TEST("more than 2^31 tokens") { test_huge(); }
    TEST("tokenizers") { test_tokenizers(); }
    TEST("bad files") { test_bad_files(); }
    TEST("token range") { test_token_range(); }
    return folder_end();
}
