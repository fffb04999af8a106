/*
Tests of what a run survives by: checksum.h, state_file.h, checkpoints.h, worker.h, and build/checkpoint
that reads their files. Damage is tried exhaustively on small files: each byte, each length, each field.

    make build/test_checkpoints build/checkpoint && build/test_checkpoints      # from the root
*/
#include <stddef.h>                     // gives: offsetof
#include <sys/inotify.h>                // gives: inotify_init1
#include <sys/resource.h>               // gives: setrlimit

#include <atomic>                       // gives: std::atomic
#include <new>                          // gives: std::bad_alloc

#include "llmc/files/checkpoints.h"     // gives: what is tested, here and in the next three lines
#include "llmc/checksum.h"
#include "llmc/files/state_file.h"
#include "llmc/worker.h"
#include "child.h"                      // gives: folder, run_child, check_dies, CHECK_TEXT
#include "test.h"                       // gives: TEST, CHECK, SKIP, test_summary

// The largest piece of memory that was asked for: a file's numbers must not decide about it.
static std::atomic<size_t> largest_wanted(0);
__attribute__((noinline)) void* operator new(size_t bytes) {
    size_t before = largest_wanted;
    while (bytes > before && !largest_wanted.compare_exchange_weak(before, bytes)) {}
    void* p = malloc(bytes);
    if (!p) { throw std::bad_alloc(); }
    return p;
}
__attribute__((noinline)) void operator delete(void* p) noexcept { free(p); }
__attribute__((noinline)) void operator delete(void* p, size_t) noexcept { free(p); }

static std::string new_folder(const char* name) {
    const std::string path = in_folder(name);
    mkdir_check(path.c_str());
    return path;
}

// Of a folder, without . and .., in one line.
static std::string listing(const std::string& path) {
    std::string all;
    for (const std::string& name : names_in(path)) { all += " " + name; }
    return all;
}

// ---- checksum.h ----

// The bytes of xxHash's own test of itself: the top byte of a number that is multiplied by PRIME64_1.
static std::string sanity_bytes(size_t count) {
    std::string bytes;
    for (uint64_t x = 2654435761; bytes.size() < count; x *= 11400714785074694797ull) {
        bytes += (char)(x >> 56);
    }
    return bytes;
}

static void test_checksum() {
    TEST("checksum: published values") {
        const struct { const char* text; uint64_t sum; } texts[] = {
            {"", 0xef46db3751d8e999}, {"a", 0xd24ec4f1a98c6e5b}, {"abc", 0x44bc2cf5ad770999},
            {"message digest", 0x066ed728fceeb3be}, {"abcdefghijklmnopqrstuvwxyz", 0xcfe1f278fa89835c}};
        auto check_sum = [](uint64_t got, uint64_t sum) {
            CHECK_TEXT(checksum_text(got), checksum_text(sum));
        };
        for (const auto& t : texts) { check_sum(checksum(t.text, strlen(t.text)), t.sum); }
        const std::string bytes = sanity_bytes(65541);
        const struct { size_t count; uint64_t sum; } counts[] = {
            {1, 0xe934a84adb052768}, {4, 0x9136a0dca57457ee}, {14, 0x8282dcc4994e35c8},
            {31, 0x299b39a290e6d783}, {32, 0x18b216492bb44b70}, {33, 0x55c8dc3e578f5b59},
            {222, 0xb641ae8cb691c174}, {1000, 0x52bd1358f22e9ef7}, {65541, 0xa77bf98f531b7c50}};
        for (const auto& c : counts) { check_sum(checksum(bytes.data(), c.count), c.sum); }
        Checksum all;                               // of the checksums of every length up to 300
        for (size_t n = 0; n <= 300; n++) {
            const uint64_t sum = checksum(bytes.data(), n);
            checksum_add(&all, &sum, sizeof(sum));
        }
        check_sum(checksum_end(&all), 0xc838e6aabc008e47);
    }
    TEST("checksum: in parts") {
        const std::string bytes = sanity_bytes(131);
        const uint64_t whole = checksum(bytes.data(), bytes.size());
        int wrong = 0;
        for (size_t i = 0; i <= bytes.size(); i++) {
            for (size_t k = i; k <= bytes.size(); k++) {
                Checksum c;
                checksum_add(&c, bytes.data(), i);
                checksum_add(&c, nullptr, 0);
                checksum_add(&c, bytes.data() + i, k - i);
                checksum_add(&c, bytes.data() + k, bytes.size() - k);
                wrong += checksum_end(&c) != whole;
            }
        }
        CHECK(wrong == 0, "%d of the ways to cut 131 bytes in three give another checksum", wrong);
        Checksum c;
        for (char byte : bytes) { checksum_add(&c, &byte, 1); }
        CHECK(checksum_end(&c) == whole, "byte by byte it is another");
        CHECK(checksum_end(&c) == whole, "asking changes it");
    }
}

// ---- state_file.h ----

// So that reading a byte too many is noticed by ASan: exactly as large as the data.
static std::string read_piece(const StateFile& s, size_t piece, std::vector<char>* data) {
    std::vector<char>((size_t)state_row_bytes(s.rows[piece])).swap(*data);
    return state_read(&s, piece, data->data());
}

// What is wrong with any part of a state file, or "".
static std::string state_error(const std::string& path) {
    StateFile s;
    std::vector<char> data;
    std::string error = state_open(&s, path);
    for (size_t i = 0; i < s.rows.size() && error.empty(); i++) { error = read_piece(s, i, &data); }
    return error;
}

static const Facts kOddFacts = {
    {"step", "12"}, {"prompt", "two\nlines, a \\ and a \\n\n"}, {"equals", "=a=b="}, {"empty", ""},
    {"odd key, blanks", " \t\r "}, {"utf-8", "\xC3\xA4"}, {"step", "of the same key"}};

struct SmallPiece { StateRow row; std::string data; };

static std::vector<SmallPiece> small_pieces() {
    const std::vector<StateRow> rows = {
        state_row("param.wte", "bf16", 4, 3, 0, 12), state_row("m.qkvw.11", "f32", 2, 5, 3, 7),
        state_row("v." + std::string(61, 'n'), "f16", 1, 1, 0, 1), state_row("m.one", "f32", 1, 1, 0, 1)};
    std::vector<SmallPiece> pieces;
    size_t from = 0;
    const std::string bytes = sanity_bytes(1000);
    for (const StateRow& row : rows) {
        pieces.push_back({row, bytes.substr(from, state_row_bytes(row))});
        from += state_row_bytes(row);
    }
    return pieces;
}

