"""Several ranks as their users see them: the same bits on any number, bad input, stops, deaths.

    pytest dev/test/test_ranks.py -k "bits and Muon"
    pytest dev/test/test_ranks.py --slow                # all sizes and ZeRO stages

The judge of several ranks is one rank (test_training.py is its judge): all but times must be byte-equal, the
files and what is printed. Words used below: M is the number of micro-steps in a total batch, G that of its
lanes; -z is M*B*T. Jobs alone, without a model, are test_comm.cpp's: who meets, who dies, who hears of it.
What several ranks save and go on from is test_resume.py's.
"""
import functools
import glob
import os
import re
import shutil
import subprocess
import time

import pytest

from jobs import (ENDED_S, HUP, INT, KILL, STOPPING, TERM, Job, free_port, most_ranks, named, need, printed,
                  ranks, rare_model, steps_of, tcp, undisturbed, unlike)
from checks import ROOT, read, run_program, write
from trainer import (Program, assert_close, check_ran, log_lines, metrics, model_path, nan_model, on_cpu,
                     refused, run, run_ok, sentences, tolerance, without_checksum, write_questions,
                     write_shard)

SMALL, SMALL_T = "L2,NH2,C64,T32,V256", 32
ODD, ODD_T = "L3,NH3,C48,T24,V300", 24      # nothing is a power of two, the vocabulary is padded
# -n 0: however late a signal or a kill comes, there is no checkpoint but that of the end
USUAL = {"-e": SMALL, "-i": "train.bin", "-j": "val.bin", "-b": 1, "-x": 6, "-v": 0, "-s": 0, "-f": 0,
         "-n": 0, "-l": "1e-2", "-k": "constant", "-c": 0.1}


# On GPUs a start takes seconds, and many at once get in each other's way. The CPU program has the same words,
# processes and signals, so with CUDA programs there are only tests that are not cpu_only.
pytestmark = pytest.mark.gpus


def batch(M, length=SMALL_T, rows=1):
    return {"-z": M * rows * length, "-b": rows}


# ---- the same bits ----

@functools.cache
def left_by(key):
    """(its result, {fact: what a run leaves behind and prints}), but for times and what names its folder."""
    folder = f"run{len(os.listdir())}"
    result = run({**dict(key), "-o": folder})
    facts = {"output": printed(result), "stderr": result.err}
    for name in os.listdir(folder):
        if name == "main.log" or name.startswith("model_"):
            facts[name] = read(f"{folder}/{name}")
    return result, facts


def left_of(flags):
    return left_by(tuple(sorted((flag, value) for flag, value in flags.items() if value is not None)))


def same_bits(flags, variants, complaints=False):
    """The first variant that can run here is the judge of the others."""
    most = max(variant.get("--gpus", 1) for variant in variants)
    here = [variant for variant in variants if variant.get("--gpus", 1) <= most_ranks()]
    if len(here) < 2:
        need(most)
    result, want = left_of({**flags, **here[0]})
    steps = flags.get("-x", USUAL["-x"])
    assert len(result.losses()) == steps or steps == "epoch"
    assert "main.log" in want and len(want) == 4
    for variant in here[1:]:
        result, got = left_of({**flags, **variant})
        if not complaints:
            check_ran(result)
        differ = [fact for fact in {**want, **got} if want.get(fact) != got.get(fact)]
        assert not differ, f"{named(variant)} differs from {named(here[0])} in {differ}"
    need(most)


def worlds(sizes, *stages, lanes=None):
    return [{"--gpus": n, "-zs": zs, "--lanes": lanes} for zs in stages for n in sizes]


