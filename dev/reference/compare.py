#!/usr/bin/env python3
"""What PyTorch does at full size, written down so that ours can be held against it. Meant for a GPU.

    P="python dev/reference/compare.py"
    $P references FOLDER      # d12_T64*, d12_T1024*: model, tensors and JSON (see reference.py)
    $P curves OUT.json        # 50 steps of tinyshakespeare, eager against compiled
    $P published FOLDER       # the published losses of the same recipe, and weights such as they came from
    $P splits FOLDER          # one batch split 1x32, 2x16, 8x4, 32x1; splits_*.bin, splits.json

Every subcommand takes --device and --model, prints a short table and exits 1 when something fails.
check_gpu.py runs ours against these files.
"""
import argparse
import json
import math
import os
import sys
import time

import torch

import reference
import train_gpt2
from formats import (NAMES, Loader, init_params, parse_model, rand_unit, read_checkpoint_header, read_tensors,
                     round_params, write_checkpoint, write_tensors)
from gpt2 import setup_device, to_numpy, versions

COMMAND = "python dev/reference/compare.py " + " ".join(sys.argv[1:])
HYPER = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0,
         "grad_clip": 1.0}
SUFFIX = {"float32": "", "bfloat16": "_bf16", "float16": "_fp16"}


def batch(dims, B, T, pattern, seed):
    """From a shard, or, without one, made-up text in which some tokens come often."""
    if pattern:
        return Loader(pattern, B, T, shuffle=False, vocab=dims.V).next()
    u = rand_unit(seed, 3, 99, B * T + 1)
    text = (dims.V * u ** 3).astype("int64")
    return text[:-1].reshape(B, T), text[1:].reshape(B, T)


def release():
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- references ----
def references(args):
    dims = parse_model(args.model)
    params = init_params(dims, args.seed)
    ok = True
    print("%-16s %10s %14s %14s %14s" % ("", "loss", "worst fp32/64", "worst bf16", "worst fp16"))
    for shape in args.shapes.split(","):
        B, T = (int(v) for v in shape.split("x"))
        for weights in args.weights.split(","):
            name = f"{args.prefix}_T{T}{SUFFIX[weights]}"
            x, y = batch(dims, B, T, args.input_bin, args.seed)
            prefix = os.path.join(args.folder, name)
            reference.write(prefix, dims, params, x, y, HYPER, args.device, command=COMMAND, weights=weights)
            info = json.load(open(prefix + ".json"))
            worst = [max(info[kind + "_grad_error"].values()) for kind in SUFFIX]
            print("%-16s %10.6f %14.2e %14.2e %14.2e" % (name, info["loss"], *worst), flush=True)
            ok = ok and worst[0] <= 1e-4 and all(math.isfinite(w) for w in worst)
            release()
    return ok


# ---- curves ----
def recipe_flags(args, steps):
    """The whole text in order, lr 6e-4 after 10 steps of warm-up, decay 0.1 on matrices, clip 1.0."""
    return ["--overfit_single_batch=0", "--shuffle=0", "--learning_rate=6e-4", "--warmup_iters=10",
            "--learning_rate_decay_frac=0.1", "--weight_decay=0.1", "--write_tensors=0",
            f"--input_bin={args.input_bin}", f"--model={args.model}", f"--batch_size={args.batch_size}",
            f"--sequence_length={args.sequence_length}", f"--num_iterations={steps}",
            f"--device={args.device}", f"--seed={args.seed}"]


def spread(a, b):
    return [abs(p - q) for p, q in zip(a, b)]


def curves(args):
    """The recipe from one set of weights. bf16 is autocast: float32 weights as in our default build.

    PyTorch's attention adds atomically in its backward, so the same program run twice differs, by as much as
    eager and compiled do: the spread is taken over all pairs of several runs of either. float64 is there to
    be printed."""
    flags = recipe_flags(args, args.steps)
    dims, params = train_gpt2.initial_weights(train_gpt2.parse_arguments(flags))
    recipe = vars(train_gpt2.parse_arguments(flags))
    data = {"command": COMMAND, "flags": flags, "recipe": recipe, "versions": versions(args.device)}
    for kind, dtype in (("float32", "float32"), ("autocast", "bfloat16")):
        losses = {"eager": [], "compiled": []}
        for how in ["eager", "compiled"] * args.runs + (["float64"] if kind == "float32" else []):
            run = train_gpt2.parse_arguments(flags + [
                f"--dtype={'float64' if how == 'float64' else dtype}", f"--compile={int(how == 'compiled')}",
                f"--flash={int(how != 'float64')}"])
            start = time.perf_counter()
            steps = [row["loss"] for row in train_gpt2.train(run, dims, params, show=lambda line: None)]
            losses.setdefault(how, []).append(steps)
            print("%-18s %6.1f s, loss %.6f -> %.6f" % (f"{kind} {how}", time.perf_counter() - start,
                                                        steps[0], steps[-1]), flush=True)
            release()
        data[f"{kind}_losses"] = losses
        pairs = [max(spread(a, b)) for a in losses["eager"] for b in losses["compiled"]]
        data[f"{kind}_pairs"] = sorted(pairs)
        print("%-18s %d pairs of eager and compiled: %.2e to %.2e"
              % (kind, len(pairs), min(pairs), max(pairs)))
    reference.write_json(args.out, data)
    return all(math.isfinite(v) for kind in ("float32", "autocast")
               for runs in data[f"{kind}_losses"].values() for losses in runs for v in losses)


# ---- the published curve ----
# Loss of steps 0-9 of the recipe: PyTorch, 124M, batch 16 x 1024, bf16 autocast, V = 50304.
PUBLISHED = [11.00, 10.40, 9.61, 9.37, 8.89, 8.79, 8.58, 8.27, 7.88, 7.53]


