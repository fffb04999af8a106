"""What tests of the training program share: runs of it, and files by a few lines of our own.

    from trainer import refused, run_ok
    USUAL = {"-e": "L2,NH2,C32,T16,V256", ...}  # the module's usual small flags, if not those below
    result = run_ok({"-x": 5, "-o": "folder"})  # those and these; result.losses()
    refused({"-b": 0}, "-b", "0")               # ends with 1 and one sentence with these words

Standard library and pytest. Bit-equality is asked for in every build; comparisons of different arithmetic are
as tight as the build's precision allows.
"""
import functools
import glob
import hashlib
import json
import math
import os
import random
import re
import shlex
import shutil
import struct
import subprocess
import time

import pytest

from checks import read, write

SHARD_MAGIC, EVAL_MAGIC, MODEL_MAGIC = 20240520, 20240522, 20240326
B, T, V, C, L = 4, 32, 256, 32, 2
TINY = f"L{L},NH2,C{C},T{T},V{V}"
LIMIT_S = 300                           # no run here takes more than seconds; a hang must not hang the tests

# ---- asserts ----

def assert_close(got, want, tolerance, what):
    """Two lists of numbers, element by element; NaN is never close."""
    assert len(got) == len(want), f"{what}: how many values"
    worst = max((abs(a - b) if a == a and b == b else math.inf for a, b in zip(got, want)), default=math.inf)
    assert worst <= tolerance, f"{what}: differs by {worst:.3g}, allowed {tolerance:.3g}"


# ---- the program ----

class Result:
    def __init__(self, code, out, err, command):
        self.code, self.out, self.err, self.command = code, out, err, command

    def losses(self):
        return [float(x) for x in re.findall(r"^step \d+/\d+ \| loss (\S+)", self.out, re.M)]

    def val_losses(self):
        return [float(x) for x in re.findall(r"^val loss (\S+)", self.out, re.M)]

    def source_losses(self):
        """(loss, name) of each source of a mixture, of one validation after the other."""
        found = re.findall(r"^    loss (\S+)(?: \| ppl \S+)?(?: \| bpb \S+)? \| (.*)$", self.out, re.M)
        return [(float(loss), name) for loss, name in found]

    def skips(self):
        """Steps whose update was skipped, since the gradient is not finite."""
        return [int(step) for step in re.findall(r"^step (\d+): the gradient is not finite", self.err, re.M)]

    def planned(self):
        """MiB that the start-up line promises."""
        number, unit = re.search(r"^memory: (\S+) ([MG]iB) (?:in all|on each rank)$", self.out, re.M).groups()
        return float(number) * (1024 if unit == "GiB" else 1)

    def samples(self):
        """Texts after `sample N at step S:`, prompt included. Of -x 0: stdout, which lacks the prompt."""
        given = dict(zip(self.command[1::2], self.command[2::2]))
        if given.get("-x") == "0" and "--prompt" in given:
            prompt = given["--prompt"].encode().decode("latin-1")
            return [prompt + text for text in self.out[:-1].split("\n---\n")]
        return re.findall(r"^sample \d+ at step \d+:\n(.*?)\n---$", self.out, re.M | re.S)


JOB_VARIABLE = re.compile("SLURM_|OMPI_|PMI|PRTE_|MASTER_|TORCHELASTIC_|LLMC_|(LOCAL_)?(RANK|WORLD_SIZE)$")
USUAL = {"-e": TINY, "-i": "train.bin", "-j": "val.bin", "-b": B, "-x": 5, "-v": 0, "-s": 0, "-f": 0}


ALONE = dict.fromkeys(USUAL)            # none of the usual flags


def flags_of(line):
    """{flag: value} of a line of a table, FLAG NONE: without it."""
    words = [None if word == "NONE" else word for word in shlex.split(line)]
    return dict(zip(words[::2], words[1::2]))


