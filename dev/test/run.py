#!/usr/bin/env python3
"""Builds and runs the test suites side by side, and adds up their closing lines. `make test` calls it.

    python3 dev/test/run.py                     # all that this machine can run
    python3 dev/test/run.py host gpu            # only suites whose name contains one of these words
    python3 dev/test/run.py --missing gpu       # of the GPU's those that have not passed on these sources
    python3 dev/test/run.py --update-counts     # the last runs' numbers of tests into dev/test/expected.txt
    python3 dev/test/run.py --hash              # sha256 of the CUDA sources, for dev/test/gpu-results.txt

A suite is a command whose last line is `N passed, N failed, N skipped`. One that dies, hangs, prints no such
line or ran fewer tests than dev/test/expected.txt asks for counts as one failure. Its whole output is kept in
build/logs/NAME.log. What a GPU's suites said, dev/test/gpu-results.txt tells other machines, with a hash of
the sources; a run that is broken off leaves the rows of those that have ended, and --missing goes on.
"""
import glob
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
GPU_RESULTS = "dev/test/gpu-results.txt"
EXPECTED = "dev/test/expected.txt"
LOGS = "build/logs"
CLOSING = re.compile(r"^(\d+) passed, (\d+) failed, (\d+) skipped$")
PYTHON = ".venv/bin/python" if os.path.exists(os.path.join(ROOT, ".venv/bin/python")) else sys.executable
CORES = len(os.sched_getaffinity(0))
GPU_PLACES = 6          # programs that share a GPU's memory at one time
ON_GPU = ("gpu", "gpus")    # what a suite needs that runs CUDA programs: one GPU, several
# With fewer, where several are needed, one skipped test stands for several: such numbers have lines of their
# own in EXPECTED, `gpus ranks FP32, 2 GPUs`.
FULL_GPUS = 4

# Only a hang meets these, however busy the machine is: seconds without output and without using a core (a
# deadlock), and seconds in all (an endless loop); no suite takes more than three minutes of one core.
QUIET_S, LIMIT_S = 600, 3600


class Suite:
    """after: names of suites that come first; cores: how many of CORES it takes (0.5: half of its time it
    waits); gpu: how many of GPU_PLACES, on one GPU, or on all of them where it needs several; starts: it
    starts programs all the time, beside which the kernels' tests take several times as long.
    queues: of the hardware, for a program's streams. With one in place of eight, twelve programs at a time
    start at 14 a second on an H200, not at 5. Streams keep their order and their events; what runs at the
    same time is left to the kernels' tests, to resuming in BF16 and to several GPUs, which have all eight."""

    def __init__(self, name, command, after=(), needs=None, cores=1, gpu=0, counts=True, steady=True,
                 starts=False, queues=None):
        self.name, self.command, self.after, self.needs = name, command, after, needs
        self.cores, self.gpu, self.starts, self.queues = min(cores, CORES), gpu, starts, queues
        self.counts = counts        # False: the command counts nothing, its exit code is the one test
        self.steady = steady        # False: the number of its tests is not kept in expected.txt

    def log(self):
        return f"{LOGS}/" + re.sub(r"\W+", "_", self.name) + ".log"


def make(name, targets, **more):
    return Suite(name, ["make", "-s", f"-j{min(CORES, 4)}"] + targets, counts=False, **more)


