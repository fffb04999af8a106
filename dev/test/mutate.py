#!/usr/bin/env python3
"""Do the tests see what they are there to see? Patches the sources, one small wrong thing at a time, and runs
the suite that must notice.

    make test-mutants                               # all of it: an hour on two cores, not in CI
    python3 dev/test/mutate.py -k sampler           # only patches whose file, suite or text holds a word
    python3 dev/test/mutate.py --check              # only that every old text is there exactly once

The table is dev/test/mutants.txt. A patch whose old text does not occur exactly once (runs of blanks and line
ends count as one blank) is an error of the table: somebody has changed the code, and the patch wants to be
changed with it. A suite notices by failing, by dying or by not ending; a patch that does not compile is an
error of the table as well. The sources are copied into a temporary folder and built there at -O1 without
OpenBLAS, only the programs that include the patched file; the working tree is not touched.
"""
import argparse
import concurrent.futures
import contextlib
import glob
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
VENV = os.path.join(ROOT, ".venv/bin/python")
PYTHON = VENV if os.path.exists(VENV) else sys.executable
LIMIT_S = 240                           # a suite takes seconds: what does not end has noticed

# program: its source and its flags
PROGRAMS = {f"{name}_gpt2cpu": f"-DGPT2_CPU -x c++ {name}_gpt2.cu" for name in ("train", "test")}
PROGRAMS["build/train_gpt2lazy"] = "-DLAZY_STREAMS " + PROGRAMS["train_gpt2cpu"]
PROGRAMS.update({f"build/test_{name}": f"dev/test/test_{name}.cpp"
                 for name in ("host", "dataloader", "evalloader", "token_buckets", "tokenizer", "cpu_ops",
                              "data_tools", "comm", "checkpoints")})
PROGRAMS["build/checkpoint"] = "dev/tools/checkpoint.cpp"
PROGRAMS.update({f"build/{name}": f"dev/data/{name}.cpp" for name in ("tokenize", "stories", "bigram")})

# suite: programs that it runs, and its command; `SUITE WORD`: only tests with that word (loop, cli, ranks)
TOOLS = ["build/tokenize", "build/stories", "build/bigram"]
SUITES = {
    "host": (["build/test_host"], ["build/test_host"]),
    "dataloader": (["build/test_dataloader"], ["build/test_dataloader"]),
    "evalloader": (["build/test_evalloader"], ["build/test_evalloader"]),
    "token_buckets": (["build/test_token_buckets"], ["build/test_token_buckets"]),
    "tokenizer": (["build/test_tokenizer", "build/tokenize"], ["build/test_tokenizer"]),
    "tiktoken": (["build/tokenize"], [PYTHON, "dev/test/compare_tiktoken.py"]),
    "cpu_ops": (["build/test_cpu_ops"], ["build/test_cpu_ops"]),
    "data_tools": (["build/test_data_tools", *TOOLS], ["build/test_data_tools"]),
    "stories": (["build/stories"], [PYTHON, "dev/test/test_stories.py"]),
    "datasets": (["build/tokenize"], [PYTHON, "dev/test/test_datasets.py"]),
    "model": (["test_gpt2cpu"], ["./test_gpt2cpu"]),
    "loop": (["train_gpt2cpu"], [PYTHON, "dev/test/test_loop.py", "./train_gpt2cpu"]),
    "cli": (["train_gpt2cpu"], [PYTHON, "dev/test/test_cli.py", "./train_gpt2cpu"]),
    "seeing": (["train_gpt2cpu"], [PYTHON, "dev/test/test_seeing.py", "./train_gpt2cpu"]),
    "blocks": (["train_gpt2cpu"], [PYTHON, "dev/test/test_blocks.py", "./train_gpt2cpu"]),
    "ranks": (["train_gpt2cpu"], [PYTHON, "dev/test/test_ranks.py", "./train_gpt2cpu", "--quick"]),
    "comm": (["build/test_comm"], ["build/test_comm"]),
    "checkpoints": (["build/test_checkpoints", "build/checkpoint"], ["build/test_checkpoints"]),
    "resume": (["train_gpt2cpu"], [PYTHON, "dev/test/test_resume.py", "./train_gpt2cpu"]),
    "resume_lazy": (["build/train_gpt2lazy"],
                    [PYTHON, "dev/test/test_resume.py", "build/train_gpt2lazy"]),
    "lazy": (["train_gpt2cpu", "build/train_gpt2lazy"],
             [PYTHON, "dev/test/test_lazy.py", "build/train_gpt2lazy"]),
    "hf": (["train_gpt2cpu"], [PYTHON, "dev/test/test_hf.py", "./train_gpt2cpu"]),
}


