/*
The state of a training run on disk: facts as text, tensors as they are in memory, all with checksums. Host
only.

    StateWriter out = state_begin("state.bin", facts, pieces);      // .part until state_commit
    for (...) { state_write(&out, data); }                          // each piece, in order
    state_commit(&out);

    StateFile in;
    std::string error = state_open(&in, "state.bin");               // "": header, table and facts are sound
    error = state_read(&in, 0, to);                                 // piece 0; "": its checksum fits

A piece is a range of a tensor's elements. The file does not say which rank wrote it. Little-endian, no gaps:

    0       header, 64 bytes: magic, version, sizes, checksum of header (with 0 there), table and facts
    64      table, 128 bytes per piece: name, type, shape, range of elements, offset, checksum
    ...     facts: lines `key=value`; \n stands for a line's end, \\ for a backslash
    ...     the pieces' data, one after the other
*/
#pragma once

#include "../atomic_files.h" // gives: AtomicFile, die, format, read_at
#include "../checksum.h"    // gives: Checksum
#include "../facts.h"       // gives: Facts, facts_text, facts_parse

struct StateHeader {
    char magic[8];
    uint32_t version, pieces;
    uint64_t facts_bytes, file_bytes, checksum;
    uint64_t zeros[3];
};
struct StateRow {
    char name[64];                      // "m.qkvw.3": Adam's m of tensor qkvw, layer 3; also param, v, master
                                        // (a weight in fp32), low (its lower half: rand.h, master_split)
    char type[16];                      // f32, bf16, f16, u16
    uint64_t rows, cols;                // of the whole tensor
    uint64_t begin, count;              // the piece holds elements [begin, begin + count)
    uint64_t offset, checksum;          // bytes from the start of the file; of the data
};
static_assert(sizeof(StateHeader) == 64 && sizeof(StateRow) == 128, "the file holds these structs");
static const char kStateMagic[8] = {'G', 'P', 'T', '2', 'S', 'T', 'A', 'T'};
constexpr uint32_t kStateVersion = 1;
constexpr uint64_t kStateMaxRows = 1 << 24;

// Bytes of an element; 0: no such type.
static inline size_t state_type_bytes(const char* type) {
    for (const char* two : {"bf16", "f16", "u16"}) { if (strcmp(type, two) == 0) { return 2; } }
    return strcmp(type, "f32") == 0 ? 4 : 0;
}

static inline StateRow state_row(const std::string& name, const char* type, uint64_t rows, uint64_t cols,
                                 uint64_t begin, uint64_t count) {
    StateRow row = {"", "", rows, cols, begin, count, 0, 0};
    assert(name.size() < sizeof(row.name) && state_type_bytes(type) > 0);
    assert(count > 0 && begin + count <= rows * cols);
    memcpy(row.name, name.c_str(), name.size());
    memcpy(row.type, type, strlen(type));
    return row;
}

static inline uint64_t state_row_bytes(const StateRow& row) {
    return row.count * state_type_bytes(row.type);
}

// ---- writing ----

struct StateWriter {
    AtomicFile out;
    StateHeader header;
    std::vector<StateRow> rows;
    std::string facts;
    size_t next;                        // the row that state_write writes next
};

static inline void state_write_start(StateWriter* w) {
    atomic_write(&w->out, &w->header, sizeof(w->header));
    atomic_write(&w->out, w->rows.data(), w->rows.size() * sizeof(StateRow));
    atomic_write(&w->out, w->facts.data(), w->facts.size());
}

static inline StateWriter state_begin(const std::string& path, const Facts& facts,
                                      const std::vector<StateRow>& rows) {
    StateWriter w = {atomic_open(path), {}, rows, facts_text(facts), 0};
    memcpy(w.header.magic, kStateMagic, sizeof(kStateMagic));
    w.header.version = kStateVersion;
    w.header.pieces = (uint32_t)rows.size();
    w.header.facts_bytes = w.facts.size();
    uint64_t at = sizeof(StateHeader) + rows.size() * sizeof(StateRow) + w.facts.size();
    for (StateRow& row : w.rows) {
        row.offset = at;
        at += state_row_bytes(row);
    }
    w.header.file_bytes = at;
    state_write_start(&w);              // state_commit writes it again, with the checksums
    return w;
}

static inline void state_write(StateWriter* w, const void* data) {
    StateRow& row = w->rows[w->next++];
    row.checksum = checksum(data, state_row_bytes(row));
    atomic_write(&w->out, data, state_row_bytes(row));
}

static inline uint64_t state_start_checksum(const StateHeader& header, const void* rows, const void* facts) {
    StateHeader bare = header;
    bare.checksum = 0;
    Checksum c;
    checksum_add(&c, &bare, sizeof(bare));
    checksum_add(&c, rows, header.pieces * sizeof(StateRow));
    checksum_add(&c, facts, header.facts_bytes);
    return checksum_end(&c);
}

