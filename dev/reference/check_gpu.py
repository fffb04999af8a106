#!/usr/bin/env python3
"""Holds the CUDA trainer against PyTorch on the same GPU. Last line: N passed, N failed, N skipped.

    python dev/reference/check_gpu.py --work build/reference         # builds FP32, BF16, FP16 and checks all
    python dev/reference/check_gpu.py --work build/reference --precisions BF16 --build 0 --only curves,splits

PyTorch's side is computed once into --work by compare.py and reused. Checks, and the bound of each:

    losses     FP32       10 steps with and without -z 512: 1e-5 apart, and 1e-4 from the PyTorch twin
    adamw      FP32       two steps from our gradients: PyTorch's AdamW gives the same weights, to the bit
    grads      all        first-step gradients at 124M shape. FP32: logits 2e-5, each gradient 1e-4;
                          BF16, FP16: at most twice PyTorch's error in the same type, from the same weights
    curves     FP32 BF16  50 steps of tinyshakespeare from the nearest of three eager and three compiled runs:
                          within twice the largest distance of one of either (PyTorch does not repeat
                          itself); no drift in steps 5-19
    published  BF16       the same with positions from N(0,1): steps 0-9 within 0.15 of the published losses
    splits     FP32 BF16  1x32, 2x16 and 8x4 agree: FP32 1e-6, BF16 within twice PyTorch's own difference
    rounding   BF16       32 micro-steps accumulated in bf16 land closer to fp32 than PyTorch's do
    blocks     all        every block with every norm, without dropout and with masks that formats.py
                          recomputes from the trainer's random numbers, at each of --sizes: one batch, its
                          logits (which have no dropout), its loss and every gradient. All weights are random:
                          no bias is 0, no gain is 1. With dropout the batch goes in two micro-steps, whose
                          masks are those of the rows' places. Bounds as for grads; the loss 2e-5, in 16 bits
                          0.02. Without a GPU: --device cpu --test ./test_gpt2cpu --precisions FP32 --build 0

Our gradients come from a command that writes the reference-tensor format (--dump): {model} is a checkpoint,
{tensors} a reference file whose x and y are to be used, {out} the file to write, {micro_steps} into how many
equal parts the rows of the batch are split, {extra} further flags (`-f 0`, `--grad-dtype bf16`).
"""
import argparse
import dataclasses
import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import torch

import reference
import train_gpt2
from compare import HYPER, SUFFIX, batch, compare_tensors
from formats import (NAMES, Loader, dropout_factors, init_params, parse_model, read_checkpoint,
                     read_checkpoint_header, read_tensors, round_params, write_checkpoint, write_tensors)
from gpt2 import (get_params, load_params, make_optimizer, new_model, random_params, setup_device,
                  tensor_list, to_numpy, undropped)
from reference import grad_errors

HERE = os.path.dirname(os.path.abspath(__file__))
TYPE = {"FP32": "float32", "BF16": "bfloat16", "FP16": "float16"}
counts = {"passed": 0, "failed": 0, "skipped": 0}


def check(ok, text):
    counts["passed" if ok else "failed"] += 1
    print(("ok    " if ok else "FAIL  ") + text, flush=True)


def check_each(title, rows):
    """rows: (name, value, limit, ok). One line for all that pass, with the closest; one for each failure."""
    for name, value, limit, ok in rows:
        if not ok:
            check(False, f"{title} {name}: {value:.3e}, limit {limit:.3e}")
    good = [row for row in rows if row[3]]
    if good:
        counts["passed"] += len(good) - 1
        name, value, limit, _ = max(good, key=lambda row: row[1] / row[2] if row[2] else 0.0)
        check(True, f"{title}: {len(good)} tensors, closest {name}: {value:.3e}, limit {limit:.3e}")


def skip(text):
    counts["skipped"] += 1
    print("SKIP  " + text, flush=True)


class CommandFailed(Exception):
    pass


def run(command, timeout=400):
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout)
    if result.returncode != 0:
        lines = (result.stderr.strip() or result.stdout.strip() or "no output").splitlines()
        raise CommandFailed(f"exit {result.returncode}: {shlex.join(command)}: {' / '.join(lines[-3:])}")
    return result.stdout


def our_losses(args, precision, flags):
    """Training losses printed by the trainer, one per step."""
    out = run([args.train.format(precision=precision)] + flags)
    return [float(v) for v in re.findall(r"^step \d+/\d+ \| loss ([-+.\w]+)", out, re.M)]


