/*
Fuzz targets for libFuzzer: whatever bytes come from outside, a program ends with one clear sentence or does
what it should. Built by clang with ASan and UBSan; one program, because most of it is train_gpt2.cu.

    make build/fuzz
    build/fuzz shard                                        for ever; folders and libFuzzer's flags follow
    build/fuzz shard build/fuzz-shard-crash-1234            one input again
    python3 dev/fuzz/run.py shard --seconds 600             what the tests do, for ten minutes

A target is a row of kTargets: a name, a function, the longest input, and how many MB a single allocation may
have. A property that does not hold is a crash, like all that the sanitizers see. die() throws Died here, and
what it says is held to the house's rules. New: a function, a row, and seeds in dev/fuzz/seeds.py.
*/
#include <cstdio>       // gives: fopen, fclose: before the two are renamed
#include <set>          // gives: std::set

// An error leaves files open, as the end of the program closes them. Here it goes on, and closes these.
static std::set<FILE*> open_files;

static FILE* fuzz_fopen(const char* path, const char* mode) {
    FILE* f = fopen(path, mode);
    if (f) { open_files.insert(f); }
    return f;
}

static int fuzz_fclose(FILE* f) {
    open_files.erase(f);
    return fclose(f);
}

#define fopen fuzz_fopen
#define fclose fuzz_fclose
#include "llmc/files/json.h"
#define TESTING
#include "../../train_gpt2.cu"  // gives: what is tested

#include <sys/mman.h>           // gives: memfd_create
#include "dev/data/tokenizer_tool.h"    // gives: what is tested
#include "llmc/files/state_file.h"      // gives: what is tested

// Nothing is made wrong on purpose here, as test_gpt2.cu's --break does.
template <class Args> static void break_outputs(const Args&, Stream) {}

struct Died { std::string text; };

