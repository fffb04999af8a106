/*
Tests of what a run survives by: checksum.h, state_file.h, model_file.h, checkpoints.h, worker.h; and how
resume.h reads earlier states. Damage is tried exhaustively on small files: each byte, each length, each
field. test_resume.py resumes runs from such files, reads the format with a program of its own, and calls
build/checkpoint.
*/
#include <stddef.h>                     // gives: offsetof

#include <atomic>                       // gives: std::atomic
#include <new>                          // gives: std::bad_alloc

#include "llmc/files/checkpoints.h"     // gives: what is tested, here and in the next four lines
#include "llmc/checksum.h"
#include "llmc/files/resume.h"
#include "llmc/files/state_file.h"
#include "llmc/worker.h"
#include "child.h"                      // gives: folder, run_child, check_dies, CHECK_TEXT, CHECK_HOLDS
#include "test.h"                       // gives: TEST, CHECK

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

static std::string new_folder(const std::string& name) {
    mkdir_check(in_folder(name).c_str());
    return in_folder(name);
}
static std::string listing(const std::string& path) { return joined(names_in(path)); }

// How many changes of a file are not noticed: each byte by each of these flips, and shorter lengths.
static int unnoticed(const std::string& path, const std::vector<int>& flips,
                     const std::function<std::string()>& error, size_t length_step = 1) {
    const std::string good = read_text(path);
    const int fd = open(path.c_str(), O_WRONLY);
    int count = 0;
    auto put = [&](size_t at, int byte) {
        const char c = (char)byte;
        if (pwrite(fd, &c, 1, (off_t)at) != 1) { die("cannot write '%s'", path.c_str()); }
    };
    for (size_t i = 0; i < good.size(); i++) {
        for (int flip : flips) {
            put(i, good[i] ^ flip);
            count += error().empty();
        }
        put(i, good[i]);
    }
    for (size_t less = 1; less <= good.size(); less += length_step) {
        if (ftruncate(fd, (off_t)(good.size() - less)) != 0) { die("cannot shorten '%s'", path.c_str()); }
        count += error().empty();
    }
    close(fd);
    write_text(path, good);
    return count;
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
    auto sum_of = [](const std::string& text) { return checksum(text.data(), text.size()); };
    TEST("checksum: published values, and that of the checksums of every length up to 300") {
        const std::string bytes = sanity_bytes(65541);
        Checksum all;
        for (size_t n = 0; n <= 300; n++) {
            const uint64_t sum = checksum(bytes.data(), n);
            checksum_add(&all, &sum, sizeof(sum));
        }
        CHECK_TEXT(checksum_text(checksum_end(&all)), "c838e6aabc008e47");
        CHECK_TEXT(checksum_text(sum_of("")), "ef46db3751d8e999");
        CHECK_TEXT(checksum_text(sum_of("message digest")), "066ed728fceeb3be");
        CHECK_TEXT(checksum_text(sum_of(bytes)), "a77bf98f531b7c50");
    }
    TEST("checksum: in parts") {
        const std::string bytes = sanity_bytes(131);
        Checksum each;
        for (char byte : bytes) { checksum_add(&each, &byte, 1); }
        int wrong = checksum_end(&each) != sum_of(bytes);
        for (size_t i = 0; i <= bytes.size(); i++) {
            for (size_t k = i; k <= bytes.size(); k++) {
                Checksum c;
                checksum_add(&c, bytes.data(), i);
                checksum_add(&c, nullptr, 0);
                checksum_add(&c, bytes.data() + i, k - i);
                checksum_add(&c, bytes.data() + k, bytes.size() - k);
                wrong += checksum_end(&c) != sum_of(bytes);
            }
        }
        CHECK(wrong == 0, "%d of the ways to cut 131 bytes in three give another checksum", wrong);
    }
}

// ---- state_file.h ----

// Into exactly as much memory as the data take, so that ASan notices a byte too many.
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

static void write_state(const std::string& path, const Facts& facts = kOddFacts,
                        const std::vector<SmallPiece>& pieces = small_pieces()) {
    std::vector<StateRow> rows;
    for (const SmallPiece& p : pieces) { rows.push_back(p.row); }
    StateWriter out = state_begin(path, facts, rows);
    for (const SmallPiece& p : pieces) { state_write(&out, p.data.data()); }
    state_commit(&out);
}

