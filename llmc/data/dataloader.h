/*
Token shards -> batches. A thread reads one batch ahead. Host only.

A shard is 256 int32 {20240520, 1, ntokens, tokenizer, 0...}, then uint16 tokens; or {20240801, 7, ...}, then
uint32 tokens, for vocabularies above 65,536. The data set is every shard that matches a glob pattern, or a
mixture of several such sources (mixture.h). All shards that name a tokenizer must name the same one; 0 names
none. Beside a shard there may be a mask of the tokens that the loss counts (loss_mask.h): other targets are
-1. Word 8 of the header names the chat template of a shard of conversations (chat_template.h), which must
have a mask.

A sample is a window of T+1 tokens: the first T are a row of inputs, the last T are its targets. Window w of a
shard is its tokens [w*T, w*T + T], so the shard has floor((ntokens - 1) / T) windows. Samples are numbered
g = 0, 1, 2, ... for ever: sample g is number i = g % samples_per_epoch of epoch g / samples_per_epoch.
Unshuffled, this is window i of all shards one after another. Shuffled, it is window
rand_permuted(seed, epoch, samples_per_epoch, i).

In a mixture, mixture_row says which source sample g comes from, and which of that source's samples it is.
Each source has epochs and an order of its own, as if it were alone. The shuffle's key of source k is the seed
with k in its bits from 53 on. samples_per_epoch counts the rows of all sources: after as many samples, a
small source with a large share has begun again.

A step of the job takes the next world*run batches of B samples. Rank r takes `run` consecutive batches, from
batch r*run on. So in the step that begins at position p, row b of the rank's batch j is sample
p + (r*run + j)*B + b. Each batch adds world*B to the position.

Hence one rank sees each sample of an epoch once, and the samples of a step depend only on B*world*run.
Between two steps only the position has to be saved, and a step can begin at any position. A batch at the end
of an epoch continues in the next one. To see each row once, validation takes only the first
samples_per_epoch - p rows of the batch at p.

    DataLoader loader;
    dataloader_init(&loader, "data/train_*.bin", B, T, true, seed, V, {rank, world, run});
    dataloader_next(&loader);               // loader.inputs, loader.targets: (B,T), valid until the next call
    int64_t position = loader.position;     // save this ...
    dataloader_seek(&loader, position);     // ... and the next batch is the same again
    dataloader_free(&loader);
*/
#pragma once

#include <glob.h>               // gives: glob

#include "../checked_files.h"   // gives: die, format, read_at, allow_most_files
#include "../checksum.h"        // gives: Checksum, checksum_text
#include "../rand.h"            // gives: rand_permuted
#include "../worker.h"          // gives: Worker
#include "loss_mask.h"          // gives: LossMask
#include "mixture.h"            // gives: Mixture, mixture_split, mixture_row

struct ShardKind { int magic, version, token_bytes; };
static const ShardKind kShardKinds[] = {{20240520, 1, 2}, {20240801, 7, 4}};        // both are llm.c's
static const int64_t kShardHeaderBytes = 256 * 4;
static const int kShardChatWord = 8, kShardRowWord = 9;

struct DataShard {
    std::string path;
    int64_t tokens, windows;
    uint32_t tokenizer;                     // a TokenizerId of tokenizer.h; 0: not known
    int token_bytes;                        // 2 or 4
    dev_t device;                           // device and inode identify the file under any path
    ino_t inode;
    int fd;                                 // open as long as the loader lives: shuffled rows come from all
    int chat = 0;                           // number of a chat template; 0: no conversations
    int row_tokens = 0;                     // whole conversations fill rows of so many tokens; 0: not known
    LossMask mask = {};
};

struct DataSource {
    std::string pattern, name;              // name: a short one, which tells it from the others
    double share;                           // of the rows; 1 if there is no other source
    size_t first_shard;                     // its shards and windows follow those of the source before
    int64_t first_window, samples_per_epoch;
};

// On the heap, where exit() destroys nothing: die() may end the process while the thread reads.
struct DataPrefetch {
    std::vector<DataShard> shards;          // of each source, sorted by path
    std::vector<DataSource> sources;
    Mixture mixture;
    int B, T, vocab;
    bool shuffle;
    uint64_t seed;

