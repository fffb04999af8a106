"""What tests of scripts share: counted checks, and a runner of all functions test_* in folders of their own.

    from checks import ROOT, check, main, skip
    def test_it(): check(1 + 1 == 2, "what is wrong")
    sys.exit(main(globals(), "test_scripts"))           # -k WORD: only those whose name contains it
"""
import contextlib
import importlib.util
import os
import shutil
import sys
import tempfile
import time
import traceback

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
counts = {"passed": 0, "failed": 0, "skipped": 0}
current = ""


def check(condition, what):
    counts["passed" if condition else "failed"] += 1
    if not condition:
        print(f"FAIL {current}: {what}", flush=True)


def skip(tests, why):
    counts["skipped"] += tests
    print(f"SKIP ({tests}): {why}")


def has_module(name):
    return importlib.util.find_spec(name) is not None


@contextlib.contextmanager
def scratch_folder(prefix, keep=False):
    """In a new folder, which is removed at the end, or kept and named."""
    folder = tempfile.mkdtemp(prefix=prefix)
    os.chdir(folder)
    try:
        yield folder
    finally:
        os.chdir(ROOT)
        if keep:
            print(f"kept {folder}")
        else:
            shutil.rmtree(folder)


def closing():
    """Prints the last line; the exit code."""
    print("{passed} passed, {failed} failed, {skipped} skipped".format(**counts))
    return 1 if counts["failed"] or not counts["passed"] else 0


def main(names, program, in_root=()):
    """in_root: tests that run in the repository instead."""
    global current
    word = sys.argv[2] if sys.argv[1:2] == ["-k"] else ""
    for name, test in [(n[5:], f) for n, f in names.items() if n.startswith("test_") and word in n]:
        current, began = name, time.monotonic()
        with scratch_folder(program + "_") as folder:
            os.chdir(ROOT if name in in_root else folder)
            try:
                test()
            except Exception as e:                  # unexpected output is a failure, not an end
                where = traceback.extract_tb(e.__traceback__)[-1]
                check(False, f"{type(e).__name__}: {e} ({os.path.basename(where.filename)}:{where.lineno})")
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
    return closing()
