/*
Questions (HellaSwag, MMLU, LAMBADA, ...) -> batches of rows for a language model, and the score. Host only.

A file is 256 int32 {20240522, 1, questions, bytes of the longest question, tokenizer, context last, 0...},
then each question as uint16: 65535, the bytes of the whole question, its number, the number of the right
completion, the number of completions (1 to 8), then the context and each completion as a count and its
tokens. A tokenizer of 0 is not known. In version 2 all of this is uint32, for vocabularies above 65,536. The
whole file is read and checked first.

A question has a row for each completion: the context, then the completion, whose losses alone count. With
`context last` (1, WinoGrande) a row is the completion, then the context, whose losses alone count: they say
which of several beginnings makes the same end likeliest. The model reads a row without its last token. `acc`
takes the completion with the lowest sum as the answer, `acc_norm` the one with the lowest mean; the first of
several equal ones. A question with one completion (LAMBADA) has a loss, and is right if each token of the
completion is the likeliest. A row of more than T + 1 tokens loses its beginning. Completions of a question
that look equal to the model share one row: at two positions of a batch their losses could differ in the last
bit.

Rows differ much in length. A batch has rows of one padded length (a multiple of 32, at most T), as many as
fit into B*T positions, so HellaSwag costs an eighth of rows of 1024. Attention is causal, so padding behind a
row changes nothing in it. The batches do not depend on the number of ranks: the ranks take turns. The LM head
and the loss are computed only for positions whose loss counts, a quarter in HellaSwag.

    EvalSet set;
    evalset_init(&set, "hellaswag_val.bin", V, B, T);       // dies on a damaged file
    for (const EvalBatch& batch : set.batches) {
        int count = evalset_fill(&set, batch, inputs, places, targets);         // each (batch.rows,batch.T)
        ...                                                 // the model: losses, likeliest (count)
        evalset_sum(&set, batch, losses, likeliest, &sums[batch.first], &found[batch.first]);
    }
    EvalScore score = evalset_score(&set, sums, found);     // (rows of all batches)
*/
#pragma once

#include "../checked_files.h" // gives: die, format, fopen_check, file_size
#include "../checksum.h" // gives: checksum, checksum_text
#include "../numbers.h" // gives: round_up

static const int kEvalMagic = 20240522;
static const uint32_t kEvalStart = 65535;
static const int64_t kEvalHeaderBytes = 256 * 4;
static const int kEvalMostChoices = 8;
static const int kEvalPadding = 32;             // a row's positions are rounded up to a multiple
// In words: a question's head, the shortest question (two texts of one token), and the longest. Version 1 has
// 16 bits for its number and its bytes.
static const int64_t kEvalHead = 5, kEvalShortest = kEvalHead + 2 * 2, kEvalLongest = 32767;
static const int64_t kEvalMostQuestions = 65536;

struct EvalText { int64_t at; int tokens; };    // at: index of its first token in EvalSet.words

struct EvalQuestion {
    int label, choices;
    EvalText context, choice[kEvalMostChoices];
    int same_as[kEvalMostChoices];              // the first choice that looks equal to the model
};

struct EvalRow { int question, choice, positions; };    // positions: tokens that the model reads, at most T

struct EvalBatch { int64_t first; int rows, T; };       // rows first .. first + rows - 1, of T positions each

struct EvalSet {
    std::string path;
    uint32_t tokenizer;                         // a TokenizerId of tokenizer.h; 0: not known
    bool context_last;                          // a row is a completion, then the context
    int B, T;                                   // B*T positions fit into a batch
    int word_bytes;                             // 2 or 4, in the file
    std::vector<uint32_t> words;                // the file without its header
    std::vector<EvalQuestion> questions;
    std::vector<EvalRow> rows;                  // by padded length
    std::vector<EvalBatch> batches;
};

// acc and acc_norm are shares of the questions that have several completions. If there are none, acc is the
// share of those that are right. loss: the mean loss of the right completion, averaged over questions.
// word_ppl: the exponential of the average of its summed loss. All are NaN if a loss is not finite.
struct EvalMeasure { const char* name; double value, error; };      // error: the standard error

struct EvalScore { std::vector<EvalMeasure> measures; };            // in the order in which they are said

// ---- the file ----