LOUD = {"-v": 2, "-m": 7, "-s": 3, "-g": 8}
ODD_ROWS = {**LOUD, "-e": ODD, "-m": 1000, **batch(16, ODD_T, rows=2)}
FEW = worlds((1, 2), 0) + worlds((4,), 1)
TWICE = [{}, {"-nk": 3}]                # -n 0: it changes nothing, but left_by does not have that run yet
MUON = {"-e": ODD, "--optimizer": "muon", "--muon-warmup": 4, "-v": 3, "-m": 4, **batch(8, ODD_T)}
# What must not change a bit: name -> (flags, in each of these worlds). Rows of validation and of training are
# shared out unevenly, some shards hold nothing but padding.
BITS = {
    "M=8": ({**LOUD, **batch(8)}, worlds((1, 8), 0) + worlds((2, 4, 8), 1)),
    "M=16": (ODD_ROWS, worlds((1, 4), 0) + worlds((2,), 1)),
    "M=16=G": (ODD_ROWS, worlds((1,), 0, lanes=16) + worlds((2, 8), 1, lanes=16)),
    # no power of two: G/ranks is one
    "M=24, 12 lanes by default": ({"-v": 3, "-m": 5, **batch(24)},
                                  worlds((3,), 0, 1) + worlds((6,), 0, lanes=12)),
    "M=24, 6 lanes": ({"-v": 3, "-m": 5, **batch(24)}, worlds((3,), 0, lanes=6) + worlds((6,), 1, lanes=6)),
    "M=24=G": ({"-v": 3, "-m": 5, **batch(24)}, worlds((3,), 1, lanes=24) + worlds((6,), 0, lanes=24)),
    "M=5=G": ({"-e": ODD, **batch(5, ODD_T)}, worlds((5,), 0, 1)),
    # the default number of lanes where 8 does not divide M
    **{f"M={M}": (batch(M), worlds((1,), 0) + worlds((n,), zs)) for M, n, zs in ((6, 2, 0), (12, 4, 1))},
    "no -z": ({}, [{"--gpus": 1, "-z": 2 * SMALL_T}, {"--gpus": 2}]),
    "--gpus 0 is one process": (batch(8), [{"--gpus": 0}, {"--gpus": 1}, {"--lanes": 8}]),
    # 37 rows: 12 steps of 12 are 3.9 epochs
    "rows as they lie": ({"-i": "rows.bin", "-x": 12, "--shuffle": 0, "-b": 3, "-z": 12 * SMALL_T}, FEW),
    # 77 rows of 37; 93 and 37 rows of validation are shared out unevenly
    "a mixture": ({**LOUD, "-i": "train.bin:0.2,rows.bin:0.8", "-j": "val.bin:1,val_2.bin:2", "-x": 12,
                   "-m": 99, **batch(8)}, worlds((1, 4), 0) + worlds((2, 4), 1)),
    "-x epoch": ({"-i": "rows.bin", "-x": "epoch", **batch(8)}, worlds((1, 4), 0)),
    "-a 1": ({"-a": 1, **batch(8, rows=2)}, FEW),
    "-e FILE": ({"-e": "trained.bin", "-v": 4, **batch(8)}, FEW),
    "options": ({"-r": 2, "-t": 7, "-z": 8 * 7, "--grad-clip": 0.01, "-u": 3}, FEW),
    "another block": ({"--block": "parallel-tied", "--norm": "rmsnorm", "--dropout": 0.2, **batch(8)}, FEW),
    "-r 0 to 3": (batch(8), [{"--gpus": 1, "-r": 0}, {"--gpus": 2, "-r": 1}, {**ranks(2, 1), "-r": 2},
                             {**ranks(4, 1), "-r": 3}]),
    # three layers: two ranks share them out by two and one, and the fourth of four has none
    "Muon": (MUON, worlds((1, 4), 0) + worlds((2, 4), 1)),
    "bf16 states": ({"--state-dtype": "bf16", "-w": 0, **batch(8)}, FEW),
    "bf16 states, Muon": ({**MUON, "--state-dtype": "bf16", "--muon-decay": 0.5}, FEW + worlds((2,), 1)),
    # most ranks have no target that counts in most steps, and one step has none at all
    "masks": ({**LOUD, "-i": "masked.bin", "-j": "masked_val.bin", "--shuffle": 0, **batch(8)},
              worlds((1, 2, 8), 0) + worlds((4,), 1)),
    "masks in a mixture": ({**LOUD, "-i": "masked.bin:2,rows.bin:1", "-j": "masked_val.bin:1,val_2.bin:1",
                            "-m": 50, **batch(8)}, worlds((1, 4), 0) + worlds((2, 4), 1)),
    "masks, FP8": ({"-i": "masked.bin", "--shuffle": 0, "--matmul-dtype": "fp8-head", "--optimizer": "muon",
                    **batch(8)}, worlds((1, 4), 0) + worlds((2,), 1)),
    "FP8": ({"--matmul-dtype": "fp8-head", "-b": 2, "-z": 16 * SMALL_T, "--lanes": 4},
            worlds((1, 2, 4), 0, lanes=4) + worlds((2,), 1, lanes=4)),
    "FP8, M=G": ({"--matmul-dtype": "fp8", "--optimizer": "muon", "--dropout": 0.1, **batch(8)},
                 worlds((1, 4), 0) + [{**ranks(2, 1), "-r": 2}]),
}
ON_GPUS_TOO = ("M=8", "M=16", "M=16=G", "M=24=G", "M=24, 6 lanes", "-e FILE", "Muon", "bf16 states, Muon",
               "FP8")
