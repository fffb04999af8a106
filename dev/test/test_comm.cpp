/*
Tests of jobs of several processes: comm/comm.h and what it includes. Each case is a small program of ranks,
run by this very program (`test_comm rank PROGRAM FOLDER ...`), alone or beside other cases, since most of the
time they wait. The limits of the watchdog are lowered in those cases that are about them, and raised in all
others: beside other suites a rank may not get a core for seconds. What is tested is never how long something
took.

    make build/test_comm && build/test_comm
    build/test_comm die                 only the cases whose name holds the word
*/
#include <dirent.h>                     // gives: opendir
#include <map>                          // gives: std::map

#include "llmc/comm/comm.h"             // gives: what is tested
#include "child.h"                      // gives: folder; of a rank, its case's
#include "test.h"                       // gives: TEST, CHECK, test_summary

// ---- the ranks' programs ----

static volatile sig_atomic_t interrupted = 0;      // by this signal
static int victim = -1;                 // of the program: the rank that does what the program is about

static std::string rank_file(int rank) { return folder + format("/rank.%d", rank); }

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
    struct Place { int rank, local_rank, local_world, pid; };
    std::vector<Place> places(world);
    places[me] = {comm.rank, comm.local_rank, comm.local_world, (int)getpid()};
    comm_all_gather(places.data(), sizeof(Place));
    printf("collectives of %d:", world);        // rank 0's; the others' stdout is nowhere
    for (const Place& p : places) { printf(" %d.%d/%d", p.rank, p.local_rank, p.local_world); }
    printf("\n");
}

// A signal that the trainer, too, takes for the wish to stop.
static void stop_on(int number) {
    if (signal(number, [](int n) { interrupted = n; }) == SIG_IGN) { signal(number, SIG_IGN); }
}

// Trains nothing until it is told to end.
static void rank_loop(const std::function<void(int)>& in_step) {
    for (int step = 0; step < 10000 && !comm_any(interrupted); step++) {
        comm_progress(step);
        if (step == 5) { write_text(rank_file(comm.rank), std::to_string(getpid())); }     // under way
        if (comm.rank == victim && step >= 5) { in_step(step); }
        usleep(20000);
    }
    printf("the loop has ended: %d\n", (int)interrupted);
}

static void rank_facts() {
    const std::string long_name(200, 'a');
    const std::string config = comm.rank == victim ? long_name + "4" : long_name + "8";
    comm_check_same({{"program", "same"}, {"-b", config}, {"last", comm.rank == victim ? "1" : "2"}});
}