def all_suites(gpu=True):
    """In the order of starting: first what others wait for, then what takes long. gpu: is one here?"""
    # one for each dev/test/test_*.cpp: a new file needs no line here, nor in the Makefile
    host = sorted(re.sub(r".*/test_|\.cpp$", "", path) for path in glob.glob("dev/test/test_*.cpp"))
    suites = [make("build cpu", ["cpu"], cores=4)]
    kinds = ("BF16", "FP16", "FP32")
    cuda = [f"check/{name}_gpt2.{kind}" for kind in kinds for name in ("test", "train")]
    cuda += ["check/profile_gpt2.BF16"] + [path[4:-3] for path in glob.glob("dev/cuda/*.cu")]
    cuda += ["plain/train_gpt2.BF16"]                                   # without NCCL, MPI, ...
    # test_gpt2 has all that the precision decides about: the trainer in one will do where none can run. That
    # one is made as for users, and what is left for what the compiler says about it alone.
    run_only = {f"check/train_gpt2.{kind}" for kind in kinds[1:]}
    whole = cuda if gpu else ["check/train_gpt2.BF16"]
    suites += [make("nvcc " + ("plain" if name.startswith("plain") else name.split("/")[1]),
                    ["build/" + name] if name in whole else ["LOOK=1", "build/look/" + name],
                    needs="gpu build" if name in run_only else "nvcc") for name in cuda]
    suites += [make("build plain", ["build/plain/train_gpt2cpu"])]
    suites += [make("build asan", ["asan"], cores=4), make("build tsan", ["tsan"], cores=2),
               make("build fuzz", ["build/fuzz"], needs="clang")]
    # The kernels' first: they decide most, and start one program each.
    suites += [Suite("gpu test " + kind, ["build/check/test_gpt2." + kind], ["nvcc test_gpt2." + kind], "gpu",
                     gpu=2) for kind in kinds]
    # Starting on a GPU takes long, so what the precision cannot change is tested in one of them.
    for test in ("cli", "loop"):
        for kind, part in [("BF16", 0)] + [(kind, 1) for kind in kinds]:
            program = "build/check/train_gpt2." + kind
            command = [PYTHON, f"dev/test/test_{test}.py", program, f"--numeric={part}"]
            suites.append(Suite(f"gpu {test} {kind}" + (" words" if part == 0 else ""), command,
                                ["nvcc train_gpt2." + kind], "gpu", gpu=1, starts=True, queues=1))
    blocks = [PYTHON, "dev/test/test_blocks.py"]
    suites += [Suite("gpu blocks " + kind, blocks + ["build/check/train_gpt2." + kind, "--numeric=1"],
                     ["nvcc train_gpt2." + kind], "gpu", gpu=1, starts=True, queues=1)
               for kind in kinds]
    resume = [PYTHON, "dev/test/test_resume.py"]
    suites += [Suite("gpu resume " + kind, resume + ["build/check/train_gpt2." + kind, "--numeric=1"],
                     ["nvcc train_gpt2." + kind], "gpu", gpu=2, starts=True,
                     queues=None if kind == "BF16" else 1) for kind in kinds]
    golden = [PYTHON, "dev/test/test_golden.py"]
    suites += [Suite("gpu golden " + kind, golden + ["build/check/train_gpt2." + kind],
                     ["nvcc train_gpt2." + kind], "gpu", gpu=1, starts=True, queues=1) for kind in kinds]
    breaks = [PYTHON, "dev/test/break_all.py", "build/check/test_gpt2.BF16", "kernels", "--small", "model"]
    suites += [Suite("gpu break BF16", breaks, ["nvcc test_gpt2.BF16"], "gpu", cores=4, gpu=2,
                     starts=True, queues=1)]
    cpu, asan = ["build cpu"], ["build asan", "build cpu"]
    if os.path.exists("dev/test/test_ranks.py"):
        ranks = [PYTHON, "dev/test/test_ranks.py"]
        suites += [Suite(f"gpus ranks {kind}" + (" words" if part == 0 else ""),
                         ranks + ["build/check/train_gpt2." + kind, f"--numeric={part}"],
                         ["nvcc train_gpt2." + kind], "gpus", cores=8, gpu=2, starts=True)
                   for kind, part in (("BF16", 0), ("BF16", 1), ("FP32", 1))]
        among_gpus = ["build/check/train_gpt2.BF16", "-k", "elastic rank_killed signals_for_ranks bad_loss"]
        suites += [Suite("gpus resume BF16", resume + among_gpus, ["nvcc train_gpt2.BF16"], "gpus", cores=8,
                         gpu=2, starts=True)]
        suites += [Suite("ranks cpu", ranks + ["./train_gpt2cpu"], cpu)]
    suites += [
        Suite("cli cpu", [PYTHON, "dev/test/test_cli.py", "./train_gpt2cpu"], cpu),
        Suite("loop cpu", [PYTHON, "dev/test/test_loop.py", "./train_gpt2cpu"], cpu),
        Suite("blocks cpu", blocks + ["./train_gpt2cpu"], cpu),
        Suite("golden cpu", golden + ["build/plain/train_gpt2cpu"], ["build plain"]),
        Suite("seeing cpu", [PYTHON, "dev/test/test_seeing.py", "./train_gpt2cpu"], cpu, cores=0.5),
        Suite("lazy cpu", [PYTHON, "dev/test/test_lazy.py", "build/train_gpt2lazy"], cpu, cores=0.5),
        Suite("hf cpu", [PYTHON, "dev/test/test_hf.py", "./train_gpt2cpu"], cpu),
        Suite("resume cpu", resume + ["./train_gpt2cpu"], cpu),
        Suite("asan resume", resume + ["build/asan/train_gpt2cpu", "-k", "test_kills alone"], asan),
        Suite("lazy resume", resume + ["build/train_gpt2lazy", "-k", "validation alone test_kills rewind"],
              cpu),
        Suite("asan model cpu", ["build/asan/test_gpt2cpu"], asan),
        Suite("break cpu", [PYTHON, "dev/test/break_all.py", "./test_gpt2cpu"], cpu, cores=4),
        Suite("host tiktoken", [PYTHON, "dev/test/compare_tiktoken.py"], cpu),
        Suite("model cpu", ["./test_gpt2cpu"], cpu, cores=2),
        Suite("host stories", [PYTHON, "dev/test/test_stories.py"], cpu),
        Suite("scripts", [PYTHON, "dev/test/test_scripts.py"], cpu, cores=0.5),
        Suite("datasets", [PYTHON, "dev/test/test_datasets.py"], cpu, cores=0.5),
        Suite("formats", [PYTHON, "dev/test/test_llmc_format.py"]),
        Suite("lint", [PYTHON, "dev/test/lint.py"], steady=False),      # as many as there are files
    ]
    waits = {"comm": 0}                 # cores: of its 40 s it works for 8, the rest are time limits
    suites += [Suite("asan " + name, ["build/asan/test_" + name], asan, cores=waits.get(name, 1))
               for name in host]
    suites += [Suite("host " + name, ["build/test_" + name], cpu, cores=waits.get(name, 1)) for name in host]
    # what threads share; of the jobs of many processes only some: each call takes far longer. The second that
    # TSan would wait at the end of each process finds nothing here, and some tests fork while a thread runs.
    suites += [Suite("tsan " + name.split()[0], ["env", "TSAN_OPTIONS=atexit_sleep_ms=0:die_after_fork=0"] +
                     ("build/tsan/test_" + name).split(), ["build tsan"])
               for name in ("dataloader", "host", "comm die", "checkpoints")]
    suites += [Suite("fuzz " + os.path.basename(path), [PYTHON, "dev/fuzz/run.py", os.path.basename(path)],
                     ["build fuzz"], "clang") for path in sorted(glob.glob("dev/fuzz/seeds/*"))]
    return suites


