#!/usr/bin/env python3
"""Holds what surrounds training against PyTorch on the same GPU. Last line: N passed, N failed, N skipped.

    make build/check/{train,test}_gpt2.{FP32,BF16}
    python dev/reference/check_eval_gpu.py --data dev/data/debian-docs/debian_docs --out build/eval
    python dev/reference/check_eval_gpu.py --device cpu --train ./train_gpt2cpu --test ./test_gpt2cpu \\
        --precisions FP32 --sizes L3,NH2,C64,T96,V50257 --only hf,questions     # two minutes, for a try

Three parts (--only). The first two take weights drawn at random, all of them: no bias is 0, no gain is 1.

    hf         each of --sizes: exported and read by transformers. Logits, loss and greedy text of the FP32
               program are transformers'. And the first model, opened as the lm-eval harness opens it, says
               of texts what our own program says.
    questions  HellaSwag's and MMLU's form: each row's loss, each choice and the scores, of both precisions.
    race       124M on --data (PREFIX_train*.bin, PREFIX_val*.bin), bf16, beside the PyTorch twin: the same
               weights, tokens, order and schedule. --out gets main.log and metrics.jsonl of both in two
               folders (dev/data/plot_log.py --seconds draws them), and both models' samples.

Bounds. Logits: three times (root mean square) and six times (largest) the distance that transformers' own
fp32 has from its float64: ours adds in the order of k, a library may split sums and lose less. A row's mean
loss: 2e-5 in fp32, as test_gpt2's; bf16: twice PyTorch's own error in that type, root mean square over rows.
A choice must be the same unless its two best completions are nearer to each other than twice what a row's
loss may be off. The race: means of 20 steps within 0.05, twice the 2e-2 by which two runs of one PyTorch
program differ (README.md) and something for its 600 steps.
"""
import argparse
import concurrent.futures
import contextlib
import copy
import glob
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import traceback

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")

import numpy as np
import torch
import torch.nn.functional as F

import train_gpt2
from check_gpu import HERE, CommandFailed, check, counts, run, skip
from formats import (MAGIC_TENSORS, header_words, parse_model, read_header, write_checkpoint,
                     write_shard)
from gpt2 import random_params, setup_device

sys.path.append(os.path.join(HERE, "..", "test"))
from trainer import write_questions

EVAL = os.path.join(HERE, "..", "eval")
PROMPT = "The configuration file names a directory, in which the"
TEXTS = [("The package manager keeps a list of", " all packages that are installed."),
         ("A man is sitting on a roof. He", " starts pulling up roofing on a roof."), ("Yes", "?"),
         ("1 + 1 =", " 2\n"), ("In den Bergen liegt", " im Winter viel Schnee, \u00fcberall.")]
LOSS_LIMIT = 2e-5                                       # in fp32, as in test_gpt2.cu


def say(text):
    print(text, flush=True)


@contextlib.contextmanager
def failures(what):
    """Whatever goes wrong is a failure, and the rest goes on."""
    try:
        yield
    except (Exception, SystemExit) as e:
        where = traceback.extract_tb(e.__traceback__)[-1]
        check(False, f"{what}: {type(e).__name__} in {where.name}, line {where.lineno}: {e}")


def cpus():
    return len(os.sched_getaffinity(0))


# ---- the programs ----
def trainer(args, precision, *flags):
    """Its words. FP32 without TF32, which is another arithmetic."""
    exact = ["-f", 0] if precision == "FP32" else []
    return [str(word) for word in [args.train.format(precision=precision), *flags, *exact]]


def tester(args, precision, *words):
    exact = ["-f", 0] if precision == "FP32" else []
    return [str(word) for word in [args.test.format(precision=precision), *words, *exact]]


# ---- random models and tokens ----
def made_up(rng, V, count):
    """Tokens of which some come often."""
    return (V * rng.random(count) ** 3).astype(np.int64)


