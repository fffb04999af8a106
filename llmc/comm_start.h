/*
How the processes of a job find each other. Host only; with USE_MPI also by MPI.

    CommJob job;
    comm_find(&job, options, argc, argv);       // job.rank, job.world, connections to the other ranks

Rank 0 is the hub: every other rank has two connections to it, one for the watchdogs (control) and one for the
main threads (data). They are inherited (--gpus N, llmc/comm_launch.h) or made over TCP: rank 0 listens until
all have come, and never again. Whoever connects says hello with the job's secret; anybody else is hung up on
without an answer and disturbs nobody. Where rank 0 listens, the others learn
    tcp   from -ps HOST[:PORT]; or by themselves under SLURM and torchrun
    fs    from a file in a folder that all see
    mpi   by MPI_Bcast
The secret is random with fs and mpi. With tcp it is LLMC_JOB_SECRET, or else made of the scheduler's job id
and the user's number: that keeps apart jobs that meet by accident, and strangers who scan ports, but not
somebody who knows both numbers. Nothing is encrypted: the network between the hosts is trusted.
*/
#ifndef LLMC_COMM_START_H
#define LLMC_COMM_START_H

#include <ifaddrs.h>        // gives: getifaddrs
#include <net/if.h>         // gives: IFF_UP
#include <netdb.h>          // gives: getaddrinfo
#include <netinet/in.h>     // gives: IPPROTO_TCP
#include <netinet/tcp.h>    // gives: TCP_NODELAY
#include <sys/random.h>     // gives: getrandom
#ifdef USE_MPI
#include <mpi.h>            // gives: MPI_Init, MPI_Bcast
#endif

#include <algorithm>        // gives: std::sort
#include <functional>       // gives: std::function
#include <string>           // gives: std::string
#include <utility>          // gives: std::pair
#include <vector>           // gives: std::vector

#include "check.h"          // gives: die, format, shown, AtomicFile
#include "comm_launch.h"    // gives: comm_launch, comm_child, CommPage, comm_now

struct CommOptions {
    int gpus = 0;                               // start so many local ranks; 0: as the program was started
    const char *init = "auto", *server = "", *folder = "";
    int processes = 0, process = -1, per_node = 0;  // 0, -1, 0: not given
    int start_timeout_s = 120;
};

static const int kCommPort = 29547;
static const int kCommMaxWorld = 4096;

// ---- whole messages ----
// False: the peer has closed, or the time is over. A deadline of 0 is none.

static inline bool comm_wait_fd(int fd, short events, double deadline) {
    for (;;) {
        struct pollfd p = {fd, events, 0};
        const double left = deadline - comm_now();
        const int n = poll(&p, 1, deadline == 0 ? -1 : left > 0 ? (int)(left * 1e3) + 1 : 0);
        if (n > 0) { return true; }
        if (n == 0 || errno != EINTR) { return false; }
    }
}

static inline bool comm_read(int fd, void* data, size_t bytes, double deadline = 0) {
    for (size_t done = 0; done < bytes;) {
        if (deadline != 0 && !comm_wait_fd(fd, POLLIN, deadline)) { return false; }
        const ssize_t n = recv(fd, (char*)data + done, bytes - done, deadline != 0 ? MSG_DONTWAIT : 0);
        if (n > 0) { done += (size_t)n; }
        else if (n == 0 || (errno != EINTR && errno != EAGAIN)) { return false; }
    }
    return true;
}

static inline bool comm_write(int fd, const void* data, size_t bytes, double deadline = 0) {
    for (size_t done = 0; done < bytes;) {
        if (deadline != 0 && !comm_wait_fd(fd, POLLOUT, deadline)) { return false; }
        const int flags = MSG_NOSIGNAL | (deadline != 0 ? MSG_DONTWAIT : 0);
        const ssize_t n = send(fd, (const char*)data + done, bytes - done, flags);
        if (n >= 0) { done += (size_t)n; }
        else if (errno != EINTR && errno != EAGAIN) { return false; }
    }
    return true;
}

// ---- who is who ----

struct CommSecret { unsigned char bytes[32]; };

