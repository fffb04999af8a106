#!/usr/bin/env python3
"""A model of a data-parallel step: its time against the number of GPUs, the wires and the size of the model.

    python3 dev/bench/scaling.py            # the tables of scaling.md
    python3 dev/bench/scaling.py --write    # puts them there, between its marks

The step is played through bucket by bucket: a layer's gradients leave when its backward is over, one
collective at a time, while the layers below are computed; what has not left when the backward ends is waited
for. Then the norm, AdamW, and, with ZeRO, the new parameters, of which the embedding's are waited for and the
others arrive while the next forward is computed. What is measured stands first, what is assumed second.
"""
import os
import sys

# ---- measured, on a host of eight H200s, by dev/bench/multi.sh (None: not yet) ----
#   name: ms of a whole step of one GPU (the mean of all eight at once), tokens of a micro-step, ms of AdamW
ONE_GPU = {
    "124M": (106.9, 64 * 1024, 1.1),
    "350M": None,
    "774M": None,
    "1558M": (305.5, 16 * 1024, 13.0),
}
#   (name, GPUs, -zs): ms of a step, the same micro-step on each GPU, no accumulation; the tree's order
SEVERAL_GPUS = {
    ("124M", 2, 0): 111.3, ("124M", 4, 0): 111.9, ("124M", 8, 0): 111.8,
    ("124M", 2, 1): 110.5, ("124M", 4, 1): 111.2, ("124M", 8, 1): 110.5, ("124M", 8, 2): 110.6,
    ("1558M", 8, 0): 318.8,
    ("1558M", 2, 1): 313.8, ("1558M", 4, 1): 309.1, ("1558M", 8, 1): 307.4, ("1558M", 8, 2): 307.2,
}
NVLINK = 330e9              # bytes/s out of a GPU, to the others of its host: 154 MB, 4 GPUs, copy engines
SLOWDOWN = 0.03             # of the compute while a collective runs beside it (GEMMs)

# ---- assumed ----
NIC = 50e9                  # bytes/s out of a GPU to other hosts: a 400 Gb/s network card for each GPU
HOST = 8                    # GPUs of a host
MEMORY = 4.2e12             # bytes/s of HBM, for AdamW: 30 bytes per parameter with master weights
ADAMW_BYTES = 30
RATE = (509e12, 555e12)     # flop/s at C=768 and C=1600 (from ONE_GPU); what lies between is interpolated,
#                             what is larger has the last
FIXED_MS = 0.15             # of a layer's forward and backward however few the tokens: launches, tails
GPU_BYTES = 141e9
COLLECTIVE_S = 20e-6        # to start any collective
MESSAGE_S = 1.5e-6          # for each peer that a GPU sends to directly
HOP_S = 2.75e-6             # for each step of a ring: 7 of 8 inside a host (2 us), one between hosts (8 us)

VP = 50304
#   name: L, C, T, rows of a micro-step
MODELS = {
    "124M": (12, 768, 1024, 64), "350M": (24, 1024, 1024, 32), "774M": (36, 1280, 1024, 16),
    "1558M": (48, 1600, 1024, 16), "6.7B": (32, 4096, 2048, 4), "13B": (40, 5120, 2048, 2),
}
SHAPES = {**MODELS, "30B": (60, 6400, 2048, 1), "65B": (80, 8192, 2048, 1)}


# ---- sizes ----

def buckets(name):
    """Parameters of a layer's matrices, of the embeddings, of all vectors together."""
    L, C, T, _ = SHAPES[name]
    return 12 * C * C, (VP + T) * C, L * 13 * C + 2 * C


def parameters(name):
    layer, embedding, vectors = buckets(name)
    return SHAPES[name][0] * layer + embedding + vectors


def flops(name):
    """Per token, forward and backward: of a layer, of the LM head."""
    _, C, T, _ = SHAPES[name]
    return 6 * 12 * C * C + 6 * T * C, 6 * VP * C


def rate(C):
    part = min(max((C - 768) / (1600 - 768), 0), 1)
    return RATE[0] + part * (RATE[1] - RATE[0])


def compute_ms(name, tokens):
    """Of a layer and of the head, forward and backward. A measured step comes out as measured."""
    L, C, _, _ = SHAPES[name]
    layer, head = (f * tokens / rate(C) * 1e3 for f in flops(name))
    measured = ONE_GPU.get(name)
    if measured:
        at_measured = sum(n * f for n, f in zip((L, 1), flops(name))) * measured[1] / rate(C) * 1e3
        scale = (measured[0] - measured[2]) / (at_measured + FIXED_MS * L)
    else:
        scale = 1.0
    return scale * (layer + FIXED_MS), scale * head


