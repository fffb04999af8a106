"""Runs that are stopped, killed, damaged and resumed: in the end they are the run that never stopped.

    pytest dev/test/test_resume.py -k "fault and DONE"      # what happens around the marker of a checkpoint
    pytest dev/test/test_resume.py --slow               # each fault at each moment on all numbers of ranks

The judge is the same command, never disturbed, on one rank: main.log and the last model must be equal to the
byte, and so must each tensor of the last state and what it says of the run. Bytes of checkpoints that are
damaged, their markers, retention and each call that a disk can refuse are test_checkpoints.cpp's; flags and
their tables test_host.cpp's.
"""
import collections
import contextlib
import errno
import fcntl
import functools
import glob
import json
import os
import random
import re
import shlex
import shutil
import signal
import struct
import termios
import time

import pytest

from checks import ROOT, read, run_program, write
from jobs import (DAY, HUP, INT, KILL, PIPE, STOPPING, TERM, UNREAD, USR1, Fault, Job, fault_environment,
                  last_state, left_over, most_ranks, named, need, ranks, rare_model, steps_of,
                  undisturbed, unlike)
from trainer import (LIMIT_S, Program, flags_of, log_columns, model_path, need_fp8, on_cpu, refused,
                     run, run_ok, sentences, settings_of, snapshot, without_checksum, without_scaling,
                     write_questions, write_shard)

T_ROWS = 16
# 16 rows a step, each a lane: 1, 2, 4 or 8 ranks share them out. 13 steps are 2.3 epochs of three small
# shards.
USUAL = {"-e": f"L2,NH2,C32,T{T_ROWS},V256", "-i": "part_*.bin", "-j": "val.bin", "-b": 1, "-z": 16 * T_ROWS,
         "-x": 13, "-n": 3, "-v": 5, "-m": 7, "-s": 0, "-f": 0, "-l": "1e-2", "-c": 0.1, "--lanes": 16}
MODEL, STATE = "model_%08d.bin", "state_%08d_00000.bin"
ROWS = (37, 23, 31)
OUTPUT = [{}, {"-v": 1}, {"-s": 5, "-g": 8, "--prompt": "tak lorin "}]
SAVES = [{"-n": 3, "-nk": 2}, {"-n": 2, "-nk": 1, "-nm": 5}, {"-n": 3, "-nk": 3}]


@pytest.fixture(autouse=True)
def data():
    """Made once for each folder."""
    for i, rows in enumerate(ROWS):
        if not os.path.exists(f"part_{i}.bin"):
            write_shard(f"part_{i}.bin", sentences(10 + i, rows * T_ROWS + 1 + i))
            write_shard("val_2.bin", sentences(20, 40 * T_ROWS))
            write_questions("questions.bin", [([1, 2], [[3], [4], [5], [6]])], [1])


def judge_of(flags, what=0):
    """Whatever the times of saving are, they have one judge. Its folder; what=1: its result."""
    leave = ("-n", "-nk", "-nm")
    return undisturbed({flag: value for flag, value in flags.items() if flag not in leave}, what)


def resume_words(folder, more=None):
    """Nothing but the folder: all else is the run's."""
    return [Program.path, "-y", "1", "-o", folder,
            *[str(word) for pair in (more or {}).items() for word in pair]]


def same_end(result, folder, judge):
    """It went well and ended as the other one."""
    assert (result.code, without_scaling(result.err)) == (0, "") and unlike(folder, judge) == []


def fails(result, *said):
    """It ends with one error, which has these words."""
    assert result.code == 1 and result.err.count("error: ") == 1
    assert [words for words in said if words not in result.err] == [], result.err


# ---- fault x moment x ranks ----

STARTS = {"1 rank": ranks(1), "2 ranks, zs 1": ranks(2, 1), "4 ranks, zs 0": ranks(4),
          "8 ranks, zs 1": ranks(8, 1)}
# A moment is before a call on a file of this name; which of such calls, and of which rank, is drawn.
WRITES = """fputs main.log | fputs metrics.jsonl | fwrite run.json | fsync run.json | rename run.json
            fsync main.log | fsync metrics.jsonl | fwrite state_ | fsync state_ | rename state_
            fwrite model_ | fsync model_ | rename model_ | fwrite DONE_ | fsync DONE_ | rename DONE_"""
OTHERS = "rename HALF_ | unlink model_ | unlink state_ | unlink HALF_ | ftruncate main.log"
WRITES, OTHERS = ([moment.strip() for moment in re.split(r"[|\n]", text)] for text in (WRITES, OTHERS))
OF_A_RESUME = ["fwrite main.log.cut", "rename main.log.cut", "fsync metrics.jsonl.cut"]
IN_A_STEP = ["fputs main.log", "fputs metrics.jsonl", "fwrite state_", "rename DONE_"]
FAULTS = {"kill": WRITES + OTHERS, "full disk": WRITES,
          **{number.name: IN_A_STEP for number in (TERM, INT, USR1, HUP)}}
MATRIX = [(start, fault, moment) for start in STARTS for fault, moments in FAULTS.items()
          for moment in moments]


def of_today(row):
    """`make test` has, on one rank, every kill and each other fault in a step; of several ranks a kill that
    meets their part of a state, and another row, drawn."""
    start, fault, moment = row
    if start == "1 rank":
        return fault == "kill" or moment == "fputs main.log"
    rng, rows = random.Random(f"{DAY} {start}"), [other for other in MATRIX if other[0] == start]
    return row in (rng.choice([other for other in rows if other[1] == "kill" and "state_" in other[2]]),
                   rng.choice(rows))


