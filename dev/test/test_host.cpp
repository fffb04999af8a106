/*
Tests of the small host headers: errors, checked and atomic files, host_memory, json, memory plans, numbers,
flags, settings, schedulers, sampler, rand, logger, reports, texts. Everything random comes from fixed seeds,
so a result never changes from run to run.
*/
#include <float.h>                      // gives: FLT_MAX
#include <math.h>                       // gives: fabs, sqrt, INFINITY, NAN
#include <sys/resource.h>               // gives: getrlimit

#include <thread>                       // gives: std::thread

#include "llmc/atomic_files.h"          // gives: what is tested, here and in the lines below
#include "llmc/run/flags.h"
#include "llmc/run/run_folder.h"
#include "llmc/files/json.h"
#include "llmc/run/logger.h"
#include "llmc/run/plan.h"
#include "llmc/run/report.h"
#include "llmc/run/samples.h"
#include "llmc/host_cores.h"
#include "llmc/host_memory.h"
#include "llmc/model/lanes.h"
#include "llmc/model/memory_plan.h"
#include "llmc/model/muon_plan.h"
#include "llmc/rand.h"
#include "llmc/data/sampler.h"
#include "llmc/run/schedulers.h"
#include "child.h"                      // gives: folder, run_child, check_dies, CHECK_TEXT, CHECK_HOLDS
#include "test.h"                       // gives: TEST, CHECK

static bool near(double a, double b, double tolerance) { return fabs(a - b) <= tolerance; }   // false for NaN

// ---- errors, and files that appear whole or not at all ----

// The unfinished files of that name, as a shell lists them.
static std::vector<std::string> parts(const std::string& path) {
    std::vector<std::string> found;
    for (const std::string& name : names_in(folder)) {
        const std::string file = in_folder(name);
        if (file.find(path) == 0 && file.size() > 5 && file.substr(file.size() - 5) == ".part") {
            found.push_back(file);
        }
    }
    return found;
}

static void test_check() {
    const std::string path = in_folder("model.bin");
    TEST("check: atomic files on disks that refuse") {
        atomic_file(path, "old");
        CHECK_TEXT(read_text(path), "old");
        struct stat st;
        CHECK(stat(path.c_str(), &st) == 0 && (st.st_mode & 0600) == 0600, "nobody may read the file");
        check_dies("a limit on size", [&] {             // a write in the middle fails, not the last one
            limit_to(RLIMIT_FSIZE, 4096);
            atomic_file(path, std::string(1000000, 'x'));
        }, {path, "too large"});
        CHECK_TEXT(read_text(path), "old");
        check_dies("folder's sync", [&] { refuse_call(SYNC, 2, EIO); atomic_file(path, "new"); },
                   {path, "its folder cannot be synced"});
        CHECK_TEXT(read_text(path) + joined(parts(path)), "new");
        check_lives("a file system that cannot sync folders",
                    [&] { refuse_call(SYNC, 2, EINVAL); atomic_file(path, "3"); });
        check_dies("folder missing", [] { atomic_open(in_folder("none/x")); }, {"none/x", "No such file"});
        check_lives("more files than descriptors", [&] {
            limit_to(RLIMIT_NOFILE, 24);
            for (int i = 0; i < 100; i++) { atomic_file(path, "4"); }
        });
    }
    // Each keeps the name of its unfinished file until that is whole, or until another one's error takes it.
    TEST("check: files of several threads") {
        std::atomic<int> lost(0), stop(0);
        std::vector<std::thread> threads;
        for (int t = 0; t < 4; t++) {
            threads.emplace_back([&, t] {
                for (int i = 0; i < 200; i++) {
                    AtomicFile a = atomic_open(in_folder(format("thread%d", t)));
                    lost += std::count(std::begin(part_names), std::end(part_names), a.temp) != 1;
                    atomic_commit(&a);
                }
            });
        }
        for (std::thread& t : threads) { t.join(); }
        for (const auto& part : part_names) { lost += part != nullptr; }
        CHECK(lost == 0, "%d names of unfinished files were lost, doubled or kept", lost.load());
        std::thread remover([&] { while (!stop) { atomic_remove_parts(); std::this_thread::yield(); } });
        for (int i = 0; i < 200; i++) {
            AtomicFile a = atomic_open(in_folder(format("removed%d", i)));
            fclose(a.f);
            while (access(a.temp, F_OK) == 0) { std::this_thread::yield(); }
            free(a.temp);
        }
        stop = 1;
        remover.join();
        CHECK_TEXT(joined(parts(in_folder("thread"))), "");
    }
    const std::string killed = in_folder("killed.bin");
    auto half_then = [&](const std::function<void()>& end) {
        return run_child([&] {
            for (int number : {SIGINT, SIGTERM, SIGHUP}) { signal(number, SIG_DFL); }
            AtomicFile a = atomic_open(killed);
            atomic_write(&a, "half", 4);
            fflush(a.f);
            end();
        }).code;
    };
    TEST("check: kills, and several writers") {
        atomic_file(killed, "old");
        CHECK_IS(half_then([] { raise(SIGKILL); }), -SIGKILL);
        CHECK_TEXT(read_text(killed), "old");
        atomic_file(in_folder("killed"), "another file");      // removes nothing of killed.bin's
        CHECK_IS(parts(killed).size(), 1);
        AtomicFile mine = atomic_open(killed);                    // removes what the kill has left,
        CHECK_TEXT(joined(parts(killed)), mine.temp);
        AtomicFile other = atomic_open(killed);                   // but nothing that is being written,
        CHECK(strcmp(mine.temp, other.temp) != 0, "two writers share %s", mine.temp);
        CHECK_IS(parts(killed).size(), 2);
        CHECK_IS(half_then([] {}), 0);                          // nor what another process writes
        CHECK_IS(parts(killed).size(), 3);
        atomic_write(&mine, "mine", 4);
        atomic_write(&other, "the other's", 11);
        atomic_commit(&mine);
        CHECK_TEXT(read_text(killed), "mine");
        atomic_commit(&other);
        CHECK_TEXT(read_text(killed), "the other's");
    }
    TEST("check: signals") {
        atomic_file(killed, "old");
        for (int number : {SIGINT, SIGTERM, SIGHUP}) {
            CHECK_IS(half_then([=] { raise(number); }), -number);
            CHECK_TEXT(joined(parts(killed)), "");
        }
        Child kept = run_child([&] {                // the program's own way with a signal stays its way
            signal(SIGTERM, [](int) { _exit(42); });
            signal(SIGHUP, SIG_IGN);
            AtomicFile a = atomic_open(killed);
            raise(SIGHUP);
            raise(SIGTERM);
        });
        CHECK_IS(kept.code, 42);
    }
    TEST("check: only PATH.PID.N.part is an unfinished PATH") {
        const std::string own = in_folder("download");
        const char* const others[] = {".part", ".7.part", "..part", ".7..part", ".1.2.3.part", ".x.1.part",
                                      ".1.2.part.x", ".1.2.apart", ".bin.1.2.part", ".1.2part"};
        for (const char* end : others) { write_text(own + end, ""); }
        write_text(own + ".1.2.part", "");
        atomic_file(own, "whole");
        for (const char* end : others) { CHECK_IS(file_size((own + end).c_str()), 0); }
        CHECK_IS(file_size((own + ".1.2.part").c_str()), -1);
    }
    const std::string pipe = in_folder("pipe"), link = in_folder("link"), target = in_folder("target");
    TEST("check: what is no regular file") {
        CHECK(mkfifo(pipe.c_str(), 0600) == 0, "cannot make a pipe");
        CHECK(symlink(target.c_str(), link.c_str()) == 0, "cannot make a link");
        atomic_file(target, "precious");
        const struct { std::string path; const char* what; } odd[] = {
            {pipe, "a pipe"}, {link, "a symbolic link"}, {"/dev/null", "a device"}, {folder, "a folder"}};
        for (const auto& o : odd) {
            check_dies("atomic " + o.path, [&] { atomic_open(o.path); }, {o.path, o.what, "regular"});
            check_dies("w " + o.path, [&] { fopen_check(o.path.c_str(), "w"); }, {o.path, o.what});
            if (o.path == link) { continue; }       // may be read through
            check_dies("r " + o.path, [&] { fopen_check(o.path.c_str(), "rb"); }, {o.path, o.what});
        }
        CHECK_TEXT(read_text(link), "precious");
        check_lives("a link under the name that the unfinished file would have", [&] {
            const std::string probe = in_folder("probe"), fresh = in_folder("new.bin");
            int n = 0;
            sscanf(atomic_open(probe).temp + probe.size(), ".%*d.%d", &n);
            const std::string part = fresh + format(".%d.%d.part", (int)getpid(), n + 1);
            if (symlink(target.c_str(), part.c_str()) != 0) { _exit(1); }
            atomic_file(fresh, "new");
        });
        CHECK_TEXT(read_text(target), "precious");
        CHECK_TEXT(read_text(in_folder("new.bin")), "new");
    }
    TEST("check: folders and short files") {
        mkdir_check(in_folder("a/b/c").c_str());
        mkdir_check(in_folder("a/b/c").c_str());
        struct stat st;
        CHECK(stat(in_folder("a/b/c").c_str(), &st) == 0 && S_ISDIR(st.st_mode), "no folder a/b/c");
        check_dies("a file in the way", [] { mkdir_check(in_folder("model.bin/x").c_str()); }, {"bin/x"});
        check_dies("a file for a folder", [] { mkdir_check(in_folder("model.bin").c_str()); },
                   {"model.bin", "not a folder"});
        check_dies("missing file", [] { fopen_check(in_folder("none").c_str(), "r"); }, {"/none", "No"});
        check_dies("truncated file", [&] {
            int header[256];
            fread_check(header, 4, 256, fopen_check(path.c_str(), "rb"), path.c_str());
        }, {"model.bin", "truncated", "1024"});
    }
    TEST("check: what the system cannot tell does not count as missing") {
        const std::string loop = in_folder("loop");         // which nobody can follow, not even root
        CHECK(symlink(loop.c_str(), loop.c_str()) == 0, "cannot make a link");
        const std::vector<std::string> cannot_list = {"cannot list the folder '" + folder, "output", "hint:"};
        check_dies("stat", [&] { file_size((loop + "/x").c_str()); }, {"cannot look at '" + loop, "hint:"});
        check_dies("opendir", [&] { folder_names(loop); }, {"cannot list the folder '" + loop, "links"});
        for (int k : {1, 3}) {                              // the first entry, and one behind it
            check_dies("readdir", [&] { refuse_call(LIST, k, EIO); folder_names(folder); }, cannot_list);
        }
        for (const std::string& none : {in_folder("none"), in_folder("none/x"), path + "/x",
                                        in_folder(std::string(300, 'x'))}) {
            CHECK_IS(file_size(none.c_str()), -1);
            CHECK_IS(folder_names(none).size(), 0);
        }
        CHECK_IS(folder_names(in_folder("a/b")).size(), 3);
        check_lives("what a kill left need not be found",
                    [&] { refuse_call(LIST, 1, EIO); atomic_file(path, "new"); });
        check_dies("main.log", [&] { holds_run(loop + "/x"); }, {"cannot look at '" + loop, "hint:"});
        check_dies("read", [&] {                            // fails with EIO
            char byte, mem[] = "/proc/self/mem";
            fread_check(&byte, 1, 1, fopen_check(mem, "rb"), mem);
        }, {"cannot read '/proc/self/mem'"});
        CHECK_TEXT(from_start("x.bin", &loop), loop + "/x.bin");
        const std::string none = in_folder("none");
        CHECK_TEXT(from_start("x.bin", &none), "x.bin");
        const std::string odd = in_folder("a:1,b?");        // a mixture's paths say \: and \,
        mkdir_check(odd.c_str());
        const std::string shown_odd = in_folder("a\\:1\\,b\\?/"), mixture = "x_*.bin:0.5,/y.bin:0.5";
        CHECK_TEXT(data_from_start(mixture, &odd), shown_odd + "x_*.bin:0.5,/y.bin:0.5");
        CHECK_TEXT(data_from_start("x_*.bin", &odd), in_folder("a:1,b\\?/x_*.bin"));
        CHECK_TEXT(data_from_start(mixture, nullptr), mixture);
    }
    TEST("check: control characters") {
        const char* const cases[][2] = {
            {"runs/a b.bin", "runs/a b.bin"}, {"\x1b[31mred", "\\x1b[31mred"}, {"\x7f", "\\x7f"}, {"", ""},
            {"a\nb\tc\rd", "a\\nb\\x09c\\x0dd"}, {"Übung/日本語", "Übung/日本語"},
            {"\xC2\x9B" "31m", "\\u009b31m"}};
        for (const auto& c : cases) { CHECK_TEXT(shown(c[0]), c[1]); }
        CHECK_TEXT(shown(std::string("a\nb\tc\rd\0", 8), "\n\t"), "a\nb\tc\\x0dd\\x00");
        CHECK_TEXT(shown_message("a\nb\nhint: c\x1b"), "a\\nb\nhint: c\\x1b");
        const Child warned = run_child([] { warn("the run in %s", "a\x1b[2J\nb"); });
        CHECK_TEXT(warned.err, "warning: the run in a\\x1b[2J\\nb\n");
        const std::string evil = in_folder("x\nerror: \x1b[2Jforged");
        const std::function<void()> errors[] = {
            [&] { fopen_check(evil.c_str(), "rb"); }, [&] { atomic_open(evil + "/y"); },
            [&] { die("it is wrong\nhint: choose another than '%s'", evil.c_str()); }};
        for (const auto& fails : errors) { check_dies("evil", fails, {"x\\nerror: \\x1b[2Jforged"}); }
    }
    TEST("check: errors") {
        check_dies("no memory left", [] { std::get_new_handler()(); }, {"out of memory", "hint:"});
        const Child many = run_child([] {           // the first one's message is the only one
            die_hook = [] { usleep(100000); };
            std::vector<std::thread> threads;
            for (int i = 0; i < 8; i++) { threads.emplace_back([] { die("one sentence"); }); }
            for (std::thread& t : threads) { t.join(); }
        });
        CHECK_IS(many.code, 1);
        CHECK_TEXT(many.err, "error: one sentence\n");
        const Child thread = run_child([] {         // what main may still use is not torn down
            atexit([] { _exit(7); });
            std::thread([] { die("in a thread"); }).join();
        });
        CHECK_IS(thread.code, 1);
        auto print = [](const char* to, size_t bytes) {
            if (!freopen(to, "w", stdout)) { _exit(99); }
            printf("%s", std::string(bytes, 'x').c_str());
            stdout_check();
        };
        for (size_t bytes : {3, 1000000}) {         // seen by the last flush only, or long before
            check_dies("stdout to a full disk", [&] { print("/dev/full", bytes); }, {"standard output"});
        }
        check_lives("stdout to nowhere", [&] { print("/dev/null", 3); });
    }
}

