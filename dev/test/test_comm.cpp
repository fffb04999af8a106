/*
Tests of jobs of several processes: comm/comm.h and what it includes. Each case is a small program of ranks,
run by this very program (`test_comm rank PROGRAM FOLDER ...`), beside other cases, since most of the time
they wait. The limits of the watchdog are lowered in those cases that are about them, and raised in all
others: beside other suites a rank may not get a core for seconds. What is tested is never how long something
took. test_ranks.py has jobs that train.

    make build/test_comm && build/test_comm
    build/test_comm die                 only the cases whose name holds the word
*/
#include <dlfcn.h>                      // gives: dlsym
#include <math.h>                       // gives: fabs

#include <map>                          // gives: std::map

#include "llmc/comm/comm.h"             // gives: what is tested
#include "child.h"                      // gives: folder; of a rank, its case's
#include "test.h"                       // gives: TEST, CHECK

// No name is looked up here, in this process and in each rank: there may be no /etc/hosts, no name server.
extern "C" int getaddrinfo(const char* host, const char* port, const struct addrinfo* wanted,
                           struct addrinfo** found) {
    static const auto real = (decltype(&getaddrinfo))dlsym(RTLD_NEXT, "getaddrinfo");
    struct addrinfo numbers = *wanted;
    numbers.ai_flags |= AI_NUMERICHOST;
    return real(host, port, &numbers, found);
}

// ---- the ranks' programs ----

static volatile sig_atomic_t interrupted = 0;      // by this signal
static int victim = -1;                 // the rank that does what the program is about; or
enum { NONE = -1, ALL = -2, OTHERS = -3 };      // no rank, each one, all but rank 0

static bool is_victim(int rank) {
    return victim == ALL || (victim == OTHERS && rank != 0) || victim == rank;
}

// Byte i of what rank `from` has for rank `to`.
static char pattern(int from, int to, size_t i) { return (char)(from * 31 + to * 17 + i * 7 + i / 251); }

static void rank_collectives() {
    const int world = comm.world, me = comm.rank;
    const size_t most = world == 3 ? 5000003 : 300001;      // both are more than a socket holds
    for (size_t bytes : {(size_t)0, (size_t)1, (size_t)3, (size_t)4097, most}) {
        std::vector<char> one(bytes + 1, 'x'), all(world * bytes + 1, 'x'), to(world * bytes), from(all);
        for (size_t i = 0; i < bytes && me == 0; i++) { one[i] = pattern(7, 9, i); }
        comm_broadcast(one.data(), bytes);
        for (size_t i = 0; i < bytes; i++) {
            all[me * bytes + i] = pattern(me, 0, i);
            for (int r = 0; r < world; r++) { to[r * bytes + i] = pattern(me, r, i); }
        }
        comm_all_gather(all.data(), bytes);
        comm_all_to_all(from.data(), to.data(), bytes);
        size_t wrong = one[bytes] != 'x' || all[world * bytes] != 'x' || from[world * bytes] != 'x';
        for (size_t i = 0; i < bytes; i++) {
            wrong += one[i] != pattern(7, 9, i);
            for (int r = 0; r < world; r++) {
                wrong += all[r * bytes + i] != pattern(r, 0, i);
                wrong += from[r * bytes + i] != pattern(r, me, i);
            }
        }
        if (wrong) { die("%zu of %zu bytes are wrong", wrong, bytes); }
    }
    for (int r = 0; r < world; r++) {
        if (!comm_any(me == r)) { die("nobody heard rank %d", r); }
        if (comm_any(false)) { die("somebody said what nobody did"); }
    }
    comm_check_same({{"-b", "4"}, {"empty", ""}});
    struct Place { int rank, local_rank, local_world; };
    std::vector<Place> places(world);
    places[me] = {comm.rank, comm.local_rank, comm.local_world};
    comm_all_gather(places.data(), sizeof(Place));
    printf("collectives of %d:", world);        // rank 0's; the others' stdout is nowhere
    for (const Place& p : places) { printf(" %d.%d/%d", p.rank, p.local_rank, p.local_world); }
    printf("\n");
}

// Trains nothing until it is told to end. The victim does this in a step when all are under way.
static void rank_loop(const std::function<void(int)>& in_step = [](int) {}) {
    for (int step = 0; step < 10000 && !comm_any(interrupted); step++) {
        comm_progress(step);
        if (step == 5) { write_text(folder + format("/rank.%d", comm.rank), std::to_string(getpid())); }
        if (is_victim(comm.rank) && step >= 5) { in_step(step); }
        usleep(20000);
    }
    printf("the loop has ended: %d\n", (int)interrupted);
}

static void rank_flood() {                  // more than a pipe holds
    for (int step = 0; step < 100; step++) {
        comm_progress(step);
        if (comm_any(false)) { exit(1); }
        printf("%s\n", std::string(4000, 'f').c_str());
        fflush(stdout);
    }
}

static void compute_long() {
    usleep((useconds_t)(3e6 * comm_limits.still));
    interrupted = SIGINT;
}

static void wait_as_victim() { while (is_victim(comm.rank)) { pause(); } }

static const struct { const char* name; std::function<void()> run; } programs[] = {
    {"collectives", rank_collectives},
    {"loop", [] { rank_loop(); }},
    {"unhandled", [] { signal(SIGHUP, SIG_DFL); rank_loop(); }},
    {"die", [] { rank_loop([](int step) { die("bad thing in step %d\nhint: none", step); }); }},
    {"raw_words", [] {                          // of a rank that is no program of ours
        rank_loop([](int) { comm_send(0, kCommError, "bad\x1b[2J\nforged: \xC2\x9Bm\nhint: \x7F"); });
    }},
    {"thread_dies", [] { rank_loop([](int) { std::thread([] { die("from a thread"); }).join(); }); }},
    {"exit", [] { rank_loop([](int) { exit(0); }); }},
    {"stuck_early", wait_as_victim},
    {"stuck", [] {
        rank_loop([](int step) {
            { DiskWait disk; }
            comm_progress(step);
            for (;;) { pause(); }
        });
    }},
    {"other_call", [] { rank_loop([](int) { char c; comm_broadcast(&c, 1); }); }},
    {"flood", rank_flood},
    {"patience", [] { rank_loop([](int) { DiskWait disk; compute_long(); }); }},
    {"slow_start", [] {                         // all compute, and nobody knows yet how long a step takes
        for (int part = 0; part < 3; part++) { comm_progress(0); }
        compute_long();
        rank_loop();
    }},
    {"health", [] {
        comm_abort = [] { sleep(1000); };
        if (is_victim(comm.rank)) { comm_health = [] { return std::string("NCCL: unhandled error"); }; }
        rank_loop();
    }},
    {"code", [] { comm_end(); if (is_victim(comm.rank)) { exit(3); } }},
    {"late", [] { comm_end(); if (is_victim(comm.rank)) { die("after the end"); } }},
    {"hang_late", [] { comm_end(); wait_as_victim(); }},
    // what happens before the start is below
    {"never_begins", [] {}}, {"ends_early", [] {}}, {"dies_early", [] {}},
};