static void write_state(const std::string& path, const Facts& facts, const std::vector<SmallPiece>& pieces) {
    std::vector<StateRow> rows;
    for (const SmallPiece& p : pieces) { rows.push_back(p.row); }
    StateWriter out = state_begin(path, facts, rows);
    for (const SmallPiece& p : pieces) { state_write(&out, p.data.data()); }
    state_commit(&out);
}

static void test_state_round_trip() {
    const std::string path = in_folder("round.bin");
    TEST("state file: what is written is read") {
        for (const std::vector<SmallPiece>& pieces : {small_pieces(), std::vector<SmallPiece>()}) {
            for (const Facts& facts : {kOddFacts, Facts()}) {
                write_state(path, facts, pieces);
                StateFile s;
                std::string error = state_open(&s, path);
                CHECK(error.empty() && s.rows.size() == pieces.size(), "%s, %zu pieces", error.c_str(),
                      s.rows.size());
                CHECK(s.facts == facts, "%zu facts instead of %zu", s.facts.size(), facts.size());
                for (size_t i = s.rows.size(); i-- > 0;) {          // in any order
                    const SmallPiece& p = pieces[i];
                    std::vector<char> data;
                    error = read_piece(s, i, &data);
                    CHECK(error.empty() && std::string(data.begin(), data.end()) == p.data, "%s: %s",
                          p.row.name, error.c_str());
                    StateRow row = s.rows[i];
                    CHECK(row.checksum == checksum(p.data.data(), p.data.size()), "another checksum");
                    row.offset = row.checksum = 0;
                    CHECK(memcmp(&row, &p.row, sizeof(row)) == 0, "%s: another row", p.row.name);
                }
            }
        }
        const std::string *step = facts_find(kOddFacts, "step"), *none = facts_find(kOddFacts, "ste");
        CHECK(step && *step == "12" && !none, "a fact is not found, or one that is none");
    }
    TEST("state file: bytes on disk") {
        write_state(path, {{"a", "\n"}}, {{state_row("x", "bf16", 1, 1, 0, 1), "\1\2"}});
        const std::string text = read_text(path);
        const uint64_t length = 64 + 128 + 5 + 2;
        CHECK(text.size() == length && text.substr(0, 8) == "GPT2STAT", "%zu bytes", text.size());
        CHECK(text.substr(64 + 128) == std::string("a=\\n\n\1\2"), "%s", shown(text.substr(192)).c_str());
        const char start[] = "\1\0\0\0\1\0\0\0\5\0\0\0\0\0\0\0\xC7\0\0\0\0\0\0";
        CHECK(memcmp(&text[8], start, sizeof(start)) == 0, "the header's numbers are others");
        const char row[] = "\1\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0\xC5\0\0\0\0\0\0";
        CHECK(memcmp(&text[64 + 80], row, sizeof(row)) == 0, "the row's numbers are others");
        write_state(path, {{"a", "\n"}}, {{state_row("x", "bf16", 1, 1, 0, 1), "\1\2"}});
        CHECK(read_text(path) == text, "the same state made another file");
    }
    TEST("state file: more of them than a process may open") {
        check_lives("40 of them", [&] {
            write_state(path, kOddFacts, small_pieces());
            const rlimit few = {16, 16};
            setrlimit(RLIMIT_NOFILE, &few);
            std::vector<StateFile> files(40);
            std::vector<char> data;
            for (StateFile& s : files) { if (!state_open(&s, path).empty()) { _exit(1); } }
            for (StateFile& s : files) { if (!read_piece(s, 0, &data).empty()) { _exit(2); } }
        });
    }
    TEST("state file: what is none") {
        StateFile s;
        const std::string pipe = in_folder("pipe");
        CHECK(mkfifo(pipe.c_str(), 0600) == 0, "%s", strerror(errno));
        alarm(60);                                  // who waits for a pipe ends by a signal
        const struct { std::string path; const char* error; } none[] = {
            {in_folder("missing"), "cannot be opened: No such file"}, {folder, "is a folder"},
            {pipe, "is a pipe"}, {"/dev/null", "is a device"}};
        for (const auto& n : none) {
            const std::string error = state_open(&s, n.path);
            CHECK(error.find(n.error) == 0, "%s: '%s'", n.path.c_str(), error.c_str());
        }
        alarm(0);
        write_text(path, std::string(1000, 'x'));
        CHECK_TEXT(state_open(&s, path), "is not a state file");
        write_state(path, {}, {});
        std::string text = read_text(path);
        text[8] = 2;
        write_text(path, text);
        CHECK_TEXT(state_open(&s, path), "has version 2, and this program reads 1");
    }
}

static void test_state_damage() {
    const std::string path = in_folder("damage.bin");
    write_state(path, kOddFacts, small_pieces());
    const std::string good = read_text(path);
    TEST("state file: every changed byte is noticed") {
        CHECK_TEXT(state_error(path), "");
        int unnoticed = 0;
        for (size_t i = 0; i < good.size(); i++) {
            for (int flip : {0x01, 0x80, 0xFF}) {
                std::string bad = good;
                bad[i] = (char)(bad[i] ^ flip);
                write_text(path, bad);
                if (state_error(path).empty()) { unnoticed++; printf("byte %zu ^ %x\n", i, flip); }
            }
        }
        CHECK(unnoticed == 0, "%d changed bytes of %zu are not noticed", unnoticed, good.size());
    }
    TEST("state file: every other length is noticed") {
        int unnoticed = 0;
        for (size_t bytes = 0; bytes < good.size(); bytes++) {
            write_text(path, good.substr(0, bytes));
            unnoticed += state_error(path).empty();
        }
        CHECK(unnoticed == 0, "%d of %zu lengths are not noticed", unnoticed, good.size());
        for (const std::string& more : {std::string(1, '\0'), good}) {
            write_text(path, good + more);
            CHECK(holds(state_error(path), "and its header says"), "%s",
                  state_error(path).c_str());
        }
    }
    TEST("state file: cut short, or changed, after it was opened") {
        write_text(path, good);
        StateFile s;
        std::vector<char> data;
        CHECK(state_open(&s, path).empty(), "it cannot be opened");
        CHECK(truncate(path.c_str(), (off_t)good.size() - 1) == 0, "%s", strerror(errno));
        CHECK(read_piece(s, 0, &data).empty(), "its first piece is whole");
        CHECK_TEXT(read_piece(s, s.rows.size() - 1, &data), "is truncated");
        std::string bad = good;
        bad[s.rows[1].offset]++;
        write_text(path, bad);
        const std::string error = read_piece(s, 1, &data);
        CHECK(error.find("is damaged: the data of m.qkvw.11") == 0, "%s", error.c_str());
    }
}

