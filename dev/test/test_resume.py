#!/usr/bin/env python3
"""Runs that are stopped, killed, damaged and resumed: in the end they are the run that never stopped.

    python3 dev/test/test_resume.py ./train_gpt2cpu                 # two cores: about a minute
    python3 dev/test/test_resume.py ./train_gpt2cpu --kills 200     # more deaths
    python3 dev/test/test_resume.py build/check/train_gpt2.BF16     # on a GPU
    python3 dev/test/test_resume.py ./train_gpt2cpu -k damage       # only tests whose name contains a word

The judge is the same command, never disturbed: main.log and the last model must be equal to the byte, and so
must each tensor of the last state and what it says of the run; it is read here by a few lines of our own. A
step takes a few milliseconds, so where a signal meets a run is chance: any moment must do.
"""
import functools
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

from test_ranks import enough, named, on_cpu, session_processes, side_by_side
from trainer import *                   # gives: Program, Result, check, check_equal, main, write_shard, ...

T_ROWS = 16
SHAPE = f"L2,NH2,C32,T{T_ROWS},V256"
# 16 rows a step: 24 steps are 4.2 epochs of three small shards
Program.usual = {"-e": SHAPE, "-i": "part_*.bin", "-j": "val.bin", "-b": 1, "-z": 16 * T_ROWS, "-x": 24,
                 "-n": 5, "-v": 6, "-m": 7, "-s": 0, "-f": 0, "-l": "1e-2", "-c": 0.1}
ROWS = (37, 23, 31)
STOPPING = "stopping after the last complete step; Ctrl-C: at once, unsaved\n"


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


# what a resumed run may say otherwise: times, and who computed it on how many ranks
OTHERWISE = re.compile("metrics_bytes|ranks|device|program|flag[.](output-dir|resume|gpus|check-ranks|zero-stage|"
                       "recompute|checkpoint-every|max-steps|keep|major-every)")


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

@functools.lru_cache(None)
def undisturbed_run(key):
    data()
    folder = f"judge{len(os.listdir())}_{abs(hash(key))}"
    result = run({**dict(key), "-o": folder})
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
        try:
            self.out += self.p.communicate(timeout=LIMIT_S)[0]
        except subprocess.TimeoutExpired:
            os.killpg(self.p.pid, signal.SIGKILL)
            self.p.wait()
            return Result(None, "", f"no end after {LIMIT_S} s", self.words)
        self.err_file.seek(0)
        return Result(self.p.returncode, self.out.decode("latin-1"), self.err_file.read().decode("latin-1"),
                      self.words)


def interrupted(flags, step, *signals, words=None):
    """Starts it and sends the signals after the line of that step."""
    started = Started(flags, words)
    started.until(f"step {step}/")
    for number in signals:
        started.p.send_signal(number)
    return started.result()


def resume_words(folder):
    """Nothing but the folder: all else is the run's."""
    return [Program.path, "-y", "1", "-o", folder]


def story(title, flags, stops, alone=False):
    """A run with stops [(step, signal)], each time resumed, and at last to its end. Returns what is wrong.
    alone: resumed by -y 1 and -o only."""
    flags = {**flags, "-y": 1, "-o": f"story_{abs(hash((title, named(flags), alone)))}"}
    judge, wrong, began = undisturbed(flags), [], False
    for step, number in stops + [(10**9, None)]:
        words = resume_words(flags["-o"]) if alone and began else None
        result = interrupted(flags, step, *[number] if number else [], words=words)
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


