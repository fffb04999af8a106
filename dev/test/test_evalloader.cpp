/*
Tests of llmc/data/evalloader.h: files of questions, right and wrong, rows, batches and the score. What the
model is shown and which losses are summed is test_evaluation.py's.
*/
#include "llmc/data/evalloader.h"

#include <random>       // gives: std::mt19937

#include "child.h"      // gives: folder, check_dies, CHECK

typedef std::vector<uint16_t> Words;
struct Texts { int label; std::vector<Words> parts; };      // the context, then the completions

static Words question_words(int number, const Texts& q) {
    Words words = {65535, 0, (uint16_t)number, (uint16_t)q.label, (uint16_t)(q.parts.size() - 1)};
    for (const Words& part : q.parts) {
        words.push_back((uint16_t)part.size());
        words.insert(words.end(), part.begin(), part.end());
    }
    words[1] = (uint16_t)(2 * words.size());
    return words;
}

struct File { std::vector<int32_t> header; Words words; };

static File file_of(const std::vector<Texts>& questions) {
    File file = {{20240522, 1, (int32_t)questions.size(), 0, 0}, {}};
    for (size_t i = 0; i < questions.size(); i++) {
        const Words words = question_words((int)i, questions[i]);
        file.words.insert(file.words.end(), words.begin(), words.end());
        file.header[3] = std::max(file.header[3], (int32_t)(2 * words.size()));
    }
    file.header.resize(256);
    return file;
}

static std::string bytes_of(const File& file) {
    return std::string((const char*)file.header.data(), 4 * file.header.size()) +
           std::string((const char*)file.words.data(), 2 * file.words.size());
}

// choices: of each question; 0: 1 to 8, a different number each
static std::vector<Texts> made_up(int count, int V, int longest, unsigned seed, int choices = 4) {
    std::mt19937 rng(seed);
    std::vector<Texts> questions;
    for (int i = 0; i < count; i++) {
        const int most = choices ? choices : 1 + i % 8;
        Texts q = {(int)(rng() % (unsigned)most), {}};
        for (int part = 0; part <= most; part++) {
            Words tokens(1 + rng() % (unsigned)longest);
            for (uint16_t& token : tokens) { token = (uint16_t)(rng() % (unsigned)V); }
            q.parts.push_back(tokens);
        }
        questions.push_back(q);
    }
    return questions;
}

static EvalSet set_of(const File& file, int V, int B, int T) {
    write_text(in_folder("set.bin"), bytes_of(file));
    EvalSet set;
    evalset_init(&set, in_folder("set.bin").c_str(), V, B, T);
    return set;
}

// ---- files ----

// A file of these bytes is refused, where ids are below 100, in one to three lines that hold all words.
static void check_refused(const std::string& bytes, const std::vector<std::string>& words) {
    write_text(in_folder("wrong.bin"), bytes);
    EvalSet set;
    set.path = in_folder("wrong.bin");
    const std::string said = evalset_questions(&set, 100);
    const long lines = std::count(said.begin(), said.end(), '\n') + 1;
    CHECK(!said.empty() && lines <= 3, "of %zu bytes '%s'", bytes.size(), said.c_str());
    for (const std::string& word : words) { CHECK_HOLDS(said, word); }
}

