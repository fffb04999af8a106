#!/usr/bin/env python3
"""Which settings end at a lower loss? Short training runs, paired by seed against a base.

    python3 dev/bench/ladder.py dev/bench/optimizers.txt --data dev/data/debian-docs/debian_docs \\
        --results build/optimizers.jsonl --jobs 2   # two runs at a time, on two GPUs
    ... --flags "-e d24 -b 48 -x 300" --seeds 2     # in place of the table's, into other --results
    ... --seeds 0                                   # only prints what is in --results

A table has a setting on each line, NAME: FLAGS. An indented setting is held against the base above it, whose
flags it has, too:

    want: gain 0.005            # or gap 0.01
    all: -e d12 -b 64 -x 600    # flags of every run
    muon: --optimizer muon
        slower: --muon-lr 0.01

Two runs of one seed have the same initial weights and the same data in the same order. A ladder that is
broken off has whole pairs: seed by seed, the bases first. --first 0.01 gives further seeds only to settings
that gained so much with the first. Runs in --results, a line of JSON each, are not repeated. They are known
by their flags: another program, or other data, takes another file.

A row of the result: mean gain over the base in the last validation loss and in the mean of the last 100
training losses, with standard errors; steps and seconds of training until a validation was as low as the
base's last one, over the seeds that got there. `want: gain X` keeps a setting whose validation gain, less two
standard errors, is above X; `want: gap X` one that loses at most X, two standard errors added.
"""
import argparse
import concurrent.futures
import json
import math
import os
import queue
import re
import shlex
import statistics
import subprocess
import sys
import threading
import time
from typing import NamedTuple

FIRST_SEED = 1337


class Setting(NamedTuple):
    name: str
    base: str           # its own name: it is a base
    flags: dict


def as_flags(text):
    """{flag: value}; joined with an earlier text's, `-q 0` takes the place of `-q 0.1`."""
    words = shlex.split(text)
    if len(words) % 2:
        sys.exit(f"flags and values by turns, not '{text}'")
    return dict(zip(words[::2], words[1::2]))


def read_table(text):
    """(want, settings); want: ("gain" or "gap", number)."""
    want, common, base, settings = ("gain", 0.005), {}, None, []
    for line in text.splitlines():
        line = line.split("#")[0].rstrip()
        if not line:
            continue
        name, colon, flags = (part.strip() for part in line.partition(":"))
        indented = line[0] == " "
        if not colon or (indented and not base):
            sys.exit(f"NAME: FLAGS, indented below a base, not '{line}'")
        if name == "want":
            kind, limit = flags.split()
            want = (kind, float(limit))
        elif name == "all":
            common = as_flags(flags)
        elif indented:
            settings.append(Setting(name, base.name, {**base.flags, **as_flags(flags)}))
        else:
            base = Setting(name, name, {**common, **as_flags(flags)})
            settings.append(base)
    return want, settings