@functools.cache
def calls(key, start):
    """{(operation, name): [rank of each call]} of an undisturbed run, whose end is looked at, too."""
    flags, log = dict(key), os.path.abspath(f"calls{abs(hash((key, start)))}")
    job = Job({**flags, **STARTS[start], "-o": log + ".run"}, env=fault_environment(log=log))
    assert job.result().code == 0
    assert unlike(log + ".run", judge_of(flags)) == []
    found = collections.defaultdict(list)
    for line in read(log).decode().splitlines():
        rank, operation, name = line.split(maxsplit=2)
        for kind in ("main.log", "metrics.jsonl", "run.json", "state_", "model_", "DONE_", "HALF_"):
            if kind in name:
                found[operation, kind].append(int(rank))
    return found


def fault_at(rng, flags, start, fault, moment):
    """The n-th of such calls of a rank that has any."""
    operation, name = moment.split()
    by_rank = calls(tuple(flags.items()), start)[operation, name]
    assert by_rank, f"no run comes to {moment}: is this moment gone?"
    rank = rng.choice(sorted(set(by_rank)))
    what = {"kill": KILL, "full disk": -28}.get(fault) or signal.Signals[fault]
    return Fault(operation, name, rng.randint(1, by_rank.count(rank)), what, rank)


def any_kill(rng):
    return Fault(*rng.choice(WRITES + OTHERS + OF_A_RESUME).split(), rng.randint(1, 9), KILL)


def complaints(result):
    """stderr, but for what is said where the first checkpoint had not been written."""
    return re.sub("^warning: the run in -o .*has no checkpoint: it begins anew.*\n", "", result.err)


def meet(flags, words, fault, judge, must):
    """A run with this fault ends as it should; `must`: it has to come to it."""
    result, folder = Job(flags, words, fault=fault).result(), flags["-o"]
    said, finished = complaints(result), steps_of(folder)[-1:] == steps_of(judge)[-1:]
    lines = said.splitlines()
    if result.code == 0 and finished and said in ("", STOPPING):
        assert not must or fault.what > 0 and fault.what != KILL, "the run does not come to it"
    elif fault.what < 0:
        fails(result, "No space left on device", folder)
        assert lines[0][:7] == "error: " and not [name for name in left_over(folder) if ".part" in name]
    elif fault.what == KILL and flags.get("--gpus", 1) == 1:
        assert (result.code, said) == (-9, "")
    elif fault.what == KILL:
        assert result.code == 137 and re.match(rf"error: rank {fault.rank} \(.*pid \d+\) ", said), said
        assert said.count("error: ") == 1 and len(lines) <= 3, said
    else:
        assert (result.code, said) == (0, STOPPING)
        steps = re.findall(r"^stopped by a signal after step (\d+)$", result.out, re.M)
        assert steps == [str(step) for step in steps_of(folder)[-1:]]


def expected_steps(flags):
    """Which checkpoints are left of a run that saved at each multiple of -n and at the end."""
    every, keep, major, last = flags["-n"], flags.get("-nk", 2), flags.get("-nm", 0), flags["-x"]
    saved = [step for step in range(1, last + 1) if step % every == 0 or step == last]
    return [step for step in saved if keep == 0 or step in saved[-keep:] or major and step % major == 0]


def live(rng, flags, faults, starts):
    """Meets these faults, one after the other, and goes on to the end; each time on other ranks."""
    folder, judge, wanted = f"life{len(os.listdir())}", judge_of(flags), judge_of(flags, 1).samples()
    flags = {**Program.usual, **flags, "-y": 1, "-o": folder}
    for number, (fault, start) in enumerate(zip([*faults, None], starts)):
        flags.update(start)
        own = rng.random() < 0.5 and steps_of(folder)
        words = resume_words(folder, start) if own else None
        print(f"    {named(start)}{' by the folder alone' if own else ''}: {fault or 'to the end'}")
        if fault:
            meet(flags, words, fault, judge, number == 0)
    result = Job(flags, words).result()
    assert (result.code, complaints(result)) == (0, "")
    assert unlike(folder, judge) == [] and left_over(folder) == []
    assert result.samples() == wanted[len(wanted) - len(result.samples()):]
    if all(fault.what == KILL for fault in faults):
        assert steps_of(folder) == expected_steps(flags)
    shutil.rmtree(folder)


@pytest.mark.programs("cpu", "asan")
@pytest.mark.cpu_only
@pytest.mark.parametrize("start, fault, moment", [
    pytest.param(*row, id=", ".join(row), marks=[] if of_today(row) else pytest.mark.slow) for row in MATRIX])
def test_fault(start, fault, moment):
    """A rank is killed, or its disk is full, or the job is told to stop, in this call; it goes on, may be
    killed somewhere, and goes on again, on other ranks: the end is that of one rank that never stopped."""
    rng = random.Random(f"{DAY} {start}")                       # not of each moment: `calls` takes a run
    flags = {**rng.choice(SAVES), **rng.choice(OUTPUT)}
    rng = random.Random(f"{DAY} {start} {fault} {moment}")
    others = [rng.choice([ranks(1), *STARTS.values()][:6 if Program.slow else 4]) for _ in range(2)]
    faults = [fault_at(rng, flags, start, fault, moment)]
    faults += [any_kill(rng)] if Program.slow or rng.random() < 0.3 else []
    live(rng, flags, faults, [STARTS[start], *others])


# What changes the arithmetic, the data's order or the times of saving. A run with dropout has its own masks.
LOW = [{"--grad-dtype": "bf16", "--lanes": None, **more} for more in ({"-n": 2}, {"-w": 0})]
MIXTURE = {"-i": "part_[02].bin:0.7,part_1.bin:0.3", "-j": "val.bin:1,val_2.bin:1", "-v": 2}
VARIANTS = [{"-n": 1, "-r": 1, "-a": 1, "--state-dtype": "bf16"},
            {"-n": 0, "-b": 4, "--lanes": None, "--shuffle": 0},
            {"-n": 5, "-nk": 0, "-s": 5, "-g": 4, "-r": 2, "-w": 0},
            {"-z": 2 * T_ROWS, "-b": 2, "-x": 60, "-n": 20, "-u": 10, "-k": "wsd", "--cooldown": 0.6,
             "--lanes": None},
            {"-x": "epoch", "-z": 48, "--lanes": None, "--optimizer": "muon", "--muon-warmup": 9},
            {"-b": 16, "--lanes": None, "--dropout": 0.2, "--block": "parallel-tied", "--norm": "rmsnorm"},
            {"--dropout": 0.1, "--block": "parallel", "-r": 2},
            {"--matmul-dtype": "fp8-head", "-n": 2, "-l": "1e-3"},
            {"-h": 1, "--eval-data": "questions.bin", "--eval-every": 1},
            {"--matmul-dtype": "fp8", "-n": 1, "-r": 2, "-l": "1e-3"}, MIXTURE,
            {"-e": f"llama:L2,NH2,NKV1,HS16,C32,F64,T{T_ROWS},V256,qk_norm", "-r": 3, "-n": 2}]