// A file with other bytes in its start, and a checksum that fits them.
static std::string forged(std::string file, size_t at, const void* bytes, size_t count) {
    StateHeader header;
    memcpy(&header, file.data(), sizeof(header));
    const size_t start = sizeof(header) + header.pieces * sizeof(StateRow) + header.facts_bytes;
    const uint64_t zero = 0;
    memcpy(&file[at], bytes, count);
    memcpy(&file[offsetof(StateHeader, checksum)], &zero, sizeof(zero));
    const uint64_t sum = checksum(file.data(), start);
    memcpy(&file[offsetof(StateHeader, checksum)], &sum, sizeof(sum));
    return file;
}
static size_t row_at(size_t row, size_t field) {
    return sizeof(StateHeader) + row * sizeof(StateRow) + field;
}

// The numbers beside the right one, above or below, and those that overflow something.
static std::vector<uint64_t> odd_numbers(uint64_t now, bool below, bool above) {
    std::vector<uint64_t> all = {UINT64_MAX};
    if (below) { all.insert(all.end(), {0, now - 1}); }
    if (above) { all.insert(all.end(), {now + 1, now + 64}); }
    for (int bit : {48, 61, 62, 63}) {
        const uint64_t power = 1ull << bit;
        all.insert(all.end(), {power, power + 1, now + power, 0 - power});
    }
    return all;
}

static std::string padded(std::string text, size_t size) {
    text.resize(size, '\0');
    return text;
}