static inline void state_commit(StateWriter* w) {
    assert(w->next == w->rows.size());
    w->header.checksum = state_start_checksum(w->header, w->rows.data(), w->facts.data());
    atomic_rewind(&w->out);
    state_write_start(w);
    atomic_commit(&w->out);
}

// ---- reading ----
// Functions return the error, or "": after a damaged file, an older checkpoint may do. A file is open only
// while a function reads it, because a checkpoint may have more states than a process may open files.

struct StateFile {
    std::string path;
    StateHeader header;
    std::vector<StateRow> rows;
    Facts facts;
};

static inline std::string state_pread(int fd, void* to, uint64_t bytes, uint64_t offset) {
    const ssize_t got = read_at(fd, to, bytes, (int64_t)offset);
    if (got < 0) { return format("cannot be read: %s", strerror(errno)); }
    return (uint64_t)got < bytes ? "is truncated" : "";
}

// Checks that the table's numbers fit each other and the file's size.
static inline std::string state_rows_error(const StateFile* s) {
    uint64_t at = sizeof(StateHeader) + s->rows.size() * sizeof(StateRow) + s->header.facts_bytes;
    for (const StateRow& row : s->rows) {
        const bool named = row.name[0] && strnlen(row.name, sizeof(row.name)) < sizeof(row.name) &&
                           strnlen(row.type, sizeof(row.type)) < sizeof(row.type);
        const size_t type_bytes = named ? state_type_bytes(row.type) : 0;
        if (type_bytes == 0) { return "has a tensor without a name, or of an unknown type"; }
        const uint64_t most = (uint64_t)1 << 48;        // so no product or sum below overflows
        if (row.rows == 0 || row.cols == 0 || row.rows >= most || row.cols >= most / row.rows ||
            row.count == 0 || row.begin >= row.rows * row.cols ||
            row.count > row.rows * row.cols - row.begin || row.offset != at ||
            row.count > (s->header.file_bytes - at) / type_bytes) {
            return format("has a tensor %s whose numbers cannot be", shown(row.name).c_str());
        }
        at += state_row_bytes(row);
    }
    return at == s->header.file_bytes ? "" : "has bytes that belong to no tensor";
}

// Calls `read` with the file's descriptor, and returns what it returns.
template <typename Read>
static inline std::string state_with_file(const std::string& path, Read read) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) { absent_or_die("open", path); return format("cannot be opened: %s", strerror(errno)); }
    const std::string error = read(fd);
    close(fd);
    return error;
}

static inline std::string state_read_start(StateFile* s, int fd) {
    struct stat st;
    if (fstat(fd, &st) != 0) { return format("cannot be read: %s", strerror(errno)); }
    if (!S_ISREG(st.st_mode)) { return format("is %s", not_regular(st.st_mode)); }
    const uint64_t bytes = (uint64_t)st.st_size;
    StateHeader& h = s->header;
    if (bytes < sizeof(h)) { return "is truncated"; }
    std::string error = state_pread(fd, &h, sizeof(h), 0);
    if (!error.empty()) { return error; }
    if (memcmp(h.magic, kStateMagic, sizeof(h.magic)) != 0) { return "is not a state file"; }
    if (h.version != kStateVersion) {
        return format("has version %u, and this program reads %u", h.version, kStateVersion);
    }
    if (h.file_bytes != bytes) {
        return format("has %llu bytes, and its header says %llu", (unsigned long long)bytes,
                      (unsigned long long)h.file_bytes);
    }
    if (h.pieces > kStateMaxRows || h.facts_bytes > bytes ||
        sizeof(h) + h.pieces * sizeof(StateRow) + h.facts_bytes > bytes) {
        return "has a header whose numbers do not fit its size";
    }
    s->rows.resize(h.pieces);
    std::string facts(h.facts_bytes, '\0');
    const uint64_t rows_bytes = h.pieces * sizeof(StateRow);
    error = state_pread(fd, s->rows.data(), rows_bytes, sizeof(h));
    if (error.empty()) { error = state_pread(fd, &facts[0], facts.size(), sizeof(h) + rows_bytes); }
    if (!error.empty()) { return error; }
    if (state_start_checksum(h, s->rows.data(), facts.data()) != h.checksum) {
        return "is damaged: its start does not have the checksum that it should";
    }
    if (!facts_parse(facts, &s->facts)) { return "has facts that cannot be read"; }
    return state_rows_error(s);
}

static inline std::string state_open(StateFile* s, const std::string& path) {
    *s = StateFile();
    s->path = path;
    return state_with_file(path, [&](int fd) { return state_read_start(s, fd); });
}

// to: state_row_bytes(row) bytes. Returns the error, or "".
static inline std::string state_read(const StateFile* s, size_t piece, void* to) {
    const StateRow& row = s->rows[piece];
    const std::string error = state_with_file(s->path, [&](int fd) {
        return state_pread(fd, to, state_row_bytes(row), row.offset);
    });
    if (!error.empty()) { return error; }
    if (checksum(to, state_row_bytes(row)) != row.checksum) {
        return format("is damaged: the data of %s do not have the checksum that they should",
                      shown(row.name).c_str());
    }
    return "";
}
