#!/usr/bin/env python3
"""What one sees of a run: lines and progress on the terminal, plots, TensorBoard's event files.

    dev/test/test_seeing.py ./train_gpt2cpu [-k WORD] [--keep]

A terminal is a pseudo-terminal here, and a few lines of our own work out what its screen shows in the end.
"""
import fcntl
import glob
import json
import math
import os
import pty
import re
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time

from checks import ROOT, has_module
from trainer import (LIMIT_S, Program, Result, check, check_close, check_equal, check_ran, check_refused,
                     log_columns, log_lines, main, model_path, read_bytes, run_ok, skip, without_checksum,
                     write_bytes)

STEP = re.compile(r"step (\d+)/(\d+) \| loss (\S+) \| lr (\S+) \| norm (\S+) \| (\S+) ms \| (\d+) tok/s \| "
                  r"ETA \d+:\d\d:\d\d")
BAR = re.compile(r"step (\d+)/(\d+) \[([#.]{20})\] (\d+)% \| loss (\S+) \| (\d+) tok/s \| ETA \d+:\d\d:\d\d")
CLEAR = b"\r\x1b[K"
QUICK = {"-b": 1, "-t": 8}


# ---- a terminal ----

def screen(data):
    """The lines that a terminal shows in the end, as wide as need be: printing, newline, carriage return,
    erase to the end of the line. Anything else is not expected, and stays to be seen."""
    lines, column = [""], 0
    for part in re.findall(r"\x1b\[K|[\r\n]|[^\r\n\x1b]+|\x1b", data):
        if part == "\n":
            lines.append("")            # the line discipline has put a carriage return before it
        elif part == "\r":
            column = 0
        elif part == "\x1b[K":
            lines[-1] = lines[-1][:column]
        else:
            lines[-1] = lines[-1][:column].ljust(column) + part + lines[-1][column + len(part):]
            column += len(part)
    return lines


def on_terminal(flags, columns=200, term="xterm", until=None, then=None, **popen):
    """(exit code, all bytes that came) of a run whose stdout and stderr are a terminal. After the bytes
    `until` comes then(process): Ctrl-C, if it is not given."""
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
        check(False, f"no end after {LIMIT_S} s")
    os.close(ours)
    return p.wait(), data.decode("latin-1")


def untimed(lines):
    """Without what differs between two equal runs: times, and what is printed before the first step."""
    first = next((i for i, line in enumerate(lines) if line.startswith("data: ")), 0)
    text = "\n".join(lines[first:])
    text = re.sub(r"\S+ ms \| \d+ tok/s \| ETA \S+$", "TIMES", text, flags=re.M)
    text = re.sub(r"^mean step time .*$", "MEAN", text, flags=re.M)
    return re.sub(r" in \S+ s$", " in TIME", text, flags=re.M).strip("\n").split("\n")


# ---- --log-every ----

def metrics(folder):
    with open(folder + "/metrics.jsonl", encoding="ascii") as f:
        return [json.loads(line) for line in f]


def test_log_every():
    """One line for so many steps, of their means; the files have every step, whatever the terminal shows."""
    every = run_ok({"-x": 10, "-o": "each", "-v": 4, "-m": 1, **QUICK})
    some = run_ok({"-x": 10, "-o": "some", "-v": 4, "-m": 1, "--log-every": 3, **QUICK})
    check_equal(len(STEP.findall(every.out)), 10, "lines without the flag")
    rows = STEP.findall(some.out)
    # 4 and 8 say where the validation stands that follows
    check_equal([int(row[0]) for row in rows], [3, 4, 6, 8, 9, 10], "steps that have a line")
    columns, records = log_columns("some"), [r for r in metrics("some") if "loss" in r]
    check_equal(read_bytes("some/main.log"), read_bytes("each/main.log"), "main.log")
    check_equal(len(records), 10, "steps in metrics.jsonl")
    begin = 0
    for step, _, loss, lr, norm, ms, speed in rows:
        end = int(step)
        count = end - begin
        check_close([float(loss)], [sum(r["loss"] for r in records[begin:end]) / count], 1e-6,
                    f"loss, {step}")
        check_close([float(norm)], [sum(columns["norm"][begin:end]) / count], 2e-4, f"norm, {step}")
        check_close([float(lr)], [columns["lr"][end - 1]], 0.005 * columns["lr"][end - 1], f"lr, {step}")
        mean_ms = sum(r["ms"] for r in records[begin:end]) / count
        check_close([float(ms)], [mean_ms], 0.0501, f"ms, {step}")
        check_close([float(speed)], [8 / mean_ms * 1e3], 1, f"tokens/s, {step}")
        begin = end
    check_equal(some.val_losses(), every.val_losses(), "val losses")
    check("\r" not in some.out and "\x1b" not in some.out, "without a terminal there is no progress line")