// A file whose start was changed by somebody who then made its checksum fit.
typedef std::function<void(StateHeader*, StateRow*)> Change;
static std::string forged(const std::string& good, const Change& change) {
    std::string bad = good;
    StateHeader header;
    std::vector<StateRow> rows;
    memcpy(&header, bad.data(), sizeof(header));
    rows.resize(header.pieces);
    const size_t rows_bytes = rows.size() * sizeof(StateRow), facts_at = sizeof(header) + rows_bytes;
    memcpy(rows.data(), &bad[sizeof(header)], rows_bytes);
    const StateHeader before = header;
    change(&header, rows.data());
    StateHeader summed = header;                    // with the numbers that say how much is summed
    summed.pieces = before.pieces;
    summed.facts_bytes = before.facts_bytes;
    if (memcmp(&summed, &header, sizeof(header)) == 0) {
        header.checksum = state_start_checksum(header, rows.data(), &bad[facts_at]);
    }
    memcpy(&bad[0], &header, sizeof(header));
    memcpy(&bad[sizeof(header)], rows.data(), rows_bytes);
    return bad;
}

// Numbers that overflow something, or are one beside the right one.
static std::vector<uint64_t> odd_numbers(uint64_t now) {
    std::vector<uint64_t> numbers = {0, 1, now - 1, now + 1, now + 64, now * 2};
    for (int bit : {16, 24, 31, 32, 33, 47, 48, 61, 62, 63}) {
        const uint64_t power = 1ull << bit;
        numbers.insert(numbers.end(), {power - 1, power, power + 1, now + power, 0 - power});
    }
    numbers.push_back(UINT64_MAX);
    numbers.erase(std::remove(numbers.begin(), numbers.end(), now), numbers.end());
    return numbers;
}

static void test_state_hostile() {
    const std::string path = in_folder("hostile.bin");
    write_state(path, kOddFacts, small_pieces());
    const std::string good = read_text(path);
    const size_t number_of_pieces = small_pieces().size();
    largest_wanted = 0;
    state_error(path);
    const size_t needed = std::max((size_t)largest_wanted, good.size());
    TEST("state file: a header's odd numbers") {
        int taken = 0;
        largest_wanted = 0;
        StateHeader now;
        memcpy(&now, good.data(), sizeof(now));
        const struct { uint64_t now; void (*set)(StateHeader*, uint64_t); } fields[] = {
            {now.pieces, [](StateHeader* h, uint64_t n) { h->pieces = (uint32_t)n; }},
            {now.facts_bytes, [](StateHeader* h, uint64_t n) { h->facts_bytes = n; }},
            {now.file_bytes, [](StateHeader* h, uint64_t n) { h->file_bytes = n; }}};
        for (const auto& f : fields) {
            for (uint64_t n : odd_numbers(f.now)) {
                if (&f == fields && (uint32_t)n == now.pieces) { continue; }    // a field of 32 bits
                write_text(path, forged(good, [&](StateHeader* h, StateRow*) { f.set(h, n); }));
                taken += state_error(path).empty();
            }
        }
        CHECK(taken == 0, "%d were taken", taken);
        CHECK(largest_wanted <= 2 * needed, "it wanted %zu bytes", (size_t)largest_wanted);
    }
    TEST("state file: a table's odd numbers, with a checksum that fits") {
        const size_t fields[] = {offsetof(StateRow, rows), offsetof(StateRow, cols),
                                 offsetof(StateRow, begin), offsetof(StateRow, count),
                                 offsetof(StateRow, offset), offsetof(StateRow, checksum)};
        int taken = 0;
        largest_wanted = 0;
        for (size_t row = 0; row < number_of_pieces; row++) {
            for (size_t field : fields) {
                uint64_t now;
                memcpy(&now, &good[sizeof(StateHeader) + row * sizeof(StateRow) + field], sizeof(now));
                for (uint64_t n : odd_numbers(now)) {
                    write_text(path, forged(good, [&](StateHeader*, StateRow* rows) {
                        memcpy((char*)&rows[row] + field, &n, sizeof(n));
                    }));
                    StateFile s;
                    const std::string error = state_open(&s, path);
                    if (error.empty()) {            // other shapes may hold these elements as well
                        const StateRow& r = s.rows[row];
                        const uint64_t elements = r.rows * r.cols, most = 1ull << 48;
                        const bool fits = r.rows < most && r.cols < most && elements < most &&
                                          r.begin < elements && r.count <= elements - r.begin;
                        const bool placed = field == offsetof(StateRow, count) ||
                                            field == offsetof(StateRow, offset);
                        const bool summed = field == offsetof(StateRow, checksum);
                        taken += !fits || placed || (summed && state_error(path).empty());
                    }
                }
            }
        }
        CHECK(taken == 0, "%d were taken", taken);
        CHECK(largest_wanted <= 2 * needed, "it wanted %zu bytes", (size_t)largest_wanted);
    }
    TEST("state file: other lies") {
        typedef StateHeader H;
        typedef StateRow R;
        const struct { const char* what; Change lie; const char* error; } lies[] = {
            {"no name", [](H*, R* r) { r->name[0] = 0; }, "without a name"},
            {"a name without an end", [](H*, R* r) { memset(r->name, 'n', 64); }, "without a name"},
            {"a type without an end", [](H*, R* r) { memset(r->type, 'f', 16); }, "unknown type"},
            {"an unknown type", [](H*, R* r) { memcpy(r->type, "f64", 4); }, "unknown type"},
            {"overlap", [](H*, R* r) { r[1].offset = r[0].offset; }, "m.qkvw.11 whose numbers cannot be"},
            {"two that are swapped", [](H*, R* r) { std::swap(r[0], r[1]); }, "numbers cannot be"},
            {"one after the end", [](H* h, R* r) { r[3].offset = h->file_bytes; }, "numbers cannot be"},
            {"bytes of no piece", [](H*, R* r) { memcpy(r[3].type, "bf16", 5); }, "belong to no tensor"},
            {"control characters", [](H*, R* r) { memcpy(r->name, "\x1b[2J", 5); r->rows = 0; },
             "tensor \\x1b[2J whose"}};
        for (const auto& l : lies) {
            write_text(path, forged(good, l.lie));
            const std::string error = state_error(path);
            CHECK(holds(error, l.error), "%s: '%s'", l.what, error.c_str());
        }
        for (const char* facts : {"a", "a=b", "a\n", "a=b\\\n", "a=b\\x\n", "\n", "a=b\nc", "a=b\\"}) {
            Facts parsed;
            CHECK(!facts_parse(facts, &parsed), "'%s' is taken", shown(facts).c_str());
        }
        Facts parsed;
        CHECK(facts_parse("", &parsed) && parsed.empty(), "no facts cannot be read");
    }
}

// ---- checkpoints.h: files ----

constexpr int kModelBytes = 1024 + 48;

