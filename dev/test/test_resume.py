"""Runs that are stopped, killed, damaged and resumed: in the end they are the run that never stopped.

    python3 dev/test/test_resume.py ./train_gpt2cpu                 # two cores: about a minute
    python3 dev/test/test_resume.py ./train_gpt2cpu --kills 200     # more deaths
    python3 dev/test/test_resume.py build/check/train_gpt2.BF16     # on a GPU
    python3 dev/test/test_resume.py ./train_gpt2cpu -k damage       # only tests whose name contains a word

The judge is the same command, never disturbed: main.log and the last model must be equal to the byte, and so
must each tensor of the last state and what it says of the run; it is read here by a few lines of our own. A
step takes a few milliseconds, so where a signal meets a run is chance: any moment must do.
"""
import contextlib
import functools
import glob
import json
import os
import random
import re
import resource
import shlex
import shutil
import signal
import struct
import subprocess
import tempfile
import time

import pytest

from test_ranks import UNREAD, enough, most_ranks, named, on_cpu, session_processes, side_by_side
from checks import ROOT
from trainer import (LIMIT_S, Program, Result, check, check_equal, check_refused, log_columns,
                     model_path, no_room, param_sizes, read_bytes, run, run_ok, sentences, skip,
                     snapshot, without_scaling, write_bytes, write_shard)

T_ROWS = 16
SHAPE = f"L2,NH2,C32,T{T_ROWS},V256"
# 16 rows a step: 24 steps are 4.2 epochs of three small shards
USUAL = {"-e": SHAPE, "-i": "part_*.bin", "-j": "val.bin", "-b": 1, "-z": 16 * T_ROWS, "-x": 24,
         "-n": 5, "-v": 6, "-m": 7, "-s": 0, "-f": 0, "-l": "1e-2", "-c": 0.1}
ROWS = (37, 23, 31)
STOPPING = "stopping after the last complete step; Ctrl-C: at once, unsaved\n"

# On GPUs a start takes seconds, and signals, flags and files are those of the CPU program: cpu_only.


@functools.lru_cache(None)
def data():
    """Made once, for all tests."""
    for i, rows in enumerate(ROWS):
        write_shard(f"part_{i}.bin", sentences(10 + i, rows * T_ROWS + 1 + i))


# ---- what is in a folder ----

HEADER, ROW = struct.Struct("<8sIIQQQ24x"), struct.Struct("<64s16s6Q")


def read_state(path):
    """({fact: text}, [(name, type, rows, cols, begin, count, data)])"""
    raw = read_bytes(path)
    magic, version, pieces, facts_bytes, file_bytes, _ = HEADER.unpack_from(raw)
    if (magic, version, file_bytes) != (b"GPT2STAT", 1, len(raw)):
        raise ValueError(f"{path}: {magic}, version {version}, {len(raw)} bytes for {file_bytes}")
    at = HEADER.size + pieces * ROW.size
    text = raw[at:at + facts_bytes].decode()
    facts = dict(line.split("=", 1) for line in text.splitlines())
    table, at = [], at + facts_bytes
    for i in range(pieces):
        name, kind, rows, cols, begin, count, offset, _ = ROW.unpack_from(raw, HEADER.size + i * ROW.size)
        size = count * (4 if kind.startswith(b"f32") else 2)
        if offset != at:
            raise ValueError(f"{path}: {name} at {offset}, not {at}")
        table.append((name.rstrip(b"\0").decode(), kind.rstrip(b"\0").decode(), rows, cols, begin, count,
                      raw[at:at + size]))
        at += size
    if at != len(raw):
        raise ValueError(f"{path}: {len(raw) - at} bytes too many")
    return facts, table


def xxh64(data):
    """As in llmc/checksum.h, from the same specification."""
    p1, p2, p3, p4, p5 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63,
                          0x27D4EB2F165667C5)
    mask = 2**64 - 1

    def turned(x, bits):
        return (x << bits | x >> 64 - bits) & mask

    def mixed(lane, word):
        return turned((lane + word * p2) & mask, 31) * p1 & mask
    at, sum_ = 0, p5
    if len(data) >= 32:
        lanes = [(p1 + p2) & mask, p2, 0, -p1 & mask]
        for at in range(0, len(data) - 31, 32):
            lanes = [mixed(lane, word) for lane, word in zip(lanes, struct.unpack_from("<4Q", data, at))]
        at += 32
        sum_ = sum(turned(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18))) & mask
        for lane in lanes:
            sum_ = ((sum_ ^ mixed(0, lane)) * p1 + p4) & mask
    sum_ = (sum_ + len(data)) & mask
    for size, form in ((8, "<Q"), (4, "<I"), (1, "<B")):
        while len(data) - at >= size:
            word = struct.unpack_from(form, data, at)[0]
            sum_ = ((turned(sum_ ^ mixed(0, word), 27) * p1 + p4) if size == 8 else
                    (turned(sum_ ^ word * p1 & mask, 23) * p2 + p3) if size == 4 else
                    turned(sum_ ^ word * p5 & mask, 11) * p1) & mask
            at += size
    for shift, prime in ((33, p2), (29, p3), (32, 1)):
        sum_ = (sum_ ^ sum_ >> shift) * prime & mask
    return sum_


def with_fact(path, name, value):
    """Another fact in a state, and a checksum that fits."""
    raw = read_bytes(path)
    head = list(HEADER.unpack_from(raw))
    begin = HEADER.size + head[2] * ROW.size
    facts, more = re.subn(rb"(?m)^%s=.*$" % re.escape(name.encode()), f"{name}={value}".encode(),
                          raw[begin:begin + head[3]])
    if more != 1:
        raise ValueError(f"{path} has the fact '{name}' {more} times")
    rows = [list(ROW.unpack_from(raw, HEADER.size + i * ROW.size)) for i in range(head[2])]
    for row in rows:
        row[6] += len(facts) - head[3]
    data = raw[begin + head[3]:]
    head[3:] = len(facts), head[4] + len(facts) - head[3], 0
    table = b"".join(ROW.pack(*row) for row in rows)
    head[5] = xxh64(HEADER.pack(*head) + table + facts)
    write_bytes(path, HEADER.pack(*head) + table + facts + data)


def mark(folder, step, names):
    """A DONE that names these files."""
    text = b""
    for name in names:
        raw = read_bytes(f"{folder}/{name}")
        at = 32 if name.startswith("state_") else 1016
        text += b"%s %d %016x\n" % (name.encode(), len(raw), struct.unpack_from("<Q", raw, at)[0])
    write_bytes(f"{folder}/DONE_{step:08d}", text + b"sum %016x\n" % xxh64(text))


def steps_of(folder):
    """Of the whole checkpoints, oldest first."""
    return sorted(int(name[5:]) for name in os.listdir(folder) if re.fullmatch(r"DONE_\d{8}", name))


def last_state(folder):
    """(step, facts, {tensor: (type, rows, cols, bytes)}) of the last checkpoint, whoever wrote which part."""
    step = steps_of(folder)[-1]
    paths = sorted(glob.glob(f"{folder}/state_{step:08d}_*.bin"))
    facts, tensors = read_state(paths[0])[0], {}
    for path in paths:
        for name, kind, rows, cols, begin, count, raw in read_state(path)[1]:
            width = len(raw) // count
            whole = tensors.setdefault(name, (kind, rows, cols, bytearray(b"?" * (rows * cols * width))))
            whole[3][begin * width:(begin + count) * width] = raw
    return step, facts, tensors


def metrics(folder):
    """Its lines but for times."""
    with open(folder + "/metrics.jsonl", encoding="ascii") as f:
        return [{key: x for key, x in json.loads(line).items() if key not in ("ms", "tokens_per_s")}
                for line in f]


# what a resumed run may say otherwise: times, and who computed it on how many ranks
OTHERWISE = re.compile("ranks|device|program|flag[.](output-dir|resume|gpus|check-ranks|"
                       "zero-stage|recompute|checkpoint-every|max-steps|keep|major-every)")


