"""What training computes: losses, gradients, updates, the order of rows, what is skipped, what is saved; of
GPT-2 and of models that are not, with and without dropout.

The judge of losses and gradients is PyTorch's fixtures in test_gpt2, that of masks of dropout golden.json.
Losses are told apart by rows of text that differ much in how hard they are.
"""
import glob
import itertools
import os
import random
import re
import struct

import pytest

from checks import read, write
from trainer import (USUAL as COMMON, Program, assert_close, exact, log_lines, logged_steps,
                     model_path, nan_model, need_fp8, on_cpu, run, run_ok, sentences, tolerance,
                     without_checksum, write_shard)
from twins import doubles, formats, np, trained, uneven_rows

B, T, C, L = 3, 12, 24, 2
MODEL = f"L{L},NH2,C{C},T{T},V256"
USUAL = {**COMMON, "-e": MODEL, "-b": B, "-x": 1}
BLOCKS, NORMS = ("sequential", "parallel", "parallel-tied"), ("layernorm", "rmsnorm")
KINDS = list(itertools.product(range(3), range(2)))
RESIDUAL_WORD = 253         # of a model file's header: 1 where a program kept the residual stream in fp32
pytestmark = pytest.mark.numeric


def flags_of(block, norm):
    return {"--block": BLOCKS[block], "--norm": NORMS[norm]}


def few_steps():
    """A model away from its start, where biases are 0 and norms' weights 1."""
    return trained({"-b": B}, "few_steps", 12)


# ---- rows ----

def test_rows():
    """The loss of any batch and step is the mean of its rows', which epochs, batches and micro-steps take in
    their order."""
    path, count = trained({"-b": 8}, steps=150), 11
    write_shard("rows.bin", uneven_rows(count, T))
    flags = {"-e": path, "-i": "rows.bin", "-l": 0, "-b": 1}
    lying = {**flags, "--shuffle": 0}
    losses = run_ok({**lying, "-x": 2 * count}).losses()
    rows, near = losses[:count], tolerance(2e-6, 1e-2)
    assert losses == rows * 2 and max(rows) - min(rows) > 1, "rows as they lie, twice"

    def mean(*numbers):
        return sum(rows[i % count] for i in numbers) / len(numbers)
    assert_close(run_ok({**lying, "-b": 4, "-x": 5}).losses(),
                 [mean(*range(4 * i, 4 * i + 4)) for i in range(5)], near, "-b 4 goes on in the next epoch")
    assert_close(run_ok({**lying, "-b": 2, "-z": 6 * T, "-x": 3}).losses(),
                 [mean(*range(6 * i, 6 * i + 6)) for i in range(3)], near, "three micro-steps of 2 rows")
    for more, used in (({}, 1), ({"-b": 3}, 3), ({"-b": 3, "-z": 6 * T}, 3)):
        assert_close(run_ok({**flags, "-a": 1, "-x": 3, **more}).losses(), [mean(*range(used))] * 3, near,
                     f"-a 1 {more}: the first batch as it lies, whatever the order")
    orders = {tuple(rows)}
    for seed in (1337, 1338):
        losses = run_ok({**flags, "-x": 2 * count, "--seed": seed}).losses()
        for order in (losses[:count], losses[count:]):
            assert_close(sorted(order), sorted(rows), near, f"seed {seed}: every row once")
            orders.add(tuple(order))
    assert len(orders) == 5, "each seed and each epoch has another order, none that of the file"


def test_mixture():
    """Its rows are test_dataloader.cpp's; a run says how many there are of each source."""
    for k, rows in enumerate((40, 8)):
        write_shard(f"source_{k}.bin", sentences(7 + k, rows * T + 1))
    out = run_ok({"-x": 6, "-z": B * T, "-i": "source_0.bin:1,source_1.bin:2"}).out
    assert re.findall(r"^source: (.*)$", out, re.M) == [
        f"33.33% of the rows, {2 * B / 40:.3g} epochs of 40 rows: source_0.bin",
        f"66.67% of the rows, {4 * B / 8:.3g} epochs of 8 rows: source_1.bin"]
    assert f"schedule: 6 steps, {6 * B / 48:.3g} epochs; " in out