def published(args):
    """The published run from weights such as it must have had, in PyTorch; those weights as a file for ours.

    It did not start from GPT-2's init: from there the first steps fall faster (10.9, 9.5, ...) at ten times
    the published gradient norm. With positions from N(0,1), PyTorch's default, and the rest as in GPT-2 both
    fit; of the inits tried (dev/bench/NOTES.md) it is the only one that has the published jump of the norm at
    step 3."""
    run = train_gpt2.parse_arguments(recipe_flags(args, 10) + ["--dtype=bfloat16", "--init=wide-positions"])
    dims, params = train_gpt2.initial_weights(run)
    write_checkpoint(os.path.join(args.folder, "published_model.bin"), dims, params)
    steps = train_gpt2.train(run, dims, params, show=lambda line: None)
    losses = [row["loss"] for row in steps]
    reference.write_json(os.path.join(args.folder, "published.json"), {
        "command": COMMAND, "recipe": vars(run), "versions": versions(args.device), "published": PUBLISHED,
        "losses": losses, "norms": [row["norm"] for row in steps]})
    for what, row in (("published", PUBLISHED), ("PyTorch", losses), ("norm", [s["norm"] for s in steps])):
        print("%-10s %s" % (what, " ".join("%6.2f" % v for v in row)))
    return all(abs(a - b) <= 0.15 for a, b in zip(losses, PUBLISHED))


# ---- splits ----
SPLITS = (1, 2, 8)                                      # micro-steps of one batch


def splits(args):
    """How much PyTorch's own gradients move when one batch is split: the yardstick for ours."""
    setup_device(args.device)
    dims = parse_model(args.model)
    params = round_params(init_params(dims, args.seed), "bfloat16")
    x, y = batch(dims, args.rows, args.sequence_length, args.input_bin, args.seed)
    logits, loss, truth = reference.run(dims, params, x, y, torch.float32, args.device)
    write_checkpoint(os.path.join(args.folder, "splits_model.bin"), dims, params, version=5)
    write_tensors(os.path.join(args.folder, "splits_tensors.bin"), dims, x, y, logits.cpu().numpy(), loss,
                  to_numpy(truth))
    del logits
    data = {"command": COMMAND, "model": dims.text(), "rows": args.rows, "T": args.sequence_length,
            "versions": versions(args.device)}
    print("%-10s %s" % ("", " ".join("%9s" % n for n in NAMES)))
    for kind in ("float32", "autocast", "bfloat16"):
        grads = {}
        for micro_steps in SPLITS + (args.rows,):
            dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
            grads[micro_steps] = reference.run(dims, params, x, y, dtype, args.device, sdpa=True,
                                               autocast=kind == "autocast", micro_steps=micro_steps)[2]
            key = f"{kind}_error_{micro_steps}x{args.rows // micro_steps}"
            data[key] = reference.grad_errors(grads[micro_steps], truth)
        pairs = [reference.grad_errors(grads[a], grads[b]) for a in SPLITS for b in SPLITS if a < b]
        data[kind + "_split_difference"] = {n: max(pair[n] for pair in pairs) for n in NAMES}
        data[kind + "_accumulated_error"] = data[f"{kind}_error_{args.rows}x1"]
        for what in ("split_difference", "accumulated_error"):
            print("%-10s %s  %s" % (kind, " ".join("%9.1e" % data[f"{kind}_{what}"][n] for n in NAMES), what))
        release()
    reference.write_json(os.path.join(args.folder, "splits.json"), data)
    return all(math.isfinite(v) for k in data if k.endswith("_difference") for v in data[k].values())


# ---- ours against a reference ----
def compare_tensors(model, ref_path, our_path, grad_limits, logits_limit=math.inf):
    """Rows (name, error, limit, ok) of two files in the reference-tensor format. NaN is not ok."""
    dims = read_checkpoint_header(model)[0]
    ref, ours = read_tensors(ref_path, dims), read_tensors(our_path, dims)
    rows = []
    if not ((ref["x"] == ours["x"]).all() and (ref["y"] == ours["y"]).all()):
        raise SystemExit(f"error: '{ref_path}' and '{our_path}' are about different tokens")
    if math.isfinite(logits_limit):
        error = reference.logits_error(ours["logits"], ref["logits"])
        rows.append(("logits", error, logits_limit, error <= logits_limit))
    for name, error in reference.grad_errors(ours["grads"], ref["grads"]).items():
        rows.append((name, error, grad_limits[name], error <= grad_limits[name]))
    return rows


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    sub = p.add_subparsers(dest="what", required=True)

    def command(name, function, positional=(), **defaults):
        s = sub.add_parser(name, help=(function.__doc__ or name).split("\n")[0])
        s.set_defaults(function=function)
        for arg in positional:
            s.add_argument(arg)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        common = {"model": "d12", "seed": 1337, "input_bin": "", "device": device}
        for key, value in {**common, **defaults}.items():
            s.add_argument("--" + key, type=type(value), default=value)

    command("references", references, ["folder"], prefix="d12", shapes="4x64,1x1024",
            weights=",".join(SUFFIX))
    command("curves", curves, ["out"], steps=50, runs=3, batch_size=16, sequence_length=1024,
            input_bin=train_gpt2.SHARDS + "all.bin")
    command("published", published, ["folder"], model="L12,NH12,C768,T1024,V50304", batch_size=16,
            sequence_length=1024, input_bin=train_gpt2.SHARDS + "all.bin")
    command("splits", splits, ["folder"], rows=32, sequence_length=64)
    args = p.parse_args()
    raise SystemExit(0 if args.function(args) else 1)


if __name__ == "__main__":
    main()