static void slow_launcher() {
    signal(SIGUSR2, [](int number) {        // the launcher is stopped for a second when rank 0 ends
        const pid_t launcher = getppid();
        kill(launcher, SIGSTOP);
        if (fork() != 0) { _exit(128 + number); }
        for (int fd = 0; fd < 1024; fd++) { close(fd); }
        sleep(1);
        kill(launcher, SIGCONT);
        _exit(0);
    });
    rank_loop([](int) {});
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

static void wait_as_victim() { while (comm.rank == victim) { pause(); } }

static const struct { const char* name; void (*run)(); } programs[] = {
    {"collectives", rank_collectives},
    {"loop", [] { rank_loop([](int) {}); }},
    {"unhandled", [] { signal(SIGHUP, SIG_DFL); rank_loop([](int) {}); }},
    {"slow_launcher", slow_launcher},
    {"die", [] { rank_loop([](int step) { die("bad thing in step %d\nhint: none", step); }); }},
    {"die_all", [] { victim = comm.rank; rank_loop([](int) { die("the same everywhere"); }); }},
    {"die_others", [] {
        victim = comm.rank == 0 ? -1 : comm.rank;
        rank_loop([](int) { die("the same on the others"); });
    }},
    {"thread_dies", [] { rank_loop([](int) { std::thread([] { die("from a thread"); }).join(); }); }},
    {"exit", [] { rank_loop([](int) { exit(0); }); }},
    {"stuck_early", wait_as_victim},
    {"stuck", [] {
        rank_loop([](int step) {
            comm_patience(200);                 // ends with the next progress
            comm_progress(step);
            for (;;) { pause(); }
        });
    }},
    {"other_call", [] { rank_loop([](int) { char c; comm_broadcast(&c, 1); }); }},
    {"facts", rank_facts},
    {"flood", rank_flood},
    {"patience", [] { rank_loop([](int) { comm_patience(200); compute_long(); }); }},
    {"slow_start", [] {                         // all compute, and nobody knows yet how long a step takes
        for (int part = 0; part < 3; part++) { comm_progress(0); }
        compute_long();
        rank_loop([](int) {});
    }},
    {"health", [] {
        comm_abort = [] { sleep(1000); };
        if (comm.rank == victim) { comm_health = [] { return std::string("NCCL: unhandled error"); }; }
        rank_loop([](int) {});
    }},
    {"code", [] { comm_end(); if (comm.rank == victim) { exit(3); } }},
    {"late", [] { comm_end(); if (comm.rank == victim) { die("after the end"); } }},
    {"hang_late", [] { comm_end(); wait_as_victim(); }},
};

// rank PROGRAM FOLDER VICTIM key=value...
static int rank_main(int argc, char** argv) {
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
    o.init = given.count("init") ? given["init"].c_str() : "auto";
    o.server = given["server"].c_str();
    o.folder = given["folder"].c_str();
    o.processes = number("processes", 0);
    o.process = number("process", -1);
    o.per_node = number("per_node", 0);
    o.start_timeout_s = number("timeout", 200);
    comm_limits.beat = 0.5;
    comm_limits.silence = number("silence", 100);
    comm_limits.still = number("still", 100);
    comm_limits.first = number("first", 600);
    comm_limits.health = 0.5;
    comm_limits.abort = number("abort", 100);
    comm_local_start_s = number("local", 200);
    comm_after_s = number("after", 20);
    folder = argv[3];
    victim = atoi(argv[4]);
    CommChild child;
    const bool is_victim = comm_child(&child) && child.rank == victim;
    if (strcmp(argv[2], "never_begins") == 0 && is_victim) { raise(SIGSTOP); }
    if (strcmp(argv[2], "ends_early") == 0 && is_victim) { raise(SIGKILL); }
    if (strcmp(argv[2], "early") == 0 && getenv(kCommChild)) { die("before the start"); }
    comm_start(o, argv);
    for (int number : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) { stop_on(number); }
    signal(SIGUSR2, [](int signal_number) { _exit(128 + signal_number); });     // a second Ctrl-C does so
    for (const auto& p : programs) { if (strcmp(p.name, argv[2]) == 0) { p.run(); } }
    comm_end();
    stdout_check();
    return 0;
}

// ---- cases ----

static const int kSilence = 5, kStill = 3;      // seconds, in cases that are about these limits

struct Case {
    std::string name, program;
    int world = 3, victim = -1;
    bool local = true;                  // else each rank is started with `args` and its own number
    std::vector<std::string> args, env;
    int signal_number = 0, to = -1;     // sent to rank `to`, or to the launcher, when all ranks run
    bool continued = false;             // rank `to` is, when it is the last that has not ended
    bool frozen = false;                // before that all ranks are stopped for longer than silence may be
    bool nohup = false;                 // SIGHUP is ignored, and comes before that
    std::vector<int> codes;             // of the launcher; or of each rank. 128+n: ended by signal n
    std::vector<std::string> words;     // of the one message; none: there must be none
    std::string out;                    // all of stdout
    int out_fd = -1;                    // where stdout goes, if not to a file
    int start = 0;                      // processes that are started, if not `world`
    std::string rank_variable;          // of a scheduler that numbers the ranks; "": -pn and -pr do

    // while it runs
    std::string dir;
    std::vector<pid_t> pids;
    std::vector<int> ended;             // exit codes, -1: runs
    bool hung = false;
    double started = 0, sent = 0;
};

static std::string read_all(const std::string& path) {      // "" if there is none; /proc's have no size
    FILE* f = fopen(path.c_str(), "r");
    std::string text;
    for (int c; f && (c = fgetc(f)) != EOF;) { text += (char)c; }
    if (f) { fclose(f); }
    return text;
}

static pid_t start_process(const Case& c, const std::vector<std::string>& more) {
    std::vector<std::string> words = {"test_comm", "rank", c.program, c.dir, std::to_string(c.victim)};
    words.insert(words.end(), c.args.begin(), c.args.end());
    words.insert(words.end(), more.begin(), more.end());
    std::vector<char*> argv;
    for (std::string& w : words) { argv.push_back(&w[0]); }
    argv.push_back(nullptr);
    fflush(stdout);
    const pid_t pid = fork();
    if (pid != 0) { return pid; }
    for (int fd : {STDOUT_FILENO, STDERR_FILENO}) {
        const std::string path = c.dir + (fd == STDOUT_FILENO ? "/out" : "/err");
        const bool given = fd == STDOUT_FILENO && c.out_fd >= 0;
        dup2(given ? c.out_fd : open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0666), fd);
    }
    signal(SIGINT, SIG_DFL);                    // a shell's & ignores it, nohup the other
    signal(SIGHUP, c.nohup ? SIG_IGN : SIG_DFL);
    setenv("LLMC_TEST_CASE", c.dir.c_str(), 1);     // by which what is left of it is found
    for (const std::string& e : c.env) {
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
    const int count = c->local ? 1 : c->start ? c->start : c->world;
    for (int r = 0; r < count; r++) {
        const std::string rank = std::to_string(r), world = std::to_string(c->world);
        std::vector<std::string> more;
        if (c->local) { more = {"gpus=" + world}; }
        else if (c->rank_variable.empty()) { more = {"processes=" + world, "process=" + rank}; }
        else { setenv(c->rank_variable.c_str(), rank.c_str(), 1); }
        c->pids.push_back(start_process(*c, more));
        unsetenv(c->rank_variable.empty() ? "LLMC_NONE" : c->rank_variable.c_str());
        c->ended.push_back(-1);
    }
}

static pid_t rank_pid(const Case& c, int rank) {
    return atoi(read_all(c.dir + format("/rank.%d", rank)).c_str());
}

// Processes that carry this case's mark.
static std::vector<pid_t> left_of(const Case& c) {
    std::vector<pid_t> left;
    DIR* dir = opendir("/proc");
    while (struct dirent* entry = dir ? readdir(dir) : nullptr) {
        const pid_t pid = atoi(entry->d_name);
        const std::string mark = "LLMC_TEST_CASE=" + c.dir + '\0';
        if (pid > 0 && pid != getpid() &&
            read_all(format("/proc/%d/environ", (int)pid)).find(mark) != std::string::npos) {
            left.push_back(pid);
        }
    }
    if (dir) { closedir(dir); }
    return left;
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
        c->sent = comm_now() + (c->frozen ? kSilence + 3 : c->nohup ? 1 : 0);
        for (int r = 0; r < c->world && c->frozen; r++) { kill(rank_pid(*c, r), SIGSTOP); }
        if (c->nohup) { kill(c->pids[0], SIGHUP); }
    }
    if (c->sent && comm_now() >= c->sent && c->signal_number) {
        for (int r = 0; r < c->world && c->frozen; r++) { kill(rank_pid(*c, r), SIGCONT); }
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
    const std::string err = read_all(c.dir + "/err"), out = read_all(c.dir + "/out");
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
        CHECK(err.find(word) != std::string::npos, "%s: no '%s' in:\n%s", name, word.c_str(), err.c_str());
    }
    CHECK(c.out.empty() || out == c.out, "%s: on stdout:\n%s", name, out.c_str());
    const double until = comm_now() + 60;       // who is killed is gone when he next gets a core
    std::vector<pid_t> left = left_of(c);
    while (!left.empty() && comm_now() < until) {
        usleep(20000);
        left = left_of(c);
    }
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
    return !running.empty();
}

