"""What one sees of a run: its lines on a terminal and in a file, progress between them, the GPU's telemetry.

A terminal is a pseudo-terminal here. Means over several steps, NaN and MFU are test_host.cpp's.
"""
import os
import re
import resource
import shutil
import signal
import subprocess

import pytest

from jobs import Terminal
from checks import read, write
from trainer import LIMIT_S, USUAL as COMMON, Program, log_lines, logged_steps, nan_model, run_ok

USUAL = {**COMMON, "-b": 1, "-t": 8}
STEP = re.compile(r"step (\d+)/(\d+) \| loss (\S+) +\| lr (\S+) \| norm (\S+) +\| (\S+) ms \| (\d+) tok/s"
                  r"(?: \| MFU \S+%)?(?: \| ETA \d+:\d\d:\d\d)?(?:(?: \| |\n    )(.* GiB.*))?")
BAR = re.compile(r"step (\d+)/(\d+) \[([#.]{40})\] (\d+)% \| ETA \d+:\d\d:\d\d")
LIVE = re.compile(r"loss \S+( (?:\xe2\x96[\x81-\x88]){2,10})? \| lr \S+ \| norm \S+ \| \d+ tok/s.*")
TWO_LINES = r"([^\r\x1b]+)\x1b\[K\r\n([^\r\x1b]+)\x1b\[K"
BLOCK = re.compile(rf"\r(?:\x1b\[A)?{TWO_LINES}")       # the first one, or over the one before
SHOWN = re.compile(rf"\r{TWO_LINES}(?:\r\x1b\[A{TWO_LINES})*\r\x1b\[A\x1b\[J")      # blocks, and their end
MODEL_3 = "model_00000003.bin"
LONG = {"-x": 10**6, "--log-every": 10**6}


def on_terminal(flags, until=None, then=None, **more):
    """(exit code, all that came, the lines that stay). After the bytes `until` comes then(process): Ctrl-C,
    if it is not given."""
    terminal = Terminal(flags, **more)
    if until and terminal.until(lambda shown: until in shown):
        then(terminal.p) if then else terminal.p.send_signal(signal.SIGINT)
    code, shown = terminal.end()
    text = shown.decode("latin-1")
    lines = SHOWN.sub("", text).replace("\r\n", "\n").split("\n")
    assert not any(map(BAR.search, lines)), "progress stays on the screen"
    return code, text, lines


COMMANDS = re.compile(r"[\0-\x08\x0b-\x1f\x7f\x80-\x9f]")


def tame(text):
    """As a terminal gets a text that a pipe gets as it is; both are bytes, one to a character."""
    whole = text.encode("latin-1").decode("utf-8", "surrogateescape")
    whole = COMMANDS.sub(lambda m: (r"\x%02x" if m[0] < "\x80" else r"\u%04x") % ord(m[0]), whole)
    return whole.encode("utf-8", "surrogateescape").decode("latin-1")


def untimed(text):
    """Without what differs between two equal runs: times, and what is printed before `data:`."""
    times = r"\S+(?= (?:ms|tok/s|tokens/s)\b| s$)|\d+:\d\d:\d\d"
    return re.sub(times, "N", text[text.index("\ndata: "):], flags=re.M)


# ---- the lines that stay ----

@pytest.mark.cpu_only
def test_log_every():
    """One line for so many steps, and before what has a line of its own; the files have every step."""
    every, some = (run_ok({"-x": 10, "-o": f"every{n}", "-v": 4, "-m": 1, "--log-every": n}) for n in (1, 3))
    assert [int(row[0]) for row in STEP.findall(some.out)] == [3, 4, 6, 8, 9, 10]
    assert read("every3/main.log") == read("every1/main.log") and len(log_lines("every1")) == 10
    assert some.val_losses() == every.val_losses() and not re.search("[\r\x1b]", some.out)