def chosen(suites, words, have):
    """Those whose name contains a word, and before them what they wait for, if they can run here."""
    wanted = {s.name for s in suites if not words or any(word in s.name for word in words)}
    for suite in reversed(suites):          # a suite stands behind those that it waits for
        if suite.name in wanted and have[suite.needs]:
            wanted.update(suite.after)
    return [s for s in suites if s.name in wanted]


# ---- what this machine has ----

def has_nvcc():
    return shutil.which("nvcc") is not None or os.path.exists("/usr/local/cuda/bin/nvcc")


def has_clang():
    """One that brings libFuzzer and the sanitizers along."""
    program = 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }'
    words = ["clang++", "-fsanitize=fuzzer,address,undefined", "-x", "c++", "-", "-o", os.devnull]
    return shutil.which("clang++") is not None and subprocess.run(
        words, input=program, text=True, stderr=subprocess.DEVNULL, check=False).returncode == 0


def ask_gpus(*words):
    """nvidia-smi's lines, one for each GPU; none without it."""
    try:
        said = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return said.stdout.splitlines() if said.returncode == 0 else []


def list_gpus():
    """As CUDA_VISIBLE_DEVICES names them."""
    there = [str(i) for i in range(sum(line.startswith("GPU ") for line in ask_gpus("-L")))]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [word for word in visible.split(",") if word] if there and visible is not None else there