def test_dropout_aside():
    """What is evaluated and written between the steps of a training with dropout knows none."""
    flags = {"-e": few_steps(), "-x": 3, "-l": 0, "-v": 1, "-m": 4, "-s": 1, "-g": T - 4}
    without, dropped = (run_ok({**flags, "--dropout": p}) for p in (0, 0.4))
    assert dropped.val_losses() == without.val_losses() and dropped.losses() != without.losses()
    assert dropped.samples() == without.samples() and len(dropped.samples()) == 3


def test_dropout_by_seed():
    """Masks take all 64 bits of the seed; with --shuffle 0 and -l 0 nothing else does."""
    flags = {"-e": few_steps(), "-x": 2, "-l": 0, "--shuffle": 0, "--dropout": 0.2}
    losses = [run_ok({**flags, "--seed": seed}).losses() for seed in (5, 5, 6, 5 + (1 << 32))]
    assert losses[0] == losses[1] and len({str(found) for found in losses}) == 3


def test_threads():
    """They share out rows, columns and heads, and change no bit."""
    flags = {"-e": "L2,NH3,C72,T70,V500", "-b": 9, "-x": 3, "-l": "1e-2", "--dropout": 0.1, "-c": 0.1}
    for optimizer in ("adamw", "muon"):
        models = [read(model_path(f"threads{n}{optimizer}")) for n in (1, 3) if run_ok(
            {**flags, "--optimizer": optimizer, "-o": f"threads{n}{optimizer}"}, threads=n)]
        assert models[0] == models[1]


# ---- updates ----

@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_rates_of_updates(optimizer):
    """The first of two steps of warm-up has half of both rates. Formulas are test_cpu_ops.cpp's, what each
    tensor gets is test_gpt2's, whole runs are PyTorch's in test_runs.py."""
    flags = {"-e": few_steps(), "-a": 1, "-k": "constant", "--optimizer": optimizer, "-c": 0.1}
    rates, half = {"-l": 0.01}, {"-l": 0.005}
    if optimizer == "muon":
        rates["--muon-lr"], half["--muon-lr"] = 0.05, 0.025
    run_ok({**flags, **rates, "-x": 3, "-u": 2, "-n": 1, "-nk": 0, "-o": "warm_" + optimizer})
    run_ok({**flags, **half, "-o": "half_" + optimizer})
    warm = read(f"warm_{optimizer}/model_00000001.bin")
    assert warm == read(model_path("half_" + optimizer)) != read(flags["-e"])
    by_default = run_ok({"-e": flags["-e"], "--optimizer": optimizer, "-x": 1}).out
    assert {"adamw": "| lr 3.00e-04 |", "muon": "| lr 3.60e-03 |"}[optimizer] in by_default


@pytest.mark.parametrize("model, seed", [
    (MODEL, 1337), ("L3,NH1,C24,T20,V300", 12345678901),
    ("llama:L4,NH2,NKV1,HS16,C16,F32,T20,V300,value_embed", 7)])
def test_initial_weights(model, seed):
    """They are GPT-2's, or the other family's, drawn from the seed alone; a rate of 0 leaves them so."""
    run_ok({"-e": model, "-l": 0, "-c": 1, "--seed": seed, "-o": f"initial{seed}"})
    dims, params = formats.read_checkpoint(model_path(f"initial{seed}"))
    assert dims.text() == model
    for name, want in formats.init_params(dims, seed).items():
        if Program.precision == "BF16":             # as masters are rounded: ties away from zero
            bits = np.ascontiguousarray(want, dtype=np.float32).view(np.uint32) + np.uint32(0x8000)
            want = formats.from_bf16_bits((bits >> np.uint32(16)).astype(np.uint16)).reshape(want.shape)
        assert np.array_equal(params[name], want), name


