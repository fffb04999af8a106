#!/usr/bin/env python3
"""Runs a fuzz target of build/fuzz: its seeds (seeds.py), then, if asked to, libFuzzer on them.

    python3 dev/fuzz/run.py shard                   # its seeds, as `make test` does
    python3 dev/fuzz/run.py shard --seconds 600     # and what libFuzzer makes of them in ten minutes
    python3 dev/fuzz/run.py --list

Inputs that reach something new stay in build/fuzz-corpus/NAME for the next time. One that crashes is kept in
build/fuzz-NAME-*: `build/fuzz NAME FILE` runs it again; when that is mended, it becomes a seed. The last line
is `N passed, N failed, N skipped`: a test for each seed, one for their end, and one for libFuzzer.
"""
import argparse
import os
import re
import subprocess
import sys

from seeds import SEEDS

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
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


def seed_files(target, folder):
    """Their paths. Each appears whole: another run may be reading them."""
    os.makedirs(folder, exist_ok=True)
    for name, data in SEEDS[target].items():
        part = f"build/fuzz-seed-{os.getpid()}"
        with open(part, "wb") as f:
            f.write(data)
        os.replace(part, f"{folder}/{name}")
    return [f"{folder}/{name}" for name in SEEDS[target]]


def test(target, seconds):
    """({what: is it good?}, all that was said)"""
    folder, corpus = f"build/fuzz-seeds/{target}", f"build/fuzz-corpus/{target}"
    paths = seed_files(target, folder)
    code, said = fuzz(target, paths)                    # one after the other, up to the first that crashes
    results = {path: f"Executed {path} in " in said for path in paths}
    results[f"{len(paths)} seeds: exit code {code}"] = code == 0
    if seconds:
        os.makedirs(corpus, exist_ok=True)
        words = [f"-max_total_time={seconds}", "-print_final_stats=1", corpus, folder]
        code, more = fuzz(target, words, seconds)
        runs = re.search(r"stat::number_of_executed_units: (\d+)", more)
        count, said = int(runs[1]) if runs else 0, said + more
        results[f"fuzzing: {count} inputs, exit code {code}"] = code == 0 and count > len(paths)
    return results, said


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("target", nargs="?")
    parser.add_argument("--seconds", type=int, default=0, help="how long libFuzzer changes them")
    parser.add_argument("--list", action="store_true", help="the targets")
    args = parser.parse_args()
    os.chdir(ROOT)
    if args.list:
        print("\n".join(sorted(SEEDS)))
        return 0
    if args.target not in SEEDS:
        sys.exit(f"error: no fuzz target '{args.target}', choose one of {', '.join(sorted(SEEDS))}")
    results, said = test(args.target, args.seconds)
    for what, good in results.items():
        print("ok  " if good else "FAIL", what)
    good = sum(results.values())
    if good < len(results):
        print("\n".join(said.splitlines()[-60:]))
    print(f"{good} passed, {len(results) - good} failed, 0 skipped")
    return 0 if good == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