@pytest.mark.programs("cpu", "lazy")
@pytest.mark.numeric
@pytest.mark.parametrize("flags", VARIANTS + LOW, ids=named)
def test_variant(flags):
    """Stopped, killed, and in the end equal; on one rank."""
    if flags in LOW and Program.precision == "FP32":
        pytest.skip("a 16-bit build's")
    if "--matmul-dtype" in flags:
        need_fp8()
    rng = random.Random(f"{DAY} {named(flags)}")
    faults = [Fault("fputs", "main.log", rng.randint(1, 8), TERM), any_kill(rng)]
    live(rng, flags, faults, [{}] * 3)


# V2000: a tensor of which each rank has a part
ELASTIC = {"2 at zs 1, 4 at 1, 2 at 0": ({"-e": f"L2,NH2,C32,T{T_ROWS},V2000"},
                                         [ranks(2, 1), ranks(4, 1), ranks(2, 0)]),
           "2 at zs 0, 1, 2 at zs 1": ({}, [ranks(2, 0), ranks(1), ranks(2, 1)]),
           "Muon, bf16 states, 1, 2 at zs 1, 4 at 0": ({"--optimizer": "muon", "--state-dtype": "bf16"},
                                                       [ranks(1), ranks(2, 1), ranks(4, 0)]),
           "default lanes, 1, 4 at zs 1, 2": ({"--lanes": None}, [ranks(1), ranks(4, 1), ranks(2)]),
           "mixture, 1, 4 at zs 1, 2": ({"-i": "part_[02].bin:0.7,part_1.bin:0.3"},
                                        [ranks(1), ranks(4, 1), ranks(2)]),
           "3 at zs 1, 6, 6 at zs 1": ({"-z": 12 * T_ROWS, "--lanes": 12, "--gpus": 3},
                                       [ranks(3, 1), ranks(6), ranks(6, 1)])}


@pytest.mark.gpus
@pytest.mark.numeric
@pytest.mark.parametrize("flags, starts", ELASTIC.values(), ids=ELASTIC)
def test_elastic(flags, starts):
    """Stopped on so many ranks, resumed on others, at another ZeRO stage: as one rank that never stopped."""
    need(max(start["--gpus"] for start in starts))
    rng = random.Random(f"{DAY} {starts}")
    faults = [Fault("fputs", "main.log", rng.randint(4, 7), TERM),
              Fault("fputs", "main.log", rng.randint(2, 6), KILL)]
    live(rng, flags, faults, starts)


# ---- flags of a run that goes on ----

@pytest.mark.cpu_only
def test_own_flags():
    """By -y 1 and the folder alone, from elsewhere: the run's own flags, data and ranks, before its first
    checkpoint and after; the closing lines have the command."""
    run_ok({"-x": 1, "-o": "own_origin"})
    model = shutil.copy(model_path("own_origin"), "own_origin.bin")
    flags = {**ranks(2, 1), "-n": 0, "-u": 3, "-k": "constant", "-x": 20, "-e": model}
    judge, own = undisturbed(flags), {**flags, "-x": 10**6, "-o": "own"}
    killed = Job(own, fault=Fault("fputs", "main.log", 4, KILL)).result()
    assert killed.code == 137 and steps_of("own") == []
    os.makedirs("own_elsewhere")
    stopped = Job({}, resume_words(os.path.abspath("own")), cwd="own_elsewhere",
                  fault=Fault("fputs", "main.log", 9, TERM)).result()
    assert stopped.code == 0 and re.fullmatch(
        "warning: the run in -o .*/own has no checkpoint: it begins anew, with the settings "
        f"in its run.json where no flag says otherwise\n{STOPPING}", stopped.err), stopped.err
    [command] = re.findall("^`(.*)` goes on with this run$", stopped.out, re.M)
    os.remove(model)                            # a run that has a checkpoint does not need it
    result = Job({}, shlex.split(command) + ["-x", "20"]).result()
    assert (result.code, result.err) == (0, "")
    assert "launch: --gpus 2, as the run was started" in result.out
    assert [name for name in ("main.log", MODEL % 20)
            if read(f"own/{name}") != read(f"{judge}/{name}")] == []
    given = Job({}, resume_words("own", {"-x": 20, "--gpus": 2})).result()
    assert given.code == 0 and "launch: " not in given.out
    result = Job({}, resume_words("own", {"-x": 20, "--gpus": 1})).result()
    assert "launch: ranks now 1, before 2\n" in result.out
    # what was left open is settled anew where there is no checkpoint
    fault = Fault("fputs", "main.log", 2, KILL)
    begun = Job({"-z": None, "--lanes": None, "-o": "open"}, fault=fault).result()
    assert f"batch: {T_ROWS} tokens a step" in begun.out and steps_of("open") == []
    assert f"batch: {2 * T_ROWS} tokens" in Job({}, resume_words("open", {"--gpus": 2})).result().out


