/*
Text to token shards: the files that train_gpt2 reads with -i and -j.

    g++ -std=c++17 -O3 -I. -pthread dev/data/tokenize.cpp -o build/tokenize
    build/tokenize a.txt b.txt -o data/docs                     # data/docs_train.bin, data/docs_val.bin
    xz -dc web.xz | build/tokenize - -o data/web --val-tokens 0 --shard-tokens 100000000
                                                                # data/web_train_000000.bin, ...
    build/tokenize --decode data/docs_val.bin | head            # tokens back to text

A line <|endoftext|> separates documents, and so does the end of a file; every document that is not empty gets
one end-of-text token in front. `--separators 0` takes the text as it is, all files as one, and adds no token.
`--separators nul` is for programs that write documents into a pipe: a byte 0 stands between two, and each is
taken to the byte, without a line end of its own (dev/data/get.py does so with all files).

Text is UTF-8, without bytes 0. `--errors replace` takes other bytes, too, as U+FFFD. A byte order mark at a
file's begin is dropped.

Documents drawn over the whole text are for validation; dev/data/get.py draws the same ones. Which they are is
known at the text's end, so its tokens wait in a file without a name; --val-tokens 0 does without.

The main thread reads blocks, cuts them where a piece is certain to begin (so the cut changes no token), hands
them to the threads, and writes the results in order: memory stays at a few blocks per thread whatever the
size of the text.
*/
#include <math.h>       // gives: fmax

#include <algorithm>    // gives: std::count, std::min, std::sort
#include <chrono>       // gives: steady_clock
#include <condition_variable>   // gives: std::condition_variable
#include <deque>        // gives: std::deque
#include <memory>       // gives: std::unique_ptr
#include <mutex>        // gives: std::mutex
#include <string>       // gives: std::string
#include <system_error> // gives: std::system_error
#include <thread>       // gives: std::thread
#include <vector>       // gives: std::vector

#include "llmc/atomic_files.h"      // gives: die, AtomicFile
#include "llmc/host_cores.h"        // gives: host_cores
#include "llmc/run/flags.h"         // gives: Flag, flags_parse
#include "llmc/data/tokenizer.h"    // gives: Tokenizer
#include "tokenizer_tool.h"         // gives: TokenizerCache, text_fault, tokenizer_can_cut, tokenizer_write

static const char kSeparatorLine[] = "<|endoftext|>";
enum Separators { SEPARATORS_NONE, SEPARATORS_LINE, SEPARATORS_NUL };       // as in kFlags
static const size_t kBlock = 1 << 20;               // bytes read at a time: one job
static const uint32_t kShardMagic = 20240520, kShardVersion = 1;
static const size_t kShardHeader = 256 * sizeof(uint32_t);
static const int kShardTokenizerWord = 3;           // of the header: a TokenizerId; llm.c writes 0 there

static double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// ---- shards ----

// One of the outputs (train, val, all): PREFIX_NAME.bin, or PREFIX_NAME_000000.bin and so on.
struct ShardWriter {
    std::string stem;           // PREFIX_NAME
    int64_t shard_tokens;       // limit of one file; 0: one file takes all
    uint32_t tokenizer;         // its id
    AtomicFile file;            // file.f is null between two shards
    int64_t in_file, total;     // tokens
    int files;
};

static std::string shard_path(const ShardWriter& w, int index) {
    return w.shard_tokens ? format("%s_%06d.bin", w.stem.c_str(), index) : w.stem + ".bin";
}

static void shard_close(ShardWriter* w) {
    if (!w->file.f) { return; }
    // modulo 2^32: a file above that is known by its size
    uint32_t header[256] = {kShardMagic, kShardVersion, (uint32_t)w->in_file};
    header[kShardTokenizerWord] = w->tokenizer;
    if (fseek(w->file.f, 0, SEEK_SET) != 0) { atomic_fail(&w->file, "write"); }
    atomic_write(&w->file, header, sizeof(header));
    atomic_commit(&w->file);
    printf("%s: %lld tokens\n", shown(w->file.path).c_str(), (long long)w->in_file);
    w->file.f = nullptr;
    w->in_file = 0;
    w->files++;
}

