/*
Connections between the ranks of a job: whole messages, hellos, TCP. Host only.

    int port, listener = comm_listen(address, &port);           // rank 0, or its launcher
    die_if(comm_gather(&job, listener, key, limit_s, where));   // rank 0: returns when all ranks have come
    comm_join(&job, limit_s, where, addresses);                 // the other ranks

Rank 0 is the hub: every other rank has two connections to it, one for the watchdogs (control) and one for the
main threads (data). They meet like this:

    rank r                                      rank 0
    connects, says hello on each connection ->  checks key, rank and world
                                            <-  kCommKnown, or closes the connection
    waits                                       waits for the others, then listens no more
                                            <-  its own hello on control: all have come; or zeros: it gives up

The key tells jobs apart. It is no secret and nothing is encrypted: like NCCL and torchrun, a job trusts its
network. A message from the network can at worst end this process. It never names a process to kill or a size
to allocate unchecked.
*/
#pragma once

#include <netdb.h>          // gives: getaddrinfo
#include <netinet/in.h>     // gives: IPPROTO_TCP
#include <netinet/tcp.h>    // gives: TCP_NODELAY
#include <poll.h>           // gives: poll
#include <sys/socket.h>     // gives: recv, send

#include "../checked_files.h" // gives: die, format, allow_most_files
#include "../numbers.h"     // gives: parse_int

static const int kCommMaxWorld = 4096;

static inline double comm_now() {               // seconds; the machine's suspended time does not count
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
static inline void comm_sleep(double seconds) { usleep((useconds_t)(seconds * 1e6)); }

// ---- whole messages ----
// These return false if the peer has closed, or after the socket's time limit.

static inline bool comm_read(int fd, void* data, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        const ssize_t n = recv(fd, (char*)data + done, bytes - done, 0);
        if (n > 0) { done += (size_t)n; }
        else if (n == 0 || errno != EINTR) { return false; }
    }
    return true;
}

static inline bool comm_write(int fd, const void* data, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        const ssize_t n = send(fd, (const char*)data + done, bytes - done, MSG_NOSIGNAL);
        if (n >= 0) { done += (size_t)n; }
        else if (errno != EINTR) { return false; }
    }
    return true;
}

// Limits connect and each recv and send; 0: no limit.
static inline void comm_limit(int fd, double seconds) {
    const struct timeval limit = {(time_t)seconds, (suseconds_t)(seconds * 1e6) % 1000000};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
}

static inline void comm_set(int fd, int level, int option, int value) {
    setsockopt(fd, level, option, &value, sizeof(value));
}

// ---- who is who ----

// The first message on every connection. Its size is fixed: a stranger can only send too little or garbage.
struct CommHello {
    char magic[8];
    uint64_t key;
    int32_t link, rank, world, pid;             // link: 0 control, 1 data; pid: for messages
    char host[64];
};
static const char kCommMagic[8] = {'l', 'l', 'm', 'c', 'j', 'o', 'b', '3'};
static const char kCommKnown[8] = {'y', 'o', 'u', ' ', 'f', 'i', 't', '3'};

struct CommPeer { int control, data; CommHello who; };

struct CommJob {
    int rank = 0, world = 1;
    bool mpi = false;
    std::vector<CommPeer> peers;                // on rank 0: all ranks; on the others: rank 0 only
};

static inline CommHello comm_hello(const CommJob& job) {
    CommHello h = {};
    memcpy(h.magic, kCommMagic, sizeof(h.magic));
    h.rank = job.rank;
    h.world = job.world;
    h.pid = (int32_t)getpid();
    gethostname(h.host, sizeof(h.host) - 1);
    return h;
}

// ---- TCP ----

// Where rank 0 listens and the others connect. An empty host stands for all addresses.
struct CommAddress { std::string host, port; uint64_t key; };

// -ps HOST, HOST:PORT, [V6]:PORT
static inline CommAddress comm_parse_server(const std::string& text, int port, uint64_t key) {
    CommAddress a = {text, std::to_string(port), key};
    const bool brackets = text[0] == '[';
    const size_t close = brackets ? text.rfind(']') : 0, colon = text.find(':', close);
    const bool bare = !brackets && text.rfind(':') != colon;        // an IPv6 address without a port
    if (colon != std::string::npos && !bare) {
        a.host = text.substr(0, colon);
        a.port = text.substr(colon + 1);
    }
    if (brackets && a.host.back() == ']') { a.host = a.host.substr(1, a.host.size() - 2); }
    int64_t n;
    if (a.host.empty() || a.host[0] == '[' || !parse_int(a.port, &n) || n < 1 || n > 65535) {
        die("-ps '%s' is no HOST or HOST:PORT with a port from 1 to 65535", text.c_str());
    }
    return a;
}

// localhost is a number here, so that it needs no /etc/hosts, and both ends mean the same one.
static inline std::string comm_host(const CommAddress& a) {
    return a.host == "localhost" ? "127.0.0.1" : a.host;
}