static void test_state_file() {
    const std::string path = in_folder("state.bin"), pipe = in_folder("pipe");
    StateFile s;
    std::vector<char> data;
    TEST("state file: what is written is read") {
        for (const std::vector<SmallPiece>& pieces : {small_pieces(), std::vector<SmallPiece>()}) {
            for (const Facts& facts : {kOddFacts, Facts()}) {
                write_state(path, facts, pieces);
                const std::string text = read_text(path);
                write_state(path, facts, pieces);
                CHECK(read_text(path) == text, "the same state made another file");
                CHECK_TEXT(state_open(&s, path), "");
                CHECK(s.facts == facts && s.rows.size() == pieces.size(), "%zu facts, %zu pieces",
                      s.facts.size(), s.rows.size());
                for (size_t i = s.rows.size(); i-- > 0;) {          // in any order
                    const SmallPiece& p = pieces[i];
                    CHECK_TEXT(read_piece(s, i, &data), "");
                    CHECK(std::string(data.begin(), data.end()) == p.data, "%s: other data", p.row.name);
                    StateRow row = s.rows[i];
                    row.offset = row.checksum = 0;
                    CHECK(memcmp(&row, &p.row, sizeof(row)) == 0, "%s: another row", p.row.name);
                }
            }
        }
        const std::string *step = facts_find(kOddFacts, "step"), *none = facts_find(kOddFacts, "ste");
        CHECK(step && *step == "12" && !none, "a fact is not found, or one that is none");
        CHECK_TEXT(facts_text({{"a", "\n\\"}}), "a=\\n\\\\\n");
    }
    TEST("state file: more of them than a process may open") {
        check_lives("40 of them", [&] {
            write_state(path);
            limit_to(RLIMIT_NOFILE, 16);
            std::vector<StateFile> files(40);
            for (StateFile& file : files) { if (!state_open(&file, path).empty()) { _exit(1); } }
            for (StateFile& file : files) { if (!read_piece(file, 0, &data).empty()) { _exit(2); } }
        });
    }
    TEST("state file: what is none") {
        CHECK(mkfifo(pipe.c_str(), 0600) == 0, "%s", strerror(errno));
        alarm(60);                                  // who waits for a pipe ends by a signal
        CHECK_TEXT(state_open(&s, in_folder("missing")), "cannot be opened: No such file or directory");
        CHECK_TEXT(state_open(&s, folder), "is a folder");
        CHECK_TEXT(state_open(&s, pipe), "is a pipe");
        CHECK_TEXT(state_open(&s, "/dev/null"), "is a device");
        alarm(0);
        write_text(path, std::string(1000, 'x'));
        CHECK_TEXT(state_open(&s, path), "is not a state file");
        write_state(path);
        std::string text = read_text(path);
        text[offsetof(StateHeader, version)] = 2;
        write_text(path, text);
        CHECK_TEXT(state_open(&s, path), "has version 2, and this program reads 1");
    }
    write_state(path);
    const std::string good = read_text(path);
    TEST("state file: every changed byte and every other length is noticed") {
        CHECK_TEXT(state_error(path), "");
        const int missed = unnoticed(path, {0x01, 0x80, 0xFF}, [&] { return state_error(path); });
        CHECK(missed == 0, "%d changes of %zu bytes are not noticed", missed, good.size());
        write_text(path, good + '\0');
        CHECK_HOLDS(state_error(path), "and its header says");
    }
    TEST("state file: cut short, or changed, after it was opened") {
        write_text(path, good);
        CHECK_TEXT(state_open(&s, path), "");
        CHECK(truncate(path.c_str(), (off_t)good.size() - 1) == 0, "%s", strerror(errno));
        CHECK_TEXT(read_piece(s, 0, &data), "");
        CHECK_TEXT(read_piece(s, s.rows.size() - 1, &data), "is truncated");
        std::string bad = good;
        bad[s.rows[1].offset]++;
        write_text(path, bad);
        CHECK_HOLDS(read_piece(s, 1, &data), "is damaged: the data of m.qkvw.11");
    }
    TEST("state file: odd numbers in its start, with a checksum that fits") {
        struct Place { size_t at, bytes; bool below, above; };
        std::vector<Place> places = {{offsetof(StateHeader, pieces), 4, true, true},
                                     {offsetof(StateHeader, facts_bytes), 8, true, true},
                                     {offsetof(StateHeader, file_bytes), 8, true, true}};
        for (size_t row = 0; row < small_pieces().size(); row++) {
            places.push_back({row_at(row, offsetof(StateRow, rows)), 8, true, false});      // more may be
            places.push_back({row_at(row, offsetof(StateRow, cols)), 8, true, false});
            places.push_back({row_at(row, offsetof(StateRow, begin)), 8, false, true});     // so may less
            for (size_t field = offsetof(StateRow, count); field < sizeof(StateRow); field += 8) {
                places.push_back({row_at(row, field), 8, true, true});
            }
        }
        largest_wanted = 0;
        state_error(path);
        const size_t needed = std::max((size_t)largest_wanted, good.size());
        largest_wanted = 0;
        for (const Place& p : places) {
            uint64_t now = 0;
            int taken = 0;
            memcpy(&now, &good[p.at], p.bytes);
            for (uint64_t n : odd_numbers(now, p.below, p.above)) {
                unlink(path.c_str());           // to truncate a file and write it again may take milliseconds
                write_text(path, forged(good, p.at, &n, p.bytes));
                const bool same = p.bytes == 4 && (uint32_t)n == now;
                taken += !same && state_error(path).empty();
            }
            CHECK(taken == 0, "byte %zu: %d numbers are taken", p.at, taken);
        }
        CHECK(largest_wanted <= 2 * needed, "it wanted %zu bytes", (size_t)largest_wanted);
    }
    TEST("state file: other lies") {
        const size_t name = row_at(0, 0), type = row_at(0, offsetof(StateRow, type));
        const std::string row = good.substr(name, sizeof(StateRow)), no_rows = padded("", sizeof(uint64_t)),
                          next = good.substr(row_at(1, 0), sizeof(StateRow));
        const struct { size_t at; std::string bytes, error; } lies[] = {
            {name, padded("", 1), "without a name"}, {name, std::string(64, 'n'), "without a name"},
            {type, std::string(16, 'f'), "unknown type"}, {type, "f64", "unknown type"},
            {name, next + row, "numbers cannot be"},
            {row_at(3, offsetof(StateRow, type)), padded("bf16", 5), "belong to no tensor"},
            {name, padded("\x1b[2J", 64) + padded("bf16", 16) + no_rows, "tensor \\x1b[2J whose numbers"}};
        for (const auto& l : lies) {
            write_text(path, forged(good, l.at, l.bytes.data(), l.bytes.size()));
            CHECK_HOLDS(state_error(path), l.error);
        }
        Facts parsed;
        for (const char* facts : {"a", "a=b", "a\n", "a=b\\\n", "a=b\\x\n", "\n", "a=b\nc", "a=b\\"}) {
            CHECK(!facts_parse(facts, &parsed), "'%s' is taken", shown(facts).c_str());
        }
    }
}