@pytest.mark.cpu_only
def test_own_mixture():
    """A mixture is the run's, too: its paths, from elsewhere, and its shares."""
    home = "own, 1:2"
    for name in ("part_0.bin", "part_1.bin", "part_2.bin", "val.bin", "val_2.bin"):
        os.makedirs(home, exist_ok=True)
        shutil.copy(name, home)
    fault = Fault("fputs", "main.log", 9, TERM)
    assert Job({**MIXTURE, "-o": "mix"}, fault=fault, cwd=home).result().code == 0
    for data in ("part_[02].bin:0.6,part_1.bin:0.4", "part_0.bin:0.7,part_[12].bin:0.3", "part_*.bin"):
        refused({"-i": data, "-y": 1, "-o": f"{home}/mix"}, "training data", "of 10 rows] part_")
    os.makedirs("mix_elsewhere", exist_ok=True)
    result = Job({}, resume_words(os.path.abspath(f"{home}/mix")), cwd="mix_elsewhere").result()
    assert (result.code, result.err) == (0, "") and unlike(f"{home}/mix", undisturbed(MIXTURE)) == [
        "started in", "flag.train-data", "flag.val-data", "flag.eval-data"]


@pytest.mark.numeric
def test_other_lengths():
    """-x, -n, -nk, -r and -v may change: a longer run goes on, a shorter one has nothing to do."""
    flags = {"-k": "constant", "-o": "longer"}
    run_ok({**flags, "-x": 9, "-n": 3})
    result = run({**flags, "-x": 18, "-n": 4, "-r": 2, "-nk": 0, "-y": 1})
    same_end(result, "longer", undisturbed({"-k": "constant", "-x": 18}))
    assert steps_of("longer") == [6, 9, 12, 16, 18]
    before = {path: hashed for path, hashed in snapshot("longer").items() if "json" not in path}
    result = run({**flags, "-x": 5, "-y": 1})
    assert result.code == 0 and "step" not in result.err
    assert {path: hashed for path, hashed in snapshot("longer").items() if "json" not in path} == before


# Of each flag that a run keeps for good: another value that it takes.
FIXED = flags_of("""
--model L1,NH2,C32,T16,V256 --micro-batch 2 --sequence-length 8 --total-batch 512 --learning-rate 0.02
--lr-schedule linear --warmup 3 --final-fraction 0.5 --weight-decay 0 --beta1 0.8 --beta2 0.9 --eps 1e-06
--grad-clip 2 --seed 3 --shuffle 0 --overfit 1 --tf32 1 --master-weights 0 --kernels portable
--grad-dtype bf16 --state-dtype bf16 --lanes 4 --optimizer muon --muon-lr 0.03 --muon-momentum 0.9
--muon-decay 0.1 --block parallel --norm rmsnorm --dropout 0.1
--matmul-dtype fp8-head --cooldown 0.6 --muon-warmup 9 --embedding-rate 3 --head-rate 0.5 --head-chunks 2
--document-mask 1""")


def stopped_run(folder):
    """A run that was stopped after its 9th step."""
    result = Job({"-o": folder}, fault=Fault("fputs", "main.log", 11, TERM)).result()
    assert (result.code, result.err) == (0, STOPPING) and steps_of(folder)
    return folder


@pytest.mark.cpu_only
def test_fixed_flags():
    """What would change the result may not be given otherwise; given as it was, it is all right."""
    stopped_run("fixed")
    again, before = {**dict.fromkeys(USUAL), "-y": 1, "-o": "fixed"}, snapshot("fixed")
    for name, other in FIXED.items():
        fails(run({**again, name: other}), f"{name}", f" {other}: the run in this folder began with ")
    fails(run({**again, "--gpus": 3}), "3 ranks", "hint: a resumed run keeps its batch: ")
    assert snapshot("fixed") == before
    settings = settings_of("fixed")
    as_it_was = {name: settings[name[2:]] for name in FIXED if name != "--sequence-length"}     # left open
    as_it_was.update((name, int(value)) for name, value in as_it_was.items() if isinstance(value, bool))
    shutil.copytree("fixed", "elsewhere/fixed")         # the data's names are relative to where it began
    assert run(again, cwd="elsewhere").code == 0
    same_end(run({**again, **as_it_was}), "fixed", undisturbed({}))
    marked = re.findall(rb"FLAG_FIXED(?:, true)?},", read(os.path.join(ROOT, "llmc/run/run_config.h")))
    assert len(marked) == len(FIXED), "a flag that FIXED lacks"


# Of each flag that a run keeps until the user says otherwise, two values; the first is not the default.
KEPT = {name[2:]: values.split(",") for name, values in flags_of("""
--train-data part_?.bin,./part_?.bin --val-data val.bin,val_2.bin --eval-data questions.bin,./questions.bin
--checkpoint-every 3,4 --keep 3,1 --major-every 4,5 --max-steps 12,13 --skip-loss 40,50 --skip-norm 60,70
--val-every 5,6 --val-batches 7,3 --log-every 2,4 --log-gpu 7,9 --evaluate 1,0
--eval-every 6,4 --sample-every 6,5 --sample-tokens 5,3 --prompt tak,ba --num-samples 2,3
--temperature 0.5,0.7 --top-k 9,8 --top-p 0.75,0.5 --recompute 1,2 --zero-stage 1,0""").items()}
# what concerns one start
NOW = {"output-dir", "resume", "gpus", "process-init", "process-server", "process-folder", "processes",
       "process-rank", "gpus-per-node", "verbose", "plan", "price", "like"}


