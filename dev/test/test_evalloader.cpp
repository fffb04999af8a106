/*
Tests of llmc/data/evalloader.h: files of questions, right and wrong, rows, batches, sums and the score.

    make build/test_evalloader && build/test_evalloader
*/
#include "llmc/data/evalloader.h"

#include <random>       // gives: std::mt19937
#include <set>          // gives: std::set

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

// cut: bytes that are missing at the end, or more that are there.
static std::string write_file(const char* name, const File& file, int cut = 0) {
    std::string bytes((const char*)file.header.data(), 4 * file.header.size());
    bytes.append((const char*)file.words.data(), 2 * file.words.size());
    bytes.resize(bytes.size() - (size_t)std::max(0, cut));
    if (cut < 0) { bytes.append((size_t)-cut, '\0'); }
    write_text(in_folder(name), bytes);
    return in_folder(name);
}

static std::vector<Texts> made_up(int count, int V, int longest, unsigned seed) {
    std::mt19937 rng(seed);
    std::vector<Texts> questions;
    for (int i = 0; i < count; i++) {
        Texts q = {(int)(rng() % 4), {}};
        for (int part = 0; part < 5; part++) {
            Words tokens(1 + rng() % (unsigned)longest);
            for (uint16_t& token : tokens) { token = (uint16_t)(rng() % (unsigned)V); }
            q.parts.push_back(tokens);
        }
        questions.push_back(q);
    }
    return questions;
}

static EvalSet read_set(const std::string& path, int V, int B, int T) {
    EvalSet set;
    evalset_init(&set, path.c_str(), V, B, T);
    return set;
}

static EvalSet set_of(const std::vector<Texts>& questions, int V, int B, int T) {
    return read_set(write_file("set.bin", file_of(questions)), V, B, T);
}

static void check_refused(const std::string& what, const File& file, const std::vector<std::string>& words,
                          int cut = 0) {
    const std::string path = write_file("wrong.bin", file, cut);
    check_dies(what, [&] { read_set(path, 100, 2, 8); }, words);
}

// ---- files ----