# ---- dev/test/gpu-results.txt and dev/test/expected.txt: lines `key: value` ----

def without_words(text):
    """C++ without comments, blanks and the words of messages; what is in an asm statement stays."""
    def blank(token):
        word = token[0]
        if word[0] == "'":
            return word
        return '"' + "_" * (len(word) - 2) + '"' if word[0] == '"' else " " * len(word)
    token = r'''"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])+'|//[^\n]*|/\*.*?\*/'''
    code, out, at = re.sub(token, blank, text, flags=re.S), "", 0
    for found in re.finditer(r"\basm\b", code):
        end = code.index(");", found.start())
        out, at = out + code[at:found.start()] + text[found.start():end], end
    return " ".join(re.sub('"_*"', '""', out + code[at:]).split())


def cuda_hash():
    """Of all that the CUDA programs are made of."""
    digest, seen, paths = hashlib.sha256(), set(), sorted(glob.glob("*.cu"))
    while paths:
        path = paths.pop(0)
        seen.add(path)
        with open(path, encoding="utf-8") as f:
            text = f.read()
        for name in re.findall(r'#include "([^"]+)"', text):
            beside = os.path.normpath(os.path.join(os.path.dirname(path), name))
            include = beside if os.path.exists(beside) else name
            paths += [include] if include not in paths and include not in seen else []
        digest.update((path + "\0" + without_words(text) + "\0").encode())
    return digest.hexdigest()


def read_fields(path):
    try:
        with open(path, encoding="utf-8") as f:
            return dict(line.strip().split(": ", 1) for line in f if ": " in line and line[0] != "#")
    except FileNotFoundError:
        return {}


def expected_name(suite, gpus):
    """Its name in EXPECTED on a machine with so many GPUs."""
    return f"{suite.name}, {gpus} GPUs" if suite.needs == "gpus" and 2 <= gpus < FULL_GPUS else suite.name


def good_on_gpu():
    """Suites that have passed with these sources; those of several GPUs, on as many as are useful here."""
    fields = read_fields(GPU_RESULTS)
    rows = {name: CLOSING.match(text) for name, text in fields.items() if name != "counts"}
    good = {name for name, row in rows.items() if row and int(row[1]) and not int(row[2])}
    if int(fields.get("gpus", 0)) < min(len(list_gpus()), FULL_GPUS):
        good = {name for name in good if not name.startswith("gpus ")}
    return good if fields.get("sha256") == cuda_hash() else set()


def gpu_report(suites, expected, have):
    """Three calm lines for a machine without a GPU."""
    on_gpu = [s for s in suites if s.needs in ON_GPU]
    tests = sum(skipped_tests(s, expected) for s in on_gpu)
    programs = sum(s.needs == "nvcc" for s in suites)
    more = "" if have["nvcc"] else f" So are {programs} CUDA programs that nvcc would compile."
    fields = read_fields(GPU_RESULTS)
    about = ", ".join(fields.get(key, "no " + key) for key in ("date", "gpu", "counts"))
    about += f", several GPUs: {fields['gpus']}" if "gpus" in fields else ""
    about += "".join(f", without {s.name}" for s in on_gpu if s.name not in fields)
    print(f"\nAll that needs no GPU ran here. {tests} tests of the CUDA programs are counted as skipped:\n"
          f"they need an NVIDIA GPU (`make test-gpu` on a machine that has one).{more}")
    if not fields:
        print(f"STALE: there is no {GPU_RESULTS}: nothing is known of a run on a GPU.")
    elif fields.get("sha256") != cuda_hash():
        print(f"STALE: the CUDA sources have changed since their last run on a GPU ({about}).")
    else:
        print(f"Their last run, of these very sources: {about}.")


