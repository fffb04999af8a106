"""The PyTorch twin of the second family, dev/reference/llama.py: what its descriptors say, its parity with
transformers, and that the committed fixture is what it computes. Parts are skipped where torch or
transformers are missing: `pip install torch transformers pytest`, in a venv of yours, runs all.
"""
import json
import math
import os
import sys

import pytest

from checks import ROOT

np = pytest.importorskip("numpy")
sys.path.insert(0, os.path.join(ROOT, "dev/reference"))
import formats                                      # noqa: E402

FIXTURE = os.path.join(ROOT, "dev/reference/fixture")
UGLY = "llama:L2,NH4,NKV2,HS12,C40,F72,T21,V61"     # NH * HS is not C; Llama wants C to be a multiple of NH
MODELS = {"Llama": [UGLY + ",tied,theta=500,eps=1e-3", UGLY],
          "Qwen3": [UGLY + ",qk_norm,theta=1e6,eps=1e-6", UGLY + ",qk_norm,tied"],
          "NanoChat": [UGLY + ",relu2,qk_norm,no_norm_weights,embed_norm,eps=1e-3,softcap=1.5"]}


def count(dims):
    """Of parameters, without the padding of the vocabulary."""
    return sum(math.prod(formats.param_shape(dims, name)) for name in formats.NAMES) \
        - (dims.Vp - dims.V) * dims.C * (1 if dims.tied else 2)


# ---- descriptors ----

@pytest.mark.parametrize("name, vocabulary, parameters", [
    ("smollm2:135M", 49152, 134515008), ("smollm2:360M", 49152, 361821120), ("qwen3:0.6B", 151936, 596049920),
    ("qwen3:1.7B", 151936, 1720574976), ("tinyllama:1.1B", 32000, 1100048384), ("m12", 50257, 162151680)])
def test_presets(name, vocabulary, parameters):
    """The published sizes. But for Qwen3's, GPT-2's vocabulary is in the published one's place."""
    dims = formats.parse_model(name)
    assert dims.V == (vocabulary if "qwen3" in name else 50257) and formats.parse_model(dims.text()) == dims
    assert count(dims) + (vocabulary - dims.V) * dims.C * (1 if dims.tied else 2) == parameters


def test_descriptor():
    assert formats.parse_model("m12") == formats.parse_model(
        "llama:L12,NH6,NKV6,HS128,C768,F2048,T1024,V50257,qk_norm")
    dims = formats.parse_model(MODELS["NanoChat"][0])
    assert dims == formats.Llama(L=2, NH=4, NKV=2, HS=12, C=40, F=72, maxT=21, V=61, mlp="relu2",
                                 qk_norm=True, norm_weights=False, embed_norm=True, tied=False, theta=1e4,
                                 eps=1e-3, softcap=1.5)
    assert formats.parse_model(dims.text()) == dims
    for word in formats.MLPS:
        dims = formats.parse_model(UGLY + "," + word)
        assert dims.mlp == word and formats.parse_model(dims.text()) == dims
    assert formats.parse_model(UGLY + ",swiglu").text() == UGLY
    for text, said in ((UGLY + ",elu", "elu"), (UGLY + ",L3", "second"), ("llama:L2,NH2", "NKV HS C F T V"),
                       (UGLY.replace("NH4", "NH5"), "multiple"), (UGLY.replace("HS12", "HS5"), "even"),
                       (UGLY + ",theta=0", "positive"), (UGLY + ",softcap=-1", "softcap="), ("m13", "even")):
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

@pytest.mark.parametrize("case", ["qwen", "relu2"])
def test_fixture(case):
    """What the files hold is what the twin computes in double, from the weights that they hold."""
    pytest.importorskip("torch")
    import reference                                # pylint: disable=C0415
    from torch import float64                       # pylint: disable=C0415
    path = os.path.join(FIXTURE, case)
    info = json.load(open(path + ".json", encoding="utf-8"))
    dims, params = formats.read_checkpoint(path + "_model.bin")
    assert dims.text() == info["model"]
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


# ---- beside transformers ----

