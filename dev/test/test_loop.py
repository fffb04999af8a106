#!/usr/bin/env python3
"""What the training program's outer loop computes and prints, by meaning: validation, samples, data order,
what each flag changes, updates, saved files, memory, times.

    python3 dev/test/test_loop.py ./train_gpt2cpu               # seconds
    python3 dev/test/test_loop.py ./train_gpt2cu                # the same facts on a GPU
    python3 dev/test/test_loop.py ./train_gpt2cpu -k sample     # only tests whose name contains a word

The judge is a GPT-2 and an AdamW of a few lines in NumPy double, below, with the parameter table, the initial
weights and the checkpoint files of dev/reference/formats.py: nothing here is shared with the C++ code. Losses
are told apart by rows of text that differ much in how hard they are; samples by models that leave no doubt.
"""
import glob
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time

try:
    import numpy as np
except ImportError:
    sys.exit("error: no numpy\nhint: pip install -r dev/requirements.txt")

from checks import ROOT
from trainer import (LIMIT_S, LOG_LINE, SHARD_MAGIC, Program, check, check_close, check_equal,
                     check_refused, exact, log_columns, log_lines, main, model_path, read_bytes, run,
                     run_ok, sentences, skip, tolerance, write_bytes, write_questions, write_shard)

sys.path.insert(0, os.path.join(ROOT, "dev/reference"))
import formats                          # gives: Dims, init_params, write_checkpoint, read_checkpoint, PARAMS

B, T = 4, 16
MODEL = f"L2,NH2,C16,T{T},V256"
Program.usual = {"-e": MODEL, "-i": "train.bin", "-j": "val.bin", "-b": B, "-x": 4, "-v": 0, "-s": 0, "-f": 0}


# ---- the judge: GPT-2 in double ----

def layernorm(x, weight, bias):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight + bias


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def forward(model, tokens):
    """Logits (T,V) of one row of tokens; model = (dims, params)."""
    d, params = model
    p = {name: value.astype(np.float64) for name, value in params.items()}
    length, head = len(tokens), d.C // d.NH
    future = np.triu(np.full((length, length), -np.inf), 1)
    x = p["wte"][tokens] + p["wpe"][:length]
    for l in range(d.L):
        qkv = layernorm(x, p["ln1w"][l], p["ln1b"][l]) @ p["qkvw"][l].T + p["qkvb"][l]
        q, k, v = (part.reshape(length, d.NH, head).transpose(1, 0, 2) for part in np.split(qkv, 3, axis=1))
        attention = softmax(q @ k.transpose(0, 2, 1) / math.sqrt(head) + future) @ v
        attention = attention.transpose(1, 0, 2).reshape(length, d.C)
        x = x + attention @ p["attprojw"][l].T + p["attprojb"][l]
        h = layernorm(x, p["ln2w"][l], p["ln2b"][l]) @ p["fcw"][l].T + p["fcb"][l]
        h = 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h ** 3)))
        x = x + h @ p["fcprojw"][l].T + p["fcprojb"][l]
    return layernorm(x, p["lnfw"], p["lnfb"]) @ p["wte"][:d.V].T


def row_losses(model, tokens, length=T):
    """Mean loss of each window of `length` tokens, in the order in which they lie."""
    losses = []
    for first in range(0, len(tokens) - length, length):
        window = np.array(tokens[first:first + length + 1])
        p = softmax(forward(model, window[:-1]))
        losses.append(float(-np.log(p[np.arange(length), window[1:]]).mean()))
    return losses


# ---- models and data ----

def trained_model():
    """(path, (dims, params)) of a model that knows the words of sentences(); made once."""
    if not os.path.exists("trained"):
        run_ok({"-o": "trained", "-x": 150, "-l": "1e-2", "-b": 8})
    path = model_path("trained")
    return path, formats.read_checkpoint(path)


def uneven_rows(count, seed=3):
    """Rows of T tokens and one more, each with its own share of letters that follow no rule."""
    rng = random.Random(seed)
    text = list(sentences(seed, count * T + 1))
    shares = [k / (count - 1) for k in range(count)]
    rng.shuffle(shares)
    for k, share in enumerate(shares):
        for t in range(k * T, k * T + T):
            if rng.random() < share:
                text[t] = rng.randrange(97, 123)
    return text


def hand_made(path, dims, **rows):
    """A checkpoint whose weights are zero but for those given; LayerNorms at their start."""
    params = {name: np.zeros(formats.param_shape(dims, name), np.float32) for name in formats.NAMES}
    for name in ("ln1w", "ln2w", "lnfw"):
        params[name][:] = 1
    for name, value in rows.items():
        params[name][:] = value
    formats.write_checkpoint(path, dims, params)
    return path


def constant_model(path, logits, V=256, length=64):
    """Says the same logits whatever it reads: {token: logit}, others -100. Exact in every precision."""
    dims = formats.Dims(maxT=length, V=V, L=1, NH=1, C=16)
    wte = np.zeros((dims.Vp, dims.C), np.float32)
    wte[:V, 0] = -100
    for token, logit in logits.items():
        wte[token, 0] = logit
    bias = np.zeros(dims.C)
    bias[0] = 1
    return hand_made(path, dims, wte=wte, lnfw=0, lnfb=bias)


# ---- losses ----
# What the precision of a build can change.
NUMERIC = ("rows", "validation", "learned_period", "gpt2_vocabulary", "constant_model",
           "samples_of_trained", "flags", "initial_weights", "adamw", "muon",
           "saved_files_load", "skip_limit", "nan_validation", "evaluation", "evaluation_batches",
           "evaluation_in_training", "evaluation_of_nan", "outliers",
           "outlier_limits")


def test_rows():
    """Each row's loss, as training prints it at a learning rate of 0, is the judge's; so is the order."""
    path, model = trained_model()
    tokens, count = uneven_rows(11), 11
    write_shard("rows.bin", tokens)
    near = tolerance(1e-5, 3e-2)
    want = row_losses(model, tokens)
    check(max(want) - min(want) > 1, f"rows that can be told apart: {want}")
    flags = {"-e": path, "-i": "rows.bin", "-l": 0, "-b": 1}
    lying = {**flags, "--shuffle": 0}
    losses = run_ok({**lying, "-x": 2 * count}).losses()
    check_close(losses, want * 2, near, "rows as they lie, twice")
    rows = losses[:count]                           # the program's own: what follows is a matter of order
    near = tolerance(2e-6, 1e-2)

    def mean(*numbers):
        return sum(rows[i % count] for i in numbers) / len(numbers)
    check_close(run_ok({**lying, "-b": 4, "-x": 5}).losses(),
                [mean(*range(4 * i, 4 * i + 4)) for i in range(5)], near, "-b 4 goes on in the next epoch")
    check_close(run_ok({**lying, "-b": 2, "-z": 6 * T, "-x": 3}).losses(),
                [mean(*range(6 * i, 6 * i + 6)) for i in range(3)], near, "three micro-steps of 2 rows")
    for more, numbers in (({}, [0]), ({"-b": 3}, [0, 1, 2]), ({"-b": 3, "-z": 6 * T}, [0, 1, 2])):
        check_close(run_ok({**flags, "-a": 1, "-x": 3, **more}).losses(), [mean(*numbers)] * 3, near,
                    f"-a 1 {more}: the first batch as it lies, whatever the order")
    orders = {}
    for seed in (1337, 1338):
        losses = run_ok({**flags, "-x": 2 * count, "--seed": seed}).losses()
        for epoch in (0, 1):
            orders[seed, epoch] = losses[epoch * count:(epoch + 1) * count]
            check_close(sorted(orders[seed, epoch]), sorted(rows), near,
                        f"seed {seed}, epoch {epoch}: every row once")
    orders["lying"] = rows
    check_equal(len({tuple(order) for order in orders.values()}), 5,
                "another order for each seed and each epoch, none that of the file")


def test_validation():
    """The mean over the first m*B rows, over all where there are fewer, each once, whatever B is."""
    path, model = trained_model()
    count = 11
    tokens = uneven_rows(count)
    write_shard("rows.bin", tokens)
    near = tolerance(2e-6, 1e-2)
    rows = run_ok({"-e": path, "-i": "rows.bin", "-l": 0, "-b": 1, "-x": count, "--shuffle": 0}).losses()
    means = [sum(rows[:n]) / n for n in range(1, count + 1)]
    apart = min(abs(a - b) for i, a in enumerate(means) for b in means[:i])
    check(exact() is False or apart > 2 * near, f"means that can be told apart: {means}")
    for batch, most in ((1, 1), (1, 7), (1, 50), (2, 5), (2, 6), (3, 3), (3, 4), (4, 2), (4, 3), (5, 20),
                        (11, 1), (16, 9)):
        used = min(count, batch * most)
        losses = run_ok({"-e": path, "-j": "rows.bin", "-x": 0, "-b": batch, "-m": most}).val_losses()
        check_close(losses, [means[used - 1]], near, f"-b {batch} -m {most}: the mean of {used} rows")
    judge = sum(row_losses(model, tokens)) / count
    check_close(means[-1:], [judge], tolerance(1e-5, 3e-2), "the judge's mean")
    # several shards are one set, read in the order of their names and never shuffled
    for i, part in enumerate((tokens[:4 * T + 1], tokens[4 * T:])):
        write_shard(f"rows_{i}.bin", part)
    for seed in (1, 2):
        flags = {"-e": path, "-j": "rows_*.bin", "-x": 0, "-b": 3, "-m": 2, "--seed": seed}
        check_close(run_ok(flags).val_losses(), [means[5]], near, "two shards: the mean of six rows")