class Program:
    """What conftest.py has set for the test that runs; usual: the module's USUAL, or the one above."""
    path = precision = device = None
    slow, usual = False, USUAL

    @staticmethod
    def command(flags):
        words = [Program.path]                          # what is no flag, such as `chat RUN`, comes first
        for flag, value in sorted({**Program.usual, **flags}.items(), key=lambda pair: pair[0][:1] == "-"):
            if value is not None:
                words += [flag, str(value)]
        return words

    @staticmethod
    def environment(threads, **more):
        # what starts jobs (SLURM, torchrun, mpirun) may have started these tests: no run here is a part of it
        env = {name: value for name, value in os.environ.items() if not JOB_VARIABLE.match(name)}
        env["LC_ALL"] = "C"
        env["OMP_NUM_THREADS"] = env["OPENBLAS_NUM_THREADS"] = str(threads)
        env.update((name, str(value)) for name, value in more.items())
        return env


def run(flags=None, extra=(), threads=1, env=None, stdout=subprocess.PIPE, **popen):
    """Runs with the usual small flags; `flags` adds to them or, with None, takes one away."""
    words = Program.command(flags or {}) + list(extra)
    try:
        p = subprocess.run(words, stdout=stdout, stderr=subprocess.PIPE, timeout=LIMIT_S,
                           env=Program.environment(threads, **(env or {})), **popen)
    except subprocess.TimeoutExpired:
        return Result(None, "", f"no end after {LIMIT_S} s", words)
    return Result(p.returncode, (p.stdout or b"").decode("latin-1"), p.stderr.decode("latin-1"), words)


def run_ok(flags=None, **kwargs):
    return check_ran(run(flags, **kwargs))


def without_scaling(err):
    """FP16's loss scale starts at 2^16 and is halved by updates that are skipped, a few: no complaint."""
    rest, skips = re.subn(r"^step \d+: the gradient is not finite .*\n", "", err, flags=re.M)
    return rest if Program.precision == "FP16" and skips <= 16 else err


def check_ran(result):
    # a note is no complaint, either: it stands on stderr because stdout is the text's
    said = without_scaling(result.err).splitlines()
    ran = result.code == 0 and all(line.startswith("note: ") for line in said)
    assert ran, f"{' '.join(result.command)}\nexit code {result.code}: {result.err.strip()}"
    return result


@functools.cache
def device_of(path):
    """(device, precision) as the program names them."""
    Program.path, Program.usual = path, USUAL
    result = run({"-x": 0})
    match = re.search(r"^device: (.*), precision (\w+)$", result.out, re.M)
    assert match, f"{path} -x 0 does not print its device and precision: {result.err.strip()}"
    return match.groups()


def on_cpu():
    return "CPU" in Program.device


def exact():
    return Program.precision == "FP32"


def need_fp8():
    """FP8 is the CPU build's and, of the CUDA builds, BF16's."""
    if not on_cpu() and Program.precision != "BF16":
        pytest.skip("the BF16 build's")


def tolerance(fp32, low):
    return fp32 if exact() else low


# ---- files, written and read by a few lines of our own ----

def write_shard(path, tokens, magic=SHARD_MAGIC, version=1, count=None, width="H"):
    header = struct.pack("<256i", magic, version, len(tokens) if count is None else count, *[0] * 253)
    return write(path, header + struct.pack(f"<{len(tokens)}{width}", *tokens))


def write_wide_shard(path, tokens):
    """Tokens of 32 bits, for vocabularies above 65,536."""
    return write_shard(path, tokens, 20240801, 7, width="I")


def read_shard(path):
    body = read(path)[1024:]
    return struct.unpack(f"<{len(body) // 2}H", body)


def write_questions(path, questions, labels, tokenizer=0, context_last=0):
    """questions: [(context, completions)]"""
    body, longest = [], 0
    for i, ((context, completions), label) in enumerate(zip(questions, labels)):
        words = [65535, 0, i, label, len(completions)]
        for tokens in (context, *completions):
            words += [len(tokens), *tokens]
        words[1] = 2 * len(words)
        longest = max(longest, words[1])
        body.append(struct.pack(f"<{len(words)}H", *words))
    header = struct.pack("<256i", EVAL_MAGIC, 1, len(body), longest, tokenizer, context_last, *[0] * 250)
    return write(path, header + b"".join(body))