class Ladder:
    def __init__(self, args):
        self.args, self.lock, self.failed, self.longest = args, threading.Lock(), 0, 0.0
        self.end = time.monotonic() + 60 * args.minutes
        with open(args.table, encoding="utf-8") as f:
            self.want, self.settings = read_table(f.read())
        self.bases = {setting.name: setting for setting in self.settings if setting.name == setting.base}
        self.runs = {}                          # by their flags in words
        if os.path.exists(args.results):
            with open(args.results, encoding="utf-8") as f:
                for number, line in enumerate(f, 1):
                    try:
                        run = json.loads(line)
                    except ValueError as error:
                        sys.exit(f"{args.results} line {number} is no run ({error}): remove the line")
                    self.runs[run["flags"]] = run

    def words(self, setting, seed):
        flags = {**setting.flags, **as_flags(self.args.flags), "--seed": str(seed), "-s": "0"}
        return shlex.join(word for flag in flags.items() for word in flag)

    def pair(self, setting, seed):
        """The runs of the setting and of its base, which may be itself; None: not made yet."""
        return [self.runs.get(self.words(s, seed)) for s in (setting, self.bases[setting.base])]

    def hopeless(self, setting):
        run, base = self.pair(setting, FIRST_SEED)
        return run and base and run is not base and base["val"] - run["val"] < self.args.first

    def run_all(self):
        gpus = queue.Queue()
        for gpu in range(self.args.jobs):
            gpus.put(str(gpu))
        order = sorted(self.settings, key=lambda setting: setting.name != setting.base)
        turns = [(setting, FIRST_SEED + i) for i in range(self.args.seeds) for setting in order]
        with concurrent.futures.ThreadPoolExecutor(self.args.jobs) as pool:
            list(pool.map(lambda turn: self.run(*turn, gpus), turns))       # raises what a run raises

    def run(self, setting, seed, gpus):
        words, start = self.words(setting, seed), time.monotonic()
        if words in self.runs or self.hopeless(setting) or start + self.longest > self.end:
            return
        gpu = gpus.get()
        data = ["-i", f"{self.args.data}_train*.bin", "-j", f"{self.args.data}_val*.bin"]
        try:
            done = subprocess.run([self.args.program, *shlex.split(words), *data], capture_output=True,
                                  text=True, check=False, env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu})
        finally:
            gpus.put(gpu)
        took = time.monotonic() - start
        with self.lock:
            what = f"{setting.base}, {setting.name}, seed {seed}, {took:.0f} s"
            step = r"^step (\d+)/(\d+) \| loss (\S+) .*\| ([\d.]+) ms \|"
            steps = re.findall(step, done.stdout, re.M)
            whole = steps and steps[-1][0] == steps[-1][1]      # Ctrl-C ends one with exit code 0, too
            losses = re.findall(r"^val loss (\S+) @(\d+)", done.stdout, re.M)
            if done.returncode != 0 or not whole or not losses:
                self.failed += 1
                why = "it validates nothing" if whole else "it was broken off"
                print(f"{what}: failed: {done.stderr.strip()[-300:] or why}", flush=True)
                return
            train = [float(loss) for _, _, loss, _ in steps]
            vals = [(int(at), float(loss)) for loss, at in losses]
            run = {"flags": words, "val": vals[-1][1], "train": statistics.mean(train[-100:]), "vals": vals,
                   "losses": train, "ms": [float(ms) for *_, ms in steps],
                   "skipped": done.stderr.count(": update skipped\n")}
            with open(self.args.results, "a", encoding="utf-8") as f:
                f.write(json.dumps(run) + "\n")
            self.runs[words], self.longest = run, max(self.longest, took)
            skipped = f", {run['skipped']} updates skipped" if run["skipped"] else ""
            print(f"{what}: val {run['val']:.4f}, train {run['train']:.4f}{skipped}", flush=True)

    def table(self):
        yield "| setting | seeds | val loss | gain | in training | steps | seconds | |\n" + 8 * "|---" + "|"
        for setting in self.settings:
            pairs = [self.pair(setting, FIRST_SEED + i) for i in range(100)]
            pairs = [(run, base) for run, base in pairs if run and base]
            if not pairs:
                continue
            val, train = ([base[what] - run[what] for run, base in pairs] for what in ("val", "train"))
            gain = " | ".join(f"{statistics.mean(x):+.4f} ± {standard_error(x):.4f}" for x in (val, train))
            is_base = setting.name == setting.base
            there = [at for at in (reached(run, base["val"]) for run, base in pairs) if at]
            of = f" ({len(there)} of {len(pairs)})" if len(there) < len(pairs) else ""
            steps, seconds = map(statistics.mean, zip(*there)) if there else (math.nan, math.nan)
            yield (f"| {setting.name} | {len(pairs)} | {statistics.mean(run['val'] for run, _ in pairs):.4f} "
                   f"| {'|' if is_base else gain} | {steps:.0f}{of} | {seconds:.1f}{of} "
                   f"| {'base' if is_base else verdict(self.want, val)} |")


def reached(run, loss):
    """(steps, seconds) until a validation loss of at most `loss`; None: there is none."""
    steps = next((step for step, val in run["vals"] if val <= loss), None)
    return None if steps is None else (steps, sum(run["ms"][:steps]) / 1e3)


def standard_error(values):
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def verdict(want, gains):
    """open: more seeds could still decide either way."""
    kind, limit = want
    mean, two = statistics.mean(gains), 2 * standard_error(gains)
    if kind == "gain":
        return "stays" if mean - two > limit else "open" if mean + two > limit else "goes"
    return "stays" if two - mean <= limit else "open" if -two - mean <= limit else "goes"


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("table")
    p.add_argument("--data", required=True, help="PREFIX of PREFIX_train*.bin and PREFIX_val*.bin")
    p.add_argument("--results", required=True, help="file that keeps runs")
    p.add_argument("--program", default="./train_gpt2cu")
    p.add_argument("--flags", default="", help="for every run, in place of the table's")
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--first", type=float, default=-math.inf, help="gain at the first seed that earns others")
    p.add_argument("--jobs", type=int, default=1, help="runs at a time, the first on GPU 0")
    p.add_argument("--minutes", type=float, default=math.inf, help="no run begins that would end later")
    try:
        ladder = Ladder(p.parse_args())
        ladder.run_all()
    except KeyboardInterrupt:
        print("stopped; the same command makes the runs that are missing", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}")
    print("\n".join(ladder.table()))
    sys.exit(1 if ladder.failed else 0)


if __name__ == "__main__":
    main()