static void shard_put(ShardWriter* w, const uint16_t* tokens, size_t n) {
    while (n > 0) {
        if (w->shard_tokens && w->in_file == w->shard_tokens) { shard_close(w); }
        if (!w->file.f) {
            char room[kShardHeader] = {0};
            w->file = atomic_open(shard_path(*w, w->files));
            atomic_write(&w->file, room, sizeof(room));
        }
        size_t take = w->shard_tokens ? std::min(n, (size_t)(w->shard_tokens - w->in_file)) : n;
        atomic_write(&w->file, tokens, take * sizeof(uint16_t));
        w->in_file += (int64_t)take;
        w->total += (int64_t)take;
        tokens += take;
        n -= take;
    }
}

// all, if wanted, gets every token. Where some are for validation, the tokens wait until the text has ended.
struct Outputs {
    ShardWriter val, train, all;
    bool want_all;
    uint16_t eot;
    FILE* waiting;                      // null: all is for training
    std::vector<int64_t> documents;     // where they begin among the tokens that wait
    int64_t tokens;                     // that wait
};

static void outputs_put(Outputs* out, const uint16_t* tokens, size_t n) {
    if (out->want_all) { shard_put(&out->all, tokens, n); }
    if (!out->waiting) {
        shard_put(&out->train, tokens, n);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        if (tokens[i] == out->eot) { out->documents.push_back(out->tokens + (int64_t)i); }
    }
    if (fwrite(tokens, sizeof(uint16_t), n, out->waiting) != n) {
        die("cannot write beside '%s': %s", shown(out->train.stem).c_str(), strerror(errno));
    }
    out->tokens += (int64_t)n;
}

// ---- validation ----

struct Span { int64_t begin, end; };

