#!/usr/bin/env python3
"""Holds blocks, norms and dropout against PyTorch's autograd. Last line: N passed, N failed, N skipped.

    python dev/reference/check_blocks.py --work build/blocks          # on a GPU; builds FP32, BF16 and FP16
    python dev/reference/check_blocks.py --device cpu --test ./test_gpt2cpu --precisions FP32 --build 0

Every block (sequential, parallel, parallel-tied) with every norm (layernorm, rmsnorm), without dropout and
with masks that formats.py recomputes from the trainer's random numbers, at each of --sizes: one batch, its
logits (which have no dropout), its loss and every gradient. Weights are drawn at random, all of them: no bias
is 0, no gain is 1. With dropout the batch goes in two micro-steps, whose masks are those of the rows' places.
Bounds as in check_gpu.py. FP32: logits 2e-5, gradients 1e-4, the loss 2e-5; 16 bits: logits and gradients at
most twice as far from PyTorch's fp32 as PyTorch is in the same type from the same weights, the loss 0.02.
"""
import argparse
import dataclasses
import itertools
import math
import os
import subprocess

import numpy as np
import torch

import reference
from check_gpu import TYPE, CommandFailed, check, check_each, counts, our_tensors, run, skip
from compare import batch, compare_tensors
from formats import (NAMES, dropout_factors, parse_model, read_tensors, round_params, write_checkpoint,
                     write_tensors)
from gpt2 import random_params, setup_device, to_numpy, undropped

BLOCKS, NORMS = ("sequential", "parallel", "parallel-tied"), ("layernorm", "rmsnorm")
SEED, DROPOUT, ROWS = 1337, 0.15, 4                     # SEED: the dump's


def masks(p, device):
    """gpt2.py's `dropped`: the masks of a first update, for rows of C, or of attention's T keys."""
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


def check_case(args, precision, dims, p):
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


def check_all(args):
    setup_device(args.device)
    for precision in args.precisions.split(","):
        print(f"== {precision}", flush=True)
        try:
            if args.build:
                run(["make", "-s", "test_gpt2cu", f"PRECISION={precision}"], timeout=900)
        except (CommandFailed, subprocess.TimeoutExpired) as e:
            check(False, f"build: {e}")
            continue
        for text, block, norm, p in itertools.product(args.sizes, range(3), range(2), (0, DROPOUT)):
            dims = dataclasses.replace(parse_model(text), block=block, norm=norm)
            try:
                check_case(args, precision, dims, p)
            except (CommandFailed, subprocess.TimeoutExpired, OSError, SystemExit) as e:
                check(False, f"{text} {BLOCKS[block]} {NORMS[norm]} dropout {p}: {e}")


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--work", default="build/blocks", help="folder for files that go again")
    p.add_argument("--precisions", default="FP32,BF16,FP16")
    p.add_argument("--build", type=int, default=1, help="0: the binaries are there")
    p.add_argument("--test", default="./test_gpt2cu", help="may contain {precision}")
    p.add_argument("--sizes", nargs="+", default=["L3,NH2,C40,T33,V509", "L2,NH12,C768,T64,V1000",
                                                  "L2,NH10,C1000,T40,V300"])
    p.add_argument("--device", default="cuda")
    args = p.parse_args()
    args.dump = "{test} dump-grads {model} {tensors} {out} {micro_steps} {extra}"
    if args.device == "cuda" and not torch.cuda.is_available():
        skip("no GPU that PyTorch can use")
    else:
        os.makedirs(args.work, exist_ok=True)
        check_all(args)
        for name in ("model.bin", "theirs.bin", "ours.bin"):
            if os.path.exists(os.path.join(args.work, name)):
                os.unlink(os.path.join(args.work, name))
    print("%d passed, %d failed, %d skipped" % (counts["passed"], counts["failed"], counts["skipped"]))
    raise SystemExit(1 if counts["failed"] else 0)


if __name__ == "__main__":
    main()