@pytest.mark.cpu_only
def test_stopped_and_resumed():
    """The end tells of the steps since the last line; of a resumed run it says from where it counts. A
    validation is held against the run's best, from before the stop, too."""
    code, _, lines = on_terminal({**LONG, "-o": "ends", "-v": 10**6}, until=b" [")
    assert "`" + Program.path + " -y 1 -o ends` goes on with this run" in lines
    losses = [r["loss"] for r in logged_steps("ends")]
    done, [row] = len(losses), filter(None, map(STEP.fullmatch, lines))
    assert code == 0 and int(row[1]) == done and abs(float(row[3]) - sum(losses) / done) < 2e-6
    [loss] = re.findall(r"^val loss (\S+) @0 \|", "\n".join(lines), re.M)
    assert "\n".join(lines).count("val loss ") == 1, "none after the stop"
    vals = [(float(loss), 0)]
    again = {"-o": "ends", "-y": 1, "-b": None, "-t": None, "-v": 1}
    for begin, end, flags in ((done, done + 5, {}), (done + 5, done + 7, {"--log-every": 1})):
        out = run_ok({"-x": end, **again, **flags}).out
        assert [int(row[0]) for row in STEP.findall(out)] == list(range(begin + 1, end + 1))
        tokens = f"{8 * (end - begin)} tokens in \\S+ since step {begin}; {8 * end} tokens in all"
        assert re.search(f"^{tokens}$", out, re.M)
        vals = [val for val in vals if val[1] < begin]
        said_of = r"^val loss (\S+) @(\d+) \((.*)\) \| ppl \S+ \| bpb \S+$"
        for loss, step, said in re.findall(said_of, out, re.M):
            (best, at), by = min(vals), re.search(r"[-+]\S+\d", said)[0]
            assert said == (f"best, {by}" if float(loss) < best else f"{by}, best @{at}")
            assert abs(float(by) - (float(loss) - best)) < 1e-4
            vals.append((float(loss), int(step)))
        assert [step for _, step in vals][1:] == list(range(done, end + 1))
        assert re.search("^end: .* best validation loss {:.6f} @{}$".format(*min(vals)), out, re.M)


@pytest.mark.cpu_only
def test_widths():
    """No line is wider than 80 columns on such a terminal, or 100 in a file; what does not fit is left out or
    goes on below. Without --log-every a file has a line each step, a terminal some twenty."""
    flags = {"-x": 50, "-v": 25, "-u": 10, "-s": 50, "-g": 40, "--temperature": 0}
    for verbose in (-1, 0, 1):
        piped = run_ok({**flags, "--verbose": verbose, "-o": f"in_a_file{verbose}"}).out
        code, _, lines = on_terminal({**flags, "--verbose": verbose, "-o": f"narrow{verbose}"}, columns=80)
        shown = "\n".join(lines)
        for width, text in ((100, piped), (80, shown)):         # commands have names of any length
            assert code == 0 and not re.search(f"^[^`\n].{{{width},}}", text, re.M)
        steps = re.findall(r"^step (\d+)/50 \| loss \S+ +\| lr \S+ \| norm \S+ +\| \S+ ms", shown, re.M)
        assert steps == [str(i) for i in range(5, 51, 5)] and piped.count("\nstep ") == 50
        assert verbose > 0 or shown[:shown.index("\nstep")].count("\n") < 15, "the start"


# ---- the lines that rewrite themselves ----