@pytest.mark.parametrize("steps, skips, code", [(19, 19, 0), (20, 20, 1), (50, 20, 1)])
def test_skip_limit(steps, skips, code):
    """Twenty updates in a row that cannot be made end the run, which is saved; they change no weight."""
    start, folder = nan_model(few_steps()), f"skips{steps}"
    result = run({"-e": start, "-x": steps, "-o": folder})
    skips += not on_cpu() and steps > skips         # the step that is on its way by then
    assert result.skips() == [*range(1, skips + 1)]
    assert (result.code, "20 updates in a row" in result.err) == (code, code == 1)
    assert glob.glob(folder + "/model_*") == [f"{folder}/model_{skips:08d}.bin"]
    assert log_lines(folder)[0].startswith("s:0 trl:nan lr:") and len(log_lines(folder)) == skips
    assert {step["loss"] for step in logged_steps(folder)} == {None}
    before, after = (formats.read_checkpoint(path)[1] for path in (start, model_path(folder)))
    assert all(np.array_equal(after[name], before[name], equal_nan=True) for name in formats.NAMES)


@pytest.mark.parametrize("flag, limit, what, optimizer", [
    ("-sl", 4, "loss", "adamw"), ("-sg", 20, "norm", "adamw"),
    pytest.param("-sl", 4, "loss", "muon", marks=pytest.mark.cpu_only)])
def test_outliers(flag, limit, what, optimizer):
    """Steps with unusual data are skipped, and the run goes on as if they had not been there."""
    # In a run's first 60 steps, and with fewer rows, one norm may be 100 times the others, by the seed or the
    # rounding. In the window it would make anything usual. Here the spike lies above 50 deviations, the rest
    # below 10.
    rows, before, spike, after, kind = 16, 200, 3, 8, what + optimizer
    batch = rows * T
    clean, rng = list(sentences(9, (before + after) * batch + 1)), random.Random(4)
    # the token at which a part ends is the next one's first: the parts join without a trace
    noise = [clean[before * batch]] + [rng.randrange(128, 256) for _ in range(spike * batch - 1)]
    write_shard("clean.bin", clean)
    write_shard("spiky.bin", clean[:before * batch] + noise + clean[before * batch:])
    usual = {"-b": rows, "--shuffle": 0, "-k": "constant", "-l": "3e-3", "--optimizer": optimizer}
    if optimizer == "muon":
        usual["--muon-warmup"] = 0          # its momentum goes by steps, as the rate would
    want = run_ok({**usual, "-i": "clean.bin", "-x": before + after, "-o": "clean" + kind})
    got = run({**usual, "-i": "spiky.bin", flag: limit, "-x": before + spike + after,
               "-o": "spiky" + kind})
    said = re.findall(r"^step (\d+): (\w+) \S+ is \S+ standard deviations above .*: update skipped$", got.err,
                      re.M)
    assert (got.code, said) == (0, [(str(before + 1 + k), what) for k in range(spike)]), got.err
    assert got.losses()[:before] + got.losses()[before + spike:] == want.losses()
    assert read(model_path("spiky" + kind)) == read(model_path("clean" + kind))


# ---- FP8 ----

@pytest.mark.parametrize("more", ["fp8", "fp8-head", "fp8-head --optimizer muon --block parallel-tied"])
def test_fp8(more):
    """Learns as well as without FP8, whose roundings make each step's loss another. Nothing saturates. At
    three times this rate AdamW enlarges any rounding: losses are then up to 0.13 apart, by the seed."""
    need_fp8()
    usual = {"-e": "L2,NH2,C32,T32,V256", "-b": 8, "-x": 150, "-l": "1e-3", "-u": 20, "-c": 0.1}
    kind, *words = more.split()
    usual.update(zip(words[::2], words[1::2]))
    want = run_ok(usual).losses()
    folder = kind + "".join(words[1::2])
    got = run_ok({**usual, "--matmul-dtype": kind, "-o": folder}).losses()
    assert got[0] == want[0] and got[1:] != want[1:]
    assert_close(got, want, 0.03, "losses")
    last = [sum(losses[-30:]) / 30 for losses in (got, want)]
    assert_close(last[:1], last[1:], 0.01, "mean of the last losses")
    assert all(step["saturated"] <= 1e-3 for step in logged_steps(folder))


