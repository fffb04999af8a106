#!/usr/bin/env python3
"""Muon beside AdamW: what an update costs, and how many tokens it saves.

    python3 dev/bench/muon.py cost                      # 124M, a minute on an H200
    python3 dev/bench/muon.py cost --model d48 --batch 16 --totals 16384 524288 --steps 30 3
    python3 dev/bench/muon.py loss --data dev/data/debian-docs/debian_docs      # 600 steps each, 7 minutes
    python3 dev/bench/muon.py loss --data PREFIX --steps 3000 --every 100 --adamw 2.4e-3 --muon \\
        --results build/muon.jsonl                      # a run of 124M, by arithmetic 332 s; then likewise
                                                        # --adamw 4.8e-3, --adamw --muon 0.02 (330 s) ...
    python dev/bench/muon.py pytorch --data PREFIX      # beside torch.optim.Muon, 100 steps
    ... --program ./train_gpt2cpu --model L4,NH4,C128,T128,V256 --batch 8       # on a CPU: it runs
    ... pytorch --total 1024 --twin "--device cpu --dtype float32 --muon_bf16 0"    # likewise, with the above

`cost`: both optimizers by turns on random tokens, the median step without the first ones; the difference is
set against the FLOPs of Muon's products. With --still all rates are 0: then
both have the same weights and multiply the same numbers for the whole run, which decide about the power, and
so about the clock.
`loss`: PREFIX_train_*.bin and PREFIX_val_*.bin, validation losses every --every steps, and the step and the
seconds at which each run has reached the end of the best AdamW's. Runs in --results are not repeated, and new
ones go there, so that a comparison may take several calls.
`pytorch`: the same weights, rows in the same order and schedule in dev/reference/train_gpt2.py, whose Python
has PyTorch 2.9 or later: training losses side by side. Two runs that differ in rounding alone part in time,
as our own with half of --batch shows: PyTorch's mean difference is to be no larger than that.
Standard library only.
"""
import argparse
import json
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
        for i in range(args.rounds):
            for total, steps in zip(args.totals, args.steps):
                for optimizer in (("adamw", "muon"), ("muon", "adamw"))[i % 2]:
                    rates = args.still * ("-l 0" if optimizer == "adamw" else "-l 0 --muon-lr 0")
                    out, _ = trainer(args, f"-z {total} -x {steps} -v 0 -i {shlex.quote(shard)} "
                                           f"--optimizer {optimizer} {rates}")
                    ms = [float(x) for x in re.findall(r"\| ([\d.]+) ms \|", out)]
                    if optimizer == "muon":
                        memory = re.search(r"^memory: .*", out, re.M)[0]
                    times.setdefault((total, optimizer), []).append(statistics.median(ms[len(ms) // 4:]))
        layers, channels = map(int, re.search(r"^model: L=(\d+) NH=\d+ C=(\d+)", out, re.M).groups())
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


def shards(args, part):
    return shlex.quote(f"{args.data}_{part}_*.bin")


def common_flags(args):
    return (f"-i {shards(args, 'train')} -z {args.total} -x {args.steps} -u {args.warmup} -q 0.1 "
            f"-c {args.decay} --seed {args.seed}")


def stored_runs(args):
    """What --results has, by the run's words."""
    if not args.results or not os.path.exists(args.results):
        return {}
    with open(args.results, encoding="utf-8") as f:
        return {run["flags"]: run for run in map(json.loads, f)}


def loss_run(args, flags, stored):
    """{"losses": ..., "ms": ..., "seconds": ...}; from --results, or made now and put there."""
    words = f"-e {args.model} -b {args.batch} {flags} {args.flags}".strip()
    if words in stored:
        return stored[words]
    out, seconds = trainer(args, flags)
    losses = [float(x) for x in re.findall(r"^val loss (\S+)", out, re.M)]
    ms = statistics.mean([float(x) for x in re.findall(r"\| ([\d.]+) ms \|", out)][1:])
    run = {"flags": words, "losses": losses, "ms": ms, "seconds": seconds}
    if args.results:
        with open(args.results, "a", encoding="utf-8") as f:
            f.write(json.dumps(run) + "\n")
    return run


def loss(args):
    common = f"{common_flags(args)} -j {shards(args, 'val')} -v {args.every} -m {args.val_batches}"
    runs = {("adamw", lr): f"{common} --optimizer adamw -l {lr}" for lr in args.adamw}
    runs.update({("muon", lr): f"{common} --optimizer muon -l {args.others_lr} --muon-lr {lr}"
                 for lr in args.muon})
    stored, curves = stored_runs(args), {}
    for (optimizer, lr), flags in runs.items():
        run = loss_run(args, flags, stored)
        steps = [k * args.every for k in range(len(run["losses"]) - 1)] + [args.steps]
        curves[optimizer, lr] = (dict(zip(steps, run["losses"])), run["ms"])
        shown = [k for k in steps if k % args.show == 0 or k == args.steps]
        print(f"{optimizer} {lr:g}: {run['ms']:.1f} ms a step, {run['seconds']:.0f} s in all; val at "
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


def pytorch(args):
    """--muon's first rate, in both programs."""
    length = re.search(r"T(\d+)", args.model)
    length = int(length[1]) if length else 1024
    flags = (f"{common_flags(args)} -t {length} -v 0 --optimizer muon -l {args.others_lr} "
             f"--muon-lr {args.muon[0]}")
    out, _ = trainer(args, flags)
    # as many rows at once as divide --total, at most half
    rows = next((b for b in range(args.batch // 2, 0, -1) if args.total % (b * length) == 0), args.batch)
    again, _ = trainer(argparse.Namespace(**{**vars(args), "batch": rows}), flags)
    twin = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "reference", "train_gpt2.py")
    words = [sys.executable, twin] + shlex.split(
        f"--optimizer muon --model {args.model} --input_bin {shards(args, 'train')} --dtype bfloat16 "
        f"--overfit_single_batch 0 --batch_size {args.batch} --sequence_length {length} "
        f"--total_batch_size {args.total} --num_iterations {args.steps} --warmup_iters {args.warmup} "
        f"--learning_rate_decay_frac 0.1 --weight_decay {args.decay} --seed {args.seed} "
        f"--learning_rate {args.others_lr} --muon_lr {args.muon[0]} {args.twin}")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{shlex.join(words)}\n{done.stderr.strip()}")
    ours, theirs, control = ([float(x) for x in re.findall(r"^step +\d+/\d+ \| loss ([-+.\w]+)", text, re.M)]
                             for text in (out, done.stdout, again))
    if {len(ours), len(theirs), len(control)} != {args.steps}:
        sys.exit(f"{len(ours)}, {len(theirs)} and {len(control)} losses of {args.steps} steps")
    apart = [a - b for a, b in zip(ours, theirs)]
    for k in [0, *range(args.show - 1, args.steps, args.show)]:
        print(f"step {k + 1}: ours {ours[k]:.6f}, PyTorch's Muon {theirs[k]:.6f}: {apart[k]:+.6f}")
    for who, apart in (("ours and PyTorch's", apart),
                       (f"ours and ours with -b {rows}", [a - b for a, b in zip(ours, control)])):
        for name, part in (("all", apart), ("the last quarter", apart[-max(1, args.steps // 4):])):
            print(f"{who}, {name}: mean {statistics.mean(part):+.6f}, largest {max(map(abs, part)):.6f}")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("cost", "loss", "pytorch"))
    p.add_argument("--program", default="build/check/train_gpt2.BF16")
    p.add_argument("--model", default="d12")
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--flags", default="", help="more flags for every run")
    p.add_argument("--totals", type=int, nargs="+", default=[65536, 524288], help="cost: -z, each")
    p.add_argument("--steps", type=int, nargs="+",
                   help="cost: steps of each -z (40 12); loss: 600; pytorch: 100")
    p.add_argument("--rounds", type=int, default=2, help="cost: how often each runs")
    p.add_argument("--still", action="store_true", help="cost: no weight changes, in either run")
    p.add_argument("--data", help="loss, pytorch: PREFIX of PREFIX_train_*.bin and PREFIX_val_*.bin")
    p.add_argument("--results", help="loss: file that keeps runs")
    p.add_argument("--twin", default="", help="pytorch: more flags for dev/reference/train_gpt2.py")
    p.add_argument("--total", type=int, default=65536, help="loss, pytorch: -z")
    p.add_argument("--adamw", type=float, nargs="*", default=[6e-4, 1.2e-3, 2.4e-3], help="loss: -l of AdamW")
    p.add_argument("--muon", type=float, nargs="*", default=[0.02], help="loss: --muon-lr")
    p.add_argument("--others-lr", type=float, default=1.2e-3, help="loss: -l beside --muon-lr")
    p.add_argument("--decay", type=float, default=0.1, help="loss: -c")
    p.add_argument("--warmup", type=int, help="loss: 100; pytorch: 10")
    p.add_argument("--every", type=int, default=20, help="loss: -v")
    p.add_argument("--show", type=int, help="of so many steps a loss is printed: loss 100, pytorch 10")
    p.add_argument("--val-batches", type=int, default=10)
    p.add_argument("--seed", type=int, default=1337)
    args = p.parse_args()
    if args.what == "cost":
        args.steps = args.steps or [40, 12]
        if len(args.steps) != len(args.totals):
            sys.exit("--steps needs a number for each of --totals")
        cost(args)
        return
    if not args.data:
        sys.exit(f"{args.what} needs --data PREFIX of token shards")
    run, steps, tenth = {"loss": (loss, 600, 100), "pytorch": (pytorch, 100, 10)}[args.what]
    args.steps = args.steps[0] if args.steps else steps
    args.warmup = tenth if args.warmup is None else args.warmup
    args.show = args.show or tenth
    run(args)


if __name__ == "__main__":
    main()