    std::vector<int64_t> first_window;      // per shard: number of its first window among all windows

    // only the thread uses these
    std::vector<char> window;               // (T+1) tokens, of 4 bytes at most

    // the caller uses these only while the worker is idle
    int64_t first_row;                      // request: read samples first_row .. first_row + B - 1 ...
    int source;                             // ... of this source alone; -1: of all
    int slot;                               // ... into this buffer; the caller owns the other one
    std::vector<int> inputs[2], targets[2]; // (B,T)
    std::vector<char> conversations[2];     // (B) whether a row is of a shard of conversations
    std::string error;                      // of the last request; "": none
    Worker* worker;
};

// This process's part of each step; {}: all of it.
struct DataShare { int rank = 0, world = 1, run = 1; };

struct DataLoader {
    const int* inputs;                      // (B,T)
    const int* targets;                     // (B,T)
    const char* conversations;              // (B) whether a row is of a shard of conversations
    int64_t position;                       // of the next batch, in samples of all ranks
    int64_t samples_per_epoch;              // over all ranks
    int64_t tokens;                         // in all shards, with the tails that fill no window
    uint32_t tokenizer;                     // named by the shards; 0: none names one
    int64_t counted;                        // targets of an epoch that the loss counts
    bool masked;                            // a shard has a mask
    int chat;                               // chat template of its conversations; 0: there are none
    int row_tokens;                         // of the rows that whole conversations fill; 0: not known
    DataShare share;
    int source;                             // the next batch has rows of this source alone; -1: of all
    int batch;                              // number of the next batch within its step, 0 .. share.run-1
    DataPrefetch* prefetch;
};

// ---- shards ----

// Opens shard->path and checks its header against its size. Returns the error, or "".
static inline std::string data_shard_open(DataShard* shard) {
    const char* path = shard->path.c_str();
    const char* hint = "hint: `make tokenize`, then `build/tokenize FILE -o NAME` makes shards of a text; or "
                       "name other files with -i and -j";
    shard->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);      // does not block on a pipe, refused below
    if (shard->fd < 0) {
        return format("cannot open '%s': %s%s", path, strerror(errno), errno != EMFILE ? "" :
                      "\nhint: all shards stay open: raise `ulimit -Hn`, or make larger shards");
    }
    struct stat st;
    if (fstat(shard->fd, &st) != 0) { return format("cannot read '%s': %s", path, strerror(errno)); }
    if (S_ISDIR(st.st_mode)) {
        const std::string in = shard->path + (shard->path.back() == '/' ? "" : "/");
        return format("'%s' is a folder\nhint: a pattern in quotes names its shards: -i '%s*_train*.bin', "
                      "-j '%s*_val*.bin'; `python3 dev/data/get.py files` makes shards of a folder of texts",
                      path, in.c_str(), in.c_str());
    }
    if (!S_ISREG(st.st_mode)) { return format("'%s' is not a regular file, so it is no token shard", path); }
    long long bytes = st.st_size;
    int32_t header[256] = {};
    ssize_t got = read_at(shard->fd, header, sizeof(header), 0);
    if (got < 0) { return format("cannot read the header of '%s': %s", path, strerror(errno)); }
    const ShardKind* kind = nullptr;
    for (const ShardKind& k : kShardKinds) { if (k.magic == header[0]) { kind = &k; } }
    if (got >= (ssize_t)sizeof(header[0]) && !kind) {
        return format("'%s' is not a token shard: its first number is %d, expected %d or %d\n%s", path,
                      header[0], kShardKinds[0].magic, kShardKinds[1].magic, hint);
    }
    if (got < kShardHeaderBytes) {
        return format("'%s' is %s: %lld bytes, a token shard has a header of %lld\n%s", path,
                      bytes ? "truncated" : "empty", bytes, (long long)kShardHeaderBytes, hint);
    }
    if (header[1] != kind->version) {
        return format("'%s' is a token shard of version %d, only version %d can be read\n%s", path, header[1],
                      kind->version, hint);
    }
    // The header holds the low 32 bits of the count. Above 2^31 - 1 tokens the file size gives the count.
    long long body = bytes - kShardHeaderBytes, stored = body / kind->token_bytes, claimed = header[2];
    bool wraps = stored > INT32_MAX;
    const bool whole = body % kind->token_bytes == 0;
    if (!whole || (wraps ? (uint32_t)claimed != (uint32_t)stored : claimed != stored)) {
        const char* what = claimed < 0 && !wraps ? "has a negative token count"
                         : claimed > stored ? "is truncated" : "does not match its header";
        return format("'%s' %s: the header says %lld tokens, %lld bytes hold %lld\n%s", path, what, claimed,
                      bytes, stored, hint);
    }
    shard->tokens = stored;
    shard->token_bytes = kind->token_bytes;
    shard->tokenizer = (uint32_t)header[3];
    shard->chat = header[kShardChatWord];
    shard->row_tokens = header[kShardRowWord];
    shard->device = st.st_dev;
    shard->inode = st.st_ino;
    return "";
}