@pytest.mark.cpu_only
def test_progress():
    """The screen in the end is what a pipe gets. A terminal that shows UTF-8 has a sparkline of the loss."""
    flags = {"-x": 12, "-v": 5, "-m": 1, "-s": 6, "-g": 12, "-n": 0, "--log-every": 4}
    piped = run_ok({"-o": "piped", **flags})
    code, text, lines = on_terminal({"-o": "shown", **flags})
    assert code == 0 and untimed("\n".join(lines).replace("shown", "piped")) == tame(untimed(piped.out))
    blocks = BLOCK.findall(text)
    shown = [BAR.fullmatch(first) for first, _ in blocks]
    assert shown and all(shown) and {LIVE.fullmatch(second)[1] for _, second in blocks} == {None}
    for bar in shown:
        done, full = int(bar[1]), bar[3].count("#")
        assert (int(bar[2]), full, int(bar[4])) == (12, done * 40 // 12, done * 100 // 12)
        assert bar[3] == "#" * full + "." * (40 - full)
    assert {1, 5, 9} <= {int(bar[1]) for bar in shown}, "after a line the next step is shown at once"
    for columns in (80, 30):            # of lines that wrap only the end could be taken back
        _, text, _ = on_terminal(flags, columns=columns, env={"LC_ALL": "C.UTF-8"})
        blocks = [[line.encode("latin-1").decode() for line in block] for block in BLOCK.findall(text)]
        assert blocks and all(len(line) < columns for block in blocks for line in block)
        assert {"\u2581", "\u2588"} < set(blocks[-1][1].split(" |")[0])
    for term, every in (("dumb", 4), ("xterm", 1)):
        _, text, _ = on_terminal({**flags, "--log-every": every}, env={"TERM": term})
        assert "\x1b" not in text and "[#" not in text


@pytest.mark.cpu_only
def test_progress_and_messages():
    """What is saved, warnings, errors and the answer to Ctrl-C stand on lines of their own."""
    _, _, lines = on_terminal({"-x": 8, "-o": "saving", "-n": 1, "--log-every": 8})
    good = re.compile(r"saved saving/model_(\d{8})\.bin and its state: \S+ MiB in \S+ s")
    assert [int(m[1]) for m in map(good.fullmatch, lines) if m] == list(range(1, 9))
    nan = nan_model("saving/model_00000008.bin")
    code, text, lines = on_terminal({"-e": nan, "-x": 50, "--log-every": 30})
    said = [line for line in lines if "skipped" in line]
    good = re.compile(r"step \d+: the gradient is not finite \(norm \S+, loss \S+\): update skipped|"
                      r"error: \d+ updates in a row were skipped: the run stops after step \d+, and .*")
    assert code == 1 and len(said) >= 20 and all(good.fullmatch(line) for line in said)
    [row] = filter(STEP.fullmatch, lines)
    assert BLOCK.search(text) and row.startswith("step 20/50 | loss nan ")
    _, _, lines = on_terminal(LONG, until=b" [")
    assert "stopping; press Ctrl-C again to stop at once" in lines
    assert on_terminal({**LONG, "--gpus": 2}, until=b" [", then=lambda p: p.terminate())[0] == 0


@pytest.mark.cpu_only
def test_control_characters():
    """No name, prompt, setting or byte of a model commands a terminal, whatever the command; a pipe gets a
    model's bytes."""
    evil = "e\x1b[2J\x07\r\u009bm"
    write(f"{evil}.bin", read("train.bin"))
    write(f"val{evil}.bin", read("val.bin"))
    alone, settings = dict.fromkeys(USUAL), {"-g": 60, "-f": None}
    train = {"-i": f"{evil}.bin:0.5,train.bin:0.5", "-j": f"val{evil}.bin:0.5,val.bin:0.5", "-t": 32, "-n": 1,
             "-o": evil, "-x": 2, "-v": 1, "-s": 1, "--prompt": evil, "--verbose": 1, **settings}
    rows = [(train, 0), (train, 1), ({**alone, "-y": 1, "-o": evil, "-x": 3}, 0),
            ({**alone, "-y": 1, "-o": evil, "--eval-data": evil, "-x": 3, "-h": 1}, 1),
            ({**alone, "eval": evil}, 0), ({**alone, "eval": evil, "-j": f"{evil}.bin"}, 0),
            ({**alone, "sample": evil, **settings, "--prompt": evil, "--num-samples": 3}, 0),
            ({**alone, "sample": evil, "-g": 60, "--num-samples": 3, "--seed": 4}, 0),
            ({**alone, "eval": evil + "x"}, 1), ({"-i": evil, "-o": "no"}, 1), ({evil: 1}, 1),
            ({**alone, "-e": f"{evil}/{MODEL_3}", "--plan": "H200"}, 0),
            ({**alone, "-y": 1, "-o": evil + "none"}, 1)]
    for flags, wanted in rows:
        code, text, lines = on_terminal(flags)
        shown = "\n".join(lines).encode("latin-1").decode("utf-8", "surrogateescape")
        assert code == wanted and not COMMANDS.search(shown), (flags, shown)
    same = {**alone, "sample": evil, "-g": 200, "--num-samples": 3, "--verbose": -1}
    piped, (_, _, lines) = run_ok(same).out, on_terminal(same, stderr=subprocess.DEVNULL)
    assert COMMANDS.search(piped) and "\n".join(lines) == tame(piped)
    terminal = Terminal({**alone, "chat": evil, "-g": 200, "--verbose": -1})
    os.write(terminal.ours, b"tak\n\x04")
    code, shown = terminal.end()
    shown = shown.decode("utf-8", "surrogateescape").replace("\r\n", "\n")
    assert code == 0 and len(shown) > 200 and not COMMANDS.search(shown), shown


@pytest.mark.cpu_only
def test_progress_and_errors():
    """So does the error that ends a run while they are there: of this process, or because a rank died."""
    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    def kill_rank_1(p):
        os.kill(int(read(f"/proc/{p.pid}/task/{p.pid}/children").split()[1]), signal.SIGKILL)
    for said, flags, more in (("error: cannot write 'full/", {"-o": "full"}, {"preexec_fn": small_files}),
                              ("error: rank 1 (", {"--gpus": 2}, {"until": b" [", "then": kill_rank_1})):
        code, _, lines = on_terminal({**LONG, **flags}, **more)
        [error] = [line for line in lines if "error: " in line]
        assert code != 0 and error.startswith(said)


# ---- -lg: what the driver's library tells of the GPU ----

# In its place. NVML is what this one can do; NVML_LOG: a line for each start, GPU asked for, and end.
FAKE_NVML = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static bool can(const char* what) { return strstr(getenv("NVML"), what) != nullptr; }
static int note(const char* what, int result) {
    FILE* f = fopen(getenv("NVML_LOG"), "a");
    return fprintf(f, "%s\n", what) > 0 && fclose(f) == 0 ? result : 1;
}
static int gpu, reads;
template <class T> static int tell(void* handle, T* where, T value, bool known = true) {
    *where = value;
    return handle == &gpu && known ? 0 : 3;                 // not supported
}
extern "C" {
int nvmlInit_v2() { return note("init", can("init") ? 0 : 9); }
int nvmlShutdown() { return note("end", 0); }
int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** handle) {
    *handle = &gpu;
    return note(id, can("gpu") ? 0 : 6);                    // not found
}
int nvmlDeviceGetClockInfo(void* h, int type, unsigned* x) {
    return tell(h, x, 1900u + 10 * ++reads, type == 1);
}
int nvmlDeviceGetPowerUsage(void* h, unsigned* x) { return tell(h, x, 690600u, can("watts")); }
int nvmlDeviceGetTemperature(void* h, int sensor, unsigned* x) { return tell(h, x, 63u, sensor == 0); }
int nvmlDeviceGetMemoryInfo(void* h, unsigned long long* bytes) {
    bytes[0] = 150ull << 30, bytes[1] = 120ull << 30;
    return tell(h, bytes + 2, 30ull << 30);
}
int REASONS(void* h, unsigned long long* x) { return tell(h, x, can("cool") ? 1ull : 0x24ull); }
}
"""


def fake_nvml(folder, can):
    open("nvml.log", "w", encoding="ascii").close()
    return {"LD_LIBRARY_PATH": os.path.abspath(folder), "NVML": can, "NVML_LOG": "nvml.log"}


def telemetry(folder, can, flags):
    """({step: fields of metrics.jsonl that begin with gpu_}, words of the lines, lines of NVML_LOG)"""
    shutil.rmtree("lg", ignore_errors=True)
    out = run_ok({"-o": "lg", **flags}, env=fake_nvml(folder, can)).out
    told = {r["step"]: {key: x for key, x in r.items() if key.startswith("gpu_")} for r in logged_steps("lg")}
    return told, [row[7] for row in STEP.findall(out)], read("nvml.log").decode().split()


@pytest.mark.cpu_only
@pytest.mark.skipif(not shutil.which("g++"), reason="no g++")
def test_telemetry():
    """On the line and in metrics.jsonl, every so many steps, of the GPU that the program computes on; nothing
    else changes. Where there is no library, or it does not know that GPU, nothing is said."""
    for name, reasons in (("nvml", "ClocksEvent"), ("nvml_old", "ClocksThrottle")):
        write(name + "/nvml.cpp", FAKE_NVML)
        subprocess.run(["g++", "-shared", "-fPIC", f"-DREASONS=nvmlDeviceGetCurrent{reasons}Reasons", "-o",
                        name + "/libnvidia-ml.so.1", name + "/nvml.cpp"], check=True)
    run_ok({"-x": 6, "-o": "plain"})

    def sample(n):
        return {"gpu_mhz": 1900 + 10 * n, "gpu_watts": 690.6, "gpu_celsius": 63, "gpu_gib": 30,
                "gpu_limits": "power cap, heat"}
    told, words, asked = telemetry("nvml", "init gpu watts", {"-x": 6, "-lg": 2})
    assert told == {1: {}, 2: sample(1), 3: {}, 4: sample(2), 5: {}, 6: sample(3)}
    assert words == ["" if step % 2 else f"19{step // 2}0 MHz 691 W 63 C 30.0 GiB, power cap, heat"
                     for step in range(1, 7)]
    assert asked == ["init", "cpu", "end"], "a CPU is no GPU, so this is no bus id"
    assert read("lg/main.log") == read("plain/main.log")
    _, _, lines = on_terminal({"-x": 1, "-lg": 1}, columns=80, env=fake_nvml("nvml", "init gpu watts"))
    assert "    1910 MHz 691 W 63 C 30.0 GiB, power cap, heat" in lines, "what does not fit goes on below"

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
    told = [record for record in logged_steps("telemetry") if "gpu_mhz" in record]
    assert [record["step"] for record in told] == [2, 4]
    for record in told:
        assert 100 <= record["gpu_mhz"] <= 5000 and 10 <= record["gpu_watts"] <= 2000
        assert 10 <= record["gpu_celsius"] <= 110 and 0.1 <= record["gpu_gib"] <= gib
