#!/usr/bin/env python3
"""Can the tests fail? Runs a test program once for each output of each op, with that output scaled by 1.01,
and expects it to notice every time. An output that the run does not compute is a failure too, unless
NOT_COMPUTED says so: else a path that nothing reaches any more would pass.

    python3 dev/test/break_all.py ./test_gpt2cpu
    python3 dev/test/break_all.py ./test_gpt2cu kernels --small model       # only these modes
"""
import concurrent.futures
import os
import re
import subprocess
import sys

# By the word behind `device:` in the program's output; a GPU's runs compute everything.
NOT_COMPUTED = {
    "CPU": {"matmul_forward.pre_gelu",      # the CPU build takes the separate GELU
            "grad_accumulate.grad",         # and keeps all gradients in fp32
            "adamw_update.master",          # its weights are fp32: they need no master copy
            "muon_update.master"},
}
CLOSING = re.compile(r"^\d+ passed, (\d+) failed, \d+ skipped$")


def notices(command, name):
    env = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")   # the runs share the cores
    run = subprocess.run(command + ["--break", name], env=env, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True, check=False)
    lines = run.stdout.rstrip("\n").split("\n")
    closing = CLOSING.match(lines[-1])
    device = next((line.split()[1].rstrip(",") for line in lines if line.startswith("device: ")), "")
    expected = name in NOT_COMPUTED.get(device, ())
    if f"note: {name} was not computed in this run" in lines:
        if expected:
            return "skip", "this build's run does not compute it; the tests of single ops do"
        return "FAIL", "was not computed, and NOT_COMPUTED does not list it: does nothing reach it any more?"
    if expected:
        return "FAIL", "was computed: strike it from NOT_COMPUTED"
    noticed = run.returncode == 1 and closing is not None and int(closing.group(1)) > 0
    return "ok" if noticed else "FAIL", lines[-1]


def main():
    command = sys.argv[1:]
    listed = subprocess.run([command[0], "--list"], check=True, stdout=subprocess.PIPE, text=True)
    names = listed.stdout.split()
    counts = {"ok": 0, "FAIL": 0, "skip": 0}
    with concurrent.futures.ThreadPoolExecutor(min(os.cpu_count(), 4)) as pool:
        for name, (noticed, last) in zip(names, pool.map(lambda name: notices(command, name), names)):
            print(f"{noticed:<4} --break {name}: {last}", flush=True)
            counts[noticed] += 1
    print(f"{counts['ok']} passed, {counts['FAIL']} failed, {counts['skip']} skipped")
    sys.exit(1 if counts["FAIL"] or not counts["ok"] else 0)


if __name__ == "__main__":
    main()