// The first message on every connection. Fixed size, so that a stranger can only send too little or garbage.
struct CommHello {
    char magic[8];
    CommSecret secret;
    int32_t link, rank, world, per_node;        // link: 0 control, 1 data
    int64_t pid, started;                       // started: tells a process from a later one of the same number
    char host[64], host_id[128];                // its name; what is the same for processes that see each other
};
static const char kCommMagic[8] = {'l', 'l', 'm', 'c', 'j', 'o', 'b', '1'};

// Rank 0's answer when all have come. ok = 0: somebody did not, and rank 0 has said so.
struct CommWelcome { int32_t ok, local_rank, local_world, deputy; CommHello hub; };

struct CommPeer { int control, data; CommHello who; };

struct CommJob {
    int rank = 0, world = 1, local_rank = 0, local_world = 1;
    int deputy = 1;                             // speaks if rank 0 is gone: of another host if there is one
    bool mpi = false;
    CommPage* page = nullptr;                   // of a local job
    std::vector<CommPeer> peers;                // rank 0: by rank, itself first; the others: rank 0 only
};

static inline std::string comm_first_line(const char* path) {
    char line[512] = "";
    FILE* f = fopen(path, "r");
    if (f && !fgets(line, sizeof(line), f)) { line[0] = '\0'; }
    if (f) { fclose(f); }
    return std::string(line, strcspn(line, "\n"));
}

// When a process of this host started, in clock ticks; 0: there is none.
static inline int64_t comm_started(int64_t pid) {
    const std::string stat = comm_first_line(format("/proc/%lld/stat", (long long)pid).c_str());
    size_t at = stat.rfind(')');                // the name before it may hold anything
    for (int field = 2; field < 22 && at != std::string::npos; field++) { at = stat.find(' ', at + 1); }
    return at == std::string::npos ? 0 : strtoll(stat.c_str() + at, nullptr, 10);
}

static inline CommHello comm_hello(const CommJob& job, const CommSecret& secret, int per_node) {
    CommHello h = {};
    memcpy(h.magic, kCommMagic, sizeof(h.magic));
    h.secret = secret;
    h.rank = job.rank;
    h.world = job.world;
    h.per_node = per_node;
    h.pid = getpid();
    h.started = comm_started(h.pid);
    gethostname(h.host, sizeof(h.host) - 1);
    char space[64] = "";                        // two containers of a host do not see each other's processes
    if (readlink("/proc/self/ns/pid", space, sizeof(space) - 1) < 0) { space[0] = '\0'; }
    const std::string id = comm_first_line("/proc/sys/kernel/random/boot_id") + space;
    snprintf(h.host_id, sizeof(h.host_id), "%s %s", id.c_str(), h.host);
    return h;
}

static inline bool comm_same_host(const CommHello& a, const CommHello& b) {
    return strncmp(a.host_id, b.host_id, sizeof(a.host_id)) == 0;
}

// The place of a rank among those of its host, in the order of ranks.
static inline CommWelcome comm_place(const std::vector<CommPeer>& peers, int rank) {
    const int world = (int)peers.size(), per_node = peers[0].who.per_node;
    CommWelcome w = {1, 0, 0, 1, peers[0].who};
    for (int r = 0; r < world; r++) {
        const bool here = per_node > 0 ? r / per_node == rank / per_node
                                       : comm_same_host(peers[r].who, peers[rank].who);
        w.local_rank += here && r < rank;
        w.local_world += here;
    }
    for (int r = world - 1; r > 0; r--) {       // the first on another host
        if (!comm_same_host(peers[r].who, peers[0].who)) { w.deputy = r; }
    }
    return w;
}

static inline void comm_take_place(CommJob* job, const CommWelcome& w) {
    job->local_rank = w.local_rank;
    job->local_world = w.local_world;
    job->deputy = w.deputy;
}

// Rank 0, when all have come: the others may go on.
static inline void comm_welcome(CommJob* job) {
    for (int r = 0; r < job->world; r++) {
        const CommWelcome w = comm_place(job->peers, r);
        if (r == 0) { comm_take_place(job, w); continue; }
        comm_write(job->peers[r].control, &w, sizeof(w), comm_now() + 5);   // who is gone: the watchdog tells
    }
}