// rank PROGRAM FOLDER VICTIM key=value...
static int rank_main(int argc, char** argv) {
    const std::string program = argv[2];
    std::map<std::string, std::string> given;
    for (int i = 5; i < argc; i++) {
        const std::string s = argv[i];
        given[s.substr(0, s.find('='))] = s.substr(s.find('=') + 1);
    }
    auto number = [&](const char* key, int otherwise) {
        return given.count(key) ? atoi(given[key].c_str()) : otherwise;
    };
    CommOptions o;
    o.gpus = number("gpus", 0);
    const std::map<std::string, CommInit> inits = {
        {"", CommInit::Auto}, {"mpi", CommInit::Mpi}, {"tcp", CommInit::Tcp}, {"fs", CommInit::Fs}};
    o.init = inits.at(given["init"]);
    o.server = given["server"].c_str();
    o.folder = given["folder"].c_str();
    o.processes = number("processes", 0);
    o.process = number("process", -1);
    o.per_node = number("per_node", 0);
    o.start_timeout_s = number("timeout", 200);
    comm_limits.beat = comm_limits.health = 0.5;
    comm_limits.silence = number("silence", 100);
    comm_limits.still = number("still", 100);
    comm_limits.first = number("first", 600);
    comm_limits.abort = number("abort", 100);
    comm_local_start_s = number("local", 200);
    comm_after_s = number("after", 20);
    folder = argv[3];
    victim = atoi(argv[4]);
    CommChild child;
    if (comm_child(&child) && is_victim(child.rank)) {
        if (program == "never_begins") { raise(SIGSTOP); }
        if (program == "ends_early") { raise(SIGKILL); }
        if (program == "dies_early") { die("before the start"); }
    }
    comm_start(o, argv);
    for (int number : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) {         // as the trainer: wishes to stop
        if (signal(number, [](int n) { interrupted = n; }) == SIG_IGN) { signal(number, SIG_IGN); }
    }
    signal(SIGUSR2, [](int signal_number) { _exit(128 + signal_number); });     // a second Ctrl-C does so
    for (const auto& p : programs) { if (program == p.name) { p.run(); } }
    comm_end();
    stdout_check();
    return 0;
}

// ---- cases ----

static const int kSilence = 5, kStill = 3;      // seconds, in cases that are about these limits
static const std::string kSilenceArg = format("silence=%d", kSilence), kStillArg = format("still=%d", kStill);

struct Case {
    std::string name = "", program = "loop";
    int victim = NONE;
    std::vector<int> codes = {0};       // of the launcher; or of each rank. 128+n: ended by signal n
    std::vector<std::string> words = {};    // of the one message; none: there must be none
    std::vector<std::string> args = {}, env = {};
    std::string out = "";               // all of stdout, "": anything
    int world = 3;
    bool local = true;                  // else each rank is started with `args` and its own number
    int signal_number = 0, to = -1;     // sent to rank `to`, or to the launcher, when all ranks run
    bool continued = false;             // rank `to` is, when it is the last that has not ended
    bool frozen = false;                // before that all ranks are stopped for longer than silence may be
    bool nohup = false;                 // SIGHUP is ignored, and comes before that
    int out_fd = -1;                    // where stdout goes, if not to a file
    std::vector<int> start = {};        // the ranks that are started, if not all
    std::string rank_variable = "";     // of a scheduler that numbers the ranks; "": -pn and -pr do

    // while it runs
    std::string dir = "";
    std::vector<pid_t> pids = {};
    std::vector<int> ended = {};        // exit codes, -1: runs
    bool hung = false;
    double started = 0, sent = 0;
};

static void start_rank(Case* c, int rank) {
    const std::string number = std::to_string(rank), world = std::to_string(c->world);
    std::vector<std::string> words = {"test_comm", "rank", c->program, c->dir, std::to_string(c->victim)};
    words.insert(words.end(), c->args.begin(), c->args.end());
    if (c->local) { words.push_back("gpus=" + world); }
    else if (c->rank_variable.empty()) {
        words.insert(words.end(), {"processes=" + world, "process=" + number});
    }
    std::vector<char*> argv;
    for (std::string& w : words) { argv.push_back(&w[0]); }
    argv.push_back(nullptr);
    fflush(stdout);
    const pid_t pid = fork();
    c->pids.push_back(pid);
    c->ended.push_back(-1);
    if (pid != 0) { return; }
    for (int fd : {STDOUT_FILENO, STDERR_FILENO}) {
        const std::string path = c->dir + (fd == STDOUT_FILENO ? "/out" : "/err");
        const bool is_given = fd == STDOUT_FILENO && c->out_fd >= 0;
        dup2(is_given ? c->out_fd : open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0666), fd);
    }
    signal(SIGINT, SIG_DFL);                    // a shell's & ignores it, nohup the other
    signal(SIGHUP, c->nohup ? SIG_IGN : SIG_DFL);
    setenv("LLMC_TEST_CASE", c->dir.c_str(), 1);        // by which what is left of it is found
    if (!c->rank_variable.empty()) { setenv(c->rank_variable.c_str(), number.c_str(), 1); }
    for (const std::string& e : c->env) {
        setenv(e.substr(0, e.find('=')).c_str(), e.substr(e.find('=') + 1).c_str(), 1);
    }
    execv("/proc/self/exe", argv.data());
    _exit(127);
}

static void start_case(Case* c) {
    c->dir = in_folder(c->name);
    for (char& ch : c->dir) { if (ch == ' ') { ch = '_'; } }
    mkdir_check(c->dir.c_str());
    c->started = comm_now();
    for (int r = 0; r < (c->local ? 1 : c->world); r++) {
        const bool is_absent = !c->start.empty() && !std::count(c->start.begin(), c->start.end(), r);
        if (!is_absent) { start_rank(c, r); }
    }
}

static pid_t rank_pid(const Case& c, int rank) {
    return atoi(read_text(c.dir + format("/rank.%d", rank)).c_str());
}

// Processes that carry this case's mark.
static std::vector<pid_t> left_of(const Case& c) {
    std::vector<pid_t> left;
    const std::string mark = "LLMC_TEST_CASE=" + c.dir + '\0';
    for (const std::string& name : names_in("/proc")) {
        const pid_t pid = atoi(name.c_str());
        if (pid > 0 && pid != getpid() && holds(read_text("/proc/" + name + "/environ"), mark)) {
            left.push_back(pid);
        }
    }
    return left;
}

