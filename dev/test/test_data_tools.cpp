/*
Tests of the tools that make and judge data: stories, bigram, tinyshakespeare.sh; and of tokenize and the
loader against llmc_format.py, which knows llm.c's formats and nothing of ours. `make test` builds the tools.

    build/test_data_tools               # from the root of the repository
*/
#include <math.h>                   // gives: log, fabs
#include <stdio.h>                  // gives: popen
#include <stdlib.h>                 // gives: mkdtemp
#include <sys/wait.h>               // gives: WEXITSTATUS

#include <algorithm>                // gives: std::count, std::find
#include <map>                      // gives: std::map
#include <set>                      // gives: std::set
#include <string>                   // gives: std::string
#include <vector>                   // gives: std::vector

#include "llmc/data/dataloader.h"   // gives: DataLoader
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
    CHECK(known.size() == 2000, "only %zu of 2000 stories differ", known.size());
    int again = 0, untidy = 0;
    for (const std::string& doc : others) { again += (int)known.count(doc); }
    CHECK(again == 0, "%d stories of seed 2 are also stories of seed 1", again);
    for (const std::string& doc : docs) {       // no trace of a template, no gap where an option was empty
        bool bad = doc.size() < 200 || doc.back() != '\n';
        for (const char* trace : {"{", "}", "[", "]", "|", "  ", " .", " ,", "..", ",,", " \n", "\n\n\n",
                                  "\"\"", " a a", " a e", " a i", " a o", " a u"}) {
            bad |= doc.find(trace) != std::string::npos;
        }
        untidy += bad;
        if (bad && untidy == 1) { printf("%s\n", doc.c_str()); }
    }
    CHECK(untidy == 0, "%d untidy stories, the first is above", untidy);
    Output file = shell("build/stories --seed 1 -n 2000 -o " + in_folder("stories.txt"));
    CHECK(file.code == 0 && shell("cat " + in_folder("stories.txt")).text == one, "-o and stdout differ");
    CHECK(shell("build/stories -n 0").code == 1, "-n 0 was taken");
    for (const char* flags : {"-n 1", "-n 2000"}) {
        Output full = shell(std::string("(build/stories ") + flags + " > /dev/full)");
        CHECK(full.code == 1 && full.text.find("standard output") != std::string::npos, "%s",
              full.text.c_str());
    }
    Output odd = shell("timeout 60 build/stories -o /dev/null");
    CHECK(odd.code == 1 && odd.text.find("a device") != std::string::npos, "%s", odd.text.c_str());
    CHECK(shell("build/stories -o " + in_folder("no/such/folder")).code == 1, "an impossible -o was taken");
}

// What stands between two texts, the first after `from`; "" if they are not there.
static std::string between(const std::string& text, const std::string& a, const std::string& b,
                           size_t from = 0) {
    size_t begin = text.find(a, from);
    size_t end = begin == std::string::npos ? begin : text.find(b, begin + a.size());
    return end == std::string::npos ? "" : text.substr(begin + a.size(), end - begin - a.size());
}

static std::vector<std::string> words_of(const std::string& text) {
    std::vector<std::string> words(1);
    for (char c : text) {
        if (isalpha((unsigned char)c)) { words.back() += c; }
        else if (!words.back().empty()) { words.push_back(""); }
    }
    return words;
}

static bool has_any(const std::vector<std::string>& words, const std::set<std::string>& wanted) {
    for (const std::string& word : words) { if (wanted.count(word)) { return true; } }
    return false;
}