// Reads header and words. Returns the error, or "".
static inline std::string evalset_read(EvalSet* set, int64_t* questions, int64_t* longest) {
    const char* path = set->path.c_str();
    const char* hint = "hint: python3 dev/data/get.py hellaswag makes one; --eval-data names another file";
    struct stat st;
    if (!path_stat(path, &st)) {
        return format("no evaluation data: there is no file '%s'\n%s", path, hint);
    }
    FILE* f = fopen_check(path, "rb");
    const int64_t bytes = file_size(path);
    int32_t header[256] = {};
    const size_t got = fread(header, 1, sizeof(header), f);
    *questions = header[2];
    *longest = header[3];
    set->tokenizer = (uint32_t)header[4];
    set->context_last = header[5] == 1;
    set->word_bytes = header[1] == 2 ? 4 : 2;
    const int64_t shortest = set->word_bytes * kEvalShortest, most = set->word_bytes * kEvalLongest;
    std::string error;
    const int64_t body = bytes - kEvalHeaderBytes;
    if (got >= sizeof(header[0]) && header[0] != kEvalMagic) {
        error = format("'%s' holds no evaluation data: its first number is %d, expected %d\n%s", path,
                       header[0], kEvalMagic, hint);
    } else if (got < sizeof(header)) {
        error = format("'%s' is %s: %lld bytes, and evaluation data have a header of %lld\n%s", path,
                       bytes ? "truncated" : "empty", (long long)bytes, (long long)kEvalHeaderBytes, hint);
    } else if (header[1] != 1 && header[1] != 2) {
        error = format("'%s' is of version %d, only versions 1 and 2 can be read\n%s", path, header[1], hint);
    } else if (header[5] != 0 && header[5] != 1) {
        error = format("'%s': its header says %d for the context's place, 0 (first) and 1 (last) are "
                       "possible", path, header[5]);
    } else if (*questions < 1 || *questions > kEvalMostQuestions) {
        error = format("'%s': its header says %lld questions, 1 to %lld are possible", path,
                       (long long)*questions, (long long)kEvalMostQuestions);
    } else if (*longest < shortest || *longest > most) {
        error = format("'%s': its header says that the longest question has %lld bytes, %lld to %lld are "
                       "possible", path, (long long)*longest, (long long)shortest, (long long)most);
    } else if (body < *questions * shortest) {
        error = format("'%s' is truncated: its header says %lld questions, and %lld bytes hold none of %lld "
                       "each\n%s", path, (long long)*questions, (long long)body, (long long)shortest, hint);
    } else if (body > *questions * *longest || body % set->word_bytes != 0) {
        error = format("'%s' does not match its header: %lld bytes behind it are not %lld questions of at "
                       "most %lld\n%s", path, (long long)body, (long long)*questions, (long long)*longest,
                       hint);
    } else {
        std::vector<uint16_t> narrow((size_t)(set->word_bytes == 2 ? body / 2 : 0));
        fread_check(narrow.data(), 2, narrow.size(), f, path);
        set->words.assign(narrow.begin(), narrow.end());
        if (set->word_bytes == 4) {
            set->words.resize((size_t)body / 4);
            fread_check(set->words.data(), 4, set->words.size(), f, path);
        }
    }
    fclose(f);
    return error;
}

// Parses the question that begins at word `at`. Returns the error, or "".
static inline std::string evalset_question(const EvalSet* set, int64_t at, int64_t number, int64_t longest,
                                           int V, EvalQuestion* q) {
    const int64_t left = (int64_t)set->words.size() - at, width = set->word_bytes;
    const std::string where = format("'%s': question %lld, at byte %lld,", set->path.c_str(),
                                     (long long)number, (long long)(kEvalHeaderBytes + width * at));
    if (left < kEvalShortest) { return where + " is cut off"; }
    const uint32_t* head = &set->words[(size_t)at];
    if (head[0] != kEvalStart) {
        return format("%s begins with %u, not %u", where.c_str(), head[0], kEvalStart);
    }
    const int64_t size = head[1] / width;               // in words
    if (head[1] % width != 0 || size < kEvalShortest || head[1] > longest || size > left) {
        return format("%s has %u bytes: a multiple of %lld from %lld to %lld was expected, and %lld are left",
                      where.c_str(), head[1], (long long)width, (long long)(width * kEvalShortest),
                      (long long)longest, (long long)(width * left));
    }
    if (head[2] != number) { return format("%s says that it is number %u", where.c_str(), head[2]); }
    if (head[4] < 1 || head[4] > kEvalMostChoices) {
        return format("%s has %u completions, 1 to %d are possible", where.c_str(), head[4],
                      kEvalMostChoices);
    }
    if (head[3] >= head[4]) {
        return format("%s has the answer %u, which is none of 0..%u", where.c_str(), head[3], head[4] - 1);
    }
    q->label = (int)head[3];
    q->choices = (int)head[4];
    int64_t i = kEvalHead;
    for (int part = 0; part <= q->choices; part++) {
        const int64_t tokens = i < size ? head[i] : 0;
        if (tokens < 1 || i + 1 + tokens > size) {
            return format("%s: %s %d has %lld tokens, 1 to %lld are possible", where.c_str(),
                          part ? "completion" : "context", part ? part - 1 : 0, (long long)tokens,
                          (long long)std::max<int64_t>(0, size - i - 1));
        }
        i++;
        for (int64_t t = 0; t < tokens; t++) {
            if (head[i + t] < (uint32_t)V) { continue; }
            return format("%s has the token id %u, but the model's ids are 0..%d\n"
                          "hint: choose a model with a larger V (-e)", where.c_str(), head[i + t], V - 1);
        }
        (part ? q->choice[part - 1] : q->context) = {at + i, (int)tokens};
        i += tokens;
    }
    if (i != size) {
        return format("%s has %u bytes, of which its texts fill %lld", where.c_str(), head[1],
                      (long long)(width * i));
    }
    return "";
}