static void add_cases(const std::vector<Case>& cases) {
    for (const Case& c : cases) { if (holds(c.name, only)) { to_run.insert(to_run.begin(), c); } }
}

static struct sockaddr_in loopback(int port) {
    struct sockaddr_in a = {};
    a.sin_family = AF_INET;
    a.sin_port = htons((uint16_t)port);
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return a;
}

// A socket that is bound to a port of 127.0.0.1 and does not listen; -1: the port is taken.
static int bound_socket(int port, int reuse) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const struct sockaddr_in a = loopback(port);
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

static std::string local_server(int port) { return format("127.0.0.1:%d", port); }

static Case make_case(const std::string& name, const std::string& program, int world, std::vector<int> codes,
                      std::vector<std::string> words = {}, int victim = -1,
                      std::vector<std::string> args = {}) {
    Case c;
    c.name = name;
    c.program = program;
    c.world = world;
    c.codes = codes;
    c.words = words;
    c.victim = victim;
    c.args = args;
    return c;
}

// A signal to the launcher or to a rank, when all run.
static Case signalled(const std::string& name, int number, int to, std::vector<int> codes,
                      std::vector<std::string> words = {}, const std::string& program = "loop") {
    Case c = make_case(name, program, 3, codes, words);
    c.signal_number = number;
    c.to = to;
    return c;
}

// The same over TCP: one process for each rank, all but `odd` end with `code`.
static Case over_tcp(Case c, int code = 0, int odd = -1, int odd_code = 0) {
    c.name += " tcp";
    c.local = false;
    c.args.insert(c.args.begin(), {"init=tcp", "server=" + local_server(free_port())});
    c.codes.assign(c.world, code);
    if (odd >= 0) { c.codes[odd] = odd_code; }
    return c;
}

static const std::string kSilenceArg = format("silence=%d", kSilence), kStillArg = format("still=%d", kStill);