def test_log_every_ends():
    """A run that is stopped tells of the steps since its last line; one that goes on does so line by line."""
    code, text = on_terminal({"-x": 10**6, "-o": "ends", "--log-every": 10**6, **QUICK}, until=b" [")
    rows = [STEP.fullmatch(line) for line in screen(text)]
    rows = [row for row in rows if row]
    done = len(log_lines("ends"))
    check_equal((code, [int(row[1]) for row in rows]), (0, [done]), "exit code, and its one line")
    losses = [r["loss"] for r in metrics("ends") if "loss" in r]
    check_close([float(row[3]) for row in rows], [sum(losses) / len(losses)], 1e-6, "its mean loss")
    again = {"-o": "ends", "-y": 1, "-b": None}
    more = run_ok({"-x": done + 5, **again})
    rows = STEP.findall(more.out)
    check_equal([int(row[0]) for row in rows], [done + 5], "the flag is kept by a resumed run")
    more = run_ok({"-x": done + 7, "--log-every": 1, **again})
    check_equal([int(row[0]) for row in STEP.findall(more.out)], [done + 6, done + 7], "unless given anew")
    check_refused("log-every", {"--log-every": 0}, "--log-every", "at least 1")


def test_progress():
    """The screen in the end is what a pipe gets: the line that rewrites itself leaves nothing behind."""
    flags = {"-x": 12, "-v": 5, "-m": 1, "-s": 6, "-g": 12, "-n": 0, "--log-every": 4, **QUICK}
    piped = run_ok({"-o": "piped", **flags})
    code, text = on_terminal({"-o": "shown", **flags})
    check_equal(code, 0, "exit code")
    lines = untimed([line.replace("shown", "piped") for line in screen(text)])
    check_equal(lines, untimed(piped.out.split("\n")), "the screen")
    bars = [BAR.fullmatch(part) for part in re.findall(r"\r(step [^\r\x1b]*)\x1b", text)]
    if check(bars and all(bars), f"lines that rewrite themselves: {text[-2000:]!r}"):
        for bar in bars:
            done, total = int(bar[1]), int(bar[2])
            check_equal((total, bar[3].count("#"), int(bar[4])), (12, done * 20 // 12, done * 100 // 12),
                        f"the bar at step {done}")
            check_equal(bar[3], "#" * bar[3].count("#") + "." * bar[3].count("."), "its form")
        # after a line the next step is shown at once
        check({1, 5, 9} <= {int(bar[1]) for bar in bars}, "steps that were shown")
    for term, every in (("dumb", 4), ("xterm", 1)):
        _, text = on_terminal({**flags, "--log-every": every}, term=term)
        check("\x1b" not in text and "[#" not in text, f"TERM={term}, --log-every {every}: no such line")


def test_progress_and_saving():
    """That a checkpoint is on disk is said when it is, between two steps."""
    _, text = on_terminal({"-x": 8, "-o": "saving", "-n": 1, "--log-every": 8, **QUICK})
    lines = [line for line in screen(text) if "saved" in line]
    good = re.compile(r"saved saving/model_(\d{8})\.bin and its state: \S+ MiB in \S+ s")
    check_equal([int(m[1]) for m in map(good.fullmatch, lines) if m], list(range(1, 9)), f"saved: {lines}")


def test_progress_width():
    """Nothing is wider than the terminal: of a line that wraps only the end could be taken back."""
    _, text = on_terminal({"-x": 6, "--log-every": 6, **QUICK}, columns=30)
    shown = re.findall(r"\r(step [^\r\x1b]*)\x1b", text)
    check(shown and all(len(line) == 29 for line in shown), f"widths in 30 columns: {shown}")


def test_progress_and_messages():
    """Warnings, errors and the answer to Ctrl-C stand on lines of their own."""
    run_ok({"-x": 1, "-o": "sound", **QUICK})
    data = without_checksum(read_bytes(model_path("sound")))
    data[1024:1028] = b"\0\0\xc0\x7f"                  # NaN, in FP32 and in two bf16
    write_bytes("nan.bin", data)
    code, text = on_terminal({"-e": "nan.bin", "-x": 50, "--log-every": 30, **QUICK})
    check_equal(code, 1, "a run that stops after 20 skipped updates")
    lines = screen(text)
    skips = [line for line in lines if "skipped" in line]
    good = re.compile(r"step \d+: the gradient is not finite \(norm \S+, loss \S+\): update skipped|"
                      r"error: \d+ updates in a row were skipped: the run stops after step \d+, and .*")
    check(len(skips) >= 20 and all(good.fullmatch(line) for line in skips), f"messages: {skips}")
    check(CLEAR.decode() + "step" in text, "there was a line to take away")
    check_equal([line for line in lines if BAR.search(line)], [], "what is left of that line")
    check_equal([line.split(" | lr")[0] for line in lines if STEP.fullmatch(line)], ["step 20/50 | loss nan"],
                "the line of the steps before the end")

    _, text = on_terminal({"-x": 10**6, "--log-every": 10**6, **QUICK}, until=b" [")
    lines = screen(text)
    check("stopping after the last complete step; Ctrl-C: at once, unsaved" in lines, f"Ctrl-C: {lines[-6:]}")
    check_equal([line for line in lines if BAR.search(line)], [], "after Ctrl-C")
    code, text = on_terminal({"-x": 10**6, "--log-every": 10**6, "--gpus": 2, **QUICK}, until=b" [",
                             then=lambda p: p.send_signal(signal.SIGTERM))
    check_equal((code, [line for line in screen(text) if BAR.search(line)]), (0, []), "two ranks")


def test_progress_and_errors():
    """So does the error that ends a run while the line is there: of this process, or because a rank died."""
    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    flags = {"-x": 10**6, "--log-every": 10**6, **QUICK}
    code, text = on_terminal({**flags, "-o": "full"}, preexec_fn=small_files)
    error = [line for line in screen(text) if "error: " in line]
    check(code == 1 and len(error) == 1 and error[0].startswith("error: cannot write 'full/"),
          f"{code}, {error}")

    def kill_rank_1(p):
        with open(f"/proc/{p.pid}/task/{p.pid}/children", encoding="ascii") as f:
            os.kill(int(f.read().split()[1]), signal.SIGKILL)
    code, text = on_terminal({**flags, "--gpus": 2}, until=b" [", then=kill_rank_1)
    error = [line for line in screen(text) if "error: " in line]
    check(code != 0 and len(error) == 1 and error[0].startswith("error: rank 1 ("), f"{code}, {error}")


def test_step_numbers():
    """A step has one number on the terminal, in metrics.jsonl and in names of files: how many are done then.
    main.log is llm.c's, which counts from 0."""
    result = run_ok({"-x": 4, "-v": 2, "-m": 1, "-o": "numbers", "-n": 2, **QUICK})
    records = metrics("numbers")
    steps = [(r["step"], f"{r['loss']:.6f}") for r in records if "loss" in r]
    check_equal(steps, [(int(row[0]), row[2]) for row in STEP.findall(result.out)], "metrics and terminal")
    check_equal([r["tokens"] for r in records if "loss" in r], [8 * step for step, _ in steps], "tokens")
    check_equal([r["step"] for r in records if "val_loss" in r], [0, 2, 4], "validations")
    check_equal([line.split(" lr")[0] for line in log_lines("numbers")],
                [f"s:{step - 1} trl:{loss}" for step, loss in steps], "main.log")
    check(os.path.exists(f"numbers/model_{steps[-1][0]:08d}.bin"), "the model's name")


# ---- plots ----

PLOT = os.path.join(ROOT, "dev/data/plot_log.py")
BOARD = os.path.join(ROOT, "dev/data/tensorboard_log.py")


def script(*words, **env):
    """(exit code, stdout, stderr)"""
    p = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=LIMIT_S,
                       env={**os.environ, **env})
    return p.returncode, p.stdout, p.stderr


