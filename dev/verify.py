"""Do 50 steps here have published bits? Weights and losses are compared by their sha256.

    make verify                                     # m12 on a GPU, a small model of the plain build on a CPU

The text is dev/data/stories.cpp's, so nothing is fetched. verify.sha256 has what is published, a kind of
machine a line: precision, GPU, cuBLASLt and CUDA, or for a CPU the C library, whose exp a new version may
round otherwise. It is printed in this form for a machine that has no line yet. Who changes an order of sums
on purpose replaces the lines, as those of test/golden.json.
"""
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
PUBLISHED = os.path.join(ROOT, "dev", "verify.sha256")
USUAL = ("--optimizer muon --learning-rate 3.6e-3 --weight-decay 0.1 --max-steps 50 --val-every 0 "
         "--sample-every 0 ")
# as scripts/run_m12_9min.sh has it, but for 50 steps
GPU = "--model m12 --micro-batch 64 --total-batch 65536 --warmup 30 --final-fraction 0.1"
CPU = "--model L2,NH2,C32,T64,V50257 --micro-batch 1 --warmup 10"


def sha256_of(*paths):
    found = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as f:
            found.update(f.read())
    return found.hexdigest()


def trained(program, folder):
    """(kind of machine, sha256 of text and log and weights) of 50 steps."""
    def run(*words):
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            sys.exit(f"error: {words[0]} ended with {done.returncode}\n{done.stdout[-2000:]}")
    text, out = os.path.join(folder, "stories"), os.path.join(folder, "run")
    run("build/stories", "--seed", "1", "--bytes", "14000000", "-o", text + ".txt")
    run("build/tokenize", text + ".txt", "-o", text, "--val-tokens", "0")
    flags = USUAL + (CPU if program.endswith("cpu") else GPU)
    run(program, "--train-data", text + "_train.bin", "--output-dir", out, *flags.split())
    with open(os.path.join(out, "run.json"), encoding="utf-8") as f:
        facts = json.load(f)
    machine = ", ".join(facts[key] for key in ("precision", "device", "set of libraries"))
    files = [text + "_train.bin", os.path.join(out, "main.log"), os.path.join(out, "model_00000050.bin")]
    return re.sub(r" \(.*?\)|, its driver.*", "", machine), sha256_of(*files)


def verdict(machine, sha256, published):
    """(exit code, what to say). published: {kind of machine: sha256}."""
    met = [name for name, known in published.items() if known == sha256]
    if met:
        return 0, f"50 steps have met the published hash of {met[0]}: {sha256}"
    if machine in published:
        return 1, (f"error: 50 steps have the hash {sha256}; that of {machine} is {published[machine]}\n"
                   "hint: the published program is a commit without changes, by g++ 12 or CUDA 13.0")
    return 0, f"this machine and its libraries have no published hash yet; theirs is\n{sha256}  {machine}"


def main(program):
    with open(PUBLISHED, encoding="utf-8") as f:
        published = {machine: sha256 for sha256, machine in (line.rstrip("\n").split("  ", 1) for line in f)}
    os.chdir(ROOT)
    print(f"50 steps of {program}", flush=True)
    with tempfile.TemporaryDirectory(dir="build") as folder:
        code, said = verdict(*trained(program, folder), published)
    print(said)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
