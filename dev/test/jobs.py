"""Runs that something happens to: in the background, of one process or several ranks; and what they leave.

    job = Job({"--gpus": 2, "-x": 10**6})           # the usual small flags, and these
    job.until("step 3/")                            # a line that begins so was printed
    result = job.signal(signal.SIGTERM).result()    # signal: to the launcher

    at = Fault("rename", "state_", 2, signal.SIGKILL, rank=1)   # dies before its second rename of a state
    result = Job(flags, fault=at).result()
    unlike("folder", undisturbed(flags))            # what differs from the same run that nothing disturbed

Faults come from a library that is loaded before libc and counts calls, so each moment can be met again.
"""
import contextlib
import dataclasses
import datetime
import fcntl
import functools
import glob
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import termios
import time

import pytest

import gpus
from checks import LEASH, read, write
from trainer import (LIMIT_S, Program, Result, metrics, model_path, on_cpu, run, run_ok, without_checksum,
                     without_scaling)

ENDED_S = 120                           # after a death everything has ended: only a hang takes longer
STOPPING = "stopping and saving; press Ctrl-C again to stop at once, without saving\n"
UNREAD = "nobody reads what is printed: stopping after the last complete step\n"
DAY = datetime.date.today().toordinal()             # samples of long tables change with it
TERM, KILL, USR1, HUP, INT, PIPE = (signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1, signal.SIGHUP,
                                    signal.SIGINT, signal.SIGPIPE)


# ---- this machine ----

def most_ranks():
    """How many ranks can be tested here: on a CPU as many as one likes."""
    return 8 if on_cpu() else len(gpus.list_gpus())


def need(ranks):
    """Without GPUs for so many ranks the test counts as skipped, whatever it did before."""
    if ranks > most_ranks():
        pytest.skip(f"{ranks} ranks need {ranks} GPUs")


def ranks(n, zero_stage=0):
    return {"--gpus": n, "-zs": zero_stage}


def named(flags):
    return " ".join(f"{flag} {value}" for flag, value in flags.items() if value is not None) or "usual"


# ---- faults ----

# FAULT: "RANK OPERATION NAME NUMBER WHAT": before that rank's NUMBERth call of OPERATION on a file whose name
# has NAME in it comes WHAT: a signal, or -errno, with which that call fails, half done. KILL is for the rank,
# other signals are for the launcher. FAULT_LOG: each call's operation and file.
PRELOADED = r"""
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static int rank, left, what, log_fd = -1;
static char operation[16], name[64];

__attribute__((constructor)) static void begin() {
    const char *child = getenv("LLMC_COMM_CHILD"), *fault = getenv("FAULT"), *log = getenv("FAULT_LOG");
    int of = -1;
    rank = child ? atoi(child) : 0;
    if (fault && sscanf(fault, "%d %15s %63s %d %d", &of, operation, name, &left, &what) != 5) { abort(); }
    if (of != rank) { left = 0; }
    if (log) { log_fd = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600); }
}

static bool fails(const char* call, const char* path) {
    const char* file = strrchr(path, '/');
    if (!file || strncmp(path, "/dev", 4) == 0 || strncmp(path, "/memfd", 6) == 0) { return false; }
    if (log_fd >= 0) { dprintf(log_fd, "%d %s %s\n", rank, call, file + 1); }
    if (left == 0 || strcmp(call, operation) != 0 || !strstr(file, name) || --left > 0) { return false; }
    if (what > 0) { kill(what == SIGKILL ? getpid() : getsid(0), what); }
    else { errno = -what; }
    return what < 0;
}

static bool fails_fd(const char* call, int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t n = readlink(link, path, sizeof path - 1);
    path[n > 0 ? n : 0] = 0;
    return fails(call, path);
}

#define REAL(f) ((decltype(&f))dlsym(RTLD_NEXT, #f))
extern "C" {
int fputs(const char* s, FILE* f) { return fails_fd("fputs", fileno(f)) ? EOF : REAL(fputs)(s, f); }
size_t fwrite(const void* data, size_t size, size_t count, FILE* f) {
    const bool no = fails_fd("fwrite", fileno(f));
    const int error = errno;
    const size_t done = REAL(fwrite)(data, size, no ? count / 2 : count, f);
    errno = error;
    return done;
}
int fsync(int fd) { return fails_fd("fsync", fd) ? -1 : REAL(fsync)(fd); }
int ftruncate(int fd, off_t size) {
    return fails_fd("ftruncate", fd) ? -1 : REAL(ftruncate)(fd, size);
}
int rename(const char* a, const char* b) { return fails("rename", b) ? -1 : REAL(rename)(a, b); }
int unlink(const char* path) { return fails("unlink", path) ? -1 : REAL(unlink)(path); }
struct dirent* readdir(DIR* dir) { return fails_fd("readdir", dirfd(dir)) ? nullptr : REAL(readdir)(dir); }
}
"""