// The others. False: the connection is lost. Ends the process if rank 0 has said why nothing comes of it.
static inline bool comm_await_welcome(CommJob* job, int control, int data, double deadline) {
    CommWelcome w;
    if (!comm_read(control, &w, sizeof(w), deadline)) { return false; }
    if (!w.ok) { _exit(EXIT_FAILURE); }
    comm_take_place(job, w);
    job->peers = {{control, data, w.hub}};
    return true;
}

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

// ---- TCP ----

// Rank 0 listens there, or tells the others to look there. host "": on all addresses.
struct CommAddress { std::string host, port; CommSecret secret; };

static inline void comm_set_up(int fd) {
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

// -ps HOST, HOST:PORT, [V6]:PORT
static inline CommAddress comm_parse_server(const std::string& text, int port, const CommSecret& secret) {
    CommAddress a = {text, std::to_string(port), secret};
    size_t colon = text.rfind(':');
    if (text[0] == '[') {
        const size_t close = text.find(']');
        a.host = text.substr(1, close == std::string::npos ? close : close - 1);
        colon = close != std::string::npos && text[close + 1] == ':' ? close + 1 : std::string::npos;
    } else if (colon != text.find(':')) { colon = std::string::npos; }      // a bare IPv6 address
    else { a.host = text.substr(0, colon); }
    if (colon != std::string::npos) { a.port = text.substr(colon + 1); }
    char* end;
    const long n = strtol(a.port.c_str(), &end, 10);
    if (a.host.empty() || a.port.empty() || *end || n < 1 || n > 65535) {
        die("-ps '%s' is no HOST or HOST:PORT with a port from 1 to 65535", text.c_str());
    }
    return a;
}

// A listening socket and its port. Only a host that names the loopback itself keeps it off the network: other
// names often stand for 127.0.1.1 in their own host's /etc/hosts.
static inline int comm_listen(const CommAddress& a, int* port) {
    const bool loopback = a.host == "localhost" || a.host == "::1" || a.host.compare(0, 4, "127.") == 0;
    int error = 0;
    for (int family : {AF_INET6, AF_INET}) {
        if (loopback && (family == AF_INET6) != (a.host == "::1")) { continue; }
        struct addrinfo hints = {}, *found;
        hints.ai_family = family;
        hints.ai_socktype = SOCK_STREAM;
        hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
        const char* host = !loopback ? nullptr : a.host == "localhost" ? "127.0.0.1" : a.host.c_str();
        if (getaddrinfo(host, a.port.c_str(), &hints, &found) != 0) { error = EADDRNOTAVAIL; continue; }
        const int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1, off = 0;
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
        if (family == AF_INET6) { setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off)); }
        const bool fine = fd >= 0 && bind(fd, found->ai_addr, found->ai_addrlen) == 0 && listen(fd, 512) == 0;
        if (!fine) { error = errno; }
        freeaddrinfo(found);
        if (fine) {
            struct sockaddr_storage self = {};
            socklen_t size = sizeof(self);
            getsockname(fd, (struct sockaddr*)&self, &size);
            *port = ntohs(family == AF_INET6 ? ((struct sockaddr_in6*)&self)->sin6_port
                                             : ((struct sockaddr_in*)&self)->sin_port);
            return fd;
        }
        if (fd >= 0) { close(fd); }
        if (error == EADDRINUSE) { break; }     // of IPv6 and IPv4 alike
    }
    die("rank 0 cannot listen on port %s: %s\nhint: another job may use it; choose another, -ps HOST:PORT",
        a.port.c_str(), strerror(error));
}