@pytest.mark.cpu_only
def test_kept_flags():
    """By the folder alone a stopped run goes on as it was, in each flag; what is given anew counts, and from
    then on."""
    first, second = ({"--" + name: values[i] for name, values in KEPT.items()} for i in (0, 1))
    fault = Fault("fputs", "main.log", 9, TERM)
    letters = dict.fromkeys(("-i", "-j", "-x", "-n", "-v", "-m", "-s"))      # USUAL's spellings of these
    stopped = Job({**letters, **first, "-o": "kept_flags"}, fault=fault).result()
    assert stopped.code == 0 and steps_of("kept_flags"), stopped.err
    began = settings_of("kept_flags")
    assert {*began} == {*KEPT, *NOW} | {name[2:] for name in FIXED}, "a flag that no table has"
    wrong = []
    for given, want in (({}, first), (second, second), ({}, second)):
        result = Job({}, resume_words("kept_flags", given)).result()
        assert (result.code, result.err) == (0, ""), result.err
        got = settings_of("kept_flags")
        values = {name: str(int(got[name]) if isinstance(got[name], bool) else got[name]) for name in KEPT}
        wrong += [f"--{name} {value}, not {want['--' + name]}, after {given or 'nothing'}"
                  for name, value in values.items() if value != want["--" + name]]
        wrong += [name for name in began if name not in NOW and name not in KEPT and got[name] != began[name]]
    assert not wrong


@pytest.mark.cpu_only
def test_another_program():
    """What may change the bits of a run that goes on is said; what a state tells of its run, by hand."""
    folder = stopped_run("elsewhere_made")
    program = write(os.path.abspath("another_program"), read(Program.path) + b"\n")
    os.chmod(program, 0o755)
    result = Job({}, [program, *resume_words(folder)[1:]], env={"OMP_NUM_THREADS": 3}).result()
    device = re.search("^device: (.*), precision", result.out, re.M)[1]     # without OpenMP it stays
    notes = [r"program than before \(now (\w+), then (?!\1)\w+\)"]
    if device != Program.device:
        notes += [re.escape(f"device than before (now {device}, then {Program.device})")]
    lines = [f"warning: the run goes on with another {note}: its bits may differ\n" for note in notes]
    assert result.code == 0 and re.fullmatch("".join(lines), result.err), result.err
    step, facts, _ = last_state(folder)
    want = {"position": 16 * step, "tokens": 16 * T_ROWS * step, "total_batch": 16 * T_ROWS, "T": T_ROWS,
            "lanes": 16, "ranks": 1, "precision": Program.precision, "device": device}
    assert step == 13 and {name: facts[name] for name in want} == {name: str(x) for name, x in want.items()}


@pytest.mark.cpu_only
def test_other_runs():
    """Other data, a folder with a run but without -y, folders without a run."""
    folder = stopped_run("ours")
    for i, rows in enumerate(ROWS):
        write_shard(f"other_{i}.bin", sentences(10 + i, rows * T_ROWS + 2 + i))
        write_shard(f"same_names/part_{i}.bin", sentences(20 + i, rows * T_ROWS + 1 + i))
    again = {"-y": 1, "-o": folder}
    refused({"-i": "other_*.bin", **again}, "training data", "other_0.bin 594")
    refused({"-i": "same_names/part_*.bin", **again}, "training data", "other tokens")
    refused({"-i": "part_[01].bin", **again}, "training data")
    os.mkdir("empty")
    same_end(run({"-y": 1, "-o": "empty"}), "empty", undisturbed({}))
    same_end(run({"-y": 1, "-o": "new/er"}), "new/er", undisturbed({}))
    write("began/main.log", b"s:0 trl:5.5 lr:1e-3 norm:1.0\n")
    said = run({"-y": 1, "-o": "began"}).err
    assert re.fullmatch("warning: the run in -o began has no checkpoint: it begins anew\n", said)
    assert unlike("began", undisturbed({})) == []
    settings = b'"settings": {"residual": "layernorm", '         # of a program that had another flag
    write("older/run.json", read("began/run.json").replace(b'"settings": {', settings))
    refused({"-y": 1, "-o": "older"}, "began with --residual layernorm")


@pytest.mark.cpu_only
@pytest.mark.usefixtures("own_folder")
def test_no_such_run():
    """-y 1 where there is no run: by the folder alone an error, which names the runs beside it, of many
    those with the likeliest names. With flags of a run one begins."""
    flags = {"-i": "train.bin", "-e": "L1,NH1,C16,T8,V256", "-b": 1, "-z": 8, "-x": 1, "-v": 0, "-n": 0}
    write_shard("train.bin", sentences(1, 100))
    for name in ("mine", "a\x1b[31m", *(f"other{i:02d}" for i in range(20))):
        write(f"runs/{name}/run.json", b"{}")
    os.makedirs("runs/.hidden")
    os.makedirs("runs/none")
    alone = dict.fromkeys(USUAL)
    told = {"--verbose": -1, "--gpus": 2}               # flags of this start alone
    for folder, more in (("runs/min", {}), ("runs/none", {}), ("runs/min/", told)):
        said = refused({**alone, "-y": 1, "-o": folder, **more}, f"-o {folder}: there is no run to go on",
                       "; runs beside it: mine, a\\x1b[31m, other" if folder != "runs/none" else "mine").err
        assert 5 < said.count(", ") < 15 and "hidden" not in said
    assert "runs beside" in refused({**alone, "-o": None, "eval": "runs/nine"}, "cannot open", "mine, ").err
    assert "beside" not in refused({**alone, "-y": 1, "-o": "alone"}, "no run to go on with").err
    began = run_ok({**alone, **flags, "-y": 1, "-o": "runs/min"})
    assert began.out.startswith("-y 1: there is no run in runs/min, so a new one begins\n")
    assert "so a new one" not in run_ok({**alone, "-y": 1, "-o": "runs/min", "-x": 2}).out


