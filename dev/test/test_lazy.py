"""Does everything wait for what it needs? On a GPU a missing stream_wait or event_wait is a race that most
runs win. lazy_streams.h makes a CPU build whose streams do their work late, in several orders; a run has
to leave the same bytes as the ordinary build, which does everything at once and so needs no waiting.

The ordinary build, ./train_gpt2cpu, has to be there. --slow: many random orders. Standard library only.
"""
import fcntl
import os
import re
import shutil
import subprocess
import time

import pytest

from test_resume import read_state
from checks import ROOT
from trainer import (LIMIT_S, Program, check, check_equal, read_bytes, run, shorten,
                     write_questions)

pytestmark = [pytest.mark.programs("lazy"), pytest.mark.cpu_only]
ORDINARY = os.path.join(ROOT, "train_gpt2cpu")
# Streams by preference: 0 is main's, 1 communication's (2 that of checkpoints)
POLICIES = ["012", "210", "201", "random:1"]
MORE_POLICIES = ["021", "102", "120"] + [f"random:{seed}" for seed in range(2, 40)]         # --slow
USUAL = {"-e": "L2,NH2,C32,T16,V256", "-i": "train.bin", "-j": "val.bin", "-b": 1, "-z": 8 * 16,
         "-x": 4, "-v": 0, "-s": 0, "-f": 0, "-l": "1e-2", "-k": "constant"}
# wte is the largest tensor by far, or hardly larger than a bucket's smallest size
ONE_LAYER, FIVE = "L1,NH2,C16,T16,V3000", "L5,NH3,C24,T16,V300"

# What is run: flags of runs one after another in one folder.
SAVED = [{"-n": 2, "-x": 6}, {"-n": 2, "-x": 9, "-y": 1}]
RUNS = {
    "one rank": [{}],
    "one rank, samples": [{"-v": 2, "-s": 2, "-g": 4, "-z": 32}],
    "one rank, checkpoints": [{**flags, "-z": 32} for flags in SAVED],
    **{f"2 ranks, zs {zs}, checkpoints":
       [{**flags, "--gpus": 2, "-zs": zs, "-e": ONE_LAYER} for flags in SAVED] for zs in (0, 1, 2)},
    "questions": [{"-h": 1, "--eval-data": "q.bin", "--eval-every": 2}],
    "2 ranks, zs 1, questions": [{"--gpus": 2, "-zs": 1, "-h": 1, "--eval-data": "q.bin", "--eval-every": 2}],
    "2 ranks, zs 0": [{"--gpus": 2}],
    "2 ranks, zs 1": [{"--gpus": 2, "-zs": 1}],
    "2 ranks, zs 2": [{"--gpus": 2, "-zs": 2}],
    "2 ranks, zs 1, --check-ranks": [{"--gpus": 2, "-zs": 1, "--check-ranks": 1}],
    "4 ranks, zs 0, Muon": [{"--gpus": 4, "-e": FIVE, "--optimizer": "muon"}],
    **{f"2 ranks, zs {zs}, Muon": [{"--gpus": 2, "-zs": zs, "-e": FIVE, "--optimizer": "muon"}]
       for zs in (1, 2)},
    "2 ranks, zs 1, one layer": [{"--gpus": 2, "-zs": 1, "-e": ONE_LAYER}],
    # ranks that have no validation rows, and rank 0's samples: some run ahead of the others
    "4 ranks, zs 0, five layers": [{"--gpus": 4, "-e": FIVE, "-v": 2, "-m": 3, "-s": 2, "-g": 4}],
    "4 ranks, zs 1, five layers": [{"--gpus": 4, "-zs": 1, "-e": FIVE, "-v": 2, "-m": 3, "-s": 2, "-g": 4}],
    "4 ranks, zs 2, five layers": [{"--gpus": 4, "-zs": 2, "-e": FIVE, "-v": 2, "-m": 3, "-s": 2, "-g": 4}],
}