static void kill_ranks(const Case& c, int number) {
    for (int r = 0; r < c.world; r++) { kill(rank_pid(c, r), number); }
}

// One look at a running case. False: it is over.
static bool case_runs(Case* c) {
    int running = 0, ready = 0;
    for (size_t i = 0; i < c->pids.size(); i++) {
        int status;
        if (c->ended[i] < 0 && waitpid(c->pids[i], &status, WNOHANG) == c->pids[i]) {
            c->ended[i] = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : exit_code(status);
        }
        running += c->ended[i] < 0;
    }
    if (running == 0) { return false; }
    if (c->continued && running == 1 && c->sent && c->ended[c->to] < 0) { kill(c->pids[c->to], SIGCONT); }
    for (int r = 0; r < c->world && c->signal_number && !c->sent; r++) { ready += rank_pid(*c, r) > 0; }
    if (ready == c->world) {
        c->sent = comm_now() + (c->frozen ? kSilence + 3 : 1);      // two heartbeats tell of a step
        if (c->frozen) { kill_ranks(*c, SIGSTOP); }
        if (c->nohup) { kill(c->pids[0], SIGHUP); }
    }
    if (c->sent && comm_now() >= c->sent && c->signal_number) {
        if (c->frozen) {                        // rank 0 has heard nothing when it goes on
            kill(rank_pid(*c, 0), SIGCONT);
            usleep(300000);
            kill_ranks(*c, SIGCONT);
        }
        kill(c->to < 0 ? c->pids[0] : rank_pid(*c, c->to), c->signal_number);
        c->signal_number = 0;
    }
    if (comm_now() - c->started < 300) { return true; }     // only a hang takes that long
    c->hung = true;
    for (pid_t pid : left_of(*c)) { kill(pid, SIGKILL); }
    for (size_t i = 0; i < c->pids.size(); i++) {
        if (c->ended[i] < 0) { waitpid(c->pids[i], nullptr, 0); }
    }
    return false;
}

static void check_case(const Case& c) {
    const std::string err = read_text(c.dir + "/err"), out = read_text(c.dir + "/out");
    const char* name = c.name.c_str();
    CHECK(!c.hung, "%s: hangs", name);
    for (size_t i = 0; i < c.codes.size() && i < c.ended.size(); i++) {
        CHECK(c.ended[i] == c.codes[i], "%s: process %zu ended with %d, not %d:\n%s", name, i, c.ended[i],
              c.codes[i], err.c_str());
    }
    int messages = 0;
    for (size_t at = 0; (at = err.find("error: ", at)) != std::string::npos; at++) { messages++; }
    CHECK(messages == !c.words.empty(), "%s: %d messages:\n%s", name, messages, err.c_str());
    CHECK(!c.words.empty() || err.empty(), "%s: on stderr:\n%s", name, err.c_str());
    CHECK(std::count(err.begin(), err.end(), '\n') <= 3, "%s: more than three lines:\n%s", name, err.c_str());
    for (const std::string& word : c.words) {
        CHECK(holds(err, word), "%s: no '%s' in:\n%s", name, word.c_str(), err.c_str());
    }
    CHECK(c.out.empty() || out == c.out, "%s: on stdout:\n%s", name, out.c_str());
    const double until = comm_now() + 60;       // who is killed is gone when he next gets a core
    while (!left_of(c).empty() && comm_now() < until) { usleep(20000); }
    const std::vector<pid_t> left = left_of(c);
    CHECK(left.empty(), "%s: %zu processes are left", name, left.size());
    for (pid_t pid : left) { kill(pid, SIGKILL); }
}

static std::string only;    // a word of the cases that run: ThreadSanitizer takes minutes for all of them
static std::vector<Case> to_run;        // the next one is the last
static std::vector<Case*> running;

// A look at all that run. False: there is none, and none to come. Who waits for something else calls this,
// too: cases wait more than they compute.
static bool step_cases(size_t at_a_time = 20) {
    while (!to_run.empty() && running.size() < at_a_time) {
        running.push_back(new Case(to_run.back()));
        to_run.pop_back();
        start_case(running.back());
    }
    usleep(20000);
    for (size_t i = 0; i < running.size();) {
        if (case_runs(running[i])) { i++; continue; }
        check_case(*running[i]);
        delete running[i];
        running.erase(running.begin() + i);
    }
    return !running.empty() || !to_run.empty();
}

static void add_cases(const std::vector<Case>& cases) {
    for (const Case& c : cases) { if (holds(c.name, only)) { to_run.insert(to_run.begin(), c); } }
}

// A socket that is bound to a port of 127.0.0.1 and does not listen; -1: the port is taken.
static int bound_socket(int port, int reuse) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in a = {};
    a.sin_family = AF_INET;
    a.sin_port = htons((uint16_t)port);
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof(reuse));
    if (bind(fd, (const struct sockaddr*)&a, sizeof(a)) == 0) { return fd; }
    close(fd);
    return -1;
}

// A port that nobody listens on, this test's own until it ends: cases are made long before they run, and what
// is only given back may be anybody's by then, be it as the near end of a connection. A rank 0 may listen on
// it beside the socket that keeps it, since both have SO_REUSEADDR.
static int free_port(int port = 0) {
    struct sockaddr_in self = {};
    socklen_t size = sizeof(self);
    const int fd = bound_socket(port, 1);
    if (fd < 0) { return -1; }
    getsockname(fd, (struct sockaddr*)&self, &size);
    return ntohs(self.sin_port);
}

// One that stays in use until this program ends.
static int port_in_use() {
    int port;
    comm_listen({"127.0.0.1", "0", {}}, &port);
    return port;
}

// A job's number, of which SLURM's ranks make the port.
static int slurm_job() {
    int job = 70000 + (int)getpid() % 10000;
    while (free_port(20000 + job % 10000) < 0) { job++; }
    return job;
}

static std::string local_server(int port) { return format("server=127.0.0.1:%d", port); }

// The same over TCP: one process for each rank, all but `odd` end with `code`.
static Case over_tcp(Case c, int code = 0, int odd = -1, int odd_code = 0) {
    c.name += " tcp";
    c.local = false;
    c.args.insert(c.args.begin(), {"init=tcp", local_server(free_port())});
    c.codes.assign(c.world, code);
    if (odd >= 0) { c.codes[odd] = odd_code; }
    return c;
}

