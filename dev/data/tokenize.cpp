/*
Text to token shards: the files that train_gpt2 reads with -i and -j.

    g++ -std=c++17 -O3 -pthread dev/data/tokenize.cpp -o build/tokenize
    build/tokenize a.txt b.txt -o data/docs --val-tokens 100000 # data/docs_train.bin, data/docs_val.bin
    xz -dc web.xz | build/tokenize - -o data/web --shard-tokens 100000000   # data/web_train_000000.bin, ...
    build/tokenize --decode data/docs_val.bin | head            # tokens back to text

A line <|endoftext|> separates documents, and so does the end of a file; every document that is not empty gets
one end-of-text token in front. `--separators 0` takes the text as it is, all files as one, and adds no token.

The main thread reads blocks, cuts them where a piece is certain to begin (so the cut changes no token), hands
them to the threads, and writes the results in order: memory stays at a few blocks per thread whatever the
size of the text.
*/
#include <math.h>       // gives: fmax

#include <algorithm>    // gives: std::count, std::min
#include <chrono>       // gives: steady_clock
#include <condition_variable>   // gives: std::condition_variable
#include <deque>        // gives: std::deque
#include <memory>       // gives: std::unique_ptr
#include <mutex>        // gives: std::mutex
#include <string>       // gives: std::string
#include <thread>       // gives: std::thread
#include <vector>       // gives: std::vector

#include "../../llmc/check.h"       // gives: die, AtomicFile
#include "../../llmc/flags.h"       // gives: Flag, flags_parse
#include "../../llmc/tokenizer.h"   // gives: Tokenizer

static const char kSeparator[] = "<|endoftext|>";
static const size_t kSeparatorLength = sizeof(kSeparator) - 1;
static const size_t kBlock = 1 << 20;               // bytes read at a time: one job
static const uint32_t kShardMagic = 20240520, kShardVersion = 1;
static const size_t kShardHeader = 256 * sizeof(uint32_t);

static double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// ---- shards ----