def left_by(program, runs, folder, policy=None):
    """What is in the folder afterwards, and what was printed, but for times."""
    facts, lazy = {}, Program.path
    Program.path = program
    for number, flags in enumerate(runs):
        if policy:
            os.environ["GPT2_LAZY"] = policy
        result = run({**flags, "-o": folder})
        if (result.code, result.err) != (0, ""):
            facts[f"run {number} ended with"] = (result.code, result.err.strip())
        facts[f"run {number} printed"] = re.findall(r"^(?:step|val loss|eval|sample) .*|^.*\n---$",
                                                    re.sub(r" \| [\d.]+ ms \| .*", "", result.out), re.M)
    Program.path = lazy
    os.environ.pop("GPT2_LAZY", None)
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            if name.startswith("state_"):               # without times, and which program and folder it was
                said, tensors = read_state(path)
                for word in ("program", "flag.output-dir"):
                    said.pop(word)
                facts[name] = (said, tensors)
            elif name.startswith("DONE_"):              # the files' checksums
                facts[name] = True
            elif name not in ("metrics.jsonl", "run.json"):
                facts[name] = read_bytes(path)
    shutil.rmtree(folder, ignore_errors=True)
    return facts


def test_policies():
    """In whatever order streams run, the bytes are those of the ordinary build."""
    write_questions("q.bin", [([i, 2], [[i], [1, i], [i, i, 3], [4]]) for i in range(5)], [0, 1, 2, 3, 0])
    for title, runs in RUNS.items():
        want = left_by(ORDINARY, runs, "ordinary")
        check("main.log" in want and any(name.startswith("model_") for name in want) and
              not any("ended with" in name for name in want),
              f"{title}: the ordinary build leaves {shorten(want)}")
        for policy in POLICIES + (MORE_POLICIES if Program.slow else []):
            got = left_by(Program.path, runs, "lazy", policy)
            unlike = sorted(name for name in {**want, **got} if want.get(name) != got.get(name))
            if not check(not unlike, f"{title}, {policy}: unlike the ordinary build in {unlike}"):
                print("    " + "\n    ".join(shorten(got.get(name)) for name in unlike if name[:4] == "run "))


def test_rank_0_is_last():
    """Rank 0 makes the folder when it reports the first step. Whoever does not read what it prints delays
    that, and nobody else's checkpoint may come before it."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)  # it is full long before a step of this size is done
    words = Program.command({"--gpus": 2, "-zs": 1, "-n": 1, "-x": 2, "-o": "late", "-z": 32 * 16,
                             "-e": "L2,NH2,C64,T16,V20000"})
    p = subprocess.Popen(words, stdout=writer, stderr=subprocess.PIPE,
                         env=Program.environment(1, GPT2_LAZY="012"))
    text = b""
    while not re.search(rb"micro-steps a step.*\n", text):
        text += os.read(reader, 1)
    filler = os.open(f"/proc/self/fd/{writer}", os.O_WRONLY | os.O_NONBLOCK)    # the program's own waits
    os.close(writer)
    try:
        while True:
            os.write(filler, b"x")              # until it is full
    except BlockingIOError:
        pass
    os.close(filler)
    time.sleep(2)                               # in which rank 1 would save
    with os.fdopen(reader, "rb") as rest:
        text = rest.read()
    said = p.communicate(timeout=LIMIT_S)[1]
    check_equal((p.returncode, said), (0, b""), "a job whose rank 0 is slow")
    check(b"saved late/model_00000002.bin" in text and os.path.exists("late/DONE_00000002"),
          shorten(text[-150:]))


def test_unknown_policy():
    os.environ["GPT2_LAZY"] = "early"
    result = run({})
    del os.environ["GPT2_LAZY"]
    said = "error: GPT2_LAZY='early': choose an order of streams, as 201, or random:SEED\n"
    check_equal((result.code, result.err), (1, said), "no policy")