// Who is who: a story plays among people or among animals, and where all are of one sex, so are the pronouns.
static void check_cast(const std::vector<std::string>& docs) {
    const std::set<std::string> girls = {
        "Mina", "Clara", "Nora", "Ivy", "Tessa", "Ruth", "Hanna", "Poppy", "Amira", "Lotte", "June", "Sanna",
        "Edda", "Wilma", "Mei", "Greta", "Grandma", "Mrs", "Aunt"};
    const std::set<std::string> boys = {
        "Oscar", "Felix", "Jonas", "Theo", "Milo", "Hugo", "Anton", "Karim", "Peter", "Luca", "Emil", "David",
        "Kofi", "Tobias", "Ravi", "Simon", "Grandpa", "Mr", "Ben"};
    const std::set<std::string> she_animals = {"Hazel", "Velvet", "Clover", "Dot", "Willow", "Minnow", "Fern",
                                               "Pebble", "Owl", "Goose", "Hen"};
    const std::set<std::string> he_animals = {"Nib", "Bramble", "Rusty", "Puddle", "Barley", "Skip", "Ash",
                                              "Thimble", "Toad", "Raven", "Beaver"};
    const std::set<std::string> she = {"she", "She", "her", "Her", "hers"};
    const std::set<std::string> he = {"he", "He", "him", "Him", "his", "His"};
    int mixed = 0, wrong = 0, only_she = 0, only_he = 0, animals = 0;
    for (const std::string& doc : docs) {
        std::vector<std::string> words = words_of(doc);
        bool people = has_any(words, girls) || has_any(words, boys);
        bool beasts = has_any(words, she_animals) || has_any(words, he_animals);
        bool female = has_any(words, girls) || has_any(words, she_animals);
        bool male = has_any(words, boys) || has_any(words, he_animals);
        mixed += people == beasts;
        animals += beasts;
        only_she += !male;
        only_he += !female;
        bool bad = (!male && has_any(words, he)) || (!female && has_any(words, she));
        if (bad && wrong++ == 0) { printf("%s\n", doc.c_str()); }
    }
    CHECK(mixed == 0, "%d stories mix people and animals, or name nobody", mixed);
    CHECK(wrong == 0, "%d stories have pronouns of nobody, the first is above", wrong);
    CHECK(only_she > 50 && only_he > 50, "%d stories of girls, %d of boys", only_she, only_he);
    CHECK(animals > 566 && animals < 766, "%d of 2000 stories are about animals, not a third", animals);
}

// Sentences: capitals, articles, quotation marks.
static void check_grammar(const std::vector<std::string>& docs) {
    int wrong = 0;
    for (const std::string& doc : docs) {
        bool bad = !isupper((unsigned char)doc[0]) && doc[0] != '"';
        for (size_t i = 0; i + 3 < doc.size(); i++) {
            bool title = i >= 2 && (doc.compare(i - 2, 2, "Mr") == 0 || doc.compare(i - 2, 2, "rs") == 0);
            bool end = strchr(".!?", doc[i]) && doc[i + 1] == ' ' && !title;
            if (end && doc[i + 2] != '"') { bad |= !isupper((unsigned char)doc[i + 2]); }
            bool an = doc.compare(i, 4, " an ") == 0 || doc.compare(i, 4, "\nAn ") == 0;
            if (an && i + 4 < doc.size()) { bad |= !strchr("aeiouAEIOU", doc[i + 4]); }
        }
        for (size_t from = 0; from < doc.size();) {         // a paragraph ends as a sentence does
            size_t to = std::min(doc.find('\n', from), doc.size());
            std::string paragraph = doc.substr(from, to - from);
            bad |= std::count(paragraph.begin(), paragraph.end(), '"') % 2 != 0;
            bad |= !paragraph.empty() && !strchr(".!?\"", paragraph.back());
            from = to + 1;
        }
        if (bad && wrong++ == 0) { printf("%s\n", doc.c_str()); }
    }
    CHECK(wrong == 0, "%d stories break a rule of grammar, the first is above", wrong);
}

