"""What one sees of a run on a terminal: a line every few steps, progress between them, the GPU's telemetry.

    pytest dev/test/test_terminal.py -k progress

A terminal is a pseudo-terminal here, and a few lines of our own work out what its screen shows in the end.
"""
import fcntl
import json
import os
import pty
import re
import resource
import select
import shutil
import signal
import struct
import subprocess
import termios
import time

import pytest

from trainer import (LIMIT_S, USUAL as COMMON, Program, assert_close, log_lines, read_bytes,
                     run_ok, without_checksum, write_bytes)

USUAL = {**COMMON, "-b": 1, "-t": 8}
STEP = re.compile(r"step (\d+)/(\d+) \| loss (\S+) +\| lr (\S+) \| norm (\S+) +\| (\S+) ms \| (\d+) tok/s \| "
                  r"(?:MFU \S+% \| )?ETA \d+:\d\d:\d\d(?: \| (.*))?")
BAR = re.compile(r"step (\d+)/(\d+) \[([#.]{40})\] (\d+)% \| ETA \d+:\d\d:\d\d")
LIVE = re.compile(r"loss \S+ \| lr \S+ \| norm \S+ \| \d+ tok/s(?: \| MFU \S+%)?")
BLOCK = re.compile(r"\r(?:\x1b\[A)?(step [^\r\x1b]*)\x1b\[K\r\n([^\r\x1b]*)\x1b\[K")
CLEAR = "\r\x1b[A\x1b[J"
LONG = {"-x": 10**6, "--log-every": 10**6}


def screen(data):
    """The lines that a terminal shows in the end, as wide as need be: printing, newline, carriage return, a
    line up, erase to the end of the line or screen. Anything else is not expected, and stays to be seen."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[KAJ]|[\r\n]|[^\r\n\x1b]+|\x1b", data):
        if part == "\n":
            row += 1                    # the line discipline has put a carriage return before it
            lines += [""] * (row == len(lines))
        elif part == "\r":
            column = 0
        elif part == "\x1b[A":
            row -= 1
        elif part in ("\x1b[K", "\x1b[J"):
            lines[row] = lines[row][:column]
            del lines[row + 1 if part == "\x1b[J" else len(lines):]
        else:
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part):]
            column += len(part)
    return lines


def on_terminal(flags, columns=200, term="xterm", until=None, then=None, **popen):
    """(exit code, all that came) of a run whose stdout and stderr are a terminal. After the bytes `until`
    comes then(process): Ctrl-C, if it is not given."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 25, columns, 0, 0))
    p = subprocess.Popen(Program.command(flags), stdin=theirs, stdout=theirs, stderr=theirs,
                         env=Program.environment(1, TERM=term), **popen)
    os.close(theirs)
    data, end = b"", time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        if not select.select([ours], [], [], 1)[0]:
            continue
        try:
            part = os.read(ours, 65536)
        except OSError:                 # Linux: the other side is closed
            break
        data += part
        if not part:
            break
        if until and until in data:
            then(p) if then else p.send_signal(signal.SIGINT)
            until = None
    else:
        p.kill()
        raise TimeoutError(f"no end after {LIMIT_S} s")
    os.close(ours)
    return p.wait(), data.decode("latin-1")


def bars(lines):
    return [line for line in lines if BAR.search(line) or line.startswith("loss ")]


def untimed(lines):
    """Without what differs between two equal runs: times, and what is printed before the first step."""
    first = next((i for i, line in enumerate(lines) if line.startswith("data: ")), 0)
    text = re.sub(r"\S+ ms \| \d+ tok/s \|.* ETA \S+$", "TIMES", "\n".join(lines[first:]), flags=re.M)
    text = re.sub(r"^mean step time .*$", "MEAN", text, flags=re.M)
    return re.sub(r" in \S+(?: s)?$", " in TIME", text, flags=re.M).strip("\n").split("\n")


def steps_of(folder):
    with open(folder + "/metrics.jsonl", encoding="ascii") as f:
        return [record for record in map(json.loads, f) if "loss" in record]


# ---- --log-every ----

