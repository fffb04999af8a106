#!/usr/bin/env python3
"""Draws runs into one picture: loss, HellaSwag, learning rate, gradient norm, tokens/s, and what -lg noted of
the GPU.

    make plot RUN=runs/mine                                         # loss.png in the run's folder
    make plot RUN=runs/a RUN2=runs/b PNG=both.png
    python3 dev/data/plot_log.py runs/a runs/b -o both.png --gpt2 --line 1.93 "bigram baseline"
    python3 dev/data/plot_log.py runs/a runs/b -o race.png --seconds --loss     # over time, the loss alone

Reads main.log, of this program or of llm.c, and metrics.jsonl beside it for the speed; what a run has not
measured is not drawn. A run that is still going on may be drawn, too. --gpt2 draws in what OpenAI's 124M
model reaches; of a run on FineWeb that is done unasked.
"""
import argparse
import json
import math
import os
import re
import sys

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from venv_python import take_the_venv               # noqa: E402

# the forms of a line, as (curve, its value's group); llm.c's older logs have no lr and norm
FORMS = ((re.compile(r"s:(\d+) trl:(\S+)(?: lr:(\S+))?(?: norm:(\S+))?\s*"), ("train", "lr", "norm")),
         (re.compile(r"s:(\d+) tel:(\S+)\s*"), ("val",)),
         (re.compile(r"s:(\d+) eval:(\S+)\s*"), ("eval",)))
# curve: title, scale of the axis
PANELS = {"loss": ("loss (nats per token)", "linear"), "eval": ("questions, normalised accuracy", "linear"),
          "lr": ("learning rate", "linear"), "norm": ("gradient norm", "log"),
          "speed": ("tokens/s", "linear"), "clock": ("GPU clock (MHz)", "linear"),
          "power": ("GPU power (W)", "linear"), "temperature": ("GPU temperature (C)", "linear"),
          "memory": ("GPU memory in use (GiB)", "linear")}
# key in metrics.jsonl: the curve, where main.log has none of it
METRICS = {"tokens_per_s": "speed", "gpu_mhz": "clock", "gpu_watts": "power", "gpu_celsius": "temperature",
           "gpu_gib": "memory"}
NOISY = ("train", "norm")           # a smooth curve is drawn over these
# OpenAI's model of 124M parameters: on FineWeb's validation tokens, and on HellaSwag's
GPT2_LOSS, GPT2_HELLASWAG = 3.425, 0.294


class Run:
    """name; curves: {"train" "val", or one of PANELS: ([steps], [values])}; settings of run.json."""

    def __init__(self, path):
        self.log = os.path.join(path, "main.log") if os.path.isdir(path) else path
        self.folder = os.path.dirname(os.path.abspath(self.log))
        self.name = os.path.basename(self.folder).replace("$", r"\$")      # else it would begin a formula
        beside = os.path.dirname(self.log)
        self.curves = read_log(self.log)
        for record in read_metrics(os.path.join(beside, "metrics.jsonl")):
            # main.log's numbers, as for the other curves: metrics.jsonl counts this step, too
            for key in METRICS.keys() & record.keys():
                add(self.curves, METRICS[key], record["step"] - 1, number(record[key]))
        self.settings = read_settings(os.path.join(beside, "run.json"))

    def is_on_fineweb(self):
        """Its losses are in nats per token of GPT-2's, on the text of which GPT-2's is known. FineWeb-Edu is
        another text."""
        data = str(self.settings.get("val-data", "")).lower()
        other_tokens = re.search(r"\bV(?!50257\b)\d+", str(self.settings.get("model", "")))
        return "fineweb" in data and "edu" not in data and not other_tokens

    def asks_hellaswag(self):
        """As llm.c always does, which has no run.json."""
        return "hellaswag" in str(self.settings.get("eval-data", "hellaswag")).lower()


def fail(text, hint=""):
    sys.exit(f"error: {text}" + (f"\nhint: {hint}" if hint else ""))