// splitmix64: the order in which documents are drawn, as in dev/test/test_datasets.py.
static uint64_t draw_key(size_t document) {
    uint64_t z = ((uint64_t)document + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}

// Documents drawn over the text, `wanted` tokens at most. The first that does not fit is the last; if less
// than half is full then, its end is taken. What is left for training so begins with a document.
static std::vector<Span> draw_validation(const std::vector<int64_t>& documents, int64_t total,
                                         int64_t wanted) {
    std::vector<size_t> order(documents.size());
    for (size_t i = 0; i < order.size(); i++) { order[i] = i; }
    std::sort(order.begin(), order.end(), [](size_t a, size_t b) { return draw_key(a) < draw_key(b); });
    std::vector<Span> drawn;
    int64_t left = wanted;
    for (size_t i : order) {
        const Span d = {documents[i], i + 1 < documents.size() ? documents[i + 1] : total};
        if (d.end - d.begin > left) {
            if (2 * left > wanted) { drawn.push_back({d.end - left, d.end}); }
            break;
        }
        drawn.push_back(d);
        left -= d.end - d.begin;
    }
    std::sort(drawn.begin(), drawn.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
    return drawn;
}

// Shares the tokens that wait out to both. A text without separators has no documents: its first are taken.
static void outputs_share(Outputs* out, bool has_documents, int64_t wanted) {
    const std::vector<Span> drawn = has_documents ? draw_validation(out->documents, out->tokens, wanted)
                                                  : std::vector<Span>{{0, wanted}};
    const char* path = out->train.stem.c_str();
    std::vector<uint16_t> tokens;
    auto copy = [&](ShardWriter* to, int64_t n) {
        for (; n > 0; n -= (int64_t)tokens.size()) {
            tokens.resize((size_t)std::min(n, (int64_t)kBlock));
            fread_check(tokens.data(), sizeof(uint16_t), tokens.size(), out->waiting, path);
            shard_put(to, tokens.data(), tokens.size());
        }
    };
    rewind(out->waiting);
    int64_t at = 0;
    for (const Span& span : drawn) {
        copy(&out->train, span.begin - at);
        copy(&out->val, span.end - span.begin);
        at = span.end;
    }
    copy(&out->train, out->tokens - at);
    printf("validation: %lld of %lld tokens, %zu of %zu documents\n", (long long)out->val.total,
           (long long)out->tokens, drawn.size(), has_documents ? out->documents.size() : 1);
}

// A file of the output's folder that nobody else sees, and that is gone with this program.
static FILE* waiting_open(const std::string& prefix) {
    std::string name = prefix + ".XXXXXX";
    const int fd = mkstemp(&name[0]);
    if (fd < 0) { die("cannot create a file beside '%s': %s", shown(prefix).c_str(), strerror(errno)); }
    unlink(name.c_str());
    return fdopen(fd, "w+b");
}

// ---- jobs ----

struct Job {
    std::string text;
    bool starts_document;           // a file begins here; else the last job's document goes on
    std::vector<uint16_t> tokens;
    bool done;
};

static std::string separator_text(Separators separators) {
    return separators == SEPARATORS_NUL ? std::string(1, '\0') : kSeparatorLine;
}

// The next separator at or after from: its first byte, and in *after the first byte of the next document.
static size_t find_separator(const std::string& text, size_t from, Separators separators, size_t* after) {
    if (separators == SEPARATORS_NUL) {
        size_t p = std::min(text.find('\0', from), text.size());
        *after = std::min(p + 1, text.size());
        return p;
    }
    for (size_t p = from; (p = text.find(kSeparatorLine, p)) != std::string::npos; p++) {
        size_t end = p + strlen(kSeparatorLine);
        if (end + 1 < text.size() && text[end] == '\r') { end++; }
        bool whole_line = (p == 0 || text[p - 1] == '\n') && (end == text.size() || text[end] == '\n');
        if (whole_line) {
            *after = std::min(end + 1, text.size());
            return p;
        }
    }
    return text.size();
}

static void job_run(Job* job, const Tokenizer* tok, TokenizerCache* cache, std::vector<uint32_t>& ids,
                    Separators separators) {
    const std::string& text = job->text;
    bool starts = job->starts_document;
    ids.clear();
    for (size_t pos = 0, end, after = 0; pos < text.size(); pos = after) {
        end = after = text.size();
        if (separators) { end = find_separator(text, pos, separators, &after); }
        if (end > pos) {
            if (separators && starts) { ids.push_back(tok->eot); }
            tokenizer_encode(tok, text.data() + pos, end - pos, ids, cache);
        }
        starts = true;
    }
    job->tokens.assign(ids.begin(), ids.end());
}

struct Pool {
    std::mutex mutex;
    std::condition_variable work, ready;
    std::deque<Job*> todo;
    bool closed = false;
};

static void pool_thread(Pool* pool, const Tokenizer* tok, Separators separators) {
    TokenizerCache cache;
    std::vector<uint32_t> ids;
    for (;;) {
        Job* job;
        {
            std::unique_lock<std::mutex> lock(pool->mutex);
            pool->work.wait(lock, [&] { return pool->closed || !pool->todo.empty(); });
            if (pool->todo.empty()) { return; }
            job = pool->todo.front();
            pool->todo.pop_front();
        }
        job_run(job, tok, &cache, ids, separators);
        {
            std::lock_guard<std::mutex> lock(pool->mutex);
            job->done = true;
        }
        pool->ready.notify_one();
    }
}

// ---- reading ----

// True where a separator begins, ends or lies: cut there, a line would not stay whole, or become one.
static bool touches_separator(const std::string& text, size_t i, Separators separators) {
    const std::string separator = separator_text(separators);
    for (size_t from = i - std::min(i, separator.size() + 1); from <= i; from++) {      // + 1: its \r
        if (text.compare(from, separator.size(), separator) == 0) { return true; }
    }
    return false;
}

// For text in which white space never follows anything else, at least not for a whole block: the pieces are
// found from its begin, and it is cut before the last of them or, if that is long, inside. What the last few
// bytes mean shows only later.
static size_t cut_anywhere(const Tokenizer* tok, const std::string& text, Separators separators) {
    const size_t kUnsure = 2 * strlen(kSeparatorLine), kLongPiece = kBlock / 4;
    const uint8_t* s = (const uint8_t*)text.data();
    const size_t n = text_unfinished(s, text.size());
    size_t begin = 0, piece = 0, cut = 0;
    if (separators) {
        size_t p = 0, after;
        while ((p = find_separator(text, p, separators, &after)) < text.size()) { p = begin = after; }
    }
    for (size_t i = begin; i + kUnsure < n; i += tokenizer_piece(tok, s + i, n - i)) {
        piece = i;
        if (!touches_separator(text, i, separators)) { cut = i; }
    }
    if (begin < n && n - piece > kLongPiece) {
        size_t inside = tokenizer_cut_inside(tok, s + piece, n - piece);
        if (inside && !touches_separator(text, piece + inside, separators)) { cut = piece + inside; }
    }
    return cut;
}

// The last place after `from` where text may be cut, 0 if there is none. Right after a separator there is
// none, so that the line stays whole, and what follows is known to begin a document.
static size_t last_cut(const Tokenizer* tok, const std::string& text, size_t from, Separators separators) {
    const std::string separator = separator_text(separators);
    const size_t length = separator.size();
    for (size_t i = text.size(); i-- > std::max(from, (size_t)1);) {
        bool after_separator = i >= length && text.compare(i - length, length, separator) == 0;
        if (!after_separator && tokenizer_can_cut(tok, text.data(), text.size(), i)) { return i; }
    }
    return text.size() >= kBlock ? cut_anywhere(tok, text, separators) : 0;
}

// ---- what is no text ----

static const char kBom[] = "\xEF\xBB\xBF", kReplacement[] = "\xEF\xBF\xBD";       // U+FEFF, U+FFFD
static const char kNoTextHint[] = "dev/data/get.py unpacks, and converts with --encoding, as iconv -f does; "
                                  "--errors replace takes U+FFFD for such bytes and counts them";

static std::string no_text(const std::string& file, int64_t at, char byte) {
    return format("'%s' is no UTF-8 text: byte %lld is 0x%02x", file.c_str(), (long long)at,
                  (unsigned)(uint8_t)byte);
}

// Makes U+FFFD of every byte from *sound to `end` that is no text, and moves *sound to where it ends then.
// Returns how many these were.
static int64_t replace_faults(std::string* text, size_t* sound, size_t end, bool nul_separates) {
    std::string made;
    int64_t count = 0;
    const uint8_t* s = (const uint8_t*)text->data();
    for (size_t at = *sound, fault; at < end; at = fault + 1) {
        fault = text_fault(s, at, end, nul_separates);
        made.append(*text, at, fault - at);
        if (fault < end) { made += kReplacement; count++; }
    }
    text->replace(*sound, end - *sound, made);
    *sound += made.size();
    return count;
}

struct Progress {
    int64_t total, read, tokens;    // total, read: bytes; total is 0 if not known
    int64_t replaced;               // bytes that are no text
    double start, shown;
    bool terminal;
};

static void progress_show(Progress* p, bool last) {
    double now = seconds();
    if (!p->terminal || (!last && now - p->shown < 0.2)) { return; }
    p->shown = now;
    double rate = (double)p->read / fmax(now - p->start, 1e-9);
    std::string share, eta;
    if (p->total > 0) {
        share = format(" of %.1f", (double)p->total * 1e-6);
        eta = format(", %.0f s left", (double)(p->total - p->read) / fmax(rate, 1.0));
    }
    fprintf(stderr, "\r%.1f%s MB, %lld tokens, %.1f MB/s%s   %s", (double)p->read * 1e-6, share.c_str(),
            (long long)p->tokens, rate * 1e-6, eta.c_str(), last ? "\n" : "");
}

// Reads all files, encodes them on the pool's threads, writes the tokens in order.
static void tokenize_files(const std::vector<std::string>& files, const Tokenizer* tok, int threads,
                           Separators separators, bool replaces, Outputs* out, Progress* progress) {
    Pool pool;
    std::vector<std::thread> workers;
    for (int i = 0; i < threads; i++) {
        try {
            workers.emplace_back(pool_thread, &pool, tok, separators);
        } catch (const std::system_error& e) {
            die("cannot start thread %d: %s\nhint: fewer of them take less memory: -j 1", i + 1, e.what());
        }
    }
    std::deque<std::unique_ptr<Job>> in_flight;

    auto finish_oldest = [&] {
        Job* job = in_flight.front().get();
        {
            std::unique_lock<std::mutex> lock(pool.mutex);
            pool.ready.wait(lock, [&] { return job->done; });
        }
        outputs_put(out, job->tokens.data(), job->tokens.size());
        progress->tokens += (int64_t)job->tokens.size();
        in_flight.pop_front();
        progress_show(progress, false);
    };
    auto submit = [&](const std::string& text, bool starts_document) {
        if (in_flight.size() >= 4 * (size_t)threads) { finish_oldest(); }
        in_flight.emplace_back(new Job{text, starts_document, {}, false});
        {
            std::lock_guard<std::mutex> lock(pool.mutex);
            pool.todo.push_back(in_flight.back().get());
        }
        pool.work.notify_one();
    };

    std::string text;               // read, not yet handed out: holds no place to cut
    size_t sound = 0;               // so many bytes of it are known to be text
    bool starts_document = true;
    const bool nul_separates = separators == SEPARATORS_NUL;
    for (size_t i = 0; i < files.size(); i++) {
        FILE* f = files[i] == "-" ? stdin : fopen_check(files[i].c_str(), "rb");
        int64_t read = 0;           // bytes of this file
        for (bool end_of_file = false; !end_of_file;) {
            size_t old = text.size();
            text.resize(old + kBlock);
            size_t n = fread(&text[old], 1, kBlock, f);
            if (ferror(f)) { die("cannot read '%s': %s", shown(files[i]).c_str(), strerror(errno)); }
            text.resize(old + n);
            const bool begins = read == 0 && !nul_separates;
            if (begins && text.compare(old, strlen(kBom), kBom) == 0) { text.erase(old, strlen(kBom)); }
            read += (int64_t)n;
            progress->read += (int64_t)n;
            end_of_file = n < kBlock;
            const uint8_t* s = (const uint8_t*)text.data();
            const size_t end = end_of_file ? text.size() : text_unfinished(s, text.size());
            if (replaces) {
                progress->replaced += replace_faults(&text, &sound, end, nul_separates);
            } else {
                sound = text_fault(s, sound, end, nul_separates);
                if (sound < end) {
                    die("%s\nhint: %s", no_text(files[i], read - (int64_t)(text.size() - sound), text[sound])
                        .c_str(), kNoTextHint);
                }
            }
            bool whole = end_of_file && (separators || i + 1 == files.size());
            size_t cut = whole ? text.size() : last_cut(tok, text, old, separators);
            if (cut == 0) { continue; }
            submit(text.substr(0, cut), starts_document);
            text.erase(0, cut);
            sound -= cut;
            starts_document = whole;
        }
        if (f != stdin) { fclose(f); }
    }
    while (!in_flight.empty()) { finish_oldest(); }
    {
        std::lock_guard<std::mutex> lock(pool.mutex);
        pool.closed = true;
    }
    pool.work.notify_all();
    for (std::thread& t : workers) { t.join(); }
    progress_show(progress, true);
}

// ---- the command line ----

static struct {
    const char *output, *vocab, *decode, *write_vocab;
    const char* val_tokens;
    int bytes, separators, errors, all, threads;
    int64_t shard_tokens;
} cfg;

static const FlagTable kFlags = {
    {"o", "output", FLAG_STRING, &cfg.output, "", 0, 0, nullptr,
     "where to: TEXT_train.bin, TEXT_val.bin"},
    {"", "val-tokens", FLAG_STRING, &cfg.val_tokens, "auto", 1, 0, nullptr,
     "documents of N tokens, drawn over the text, go to TEXT_val.bin; auto: the smaller of 100,000 and a "
     "tenth; with --separators 0: the first N"},
    {"", "shard-tokens", FLAG_INT64, &cfg.shard_tokens, "0", 0, 1e15, nullptr,
     "a new file every N tokens: TEXT_train_000000.bin and so on; 0: one file"},
    {"", "all", FLAG_BOOL, &cfg.all, "0", 0, 0, nullptr, "also write everything to TEXT_all.bin"},
    {"", "separators", FLAG_ENUM, &cfg.separators, "1", 0, 0, "0|1|nul",
     "1: a line <|endoftext|> or a new file begins a document, an end-of-text token goes before it; nul: "
     "a byte 0 or a new file does; 0: neither"},
    {"", "errors", FLAG_ENUM, &cfg.errors, "strict", 0, 0, "strict|replace",
     "bytes that are no UTF-8, or 0: strict refuses the text, replace takes U+FFFD for each and counts them"},
    {"", "bytes", FLAG_BOOL, &cfg.bytes, "0", 0, 0, nullptr,
     "tokens are bytes (V=256, end of text is byte 0); 0: GPT-2's; --decode: as the shard says"},
    {"", "vocab", FLAG_STRING, &cfg.vocab, "", 0, 0, nullptr,
     "a tokenizer.bin, or GPT-2's merges, if not dev/data/gpt2_bpe/vocab.bpe"},
    {"j", "threads", FLAG_INT, &cfg.threads, "0", 0, 1024, nullptr,
     "threads that encode; 0: one per core"},
    {"", "decode", FLAG_STRING, &cfg.decode, "", 0, 0, nullptr,
     "print this shard as text, do nothing else"},
    {"", "write-vocab", FLAG_STRING, &cfg.write_vocab, "", 0, 0, nullptr,
     "write the vocabulary as a gpt2_tokenizer.bin, do nothing else"},
};

// Reads the flags, returns the files: they may stand before, between and after the flags, of which every one
// has a value. After -- all is files, so that a name may begin with a dash.
static std::vector<std::string> command_line(int argc, char** argv) {
    std::string program = std::string(argv[0]) + " FILE... (- is standard input)";
    std::vector<char*> flags = {&program[0]};
    std::vector<std::string> files;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--") == 0) {
            files.insert(files.end(), argv + i + 1, argv + argc);
            break;
        }
        if (argv[i][0] != '-' || strcmp(argv[i], "-") == 0) {
            files.push_back(argv[i]);
            continue;
        }
        flags.push_back(argv[i]);
        bool takes_next = !strchr(argv[i], '=') && flags_find(kFlags, argv[i]);
        if (takes_next && i + 1 < argc) { flags.push_back(argv[++i]); }
    }
    flags_parse(kFlags, (int)flags.size(), flags.data());
    return files;
}