// -1: not now; *why says why.
static inline int comm_connect(const CommAddress& a, double limit, std::string* why) {
    struct addrinfo hints = {}, *found;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICSERV;
    const int failed = getaddrinfo(a.host.c_str(), a.port.c_str(), &hints, &found);
    if (failed) { *why = gai_strerror(failed); return -1; }
    int fd = -1;
    for (struct addrinfo* f = found; f && fd < 0; f = f->ai_next) {
        fd = socket(f->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        int error = 0;
        socklen_t size = sizeof(error);
        if (fd < 0 || (connect(fd, f->ai_addr, f->ai_addrlen) != 0 && errno != EINPROGRESS)) { error = errno; }
        else if (!comm_wait_fd(fd, POLLOUT, limit)) { error = ETIMEDOUT; }
        else { getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size); }
        if (error == 0) { continue; }
        *why = strerror(error);
        if (fd >= 0) { close(fd); }
        fd = -1;
    }
    freeaddrinfo(found);
    if (fd < 0) { return -1; }
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
    comm_set_up(fd);
    return fd;
}

// ---- rank 0 waits for the others ----

struct CommPending { int fd; double limit; size_t got; CommHello hello; };  // has connected, not said who it is

static inline bool comm_secret_fits(const CommHello& h, const CommSecret& secret) {
    unsigned differ = memcmp(h.magic, kCommMagic, sizeof(h.magic)) != 0;
    for (size_t i = 0; i < sizeof(secret.bytes); i++) { differ |= h.secret.bytes[i] ^ secret.bytes[i]; }
    return differ == 0;
}

// A whole hello has come. Takes the connection, or closes it; *note keeps what rank 0 should say of it if the
// ranks do not all come.
static inline void comm_receive(CommJob* job, CommPending* p, const CommSecret& secret, std::string* note) {
    CommHello& h = p->hello;
    bool fits = comm_secret_fits(h, secret);
    h.host[sizeof(h.host) - 1] = h.host_id[sizeof(h.host_id) - 1] = '\0';
    if (fits && h.world != job->world) {
        *note = format("; rank %d came as one of %d", h.rank, h.world);
        fits = false;
    }
    fits = fits && h.rank > 0 && h.rank < job->world && (h.link == 0 || h.link == 1);
    int* place = !fits ? nullptr : h.link ? &job->peers[h.rank].data : &job->peers[h.rank].control;
    if (place && *place >= 0) {
        *note = format("; two processes came as rank %d", h.rank);
        fits = false;
    }
    if (!fits || !comm_write(p->fd, kCommMagic, sizeof(kCommMagic), comm_now() + 1)) { close(p->fd); }
    else {
        *place = p->fd;
        job->peers[h.rank].who = h;
    }
    p->fd = -1;
}

static inline void comm_drop_left(CommPeer* peer) {     // a rank that went away while others are awaited
    struct pollfd p = {peer->control, POLLIN, 0};
    if (peer->control < 0 || poll(&p, 1, 0) != 1) { return; }
    close(peer->control);
    if (peer->data >= 0) { close(peer->data); }
    peer->control = peer->data = -1;
}

static inline std::string comm_missing(const CommJob& job) {
    std::string list;
    int count = 0;
    for (int r = 1; r < job.world; r++) {
        if (job.peers[r].control >= 0 && job.peers[r].data >= 0) { continue; }
        if (count++ < 8) { list += format("%s%d", list.empty() ? "" : ", ", r); }
    }
    if (count > 8) { list += format(" and %d more", count - 8); }
    return (count == 1 ? "rank " : "ranks ") + list;
}

