#!/usr/bin/env python3
"""50 steps of two tiny models have the losses and gradient norms of golden.json, to the bit.

    python3 dev/test/test_golden.py build/plain/train_gpt2cpu           # a plain build: no BLAS, no OpenMP
    python3 dev/test/test_golden.py build/check/train_gpt2.BF16         # one of the three for GPUs
    ... --update                                # a change of the numbers is meant: says which, writes them

An entry is for a precision and what else decides about the bits: the GPU and cuBLASLt's version; on a CPU the
C library, whose exp and tanh a new version may round otherwise. A machine without an entry skips; --update
adds one. Equal losses after a change say that what was moved computes the same, in forward, backward and
update; who changes an order of sums on purpose updates the entries of all machines in that commit.
"""
import ctypes
import json
import os
import re
import subprocess
import sys

from checks import ROOT, check, closing, scratch_folder, skip
from trainer import JOB_VARIABLE, write_shard

GOLDEN = os.path.join(ROOT, "dev/test/golden.json")
MODELS = {      # two micro-steps a step; heads of 64, which Hopper's attention takes
    "gpt2": "-c 0.1 -l 3e-3 -r 2",
    "others": "--block parallel-tied --norm rmsnorm --dropout 0.1 --optimizer muon -c 0.1 -l 3e-3"}
FLAGS = "-e L2,NH1,C64,T96,V256 -i train.bin -j train.bin -b 2 -z 384 -u 5 -v 0 -s 0 -n 0".split()


def run(program, *flags):
    env = {name: value for name, value in os.environ.items() if not JOB_VARIABLE.match(name)}
    done = subprocess.run([program, *FLAGS, *flags], capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        sys.exit(f"FAIL {program}: {done.stderr}0 passed, 1 failed, 0 skipped")
    return done.stdout


def key_of(program):
    device, precision = re.search(r"^device: (.*), precision (\w+)$", run(program, "-x", "0"), re.M).groups()
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    library = re.search(r"libcublasLt\.so\S* => (\S+)", listed)
    if not library:
        return f"{precision}, CPU, {os.confstr('CS_GNU_LIBC_VERSION')}"
    version = ctypes.CDLL(library[1]).cublasLtGetVersion
    version.restype = ctypes.c_size_t
    return f"{precision}, {device}, cuBLASLt {version()}"


def curve(program, model):
    """["LOSS NORM"] of the steps, nine digits each, which tell all floats apart."""
    run(program, "-x", "50", "-o", model, *MODELS[model].split())
    with open(f"{model}/metrics.jsonl", encoding="utf-8") as f:
        rows = [json.loads(line) for line in f]
    return [f"{row['loss']!r} {row['norm']!r}" for row in rows if "loss" in row]


def main():
    program, update = os.path.abspath(sys.argv[1]), "--update" in sys.argv
    with open(GOLDEN, encoding="utf-8") as f:
        golden = json.load(f)
    with scratch_folder("test_golden_"):
        tokens, state = [], 1
        for i in range(20000):              # a cycle with errors: there is something to learn
            state = (state * 1103515245 + 12345) % 2**31
            tokens.append((i * 7 + i // 5) % 61 if state >> 28 else state >> 16 & 255)
        write_shard("train.bin", tokens)
        key = key_of(program)
        if key not in golden and not update:
            skip(len(MODELS), f"no entry for '{key}' in golden.json: --update adds it")
            return closing()
        got = {model: curve(program, model) for model in MODELS}
    for model, curve_ in got.items():
        want = golden.get(key, {}).get(model, [])
        pairs = enumerate(zip(curve_, want + [None] * len(curve_)), 1)
        differ = next((f"step {step}: {now}, expected {was}" for step, (now, was) in pairs if now != was), "")
        check(len(curve_) == 50 and (update or not differ), f"{key}, {model}: {differ or len(curve_)}")
        if update and differ:
            print(f"{key}, {model}: {differ}")
    if update:
        with open(GOLDEN, "w", encoding="utf-8") as f:
            f.write(json.dumps({**golden, key: got}, indent=0, sort_keys=True) + "\n")
    return closing()


if __name__ == "__main__":
    sys.exit(main())
