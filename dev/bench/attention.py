#!/usr/bin/env python3
"""Our attention and PyTorch's by turns in one process, so that both have the same clock: BF16, causal.

    nvcc -std=c++17 -O3 -I. -DENABLE_BF16 -DATTENTION_LIBRARY -gencode arch=compute_90a,code=sm_90a \\
        -shared -Xcompiler -fPIC dev/cuda/attention.cu -o build/attention.so -lcublasLt
    python3 dev/bench/attention.py 8,16,1024,128 8,12,8192,64 2,16,8192,128         B,NH,T,HS of each
    python3 dev/bench/attention.py --theirs flex --window 256 64,6,1024,128
    python3 dev/bench/attention.py --theirs flex --documents 300 64,6,1024,128

A turn is a group of our calls, then as many of theirs, 1 ms and more, between CUDA events. Times are medians
in ms, and x is the median of the turns' quotients, theirs / ours: above 1 ours is faster. Each call takes the
next set of buffers, so that none finds its input in the L2. Their queries, keys and values are views of our
qkv (B,T,3*NH,HS), as a projection writes it, and their gradients are three tensors: nobody copies. First the
results must agree.
"""
import argparse
import ctypes
import itertools
import os
import statistics
import sys

try:
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
except ImportError:
    sys.exit("error: no PyTorch of 2.5 or later in this Python\nhint: pip install torch, in a venv of yours")

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
            "flex": SDPBackend.MATH}            # flex: FlexAttention, which asks for no back end
LIBRARY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../build/attention.so")
ALL_SETS = 200 << 20        # bytes: several times the L2
GROUP_FLOPS = 5e11          # of a group of forward calls
WARM_UP, TURNS, MOST_APART = 20, 100, 2e-2


def document_spans(begins):
    """(B,T,2): the first and the last position of each position's document."""
    T = begins.shape[1]
    at = torch.arange(T, device=begins.device)
    first = torch.where(begins, at, 0).cummax(1).values
    next_begin = torch.where(begins, at, T).flip(1).cummin(1).values.flip(1)        # at a position or behind
    last = F.pad(next_begin[:, 1:], (0, 1), value=T) - 1
    return torch.stack((first, last), 2).int().contiguous()


def flex(B, T, window, mean):
    """FlexAttention with a window, and documents of `mean` tokens, or 0: none; and the spans of those."""
    begins = torch.rand(B, T, device="cuda") < (1 / mean if mean else 0)
    begins[:, 0] = True
    document = begins.int().cumsum(1)

    def sees(b, _, query, key):
        seen = (query >= key) & (query - key < window)
        return seen & (document[b, query] == document[b, key]) if mean else seen
    mask = create_block_mask(sees, B if mean else None, None, T, T)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask), document_spans(begins) if mean else None


def pointer(tensor):
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def new_set(sizes, library, attention, window, spans):
    """[(our forward, theirs), (our backward, theirs)] on buffers of their own, after a check."""
    B, NH, T, HS = sizes
    qkv, dqkv, dout, out = (torch.randn(B, T, heads, HS, device="cuda", dtype=torch.bfloat16)
                            for heads in (3 * NH, 3 * NH, NH, NH))
    lse = torch.empty(B, NH, T, device="cuda")
    scratch = torch.empty(library.attention_library_scratch_bytes(B, T, NH), device="cuda", dtype=torch.uint8)
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in qkv.split(NH, 2)]
    theirs = {}

    def ours(run, *tensors):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        run(*map(pointer, tensors), B, T, NH, HS, window, pointer(spans), stream)

    def their_forward():
        theirs["out"] = attention(*leaves)

    def their_backward():
        theirs["grads"] = torch.autograd.grad(theirs["out"], leaves, dout.transpose(1, 2), retain_graph=True)
    runs = [(lambda: ours(library.attention_library_forward, out, lse, qkv), their_forward),
            (lambda: ours(library.attention_library_backward, dqkv, scratch, dout, out, qkv, lse),
             their_backward)]
    out.fill_(torch.nan)
    dqkv.fill_(torch.nan)
    for run in itertools.chain(*runs):
        run()
    for name, x, y in zip(("out", "dq", "dk", "dv"), (out, *dqkv.split(NH, 2)),
                          (theirs["out"].detach(), *theirs["grads"])):
        apart = ((x.transpose(1, 2).float() - y.float()).norm() / y.float().norm()).item()
        if not apart <= MOST_APART:
            sys.exit(f"error: {sizes}: {name} of both are {apart:.1e} apart, relative\n"
                     f"hint: rounding gives {MOST_APART} at most")
    return runs


def by_turns(pairs, calls):
    """Of pairs (ours, theirs), one of each set: median ms of a call of each, and of their quotients."""
    next_pair = itertools.cycle(pairs)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * (WARM_UP + TURNS) + 1)]
    events[0].record()
    for i, event in enumerate(events[1:]):
        for _ in range(calls):
            next(next_pair)[i % 2]()
        event.record()
    if events[-2].query():
        print("the GPU has waited for Python: the next line tells nothing", file=sys.stderr)
    torch.cuda.synchronize()
    ms = [a.elapsed_time(b) / calls for a, b in zip(events, events[1:])][2 * WARM_UP:]
    quotients = [theirs / ours for ours, theirs in zip(ms[::2], ms[1::2])]
    return "{:.4f} {:.4f} x {:.3f}".format(*map(statistics.median, (ms[::2], ms[1::2], quotients)))


def shape(text):
    B, NH, T, HS = map(int, text.split(","))
    return B, NH, T, HS


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("shapes", nargs="+", metavar="B,NH,T,HS", type=shape)
    p.add_argument("--theirs", choices=BACKENDS, default="cudnn")
    p.add_argument("--window", type=int, default=0, help="a token sees itself and the window - 1 before it")
    p.add_argument("--documents", type=int, default=0, help="of so many tokens, their mean")
    p.add_argument("--kernels", action="store_true", help="what each pass launches, by PyTorch's profiler")
    args = p.parse_args()
    if (args.window or args.documents) and args.theirs != "flex":
        p.error("--window and --documents need --theirs flex")
    if not os.path.exists(LIBRARY):
        sys.exit(f"error: {LIBRARY} is not there\nhint: --help says how it is made")
    if not torch.cuda.is_available():
        sys.exit("error: PyTorch sees no GPU here\nhint: nvidia-smi says whether there is one")
    library = ctypes.CDLL(LIBRARY)
    library.attention_library_scratch_bytes.restype = ctypes.c_size_t
    library.attention_library_init()
    torch.manual_seed(1)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, "
          f"cuDNN {torch.backends.cudnn.version()}; ms ours, {args.theirs}")
    for B, NH, T, HS in args.shapes:
        attention, spans = (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)), None
        if args.theirs == "flex":
            attention, spans = flex(B, T, args.window or T, args.documents)
        with sdpa_kernel(BACKENDS[args.theirs]):
            count = max(2, -(-ALL_SETS // (16 * B * T * NH * HS)))     # a set: qkv, out and their gradients
            sets = [new_set((B, NH, T, HS), library, attention, args.window, spans) for _ in range(count)]
            calls = max(1, round(GROUP_FLOPS / (2 * B * NH * T * T * HS)))
            forward, backward = (by_turns(pairs, calls) for pairs in zip(*sets))
            print(f"({B},{NH},{T},{HS})  forward {forward}  backward {backward}", flush=True)
            for run in itertools.chain(*sets[0]) if args.kernels else ():
                with torch.profiler.profile() as profile:
                    run()
                    torch.cuda.synchronize()
                print(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=8))


if __name__ == "__main__":
    main()
