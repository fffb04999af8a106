#!/usr/bin/env python3
"""Draws the losses in main.log: loss.png beside it.

    python3 dev/data/plot_log.py runs/mine
    python3 dev/data/plot_log.py runs/a runs/b -o both.png --line 1.93 "bigram baseline"
"""
import argparse
import os
import re
import sys

TRAIN = re.compile(r"^s:(\d+) trl:(\S+) lr:(\S+) norm:(\S+)$")
VAL = re.compile(r"^s:(\d+) tel:(\S+)$")
EVAL = re.compile(r"^s:(\d+) eval:(\S+)$")


def read_log(path):
    """{"train": ([steps], [losses]), "val": ...}; any other line is an error: nothing is skipped silently."""
    curves = {"train": ([], []), "val": ([], [])}
    with open(path, encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            train, val = TRAIN.match(line), VAL.match(line)
            if train or val:
                steps, losses = curves["train" if train else "val"]
                steps.append(int((train or val).group(1)))
                losses.append(float((train or val).group(2)))
            elif not EVAL.match(line):
                sys.exit(f"error: {path}:{number} is no line of a main.log: {line.rstrip()[:60]!r}")
    if not curves["train"][0] and not curves["val"][0]:
        sys.exit(f"error: {path} has no losses")
    return curves


def smooth(values, weight):
    """Exponential average without a bias towards its start; a NaN leaves a gap and does not spread."""
    out, mean, mass = [], 0.0, 0.0
    for x in values:
        if x == x and abs(x) != float("inf"):
            mean, mass = mean * weight + x * (1 - weight), mass * weight + (1 - weight)
            out.append(mean / mass)
        else:
            out.append(float("nan"))
    return out


def take_the_venv():
    """Starts again with .venv's Python, if there is one and this is another: setup.sh installs into it."""
    root = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
    python = os.path.join(root, ".venv", "bin", "python")
    if os.access(python, os.X_OK) and os.path.realpath(sys.prefix) != os.path.realpath(root + "/.venv"):
        os.execv(python, [python] + sys.argv)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("runs", nargs="+", help="run folders, or main.log files")
    parser.add_argument("-o", "--output", help="picture to write (default: loss.png beside the first log)")
    parser.add_argument("--line", nargs=2, action="append", default=[], metavar=("LOSS", "NAME"),
                        help="a level to compare with")
    args = parser.parse_args()
    logs = [os.path.join(run, "main.log") if os.path.isdir(run) else run for run in args.runs]
    curves = [read_log(log) for log in logs]            # before the slow import: a wrong path is told at once
    output = args.output or os.path.join(os.path.dirname(logs[0]), "loss.png")
    try:
        import matplotlib
    except ImportError:
        take_the_venv()
        sys.exit("error: no plot without matplotlib\nhint: scripts/setup.sh installs it into .venv")
    matplotlib.use("Agg")                               # no screen needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), dpi=120)
    for index, (log, curve) in enumerate(zip(logs, curves)):
        color = f"C{index}"
        name = (os.path.basename(os.path.dirname(os.path.abspath(log))) + " ") if len(logs) > 1 else ""
        steps, losses = curve["train"]
        if steps:
            axes.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8)
            axes.plot(steps, smooth(losses, 0.95), color=color, linewidth=1.5, label=name + "training loss")
        steps, losses = curve["val"]
        if steps:
            axes.plot(steps, losses, color="black" if len(logs) == 1 else color, marker="o", markersize=4,
                      linewidth=1.2, linestyle="--", label=f"{name}validation loss, last {losses[-1]:.3f}")
    for level, name in args.line:
        axes.axhline(float(level), color="gray", linestyle=":", label=f"{name} {float(level):.3f}")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(output)
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
