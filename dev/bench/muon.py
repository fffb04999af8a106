#!/usr/bin/env python3
"""Muon beside AdamW: what an update costs, and how many tokens it saves.

    python3 dev/bench/muon.py cost                      # 124M, a minute on an H200
    python3 dev/bench/muon.py cost --model d48 --batch 16 --totals 16384 524288 --steps 30 3
    python3 dev/bench/muon.py loss --data dev/data/debian-docs/debian-docs      # 600 steps each, 7 minutes
    python3 dev/bench/muon.py loss --data PREFIX --adamw 1.2e-3 --muon 0.02 --steps 3000
    ... --program ./train_gpt2cpu --model L4,NH4,C128,T128,V256 --batch 8       # on a CPU: it runs

`cost`: both optimizers by turns on random tokens, the mean step without the first ones; the difference is set
against the FLOPs of Muon's products. `loss`: PREFIX_train_*.bin and PREFIX_val_*.bin, validation losses every
--every steps, and the step and the seconds at which each run has reached the end of the best AdamW's.
Standard library only.
"""
import argparse
import math
import os
import random
import re
import shlex
import statistics
import struct
import subprocess
import sys
import tempfile
import time


def trainer(args, flags):
    """(stdout, seconds); a run that fails ends this."""
    words = [args.program, "-e", args.model, "-b", str(args.batch), "-s", "0"] + shlex.split(flags)
    begin = time.monotonic()
    done = subprocess.run(words + shlex.split(args.flags), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{shlex.join(words)}\n{done.stderr.strip()}")
    return done.stdout, time.monotonic() - begin


def random_shard(path, tokens, vocabulary):
    rng = random.Random(1)
    with open(path, "wb") as f:
        f.write(struct.pack("<256i", 20240520, 1, tokens, *[0] * 253))
        f.write(struct.pack(f"<{tokens}H", *(rng.randrange(vocabulary) for _ in range(tokens))))


def cost(args):
    with tempfile.TemporaryDirectory() as folder:
        shard = os.path.join(folder, "random.bin")
        sizes = re.search(r"V(\d+)", args.model)
        random_shard(shard, 1 << 21, int(sizes[1]) if sizes else 50257)
        times = {}
        for _ in range(args.rounds):
            for total, steps in zip(args.totals, args.steps):
                for optimizer in ("adamw", "muon"):
                    out, _ = trainer(args, f"-z {total} -x {steps} -v 0 -i {shard} --optimizer {optimizer}")
                    ms = [float(x) for x in re.findall(r"\| ([\d.]+) ms \|", out)]
                    times.setdefault((total, optimizer), []).append(statistics.mean(ms[len(ms) // 4:]))
        layers, channels = map(int, re.search(r"^model: L=(\d+) NH=\d+ C=(\d+)", out, re.M).groups())
        memory = re.search(r"^memory: .*", out, re.M)[0]
    flops = 5 * 60 * layers * channels**3
    for total in args.totals:
        adamw, muon = (statistics.mean(times[total, optimizer]) for optimizer in ("adamw", "muon"))
        each = "; ".join(f"{optimizer} " + " ".join(f"{ms:.2f}" for ms in times[total, optimizer])
                         for optimizer in ("adamw", "muon"))
        rate = flops / (muon - adamw) / 1e9 if muon > adamw else math.inf
        print(f"{args.model} -b {args.batch} -z {total}: AdamW {adamw:.2f} ms, Muon {muon:.2f} ms: "
              f"{muon - adamw:+.2f} ms, {100 * (muon / adamw - 1):+.2f} % ({flops / 1e12:.2f} TFLOP: "
              f"{rate:.0f} TFLOP/s)\n    each: {each}")
    print("Muon's " + memory)


def loss(args):
    runs = [("adamw", lr) for lr in args.adamw] + [("muon", lr) for lr in args.muon]
    common = (f"-i '{args.data}_train_*.bin' -j '{args.data}_val_*.bin' -z {args.total} -x {args.steps} "
              f"-u {args.warmup} -q 0.1 -c {args.decay} -v {args.every} -m {args.val_batches} "
              f"--seed {args.seed}")
    curves = {}
    for optimizer, lr in runs:
        rates = f"-l {lr}" if optimizer == "adamw" else f"-l {args.others_lr} --muon-lr {lr}"
        out, seconds = trainer(args, f"{common} --optimizer {optimizer} {rates}")
        losses = [float(x) for x in re.findall(r"^val loss (\S+)$", out, re.M)]
        ms = [float(x) for x in re.findall(r"\| ([\d.]+) ms \|", out)]
        steps = [k * args.every for k in range(len(losses) - 1)] + [args.steps]
        curves[optimizer, lr] = (dict(zip(steps, losses)), statistics.mean(ms[1:]))
        shown = [k for k in steps if k % args.show == 0 or k == args.steps]
        print(f"{optimizer} {lr:g}: {statistics.mean(ms[1:]):.1f} ms a step, {seconds:.0f} s in all; val at "
              + ", ".join(f"{k}: {curves[optimizer, lr][0][k]:.3f}" for k in shown), flush=True)
    ends = {run: curve[args.steps] for run, (curve, _) in curves.items() if run[0] == "adamw"}
    if not ends:
        return
    best = min(ends, key=ends.get)
    print(f"AdamW's best end: {ends[best]:.4f} at -l {best[1]:g}")
    for (optimizer, lr), (curve, ms) in curves.items():
        there = [k for k in sorted(curve) if curve[k] <= ends[best]]
        if optimizer == "muon" and there:
            took, adamw_took = there[0] * ms / 1e3, args.steps * curves[best][1] / 1e3
            print(f"Muon {lr:g} is there at step {there[0]} of {args.steps} ({took:.0f} s; AdamW "
                  f"{adamw_took:.0f} s), and ends {ends[best] - curve[args.steps]:.4f} lower")
        elif optimizer == "muon":
            print(f"Muon {lr:g} does not get there: it ends at {curve[args.steps]:.4f}")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("cost", "loss"))
    p.add_argument("--program", default="build/check/train_gpt2.BF16")
    p.add_argument("--model", default="d12")
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--flags", default="", help="more flags for every run")
    p.add_argument("--totals", type=int, nargs="+", default=[65536, 524288], help="cost: -z, each")
    p.add_argument("--steps", type=int, nargs="+", help="cost: steps of each -z (40 6); loss: 600")
    p.add_argument("--rounds", type=int, default=2, help="cost: how often each runs")
    p.add_argument("--data", help="loss: PREFIX of PREFIX_train_*.bin and PREFIX_val_*.bin")
    p.add_argument("--total", type=int, default=65536, help="loss: -z")
    p.add_argument("--adamw", type=float, nargs="*", default=[6e-4, 1.2e-3, 2.4e-3], help="loss: -l of AdamW")
    p.add_argument("--muon", type=float, nargs="*", default=[0.02], help="loss: --muon-lr")
    p.add_argument("--others-lr", type=float, default=1.2e-3, help="loss: -l beside --muon-lr")
    p.add_argument("--decay", type=float, default=0.1, help="loss: -c")
    p.add_argument("--warmup", type=int, default=100)
    p.add_argument("--every", type=int, default=20, help="loss: -v")
    p.add_argument("--show", type=int, default=100, help="loss: of these steps the loss is printed")
    p.add_argument("--val-batches", type=int, default=10)
    p.add_argument("--seed", type=int, default=1337)
    args = p.parse_args()
    if args.what == "cost":
        args.steps = args.steps or [40, 6]
        if len(args.steps) != len(args.totals):
            sys.exit("--steps needs a number for each of --totals")
        cost(args)
        return
    if not args.data:
        sys.exit("loss needs --data PREFIX of token shards")
    args.steps = args.steps[0] if args.steps else 600
    loss(args)


if __name__ == "__main__":
    main()
