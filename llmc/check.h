/*
Errors and checked files. Host only.

Every error a user can cause ends in die(). It prints one sentence on stderr with the value and what is
allowed, then "hint: " and what to do, and exits with code 1. Files that matter are written under a temporary
name, synced and renamed, so that a kill or a full disk never leaves half a file under the final name.

    FILE* f = fopen_check("in.bin", "rb");
    fread_check(header, sizeof(int), 256, f, "in.bin");
    AtomicFile out = atomic_open("model.bin");
    atomic_write(&out, data, bytes);
    atomic_commit(&out);                       // fsync, rename, fsync of the folder
    atomic_file("DONE", text);                 // the same for a short text
    stdout_check();                            // at the end of main: an error if some output was lost

A program that includes this header also ends in die() when memory runs out or a file hits ulimit -f.
*/
#pragma once

// What headers want of the C library, POSIX and the standard library. Those that include this one do not name
// these again.
#include <assert.h>     // gives: assert
#include <ctype.h>      // gives: isalnum, isdigit, tolower
#include <dirent.h>     // gives: opendir, readdir
#include <errno.h>      // gives: errno
#include <fcntl.h>      // gives: open, fcntl
#include <limits.h>     // gives: INT_MIN, INT_MAX, PATH_MAX
#include <math.h>       // gives: isfinite, exp, INFINITY
#include <signal.h>     // gives: sigaction, raise
#include <stdarg.h>     // gives: va_list
#include <stddef.h>     // gives: size_t
#include <stdint.h>     // gives: int64_t
#include <stdio.h>      // gives: FILE, fprintf
#include <stdlib.h>     // gives: exit, getenv
#include <string.h>     // gives: strerror, memcpy
#include <sys/file.h>   // gives: flock
#include <sys/ioctl.h>  // gives: ioctl, TIOCGWINSZ
#include <sys/resource.h>   // gives: setrlimit
#include <sys/stat.h>   // gives: stat, mkdir
#include <unistd.h>     // gives: fsync, pread, unlink, isatty

#include <algorithm>    // gives: std::sort, std::min
#include <atomic>       // gives: std::atomic
#include <chrono>       // gives: std::chrono::seconds
#include <fstream>      // gives: std::ifstream
#include <functional>   // gives: std::function
#include <map>          // gives: std::map, std::multimap
#include <mutex>        // gives: std::mutex, std::timed_mutex
#include <new>          // gives: std::set_new_handler
#include <set>          // gives: std::set
#include <string>       // gives: std::string
#include <thread>       // gives: std::thread
#include <utility>      // gives: std::pair, std::swap
#include <vector>       // gives: std::vector

// Calls that fail when a disk is full or broken. Tests replace them with functions that fail.
static struct {
    int (*fflush)(FILE*);
    int (*fsync)(int);
    int (*rename)(const char*, const char*);
    size_t (*fwrite)(const void*, size_t, size_t, FILE*);
    int (*fclose)(FILE*);
    struct dirent* (*readdir)(DIR*);
} file_layer = {fflush, fsync, rename, fwrite, fclose, readdir};

// ---- errors ----

static inline std::string vformat(const char* fmt, va_list args) {
    va_list again;
    va_copy(again, args);
    std::string s((size_t)vsnprintf(nullptr, 0, fmt, args), '\0');
    vsnprintf(&s[0], s.size() + 1, fmt, again);
    va_end(again);
    return s;
}

__attribute__((format(printf, 1, 2))) static inline std::string format(const char* fmt, ...) {
    va_list args;
    va_start(args, fmt);
    const std::string s = vformat(fmt, args);
    va_end(args);
    return s;
}

