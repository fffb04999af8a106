#!/usr/bin/env python3
"""Runs a fuzz target of build/fuzz: its seeds, then, if asked to, libFuzzer on them.

    python3 dev/fuzz/run.py shard                   # its seeds, as `make test` does
    python3 dev/fuzz/run.py shard --seconds 600     # and what libFuzzer makes of them in ten minutes
    python3 dev/fuzz/run.py --list

Inputs that reach something new stay in build/fuzz-corpus/NAME for the next time. One that crashes is kept in
build/fuzz-NAME-*: `build/fuzz NAME FILE` runs it again; when that is mended, it becomes a seed. The last line
is `N passed, N failed, N skipped`: a test for each seed, one for their end, and one for libFuzzer.
"""
import argparse
import glob
import os
import re
import subprocess
import sys

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
SEEDS = "dev/fuzz/seeds"
HANG_S = 1200               # over the time asked for; an input may take a minute, see fuzz.cpp


def fuzz(target, words, seconds=0):
    """(exit code, all that it said)"""
    command = ["build/fuzz", target, f"-artifact_prefix=build/fuzz-{target}-", *words]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
                              timeout=seconds + HANG_S)
    except subprocess.TimeoutExpired:
        return "none", "it hangs"
    return done.returncode, done.stdout


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
    seeds = sorted(glob.glob(f"{SEEDS}/{args.target}/*"))
    code, said = fuzz(args.target, seeds)               # one after the other, up to the first that crashes
    results = {seed: f"Executed {seed} in " in said for seed in seeds}
    results[f"{len(seeds)} seeds: exit code {code}"] = code == 0
    if args.seconds:
        corpus = f"build/fuzz-corpus/{args.target}"
        os.makedirs(corpus, exist_ok=True)
        words = [f"-max_total_time={args.seconds}", "-print_final_stats=1", corpus, f"{SEEDS}/{args.target}"]
        code, more = fuzz(args.target, words, args.seconds)
        runs = re.search(r"stat::number_of_executed_units: (\d+)", more)
        count, said = int(runs[1]) if runs else 0, said + more
        results[f"fuzzing: {count} inputs, exit code {code}"] = code == 0 and count > len(seeds)
    for what, good in results.items():
        print("ok  " if good else "FAIL", what)
    good = sum(results.values())
    if good < len(results):
        print("\n".join(said.splitlines()[-60:]))
    print(f"{good} passed, {len(results) - good} failed, 0 skipped")
    return 0 if good == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
