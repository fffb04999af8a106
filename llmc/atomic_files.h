/*
Files that appear whole or not at all. Host only. They are written under a temporary name, synced and renamed,
so that a kill or a full disk never leaves half a file under the final name.

    AtomicFile out = atomic_open("model.bin");
    atomic_write(&out, data, bytes);
    atomic_commit(&out);                       // fsync, rename, fsync of the folder
    atomic_file("DONE", text);                 // the same for a short text

The file is written as PATH.PID.N.part, which is created new (O_EXCL follows no link) and locked while it is
open. Errors and signals remove it. SIGKILL leaves it behind: the next program that writes PATH finds that
nobody holds the lock, and removes it.
*/
#pragma once

#include "checked_files.h"      // gives: output_check, file_layer; from errors.h die, die_unfinished

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
static const bool parts_end_with_die [[maybe_unused]] = (die_unfinished = atomic_last_parts) != nullptr;

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