def write(path, text):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)


def plot_log():
    sys.path.insert(0, os.path.dirname(PLOT))
    return __import__("plot_log")


def made_run(folder, steps=20, **settings):
    """A run's files, in the forms that llmc/run/logger.h writes; the loss of step k is 10/(k+1)."""
    log, records = "", ""
    for step in range(steps + 1):
        if step % 10 == 0:
            log += f"s:{step} tel:{11 / (step + 1):.6f}\ns:{step} eval:0.25{step:04d}\n"
            records += f'{{"step": {step}, "val_loss": {11 / (step + 1)}}}\n'
        if step < steps:
            log += f"s:{step} trl:{10 / (step + 1):.6f} lr:1.000000e-03 norm:{step + 1}.0000\n"
            records += (f'{{"step": {step + 1}, "loss": {10 / (step + 1)}, "lr": 1e-3, "norm": {step + 1}, '
                        f'"tokens": {64 * (step + 1)}, "ms": 2, "tokens_per_s": {32000 + step}}}\n')
    write(folder + "/main.log", log)
    write(folder + "/metrics.jsonl", records)
    write(folder + "/run.json", json.dumps({"settings": settings}))


def test_plot_reads():
    """The numbers of a run as it wrote them, but for a line that is half there; what is no log is refused."""
    run_ok({"-x": 6, "-v": 3, "-m": 1, "-o": "real", **QUICK})
    run, columns = plot_log().Run("real"), log_columns("real")
    for name, column in (("train", "trl"), ("lr", "lr"), ("norm", "norm")):
        check_equal(run.curves[name], (columns["step"], columns[column]), name)
    check_equal(run.curves["val"][0], [0, 3, 6], "validated at")
    speeds = [r["tokens_per_s"] for r in metrics("real") if "loss" in r]
    check_equal(run.curves["speed"], ([0, 1, 2, 3, 4, 5], speeds), "tokens/s")
    check("eval" not in run.curves, "no HellaSwag: no curve")
    made_run("made")
    check_equal(plot_log().Run("made").curves["eval"], ([0, 10, 20], [0.250000, 0.250010, 0.250020]), "eval")

    whole = plot_log().Run("made").curves
    with open("made/metrics.jsonl", "a", encoding="ascii") as f:
        f.write('{"step": 20, "loss": 1, "ms": 2, "tokens_per_s": 3, "abandoned": 1}\n')
    check_equal(plot_log().Run("made").curves, whole, "a step that the run went back from")
    for name, half in (("main.log", "s:20 tel:5."), ("metrics.jsonl", '{"step": 21, "val_lo')):
        made_run("made")
        for more, what in ((half, "half a line"), ("x\n", "a line of another form")):
            with open("made/" + name, "a", encoding="ascii") as f:
                f.write(more)
            if more == half:
                check_equal(plot_log().Run("made").curves, whole, f"{name} and {what}")
                continue
            code, _, err = script(PLOT, "made")
            check(code == 1 and err.startswith(f"error: made/{name}:") and "Trace" not in err, err)
    write("llmc/main.log", "s:0 tel:11.1\ns:0 trl:11.0 lr:0.000001 norm:15.3\n"
          "s:1 trl:nan lr:0.000002 norm:inf\n")
    check_equal(plot_log().Run("llmc").curves["lr"], ([0, 1], [1e-6, 2e-6]), "llm.c's log, and no other file")
    write("old/main.log", "s:0 trl:11.0\n")
    check_equal(plot_log().Run("old/main.log").curves, {"train": ([0], [11.0])}, "an old log of llm.c")
    write("none/main.log", "")
    write("dots/main.log", "s:0 trl:1.2.3\n")
    for path, said in (("nowhere", "cannot read nowhere"), ("none", "no losses"), ("dots", "main.log:1")):
        code, _, err = script(PLOT, path)
        check(code == 1 and said in err and "Trace" not in err and err.count("\n") <= 3, f"{path}: {err}")