def test_other_libraries():
    """run.json names the libraries and, of cuBLASLt, the algorithm of each product. A run that goes on with
    others says so; no bit of a model or state depends on what it says. Earlier programs wrote neither."""
    folder, judge = stopped_run("libraries"), undisturbed({})
    said = json.loads(read(folder + "/run.json"))
    libraries, pairs = said["set of libraries"], said["algorithms"].split()
    assert re.search(r"glibc \d" if on_cpu() else r"^cuBLASLt \d+\.\d+\.\d+, CUDA \d+\.\d+", libraries)
    assert bool(pairs) != on_cpu() and all(re.fullmatch("[0-9a-f]{8}:[0-9a-f]{8}", pair) for pair in pairs)
    other = "the run goes on with another set of libraries than before "
    other += f"(now {libraries}, then x\\x1b): its bits"
    chosen = "cuBLASLt chooses other algorithms than before: the run's bits"
    rows = [({}, []), ({"set of libraries": "x\x1b"}, [other]), ({"algorithms": "00000000:1 b:"}, []),
            (dict.fromkeys(["set of libraries", "algorithms"]), []), (b"{", []), (None, [])]
    for at in () if on_cpu() else {0, len(pairs) - 1}:
        changed = " ".join([*pairs[:at], pairs[at][:9] + "x" * 8, *pairs[at + 1:]])
        rows += [({"algorithms": changed}, [chosen]),
                 ({"algorithms": changed, "set of libraries": "x\x1b"}, [other, chosen])]
    for changes, warnings in rows:
        again = shutil.copytree(folder, "again")
        os.remove(again + "/run.json")
        if isinstance(changes, dict):
            facts = {name: value for name, value in {**said, **changes}.items() if value is not None}
            changes = json.dumps(facts).encode()
        if changes:
            write(again + "/run.json", changes)
        result = run({"-y": 1, "-o": again})
        assert (result.code, result.err) == (0, "".join(f"warning: {text} may differ\n" for text in warnings))
        now = json.loads(read(again + "/run.json"))
        assert now["set of libraries"] == libraries and {*now["algorithms"].split()} <= {*pairs}
        assert unlike(again, judge) == []
        shutil.rmtree(again)


@pytest.mark.cpu_only
def test_failed_start():
    """A run that fails before its first step is done leaves the folder as it was, or none."""
    for i, row in enumerate([sentences(30 + i, T_ROWS + 1) for i in range(16)]):
        write_shard(f"bad_{i:02d}.bin", list(row) if i != 4 else [300] * (T_ROWS + 1))
    write("kept/notes.txt", b"mine")
    before = snapshot()
    for folder in ("kept", "never"):
        fails(run({"-i": "bad_*.bin", "--shuffle": 0, "-o": folder}), "token id 300")
        assert snapshot() == before


@pytest.mark.programs("cpu", "asan", "lazy")
@pytest.mark.gpus
@pytest.mark.numeric
@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 25))])
def test_kill_at_any_time(seed):
    """kill -9 of a random rank at random times, which no call of a library marks; one rank goes on."""
    rng, folder = random.Random(f"{DAY} {seed}"), f"any_time{seed}"
    flags = {**rng.choice(SAVES), "-x": 40, "-y": 1, "-o": folder}
    judge = judge_of(flags)
    for _ in range(3):
        size = rng.choice([n for n in (1, 2, 4) if n <= most_ranks()])
        job = Job({**flags, **ranks(size, rng.randrange(3))})
        job.when(lambda: len(job.ranks()) == size - (size == 1))
        time.sleep(rng.uniform(0, 0.5 if on_cpu() else 5))
        victims = job.ranks() or [job.p.pid]
        with contextlib.suppress(ProcessLookupError):           # the run may just be over
            os.kill(rng.choice(victims), KILL)
        result = job.result()
        assert result.err.count("error: ") <= 1 and (result.code or steps_of(folder)[-1:] == [40]), result.err
    result = run(flags)
    assert re.fullmatch("(warning: the run in -o .*\n)?", without_scaling(result.err)) and result.code == 0
    assert unlike(folder, judge) == [] and left_over(folder) == []


@pytest.mark.cpu_only
def test_vanished_folder():
    """The run's folder is moved away while it runs, and comes back; what was half written there could not be
    removed, but is when the run goes on."""
    flags = {"-n": 3, "-k": "constant"}
    job = Job({**flags, "-x": 10**6, "-o": "vanishing"})        # there is always a save to come
    job.until("saved ")
    os.rename("vanishing", "vanished")
    result, last = job.result(), steps_of("vanished")[-1]
    assert result.code == 1 and "vanishing" in result.err and result.err.count("error: ") == 1
    os.rename("vanished", "vanishing")
    # farther than the logs went before, so that their *.cut goes
    flags = {**flags, "-x": int(max(log_columns("vanishing")["step"][-1], last)) + 10}
    same_end(run({**flags, "-y": 1, "-o": "vanishing"}), "vanishing", undisturbed(flags))
    assert left_over("vanishing") == []


# ---- damage ----

def flipped(path, at=-1):
    raw = bytearray(read(path))
    raw[at] ^= 1 << at % 8
    write(path, raw)


DONE_13, MODEL_13, STATE_13, OTHER_13 = "DONE_00000013", MODEL % 13, STATE % 13, "state_00000013_00001.bin"
MODEL_12, OTHER_12 = MODEL % 12, "state_00000012_00001.bin"
# What happens to files of the last checkpoints: a flipped bit of this byte; None: they are gone; a copy of
# STATE_13 takes their place. What is said of each checkpoint that is skipped. OTHER_13 is rank 1's.
DAMAGES = [({DONE_13: -1}, [": " + DONE_13]), ({MODEL_13: -1}, [": " + MODEL_13]),
           ({STATE_13: 5}, [": " + STATE_13]), ({STATE_13: -1}, [": " + STATE_13]),
           ({STATE_13: -1, MODEL_12: 2000}, [": " + STATE_13, ": " + MODEL_12]),
           ({OTHER_13: -1}, [f" by rank 1: {OTHER_13} is damaged"]),
           ({DONE_13: None}, []), ({DONE_13: None, STATE_13: 5}, [": " + STATE_13]),
           # without a DONE nothing says that there were two states
           ({DONE_13: None, OTHER_13: None}, [r" by rank \d: the files do not have all of"]),
           ({DONE_13: None, OTHER_13: STATE_13}, [": the files have elements of .* twice"])]


