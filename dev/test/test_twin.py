"""The PyTorch twin of the second family, dev/reference/llama.py: what its descriptors say, and that the
committed fixture is what it computes, which takes torch. dev/reference/compare.py holds it against
transformers.
"""
import dataclasses
import json
import math
import os
import sys

import pytest

from checks import ROOT
from twins import BAD_ROPE

np = pytest.importorskip("numpy")
sys.path.insert(0, os.path.join(ROOT, "dev/reference"))
import formats                                      # noqa: E402

FIXTURE = os.path.join(ROOT, "dev/reference/fixture")
UGLY = "llama:L2,NH4,NKV2,HS12,C40,F72,T21,V61"     # NH * HS is not C; Llama wants C to be a multiple of NH


def count(dims):
    """Of parameters, without the padding of the vocabulary."""
    return sum(math.prod(formats.param_shape(dims, name)) for name in formats.NAMES) \
        - (dims.Vp - dims.V) * (dims.C * (1 if dims.tied else 2) +
                                len(formats.value_layers(dims)) * dims.NKV * dims.HS)


# ---- descriptors ----

@pytest.mark.parametrize("name, vocabulary, parameters", [
    ("smollm2:135M", 49152, 134515008), ("smollm2:360M", 49152, 361821120), ("qwen3:0.6B", 151936, 596049920),
    ("qwen3:1.7B", 151936, 1720574976), ("tinyllama:1.1B", 32000, 1100048384), ("m12", 50257, 162151680),
    ("v12", 50257, 162151680 + 6 * (50257 * 768 + 6 * 12))])
def test_presets(name, vocabulary, parameters):
    """The published sizes. But for Qwen3's, GPT-2's vocabulary is in the published one's place."""
    dims = formats.parse_model(name)
    assert dims.V == (vocabulary if "qwen3" in name else 50257) and formats.parse_model(dims.text()) == dims
    assert count(dims) + (vocabulary - dims.V) * dims.C * (1 if dims.tied else 2) == parameters


def test_descriptor():
    m12, v12 = formats.parse_model("m12"), formats.parse_model("v12")
    assert v12 == dataclasses.replace(m12, value_embed=True) and v12.text() == m12.text() + ",value_embed"
    assert m12 == formats.parse_model(
        "llama:L12,NH6,NKV6,HS128,C768,F2048,T1024,V50257,qk_norm")
    dims = formats.parse_model(UGLY + ",relu2,qk_norm,no_norm_weights,embed_norm,eps=1e-3,softcap=1.5")
    assert dims == formats.Llama(L=2, NH=4, NKV=2, HS=12, C=40, F=72, maxT=21, V=61, mlp="relu2",
                                 qk_norm=True, norm_weights=False, embed_norm=True, tied=False, theta=1e4,
                                 eps=1e-3, softcap=1.5)
    assert formats.parse_model(dims.text()) == dims
    for word in formats.MLPS:
        dims = formats.parse_model(UGLY + "," + word)
        assert dims.mlp == word and formats.parse_model(dims.text()) == dims
    assert formats.parse_model(UGLY + ",swiglu").text() == UGLY
    scaled = formats.parse_model(UGLY + ",qkv_bias,rope_factor=32,rope_low=1,rope_high=4,rope_original=8192")
    assert scaled == dataclasses.replace(formats.parse_model(UGLY), qkv_bias=True, rope_factor=32.0,
                                         rope_low=1.0, rope_high=4.0, rope_original=8192.0)
    assert formats.parse_model(scaled.text()) == scaled
    for text, said in ((UGLY + ",elu", "elu"), (UGLY + ",L3", "second"), ("llama:L2,NH2", "NKV HS C F T V"),
                       (UGLY.replace("NH4", "NH5"), "multiple"), (UGLY.replace("HS12", "HS5"), "even"),
                       (UGLY + ",theta=0", "positive"), (UGLY + ",softcap=-1", "softcap="), ("m13", "even"),
                       ("v13", "even"),
                       *((UGLY + "," + words, "rope_factor is 1 to 1e6") for words in BAD_ROPE)):
        with pytest.raises(SystemExit, match=said):
            formats.parse_model(text)


def test_initial_weights():
    """Zero where a layer adds to the residual stream and in the head, else as GPT-2's with the same ids."""
    dims = formats.parse_model(UGLY + ",qk_norm")
    params = formats.init_params(dims, 5)
    assert not any(params[name].any() for name in ("attprojw", "fcprojw", "headw"))
    assert all((params[name] == 1).all() for name in ("ln1w", "ln2w", "lnfw", "qnw", "knw"))
    for name, tensor in (("wte", 0), ("qkvw", 4), ("fcw", 10)):
        want = formats.rand_normal(5, tensor, 64) * np.float32(0.02)
        assert np.array_equal(params[name].reshape(-1)[:64], want)


# ---- the fixture ----

@pytest.mark.parametrize("case", ["qwen", "relu2", "windows", "documents", "qwen2", "values"])
def test_fixture(case):
    """What the files hold is what the twin computes in double, from the weights that they hold."""
    pytest.importorskip("torch")
    import reference                                # pylint: disable=C0415
    from torch import float64                       # pylint: disable=C0415
    path = os.path.join(FIXTURE, case)
    info = json.load(open(path + ".json", encoding="utf-8"))
    dims, params = formats.read_checkpoint(path + "_model.bin")
    assert dims.text() == info["model"]
    dims = dataclasses.replace(dims, document_end=info.get("document_end", -1))
    held = formats.read_tensors(path + "_tensors.bin", dims)
    assert held["x"].shape == (info["B"], info["T"]) and (held["x"][:, 1:] == held["y"][:, :-1]).all()
    logits, loss, grads = reference.run(dims, params, held["x"], held["y"], float64, "cpu")
    assert abs(loss - info["loss"]) <= 1e-9 and abs(loss - held["loss"]) <= 1e-6
    assert reference.logits_error(held["logits"], logits) <= 1e-6
    for name, error in reference.grad_errors(held["grads"], grads).items():
        assert error <= 1e-7, name
        assert params[name].size == 0 or held["grads"][name].any(), name
    losses, _ = reference.optimizer_steps(dims, params, held["x"], held["y"], float64, "cpu",
                                          info["hyper"])
    assert max(abs(a - b) for a, b in zip(losses, info["losses_float64"], strict=True)) <= 1e-9


@pytest.mark.parametrize("model", [UGLY, UGLY + ",rope_factor=32,rope_low=1,rope_high=4,rope_original=8"])
def test_on_a_device(model):
    """All tensors of the twin are made where it is asked for: meta stands for a GPU here."""
    pytest.importorskip("torch")
    from gpt2 import new_model                      # pylint: disable=C0415
    assert {p.device.type for p in new_model(formats.parse_model(model), "meta").parameters()} == {"meta"}
