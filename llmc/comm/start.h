/*
How the processes of a job find each other. Host only; with USE_MPI also by MPI.

    CommJob job;
    comm_find(&job, options, argv);             // job.rank, job.world, connections: see llmc/comm/net.h

The connections are inherited (--gpus N, llmc/comm/launch.h) or made over TCP. Where rank 0 listens, the
others learn
    tcp   from -ps HOST[:PORT]; or by themselves under SLURM and torchrun
    fs    from a file in a folder that all see
    mpi   by MPI_Bcast
The secret is random with fs and mpi. With tcp it is LLMC_JOB_SECRET, or else made of the scheduler's job id
and the user's number: that keeps apart jobs that meet by accident, and strangers who scan ports, but not
somebody who knows both numbers. Nothing is encrypted: the network between the hosts is trusted.
*/
#ifndef LLMC_COMM_START_H
#define LLMC_COMM_START_H

#include <ctype.h>          // gives: isalnum
#include <ifaddrs.h>        // gives: getifaddrs
#include <net/if.h>         // gives: IFF_UP
#include <sys/random.h>     // gives: getrandom
#ifdef USE_MPI
#include <mpi.h>            // gives: MPI_Init, MPI_Bcast
#endif

#include <algorithm>        // gives: std::sort
#include <string>           // gives: std::string
#include <utility>          // gives: std::pair
#include <vector>           // gives: std::vector

#include "../check.h"       // gives: die, format, AtomicFile
#include "launch.h"         // gives: comm_launch, comm_child
#include "net.h"            // gives: CommJob, comm_accept_all, comm_join

struct CommOptions {
    int gpus = 0;                               // start so many local ranks; 0: as the program was started
    const char *init = "auto", *server = "", *folder = "";
    int processes = 0, process = -1, per_node = 0;  // 0, -1, 0: not given
    int start_timeout_s = 120;
};

static const int kCommPort = 29547;
static const int kCommMaxWorld = 4096;
static int comm_early_rank = -1;                // of a job that is starting, once it is known

// ---- the scheduler's environment ----

struct CommForeign { const char* name; int rank, world; };     // "": no scheduler, or one process

static inline int comm_env(const char* name, int otherwise) {
    const char* text = getenv(name);
    char* end = nullptr;
    const long n = text ? strtol(text, &end, 10) : 0;
    return text && end != text && *end == '\0' && n >= 0 && n <= kCommMaxWorld ? (int)n : otherwise;
}

