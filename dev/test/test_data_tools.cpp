/*
Tests of the tools that make and judge data: stories, bigram, tinyshakespeare.sh; and of tokenize and the
loader against llmc_format.py, which knows llm.c's formats and nothing of ours. `make test` builds the tools.

    build/test_data_tools               # from the root of the repository
*/
#include <math.h>                   // gives: log, fabs
#include <stdio.h>                  // gives: popen
#include <stdlib.h>                 // gives: mkdtemp
#include <sys/wait.h>               // gives: WEXITSTATUS

#include <map>                      // gives: std::map
#include <set>                      // gives: std::set
#include <string>                   // gives: std::string
#include <vector>                   // gives: std::vector

#include "../../llmc/dataloader.h"  // gives: DataLoader
#include "test.h"                   // gives: TEST, CHECK, SKIP, test_summary

static std::string folder;          // of this run, removed at the end

static std::string in_folder(const std::string& name) { return folder + "/" + name; }

struct Output { int code; std::string text; };      // exit code; stdout and stderr

static Output shell(const std::string& command) {
    fflush(stdout);
    FILE* f = popen((command + " 2>&1").c_str(), "r");
    if (!f) { die("cannot run '%s'", command.c_str()); }
    Output out = {0, ""};
    char buffer[4096];
    for (size_t n; (n = fread(buffer, 1, sizeof(buffer), f)) > 0;) { out.text.append(buffer, n); }
    int status = pclose(f);
    out.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    return out;
}

static std::vector<std::string> documents(const std::string& text) {
    const std::string separator = "<|endoftext|>\n";
    std::vector<std::string> docs;
    for (size_t from = 0;;) {
        size_t to = text.find(separator, from);
        docs.push_back(text.substr(from, to == std::string::npos ? to : to - from));
        if (to == std::string::npos) { return docs; }
        from = to + separator.size();
    }
}

static void test_stories() {
    std::string one = shell("build/stories --seed 1 -n 2000").text;
    std::string two = shell("build/stories --seed 2 -n 2000").text;
    CHECK(one == shell("build/stories --seed 1 -n 2000").text, "the same seed told other stories");
    CHECK(two.compare(0, 100000, shell("build/stories --seed 2 --bytes 100000").text, 0, 100000) == 0,
          "--bytes tells other stories than --count");
    std::vector<std::string> docs = documents(one), others = documents(two);
    CHECK(docs.size() == 2000, "%zu documents", docs.size());
    std::set<std::string> known(docs.begin(), docs.end());
    CHECK(known.size() >= 1995, "only %zu of 2000 stories differ", known.size());
    int again = 0, untidy = 0;
    for (const std::string& doc : others) { again += (int)known.count(doc); }
    CHECK(again <= 10, "%d stories of seed 2 are also stories of seed 1", again);
    for (const std::string& doc : docs) {       // no trace of a template, no gap where an option was empty
        bool bad = doc.size() < 200 || doc.back() != '\n';
        for (const char* trace : {"{", "}", "[", "]", "|", "  ", " .", " ,", "..", ",,", " \n", "\n\n\n",
                                  "\"\"", " a a", " a e", " a i", " a o"}) {
            bad |= doc.find(trace) != std::string::npos;
        }
        untidy += bad;
        if (bad && untidy == 1) { printf("%s\n", doc.c_str()); }
    }
    CHECK(untidy == 0, "%d untidy stories, the first is above", untidy);
    Output file = shell("build/stories --seed 1 -n 2000 -o " + in_folder("stories.txt"));
    CHECK(file.code == 0 && shell("cat " + in_folder("stories.txt")).text == one, "-o and stdout differ");
    CHECK(shell("build/stories -n 0").code == 1, "-n 0 was taken");
    CHECK(shell("build/stories -o " + in_folder("no/such/folder")).code == 1, "an impossible -o was taken");
}

static void write_tokens(const std::string& path, const std::vector<uint16_t>& tokens) {
    int32_t header[256] = {20240520, 1, (int32_t)tokens.size()};
    FILE* f = fopen_check(path.c_str(), "wb");
    fwrite(header, 4, 256, f);
    fwrite(tokens.data(), 2, tokens.size(), f);
    fclose(f);
}

static void test_bigram() {
    // the loss by another way: maps, and one smoothing at a time
    std::vector<uint16_t> train, val;
    for (uint32_t i = 0; i < 3000; i++) {
        uint32_t r = rand_u32(7, RAND_SAMPLE, 0, i);
        train.push_back((uint16_t)(r % 3 ? (i * i) % 17 : (r >> 8) % 40));
        if (i < 500) { val.push_back((uint16_t)(r % 5 ? (i * i) % 17 : (r >> 8) % 43)); }
    }
    write_tokens(in_folder("bi_train.bin"), train);
    write_tokens(in_folder("bi_val.bin"), val);
    std::map<std::pair<int, int>, double> pairs;
    std::map<int, double> firsts, seconds;
    for (size_t i = 1; i < train.size(); i++) {
        pairs[{train[i - 1], train[i]}]++;
        firsts[train[i - 1]]++;
        seconds[train[i]]++;
    }
    double best = 1e9;
    for (double s : {0.01, 0.1, 0.3, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 1024.0}) {
        for (double t : {0.001, 0.01, 0.1, 1.0}) {
            double loss = 0;
            for (size_t i = 1; i < val.size(); i++) {
                double single = (seconds[val[i]] + t) / (2999 + t * 43);
                loss -= log((pairs[{val[i - 1], val[i]}] + s * single) / (firsts[val[i - 1]] + s));
            }
            best = std::min(best, loss / 499);
        }
    }
    Output out = shell("build/bigram -i " + in_folder("bi_train.bin") + " -j " + in_folder("bi_val.bin"));
    double loss = NAN;
    sscanf(out.text.c_str(), "bigram val loss %lf", &loss);
    CHECK(fabs(loss - best) <= 2e-6, "bigram says %f, expected %f", loss, best);
    out = shell("build/bigram -i " + in_folder("missing.bin") + " -j " + in_folder("bi_val.bin"));
    CHECK(out.code == 1 && out.text.find("missing.bin") != std::string::npos, "%s", out.text.c_str());
}