def test_validation_in_training():
    """At step k it is the loss of the model with k updates; it leaves training as it was."""
    flags = {"-k": "constant", "-l": "1e-2", "-m": 3}
    validated = run_ok({**flags, "-x": 5, "-v": 2, "-o": "validated"})
    losses = validated.val_losses()
    check_equal(len(losses), 4, "validations: before steps 1, 3 and 5 and at the end")
    logged = [LOG_LINE.match(line) for line in log_lines("validated", "tel")]
    check_close([float(line[5]) for line in logged], losses, 1e-6, "main.log")
    check_equal([int(line[1]) for line in logged], [0, 2, 4, 5], "its steps")
    check_close(run_ok({**flags, "-x": 0}).val_losses(), losses[:1], 0, "before the first step")
    for at, steps in ((1, 2), (2, 4), (3, 5)):
        run_ok({**flags, "-x": steps, "-o": f"steps{steps}"})
        saved = run_ok({**flags, "-x": 0, "-e": model_path(f"steps{steps}")}).val_losses()
        check_close(saved, losses[at:at + 1], tolerance(0, 2e-2), f"the model saved after {steps} steps")
    check(len(set(losses)) == 4, f"losses that change: {losses}")


# ---- samples ----

def test_learned_period():
    """What was learned is written: a period goes on after any prompt, across T = 64 and far beyond all T."""
    write_shard("period.bin", b"abcdefgh" * 400)
    length = 77             # rows begin anywhere in the period; samples round T up to 64, then to all of it
    run_ok({"-e": f"L1,NH2,C32,T{length},V256", "-i": "period.bin", "-b": 2, "-x": 150, "-l": "1e-2",
            "-o": "period"})
    flags = {"-e": model_path("period"), "-x": 0, "--temperature": 0}
    text = "abcdefgh" * 20
    for prompt, wanted in (("abcd", 1), ("abcd", 70), ("defghabcdefg", 9), ("h", 9), (text[:62], 1),
                           (text[:62], 9), (text[3:67], 70), ("abc", 120)):
        got = run_ok({**flags, "--prompt": prompt, "-g": wanted}).samples()
        first = "abcdefgh".index(prompt[0])
        check_equal(got, [text[first:first + len(prompt) + wanted]], f"'{prompt}' and {wanted} tokens")


def test_documents():
    """A document ends where the model says so, and without a prompt a new one begins."""
    document = b"once upon a time"
    write_shard("documents.bin", (b"\0" + document) * 150)
    run_ok({"-e": "L2,NH2,C32,T32,V256", "-i": "documents.bin", "-b": 4, "-x": 200, "-l": "1e-2",
            "-o": "documents"})
    flags = {"-e": model_path("documents"), "--temperature": 0, "-g": 30}
    whole = document.decode()
    for prompt in ("once", "once upon", whole[:-1]):
        check_equal(run_ok({**flags, "-x": 0, "--prompt": prompt}).samples(), [whole], f"after '{prompt}'")
    in_training = run_ok({**flags, "-i": "documents.bin", "-l": 0, "-x": 2, "-s": 2})
    check_equal(in_training.samples(), [whole], "without a prompt: the whole document, then its end")


def test_gpt2_vocabulary():
    """Where the vocabulary is GPT-2's, text begins after token 50256 and ends with it."""
    dims = formats.Dims(maxT=16, V=50257, L=1, NH=1, C=16)
    wte = np.zeros((dims.Vp, dims.C), np.float32)
    end, the, zero = 50256, 262, 0                  # " the" is 262; 0 is "!"
    # what stands in row 0 of a model without layers points to one token: the end to " the", 0 to "?" (30)
    for token, at, size in ((end, 0, 1), (the, 0, 9), (zero, 4, 1), (30, 4, 9)):
        wte[token, at], wte[token, at + 1] = size, -size
    path = hand_made("start.bin", dims, wte=wte)
    flags = {"-e": path, "-x": 1, "-l": 0, "-b": 1, "-s": 1, "-g": 4, "--temperature": 0}
    check_equal(run_ok(flags).samples(), [" the" * 4], "a new document after 50256")
    flags.update({"-x": 0, "-s": 0})
    check_equal(run_ok({**flags, "--prompt": "!"}).samples(), ["!????"], "after token 0")
    path = constant_model("ends.bin", {end: 1, 11: 0}, V=50257, length=16)
    flags["--prompt"] = "Hello"
    check_equal(run_ok({**flags, "-e": path}).samples(), ["Hello"], "nothing after the end")
    path = constant_model("commas.bin", {end: 0, 11: 1}, V=50257, length=16)
    check_equal(run_ok({**flags, "-e": path}).samples(), ["Hello,,,,"], "11 is a comma")


def test_constant_model():
    """What a model is certain of is written, in its letter and as often as asked."""
    path = constant_model("a.bin", {ord("a"): 0})
    flags = {"-e": path, "-x": 0, "--prompt": "x"}
    for more, times, samples in (({"-g": 5}, 5, 1), ({"-g": 1}, 1, 1), ({"-g": 7, "--num-samples": 3}, 7, 3),
                                 ({"-g": 5, "--top-k": 3, "--temperature": 2}, 5, 1), ({"-g": 1000}, 1000, 1),
                                 ({}, 64, 1), ({"-t": 9}, 64, 1), ({"-t": 3}, 64, 1),
                                 ({"-g": 3, "--num-samples": 150}, 3, 150)):
        check_equal(run_ok({**flags, **more}).samples(), ["x" + times * "a"] * samples, f"{more}")
    ids = constant_model("ids.bin", {299: 0}, V=300)
    check_equal(run_ok({"-e": ids, "-x": 1, "-l": 0, "-s": 1, "-g": 3}).samples(), ["299 299 299 "], "ids")
    end = constant_model("end.bin", {0: 0})
    check_equal(run_ok({**flags, "-e": end}).samples(), ["x"], "the end at once")


def test_frequencies():
    """Tokens are drawn as often as their probabilities say, each on its own."""
    logits = {ord("a"): 2, ord("b"): 1, ord("c"): 0, ord("d"): -1}
    path = constant_model("four.bin", logits)
    letters = "".join(map(chr, logits))
    for more, temperature, top in (({}, 1, 4), ({"--temperature": 0.5}, 0.5, 4), ({"--temperature": 4}, 4, 4),
                                   ({"--top-k": 2}, 1, 2), ({"--top-k": 3, "--temperature": 3}, 3, 3),
                                   ({"--top-p": 0.8}, 1, 2), ({"--top-k": 3, "--top-p": 0.95}, 1, 3)):
        result = run_ok({"-e": path, "-x": 0, "--prompt": "=", "-g": 60, "--num-samples": 15, **more})
        samples = [text[1:] for text in result.samples()]
        check_equal([len(text) for text in samples], [60] * 15, f"lengths with {more}")
        weights = [math.exp(x / temperature) for x in list(logits.values())[:top]]
        text = "".join(samples)
        for letter, weight in zip(letters, weights + [0] * (4 - top)):
            p = weight / sum(weights)
            times, want, spread = text.count(letter), p * len(text), math.sqrt(len(text) * p * (1 - p))
            check(abs(times - want) <= 5 * spread, f"'{letter}' {times} times with {more}, not {want:.0f}")
        check_equal(len(set(samples)), 15, f"samples of one run that differ, with {more}")
        pairs = sum(a == b for a, b in zip(text, text[1:]))         # neighbours know nothing of each other
        p = sum((w / sum(weights)) ** 2 for w in weights)
        near = 6 * math.sqrt(len(text) * p)
        check(abs(pairs - p * len(text)) <= near, f"{pairs} equal neighbours with {more}")
    flags = {"-e": path, "-x": 3, "-l": 0, "-s": 1, "-g": 30, "-b": 1}
    one, two = run_ok(flags), run_ok({**flags, "--seed": 4})
    check_equal(len(set(one.samples() + two.samples())), 6, "samples of other steps and seeds that differ")


def test_samples_of_trained():
    """At temperature 0 each letter is the judge's choice after all letters before it."""
    path, model = trained_model()
    for prompt in ("tak", "lorin ba", "m"):
        text = run_ok({"-e": path, "-x": 0, "--prompt": prompt, "--temperature": 0,
                       "-g": T - 1 - len(prompt)}).samples()[0]
        ids = [0] + [ord(letter) for letter in text]
        check_equal(len(ids), T, "as many tokens as the model has positions")
        logits = forward(model, np.array(ids[:-1]))
        behind = [logits[t].max() - logits[t, ids[t + 1]] for t in range(len(prompt), len(ids) - 1)]
        check(max(behind) <= tolerance(1e-4, 0.25), f"'{text}': letters {behind} behind the likeliest")


def test_when():
    """Validation and samples come after the steps they are asked for, and at the end."""
    for every, steps, samples, losses in ((1, 3, [1, 2, 3], 4), (2, 5, [2, 4, 5], 4), (9, 4, [4], 2),
                                          (0, 4, [], 0), (4, 4, [4], 2)):
        out = run_ok({"-x": steps, "-v": every, "-s": every, "--num-samples": 2, "-g": 2}).out
        want = [(str(n), str(step)) for step in samples for n in (1, 2)]
        check_equal(re.findall(r"^sample (\d+) at step (\d+):$", out, re.M), want, f"samples of -s {every}")
        check_equal(len(re.findall(r"^val loss", out, re.M)), losses, f"validations of -v {every}")
        lines = [line.split()[1] for line in out.splitlines() if re.match(r"step |sample |val ", line)]
        check_equal([x for x in lines if "/" in x], [f"{k}/{steps}" for k in range(1, steps + 1)], "steps")
        where = [k for k, line in enumerate(out.splitlines()) if line.startswith(f"step {steps}/")]
        tail = "\n".join(out.splitlines()[where[0]:])
        check_equal(len(re.findall(r"^sample ", tail, re.M)), 2 * (every > 0), "samples after the last step")


# ---- what each flag changes ----

def observe(flags, name):
    """Everything a run says and leaves, by kind."""
    result = run_ok({**flags, "-o": name})
    models = sorted(glob.glob(name + "/model_*.bin"))
    check(models, f"a checkpoint in {name}")
    columns, losses = log_columns(name), result.val_losses()
    samples = re.findall(r"^sample (\d+ at step \d+:\n.*?)\n---$", result.out, re.M | re.S)
    return {"loss of step 1": columns["trl"][:1], "norm of step 1": columns["norm"][:1],
            "later losses": columns["trl"][1:] + columns["norm"][1:], "rates": columns["lr"],
            "weights": read_bytes(models[-1]), "memory": re.findall(r"^memory: .*$", result.out, re.M),
            "first validation": losses[:1], "later validations": losses[1:], "samples": samples}