// What a failure of rank 0, of the last rank and of others looks like.
static std::vector<Case> failure_cases() {
    std::vector<Case> cases = {
        // those that wait longest come first
        make_case("a slow first step", "slow_start", 3, {0}, {}, -1, {kStillArg}),
        make_case("patience of rank 0", "patience", 3, {0}, {}, 0, {kStillArg}),
        make_case("patience of rank 1", "patience", 3, {0}, {}, 1, {kStillArg}),
        make_case("stuck before the first step", "stuck_early", 3, {1},
                  {"error: rank 1 (", "makes no progress", "had not begun its first step"}, 1, {"first=3"}),
        make_case("stopped at the start", "never_begins", 3, {1}, {"rank 1 of 3 did not come"}, 1,
                  {"local=4"}),
        make_case("a hang after the end", "hang_late", 3, {1},
                  {"error: rank 2 (pid ", "did not end when rank 0 had"}, 2, {"after=2"}),
        // comm_abort hangs
        make_case("health of rank 0", "health", 3, {1}, {"error: NCCL: unhandled"}, 0, {"abort=3"}),
        make_case("health of rank 1", "health", 3, {1}, {"error: rank 1: NCCL: unhandled"}, 1, {"abort=3"}),
        over_tcp(make_case("die", "die", 3, {}, {"error: rank 2: bad thing in step 5"}, 2), 1),
        make_case("die all", "die_all", 4, {1}, {"the same everywhere"}),
        over_tcp(make_case("die all", "die_all", 4, {}, {"the same everywhere"}), 1),
        // rank 0 speaks for the first of them, and has the others end silently
        over_tcp(make_case("die others", "die_others", 4, {}, {": the same on the others"}), 1),
        make_case("die in a thread", "thread_dies", 2, {1}, {"error: rank 1: from a thread"}, 1),
        make_case("die early", "early", 3, {1}, {"error: before the start\n"}),
        make_case("rank 2 killed at the start", "ends_early", 3, {137},
                  {"error: rank 2 (pid ", "was ended by signal 9"}, 2),
        make_case("rank 0 killed at the start", "ends_early", 3, {137},
                  {"error: rank 0 (pid ", "was ended by signal 9"}, 0),
        make_case("die late", "late", 3, {1}, {"error: rank 2: after the end"}, 2),
        make_case("other call", "other_call", 3, {1}, {"rank 1 is at operation"}, 1),
        make_case("facts", "facts", 4, {1}, {"differ in -b", "on rank 0", "8'", "4' on rank 2"}, 2),
        make_case("code", "code", 3, {3}, {}, 1),
        signalled("the launcher is killed", SIGKILL, -1, {137}),
    };
    Case lonely = over_tcp(make_case("never come", "loop", 4, {}, {"ranks 2, 3 of 4 did not", "LLMC_JOB_ID"}),
                           1);
    lonely.args.push_back("timeout=8");
    lonely.start = 2;                           // rank 1 has come and ends silently
    cases.insert(cases.begin(), lonely);
    for (int rank : {0, 2}) {
        const std::string who = format("error: rank %d (", rank);
        for (int number : {SIGKILL, SIGSTOP}) {
            const std::string silent = format("no sign of life for %d s", kSilence);
            // who fails first is the rank that was killed, or the one that saw the stopped one
            Case c = signalled(format("signal %d to rank %d", number, rank), number, rank,
                               {number == SIGKILL ? 137 : 1},
                               {who, number == SIGKILL ? "died" : silent, "its last step was"});
            c.args = {kSilenceArg};
            cases.push_back(c);
            c.words.pop_back();                 // over TCP the step is as old as the last heartbeat
            c.continued = number == SIGSTOP;    // nobody kills it: it ends when it goes on
            cases.push_back(over_tcp(c, 1, rank, number == SIGKILL ? 137 : 1));
        }
        const std::string speaks = rank ? format("error: rank %d: ", rank) : "error: ";
        cases.push_back(make_case(format("die %d", rank), "die", 3, {1},
                                  {speaks + "bad thing in step 5", "\nhint: none\n"}, rank));
        cases.push_back(make_case(format("stuck %d", rank), "stuck", 3, {1},
                                  {who, "makes no progress for", "step was 5"}, rank, {kStillArg}));
        cases.push_back(make_case(format("exit %d", rank), "exit", 3, {1}, {who, "died; its last step was 5"},
                                  rank));
    }
    return cases;
}

