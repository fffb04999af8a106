#!/usr/bin/env python3
"""Holds our programs against PyTorch and transformers. Closes with N passed, N failed, N skipped.

    dev/gpu.sh build compare                        # on a GPU, FP32 and BF16
    make train_gpt2cpu test_gpt2cpu && python3 dev/reference/compare.py --device cpu

CASES has models of both families, and what is checked of each. All of their weights are random, the same on
every machine: no bias is 0, no gain is 1. PyTorch's side is the twin (gpt2.py, llama.py); its float64 is the
truth. Cases run side by side, one for two cores.

    grads     one batch: loss within 2e-5 (16 bits: 0.02), logits and every gradient within twice PyTorch's
              error in this type, or in FP32 2e-5 and 1e-4, if that is more. With dropout the batch goes in
              two micro-steps, and the twin recomputes the trainer's masks
    steps     ten steps of AdamW by the trainer, each on another batch. FP32: losses within 1e-4 and norms
              within 2e-4 of themselves, in 16 bits 0.03, or twice the error of PyTorch (BF16: autocast)
    adamw     FP32: two steps from our gradients: PyTorch's AdamW gives the same weights, to the bit; on a
              CPU, where compilers fuse products and sums, to 1e-7
    rounding  BF16: 16 micro-steps that add up in bf16 end nearer to the truth than PyTorch's
    export    FP32: transformers reads the exported folder. With its arithmetic in float64 its logits are the
              twin's to 1e-9. In float32 it answers questions as -h 1 does, and writes the same text
"""
import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from unittest import mock

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")

import train_gpt2               # first: it says so if there is no PyTorch
import reference

import numpy as np
import torch
import torch.nn.functional as F
from formats import (NAMES, MAGIC_TENSORS, header_words, parse_model, read_checkpoint, read_tensors,
                     round_params, write_checkpoint, write_shard)
from gpt2 import (drop_as_trainer, get_params, load_params, make_optimizer, new_model, random_params,
                  setup_device, tensor_list)

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
sys.path.append(os.path.join(ROOT, "dev/test"))
from outputs import whole_file
from trainer import write_questions

