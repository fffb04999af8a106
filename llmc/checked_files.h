/*
Files and folders, checked: where a call fails, the program dies with the path and the reason. Host only.

    FILE* f = fopen_check("in.bin", "rb");
    fread_check(header, sizeof(int), 256, f, "in.bin");
    for (const std::string& name : folder_names("runs")) { ... }    // sorted; none if there is no such folder
    stdout_check();                            // at the end of main: an error if some output was lost

Only ENOENT and its like mean that something is not there. Where that is not known, these functions die.
*/
#pragma once

#include "errors.h"     // gives: die, shown

// Calls that fail when a disk is full or broken. Tests replace them with functions that fail.
static struct {
    int (*fflush)(FILE*);
    int (*fsync)(int);
    int (*rename)(const char*, const char*);
    size_t (*fwrite)(const void*, size_t, size_t, FILE*);
    int (*fclose)(FILE*);
    struct dirent* (*readdir)(DIR*);
} file_layer = {fflush, fsync, rename, fwrite, fclose, readdir};

// To be called before main returns: the last output may not fit on the disk, and printf does not report that.
static inline void stdout_check() {
    errno = 0;
    bool failed = ferror(stdout) != 0;
    if (file_layer.fflush(stdout) != 0 || failed) {
        die("cannot write to standard output: %s", errno ? strerror(errno) : "an earlier write failed");
    }
}

// After a call on a path has failed: does errno say that nothing is there?
static inline bool is_absent() { return errno == ENOENT || errno == ENOTDIR || errno == ENAMETOOLONG; }

// Returns if nothing is there. Dies if that is not known, because what counts as missing is made anew.
static inline void absent_or_die(const char* call, const std::string& path) {
    if (is_absent()) { return; }
    die("cannot %s '%s': %s\nhint: something may be there: check the disk, and the permissions of its "
        "folders", call, shown(path).c_str(), strerror(errno));
}

// Is anything there?
static inline bool path_stat(const std::string& path, struct stat* st,
                             int (*call)(const char*, struct stat*) = stat) {
    if (call(path.c_str(), st) == 0) { return true; }
    absent_or_die("look at", path);
    return false;
}

// "" for a regular file, else what it is instead.
static inline const char* not_regular(mode_t mode) {
    return S_ISREG(mode) ? "" : S_ISDIR(mode) ? "a folder" : S_ISFIFO(mode) ? "a pipe"
         : S_ISLNK(mode) ? "a symbolic link" : S_ISSOCK(mode) ? "a socket" : "a device";
}

// An output must be new or a regular file. Opening a device might overwrite it, a pipe may block for ever,
// and a link may lead anywhere.
static inline void output_check(const char* path) {
    struct stat st;
    if (!path_stat(path, &st, lstat) || S_ISREG(st.st_mode)) { return; }
    die("cannot write '%s': it is %s, and an output must be a regular file or new\nhint: choose another name",
        shown(path).c_str(), not_regular(st.st_mode));
}

// An input must be a regular file, or a link to one: opening a pipe without a writer blocks for ever.
static inline void input_check(const char* path) {
    struct stat st;
    if (stat(path, &st) != 0 || S_ISREG(st.st_mode)) { return; }
    die("cannot read '%s': it is %s, not a regular file", shown(path).c_str(), not_regular(st.st_mode));
}

static inline FILE* fopen_check(const char* path, const char* mode) {
    if (mode[0] == 'r') { input_check(path); } else { output_check(path); }
    FILE* f = fopen(path, mode);
    if (!f) { die("cannot open '%s': %s", shown(path).c_str(), strerror(errno)); }
    return f;
}

static inline void fread_check(void* ptr, size_t size, size_t count, FILE* f, const char* path) {
    size_t got = fread(ptr, size, count, f);
    if (got == count) { return; }
    if (ferror(f)) { die("cannot read '%s': %s", shown(path).c_str(), strerror(errno)); }
    die("'%s' is truncated: wanted %zu bytes, found %zu", shown(path).c_str(), size * count, size * got);
}

static inline int64_t file_size(const char* path) {     // bytes; -1: no such file
    struct stat st;
    return path_stat(path, &st) && S_ISREG(st.st_mode) ? (int64_t)st.st_size : -1;
}

// The file's text, or its first `most` bytes.
static inline std::string file_text(const std::string& path, size_t most = SIZE_MAX) {
    FILE* f = fopen_check(path.c_str(), "rb");
    std::string text(std::min((size_t)std::max<int64_t>(0, file_size(path.c_str())), most), '\0');
    fread_check(&text[0], 1, text.size(), f, path.c_str());
    fclose(f);
    return text;
}

// Lets this process open as many files as it may. Returns their number.
static inline uint64_t allow_most_files() {
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    return files.rlim_max;
}

// Reads `bytes` bytes from `offset` on, fewer where the file ends. Returns their number; -1: see errno.
static inline ssize_t read_at(int fd, void* to, size_t bytes, int64_t offset) {
    size_t got = 0;
    while (got < bytes) {
        const ssize_t n = pread(fd, (char*)to + got, bytes - got, (off_t)(offset + (int64_t)got));
        if (n < 0 && errno == EINTR) { continue; }
        if (n < 0) { return -1; }
        if (n == 0) { break; }
        got += (size_t)n;
    }
    return (ssize_t)got;
}

static inline void mkdir_check(const char* path) {       // like mkdir -p
    std::string s(path);
    for (size_t i = 1; i <= s.size(); i++) {
        if (i != s.size() && s[i] != '/') { continue; }
        std::string part = s.substr(0, i);
        if (mkdir(part.c_str(), 0777) != 0 && errno != EEXIST) {
            die("cannot create the folder '%s': %s", shown(part).c_str(), strerror(errno));
        }
    }
    struct stat st;
    if (stat(path, &st) != 0 || !S_ISDIR(st.st_mode)) { die("'%s' is not a folder", shown(path).c_str()); }
    if (access(path, W_OK) != 0) {
        die("the folder '%s' is not writable: %s", shown(path).c_str(), strerror(errno));
    }
}

// The next entry of a folder; null: that was the last one.
static inline struct dirent* folder_next(DIR* dir, const std::string& folder) {
    errno = 0;                                  // readdir returns null for an error, too
    struct dirent* entry = file_layer.readdir(dir);
    if (!entry && errno != 0) { absent_or_die("list the folder", folder); }
    return entry;
}

// The names of all files in a folder, sorted. None if there is no such folder.
static inline std::vector<std::string> folder_names(const std::string& folder) {
    std::vector<std::string> names;
    DIR* dir = opendir(folder.c_str());
    if (!dir) { absent_or_die("list the folder", folder); return names; }
    while (struct dirent* entry = folder_next(dir, folder)) { names.push_back(entry->d_name); }
    closedir(dir);
    std::sort(names.begin(), names.end());
    return names;
}
