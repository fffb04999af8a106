"""50 steps of tiny models have the losses, validation losses and gradient norms of golden.json, to the bit.

    pytest dev/test/test_golden.py                      # a plain build: no BLAS, no OpenMP
    pytest dev/test/test_golden.py --update-golden      # the numbers should change: writes them

An entry is for a precision and what else decides about the bits: the GPU and cuBLASLt's version; on a CPU the
C library, whose exp and tanh a new version may round otherwise. A machine without an entry skips; the option
adds one. A line of the file is five steps, each a loss and a norm, or a validation: its loss and those of
its sources. A row has what two features have together, or what other tests hold against the program itself:
how Muon's momentum rises, how many lanes a step has by default. Equal losses after a change say that what
was moved computes the same, in forward, backward and update; who changes an order of sums on purpose updates
the entries of all machines in that commit, and removes those of machines that are not there.
"""
import ctypes
import fcntl
import functools
import json
import os
import re

import pytest

from checks import ROOT, run_program, write
from trainer import Program, flags_of, logged_steps, metrics, on_cpu, run_ok, write_shard

pytestmark = [pytest.mark.numeric, pytest.mark.programs("plain")]
GOLDEN = os.path.join(ROOT, "dev/test/golden.json")
USUAL = flags_of("-e L2,NH1,C64,T96,V256 -i train.bin -j train.bin -b 2 -z 384 -u 5 -x 50 -v 0 -s 0 -n 0")
MODELS = {      # two micro-steps a step; heads of 64, which Hopper's attention takes
    "gpt2": "-c 0.1 -l 3e-3 -r 2",
    "others": "--block parallel-tied --norm rmsnorm --dropout 0.1 --optimizer muon --muon-warmup 0 -c 0.1 "
              "-l 3e-3",
    "llama": "-e llama:L2,NH2,NKV1,HS64,C64,F128,T96,V256,qk_norm -c 0.1 -l 3e-3 --embedding-rate 4",
    "fp8": "--matmul-dtype fp8-head -e L3,NH1,C64,T96,V256 -c 0.1 -l 3e-3",
    "fp8_llama": "--matmul-dtype fp8-head -e llama:L3,NH2,NKV1,HS32,C64,F96,T96,V256,qk_norm -l 3e-3",
    "muon": "-e L1,NH1,C64,T48,V256 -z 192 --optimizer muon --muon-warmup 40",
    "llama_muon": "-e llama:L1,NH2,NKV1,HS64,C64,F128,T64,V256 -t 48 -z 192 --optimizer muon",
    "lanes": "-e L1,NH1,C64,T32,V256 -b 1 -z 512 -l 1e-2",      # 16 micro-steps
    "mixture": "-e L1,NH1,C64,T32,V256 -z 192 -l 1e-2 -i train.bin:0.6,talk.bin:0.4 "
               "-j val.bin:1,talk_val.bin:2 -v 20 -m 8"}


@functools.cache
def key_of(program):
    if on_cpu():
        return f"{Program.precision}, CPU, {os.confstr('CS_GNU_LIBC_VERSION')}"
    library = re.search(r"libcublasLt\.so\S* => (\S+)", run_program(["ldd", program])[1])
    version = ctypes.CDLL(library[1]).cublasLtGetVersion
    version.restype = ctypes.c_size_t
    return f"{Program.precision}, {Program.device}, cuBLASLt {version()}"


def curve(model):
    """["LOSS NORM LOSS NORM ..."] of five steps each; nine digits tell all floats apart."""
    run_ok({**flags_of(MODELS[model]), "-o": model})
    steps = [f"{row['loss']!r} {row['norm']!r}" for row in logged_steps(model)]
    assert len(steps) == 50
    validations = [" ".join(map(repr, [row["val_loss"], *row.get("val_losses", {}).values()]))
                   for row in metrics(model) if "val_loss" in row]
    return [" ".join(steps[i:i + 5]) for i in range(0, 50, 5)] + validations


def made_up(count, state):
    """A cycle with errors: there is something to learn."""
    tokens = []
    for i in range(count):
        state = (state * 1103515245 + 12345) % 2**31
        tokens.append((i * 7 + i // 5) % 61 if state >> 28 else state >> 16 & 255)
    return tokens


@functools.cache
def made_up_data():
    write_shard("train.bin", made_up(20000, 1))
    write_shard("val.bin", made_up(700, 2))
    for name, count, state in (("talk", 3000, 3), ("talk_val", 500, 4)):    # of which three in seven count
        write_shard(name + ".bin", made_up(count, state))
        write(name + ".mask", bytes(int(i * i % 101 % 7 < 3) for i in range(count)))


@pytest.mark.parametrize("model", MODELS)
def test_curve(program, model, request):
    if model.startswith("fp8") and not on_cpu():
        pytest.skip("the CPU's")
    made_up_data()
    update, key = request.config.getoption("--update-golden"), key_of(program)
    with open(GOLDEN, encoding="utf-8") as f:
        fcntl.flock(f, fcntl.LOCK_SH)               # other processes may update
        want = json.load(f).get(key, {}).get(model)
    if want is None and not update:
        pytest.skip(f"no entry for '{key}' in golden.json: --update-golden adds it")
    got = curve(model)
    if update and got != want:
        with open(GOLDEN, "r+", encoding="utf-8") as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            golden = json.load(f)
            golden.setdefault(key, {})[model] = want = got
            f.seek(0)
            f.truncate()
            f.write(json.dumps(golden, indent=0, sort_keys=True) + "\n")
    assert got == want, f"{key}, {model}"
