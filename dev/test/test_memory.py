"""The memory that a run plans, takes and refuses.

The arithmetic of what would fit is test_host.cpp's; shards of several ranks are test_ranks.py's.
"""
import json
import math
import os
import re
import resource
import time

import pytest

from checks import read
from jobs import KILL, Job
from trainer import C, V, Program, run, run_ok, sentences, write_shard
from twins import formats

MIB = 2**20


def round_up(n, to):
    return -(-n // to) * to


# ---- the plan ----

def buckets_of(d):
    """{bucket: elements}: tensors start at multiples of 128 elements in buckets of whole chunks: one of both
    embeddings, one of each layer's matrices, one of all biases and one of all norms."""
    buckets = {}
    for name, layered, *_ in formats.PARAMS:
        copies = d.L if layered else 1
        slot = round_up(math.prod(formats.param_shape(d, name)) // copies, 128)
        vectors = "norms" if name.startswith("ln") else "biases" if name.endswith("b") else None
        for layer in range(copies):
            key = vectors or (layer if layered else "embeddings")
            buckets[key] = buckets.get(key, 0) + slot
    return {key: round_up(elems, 8192) for key, elems in buckets.items()}


def planned_and_taken(flags):
    """Bytes: what the start-up line promises, and the process's most after its first steps, or in the midst
    of an evaluation."""
    job = Job({"-x": 10**6, **flags}, env={"MALLOC_ARENA_MAX": 1, "MALLOC_PERTURB_": 0})
    assert job.when(lambda: re.search("^(step 2/|evaluating )", job.out(), re.M)), job.err()

    def busy():                                             # seconds of processor time
        return int(read(f"/proc/{job.p.pid}/stat").rsplit(b")", 1)[1].split()[11]) / os.sysconf("SC_CLK_TCK")
    since = busy()
    while "evaluating " in job.out() and busy() < since + 0.1 and job.p.poll() is None:
        time.sleep(0.02)                                    # past the first batch
    peak = re.search(rb"^VmPeak:\s+(\d+) kB$", read(f"/proc/{job.p.pid}/status"), re.M)
    return job.signal(KILL).result().planned() * MIB, 1024 * int(peak[1])


EVALUATES = {"-x": 0, "-j": "long/*.bin", "-m": 10**6}


@pytest.mark.cpu_only
@pytest.mark.parametrize("task, flags, largest", [
    ({}, {"-b": 256}, V * C), ({}, {"-b": 256, "-r": 2}, V * C), ({}, {"-b": 256, "-r": 1}, V * C),
    ({}, {"-b": 256, "-r": 3, "--dropout": 0.1}, V * C),
    ({}, {"-b": 256, "--dropout": 0.1}, V * C),
    ({}, {"-b": 2, "-e": "L3,NH2,C512,T32,V300", "--optimizer": "muon"}, 4 * 512 * 512),
    ({}, {"-b": 2, "-e": "L3,NH2,C512,T32,V300"}, 4 * 512 * 512),
    ({}, {"-b": 64, "-e": "L1,NH2,C16,T32,V50000"}, 50048 * 16),
    ({}, {"-b": 1, "-e": "L1,NH1,C8,T100000,V256", "-t": 8}, 800000),
    (EVALUATES, {"-b": 2, "-e": "L3,NH2,C512,T32,V300"}, 4 * 512 * 512),
    (EVALUATES, {"-b": 64, "-e": "L1,NH2,C16,T32,V50000"}, 50048 * 16),
    (EVALUATES, {"-b": 256, "-e": "L4,NH2,C64,T32,V256"}, 4 * 64 * 64)], ids=str)
def test_plan_is_taken(task, flags, largest):
    """The plan's total is what a run takes, or an evaluation alone: two of them differ in the kernel's books
    as in their plans."""
    if task and not os.path.exists("long"):
        write_shard("long.bin", list(sentences(7, 20000)) * 60)
        os.mkdir("long")
        for i in range(20):                                 # minutes of validation, which are not awaited
            os.symlink("../long.bin", f"long/{i:02d}.bin")
    # enough for BLAS to have taken its buffer; like the others, without a tokenizer that counts bytes
    plain = {"-e": "L1,NH2,C16,T32,V300"} if task else {}
    small, small_peak = planned_and_taken({**task, "-b": 32, **plain})
    plan, peak = planned_and_taken({**task, **flags})
    allowed = 6 * largest + MIB     # planned for a tensor on its way to a file: these are killed before
    assert plan > (1 if task else 8) * MIB and abs((peak - small_peak) - (plan - small)) <= allowed


@pytest.mark.cpu_only
def test_plan_of_evaluation():
    """Without what only training needs: weights once, one layer's activations, logits, inputs with two staged
    copies, a tensor from a file."""
    d, n = formats.parse_model("L4,NH2,C512,T32,V300"), 16 * 32
    plan = run_ok({"-e": d.text(), "-x": 0, "-b": 16, "-m": 1}).planned()
    largest = max(d.Vp * d.C, d.maxT * d.C, 4 * d.C**2)
    floats = sum(buckets_of(d).values()) + n * (d.C * 19 + d.NH + 7 + d.Vp) + 1.5 * largest
    inputs = 3 * (3 * 4 * n + 16 * n + 16 * n // 129) + 4 * 4 * n
    assert abs(plan - (4 * floats + inputs) / MIB) < 0.02


# ---- too little memory ----

def limited(flags, mib):
    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (int(mib * MIB), int(mib * MIB)))
    return run(flags, preexec_fn=limit)


@pytest.mark.cpu_only
@pytest.mark.parametrize("mib, flags", [(350, {}), (400, {"-r": 3, "-e": "L2,NH2,C16,T64,V5000"})], ids=str)
def test_limit(mib, flags):
    """Under a limit the plan is refused in a sentence, whose hint fits, and one row more does not."""
    flags = {"-x": 1, "-v": 1, "-s": 1, **flags}
    over = limited({**flags, "-b": 65536}, mib)
    best = re.search(r"largest micro-batch that fits is -b (\d+)", over.err)[1]
    assert over.code == 1 and len(over.err.splitlines()) <= 3 and ("-r" in over.err) == ("-r" not in flags)
    fits = limited({**flags, "-b": best}, mib)
    assert (fits.code, fits.err) == (0, "")
    more = limited({**flags, "-b": int(best) + 1}, mib)
    assert more.code == 1 and f"fits is -b {best}" in more.err


@pytest.mark.cpu_only
def test_limit_too_low():
    """Too little for OpenBLAS alone, which would wait for ever."""
    for mib in (100, 160):
        none = limited({"-x": 1}, mib)
        refused = none.code == 1 and none.err.startswith("error: ") and len(none.err.splitlines()) <= 3
        assert refused or (none.code == 0 and "OpenBLAS" not in Program.device)


@pytest.mark.cpu_only
def test_limit_and_lanes():
    """What a checkpoint needs in memory is in the plan, and more is not taken; a resumed run that has less
    than before says what changes."""
    if "OpenBLAS" not in Program.device:
        pytest.skip("what the program takes beside its plan is known with OpenBLAS alone")
    flags = {"-e": "L1,NH2,C128,T16,V20000", "-b": 1, "-z": 8 * 16, "-x": 3, "-o": ""}
    all_lanes, one_lane = (run_ok({"--lanes": lanes, **flags, "-x": 1}).planned() for lanes in (8, 1))
    known = 1000
    error = limited({**flags, "-b": 60000, "-z": None}, known).err
    free = float(re.search(r"has ([\d.]+) MiB free", error)[1])

    def leaves(wanted):         # the limit that leaves so much; a hundredth of it is kept
        return (known - free + wanted) * 1.01
    result = limited({**flags, "-n": 1, "-o": "limited"}, leaves(all_lanes + 2))
    assert result.code == 0 and re.fullmatch(r"warning: host memory is short: .*\n", result.err)
    again = {**{flag: None for flag in flags}, "-y": 1, "-o": "limited", "-x": 4}
    result = limited(again, leaves(all_lanes - 6))
    assert result.code == 0
    assert re.search("warning: .* over 4 lanes, and were over 8 before: .* will differ", result.err)
    assert json.loads(read("limited/run.json"))["lanes"] == "4"
    error = limited(again, leaves(one_lane - 10)).err
    assert "needs" in error and "hint: a resumed run keeps its -b: " in error
