"""The mask of documents, as users see it: losses, other ways to the same bits, what a run keeps, and errors.

Kernels and models are test_gpt2.cu's, their twins and where documents begin test_cpu_ops.cpp's.
"""
import os
import re
import shutil
import struct

import pytest

from checks import read, write
from jobs import need, ranks
from trainer import (assert_close, model_path, on_cpu, refused, run_ok, sentences, settings_of,
                     write_questions, write_shard)
from twins import doubles, np, row_losses, token_losses, wide_model, windows

T = 32
GPT2, LLAMA = f"L2,NH2,C40,T{T},V256", f"llama:L2,NH4,NKV2,HS16,C48,F96,T{T},V256,qk_norm"
USUAL = {"-e": GPT2, "-i": "train.bin", "-j": "val.bin", "-b": 2, "-z": 256, "-v": 0, "-s": 0, "-l": "1e-2",
         "-m": 100}
MASK = {"--document-mask": 1}


def documents(seed, length):
    """Texts of 1 to 50 tokens, each behind a 0, the end of bytes."""
    text, rng = list(sentences(seed, length)), np.random.default_rng(seed)
    for at in np.cumsum(rng.integers(1, 50, length)):
        if at < length:
            text[at] = 0
    return text


@pytest.fixture(autouse=True)
def data():
    write_shard("train.bin", documents(1, 3000))
    write_shard("val.bin", documents(2, 600))


def trained(folder, **more):
    """The weights that 12 steps leave."""
    flags = {**USUAL, "-x": 12, "-n": 10, **MASK, **more, "-o": folder}
    run_ok(flags)
    return read(f"{folder}/model_{flags['-x']:08d}.bin")[1024:]


@pytest.mark.parametrize("model", [GPT2 + ",window=5,pattern=SL", LLAMA])
def test_same_bits(model):
    """Recomputing, a stop behind the 10th step, and ranks change none. Without the mask they are others."""
    kind = model[:5]
    one = trained(kind, **{"-e": model})
    assert trained(kind + " recomputes", **{"-e": model, "-r": 3}) == one
    again = kind + " again"
    shutil.copytree(kind, again)
    for name in os.listdir(again):
        if "00000012" in name:
            os.unlink(f"{again}/{name}")
    run_ok({**USUAL, "-e": model, "-x": 12, "-n": 10, "-y": 1, "-o": again})
    assert read(again + "/model_00000012.bin")[1024:] == one
    assert trained(kind + " none", **{"-e": model, "--document-mask": None}) != one
    need(2)
    assert trained(kind + " ranks", **{"-e": model, **ranks(2, 1)}) == one


def test_losses():
    """A validation's are NumPy's: in training, and of the run's folder, which keeps the mask."""
    wide_model("wide.bin", GPT2)
    texts = {"--prompt": "ba dum tak lorin mek", "-g": 8, "--temperature": 0}
    out = run_ok({**USUAL, **MASK, **texts, "-e": "wide.bin", "-t": T, "-x": 2, "-v": 2, "-s": 2,
                  "-l": "1e-4", "-o": "run"})
    assert "document-mask=1" in out.out
    assert settings_of("run")["document-mask"] is True
    dims, params = doubles(model_path("run"))
    rows = windows(documents(2, 600), T)
    want, without = (np.mean(row_losses(dims, params, rows, begins))
                     for begins in (rows[:, :-1] == 0, None))
    near = 2e-5 if on_cpu() else 7e-3
    assert abs(want - without) > 3 * near
    alone = {"-i": None, "-j": None, "-b": None, "-z": None, "-l": None, "-m": None, "-x": 0}
    after = run_ok({**USUAL, **alone, "-e": "run"}).val_losses()
    assert_close([out.val_losses()[-1], *after], [want] * 2, near, "with the mask")
    plain = run_ok({**USUAL, **alone, "-e": "run", "--document-mask": 0}).val_losses()
    assert_close(plain, [without], near, "without")
    text = run_ok({**USUAL, **alone, **texts, "-s": None, "-v": None, "-e": "run", "--verbose": -1}).out
    assert text.strip() and text.strip() in out.out         # a prompt beside a batch with documents has none


def test_one_document():
    """A row without an end has the bits of no mask."""
    write_shard("train.bin", sentences(1, 3000))
    assert trained("masked") == trained("plain", **{"--document-mask": None})


def test_questions():
    """A document in front of a question does not change the answer's loss, as NumPy has it, too."""
    wide_model("asked.bin", GPT2)
    before, question, answer = sentences(3, 9), [0, *sentences(4, 8)], sentences(5, 4)
    write_questions("questions.bin", [([*before, *question], [answer])], [0])
    flags = {**USUAL, "-e": "asked.bin", "-t": T, "-x": 0, "-h": 1, "--eval-data": "questions.bin",
             "-j": None}
    dims, params = doubles("asked.bin")
    row = np.array([[*before, *question, *answer]])
    for begins, mask in ((row[:, :-1] == 0, 1), (None, 0)):
        out = run_ok({**flags, "--document-mask": mask}).out
        got = float(re.search(r"loss (\S+)", out)[1])
        want = token_losses(dims, params, row, begins)[0, -len(answer):].mean()
        assert abs(got - want) <= (1e-4 if on_cpu() else 3e-2), f"{got}, expected {want}"