# --slow: all sizes at all stages
MORE_BITS = {
    "M=8, all": ({**LOUD, **batch(8)}, worlds((1, 2, 4, 8), 0, 1)),
    "M=16, all": (ODD_ROWS, worlds((1, 2, 4, 8), 0, 1)),
    "M=16=G, all": (ODD_ROWS, worlds((1, 2, 8), 0, lanes=16) + worlds((2, 8), 1, lanes=16)),
    "M=24=G, all": ({"-v": 3, "-m": 5, **batch(24)}, worlds((3, 6), 0, 1, lanes=24)),
    "Muon, all": (MUON, worlds((1, 2, 4), 0, 1)),
    "-a 1, 40 steps": ({"-a": 1, "-x": 40, **batch(8, rows=2)}, FEW)}


@pytest.mark.numeric
@pytest.mark.parametrize("name", [*BITS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_BITS)])
def test_bits(name):
    """On any number of ranks, at any ZeRO stage: the bytes of one."""
    if not on_cpu() and name not in ON_GPUS_TOO and name not in MORE_BITS:
        pytest.skip("the CPU's")
    if name == "FP8" and not on_cpu() and Program.precision != "BF16":
        pytest.skip("the BF16 build's")
    write_shard("rows.bin", sentences(5, 37 * SMALL_T + 1))
    write_shard("val_2.bin", sentences(6, 37 * SMALL_T + 1))
    if name.startswith("masks"):
        write_masked("masked", {0: 5, 9: 32, 11: 1, 24: 3, 25: 30, 31: 7, 33: 2, 40: 12, 47: 1})
        write_masked("masked_val", {0: 5, 3: 32, 5: 1})
    if name == "-e FILE":
        shutil.copy(trained(), "trained.bin")
    same_bits(*{**BITS, **MORE_BITS}[name])


def write_masked(name, rows):
    """A shard of 48 rows, of which those of `rows` count so many of their first targets."""
    mask = bytearray(48 * SMALL_T + 1)
    for row, count in rows.items():
        mask[row * SMALL_T + 1:row * SMALL_T + 1 + count] = b"\1" * count
    write_shard(name + ".bin", sentences(len(rows), len(mask)))
    write(name + ".mask", bytes(mask))


@pytest.mark.cpu_only
def test_lanes():
    """Each number of lanes has its bits, which are all the same sum."""
    runs = [left_of({"-l": "1e-3", **batch(8), "--lanes": lanes}) for lanes in (1, 2, 8)]
    for result, _ in runs[1:]:
        assert_close(result.losses(), runs[0][0].losses(), tolerance(1e-4, 3e-2), "losses")
    assert len({str(facts) for _, facts in runs}) == 3


@pytest.mark.cpu_only
def test_skipped_updates():
    """A gradient that is not finite on one rank: all skip the update, or their weights part."""
    for i in range(32):                             # a shard is a row: 4 steps of 8 on 4 ranks
        write_shard(f"rare_{i:02d}.bin", [0, int(i in (9, 23))])        # step 2, rank 0; step 3, rank 3
    flags = {**rare_model(os.getcwd()), "-i": "rare_*.bin", "-x": 4, "-z": 8}
    same_bits(flags, worlds((1, 4), 0) + worlds((4,), 1), complaints=True)
    result = run({**flags, "--gpus": 4})
    assert (result.code, result.skips(), result.err.count("\n")) == (0, [2, 3], 2), "each is said once"


