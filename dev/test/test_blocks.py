#!/usr/bin/env python3
"""Models that are not GPT-2, and dropout: what they compute, save and refuse.

    python3 dev/test/test_blocks.py ./train_gpt2cpu             # seconds; also ./train_gpt2cu, on a GPU

The judge is each model's loss in NumPy double, below. It has no backward pass: the gradients that the program
takes are held against differences of that loss, in random directions. Files and random numbers are those of
dev/reference/formats.py.
"""
import itertools
import json
import os
import struct
import subprocess
import sys

try:
    import numpy as np
except ImportError:
    sys.exit("error: no numpy\nhint: pip install -r dev/requirements.txt")

from checks import ROOT
from trainer import (Program, check, check_close, check_equal, check_refused, exact, main, model_path,
                     read_bytes, run, run_ok, sentences, skip, tolerance, without_checksum, write_bytes)

sys.path.insert(0, os.path.join(ROOT, "dev/reference"))
import formats                          # gives: Dims, read_checkpoint, dropout_factors, NAMES

B, T, C, L, SEED = 3, 12, 24, 2, 1337
MODEL = f"L{L},NH2,C{C},T{T},V256"
Program.usual = {"-e": MODEL, "-i": "train.bin", "-j": "val.bin", "-b": B, "-x": 1, "-v": 0, "-s": 0, "-f": 0,
                 "--seed": SEED}
BLOCKS, NORMS = ("sequential", "parallel", "parallel-tied"), ("layernorm", "rmsnorm")
VARIANTS = [kinds for kinds in itertools.product(range(3), range(2)) if kinds != (0, 0)]
NUMERIC = ("losses_and_gradients", "dropout_by_place", "dropout_aside", "recomputed", "saved", "samples",
           "updates", "residual_fp32")
RESIDUAL_WORD = 253         # of a model file's header: 1 where the residual stream was in fp32


# ---- the judge ----

def normed(x, weight, bias, rms):
    x = x if rms else x - x.mean(-1, keepdims=True)
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight
    return y if rms else y + bias


def attention(p, l, x, heads, dropped):
    length, head = x.shape[1], x.shape[2] // heads
    qkv = (x @ p["qkvw"][l].T + p["qkvb"][l]).reshape(*x.shape[:2], 3, heads, head)
    q, k, v = (qkv[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(head) + np.triu(np.full((length, length), -np.inf), 1)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    y = (dropped(e / e.sum(-1, keepdims=True)) @ v).transpose(0, 2, 1, 3).reshape(x.shape)
    return y @ p["attprojw"][l].T + p["attprojb"][l]


def mlp(p, l, x):
    h = x @ p["fcw"][l].T + p["fcb"][l]
    h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h ** 3)))
    return h @ p["fcprojw"][l].T + p["fcprojb"][l]


