#!/usr/bin/env python3
"""Runs the test suites and adds up their closing lines. `make test` builds first, then calls this.

    python3 dev/test/run.py                 # all suites that this machine can run
    python3 dev/test/run.py host gpu        # only those whose name contains one of these words
    python3 dev/test/run.py --hash          # sha256 of the .cu files, for dev/test/gpu-results.txt

A suite is a command whose last line is `N passed, N failed, N skipped`. One that dies, takes too long, prints
no such line or ran no test counts as one failure. Its whole output is kept in build/logs/NAME.log.
"""
import glob
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
GPU_RESULTS = "dev/test/gpu-results.txt"
CLOSING = re.compile(r"^(\d+) passed, (\d+) failed, (\d+) skipped$")
PYTHON = ".venv/bin/python" if os.path.exists(os.path.join(ROOT, ".venv/bin/python")) else sys.executable


class Suite:
    def __init__(self, name, command, needs=None, seconds=120, counts=True):
        self.name, self.command, self.needs, self.seconds = name, command, needs, seconds
        self.counts = counts        # False: the command counts nothing, its exit code is the one test


def all_suites():
    # one for each dev/test/test_*.cpp: a new file needs no line here, nor in the Makefile
    host = sorted(re.sub(r".*/test_|\.cpp$", "", path) for path in glob.glob("dev/test/test_*.cpp"))
    parallel_make = ["make", "-s", f"-j{os.cpu_count() or 1}"]
    suites = [Suite("host " + name, ["build/test_" + name]) for name in host]
    suites += [
        Suite("host tiktoken", [PYTHON, "dev/test/compare_tiktoken.py"], seconds=300),
        Suite("model cpu", ["./test_gpt2cpu"], seconds=300),
        Suite("cli cpu", [PYTHON, "dev/test/test_cli.py", "./train_gpt2cpu"], seconds=300),
        Suite("loop cpu", [PYTHON, "dev/test/test_loop.py", "./train_gpt2cpu"], seconds=300),
        Suite("break cpu", [PYTHON, "dev/test/break_all.py", "./test_gpt2cpu"], seconds=400),
        Suite("lint", [PYTHON, "dev/test/lint.py"]),
        Suite("asan build", parallel_make + ["asan"], seconds=400, counts=False),
        Suite("asan model cpu", ["build/asan/test_gpt2cpu"], seconds=400),
    ]
    suites += [Suite("asan " + name, ["build/asan/test_" + name]) for name in host]
    programs = ["profile_gpt2.BF16"]
    programs += [f"{name}_gpt2.{kind}" for name in ("train", "test") for kind in ("BF16", "FP32", "FP16")]
    built = ["build/check/" + name for name in programs]
    built += [f"build/{path[4:-3]}" for path in glob.glob("dev/cuda/*.cu")]
    suites += [Suite("nvcc build", parallel_make + built, "nvcc", 900, counts=False)]
    suites += [Suite("gpu " + name, ["build/check/" + name], "gpu", 600)
               for name in programs if name.startswith("test_")]
    for test in ("cli", "loop"):
        words = [PYTHON, f"dev/test/test_{test}.py"]
        suites += [Suite(f"gpu {test} {name}", words + ["build/check/" + name], "gpu", 600)
                   for name in programs if name.startswith("train_")]
    return suites


# ---- what this machine has ----

def has_nvcc():
    return shutil.which("nvcc") is not None or os.path.exists("/usr/local/cuda/bin/nvcc")


def has_gpu():
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and listed.stdout.startswith("GPU ")


def cuda_hash():
    digest = hashlib.sha256()
    for path in sorted(glob.glob("*.cu")):
        with open(path, "rb") as f:
            digest.update(path.encode() + b"\0" + f.read() + b"\0")
    return digest.hexdigest()


