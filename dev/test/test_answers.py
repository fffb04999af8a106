"""Masks of shards: what the loss counts, as it reaches the losses, gradients, validations and checkpoints.

The judge is twins.py; where PyTorch is, also dev/reference/train_gpt2.py. Equal bits on several ranks are
test_ranks.py's, the loader's -1 and bad files test_dataloader.cpp's, shards of conversations
test_datasets.py's.
"""
import os
import shutil

import pytest

from checks import read, write
from trainer import (USUAL as COMMON, assert_close, exact, log_columns, log_lines, model_path, refused,
                     run, run_ok, sentences, tolerance, write_shard)
from twins import (FAMILY, doubles, family_logits, family_model, formats, gradients, norm_of, np, softmax,
                   token_losses, trained, windows)

B, T = 4, 12
USUAL = {**COMMON, "-e": f"L2,NH2,C24,T{T},V256", "-b": B, "-x": 1, "-i": "answers.bin", "--shuffle": 0}
pytestmark = pytest.mark.numeric
# Of each row the numbers of its targets that count; the second batch has none.
COUNTED = [range(3), [], [11], range(5, 12), [], [], [], [], [4], range(12), [0, 2, 7], []]


@pytest.fixture(autouse=True)
def data():
    """Twelve rows, and others with the same mask backwards."""
    for name, seed, counted in (("answers", 1, COUNTED), ("questions", 2, COUNTED[::-1])):
        if not os.path.exists(name + ".mask"):
            write_shard(name + ".bin", sentences(seed, len(counted) * T + 1))
            write(name + ".mask", b"\0" + b"".join(bytes(row_mask(row)) for row in counted))


def row_mask(counted):
    return [int(t in counted) for t in range(T)]


def rows_of(name="answers"):
    return windows(formats.Loader(name + ".bin", 1, T).shards[0], T)


def mask_of(rows=slice(None), counted=COUNTED):
    return np.array([row_mask(row) for row in counted])[rows]


def masked_mean(losses, mask):
    return float((losses * mask).sum() / mask.sum())


# and a Llama with each activation that these lack
KINDS = ["GPT-2", "Qwen3", "NanoChat", *(word for word in formats.MLPS if word not in ("swiglu", "relu2"))]


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients(kind):
    """The first batch's: a gradient is the slope of the mean over the targets that count."""
    if kind == "GPT-2":
        start = trained({"-i": "train.bin"}, steps=12)
        dims, p = doubles(start)

        def loss_of(p):
            return masked_mean(token_losses(dims, p, rows_of()[:B]), mask_of(slice(B)))
    else:
        start = "family.bin"
        dims, p = family_model(start, **FAMILY.get(kind, {"mlp": kind}))
        p = {name: x.astype(np.float64) for name, x in p.items()}

        def loss_of(p):
            right = softmax(family_logits(dims, p, rows_of()[:B, :-1]))
            losses = -np.log(np.take_along_axis(right, rows_of()[:B, 1:, None], -1)[..., 0])
            return masked_mean(losses, mask_of(slice(B)))
    flags = {"-e": start, "-t": T}
    for rows in (B, 3 * B):                 # of a step: -a 1 has the first batch in each micro-step
        losses = run_ok({**flags, "-a": 1, "-l": 0, "-x": 2, "-z": rows * T}).losses()
        assert_close(losses, [loss_of(p)] * 2, tolerance(1e-5, 3e-2), f"losses, {rows} rows")
    if not exact():
        return
    grads, rng = gradients(start, {"-t": T}, f"gradients {kind}"), np.random.default_rng(5)
    for name, x in p.items():
        if x.size == 0:
            continue
        size = np.sqrt((grads[name] ** 2).mean()) + 1e-12
        v = (grads[name] / size + rng.standard_normal(x.shape)) * 1e-4
        at = {t: loss_of({**p, name: x + t * v}) for t in (-2, -1, 1, 2)}
        want, got = (8 * (at[1] - at[-1]) - (at[2] - at[-2])) / 12, float((grads[name] * v).sum())
        assert abs(got - want) <= 3e-4 * abs(want) + 1e-9, f"gradient of {name}"
    want = norm_of(grads)
    assert_close(log_columns(f"gradients {kind}")["norm"], [want], 3e-4 * want, "the norm")


def test_micro_steps():
    """However a step is cut: of three micro-steps one has no target that counts, of twelve six."""
    start = trained({"-i": "train.bin"}, steps=12)
    dims, p = doubles(start)
    want = masked_mean(token_losses(dims, p, rows_of()), mask_of())
    norms = []
    for rows, parts in ((12, 1), (12, 2), (4, 1), (2, 1), (1, 1)):
        folder = f"cut{rows}-{parts}"
        flags = {"-e": start, "-z": 12 * T, "-b": rows, "-l": "1e-3", "-x": 3, "-o": folder}
        result = run_ok({**flags, "--head-chunks": parts})
        assert ", of which %d count" % mask_of().sum() in result.out
        assert_close(result.losses()[:1], [want], tolerance(1e-5, 3e-2), "the loss")
        norms.append(log_columns(folder)["norm"])
    for others in norms[1:]:
        assert_close(others, norms[0], tolerance(2e-4, 5e-2), "norms")