// What a failure of rank 0, of the last rank and of others looks like; what waits longest comes first.
static std::vector<Case> failure_cases() {
    std::vector<Case> cases = {
        over_tcp({.name = "never come", .words = {"ranks 1, 2 of 4 did not", "LLMC_JOB_ID"},    // 3 is silent
                  .args = {"timeout=8"}, .world = 4, .start = {0, 3}}, 1),
        over_tcp({.name = "never come, of many", .words = {"ranks 1, 2, 3, 4, 5, 6, 7, 8 and 2 more of 11"},
                  .args = {"timeout=1"}, .world = 11, .start = {0}}, 1),
        // as in the shell of `srun -n 2 --pty bash`
        {.name = "never come, to a shell", .codes = {1},
         .words = {"note: still waiting for rank 1, at localhost, port 2", "rank 1 of 2 did not come",
                   "(SLURM_NTASKS=2 asks for 2 processes; --gpus 1 runs alone)"},
         .args = {"timeout=11"},
         .env = {"SLURM_NTASKS=2", "SLURM_STEP_NODELIST=localhost", format("SLURM_JOB_ID=%d", slurm_job())},
         .world = 2, .local = false, .start = {0}, .rank_variable = "SLURM_PROCID"},
        {.name = "a slow first step", .program = "slow_start", .args = {kStillArg}},
        {.name = "patience of rank 0", .program = "patience", .victim = 0, .args = {kStillArg}},
        {.name = "patience of rank 1", .program = "patience", .victim = 1, .args = {kStillArg}},
        {.name = "stuck before the first step", .program = "stuck_early", .victim = 1, .codes = {1},
         .words = {"error: rank 1 (", "makes no progress", "had not begun its first step"},
         .args = {"first=3"}},
        {.name = "stopped at the start", .program = "never_begins", .victim = 1, .codes = {1},
         .words = {"rank 1 of 3 did not come"}, .args = {"local=4"}},
        {.name = "a hang after the end", .program = "hang_late", .victim = 2, .codes = {1},
         .words = {"error: rank 2 (pid ", "did not end when rank 0 had"}, .args = {"after=2"}},
        // comm_abort hangs
        {.name = "health of rank 0", .program = "health", .victim = 0, .codes = {1},
         .words = {"error: NCCL: unhandled"}, .args = {"abort=3"}},
        {.name = "health of rank 1", .program = "health", .victim = 1, .codes = {1},
         .words = {"error: rank 1: NCCL: unhandled"}, .args = {"abort=3"}},
        over_tcp({.name = "die", .program = "die", .victim = 2, .words = {"error: rank 2: bad thing"}}, 1),
        over_tcp({.name = "die all", .program = "die", .victim = ALL, .words = {"bad thing"}, .world = 4}, 1),
        // rank 0 speaks for the first of them, and has the others end silently
        over_tcp({.name = "die others", .program = "die", .victim = OTHERS, .words = {": bad thing"},
                  .world = 4}, 1),
        {.name = "raw words", .program = "raw_words", .victim = 1, .codes = {1},
         .words = {"error: rank 1: bad\\x1b[2J\\nforged: \\u009bm\nhint: \\x7f\n"}, .world = 2},
        {.name = "die in a thread", .program = "thread_dies", .victim = 1, .codes = {1},
         .words = {"error: rank 1: from a thread"}, .world = 2},
        {.name = "die early", .program = "dies_early", .victim = ALL, .codes = {1},
         .words = {"error: ", "before the start\n"}},
        {.name = "die early, rank 2", .program = "dies_early", .victim = 2, .codes = {1},
         .words = {"error: rank 2: before the start\n"}},
        {.name = "rank 2 killed at the start", .program = "ends_early", .victim = 2, .codes = {137},
         .words = {"error: rank 2 (pid ", "was ended by signal 9"}},
        {.name = "rank 0 killed at the start", .program = "ends_early", .victim = 0, .codes = {137},
         .words = {"error: rank 0 (pid ", "was ended by signal 9"}},
        {.name = "die late", .program = "late", .victim = 2, .codes = {1},
         .words = {"error: rank 2: after the end"}},
        {.name = "other call", .program = "other_call", .victim = 1, .codes = {1},
         .words = {"rank 1 is at operation"}},
        {.name = "code", .program = "code", .victim = 1, .codes = {3}},
        {.name = "the launcher is killed", .codes = {137}, .signal_number = SIGKILL}};
    for (int rank : {0, 2}) {
        const std::string who = format("error: rank %d (", rank), of = format("%d", rank);
        for (int number : {SIGKILL, SIGSTOP}) {
            const bool killed = number == SIGKILL;
            const std::string said = killed ? "died" : format("no sign of life for %d s", kSilence);
            const int code = killed ? 137 : 1;  // of the one that saw the stopped one
            Case c = {.name = format("signal %d to rank %d", number, rank), .codes = {code},
                      .words = {who, said, "its last step was"}, .args = {kSilenceArg},
                      .signal_number = number, .to = rank};
            cases.push_back(c);
            c.words.pop_back();                 // over TCP the step is as old as the last heartbeat
            c.world = 4;                        // two hear of rank 0's end, and one of them speaks
            c.continued = !killed;              // nobody kills it: it ends when it goes on
            cases.push_back(over_tcp(c, 1, rank, code));
        }
        const std::string speaks = rank ? format("error: rank %d: ", rank) : "error: ";
        cases.push_back({.name = "die " + of, .program = "die", .victim = rank, .codes = {1},
                         .words = {speaks + "bad thing in step 5", "\nhint: none\n"}});
        cases.push_back({.name = "stuck " + of, .program = "stuck", .victim = rank, .codes = {1},
                         .words = {who, "makes no progress for", "step was 5"}, .args = {kStillArg}});
        cases.push_back({.name = "exit " + of, .program = "exit", .victim = rank, .codes = {1},
                         .words = {who, "died; its last step was"}});
    }
    return cases;
}

// A signal to the launcher, or to any rank that has none, stops all ranks at the same step.
static std::vector<Case> stop_cases() {
    std::vector<Case> cases = {
        // as a scheduler or a debugger does
        {.name = "all are stopped for a while", .args = {kSilenceArg}, .out = "the loop has ended: 2\n",
         .signal_number = SIGINT, .frozen = true},
        // it was SIGINT that stopped it
        {.name = "stop with nohup", .out = "the loop has ended: 2\n", .signal_number = SIGINT, .nohup = true},
        over_tcp({.name = "stop by rank 2", .signal_number = SIGINT, .to = 2}),
        // the user's own doing is no error
        {.name = "a signal that kills", .program = "unhandled", .codes = {128 + SIGHUP},
         .signal_number = SIGHUP},
        {.name = "a signal that ends at once", .codes = {128 + SIGUSR2}, .signal_number = SIGUSR2}};
    for (int number : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) {         // once: the others print nothing
        cases.push_back({.name = format("stop by signal %d", number),
                         .out = format("the loop has ended: %d\n", number), .signal_number = number});
    }
    return cases;
}