TYPE = {"FP32": "float32", "BF16": "bfloat16", "FP16": "float16"}
SEED, STEPS = 1337, 10                                  # SEED: of the trainer, too
HYPER = {"learning_rate": 1e-4, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
found = []                              # of the case at hand: (its kind, how many, what is printed)


@dataclasses.dataclass
class Case:
    text: str
    checks: str = ""                    # besides grads
    rows: int = 4                       # of its batch
    dropout: float = 0.0
    block: dict = dataclasses.field(default_factory=dict)       # with which it is not GPT-2
    large: bool = False                 # for GPUs

    def __str__(self):
        block = " ".join(f"{name} {value}" for name, value in self.block.items())
        return f"{self.text} {block} {f'dropout {self.dropout}' if self.dropout else ''}".strip()


CASES = [
    *(Case("L3,NH2,C40,T33,V509", dropout=p, block={"block": block, "norm": norm})
      for p, block, norm in itertools.product((0, 0.15), range(3), range(2))),
    *(Case("llama:L2,T33,V509," + shape, dropout=p) for p in (0, 0.15) for shape in (
        "NH4,NKV2,HS16,C40,F72,qk_norm,eps=0.01",
        "NH4,NKV2,HS16,C40,F72,qkv_bias,rope_factor=8,rope_low=1,rope_high=4,rope_original=40",
        "NH4,NKV2,HS16,C40,F72,qk_norm,value_embed",
        "NH3,NKV1,HS32,C48,F80,relu2,qk_norm,no_norm_weights,embed_norm,tied,softcap=0.5")),
    Case("L2,NH12,C768,T64,V1000", "steps adamw rounding", 16),
    *(Case("llama:L2,NH6,NKV2,HS128,C768,F2048,T64,V1000,qk_norm" + word, "steps adamw rounding", 16)
      for word in ("", ",value_embed")),
    *(Case("llama:L3,T96,V50257,C64,F176,NH4,NKV2," + shape, "export") for shape in (
        "HS16,theta=5e5", "HS32,qk_norm,tied,eps=1e-6",                             # Llama, Qwen3
        "HS16,theta=5e5,tied,rope_factor=32,rope_low=1,rope_high=4,rope_original=48", "HS16,rope_factor=4",
        "HS16,qkv_bias,tied,eps=1e-6,theta=1e6",                                    # Qwen2, then NanoChat
        "HS16,relu2,qk_norm,no_norm_weights,embed_norm,softcap=15,eps=1e-6")),
    Case("L3,NH2,C64,T96,V50257", "export"),
    *(Case(text, "steps export", 2, large=True) for text in ("d12", "m12"))]


def check(ok, text, count=1):
    found.append(("ok" if ok else "FAIL", count, text))


def check_each(title, values, limits, theirs=None):
    """By name; NaN fails. One line for all that pass, with the closest, and one for each failure."""
    said = {name: f"{name}: {value:.2e}, limit {limits[name]:.2e}" +
            (f", PyTorch's {theirs[name]:.2e}" if theirs else "") for name, value in values.items()}
    good = [name for name, value in values.items() if value <= limits[name]]
    for name in values.keys() - good:
        check(False, f"{title} {said[name]}")
    if good:
        name = max(good, key=lambda name: values[name] / (limits[name] or 1))
        check(True, f"{title}: {len(good)} values, closest {said[name]}", len(good))


class Ours:
    """Our programs of one precision, and a case's files. FP32 without TF32, which is another arithmetic."""

    def __init__(self, args, case, precision, folder):
        self.case, self.precision, self.folder, self.device = case, precision, folder, args.device
        self.train, self.test = (os.path.join(ROOT, f"{name}_gpt2cpu" if args.device == "cpu" else
                                              f"build/check/{name}_gpt2.{precision}")
                                 for name in ("train", "test"))
        self.fp32, self.exact = precision == "FP32", ["-f", 0] if precision == "FP32" else []
        self.dims = dataclasses.replace(parse_model(case.text), **case.block)
        self.params = random_params(self.dims, args.seed)
        if precision != "FP32":
            self.params = round_params(self.params, TYPE[precision])
        self.model, self.shard = self.path("model.bin"), self.path("tokens.bin")
        write_checkpoint(self.model, self.dims, self.params, version=5 if precision == "BF16" else 3)
        # some tokens come often; enough for STEPS batches, of which the first is x and y
        draws = np.random.default_rng(args.seed).random(case.rows * STEPS * self.dims.maxT + 1)
        self.tokens = (self.dims.V * draws ** 3).astype(np.int64)
        write_shard(self.shard, self.tokens)
        count = case.rows * self.dims.maxT
        self.x, self.y = (self.tokens[i:i + count].reshape(case.rows, -1) for i in (0, 1))

    def path(self, name):
        return os.path.join(self.folder, name)

    def run(self, *words):
        words = [str(word) for word in words]
        done = subprocess.run(words, capture_output=True, timeout=400)
        out, err = (said.decode(errors="replace") for said in (done.stdout, done.stderr))
        if done.returncode:
            said = (err.strip() or out.strip() or "no output").splitlines()
            raise RuntimeError(f"exit {done.returncode}: {' '.join(words)}: {' / '.join(said[-3:])}")
        return out

    def evaluated(self, *flags):
        return self.run(self.train, "-e", self.model, "-x", 0, *flags, *self.exact)

    def trained(self, *flags):
        rows, T = self.x.shape
        return self.run(self.train, "-e", self.model, "-i", self.shard, "-j", self.shard, "-b", rows, "-t", T,
                        "-z", rows * T, "-l", HYPER["learning_rate"], "-c", HYPER["weight_decay"],
                        "-k", "constant", "-v", 0, "-s", 0, *flags, *self.exact)

    def tensors(self, micro_steps=1, *flags, model=""):
        """Logits, loss and gradients of the batch. The dump's logits are without dropout."""
        batch, out = self.path("batch.bin"), self.path("ours.bin")
        with whole_file(batch) as f:
            header_words(MAGIC_TENSORS, 2, *self.x.shape).tofile(f)
            np.stack([self.x, self.y]).astype("<i4").tofile(f)
        self.run(self.test, "dump-grads", model or self.model, batch, out, micro_steps, *flags, *self.exact)
        made, cap = read_tensors(out, self.dims), getattr(self.dims, "softcap", 0.0)
        logits = torch.from_numpy(made["logits"]).to(self.device)
        if cap:
            logits = cap * torch.tanh(logits.double() / cap)    # our classifier caps them where it reads
        return logits, made["loss"], made["grads"]

    def twin(self, dtype, **options):
        return reference.run(self.dims, self.params, self.x, self.y, dtype, self.device, **options)


# ---- the checks ----
def errors_of(run, truth):
    """Of the loss, the logits and by name of all gradients that the model has."""
    logits, loss, grads = run
    return {"loss": abs(loss - truth[1]), "logits": reference.logits_error(logits, truth[0]),
            **{name: reference.relative_error(torch.as_tensor(grads[name]).to(grad.device), grad)
               for name, grad in truth[2].items()}}


def check_grads(ours):
    """Returns the truth: the batch's logits, loss and gradients in float64."""
    p = ours.case.dropout
    dropped = drop_as_trainer(SEED, p, ours.device)
    logits, loss, grads = ours.twin(torch.float64, dropped=dropped)
    truth = logits, loss, {name: grad for name, grad in grads.items() if grad.numel()}
    if ours.precision == "FP16":
        run = reference.run_float16(ours.dims, ours.params, ours.x, ours.y, ours.device, dropped)[1:]
    else:
        run = ours.twin(getattr(torch, TYPE[ours.precision]), sdpa=True, dropped=dropped)
    theirs = errors_of(run, truth)
    limits = {name: max(2 * error, (2e-5 if name == "logits" else 1e-4) * ours.fp32)
              for name, error in theirs.items()} | {"loss": 2e-5 if ours.fp32 else 0.02}
    mine = errors_of(ours.tensors(2 if p else 1, *(["--dropout", p] if p else [])), truth)
    if p:
        del mine["logits"]
    check_each("grads", mine, limits, theirs)
    return truth


def check_steps(ours):
    ours.trained("--shuffle", 0, "-x", STEPS, "-o", ours.path("steps"))
    with open(ours.path("steps/metrics.jsonl")) as f:
        rows = [row for row in map(json.loads, f) if "norm" in row]
    flags = {**HYPER, "input_bin": ours.shard, "shuffle": 0, "overfit_single_batch": 0, "device": ours.device,
             "batch_size": ours.case.rows, "sequence_length": ours.dims.maxT, "num_iterations": STEPS,
             "learning_rate_decay_frac": 1}
    words = [f"--{name}={value}" for name, value in flags.items()]
    exact, theirs = (train_gpt2.train(train_gpt2.parse_arguments([*words, f"--dtype={dtype}"]), ours.dims,
                                      ours.params, show=lambda line: None)
                     for dtype in ("float64", "float32" if ours.fp32 else "bfloat16"))
    for key, floor in (("loss", 1e-4 if ours.fp32 else 0.03), ("norm", 2e-4 if ours.fp32 else 0.03)):
        far, usual = ({str(i): abs(row[key] - want[key]) / (want[key] if key == "norm" else 1)
                       for i, (row, want) in enumerate(zip(some, exact, strict=True))}
                      for some in (rows, theirs))
        check_each(f"steps, {key}", far, dict.fromkeys(far, max(floor, 2 * max(usual.values()))))


def check_adamw(ours):
    """The second step is the first with m, v and a bias correction of their own."""
    theirs = new_model(ours.dims, ours.device)
    load_params(theirs, ours.params)
    optimizer, model = make_optimizer(theirs, HYPER), ours.model
    for step in (1, 2):
        grads, folder = ours.tensors(model=model)[2], ours.path(f"adamw{step}")
        ours.trained("-x", step, "-a", 1, "--grad-clip", 0, "-o", folder)
        model = os.path.join(folder, f"model_{step:08d}.bin")
        after = read_checkpoint(model)[1]
        for name in NAMES:
            for i, p in enumerate(tensor_list(theirs, name)):
                p.grad = torch.from_numpy(grads[name].reshape((-1,) + p.shape)[i].copy()).to(ours.device)
        optimizer.step()
        stepped = get_params(theirs)
        far = {name: reference.relative_error(after[name], stepped[name]) for name in NAMES
               if after[name].size}
        check_each(f"adamw step {step}", far, dict.fromkeys(far, 0 if ours.device == "cuda" else 1e-7))


def check_rounding(ours, truth):
    theirs = errors_of(ours.twin(torch.bfloat16, sdpa=True, micro_steps=ours.case.rows), truth)
    mine = errors_of(ours.tensors(ours.case.rows, "--grad-dtype", "bf16"), truth)
    check_each("rounding", {name: mine[name] for name in truth[2]}, theirs)


def check_export(ours, truth):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    folder = ours.path("hf")
    ours.run(sys.executable, os.path.join(ROOT, "dev/hf.py"), "export", ours.model, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(ours.device).eval()
    model.requires_grad_(False)
    # its norms and angles go through float32, whatever the model's type: here that word means float64
    with mock.patch.multiple(torch, float32=torch.float64, float=torch.float64), \
            mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        exact = AutoModelForCausalLM.from_config(model.config).double().to(ours.device).eval()
        exact.load_state_dict(model.state_dict())
        with torch.no_grad():
            logits = exact(torch.from_numpy(ours.x).to(ours.device), use_cache=False).logits
    error = reference.logits_error(logits, truth[0])
    check(error <= 1e-9, f"export: {type(model).__name__} in float64: logits {error:.1e}, limit 1e-9")
    check_questions(ours, model)
    check_text(ours, model, AutoTokenizer.from_pretrained(folder))


def check_questions(ours, model, count=24):
    """Of HellaSwag's form. transformers answers them row by row."""
    rng = np.random.default_rng(SEED)
    ends = np.cumsum(rng.integers(2, ours.dims.maxT // 3, 5 * count))
    parts = [part.tolist() for part in np.split(np.resize(ours.tokens, ends[-1]), ends[:-1])]
    questions = [(parts[i], parts[i + 1:i + 5]) for i in range(0, 5 * count, 5)]
    labels = rng.integers(0, 4, count)
    write_questions(ours.path("questions.bin"), questions, labels.tolist())
    sums, means = np.empty((2, count, 4))
    for (i, (head, tails)), k in itertools.product(enumerate(questions), range(4)):
        row = torch.tensor([head + tails[k]], device=ours.device)
        logits = model(row[:, :-1]).logits[0, len(head) - 1:]
        sums[i, k] = F.cross_entropy(logits, row[0, len(head):], reduction="sum").item()
        means[i, k] = sums[i, k] / len(tails[k])
    want = [np.mean(means.argmin(1) == labels), np.mean(sums.argmin(1) == labels),
            means[np.arange(count), labels].mean()]
    said = ours.evaluated("-h", 1, "-b", 3, "--eval-data", ours.path("questions.bin"))
    form = r"^eval acc_norm (\S+) \+- .* \| acc (\S+) \+- .* \| loss (\S+) \+- "
    got = re.search(form, said, re.M).groups()
    far = max(abs(float(a) - b) for a, b in zip(got, want))
    check(far <= 2e-5, f"export: acc_norm, acc, loss of questions {' '.join(got)}: {far:.1e} off, limit 2e-5")


def check_text(ours, model, tokenizer):
    prompt = "The configuration file names a directory, in which the"
    mine = ours.evaluated("--prompt", prompt, "--temperature", 0, "-g", 32).removesuffix("\n")
    start = torch.tensor([[tokenizer.eos_token_id, *tokenizer(prompt).input_ids]], device=ours.device)
    made = model.generate(start, attention_mask=torch.ones_like(start), do_sample=False, max_new_tokens=32,
                          pad_token_id=0, output_scores=True, return_dict_in_generate=True)
    new = made.sequences[0, start.shape[1]:]
    text = tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    # two texts may part only where two tokens' logits are as near to each other as rounding is far
    best = torch.cat(made.scores).topk(2).values
    gap = float(((best[:, 0] - best[:, 1]) / best.abs().amax(1)).min())
    check(len(new.unique()) > 3 and (mine == text or gap <= 1e-5),
          f"export: greedy text {text!r}, ours {'the same' if mine == text else repr(mine)}; gap {gap:.1e}")


def check_case(job):
    """(its title, what was found, seconds). What goes wrong is a failure, and the rest goes on."""
    args, precision, case = job
    found.clear()
    start = time.perf_counter()
    if case.large and args.device == "cpu" and not args.only:
        return f"{precision} {case}", [("SKIP", 1, "on a GPU, or with --only")], 0
    try:
        with tempfile.TemporaryDirectory(prefix="compare_") as folder:
            ours = Ours(args, case, precision, folder)
            truth = check_grads(ours)
            if "steps" in case.checks:
                check_steps(ours)
            if "adamw" in case.checks and ours.fp32:
                check_adamw(ours)
            if "rounding" in case.checks and precision == "BF16" and args.device == "cuda":
                check_rounding(ours, truth)
            if "export" in case.checks and ours.fp32:
                check_export(ours, truth)
    except (Exception, SystemExit) as e:
        where = traceback.extract_tb(e.__traceback__)[-1]
        check(False, f"{type(e).__name__} in {where.name}, line {where.lineno}: {e}")
    return f"{precision} {case}", found, time.perf_counter() - start


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    p.add_argument("--precisions", nargs="+", choices=TYPE, help="default: FP32 BF16, on a CPU FP32")
    p.add_argument("--only", default="", help="cases whose name contains this, on a CPU the large ones, too")
    p.add_argument("--seed", type=int, default=SEED, help="of weights and tokens")
    args = p.parse_args()
    setup_device(args.device)                                   # says so if there is none
    precisions = args.precisions or (["FP32"] if args.device == "cpu" else ["FP32", "BF16"])
    cases = [case for case in reversed(CASES) if args.only in str(case)]    # what takes longest goes first
    jobs = [(args, precision, case) for case in cases for precision in precisions]
    counts, cores = {"ok": 0, "FAIL": 0, "SKIP": 0}, os.cpu_count()
    workers = max(1, min(8, cores // 2))
    os.environ["OMP_NUM_THREADS"] = str(cores // workers)       # PyTorch's, and our CPU program's
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, spawn, setup_device, (args.device,)) as pool:
        for title, lines, seconds in pool.map(check_case, jobs):
            print(f"== {title}: {seconds:.1f} s")
            for kind, count, text in lines:
                counts[kind] += count
                print(f"{kind:<5} {text}", flush=True)
    print("%d passed, %d failed, %d skipped" % tuple(counts.values()))
    raise SystemExit(1 if counts["FAIL"] else 0)


if __name__ == "__main__":
    main()