static inline CommForeign comm_foreign() {
    static const struct { const char *name, *rank, *world; } kinds[] = {
        {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
        {"torchrun", "RANK", "WORLD_SIZE"},
        {"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"},
        {"srun", "SLURM_PROCID", "SLURM_NTASKS"},
    };
    // A batch script itself is told of all the tasks that it may start, and is not one of them.
    const char* kind = getenv("ENVIRONMENT");
    const bool step = getenv("SLURM_STEP_NODELIST") || getenv("SLURM_STEP_ID");
    const bool batch = !step && kind && strcmp(kind, "BATCH") == 0;
    for (const auto& k : kinds) {
        const int rank = comm_env(k.rank, -1), world = comm_env(k.world, -1);
        if (strcmp(k.name, "srun") == 0 && (batch || world < 0)) { continue; }
        if (strcmp(k.name, "srun") == 0 && world == 1) { break; }
        if (world > 1 && rank >= 0 && rank < world) { return {k.name, rank, world}; }
    }
    return {"", 0, 1};
}

static inline std::string comm_job_id() {
    for (const char* name : {"LLMC_JOB_ID", "PMIX_NAMESPACE", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"}) {
        const char* id = getenv(name);
        const char* step = strcmp(name, "SLURM_JOB_ID") == 0 ? getenv("SLURM_STEP_ID") : nullptr;
        if (!id || !*id) { continue; }
        std::string s = std::string(id) + (step ? std::string(".") + step : "");
        for (char& c : s) { if (!isalnum((unsigned char)c) && c != '.') { c = '-'; } }
        return s.substr(0, 100);
    }
    return "job";
}

// What is given with -ps, or else made of the job's number; not a cryptographic hash, see above.
static inline CommSecret comm_tcp_secret() {
    const char* given = getenv("LLMC_JOB_SECRET");
    const std::string text = given && *given ? given : format("%s %d", comm_job_id().c_str(), (int)getuid());
    CommSecret s;
    for (int word = 0; word < 4; word++) {      // FNV-1a with four beginnings
        uint64_t h = 14695981039346656037ull + 0x9E3779B97F4A7C15ull * word;
        for (char c : text) { h = (h ^ (unsigned char)c) * 1099511628211ull; }
        h = (h ^ h >> 32) * 0xD6E8FEB86659FD93ull;
        memcpy(s.bytes + 8 * word, &h, 8);
    }
    return s;
}

static inline CommSecret comm_random_secret() {
    CommSecret s;
    if (getrandom(&s, sizeof(s), 0) != (ssize_t)sizeof(s)) { die("no random numbers: %s", strerror(errno)); }
    return s;
}

// "node[07-12,20],gpu3" -> "node07"
static inline std::string comm_first_host(const std::string& list) {
    std::string host;
    for (size_t i = 0; i < list.size() && list[i] != ','; i++) {
        if (list[i] != '[') { host += list[i]; continue; }
        const size_t close = list.find(']', i);
        host += list.substr(i + 1, list.find_first_of("-,]", i) - i - 1);
        if (close == std::string::npos) { break; }
        i = close;
    }
    return host;
}

// ---- where rank 0 is, as text: the file of fs, the broadcast of mpi ----

static inline std::string comm_describe(const CommHello& self, int port, const CommSecret& secret) {
    std::string text = format("%.8s\nport %d\nprocess %lld %lld\nhost %s\nsecret ", kCommMagic, port,
                              (long long)self.pid, (long long)self.started, self.host_id);
    for (unsigned char b : secret.bytes) { text += format("%02x", b); }
    struct ifaddrs* all = nullptr;
    if (getifaddrs(&all) != 0) { all = nullptr; }
    int count = 0;                              // the text fits into 4096 bytes
    for (struct ifaddrs* a = all; a && count < 16; a = a->ifa_next) {
        char name[256];
        if (!a->ifa_addr || !(a->ifa_flags & IFF_UP) || (a->ifa_flags & IFF_LOOPBACK)) { continue; }
        const int family = a->ifa_addr->sa_family;
        const socklen_t size = family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
        if (family != AF_INET && family != AF_INET6) { continue; }
        if (getnameinfo(a->ifa_addr, size, name, sizeof(name), nullptr, 0, NI_NUMERICHOST) != 0) { continue; }
        text += format("\naddress %s", name);
        count++;
    }
    if (all) { freeifaddrs(all); }
    return text + "\nend\n";
}

// The value of a line; "" if it is not there.
static inline std::string comm_field(const std::string& text, const std::string& name,
                                     size_t* from = nullptr) {
    const size_t at = text.find("\n" + name + " ", from ? *from : 0);
    if (at == std::string::npos) { return ""; }
    const size_t begin = at + name.size() + 2, end = text.find('\n', begin);
    if (from) { *from = end; }
    return text.substr(begin, end - begin);
}

// Empty if the text is not whole.
static inline std::vector<CommAddress> comm_addresses(const std::string& text, const CommHello& self) {
    std::vector<CommAddress> list;
    CommAddress a = {"127.0.0.1", comm_field(text, "port"), {}};
    const std::string hex = comm_field(text, "secret");
    const std::string end = "\nend\n";
    const bool whole = text.size() > end.size() &&
                       text.compare(text.size() - end.size(), end.size(), end) == 0;
    if (!whole || text.compare(0, 8, kCommMagic, 8) != 0 || hex.size() != 2 * sizeof(a.secret.bytes)) {
        return list;
    }
    for (size_t i = 0; i < sizeof(a.secret.bytes); i++) {
        a.secret.bytes[i] = (unsigned char)strtoul(hex.substr(2 * i, 2).c_str(), nullptr, 16);
    }
    if (comm_field(text, "host") == self.host_id) { list.push_back(a); }
    size_t from = 0;
    for (std::string host; list.size() < 17 && !(host = comm_field(text, "address", &from)).empty();) {
        a.host = host;
        list.push_back(a);
    }
    return list;
}

static inline std::string comm_read_small(const std::string& path) {        // "" unless it is this user's own
    const int fd = open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    struct stat st;
    char buffer[4096];
    ssize_t n = -1;
    if (fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_uid == geteuid()) {
        n = read(fd, buffer, sizeof(buffer));
    }
    if (fd >= 0) { close(fd); }
    return n > 0 ? std::string(buffer, (size_t)n) : "";
}

// The job's files, the newest first.
static inline std::vector<std::string> comm_list_files(const std::string& folder) {
    const std::string begin = "rendezvous-" + comm_job_id() + ".";
    std::vector<std::pair<double, std::string>> found;
    DIR* dir = opendir(folder.c_str());
    while (struct dirent* entry = dir ? readdir(dir) : nullptr) {
        const std::string name = entry->d_name, path = folder + "/" + name;
        struct stat st;
        if (name.compare(0, begin.size(), begin) != 0 || lstat(path.c_str(), &st) != 0) { continue; }
        found.push_back({-(double)st.st_mtim.tv_sec - 1e-9 * (double)st.st_mtim.tv_nsec, path});
    }
    if (dir) { closedir(dir); }
    std::sort(found.begin(), found.end());
    std::vector<std::string> paths;
    for (const auto& f : found) { paths.push_back(f.second); }
    return paths;
}

// ---- the three ways ----

static inline void comm_begin_hub(CommJob* job, const CommSecret& secret, int per_node) {
    job->peers.assign(job->world, CommPeer{-1, -1, {}});
    job->peers[0].who = comm_hello(*job, secret, per_node);
}

static inline void comm_find_tcp(CommJob* job, const CommOptions& o, const CommAddress& a) {
    const bool v6 = a.host.find(':') != std::string::npos;
    const std::string where = (v6 ? "[" + a.host + "]" : a.host) + ":" + a.port;
    if (job->rank != 0) {
        const std::vector<CommAddress> only = {a};
        comm_join(job, o.start_timeout_s, o.per_node, where, [&] { return only; });
        return;
    }
    int port;
    const int listener = comm_listen(a, &port);
    comm_begin_hub(job, a.secret, o.per_node);
    comm_accept_all(job, listener, a.secret, o.start_timeout_s, where, [] {});
    comm_welcome(job);
}

static inline void comm_find_fs(CommJob* job, const CommOptions& o) {
    const std::string folder = o.folder;
    if (job->rank != 0) {
        const CommHello self = comm_hello(*job, CommSecret{}, 0);
        comm_join(job, o.start_timeout_s, o.per_node, "the folder '" + folder + "'", [&] {
            std::vector<CommAddress> all;
            for (const std::string& path : comm_list_files(folder)) {
                for (const CommAddress& a : comm_addresses(comm_read_small(path), self)) { all.push_back(a); }
            }
            return all;
        });
        return;
    }
    mkdir_check(o.folder);
    const CommSecret secret = comm_random_secret();
    comm_begin_hub(job, secret, o.per_node);
    const CommHello& self = job->peers[0].who;
    for (const std::string& path : comm_list_files(folder)) {       // of a rank 0 here that was killed
        const std::string text = comm_read_small(path), process = comm_field(text, "process");
        char* rest;
        const int64_t pid = strtoll(process.c_str(), &rest, 10);
        if (comm_field(text, "host") != self.host_id || comm_started(pid) == strtoll(rest, nullptr, 10)) {
            continue;
        }
        unlink(path.c_str());
    }
    int port;
    const int listener = comm_listen({"", "0", {}}, &port);
    const std::string text = comm_describe(self, port, secret);
    uint32_t word;                              // the file's own; not of the secret that it holds
    memcpy(&word, comm_random_secret().bytes, sizeof(word));
    const std::string path = folder + "/rendezvous-" + comm_job_id() + format(".%08x", word);
    AtomicFile file = atomic_open(path);
    fchmod(fileno(file.f), 0600);
    atomic_write(&file, text.data(), text.size());
    atomic_commit(&file);
    comm_accept_all(job, listener, secret, o.start_timeout_s, "the folder '" + folder + "'",
                    [&] { unlink(path.c_str()); });
    unlink(path.c_str());
    comm_welcome(job);
}

#ifdef USE_MPI
static inline void comm_find_mpi(CommJob* job, const CommOptions& o) {
    if (MPI_Init(nullptr, nullptr) != MPI_SUCCESS ||
        MPI_Comm_rank(MPI_COMM_WORLD, &job->rank) != MPI_SUCCESS ||
        MPI_Comm_size(MPI_COMM_WORLD, &job->world) != MPI_SUCCESS) { die("MPI does not start"); }
    job->mpi = true;
    comm_early_rank = job->rank;
    if (job->world == 1) { MPI_Finalize(); return; }
    const CommSecret secret = comm_random_secret();
    char text[4096] = "";
    int port, listener = -1;
    if (job->rank == 0) {
        listener = comm_listen({"", "0", {}}, &port);
        comm_begin_hub(job, secret, o.per_node);
        const std::string s = comm_describe(job->peers[0].who, port, secret);
        memcpy(text, s.c_str(), std::min(s.size(), sizeof(text) - 1));
    }
    if (MPI_Bcast(text, sizeof(text), MPI_CHAR, 0, MPI_COMM_WORLD) != MPI_SUCCESS) { die("MPI_Bcast fails"); }
    if (job->rank == 0) {
        comm_accept_all(job, listener, secret, o.start_timeout_s, "rank 0", [] {});
        comm_welcome(job);
        return;
    }
    const std::vector<CommAddress> all = comm_addresses(text, comm_hello(*job, CommSecret{}, 0));
    comm_join(job, o.start_timeout_s, o.per_node, "the addresses that MPI gave", [&] { return all; });
}
#endif

// A rank of this machine's launcher: the connections are there, and all ranks started a moment ago.
static double comm_local_start_s = 20;          // tests lower it
static inline void comm_find_local(CommJob* job, const CommChild& child, const CommOptions& o) {
    job->rank = child.rank;
    job->world = child.world;
    job->page = comm_map_page(child.page);
    const double limit = std::min(comm_local_start_s, (double)o.start_timeout_s);
    const double deadline = comm_now() + limit;
    for (const auto& fds : {child.control, child.data, {child.page}}) {
        for (int fd : fds) { fcntl(fd, F_SETFD, FD_CLOEXEC); }
    }
    if (job->rank != 0) {
        const CommHello hello = comm_hello(*job, CommSecret{}, 0);
        if (!comm_write(child.control[0], &hello, sizeof(hello), deadline) ||
            !comm_await_welcome(job, child.control[0], child.data[0], deadline + 5)) {
            die("rank 0 is gone before the start");
        }
        return;
    }
    comm_begin_hub(job, CommSecret{}, 0);
    for (int r = 1; r < job->world; r++) {
        CommPeer& p = job->peers[r];
        p = {child.control[r - 1], child.data[r - 1], {}};
        if (!comm_read(p.control, &p.who, sizeof(p.who), deadline)) {
            die("rank %d has ended, or has not begun within %.0f s", r, limit);
        }
    }
    comm_welcome(job);
}

// ---- which way ----

static inline bool comm_is(const char* text, const char* word) { return strcmp(text, word) == 0; }

// What cannot be meant, in one sentence each.
static inline void comm_contradictions(const CommOptions& o, const CommForeign& f) {
    const bool tcp = comm_is(o.init, "tcp"), fs = comm_is(o.init, "fs"), any = comm_is(o.init, "auto");
    if (!tcp && !fs && !any && !comm_is(o.init, "mpi")) {
        die("-pi '%s': choose auto, mpi, tcp or fs", o.init);
    }
    if (o.gpus > 0 && *f.name) {
        die("--gpus %d, but %s has started %d ranks already\nhint: leave one of the two out", o.gpus, f.name,
            f.world);
    }
    const bool places = *o.server || *o.folder || o.processes > 0 || o.process >= 0 || o.per_node > 0;
    if (o.gpus > 0 && (!any || places)) {
        die("--gpus %d starts the ranks of this machine by itself\nhint: leave out -pi, -ps, -pf, -pn, -pr "
            "and -pg, or --gpus", o.gpus);
    }
    if (*o.server && !tcp) { die("-ps needs -pi tcp"); }
    if (*o.folder && !fs) { die("-pf needs -pi fs"); }
    if (!tcp && !fs && (o.processes > 0 || o.process >= 0)) { die("-pn and -pr need -pi tcp or -pi fs"); }
    if (fs && !*o.folder) { die("-pi fs needs -pf, a folder that all ranks see"); }
    if (tcp && !*o.server && !*f.name) { die("-pi tcp needs -ps HOST[:PORT], where rank 0 runs"); }
    if ((tcp || fs) && !*f.name && (o.processes < 1 || o.process < 0)) {
        die("-pi %s needs -pn, the number of processes, and -pr, which of them this is", o.init);
    }
    const int world = o.processes > 0 ? o.processes : f.world;
    const int rank = o.process >= 0 ? o.process : f.rank;
    if (rank >= world) { die("-pr %d of -pn %d processes: they count from 0 to %d", rank, world, world - 1); }
    if (world > kCommMaxWorld) { die("-pn %d: at most %d processes", world, kCommMaxWorld); }
    if (*f.name && (world != f.world || rank != f.rank)) {
        die("-pn %d -pr %d, but %s says that this is rank %d of %d\nhint: leave out -pn and -pr", world, rank,
            f.name, f.rank, f.world);
    }
}

// Where rank 0 is under srun and torchrun, unless -ps says it.
static inline CommAddress comm_foreign_server(const CommOptions& o, const CommForeign& f) {
    const CommSecret secret = comm_tcp_secret();
    std::string host;
    int port = kCommPort;
    if (comm_is(f.name, "srun")) {
        const char* list = getenv("SLURM_STEP_NODELIST");
        if (!list) { list = getenv("SLURM_JOB_NODELIST"); }
        host = comm_first_host(list ? list : "");
        const char* id = getenv("SLURM_JOB_ID");
        if (id) { port = 20000 + (int)(strtoll(id, nullptr, 10) % 10000); }     // below the ports of clients
    } else if (comm_is(f.name, "torchrun")) {
        const char* master = getenv("MASTER_ADDR");
        const char* given = getenv("MASTER_PORT");
        host = master ? master : "";
        if (given) { port = atoi(given) + 1; }  // torchrun's own store listens on MASTER_PORT
    }
    if (*o.server) { return comm_parse_server(o.server, port, secret); }
    if (host.empty()) {
        die("%s does not say where rank 0 runs\nhint: give -pi tcp -ps HOST[:PORT]", f.name);
    }
    return {host, std::to_string(port), secret};
}

static inline void comm_find(CommJob* job, const CommOptions& o, char** argv) {
    CommChild child;
    if (comm_child(&child)) { comm_find_local(job, child, o); return; }
    const CommForeign f = comm_foreign();
    comm_contradictions(o, f);
    if (o.gpus > 1) { comm_launch(o.gpus, argv); }
    const bool by_mpi = comm_is(o.init, "mpi") || (comm_is(o.init, "auto") && comm_is(f.name, "mpirun"));
    if (by_mpi) {
#ifdef USE_MPI
        comm_find_mpi(job, o);
        return;
#else
        die("this program was built without MPI\nhint: install OpenMPI (libopenmpi-dev) and make again, or "
            "start with --gpus N, -pi tcp or -pi fs");
#endif
    }
    comm_early_rank = job->rank = o.process >= 0 ? o.process : f.rank;
    job->world = o.processes > 0 ? o.processes : f.world;
    if (job->world == 1) { return; }
    if (comm_is(o.init, "fs")) { comm_find_fs(job, o); }
    else { comm_find_tcp(job, o, comm_foreign_server(o, f)); }
}

#endif  // LLMC_COMM_START_H
