"""The second family, Llama's, as users see it: the same bits on any number of ranks and over a stop, its
rates, refusals. Its numbers are test_gpt2.cu's, beside PyTorch; its files of Hugging Face test_hf.py's.

    pytest dev/test/test_family.py
"""
import os
import re
import shutil
import struct

import pytest

from checks import ROOT, read, run_program, write
from trainer import (log_lines, need_fp8, on_cpu, refused, run_ok, sentences, write_shard,
                     write_wide_shard)
from twins import BAD_ROPE, FAMILY, family_model, family_version, formats

LLAMA = "llama:L2,NH4,NKV2,HS16,C48,F96,T32,V256,qk_norm"          # NH * HS is not C
NANO = "llama:L2,NH2,NKV1,HS16,C40,F56,T32,V256,relu2,qk_norm,no_norm_weights,embed_norm,tied,softcap=15"
QWEN2 = "llama:L2,NH4,NKV2,HS16,C48,F96,T32,V256,tied,qkv_bias,rope_factor=4"
SIXTEENS = NANO.replace("C40,F56", "C48,F64")                       # FP8's sizes
VALUES = LLAMA + ",value_embed"
KINDS = {**FAMILY, "values": {"L": 5, "qk_norm": True, "value_embed": True}}
USUAL = {"-i": "train.bin", "-j": "val.bin", "-b": 2, "-z": 256, "-x": 12, "-v": 6, "-s": 0, "-n": 10,
         "-l": "1e-2", "-c": 0.1, "--lanes": 4}


@pytest.fixture(autouse=True)
def data():
    write_shard("train.bin", sentences(1, 3000))
    write_shard("val.bin", sentences(2, 600))


def left_by(folder, **flags):
    """(losses and norms, the model's bytes) of a run."""
    run_ok({**USUAL, "-o": folder, **{"-" + name if len(name) < 3 else "--" + name.replace("_", "-"): value
                                      for name, value in flags.items()}})
    return log_lines(folder), read(f"{folder}/model_00000012.bin")


@pytest.mark.parametrize("name, model, dtype", [
    ("llama", LLAMA, "bf16"), ("nano", NANO, "bf16"), ("llama8", LLAMA, "fp8-head"),
    ("nano8", SIXTEENS, "fp8"), ("qwen2", QWEN2, "bf16"), ("values", VALUES, "bf16"),
    ("values8", VALUES, "fp8-head")],
    ids=["llama", "nano", "llama, FP8", "nano, FP8", "qwen2", "values", "values, FP8"])
def test_ranks(name, model, dtype):
    """At each ZeRO stage the losses and the model of one, to the bit; -r's are test_gpt2's."""
    if dtype != "bf16":
        need_fp8()
    flags = {"e": model, "matmul_dtype": dtype}
    one = left_by(name, **flags)
    first, last = (float(re.search(r"trl:(\S+)", one[0][i])[1]) for i in (0, -1))
    assert last < first - 0.1, "it does not learn"
    for zero in (0, 1) if on_cpu() else ():
        assert left_by(f"{name}_zero{zero}", gpus=2, zs=zero, **flags) == one


@pytest.mark.parametrize("optimizer, dtype, model", [
    ("adamw", "bf16", LLAMA), ("muon", "bf16", LLAMA), ("muon", "fp8-head", LLAMA), ("muon", "fp8", QWEN2),
    ("adamw", "fp8", VALUES)],
    ids=["adamw", "muon", "muon, FP8", "muon, FP8, qwen2", "adamw, FP8, values"])
def test_goes_on(optimizer, dtype, model):
    """A run that goes on after its 10th step ends as one that was not stopped."""
    if dtype != "bf16":
        need_fp8()
    flags = {"e": model, "optimizer": optimizer, "matmul_dtype": dtype}
    folder, again = f"{optimizer}_{dtype}_whole", f"{optimizer}_{dtype}_again"
    whole = left_by(folder, **flags)
    shutil.copytree(folder, again)
    for name in os.listdir(again):
        if "00000012" in name:
            os.unlink(f"{again}/{name}")
    assert left_by(again, y=1, **flags)[1] == whole[1]


def test_head_rate():
    """The embedding and an untied head have rates of their own."""
    plain = left_by("plain", e=LLAMA)
    for name in ("embedding_rate", "head_rate"):
        assert left_by(name, e=LLAMA, **{name: 1}) == plain
        assert left_by(name + "2", e=LLAMA, **{name: 2})[1] != plain[1]


@pytest.mark.numeric
@pytest.mark.parametrize("tied", [",tied", ""], ids=["tied", "untied"])
def test_wide_vocabulary(tied):
    """Qwen3's, in shards of 32 bits: it learns."""
    V, T = 151936, 16
    ids = [V - 1 - 37 * letter for letter in sentences(3, 1500)]        # most lie above 2^16
    assert min(ids) > 65536
    flags = {"-e": f"llama:L1,NH2,NKV1,HS16,C16,F32,T{T},V{V},qk_norm" + tied, "-b": 4, "-z": 64, "-x": 6,
             "-n": 6, "--lanes": 1, "-i": write_wide_shard("wide.bin", ids),
             "-j": write_wide_shard("wide_val.bin", ids[:4 * T + 1])}
    result = run_ok({**USUAL, **flags, "-o": "wide" + tied})
    assert result.losses()[-1] < result.losses()[0] - 0.2
    refused({**USUAL, **flags, "-e": flags["-e"].replace(f"V{V}", "V150000"), "-o": "narrow"}, "token id 150")