// A signal to the launcher, or to any rank that has none, stops all ranks at the same step.
static std::vector<Case> stop_cases() {
    std::vector<Case> cases;
    for (int number : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) {
        cases.push_back(signalled(format("stop by signal %d", number), number, -1, {0}));
        cases.back().out = format("the loop has ended: %d\n", number);     // once: the others print nothing
    }
    Case nohup = cases[0], frozen = cases[0];
    nohup.name = "stop with nohup";
    nohup.nohup = true;                         // it was SIGINT that stopped it
    cases.push_back(nohup);
    frozen.name = "all are stopped for a while";        // as a scheduler or a debugger does
    frozen.frozen = true;
    frozen.args = {kSilenceArg};
    cases.insert(cases.begin(), frozen);
    for (int rank : {0, 2}) {
        cases.push_back(over_tcp(signalled(format("stop by rank %d", rank), SIGINT, rank, {})));
    }
    // the user's own doing is no error
    cases.push_back(signalled("a signal that kills", SIGHUP, -1, {128 + SIGHUP}, {}, "unhandled"));
    cases.push_back(signalled("a signal that ends at once", SIGUSR2, -1, {128 + SIGUSR2}));
    cases.push_back(signalled("at once, and the launcher comes late", SIGUSR2, -1, {128 + SIGUSR2}, {},
                              "slow_launcher"));
    return cases;
}

// One process for each rank, which a scheduler's variables number.
static Case scheduled(const std::string& name, const std::string& variable, std::vector<std::string> env) {
    Case c = make_case(name, "collectives", 2, {0, 0});
    c.local = false;
    c.rank_variable = variable;
    c.env = env;
    return c;
}

static std::vector<Case> start_cases() {
    std::vector<Case> cases;
    for (int world : {8, 5, 3, 2}) {
        Case c = make_case(format("collectives of %d", world), "collectives", world, {0});
        c.out = format("collectives of %d:", world);
        for (int r = 0; r < world; r++) { c.out += format(" %d.%d/%d", r, r, world); }
        c.out += "\n";
        cases.push_back(c);
    }
    Case tcp = over_tcp(make_case("collectives", "collectives", 3, {}));
    tcp.args.push_back("per_node=2");
    tcp.out = "collectives of 3: 0.0/2 1.1/2 2.0/1\n";      // rank 0's; the others print nothing
    cases.push_back(tcp);
    Case ip6 = over_tcp(make_case("collectives v6", "collectives", 2, {}));
    ip6.args[1] = "server=localhost:" + std::to_string(free_port());
    cases.push_back(ip6);
    Case port = over_tcp(make_case("port in use", "loop", 2, {},
                                   {"cannot listen on port", "in use", "hint:"}), 1);
    port.args[1] = "server=" + local_server(port_in_use());
    port.start = 1;
    cases.push_back(port);
    cases.push_back(scheduled("torchrun", "RANK", {"WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1",
                                                   format("MASTER_PORT=%d", free_port() - 1)}));
    int job = 70000 + (int)getpid() % 10000;    // the port is made of the job's number
    while (free_port(20000 + job % 10000) < 0) { job++; }
    cases.push_back(scheduled("slurm", "SLURM_PROCID", {"SLURM_NTASKS=2", "SLURM_STEP_NODELIST=localhost",
                                                        "SLURM_STEP_ID=0", format("SLURM_JOB_ID=%d", job)}));
    return cases;
}

// ---- the folder of -pi fs ----

// Whose file it is, who may read it, and who may write it when.
static void test_meeting_file(const std::string& place) {
    CommOptions o;
    o.folder = place.c_str();
    const std::string path = comm_meeting_file(o);
    struct stat st = {};
    const mode_t mask = umask(0);
    const int locked = comm_write_meeting(o, "rank 0 is here");
    umask(mask);
    CHECK(stat(path.c_str(), &st) == 0 && (st.st_mode & 0777) == 0600, "mode %o", st.st_mode);
    CHECK(comm_read_meeting(o) == "rank 0 is here", "its own user cannot read it");
    check_dies("two jobs in a folder", [&] { comm_write_meeting(o, ""); }, {"another job", "LLMC_JOB_ID"});
    close(locked);
    CHECK(symlink(path.c_str(), (place + "/link").c_str()) == 0, "no link");
    CHECK(rename((place + "/link").c_str(), path.c_str()) == 0, "no link");
    CHECK(comm_read_meeting(o).empty(), "a link is read");
    check_dies("a link", [&] { comm_write_meeting(o, ""); }, {"cannot create", "rendezvous"});
    unlink(path.c_str());
    write_text(path, "of another user");
    if (chown(path.c_str(), 65534, 65534) != 0) { SKIP(2, "only root can give a file away"); }
    else {
        CHECK(comm_read_meeting(o).empty(), "another user's file is read");
        check_dies("another's file", [&] { comm_write_meeting(o, ""); },
                   {"no file of this user", "LLMC_JOB_ID"});
    }
    unlink(path.c_str());
}

static std::string meeting_point() { return in_folder("meeting point"); }