def test_nothing_counted():
    """A whole step without a target that counts has no loss and no gradient; the next one is as it was."""
    start = trained({"-i": "train.bin"}, steps=12)
    dims, p = doubles(start)
    run_ok({"-e": start, "-x": 3, "-l": 0, "-o": "nothing"})
    each = token_losses(dims, p, rows_of())
    want = [masked_mean(each[:4], mask_of(slice(4))), 0, masked_mean(each[8:], mask_of(slice(8, 12)))]
    got = log_columns("nothing")
    assert_close(got["trl"], want, tolerance(1e-5, 3e-2), "losses")
    assert got["trl"][1] == got["norm"][1] == 0 and got["norm"][2] > 0


def test_all_counted():
    """A mask of ones changes no bit, and neither does its file beside shards without one."""
    write_shard("all.bin", read("answers.bin")[1024::2])
    run_ok({"-i": "all.bin", "-x": 6, "-o": "without"})
    write("all.mask", b"\1" * (12 * T + 1))
    run_ok({"-i": "all.bin", "-x": 6, "-o": "with"})
    assert log_lines("with") == log_lines("without") and len(log_lines("with")) == 6
    assert read(model_path("with")) == read(model_path("without"))


@pytest.mark.parametrize("rows", [1, 5, 12])
def test_validation(rows):
    """Over the targets that count of the first rows, whatever the batch."""
    start = trained({"-i": "train.bin"}, steps=12)
    dims, p = doubles(start)
    mask = mask_of(counted=COUNTED[::-1])[:rows + 1]
    want = masked_mean(token_losses(dims, p, rows_of("questions")[:rows + 1]), mask)
    flags = {"-e": start, "-x": 1, "-l": 0, "-v": 1, "-j": "questions.bin", "-z": (rows + 1) * T}
    result = run_ok({**flags, "-b": rows + 1, "-m": 1})
    assert_close(result.val_losses(), [want] * 2, tolerance(1e-5, 3e-2), "validation losses")


def test_resume():
    """A run that goes on is the run that never stopped."""
    flags = {"-x": 6, "-n": 3, "-nk": 2, "-b": 2, "-z": 8 * T, "-l": "1e-3", "--shuffle": 1}
    run_ok({**flags, "-o": "whole"})
    shutil.copytree("whole", "resumed")
    for name in os.listdir("resumed"):
        if "00000006" in name:
            os.unlink("resumed/" + name)
    write("resumed/main.log", "".join(log_lines("resumed")[:3]))
    run_ok({**{flag: None for flag in (*USUAL, *flags)}, "-y": 1, "-o": "resumed"})
    for name in ("main.log", "model_00000006.bin"):
        assert read("resumed/" + name) == read("whole/" + name), name
    mask = bytearray(read("answers.mask"))
    mask[20] = 1                                    # other data than the run began with
    for first, said in ((1, "28 targets count"), (0, "same names and sizes, but other tokens")):
        mask[1] = first                             # 0: as many count, in other rows
        write("answers.mask", bytes(mask))
        result = run({**{flag: None for flag in (*USUAL, *flags)}, "-y": 1, "-o": "resumed"})
        assert result.code == 1 and said in result.err, result.err
    os.unlink("answers.mask")                       # the next test makes it anew


@pytest.mark.cpu_only
def test_refusals():
    mask = read("answers.mask")
    write_shard("bad.bin", read("answers.bin")[1024::2])
    for data, said in ((mask[:-1], ["bad.mask", "144 bytes", "145 tokens"]),
                       (mask[:-1] + b"\2", ["bad.mask", "holds 2 at byte 144"]),
                       (bytes(145), ["bad.bin", "count no token"])):
        write("bad.mask", data)
        refused({"-i": "bad.bin"}, *said)
    write("bad.mask", bytes(140) + b"\1" * 5)
    refused({"-j": "bad.bin", "-v": 1, "-m": 2}, "bad.bin", "count no token", "-m N")
    os.unlink("bad.mask")
    head = bytearray(read("bad.bin"))
    head[32] = 1
    write("bad.bin", bytes(head))
    refused({"-i": "bad.bin"}, "cannot open 'bad.mask'")
    head[32] = 2
    write("bad.bin", bytes(head))
    write("bad.mask", mask)
    refused({"-i": "bad.bin"}, "bad.bin", "chat template 2")


def test_beside_pytorch():
    """Five updates by the twin, in micro-steps of which some have no target that counts."""
    pytest.importorskip("torch")
    import train_gpt2                               # pylint: disable=C0415
    start = trained({"-i": "train.bin"}, steps=12)
    flags = {"-e": start, "-x": 5, "-b": 2, "-z": 8 * T, "-l": "1e-3", "-c": 0.1, "-v": 5, "-m": 3,
             "-j": "questions.bin", "--shuffle": 1, "-k": "constant", "-o": "beside"}
    result = run_ok(flags)
    args = train_gpt2.parse_arguments(
        f"""--model {start} --input_bin answers.bin --input_val_bin questions.bin --batch_size 2 --shuffle 1
        --sequence_length {T} --total_batch_size {8 * T} --num_iterations 5 --learning_rate 1e-3
        --learning_rate_decay_frac 1 --weight_decay 0.1 --overfit_single_batch 0 --val_loss_every 5
        --val_max_steps 3 --dtype float64 --device cpu""".split())
    lines = []
    steps = train_gpt2.train(args, *formats.read_checkpoint(start), lines.append)
    vals = [float(line.split()[-1]) for line in lines if line.startswith("val loss")]
    assert_close(result.losses(), [step["loss"] for step in steps], tolerance(2e-5, 3e-2), "losses")
    assert_close(log_columns("beside")["norm"], [step["norm"] for step in steps], tolerance(1e-3, 5e-2),
                 "norms")
    assert_close(result.val_losses(), vals, tolerance(2e-5, 3e-2), "validation losses")