@pytest.mark.cpu_only
def test_log_every():
    """One line for so many steps, of their means (test_host.cpp's); the files have every step as before."""
    every = run_ok({"-x": 10, "-o": "each", "-v": 4, "-m": 1})
    some = run_ok({"-x": 10, "-o": "some", "-v": 4, "-m": 1, "--log-every": 3})
    rows, losses = STEP.findall(some.out), [r["loss"] for r in steps_of("some")]
    # 4 and 8 say where the validation stands that follows
    ends = [int(row[0]) for row in rows]
    assert len(STEP.findall(every.out)) == 10 and ends == [3, 4, 6, 8, 9, 10]
    want = [sum(losses[begin:end]) / (end - begin) for begin, end in zip([0, *ends], ends)]
    assert_close([float(row[2]) for row in rows], want, 1e-6, "mean losses")
    assert read_bytes("some/main.log") == read_bytes("each/main.log") and len(losses) == 10
    assert some.val_losses() == every.val_losses() and not re.search("[\r\x1b]", some.out)


@pytest.mark.cpu_only
def test_log_every_ends():
    """A run that is stopped tells of the steps since its last line; one that goes on keeps the flag."""
    code, text = on_terminal({**LONG, "-o": "ends"}, until=b" [")
    assert "`" + Program.path + " -y 1 -o ends` goes on with this run" in screen(text)
    rows, done = [m for m in map(STEP.fullmatch, screen(text)) if m], len(log_lines("ends"))
    losses = [r["loss"] for r in steps_of("ends")]
    assert code == 0 and [int(row[1]) for row in rows] == [done]
    assert_close([float(row[3]) for row in rows], [sum(losses) / done], 1e-6, "its mean loss")
    again = {"-o": "ends", "-y": 1, "-b": None, "-t": None}
    for steps, flags, want in ((done + 5, {}, [done + 5]),
                               (done + 7, {"--log-every": 1}, [done + 6, done + 7])):
        more = run_ok({"-x": steps, **again, **flags})
        assert [int(row[0]) for row in STEP.findall(more.out)] == want


@pytest.mark.cpu_only
def test_log_every_auto():
    """Without the flag a file has a line each step, a terminal some twenty. No line is wider than 80 columns
    there, or 100 in a file; what does not fit is left out."""
    flags = {"-x": 50, "-u": 10, "-s": 0}
    piped = run_ok({**flags, "-o": "in_a_file"}).out
    assert len(re.findall("^step ", piped, re.M)) == 50 and max(map(len, piped.splitlines())) <= 100
    code, text = on_terminal({**flags, "-o": "narrow"}, columns=80)
    lines = [line for line in screen(text) if line[:1] != "`"]     # commands are as long as the names in them
    assert code == 0 and max(map(len, lines)) <= 80, lines
    rows = [line for line in lines if line.startswith("step ")]
    assert [int(row[5:].split("/")[0]) for row in rows] == list(range(5, 51, 5))
    assert all(re.match(r"step \d+/50 \| loss \S+ +\| lr \S+ \| norm \S+ +\| \S+ ms", row) for row in rows)
    assert lines.index(rows[0]) <= 13, "the start"


# ---- the lines that rewrite themselves ----

