/*
Tests of data/dataloader.h: who sees which token in which order, positions, shuffling, and every way in which
a file can be wrong. The expected order is computed here again, straight from the definition.

    g++ -std=c++17 -O2 -pthread -I. dev/test/test_dataloader.cpp -o test_dataloader && ./test_dataloader
*/
#include "llmc/data/dataloader.h"   // gives: what is tested

#include <dirent.h>                 // gives: opendir
#include <stdio.h>                  // gives: fopen
#include <stdlib.h>                 // gives: mkdtemp, system
#include <sys/resource.h>           // gives: setrlimit

#include "child.h"                  // gives: check_dies
#include "test.h"                   // gives: TEST, CHECK, test_summary

static std::string folder;          // of this run, removed at the end

static std::string in_folder(const std::string& name) { return folder + "/" + name; }

// ---- making shards ----

static void write_file(const std::string& path, const void* data, size_t bytes) {
    FILE* f = fopen_check(path.c_str(), "wb");
    if (bytes && fwrite(data, 1, bytes, f) != bytes) { die("cannot write '%s'", path.c_str()); }
    fclose(f);
}

static void write_shard(const std::string& path, const std::vector<uint16_t>& tokens, int magic = 20240520,
                        int version = 1, long long count = -1, int tokenizer = 0) {
    std::vector<char> bytes(1024 + 2 * tokens.size());
    int32_t header[256] = {magic, version, count == -1 ? (int32_t)tokens.size() : (int32_t)count, tokenizer};
    memcpy(bytes.data(), header, 1024);
    if (!tokens.empty()) { memcpy(bytes.data() + 1024, tokens.data(), 2 * tokens.size()); }
    write_file(path, bytes.data(), bytes.size());
}

// Token number n of a set is n itself, across its shards, so that a token tells where it came from.
static std::string write_set(const std::string& name, const std::vector<int>& sizes) {
    uint16_t next = 0;
    for (size_t s = 0; s < sizes.size(); s++) {
        std::vector<uint16_t> tokens;
        for (int i = 0; i < sizes[s]; i++) { tokens.push_back(next++); }
        write_shard(in_folder(format("%s_%03zu.bin", name.c_str(), s)), tokens);
    }
    return in_folder(name + "_*.bin");
}

// ---- the definition, once more: the first token of every sample of an epoch, in order ----