// ---- checkpoints.h: files ----

static Config tiny_config() {
    Config c = {};
    c.maxT = 1, c.V = 6, c.Vp = 8, c.L = 1, c.NH = 1, c.C = 8;
    c.norm = NormKind::Rms;
    return c;
}
constexpr size_t kTinyLive = 48, kTinyValues = 64;      // of its one tensor, with two rows of padding
static std::vector<ParamSpec> tiny_table(const Config& c) {
    std::vector<ParamSpec> specs;
    param_layer(&specs, {param_spec("wte", 4, Where::Global, (size_t)c.Vp, (size_t)c.C, Init::Normal,
                                    Kind::Embedding, (size_t)c.V, {}, 0)}, 0);
    return specs;
}

static void write_model(const std::string& path, const void* values, const char* type, bool bf16 = false,
                        size_t count = kTinyValues, const Config& c = tiny_config()) {
    ModelWriter w = model_begin(path, c, bf16);
    model_write(&w, values, count, type);
    model_commit(&w);
}
static void write_model(const std::string& path, int64_t fill) {
    write_model(path, std::vector<float>(kTinyValues, (float)fill).data(), "f32");
}

// llm.c's have none.
static std::string without_checksum(std::string model) {
    return model.replace(4 * kModelChecksumWord, 8, 8, '\0');
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
        write_state(states.back(), facts);
    }
    write_model(checkpoint_model(run, step), step);
    checkpoint_done(run, step, states);
    return states;
}

static std::string check(const std::string& run, int64_t step) {
    std::vector<std::string> states;
    return checkpoint_check(run, step, &states);
}

static void test_model_file() {
    const std::string path = in_folder("model.bin");
    TEST("model files: their checksum") {
        uint64_t sum = 1;
        auto error = [&] { return model_file_error(path, &sum); };
        write_model(path, 7);
        const std::string good = read_text(path), bare = without_checksum(good);
        CHECK_TEXT(error(), "");
        CHECK_TEXT(checksum_text(sum), checksum_text(checksum(bare.data(), bare.size())));
        const int missed = unnoticed(path, {0x10}, error, 51);
        CHECK(missed == 0, "%d changes of %zu bytes are not noticed", missed, good.size());
        write_text(path, bare);
        CHECK_TEXT(error(), "");
        CHECK_IS(sum, 0);
        CHECK_HOLDS(model_file_error(in_folder("none"), &sum), "cannot be opened: No such");
        CHECK_HOLDS(model_file_error(folder, &sum), "cannot be read: Is a directory");
    }
    TEST("model files: of each type, made of each type") {
        std::vector<float> values(kTinyValues);             // each type has these
        std::vector<uint16_t> bf16(kTinyValues), f16(kTinyValues);
        for (size_t k = 0; k < kTinyValues; k++) {
            values[k] = (k % 2 ? -1.0f : 1.0f) * ldexpf(1.0f + (float)(k / 8) / 8, (int)(k % 8) - 4);
            bf16[k] = bf16_round_nearest(values[k]);
            f16[k] = (uint16_t)((k % 2) << 15 | (k % 8 + 11) << 10 | (k / 8) << 7);
        }
        const struct { const char* type; const void* data; bool to_bf16; } cases[] = {
            {"f32", values.data(), false}, {"bf16", bf16.data(), false}, {"f16", f16.data(), false},
            {"f32", values.data(), true}, {"bf16", bf16.data(), true}};
        const Config c = tiny_config();
        for (const auto& it : cases) {
            write_model(path, it.data, it.type, it.to_bf16);
            CHECK_IS(file_size(path.c_str()), it.to_bf16 ? 1024 + 128 : 1024 + 256);
            const Config has = model_read_config(path.c_str(), tiny_table);
            CHECK(has.V == c.V && has.norm == c.norm && has.block == c.block, "header");
            int calls = 0;
            model_read(path.c_str(), tiny_table, has, [&](int i, int l, const float* read) {
                calls += i == 0 && l == 0 && std::equal(read, read + kTinyLive, values.data()) &&
                         std::count(read + kTinyLive, read + kTinyValues, 0.0f) == 16;
            });
            CHECK(calls == 1, "%s into %d bits reads back as something else", it.type, it.to_bf16 ? 16 : 32);
        }
        std::vector<Config> others(8, c);
        others[0].maxT++, others[1].V++, others[2].L++, others[3].NH++, others[4].C++, others[5].Vp++;
        others[6].block = Block::Parallel, others[7].norm = NormKind::Layer;
        for (const Config& other : others) {
            check_dies("exchanged", [&] { check_same_model(c, other, "m"); }, {"'m' is another model"});
        }
    }
}

