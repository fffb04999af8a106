#!/usr/bin/env python3
"""Draws runs into one picture: loss, HellaSwag, learning rate, gradient norm, tokens/s, and what -lg noted of
the GPU.

    make plot RUN=runs/mine                                         # loss.png in the run's folder
    make plot RUNS="runs/a runs/b" PNG=both.png
    python3 dev/data/plot_log.py runs/a runs/b -o both.png --line 1.93 "bigram baseline"
    python3 dev/data/plot_log.py runs/a runs/b -o race.png --seconds --loss     # over time, the loss alone

Reads main.log, of this program or of llm.c, and metrics.jsonl beside it for tokens and speed; what a run has
not measured is not drawn. A run that is still going on may be drawn, too. Runs of different batches are drawn
over tokens, others over steps. A run on FineWeb gets the levels of OpenAI's 124M model.
"""
import argparse
import itertools
import json
import math
import os
import re
import sys
import textwrap

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from outputs import guard_terminals, whole_file     # noqa: E402
from venv_python import take_the_venv               # noqa: E402

# a line's curves, and its form, behind which more words may stand; llm.c's older logs have no lr and norm
FORMS = [(curves, re.compile(r"s:(\d+) " + form + r"(?: .*)?\s*")) for curves, form in (
    (("train", "lr", "norm"), r"trl:(\S+)(?: lr:(\S+))?(?: norm:(\S+))?"),
    (("val",), r"tel:(\S+)"), (("eval",), r"eval:(\S+)"))]
# panel: its title, and how its last values are written
PANELS = {"loss": ("loss (nats per token)", "{:.3f}"), "eval": ("questions, normalised accuracy", "{:.3f}"),
          "lr": ("learning rate", ""), "norm": ("gradient norm", "{:.2f}"), "speed": ("tokens/s", "{:,.0f}"),
          "clock": ("GPU clock (MHz)", "{:.0f}"), "power": ("GPU power (W)", "{:.0f}"),
          "temperature": ("GPU temperature (C)", "{:.0f}"), "memory": ("GPU memory in use (GiB)", "{:.1f}")}
# key in metrics.jsonl: the curve, where main.log has none of it
METRICS = {"tokens_per_s": "speed", "gpu_mhz": "clock", "gpu_watts": "power", "gpu_celsius": "temperature",
           "gpu_gib": "memory"}
NOISY = ("train", "norm", "speed")  # a smooth curve is drawn over these
FEW = 6         # fewer validations than this are points without a line: between them nothing is known
# Okabe's and Ito's: colour-blind people can tell them apart
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLE = {"font.size": 11, "axes.titlesize": 11, "axes.titlelocation": "left", "axes.spines.top": False,
         "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "axes.xmargin": 0.01,
         "legend.frameon": False, "legend.fontsize": 9.5, "lines.linewidth": 1.5, "lines.markersize": 4,
         "figure.titlesize": 12, "figure.titleweight": "bold", "figure.labelsize": 11}
# OpenAI's model of 124M parameters: on FineWeb's validation tokens, and on HellaSwag's
GPT2 = {"loss": (3.425, "GPT-2 124M on FineWeb"), "eval": (0.294, "GPT-2 124M on HellaSwag")}