def write_conversations(path, seed):
    """Shards of rows of END question answer END question answer END, twice or more, and what is left END;
    loss masks that count all. Returns the tokens."""
    tokens, rng = [], np.random.default_rng(seed)
    while len(tokens) < 40 * T:
        row = []
        while len(row) < T - 14:
            turns = [[*sentences(int(rng.integers(99)), int(rng.integers(2, 9))), 0] for _ in range(2)]
            row += [0, *turns[0], *turns[1]]
        tokens += (row + [0] * T)[:T]
    write_shard(path + ".bin", [*tokens, 0])
    head = bytearray(read(path + ".bin"))
    head[32:40] = struct.pack("<2i", 1, T)                  # the chat template, the length of a row
    write(path + ".bin", bytes(head))
    write(path + ".mask", bytes([1]) * (len(tokens) + 1))
    return [*tokens, 0]


def test_conversations():
    """Turns of one see each other, also beside rows of other texts; a new run takes the mask by itself."""
    rows, trains_on = (windows(write_conversations(path, 1 + len(path)), T) for path in ("talk_val", "talk"))
    wide_model("wide.bin", GPT2)
    starts = doubles("wide.bin")
    ends = [tokens[:, :-1] == 0 for tokens in (rows, trains_on)]
    begins, trains_begins = (end & np.roll(end, 1, axis=1) for end in ends)
    near = 2e-5 if on_cpu() else 1.5e-2
    loss = run_ok({**USUAL, "-e": "wide.bin", "-t": T, "-i": "talk.bin", "--shuffle": 0, "-x": 1}).losses()
    assert_close(loss, [np.mean(row_losses(*starts, trains_on[:8], trains_begins[:8]))], near, "training")
    mixture = {"-i": "talk.bin:0.5,train.bin:0.5", "-j": "talk_val.bin:0.5,val.bin:0.5"}
    flags = {**USUAL, "-e": "wide.bin", "-t": T, "-x": 2, "-v": 2, "-l": "1e-4", **mixture}
    result = run_ok({**flags, "-o": "talks"})
    assert settings_of("talks")["document-mask"] is True
    dims, params = doubles(model_path("talks"))
    others = windows(documents(2, 600), T)
    want = [np.mean(row_losses(dims, params, rows, begins)),
            np.mean(row_losses(dims, params, others, others[:, :-1] == 0))]
    assert_close([loss for loss, _ in result.source_losses()[-2:]], want, near, "the sources' losses")
    wrong = np.mean(row_losses(dims, params, rows, ends[0]))
    assert abs(wrong - want[0]) > 3 * near
    same, other = (run_ok({**flags, "--document-mask": mask, "-o": f"talks {mask}"}) for mask in (1, 0))
    assert same.losses() == result.losses() != other.losses()
    for folder, mask in (("talks", 1), ("talks 0", 0)):
        refused({**flags, "-x": 3, "-y": 1, "-o": folder, "--document-mask": 1 - mask}, f"began with {mask}")
        run_ok({**flags, "-x": 3, "-y": 1, "-o": folder})
        assert settings_of(folder)["document-mask"] is bool(mask)
    # what is asked is one document, though an END stands behind each answer
    chats = [run_ok({**dict.fromkeys(USUAL), "chat": "talks 1", "-g": 5, "--verbose": -1, "--temperature": 0,
                     "--document-mask": mask}, input=b"a\nb\nc\n").out for mask in (0, 1)]
    assert chats[0] == chats[1] and chats[0].strip()


@pytest.mark.cpu_only
def test_kept():
    """What a run began with stays, and so does what a run began with that knew no such flag."""
    for folder, mask in (("with", 1), ("without", 0)):
        trained(folder, **{"-x": 2, "--document-mask": mask})
        other = {**USUAL, "-x": 4, "-y": 1, "-o": folder}
        refused({**other, "--document-mask": 1 - mask}, f"--document-mask {1 - mask}", f"began with {mask}")
        run_ok({**other, "--document-mask": mask})


@pytest.mark.cpu_only
def test_refused():
    """A vocabulary that nobody knows has no end of text."""
    refused({**USUAL, **MASK, "-e": f"L2,NH2,C40,T{T},V300", "-x": 1}, "--document-mask 1 needs a tokenizer",
            "V=300")
    refused({**USUAL, "--document-mask": 2, "-x": 1}, "document-mask", "2")