# ---- saved models ----

@pytest.mark.parametrize("flags", [{**flags_of(*kind)} for kind in KINDS] + [
    {"-e": "L1,NH1,C8,T16,V256"}, {"-e": "L3,NH2,C24,T16,V200", "-c": 0.5}, {"-t": 7}, {"-t": 1},
    {"-e": "L1,NH4,C40,T31,V384", "-r": 2, "-z": 62 * B},
    {"--dropout": 0.4}, {**flags_of(2, 1), "--dropout": 0.2},
    {"-e": "L2,NH2,C32,T16,V256", "--matmul-dtype": "fp8-head"}], ids=str)
def test_saved(flags):
    """A file says what it is, loads again and is the model that was trained; a position that was not seen,
    and the padded vocabulary, are as they were."""
    if "--matmul-dtype" in flags:
        need_fp8()
    folder = "./saved" + "".join(map(str, flags.values()))
    write_shard("low.bin", list(sentences(5, 3000)))
    flags = {"-x": 4, "-v": 3, "-l": "1e-2", "-i": "low.bin", **flags}
    result = run_ok({**flags, "-o": folder})
    path = model_path(folder)
    assert os.path.basename(path) == f"model_{flags['-x']:08d}.bin"
    assert re.findall(r"^saved (\S+) and its state: \S+ [KMGT]iB in \S+ s$", result.out, re.M) == [path]
    dims, p = doubles(path)
    kind = BLOCKS.index(flags.get("--block", "sequential")), NORMS.index(flags.get("--norm", "layernorm"))
    version = (5 if Program.precision == "BF16" else 3) + 100 * (kind != (0, 0))
    header = struct.unpack("<10i", read(path)[:40])
    assert header[1] == version and header[8:] == kind == (dims.block, dims.norm)
    assert dims.text() == flags.get("-e", MODEL)
    lacking = [[], ["ln1b", "ln2b", "lnfb"]][kind[1]] + [[], [], ["ln2w", "ln2b"]][kind[0]]
    assert {name for name in formats.NAMES if p[name].size == 0} == {*lacking, "qnw", "knw", "headw", "vew",
                                                                       "vegw"}
    start, length = formats.init_params(dims, 1337), flags.get("-t", dims.maxT)
    assert not p["wte"][dims.V:].any()
    assert not exact() or np.array_equal(p["wpe"][length:], start["wpe"][length:])
    assert (p["wpe"][:length] != start["wpe"][:length]).any(1).all()
    loaded = run_ok({"-e": folder, "-x": 0, **{"-t": length if "-t" in flags else None}}).val_losses()
    assert_close(loaded, result.val_losses()[-1:], tolerance(0, 2e-2), "loss of what was saved")
    # what learned nothing is saved as it was loaded
    run_ok({"-e": path, "-l": 0, "-c": 0.1, "-o": folder + "_again"})
    assert read(path) == read(model_path(folder + "_again"))


def test_file_of_an_fp32_stream():
    """Of an earlier program: it loads, with a note, and is the same model without that mark."""
    start = few_steps()
    data = without_checksum(read(start))
    data[4 * RESIDUAL_WORD] = 1
    write("marked.bin", data)
    got, want = run_ok({"-e": "marked.bin", "-o": "marked"}), run_ok({"-e": start, "-o": "unmarked"})
    assert re.fullmatch("note: 'marked.bin' was trained with --residual-dtype fp32; here .*\n", got.err)
    assert got.losses() == want.losses() and read(model_path("marked")) == read(model_path("unmarked"))