// failed: to be done before the message that not all have come.
static inline void comm_accept_all(CommJob* job, int listener, const CommSecret& secret, int limit_s,
                                   const std::string& where, const std::function<void()>& failed) {
    const double deadline = comm_now() + limit_s;
    const size_t most = 64 + 2 * (size_t)job->world;    // strangers cannot use up the descriptors
    std::vector<CommPending> pending;
    std::string note;
    for (int left = job->world - 1; left > 0;) {
        std::vector<struct pollfd> polled = {{listener, POLLIN, 0}};
        for (const CommPending& p : pending) { polled.push_back({p.fd, POLLIN, 0}); }
        poll(polled.data(), polled.size(), 100);
        for (CommPending& p : pending) {
            const ssize_t n = recv(p.fd, (char*)&p.hello + p.got, sizeof(p.hello) - p.got, MSG_DONTWAIT);
            const bool waiting = n < 0 && (errno == EAGAIN || errno == EINTR);
            if (n > 0) { p.got += (size_t)n; }
            if (p.got == sizeof(p.hello)) { comm_receive(job, &p, secret, &note); }
            else if ((n <= 0 && !waiting) || comm_now() > p.limit) { close(p.fd); p.fd = -1; }
        }
        pending.erase(std::remove_if(pending.begin(), pending.end(),
                                     [](const CommPending& p) { return p.fd < 0; }), pending.end());
        if (polled[0].revents) {
            const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
            if (fd >= 0) {
                comm_set_up(fd);
                pending.push_back({fd, comm_now() + 5, 0, {}});
            }
            if (pending.size() > most) { close(pending[0].fd); pending.erase(pending.begin()); }
        }
        left = 0;
        for (int r = 1; r < job->world; r++) {
            comm_drop_left(&job->peers[r]);
            left += job->peers[r].control < 0 || job->peers[r].data < 0;
        }
        if (left == 0 || comm_now() < deadline) { continue; }
        const CommWelcome never = {};
        for (const CommPeer& p : job->peers) {
            if (p.control >= 0) { comm_write(p.control, &never, sizeof(never), comm_now() + 1); }
        }
        failed();
        die("%s of %d did not come to %s within %d s%s\nhint: --start-timeout sets the limit; were all of them "
            "started, with the same job secret?", comm_missing(*job).c_str(), job->world, where.c_str(), limit_s,
            note.c_str());
    }
    for (const CommPending& p : pending) { close(p.fd); }
    close(listener);
}

// ---- the others look for rank 0 ----

// One connection, known by rank 0; -1: not now.
static inline int comm_try(const CommAddress& a, CommHello hello, int link, double deadline, std::string* why) {
    const double limit = std::min(deadline, comm_now() + 3);
    const int fd = comm_connect(a, limit, why);
    if (fd < 0) { return -1; }
    hello.link = link;
    hello.secret = a.secret;
    char answer[sizeof(kCommMagic)];
    *why = "it does not answer as rank 0 of this job";
    if (comm_write(fd, &hello, sizeof(hello), limit + 5) && comm_read(fd, answer, sizeof(answer), limit + 5) &&
        memcmp(answer, kCommMagic, sizeof(answer)) == 0) { return fd; }
    close(fd);
    return -1;
}

// addresses() is asked again and again: a file may be an earlier run's, or not there yet.
static inline void comm_join(CommJob* job, const CommOptions& o, const std::string& where,
                             const std::function<std::vector<CommAddress>()>& addresses) {
    const double deadline = comm_now() + o.start_timeout_s;
    const CommHello hello = comm_hello(*job, CommSecret{}, o.per_node);
    std::string why = "nothing is there";
    while (comm_now() < deadline) {
        for (const CommAddress& a : addresses()) {
            const int control = comm_try(a, hello, 0, deadline, &why);
            if (control < 0) { continue; }
            const int data = comm_try(a, hello, 1, deadline, &why);
            // rank 0's own limit may end a little later, and then it has the better message
            if (data >= 0 && comm_await_welcome(job, control, data, deadline + 5)) { return; }
            close(control);
            if (data >= 0) { close(data); }
        }
        usleep(100000);
    }
    die("rank 0 was not found at %s within %d s: %s\nhint: --start-timeout sets the limit; was rank 0 started, "
        "with the same job secret?", where.c_str(), o.start_timeout_s, why.c_str());
}

// ---- where rank 0 is, as text: the file of fs, the broadcast of mpi ----