// ---- host_memory.h, memory_plan.h ----

static const struct { const char* text; } kSavings[] = {{"first"}, {"second"}, {"third"}};

static void test_memory() {
    TEST("memory: limits of control groups, versions 1 and 2") {
        const std::string root = in_folder("groups"), self = root + "/self";
        const struct { int version; std::string group, most, used; } groups[] = {
            {1, "/memory", "9223372036854771712", "50000"}, {1, "/memory/job", "10000", "4000"},
            {1, "/memory/job/step", "9223372036854771712", "1000"},
            {2, "/job", "20000", "3000"}, {2, "/job/step", "max", "1000"}, {2, "/full", "1000", "2000"},
            {2, "/../job", "7000", "100"}};                 // outside of what a container sees
        for (const auto& g : groups) {
            const std::string at = root + g.group + "/", one = g.version == 1 ? "total_" : "";
            mkdir_check(at.c_str());
            write_text(at + (g.version == 1 ? "memory.limit_in_bytes" : "memory.max"), g.most);
            write_text(at + (g.version == 1 ? "memory.usage_in_bytes" : "memory.current"), g.used);
            write_text(at + "memory.stat", "cache 9\n" + one + "inactive_file 100\n");
        }
        const struct { const char* self; size_t left; } rows[] = {
            {"0::/job/step\n", 17100}, {"0::/elsewhere/step\n", (size_t)-1}, {"0::/../job\n", (size_t)-1},
            {"0::/full\n", 1},
            {"3:memory:/job/step\n0::/\n", 6100}, {"3:cpu,memory:/job\n", 6100},
            {"3:memory_:/job\n", (size_t)-1},
            {"4:cpu:/job\n3:memory:/job\n0::/job\n", 6100}, {"no such line\n", (size_t)-1},
        };
        for (const auto& row : rows) {
            write_text(self, row.self);
            const size_t left = cgroup_memory_free(root, self.c_str());
            CHECK(left == row.left, "%s: %zu are left, not %zu", row.self, left, row.left);
        }
        CHECK(cgroup_memory_free(root, "/nowhere") == (size_t)-1, "without groups");
        write_text(self, "3:memory:/nowhere\n");
        CHECK(cgroup_memory_free(root, self.c_str()) > (1ul << 60), "only the root is seen, without a limit");
    }
    TEST("cores: quotas of control groups, versions 1 and 2; OMP_NUM_THREADS") {
        const std::string root = in_folder("quotas"), self = root + "/self";
        const struct { const char *file, *text; } files[] = {
            {"/job/cpu.max", "250000 100000\n"}, {"/job/step/cpu.max", "max 100000\n"},
            {"/job/wide/cpu.max", "6400000 100000\n"}, {"/half/cpu.max", "50000 100000\n"},
            {"/cpu/cpu.cfs_quota_us", "-1\n"}, {"/cpu/cpu.cfs_period_us", "100000\n"},
            {"/cpu/old/cpu.cfs_quota_us", "400000\n"}, {"/cpu/old/cpu.cfs_period_us", "100000\n"}};
        for (const auto& f : files) {
            const std::string path = root + f.file;
            mkdir_check(path.substr(0, path.rfind('/') + 1).c_str());
            write_text(path, f.text);
        }
        const struct { const char* self; int cores; } rows[] = {
            {"0::/job\n", 3}, {"0::/job/step\n", 3}, {"0::/job/wide\n", 3}, {"0::/half\n", 1},
            {"0::/\n", INT_MAX}, {"0::/elsewhere\n", INT_MAX}, {"5:cpu,cpuacct:/old\n0::/\n", 4},
            {"5:cpu:/\n", INT_MAX}, {"5:cpuacct:/old\n", INT_MAX}};
        for (const auto& row : rows) {
            write_text(self, row.self);
            const int cores = cgroup_cores(root, self.c_str());
            CHECK(cores == row.cores, "%s: %d cores, not %d", row.self, cores, row.cores);
        }
        CHECK_IS(cgroup_cores(root, "/nowhere"), INT_MAX);
        const int here = host_cores();
        CHECK(here >= 1 && here <= sysconf(_SC_NPROCESSORS_ONLN), "%d cores", here);
        for (const char* given : {"", "7"}) {           // a launcher divides what the user has not set
            check_lives(given, [&] {
                unsetenv("LLMC_CORES_SHARED");
                if (*given) { setenv("OMP_NUM_THREADS", given, 1); } else { unsetenv("OMP_NUM_THREADS"); }
                for (int processes : {1, 1000}) {
                    share_cores(processes);
                    printf("%s ", getenv("OMP_NUM_THREADS"));
                }
            }, *given ? "7 7 " : std::to_string(here) + " 1 ");
        }
    }
    TEST("memory: ulimit -v") {
        struct rlimit limit;
        getrlimit(RLIMIT_AS, &limit);
        CHECK_IS(addresses_limited(), limit.rlim_cur != RLIM_INFINITY);
        check_lives("a limit", [] {
            limit_to(RLIMIT_AS, 1ul << 60);
            if (!addresses_limited()) { _exit(1); }
        });
    }
    TEST("memory: a plan that does not fit says what would") {
        check_dies("a resumed run", [] {
            memory_check([](int B, unsigned) { return std::vector<MemoryItem>{{"all", 1000 + (size_t)B}}; },
                         kSavings, {"a GPU", 1057, 50}, {8, 64, true});     // 1058 with the reserve
        }, {"keeps its -b"});
        // rows take 10 each, or 5 with the second flag; parameters 100, and flags take away 20, 0 and 60
        auto plan_of = [](int B, unsigned with) {
            const size_t rows = with & 2 ? 5 : 10;
            return std::vector<MemoryItem>{{"all", 100 + B * rows - (with & 1) * 20 - (with >> 2) * 60}};
        };
        const struct { size_t free; int B; const char* advice; } cases[] = {
            {130, 3, ""}, {130, 4, "-b 4 fits with first"}, {130, 6, "-b 6 fits with second"},
            {130, 8, "-b 8 fits with first second"}, {130, 15, "-b 15 fits with second third"},
            {130, 50, "-b 5 fits with first; -b 22 fits with first second third"},
            {95, 8, "-b 8 fits with second third"},
            {95, 99, "-b 1 fits with first; -b 15 fits with first second third"},
            {70, 4, "-b 4 fits with first third"}, {24, 1, ""}};
        for (const auto& c : cases) {
            const MemoryRoom room = {"a GPU", c.free, 0};
            const int without = memory_largest([&](int B) { return plan_of(B, 0); }, room, c.B);
            if (without < c.B) { CHECK_TEXT(memory_advice(plan_of, kSavings, room, c.B, without), c.advice); }
        }
        const std::vector<MemoryItem> plan = {{"a", 1 << 20}, {"b", 3 << 20}, {"c", 1 << 20}};
        const std::string all = "memory: 5.000 MiB in all\n";
        check_lives("a plan", [&] { memory_print(plan, 1, false); }, all);
        check_lives("one of several", [&] { memory_print(plan, 8, false); },
                    "memory: 5.000 MiB on each rank\n");
        check_lives("a plan with its items", [&] { memory_print(plan, 1, true); },
                    all + "           3.000  b\n           1.000  a\n           1.000  c\n");
    }
}

// ---- json.h ----

// ---- muon_plan.h ----

// GPT-2's matrices, but fewer keys and values than queries, and with `gate_rows` one more matrix.
static std::vector<ParamSpec> muon_table(size_t C, size_t gate_rows, int L) {
    auto matrix = [&](const char* name, size_t rows, size_t cols, const Parts& parts) {
        return param_spec(name, 2, Where::Block, rows, cols, Init::Normal, Kind::Matrix, rows, parts, 0);
    };
    const Parts whole = {0};
    const std::vector<ParamSpec> rows = {
        matrix("qkvw", 2 * C, C, {C, C / 2, C / 2}), matrix("attprojw", C, C, whole),
        matrix("fcw", 4 * C, C, whole), matrix("fcprojw", C, 4 * C, whole),
        matrix("gatew", gate_rows, C, whole)};
    std::vector<ParamSpec> specs;
    for (int l = 0; l < L; l++) { param_layer(&specs, rows, l); }
    param_offsets(&specs, L);
    return specs;
}

static void test_muon_plan() {
    const size_t C = 64;
    for (const size_t gate_rows : {(size_t)0, 2 * C, 4 * C, 8 * C}) TEST("muon: room for every shape") {
        const std::vector<ParamSpec> specs = muon_table(C, gate_rows, 12);
        const Layout layout = param_layout(specs, 12, {}, false, true);
        const MuonShare share = muon_share(layout, specs, {}, 2, (size_t)1 << 20);
        size_t products = 0, sums = 0;
        for (const MuonShape& s : muon_shapes(specs, layout.buckets[1].padded, share.each)) {
            const size_t size = (size_t)s.rows * s.cols;
            products = std::max(products, s.places.count() * size * 2);
            sums = std::max(sums, s.places.count() * ceil_div(size, kChunk) * sizeof(double));
        }
        CHECK(products <= share.product && share.product < products + kAlign && sums == share.sums,
              "%zu rows: %zu bytes for %zu, sums of %zu for %zu", gate_rows, share.product, products,
              share.sums, sums);
        CHECK(share.each > 0 && share.each < 12, "%d layers at a time", share.each);
        const MuonShape halves = muon_shapes(specs, 0, 1)[1];       // keys and values
        CHECK(halves.rows == (int)C / 2 && halves.places.parts == 2 && halves.places.at[0] == C * C &&
                  halves.places.at[1] == C * C + C / 2 * C,
              "%d rows, %d parts", halves.rows, halves.places.parts);
    }
}