FIRST = {"loss of step 1", "norm of step 1"}
LEARNED = {"weights", "later losses"}
SHOWN = {"later validations", "samples"}            # follow the weights: may change, or be too small to see
ALL_NUMBERS = FIRST | LEARNED | SHOWN | {"first validation"}


def flag_table():
    """(flag, value, what must change, what may); all else stays as it is, to the byte."""
    low, cuda = Program.precision != "FP32", "CPU" not in Program.device
    rows = [
        ("-b", 2, FIRST | LEARNED | {"memory", "first validation", "later validations"}, {"samples"}),
        ("-t", 8, FIRST | LEARNED | {"memory", "first validation", "later validations"}, {"samples"}),
        ("-z", 3 * B * T, FIRST | LEARNED, SHOWN),
        ("-l", "2e-2", LEARNED | {"rates"}, SHOWN),
        ("-k", "linear", LEARNED | {"rates"}, SHOWN),
        ("-k", "constant", LEARNED | {"rates"}, SHOWN),
        ("-k", "wsd", LEARNED | {"rates"}, SHOWN),
        ("-u", 3, LEARNED | {"rates"}, SHOWN),
        ("-q", 0.5, LEARNED | {"rates"}, SHOWN),
        ("-c", 1, LEARNED, SHOWN),
        ("--beta1", 0.5, LEARNED, SHOWN),
        ("--beta2", 0.5, LEARNED, SHOWN),
        ("--eps", "1e-2", LEARNED, SHOWN),
        ("--optimizer", "muon", LEARNED | {"memory"}, SHOWN),
        ("--grad-clip", 0.01, LEARNED, SHOWN),
        ("-sl", 1, set(), set()),                   # nothing is judged by fewer than 128 steps: test_outliers
        ("-sg", 1, set(), set()),
        ("--seed", 7, ALL_NUMBERS, set()),
        ("--shuffle", 0, FIRST | LEARNED, SHOWN),
        ("-a", 1, FIRST | LEARNED, SHOWN),
        ("-v", 1, {"later validations"}, set()),
        ("-m", 1, {"first validation", "later validations"}, set()),
        ("-s", 1, {"samples"}, set()),
        ("-g", 3, {"samples"}, set()),
        ("--prompt", "ab", {"samples"}, set()),
        ("--num-samples", 2, {"samples"}, set()),
        ("--temperature", 0.1, {"samples"}, set()),
        ("--top-k", 2, {"samples"}, set()),
        ("--top-p", 0.5, {"samples"}, set()),
        ("-r", 1, {"memory"}, set()),
        ("-r", 2, {"memory"}, set()),
        # no other type where all is fp32, but the model's file, too, says what was asked for
        ("--residual-dtype", "fp32", {"weights", "memory"} if low else {"weights"},
         ALL_NUMBERS if low else set()),
        ("--block", "parallel", ALL_NUMBERS | {"memory"}, SHOWN | {"weights"}),
        ("--block", "parallel-tied", ALL_NUMBERS | {"memory"}, SHOWN | {"weights"}),
        ("--norm", "rmsnorm", ALL_NUMBERS, SHOWN | {"weights", "memory"}),
        ("--dropout", 0.1, FIRST | LEARNED | {"memory"}, SHOWN),
        ("--kernels", "portable", set(), ALL_NUMBERS if cuda else set()),
        ("-f", 1, set(), ALL_NUMBERS if cuda and not low else set()),
        ("-w", 0, {"memory", "weights"} if low else set(), LEARNED | SHOWN if low else set()),
        ("-n", 2, set(), set()),
        ("-nk", 1, set(), set()),
        ("-nm", 1, set(), set()),
        ("-y", 1, set(), set()),                    # there is nothing to resume
        ("--on-bad-loss", "rewind", set(), set()),
    ]
    if cuda:                                        # refused by the CPU build
        rows += [("--grad-dtype", "bf16", {"memory"}, LEARNED | SHOWN | {"norm of step 1"}),
                 ("-ge", 1, set(), ALL_NUMBERS | {"memory"})]
    return rows


MUON_FLAGS = {"muon-lr": 0.05, "muon-momentum": 0.5, "muon-steps": 4, "muon-decay": 5}


def test_flags():
    """Each flag changes what it names and nothing else."""
    usual = {"-x": 5, "-l": "1e-2", "-v": 3, "-s": 3, "-g": 12, "-m": 2, "--eps": "1e-4"}
    base = observe(usual, "flags")
    check_equal(observe(usual, "flags_again"), base, "the same flags again")
    rows = flag_table()
    for i, (flag, value, must, may) in enumerate(rows):
        got = observe({**usual, flag: value}, f"flags{i}")
        changed = {kind for kind in base if got[kind] != base[kind]}
        check(not must - changed, f"{flag} {value} leaves {sorted(must - changed)} as they were")
        check(not changed - must - may, f"{flag} {value} changes {sorted(changed - must - may)}")
    muon, known = {**usual, "--optimizer": "muon"}, set()
    base = observe(muon, "flags_muon")
    for name, value in MUON_FLAGS.items():
        got = observe({**muon, "--" + name: value}, "flags_" + name)
        changed = {kind for kind in base if got[kind] != base[kind]}
        check(LEARNED <= changed <= LEARNED | SHOWN, f"Muon, --{name} {value} changes {sorted(changed)}")
        refused = run({"--" + name: value})
        check(refused.code == 1 and refused.err.startswith(f"error: --{name} is for --optimizer muon"),
              f"--{name} with AdamW: {refused.err}")
        known.add(name)
    # a new flag needs a row; these name files and lengths, which other tests are about
    with open("flags/run.json", encoding="utf-8") as f:
        names = set(json.load(f)["settings"])
    known |= {"train-data", "val-data", "model", "output-dir", "max-steps", "gelu-fusion", "grad-dtype"}
    known |= {"evaluate", "eval-data", "eval-every"}        # test_evaluation_in_training
    known |= {"gpus", "zero-stage", "lanes", "reduction", "check-ranks", "process-init", "process-server",
              "process-folder", "processes", "process-rank", "gpus-per-node", "start-timeout"}  # test_ranks
    known |= {"quiet", "chat", "log-every", "log-gpu"}                              # test_cli, test_seeing
    help_text = subprocess.run([Program.path, "--help"], capture_output=True, text=True, check=True).stdout
    for flag in {row[0] for row in rows}:
        line = re.search(rf"^ .*{flag}[, ].*$", help_text, re.M)[0]
        known.add(re.search(r"--([a-z0-9-]+) ", line)[1])
    check_equal(sorted(names - known), [], "flags that no row is about")


# ---- updates ----

def test_initial_weights():
    """They are GPT-2's, drawn from the seed alone; a learning rate of 0 leaves them so."""
    for model, seed in ((MODEL, 1337), (MODEL, 12345678901), ("L3,NH1,C24,T20,V300", 5)):
        folder = f"initial{seed}"
        run_ok({"-e": model, "-x": 1, "-l": 0, "-c": 1, "--seed": seed, "-o": folder})
        dims, params = formats.read_checkpoint(model_path(folder))
        check_equal(dims.text(), model, "sizes in the file")
        for name, want in formats.init_params(dims, seed).items():
            if Program.precision == "BF16":
                want = formats.from_bf16_bits(formats.to_bf16_bits(want)).reshape(want.shape)
            check(np.array_equal(params[name], want), f"{name} of {model}, seed {seed}")


def weights_after(flags, folder):
    run_ok({"-a": 1, "-k": "constant", **flags, "-o": folder})
    return formats.read_checkpoint(model_path(folder))[1]


def gradients(start, flags, folder):
    """From one update with eps 1 and no memory: it takes lr * g / (|g| + 1) off each weight."""
    before = formats.read_checkpoint(start)[1]
    after = weights_after({**flags, "-e": start, "-x": 1, "-l": 100, "--beta1": 0, "--beta2": 0, "--eps": 1,
                           "--grad-clip": 0}, folder)
    taken = {name: (before[name].astype(np.float64) - after[name]) / 100 for name in before}
    return {name: x / (1 - np.abs(x)) for name, x in taken.items()}


def adamw(params, grads, m, v, t, lr, beta1, beta2, eps, decay, clip):
    norm = math.sqrt(sum(float((g * g).sum()) for g in grads.values()))
    scale = min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0
    after = {}
    for name, _, _, _, decays in formats.PARAMS:
        g = grads[name] * scale
        m[name] = beta1 * m[name] + (1 - beta1) * g
        v[name] = beta2 * v[name] + (1 - beta2) * g * g
        step = m[name] / (1 - beta1 ** t) / (np.sqrt(v[name] / (1 - beta2 ** t)) + eps)
        after[name] = params[name] * (1 - lr * decay * decays) - lr * step
    return after, norm


def test_adamw():
    """Two updates with each setting, from the program's own gradients, as AdamW's formula has them."""
    if not exact():
        skip("the update cannot be seen in 16-bit weights", 83)
        return
    start, _ = trained_model()
    zero = formats.read_checkpoint(start)[1]
    g1 = gradients(start, {}, "gradients")
    norm = math.sqrt(sum(float((g * g).sum()) for g in g1.values()))
    check_close(log_columns("gradients")["norm"], [norm], 2e-4 * norm, "the norm that is printed")
    usual = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-3, "decay": 0, "clip": 0}
    flag = {"lr": "-l", "beta1": "--beta1", "beta2": "--beta2", "eps": "--eps", "decay": "-c",
            "clip": "--grad-clip"}
    plain = None
    for i, change in enumerate(({}, {"beta1": 0.5}, {"beta2": 0.5}, {"eps": 1e-2}, {"decay": 0.7},
                                {"clip": norm / 3}, {"clip": norm * 3}, {"lr": 0.03})):
        settings = {**usual, **change}
        flags = {flag[name]: f"{value:.9g}" for name, value in settings.items()}
        got = [weights_after({**flags, "-e": start, "-x": steps}, f"adamw{i}_{steps}") for steps in (1, 2)]
        g2 = gradients(model_path(f"adamw{i}_1"), {}, f"gradients{i}")
        m, v = ({name: 0.0 for name in zero} for _ in range(2))
        want, params = [], {name: x.astype(np.float64) for name, x in zero.items()}
        for t, grads in ((1, g1), (2, g2)):
            params, _ = adamw(params, grads, m, v, t, **settings)
            want.append(params)
        for t in (0, 1):
            worst = max(float(np.abs(got[t][name] - want[t][name]).max()) for name in zero)
            check(worst <= 5e-3 * settings["lr"], f"{change}, update {t + 1}: a weight is off by {worst:.3g}")
        if plain is None:
            plain = want
        elif change != {"clip": norm * 3}:
            apart = max(float(np.abs(plain[1][name] - want[1][name]).max()) for name in zero)
            check(apart > 0.05 * usual["lr"], f"{change} matters: {apart:.3g}")


