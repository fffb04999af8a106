"""Does everything wait for what it needs? On a GPU a missing stream_wait or event_wait is a race that most
runs win. lazy_streams.h makes a CPU build whose streams do their work late, in several orders; a run has
to leave the same bytes as the ordinary build, ./train_gpt2cpu, which does everything at once. Graphs are
recorded and run as on a GPU: what CUDA's capture of a stream refuses ends the program.

    pytest dev/test/test_lazy.py -k "Muon and 210"
    pytest dev/test/test_lazy.py --slow             # many random orders
"""
import functools
import os
import shutil
import time

import pytest

from jobs import DAY, Job, named, printed, ranks, read_state
from checks import ROOT, read
from trainer import Program, run, write_questions

pytestmark = [pytest.mark.programs("lazy"), pytest.mark.cpu_only]
ORDINARY = os.path.join(ROOT, "train_gpt2cpu")
# Streams by preference: 0 is main's, 1 communication's (2 that of checkpoints)
RANDOM = [f"random:{DAY}"]                      # some of the runs
MANY = ["021", "102", "120", "201"] + [f"random:{seed}" for seed in range(2, 40)]         # --slow
USUAL = {"-e": "L2,NH2,C32,T16,V256", "-i": "train.bin", "-j": "val.bin", "-b": 1, "-z": 8 * 16,
         "-x": 4, "-v": 0, "-s": 0, "-f": 0, "-l": "1e-2", "-k": "constant"}
# wte is the largest tensor by far, or hardly larger than a bucket's smallest size
ONE_LAYER, FIVE = {"-e": "L1,NH2,C16,T16,V3000"}, {"-e": "L5,NH3,C24,T16,V300"}
QUESTIONS = {"-h": 1, "--eval-data": "q.bin", "--eval-every": 2}
# ranks that have no validation rows, and rank 0's samples: some run ahead of the others
AHEAD = {**FIVE, "-v": 2, "-m": 3, "-s": 2, "-g": 4}
# On one rank micro-steps are graphs: one for those that store gradients, one for those that add to them; and
# others for those in which a token stands more than 128 times, as in a third of LARGE's. So are tokens' steps
ADDS = {"--lanes": 1, "-z": 4 * 16}
LARGE = {"-e": "L1,NH2,C16,T32,V256", "-b": 16, "-z": 4 * 512, "--lanes": 1, "-x": 8}
# An untied head, and, with 128 tokens at once, two parts of it
FAMILY = {"-e": "llama:L3,NH2,NKV1,HS16,C32,F48,T16,V256,qk_norm", "-r": 3}
FP8, PARTS = {"--matmul-dtype": "fp8-head"}, {"--head-chunks": 2, "-b": 8, "-z": 4 * 128}


def saved(flags):
    return [{**flags, "-n": 2, "-x": 6}, {**flags, "-n": 2, "-x": 9, "-y": 1}]


# Flags of runs, one after another in one folder
RUNS = [[{}], [{"-v": 2, "-s": 2, "-g": 4, "-z": 32}], saved({"-z": 32}), [QUESTIONS], [LARGE],
        *([{**ADDS, **more}] for more in ({"--dropout": 0.2}, {"--dropout": 0.2, "-r": 1}, {"-r": 2},
                                          {"--optimizer": "muon"}, {"--block": "parallel", "--lanes": 2})),
        saved({**ADDS, **QUESTIONS, "--dropout": 0.2, "-v": 2, "-s": 2, "-g": 20}),
        [{**ranks(2, 1), **QUESTIONS}], *(saved({**ranks(2, zs), **ONE_LAYER}) for zs in (0, 1)),
        *([ranks(2, zs)] for zs in (0, 1)), [{**ranks(2, 1), **ONE_LAYER}],
        [{**ranks(4), **FIVE, "--optimizer": "muon"}],
        saved({**ranks(2, 1), **FIVE, "--optimizer": "muon"}),
        *([{**ranks(4, zs), **AHEAD}] for zs in (0, 1)),
        saved({**ADDS, **FP8}), [{**ADDS, **PARTS, "-r": 3}],
        saved({**PARTS, **FAMILY, "--matmul-dtype": "fp8", "--dropout": 0.1, "-v": 2, "-s": 2, "-g": 4}),
        saved({**PARTS, **FAMILY, **ranks(2, 1)}), [{**ranks(2, 1), **FAMILY, **FP8, "--optimizer": "muon"}]]


def left_by(program, runs):
    """What is in the folder afterwards, and what was printed, but for times."""
    facts, lazy, folder = {}, Program.path, "left"
    for number, flags in enumerate(runs):
        Program.path = program
        result = run({**flags, "-o": folder})
        Program.path = lazy
        assert (result.code, result.err) == (0, ""), result.err
        facts[f"run {number} printed"] = printed(result)
    for name in os.listdir(folder):
        if name.startswith("state_"):               # without times, and which program it was
            said, tensors = read_state(f"{folder}/{name}")
            facts[name] = {**said, "program": ""}, tensors
        elif name.startswith("DONE_"):              # the files' checksums
            facts[name] = True
        elif name not in ("metrics.jsonl", "run.json"):
            facts[name] = read(f"{folder}/{name}")
    shutil.rmtree(folder)
    return facts


@functools.cache
def ordinary(number):
    write_questions("q.bin", [([i, 2], [[i], [1, i], [i, i, 3], [4]]) for i in range(5)], [0, 1, 2, 3, 0])
    return left_by(ORDINARY, RUNS[number])


@pytest.mark.parametrize("policies", [["012"], ["210"], RANDOM,
                                      pytest.param(MANY, marks=pytest.mark.slow)],
                         ids=["012", "210", "random", "many"])
@pytest.mark.parametrize("number", range(len(RUNS)), ids=[named(runs[0]) for runs in RUNS])
def test_policy(monkeypatch, number, policies):
    """In whatever order streams run, the bytes are those of the ordinary build."""
    want = ordinary(number)
    assert "main.log" in want and any(name.startswith("model_") for name in want)
    for policy in policies if policies != RANDOM or Program.slow or (number + DAY) % 3 == 0 else []:
        monkeypatch.setenv("GPT2_LAZY", policy)
        got = left_by(Program.path, RUNS[number])
        unlike = sorted(name for name in {**want, **got} if want.get(name) != got.get(name))
        assert not unlike, f"unlike the ordinary build with {policy}"


def test_rank_0_is_last():
    """Rank 0 makes the folder when it reports the first step. Whoever does not read what it prints delays
    that, and nobody else's checkpoint may come before it."""
    job = Job({**ranks(2, 1), "-n": 1, "-x": 2, "-o": "late", "-z": 32 * 16, "-e": "L2,NH2,C64,T16,V20000"},
              env={"GPT2_LAZY": "012"}, pipe=True)
    while b"micro-steps a step" not in (line := job.p.stdout.readline()):
        assert line, job.err()
    filler = os.open(f"/proc/{job.p.pid}/fd/1", os.O_WRONLY | os.O_NONBLOCK)
    try:
        while True:
            os.write(filler, b"x")              # until it is full, long before a step of this size is done
    except BlockingIOError:
        os.close(filler)
    time.sleep(2)                               # in which rank 1 would save
    result = job.result()
    assert (result.code, result.err) == (0, "")
    assert "saved late/model_00000002.bin" in result.out and os.path.exists("late/DONE_00000002")