// A socket with which use() succeeds, for one of the host's addresses; -1: none, and *why has the reason.
static inline int comm_socket(const std::string& host, const std::string& port, int flags, std::string* why,
                              const std::function<bool(int, const struct addrinfo&)>& use) {
    struct addrinfo hints = {}, *found;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = flags | AI_NUMERICSERV;
    const int failed = getaddrinfo(host.c_str(), port.c_str(), &hints, &found);
    if (failed) { *why = gai_strerror(failed); return -1; }
    int fd = -1;
    for (struct addrinfo* f = found; f && fd < 0; f = f->ai_next) {
        fd = socket(f->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        comm_set(fd, SOL_SOCKET, SO_REUSEADDR, 1);      // for a near end, too: rank 0 may listen on its port
        comm_set(fd, IPPROTO_IPV6, IPV6_V6ONLY, 0);
        comm_set(fd, IPPROTO_TCP, TCP_NODELAY, 1);      // accepted connections inherit it
        if (fd >= 0 && use(fd, *f)) { break; }
        *why = strerror(errno == EINPROGRESS ? ETIMEDOUT : errno);
        if (fd >= 0) { close(fd); }
        fd = -1;
    }
    freeaddrinfo(found);
    return fd;
}

// Returns a listening socket and its port. Only localhost, ::1 and 127.* bind to the loopback: the host's
// name does not, because /etc/hosts often maps it to 127.0.1.1.
static inline int comm_listen(const CommAddress& a, int* port) {
    const std::string own = comm_host(a);
    std::vector<std::string> hosts = {"::", "0.0.0.0"};     // "::" serves both families; else IPv4 alone
    if (own == "::1" || own.compare(0, 4, "127.") == 0) { hosts = {own}; }
    std::string why;
    for (const std::string& host : hosts) {
        const int fd = comm_socket(host, a.port, AI_PASSIVE | AI_NUMERICHOST, &why,
                                   [](int fd, const struct addrinfo& f) {
            return bind(fd, f.ai_addr, f.ai_addrlen) == 0 && listen(fd, 512) == 0;
        });
        if (fd < 0) { continue; }
        struct sockaddr_in6 self = {};          // sockaddr_in has its port at the same offset
        socklen_t size = sizeof(self);
        getsockname(fd, (struct sockaddr*)&self, &size);
        *port = ntohs(self.sin6_port);
        return fd;
    }
    die("rank 0 cannot listen on port %s: %s\nhint: another job may use it; choose another, -ps HOST:PORT",
        a.port.c_str(), why.c_str());
}

static inline int comm_connect(const CommAddress& a, std::string* why) {        // -1: not now
    return comm_socket(comm_host(a), a.port, 0, why, [](int fd, const struct addrinfo& f) {
        comm_limit(fd, 5);
        return connect(fd, f.ai_addr, f.ai_addrlen) == 0;
    });
}

// ---- rank 0 waits for the others ----

static const char kCommApart[] = "jobs that share a port or a folder need different values of LLMC_JOB_ID";
static const double kCommHelloLimit = 0.2;      // seconds: who has connected says hello at once

// Takes a connection, or closes it. *note is added to the error message if some ranks never come.
static inline void comm_receive(CommJob* job, int fd, uint64_t key, std::string* note) {
    CommHello h;
    int* place = nullptr;
    comm_limit(fd, kCommHelloLimit);
    if (comm_read(fd, &h, sizeof(h)) && memcmp(h.magic, kCommMagic, sizeof(h.magic)) == 0 && h.key == key) {
        h.host[sizeof(h.host) - 1] = '\0';
        if (h.world != job->world) { *note = format("; rank %d came as one of %d", h.rank, h.world); }
        else if (h.rank > 0 && h.rank < job->world && (h.link == 0 || h.link == 1)) {
            place = h.link ? &job->peers[h.rank].data : &job->peers[h.rank].control;
            if (*place >= 0) { *note = format("; two processes came as rank %d", h.rank); }
        }
    }
    if (!place || *place >= 0 || !comm_write(fd, kCommKnown, sizeof(kCommKnown))) {
        close(fd);
        return;
    }
    comm_limit(fd, 0);
    *place = fd;
    job->peers[h.rank].who = h;
}

static inline bool comm_has_come(CommPeer* peer) {      // false again if the rank has left since
    struct pollfd p = {peer->control, POLLIN, 0};
    if (peer->control >= 0 && poll(&p, 1, 0) == 1) {
        close(peer->control);
        if (peer->data >= 0) { close(peer->data); }
        peer->control = peer->data = -1;
    }
    return peer->control >= 0 && peer->data >= 0;
}

// Who has not come: "rank 3", "ranks 1, 2 and 3"; "": all are there.
static inline std::string comm_missing(CommJob* job) {
    std::string ranks;
    int count = 0;
    for (int r = 1; r < job->world; r++) {
        if (comm_has_come(&job->peers[r])) { continue; }
        if (count++ < 8) { ranks += format(count == 1 ? "%d" : ", %d", r); }
    }
    if (count > 8) { ranks += format(" and %d more", count - 8); }
    return count == 0 ? "" : (count == 1 ? "rank " : "ranks ") + ranks;
}

// After ten seconds of waiting, says once for whom.
static inline void comm_tell_wait(double deadline, int limit_s, const std::string& whom,
                                  const std::string& where) {
    static bool told = false;
    if (told || comm_now() < deadline - limit_s + 10) { return; }
    fprintf(stderr, "note: still waiting for %s, at %s, for %d s in all\n", whom.c_str(),
            shown(where).c_str(), limit_s);
    told = true;
}

// Waits for all ranks and tells them to go on. Returns the error, or "".
static inline std::string comm_gather(CommJob* job, int listener, uint64_t key, int limit_s,
                                      const std::string& where) {
    const uint64_t needed = 2 * (uint64_t)job->world + 128, most = allow_most_files();
    if (most < needed) {
        return format("%d ranks take %llu open files, and this process may have %llu\nhint: raise the hard "
                      "limit, ulimit -Hn", job->world, (unsigned long long)needed, (unsigned long long)most);
    }
    const double deadline = comm_now() + limit_s;
    job->peers.assign(job->world, CommPeer{-1, -1, {}});
    job->peers[0].who = comm_hello(*job);
    fcntl(listener, F_SETFL, O_NONBLOCK);
    std::string note, missing;
    while (!(missing = comm_missing(job)).empty() && comm_now() < deadline) {
        comm_tell_wait(deadline, limit_s, missing, where);
        struct pollfd p = {listener, POLLIN, 0};
        poll(&p, 1, 20);
        for (int fd = 0; fd >= 0 && comm_now() < deadline;) {
            fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
            if (fd >= 0) { comm_receive(job, fd, key, &note); }
        }
    }
    close(listener);
    const CommHello welcome = missing.empty() ? job->peers[0].who : CommHello{};
    for (const CommPeer& p : job->peers) {      // write errors are ignored: the watchdog reports dead ranks
        if (p.control >= 0) { comm_write(p.control, &welcome, sizeof(welcome)); }
    }
    if (missing.empty()) { return ""; }
    return format("%s of %d did not come to %s within %d s%s\nhint: were all of them started? %s",
                  missing.c_str(), job->world, where.c_str(), limit_s, note.c_str(), kCommApart);
}

// ---- the others look for rank 0 ----

// Says hello on both connections, and waits until rank 0 has all ranks. False: not now. If nobody listens,
// TCP may connect a socket to itself. It then reads its own hello, which differs from kCommKnown.
static inline bool comm_try(CommJob* job, const CommAddress& a, double deadline, std::string* why) {
    CommHello hello = comm_hello(*job), hub;
    int links[2] = {-1, -1};
    bool known = true;
    hello.key = a.key;
    for (hello.link = 0; known && hello.link < 2; hello.link++) {
        char answer[sizeof(kCommKnown)];
        const int fd = links[hello.link] = comm_connect(a, why);
        if (fd >= 0) { *why = "it does not answer as rank 0 of this job"; }
        known = fd >= 0 && comm_write(fd, &hello, sizeof(hello)) && comm_read(fd, answer, sizeof(answer)) &&
                memcmp(answer, kCommKnown, sizeof(answer)) == 0;
    }
    // Rank 0's time limit may end a little later, and its message says more.
    comm_limit(links[0], deadline + 5 - comm_now());
    if (!known || !comm_read(links[0], &hub, sizeof(hub))) {
        for (int fd : links) { if (fd >= 0) { close(fd); } }
        return false;
    }
    if (hub.magic[0] == '\0') { _exit(EXIT_FAILURE); }
    hub.host[sizeof(hub.host) - 1] = '\0';
    for (int fd : links) { comm_limit(fd, 0); }
    job->peers = {{links[0], links[1], hub}};
    return true;
}

// Calls addresses() before each attempt: the rendezvous file may not exist yet, or be an earlier run's.
static inline void comm_join(CommJob* job, int limit_s, const std::string& where,
                             const std::function<std::vector<CommAddress>()>& addresses) {
    const double deadline = comm_now() + limit_s;
    std::string why = "nothing is there";
    for (; comm_now() < deadline; usleep(100000)) {
        if (limit_s > 60) { comm_tell_wait(deadline, limit_s, "rank 0", where); }   // else a launcher watches
        for (const CommAddress& a : addresses()) { if (comm_try(job, a, deadline, &why)) { return; } }
    }
    die("rank 0 was not found at %s within %d s: %s\nhint: was it started? %s", where.c_str(), limit_s,
        why.c_str(), kCommApart);
}
