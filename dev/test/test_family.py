"""The second family, Llama's, as users see it: the same bits on any number of ranks and over a stop, its
rates, refusals. Its numbers are test_gpt2.cu's, beside PyTorch; its files of Hugging Face test_hf.py's.

    pytest dev/test/test_family.py
"""
import os
import re
import shutil

import pytest

from checks import read
from trainer import log_lines, on_cpu, refused, run_ok, sentences, write_shard

LLAMA = "llama:L2,NH4,NKV2,HS16,C48,F96,T32,V256,qk_norm"          # NH * HS is not C
NANO = "llama:L2,NH2,NKV1,HS16,C40,F56,T32,V256,relu2,qk_norm,no_norm_weights,embed_norm,tied,softcap=15"
USUAL = {"-i": "train.bin", "-j": "val.bin", "-b": 2, "-z": 256, "-x": 6, "-v": 3, "-s": 0, "-n": 3,
         "-l": "1e-2", "-c": 0.1, "--lanes": 4}


@pytest.fixture(autouse=True)
def data():
    write_shard("train.bin", sentences(1, 3000))
    write_shard("val.bin", sentences(2, 600))


def left_by(folder, **flags):
    """(losses and norms, the model's bytes) of a run."""
    run_ok({**USUAL, "-o": folder, **{"-" + name if len(name) < 3 else "--" + name.replace("_", "-"): value
                                      for name, value in flags.items()}})
    return log_lines(folder), read(f"{folder}/model_00000006.bin")


@pytest.mark.parametrize("name, model", [("llama", LLAMA), ("nano", NANO)], ids=["llama", "nano"])
def test_ranks_and_recompute(name, model):
    """Ranks at each ZeRO stage, and -r: the same losses and the same model, to the bit."""
    one = left_by(name, e=model)
    first, last = (float(re.search(r"trl:(\S+)", one[0][i])[1]) for i in (0, -1))
    assert last < first - 0.1, "it does not learn"
    for r in (1, 2, 3):
        assert left_by(f"{name}_r{r}", e=model, r=r) == one
    for zero in (0, 1, 2) if on_cpu() else ():
        assert left_by(f"{name}_zero{zero}", e=model, gpus=2, zs=zero) == one


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_goes_on(optimizer):
    """A run that goes on after its 3rd step ends as one that was not stopped."""
    flags = {"e": LLAMA, "optimizer": optimizer}
    folder, again = f"{optimizer}_whole", f"{optimizer}_again"
    whole = left_by(folder, **flags)
    shutil.copytree(folder, again)
    for name in os.listdir(again):
        if "00000006" in name:
            os.unlink(f"{again}/{name}")
    assert left_by(again, y=1, **flags)[1] == whole[1]


def test_head_rate():
    """The embedding and an untied head have rates of their own."""
    plain = left_by("plain", e=LLAMA)
    for name in ("embedding_rate", "head_rate"):
        assert left_by(name, e=LLAMA, **{name: 1}) == plain
        assert left_by(name + "2", e=LLAMA, **{name: 2})[1] != plain[1]


@pytest.mark.cpu_only
def test_refusals():
    usual = {**USUAL, "-x": 1}
    refused({**usual, "-e": NANO, "--head-rate": 2}, "--head-rate is for an untied LM head")
    refused({**usual, "-e": LLAMA, "--matmul-dtype": "fp8"}, "--matmul-dtype fp8 is for the family of GPT-2")
    refused({**usual, "-e": LLAMA, "--norm": "layernorm"}, "--norm layernorm")
    for sizes, why in (("NKV3,HS16,F96", "NH must be a multiple of NKV"), ("NKV2,HS8,F96", "HS one of 16"),
                       ("NKV2,HS16,F9", "F must be a multiple of 8"), ("NKV2,HS16", "neither a file nor")):
        refused({**usual, "-e": f"llama:L2,NH4,C48,T32,V256,{sizes}"}, why)
    refused({**usual, "-e": LLAMA + ",theta=0"}, "theta=0")
    refused({**usual, "-e": LLAMA + ",soft"}, "neither a file nor a model descriptor")