def write_gpu_results(rows, sources, others=()):
    """sources: cuda_hash() of when they began to run. As long as it is the same, what dev/gpu.sh wrote below
    the first empty line stays, and so do the rows of suites that did not run this time, `others`. gpus: the
    fewest that a suite of several had."""
    more, fields = "", read_fields(GPU_RESULTS)
    gpus = [len(list_gpus())] if any(row[0].startswith("gpus ") for row in rows) else []
    if fields.get("sha256") == sources:
        if any(name.startswith("gpus ") and name in fields for name in others):
            gpus.append(int(fields.get("gpus", 2)))
        with open(GPU_RESULTS, encoding="utf-8") as f:
            more = "".join(f.read().partition("\n\n")[1:])[1:]
        kept = [(name, CLOSING.match(fields.get(name, ""))) for name in others]
        rows = rows + [(name, *map(int, row.groups())) for name, row in kept if row]
    total = [sum(row[i] for row in rows) for i in (1, 2, 3)]
    name, driver = ((ask_gpus("--format=csv,noheader", "--query-gpu=" + what) or [None])[0]
                    for what in ("name", "driver_version"))
    with open(GPU_RESULTS, "w", encoding="utf-8") as f:
        f.write(f"date: {time.strftime('%Y-%m-%d', time.gmtime())}\n"
                f"gpu: {name}\n"
                f"driver: {driver}\n"
                f"counts: {total[0]} passed, {total[1]} failed, {total[2]} skipped\n"
                f"sha256: {sources}\n" + (f"gpus: {min(gpus)}\n" if gpus else ""))
        f.writelines(f"{row[0]}: {row[1]} passed, {row[2]} failed, {row[3]} skipped\n" for row in rows)
        f.write(more)


def update_counts():
    """Each suite's number of tests in its last run, here or on the GPU; 2 % less of many, as machines differ
    in a few (some cannot mount a file system, some are root)."""
    rows, on_gpu = read_fields(EXPECTED), read_fields(GPU_RESULTS)
    suites = [s for s in all_suites() if s.counts]
    for suite in suites:
        last = on_gpu.get(suite.name, "")
        if suite.needs not in ON_GPU and os.path.exists(suite.log()):
            with open(suite.log(), encoding="utf-8", errors="replace") as f:
                last = f.read().rstrip("\n").rpartition("\n")[2]
        closing = CLOSING.match(last)
        passed, failed, skipped = (int(n) for n in closing.groups()) if closing else (0, 0, 0)
        if passed and not failed and suite.steady:
            tests = passed + skipped - (passed + skipped) // 50
            rows[expected_name(suite, int(on_gpu.get("gpus", 0)))] = str(tests)
    with open(EXPECTED, "w", encoding="utf-8") as f:
        f.write("# Lowest number of tests of each suite, skipped ones included: with fewer it fails.\n"
                "# Rewritten by `python3 dev/test/run.py --update-counts` after a run of the suites.\n")
        names = {s.name for s in suites}
        f.writelines(f"{name}: {rows[name]}\n" for name in sorted(rows) if name.partition(",")[0] in names)


def skipped_tests(suite, expected):
    return int(expected.get(suite.name, 1))


# ---- running ----

def session_stats(session):
    """(pid, what /proc/PID/stat says behind its name) of a session's processes."""
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            with open(path, encoding="utf-8", errors="replace") as f:
                fields = f.read().rpartition(")")[2].split()
        except OSError:                         # it has just ended
            continue
        if int(fields[3]) == session:
            yield int(path.split("/")[2]), fields


def cpu_ticks(session):
    """Of all processes of a session; children that have ended are counted by their parents."""
    return sum(int(n) for _, fields in session_stats(session) for n in fields[11:15])