def read_table():
    """Rows (file, suite, old, new, why) of dev/test/mutants.txt; suite `equivalent` has a why."""
    with open(os.path.join(ROOT, "dev/test/mutants.txt"), encoding="utf-8") as f:
        text = f.read()
    rows = []
    for part in text.split("\n== ")[1:]:
        file, _, body = part.partition("\n")
        for row in re.finditer(r"^([a-z][^:\n]*): (.*)\n    ->(.*)(?:\n    +(.*))?$", body, re.M):
            rows.append((file, row[1], row[2], row[3].strip(), row[4] or ""))
        lines = len([line for line in body.split("\n") if line and not line.startswith(("#", " "))])
        if len(re.findall(r"^    ->", body, re.M)) != lines or lines != sum(row[0] == file for row in rows):
            sys.exit(f"error: dev/test/mutants.txt, == {file}: a row that is not SUITE: OLD, then -> NEW")
    return rows


def suite_command(suite):
    """(programs, command) of `host` or `loop WORD`."""
    name, _, word = suite.partition(" ")
    programs, command = SUITES[name]
    return programs, command + (["-k", word] if word else [])


def pattern(old):
    return re.compile(r"\s+".join(map(re.escape, old.split())))


def table_errors(mutants):
    for file, suite, old, _, why in mutants:
        with open(os.path.join(ROOT, file), encoding="utf-8") as f:
            count = len(pattern(old).findall(f.read()))
        if count != 1:
            yield f"{file}: '{old}' is there {count} times"
        if (suite == "equivalent") != bool(why) or suite.split()[0] not in (*SUITES, "equivalent"):
            yield f"{file}: '{old}': no suite '{suite}', or an equivalent patch without a reason"