static inline std::string comm_describe(const CommHello& self, int port, const CommSecret& secret) {
    std::string text = format("%.8s\nport %d\nprocess %lld %lld\nhost %s\nsecret ", kCommMagic, port,
                              (long long)self.pid, (long long)self.started, self.host_id);
    for (unsigned char b : secret.bytes) { text += format("%02x", b); }
    struct ifaddrs* all = nullptr;
    if (getifaddrs(&all) != 0) { all = nullptr; }
    for (struct ifaddrs* a = all; a; a = a->ifa_next) {
        char name[256];
        if (!a->ifa_addr || !(a->ifa_flags & IFF_UP) || (a->ifa_flags & IFF_LOOPBACK)) { continue; }
        const int family = a->ifa_addr->sa_family;
        const socklen_t size = family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
        if (family != AF_INET && family != AF_INET6) { continue; }
        if (getnameinfo(a->ifa_addr, size, name, sizeof(name), nullptr, 0, NI_NUMERICHOST) != 0) { continue; }
        text += format("\naddress %s", name);
    }
    if (all) { freeifaddrs(all); }
    return text + "\nend\n";
}

// The value of a line; "" if it is not there.
static inline std::string comm_field(const std::string& text, const std::string& name, size_t* from = nullptr) {
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
    if (text.compare(0, 8, kCommMagic, 8) != 0 || hex.size() != 2 * sizeof(a.secret.bytes) ||
        text.size() < end.size() || text.compare(text.size() - end.size(), end.size(), end) != 0) { return list; }
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
    const std::string where = (a.host.find(':') == std::string::npos ? a.host : "[" + a.host + "]") + ":" + a.port;
    if (job->rank != 0) { comm_join(job, o, where, [&] { return std::vector<CommAddress>{a}; }); return; }
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
        comm_join(job, o, "the folder '" + folder + "'", [&] {
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
    for (const std::string& path : comm_list_files(folder)) {       // of a rank 0 of this host that was killed
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
    const uint32_t word = (uint32_t)(comm_random_secret().bytes[0] << 16) ^ (uint32_t)getpid();
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
    if (job->world == 1) { return; }
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
    comm_join(job, o, "the addresses that MPI gave", [&] { return all; });
}
#endif

// A rank of this machine's launcher: the connections are there.
static inline void comm_find_local(CommJob* job, const CommChild& child, const CommOptions& o) {
    unsetenv(kCommChild);
    job->rank = child.rank;
    job->world = child.world;
    job->page = comm_map_page(child.page);
    close(child.page);
    const double deadline = comm_now() + o.start_timeout_s;
    for (const auto& fds : {child.control, child.data}) {
        for (int fd : fds) { fcntl(fd, F_SETFD, FD_CLOEXEC); }
    }
    if (job->rank != 0) {
        const CommHello hello = comm_hello(*job, CommSecret{}, 0);
        if (!comm_write(child.control[0], &hello, sizeof(hello), deadline) ||
            !comm_await_welcome(job, child.control[0], child.data[0], deadline)) {
            die("rank 0 is gone before the start");
        }
        return;
    }
    comm_begin_hub(job, CommSecret{}, 0);
    for (int r = 1; r < job->world; r++) {
        CommPeer& p = job->peers[r];
        p = {child.control[r - 1], child.data[r - 1], {}};
        if (!comm_read(p.control, &p.who, sizeof(p.who), deadline)) {
            die("rank %d does not start\nhint: is there memory for %d ranks?", r, job->world);
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
        die("--gpus %d, but %s has started %d ranks already\nhint: leave one of the two out", o.gpus, f.name, f.world);
    }
    if (o.gpus > 0 && (!any || *o.server || *o.folder || o.processes > 0 || o.process >= 0 || o.per_node > 0)) {
        die("--gpus %d starts the ranks of this machine by itself\nhint: leave out -pi, -ps, -pf, -pn, -pr and -pg, "
            "or --gpus", o.gpus);
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
    if (host.empty()) { die("%s does not say where rank 0 runs\nhint: give -pi tcp -ps HOST[:PORT]", f.name); }
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
        die("this program was built without MPI\nhint: install OpenMPI (libopenmpi-dev) and make again, or start "
            "with --gpus N, -pi tcp or -pi fs");
#endif
    }
    job->rank = o.process >= 0 ? o.process : f.rank;
    job->world = o.processes > 0 ? o.processes : f.world;
    if (job->world == 1) { return; }
    if (comm_is(o.init, "fs")) { comm_find_fs(job, o); }
    else { comm_find_tcp(job, o, comm_foreign_server(o, f)); }
}

#endif  // LLMC_COMM_START_H