// The files that match the pattern, sorted. A file whose name is the pattern itself comes alone. glob's own
// calls would take what they cannot read for empty, and the run would learn from fewer shards.
static inline std::vector<std::string> data_glob(const char* pattern) {
    if (file_size(pattern) >= 0) { return {pattern}; }
    static std::string listed;                  // the folder that glob reads now
    glob_t found = {};
    found.gl_opendir = [](const char* folder) -> void* {
        listed = folder;
        DIR* dir = opendir(folder);
        if (!dir) { absent_or_die("list the folder", listed); }
        return dir;
    };
    found.gl_readdir = [](void* dir) { return folder_next((DIR*)dir, listed); };
    found.gl_closedir = [](void* dir) { closedir((DIR*)dir); };
    found.gl_lstat = [](const char* path, struct stat* st) { return path_stat(path, st, lstat) ? 0 : -1; };
    found.gl_stat = [](const char* path, struct stat* st) { return path_stat(path, st) ? 0 : -1; };
    int rc = glob(pattern, GLOB_NOSORT | GLOB_TILDE | GLOB_ALTDIRFUNC, nullptr, &found);
    if (rc != 0) {
        const bool is_default = strncmp(pattern, "dev/data/tinyshakespeare/", 25) == 0;
        const char* hint = is_default
            ? "hint: `make tinyshakespeare` makes it; -v 0 trains without validation"
            : "hint: python3 dev/data/get.py makes shards, and names them; -v 0 trains without validation";
        die("no data: %s '%s'\n%s", rc == GLOB_NOMATCH ? "no file matches" : "cannot list", pattern,
            strchr(pattern, ':') ? kMixtureHint : hint);
    }
    std::vector<std::string> paths(found.gl_pathv, found.gl_pathv + found.gl_pathc);
    globfree(&found);
    std::sort(paths.begin(), paths.end());      // by bytes, so the locale does not matter
    return paths;
}

// ---- order: sample number, of a source alone or of all (-1) -> (shard, window) ----

static inline void data_locate(const DataPrefetch* p, int alone, int64_t sample, int64_t* shard,
                               int64_t* window) {
    const MixtureRow row = alone < 0 ? mixture_row(p->mixture, sample) : MixtureRow{alone, sample};
    const DataSource& source = p->sources[(size_t)row.source];
    const int64_t n = source.samples_per_epoch, epoch = row.number / n;
    int64_t i = row.number % n;
    const uint64_t key = p->seed ^ (uint64_t)row.source << 53;
    // Epochs 2^32 apart share an order.
    if (p->shuffle) { i = (int64_t)rand_permuted(key, (uint32_t)epoch, (uint64_t)n, (uint64_t)i); }
    i += source.first_window;
    // The last shard that starts at or before window i. A shard without windows starts with its successor.
    auto after = std::upper_bound(p->first_window.begin(), p->first_window.end(), i);
    *shard = after - p->first_window.begin() - 1;
    *window = i - p->first_window[(size_t)*shard];
}

// Targets of window w that the loss counts.
static inline int64_t data_counted(const DataShard& shard, int T, int64_t w) {
    return shard.mask.fd < 0 ? T : shard.mask.counted[(size_t)w];
}

// ---- reading ----

