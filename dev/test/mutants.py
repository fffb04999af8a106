#!/usr/bin/env python3
"""Would the tests notice a mistake in what a change touched? Makes small mistakes in those lines, one
at a time, and runs the suites that should fail.

    make test-mutants BASE=main~3                          # 20 mistakes in the lines added since that commit
    python3 dev/test/mutants.py --base HEAD~1 --count 100 --seed 2 --only llmc/comm
    python3 dev/test/mutants.py --base HEAD~1 --list       # only prints them

A mistake that no suite notices is NOBODY's. The sources are copied into a temporary folder and
built there at -O1; the working tree is not touched. A mutant takes about a minute; those that do not compile
count as skipped.
"""
import argparse
import importlib.util
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(1, os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")))
from checks import ROOT                             # noqa: E402
from venv_python import take_the_venv               # noqa: E402

if not importlib.util.find_spec("pytest"):
    take_the_venv()

# What should notice a mistake in a file, the first row that fits: modules of dev/test and programs of
# test_programs.py. First what has noticed most for its time.
MODEL = ["runs", "texts", "training", "evaluation", "golden", "test_gpt2", "refusals", "memory", "plan",
         "terminal", "lazy", "hf", "answers", "conversations", "resume", "ranks"]
SUITES = [
    (r"llmc/ops/(cpu_ops|ops|op_types|token_buckets|fp8)\.h", ["host cpu_ops", *MODEL]),
    (r"llmc/comm/.*", ["host comm", "ranks", "terminal", "resume"]),
    (r"llmc/(files/|)(checkpoints|state_file|checksum)\.h", ["host checkpoints", "host host", "resume",
                                                              "ranks"]),
    (r"llmc/files/(saver|resume)\.h", ["host host", "runs", "resume", "memory", "ranks"]),
    (r"\w+/data/(tokenizer|tokenizer_tool|unicode_tables)\.h|dev/data/tokenize\.cpp",
     ["host tokenizer", "own_tokenizer", "stories", "tiktoken", "datasets"]),
    (r"llmc/data/loss_mask\.h", ["host dataloader", "answers"]),
    (r"dev/data/(answers|messages|chat_templates)\.py|llmc/data/chat_template\.h",
     ["conversations", "host host"]),
    (r"llmc/data/(dataloader|evalloader)\.h", ["host {name}", *MODEL]),
    (r"llmc/data/mixture\.h", ["host dataloader", *MODEL]),
    (r"llmc/\w+/(sampler|progress|telemetry|json)\.h", ["host host", "terminal", "texts"]),
    (r"llmc/run/requests\.h", ["serve"]),
    (r"llmc/.*\.h", ["host host", "host checkpoints", *MODEL]),
    (r"train_gpt2\.cu", MODEL),
    (r"dev/(eval/.*|hf)\.py", ["hf", "gguf", "llama2c", "published"]),
    (r"dev/data/(plot_log|tensorboard_log)\.py", ["plots"]),
    (r"dev/serve\.py", ["serve"]),
    (r"dev/data/.*\.py", ["datasets", "own_tokenizer", "scripts"]),
    (r"dev/(data|tools)/.*\.cpp", ["stories", "resume", "datasets"]),
]
TOOLS = ["build/tokenize", "build/stories", "build/bigram", "build/checkpoint"]
MADE_OF = {"test_gpt2": ["test_gpt2cpu"], "golden": ["build/plain/train_gpt2cpu"], "tiktoken": TOOLS,
           "lazy": ["train_gpt2cpu", "build/train_gpt2lazy"], "datasets": TOOLS,
           "stories": TOOLS + ["build/plain/train_gpt2cpu"], "conversations": TOOLS + ["train_gpt2cpu"]}
NOT_HERE = re.compile(r"llmc/ops/(cuda_|cublaslt|nccl)|profile_gpt2|dev/(cuda|fuzz)|(dev/)?test")

# (what stands in a line, what it becomes)
CHANGES = [
    (r"(?<=[^<>=!+\-*/&|])< (?!<)", "<= "), (r"<= ", "< "), (r"(?<=[^<>=\-])> ", ">= "), (r">= ", "> "),
    (r"== ", "!= "), (r"!= ", "== "), (r"&& ", "|| "), (r"\|\| ", "&& "), (r" and ", " or "),
    (r" or ", " and "), (r" \+ ", " - "), (r" - ", " + "), (r" \* ", " + "), (r" \+= ", " -= "),
    (r"\bmin\(", "max("), (r"\bmax\(", "min("), (r"\btrue\b", "false"), (r"\bfalse\b", "true"),
    (r"\bTrue\b", "False"), (r"\bFalse\b", "True"), (r"if \(!", "if ("), (r"if \((?!!)", "if (!"),
    (r"(?<!\.)\b0\b", "1"), (r"(?<!\.)\b1\b", "2"), (r"(?<!\.)\b1\b", "0"), (r"\bcontinue;", "break;"),
    (r"(\w+)\((\w+), (\w+)", r"\1(\3, \2"),
]


def run(words, folder, **more):
    return subprocess.run(words, cwd=folder, text=True, capture_output=True, errors="replace", **more)


def lines_of(name):
    with open(os.path.join(ROOT, name), encoding="utf-8") as f:
        return f.read().split("\n")


def touched_lines(base, only):
    """{file: numbers of its lines that are not in `base`}, of what is compiled or run, tests left out."""
    words = ["git", "diff", "-U0", base, "--", "*.cu", "*.h", "*.cpp", "dev/data/*.py", "dev/eval/*.py"]
    files, lines = {}, []
    for line in run(words, ROOT, check=True).stdout.split("\n"):
        if line.startswith("+++ "):
            name = line[6:]
            lines = [] if NOT_HERE.match(name) or only not in name else files.setdefault(name, [])
        elif hunk := re.match(r"@@ -\S+ \+(\d+),?(\d*) @@", line):
            first = int(hunk[1])
            lines.extend(range(first, first + int(hunk[2] or 1)))
    return files


def compiled_lines(name):
    """Numbers of a .cu file's lines that the CPU build compiles."""
    text = run(["g++", "-E", "-I.", "-DGPT2_CPU", "-x", "c++", name], ROOT, check=True).stdout
    inside, number, numbers = False, 0, set()
    for line in text.split("\n"):
        if marker := re.match(r'# (\d+) "(.*?)"', line):
            inside, number = marker[2] == name, int(marker[1])
        else:
            if inside and line.strip():
                numbers.add(number)
            number += 1
    return numbers


def mutants_of(name, touched):
    """(file, line number, line, mutated line), all that the table makes of these lines."""
    lines = lines_of(name)
    code_lines = re.sub(r"/\*.*?\*/", lambda comment: re.sub(".", " ", comment[0]), "\n".join(lines),
                        flags=re.S).split("\n")
    numbers = set(touched) & compiled_lines(name) if name.endswith(".cu") else touched
    for number in sorted(numbers):
        line, code = lines[number - 1], code_lines[number - 1]
        if re.match(r"\s*(//|#|$|static_assert|assert)", code):
            continue
        code = re.sub(r"(//|  #).*", "", code)
        code = re.sub(r'"(\\.|[^"\\])*"', lambda text: "\0" * len(text[0]), code)     # no mistakes in texts
        for old, new in CHANGES:
            for found in re.finditer(old, code):
                yield name, number, line, line[:found.start()] + found.expand(new) + line[found.end():]
        if re.match(r"\s+[a-z][\w.>\-\[\]]*( [+*|-]?= |\().*;\s*$", code) and "return" not in code:
            yield name, number, line, re.match(r"\s*", line)[0] + ";"


def noticed_by(folder, name):
    """The first suite that fails, "the compiler", or None."""
    suites = next((words for pattern, words in SUITES if re.fullmatch(pattern, name)), ["runs", "refusals"])
    for suite in suites:
        suite = suite.format(name=os.path.basename(name).split(".")[0])
        programs = ["build/test_" + suite[5:], *TOOLS] if suite.startswith("host ") else \
            MADE_OF.get(suite, ["train_gpt2cpu", *TOOLS])
        if run(["make", "-s", "-j2", "CPU_OPT=-O1", *programs], folder).returncode:
            return "the compiler"
        program = f"test_programs.py::test_program[{suite.replace(' ', '-')}]"
        module = f"test_{suite}.py" if os.path.exists(f"{ROOT}/dev/test/test_{suite}.py") else program
        words = [sys.executable, "-m", "pytest", "-x", "-q", "--slow", "-n", "2", "-o", "timeout=600",
                 "dev/test/" + module]                      # a test that hangs has failed
        if re.search(r"[1-9]\d* failed, \d+ skipped$", run(words, folder).stdout.rstrip()):
            return suite
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--base", default="HEAD", help="the lines added since this commit")
    parser.add_argument("--only", default="", help="files whose name contains this")
    parser.add_argument("--count", type=int, default=20, help="as many, drawn by --seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="print them, run nothing")
    args = parser.parse_args()
    everything = [m for name, lines in touched_lines(args.base, args.only).items()
                  for m in mutants_of(name, lines)]
    random.Random(args.seed).shuffle(everything)
    one_a_line = list({mutant[:2]: mutant for mutant in everything}.values())[:args.count]
    said = [f"{name}:{number}: {line.strip()}  ->  {new.strip()}" for name, number, line, new in one_a_line]
    if args.list:
        print("\n".join(said))
        return 0
    found = []
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        listed = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT).stdout
        for path in listed.split("\0"):
            target = os.path.join(folder, path)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if os.path.isfile(os.path.join(ROOT, path)):
                shutil.copy2(os.path.join(ROOT, path), target)
        for what, (name, number, _, new) in zip(said, one_a_line):
            lines = lines_of(name)
            lines[number - 1] = new
            with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
                f.write("\n".join(lines))
            found.append(noticed_by(folder, name))
            shutil.copy2(os.path.join(ROOT, name), os.path.join(folder, name))
            print(f"{found[-1] or 'NOBODY'}: {what}", flush=True)
    survivors, uncompiled = found.count(None), found.count("the compiler")
    print(f"{len(found) - survivors - uncompiled} passed, {survivors} failed, {uncompiled} skipped")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