class Run:
    """name; curves: {"train" "val", or one of PANELS, or "val NAME", a source of a mixture: ([steps],
    [values])}; steps; batch: tokens a step, 0 if unknown; seconds: {steps done: the time they took}; settings
    of run.json."""

    def __init__(self, path):
        self.log = os.path.join(path, "main.log") if os.path.isdir(path) else path
        self.folder = os.path.dirname(os.path.abspath(self.log))
        self.name = os.path.basename(self.folder).replace("$", r"\$")      # else it would begin a formula
        self.curves = read_log(self.log)
        self.steps = max(steps[-1] + (name == "train") for name, (steps, _) in self.curves.items())
        self.batch, self.seconds, now = 0, {0: 0.0}, 0.0
        for record in read_metrics(os.path.join(self.folder, "metrics.jsonl")):
            for source, loss in record.get("val_losses", {}).items():
                add(self.curves, "val " + source, record["step"], number(loss))
            # main.log's numbers, as for the other curves: metrics.jsonl counts this step, too
            for key in METRICS.keys() & record.keys():
                add(self.curves, METRICS[key], record["step"] - 1, number(record[key]))
            if "ms" in record:
                now += number(record["ms"]) / 1e3
                self.seconds[record["step"]] = now
                self.batch = record.get("tokens", 0) // record["step"]
        self.settings = read_settings(os.path.join(self.folder, "run.json"))

    def go_over(self, unit):
        """Its curves' steps become tokens or seconds: those of all steps before."""
        for name, (steps, values) in self.curves.items():
            at = [self.seconds.get(step) if unit == "seconds" else step * self.batch for step in steps]
            if None in at:
                fail(f"{self.log} has no times for all of its steps", "metrics.jsonl beside it has a run's")
            self.curves[name] = at, values

    def facts(self):
        """Its model, how much it was trained, and its last values."""
        model = os.path.basename(str(self.settings.get("model", "")).rstrip("/"))
        trained = f"{short(self.steps * self.batch)} tokens" if self.batch else f"{self.steps:,} steps"
        words = {"val": "validation loss"} if self.validated("val") else {"train": "training loss"}
        words.update({"eval": "accuracy"} if "eval" in self.curves else {})
        return [model] * bool(model) + [trained] + [
            f"{word} {self.curves[name][1][-1]:.3f}" for name, word in words.items()]

    def validated(self, name):
        """Also after the beginning, or nothing else is known."""
        return name in self.curves and (self.curves[name][0][-1] > 0 or "train" not in self.curves)

    def is_on_fineweb(self):
        """Its losses are in nats per token of GPT-2's, on the text of which GPT-2's is known. FineWeb-Edu is
        another text."""
        data = str(self.settings.get("val-data", "")).lower()
        other_tokens = re.search(r"\bV(?!50257\b)\d+", str(self.settings.get("model", "")))
        return "fineweb" in data and "edu" not in data and not other_tokens and not self.sources()

    def sources(self):
        """Curves of a mixture's sources."""
        return [name for name in self.curves if name.startswith("val ")]

    def asks_hellaswag(self):
        return "eval" in self.curves and "hellaswag" in str(self.settings.get("eval-data", "")).lower()


def fail(text, hint=""):
    sys.exit(f"error: {text}" + (f"\nhint: {hint}" if hint else ""))


def number(x):
    return math.nan if x is None else float(x)      # JSON has no other word for what is not finite


def add(curves, name, step, value):
    steps, values = curves.setdefault(name, ([], []))
    steps.append(step)
    values.append(value)


def whole_lines(path, must_be=True):
    """(number, line): the last line is left out if it is still being written."""
    try:
        with open(path, encoding="utf-8") as f:
            for at, line in enumerate(f, 1):
                if line.endswith("\n"):
                    yield at, line
    except (OSError, UnicodeDecodeError) as e:
        if isinstance(e, FileNotFoundError) and not must_be:
            return
        fail(f"cannot read {path}: {e.strerror if isinstance(e, OSError) else 'it is not text'}",
             "give the folder that -o named, or a main.log")


def read_log(path):
    """Curves of a main.log; a line of another form is an error: nothing is skipped silently."""
    curves = {}
    for at, line in whole_lines(path):
        try:
            [(names, match)] = [(names, m) for names, form in FORMS for m in [form.fullmatch(line)] if m]
            for name, value in zip(names, match.groups()[1:]):
                if value is not None:
                    add(curves, name, int(match[1]), float(value))
        except ValueError:
            fail(f"{path}:{at} is no line of a main.log: {line.rstrip()[:60]!r}")
    if "train" not in curves and "val" not in curves:
        fail(f"{path} has no losses")
    return curves


def read_metrics(path, must_be=False):
    """Its records; none if there is no such file, as in llm.c's runs."""
    records = []
    for at, line in whole_lines(path, must_be):
        try:
            records.append(json.loads(line))
            records[-1]["step"] += 0
        except (ValueError, KeyError, TypeError):
            fail(f"{path}:{at} is no line of a metrics.jsonl: {line.rstrip()[:60]!r}")
    return records


def read_settings(path):
    try:
        with open(path, encoding="utf-8") as f:
            return json.load(f)["settings"]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError):
        fail(f"{path} is no run.json")


