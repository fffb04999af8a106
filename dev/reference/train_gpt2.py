#!/usr/bin/env python3
"""Trains GPT-2 in PyTorch beside ours: same initial weights, data order, optimizer and schedule.

    python dev/reference/train_gpt2.py --total_batch_size=512
    ./train_gpt2cu -b 4 -t 64 -l 1e-4 -v 0 -s 0 -a 1 -x 10 -f 0 -z 512      # FP32 build: same losses to 1e-4

With --write_tensors 1 it first writes the reference files of the first batch (see reference.py).
"""
import argparse
import contextlib
import math
import re
import sys
import time

try:
    import torch
except ImportError:
    sys.exit("error: no PyTorch in this Python\nhint: pip install torch numpy, in a venv of yours")

import reference
from formats import Loader, init_params, parse_model, read_checkpoint, write_checkpoint
from gpt2 import (MuonAndAdamW, get_params, learning_rate, load_params, make_optimizer, new_model,
                  setup_device, update)

SHARDS = "dev/data/tinyshakespeare/tiny_shakespeare_"


def parse_arguments(argv):
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False,
                                usage="%(prog)s [--FLAG VALUE]... (--help lists the flags)")
    p.add_argument("--input_bin", default=SHARDS + "train.bin", help="pattern of training shards")
    p.add_argument("--input_val_bin", default="", help="pattern of validation shards")
    p.add_argument("--shuffle", type=int, default=1, choices=(0, 1), help="0: shards and windows in order")
    p.add_argument("--model", default="d12",
                   help="d12 d24 d36 d48, gpt3:c768, L4,NH4,C128,T128,V256, FILE.bin, or m12, qwen3:0.6B, "
                        "llama:... as in formats.py")
    p.add_argument("--seed", type=int, default=1337)
    p.add_argument("--init", default="gpt2", choices=("gpt2", "wide-positions"), help="see formats.py")
    p.add_argument("--batch_size", type=int, default=4)
    p.add_argument("--sequence_length", type=int, default=64)
    p.add_argument("--total_batch_size", type=int, default=0, help="tokens per step; 0: one micro-step")
    p.add_argument("--num_iterations", type=int, default=10)
    p.add_argument("--learning_rate", type=float, default=1e-4)
    p.add_argument("--warmup_iters", type=int, default=0)
    p.add_argument("--learning_rate_decay_frac", type=float, default=0.0, help="final fraction (ours: -q)")
    p.add_argument("--weight_decay", type=float, default=0.0)
    p.add_argument("--beta1", type=float, default=0.9)
    p.add_argument("--beta2", type=float, default=0.95)
    p.add_argument("--eps", type=float, default=1e-8)
    p.add_argument("--grad_clip", type=float, default=1.0, help="0: off")
    p.add_argument("--embedding_lr", type=float, default=0.0, help="AdamW's rate of wte; 0: --learning_rate")
    p.add_argument("--head_lr", type=float, default=0.0, help="of an untied head; 0: --learning_rate")
    p.add_argument("--optimizer", default="adamw", choices=("adamw", "muon"))
    p.add_argument("--muon_lr", type=float, default=0.02, help="this and the next two as ours")
    p.add_argument("--muon_momentum", type=float, default=0.95)
    p.add_argument("--muon_decay", type=float, default=0.01)
    p.add_argument("--muon_bf16", type=int, default=1, choices=(0, 1),
                   help="1: torch.optim.Muon as it is; 0: its products in the weights' type")
    p.add_argument("--overfit_single_batch", type=int, default=1, choices=(0, 1), help="1: one batch")
    p.add_argument("--val_loss_every", type=int, default=0)
    p.add_argument("--val_max_steps", type=int, default=20)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                   choices=("cpu", "cuda"))
    p.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float64"),
                   help="bfloat16: autocast")
    p.add_argument("--pure_bf16", type=int, default=0, choices=(0, 1), help="1: weights and moments in bf16")
    p.add_argument("--tensorcores", type=int, default=0, choices=(0, 1), help="1: TF32")
    p.add_argument("--compile", type=int, default=0, choices=(0, 1))
    p.add_argument("--compile_mode", default="default")
    p.add_argument("--flash", type=int, default=1, choices=(0, 1), help="0: attention written out")
    p.add_argument("--fused", type=int, default=0, choices=(0, 1), help="fused AdamW")
    p.add_argument("--deterministic", type=int, default=1, choices=(0, 1), help="0: PyTorch's own choices")
    p.add_argument("--write_tensors", type=int, default=0, choices=(0, 1))
    p.add_argument("--write_final", default="", help="write the trained weights here (.bin, version 3)")
    p.add_argument("--output_prefix", default="", help="of the reference files; default: the model's name")
    args = p.parse_args(argv)
    BT = args.batch_size * args.sequence_length
    args.total_batch_size = args.total_batch_size or BT
    if min(args.batch_size, args.sequence_length, args.num_iterations + 1) < 1:
        p.error("--batch_size and --sequence_length must be positive")
    if args.total_batch_size % BT or args.total_batch_size < BT:
        p.error(f"--total_batch_size {args.total_batch_size} must be a multiple of {BT}, one micro-step")
    return args


def initial_weights(args):
    """(dims, params): from a file, or drawn from the seed."""
    if args.model.endswith(".bin"):
        return read_checkpoint(args.model)
    dims = parse_model(args.model)
    return dims, init_params(dims, args.seed, args.init)