def unlike(folder, judge):
    """What differs between the ends of two runs."""
    if not os.path.isdir(folder) or not steps_of(folder):
        return ["it has no checkpoint"]
    (step, facts, tensors), (want_step, want_facts, want_tensors) = last_state(folder), last_state(judge)
    if step != want_step:
        return [f"its last checkpoint is of step {step}, not {want_step}"]
    found = [key for key in {**facts, **want_facts}
             if facts.get(key) != want_facts.get(key) and not OTHERWISE.fullmatch(key)]
    found += [name for name in {**tensors, **want_tensors} if tensors.get(name) != want_tensors.get(name)]
    if len(found) > 6:
        found[6:] = [f"{len(found) - 6} more"]
    if metrics(folder) != metrics(judge):
        found.append("metrics.jsonl")
    for name in ("main.log", f"model_{step:08d}.bin"):
        if read_bytes(f"{folder}/{name}") != read_bytes(f"{judge}/{name}"):
            found.append(name)
    return found


def left_over(folder):
    """Files that belong neither to the run nor to a whole checkpoint."""
    whole = {f"{step:08d}" for step in steps_of(folder)}
    return [name for name in sorted(os.listdir(folder))
            if name not in ("main.log", "metrics.jsonl", "run.json")
            and not (re.fullmatch(r"(DONE|model|state)_\d{8}(_\d{5})?(\.bin)?", name)
                     and name.split("_")[1][:8] in whole)]


# ---- runs ----

def unscaled(result):
    result.err = without_scaling(result.err)
    return result


@functools.lru_cache(None)
def undisturbed_run(key):
    data()
    folder = f"judge{len(os.listdir())}_{abs(hash(key))}"
    result = unscaled(run({**dict(key), "-o": folder}))
    if result.code != 0 or result.err:
        raise RuntimeError(f"the undisturbed run fails: {result.err}")
    undisturbed_run.samples[folder] = result.samples()
    return folder


undisturbed_run.samples = {}


def undisturbed(flags):
    """The folder of the same command's run that nothing disturbs."""
    return undisturbed_run(tuple(sorted((k, v) for k, v in flags.items() if k not in ("-o", "-y"))))


class Started:
    """A run in the background, in a session of its own; line by line, what it prints."""

    def __init__(self, flags, words=None, before=(), threads=1, **popen):
        data()
        self.words = words or Program.command(flags)
        leash = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        # MALLOC_PERTURB_: what is read after it was freed is rubbish
        self.err_file = tempfile.TemporaryFile()
        self.p = subprocess.Popen(leash + list(before) + self.words, stdin=subprocess.DEVNULL,
                                  stdout=subprocess.PIPE, stderr=self.err_file, start_new_session=True,
                                  env=Program.environment(threads, MALLOC_PERTURB_=85), **popen)
        self.out = b""

    def until(self, text):
        """Reads until a line begins with this. False: it has ended before."""
        for line in self.p.stdout:
            self.out += line
            if line.decode("latin-1").startswith(text):
                return True
        return False

    def ranks(self):
        return [pid for _, pid in session_processes(self.p.pid)]

    def result(self):
        # what until() has read ahead lies in a buffer that communicate() with a timeout passes over
        os.set_blocking(self.p.stdout.fileno(), False)
        self.out += self.p.stdout.peek()
        try:
            self.out += self.p.communicate(timeout=LIMIT_S)[0]
        except subprocess.TimeoutExpired:
            os.killpg(self.p.pid, signal.SIGKILL)
            self.p.wait()
            return Result(None, "", f"no end after {LIMIT_S} s", self.words)
        end = time.monotonic() + LIMIT_S        # ranks that die with their launcher may still be in a call
        while self.ranks():
            if time.monotonic() > end:
                os.killpg(self.p.pid, signal.SIGKILL)
                return Result(None, "", f"ranks are left after {LIMIT_S} s", self.words)
            time.sleep(0.01)
        self.err_file.seek(0)
        return Result(self.p.returncode, self.out.decode("latin-1"), self.err_file.read().decode("latin-1"),
                      self.words)


def interrupted(flags, step, *signals, words=None, behind=""):
    """Starts it and sends the signals after the line of that step, or after the next one that begins so."""
    started = Started(flags, words)
    started.until(f"step {step}/")
    if behind and signals:
        started.until(behind)
    for number in signals:
        started.p.send_signal(number)
    return started.result()


def resume_words(folder):
    """Nothing but the folder: all else is the run's."""
    return [Program.path, "-y", "1", "-o", folder]


def story(title, flags, stops, alone=False, behind=""):
    """A run with stops [(step, signal)], each time resumed, and at last to its end. Returns what is wrong.
    alone: resumed by -y 1 and -o only."""
    flags = {**flags, "-y": 1, "-o": f"story_{abs(hash((title, named(flags), alone)))}"}
    judge, wrong, began = undisturbed(flags), [], False
    for step, number in stops + [(10**9, None)]:
        words = resume_words(flags["-o"]) if alone and began else None
        result = unscaled(interrupted(flags, step, *[number] if number else [], words=words, behind=behind))
        killed = result.code == -9 and number == signal.SIGKILL
        if not killed and result.code != 0:
            wrong.append(f"exit code {result.code} with {number}")
        allowed = [STOPPING.strip()] if number else []
        if not alone:
            allowed.append("warning: the run in -o")                # it has no checkpoint: it begins anew
        wrong += [line for line in result.err.splitlines() if not line.startswith(tuple(allowed))]
        samples, wanted = result.samples(), undisturbed_run.samples[judge]
        if not number and samples != wanted[len(wanted) - len(samples):]:
            wrong.append(f"samples: {samples}")
        began = bool(os.path.isdir(flags["-o"]) and steps_of(flags["-o"]))
    return [f"{title}: {what}" for what in wrong + unlike(flags["-o"], judge) +
            [f"{name} is left" for name in left_over(flags["-o"])]]


def check_stories(stories):
    data()
    for s in stories:
        undisturbed(s[1])
    for found in side_by_side(lambda s: story(*s), stories):
        check(not found, "; ".join(found))


TERM, KILL, USR1, HUP, INT, PIPE = (signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1, signal.SIGHUP,
                                    signal.SIGINT, signal.SIGPIPE)


# ---- exact resume ----

@pytest.mark.numeric
def test_exact():
    """Stopped at any step, by any signal, once or again and again; resumed by the same command."""
    check_stories([(f"{number.name} after step {step}", {"-v": 1 + step % 2}, [(step, number)])
                   for step, number in ((1, TERM), (2, INT), (4, KILL), (5, USR1), (6, HUP), (11, KILL),
                                        (12, TERM), (13, INT), (17, KILL), (18, USR1), (22, TERM),
                                        (23, KILL))])


@pytest.mark.programs("cpu", "lazy")
@pytest.mark.numeric
def test_after_validation():
    """A signal in a step that was validated before: its loss is logged once."""
    slow = {"-v": 1, "-m": 1, "-n": 0, "-z": 64 * T_ROWS, "-x": 12}     # most of a step's time is training
    check_stories([(f"after step {step}", slow, [(step, TERM)], False, "val loss")
                   for step in range(2, 11)])


@pytest.mark.programs("cpu", "asan", "lazy")
@pytest.mark.numeric
def test_alone():
    """Resumed by -y 1 and the folder alone; samples by a prompt that only the run's settings have."""
    loud = {"-s": 5, "-v": 5, "-g": 8, "--prompt": "tak lorin mek "}
    check_stories([(f"{number.name} after step {step}", more, [(step, number), (step + 3, TERM)], True)
                   for step, number, more in ((6, TERM, {}), (11, KILL, loud), (7, INT, loud))])


