#!/usr/bin/env python3
"""PyTorch's compiled form of what `profile_gpt2cu norms` times, row for row: dropout, the addition to the
residual stream, one or two norms, forward and backward; in bf16 with fp32 weights. Where PyTorch or a GPU is
missing it says so. `make bench-ops` calls it.

    python3 dev/bench/norms.py [C ...]              default: 768 1600 4096 8192 16384
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
        return F.rms_norm(x.float(), x.shape[-1:], weight, 1e-5).bfloat16()
    return F.layer_norm(x.float(), x.shape[-1:], weight, bias, 1e-5).bfloat16()


def measure(C, norms, branches, p, rms, stream):
    torch.manual_seed(1)
    torch._dynamo.reset()
    n = ELEMENTS // C

    def tensor(dtype=torch.bfloat16):
        return torch.randn(n, C, device="cuda", dtype=dtype, requires_grad=True)
    inp, added = tensor(stream), [tensor() for _ in range(branches)]
    weights = [torch.ones(C, device="cuda", requires_grad=True) for _ in range(norms)]
    biases = [torch.zeros(C, device="cuda", requires_grad=True) for _ in range(norms)]

    @torch.compile
    def forward(x, added, weights, biases):
        for branch in added:
            x = x + (F.dropout(branch, p, True) if p else branch)
        return [x] + [norm(x, w, b, rms) for w, b in zip(weights, biases)]
    douts = [tensor(stream).detach()] + [tensor().detach() for _ in range(norms)]
    leaves = [inp, *added, *weights] + ([] if rms else biases)

    def both():
        torch.autograd.grad(forward(inp, added, weights, biases), leaves, douts)

    def alone():
        forward(inp, added, weights, biases)
    there = median_us(alone)
    return there, median_us(both) - there


def main():
    print(f"PyTorch {torch.__version__}, torch.compile, {torch.cuda.get_device_name()}")
    bf16, fp32 = torch.bfloat16, torch.float32
    for C in [int(word) for word in sys.argv[1:]] or [768, 1600, 4096, 8192, 16384]:
        print(f"C={C}, N={ELEMENTS // C}: forward us, backward us (both minus forward)")
        for name, *case in (("layernorm (GPT-2)", 1, 0, 0.0, False, bf16),
                            ("rmsnorm", 1, 0, 0.0, True, bf16),
                            ("two layernorms (parallel)", 2, 0, 0.0, False, bf16),
                            ("+ dropout(branch), layernorm", 1, 1, 0.1, False, bf16),
                            ("+ dropout(two branches), two layernorms", 2, 2, 0.1, False, bf16),
                            ("+ dropout(two branches), layernorm (tied)", 1, 2, 0.1, False, bf16),
                            ("+ branch, layernorm, stream in fp32", 1, 1, 0.0, False, fp32),
                            ("+ two branches, two layernorms, stream in fp32", 2, 2, 0.0, False, fp32)):
            print("  %-46s %7.0f %7.0f" % (name, *measure(C, *case)), flush=True)


if __name__ == "__main__":
    main()