def test_plot_seconds():
    """Over time: a point stands where the steps before it end, first steps that compile included."""
    made_run("timed", 4)
    log = read_bytes("timed/metrics.jsonl").decode()
    write("timed/metrics.jsonl", log.replace('"ms": 2', '"ms": 5000', 1))
    run = plot_log().Run("timed")
    values = {name: curve[1] for name, curve in run.curves.items()}
    plot_log().by_seconds(run)
    for name, at in (("train", [0, 5, 5.002, 5.004]), ("val", [0]), ("speed", [0, 5, 5.002, 5.004])):
        check_close(run.curves[name][0], at, 1e-9, f"{name}: seconds")
        check_equal(run.curves[name][1], values[name], f"{name}: values")
    os.remove("timed/metrics.jsonl")
    code, _, err = script(PLOT, "timed", "--seconds")
    check(code == 1 and "timed/main.log has no times" in err and "Trace" not in err, f"without times: {err}")


def test_plot_smooth():
    """Means around each point: a straight line stays as it is, a NaN leaves a gap and nothing else."""
    smooth = plot_log().smooth
    line = [float(x) for x in range(1000)]
    check_close(smooth(line), line, 1e-9, "a straight line")
    noise = [float(x % 2) for x in range(1000)]
    check_close(smooth(noise)[50:950], [0.5] * 900, 0.03, "noise")
    gap = smooth(line[:500] + [math.nan, math.inf] + line[502:])
    check_equal([i for i, x in enumerate(gap) if math.isnan(x)], [500, 501], "gaps")
    check(all(abs(x - i) < 3 for i, x in enumerate(gap) if i not in (500, 501)), "beside the gaps")
    check_equal((smooth([]), smooth([2.0])), ([], [2.0]), "none and one")