static std::vector<Case> start_cases() {
    std::vector<Case> cases;
    for (int world : {8, 5, 3, 2}) {
        Case c = {.name = format("collectives of %d", world), .program = "collectives", .world = world};
        c.out = c.name + ":";
        for (int r = 0; r < world; r++) { c.out += format(" %d.%d/%d", r, r, world); }
        c.out += "\n";
        cases.push_back(c);
    }
    // rank 0's; the others print nothing
    cases.push_back(over_tcp({.name = "collectives", .program = "collectives", .args = {"per_node=2"},
                              .out = "collectives of 3: 0.0/2 1.1/2 2.0/1\n"}));
    Case ip6 = over_tcp({.name = "collectives v6", .program = "collectives", .world = 2});
    ip6.args[1] = "server=localhost:" + std::to_string(free_port());
    cases.push_back(ip6);
    Case port = over_tcp({.name = "port in use", .words = {"cannot listen on port", "in use", "hint:"},
                          .world = 2, .start = {0}}, 1);
    port.args[1] = local_server(port_in_use());
    cases.push_back(port);
    // One process for each rank, which a scheduler's variables number
    cases.push_back({.name = "torchrun", .program = "collectives", .codes = {0, 0},
                     .env = {"WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1",
                             format("MASTER_PORT=%d", free_port() - 1)},
                     .world = 2, .local = false, .rank_variable = "RANK"});
    cases.push_back({.name = "slurm", .program = "collectives", .codes = {0, 0},
                     .env = {"SLURM_NTASKS=2", "SLURM_STEP_NODELIST=localhost", "SLURM_STEP_ID=0",
                             format("SLURM_JOB_ID=%d", slurm_job())},
                     .world = 2, .local = false, .rank_variable = "SLURM_PROCID"});
    // A program's own flags, in the environment of another job's rank
    const std::vector<std::string> of_srun = {"SLURM_NTASKS=4", "SLURM_STEP_ID=0", "SLURM_PROCID=1"};
    cases.push_back({.name = "collectives in a task", .program = "collectives", .env = of_srun,
                     .out = "collectives of 3: 0.0/3 1.1/3 2.2/3\n"});
    cases.push_back(over_tcp({.name = "collectives in a task", .program = "collectives", .env = of_srun,
                              .world = 2}));
    return cases;
}

// ---- the folder of -pi fs ----

static std::string meeting_point() { return in_folder("meeting point"); }

// What killed jobs have left: a port that nobody has now, one where nobody ever says a word, half a file.
static std::vector<Case> folder_cases() {
    const std::string place = meeting_point(), stale = comm_describe(comm_random_key(), free_port());
    mkdir_check(place.c_str());
    write_text(place + "/rendezvous-other", stale);
    std::vector<Case> cases = {{.name = "folder that is a file", .codes = {1}, .words = {"is not a folder"},
                                .args = {"init=fs", "folder=" + place + "/rendezvous-other"}, .world = 2,
                                .local = false, .start = {0}},
                               {.name = "nobody in the folder", .codes = {1, 1},
                                .words = {"rank 0 was not found at the folder '" + place + "' within 1 s"},
                                .args = {"init=fs", "folder=" + place, "timeout=1", "abort=1"}, .world = 2,
                                .local = false, .start = {1}}};
    const std::string mute = comm_describe(1, port_in_use());
    for (const std::string& left : {stale, mute, stale.substr(0, stale.size() / 2)}) {
        const std::string id = std::to_string(cases.size());
        cases.push_back({.name = "folder " + id, .program = "collectives", .codes = {0, 0, 0},
                         .args = {"init=fs", "folder=" + place}, .env = {"LLMC_JOB_ID=" + id},
                         .local = false});
        write_text(place + "/rendezvous-" + id, left);
    }
    return cases;
}

// After the cases: whose file it is, who may read it, and who may write it when.
static void test_folder() {
    const std::string place = meeting_point(), stale = read_text(place + "/rendezvous-other");
    CHECK_TEXT(joined(names_in(place)), "rendezvous-other");
    CHECK(comm_addresses(stale).size() >= 1, "a whole file has no address");
    size_t taken = 0;
    for (size_t n = 0; n < stale.size(); n++) { taken += !comm_addresses(stale.substr(0, n)).empty(); }
    CHECK(taken == 0, "%zu parts of a file are taken for one", taken);

    CommOptions o;
    o.folder = place.c_str();
    const std::string path = comm_meeting_file(o), link = place + "/link";
    struct stat st = {};
    write_text(path, std::string(1000, 'l') + "onger, of a killed job");
    close(comm_write_meeting(o, "rank 0 is here"));
    CHECK_TEXT(comm_read_meeting(o), "rank 0 is here");
    unlink(path.c_str());
    const mode_t mask = umask(0);
    const int locked = comm_write_meeting(o, "rank 0 is here");
    umask(mask);
    CHECK(stat(path.c_str(), &st) == 0 && (st.st_mode & 0777) == 0600, "mode %o", st.st_mode);
    check_dies("two jobs in a folder", [&] { comm_write_meeting(o, ""); }, {"another job", "LLMC_JOB_ID"});
    close(locked);
    CHECK(rename(path.c_str(), link.c_str()) == 0 && symlink(link.c_str(), path.c_str()) == 0, "no link");
    CHECK_TEXT(comm_read_meeting(o), "");
    check_dies("a link", [&] { comm_write_meeting(o, ""); }, {"cannot create", "rendezvous"});
    unlink(path.c_str());
    write_text(path, "of another user");
    if (chown(path.c_str(), 65534, 65534) != 0) { SKIP(5, "only root can give a file away"); }
    else {
        CHECK_TEXT(comm_read_meeting(o), "");
        check_dies("another's file", [&] { comm_write_meeting(o, ""); },
                   {"no file of this user", "LLMC_JOB_ID"});
    }
    unlink(path.c_str());
}

// ---- strangers at rank 0's port ----

static uint64_t key_of(const char* job) {
    const std::string before = getenv("LLMC_JOB_ID");
    setenv("LLMC_JOB_ID", job, 1);
    const uint64_t key = comm_tcp_key();
    setenv("LLMC_JOB_ID", before.c_str(), 1);
    return key;
}

// Does rank 0 close it, in whatever time? It answers nobody here.
static bool is_hung_up(int fd) {
    char answer;
    const double until = comm_now() + 60;
    for (struct pollfd p = {fd, POLLIN, 0}; poll(&p, 1, 20) == 0 && comm_now() < until;) { step_cases(); }
    const ssize_t bytes = recv(fd, &answer, 1, MSG_DONTWAIT);
    return bytes == 0 || (bytes < 0 && errno != EAGAIN);
}

