#!/usr/bin/env python3
"""The training program as its users see it: flags, files, output, exit codes, signals.

    python3 dev/test/test_cli.py ./train_gpt2cpu            # under a minute
    python3 dev/test/test_cli.py ./train_gpt2cu             # the same tests on a GPU
    python3 dev/test/test_cli.py ./train_gpt2cpu --slow     # also d12 on tinyshakespeare against PyTorch
    python3 dev/test/test_cli.py ./train_gpt2cpu -k signal  # only tests whose name contains a word

Everything it needs it writes into a temporary folder, with trainer.py's few lines for the file formats; what
the independent dev/test/llmc_format.py writes and reads is compared too. What the outer loop computes is for
test_loop.py. Standard library only.
Losses of a run that another program computed: dev/reference/fixture/run.json (PyTorch, made by
dev/reference/make_fixture.py) and EXPECTED_D12 below.
"""
import contextlib
import fcntl
import glob
import json
import math
import os
import pty
import re
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time

from checks import ROOT
from trainer import (B, C, L, LIMIT_S, LOG_LINE, MODEL_MAGIC, PARAMS, SHARD_MAGIC, T, TINY, V, Program,
                     Result, check, check_close, check_equal, check_refused, log_columns,
                     log_lines, main, model_path, no_room, param_sizes, read_bytes, read_model, run, run_ok,
                     sentences, skip, snapshot, tolerance, without_checksum, write_bytes, write_shard)

FORMAT_TOOL = os.path.join(ROOT, "dev/test/llmc_format.py")
FIXTURE = os.path.join(ROOT, "dev/reference/fixture")
SHAKESPEARE = os.path.join(ROOT, "dev/data/tinyshakespeare/tiny_shakespeare_")
NO_TEXT = "L2,NH2,C32,T32,V300"         # no tokenizer has 300 tokens; 300 is padded to 384

# Five losses of two d12 runs in PyTorch; the file says which commands made them.
EXPECTED_D12 = os.path.join(ROOT, "dev/test/fixtures/d12_losses.json")


# ---- training ----
# What the precision of a build can change; the others are about words, files and signals.
NUMERIC = ("accumulation", "determinism", "same_bits", "saved_model", "padded_vocabulary", "weight_decay",
           "overfit", "gradient_clipping", "shorter_rows", "validation_rows", "pytorch_run", "llmc_format",
           "not_finite", "skips_in_a_row", "not_finite_validation")


def test_accumulation():
    one = run_ok({"-a": 1, "-x": 10, "-l": "1e-3"})
    two = run_ok({"-a": 1, "-x": 10, "-l": "1e-3", "-z": 2 * B * T})
    check_equal(len(one.losses()), 10, "step lines")
    check_close(two.losses(), one.losses(), tolerance(1e-5, 5e-3), "one batch accumulated twice against once")
    big = run_ok({"-b": 8, "-x": 6})
    for rows in (4, 1):
        split = run_ok({"-b": rows, "-z": 8 * T, "-x": 6})
        check_close(split.losses(), big.losses(), tolerance(1e-5, 2e-2),
                    f"a batch of 8 rows in parts of {rows}")
    for rows, tokens in ((1, 1), (1, 3), (3, 3), (2, 2)):       # small, but multiples of B*T
        tiny = run_ok({"-b": rows, "-t": 1, "-z": tokens, "-x": 2})
        check(f" {tokens // rows} micro-steps a step" in tiny.out, f"-z {tokens} with -b {rows} -t 1")
    synonym = run_ok({"-d": 8 * T, "-x": 6})
    long_name = run_ok({"--total-batch": 8 * T, "-x": 6})
    check_equal(synonym.losses(), long_name.losses(), "-d is --total-batch")


def test_determinism():
    flags = {"-x": 6, "-v": 3, "-s": 3, "-z": 2 * B * T, "-c": 0.1}
    runs = [run_ok({**flags, "-o": folder}) for folder in ("same1", "same2")]
    check_equal(read_bytes("same1/main.log"), read_bytes("same2/main.log"), "main.log of two equal runs")
    check(read_bytes(model_path("same1")) == read_bytes(model_path("same2")),
          "checkpoints of two equal runs differ")
    check_equal(runs[0].samples(), runs[1].samples(), "samples of two equal runs")
    other = run_ok({**flags, "--seed": 1})
    check(other.losses() != runs[0].losses(), "another --seed gives the same losses")
    ordered = run_ok({**flags, "--shuffle": 0})
    check(ordered.losses() != runs[0].losses(), "--shuffle 0 gives the losses of the shuffled order")


def test_same_bits():
    """What must not change training's bits: recomputation, validation, sampling."""
    flags = {"-x": 7, "-c": 0.1, "-l": "1e-3"}
    run_ok({**flags, "-o": "bits"})
    bits = log_lines("bits"), read_bytes(model_path("bits"))
    variants = [{"-r": 1}, {"-r": 2}, {"-v": 1}, {"-v": 3, "-m": 1}, {"-s": 1}, {"-s": 2, "-g": 8},
                {"-v": 2, "-s": 3, "--num-samples": 2, "--top-k": 5, "--temperature": 0.7, "-r": 1}]
    for i, variant in enumerate(variants):
        folder = f"bits{i}"
        run_ok({**flags, **variant, "-o": folder})
        check_equal(log_lines(folder), bits[0], f"training lines with {variant}")
        check(read_bytes(model_path(folder)) == bits[1], f"the checkpoint with {variant} is another one")
    check_equal([LOG_LINE.match(x)[1] for x in log_lines("bits3", "tel")], ["0", "3", "6", "7"],
                "when -v 3 validates in 7 steps")


def test_threads():
    for threads in (1, 2):
        run_ok({"-o": f"threads{threads}", "-x": 6}, threads=threads)
    equal = read_bytes(model_path("threads1")) == read_bytes(model_path("threads2"))
    if "OpenBLAS" in Program.device:        # promised of our own loops alone
        bits = "equal" if equal else "other"
        skip(f"with OpenBLAS nothing is promised; here 1 and 2 threads give {bits} bits")
    else:
        check(equal, "1 and 2 threads give other checkpoints")


def test_saved_model():
    trained = run_ok({"-o": "saved", "-x": 6, "-v": 6, "-l": "1e-3"})
    path = model_path("saved")
    check(path.endswith("/model_00000006.bin"), f"{path}: named after the steps")
    check("saved " + path in trained.out, "the program says what it saved")
    before = snapshot()
    for flags in ({"-x": 0}, {"-x": 0, "-v": 1, "-s": 1}):
        again = run_ok({"-e": path, **flags})
        check_equal(len(again.val_losses()), 1, "val loss lines of -x 0")
        check_equal(again.losses(), [], "steps of -x 0")
        check_close(again.val_losses(), trained.val_losses()[-1:], tolerance(0, 1e-2),
                    "the saved model's val loss")
    check_equal(snapshot(), before, "the disk after -x 0")
    header, params = read_model(path)
    check_equal(header, (MODEL_MAGIC, 5 if Program.precision == "BF16" else 3, T, V, L, 2, C, 256), "header")
    check(all(math.isfinite(x) for values in params.values() for x in values), "a weight is not finite")
    # a learning rate of 0 leaves the weights alone: what is loaded is what is saved
    run_ok({"-e": path, "-l": 0, "-x": 2, "-c": 0.1, "-o": "resaved"})
    check(read_bytes(path) == read_bytes(model_path("resaved")),
          "a model that learned nothing is saved differently")
    # training goes on from a checkpoint
    more = run_ok({"-e": path, "-x": 20, "-l": "1e-3"})
    check(more.losses()[-1] < trained.losses()[-1], "a loaded model does not learn")


def test_padded_vocabulary():
    for vocabulary, padded in ((256, 256), (300, 384)):
        folder = f"padded{vocabulary}"
        run_ok({"-e": f"L1,NH2,C16,T32,V{vocabulary}", "-x": 3, "-o": folder, "-l": "1e-2", "-c": 0.1})
        header, _ = read_model(model_path(folder))
        check_equal(header[2:8], (32, vocabulary, 1, 2, 16, padded), "header")
        width = 2 if Program.precision == "BF16" else 4
        wte = read_bytes(model_path(folder))[1024:1024 + padded * 16 * width]
        check(any(wte[:vocabulary * 16 * width]) and not any(wte[vocabulary * 16 * width:]),
              "bytes of the padded rows are not zero")
    # what stands in the padding of somebody's file has no part in the loss
    data = without_checksum(read_bytes(model_path("padded300")))
    clean = run_ok({"-e": model_path("padded300"), "-x": 0}).val_losses()
    width = 2 if Program.precision == "BF16" else 4
    at = 1024 + 300 * 16 * width
    data[at:at + 84 * 16 * width] = (b"\x41\x20" if width == 2 else b"\x00\x00\x20\x41") * (84 * 16)
    dirty = run_ok({"-e": write_bytes("dirty.bin", data), "-x": 0}).val_losses()
    check_equal(dirty, clean, "val loss with rubbish in the padded rows")


def test_weight_decay():
    """One step with and without: only matrices differ, and by lr * decay * weight."""
    rate, decay = 1e-2, 0.5
    models = []
    for name, lr, c in (("start", 0, 0), ("plain", rate, 0), ("decayed", rate, decay)):
        run_ok({"-x": 1, "-l": lr, "-k": "constant", "-c": c, "-o": "decay_" + name})
        models.append(read_model(model_path("decay_" + name))[1])
    start, plain, decayed = models
    for name, dimensions in PARAMS:
        if dimensions == 1:
            check(plain[name] == decayed[name], f"{name}: weight decay changed a tensor with one dimension")
            continue
        shrunk = [a - b for a, b in zip(plain[name], decayed[name])]
        expected = [rate * decay * x for x in start[name]]
        check(any(shrunk), f"{name}: weight decay changed nothing")
        check_close(shrunk, expected, tolerance(1e-6, 1e-3), f"{name}: how much weight decay took off")
    check(all(any(a != b for a, b in zip(start[name], plain[name])) for name, _ in PARAMS),
          "a tensor did not move")


def test_overfit():
    losses = run_ok({"-a": 1, "-x": 60, "-l": "1e-2", "-u": 5}).losses()
    check(losses and losses[0] > 5.0 and losses[-1] < losses[0] - 3.0,
          f"loss goes from {losses[:1]} to {losses[-1:]}")


def test_schedules():
    steps, warmup, peak, last = 20, 4, 1e-3, 0.1
    shapes = {"cosine": lambda x: 0.5 * (1 + math.cos(math.pi * x)), "linear": lambda x: 1 - x,
              "wsd": lambda x: 1 - math.sqrt(x), "constant": None}
    for kind, shape in shapes.items():
        folder = "lr_" + kind
        run_ok({"-x": steps, "-u": warmup, "-l": peak, "-q": last, "-k": kind, "-o": folder, "-b": 1,
                "-t": 8})
        start = steps - steps // 5 if kind == "wsd" else warmup
        expected = []
        for step in range(steps):
            x = max(0.0, (step - start) / (steps - start))
            low = peak * last
            after = peak if shape is None else low + shape(x) * (peak - low)
            expected.append(peak * (step + 1) / warmup if step < warmup else after)
        rates = log_columns(folder)["lr"]
        check_close([a / b for a, b in zip(rates, expected)], [1.0] * steps, 1e-5,
                    f"learning rates of {kind}")
        check_equal(rates[warmup - 1], peak, f"{kind}: the rate when the warm-up is over")
    printed = run_ok({"-x": steps, "-l": peak}).out
    check("lr 1.00e-03" in printed, "the progress line shows the learning rate")