class Running:
    """gpus: those that the suite uses; where it needs one, it sees no other."""

    def __init__(self, suite, gpus=()):
        self.suite, self.gpus, self.problem = suite, gpus, ""
        self.began = self.moved = self.looked = time.monotonic()
        self.seen = None
        env = dict({"CUDA_DEVICE_MAX_CONNECTIONS": str(suite.queues)} if suite.queues else {}, **os.environ)
        if len(gpus) == 1:
            env["CUDA_VISIBLE_DEVICES"] = gpus[0]
        with open(suite.log(), "wb") as out:
            try:                                # a session of its own: what it starts can be ended with it
                self.child = subprocess.Popen(suite.command, stdin=subprocess.DEVNULL, stdout=out,
                                              stderr=subprocess.STDOUT, start_new_session=True,
                                              env=env)
            except OSError as error:
                self.child, self.problem = None, str(error)

    def ended(self):
        if self.child is None or self.child.poll() is not None:
            return True
        now = time.monotonic()
        if now - self.looked < min(10, QUIET_S / 4):
            return False
        self.looked = now
        seen = (os.path.getsize(self.suite.log()), cpu_ticks(self.child.pid))
        if seen != self.seen:
            self.seen, self.moved = seen, now
        if now - self.moved > QUIET_S:
            self.problem = f"hangs: no output and no use of a core for {QUIET_S} s"
        elif now - self.began > LIMIT_S:
            self.problem = f"still running after {LIMIT_S} s"
        if self.problem:
            self.kill()
        return bool(self.problem)

    def kill(self):
        if self.child is not None and self.child.poll() is None:
            os.killpg(self.child.pid, signal.SIGKILL)
            self.child.wait()

    def row(self, expected):
        """(name, passed, failed, skipped, seconds, what went wrong); prints a failure's lines."""
        suite, seconds = self.suite, time.monotonic() - self.began
        code = self.child.returncode if self.child else None
        with open(suite.log(), encoding="utf-8", errors="replace") as f:
            lines = f.read().rstrip("\n").split("\n")
        counts, problem = judge(suite, code, lines[-1], expected)
        problem = self.problem or problem
        if problem:
            counts = (counts[0], max(counts[1], 1), counts[2])
        row = (suite.name, *counts, seconds, problem)
        print_row(*row)
        if counts[1]:
            failures = [line for line in lines if line.startswith("FAIL")][:20] or lines[-20:]
            print("\n".join("    " + line for line in failures))
            print(f"    all of it: {suite.log()}", flush=True)
        return row


def judge(suite, code, last_line, expected):
    """((passed, failed, skipped), what is wrong with them)"""
    if not suite.counts:
        return (int(code == 0), 0, 0), f"exit code {code}" if code else ""
    closing = CLOSING.match(last_line)
    if not closing:
        return (0, 0, 0), f"exit code {code}, no closing line"
    passed, failed, skipped = (int(n) for n in closing.groups())
    tests, lowest = passed + failed + skipped, skipped_tests(suite, expected)
    if skipped == tests > 0:                    # something that it needs is not here
        return (0, 0, max(skipped, lowest)), ""
    problem = ""
    if tests < lowest:
        problem = f"ran {tests} tests, {EXPECTED} asks for {lowest}" if tests else "ran no test"
    elif (code != 0) != (failed > 0):
        problem = f"exit code {code} does not fit its closing line '{last_line}'"
    return (passed, failed, skipped), problem


def print_row(name, passed, failed, skipped, seconds, note):
    print(f"{name:<24}{passed:>8}{failed:>8}{skipped:>9}{seconds:>9.1f}  {note}".rstrip(), flush=True)


def run_all(suites, have, expected, all_gpus, rows):
    """Adds a row per suite to `rows`, in the order in which they end."""
    os.makedirs(LOGS, exist_ok=True)
    print(f"{'suite':<24}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}", flush=True)
    waiting, running, good = list(suites), [], set()
    done = set()

    def close(row):
        rows.append(row)
        done.add(row[0])
        if not row[2] and row[1]:
            good.add(row[0])

    try:
        while waiting or running:
            for suite in list(waiting):
                missing = [name for name in suite.after if name in done and name not in good]
                if not have[suite.needs] or missing:
                    waiting.remove(suite)
                    close((suite.name, 0, 0, skipped_tests(suite, expected), 0.0, "skipped"))
                    if have[suite.needs] or suite.needs == "clang":     # gpu_report tells of the others
                        what = missing[0] if missing else "clang's libFuzzer"
                        print_row(*rows[-1][:5], f"skipped: without {what}")
                elif good.issuperset(suite.after):
                    gpus = place(suite, running, all_gpus)
                    if gpus is not None:
                        waiting.remove(suite)
                        running.append(Running(suite, gpus))
            for one in [one for one in running if one.ended()]:
                running.remove(one)
                close(one.row(expected))
            time.sleep(0.05)
    finally:                                    # Ctrl-C as well
        for one in running:
            one.kill()