def test_plot_draws():
    """What is in the picture: panels, curves, names, levels; and it is written without a display."""
    if not has_module("matplotlib"):
        skip("matplotlib is not installed", 19)
        return
    made_run("web", **{"val-data": "data/fineweb10B/fineweb_val_*.bin", "model": "d12"})
    made_run("other", 10, **{"val-data": "val.bin", "model": "d12"})
    plot = plot_log()
    web, other = plot.Run("web"), plot.Run("other")

    def panels(figure):
        return {axes.get_title(): axes for axes in figure.axes}

    def levels_of(*runs, **more):
        return [line.get_label() for axes in plot.draw(runs, **more).axes for line in axes.lines
                if len(line.get_xdata()) == 2 and line.get_linestyle() == ":"]

    known = ["GPT-2 124M on FineWeb 3.425", "GPT-2 124M on HellaSwag 0.294"]
    check_equal(levels_of(web), known, "levels of a run on FineWeb")
    check_equal(levels_of(other), [], "levels of another run")
    check_equal(levels_of(other, gpt2=True), known, "asked for")
    other.settings["eval-data"] = "dev/data/mmlu/mmlu_test.bin"
    check_equal(levels_of(other, gpt2=True), known[:1], "of a run that answers other questions")
    check_equal(levels_of(other, lines=[(1.5, "a bigram")]), ["a bigram 1.500"], "a line of one's own")
    for data, model, wanted in (("edu_fineweb_val_0.bin", "d12", False), ("fineweb_val.bin", "d12", True),
                                ("fineweb.bin", "L4,NH4,C128,T128,V256", False),
                                ("FineWeb.bin", "L4,NH4,C128,T128,V50257", True)):
        web.settings = {"val-data": data, "model": model}
        check_equal(web.is_on_fineweb(), wanted, f"FineWeb: {data}, {model}")
    web.settings = {}
    check_equal([axes.get_xlabel() for axes in plot.draw([web], across="s", loss_alone=True).axes], ["s"],
                "the loss alone")
    figure = panels(plot.draw([web, other]))
    titles = ["loss (nats per token)", "questions, normalised accuracy", "learning rate", "gradient norm",
              "tokens/s"]
    check_equal(sorted(figure), sorted(titles), "panels")
    check_equal(figure[titles[0]].get_legend_handles_labels()[1],
                ["web training loss", f"web validation loss, last {11 / 21:.3f}", "other training loss",
                 "other validation loss, last 1.000"], "names in the first")
    drawn = [list(line.get_ydata()) for line in figure[titles[0]].lines]
    check(web.curves["train"][1] in drawn and other.curves["val"][1] in drawn, "the losses are drawn")
    check(web.curves["speed"][1] in [list(line.get_ydata()) for line in figure["tokens/s"].lines], "tokens/s")
    write("llmc2/main.log", "s:0 tel:11.1\n")
    check_equal(sorted(panels(plot.draw([plot.Run("llmc2")]))), titles[:1], "only what was measured")

    os.environ.pop("DISPLAY", None)
    shutil.copytree("other", "sub/web")
    same = [plot.Run("web"), plot.Run("sub/web"), other]
    plot.tell_apart(same)
    check_equal([run.name for run in same[1:]], ["sub/web", "other"], "two folders of one name")
    code, out, err = script(PLOT, "web", "sub/web", "-o", "both.png")
    check((code, out) == (0, "wrote both.png\n"), f"{code}, {out}{err}")
    check_equal(read_bytes("both.png")[:8], b"\x89PNG\r\n\x1a\n", "both.png") if code == 0 else None
    code, _, err = script(PLOT, "web", "-o", "nowhere/x.png")
    check(code == 1 and err.startswith("error: cannot write nowhere/x.png") and "Trace" not in err, err)


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
GPU_WORDS = re.compile(r" \| ETA \S+(?: \| (.*))?$", re.M)