// What follows from what: sums, ways, things that are found where they were put.
static void check_logic(const std::vector<std::string>& docs) {
    const std::vector<std::string> numbers = {
        "no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
        "twelve", "thirteen", "fourteen", "fifteen", "sixteen"};
    auto number = [&](std::string word) {
        word[0] = (char)tolower((unsigned char)word[0]);
        return (int)(std::find(numbers.begin(), numbers.end(), word) - numbers.begin());
    };
    int lost = 0, sums = 0, ways = 0, trades = 0, dishes = 0, wrong = 0;
    for (const std::string& doc : docs) {
        bool good = true;
        std::string place = between(doc, "so I put it ", "!\"");
        std::string left = between(doc, "Now there were ", " left");
        if (!place.empty()) {
            lost++;
            good &= doc.find("look " + place + ", and there") != std::string::npos;
            good &= doc.find(place) < doc.find("so I put it ");         // where it was put, first of all
            std::string chore = between(doc, "I went to ", ",\"");
            good &= doc.find("and went to " + chore + ".") != std::string::npos;
        }
        if (!left.empty()) {
            sums++;
            std::string after = doc.substr(doc.find("Now there were ") + 15);
            std::string second = between(after, " gave ", " of the ");
            second = second.substr(second.find(' ') + 1);               // "her two"
            std::string last = between(after, "Only ", "?");
            std::string all = between(after, "You told me there were ", "!");
            if (all.empty()) { all = between(after, "There should be ", "!"); }
            std::string told = between(after, "\"I gave ", " to ");
            good &= number(left) == number(all) - number(told);
            good &= number(last) == number(left) - number(second);
            good &= number(last) < 17 && number(all) < 17 && number(told) >= 1 && number(second) >= 1;
        }
        std::string first_past = between(doc, "They walked past ", ". ");
        std::string last_past = between(doc, "they passed ", ",");
        if (!first_past.empty()) {
            ways++;
            size_t asked = doc.find("What did we pass last");
            good &= doc.find("we must look for " + last_past + " first", asked) != std::string::npos;
            good &= between(doc, "\"Now only ", " is ", asked) == first_past;
            good &= doc.find("And when they had passed " + first_past, asked) != std::string::npos;
        }
        std::string swap = between(doc, "\"I gave my ", " to ");
        if (!swap.empty()) {
            trades++;
            std::string got = between(doc, "\"I gave my " + swap + " to ", ",");
            got = got.substr(got.find(' ', got.find(" for a") + 5) + 1);     // "Milo for an old bell"
            good &= doc.find(", and the " + got + " to ") != std::string::npos;
            good &= between(doc, " had was ", ".\n").find(swap) != std::string::npos;
        }
        std::string used = between(doc, "this time they used ", ".");
        if (!used.empty()) {
            dishes++;
            std::string missing = between(doc, "! I forgot the ", "!");
            good &= doc.find("\"The " + missing + "! I forgot the") != std::string::npos;
            good &= !missing.empty() && used.find(", ") != std::string::npos;
            good &= used.size() > missing.size() && used.substr(used.size() - missing.size()) == missing;
            std::string had = used.substr(0, used.find(" and ")), with_and = had;
            with_and.replace(had.find(", "), 2, " and ");               // "flour, milk and eggs" without eggs
            good &= doc.find("\"You had " + with_and) != std::string::npos ||
                    doc.find("There is " + had.substr(0, had.find(", ")) + " in it") != std::string::npos;
            good &= doc.find(" forgot the " + missing) != std::string::npos ||
                    doc.find(" forgot about the " + missing) != std::string::npos;
        }
        if (!good && wrong++ == 0) { printf("%s\n", doc.c_str()); }
    }
    CHECK(wrong == 0, "%d stories contradict themselves, the first is above", wrong);
    CHECK(lost > 100 && sums > 100 && ways > 100 && trades > 100 && dishes > 100,
          "%d lost, %d sums, %d ways, %d trades, %d dishes: too few", lost, sums, ways, trades, dishes);
}