static void test_wrong_files() {
    const std::vector<Texts> questions = made_up(3, 100, 6, 1);
    const File good = file_of(questions);
    const size_t second = question_words(0, questions[0]).size(), third = second + good.words[second + 1] / 2;
    const size_t context = second + 5, completion = context + 1 + questions[1].parts[0].size();
    const size_t last = third - 1 - questions[1].parts[4].size();       // the last completion's count
    const int size = good.words[second + 1], longest = good.header[3], roomy = 65534;

    // a word of the header, or of the questions behind it, and the header's longest question
    const struct { bool header; size_t at; int value, longest; std::vector<std::string> said; } changes[] = {
        {true, 0, 20240520, longest, {"20240520", "20240522"}},
        {true, 1, 3, longest, {"version 3", "1 and 2"}},
        {true, 2, 0, longest, {"0 questions"}},
        {true, 2, 65537, longest, {"65537 questions", "65536"}},
        {true, 2, 4, longest, {"question 3", "cut off"}},
        {true, 2, 1000, longest, {"truncated", "1000 questions"}},
        {true, 2, 2, roomy, {"behind its last question"}},
        {true, 5, 2, longest, {"2 for the context's place", "0 (first) and 1 (last)"}},
        {true, 4, 0, 65536, {"65536 bytes"}},
        {true, 4, 0, 30, {"30"}},
        {true, 4, 0, longest - 2, {"has " + std::to_string(longest) + " bytes"}},
        {false, second, 1, longest, {"question 1", "begins with 1", "65535"}},
        {false, second + 1, 0, longest, {"question 1", "has 0 bytes"}},
        {false, second + 1, size + 1, roomy, {"question 1", std::to_string(size + 1)}},
        {false, second + 1, size - 2, longest, {"question 1"}},
        {false, second + 1, size + 2, roomy, {"question 1", "its texts fill " + std::to_string(size)}},
        {false, second + 1, 65534, roomy, {"question 1", "65534 bytes", "are left"}},
        {false, second + 2, 0, longest, {"question 1", "number 0"}},
        {false, second + 3, 4, longest, {"question 1", "answer 4", "0..3"}},
        {false, second + 4, 3, longest, {"question 1", "its texts fill"}},
        {false, second + 4, 0, longest, {"0 completions", "1 to 8"}},
        {false, second + 4, 9, longest, {"9 completions", "1 to 8"}},
        {false, context, 0, longest, {"context", "0 tokens"}},
        {false, completion, 60000, longest, {"completion 0", "60000 tokens"}},
        {false, last, good.words[last] + 1, longest, {"completion 3", "are possible"}},
        {false, context + 1, 100, longest, {"question 1", "token id 100", "0..99"}},
        {false, completion + 1, 100, longest, {"token id 100"}},
        {false, completion + 1, 65535, longest, {"token id 65535"}}};
    for (const auto& c : changes) {
        File file = good;
        if (c.header) { file.header[c.at] = c.value; }
        else { file.words[c.at] = (uint16_t)c.value; }
        file.header[3] = c.longest;
        check_refused(bytes_of(file), c.said);
    }
    const std::string bytes = bytes_of(good);
    for (size_t size = 0; size < bytes.size(); size += size < 1024 ? 93 : 1) {      // wherever it ends
        check_refused(bytes.substr(0, size), {});
    }
    File more = good;
    more.header[3] = roomy;
    check_refused(bytes + '\0', {"does not match"});
    check_refused(bytes + std::string(1024, '\0'), {"does not match"});
    const std::vector<std::string> behind = {"2 bytes behind its last question"};
    check_refused(bytes_of(more) + std::string(2, '\0'), behind);
    auto read = [](const std::string& path) {
        return [=] { EvalSet set; evalset_init(&set, path.c_str(), 100, 2, 8); };
    };
    check_dies("a wrong file", read(in_folder("wrong.bin")), behind);
    check_dies("no file", read(in_folder("none.bin")), {"no evaluation data", "none.bin", "get.py"});
    check_dies("a folder", read(folder), {"a folder"});
    const std::string loop = in_folder("loop.bin");
    CHECK(symlink(loop.c_str(), loop.c_str()) == 0, "cannot make a link");
    check_dies("a link to itself", read(loop), {"cannot look at '" + loop, "hint:"});
}