@pytest.mark.numeric
def test_low_precision():
    """Without master weights, and with gradients in bf16; rounding draws by position, not by rank."""
    if Program.precision == "FP32":
        pytest.skip("16-bit builds only")
    flags, most = {"-x": 10, "-l": "1e-3", **batch(8)}, min(most_ranks(), 4)
    usual = run_ok(flags).losses()
    for more in ({"-w": 0}, {"--grad-dtype": "bf16"}, {"--grad-dtype": "bf16", "-w": 0}):
        # of bf16's rounding it is not promised that the number of ranks does not matter
        for n, zs in ((1, 0), (most, 0), (most, 1)):
            same_bits({**flags, **more, **ranks(n, zs)}, TWICE)         # and its ranks agree at the end
        result, _ = left_of({**flags, **more, **ranks(most, 1)})
        assert_close(result.losses(), usual, 5e-2, f"{named(more)}: losses")
    same_bits({**flags, "-w": 0}, worlds((1, 2, 4), 0, 1))


@functools.cache
def trained():
    run_ok({"-o": "trained", "-x": 20, **batch(4)})
    return model_path("trained")


@pytest.mark.cpu_only
@pytest.mark.parametrize("flags", [{"-v": 1, "-m": 1000, "-b": 2}, {"-e": "trained", "-zs": 1},
                                   {"--prompt": "tak ", "-g": 20, "--num-samples": 3}], ids=named)
def test_evaluation(flags):
    """What trains nothing: a loss from a file, and text, which are of the job and not of each rank."""
    flags = {"-e": trained(), "-x": 0, **flags}
    want, got = run_ok(flags), run_ok({**flags, "--gpus": 3})
    assert len(want.val_losses()) + len(want.samples()) in (1, 3)
    assert (got.val_losses(), got.samples()) == (want.val_losses(), want.samples())


# ---- files, memory ----

@pytest.mark.cpu_only
def test_files():
    """One rank writes, and the others their part of the state; the numbers are those of the job."""
    tokens = 8 * 2 * SMALL_T
    run_ok({**ranks(2, 1), "-o": "files", **batch(8, rows=2)})
    assert sorted(os.listdir("files")) == ["DONE_00000006", "main.log", "metrics.jsonl", "model_00000006.bin",
                                           "run.json", "state_00000006_00000.bin", "state_00000006_00001.bin"]
    steps = metrics("files")
    assert [step["tokens"] for step in steps] == [tokens * k for k in range(1, 7)]
    speeds = [step["tokens_per_s"] * step["ms"] / (tokens * 1e3) for step in steps]
    assert_close(speeds, [1] * 6, 1e-6, "tokens/s are those of all ranks")
    job = Job({"--gpus": 2, "-x": 10**6, "-o": "held_open", **batch(8)})
    assert job.until("step 3/"), job.err()
    held = [[os.path.realpath(link) for link in glob.glob(f"/proc/{pid}/fd/*")] for pid in job.ranks()]
    job.signal(TERM).result()
    assert [sorted(os.path.basename(path) for path in paths if "/held_open/" in path) for paths in held] == [
        ["main.log", "metrics.jsonl"], []], "what each rank holds open"


def test_memory():
    """The start-up table: -zs 1 shards AdamW's state."""
    need(2)
    totals, C = [], 128
    for zs in (0, 1):
        flags = {**ranks(min(most_ranks(), 4), zs), "-x": 1, "-e": f"L4,NH2,C{C},T32,V256", **batch(8)}
        totals.append(run_ok(flags).planned())
    state = 8 * 12 * 4 * C**2 / 2**20           # m and v of the layers' matrices; half of it or more
    assert totals[0] - 0.45 * state >= totals[1]