static void test_tensors_of_some_layers() {
    TEST("layout: tensors of some layers") {
        // layers 1 and 3 look up rows of their own, and have one matrix more
        const size_t V = 100, C = 64;
        const int L = 4;
        std::vector<ParamSpec> specs;
        for (int l = 0; l < L; l++) {
            const size_t odd = l % 2;
            auto row = [](Where where, size_t rows, Kind kind) {
                const Parts parts = kind == Kind::Matrix ? Parts{0} : Parts{};
                return param_spec("", 2, where, rows, C, Init::Normal, kind, rows, parts, 0);
            };
            const std::vector<ParamSpec> rows = {
                row(Where::Global, V, Kind::Embedding), row(Where::Block, odd * V, Kind::Embedding),
                row(Where::Block, C, Kind::Matrix), row(Where::Block, odd * C, Kind::Matrix),
                row(Where::Block, odd, Kind::Norm), row(Where::Global, V, Kind::Head)};
            param_layer(&specs, rows, l);
        }
        param_offsets(&specs, L);
        const Layout layout = param_layout(specs, L, {}, true, true);
        CHECK(layout.matrices == (std::vector<int>{1, 2, 1, 2}), "matrices");
        const std::vector<int> all = {0, 1, 2, 3}, odd = {1, 3}, one = {0};
        const std::vector<int>* layers[] = {&one, &odd, &all, &odd, &odd, &one};
        for (int i = 0; i < 6; i++) { CHECK(specs[i].layers == *layers[i], "tensor %d", i); }
        std::set<std::pair<int, size_t>> places;
        size_t tensors = 0;
        for (int i = 0; i < 6; i++) {
            for (int l : specs[i].layers) {
                const ParamAddress at = param_address(specs, layout, i, l);
                const Bucket& b = layout.buckets[at.bucket];
                const bool inside = at.offset + specs[i].elems <= b.elems;
                CHECK(b.kind == specs[i].kind && inside, "tensor %d of layer %d", i, l);
                places.insert({at.bucket, at.offset}), tensors++;
            }
        }
        CHECK(places.size() == tensors, "%zu places of %zu tensors", places.size(), tensors);
        const Bucket& embedding = layout.buckets[layout.embedding()];
        CHECK(embedding.elems == 3 * specs[0].padded && embedding.grads_bf16, "embeddings");
        CHECK(!embedding.muon && layout.buckets[layout.layer(1)].muon, "optimizers");
        CHECK(!layout.buckets[layout.norms()].grads_bf16, "norms");
    }
}

static void test_json() {
    TEST("json: writing, and reading that again") {
        const char* const cases[][2] = {
            {"", "\"\""}, {"plain", "\"plain\""}, {"a\"b\\c", "\"a\\\"b\\\\c\""},
            {"\n\t\x01\x7f", "\"\\u000a\\u0009\\u0001\\u007f\""},
            {"\xc3\xa9 \xe2\x82\xac", "\"\xc3\xa9 \xe2\x82\xac\""},
            {"\xf0\x9f\x99\x82", "\"\xf0\x9f\x99\x82\""},
            {"\xff" "a", "\"\\udcffa\""}, {"\xc3", "\"\\udcc3\""}, {"\xc3(", "\"\\udcc3(\""},
            {"\xed\xa0\x80", "\"\\udced\\udca0\\udc80\""},              // a surrogate is not UTF-8,
            {"\xc0\xaf", "\"\\udcc0\\udcaf\""},                         // nor is a longer form than needed,
            {"\xe0\x80\xaf", "\"\\udce0\\udc80\\udcaf\""},
            {"\xf5\x80\x80\x80", "\"\\udcf5\\udc80\\udc80\\udc80\""},   // nor anything above U+10FFFF
            {"\xf4\x90\x80\x80", "\"\\udcf4\\udc90\\udc80\\udc80\""}};
        for (const auto& c : cases) {
            CHECK_TEXT(json_quote(c[0]), c[1]);
            Facts values;
            const std::string error = json_read(std::string("{\"\": ") + c[1] + "}", &values);
            CHECK(error.empty() && values == Facts({{"", c[0]}}), "%s does not read back", c[1]);
        }
        CHECK_TEXT(json_number(0.5), "0.5");
        for (float x : {NAN, INFINITY, -INFINITY}) { CHECK_TEXT(json_number(x), "null"); }
    }
    TEST("json: reading") {
        const std::string good =
            " {\"a\": 1,\n\"o\": {\"x\":-0.5e+3, \"p\": {} , \"t\" :true},\"n\":null, \"f\": false, "
            "\"s\": \"\\/\\b\\f\\n\\r\\t \\u0080\\u0800\\uD800\\udc00\", \"l\": [ ], "
            "\"m\" : [1 ,[true, {\"x\": \"a\\u0022,\\u005d \"}],\n-2e5]}\n";
        const Facts want = {{"a", "1"}, {"o.x", "-0.5e+3"}, {"o.t", "true"}, {"n", "null"},
                                 {"f", "false"}, {"s", "/\b\f\n\r\t \xc2\x80\xe0\xa0\x80\xf0\x90\x80\x80"},
                                 {"m.0", "1"}, {"m.1.0", "true"}, {"m.1.1.x", "a\",] "}, {"m.2", "-2e5"}};
        Facts values;
        const std::string error = json_read(good, &values);
        CHECK(error.empty() && values == want, "%s, %zu values", error.c_str(), values.size());
        int taken = 0;
        for (size_t n = good.size() - 1; n-- > 0;) { taken += json_read(good.substr(0, n), &values).empty(); }
        CHECK(taken == 0, "%d beginnings of an object are taken for one", taken);
        CHECK(json_read("{}", &values).empty() && values.empty(), "an empty object");
        for (const char* text : {
                 "[]", "1", "\"a\"", "{} {}", "{}x", "{\"a\"}", "{\"a\": }", "{\"a\": 1,}", "{,}", "{a: 1}",
                 "{\"a\": [1 2]}", "{\"a\": [1,]}", "{\"a\": [,1]}", "{\"a\": [1}", "{\"a\": [{]}",
                 "{\"a\": [[[[[[[[[1]]]]]]]]]}", "{\"a\": []]}", "{\"a\": 1 \"b\": 2}", "{\"a\": 01}",
                 "{\"a\": +1}", "{\"a\": .5}", "{\"a\": 5.}", "{\"a\": 1e}", "{\"a\": -}", "{\"a\": nan}",
                 "{\"a\": truenull}", "{\"a\": True}", "{\"a\": truex}", "{\"a\": \"\n\"}",
                 "{\"a\": \"\\x\"}",
                 "{\"a\": \"\\u12g4\"}", "{\"a\": \"\\u0000\"}", "{\"a\": \"\\ud83d\"}",
                 "{\"a\": \"\\ud83d\\u0041\"}", "{\"a\": \"\\udc41\"}", "{\"a\": 1, \"a\": 1}",
                 "{\"a.b\": 1, \"a\": {\"b\": 1}}", "{\"a\": {\"b\": 1}, \"a\": {\"c\": 1}}",
                 "{\"a\":{\"a\":{\"a\":{\"a\":{\"a\":{\"a\":{\"a\":{\"a\":{}}}}}}}}}"}) {
            CHECK(!json_read(text, &values).empty(), "%s is taken", text);
        }
        for (size_t more : {0, 1}) {                            // a name in an object: 3 bytes and the rest
            const std::string text = "{\"ab\": {\"" + std::string(kJsonName - 3 + more, 'x') + "\": 1}}";
            CHECK_IS(json_read(text, &values).empty(), more == 0);
        }
        CHECK_HOLDS(json_read(std::string("{\0}", 3), &values), "from byte 1 on");
    }
}

// ---- numbers.h ----

static void test_numbers() {
    TEST("numbers: whole ones") {
        const struct { const char* text; int64_t value; } good[] = {
            {"0", 0}, {"7", 7}, {"10", 10}, {"-1", -1}, {"-30", -30}, {"4294967302", 4294967302},
            {"9223372036854775807", INT64_MAX}, {"-9223372036854775808", INT64_MIN}};
        int64_t n = 0;
        for (const auto& g : good) {
            CHECK(parse_int(g.text, &n) && n == g.value, "'%s': %lld", g.text, (long long)n);
        }
        for (const char* text : {"", "-", "+", "+6", "-+6", "--6", " 6", "6 ", "\t6", "6\n", "06", "00", "-0",
                                 "-06", "007", "0x10", "1e5", "6.", "6.0", ".", "6x", "x", "\xef\xbc\x96",
                                 "1_000", "1,000", "9223372036854775808", "-9223372036854775809",
                                 "99999999999999999999", "18446744073709551622"}) {
            CHECK(!parse_int(text, &n), "'%s' is taken as %lld", text, (long long)n);
        }
        CHECK(!parse_int(std::string("12\0" "3", 4), &n), "a zero byte ends the number");
    }
    TEST("numbers: others") {
        const struct { const char* text; double value; } good[] = {
            {"0", 0}, {"-0", 0}, {"1", 1}, {"0.5", 0.5}, {".5", 0.5}, {"5.", 5}, {"-.25", -0.25},
            {"1e5", 1e5}, {"1E5", 1e5}, {"1e+5", 1e5}, {"6e-04", 6e-4}, {"1.5e-3", 1.5e-3}, {"0e9", 0},
            {"0.1", 0.1}, {"0.00", 0}, {"1e308", 1e308}, {"100000000000000000000000", 1e23}};
        double x = 0;
        for (const auto& g : good) {
            CHECK(parse_double(g.text, &x) && x == g.value, "'%s' gives %g", g.text, x);
        }
        for (const char* text : {"", "-", "+1", " 1", "1 ", "1\n", ".", "-.", "e5", ".e5", "1e", "1e+",
                                 "1e5.", "1e5e5", "1.2.3", "--1", "00.5", "007", "-01", "0x10", "0x1p3",
                                 "inf", "-inf", "infinity", "nan", "nan(1)", "1f", "1,5", "1e400", "-1e400",
                                 "1e-400"}) {
            CHECK(!parse_double(text, &x), "'%s' is taken as %g", text, x);
        }
    }
    TEST("numbers: what to write instead") {
        const char* const cases[][2] = {
            {"1e5", "write it in digits only: 100000"}, {"8.", "write it in digits only: 8"},
            {"-2.0", "write it in digits only: -2"}, {"1.5", ""}, {"1e30", ""}, {"x", ""}, {"", ""}};
        for (const auto& c : cases) { CHECK_TEXT(parse_int_hint(c[0]), c[1]); }
    }
}

// ---- flags.h ----

static struct {
    int B, w, kind, wide;
    int64_t z, seed;
    double lr, part;
    const char *out, *prompt, *name;
} cfg;
static const FlagTable flags = {
    {"b",   "micro-batch", FLAG_INT,    &cfg.B,      "4",      1,       65536,   nullptr,  "rows (B)"},
    {"z,d", "total-batch", FLAG_INT64,  &cfg.z,      "512",    0,       1e15,    nullptr,  "tokens"},
    {"",    "seed",        FLAG_INT64,  &cfg.seed,   "1337",   -9e15,   9e15,    nullptr,  "seed"},
    {"l,-rate", "lr",      FLAG_FLOAT,  &cfg.lr,     "3e-4",   -1,      1e30,    nullptr,  "rate"},
    {"k",   "lr-schedule", FLAG_ENUM,   &cfg.kind,   "cosine", 0,       0,       kLrKinds, "shape"},
    {"w",   "master",      FLAG_BOOL,   &cfg.w,      "1",      0,       1,       nullptr,  "fp32 copy"},
    {"o",   "output",      FLAG_STRING, &cfg.out,    "",       0,       0,       nullptr,  "folder"},
    {"",    "prompt",      FLAG_STRING, &cfg.prompt, "",       0,       0,       nullptr,  "text"},
    {"",    "name",        FLAG_STRING, &cfg.name,   "x",      1,       0,       nullptr,
     "a very long explanation, one that has to be separated into two lines because no terminal is that wide"},
    {"",    "part",        FLAG_FLOAT,  &cfg.part,   "1",      0.5,     2,       nullptr,  "range"},
    {"",    "wide",        FLAG_INT,    &cfg.wide,   "1",      INT_MIN, INT_MAX, nullptr,  "31 bits"},
};

static void parse_table(const FlagTable& table, std::vector<std::string> words) {
    static std::vector<std::string> kept;           // string values point into argv
    kept = words;
    std::vector<char*> argv = {(char*)"train"};
    for (std::string& s : kept) { argv.push_back(&s[0]); }
    flags_parse(table, (int)argv.size(), argv.data());
}
static void parse(const std::vector<std::string>& words) { parse_table(flags, words); }

// All settings, as texts.
static std::string texts_of(const FlagTable& table = flags) {
    std::vector<std::string> all;
    for (const Flag& flag : table) { all.push_back("[" + flags_text(&flag) + "]"); }
    return joined(all);
}

