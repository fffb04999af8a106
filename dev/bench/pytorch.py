#!/usr/bin/env python3
"""PyTorch's side of bench.py, which starts this: the back ends of its attention, and a training step in the
fastest form that we know.

    python3 dev/bench/pytorch.py -e d12 -b 64 -t 1024   # attention; other flags of the trainer are ignored
    python3 dev/bench/pytorch.py -e d12 -b 64 --step autocast --data SHARD      # until it is ended
    python3 dev/bench/pytorch.py -e qwen3:0.6B -b 8 -t 2048 --step bfloat16 --data SHARD
    python3 dev/bench/pytorch.py -e d12 -b 64 --attention flash --step bfloat16 --data SHARD
"""
import argparse
import dataclasses
import math
import os
import statistics
import sys
import time

try:
    import numpy as np
    import torch
except ImportError:
    sys.exit("PyTorch is not here")
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../reference"))
from formats import parse_model                                 # noqa: E402
from gpt2 import make_optimizer, new_model, setup_device       # noqa: E402

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION}
HYPER = {"learning_rate": 3e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0}


def median_ms(run, count=20):
    for _ in range(5):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:]))


def attention_times(dims, B, T, names):
    """{back end: (ms forward, ms backward)} of one layer without a window."""
    def tensor(heads):                          # (B,heads,T,HS), where a projection's rows lie
        x = torch.randn(B, T, heads, dims.HS, device="cuda", dtype=torch.bfloat16)
        return x.transpose(1, 2).requires_grad_()
    qkv = [tensor(heads) for heads in (dims.NH, dims.NKV, dims.NKV)]
    dout, times = tensor(dims.NH).detach(), {}

    def forward():
        return F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=dims.NH != dims.NKV)
    for name in names:
        try:
            with sdpa_kernel(BACKENDS[name]):
                there = median_ms(forward)
                both = median_ms(lambda: torch.autograd.grad(forward(), qkv, dout))
            times[name] = there, both - there
        except RuntimeError:                    # not for this GPU, type or head size
            pass
    return times


def initialise(model, L):
    for name, p in model.named_parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.02 / (math.sqrt(2 * L) if "proj" in name else 1))
        elif name.endswith("bias"):
            torch.nn.init.zeros_(p)


def steps(dims, B, T, kind, shard):
    """Forward, backward, clip, fused AdamW. Only the loss leaves the compiled function, so logits need not be
    stored; the padding of the vocabulary counts as tokens, because cutting it off would cost a copy. Ten
    steps between two waits: a training loop does not wait for each step either."""
    dims = dataclasses.replace(dims, V=dims.Vp)
    model = new_model(dims, "cuda")
    initialise(model, dims.L)
    model = model.to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    loss_of, optimizer = torch.compile(model.loss), make_optimizer(model, HYPER, fused=True)
    width = np.uint32 if np.fromfile(shard, "<i4", 1)[0] == 20240801 else np.uint16
    tokens = torch.from_numpy(np.fromfile(shard, width, offset=1024).astype(np.int64)).cuda()
    done, chunk = 0, 1
    while True:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(chunk):
            at = done * B * T % (len(tokens) - B * T)
            x, y = (tokens[at + i:at + i + B * T].view(B, T) for i in (0, 1))
            with torch.autocast("cuda", torch.bfloat16, enabled=kind == "autocast"):
                loss = loss_of(x, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            done += 1
        torch.cuda.synchronize()
        ms = 1e3 * (time.perf_counter() - start) / chunk
        for _ in range(chunk):
            print(f"step {done} | loss {loss.item():.6f} | {ms:.3f} ms |", flush=True)
        chunk = max(1, min(10, int(500 / ms)))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-e", "--model", default="d12")
    p.add_argument("-b", "--micro-batch", type=int, default=64)
    p.add_argument("-t", "--length", type=int, help="the longest of the model, if not given")
    p.add_argument("--step", choices=("bfloat16", "autocast"))
    p.add_argument("--attention", choices=BACKENDS, help="the back end, in place of the fastest")
    p.add_argument("--data", help="a shard")
    args, _ = p.parse_known_args()
    setup_device("cuda", tf32=True, deterministic=False)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True       # PyTorch's default
    dims = parse_model(args.model)
    length = args.length or dims.maxT
    names = [args.attention] if args.attention else list(BACKENDS)
    times = attention_times(dims, args.micro_batch, length, names)
    print(f"PyTorch {torch.__version__}: attention of a layer, ms forward, backward")
    for name, (forward, backward) in times.items():
        print(f"  {name:10} {forward:7.3f} {backward:7.3f}", flush=True)
    if not times:
        sys.exit(f"PyTorch's attention {' '.join(names)} does not run here")
    if args.step:
        chosen = [min(times, key=lambda name: sum(times[name]))]
        if dims.windows():                      # layers with a mask, for which "flash" has no form
            chosen.append("efficient")
        with sdpa_kernel([BACKENDS[name] for name in chosen]):
            steps(dims, args.micro_batch, length, args.step, args.data)


if __name__ == "__main__":
    main()