@pytest.mark.cpu_only
def test_progress():
    """The screen in the end is what a pipe gets: that line leaves nothing behind."""
    flags = {"-x": 12, "-v": 5, "-m": 1, "-s": 6, "-g": 12, "-n": 0, "--log-every": 4}
    piped = run_ok({"-o": "piped", **flags})
    code, text = on_terminal({"-o": "shown", **flags})
    lines = [line.replace("shown", "piped") for line in screen(text)]
    assert code == 0 and untimed(lines) == untimed(piped.out.split("\n"))
    blocks = BLOCK.findall(text)
    shown = [BAR.fullmatch(first) for first, _ in blocks]
    assert shown and all(shown) and all(LIVE.fullmatch(second) for _, second in blocks)
    for bar in shown:
        done, full = int(bar[1]), bar[3].count("#")
        assert (int(bar[2]), full, int(bar[4])) == (12, done * 40 // 12, done * 100 // 12)
        assert bar[3] == "#" * full + "." * (40 - full)
    assert {1, 5, 9} <= {int(bar[1]) for bar in shown}, "after a line the next step is shown at once"
    for term, every in (("dumb", 4), ("xterm", 1)):
        _, text = on_terminal({**flags, "--log-every": every}, term=term)
        assert "\x1b" not in text and "[#" not in text


@pytest.mark.cpu_only
def test_progress_width():
    """Nothing is wider than the terminal: of lines that wrap only the end could be taken back."""
    _, text = on_terminal({"-x": 6, "--log-every": 6}, columns=30)
    shown = BLOCK.findall(text)
    assert shown and all(len(first) == 29 >= len(second) for first, second in shown)


@pytest.mark.cpu_only
def test_progress_and_messages():
    """What is saved, warnings, errors and the answer to Ctrl-C stand on lines of their own."""
    _, text = on_terminal({"-x": 8, "-o": "saving", "-n": 1, "--log-every": 8})
    good = re.compile(r"saved saving/model_(\d{8})\.bin and its state: \S+ MiB in \S+ s")
    assert [int(m[1]) for m in map(good.fullmatch, screen(text)) if m] == list(range(1, 9))

    data = without_checksum(read_bytes("saving/model_00000008.bin"))
    data[1024:1028] = b"\0\0\xc0\x7f"                   # NaN, in FP32 and in two bf16
    code, text = on_terminal({"-e": write_bytes("nan.bin", data), "-x": 50, "--log-every": 30})
    lines = screen(text)
    said = [line for line in lines if "skipped" in line]
    good = re.compile(r"step \d+: the gradient is not finite \(norm \S+, loss \S+\): update skipped|"
                      r"error: \d+ updates in a row were skipped: the run stops after step \d+, and .*")
    assert code == 1 and len(said) >= 20 and all(good.fullmatch(line) for line in said)
    assert CLEAR + "step" in text and not bars(lines)
    rows = [line for line in lines if STEP.fullmatch(line)]
    assert [row.split(" | lr")[0].rstrip() for row in rows] == ["step 20/50 | loss nan"]

    _, text = on_terminal(LONG, until=b" [")
    assert "stopping after the last complete step; Ctrl-C: at once, unsaved" in screen(text)
    assert not bars(screen(text))
    code, text = on_terminal({**LONG, "--gpus": 2}, until=b" [", then=lambda p: p.send_signal(signal.SIGTERM))
    assert code == 0 and not bars(screen(text))


@pytest.mark.cpu_only
def test_progress_and_errors():
    """So does the error that ends a run while the line is there: of this process, or because a rank died."""
    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    def kill_rank_1(p):
        with open(f"/proc/{p.pid}/task/{p.pid}/children", encoding="ascii") as f:
            os.kill(int(f.read().split()[1]), signal.SIGKILL)
    for said, flags, more in (("error: cannot write 'full/", {"-o": "full"}, {"preexec_fn": small_files}),
                              ("error: rank 1 (", {"--gpus": 2}, {"until": b" [", "then": kill_rank_1})):
        code, text = on_terminal({**LONG, **flags}, **more)
        [error] = [line for line in screen(text) if "error: " in line]
        assert code != 0 and error.startswith(said)


# ---- -lg: what the driver's library tells of the GPU ----

# In its place. NVML is what this one can do; NVML_LOG: a line for each start, GPU asked for, and end.
FAKE_NVML = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static bool can(const char* what) { return strstr(getenv("NVML"), what) != nullptr; }
static void note(const char* what) {
    FILE* f = fopen(getenv("NVML_LOG"), "a");
    fprintf(f, "%s\n", what);
    fclose(f);
}
static int gpu, reads;
static const int kNotSupported = 3, kNotFound = 6;
extern "C" {
int nvmlInit_v2() { note("init"); return can("init") ? 0 : 9; }
int nvmlShutdown() { note("end"); return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** handle) {
    note(id);
    *handle = &gpu;
    return can("gpu") ? 0 : kNotFound;
}
int nvmlDeviceGetClockInfo(void* h, int type, unsigned* mhz) {
    *mhz = 1900 + 10 * ++reads;
    return h == &gpu && type == 1 ? 0 : 2;
}
int nvmlDeviceGetPowerUsage(void* h, unsigned* mw) {
    *mw = 690600;
    return can("watts") && h == &gpu ? 0 : kNotSupported;
}
int nvmlDeviceGetTemperature(void* h, int sensor, unsigned* celsius) {
    *celsius = 63;
    return h == &gpu && sensor == 0 ? 0 : 2;
}
int nvmlDeviceGetMemoryInfo(void* h, unsigned long long* bytes) {
    bytes[0] = 150ull << 30, bytes[1] = 120ull << 30, bytes[2] = 30ull << 30;
    return h == &gpu ? 0 : 2;
}
#ifdef OLD
int nvmlDeviceGetCurrentClocksThrottleReasons
#else
int nvmlDeviceGetCurrentClocksEventReasons
#endif
(void* h, unsigned long long* reasons) {
    *reasons = can("cool") ? 1 : 0x4 | 0x20;
    return h == &gpu ? 0 : 2;
}
}
"""


def telemetry(folder, can, flags):
    """({step: fields of metrics.jsonl that begin with gpu_}, words of the lines, lines of NVML_LOG)"""
    shutil.rmtree("lg", ignore_errors=True)
    with open("nvml.log", "w", encoding="ascii"):
        pass
    env = Program.environment(1, LD_LIBRARY_PATH=os.path.abspath(folder), NVML=can, NVML_LOG="nvml.log")
    p = subprocess.run(Program.command({"-o": "lg", **flags}), capture_output=True, timeout=LIMIT_S, env=env,
                       check=True, text=True)
    assert p.stderr == ""
    told = {r["step"]: {key: x for key, x in r.items() if key.startswith("gpu_")} for r in steps_of("lg")}
    return told, [row[7] for row in STEP.findall(p.stdout)], read_bytes("nvml.log").decode().split()


@pytest.mark.cpu_only
@pytest.mark.skipif(not shutil.which("g++"), reason="no g++")
def test_telemetry():
    """On the line and in metrics.jsonl, every so many steps, of the GPU that the program computes on; nothing
    else changes. Where there is no library, or it does not know that GPU, nothing is said."""
    for name, words in (("nvml", []), ("nvml_old", ["-DOLD"])):
        os.makedirs(name)
        write_bytes(name + ".cpp", FAKE_NVML.encode())
        subprocess.run(["g++", "-shared", "-fPIC", *words, "-o", name + "/libnvidia-ml.so.1", name + ".cpp"],
                       check=True)
    run_ok({"-x": 6, "-o": "plain"})

    def sample(n):
        return {"gpu_mhz": 1900 + 10 * n, "gpu_watts": 690.6, "gpu_celsius": 63, "gpu_gib": 30,
                "gpu_limits": "power cap, heat"}
    told, words, asked = telemetry("nvml", "init gpu watts", {"-x": 6, "-lg": 2})
    assert told == {1: {}, 2: sample(1), 3: {}, 4: sample(2), 5: {}, 6: sample(3)}
    assert words == ["" if step % 2 else f"19{step // 2}0 MHz 691 W 63 C 30.0 GiB, power cap, heat"
                     for step in range(1, 7)]
    assert asked == ["init", "cpu", "end"], "a CPU is no GPU, so this is no bus id"
    assert read_bytes("lg/main.log") == read_bytes("plain/main.log")

    told, words, _ = telemetry("nvml", "init gpu cool", {"-x": 6, "-lg": 2, "--log-every": 3})
    assert told[2] == {"gpu_mhz": 1910, "gpu_celsius": 63, "gpu_gib": 30, "gpu_limits": ""}, "no watts"
    assert words == ["1910 MHz 63 C 30.0 GiB", "1930 MHz 63 C 30.0 GiB"], "a line has the last before it"
    assert telemetry("nvml_old", "init gpu watts", {"-x": 1, "-lg": 1})[0] == {1: sample(1)}, "old driver"
    for what, folder, can, flags, wanted in (
            ("no library", ".", "", {"-lg": 1}, []), ("not asked for", "nvml", "init gpu", {}, []),
            ("it cannot start", "nvml", "", {"-lg": 1}, ["init"]),
            ("another GPU", "nvml", "init", {"-lg": 1}, ["init", "cpu", "end"])):
        assert telemetry(folder, can, {"-x": 2, **flags}) == ({1: {}, 2: {}}, ["", ""], wanted), what


@pytest.mark.gpu
def test_telemetry_of_a_gpu():
    """What the driver's own program says of it as well."""
    asked = subprocess.run(["nvidia-smi", "--format=csv,noheader,nounits", "--query-gpu=memory.total"],
                           capture_output=True, text=True, timeout=LIMIT_S, check=True)
    gib = float(asked.stdout.split()[0]) / 1024
    run_ok({"-x": 4, "-lg": 2, "-o": "telemetry"})
    told = [record for record in steps_of("telemetry") if "gpu_mhz" in record]
    assert [record["step"] for record in told] == [2, 4]
    for record in told:
        assert 100 <= record["gpu_mhz"] <= 5000 and 10 <= record["gpu_watts"] <= 2000
        assert 10 <= record["gpu_celsius"] <= 110 and 0.1 <= record["gpu_gib"] <= gib