static void test_flags() {
    TEST("flags: values") {
        const struct { std::vector<std::string> words; const char* settings; } cases[] = {
            {{}, "[4] [512] [1337] [0.0003] [cosine] [1] [] [] [x] [1] [1]"},
            {{"-b", "8", "--total-batch", "1024", "--lr=-0.5", "-k=wsd", "-w", "0", "-o", "a b",
              "--prompt=-b"},
             "[8] [1024] [1337] [-0.5] [wsd] [0] [a b] [-b] [x] [1] [1]"},
            {{"-d", "0", "--rate", "-1e-3", "--prompt", "- no flag = text"},
             "[4] [0] [1337] [-0.001] [cosine] [1] [] [- no flag = text] [x] [1] [1]"},
            {{"--micro_batch", "8", "--total_batch=1024", "--prompt", "a_b"},
             "[8] [1024] [1337] [0.0003] [cosine] [1] [] [a_b] [x] [1] [1]"},
            // both ends of each range
            {{"-b", "1", "--seed", "-9000000000000000", "--part=0.5", "--wide=2147483647"},
             "[1] [512] [-9000000000000000] [0.0003] [cosine] [1] [] [] [x] [0.5] [2147483647]"},
            {{"-b", "65536", "--seed=9000000000000000", "-o=", "--part=2", "--wide=-2147483648"},
             "[65536] [512] [9000000000000000] [0.0003] [cosine] [1] [] [] [x] [2] [-2147483648]"}};
        for (const auto& c : cases) {
            parse(c.words);
            CHECK_TEXT(texts_of(), c.settings);
            const bool given = !c.words.empty() && (c.words[0] == "-b" || c.words[0] == "--micro_batch");
            CHECK(flags_given(flags, "micro-batch") == given, "-b given: %d", !given);
        }
        for (const char* text : {"0.1", "0.00123456789", "0.0006", "1e-08", "0.30000000000000004"}) {
            parse({"-l", text});
            CHECK_TEXT(flags_text(flags_find(flags, "--lr")), text);
        }
        parse({});
        const std::string before = texts_of();
        for (const Flag& f : flags) {           // each default, typed as --help shows it, changes nothing
            parse({std::string("--") + f.name + "=" + f.def});
            CHECK_TEXT(texts_of(), before);
        }
    }
    // What test_refusals.py does not ask the program's own table.
    TEST("flags: what is refused") {
        const struct { std::vector<std::string> words, message; } cases[] = {
            {{"--micro-bach", "1"}, {"unknown flag '--micro-bach'", "did you mean --micro-batch?"}},
            {{"--MICRO-BACH", "1"}, {"unknown flag '--MICRO-BACH'", "did you mean --micro-batch?"}},
            {{"-micro-batch", "1"}, {"unknown flag '-micro-batch'", "did you mean --micro-batch?"}},
            {{"--b", "1"}, {"unknown flag '--b'", "did you mean -b (--micro-batch)?"}},
            {{"-b16"}, {"unknown flag '-b16'", "did you mean -b (--micro-batch)?"}},
            {{"--foo", "1"}, {"unknown flag '--foo'\nhint: --help all lists"}},       // -o is not near
            {{"-help"}, {"did you mean --help?"}},
            {{"-b8"}, {"unknown flag '-b8'", "did you mean -b (--micro-batch)?"}},
            {{"-b"}, {"-b (--micro-batch) needs a value", "rows (B) (default 4)"}},
            {{"-b", "-l", "1"}, {"needs a value", "found the flag '-l'"}},
            {{"--prompt", "--lr=3"}, {"--prompt needs a value", "'--lr=3'"}},
            {{"-b", "0"}, {"-b (--micro-batch) wants a whole number, 1 to 65536, not '0'"}},
            {{"-b", "65537"}, {"1 to 65536, not '65537'"}},
            {{"--part", "0.49"}, {"a number, 0.5 to 2, not '0.49'"}},
            {{"--part", "2.01"}, {"0.5 to 2, not '2.01'"}},
            {{"--wide", "2147483648"}, {"a whole number, at least -2147483648, not '2147483648'"}},
            {{"--wide", "-2147483649"}, {"'-2147483649'"}},
            {{"-b="}, {"''"}},
            {{"-b", "1e5"}, {"whole number", "'1e5'", "digits only: 100000"}},
            {{"-b", "4294967300"}, {"'4294967300'"}},               // 4 if cut to 32 bits
            {{"--seed", "9223372036854775808"},                     // 2^63
             {"--seed wants a whole number, -9000000000000000 to 9000000000000000, not '9223372"}},
            {{"-l", "nan"}, {"-l (--lr) wants a number, -1 to 1e+30, not 'nan'"}},
            {{"-l", "1e39"}, {"'1e39'", "float"}},
            {{"-l", "1e-60"}, {"'1e-60'", "float"}},
            {{"-w", "2"}, {"-w (--master) wants 0 or 1, not '2'"}},
            {{"-k", "cosin"}, {"cosine|linear|constant|wsd", "'cosin'", "did you mean 'cosine'?"}},
            {{"--name", ""}, {"--name wants a text of 1 or more characters"}},
            {{"-z", "8", "--total-batch=9"}, {"given twice", "'-z'", "'--total-batch=9'"}},
            {{"-"}, {"unexpected '-'"}},
            {{"--"}, {"unexpected '--'"}},
            {{""}, {"unexpected ''"}},
            {{"-b", "1\n2\n3\n4\n5"}, {"'1\\n2\\n3\\n4\\n5'"}},
            {{"-b", std::string(100000, '7')}, {"777..."}},
        };
        for (const auto& c : cases) {
            check_dies(joined(c.words).substr(0, 40), [&] { parse(c.words); }, c.message);
        }
    }
    TEST("flags: --help; test_runs.py asks for every flag's") {
        const Child help = run_child([] { parse({"-b", "8", "--help", "--nonsense"}); });
        CHECK_IS(help.code, 0);
        CHECK_TEXT(help.err, "");
        for (const char* s : {"rows (B) (default 4)", "(default cosine;", "cosine|linear|constant|wsd)",
                              "rate (default 3e-4); or --rate", "er (default none)"}) {
            CHECK_HOLDS(help.out, s);
        }
        for (const std::string& line : flags_split(help.out, '\n')) {
            CHECK(line.size() <= 80, "%zu columns: %s", line.size(), line.c_str());
        }
        auto groups = [](bool all) {                // those without a name that is shown are left out
            flags_help(flags, "a", {{"text", "", ""}, {"one", "seed", ""}, {"two", "", "prompt"}},
                       all);
        };
        const std::string one = "usage: a [flags]\n\ntext\n\none\n"
                                "       --seed N             seed (default 1337)\n";
        check_lives("--help", [&] { groups(false); }, one + "\n --help all                 all flags\n");
        check_lives("--help all", [&] { groups(true); }, one + "\ntwo\n       --prompt TEXT        text "
                    "(default none)\n\n --help                     this text\n");
        const Child full = run_child([] {
            if (!freopen("/dev/full", "w", stdout)) { _exit(99); }
            parse({"--help"});
        });
        CHECK_IS(full.code, 1);
    }
    TEST("flags: settings, json") {
        auto print = [](bool all) {
            parse({"-b", "8", "-o", std::string(300, 'o')});
            flags_print(flags, all);
        };
        const std::string given = "settings: micro-batch=8,\n          output=" + std::string(60, 'o') +
                                  "...\n";
        check_lives("what is given", [&] { print(false); }, given);
        check_lives("all", [&] { print(true); }, given +
                    "defaults: total-batch=512, seed=1337, lr=0.0003, lr-schedule=cosine, master=1,\n"
                    "          prompt=, name=x, part=1, wide=1\n");
        parse({"-l", "0.1", "-o", "a\"\n"});
        CHECK_TEXT(flags_json(flags),
                   "{\"micro-batch\": 4, \"total-batch\": 512, \"seed\": 1337, \"lr\": 0.1, "
                   "\"lr-schedule\": \"cosine\", \"master\": true, \"output\": \"a\\\"\\u000a\", "
                   "\"prompt\": \"\", \"name\": \"x\", \"part\": 1, \"wide\": 1}");
    }
    TEST("flags: settings of an earlier start; test_resume.py has those that it fixes") {
        FlagTable table = flags;
        table[6].resume = FLAG_NOW;             // -o
        const Facts saved = {              // neither --seed nor --name, which there were not yet
            {"micro-batch", "8"}, {"total-batch", "1024"}, {"lr", "0.25"}, {"lr-schedule", "linear"},
            {"master", "0"}, {"output", "then"}, {"prompt", "a = b\n"}};
        parse_table(table, {"-z", "2048", "-l=0.5"});
        flags_resume(table, [&](const char* name) {
            const std::string* text = facts_find(saved, name);
            return text ? text->c_str() : nullptr;
        });
        CHECK_TEXT(texts_of(table), "[8] [2048] [1337] [0.5] [linear] [0] [] [a = b\n] [x] [1] [1]");
    }
}

// ---- run_config.h, run_folder.h: what other builds and jobs make of the flags; programs test the rest ----

static void parse_run(const std::vector<std::string>& words) {
    settings = Settings();
    parse_table(kFlags, words);
    settings_keep();
}