// Why a file of this size cannot be read, as its beginning shows, or "". *hint: what to do.
static std::string input_fault(const std::string& file, int64_t size, std::string* hint) {
    const std::string head = file_text(file, kBlock);
    const uint8_t* s = (const uint8_t*)head.data();
    const size_t end = (int64_t)head.size() < size ? text_unfinished(s, head.size()) : head.size();
    const size_t fault = text_fault(s, 0, end, cfg.separators == SEPARATORS_NUL);
    if (fault < end && !cfg.errors) {
        *hint = kNoTextHint;
        return no_text(file, (int64_t)fault, head[fault]);
    }
    size_t at = head.compare(0, strlen(kBom), kBom) == 0 ? strlen(kBom) : 0;
    at = head.find_first_not_of("[ \t\r\n", at);
    if (at == std::string::npos || head[at] != '{') { return ""; }
    at = head.find_first_not_of(" \t", at + 1);
    if (at == std::string::npos || head[at] != '"') { return ""; }
    *hint = "dev/data/get.py takes the texts of JSON rows; - < FILE takes a file as it is";
    return format("'%s' holds JSON", file.c_str());
}

// Of all files now, before hours of work. Returns the bytes to read, 0 if that is not known.
static int64_t inputs_check(const std::vector<std::string>& files) {
    int64_t total = 0;
    std::vector<std::string> refused;
    std::string hints;
    for (const std::string& file : files) {
        if (file == "-") { continue; }
        struct stat st;
        std::string why, hint;
        if (access(file.c_str(), R_OK) != 0 || stat(file.c_str(), &st) != 0) {
            why = format("cannot open '%s': %s", file.c_str(), strerror(errno));
        } else if (!S_ISREG(st.st_mode)) {
            why = format("cannot read '%s': it is %s, not a regular file", file.c_str(),
                         not_regular(st.st_mode));
            hint = S_ISDIR(st.st_mode) ? "name its files" : "- is standard input";
        } else {
            why = input_fault(file, (int64_t)st.st_size, &hint);
            total += (int64_t)st.st_size;
        }
        if (!why.empty()) { refused.push_back(shown(why)); }
        if (hints.find(hint) == std::string::npos) { hints += (hints.empty() ? "" : "; ") + hint; }
    }
    std::string said;
    for (size_t i = 0; i < refused.size() && i < 20; i++) { said += (i ? "\n       " : "") + refused[i]; }
    if (refused.size() > 20) { said += format("\n       and %zu more", refused.size() - 20); }
    if (!said.empty()) { die_now((said + (hints.empty() ? "" : "\nhint: ") + hints).c_str()); }
    return std::count(files.begin(), files.end(), "-") ? 0 : total;
}

