/*
How the processes of a job find each other. Host only; with USE_MPI also by MPI.

    CommJob job;
    comm_find(&job, options, argv);             // job.rank, job.world, connections: see llmc/comm/net.h

The other ranks learn where rank 0 listens
    --gpus N   from their launcher, llmc/comm/launch.h
    tcp        from -ps HOST[:PORT], or from the environment under SLURM and torchrun
    fs         from a file in a folder that all see
    mpi        by MPI_Bcast
The job's key is random. Only with tcp it is a hash of LLMC_JOB_ID (else the scheduler's job id) and the user
id. It separates jobs that meet by accident.
*/
#pragma once

#include <ifaddrs.h>        // gives: getifaddrs
#include <net/if.h>         // gives: IFF_UP
#ifdef USE_MPI
#include <mpi.h>            // gives: MPI_Init, MPI_Bcast
#endif

#include <sstream>          // gives: std::istringstream

#include "../checked_files.h" // gives: die, format, mkdir_check
#include "../checksum.h"    // gives: checksum
#include "../numbers.h"     // gives: parse_int
#include "launch.h"          // gives: comm_launch, comm_child
#include "net.h"            // gives: CommJob, comm_gather, comm_join

enum class CommInit { Auto, Mpi, Tcp, Fs };
struct CommOptions {
    int gpus = 0;                               // local ranks to start; 0: none
    CommInit init = CommInit::Auto;
    const char *server = "", *folder = "";
    int processes = 0, process = -1, per_node = 0;  // 0, -1, 0: not given
    int start_timeout_s = 600;                  // tests lower it
};

static const int kCommPort = 29547;
static int comm_early_rank = -1;                // this rank while the job is starting; -1: not known yet

// ---- the scheduler's environment ----

struct CommForeign {
    std::string name;                           // "": no scheduler, or one process
    int rank, world;
    std::string said, wrong;                    // "SLURM_NTASKS=2"; what is wrong with such variables
};

// A variable of the environment; null if it is empty, too.
static inline const char* comm_env(const char* name) {
    const char* text = getenv(name);
    return text && *text ? text : nullptr;
}