def short(x, _=None):
    """1.23M; matplotlib hands a second argument over."""
    letter = next((i for i in (4, 3, 2, 1) if abs(x) >= 0.9995 * 1000**i), 0)
    return f"{float(f'{x / 1000**letter:.3g}'):g}{' KMBT'[letter].strip()}"


def smooth(values):
    """Means over about a fiftieth of the curve around each point, of a short curve over up to 17 points. Near
    its beginning fewer, so that a falling curve is not shifted. A NaN leaves a gap and does not spread."""
    total, count, widest = [0.0], [0], max(len(values) // 100, min(8, len(values) // 20))
    for x in values:
        total.append(total[-1] + (x if math.isfinite(x) else 0.0))
        count.append(count[-1] + math.isfinite(x))
    out = []
    for i, x in enumerate(values):
        half = min(i, widest)
        begin, end = i - half, min(i + half + 1, len(values))
        mean = (total[end] - total[begin]) / max(1, count[end] - count[begin])
        out.append(mean if math.isfinite(x) else math.nan)
    return out


def write_ends(axes, ends, form, gap):
    """The curves' last values, to the right of the axes; one that would cover another stands above it, and
    all below the title."""
    to_axes, (low, high), at, places = axes.transData + axes.transAxes.inverted(), axes.get_ylim(), -1, []
    ends = sorted(end for end in ends if low <= end[0] <= high)
    for value, _ in ends:
        at = max(at + gap, to_axes.transform((0, value))[1])
        places.append(at)
    for above, at, (value, color) in zip(itertools.count(len(ends) - 1, -1), places, ends):
        axes.text(1.01, min(at, 1 - gap * above), form.format(value), color=color, size=10, va="center",
                  transform=axes.transAxes)


def draw_panel(axes, panel, runs, levels):
    (title, form), seen, ends, alone = PANELS[panel], [level for level, _ in levels], {}, len(runs) == 1
    sources = runs[0].sources() if alone else []
    colors = dict(zip(["train", "val", *sources], itertools.cycle(COLORS)))         # of a run alone
    curves = [(run, color, name) for run, color in zip(runs, itertools.cycle(COLORS))
              for name in (("train", "val", *sources) if panel == "loss" else (panel,)) if name in run.curves]
    for run, color, name in curves:
        (at, values), label, kind = run.curves[name], run.label, name.split()[0]
        if name in NOISY:
            axes.plot(at, values, color=color, alpha=0.25, linewidth=0.8)
            seen.append(min(values))
            values = smooth(values)
        elif kind == "val" and at[0] == 0:
            later = values[1:2] or run.curves.get("train", ([], []))[1][-1:]
            if later and values[0] > later[0] + 1:      # else a long chord from before training
                at, values = at[1:], values[1:]
            if not at:
                continue
        seen += values[len(values) // 10:] if name in NOISY else values     # the fall before that is cut off
        if alone:
            color = colors.get(name, color)
            label = name.replace("val", "validation", 1) if kind == "val" else "training, smoothed"
        elif name == "val" and "train" in run.curves:
            label = None
        line = "" if kind == "val" and (len(at) < FEW or not alone) else "--" if kind == "val" else "-"
        axes.plot(at, values, color=color, linestyle=line, label=label,
                  marker="o" if kind in ("val", "eval") and len(at) < 100 else None)
        if kind != "val" or run.validated(name):        # that of before training is no end
            ends[name if alone else run] = values[-1], color
    for level, label in levels:
        axes.axhline(level, color="gray", linestyle=":", label=f"{label} {level:.3f}")
    seen = list(filter(math.isfinite, seen)) or [0]
    if panel == "loss":
        title += ", validation as points" if not alone and any("val" in run.curves for run in runs) else ""
        axes.legend(loc="upper right")
        margin = 0.04 * (max(seen) - min(seen)) or 1
        axes.set_ylim(min(seen) - margin, max(seen) + margin)
    elif levels:
        axes.legend(axes.lines[-1:], [axes.lines[-1].get_label()], loc="lower right")
    elif panel == "norm" and max(seen) > 0:
        axes.set_yscale("log", subs=())
        axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    elif panel in METRICS.values():
        axes.set_ylim(0, 1.15 * max(seen) or 1)
    if panel not in ("loss", "eval"):
        axes.yaxis.set_major_formatter(short)
    axes.set_title(title)
    write_ends(axes, ends.values() if form else (), form, 0.05 if panel == "loss" else 0.1)


def draw(runs, lines=(), seconds=False, loss_alone=False, title=""):
    """A figure: the loss on top, what else any run has below. lines: [(loss, name)] to compare with. title:
    for the runs' names and what they have in common."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure                # which needs no display

    batches = {run.batch for run in runs}
    unit = "seconds" if seconds else "tokens" if len(batches) > 1 and 0 not in batches else "step"
    common = [fact for fact in runs[0].facts() if all(fact in run.facts() for run in runs)]
    for run in runs:
        if unit != "step":
            run.go_over(unit)
        run.label = " · ".join([run.name] + [fact for fact in run.facts() if fact not in (run.name, *common)])
    known = any(run.is_on_fineweb() for run in runs)
    levels = {"loss": list(lines) + [GPT2["loss"]] * known,
              "eval": [GPT2["eval"]] * (known and any(run.asks_hellaswag() for run in runs))}
    small = [name for name in PANELS if any(name in run.curves for run in runs) and not loss_alone]
    count = -(-len(small) // 3)                         # rows of one, two or three, as wide as the loss
    rows = [small[len(small) * i // count:len(small) * (i + 1) // count] for i in range(count)]
    with rc_context(STYLE):
        size = (7, 4) if loss_alone else (11, 4.7 + 2.4 * count)
        figure = Figure(figsize=size, dpi=120, layout="constrained")
        mosaic = [["loss"] * 6] + [[name for name in row for _ in range(6 // len(row))] for row in rows]
        places = figure.subplot_mosaic(mosaic, height_ratios=[2] + [1] * count)
        for panel, axes in places.items():
            draw_panel(axes, panel, runs, levels.get(panel, []))
            axes.set_xlim(places["loss"].get_xlim())
            if unit == "tokens":
                axes.xaxis.set_major_formatter(short)
        names = [", ".join(run.name for run in runs)] if len(runs) == 1 or not common else []
        title = textwrap.fill(title or " · ".join(names + common), 64 if loss_alone else 110)
        figure.suptitle(title, x=0.01, ha="left")
        figure.supxlabel("seconds of training" if seconds else unit)
    return figure


def tell_apart(runs):
    """Runs whose folders have one name take the folder above into theirs."""
    for run in [run for run in runs if [r.name for r in runs].count(run.name) > 1]:
        run.name = os.path.join(os.path.basename(os.path.dirname(run.folder)), run.name)


def main():
    guard_terminals()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("runs", nargs="+", help="run folders, or main.log files")
    parser.add_argument("-o", "--output", help="picture to write (default: loss.png beside the first log)")
    parser.add_argument("--line", nargs=2, action="append", default=[], metavar=("LOSS", "NAME"),
                        help="a loss to compare with")
    parser.add_argument("--seconds", action="store_true", help="over the seconds of training, not its steps")
    parser.add_argument("--loss", action="store_true", help="a small picture, of the loss alone")
    parser.add_argument("--title", default="", help="instead of the runs' names: data, GPU, cost")
    args = parser.parse_args()
    try:
        lines = [(float(level), name) for level, name in args.line]
    except ValueError:
        fail(f"--line wants a number and a name, not {args.line[-1]}")
    runs = [Run(path) for path in args.runs]            # before the slow import: a wrong path is told at once
    tell_apart(runs)
    output = args.output or os.path.join(os.path.dirname(runs[0].log), "loss.png")
    try:
        figure = draw(runs, lines, args.seconds, args.loss, args.title.replace("$", r"\$"))
    except ImportError:
        take_the_venv()
        fail("no plot without matplotlib", "scripts/setup.sh installs it into .venv")
    try:
        with whole_file(output) as f:
            figure.savefig(f, format=os.path.splitext(output)[1][1:] or None)
    except (OSError, ValueError) as e:                  # ValueError: an ending that it does not know
        fail(f"cannot write {output}: {e.strerror if isinstance(e, OSError) else e}")
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