static void test_whole_checkpoints() {
    TEST("checkpoints: names") {
        CHECK_TEXT(checkpoint_model("r", 12), "r/model_00000012.bin");
        CHECK_TEXT(checkpoint_state("r", 5000000000, 7), "r/state_5000000000_00007.bin");
        CHECK_TEXT(checkpoint_marker("r", 0), "r/DONE_00000000");
        const std::string run = new_folder("names");
        for (const char* name : {"DONE_00000100", "DONE_00000020", "DONE_5000000000", "DONE_00000003",
                                 "DONE_999999999999999999", "DONE_7", "DONE_000000020", "DONE_0000000x",
                                 "DONE_-0000001", "DONE_ 0000001", "DONE_9999999999999999999", "DONE_",
                                 "xDONE_00000001", "DONE_00000001.8.0.part", "done_00000002",
                                 "state_00000001_00000.bin", "HALF_00000001", "state_00000002_00007.bin",
                                 "state_00000003_00000.bin", "state_7_00000.bin", "state_00000008_00000.binx",
                                 "model_00000009.bin"}) {
            write_text(run + "/" + name, "");
        }
        CHECK_TEXT(numbers(checkpoint_steps(run)), "3 20 100 5000000000 999999999999999999");
        CHECK_TEXT(numbers(checkpoint_steps(run, true)),                // without a marker, too
                   "2 3 20 100 5000000000 999999999999999999");
        CHECK_TEXT(numbers(checkpoint_steps(run + "/none")), "");
    }
    const std::string run = new_folder("marker"), marker = checkpoint_marker(run, 20);
    write_checkpoint(run, 10);
    const std::vector<std::string> states = write_checkpoint(run, 20, 3);
    const std::string model = checkpoint_model(run, 20);
    TEST("checkpoints: whole ones") {
        std::vector<std::string> found = {"what was there before"};
        CHECK_TEXT(checkpoint_check(run, 20, &found), "");
        CHECK_TEXT(joined(found), joined(states));
        CHECK_TEXT(check(run, 10), "");
        CHECK_TEXT(check(run, 30), "DONE_00000030 cannot be opened");
        CHECK_HOLDS(read_text(marker), "model_00000020.bin 1280 ");
        check_dies("no model", [&] { checkpoint_done(run, 40, {states[0]}); },
                   {"model_00000040.bin' is written, but cannot be read here", "hint:"});
        check_dies("no state", [&] { checkpoint_done(run, 20, {checkpoint_state(run, 20, 3)}); },
                   {"state_00000020_00003.bin' is written, but cannot be read here", "hint:"});
        CHECK_TEXT(check(run, 20), "");
    }
    TEST("checkpoints: files that are missing, mixed up or changed") {
        for (const std::string& path : {states[0], states[1], states[2], model}) {
            const std::string good = read_text(path), name = path.substr(run.size() + 1);
            unlink(path.c_str());
            CHECK_TEXT(check(run, 20), name + " is missing");
            std::string resaved = good;             // its checksum is another
            resaved[path == model ? 4 * kModelChecksumWord : offsetof(StateHeader, checksum)] ^= 1;
            const std::string other = read_text(path == model ? checkpoint_model(run, 10)
                                                              : checkpoint_state(run, 10, 0));
            for (const std::string& bad : {other, good.substr(0, good.size() - 1), good + "x", std::string(),
                                           good.substr(0, 40), resaved}) {
                write_text(path, bad);
                CHECK_HOLDS(check(run, 20), name + " is not the file that was written");
            }
            write_text(path, good);
        }
        CHECK_TEXT(check(run, 20), "");
    }
    TEST("checkpoints: a damaged marker") {
        const int missed = unnoticed(marker, {0x01, 0x20, 0x80}, [&] { return check(run, 20); });
        CHECK(missed == 0, "%d changes are not noticed", missed);
        write_text(marker, read_text(marker) + "\n");
        CHECK_TEXT(check(run, 20), "DONE_00000020 is damaged");
        checkpoint_done(run, 20, {});
        CHECK_TEXT(check(run, 20), "DONE_00000020 names no state");
        unlink(marker.c_str());
        mkdir_check(marker.c_str());
        CHECK_TEXT(check(run, 20), "DONE_00000020 is a folder");
    }
    // A run that passed over it would go on from an older one, and later write over the newer files.
    TEST("checkpoints: one that cannot be looked at or opened is not passed over, nor removed") {
        const std::string asked = new_folder("asked"), done = checkpoint_marker(asked, 20);
        write_checkpoint(asked, 10);
        const std::string state = write_checkpoint(asked, 20)[0], model = checkpoint_model(asked, 20);
        auto refuses = [&](const std::function<void()>& f, const std::string& path, const char* words) {
            check_dies(path, f, {"cannot ", " '" + path + "': ", words, "hint:"});
        };
        const std::function<void()> reads[] = {[&] { checkpoint_line(model); }, [&] { state_error(state); },
                                               [&] { uint64_t sum; model_file_error(model, &sum); }};
        for (const auto& f : reads) {
            refuses([&] { open_no_more(); f(); }, &f == &reads[1] ? state : model, "Too many");
        }
        const std::string before = listing(asked);
        refuses([&] { refuse_call(LIST, 4, EIO); checkpoint_steps(asked, true); }, asked, "output error");
        refuses([&] { refuse_call(LIST, 4, EIO); checkpoint_has_models(asked); }, asked, "output error");
        unlink(done.c_str());                               // a link to itself, which cannot be followed
        CHECK(symlink(done.c_str(), done.c_str()) == 0, "cannot make a link");
        refuses([&] { check(asked, 20); }, done, "symbolic links");
        write_text(checkpoint_half(asked, 20), "");
        refuses([&] { checkpoint_clean(asked); }, done, "symbolic links");
        unlink(checkpoint_half(asked, 20).c_str());
        CHECK_TEXT(listing(asked), before);
    }
    TEST("checkpoints: that lost their marker") {
        const std::string lost = new_folder("lost"), lost_model = checkpoint_model(lost, 20);
        const std::vector<std::string> three = write_checkpoint(lost, 20, 3);
        std::vector<std::string> found;
        CHECK(!holds(listing(lost), "HALF"), "%s", listing(lost).c_str());
        unlink(checkpoint_marker(lost, 20).c_str());
        CHECK_TEXT(checkpoint_check(lost, 20, &found), "");
        CHECK_TEXT(joined(found), joined(three));
        const std::string one = three[1];
        const struct { std::function<void()> change; std::string path, error; } changes[] = {
            {[&] { unlink(one.c_str()); }, one, "state_00000020_00001.bin is missing"},
            {[&] { CHECK_IS(truncate(one.c_str(), 99), 0); }, one, "state_00000020_00001.bin has 99 bytes"},
            {[&] { write_state(one, {{"step", "10"}}); }, one, "_00001.bin is of another save"},
            {[&] { write_state(one, {{"step", "20"}, {"position", "7"}}); }, one, "is of another save"},
            {[&] { unlink(lost_model.c_str()); }, lost_model, "model_00000020.bin is missing"}};
        for (const auto& c : changes) {
            const std::string good = read_text(c.path);
            c.change();
            CHECK_HOLDS(check(lost, 20), c.error);
            write_text(c.path, good);
        }
        checkpoint_clean(lost);
        CHECK_TEXT(check(lost, 20), "");
    }
}