def gpu_results():
    """The last run on a GPU: how many tests it had (all skipped here), and what to say about it."""
    try:
        with open(GPU_RESULTS, encoding="utf-8") as f:
            fields = dict(line.strip().split(": ", 1) for line in f if ": " in line)
    except FileNotFoundError:
        return 1, f"STALE: there is no {GPU_RESULTS}: run dev/gpu.sh on a machine with a GPU"
    about = ", ".join(fields.get(key, "no " + key) for key in ("date", "gpu", "counts"))
    closing = CLOSING.match(fields.get("counts", ""))
    tests = sum(int(n) for n in closing.groups()) if closing else 1
    if fields.get("sha256") != cuda_hash():
        return tests, f"STALE: the .cu files have changed since their GPU run ({about}): run dev/gpu.sh again"
    return tests, f"GPU tests of these .cu files: {about}"


# ---- running ----

def run(suite):
    """(passed, failed, skipped, what went wrong)"""
    log = "build/logs/" + re.sub(r"\W+", "_", suite.name) + ".log"
    with open(log, "w+", encoding="utf-8", errors="replace") as out:
        try:
            child = subprocess.Popen(suite.command, stdin=subprocess.DEVNULL, stdout=out,
                                     stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as error:
            return 0, 1, 0, str(error)
        problem = ""
        try:
            code = child.wait(suite.seconds)
        except subprocess.TimeoutExpired:
            problem = f"still running after {suite.seconds} s"
        finally:
            if child.poll() is None:                    # and whatever it started
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        out.seek(0)
        lines = out.read().rstrip("\n").split("\n")
    closing = CLOSING.match(lines[-1]) if suite.counts else None
    counts = tuple(int(n) for n in closing.groups()) if closing else (0, 0, 0)
    if problem:
        pass
    elif not suite.counts:
        counts, problem = (int(code == 0), 0, 0), f"exit code {code}" if code else ""
    elif not closing:
        problem = f"exit code {code}, no closing line"
    elif sum(counts) == 0:
        problem = "ran no test"
    elif (code != 0) != (counts[1] > 0):
        problem = f"exit code {code} does not fit its closing line '{lines[-1]}'"
    if problem:
        counts = (counts[0], max(counts[1], 1), counts[2])
    if counts[1]:
        failures = [line for line in lines if line.startswith("FAIL")][:20] or lines[-20:]
        print("\n".join("    " + line for line in failures))
        print(f"    all of it: {log}")
    return (*counts, problem)


def main():
    os.chdir(ROOT)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")     # spinning threads would starve each other
    words = sys.argv[1:]
    if words == ["--hash"]:
        print(cuda_hash())
        return 0
    suites = [s for s in all_suites() if not words or any(word in s.name for word in words)]
    os.makedirs("build/logs", exist_ok=True)
    have = {None: True, "nvcc": has_nvcc(), "gpu": has_gpu()}

    rows, total = [], [0, 0, 0]
    for suite in suites:
        if not have[suite.needs]:
            skipped = 1 if suite.needs == "nvcc" else 0     # GPU tests: below, as many as a GPU ran
            rows.append((suite.name, 0, 0, skipped, 0.0, f"skipped: no {suite.needs} here"))
            continue
        print(f"{suite.name} ...", flush=True)
        start = time.monotonic()
        passed, failed, skipped, problem = run(suite)
        rows.append((suite.name, passed, failed, skipped, time.monotonic() - start, problem))

    print(f"\n{'suite':<24}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}")
    for name, passed, failed, skipped, seconds, note in rows:
        print(f"{name:<24}{passed:>8}{failed:>8}{skipped:>9}{seconds:>9.1f}  {note}")
        total = [a + b for a, b in zip(total, (passed, failed, skipped))]
    if not have["gpu"] and any(s.needs == "gpu" for s in suites):
        tests, line = gpu_results()
        total[2] += tests
        bar = "!" * len(line) if line.startswith("STALE") else ""
        print(f"\n{bar}\n{line}\n{bar}\n")
    print(f"{total[0]} passed, {total[1]} failed, {total[2]} skipped")
    return 1 if total[1] or not total[0] else 0


if __name__ == "__main__":
    sys.exit(main())
