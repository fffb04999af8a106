#!/usr/bin/env python3
"""What checkpoints cost: the same run without any and with one every N steps, one after the other; the
slowest step, how long a checkpoint takes to reach the disk, and what the disk can do.

    python3 dev/bench/checkpoint.py build/check/train_gpt2.BF16                 # d12 and d48 on a GPU
    python3 dev/bench/checkpoint.py ./train_gpt2cpu --flags '-e L4,NH4,C128,T128,V256 -b 4 -x 30' --every 9

A checkpoint must fit twice on the disk that --folder is on (1558M: 50 GB). Standard library only.
"""
import argparse
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time

# flags, steps between checkpoints
RUNS = [("-e d12 -b 64 -x 200", 50), ("-e d48 -b 16 -z 16384 -x 160", 50),
        ("-e d48 -b 16 -z 524288 -x 12", 5)]


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


def measure(program, flags, folder):
    """Milliseconds from each line of a step to the next, by the clock on the wall (the program's own times
    leave out what happens between steps), and what was said of checkpoints."""
    shutil.rmtree(folder, ignore_errors=True)
    came, saved = [], []
    command = [program, *flags, "-v", "0", "-s", "0", "-o", folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("step "):
                came.append(time.monotonic())
            if line.startswith("saved "):
                saved.append(line.split(": ")[-1].strip())
    if process.returncode != 0:
        sys.exit(f"{program} ended with {process.returncode}")
    shutil.rmtree(folder)
    return [1e3 * (b - a) for a, b in zip(came, came[1:])], saved


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
        run = os.path.join(args.folder, "run")
        without, _ = measure(args.program, words + ["-n", "0"], run)
        ms, saved = measure(args.program, words + ["-n", str(every), "-nk", "1"], run)
        mean, plain = statistics.mean(ms), statistics.mean(without)
        print(f"{flags}: {plain:.1f} ms a step without checkpoints, {mean:.1f} with one every {every}: "
              f"{100 * plain / mean:.2f} % of the speed\n    slowest step {max(ms):.1f} ms, without "
              f"{max(without):.1f}; median {statistics.median(ms):.1f}; {len(ms)} steps")
        for text in saved:
            print(f"    saved {text}")


if __name__ == "__main__":
    main()