static void test_wrong_files() {
    TEST("what does not fit is one sentence") {
        const std::vector<Texts> questions = made_up(3, 100, 6, 1);
        const File good = file_of(questions);
        const size_t second = question_words(0, questions[0]).size();
        const size_t context = second + 5, completion = context + 1 + questions[1].parts[0].size();
        const int bytes = (int)(2 * good.words.size());
        const int size = 2 * (int)question_words(1, questions[1]).size();
        const EvalSet set = read_set(write_file("good.bin", good), 100, 2, 8);
        CHECK(set.questions.size() == 3 && set.tokenizer == 0, "%zu questions", set.questions.size());

        // a word of 4 bytes of the header, or of 2 bytes of the questions, and what is said of it
        const bool head = true;
        const struct { const char* what; bool header; size_t at; int value; std::vector<std::string> said; }
        changes[] = {
            {"a shard", head, 0, 20240520, {"20240520", "20240522"}},
            {"version 2", head, 1, 2, {"version 2", "1"}},
            {"no questions", head, 2, 0, {"0 questions"}},
            {"minus one question", head, 2, -1, {"-1 questions"}},
            {"65537 questions", head, 2, 65537, {"65537 questions", "65536"}},
            {"two billion", head, 2, 2147483647, {"2147483647 questions"}},
            {"a question too many", head, 2, 4, {"question 3", "cut off"}},
            {"more than fit", head, 2, 1000, {"truncated", "1000 questions"}},
            {"a question too few", head, 2, 2, {"behind its last question"}},
            {"longest 0", head, 3, 0, {"0 bytes"}}, {"longest -2", head, 3, -2, {"-2 bytes"}},
            {"longest 65536", head, 3, 65536, {"65536 bytes"}}, {"longest too short", head, 3, 30, {"30"}},
            {"no start", !head, second, 1, {"question 1", "begins with 1", "65535"}},
            {"no bytes", !head, second + 1, 0, {"question 1", "has 0 bytes"}},
            {"odd bytes", !head, second + 1, size + 1, {"question 1", std::to_string(size + 1)}},
            {"fewer bytes", !head, second + 1, size - 2, {"question 1"}},
            {"more bytes", !head, second + 1, size + 2, {"question 1"}},
            {"all bytes", !head, second + 1, 65534, {"question 1", "65534 bytes", "are left"}},
            {"another number", !head, second + 2, 0, {"question 1", "number 0"}},
            {"label 4", !head, second + 3, 4, {"question 1", "answer 4", "0..3"}},
            {"label 65535", !head, second + 3, 65535, {"answer 65535"}},
            {"no completions", !head, second + 4, 0, {"0 completions", "4"}},
            {"three completions", !head, second + 4, 3, {"3 completions", "4"}},
            {"65535 completions", !head, second + 4, 65535, {"65535 completions"}},
            {"an empty context", !head, context, 0, {"context", "0 tokens"}},
            {"a long context", !head, context, 65535, {"context", "65535 tokens"}},
            {"an empty completion", !head, completion, 0, {"completion 0", "0 tokens"}},
            {"a long completion", !head, completion, 60000, {"completion 0", "60000 tokens"}},
            {"token 100", !head, context + 1, 100, {"question 1", "token id 100", "0..99"}},
            {"token 65535", !head, completion + 1, 65535, {"token id 65535"}}};
        for (const auto& c : changes) {
            File file = good;
            if (c.header) { file.header[c.at] = c.value; }
            else { file.words[c.at] = (uint16_t)c.value; }
            // else the longest size alone tells
            if (c.header ? c.at == 2 && c.value == 2 : c.at == second + 1) { file.header[3] = 65534; }
            check_refused(c.what, file, c.said);
        }
        for (int cut = 1; cut <= bytes + 1024; cut += cut < bytes ? 1 : 93) {       // wherever it ends
            check_refused(format("%d bytes less", cut), good, {}, cut);
        }
        check_refused("a header alone", {{20240522, 1, 0, 100}, {}}, {"0 questions", "possible"}, -4 * 252);
        check_refused("a byte more", good, {"does not match"}, -1);
        File roomy = good;
        roomy.header[3] = 65534;
        check_refused("two bytes more", roomy, {"2 bytes behind its last question"}, -2);
        check_refused("a kilobyte more", good, {"does not match"}, -1024);
        check_dies("no file", [] { read_set(in_folder("none.bin"), 100, 2, 8); },
                   {"no evaluation data", "none.bin", "get.py"});
        check_dies("a folder", [] { read_set(folder, 100, 2, 8); }, {"a folder"});
    }
    TEST("the header's tokenizer, and ids of the whole range") {
        std::vector<Texts> questions = made_up(1, 100, 6, 2);
        questions[0].parts[3][0] = 65534;
        File file = file_of(questions);
        file.header[4] = 1;
        const EvalSet set = read_set(write_file("ids.bin", file), 65535, 2, 8);
        CHECK(set.tokenizer == 1 && set.questions[0].label == questions[0].label, "%u", set.tokenizer);
    }
}

// ---- rows ----