// Token i of a buffer as the shard has it. Little-endian, like the files.
static inline uint32_t data_token(const DataShard& shard, const char* buffer, int64_t i) {
    uint32_t token = 0;
    memcpy(&token, buffer + i * shard.token_bytes, (size_t)shard.token_bytes);
    return token;
}

// Reads one row. Returns the error, or "".
static inline std::string data_read_row(DataPrefetch* p, int64_t sample, int* inputs, int* targets /*(T)*/,
                                        char* conversations = nullptr) {
    int64_t s, w;
    data_locate(p, p->source, sample, &s, &w);
    const DataShard& shard = p->shards[(size_t)s];
    const char* path = shard.path.c_str();
    if (conversations) { *conversations = shard.chat != 0; }
    int T = p->T;
    int64_t offset = kShardHeaderBytes + shard.token_bytes * w * T;
    const size_t bytes = (size_t)shard.token_bytes * ((size_t)T + 1);
    const ssize_t got = read_at(shard.fd, p->window.data(), bytes, offset);
    if (got < 0) { return format("cannot read '%s': %s", path, strerror(errno)); }
    if ((size_t)got < bytes) { return format("'%s' was cut short while it was in use", path); }
    for (int t = 0; t <= T; t++) {
        const uint32_t token = data_token(shard, p->window.data(), t);
        if (token >= (uint32_t)p->vocab) {
            return format("token id %u in '%s' at byte %lld (token number %lld), but the model's ids are "
                          "0..%d\nhint: get.py %s --model RUN makes shards with the model's own tokenizer; "
                          "or choose a model with a larger V (-e)", token, path,
                          (long long)(offset + shard.token_bytes * t), (long long)(w * T + t), p->vocab - 1,
                          shard.mask.fd < 0 ? "files" : "answers");
        }
        if (t < T) { inputs[t] = (int)token; }
        if (t > 0) { targets[t - 1] = (int)token; }
    }
    return shard.mask.fd < 0 ? "" : loss_mask_apply(shard.mask, shard.path, w * T, T, targets);
}

static inline void data_read_batch(DataPrefetch* p) {
    int* inputs = p->inputs[p->slot].data();
    int* targets = p->targets[p->slot].data();
    p->error = "";
    for (int b = 0; b < p->B && p->error.empty(); b++) {
        const size_t row = (size_t)b * (size_t)p->T;
        p->error = data_read_row(p, p->first_row + b, inputs + row, targets + row,
                                 &p->conversations[p->slot][(size_t)b]);
    }
}

// The first sample of the next batch. Each batch of this step has moved position by a batch of every rank,
// but this rank's batches follow each other.
static inline int64_t data_first_row(const DataLoader* loader) {
    const DataShare& share = loader->share;
    const int64_t B = loader->prefetch->B, step_began = loader->position - loader->batch * share.world * B;
    return step_began + ((int64_t)share.rank * share.run + loader->batch) * B;
}

static inline void data_request(DataLoader* loader) {       // the worker is idle
    DataPrefetch* p = loader->prefetch;
    p->first_row = data_first_row(loader);
    p->source = loader->source;
    worker_post(p->worker, [p] { data_read_batch(p); });
}

// ---- the loader ----

static inline bool data_same_file(const DataShard& a, const DataShard& b) {
    return a.device == b.device && a.inode == b.inode;
}

// Dies if this shard names another tokenizer than an earlier one.
static inline void data_same_tokenizer(DataLoader* loader, const DataShard& shard) {
    if (shard.tokenizer && loader->tokenizer && shard.tokenizer != loader->tokenizer) {
        const DataShard* first = nullptr;
        for (const DataShard& s : loader->prefetch->shards) { if (!first && s.tokenizer) { first = &s; } }
        die("'%s' holds tokens of tokenizer %u, '%s' of %u (1: GPT-2, 2: bytes)\n"
            "hint: name one of them only with -i and -j, or make both with the same tokenizer",
            first->path.c_str(), first->tokenizer, shard.path.c_str(), shard.tokenizer);
    }
    if (shard.tokenizer) { loader->tokenizer = shard.tokenizer; }
}

