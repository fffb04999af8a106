"""What only GPUs need of the tests: which test runs on which of them, and what dev/test/gpu-results.txt says.

    python3 dev/test/gpus.py        # sha256 of the CUDA sources, as in gpu-results.txt

A row there is a suite in a precision, such as `runs BF16`, with a hash of the sources. By it machines without
a GPU know whether the sources have changed since. A run that is broken off leaves the rows of suites that
have ended; --missing runs the others.
"""
import glob
import hashlib
import os
import re
import subprocess
import time

from checks import ROOT, counts_in

RESULTS = os.path.join(ROOT, "dev/test/gpu-results.txt")
MOST_GPUS = 4           # tests use no more
PROGRAMS_A_GPU = 12     # share a GPU at a time


def ask_gpus(*words):
    """nvidia-smi's lines; none without it."""
    try:
        said = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return said.stdout.splitlines() if said.returncode == 0 else []


def list_gpus():
    """As CUDA_VISIBLE_DEVICES names them, those with compute capability 8.0 or later: CUDA counts them first,
    as they are the fastest."""
    caps = ask_gpus("--query-gpu=compute_cap", "--format=csv,noheader")
    there = [str(i) for i in range(sum(re.fullmatch(r"([89]|\d\d)\.\d", cap) is not None for cap in caps))]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [word for word in visible.split(",") if word] if there and visible is not None else there


# ---- which test runs where ----

def environment(gpus, worker, several, alone, starts):
    """What a test's CUDA programs get. several: the test uses all GPUs; alone: it should not run beside
    those that start programs all the time, which makes kernels' tests several times as long; starts: it does.
    With one hardware queue in place of eight, twelve programs at a time start at 14 a second on an H200, not
    at 5. Streams keep their order and their events."""
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if starts else {}
    if several or not gpus:
        return env
    others = gpus[1:] or gpus
    return {**env, "CUDA_VISIBLE_DEVICES": gpus[0] if alone else others[worker % len(others)]}


# ---- gpu-results.txt: lines `key: value` ----

def without_words(text):
    """C++ without comments, blanks and the words of messages; what is in an asm statement stays."""
    def blank(token):
        word = token[0]
        if word[0] == "'":
            return word
        return '"' + "_" * (len(word) - 2) + '"' if word[0] == '"' else " " * len(word)
    token = r'''"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])+'|//[^\n]*|/\*.*?\*/'''
    code, out, at = re.sub(token, blank, text, flags=re.S), "", 0
    for found in re.finditer(r"\basm\b", code):
        end = code.index(");", found.start())
        out, at = out + code[at:found.start()] + text[found.start():end], end
    return " ".join(re.sub('"_*"', '""', out + code[at:]).split())


def cuda_hash(root=ROOT):
    """Of all that the CUDA programs are made of."""
    digest, seen = hashlib.sha256(), set()
    paths = sorted(glob.glob("*.cu", root_dir=root))
    while paths:
        path = paths.pop(0)
        seen.add(path)
        with open(os.path.join(root, path), encoding="utf-8") as f:
            text = f.read()
        for name in re.findall(r'#include "([^"]+)"', text):
            beside = os.path.normpath(os.path.join(os.path.dirname(path), name))
            include = beside if os.path.exists(os.path.join(root, beside)) else name
            paths += [include] if include not in paths and include not in seen else []
        digest.update((path + "\0" + without_words(text) + "\0").encode())
    return digest.hexdigest()


def read_results(path=RESULTS):
    try:
        with open(path, encoding="utf-8") as f:
            return dict(line.strip().split(": ", 1) for line in f if ": " in line)
    except FileNotFoundError:
        return {}


def suite_rows(fields):
    """{name: (passed, failed, skipped)}"""
    counts = {name: counts_in(text) for name, text in fields.items() if name != "counts"}
    return {name: row for name, row in counts.items() if row}


def row_name(suite, kind, several, gpus):
    return f"{suite} {kind}" + (f", {min(len(gpus), MOST_GPUS)} GPUs" if several and gpus else "")


def passed_rows(sources, path=RESULTS):
    fields = read_results(path)
    good = {name for name, (_, failed, _) in suite_rows(fields).items() if not failed}
    return good if fields.get("sha256") == sources else set()


def write_results(rows, sources, path=RESULTS):
    """rows: {name: (passed, failed, skipped)} of suites that have ended; sources: cuda_hash() when they
    began. As long as it is the same, other rows stay, and what dev/gpu.sh wrote below the first empty line.
    """
    fields, more = read_results(path), ""
    if fields.get("sha256") == sources:
        with open(path, encoding="utf-8") as f:
            more = "".join(f.read().partition("\n\n")[1:])[1:]
        rows = {**suite_rows(fields), **rows}
    name, driver = ((ask_gpus("--format=csv,noheader", "--query-gpu=" + what) or [None])[0]
                    for what in ("name", "driver_version"))
    said = "{} passed, {} failed, {} skipped\n".format
    with open(path, "w", encoding="utf-8") as f:
        f.write(f"date: {time.strftime('%Y-%m-%d', time.gmtime())}\ngpu: {name}\ndriver: {driver}\n"
                f"counts: {said(*map(sum, zip(*rows.values())))}sha256: {sources}\n")
        f.writelines(f"{name}: {said(*rows[name])}" for name in sorted(rows))
        f.write(more)


def report_without_gpu(skipped, rows, sources, path=RESULTS):
    """Two calm lines for a machine without a GPU; rows: what would run there, of suites in precisions."""
    fields = read_results(path)
    about = ", ".join(fields.get(key, "no " + key) for key in ("date", "gpu", "counts"))
    known = {name.partition(",")[0] for name in fields}
    lacking = [name for name in rows if name not in known]
    about += f", without {', '.join(lacking)}" if lacking else ""
    said = (f"\n{skipped} tests of the CUDA programs are counted as skipped: they need an NVIDIA GPU "
            "(`make test-gpu`).\n")
    if not fields:
        return said + "STALE: there is no gpu-results.txt: nothing is known of a run on a GPU."
    if fields.get("sha256") != sources:
        return said + f"STALE: the CUDA sources have changed since their last run on a GPU ({about})."
    return said + f"Their last run, of these very sources: {about}."


if __name__ == "__main__":
    print(cuda_hash())