// The sum of all tokens as the loader sees them, one window of T = 1 after the other.
static unsigned long sum_of_loader(const std::string& path, int64_t tokens) {
    DataLoader loader;
    dataloader_init(&loader, path.c_str(), 1, 1, 0, 1, false, 0, 65536);
    unsigned long sum = 0;
    for (int64_t i = 0; i + 1 < tokens; i++) {
        dataloader_next(&loader);
        sum += (unsigned long)(i == 0 ? loader.inputs[0] + loader.targets[0] : loader.targets[0]);
    }
    CHECK(loader.tokens == tokens, "%lld tokens, expected %lld", (long long)loader.tokens, (long long)tokens);
    dataloader_free(&loader);
    return sum;
}

static void test_formats() {
    if (shell("python3 --version").code != 0) {
        SKIP(6, "no python3 for dev/test/llmc_format.py");
        return;
    }
    const std::string tool = "python3 dev/test/llmc_format.py ";
    std::string theirs = in_folder("theirs.bin");
    Output out = shell(tool + "write-shard " + theirs + " --tokens 4001 --vocab 50257 --seed 3");
    unsigned long sum = 0, seen = sum_of_loader(theirs, 4001);
    sscanf(out.text.c_str(), "tokens 4001 largest %*d sum %lu", &sum);
    CHECK(sum > 0 && sum == seen, "the loader's sum is %lu: %s", seen, out.text.c_str());
    std::string ours = in_folder("ours");           // bytes, so that the sum is known
    shell("printf 'abc\\nd' > " + ours + ".txt");
    out = shell("build/tokenize " + ours + ".txt --bytes 1 --separators 0 -o " + ours);
    CHECK(out.code == 0, "%s", out.text.c_str());
    out = shell(tool + "read-shard " + ours + "_train.bin");
    CHECK(out.code == 0 && out.text.find("tokens 5 largest 100 sum 404 ") == 0, "%s", out.text.c_str());
    for (const char* version : {"3", "5"}) {        // what it writes, it reads
        std::string model = in_folder("model.bin"), sizes = " --L 2 --NH 3 --C 12 --T 7 --V 11 --Vp 16";
        std::string written = shell(tool + "write-model " + model + sizes + " --version " + version).text;
        std::string read = shell(tool + "read-model " + model).text;
        CHECK(!written.empty() && written == read, "version %s:\n%s", version, read.c_str());
    }
}

static void test_tinyshakespeare() {
    std::string script = "dev/data/tinyshakespeare.sh --tokenize build/tokenize --out " + in_folder("tiny");
    shell("echo 'To be or not to be' > " + in_folder("hamlet.txt"));
    Output out = shell(script + " --text " + in_folder("hamlet.txt"));
    bool refused = out.text.find("is not tinyshakespeare") != std::string::npos;
    CHECK(out.code == 1 && refused, "%s", out.text.c_str());
    out = shell(script + " --text " + in_folder("missing.txt"));
    CHECK(out.code == 1 && out.text.find("missing.txt") != std::string::npos, "%s", out.text.c_str());
    const char* text = getenv("TINYSHAKESPEARE");
    if (!text) { text = "dev/data/tinyshakespeare/tiny_shakespeare.txt"; }
    if (access(text, R_OK) != 0) {
        SKIP(2, "no text: TINYSHAKESPEARE=FILE or `make tinyshakespeare` brings it");
        return;
    }
    out = shell(script + " --text " + text);
    CHECK(out.code == 0, "%s", out.text.c_str());
    DataLoader loader;
    std::string all = in_folder("tiny/tiny_shakespeare_all.bin");
    dataloader_init(&loader, all.c_str(), 16, 1024, 0, 1, false, 0, 50257);
    CHECK(loader.tokens == 338025, "%lld tokens", (long long)loader.tokens);
    dataloader_free(&loader);
}

int main() {
    for (const char* tool : {"build/stories", "build/bigram", "build/tokenize"}) {
        if (access(tool, X_OK) != 0) {
            SKIP(21, "no %s: run `make stories bigram tokenize`, and this in the same folder", tool);
            return test_summary();
        }
    }
    const char* tmp = getenv("TMPDIR");
    std::string name = std::string(tmp ? tmp : "/tmp") + "/test_data_tools_XXXXXX";
    if (!mkdtemp(&name[0])) { die("cannot create a folder '%s': %s", name.c_str(), strerror(errno)); }
    folder = name;
    TEST("stories") { test_stories(); }
    TEST("bigram") { test_bigram(); }
    TEST("formats") { test_formats(); }
    TEST("tinyshakespeare") { test_tinyshakespeare(); }
    shell("rm -r " + folder);
    return test_summary();
}
