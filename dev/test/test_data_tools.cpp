/*
Tests of the tools that make and judge data: stories, bigram, tinyshakespeare.sh. What the stories say is read
by test_stories.py, shards of tokenize by test_tokenizer. `make test` builds the tools.

    build/test_data_tools               # from the root of the repository
*/
#include <math.h>                   // gives: log, fabs

#include <map>                      // gives: std::map

#include "llmc/rand.h"              // gives: rand_u32
#include "child.h"                  // gives: folder, shard_text
#include "test.h"                   // gives: TEST, CHECK, SKIP

struct Output { int code; std::string text; };      // exit code; stdout and stderr

static Output shell(const std::string& command) {
    const Child c = run_child([&] { execl("/bin/sh", "sh", "-c", (command + " 2>&1").c_str(), nullptr); });
    return {c.code, c.out};
}

// The command must end with this exit code, its output must hold this.
static void check_shell(const std::string& command, int code, const std::string& words) {
    const Output out = shell(command);
    CHECK(out.code == code && holds(out.text, words), "%s: %d, no '%s' in\n%s", command.c_str(), out.code,
          words.c_str(), out.text.c_str());
}

static void test_stories() {
    const std::string text = shell("build/stories --seed 1 -n 2000").text, end = "<|endoftext|>\n";
    // The text is a pure function of the seed on every machine: quickstart's numbers rest on it. Who means to
    // change the stories changes this number, too.
    uint64_t hash = 14695981039346656037ull;            // FNV-1a
    for (char c : text) { hash = (hash ^ (unsigned char)c) * 1099511628211ull; }
    CHECK(hash == 0x01bebcadfb3b9f20ull, "2000 stories of seed 1 have the hash 0x%016llx",
          (unsigned long long)hash);

    check_shell("build/stories --seed 1 -n 2000 -o " + in_folder("stories.txt"), 0, "");
    CHECK(read_text(in_folder("stories.txt")) == text, "-o and stdout differ");
    check_shell("build/stories -n 0", 1, "-n");
    check_shell("(build/stories -n 1 > /dev/full)", 1, "standard output");
    check_shell("(build/stories -n 2000 > /dev/full)", 1, "standard output");
    check_shell("timeout 60 build/stories -o /dev/null", 1, "a device");
    check_shell("build/stories -o " + in_folder("no/such/folder"), 1, "no/such/folder");
}

static void test_bigram() {
    // the loss by another way: maps, and one smoothing at a time
    std::vector<uint16_t> train, val;
    for (uint32_t i = 0; i < 3000; i++) {
        const uint32_t r = rand_u32(7, RAND_SAMPLE, 0, i);
        train.push_back((uint16_t)(r % 3 ? (i * i) % 17 : (r >> 8) % 40));
        if (i < 500) { val.push_back((uint16_t)(r % 5 ? (i * i) % 17 : (r >> 8) % 43)); }
    }
    write_text(in_folder("train.bin"), shard_text(train));
    write_text(in_folder("val.bin"), shard_text(val));
    std::map<std::pair<int, int>, double> pairs;
    std::map<int, double> firsts, seconds;
    for (size_t i = 1; i < train.size(); i++) {
        pairs[{train[i - 1], train[i]}]++;
        firsts[train[i - 1]]++;
        seconds[train[i]]++;
    }
    double best = 1e9, said = NAN;
    for (double s : {0.01, 0.1, 0.3, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 1024.0}) {
        for (double t : {0.001, 0.01, 0.1, 1.0}) {
            double loss = 0;
            for (size_t i = 1; i < val.size(); i++) {
                const double single = (seconds[val[i]] + t) / (2999 + t * 43);
                loss -= log((pairs[{val[i - 1], val[i]}] + s * single) / (firsts[val[i - 1]] + s));
            }
            best = std::min(best, loss / 499);
        }
    }
    const std::string command = "timeout 60 build/bigram -j " + in_folder("val.bin") + " -i ";
    sscanf(shell(command + in_folder("train.bin")).text.c_str(), "bigram val loss %lf", &said);
    CHECK(fabs(said - best) <= 2e-6, "bigram says %f, expected %f", said, best);
    check_shell(command + in_folder("missing.bin"), 1, "missing.bin");
    check_shell("(" + command + in_folder("train.bin") + " > /dev/full)", 1, "standard output");
    shell("mkfifo " + in_folder("pipe.bin"));           // nobody writes to it: must not be waited for
    check_shell(command + in_folder("pipe.bin"), 1, "regular file");
}

static void test_tinyshakespeare() {
    const std::string script = "dev/data/tinyshakespeare.sh --tokenize build/tokenize --out " +
                               in_folder("tiny") + " --text ";
    write_text(in_folder("hamlet.txt"), "To be or not to be\n");
    check_shell(script + in_folder("hamlet.txt"), 1, "is not tinyshakespeare");
    check_shell(script + in_folder("missing.txt"), 1, "missing.txt");
    // the name of a text may hold whatever a file name may; $ is make's: it is written twice
    const std::string odd = in_folder("it's a; touch evil; $HOME `touch evil`\"x.txt");
    write_text(odd, "");
    setenv("ODD", odd.c_str(), 1);
    const Output out = shell("make -s tinyshakespeare TEXT=\"$(printf %s \"$ODD\" | sed 's/\\$/$$/g')\"");
    CHECK(holds(out.text, odd + "' is not tinyshakespeare"), "%s", out.text.c_str());
    CHECK(access("evil", F_OK) != 0, "the name was run");
    unlink("evil");
    const char* text = getenv("TINYSHAKESPEARE");
    if (!text) { text = "dev/data/tinyshakespeare/tiny_shakespeare.txt"; }
    if (access(text, R_OK) != 0) {
        SKIP(2, "no text: TINYSHAKESPEARE=FILE or `make tinyshakespeare` brings it");
        return;
    }
    check_shell(script + text, 0, "");
    const int64_t bytes = file_size(in_folder("tiny/tiny_shakespeare_all.bin").c_str());
    CHECK(bytes == 1024 + 2 * 338025, "%lld bytes", (long long)bytes);
}

int main() {
    for (const char* tool : {"build/stories", "build/bigram", "build/tokenize"}) {
        if (access(tool, X_OK) != 0) {
            SKIP(17, "no %s: run `make stories bigram tokenize`, and this in the same folder", tool);
            return test_summary();
        }
    }
    folder_begin("data_tools");
    TEST("stories") { test_stories(); }
    TEST("bigram") { test_bigram(); }
    TEST("tinyshakespeare") { test_tinyshakespeare(); }
    return folder_end();
}