@pytest.mark.cpu_only
def test_own_flags():
    """By -y 1 and the folder alone, from elsewhere: the run's own flags, data and ranks, before its first
    checkpoint and after; the closing lines have the command."""
    data()
    run_ok({"-x": 1, "-o": "own_origin"})
    flags = {**ranks(2, 1), "-n": 0, "-u": 3, "-k": "constant", "-x": 100, "-e": model_path("own_origin")}
    judge = undisturbed(flags)
    os.makedirs("own_elsewhere")
    started = Started({**flags, "-x": 10**6, "-o": "own"})
    started.until("step 3/")
    started.p.kill()
    started.result()
    check_equal(steps_of("own"), [], "checkpoints of a run that was killed before its first")
    started = Started({}, resume_words(os.path.abspath("own")), cwd="own_elsewhere")
    started.until("step 12/")
    started.p.send_signal(TERM)
    stopped = started.result()
    check(re.fullmatch("warning: the run in -o .*/own has no checkpoint: it begins anew, with the settings "
                       f"in its run.json where no flag says otherwise\n{STOPPING}", stopped.err), stopped.err)
    command = re.findall("^.*/own: `(.*)` goes on with this run$", stopped.out, re.M)
    if check(len(command) == 1, f"the command that resumes: {stopped.out}"):
        result = interrupted({}, 10**9, words=shlex.split(command[0]) + ["-x", "100"])
        said = "launch: --gpus 2, as the run was started"
        check((result.code, result.err) == (0, "") and said in result.out,
              f"{command}: {result.code}, {result.err}{result.out}")
        with open("own/run.json", encoding="utf-8") as f:
            check_equal(json.load(f)["settings"]["gpus"], 2, "ranks in run.json")
        for name in ("main.log", "model_00000100.bin"):
            check(read_bytes(f"own/{name}") == read_bytes(f"{judge}/{name}"), f"{name} is another")
        result = interrupted({}, 10**9, words=resume_words("own") + ["-x", "100", "--gpus", "1"])
        check("launch: ranks now 1, before 2\n" in result.out, f"--gpus 1 says otherwise: {result.out}")


@pytest.mark.numeric
def test_variants():
    """What changes the arithmetic, the data's order or the times of saving; stopped again and again."""
    again = [(2, TERM), (3, KILL), (7, USR1), (9, KILL), (9, TERM), (15, KILL), (16, INT)]
    again = again if on_cpu() and not Program.quick else again[::3]
    variants = [{"-n": 7}, {"-n": 1}, {"-n": 0}, {"-n": 5, "-v": 5, "-s": 5, "-g": 4}, {"-r": 1}, {"-r": 2},
                {"-w": 0}, {"-b": 4}, {"-b": 16}, {"-z": 2 * T_ROWS, "-b": 2, "-x": 200, "-n": 30}, {"-a": 1},
                {"--shuffle": 0}, {"-u": 10, "-k": "wsd"},
                {"-x": "epoch", "-z": 64}, {"--optimizer": "muon"}]
    if Program.precision != "FP32":
        variants += [{"--grad-dtype": "bf16"}, {"--grad-dtype": "bf16", "-w": 0}, {"-r": 2, "-w": 0},
                     {"--residual-dtype": "fp32"}]
    stories = [(named(more), more, again) for more in variants]
    check_stories(stories + [(f"killed before the first checkpoint: {k}", {}, [(k, KILL)] * 3)
                             for k in (1, 3)])


def check_same_end(title, result, folder, judge):
    """A resumed run that went well and ended as the other one."""
    result = unscaled(result)
    found = unlike(folder, judge)
    check(result.code == 0 and result.err == "" and not found,
          f"{title}: exit code {result.code}, {result.err.strip()}; differs in {found}")


@pytest.mark.numeric
def test_other_lengths():
    """-x, -n, -nk, -r and -v may change: a longer run goes on, a shorter one has nothing to do."""
    data()
    flags = {"-k": "constant", "-o": "longer"}
    run_ok({**flags, "-x": 12, "-n": 3})
    result = run({**flags, "-x": 24, "-n": 4, "-r": 2, "-nk": 0, "-y": 1})
    check_same_end("-x 24 after -x 12", result, "longer", undisturbed({"-k": "constant", "-n": 4}))
    check_equal(steps_of("longer"), [9, 12, 16, 20, 24], "checkpoints")
    before = {path: hashed for path, hashed in snapshot("longer").items() if "json" not in path}
    result = run({**flags, "-x": 5, "-y": 1})
    check(result.code == 0 and "step" not in result.err, f"-x 5: {result.code}, {result.err}")
    check_equal({path: hashed for path, hashed in snapshot("longer").items() if "json" not in path}, before,
                "files of a run that was longer than -x")


@pytest.mark.cpu_only
def test_model_file():
    """A run that began with a model file goes on without it."""
    data()
    run_ok({"-o": "origin", "-x": 6, "-n": 0})
    shutil.copy(model_path("origin"), "origin.bin")
    judge = undisturbed({"-e": "origin.bin"})
    stopped_run("from_file", {"-e": "origin.bin"})
    os.remove("origin.bin")
    result = interrupted({}, 10**9, words=resume_words("from_file"))
    check_same_end("without the file", result, "from_file", judge)


# ---- damage ----

def flipped(path, at):
    data = bytearray(read_bytes(path))
    data[at] ^= 1 << at % 8
    write_bytes(path, data)


def cut(path, size):
    write_bytes(path, read_bytes(path)[:size])