@dataclasses.dataclass(frozen=True)
class Fault:
    operation: str
    name: str
    number: int
    what: int
    rank: int = 0

    def __str__(self):
        what = f"errno {-self.what}" if self.what < 0 else signal.Signals(self.what).name
        return f"{what} before {self.operation} {self.number} of {self.name}, rank {self.rank}"


def preloaded():
    """The library's path; made once in each folder."""
    if not os.path.exists("faults.so"):
        write("faults.cpp", PRELOADED.encode())
        subprocess.run(["g++", "-shared", "-fPIC", "-o", "faults.so", "faults.cpp", "-ldl"], check=True)
    return os.path.abspath("faults.so")


def fault_environment(fault=None, log=None):
    env = {"LD_PRELOAD": preloaded(), "ASAN_OPTIONS": "verify_asan_link_order=0"}
    if fault:
        env["FAULT"] = f"{fault.rank} {fault.operation} {fault.name} {fault.number} {int(fault.what)}"
    if log:
        env["FAULT_LOG"] = log
    return env


# ---- jobs ----

def session_processes(session):
    """[(when it started, pid)] of a session's processes that are alive, its first process left out."""
    found = []
    for path in glob.glob("/proc/[0-9]*/stat"):
        with contextlib.suppress(OSError):      # it has just ended
            fields, pid = read(path).rpartition(b")")[2].split(), int(path.split("/")[2])
            if int(fields[3]) == session != pid and fields[0] not in (b"Z", b"X"):
                found.append((int(fields[19]), pid))
    return sorted(found)


class Job:
    """A run in the background, in a session of its own. What it prints goes to files, or to a pipe of the
    least size, which nobody reads until its end."""
    made = 0

    def __init__(self, flags, words=None, env=None, cwd=None, before=(), pipe=False, fault=None, **popen):
        Job.made += 1
        self.name, self.read = os.path.abspath(f"job{Job.made}"), b""
        words = LEASH + list(before) + (words or Program.command(flags))
        env = {"MALLOC_PERTURB_": 85, **(env or {}), **(fault_environment(fault) if fault else {})}
        with open(self.name + ".out", "wb") as out, open(self.name + ".err", "wb") as err:
            self.p = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE if pipe else out, stderr=err, cwd=cwd,
                env=Program.environment(1, **env), start_new_session=True, pipesize=4096 if pipe else -1,
                **popen)

    def out(self):
        return (self.read or read(self.name + ".out")).decode("latin-1")

    def err(self):
        return read(self.name + ".err").decode("latin-1")

    def ranks(self):
        """Process numbers by rank: the launcher starts them in this order."""
        return [pid for _, pid in session_processes(self.p.pid)]

    def when(self, happened):
        """Waits until it happened, or the job has ended."""
        end = time.monotonic() + LIMIT_S
        while not happened() and self.p.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        return happened()

    def until(self, line):
        return self.when(lambda: f"\n{line}" in self.out())

    def signal(self, number):
        self.p.send_signal(number)
        return self

    def gone(self, limit=LIMIT_S):
        """Waits for its end: True if no process was left in time. What was left is ended."""
        end = time.monotonic() + limit
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.p.wait(limit)
        while self.ranks() and time.monotonic() < end:      # who is killed may still be in a call
            time.sleep(0.01)
        left = self.ranks() + ([] if self.p.poll() is not None else [self.p.pid])
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.p.wait()
        return not left

    def result(self, limit=LIMIT_S):
        if self.p.stdout:
            self.read = self.p.stdout.read()            # to its end
        ended = self.gone(limit)
        return Result(self.p.returncode if ended else None, self.out(), without_scaling(self.err()),
                      self.p.args)