static void test_folders() {
    TEST("checkpoints: which ones stay") {
        struct Row { int keep, major; std::set<int64_t> bad; int64_t newest; const char* stay; };
        const Row rows[] = {
            {0, 0, {}, 60, "10 20 30 40 50 60"},
            {1, 0, {}, 60, "60"},
            {99, 0, {}, 60, "10 20 30 40 50 60"},
            {1, 30, {}, 50, "30 50 60"},            // 60 comes later, and is a multiple anyway
            {1, 25, {}, 60, "50 60"},
            {2, 20, {}, 60, "20 40 50 60"},         // multiples are counted among the last two
            {1, 0, {}, 40, "40 50 60"},             // of a future that the run went back from
            {2, 0, {50}, 60, "40 50 60"},           // a damaged one does not take a good one's place
            {1, 0, {30, 40, 50}, 60, "30 40 50 60"},
            {1, 0, {60}, 50, "50 60"}};
        for (const auto& row : rows) {
            const std::string run = new_folder(format("keep%d", (int)(&row - rows)));
            for (int64_t step = 10; step <= 60; step += 10) {
                write_checkpoint(run, step, 2);
            }
            write_text(run + "/main.log", "");
            checkpoint_retain(run, row.newest, {row.keep, row.major, row.bad});
            const std::vector<int64_t> steps = checkpoint_steps(run);
            CHECK_TEXT(numbers(steps), row.stay);
            for (int64_t step : steps) { CHECK_TEXT(check(run, step), ""); }
            CHECK(names_in(run).size() == 4 * steps.size() + 1, "%s", listing(run).c_str());
        }
    }
    TEST("checkpoints: what cannot be removed is named, and tried again") {
        const std::string run = new_folder("stuck"), model = checkpoint_model(run, 10);
        write_checkpoint(run, 10, 2);
        Child refused = run_child([&] {             // the marker is the first to go
            refuse_call(RENAME, 1, EPERM);
            checkpoint_remove(run, 10);
        });
        CHECK_HOLDS(refused.err, "warning: cannot remove '" + checkpoint_marker(run, 10));
        CHECK_TEXT(check(run, 10), "");
        unlink(model.c_str());
        mkdir_check(model.c_str());                 // not even root can unlink a folder
        Child stuck = run_child([&] { checkpoint_remove(run, 10); });
        CHECK_HOLDS(stuck.err, "warning: cannot remove '" + model + "': Is a directory\n");
        CHECK_TEXT(listing(run), "HALF_00000010 model_00000010.bin");
        rmdir(model.c_str());
        checkpoint_clean(run);
        CHECK_TEXT(listing(run), "");
    }
    TEST("checkpoints: what a kill in a save leaves") {
        const std::string run = new_folder("clean");
        for (int64_t step : {10, 20, 50}) { write_checkpoint(run, step, 2); }
        checkpoint_begin(run, 20);
        unlink(checkpoint_marker(run, 50).c_str());         // lost, by whatever accident
        write_text(checkpoint_half(run, 10), "");           // killed behind its marker
        write_model(checkpoint_model(run, 40), 40);         // alone: somebody's
        for (const char* name : {"main.log", "mine.bin", "state_x_00000.bin", "state_00000020_.bin",
                                 "notes.part", "state_00000020_00000.txt"}) {
            write_text(run + "/" + name, "mine");
        }
        Child killed = run_child([&] {
            atomic_open(checkpoint_model(run, 20));
            atomic_open(checkpoint_state(run, 20, 0));
            atomic_open(checkpoint_marker(run, 20));
            kill(getpid(), SIGKILL);
        });
        CHECK(killed.code == -SIGKILL, "%d", killed.code);
        AtomicFile living = atomic_open(checkpoint_state(run, 30, 0));
        AtomicFile living_marker = atomic_open(checkpoint_marker(run, 30));
        checkpoint_clean(run);
        auto name_of = [&](const AtomicFile& file) { return std::string(file.temp + run.size() + 1); };
        CHECK_TEXT(listing(run), "DONE_00000010 " + name_of(living_marker) + " main.log mine.bin "
                   "model_00000010.bin model_00000040.bin model_00000050.bin notes.part "
                   "state_00000010_00000.bin state_00000010_00001.bin state_00000020_.bin "
                   "state_00000020_00000.txt " + name_of(living) + " state_00000050_00000.bin "
                   "state_00000050_00001.bin state_x_00000.bin");
        CHECK_TEXT(check(run, 10), "");
        atomic_commit(&living);
        atomic_commit(&living_marker);
        checkpoint_clean(run + "/none");
    }
    TEST("checkpoints: every call that a disk can refuse") {
        const std::string run = new_folder("refused");
        write_checkpoint(run, 1, 2);
        // two states, a model and a marker; HALF comes by a rename, too
        const struct { const char* name; int least; } operations[OPERATIONS] = {
            {"fwrite", 12}, {"fflush", 7}, {"fsync", 8}, {"rename", 5}, {"fclose", 4}};
        for (int operation = 0; operation < OPERATIONS; operation++) {
            int calls = 0;
            for (;; calls++) {
                const Child c = run_child([&] {
                    refuse_call(operation, calls + 1);
                    write_checkpoint(run, 2, 2);
                    _exit(refusal.countdown > 0 ? 0 : 42);          // not called so often; nobody noticed
                });
                if (c.code == 0) { break; }
                const std::string what = format("%s, call %d", operations[operation].name, calls + 1);
                const long lines = std::count(c.err.begin(), c.err.end(), '\n');
                CHECK(c.code == 1 && lines <= 3 && holds(c.err, "No space left") && holds(c.err, "/"),
                      "%s: %d, %s", what.c_str(), c.code, c.err.c_str());
                CHECK_TEXT(check(run, 1), "");
                CHECK(!holds(listing(run), ".part"), "%s: %s", what.c_str(), listing(run).c_str());
                CHECK(file_size(checkpoint_marker(run, 2).c_str()) < 0 || check(run, 2).empty(), "%s: %s",
                      what.c_str(), check(run, 2).c_str());
                checkpoint_remove(run, 2);
            }
            CHECK(calls >= operations[operation].least, "%s: %d calls", operations[operation].name, calls);
            checkpoint_remove(run, 2);
        }
    }
}