# ---- hf ----
class Size:
    """One model, its files, and what is done with it beside the others."""

    def __init__(self, args, text, seed):
        self.text, self.dims = text, parse_model(text)
        self.folder = os.path.join(args.work, re.sub(r"\W+", "_", text))
        shutil.rmtree(self.folder, ignore_errors=True)
        os.makedirs(self.folder)
        rng = np.random.default_rng(seed)
        dims = self.dims
        write_checkpoint(self.path("model.bin"), dims, random_params(dims, seed, args.device))
        self.row = made_up(rng, dims.V, dims.maxT + 1)
        with open(self.path("tokens.bin"), "wb") as f:
            header_words(MAGIC_TENSORS, 2, 1, dims.maxT).tofile(f)
            for tokens in (self.row[:-1], self.row[1:]):
                tokens.astype("<i4").tofile(f)
        # transformers shifts by itself: a row of all positions has one target less than positions
        self.val = made_up(rng, dims.V, 2 * (dims.maxT - 1) + 1)
        write_shard(self.path("val.bin"), self.val)

    def path(self, name):
        return os.path.join(self.folder, name)

    def export(self):
        run([sys.executable, os.path.join(EVAL, "export_hf.py"), self.path("model.bin"), self.path("hf")])

    def logits(self, args):
        out = self.path("ours.bin")
        run(tester(args, "FP32", "dump-grads", self.path("model.bin"), self.path("tokens.bin"), out, 0))
        with open(out, "rb") as f:
            read_header(f, out, MAGIC_TENSORS)
            values = np.fromfile(f, "<i4", 2 * self.dims.maxT)
            logits = np.fromfile(f, "<f4", self.dims.maxT * self.dims.V)
        if not np.array_equal(values[:self.dims.maxT], self.row[:-1]) or os.path.getsize(out) % 4:
            raise CommandFailed(f"{out} is about other tokens")
        return torch.from_numpy(logits.reshape(self.dims.maxT, self.dims.V))

    def loss(self, args):
        out = run(trainer(args, "FP32", "-e", self.path("model.bin"), "-x", 0, "-j", self.path("val.bin"),
                          "-b", 1, "-m", 2, "-t", self.dims.maxT - 1))
        return float(re.search(r"^val loss (\S+)", out, re.M)[1])

    def text_of(self, args):
        command = trainer(args, "FP32", "-e", self.path("model.bin"), "-x", 0, "--prompt", PROMPT,
                          "--temperature", 0, "-g", args.generate)
        made = subprocess.run(command, capture_output=True, timeout=400)
        if made.returncode:
            raise CommandFailed(f"{shlex.join(command)}: {made.stderr.decode(errors='replace')[-300:]}")
        return made.stdout.decode(errors="replace").removesuffix("\n")