static inline CommForeign comm_foreign() {
    const struct { std::string name; const char *rank, *world; } kinds[] = {
        {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
        {"torchrun", "RANK", "WORLD_SIZE"},
        {"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"},
        {"srun", "SLURM_PROCID", "SLURM_NTASKS"},
    };
    // A SLURM batch script sees the number of tasks that it may start, but is none of them.
    const char* kind = getenv("ENVIRONMENT");
    const bool step = getenv("SLURM_STEP_NODELIST") || getenv("SLURM_STEP_ID");
    const bool batch = !step && kind && strcmp(kind, "BATCH") == 0;
    for (const auto& k : kinds) {
        const char *of = comm_env(k.rank), *all = comm_env(k.world);
        if (!of || !all || (k.name == "srun" && batch)) { continue; }
        int64_t rank = -1, world = -1;
        const bool whole = parse_int(of, &rank) && parse_int(all, &world);
        if (!whole || rank < 0 || rank >= world || world > INT_MAX) {
            const char* wrong = "%s=%s and %s=%s: the first is a whole number from 0 on, and less than the "
                                "second\nhint: unset them, or --gpus 1 runs alone";
            return {"", 0, 1, "", format(wrong, k.rank, of, k.world, all)};
        }
        if (k.name == "srun" && world == 1) { break; }
        if (world > 1) { return {k.name, (int)rank, (int)world, format("%s=%s", k.world, all), ""}; }
    }
    return {"", 0, 1, "", ""};
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

static inline uint64_t comm_tcp_key() {
    const std::string text = format("%s %d", comm_job_id().c_str(), getuid());
    return checksum(text.data(), text.size());
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
// The text is: magic word, key, port, addresses, "end". Loopback comes last: elsewhere it leads nowhere.

static inline std::string comm_describe(uint64_t key, int port) {
    std::string text = format("%.8s %llx %d", kCommMagic, (unsigned long long)key, port);
    struct ifaddrs* all = nullptr;
    if (getifaddrs(&all) != 0) { all = nullptr; }
    int count = 0;                              // at most 16 addresses: the text has to fit into 4096 bytes
    for (struct ifaddrs* a = all; a && count < 16; a = a->ifa_next) {
        char name[256];
        if (!a->ifa_addr || !(a->ifa_flags & IFF_UP) || (a->ifa_flags & IFF_LOOPBACK)) { continue; }
        const int family = a->ifa_addr->sa_family;
        const socklen_t size = family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
        if (family != AF_INET && family != AF_INET6) { continue; }
        if (getnameinfo(a->ifa_addr, size, name, sizeof(name), nullptr, 0, NI_NUMERICHOST) != 0) { continue; }
        text += std::string("\n") + name;
        count++;
    }
    if (all) { freeifaddrs(all); }
    return text + "\n127.0.0.1\nend\n";
}

// Empty if the text is not whole.
static inline std::vector<CommAddress> comm_addresses(const std::string& text) {
    std::istringstream words(text);
    std::string magic, port, host;
    uint64_t key = 0;
    std::vector<CommAddress> list;
    words >> magic >> std::hex >> key >> port;
    while (words >> host && host != "end") { list.push_back({host, port, key}); }
    const bool whole = host == "end" && text.back() == '\n' && magic == std::string(kCommMagic, 8);
    return whole ? list : std::vector<CommAddress>();
}

// ---- the folder of fs ----

static inline std::string comm_meeting_file(const CommOptions& o) {
    return std::string(o.folder) + "/rendezvous-" + comm_job_id();
}

static inline bool comm_is_own(int fd, struct stat* st) {
    return fd >= 0 && fstat(fd, st) == 0 && S_ISREG(st->st_mode) && st->st_uid == geteuid();
}

static inline std::string comm_read_meeting(const CommOptions& o) {     // "" unless it is this user's own
    if (DIR* dir = opendir(o.folder)) { closedir(dir); }    // refreshes NFS's cached listing
    const int fd = open(comm_meeting_file(o).c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    struct stat st;
    char buffer[8192];
    const ssize_t n = comm_is_own(fd, &st) ? read(fd, buffer, sizeof(buffer)) : -1;
    if (fd >= 0) { close(fd); }
    return n > 0 ? std::string(buffer, (size_t)n) : "";
}

// Rank 0 locks its file, so the next job can take over the file of a killed one. Returns the descriptor.
static inline int comm_write_meeting(const CommOptions& o, const std::string& text) {
    const std::string path = comm_meeting_file(o);
    const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
    if (fd < 0) { die("cannot create '%s': %s", path.c_str(), strerror(errno)); }
    if (flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        die("another job's ranks are meeting in '%s' now\nhint: %s", path.c_str(), kCommApart);
    }
    struct stat st;
    if (!comm_is_own(fd, &st)) { die("'%s' is no file of this user\nhint: %s", path.c_str(), kCommApart); }
    if (st.st_nlink == 0) {                     // another job has just removed it
        close(fd);
        return comm_write_meeting(o, text);
    }
    if (ftruncate(fd, 0) != 0 || pwrite(fd, text.data(), text.size(), 0) != (ssize_t)text.size() ||
        fsync(fd) != 0) {
        die("cannot write '%s': %s", path.c_str(), strerror(errno));
    }
    return fd;
}

// ---- tcp, fs, mpi, --gpus ----

// Beside where the ranks meet: why they do.
static inline std::string comm_because(const CommForeign& f) {
    return f.said.empty() ? "" : format(" (%s asks for %d processes; --gpus 1 runs alone)", f.said.c_str(),
                                        f.world);
}

static inline void comm_find_tcp(CommJob* job, const CommOptions& o, const CommAddress& a,
                                 const CommForeign& f) {
    const std::string where = a.host + ", port " + a.port + comm_because(f);
    const std::vector<CommAddress> only = {a};
    int port;
    if (job->rank != 0) { comm_join(job, o.start_timeout_s, where, [&] { return only; }); }
    else { die_if(comm_gather(job, comm_listen(a, &port), a.key, o.start_timeout_s, where)); }
}

static inline void comm_find_fs(CommJob* job, const CommOptions& o, const CommForeign& f) {
    const std::string where = std::string("the folder '") + o.folder + "'" + comm_because(f);
    if (job->rank != 0) {
        comm_join(job, o.start_timeout_s, where, [&] { return comm_addresses(comm_read_meeting(o)); });
        return;
    }
    mkdir_check(o.folder);
    const uint64_t key = comm_random_key();
    int port;
    const int listener = comm_listen({"", "0", key}, &port);
    const int locked = comm_write_meeting(o, comm_describe(key, port));
    const std::string error = comm_gather(job, listener, key, o.start_timeout_s, where);
    unlink(comm_meeting_file(o).c_str());
    close(locked);
    die_if(error);
}

#ifdef USE_MPI
static inline void comm_find_mpi(CommJob* job, const CommOptions& o) {
    if (MPI_Init(nullptr, nullptr) != MPI_SUCCESS ||
        MPI_Comm_rank(MPI_COMM_WORLD, &job->rank) != MPI_SUCCESS ||
        MPI_Comm_size(MPI_COMM_WORLD, &job->world) != MPI_SUCCESS) { die("MPI does not start"); }
    job->mpi = true;
    comm_early_rank = job->rank;
    if (job->world == 1) { MPI_Finalize(); return; }
    const uint64_t key = comm_random_key();
    char text[4096] = "";
    int port, listener = -1;
    if (job->rank == 0) {
        listener = comm_listen({"", "0", key}, &port);
        snprintf(text, sizeof(text), "%s", comm_describe(key, port).c_str());
    }
    if (MPI_Bcast(text, sizeof(text), MPI_CHAR, 0, MPI_COMM_WORLD) != MPI_SUCCESS) { die("MPI_Bcast fails"); }
    const std::vector<CommAddress> all = comm_addresses(text);
    if (job->rank == 0) { die_if(comm_gather(job, listener, key, o.start_timeout_s, "rank 0")); }
    else { comm_join(job, o.start_timeout_s, "the addresses that MPI gave", [&] { return all; }); }
}
#endif

// For a rank that a launcher of this machine started.
static int comm_local_start_s = 20;             // tests lower it
static inline void comm_find_local(CommJob* job, const CommChild& child, const CommOptions& o) {
    job->rank = child.rank;
    job->world = child.world;
    comm_errors = child.errors;
    fcntl(child.errors, F_SETFD, FD_CLOEXEC);
    const int limit = std::min(comm_local_start_s, o.start_timeout_s);
    const std::vector<CommAddress> only = {{"127.0.0.1", std::to_string(child.port), child.key}};
    if (job->rank != 0) { comm_join(job, limit, "its launcher's port", [&] { return only; }); }
    else {
        fcntl(child.listener, F_SETFD, FD_CLOEXEC);
        die_if(comm_gather(job, child.listener, child.key, limit, "this machine's launcher"));
    }
}

// ---- which way ----

// Refuses options that contradict each other.
static inline void comm_contradictions(const CommOptions& o, const CommForeign& f) {
    const bool tcp = o.init == CommInit::Tcp, fs = o.init == CommInit::Fs, foreign = !f.name.empty();
    const bool places = *o.server || *o.folder || o.processes > 0 || o.process >= 0 || o.per_node > 0;
    if (o.gpus > 0 && (o.init != CommInit::Auto || places)) {
        die("--gpus %d starts the ranks of this machine by itself\nhint: leave out -pi, -ps, -pf, -pn, -pr "
            "and -pg, or --gpus", o.gpus);
    }
    const bool alone = o.init == CommInit::Auto && o.processes == 1 && o.process <= 0;
    const bool numbered = o.processes > 0 || o.process >= 0;
    const struct { bool wrong; const char* said; } rules[] = {
        {*o.server && !tcp, "-ps needs -pi tcp"},
        {*o.folder && !fs, "-pf needs -pi fs"},
        {numbered && !tcp && !fs && !alone, "-pn and -pr need -pi tcp or -pi fs"},
        {fs && !*o.folder, "-pi fs needs -pf, a folder that all ranks see"},
        {tcp && !*o.server && !foreign, "-pi tcp needs -ps HOST[:PORT], where rank 0 runs"},
        {(tcp || fs) && !foreign && (o.processes < 1 || o.process < 0),
         "-pi tcp and -pi fs need -pn, the number of processes, and -pr, which of them this is"},
    };
    for (const auto& rule : rules) { if (rule.wrong) { die("%s", rule.said); } }
    const int world = o.processes > 0 ? o.processes : f.world;
    const int rank = o.process >= 0 ? o.process : f.rank;
    if (rank >= world) { die("-pr %d of -pn %d processes: they count from 0 to %d", rank, world, world - 1); }
    if (world > kCommMaxWorld) { die("%d ranks: at most %d", world, kCommMaxWorld); }
    if (foreign && (world != f.world || rank != f.rank)) {
        die("-pn %d -pr %d, but %s says that this is rank %d of %d\nhint: leave out -pn and -pr", world, rank,
            f.name.c_str(), f.rank, f.world);
    }
}

// A number in the environment, of which the port is made.
static inline int64_t comm_env_number(const char* name, int64_t otherwise, int64_t least, int64_t most) {
    const char* text = comm_env(name);
    int64_t n = otherwise;
    if (text && (!parse_int(text, &n) || n < least || n > most)) {
        die("%s=%s: it is a whole number from %lld to %lld\nhint: where it is not set, the ranks meet at "
            "port %d; or give -pi tcp -ps HOST:PORT", name, text, (long long)least, (long long)most,
            kCommPort);
    }
    return n;
}

// Rank 0's address: from -ps, or from the environment of srun or torchrun.
static inline CommAddress comm_foreign_server(const CommOptions& o, const CommForeign& f) {
    const uint64_t key = comm_tcp_key();
    const char* host = "";
    int64_t port = kCommPort;
    if (strchr(o.server, ':')) { return comm_parse_server(o.server, kCommPort, key); }      // with its port
    if (f.name == "srun") {
        const char* nodes = getenv("SLURM_STEP_NODELIST");
        host = nodes ? nodes : getenv("SLURM_JOB_NODELIST");
        const int64_t id = comm_env_number("SLURM_JOB_ID", -1, 0, UINT32_MAX);
        if (id >= 0) { port = 20000 + id % 10000; }             // below the ephemeral ports
    } else if (f.name == "torchrun") {
        host = getenv("MASTER_ADDR");
        port = comm_env_number("MASTER_PORT", kCommPort - 1, 1, 65534) + 1;     // torchrun listens on its own
    }
    if (*o.server) { return comm_parse_server(o.server, (int)port, key); }
    if (!host || !*host) {
        die("%s does not say where rank 0 runs\nhint: give -pi tcp -ps HOST[:PORT]", f.name.c_str());
    }
    return {comm_first_host(host), std::to_string(port), key};
}

static inline void comm_find(CommJob* job, const CommOptions& o, char** argv) {
    CommChild child;
    if (comm_child(&child)) { comm_find_local(job, child, o); return; }
    CommForeign f = comm_foreign();
    // The flags of this program count more than the environment: it may be that of a shell, which `srun -n 2
    // --pty bash` starts as a rank.
    const bool placed = o.processes > 0 && o.process >= 0;
    if (o.gpus > 0 || o.processes == 1 || (placed && (o.processes != f.world || o.process != f.rank))) {
        const std::string flag = o.gpus > 0 ? format("--gpus %d", o.gpus) : format("-pn %d", o.processes);
        if (!f.name.empty() && f.rank == 0) {
            fprintf(stderr, "note: %s does not count beside %s\n", f.said.c_str(), flag.c_str());
        }
        f = {"", 0, 1, "", ""};
    }
    die_if(f.wrong);
    comm_contradictions(o, f);
    if (o.gpus > 0) { comm_early_rank = 0; }
    if (o.gpus > 1) { comm_launch(o.gpus, argv); }
    if (o.init == CommInit::Mpi || (o.init == CommInit::Auto && f.name == "mpirun")) {
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
    if (o.init == CommInit::Fs) { comm_find_fs(job, o, f); }
    else { comm_find_tcp(job, o, comm_foreign_server(o, f), f); }
}