static std::string model_bytes(char fill, bool summed = true) {
    std::string bytes(kModelBytes, '\0');
    const int header[] = {20240326, 3, 1, 1, 1, 1, 1, 1};
    memcpy(&bytes[0], header, sizeof(header));
    for (size_t i = 1024; i < bytes.size(); i++) { bytes[i] = (char)(fill + i); }
    const uint64_t sum = checksum(bytes.data(), bytes.size());
    if (summed) { memcpy(&bytes[4 * kModelChecksumWord], &sum, sizeof(sum)); }
    return bytes;
}

static void write_model(const std::string& path, char fill) {
    const std::string bytes = model_bytes(fill);
    AtomicFile out = atomic_open(path);
    atomic_write(&out, std::string(1024, '\0').data(), 1024);       // the checksum comes last
    atomic_write(&out, &bytes[1024], bytes.size() - 1024);
    atomic_rewind(&out);
    atomic_write(&out, bytes.data(), 1024);
    atomic_commit(&out);
}

// As the trainer does it: the states of all ranks, the model, the marker.
static std::vector<std::string> write_checkpoint(const std::string& run, int64_t step, int ranks = 1,
                                                 const Facts& more = {}) {
    std::vector<std::string> states;
    if (!checkpoint_begin(run, step)) { die("cannot begin in '%s': %s", run.c_str(), strerror(errno)); }
    for (int r = 0; r < ranks; r++) {
        Facts facts = {{"step", std::to_string(step)}, {"rank", std::to_string(r)}};
        facts.insert(facts.end(), more.begin(), more.end());
        states.push_back(checkpoint_state(run, step, r));
        write_state(states.back(), facts, small_pieces());
    }
    write_model(checkpoint_model(run, step), (char)step);
    checkpoint_done(run, step, states);
    return states;
}

static std::string check(const std::string& run, int64_t step) {
    std::vector<std::string> states;
    return checkpoint_check(run, step, &states);
}

static void test_names() {
    TEST("checkpoints: names") {
        CHECK_TEXT(checkpoint_model("r", 12), "r/model_00000012.bin");
        CHECK_TEXT(checkpoint_state("r", 5000000000, 7), "r/state_5000000000_00007.bin");
        CHECK_TEXT(checkpoint_marker("r", 0), "r/DONE_00000000");
        const struct { const char *name, *before, *after; int64_t number; } names[] = {
            {"DONE_00000012", "DONE_", "", 12}, {"DONE_", "DONE_", "", -1}, {"DONE_1x", "DONE_", "", -1},
            {"DONE_-1", "DONE_", "", -1}, {"DONE_ 1", "DONE_", "", -1}, {"xDONE_1", "DONE_", "", -1},
            {"DONE_999999999999999999", "DONE_", "", 999999999999999999},
            {"DONE_9999999999999999999", "DONE_", "", -1}, {"DONE_1.7.0.part", "DONE_", "", -1},
            {"a1.bin", "a", ".bin", 1}, {"a.bin", "a", ".bin", -1}, {"a1.binx", "a", ".bin", -1}};
        for (const auto& n : names) {
            CHECK(checkpoint_number(n.name, n.before, n.after) == n.number, "%s: %lld", n.name,
                  (long long)checkpoint_number(n.name, n.before, n.after));
        }
        const std::string run = new_folder("names");
        for (const char* name : {"DONE_00000100", "DONE_00000020", "DONE_5000000000", "DONE_00000003",
                                 "DONE_7", "DONE_000000020", "DONE_00000001.8.0.part", "done_00000002",
                                 "DONE_0000000x"}) {
            write_text(run + "/" + name, "");
        }
        const std::vector<int64_t> expected = {3, 20, 100, 5000000000};
        const std::vector<int64_t> steps = checkpoint_steps(run);
        CHECK(steps == expected, "%zu steps, the first is %lld", steps.size(),
              (long long)(steps.empty() ? -1 : steps[0]));
        CHECK(checkpoint_steps(run + "/none").empty(), "checkpoints in a folder that is not there");
        for (const char* name : {"state_00000001_00000.bin", "state_00000002_00007.bin", "HALF_00000001",
                                 "state_00000003_00000.bin", "state_7_00000.bin", "model_00000009.bin"}) {
            write_text(run + "/" + name, "");
        }
        CHECK(checkpoint_steps(run) == expected, "%zu of them have a marker", checkpoint_steps(run).size());
        CHECK(checkpoint_steps(run, true) == std::vector<int64_t>({2, 3, 20, 100, 5000000000}),
              "%zu with those that lost it", checkpoint_steps(run, true).size());
    }
}