// Adds the shards of a source. Dies if another source has one of them.
static inline void data_open_source(DataLoader* loader, DataSource source, int T) {
    DataPrefetch* p = loader->prefetch;
    source.first_shard = p->shards.size();
    source.first_window = loader->samples_per_epoch;
    int64_t longest = 0, counted = 0;
    for (const std::string& path : data_glob(source.pattern.c_str())) {
        DataShard shard = {path, 0, 0, 0, 0, 0, 0, -1};
        die_if(data_shard_open(&shard));
        data_same_tokenizer(loader, shard);
        for (size_t s = 0; s < source.first_shard; s++) {
            if (data_same_file(p->shards[s], shard)) {
                die("'%s' is in two sources of a mixture\nhint: give each source other shards", path.c_str());
            }
        }
        if (shard.tokens > 0) { shard.windows = (shard.tokens - 1) / T; }   // - 1: the last target
        die_if(loss_mask_open(&shard.mask, path, shard.tokens, T, shard.chat != 0));
        for (int64_t w = 0; w < shard.windows; w++) { counted += data_counted(shard, T, w); }
        loader->masked = loader->masked || shard.mask.fd >= 0;
        loader->chat = std::max(loader->chat, shard.chat);
        loader->row_tokens = std::max(loader->row_tokens, shard.row_tokens);
        p->shards.push_back(shard);
        p->first_window.push_back(loader->samples_per_epoch);
        source.samples_per_epoch += shard.windows;
        loader->samples_per_epoch += shard.windows;
        loader->tokens += shard.tokens;
        longest = std::max(longest, shard.tokens);
    }
    if (source.samples_per_epoch == 0) {
        die("'%s' is too short: one row takes T+1 = %lld tokens, the longest shard has %lld\n"
            "hint: use a smaller -t or more text", source.pattern.c_str(), (long long)T + 1,
            (long long)longest);
    }
    if (counted == 0) {
        die("the masks of '%s' count no token: there is nothing to learn", source.pattern.c_str());
    }
    loader->counted += counted;
    p->sources.push_back(source);
}

// data: a pattern, or a mixture of several.
static inline void dataloader_init(DataLoader* loader, const char* data, int B, int T, bool shuffle,
                                   uint64_t seed, int vocab, DataShare share = {}) {
    assert(B > 0 && T > 0 && vocab > 0 && share.rank >= 0 && share.rank < share.world && share.run > 0);
    DataPrefetch* p = new DataPrefetch();
    *loader = DataLoader();
    loader->share = share;
    loader->source = -1;
    loader->prefetch = p;
    allow_most_files();
    const std::vector<MixturePart> parts = mixture_split(data);
    p->mixture = mixture_init(mixture_weights(data, parts));
    const std::vector<std::string> names = mixture_names(parts);
    for (size_t k = 0; k < parts.size(); k++) {
        const double part = (double)p->mixture.weights[k] / (double)p->mixture.rows.size();
        data_open_source(loader, {parts[k].pattern, names[k], part, 0, 0, 0}, T);
    }
    p->B = B;
    p->T = T;
    p->vocab = vocab;
    p->shuffle = shuffle;
    p->seed = seed;
    p->window.resize(4 * ((size_t)T + 1));
    for (int slot = 0; slot < 2; slot++) {
        p->inputs[slot].resize((size_t)B * (size_t)T);
        p->targets[slot].resize((size_t)B * (size_t)T);
        p->conversations[slot].resize((size_t)B);
    }
    p->worker = worker_start("reads the data");
    data_request(loader);
    // An error in the first batch is reported here, before the run begins.
    worker_wait(p->worker);
    die_if(p->error);
}

static inline void dataloader_next(DataLoader* loader) {
    DataPrefetch* p = loader->prefetch;
    worker_wait(p->worker);
    if (p->first_row != data_first_row(loader) || p->source != loader->source) {    // after dataloader_seek
        data_request(loader);
        worker_wait(p->worker);
    }
    die_if(p->error);
    loader->inputs = p->inputs[p->slot].data();
    loader->targets = p->targets[p->slot].data();
    loader->conversations = p->conversations[p->slot].data();
    loader->position += (int64_t)loader->share.world * p->B;
    loader->batch = (loader->batch + 1) % loader->share.run;
    p->slot = 1 - p->slot;
    data_request(loader);
}