static inline std::string evalset_questions(EvalSet* set, int V) {
    int64_t questions = 0, longest = 0, at = 0;
    std::string error = evalset_read(set, &questions, &longest);
    for (int64_t i = 0; error.empty() && i < questions; i++) {
        EvalQuestion q;
        error = evalset_question(set, at, i, longest, V, &q);
        if (!error.empty()) { break; }
        at += set->words[(size_t)at + 1] / (uint32_t)set->word_bytes;
        set->questions.push_back(q);
    }
    if (error.empty() && at != (int64_t)set->words.size()) {
        error = format("'%s' has %lld bytes behind its last question", set->path.c_str(),
                       (long long)(set->word_bytes * ((int64_t)set->words.size() - at)));
    }
    return error;
}

// ---- rows and batches ----

// A row's two texts: only the second's losses count.
struct EvalTexts { EvalText first, second; };

static inline EvalTexts evalset_texts(const EvalSet* set, const EvalRow& row) {
    const EvalQuestion& q = set->questions[(size_t)row.question];
    const EvalText& choice = q.choice[row.choice];
    return set->context_last ? EvalTexts{choice, q.context} : EvalTexts{q.context, choice};
}

// Token i of a row as the model reads it, without a lost beginning.
static inline int evalset_token(const EvalSet* set, const EvalRow& row, int i) {
    const EvalTexts x = evalset_texts(set, row);
    const int at = x.first.tokens + x.second.tokens - 1 - row.positions + i, behind = at - x.first.tokens;
    return (int)set->words[(size_t)(behind < 0 ? x.first.at + at : x.second.at + behind)];
}

// The first position of a row whose target belongs to the second text. All later targets belong to it, too.
static inline int evalset_first(const EvalSet* set, const EvalRow& row) {
    return std::max(0, row.positions - evalset_texts(set, row).second.tokens);
}

static inline bool evalset_equal(const EvalSet* set, const EvalRow& a, const EvalRow& b) {
    bool equal = a.positions == b.positions && evalset_first(set, a) == evalset_first(set, b);
    for (int i = 0; equal && i <= a.positions; i++) {
        equal = evalset_token(set, a, i) == evalset_token(set, b, i);
    }
    return equal;
}

static inline void evalset_plan(EvalSet* set, int B, int T) {
    auto padded = [T](int positions) { return std::min(T, round_up(positions, kEvalPadding)); };
    set->B = B;
    set->T = T;
    for (size_t i = 0; i < set->questions.size(); i++) {
        EvalQuestion& q = set->questions[i];
        EvalRow rows[kEvalMostChoices];
        for (int c = 0; c < q.choices; c++) {
            rows[c] = {(int)i, c, std::min(T, q.context.tokens + q.choice[c].tokens - 1)};
            q.same_as[c] = 0;
            while (!evalset_equal(set, rows[q.same_as[c]], rows[c])) { q.same_as[c]++; }
            if (q.same_as[c] == c) { set->rows.push_back(rows[c]); }
        }
    }
    std::stable_sort(set->rows.begin(), set->rows.end(), [&](const EvalRow& a, const EvalRow& b) {
        return padded(a.positions) < padded(b.positions);
    });
    const int64_t room = (int64_t)B * T, all = (int64_t)set->rows.size();
    for (int64_t first = 0; first < all;) {
        const int length = padded(set->rows[(size_t)first].positions);
        int rows = 0;
        while (first + rows < all && (int64_t)(rows + 1) * length <= room &&
               padded(set->rows[(size_t)(first + rows)].positions) == length) { rows++; }
        set->batches.push_back({first, rows, length});
        first += rows;
    }
}

static inline void evalset_init(EvalSet* set, const char* path, int V, int B, int T) {
    assert(V > 0 && B > 0 && T > 0);
    *set = EvalSet();
    set->path = path;
    die_if(evalset_questions(set, V));
    evalset_plan(set, B, T);
}