// A job of which only rank 0 has been started, and who calls it.
struct Callers {
    Case job;
    CommAddress address;
    std::vector<int> fds;

    explicit Callers(Case c) : job(c) {
        job.start = {0};
        address = comm_parse_server(c.args[1].substr(7), kCommPort, 0);
        start_case(&job);
    }
    int call() {                                // until rank 0 listens
        int fd;
        std::string why;
        while ((fd = comm_connect(address, &why)) < 0) { usleep(10000); }
        comm_limit(fd, 60);
        fds.push_back(fd);
        return fd;
    }
    int says(const void* data, size_t bytes) {
        const int fd = call();
        comm_write(fd, data, bytes);
        return fd;
    }
    bool is_answered(int rank, int world, uint64_t key) {
        CommHello hello = comm_hello(CommJob());
        hello.rank = rank, hello.world = world, hello.key = key;
        char answer[sizeof(kCommKnown)];
        return comm_read(says(&hello, sizeof(hello)), answer, sizeof(answer));
    }
    void hang_up() {
        close(fds.back());
        fds.pop_back();
    }
    void end() {
        while (case_runs(&job)) { step_cases(); }
        check_case(job);
        for (int fd : fds) { close(fd); }
    }
};

static void test_strangers() {
    Callers callers(over_tcp({.name = "strangers", .program = "collectives",
                              .env = {"LLMC_JOB_ID=of this test"}}));
    const uint64_t key = key_of("of this test");
    auto knows = [&](uint64_t job_key) {        // as rank 1, which then leaves
        const bool known = callers.is_answered(1, 3, job_key);
        callers.hang_up();
        return known;
    };
    const int silent = callers.call();
    CHECK(!knows(key ^ (uint64_t)1 << 56), "a key whose last byte differs is taken");
    CHECK(!knows(0) && !knows(key_of("of another")), "a rank of another LLMC_JOB_ID is taken");
    CHECK(knows(key), "a rank of this LLMC_JOB_ID is not taken");
    const CommHello hello = comm_hello(CommJob());
    callers.says(&hello, 1);
    callers.hang_up();
    const std::string garbage(100000, 'g');
    const int half = callers.says(&hello, sizeof(hello) - 1);
    CHECK(is_hung_up(callers.says(garbage.data(), garbage.size())), "garbage is borne with");
    CHECK(is_hung_up(silent) && is_hung_up(half), "who does not say who he is may stay");

    for (int i = 0; i < 20; i++) { callers.call(); }        // silent
    start_rank(&callers.job, 1);
    start_rank(&callers.job, 2);
    callers.end();
}

// Another number of processes, a rank that has come already.
static void test_places() {
    Callers callers(over_tcp({.name = "places"}));
    const struct { const char* who; int rank, world; bool answered; } rows[] = {
        {"rank 1", 1, 3, true}, {"rank 2 of 4 processes", 2, 4, false}, {"a second rank 1", 1, 3, false},
        {"a second rank 0", 0, 3, false}, {"rank 3 of 3", 3, 3, false}, {"rank -1", -1, 3, false},
        {"rank 2", 2, 3, true}};
    for (const auto& r : rows) {
        CHECK(callers.is_answered(r.rank, r.world, comm_tcp_key()) == r.answered, "%s: answered %d", r.who,
              !r.answered);
    }
    callers.job.codes = {128 + SIGKILL};
    kill(callers.job.pids[0], SIGKILL);
    callers.end();
}

// A reader that takes its time, as less does.
static void test_reader() {
    int ends[2];
    CHECK(pipe2(ends, O_CLOEXEC) == 0, "no pipe");
    Case c = {.name = "a slow reader", .program = "flood", .args = {kStillArg}, .world = 2,
              .out_fd = ends[1]};
    start_case(&c);
    close(ends[1]);
    for (const double until = comm_now() + 2 * kStill; comm_now() < until;) { step_cases(); }
    char buffer[4096];
    while (read(ends[0], buffer, sizeof(buffer)) > 0) {}
    close(ends[0]);
    while (case_runs(&c)) { step_cases(); }
    check_case(c);
}

// ---- what needs no processes ----

static void test_ports() {
    const int port = free_port();
    CHECK(bound_socket(port, 0) < 0, "port %d is given to another", port);
    for (const char* host : {"127.0.0.1", "localhost", "::1", ""}) {
        const std::string number = std::to_string(port), to = *host ? host : "127.0.0.1";
        std::string why;
        CHECK(comm_connect({to, number, {}}, &why) < 0, "%s: who listens there?", host);
        if (to == "::1" && why != strerror(ECONNREFUSED)) { continue; }     // no IPv6 here
        int listened;
        const int listener = comm_listen({host, number, {}}, &listened);
        const int fd = comm_connect({to, number, {}}, &why);
        CHECK(listened == port && fd >= 0, "%s: %d, not %d: %s", host, listened, port, why.c_str());
        close(fd);
        close(listener);
    }
    // Who calls again and again where nobody listens yet gets that port for the near end in the end: what
    // then answers is its own hello.
    int own;
    const int listener = comm_listen({"127.0.0.1", "0", {}}, &own);
    std::thread echo([&] {
        CommHello hello;
        const int fd = accept(listener, nullptr, nullptr);
        comm_read(fd, &hello, sizeof(hello));
        comm_write(fd, &hello, sizeof(hello));
        close(fd);
    });
    std::string why;
    CommJob job;
    const CommAddress address = {"127.0.0.1", std::to_string(own), {}};
    CHECK(!comm_try(&job, address, comm_now() + 60, &why), "it takes itself for rank 0");
    echo.join();
    close(listener);
}