def number(x):
    return math.nan if x is None else float(x)      # JSON has no other word for what is not finite


def add(curves, name, step, value):
    steps, values = curves.setdefault(name, ([], []))
    steps.append(step)
    values.append(value)


def whole_lines(path):
    """(number, line): the last line is left out if it is still being written."""
    try:
        with open(path, encoding="utf-8") as f:
            for at, line in enumerate(f, 1):
                if line.endswith("\n"):
                    yield at, line
    except (OSError, UnicodeDecodeError) as e:
        fail(f"cannot read {path}: {e.strerror if isinstance(e, OSError) else 'it is not text'}",
             "give the folder that -o named, or a main.log")


def read_log(path):
    """Curves of a main.log; a line of another form is an error: nothing is skipped silently."""
    curves = {}
    for at, line in whole_lines(path):
        for form, names in FORMS:
            match = form.fullmatch(line)
            if match:
                break
        else:
            fail(f"{path}:{at} is no line of a main.log: {line.rstrip()[:60]!r}")
        try:
            for name, value in zip(names, match.groups()[1:]):
                if value is not None:
                    add(curves, name, int(match[1]), float(value))
        except ValueError:
            fail(f"{path}:{at} is no line of a main.log: {line.rstrip()[:60]!r}")
    if "train" not in curves and "val" not in curves:
        fail(f"{path} has no losses")
    return curves


def read_metrics(path):
    """Its records; none if there is no such file, as in llm.c's runs. Abandoned steps are left out:
    the run went back, and they come once more."""
    records = []
    for at, line in whole_lines(path) if os.path.exists(path) else ():
        try:
            records.append(json.loads(line))
            records[-1]["step"] += 0
        except (ValueError, KeyError, TypeError):
            fail(f"{path}:{at} is no line of a metrics.jsonl: {line.rstrip()[:60]!r}")
    return [record for record in records if "abandoned" not in record]


def read_settings(path):
    try:
        with open(path, encoding="utf-8") as f:
            return json.load(f)["settings"]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError):
        fail(f"{path} is no run.json")


def by_seconds(run):
    """The run's steps become the time that they had taken: s:STEP stands behind so many of them."""
    after, now = {0: 0.0}, 0.0
    for record in read_metrics(os.path.join(os.path.dirname(run.log), "metrics.jsonl")):
        if "ms" in record:
            now += number(record["ms"]) / 1e3
            after[record["step"]] = now
    for name, (steps, values) in run.curves.items():
        if not after.keys() >= set(steps):
            fail(f"{run.log} has no times for all of its steps", "metrics.jsonl beside it has those of a run")
        run.curves[name] = [after[step] for step in steps], values