// ---- shard back to text ----

// The tokenizer that the flags name.
static void flags_tokenizer(Tokenizer* tok) {
    if (cfg.bytes) { tokenizer_init_bytes(tok); }
    else if (tokenizer_head(cfg.vocab).magic == kTokenizerMagic) { tokenizer_read(tok, cfg.vocab); }
    else { tokenizer_init_bpe(tok, cfg.vocab); }
}

// The tokenizer of a shard: what --bytes says, else what its header says, with tokenizer.bin beside the shard
// or in --vocab, else GPT-2's. first: some tokens.
static void shard_tokenizer(Tokenizer* tok, const std::string& path, uint32_t id,
                            const std::vector<uint16_t>& first) {
    if (flags_given(kFlags, "bytes")) {
        id = cfg.bytes ? TOKENIZER_BYTES : TOKENIZER_GPT2;
    } else if (id == TOKENIZER_UNKNOWN && *std::max_element(first.begin(), first.end()) < 256) {
        fprintf(stderr, "warning: '%s' does not say which tokens it holds, and they look like bytes\n"
                "hint: --bytes 1 prints them as such\n", shown(path).c_str());
    }
    switch (id) {
        case TOKENIZER_BYTES: tokenizer_init_bytes(tok); return;
        case TOKENIZER_UNKNOWN: case TOKENIZER_GPT2: tokenizer_init_bpe(tok, cfg.vocab); return;
    }
    const std::string folder = path.substr(0, path.rfind('/') + 1);
    const std::string file = cfg.vocab[0] ? cfg.vocab : folder + "tokenizer.bin";
    if (tokenizer_head(file).id != id) {
        die("'%s' holds tokens of the tokenizer %u, and there is no tokenizer.bin of it beside them\n"
            "hint: --vocab FILE names it", shown(path).c_str(), id);
    }
    tokenizer_read(tok, file.c_str());
}