// The same questions in words of 32 bits, with ids that need them.
static void test_wide() {
    const std::vector<Texts> questions = made_up(20, 300, 40, 6, 0);
    const int more = 100000;
    File narrow = file_of(questions);
    std::vector<uint32_t> words;
    for (size_t i = 0; i < questions.size(); i++) {
        const Words of_one = question_words((int)i, questions[i]);
        words.insert(words.end(), of_one.begin(), of_one.end());
        uint32_t* head = &words[words.size() - of_one.size()];
        head[1] *= 2;
        size_t at = 5;
        for (const Words& part : questions[i].parts) {
            for (size_t t = 1; t <= part.size(); t++) { head[at + t] += more; }
            at += 1 + part.size();
        }
    }
    auto wide_text = [&](int longest) {
        std::vector<int32_t> header = narrow.header;
        header[1] = 2, header[3] = longest;
        return std::string((const char*)header.data(), 1024) +
               std::string((const char*)words.data(), 4 * words.size());
    };
    const std::string path = in_folder("wide.bin");
    write_text(path, wide_text(2 * narrow.header[3]));
    EvalSet wide;
    evalset_init(&wide, path.c_str(), more + 300, 7, 64);
    const EvalSet set = set_of(narrow, 300, 7, 64);
    bool same = wide.rows.size() == set.rows.size() && wide.batches.size() == set.batches.size();
    for (size_t i = 0; same && i < set.batches.size(); i++) {
        const EvalBatch &a = set.batches[i], &b = wide.batches[i];
        std::vector<int> in[2], at[2], to[2];
        int count[2];
        for (int k = 0; k < 2; k++) {
            for (auto* x : {&in[k], &at[k], &to[k]}) { x->resize(7 * 64); }
            count[k] = evalset_fill(k ? &wide : &set, k ? b : a, in[k].data(), at[k].data(), to[k].data());
        }
        same = a.first == b.first && a.rows == b.rows && a.T == b.T && count[0] == count[1] && at[0] == at[1];
        for (int t = 0; t < count[0]; t++) { same = same && to[1][(size_t)t] == to[0][(size_t)t] + more; }
        for (int t = 0; t < a.rows * a.T; t++) {                // 0: padding, of both
            const int x = in[0][(size_t)t], y = in[1][(size_t)t];
            same = same && (y == x + more || (x == 0 && y == 0));
        }
    }
    CHECK(same, "words of 32 bits are read as others");
    check_dies("an id of 32 bits that is too large", [&] {
        EvalSet other;
        evalset_init(&other, path.c_str(), more, 7, 64);
    }, {"token id 100", "0..99999"});
    write_text(path, wide_text(2 * narrow.header[3]) + "xy");
    check_dies("half a word", [&] { EvalSet other; evalset_init(&other, path.c_str(), more + 300, 7, 64); },
               {"does not match"});
    write_text(path, wide_text(narrow.header[3]));
    check_dies("a longest question in bytes of 16-bit words", [&] {
        EvalSet other;
        evalset_init(&other, path.c_str(), more + 300, 7, 64);
    }, {"wide.bin"});
}

// ---- rows ----

// Rows as long as their question, each once, in batches as long as their longest row, rounded up to 32.
static void check_batches(const EvalSet& set, const std::vector<Texts>& questions, int B, int T) {
    std::vector<int> seen(8 * questions.size()), once(seen);
    for (size_t i = 0; i < questions.size(); i++) {
        std::fill_n(once.begin() + 8 * (long)i, questions[i].parts.size() - 1, 1);
    }
    int64_t at = 0;
    bool sized = true, full = true;
    for (const EvalBatch& batch : set.batches) {
        sized = sized && batch.first == at && batch.rows >= 1 && batch.rows * batch.T <= B * T &&
                batch.T >= 1 && batch.T <= T && (batch.T % 32 == 0 || batch.T == T);
        for (int b = 0; b < batch.rows; b++) {
            const EvalRow& row = set.rows[(size_t)at++];
            const Texts& q = questions[(size_t)row.question];
            const int tokens = (int)(q.parts[0].size() + q.parts[(size_t)row.choice + 1].size());
            seen[(size_t)(8 * row.question + row.choice)]++;
            sized = sized && row.positions == std::min(tokens - 1, T) && row.positions <= batch.T &&
                    batch.T < row.positions + 32;
        }
    }
    // no batch could take a row of the next one, so none is split without need
    for (size_t i = 0; i + 1 < set.batches.size(); i++) {
        const EvalBatch &a = set.batches[i], &b = set.batches[i + 1];
        full = full && a.T <= b.T && (a.T != b.T || (a.rows + 1) * a.T > B * T);
    }
    CHECK(sized && full, "B=%d T=%d: sizes of batches: %d, %d", B, T, sized, full);
    CHECK(at == (int64_t)set.rows.size() && seen == once,
          "B=%d T=%d: %lld rows, or not each once", B, T, (long long)at);
}