def smooth(values):
    """Means over about a fiftieth of the curve around each point, fewer near its ends, so that a falling
    curve is not shifted. A NaN leaves a gap and does not spread."""
    total, count = [0.0], [0]
    for x in values:
        total.append(total[-1] + (x if math.isfinite(x) else 0.0))
        count.append(count[-1] + math.isfinite(x))
    out = []
    for i, x in enumerate(values):
        half = min(i, len(values) - 1 - i, len(values) // 100)
        begin, end = i - half, i + half + 1
        mean = (total[end] - total[begin]) / max(1, count[end] - count[begin])
        out.append(mean if math.isfinite(x) else math.nan)
    return out


def levels(runs, curve, gpt2, lines):
    """[(value, name)] to compare a panel's curves with."""
    known = gpt2 or any(run.is_on_fineweb() for run in runs)
    if curve == "loss":
        return lines + ([(GPT2_LOSS, "GPT-2 124M on FineWeb")] if known else [])
    asked = any("eval" in run.curves and run.asks_hellaswag() for run in runs)
    return [(GPT2_HELLASWAG, "GPT-2 124M on HellaSwag")] if curve == "eval" and known and asked else []


def draw_panel(axes, name, runs, lines):
    title, scale = PANELS[name]
    for index, run in enumerate(runs):
        color, who = f"C{index}", run.name + " " if len(runs) > 1 else ""
        for curve in ("train", "val") if name == "loss" else (name,):
            if curve not in run.curves:
                continue
            steps, values = run.curves[curve]
            last = f"last {values[-1]:.3f}"
            if curve in ("val", "eval"):
                axes.plot(steps, values, marker="o", markersize=4, linewidth=1.2, linestyle="--",
                          color="black" if len(runs) == 1 else color,
                          label=who + ("validation loss, " if curve == "val" else "") + last)
                continue
            if curve in NOISY:
                axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
                values = smooth(values)
            axes.plot(steps, values, color=color, linewidth=1.5 if curve in NOISY else 1.0,
                      label=who + "training loss" if curve == "train" else None)
    for level, label in lines:
        axes.axhline(level, color="gray", linestyle=":", label=f"{label} {level:.3f}")
    axes.set_title(title, fontsize="medium")
    axes.set_yscale(scale)
    axes.grid(alpha=0.3)
    if name in METRICS.values():
        axes.set_ylim(bottom=0)
    if name in ("loss", "eval"):
        axes.legend(fontsize="small")


def draw(runs, gpt2=False, lines=(), across="step", loss_alone=False):
    """A figure: the loss on top, the others that any run has below."""
    from matplotlib.figure import Figure                # which needs no display

    small = [name for name in PANELS if name != "loss" and any(name in run.curves for run in runs)]
    small = [] if loss_alone else small
    rows = (len(small) + 1) // 2
    size = (7, 4) if loss_alone else (11, 5 + 2.6 * rows)
    figure = Figure(figsize=size, dpi=100 if loss_alone else 110, layout="constrained")
    grid = figure.add_gridspec(1 + rows, 2, height_ratios=[2] + [1] * rows)
    places = [grid[0, :]] + [grid[1 + i // 2, i % 2] for i in range(len(small))]
    for name, place in zip(["loss"] + small, places):
        axes = figure.add_subplot(place)
        draw_panel(axes, name, runs, levels(runs, name, gpt2, list(lines)))
        axes.set_xlabel(across)
    return figure


def tell_apart(runs):
    """Runs whose folders have one name take the folder above into theirs."""
    for run in [run for run in runs if [r.name for r in runs].count(run.name) > 1]:
        run.name = os.path.join(os.path.basename(os.path.dirname(run.folder)), run.name)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("runs", nargs="+", help="run folders, or main.log files")
    parser.add_argument("-o", "--output", help="picture to write (default: loss.png beside the first log)")
    parser.add_argument("--gpt2", action="store_true", help="draw in what OpenAI's 124M model reaches")
    parser.add_argument("--line", nargs=2, action="append", default=[], metavar=("LOSS", "NAME"),
                        help="a loss to compare with")
    parser.add_argument("--seconds", action="store_true", help="over the seconds of training, not its steps")
    parser.add_argument("--loss", action="store_true", help="a small picture, of the loss alone")
    args = parser.parse_args()
    try:
        lines = [(float(level), name) for level, name in args.line]
    except ValueError:
        fail(f"--line wants a number and a name, not {args.line[-1]}")
    runs = [Run(path) for path in args.runs]            # before the slow import: a wrong path is told at once
    tell_apart(runs)
    if args.seconds:
        for run in runs:
            by_seconds(run)
    output = args.output or os.path.join(os.path.dirname(runs[0].log), "loss.png")
    try:
        figure = draw(runs, args.gpt2, lines, "seconds of training" if args.seconds else "step", args.loss)
    except ImportError:
        take_the_venv()
        fail("no plot without matplotlib", "scripts/setup.sh installs it into .venv")
    try:
        figure.savefig(output)
    except (OSError, ValueError) as e:                  # ValueError: an ending that it does not know
        fail(f"cannot write {output}: {e.strerror if isinstance(e, OSError) else e}")
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