@pytest.mark.cpu_only
@pytest.mark.parametrize("damages, said", DAMAGES, ids=str)
def test_damage(damages, said):
    """A damaged file of a checkpoint is noticed and named, and all ranks take the checkpoint before. A whole
    one that has lost its DONE is marked again. Nothing is removed."""
    flags = {**ranks(1 + (damages.get(OTHER_13, STATE_13) != STATE_13), 1), "-nk": 0}
    judge = undisturbed(flags)
    folder = shutil.copytree(judge, "damaged", dirs_exist_ok=True)
    for name, at in damages.items():
        if at is None:
            os.remove(f"{folder}/{name}")
        elif at == STATE_13:
            shutil.copy(f"{folder}/{at}", f"{folder}/{name}")
        else:
            flipped(f"{folder}/{name}", at)
    files = set(os.listdir(folder))
    result = run({**flags, "-y": 1, "-o": folder})
    lines = "".join(rf"warning: the checkpoint of step \d+ is skipped{words}.*\n" for words in said)
    assert result.code == 0 and re.fullmatch(lines, result.err), result.err
    assert ("the checkpoint of step 13 had no DONE file" in result.out) == (damages == {DONE_13: None})
    assert files <= set(os.listdir(folder)) and unlike(folder, judge) == []
    shutil.rmtree(folder)


@pytest.mark.cpu_only
@pytest.mark.parametrize("at, marked", [(-1, True), (-1, False), (5, True)])
def test_all_damaged(at, marked):
    """No checkpoint is left that could be used: one sentence, and everything stays as it is."""
    folder = shutil.copytree(undisturbed({}), f"hopeless{at}{marked}")
    for path in glob.glob(folder + "/state_*"):
        flipped(path, at)
    for path in glob.glob(folder + "/DONE_*") if not marked else ():
        os.remove(path)
    before = snapshot(folder)
    result = run({"-y": 1, "-o": folder})
    assert result.code == 1 and snapshot(folder) == before
    said = rf"(warning: .*\n){{2}}error: .*{folder}: none of its checkpoints can be used.*\n(hint: .*\n)?"
    assert re.fullmatch(said, result.err), result.err
    for path in glob.glob(folder + "/state_*"):
        os.remove(path)
    if not marked:
        refused({"-y": 1, "-o": folder}, "no state_*.bin to go on from")


@pytest.mark.cpu_only
@pytest.mark.parametrize("number", [1, 6])
def test_unlisted(number):
    """A folder that cannot be read to its end has no fewer checkpoints: one sentence, nothing is changed."""
    folder = shutil.copytree(undisturbed({}), f"unlisted{number}")
    before = snapshot(folder)
    for flags in ({"-y": 1}, {"-y": 1, "-x": 20}, {}):
        fault = Fault("readdir", folder, number, -errno.EIO)
        fails(Job({**flags, "-o": folder}, fault=fault).result(), "cannot list the folder", "output error")
    assert snapshot(folder) == before


# ---- build/checkpoint, which looks at files ----

TOOL = os.path.join(ROOT, "build/checkpoint")


def damaged(raw):
    return raw[:-1] + bytes([raw[-1] ^ 1])


LOOKS = [       # words after the program's name, what becomes of a file's bytes before, what is said
    (f"F/{STATE_13}", {}, ["  step = 13\n", r"flag.prompt = a\\n\\b\n", "tensors, all as they were writ"]),
    (f"--tensors F/{STATE_13}", {}, [r"m.wte +f32 +256 x 32 +all +\w{16}\n", "param.wpe +f32 +16 x 32"]),
    (f"--tensors F/{STATE_13}", {STATE_13: damaged}, ["DAMAGED\n", "NOT SOUND"]),
    (f"F/{STATE_13}", {STATE_13: damaged}, ["  step = 13\n", "NOT SOUND: it is damaged: the data of "]),
    (f"F/{STATE_13}", {STATE_13: lambda raw: raw[:-1]}, ["NOT SOUND: it has .* and its header says"]),
    (f"F/{MODEL_13}", {}, [r"version 3 \(fp32\), maxT 16, V 256, L 2, NH 2, C 32, Vp 256\n", "as it was"]),
    (f"F/{MODEL_13}", {MODEL_13: without_checksum}, ["no checksum: "]),
    (f"F/{MODEL_13}", {MODEL_13: damaged}, ["NOT SOUND: it is damaged"]),
    (f"F/{MODEL_13}", {MODEL_13: lambda raw: raw + b"x"}, [r"NOT SOUND: it has \d+ bytes, .* means \d+"]),
    (f"F/{MODEL_13}", {MODEL_13: lambda raw: raw[:4] + b"\4" + raw[5:]}, ["NOT SOUND: it has version 4"]),
    (f"F/{MODEL_13}", {MODEL_13: lambda raw: b"text"}, ["NOT SOUND: it is neither"]),
    ("F", {}, [": 3 checkpoints\n", r"step 6: [\d.]+ KiB in 3 files, sound\n", "step 13: .*, sound\n"]),
    ("F", {DONE_13: None}, [": 3 checkpoints\n", "in 3 files, sound, but without its DONE file\n"]),
    ("F", {MODEL_13: None, OTHER_12: damaged}, [
        "step 13: NOT SOUND: model_00000013.bin is missing",
        f"step 12: NOT SOUND: {OTHER_12} is damaged: the data of "]),
    ("F", {MODEL_13: damaged}, [f"step 13: NOT SOUND: {MODEL_13} is damaged"]),
    ("F/none", {}, ["error: cannot open 'F/none': No such file"]),
    ("/dev/null", {}, ["error: cannot read '/dev/null': it is a device"]),
    ("F > /dev/full", {}, ["error: cannot write to standard output: No space left"]),
    ("", {}, ["error: no PATH is given\nhint: "]), ("--tensor F", {}, ["error: unknown flag '--tensor'"])]