def adamw_ms(name, shards):
    measured = ONE_GPU.get(name)
    whole = measured[2] if measured else ADAMW_BYTES * parameters(name) / MEMORY * 1e3
    return whole / shards


# ---- wires ----

def wire_ms(count, element, gpus, how):
    """Of one collective over `count` elements, summed and left in shards, or gathered from them.
    flat: everyone sends to everyone. ring: NCCL's. host: inside each host first, then between the GPUs with
    the same place in their hosts."""
    if gpus == 1:
        return 0.0
    size, hosts, inside = count * element, max(gpus // HOST, 1), min(gpus, HOST)
    if how == "flat":
        peers, nvlink, nic = gpus - 1, (inside - 1) / gpus, (gpus - inside) / gpus
    else:                                   # a NIC carries the part of a shard of its host only
        peers, nvlink = inside - 1 + hosts - 1, (inside - 1) / inside
        nic = (hosts - 1) / hosts / inside
    start = COLLECTIVE_S + (HOP_S * (gpus - 1) if how == "ring" else MESSAGE_S * peers)
    return 1e3 * (start + max(size * nvlink / NVLINK, size * nic / NIC))    # the two links work at once


def step_ms(name, gpus, zs=1, how="flat", tokens=None, micro_steps=1):
    """(ms of a step, ms of it in which the compute waits)"""
    L, _, T, rows = SHAPES[name]
    layer_count, embedding, vectors = buckets(name)
    layer, head = compute_ms(name, tokens or rows * T)
    t = 0.0                                 # of the compute; the wires are busy until `wire`
    wire = busy = 0.0

    def send(count, element, ready):
        nonlocal wire, busy
        took = wire_ms(count, element, gpus, how)
        wire, busy = max(wire, ready) + took, busy + took
        return wire
    gather = []
    if zs >= 1:                             # first of all the parameters that the step before has updated
        gather = [send(count, 2, 0) for count in [embedding, vectors] + [layer_count] * L]
        t = gather[1]
    for micro in range(micro_steps):
        for l in range(L):
            t = max(t, gather[l + 2] if micro == 0 and gather else 0) + layer / 3
        t += head
        send_now = gpus > 1 and (zs == 2 or micro == micro_steps - 1)
        sums = 2 if zs == 0 else 1          # -zs 0: the sums go back to everyone, 4 bytes each way
        for l in range(L):
            t += layer * 2 / 3
            if send_now:
                for _ in range(sums):
                    send(layer_count, 4, t)
        if send_now:
            for count in (vectors, embedding):
                for _ in range(sums):
                    send(count, 4, t)
    computed = micro_steps * (L * layer + head)
    t = max(t, wire)
    t += wire_ms(8, 4, gpus, how) * 2       # the norm's parts, to everyone, and the loss
    t += adamw_ms(name, gpus if zs >= 1 else 1)
    t += SLOWDOWN * min(busy, computed)
    return t, t - computed - adamw_ms(name, gpus if zs >= 1 else 1)


def efficiency(name, gpus, **more):
    alone, _ = step_ms(name, 1, zs=0, tokens=more.get("tokens"), micro_steps=more.get("micro_steps", 1))
    return 100 * alone / step_ms(name, gpus, **more)[0]


def state_bytes(name, gpus, zs):
    """Of a GPU: bf16 parameters, fp32 gradients; master weights, m and v; two layers on their way."""
    n, layer = parameters(name), buckets(name)[0]
    grads, optimizer = (4 * n / (gpus if zs == 2 else 1), 12 * n / (gpus if zs >= 1 else 1))
    return 2 * n + grads + optimizer + (2 * 2 * 4 * layer if gpus > 1 else 0)


def activation_bytes(name, rows, recompute):
    """16 rows of C values a layer, in bf16: 12 without GELU's, 10 without LayerNorms'; and the logits."""
    L, C, T, _ = SHAPES[name]
    return rows * T * 2 * ((16, 12, 10)[recompute] * C * L + VP + 6 * C)


# ---- tables ----

def table(head, rows):
    lines = ["| " + " | ".join(str(x) for x in row) + " |" for row in [head, ["---"] * len(head)] + rows]
    return "\n".join(lines) + "\n"


def percent(x):
    return f"{x:.1f} %"


def measured_table():
    rows = []
    for (name, gpus, zs), ms in SEVERAL_GPUS.items():
        predicted = step_ms(name, gpus, zs)[0]
        alone = ONE_GPU[name][0]
        rows.append([name, gpus, zs] + [f"{x:.1f} ms, {percent(100 * alone / x)}" for x in (predicted, ms)])
    return table(["model", "GPUs", "-zs", "predicted", "measured"], rows)


def weak_table():
    rows = []
    for name, (_, _, T, batch) in MODELS.items():
        for zs, how in ((0, "flat"), (1, "flat"), (1, "host"), (1, "ring")):
            if parameters(name) > 2e9 and zs == 0:
                continue                            # does not fit a GPU, see below
            cells = [percent(efficiency(name, n, zs=zs, how=how)) for n in (2, 4, 8, 64, 1024)]
            rows.append([name, f"{batch}x{T}", zs, how] + cells)
    return table(["model", "B x T", "-zs", "wires", 2, 4, 8, 64, 1024], rows)


def wires_table():
    """ms a step of 64 GPUs in eight hosts, whether hidden or not."""
    rows = []
    for name in MODELS:
        layer, embedding, vectors = buckets(name)
        counts = [layer] * MODELS[name][0] + [embedding, vectors]
        cells = [sum(wire_ms(n, 4, 64, how) for n in counts) for how in ("flat", "host", "ring")]
        backward = compute_ms(name, MODELS[name][2] * MODELS[name][3])[0] * MODELS[name][0] * 2 / 3
        rows.append([name, f"{4e-9 * sum(counts):.2f} GB", *(f"{x:.1f}" for x in cells), f"{backward:.0f}"])
    return table(["model", "fp32 gradients", "flat", "host first", "ring", "backward of the layers"], rows)


def strong_table():
    """A total batch that does not grow with the GPUs; percent of one GPU that accumulates all of it."""
    rows = []
    for name, total in (("124M", 2**19), ("1558M", 2**20), ("6.7B", 2**21), ("13B", 2**22)):
        _, _, T, most = MODELS[name]
        one = step_ms(name, 1, zs=0, micro_steps=total // (most * T))[0]
        for gpus in (8, 64, 256, 1024):
            batch = total // (T * gpus)             # rows of each GPU
            if batch == 0:
                rows.append([name, total, gpus, "less than a row", "", "", ""])
                continue
            b = min(batch, most)
            cells = []
            for how in ("flat", "host"):
                ms, _ = step_ms(name, gpus, 1, how, b * T, batch // b)
                cells.append(f"{ms:.0f} ms, {percent(100 * one / gpus / ms)}")
            ms, _ = step_ms(name, gpus, 2, "host", b * T, batch // b)
            cells.append(f"{ms:.0f} ms, {percent(100 * one / gpus / ms)}")
            rows.append([name, total, gpus, f"{batch // b} x {b} x {T}"] + cells)
    return table(["model", "total batch", "GPUs", "micro-steps x B x T", "-zs 1, flat", "-zs 1, host first",
                  "-zs 2, host first"], rows)


def memory_table():
    rows = []
    for name in SHAPES:
        cells = []
        for gpus, zs in ((1, 0), (8, 1), (8, 2), (64, 1), (64, 2), (1024, 2)):
            fits = "" if state_bytes(name, gpus, zs) + activation_bytes(name, 1, 2) < GPU_BYTES else " (no)"
            cells.append(f"{state_bytes(name, gpus, zs) / 1e9:.1f}{fits}")
        rows.append([name] + cells + [f"{activation_bytes(name, 1, 2) / 1e9:.1f}"])
    return table(["model", "1 GPU", "8, -zs 1", "8, -zs 2", "64, -zs 1", "64, -zs 2", "1024, -zs 2",
                  "a row's activations, -r 2"], rows)


def tokens_to_hide():
    """Tokens a GPU needs in a micro-step so that its backward (4 flop per parameter and token) is as long as
    the exchange of 4 bytes per parameter."""
    r = rate(1600)
    return {"NVLink, inside a host": 4 / NVLINK * r / 4, "host first, between hosts": 4 / HOST / NIC * r / 4,
            "flat, between hosts": 4 / NIC * r / 4}


TABLES = {
    "measured": measured_table, "weak": weak_table, "wires": wires_table, "strong": strong_table,
    "memory": memory_table,
    "hide": lambda: table(["wires", "tokens a GPU needs"], [[k, f"{v:,.0f}"] for k, v in
                                                            tokens_to_hide().items()]),
}


def main():
    if sys.argv[1:] not in ([], ["--write"]):
        sys.exit("usage: scaling.py [--write]")
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "scaling.md")
    if not sys.argv[1:]:
        print("\n".join(f"{name}\n{make()}" for name, make in TABLES.items()), end="")
        return
    with open(path, encoding="utf-8") as f:
        text = f.read()
    for name, make in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, _, rest = text.partition(begin)
        after = rest.partition(end)[2]
        if not after:
            sys.exit(f"error: {path} has no marks {begin.strip()} and {end}")
        text = before + begin + make() + end + after
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)


if __name__ == "__main__":
    main()