static void decode_shard(const char* path) {
    FILE* f = fopen_check(path, "rb");
    int64_t size = file_size(path);
    uint32_t header[256];
    fread_check(header, sizeof(uint32_t), 256, f, path);
    if (header[0] != kShardMagic || header[1] != kShardVersion) {
        die("'%s' is no token shard: it begins %u %u, expected %u %u", shown(path).c_str(), header[0],
            header[1], kShardMagic, kShardVersion);
    }
    int64_t count = (size - (int64_t)kShardHeader) / 2;
    if (size % 2 != 0 || (uint32_t)count != header[2]) {
        die("'%s' has %lld bytes, its header announces %u tokens (1024 + 2 bytes for each)",
            shown(path).c_str(), (long long)size, header[2]);
    }
    Tokenizer tok;
    std::vector<uint16_t> tokens;
    bool line_start = true;
    for (int64_t done = 0; done < count; done += (int64_t)tokens.size()) {
        tokens.resize((size_t)std::min(count - done, (int64_t)kBlock));
        fread_check(tokens.data(), sizeof(uint16_t), tokens.size(), f, path);
        if (done == 0) { shard_tokenizer(&tok, path, header[kShardTokenizerWord], tokens); }
        std::string text;
        for (uint16_t id : tokens) {
            if (cfg.separators && id == tok.eot) {
                text += line_start ? "" : "\n";
                text += std::string(kSeparatorLine) + "\n";
            } else {
                text += tokenizer_decode(&tok, id);
            }
            line_start = !text.empty() ? text.back() == '\n' : line_start;
        }
        if (fwrite(text.data(), 1, text.size(), stdout) != text.size()) { break; }     // see stdout_check
    }
    fclose(f);
}

