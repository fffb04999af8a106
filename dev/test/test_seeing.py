#!/usr/bin/env python3
"""What one sees of a run: lines and progress on the terminal, plots, TensorBoard's event files.

    dev/test/test_seeing.py ./train_gpt2cpu [-k WORD] [--keep]

A terminal is a pseudo-terminal here, and a few lines of our own work out what its screen shows in the end.
"""
import fcntl
import json
import pty
import select
import signal
import termios

from trainer import *                                           # and what it imports

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


def on_terminal(flags, columns=200, term="xterm", until=None, number=signal.SIGINT):
    """(exit code, all bytes that came) of a run whose stdout and stderr are a terminal. until: bytes after
    which it gets a signal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 25, columns, 0, 0))
    p = subprocess.Popen(Program.command(flags), stdin=theirs, stdout=theirs, stderr=theirs,
                         env=Program.environment(1, TERM=term))
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
            p.send_signal(number)
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
        check_close([float(loss)], [sum(r["loss"] for r in records[begin:end]) / count], 1e-6, f"loss, {step}")
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
    flags = {"-x": 12, "-v": 5, "-m": 1, "-s": 6, "-g": 12, "-n": 4, "--log-every": 4, **QUICK}
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
                             number=signal.SIGTERM)
    check_equal((code, [line for line in screen(text) if BAR.search(line)]), (0, []), "two ranks")


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


if __name__ == "__main__":
    sys.exit(main(__doc__, globals()))