static void test_marker() {
    const std::string run = new_folder("marker"), marker = checkpoint_marker(run, 20);
    write_checkpoint(run, 10);
    const std::vector<std::string> states = write_checkpoint(run, 20, 3);
    const std::string model = checkpoint_model(run, 20);
    TEST("checkpoints: whole ones") {
        std::vector<std::string> found = {"what was there before"};
        CHECK(checkpoint_check(run, 20, &found).empty(), "%s", check(run, 20).c_str());
        CHECK(found == states, "%zu states", found.size());
        CHECK_TEXT(check(run, 10), "");
        CHECK_TEXT(check(run, 30), "DONE_00000030 cannot be opened");
        CHECK(read_text(marker).find("model_00000020.bin 1072 ") == 0, "%s", read_text(marker).c_str());
        check_dies("a state that is not here", [&] {
            checkpoint_done(run, 40, {checkpoint_state(run, 10, 0), checkpoint_state(run, 40, 1)});
        }, {"model_00000040.bin' is written, but cannot be read here", "hint:"});
        check_dies("one of them", [&] {
            checkpoint_done(run, 20, {checkpoint_state(run, 20, 0), checkpoint_state(run, 20, 3)});
        }, {"state_00000020_00003.bin' is written, but cannot be read here", "hint:"});
        CHECK_TEXT(check(run, 20), "");
    }
    TEST("checkpoints: files that are missing, mixed up or changed") {
        std::vector<std::string> files = states;
        files.push_back(model);
        for (const std::string& path : files) {
            const std::string good = read_text(path), name = path.substr(run.size() + 1);
            const bool is_model = path == model;
            unlink(path.c_str());
            CHECK_TEXT(check(run, 20), name + " is missing");
            const std::string other = is_model ? checkpoint_model(run, 10) : checkpoint_state(run, 10, 0);
            const std::string damaged[] = {read_text(other), good.substr(0, good.size() - 1), good + "x",
                                           "", good.substr(0, 40), std::string(5000, '\0')};
            for (const std::string& bad : damaged) {
                write_text(path, bad);
                CHECK(check(run, 20).find(name + " is not the file that was written") == 0, "%s: %s",
                      name.c_str(), check(run, 20).c_str());
            }
            std::string bad = good;                 // as if it had been written by another save
            bad[is_model ? 4 * kModelChecksumWord : offsetof(StateHeader, checksum)] ^= 1;
            write_text(path, bad);
            CHECK(check(run, 20).find(name + " is not the file") == 0, "%s", check(run, 20).c_str());
            write_text(path, good);
        }
        CHECK_TEXT(check(run, 20), "");
    }
    TEST("checkpoints: a damaged marker") {
        const std::string good = read_text(marker);
        int unnoticed = 0;
        for (size_t i = 0; i < good.size(); i++) {
            for (int flip : {0x01, 0x20, 0x80}) {
                std::string bad = good;
                bad[i] = (char)(bad[i] ^ flip);
                write_text(marker, bad);
                unnoticed += check(run, 20).empty();
            }
            write_text(marker, good.substr(0, i));
            unnoticed += check(run, 20).empty();
        }
        CHECK(unnoticed == 0, "%d of %zu changes are not noticed", unnoticed, good.size() * 4);
        write_text(marker, good + "\n");
        CHECK_TEXT(check(run, 20), "DONE_00000020 is damaged");
        checkpoint_done(run, 20, {});
        CHECK_TEXT(check(run, 20), "DONE_00000020 names no state");
        unlink(marker.c_str());
        mkdir_check(marker.c_str());
        CHECK_TEXT(check(run, 20), "DONE_00000020 cannot be opened");
    }
    TEST("checkpoints: that lost their marker") {
        const std::string lost = new_folder("lost");
        const std::vector<std::string> three = write_checkpoint(lost, 20, 3);
        std::vector<std::string> found;
        CHECK(!holds(listing(lost), "HALF"), "%s", listing(lost).c_str());
        unlink(checkpoint_marker(lost, 20).c_str());
        CHECK(checkpoint_check(lost, 20, &found).empty() && found == three, "%s", check(lost, 20).c_str());
        const std::string good = read_text(three[1]), model_text = read_text(checkpoint_model(lost, 20));
        auto state = [&](const Facts& facts) { write_state(three[1], facts, small_pieces()); };
        const struct { std::function<void()> change; std::string path, error; } changes[] = {
            {[&] { unlink(three[1].c_str()); }, three[1], "_00001.bin is missing"},
            {[&] { write_text(three[1], good.substr(0, 99)); }, three[1], "_00001.bin has 99 bytes"},
            {[&] { state({{"step", "10"}}); }, three[1], "_00001.bin is of another save"},
            {[&] { state({{"step", "20"}, {"position", "7"}}); }, three[1], "_00001.bin is of another save"},
            {[&] { unlink(checkpoint_model(lost, 20).c_str()); }, checkpoint_model(lost, 20),
             "model_00000020.bin is missing"}};
        for (const auto& c : changes) {
            c.change();
            CHECK(holds(check(lost, 20), c.error), "%s: %s", c.error.c_str(),
                  check(lost, 20).c_str());
            write_text(c.path, c.path == three[1] ? good : model_text);
        }
        checkpoint_clean(lost);
        CHECK(check(lost, 20).empty(), "it is removed:%s", listing(lost).c_str());
    }
    TEST("checkpoints: in which order a run looks at them") {
        const std::string order = new_folder("order_of");
        const struct { int64_t step; const char *rewinds, *skipped; } rows[] = {
            {10, "0", "0"}, {13, "0", "0"}, {15, "1", "0"}, {20, "0", "3"}, {25, "0", "8"}, {30, "0", "13"}};
        for (const auto& r : rows) {
            write_checkpoint(order, r.step, 1,
                             {{"rewinds", r.rewinds}, {"update.skipped_in_a_row", r.skipped}});
        }
        const std::vector<int64_t> newest = {10, 13, 20, 25, 30, 15}, before = {13, 20, 25, 10, 15};
        CHECK(checkpoint_newest(order) == newest, "the last is %lld",
              (long long)checkpoint_newest(order).back());
        CHECK(checkpoint_before(order, 25, 5) == before, "the last is %lld",
              (long long)checkpoint_before(order, 25, 5).back());
        write_text(checkpoint_state(order, 20, 0), "");             // it may be the newest: it is named first
        CHECK(checkpoint_newest(order).back() == 20, "%lld", (long long)checkpoint_newest(order).back());
    }
    TEST("checkpoints: of more ranks than fit a megabyte") {
        const std::string many = new_folder("many");
        write_checkpoint(many, 1);
        const std::vector<std::string> same(30000, checkpoint_state(many, 1, 0));
        checkpoint_done(many, 1, same);
        CHECK(file_size(checkpoint_marker(many, 1).c_str()) > 1 << 20, "the marker is small");
        CHECK_TEXT(check(many, 1), "");
    }
}

static void test_model_file() {
    TEST("checkpoints: a model's checksum") {
        const std::string path = in_folder("model.bin"), good = model_bytes('a');
        uint64_t sum = 1;
        write_model(path, 'a');
        CHECK(read_text(path) == good, "written in two goes it is another");
        CHECK(model_file_error(path, &sum).empty() && sum != 0, "%s", model_file_error(path, &sum).c_str());
        int unnoticed = 0;
        for (size_t i = 0; i < good.size(); i++) {
            std::string bad = good;
            bad[i] = (char)(bad[i] ^ 0x10);
            write_text(path, bad);
            unnoticed += model_file_error(path, &sum).empty();
        }
        CHECK(unnoticed == 0, "%d changed bytes of %zu are not noticed", unnoticed, good.size());
        for (size_t bytes : {good.size() - 1, (size_t)1024, (size_t)1023, (size_t)0}) {
            write_text(path, good.substr(0, bytes));
            CHECK(!model_file_error(path, &sum).empty(), "%zu bytes of it are enough", bytes);
        }
        write_text(path, model_bytes('a', false));          // llm.c's have none
        CHECK(model_file_error(path, &sum).empty() && sum == 0, "%s", model_file_error(path, &sum).c_str());
        CHECK(model_file_error(in_folder("none"), &sum).find("cannot be opened: No such") == 0, "%s",
              model_file_error(in_folder("none"), &sum).c_str());
        CHECK(model_file_error(folder, &sum).find("cannot be read: Is a directory") == 0, "a folder: %s",
              model_file_error(folder, &sum).c_str());
    }
}

// A model of one tensor, whose padded vocabulary has two rows.
static std::vector<ParamSpec> tiny_table(const Config& c) {
    return {param_spec("wte", 4, Where::Global, (size_t)c.Vp, (size_t)c.C, Init::Normal, Kind::Matrix,
                       (size_t)c.V, 0, "", c.L)};
}