// What killed jobs have left: a port that nobody has now, one where nobody ever says a word, half a file.
static std::vector<Case> folder_cases() {
    const std::string place = meeting_point(), stale = comm_describe(comm_random_key(), free_port());
    mkdir_check(place.c_str());
    write_text(place + "/rendezvous-other", stale);
    std::vector<Case> cases;
    const std::string mute = comm_describe(1, port_in_use());
    for (const std::string& left : {stale, mute, stale.substr(0, stale.size() / 2)}) {
        const std::string id = std::to_string(cases.size());
        Case c = make_case("folder " + id, "collectives", 3, {0, 0, 0}, {}, -1,
                           {"init=fs", "folder=" + place});
        c.local = false;
        c.env = {"LLMC_JOB_ID=" + id};
        write_text(place + "/rendezvous-" + id, left);
        cases.push_back(c);
    }
    Case file = make_case("folder that is a file", "loop", 2, {1}, {"is not a folder"}, -1,
                          {"init=fs", "folder=" + place + "/rendezvous-other"});
    file.local = false;
    file.start = 1;
    cases.push_back(file);
    return cases;
}

// After the cases.
static void test_folder() {
    const std::string place = meeting_point(), stale = read_text(place + "/rendezvous-other");
    const std::vector<std::string> names = names_in(place);
    CHECK(names == std::vector<std::string>{"rendezvous-other"}, "after a job its folder holds %zu files",
          names.size());
    CHECK(comm_addresses(stale).size() >= 1, "a whole file has no address");
    size_t taken = 0;
    for (size_t n = 0; n < stale.size(); n++) { taken += !comm_addresses(stale.substr(0, n)).empty(); }
    CHECK(taken == 0, "%zu parts of a file are taken for one", taken);
    test_meeting_file(place);
    if (geteuid() != 0) {
        chmod(place.c_str(), 0500);
        check_dies("folder read-only", [&] {
            CommJob job;
            job.world = 2;
            CommOptions o;
            o.folder = place.c_str();
            comm_find_fs(&job, o);
        }, {"cannot create", "Permission denied"});
        chmod(place.c_str(), 0700);
    }
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
    while (!comm_wait_fd(fd, POLLIN, comm_now() + 0.02) && comm_now() < until) { step_cases(); }
    const ssize_t bytes = recv(fd, &answer, 1, MSG_DONTWAIT);
    return bytes == 0 || (bytes < 0 && errno != EAGAIN);
}

// A job of which only rank 0 has been started, and who calls it.
struct Callers {
    Case job;
    CommAddress address;
    std::vector<int> fds;

