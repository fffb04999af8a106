/*
Connections between the ranks of a job: whole messages, hellos, TCP. Host only.

    int port, listener = comm_listen(address, &port);       // rank 0, or its launcher
    comm_gather(&job, listener, key, limit_s, where);       // rank 0: returns when all ranks have come
    comm_join(&job, limit_s, where, addresses);             // the other ranks

Rank 0 is the hub: every other rank has two connections to it, one for the watchdogs (control) and one for the
main threads (data). Rank 0 listens until all have come, and never again. A rank's first message is a hello
with the job's key. Rank 0 closes any other connection without an answer.

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

#include "../check.h"       // gives: die, format
#include "../numbers.h"     // gives: parse_int

static const int kCommMaxWorld = 4096;

static inline double comm_now() {               // seconds; the machine's suspended time does not count
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// ---- whole messages ----
// These return false if the peer has closed or the deadline has passed. A deadline of 0 means none.

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

// The first message on every connection. Its size is fixed: a stranger can only send too little or garbage.
struct CommHello {
    char magic[8];
    uint64_t key;
    int32_t link, rank, world, pid;             // link: 0 control, 1 data; pid: for messages
    char host[64];
};
static const char kCommMagic[8] = {'l', 'l', 'm', 'c', 'j', 'o', 'b', '2'};
// Rank 0's answer to a hello. When all ranks have come, rank 0 sends its own hello; if it gives up, zeros.
static const char kCommKnown[8] = {'y', 'o', 'u', ' ', 'f', 'i', 't', '2'};

struct CommPeer { int control, data; CommHello who; };

struct CommPage;
struct CommJob {
    int rank = 0, world = 1;
    bool mpi = false;
    CommPage* page = nullptr;                   // only in a job that a launcher started
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

static inline void comm_set_up(int fd) {
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

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

// Returns a listening socket and its port. Only localhost, ::1 and 127.* bind to the loopback: the host's
// name does not, because /etc/hosts often maps it to 127.0.1.1.
static inline int comm_listen(const CommAddress& a, int* port) {
    const std::string own = comm_host(a);
    std::vector<std::string> hosts = {"::", "0.0.0.0"};     // "::" serves both families; else IPv4 alone
    if (own == "::1" || own.compare(0, 4, "127.") == 0) { hosts = {own}; }
    int error = EADDRNOTAVAIL;
    for (const std::string& host : hosts) {
        struct addrinfo hints = {}, *found;
        hints.ai_socktype = SOCK_STREAM;
        hints.ai_flags = AI_PASSIVE | AI_NUMERICHOST | AI_NUMERICSERV;
        if (getaddrinfo(host.c_str(), a.port.c_str(), &hints, &found) != 0) { continue; }
        const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1, off = 0;
        error = fd < 0 ? errno : 0;
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
        if (!error && bind(fd, found->ai_addr, found->ai_addrlen) != 0) { error = errno; }
        if (!error && listen(fd, 512) != 0) { error = errno; }
        freeaddrinfo(found);
        if (!error) {
            struct sockaddr_in6 self = {};      // sockaddr_in has its port at the same offset
            socklen_t size = sizeof(self);
            getsockname(fd, (struct sockaddr*)&self, &size);
            *port = ntohs(self.sin6_port);
            return fd;
        }
        if (fd >= 0) { close(fd); }
        if (error == EADDRINUSE) { break; }     // a taken port is taken for both families
    }
    die("rank 0 cannot listen on port %s: %s\nhint: another job may use it; choose another, -ps HOST:PORT",
        a.port.c_str(), strerror(error));
}

// Returns -1 if it fails for now; *why has the reason.
static inline int comm_connect(const CommAddress& a, double limit, std::string* why) {
    struct addrinfo hints = {}, *found;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICSERV;
    const int failed = getaddrinfo(comm_host(a).c_str(), a.port.c_str(), &hints, &found);
    if (failed) { *why = gai_strerror(failed); return -1; }
    int fd = -1;
    for (struct addrinfo* f = found; f && fd < 0; f = f->ai_next) {
        fd = socket(f->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd < 0) { *why = strerror(errno); continue; }
        const int on = 1;                       // lets rank 0 listen on this end's port
        const double left = std::max(0.1, limit - comm_now());
        const struct timeval wait = {(time_t)left, (suseconds_t)(left * 1e6) % 1000000}, any = {};
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof(wait));       // limits connect
        if (connect(fd, f->ai_addr, f->ai_addrlen) != 0) {
            *why = strerror(errno == EINPROGRESS ? ETIMEDOUT : errno);
            close(fd);
            fd = -1;
            continue;
        }
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &any, sizeof(any));
        comm_set_up(fd);
    }
    freeaddrinfo(found);
    return fd;
}

// ---- rank 0 waits for the others ----

static const char kCommApart[] = "jobs that share a port or a folder need different values of LLMC_JOB_ID";

// A connection whose hello is not whole yet.
struct CommPending { int fd; double limit; };

// Takes or closes a connection. Returns false while its hello is incomplete. *note is added to the error
// message if some ranks never come.
static inline bool comm_receive(CommJob* job, const CommPending& p, uint64_t key, std::string* note) {
    CommHello h;
    const ssize_t n = recv(p.fd, &h, sizeof(h), MSG_PEEK | MSG_DONTWAIT);
    const bool waiting = n < 0 ? errno == EAGAIN || errno == EINTR : n > 0 && n < (ssize_t)sizeof(h);
    if (waiting && comm_now() < p.limit) { return false; }
    int* place = nullptr;
    if (n == sizeof(h) && memcmp(h.magic, kCommMagic, sizeof(h.magic)) == 0 && h.key == key) {
        comm_read(p.fd, &h, sizeof(h));
        h.host[sizeof(h.host) - 1] = '\0';
        if (h.world != job->world) { *note = format("; rank %d came as one of %d", h.rank, h.world); }
        else if (h.rank > 0 && h.rank < job->world && (h.link == 0 || h.link == 1)) {
            place = h.link ? &job->peers[h.rank].data : &job->peers[h.rank].control;
            if (*place >= 0) { *note = format("; two processes came as rank %d", h.rank); }
        }
    }
    if (!place || *place >= 0 || !comm_write(p.fd, kCommKnown, sizeof(kCommKnown), comm_now() + 1)) {
        close(p.fd);
        return true;
    }
    *place = p.fd;
    job->peers[h.rank].who = h;
    return true;
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

// Rank 0 needs two descriptors per rank, kCommStrangers for unknown connections, and 128 for all else.
static const size_t kCommStrangers = 64;
static inline void comm_need_files(int world) {
    const uint64_t needed = 2 * (uint64_t)world + kCommStrangers + 128, most = allow_most_files();
    if (most < needed) {
        die("%d ranks take %llu open files, and this process may have %llu\nhint: raise the hard limit, "
            "ulimit -Hn", world, (unsigned long long)needed, (unsigned long long)most);
    }
}

// Accepts waiting connections. A connection without a hello is closed after five seconds, or earlier if it is
// the oldest of more than kCommStrangers.
static inline void comm_accept(int listener, std::vector<CommPending>* pending) {
    for (size_t i = 0; i < kCommStrangers; i++) {
        const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
        if (fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)) {
            die("rank 0 cannot take the connections of all ranks: %s\nhint: ulimit -n says how many files a "
                "process may open", strerror(errno));
        }
        if (fd < 0) { return; }
        comm_set_up(fd);
        pending->push_back({fd, comm_now() + 5});
        if (pending->size() <= kCommStrangers) { continue; }
        close(pending->front().fd);
        pending->erase(pending->begin());
    }
}

// After ten seconds of waiting, says once for whom.
static inline void comm_tell_wait(bool* told, double deadline, int limit_s, const char* whom,
                                  const std::string& where) {
    if (*told || comm_now() < deadline - limit_s + 10) { return; }
    fprintf(stderr, "note: still waiting for %s, at %s, for %d s in all\n", whom,
            shown(where).c_str(), limit_s);
    *told = true;
}

// Waits for all ranks and tells them to go on. file: the rendezvous file, removed at the end.
static inline void comm_gather(CommJob* job, int listener, uint64_t key, int limit_s,
                               const std::string& where, const std::string& file = "") {
    comm_need_files(job->world);
    const double deadline = comm_now() + limit_s;
    int left = job->world - 1;
    job->peers.assign(job->world, CommPeer{-1, -1, {}});
    job->peers[0].who = comm_hello(*job);
    fcntl(listener, F_SETFL, O_NONBLOCK);
    std::vector<CommPending> pending;
    std::string note, missing;
    for (bool told = false; left > 0 && comm_now() < deadline;) {
        struct pollfd p = {listener, POLLIN, 0};
        poll(&p, 1, 20);
        comm_accept(listener, &pending);
        pending.erase(std::remove_if(pending.begin(), pending.end(), [&](const CommPending& one) {
            return comm_receive(job, one, key, &note);
        }), pending.end());
        missing = "";
        left = 0;
        for (int r = 1; r < job->world; r++) {
            if (comm_has_come(&job->peers[r])) { continue; }
            if (left++ < 8) { missing += format(left == 1 ? "%d" : ", %d", r); }
        }
        if (left > 8) { missing += format(" and %d more", left - 8); }
        const std::string ranks = (left == 1 ? "rank " : "ranks ") + missing;
        if (left > 0) { comm_tell_wait(&told, deadline, limit_s, ranks.c_str(), where); }
    }
    for (const CommPending& p : pending) { close(p.fd); }
    close(listener);
    if (!file.empty()) { unlink(file.c_str()); }
    const CommHello welcome = left ? CommHello{} : job->peers[0].who;
    for (const CommPeer& p : job->peers) {      // write errors are ignored: the watchdog reports dead ranks
        if (p.control >= 0) { comm_write(p.control, &welcome, sizeof(welcome), comm_now() + 5); }
    }
    if (left == 0) { return; }
    die("rank%s %s of %d did not come to %s within %d s%s\nhint: were all of them started? %s",
        left == 1 ? "" : "s", missing.c_str(), job->world, where.c_str(), limit_s, note.c_str(), kCommApart);
}

// ---- the others look for rank 0 ----

// Connects and says hello; returns -1 if rank 0 does not answer now. If nobody listens, TCP may connect a
// socket to itself. It then reads its own hello, which differs from kCommKnown.
static inline int comm_try(const CommAddress& a, CommHello hello, int link, double deadline,
                           std::string* why) {
    const double limit = std::min(deadline, comm_now() + 3);
    const int fd = comm_connect(a, limit, why);
    if (fd < 0) { return -1; }
    hello.link = link;
    hello.key = a.key;
    char answer[sizeof(kCommKnown)];
    *why = "it does not answer as rank 0 of this job";
    const bool known = comm_write(fd, &hello, sizeof(hello), limit + 5) &&
                       comm_read(fd, answer, sizeof(answer), limit + 5) &&
                       memcmp(answer, kCommKnown, sizeof(answer)) == 0;
    if (known) { return fd; }
    close(fd);
    return -1;
}

// Calls addresses() before each attempt: the rendezvous file may not exist yet, or be an earlier run's.
static inline void comm_join(CommJob* job, int limit_s, const std::string& where,
                             const std::function<std::vector<CommAddress>()>& addresses) {
    const double deadline = comm_now() + limit_s;
    std::string why = "nothing is there";
    CommHello hub;
    for (bool told = false; comm_now() < deadline;) {
        comm_tell_wait(&told, deadline, limit_s, "rank 0", where);
        for (const CommAddress& a : addresses()) {
            const int control = comm_try(a, comm_hello(*job), 0, deadline, &why);
            if (control < 0) { continue; }
            const int data = comm_try(a, comm_hello(*job), 1, deadline, &why);
            // Rank 0's time limit may end a little later, and its message says more.
            if (data >= 0 && comm_read(control, &hub, sizeof(hub), deadline + 5)) {
                if (hub.magic[0] == '\0') { _exit(EXIT_FAILURE); }
                hub.host[sizeof(hub.host) - 1] = '\0';
                job->peers = {{control, data, hub}};
                return;
            }
            close(control);
            if (data >= 0) { close(data); }
        }
        usleep(100000);
    }
    die("rank 0 was not found at %s within %d s: %s\nhint: was it started? %s", where.c_str(), limit_s,
        why.c_str(), kCommApart);
}