@pytest.mark.cpu_only
@pytest.mark.skipif(not os.access(TOOL, os.X_OK), reason="no build/checkpoint: make checkpoint")
@pytest.mark.parametrize("words, changes, said", LOOKS)
def test_looking(words, changes, said):
    judge = undisturbed({**ranks(2, 1), "-n": 6, "-nk": 0, "--prompt": "a\n\\b"})
    shutil.rmtree("F", ignore_errors=True)
    shutil.copytree(judge, "F")
    for name, change in changes.items():
        if change:
            write(f"F/{name}", change(read(f"F/{name}")))
        else:
            os.remove(f"F/{name}")
    code, out, err = run_program(f"{TOOL} {words}")
    assert [form for form in said if not re.search(form, out + err)] == [], out + err
    assert code == int("NOT SOUND" in said[-1] or "error" in said[0])


# ---- signals ----

def no_room(pipe):
    """Is it too full for another line of a run? (Its last lines are longer than the others.)"""
    held = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]
    return held > fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) - 150


def stalled(flags):
    """A run that waits for the reader of what it prints."""
    job = Job({"-x": 10**6, "-v": 0, "-n": 0, **flags}, pipe=True)
    process, times, end = None, 0, time.monotonic() + LIMIT_S
    while times < 10:                           # who has no core, or was stopped, does not sleep
        assert job.p.poll() is None and time.monotonic() < end, "the run has ended, or never waits"
        full = no_room(job.p.stdout)
        process = process or full and (job.ranks() or [job.p.pid])[0]
        sleeps = full and read(f"/proc/{process}/stat").rpartition(b")")[2].split()[0] == b"S"
        times = times + 1 if sleeps else 0
        time.sleep(0.01)
    return job


SECOND = [(1, INT, INT, 130), (1, TERM, INT, 130), (1, HUP, HUP, 0), (1, INT, TERM, 0), (1, INT, PIPE, 0),
          (1, PIPE, INT, 0), (2, INT, INT, 130), (2, TERM, TERM, 0)]


@pytest.mark.cpu_only
@pytest.mark.parametrize("n, first, second, code", SECOND)
def test_second_signal(n, first, second, code):
    """A second SIGINT does not wait, another signal after the first does nothing."""
    folder = f"twice{n}_{first.name}_{second.name}"
    job = stalled({**ranks(n), "-o": folder}).signal(first)
    assert job.when(job.err)                    # two of one number that are both on their way are one
    job.signal(second)
    if code:                                    # nobody reads what it prints: it ends by the signal
        job.p.wait(LIMIT_S)
    time.sleep(0.1)
    goes_on, result = job.p.poll() is None, job.result()
    # Ctrl-C may end `| tee` first
    assert (result.code, result.err) == (code, STOPPING if first != PIPE else UNREAD + STOPPING)
    assert (goes_on, len(steps_of(folder))) == (code == 0, int(code == 0))


@pytest.mark.cpu_only
@pytest.mark.parametrize("last", ["launcher", "ranks"])
def test_signal_to_all(last):
    """SIGINT to each process of a job, as pkill and schedulers send it, is one request and said once."""
    folder = f"all_{last}"
    job = stalled({**ranks(2), "-o": folder})
    groups = [job.ranks(), [job.p.pid]]
    for pids in groups if last == "launcher" else groups[::-1]:
        for pid in pids:
            os.kill(pid, INT)
        assert job.when(job.err)
    time.sleep(0.3)                             # rank 0 writes into the full pipe until it is read
    goes_on, result = job.p.poll() is None, job.result()
    assert (goes_on, result.code, result.err, len(steps_of(folder))) == (True, 0, STOPPING, 1)


@pytest.mark.cpu_only
def test_nohup():
    """Where SIGHUP is ignored, it stays so."""
    fault = Fault("fputs", "main.log", 3, HUP)
    job = Job({"-o": "nohup"}, fault=fault, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    same_end(job.result(), "nohup", undisturbed({}))


@pytest.mark.cpu_only
def test_two_processes():
    """A second process on one folder ends with a sentence, and disturbs nothing."""
    flags = {"-x": 150, "-n": 140, "-v": 0}
    job = stalled({**flags, "-o": "shared"})
    before = snapshot("shared")
    for more, said in (({"-y": 1}, "another process is writing this run"), ({}, "already holds a run")):
        fails(run({**flags, **more, "-o": "shared"}), said)
    assert snapshot("shared") == before
    same_end(job.result(), "shared", undisturbed(flags))


# ---- losses that are no numbers ----

def rare_rows(path, bad, rows=300):
    """A row is a step: those in `bad`, counted from 1, have no finite gradient."""
    bad = set(bad)
    return {"-i": write_shard(path, [0, *(int(t in bad) for t in range(1, rows + 1))])}


def reports_late():
    """Where the device computes on its own, a step is reported when the next one is on its way."""
    return not on_cpu() or "lazy" in Program.path


@pytest.mark.numeric
def test_stop_at_bad_loss():
    """After twenty skipped updates in a row the state is saved; -y 1 goes on, with twenty more to come."""
    if Program.precision == "FP16":
        pytest.skip("FP16 holds no number that is this large")
    bad = rare_rows("stop.bin", range(12, 39))
    flags = {**rare_model(os.getcwd()), **bad, "-x": 60, "-n": 12, "-nk": 2, "-o": "stop"}
    last = 31 + reports_late()
    fails(run(flags), f"20 updates in a row were skipped: the run stops after step {last}, and its state is")
    assert (steps_of("stop"), left_over("stop")) == ([24, last], [])
    assert log_columns("stop")["step"] == list(range(last))
    result = run({**flags, "-y": 1})
    # on a GPU the row behind them as well: it begins with token 1, and the sum that its LayerNorm takes is
    # more than fp32 holds
    assert (result.code, result.skips()) == (0, [*range(last + 1, 39 + (not on_cpu()))])
    assert log_columns("stop")["step"] == list(range(60)) and steps_of("stop")[-1] == 60
    nothing = run({**flags, "-o": None})
    fails(nothing, "and there is no checkpoint")
