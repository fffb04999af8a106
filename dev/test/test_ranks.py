"""Several ranks as their users see them: the same bits on any number, ways to start, bad input, ends.

    python3 dev/test/test_ranks.py ./train_gpt2cpu              # two cores: some two minutes
    python3 dev/test/test_ranks.py build/check/train_gpt2.BF16  # as many ranks as there are GPUs; less of it
    python3 dev/test/test_ranks.py ./train_gpt2cpu --quick      # fewer deaths
    python3 dev/test/test_ranks.py ./train_gpt2cpu -k death     # only tests whose name contains a word

The judge of several ranks is one rank (test_training.py is its judge): all but times must be byte-equal,
the files and what is printed. Words used below: M is the number of micro-steps in a total batch, G that of
its lanes; -z is M*B*T. Runs that have nothing to do with each other run side by side. Standard library only.
"""
import concurrent.futures
import functools
import glob
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import time

import pytest

from checks import session_stats
from trainer import (LIMIT_S, LOG_LINE, Program, Result, check, check_close, check_equal,
                     check_ran, check_refused, log_lines, model_path, param_sizes, read_bytes, run,
                     run_ok, sentences, shorten, skip, tolerance, without_checksum, write_bytes,
                     write_shard)

SMALL, SMALL_T = "L2,NH2,C64,T32,V256", 32
ODD, ODD_T = "L3,NH3,C48,T24,V300", 24      # nothing is a power of two, the vocabulary is padded
ENDED_S = 120                               # after a death everything has ended: only a hang takes longer
STOPPING = "stopping after the last complete step; Ctrl-C: at once, unsaved\n"
UNREAD = "nobody reads what is printed: stopping after the last complete step\n"
# -n 0: however late a signal or a kill comes, there is no checkpoint but that of the end
USUAL = {"-e": SMALL, "-i": "train.bin", "-j": "val.bin", "-b": 1, "-x": 6, "-v": 0, "-s": 0, "-f": 0,
         "-n": 0, "-l": "1e-2", "-k": "constant", "-c": 0.1}


# On GPUs a start takes seconds, and many at once get in each other's way. The CPU program has the same words,
# processes and signals, so with CUDA programs there are only tests that are not cpu_only.
pytestmark = pytest.mark.gpus


# ---- this machine ----

def on_cpu():
    return "CPU" in Program.device


def most_ranks():
    """How many ranks can be tested here: on a CPU as many as one likes."""
    if on_cpu():
        return 8
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([word for word in visible.split(",") if word])
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    return listed.count("GPU ")


def enough(ranks, tests=1):
    """Are there GPUs for so many ranks? If not, so many tests are skipped."""
    if ranks <= most_ranks():
        return True
    skip(f"{ranks} ranks need {ranks} GPUs", tests)
    return False