def training_loader(args, dims):
    """Overfitting takes the first batch as it lies in the file, as ours does."""
    shuffle = bool(args.shuffle) and not args.overfit_single_batch
    return Loader(args.input_bin, args.batch_size, args.sequence_length, shuffle, args.seed, dims.V)


def dtype_of(args):
    return torch.bfloat16 if args.pure_bf16 else torch.float64 if args.dtype == "float64" else torch.float32


def autocast(args):
    if args.dtype == "bfloat16" and not args.pure_bf16:
        return torch.autocast(args.device, torch.bfloat16)
    return contextlib.nullcontext()


def to_device(batch, args):
    return tuple(torch.from_numpy(a.copy()).to(args.device) for a in batch)


def validation_loss(loss_of, args, dims):
    """Mean over the first rows of the set, each once: the last batch may be a smaller one."""
    loader = Loader(args.input_val_bin, args.batch_size, args.sequence_length, False, args.seed, dims.V)
    rows = min(args.val_max_steps * args.batch_size, loader.samples_per_epoch)
    total, counted = 0.0, 0
    with torch.no_grad(), autocast(args):
        for row in range(0, rows, args.batch_size):
            live = min(args.batch_size, rows - row)
            x, y = to_device(loader.next(), args)
            if some := int((y[:live] >= 0).sum()):
                total += float(loss_of(x[:live], y[:live])) * some
                counted += some
    return total / counted


def train(args, dims, params, show=print):
    """Runs the whole training; returns one dict per step: loss, norm, lr, ms."""
    if not args.num_iterations and not args.input_val_bin and not args.write_final:
        return []                                   # only --write_tensors
    setup_device(args.device, tf32=bool(args.tensorcores), deterministic=bool(args.deterministic))
    if not args.deterministic:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    if args.sequence_length > dims.maxT:
        raise SystemExit(f"error: --sequence_length {args.sequence_length} exceeds the model's {dims.maxT}")
    raw = new_model(dims, args.device, bool(args.flash)).to(dtype_of(args))
    load_params(raw, params)
    mode = None if args.compile_mode == "default" else args.compile_mode
    loss_of = torch.compile(raw.loss, mode=mode) if args.compile else raw.loss
    make = MuonAndAdamW if args.optimizer == "muon" else make_optimizer
    optimizer = make(raw, vars(args), fused=bool(args.fused))
    peaks = [group["lr"] for group in optimizer.param_groups]
    micro_steps = args.total_batch_size // (args.batch_size * args.sequence_length)
    if args.num_iterations:
        loader = training_loader(args, dims)
        first = to_device(loader.next(), args)
        loader.position = 0
    steps = []
    for step in range(args.num_iterations + 1):
        last = step == args.num_iterations
        if args.input_val_bin and args.val_loss_every and (step % args.val_loss_every == 0 or last):
            show("val loss %.6f" % validation_loss(loss_of, args, dims))
        if last:
            break
        start = time.perf_counter()
        total = torch.zeros((), dtype=torch.float64, device=args.device)
        batches = [first if args.overfit_single_batch else to_device(loader.next(), args)
                   for _ in range(micro_steps)]
        counted = sum((y >= 0).sum() for _, y in batches)       # of the whole step: a mean over these
        for x, y in batches:
            if not (y >= 0).any():
                continue
            with autocast(args):
                loss = loss_of(x, y) * ((y >= 0).sum() / counted)
            loss.backward()
            total += loss.detach()
        lr, *rates = (learning_rate(step, args.num_iterations, peak, args.warmup_iters,
                                    args.learning_rate_decay_frac) for peak in (args.learning_rate, *peaks))
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate
        norm = update(raw, optimizer, args.grad_clip)
        if args.device == "cuda":
            torch.cuda.synchronize()
        ms = 1000 * (time.perf_counter() - start)
        steps.append({"loss": float(total), "norm": norm, "lr": lr, "ms": ms})
        show("step %4d/%d | loss %.6f | norm %.4f | lr %.2e | %.2f ms | %.0f tok/s"
             % (step + 1, args.num_iterations, float(total), norm, lr, ms, 1000 * args.total_batch_size / ms))
    if args.write_final:
        write_checkpoint(args.write_final, dims, get_params(raw))
    return steps


def main(argv=None):
    args = parse_arguments(argv)
    dims, params = initial_weights(args)
    print(f"model {dims.text()} | {args.dtype}{' pure bf16' if args.pure_bf16 else ''} | {args.device} | "
          f"torch {torch.__version__}", flush=True)
    if args.write_tensors:
        loader = training_loader(args, dims)
        prefix = args.output_prefix or "gpt2_" + re.sub(r"[^\w.-]+", "_", args.model)
        command = "python dev/reference/train_gpt2.py " + " ".join(sys.argv[1:] if argv is None else argv)
        hyper = {k: getattr(args, k) for k in reference.HYPER}
        x, y = loader.next()
        made = reference.write(prefix, dims, params, x, y, hyper=hyper, device=args.device, command=command)
        print("wrote " + " ".join(made))
    steps = train(args, dims, params, lambda line: print(line, flush=True))
    if not all(math.isfinite(row["loss"]) for row in steps):
        raise SystemExit("error: the loss is not finite")


if __name__ == "__main__":
    main()