def their_config(theirs, family, d):
    more = {"hidden_act": "silu"}
    if family == "NanoChat":
        more = {"hidden_act": "relu2", "final_logit_softcapping": d.softcap}
    return getattr(theirs, family + "Config")(
        vocab_size=d.V, hidden_size=d.C, intermediate_size=d.F, num_hidden_layers=d.L, head_dim=d.HS,
        num_attention_heads=d.NH, num_key_value_heads=d.NKV, max_position_embeddings=d.maxT,
        rms_norm_eps=d.eps, rope_parameters={"rope_type": "default", "rope_theta": d.theta},
        tie_word_embeddings=d.tied, attention_bias=False, pad_token_id=None, bos_token_id=None,
        eos_token_id=None, attn_implementation="eager", **more)


def their_weights(family, d, params):
    """{transformers' name: array} of ours. NanoChat turns heads the other way: see llama.py."""
    def turned(rows):
        halves = rows.reshape(-1, 2, d.HS // 2, d.C).copy()
        if family == "NanoChat":
            halves[:, 1] *= -1
        return halves.reshape(rows.shape)

    out = {"model.embed_tokens.weight": params["wte"][:d.V], "model.norm.weight": params["lnfw"],
           "lm_head.weight": params["wte" if d.tied else "headw"][:d.V]}
    for l in range(d.L):
        q, k, v = np.split(params["qkvw"][l], [d.NH * d.HS, (d.NH + d.NKV) * d.HS])
        layer = {"self_attn.q_proj": turned(q), "self_attn.k_proj": turned(k), "self_attn.v_proj": v,
                 "self_attn.o_proj": params["attprojw"][l], "input_layernorm": params["ln1w"][l],
                 "post_attention_layernorm": params["ln2w"][l], "self_attn.q_norm": params["qnw"][l],
                 "self_attn.k_norm": params["knw"][l]}
        if d.mlp == "swiglu":
            gate, up = np.split(params["fcw"][l], 2)
            layer.update({"mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": params["fcprojw"][l]})
        else:
            layer.update({"mlp.fc1": params["fcw"][l], "mlp.fc2": params["fcprojw"][l]})
        out.update({f"model.layers.{l}.{name}.weight": array for name, array in layer.items()})
    return {name: array for name, array in out.items() if array.size}


@pytest.mark.parametrize("family, text", [(family, text) for family in MODELS for text in MODELS[family]])
def test_parity(family, text, monkeypatch):
    """Logits and the gradient of the loss in the embedding and head, in double."""
    torch, theirs = pytest.importorskip("torch"), pytest.importorskip("transformers")
    import gpt2                                     # pylint: disable=C0415
    if not hasattr(theirs, family + "ForCausalLM"):
        pytest.skip(f"this version of transformers has no {family}")
    make, d = getattr(theirs, family + "ForCausalLM"), formats.parse_model(text)
    config = their_config(theirs, family, d)
    params = gpt2.random_params(d, 3)
    tokens = torch.from_numpy(np.random.default_rng(4).integers(0, d.V, (3, d.maxT + 1)))
    x, y = tokens[:, :-1], tokens[:, 1:]
    logits = {}
    for sdpa in (False, True):
        ours = gpt2.new_model(d, sdpa=sdpa).double()
        gpt2.load_params(ours, params)
        logits[sdpa], loss = ours(x, y)
    loss.backward()
    grads = gpt2.get_grads(ours)
    # their norms and angles go through float32, whatever the model's type: here that word means float64
    for name in ("float32", "float"):
        monkeypatch.setattr(torch, name, torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    model = make(config).double().eval()
    weights = {name: torch.from_numpy(array) for name, array in their_weights(family, d, params).items()}
    wrong = model.load_state_dict(weights, strict=False)
    assert not wrong.unexpected_keys and not wrong.missing_keys
    want = model(x, use_cache=False).logits
    assert want.dtype == torch.float64
    for how, got in logits.items():
        worst = (got - want).detach().abs().max().item()
        print(f"{family}ForCausalLM, sdpa {how}: logits off by {worst:.1e}, rms {float(want.std()):.2f}")
        assert worst <= 1e-10
    torch.nn.functional.cross_entropy(want.reshape(-1, d.V), y.reshape(-1)).backward()
    for name, parameter in (("wte", model.model.embed_tokens), ("headw", model.lm_head)):
        if name == "wte" or not d.tied:
            assert (grads[name][:d.V] - parameter.weight.grad).abs().max() <= 1e-10