static void test_model_types() {
    Config c = {};
    c.maxT = 1, c.V = 6, c.Vp = 8, c.L = 1, c.NH = 1, c.C = 8;
    c.norm = NormKind::Rms, c.residual_fp32 = true;
    const size_t n = 64, live = 48;
    std::vector<float> values(n);                       // each type has these
    std::vector<uint16_t> bf16(n), f16(n);
    for (size_t k = 0; k < n; k++) {
        values[k] = (k % 2 ? -1.0f : 1.0f) * ldexpf(1.0f + (float)(k / 8) / 8, (int)(k % 8) - 4);
        bf16[k] = bf16_round_nearest(values[k]);
        f16[k] = (uint16_t)((k % 2) << 15 | (k % 8 + 11) << 10 | (k / 8) << 7);
    }
    const struct { const char *name, *type; const void* data; bool to_bf16; } cases[] = {
        {"model files: fp32", "f32", values.data(), false},
        {"model files: bf16 into fp32", "bf16", bf16.data(), false},
        {"model files: fp16 into fp32", "f16", f16.data(), false},
        {"model files: fp32 into bf16", "f32", values.data(), true},
        {"model files: bf16", "bf16", bf16.data(), true}};
    for (const auto& it : cases) {
        TEST(it.name) {
            const std::string path = in_folder("types.bin");
            ModelWriter w = model_begin(path, c, it.to_bf16);
            model_write(&w, it.data, n, it.type);
            model_commit(&w);
            CHECK(file_size(path.c_str()) == (it.to_bf16 ? 1024 + 128 : 1024 + 256), "its size");
            const Config has = model_read_config(path.c_str(), tiny_table);
            CHECK(has.V == c.V && has.norm == c.norm && has.block == c.block && has.residual_fp32, "header");
            int calls = 0;
            model_read(path.c_str(), tiny_table, has, [&](int i, int l, const float* read) {
                calls += i == 0 && l == 0 && std::equal(read, read + live, values.data()) &&
                         std::count(read + live, read + n, 0.0f) == (long)(n - live);
            });
            CHECK(calls == 1, "it reads back as something else");
        }
    }
}

static std::string steps_of(const std::string& run) {
    std::string steps;
    for (int64_t step : checkpoint_steps(run)) { steps += (steps.empty() ? "" : " ") + std::to_string(step); }
    return steps;
}

static void test_retention() {
    TEST("checkpoints: which ones stay") {
        const struct { int keep, major; std::set<int64_t> bad; int64_t newest; const char* stay; } rows[] = {
            {0, 0, {}, 60, "10 20 30 40 50 60"},
            {1, 0, {}, 60, "60"},
            {2, 0, {}, 60, "50 60"},
            {6, 0, {}, 60, "10 20 30 40 50 60"},
            {99, 0, {}, 60, "10 20 30 40 50 60"},
            {1, 30, {}, 50, "30 50 60"},                    // 60 comes later, and is a multiple anyway
            {1, 25, {}, 60, "50 60"},
            {2, 20, {}, 60, "20 40 50 60"},                 // multiples are counted among the last two
            {1, 10, {}, 60, "10 20 30 40 50 60"},
            {1, 0, {}, 40, "40 50 60"},                     // of a future that the run went back from
            {2, 0, {50}, 60, "40 50 60"},                   // a damaged one does not take a good one's place
            {1, 0, {30, 40, 50}, 60, "30 40 50 60"},
            {1, 0, {60}, 50, "50 60"},
        };
        int number = 0;
        for (const auto& row : rows) {
            const std::string run = new_folder(format("keep%d", number++).c_str());
            for (int64_t step = 10; step <= 60; step += 10) { write_checkpoint(run, step, 2); }
            write_text(run + "/main.log", "");
            checkpoint_retain(run, row.newest, {row.keep, row.major, 1, row.bad});
            CHECK_TEXT(steps_of(run), row.stay);
            for (int64_t step : checkpoint_steps(run)) { CHECK_TEXT(check(run, step), ""); }
            const size_t files = folder_names(run).size(), whole = checkpoint_steps(run).size();
            CHECK(files == 4 * whole + 3, "%zu files of %zu checkpoints:%s", files, whole,
                  listing(run).c_str());
        }
    }
    TEST("checkpoints: one from before skipped updates stays") {
        const struct { int every; const char* stay; } rows[] = {{1, "30 60"}, {20, "20 60"}, {50, "60"}};
        for (const auto& row : rows) {
            const std::string run = new_folder(format("calm%d", row.every).c_str());
            for (int64_t step = 10; step <= 60; step += 10) {
                write_checkpoint(run, step, 1, {{"update.skipped_in_a_row", step <= 30 ? "0" : "5"}});
            }
            checkpoint_retain(run, 60, {1, 0, row.every, {}});
            CHECK_TEXT(steps_of(run), row.stay);
        }
    }
    TEST("checkpoints: what cannot be removed is named, and tried again") {
        const std::string run = new_folder("stuck"), model = checkpoint_model(run, 10);
        write_checkpoint(run, 10, 2);
        Child refused = run_child([&] {
            file_layer.rename = [](const char*, const char*) { errno = EPERM; return -1; };
            checkpoint_remove(run, 10);
        });
        CHECK(refused.err.find("warning: cannot remove '" + checkpoint_marker(run, 10)) == 0 &&
              check(run, 10).empty(), "%s;%s", refused.err.c_str(), listing(run).c_str());
        unlink(model.c_str());
        mkdir_check(model.c_str());                         // not even root can unlink a folder
        Child stuck = run_child([&] { checkpoint_remove(run, 10); });
        CHECK(stuck.err.find("warning: cannot remove '" + model + "': Is a directory\n") == 0, "%s",
              stuck.err.c_str());
        CHECK_TEXT(listing(run), " HALF_00000010 model_00000010.bin");
        rmdir(model.c_str());
        checkpoint_clean(run);
        CHECK_TEXT(listing(run), "");
    }
    TEST("checkpoints: the marker is the first to go") {
        const std::string run = new_folder("order");
        write_checkpoint(run, 10, 2);
        const int watch = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
        if (watch < 0 || inotify_add_watch(watch, run.c_str(), IN_DELETE | IN_MOVED_FROM) < 0) {
            SKIP(2, "no inotify: %s", strerror(errno));
        } else {
            checkpoint_remove(run, 10);
            alignas(inotify_event) char events[4096];
            const ssize_t n = read(watch, events, sizeof(events));
            const inotify_event* first = (const inotify_event*)events;
            CHECK(n > 0 && strcmp(first->name, "DONE_00000010") == 0, "%zd, %s", n, n > 0 ? first->name : "");
            CHECK(listing(run).empty(), "these are left:%s", listing(run).c_str());
        }
        if (watch >= 0) { close(watch); }
    }
}