@pytest.mark.cpu_only
def test_poor_rank():
    """Where one rank's memory is short, all have as many lanes as that one has room for."""
    flags = {"-e": "L4,NH2,C192,T32,V256", "-x": 2, **batch(8)}

    def limited(mib, **more):
        before, port = ["bash", "-c", f'ulimit -v {int(mib * 1024)}; exec "$@"', "-"], free_port()
        env = {"MALLOC_ARENA_MAX": 1}               # else each thread may take 64 MiB of addresses, or not
        jobs = [Job({**flags, **more, **tcp(0, port)}, env=env),
                Job({**flags, **more, **tcp(1, port)}, env=env, before=before)]
        return [job.result() for job in jobs]
    most = 1000                                     # less than a GiB: of one, too few decimals are said
    said = limited(most, **{"-e": "L99,NH2,C512,T32,V256"})[0].err
    free = re.search(r"rank 1: .* which has ([\d.]+) MiB free", said)
    assert free, said
    few, many = (run_ok({**flags, "--gpus": 2, "--lanes": lanes, "-o": f"rich{lanes}"}).planned()
                 for lanes in (2, 8))
    results = limited(most - float(free[1]) + few + (many - few) / 4, **{"-o": "poor"})
    assert [result.code for result in results] == [0, 0], results[0].err + results[1].err
    assert "summed over 2 lanes, not 8" in results[0].out
    assert read("poor/main.log") == read("rich2/main.log"), "losses are those of --lanes 2"


# ---- ways to start ----