def with_nvml(folder, can, flags):
    """(Result, {step: fields of metrics.jsonl that begin with gpu_}, lines of NVML_LOG)"""
    shutil.rmtree("lg", ignore_errors=True)
    write("nvml.log", "")
    env = Program.environment(1, LD_LIBRARY_PATH=os.path.abspath(folder), NVML=can, NVML_LOG="nvml.log")
    p = subprocess.run(Program.command({"-o": "lg", **QUICK, **flags}), capture_output=True, timeout=LIMIT_S,
                       env=env)
    result = check_ran(Result(p.returncode, p.stdout.decode("latin-1"), p.stderr.decode("latin-1"), []))
    told = {r["step"]: {key: x for key, x in r.items() if key.startswith("gpu_")} for r in metrics("lg")
            if "loss" in r}
    return result, told, read_bytes("nvml.log").decode().split()


def test_telemetry():
    """On the line and in metrics.jsonl, every so many steps, of the GPU that the program computes on; nothing
    else changes. Where there is no library, or it does not know that GPU, nothing is said."""
    if not shutil.which("g++"):
        skip("no g++")
        return
    for name, words in (("nvml", []), ("nvml_old", ["-DOLD"])):
        os.makedirs(name)
        write(name + ".cpp", FAKE_NVML)
        subprocess.run(["g++", "-shared", "-fPIC", *words, "-o", name + "/libnvidia-ml.so.1", name + ".cpp"],
                       check=True)
    run_ok({"-x": 6, "-o": "plain", **QUICK})

    def sample(n, **more):
        return {"gpu_mhz": 1900 + 10 * n, "gpu_watts": 690.6, "gpu_celsius": 63, "gpu_gib": 30,
                "gpu_limits": "power cap, heat", **more}
    result, told, asked = with_nvml("nvml", "init gpu watts", {"-x": 6, "-lg": 2})
    check_equal(told, {1: {}, 2: sample(1), 3: {}, 4: sample(2), 5: {}, 6: sample(3)}, "in metrics.jsonl")
    check_equal(GPU_WORDS.findall(result.out),
                ["" if step % 2 else f"19{step // 2}0 MHz 691 W 63 C 30.0 GiB, power cap, heat"
                 for step in range(1, 7)], "on the lines")
    check_equal(asked, ["init", "cpu", "end"], "asked of the library: a CPU is no GPU, so this is no bus id")
    check_equal(read_bytes("lg/main.log"), read_bytes("plain/main.log"), "main.log")
    curves = plot_log().Run("lg").curves
    check_equal((curves["clock"], curves["memory"]), (([1, 3, 5], [1910, 1920, 1930]), ([1, 3, 5], [30] * 3)),
                "curves to plot")

    result, told, _ = with_nvml("nvml", "init gpu cool", {"-x": 6, "-lg": 2, "--log-every": 3})
    check_equal(told[2], {"gpu_mhz": 1910, "gpu_celsius": 63, "gpu_gib": 30, "gpu_limits": ""},
                "what it does not tell is left out")
    check_equal(GPU_WORDS.findall(result.out), ["1910 MHz 63 C 30.0 GiB", "1930 MHz 63 C 30.0 GiB"],
                "a line has the last one before it")
    _, told, _ = with_nvml("nvml_old", "init gpu watts", {"-x": 1, "-lg": 1})
    check_equal(told, {1: sample(1)}, "of an older driver")
    for what, folder, can, flags, wanted in (
            ("no library", ".", "", {"-lg": 1}, []), ("not asked for", "nvml", "init gpu", {}, []),
            ("it cannot start", "nvml", "", {"-lg": 1}, ["init"]),
            ("another GPU", "nvml", "init", {"-lg": 1}, ["init", "cpu", "end"])):
        result, told, asked = with_nvml(folder, can, {"-x": 2, **flags})
        check_equal((told, asked, result.err), ({1: {}, 2: {}}, wanted, ""), what)
        check_equal(GPU_WORDS.findall(result.out), ["", ""], what)