def logits(dims, p, tokens, dropout=0.0, step=0):
    """(B,T,V); dropout: as in the first micro-step of update `step`."""
    rms, tied = dims.norm == 1, dims.block == 2

    def dropped(x, place):                      # rows of C, or of attention's T keys
        if not dropout:
            return x
        width = x.shape[-1]
        factors = formats.dropout_factors(SEED, step, place, 0, x.size // width, width, dropout)
        return x * factors.reshape(x.shape)

    x = dropped(p["wte"][tokens] + p["wpe"][:tokens.shape[1]], 0)
    for l in range(dims.L):
        first = normed(x, p["ln1w"][l], None if rms else p["ln1b"][l], rms)
        weights_place = 1 + 2 * dims.L + l
        added = attention(p, l, first, dims.NH, lambda weights: dropped(weights, weights_place))
        added = dropped(added, 1 + 2 * l)
        if dims.block == 0:
            x, added = x + added, 0.0
        second = first if tied else normed(x, p["ln2w"][l], None if rms else p["ln2b"][l], rms)
        x = x + added + dropped(mlp(p, l, second), 2 + 2 * l)
    return normed(x, p["lnfw"], None if rms else p["lnfb"], rms) @ p["wte"][:dims.V].T


def loss_of(dims, p, window, dropout=0.0, step=0):
    y = logits(dims, p, window[:, :-1], dropout, step)
    y = y - y.max(-1, keepdims=True)
    right = np.take_along_axis(y, window[:, 1:, None], -1)[..., 0]
    return float((np.log(np.exp(y).sum(-1)) - right).mean())


# ---- models ----

def flags_of(block, norm):
    return {"--block": BLOCKS[block], "--norm": NORMS[norm]}


def trained(block, norm):
    """A model file that is away from its start, where biases are 0 and norms' weights 1."""
    folder = f"trained{block}{norm}"
    if not os.path.exists(folder):
        run_ok({**flags_of(block, norm), "-o": folder, "-x": 12, "-l": "1e-2"})
    return model_path(folder)


def doubles(path):
    dims, params = formats.read_checkpoint(path)
    return dims, {name: x.astype(np.float64) for name, x in params.items()}


def first_windows(count):
    tokens = np.array(list(sentences(1, 20000)))
    return np.stack([tokens[i * T:i * T + T + 1] for i in range(count)])


def after_one_update(start, folder, **flags):
    result = run_ok({"-e": start, "-a": 1, "-k": "constant", "-o": folder,
                     **{"--" + name.replace("_", "-"): value for name, value in flags.items()}})
    return result, formats.read_checkpoint(model_path(folder))[1]


def gradients(start, folder, **flags):
    """(run, gradients): an update with eps 1 and no memory takes lr * g / (|g| + 1) off each weight."""
    before = formats.read_checkpoint(start)[1]
    result, after = after_one_update(start, folder, learning_rate=100, beta1=0, beta2=0, eps=1, grad_clip=0,
                                     **flags)
    taken = {name: (before[name].astype(np.float64) - after[name]) / 100 for name in before}
    return result, {name: x / (1 - np.abs(x)) for name, x in taken.items()}


# ---- tests ----

def test_losses_and_gradients():
    """Of every kind of block and norm, with and without dropout."""
    windows = first_windows(B)
    rng = np.random.default_rng(5)
    cases = [(kinds, dropout) for kinds in [(0, 0)] + VARIANTS for dropout in (0, 0.15)]
    for i, ((block, norm), dropout) in enumerate(cases):
        start, what = trained(block, norm), f"{BLOCKS[block]}, {NORMS[norm]}, dropout {dropout}"
        dims, p = doubles(start)
        check_equal((dims.block, dims.norm), (block, norm), f"{what}: what the file says")
        result, grads = gradients(start, f"gradients{i}", dropout=dropout)
        judge = loss_of(dims, p, windows, dropout)
        check_close(result.losses(), [judge], tolerance(1e-5, 3e-2), f"{what}: loss")
        if not exact():
            continue                            # gradients cannot be seen in 16-bit weights
        for name in formats.NAMES:
            if p[name].size == 0:
                continue
            # a direction along the gradient, so that it is large, and at random, so that all of it counts
            size = np.sqrt((grads[name] ** 2).mean()) + 1e-12
            v = (grads[name] / size + rng.standard_normal(p[name].shape)) * 1e-4

            def at(t):
                return loss_of(dims, {**p, name: p[name] + t * v}, windows, dropout)
            want = (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / 12
            got = float((grads[name] * v).sum())
            check(abs(got - want) <= 2e-4 * abs(want) + 1e-10, f"{what}: gradient of {name}: {got}, {want}")


def test_updates():
    """AdamW takes the gradients as it takes GPT-2's; decay is of matrices alone."""
    if not exact():
        skip("the update cannot be seen in 16-bit weights")
        return
    for block, norm in ((1, 1), (2, 0)):
        start = trained(block, norm)
        p = doubles(start)[1]
        grads = gradients(start, f"update_gradients{block}")[1]
        got = after_one_update(start, f"updated{block}", learning_rate=0.01, weight_decay=0.5, grad_clip=0,
                               eps="1e-3")[1]
        for name, _, _, _, decays in formats.PARAMS:
            want = p[name] * (1 - 0.01 * 0.5 * decays) - 0.01 * grads[name] / (np.abs(grads[name]) + 1e-3)
            worst = float(np.abs(got[name] - want).max()) if want.size else 0.0
            check(worst <= 5e-5, f"{BLOCKS[block]}: {name} is off by {worst:.3g}")


def test_dropout_by_place():
    """A row's mask is its own: the same loss in one micro-step and in three; another in the next update."""
    start = trained(1, 0)
    dims, p = doubles(start)
    windows = first_windows(B)
    flags = {"-e": start, "--dropout": 0.3, "-l": 0, "--shuffle": 0, "-z": B * T}
    losses = [run_ok({**flags, "-b": b}).losses() for b in (B, 1)]
    check_close(losses[0], losses[1], tolerance(1e-6, 3e-2), f"{B} micro-steps of a row")
    result = run_ok({**flags, "-a": 1, "-x": 3})
    judged = [loss_of(dims, p, windows, 0.3, step) for step in range(3)]
    check_close(result.losses(), judged, tolerance(1e-5, 3e-2), "three updates of the same rows")
    check(len(set(result.losses())) == 3, f"masks of three updates that differ: losses {result.losses()}")
    other = run_ok({**flags, "-a": 1, "--seed": SEED + 1}).losses()
    check(abs(other[0] - result.losses()[0]) > tolerance(1e-4, 0), f"another seed has other masks: {other}")


def test_dropout_aside():
    """What is evaluated and written between the steps of a training with dropout knows none."""
    flags = {"-e": trained(0, 0), "-x": 3, "-l": 0, "-v": 1, "-m": 4, "-s": 1, "-g": T - 4}
    without, dropped = (run_ok({**flags, "--dropout": p}) for p in (0, 0.4))
    check_equal(dropped.val_losses(), without.val_losses(), "validation losses")
    check_equal(dropped.samples(), without.samples(), "texts")
    check(len(dropped.samples()) == 3, f"texts: {dropped.samples()}")
    check(dropped.losses() != without.losses(), f"losses of training: {dropped.losses()}")


def test_recomputed():
    """-r 0, 1 and 2: the same, masks too."""
    for flags in ({"--dropout": 0.2}, {**flags_of(1, 0), "--dropout": 0.2}, flags_of(2, 1), flags_of(1, 1)):
        files = []
        for r in (0, 1, 2):
            folder = f"recomputed{r}" + "".join(map(str, flags.values()))
            run_ok({**flags, "-x": 4, "-l": "1e-2", "-z": 2 * B * T, "-r": r, "-o": folder})
            files.append(read_bytes(model_path(folder)))
        check(files[0] == files[1] == files[2], f"{flags}: -r 0, 1 and 2 give the same bits")


def test_saved():
    """The file has a version of its own, says what it is, and goes on and is evaluated as that."""
    tokens = np.array(list(sentences(2, 3000)))
    count = len(tokens) // T - 1
    windows = np.stack([tokens[i * T:i * T + T + 1] for i in range(count)])
    for block, norm in VARIANTS:
        what, path = f"{BLOCKS[block]}, {NORMS[norm]}", trained(block, norm)
        header = struct.unpack("<10i", read_bytes(path)[:40])
        version = 105 if Program.precision == "BF16" else 103
        check_equal((header[1], header[8:]), (version, (block, norm)), f"{what}: its header")
        dims, p = doubles(path)
        absent = [name for name in formats.NAMES if p[name].size == 0]
        want = (["ln1b", "ln2b", "lnfb"] if norm == 1 else []) + (["ln2w", "ln2b"] if block == 2 else [])
        check_equal(sorted(absent), sorted(set(want)), f"{what}: tensors that it lacks")
        judge = [loss_of(dims, p, windows)]
        for model in (path, f"trained{block}{norm}"):
            result = run_ok({"-e": model, "-x": 0, "-b": 5, "-m": 1000, "-j": "val.bin", "-v": 1})
            check_close(result.val_losses(), judge, tolerance(1e-5, 3e-2), f"{what}: evaluated by {model}")
    # dropout is no part of a model: its file is GPT-2's, and evaluated without it
    run_ok({"--dropout": 0.4, "-o": "dropped", "-x": 2})
    check_equal(formats.read_checkpoint_header(model_path("dropped"))[1] in (3, 5), True, "GPT-2's version")
    dims, p = doubles(model_path("dropped"))
    validated = run_ok({"-e": model_path("dropped"), "--dropout": 0.4, "-x": 1, "-l": 0, "-v": 1, "-m": 1000})
    check_close(validated.val_losses()[:1], [loss_of(dims, p, windows)], tolerance(1e-5, 3e-2),
                "validation in training has no dropout")


def residual_word(path):
    return struct.unpack_from("<i", read_bytes(path), 4 * RESIDUAL_WORD)[0]


def check_greedy_text(path, what):
    """At temperature 0 each letter is the judge's choice, though each is computed beside what was kept."""
    dims, p = doubles(path)
    flags = {"-e": path, "-x": 0, "--prompt": "tak", "--temperature": 0, "-g": T - 4}
    text = run_ok(flags).samples()[0]
    ids = np.array([[0] + [ord(letter) for letter in text]])
    y = logits(dims, p, ids[:, :-1])[0]
    behind = [y[t].max() - y[t, ids[0, t + 1]] for t in range(3, ids.shape[1] - 1)]
    check(len(behind) > 2 and all(far <= tolerance(1e-4, 0.25) for far in behind),
          f"{what}: '{text}': letters {behind} behind")


def test_residual_fp32():
    """A stream in fp32: in FP32 the same bits, else others, near the judge; the model's file says it."""
    tokens = np.array(list(sentences(2, 3000)))
    windows = np.stack([tokens[i * T:i * T + T + 1] for i in range(len(tokens) // T - 1)])
    evaluation = {"-x": 0, "-b": 5, "-m": 1000, "-v": 1}
    for block, norm, dropout in ((0, 0, 0), (0, 0, 0.2), (1, 1, 0.1), (2, 0, 0), (2, 1, 0.2)):
        what, data = f"{BLOCKS[block]}, {NORMS[norm]}, dropout {dropout}", {}
        flags = {**flags_of(block, norm), "--dropout": dropout, "-x": 6, "-l": "1e-2", "-k": "constant"}
        for dtype in ("branch", "fp32"):
            folder = f"residual_{dtype}{block}{norm}{dropout}"
            run_ok({**flags, "--residual-dtype": dtype, "-o": folder})
            path = model_path(folder)
            data[dtype] = without_checksum(read_bytes(path))
            check_equal(residual_word(path), int(dtype == "fp32"), f"{what}: the word of {dtype}")
            dims, p = doubles(path)
            result = run_ok({"-e": folder, **evaluation})
            check_close(result.val_losses(), [loss_of(dims, p, windows)], tolerance(1e-5, 3e-2), what)
            check_equal("\nresidual stream: fp32" in result.out, dtype == "fp32" and not exact(),
                        f"{what}: what is said of {dtype}")
            start = trained(block, norm)
            dims, p = doubles(start)
            more = {"--residual-dtype": dtype, "--dropout": dropout}
            losses = run_ok({"-e": start, "-a": 1, **more}).losses()
            check_close(losses, [loss_of(dims, p, first_windows(B), dropout)], tolerance(1e-5, 3e-2), what)
        same = data["branch"][:4 * RESIDUAL_WORD] == data["fp32"][:4 * RESIDUAL_WORD]
        check(same, f"{what}: all else in the header")
        check_equal(data["branch"][1024:] == data["fp32"][1024:], exact(), f"{what}: the same weights")
        # -r 2 computes norms of the stream again; a text of one letter a time goes the way of a batch
        run_ok({**flags, "--residual-dtype": "fp32", "-r": 2, "-o": folder + "r"})
        check(without_checksum(read_bytes(model_path(folder + "r"))) == data["fp32"], f"{what}: -r 2")
        check_greedy_text(path, what)


def test_residual_kept():
    """The stream's type is the run's; of a model file its own, unless a flag says otherwise."""
    flags = {"--residual-dtype": "fp32", "-k": "constant", "-l": "1e-2", "--dropout": 0.1}
    run_ok({**flags, "-x": 6, "-o": "stream_whole"})
    run_ok({**flags, "-x": 3, "-o": "stream_stopped"})
    check_refused("--residual-dtype on resuming", {"-e": None, "-o": "stream_stopped", "-y": 1, "-x": 6,
                                                   "--residual-dtype": "branch"}, "--residual-dtype", "fp32")
    run_ok({"-e": None, "-x": 6, "-o": "stream_stopped", "-y": 1})
    check(read_bytes("stream_stopped/model_00000006.bin") == read_bytes(model_path("stream_whole")),
          "stopped and gone on with: the same bits")
    start = model_path("stream_whole")
    for given, word in (({}, 1), ({"--residual-dtype": "branch"}, 0), ({"--residual-dtype": "fp32"}, 1)):
        folder = f"stream_tuned{len(given)}{word}"
        run_ok({"-e": start, **given, "-x": 2, "-o": folder})
        check_equal(residual_word(folder + "/model_00000002.bin"), word, f"{given}: a new run of that model")
        with open(folder + "/run.json", encoding="utf-8") as f:
            said = json.load(f)["settings"]["residual-dtype"]
        check_equal(said, ("branch", "fp32")[word], f"{given}: run.json")
        run_ok({"-e": None, "-x": 4, "-o": folder, "-y": 1})
        check_equal(residual_word(folder + "/model_00000004.bin"), word, f"{given}: and gone on with")
        run_ok({"-e": None, "-x": 5, "-o": folder, "-y": 1, "--residual-dtype": said,
                "--block": "sequential"})
        check_equal(residual_word(folder + "/model_00000005.bin"), word, f"{given}: as it may be said again")
        other = ("fp32", "branch")[word]
        check_refused("another stream in the middle of a run",
                      {"-e": None, "-x": 6, "-o": folder, "-y": 1, "--residual-dtype": other},
                      "--residual-dtype " + other, "began with " + said)
    data = without_checksum(read_bytes(start))
    struct.pack_into("<i", data, 4 * RESIDUAL_WORD, 2)
    write_bytes("bad_residual.bin", data)
    check_refused("a stream that is not known", {"-e": "bad_residual.bin"}, "residual stream 2")


def test_samples():
    """Greedy texts, of every kind of block and norm."""
    for block, norm in VARIANTS:
        check_greedy_text(trained(block, norm), f"{BLOCKS[block]}, {NORMS[norm]}")


def test_resumed():
    """A run of each kind goes on, with its masks, to the bits of one that never stopped."""
    for flags in ({**flags_of(2, 1), "--dropout": 0.2}, {**flags_of(1, 0), "--dropout": 0.1, "-r": 2}):
        flags = {**flags, "-k": "constant", "-l": "1e-2"}
        run_ok({**flags, "-x": 6, "-o": "whole" + flags["--norm"]})
        folder = "stopped" + flags["--norm"]
        run_ok({**flags, "-x": 3, "-o": folder})
        result = run({"-e": None, "-x": 6, "-o": folder, "-y": 1})
        check(result.code == 0, f"{flags}: {result.err}")
        check(read_bytes(folder + "/model_00000006.bin") == read_bytes(model_path("whole" + flags["--norm"])),
              f"{flags}: the same bits")


def test_refused():
    """What is not GPT-2 is not taken for it, and a file is what it says."""
    path = trained(1, 1)
    check_refused("--block beside a file", {"-e": path, "--block": "parallel-tied"}, "--block parallel-tied",
                  "has parallel")
    check_refused("--norm beside a file", {"-e": path, "--norm": "layernorm"}, "--norm layernorm",
                  "has rmsnorm")
    check_refused("--block serial", {"--block": "serial"}, "serial", "parallel-tied")
    check_refused("--dropout 1", {"--dropout": 1}, "--dropout", "0.95")
    data = without_checksum(read_bytes(path))
    for name, word, value, said in (("version", 1, 203, "203"), ("block", 8, 3, "block 3"),
                                    ("norm", 9, -1, "norm -1"), ("version_of_gpt2", 1, 3, "bytes")):
        broken = bytearray(data)
        struct.pack_into("<i", broken, 4 * word, value)
        write_bytes(f"bad_{name}.bin", broken)
        check_refused(name, {"-e": f"bad_{name}.bin"}, said)
    tool = os.path.join(ROOT, "dev/eval/export_hf.py")
    p = subprocess.run([sys.executable, tool, path, "hf"], capture_output=True, text=True, check=False)
    said = "not GPT-2" in p.stderr and "parallel" in p.stderr and p.stderr.count("\n") <= 3
    check(p.returncode == 1 and said, f"export_hf: {p.returncode}, {p.stderr}")
    check(not os.path.exists("hf"), "export_hf left a folder")


if __name__ == "__main__":
    sys.exit(main(__doc__, globals()))