// ---- main ----

// How many of so many tokens are for validation.
static int64_t val_tokens(int64_t total) {
    int64_t wanted = std::min<int64_t>(100000, total / 10);
    if (strcmp(cfg.val_tokens, "auto") != 0 && (!parse_int(cfg.val_tokens, &wanted) || wanted < 0)) {
        die("--val-tokens %s: it is auto or a number of tokens", shown(cfg.val_tokens).c_str());
    }
    return wanted;
}

static void convert(const std::vector<std::string>& files) {
    const bool all_trains = val_tokens(INT64_MAX) == 0;
    Progress progress = {inputs_check(files), 0, 0, 0, 0, 0, isatty(STDERR_FILENO) == 1};
    Tokenizer tok;
    flags_tokenizer(&tok);
    if (tok.pairs.empty()) {
        die("'%s' only decodes: its tokenizer does not cut text by GPT-2's pattern\n"
            "hint: dev/data/get.py files --tokenizer makes its shards", cfg.vocab);
    }
    std::string prefix = cfg.output;
    size_t slash = prefix.rfind('/');
    if (slash != std::string::npos) { mkdir_check(prefix.substr(0, slash + 1).c_str()); }
    ShardWriter none = {"", cfg.shard_tokens, tok.id, {}, 0, 0, 0};
    Outputs out = {none, none, none, cfg.all == 1, (uint16_t)tok.eot, nullptr, {}, 0};
    out.val.stem = prefix + "_val";
    out.train.stem = prefix + "_train";
    out.all.stem = prefix + "_all";
    out.all.shard_tokens = 0;
    for (const ShardWriter* w : {&out.val, &out.train}) { output_check(shard_path(*w, 0).c_str()); }
    if (!all_trains) { out.waiting = waiting_open(prefix); }

    int threads = cfg.threads ? cfg.threads : host_cores();
    progress.start = seconds();
    tokenize_files(files, &tok, threads, (Separators)cfg.separators, cfg.errors == 1, &out, &progress);
    if (progress.tokens == 0) {
        die("there is no text in '%s'%s", shown(files[0]).c_str(), files.size() > 1 ? " and the others" : "");
    }
    const int64_t wanted = val_tokens(progress.tokens);
    if (wanted >= progress.tokens) {
        die("the text has %lld tokens, --val-tokens %lld leaves none to train on\n"
            "hint: --val-tokens %lld is a tenth of it", (long long)progress.tokens, (long long)wanted,
            (long long)progress.tokens / 10);
    }
    if (out.waiting) { outputs_share(&out, cfg.separators != SEPARATORS_NONE, wanted); }
    for (ShardWriter* w : {&out.val, &out.train, &out.all}) { shard_close(w); }
    if (progress.replaced) {
        printf("replaced: %lld bytes that are no text by U+FFFD\n", (long long)progress.replaced);
    }
    double took = seconds() - progress.start;
    double mb = (double)progress.read * 1e-6;
    printf("%.1f MB, %lld tokens in %.2f s: %.1f MB/s with %d thread%s\n", mb, (long long)progress.tokens,
           took, mb / took, threads, threads == 1 ? "" : "s");
    for (const ShardWriter* w : {&out.val, &out.train}) {
        std::string next = shard_path(*w, w->files);
        if (cfg.shard_tokens && file_size(next.c_str()) >= 0) {
            fprintf(stderr, "warning: '%s' is left from an earlier run; remove it before you train on %s_*\n",
                    shown(next).c_str(), shown(w->stem).c_str());
        }
    }
}

int main(int argc, char** argv) {
    std::vector<std::string> files = command_line(argc, argv);
    bool converts = !cfg.decode[0] && !cfg.write_vocab[0];
    if (converts && files.empty()) {
        die("no text to read\nhint: %s text.txt -o data/text; - is standard input; --help lists the flags",
            argv[0]);
    }
    if (converts && !cfg.output[0]) { die("no -o\nhint: -o data/text writes data/text_train.bin"); }
    if (!converts && !files.empty()) {
        die("'%s' is left over: --decode and --write-vocab read no text", shown(files[0]).c_str());
    }
    if (cfg.decode[0]) { decode_shard(cfg.decode); }
    if (cfg.write_vocab[0]) {
        Tokenizer tok;
        if (cfg.bytes) { tokenizer_init_bytes(&tok); } else { tokenizer_init_bpe(&tok, cfg.vocab); }
        tokenizer_write(&tok, cfg.write_vocab);
    }
    if (converts) { convert(files); }
    stdout_check();
    return 0;
}