static void test_clean() {
    TEST("checkpoints: what a kill in a save leaves") {
        const std::string run = new_folder("clean");
        write_checkpoint(run, 10, 2);
        write_checkpoint(run, 20, 2);
        write_checkpoint(run, 50, 2);
        checkpoint_begin(run, 20);
        unlink(checkpoint_marker(run, 50).c_str());         // lost, by whatever accident
        write_text(checkpoint_half(run, 10), "");           // killed behind its marker
        write_model(checkpoint_model(run, 40), 'm');        // alone: somebody's
        for (const char* name : {"main.log", "mine.bin", "state_x_00000.bin", "state_00000020_.bin",
                                 "notes.part", "state_00000020_00000.txt"}) {
            write_text(run + "/" + name, "mine");
        }
        const std::vector<std::string> kinds = {checkpoint_model(run, 20), checkpoint_state(run, 20, 0),
                                                checkpoint_marker(run, 20)};
        Child killed = run_child([&] {
            for (const std::string& path : kinds) { atomic_open(path); }
            kill(getpid(), SIGKILL);
        });
        CHECK(killed.code == -SIGKILL, "%d", killed.code);
        AtomicFile living = atomic_open(checkpoint_state(run, 30, 0));
        AtomicFile living_marker = atomic_open(checkpoint_marker(run, 30));
        checkpoint_clean(run);
        std::string expected = " DONE_00000010 " + living_marker.temp.substr(run.size() + 1);
        expected += " main.log mine.bin model_00000010.bin model_00000040.bin model_00000050.bin "
                    "notes.part state_00000010_00000.bin state_00000010_00001.bin state_00000020_.bin "
                    "state_00000020_00000.txt ";
        expected += living.temp.substr(run.size() + 1);
        expected += " state_00000050_00000.bin state_00000050_00001.bin state_x_00000.bin";
        CHECK(listing(run) == expected, "%s\nexpected%s", listing(run).c_str(), expected.c_str());
        CHECK_TEXT(check(run, 10), "");
        atomic_commit(&living);
        atomic_commit(&living_marker);
        checkpoint_clean(run + "/none");
    }
}

// ---- a disk that refuses ----

enum { WRITE, FLUSH, SYNC, RENAME, CLOSE, OPERATIONS };
static const char* const kOperations[OPERATIONS] = {"fwrite", "fflush", "fsync", "rename", "fclose"};
static int countdown[OPERATIONS];               // which call fails; 0: none

static bool refused(int operation) {
    if (countdown[operation] == 0 || --countdown[operation] > 0) { return false; }
    errno = ENOSPC;
    return true;
}

static void fail_at(int operation, int k) {
    countdown[operation] = k;
    file_layer.fwrite = [](const void* data, size_t size, size_t count, FILE* f) {
        return refused(WRITE) ? fwrite(data, size, count / 2, f) : fwrite(data, size, count, f);
    };
    file_layer.fflush = [](FILE* f) { return refused(FLUSH) ? EOF : fflush(f); };
    file_layer.fsync = [](int) { return refused(SYNC) ? -1 : 0; };
    file_layer.rename = [](const char* a, const char* b) { return refused(RENAME) ? -1 : rename(a, b); };
    file_layer.fclose = [](FILE* f) {
        const bool no = refused(CLOSE);
        return (fclose(f) != 0 || no) ? (errno = no ? ENOSPC : errno, EOF) : 0;
    };
}

static void test_refusals() {
    TEST("checkpoints: every call that a disk can refuse") {
        const std::string run = new_folder("refused");
        write_checkpoint(run, 1, 2);
        for (int operation = 0; operation < OPERATIONS; operation++) {
            int k = 1;
            for (;; k++) {
                const Child c = run_child([&] {
                    fail_at(operation, k);
                    write_checkpoint(run, 2, 2);
                    _exit(countdown[operation] > 0 ? 0 : 42);       // not called so often; nobody noticed
                });
                if (c.code == 0) { break; }
                const std::string what = format("%s, call %d", kOperations[operation], k);
                const long lines = std::count(c.err.begin(), c.err.end(), '\n');
                CHECK(c.code == 1 && lines >= 1 && lines <= 3 && holds(c.err, "No space left") &&
                      holds(c.err, "/"), "%s: %d, %s", what.c_str(), c.code, c.err.c_str());
                CHECK(check(run, 1).empty(), "%s: the one before: %s", what.c_str(), check(run, 1).c_str());
                CHECK(!holds(listing(run), ".part"), "%s:%s", what.c_str(), listing(run).c_str());
                CHECK(file_size(checkpoint_marker(run, 2).c_str()) < 0 || check(run, 2).empty(), "%s: %s",
                      what.c_str(), check(run, 2).c_str());
                checkpoint_remove(run, 2);
            }
            // three states and a model are four files; the marker is the last
            const int files = 4, least[OPERATIONS] = {6 * 2, files + 3, 2 * files, files, files};
            CHECK(k > least[operation], "%s: only %d calls", kOperations[operation], k - 1);
            checkpoint_remove(run, 2);
        }
    }
    TEST("checkpoints: a disk that refuses the writer's thread ends the program") {
        const std::string run = new_folder("thread");
        write_checkpoint(run, 1);
        check_dies("fsync", [&] {
            alarm(60);
            Worker* worker = worker_start();
            fail_at(SYNC, 3);
            worker_post(worker, [&] { write_checkpoint(run, 2); });
            worker_wait(worker);
            _exit(0);
        }, {"cannot write", "model_00000002.bin", "No space left"});
        CHECK(check(run, 1).empty() && !holds(listing(run), ".part"), "%s",
              listing(run).c_str());
    }
}

// ---- the thread ----