// The code point at s[0], its bytes in *width. If no well-formed UTF-8 sequence begins there: -1 and width 1.
// len >= 1.
static inline int32_t utf8_decode(const uint8_t* s, size_t len, size_t* width) {
    uint32_t lead = s[0];
    *width = 1;
    if (lead < 0x80) { return (int32_t)lead; }
    size_t n = lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
    if (n == 0 || n > len) { return -1; }
    uint32_t cp = lead & (0x7Fu >> n);
    for (size_t i = 1; i < n; i++) {
        if ((s[i] & 0xC0) != 0x80) { return -1; }
        cp = cp << 6 | (s[i] & 0x3Fu);
    }
    bool overlong = (n == 3 && cp < 0x800) || (n == 4 && cp < 0x10000);
    if (overlong || (cp >= 0xD800 && cp < 0xE000) || cp > 0x10FFFF) { return -1; }
    *width = n;
    return (int32_t)cp;
}

// Escapes control characters (C0, DEL, C1) in a path or another text from outside, as \n, \x1b and so on:
// printed raw, they could move the cursor, colour the terminal or forge lines. kept: those that may stay.
static inline std::string shown(const std::string& text, const std::string& kept = "") {
    std::string out;
    for (size_t i = 0, width; i < text.size(); i += width) {
        const int32_t c = utf8_decode((const uint8_t*)&text[i], text.size() - i, &width);
        const bool is_control = (c >= 0 && c < 0x20) || (c >= 0x7F && c < 0xA0);
        if (!is_control || kept.find(text[i]) != std::string::npos) { out += text.substr(i, width); }
        else if (c == '\n') { out += "\\n"; }
        else { out += format(c < 0x80 ? "\\x%02x" : "\\u%04x", (unsigned)c); }
    }
    return out;
}

// The same for a message: only "\nhint: " begins a new line.
static inline std::string shown_message(const std::string& text) {
    const std::string hint = "\nhint: ";
    const size_t at = text.rfind(hint);
    const std::string line = shown(text.substr(0, at));
    return at == std::string::npos ? line : line + hint + shown(text.substr(at + hint.size()));
}

// Prints a model's or a user's text on stdout. A pipe or a file gets its bytes; a terminal gets newlines and
// tabs, and other control characters escaped.
static inline void print_text(const std::string& text) {
    const std::string out = isatty(STDOUT_FILENO) ? shown(text, "\n\t") : text;
    fwrite(out.data(), 1, out.size(), stdout);
}

// The width of the terminal that stdout is; `otherwise` if it is none.
static inline size_t terminal_columns(size_t otherwise) {
    struct winsize size = {};
    const bool known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
    return known ? size.ws_col : otherwise;
}

// run/progress.h may show two lines on the terminal that rewrite themselves. Other code that prints, in any
// thread or signal handler, erases them first.
static std::atomic<bool> progress_shown(false);
static inline void progress_clear() {
    if (!progress_shown.exchange(false)) { return; }
    const int e = errno;
    if (write(STDOUT_FILENO, "\r\033[A\033[J", 7) < 0) { errno = e; }    // a line up; erase all from there on
}

// Runs before die() exits. Set once, at start.
static void (*die_hook)() = nullptr;
// In a job of several processes, one of them prints the message for all. comm/ sets this function to pass the
// message on. It returns false if die() shall print the message as usual.
static bool (*die_report)(const char* text) = nullptr;
// A fuzzer (dev/fuzz) continues after an error: it throws from here.
static void (*die_throw)(const char* text) = nullptr;
static inline void atomic_last_parts();

// Only the first thread that calls this prints and exits. Other threads wait here until the process is gone.
__attribute__((noreturn)) static inline void die_now(const char* text) {
    if (die_throw) { die_throw(text); }
    static std::atomic<bool> dying(false);
    static thread_local bool mine = false;
    if (mine) { _exit(EXIT_FAILURE); }          // a second error, while exiting
    if (dying.exchange(true)) { for (;;) { pause(); } }
    mine = true;
    progress_clear();
    if (!die_report || !die_report(text)) {
        fflush(stdout);                         // earlier output appears before the error
        fprintf(stderr, "error: %s\n", text);
    }
    atomic_last_parts();                        // another thread may be about to create one
    if (die_hook) { die_hook(); }
    if (gettid() != getpid()) { _exit(EXIT_FAILURE); }      // exit() would tear down what main still uses
    exit(EXIT_FAILURE);
}