# ---- TensorBoard ----

# As much of it as the script uses: each event becomes a line.
BOARD_STUB = {
    "compat/proto/event_pb2.py": "Event = dict\n",
    "compat/proto/summary_pb2.py": "class Summary(dict): Value = dict\n",
    "summary/writer/event_file_writer.py": """
import json, os
class EventFileWriter:
    count = 0
    def __init__(self, folder):
        self.f = open(f"{folder}/events.out.tfevents.{os.getpid()}.{EventFileWriter.count}", "w")
        EventFileWriter.count += 1
    def add_event(self, event): self.f.write(json.dumps(event) + "\\n")
    def flush(self): self.f.flush()
    def close(self): self.f.close()
"""}


def events(folder):
    """(the one event file, [(step, {tag: value}, time)])"""
    files = glob.glob(folder + "/tensorboard/events.out.tfevents.*")
    if len(files) != 1:
        return files, []
    try:
        with open(files[0], encoding="ascii") as f:
            all_events = [json.loads(line) for line in f if line.endswith("\n")]
    except FileNotFoundError:                       # it is just written anew
        return files[0], []
    return files[0], [(event["step"], {v["tag"]: v["simple_value"] for v in event["summary"]["value"]},
                       event["wall_time"]) for event in all_events]


def test_tensorboard():
    """Every number of metrics.jsonl, at the terminal's steps; once, also the second time; or a hint."""
    for path, text in BOARD_STUB.items():
        for folder in ("", "/compat", "/compat/proto", "/summary", "/summary/writer"):
            write(f"stub/tensorboard{folder}/__init__.py", "")
        write("stub/tensorboard/" + path, text)
    write("missing/tensorboard.py", "raise ImportError\n")
    made_run("board")
    for _ in range(2):
        code, out, err = script(BOARD, "board", PYTHONPATH="stub")
        check((code, out) == (0, "wrote board/tensorboard: 23 records\n"), f"{code}, {out}{err}")
        _, got = events("board")
        check_equal(len(got), 23, "events")
        check_equal([(step, v["loss/train"]) for step, v, _ in got if "loss/train" in v],
                    [(k + 1, 10 / (k + 1)) for k in range(20)], "training losses")
        check_equal([(step, v["loss/validation"]) for step, v, _ in got if "loss/validation" in v],
                    [(k, 11 / (k + 1)) for k in (0, 10, 20)], "validation losses")
        check_equal(sorted({tag for _, v, _ in got for tag in v}),
                    ["loss/train", "loss/validation", "speed/ms", "speed/tokens_per_s", "train/lr",
                     "train/norm", "train/tokens"], "tags")
        times = [at for _, _, at in got]
        check_close([times[-1] - times[0], times[-1]], [0.04, os.stat("board/metrics.jsonl").st_mtime], 1e-3,
                    "times")
    code, _, err = script(BOARD, "nowhere", PYTHONPATH="stub")
    check(code == 1 and err.startswith("error: there is no nowhere/metrics.jsonl"), err)
    shutil.copytree(os.path.dirname(BOARD), "tree/dev/data", ignore=lambda _, names: [
        name for name in names if not name.endswith("_log.py")])
    shutil.copy(os.path.join(ROOT, "dev/venv_python.py"), "tree/dev")
    code, _, err = script("tree/dev/data/tensorboard_log.py", "board", PYTHONPATH="missing")
    check(code == 1 and "scripts/setup.sh tensorboard" in err and "Trace" not in err, err)


