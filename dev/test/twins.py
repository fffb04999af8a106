"""GPT-2 and its relatives in NumPy double: the judge of what the program computes.

    dims, p = doubles("run/model_00000005.bin")
    losses = row_losses(dims, p, windows(tokens, dims.maxT))    # of each window, in nats a token
    grads = gradients("model.bin", {}, "folder")                # the program's own, from one update

There is no backward pass: the program's gradients are held against differences of this loss. Files and random
numbers are those of dev/reference/formats.py; nothing here is shared with the C++ code.
"""
import math
import os
import random
import sys

import pytest

np = pytest.importorskip("numpy")

# pylint: disable=C0413
from checks import ROOT                                     # noqa: E402
from trainer import exact, model_path, run, sentences       # noqa: E402

sys.path.insert(0, os.path.join(ROOT, "dev/reference"))
import formats                          # noqa: E402  gives: Dims, read_checkpoint, init_params, PARAMS

SEED = 1337
BLOCKS, NORMS = ("sequential", "parallel", "parallel-tied"), ("layernorm", "rmsnorm")


# ---- the model ----

def normed(x, weight, bias, rms):
    x = x if rms else x - x.mean(-1, keepdims=True)
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight
    return y if rms else y + bias


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attention(p, l, x, heads):
    length, head = x.shape[1], x.shape[2] // heads
    qkv = (x @ p["qkvw"][l].T + p["qkvb"][l]).reshape(*x.shape[:2], 3, heads, head)
    q, k, v = (qkv[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(head) + np.triu(np.full((length, length), -np.inf), 1)
    y = (softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(x.shape)
    return y @ p["attprojw"][l].T + p["attprojb"][l]


ACTS = {"gelu": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3))),
        "swiglu": lambda gate, up: gate / (1 + np.exp(-gate)) * up, "relu2": lambda x: np.maximum(x, 0) ** 2}


def mlp(p, l, x):
    h = ACTS["gelu"](x @ p["fcw"][l].T + p["fcb"][l])
    return h @ p["fcprojw"][l].T + p["fcprojb"][l]