// Every plot is told about as often, a quarter of the stories has a second one.
static void check_plots(const std::vector<std::string>& docs) {
    const char* signs[] = {
        "so I put it ", " like to do?\"", "What did I do wrong", "heard a ", "rained",
        "never play with you again|not my friend any more", "a noise ", "birthday", " race ", " seed.",
        "belonged to ", "walked past ", "Now there were ", "no running near", "do not stop on the way",
        "On Wednesday"};
    int told = 0, again = 0;
    for (const char* sign : signs) {
        int count = 0;
        for (const std::string& doc : docs) {
            bool found = false;
            std::string all = sign;
            for (size_t from = 0, to; from <= all.size(); from = to + 1) {
                to = std::min(all.find('|', from), all.size());
                found |= doc.find(all.substr(from, to - from)) != std::string::npos;
            }
            count += found;
        }
        CHECK(count > 100 && count < 260, "%d of 2000 stories have '%s', expected 156", count, sign);
        told += count;
    }
    for (const std::string& doc : docs) {
        for (const char* more : {"not the end.", "more to tell", "Some days went by",
                                 "something else happened", "another adventure"}) {
            again += doc.find(more) != std::string::npos;
        }
    }
    CHECK(again > 400 && again < 600, "%d of 2000 stories have a second part, expected 500", again);
    CHECK(told > 2300 && told < 2700, "%d plots in 2000 stories, expected 2500", told);
}

// The text is a pure function of the seed on every machine: quickstart's numbers rest on it. Who means to
// change the stories changes this number, too.
static void check_text(const std::string& text) {
    uint64_t hash = 14695981039346656037ull;            // FNV-1a
    for (char c : text) { hash = (hash ^ (unsigned char)c) * 1099511628211ull; }
    CHECK(hash == 0x01bebcadfb3b9f20ull, "2000 stories of seed 1 have the hash 0x%016llx",
          (unsigned long long)hash);
}

static void test_story_text() {
    std::string text = shell("build/stories --seed 1 -n 2000").text;
    std::vector<std::string> docs = documents(text);
    check_cast(docs);
    check_grammar(docs);
    check_logic(docs);
    check_plots(docs);
    check_text(text);
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
    std::string command = "timeout 60 build/bigram -j " + in_folder("bi_val.bin") + " -i ";
    out = shell("(" + command + in_folder("bi_train.bin") + " > /dev/full)");
    CHECK(out.code == 1 && out.text.find("standard output") != std::string::npos, "%s", out.text.c_str());
    shell("mkfifo " + in_folder("pipe.bin"));           // nobody writes to it: must not be waited for
    out = shell(command + in_folder("pipe.bin"));
    CHECK(out.code == 1 && out.text.find("regular file") != std::string::npos, "%d %s", out.code,
          out.text.c_str());
}

// The sum of all tokens as the loader sees them, one window of T = 1 after the other.
static unsigned long sum_of_loader(const std::string& path, int64_t tokens) {
    DataLoader loader;
    dataloader_init(&loader, path.c_str(), 1, 1, false, 0, 65536);
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
    // the name of a text may hold whatever a file name may
    std::string odd = in_folder("it's a; touch evil; $HOME `touch evil`\"x.txt");
    FILE* f = fopen_check(odd.c_str(), "w");
    fclose(f);
    setenv("ODD", odd.c_str(), 1);
    // $ is make's: it is written twice
    out = shell("make -s tinyshakespeare TEXT=\"$(printf %s \"$ODD\" | sed 's/\\$/$$/g')\"");
    CHECK(out.text.find(odd + "' is not tinyshakespeare") != std::string::npos, "%s", out.text.c_str());
    CHECK(access("evil", F_OK) != 0, "the name was run");
    unlink("evil");
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
    dataloader_init(&loader, all.c_str(), 16, 1024, false, 0, 50257);
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
    TEST("stories: what they say") { test_story_text(); }
    TEST("bigram") { test_bigram(); }
    TEST("formats") { test_formats(); }
    TEST("tinyshakespeare") { test_tinyshakespeare(); }
    shell("rm -r " + folder);
    return test_summary();
}