#define PROPERTY(cond, ...)                                                 \
    do {                                                                    \
        if (!(cond)) {                                                      \
            fprintf(stderr, "PROPERTY %s:%d: %s: ", __FILE__, __LINE__, #cond); \
            fprintf(stderr, __VA_ARGS__);                                   \
            fprintf(stderr, "\n");                                          \
            abort();                                                        \
        }                                                                   \
    } while (0)

typedef std::string Bytes;

static uint8_t take_byte(Bytes* input) {        // the first one; 0 where there is none
    const uint8_t byte = input->empty() ? 0 : (uint8_t)(*input)[0];
    input->erase(0, 1);
    return byte;
}

static int32_t word(const Bytes& file, size_t i) {          // 0 behind the end
    int32_t value = 0;
    if (4 * i + 4 <= file.size()) { memcpy(&value, &file[4 * i], 4); }
    return value;
}

// A path to a file that holds these bytes. There is one such file: the next call replaces them.
static const char* file_of(const Bytes& bytes) {
    static const int fd = memfd_create("fuzz", MFD_CLOEXEC);
    static const std::string path = format("/proc/self/fd/%d", fd);
    const bool written = fd >= 0 && ftruncate(fd, 0) == 0 &&
                         pwrite(fd, bytes.data(), bytes.size(), 0) == (ssize_t)bytes.size();
    PROPERTY(written, "%s", strerror(errno));
    return path.c_str();
}

static Bytes bytes_of(const char* path) {
    FILE* f = fopen_check(path, "rb");
    Bytes bytes((size_t)file_size(path), '\0');
    fread_check(&bytes[0], 1, bytes.size(), f, path);
    fclose(f);
    return bytes;
}

// A name for a file to be written, in a folder that goes when the program ends.
static const std::string& output_path() {
    static std::string path;
    if (path.empty()) {
        const char* temp = getenv("TMPDIR");
        std::string folder = std::string(temp ? temp : "/tmp") + "/fuzz.XXXXXX";
        PROPERTY(mkdtemp(&folder[0]), "no folder %s: %s", folder.c_str(), strerror(errno));
        path = folder + "/out.bin";
        atexit([] {
            unlink(path.c_str());
            rmdir(path.substr(0, path.rfind('/')).c_str());
        });
    }
    return path;
}

// ---- token shards: T, V (2 bytes), 1: the header's count is made to fit; then the file ----

static void fuzz_shard(Bytes input) {
    const int T = 1 + take_byte(&input), low = take_byte(&input), V = 1 + low + 256 * take_byte(&input);
    const bool fit = take_byte(&input) & 1;
    if (fit && input.size() >= 1024) {
        const int32_t count = (int32_t)((input.size() - 1024) / (word(input, 0) == 20240801 ? 4 : 2));
        memcpy(&input[8], &count, sizeof(count));
    }
    DataPrefetch p = {};
    DataShard shard = {};
    shard.path = file_of(input);
    std::string error = data_shard_open(&shard);
    struct Close { int fd; ~Close() { close(fd); } } at_the_end = {shard.fd};
    if (!error.empty()) { die("%s", error.c_str()); }
    const int64_t width = shard.token_bytes;
    const bool fits = 1024 + width * shard.tokens == (int64_t)input.size() && word(input, 2) == shard.tokens;
    PROPERTY(fits, "%lld tokens in %zu bytes", (long long)shard.tokens, input.size());
    shard.windows = shard.tokens > 0 ? (shard.tokens - 1) / T : 0;
    if (shard.windows == 0) { return; }
    p.shards = {shard};
    p.first_window = {0};
    p.sources = {{"", "", 1.0, 0, 0, shard.windows}};
    p.source = 0;
    p.T = T;
    p.vocab = V;
    p.window.resize(4 * ((size_t)T + 1));
    std::vector<int> inputs((size_t)T), targets((size_t)T);
    for (int64_t row = 0; row < shard.windows; row++) {
        error = data_read_row(&p, row, inputs.data(), targets.data());
        bool good = true;
        for (int t = 0; t <= T; t++) {
            uint32_t token = 0;
            memcpy(&token, &input[1024 + (size_t)(width * (row * T + t))], (size_t)width);
            good = good && token < (uint32_t)V;
            if (!good) { break; }
            const int id = (int)token;
            if (t < T) { PROPERTY(!error.empty() || inputs[(size_t)t] == id, "input %d", t); }
            if (t > 0) { PROPERTY(!error.empty() || targets[(size_t)t - 1] == id, "target %d", t); }
        }
        PROPERTY(good == error.empty(), "row %lld: '%s'", (long long)row, error.c_str());
        if (!good) { die("%s", error.c_str()); }
    }
}

// ---- questions: B, T, V (2 bytes), 1: the header's counts are made to fit; then the file ----

static void fuzz_questions(Bytes input) {
    const int B = 1 + take_byte(&input) % 8, T = 1 + take_byte(&input), low = take_byte(&input);
    const int V = 1 + low + 256 * take_byte(&input);
    const bool fit = take_byte(&input) & 1;
    const size_t width = word(input, 1) == 2 ? 4 : 2;
    if (fit && input.size() >= 1024) {              // as many questions as the sizes in the file make it
        const int32_t longest = (int32_t)(width * kEvalLongest);
        int32_t count = 0;
        for (size_t at = 1024; at + 2 * width <= input.size(); count++) {
            uint32_t bytes = 0;
            memcpy(&bytes, &input[at + width], width);
            at += std::max<size_t>(2, bytes);
        }
        memcpy(&input[8], &count, sizeof(count));
        memcpy(&input[12], &longest, sizeof(longest));
    }
    EvalSet set;
    evalset_init(&set, file_of(input), V, B, T);
    PROPERTY(word(input, 2) == (int64_t)set.questions.size(), "%zu questions", set.questions.size());
    Bytes again = input.substr(0, 1024);            // what was read, written: the same file
    auto put = [&](int64_t value) { again.append((const char*)&value, width); };
    for (size_t i = 0; i < set.questions.size(); i++) {
        const EvalQuestion& q = set.questions[i];
        int64_t words = kEvalHead + 1 + q.context.tokens;
        for (int c = 0; c < q.choices; c++) { words += 1 + q.choice[c].tokens; }
        for (int64_t value : {(int64_t)kEvalStart, (int64_t)width * words, (int64_t)i, (int64_t)q.label}) {
            put(value);
        }
        put(q.choices);
        for (int part = -1; part < q.choices; part++) {
            const int n = part < 0 ? q.context.tokens : q.choice[part].tokens;
            const uint32_t* tokens = &set.words[(size_t)(part < 0 ? q.context.at : q.choice[part].at)];
            put(n);
            for (int t = 0; t < n; t++) { put(tokens[t]); }
        }
    }
    PROPERTY(again == input, "written again, it is another file");
    std::vector<int> inputs((size_t)B * (size_t)T), places(inputs), targets(inputs);
    std::vector<double> sums(set.rows.size()), found(sums);
    for (const EvalBatch& batch : set.batches) {
        const int N = batch.rows * batch.T;
        const int count = evalset_fill(&set, batch, inputs.data(), places.data(), targets.data());
        PROPERTY(count >= batch.rows && count <= N, "%d losses of %d", count, N);
        for (int i = 0; i < N; i++) {
            const int a = inputs[(size_t)i], b = targets[(size_t)i], at = places[(size_t)i];
            PROPERTY(a >= 0 && a < V && b >= 0 && b < V && at >= 0 && at < N, "tokens %d and %d at %d", a, b,
                     at);
        }
        const std::vector<float> losses((size_t)count, 1.0f);       // ASan sees who reads on
        const std::vector<int> likeliest((size_t)count, 1);
        evalset_sum(&set, batch, losses.data(), likeliest.data(), &sums[(size_t)batch.first],
                    &found[(size_t)batch.first]);
    }
    const EvalScore score = evalset_score(&set, sums, found);
    for (const EvalMeasure& m : score.measures) {
        const std::string name = m.name;
        const bool share = name == "acc" || name == "acc_norm";
        PROPERTY(!share || (m.value >= 0.0 && m.value <= 1.0), "%s %f", m.name, m.value);
        PROPERTY(name != "loss" || fabs(m.value - 1.0) < 1e-9, "loss %f", m.value);
    }
}

// ---- model files: 1: the file gets the size that its header means, 2: and its checksum; then the file ----

// Gives the file the size that its header means, if that is a small one.
static void fit_model(Bytes* file) {
    Config c = {};
    c.maxT = word(*file, 2), c.V = word(*file, 3), c.L = word(*file, 4), c.NH = word(*file, 5);
    c.C = word(*file, 6), c.Vp = word(*file, 7);
    const int64_t most = 1 << 14;
    for (int64_t n : {c.maxT, c.V, c.L, c.NH, c.C, c.Vp}) { if (n < 0 || n > most) { return; } }
    const int64_t block = 13ll * c.C + 12ll * c.C * c.C, ends = (int64_t)(c.Vp + c.maxT + 2) * c.C;
    const int64_t size = 1024 + (word(*file, 1) == kModelFp32 ? 4 : 2) * (block * c.L + ends);
    if (size <= most) { file->resize((size_t)size); }
}

static Bytes saved_again(const char* path) {
    const Config c = model_read_config(path, param_table);
    const std::vector<ParamSpec> specs = param_table(c);
    std::vector<std::vector<float>> tensors;        // an error leaves no half-written file
    model_read(path, param_table, c, [&](int i, int, const float* values) {
        tensors.emplace_back(values, values + specs[(size_t)i].elems);
    });
    ModelWriter w = model_begin(output_path(), c, false);
    for (const std::vector<float>& values : tensors) { model_write(&w, values.data(), values.size(), "f32"); }
    model_commit(&w);
    uint64_t sum;
    const std::string error = model_file_error(output_path(), &sum);
    PROPERTY(error.empty() && sum != 0, "saved, and %s", error.c_str());
    return bytes_of(output_path().c_str());
}

static void fuzz_model(Bytes input) {
    const uint8_t fit = take_byte(&input);
    if (fit & 1) { fit_model(&input); }
    if ((fit & 2) && input.size() >= 1024) {
        memset(&input[4 * kModelChecksumWord], 0, sizeof(uint64_t));
        const uint64_t sum = checksum(input.data(), input.size());
        memcpy(&input[4 * kModelChecksumWord], &sum, sizeof(sum));
    }
    const Bytes saved = saved_again(file_of(input));
    PROPERTY(saved == saved_again(output_path().c_str()), "loaded and saved again, the file is another");
    for (size_t i = 2; i < 8; i++) { PROPERTY(word(saved, i) == word(input, i), "word %zu", i); }
    if (word(input, 1) != kModelFp32) { return; }       // else only the padded vocabulary's rows may change
    PROPERTY(saved.size() == input.size(), "%zu bytes, saved %zu", input.size(), saved.size());
    const size_t V = (size_t)word(input, 3), C = (size_t)word(input, 6), Vp = (size_t)word(input, 7);
    const size_t padding = 1024 + 4 * V * C, end = 1024 + 4 * Vp * C;
    for (size_t i = 1024; i < saved.size(); i++) {
        const char expected = i >= padding && i < end ? '\0' : input[i];
        PROPERTY(saved[i] == expected, "byte %zu", i);
    }
}

// ---- state files: 1: sizes and places are made to fit, 2: checksums, too; then the file ----

static void fit_state(Bytes* file, bool checksums) {
    StateHeader h;
    if (file->size() < sizeof(h)) { return; }
    memcpy(&h, &(*file)[0], sizeof(h));
    h.pieces %= 8;
    h.facts_bytes %= 256;
    uint64_t at = sizeof(h) + h.pieces * sizeof(StateRow) + h.facts_bytes;
    if (file->size() < at) { return; }
    std::vector<StateRow> rows(h.pieces);
    for (size_t i = 0; i < rows.size(); i++) {
        StateRow& row = rows[i];
        memcpy(&row, &(*file)[sizeof(h) + i * sizeof(row)], sizeof(row));
        row.name[63] = row.type[15] = '\0';
        row.offset = at;
        const uint64_t bytes = row.count % 4096 * state_type_bytes(row.type);
        file->resize(std::max(file->size(), (size_t)(at + bytes)));
        if (checksums) { row.checksum = checksum(&(*file)[at], bytes); }
        at += bytes;
        memcpy(&(*file)[sizeof(h) + i * sizeof(row)], &row, sizeof(row));
    }
    file->resize(at);
    h.file_bytes = at;
    const char* facts = &(*file)[sizeof(h) + rows.size() * sizeof(StateRow)];
    if (checksums) { h.checksum = state_start_checksum(h, rows.data(), facts); }
    memcpy(&(*file)[0], &h, sizeof(h));
}

// What it holds, read to the end; dies if anything is wrong.
struct State {
    StateFile file;
    std::vector<Bytes> data;
    explicit State(const char* path) {
        std::string error = state_open(&file, path);
        for (size_t i = 0; error.empty() && i < file.rows.size(); i++) {
            data.push_back(Bytes(state_row_bytes(file.rows[i]), '\0'));
            error = state_read(&file, i, &data[i][0]);
        }
        if (!error.empty()) { die("'%s' %s", path, error.c_str()); }
    }
};

static void fuzz_state(Bytes input) {
    const uint8_t fit = take_byte(&input);
    if (fit & 1) { fit_state(&input, fit & 2); }
    const State read(file_of(input));
    std::vector<StateRow> rows;
    for (const StateRow& r : read.file.rows) {
        rows.push_back(state_row(r.name, r.type, r.rows, r.cols, r.begin, r.count));
    }
    for (const auto& fact : read.file.facts) { if (fact.first.find('\\') != std::string::npos) { return; } }
    StateWriter out = state_begin(output_path(), read.file.facts, rows);
    for (const Bytes& data : read.data) { state_write(&out, data.data()); }
    state_commit(&out);
    const State again(output_path().c_str());
    PROPERTY(again.file.facts == read.file.facts && again.data == read.data, "written again, it is another");
    const size_t start = sizeof(StateHeader) + rows.size() * sizeof(StateRow);
    const Bytes written = bytes_of(output_path().c_str());
    PROPERTY(written.substr(start) == input.substr(start), "other facts or data");
}

// ---- tokenizer: how to encode; then the text ----

static Bytes decoded(const Tokenizer& tok, const std::vector<uint32_t>& ids) {
    Bytes text;
    for (uint32_t id : ids) { text += tokenizer_decode(&tok, id); }
    return text;
}

static void check_encode(const Tokenizer& tok, const Bytes& input) {
    const std::vector<char> text(input.begin(), input.end());   // no zero behind it: ASan sees who reads on
    std::vector<uint32_t> ids, again;
    tokenizer_encode(&tok, text.data(), text.size(), ids);
    PROPERTY(decoded(tok, ids) == input, "the ids are of another text");
    static TokenizerCache cache;
    memset(cache.entries.data(), 0, cache.entries.size() * sizeof(cache.entries[0]));   // fast; all free
    for (int pass = 0; pass < 2; pass++) {              // the second finds its pieces in the cache
        again.clear();
        tokenizer_encode(&tok, text.data(), text.size(), again, &cache);
        PROPERTY(again == ids, "other ids with a cache, pass %d", pass);
    }
    again.clear();                                      // in parts
    size_t from = 0;
    for (size_t i = 1; i <= text.size(); i++) {
        if (i < text.size() && !tokenizer_can_cut(&tok, text.data(), text.size(), i)) { continue; }
        tokenizer_encode(&tok, &text[from], i - from, again);
        from = i;
    }
    PROPERTY(again == ids, "other ids in parts");
}

static void fuzz_tokens(Bytes input) {
    static Tokenizer bpe, bytes;
    if (bpe.bytes.empty()) {
        tokenizer_init_bpe(&bpe, nullptr);
        tokenizer_init_bytes(&bytes);
    }
    const bool is_bpe = take_byte(&input) & 1;
    const Tokenizer& tok = is_bpe ? bpe : bytes;
    check_encode(tok, input);
    if (input.empty()) { return; }
    std::vector<uint32_t> plain, heap, merged;          // the two ways of merging a piece
    for (unsigned char byte : input) { plain.push_back(tok.byte_id[byte]); }
    heap = plain;
    plain.resize(tokenizer_merge_short(&tok, plain.data(), plain.size(), merged));
    heap.resize(tokenizer_merge_long(&tok, heap.data(), heap.size(), merged));
    PROPERTY(plain == heap, "a piece has %zu tokens, with a heap %zu", plain.size(), heap.size());
}

// ---- vocabularies: a text of merges, or gpt2_tokenizer.bin after one byte that chooses ----
// Where bit 1 is set the tokens of the 256 bytes come first, so that a short input is a whole vocabulary.

static void fuzz_vocab(Bytes input) {
    const uint8_t choice = take_byte(&input);
    Tokenizer tok;
    if (choice & 1) {
        tokenizer_init_bpe(&tok, file_of(input));
        PROPERTY(tok.bytes.size() == kGpt2Eot + 1, "%zu tokens", tok.bytes.size());
        return;
    }
    if (choice & 2) {                                   // the input: length and bytes of further tokens
        Bytes file(1024, '\0'), tokens;
        uint32_t V = 256;
        for (int b = 0; b < 256; b++) { tokens += {1, (char)b}; }
        for (size_t i = 0; i < input.size() && i + 1 + (uint8_t)input[i] <= input.size(); V++) {
            const size_t length = 1 + (size_t)(uint8_t)input[i];
            tokens += input.substr(i, length);
            i += length;
        }
        const uint32_t header[4] = {kTokenizerMagic, kTokenizerVersion, V, V - 1};
        memcpy(&file[0], header, sizeof(header));
        input = file + tokens;
    }
    tokenizer_read(&tok, file_of(input));
    tokenizer_write(&tok, output_path().c_str());
    const Bytes written = bytes_of(output_path().c_str());
    PROPERTY(written.substr(1024) == input.substr(1024), "read and written, the tokens are others");
    PROPERTY(word(written, 2) == word(input, 2) && word(written, 3) == word(input, 3), "another header");
    check_encode(tok, input.substr(1024) + "It's 12 o'clock,  isn't it?\n\n ");
}

// ---- flags: 1 to 8 ranks; then the words of a command line, each with a zero behind it ----

static std::vector<std::string> flag_texts() {
    std::vector<std::string> texts;
    for (const Flag& f : kFlags) { texts.push_back(flags_text(&f)); }
    return texts;
}

static void parse(std::vector<std::string>* words) {
    std::vector<char*> argv;
    for (std::string& w : *words) { argv.push_back(&w[0]); }
    flags_parse(kFlags, (int)argv.size(), argv.data());
}

static void fuzz_flags(Bytes input) {
    settings = Settings();
    comm = Comm();
    comm.world = 1 + take_byte(&input) % 8;
    std::vector<std::string> words = {"train_gpt2cpu"};
    for (size_t i = 0; i < input.size(); i += words.back().size() + 1) {
        words.push_back(input.c_str() + i);
        if (words.back().substr(0, words.back().find('=')) == "--help") { return; }     // it would exit
    }
    parse(&words);

    // What is set, written as flags, sets the same.
    std::vector<std::string> texts = flag_texts(), again = {"train_gpt2cpu"};
    for (size_t i = 0; i < texts.size(); i++) {
        again.push_back(std::string("--") + kFlags[i].name + "=" + texts[i]);
    }
    parse(&again);
    const std::vector<std::string> second = flag_texts();
    for (size_t i = 0; i < texts.size(); i++) {
        PROPERTY(second[i] == texts[i], "--%s: '%s', then '%s'", kFlags[i].name, texts[i].c_str(),
                 second[i].c_str());
    }
    const std::string json = flags_json(kFlags);
    for (char c : json) { PROPERTY((uint8_t)c >= 0x20, "a control character in %s", json.c_str()); }
    flags_print(kFlags, true);

    parse(&words);                                      // some flags belong together
    settings_keep();
    const Config c = settle();
    const int64_t all = (int64_t)run.B * run.T * comm.world;
    PROPERTY(config_error(c).empty() && run.T >= 1 && run.T <= c.maxT, "-t %d", run.T);
    PROPERTY(run.total_batch >= all && run.total_batch % all == 0, "-z %lld", (long long)run.total_batch);
    const Options options = run_options();
    PROPERTY(options.lanes >= 1 && options.lanes * comm.world == run.lanes, "--lanes %d", run.lanes);
    PROPERTY(run_max_steps() >= -1 && isfinite(options.loss_scale), "-x %s", run.max_steps);
}

// ---- model descriptors ----

static void fuzz_descriptor(Bytes input) {
    const Config c = descriptor_config(input.c_str());
    PROPERTY(config_error(c).empty(), "%s", config_error(c).c_str());
    auto text_of = [](const Config& of) {
        return of.is_llama() ? llama_text(of)
             : format("V%d,T%d,C%d,NH%d,L%d", of.V, of.maxT, of.C, of.NH, of.L) + window_text(of);
    };
    const std::string text = text_of(c);
    PROPERTY(text_of(descriptor_config(text.c_str())) == text, "%s is another model", text.c_str());
    double elements = 0.0;                              // sizes must not wrap: as numbers that cannot
    const std::vector<ParamSpec> specs = param_table(c);
    const Layout layout = param_layout(specs, c.L, Split(), false, false);
    for (const ParamSpec& s : specs) { elements += (double)s.rows * (double)s.cols * s.layers.size(); }
    PROPERTY((double)layout.state_elems >= elements * 0.999999, "%zu elements", layout.state_elems);
    ActSpec acts[NUM_ACTS];
    const size_t bytes = act_specs(acts, c, 1, c.maxT, {});
    PROPERTY((double)bytes >= 4.0 * c.maxT * (double)c.C * c.L, "activations of %zu bytes", bytes);
}

// ---- JSON ----

// What Python makes of it, with errors="surrogateescape": the bytes that were quoted.
static Bytes unquoted(const std::string& json) {
    PROPERTY(json.size() >= 2 && json[0] == '"' && json.back() == '"', "%s", json.c_str());
    Bytes text;
    for (size_t i = 1; i + 1 < json.size(); i++) {
        const uint8_t c = (uint8_t)json[i];
        PROPERTY(c >= 0x20 && c != '"', "byte %zu of %s", i, json.c_str());
        if (c != '\\') {                                // UTF-8, which must be well formed
            size_t width;
            PROPERTY(utf8_decode((const uint8_t*)&json[i], json.size() - i, &width) >= 0, "%s", json.c_str());
            text += json.substr(i, width);
            i += width - 1;
            continue;
        }
        const char kind = json[++i];
        PROPERTY(kind == '"' || kind == '\\' || (kind == 'u' && i + 5 < json.size()), "%s", json.c_str());
        if (kind != 'u') { text += kind; continue; }
        const std::string digits = json.substr(i + 1, 4);
        PROPERTY(digits.find_first_not_of("0123456789abcdef") == std::string::npos, "%s", digits.c_str());
        const long code = strtol(digits.c_str(), nullptr, 16);
        PROPERTY(code < 0x80 || (code >= 0xDC80 && code <= 0xDCFF), "\\u%s", digits.c_str());
        text += (char)(code & 0xFF);
        i += 4;
    }
    return text;
}

static void fuzz_json(Bytes input) {
    const std::string json = json_quote(input);
    PROPERTY(unquoted(json) == input, "%s reads back as something else", json.c_str());
    Facts values;
    const bool known = json_read("{\"a\": " + json + "}", &values).empty();      // but for zeros
    PROPERTY(known ? values == Facts({{"a", input}}) : input.find('\0') != Bytes::npos, "%s reads back",
             json.c_str());
    if (json_read(input, &values).empty()) {            // what is taken can be written again
        std::string text;
        for (const auto& v : values) {
            text += (text.empty() ? "{" : ", ") + json_quote(v.first) + ": " + json_quote(v.second);
        }
        Facts again;
        PROPERTY(values.empty() || (json_read(text + "}", &again).empty() && again == values), "%s",
                 text.c_str());
    }
    float number = 0.0f;
    memcpy(&number, input.data(), std::min(input.size(), sizeof(number)));
    const std::string text = json_number(number);
    double back;
    const bool read = parse_double(text, &back);
    PROPERTY(isfinite(number) ? read && (float)back == number : text == "null", "%s", text.c_str());
}

// ---- all of them ----

struct Target { const char* name; void (*run)(Bytes input); int longest, malloc_mb; };

static const Target kTargets[] = {
    // name        function        longest input  MB
    {"shard",      fuzz_shard,     4096,          2},
    {"questions",  fuzz_questions, 4096,          2},
    {"model",      fuzz_model,     16384,         2},
    {"state",      fuzz_state,     4096,          2},
    {"tokens",     fuzz_tokens,    2048,          8},   // GPT-2's tables
    {"vocab",      fuzz_vocab,     4096,          4},   // a class for each character: 1.1 MB
    {"flags",      fuzz_flags,     1024,          2},
    {"descriptor", fuzz_descriptor, 128,          2},
    {"json",       fuzz_json,      1024,          2},
};
static const Target* target = nullptr;

static void check_message(const std::string& text) {
    const long lines = 1 + std::count(text.begin(), text.end(), '\n');
    PROPERTY(!text.empty() && lines <= 3, "%ld lines:\n%s", lines, text.c_str());
    for (char c : text) { PROPERTY(c == '\n' || ((uint8_t)c >= 0x20 && c != 0x7F), "%s", text.c_str()); }
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    file_of("");                                        // that one stays open
    const int first_fd = dup(STDERR_FILENO);
    close(first_fd);
    try { target->run(Bytes((const char*)data, size)); }
    catch (const Died& died) { check_message(died.text); }
    while (!open_files.empty()) { fclose(*open_files.begin()); }
    close_range((unsigned)first_fd, ~0u, 0);            // and what was opened without a FILE
    return 0;
}

// Faster: short backtraces of allocations, and little memory that waits for late uses.
extern "C" const char* __asan_default_options() { return "malloc_context_size=3:quarantine_size_mb=16"; }

// The first word is the target's name; libFuzzer gets what belongs to it, and then the words behind it.
extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
    std::string names;
    for (const Target& t : kTargets) {
        if (*argc > 1 && strcmp((*argv)[1], t.name) == 0) { target = &t; }
        names += std::string(" ") + t.name;
    }
    if (!target) {
        fprintf(stderr, "usage: build/fuzz TARGET [folders, files, flags of libFuzzer]; targets:%s\n",
                names.c_str());
        exit(EXIT_FAILURE);
    }
    static std::vector<std::string> words = {
        (*argv)[0], format("-max_len=%d", target->longest), format("-malloc_limit_mb=%d", target->malloc_mb),
        "-rss_limit_mb=1024", "-timeout=60", "-close_fd_mask=1"};
    for (int i = 2; i < *argc; i++) { words.push_back((*argv)[i]); }
    static std::vector<char*> pointers;
    for (std::string& w : words) { pointers.push_back(&w[0]); }
    pointers.push_back(nullptr);
    *argc = (int)words.size();
    *argv = pointers.data();
    die_throw = [](const char* text) { throw Died{text}; };
    file_layer.fsync = [](int) { return 0; };           // thousands a second
    return 0;
}