// One of the outputs (train, val, all): PREFIX_NAME.bin, or PREFIX_NAME_000000.bin and so on.
struct ShardWriter {
    std::string stem;           // PREFIX_NAME
    int64_t shard_tokens;       // limit of one file; 0: one file takes all
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
    if (fseek(w->file.f, 0, SEEK_SET) != 0) { atomic_fail(&w->file, "write"); }
    atomic_write(&w->file, header, sizeof(header));
    atomic_commit(&w->file);
    printf("%s: %lld tokens\n", w->file.path.c_str(), (long long)w->in_file);
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

// The first val_left tokens go to val, the rest to train; all, if wanted, gets both.
struct Outputs {
    ShardWriter val, train, all;
    int64_t val_left;
    bool want_all;
};

static Outputs outputs;         // global, so that an error can take the unfinished files away

static void outputs_remove_parts() {
    for (ShardWriter* w : {&outputs.val, &outputs.train, &outputs.all}) {
        if (w->file.f) { unlink(w->file.temp.c_str()); }
    }
}

static void outputs_put(const uint16_t* tokens, size_t n) {
    if (outputs.want_all) { shard_put(&outputs.all, tokens, n); }
    size_t val = (size_t)std::min((int64_t)n, outputs.val_left);
    shard_put(&outputs.val, tokens, val);
    shard_put(&outputs.train, tokens + val, n - val);
    outputs.val_left -= (int64_t)val;
}

// ---- jobs ----

struct Job {
    std::string text;
    bool starts_document;           // a file begins here; else the last job's document goes on
    std::vector<uint16_t> tokens;
    bool done;
};

// The next separator line at or after from: its first byte, and in *after the first byte of the next line.
static size_t find_separator(const std::string& text, size_t from, size_t* after) {
    for (size_t p = from; (p = text.find(kSeparator, p)) != std::string::npos; p++) {
        size_t end = p + kSeparatorLength;
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
                    bool separators) {
    const std::string& text = job->text;
    bool starts = job->starts_document;
    ids.clear();
    for (size_t pos = 0, end, after = 0; pos < text.size(); pos = after) {
        end = after = text.size();
        if (separators) { end = find_separator(text, pos, &after); }
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

static void pool_thread(Pool* pool, const Tokenizer* tok, bool separators) {
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

// The last place after `from` where text may be cut, 0 if there is none. Right after a separator there is
// none, so that the line stays whole.
static size_t last_cut(const Tokenizer* tok, const std::string& text, size_t from) {
    for (size_t i = text.size(); i-- > std::max(from, (size_t)1);) {
        bool after_separator = i >= kSeparatorLength &&
                               text.compare(i - kSeparatorLength, kSeparatorLength, kSeparator) == 0;
        if (!after_separator && tokenizer_can_cut(tok, text.data(), text.size(), i)) { return i; }
    }
    return 0;
}

struct Progress {
    int64_t total, read, tokens;    // total, read: bytes; total is 0 if not known
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
                           bool separators, Progress* progress) {
    Pool pool;
    std::vector<std::thread> workers;
    for (int i = 0; i < threads; i++) { workers.emplace_back(pool_thread, &pool, tok, separators); }
    std::deque<std::unique_ptr<Job>> in_flight;

    auto finish_oldest = [&] {
        Job* job = in_flight.front().get();
        {
            std::unique_lock<std::mutex> lock(pool.mutex);
            pool.ready.wait(lock, [&] { return job->done; });
        }
        outputs_put(job->tokens.data(), job->tokens.size());
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
    bool starts_document = true;
    for (size_t i = 0; i < files.size(); i++) {
        FILE* f = files[i] == "-" ? stdin : fopen_check(files[i].c_str(), "rb");
        for (bool end_of_file = false; !end_of_file;) {
            size_t old = text.size();
            text.resize(old + kBlock);
            size_t n = fread(&text[old], 1, kBlock, f);
            if (ferror(f)) { die("cannot read '%s': %s", files[i].c_str(), strerror(errno)); }
            text.resize(old + n);
            progress->read += (int64_t)n;
            end_of_file = n < kBlock;
            bool whole = end_of_file && (separators || i + 1 == files.size());
            size_t cut = whole ? text.size() : last_cut(tok, text, old);
            if (cut == 0) { continue; }
            submit(text.substr(0, cut), starts_document);
            text.erase(0, cut);
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

// ---- shard back to text ----

static void decode_shard(const Tokenizer* tok, const char* path, bool separators) {
    FILE* f = fopen_check(path, "rb");
    int64_t size = file_size(path);
    uint32_t header[256];
    fread_check(header, sizeof(uint32_t), 256, f, path);
    if (header[0] != kShardMagic || header[1] != kShardVersion) {
        die("'%s' is no token shard: it begins %u %u, expected %u %u", path, header[0], header[1],
            kShardMagic, kShardVersion);
    }
    int64_t count = (size - (int64_t)kShardHeader) / 2;
    if (size % 2 != 0 || (uint32_t)count != header[2]) {
        die("'%s' has %lld bytes, its header announces %u tokens (1024 + 2 bytes for each)", path,
            (long long)size, header[2]);
    }
    std::vector<uint16_t> tokens(kBlock);
    bool line_start = true;
    while (count > 0) {
        size_t n = (size_t)std::min(count, (int64_t)tokens.size());
        fread_check(tokens.data(), sizeof(uint16_t), n, f, path);
        std::string text;
        for (size_t i = 0; i < n; i++) {
            if (separators && tokens[i] == tok->eot) {
                text += line_start ? "" : "\n";
                text += std::string(kSeparator) + "\n";
            } else {
                text += tokenizer_decode(tok, tokens[i]);
            }
            line_start = !text.empty() ? text.back() == '\n' : line_start;
        }
        if (fwrite(text.data(), 1, text.size(), stdout) != text.size()) {
            die("cannot write: %s", strerror(errno));
        }
        count -= (int64_t)n;
    }
    fclose(f);
}

// ---- main ----

int main(int argc, char** argv) {
    struct { const char *output, *vocab, *decode, *write_vocab; int bytes, separators, all, threads;
             int64_t val_tokens, shard_tokens; } cfg;
    const Flag table[] = {
        {"o", "output", FLAG_STRING, &cfg.output, "", 0, 0, nullptr,
         "where to: TEXT_train.bin, TEXT_val.bin"},
        {"", "val-tokens", FLAG_INT64, &cfg.val_tokens, "0", 0, 1e15, nullptr,
         "the first N tokens go to TEXT_val.bin"},
        {"", "shard-tokens", FLAG_INT64, &cfg.shard_tokens, "0", 0, 1e15, nullptr,
         "a new file every N tokens: TEXT_train_000000.bin and so on; 0: one file"},
        {"", "all", FLAG_BOOL, &cfg.all, "0", 0, 0, nullptr, "also write everything to TEXT_all.bin"},
        {"", "separators", FLAG_BOOL, &cfg.separators, "1", 0, 0, nullptr,
         "a line <|endoftext|> or a new file begins a document, an end-of-text token goes before it; 0: no"},
        {"", "bytes", FLAG_BOOL, &cfg.bytes, "0", 0, 0, nullptr,
         "tokens are bytes (V=256, end of text is byte 0); 0: GPT-2's"},
        {"", "vocab", FLAG_STRING, &cfg.vocab, "", 0, 0, nullptr,
         "GPT-2's merges, if not dev/data/gpt2_bpe/vocab.bpe"},
        {"j", "threads", FLAG_INT, &cfg.threads, "0", 0, 1024, nullptr,
         "threads that encode; 0: one per core"},
        {"", "decode", FLAG_STRING, &cfg.decode, "", 0, 0, nullptr,
         "print this shard as text, do nothing else"},
        {"", "write-vocab", FLAG_STRING, &cfg.write_vocab, "", 0, 0, nullptr,
         "write the vocabulary as a gpt2_tokenizer.bin, do nothing else"},
    };
    const int num_flags = sizeof(table) / sizeof(table[0]);

    // Files come first; the rest is flags.
    std::vector<std::string> files;
    int first = 1;
    for (; first < argc && (argv[first][0] != '-' || strcmp(argv[first], "-") == 0); first++) {
        files.push_back(argv[first]);
    }
    std::string program = std::string(argv[0]) + " FILE... (- is standard input)";
    std::vector<char*> args = {&program[0]};
    args.insert(args.end(), argv + first, argv + argc);
    flags_parse(table, num_flags, (int)args.size(), args.data());

    bool converts = !cfg.decode[0] && !cfg.write_vocab[0];
    if (converts && files.empty()) {
        die("no text to read\nhint: %s text.txt -o data/text; - is standard input; --help lists the flags",
            argv[0]);
    }
    if (converts && !cfg.output[0]) { die("no -o\nhint: -o data/text writes data/text_train.bin"); }
    if (!converts && !files.empty()) {
        die("'%s' is left over: --decode and --write-vocab read no text", files[0].c_str());
    }
    Progress progress = {0, 0, 0, 0, 0, isatty(STDERR_FILENO) == 1};
    for (const std::string& file : files) {         // all now: a missing one is found before hours of work
        if (file == "-") { continue; }
        struct stat st;
        if (access(file.c_str(), R_OK) != 0 || stat(file.c_str(), &st) != 0) {
            die("cannot open '%s': %s", file.c_str(), strerror(errno));
        }
        if (S_ISDIR(st.st_mode)) {
            die("'%s' is a folder\nhint: name its files, %s/*", file.c_str(), file.c_str());
        }
        progress.total += (int64_t)st.st_size;
    }
    if (std::count(files.begin(), files.end(), "-")) { progress.total = 0; }

    Tokenizer tok;
    if (cfg.bytes) { tokenizer_init_bytes(&tok); } else { tokenizer_init_bpe(&tok, cfg.vocab); }
    if (cfg.write_vocab[0]) { tokenizer_write(&tok, cfg.write_vocab); }
    if (cfg.decode[0]) { decode_shard(&tok, cfg.decode, cfg.separators); }
    if (!converts) { return 0; }

    std::string prefix = cfg.output;
    size_t slash = prefix.rfind('/');
    if (slash != std::string::npos) { mkdir_check(prefix.substr(0, slash + 1).c_str()); }
    ShardWriter none = {"", cfg.shard_tokens, {}, 0, 0, 0};
    outputs = {none, none, none, cfg.val_tokens, cfg.all == 1};
    outputs.val.stem = prefix + "_val";
    outputs.train.stem = prefix + "_train";
    outputs.all.stem = prefix + "_all";
    outputs.all.shard_tokens = 0;
    die_hook = outputs_remove_parts;

    int threads = cfg.threads ? cfg.threads : std::max(1, (int)std::thread::hardware_concurrency());
    progress.start = seconds();
    tokenize_files(files, &tok, threads, cfg.separators, &progress);
    if (progress.tokens == 0) {
        die("there is no text in '%s'%s", files[0].c_str(), files.size() > 1 ? " and the others" : "");
    }
    if (outputs.train.total == 0) {
        die("the text has %lld tokens, --val-tokens %lld leaves none to train on\nhint: ask for fewer",
            (long long)progress.tokens, (long long)cfg.val_tokens);
    }
    shard_close(&outputs.val);
    shard_close(&outputs.train);
    shard_close(&outputs.all);
    double took = seconds() - progress.start;
    double mb = (double)progress.read * 1e-6;
    printf("%.1f MB, %lld tokens in %.2f s: %.1f MB/s with %d thread%s\n", mb, (long long)progress.tokens,
           took, mb / took, threads, threads == 1 ? "" : "s");
    for (const ShardWriter* w : {&outputs.val, &outputs.train}) {
        std::string next = shard_path(*w, w->files);
        if (cfg.shard_tokens && file_size(next.c_str()) >= 0) {
            fprintf(stderr, "warning: '%s' is left from an earlier run; remove it before you train on %s_*\n",
                    next.c_str(), w->stem.c_str());
        }
    }
    return 0;
}