def our_tensors(args, precision, model, tensors, out, micro_steps=1, extra=""):
    extra = (extra + (" -f 0" if precision == "FP32" else "")).strip()
    run(shlex.split(args.dump.format(test=args.test.format(precision=precision), model=model, tensors=tensors,
                                     out=out, micro_steps=micro_steps, extra=extra)))
    return out


def distance(ours, theirs):
    """Largest difference; a different number of steps or a NaN is infinitely far."""
    if len(ours) != len(theirs) or not ours or any(v != v for v in [*ours, *theirs]):
        return float("inf")
    return max(abs(a - b) for a, b in zip(ours, theirs))


# ---- the checks ----
def check_losses(args, precision):
    flags = shlex.split("-b 4 -t 64 -l 1e-4 -v 200 -s 200 -a 1 -x 10 -f 0") + args.model_flags
    flags += ["-i", f"{args.data}_train.bin", "-j", f"{args.data}_val.bin"]
    once, twice = our_losses(args, precision, flags), our_losses(args, precision, flags + ["-z", "512"])
    check(distance(once, twice) <= 1e-5, f"losses with -z 512: {distance(once, twice):.2e} apart, limit 1e-5")
    twin_flags = ["--total_batch_size=512", "--write_tensors=0"]
    twin_flags += [f"--device={args.device}", f"--model={args.model}", f"--input_bin={args.data}_train.bin"]
    twin = train_gpt2.parse_arguments(twin_flags)
    steps = train_gpt2.train(twin, *train_gpt2.initial_weights(twin), show=lambda line: None)
    theirs = [row["loss"] for row in steps]
    for name, ours in (("without -z", once), ("with -z 512", twice)):
        d = distance(ours, theirs)
        check(d <= 1e-4, f"losses {name} against PyTorch: {d:.2e}, limit 1e-4")


def check_adamw(args, precision):
    """Two ways from the same gradients: our steps, and PyTorch's on the gradients that we dump. The second
    step is the first with m, v and a bias correction of their own."""
    folder, start, tensors = (os.path.join(args.work, "adamw_" + name) for name in
                              ("run", "model.bin", "tensors.bin"))
    hyper = {**HYPER, "learning_rate": 1e-3, "weight_decay": 0.1}
    dims = parse_model(args.model)
    params = init_params(dims, 1337)
    x, y = Loader(f"{args.data}_train.bin", 4, 64, shuffle=False, vocab=dims.V).next()
    write_checkpoint(start, dims, params)
    write_tensors(tensors, dims, x, y, np.zeros((4, 64, dims.V), np.float32), 0.0, params)
    theirs = new_model(dims, args.device)
    load_params(theirs, params)
    optimizer, model, before = make_optimizer(theirs, hyper), start, params
    for step in (1, 2):
        out = our_tensors(args, precision, model, tensors, os.path.join(args.work, "ours.bin"))
        grads = read_tensors(out, dims)["grads"]
        shutil.rmtree(folder, ignore_errors=True)
        our_losses(args, precision, shlex.split(
            f"-i {args.data}_train.bin -e {start} -b 4 -t 64 -l 1e-3 -k constant -c 0.1 -x {step} -a 1 -f 0 "
            f"-v 0 -s 0 --grad-clip 0 -o {folder}"))
        model = os.path.join(args.work, f"adamw_model_{step}.bin")
        shutil.move(os.path.join(folder, f"model_{step:08d}.bin"), model)
        ours = read_checkpoint(model)[1]
        for name in NAMES:
            for i, p in enumerate(tensor_list(theirs, name)):
                p.grad = torch.from_numpy(grads[name].reshape((-1,) + p.shape)[i].copy()).to(args.device)
        optimizer.step()
        stepped = get_params(theirs)
        for name in NAMES:
            other = int((ours[name] != stepped[name]).sum())
            moved = bool((ours[name] != before[name]).any())
            check(moved and other == 0, f"adamw step {step}, {name}: {other} of {ours[name].size} differ")
        before = ours