__attribute__((noreturn, format(printf, 1, 2))) static inline void die(const char* fmt, ...) {
    va_list args;
    va_start(args, fmt);
    const std::string text = shown_message(vformat(fmt, args));
    va_end(args);
    die_now(text.c_str());
}
static inline void die_if(const std::string& error) {      // "": no error
    if (!error.empty()) { die("%s", error.c_str()); }
}

// Out of memory and SIGXFSZ would end a program without a message.
static struct SilentEnds {
    SilentEnds() {
        std::set_new_handler([] {
            die_now("out of memory\nhint: give the program more of it, or less to do: smaller batches or "
                    "models when training, fewer threads when tokenizing");
        });
        signal(SIGXFSZ, SIG_IGN);               // at the limit of ulimit -f, the write now fails instead
    }
} silent_ends [[maybe_unused]];

// To be called before main returns: the last output may not fit on the disk, and printf does not report that.
static inline void stdout_check() {
    errno = 0;
    bool failed = ferror(stdout) != 0;
    if (file_layer.fflush(stdout) != 0 || failed) {
        die("cannot write to standard output: %s", errno ? strerror(errno) : "an earlier write failed");
    }
}

// ---- files ----

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

// ---- a file that appears whole or not at all ----
// The file is written as PATH.PID.N.part, which is created new (O_EXCL follows no link) and locked while it
// is open. Errors and signals remove it. SIGKILL leaves it behind: the next program that writes PATH finds
// that nobody holds the lock, and removes it.

struct AtomicFile { FILE* f; std::string path; char* temp; };

// The names of all open .part files, for the code that removes them: it may run in a signal handler or in
// another thread. Whoever takes a name out of its place owns it.
static std::atomic<char*> part_names[16];       // null: free. tokenize has three open at once

// Removes all .part files of this process, which ends. Safe in a signal handler.
static inline void atomic_remove_parts() {
    for (auto& part : part_names) {
        if (char* temp = part.exchange(nullptr)) { unlink(temp); }
    }
}

// A thread holds it while it creates a .part file; in the end, atomic_last_parts holds it for ever.
static std::timed_mutex part_mutex;

// Removes the .part files just before _exit, while other threads may be creating one: it waits for them, a
// second at most.
static inline void atomic_last_parts() {
    (void)part_mutex.try_lock_for(std::chrono::seconds(1));
    atomic_remove_parts();
}

static inline void atomic_signal(int signal_number) {
    atomic_remove_parts();
    signal(signal_number, SIG_DFL);
    raise(signal_number);                       // delivered when this handler returns: the parent sees it
}