// ---- the thread ----

static void test_worker() {
    TEST("worker: a program may end while it works") {
        Child c = run_child([] {
            static std::atomic<bool> began(false);
            worker_post(worker_start(), [] { began = true; for (;;) { pause(); } });
            while (!began) { std::this_thread::yield(); }
            exit(3);
        });
        CHECK(c.code == 3, "%d: %s", c.code, c.err.c_str());
    }
    TEST("worker: one thing after the other, and waiting for it") {
        alarm(120);                                 // a wait that never ends
        Worker *worker = worker_start(), *other = worker_start();
        worker_wait(worker);                        // for nothing
        int sum = 0, wrong = 0;                     // no lock: the worker's own one has to do
        for (int i = 1; i <= 1000; i++) {
            Worker* const w = i % 2 ? worker : other;
            worker_post(w, [&, i] { wrong += sum != i * (i - 1) / 2; sum += i; });
            worker_wait(w);
            wrong += sum != i * (i + 1) / 2 || worker_busy(w);
        }
        CHECK(wrong == 0, "%d things are done too early or too late", wrong);
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
        worker_post(worker, [&] { sum = 7; });
        worker_free(worker);                        // what was posted is done
        CHECK(sum == 7, "%d", sum);
        worker_free(other);
        alarm(0);
    }
}