static void test_names() {
    const char* const lists[][2] = {
        {"node1", "node1"}, {"node1,node2", "node1"}, {"n[07-12,20],gpu3", "n07"}, {"r[1-2]n[3,4]x", "r1n3x"},
        {"n[5]", "n5"}, {"", ""}, {"n[1-", "n1"}};
    for (const auto& l : lists) { CHECK_TEXT(comm_first_host(l[0]), l[1]); }
    const char* const servers[][2] = {
        {"a", "a 29547"}, {"a.b:1", "a.b 1"}, {"[::1]:65535", "::1 65535"}, {"::1", "::1 29547"},
        {"[::1]", "::1 29547"}};
    for (const auto& s : servers) {
        const CommAddress a = comm_parse_server(s[0], kCommPort, 0);
        CHECK_TEXT(a.host + " " + a.port, s[1]);
    }
    for (const char* bad : {"a:", ":1", "a:0", "a:65536", "a:b", "a:1x", "[::1", "[::1]x"}) {
        check_dies(bad, [&] { comm_parse_server(bad, kCommPort, 0); }, {"-ps", bad, "65535"});
    }
    const struct { const char* name; std::vector<const char*> env; const char* server; } schedulers[] = {
        {"srun", {"SLURM_JOB_ID=1234567", "SLURM_JOB_NODELIST=n1"}, "n1:24567"},
        {"srun", {"SLURM_JOB_ID=98765", "SLURM_JOB_NODELIST=n1"}, "n1:28765"},
        {"srun", {"SLURM_JOB_ID=", "SLURM_JOB_NODELIST=n1"}, "n1:29547"},
        {"torchrun", {"MASTER_ADDR=n1", "MASTER_PORT=500"}, "n1:501"},
        {"torchrun", {"MASTER_PORT=65534", "MASTER_ADDR=n1"}, "n1:65535"}};
    for (const auto& k : schedulers) {
        check_lives(k.env[0], [&] {
            for (const char* e : k.env) { putenv((char*)e); }
            const CommAddress a = comm_foreign_server(CommOptions(), {k.name, 0, 2, "", ""});
            printf("%s:%s", a.host.c_str(), a.port.c_str());
        }, k.server);
    }
    check_lives("-ps with a port", [] {         // torchrun's own is not used then
        setenv("MASTER_PORT", "65535", 1);
        CommOptions o;
        o.server = "n2:7";
        const CommAddress a = comm_foreign_server(o, {"torchrun", 0, 2, "", ""});
        printf("%s:%s", a.host.c_str(), a.port.c_str());
    }, "n2:7");
    const struct { const char *name, *value, *most; } numbers[] = {
        {"MASTER_PORT", "65535", "1 to 65534"}, {"MASTER_PORT", "x", "1 to 65534"},
        {"MASTER_PORT", "0", "1 to 65534"}, {"SLURM_JOB_ID", "12_7", "0 to 4294967295"},
        {"SLURM_JOB_ID", "-5", "0 to 4294967295"}};
    for (const auto& n : numbers) {
        const std::string set = format("%s=%s", n.name, n.value);
        check_dies(set, [&] {
            setenv(n.name, n.value, 1);
            comm_foreign_server(CommOptions(), {*n.name == 'M' ? "torchrun" : "srun", 0, 2, "", ""});
        }, {set, n.most, "hint:"});
    }
}

// How long a rank may stand still, with a clock that is put forward: steps of one job, and what the next may
// take then. Before the first step there are calls for step 0.
static void test_patience() {
    enum Inside { NOTHING, RANKS, DISK };           // what the main thread waits for, all the time it takes
    struct Step { int64_t number; double took; Inside inside; double allowed; };
    const double first = comm_limits.first, still = comm_limits.still;
    const std::vector<Step> jobs[] = {
        {{-1, 70, NOTHING, first}, {0, 70, NOTHING, first}, {0, 1, NOTHING, first}, {1, 1, NOTHING, still},
         {2, 150, DISK, still}, {3, 30, NOTHING, 300}, {4, 1, NOTHING, 300}},   // ten times the longest
        {{0, 1, NOTHING, first}, {1, 1, RANKS, still}, {2, 60, RANKS, 600}, {3, 1, DISK, 600}},     // a GPU's
        {{7, 70, NOTHING, first}, {7, 50, NOTHING, first}, {8, 1, NOTHING, 500}}};  // the first is not known
    for (const std::vector<Step>& job : jobs) {
        CommState state;
        comm_state = &state;
        state.since = comm_now();
        for (const Step& step : job) {
            auto passes = [&] { state.since = state.since - step.took; };
            if (step.inside == DISK) { DiskWait disk; passes(); }
            else if (step.inside == RANKS) { CommWait waiting; passes(); }
            else { passes(); }
            comm_progress(step.number);
            CHECK(fabs(state.allowed - step.allowed) < 1, "job %d, step %d: %g s", (int)(&job - jobs),
                  (int)step.number, (double)state.allowed);
        }
    }
    comm_state = nullptr;
}

// Who is to blame for a standstill. Of each rank: seconds without progress if it is beyond its limit, whether
// it waits, its collectives.
static void test_slowest() {
    struct Rank { double still; int64_t waiting; uint64_t calls; bool closed = false; };
    const struct { const char* name; std::vector<Rank> ranks; int slowest; } rows[] = {
        {"all are within their limits", {{0, 0, 5}, {0, 1, 5}, {0, 1, 5}}, -1},
        {"one is beyond, and the others wait", {{25, 1, 5}, {24, 0, 4}, {25, 1, 5}}, 1},
        {"one is beyond, and nobody else has come to its limit", {{0, 1, 5}, {24, 0, 5}, {0, 0, 5}}, 1},
        {"rank 0 is patient with a disk, and the others wait", {{0, 0, 4}, {99, 1, 5}, {99, 1, 5}}, -1},
        {"one goes on after that, and the others do not know", {{99, 1, 4}, {0, 1, 5}, {99, 1, 4}}, -1},
        {"all wait: who is behind", {{25, 1, 7}, {25, 1, 7}, {25, 1, 6}}, 2},
        {"all wait, and the one behind has left", {{25, 1, 7}, {0, 0, 3, true}, {25, 1, 6}}, 2}};
    for (const auto& row : rows) {
        std::vector<CommSeen> seen(row.ranks.size());
        for (size_t r = 0; r < seen.size(); r++) {
            const Rank& rank = row.ranks[r];
            seen[r].closed = rank.closed;
            seen[r].last = {kCommBeat, 1, rank.calls, rank.still, rank.waiting, ""};
        }
        const int slowest = comm_slowest(seen);
        CHECK(slowest == row.slowest, "%s: rank %d, not %d", row.name, slowest, row.slowest);
    }
}

static void test_limits() {
    check_dies("what a process has lost when it dies", [] {
        char* volatile lost = new char[100];
        lost = nullptr;
        die("too late%s", lost ? "" : " to be a leak");
    }, {"too late to be a leak"});
    // what a peer says of sizes is not believed
    for (uint64_t size : {(uint64_t)1 << 62, (uint64_t)20 << 30}) {
        check_dies("a size", [&] {
            int ends[2];
            if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) { return; }
            comm_state = new CommState();
            comm_state->job.world = comm.world = 2;
            comm_state->job.rank = comm.rank = 1;
            comm_state->job.peers = {{-1, ends[0], {}}};
            const CommCall call = {kCommBroadcast, 0, 8};
            comm_write(ends[1], &call, sizeof(call));
            comm_write(ends[1], &size, sizeof(size));
            comm_check_same({{"-b", "4"}});
        }, {"rank 0 is another program"});
    }
    check_dies("ulimit -n 40", [] {
        CommJob job;
        job.world = 24;
        limit_to(RLIMIT_NOFILE, 40);
        die_if(comm_gather(&job, -1, 0, 0, ""));
    }, {"24 ranks take", "open files", "have 40", "ulimit"});
    check_lives("a limit that may be raised", [&] {
        struct rlimit limit = {40, 500};
        setrlimit(RLIMIT_NOFILE, &limit);
        CommJob job;
        comm_gather(&job, -1, 0, 0, "");
        getrlimit(RLIMIT_NOFILE, &limit);
        printf("%d", (int)limit.rlim_cur);
    }, "500");
}