static std::vector<int> expected_epoch(const std::vector<int>& sizes, int T, bool shuffle, uint64_t seed,
                                       uint32_t epoch) {
    std::vector<int> in_order, firsts;
    int first = 0;                                          // of the shard
    for (int size : sizes) {
        for (int w = 0; (w + 1) * T + 1 <= size; w++) { in_order.push_back(first + w * T); }
        first += size;
    }
    for (size_t i = 0; i < in_order.size(); i++) {
        firsts.push_back(in_order[shuffle ? rand_permuted(seed, epoch, in_order.size(), i) : i]);
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

static void test_order() {
    std::string pattern = write_set("order", kSizes);
    const int shapes[][2] = {{1, 1}, {4, 1}, {3, 2}, {5, 3}, {2, 7}, {kSamples, 1}, {11, 5}, {13, 8}};
    for (bool shuffle : {false, true}) {
        std::vector<int> expected;
        for (uint32_t e = 0; e < 6; e++) {
            std::vector<int> epoch = expected_epoch(kSizes, kT, shuffle, 42, e);
            CHECK((int)epoch.size() == kSamples, "%zu samples", epoch.size());
            expected.insert(expected.end(), epoch.begin(), epoch.end());
            std::sort(epoch.begin(), epoch.end());
            CHECK(epoch == expected_epoch(kSizes, kT, false, 42, 0), "epoch %d is no permutation", (int)e);
        }
        for (const auto& shape : shapes) {
            int B = shape[0], world = shape[1], steps = std::max(2, 2 * kSamples / (B * world) + 1);
            std::vector<int> got = collect(pattern, B, kT, world, steps, shuffle, 42);
            bool same = got.size() <= expected.size() && std::equal(got.begin(), got.end(), expected.begin());
            CHECK(same, "B=%d world=%d shuffle=%d: not the promised order", B, world, shuffle);
        }
    }
}

// A rank that takes several batches in a row: all ranks together still take the one global order, so a step
// is the same for every way to cut it, and so is what comes after a seek to the position between two steps.
static void test_runs() {
    std::string pattern = write_set("runs", kSizes);
    std::vector<int> expected;
    while ((int)expected.size() < kSamples + 2 * 64 * 8 * 3) {      // where it begins, the two largest steps
        std::vector<int> epoch = expected_epoch(kSizes, kT, true, 42, (uint32_t)(expected.size() / kSamples));
        expected.insert(expected.end(), epoch.begin(), epoch.end());
    }
    for (int world : {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 31, 32, 63, 64}) {
        for (int run = 1; run <= 8; run++) {
            const int B = 1 + (world + run) % 3, step = B * world * run;
            const int steps = std::max(2, 3 * kSamples / step + 1), from = world * run % kSamples;
            std::vector<int> got = collect(pattern, B, kT, world, steps, true, 42, from, run);
            bool same = from + got.size() <= expected.size() &&
                        std::equal(got.begin(), got.end(), expected.begin() + from);
            CHECK(same, "B=%d world=%d run=%d: not the promised order", B, world, run);
            // another cut of the same steps goes on where the first one ended
            std::vector<int> rest = collect(pattern, B, kT, world * run, steps - 1, true, 42, from + step);
            same = std::equal(rest.begin(), rest.end(), got.begin() + step);
            CHECK(same, "B=%d world=%d run=%d: %d ranks go on differently", B, world, run, world * run);
        }
    }
    // a seek in the middle of a step begins a new one, also where the position stays the same
    DataLoader loader;
    const int B = 2, rank = 1, world = 3, run = 4;
    dataloader_init(&loader, pattern.c_str(), B, kT, true, 42, 65536, {rank, world, run});
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
    dataloader_free(&loader);
}

static void test_shuffle() {
    std::string pattern = write_set("shuffle", {2000, 3000});
    int n = 1999 / 8 + 2999 / 8;
    std::vector<int> two = collect(pattern, 1, 8, 1, 2 * n, true, 1);
    std::vector<int> first(two.begin(), two.begin() + n), second(two.begin() + n, two.end());
    CHECK(first != second, "two epochs have the same order");
    CHECK(first != collect(pattern, 1, 8, 1, n, true, 2), "two seeds have the same order");
    CHECK(first != collect(pattern, 1, 8, 1, n, true, 1ull << 32 | 1), "half of the seed does not count");
    CHECK(first == collect(pattern, 1, 8, 1, n, true, 1), "one seed has two orders");
    int stayed = 0, pairs = 0;              // one of each is expected
    for (int i = 0; i < n; i++) {
        stayed += first[(size_t)i] == second[(size_t)i];
        pairs += i > 0 && first[(size_t)i] == first[(size_t)i - 1] + 8;
    }
    CHECK(stayed < 12 && pairs < 12, "%d of %d stayed, %d still follow each other", stayed, n, pairs);
    int shard_first[2] = {0, 0};            // over many epochs, both shards come first about equally often
    for (int e = 0; e < 64; e++) {
        DataLoader loader;
        dataloader_init(&loader, pattern.c_str(), 1, 8, true, 5, 65536);
        dataloader_seek(&loader, (int64_t)e * n);
        dataloader_next(&loader);
        shard_first[loader.inputs[0] >= 2000]++;
        dataloader_free(&loader);
    }
    CHECK(shard_first[0] >= 16 && shard_first[1] >= 16, "%d to %d", shard_first[0], shard_first[1]);
}

static void test_position() {
    std::string pattern = write_set("position", kSizes);
    const int B = 3, world = 2, steps = 40;
    for (bool shuffle : {false, true}) {
        std::vector<int> whole = collect(pattern, B, kT, world, steps, shuffle, 9);
        for (int k : {0, 1, 5, 9, 17, 18, 39}) {            // before, at and after an epoch's end
            int from = k * B * world;
            std::vector<int> rest = collect(pattern, B, kT, world, steps - k, shuffle, 9, from);
            bool same = std::equal(rest.begin(), rest.end(), whole.begin() + from);
            CHECK(same, "shuffle=%d: after seeking to step %d it goes on differently", shuffle, k);
        }
        // back and forth in one loader; the current batch stays what it is until the next call
        DataLoader loader;
        dataloader_init(&loader, pattern.c_str(), B, kT, shuffle, 9, 65536, {1, world});
        for (int k : {7, 8, 3, 30, 0, 30, 31, 0, 0, 1}) {
            dataloader_seek(&loader, (int64_t)k * B * world);
            dataloader_next(&loader);
            dataloader_seek(&loader, 0);
            bool same = true;
            for (int b = 0; b < B; b++) {
                same &= loader.inputs[b * kT] == whole[(size_t)((k * world + 1) * B + b)];
            }
            CHECK(same, "shuffle=%d: step %d", shuffle, k);
        }
        // another number of ranks goes on from the same position with the same samples
        std::vector<int> other = collect(pattern, 2, kT, 3, 10, shuffle, 9, 24);
        CHECK(std::equal(other.begin(), other.end(), whole.begin() + 24), "shuffle=%d: 3 ranks", shuffle);
        dataloader_free(&loader);
    }
    DataLoader unused;
    dataloader_init(&unused, pattern.c_str(), B, kT, true, 9, 65536);
    CHECK(unused.samples_per_epoch == kSamples, "%lld samples", (long long)unused.samples_per_epoch);
    CHECK(unused.tokens == 478, "%lld tokens", (long long)unused.tokens);
    dataloader_free(&unused);               // with a batch read ahead that nobody asked for
    dataloader_free(&unused);               // twice is harmless
}

// What a caller needs who takes each row of a set once, whatever B: any row may be sought, and the rows after
// the set's last one are its first ones again.
static void test_any_row() {
    std::string pattern = write_set("any", kSizes);
    for (bool shuffle : {false, true}) {
        std::vector<int> rows;
        for (uint32_t e = 0; e < 3; e++) {
            for (int first : expected_epoch(kSizes, kT, shuffle, 21, e)) { rows.push_back(first); }
        }
        if (!shuffle) { CHECK(rows[kSamples] == rows[0], "unshuffled, row 0 does not follow the last one"); }
        for (int B : {1, 3, kSamples - 1, kSamples, kSamples + 5}) {
            DataLoader loader;
            dataloader_init(&loader, pattern.c_str(), B, kT, shuffle, 21, 65536);
            int wrong = 0, seeks = 0;
            for (int p = 2 * kSamples; p >= 0; p--) {
                dataloader_seek(&loader, p);
                for (int batch = 0; batch < 2; batch++) {   // the second was read ahead from there
                    int at = p + batch * B;
                    if (at + B > (int)rows.size()) { continue; }
                    dataloader_next(&loader);
                    for (int b = 0; b < B; b++) { wrong += loader.inputs[b * kT] != rows[(size_t)(at + b)]; }
                    seeks++;
                }
            }
            CHECK(wrong == 0 && seeks > kSamples, "B=%d shuffle=%d: %d wrong rows", B, shuffle, wrong);
            std::vector<int> once;                          // all rows once, in batches of B
            for (int p = 0; p < kSamples; p += B) {
                dataloader_seek(&loader, p);
                dataloader_next(&loader);
                int live = std::min(B, kSamples - p);
                for (int b = 0; b < live; b++) { once.push_back(loader.inputs[b * kT]); }
            }
            rows.resize((size_t)kSamples * 3);
            CHECK(std::equal(once.begin(), once.end(), rows.begin()) && (int)once.size() == kSamples,
                  "B=%d shuffle=%d: not each row once", B, shuffle);
            dataloader_free(&loader);
        }
    }
}

static int count_entries(const char* path) {
    DIR* dir = opendir(path);
    int count = 0;
    while (dir && readdir(dir)) { count++; }
    if (dir) { closedir(dir); }
    return count;
}

// More shards than are kept open at once, in random order: files and threads are given back.
static void test_open_files() {
    std::vector<int> sizes(260, 17);
    std::string pattern = write_set("many", sizes);
    const int files = count_entries("/proc/self/fd"), threads = count_entries("/proc/self/task");
    if (files < 4 || threads < 3) { SKIP(8, "no /proc here"); return; }
    for (int round = 0; round < 3; round++) {
        DataLoader loader;
        dataloader_init(&loader, pattern.c_str(), 13, 8, true, 6, 65536);
        std::vector<int> firsts, expected = expected_epoch(sizes, 8, true, 6, 0);
        for (int k = 0; k < 40; k++) {
            dataloader_next(&loader);
            for (int b = 0; b < 13; b++) { firsts.push_back(loader.inputs[b * 8]); }
        }
        CHECK(firsts == expected, "260 shards: not the promised order");
        int open_now = count_entries("/proc/self/fd") - files;
        CHECK(open_now >= 1 && open_now <= 100, "%d files are open", open_now);
        dataloader_free(&loader);
    }
    CHECK(count_entries("/proc/self/fd") == files, "a freed loader leaves files open");
    CHECK(count_entries("/proc/self/task") == threads, "a freed loader leaves a thread");
}

static void test_small_sets() {
    std::string one = write_set("one", {9});
    std::vector<int> got = collect(one, 5, 8, 3, 4, true, 3);
    CHECK(got == std::vector<int>(60, 0), "a set of one window must repeat it");
    std::string single = write_set("single", {2});
    CHECK(collect(single, 2, 1, 1, 3, true, 3) == std::vector<int>(6, 0), "T = 1 takes two tokens");
    std::string hole = write_set("hole", {0, 3, 0, 1, 3, 0});
    CHECK(collect(hole, 4, 1, 1, 1, false, 3) == (std::vector<int>{0, 1, 4, 5}), "T = 1 with empty shards");
    std::string exact = write_set("exact", {16, 17, 18});
    std::vector<int> firsts = {0, 16, 24, 33, 41};          // 16 tokens: a second window of 8 lacks a target
    CHECK(collect(exact, 5, 8, 1, 1, false, 0) == firsts, "windows at a shard's end");
    std::vector<int> alone = {16, 24};
    CHECK(collect(in_folder("exact_001.bin"), 2, 8, 1, 1, false, 0) == alone, "a plain path");
    write_shard(in_folder("odd[1].bin"), {5, 6, 7});
    std::vector<int> odd = {5};
    CHECK(collect(in_folder("odd[1].bin"), 1, 2, 1, 1, false, 0) == odd, "a name with brackets");
    DataLoader a, b;
    dataloader_init(&a, exact.c_str(), 1, 8, false, 0, 65536);
    dataloader_init(&b, in_folder("./exact_002.bin").c_str(), 1, 8, false, 0, 65536);
    CHECK(dataloader_shared_file(&a, &b) != nullptr, "the same file under two names was not noticed");
    dataloader_free(&b);
    dataloader_init(&b, one.c_str(), 1, 8, false, 0, 65536);
    CHECK(dataloader_shared_file(&a, &b) == nullptr, "different files were called the same");
    // what ranks compare
    const std::string facts = dataloader_facts(&a);
    CHECK(facts == "51 tokens in 3 shards: exact_000.bin 16 exact_001.bin 17 exact_002.bin 18", "facts: %s",
          facts.c_str());
    dataloader_free(&a);
    dataloader_free(&b);
    CHECK(dataloader_facts(&a).empty(), "no data have facts");
    // what a resumed run compares: of a short shard every token, of a long one its ends and its middle
    for (size_t size : {100, 200000}) {
        std::vector<uint16_t> tokens(size, 7);
        auto sample = [&](const char* name) {
            write_shard(in_folder(name), tokens);
            dataloader_init(&a, in_folder(name).c_str(), 1, 8, false, 0, 65536);
            const std::string text = dataloader_sample(&a);
            dataloader_free(&a);
            return text;
        };
        const std::string before = sample("sampled.bin");
        CHECK(sample("copy.bin") == before, "a copy has another sample");
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
    int32_t header[256] = {20240520, 1, (int32_t)(uint32_t)(tokens & 0xFFFFFFFF)};
    write_file(path, header, sizeof(header));
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
    std::string path = in_folder("huge.bin");
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
    const int64_t row = (int64_t)rand_permuted(3, (uint32_t)epoch, (uint64_t)rows, (uint64_t)place);
    mark_token(path, row, mark);
    Child shuffled = run_child([&] {
        limit_memory(1ull << 30);
        dataloader_init(&loader, path.c_str(), 1, 1, true, 3, 50257);
        dataloader_seek(&loader, epoch * rows + place);
        dataloader_next(&loader);
        _exit(loader.samples_per_epoch == rows && loader.inputs[0] == mark ? 7 : 8);
    });
    CHECK(shuffled.code == 7, "shuffling %lld rows ended with %d: %s", (long long)rows, shuffled.code,
          shuffled.err.c_str());

    const int64_t middle = (3ll << 30) + 5;                 // fits 32 bits, but not with a sign
    Child taken = run_child([&] {
        if (!write_huge(path, middle)) { _exit(6); }
        dataloader_init(&loader, path.c_str(), 1, T, true, 3, 50257);
        _exit(loader.tokens == middle ? 7 : 8);
    });
    CHECK(taken.code == 7, "%lld tokens: %d, %s", (long long)middle, taken.code, taken.err.c_str());
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
    const std::vector<uint16_t> tokens(100);
    auto set = [&](const std::string& name, const std::vector<int>& ids) {
        for (size_t s = 0; s < ids.size(); s++) {
            write_shard(in_folder(format("%s_%zu.bin", name.c_str(), s)), tokens, 20240520, 1, -1, ids[s]);
        }
        return in_folder(name + "_*.bin");
    };
    const std::vector<std::vector<int>> good = {{0}, {1}, {0, 2, 2}, {2, 0}, {0, 0}};
    for (const std::vector<int>& ids : good) {
        const std::string name = format("ids%d%zu", ids[0], ids.size()), pattern = set(name, ids);
        DataLoader loader;
        dataloader_init(&loader, pattern.c_str(), 1, 8, false, 0, 50257);
        const uint32_t wanted = (uint32_t)*std::max_element(ids.begin(), ids.end());
        CHECK(loader.tokenizer == wanted, "%s: tokenizer %u", pattern.c_str(), loader.tokenizer);
        dataloader_free(&loader);
    }
    const std::string mixed = set("mixed", {0, 1, 0, 2});
    check_dies("two tokenizers", [&] { load(mixed); },
               {"mixed_1.bin", "of tokenizer 1", "mixed_3.bin", "of 2"});
}

static void test_bad_files() {
    std::vector<uint16_t> tokens(100);
    for (size_t i = 0; i < tokens.size(); i++) { tokens[i] = (uint16_t)i; }
    std::string path = in_folder("bad.bin");
    auto dies = [&](const char* what, std::vector<std::string> words) {
        words.push_back(path);
        check_dies(what, [&] { alarm(60); load(path); }, words);        // who waits ends by a signal
    };
    unlink(path.c_str());
    dies("missing file", {"no file matches", "make tinyshakespeare"});
    std::string nothing = in_folder("nothing_*.bin");
    check_dies("empty glob", [&] { load(nothing); }, {nothing, "make tinyshakespeare"});
    check_dies("folder", [&] { load(folder); }, {folder, "not a regular file"});
    write_file(path, "", 0);
    dies("zero-length file", {"empty", "0 bytes"});
    const int32_t magic[50] = {20240520, 1};
    write_file(path, magic, 200);
    dies("file shorter than a header", {"truncated", "200 bytes"});
    write_shard(path, tokens, 20240326);
    dies("wrong magic", {"20240326", "20240520"});
    for (int lines : {1, 1000}) {                           // shorter and longer than a header
        std::string text;
        for (int i = 0; i < lines; i++) { text += "To be or not to be\n"; }
        write_file(path, text.data(), text.size());
        dies("a text", {"not a token shard", "`make tokenize`", "`build/tokenize FILE -o NAME`"});
    }
    unlink(path.c_str());
    CHECK(mkfifo(path.c_str(), 0600) == 0, "cannot make a pipe");
    dies("a pipe that nobody writes", {"not a regular file"});
    unlink(path.c_str());
    check_dies("a device", [&] { load("/dev/zero"); }, {"/dev/zero", "not a regular file"});
    write_shard(path, tokens, 20240520, 2);
    dies("wrong version", {"version 2", "version 1"});
    write_shard(path, tokens, 20240520, 1, -7);
    dies("negative count", {"negative", "-7 tokens", "100"});
    write_shard(path, tokens, 20240520, 1, 0x7FFFFFFF);
    dies("huge count", {"truncated", "2147483647 tokens", "100"});
    write_shard(path, tokens, 20240520, 1, 101);
    dies("one token less than promised", {"truncated", "101 tokens", "100"});
    write_shard(path, tokens, 20240520, 1, 99);
    dies("one token more than promised", {"99 tokens", "100"});
    write_shard(path, tokens);
    CHECK(truncate(path.c_str(), 1024 + 201) == 0, "truncate: %s", strerror(errno));
    dies("half a token more than promised", {"100 tokens", "1225 bytes"});
    write_shard(path, {1, 2, 3, 4, 5, 6, 7, 8});
    dies("no window", {"too short", "9 tokens", "8"});
    write_shard(path, {});
    dies("no tokens", {"too short"});
    write_shard(path, tokens);
    if (geteuid() != 0) {
        chmod(path.c_str(), 0);
        dies("unreadable file", {"Permission denied"});
        chmod(path.c_str(), 0600);
    }
    check_dies("one bad file among good ones", [&] {
        write_shard(in_folder("mixed_0.bin"), tokens);
        write_shard(in_folder("mixed_1.bin"), tokens, 7);
        load(in_folder("mixed_*.bin"));
    }, {"mixed_1.bin", "7"});
    // found by the thread, reported by the caller
    check_dies("file cut while in use", [&] {
        DataLoader loader;
        dataloader_init(&loader, path.c_str(), 2, 8, false, 0, 65536);
        dataloader_next(&loader);
        if (truncate(path.c_str(), 1024 + 50) != 0) { _exit(98); }
        for (int k = 0; k < 6; k++) { dataloader_next(&loader); }
    }, {path, "cut short"});
    write_shard(path, tokens);
    std::string other = in_folder("bae.bin");
    write_shard(other, tokens);
    check_dies("file replaced while in use", [&] {
        DataLoader loader;
        dataloader_init(&loader, in_folder("ba?.bin").c_str(), 2, 8, false, 0, 65536);
        dataloader_next(&loader);
        write_shard(other, {1, 2, 3});
        for (int k = 0; k < 24; k++) { dataloader_next(&loader); }
    }, {other, "changed"});
}

// A loader that cannot have what it needs says so.
static void test_no_memory() {
    if (kSanitized) {
        SKIP(4, "the sanitizer's own memory cannot be limited");
        return;
    }
    std::string pattern = write_set("memory", {100});
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
    std::string path = in_folder("range.bin");
    write_shard(path, tokens);
    std::vector<std::string> words = {path, "token id 256", "byte 1098 ", "number 37", "0..255"};
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
    write_shard(path, tokens);
    check_dies("id 65535 as the last target", [&] { load(path, 6, 50257); }, {path, "65535", "number 96"});
    load(path, 6, 65536);
    tokens[96] = 255;
    tokens[97] = 65535;                     // in no window
    write_shard(path, tokens);
    dataloader_init(&loader, path.c_str(), 12, 8, false, 0, 256);
    dataloader_next(&loader);
    int largest = 0;
    for (int i = 0; i < 12 * 8; i++) { largest = std::max(largest, loader.targets[i]); }
    CHECK(largest == 255, "the id V - 1 came as %d", largest);
    dataloader_free(&loader);
}

int main() {
    const char* tmp = getenv("TMPDIR");
    std::string name = std::string(tmp ? tmp : "/tmp") + "/test_dataloader_XXXXXX";
    if (!mkdtemp(&name[0])) { die("cannot create a folder '%s': %s", name.c_str(), strerror(errno)); }
    folder = name;
    TEST("no memory") { test_no_memory(); }         // first: later, stacks of ended threads are at hand
    TEST("order: every sample once per epoch, by one rank, in the promised order") { test_order(); }
    TEST("runs: several batches of a step in a row for each rank") { test_runs(); }
    TEST("shuffle") { test_shuffle(); }
    TEST("position") { test_position(); }
    TEST("any row may be sought") { test_any_row(); }
    TEST("open files and threads") { test_open_files(); }
    TEST("small sets") { test_small_sets(); }
    TEST("more than 2^31 tokens") { test_huge(); }
    TEST("tokenizers") { test_tokenizers(); }
    TEST("bad files") { test_bad_files(); }
    TEST("token range") { test_token_range(); }
    if (system(("rm -r '" + folder + "'").c_str()) != 0) { printf("left behind: %s\n", folder.c_str()); }
    return test_summary();
}
