#!/usr/bin/env python3
"""Muon: what an update costs beside AdamW's, and whether PyTorch's Muon learns the same.

    python3 dev/bench/muon.py cost                      # 124M, a minute on an H200
    python3 dev/bench/muon.py cost --model d48 --batch 16 --totals 16384 524288 --steps 30 3
    python dev/bench/muon.py pytorch --data PREFIX      # beside torch.optim.Muon, 100 steps
    ... --program ./train_gpt2cpu --model L4,NH4,C128,T128,V256 --batch 8       # on a CPU: it runs
    ... pytorch --total 1024 --twin "--device cpu --dtype float32 --muon_bf16 0"    # likewise, with the above

`cost`: both optimizers by turns on random tokens, the median step without the first ones; the difference is
set against the FLOPs of Muon's products. With --still all rates are 0: then both have the same weights and
multiply the same numbers for the whole run, which decide about the power, and so about the clock.
`pytorch`: the same weights, rows of PREFIX_train_*.bin in the same order and schedule in
dev/reference/train_gpt2.py, whose Python has PyTorch 2.9 or later: training losses side by side. Two runs
that differ in rounding alone part in time, as our own with half of --batch shows: PyTorch's mean difference
is to be no larger than that.
Standard library only; ladder.py compares losses of settings.
"""
import argparse
import math
import os
import random
import re
import shlex
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile


