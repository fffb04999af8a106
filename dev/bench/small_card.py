#!/usr/bin/env python3
"""A smaller card on a larger one: holds the GPU's memory but for --left GiB, trains there with the flags that
--plan names for --card, and then again without this limit and without these flags.

    python3 dev/bench/small_card.py                             # 24 GiB of an H100 or H200
    python3 dev/bench/small_card.py --only 774M --program build/check/train_gpt2.BF16
    python3 dev/bench/small_card.py hold --left 24              # holds until Ctrl-C

What this shows is that memory suffices, and what the flags cost: not how fast the small card is. GiB are what
nvidia-smi sees a run take, the driver's part included. A step is four micro-steps; a figure is the median
step of --seconds, after a second. Standard library only.
"""
import argparse
import contextlib
import ctypes
import math
import re
import shlex
import signal
import sys

import bench

# a name, the flags, and whether the portable kernels run, too
RUNS = [("1558M, AdamW", "-e d48 -b 4", True),
        ("1558M, AdamW, FP8", "-e d48 -b 4 --matmul-dtype fp8", False),
        ("1558M, Muon", "-e d48 -b 6 --optimizer muon", False),
        ("1558M, Muon, more rows", "-e d48 -b 8 --optimizer muon", False),
        ("774M, AdamW", "-e d36 -b 8", True),
        ("TinyLlama's shape, AdamW", "-e tinyllama:1.1B -b 4", True)]
T, MICRO_STEPS, GIB = 1024, 4, 1 << 30


class Held:
    """`with Held(bytes):` leaves so many bytes of the first GPU to others, by the driver's own functions."""

    def __init__(self, left):
        self.left, self.at = left, ctypes.c_uint64()

    def call(self, name, *arguments):
        error = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
        if error:
            sys.exit(f"{name}: CUDA error {error}")

    def __enter__(self):
        device, context, free, total = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        if free.value <= self.left:
            sys.exit(f"only {free.value / GIB:.1f} GiB are free: --left {self.left / GIB:.1f} is no limit")
        self.call("cuMemAlloc_v2", ctypes.byref(self.at), ctypes.c_size_t(free.value - self.left))
        print(f"holding {(free.value - self.left) / GIB:.1f} of {total.value / GIB:.1f} GiB", flush=True)

    def __exit__(self, *_):
        self.call("cuMemFree_v2", self.at)


def advised(text):
    """Of what --plan has said the flags with which -b fits. None: with none."""
    if re.search(r"^-b \d+ fits;", text, re.M):
        return []
    found = re.search(r"-b (\d+) fits with ([^;\n]*)", text)
    asked = re.search(r"^-b (\d+) does not fit", text, re.M)
    if not found or (asked and found[1] != asked[1]):
        return None
    return found[2].split()


def trained(program, command, seconds):
    """(tokens/s, what to show)"""
    made = bench.measure([program, *command, "-i", bench.SHARD, "-v", "0", "-s", "0", "-x", "9999"], seconds)
    if "error" in made:
        return math.nan, made["error"]
    speed = int(command[command.index("-z") + 1]) / made["ms"] * 1e3
    return speed, f"{speed:,.0f} in {made['gib']:.1f} GiB"


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["runs", "hold"], default="runs")
    parser.add_argument("--left", type=float, default=24.0, help="GiB")
    parser.add_argument("--card", default="RTX 4090")
    parser.add_argument("--program", default=bench.TRAIN)
    parser.add_argument("--only", default="", help="of the runs those whose names contain this")
    parser.add_argument("--seconds", type=float, default=1.5)
    a = parser.parse_args(words)
    if a.what == "hold":
        with Held(int(a.left * GIB)), contextlib.suppress(KeyboardInterrupt):
            signal.pause()
        return
    bench.WARM_S = 1.0
    bench.made_up_shard(f"{bench.ROOT}/{bench.SHARD}")
    rows = []
    with Held(int(a.left * GIB)):
        for name, flags, portable in RUNS:
            if a.only not in name:
                continue
            rows_of_text = int(re.search(r"-b (\d+)", flags)[1])
            command = [*shlex.split(flags), "-t", str(T), "-z", str(rows_of_text * T * MICRO_STEPS)]
            said = bench.run(a.program, *command, "--plan", a.card)
            more = advised(said.stdout + said.stderr)
            if more is None:
                sys.exit(f"{name}: {flags} does not fit into a {a.card}:\n{said.stdout}{said.stderr}")
            row = [name, flags, " ".join(more), trained(a.program, command + more, a.seconds), ("", "")]
            if portable:
                row[4] = trained(a.program, [*command, *more, "--kernels", "portable"], a.seconds)
            print("; ".join([name, row[2], row[3][1], row[4][1]]), flush=True)
            rows.append((command, row))
    print("| tok/s | flags | with --plan's | of without | portable | without limit and flags |")
    print("|---|---|---|---|---|---|")
    for command, (name, flags, more, made, portable) in rows:
        free = trained(a.program, command, a.seconds)
        share = f"{made[0] / free[0]:.2f}"
        print(f"| {name} | `{flags} {more}` | {made[1]} | {share} | {portable[1]} | {free[1]} |", flush=True)


if __name__ == "__main__":
    main()
