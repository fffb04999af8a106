"""What the tests themselves need: no test disappears, and gpu-results.txt says what ran on which sources.

    pytest dev/test/test_harness.py --update-names      # after a run: names.txt has all that there is now
"""
import ast
import glob
import os
import re
import shutil
import sys
import time

import pytest

import gpus
import status
import test_programs
import trainer
from checks import NAMES, ROOT, counts_in, known_names, read, row_of, run_program, write


def names_of(path):
    return [node.name.removeprefix("test_") for node in ast.parse(read(path)).body
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def checks_of(program):
    """How many it counted in its last run here; 2 % less of many, as machines differ in a few (some cannot
    mount a file system, some are root)."""
    log = os.path.join(ROOT, "build/logs", program.replace(" ", "_") + ".log")
    counts = os.path.exists(log) and counts_in(read(log).decode(errors="replace"))
    counted = sum(counts) if counts and counts[0] and not counts[1] else 0
    return counted - counted // 50


def test_names(request):
    paths = sorted(glob.glob(ROOT + "/dev/test/test_*.py"))
    there = {os.path.basename(path): names_of(path) for path in paths}
    known, rows = known_names(), {row_of(name) for name in test_programs.PROGRAMS} - {"lint", "mutants"}
    if request.config.getoption("--update-names"):
        with open(NAMES, "w", encoding="utf-8") as f:
            f.write("# All tests, and the fewest checks that each program must count: what disappears has "
                    "failed.\n# Written after a run by `pytest dev/test/test_harness.py --update-names`.\n")
            f.writelines(f"{module}: {' '.join(names)}\n" for module, names in there.items())
            for row in sorted(rows):
                counted = [checks_of(name) for name in test_programs.PROGRAMS if row_of(name) == row]
                f.write(f"{row}: {min(filter(None, counted), default=0) or known.get(row, 1)}\n")
        return
    gone = [f"{module}::test_{name}" for module, names in known.items() if module.endswith(".py")
            for name in names.split() if name not in there.get(module, ())]
    gone += [name for name in known if not name.endswith(".py") and name not in rows]
    assert not gone, f"in dev/test/names.txt, but not there any more: {', '.join(gone)}"
    twice = [module for module, names in there.items() if len(set(names)) < len(names)]
    assert not twice, f"{twice}: two tests have one name, and only the last of them runs"


def test_hash_of_cuda_sources():
    code = '#include "llmc/ops/helper.h"\nkernel(); // %s\ndie("%s"); asm("%s");\n'
    write("a.cu", code % ("one", "two", "three"))
    write("llmc/ops/helper.h", '#include "../deep.h"\nhelper')
    write("llmc/deep.h", "deep")
    write("llmc/other.h", "other")
    before = gpus.cuda_hash(".")
    write("llmc/other.h", "another")
    write("a.cu", code % ("a comment", "a message", "three"))
    assert gpus.cuda_hash(".") == before, "what no CUDA program compiles, and words"
    write("a.cu", code % ("one", "two", "other code"))
    assert gpus.cuda_hash(".") != before, "an asm statement has changed"
    write("a.cu", code % ("one", "two", "three"))
    write("llmc/deep.h", "another")
    assert gpus.cuda_hash(".") != before, "a header of a header has changed"


def test_snapshot(own_folder):
    """A file that is written again, to the same size, has another hash: at once, or when one is kept."""
    for wait in (0, 0.2):
        write("written.bin", b"before")
        time.sleep(wait)
        first, times = trainer.snapshot(), os.stat("written.bin")
        assert trainer.snapshot() == first
        write("written.bin", b"behind")
        os.utime("written.bin", ns=(times.st_atime_ns, times.st_mtime_ns))
        assert trainer.snapshot() != first, wait


def test_gpu_results():
    rows = {"cli BF16": (5, 0, 1), "ranks BF16, 2 GPUs": (7, 1, 0)}
    gpus.write_results(rows, "sources", "results")
    fields = gpus.read_results("results")
    assert fields["counts"] == "12 passed, 1 failed, 1 skipped" and fields["sha256"] == "sources"
    assert gpus.passed_rows("sources", "results") == {"cli BF16"}
    assert gpus.passed_rows("other sources", "results") == set()
    write("results", read("results") + b"\nmemcheck: ok\n")
    gpus.write_results({"ranks BF16, 2 GPUs": (8, 0, 0)}, "sources", "results")
    text = read("results").decode()
    assert text.endswith("\n\nmemcheck: ok\n"), "other steps of these sources stay"
    assert gpus.passed_rows("sources", "results") == set(rows), "other suites stay"
    gpus.write_results({"cli FP16": (1, 0, 0)}, "other sources", "results")
    text = read("results").decode()
    assert "memcheck" not in text and "BF16" not in text, "those of other sources go"


def test_status():
    """The table is of two committed files alone, so no change of the sources makes the page an old one."""
    page = read(status.PAGE).decode()
    assert status.with_table(page, status.table()) == page, "python3 dev/test/status.py --write"
    gpus.write_results({"cli BF16": (5, 0, 1), "cli FP32": (6, 0, 0), "ranks BF16, 2 GPUs": (7, 1, 0)},
                       "0123456789abcdef", "for_status")
    write("by_hand", "# what\nsanitizers | no errors | 2026-11-22 | H200 | make sanitize\n")
    rows = status.table("for_status", "by_hand").splitlines()
    assert "hash 0123456789ab." in rows[0]
    assert [row.split(" | ")[:2] for row in rows[4:]] == [
        ["| cli", "BF16 5/0/1, FP32 6/0/0"], ["| ranks, 2 GPUs", "BF16 7/1/0"], ["| sanitizers", "no errors"]]
    page = "# A\n" + status.BEGIN + "old" + status.END + "more\n"
    assert status.with_table(page, "new\n") == page.replace("old", "new\n")


def test_report_without_a_gpu():
    def report():
        return gpus.report_without_gpu(120, ["cli BF16", "ranks BF16"], "sources", "no_gpu")
    assert "STALE: there is no gpu-results.txt" in report() and "120 tests" in report()
    gpus.write_results({"cli BF16": (3, 0, 1)}, "sources", "no_gpu")
    assert "STALE" not in report()
    assert "3 passed, 0 failed, 1 skipped, without ranks BF16." in report()
    gpus.write_results({"cli BF16": (3, 0, 1), "ranks BF16, 2 GPUs": (1, 0, 0)}, "sources", "no_gpu")
    assert "without" not in report()
    gpus.write_results({"cli BF16": (3, 0, 1)}, "others", "no_gpu")
    assert "STALE: the CUDA sources have changed" in report()
    assert len(report().strip().split("\n")) == 2 and "!" not in report(), "calm lines"


@pytest.mark.parametrize("several, alone, wanted",
                         [(False, False, "7"), (False, True, "4"), (True, False, None)])
def test_places_on_gpus(several, alone, wanted):
    """With several GPUs the kernels' tests have the first one to themselves."""
    for worker in (0, 1, 5):
        two = gpus.environment(["4", "7"], worker, several, alone, False)
        assert two.get("CUDA_VISIBLE_DEVICES") == wanted and "CUDA_DEVICE_MAX_CONNECTIONS" not in two
        here = gpus.environment(["4"], worker, several, alone, True)
        assert here.get("CUDA_VISIBLE_DEVICES") == (None if several else "4")
        assert here["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


# Suites of their own, run with this folder's conftest.py.
SUITES = {
    "test_it.py": """
import os, pytest
def test_good(): pass
def test_bad(): assert os.environ.get("GOOD")
@pytest.mark.slow
def test_long(): assert False
""",
    "test_on_gpu.py": """
import os, pytest
pytestmark = pytest.mark.gpu
def test_kernel(): pass
@pytest.mark.gpus
def test_several(): assert "CUDA_VISIBLE_DEVICES" not in os.environ
""",
    "test_zombie.py": """
import os, pytest
@pytest.mark.gpu
def test_broken_off():
    if os.environ.get("STOP"): raise KeyboardInterrupt
"""}


def run_suites(*words, gpus_here=0, **env):
    """(exit code, the last line, rows of gpu-results.txt)"""
    for name in ("conftest.py", "gpus.py", "status.py", "checks.py", "trainer.py"):
        shutil.copy(os.path.join(ROOT, "dev/test", name), ".")
    write("dev/test/by-hand.txt", "# none\n")
    if not os.path.exists("docs"):
        write("docs/performance.md", status.BEGIN + status.END)
    shutil.copy(os.path.join(ROOT, "pytest.ini"), ".")
    write("checks.py", read("checks.py").decode().replace("ROOT = ", f"ROOT = {os.getcwd()!r}\nIT = "))
    for name, text in SUITES.items():
        write(name, text)
    write("bin/nvidia-smi", "#!/bin/sh\n" + "echo 9.0\n" * gpus_here + "echo 7.5\n")     # one is too old
    path = os.path.abspath("bin") + ":" + os.environ["PATH"]
    env.update((name, None) for name in os.environ if re.search("PYTEST|CUDA", name))
    code, out, _ = run_program([sys.executable, "-m", "pytest", ".", *words], **{"PATH": path, **env})
    rows = set(gpus.read_results("dev/test/gpu-results.txt")) & {"on_gpu", "zombie", "it"}
    assert not rows or b"The suites ran" in read("docs/performance.md"), "the page is not written"
    last = out.rstrip().split("\n")[-1]
    whys = sum(map(int, re.findall(r"^ +(\d+) skipped: \S.+$", out, re.M)))
    assert last.endswith(f" {whys} skipped"), "a skip without a reason"
    return code, last, sorted(rows)


@pytest.mark.parametrize("words, env, code, last", [
    ([], {}, 1, "1 passed, 1 failed, 4 skipped"),
    (["-n", "2"], {"GOOD": "1"}, 0, "2 passed, 0 failed, 4 skipped"),
    (["-k", "long"], {}, 1, "0 passed, 0 failed, 1 skipped"),
    (["-k", "nothing"], {}, 1, "0 passed, 0 failed, 0 skipped"),
    (["--slow", "-k", "long"], {}, 1, "0 passed, 1 failed, 0 skipped")],
    ids=["failed", "workers", "skipped", "none", "slow"])
def test_closing_line(own_folder, words, env, code, last):
    assert run_suites(*words, **env) == (code, last, [])


def test_runs_on_gpus(own_folder):
    every = ["on_gpu", "zombie"]
    assert run_suites("-n", "2", GOOD="1", gpus_here=1) == (0, "4 passed, 0 failed, 2 skipped", every)
    assert run_suites("--missing", GOOD="1", gpus_here=1) == (0, "2 passed, 0 failed, 1 skipped", every)
    os.unlink("dev/test/gpu-results.txt")
    assert run_suites(GOOD="1", gpus_here=2, STOP="1") == (2, "4 passed, 0 failed, 1 skipped", ["on_gpu"])
    assert run_suites("--missing", GOOD="1", gpus_here=2) == (0, "3 passed, 0 failed, 1 skipped", every)