def check_hf(args):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    by_size = sorted(args.sizes, key=lambda text: -parse_model(text).L * parse_model(text).C)
    sizes, exported, ours = [], {}, {}
    with concurrent.futures.ThreadPoolExecutor(max(2, cpus() // 2)) as pool:
        for seed, text in enumerate(by_size):           # the largest has most to do: it begins
            size = Size(args, text, seed)
            exported[size] = pool.submit(size.export)
            ours[size] = [pool.submit(f, args) for f in (size.logits, size.loss, size.text_of)]
            sizes.insert(0, size)
        for size in sizes:
            with failures(f"hf {size.text}"):
                exported[size].result()
                model = AutoModelForCausalLM.from_pretrained(size.path("hf"), dtype=torch.float32)
                model = model.to(args.device).eval()
                tokenizer = AutoTokenizer.from_pretrained(size.path("hf"))
                with torch.no_grad():
                    compare_hf(args, size, model, tokenizer, *(task.result() for task in ours[size]))
                    if size is sizes[0]:
                        check_harness(args, size, model.float(), tokenizer)
    for size in sizes:
        shutil.rmtree(size.folder)


def compare_hf(args, size, model, tokenizer, our_logits, our_loss, our_text):
    x = torch.from_numpy(size.row[None, :-1]).to(args.device)
    T, what = size.dims.maxT - 1, f"hf {size.text}"
    logits = model(x).logits[0]
    rows = torch.from_numpy(np.stack([size.val[:T + 1], size.val[T:]])).to(args.device)
    loss = np.mean([float(model(row[None], labels=row[None]).loss) for row in rows])
    start = torch.tensor([[tokenizer.eos_token_id, *tokenizer(PROMPT).input_ids]], device=args.device)
    made = model.generate(start, attention_mask=torch.ones_like(start), do_sample=False,
                          max_new_tokens=args.generate, pad_token_id=tokenizer.eos_token_id)[0]
    new = made[start.shape[1]:].tolist()
    if tokenizer.eos_token_id in new:
        new = new[:new.index(tokenizer.eos_token_id)]
    texts = [tokenizer.decode(new[:k], clean_up_tokenization_spaces=False) for k in range(len(new) + 1)]
    text = texts[-1]

    exact = model.double()(x).logits[0]
    scale = exact.square().mean().sqrt()
    far = {who: (values.to(args.device).double() - exact) / scale
           for who, values in (("ours", our_logits), ("theirs", logits))}
    for kind, factor, measure in (("rms", 3, lambda d: float(d.square().mean().sqrt())),
                                  ("largest", 6, lambda d: float(d.abs().max()))):
        mine, limit = measure(far["ours"]), factor * measure(far["theirs"])
        check(mine <= limit, f"{what}: logits, {kind} error / rms: {mine:.2e}, limit {limit:.2e}: "
              f"{factor} times transformers' own fp32")
    check(abs(our_loss - loss) <= LOSS_LIMIT,
          f"{what}: loss {our_loss:.6f}, transformers {loss:.6f}, limit {LOSS_LIMIT:g}")
    check(len(set(new)) > 3, f"{what}: {len(set(new))} different tokens in its greedy text")
    # in fp32 texts may part only where two tokens' logits are as near to each other as rounding is far
    alike = len(os.path.commonprefix([our_text, text]))
    parting = sum(len(begin) <= alike for begin in texts) - 1       # the token that differs; the end counts
    best = model(made[None]).logits[0, start.shape[1] - 1:-1].topk(2).values
    two = best[min(parting, len(best) - 1)]
    gap, rounding = float(two[0] - two[1]), 6 * float(far["theirs"].abs().max() * scale)
    note = "" if our_text == text else f": ours {our_text!r}, transformers {text!r}; gap there {gap:.1e}"
    check(our_text == text or gap <= 2 * rounding, f"{what}: greedy text of {len(new)} tokens{note}")


def check_harness(args, size, model, tokenizer):
    """What the lm-eval harness (lm_eval/models/huggingface.py) does with a folder: it asks for config, model
    and tokenizer by their Auto classes, encodes context and both together, and adds up log-likelihoods of
    what is more in both."""
    from transformers import AutoConfig
    config = AutoConfig.from_pretrained(size.path("hf"))
    facts = (config.model_type, config.n_positions, config.vocab_size, len(tokenizer), tokenizer.eos_token_id)
    want = ("gpt2", size.dims.maxT, size.dims.V, size.dims.V, size.dims.V - 1)
    check(facts == want, f"harness: type, positions, vocabulary, tokenizer, end of text: {facts}")
    rows = []
    for context, continuation in TEXTS:
        head, whole = tokenizer(context).input_ids, tokenizer(context + continuation).input_ids
        rows.append((head, whole[len(head):]))
        check(tokenizer.decode(whole) == context + continuation, f"harness: {context!r}... and back")
    theirs = torch_sums(args, model, rows, size.dims.maxT)
    write_questions(size.path("texts.bin"), [(head, [tail] * 4) for head, tail in rows], [0] * len(rows))
    ours = our_sums(args, "FP32", size, "texts.bin", 2)[:, 0]
    lengths = np.array([len(tail) for _, tail in rows])
    worst = float(np.abs((ours - theirs) / lengths).max())
    check(worst <= LOSS_LIMIT,
          f"harness: log-likelihoods of {len(rows)} texts: {worst:.1e} a token, limit {LOSS_LIMIT:g}")
    try:
        from lm_eval.api.instance import Instance
        from lm_eval.models.huggingface import HFLM
    except ImportError:
        return                                          # it is in few places; above is what it would do
    harness = HFLM(pretrained=size.path("hf"), device=args.device, dtype="float32", batch_size=2)
    asked = [Instance("loglikelihood", {}, text, i) for i, text in enumerate(TEXTS)]
    said = np.array([value for value, _ in harness.loglikelihood(asked, disable_tqdm=True)])
    worst = float(np.abs((ours + said) / lengths).max())
    check(worst <= LOSS_LIMIT, f"harness: lm_eval itself says the same: {worst:.1e} a token")


# ---- questions ----
def make_questions(rng, V, T, count, context, completion):
    """Contexts and completions of so many tokens, in thousandths of T."""
    def tokens(low, high):
        return made_up(rng, V, 1 + rng.integers(low * T // 1000, high * T // 1000)).tolist()
    return [(tokens(*context), [tokens(*completion) for _ in range(4)]) for _ in range(count)]


def torch_sums(args, model, rows, T):
    """The summed loss of each row's completion: each row cut on its left to T + 1 tokens and padded on its
    right to the longest of its batch. Written from the evaluation's definition alone."""
    cut = [((context + completion)[-(T + 1):], len(completion)) for context, completion in rows]
    sums, order = np.zeros(len(rows)), sorted(range(len(rows)), key=lambda i: len(cut[i][0]))
    while order:
        longest = min(T, 32 + len(cut[order[0]][0]))
        batch = [i for i in order[:max(1, args.positions // longest)] if len(cut[i][0]) <= longest + 1]
        order = order[len(batch):]
        x = torch.zeros(len(batch), longest, dtype=torch.long)
        y = torch.full((len(batch), longest), -100)
        for at, i in enumerate(batch):
            row, length = torch.tensor(cut[i][0]), len(cut[i][0]) - 1
            x[at, :length] = row[:-1]
            first = max(0, length - cut[i][1])
            y[at, first:length] = row[first + 1:]
        with torch.no_grad():
            logits = model(x.to(args.device)).logits
        losses = F.cross_entropy(logits.float().flatten(0, 1), y.to(args.device).flatten(), reduction="none")
        sums[batch] = losses.view(y.shape).double().sum(1).cpu().numpy()
        del logits, losses
    return sums


def our_sums(args, precision, size, name, B):
    """(questions,4), in the order of the file whatever the batches were."""
    out = run(tester(args, precision, "dump-sums", size.path("model.bin"), size.path(name), B,
                     size.dims.maxT))
    found = [line.split() for line in out.splitlines() if re.fullmatch(r"\d+ \d+ \S+", line)]
    sums = np.full((len(found) // 4, 4), np.nan)
    for question, choice, value in found:
        sums[int(question), int(choice)] = float(value)
    return sums


def undecided(values, error):
    """Questions whose two best completions are too near each other for rows that are so wrong."""
    ordered = np.sort(values, axis=1)
    return ordered[:, 1] - ordered[:, 0] <= 2 * error


def check_questions(args):
    from transformers import GPT2LMHeadModel
    size = Size(args, args.sizes[0], 77)
    size.export()
    model = GPT2LMHeadModel.from_pretrained(size.path("hf"), dtype=torch.float32).to(args.device).eval()
    rng, T, V = np.random.default_rng(5), size.dims.maxT, size.dims.V
    forms = {"hellaswag": make_questions(rng, V, T, args.questions, (15, 100), (5, 45)),
             "mmlu": make_questions(rng, V, T, args.questions // 4, (60, 1300), (1, 60))}
    for form, questions in forms.items():
        labels = rng.integers(0, 4, len(questions)).tolist()
        write_questions(size.path(form + ".bin"), questions, labels)
        rows = [(context, completion) for context, four in questions for completion in four]
        lengths = np.array([min(len(tail), T) for _, tail in rows]).reshape(-1, 4)
        cut = sum(len(head) + len(tail) > T + 1 for head, tail in rows)
        say(f"      {form}: {len(questions)} questions, {cut} of {len(rows)} rows longer than T = {T}")
        exact = torch_sums(args, model, rows, T).reshape(-1, 4)
        low = torch_sums(args, copy.deepcopy(model).bfloat16(), rows, T).reshape(-1, 4)
        for precision in args.precisions:
            compare_sums(args, size, form, precision, labels, lengths, exact, low)
    shutil.rmtree(size.folder)


def compare_sums(args, size, form, precision, labels, lengths, exact, low):
    what = f"{form} {precision}"
    ours = our_sums(args, precision, size, form + ".bin", 8)
    if ours.shape != exact.shape:
        check(False, f"{what}: {ours.size} rows, expected {exact.size}")
        return
    far = np.abs((ours - exact) / lengths)
    if precision == "FP32":
        check(far.max() <= LOSS_LIMIT,
              f"{what}: {far.size} rows' mean losses: {far.max():.1e}, limit {LOSS_LIMIT:g}")
    else:
        theirs = np.abs((low - exact) / lengths)
        mine, limit = (float(np.sqrt(np.mean(d * d))) for d in (far, 2 * theirs))
        check(mine <= limit, f"{what}: {far.size} rows' mean losses: {mine:.1e} rms, limit {limit:.1e}: "
              "twice PyTorch's in bf16")
    for kind, mine, theirs, rough in (("sum", ours, exact, low),
                                      ("mean", ours / lengths, exact / lengths, low / lengths)):
        near = LOSS_LIMIT * (lengths.max() if kind == "sum" else 1) if precision == "FP32" else \
            2 * np.abs(rough - theirs).max()
        open_ones = undecided(theirs, near)
        same = (mine.argmin(1) == theirs.argmin(1)) | open_ones
        check(same.all(), f"{what}: choices by {kind}: {(~same).sum()} of {len(same)} others, "
              f"{open_ones.sum()} nearly undecided")
    asked = run(trainer(args, precision, "-e", size.path("model.bin"), "-x", 0, "-h", 1, "-b", 3,
                        "--eval-data", size.path(form + ".bin")))
    printed = [float(v) for v in re.search(r"^eval acc_norm (\S+) \| acc (\S+) \| loss (\S+)$", asked,
                                           re.M).groups()]
    at = np.arange(len(labels)), np.array(labels)
    means = ours / lengths
    score = [np.mean(means.argmin(1) == labels), np.mean(ours.argmin(1) == labels), np.mean(means[at])]
    # -b 3 against 8 may use other tiles, so the loss may round otherwise; of questions hardly one can turn
    limit = [0 if precision == "FP32" else 2 / len(labels)] * 2 + [1e-5 if precision == "FP32" else 1e-3]
    worst = [abs(a - b) for a, b in zip(printed, score)]
    check(all(d <= bound + 1e-6 for d, bound in zip(worst, limit)),
          f"{what}: -h 1 -b 3 prints acc_norm, acc, loss {printed}; these rows' "
          f"{np.round(score, 6).tolist()}")


# ---- race ----
def race_flags(args):
    """(ours, the twin's). The last learning rate is a tenth of the first. After a warm-up of 15 of 300
    steps the two parted in step 25, where PyTorch's loss jumped, and never met again (dev/bench/NOTES.md)."""
    tokens, warmup = args.rows * args.length, max(1, args.steps // 6)
    ours = ["-e", args.race_model, "-i", args.data + "_train*.bin", "-j", args.data + "_val*.bin",
            "-b", args.rows, "-t", args.length, "-z", tokens, "-x", args.steps,
            "-l", "6e-4", "-u", warmup, "-q", 0.1, "-c", 0.1, "-v", 0, "-s", 0]
    cuda = int(args.device == "cuda")
    theirs = ["--model", args.race_model, "--input_bin", args.data + "_train*.bin", "--batch_size", args.rows,
              "--sequence_length", args.length, "--num_iterations", args.steps, "--learning_rate", "6e-4",
              "--warmup_iters", warmup, "--learning_rate_decay_frac", 0.1, "--weight_decay", 0.1,
              "--overfit_single_batch", 0, "--dtype", "bfloat16" if cuda else "float32", "--compile", cuda,
              "--fused", cuda, "--tensorcores", cuda, "--deterministic", 0, "--device", args.device]
    return ours, [str(word) for word in theirs]


def compile_ahead(args):
    """torch.compile's files, made while other things are checked; the race counts steps, not compilation."""
    words = race_flags(args)[1]
    words[words.index("--num_iterations") + 1] = "1"
    with open(os.path.join(args.work, "compile.log"), "w") as log:
        return subprocess.Popen([sys.executable, os.path.join(HERE, "train_gpt2.py"), *words], stdout=log,
                                stderr=log)


def our_race(args, folder):
    precision = args.precisions[-1]
    shutil.rmtree(folder, ignore_errors=True)
    run([args.train.format(precision=precision), *map(str, race_flags(args)[0]), "-o", folder], timeout=1200)
    with open(os.path.join(folder, "metrics.jsonl")) as f:
        rows = [row for row in map(json.loads, f) if "loss" in row and "ms" in row]
    return [(row["loss"], row["ms"]) for row in rows], max(glob.glob(os.path.join(folder, "model_*.bin")))


def twin_race(args, folder):
    """The same in PyTorch, and its log in the form of ours."""
    final = os.path.join(args.work, "twin.bin")
    words = train_gpt2.parse_arguments(race_flags(args)[1] + ["--write_final", final])
    steps = train_gpt2.train(words, *train_gpt2.initial_weights(words), show=lambda line: None)
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "main.log"), "w") as log, \
            open(os.path.join(folder, "metrics.jsonl"), "w") as metrics:
        for i, row in enumerate(steps):
            log.write("s:%d trl:%.6f lr:%.6e norm:%.4f\n" % (i, row["loss"], row["lr"], row["norm"]))
            speed = 1e3 * words.total_batch_size / row["ms"]
            metrics.write(json.dumps({"step": i + 1, "loss": row["loss"], "ms": row["ms"],
                                      "tokens_per_s": speed}) + "\n")
    return [(row["loss"], row["ms"]) for row in steps], final


def check_race(args):
    patterns = [args.data + end for end in ("_train*.bin", "_val*.bin")]
    if not args.data or not all(glob.glob(pattern) for pattern in patterns):
        skip(f"race: no shards {' and '.join(patterns)}: give --data")
        return
    out = args.out or args.work
    folders = [os.path.join(out, name) for name in ("ours", "pytorch")]
    ours, our_model = our_race(args, os.path.join(args.work, "ours"))
    if out != args.work:
        os.makedirs(folders[0], exist_ok=True)
        for name in ("main.log", "metrics.jsonl"):
            shutil.copy(os.path.join(args.work, "ours", name), folders[0])
    theirs, their_model = twin_race(args, folders[1])
    compare_race(args, ours, theirs)
    val = []
    with open(os.path.join(out, "samples.txt"), "w") as f:
        for who, model in (("ours", our_model), ("PyTorch", their_model)):
            asked = run(trainer(args, args.precisions[-1], "-e", model, "-x", 0, "-j",
                                args.data + "_val*.bin", "-b", args.rows, "-t", args.length, "-m", 16))
            val.append(float(re.search(r"^val loss (\S+)", asked, re.M)[1]))
            f.write(f"== {who}, after {args.steps} steps, validation loss {val[-1]}\n")
            f.write(f"-- {PROMPT} ...\n")
            f.write(run(trainer(args, args.precisions[-1], "-e", model, "-x", 0, "--prompt", PROMPT,
                                "-g", 100, "--temperature", 0.8, "--top-k", 40, "--num-samples", 2)) + "\n")
    check(abs(val[0] - val[1]) <= 0.05,
          f"race: validation losses by our program: {val[0]:.4f}, PyTorch's model {val[1]:.4f}, limit 0.05")


def compare_race(args, ours, theirs):
    if len(ours) != len(theirs):
        check(False, f"race: {len(ours)} steps of ours, {len(theirs)} of PyTorch")
        return
    losses = np.array([[row[0] for row in side] for side in (ours, theirs)])        # (2,steps)
    times = np.cumsum([[row[1] for row in side] for side in (ours, theirs)], axis=1) / 1e3
    low = args.device == "cuda"
    first, near = abs(losses[0, 0] - losses[1, 0]), 1e-2 if low else 1e-4
    check(first <= near, f"race: first losses {losses[0, 0]:.5f}, {losses[1, 0]:.5f}, limit {near:g}")
    window = min(20, len(ours))
    means = np.stack([np.convolve(side, np.ones(window) / window, "valid") for side in losses])
    far = float(np.abs(means[0] - means[1]).max())
    check(far <= 0.05, f"race: means of {window} steps: {far:.4f} apart at most, limit 0.05; a single step "
          f"{np.abs(losses[0] - losses[1]).max():.4f}; the last {means[0, -1]:.4f}, {means[1, -1]:.4f}")
    for share in (0.25, 0.5, 1.0):                      # from the first step's end on: it loads and compiles
        level = means[:, int(share * means.shape[1]) - 1].max()
        reach = [window - 1 + next(i for i, v in enumerate(side) if v <= level) for side in means]
        when = [f"{times[k, at] - times[k, 0]:.1f} s (step {at + 1})" for k, at in enumerate(reach)]
        say(f"      race: a mean loss of {level:.3f}: ours after {when[0]}, PyTorch {when[1]}")
    tokens = args.rows * args.length
    for k, who in enumerate(("ours", "PyTorch")):
        usual = float(np.median(np.diff(times[k]))) if len(ours) > 1 else times[k, 0]
        say(f"      race: {who}: {times[k, -1]:.1f} s, of which the first step {times[k, 0]:.1f}; median "
            f"{1e3 * usual:.2f} ms, {tokens / usual:.0f} tokens/s")


# ---- main ----
PARTS = {"hf": check_hf, "questions": check_questions, "race": check_race}


def parse_arguments():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--only", default=",".join(PARTS))
    p.add_argument("--train", default="build/check/train_gpt2.{precision}", help="may contain {precision}")
    p.add_argument("--test", default="build/check/test_gpt2.{precision}", help="likewise")
    p.add_argument("--precisions", default="FP32,BF16", help="the last one races")
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    p.add_argument("--sizes", nargs="+", default=["d12", "d24", "d36", "d48"])
    p.add_argument("--generate", type=int, default=32, help="tokens of greedy text")
    p.add_argument("--questions", type=int, default=400, help="whose rows are compared; of MMLU's a fourth")
    p.add_argument("--positions", type=int, default=16384, help="of PyTorch's batches of questions")
    p.add_argument("--data", default="", help="of the race: shards up to _train*.bin and _val*.bin")
    p.add_argument("--race_model", default="d12")
    p.add_argument("--steps", type=int, default=600)
    p.add_argument("--rows", type=int, default=64, help="of a step of the race")
    p.add_argument("--length", type=int, default=1024, help="of a row of the race")
    p.add_argument("--work", default="", help="folder for models, 36 GB for all sizes (default: in /dev/shm "
                   "if it has the room, else build/check_eval)")
    p.add_argument("--out", default="", help="folder for what is worth keeping, under a megabyte")
    args = p.parse_args()
    args.precisions, args.only = args.precisions.split(","), args.only.split(",")
    unknown = set(args.only) - set(PARTS)
    if unknown:
        p.error(f"unknown {' '.join(sorted(unknown))}; there are {' '.join(PARTS)}")
    memory = "/dev/shm"
    if not args.work:
        room = os.path.isdir(memory) and shutil.disk_usage(memory).free > 40e9
        args.work = os.path.join(memory, "check_eval") if room else "build/check_eval"
    return args


def main():
    args = parse_arguments()
    if args.device == "cuda" and not torch.cuda.is_available():
        skip("no GPU that PyTorch can use")
    else:
        for folder in filter(None, (args.work, args.out)):
            os.makedirs(folder, exist_ok=True)
        check_all(args)
    print("%d passed, %d failed, %d skipped" % (counts["passed"], counts["failed"], counts["skipped"]))
    raise SystemExit(1 if counts["failed"] else 0)


def check_all(args):
    setup_device(args.device, deterministic=False)
    races = "race" in args.only and args.device == "cuda" and glob.glob(args.data + "_train*.bin")
    ahead = compile_ahead(args) if races else None
    for name in args.only:
        start = time.perf_counter()
        if name == "race" and ahead:
            with contextlib.suppress(subprocess.TimeoutExpired):
                ahead.wait(timeout=120)
            ahead.kill()
        with failures(name):
            PARTS[name](args)
        if args.device == "cuda":
            torch.cuda.empty_cache()
        say(f"== {name}: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