class Terminal:
    """A run whose input and output are a terminal. shown: the bytes that came there."""

    def __init__(self, flags, columns=200, env=None, **popen):
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 25, columns, 0, 0))
        self.shown, ends = b"", {"stdin": theirs, "stdout": theirs, "stderr": theirs, **popen}
        self.p = subprocess.Popen(Program.command(flags), **ends,
                                  env=Program.environment(1, **{"TERM": "xterm", **(env or {})}))
        os.close(theirs)

    def until(self, happened):
        """Reads until happened(shown), or to the end."""
        end = time.monotonic() + LIMIT_S
        while not happened(self.shown):
            if not select.select([self.ours], [], [], LIMIT_S)[0] or time.monotonic() > end:
                self.p.kill()
                raise TimeoutError(f"nothing new within {LIMIT_S} s behind {self.shown[-100:]!r}")
            try:
                self.shown += os.read(self.ours, 65536)
            except OSError:                     # Linux: the other side is closed
                return False
        return True

    def end(self):
        """(exit code, all that was shown)"""
        self.until(lambda shown: False)
        os.close(self.ours)
        return self.p.wait(LIMIT_S), self.shown


kept_ports = []                         # sockets


def free_port():
    """A port that nobody listens on, this test's own until it ends: given back, it may be anybody's before it
    is used. Beside the socket that keeps it a rank 0 may listen, since both have SO_REUSEADDR."""
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    kept_ports.append(kept)
    return kept.getsockname()[1]


def tcp(rank, port, size=2, **more):
    return {"-pi": "tcp", "-ps": f"127.0.0.1:{port}", "-pn": size, "-pr": rank, **more}


@functools.cache
def rare_model(home):
    """Flags of a model whose gradient is not finite where token 1 comes next, whatever the context:
    its logit is very small, and the norm larger than fp32 holds. The learning rate is too small for more."""
    model, C = {"-e": "L1,NH1,C256,T1,V256", "-b": 1, "-z": 1, "-i": "val.bin", "-l": "1e-6", "-v": 0,
                "--lanes": None, "--shuffle": 0}, 256
    run_ok({**model, "-x": 1, "-o": home + "/rare"})
    raw, width = without_checksum(read(model_path("rare"))), 2 if Program.precision == "BF16" else 4
    row = C * width
    for at, value in ((1024 + row, -3e38), (len(raw) - 2 * row, 0), (len(raw) - row, 2**-12)):
        raw[at:at + row] = struct.pack("<f", value)[4 - width:] * C     # wte of token 1, lnfw, lnfb
    write("rare.bin", raw)
    return {**model, "-e": "rare.bin"}


# ---- what a run prints, and what is in a folder ----

def printed(result):
    """(steps, losses, scores and titles of samples, without times; the samples)"""
    lines = re.findall(r"^(?:step|val loss|eval|sample) .*", result.out, re.M)
    return [re.sub(r" \| [\d.]+ ms \| .*", "", line) for line in lines], result.samples()


HEADER, ROW = struct.Struct("<8sIIQQQ24x"), struct.Struct("<64s16s6Q")