// What the model would be shown, and where, by the question's own words.
static void check_batches(const EvalSet& set, const std::vector<Texts>& questions, int B, int T) {
    std::set<std::pair<int, int>> seen;
    int64_t at = 0;
    bool sized = true, ordered = true, filled = true, summed = true;
    for (const EvalBatch& batch : set.batches) {
        ordered = ordered && batch.first == at;
        sized = sized && batch.rows >= 1 && batch.T >= 1 && batch.T <= T && batch.rows * batch.T <= B * T &&
                (batch.T % 32 == 0 || batch.T == T);
        const size_t N = (size_t)batch.rows * (size_t)batch.T;
        std::vector<int> inputs(N, -1), places(N, -1), targets(N, -1);
        const int count = evalset_fill(&set, batch, inputs.data(), places.data(), targets.data());
        size_t next = 0;
        std::vector<float> losses(N);
        for (size_t i = 0; i < N; i++) { losses[i] = 1.0f / (float)(1 + i % 1013); }
        std::vector<double> sums((size_t)batch.rows + 1, -7.0);
        evalset_sum(&set, batch, losses.data(), sums.data());
        for (int b = 0; b < batch.rows; b++) {
            const EvalRow& row = set.rows[(size_t)(at + b)];
            seen.insert({row.question, row.choice});
            const Texts& q = questions[(size_t)row.question];
            const Words& end = q.parts[(size_t)row.choice + 1];
            Words all = q.parts[0];
            all.insert(all.end(), end.begin(), end.end());
            if ((int)all.size() > T + 1) { all.erase(all.begin(), all.end() - (T + 1)); }
            const int positions = (int)all.size() - 1;
            sized = sized && row.positions == positions && positions <= batch.T && batch.T < positions + 32;
            double sum = 0.0;
            for (int t = 0; t < batch.T; t++) {
                const size_t i = (size_t)b * (size_t)batch.T + (size_t)t;
                const int input = t < positions ? all[(size_t)t] : 0;
                filled = filled && inputs[i] == input;
                // the target at t is token t + 1: the completion's are the last ones
                const bool counts = t < positions && t + 1 >= (int)all.size() - (int)end.size();
                if (!counts) { continue; }
                filled = filled && places[next] == (int)i && targets[next] == all[(size_t)t + 1];
                sum += losses[next++];
            }
            summed = summed && sums[(size_t)b] == sum;
        }
        filled = filled && next == (size_t)count;
        for (; next < N; next++) { filled = filled && places[next] == 0 && targets[next] == 0; }
        summed = summed && sums.back() == -7.0;
        at += batch.rows;
    }
    CHECK(ordered && at == (int64_t)set.rows.size(), "B=%d T=%d: batches follow each other", B, T);
    CHECK(sized, "B=%d T=%d: sizes", B, T);
    CHECK(filled, "B=%d T=%d: inputs, places and targets", B, T);
    CHECK(summed, "B=%d T=%d: sums", B, T);
    CHECK(seen.size() == 4 * questions.size() && set.rows.size() == seen.size(), "B=%d T=%d: %zu of %zu rows",
          B, T, seen.size(), set.rows.size());
    // no batch could take a row of the next one, so none is split without need
    bool full = true;
    for (size_t i = 0; i + 1 < set.batches.size(); i++) {
        const EvalBatch &a = set.batches[i], &b = set.batches[i + 1];
        full = full && a.T <= b.T && (a.T != b.T || (a.rows + 1) * a.T > B * T);
    }
    CHECK(full, "B=%d T=%d: batches are full", B, T);
}

static void test_rows() {
    TEST("every completion is a row, and what is counted is its tokens, for any B and T") {
        const std::vector<Texts> questions = made_up(40, 300, 70, 3);
        const std::string path = write_file("rows.bin", file_of(questions));
        for (int B : {1, 2, 3, 7, 64}) {
            for (int T : {1, 2, 31, 32, 33, 64, 100, 139, 140, 1024}) {
                check_batches(read_set(path, 300, B, T), questions, B, T);
            }
        }
    }
    auto most_rows = [](const EvalSet& set) {       // of a batch
        int most = 0;
        for (const EvalBatch& batch : set.batches) { most = std::max(most, batch.rows); }
        return most;
    };
    TEST("a token each: the shortest question") {
        const std::vector<Texts> questions = {{3, {{5}, {1}, {2}, {3}, {4}}}};
        EvalSet set = set_of(questions, 6, 1, 1);
        check_batches(set, questions, 1, 1);
        CHECK(set.batches.size() == 4 && most_rows(set) == 1, "%zu batches", set.batches.size());
        set = set_of(questions, 6, 2, 32);
        CHECK(set.batches.size() == 2 && evalset_positions(&set) == 4 * 32, "%zu batches",
              set.batches.size());
        CHECK(most_rows(set) == 2, "%d rows", most_rows(set));
    }
    TEST("lengths like HellaSwag's cost an eighth of rows of 1024") {
        const EvalSet set = set_of(made_up(200, 300, 90, 4), 300, 4, 1024);
        const int64_t positions = evalset_positions(&set);
        CHECK(8 * positions <= 800 * 1024, "%lld positions", (long long)positions);
    }
}

// ---- the score ----

static std::vector<double> row_sums(const EvalSet& set, const std::vector<std::vector<double>>& sums) {
    std::vector<double> in_order;
    for (const EvalRow& row : set.rows) {
        in_order.push_back(sums[(size_t)row.question][(size_t)row.choice]);
    }
    return in_order;
}