static void test_worker() {
    TEST("worker: a program may end while it works") {
        Child c = run_child([] {
            static std::atomic<bool> began(false);
            Worker* worker = worker_start();
            worker_post(worker, [] { began = true; for (;;) { pause(); } });
            while (!began) { std::this_thread::yield(); }
            exit(3);
        });
        CHECK(c.code == 3, "%d: %s", c.code, c.err.c_str());
    }
    TEST("worker: one thing after the other, and waiting for it") {
        alarm(120);                                 // a wait that never ends
        Worker* worker = worker_start();
        CHECK(!worker_busy(worker), "it is busy before there is work");
        worker_wait(worker);
        int sum = 0;                                // no lock: the worker's own one has to do
        bool in_order = true;
        for (int i = 1; i <= 1000; i++) {
            worker_post(worker, [&, i] { in_order = in_order && sum == i * (i - 1) / 2; sum += i; });
            worker_wait(worker);
            in_order = in_order && sum == i * (i + 1) / 2 && !worker_busy(worker);
        }
        CHECK(in_order && sum == 500500, "the sum is %d", sum);
        std::atomic<bool> go(false), began(false);
        worker_post(worker, [&] {
            began = true;
            while (!go) { std::this_thread::yield(); }
            sum = -1;
        });
        while (!began) { std::this_thread::yield(); }
        CHECK(worker_busy(worker) && sum == 500500, "it is idle while it works");
        go = true;
        while (worker_busy(worker)) { std::this_thread::yield(); }
        CHECK(sum == -1, "idle, but what it did cannot be seen");
        std::vector<int> order;
        worker_post(worker, [&] { order.push_back(1); });
        worker_wait(worker);
        Worker* other = worker_start();
        worker_post(other, [&] { order.push_back(2); });
        worker_wait(other);
        worker_wait(worker);
        CHECK(order == std::vector<int>({1, 2}), "%zu", order.size());
        alarm(0);
    }
}

// ---- build/checkpoint ----

static void check_tool(const std::string& words, int code, const std::vector<std::string>& parts,
                       const std::vector<std::string>& absent = {}) {
    const std::string out = in_folder("tool.out");
    const std::string command = "(build/checkpoint " + words + ") > " + out + " 2>&1";
    const int ended = exit_code(system(command.c_str()));
    const std::string text = read_text(out);
    CHECK(ended == code, "%s: exit code %d: %s", words.c_str(), ended, text.c_str());
    for (const std::string& part : parts) {
        CHECK(holds(text, part), "%s: no '%s' in:\n%s", words.c_str(), part.c_str(), text.c_str());
    }
    for (const std::string& part : absent) {
        CHECK(!holds(text, part), "%s: '%s' in:\n%s", words.c_str(), part.c_str(), text.c_str());
    }
}

static void test_tool() {
    if (access("build/checkpoint", X_OK) != 0) {
        SKIP(63, "no build/checkpoint: run `make checkpoint`, and this in the same folder");
        return;
    }
    const std::string run = new_folder("tool"), path = run + "/state.bin", model = run + "/model.bin";
    write_state(path, kOddFacts, small_pieces());
    const std::string good = read_text(path);
    TEST("build/checkpoint: a state") {
        check_tool(path, 0, {path + ": ", "  step = 12\n", "  prompt = two\\nlines, a \\ and a \\n\\n\n",
                             "4 tensors, all as they were written\n"}, {"qkvw", "NOT SOUND"});
        check_tool("--tensors " + path, 0, {"m.qkvw.11", "2 x 5", "3 to 9", "all", "bf16",
                                            checksum_text(checksum(small_pieces()[1].data.data(), 28))});
        std::string bad = good;
        bad[good.size() - 1]++;                     // m.one; and of m.qkvw.11
        bad[good.size() - 10]++;
        write_text(path, bad);
        check_tool(path, 1, {"NOT SOUND: it is damaged: the data of m.qkvw.11", "data of m.one", "step = 12"},
                   {"all as they"});
        check_tool(path + " --tensors", 1, {"DAMAGED\n", "NOT SOUND"});
        write_text(path, good.substr(0, good.size() - 1));
        check_tool(path, 1, {"NOT SOUND: it has", "and its header says"});
    }
    TEST("build/checkpoint: a model") {
        // maxT, V, L, NH, C, Vp 1: 1 + 1 + 25 + 2 numbers
        std::string bytes(1024 + 4 * 29, '\1');
        memcpy(&bytes[0], model_bytes('a', false).data(), 1024);
        write_text(model, bytes);
        check_tool(model, 0, {"version 3 (fp32), maxT 1, V 1, L 1, NH 1, C 1, Vp 1", "no checksum"});
        const uint64_t sum = checksum(bytes.data(), bytes.size());
        memcpy(&bytes[4 * kModelChecksumWord], &sum, sizeof(sum));
        write_text(model, bytes);
        check_tool(model, 0, {"checksum " + checksum_text(sum) + ", as it was written"}, {"no checksum"});
        bytes[1100]++;
        write_text(model, bytes);
        check_tool(model, 1, {"NOT SOUND: it is damaged"});
        write_text(model, bytes + "x");
        check_tool(model, 1, {"NOT SOUND: it has 1141 bytes, and its header means 1140"});
        bytes[4] = 4;
        write_text(model, bytes);
        check_tool(model, 1, {"NOT SOUND: it has version 4"});
        write_text(model, "text");
        check_tool(model, 1, {"NOT SOUND: it is neither"});
    }
    TEST("build/checkpoint: a run") {
        const std::string twice = new_folder("tool_run");
        check_tool(twice, 0, {": 0 checkpoints\n"});
        const std::vector<std::string> states = write_checkpoint(twice, 10, 2);
        write_checkpoint(twice, 20);
        check_tool(twice, 0, {": 2 checkpoints\n", "step 10: 2.3 KiB in 3 files, sound\n", "step 20: "},
                   {"NOT SOUND"});
        unlink(checkpoint_marker(twice, 10).c_str());
        check_tool(twice, 0, {": 2 checkpoints\n", "in 3 files, sound, but without its DONE file\n"});
        std::string bad = read_text(states[1]);
        bad.back()++;                               // its start is as it was
        write_text(states[1], bad);
        check_tool(twice, 1, {"step 10: NOT SOUND: state_00000010_00001.bin is damaged: the data of m.one",
                              "step 20: "});
        unlink(checkpoint_model(twice, 20).c_str());
        check_tool(twice, 1, {"step 20: NOT SOUND: model_00000020.bin is missing"});
    }
    TEST("build/checkpoint: command lines") {
        check_tool("--help", 0, {"usage: build/checkpoint [--tensors] PATH...\n"});
        check_tool("", 1, {"error: no PATH is given\nhint: "});
        check_tool("--tensor " + run, 1, {"error: unknown flag '--tensor'\nhint: "});
        check_tool(run + "/none", 1, {"error: cannot open '" + run + "/none': No such file"});
        check_tool("/dev/null", 1, {"error: cannot read '/dev/null': it is a device"});
        check_tool(run + " > /dev/full", 1, {"cannot write to standard output: No space left"});
    }
}

int main() {
    folder_begin("checkpoints");
    file_layer.fsync = [](int) { return 0; };       // nobody cuts the power; that it is called is counted
    test_checksum();
    test_state_round_trip();
    test_state_damage();
    test_state_hostile();
    test_names();
    test_marker();
    test_model_file();
    test_model_types();
    test_retention();
    test_clean();
    test_refusals();
    test_tool();
    test_worker();                      // the last: a child of a program with threads has none of them
    return folder_end();
}