    explicit Callers(Case c) : job(c) {
        job.start = 1;
        address = comm_parse_server(c.args[1].substr(7), kCommPort, 0);
        start_case(&job);
    }
    int call() {                                // until rank 0 listens
        int fd;
        std::string why;
        while ((fd = comm_connect(address, comm_now() + 60, &why)) < 0) { usleep(10000); }
        fds.push_back(fd);
        return fd;
    }
    int says(const void* data, size_t bytes) {
        const int fd = call();
        comm_write(fd, data, bytes, comm_now() + 60);
        return fd;
    }
    bool is_answered(int rank, int world, uint64_t key) {
        CommHello hello = comm_hello(CommJob());
        hello.rank = rank, hello.world = world, hello.key = key;
        char answer[sizeof(kCommKnown)];
        const int fd = says(&hello, sizeof(hello));
        return comm_read(fd, answer, sizeof(answer), comm_now() + 60);
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
    Case c = over_tcp(make_case("strangers", "collectives", 3, {}));
    c.env = {"LLMC_JOB_ID=of this test"};
    Callers callers(c);
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

    size_t most = 0;                            // more than rank 0 bears with, all silent
    while (callers.fds.size() < 5 * kCommStrangers) { callers.call(); }
    for (int looks = 0; looks < 50; looks++, usleep(10000)) {
        most = std::max(most, names_in(format("/proc/%d/fd", (int)callers.job.pids[0])).size());
    }
    CHECK(most > kCommStrangers / 2 && most < 2 * kCommStrangers, "rank 0 has %zu open files", most);
    for (int r : {1, 2}) {
        callers.job.pids.push_back(start_process(callers.job, {"processes=3", format("process=%d", r)}));
        callers.job.ended.push_back(-1);
    }
    callers.end();
}

// ---- ranks that do not fit: another number of processes, a rank that has come already ----

static void test_places() {
    Callers callers(over_tcp(make_case("places", "loop", 3, {})));
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

// ---- a reader that takes its time, as less does ----

static void test_reader() {
    int ends[2];
    CHECK(pipe2(ends, O_CLOEXEC) == 0, "no pipe");
    Case c = make_case("a slow reader", "flood", 2, {0}, {}, -1, {kStillArg});
    c.out_fd = ends[1];
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
        CHECK(comm_connect({to, number, {}}, comm_now() + 60, &why) < 0, "%s: who listens there?", host);
        if (to == "::1" && why != strerror(ECONNREFUSED)) { continue; }     // no IPv6 here
        int listened;
        const int listener = comm_listen({host, number, {}}, &listened);
        const int fd = comm_connect({to, number, {}}, comm_now() + 60, &why);
        CHECK(listened == port && fd >= 0, "%s: %d, not %d: %s", host, listened, port, why.c_str());
        close(fd);
        close(listener);
    }
}

// Who calls again and again where nobody listens yet gets that port for the near end in the end.
static void test_own_port() {
    int port, fd = -1;
    while (fd < 0) {                            // near ends are even first, what listens is odd
        close(comm_listen({"127.0.0.1", "0", {}}, &port));
        fd = bound_socket(port &= ~1, 0);
    }
    close(fd);
    const CommAddress address = {"127.0.0.1", std::to_string(port), {}};
    const std::string refused = strerror(ECONNREFUSED);
    std::string why = refused;
    int calls = 0;
    for (fd = -1; fd < 0 && why == refused && calls < 50000; calls++) {
        fd = comm_try(address, comm_hello(CommJob()), 0, comm_now() + 60, &why);
    }
    if (calls == 50000) { SKIP(2, "port %d was not the near end in %d calls", port, calls); return; }
    CHECK(fd < 0, "port %d takes itself for rank 0, at call %d", port, calls);
    check_lives("rank 0 after that", [&] { comm_listen(address, &port); });
    if (fd >= 0) { close(fd); }
}

static void test_names() {
    const char* const lists[][2] = {
        {"node1", "node1"}, {"node1,node2", "node1"}, {"n[07-12,20],gpu3", "n07"}, {"r[1-2]n[3,4]x", "r1n3x"},
        {"n[5]", "n5"}, {"", ""}, {"n[1-", "n1"},
    };
    for (const auto& l : lists) { CHECK_TEXT(comm_first_host(l[0]), l[1]); }
    const char* const servers[][2] = {
        {"a", "a 29547"}, {"a.b:1", "a.b 1"}, {"[::1]:65535", "::1 65535"}, {"::1", "::1 29547"},
        {"[::1]", "::1 29547"},
    };
    for (const auto& s : servers) {
        const CommAddress a = comm_parse_server(s[0], kCommPort, 0);
        CHECK_TEXT(a.host + " " + a.port, s[1]);
    }
    for (const char* bad : {"a:", ":1", "a:0", "a:65536", "a:b", "a:1x", "[::1", "[::1]x"}) {
        check_dies(bad, [&] { comm_parse_server(bad, kCommPort, 0); }, {"-ps", bad, "65535"});
    }
    const std::string same(100, 's');
    const std::string shortened = comm_shorten(same + "1" + same, same + "2" + same);
    CHECK(shortened.size() <= 66 && holds(shortened, "1"), "%s", shortened.c_str());
}

static void test_places_of_schedulers() {
    struct { const char* name; std::vector<const char*> env; const char* port; } kinds[] = {
        {"srun", {"SLURM_JOB_ID=1234567", "SLURM_JOB_NODELIST=n1"}, "24567"},
        {"srun", {"SLURM_JOB_ID=98765", "SLURM_JOB_NODELIST=n1"}, "28765"},
        {"torchrun", {"MASTER_ADDR=n1", "MASTER_PORT=500"}, "501"},
    };
    for (const auto& k : kinds) {
        check_lives(k.env[0], [&] {
            for (const char* e : k.env) { putenv((char*)e); }
            const CommAddress a = comm_foreign_server(CommOptions(), {k.name, 0, 2});
            printf("%s:%s", a.host.c_str(), a.port.c_str());
        }, std::string("n1:") + k.port);
    }
}

// How long a rank may stand still, with a clock that is put forward.
static void test_patience() {
    CommState* s = comm_state = new CommState();
    auto step = [&](int64_t number, double took) {
        s->since = s->since - took;
        comm_progress(number);
        return (double)s->allowed;
    };
    auto is = [](double got, double want) { return got > want - 1 && got < want + 1; };
    s->since = comm_now();
    CHECK(is(step(0, 70), comm_limits.first) && is(step(0, 1), comm_limits.first), "the first step has time");
    CHECK(is(step(1, 1), comm_limits.still), "short steps");
    comm_patience(200);
    CHECK(is(s->allowed, 200), "patience is for %g s", (double)s->allowed);
    CHECK(is(step(2, 150), comm_limits.still), "patience lasts longer than the step that asked for it");
    CHECK(is(step(3, 30), 300) && is(step(4, 1), 300), "steps may take ten times the longest");
    delete s;
    s = comm_state = new CommState();
    s->since = comm_now();
    step(0, 70);                                // before it nobody knows
    step(0, 50);
    CHECK(is(step(1, 1), 500) && is(step(2, 60), 600), "steps take as long as the first, and longer");
    comm_state = nullptr;
    delete s;
}

// What a peer says of sizes is not believed, and of its place in the job neither.
static void test_sizes() {
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
}

static void test_open_files() {
    auto with = [](rlim_t soft, rlim_t hard, const std::function<void()>& f) {
        const struct rlimit limit = {soft, hard};
        setrlimit(RLIMIT_NOFILE, &limit);
        f();
    };
    check_dies("ulimit -n 40", [&] { with(40, 40, [] { comm_need_files(24); }); },
               {"24 ranks take", "open files", "have 40", "ulimit"});
    check_lives("a limit that may be raised", [&] {
        with(40, 500, [] {
            struct rlimit now;
            comm_need_files(24);
            getrlimit(RLIMIT_NOFILE, &now);
            printf("%d", (int)now.rlim_cur);
        });
    }, "500");
    check_dies("no descriptor is left", [&] {
        int port;
        std::string why;
        std::vector<CommPending> pending;
        const int listener = comm_listen({"127.0.0.1", "0", 0}, &port);
        const int fd = comm_connect({"127.0.0.1", std::to_string(port), 0}, comm_now() + 60, &why);
        die_hook = [] {                         // the sanitizers open files at the end
            const struct rlimit enough = {500, 500};
            setrlimit(RLIMIT_NOFILE, &enough);
        };
        with(fd + 1, 500, [&] { comm_accept(listener, &pending); });
    }, {"connections of all ranks", strerror(EMFILE)});
}

static void test_contradictions() {
    typedef std::function<void(CommOptions*)> Change;
    struct { const char* name; Change change; std::vector<std::string> words; std::vector<const char*> env; }
    wrong[] = {
        {"gpus under mpirun", [](CommOptions* o) { o->gpus = 2; }, {"--gpus 2", "mpirun", "4 ranks"},
         {"OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE=4"}},
        {"gpus and tcp", [](CommOptions* o) { o->gpus = 2; o->init = "tcp"; }, {"--gpus 2", "-pi"}, {}},
        {"no such init", [](CommOptions* o) { o->init = "udp"; }, {"-pi 'udp'", "tcp"}, {}},
        {"tcp alone", [](CommOptions* o) { o->init = "tcp"; }, {"-ps HOST"}, {}},
        {"no -pn", [](CommOptions* o) { o->init = "tcp"; o->server = "a"; }, {"-pn", "-pr"}, {}},
        {"fs alone", [](CommOptions* o) { o->init = "fs"; }, {"-pf"}, {}},
        {"-pr too big",
         [](CommOptions* o) { o->init = "fs"; o->folder = "x"; o->processes = o->process = 2; },
         {"-pr 2", "-pn 2", "0 to 1"}, {}},
        {"-ps for nothing", [](CommOptions* o) { o->server = "a"; }, {"-ps needs -pi tcp"}, {}},
        {"-pn for nothing", [](CommOptions* o) { o->processes = 2; }, {"-pn and -pr need"}, {}},
        {"-pn against srun", [](CommOptions* o) { o->init = "fs"; o->folder = "x"; o->processes = 3; },
         {"-pn 3", "srun", "rank 0 of 2"}, {"SLURM_PROCID=0", "SLURM_NTASKS=2", "SLURM_STEP_ID=0"}},
        {"too many", [](CommOptions*) {}, {"5000 ranks", "4096"},
         {"SLURM_PROCID=0", "SLURM_NTASKS=5000", "SLURM_STEP_ID=0"}},
        {"no master", [](CommOptions*) {}, {"torchrun", "-ps"}, {"RANK=0", "WORLD_SIZE=2"}},
#ifndef USE_MPI
        {"no MPI", [](CommOptions*) {}, {"without MPI", "hint:"},
         {"OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE=2"}},
#endif
    };
    for (const auto& w : wrong) {
        check_dies(w.name, [&] {
            for (const char* e : w.env) { putenv((char*)e); }
            CommOptions o;
            w.change(&o);
            char* argv[] = {nullptr};
            comm_start(o, argv);
        }, w.words);
    }
    check_lives("a batch script is none of the tasks that it may start", [] {
        for (const char* e : {"SLURM_PROCID=0", "SLURM_NTASKS=8", "ENVIRONMENT=BATCH"}) { putenv((char*)e); }
        char* argv[] = {nullptr};
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
    TEST("comm: names of hosts, servers") { test_names(); }
    TEST("comm: ports") { test_ports(); }
    TEST("comm: a connection to oneself") { test_own_port(); }
    TEST("comm: contradictions") { test_contradictions(); }
    TEST("comm: where schedulers have rank 0") { test_places_of_schedulers(); }
    TEST("comm: patience") { test_patience(); }
    TEST("comm: sizes, open files") { test_sizes(); test_open_files(); }
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