def place(suite, running, all_gpus):
    """The GPUs on which a suite can start now, () if it needs none; None: it has to wait."""
    if running and sum(one.suite.cores for one in running) + suite.cores > CORES:
        return None
    if suite.needs not in ON_GPU:
        return ()
    if suite.starts and any(one.suite.needs in ON_GPU and not one.suite.starts for one in running):
        return None
    taken = {gpu: sum(one.suite.gpu for one in running if gpu in one.gpus) for gpu in all_gpus}
    free = [gpu for gpu in sorted(all_gpus, key=taken.get) if taken[gpu] + suite.gpu <= GPU_PLACES]
    if suite.needs == "gpu":
        return tuple(free[:1]) or None
    return tuple(all_gpus) if len(free) == len(all_gpus) else None


def main():
    os.chdir(ROOT)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")     # spinning threads would starve each other
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # A shell's background jobs begin with the first ignored, nohup's with the second, and what is tested here
    # would inherit that. A handler is not inherited, even one that ignores.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda number, frame: None)
    words = sys.argv[1:]
    if words == ["--hash"]:
        print(cuda_hash())
        return 0
    if words == ["--update-counts"]:
        update_counts()
        return 0
    missing = "--missing" in words
    words = [word for word in words if word != "--missing"]
    gpus = list_gpus()
    have = {None: True, "nvcc": has_nvcc(), "clang": has_clang(), "gpu": len(gpus) >= 1,
            "gpu build": len(gpus) >= 1, "gpus": len(gpus) >= 2}
    everything, expected = all_suites(have["gpu"]), read_fields(EXPECTED)
    asked = {s.name: expected.get(expected_name(s, len(gpus)), 1) for s in everything}
    suites = chosen(everything, words, have)
    if missing:
        good = good_on_gpu()
        suites = [s for s in suites if s.needs not in ON_GPU or s.name not in good]
    on_gpu = {s.name: have[s.needs] for s in everything if s.needs in ON_GPU}
    rows, sources = [], cuda_hash()         # who edits them meanwhile has not tested what he wrote
    try:
        run_all(suites, have, asked, gpus, rows)
    finally:                                    # of a run that is broken off, too, what has ended is kept
        ran = [row for row in rows if row[0] in on_gpu and row[5] != "skipped"]
        if have["gpu"] and ran:
            write_gpu_results(ran, sources, [name for name in on_gpu if name not in {row[0] for row in ran}])
    if not words and not missing:
        names = {s.name for s in everything if s.counts}
        rows += [(name, 0, 1, 0, 0.0, f"is in {EXPECTED} but no suite any more") for name in expected
                 if name.partition(",")[0] not in names]
    absent = [name for name, can_run in on_gpu.items() if not can_run]
    if have["gpu"] and absent and any(row[0] in absent for row in rows):
        print(f"\n{', '.join(absent)}: counted as skipped, they need two GPUs and nvidia-smi lists one.")
    if not have["gpu"] and not words:
        gpu_report(suites, expected, have)
    elif not have["gpu"] and any(s.name in on_gpu for s in suites):
        print("\nThe suites with gpu in their name need an NVIDIA GPU; nvidia-smi lists none here.")
    failures = [row for row in rows if row[2]]
    for row in failures:
        print(f"FAILED: {row[0]}: {row[5] or str(row[2]) + ' failed'}")
    total = [sum(row[i] for row in rows) for i in (1, 2, 3)]
    print(f"{total[0]} passed, {total[1]} failed, {total[2]} skipped")
    return 1 if total[1] or not total[0] else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