// The next step begins at `position`, of all rows or of those of `source` alone. dataloader_next drops the
// batch read ahead if it is another one.
static inline void dataloader_seek(DataLoader* loader, int64_t position, int source = -1) {
    assert(position >= 0 && source < (int)loader->prefetch->sources.size());
    loader->position = position;
    loader->source = source;
    loader->batch = 0;
}

// Targets that the loss counts among those of samples [first, first + count) of the job: of all, or of the
// source that was sought last.
static inline int64_t dataloader_counted(const DataLoader* loader, int64_t first, int64_t count) {
    const DataPrefetch* p = loader->prefetch;
    int64_t sum = loader->masked ? 0 : count * p->T;
    for (int64_t i = first; i < first + count && loader->masked; i++) {
        int64_t s, w;
        data_locate(p, loader->source, i, &s, &w);
        sum += data_counted(p->shards[(size_t)s], p->T, w);
    }
    return sum;
}

// The path of a file that both loaders read, or nullptr. Nobody validates on training data on purpose.
static inline const char* dataloader_shared_file(const DataLoader* a, const DataLoader* b) {
    for (const DataShard& x : a->prefetch->shards) {
        for (const DataShard& y : b->prefetch->shards) {
            if (data_same_file(x, y)) { return y.path.c_str(); }
        }
    }
    return nullptr;
}

// The path of the first shard, "" without data.
static inline std::string dataloader_path(const DataLoader& loader) {
    return loader.prefetch ? loader.prefetch->shards[0].path : "";
}

// Names and sizes of the shards in one line, "" without data. Ranks compare it: their folders may differ.
// Before a source's shards stands its share.
static inline std::string dataloader_facts(const DataLoader* loader) {
    if (!loader->prefetch) { return ""; }
    std::string text = format("%lld tokens in %zu shards:", (long long)loader->tokens,
                              loader->prefetch->shards.size());
    const DataPrefetch* p = loader->prefetch;
    size_t source = 0;                          // the next one
    for (size_t s = 0; s < p->shards.size(); s++) {
        if (p->sources.size() > 1 && source < p->sources.size() && p->sources[source].first_shard == s) {
            const int64_t weight = p->mixture.weights[source++];
            text += format(" [%lld of %zu rows]", (long long)weight, p->mixture.rows.size());
        }
        const DataShard& shard = p->shards[s];
        const std::string name = shard.path.substr(shard.path.rfind('/') + 1);
        text += format(" %s %lld", name.c_str(), (long long)shard.tokens);
    }
    if (loader->masked) { text += format("; %lld targets count", (long long)loader->counted); }
    return text;
}

// A checksum of each shard's header, of eight parts of its tokens, the first and the last among them, and of
// what its mask counts; "" without data. It tells other tokens in files of equal sizes from a copy.
static inline std::string dataloader_sample(const DataLoader* loader) {
    if (!loader->prefetch) { return ""; }
    const int64_t parts = 8, at_once = 4096;
    std::vector<char> part((size_t)at_once);
    Checksum sum;
    for (const DataShard& shard : loader->prefetch->shards) {
        const int64_t room = std::max<int64_t>(0, shard.token_bytes * shard.tokens - at_once);
        for (int64_t k = -1; k < parts; k++) {              // -1: the header
            const int64_t at = k < 0 ? 0 : kShardHeaderBytes + room * k / (parts - 1);
            const int64_t bytes = k < 0 ? kShardHeaderBytes : at_once;
            const ssize_t got = read_at(shard.fd, part.data(), (size_t)bytes, at);
            if (got < 0) { die("cannot read '%s': %s", shard.path.c_str(), strerror(errno)); }
            checksum_add(&sum, part.data(), (size_t)got);
        }
        const std::vector<int>& counted = shard.mask.counted;
        checksum_add(&sum, counted.data(), counted.size() * sizeof(int));
    }
    return checksum_text(checksum_end(&sum));
}

static inline void dataloader_free(DataLoader* loader) {
    DataPrefetch* p = loader->prefetch;
    if (!p) { return; }
    worker_free(p->worker);
    for (const DataShard& shard : p->shards) {
        close(shard.fd);
        if (shard.mask.fd >= 0) { close(shard.mask.fd); }
    }
    delete p;
    *loader = DataLoader();
}