def test_gradient_clipping():
    """The norm in the log is the one before clipping; clipping to less moves the weights differently."""
    columns = []
    for clip in (0, 1, 0.01):
        run_ok({"-x": 4, "--grad-clip": clip, "--eps": "1e-3", "-o": f"clip{clip}"})
        columns.append(log_columns(f"clip{clip}"))
    check(columns[0]["norm"][0] > 1.0, "the first norm is larger than 1")
    check_equal([c["norm"][0] for c in columns], [columns[0]["norm"][0]] * 3,
                "first norm, whatever --grad-clip")
    check(len({c["trl"][-1] for c in columns}) == 3, "--grad-clip has no effect")


def test_epoch():
    """-x epoch: every row of the training data once."""
    for i, length in enumerate((1200, 400, 20)):        # the last holds no row
        write_shard(f"part_{i}.bin", sentences(i, length))
    rows = 1199 // T + 399 // T
    for batch, flags in ((B, {}), (2 * B, {"-z": 2 * B * T}), (1, {"-b": 1})):
        result = run_ok({"-i": "part_*.bin", "-x": "epoch", **flags})
        check_equal(len(result.losses()), rows // batch, f"steps of {batch} rows in an epoch of {rows}")
    result = run_ok({"-i": "part_*.bin", "-x": None})
    check_equal(len(result.losses()), rows // B, "-x left out means one epoch")
    check_equal(len(run_ok({"-i": "part_*.bin", "-x": 20}).losses()), 20, "steps beyond an epoch")
    # data smaller than one batch
    write_shard("short.bin", sentences(7, T + 1))
    small = run_ok({"-i": "short.bin", "-j": "part_1.bin", "-v": 1, "-m": 1000, "-b": 16, "-x": 3})
    check(len(small.losses()) == 3 and len(small.val_losses()) == 4, "a shard smaller than a batch")
    small = run_ok({"-j": "short.bin", "-v": 1, "-x": 1})
    check_equal(len(small.val_losses()), 2, "validations with a set smaller than a batch")
    run_ok({"-i": "short.bin", "-x": "epoch", "-o": "short_epoch"})
    check_equal(len(log_lines("short_epoch")), 1, "steps of an epoch that is smaller than a batch")


def test_sequence_length():
    for length in (1, 7, 31):
        result = run_ok({"-t": length, "-x": 2, "-v": 1, "-s": 2})
        check_equal(len(result.losses()), 2, f"steps with -t {length}")
        check(all(4.5 < x < 7.0 for x in result.losses()), f"losses with -t {length}: {result.losses()}")


def test_shorter_rows():
    """A run at -t below the model's T saves all positions, of which it moved those that it saw."""
    saw = 7
    for name, rate in (("still", 0), ("moved", "1e-2")):
        run_ok({"-t": saw, "-x": 3, "-l": rate, "-o": "shorter_" + name})
    path = model_path("shorter_moved")
    header, params = read_model(path)
    check_equal(header[2:8], (T, V, L, 2, C, 256), "header")
    start = read_model(model_path("shorter_still"))[1]["wpe"]
    moved = [params["wpe"][t * C:t * C + C] != start[t * C:t * C + C] for t in range(T)]
    check_equal(moved, [True] * saw + [False] * (T - saw), "positions that moved")
    again = run_ok({"-e": path, "-x": 2, "-l": 0, "-v": 1, "-o": "shorter_again"})
    check(f" T={T} " in again.out and len(again.val_losses()) == 3, "the file loads, at all its positions")
    check(read_bytes(path) == read_bytes(model_path("shorter_again")), "loaded and saved, it is another file")


def model_loss(path, shard, rows, **flags):
    return run_ok({"-e": path, "-j": shard, "-x": 0, "-b": rows, **flags}).val_losses()


def test_validation_rows():
    """The mean over the first -m x B rows, over all where there are fewer, each once, whatever B."""
    model, text = trained_model(), sentences(4, 5 * T + 1)[:5 * T] + bytes(range(4 * T + 1))
    write_shard("nine.bin", text)
    one_by_one = []                                     # the last four rows are nothing the model has seen
    for row in range(9):
        one_by_one += model_loss(model, write_shard("one.bin", text[row * T:row * T + T + 1]), 1)
    mean = sum(one_by_one) / 9
    check(max(one_by_one) - min(one_by_one) > 1, f"rows of equal loss would prove nothing: {one_by_one}")
    near = tolerance(2e-6, 1e-2)
    for rows in (1, 2, 3, 4, 5, 8, 9, 16):
        check_close(model_loss(model, "nine.bin", rows), [mean], near, f"val loss of 9 rows with -b {rows}")
    for rows, batches in ((1, 4), (2, 2), (4, 1), (2, 3), (3, 2), (4, 2), (5, 1)):
        check_close(model_loss(model, "nine.bin", rows, **{"-m": batches}),
                    [sum(one_by_one[:rows * batches]) / (rows * batches)], near,
                    f"val loss of the first {rows} x {batches} rows")


def test_clock():
    """What the progress lines say of time agrees with itself."""
    began = time.monotonic()
    total = 10**5
    p, seen = start({"-x": total, "-o": "clock"})
    while b"step 12/" not in seen:
        seen += p.stdout.readline()
    p.send_signal(signal.SIGTERM)
    out, _ = finish(p, seen)
    wall_ms = 1000 * (time.monotonic() - began)
    with open("clock/metrics.jsonl", encoding="utf-8") as f:
        ms = [json.loads(line)["ms"] for line in f]
    rows = re.findall(r"^step (\d+)/.*\| (\S+) ms \| (\d+) tok/s \| ETA (\d+):(\d+):(\d+)$", out, re.M)
    check(len(rows) >= 12 and check_equal(len(ms), len(rows), "steps in metrics.jsonl"), "steps printed")
    off = []
    for (step, shown, speed, hours, minutes, seconds), x in zip(rows, ms):
        measured = ms[1:int(step)] or ms[:1]            # the first step also loads kernels
        eta = (total - int(step)) * sum(measured) / len(measured) / 1000
        off.append(abs(int(hours) * 3600 + int(minutes) * 60 + int(seconds) - eta))
        check(abs(float(shown) - x) <= 0.0501, f"step {step}: {shown} ms printed, {x} in metrics.jsonl")
        check(abs(int(speed) - B * T / x * 1000) <= 1, f"step {step}: {speed} tokens/s in {x} ms")
    check(max(off) <= 0.51, f"ETA: {max(off)} s from the steps left times their mean time")
    check(sum(ms) <= wall_ms, f"steps of {sum(ms)} ms in all, the whole run took {wall_ms}")
    mean = re.search(r"^mean step time (\S+) ms, (\d+) tokens/s over (\d+) steps$", out, re.M)
    check(mean and int(mean[3]) == len(ms) - 1 and
          abs(float(mean[1]) - sum(ms[1:]) / (len(ms) - 1)) <= 0.0501, "mean step time")
    done = run_ok({"-x": 3}).out
    check_equal(re.findall(r"^step 3/3 .* ETA (\S+)$", done, re.M), ["0:00:00"], "ETA of the last step")


# ---- what the start says ----

def test_parameter_counts():
    """Whole and parts in the start-up line, by the file format's own sizes."""
    for shape in ((32, 256, 2, 2, 32), (17, 300, 3, 1, 40), (8, 2, 1, 4, 16), (64, 257, 1, 1, 8)):
        maxT, vocabulary, layers, heads, channels = shape
        out = run_ok({"-e": f"L{layers},NH{heads},C{channels},T{maxT},V{vocabulary}", "-x": 0, "-b": 1,
                      "-j": write_shard("zeros.bin", [0] * (maxT + 1))}).out
        sizes = param_sizes(maxT, vocabulary, layers, heads, channels, vocabulary)
        matrices = sum(size for size, (_, dimensions) in zip(sizes, PARAMS) if dimensions == 2)
        padded = -(-vocabulary // 128) * 128
        match = re.search(r"^model: .* (\d+) parameters: (\d+) with weight decay, (\d+) without; and (\d+) "
                          r"zeros that pad wte to (\d+) rows$", out, re.M)
        check_equal(match and tuple(map(int, match.groups())),
                    (sum(sizes), matrices, sum(sizes) - matrices, (padded - vocabulary) * channels, padded),
                    f"parameters of {shape}")


def test_said_at_start():
    """Settings that hardly do what was meant are said, in a line each, and only then."""
    none = run_ok({"-x": 2, "-s": 1, "-u": 1, "-g": T - 1, "-o": "said"})
    check(not re.search("no -o|samples:", none.out), f"a run without surprises: {none.out}")
    check(re.search("^no -o: nothing of this run will be saved$", run_ok({"-x": 1}).out, re.M),
          "a run without -o says that nothing will be saved")
    check("no -o" not in run_ok({"-x": 0}).out, "-x 0 has nothing to save")
    for warmup, steps, said in ((2, 2, "at the last step only"), (3, 2, "never")):
        late = run({"-x": steps, "-u": warmup})
        check(late.code == 0 and len(late.err.splitlines()) == 1 and f"-u {warmup}" in late.err and
              said in late.err, f"-u {warmup} in {steps} steps: {late.err}")
    flags = {"-e": trained_model(), "--prompt": "tak ", "--temperature": 0}
    said = f"samples: after {T - 4} of {T} tokens all T={T} positions are taken"
    long = run({**flags, "-x": 0, "-g": T, "--quiet": 1})
    check((long.code, len(long.err.splitlines())) == (0, 1) and said in long.err and said not in long.out,
          f"-g beyond T says so, and not among the text: {long.err}")
    check(said in run_ok({**flags, "-x": 1, "-s": 1, "-g": T}).out, "so does a training run")
    check_equal(run({**flags, "-x": 0, "-g": T - 4, "--quiet": 1}).err, "", "a -g that just fits")
    speed = run({**flags, "-x": 0, "-g": 9, "--num-samples": 3})
    check(re.fullmatch(r"note: 27 tokens, the first after [\d.]+ s, then \d+ tokens/s\n", speed.err),
          f"how fast: {speed.err!r}")


def test_control_characters():
    """No message sends a user's control characters to the terminal."""
    evil = "e\x1b[31mvil\x07\n"
    write_bytes(evil + ".bin", b"text")
    os.mkdir(evil)
    write_bytes(evil + "/main.log", b"s:0 trl:1 lr:1 norm:1\n")
    for flags in ({"-e": evil + ".bin"}, {"-e": evil + "/no.bin"}, {"-e": evil + "/"}, {"-o": evil},
                  {"-o": evil + ".bin"}, {"-o": evil + ".bin/x"}, {"-x": 0, "-o": evil}):
        result = run({"-x": 1, **flags})
        check(result.code == 1 and "e\\x1b[31mvil\\x07\\n" in result.err and
              not re.search("[\0-\x09\x0b-\x1f\x7f]", result.err), f"{flags}: {result.err!r}")
    out = run_ok({"-x": 1, "-o": "saved" + evil}).out
    check(not re.search("[\0-\x09\x0b-\x1f\x7f]", out), "stdout of a run whose folder has such a name")


# ---- a run's folder ----

def folder_run():
    """Three checkpoints of a run whose data, rows, T and -m are not the usual ones; made once."""
    if not os.path.exists("runs/folder"):
        write_shard("own_val.bin", sentences(5, 4000))
        run_ok({"-o": "runs/folder", "-j": "own_val.bin", "-b": 3, "-t": 24, "-m": 7, "-x": 6, "-v": 6,
                "-n": 2, "-nk": 0, "-l": "1e-2", "-f": None})
    return "runs/folder"


ALONE = {"-e": None, "-i": None, "-j": None, "-b": None, "-v": None, "-s": None, "-f": None}


def evaluate(folder, flags=None, **popen):
    """(the model that was taken, its val loss, stderr) of -x 0 with no other flag than these."""
    result = run({**ALONE, "-e": folder, "-x": 0, **(flags or {})}, **popen)
    taken = re.search(r"^evaluating (\S+) on ", result.out, re.M)
    return taken and taken[1], result.val_losses(), result.err


def test_folder():
    """-e FOLDER is its newest whole model, run as the run did."""
    folder = folder_run()
    model, own = f"{folder}/model_%08d.bin", {"-j": "own_val.bin", "-b": 3, "-t": 24, "-m": 7}
    losses = {step: run_ok({**own, "-e": model % step, "-x": 0, "-f": None}).val_losses()
              for step in (2, 4, 6)}
    check(len({str(loss) for loss in losses.values()}) == 3, "the checkpoints are alike")
    check_equal(evaluate(folder + "//"), (model % 6, losses[6], ""), "-x 0 of a run's folder")
    with open(folder + "/main.log", encoding="ascii") as log:
        last = [line for line in log if " tel:" in line][-1].split("tel:")[1]
    check_close(losses[6], [float(last)], tolerance(0, 1e-2), "the run's last validation loss")
    for name, value in (("-j", "val.bin"), ("-b", 2), ("-t", 8), ("-m", 3)):
        want = run_ok({**own, name: value, "-e": model % 6, "-x": 0, "-f": None}).val_losses()
        check_equal(evaluate(folder, {name: value})[1], want, f"{name} {value} is stronger than the run's")
        check(want != losses[6], f"{name} {value} makes no difference")
    os.mkdir("elsewhere")
    there = {"cwd": "elsewhere"}
    check_equal(evaluate("../" + folder, **there)[1:], (losses[6], ""), "data from where the run was started")
    check_equal(evaluate(os.path.abspath(folder), {"--quiet": 1}, **there)[1], losses[6], "with --quiet 1")

    shutil.copytree(folder, "runs/damaged")
    damaged = "runs/damaged/model_%08d.bin"
    data = bytearray(read_bytes(damaged % 6))
    data[5000] ^= 1
    write_bytes(damaged % 6, data)
    taken, loss, err = evaluate("runs/damaged")
    check((taken, loss) == (damaged % 4, losses[4]) and damaged % 6 in err and len(err.splitlines()) == 1,
          f"the newest model is damaged: {taken}, {err}")
    shutil.copy(damaged % 2, "runs/damaged/model_00000009.bin")
    check_equal(evaluate("runs/damaged")[0], damaged % 4, "checkpoints come before a model alone")
    write_bytes("runs/damaged/model_99.bin", b"nobody's")
    for path in glob.glob("runs/damaged/DONE_*") + glob.glob("runs/damaged/state_*"):
        os.remove(path)
    check_equal(evaluate("runs/damaged"), ("runs/damaged/model_00000009.bin", losses[2], ""), "models alone")
    os.remove("runs/damaged/run.json")
    taken, loss, err = evaluate("runs/damaged", own)
    check(loss == losses[2] and "run.json is not there" in err, f"a folder without run.json: {loss}, {err}")
    for path in glob.glob("runs/damaged/model_*"):
        write_bytes(path, b"")
    check_refused("no whole model", {"-e": "runs/damaged"}, "no whole model_*.bin")


def test_folder_name():
    """A descriptor is one where there is a folder of that name, too; what is odd in a path is no pattern."""
    os.makedirs("odd [x]*")
    shutil.copytree(folder_run(), "odd [x]*/d12")
    write_shard("odd [x]*/own_1.bin", sentences(5, 4000))
    inside = {"cwd": "odd [x]*"}
    run_ok({"-e": TINY, "-i": "../train.bin", "-j": "own_?.bin", "-x": 1, "-o": "second"}, **inside)
    want = run_ok({"-e": "second/model_00000001.bin", "-j": "own_?.bin", "-x": 0}, **inside).val_losses()
    check_equal(evaluate("odd [x]*/second")[1:], (want, ""), "a pattern in a folder that looks like one")
    refused = run({"-e": "d12", "-x": 0, "-t": 1025}, **inside)         # GPT-2's T is 1024, the folder's 32
    check("longest sequence, 1024" in refused.err, f"-e d12, also a folder: {refused.err}")
    check_equal(evaluate("./d12", {"-j": "own_1.bin"}, **inside)[0], "./d12/model_00000006.bin", "./d12")


def test_folder_settings():
    """What is wrong with run.json is said with its name; -e with a model does without it."""
    shutil.copytree(folder_run(), "runs/settings")
    flags = {**ALONE, "-o": None, "-e": "runs/settings", "-x": 0}
    good = read_bytes("runs/settings/run.json")
    for name, text in (("empty", b""), ("cut", good[:-10]), ("a list", b'[{"settings": 1}]'),
                       ("twice", b'{"a": 1, "a": 2}'), ("deep", b'{"a":' * 5000)):
        write_bytes("runs/settings/run.json", text)
        check_refused(name + " run.json", flags, "runs/settings/run.json", "JSON")
    run_ok({"-e": "runs/settings/model_00000006.bin", "-x": 0})
    write_bytes("runs/settings/run.json", good.replace(b'"own_val.bin"', b'"gone.bin"'))
    check_refused("data that are gone", flags, "'gone.bin'")


def all_shown(terminal):
    """What was written to the other end, in bytes: nobody has that open any more."""
    shown = b""
    with contextlib.suppress(OSError):                  # EIO: the end
        while True:
            shown += os.read(terminal, 1000)
    os.close(terminal)
    return shown.replace(b"\r\n", b"\n")


def test_folder_prompt():
    """Text from a folder needs neither data nor flags, and stdout has nothing else."""
    folder = folder_run()
    flags = {**ALONE, "-e": folder, "-x": 0, "--prompt": "tak ", "-g": 9, "--temperature": 0}
    result = run_ok(flags)
    check(0 < len(result.out) <= 10 and result.out[-1] == "\n", f"stdout: {result.out!r}")
    three = run_ok({**flags, "--num-samples": 3})
    check_equal(three.out, "---\n".join([result.out] * 3), "three samples")
    trained = run_ok({"-e": f"{folder}/model_00000006.bin", "-x": 1, "-t": 24, "-s": 1, "-l": 0,
                      "--prompt": "tak ", "-g": 9, "--temperature": 0, "-f": None})
    check_equal(trained.samples(), result.samples(), "the text that -s writes, prompt included")
    terminal, end = pty.openpty()
    p = subprocess.run(Program.command(flags), stdout=end, stderr=subprocess.PIPE, timeout=LIMIT_S,
                       env=Program.environment(1))
    os.close(end)
    shown = all_shown(terminal).decode("latin-1")
    check_equal((p.returncode, shown), (0, "tak " + result.out), "on a terminal the prompt comes first")


def test_samples_alone():
    """A text is the same whatever is written beside it, across the end of T."""
    flags = {"-e": trained_model(), "-x": 0, "--prompt": "tak ", "-g": T + 9, "--quiet": 1}
    many = run_ok({**flags, "--num-samples": 70}).samples()     # more than are written at once
    check_equal((len(many), len(set(many))), (70, 70), "texts, and those that differ")
    few = run_ok({**flags, "--num-samples": 3}).samples()
    check_equal(few, many[:3], "three texts")
    check_equal(run_ok(flags).samples(), many[:1], "one text")


def test_characters():
    """What goes to the terminal ends with whole characters, and bytes that are none come out at the end."""
    euro, broken = "\u20ac".encode(), b"\xe2\x82"
    for what, text in (("a character", euro), ("its beginning", broken), ("no character", b"\xff\x80a")):
        period = bytes([1]) + text
        write_shard("characters.bin", period * 400)
        run_ok({"-e": "L1,NH2,C32,T32,V256", "-i": "characters.bin", "-j": "characters.bin", "-x": 100,
                "-l": "1e-2", "-b": 2, "-o": f"characters {what}"})
        terminal, end = pty.openpty()
        p = subprocess.run(Program.command({**ALONE, "-e": f"characters {what}", "-x": 0, "--prompt": "\x01",
                                            "-g": 2 * len(period) - 1, "--temperature": 0}), stdout=end,
                           stderr=subprocess.PIPE, timeout=LIMIT_S, env=Program.environment(1))
        os.close(end)
        check_equal((p.returncode, all_shown(terminal)), (0, period * 2 + b"\n"), what)


def test_chat():
    """Lines are answered through a pipe, as one text that goes on: what was said before counts."""
    flags = {**ALONE, "-e": trained_model(), "-x": 0, "--temperature": 0, "-g": 5, "--quiet": 1}

    def chat(lines, **more):
        p = subprocess.run(Program.command({**flags, "--chat": 1, **more}), input=lines, capture_output=True,
                           timeout=LIMIT_S, env=Program.environment(1))
        check_equal((p.returncode, p.stderr), (0, b""), f"exit code and stderr after {lines}")
        return p.stdout.decode("latin-1")

    history, wanted = "", ""
    for line in ("tak", "lorin ba", "", "m"):               # an empty line lets the text go on
        history += ("\n" if history and line else "") + line
        answer = run_ok({**flags, "--prompt": history}).out[:-1]
        check_equal(len(answer), 5, f"an answer to '{line}'")
        history, wanted = history + answer, wanted + answer + "\n"
    check_equal(chat(b"tak\nlorin ba\n\nm"), wanted, "four lines, the last without an end")
    check_equal(chat(b""), "", "no line")
    check_equal(chat(b"tak " * 100 + b"\n")[-1], "\n", "a line longer than T")
    text = ("tak " * T)[:T - 2]                             # and the document's beginning: T - 1 tokens
    text += run_ok({**flags, "--prompt": text, "-g": 3}).out[:-1]
    for length in (T - 1, T, T + 1):
        check_equal(chat(text[:length - 1].encode(), **{"-g": 1}), text[length - 1] + "\n",
                    f"T={T}, after {length} tokens")
    long = chat(b"tak", **{"-g": None, "--temperature": 1})[:-1]
    check(64 <= len(long) < 256 and long[-1] in ".!?\n" and not re.search("[.!?\n]", long[63:-1]),
          f"without -g a sentence is not broken off: {long!r}")
    check_refused("--chat in training", {"--chat": 1, "-x": 1}, "--chat", "-x 0")
    check_refused("--chat without a tokenizer", {"--chat": 1, "-x": 0, "-e": NO_TEXT, "-o": ""}, "--chat",
                  "V=300")


def test_chat_terminal():
    """On a terminal Ctrl-C ends a text, then a line that is being typed, and Ctrl-D ends the program."""
    def take_terminal():
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    terminal, end = pty.openpty()
    p = subprocess.Popen(Program.command({**ALONE, "-e": trained_model(), "-x": 0, "--chat": 1,
                                          "-g": 1 << 24}), stdin=end, stdout=end, stderr=subprocess.PIPE,
                         env=Program.environment(1), preexec_fn=take_terminal)      # pylint: disable=W1509
    os.close(end)
    shown = ""

    def until(text):
        nonlocal shown
        while not shown.endswith(text):
            if not select.select([terminal], [], [], LIMIT_S)[0]:
                p.kill()
                raise TimeoutError(f"no '{text}' on the terminal, but {shown[-100:]!r}")
            shown += os.read(terminal, 1000).decode("latin-1")
        shown = ""

    until("> ")
    os.write(terminal, b"tak\n")
    while len(shown) < 300:                                 # a text without an end
        shown += os.read(terminal, 1000).decode("latin-1")
    check_equal(shown[:8], "tak\r\ntak", "what is typed, and the text that goes on from it")
    os.write(terminal, b"\x03")
    until("\r\n> ")
    os.write(terminal, b"lor")
    until("lor")
    os.write(terminal, b"\x03")
    until("> ")
    check_equal(p.poll(), None, "exit code after Ctrl-C")
    os.write(terminal, b"\x04")
    check_equal(p.wait(timeout=LIMIT_S), 0, "exit code after Ctrl-D")
    notes = p.stderr.read().decode()
    check(re.search(r"^note: \S+ goes on from each line by 16777216 tokens .*Ctrl-D.*\n"
                    r"note: \d+ tokens, the first after .* tokens/s\n\Z", notes, re.M), f"notes: {notes}")
    p.stderr.close()
    os.close(terminal)


def test_folder_trains():
    """-e FOLDER is where another run begins, which -y 1 finds again; it is no other word for resuming."""
    folder = folder_run()
    flags = {"-e": folder, "-b": 3, "-t": 24, "-x": 3, "-n": 1, "-o": "runs/tuned"}
    run_ok(flags)
    run_ok({**flags, "-e": f"{folder}/model_00000006.bin", "-o": "runs/tuned2"})
    check_equal(log_lines("runs/tuned"), log_lines("runs/tuned2"), "a run from a folder and from its model")
    run_ok({**flags, "-x": 4, "-y": 1})
    check_equal(len(log_lines("runs/tuned")), 4, "steps after -y 1 with the same -e")
    for mine in (folder, folder + "/", "./" + folder):
        check_refused("its own folder", {"-e": mine, "-o": folder}, "-e ", folder, "-y 1")
    check_refused("-x 0 with its own folder", {"-e": folder, "-o": folder, "-x": 0}, folder)


def test_last_line():
    """A run's last line names its folder and the commands that evaluate, sample and plot it; they work."""
    def shell(command):
        return subprocess.run(["bash", "-c", command], capture_output=True, timeout=LIMIT_S,
                              env=Program.environment(1))
    for folder in ("runs/last", "runs/la'st $x", "runs/la\nst' \\ \x1b[31m"):
        result = run_ok({"-o": folder, "-x": 2, "-v": 1, "-s": 1})
        last = result.out.splitlines()[-1]
        commands = re.findall("`(.*?)`", last)
        if not check(folder[:7] in last and "--prompt" in last and len(commands) == 2, f"last line: {last}"):
            continue
        for prompt in ("", " --prompt tak -g 3"):
            p = shell(commands[0] + prompt)
            notes = re.sub(rb"^note: .*\n", b"", p.stderr) if prompt else p.stderr
            check_equal((p.returncode, notes), (0, b""), commands[0] + prompt)
            check((b"val loss " in p.stdout) == (prompt == ""), f"{commands[0]}{prompt}: {p.stdout}")
        drawn = shell(f"printf '%s|' {commands[1]}").stdout.decode()
        check_equal(drawn, f"python3|dev/data/plot_log.py|{folder}|", "what draws it")
    check("-x 0" not in run_ok({"-x": 1}).out, "a run without -o")


def test_quiet():
    """--quiet 1: results alone on stdout, and the same ones."""
    kinds = "step [12]/2 |val loss |sample |saved |---$"
    flags = {"-x": 2, "-v": 1, "-s": 1, "-g": T - 1, "--prompt": "\n"}
    loud, quiet = (run_ok({**flags, "-o": f"quiet{n}", "--quiet": n}) for n in (0, 1))
    settings = re.compile("^settings|^device|^model|^memory|^data|^mean|^quiet0: ", re.M)
    check(settings.search(loud.out) and not settings.search(quiet.out), f"--quiet 1 printed {quiet.out}")
    check_equal((quiet.losses(), quiet.val_losses(), quiet.samples()),
                (loud.losses(), loud.val_losses(), loud.samples()), "results with --quiet 1")
    check(re.match(kinds, quiet.out) and re.match(kinds, quiet.out.splitlines()[-1]), f"{quiet.out!r}")
    check_equal(read_bytes("quiet0/main.log"), read_bytes("quiet1/main.log"), "main.log")
    loud, quiet = run_ok({"-x": 0}), run_ok({"-x": 0, "--quiet": 1})
    check("settings" not in loud.out and "evaluating " in loud.out, f"-x 0 prints {loud.out}")
    check_equal(quiet.out, f"val loss {loud.val_losses()[0]:.6f}\n", "stdout of -x 0 with --quiet 1")


# ---- memory ----

def host_memory_only(count):
    if Program.device.startswith("CPU"):
        return True
    skip("the CPU build's memory is measured by the process's own books", count)
    return False


MIB = 2**20


def memory_plan(flags):
    """Bytes: what the start-up line promises, and by how much the process had grown after its first steps, or
    in the midst of an evaluation."""
    words = Program.command({"-x": 10**6, **flags})
    p = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                         env={**Program.environment(1), "MALLOC_ARENA_MAX": "1"})
    out = b""
    while b"step 2/" not in out and b"evaluating " not in out:
        line = p.stdout.readline()
        if not line:
            break
        out += line
    busy = 0.0 if b"evaluating " in out else 1.0            # seconds of processor time: past the first batch
    while busy < 0.3 and p.poll() is None:
        time.sleep(0.02)
        with open(f"/proc/{p.pid}/stat", encoding="ascii") as f:
            busy = int(f.read().rsplit(")", 1)[1].split()[11]) / os.sysconf("SC_CLK_TCK")
    with open(f"/proc/{p.pid}/status", encoding="ascii") as f:
        peak = re.search(r"^VmPeak:\s+(\d+) kB$", f.read(), re.M)
    p.kill()
    p.communicate()
    plan = re.search(rb"^memory: (\S+) (MiB|GiB) in all", out, re.M)
    if not check(plan and peak, "the run prints its memory and reaches step 2"):
        return 0, 0
    return float(plan[1]) * (MIB if plan[2] == b"MiB" else 1024 * MIB), 1024 * int(peak[1])


def test_memory_plan():
    """The plan's total is what a run takes: two runs differ in the kernel's books as in their plans."""
    if not host_memory_only(6):
        return
    small, small_peak = memory_plan({"-b": 32})         # large enough for BLAS to have taken its buffer
    for flags, largest in (({"-b": 256}, V * C), ({"-b": 256, "-r": 2}, V * C), ({"-b": 999, "-t": 5}, V * C),
                           ({"-b": 2, "-e": "L3,NH2,C512,T32,V300"}, 4 * 512 * 512),
                           ({"-b": 64, "-e": "L1,NH2,C16,T32,V50000"}, 50048 * 16),
                           ({"-b": 1, "-e": "L1,NH1,C8,T100000,V256", "-t": 8}, 800000)):
        plan, peak = memory_plan(flags)
        allowed = 6 * largest + MIB     # planned for a tensor on its way to a file: these are killed before
        off = (peak - small_peak) - (plan - small)
        check(plan > 8 * MIB and abs(off) <= allowed,
              f"{flags}: {plan / MIB:.1f} MiB planned, {off / MIB:.1f} MiB more were taken")


def weights_planned(layers, c, longest, padded):
    """Elements: embeddings, each layer's matrices, all biases, all LayerNorms; each in whole chunks."""
    def up(n, to):
        return -(-n // to) * to
    buckets = [[padded * c, longest * c], *[[3 * c * c, c * c, 4 * c * c, 4 * c * c]] * layers,
               [3 * c, c, 4 * c, c] * layers, [c] * (4 * layers + 2)]
    return sum(up(sum(up(n, 128) for n in bucket), 8192) for bucket in buckets)


def test_memory_of_evaluation():
    """-x 0 has a plan of its own, as true as that of training, without what only training needs."""
    if not host_memory_only(10):
        return
    write_shard("long.bin", list(sentences(7, 20000)) * 60)
    os.mkdir("long")
    for i in range(100):                                # minutes of validation, which are not awaited
        os.symlink("../long.bin", f"long/{i:02d}.bin")
    flags = {"-x": 0, "-j": "long/*.bin", "-m": 10**6}
    small, small_peak = memory_plan({**flags, "-b": 32})
    for shape, rows, length in (((4, 2, 64, 32, 256), 256, 32), ((3, 2, 512, 32, 300), 2, 32),
                                ((1, 2, 16, 32, 50000), 64, 32)):
        layers, heads, channels, longest, vocabulary = shape
        model = f"L{layers},NH{heads},C{channels},T{longest},V{vocabulary}"
        plan, peak = memory_plan({**flags, "-e": model, "-b": rows, "-t": length})
        padded, n = -(-vocabulary // 128) * 128, rows * length
        largest = max(padded * channels, longest * channels, 4 * channels * channels)
        off = (peak - small_peak) - (plan - small)
        check(abs(off) <= 6 * largest + MIB, f"{model}: {plan / MIB:.1f} MiB planned, {off / MIB:.1f} more")
        # weights once, one layer's activations, logits, inputs with two staged copies, a tensor from a file
        floats = weights_planned(layers, channels, longest, padded)
        floats += n * (channels * 19 + heads + 7 + padded) + 1.5 * largest
        inputs = 3 * (3 * 4 * n + 16 * n + 16 * n // 129) + 4 * 4 * n
        want = 4 * floats + inputs
        check(abs(plan - want) < 0.02 * MIB, f"{model}: {plan / MIB:.3f} MiB planned, not {want / MIB:.3f}")
    shutil.rmtree("long")                               # other tests hash all files that there are


def test_memory_limit():
    """Under a limit the plan is refused in a sentence, whose hint fits, and one row more does not."""
    if not host_memory_only(8):
        return

    def limited(flags, mib):
        def limit():
            resource.setrlimit(resource.RLIMIT_AS, (mib * MIB, mib * MIB))
        return run({"-x": 1, "-v": 1, "-s": 1, **flags}, preexec_fn=limit)
    for mib, flags in ((350, {}), (400, {"-r": 2}), (400, {"-e": "L2,NH2,C16,T64,V5000"})):
        over = limited({**flags, "-b": 65536}, mib)
        best = re.search(r"largest micro-batch that fits is -b (\d+)", over.err)
        if not check(over.code == 1 and best and len(over.err.splitlines()) <= 3, f"{mib} MiB: {over.err}"):
            continue
        fits = limited({**flags, "-b": best[1]}, mib)
        check_equal((fits.code, fits.err), (0, ""), f"{mib} MiB: the hinted -b {best[1]}")
        more = limited({**flags, "-b": int(best[1]) + 1}, mib)
        check(more.code == 1 and f"fits is -b {best[1]}" in more.err, f"{mib} MiB: one row more: {more.err}")
    for mib in (100, 160):              # too little for OpenBLAS alone, which would wait for ever
        none = limited({}, mib)
        refused = none.code == 1 and none.err.startswith("error: ") and len(none.err.splitlines()) <= 3
        check(refused or (none.code == 0 and "OpenBLAS" not in Program.device),
              f"{mib} MiB: exit code {none.code}, {none.err}")


# ---- against other programs ----

def test_pytorch_run():
    """12 steps with accumulation, warm-up, decay and clipping, two shards, as PyTorch in fp32 did them."""
    with open(FIXTURE + "/run.json", encoding="utf-8") as f:
        reference = json.load(f)
    words = reference["our_flags"].split()
    flags = {**dict(zip(words[::2], words[1::2])), "-i": os.path.join(FIXTURE, reference["shards"]),
             "-o": "pytorch"}
    run_ok(flags)
    columns = log_columns("pytorch")
    check_close(columns["trl"], reference["losses"], tolerance(2e-5, 3e-2), "losses")
    check_close(columns["norm"], reference["norms"], tolerance(2e-4, 5e-2), "norms")
    check_close(columns["lr"], reference["learning_rates"], 1e-8, "learning rates")


def format_tool(*words):
    p = subprocess.run([sys.executable, FORMAT_TOOL, *map(str, words)], capture_output=True, text=True)
    check_equal((p.returncode, p.stderr), (0, ""), f"llmc_format.py {words[0]}")
    return p.stdout


def test_llmc_format():
    """A shard and checkpoints of the independent script load here, and it reads ours, value for value."""
    format_tool("write-shard", "theirs_train.bin", "--tokens", 3000, "--vocab", 250, "--seed", 1)
    format_tool("write-shard", "theirs_val.bin", "--tokens", 700, "--vocab", 250, "--seed", 2)
    for version in (3, 5):
        model, folder = f"theirs_v{version}.bin", f"theirs_v{version}"
        # padded to a multiple of 8 that is not one of 128: the file says what the padding is
        written = format_tool("write-model", model, "--L", 2, "--NH", 4, "--C", 64, "--T", 32, "--V", 250,
                              "--Vp", 256,
                              "--version", version)
        flags = {"-e": model, "-i": "theirs_train.bin", "-j": "theirs_val.bin"}
        result = run_ok({**flags, "-v": 1, "-l": 0, "-x": 1, "-o": folder})
        check("3000 training tokens" in result.out, "the number of tokens in their shard")
        read = format_tool("read-model", model_path(folder))
        if Program.precision == "BF16" and version == 3:        # rounded on the way: only shapes can agree
            names = [[line.split()[:2] for line in text.splitlines()[1:]] for text in (written, read)]
            check_equal(names[1], names[0], "tensors of our checkpoint")
        else:
            check_equal(read.splitlines()[1:], written.splitlines()[1:],
                        f"our copy of their version {version}")
        evaluated = run_ok({**flags, "-x": 0}).val_losses()
        check_close(evaluated, result.val_losses()[:1], tolerance(0, 1e-2), "val loss of their model")
    format_tool("write-model", "theirs_304.bin", "--L", 1, "--NH", 2, "--C", 32, "--T", 32, "--V", 300,
                "--Vp", 304)
    run_ok({"-e": "theirs_304.bin", "-x": 2, "-o": "theirs_304"})
    check("V 300 L 1 NH 2 C 32 Vp 304" in format_tool("read-model", model_path("theirs_304")),
          "Vp of the file is kept")


def test_d12():
    """The 124M model on tinyshakespeare: five losses of PyTorch."""
    if not Program.slow:
        skip("takes a minute; --slow runs it")
    elif not os.path.exists(SHAKESPEARE + "train.bin"):
        skip("no tinyshakespeare shards: make tinyshakespeare")
    else:
        with open(EXPECTED_D12, encoding="utf-8") as f:
            runs = json.load(f)["runs"]
        for reference in runs:
            words = reference["our_flags"].split()
            result = run_ok({"-e": "d12", "-b": 2, "-t": 64, "-x": 5, "-l": "1e-4",
                             "-i": SHAKESPEARE + "train.bin",
                             "-j": SHAKESPEARE + "val.bin", **dict(zip(words[::2], words[1::2]))}, threads=2)
            check_close(result.losses(), reference["losses"], tolerance(1e-4, 5e-2), reference["our_flags"])
        check("124439808 parameters" in result.out, "parameters of d12 (V=50257 rows)")
        check("124318464 with weight decay, 121344 without" in result.out, "parameters by weight decay")
        check("36096 zeros" in result.out, "47 rows of padding")


# ---- sampling ----

def trained_model():
    """A model that has seen enough bytes to prefer letters; made once."""
    if not os.path.exists("sampler"):
        run_ok({"-o": "sampler", "-x": 60, "-l": "1e-2", "-b": 8})
    return model_path("sampler")


def test_prompt():
    flags = {"-e": trained_model(), "-i": "nothing.bin", "-j": "nothing.bin", "-x": 0, "--prompt": "tak "}
    before = snapshot()
    one, two = run_ok(flags), run_ok(flags)
    check_equal(len(one.samples()), 1, "samples")
    check(one.samples()[0].startswith("tak ") and len(one.samples()[0]) > 4,
          f"{one.samples()}: text after the prompt")
    check_equal(two.samples(), one.samples(), "the same text twice")
    check_equal((one.losses(), one.val_losses()), ([], []), "only text: losses printed")
    check_equal(snapshot(), before, "the disk after generating")
    check(run_ok({**flags, "--seed": 5}).samples() != one.samples(), "another --seed writes the same text")

    greedy = [run_ok({**flags, **more}).samples() for more in
              ({"--temperature": 0}, {"--temperature": 0, "--seed": 5}, {"--top-k": 1},
               {"--top-k": 1, "--seed": 9})]
    check_equal(greedy[1:], greedy[:1] * 3, "temperature 0 and top-k 1, whatever the seed")
    three = run_ok({**flags, "--num-samples": 3}).samples()
    check_equal(len(three), 3, "samples of --num-samples 3")
    check(len(set(three)) > 1, "samples of one run are all alike")
    check_equal(three[0], one.samples()[0], "the first of three samples")
    for wanted in (1, 5):
        text = run_ok({**flags, "-g": wanted, "--temperature": 0}).samples()[0]
        check_equal(len(text), 4 + wanted, f"length of the prompt and {wanted} tokens")
    far = run_ok({**flags, "-g": 1000, "--temperature": 0}).samples()[0]
    check_equal((len(far), far[:len(greedy[0][0])]), (1004, greedy[0][0]), "a text far beyond T")
    longest = run_ok({**flags, "--prompt": "a" * (T - 2), "-g": 5}).samples()
    check(longest and T - 1 <= len(longest[0]) <= T + 3, "text after the longest prompt")
    nothing = run_ok({**flags, "--prompt": "", "-g": 5})
    check_equal((nothing.val_losses(), len(nothing.samples())), ([], 1), "an empty prompt: text from nothing")
    odd = run_ok({**flags, "--prompt": "\u00e9\u00df\u4e16"})
    check(odd.samples()[0].startswith("\u00e9\u00df\u4e16".encode().decode("latin-1")),
          "a prompt that is not ASCII")


def test_samples_without_tokenizer():
    result = run_ok({"-e": NO_TEXT, "-x": 2, "-s": 1, "-g": 9, "--num-samples": 2, "--temperature": 0.1})
    samples = result.samples()
    check_equal(len(samples), 4, "samples after steps 1 and 2")
    ids = [[int(x) for x in text.split()] for text in samples]
    check(all(1 <= len(x) <= 9 and max(x) < 300 for x in ids), f"token ids: {ids}")
    lengths = [len(run_ok({"-e": NO_TEXT, "-x": 1, "-s": 1, "-g": wanted}).samples()[-1].split())
               for wanted in (T - 1, 1000)]
    check(lengths[0] <= T - 1 and lengths[1] <= 1000, f"more ids than asked for: {lengths}")


# ---- output and files ----

def test_help():
    p = subprocess.run([Program.path, "--help"], capture_output=True, text=True, timeout=LIMIT_S)
    check_equal((p.returncode, p.stderr), (0, ""), "--help")
    check(max(map(len, p.stdout.splitlines())) <= 110, "--help is wider than 110 columns")
    mixed = subprocess.run([Program.path, "-b", "8", "--help"], capture_output=True, text=True,
                           timeout=LIMIT_S)
    check_equal((mixed.returncode, mixed.stdout), (0, p.stdout), "--help after other flags")

    run_ok({"-o": "settings", "-x": 1})
    with open("settings/run.json", encoding="utf-8") as f:
        settings = json.load(f)["settings"]
    check(len(settings) >= 30, "run.json holds all settings")
    # each flag's entry goes from its --name at the left to the next flag's
    entries = {}
    for line in p.stdout.splitlines()[2:]:
        match = re.match(r"  (?:(-\S+)\s+)?\s*--(\S+)", line)
        if match:
            name = match[2]
            entries[name] = line
        else:
            entries[name] += " " + line.strip()
    check_equal(sorted(entries), sorted(list(settings) + ["help"]), "flags in --help and in run.json")
    for name in settings:
        check("(default " in entries.get(name, ""), f"--help does not say the default of --{name}")
    letters = re.findall(r"^  (-\S+)", p.stdout, re.M)
    letters = {letter.strip("-") for group in letters for letter in group.split(",")}
    missing = set("i j e o b t z d x l k u q c v m h s g a f w r ge".split()) - letters
    check(not missing, f"--help lacks {sorted(missing)}")


def test_run_files():
    flags = {"-o": "deep/er/files", "-x": 4, "-v": 2, "-s": 2, "--prompt": 'a "quoted\\ \u00e9 prompt'}
    result = run_ok(flags)
    folder = flags["-o"]
    check_equal(sorted(os.listdir(folder)),
                ["DONE_00000004", "main.log", "metrics.jsonl", "model_00000004.bin", "run.json",
                 "state_00000004_00000.bin"], "files")
    with open(folder + "/main.log", encoding="ascii") as f:
        lines = f.read().splitlines()
    check(all(LOG_LINE.fullmatch(line) for line in lines), "main.log has other lines than its three forms")
    check_equal([line.split(" ")[0] + line.split(" ")[1][:4] for line in lines],
                ["s:0tel:", "s:0trl:", "s:1trl:", "s:2tel:", "s:2trl:", "s:3trl:", "s:4tel:"],
                "lines of main.log")

    def no_constants(word):             # Python's reader would take NaN, which is not JSON
        raise ValueError(word)
    with open(folder + "/metrics.jsonl", encoding="utf-8") as f:
        records = [json.loads(line, parse_constant=no_constants) for line in f]
    with open(folder + "/run.json", encoding="utf-8") as f:
        settings = json.load(f, parse_constant=no_constants)
    check_equal(settings["settings"]["prompt"], flags["--prompt"], "the prompt in run.json")
    check_equal(settings["precision"], Program.precision, "precision in run.json")
    steps = [r for r in records if "loss" in r]
    columns = log_columns(folder)
    check_close([r["loss"] for r in steps], columns["trl"], 1e-6, "losses in metrics.jsonl and main.log")
    check_close(result.losses(), columns["trl"], 0, "losses on the screen and in main.log")
    check_close([r["val_loss"] for r in records if "val_loss" in r], result.val_losses(), 1e-6, "val losses")
    check_equal([r["tokens"] for r in steps], [B * T * (i + 1) for i in range(4)], "tokens seen")
    check(all(r["ms"] > 0 and r["tokens_per_s"] > 0 for r in steps), "times are positive")
    check_close([r["tokens_per_s"] * r["ms"] / 1e3 for r in steps], [B * T] * 4, 0.5,
                "tokens/s times seconds")
    check(re.search(r"^step 4/4 \| loss \d+\.\d{6} \| lr \S+ \| norm \S+ \| .* \| ETA 0:00:00$", result.out,
                    re.M),
          "the last progress line")


def test_command_line_forms():
    usual = run_ok({"-b": 2}).losses()
    words = [Program.path, "--model=" + TINY, "--train-data", "train.bin", "--val-data=val.bin",
             "--micro-batch=2",
             "--max-steps", "5", "--val-every=0", "--sample-every=0", "--tf32=0"]
    p = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, env=Program.environment(1))
    check_equal(Result(p.returncode, p.stdout, p.stderr, words).losses(), usual,
                "long names, with = or blank")
    check_equal(run_ok({"-b": 2, "-e": "V256,T32,C32,NH2,L2"}).losses(), usual,
                "a descriptor in another order")
    check_equal(run_ok({"-b": 2, "-l": ".0003"}).losses(), usual, "a number without a zero")


# ---- bad input ----

def test_bad_shards():
    tokens = list(sentences(3, 3000))
    whole = read_bytes(write_shard("whole.bin", tokens))
    bad = {
        "empty": (b"", "empty"),
        "headless": (whole[:500], "500"),
        "only a header": (struct.pack("<256i", SHARD_MAGIC, 1, *[0] * 254), "bad_shard.bin", T + 1),
        "truncated": (whole[:-2], "3000", "2999"),
        "half a token": (whole[:-1], "3000"),
        "too long": (whole + b"\0\0", "3000", "3001"),
        "wrong magic": (struct.pack("<i", 20240521) + whole[4:], "20240521", SHARD_MAGIC),
        "a model": (struct.pack("<i", MODEL_MAGIC) + whole[4:], MODEL_MAGIC),
        "version 2": (whole[:4] + struct.pack("<i", 2) + whole[8:], "version 2"),
        "negative count": (whole[:8] + struct.pack("<i", -3000) + whole[12:], "-3000"),
        "huge count": (whole[:8] + struct.pack("<i", 2**31 - 1) + whole[12:], "2147483647"),
        "smallest count": (whole[:8] + struct.pack("<i", -2**31) + whole[12:], "-2147483648"),
        "shorter than a row": (struct.pack("<256i", SHARD_MAGIC, 1, T, *[0] * 253) + bytes(2 * T), T + 1, T),
        "token beyond V": (whole[:1024] + struct.pack("<10H", *tokens[:9], 256) * 300, "256", "255"),
        "text": (b"to be or not to be " * 100, "bad_shard.bin"),
    }
    for name, (data, *said) in bad.items():
        write_bytes("bad_shard.bin", data)
        check_refused(name + " training shard", {"-i": "bad_shard.bin"}, "bad_shard.bin", *said)
        check_refused(name + " validation shard", {"-j": "bad_shard.bin", "-v": 1}, "bad_shard.bin", *said)
    write_bytes("bad_shard.bin", bad["wrong magic"][0])
    check_refused("one bad shard among good ones", {"-i": "[bt]*a*.bin"}, "bad_shard.bin")
    check_refused("missing shard", {"-i": "no/such.bin"}, "no/such.bin")
    check_refused("missing validation shard", {"-j": "such.bin", "-v": 1}, "such.bin")
    check_refused("pattern that matches nothing", {"-i": "nothing_*.bin"}, "nothing_*.bin")
    check_refused("folder as a shard", {"-i": "."}, "'.'")
    check_refused("validation on the training data", {"-j": "train.bin", "-v": 1}, "train.bin")


def test_late_bad_token():
    """A wrong token far into the data stops the run when it is reached, with a sentence and no checkpoint."""
    tokens = list(sentences(3, 3000))
    tokens[2000] = 256
    write_shard("late.bin", tokens)
    result = run({"-i": "late.bin", "-x": "epoch", "--shuffle": 0, "-o": "late"})
    check_equal(result.code, 1, "exit code")
    check(len(result.err.splitlines()) <= 3 and "256" in result.err and "late.bin" in result.err, result.err)
    check_equal(glob.glob("late/model_*"), [], "checkpoints")
    check(len(log_lines("late")) >= 10, "the steps before are in main.log")


def test_bad_checkpoints():
    good = read_bytes(trained_model())

    def patched(**fields):
        names = ["magic", "version", "T", "V", "L", "NH", "C", "Vp"]
        header = list(struct.unpack("<256i", good[:1024]))
        for field, value in fields.items():
            header[names.index(field)] = value
        return struct.pack("<256i", *header) + good[1024:]
    bad = {
        "empty": (b"", "empty"),
        "headless": (good[:100], "truncated", "100"),
        "only a header": (good[:1024], "1024", len(good)),
        "truncated": (good[:-4], len(good) - 4, len(good)),
        "too long": (good + b"\0", len(good) + 1, len(good)),
        "wrong magic": (patched(magic=20240325), "20240325", MODEL_MAGIC),
        "a shard": (read_bytes("train.bin"), "a token shard", SHARD_MAGIC),
        "a short text": (b'{"settings": 1}\n', "text"),
        "a long text": (b"to be or not to be\n" * 100, "text"),
        "no text": (bytes(range(256)) * 8, "not a model checkpoint"),
        "version 1": (patched(version=1), "version 1", "3", "5"),
        "version 5 of fp32 size": (patched(version=8 - good[4]), len(good)),
        "L 2^30": (patched(L=2**30), 2**30),
        "L -1": (patched(L=-1), "-1"),
        "C 0": (patched(C=0), "C=0"),
        "C -32": (patched(C=-32), "-32"),
        "C 2^31-1": (patched(C=2**31 - 1, NH=1), 2**31 - 1),
        "C 36": (patched(C=36), "C=36 is not a multiple of 8"),
        "NH 0": (patched(NH=0), "NH=0"),
        "C not a multiple of NH": (patched(NH=3), "32", "3"),
        "V beyond Vp": (patched(V=257), "257", "256"),
        "V 2^31-1": (patched(V=2**31 - 1, Vp=2**31 - 1), 2**31 - 1),
        "Vp negative": (patched(Vp=-256), "-256"),
        "Vp huge": (patched(Vp=2**31 - 8), 2**31 - 8),
        "T 0": (patched(T=0), "T=0"),
        "T 2^31-1": (patched(T=2**31 - 1), 2**31 - 1),
        "all sizes huge": (patched(L=10000, C=2**20, T=2**24), 2**20),
    }
    for name, (data, *said) in bad.items():
        write_bytes("bad_model.bin", data)
        check_refused(name + " checkpoint", {"-e": "bad_model.bin"}, "bad_model.bin", *said)
    check_refused("missing checkpoint", {"-e": "no/model.bin"}, "no/model.bin")
    check_refused("missing checkpoint here", {"-e": "model_00000001.bin"}, "model_00000001.bin")
    os.mkdir("no_models")
    check_refused("folder without a model", {"-e": "no_models/"}, "-e no_models: ", "no model_*.bin")
    os.mkfifo("fifo.bin")                               # nobody will ever write to it
    check_refused("FIFO as a checkpoint", {"-e": "fifo.bin"}, "fifo.bin", "regular file")


def test_bad_flags():
    number = 10**19
    cases = [
        ({"-b": 0}, "-b", "'0'", 65536), ({"-b": "x"}, "-b", "'x'"), ({"-b": "4x"}, "-b", "'4x'"),
        ({"-b": -4}, "-b", "'-4'"), ({"-b": 65537}, "65537"), ({"-b": number}, "-b", number),
        ({"-b": "4.5"}, "4.5"), ({"-b": "1e1"}, "1e1", "10"), ({"-b": "0x10"}, "0x10"),
        ({"-b": " 4"}, "' 4'"),
        ({"-b": ""}, "-b", "''"), ({"-l": "nan"}, "-l", "nan"), ({"-l": "inf"}, "-l", "inf"),
        ({"-l": -1}, "-1"),
        ({"-l": "1e400"}, "1e400"), ({"-l": "1e-400"}, "1e-400"), ({"-l": "1e-4x"}, "1e-4x"),
        ({"-l": ""}, "''"),
        ({"-q": 2}, "-q", "'2'"), ({"-q": -0.5}, "-0.5"), ({"-k": "foo"}, "-k", "foo", "cosine", "wsd"),
        ({"-k": "cosin"}, "cosin", "cosine"), ({"-x": -1}, "-x", "-1"), ({"-x": "1e5"}, "1e5"),
        ({"-x": ""}, "-x"), ({"-x": " 2"}, "-x", "' 2'"), ({"-x": "+2"}, "'+2'"), ({"-x": "02"}, "'02'"),
        ({"-x": "1e5"}, "-x", "digits only: 100000"), ({"-x": "2 "}, "'2 '"), ({"-x": "0x2"}, "'0x2'"),
        ({"-b": "+4"}, "'+4'"), ({"-b": "04"}, "'04'"), ({"-l": "+1"}, "'+1'"), ({"-l": "00.1"}, "'00.1'"),
        ({"-x": number}, number), ({"-x": "epochs"}, "epochs"), ({"-r": 3}, "-r", "3"),
        ({"-f": 2}, "-f", "2"),
        ({"-a": "yes"}, "yes"), ({"-v": -1}, "-v", "-1"), ({"-m": 0}, "-m", "'0'"), ({"-g": 0}, "-g", "'0'"),
        ({"--num-samples": 0}, "--num-samples", "'0'"), ({"--temperature": -1}, "--temperature", "-1"),
        ({"--temperature": "nan"}, "nan"), ({"--top-k": -1}, "--top-k", "-1"), ({"-c": -0.1}, "-0.1"),
        ({"--beta1": 1}, "--beta1", "'1'"), ({"--beta2": -1}, "-1"), ({"--seed": -1}, "-1"),
        ({"--eps": "1e"}, "1e"), ({"-u": -1}, "-u", "-1"), ({"--grad-clip": -1}, "--grad-clip", "-1"),
        ({"-z": 130}, "130", "use -z 128"), ({"-z": 100}, "100", "128"), ({"-z": 1}, "-z 1", "-zs"),
        ({"-z": 0}, "-z 0", "-zs"), ({"-z": 3}, "-z 3", "-zs"), ({"-z": -128}, "-128"),
        ({"-z": number}, number),
        ({"-z": 2, "-b": 1, "-t": 4}, "-z 2", "-zs"), ({"-z": 0, "-b": 1, "-t": 1}, "-z 0", "-zs"),
        ({"-z": 2**64 + 128}, 2**64 + 128), ({"-z": 10**15}, 10**15),
        ({"-t": T + 1}, T + 1, T), ({"-t": -1}, "-t", "-1"), ({"-t": 2**24 + 1}, 2**24 + 1),
        ({"--foo": 1}, "--foo"), ({"-Z": 1}, "-Z"), ({"--batch": 4}, "--batch"), ({"-bb": 4}, "-bb"),
        ({"--": 1}, "--"), ({"-": 1}, "'-'"), ({"--help-me": 1}, "--help-me"),
        ({"-ge": 1, "-r": 1}, "-ge 1", "-r 0"), ({"-ge": 3}, "-ge", "3"),
        ({"--grad-dtype": "fp8"}, "fp8", "bf16"),
        ({"-x": 0, "-o": "refused"}, "-x 0", "refused"),
    ]
    for flags, *said in cases:
        name = " ".join(f"{flag} {value}" for flag, value in flags.items())
        check_refused(name, flags, *said)
    extras = [
        (["--micro-batch", "4"], "twice", "-b", "--micro-batch"), (["-b", "4"], "twice", "-b"),
        (["-z", "128", "-d", "128"], "twice", "-z", "-d"), (["--seed=1", "--seed", "1"], "--seed", "twice"),
        (["-u"], "-u", "value"), (["--prompt"], "--prompt", "value"), (["-u", "-c", "0"], "-u", "value"),
        (["--seed="], "--seed", "''"), (["--seed=x"], "'x'"), (["stray"], "stray"), (["-u", "1", "2"], "'2'"),
        (["--foo=1"], "--foo"), (["\x1b[31m\n\n\n\n"], "unexpected"),
        (["--" + "long" * 3000, "1"], "longlong"),
    ]
    for words, *said in extras:
        check_refused(" ".join(words)[:40], {}, *said, extra=words)


def test_bad_models():
    for text, *said in (
            ("nonsense", "nonsense"), ("d13", "d13", "d12"), ("d", "'d'"), ("d12x", "d12x"), ("d-12", "d-12"),
            ("d4294967302", "d4294967302", "no such size"), ("d+6", "d+6"), ("d 6", "'d 6'"), ("d06", "d06"),
            ("gpt3:c4294968064", "no such size"), ("gpt3:c+768", "c+768"), ("gpt3:c0768", "c0768"),
            ("L2,NH2,C32,T32,V+256", "V+256"), ("L2,NH2,C32,T32,V 256", "V 256"),
            ("L02,NH2,C32,T32,V256", "L02"), ("L2, NH2,C32,T32,V256", "L2, NH2"),
            (" L2,NH2,C32,T32,V256", "' L2"), ("L,NH2,C32,T32,V256", "'L,"),
            ("L2,NH2,C32,T32,V4294967552", "V", "4294967552"),
            ("gpt3:c100", "gpt3:c100"), ("gpt3:x", "gpt3:x"), ("L4", "L4"),
            ("L2,NH2,C32,T32", "L2,NH2,C32,T32"),
            ("L2,NH2,C32,T32,V256,", "V256,"), ("L2,L2,NH2,C32,T32,V256", "L2,L2"),
            ("L2,NH2,C32,T32,V256,V256", "V256,V"),
            ("L2,NH2,C32,T32,V256,X1", "X1"), ("L2 NH2 C32 T32 V256", "L2 NH2"), ("L2NH2C32T32V256", "L2NH2"),
            ("L2,NH2,C32,T32,V256x", "V256x"), ("L2,NH3,C32,T32,V256", "C=32", "NH=3"),
            ("L2,NH2,C36,T32,V256", "C=36 is not a multiple of 8"),
            ("L0,NH2,C32,T32,V256", "L0"),
            ("L2,NH2,C0,T32,V256", "C0"), ("L-2,NH2,C32,T32,V256", "L-2"), ("L2,NH2,C32,T32,V1", "V=1"),
            ("L2,NH2,C32,T32,V70000", "70000", "65536"), ("L99999,NH2,C32,T32,V256", "99999"),
            ("L99999999999999999999,NH2,C32,T32,V256", "99999999999"),
            ("L2,NH2,C32,T99999999,V256", "99999999"),
            ("L2,NH2,C2147483648,T32,V256", "2147483648"), ("x" * 5000, "xxxx"), ("", "-e")):
        check_refused("-e " + text[:50], {"-e": text}, *said)
    for name, flags, *said in (
            ("a model of petabytes", {"-e": "L10000,NH1,C1048576,T32,V256"}, "GiB", "memory|free"),
            ("activations of terabytes", {"-e": "L100,NH1,C65536,T32,V256", "-b": 65536}, "GiB",
             "memory|free"),
            ("more activations than 64 bits count", {"-e": "L10000,NH1,C1048576,T32767,V256", "-b": 65536},
             "32767|elements"),
            ("B*T beyond 32 bits", {"-e": "L2,NH2,C32,T16777216,V256", "-b": 65536}, "65536", "16777216"),
            ("a batch of gigabytes", {"-e": "L2,NH2,C32,T2048,V256", "-b": 65536}, "65536", "GiB")):
        check_refused(name, flags)
        result = run(flags)
        for text in said:
            check(re.search(text, result.err), f"stderr lacks {text}: {result.err.strip()}")


def test_bad_prompts():
    model = trained_model()
    for name, flags, *said in (
            ("prompt without a tokenizer", {"-e": NO_TEXT, "--prompt": "hi"}, "--prompt", "300"),
            ("prompt longer than T", {"-e": model, "--prompt": "a" * T}, T, T - 2),
            ("prompt longer than -t", {"-e": model, "--prompt": "aaaaaaa", "-t": 8}, "7", "6")):
        check_refused(name, {**flags, "-x": 0, "-o": ""}, *said)
        check_refused(name + ", in a training run", {**flags, "-s": 5, "-x": 10}, *said)
    flags = {"-e": model, "--prompt": "hi", "-i": None, "-x": None}
    check_refused("a prompt, but neither -x 0 nor data", flags, "hint: -x 0")


def test_bad_folders():
    write_bytes("plain_file", b"x")
    check_refused("-o below a file", {"-o": "plain_file/run"}, "plain_file/run")
    check_refused("-o is a file", {"-o": "plain_file"}, "plain_file")
    check_refused("-o in /proc", {"-o": "/proc/nowhere/run"}, "/proc/nowhere")
    check_refused("-o with a name too long", {"-o": "n" * 300}, "n" * 60)
    check_refused("-o without room for names in it", {"-o": "./" * 2025}, "4050 bytes", "at most", "hint: ")
    run_ok({"-o": "held", "-x": 1})
    check_refused("-o that holds a run", {"-o": "held"}, "held", "already holds")
    for name in ("main.log", "metrics.jsonl", "run.json"):
        os.makedirs("pipes")
        os.mkfifo("pipes/" + name)
        check_refused(f"FIFO as {name}", {"-o": "pipes"}, name, "regular file")
        shutil.rmtree("pipes")
    if os.geteuid() == 0:
        skip("a folder without write permission: root may write everywhere")
    else:
        os.mkdir("locked", 0o555)
        check_refused("-o without permission", {"-o": "locked"}, "locked")


# ---- things that go wrong on the way ----

def test_not_finite():
    """A model that has diverged: updates are skipped, which is said, then the run stops without saving."""
    data = without_checksum(read_bytes(trained_model()))
    width = 2 if Program.precision == "BF16" else 4
    data[1024:1024 + width] = (b"\xc0\x7f" if width == 2 else b"\0\0\xc0\x7f")      # wte[0] = NaN
    write_bytes("nan_model.bin", data)
    tokens = [x % 2 for x in sentences(1, 5000)]
    write_shard("zeros.bin", tokens)                    # token 0 is looked up in every row
    result = run({"-e": "nan_model.bin", "-i": "zeros.bin", "-x": 100, "-o": "nan"})
    check_equal(result.code, 1, "exit code")
    lines = result.err.splitlines()
    skips = [line for line in lines if "skipped" in line and line.startswith("step ")]
    check(1 < len(skips) <= 50 and len(lines) - len(skips) <= 3,
          f"stderr has {len(lines)} lines, {len(skips)} skips")
    check("in a row" in result.err, "the last sentence says why the run stops")
    if Program.precision != "FP16":                     # its loss scale skips a few of its own
        check_equal((len(skips), len(log_lines("nan"))), (20, 20), "skipped updates and logged steps")
    check_equal(glob.glob("nan/model_*"), [], "checkpoints")
    check(all(LOG_LINE.fullmatch(line.strip()) for line in log_lines("nan")), "main.log's form with NaN")
    with open("nan/metrics.jsonl", encoding="utf-8") as f:
        check(all(json.loads(line, parse_constant=lambda word: "bad")["loss"] is None for line in f),
              "metrics.jsonl")


def test_skips_in_a_row():
    """Twenty skipped updates in a row end a run; nineteen, one good one and nineteen do not."""
    if Program.precision == "FP16":
        skip("FP16 holds no number that is this large", 4)
        return
    # Whatever the context, the logit of token 1 is very small, which harms nobody but who asks for it: then
    # the gradient's norm is larger than fp32 holds.
    model = "L1,NH1,C16,T1,V256"
    run_ok({"-e": model, "-x": 1, "-l": 0, "-b": 1, "-o": "rare"})
    data, width = without_checksum(read_bytes(model_path("rare"))), 2 if Program.precision == "BF16" else 4

    def put(first, values):
        for i, x in enumerate(values):
            at = 1024 + (first + i) * width
            data[at:at + width] = struct.pack("<f", x)[4 - width:]
    put(16, [-3e38] * 16)                               # wte of token 1
    size = sum(param_sizes(1, 256, 1, 1, 16, 256))
    put(size - 32, [0.0] * 16 + [1 / 16] * 16)          # lnfw, lnfb
    write_bytes("rare.bin", data)
    for bad, code in ((19, 0), (20, 1)):
        wanted = 2 * (bad * [1] + [0])                  # a shard is a row: 0 goes on with this
        for i, token in enumerate(wanted):
            write_shard(f"rare{bad}_{i:02d}.bin", [0, token])
        result = run({"-e": "rare.bin", "-i": f"rare{bad}_*.bin", "-b": 1, "-l": 0, "--shuffle": 0,
                      "-x": len(wanted)})
        skips = [int(n) for n in re.findall(r"^step (\d+):.*skipped$", result.err, re.M)]
        expected = [i + 1 for i, token in enumerate(wanted) if token]
        check_equal((result.code, skips), (code, expected if code == 0 else expected[:20]),
                    f"exit code and skipped steps, twice {bad} in a row")


def test_not_finite_validation():
    data = without_checksum(read_bytes(trained_model()))
    width = 2 if Program.precision == "BF16" else 4
    data[1024:1024 + width] = (b"\xc0\x7f" if width == 2 else b"\0\0\xc0\x7f")      # wte[0] = NaN
    result = run({"-e": write_bytes("nan_val.bin", data), "-x": 0})
    check_equal((result.code, re.findall("^val loss.*$", result.out, re.M)), (1, ["val loss nan"]),
                "exit code and val loss of -x 0")
    check(len(result.err.splitlines()) == 1 and result.err.startswith("warning: ") and
          "not finite" in result.err, f"stderr: {result.err}")


def test_failed_start():
    """A folder without the line of a step is no run; one with it is kept as it is."""
    for main_log in (b"", b"s:0 tel:5.545\n"):
        os.mkdir("failed")
        write_bytes("failed/main.log", main_log)
        write_bytes("failed/metrics.jsonl", b"")
        run_ok({"-o": "failed", "-x": 2})
        check_equal(len(log_lines("failed")), 2, f"steps in a folder whose main.log held {main_log}")
        check_refused("-o with checkpoints", {"-o": "failed"}, "-o failed", "already holds a run",
                      "(its checkpoints)", "-y 1")
        for path in glob.glob("failed/*_*"):
            os.remove(path)
        check_refused("-o with a step", {"-o": "failed"}, "failed", "already holds a run (main.log)", "-y 1")
        shutil.rmtree("failed")
    run_ok({"-o": "val_first", "-x": 1, "-v": 1})
    check_refused("-o with a validation and a step", {"-o": "val_first"}, "already holds")
    # a disk that is full at the very first file
    def no_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))
    full = run({"-o": "full_start"}, preexec_fn=no_files)
    check_equal(full.code, 1, "exit code where nothing can be written")
    run_ok({"-o": "full_start", "-x": 1})


def test_full_output():
    """Text that could not be written is an error; a model is saved all the same."""
    def to_full(flags):
        with open("/dev/full", "wb") as full:
            p = subprocess.run(Program.command(flags), stdout=full, stderr=subprocess.PIPE, timeout=LIMIT_S,
                               env=Program.environment(1))
        return p.returncode, p.stderr.decode("latin-1")
    prompted = {"-e": trained_model(), "-x": 0, "--prompt": "tak "}
    for flags in ({"-x": 0}, prompted, {"-x": 2, "-o": "unheard"}):
        code, err = to_full(flags)
        check(code == 1 and err.startswith("error: cannot write to standard output") and
              len(err.splitlines()) == 1, f"{flags}: exit code {code}, {err}")
    model_path("unheard")


def start(flags, threads=1, until=b"step 3/"):
    """A run in the background, once it has printed its third step."""
    words = Program.command(flags)
    # no buffer here: what readline had read ahead, communicate would not find
    p = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
                         env=Program.environment(threads))
    hang = threading.Timer(LIMIT_S, p.kill)             # readline has no limit of its own
    hang.start()
    seen = b""
    while until not in seen:
        line = p.stdout.readline()
        if not line:
            break
        seen += line
    hang.cancel()
    check(until in seen, f"the run reaches {until.decode()}")
    return p, seen


def finish(p, seen):
    try:
        out, err = p.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        p.kill()
        out, err = p.communicate()
        check(False, f"the run does not end within {LIMIT_S} s")
    return (seen + out).decode("latin-1"), err.decode("latin-1")


STOPPING = "stopping after the last complete step; Ctrl-C: at once, unsaved\n"


def test_signals():
    flags = {"-z": 20 * T, "-b": 1, "-k": "constant", "-l": "1e-3"}     # most signals meet a step half done
    for i, number in enumerate((signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGINT)):
        folder = f"signal_{i}"
        p, seen = start({**flags, "-x": 10**6, "-o": folder, "-v": 10**5, "-s": 10**5})
        p.send_signal(number)
        out, err = finish(p, seen)
        if Program.precision != "FP16":
            check_equal((p.returncode, err), (0, STOPPING), f"exit code and stderr after {number.name}")
        steps = len(log_lines(folder))
        check_equal(os.path.basename(model_path(folder)), f"model_{steps:08d}.bin",
                    "the checkpoint of the last step")
        check(f"stopped by a signal after step {steps}\n" in out, "the output says why the run ended")
        check(f"step {steps}/1000000" in out, "the last step is printed")
        check(len(re.findall("^val loss", out, re.M)) == 1 and not re.search("^sample ", out, re.M),
              "something is validated or sampled after the signal")
        # it is the model of a run of that many steps: what a dropped step had added up is nowhere
        run_ok({**flags, "-x": steps, "-o": folder + "_whole"})
        check(read_bytes(model_path(folder)) == read_bytes(model_path(folder + "_whole")),
              f"the checkpoint of {steps} steps is not that of a run of {steps} steps")


def test_signal_inside():
    """A signal during a long validation, long sampling, a long step: what was begun is not finished."""
    write_shard("long_val.bin", [0, 1] * 500000)
    work = {"validation": {"-v": 1, "-b": 1, "-t": 1, "-j": "long_val.bin", "-m": 10**6},
            "samples": {"-s": 3, "-x": 6, "--num-samples": 10**5},
            "micro-steps": {"-z": B * T * 10**6}}
    for name, flags in work.items():
        folder = "inside_" + name
        until = b"sample 2 at step 3" if name == "samples" else b"micro-steps a step"
        p, seen = start({"-x": 10, "-o": folder, **flags}, until=until)
        if name != "samples":
            time.sleep(0.2)                             # not in the first of them
        p.send_signal(signal.SIGTERM)
        out, err = finish(p, seen)
        check(p.returncode == 0 and STOPPING in err, f"{name}: exit code {p.returncode}, {err}")
        steps = 3 if name == "samples" else 0
        check_equal((out.count("val loss"), out.count("\nstep ")), (0, steps), f"{name}: losses printed")
        check(out.count("\nsample ") < 10**5, f"{name}: all samples were written")
        check_equal(len(glob.glob(folder + "/model_*")), int(steps > 0), f"{name}: checkpoints")
        if steps == 0:                                  # no step, no run: the folder may be used again
            check("no step was completed: nothing is saved" in out, f"{name}: what became of the run")
            run_ok({"-o": folder, "-x": 1})


def unread(folder):
    """A run that can print no more: nobody reads its output."""
    p = subprocess.Popen(Program.command({"-x": 10**6, "-o": folder}), stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, env=Program.environment(1), pipesize=4096)
    end = time.monotonic() + LIMIT_S
    while not no_room(p.stdout) and time.monotonic() < end:
        time.sleep(0.01)
    check(no_room(p.stdout), "the pipe fills")
    hang = threading.Timer(LIMIT_S, p.kill)             # reading its stderr has no limit of its own
    hang.daemon = True
    hang.start()
    return p


def send_and_wait(p, number):
    """Returns when the signal has been taken, or has ended the program."""
    p.send_signal(number)
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end and p.poll() is None:
        with open(f"/proc/{p.pid}/status", encoding="utf-8") as f:
            if not int(re.search(r"^ShdPnd:\s*(\w+)$", f.read(), re.M)[1], 16) >> number - 1 & 1:
                break
        time.sleep(0.01)


def test_second_signal():
    """A second SIGINT ends a run at once; others after the first are a scheduler's, who has patience."""
    for number in (signal.SIGINT, signal.SIGTERM):
        p = unread("second_" + number.name)
        p.send_signal(number)
        check_equal(p.stderr.readline().decode(), STOPPING, "stderr after the first signal, at once")
        for later in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            send_and_wait(p, later)
        check(p.poll() is None, f"it goes on after {number.name} and others")
        p.send_signal(signal.SIGINT)
        try:
            p.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            p.kill()
        check_equal(p.wait(), 128 + signal.SIGINT, "exit code after the second SIGINT")
        check_equal(p.stderr.read(), b"", "more on stderr")
        p.stdout.close()
        p.stderr.close()


def test_signal_and_closed_output():
    """Ctrl-C ends the other programs of a pipe too (`| tee log`): the model is saved all the same."""
    p = unread("teed")
    p.send_signal(signal.SIGINT)
    check_equal(p.stderr.readline().decode(), STOPPING, "stderr after the signal")
    p.stdout.close()
    try:
        p.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        p.kill()
    check_equal((p.wait(), p.stderr.read()), (0, b""), "exit code and stderr")
    p.stderr.close()
    model_path("teed")


def test_saved_before_the_end():
    """The model is on disk before the last validation and the last samples begin."""
    for name, flags, begun in (("val", {"-v": 10}, b"val loss"), ("text", {"-s": 10}, b"\nsample ")):
        folder = "early_" + name
        out = run_ok({"-x": 1, "-o": folder, "--num-samples": 3, **flags}).out.encode("latin-1")
        at = out.find(b"saved " + model_path(folder).encode())
        check(0 < at < out.rfind(begun), f"{name}: saved at {at} of the output, begun at {out.rfind(begun)}")


def test_kill():
    """Killed at any moment, also while it writes: no half file under a checkpoint's name."""
    model = "L3,NH4,C256,T32,V256"
    whole = 1024 + (2 if Program.precision == "BF16" else 4) * sum(param_sizes(32, 256, 3, 4, 256, 256))
    caught = 0
    for attempt in range(4):
        folder = f"kill{attempt}"
        p, seen = start({"-e": model, "-b": 1, "-t": 8, "-x": 10**6, "-o": folder})
        if attempt == 0:
            time.sleep(0.05)                    # in the middle of training
        else:
            p.send_signal(signal.SIGTERM)
            end = time.monotonic() + 20
            while time.monotonic() < end and not glob.glob(folder + "/*.part") and p.poll() is None:
                pass
        p.kill()
        finish(p, seen)
        caught += bool(glob.glob(folder + "/*.part"))
        sizes = [os.path.getsize(path) for path in glob.glob(folder + "/model_*.bin")]
        check(all(size == whole for size in sizes), f"checkpoints of {sizes} bytes, a whole one has {whole}")
        logged = read_bytes(folder + "/main.log").decode().splitlines()
        check(all(LOG_LINE.fullmatch(line) for line in logged),
              "main.log after a kill")
    print(f"    {caught} of 3 runs were killed in the middle of a checkpoint")


def check_write_failure(result, folder):
    check_equal(result.code, 1, "exit code")
    lines = result.err.splitlines()
    check(1 <= len(lines) <= 3 and "cannot write" in lines[0] and folder in lines[0], f"stderr: {result.err}")
    check_equal(glob.glob(folder + "/model_*"), [], "checkpoints, whole or half")


def test_disk_full():
    """A file system that runs full, and a limit on the size of files, which needs no rights."""
    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))
    result = run({"-o": "limited"}, preexec_fn=small_files)
    check_write_failure(result, "limited")

    os.mkdir("full")
    mounted = os.geteuid() == 0 and subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", "full"],
                                                   capture_output=True).returncode == 0
    if not mounted:
        skip("no right to mount a small file system", 7)
        return
    try:
        check_write_failure(run({"-o": "full/run"}), "full/run")        # the checkpoint does not fit
        shutil.rmtree("full/run")
        with open("full/ballast", "wb") as f:
            f.write(bytes(60 * 1024))
        check_write_failure(run({"-o": "full/log", "-x": 2000, "-b": 1, "-t": 1}),
                            "full/log")      # nor do the logs
        with open("full/more", "wb", buffering=0) as f:
            try:
                while f.write(bytes(512)):
                    pass
            except OSError:
                pass
        result = run({"-o": "full/nothing"})                            # nor the very first file
        check(result.code == 1 and len(result.err.splitlines()) <= 3 and "full/nothing" in result.err,
              result.err)
    finally:
        subprocess.run(["umount", "full"], check=True)


def test_closed_output():
    """A reader that goes away (| head, or tee at Ctrl-C) stops the run as a signal does: it is saved."""
    p = subprocess.Popen(Program.command({"-x": 10**6, "-o": "closed"}), stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, env=Program.environment(1))
    while p.stdout.readline()[:7] not in (b"step 2/", b""):
        pass
    p.stdout.close()
    try:
        p.wait(timeout=60)
    except subprocess.TimeoutExpired:
        p.kill()
        p.wait()
    want = b"nobody reads what is printed: stopping after the last complete step\n"
    check_equal((p.returncode, p.stderr.read()), (0, want), "exit code and stderr")
    p.stderr.close()
    check_equal(int(model_path("closed")[-12:-4]), len(log_lines("closed")), "steps saved, of those done")


if __name__ == "__main__":
    sys.exit(main(__doc__, globals()))
