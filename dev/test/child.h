/*
What the unit tests share: a folder of their own, whole files as texts, a function in a child process, to test
what ends a process (errors, --help, kills), and a disk that refuses. Host only.

    folder_begin("host");                                   // in main; it ends with `return folder_end();`
    write_text(in_folder("a"), "text");
    CHECK_TEXT(read_text(in_folder("a")), "text");
    CHECK_HOLDS(read_text(in_folder("a")), "ex");
    CHECK_TEXT(joined(names_in(folder)), "a");
    CHECK_IS(file_size(in_folder("a").c_str()), 4);
    Child c = run_child([] { flags_parse(...); });          // c.code, c.out, c.err
    check_dies("-b 0", [] { ... }, {"-b", "1 to 65536"});
    check_lives("-b 1", [] { ... }, "what it prints");
    check_dies("a full disk", [] { refuse_call(WRITE, 2); ... }, {"No space"});      // at the second fwrite
*/
#pragma once

#include <dirent.h>         // gives: opendir
#include <stdio.h>          // gives: tmpfile, fgetc
#include <stdlib.h>         // gives: mkdtemp, system
#include <sys/resource.h>   // gives: setrlimit
#include <sys/wait.h>       // gives: waitpid
#include <unistd.h>         // gives: fork, dup2

#include <algorithm>        // gives: std::sort
#include <functional>       // gives: std::function
#include <string>           // gives: std::string
#include <vector>           // gives: std::vector

#include "llmc/checked_files.h" // gives: fopen_check, file_size, allow_most_files
#include "test.h"           // gives: CHECK

// ---- texts and files ----

// A failure shows both texts whole, which a CHECK's sentence would have to do each time.
#define CHECK_TEXT(got, expected) check_text(__FILE__, __LINE__, #got, got, expected)
static inline void check_text(const char* file, int line, const char* what, const std::string& got,
                              const std::string& expected) {
    if (got == expected) { test_passed++; return; }
    test_failed++;
    printf("FAIL %s:%d: %s:\n%s\nexpected:\n%s\n", file, line, what, got.c_str(), expected.c_str());
    fflush(stdout);
}