def read_state(path):
    """({fact: text}, [(name, type, rows, cols, begin, count, data)])"""
    raw = read(path)
    magic, version, pieces, facts_bytes, file_bytes, _ = HEADER.unpack_from(raw)
    assert (magic, version, file_bytes) == (b"GPT2STAT", 1, len(raw)), path
    at = HEADER.size + pieces * ROW.size
    facts = dict(line.split("=", 1) for line in raw[at:at + facts_bytes].decode().splitlines())
    table, at = [], at + facts_bytes
    for i in range(pieces):
        name, kind, rows, cols, begin, count, offset, _ = ROW.unpack_from(raw, HEADER.size + i * ROW.size)
        size = count * (4 if kind.startswith(b"f32") else 2)
        assert offset == at, f"{path}: {name} at {offset}, not {at}"
        table.append((name.rstrip(b"\0").decode(), kind.rstrip(b"\0").decode(), rows, cols, begin, count,
                      raw[at:at + size]))
        at += size
    assert at == len(raw), f"{path}: {len(raw) - at} bytes too many"
    return facts, table


def steps_of(folder):
    """Of the whole checkpoints, oldest first."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(int(name[5:]) for name in names if re.fullmatch(r"DONE_\d{8}", name))


def last_state(folder):
    """(step, facts, {tensor: (type, rows, cols, bytes)}) of the last checkpoint, whoever wrote which part."""
    step = steps_of(folder)[-1]
    paths = sorted(glob.glob(f"{folder}/state_{step:08d}_*.bin"))
    facts, tensors = read_state(paths[0])[0], {}
    for path in paths:
        for name, kind, rows, cols, begin, count, raw in read_state(path)[1]:
            width = len(raw) // count
            whole = tensors.setdefault(name, (kind, rows, cols, bytearray(b"?" * (rows * cols * width))))
            whole[3][begin * width:(begin + count) * width] = raw
    return step, facts, tensors


def untimed_metrics(folder):
    return [{key: x for key, x in record.items() if key not in ("ms", "tokens_per_s")}
            for record in metrics(folder)]


# what a resumed run may say otherwise: times, and who computed it on how many ranks
OTHERWISE = re.compile("ranks|device|program|flag[.](output-dir|resume|gpus|"
                       "zero-stage|recompute|checkpoint-every|max-steps|keep|major-every)")


def unlike(folder, judge):
    """What differs between the ends of two runs."""
    if not steps_of(folder):
        return ["it has no checkpoint"]
    (step, facts, tensors), (want_step, want_facts, want_tensors) = last_state(folder), last_state(judge)
    if step != want_step:
        return [f"its last checkpoint is of step {step}, not {want_step}"]
    found = [key for key in {**facts, **want_facts}
             if facts.get(key) != want_facts.get(key) and not OTHERWISE.fullmatch(key)]
    found += [name for name in {**tensors, **want_tensors} if tensors.get(name) != want_tensors.get(name)]
    if untimed_metrics(folder) != untimed_metrics(judge):
        found.append("metrics.jsonl")
    return found[:9] + [name for name in ("main.log", f"model_{step:08d}.bin")
                        if read(f"{folder}/{name}") != read(f"{judge}/{name}")]


def left_over(folder):
    """Files that belong neither to the run nor to a whole checkpoint."""
    whole = {f"{step:08d}" for step in steps_of(folder)}
    return [name for name in sorted(os.listdir(folder))
            if name not in ("main.log", "metrics.jsonl", "run.json")
            and not (re.fullmatch(r"(DONE|model|state)_\d{8}(_\d{5})?(\.bin)?", name)
                     and name.split("_")[1][:8] in whole)]


@functools.cache
def undisturbed_run(home, key):             # home: the folder in which the tests are now
    folder = f"{home}/judge{len(os.listdir())}"
    result = run({**dict(key), "-o": folder})
    assert result.code == 0 and not without_scaling(result.err), f"the undisturbed run fails: {result.err}"
    return folder, result


def undisturbed(flags, what=0):
    """The folder of the same command's run that nothing disturbs; what=1: its result."""
    key = tuple(sorted((k, v) for k, v in flags.items() if k not in ("-o", "-y")))
    return undisturbed_run(os.getcwd(), key)[what]