static void test_run() {
    const Build cuda = {"BF16", true};
    TEST("run: what builds with several GPUs refuse") {
        const struct { std::vector<std::string> words; const char* message; } cases[] = {
            {{"--grad-dtype", "bf16", "--lanes", "8"}, "each of the 4 ranks has one lane"},
            {{"-b", "1", "-z", "4096", "--lanes", "2"}, "hint: --lanes 4 fits"},
        };
        comm.world = 4;
        for (const auto& c : cases) {
            check_dies(c.message, [&] {
                parse_run(c.words);
                Config config = descriptor_config("d12");
                settings_settle(&config, true, cuda);
            }, {c.message});
        }
        comm = Comm();
    }
    TEST("run: short forms") {
        auto in_full = [](std::vector<const char*> words) {
            words.insert(words.begin(), "train");
            const std::vector<const char*> all = words_in_full((int)words.size(), (char**)words.data());
            return joined({all.begin() + 1, all.end()});
        };
        const struct { std::vector<const char*> words; const char* text; } cases[] = {
            {{}, ""}, {{"-e", "eval"}, "-e eval"}, {{"eval", "a", "-b", "2"}, "-e a -x 0 -b 2"},
            {{"sample", "a"}, "-e a -x 0 --prompt="},
            {{"sample", "a", "--prompt", "b"}, "-e a -x 0 --prompt b"},
            {{"chat", "a", "-g", "9"}, "-e a -x 0 -g 9"}, {{"eval", "--help", "all"}, "--help all"},
            {{"sample", "a", ""}, "-e a -x 0  --prompt="}, {{"serve", "a"}, "-e a -x 0"},
            {{"eval", "a", "--all", "-b", "2"}, "-e a -x 0 --evaluate=1 -b 2"}};
        for (const auto& c : cases) {
            CHECK_TEXT(in_full(c.words), c.text);
            CHECK(run.chat == (c.words == cases[5].words), "%s: chat %d", c.text, run.chat);
            CHECK(run.serves == (c.words == cases[8].words), "%s: serves %d", c.text, run.serves);
        }
        CHECK(run.all_questions, "--all");
        settings.chat = settings.serves = settings.all_questions = false;
        check_dies("no run", [&] { in_full({"eval"}); },
                   {"eval wants a run's folder or a model", "eval RUN"});
        check_dies("a flag", [&] { in_full({"chat", "-x", "0"}); }, {"chat wants", "of that name is ./-x"});
        check_dies("steps", [&] { in_full({"sample", "a", "-x=5"}); },
                   {"sample takes no -x (--max-steps)", "-g N is how many tokens"});
        check_dies("a model", [&] { in_full({"eval", "a", "-b", "2", "--model", "d12"}); },
                   {"eval takes no -e (--model)", "its model is 'a'", "-m N is how many batches"});
    }
    TEST("run: names of other trainers") {
        std::set<std::string> seen;
        for (const FlagAnswer& answer : kOtherNames) {
            for (const std::string& name : flags_split(answer.names, ' ')) {
                CHECK(seen.insert(name).second, "%s has two rows", name.c_str());
                const bool ours = flags_find(kFlags, "--" + name) || flags_find(kFlags, "-" + name);
                CHECK(ours == (name == "total-batch"), "--%s is a flag of this program", name.c_str());
            }
        }
        CHECK_TEXT(flags_answer(kOtherNames, "--n_head"), flags_answer(kOtherNames, "--n-layer"));
        CHECK_TEXT(flags_answer(kOtherNames, "--nonsense"), "");
    }
    TEST("run: descriptors of models") {
        // GPT-2's: Radford et al. 2019, table 2 (d6 by its rule); GPT-3's: Brown et al. 2020, table 2.1
        const struct { const char* name; int L, NH, C, T; } sizes[] = {
            {"d6", 6, 6, 384, 1024}, {"d12", 12, 12, 768, 1024}, {"d24", 24, 16, 1024, 1024},
            {"d36", 36, 20, 1280, 1024}, {"d48", 48, 25, 1600, 1024}, {"gpt3:c384", 6, 6, 384, 2048},
            {"gpt3:c768", 12, 12, 768, 2048}, {"gpt3:c1024", 24, 16, 1024, 2048},
            {"gpt3:c1536", 24, 16, 1536, 2048}, {"gpt3:c2048", 24, 16, 2048, 2048},
            {"gpt3:c2560", 32, 32, 2560, 2048}, {"gpt3:c4096", 32, 32, 4096, 2048}};
        for (const auto& m : sizes) {
            const Config c = descriptor_config(m.name);
            CHECK(c.L == m.L && c.NH == m.NH && c.C == m.C && c.maxT == m.T && c.V == 50257 && c.Vp == 50304,
                  "%s: L%d,NH%d,C%d,T%d,V%d", m.name, c.L, c.NH, c.C, c.maxT, c.V);
        }
        const struct { const char* name; int L, NH, C, F; } dials[] = {
            {"m2", 2, 1, 128, 384}, {"m4,window=64", 4, 2, 256, 768}, {"m12", 12, 6, 768, 2048},
            {"m20,V256", 20, 10, 1280, 3456}, {"m24", 24, 12, 1536, 4096}, {"v12", 12, 6, 768, 2048}};
        for (const auto& m : dials) {
            const Config c = descriptor_config(m.name);
            CHECK(c.L == m.L && c.NH == m.NH && c.C == m.C && c.llama.F == m.F && c.llama.NKV == m.NH &&
                  c.llama.HS == 128 && c.llama.qk_norm && !c.llama.tied &&
                  c.llama.value_embed == (m.name[0] == 'v'), "%s: %s", m.name, llama_text(c).c_str());
        }
        for (const char* name : {"d12", "m12", "smollm2:135M"}) {
            const Config c = descriptor_config(name);
            const Config own = descriptor_config((name + std::string(",V32768")).c_str());
            CHECK(own.V == 32768 && own.Vp == 32768 && own.C == c.C && own.L == c.L, "%s,V32768", name);
        }
    }
    TEST("run: numbers of a state to resume from") {
        const Facts facts = {{"n", "7"}, {"short", "1e9"}, {"huge", "1099511627776"}};
        CHECK(fact_number(facts, "n", 7, 7) == 7, "it is another number");
        const struct { const char* name; int64_t least; const char* message; } cases[] = {
            {"none", 0, "does not say 'none'"}, {"n", 8, "'n' is 7: expected 8 to 2147483647"},
            {"short", 0, "'short' is 1e9"}, {"huge", 0, "'huge' is 1099511627776"}};
        for (const auto& c : cases) {
            check_dies(c.name, [&] { fact_number(facts, c.name, c.least, INT_MAX); }, {c.message});
        }
        const Facts forged[] = {{{"T", "0"}}, {{"T", "8"}, {"total_batch", "1e308"}},
                                {{"T", "8"}, {"total_batch", "8"}, {"lanes", "-1"}}};
        for (const Facts& all : forged) {
            check_dies("forged", [&] {
                parse_run({});
                settings_resume(all, descriptor_config("d12"), cuda);
            }, {"'" + all.back().first + "' is " + all.back().second});
        }
        check_dies("no model", [] { facts_config({}); }, {"does not say which model"});
        UpdateState update = {};
        for (const char* bad : {"", "x", "-1", "1e308"}) {
            Facts forged;
            update_facts(update, &forged);
            for (auto& fact : forged) { if (fact.first == "update.norms_count") { fact.second = bad; } }
            CHECK_HOLDS(facts_update(forged, &update), "update.norms_count");
        }
    }
    TEST("run: algorithms of a run that goes on") {
        const struct { const char *now, *then; bool differ; } cases[] = {
            {"", "", false}, {"a1:b2", "", false}, {"", "a1:b2", false}, {"a1:b2", "a1:b2", false},
            {"a1:b2", "a1:b3", true}, {"a1:b2 c1:d1", "c1:d1 a1:b2", false}, {"a1:b2 e1:f1", "e1:f2", true},
            {"a1:b2", "c1:d1 a2:b1", false}};           // other products alone, as another -r has
        for (const auto& c : cases) {
            CHECK(choices_differ(c.now, c.then) == c.differ, "'%s' after '%s'", c.now, c.then);
        }
    }
    TEST("run: what a command leaves open") {
        // flags, tokens a step, steps; learning rate, warm-up, decay, --val-every, embedding's rate, head's
        const struct { const char* flags; int64_t batch, steps; double wanted[6]; } cases[] = {
            {"--model L4,NH4,C128,T128,V256", 2048, 400, {3e-3, 20, 0.1, 50, 1, 1}},
            {"--model L8,NH8,C512,T512,V256", 32768, 600, {1e-3, 30, 0.1, 100, 1, 1}},
            {"--model d12", 16384, 1000, {6e-4, 50, 0.1, 100, 1, 1}},
            {"--model d12", 65536, 600, {9e-4, 100, 0.1, 100, 1, 1}},
            {"--model d12", 65536, 3000, {1.2e-3, 150, 0.1, 500, 1, 1}},
            {"--model d12", 524288, 19073, {6e-4, 700, 0.1, 500, 1, 1}},
            {"--model m12", 65536, 600, {9e-4, 100, 0.1, 100, 1, 1}},
            {"--model d24", 524288, 60000, {3e-4, 700, 0.1, 500, 1, 1}},
            {"--model d48", 1048576, 5, {2e-4, 0, 0.1, 1, 1, 1}},
            {"--model gpt3:c4096", 2048, 0, {1.2e-4, 0, 0.1, 1, 1, 1}},
            {"--model gpt2.bin", 16384, 1000, {6e-5, 50, 0.1, 100, 1, 1}},             // a tenth
            {"--train-data x.bin", 16384, 1000, {6e-4, 50, 0.1, 0, 1, 1}},             // no validation data
            {"--train-data x.bin --val-data y.bin", 16384, 1000, {6e-4, 50, 0.1, 100, 1, 1}},
            {"--lr 1 --warmup-steps 2 --weight-decay 3 --val-every 4", 1024, 50, {1, 2, 3, 4, 1, 1}},
            {"--model d12 --optimizer muon", 65536, 600, {3.6e-3, 30, 0.1, 100, 1, 1}},
            {"--model L4,NH4,C64,T64,V256 --optimizer muon", 1024, 300, {9e-3, 20, 0.1, 50, 1, 1}},
            {"--model m2 --optimizer muon", 65536, 600, {3.6e-3, 30, 0.1, 100, 27.78, 1.111}},
            {"--model llama:L1,NH2,NKV1,HS64,C64,F128,T64,V256 --optimizer muon", 64, 600,
             {3.6e-3, 30, 0.1, 100, 27.78, 1.111}},
            {"--model llama:L1,NH2,NKV1,HS64,C64,F128,T64,V256,tied --optimizer muon", 64, 600,
             {9e-3, 30, 0.1, 100, 1, 1}},                                              // wte is the head
            {"--model m12.bin --optimizer muon", 65536, 600, {3.6e-3, 30, 0.1, 100, 1, 1}},
            {"--model m12 --optimizer muon --embedding-rate 2 --head-rate 3", 65536, 600,
             {3.6e-3, 30, 0.1, 100, 2, 3}},
            // beside a letter llm.c's, and Muon's
            {"-b 4", 2048, 400, {3e-4, 0, 0, 20, 1, 1}}, {"-e d12", 65536, 600, {3e-4, 0, 0, 20, 1, 1}},
            {"--model d12 -zs 1", 65536, 600, {3e-4, 0, 0, 20, 1, 1}},
            {"-e m12 --weight-decay 0.3", 2048, 400, {3e-4, 0, 0.3, 20, 1, 1}},
            {"-b 4 --optimizer muon", 2048, 400, {3.6e-3, 0, 0, 20, 1, 1}},
            {"-l 3e-4 --optimizer muon", 2048, 400, {3e-4, 0, 0, 20, 1, 1}},
            {"-e m24,V256 --optimizer muon", 2048, 400, {3.6e-3, 0, 0, 20, 27.78, 1.111}},
            {"-e v24,V256 --optimizer muon", 2048, 400, {3.6e-3, 0, 0, 20, 27.78, 1.111}},
            {"-e llama:L1,NH2,NKV1,HS64,C64,F128,T64,V256 --optimizer muon", 64, 600,
             {3.6e-3, 0, 0, 20, 1, 1}}};
        for (const auto& c : cases) {
            parse_run(flags_split(c.flags, ' '));
            const bool is_file = model_is_file(run.model);
            const Config config = descriptor_config(is_file ? "d12" : run.model);
            settings.total_batch = c.batch;
            auto_of_model(is_file && run.muon ? descriptor_config("m12") : config, !is_file);
            auto_of_data(config, c.steps);
            const double got[] = {run.lr, (double)run.warmup, run.weight_decay, (double)run.val_every,
                                  run.embedding_rate, run.head_rate};
            for (int i = 0; i < 6; i++) {
                CHECK(got[i] == c.wanted[i], "%s, number %d: %g, not %g", c.flags, i, got[i], c.wanted[i]);
            }
        }
        check_lives("what says where it is from", [] {
            parse_run({"--seed", "1"});
            settings.total_batch = 2048;
            auto_of_model(descriptor_config("d12"), true);
            auto_of_data(descriptor_config("d12"), 60);
            flags_print(kFlags, false);
        }, "settings: learning-rate=0.0006 (auto: C=768, steps of 2048 tokens), warmup=10\n"
           "          (auto: of 60 steps), weight-decay=0.1 (auto), seed=1, val-every=10\n"
           "          (auto: of 60 steps)\n");
        parse_run({"--like", "run"});           // its settings, and no others
        auto_of_model(descriptor_config("d12"), true);
        auto_of_data(descriptor_config("d12"), 60);
        CHECK(run.lr == 3e-4 && run.weight_decay == 0.0, "-l %g -c %g", run.lr, run.weight_decay);
        check_lives("a run of a program without --muon-warmup", [&] {
            parse_run({"--optimizer", "muon"});
            settings_resume({{"T", "8"}, {"total_batch", "8"}, {"lanes", "1"}, {"precision", "BF16"},
                             {"flag.optimizer", "muon"}, {"flag.learning-rate", "0.0003"}},
                            descriptor_config("d12"), cuda);
            if (run.muon_warmup != 0) { die("--muon-warmup %lld", (long long)run.muon_warmup); }
            if (run.lr != 3e-4) { die("-l %g", run.lr); }
        });
        for (const char* of : {"", "the embedding's"}) {        // earlier programs did not say what they drop
            const Child c = run_child([&] {
                parse_run({});
                Facts facts = {{"T", "8"}, {"total_batch", "8"}, {"lanes", "1"}, {"precision", "BF16"},
                               {"flag.dropout", "0.1"}};
                if (*of) { facts.push_back({kDropoutFact, of}); }
                settings_resume(facts, descriptor_config("d12"), cuda);
            });
            CHECK_IS(c.code, *of ? 0 : 1);
            CHECK_TEXT(c.err, *of ? "" : "error: the run in -o  does not say what its --dropout 0.1 drops\n"
                       "hint: go on with the program that began it\n");
        }
    }
    TEST("flags of other programs") {
        Facts facts = {{"flag.zero-stage", "2"}, {"flag.on-bad-loss", "stop"},      // release 0.1's
                       {"flag.muon-beta2", "0"}, {"flag.muon-cautious", "0"}};      // commit d5971c2's
        settings_known(&facts, "flag.", "r");
        CHECK_TEXT(facts[0].second, "1");
        facts = {{"settings.muon-beta2", "0"}, {"settings.muon-cautious", "false"}};        // run.json
        settings_known(&facts, "settings.", "r");
    }
    const struct { const char *name, *value; } unknown[] = {
        {"muon-steps", "5"}, {"on-bad-loss", "rewind"}, {"residual-dtype", "branch"},
        {"muon-beta2", "0.9"}, {"muon-cautious", "1"}, {"muon-cautious", "true"}};
    for (const auto& flag : unknown) {
        check_dies("a flag of another program", [&] {
            Facts facts = {{std::string("flag.") + flag.name, flag.value}};
            settings_known(&facts, "flag.", "r");
        }, {format("began with --%s %s, which this program does not have", flag.name, flag.value),
            "the program that began it"});
    }
}

// ---- lanes.h, schedulers.h ----