// Of whole numbers.
#define CHECK_IS(got, expected) \
    check_text(__FILE__, __LINE__, #got, std::to_string(got), std::to_string(expected))

static inline bool holds(const std::string& text, const std::string& word) {
    return text.find(word) != std::string::npos;
}

#define CHECK_HOLDS(text, word) check_holds(__FILE__, __LINE__, #text, text, word)
static inline void check_holds(const char* file, int line, const char* what, const std::string& text,
                               const std::string& word) {
    if (holds(text, word)) { test_passed++; return; }
    test_failed++;
    printf("FAIL %s:%d: %s: no '%s' in:\n%s\n", file, line, what, word.c_str(), text.c_str());
    fflush(stdout);
}

static inline std::string read_stream(FILE* f) {           // to its end, then closed; "" if there is none
    std::string text;
    for (int c; f && (c = fgetc(f)) != EOF;) { text += (char)c; }
    if (f) { fclose(f); }
    return text;
}
static inline std::string read_text(const std::string& path) {
    return read_stream(fopen(path.c_str(), "rb"));
}

// In place, as damage comes.
static inline void write_text(const std::string& path, const std::string& text) {
    FILE* f = fopen_check(path.c_str(), "wb");
    if (fwrite(text.data(), 1, text.size(), f) != text.size() || fclose(f) != 0) {
        die("cannot write '%s'", path.c_str());
    }
}

// The bytes of a shard of tokens (llmc/data/dataloader.h). count: what its header says, if it is not right.
static inline std::string shard_text(const std::vector<uint16_t>& tokens, int tokenizer = 0,
                                     long long count = -1) {
    const int32_t header[256] = {20240520, 1, (int32_t)(count == -1 ? (long long)tokens.size() : count),
                                 tokenizer};
    return std::string((const char*)header, sizeof(header)) +
           std::string((const char*)tokens.data(), 2 * tokens.size());
}

// The same with tokens of 32 bits.
static inline std::string wide_shard_text(const std::vector<uint32_t>& tokens) {
    const int32_t header[256] = {20240801, 7, (int32_t)tokens.size()};
    return std::string((const char*)header, sizeof(header)) +
           std::string((const char*)tokens.data(), 4 * tokens.size());
}

static inline std::vector<std::string> names_in(const std::string& path) {      // sorted, without hidden ones
    std::vector<std::string> names;
    DIR* dir = opendir(path.c_str());
    while (struct dirent* entry = dir ? readdir(dir) : nullptr) {
        if (entry->d_name[0] != '.') { names.push_back(entry->d_name); }
    }
    if (dir) { closedir(dir); }
    std::sort(names.begin(), names.end());
    return names;
}

static inline std::string joined(const std::vector<std::string>& words) {
    std::string all;
    for (const std::string& word : words) { all += (all.empty() ? "" : " ") + word; }
    return all;
}

template <class Number> static inline std::string numbers(const std::vector<Number>& all) {
    std::vector<std::string> words;
    for (Number n : all) { words.push_back(std::to_string(n)); }
    return joined(words);
}

static std::string folder;          // of this run, removed at the end

static inline std::string in_folder(const std::string& name) { return folder + "/" + name; }

static inline void folder_begin(const char* name) {
    const char* temp = getenv("TMPDIR");
    folder = std::string(temp ? temp : "/tmp") + "/test_" + name + ".XXXXXX";
    if (!mkdtemp(&folder[0])) { die("cannot make a folder '%s': %s", folder.c_str(), strerror(errno)); }
}

static inline int folder_end() {    // main's last line
    if (system(("rm -rf '" + folder + "'").c_str()) != 0) { printf("%s stays\n", folder.c_str()); }
    return test_summary();
}

// ---- child processes ----

static inline void limit_to(int resource, rlim_t most) {        // of this process: RLIMIT_NOFILE, ...
    const struct rlimit limit = {most, most};
    if (setrlimit(resource, &limit) != 0) { _exit(99); }
}

static inline void open_no_more() {         // until the process dies: sanitizers open files at the end
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = 3;
    setrlimit(RLIMIT_NOFILE, &files);
    die_hook = [] { allow_most_files(); };
}

struct Child { int code; std::string out, err; };   // code: exit status, or -signal

static inline int exit_code(int status) {
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

// LeakSanitizer asks this when a process ends. A child that dies leaves its work where it stands: what only a
// variable named that the compiler needs no more would count as lost.
static bool is_child = false;
extern "C" int __lsan_is_turned_off() { return is_child; }

static inline Child run_child(const std::function<void()>& f) {
    FILE* files[2] = {tmpfile(), tmpfile()};        // stdout and stderr of the child
    fflush(stdout);
    fflush(stderr);
    pid_t pid = fork();
    if (pid == 0) {
        is_child = true;
        dup2(fileno(files[0]), STDOUT_FILENO);
        dup2(fileno(files[1]), STDERR_FILENO);
        f();
        fflush(stdout);
        _exit(0);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    for (FILE* file : files) { rewind(file); }
    return {exit_code(status), read_stream(files[0]), read_stream(files[1])};
}

// ---- a disk that refuses ----

enum { WRITE, FLUSH, SYNC, RENAME, CLOSE, OPERATIONS, LIST };       // LIST: to write a file can do without
static struct { int operation, countdown, error; } refusal;

static inline bool refused(int operation) {
    if (operation != refusal.operation || refusal.countdown == 0 || --refusal.countdown > 0) { return false; }
    errno = refusal.error;
    return true;
}

// The k-th of these calls of a file fails. In check_dies and run_child, of that process alone.
static inline void refuse_call(int operation, int k, int error = ENOSPC) {
    refusal = {operation, k, error};
    file_layer.fwrite = [](const void* data, size_t size, size_t count, FILE* f) {
        return fwrite(data, size, refused(WRITE) ? count / 2 : count, f);
    };
    file_layer.fflush = [](FILE* f) { return refused(FLUSH) ? EOF : fflush(f); };
    file_layer.fsync = [](int) { return refused(SYNC) ? -1 : 0; };
    file_layer.rename = [](const char* a, const char* b) { return refused(RENAME) ? -1 : rename(a, b); };
    file_layer.fclose = [](FILE* f) {
        const bool no = refused(CLOSE);
        return (fclose(f) != 0 || no) ? (errno = no ? refusal.error : errno, EOF) : 0;
    };
    file_layer.readdir = [](DIR* dir) { return refused(LIST) ? nullptr : readdir(dir); };
}

// ---- ends ----

// f must end with exit code 1 and one to three lines on stderr, beside those of a list, which begin with a
// blank; all these words must be in them. What would wait for ever ends by SIGALRM.
static inline void check_dies(const std::string& what, const std::function<void()>& f,
                              const std::vector<std::string>& words) {
    Child c = run_child([&] { alarm(100); f(); });
    long lines = 0;
    for (size_t at = 0; (at = c.err.find('\n', at)) != std::string::npos; ) { lines += c.err[++at] != ' '; }
    CHECK(c.code == 1, "%s: ended with %d, not exit code 1", what.c_str(), c.code);
    CHECK(lines >= 1 && lines <= 3, "%s: %ld lines on stderr:\n%s", what.c_str(), lines, c.err.c_str());
    for (const std::string& word : words) {
        CHECK(holds(c.err, word), "%s: no '%s' in:\n%s", what.c_str(), word.c_str(), c.err.c_str());
    }
}

// f must end well, with this on stdout and nothing on stderr.
static inline void check_lives(const std::string& what, const std::function<void()>& f,
                               const std::string& out = "") {
    Child c = run_child([&] { alarm(100); f(); });
    CHECK(c.code == 0 && c.out == out && c.err.empty(), "%s: ended with %d, '%s', '%s'", what.c_str(), c.code,
          c.out.c_str(), c.err.c_str());
}