def sentences(seed, length):
    """Bytes of made-up words in a made-up grammar: a model of bytes learns from them within a few steps."""
    rng = random.Random(seed)
    words = ["ba", "dum", "tak", "lorin", "mek", "sa", "vou", "rik", "teno", "pald"]
    ends = ["  ", " ", " ", ". ", ", "]
    text = "".join(rng.choice(words) + rng.choice(ends) for _ in range(length // 3 + 8))
    return text.encode()[:length]


def without_checksum(data):
    """A model file's bytes as other programs write them: what a test changes in them is then no damage."""
    return bytearray(data[:1016]) + bytes(8) + data[1024:]


def nan_model(path):
    """A copy of a model whose losses are NaN, since lnfb's last number is."""
    data = without_checksum(read(path))
    data[-4:] = b"\0\0\xc0\x7f"                # in FP32, and in BF16
    return write("nan.bin", data)


def model_path(folder):
    found = glob.glob(folder + "/model_*.bin")
    assert len(found) == 1, f"{len(found)} models in {folder}, expected 1"
    return found[0]


LOG_LINE = re.compile(r"s:(\d+) (?:trl:(\S+) lr:(\S+) norm:(\S+)|tel:(\S+)|eval:(\S+))")


def log_lines(folder, kind="trl"):
    lines = read(folder + "/main.log").decode("ascii").splitlines(True)
    return [line for line in lines if f" {kind}:" in line]


def log_columns(folder):
    """{"step": [...], "trl": [...], "lr": [...], "norm": [...]} of the training lines."""
    rows = [LOG_LINE.fullmatch(line.strip()).groups()[:4] for line in log_lines(folder)]
    return {name: [float(row[i]) for row in rows] for i, name in enumerate(("step", "trl", "lr", "norm"))}


def metrics(folder):
    """The records of metrics.jsonl."""
    def no_constant(word):              # Python's reader would take NaN, which is not JSON
        raise ValueError(word)
    lines = read(folder + "/metrics.jsonl").decode("ascii").splitlines()
    return [json.loads(line, parse_constant=no_constant) for line in lines]


def logged_steps(folder):
    return [record for record in metrics(folder) if "loss" in record]


def settings_of(folder):
    return json.loads(read(folder + "/run.json"))["settings"]


HASHES = {}                             # {what the disk says of a file: hash}, if that was old


def hash_of(path):
    """Of its bytes. Whoever writes to it later gives it another ctime, if this one is older than a tick."""
    if not os.path.isfile(path):
        return "special"
    now, said = time.time(), os.stat(path)
    key = (said.st_dev, said.st_ino, said.st_size, said.st_ctime_ns)
    found = HASHES.get(key) or hashlib.sha256(read(path)).hexdigest()
    if said.st_ctime < now - 0.1:
        HASHES[key] = found
    return found


def snapshot(folder="."):
    """Every file under the folder, with its bytes' hash, and every folder."""
    state = {}
    for parent, folders, files in os.walk(folder):
        state.update((os.path.join(parent, name), None) for name in folders)
        for name in files:
            path = os.path.join(parent, name)
            state[path] = hash_of(path)
    return state


def refused(flags, *said, extra=()):
    """Exit code 1, one sentence with the value, nothing on disk changed."""
    before = snapshot()
    result = run({"-o": "refused", **flags}, extra=extra)
    changed = sorted(path for path, _ in set(snapshot().items()) ^ set(before.items()))
    shutil.rmtree("refused", ignore_errors=True)
    lines, command = result.err.splitlines(), " ".join(result.command)
    assert result.code == 1, f"exit code {result.code}: {result.err}{command}"
    once = [line.startswith("error: ") for line in lines] == [True] + [False] * (len(lines) - 1)
    assert once and len(lines) <= 3, f"not one sentence on stderr: {result.err}{command}"
    lacking = [text for text in map(str, said) if text not in result.err]
    assert not lacking, f"stderr lacks {lacking}: {result.err}{command}"
    assert not changed, f"the disk changed: {changed}\n{command}"
    return result