def check_grads(args, precision):
    kind = TYPE[precision]
    for T in args.lengths:
        base = os.path.join(args.work, f"d12_T{T}{SUFFIX[kind]}")
        model, tensors = base + "_model.bin", base + "_tensors.bin"
        ours = our_tensors(args, precision, model, tensors, os.path.join(args.work, "ours.bin"))
        if kind == "float32":
            limits, logits_limit = {n: 1e-4 for n in NAMES}, 2e-5
        else:
            info = json.load(open(base + ".json"))
            limits = {n: 2 * info[kind + "_grad_error"][n] for n in NAMES}
            logits_limit = 2 * info[kind + "_logits_error"]
        check_each(f"grads {kind} T={T}", compare_tensors(model, tensors, ours, limits, logits_limit))


def recipe_losses(args, precision, r, model_flags):
    """Ours on the recipe that PyTorch's side recorded in its JSON."""
    folder = os.path.join(args.work, "curve_run")
    shutil.rmtree(folder, ignore_errors=True)           # the trainer refuses a folder that holds a run
    flags = ["-i", r["input_bin"], "-j", r["input_bin"], "--shuffle", "0", "-b", r["batch_size"],
             "-t", r["sequence_length"], "-z", r["total_batch_size"], "-l", r["learning_rate"],
             "-k", "cosine", "-u", r["warmup_iters"], "-q", r["learning_rate_decay_frac"],
             "-c", r["weight_decay"], "-x", r["num_iterations"], "-v", 0, "-s", 0, "-o", folder] + model_flags
    flags += ["-f", 0] if precision == "FP32" else []
    return our_losses(args, precision, [str(f) for f in flags])


def check_curves(args, precision):
    data = json.load(open(os.path.join(args.work, "curves.json")))
    kind = "float32" if precision == "FP32" else "autocast"
    ours = recipe_losses(args, precision, data["recipe"], args.model_flags)
    runs, pairs = data[f"{kind}_losses"], data[f"{kind}_pairs"]
    theirs = runs["eager"] + runs["compiled"]
    distances = sorted(distance(ours, run) for run in theirs)
    limit = 2 * max(pairs)
    check(distances[0] <= limit,
          f"curves: {len(ours)} steps from the nearest run of PyTorch {kind}: {distances[0]:.2e}, limit "
          f"{limit:.2e}: twice eager against compiled (pairs {min(pairs):.2e} to {max(pairs):.2e})")
    # Steps 5-19, before differences grow: there PyTorch's runs agree to 1e-4 on average. LayerNorm's
    # parameters in bf16 cost +2.0e-3 here, which the bound above would not notice.
    early, drift_limit = range(5, 20), 1e-6 if precision == "FP32" else 1e-3
    drift = sum(ours[i] - sum(run[i] for run in theirs) / len(theirs) for i in early) / len(early)
    check(abs(drift) <= drift_limit,
          f"curves: mean difference of steps 5-19: {drift:+.2e}, limit {drift_limit:.0e}")
    first = runs["eager"][0]
    print("      from one eager run: ours %.2e; PyTorch %s" % (distance(ours, first), " ".join(
        "%s %s" % (how, " ".join("%.2e" % distance(run, first) for run in runs[how] if run is not first))
        for how in runs)), flush=True)
    with open(os.path.join(args.work, f"curve_{precision}.json"), "w") as f:
        json.dump({"losses": ours}, f)


def check_published(args, precision):
    data = json.load(open(os.path.join(args.work, "published.json")))
    model = os.path.join(args.work, "published_model.bin")
    ours, theirs = recipe_losses(args, precision, data["recipe"], ["-e", model]), data["losses"]
    d = distance(ours, data["published"])
    check(d <= 0.15, f"published: steps 0-9: {d:.3f}, limit 0.15 (PyTorch here: "
          f"{distance(theirs, data['published']):.3f}; ours to it: {distance(ours, theirs):.3f})")


def split_paths(args):
    return os.path.join(args.work, "splits_model.bin"), os.path.join(args.work, "splits_tensors.bin")


def check_splits(args, precision):
    model, tensors = split_paths(args)
    data, dims = json.load(open(os.path.join(args.work, "splits.json"))), read_checkpoint_header(model)[0]
    grads = {}
    for micro_steps in (1, 2, 8):
        out = os.path.join(args.work, f"ours_{micro_steps}.bin")
        our_tensors(args, precision, model, tensors, out, micro_steps)
        grads[micro_steps] = read_tensors(out, dims)["grads"]
        os.unlink(out)
    pairs = [grad_errors(grads[a], grads[b]) for a in grads for b in grads if a < b]
    rows = []
    for n in NAMES:
        limit = 1e-6 if precision == "FP32" else 2 * data["bfloat16_split_difference"][n]
        rows += [(n, pair[n], limit, pair[n] <= limit) for pair in pairs]
    check_each(f"splits {TYPE[precision]}", rows)