static void test_schedules() {
    TEST("lanes: how many a run has by default") {
        const struct { int micro_steps, world, lanes; } defaults[] = {
            {1, 1, 1}, {5, 1, 1}, {6, 1, 2}, {12, 1, 4}, {12, 4, 4}, {24, 1, 8},
            {24, 2, 8}, {24, 8, 8}, {24, 3, 12}, {40, 5, 10}, {64, 64, 64}};
        for (const auto& it : defaults) {
            const int lanes = (int)lanes_default(it.micro_steps, it.world);
            CHECK(lanes == it.lanes, "%d lanes of %d micro-steps, not %d", lanes, it.micro_steps, it.lanes);
        }
    }
    TEST("schedules: values by hand") {
        const struct { LrSchedule s; int64_t step; double lr; } cases[] = {
            {{LR_CONSTANT, 6e-4, 10, 50, 0.0}, 0, 6e-5},          // the published tinyshakespeare recipe
            {{LR_CONSTANT, 6e-4, 10, 50, 0.0}, 9, 6e-4},
            {{LR_CONSTANT, 6e-4, 10, 50, 0.5}, 60, 6e-4},
            {{LR_COSINE, 1.0, 2, 12, 0.1}, 0, 0.5},
            {{LR_COSINE, 1.0, 2, 12, 0.1}, 2, 1.0},
            {{LR_COSINE, 1.0, 2, 12, 0.1}, 4, 0.1 + 0.45 * (1 + cos(acos(-1.0) / 5))},
            {{LR_COSINE, 1.0, 2, 12, 0.1}, 7, 0.55},
            {{LR_COSINE, 1.0, 2, 12, 0.1}, 1000000000000, 0.1},
            {{LR_LINEAR, 1.0, 2, 12, 0.1}, 11, 0.19},
            {{LR_LINEAR, 3e-4, 0, 10, 0.5}, 5, 2.25e-4},
            {{LR_WSD, 1.0, 10, 100, 0.0, 0.2}, 80, 1.0},
            {{LR_WSD, 1.0, 10, 100, 0.0, 0.2}, 81, 1 - sqrt(0.05)},
            {{LR_WSD, 1.0, 10, 100, 0.2, 0.2}, 85, 0.6},
            {{LR_WSD, 1.0, 10, 100, 0.2, 0.2}, 100, 0.2},
            {{LR_WSD, 1.0, 10, 99, 0.0, 0.2}, 81, 1 - sqrt(1 / 19.0)},    // 19 of 99 steps are a fifth
            {{LR_WSD, 1.0, 90, 100, 0.0, 0.2}, 95, 1 - sqrt(0.5)},        // warm-up reaches into the cooldown
            {{LR_WSD, 1.0, 10, 100, 0.0, 0.6}, 40, 1.0},
            {{LR_WSD, 1.0, 10, 100, 0.0, 0.6}, 55, 0.5},
            {{LR_WSD, 1.0, 10, 100, 0.0, 0.0}, 99, 1.0},
            {{LR_WSD, 1.0, 10, 100, 0.0, 1.0}, 10, 1.0},
            {{LR_COSINE, 1.0, 0, 0, 0.25}, 0, 0.25},
            {{LR_COSINE, 1.0, 0, 1, 0.0}, 0, 1.0},
            {{LR_LINEAR, 1.0, 1, 1, 0.1}, 1, 0.1},
            {{LR_LINEAR, 1.0, 2, 12, 0.1}, 13, 0.1},
            {{LR_COSINE, 1.0, 5, 3, 0.0}, 2, 0.6},                // the run ends within its warm-up
        };
        for (const auto& c : cases) {
            const double lr = lr_at(c.s, c.step);
            CHECK(near(lr, c.lr, 1e-15 * c.s.peak), "kind %d, step %lld: %.17g, not %.17g", c.s.kind,
                  (long long)c.step, lr, c.lr);
        }
        const struct { double last; int64_t warmup, step; double momentum; } momenta[] = {
            {0.95, 300, 0, 0.85}, {0.95, 300, 150, 0.9}, {0.95, 300, 300, 0.95}, {0.95, 0, 0, 0.95},
            {0.8, 300, 0, 0.8}, {0.8, 300, 150, 0.8}};
        for (const auto& m : momenta) {
            const double got = momentum_at(m.last, m.warmup, m.step);
            CHECK(near(got, m.momentum, 1e-15), "momentum %g, warm-up %lld, step %lld: %.17g", m.last,
                  (long long)m.warmup, (long long)m.step, got);
        }
    }
}

// ---- sampler.h ----

static int draw(const std::vector<float>& logits, float temperature, int top_k, double coin,
                float top_p = 1.0f) {
    return sample_token(logits.data(), (int)logits.size(), {temperature, top_k, top_p}, coin);
}

// The whole distribution in double, from the definition: the k best by (logit, lower id first), each with
// exp((x - largest) / temperature), and of these the first that have top_p of it all.
static std::vector<double> sampler_oracle(const std::vector<float>& logits, double temperature, int top_k,
                                          double top_p) {
    std::vector<int> ids;
    for (size_t i = 0; i < logits.size(); i++) { if (!isnan(logits[i])) { ids.push_back((int)i); } }
    std::stable_sort(ids.begin(), ids.end(),
                     [&](int a, int b) { return logits[(size_t)a] > logits[(size_t)b]; });
    if (top_k > 0 && top_k < (int)ids.size()) { ids.resize((size_t)top_k); }
    if (temperature == 0) { ids.resize(1); }
    std::vector<double> p(logits.size(), 0.0);
    const double largest = logits[(size_t)ids[0]];
    double total = 0.0, kept = 0.0;
    for (int i : ids) {
        const double x = logits[(size_t)i];
        total += p[(size_t)i] = x == largest ? 1.0 : exp((x - largest) / temperature);
    }
    for (int i : ids) {
        if (kept >= top_p * total * (1 - 1e-9)) { p[(size_t)i] = 0.0; }
        kept += p[(size_t)i];
    }
    for (double& each : p) { each /= kept; }
    return p;
}

// A coin in the middle of each token's share of [0, 1), and close to both its ends, draws this token.
static int sampler_errors(const std::vector<float>& logits, float temperature, int top_k, float top_p) {
    const std::vector<double> p = sampler_oracle(logits, temperature, top_k, (double)top_p);
    int wrong = 0;
    double begin = 0.0;
    for (size_t i = 0; i < p.size(); i++) {
        for (double at : {begin + 1e-6, begin + p[i] / 2, begin + p[i] - 1e-6}) {
            if (p[i] > 1e-5) { wrong += draw(logits, temperature, top_k, at, top_p) != (int)i; }
        }
        begin += p[i];
    }
    return wrong;
}

static void test_sampler() {
    TEST("sampler: the whole distribution of random logits, many of them equal") {
        int wrong = 0, tied = 0;
        for (uint32_t c = 0; c < 4000; c++) {
            auto random = [&](uint64_t k, uint32_t below) { return rand_u32(5, RAND_SAMPLE, c, k) % below; };
            const int V = 1 + (int)random(0, 31), top_k = (int)random(1, (uint32_t)V + 3);
            const uint32_t values = 1 + random(2, 8);               // few values: ties at every place
            const float temperature = 0.25f * (float)random(3, 9), odd[] = {NAN, INFINITY, -INFINITY};
            const float top_p = random(5, 2) ? 1.0f : 0.07f + 0.0009f * (float)random(6, 1000);
            std::vector<float> logits;
            for (uint64_t i = 0; i < (uint64_t)V; i++) {
                logits.push_back(0.5f * (float)random(10 + i, values) - 2);
            }
            std::vector<float> sorted = logits;
            std::sort(sorted.begin(), sorted.end());
            tied += top_k > 0 && top_k < V && sorted[(size_t)(V - top_k)] == sorted[(size_t)(V - top_k - 1)];
            if (c % 4 == 0 && V > 1) { logits[random(4, (uint32_t)V)] = odd[c / 4 % 3]; }
            const int errors = sampler_errors(logits, temperature, top_k, top_p);
            if (errors > 0 && wrong++ == 0) {
                printf("V=%d top %d at %g, part %g:\n", V, top_k, (double)temperature, (double)top_p);
            }
        }
        CHECK(wrong == 0, "%d of 4000 cases", wrong);
        CHECK(tied > 1000, "only %d cases have a tie at the threshold", tied);
        std::vector<float> large(50257);
        for (size_t i = 0; i < large.size(); i++) { large[i] = rand_normal(1, 0, i); }
        CHECK_IS(sampler_errors(large, 0.7f, 40, 1.0f), 0);
    }
    TEST("sampler: exact cases, extreme logits") {
        const float inf = INFINITY, nan = NAN;
        CHECK_IS(draw({0, 3, 1, 2}, 1e-30f, 0, 0.999), 1);                      // tiny is greedy, too
        CHECK_IS(draw({0, 0, 0}, 1.0f, 0, nextafter(1.0, 0.0)), 2);             // the last coin
        CHECK_IS(draw({nan, 2, 3}, 0.0f, 0, 0.0), 2);
        CHECK_IS(draw({nan, nan}, 1.0f, 0, 0.5), -1);
        for (double coin : {0.0, 0.3, 0.6, 0.999}) {
            const int half = coin < 0.5 ? 0 : 1;
            CHECK_IS(draw({0, 3, 1, 3}, 1.0f, 0, coin, 1e-9f), 1);              // the smallest part
            CHECK_IS(draw({0, 0, 0, 0}, 1.0f, 0, coin, 0.5f), half);
            CHECK_IS(draw({0, 0, 0, 9}, 1.0f, 3, coin, 0.9998f), coin > 0 ? 3 : 0);
            CHECK_IS(draw({inf, 0, inf}, 1.0f, 0, coin), 2 * half);
            CHECK_IS(draw({-inf, -inf}, 1.0f, 0, coin), half);
            CHECK_IS(draw({nan, 2, nan}, 1.0f, 2, coin), 1);
            CHECK_IS(draw({-FLT_MAX, FLT_MAX, 0}, 1.0f, 2, coin), 1);
        }
        int wrong = 0;
        for (float x = -27.0f; x <= 0.0f; x += 0.01f) {
            wrong += !(fabs((double)sample_exp(x) / (double)kFullWeight / exp((double)x) - 1.0) <=
                       2e-7 + exp(-(double)x) / (double)kFullWeight);
        }
        CHECK(wrong == 0, "%d of 2700 weights are not e^x", wrong);
    }
    TEST("sampler: a softcap") {
        int wrong = 0, others = 0, moved = 0;
        for (float x = -300.0f; x <= 300.0f; x += 0.01f) {
            wrong += !(fabs((double)sample_capped(x, 15.0f) - 15.0 * tanh((double)x / 15.0)) <= 3e-6);
        }
        CHECK(wrong == 0, "%d capped logits are off", wrong);
        CHECK_IS(sample_capped(INFINITY, 15.0f), 15.0f);
        CHECK_IS(sample_capped(-FLT_MAX, 15.0f), -15.0f);
        for (uint64_t c = 0; c < 500; c++) {
            std::vector<float> logits, capped;
            for (uint64_t i = 0; i < 50; i++) {
                logits.push_back(3.0f * rand_normal(1, 5, 50 * c + i));
                capped.push_back(sample_capped(logits.back(), 2.0f));
            }
            const double coin = rand_unit(5, RAND_SAMPLE, 0, c);
            const int token = draw(capped, 0.9f, 20, coin, 0.9f);
            others += sample_token(logits.data(), 50, {0.9f, 20, 0.9f, 2.0f}, coin) != token;
            moved += draw(logits, 0.9f, 20, coin, 0.9f) != token;
        }
        CHECK(others == 0 && moved > 50, "%d of 500 tokens are not those of capped logits; it moves %d",
              others, moved);
    }
}

// ---- rand.h ----