TERM, KILL, USR1, HUP, INT = (signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


# ---- exact resume ----

def test_exact():
    """Stopped at any step, by any signal, once or again and again; resumed by the same command."""
    check_stories([(f"{number.name} after step {step}", {"-v": 1 + step % 2}, [(step, number)])
                   for step, number in ((1, TERM), (2, INT), (4, KILL), (5, USR1), (6, HUP), (11, KILL), (12, TERM),
                                        (13, INT), (17, KILL), (18, USR1), (22, TERM), (23, KILL))])


def test_after_validation():
    """A signal in a step that was validated before: its loss is logged once."""
    slow = {"-v": 1, "-m": 1, "-n": 0, "-z": 64 * T_ROWS, "-x": 12}     # most of a step's time is training
    check_stories([(f"after step {step}", slow, [(step, TERM)]) for step in range(2, 11)])


def test_alone():
    """Resumed by -y 1 and the folder alone; samples by a prompt that only the run's settings have."""
    loud = {"-s": 5, "-v": 5, "-g": 8, "--prompt": "tak lorin mek "}
    check_stories([(f"{number.name} after step {step}", more, [(step, number), (step + 3, TERM)], True)
                   for step, number, more in ((6, TERM, {}), (11, KILL, loud), (7, INT, loud))])


def test_variants():
    """What changes the arithmetic, the data's order or the times of saving: resumed by -r, -n and -nk of others."""
    again = [(2, TERM), (3, KILL), (7, USR1), (9, KILL), (9, TERM), (15, KILL), (16, INT)]
    variants = [{"-n": 7}, {"-n": 1}, {"-n": 0}, {"-n": 5, "-v": 5, "-s": 5, "-g": 4}, {"-r": 1}, {"-r": 2},
                {"-w": 0}, {"-b": 4}, {"-b": 16}, {"-z": 2 * T_ROWS, "-b": 2, "-x": 200, "-n": 30}, {"-a": 1},
                {"--shuffle": 0}, {"--residual": "layernorm"}, {"-u": 10, "-k": "wsd"}, {"-x": "epoch", "-z": 64}]
    if Program.precision != "FP32":
        variants += [{"--grad-dtype": "bf16"}, {"--grad-dtype": "bf16", "-w": 0}, {"-r": 2, "-w": 0}]
    stories = [(named(more), more, again) for more in variants]
    check_stories(stories + [(f"killed before the first checkpoint: {k}", {}, [(k, KILL)] * 3) for k in (1, 3)])


def check_same_end(title, result, folder, judge):
    """A resumed run that went well and ended as the other one."""
    found = unlike(folder, judge)
    check(result.code == 0 and result.err == "" and not found,
          f"{title}: exit code {result.code}, {result.err.strip()}; differs in {found}")


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
    """What is wrong when the run is resumed after some damage that makes the named files' checkpoints useless."""
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


def test_all_damaged():
    """No checkpoint is left that could be used: one sentence, and everything stays as it is."""
    judge = undisturbed({})
    shutil.copytree(judge, "hopeless")
    for path in glob.glob("hopeless/state_*"):
        flipped(path, os.path.getsize(path) - 9)
    before = snapshot("hopeless")
    result = run({"-y": 1, "-o": "hopeless"})
    lines = result.err.splitlines()
    check_equal((result.code, [line.split(":")[0] for line in lines]),
                (1, ["warning", "warning", "error", "hint"][:len(lines)]), f"the end: {lines}")
    check(len(lines) >= 3 and "hopeless" in lines[2], f"stderr: {lines}")
    check_equal(snapshot("hopeless"), before, "the folder")


# ---- kills at random moments ----

def wait_and_kill(rng, folder, started):
    """Ends it with SIGKILL: at some step, when a file of a save appears or goes, or at any time."""
    before = set(os.listdir(folder)) if os.path.isdir(folder) else set()
    how, end = rng.choice(("part", "part", "part", "marker", "marker", "step", "time")), time.monotonic() + LIMIT_S
    if how == "step":
        started.until(f"step {rng.randrange(1, 40)}/")
    elif how == "time":
        time.sleep(rng.uniform(0, 0.4))
    else:
        def happened():
            new = set(os.listdir(folder)) - before if os.path.isdir(folder) else set()
            return any(name.endswith(".part") if how == "part" else name.startswith("DONE") and "part" not in name
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
    """(what is wrong, how many kills met it alive, how many of them in a save)"""
    rng, folder, alive, in_save, wrong = random.Random(seed), flags["-o"], 0, 0, []
    for _ in range(kills):
        result = wait_and_kill(rng, folder, Started(flags))
        if result.code == 0:
            shutil.rmtree(folder)           # it was faster: once more
            continue
        if result.code != -9:
            wrong.append(f"exit code {result.code}: {result.err}")
        alive += 1
        in_save += os.path.isdir(folder) and left_over(folder) != []
    result = run(flags)
    if result.code:
        wrong.append(f"exit code {result.code}")
    wrong += [line for line in result.err.splitlines() if not line.startswith("warning: the run in -o")]
    wrong += unlike(folder, undisturbed(flags)) + [f"{name} is left" for name in left_over(folder)]
    if steps_of(folder) != expected_steps(flags):
        wrong.append(f"checkpoints {steps_of(folder)}, expected {expected_steps(flags)}")
    return [f"seed {seed}: {what}" for what in wrong], alive, in_save


def test_left_overs():
    """What kills leave at moments that are too short to be met: in a removal, and in writing a marker."""
    folder = "left"
    interrupted({"-o": folder, "-nk": 0}, 20, KILL)
    steps = steps_of(folder)
    if not check(len(steps) >= 3, f"checkpoints before the kill: {steps}"):
        return
    os.remove(f"{folder}/DONE_{steps[0]:08d}")
    os.remove(f"{folder}/DONE_{steps[1]:08d}")
    os.remove(f"{folder}/model_{steps[1]:08d}.bin")
    for name in ("DONE_00000007", "run.json", "model_00000007.bin", "state_00000008_00000.bin"):
        write_bytes(f"{folder}/{name}.{2**22 + 7}.3.part", b"half")
    write_bytes(f"{folder}/model_00000008.bin", b"of the same save as its state")
    write_bytes(f"{folder}/model_00000009.bin", b"somebody's")
    result = run({"-o": folder, "-y": 1, "-nk": 0})
    check_equal((result.code, result.err), (0, ""), "resumed")
    check_equal(left_over(folder), ["model_00000009.bin"], "files that belong to no checkpoint")
    check_equal(unlike(folder, undisturbed({"-nk": 0})), [], "the end")


def test_kills():
    """kill -9 at random moments, many of them in a save; resumed each time, and at last to the end."""
    data()
    kills, seed, lives = Program.numbers["kills"], Program.numbers["seed"], []
    for i in range((kills + 4) // 5):
        flags = {"-n": 1 + i % 4, "-nk": (2, 1, 3, 0)[i // 4 % 4], "-nm": 10 * (i % 2), "-x": 40, "-y": 1}
        undisturbed(flags)
        lives.append(({**flags, "-o": f"life{i}"}, f"{seed}.{i}", min(5, kills - 5 * i)))
    found = side_by_side(lambda life: killed_life(*life), lives)
    for wrong, _, _ in found:
        check(not wrong, "; ".join(wrong))
    alive, in_save = (sum(one[i] for one in found) for i in (1, 2))
    print(f"    {kills} kills: {alive} met a running program, {in_save} of these in a save")
    check(in_save * 5 > alive, f"of {alive} kills only {in_save} were in a save")


if __name__ == "__main__":
    sys.exit(main(__doc__, globals(), kills=(25, "how often test_kills kills"), seed=(1, "of what is random")))
