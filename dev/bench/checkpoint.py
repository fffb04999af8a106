#!/usr/bin/env python3
"""What checkpoints cost: a run with one every so many steps, timed from step to step, those without a
checkpoint beside them; how long one takes to reach the disk, and what the disk can do.

    python3 dev/bench/checkpoint.py build/check/train_gpt2.BF16                 # d12 and d48 on a GPU
    python3 dev/bench/checkpoint.py ./train_gpt2cpu --flags '-e L4,NH4,C64,T64,V50257 -b 2 -x 30' --every 9

A run is killed once its steps are done and their checkpoints written: it saves nothing at its end. Two
checkpoints must fit on the disk that --folder is on (1558M: 50 GB). Standard library only.
"""
import argparse
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time

# flags, steps between checkpoints. At -z 524288 one step of d48 takes ten seconds: few will do.
RUNS = [("-e d12 -b 64 -x 170", 50), ("-e d48 -b 16 -z 16384 -x 110", 50),
        ("-e d48 -b 16 -z 524288 -x 6", 3)]


def disk_speed(folder, gib=4):
    """GB/s of writing a file in large pieces, until it is on the disk."""
    path, piece = os.path.join(folder, "speed"), os.urandom(1 << 20) * 64
    start = time.monotonic()
    with open(path, "wb") as f:
        for _ in range(gib * 16):
            f.write(piece)
        f.flush()
        os.fsync(f.fileno())
    seconds = time.monotonic() - start
    os.unlink(path)
    return gib * 1.073741824 / seconds


def measure(program, flags, every, steps, folder):
    """Milliseconds from each line of a step to the next, by the clock on the wall (the program's own times
    leave out what happens between steps), and what was said of checkpoints."""
    shutil.rmtree(folder, ignore_errors=True)
    came, saved = [], []
    command = [program, *flags, "-n", str(every), "-nk", "1", "-x", str(steps + 10**6), "-k", "constant",
               "-v", "0", "-s", "0", "-o", folder]
    started = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("step ") and len(came) < steps:
                came.append(time.monotonic())
            if line.startswith("saved "):
                saved.append(line.split(": ")[-1].strip())
            if len(came) == steps and len(saved) >= (steps - 1) // every:
                process.kill()
                break
        else:
            sys.exit(f"{program} ended by itself")
    shutil.rmtree(folder)
    return [1e3 * (b - a) for a, b in zip(came, came[1:])], saved, came[0] - started


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
        words = shlex.split(flags)
        at = words.index("-x")
        steps = int(words[at + 1])
        ms, saved, start = measure(args.program, words[:at] + words[at + 2:], every, steps,
                                   os.path.join(args.folder, "run"))
        plain = statistics.median(ms)
        cost = (sum(ms) - len(ms) * plain) / len(saved)
        print(f"{flags}: {plain:.1f} ms a step, the first after {start:.1f} s; a checkpoint costs {cost:.1f} "
              f"ms, {100 * cost / (50 * plain):.2f} % of 50 steps\n    slowest step {max(ms):.1f} ms; all: "
              f"{' '.join(f'{x:.0f}' for x in ms)}")
        for text in saved:
            print(f"    saved {text}", flush=True)


if __name__ == "__main__":
    main()
