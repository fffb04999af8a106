"""dev/hf.py llama2c: what the program computes with a model of llama2.c, held against a forward in
NumPy that rotates neighbours as llama2.c does, with heads as narrow as they are there.

    pytest dev/test/test_llama2c.py
    STORIES260K=stories260K.bin pytest dev/test/test_llama2c.py         # and the trained one
"""
import math
import os
import sys

import pytest

from checks import ROOT, write
from trainer import run_ok, write_shard
from twins import formats, np, softmax, windows

sys.path.insert(0, os.path.join(ROOT, "dev/eval"))
import import_llama2c                               # noqa: E402

pytestmark = pytest.mark.cpu_only
FIELDS = ("C", "F", "L", "NH", "NKV", "V", "T")
SHAPES = {"narrow heads": (40, 44, 2, 5, 1, 61, 19), "untied": (64, 40, 2, 2, 2, -128, 24),
          "odd groups": (48, 28, 1, 2, 1, 50, 16)}                          # heads of 8, 32 and 24


def made_up(path, shape, seed=7):
    """A file with weights that leave nothing out."""
    C, F, L, NH, NKV, V, T = shape
    rng, kv = np.random.default_rng(seed), C // NH * NKV
    matrices = [(L, C, C), (L, kv, C), (L, kv, C), (L, C, C)], [(L, F, C), (L, C, F), (L, F, C)]
    parts = [rng.standard_normal((abs(V), C)), 1 + 0.3 * rng.standard_normal((L, C))]
    parts += [rng.standard_normal(size) * size[-1] ** -0.5 for size in matrices[0]]
    parts += [1 + 0.3 * rng.standard_normal((L, C))]
    parts += [rng.standard_normal(size) * size[-1] ** -0.5 for size in matrices[1]]
    parts += [1 + 0.3 * rng.standard_normal(C), np.full((2, T, C // NH // 2), 9.0)]     # angles: not read
    parts += [rng.standard_normal((-V, C))] if V < 0 else []
    return write(path, np.array(shape, "<i4").tobytes() + b"".join(x.astype("<f4").tobytes() for x in parts))


def logits_of(path, tokens):
    """(B,T,V) in double from the file's bytes alone. A pair of neighbours is a complex number."""
    raw = open(path, "rb").read()
    C, F, L, NH, NKV, V, T = np.frombuffer(raw, "<i4", 7).tolist()
    HS, at = C // NH, 28

    def take(*shape):
        nonlocal at
        array = np.frombuffer(raw, "<f4", math.prod(shape), at).reshape(shape).astype(np.float64)
        at += 4 * array.size
        return array

    wte, ln1 = take(abs(V), C), take(L, C)
    wq, wk, wv, wo = take(L, C, C), take(L, HS * NKV, C), take(L, HS * NKV, C), take(L, C, C)
    ln2, gate, down, up, lnf = take(L, C), take(L, F, C), take(L, C, F), take(L, F, C), take(C)
    take(2, T, HS // 2)
    head = take(-V, C) if V < 0 else wte
    assert at == len(raw)

    def normed(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight

    def heads(x, rotated):                              # (B,T,heads*HS) -> (B,heads,T,HS)
        x = x.reshape(*x.shape[:2], -1, HS // 2, 2).swapaxes(1, 2)
        if rotated:
            angles = np.outer(np.arange(x.shape[2]), 10000.0 ** (-2 * np.arange(HS // 2) / HS))
            turned = (x[..., 0] + 1j * x[..., 1]) * np.exp(1j * angles)
            x = np.stack([turned.real, turned.imag], -1)
        return x.reshape(*x.shape[:3], HS)

    x = wte[np.asarray(tokens)]
    future = np.triu(np.full((x.shape[1],) * 2, -np.inf), 1)
    for l in range(L):
        h = normed(x, ln1[l])
        q, k, v = heads(h @ wq[l].T, True), heads(h @ wk[l].T, True), heads(h @ wv[l].T, False)
        k, v = (np.repeat(each, NH // NKV, axis=1) for each in (k, v))
        y = softmax(q @ k.swapaxes(2, 3) / math.sqrt(HS) + future) @ v
        x = x + y.swapaxes(1, 2).reshape(x.shape) @ wo[l].T
        h = normed(x, ln2[l])
        g = h @ gate[l].T
        x = x + (g / (1 + np.exp(-g)) * (h @ up[l].T)) @ down[l].T
    return normed(x, lnf) @ head.T


def same_losses(path, tokens, T):
    """The program's loss of a shard with the converted model is that of the file."""
    dims, params = import_llama2c.converted(*import_llama2c.read_llama2c(path))
    formats.write_checkpoint("model.bin", dims, params)
    rows = windows(tokens, T)
    right = softmax(logits_of(path, rows[:, :-1]))
    want = -np.log(np.take_along_axis(right, rows[:, 1:, None], -1)).mean()
    shard = write_shard("tokens.bin", tokens)
    got = run_ok({"-e": "model.bin", "-i": shard, "-j": shard, "-b": 2, "-t": T, "-x": 0, "-v": 1})
    assert abs(got.val_losses()[0] - want) <= 3e-6, f"{got.val_losses()[0]}, expected {want}"


def same_logits_as_twin(path, tokens):
    """PyTorch's twin with the converted weights, in double: q's factor of a wider head is rounded to fp32."""
    torch = pytest.importorskip("torch")
    import gpt2                                         # pylint: disable=C0415
    dims, params = import_llama2c.converted(*import_llama2c.read_llama2c(path))
    model = gpt2.new_model(dims).double()
    gpt2.load_params(model, params)
    x = torch.from_numpy(np.asarray(tokens))
    got = model(x, x)[0].detach().numpy()
    want = logits_of(path, tokens)
    assert np.abs(got - want).max() <= 1e-5 * max(1.0, want.std())


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_made_up(shape):
    path, T = made_up("made_up.bin", shape), shape[-1]
    same_losses(path, np.random.default_rng(3).integers(0, abs(shape[-2]), 4 * T + 1).tolist(), T)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_twin(shape):
    path, T = made_up("made_up.bin", shape), shape[-1]
    same_logits_as_twin(path, np.random.default_rng(3).integers(0, abs(shape[-2]), (2, T)))


@pytest.mark.parametrize("change, said", [
    (lambda good: good[:20], "is not a llama2.c model"), (lambda good: good[:-4], "bytes, expected"),
    (lambda good: b"24ka" + good[4:], "not a llama2.c model"), (lambda good: good + b"x", "bytes, expected"),
    (lambda good: good[:16] + bytes([2]) + good[17:], "is not a llama2.c model")])
def test_refused(change, said):
    good = open(made_up("made_up.bin", SHAPES["narrow heads"]), "rb").read()
    write("bad.bin", change(good))
    with pytest.raises(SystemExit, match=said):
        import_llama2c.read_llama2c("bad.bin")


# ---- the trained one ----

# The published model's greedy text: "Once upon a time, there was a little girl named Lily. She loved to ..."
LILY = [1, 403, 407, 261, 378, 432, 383, 286, 261, 376, 298, 315, 421, 395, 317, 426, 338, 401, 396, 267, 337,
        410, 408, 419, 292, 411, 322, 265, 282, 295, 433, 426, 385, 328, 432, 358, 394, 261, 370, 432, 352]
PLACES = [0, 1, 15, 39], [1, 2, 100, 261, 403]              # positions, and tokens
LOGITS = [[8.4043, -6.2237, -6.2227, 9.5413, 17.0235], [3.8413, -9.5905, -9.5889, 10.8980, 10.6621],
          [4.9812, -3.8526, -3.8529, 2.9460, 9.8776], [-2.1570, -12.1994, -12.1989, 10.9821, -5.1472]]


@pytest.fixture
def trained():
    path = os.environ.get("STORIES260K", "")
    if not path:
        pytest.skip("STORIES260K does not name the file")
    return os.path.join(ROOT, path)


def test_trained(trained):
    logits = logits_of(trained, [LILY[:-1]])[0]
    assert np.abs(logits[np.ix_(*PLACES)] - LOGITS).max() <= 1e-4
    assert logits.argmax(-1).tolist() == LILY[1:]
    same_losses(trained, LILY, 20)
    same_losses(trained, LILY, 40)


def test_trained_twin(trained):
    same_logits_as_twin(trained, [LILY])