static void test_rows() {
    const std::vector<Texts> questions = made_up(40, 300, 70, 3), shortest = {{3, {{5}, {1}, {2}, {3}, {4}}}};
    const std::vector<Texts> uneven = made_up(40, 300, 70, 4, 0), one = {{0, {{5}, {1}}}};
    for (int B : {1, 2, 3, 7, 64}) {
        for (int T : {1, 2, 31, 32, 33, 64, 100, 139, 140, 1024}) {
            for (const auto& some : {questions, shortest, uneven, one}) {
                check_batches(set_of(file_of(some), 300, B, T), some, B, T);
            }
        }
    }
    const EvalSet set = set_of(file_of(shortest), 6, 2, 32);
    CHECK(set.batches.size() == 2 && evalset_positions(&set) == 4 * 32, "%zu batches", set.batches.size());
    const EvalSet long_ones = set_of(file_of(made_up(200, 300, 90, 4)), 300, 4, 1024);
    const int64_t positions = evalset_positions(&long_ones);
    CHECK(8 * positions <= 800 * 1024, "lengths like HellaSwag's: %lld positions", (long long)positions);
}

// What the model reads, and where and which the targets are: of the question's two rows, in one batch.
static void check_fill(bool context_last, const std::vector<int>& inputs, const std::vector<int>& places,
                       const std::vector<int>& targets) {
    File file = file_of({{1, {{1, 2, 3}, {4}, {5, 6}}}});
    file.header[5] = context_last;
    const EvalSet set = set_of(file, 9, 2, 4);
    std::vector<int> in(8), at(8), to(8);
    const size_t count = (size_t)evalset_fill(&set, set.batches.at(0), in.data(), at.data(), to.data());
    CHECK(set.batches.size() == 1 && count == places.size(), "%zu losses", count);
    at.resize(count), to.resize(count);
    CHECK(in == inputs && at == places && to == targets, "context last: %d", context_last);
    std::vector<double> sums(2), found(2);
    const std::vector<float> losses = {1, 2, 4, 8, 16, 32};
    const int likeliest[6] = {};
    CHECK_IS(evalset_sum(&set, set.batches[0], losses.data(), likeliest, sums.data(), found.data()), count);
    const std::vector<double> wanted = context_last ? std::vector<double>{7, 56} : std::vector<double>{1, 6};
    CHECK(sums == wanted, "sums %g and %g", sums[0], sums[1]);
}

static void test_fill() {
    check_fill(false, {1, 2, 3, 0, 1, 2, 3, 5}, {2, 6, 7}, {4, 5, 6});
    check_fill(true, {4, 1, 2, 0, 5, 6, 1, 2}, {0, 1, 2, 5, 6, 7}, {1, 2, 3, 1, 2, 3});
}

// ---- the score ----

typedef std::vector<std::vector<double>> Sums;              // of each question's completions

// found: are all targets of the first row likeliest?
static EvalScore score_of(const EvalSet& set, const Sums& sums, bool found = false) {
    std::vector<double> in_order;
    for (const EvalRow& row : set.rows) { in_order.push_back(sums[row.question][row.choice]); }
    std::vector<double> likeliest(set.rows.size());
    for (size_t i = 0; i < set.rows.size(); i++) { likeliest[i] = found && set.rows[i].question == 0; }
    return evalset_score(&set, in_order, likeliest);
}

// error: -1 if it is not looked at
static void check_measure(const EvalScore& score, const char* name, double value, double error = -1) {
    for (const EvalMeasure& m : score.measures) {
        if (strcmp(m.name, name)) { continue; }
        CHECK(fabs(m.value - value) < 1e-9, "%s is %.9f", name, m.value);
        CHECK(error < 0 || fabs(m.error - error) < 1e-9, "%s's error is %.9f", name, m.error);
        return;
    }
    CHECK(false, "no %s", name);
}