class Copy:
    """The sources in a folder of their own, with programs built from them."""

    def __init__(self, folder):
        self.folder, self.clean = folder, {}
        git = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(git, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
        for path in filter(None, listed):
            source, target = os.path.join(ROOT, path), os.path.join(folder, path)
            if os.path.isfile(source) and not os.path.islink(source):
                os.makedirs(os.path.dirname(target), exist_ok=True)
                shutil.copy2(source, target)
        os.makedirs(folder + "/build", exist_ok=True)

    def path(self, name):
        return os.path.join(self.folder, name)

    def compile(self, program):
        """None, or what the compiler says; with every file that went into it."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(program))
        words = [os.environ.get("CXX", "g++"), "-std=c++17", "-I.", "-O1", "-w", "-pthread", "-fopenmp",
                 "-MMD", "-MF", program + ".d", *PROGRAMS[program].split(), "-o", program]
        done = subprocess.run(words, cwd=self.folder, capture_output=True, text=True)
        return done.stderr or "failed" if done.returncode else None

    def build_clean(self, program):
        """Once, kept beside the program for when a patch is taken back."""
        if program in self.clean:
            return
        error = self.compile(program)
        if error:
            sys.exit(f"error: {program} does not compile:\n{error}")
        with open(self.path(program + ".d"), encoding="utf-8") as f:
            words = f.read().replace("\\\n", " ").split()[1:]
        self.clean[program] = {os.path.normpath(word) for word in words}
        shutil.copy2(self.path(program), self.path(program + ".clean"))

    def run(self, suite):
        """(what happened: "passed" or how it failed, a line about it); ends at the first failure."""
        env = dict(os.environ, TMPDIR=self.path("build"), OMP_WAIT_POLICY="passive",
                   PYTHONDONTWRITEBYTECODE="1")

        def limits():                   # a patch may ask for all memory or fill the disk
            signal.signal(signal.SIGINT, signal.SIG_DFL)        # which a shell's background jobs ignore
            # not RLIMIT_AS, under which the trainer ends in another way
            resource.setrlimit(resource.RLIMIT_DATA, (16 << 30, 16 << 30))
            resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 30, resource.RLIM_INFINITY))
        child = subprocess.Popen(suite_command(suite)[1], cwd=self.folder, env=env, stdin=subprocess.DEVNULL,
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                 errors="replace", start_new_session=True, preexec_fn=limits)
        too_late = threading.Timer(LIMIT_S, os.killpg, (child.pid, signal.SIGKILL))
        too_late.start()
        line = failure = ""
        for line in child.stdout:
            if line.startswith("FAIL"):
                failure = line
                break
        child.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            if failure:
                os.killpg(child.pid, signal.SIGKILL)
        code = child.wait()
        hung = not too_late.is_alive()
        too_late.cancel()
        self.kill_leftovers()
        if failure or hung:
            return "failed", failure.rstrip() or f"no end after {LIMIT_S} s"
        closing = re.fullmatch(r"(\d+) passed, 0 failed, (\d+) skipped\n?", line)
        if code == 0 and closing and int(closing[1]) > 0:
            return "passed", line.rstrip()
        return "failed", f"exit code {code}: {line.rstrip()}"

    def kill_leftovers(self):
        """Ranks of a job whose launcher was made to forget them have a process group of their own."""
        for path in glob.glob("/proc/[0-9]*/exe"):
            with contextlib.suppress(OSError):
                if os.readlink(path).startswith(self.folder + "/"):
                    os.kill(int(path.split("/")[2]), signal.SIGKILL)

    def run_clean(self, suite):
        for program in suite_command(suite)[0]:
            self.build_clean(program)
        return self.run(suite)

    def try_mutant(self, mutant):
        """(noticed, a line about it)"""
        file, suite, old, new, _ = mutant
        programs = suite_command(suite)[0]
        for program in programs:
            self.build_clean(program)
        with open(self.path(file), encoding="utf-8") as f:
            text = f.read()
        patched = [program for program in programs if file in self.clean[program]]
        if not patched and not file.endswith(".py"):        # a tool in Python: nothing to build
            return False, f"'{suite}' runs no program with {file}"
        try:
            with open(self.path(file), "w", encoding="utf-8") as f:
                f.write(pattern(old).sub(lambda _: new, text))
            for program in patched:
                error = self.compile(program)
                if error:
                    return False, "does not compile: " + error.strip().split("\n")[0]
            how, line = self.run(suite)
            return how != "passed", f"{how}: {line}"
        finally:
            with open(self.path(file), "w", encoding="utf-8") as f:
                f.write(text)
            for program in patched:     # a new file: one that was just killed may still run the old one
                shutil.copy2(self.path(program + ".clean"), self.path(program + ".new"))
                os.replace(self.path(program + ".new"), self.path(program))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-k", default="", help="only patches with this in their file, suite or text")
    parser.add_argument("-j", type=int, default=min(2, os.cpu_count() or 1), help="patches at a time")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many, to go on where a run ended")
    parser.add_argument("--check", action="store_true", help="only look whether the table fits the sources")
    args = parser.parse_args()
    table = read_table()
    equivalent = [m for m in table if m[1] == "equivalent"]
    mutants = [m for m in table if m[1] != "equivalent" and args.k in " ".join(m)][args.skip:]
    errors = list(table_errors(table))
    for error in errors:
        print("FAIL the table: " + error)
    if errors or args.check or not mutants:
        print(f"{0 if errors else len(mutants)} passed, {len(errors)} failed, {len(equivalent)} skipped")
        return 1 if errors or not mutants else 0

    folder = tempfile.mkdtemp(prefix="mutants_")
    copies = [Copy(os.path.join(folder, str(i))) for i in range(args.j)]
    lock, counts = threading.Lock(), {True: 0, False: 0}

    def with_copy(work, *arguments):
        with lock:
            copy = copies.pop()
        try:
            return work(copy, *arguments)
        finally:
            with lock:
                copies.append(copy)

    def one(mutant):
        began = time.monotonic()
        noticed, line = with_copy(Copy.try_mutant, mutant)
        file, suite, old, new, _ = mutant
        with lock:
            counts[noticed] += 1
            word = "noticed" if noticed else "FAIL not noticed"
            print(f"{word} by {suite} ({time.monotonic() - began:.1f} s): {file}: {old}  ->  {new}\n"
                  f"    {line[:160]}", flush=True)
    try:
        with concurrent.futures.ThreadPoolExecutor(args.j) as pool:
            suites = sorted({m[1] for m in mutants})            # a suite that fails anyway notices nothing
            outcomes = pool.map(lambda suite: with_copy(Copy.run_clean, suite), suites)
            for suite, (how, line) in zip(suites, outcomes):
                waiting = [m for m in mutants if m[1] == suite]
                if how != "passed":
                    print(f"FAIL {suite} fails without a patch: {len(waiting)} wait for it. {line}",
                          flush=True)
                    counts[False] += len(waiting)
                    mutants = [m for m in mutants if m[1] != suite]
            list(pool.map(one, mutants))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for file, _, old, new, why in equivalent:
        print(f"changes nothing: {file}: {old}  ->  {new}: {why}")
    print(f"{counts[True]} passed, {counts[False]} failed, {len(equivalent)} skipped")
    return 1 if counts[False] or not counts[True] else 0


if __name__ == "__main__":
    sys.exit(main())