def test_tensorboard_follow():
    """New lines come as they are written; a run that went back to a checkpoint is written anew."""
    made_run("live", 10)
    with open("live/metrics.jsonl", encoding="ascii") as f:
        lines = f.readlines()
    write("live/metrics.jsonl", "".join(lines[:5]))
    p = subprocess.Popen([sys.executable, BOARD, "live", "--follow"], stdout=subprocess.PIPE,
                         env={**os.environ, "PYTHONPATH": "stub"})

    def comes(steps, what):
        end, there = time.monotonic() + LIMIT_S, None
        while there != steps and p.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
            there = [step for step, _, _ in events("live")[1]]
        check_equal(there, steps, what)

    comes([0, 1, 2, 3, 4], "what was there")
    with open("live/metrics.jsonl", "a", encoding="ascii") as f:
        f.write(lines[5] + lines[6][:7])
    comes([0, 1, 2, 3, 4, 5], "a new line, and half a one")
    write("live/metrics.jsonl", "".join(lines[:3]) + '{"step": 3, "loss": 7}\n')
    comes([0, 1, 2, 3], "after the run went back")
    p.send_signal(signal.SIGINT)
    check_equal(p.wait(LIMIT_S), 0, "Ctrl-C")
    p.stdout.close()


def test_tensorboard_itself():
    """The real library, where it is installed, writes what TensorBoard reads."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        skip("tensorboard is not installed", 3)
        return
    made_run("itself")
    check_equal(script(BOARD, "itself")[0], 0, "exit code")
    seen = EventAccumulator("itself/tensorboard")
    seen.Reload()
    check_close([event.value for event in seen.Scalars("loss/train")], [10 / (k + 1) for k in range(20)],
                1e-6, "losses")


if __name__ == "__main__":
    sys.exit(main(__doc__, globals()))
