"""Every tool's outputs where something is in their place: what is there stays as it was. And what writes
them, dev/outputs.py.
"""
import contextlib
import fcntl
import os
import shlex
import shutil
import socket
import stat
import struct
import sys
import types

import pytest

from checks import ROOT, has_module, read, run_program, write
from forked import Forked
from trainer import Program
from twins import formats, wide_model

sys.path[:0] = [os.path.join(ROOT, "dev", folder) for folder in ("", "data")]
import get                                          # noqa: E402
import hf                                           # noqa: E402
import plot_log                                     # noqa: E402
import tensorboard_log                              # noqa: E402
from outputs import shown, whole_file               # noqa: E402

pytestmark = pytest.mark.cpu_only
LLAMA2C = {"C": 16, "F": 8, "L": 1, "NH": 1, "NKV": 1, "V": 8, "T": 4}


class Recorder:
    """In the place of TensorBoard's writer."""
    def __init__(self, folder):
        write(folder + "/events.out.tfevents.1", "")
        self.add_scalar = lambda *words, **more: None
        self.flush = self.close = lambda: None


def gguf_main():
    if not has_module("gguf"):
        pytest.skip("no gguf: scripts/setup.sh tests")
    return hf.main


def plot_main():
    pytest.importorskip("matplotlib.figure")        # once, before the forks
    return plot_log.main


def program(path):
    """What is not built is skipped."""
    def get_it():
        if not os.access(os.path.join(ROOT, path), os.X_OK):
            pytest.skip(f"no {path}")
        return os.path.join(ROOT, path)
    return get_it


def write_shard():
    try:
        formats.write_shard("out", [1, 2])
    except OSError as e:                            # as its users say it
        sys.exit(f"error: '{e.filename}': {e.strerror}")


# name: (a function that gives its main, or its path; words, in which IN is where the inputs are; the output)
FILES = {
    "hf.py gguf": (gguf_main, "gguf IN/model.bin out", "out"),
    "hf.py llama2c": (lambda: hf.main, "llama2c IN/llama2c.bin out", "out"),
    "plot_log.py": (plot_main, "IN/run -o out", "out"),
    "formats.py": (lambda: write_shard, "", "out"),
    "stories": (program("build/stories"), "-o out", "out"),
    "tokenize": (program("build/tokenize"), "IN/text.txt --bytes 1 -o out", "out_train.bin"),
    "tokenize, validation": (program("build/tokenize"), "IN/text.txt --bytes 1 -o out", "out_val.bin"),
    "tokenize, shards": (program("build/tokenize"), "IN/text.txt --bytes 1 --shard-tokens 99 -o out",
                         "out_train_000000.bin"),
    "tokenize, vocabulary": (program("build/tokenize"), "--write-vocab out", "out"),
}
FOLDERS = {
    "hf.py import": (lambda: hf.main, "import IN/hf --out out", "out"),
    "hf.py export": (lambda: hf.main, "export IN/model.bin out", "out"),
    "get.py files": (lambda: get.main, "files --from IN/text.txt --bytes --out out", "out"),
    "get.py tokens": (lambda: get.main, "tokens --from IN/tokens.bin --out out", "out"),
    "tensorboard_log.py": (lambda: tensorboard_log.main, "run", "run/tensorboard"),
    "trainer": (lambda: Program.path, "-e IN/model.bin -i IN/train.bin -t 4 -b 1 -x 1 -v 0 -s 0 -o out",
                "out"),
}
INSIDE = {          # what tools write into such a folder
    "get.py files": (lambda: get.main, "files --from IN/text.txt --bytes --out out", "out/dataset.json"),
    "get.py tokens": (lambda: get.main, "tokens --from IN/tokens.bin --out out", "out/out_train_000001.bin"),
}