# Tensors that Muon takes, and how many matrices each layer's is.
MUON = {"qkvw": 3, "attprojw": 1, "fcw": 1, "fcprojw": 1}


def muon_direction(x, steps):
    """Through the singular values: each, as a part of |x|, goes `steps` times through the polynomial."""
    rows, cols = x.shape
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    s = s / np.linalg.norm(x)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s ** 3 + 2.0315 * s ** 5
    return (u * s) @ vt * math.sqrt(max(1, rows / cols))


def muon(params, grads, m, lr, momentum, decay, steps, clip):
    """One update of Muon's tensors."""
    norm = math.sqrt(sum(float((g * g).sum()) for g in grads.values()))
    scale, after = min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0, {}
    for name, count in MUON.items():
        g = grads[name] * scale
        m[name] = momentum * m[name] + (1 - momentum) * g
        ahead = (1 - momentum) * g + momentum * m[name]
        step = [np.concatenate([muon_direction(x, steps) for x in np.split(layer, count)]) for layer in ahead]
        after[name] = params[name] * (1 - lr * decay) - lr * np.array(step)
    return after


def test_muon():
    """Two updates with each setting, from the program's own gradients, as the formula has them; the other
    tensors are AdamW's. Rates follow the schedule; the gradient's size does not count, nor does -c."""
    if not exact():
        skip("the update cannot be seen in 16-bit weights", 106)
        return
    start, _ = trained_model()
    zero = {name: x.astype(np.float64) for name, x in formats.read_checkpoint(start)[1].items()}
    g1 = gradients(start, {}, "muon_gradients")
    usual = {"lr": 0.02, "momentum": 0.95, "decay": 0.01, "steps": 5, "clip": 0}
    others = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-3, "decay": 0.3}
    flag = {"lr": "--muon-lr", "momentum": "--muon-momentum", "decay": "--muon-decay",
            "steps": "--muon-steps", "clip": "--grad-clip"}
    plain = None
    for i, change in enumerate(({}, {"momentum": 0.3}, {"decay": 5}, {"steps": 3}, {"steps": 4}, {"lr": 0.05},
                                {"clip": 0.01})):
        settings = {**usual, **change}
        flags = {flag[name]: f"{value:.9g}" for name, value in settings.items()}
        flags.update({"--optimizer": "muon", "-e": start, "-l": others["lr"], "--eps": others["eps"],
                      "-c": others["decay"]})
        got = [weights_after({**flags, "-x": steps}, f"muon{i}_{steps}") for steps in (1, 2)]
        g2 = gradients(model_path(f"muon{i}_1"), {}, f"muon_gradients{i}")
        m, m2, v2 = ({name: 0.0 for name in zero} for _ in range(3))
        params, want = zero, []
        for t, grads in ((1, g1), (2, g2)):
            rest, _ = adamw(params, grads, m2, v2, t, clip=settings["clip"], **others)
            params = {**rest, **muon(params, grads, m, **settings)}
            want.append(params)
        for t in (0, 1):
            for names, near in ((MUON, 1e-2 * settings["lr"]), (set(zero) - set(MUON), 5e-3 * others["lr"])):
                worst = max(float(np.abs(got[t][name] - want[t][name]).max()) for name in names)
                check(worst <= near, f"{change}, update {t + 1}: of {sorted(names)} worst by {worst:.3g}")
        plain = plain or want
        apart = max(float(np.abs(plain[1][name] - want[1][name]).max()) for name in MUON)
        check(apart > 0.05 * usual["lr"] or change in ({}, {"clip": 0.01}), f"{change} matters: {apart:.3g}")
    # the warm-up's first step of two is half the peak
    run({**flags, "-a": 1, "-x": 1, "-u": 2, "-o": "muon_warm"})            # and warns that it is over then
    warm = formats.read_checkpoint(model_path("muon_warm"))[1]
    half = weights_after({**flags, "-x": 1, "-l": others["lr"] / 2, "--muon-lr": usual["lr"] / 2},
                         "muon_half")
    for name in zero:
        check(np.array_equal(warm[name], half[name]), f"{name}: -u is --muon-lr's, too")


# ---- saved files ----

def test_saved_files_load():
    """What was saved loads again and is the model that was trained; what was not trained is as it was."""
    cases = ({"-e": "L1,NH1,C8,T16,V256"}, {"-e": "L3,NH2,C24,T16,V200", "-c": 0.5},
             {"-e": MODEL, "-t": 7, "-b": 3}, {"-e": MODEL, "-t": 1}, {"-e": MODEL, "-r": 2, "-z": 2 * B * T},
             {"-e": "L1,NH4,C40,T31,V384"}, {"-e": MODEL, "-x": 1})
    for i, flags in enumerate(cases):
        folder = f"saved{i}"
        data = {} if "V200" not in flags["-e"] else {"-i": "low.bin", "-j": "low_val.bin"}
        if data:
            write_shard("low.bin", list(sentences(5, 3000)))
            write_shard("low_val.bin", list(sentences(6, 1000)))
        at = {name: value for name, value in flags.items() if name in ("-t", "-b")}
        trained = run_ok({"-v": 3, "-l": "1e-2", **flags, **data, "-o": folder})
        path = model_path(folder)
        steps = flags.get("-x", 4)
        check_equal(os.path.basename(path), f"model_{steps:08d}.bin", "its name says how many updates")
        saved = re.findall(r"^saved (\S+) and its state: \S+ [KMGT]iB in \S+ s$", trained.out, re.M)
        check_equal(saved, [path], "its name is printed")
        dims, params = formats.read_checkpoint(path)
        check_equal(dims.text(), flags["-e"], f"sizes in the file of {flags}")
        start = formats.init_params(dims, 1337)
        length = flags.get("-t", dims.maxT)
        check(not params["wte"][dims.V:].any(), f"{flags}: rows of the padded vocabulary are not zero")
        if exact():
            check(np.array_equal(params["wpe"][length:], start["wpe"][length:]), f"{flags}: positions unseen")
        check((params["wpe"][:length] != start["wpe"][:length]).any(1).all(), f"{flags}: positions seen")
        loaded = run_ok({**data, **at, "-e": path, "-x": 0}).val_losses()
        check_close(loaded, trained.val_losses()[-1:], tolerance(0, 2e-2), f"{flags}: loss of what was saved")
        if not at:
            tokens = read_tokens(data.get("-j", "val.bin"))[:20 * B * dims.maxT + 1]      # -m is 20
            judge = row_losses((dims, params), tokens, dims.maxT)
            judge = sum(judge) / len(judge)
            check_close(loaded, [judge], tolerance(1e-5, 3e-2), f"{flags}: the judge's loss")
    # rubbish in the padding of a file that is loaded does not come out again
    dims, params = formats.read_checkpoint(model_path("saved1"))
    params["wte"][dims.V:] = 3
    formats.write_checkpoint("rubbish.bin", dims, params)
    run_ok({"-i": "low.bin", "-e": "rubbish.bin", "-c": 1, "-o": "cleaned"})
    cleaned = formats.read_checkpoint(model_path("cleaned"))[1]
    check(not cleaned["wte"][dims.V:].any(), "padding that was rubbish is saved as rubbish")


def read_tokens(path):
    data = read_bytes(path)
    return struct.unpack(f"<{(len(data) - 1024) // 2}H", data[1024:])


SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static int on(const char* call, const char* name) {     // notes the call; 1: it is to fail
    const char* fails = getenv("SHIM_FAILS");
    FILE* log = fopen(getenv("SHIM_LOG"), "a");
    if (log) { fprintf(log, "%s %s\n", call, name); fclose(log); }
    return fails && strcmp(fails, call) == 0 && strstr(name, "model_");
}
int fsync(int fd) {
    char link[64], name[4096] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, name, sizeof name - 1);
    if (on("fsync", n > 0 ? name : "")) { errno = EIO; return -1; }
    return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd);
}
int rename(const char* from, const char* to) {
    if (on("rename", to)) { errno = EIO; return -1; }
    return ((int (*)(const char*, const char*))dlsym(RTLD_NEXT, "rename"))(from, to);
}
"""


def test_files_that_fail():
    """A file's bytes are synced, then it is renamed, then its folder is synced; what fails leaves no file
    of the checkpoint but the mark that it is half written."""
    write_bytes("shim.c", SHIM.encode())
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if not compiler:
        skip("no C compiler to put a layer under the program's files", 9)
        return
    subprocess.run([compiler, "-shared", "-fPIC", "-o", "shim.so", "shim.c", "-ldl"], check=True)
    here = os.getcwd()

    def run_shim(folder, fails):
        words = Program.command({"-x": 2, "-o": folder})
        env = {**Program.environment(1), "LD_PRELOAD": here + "/shim.so", "SHIM_FAILS": fails,
               "SHIM_LOG": f"{here}/{folder}.calls"}
        return subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, env=env)

    p = run_shim("synced", "none")
    calls = [line.split(" ", 1) for line in read_bytes("synced.calls").decode().splitlines()]
    check_equal((p.returncode, p.stderr), (0, ""), "the run over the layer")
    at = [i for i, (call, name) in enumerate(calls) if call == "rename" and "model_" in name]
    check_equal(len(at), 1, "renames of the checkpoint")
    before, after = calls[:at[0]], calls[at[0] + 1:]
    check(any(call == "fsync" and "model_" in name for call, name in before), "its bytes are synced before")
    check(["fsync", here + "/synced"] in after, "its name, in the folder, is synced after")
    done = [i for i, (call, name) in enumerate(calls) if call == "rename" and "DONE_" in name][0]
    for log in ("main.log", "metrics.jsonl"):
        check(["fsync", f"{here}/synced/{log}"] in calls[at[0]:done], f"{log} is synced before DONE")
    for fails in ("fsync", "rename"):
        p = run_shim("fails_" + fails, fails)
        check_equal(p.returncode, 1, f"exit code where {fails} fails")
        check(1 <= len(p.stderr.splitlines()) <= 3 and "Input/output error" in p.stderr
              and "model_" in p.stderr, f"stderr where {fails} fails: {p.stderr}")
        left = sorted(os.listdir("fails_" + fails))
        check_equal(left, ["HALF_00000002", "main.log", "metrics.jsonl", "run.json"],
                    f"files where {fails} fails")
        check("saved" not in p.stdout, f"{fails} fails, but the output says saved")


def test_open_files():
    """However many shards there are, 256 descriptors are enough; no step and no checkpoint keeps one."""
    for i in range(180):
        write_shard(f"many_{i:03d}.bin", sentences(i, T + 1))
        write_shard(f"many_val_{i:03d}.bin", sentences(500 + i, T + 1))

    def few_files():
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    limit = 256 if "CPU" in Program.device else 512
    result = run_ok({"-i": "many_[0-9]*.bin", "-j": "many_val_*.bin", "-x": 400, "-b": 1, "-v": 40, "-m": 200,
                     "-o": "few"}, preexec_fn=few_files)
    check_equal((len(result.losses()), len(result.val_losses())), (400, 11), "steps and validations")


# ---- sizes ----

# L, NH, C, T: Radford et al. 2019, table 2 (d6 by its rule); Brown et al. 2020, table 2.1
DESCRIPTORS = {
    "d6": (6, 6, 384, 1024), "d12": (12, 12, 768, 1024), "d24": (24, 16, 1024, 1024),
    "d36": (36, 20, 1280, 1024), "d48": (48, 25, 1600, 1024), "gpt3:c384": (6, 6, 384, 2048),
    "gpt3:c768": (12, 12, 768, 2048), "gpt3:c1024": (24, 16, 1024, 2048), "gpt3:c1536": (24, 16, 1536, 2048),
    "gpt3:c2048": (24, 16, 2048, 2048), "gpt3:c2560": (32, 32, 2560, 2048),
    "gpt3:c4096": (32, 32, 4096, 2048),
}


def round_up(n, to):
    return (n + to - 1) // to * to


def parameter_counts(d):
    """(matrices with V rows of wte, matrices with all rows, the others)"""
    sizes = {name: math.prod(formats.param_shape(d, name)) for name in formats.NAMES}
    matrices = sum(sizes[name] for name, *_, decays in formats.PARAMS if decays)
    return matrices - (d.Vp - d.V) * d.C, matrices, sum(sizes.values()) - matrices


def act_bytes(d, batch, length, recompute, residual_fp32=False, dropout=False):
    """{name: bytes} of what a step keeps, each buffer rounded up to 256."""
    n, c, x = batch * length, d.C, 4 if Program.precision == "FP32" else 2
    ln, gelu = (d.L if recompute < level else 1 for level in (2, 1))
    row, stat = x * n * c, 4 * n
    stream, apart = (4 * n * c, x < 4) if residual_fp32 else (row, False)
    padded = round_up(length, 128)              # of attention's probabilities: a bit for each
    keep = dropout * batch * d.NH * padded * padded // 8
    table = [("encoded", stream, 1), ("ln1", row, ln), ("ln1_mean", stat, d.L), ("ln1_rstd", stat, d.L),
             ("qkv", 3 * row, d.L), ("att_keep", keep, gelu), ("att_lse", stat * d.NH, d.L),
             ("atty", row, d.L), ("residual2", stream, d.L), ("ln2", row, ln), ("ln2_mean", stat, d.L),
             ("ln2_rstd", stat, d.L), ("fch", 4 * row, d.L), ("fch_gelu", 4 * row, gelu),
             ("residual3", stream, d.L), ("lnf", row, 1), ("lnf_mean", stat, 1), ("lnf_rstd", stat, 1),
             ("logits", x * n * d.Vp, 1), ("losses", stat, 1), ("dresidual", stream, 1), ("dnarrow", row, 1),
             ("dbranch", (apart or dropout) * row, 1), ("dwide", 4 * row, 1)]
    return {name: round_up(size, 256) * copies for name, size, copies in table}


def weight_bytes(d, muon=False):
    """{name: bytes}: tensors start at multiples of 128 elements in buckets of whole chunks: there is one of
    both embeddings, one of each layer's matrices, one of all biases and one of all LayerNorms, in fp32."""
    x, chunk = 4 if Program.precision == "FP32" else 2, 8192
    buckets = {}
    for name, layered, *_ in formats.PARAMS:
        copies = d.L if layered else 1
        slot = round_up(math.prod(formats.param_shape(d, name)) // copies, 128)
        vectors = "norms" if name.startswith("ln") else "biases" if name.endswith("b") else None
        for layer in range(copies):
            key = vectors or (layer if layered else "embeddings")
            buckets[key] = buckets.get(key, 0) + slot
    padded = {key: round_up(elems, chunk) for key, elems in buckets.items()}
    total = sum(padded.values())
    weights = x * total + (4 - x) * padded["norms"]
    plan = {"parameters": weights, "gradients": 4 * total, "AdamW m and v": 8 * total}
    if muon:                # no v of the layers' matrices, a buffer for them and four for products
        layers = d.L * padded[0]
        del plan["AdamW m and v"]
        plan["m and AdamW's v"] = 8 * total - 4 * layers
        plan["Muon's updates"] = x * layers
        plan["Muon's products"] = 4 * round_up(x * d.L * 4 * d.C**2, 256) + 8 * d.L * 4 * -(-d.C**2 // chunk)
    return plan if x == 4 else {**plan, "master weights": 4 * total}


def test_parameter_counts():
    for text in ("L1,NH2,C16,T16,V256", "L3,NH4,C40,T33,V509", "d6"):
        d = formats.parse_model(text) if text != "d6" else formats.Dims(maxT=1024, V=50257, L=6, NH=6, C=384)
        out = run_ok({"-e": text, "-t": 8, "-b": 1, "-m": 1, "-x": 0}, threads=2).out
        line = re.findall(r"^model: (.*)$", out, re.M)[0]
        live, padded, others = parameter_counts(d)
        want = (f"L={d.L} NH={d.NH} C={d.C} T={d.maxT} V={d.V}, {live + others} parameters: {live} with "
                f"weight decay, {others} without; and {padded - live} zeros that pad wte to {d.Vp} rows")
        check_equal(line, want, f"the model line of {text}")
    d12 = formats.Dims(maxT=1024, V=50257, L=12, NH=12, C=768)
    check_equal(sum(parameter_counts(d12)[::2]), 124439808, "GPT-2 124M's parameters, as published")


def test_descriptors():
    """The sizes behind a name: from the memory that 2^25 tokens take, and its longest sequence."""
    for name, (layers, heads, channels, length) in DESCRIPTORS.items():
        d = formats.Dims(maxT=length, V=50257, L=layers, NH=heads, C=channels)
        refused = run({"-e": name, "-t": length + 1, "-x": 0})
        check(refused.code == 1 and re.search(rf"longest sequence, {length}$", refused.err, re.M),
              f"{name}: T of {length}: {refused.err}")
        if "CPU" not in Program.device:
            continue
        needs, want = [], []
        for batch in (65536, 32768):                # the difference: what grows with the batch
            refused = run({"-e": name, "-t": 1024, "-b": batch, "-x": 1})
            said = re.search(r"needs ([\d.]+) GiB of memory on", refused.err)
            needs.append(float(said[1]) if check(said, f"{name}: {refused.err}") else 0)
            n = batch * 1024
            scratch = max(4 * channels * (2 * n // 128), 4 * n * heads)
            inputs = 3 * 4 * n + 16 * n + 16 * (n // 129)       # and two staged copies, eight loaded batches
            rest = scratch + 3 * inputs + 8 * 4 * n
            want.append((sum(act_bytes(d, batch, 1024, 0).values()) + rest) / 2**30)
        check_close([needs[0] - needs[1]], [want[0] - want[1]], 1e-6 * want[0] + 0.01, f"{name}: GiB")
    if "CPU" not in Program.device:
        skip("scratch is the CPU build's", 3 * len(DESCRIPTORS))


def memory_line(out):
    """(bytes in all, {name: bytes}) as the memory line has them, to half of its last digit."""
    line = re.findall(r"^memory: ([\d.]+) (MiB|GiB) in all; the largest: (.*)$", out, re.M)[0]
    unit = 2**20 if line[1] == "MiB" else 2**30
    items = [item.rsplit(" ", 1) for item in line[2].split(", ")]
    return float(line[0]) * unit, {name: float(size) * unit for name, size in items}


def test_memory():
    """The memory line's names and sizes, and what -r saves: in the line, and in the process."""
    text, batch, length = "L4,NH8,C32,T64,V256", 8, 64
    d = formats.parse_model(text)
    totals = []
    for recompute, more in ((0, {}), (1, {}), (2, {}), (0, {"--optimizer": "muon"}),
                            (0, {"--residual-dtype": "fp32"}), (0, {"--dropout": 0.1}),
                            (1, {"--dropout": 0.1})):
        muon, residual_fp32 = "--optimizer" in more, "--residual-dtype" in more
        dropout = "--dropout" in more
        total, items = memory_line(run_ok({"-e": text, "-b": batch, "-x": 1, "-r": recompute, **more}).out)
        want = {**act_bytes(d, batch, length, recompute, residual_fp32, dropout), **weight_bytes(d, muon)}
        check_equal("att_keep" in items, dropout and recompute == 0, f"-r {recompute} {more}: the bits kept")
        totals.append((total, sum(want.values())))
        near = 0.00051 * 2**20
        ours = {name: size for name, size in items.items() if name in want}
        check(len(ours) >= 7, f"names of the largest: {sorted(items)}")
        check_close(list(ours.values()), [want[name] for name in ours], near, f"-r {recompute}: {list(ours)}")
        largest = sorted(want.values(), reverse=True)
        check(min(ours.values()) >= largest[9] - near, "the largest are listed")
        check_equal(list(items.values()), sorted(items.values(), reverse=True), "the largest first")
        if "CPU" in Program.device:
            known = sum(want.values())
            check(known <= total + near <= 1.1 * known, f"-r {recompute}: {total} bytes, known {known}")
    for recompute in (1, 2):
        saved, want = (totals[0][i] - totals[recompute][i] for i in (0, 1))
        check_close([saved], [want], 0.0011 * 2**20, f"bytes saved by -r {recompute}")
    if "CPU" not in Program.device:
        skip("the process's own memory tells on a CPU only", 2)
        return
    flags = {"-e": "L16,NH1,C64,T256,V256", "-b": 8, "-x": 1, "-l": 0}
    peaks = [peak_memory({**flags, "-r": recompute}) for recompute in (0, 1, 2)]
    d = formats.parse_model(flags["-e"])
    plans = [sum(act_bytes(d, 8, 256, recompute).values()) for recompute in (0, 1, 2)]
    for recompute in (1, 2):
        saved, want = peaks[0] - peaks[recompute], plans[0] - plans[recompute]
        check(0.7 * want < saved < 1.3 * want, f"-r {recompute} saves {saved} bytes, planned {want}")


def peak_memory(flags):
    p = subprocess.Popen(Program.command(flags), stdout=subprocess.DEVNULL, env=Program.environment(1))
    _, status, usage = os.wait4(p.pid, 0)
    p.returncode = status
    check_equal(status, 0, "exit code")
    return usage.ru_maxrss * 1024


def test_memory_hint():
    """Too much is refused with the largest batch that fits."""
    flags = {"-e": "L4,NH1,C64,T16384,V256", "-b": 65536, "-x": 1}
    for recompute in (0, 2):
        error = run({**flags, "-r": recompute}).err
        said = re.search(r"needs ([\d.]+) GiB of memory .* has ([\d.]+) GiB free\n.*fits is -b (\d+)", error)
        if not check(said, f"-r {recompute}: {error}"):
            continue
        needs, free, batch = float(said[1]), float(said[2]), int(said[3])
        part = batch / 65536 * needs / free         # of the free memory: all but weights and a reserve of 1 %
        check(0.9 < part <= 1.0, f"-b {batch} takes {part:.3f} of what is free")
        d = formats.Dims(maxT=16384, V=256, L=4, NH=1, C=64)
        plan = sum(act_bytes(d, 65536, 16384, recompute).values()) / 2**30
        check(plan < needs < 1.1 * plan, f"-r {recompute}: needs {needs} GiB, activations alone {plan}")
        check_equal("-r 2" in error, recompute == 0, "the hint names -r 2 where it is not taken already")
    # sizes that 64 bits do not count are not taken modulo 2^64
    error = run({"-e": "L10000,NH1,C1048576,T32767,V256", "-b": 65536}).err
    check(re.search(r"^error: tensor '\w+' would have \S+ elements: too many$", error, re.M), error)


def test_resumed_otherwise():
    """What a resumed run cannot change is said; what it left open may be given as it was settled."""
    start = {"-e": "L1,NH2,C64,T16,V20000", "-b": 1, "-z": 8 * T, "-n": 2, "-x": 4, "-o": "settled"}
    start = {**start, "-z": None, "--gpus": 2} if "CPU" in Program.device else start
    run_ok(start)
    again = {**{flag: None for flag in Program.usual}, "-y": 1, "-o": "settled"}
    tokens = (2 if "CPU" in Program.device else 8) * T
    run_ok({**again, "-x": 5, "-t": T, "-z": tokens})
    for flag, value in (("-t", T // 2), ("-z", 2 * tokens)):
        error = run({**again, "-x": 6, flag: value}).err
        check(f"{value}: the run in this folder began with " in error, f"{flag} {value}: {error}")
    if "CPU" not in Program.device:
        return
    run_ok({**again, "-x": 6, "--lanes": 2})
    error = run({**again, "-x": 7, "--gpus": 3}).err
    check("3 ranks" in error and "hint: a resumed run keeps its batch: " in error, f"3 ranks: {error}")


def test_address_limit():
    """What a checkpoint needs in memory is in the plan, and more is not taken; a resumed run that has less
    than before says what changes."""
    if "OpenBLAS" not in Program.device:
        return
    flags = {"-e": "L1,NH2,C128,T16,V20000", "-b": 1, "-z": 8 * T, "-x": 3, "-o": ""}

    def limited(more, bytes_):
        def limit():
            resource.setrlimit(resource.RLIMIT_AS, (bytes_, bytes_))
        return run({**flags, **more}, preexec_fn=limit)

    def plan(lanes):
        out = run_ok({"--lanes": lanes, **flags, "-x": 1}).out
        return float(re.search(r"memory: ([\d.]+) MiB", out)[1])
    known, mib = 1000, 2**20
    free = float(re.search(r"has ([\d.]+) MiB free", limited({"-b": 60000, "-z": None}, known * mib).err)[1])

    def leaves(wanted):         # the limit that leaves so much; a hundredth of it is kept
        return int((known - free + wanted) * 1.01 * mib)
    all_lanes, one_lane = plan(8), plan(1)
    flags["-o"] = "limited"
    result = limited({"-n": 1}, leaves(all_lanes + 2))
    check(result.code == 0 and re.fullmatch(r"warning: host memory is short: .*\n", result.err),
          f"a run under a limit: {result.code} {result.err}")
    again = {**{flag: None for flag in flags}, "-y": 1, "-o": "limited"}
    result = limited({**again, "-x": 4}, leaves(all_lanes - 6))
    check(result.code == 0 and re.search("warning: .* over 4 lanes, and were over 8 before: .* will differ",
                                         result.err), f"fewer lanes: {result.code} {result.err}")
    error = limited({**again, "-x": 4}, leaves(one_lane - 10)).err
    check("needs" in error and "hint: a resumed run keeps its -b: " in error, f"too little: {error}")


# ---- what is printed on the way ----

def test_data_line():
    for i, length in enumerate((1000, 77, 16)):     # 62 rows, 4 and none
        write_shard(f"line_{i}.bin", sentences(i, length))
    for flags, rows, micro, steps in (({}, 66, 1, 16), ({"-t": 7}, 142 + 10 + 2, 1, 38),
                                      ({"-z": 2 * B * T}, 66, 2, 8), ({"-z": 40 * B * T}, 66, 40, 1)):
        out = run_ok({"-i": "line_*.bin", "-x": "epoch", **flags}).out
        length = flags.get("-t", T)
        want = f"1093 training tokens ({rows} rows of {length}), {micro} micro-steps a step, {steps} steps"
        check_equal(re.findall(r"^data: (.*)$", out, re.M), [want], f"the data line with {flags}")


def seconds_of(text):
    hours, minutes, seconds = text.split(":")
    check(len(minutes) == len(seconds) == 2 and max(int(minutes), int(seconds)) < 60, f"a time {text}")
    return 3600 * int(hours) + 60 * int(minutes) + int(seconds)


def test_times():
    """Milliseconds, tokens/s, their mean and the time left agree with each other and with a clock outside."""
    steps, batch = 10**8, 3 * B * T
    began = time.monotonic()
    p = subprocess.Popen(Program.command({"-x": steps, "-z": batch, "-o": "times"}), text=True,
                         stdout=subprocess.PIPE, env=Program.environment(1))
    lines, at = [], []
    for line in p.stdout:
        if line.startswith("step "):
            lines.append(line)
            at.append(time.monotonic())
            if len(lines) == 100:
                p.send_signal(signal.SIGTERM)
        elif line.startswith("mean step time"):
            mean = line
    check_equal(p.wait(), 0, "exit code")
    wall = (time.monotonic() - began) * 1e3
    with open("times/metrics.jsonl", encoding="utf-8") as f:
        records = [json.loads(line) for line in f]
    ms = [r["ms"] for r in records]
    check_equal(len(lines), len(ms), "step lines and records")
    check(sum(ms) <= wall, f"steps of {sum(ms):.1f} ms in {wall:.1f} ms")
    gaps = [b - a for a, b in zip(at[:99], at[1:100])]
    apart = sum(gaps) - max(gaps)           # this process may have slept once: the program did not
    check(sum(ms[1:100]) >= 0.05 * apart * 1e3, f"{sum(ms[1:100]):.1f} ms, lines in {apart:.3f} s")
    speeds = [r["tokens_per_s"] * r["ms"] / (batch * 1e3) for r in records]
    check_close(speeds, [1] * len(ms), 1e-6, "tokens/s")
    check_equal([r["tokens"] for r in records], [batch * (i + 1) for i in range(len(ms))], "tokens so far")
    for i in (0, 1, 50, len(ms) - 1):
        found = re.search(r"\| ([\d.]+) ms \| (\d+) tok/s \| ETA (\S+)$", lines[i])
        check_close([float(found[1])], [ms[i]], 0.051, f"ms of step {i + 1}")
        check_close([float(found[2])], [records[i]["tokens_per_s"]], 0.51, f"tokens/s of step {i + 1}")
        usual = sum(ms[1:i + 1]) / i if i else ms[0]            # the first step is not like the others
        left = (steps - i - 1) * usual * 1e-3
        check_close([seconds_of(found[3])], [left], 0.6, f"time left after step {i + 1}")
    found = re.search(r"mean step time ([\d.]+) ms, (\d+) tokens/s over (\d+) steps", mean)
    usual = sum(ms[1:]) / (len(ms) - 1)
    check_close([float(found[1]), int(found[3])], [usual, len(ms) - 1], 0.051, "the mean step time")
    check_close([float(found[2]) / (batch / usual * 1e3)], [1], 1e-3, "the mean tokens/s")


def test_skip_limit():
    """Twenty updates in a row that cannot be made end the run; they change no weight."""
    _, (dims, params) = trained_model()
    params["lnfb"][:] = np.nan
    formats.write_checkpoint("nan.bin", dims, params)
    for steps, skips, code in ((19, 19, 0), (20, 20, 1), (50, 20, 1)):
        folder = f"skips{steps}"
        result = run({"-e": "nan.bin", "-x": steps, "-o": folder})
        said = re.findall(r"^step (\d+): the gradient is not finite", result.err, re.M)
        check_equal(said, [str(k) for k in range(1, skips + 1)], f"skipped updates of {steps} steps")
        said = "20 updates in a row" in result.err
        check_equal((result.code, said), (code, code == 1), f"the end of {steps} steps")
        check_equal(len(glob.glob(folder + "/model_*")), 1 - code, "checkpoints")
    after = formats.read_checkpoint(model_path("skips19"))[1]
    check(all(np.array_equal(after[name], params[name], equal_nan=True) for name in formats.NAMES),
          "skipped updates leave the weights alone")


def test_nan_validation():
    """A validation loss that is no number: a warning in training, a failure where it is all there is."""
    _, (dims, params) = trained_model()
    params["lnfb"][:] = np.nan
    formats.write_checkpoint("nan_val.bin", dims, params)
    for flags, code in (({"-x": 0}, 1), ({"-x": 1, "-v": 1}, 0)):
        result = run({"-e": "nan_val.bin", **flags})
        check_equal(result.code, code, f"exit code with {flags}")
        check("validation loss is not finite" in result.err, f"a warning with {flags}: {result.err}")
        check("nan" in result.out, "the loss itself is printed")


# ---- multiple-choice questions: -h ----

EVAL = re.compile(r"^eval acc_norm (\S+) \| acc (\S+) \| loss (\S+)$", re.M)
LONG = 100                                              # positions of the model that answers


def eval_scores(result):
    """[(acc_norm, acc, loss)]"""
    return [tuple(map(float, row)) for row in EVAL.findall(result.out)]


def answering_model():
    """(path, (dims, params)): random weights so wide that what stands far back moves a loss."""
    dims, rng = formats.parse_model(f"L2,NH2,C16,T{LONG},V256"), np.random.default_rng(7)
    params = {}
    for name in formats.NAMES:
        centre = 1 if name in ("ln1w", "ln2w", "lnfw") else 0
        noise = rng.standard_normal(formats.param_shape(dims, name))
        params[name] = (centre + 0.2 * noise).astype(np.float32)
    params["wte"][dims.V:] = 0
    formats.write_checkpoint("answers.bin", dims, params)
    return "answers.bin", formats.read_checkpoint("answers.bin")


def completion_losses(model, question, length):
    """The losses of each completion's tokens, as far as `length` positions hold them."""
    context, completions = question
    for completion in completions:
        row = np.array(context + completion)[-(length + 1):]
        p = softmax(forward(model, row[:-1]))
        losses = -np.log(p[np.arange(len(row) - 1), row[1:]])
        yield losses[-min(len(completion), len(losses)):]


def judged(model, questions, length):
    """(sums, means) of each question's completions"""
    losses = [list(completion_losses(model, question, length)) for question in questions]
    return [np.array([[f(row) for row in rows] for rows in losses]) for f in (np.sum, np.mean)]


def margin(values):
    """How far the best of each four is from the next."""
    ordered = np.sort(values, axis=1)
    return ordered[:, 1] - ordered[:, 0]


def made_up_questions(model, count, lengths=(LONG, 40), seed=11):
    """Of lengths that meet every rounding, some longer than the model; none that is nearly undecided."""
    rng, questions = random.Random(seed), []
    while len(questions) < count:
        sizes = [rng.choice((1, 2, rng.randrange(3, 90)))] + [rng.choice((1, rng.randrange(2, 45)))
                                                              for _ in range(4)]
        context, *completions = [[rng.randrange(256) for _ in range(size)] for size in sizes]
        question = context, completions
        if all(margin(values)[0] > 0.2 for length in lengths for values in judged(model, [question], length)):
            questions.append(question)
    return questions


def test_evaluation():
    """Every row's loss and every choice are the judge's, rows that are too long included."""
    path, model = answering_model()
    questions = made_up_questions(model, 32)
    check(any(len(c) + len(q[0]) > LONG + 1 for q in questions for c in q[1]), "no row is too long")
    flags = {"-e": path, "-j": None, "-x": 0, "-h": 1, "--eval-data": "q.bin"}
    near = tolerance(1e-5, 0.05)
    for length in (LONG, 40):
        sums, means = judged(model, questions, length)
        answers, answers_norm = sums.argmin(1), means.argmin(1)
        check(len(set(answers)) == 4 and (answers != answers_norm).any(), f"choices that tell: {answers}")
        mixed = [i % 4 for i in range(len(questions))]
        for labels in (answers, answers_norm, mixed):
            write_questions("q.bin", questions, labels)
            result = run_ok({**flags, "-t": length})
            want = [np.mean(answers_norm == labels), np.mean(answers == labels),
                    np.mean(means[np.arange(len(labels)), labels])]
            if not check_equal(len(eval_scores(result)), 1, "evaluations"):
                return
            got = eval_scores(result)[0]
            check_close(got[:2], want[:2], 1e-6, f"-t {length}: acc_norm and acc")
            check_close(got[2:], want[2:], near, f"-t {length}: the right completions' loss")
            check_equal(result.val_losses(), [], "validations without -j")
    sums, means = judged(model, questions, LONG)
    for i, question in enumerate(questions[:8 if "CPU" in Program.device else 1]):
        for label in range(4):                          # the loss of a single row
            write_questions("q.bin", [question], [label])
            got = eval_scores(run_ok(flags))
            check_close([score[2] for score in got], [means[i, label]], near, f"question {i}, row {label}")


def test_evaluation_batches():
    """Neither -b nor the number of ranks changes the result, and rows are not padded to -t."""
    path, model = answering_model()
    questions = made_up_questions(model, 24)
    write_questions("q.bin", questions, [i % 4 for i in range(24)])
    flags = {"-e": path, "-x": 0, "-h": 1, "--eval-data": "q.bin", "-j": None}
    results = {b: run_ok({**flags, "-b": b}) for b in (1, 2, 3, 4, 7, 50)}
    want = eval_scores(results[4])[0]
    for b, result in results.items():
        got = eval_scores(result)[0]
        check_equal(got[:2], want[:2], f"-b {b}: acc_norm and acc")
        check_close(got[2:], want[2:], tolerance(2e-6, 1e-2), f"-b {b}: loss")
    rows = [min(LONG, len(q[0]) + len(c) - 1) for q in questions for c in q[1]]
    positions = sum(min(LONG, -(-n // 32) * 32) for n in rows)
    said = re.search(r"^questions: (\d+), (\d+) rows in (\d+) batches, (\d+) positions", results[1].out, re.M)
    check_equal(said and [int(said[i]) for i in (1, 2, 4)], [24, 96, positions], "what is computed")
    check(int(said[3]) > 40, f"{said[3]} batches at -b 1: more than one row of {LONG} in one")
    both = run_ok({**flags, "-j": "val.bin"})
    check_equal((len(both.val_losses()), eval_scores(both)), (1, [want]), "with -j: the validation, too")
    if "CPU" in Program.device:
        for ranks in (2, 3, 5):
            shared = run_ok({**flags, "-b": 2, "--gpus": ranks})
            check_equal(EVAL.findall(shared.out), EVAL.findall(results[2].out), f"{ranks} ranks")


def test_evaluation_in_training():
    """When it is asked for; it leaves training as it was, to the bit, and its lines are in the logs."""
    path, model = answering_model()
    questions = made_up_questions(model, 12)
    write_questions("q.bin", questions, [i % 4 for i in range(12)])
    flags = {"-e": path, "-t": T, "-x": 5, "-l": "1e-3", "-z": 2 * B * T}
    asked = {**flags, "-h": 1, "--eval-data": "q.bin"}
    run_ok({**flags, "-o": "unasked"})
    logs = {}
    for folder, more, steps in (("at_end", {}, [5]), ("as_v", {"-v": 2}, [0, 2, 4, 5]),
                                ("every", {"--eval-every": 3, "-v": 4}, [0, 3, 5])):
        result = run_ok({**asked, **more, "-o": folder})
        logs[folder] = log_lines(folder, "eval")
        check_equal([int(LOG_LINE.match(line)[1]) for line in logs[folder]], steps, f"{folder}: steps")
        check_close([float(LOG_LINE.match(line)[6]) for line in logs[folder]],
                    [score[0] for score in eval_scores(result)], 1e-6, f"{folder}: acc_norm")
        with open(folder + "/metrics.jsonl", encoding="utf-8") as f:
            rows = [row for row in map(json.loads, f) if "eval_acc_norm" in row]
        got = [(row["step"], row["eval_acc_norm"], row["eval_acc"], row["eval_loss"]) for row in rows]
        want = [(step, *score) for step, score in zip(steps, eval_scores(result))]
        check_close(sum(got, ()), sum(want, ()), 1e-6, f"{folder}: metrics.jsonl")
        check_equal(log_lines(folder), log_lines("unasked"), f"{folder}: training's losses")
        check(read_bytes(model_path(folder)) == read_bytes(model_path("unasked")), f"{folder}: the model")
    saved = run_ok({**asked, "-x": 0, "-e": model_path("at_end")})
    check_close(eval_scores(saved)[0], eval_scores(result)[-1], tolerance(1e-6, 0.05), "the saved model's")
    shared = {**asked, "-z": 4 * B * T, "-v": 2}
    if "CPU" in Program.device:
        folders = {ranks: f"shared_{ranks}" for ranks in (1, 2)}
        for ranks, folder in folders.items():
            run_ok({**shared, "--gpus": ranks, "-o": folder})
        one, two = (read_bytes(folder + "/main.log") for folder in folders.values())
        check_equal(one, two, "logs of 1 and 2 ranks")


def test_evaluation_resumed():
    """A run that is stopped behind an evaluation and goes on logs each once."""
    write_questions("q.bin", [([1, 2], [[3], [4], [5], [6]])], [1])
    flags = {"-h": 1, "--eval-data": "q.bin", "--eval-every": 1, "-x": 3, "-z": 1000 * B * T, "-y": 1}
    run_ok({**flags, "-o": "whole"})
    with subprocess.Popen(Program.command({**flags, "-o": "parts"}), stdout=subprocess.PIPE, text=True,
                          stderr=subprocess.PIPE, env=Program.environment(1)) as p:
        seen = 0
        while seen < 2 and (line := p.stdout.readline()):
            seen += bool(EVAL.match(line))
        p.send_signal(signal.SIGTERM)                   # in the middle of a long step
        p.communicate(timeout=LIMIT_S)
        check_equal(p.returncode, 0, "exit code after the signal")
    run_ok({**flags, "-o": "parts"})
    check_equal(read_bytes("parts/main.log"), read_bytes("whole/main.log"), "main.log")


def test_evaluation_stopped():
    """A signal during a long evaluation ends it between two batches."""
    question = [1] * 60, [[2, 3], [4], [5, 6, 7], [8]]
    write_questions("many.bin", [question] * 40000, [0] * 40000)
    words = Program.command({"-h": 1, "--eval-data": "many.bin", "--eval-every": 1, "-o": "stopped", "-b": 1})
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env=Program.environment(1)) as p:
        out = ""
        while "micro-steps a step" not in out and (line := p.stdout.readline()):
            out += line
        p.send_signal(signal.SIGTERM)
        more, err = p.communicate(timeout=LIMIT_S)
    check("stopping after the last complete step" in err and p.returncode == 0, f"{p.returncode}: {err}")
    check("stopped by a signal after step 0\n" in more and not EVAL.search(more), f"the end: {more}")


def test_evaluation_of_nan():
    """Losses that are no numbers choose nothing: a warning in training, a failure where they are all."""
    path, (dims, params) = answering_model()
    write_questions("q.bin", [([1, 2], [[3], [4], [5], [6]])] * 3, [0, 0, 0])
    params["lnfb"][:] = np.nan
    formats.write_checkpoint("nan_eval.bin", dims, params)
    for flags, code in (({"-x": 0, "-j": None}, 1), ({"-x": 1, "-o": "nan_eval"}, 0)):
        result = run({"-e": "nan_eval.bin", "-h": 1, "--eval-data": "q.bin", **flags})
        check_equal(result.code, code, f"exit code with {flags}")
        check("of the evaluation are not finite" in result.err, f"a warning with {flags}: {result.err}")
        check("eval acc_norm nan | acc nan | loss nan" in result.out, "the score is printed")
    check_equal([line.split()[1] for line in log_lines("nan_eval", "eval")], ["eval:nan"], "main.log")


def test_evaluation_refused():
    """Questions that are not right are an error before anything is written."""
    question = [1, 2], [[3], [4, 5], [6], [7]]
    usual = {"-h": 1, "--eval-data": "q.bin"}
    check_refused("no file", {"-h": 1, "--eval-data": "none.bin"}, "no evaluation data", "none.bin", "get.py")
    check_refused("the default", {"-h": 1}, "hellaswag_val.bin", "get.py hellaswag")
    check_refused("a shard", {"-h": 1, "--eval-data": "val.bin"}, "val.bin", SHARD_MAGIC)
    write_questions("q.bin", [question] * 3, [0, 1, 2], tokenizer=1)
    check_refused("another tokenizer", usual, "q.bin", "GPT-2", "bytes")
    write_questions("q.bin", [question] * 3, [0, 1, 4])
    check_refused("a wrong label", usual, "question 2", "answer 4", "0..3")
    check_refused("a wrong label at -x 0", {**usual, "-x": 0, "-o": None}, "question 2")
    write_questions("q.bin", [question, ([1, 256], question[1])], [0, 1])
    check_refused("a token of another vocabulary", usual, "question 1", "token id 256", "0..255")
    write_questions("q.bin", [question] * 3, [0, 1, 2], tokenizer=2)
    run_ok({**usual, "-x": 0})
    check_refused("no value", {}, "-h", "--help", extra=["-h"])


# ---- outliers: -sl, -sg ----

def skipped_steps(result):
    """[(step, what)] of the updates that were skipped as outliers, as stderr has them."""
    line = r"^step (\d+): (loss|norm) (\S+) is (\S+) standard deviations above the mean of the last 128: "
    found = re.findall(line + "update skipped$", result.err, re.M)
    check(all(float(score) > 0 for *_, score in found), f"scores: {found}")
    return [(int(step), what) for step, what, *_ in found]


def test_outliers():
    """Steps with unusual data are skipped, and the run goes on as if they had not been there."""
    before, spike, after = 150, 3, 12               # steps
    batch = B * T
    clean = list(sentences(9, (before + after) * batch + 1))
    rng = random.Random(4)
    # the token at which a part ends is the next one's first: the parts join without a trace
    joint = clean[before * batch]
    noise = [joint] + [rng.randrange(128, 256) for _ in range(spike * batch - 1)]
    write_shard("clean.bin", clean)
    write_shard("spiky.bin", clean[:before * batch] + noise + clean[before * batch:])
    usual = {"--shuffle": 0, "-k": "constant", "-l": "3e-3"}
    steps = before + spike + after
    want = run_ok({**usual, "-i": "clean.bin", "-x": before + after, "-o": "clean"})
    run_ok({**usual, "-i": "clean.bin", "-x": before, "-o": "at_spike"})
    for flag, limit, what in (("-sl", 4, "loss"), ("-sg", 6, "norm")):
        folder = f"spiky_{what}"
        flags = {**usual, "-i": "spiky.bin", flag: limit}
        got = run({**flags, "-x": steps, "-o": folder})
        check_equal((got.code, skipped_steps(got)), (0, [(before + 1 + k, what) for k in range(spike)]),
                    f"updates that {flag} skips: {got.err}")
        check_equal(got.losses()[:before] + got.losses()[before + spike:], want.losses(),
                    f"{flag}: the other steps' losses")
        check_equal(read_bytes(model_path(folder)), read_bytes(model_path("clean")), f"{flag}: weights after")
        run({**flags, "-x": before + spike, "-o": folder + "_end"})
        check_equal(read_bytes(model_path(folder + "_end")), read_bytes(model_path("at_spike")),
                    f"{flag}: weights after the skipped steps")
        check_equal(len(log_lines(folder)), steps, "a skipped step is in main.log")
    usual["-i"] = "spiky.bin"
    run_ok({**usual, "-x": steps, "-sl": 0, "-sg": 0, "-o": "trained_on"})
    check(read_bytes(model_path("trained_on")) != read_bytes(model_path("clean")), "0 and 0 skip nothing")
    if "CPU" in Program.device:                     # all ranks decide alike, one of them says so
        got = run({**usual, "-b": B // 2, "-x": steps, "-sl": 4, "-sg": 6, "--gpus": 2, "-o": "ranks"})
        check_equal(skipped_steps(got), [(before + 1 + k, "loss") for k in range(spike)], "two ranks' skips")
        alone = run({**usual, "-b": B // 2, "-z": batch, "-x": steps, "-sl": 4, "-o": "alone"})
        check_equal((got.err, read_bytes(model_path("ranks"))), (alone.err, read_bytes(model_path("alone"))),
                    "two ranks' weights and one's")


def test_outlier_limits():
    """Fewer than 128 steps judge nothing; what stays unusual for twenty steps ends the run."""
    batch = B * T
    rng = random.Random(5)
    clean = list(sentences(9, 170 * batch + 1))
    noise = [rng.randrange(128, 256) for _ in range(25 * batch)]
    flags = {"--shuffle": 0, "-k": "constant", "-l": "3e-3", "-sl": 4, "-i": "late.bin"}
    write_shard("late.bin", clean[:127 * batch] + noise[:batch] + clean[:2 * batch])
    check_equal(run({**flags, "-x": 130}).losses(), run({**flags, "-x": 130, "-sl": 0}).losses(),
                "with 127 steps before it")
    write_shard("late.bin", clean + noise)
    got = run({**flags, "-x": 195, "-o": "given_up"})
    check_equal([step for step, _ in skipped_steps(got)][-20:], list(range(171, 191)), "skipped steps")
    check("20 updates in a row were skipped" in got.err and "\nhint: " in got.err, f"the end: {got.err}")
    check_equal((got.code, glob.glob("given_up/model_*")), (1, []), "exit code and checkpoints")


def test_gpu_telemetry():
    """-lg on a GPU: what the driver's own program says of it as well. Of a library in its place:
    test_seeing.py."""
    if "CPU" in Program.device:
        return
    asked = subprocess.run(["nvidia-smi", "--format=csv,noheader,nounits", "--query-gpu=memory.total"],
                           capture_output=True, text=True, timeout=LIMIT_S, check=True)
    gib = float(asked.stdout.split()[0]) / 1024
    run_ok({"-x": 4, "-lg": 2, "-o": "telemetry"})
    with open("telemetry/metrics.jsonl", encoding="ascii") as f:
        lines = [json.loads(line) for line in f]
    told = [line for line in lines if "gpu_mhz" in line]
    check_equal([line["step"] for line in told], [2, 4], "steps with the GPU's clock")
    for line in told:
        check(100 <= line["gpu_mhz"] <= 5000 and 10 <= line["gpu_watts"] <= 2000 and
              10 <= line["gpu_celsius"] <= 110 and 0.1 <= line["gpu_gib"] <= gib, f"of a GPU: {line}")


if __name__ == "__main__":
    sys.exit(main(__doc__, globals()))
