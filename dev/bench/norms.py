#!/usr/bin/env python3
"""PyTorch's compiled form of what `profile_gpt2cu norms` times: dropout, the addition to the residual stream,
one or two norms, forward and backward, in bf16 with fp32 weights. Without PyTorch or a GPU it says so.

    python3 dev/bench/norms.py [C ...]              default: 768 1600 4096 8192; `make bench-ops` calls it
"""
import sys

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    print("PyTorch is not here: its times are left out")
    sys.exit(0)
if not torch.cuda.is_available():
    print("no GPU: PyTorch's times are left out")
    sys.exit(0)

ELEMENTS = 65536 * 768


def median_us(run):
    for _ in range(4):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(16)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in zip(events, events[1:]))
    return 1000 * times[len(times) // 2]


def norm(x, weight, bias, rms):
    if rms:
        return F.rms_norm(x.float(), x.shape[-1:], weight, 1e-5).to(x.dtype)
    return F.layer_norm(x.float(), x.shape[-1:], weight, bias, 1e-5).to(x.dtype)


def measure(C, branches, norms, p, rms):
    torch.manual_seed(1)
    torch._dynamo.reset()
    n = ELEMENTS // C

    def tensor():
        return torch.randn(n, C, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    inp, added = tensor(), [tensor() for _ in range(branches)]
    weights = [torch.ones(C, device="cuda", requires_grad=True) for _ in range(norms)]
    biases = [torch.zeros(C, device="cuda", requires_grad=True) for _ in range(norms)]

    @torch.compile
    def forward(x, added, weights, biases):
        for branch in added:
            x = x + (F.dropout(branch, p, True) if p else branch)
        return [x] + [norm(x, w, b, rms) for w, b in zip(weights, biases)]
    douts = [torch.randn_like(inp) for _ in range(1 + norms)]
    leaves = [inp, *added, *weights] + ([] if rms else biases)

    def both():
        torch.autograd.grad(forward(inp, added, weights, biases), leaves, douts)

    def alone():
        forward(inp, added, weights, biases)
    there = median_us(alone)
    return there, median_us(both) - there


def main():
    print(f"PyTorch {torch.__version__}, torch.compile, {torch.cuda.get_device_name()}")
    for C in [int(word) for word in sys.argv[1:]] or [768, 1600, 4096, 8192]:
        print(f"C={C}, N={ELEMENTS // C}: forward us, backward us (both minus forward)")
        for name, case in (("layernorm", (0, 1, 0.0, False)), ("+ branch, layernorm", (1, 1, 0.0, False)),
                           ("+ branch, rmsnorm", (1, 1, 0.0, True)),
                           ("+ dropout(branch), layernorm", (1, 1, 0.1, False)),
                           ("+ two branches, two layernorms", (2, 2, 0.0, False)),
                           ("+ dropout(two branches), two layernorms", (2, 2, 0.1, False)),
                           ("+ dropout(two branches), one layernorm", (2, 1, 0.1, False))):
            print("  %-46s %7.0f %7.0f" % (name, *measure(C, *case)), flush=True)


if __name__ == "__main__":
    main()
