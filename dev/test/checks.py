"""What all tests share.

    from checks import ROOT, has_module, read, run_program, write
"""
import importlib.util
import os
import re
import shutil
import subprocess

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
NAMES = os.path.join(ROOT, "dev/test/names.txt")
# before a command: it ends with this process, even if that is killed
LEASH = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []


def write(path, data):
    """Text or bytes, and the folder; what begins as scripts do is executable. Returns the path."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    data = data.encode() if isinstance(data, str) else data
    with open(path, "wb") as f:
        f.write(data)
    os.chmod(path, 0o755 if data.startswith(b"#!") else 0o644)
    return path


def read(path):
    with open(path, "rb") as f:
        return f.read()


def run_program(command, **env):
    """(exit code, stdout, stderr) of a program, or of a line of a shell; env: other settings, None: lacks."""
    env = {name: value for name, value in {**os.environ, **env}.items() if value is not None}
    p = subprocess.run(command, shell=isinstance(command, str), stdin=subprocess.DEVNULL, capture_output=True,
                       text=True, env=env, timeout=600, check=False)
    return p.returncode, p.stdout, p.stderr


def counts_in(text):
    """(passed, failed, skipped) of its last line; None if that is no closing line."""
    closing = re.search(r"^(\d+) passed, (\d+) failed, (\d+) skipped\n*\Z", text, re.M)
    return closing and tuple(map(int, closing.groups()))


def known_names():
    """{module: its tests, program: the fewest checks that it must count}, as names.txt has them."""
    with open(NAMES, encoding="utf-8") as f:
        return dict(line.strip().split(": ") for line in f if line[0] != "#")


def row_of(program):
    """Builds of one test count alike, as do a target's seeds and its fuzzing."""
    return re.sub("^(asan|host|tsan(?! comm)) ", "", program).replace("fuzz ", "seeds ")


def fewest_checks(program):
    """Of one of test_programs.py."""
    return int(known_names().get(row_of(program), 1))


def has_module(name):
    return importlib.util.find_spec(name) is not None