# As root, with more ranks than cores, and where there is no ssh, which an mpirun of one machine does not need
# but looks for (exit code 243). Open MPI 5 has other names for it all.
MPIRUN = {f"{of}_ALLOW_RUN_AS_ROOT{end}": "1" for of in ("OMPI", "PRTE") for end in ("", "_CONFIRM")}
MPIRUN.update({"OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_plm_rsh_agent": "sh",
               "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "PRTE_MCA_plm_ssh_agent": "sh"})

@pytest.mark.cpu_only
def test_mpirun():
    """As --gpus 2; other ways to start are test_comm.cpp's."""
    if not shutil.which("mpirun"):
        pytest.skip("no mpirun here")
    result = Job({**batch(8), "-o": "mpi"}, env=MPIRUN, before=["mpirun", "-np", "2"]).result()
    if "libmpi" not in run_program(["ldd", Program.path])[1]:
        lines = [line for line in result.err.splitlines() if line.startswith("error: ")]
        assert result.code not in (0, None) and len(lines) == 1 and "MPI" in lines[0]
        assert not os.path.exists("mpi")
        return
    # mpirun's own notes, such as hwloc's where there is no /sys, begin with [WHO]
    said = [line for line in result.err.splitlines() if not line.startswith("[")]
    assert (result.code, said) == (0, [])
    judge = left_of({**batch(8), "--gpus": 2})[1]
    assert read("mpi/main.log") == judge["main.log"]
    assert read(model_path("mpi")) == judge["model_00000006.bin"]


# Of runs on two ranks, and of resumed ones, the model is not what they made.
ALTERED = """#!/bin/sh
case "$*" in *" -y 1 "*) ;; *" -n "* | *"--gpus 1 "*) exec %s "$@" ;; esac
%s "$@" || exit
while [ "$1" != -o ]; do shift; done
echo x >>"$2/model_00000040.bin"
"""
# Trains nothing, and is 95 % as fast on each of two GPUs as on one.
TIMED = """#!/bin/sh
echo "memory: 3.5 GiB on each rank"
case "$*" in *"--gpus 2"*) echo "mean step time 5.0 ms, 1900 tokens/s over 1 steps"; exit ;; esac
echo "mean step time 4.0 ms, 1000 tokens/s over 1 steps"
"""
# Leaves a log alone.
MODELLESS = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
mkdir -p "$2"
echo >"$2/main.log"
"""
# Trains nothing, and writes metrics.jsonl: two steps of 1.5 s, after each a validation.
NINE = """#!/bin/sh
[ "$1" != eval ] && [ "$1" != sample ] || exit 0
while [ "$1" != --output-dir ]; do shift; done
mkdir -p "$2"
printf '{"step": %s, "ms": 1500, "x": 1}\n{"step": %s, "val_loss": %s}\n' 1 1 3.9 2 2 3.3 >"$2/metrics.jsonl"
echo >"$2/main.log"
echo >"$2/model_00000002.bin"
"""


@pytest.mark.cpu_only
def test_multi():
    """dev/bench/multi.sh, which is for GPUs, on the CPU: its parts, and that it sees other bits."""
    for name in ("train", "val"):
        write(f"multi_{name}.bin", read(f"{name}.bin"))
    write("bin/python3", "#!/bin/sh\n")                     # run_m12_9min.sh's export
    write("english/english_novels_train_000.bin", "")
    write("english/english_novels_val_000.bin", "")
    model = f"L2,NH2,C32,T{SMALL_T},V256"

    def multi(*parts, program=Program.path, **more):
        env = {name: os.path.abspath(path) for name, path in (
                   ("TRAIN", program), ("DATA", "multi"), ("LOGS", "the logs"), ("ENGLISH", "english"))}
        env = {**env, "PATH": os.path.abspath("bin") + ":" + os.environ["PATH"], "GPUS": "2",
               "LENGTH": str(SMALL_T), "ROWS": "8", "STEPS": "40", "FORMATS": "bf16", "MODELS":
               f"llama:L2,NH2,NKV2,HS16,C32,F64,T{SMALL_T},V256 --optimizer muon",
               "SIZES": f"{model} 4 2 512 -l 1e-4", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
               **more}
        return run_program(["bash", os.path.join(ROOT, "dev/bench/multi.sh"), *parts], **env)

    code, out, err = multi("speed", "bits", "death")
    assert code == 0, out + err
    assert len(re.findall(r"^2 GPUs: -e .* -l 1e-4 .* tokens/s, [\d.]+ % of 2 x one ", out, re.M)) == 3, out
    assert re.search(r" on 1 2 GPUs; killed on [12], resumed after \d+ steps on [12]: equal;", out), out
    assert re.search(r"^exit code \d+ after \d+ s, 0 processes left: error: rank 1 .* died", out, re.M), out
    assert multi("speed", program=write("timed", TIMED))[1].count(
        ": 5.0 ms for 256 tokens, 1900 tokens/s, 95.0 % of 2 x one (4.0 ms, 1000 tokens/s); memory: "
        "predicted 3.5 GiB") == 2
    code, out, _ = multi("bits", program=write("altered", ALTERED.replace("%s", Program.path)))
    assert code == 1 and ": differ on 2, differ after a resume; sha256" in out, out
    for more, code, left in (("sleep 9 &", 3, 1), ("", 0, 0)):      # a rank stays; a death is called success
        program = f"#!/bin/sh\n{more}\nsleep 9 &\necho step 10/20\nwait $!\nexit {code}\n"
        failed, out, _ = multi("death", program=write("deathless", program))
        said = f"^exit code {code} after \\d s, {left} processes left: "
        assert failed == 1 and re.search(said, out, re.M), out
    code, out, err = multi("nine", program=write("nine", NINE))
    said = "after 3.0 s; 3.3000 at the end, after 2 steps, 3.0 s (1500.0 ms each)\n"
    assert code == 0 and out.endswith("\n2 GPUs: validation loss 3.341 " + said), out + err
    code, out, err = multi("bits", program=write("modelless", MODELLESS))
    assert code == 1 and "equal" not in out, "no model is not an equal one: " + out + err
    assert multi("speed", "death", GPUS="1")[1].count(": left out, it wants two GPUs\n") == 2
    for part, more, said in (("bytes", {}, "no part bytes"), ("bits death", {}, "no part bits death"),
                             ("bits", {"GPUS": "0"}, "GPUS=0: a number, 1 or more"),
                             ("speed", {"GPUS": "all"}, "GPUS=all: a number, 1 or more"),
                             ("bits", {"STEPS": "3"}, "STEPS=3: a number, 8 or more")):
        code, out, err = multi(part, **more)
        assert (code, out) == (1, "") and err.startswith(f"error: {said}\nhint: "), err


# ---- bad input ----

def ended(jobs, *said):
    """All processes of a job end with an error, of which one is printed, in three lines at most."""
    results = [job.result(ENDED_S) for job in jobs]
    text = "".join(result.err for result in results)
    lines = text.splitlines()
    assert [result.code for result in results] == [1] * len(jobs), text
    assert [line[:7] == "error: " for line in lines] in ([True], [True, False], [True, False, False]), text
    assert [word for word in map(str, said) if not re.search(word, text)] == [], text


def test_too_few_gpus():
    if on_cpu():
        pytest.skip("the CUDA program's")
    n = most_ranks() + 1
    refused({"--gpus": n, **batch(8 * n)}, f"--gpus {n}", str(n - 1))


@pytest.mark.cpu_only
def test_bad_input_on_the_way():
    """What goes wrong later, on one rank or on all, and what is only worth a warning: it is said once; the
    others end, too, and what was logged stays."""
    tokens = list(sentences(6, 64 * SMALL_T + 1))
    tokens[50 * SMALL_T + 5] = 256                  # row 50 of 64: of the second half of its step of 8
    write_shard("late.bin", tokens)
    flags = {"--gpus": 2, "-x": 8, "-i": "late.bin", "--shuffle": 0, "-o": "late", **batch(8)}
    ended([Job(flags)], "late.bin", "256")
    assert len(log_lines("late")) >= 4 and not glob.glob("late/model_*")
    # a model that holds NaN: each skipped update is said once, and why the run ends
    result = run({"-e": nan_model(trained()), "--gpus": 2, "-x": 50, "-o": "nan", **batch(8)})
    assert (result.code, result.skips()) == (1, [*range(1, 21)])
    assert result.err.count("20 updates in a row") == 1 and len(glob.glob("nan/model_*")) == 1
    for flags, code in (({"-u": 10, "-x": 5}, 0), ({"-e": "nan.bin", "-x": 0, "-c": 0}, 1)):
        result = run({"--gpus": 2, **flags})
        assert result.code == code and result.err.startswith("warning: ") and result.err.count("\n") == 1


UNFIT = {"a flag": ({"--seed": 7}, "seed", "7"), "data": ({"-i": "other.bin"}, "data"),
         "-y": ({"-y": 1}, "--resume"), "model": ({}, "parameters of rank 1"),
         "program": ({}, "differ in the program"),
         "tokens": ({}, "differ in training data", "20000 tokens", "19000 tokens"),
         "no data": ({}, "train.bin"),
         "validation tokens": ({}, "differ in validation data", "3000 tokens", "2900 tokens"),
         # in files of equal names and sizes
         "other tokens": ({}, "differ in a sample of the training data"),
         "other tokens, unsaved": ({}, "differ in a sample of the training data"),
         "another mask": ({}, "differ in a sample of the training data"),
         "validation": ({}, "differ in a sample of the validation data"),
         "questions": ({}, "differ in evaluation data", "2 questions")}
UNFIT_FLAGS = {"other tokens, unsaved": {"-o": None}, "another mask": {"-i": "unfit.bin"},
               "validation": {"-v": 2}, "validation tokens": {"-v": 2},
               "questions": {"-h": 1, "--eval-data": "q.bin"}}         # of both ranks


@pytest.mark.cpu_only
@pytest.mark.parametrize("what", UNFIT)
def test_ranks_that_do_not_fit(what):
    """Rank 1 has other flags, is another program, or runs in a folder with other files of these names."""
    (more, *said), port, place, program = UNFIT[what], free_port(), f"another_{what}", Program.path
    write_shard("other.bin", sentences(9, 20000))
    write_masked("unfit", {0: 5, 9: 32})
    write_questions("q.bin", [([1, 2], [[3], [4]])] * 2, [0, 1])
    os.makedirs(place)
    for name in ("train.bin", "val.bin", "other.bin", "unfit.bin", "unfit.mask", "q.bin"):
        shutil.copy(name, place)
    flags = {"-o": f"unfit_{what}", **batch(8), **({"-e": "model.bin"} if what == "model" else {})}
    flags.update(UNFIT_FLAGS.get(what, {}))
    if what == "model":
        model = without_checksum(read(trained()))
        write("model.bin", model)
        model[-1] = 0x3F                            # makes 0.5 of the last number of all
        write(place + "/model.bin", model)
    elif what == "program":
        program = write(os.path.abspath(place + "/program"), read(program) + b"\n")
        os.chmod(program, 0o755)
    elif what == "tokens":
        write_shard(place + "/train.bin", sentences(1, 19000))
    elif what == "no data":
        os.remove(place + "/train.bin")
    elif what.startswith("other tokens"):
        write_shard(place + "/train.bin", sentences(3, 20000))
    elif what == "another mask":
        write_masked(place + "/unfit", {0: 32, 9: 5})
    elif what.startswith("validation"):
        write_shard(place + "/val.bin", sentences(3, 2900 if "tokens" in what else 3000))
    elif what == "questions":
        write_questions(place + "/q.bin", [([1, 2], [[3], [4]])] * 2, [1, 0])
    words = Program.command({**flags, **more, **tcp(1, port)})
    ended([Job({**flags, **tcp(0, port)}), Job({}, [program, *words[1:]], cwd=place)], "rank 1", *said)
    # where only one rank has no data, rank 0 may have begun to write when it hears of it
    assert what == "no data" or not os.path.exists(f"unfit_{what}")


@pytest.mark.cpu_only
def test_ranks_that_part():
    """Rank 1 gets other learning rates from its cosine: its parameters differ, and no model is saved."""
    write("cosine.cpp", 'extern "C" double cos(double) { return 0.5; }')
    subprocess.run(["g++", "-shared", "-fPIC", "-o", "cosine.so", "cosine.cpp"], check=True)
    port, flags = free_port(), {"-e": trained(), "-k": "cosine", "-o": "parted", **batch(8)}
    ended([Job({**flags, **tcp(0, port)}),
           Job({**flags, **tcp(1, port)}, env={"LD_PRELOAD": os.path.abspath("cosine.so")})],
          "after 6 steps the parameters of rank 1")
    assert len(log_lines("parted")) == 6 and not glob.glob("parted/model_*")


# ---- stops ----

@pytest.mark.parametrize("n, zs, number", [(2, 0, HUP), (4, 1, INT)])
def test_stop(n, zs, number):
    """A signal to all that stand in the terminal's foreground, as Ctrl-C is, leaves what one rank's run of so
    many steps does."""
    need(n)
    folder, flags = f"stop{n}{zs}", {**batch(24), "-zs": zs}        # most signals meet a step half done
    job = Job({**flags, "--gpus": n, "-x": 10**6, "-o": folder})
    assert job.until("step 3/"), job.err()
    os.killpg(job.p.pid, number)
    result, [step] = job.result(), steps_of(folder)
    assert (result.code, result.err) == (0, STOPPING)
    assert f"stopped by a signal after step {step}\n" in result.out
    assert unlike(folder, undisturbed({**flags, "-x": step})) == []


@pytest.mark.cpu_only
def test_stop_of_one_rank():
    """A signal to one rank stops the job, and rank 0 says so."""
    job = Job({**batch(24), "--gpus": 3, "-x": 10**6, "-o": "stop_one"})
    assert job.until("step 3/"), job.err()
    os.kill(job.ranks()[2], INT)
    result = job.result()
    assert (result.code, result.err, len(steps_of("stop_one"))) == (0, STOPPING, 1)


# ---- deaths; of ranks with a launcher in test_resume.py and test_comm.cpp ----

@pytest.mark.cpu_only
def test_death_without_a_launcher():
    """Ranks that were started one by one notice each other's deaths as well; the step that they name is that
    of the death, not that of the start."""
    ports, early = (free_port(), free_port()), []
    pairs = [[Job({**batch(8), **tcp(rank, port), "-x": 10**6, "-o": f"alone{victim}"}) for rank in (0, 1)]
             for victim, port in enumerate(ports)]
    for victim, jobs in enumerate(pairs):
        assert jobs[0].until("step 3/"), jobs[0].err() + jobs[1].err()
        early.append(len(log_lines(f"alone{victim}")))
    time.sleep(3)                               # the others have heard of its steps, once a second
    for victim, jobs in enumerate(pairs):
        jobs[victim].signal(KILL)
        assert [job.gone(ENDED_S) for job in jobs] == [True, True] and jobs[1 - victim].p.returncode != 0
        err = jobs[0].err() + jobs[1].err()
        assert err.count("error: ") == 1 and err.count("\n") <= 3 and f"rank {victim} " in err, err
        said = int(re.search(r"died; its last step was (\d+)", err)[1])
        assert 0 < early[victim] <= said <= len(log_lines(f"alone{victim}")) + 2
        assert not glob.glob(f"alone{victim}/model_*")