def trainer(args, flags):
    """The run's stdout; a run that fails ends this."""
    if not shutil.which(args.program):
        sys.exit(f"error: there is no program {args.program}\nhint: make {args.program}, or --program FILE")
    words = [args.program, "-e", args.model, "-b", str(args.batch), "-s", "0"] + shlex.split(flags)
    done = subprocess.run(words + shlex.split(args.flags), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{shlex.join(words)}\n{done.stderr.strip()}")
    return done.stdout


def random_shard(path, tokens, vocabulary):
    rng = random.Random(1)
    with open(path, "wb") as f:
        f.write(struct.pack("<256i", 20240520, 1, tokens, *[0] * 253))
        f.write(struct.pack(f"<{tokens}H", *(rng.randrange(vocabulary) for _ in range(tokens))))


def products(printed):
    """FLOPs of one of Muon's five iterations, by what a run prints: 4 r^2 c + 2 r^3 for a matrix of
    smaller side r. The number of Muon's parameters tells whether an MLP has two or three matrices."""
    model = re.search(r"^model: .*", printed, re.M)[0]
    sizes = {name: int(size) for name, size in re.findall(r"\b(L|NH|NKV|HS|C|F)=?(\d+)", model)}
    L, C, F = sizes["L"], sizes["C"], sizes.get("F", 4 * sizes["C"])
    heads, groups = (sizes[name] * sizes["HS"] if "HS" in sizes else C for name in ("NH", "NKV"))
    all_of_a_layer = int(re.search(r"^optimizer: Muon for (\d+)", printed, re.M)[1]) // L
    wide = (all_of_a_layer - 2 * C * (heads + groups)) // (C * F)
    shapes = 2 * [(C, heads)] + 2 * [(C, groups)] + wide * [(C, F)]
    return L * sum(4 * r * r * c + 2 * r**3 for r, c in map(sorted, shapes))


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
                    out = trainer(args, f"-z {total} -x {steps} -v 0 -i {shlex.quote(shard)} "
                                           f"--optimizer {optimizer} {rates}")
                    ms = [float(x) for x in re.findall(r"\| ([\d.]+) ms \|", out)]
                    if optimizer == "muon":
                        memory = re.search(r"^memory: .*", out, re.M)[0]
                    times.setdefault((total, optimizer), []).append(statistics.median(ms[len(ms) // 4:]))
    flops = 5 * products(out)
    for total in args.totals:
        adamw, muon = (statistics.mean(times[total, optimizer]) for optimizer in ("adamw", "muon"))
        each = "; ".join(f"{optimizer} " + " ".join(f"{ms:.2f}" for ms in times[total, optimizer])
                         for optimizer in ("adamw", "muon"))
        rate = flops / (muon - adamw) / 1e9 if muon > adamw else math.inf
        print(f"{args.model} -b {args.batch} -z {total}: AdamW {adamw:.2f} ms, Muon {muon:.2f} ms: "
              f"{muon - adamw:+.2f} ms, {100 * (muon / adamw - 1):+.2f} % ({flops / 1e12:.2f} TFLOP: "
              f"{rate:.0f} TFLOP/s)\n    each: {each}")
    print("Muon's " + memory)


def pytorch(args):
    """The same training in both programs."""
    length = re.search(r"T(\d+)", args.model)
    length = int(length[1]) if length else 1024
    steps, shards = args.steps[0] if args.steps else 100, shlex.quote(f"{args.data}_train_*.bin")
    flags = (f"-i {shards} -z {args.total} -x {steps} -u {args.warmup} -q 0.1 -c {args.decay} "
             f"--seed {args.seed} -t {length} -v 0 --optimizer muon --muon-warmup 0 "
             f"-l {args.others_lr} --muon-lr {args.muon_lr}")
    out = trainer(args, flags)
    # as many rows at once as divide --total, at most half
    rows = next((b for b in range(args.batch // 2, 0, -1) if args.total % (b * length) == 0), args.batch)
    again = trainer(argparse.Namespace(**{**vars(args), "batch": rows}), flags)
    twin = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "reference", "train_gpt2.py")
    words = [sys.executable, twin] + shlex.split(
        f"--optimizer muon --model {args.model} --input_bin {shards} --dtype bfloat16 "
        f"--overfit_single_batch 0 --batch_size {args.batch} --sequence_length {length} "
        f"--total_batch_size {args.total} --num_iterations {steps} --warmup_iters {args.warmup} "
        f"--learning_rate_decay_frac 0.1 --weight_decay {args.decay} --seed {args.seed} "
        f"--learning_rate {args.others_lr} --muon_lr {args.muon_lr} {args.twin}")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{shlex.join(words)}\n{done.stderr.strip()}")
    ours, theirs, control = ([float(x) for x in re.findall(r"^step +\d+/\d+ \| loss ([-+.\w]+)", text, re.M)]
                             for text in (out, done.stdout, again))
    if {len(ours), len(theirs), len(control)} != {steps}:
        sys.exit(f"{len(ours)}, {len(theirs)} and {len(control)} losses of {steps} steps")
    apart = [a - b for a, b in zip(ours, theirs)]
    for k in [0, *range(args.show - 1, steps, args.show)]:
        print(f"step {k + 1}: ours {ours[k]:.6f}, PyTorch's Muon {theirs[k]:.6f}: {apart[k]:+.6f}")
    for who, apart in (("ours and PyTorch's", apart),
                       (f"ours and ours with -b {rows}", [a - b for a, b in zip(ours, control)])):
        for name, part in (("all", apart), ("the last quarter", apart[-max(1, steps // 4):])):
            print(f"{who}, {name}: mean {statistics.mean(part):+.6f}, largest {max(map(abs, part)):.6f}")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("cost", "pytorch"))
    p.add_argument("--program", default="build/check/train_gpt2.BF16")
    p.add_argument("--model", default="d12")
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--flags", default="", help="more flags for every run")
    p.add_argument("--totals", type=int, nargs="+", default=[65536, 524288], help="cost: -z, each")
    p.add_argument("--steps", type=int, nargs="+",
                   help="cost: steps of each -z (40 12); pytorch: 100")
    p.add_argument("--rounds", type=int, default=2, help="cost: how often each runs")
    p.add_argument("--still", action="store_true", help="cost: no weight changes, in either run")
    p.add_argument("--data", help="pytorch: PREFIX of PREFIX_train_*.bin")
    p.add_argument("--twin", default="", help="pytorch: more flags for dev/reference/train_gpt2.py")
    p.add_argument("--total", type=int, default=65536, help="pytorch: -z")
    p.add_argument("--muon-lr", type=float, default=0.02, help="pytorch: --muon-lr")
    p.add_argument("--others-lr", type=float, default=1.2e-3, help="pytorch: -l")
    p.add_argument("--decay", type=float, default=0.1, help="pytorch: -c")
    p.add_argument("--warmup", type=int, default=10, help="pytorch: -u")
    p.add_argument("--show", type=int, default=10, help="pytorch: of so many steps a loss is printed")
    p.add_argument("--seed", type=int, default=1337)
    args = p.parse_args()
    if args.what == "cost":
        args.steps = args.steps or [40, 12]
        if len(args.steps) != len(args.totals):
            sys.exit("--steps needs a number for each of --totals")
        cost(args)
        return
    if not args.data:
        sys.exit("pytorch needs --data PREFIX of token shards")
    pytorch(args)


if __name__ == "__main__":
    main()
