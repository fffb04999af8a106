/*
Runs a function in a child process, to test what ends the process: errors, --help, kills. Host only.

    Child c = run_child([] { flags_parse(...); });      // c.code, c.out, c.err
    std::string left = read_text("main.log");
    check_dies("-b 0", [] { ... }, {"-b", "1 to 65536"});
*/
#ifndef DEV_TEST_CHILD_H
#define DEV_TEST_CHILD_H

#include <stdio.h>          // gives: tmpfile, fread
#include <sys/wait.h>       // gives: waitpid
#include <unistd.h>         // gives: fork, dup2

#include <algorithm>        // gives: std::count
#include <functional>       // gives: std::function
#include <string>           // gives: std::string
#include <vector>           // gives: std::vector

#include "test.h"           // gives: CHECK

static inline std::string read_text(const std::string& path) {
    std::string text((size_t)std::max<int64_t>(file_size(path.c_str()), 0), '\0');
    FILE* f = fopen_check(path.c_str(), "rb");
    fread_check(&text[0], 1, text.size(), f, path.c_str());
    fclose(f);
    return text;
}

struct Child { int code; std::string out, err; };   // code: exit status, or -signal

static inline Child run_child(const std::function<void()>& f) {
    FILE* files[2] = {tmpfile(), tmpfile()};        // stdout and stderr of the child
    fflush(stdout);
    fflush(stderr);
    pid_t pid = fork();
    if (pid == 0) {
        dup2(fileno(files[0]), STDOUT_FILENO);
        dup2(fileno(files[1]), STDERR_FILENO);
        f();
        fflush(stdout);
        _exit(0);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    Child c = {WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status), "", ""};
    for (int k = 0; k < 2; k++) {
        rewind(files[k]);
        for (int ch; (ch = fgetc(files[k])) != EOF;) { (k == 0 ? c.out : c.err) += (char)ch; }
        fclose(files[k]);
    }
    return c;
}

// f must end with exit code 1 and one to three lines on stderr that hold all these words.
static inline void check_dies(const std::string& what, const std::function<void()>& f,
                              const std::vector<std::string>& words) {
    Child c = run_child(f);
    long lines = std::count(c.err.begin(), c.err.end(), '\n');
    CHECK(c.code == 1, "%s: ended with %d, not exit code 1", what.c_str(), c.code);
    CHECK(lines >= 1 && lines <= 3, "%s: %ld lines on stderr:\n%s", what.c_str(), lines, c.err.c_str());
    for (const std::string& word : words) {
        CHECK(c.err.find(word) != std::string::npos, "%s: no '%s' in:\n%s", what.c_str(), word.c_str(),
              c.err.c_str());
    }
}

#endif  // DEV_TEST_CHILD_H
