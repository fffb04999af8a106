"""Sliding windows, as users see them: the loss, a stop, model files, and what is refused.

Kernels are test_gpt2.cu's, their twins test_cpu_ops.cpp's, files of Hugging Face test_hf.py's.
"""
import os
import shutil
import struct

import pytest

from checks import read, write
from trainer import on_cpu, refused, run_ok, sentences, write_shard
from twins import doubles, formats, np, row_losses, windows

T = 32
GPT2, LLAMA = f"L3,NH2,C40,T{T},V256", f"llama:L3,NH4,NKV2,HS16,C48,F96,T{T},V256,qk_norm"
USUAL = {"-i": "train.bin", "-j": "val.bin", "-b": 2, "-z": 256, "-v": 0, "-s": 0, "-l": "1e-2"}
KINDS = {"GPT-2": {"-e": GPT2}, "parallel": {"-e": GPT2, "--block": "parallel"}, "Llama": {"-e": LLAMA}}


@pytest.fixture(autouse=True)
def data():
    write_shard("train.bin", sentences(1, 3000))
    write_shard("val.bin", sentences(2, 600))


def trained(kind, words, folder, **more):
    """The path of what 12 steps leave."""
    flags = {**USUAL, **KINDS[kind], "-x": 12, "-n": 10, **more, "-o": folder}
    run_ok({**flags, "-e": flags["-e"] + words})
    return f"{folder}/model_{flags['-x']:08d}.bin"


@pytest.mark.parametrize("kind", KINDS)
def test_computes(kind):
    """GPT-2's loss is NumPy's (of Llama's family there is a fixture). A run that goes on after its 10th step
    ends as one that did not stop."""
    model = trained(kind, ",window=5,pattern=SSL", kind)
    dims, params = doubles(model)
    assert (dims.window, dims.pattern) == (5, "SSL") and dims.windows() == [5, 5, 0]
    if kind == "GPT-2":
        want = np.mean(row_losses(dims, params, windows(sentences(2, 600), T)))
        got = run_ok({"-e": model, "-j": "val.bin", "-t": T, "-x": 0, "-v": 1}).val_losses()[0]
        assert abs(got - want) <= (2e-5 if on_cpu() else 3e-2), f"{got}, expected {want}"
    again = kind + " again"
    shutil.copytree(kind, again)
    for name in os.listdir(again):
        if "00000012" in name:
            os.unlink(f"{again}/{name}")
    assert read(trained(kind, ",window=5,pattern=SSL", again, **{"-y": 1})) == read(model)


@pytest.mark.parametrize("kind", ["GPT-2", "Llama"])
def test_hides_nothing(kind):
    """As many tokens as there are leave the weights of no windows, to the bit; other windows do not."""
    cases = "", f"window={T}", f"window={T - 1}", f"window={T - 1},pattern=SL", f"window={T - 1},pattern=LS"
    none, whole, *others = [read(trained(kind, "," * bool(words) + words, f"{kind} {i}"))[1024:]
                            for i, words in enumerate(cases)]
    assert none == whole and len({none, *others}) == 4


@pytest.mark.cpu_only
@pytest.mark.parametrize("kind, version", [("GPT-2", 1003), ("parallel", 1103), ("Llama", 1203)])
def test_file(kind, version):
    """A version of their own, so that no earlier program loads it, and words that both readers check."""
    path = trained(kind, ",window=7,pattern=SL", kind + " file", **{"-x": 1})
    good = read(path)
    assert struct.unpack_from("<2i", good, 4)[0] == version
    assert struct.unpack_from("<i4s", good, 76) == (7, b"SL\0\0")
    four_letters = int.from_bytes(b"SSSS", "little")
    for at, word, said in ((76, 0, "window"), (76, -1, "window"), (76, 2**24 + 1, "window"),
                           (80, 0, "pattern"), (80, ord("x"), "pattern"), (80, four_letters, "pattern"),
                           (4, version + 1000, "version"), (4, version + 1, "version")):
        write("bad.bin", good[:at] + struct.pack("<i", word) + good[at + 4:])
        refused({**USUAL, "-e": "bad.bin", "-x": 1}, "'bad.bin'", said)
        with pytest.raises(SystemExit, match=said):
            formats.read_checkpoint_header("bad.bin")


@pytest.mark.cpu_only
@pytest.mark.parametrize("words, said", [
    ("window=0", "window is 0, and must be 1 to"), ("window=-5", "window is -5, and must be 1 to"),
    ("window=16777217", "a window is 1 to 16777216 tokens"), ("window=x", "neither a file nor"),
    ("window=5,pattern=sl", "S has the window, L sees all"), ("window=5,pattern=SSSL", "at most 3 here"),
    ("window=5,pattern=", "neither a file nor"), ("pattern=SL", "a pattern says whose it is"),
    ("window=5,window=6", "neither a file nor"), ("window=5,pattern=S,pattern=S", "neither a file nor")])
def test_refused(words, said):
    for model in (GPT2, LLAMA):
        refused({**USUAL, "-e": f"{model},{words}", "-x": 1}, said)
        with pytest.raises(SystemExit):
            formats.parse_model(f"{model},{words}")
    refused({**USUAL, "-e": "m12,window=5,tied", "-x": 1}, "neither a file nor")


@pytest.mark.parametrize("text", [GPT2, LLAMA, "d12", "m12", "qwen3:0.6B"])
def test_descriptors(text):
    """Behind a shape and behind the name of one."""
    dims = formats.parse_model(text + ",window=256,pattern=SSL")
    assert dims.windows() == ([256, 256, 0] * dims.L)[:dims.L] * (dims.maxT > 256)
    assert formats.parse_model(dims.text()) == dims
    assert formats.parse_model(text + ",window=256").pattern == "S"
