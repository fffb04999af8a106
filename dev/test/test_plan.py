"""--plan: memory and time of a run on a GPU that need not be here.
"""
import re

import pytest

from trainer import refused, run_ok

pytestmark = pytest.mark.cpu_only

# ms a step, measured on H100s on 2026-11-24; the shares in plan.h are an H200's (NOTES.md). FAR is 6.1 % off;
# the others are within 5 %.
FP8, FAR = {"matmul-dtype": "fp8-head"}, ("d24", 48, 1, {}, 208.2)
MEASURED = [("d12", 64, 1, {}, 103.5), ("d12", 4, 1, {}, 9.0), FAR,
            ("d36", 32, 1, {}, 300.2), ("d48", 16, 1, {}, 300.4), ("d12", 64, 2, {}, 109.0),
            ("d48", 16, 2, {}, 307.7), ("d12", 64, 1, FP8, 85.3), ("d24", 48, 1, FP8, 165.9),
            ("d36", 32, 1, FP8, 222.0), ("d48", 16, 1, FP8, 223.9)]


def plan(model, batch, gpu="H200", **flags):
    names = {"-" + name if len(name) < 3 else "--" + name: value for name, value in flags.items()}
    return run_ok({"-e": model, "-t": 1024, "-b": batch, "--plan": gpu, **names}).out


@pytest.mark.parametrize("model, batch, gpus, flags, measured", MEASURED, ids=str)
def test_time(model, batch, gpus, flags, measured):
    out = plan(model, batch, gpu="H100", gpus=gpus, zs=1 if gpus > 1 else 0, **flags)
    planned = float(re.search(r"^speed: about ([\d.]+) ms a step", out, re.M)[1])
    far = (model, batch, gpus, flags, measured) == FAR
    assert abs(planned / measured - 1) < (0.065 if far else 0.05)


def test_memory_and_cost():
    """The CUDA program in BF16 takes 27.095 GiB for 124M; 10B tokens take an H100 4.4 hours, at 103.5 ms for
    65,536."""
    out = plan("d12", 64, gpu="H100", x=19073, z=524288, price=2)
    assert " 124439808 parameters\n" in out, "as published"
    memory = float(re.search(r"^memory: ([\d.]+) GiB", out, re.M)[1])
    one_lane = float(re.search(r"^memory: ([\d.]+) GiB", plan("d12", 64), re.M)[1])
    assert abs(one_lane / 27.095 - 1) < 0.01 and memory > one_lane
    hours, cost = re.search(r"^time: about (\S+) hours for 10B tokens, \$([\d.]+) at", out, re.M).groups()
    assert abs(2 * float(hours) - float(cost)) < 0.02 and abs(float(hours) / 4.4 - 1) < 0.05
    assert "fits; the largest that fits is -b 16\na step: 524288 tokens, micro-steps: 32, lanes: 1\n" in plan(
        "d36", 16, z=524288, gpu="a100-sxm4-40gb"), "as a run, it takes fewer lanes where memory is short"
    small = plan("d12", 64, gpu="4090")
    most = int(re.search(r"^-b 64 does not fit; the largest that fits is -b (\d+)", small, re.M)[1])
    assert "fits; the largest" in plan("d12", most, gpu="GeForce RTX 4090")
    assert "does not fit" in plan("d12", most + 1, gpu="4090")


@pytest.mark.parametrize("flags, words", [
    ({"--plan": "TPU"}, ["--plan TPU", "H200"]), ({"--plan": "auto"}, ["--plan auto", "CUDA program"]),
    ({"--plan": "GH200"}, ["--plan GH200"]), ({"--price": 2}, ["--price", "--plan"]),
    ({"-e": "d48", "-t": 1024, "--plan": "4090"}, ["not even -b 1"]),
    ({"--plan": "H200", "-x": 0}, ["--plan", "-x 0"]), ({"--plan": "H200", "-y": 1, "-o": "r"}, ["-y 1"])])
def test_refusals(flags, words):
    refused(flags, *words)