static void test_score() {
    TEST("completions that the model reads as equal are one row, and the first of them is taken") {
        const Words x = {1, 2}, y = {2, 1}, z = {1, 2, 3};
        const std::vector<Texts> questions = {
            {3, {{5}, y, x, x, x}}, {0, {{5}, x, x, y, y}},
            {1, {{5}, {1, 8, 2, 3, 4, 5}, {9, 8, 2, 3, 4, 5}, {8, 2, 3, 4, 5}, x}},
            {0, {{7, 7}, z, {7, 1, 2, 3}, z, x}}};      // 7 7 1 2 3 twice, but not as much of it counts
        const std::vector<int> wanted[] = {{0, 1, 1, 1}, {0, 0, 2, 2}, {0, 0, 0, 3}, {0, 1, 0, 3}};
        for (int B : {1, 3}) {
            const EvalSet set = set_of(file_of(questions), 10, B, 4);
            CHECK(set.rows.size() == 9, "%zu rows", set.rows.size());
            for (size_t i = 0; i < 4; i++) {
                const EvalQuestion& q = set.questions[i];
                CHECK(std::vector<int>(q.same_as, q.same_as + 4) == wanted[i], "question %zu", i);
            }
            // chosen: 0 (y), 2 (the first y), 3, 0
            const EvalScore s = score_of(set, {{0, 1, 2, 3}, {4, 3, 2, 1}, {4, 3, 2, 1}, {0, 9, 9, 9}});
            for (const char* name : {"acc", "acc_norm"}) { check_measure(s, name, 0.25, sqrt(0.1875 / 4)); }
            check_measure(s, "loss", (0.5 + 2.0 + 1.0 + 0.0) / 4, sqrt((5.25 / 4 - 0.765625) / 4));
            for (double bad : {(double)NAN, (double)INFINITY}) {        // even of one that is not asked for
                const EvalScore n = score_of(set, {{0, bad, 2, 3}, {4, 3, 2, 1}, {4, 3, 2, 1}, {0, 9, 9, 9}});
                for (const EvalMeasure& m : n.measures) {
                    CHECK(isnan(m.value) && isnan(m.error), "%s %f +- %f", m.name, m.value, m.error);
                }
            }
        }
    }
    TEST("questions of one completion have a loss, a perplexity and the share that is likeliest") {
        const Texts alone = {0, {{5}, {1, 2}}};
        const EvalSet none = set_of(file_of({alone, {0, {{6}, {1}}}}), 10, 2, 4);
        for (bool found : {false, true}) {
            const EvalScore s = score_of(none, {{4}, {1}}, found);
            CHECK(s.measures.size() == 3, "%zu measures", s.measures.size());
            check_measure(s, "acc", found / 2.0, found * sqrt(0.25 / 2));
            check_measure(s, "loss", 1.5, 0.5 / sqrt(2.0));
            check_measure(s, "word_ppl", exp(2.5), exp(2.5) * 1.5 / sqrt(2.0));
        }
        // two completions: the second; five: the last, and the third by means
        const std::vector<Texts> mixed = {
            alone, {1, {{5}, {1}, {2}}}, {2, {{5}, {1}, {2}, {3, 4}, {4}, {6}}}};
        const EvalScore m = score_of(set_of(file_of(mixed), 10, 2, 4), {{9}, {3, 2}, {3, 3, 4, 3, 2.5}},
                                     true);
        check_measure(m, "acc", 0.5);
        check_measure(m, "acc_norm", 1.0);
        check_measure(m, "loss", (4.5 + 2 + 2) / 3);
    }
    TEST("a row is found if all of its targets are likeliest") {
        const EvalSet set = set_of(file_of({{0, {{5}, {1, 2}}}, {0, {{6}, {1}}}, {0, {{7}, {2}}}}), 10, 3, 4);
        std::vector<double> sums(3), found(3);
        const float losses[4] = {1, 2, 3, 0};
        for (int both : {0, 1}) {
            const int likeliest[4] = {1, both, 0, 1};
            CHECK_IS(evalset_sum(&set, set.batches[0], losses, likeliest, sums.data(), found.data()),
                     (size_t)4);
            check_measure(evalset_score(&set, sums, found), "acc", (1 + both) / 3.0);
            check_measure(evalset_score(&set, sums, found), "loss", 4.5 / 3);
        }
    }
    TEST("facts tell sets apart") {
        const EvalSet none = {};
        CHECK_TEXT(evalset_facts(&none), "");
        std::vector<Texts> questions = made_up(2, 9, 5, 5);
        File file = file_of(questions);
        file.header[4] = 1;
        const EvalSet a = set_of(file, 9, 1, 4);
        CHECK_IS(a.tokenizer, 1);
        questions[1].parts[4][0] ^= 1;
        const EvalSet b = set_of(file_of(questions), 10, 1, 4);
        CHECK(evalset_facts(&a) != evalset_facts(&b), "%s", evalset_facts(&a).c_str());
    }
}

int main() {
    folder_begin("evalloader");
    TEST("what does not fit is one sentence") { test_wrong_files(); }
    TEST("words of 32 bits") { test_wide(); }
    TEST("every completion is a row, in batches without waste, for any B and T") { test_rows(); }
    TEST("the context is first or last, and the text behind it counts") { test_fill(); }
    test_score();
    return folder_end();
}
