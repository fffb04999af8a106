#!/usr/bin/env python3
"""nanochat's model and optimizer on our shards, beside a run of ours: losses by step and by second.

    git clone https://github.com/karpathy/nanochat          # tried with commit 92d63d4
    python3 dev/bench/beside_nanochat.py ../nanochat --data 'dev/data/english/english_*' --steps 600

From the checkout come nanochat/gpt.py, optim.py and what they import; nothing of it is changed. The rates,
their scaling with the batch, and the schedules are those of scripts/base_train.py; all of its defaults hold,
but for the vocabulary (GPT-2's), rows of --seq-len, and full attention in all layers, which it recommends
without FlashAttention 3. Attention is PyTorch's, cuDNN's first. Seconds are of training alone, without
compilation (the first two steps are made twice, from the same weights) and validation.

Prints `step N/M | loss X | MS ms |` and `val loss X @N`, as the trainer does. Validation: the first
--val-batches batches of rows of the validation shard, or of each of --sources, weighted as a mixture's are:

    --sources wikipedia:65,simple:16,novels:13,wikinews:5
"""
import argparse
import copy
import glob
import math
import os
import sys
import time

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

B_REF = 1 << 19             # tokens a step for which nanochat's rates hold
WARMUP, WARMDOWN, FINAL = 40, 0.65, 0.05


def rows_of(pattern, T):
    """(rows, T + 1) tokens: each row's last token is the next one's first."""
    files = sorted(glob.glob(pattern))
    if not files:
        sys.exit(f"no file is {pattern}")
    shards = [np.memmap(f, np.uint16, "r", 1024) for f in files]
    return [shard[at:at + T + 1] for shard in shards for at in range(0, len(shard) - T, T)]


def batch(rows, device):
    tokens = torch.from_numpy(np.stack(rows).astype(np.int64)).to(device, non_blocking=True)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def sources_of(text, data):
    """[(weight, PREFIX)] of wikipedia:65,novels:13, where data is the PREFIX of all."""
    sources = []
    for source in text.split(","):
        name, _, weight = source.partition(":")
        try:
            share = float(weight)
        except ValueError:
            share = 0.0
        if not 0 < share < math.inf:
            sys.exit(f"--sources wants NAME:WEIGHT,... with weights above 0, not '{source}'")
        if name and "*" not in data:
            sys.exit(f"--data {data} has no * for the names of --sources")
        sources.append((share, data.replace("*", name) if name else data))
    return sources


def learning_rate(step, steps):
    down = round(WARMDOWN * steps)
    if step < WARMUP:
        return (step + 1) / WARMUP
    left = min(1.0, (steps - step) / down)
    return left + (1 - left) * FINAL


def momentum(step, steps):
    down = round(WARMDOWN * steps)
    if step < 400:
        return 0.85 + (0.97 - 0.85) * step / 400
    return 0.97 - (0.97 - 0.90) * max(0.0, (step - (steps - down)) / down)


def train_step(model, optimizer, step, args, decay, data):
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * learning_rate(step, args.steps)
        if group["kind"] == "muon":
            group["momentum"] = momentum(step, args.steps)
            group["weight_decay"] = decay * 0.5 * (1 + math.cos(math.pi * step / args.steps))
    micro_steps = args.tokens // (args.batch * args.seq_len)
    for _ in range(micro_steps):
        loss = model(*next(data))
        (loss / micro_steps).backward()
    optimizer.step()
    model.zero_grad(set_to_none=True)
    return loss.detach()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("checkout")
    p.add_argument("--data", required=True, help="PREFIX of PREFIX_train*.bin and PREFIX_val*.bin")
    p.add_argument("--steps", type=int, default=600)
    p.add_argument("--depth", type=int, default=12)
    p.add_argument("--batch", type=int, default=64, help="rows at once")
    p.add_argument("--seq-len", type=int, default=1024)
    p.add_argument("--tokens", type=int, default=65536, help="a step")
    p.add_argument("--val-every", type=int, default=50)
    p.add_argument("--val-batches", type=int, default=7)
    p.add_argument("--sources", default=":1", help="NAME:WEIGHT,...; a name replaces the * of --data")
    p.add_argument("--seed", type=int, default=1337)
    args = p.parse_args()
    if args.tokens < 1 or args.tokens % (args.batch * args.seq_len):
        sys.exit(f"--tokens {args.tokens} is no multiple of --batch x --seq-len, {args.batch * args.seq_len}")
    sources = sources_of(args.sources, args.data)
    if not os.path.exists(os.path.join(args.checkout, "nanochat/gpt.py")):
        sys.exit(f"{args.checkout} has no nanochat/gpt.py: it is no checkout of nanochat")
    sys.path.insert(0, args.checkout)
    from nanochat.gpt import GPT, GPTConfig

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    C = -(-args.depth * 64 // 128) * 128
    config = GPTConfig(sequence_len=args.seq_len, vocab_size=50257, n_layer=args.depth, n_head=C // 128,
                       n_kv_head=C // 128, n_embd=C, window_pattern="L")
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device=device)
    model.init_weights()
    scale = (args.tokens / B_REF) ** 0.5
    decay = 0.28 * scale
    optimizer = model.setup_optimizer(unembedding_lr=0.008 * scale, embedding_lr=0.3 * scale,
                                      scalar_lr=0.5 * scale, matrix_lr=0.02 * scale, weight_decay=decay)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, of which {model.num_matmul_params()} "
          f"multiply each token; {torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}")
    compiled = torch.compile(model, dynamic=False)

    rows = rows_of(f"{args.data}_train*.bin", args.seq_len)
    held = []
    for weight, prefix in sources:
        found = rows_of(f"{prefix}_val*.bin", args.seq_len)[:args.batch * args.val_batches]
        if len(found) < args.batch:
            sys.exit(f"{prefix}_val*.bin has {len(found)} rows, fewer than --batch {args.batch}")
        held.append((weight, found))
    order = np.random.default_rng(args.seed).permutation(len(rows))

    def batches():
        at = 0
        while True:
            yield batch([rows[order[(at + i) % len(rows)]] for i in range(args.batch)], device)
            at += args.batch

    def validate(step):
        loss = 0.0
        for weight, found in held:
            with torch.no_grad():
                losses = [compiled(*batch(found[at:at + args.batch], device)).item()
                          for at in range(0, len(found) - args.batch + 1, args.batch)]
            loss += weight * sum(losses) / len(losses)
        print(f"val loss {loss / sum(weight for weight, _ in held):.6f} @{step}", flush=True)

    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
                     set_priority=True):
        before, start = copy.deepcopy(model.state_dict()), time.time()
        for step in range(2):
            train_step(compiled, optimizer, step, args, decay, batches())
        model.load_state_dict(before)
        optimizer.state.clear()
        validate(0)
        print(f"compiled and tried in {time.time() - start:.0f} s", flush=True)
        data, seconds = batches(), 0.0
        for step in range(args.steps):
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.time()
            loss = train_step(compiled, optimizer, step, args, decay, data).item()
            took = time.time() - start
            seconds += took
            print(f"step {step + 1}/{args.steps} | loss {loss:.6f} | {1e3 * took:.1f} ms | {seconds:.1f} s",
                  flush=True)
            if (step + 1) % args.val_every == 0 or step + 1 == args.steps:
                validate(step + 1)


if __name__ == "__main__":
    main()
