"""GPT-2 in NumPy double, the judge of losses of rows and questions, and made-up models of both families.

    dims, p = doubles("run/model_00000005.bin")
    losses = row_losses(dims, p, windows(tokens, dims.maxT))    # of each window, in nats a token
    grads = gradients("model.bin", {}, "folder")                # the program's own, from one update

Files are those of dev/reference/formats.py; nothing here is shared with the C++ code. The judge of what else
models compute is PyTorch's fixtures, in test_gpt2.
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


# ---- the model ----

def normed(x, weight, bias):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight + bias


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def unseen(length, window, begins):
    """(T,T) or (B,1,T,T): -inf where a query sees no key: behind it; `window` or more before it, if that is
    not 0; in another document, where begins (B,T) is not None and says where one begins."""
    hidden = np.full((length, length), -np.inf)
    causal = np.triu(hidden, 1) + (np.tril(hidden, -window) if window else 0)
    if begins is None:
        return causal
    document = np.cumsum(begins, axis=1)
    return causal + np.where(document[:, None, :, None] != document[:, None, None, :], -np.inf, 0)


def attention(p, l, x, heads, hidden):
    head = x.shape[2] // heads
    qkv = (x @ p["qkvw"][l].T + p["qkvb"][l]).reshape(*x.shape[:2], 3, heads, head)
    q, k, v = (qkv[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(head) + hidden
    y = (softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(x.shape)
    return y @ p["attprojw"][l].T + p["attprojb"][l]


def mlp(p, l, x):
    x = x @ p["fcw"][l].T + p["fcb"][l]
    h = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))
    return h @ p["fcprojw"][l].T + p["fcprojb"][l]


def logits(dims, p, tokens, begins=None):
    """(B,T,V) of tokens (B,T); begins: as in unseen()"""
    tokens = np.asarray(tokens)
    x = p["wte"][tokens] + p["wpe"][:tokens.shape[1]]
    for l in range(dims.L):
        hidden = unseen(tokens.shape[1], dims.window_of(l), begins)
        x = x + attention(p, l, normed(x, p["ln1w"][l], p["ln1b"][l]), dims.NH, hidden)
        x = x + mlp(p, l, normed(x, p["ln2w"][l], p["ln2b"][l]))
    return normed(x, p["lnfw"], p["lnfb"]) @ p["wte"][:dims.V].T


def token_losses(dims, p, rows, begins=None):
    """(B,T) of rows (B,T+1)."""
    rows = np.asarray(rows)
    right = softmax(logits(dims, p, rows[:, :-1], begins))
    return -np.log(np.take_along_axis(right, rows[:, 1:, None], -1)[..., 0])


def row_losses(dims, p, rows, begins=None):
    return [float(x) for x in token_losses(dims, p, rows, begins).mean(-1)]


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
    "NanoChat tied": {**RELU2, "eps": 1e-3, "tied": True},
    "Mistral": {"window": 6, "pattern": "S"}, "Llama linear": {"rope_factor": 4.0},
    "Llama 3": {"theta": 100.0, "rope_factor": 8.0, "rope_low": 1.0, "rope_high": 4.0, "rope_original": 40.0},
    "Qwen2": {"qkv_bias": True, "eps": 1e-6, "theta": 1e6}, "Qwen2 tied": {"qkv_bias": True, "tied": True},
    "Qwen3 windows": {"qk_norm": True, "window": 5, "pattern": "SL"}}


BAD_ROPE = ["rope_factor=0.5", "rope_factor=2e6", "rope_low=1", "rope_factor=8,rope_low=1,rope_high=4",
            "rope_factor=8,rope_low=4,rope_high=4,rope_original=40", "rope_factor=8,rope_original=40",
            "rope_low=1,rope_high=4,rope_original=40"]


def family_version(dims, version):
    """What a file has that family_model writes as this version."""
    return version + 100 * formats.has_later_words(dims) + 1000 * bool(dims.window)


def family_model(path, version=203, seed=7, **shape):
    """(dims, params) of a written model with weights that leave nothing out: no norm's are 1."""
    dims, rng, params = formats.Llama(**{**SMALL, **shape}), np.random.default_rng(seed), {}
    for name in formats.NAMES:
        size = formats.param_shape(dims, name)
        x = rng.standard_normal(size)
        is_norm = name in ("ln1w", "ln2w", "lnfw", "qnw", "knw")
        params[name] = (1 + 0.3 * x if is_norm else x * max(size[-1], 1) ** -0.5).astype("<f4")
        if name in formats.BY_TOKEN:
            params[name][..., dims.V:, :] = 0
    params = formats.round_params(params, "bfloat16") if version == 205 else params
    formats.write_checkpoint(path, dims, params, version % 100)
    return dims, params


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