// A signal that the program handles (the trainer finishes its step) or ignores (nohup) stays as it is.
static inline void atomic_watch_signals() {
    for (int number : {SIGINT, SIGTERM, SIGHUP}) {
        struct sigaction now;
        if (sigaction(number, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) {
            signal(number, atomic_signal);
        }
    }
}

// Is `name` PATH.PID.N.part? base: PATH's file name with a dot. PATH.bin.7.0.part belongs to PATH.bin, and
// PATH.part may be the user's own file.
static inline bool part_is_of(const std::string& name, const std::string& base) {
    unsigned pid, number;
    return name.compare(0, base.size(), base) == 0 &&
           sscanf(&name[base.size()], "%u.%u.", &pid, &number) == 2 &&
           name == base + format("%u.%u.part", pid, number);
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

// Removes those PATH.PID.N.part that no process writes any more.
static inline void atomic_remove_stale(const std::string& path) {
    const size_t slash = path.rfind('/') + 1;   // npos + 1 is 0
    const std::string folder = slash ? path.substr(0, slash) : "./", base = path.substr(slash) + ".";
    DIR* dir = opendir(folder.c_str());         // if it cannot be listed, what is stale stays
    while (struct dirent* entry = dir ? file_layer.readdir(dir) : nullptr) {
        const std::string name = entry->d_name;
        if (!part_is_of(name, base)) { continue; }
        const int fd = open((folder + name).c_str(), O_WRONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
        if (fd < 0) { continue; }
        if (flock(fd, LOCK_EX | LOCK_NB) == 0) { unlink((folder + name).c_str()); }
        close(fd);
    }
    if (dir) { closedir(dir); }
}

static inline void atomic_fail(AtomicFile* a, const char* what) {
    int e = errno;
    if (a->f) { fclose(a->f); }
    die("cannot %s '%s': %s\nhint: nothing was changed under that name; free some space or choose another -o",
        what, shown(a->path).c_str(), strerror(e));
}

static inline AtomicFile atomic_open(const std::string& path) {
    static std::atomic<int> count(0);
    output_check(path.c_str());
    atomic_remove_stale(path);
    atomic_watch_signals();
    AtomicFile a = {nullptr, path, nullptr};
    std::unique_lock<std::timed_mutex> lock(part_mutex);
    while (!a.f) {
        const std::string temp = path + format(".%d.%d.part", (int)getpid(), count++);
        int fd = open(temp.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
        if (fd < 0 && errno == EEXIST) { continue; }        // left by an earlier process with the same id
        if (fd < 0) {
            lock.unlock();
            die("cannot create '%s': %s", shown(path).c_str(), strerror(errno));
        }
        flock(fd, LOCK_EX);
        struct stat st;
        bool gone = fstat(fd, &st) != 0 || st.st_nlink == 0;    // taken for a stale one before it was locked
        if (gone) { close(fd); continue; }
        a.f = fdopen(fd, "wb");
        a.temp = strdup(temp.c_str());
    }
    size_t place = 0;
    for (char* none = nullptr; !part_names[place].compare_exchange_strong(none, a.temp); none = nullptr) {
        place++;
        assert(place < std::size(part_names));
    }
    return a;
}

static inline void atomic_write(AtomicFile* a, const void* data, size_t bytes) {
    if (bytes && file_layer.fwrite(data, 1, bytes, a->f) != bytes) { atomic_fail(a, "write"); }
}

// The next write overwrites the file from its beginning.
static inline void atomic_rewind(AtomicFile* a) {
    if (file_layer.fflush(a->f) != 0 || fseeko(a->f, 0, SEEK_SET) != 0) { atomic_fail(a, "write"); }
}

static inline void atomic_commit(AtomicFile* a) {
    if (file_layer.fflush(a->f) != 0 || file_layer.fsync(fileno(a->f)) != 0) { atomic_fail(a, "write"); }
    if (file_layer.rename(a->temp, a->path.c_str()) != 0) { atomic_fail(a, "rename into"); }
    for (auto& part : part_names) {
        char* mine = a->temp;
        if (part.compare_exchange_strong(mine, nullptr)) { free(mine); break; }
    }
    const int closed = file_layer.fclose(a->f);             // only now: it holds the lock
    a->f = nullptr;
    if (closed != 0) { die("'%s' cannot be closed: %s", shown(a->path).c_str(), strerror(errno)); }
    size_t slash = a->path.rfind('/') + 1;
    std::string folder = slash ? a->path.substr(0, slash) : ".";
    int dir = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir < 0) { return; }                    // a folder without read permission cannot be synced
    // After this the new name survives a power cut. File systems that cannot sync a folder return EINVAL.
    if (file_layer.fsync(dir) != 0 && errno != EINVAL) {
        die("'%s' is written, but its folder cannot be synced: %s", shown(a->path).c_str(), strerror(errno));
    }
    close(dir);
}

static inline void atomic_file(const std::string& path, const std::string& text) {
    AtomicFile out = atomic_open(path);
    atomic_write(&out, text.data(), text.size());
    atomic_commit(&out);
}