static void test_rand() {
    TEST("permutation: a bijection") {
        int wrong = 0;
        for (uint64_t n = 1; n <= 700; n++) {
            std::vector<int> seen(n, 0);
            for (uint64_t i = 0; i < n; i++) {
                const uint64_t x = rand_permuted(n * 77, (uint32_t)n % 5, n, i);
                wrong += x >= n || seen[x]++ > 0;
            }
        }
        CHECK(wrong == 0, "%d elements are out of range or come twice", wrong);
    }
    TEST("rounding: to nearest, and by every draw") {
        CHECK(bf16_to_float(bf16_round_nearest(float_of(0x3F808000))) == 1.0f, "a tie does not go down");
        CHECK(bf16_to_float(bf16_round_nearest(float_of(0x3F818000))) == 1.015625f, "a tie does not go up");
        CHECK(bf16_to_float(bf16_round_nearest(float_of(0x3F808001))) == 1.0078125f, "not the nearest");
        for (uint32_t u : {0u, 0x80000000u, 0x3F800001u, 0xBF808000u, 0x7F7F1234u, 0x3F80FFFFu}) {
            uint32_t up = 0, down = 0;
            for (uint32_t draw = 0; draw < 65536; draw++) {
                const uint32_t kept = bf16_round_stochastic(float_of(u), draw);
                up += kept == (u >> 16) + 1;
                down += kept == u >> 16;
            }
            CHECK(up == (u & 0xFFFF) && up + down == 65536, "%08x: %u draws go up, %u down", u, up, down);
        }
        for (uint32_t draw : {0u, 0x8000u, 0xFFFFu}) {
            for (uint32_t u : {0x7F800001u, 0x7FC00000u, 0x7FFFFFFFu, 0xFF800001u, 0xFFFFFFFFu}) {
                CHECK(isnan(bf16_to_float(bf16_round_stochastic(float_of(u), draw))), "NaN %08x is lost", u);
                CHECK(isnan(bf16_to_float(bf16_round_nearest(float_of(u)))), "NaN %08x is lost", u);
            }
            CHECK(bf16_to_float(bf16_round_stochastic(INFINITY, draw)) == INFINITY, "inf is lost");
            CHECK(bf16_to_float(bf16_round_stochastic(-INFINITY, draw)) == -INFINITY, "-inf is lost");
        }
    }
    TEST("masters: a bf16 weight and 16 bits") {
        auto weight_of = [](uint32_t bits) {
            uint16_t weight, low;
            master_split(float_of(bits), &weight, &low);
            return (uint32_t)weight << 16;
        };
        int wrong = 0, far = 0;
        for (uint64_t u = 0; u <= UINT32_MAX; u += 4099) {      // a prime: all lower halves
            uint16_t weight, low;
            const float x = float_of((uint32_t)u);
            master_split(x, &weight, &low);
            const float joined = master_join(weight, low);
            wrong += isnan(x) ? bits_of(joined) != 0x7FC00000u || !isnan(bf16_to_float(weight))
                              : bits_of(joined) != u;
            far += u % 65536 != 0x8000 && !isnan(x) && weight != bf16_round_nearest(x);
        }
        CHECK(wrong == 0, "%d masters do not come back", wrong);
        CHECK(far == 0, "%d weights are not the nearest", far);
        CHECK(weight_of(0x3F808000) == 0x3F810000 && weight_of(0x3F818000) == 0x3F820000 &&
                  weight_of(0xBF808000) == 0xBF810000, "a tie does not go away from zero");
        CHECK(weight_of(0x7F7F7FFF) == 0x7F7F0000 && weight_of(0x7F7F8000) == 0x7F800000 &&
                  weight_of(0xFF7FFFFF) == 0xFF800000 && weight_of(0x7F800000) == 0x7F800000, "not as inf");
        for (uint32_t nan : {0x7F800001u, 0x7FFFFFFFu, 0xFF80FFFFu, 0xFFFFFFFFu}) {
            CHECK(weight_of(nan) == 0x7FC00000u, "NaN %08x makes a weight of %08x", nan, weight_of(nan));
        }
    }
    TEST("rounding: other lanes, tensors, steps, micro-steps and seeds have other draws") {
        const RoundKey base = {1337, 5, 2, 4};
        int other_words = 0;
        for (uint64_t i = 0; i < 64; i++) {
            const Rand4 block = round_block(base, i / 8);
            other_words += round_bits16(base, i) != ((block.w[i % 8 / 2] >> (16 * (i % 2))) & 0xFFFFu);
        }
        CHECK(other_words == 0, "round_bits16 and round_block disagree on who gets which bits");
        const struct { const char* name; RoundKey key; uint64_t shift; } others[] = {
            {"next lane", base, 1}, {"lane +8", base, 8}, {"layer", base, 589824},
            {"far element", base, 1ull << 35},
            {"next tensor", {1337, 5, 2, 5}, 0}, {"next step", {1337, 6, 2, 4}, 0},
            {"next micro-step", {1337, 5, 3, 4}, 0}, {"next seed", {1338, 5, 2, 4}, 0},
            {"seed of the high word", {1337 + (1ull << 32), 5, 2, 4}, 0},
            {"micro-step for step", {1337, 2, 5, 4}, 0}};
        for (const auto& other : others) {
            int equal = 0;                          // 0.3 are expected
            for (uint64_t i = 0; i < 20000; i++) {
                equal += round_bits16(base, i) == round_bits16(other.key, i + other.shift);
            }
            CHECK(equal < 10, "%s: %d of 20000 equal", other.name, equal);
        }
    }
    auto dithered = [](float x, uint32_t draw) {
        return bf16_decode_dithered(bf16_encode_dithered(x, draw), draw);
    };
    TEST("dither: the mean over all draws, also around powers of two, and the variance") {
        for (float sign : {1.0f, -1.0f}) {
            for (int step = -40; step <= 40; step++) {      // two gaps to either side of a power of two
                const int power = (step + 40) % 5 * 10 - 20;
                const float x = ldexpf(sign * float_of(0x3F800000u + (uint32_t)(step * 4001)), power);
                const double gap = ldexp(step < 0 ? 1.0 / 256 : 1.0 / 128, power);
                double mean = 0.0, variance = 0.0, worst = 0.0;
                for (uint32_t draw = 0; draw < 65536; draw++) {
                    const double error = ((double)dithered(x, draw) - (double)x) / gap;
                    mean += error / 65536;
                    variance += error * error / 65536;
                    worst = fmax(worst, fabs(error));
                }
                CHECK(fabs(mean) <= 1.5 / 65536 && worst <= 1.1, "%.9g: mean error of %g gaps, worst %g",
                      (double)x, mean, worst);
                const bool far = step * 4001 > 33000 || step * 4001 < -33000;
                CHECK(!far || (near(variance * 12, 1.0, 0.001) && worst <= 0.51),
                      "%.9g: %g of the variance gap^2/12, worst %g gaps", (double)x, variance * 12, worst);
            }
        }
    }
    TEST("dither: zero, denormals, inf and NaN") {
        for (uint32_t draw : {0u, 1u, 0x8000u, 0xFFFFu}) {
            for (float x : {0.0f, -0.0f, INFINITY, -INFINITY}) {
                CHECK(bits_of(dithered(x, draw)) == bits_of(x), "%g is another", (double)x);
            }
            CHECK(isnan(dithered(NAN, draw)), "NaN is lost");
            CHECK(near(dithered(1e-39f, draw), 1e-39, 1e-40), "a denormal is another");
            CHECK(isfinite(dithered(1e38f, draw)), "a large number is lost");
        }
    }
}

// ---- logger.h ----

static Logger log_of(const std::string& run, const Facts& info = {}) {
    Logger log;
    logger_init(&log, run.c_str());
    logger_run(&log, flags, info);
    return log;
}
static void log_step(Logger* log, int64_t step, double loss = 1) {
    logger_train(log, {step, loss, 1, 1, 1, 1, 1});
}

// Lines of steps `from` to `until` - 1, and a validation before every tenth.
static void log_steps(Logger* log, int from, int until, double loss = 5) {
    for (int step = from; step < until; step++) {
        if (step % 10 == 0) { logger_val(log, step, loss); }
        log_step(log, step, loss);
    }
}

static void test_logger() {
    TEST("logger: files") {
        const std::string run = in_folder("runs/a");
        parse({"-b", "8"});
        Logger log = log_of(run, {{"program", "test \"host\""}});
        logger_train(&log, {0, 11.0234567, 6e-5, 2.25, 16384, 12.5, 1310720});
        logger_val(&log, 1, 10.5);
        const std::string begin = "s:0 trl:11.023457 lr:6.000000e-05 norm:2.2500\ns:1 tel:10.500000\n";
        CHECK_TEXT(read_text(run + "/main.log"), begin);
        logger_train(&log, {3000000000, -NAN, 0.0, INFINITY, 1ll << 40, 1, 1});
        logger_eval(&log, 2, {{{"acc_norm", 0.25, 0.5}, {"acc", 0.125, NAN}}});
        logger_eval(&log, 3, {{{"word_ppl", 64.5, 1}}});            // no acc_norm: nothing in main.log
        logger_val(&log, 4, 2.5, {{"a\"_*.bin", 2}, {"b", NAN}}, 1.5);      // a mixture's sources: nor these
        logger_free(&log);
        logger_free(&log);
        CHECK_TEXT(read_text(run + "/main.log"),
                   begin + "s:3000000000 trl:nan lr:0.000000e+00 norm:inf\ns:2 eval:0.250000\n"
                   "s:4 tel:2.500000\n");
        CHECK_TEXT(read_text(run + "/metrics.jsonl"),
                   "{\"step\": 1, \"loss\": 11.0234567, \"lr\": 6e-05, \"norm\": 2.25, \"tokens\": 16384, "
                   "\"ms\": 12.5, \"tokens_per_s\": 1310720}\n{\"step\": 1, \"val_loss\": 10.5}\n"
                   "{\"step\": 3000000001, \"loss\": null, \"lr\": 0, \"norm\": null, "
                   "\"tokens\": 1099511627776, \"ms\": 1, \"tokens_per_s\": 1}\n"
                   "{\"step\": 2, \"eval_acc_norm\": 0.25, \"eval_acc_norm_error\": 0.5, "
                   "\"eval_acc\": 0.125, \"eval_acc_error\": null}\n"
                   "{\"step\": 3, \"eval_word_ppl\": 64.5, \"eval_word_ppl_error\": 1}\n"
                   "{\"step\": 4, \"val_loss\": 2.5, \"val_losses\": {\"a\\\"_*.bin\": 2, \"b\": null}, "
                   "\"val_bpb\": 1.5}\n");
        CHECK_TEXT(read_text(run + "/run.json"), "{\n\"settings\": " + flags_json(flags) +
                   ",\n\"program\": \"test \\\"host\\\"\"\n}\n");
    }
    TEST("logger: what cannot be written") {
        mkdir_check(in_folder("empty").c_str());            // "" is not the current folder either
        check_lives("no folder", [] {
            if (chdir(in_folder("empty").c_str()) != 0) { _exit(99); }
            Logger log = log_of("");
            log_step(&log, 0);
            logger_go_back(&log, 10);
            logger_sync(&log);
            logger_free(&log);
        });
        CHECK(rmdir(in_folder("empty").c_str()) == 0, "%s", strerror(errno));
        check_dies("a file in the way", [] {
            Logger log = log_of(in_folder("model.bin/run"));
            log_step(&log, 0);
        }, {"model.bin/run"});
        for (const std::string name : {"main.log", "metrics.jsonl", "run.json"}) {
            const std::string run = in_folder("full_" + name), odd = in_folder("odd_" + name);
            check_dies(name, [&] {
                Logger log = log_of(run);
                if (name == "run.json") { refuse_call(SYNC, 1); }
                log_step(&log, 0);
                FILE** f = name == "main.log" ? &log.main_log : &log.metrics;
                if (!freopen("/dev/full", "w", *f)) { _exit(99); }
                log_step(&log, 1);
            }, {"cannot write", run, "No space left", "hint:"});
            mkdir_check(odd.c_str());
            CHECK(mkfifo((odd + "/" + name).c_str(), 0600) == 0, "cannot make a pipe: %s", strerror(errno));
            check_dies("a pipe", [&] { Logger log = log_of(odd); log_step(&log, 0); },
                       {odd + "/" + name, "a pipe"});
        }
        check_dies("sync", [] {
            Logger log = log_of(in_folder("sync"));
            log_step(&log, 0);
            refuse_call(SYNC, 1, EIO);
            logger_sync(&log);
        }, {"cannot write the logs in '" + in_folder("sync"), "Input/output error"});
    }
    const std::string run = in_folder("runs/back"), main_log = run + "/main.log",
                      metrics = run + "/metrics.jsonl", cut = main_log + ".cut";
    auto reopened = [&](int64_t step) {
        Logger log = log_of(run, {{"start", "another"}});
        logger_go_back(&log, step);
        return log;
    };
    Logger log = log_of(run);
    log_steps(&log, 0, 10);
    const std::string ten = read_text(main_log), ten_metrics = read_text(metrics);
    log_steps(&log, 10, 25);
    const std::string all = read_text(main_log), all_metrics = read_text(metrics);
    TEST("logger: a run goes on after a step") {
        log.best_val = 4, log.best_step = 20;               // of the steps that go
        for (const bool another_process : {false, true}) {
            if (another_process) { log = reopened(10); } else { logger_go_back(&log, 10); }
            CHECK_TEXT(read_text(main_log), ten);
            CHECK_TEXT(read_text(metrics), ten_metrics);
            CHECK(log.best_val == 5, "the best is %g, of a step that is gone", log.best_val);
            CHECK_TEXT(read_text(cut), all);                // and does not go less far the second time
            CHECK_TEXT(read_text(metrics + ".cut"), all_metrics);
            log_steps(&log, 10, 12);
            logger_free(&log);
        }
        CHECK_HOLDS(read_text(run + "/run.json"), "another");
    }
    TEST("logger: a later checkpoint can be read again") {
        log = reopened(20);
        CHECK(log.best_val == 5 && log.best_step == 0, "the best is %g, of step %lld", log.best_val,
              (long long)log.best_step);
        CHECK_TEXT(read_text(main_log), all.substr(0, all.find("s:20 ")));
        const std::string twenty = read_text(metrics);
        CHECK(all_metrics.find(twenty) == 0 && twenty.size() > ten_metrics.size(), "%s", twenty.c_str());
        log_steps(&log, 20, 24);
        logger_forget(run);
        CHECK_TEXT(read_text(cut), all);                    // as long as the run has not come so far
        log_steps(&log, 24, 25);
        logger_free(&log);
        CHECK_TEXT(joined(names_in(run)), "main.log metrics.jsonl run.json");
        CHECK(read_text(main_log) == all && read_text(metrics) == all_metrics, "the end is another");
    }
    TEST("logger: of a log that lost its end") {
        unlink(cut.c_str());
        CHECK(truncate(main_log.c_str(), (off_t)ten.size() - 5) == 0, "%s", strerror(errno));
        Child gap = run_child([&] {
            log = reopened(11);
            logger_val(&log, 11, 1);
            logger_free(&log);
        });
        CHECK_IS(gap.code, 0);                              // metrics.jsonl has all of it
        CHECK_TEXT(gap.err, "warning: '" + main_log + "' lost its last lines: it goes on behind the gap\n");
        CHECK_TEXT(read_text(main_log), ten.substr(0, ten.rfind("s:9 ")) + "s:11 tel:1.000000\n");
    }
}