def logits(dims, p, tokens, dropout=0.0, step=0, seed=SEED):
    """(B,T,V) of tokens (B,T); dropout: as in the first micro-step of update `step`."""
    rms, tied = dims.norm == 1, dims.block == 2

    def dropped(x, place):
        if not dropout:
            return x
        factors = formats.dropout_factors(seed, step, place, 0, x.size // dims.C, dims.C, dropout)
        return x * factors.reshape(x.shape)

    tokens = np.asarray(tokens)
    x = dropped(p["wte"][tokens] + p["wpe"][:tokens.shape[1]], 0)
    for l in range(dims.L):
        first = normed(x, p["ln1w"][l], None if rms else p["ln1b"][l], rms)
        added = dropped(attention(p, l, first, dims.NH), 1 + 2 * l)
        if dims.block == 0:
            x, added = x + added, 0.0
        second = first if tied else normed(x, p["ln2w"][l], None if rms else p["ln2b"][l], rms)
        x = x + added + dropped(mlp(p, l, second), 2 + 2 * l)
    return normed(x, p["lnfw"], None if rms else p["lnfb"], rms) @ p["wte"][:dims.V].T


def token_losses(dims, p, rows, **how):
    """(B,T) of rows (B,T+1)."""
    rows = np.asarray(rows)
    right = softmax(logits(dims, p, rows[:, :-1], **how))
    return -np.log(np.take_along_axis(right, rows[:, 1:, None], -1)[..., 0])


def row_losses(dims, p, rows, **how):
    return [float(x) for x in token_losses(dims, p, rows, **how).mean(-1)]


def mean_loss(dims, p, rows, **how):
    return float(token_losses(dims, p, rows, **how).mean())


def windows(tokens, length):
    """Rows of length + 1 tokens, in the order in which they lie."""
    return np.array([list(tokens[i:i + length + 1]) for i in range(0, len(tokens) - length, length)])


# ---- models and texts ----

def doubles(path):
    dims, params = formats.read_checkpoint(path)
    return dims, {name: x.astype(np.float64) for name, x in params.items()}


def trained(flags=None, name="trained", steps=60):
    """The path of a model that knows the words of sentences(); made once in each folder."""
    if not os.path.exists(name):
        result = run({"-x": steps, "-l": "1e-2", "-b": 8, **(flags or {}), "-o": name})
        assert result.code == 0, result.err
    return model_path(name)


def uneven_rows(count, length, seed=3):
    """Rows of `length` tokens and one more, each with its own share of letters that follow no rule."""
    rng = random.Random(seed)
    text = list(sentences(seed, count * length + 1))
    shares = [k / (count - 1) for k in range(count)]
    rng.shuffle(shares)
    for k, share in enumerate(shares):
        for t in range(k * length, (k + 1) * length):
            if rng.random() < share:
                text[t] = rng.randrange(97, 123)
    return text


def wide_model(path, text, version=3, scale=0.25, seed=1):
    """Random weights so wide that every one of them, and what stands far back, moves the loss."""
    dims, params, rng = formats.parse_model(text), {}, np.random.default_rng(seed)
    for name in formats.NAMES:
        centre = 1 if name in ("ln1w", "ln2w", "lnfw") else 0
        noise = rng.standard_normal(formats.param_shape(dims, name))
        params[name] = (centre + scale * noise).astype(np.float32)
    params["wte"][dims.V:] = 0
    formats.write_checkpoint(path, dims, params, version)
    return path


def hand_made(path, dims, **rows):
    """A checkpoint whose weights are zero but for those given; LayerNorms at their start."""
    params = {name: np.zeros(formats.param_shape(dims, name), np.float32) for name in formats.NAMES}
    for name in ("ln1w", "ln2w", "lnfw"):
        params[name][:] = 1
    for name, value in rows.items():
        params[name][:] = value
    formats.write_checkpoint(path, dims, params)
    return path


def constant_model(path, says, V=256, length=64):
    """Says the same logits whatever it reads: {token: logit}, others -100. Exact in every precision."""
    dims = formats.Dims(maxT=length, V=V, L=1, NH=1, C=16)
    wte, bias = np.zeros((dims.Vp, dims.C), np.float32), np.zeros(dims.C)
    wte[:V, 0], bias[0] = -100, 1
    for token, logit in says.items():
        wte[token, 0] = logit
    return hand_made(path, dims, wte=wte, lnfw=0, lnfb=bias)


# ---- the family of Llama ----

SMALL = {"maxT": 21, "V": 256, "L": 2, "NH": 4, "C": 40, "NKV": 2, "HS": 16, "F": 72}    # NH * HS is not C
RELU2 = {"mlp": "relu2", "norm_weights": False, "embed_norm": True, "qk_norm": True}
FAMILY = {
    "Llama": {"theta": 500.0, "eps": 1e-3}, "Llama tied": {"tied": True},
    "Qwen3": {"qk_norm": True, "theta": 1e6},
    "Qwen3 tied": {"qk_norm": True, "tied": True, "eps": 1e-6}, "NanoChat": {**RELU2, "softcap": 1.5},
    "NanoChat tied": {**RELU2, "eps": 1e-3, "tied": True}}


def family_model(path, version=203, seed=7, **shape):
    """(dims, params) of a written model with weights that leave nothing out: no norm's are 1."""
    dims, rng, params = formats.Llama(**{**SMALL, **shape}), np.random.default_rng(seed), {}
    for name in formats.NAMES:
        size = formats.param_shape(dims, name)
        x = rng.standard_normal(size)
        is_norm = name in ("ln1w", "ln2w", "lnfw", "qnw", "knw")
        params[name] = (1 + 0.3 * x if is_norm else x * max(size[-1], 1) ** -0.5).astype("<f4")
        if size[0] == dims.Vp:
            params[name][dims.V:] = 0
    params = formats.round_params(params, "bfloat16") if version == 205 else params
    formats.write_checkpoint(path, dims, params, version % 100)
    return dims, params


def family_logits(d, params, tokens):
    """(B,T,V) in double."""
    p = {name: x.astype(np.float64) for name, x in params.items() if x.size}

    def normed(x, name, l=...):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + d.eps) * (p[name][l] if name in p else 1)

    def turned(x):                                                      # (B,T,heads,HS)
        half = d.HS // 2
        angle = np.arange(x.shape[1])[:, None, None] * d.theta ** (-np.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = p["wte"][np.asarray(tokens)]
    x = normed(x, "none") if d.embed_norm else x
    mask = np.triu(np.full((x.shape[1],) * 2, -np.inf), 1)
    for l in range(d.L):
        qkv = (normed(x, "ln1w", l) @ p["qkvw"][l].T).reshape(*x.shape[:2], -1, d.HS)
        q, k, v = np.split(qkv, [d.NH, d.NH + d.NKV], 2)
        if d.qk_norm:
            q, k = normed(q, "qnw", l), normed(k, "knw", l)
        q, k, v = turned(q), *(np.repeat(each, d.NH // d.NKV, 2) for each in (turned(k), v))
        scores = np.einsum("bthd,bshd->bhts", q, k) / math.sqrt(d.HS) + mask
        y = np.einsum("bhts,bshd->bthd", softmax(scores), v)
        x = x + y.reshape(*x.shape[:2], -1) @ p["attprojw"][l].T
        h = normed(x, "ln2w", l) @ p["fcw"][l].T
        h = ACTS[d.mlp](*np.split(h, 1 + d.gated, -1))
        x = x + h @ p["fcprojw"][l].T
    logits = normed(x, "lnfw") @ p["wte" if d.tied else "headw"][:d.V].T
    return d.softcap * np.tanh(logits / d.softcap) if d.softcap else logits


def logits_of(dims, params, tokens):
    """Of either family, in double."""
    if dims.is_llama:
        return family_logits(dims, params, tokens)
    return logits(dims, {name: x.astype(np.float64) for name, x in params.items()}, tokens)


def greedy(dims, params, prompt, count, gap=1e-4):
    """Prompt and text; the two best logits must not be nearer to each other than `gap`, for rounding."""
    tokens = list(prompt)
    for _ in range(count):
        last = logits_of(dims, params, [tokens])[0, -1]
        first, second = np.sort(last)[[-1, -2]]
        assert first - second > gap
        tokens.append(int(last.argmax()))
    return tokens


# ---- updates ----

def gradients(start, flags, folder):
    """The program's, from an update with eps 1 and no memory: it takes lr * g / (|g| + 1) off each weight."""
    assert exact(), "they cannot be seen in 16-bit weights"
    before = doubles(start)[1]
    result = run({"-a": 1, "-k": "constant", **flags, "-e": start, "-x": 1, "-l": 100, "--beta1": 0,
                  "--beta2": 0, "--eps": 1, "--grad-clip": 0, "-o": folder})
    assert result.code == 0, result.err
    after = doubles(model_path(folder))[1]
    taken = {name: (before[name] - after[name]) / 100 for name in before}
    return {name: x / (1 - np.abs(x)) for name, x in taken.items()}


def norm_of(grads):
    return math.sqrt(sum(float((g * g).sum()) for g in grads.values()))