def check_rounding(args, precision):
    model, tensors = split_paths(args)
    data, dims = json.load(open(os.path.join(args.work, "splits.json"))), read_checkpoint_header(model)[0]
    out = os.path.join(args.work, "ours.bin")
    our_tensors(args, precision, model, tensors, out, data["rows"], "--grad-dtype bf16")
    errors = grad_errors(read_tensors(out, dims)["grads"], read_tensors(tensors, dims)["grads"])
    theirs = data["bfloat16_accumulated_error"]
    check_each(f"rounding {data['rows']} micro-steps",
               [(n, errors[n], theirs[n], errors[n] < theirs[n]) for n in NAMES])


# ---- blocks ----
BLOCKS, NORMS = ("sequential", "parallel", "parallel-tied"), ("layernorm", "rmsnorm")
SEED, DROPOUT, ROWS = 1337, 0.15, 4                     # SEED: the dump's


def masks(p, device):
    """gpt2.py's `dropped`: the masks of a first update, for rows of C."""
    def dropped(x, place):
        factors = dropout_factors(SEED, 0, place, 0, x.numel() // x.shape[-1], x.shape[-1], p)
        factors = torch.from_numpy(factors.astype(np.float64)).to(device).view(x.shape)
        wide = x.dtype if x.dtype == torch.float64 else torch.float32
        return (x.to(wide) * factors.to(wide)).to(x.dtype)      # the scale is not rounded to 16 bits
    return dropped if p else undropped


def yardstick(kind, dims, params, x, y, device, dropped, truth):
    """What logits and each gradient may be wrong by: (limit, {name: limit})."""
    if kind == "float32":
        return 2e-5, {name: 1e-4 for name in NAMES}
    if kind == "bfloat16":
        logits, _, grads = reference.run(dims, params, x, y, torch.bfloat16, device, sdpa=True,
                                         dropped=dropped)
    else:
        _, logits, _, grads = reference.run_float16(dims, params, x, y, device, dropped)
    errors = reference.grad_errors(grads, truth[2])
    return 2 * reference.logits_error(logits, truth[0]), {name: 2 * e for name, e in errors.items()}


def check_block(args, precision, dims, p):
    kind, path = TYPE[precision], lambda name: os.path.join(args.work, name)
    params = random_params(dims, 1 + dims.block + 3 * dims.norm, args.device)
    if kind != "float32":
        params = round_params(params, kind)
    write_checkpoint(path("model.bin"), dims, params, version=5 if kind == "bfloat16" else 3)
    x, y = batch(dims, ROWS, dims.maxT, "", SEED)
    dropped = masks(p, args.device)
    truth = reference.run(dims, params, x, y, torch.float32, args.device, dropped=dropped)
    logits_limit, limits = yardstick(kind, dims, params, x, y, args.device, dropped, truth)
    write_tensors(path("theirs.bin"), dims, x, y, truth[0].cpu().numpy(), truth[1], to_numpy(truth[2]))
    our_tensors(args, precision, path("model.bin"), path("theirs.bin"), path("ours.bin"),
                2 if p else 1, f"--dropout {p}" if p else "")
    title = f"{dims.text()} {BLOCKS[dims.block]} {NORMS[dims.norm]} dropout {p}"
    rows = compare_tensors(path("model.bin"), path("theirs.bin"), path("ours.bin"), limits,
                           math.inf if p else logits_limit)
    check_each(title, [row for row in rows if row[0] not in params or params[row[0]].size])
    loss, limit = read_tensors(path("ours.bin"), dims)["loss"], 2e-5 if kind == "float32" else 0.02
    check(abs(loss - truth[1]) <= limit, f"{title}: loss {loss:.6f}, PyTorch {truth[1]:.6f}, limit {limit:g}")


def check_blocks(args, precision):
    setup_device(args.device)
    for text, block, norm, p in itertools.product(args.sizes, range(3), range(2), (0, DROPOUT)):
        dims = dataclasses.replace(parse_model(text), block=block, norm=norm)
        try:
            check_block(args, precision, dims, p)
        except (CommandFailed, subprocess.TimeoutExpired, OSError, SystemExit) as e:
            check(False, f"{text} {BLOCKS[block]} {NORMS[norm]} dropout {p}: {e}")
    for name in ("model.bin", "theirs.bin", "ours.bin"):
        if os.path.exists(os.path.join(args.work, name)):
            os.unlink(os.path.join(args.work, name))


CHECKS = {"losses": (check_losses, ("FP32",)), "adamw": (check_adamw, ("FP32",)),
          "grads": (check_grads, ("FP32", "BF16", "FP16")),
          "curves": (check_curves, ("FP32", "BF16")), "published": (check_published, ("BF16",)),
          "splits": (check_splits, ("FP32", "BF16")), "rounding": (check_rounding, ("BF16",)),
          "blocks": (check_blocks, ("FP32", "BF16", "FP16"))}


def prepare(args):
    """PyTorch's side, unless it is there."""
    shard = ["--input_bin", f"{args.data}_all.bin"]
    model = ["--model", args.model]
    jobs = {"grads": (f"d12_T{args.lengths[-1]}_fp16.json", ["references", args.work] + model),
            "curves": ("curves.json", ["curves", os.path.join(args.work, "curves.json")] + model + shard),
            "published": ("published.json", ["published", args.work] + shard),
            "splits": ("splits.json", ["splits", args.work] + model),
            "rounding": ("splits.json", ["splits", args.work] + model)}
    for name in args.only:
        if name in jobs and not os.path.exists(os.path.join(args.work, jobs[name][0])):
            print("== PyTorch: " + jobs[name][1][0], flush=True)
            command = [sys.executable, os.path.join(HERE, "compare.py")]
            command += jobs[name][1] + ["--device", args.device]
            try:
                print(run(command, timeout=900), end="", flush=True)
            except (CommandFailed, subprocess.TimeoutExpired) as e:
                check(False, f"PyTorch's side of {name}: {e}")


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--work", default="build/reference", help="folder for PyTorch's files; about 8 GB")
    p.add_argument("--precisions", default="FP32,BF16,FP16")
    p.add_argument("--only", default=",".join(CHECKS))
    p.add_argument("--build", type=int, default=1, help="0: the binaries are there")
    p.add_argument("--train", default="./train_gpt2cu", help="may contain {precision}")
    p.add_argument("--test", default="./test_gpt2cu", help="may contain {precision}")
    p.add_argument("--dump", default="{test} dump-grads {model} {tensors} {out} {micro_steps} {extra}")
    p.add_argument("--data", default=train_gpt2.SHARDS.rstrip("_"),
                   help="tinyshakespeare shards up to _train.bin, _val.bin, _all.bin")
    p.add_argument("--lengths", default="64,1024", help="sequence lengths of the gradient references")
    p.add_argument("--model", default="d12")
    p.add_argument("--sizes", nargs="+", default=["L3,NH2,C40,T33,V509", "L2,NH12,C768,T64,V1000",
                                                  "L2,NH10,C1000,T40,V300"], help="of blocks")
    p.add_argument("--device", default="cuda")
    args = p.parse_args()
    args.only, args.lengths = args.only.split(","), args.lengths.split(",")
    args.model_flags = ["-e", args.model] if args.model != "d12" else []
    unknown = (set(args.only) - set(CHECKS)) | (set(args.precisions.split(",")) - set(TYPE))
    if unknown:
        p.error(f"unknown {' '.join(sorted(unknown))}; there are {' '.join(CHECKS)} and {' '.join(TYPE)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        skip("no GPU that PyTorch can use")
    else:
        os.makedirs(args.work, exist_ok=True)
        check_all(args)
    print("%d passed, %d failed, %d skipped" % (counts["passed"], counts["failed"], counts["skipped"]))
    raise SystemExit(1 if counts["failed"] else 0)


def check_all(args):
    prepare(args)
    for precision in args.precisions.split(","):
        print(f"== {precision}", flush=True)
        try:
            if args.build:
                run(["make", "-s", "train_gpt2cu", "test_gpt2cu", f"PRECISION={precision}"], timeout=900)
        except (CommandFailed, subprocess.TimeoutExpired) as e:
            check(False, f"build: {e}")
            continue
        for name in args.only:
            function, precisions = CHECKS[name]
            if precision not in precisions:
                continue
            try:
                function(args, precision)
            except (CommandFailed, subprocess.TimeoutExpired, OSError, SystemExit, KeyError) as e:
                check(False, f"{name}: {e}")


if __name__ == "__main__":
    main()
