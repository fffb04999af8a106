/*
Errors and checked files. Host only.

Every error a user can cause ends in die(): one sentence on stderr that names the value, what is allowed and,
after "\nhint: ", what to do; exit code 1. Files that matter are written beside their final name, synced and
renamed, so that a kill or a full disk never leaves half a file under the good name.

    FILE* f = fopen_check("in.bin", "rb");
    fread_check(header, sizeof(int), 256, f, "in.bin");
    AtomicFile out = atomic_open("model.bin");
    atomic_write(&out, data, bytes);
    atomic_commit(&out);                       // fsync, rename, fsync of the folder
*/
#ifndef LLMC_CHECK_H
#define LLMC_CHECK_H

#include <errno.h>      // gives: errno
#include <fcntl.h>      // gives: open, O_DIRECTORY
#include <stdarg.h>     // gives: va_list
#include <stdint.h>     // gives: int64_t
#include <stdio.h>      // gives: FILE, fprintf
#include <stdlib.h>     // gives: exit, malloc
#include <string.h>     // gives: strerror
#include <sys/stat.h>   // gives: stat, mkdir
#include <unistd.h>     // gives: fsync, unlink

#include <string>       // gives: std::string

// Runs before die() exits: the trainer uses it to take other ranks down. Set once, at start.
static void (*die_hook)() = nullptr;

__attribute__((noreturn, format(printf, 1, 2))) static inline void die(const char* fmt, ...) {
    fflush(stdout);                             // what was printed before the error comes before it
    va_list args;
    va_start(args, fmt);
    fprintf(stderr, "error: ");
    vfprintf(stderr, fmt, args);
    fprintf(stderr, "\n");
    va_end(args);
    if (die_hook) { die_hook(); }
    exit(EXIT_FAILURE);
}

__attribute__((format(printf, 1, 2))) static inline std::string format(const char* fmt, ...) {
    va_list args, again;
    va_start(args, fmt);
    va_copy(again, args);
    int n = vsnprintf(nullptr, 0, fmt, args);
    std::string s((size_t)n, '\0');
    vsnprintf(&s[0], (size_t)n + 1, fmt, again);
    va_end(args);
    va_end(again);
    return s;
}

static inline FILE* fopen_check(const char* path, const char* mode) {
    FILE* f = fopen(path, mode);
    if (!f) { die("cannot open '%s': %s", path, strerror(errno)); }
    return f;
}

static inline void fread_check(void* ptr, size_t size, size_t count, FILE* f, const char* path) {
    size_t got = fread(ptr, size, count, f);
    if (got == count) { return; }
    if (ferror(f)) { die("cannot read '%s': %s", path, strerror(errno)); }
    die("'%s' is truncated: wanted %zu bytes, found %zu", path, size * count, size * got);
}

static inline int64_t file_size(const char* path) {     // bytes; -1: no such file
    struct stat st;
    return stat(path, &st) == 0 && S_ISREG(st.st_mode) ? (int64_t)st.st_size : -1;
}

static inline void mkdir_check(const char* path) {       // like mkdir -p
    std::string s(path);
    for (size_t i = 1; i <= s.size(); i++) {
        if (i != s.size() && s[i] != '/') { continue; }
        std::string part = s.substr(0, i);
        if (mkdir(part.c_str(), 0777) != 0 && errno != EEXIST) {
            die("cannot create the folder '%s': %s", part.c_str(), strerror(errno));
        }
    }
    struct stat st;
    if (stat(path, &st) != 0 || !S_ISDIR(st.st_mode)) { die("'%s' is not a folder", path); }
    if (access(path, W_OK) != 0) { die("the folder '%s' is not writable: %s", path, strerror(errno)); }
}

// ---- a file that appears whole or not at all ----
struct AtomicFile { FILE* f; std::string path, temp; };

static inline void atomic_fail(AtomicFile* a, const char* what) {
    int e = errno;
    if (a->f) { fclose(a->f); }
    unlink(a->temp.c_str());
    die("cannot %s '%s': %s\nhint: nothing was changed under that name; free some space or choose another -o",
        what, a->path.c_str(), strerror(e));
}

static inline AtomicFile atomic_open(const std::string& path) {
    AtomicFile a = {nullptr, path, path + ".part"};
    a.f = fopen(a.temp.c_str(), "wb");
    if (!a.f) { die("cannot create '%s': %s", path.c_str(), strerror(errno)); }
    return a;
}

static inline void atomic_write(AtomicFile* a, const void* data, size_t bytes) {
    if (bytes && fwrite(data, 1, bytes, a->f) != bytes) { atomic_fail(a, "write"); }
}

static inline void atomic_commit(AtomicFile* a) {
    if (fflush(a->f) != 0 || fsync(fileno(a->f)) != 0) { atomic_fail(a, "write"); }
    FILE* f = a->f;
    a->f = nullptr;
    if (fclose(f) != 0) { atomic_fail(a, "close"); }
    if (rename(a->temp.c_str(), a->path.c_str()) != 0) { atomic_fail(a, "rename into"); }
    size_t slash = a->path.rfind('/');
    int dir =
        open(slash == std::string::npos ? "." : a->path.substr(0, slash + 1).c_str(), O_RDONLY | O_DIRECTORY);
    if (dir >= 0) { fsync(dir); close(dir); }    // the new name itself survives a power cut
}

#endif  // LLMC_CHECK_H
