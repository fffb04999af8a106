"""--plan: memory and time of a run on a GPU that need not be here.
"""
import re

import pytest

from trainer import refused, run, run_ok

pytestmark = pytest.mark.cpu_only

# model, -b, GPUs, FP8, ms a step on H100s and on an H200, commit 5a5cb0b, whose steps are 478104f's
# (NOTES.md). H100s' B=4, d24 and d36 in bf16 are commit 1fbf176's.
MEASURED = [("d12", 64, 1, False, 102.3, 101.9), ("d12", 4, 1, False, 9.0, 8.30),
            ("d24", 48, 1, False, 208.2, 202.9), ("d36", 32, 1, False, 300.2, 290.0),
            ("d48", 16, 1, False, 297.2, 291.9), ("d12", 64, 2, False, 107.1, None),
            ("d48", 16, 2, False, 306.3, None), ("d12", 64, 1, True, 80.7, 78.7),
            ("d24", 48, 1, True, 156.3, 152.1), ("d36", 32, 1, True, 211.8, 205.3),
            ("d48", 16, 1, True, 214.5, 207.6)]


def plan(model, batch, gpu="H200", **flags):
    names = {"-" + name if len(name) < 3 else "--" + name: value for name, value in flags.items()}
    return run_ok({"-e": model, "-t": 1024, "-b": batch, "--plan": gpu, **names}).out


def planned_ms(out):
    return float(re.search(r"^speed: about ([\d.]+) ms a step", out, re.M)[1])


@pytest.mark.parametrize("model, batch, gpus, fp8, h100, h200", MEASURED, ids=str)
def test_time(model, batch, gpus, fp8, h100, h200):
    flags = {"gpus": gpus, "zs": 1 if gpus > 1 else 0, **({"matmul-dtype": "fp8-head"} if fp8 else {})}
    for gpu, measured in (("H100", h100), ("H200", h200)):
        if measured:
            planned = planned_ms(plan(model, batch, gpu=gpu, **flags))
            assert abs(planned / measured - 1) < 0.05, f"{gpu}: {planned} for {measured}"


# model, -b, -t, GPU, optimizer, ms: heads of 128, and the second family. H200's: commit c74dc1f; H100's:
# e4200db
QWEN3 = "llama:L28,NH16,NKV8,HS128,C1024,F3072,T2048,V50257,qk_norm,tied"
OF_HEADS_128 = [("m12", 64, 1024, "H100", "muon", 107.9), (QWEN3, 8, 2048, "H200", "adamw", 125.0),
                ("gpt3:c2048", 4, 2048, "H200", "adamw", 127.2),
                ("L24,NH16,C2048,T1024,V50257", 8, 1024, "H200", "adamw", 120.9)]


@pytest.mark.parametrize("model, batch, length, gpu, optimizer, measured", OF_HEADS_128, ids=str)
def test_time_of_heads_of_128(model, batch, length, gpu, optimizer, measured):
    planned = planned_ms(plan(model, batch, gpu=gpu, t=length, optimizer=optimizer))
    assert abs(planned / measured - 1) < 0.05, f"{planned} for {measured}"


# model, optimizer, ms on an H200 at B=64, by turns on 2026-11-29
BY_TURNS = [("m12", "adamw", 99.8), ("m12", "muon", 104.0), ("d12", "adamw", 98.1)]


def test_time_of_muon():
    """Within 3 %, and what Muon costs within 10 %."""
    planned = {}
    for model, optimizer, measured in BY_TURNS:
        planned[model, optimizer] = planned_ms(plan(model, 64, optimizer=optimizer))
        assert abs(planned[model, optimizer] / measured - 1) < 0.03, planned
    cost = planned["m12", "muon"] - planned["m12", "adamw"]
    assert abs(cost / (104.0 - 99.8) - 1) < 0.1, planned


def test_value_embeddings():
    """Beside m12, v12 has six tables of 50,304 rows, of 16 bytes an element: weight with its lower half,
    gradient, m and v. They are only looked up, which takes little time."""
    said = []
    for model in ("m12", "v12"):
        out = plan(model, 64, gpu="H200", optimizer="muon")
        said.append([float(re.search(pattern, out, re.M)[1]) for pattern in (
            r" (\d+) parameters$", r"^memory: ([\d.]+) GiB", r"about ([\d.]+) ms a step")])
    (few, less, fast), (many, more, slow) = said
    assert many - few == 6 * (50257 * 768 + 6 * 12)
    assert abs(more - less - 16 * 6 * 50304 * 768 / 2**30) < 0.01 and 1.02 < slow / fast < 1.06


def test_memory_and_cost():
    """The CUDA program in BF16 took 27.095 GiB for 124M with whole masters, of 4 bytes, not 2; 10B tokens
    take an H100 4.4 hours, at 103.3 ms for 65,536."""
    out = plan("d12", 64, gpu="H100", x=19073, z=524288, price=2)
    assert " 124439808 parameters\n" in out, "as published"
    memory = float(re.search(r"^memory: ([\d.]+) GiB", out, re.M)[1])
    one_lane = float(re.search(r"^memory: ([\d.]+) GiB", plan("d12", 64), re.M)[1])
    assert abs(one_lane / (27.095 - 0.232) - 1) < 0.005 and memory > one_lane
    hours, cost = re.search(r"^time: about (\S+) hours for 10B tokens, \$([\d.]+) at", out, re.M).groups()
    assert abs(2 * float(hours) - float(cost)) < 0.02 and abs(float(hours) / 4.4 - 1) < 0.05
    assert "fits; the largest that fits is -b 17\na step: 524288 tokens, micro-steps: 32, lanes: 1\n" in plan(
        "d36", 16, z=524288, gpu="a100-sxm4-40gb"), "as a run, it takes fewer lanes where memory is short"
    small = plan("d12", 64, gpu="4090")
    most = int(re.search(r"^-b 64 does not fit; the largest that fits is -b (\d+)", small, re.M)[1])
    assert "fits; the largest" in plan("d12", most, gpu="GeForce RTX 4090")
    assert "does not fit" in plan("d12", most + 1, gpu="4090")


