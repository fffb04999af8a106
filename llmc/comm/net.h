/*
Connections between the ranks of a job: whole messages, hellos, TCP. Host only.

    int port, listener = comm_listen(address, &port);       // rank 0
    comm_accept_all(&job, listener, secret, limit_s, where, [] {});
    comm_welcome(&job);                                     // all have come: they may go on
    comm_join(&job, limit_s, per_node, where, addresses);   // the others

Rank 0 is the hub: every other rank has two connections to it, one for the watchdogs (control) and one for the
main threads (data). Rank 0 listens until all have come, and never again. Whoever connects says hello with the
job's secret; anybody else is hung up on without an answer and disturbs nobody.
*/
#ifndef LLMC_COMM_NET_H
#define LLMC_COMM_NET_H

#include <netdb.h>          // gives: getaddrinfo
#include <netinet/in.h>     // gives: IPPROTO_TCP
#include <netinet/tcp.h>    // gives: TCP_NODELAY

#include <algorithm>        // gives: std::remove_if
#include <functional>       // gives: std::function
#include <string>           // gives: std::string
#include <vector>           // gives: std::vector

#include "../check.h"       // gives: die, format
#include "launch.h"         // gives: CommPage, comm_now

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
    int64_t pid, started;                       // started: tells it from a later one of its number
    char host[64], host_id[128];                // its name; the same for processes that see each other
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
    bool whole = true;
    if (text[0] == '[') {
        const size_t close = text.find(']');
        whole = close != std::string::npos && (close + 1 == text.size() || text[close + 1] == ':');
        a.host = text.substr(1, whole ? close - 1 : 0);
        colon = whole && close + 1 < text.size() ? close + 1 : std::string::npos;
    } else if (colon != text.find(':')) { colon = std::string::npos; }      // a bare IPv6 address
    else { a.host = text.substr(0, colon); }
    if (colon != std::string::npos) { a.port = text.substr(colon + 1); }
    char* end;
    const long n = strtol(a.port.c_str(), &end, 10);
    if (!whole || a.host.empty() || a.port.empty() || *end || n < 1 || n > 65535) {
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

// Where nobody listens, the system may choose the very port that is called for the near end of a connection:
// then the caller meets himself, who has the right secret.
static inline bool comm_meets_itself(int fd) {
    struct sockaddr_storage ends[2] = {};
    socklen_t sizes[2] = {sizeof(ends[0]), sizeof(ends[1])};
    return getsockname(fd, (struct sockaddr*)&ends[0], &sizes[0]) == 0 &&
           getpeername(fd, (struct sockaddr*)&ends[1], &sizes[1]) == 0 &&
           sizes[0] == sizes[1] && memcmp(&ends[0], &ends[1], sizes[0]) == 0;
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
        const int on = 1;                       // rank 0 may listen even on the port of the near end
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
        int error = 0;
        socklen_t size = sizeof(error);
        const bool begun = fd >= 0 && (connect(fd, f->ai_addr, f->ai_addrlen) == 0 || errno == EINPROGRESS);
        if (!begun) { error = errno; }
        else if (!comm_wait_fd(fd, POLLOUT, limit)) { error = ETIMEDOUT; }
        else { getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size); }
        if (error == 0 && !comm_meets_itself(fd)) { continue; }
        *why = error ? strerror(error) : "nobody listens there";
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

// Has connected and not yet said who it is.
struct CommPending { int fd; double limit; size_t got; CommHello hello; };

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
        die("%s of %d did not come to %s within %d s%s\nhint: --start-timeout sets the limit; were all of "
            "them started, with the same job secret?",
            comm_missing(*job).c_str(), job->world, where.c_str(), limit_s, note.c_str());
    }
    for (const CommPending& p : pending) { close(p.fd); }
    close(listener);
}

// ---- the others look for rank 0 ----

// One connection, known by rank 0; -1: not now.
static inline int comm_try(const CommAddress& a, CommHello hello, int link, double deadline,
                           std::string* why) {
    const double limit = std::min(deadline, comm_now() + 3);
    const int fd = comm_connect(a, limit, why);
    if (fd < 0) { return -1; }
    hello.link = link;
    hello.secret = a.secret;
    char answer[sizeof(kCommMagic)];
    *why = "it does not answer as rank 0 of this job";
    const bool known = comm_write(fd, &hello, sizeof(hello), limit + 5) &&
                       comm_read(fd, answer, sizeof(answer), limit + 5) &&
                       memcmp(answer, kCommMagic, sizeof(answer)) == 0;
    if (known) { return fd; }
    close(fd);
    return -1;
}

// addresses() is asked again and again: a file may be an earlier run's, or not there yet.
static inline void comm_join(CommJob* job, int limit_s, int per_node, const std::string& where,
                             const std::function<std::vector<CommAddress>()>& addresses) {
    const double deadline = comm_now() + limit_s;
    const CommHello hello = comm_hello(*job, CommSecret{}, per_node);
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
    die("rank 0 was not found at %s within %d s: %s\nhint: --start-timeout sets the limit; was rank 0 "
        "started, with the same job secret?", where.c_str(), limit_s, why.c_str());
}

#endif  // LLMC_COMM_NET_H
