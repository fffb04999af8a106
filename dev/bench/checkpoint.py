#!/usr/bin/env python3
"""What checkpoints cost: the time on the wall from one to the next, beside that of as many steps by the
program's own clock, which stands still between steps; how long one takes to reach the disk, and what the disk
can do.

    python3 dev/bench/checkpoint.py build/check/train_gpt2.BF16                 # d12 and d48 on a GPU
    python3 dev/bench/checkpoint.py ./train_gpt2cpu --flags '-e L4,NH4,C64,T64,V50257 -b 2 -x 36' --every 9

A run is killed once its steps are done and their checkpoints written: it saves nothing at its end. Two
checkpoints must fit on the disk that --folder is on (1558M: 50 GB). Standard library only.
"""
import argparse
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time

# flags, steps between checkpoints. At -z 524288 one step of d48 takes ten seconds: few will do.
RUNS = [("-e d12 -b 64 -x 150", 50), ("-e d48 -b 16 -z 16384 -x 150", 50),
        ("-e d48 -b 16 -z 524288 -x 6", 3)]


def disk_speed(folder, gib=4):
    """GB/s of writing a file in large pieces, until it is on the disk."""
    path, piece = os.path.join(folder, "speed"), os.urandom(1 << 20) * 64
    start = time.monotonic()
    try:
        with open(path, "wb") as f:
            for _ in range(gib * 16):
                f.write(piece)
            f.flush()
            os.fsync(f.fileno())
        seconds = time.monotonic() - start
    finally:                                # of a full disk, too
        os.unlink(path)
    return gib * 1.073741824 / seconds


def measure(program, flags, every, folder):
    """(ms of the steps, ms from each checkpoint to the next, what was said of them, seconds to the first
    step). Where a checkpoint is due the program waits for the step before it, so its line is its end."""
    shutil.rmtree(folder, ignore_errors=True)
    at = flags.index("-x")
    steps = int(flags[at + 1])
    ms, due, saved = [], [], []
    command = [program, *flags[:at], *flags[at + 2:], "-n", str(every), "-nk", "1", "-x", str(steps + 10**6),
               "-k", "constant", "-v", "0", "-s", "0", "-o", folder]
    started = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            step = re.match(r"step (\d+)/.* \| (\S+) ms \|", line)
            if step and int(step[1]) <= steps:
                ms.append(float(step[2]))
                if len(ms) == 1:
                    first = time.monotonic() - started
                if len(ms) % every == 0:
                    due.append(time.monotonic())
            if line.startswith("saved "):
                saved.append(line.split(": ")[-1].strip())
            if len(ms) == steps and len(saved) >= (steps - 1) // every:
                process.kill()
                break
        else:
            sys.exit(f"{program} ended by itself")
    shutil.rmtree(folder)
    return ms, [1e3 * (b - a) for a, b in zip(due, due[1:])], saved, first


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--flags", help="of one run, instead of those above")
    parser.add_argument("--every", type=int, default=50, help="its steps between checkpoints")
    parser.add_argument("--folder", default="build/bench.checkpoint")
    args = parser.parse_args()
    os.makedirs(args.folder, exist_ok=True)
    print(f"the disk writes {disk_speed(args.folder):.2f} GB/s")
    for flags, every in [(args.flags, args.every)] if args.flags else RUNS:
        ms, apart, saved, first = measure(args.program, shlex.split(flags), every,
                                          os.path.join(args.folder, "run"))
        step = statistics.median(ms)
        print(f"{flags}: {step:.1f} ms a step, the first after {first:.1f} s; {every} steps and a "
              "checkpoint:")
        for wall in apart:
            print(f"    {wall:.0f} ms, {wall - every * step:.0f} more than the steps: "
                  f"{100 * (wall - every * step) / (50 * step):.2f} % of 50 steps")
        for text in saved:
            print(f"    saved {text}", flush=True)


if __name__ == "__main__":
    main()