def test_lanes():
    """Fewer than the default where memory is short; for ranks however they will be started."""
    out = plan("d36", 16, gpu="a100-sxm4-40gb", z=524288, zs=1, gpus=2)
    assert "a step: 524288 tokens, micro-steps: 16, lanes: 4\n" in out
    assert plan("d36", 16, gpu="a100-sxm4-40gb", z=524288, zs=1, pi="tcp", ps="a", pn=2, pr=0) == out


def test_head_chunks():
    """8,192 rows of 151,936 logits, 2 bytes each: a part of 1,024 rows is in memory instead."""
    sizes = [float(re.search(r"^memory: ([\d.]+) GiB", plan("qwen3:0.6B", 8, **{"head-chunks": n}), re.M)[1])
             for n in (1, 8)]
    assert abs(sizes[0] - sizes[1] - 7 * 1024 * 151936 * 2 / 2**30) < 0.01


# flags => what is said of them
SAID = [({"b": 4, "gpu": "48GiB"}, r"on 1 x 48 GiB, BF16\n(.*\n)*a step: 4096 tokens, .*\n\Z"),
        ({"b": 4, "gpu": "24 gb"}, r"on 1 x 24 GiB"),
        ({"gpus": 8, "zs": 1}, r"memory: .* GiB on each rank\n"),
        ({}, r"memory: .* GiB in all\n"),
        ({"x": 2, "price": 4}, r"time: about 0\.\d+ seconds for 0.00819M tokens, \$0.000\d at \$4 "),
        ({"x": 3000, "b": 64}, r"time: about 4\.\d+ minutes for 0.197B tokens\n"),
        ({"x": 300000, "b": 64}, r"time: about \d\.\d+ hours for 19.7B tokens\n")]


@pytest.mark.parametrize("flags, said", SAID, ids=str)
def test_said(flags, said):
    flags = {"gpu": "H200", **flags}
    assert re.search(said, plan("d12", flags.pop("b", 4), **flags)), said


# on how many GPUs of which kind, -b, what --plan names, and -b with that
ADVICE = [("d12", "4090", 1, 64, "-r 2", 64), ("d12", "RTX 3090", 1, 55, "-r 1", 55),
          ("d48", "A100-80GB", 2, 32, "-zs 1 -r 1", 32),
          ("d48", "rtx4090", 1, 4, "-r 2 --state-dtype bf16 --grad-dtype bf16", 4),
          ("d48", "L4", 1, 64, "--state-dtype bf16", 1)]


@pytest.mark.parametrize("model, gpu, gpus, batch, named, most", ADVICE, ids=str)
def test_advice(model, gpu, gpus, batch, named, most):
    """The flags that make it fit do, and without the last of them it does not."""
    flags = {"-e": model, "-t": 1024, "-b": batch, "--plan": gpu, "--gpus": gpus}
    before = run(flags)
    assert re.search(f"-b {most} fits with {named}[;\n]", before.out + before.err)
    words = named.split()
    more = dict(zip(words[::2], words[1::2]))
    assert f"-b {most} fits;" in run_ok({**flags, "-b": most, **more}).out
    more.popitem()
    fewer = run({**flags, "-b": most, **more})
    assert f"-b {most} does not fit;" in fewer.out or "not even -b 1 fits" in fewer.err


def test_1558M_in_24_gb():
    """FP8 takes at most 5 % more than bf16 with the same -r; Muon trains six rows at -r 2."""
    small = {"grad-dtype": "bf16", "state-dtype": "bf16"}
    for r in range(4):
        bf16, fp8 = (float(re.search(r"^memory: ([\d.]+) GiB", plan("d48", 4, r=r, **small, **more), re.M)[1])
                     for more in ({}, {"matmul-dtype": "fp8"}))
        assert bf16 != fp8 < 1.05 * bf16, f"-r {r}: {fp8} GiB for {bf16}"
    assert "-b 6 fits; the largest" in plan("d48", 6, gpu="4090", r=2, optimizer="muon", **small)


@pytest.mark.parametrize("flags, words", [
    ({"--plan": "TPU"}, ["--plan TPU", "H200"]), ({"--plan": "1GiB"}, ["--plan 1GiB", "2GiB to"]),
    *[({"--plan": card}, [f"--plan {card}: it cannot run this program", "8.0", "RTX 3090"])
      for card in ("T4", "Tesla V100-SXM2-32GB", "MI300X", "RTX 2080 Ti")],
    ({"--plan": "auto"}, ["--plan auto", "CUDA program"]),
    ({"--plan": "GH200"}, ["--plan GH200"]), ({"--price": 2}, ["--price", "--plan"]),
    ({"-e": "d48", "-t": 1024, "--plan": "4090"}, ["not even -b 1"]),
    ({"--plan": "H200", "-x": 0}, ["--plan", "-x 0"]), ({"--plan": "H200", "-y": 1, "-o": "r"}, ["-y 1"])])
def test_refusals(flags, words):
    refused(flags, *words)
