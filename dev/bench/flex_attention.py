#!/usr/bin/env python3
"""Windows and documents by PyTorch's compiled FlexAttention, forward and backward, in BF16. Ours, at the same
shapes: build/cuda/attention B T HS NH WINDOW MEAN.

    python3 dev/bench/flex_attention.py B T HS NH [WINDOW [MEAN]]     MEAN: a document's mean length in tokens
"""
import sys

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def milliseconds(run, seconds=0.5):
    for _ in range(3):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    while sum(times) < 1000 * seconds:
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def main():
    B, T, HS, NH, window, mean = [*map(int, sys.argv[1:]), 0, 0][:6]
    torch.manual_seed(1)
    q, k, v, dout = (torch.randn(B, NH, T, HS, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    begins = torch.rand(B, T, device="cuda") < (1 / mean if mean else 0)
    document = begins.int().cumsum(1)

    def sees(b, _, query, key):
        seen = query >= key
        if window:
            seen = seen & (query - key < window)
        if mean:
            seen = seen & (document[b, query] == document[b, key])
        return seen

    mask = create_block_mask(sees, B if mean else None, None, T, T)
    attention = torch.compile(flex_attention)
    out = attention(q, k, v, block_mask=mask)
    forward = milliseconds(lambda: attention(q, k, v, block_mask=mask))
    backward = milliseconds(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
    print(f"FlexAttention B={B} T={T} NH={NH} HS={HS} window {window}, documents of {mean}: "
          f"forward {forward:.3f} ms, backward {backward:.3f} ms, both {forward + backward:.3f} ms")


main()
