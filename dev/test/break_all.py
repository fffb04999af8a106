#!/usr/bin/env python3
"""Can the tests fail? Runs a test program once for each output of each op, with that output scaled by 1.01 (a
whole number: by 65/64, and 1 more), and expects it to notice every time. An output that the run does not
compute is a failure too, unless NOT_COMPUTED says so: else a path that nothing reaches any more would pass. A
run that has noticed is ended at its first failed check; where all outputs run, the first one's goes on and
has to end as a failure does.

    python3 dev/test/break_all.py ./test_gpt2cpu
    python3 dev/test/break_all.py ./test_gpt2cu kernels --small model       # only these modes
    python3 dev/test/break_all.py ./test_gpt2cpu --sample 3                 # only 3 outputs, others each day
"""
import concurrent.futures
import os
import random
import subprocess
import sys
import tempfile
import time

from checks import counts_in

# By the word behind `device:` in the program's output; a GPU's runs compute everything, but for FP8 in other
# builds than BF16's. The CPU build leaves FP8, too, out beside a broken output: see test_cpu_ops.cpp.
NOT_COMPUTED = {
    "CPU": {"activate_backward.dinp",       # is part of matmul_backward_input's twin
            "activate_backward.dbias",
            "grad_accumulate.grad",         # the CPU build keeps all gradients in fp32
            "adamw_update.master",          # its weights are fp32: they need no master copy
            "muon_update.master",
            "mark_likeliest.likeliest"},    # of questions: test_cpu_ops has its twin
}


def run_until_noticed(command, to_the_end):
    """(exit code, None of a run that was ended, its lines)"""
    lines = []
    with tempfile.TemporaryDirectory() as folder:               # for what a run that is ended leaves behind
        env = dict(os.environ, TMPDIR=folder)
        env.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")       # the runs share the cores
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True) as run:
            for line in run.stdout:
                lines.append(line.rstrip("\n"))
                if line.startswith("FAIL ") and not to_the_end:
                    run.kill()
                    return None, lines
    return run.returncode, lines or [""]


def notices(command, name, to_the_end):
    code, lines = run_until_noticed(command + ["--break", name], to_the_end)
    device = next((line for line in lines if line.startswith("device: ")), "device: ")
    expected = name in NOT_COMPUTED.get(device.split(" ")[1].rstrip(","), ())
    expected = expected or "fp8_" in name and "precision BF16" not in device
    if f"note: {name} was not computed in this run" in lines:
        if expected:
            return "skip", "this build's run does not compute it; the tests of single ops do"
        return "FAIL", "was not computed, and NOT_COMPUTED does not list it: does nothing reach it any more?"
    if expected:
        return "FAIL", "was computed: strike it from NOT_COMPUTED"
    _, failed, _ = counts_in(lines[-1]) or (0, 0, 0)
    noticed = code is None or code == 1 and failed > 0
    return "ok" if noticed else "FAIL", lines[-1]


def main():
    command, sample = sys.argv[1:], 0
    if "--sample" in command[-2:-1]:
        sample = int(command.pop())
        command.pop()
    listed = subprocess.run([command[0], "--list"], check=True, stdout=subprocess.PIPE, text=True)
    names = listed.stdout.split()
    if sample:                          # of outputs that all builds compute
        names = [name for name in names if name not in NOT_COMPUTED["CPU"] and "fp8_" not in name]
        names = random.Random(time.strftime("%F", time.gmtime())).sample(names, sample)
    counts = {"ok": 0, "FAIL": 0, "skip": 0}
    with concurrent.futures.ThreadPoolExecutor(min(os.cpu_count(), 4)) as pool:
        runs = pool.map(lambda name: notices(command, name, name == names[0] and not sample), names)
        for name, (noticed, last) in zip(names, runs):
            print(f"{noticed:<4} --break {name}: {last}", flush=True)
            counts[noticed] += 1
    print(f"{counts['ok']} passed, {counts['FAIL']} failed, {counts['skip']} skipped")
    sys.exit(1 if counts["FAIL"] or not counts["ok"] else 0)


if __name__ == "__main__":
    main()