static void test_score() {
    TEST("acc is by sums, acc_norm by means, the loss is that of the right completions") {
        const Words one = {1}, two = {1, 2}, four = {1, 2, 3, 4};
        const std::vector<Texts> questions = {
            {0, {two, one, two, four, {2}}}, {2, {one, one, two, four, {2}}},
            {1, {one, two, {2, 2}, {3, 2}, {4, 2}}}};
        const EvalSet set = set_of(questions, 9, 1, 64);
        // sums; means: 3 2 1 9 | 3 2 1 9 | equal: the first is taken
        const std::vector<std::vector<double>> sums = {{3, 4, 4, 9}, {3, 4, 4, 9}, {2, 2, 2, 2}};
        EvalScore s = evalset_score(&set, row_sums(set, sums));
        CHECK(s.acc == 1.0 / 3, "acc %f", s.acc);                   // chosen: 0 0 0, right: 0 2 1
        CHECK(s.acc_norm == 1.0 / 3, "acc_norm %f", s.acc_norm);    // chosen: 2 2 0
        CHECK(s.loss == (3.0 + 1.0 + 1.0) / 3, "loss %f", s.loss);
        std::vector<std::vector<double>> lower = sums;
        lower[2][1] = 1.5;
        s = evalset_score(&set, row_sums(set, lower));
        CHECK(s.acc == 2.0 / 3 && s.acc_norm == 2.0 / 3, "acc %f, acc_norm %f", s.acc, s.acc_norm);
        for (double bad : {(double)NAN, (double)INFINITY}) {
            std::vector<std::vector<double>> wrong = sums;
            wrong[1][3] = bad;                          // not even one that is asked for
            s = evalset_score(&set, row_sums(set, wrong));
            CHECK(isnan(s.acc) && isnan(s.acc_norm) && isnan(s.loss), "%f %f %f", s.acc, s.acc_norm, s.loss);
        }
    }
    TEST("completions that the model reads as equal are one row, and the first of them is taken") {
        const Words x = {1, 2}, y = {2, 1};
        const std::vector<Texts> questions = {
            {3, {{5}, y, x, x, x}}, {0, {{5}, x, x, y, y}},
            {1, {{5}, {1, 8, 2, 3, 4, 5}, {9, 8, 2, 3, 4, 5}, {8, 2, 3, 4, 5}, x}}};
        const std::vector<int> wanted[] = {{0, 1, 1, 1}, {0, 0, 2, 2}, {0, 0, 0, 3}};
        for (int B : {1, 3}) {
            const EvalSet set = set_of(questions, 10, B, 4);
            CHECK(set.rows.size() == 6, "%zu rows", set.rows.size());
            std::vector<double> sums;
            for (size_t i = 0; i < 3; i++) {
                const EvalQuestion& q = set.questions[i];
                CHECK(std::vector<int>(q.same_as, q.same_as + 4) == wanted[i], "question %zu", i);
            }
            for (const EvalRow& r : set.rows) { sums.push_back(r.question ? 4 - r.choice : r.choice); }
            const EvalScore s = evalset_score(&set, sums);      // chosen: 0 (y), 2 (the first y), 3
            CHECK(s.acc == 0.0 && s.acc_norm == 0.0, "acc %f, acc_norm %f", s.acc, s.acc_norm);
            CHECK(s.loss == (0.5 + 2.0 + 1.0) / 3, "loss %f", s.loss);
        }
    }
    TEST("a completion longer than T: the mean of what was counted") {
        const std::vector<Texts> questions = {{0, {{1}, {1, 2, 3, 4, 5, 6}, {1}, {1, 2}, {1, 2}}}};
        const EvalSet set = set_of(questions, 9, 1, 4);
        const EvalScore s = evalset_score(&set, row_sums(set, {{4, 2, 5, 5}}));
        CHECK(s.loss == 1.0 && s.acc == 0.0 && s.acc_norm == 1.0, "%f %f %f", s.loss, s.acc, s.acc_norm);
    }
    TEST("facts tell sets apart") {
        const EvalSet none = {};
        CHECK_TEXT(evalset_facts(&none), "");
        std::vector<Texts> questions = made_up(2, 9, 5, 5);
        const EvalSet a = set_of(questions, 9, 1, 4);
        questions[1].parts[4][0] ^= 1;
        const EvalSet b = set_of(questions, 10, 1, 4);
        CHECK(evalset_facts(&a) != evalset_facts(&b), "%s", evalset_facts(&a).c_str());
    }
}

int main() {
    folder_begin("evalloader");
    test_wrong_files();
    test_rows();
    test_score();
    return folder_end();
}
