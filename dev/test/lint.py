#!/usr/bin/env python3
"""Rules of the house that a machine can check, over all files that git knows or would add.

    make lint

A kernel launch names its stream (the fourth argument of <<<...>>>): work on the default stream would wait for
everything else, or run before what it needs. Lines have at most 110 columns and no tabs (Makefile recipes
need theirs), no blanks at their end, and no path of somebody's machine. A header of llmc/ includes only what
llmc/README.md lists beside or below its own room, and not what errors.h gives to all that include it.

README.md and docs/ have at most 110 columns outside tables and lines with a link, README.md 200 lines, and
their relative links, and dev/bench/NOTES.md's, lead to a file, or to a heading of one.

pyflakes reads the Python, too: a name that nothing defines, an import that nothing uses. It cannot see
through `from X import *` and complains of it: names are imported one by one.
"""
import ast
import os
import re
import subprocess
import sys

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from venv_python import take_the_venv               # noqa: E402

try:
    from pyflakes.checker import Checker
except ImportError:
    take_the_venv()
    Checker = None

MAX_COLUMNS = 110
CODE = (".cu", ".cuh", ".h", ".cpp", ".py", ".sh")
PROSE = (".md", ".json", ".txt")             # long lines are fine there, but in README.md and docs/
README_LINES = 200
NOTES = "dev/bench/NOTES.md"
MACHINE_PATH = re.compile(r"(?<![\w.])/(home|root|work|farm|mnt|Users)/")

ROOMS = ("run", "files", "model", "ops", "comm", "data", "")        # of llmc/, as in its README.md
SYSTEM = re.compile(r"^#include <(.*?)>", re.M)
BASICS = re.compile(r'^#include "(\.\./)?(errors|checked_files|atomic_files)\.h"', re.M)


def room_of(header):
    """A header's place in ROOMS; None: it is not in llmc/."""
    found = re.fullmatch(r"llmc/(?:(\w+)/)?\w+\.h", header)
    return ROOMS.index(found[1] or "") if found else None


def launch_arguments(text, start):
    """Number of arguments between <<< at start and its >>>; commas inside brackets do not separate."""
    depth, count = 0, 1
    for i in range(start, len(text)):
        if depth == 0 and text.startswith(">>>", i):
            return count
        depth += text[i] in "([{"
        depth -= text[i] in ")]}"
        count += text[i] == "," and depth == 0
    return count


def look_at_names(text):
    """What pyflakes has to say of a Python file."""
    try:
        return [(m.lineno, m.message % m.message_args) for m in Checker(ast.parse(text)).messages]
    except SyntaxError as error:
        return [(error.lineno, error.msg)]


def anchors(text):
    """What a link to a heading is called: in small letters, punctuation left out, blanks as dashes."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def look_at_docs(path, text):
    lines = text.split("\n")
    if path == "README.md" and len(lines) > README_LINES + 1:
        yield README_LINES + 1, f"{len(lines) - 1} lines, at most {README_LINES}"
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_COLUMNS and not line.startswith("|") and "](" not in line and path != NOTES:
            yield number, f"{len(line)} columns, at most {MAX_COLUMNS}"
        for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)", line):
            file = os.path.normpath(os.path.join(os.path.dirname(path), target)) if target else path
            if not os.path.exists(file):
                yield number, f"there is no {file}"
            elif anchor:
                with open(file, encoding="utf-8") as f:
                    if anchor not in anchors(f.read()):
                        yield number, f"{file} has no heading #{anchor}"


def check(path, text):
    code = path.endswith(CODE) or path == "Makefile"
    for number, line in enumerate(text.split("\n"), 1):
        if code and len(line) > MAX_COLUMNS:
            yield number, f"{len(line)} columns, at most {MAX_COLUMNS}"
        if code and path != "Makefile" and "\t" in line:
            yield number, "a tab"
        if code and line != line.rstrip():
            yield number, "blanks at the end of the line"
        if MACHINE_PATH.search(line):
            yield number, "a path of one machine: " + MACHINE_PATH.search(line).group()
    if path.endswith((".cu", ".cuh")):
        for launch in re.finditer(r"<<<", text):
            if launch_arguments(text, launch.end()) < 4:
                yield text.count("\n", 0, launch.start()) + 1, "a kernel launch without a stream"
    for include in re.finditer(r'^#include "(.*)"', text, re.M) if room_of(path) is not None else ():
        room = room_of(os.path.normpath(os.path.join(os.path.dirname(path), include[1])))
        if room is not None and room < room_of(path):
            yield text.count("\n", 0, include.start()) + 1, f"{include[1]} is in a room above this header's"
    if room_of(path) is not None and BASICS.search(text):
        with open("llmc/errors.h", encoding="utf-8") as file:
            basics = SYSTEM.findall(file.read())
        for include in SYSTEM.finditer(text):
            if include[1] in basics:
                yield text.count("\n", 0, include.start()) + 1, "errors.h includes this for all"
    if path.endswith(".py") and Checker:
        yield from look_at_names(text)
    if path in ("README.md", NOTES) or path.startswith("docs/"):
        yield from look_at_docs(path, text)


def main():
    try:
        listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                                check=True, capture_output=True, text=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        print("SKIP: git does not know this folder\n0 passed, 0 failed, 1 skipped")
        return
    passed = failed = 0
    for path in sorted(set(listed)):
        if not (path.endswith(CODE + PROSE) or path in ("Makefile", ".ci/run")):
            continue
        try:
            with open(path, encoding="utf-8") as f:
                problems = list(check(path, f.read()))
        except FileNotFoundError:               # removed, not committed yet
            continue
        for number, problem in problems:
            print(f"FAIL {path}:{number}: {problem}")
        passed += not problems
        failed += bool(problems)
    if not Checker:
        print("SKIP: no pyflakes, so nobody looked for names in Python that nothing defines\n"
              "hint: pip install -r dev/requirements.txt")
    print(f"{passed} passed, {failed} failed, {int(not Checker)} skipped")
    sys.exit(1 if failed or not passed else 0)


if __name__ == "__main__":
    main()
