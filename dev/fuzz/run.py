#!/usr/bin/env python3
"""Runs a fuzz target of build/fuzz: each of its seeds alone, then, if asked to, libFuzzer on them.

    python3 dev/fuzz/run.py shard                   # its seeds, as `make test` does
    python3 dev/fuzz/run.py shard --seconds 600     # and what libFuzzer makes of them in ten minutes
    python3 dev/fuzz/run.py --list

Inputs that reach something new stay in build/fuzz-corpus/NAME for the next time. One that crashes is kept in
build/fuzz-NAME-*: `build/fuzz NAME FILE` runs it again; when that is mended, it becomes a seed. The last line
is `N passed, N failed, N skipped`: a test for each seed, and one for libFuzzer.
"""
import argparse
import os
import re
import subprocess
import sys

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
SEEDS = "dev/fuzz/seeds"
HANG_S = 1200               # over the time asked for; an input may take a minute, see fuzz.cpp


def call(words, seconds=0):
    """(exit code, all that it said); 124: it hangs"""
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
                              timeout=seconds + HANG_S)
    except subprocess.TimeoutExpired:
        return 124, "it hangs"
    return done.returncode, done.stdout


def report(good, what, said):
    print(f"{'ok  ' if good else 'FAIL'} {what}")
    if not good:
        print("\n".join("    " + line for line in said.splitlines()[-60:]))
    sys.stdout.flush()
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("target", nargs="?")
    parser.add_argument("--seconds", type=int, default=0, help="how long libFuzzer changes them")
    parser.add_argument("--list", action="store_true", help="the targets")
    args = parser.parse_args()
    os.chdir(ROOT)
    targets = sorted(os.listdir(SEEDS))
    if args.list:
        print("\n".join(targets))
        return 0
    if args.target not in targets:
        sys.exit(f"error: no fuzz target '{args.target}', choose one of {', '.join(targets)}")
    seeds, corpus = f"{SEEDS}/{args.target}", f"build/fuzz-corpus/{args.target}"
    fuzz = ["build/fuzz", args.target, f"-artifact_prefix=build/fuzz-{args.target}-"]
    results = []
    for name in sorted(os.listdir(seeds)):
        code, said = call(fuzz + [f"{seeds}/{name}"])
        good = code == 0 and "Executed " in said
        results.append(report(good, f"{seeds}/{name}: exit code {code}", said))
    if args.seconds:
        os.makedirs(corpus, exist_ok=True)
        words = [f"-max_total_time={args.seconds}", "-print_final_stats=1", corpus, seeds]
        code, said = call(fuzz + words, args.seconds)
        runs = re.search(r"stat::number_of_executed_units: (\d+)", said)
        count = int(runs[1]) if runs else 0
        good = code == 0 and count > len(results)
        results.append(report(good, f"fuzzing: {count} inputs, exit code {code}", said))
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed, 0 skipped")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