@pytest.mark.cpu_only
def test_refusals():
    usual = {**USUAL, "-x": 1}
    refused({**usual, "-e": NANO, "--head-rate": 2}, "--head-rate is for an untied LM head")
    refused({**usual, "-e": NANO, "--matmul-dtype": "fp8"}, "multiples of 16", "C = 40, F = 56")
    refused({**usual, "-e": LLAMA, "--norm": "layernorm"}, "--norm layernorm")
    for sizes, why in (("NKV3,HS16,F96", "NH must be a multiple of NKV"), ("NKV2,HS8,F96", "HS one of 16"),
                       ("NKV2,HS16,F9", "F must be a multiple of 8"), ("NKV2,HS16", "neither a file nor")):
        refused({**usual, "-e": f"llama:L2,NH4,C48,T32,V256,{sizes}"}, why)
    refused({**usual, "-e": LLAMA + ",theta=0"}, "theta=0")
    refused({**usual, "-e": LLAMA + ",soft"}, "neither a file nor a model descriptor")
    refused({**usual, "-e": "L2,NH2,C32,T32,V256,value_embed"}, "neither a file nor a model descriptor")
    refused({**usual, "-e": "llama:L2,NH1,NKV1,HS16,C8,F96,T32,V256,value_embed"}, "C=8: the gates of value")
    for words in BAD_ROPE:
        refused({**usual, "-e": f"{LLAMA},{words}"}, words.split("=")[0] + "=", "a factor is 1 to 1e6")


def test_biases_alone():
    """AdamW updates them whatever --optimizer is, and without a decay. They begin as zeros."""
    sizes = formats.parse_model(QWEN2)
    model = {"e": QWEN2, "x": 12, "optimizer": "muon"}
    one, other = (formats.read_checkpoint(f"{name}/model_00000012.bin")[1] for name in
                  (left_by(name, c=decay, **model) and name for name, decay in (("decay", 10), ("none", 0))))
    assert one["qkvb"].shape == (2, (sizes.NH + 2 * sizes.NKV) * sizes.HS)
    assert abs(one["wte"]).mean() < 0.8 * abs(other["wte"]).mean()
    ratio = abs(one["qkvb"]).mean() / abs(other["qkvb"]).mean()
    assert abs(other["qkvb"]).min() > 0 and 0.8 < ratio < 1.25, ratio


@pytest.mark.cpu_only
def test_value_embeddings_alone():
    """AdamW updates them whatever --optimizer is: tables at the embedding's rate, and gates' weights, which
    begin as zeros. Neither decays."""
    model = {"e": VALUES, "x": 12, "optimizer": "muon"}
    start = formats.init_params(formats.parse_model(VALUES), 1337)
    runs = {}
    for name, decay, rate in (("plain", 0, 1), ("still", 0, 0), ("decay", 10, 1)):
        left_by("values_" + name, c=decay, embedding_rate=rate, **model)
        runs[name] = formats.read_checkpoint(f"values_{name}/model_00000012.bin")[1]
    for name in ("wte", "vew"):
        assert (runs["still"][name] == start[name]).all() and (runs["plain"][name] != start[name]).any()
    ratio = {name: abs(runs["decay"][name]).mean() / abs(runs["plain"][name]).mean()
             for name in ("wte", "vew", "vegw")}
    assert ratio["wte"] < 0.8 and 0.8 < ratio["vegw"] < 1.25 and 0.9 < ratio["vew"] < 1.1, ratio
    assert not start["vegw"].any() and all(abs(run["vegw"]).min() > 0 for run in runs.values())


@pytest.mark.cpu_only
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Llama 3", "Llama linear", "values"])
def test_file(kind):
    """Biases, value embeddings and scaled positions have a version of their own, so that no earlier program
    loads them, and both readers check the words."""
    dims, _ = family_model("m.bin", **KINDS[kind])
    good, later = read("m.bin"), formats.has_later_words(dims)
    version, other = (303, 203) if later else (203, 303)
    assert struct.unpack_from("<i", good, 4)[0] == version
    run_ok({"-e": "m.bin", "-j": "val.bin", "-t": dims.maxT, "-z": None, "--lanes": None, "-x": 0, "-v": 1})
    nan = float("nan")
    unknown = struct.unpack_from("<i", good, 60)[0] | 1 << 30
    for at, word, said in ((4, other, f"version {other} does not go with"), (4, 403, "version 403"),
                           (60, unknown, f"words of its shape, {unknown}, are not all known"),
                           (208, 0.5, "rope_factor"), (216, 0.25, "rope_high"), (220, nan, "rope_orig")):
        write("bad.bin", good[:at] + struct.pack("<i" if at <= 60 else "<f", word) + good[at + 4:])
        refused({**USUAL, "-e": "bad.bin"}, "'bad.bin'", said)
        with pytest.raises(SystemExit, match=said):
            formats.read_checkpoint_header("bad.bin")


@pytest.mark.cpu_only
@pytest.mark.skipif(not os.access(ROOT + "/build/checkpoint", os.X_OK), reason="no build/checkpoint")
@pytest.mark.parametrize("kind", KINDS)
def test_looking(kind):
    """build/checkpoint knows the family's shapes, and how many bytes each means."""
    for version in (203, 205):
        dims, _ = family_model("m.bin", version, V=250, **KINDS[kind])
        code, out, _ = run_program([ROOT + "/build/checkpoint", "m.bin"])
        assert code == 0 and f"  version {family_version(dims, version)} " in out, out
        assert "no checksum: " in out
        assert dims.window_text() in out
        assert re.split(",theta|,eps|,softcap|,rope|,window", dims.text())[0] + ",theta=" in out
    write("m.bin", read("m.bin") + b"x")
    code, out, _ = run_program([ROOT + "/build/checkpoint", "m.bin"])
    assert code == 1 and "NOT SOUND: it has" in out, out