def damages(folder, step):
    """[(what, file, function of the folder)] for each file of a checkpoint."""
    marker, model, state = f"DONE_{step:08d}", f"model_{step:08d}.bin", f"state_{step:08d}_00000.bin"
    facts, table = read_state(f"{folder}/{state}")
    size = {name: os.path.getsize(f"{folder}/{name}") for name in (marker, model, state)}
    data = size[state] - sum(len(row[6]) for row in table)
    table_end = 64 + 128 * len(table)
    places = {marker: [0, 5, 30, size[marker] // 2, size[marker] - 2, size[marker] - 1],
              model: [0, 12, 600, 1016, 1023, 1024, size[model] // 2, size[model] - 1],
              state: [0, 8, 12, 16, 24, 32, 50, 64, 130, table_end - 1, table_end, data - 1, data,
                      (data + size[state]) // 2, size[state] - 1]}
    found = []
    for name, ats in places.items():
        def add(what, do, name=name):
            found.append((f"{name} {what}", name, lambda where: do(f"{where}/{name}")))
        for at in ats:
            add(f"with a flipped bit at byte {at}", lambda path, at=at: flipped(path, at))
        for left in (0, size[name] // 2, size[name] - 1):
            add(f"cut to {left} bytes", lambda path, left=left: cut(path, left))
        add("with a byte more", lambda path: write_bytes(path, read_bytes(path) + b"\0"))
        if name != marker:                  # without a marker it is no checkpoint, and nothing is said
            add("missing", os.remove)
    return found


def resumed_without(title, folder, do, named_files, judge):
    """What is wrong when the run is resumed after damage that makes the named files' checkpoints useless."""
    shutil.copytree(judge, folder)
    do(folder)
    result = run({"-nk": 0, "-y": 1, "-o": folder})
    lines = result.err.splitlines()
    wrong = [f"exit code {result.code}"] if result.code else []
    said = [re.match(r"warning: the checkpoint of step (\d+) is skipped: (\S+) ", line) for line in lines]
    said = [(m and m[2]) for m in said]
    if said != named_files:
        wrong.append(f"warnings {lines}, expected one for each of {named_files}")
    wrong += unlike(folder, judge)
    shutil.rmtree(folder)
    return [f"{title}: {what}" for what in wrong]


@pytest.mark.cpu_only
def test_damage():
    """Whatever happens to a file of a checkpoint is noticed and named; the one before is taken instead."""
    judge = undisturbed({"-nk": 0})
    other = undisturbed({"-nk": 0, "--seed": 5})
    step, before = 24, 20
    model, state = f"model_{step:08d}.bin", f"state_{step:08d}_00000.bin"
    cases = [(what, do, [name]) for what, name, do in damages(judge, step)]
    if Program.quick:
        cases = cases[::5]

    def replace(name, source):
        return lambda folder: shutil.copy(source, f"{folder}/{name}")
    cases += [
        ("the model of the save before", replace(model, f"{judge}/model_{before:08d}.bin"), [model]),
        ("the state of the save before", replace(state, f"{judge}/state_{before:08d}_00000.bin"), [state]),
        ("the marker of the save before", replace(f"DONE_{step:08d}", f"{judge}/DONE_{before:08d}"),
         [f"DONE_{step:08d}"]),
        ("the model of another run", replace(model, f"{other}/{model}"), [model]),
        ("the state of another run", replace(state, f"{other}/{state}"), [state]),
        ("no marker", lambda folder: os.remove(f"{folder}/DONE_{step:08d}"), []),
        ("two damaged", lambda folder: (cut(f"{folder}/{state}", 1000),
                                        flipped(f"{folder}/model_{before:08d}.bin", 2000)),
         [state, f"model_{before:08d}.bin"])]
    numbered = [(what, f"damaged{i}", do, names, judge) for i, (what, do, names) in enumerate(cases)]
    for found in side_by_side(lambda case: resumed_without(*case), numbered):
        check(not found, "; ".join(found))


@pytest.mark.cpu_only
def test_all_damaged():
    """No checkpoint is left that could be used: one sentence, and everything stays as it is."""
    judge = undisturbed({})
    shutil.copytree(judge, "hopeless")
    for path in glob.glob("hopeless/state_*"):
        flipped(path, os.path.getsize(path) - 9)
    for unmarked in (False, True):
        for path in glob.glob("hopeless/DONE_*") if unmarked else ():
            os.remove(path)
        before = snapshot("hopeless")
        result = run({"-y": 1, "-o": "hopeless"})
        lines = result.err.splitlines()
        check_equal((result.code, [line.split(":")[0] for line in lines]),
                    (1, ["warning", "warning", "error", "hint"][:len(lines)]), f"the end: {lines}")
        check(len(lines) >= 3 and "hopeless" in lines[2], f"stderr: {lines}")
        check_equal(snapshot("hopeless"), before, "the folder")
    for path in glob.glob("hopeless/state_*"):
        os.remove(path)
    check_refused("models without states", {"-y": 1, "-o": "hopeless"}, "no state_*.bin to go on from")


@pytest.mark.cpu_only
def test_lost_markers():
    """A copy without DONE files: the newest whole checkpoint is marked again, and nothing is removed."""
    judge = undisturbed({"-nk": 0})
    for title, keep, lost, damaged, step in (("all", 2, range(99), [], 24),
                                             ("the last two", 0, (20, 24), [], 24),
                                             ("all, and a damaged state", 2, range(99), [24], 20)):
        folder = "lost_" + title.replace(" ", "_")
        shutil.copytree(judge, folder)
        for path in (f"{folder}/DONE_{i:08d}" for i in lost):
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)
        for i in damaged:
            cut(f"{folder}/state_{i:08d}_00000.bin", 1000)
        files = set(os.listdir(folder))
        result = run({"-nk": keep, "-y": 1, "-o": folder})
        skipped = result.err.count("is skipped")
        check_equal((result.code, skipped), (0, len(damaged)), f"{title}: {result.err}")
        check(f"the checkpoint of step {step} had no DONE file" in result.out, f"{title}: {result.out}")
        check(files < set(os.listdir(folder)), f"{title}: {files - set(os.listdir(folder))} are gone")
        check_equal(unlike(folder, judge), [], title)


@pytest.mark.cpu_only
def test_forged_facts():
    """What no run of this program writes, with checksums that fit: a sentence, and nothing is changed."""
    judge = undisturbed({})
    gone = "layernorm\nflag.residual=layernorm"         # one more fact: a flag of older programs
    for name, value, said in (("flag.norm", gone, "began with --residual layernorm"),
                              ("position", -5, "'position' is -5"), ("position", "1e9", "'position' is 1e9"),
                              ("total_batch", "1e308", "'total_batch' is 1e308"), ("T", 0, "'T' is 0"),
                              ("rewinds", 2**40, "'rewinds' is"), ("lanes", -1, "'lanes' is -1"),
                              ("update.norms_count", -1, "update.norms_count"),
                              ("update.losses_count", "1e308", "update.losses_count")):
        folder = f"forged_{name}_{value}".split("\n", maxsplit=1)[0]
        shutil.copytree(judge, folder)
        for step in steps_of(folder):
            with_fact(f"{folder}/state_{step:08d}_00000.bin", name, value)
            mark(folder, step, [f"model_{step:08d}.bin", f"state_{step:08d}_00000.bin"])
        before = snapshot(folder)
        result = run({"-y": 1, "-o": folder, "-x": 40})
        check(result.code == 1 and said in result.err and result.err.count("error: ") == 1,
              f"{name}={value}: {result.code}, {result.err}")
        check_equal(snapshot(folder), before, f"{name}={value}: the folder")


@pytest.mark.cpu_only
def test_unreadable_for_a_moment():
    """The run goes on from an older checkpoint, and then the newest is back: so are its lines of the logs."""
    flags = {"-nk": 0, "-n": 5}
    judge = undisturbed(flags)
    shutil.copytree(judge, "moment")
    hidden = [f"moment/state_000000{step}_00000.bin" for step in (20, 24)]
    for path in hidden:
        os.rename(path, path + ".away")
    result = interrupted({**flags, "-y": 1, "-o": "moment"}, 17, KILL)
    check_equal((result.code, result.err.count("is skipped")), (-9, 2), f"goes on from step 15: {result.err}")
    for path in hidden:
        os.rename(path + ".away", path)
    result = run({**flags, "-y": 1, "-o": "moment"})
    check_same_end("the newest can be read again", result, "moment", judge)
    check_equal(left_over("moment"), [], "files that belong to no checkpoint")


# ---- kills at random moments ----

def wait_and_kill(rng, folder, started):
    """Ends it with SIGKILL: at some step, when a file of a save appears or goes, or at any time."""
    before = set(os.listdir(folder)) if os.path.isdir(folder) else set()
    how = rng.choice(("part", "part", "part", "marker", "marker", "step", "time"))
    end = time.monotonic() + LIMIT_S
    if how == "step":
        started.until(f"step {rng.randrange(1, 40)}/")
    elif how == "time":
        time.sleep(rng.uniform(0, 0.4))
    else:
        def happened():
            new = set(os.listdir(folder)) - before if os.path.isdir(folder) else set()
            return any(name.endswith(".part") if how == "part" else re.fullmatch(r"DONE_\d+", name)
                       for name in new)
        skipped = rng.randrange(4)          # not always the first save
        while started.p.poll() is None and time.monotonic() < end:
            if happened():
                if not skipped:
                    break
                skipped -= 1
                before |= set(os.listdir(folder))
    time.sleep(rng.choice((0, 0, rng.uniform(0, 0.002), rng.uniform(0, 0.02))))
    started.p.kill()
    return started.result()


def expected_steps(flags):
    """Which checkpoints are left of a run that saved at each multiple of -n and at the end."""
    every, keep, major, last = flags["-n"], flags.get("-nk", 2), flags.get("-nm", 0), flags["-x"]
    saved = [step for step in range(1, last + 1) if step % every == 0 or step == last]
    return [step for step in saved if keep == 0 or step in saved[-keep:] or major and step % major == 0]


def killed_life(flags, seed, kills):
    """(what is wrong, how many of the kills were in a save); a run that was faster is no kill."""
    rng, folder, killed, in_save, wrong = random.Random(seed), flags["-o"], 0, 0, []
    for _ in range(10 * kills):
        if killed == kills:
            break
        result = wait_and_kill(rng, folder, Started(flags))
        if result.code == 0:
            shutil.rmtree(folder)
            continue
        if result.code != -9:
            wrong.append(f"exit code {result.code}: {result.err}")
        killed += 1
        in_save += os.path.isdir(folder) and left_over(folder) != []
    result = unscaled(run(flags))
    if result.code:
        wrong.append(f"exit code {result.code}")
    wrong += [line for line in result.err.splitlines() if not line.startswith("warning: the run in -o")]
    wrong += unlike(folder, undisturbed(flags)) + [f"{name} is left" for name in left_over(folder)]
    if steps_of(folder) != expected_steps(flags):
        wrong.append(f"checkpoints {steps_of(folder)}, expected {expected_steps(flags)}")
    if killed < kills:
        wrong.append(f"it met only {killed} of {kills} kills")
    return [f"seed {seed}: {what}" for what in wrong], in_save


@pytest.mark.cpu_only
def test_left_overs():
    """What kills leave at moments that are too short to be met: in a save, in a removal, behind a marker."""
    folder = "left"
    started = Started({"-o": folder, "-nk": 0})
    started.until("saved left/model_00000015.bin")
    started.p.kill()
    started.result()
    steps = steps_of(folder)
    if not check(len(steps) >= 3, f"checkpoints before the kill: {steps}"):
        return
    os.rename(f"{folder}/DONE_{steps[0]:08d}", f"{folder}/HALF_{steps[0]:08d}")
    os.rename(f"{folder}/DONE_{steps[1]:08d}", f"{folder}/HALF_{steps[1]:08d}")
    os.remove(f"{folder}/model_{steps[1]:08d}.bin")
    write_bytes(f"{folder}/HALF_{steps[2]:08d}", b"")
    for name in ("DONE_00000007", "run.json", "model_00000007.bin", "state_00000008_00000.bin",
                 "metrics.jsonl.cut"):
        write_bytes(f"{folder}/{name}.{2**22 + 7}.3.part", b"half")
    write_bytes(f"{folder}/HALF_00000008", b"")
    write_bytes(f"{folder}/model_00000008.bin", b"of the same save as its state")
    write_bytes(f"{folder}/model_00000009.bin", b"somebody's")
    result = run({"-o": folder, "-y": 1, "-nk": 0})
    check_equal((result.code, result.err), (0, ""), "resumed")
    check_equal(left_over(folder), ["model_00000009.bin"], "files that belong to no checkpoint")
    check_equal(unlike(folder, undisturbed({"-nk": 0})), [], "the end")


@pytest.mark.programs("cpu", "asan", "lazy")
@pytest.mark.numeric
def test_kills():
    """kill -9 at random moments, many of them in a save; resumed each time, and at last to the end."""
    data()
    kills, seed, lives = Program.numbers["kills"], Program.numbers["seed"], []
    for i in range((kills + 4) // 5):
        flags = {"-n": 1 + i % 4, "-nk": (2, 1, 3, 0)[i // 4 % 4], "-nm": 10 * (i % 2), "-x": 40, "-y": 1}
        undisturbed(flags)
        lives.append(({**flags, "-o": f"life{i}"}, f"{seed}.{i}", min(5, kills - 5 * i)))
    found = side_by_side(lambda life: killed_life(*life), lives)
    for wrong, _ in found:
        check(not wrong, "; ".join(wrong))
    in_save = sum(one[1] for one in found)
    print(f"    {kills} kills, {in_save} of them in a save")
    check(in_save * 5 > kills, f"of {kills} kills only {in_save} were in a save")


# ---- disks that fail ----

def check_failed(title, result, *said):
    """Exit code 1 and one sentence."""
    lines = result.err.splitlines()
    once = [line.startswith("error: ") for line in lines] == [True] + [False] * (len(lines) - 1)
    check(result.code == 1 and once and len(lines) <= 3 and all(text in result.err for text in said),
          f"{title}: exit code {result.code}, {result.err.strip()}")


def half_written(folder):
    return [name for name in os.listdir(folder) if name.endswith(".part")]


def check_resumable(title, folder, flags, intact):
    """The last checkpoint is the one that was there before the failure; resumed, it ends as if nothing had
    happened."""
    check_equal(steps_of(folder)[-1:], intact[-1:], f"{title}: last checkpoint")
    result = run({**flags, "-y": 1, "-o": folder})
    check_same_end(title + ", resumed", result, folder, undisturbed(flags))
    check_equal(left_over(folder), [], f"{title}: what belongs to no checkpoint")


@pytest.mark.cpu_only
def test_full_disk():
    """No space, wherever it ends: in a log, in a model, in a state."""
    flags = {"-n": 3, "-nk": 0}
    judge = undisturbed(flags)
    one = sum(os.path.getsize(path) for path in glob.glob(f"{judge}/*_00000024*"))
    os.makedirs("small", exist_ok=True)
    for tenths in (5, 13, 17, 24, 29):
        size = f"size={(one * tenths // 10 + 20000) // 4096 * 4096}"
        mounted = os.geteuid() == 0 and subprocess.run(
            ["mount", "-t", "tmpfs", "-o", size, "none", "small"], stderr=subprocess.DEVNULL).returncode == 0
        if not mounted:
            skip("no right to mount a small file system", 3)
            continue
        try:
            result = run({**flags, "-o": "small/run"})
            check_failed(f"{tenths} tenths of a checkpoint", result, "No space left on device", "small/run")
            check_equal(half_written("small/run"), [], "parts")
            intact = [step for step in (3, 6) if step // 3 * one * 10 <= one * tenths]
            if intact:
                subprocess.run(["mount", "-o", "remount,size=64m", "small"], check=True)
                check_resumable(f"{tenths} tenths of a checkpoint", "small/run", flags, intact)
            else:
                check_equal(steps_of("small/run"), [], "checkpoints")
        finally:
            subprocess.run(["umount", "small"], check=True)


@pytest.mark.cpu_only
def test_file_limit():
    """A limit on the size of files (ulimit -f) that the logs or the checkpoints meet."""
    flags = {"-n": 3, "-k": "constant"}

    def limit(most):
        def set_limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        return set_limit
    data()
    run_ok({**flags, "-x": 12, "-o": "limited"})
    intact, size = steps_of("limited"), os.path.getsize(glob.glob("limited/state_*")[0])
    check_equal(intact[-1:], [12], "last checkpoint")
    logs = os.path.getsize("limited/metrics.jsonl") + 150
    for most, what in ((size * 9 // 10, "state_"), (size // 4, "state_"), (logs, "main.log|metrics")):
        result = run({**flags, "-o": "limited", "-y": 1}, preexec_fn=limit(most))
        check_failed(f"files of {most} bytes at most", result, "File too large")
        check(re.search(what, result.err), f"it names {what}: {result.err}")
        check_equal((steps_of("limited"), half_written("limited")), (intact, []),
                    f"checkpoints and parts with files of {most} bytes at most")
    check_resumable("a limit on files", "limited", flags, intact)
    # a rank that hears of another's error may just begin to write
    for i in range(8 if enough(2, 2) else 0):
        folder = f"limited_ranks{i}"
        result = run({**flags, **ranks(2, 1), "-o": folder}, preexec_fn=limit(size // 40))
        check_failed("two ranks", result, "File too large")
        check_equal((steps_of(folder), half_written(folder)), ([], []), "two ranks: files")
    # the thread that writes finds it while the main one computes, which has to end in peace
    busy = {"-b": 16, "-z": 64 * T_ROWS, "-n": 1}
    ends = side_by_side(lambda i: run({**busy, "-o": f"limited{i}"}, preexec_fn=limit(size // 2)), range(16))
    check_equal([end.code for end in ends], [1] * 16, "exit codes of 16 runs")


@pytest.mark.cpu_only
def test_vanished_folder():
    """The run's folder is moved away while it runs, and comes back; what was half written there could not be
    removed, but is when the run goes on."""
    flags = {"-n": 6, "-k": "constant"}
    started = Started({**flags, "-x": 10**6, "-o": "vanishing"})    # there is always a save to come
    started.until("saved ")
    os.rename("vanishing", "vanished")
    result = started.result()
    intact = steps_of("vanished")
    check_failed("a folder that is gone", result, "vanishing")
    os.rename("vanished", "vanishing")
    # farther than the logs went before, so that their *.cut goes
    check_resumable("a folder that was gone", "vanishing", {**flags, "-x": intact[-1] + 60}, intact)


# ---- several ranks ----

def ranks(n, zs=0):
    return {"--gpus": n, "-zs": zs}


def elastic(title, flags, stages):
    """Stages [(ranks and ZeRO stage, step, signal)]; what is wrong, as in a story."""
    flags = {**flags, "-y": 1, "-o": f"elastic_{abs(hash(title))}"}
    wrong = []
    for more, step, number in stages:
        result = unscaled(interrupted({**flags, **more}, step, *[number] if number else []))
        if result.code != 0 and number != KILL:
            wrong.append(f"exit code {result.code} with {more}")
        wrong += [line for line in result.err.splitlines()
                  if not line.startswith((STOPPING.strip(), "warning: the run in -o")) and number != KILL]
    return [f"{title}: {what}" for what in wrong + unlike(flags["-o"], undisturbed(flags)) +
            [f"{name} is left" for name in left_over(flags["-o"])]]


@pytest.mark.gpus
@pytest.mark.numeric
def test_elastic():
    """Stopped on so many ranks, resumed on others, at another ZeRO stage: as one rank that never stopped."""
    each = {"--lanes": 16}                  # every micro-step is a lane, as -zs 2 wants it
    end = (10**9, None)
    stories = [
        ("4 at -zs 1, then 1, then 2 at -zs 2", each,
         [(ranks(4, 1), 6, TERM), (ranks(1), 13, TERM), (ranks(2, 2), *end)]),
        ("4, 2, 1, 4 at -zs 0, 1, 2, 0", each,
         [(ranks(4, 0), 3, TERM), (ranks(2, 1), 8, KILL), (ranks(1, 2), 14, USR1), (ranks(4, 0), *end)]),
        ("4, 2, 1, 4 at -zs 2, 0, 1, 2", each,
         [(ranks(4, 2), 6, TERM), (ranks(2, 0), 9, TERM), (ranks(1, 1), 15, KILL), (ranks(4, 2), *end)]),
        ("Muon, 1, 2 at -zs 2, 4 at 1, 1", {**each, "--optimizer": "muon"},
         [(ranks(1), 5, TERM), (ranks(2, 2), 9, KILL), (ranks(4, 1), 14, TERM), (ranks(1), *end)]),
        ("the default lanes, 1, 4 at -zs 1, 2", {},
         [(ranks(1), 6, TERM), (ranks(4, 1), 13, KILL), (ranks(2), *end)]),
        ("2 at -zs 1, then 1, then 2 at -zs 2, then 2", each,
         [(ranks(2, 1), 6, TERM), (ranks(1), 9, KILL), (ranks(2, 2), 15, USR1), (ranks(2), *end)])]
    if on_cpu():
        stories.append(("3 at -zs 1, then 6", {"-z": 12 * T_ROWS, "--lanes": 12, "--gpus": 3},
                        [(ranks(3, 1), 6, KILL), (ranks(6), 12, TERM), (ranks(6, 1), *end)]))
    usable = [s for s in stories if enough(max(more.get("--gpus", 1) for more, _, _ in s[2]))]
    for _, flags, _ in usable:
        undisturbed(flags)
    for found in side_by_side(lambda s: elastic(*s), usable):
        check(not found, "; ".join(found))


@pytest.mark.cpu_only
def test_damage_seen_by_one():
    """What only rank 1 reads of a checkpoint is not what was written: all ranks take the one before."""
    if not enough(2, 4):
        return
    flags = {**ranks(2, 1), "-nk": 0}
    judge = undisturbed(flags)
    names = ["model_00000024.bin", "state_00000024_00000.bin", "state_00000024_00001.bin"]

    def flip(folder):
        flipped(f"{folder}/{names[2]}", os.path.getsize(f"{folder}/{names[2]}") - 1)
    for title, do, who, said in (
            ("a flipped bit", flip, 1, names[2] + " is damaged"),
            ("a DONE that names one state of two", lambda folder: mark(folder, 24, names[:2]), r"\d",
             "the files do not have all of"),
            ("no DONE, and one state of two", lambda folder: [os.remove(f"{folder}/{name}")
                                                             for name in ("DONE_00000024", names[2])],
             r"\d", "the files do not have all of")):
        folder = "one_" + title.replace(" ", "_")
        shutil.copytree(judge, folder)
        do(folder)
        result = unscaled(run({**flags, "-y": 1, "-o": folder}))
        said = rf"warning: the checkpoint of step 24 is skipped by rank {who}: {said}.*\n"
        check(result.code == 0 and re.fullmatch(said, result.err), f"{title}: {result.err}")
        check_equal(unlike(folder, judge), [], title)


@pytest.mark.gpus
@pytest.mark.numeric
def test_rank_killed_in_save():
    """One of four ranks (or two GPUs) dies while all of them save their shards; two go on."""
    if not enough(2, 4):
        return
    flags, rng, in_save = {"--lanes": 16, "-n": 2}, random.Random(Program.numbers["seed"]), 0
    for i in range(4):
        folder = f"rank_killed{i}"
        started = Started({**flags, **ranks(min(4, most_ranks()), 1), "-o": folder})
        started.until(f"step {rng.randrange(3, 9)}/")
        end = time.monotonic() + LIMIT_S
        while started.p.poll() is None and time.monotonic() < end and not glob.glob(folder + "/state_*.part"):
            pass
        victims = started.ranks()
        if victims:
            with contextlib.suppress(ProcessLookupError):       # the run may just be over
                os.kill(victims[rng.randrange(len(victims))], KILL)
        result = started.result()
        in_save += os.path.isdir(folder) and left_over(folder) != []
        last = USUAL["-x"]
        died = result.code != 0 or f"step {last}/{last}" in result.out      # or the run was over before
        check(died and result.err.count("error: ") <= 1, f"{result.code}, {result.err.strip()}")
        result = run({**flags, **ranks(2, 1), "-y": 1, "-o": folder})
        result.err = re.sub("warning: the run in -o .*\n", "", result.err)      # it may begin anew
        check_same_end("two ranks after the death of one", result, folder, undisturbed(flags))
        check_equal(left_over(folder), [], "what belongs to no checkpoint")
    print(f"    {in_save} of 4 deaths were in a save")


# ---- flags ----

# Of each flag that a run keeps for good: another value that it takes.
OTHER_VALUES = {
    "--model": "L1,NH2,C32,T16,V256", "--micro-batch": 2, "--sequence-length": 8,
    "--total-batch": 8 * T_ROWS, "--learning-rate": "2e-2", "--lr-schedule": "linear", "--warmup": 3,
    "--final-fraction": 0.5, "--weight-decay": 0, "--beta1": 0.8, "--beta2": 0.9, "--eps": "1e-6",
    "--grad-clip": 2, "--seed": 3, "--shuffle": 0, "--overfit": 1, "--tf32": 1, "--master-weights": 0,
    "--gelu-fusion": 1, "--kernels": "portable", "--grad-dtype": "bf16",
    "--lanes": 4, "--reduction": "nccl", "--optimizer": "muon", "--muon-lr": 0.03, "--muon-momentum": 0.9,
    "--muon-steps": 4, "--muon-decay": 0.1,
    "--block": "parallel", "--norm": "rmsnorm", "--dropout": 0.1, "--residual-dtype": "fp32"}


def flag_rows():
    """{"--name": (["-letter", ...], default, is it fixed)} of the table in the source."""
    with open(os.path.join(ROOT, "llmc/run/run_config.h"), encoding="utf-8") as f:
        table = re.search(r"^static const Flag kFlags\[\] = \{(.*?)^\};", f.read(), re.M | re.S)[1]
    rows = re.findall(r'^    \{"([^"]*)",\s*"([^"]*)",\s*FLAG_\w+,\s*&run\.[\w.]+,\s*(?:DATA_DIR )?"([^"]*)"'
                      r"(.*?)(?=^    \{|\Z)", table, re.M | re.S)
    return {"--" + name: (["-" + x for x in letters.split(",") if x], default, "FLAG_FIXED" in rest)
            for letters, name, default, rest in rows}


def stopped_run(folder, flags=None):
    """A run that was stopped after its 12th step or a bit later."""
    result = interrupted({**(flags or {}), "-o": folder}, 12, TERM)
    check(result.code == 0 and steps_of(folder), f"{folder}: {result.code}, {result.err}")
    return folder


@pytest.mark.cpu_only
def test_fixed_flags():
    """What would change the result may not be given otherwise; given as it was, it is all right."""
    rows = flag_rows()
    fixed = {name for name, row in rows.items() if row[2]}
    check(len(rows) > 40, f"{len(rows)} rows of the table")
    check_equal(fixed, set(OTHER_VALUES), "flags that a run keeps for good")
    stopped_run("fixed")
    written = {name: str(value) for name, value in USUAL.items()}
    before = snapshot("fixed")

    def refusal(name):
        was = next((written[letter] for letter in rows[name][0] if letter in written), rows[name][1])
        words = resume_words("fixed") + [name, str(OTHER_VALUES[name])]
        result = interrupted({}, 10**9, words=words)
        shown = re.match(rf"error: .*({name}).* (\S+): the run in this folder began with (\S+), ", result.err)

        def same(a, b):
            return a == b or re.fullmatch(r"[-.e\d]+", a) and float(a) == float(b)
        fine = (result.code == 1 and shown and same(shown[2], str(OTHER_VALUES[name])) and same(shown[3], was)
                and len(result.err.splitlines()) == 2)
        return "" if fine else f"{name}, was {was}: {result.code}, {result.err}"
    for problem in side_by_side(refusal, sorted(fixed)):
        check(not problem, problem)
    check_equal(snapshot("fixed"), before, "the folder")
    spelled = {row[0][0] if row[0] else name: row[1] for name, row in rows.items() if row[2]}
    result = run({**spelled, **USUAL, "-y": 1, "-o": "fixed"})
    check_same_end("all of them given as they were", result, "fixed", undisturbed({}))


@pytest.mark.cpu_only
def test_other_runs():
    """Other data, a folder with a run but without -y, folders without a run."""
    folder = stopped_run("ours")
    os.mkdir("same_names")

    def named_so(name):
        return "same_names/" + name
    for i, rows in enumerate(ROWS):
        write_shard(f"other_{i}.bin", sentences(10 + i, rows * T_ROWS + 2 + i))
        write_shard(f"more_{i}.bin", sentences(10 + i, rows * T_ROWS + 1 + i))
    check_refused("other data", {"-i": "other_*.bin", "-y": 1, "-o": folder}, "training data",
                  "other_0.bin 594")
    for i, rows in enumerate(ROWS):
        write_shard(named_so(f"part_{i}.bin"), sentences(20 + i, rows * T_ROWS + 1 + i))
    check_refused("other tokens in files of the same names and sizes",
                  {"-i": named_so("part_*.bin"), "-y": 1, "-o": folder}, "training data", "other tokens")
    check_refused("fewer shards", {"-i": "part_[01].bin", "-y": 1, "-o": folder}, "training data")
    check_refused("no -y", {"-o": folder}, "already holds a run", "-y 1")
    check_refused("no -o", {"-o": "", "-y": 1}, "-y 1 needs -o")
    os.mkdir("empty")
    for title in ("empty", "new/er"):
        result = run({"-y": 1, "-o": title})
        check_same_end(f"-y 1 on a folder that is {title}", result, title, undisturbed({}))
    os.mkdir("began")
    write_bytes("began/main.log", b"s:0 trl:5.5 lr:1e-3 norm:1.0\n")
    result = run({"-y": 1, "-o": "began"})
    check(re.fullmatch("warning: the run in -o began has no checkpoint: it begins anew\n", result.err),
          f"a run without a checkpoint: {result.err}")
    check_equal(unlike("began", undisturbed({})), [], "a run that began anew")
    os.mkdir("older")
    settings = read_bytes("began/run.json")
    for value in ("layernorm", "gemm"):     # a flag of older programs; gemm is what is done anyway
        older = settings.replace(b'"settings": {', b'"settings": {"residual": "%s", ' % value.encode())
        write_bytes("older/run.json", older)
        if value == "layernorm":
            check_refused(value, {"-y": 1, "-o": "older"}, "began with --residual layernorm")
        else:
            check_equal(run({"-y": 1, "-o": "older"}).code, 0, "a flag whose value is what is done anyway")


@pytest.mark.cpu_only
def test_failed_start():
    """A run that fails before its first step is done leaves the folder as it was, or none."""
    rows = [sentences(30 + i, T_ROWS + 1) for i in range(16)]
    for i, row in enumerate(rows):          # the fifth micro-step of the first step
        write_shard(f"bad_{i:02d}.bin", list(row) if i != 4 else [300] * (T_ROWS + 1))
    os.makedirs("kept")
    write_bytes("kept/notes.txt", b"mine")
    before = snapshot()
    for folder in ("kept", "never"):
        result = run({"-i": "bad_*.bin", "--shuffle": 0, "-o": folder})
        check(result.code == 1 and "token id 300" in result.err, f"the first step fails: {result.err}")
    check_equal(snapshot(), before, "the disk")


# ---- signals ----

def stalled(flags, behind="step 2/"):
    """A run that waits for the reader of what it prints, somewhere behind that line."""
    started = Started({"-x": 10**6, **flags}, pipesize=4096)                # the least
    started.until(behind)
    process = (started.ranks() or [started.p.pid])[0]

    def sleeps():                           # who has no core, or was stopped, does not
        return read_bytes(f"/proc/{process}/stat").rpartition(b")")[2].split()[0] == b"S"
    times, end = 0, time.monotonic() + LIMIT_S
    while times < 10:
        if started.p.poll() is not None or time.monotonic() > end:
            started.p.kill()
            raise RuntimeError("the run has ended, or never waits for its reader")
        times = times + 1 if no_room(started.p.stdout) and sleeps() else 0
        time.sleep(0.03)
    return started


def send_and_hear(started, number):
    """Sends the signal, and waits until the program says that it came."""
    started.p.send_signal(number)
    end = time.monotonic() + LIMIT_S
    while os.fstat(started.err_file.fileno()).st_size == 0 and time.monotonic() < end:
        time.sleep(0.01)


@pytest.mark.cpu_only
def test_second_signal():
    """A second SIGINT does not wait, another signal after the first does nothing."""
    for first, second, code in ((INT, INT, 130), (TERM, INT, 130), (USR1, TERM, 0), (HUP, HUP, 0),
                                (INT, TERM, 0), (INT, PIPE, 0), (PIPE, INT, 0)):
        folder = f"twice_{first.name}_{second.name}"
        started = stalled({"-o": folder, "-n": 0})
        send_and_hear(started, first)       # two of one number that are both on their way are one
        started.p.send_signal(second)
        said = STOPPING if first != PIPE else UNREAD + STOPPING         # Ctrl-C may end `| tee` first
        if code:                            # nobody reads what it prints: that it ends is the signal's doing
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.p.wait(LIMIT_S)
        time.sleep(0.2)
        ended = started.p.poll()
        result = started.result()
        title = f"{first.name}, then {second.name}"
        check_equal((result.code, result.err), (code, said), title)
        check_equal((ended is None, len(steps_of(folder))), (code == 0, int(code == 0)),
                    f"{title}: does it go on; checkpoints")


@pytest.mark.cpu_only
def test_nohup():
    """Where SIGHUP is ignored, it stays so."""
    started = Started({"-o": "nohup"}, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    started.until("step 3/")
    started.p.send_signal(HUP)
    check_same_end("under nohup", started.result(), "nohup", undisturbed({}))


@pytest.mark.gpus
@pytest.mark.numeric
def test_signals_for_ranks():
    """One signal for the launcher stops all ranks after the same step, and the run goes on from there."""
    if not enough(2, 4):
        return
    flags = {"-x": 150, "-n": 0}            # more steps than a stalled run can print lines
    for number in (TERM, INT, USR1, HUP):
        folder = f"ranks_{number.name}"
        started = stalled({**flags, **ranks(2, 1), "-o": folder})
        send_and_hear(started, number)
        result = unscaled(started.result())
        check_equal((result.code, result.err), (0, STOPPING), f"{number.name} for two ranks")
        steps = steps_of(folder)
        said = [int(k) for k in re.findall(r"^stopped by a signal after step (\d+)$", result.out, re.M)]
        check(steps == said and len(said) == 1 and 2 <= said[0] < 150,
              f"{number.name}: checkpoints {steps}, stopped after {said}")
        result = run({**flags, "-y": 1, "-o": folder, **ranks(min(4, most_ranks()))})
        check_same_end(f"{number.name}, resumed at -zs 0", result, folder, undisturbed(flags))


@pytest.mark.cpu_only
def test_two_processes():
    """A second process on one folder ends with a sentence, and disturbs nothing."""
    flags = {"-x": 400, "-n": 150}          # one save is over, and the next one far beyond what it can print
    started = stalled({**flags, "-o": "shared"}, behind="saved ")
    before = snapshot("shared")
    for more, said in (({"-y": 1}, "another process is writing this run"), ({}, "already holds a run")):
        result = run({**flags, **more, "-o": "shared"})
        check_failed(f"a second process with {more}", result, said)
    check_equal(snapshot("shared"), before, "the folder")
    check_same_end("the first process", started.result(), "shared", undisturbed(flags))


# ---- losses that are no numbers ----

@functools.lru_cache(None)
def rare_model():
    """Whatever the context, the logit of token 1 is very small: where it comes next, the gradient's norm is
    larger than fp32 holds. The learning rate is too small to change that. (test_ranks.py has it, too)"""
    model, C = {"-e": "L1,NH1,C256,T1,V256", "-b": 1, "-z": 1, "-i": "val.bin", "-l": "1e-6", "-v": 0}, 256
    run_ok({**model, "-x": 1, "-o": "rare"})
    raw, size = bytearray(read_bytes(model_path("rare"))), sum(param_sizes(1, 256, 1, 1, C, 256))
    width = 2 if Program.precision == "BF16" else 4
    for first, value in ((C, -3e38), (size - 2 * C, 0), (size - C, 2**-12)):    # wte of token 1, lnfw, lnfb
        at = 1024 + first * width
        raw[at:at + C * width] = struct.pack("<f", value)[4 - width:] * C
    raw[1016:1024] = bytes(8)               # no checksum
    write_bytes("rare.bin", raw)
    return {**model, "-e": "rare.bin", "--shuffle": 0, "-x": 60, "-n": 5}


def rare_rows(path, bad, rows=300):
    """A row is a step: those in `bad`, counted from 1, have no finite gradient."""
    bad = set(bad)
    return {"-i": write_shard(path, [0, *(int(t in bad) for t in range(1, rows + 1))])}


def skips(result):
    return [int(k) for k in re.findall(r"^step (\d+): the gradient is not finite", result.err, re.M)]


def reports_late():
    """Where the device computes on its own, a step is reported when the next one is on its way."""
    return not on_cpu() or "lazy" in Program.path


@pytest.mark.numeric
def test_bad_loss():
    """Twenty skipped updates in a row: the run stops, or goes back and passes over the data."""
    if Program.precision == "FP16":
        skip("FP16 holds no number that is this large", 12)
        return
    flags = {**rare_model(), "--on-bad-loss": "rewind"}
    data_of = {"a few": rare_rows("few.bin", range(12, 39)), "many": rare_rows("many.bin", range(12, 290))}
    # the newest one from before the first of them, which stays for it; where there is none, the newest
    for every, back in ((5, 10), (12, 24), (7, 7), (30, 30)):
        result = run({**flags, **data_of["a few"], "-n": every, "-nk": 1, "-o": f"back{every}"})
        said = re.findall(r"^warning: 20 updates in a row were skipped: back from step (\d+) to the "
                          r"checkpoint of step (\d+), and past the data since \(1 of 3 times\)$",
                          result.err, re.M)
        check_equal((result.code, said), (0, [(str(31 + reports_late()), str(back))]), f"-n {every}")
        steps = log_columns(f"back{every}")["step"]
        check_equal(steps, list(range(60)), f"-n {every}: steps in main.log")
        for vain, want in ((True, range(back + 1, 32)), (False, range(1, 61))):
            check_equal([r["step"] for r in metrics(f"back{every}") if ("abandoned" in r) == vain], [*want],
                        f"-n {every}: steps in metrics.jsonl, {'done in vain' if vain else 'the others'}")
        # What is left of the data that cannot be learnt from; on a GPU the row behind it as well: it begins
        # with token 1, and the sum that its LayerNorm takes is more than fp32 holds.
        again = 27 - 20 - reports_late() + (not on_cpu())
        check_equal(skips(result), [*range(12, 32), *range(back + 1, back + 1 + again)],
                    f"-n {every}: steps whose update was skipped")
        check_equal(last_state(f"back{every}")[1]["rewinds"], "1", "times it went back, in the state")
    if enough(2):
        two_rows = {**flags, **data_of["many"], "-z": 2, "-n": 12, "-x": 40}
        judge = run({**two_rows, "-o": "rows_judge"})
        result = run({**two_rows, **ranks(2, 1), "-o": "rows"})
        check_equal((result.code, result.err), (judge.code, judge.err), "two ranks go back")
        check_equal(unlike("rows", "rows_judge"), [], "two ranks that went back")
    result = run({**flags, **data_of["many"], "-n": 10, "-x": 200, "-o": "too_often"})
    said = [result.err.count(text) for text in ("warning: 20 updates", "error: ")]
    check_equal((result.code, said), (1, [3, 1]), f"the fourth time: {result.err[-300:]}")
    check(re.search(r"^error: 20 updates in a row were skipped, after going back 3 times", result.err, re.M),
          f"the fourth time: {result.err[-300:]}")
    result = run({**flags, **data_of["many"], "-n": 0, "-o": "nowhere"})
    check(result.code == 1 and "no checkpoint to go back to" in result.err,
          f"no checkpoint: {result.err[-300:]}")


@pytest.mark.cpu_only
def test_stop_at_bad_loss():
    """--on-bad-loss stop: the last checkpoint stays, and the run can go on from it by going back."""
    if Program.precision == "FP16":
        skip("FP16 holds no number that is this large", 4)
        return
    flags = {**rare_model(), **rare_rows("stop.bin", range(12, 39)), "-n": 12, "-nk": 0}
    result = run({**flags, "-o": "stop"})
    want = f"the run stops after step {31 + reports_late()}, and the last checkpoint is of step 24"
    check(result.code == 1 and want in result.err, f"it stops: {result.code}, {result.err[-300:]}")
    check_equal((steps_of("stop"), left_over("stop")), ([12, 24], []), "checkpoints")
    want = run({**flags, "--on-bad-loss": "rewind", "-o": "stop_judge"})
    result = run({**flags, "--on-bad-loss": "rewind", "-y": 1, "-o": "stop"})
    check_equal((want.code, result.code), (0, 0), "with rewind")
    check_equal(unlike("stop", "stop_judge"), [], "the end")


def rewound(flags, judge, stops):
    """What differs from the judge, in the end, in a run with these stops."""
    title = f"{[(step, number.name, *behind) for step, number, *behind in stops]}"
    flags, wrong = {**flags, "-y": 1, "-o": f"{judge}_{abs(hash(title))}"}, []
    for step, number, *behind in stops + [(10**9, None)]:
        result = interrupted(flags, step, *[number] if number else [], behind="".join(behind))
        if result.code not in ((0, -9) if number == KILL else (0,)):
            wrong.append(f"exit code {result.code}: {result.err[-200:]}")
    return [f"{title}: {what}" for what in wrong + unlike(flags["-o"], judge)]


def check_rewound(name, flags, stories, rewinds):
    if Program.precision == "FP16":
        skip("FP16 holds no number that is this large", 1 + len(stories))
        return
    judge, flags = name + "_judge", {**rare_model(), "--on-bad-loss": "rewind", **flags}
    result = run({**flags, "-o": judge})
    check_equal((result.code, result.err.count("warning: ")), (0, rewinds), f"the judge: {result.err[-300:]}")
    for found in side_by_side(lambda stops: rewound(flags, judge, stops), stories):
        check(not found, "; ".join(found))


@pytest.mark.programs("cpu", "lazy")
@pytest.mark.numeric
def test_kills_around_rewinds():
    """Stopped before, between and after going back: the same bits, and the same number of times."""
    data = rare_rows("rewound.bin", [*range(12, 39), *range(69, 94)])
    check_rewound("rewound", {**data, "-x": 130, "-n": 9},
                  [[(20, TERM)], [(30, KILL)], [(31, KILL, "step 12/")], [(31, KILL, "step 20/")],
                   [(33, KILL), (50, KILL)], [(60, TERM), (75, KILL)],
                   [(10, KILL), (25, TERM), (40, KILL), (85, TERM), (100, KILL)]], 2)


@pytest.mark.programs("cpu", "lazy")
@pytest.mark.numeric
def test_stop_at_a_rewind():
    """A signal in the very step behind the twentieth skipped one, or next to it."""
    rows = 60                               # a step takes long enough to be met
    data = rare_rows("slow.bin", range(11 * rows + 1, 38 * rows + 1), 60 * rows)
    check_rewound("slow", {**data, "-x": 40, "-n": 12, "-z": rows},
                  [[(k, TERM)] for k in (29, 30, 31, 32)], 1)