// 3 of a tensor's 4 elements, which lie in two pieces.
static void test_parts() {
    const float masters[] = {1, 2, 3, 4};
    auto piece = [&](size_t begin, size_t count) {
        return SmallPiece{state_row("master.w", "f32", 2, 2, begin, count),
                          std::string((const char*)(masters + begin), count * sizeof(float))};
    };
    TEST("resume: a tensor in pieces") {
        for (const auto& pieces : {std::vector<SmallPiece>{piece(2, 2), piece(0, 2)},
                                   std::vector<SmallPiece>{piece(0, 2)}}) {
            write_state(in_folder("parts.bin"), kOddFacts, pieces);
            Checkpoint c;
            c.files.resize(1);
            CHECK_TEXT(state_open(&c.files[0], in_folder("parts.bin")), "");
            std::vector<char> data;
            CHECK_TEXT(checkpoint_read(c, checkpoint_index(c), piece(1, 3).row, &data),
                       pieces.size() == 2 ? "" : "the files do not have all of master.w");
            CHECK(pieces.size() == 1 || !memcmp(data.data(), masters + 1, 12), "other elements");
        }
    }
}

int main() {
    folder_begin("checkpoints");
    file_layer.fsync = [](int) { return 0; };       // nobody cuts the power; that it is called is counted
    test_checksum();
    test_state_file();
    test_parts();
    test_model_file();
    test_whole_checkpoints();
    test_folders();
    test_worker();                      // the last: a child of a program with threads has none of them
    return folder_end();
}