// test_ranks.py has more of them.
static void test_contradictions() {
    struct Wrong { CommOptions o; std::vector<std::string> words; std::vector<const char*> env; };
    const std::vector<const char*> of_mpi = {"OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE=4"};
    const Wrong wrong[] = {
        {{}, {"RANK=1x and WORLD_SIZE=2", "--gpus 1"}, {"RANK=1x", "WORLD_SIZE=2"}},
        {{}, {"RANK=-1 ", "hint:"}, {"RANK=-1", "WORLD_SIZE=2"}},
        {{}, {"RANK=2 and WORLD_SIZE=2"}, {"RANK=2", "WORLD_SIZE=2"}},
        {{}, {"WORLD_SIZE=4294967297"}, {"RANK=0", "WORLD_SIZE=4294967297"}},
        {{}, {"OMPI_COMM_WORLD_RANK=x"}, {"OMPI_COMM_WORLD_RANK=x", "OMPI_COMM_WORLD_SIZE=4"}},
        {{}, {"SLURM_NTASKS=two"}, {"SLURM_PROCID=0", "SLURM_NTASKS=two"}},
        {{.gpus = 2, .processes = 2}, {"--gpus 2", "-pn"}, {}},
        {{.init = CommInit::Tcp}, {"-ps HOST"}, {}},
        {{.init = CommInit::Tcp, .server = "a"}, {"-pn", "-pr"}, {}},
        {{.init = CommInit::Fs}, {"-pf"}, {}},
        {{.init = CommInit::Fs, .folder = "x", .processes = 2, .process = 2},
         {"-pr 2", "-pn 2", "0 to 1"}, {}},
        {{.server = "a"}, {"-ps needs -pi tcp"}, {}},
        {{.folder = "a"}, {"-pf needs -pi fs"}, {}},
        {{.init = CommInit::Fs, .folder = "x", .processes = 3}, {"-pn 3", "srun", "rank 0 of 2"},
         {"SLURM_PROCID=0", "SLURM_NTASKS=2", "SLURM_STEP_ID=0"}},
        {{}, {"5000 ranks", "4096"}, {"SLURM_PROCID=0", "SLURM_NTASKS=5000", "SLURM_STEP_ID=0"}},
        {{}, {"torchrun", "-ps"}, {"RANK=0", "WORLD_SIZE=2"}},
#ifndef USE_MPI
        {{}, {"without MPI", "hint:"}, of_mpi},
#endif
    };
    char* argv[] = {nullptr};
    for (const Wrong& w : wrong) {
        check_dies(w.words[0], [&] {
            for (const char* e : w.env) { putenv((char*)e); }
            comm_start(w.o, argv);
        }, w.words);
    }
    // a program of its own: where the environment is of a shell that srun has started, or says nothing
    const struct { CommOptions o; std::vector<const char*> env; const char* note; } alone[] = {
        {{.gpus = 1}, {"SLURM_PROCID=0", "SLURM_NTASKS=2"},
         "note: SLURM_NTASKS=2 does not count beside --gpus 1\n"},
        {{.processes = 1}, {"RANK=0", "WORLD_SIZE=3"}, "note: WORLD_SIZE=3 does not count beside -pn 1\n"},
        {{.processes = 1, .process = 0}, {"RANK=1", "WORLD_SIZE=3"}, ""},
        {{.gpus = 1}, of_mpi, "note: OMPI_COMM_WORLD_SIZE=4 does not count beside --gpus 1\n"},
        {{.gpus = 1}, {"RANK=1x", "WORLD_SIZE=2"}, ""},
        {{}, {"RANK=", "WORLD_SIZE=2"}, ""}};
    for (const auto& a : alone) {
        const Child c = run_child([&] {
            for (const char* e : a.env) { putenv((char*)e); }
            comm_start(a.o, argv);
            printf("%d of %d", comm.rank, comm.world);
        });
        CHECK_TEXT(c.out, "0 of 1");
        CHECK_TEXT(c.err, a.note);
    }
    check_lives("a batch script is none of the tasks that it may start", [&] {
        for (const char* e : {"SLURM_PROCID=0", "SLURM_NTASKS=8", "ENVIRONMENT=BATCH"}) { putenv((char*)e); }
        comm_start(CommOptions(), argv);
        printf("%d of %d, %d", comm.rank, comm.world, (int)comm_any(true));
        comm_end();
    }, "0 of 1, 1");
}

int main(int argc, char** argv) {
    if (argc > 4 && strcmp(argv[1], "rank") == 0) { return rank_main(argc, argv); }
    for (const char* name : {"OMPI_COMM_WORLD_SIZE", "WORLD_SIZE", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS",
                             "SLURM_JOB_ID", "PMIX_NAMESPACE"}) {
        unsetenv(name);
    }
    signal(SIGPIPE, SIG_IGN);
    folder_begin("comm");
    setenv("LLMC_JOB_ID", folder.c_str(), 1);   // another test may run beside this one
    if (argc == 2) {                            // a word: see `only`
        only = argv[1];
        add_cases(start_cases());
        add_cases(failure_cases());
        while (step_cases(14)) {}
        return folder_end();
    }
    TEST("comm: names of hosts, servers, where schedulers have rank 0") { test_names(); }
    TEST("comm: ports, a connection to oneself") { test_ports(); }
    TEST("comm: contradictions") { test_contradictions(); }
    TEST("comm: patience, who is to blame") { test_patience(); test_slowest(); }
    TEST("comm: sizes, open files") { test_limits(); }
    add_cases(failure_cases());
    add_cases(stop_cases());
    add_cases(folder_cases());
    TEST("comm: strangers, and failures beside them") { test_strangers(); }
    TEST("comm: ranks that do not fit") { test_places(); }
    TEST("comm: a slow reader") { test_reader(); }
    TEST("comm: failures, stops, a folder to meet in") {
        while (step_cases()) {}
        test_folder();
    }
    TEST("comm: collectives, ways to start") {
        add_cases(start_cases());
        while (step_cases(3)) {}
    }
    return folder_end();
}