// Fills the model's inputs and the positions whose losses count, and returns their number. Loss i is that of
// targets[i] at position places[i] of the batch. Unused entries are 0.
static inline int evalset_fill(const EvalSet* set, const EvalBatch& batch, int* inputs, int* places,
                               int* targets /*(rows,T) each*/) {
    const int N = batch.rows * batch.T;
    int count = 0;
    for (int b = 0; b < batch.rows; b++) {
        const EvalRow& row = set->rows[(size_t)(batch.first + b)];
        const int first = evalset_first(set, row);
        for (int t = 0; t < batch.T; t++) {
            const bool live = t < row.positions;        // any token serves as padding
            inputs[b * batch.T + t] = live ? evalset_token(set, row, t) : 0;
            if (!live || t < first) { continue; }
            places[count] = b * batch.T + t;
            targets[count++] = evalset_token(set, row, t + 1);
        }
    }
    std::fill(places + count, places + N, 0);
    std::fill(targets + count, targets + N, 0);
    return count;
}

// Adds up the losses of each row that count, in order. likeliest: is each one's target the likeliest token?
// found: 1 where all of a row's are, else 0. Returns how many losses these were.
static inline size_t evalset_sum(const EvalSet* set, const EvalBatch& batch, const float* losses,
                                 const int* likeliest, double* sums /*(rows)*/, double* found /*(rows)*/) {
    const float* const begin = losses;
    for (int b = 0; b < batch.rows; b++) {
        const EvalRow& row = set->rows[(size_t)(batch.first + b)];
        sums[b] = 0.0, found[b] = 1.0;
        for (int t = evalset_first(set, row); t < row.positions; t++) {
            if (!*likeliest++) { found[b] = 0.0; }
            sums[b] += *losses++;
        }
    }
    return (size_t)(losses - begin);
}

// ---- the score ----

struct EvalMean {
    double sum = 0.0, squares = 0.0, n = 0.0;
    void add(double x) { sum += x, squares += x * x, n++; }
    double value() const { return sum / n; }
    double error() const { return sqrt(std::max(0.0, squares / n - value() * value()) / n); }
};

static inline EvalScore evalset_score(const EvalSet* set, const std::vector<double>& sums /*(rows)*/,
                                      const std::vector<double>& found /*(rows)*/) {
    const size_t n = set->questions.size();
    std::vector<double> sum(n * kEvalMostChoices, INFINITY), mean = sum;    // (questions,choices)
    EvalMean right, right_norm, likeliest, loss, whole;
    double poison = 0.0;
    for (size_t i = 0; i < set->rows.size(); i++) {
        const EvalRow& row = set->rows[i];
        const size_t at = (size_t)row.question * kEvalMostChoices + (size_t)row.choice;
        if (!isfinite(sums[i])) { poison = NAN; }               // the minimum of NaN would be some choice
        likeliest.add(found[i]);
        sum[at] = sums[i];
        mean[at] = sum[at] / (row.positions - evalset_first(set, row));
    }
    for (size_t i = 0; i < n; i++) {
        const EvalQuestion& q = set->questions[i];
        const size_t at = i * kEvalMostChoices, label = (size_t)q.label;
        auto is_lowest = [&](const std::vector<double>& of) {
            return (size_t)(std::min_element(&of[at], &of[at] + kEvalMostChoices) - &of[at]) == label;
        };
        if (q.choices > 1) { right.add(is_lowest(sum)), right_norm.add(is_lowest(mean)); }
        loss.add(mean[at + (size_t)q.same_as[label]]);
        whole.add(sum[at + (size_t)q.same_as[label]]);
    }
    auto measure = [&](const char* name, const EvalMean& m) {
        return EvalMeasure{name, m.value() + poison, m.error() + poison};
    };
    const EvalMeasure of_loss = measure("loss", loss);
    if (right.n > 0) { return {{measure("acc_norm", right_norm), measure("acc", right), of_loss}}; }
    const double ppl = exp(whole.value()) + poison;
    return {{of_loss, {"word_ppl", ppl, ppl * whole.error()}, measure("acc", likeliest)}};
}

// Positions that the model computes, padding included.
static inline int64_t evalset_positions(const EvalSet* set) {
    int64_t all = 0;
    for (const EvalBatch& batch : set->batches) { all += (int64_t)batch.rows * batch.T; }
    return all;
}

static inline void evalset_print(const EvalSet* set) {
    if (set->questions.empty()) { return; }
    const int64_t positions = evalset_positions(set);
    printf("questions: %zu, %zu rows in %zu batches, %lld positions: %.1f%% of what rows of %d would take\n",
           set->questions.size(), set->rows.size(), set->batches.size(), (long long)positions,
           100.0 * (double)positions / ((double)set->rows.size() * set->T), set->T);
}

// The questions in one line, "" without questions. Ranks compare it: their paths may differ.
static inline std::string evalset_facts(const EvalSet* set) {
    if (set->questions.empty()) { return ""; }
    return format("%zu questions, checksum %s", set->questions.size(),
                  checksum_text(checksum(set->words.data(), 4 * set->words.size())).c_str());
}
