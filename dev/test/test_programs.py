"""Programs that count their own checks and say so in their last line: what is written in C++, fuzzing, and
scripts of this folder. A test is one run; all that it says is kept in build/logs.

A program must count at least as many checks as names.txt says: else a loop that ends early would look well.
"""
import glob
import os
import subprocess
import sys

import pytest

from checks import LEASH, ROOT, counts_in, fewest_checks, read

sys.path.append(os.path.join(ROOT, "dev/fuzz"))
from seeds import SEEDS                             # noqa: E402

SLOW, GPU = pytest.mark.slow, pytest.mark.gpu
# The second that TSan would wait at the end of each process finds nothing here; some tests fork while a
# thread runs.
TSAN = {"TSAN_OPTIONS": "atexit_sleep_ms=0:die_after_fork=0"}


def script(path, *words):
    return [sys.executable, "dev/" + path, *words]


def listed():
    """(name, command, marks), those that take long first."""
    for kind in ("BF16", "FP16", "FP32"):
        yield f"test_gpt2 {kind}", ["build/check/test_gpt2." + kind], [GPU]
    breaks = script("test/break_all.py", "build/check/test_gpt2.BF16", "kernels", "--small", "model")
    yield "breaks BF16", breaks, [GPU]
    yield "asan test_gpt2 invariance", ["build/asan/test_gpt2cpu", "invariance"], []
    yield "asan test_gpt2 model", ["build/asan/test_gpt2cpu", "model"], []
    yield "breaks asan", script("test/break_all.py", "build/asan/test_gpt2cpu", "--sample", "3"), []
    for mode in ("model", "invariance"):        # of make test-quick
        yield f"test_gpt2 {mode}", ["./test_gpt2cpu", mode], [SLOW]
    yield "test_gpt2", ["./test_gpt2cpu"], [SLOW]
    yield "breaks", script("test/break_all.py", "./test_gpt2cpu"), [SLOW]
    # one for each dev/test/test_*.cpp: a new file needs no line here, nor in the Makefile
    for path in sorted(glob.glob(ROOT + "/dev/test/test_*.cpp")):
        name = os.path.basename(path)[5:-4]
        yield f"asan {name}", ["build/asan/test_" + name], []
        yield f"host {name}", ["build/test_" + name], [SLOW]
    for name, words, marks in (("dataloader", [], []), ("comm", ["die"], []), ("host", [], [SLOW]),
                               ("checkpoints", [], [SLOW])):
        yield f"tsan {name}", ["build/tsan/test_" + name, *words], marks
    for name in sorted(SEEDS):
        yield f"seeds {name}", script("fuzz/run.py", name), []
        yield f"fuzz {name}", script("fuzz/run.py", name, "--seconds", "60"), [SLOW]
    yield "mutants", script("test/mutants.py", "--base", "HEAD~1"), [SLOW, pytest.mark.timeout(10000)]
    yield "lint", script("test/lint.py"), []


PROGRAMS = {name: command for name, command, _ in listed()}


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks, id=name.replace(" ", "-"))
                                  for name, _, marks in listed()])
def test_program(name):
    command = PROGRAMS[name]
    made = next((word for word in command if "/" in word and not word.startswith(("/", "dev/"))), None)
    if name.startswith(("seeds", "fuzz")):
        made = "build/fuzz"
    if made and not os.access(os.path.join(ROOT, made), os.X_OK):
        pytest.skip(f"no {made}: make {made}")
    log = os.path.join(ROOT, "build/logs", name.replace(" ", "_") + ".log")
    os.makedirs(os.path.dirname(log), exist_ok=True)
    env = {**os.environ, **(TSAN if name.startswith("tsan") else {})}
    if "test_gpt2" in name:                     # finds its files from any folder, such as this test's
        command, folder = [os.path.join(ROOT, command[0]), *command[1:]], os.getcwd()
    else:
        folder = ROOT
    with open(log, "wb") as out:
        code = subprocess.run(LEASH + command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=out,
                              stderr=subprocess.STDOUT, check=False).returncode
    text = read(log).decode(errors="replace")
    lines = text.rstrip("\n").split("\n")
    complaints = "\n".join([line for line in lines if line.startswith("FAIL")][:20] or lines[-20:])
    assert code == 0, f"{' '.join(command)}: exit code {code}, all of it is in {log}\n{complaints}"
    assert counts_in(text), f"{' '.join(command)}: no closing line\n{complaints}"
    passed, failed, skipped = counts_in(text)
    assert failed == 0, complaints
    if not passed:
        pytest.skip("\n".join(line for line in lines if line.startswith("SKIP")))
    least = fewest_checks(name)
    assert passed + skipped >= least, f"{passed + skipped} checks, dev/test/names.txt asks for {least}"