def side_by_side(function, items, workers=None):
    """[function(item)], several at a time. The functions may not check(): counting is for one thread."""
    workers = workers or (max(2, min(8, (os.cpu_count() or 1) // 4)) if on_cpu() else 2)
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return list(pool.map(function, items))


def batch(M, length=SMALL_T, rows=1):
    return {"-z": M * rows * length, "-b": rows}


# ---- the same bits ----


class Left:
    """What a run leaves behind, and prints, but for times and what names its folder."""

    def __init__(self, flags):
        shutil.rmtree(flags["-o"], ignore_errors=True)
        self.result = run(flags)
        out = re.sub(r" \| [\d.]+ ms \| .*", "", self.result.out)
        self.facts = {"output": re.findall(r"^(?:step|val loss|sample) .*", out, re.M),
                      "samples": self.result.samples()}
        for path in glob.glob(flags["-o"] + "/*"):
            name = os.path.basename(path)
            if name == "main.log" or name.startswith("model_"):
                self.facts[name] = read_bytes(path)
        self.facts["stderr"] = self.result.err
        self.settings = os.path.exists(flags["-o"] + "/run.json")

    def losses(self):
        return self.result.losses()


def ranks_of(flags):
    return flags.get("--gpus", 1)


def runs(flags, variants, complaints=False):
    """[(variant, what its run leaves)], of those for which there are GPUs; the others count as skipped."""
    chosen = [v for v in variants if enough(ranks_of(v))]
    numbered = [{**flags, **v, "-o": f"run{i}"} for i, v in enumerate(chosen)]
    left = side_by_side(Left, numbered)
    for one in left:
        if not complaints:
            check_ran(one.result)
    return list(zip(chosen, left))


def named(flags):
    return " ".join(f"{flag} {value}" for flag, value in flags.items() if value is not None)


def same_bits(title, flags, variants, steps=6, complaints=False):
    """The first variant that can run here is the judge of the others."""
    done = runs(flags, variants, complaints)
    if len(done) < 2:
        return
    judge, want = done[0]
    check(len(want.losses()) == steps and "main.log" in want.facts and len(want.facts) == 5,
          f"{title}: {named(judge)} leaves {sorted(want.facts)}")
    for variant, got in done[1:]:
        unlike = [fact for fact in {**want.facts, **got.facts}
                  if want.facts.get(fact) != got.facts.get(fact)]
        if not check(not unlike and got.settings,
                     f"{title}: {named(variant)} differs from {named(judge)} in {unlike}"):
            for a, b in zip(want.facts["output"], got.facts["output"]):
                if a != b:
                    print(f"    {b}\n    expected {a}")
                    break


def worlds(sizes, *stages, lanes=None):
    return [{"--gpus": n, "-zs": zs, "--lanes": lanes} for zs in stages for n in sizes]


@pytest.mark.numeric
def test_world_sizes():
    """Rows of validation and of training are shared out unevenly, some shards hold nothing but padding."""
    loud = {"-v": 2, "-m": 7, "-s": 3, "-g": 8}
    same_bits("M=8", {**loud, **batch(8)}, worlds((1, 2, 4, 8), 0, 1, 2))
    # at -zs 2 each micro-step is a lane; at 0 and 1 there are 8 lanes, or as many as are asked for
    odd = {**loud, "-e": ODD, "-m": 1000, **batch(16, ODD_T, rows=2)}
    same_bits("M=16", odd, worlds((1, 2, 4, 8), 0, 1))
    same_bits("M=16=G", odd, worlds((1,), 0, lanes=16) + worlds((2, 8), 0, 1, lanes=16) +
              worlds((1, 2, 4, 8), 2))


@pytest.mark.numeric
def test_three_ranks():
    """A number of ranks that is no power of two: G/ranks is one; at -zs 2 nothing is asked of it."""
    flags = {"-v": 3, "-m": 5, **batch(24)}
    same_bits("M=24, the default of 12 lanes", flags, worlds((3,), 0, 1) + worlds((6,), 0, 1, lanes=12))
    same_bits("M=24, 6 lanes", flags, worlds((3, 6), 0, 1, lanes=6))
    same_bits("M=24=G", flags, worlds((3,), 0, 1, lanes=24) + worlds((1, 2, 3, 4, 6, 8), 2))
    same_bits("M=5=G", {"-e": ODD, **batch(5, ODD_T)}, worlds((5,), 0, 1, 2) + worlds((1,), 2))
    same_bits("M=35=G", {"-e": ODD, **batch(35, ODD_T)}, worlds((1, 5, 7), 2))


@pytest.mark.cpu_only
def test_few_micro_steps():
    """The default number of lanes where 8 does not divide M: the same on 1 rank as on several."""
    for M, sizes in ((2, (1, 2)), (4, (1, 2, 4)), (6, (1, 2)), (12, (1, 2, 4))):
        same_bits(f"M={M}", batch(M), worlds(sizes, 0) + worlds(sizes[-1:], 1))
    # without -z a step is one micro-step of each rank
    same_bits("no -z", {}, [{"--gpus": 1, "-z": 2 * SMALL_T}, {"--gpus": 2}])


@pytest.mark.cpu_only
def test_lanes():
    """Each number of lanes has its bits, which are all the same sum; the number of ranks has none."""
    flags, losses = {"-l": "1e-3", **batch(8)}, []
    for lanes in (1, 2, 4, 8):
        variants = [{"--lanes": lanes, "--gpus": n, "-zs": zs} for n, zs in ((1, 0), (2, 0), (2, 1))
                    if n <= lanes]
        if lanes > 1:
            same_bits(f"G={lanes}", flags, variants)
        losses.append(runs(flags, variants[:1])[0][1].losses())
    for lanes, got in zip((2, 4, 8), losses[1:]):
        check_close(got, losses[0], tolerance(1e-4, 3e-2), f"losses of {lanes} lanes and of one")
    plain = runs(flags, [{}, {"--gpus": 1}, {"--lanes": 8}])
    check(all(left.facts == plain[0][1].facts for _, left in plain), "--gpus 1 and 8 lanes are the default")


@pytest.mark.cpu_only
def test_epochs():
    """The order of the rows, over the ends of epochs; how many steps one epoch is."""
    write_shard("rows.bin", sentences(5, 37 * SMALL_T + 1))         # 37 rows: 12 steps of 8 are 2.6 epochs
    for shuffle in (1, 0):
        same_bits(f"--shuffle {shuffle}", {"-i": "rows.bin", "-x": 12, "--shuffle": shuffle, **batch(8)},
                  worlds((1, 2, 8), 0) + worlds((4,), 1, 2), steps=12)
    same_bits("-x epoch", {"-i": "rows.bin", "-x": "epoch", **batch(8)}, worlds((1, 4), 0), steps=4)
    same_bits("a row each", {"-i": "rows.bin", "-x": 37, **batch(1, rows=4)}, [{}, {"--lanes": 1}], steps=37)


@pytest.mark.numeric
def test_repeated():
    """Again, the same bytes; and all ranks hold the same parameters at every step."""
    flags = {"-x": 12, "-v": 4, **batch(8)}
    checked = [{**v, "--check-ranks": 1} for v in worlds((1, 2), 0) + worlds((2, 4), 1) + worlds((4,), 2)]
    same_bits("repeated, and --check-ranks 1", flags,
              worlds((4,), 1, 1) + worlds((2,), 0, 0, 2) + checked, steps=12)


@pytest.mark.cpu_only
def test_overfit():
    """-a 1: every micro-step of every rank is the first batch."""
    flags = {"-a": 1, "-x": 40, **batch(8, rows=2)}
    same_bits("-a 1", flags, worlds((1, 2), 0) + worlds((4,), 1, 2), steps=40)
    if enough(2):
        losses = run_ok({**flags, "--gpus": 2}).losses()
        check(losses[0] > 5 and losses[-1] < losses[0] - 2.5, f"loss goes from {losses[0]} to {losses[-1]}")


@pytest.mark.cpu_only
def test_options():
    """What changes the arithmetic, or the memory, changes it alike on all ranks."""
    for more in ({"-r": 2}, {"-t": 7, "-z": 8 * 7},
                 {"--block": "parallel-tied", "--norm": "rmsnorm", "--dropout": 0.2},
                 {"--grad-clip": 0.01, "-u": 3}, {"-z": 4 * 3 * SMALL_T, "-b": 3}):
        same_bits(named(more), {**batch(8), **more}, worlds((1, 2), 0) + worlds((4,), 1, 2))
    same_bits("-r 0, 1 and 2", batch(8), [{"--gpus": 1, "-r": 0}, {"--gpus": 2, "-r": 1},
                                          {"--gpus": 2, "-r": 2, "-zs": 1}])


@pytest.mark.numeric
def test_muon():
    """Three layers, which two ranks share out by two and one, and of which the fourth of four has none."""
    same_bits("Muon", {"-e": ODD, "--optimizer": "muon", "-v": 3, "-m": 4, **batch(8, ODD_T)},
              worlds((1, 2, 4), 0, 1, 2))


@pytest.mark.cpu_only
def test_skipped_updates():
    """A gradient that is not finite on one rank: all skip the update, or their weights part."""
    if Program.precision == "FP16":
        skip("FP16 holds no number that is this large", 4)
        return
    # Whatever the context, the logit of token 1 is very small: where it comes next, the norm is larger than
    # fp32 holds. The learning rate is too small to change that.
    model, C = {"-e": "L1,NH1,C256,T1,V256", "-b": 1, "-l": "1e-6"}, 256
    width = 2 if Program.precision == "BF16" else 4
    run_ok({**model, "-x": 1, "-o": "rare"})
    data, size = without_checksum(read_bytes(model_path("rare"))), sum(param_sizes(1, 256, 1, 1, C, 256))
    for first, value in ((C, -3e38), (size - 2 * C, 0), (size - C, 2**-12)):    # wte of token 1, lnfw, lnfb
        at = 1024 + first * width
        data[at:at + C * width] = struct.pack("<f", value)[4 - width:] * C
    write_bytes("rare.bin", data)
    for i in range(32):                             # a shard is a row: 4 steps of 8 on 4 ranks
        write_shard(f"rare_{i:02d}.bin", [0, int(i in (9, 23))])        # step 2, rank 0; step 3, rank 3
    flags = {**model, "-e": "rare.bin", "-i": "rare_*.bin", "--shuffle": 0, "-x": 4, "-z": 8}
    same_bits("a skipped update", flags, worlds((1, 2, 4), 0, 1, 2), steps=4, complaints=True)
    result = run({**flags, "--gpus": min(most_ranks(), 4), "--check-ranks": 1})
    skips = re.findall(r"^step (\d+): the gradient is not finite.*\n", result.err, re.M)
    check_equal((result.code, skips, result.err.count("\n")), (0, ["2", "3"], 2),
                "skipped updates, each said once")


@pytest.mark.numeric
def test_low_precision():
    """Without master weights, and with gradients in bf16; rounding draws by position, not by rank."""
    if Program.precision == "FP32":
        skip("16-bit builds only", 2)
        return
    flags, ranks = {"-x": 10, "-l": "1e-3", **batch(8)}, min(most_ranks(), 4)
    usual = run_ok(flags).losses()
    same_bits("-w 0", {**flags, "-w": 0}, worlds((1, 2, 4), 0, 1, 2), steps=10)
    for more in ({"-w": 0}, {"--grad-dtype": "bf16"}, {"--grad-dtype": "bf16", "-w": 0}):
        # of bf16's rounding it is not promised that the number of ranks does not matter
        for n, zs in ((1, 0), (ranks, 0), (ranks, 1), (ranks, 2)):
            same_bits("repeated, " + named(more), {**flags, **more, "--gpus": n, "-zs": zs},
                      [{}, {"--check-ranks": 1}], steps=10)
        got = run_ok({**flags, **more, "--gpus": ranks, "-zs": 1}).losses()
        check_close(got, usual, 5e-2, f"{named(more)}: losses")


@pytest.mark.numeric
def test_nccl_order():
    """--reduction nccl: sums in NCCL's own order, which has its own bits for each number of ranks."""
    if on_cpu():
        check_refused("NCCL on a CPU", {"--gpus": 2, "--reduction": "nccl"}, "--reduction")
        return
    flags = {"-x": 10, "-l": "1e-3", **batch(8)}
    tree = run_ok(flags).losses()
    for n in (2, 4):
        if not enough(n, 4):
            continue
        for zs in (0, 1):
            more = {**flags, "--gpus": n, "-zs": zs, "--reduction": "nccl"}
            done = runs(more, [{"--gpus": n}, {"--gpus": n, "--check-ranks": 1}])
            check(done[0][1].facts == done[1][1].facts, f"{n} ranks, -zs {zs}: a repeat gives other bits")
            relative = [a / b for a, b in zip(done[0][1].losses(), tree)]
            check_close(relative, [1] * len(tree), tolerance(1e-5, 1e-2),
                        f"{n} ranks, -zs {zs}: losses over the tree's")


@pytest.mark.cpu_only
def test_evaluation():
    """What trains nothing: a loss from a file, and text, which are of the job and not of each rank."""
    run_ok({"-o": "trained", "-x": 40, **batch(4)})
    model = model_path("trained")
    for title, flags in (("-x 0", {"-v": 1, "-m": 1000, "-b": 2}), ("-e FOLDER", {"-e": "trained", "-zs": 2}),
                         ("--prompt", {"--prompt": "tak ", "-g": 20, "--num-samples": 3})):
        flags = {"-e": model, "-x": 0, **flags}
        want = run_ok(flags)
        check(len(want.val_losses()) + len(want.samples()) in (1, 3), f"{title}: {want.out[-300:]}")
        for n in [n for n in (2, 3) if enough(n)]:
            got = run_ok({**flags, "--gpus": n})
            check_equal((got.val_losses(), got.samples()), (want.val_losses(), want.samples()),
                        f"{title} on {n} ranks")
    same_bits("a model from a file", {"-e": model, **batch(8)}, worlds((1, 2), 0) + worlds((4,), 1, 2))


@pytest.mark.cpu_only
def test_files():
    """One rank writes, and the others their part of the state; the numbers are those of the job."""
    if not enough(2, 7):
        return
    length, rows, M = SMALL_T, 2, 8
    result = run_ok({"--gpus": 2, "-zs": 1, "-o": "files", "-v": 3, **batch(M, rows=rows)})
    check_equal(sorted(os.listdir("files")),
                ["DONE_00000006", "main.log", "metrics.jsonl", "model_00000006.bin", "run.json",
                 "state_00000006_00000.bin", "state_00000006_00001.bin"], "files")
    check_equal(re.findall(r"^step (\d+/\d+)", result.out, re.M), [f"{k}/6" for k in range(1, 7)],
                "step lines")
    with open("files/metrics.jsonl", encoding="utf-8") as f:
        steps = [record for record in map(json.loads, f) if "tokens" in record]
    check_equal([r["tokens"] for r in steps], [M * rows * length * k for k in range(1, 7)], "tokens so far")
    speeds = [r["tokens_per_s"] * r["ms"] / (M * rows * length * 1e3) for r in steps]
    check_close(speeds, [1] * 6, 1e-6, "tokens/s are those of all ranks")
    with open("files/run.json", encoding="utf-8") as f:
        settings = json.load(f)["settings"]
    check_equal([str(settings[name]) for name in ("gpus", "total-batch")], ["2", str(M * rows * length)],
                "settings in run.json")
    job = Job({"--gpus": 2, "-x": 10**6, "-o": "held_open", **batch(M)})
    check(job.until_step(3), f"the run reaches a step: {job.err()}")
    held = [[os.path.realpath(link) for link in glob.glob(f"/proc/{pid}/fd/*")] for pid in job.ranks()]
    held = [sorted(os.path.basename(path) for path in paths if "/held_open/" in path) for paths in held]
    job.p.send_signal(signal.SIGTERM)
    job.result()
    check_equal(held, [["main.log", "metrics.jsonl"], []], "files of the run that each rank holds open")


def test_memory():
    """The start-up table: -zs 1 shards AdamW's state, -zs 2 gradients, too."""
    if not enough(2, 2):
        return
    totals = []
    for zs in (0, 1, 2):
        out = run_ok({"--gpus": min(most_ranks(), 4), "-zs": zs, "-x": 1, "-e": "L4,NH2,C256,T32,V256",
                      **batch(8)}).out
        said = re.search(r"^memory: ([\d.]+) (MiB|GiB) in all", out, re.M)
        totals.append(float(said[1]) * (1024 if said[2] == "GiB" else 1))
    check(totals[0] > totals[1] > totals[2], f"MiB at -zs 0, 1, 2: {totals}")
    state = 8 * 12 * 4 * 256**2 / 2**20         # m and v of the layers' matrices; half of it or more
    check(totals[0] - totals[1] >= 0.45 * state, f"MiB saved by -zs 1: {totals[0] - totals[1]}")


# ---- jobs that the test starts, watches and ends ----

def session_processes(session):
    """[(when it started, pid)] of a session's processes that are alive, its first process left out."""
    return sorted((int(fields[19]), pid) for pid, fields in session_stats(session)
                  if fields[0] not in "ZX" and pid != session)


class Job:
    """A run in the background, in a session of its own, with files for what it prints."""
    made = 0

    def __init__(self, flags, env=None, cwd=None, before=(), stdout=None):
        Job.made += 1
        self.name = f"job{Job.made}_{random.randrange(10**9)}"
        self.flags = flags
        # ends with this test, even if that is killed
        leash = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        words = leash + list(before) + Program.command(flags)
        env = Program.environment(1, **(env or {}))
        with open(self.name + ".out", "wb") as out, open(self.name + ".err", "wb") as err:
            self.p = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=stdout or out, stderr=err,
                                      cwd=cwd, env=env, start_new_session=True)
        self.began = time.monotonic()

    def out(self):
        return read_bytes(self.name + ".out").decode("latin-1")

    def err(self):
        return read_bytes(self.name + ".err").decode("latin-1")

    def ranks(self):
        """Process numbers by rank: the launcher starts them in this order."""
        return [pid for _, pid in session_processes(self.p.pid)]

    def until(self, happened, limit=LIMIT_S):
        """Waits until it happened, or the job has ended."""
        end = time.monotonic() + limit
        while not happened() and self.p.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        return happened()

    def until_step(self, k):
        return self.until(lambda: f"\nstep {k}/" in self.out())

    def gone(self, limit=LIMIT_S):
        """Waits for its end: True if no process was left in time. What was left is ended."""
        end = time.monotonic() + limit
        try:
            self.p.wait(limit)
        except subprocess.TimeoutExpired:
            pass
        left = self.ranks()
        while left and time.monotonic() < end:
            time.sleep(0.05)
            left = self.ranks()
        ended = self.p.poll() is not None and not left
        for pid in left + ([] if self.p.poll() is not None else [self.p.pid]):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.p.wait()
        return ended

    def result(self, limit=LIMIT_S):
        ended = self.gone(limit)
        return Result(self.p.returncode if ended else None, self.out(), self.err(), self.p.args)


kept_ports = []                         # sockets


def free_port(port=0):
    """A port that nobody listens on, this test's own until it ends: given back, it may be anybody's before it
    is used. Beside the socket that keeps it a rank 0 may listen, since both have SO_REUSEADDR. 0: taken."""
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        kept.bind(("127.0.0.1", port))
    except OSError:
        kept.close()
        return 0
    kept_ports.append(kept)
    return kept.getsockname()[1]


def slurm_job():
    """The number of a job whose port, which is made of it, is free."""
    while not free_port(20000 + (job := random.randrange(10**5, 10**7)) % 10000):
        pass
    return job


def all_of(jobs, limit=LIMIT_S):
    return [job.result(limit) for job in jobs]


# ---- ways to start ----

def tcp(rank, port, ranks=2, **more):
    return {"-pi": "tcp", "-ps": f"127.0.0.1:{port}", "-pn": ranks, "-pr": rank, **more}


def torchrun(rank, port, ranks=2):
    return {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port - 1, "TORCHELASTIC_RUN_ID": "test"}


def slurm(rank, job, ranks=2):
    return {"SLURM_PROCID": rank, "SLURM_NTASKS": ranks, "SLURM_LOCALID": rank, "SLURM_NODEID": 0,
            "SLURM_JOB_ID": job, "SLURM_JOBID": job, "SLURM_STEP_ID": 0, "SLURM_NNODES": 1,
            "SLURM_JOB_NODELIST": "localhost", "SLURM_STEP_NODELIST": "localhost",
            "SLURM_NTASKS_PER_NODE": ranks, "SLURM_STEP_NUM_TASKS": ranks}


def check_started(title, jobs, judge):
    """All of a job's processes end well, and it did what `--gpus 2` did."""
    results = all_of(jobs)
    folder = jobs[0].flags["-o"]
    for rank, result in enumerate(results):
        check(result.code == 0 and result.err == "",
              f"{title}, rank {rank}: exit code {result.code}, {result.err}")
        check(rank == 0 or result.out == "", f"{title}: rank {rank} prints {shorten(result.out)}")
    same = os.path.exists(folder + "/main.log") and read_bytes(folder + "/main.log") == judge["main.log"]
    check(same and read_bytes(model_path(folder)) == judge["model_00000006.bin"],
          f"{title}: main.log or the model differs from --gpus 2's")


@pytest.mark.cpu_only
def test_ways_to_start():
    """tcp, fs, torchrun's and SLURM's variables, mpirun: all as --gpus 2."""
    if not enough(2, 20):
        return
    flags = {"-v": 3, **batch(8)}
    judge = Left({**flags, "--gpus": 2, "-o": "local"}).facts
    port = free_port()
    check_started("tcp", [Job({**flags, **tcp(r, port), "-o": "tcp"}) for r in (0, 1)], judge)
    # the other first, and rank 0 a while later; more processes than GPUs a node is for the launcher to know
    jobs = [Job({**flags, **tcp(1, port), "-pg": 2, "-o": "tcp2"})]
    time.sleep(0.5)
    check_started("tcp, rank 0 late", [Job({**flags, **tcp(0, port), "-pg": 2, "-o": "tcp2"})] + jobs, judge)
    os.mkdir("meet")
    for again in ("fs", "fs2"):                     # the folder may be used again
        shared = {**flags, "-pi": "fs", "-pf": "meet", "-pn": 2, "-o": again}
        check_started(again, [Job({**shared, "-pr": r}) for r in (0, 1)], judge)
        check_equal(os.listdir("meet"), [], "what a rendezvous leaves in its folder")
    for name, variables, place in (("torchrun", torchrun, free_port()),
                                   ("slurm", slurm, slurm_job())):
        jobs = [Job({**flags, "-o": name}, env=variables(r, place)) for r in (0, 1)]
        check_started(name, jobs, judge)


# As root, with more ranks than cores, and where there is no ssh, which an mpirun of one machine does not need
# but looks for (exit code 243). Open MPI 5 has other names for it all.
MPIRUN = {f"{of}_ALLOW_RUN_AS_ROOT{end}": "1" for of in ("OMPI", "PRTE") for end in ("", "_CONFIRM")}
MPIRUN.update({"OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_plm_rsh_agent": "sh",
               "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "PRTE_MCA_plm_ssh_agent": "sh"})


@pytest.mark.cpu_only
def test_mpirun():
    if not shutil.which("mpirun") or not enough(2, 3):
        skip("no mpirun here", 3)
        return
    flags = {"-v": 3, "-o": "mpi", **batch(8)}
    judge = Left({**flags, "--gpus": 2, "-o": "local"}).facts
    libraries = subprocess.run(["ldd", Program.path], capture_output=True, text=True, check=False).stdout
    mpirun = ["mpirun", "-np", "2"]
    if "libmpi" in libraries:
        check_started("mpirun", [Job(flags, env=MPIRUN, before=mpirun)], judge)
        return
    result = Job(flags, env=MPIRUN, before=mpirun).result()
    lines = [line for line in result.err.splitlines() if line.startswith("error: ")]
    check(result.code not in (0, None) and len(lines) == 1 and "MPI" in lines[0],
          f"a program without MPI says so, once: {result.code}, {result.err}")
    check(not os.path.exists("mpi"), "nothing was written")


@pytest.mark.cpu_only
def test_poor_rank():
    """Where one rank's memory is short, all have as many lanes as that one has room for."""
    if not on_cpu():
        skip("the memory of a GPU cannot be limited", 4)
        return
    flags = {"-e": "L4,NH2,C384,T32,V256", "-x": 2, **batch(8)}

    def limited(mib, **more):
        before, port = ["bash", "-c", f'ulimit -v {int(mib * 1024)}; exec "$@"', "-"], free_port()
        return [Job({**flags, **more, **tcp(0, port)}), Job({**flags, **more, **tcp(1, port)}, before=before)]
    refused = all_of(limited(1200, **{"-e": "L99,NH2,C512,T32,V256"}))[0].err
    free = re.search(r"rank 1: .* which has ([\d.]+) MiB free", refused)
    if not check(free, f"what a rank under ulimit -v has free: {refused}"):
        return
    few, many = (float(re.search(r"^memory: ([\d.]+) MiB in all", run_ok(
        {**flags, "--gpus": 2, "--lanes": lanes, "-o": f"rich{lanes}"}).out, re.M)[1]) for lanes in (2, 8))
    results = all_of(limited(1200 - float(free[1]) + few + (many - few) / 4, **{"-o": "poor"}))
    check_equal([result.code for result in results], [0, 0], f"exit codes: {results[0].err}{results[1].err}")
    check("summed over 2 lanes, not 8" in results[0].out, f"rank 0 says so: {results[0].out[:300]}")
    check(read_bytes("poor/main.log") == read_bytes("rich2/main.log"), "losses are those of --lanes 2")


# ---- bad input ----

def refused_jobs(name, jobs, *said, code=1, limit=LIMIT_S):
    """All processes of a job end with an error, of which one is printed, in three lines at most."""
    results = all_of(jobs, limit)
    lines = "".join(result.err for result in results).splitlines()
    problems = [f"exit code {r.code} of rank {i}" for i, r in enumerate(results) if r.code != code]
    once = [line.startswith("error: ") for line in lines] == [True] + [False] * (len(lines) - 1)
    if not once or len(lines) > 3:
        problems.append(f"{len(lines)} lines on stderr")
    problems += [f"stderr lacks '{text}'" for text in said if str(text) not in "\n".join(lines)]
    if not check(not problems, f"{name}: " + "; ".join(problems)):
        print("    " + "\n    ".join(lines[:8]))


def test_bad_flags():
    """In numbers and in combinations; whatever is wrong is said once, however many ranks see it."""
    tokens = SMALL_T
    cases = [
        ({"--gpus": -1}, "--gpus", "'-1'"), ({"--gpus": 65}, "--gpus", "0 to 64", "'65'"),
        ({"--gpus": "two"}, "--gpus", "'two'"), ({"-zs": 3}, "-zs", "'3'"), ({"-zs": -1}, "-zs", "'-1'"),
        ({"--lanes": -1}, "--lanes", "'-1'"), ({"--check-ranks": 2}, "--check-ranks", "'2'"),
        ({"--reduction": "ring"}, "--reduction", "ring", "tree"),
        ({"--start-timeout": 0}, "--start-timeout", "'0'"), ({"-pi": "udp"}, "-pi", "udp", "tcp"),
        # 5 and 13 micro-steps do not share out; the -z that is proposed does
        ({"--gpus": 2, "-z": 5 * tokens}, f"-z {5 * tokens}", f"use -z {4 * tokens}"),
        ({"--gpus": 2, "-z": tokens}, f"-z {tokens}", f"use -z {2 * tokens}"),
        ({"--gpus": 2, "-z": 8 * tokens, "--lanes": 3}, "--lanes 3"),
        ({"--gpus": 2, "-z": 8 * tokens, "--lanes": 16}, "--lanes 16"),
        ({"--gpus": 2, "-z": 8 * tokens, "--lanes": 1}, "--lanes 1"),
        ({"-z": 24 * tokens, "--lanes": 6}, "--lanes 6"), ({"-z": 24 * tokens, "--lanes": 5}, "--lanes 5"),
        ({"--gpus": 2, "-z": 16 * tokens, "--lanes": 8, "-zs": 2}, "--lanes 8", "-zs 2"),
        ({"-pn": 2}, "-pn"), ({"-pr": 1}, "-pr"), ({"-pi": "tcp", "-pn": 2, "-pr": 0}, "-ps"),
        ({"-pi": "tcp", "-ps": "127.0.0.1", "-pn": 2}, "-pr"),
        ({"-pi": "tcp", "-ps": "127.0.0.1", "-pn": 2, "-pr": 2}, "-pr 2"),
        ({"-pi": "tcp", "-ps": "127.0.0.1:99999", "-pn": 2, "-pr": 0}, "99999"),
        ({"-pi": "fs", "-pn": 2, "-pr": 0}, "-pf"),
        ({"--gpus": 2, "-pi": "tcp", "-ps": "127.0.0.1", "-pn": 2, "-pr": 0}, "--gpus"),
    ]
    if enough(4):
        cases += [({"--gpus": 4, "-z": 13 * tokens}, f"-z {13 * tokens}", f"use -z {12 * tokens}"),
                  ({"--gpus": 4, "-z": 8 * tokens, "--lanes": 2}, "--lanes 2")]
    if enough(3):
        cases += [({"--gpus": 3, "-z": 24 * tokens, "--lanes": 8}, "--lanes 8")]
    if not on_cpu():
        n = most_ranks()
        cases += [({"--gpus": n + 1, "-z": 8 * (n + 1) * tokens}, f"--gpus {n + 1}", str(n))]
    for flags, *said in cases:
        check_refused(named(flags), flags, *said)
    same_bits("--gpus 0 is one process", batch(8), [{"--gpus": 0}, {"--gpus": 1}])
    for variables in (torchrun(0, free_port()), slurm(0, 4711)):
        jobs = [Job({"--gpus": 2, "-o": "no", **batch(8)}, env=variables)]
        refused_jobs("--gpus within a job that another program started", jobs, "--gpus")
        check(not os.path.exists("no"), "a refused run writes nothing")


@pytest.mark.cpu_only
def test_bad_input_of_all():
    """A file that no rank can read, a folder that none can write: one rank speaks for all."""
    write_bytes("plain_file", b"x")
    write_bytes("not_a_model.bin", b"\0" * 2000)
    for n in [n for n in (2, 3) if enough(n, 5)]:
        flags = {"--gpus": n, "-z": 8 * n * SMALL_T}
        check_refused(f"no data on {n} ranks", {**flags, "-i": "no_such.bin"}, "no_such.bin")
        check_refused(f"no validation data on {n} ranks", {**flags, "-v": 1, "-j": "no_val.bin"},
                      "no_val.bin")
        check_refused(f"a bad model on {n} ranks", {**flags, "-e": "not_a_model.bin"}, "not_a_model.bin")
        check_refused(f"a bad folder on {n} ranks", {**flags, "-o": "plain_file/run"}, "plain_file/run")
        check_refused(f"too long a prompt on {n} ranks", {**flags, "-s": 1, "--prompt": "a" * 99}, "99")


def nan_model():
    shutil.rmtree("seed", ignore_errors=True)
    run_ok({"-x": 1, "-o": "seed"})
    data, width = without_checksum(read_bytes(model_path("seed"))), 2 if Program.precision == "BF16" else 4
    data[1024:1024 + width] = (b"\xc0\x7f" if width == 2 else b"\0\0\xc0\x7f")      # wte[0] = NaN
    return write_bytes("nan.bin", data)


@pytest.mark.cpu_only
def test_warnings():
    """What every rank could say is said once."""
    if not enough(2, 2):
        return
    for flags, code in (({"-u": 10, "-x": 5}, 0), ({"-e": nan_model(), "-x": 0, "-c": 0}, 1)):
        result = run({"--gpus": 2, **flags})
        lines = result.err.splitlines()
        check(result.code == code and len(lines) == 1 and lines[0].startswith("warning: "),
              f"{named(flags)}: {result.code}, {lines}")


@pytest.mark.cpu_only
def test_bad_input_on_the_way():
    """What goes wrong later, on one rank or on all: once, the others end too, what was logged stays."""
    if not enough(2, 8):
        return
    rows = 64
    tokens = list(sentences(6, rows * SMALL_T + 1))
    tokens[50 * SMALL_T + 5] = 256                  # row 50 of 64: of the second half of its step of 8
    write_shard("late.bin", tokens)
    flags = {"--gpus": 2, "-x": 8, "-i": "late.bin", "--shuffle": 0, "-o": "late", **batch(8)}
    refused_jobs("a bad token", [Job(flags)], "late.bin", "256")
    check(len(log_lines("late")) >= 4, "the steps before are in main.log")
    check_equal(glob.glob("late/model_*"), [], "checkpoints of a run that failed")
    # a model that holds NaN: each skipped update is said once, and why the run ends
    result = run({"-e": nan_model(), "--gpus": 2, "-x": 50, "-o": "nan", **batch(8)})
    skips = re.findall(r"^step (\d+): the gradient is not finite", result.err, re.M)
    if Program.precision != "FP16":
        check_equal((result.code, skips), (1, [str(k) for k in range(1, 21)]), "skipped updates")
    check_equal(result.err.count("20 updates in a row"), 1, "the reason of the end, once")
    # a disk that takes no checkpoint

    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))
    full = run({"--gpus": 2, "-o": "full", **batch(8)}, preexec_fn=small_files)
    check(full.code == 1 and full.err.count("error: ") == 1 and "cannot write" in full.err and
          len(full.err.splitlines()) <= 3, f"a full disk: {full.code}, {full.err}")
    check_equal(glob.glob("full/model_*"), [], "checkpoints, whole or half")


def unfit_files(flags):
    """The same flags, but rank 1 runs in a folder with other files of these names, or is another program."""
    os.mkdir("another")
    for name in ("train.bin", "val.bin"):
        shutil.copy(name, "another")
    run_ok({"-x": 1, "-o": "of_both"})
    model = without_checksum(read_bytes(model_path("of_both")))
    write_bytes("model.bin", model)
    model[-1] = 0x3F                                # makes 0.5 of the last number of all
    write_bytes("another/model.bin", model)
    program = Program.path
    write_bytes("another/program", read_bytes(program) + b"\n")
    os.chmod("another/program", 0o755)

    def refused(name, *said, path=program, **more):
        port = free_port()
        jobs = [Job({**flags, **more, **tcp(0, port)})]
        Program.path = path
        jobs.append(Job({**flags, **more, **tcp(1, port)}, cwd="another"))
        Program.path = program
        refused_jobs(name, jobs, "rank 1", *said)
    refused("a rank with another model", "parameters of rank 1", **{"-e": "model.bin"})
    refused("a rank that is another program", "differ in the program",
            path=os.path.abspath("another/program"))
    write_shard("another/train.bin", sentences(1, 19000))
    refused("a rank with other data", "differ in training data", "20000 tokens", "19000 tokens")


@pytest.mark.cpu_only
def test_bad_job():
    """Processes that do not fit together, or do not meet."""
    if not enough(2, 16):
        return
    flags = {"-o": "unfit", **batch(8)}
    write_shard("other.bin", sentences(9, 20000))
    os.mkdir("elsewhere")
    shutil.copy("val.bin", "elsewhere/val.bin")
    for name, other, *said in (("learning rate", {"-l": "3e-4"}, "learning-rate", "0.0003"),
                               ("batch", {"-z": 16 * SMALL_T}, "total-batch"),
                               ("seed", {"--seed": 7}, "seed", "7"), ("data", {"-i": "other.bin"}, "data"),
                               ("-zs", {"-zs": 1}, "zs|zero"), ("-y", {"-y": 1}, "--resume")):
        port = free_port()
        jobs = [Job({**flags, **tcp(r, port), **(other if r else {})}) for r in (0, 1)]
        results = all_of(jobs)
        text = "".join(result.err for result in results)
        fits = [result.code for result in results] == [1, 1] and text.count("error: ") == 1
        check(fits and len(text.splitlines()) <= 3 and "rank 1" in text and
              all(re.search(word, text) for word in said), f"ranks with another {name}: {text}")
    unfit_files(flags)
    port = free_port()
    blind = {**flags, "-o": "blind"}                # rank 0 may have begun to write when it hears of it
    jobs = [Job({**blind, **tcp(0, port)}), Job({**blind, **tcp(1, port)}, cwd="elsewhere")]
    refused_jobs("a rank without the data", jobs, "rank 1", "train.bin")
    # those that never meet, all at the same time
    soon = {**flags, "--start-timeout": 3}
    meet = {**soon, "-pi": "fs", "-pn": 2}
    lonely = [("rank 1 never comes", Job({**soon, **tcp(0, free_port())}), "rank 1"),
              ("rank 0 never comes", Job({**soon, **tcp(1, free_port())}), "127.0.0.1"),
              ("nobody writes the file", Job({**meet, "-pf": "elsewhere", "-pr": 1}), "elsewhere")]
    lonely += [(f"-pf {name}", Job({**meet, "-pf": folder, "-pr": 0}), folder) for name, folder in
               (("a file", "train.bin"), ("in /proc", "/proc/meet"), ("missing", "no/such/folder"))]
    for name, job, said in lonely:
        refused_jobs(name, [job], said)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused_jobs("a port in use", [Job({**soon, **tcp(0, port)})], port, "in use")
    check(not os.path.exists("unfit"), "a job that did not start writes nothing")


# ---- stops ----

def check_stopped(name, result, folder, flags):
    """The model of the last complete step, that of a run of so many steps on one rank."""
    check_equal(result.code, 0, f"{name}: exit code")
    if not os.path.exists(folder + "/main.log"):
        check(False, f"{name}: no main.log: {result.err}")
        return
    lines = read_bytes(folder + "/main.log").decode().splitlines()
    check(all(LOG_LINE.fullmatch(line) for line in lines), f"{name}: main.log's lines are whole")
    steps = sum(" trl:" in line for line in lines)
    check_equal(glob.glob(folder + "/model_*"), [f"{folder}/model_{steps:08d}.bin"], f"{name}: checkpoints")
    check(f"stopped by a signal after step {steps}\n" in result.out, f"{name}: the output says why it ended")
    whole = run_ok({**flags, "-x": steps, "-o": folder + "_whole"})
    check(len(whole.losses()) == steps and read_bytes(model_path(folder)) ==
          read_bytes(model_path(folder + "_whole")), f"{name}: the model of {steps} steps is another one")


def test_stop():
    """A signal to the launcher, or Ctrl-C: to all that stand in the terminal's foreground."""
    flags = batch(24)                               # most signals meet a step half done
    for i, (n, zs, number, group) in enumerate(((2, 0, signal.SIGINT, False), (2, 1, signal.SIGTERM, False),
                                                (4, 2, signal.SIGINT, True), (2, 2, signal.SIGTERM, True),
                                                (2, 1, signal.SIGUSR1, False))):    # SLURM's warning
        if not enough(n, 6):
            continue
        lanes = {"--gpus": 1, "-zs": 2} if zs == 2 else {}
        job = Job({**flags, "--gpus": n, "-zs": zs, "-x": 10**6, "-v": 10**5, "-o": f"stop{i}"})
        check(job.until_step(3 + i), f"the run reaches a step: {job.err()}")
        (os.killpg if group else os.kill)(job.p.pid, number)
        result = job.result()
        name = f"{number.name} to {'the group of ' if group else ''}{n} ranks"
        check_equal(result.err, STOPPING, f"{name}: stderr")
        check_stopped(name, result, f"stop{i}", {**flags, **lanes})


@pytest.mark.cpu_only
def test_stop_of_one():
    """Where each rank was started by itself, a signal to any of them, or to all, stops the job."""
    if not enough(2, 12):
        return
    flags = batch(24)
    for i, (number, told) in enumerate(((signal.SIGUSR1, (1,)), (signal.SIGHUP, (0,)),
                                        (signal.SIGTERM, (0, 1)))):
        port, folder = free_port(), f"told{i}"
        jobs = [Job({**flags, **tcp(r, port), "-x": 10**6, "-s": 10**6, "-o": folder}) for r in (0, 1)]
        check(jobs[0].until_step(3), f"the run reaches a step: {jobs[0].err()}")
        for rank in told:
            jobs[rank].p.send_signal(number)
        results = all_of(jobs)
        lines = "".join(result.err for result in results).splitlines(keepends=True)
        check(set(lines) <= {STOPPING} and results[1].code == 0,
              f"signal to {told}: {results[1].code}, {lines}")
        check("sample" not in results[0].out.split("stopped by")[-1], f"signal to {told}: samples afterwards")
        check_stopped(f"signal to {told}", results[0], folder, flags)


@pytest.mark.cpu_only
def test_stop_inside():
    """A signal in a long validation, long samples, or before the first step is complete."""
    if not enough(2, 9):
        return
    write_shard("long_val.bin", [0, 1] * 500000)
    for name, flags in (("validation", {"-v": 1, "-t": 1, "-z": 2, "-j": "long_val.bin", "-m": 10**6}),
                        ("samples", {"-s": 3, "-x": 9, "--num-samples": 10**5, "-z": 2 * SMALL_T}),
                        ("micro-steps", {"-z": 2 * 10**6 * SMALL_T, "-zs": 1})):
        job = Job({"--gpus": 2, "-x": 9, "-o": "inside_" + name, **flags})
        begun = "sample 2 at step 3" if name == "samples" else "micro-steps a step"
        check(job.until(lambda: begun in job.out()), f"{name}: {begun}: {job.err()}")
        time.sleep(0.3)
        job.p.send_signal(signal.SIGTERM)
        result = job.result()
        steps = 3 if name == "samples" else 0
        check_equal((result.code, result.err, len(result.losses()), len(glob.glob(f"inside_{name}/model_*"))),
                    (0, STOPPING, steps, int(steps > 0)), f"{name}: exit code, stderr, steps, checkpoints")
        check(not result.val_losses(), f"{name}: a part of a validation has no loss: {result.out[-200:]}")


@pytest.mark.cpu_only
def test_hangup():
    """A terminal that goes away stops a run, and its model is saved; with nohup the run goes on."""
    if not enough(2, 5):
        return
    for before in ([], ["nohup"]):
        folder = "hangup" + "".join(before)
        job = Job({"--gpus": 2, "-x": 10**6, "-o": folder, **batch(8)}, before=before)
        check(job.until_step(3), f"the run reaches a step: {job.err()}")
        os.killpg(job.p.pid, signal.SIGHUP)
        if before:
            steps = len(log_lines(folder))
            check(job.until(lambda: len(log_lines(folder)) > steps + 20), "with nohup the run goes on")
            job.p.send_signal(signal.SIGTERM)
        result = job.result(ENDED_S)
        check_equal((result.code, result.err, len(glob.glob(folder + "/model_*"))), (0, STOPPING, 1),
                    f"SIGHUP {before}: exit code, stderr, models")


@pytest.mark.cpu_only
def test_closed_output():
    """A reader that goes away (| head) stops the run, all of it, and it is saved."""
    if not enough(2, 2):
        return
    job = Job({"--gpus": 2, "-x": 10**6, "-o": "closed", **batch(8)}, stdout=subprocess.PIPE)
    while job.p.stdout.readline()[:7] not in (b"step 2/", b""):
        pass
    job.p.stdout.close()
    result = job.result(ENDED_S)
    check_equal((result.code, result.err), (0, UNREAD), "exit code and stderr")
    check_equal(int(model_path("closed")[-12:-4]), len(log_lines("closed")), "steps saved, of those done")


@pytest.mark.cpu_only
def test_second_signal():
    """A second Ctrl-C: at once, unsaved, and that is all that is said. A second SIGTERM has patience."""
    if not enough(2, 2):
        return
    numbers = (signal.SIGINT, signal.SIGTERM)

    def one(number):
        flags = {"--gpus": 2, "-x": 10**6, "-z": 2 * 10**6 * SMALL_T, "--lanes": 2, "-o": f"twice{number}"}
        job = Job(flags)
        job.until(lambda: "micro-steps a step" in job.out())
        for pid in (pids := job.ranks())[1:]:       # nobody answers the first signal for a while
            os.kill(pid, signal.SIGSTOP)
        job.p.send_signal(number)
        job.until(lambda: STOPPING in job.err())
        if number == signal.SIGTERM:
            job.p.send_signal(number)
        job.p.send_signal(signal.SIGINT)
        result = job.result(ENDED_S)
        return len(pids), result.code, result.err, glob.glob(flags["-o"] + "/model_*")
    for number, got in zip(numbers, side_by_side(one, numbers)):
        check_equal(got, (2, 128 + signal.SIGINT, STOPPING, []),
                    f"{number.name}, then SIGINT: ranks, exit code, stderr, checkpoints")


# ---- deaths ----

LAST_STEP = re.compile(r"last step was (\d+)")


def one_death(number, how):
    """[what is wrong] after a rank was killed or stopped at a random moment."""
    rng = random.Random(f"{how.name} {number}")
    n = rng.randint(2, min(most_ranks(), 4))
    victim = 0 if number % 3 == 0 else rng.randrange(n)
    at_start = number % 5 == 4
    doing = rng.choice(({}, {}, {"-v": 1, "-m": 10}, {"-s": 1, "-g": 8}, {"-z": 48 * n * SMALL_T}))
    zs = rng.randrange(3)
    folder = f"death_{how.name}_{number}"
    job = Job({"--gpus": n, "-zs": zs, "-x": 10**6, "-z": 8 * n * SMALL_T, "-o": folder, **doing})
    try:
        reached = job.until(lambda: len(job.ranks()) == n) if at_start else job.until_step(3)
        wait = rng.uniform(0, 0.5 if at_start else 3)
        time.sleep(wait)
        pids = job.ranks()
        if not reached or len(pids) != n:
            return [f"did not come to the moment of death: {job.err()}"]
        os.kill(pids[victim], how)
        since = time.monotonic()
    finally:
        ended = job.gone(ENDED_S)
    seconds, err = time.monotonic() - since, job.err()
    problems = judge_death(err, victim, pids[victim], folder, young=at_start or wait < 2)
    if not ended or job.p.returncode == 0:
        problems.append(f"not ended after {seconds:.0f} s" if not ended else "exit code 0")
    about = f"{how.name} {number}: rank {victim} of {n}, -zs {zs}, {doing}, at the start: {at_start}"
    return [f"{about}: {problem}: {err}" for problem in problems]


def judge_death(err, victim, pid, folder, young=False):
    """One message, that names the rank, its process and its last step, which the others hear of once a second
    (young: they may not have heard of the first); whole files."""
    problems, lines = [], err.splitlines()
    if not 1 <= len(lines) <= 3 or [line.startswith("error: ") for line in lines].count(True) != 1:
        problems.append(f"{len(lines)} lines on stderr")
    if not re.search(rf"\brank {victim}\b", err):
        problems.append(f"it does not name rank {victim}")
    if "pid" in err and not re.search(rf"\bpid {pid}\b", err):
        problems.append(f"it does not name process {pid}")
    log = folder + "/main.log"
    logged = read_bytes(log).decode().splitlines() if os.path.exists(log) else []
    if not all(LOG_LINE.fullmatch(line) for line in logged):
        problems.append("half a line in main.log")
    steps = sum(" trl:" in line for line in logged)
    said = LAST_STEP.search(err)
    if (not said and not young) or (said and int(said[1]) > steps + 2):
        problems.append(f"it does not name its last step: {steps} were logged")
    if glob.glob(folder + "/model_*"):
        problems.append("a model was saved")
    return problems


def paused_reader():
    """[what is wrong] where nobody reads for a while (less, Ctrl-S): that is no death, the run waits."""
    job = Job({"--gpus": 2, "-x": 10**6, **batch(8)}, stdout=subprocess.PIPE)
    time.sleep(30)                                  # longer than the time that a rank may stand still
    alive = job.p.poll() is None
    job.p.send_signal(signal.SIGTERM)
    out = job.p.stdout.read().decode()              # reads on until the end
    result = job.result(ENDED_S)
    fine = alive and (result.code, result.err) == (0, STOPPING) and "stopped by a signal after step" in out
    return [] if fine else [f"a paused reader: {result.code}, {result.err}, {out[-200:]}"]


def test_death():
    """kill -9 and SIGSTOP of a random rank, the hub included, at a random moment."""
    times = 3 if Program.quick else 20 if on_cpu() else 5
    if not enough(2, 2 * times + 1):
        return
    # a stopped rank is noticed after ten seconds of silence: most of this is waiting
    cases = [paused_reader] + [functools.partial(one_death, number, how) for number in range(times)
                               for how in (signal.SIGSTOP, signal.SIGKILL)]
    for problems in side_by_side(lambda case: case(), cases, workers=14 if on_cpu() else 5):
        check(not problems, "; ".join(problems))


@pytest.mark.cpu_only
def test_last_step():
    """The last step in the message is that of the death, not that of the start."""
    if not enough(2, 2):
        return

    def one(victim):
        folder = f"last{victim}"
        job = Job({"--gpus": 2, "-x": 10**6, "-o": folder, **batch(8)})
        job.until_step(3)
        time.sleep(1)
        early = len(log_lines(folder))              # five seconds before its death
        time.sleep(5)
        pids = job.ranks()
        os.kill(pids[victim], signal.SIGKILL)
        ended, said = job.gone(ENDED_S), LAST_STEP.search(job.err())
        return (ended and said and int(said[1]) >= early > 0, early,
                judge_death(job.err(), victim, pids[victim], folder), job.err())
    for fine, *seen in side_by_side(one, (0, 1)):
        check(fine and not seen[1], f"five seconds before, a problem, what was said: {seen}")


def test_death_of_the_launcher():
    """Nobody is left to tell; nothing may be left running."""
    if not enough(2, 2):
        return
    for n in [n for n in (2, 3) if enough(n)]:
        job = Job({"--gpus": n, "-x": 10**6, "-z": 8 * n * SMALL_T, "-o": f"orphans{n}"})
        check(job.until_step(3) and len(job.ranks()) == n, f"{n} ranks run: {job.err()}")
        job.p.kill()
        check(job.gone(ENDED_S), f"{n} ranks end with their launcher")


@pytest.mark.cpu_only
def test_death_without_a_launcher():
    """Ranks that were started one by one notice each other's deaths as well."""
    if not enough(2, 4):
        return

    def one(case):
        victim, how, port = case
        folder = f"alone_{how.name}_{victim}"
        jobs = [Job({**batch(8), **tcp(r, port), "-x": 10**6, "-o": folder}) for r in (0, 1)]
        if not jobs[0].until_step(3):
            return [f"no step: {jobs[0].err()}{jobs[1].err()}"] + [str(job.gone(0)) for job in jobs]
        time.sleep(5)                               # the others have heard of its steps, once a second
        jobs[victim].p.send_signal(how)
        since = time.monotonic()
        ended = [jobs[1 - victim].gone(ENDED_S)]
        jobs[victim].p.send_signal(signal.SIGCONT)      # nobody kills it: it ends itself when it goes on
        ended.append(jobs[victim].gone(max(0.1, since + ENDED_S - time.monotonic())))
        err = jobs[0].err() + jobs[1].err()
        problems = judge_death(err, victim, jobs[victim].p.pid, folder)
        if ended != [True, True] or jobs[1 - victim].p.returncode == 0:
            code = jobs[1 - victim].p.returncode
            problems.append(f"ended (the other, the victim): {ended}, the other's exit code {code}")
        return [f"{how.name} to rank {victim}: {problem}: {err}" for problem in problems]
    cases = [(victim, how, free_port()) for victim in (0, 1) for how in (signal.SIGKILL, signal.SIGSTOP)]
    for problems in side_by_side(one, cases, workers=4):
        check(not problems, "; ".join(problems))