def add_device(path):
    """/dev/null's like. Who may make none gets a socket, which is no regular file, either."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(path)


IN_THE_WAY = {
    "device": add_device, "FIFO": os.mkfifo,
    "link": lambda path: os.symlink(os.path.abspath("theirs"), path),
    "loose link": lambda path: os.symlink("nowhere", path)}
PARTS = {"file": lambda path: write(path, "theirs"), "link": IN_THE_WAY["link"], "FIFO": os.mkfifo}


def what_is(folder="."):
    """{path: (kind and rights, number, where a link leads, bytes)} of all that is there."""
    state = {}
    for parent, folders, names in os.walk(folder):
        for path in (os.path.join(parent, name) for name in folders + names):
            found = os.lstat(path)
            state[path] = (found.st_mode, found.st_ino, os.readlink(path) if os.path.islink(path) else "",
                           read(path) if stat.S_ISREG(found.st_mode) else b"")
    return state


def run_tool(tool, inputs):
    main, words = tool[0](), shlex.split(tool[1].replace("IN", inputs))
    if isinstance(main, str):
        code, out, err = run_program([main, *words])
    else:
        code, out, err = Forked(main, ["tool", *words]).end()
    print(out)
    return code, err


@pytest.fixture(name="inputs")
def inputs_of_all(tmp_path, monkeypatch):
    """Where they are; the test starts in a new folder."""
    here = os.getcwd()
    if not os.path.exists("model.bin"):
        wide_model("model.bin", "L1,NH1,C16,T8,V256")
        assert Forked(hf.main, ["hf.py", "export", "model.bin", "hf"]).end()[0] == 0
        write("text.txt", "A text of some words. " * 99)
        write("tokens.bin", struct.pack("<99H", *range(99)))
        write("run/main.log", "s:0 tel:3.0\ns:0 trl:3.0\n")
        write("run/metrics.jsonl", '{"step": 1, "loss": 3.0}\n')
        write("llama2c.bin", struct.pack("<7i", *LLAMA2C.values()) + bytes(4 * sum(
            (8 * 16, 16, 4 * 16 * 16, 16, 3 * 8 * 16, 16, 2 * 4 * 8))))
    module = types.SimpleNamespace(Writer=Recorder)
    monkeypatch.setitem(sys.modules, "tensorboard.summary", module)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(here + "/run", "run")
    write("theirs", "theirs")
    return here


@pytest.mark.parametrize("way", IN_THE_WAY)
@pytest.mark.parametrize("tool", [*FILES.values(), *FOLDERS.values()], ids=[*FILES, *FOLDERS])
def test_in_the_way(tool, way, inputs):
    """Refused with a sentence, and nothing has changed."""
    IN_THE_WAY[way](tool[2])
    before = what_is()
    code, err = run_tool(tool, inputs)
    lines = err.splitlines()
    assert code == 1 and 1 <= len(lines) <= 2 and lines[0].startswith("error: "), err
    assert [line for line in lines[1:] if not line.startswith("hint: ")] == [] and tool[2] in err
    assert what_is() == before


@pytest.mark.parametrize("name", ["main.log", "metrics.jsonl", "run.json", "model_00000001.bin"])
def test_in_a_run(name, inputs):
    """The files of the trainer's folder; a model's name it meets at the end."""
    for way, put in IN_THE_WAY.items():
        os.mkdir("out")
        put("out/" + name)
        before = what_is()
        code, err = run_tool(FOLDERS["trainer"], inputs)
        after = what_is()
        assert code == 1 and "regular file" in err, way
        assert {path: after[path] for path in before} == before, way
        shutil.rmtree("out")


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("tool", [*FILES.values(), *FOLDERS.values(), *INSIDE.values()],
                         ids=[*FILES, *FOLDERS, *(name + ", inside" for name in INSIDE)])
def test_part_of_others(tool, kind, inputs):
    """OUT.part is not ours."""
    os.makedirs(os.path.dirname(tool[2]) or ".", exist_ok=True)
    PARTS[kind](tool[2] + ".part")
    before = what_is()
    code, err = run_tool(tool, inputs)
    assert code == 0 and os.path.exists(tool[2]), err
    after = what_is()
    assert {path: after.get(path) for path in before} == before
    assert [path for path in after if path.endswith((".part", ".tmp"))] == ["./" + tool[2] + ".part"]


def test_beside_event_files(inputs):
    """What is in a folder beside TensorBoard's files is not ours."""
    write("run/tensorboard/notes", "mine")
    write("run/tensorboard/events.out.tfevents.0", "old")
    assert run_tool(FOLDERS["tensorboard_log.py"], inputs)[0] == 0
    assert sorted(os.listdir("run/tensorboard")) == ["events.out.tfevents.1", "notes"]


# ---- dev/outputs.py ----

def test_whole_file(own_folder):
    """It has the rights of a new file. An error leaves what was there; what a kill left behind goes."""
    for path in ("a", "sub/a"):
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        others = [path + end for end in (".part", ".1.part", ".1.2.part.x", ".bin.1.2.part")]
        for name in (path + ".1.2.part", path + ".3.4.part", *others):
            write(name, "")
        with open(path + ".3.4.part", "rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)                # somebody writes it
            with whole_file(path) as f:
                f.write(b"new")
        assert sorted(others + [path, path + ".3.4.part"]) == sorted(
            os.path.join(os.path.dirname(path), name) for name in os.listdir(os.path.dirname(path) or ".")
            if name != "sub")
        assert read(path) == b"new" and os.stat(path).st_mode == os.stat(write("usual", "")).st_mode
        os.remove("usual")
        os.remove(path + ".3.4.part")
    before = what_is()
    for error in (OSError, KeyboardInterrupt, SystemExit):
        with contextlib.suppress(error), whole_file("a") as f:
            f.write(b"half")
            raise error
        assert what_is() == before
    for path in ("none/a", "a/a", "sub"):
        with pytest.raises(OSError) as said, whole_file(path):
            pass
        assert said.value.filename in (path, os.path.dirname(path)) and what_is() == before


def test_shown():
    assert shown("Aé 猫") == "Aé 猫"
    assert shown("a\x1b[31m\n\t\x7f\x9b\udcff") == r"a\x1b[31m\n\t\x7f\x9b\udcff"
    assert shown("a\x1b[31m\n\t", "\n\t") == "a\\x1b[31m\n\t"