// ---- report.h: what a terminal is told of the steps ----

static void test_report() {
    TEST("report: durations, GPUs, steps between lines") {
        const struct { double seconds; const char* text; } rows[] = {
            {0, "0:00:00"}, {59.4, "0:00:59"}, {59.5, "0:01:00"}, {3599.9, "1:00:00"}, {360000, "100:00:00"}};
        for (const auto& row : rows) { CHECK_TEXT(duration_text(row.seconds), row.text); }
        const char* const kNames[][6] = {
            {"RTX 3090", "NVIDIA GeForce RTX 3090 (sm_86, 82 SMs)", "rtx3090", "3090"},
            {"RTX 4090", "NVIDIA GeForce RTX 4090", "RTX4090", "4090", "GeForce 4090", "rtx-4090"},
            {"RTX 5090", "NVIDIA GeForce RTX 5090", "rtx_5090"}, {"A10", "NVIDIA A10", "a10 24GB"},
            {"L4", "NVIDIA L4", "l4"}, {"L40S", "NVIDIA L40S", "l40s", "L40S-48GB"},
            {"A100 40GB", "NVIDIA A100-SXM4-40GB", "A100-PCIE-40GB", "a100 40gb", "a10040gb"},
            {"A100", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe", "a100-80", "a100 80gb"},
            {"H100", "NVIDIA H100 80GB HBM3 (sm_90, 132 SMs)", "h100", "H100 SXM5", "H100-SXM"},
            {"H100 PCIe", "NVIDIA H100 PCIe", "h100-pcie"}, {"H100 NVL", "NVIDIA H100 NVL"},
            {"H200", "NVIDIA H200", "H200 141GB"}, {"H200 NVL", "NVIDIA H200 NVL"},
            {"B200", "NVIDIA B200", "b200"},
            {nullptr, "CPU (2 threads)", "GH200", "A10G", "L40", "RTX 4090 D"},
            {nullptr, "RTX 3090 Ti", "NVIDIA GeForce RTX 4090 Laptop GPU", "A1000", "NVIDIA", ""}};
        for (const auto& names : kNames) {
            for (int i = 1; i < 6 && names[i]; i++) {
                const GpuKind* kind = gpu_kind(names[i]);
                CHECK_TEXT(kind ? gpu_name(*kind) : "", names[0] ? names[0] : "");
            }
        }
        for (const GpuKind& kind : kGpuKinds) { CHECK(gpu_kind(gpu_name(kind)) == &kind, "%s", kind.chip); }
        const int64_t every[][2] = {{20, 1}, {21, 2}, {101, 10}, {18865, 1000}};
        Report r = {};
        r.log_every = 0;
        progress_on = true;
        for (const auto& row : every) {
            r.max_steps = row[0];
            CHECK_IS(report_every(r), row[1]);
        }
        progress_on = false;
        CHECK_IS(report_every(r), 1);                   // no terminal: a line each step
    }
    // Forms of lines, the best validation and skipped updates are test_terminal.py's and test_runs.py's.
    TEST("report: means, what is no number, the time that is left, the peak") {
        const Child c = run_child([] {
            Report r = {10, 1000, 2, 0};
            report_line(&r);                            // no step: no line
            // the first step's 9 s are in the line's means; the time that is left forgets them
            const double loss[] = {5, 3, NAN}, ms[] = {9000, 1000, 2000};
            for (int step = 0; step < 3; step++) {
                report_add(&r, {step, loss[step], 0.5 / (step + 1), 2.0 * step, 0, ms[step], 0});
                report_show(&r);
            }
            report_line(&r);
            r.begun_s = comm_now() - 61;
            report_end(r, INFINITY, 0);
            r.peak_speed = 2000, r.max_steps = 18865;
            report_add(&r, {9999, 10.5, 6e-4, 12.345, 10000000, 1000, 0});
            report_line(&r);
            report_val(Logger(), 3, NAN);
            report_val(Logger(), -1, 800, {{"a_*.bin", 2, 0.25}, {"b\n", NAN}});
            report_eval({{{"acc_norm", 0.25, 0.05}, {"word_ppl", 5000, NAN}}});
        });
        CHECK_TEXT(c.out,
            "step 2/10 | loss 4.000000  | lr 2.50e-01 | norm 1.00  | 5000.0 ms | 200 tok/s | ETA 0:00:08\n"
            "step 3/10 | loss nan       | lr 1.67e-01 | norm 4.00  | 2000.0 ms | 500 tok/s | ETA 0:00:11\n"
            "end: loss nan\n3000 tokens in 0:01:01\nmean step time 1500.0 ms, 667 tokens/s over 2 steps\n"
            "step 10000/18865 | loss 10.500000 | lr 6.00e-04 | norm 12.35 | 1000.0 ms | 1000 tok/s | "
            "MFU 50.0%\nval loss nan @3\nval loss 800.000000 | ppl inf\n"
            "    loss 2.000000 | ppl 7.39 | bpb 0.2500 | a_*.bin\n    loss nan | b\\n\n"
            "eval acc_norm 0.250000 +- 0.050000 | word_ppl 5000.00 +- nan\n");
    }
    TEST("report: the live block's sparkline") {
        CHECK_TEXT(progress_sparkline({3, 1, 2, 3}), "\u2588\u2581\u2584\u2588");
        CHECK_TEXT(progress_sparkline({2, 2}), "\u2581\u2581");
        Report trend = {400, 1, 0, 0};                  // a mark is four steps
        for (int step = 0; step < 47; step++) { report_add(&trend, {step, step / 4 + 1.0, 0, 0, 0, 1, 0}); }
        report_add(&trend, {47, NAN, 0, 0, 0, 1, 0});
        CHECK(trend.marks == std::vector<double>({2, 3, 4, 5, 6, 7, 8, 9, 10, 11}), "%zu marks, the first %g",
              trend.marks.size(), trend.marks[0]);
        const struct { const char *all, *ctype, *lang; bool utf8; } rows[] = {
            {"C", "", "en_US.UTF-8", false}, {"", "de_DE.utf8", "C", true}, {"", "", "C.UTF-8", true},
            {"", "", "", false}};
        for (const auto& row : rows) {
            setenv("LC_ALL", row.all, 1), setenv("LC_CTYPE", row.ctype, 1), setenv("LANG", row.lang, 1);
            CHECK(progress_utf8() == row.utf8, "%s, %s, %s", row.all, row.ctype, row.lang);
        }
    }
}

// ---- samples.h: what a terminal is shown ----

static void test_text_out() {
    TEST("texts: whole characters, ends of sentences") {
        const struct { const char* text; size_t whole; } rows[] = {
            {"", 0}, {"a", 1}, {"a\xC3", 1}, {"a\xC3\xA9", 3}, {"a\xE2\x82", 1}, {"a\xE2\x82\xAC", 4},
            {"a\xF0", 1}, {"a\xF0\x9F", 1}, {"a\xF0\x9F\x98", 1}, {"a\xF0\x9F\x98\x80", 5},
            {"\x80\x80\x80\x80", 4}};
        for (const auto& row : rows) { CHECK_IS(whole_characters(row.text), row.whole); }
        for (const char* text : {"Yes.", "No! He", "?", "a\n"}) { CHECK(ends_sentence(text), "'%s'", text); }
        for (const char* text : {"", "he said, and", ";"}) { CHECK(!ends_sentence(text), "'%s'", text); }
    }
    // Three samples, two at a time: the one that is shown comes first, and the others wait for their turn.
    TEST("texts: samples whose tokens come in turns") {
        Tokenizer tokenizer;
        tokenizer_init_bytes(&tokenizer);
        const int end = (int)tokenizer.eot;
        auto draw = [&](const std::vector<int>& prompt, int count, const std::vector<int>& ends,
                        uint32_t first_id, const OnToken& on_token) {
            CHECK(prompt == std::vector<int>({end, 'H', 'i'}), "the prompt has %zu tokens", prompt.size());
            for (int n = 0; n < count; n++) {           // row 0 ends after two tokens
                const int first = 'a' + (int)first_id + n;
                if (n <= 2 && !on_token(0, n == 2 ? ends[0] : first)) { return; }
                if (!on_token(1, first + 10)) { return; }
            }
        };
        auto samples = [&](bool titled, const char* text) {
            TextTask task = {&tokenizer, prompt_tokens(&tokenizer, "Hi", 256, 8), 4, false};
            for (const std::vector<int>& others : {std::vector<int>{}, {7, 8}}) {       // ends[0] is 7
                task.other_ends = others;
                check_lives("samples", [&] { write_samples(task, {3, 2, 5, "Hi", titled}, draw); }, text);
            }
        };
        samples(false, "ab\n---\nklmn\n---\ncd\n");
        samples(true, "sample 1 at step 5:\nHiab\n---\nsample 2 at step 5:\nHiklmn\n---\n"
                      "sample 3 at step 5:\nHicd\n---\n");
        check_dies("no room", [&] { prompt_tokens(&tokenizer, "1234567", 256, 8); }, {"7 tokens", "most 6"});
        // A model of answers is asked by each line. Z stands for the end of a text.
        write_text(in_folder("said"), "\n Hi \n\nMore\n\nOn\n");
        const std::vector<std::string> texts = {" aZ", "  bc", "d", " eZ"};
        auto asks = [&](const char* system, bool whole, const std::vector<int>& others = {}) {
            FILE* said = freopen(in_folder("said").c_str(), "r", stdin);
            const TextTask task = {&tokenizer, {end}, 9, false, said ? system : nullptr, others};
            chat(task, "model", whole, [&](const std::vector<int>& prompt, int, const std::vector<int>& ends,
                                          uint32_t number, const OnToken& on_token) {
                std::string seen(prompt.begin(), prompt.end());
                for (int token : ends) { std::replace(seen.begin(), seen.end(), (char)token, 'Z'); }
                fprintf(stderr, "%s|", seen.c_str());
                const size_t at = number == 1 ? 0 : number - 2;             // the lines 0 and 2 say nothing
                for (char c : texts[at]) { on_token(0, c == 'Z' ? ends[0] : c); }
            });
        };
        const std::string one = "ZSystem: Be brief.\n\nUser: Hi\n\nAssistant:",
                          two = one + " aZUser: More\n\nAssistant:", three = two + "  bc";
        for (bool whole : {true, false}) {                  // false: -g cuts an answer
            Child spoken = run_child([&] { asks(" Be brief. ", whole, std::vector<int>(whole, 7)); });
            CHECK_TEXT(spoken.err, one + "|" + two + "|" + three + "|" + three + "dZUser: On\n\nAssistant:|");
            CHECK_TEXT(spoken.out, "a\n bc\nd\ne\n");
        }
        CHECK_HOLDS(run_child([&] { asks("", true); }).err, "ZUser: Hi\n\nAssistant:|");
        // Another model goes on from each line. Behind any end, as Y is one, a line begins a document.
        write_text(in_folder("said"), "a\n\nb\nc\n");
        Child spoken = run_child([&] {
            if (!freopen(in_folder("said").c_str(), "r", stdin)) { return; }
            const TextTask task = {&tokenizer, {end}, 9, false, nullptr, {'Y'}};
            chat(task, "model", false, [&](const std::vector<int>& prompt, int, const std::vector<int>&,
                                           uint32_t number, const OnToken& on_token) {
                std::string seen(prompt.begin(), prompt.end());
                std::replace(seen.begin(), seen.end(), (char)end, 'Z');
                fprintf(stderr, "%s|", seen.c_str());
                on_token(0, number < 2 ? 'Y' : 'x');
            });
        });
        CHECK_TEXT(spoken.err, "Za|ZaY|ZaYYZb|ZaYYZbx\nc|");
        CHECK_TEXT(spoken.out, "\n\nx\nx\n");
        CHECK_TEXT(chat_question("\t\v x\xC2\xA0\x1C\f\n"), "User: x\xC2\xA0\x1C\n\nAssistant:");
        CHECK_TEXT(chat_system(" \n\t "), "");
        check_dies("no tokenizer", [] { prompt_tokens(nullptr, "a", 300, 8); }, {"V=300", "tokenizer.bin"});
        tokenizer.pairs.clear();
        check_dies("another pattern", [&] { prompt_tokens(&tokenizer, "a", 256, 8); }, {"GPT-2's pattern"});
        tokenizer_free(&tokenizer);
    }
}

int main() {
    folder_begin("host");
    test_check();
    test_memory();
    test_muon_plan();
    test_tensors_of_some_layers();
    test_json();
    test_numbers();
    test_flags();
    test_run();
    test_schedules();
    test_sampler();
    test_rand();
    test_logger();
    test_report();
    test_text_out();
    return folder_end();
}
