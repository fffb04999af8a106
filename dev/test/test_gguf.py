"""dev/hf.py gguf: tensors and metadata, read by the package gguf and held against names and places
spelled out here. With --slow llama.cpp itself (llama-cpp-python, which pip compiles into build/llama_cpp, ten
minutes on two cores) computes the models: its logits and greedy text are held against test_gpt2cpu's.
"""
import json
import os
import shutil
import subprocess
import sys

import pytest

from checks import ROOT, LEASH, read, run_program, write
from forked import Forked
from twins import FAMILY, family_model, formats, np, wide_model

gguf = pytest.importorskip("gguf")
sys.path.insert(0, os.path.join(ROOT, "dev"))
import hf                                           # noqa: E402
import export_gguf                                  # noqa: E402
import export_hf                                    # noqa: E402
from published import PUBLISHED, TEXTS, folder      # noqa: E402

GPT2 = "L2,NH2,C64,T24,V256"
KINDS = ("GPT-2", *(kind for kind in FAMILY if "NanoChat" not in kind and "window" not in FAMILY[kind]))
TYPES = {"f32": 0, "f16": 1, "q8_0": 7}             # and llama.cpp's number of such a file
PACKAGE = "llama-cpp-python==0.3.36"                # its wheels from PyPI are sources
USE = """
import itertools, json, sys
import numpy
from llama_cpp import Llama
path, tokens, count = sys.argv[1:]
tokens = json.loads(tokens)
model = Llama(path, n_ctx=256, logits_all=True, verbose=False, type_k=0, type_v=0)
model.eval(tokens)
numpy.save('logits.npy', numpy.array(model.scores[:len(tokens)]))
prompt = model.tokenize(open('prompt.txt', 'rb').read())
print(json.dumps([prompt, list(itertools.islice(model.generate(prompt, temp=0.0), int(count)))]))
"""


def made(kind, path="model.bin", **shape):
    """(dims, params) of a written model"""
    if kind != "GPT-2":                             # llama.cpp wants a Qwen2's heads as wide as C
        return family_model(path, **{**FAMILY[kind], **({"C": 64} if "Qwen2" in kind else {}), **shape})
    wide_model(path, GPT2.replace("V256", f"V{shape.get('V', 256)}"), scale=0.15)
    return formats.read_checkpoint(path)


def export(kind, file_type, **shape):
    """(dims, params, {name: its array in the file}, {key: value}, {name: type})"""
    dims, params = made(kind, **shape)
    words = [hf.__file__, "gguf", "model.bin", "out.gguf", "--type", file_type]
    code, out, err = Forked(hf.main, words).end()
    assert code == 0 and not err and not os.path.exists("out.gguf.part"), err
    assert f"out.gguf: model.bin, {sum(x.size for x in params.values()) - padding(dims):,} parameters" in out
    reader = gguf.GGUFReader("out.gguf")
    arrays = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    values = {name: field.contents() for name, field in reader.fields.items() if name[:5] != "GGUF."}
    return dims, params, arrays, values, {t.name: t.tensor_type.name for t in reader.tensors}


def padding(dims):
    return (dims.Vp - dims.V) * dims.C * (2 if dims.is_llama and not dims.tied else 1)


def expected(d, p):
    """{name: array}"""
    want = {"token_embd.weight": p["wte"][:d.V], "output_norm.weight": p["lnfw"]}
    if not d.is_llama:
        want.update({"output_norm.bias": p["lnfb"], "position_embd.weight": p["wpe"]})
    elif not d.tied:
        want["output.weight"] = p["headw"][:d.V]
    if d.is_llama and d.rope_original:              # of 100^-(j/8), in turns in 40 tokens
        turns = [40 * 100 ** (-j / 8) / (2 * np.pi) for j in range(8)]
        want["rope_freqs.weight"] = np.array([1 if n > 4 else 8 if n < 1 else 1 / (
            (n - 1) / 3 + (4 - n) / 3 / 8) for n in turns], np.float32)
    for l in range(d.L):
        layer = {"attn_norm.weight": p["ln1w"][l], "ffn_norm.weight": p["ln2w"][l],
                 "attn_output.weight": p["attprojw"][l], "ffn_down.weight": p["fcprojw"][l]}
        if d.is_llama:
            heads = p["qkvw"][l].reshape(-1, d.HS, d.C)
            if not d.qk_norm and not d.qkv_bias:    # row 2j is our j, row 2j + 1 our j + HS/2; v stays
                order = [j + half * d.HS // 2 for j in range(d.HS // 2) for half in (0, 1)]
                heads = np.concatenate([heads[:d.NH + d.NKV, order], heads[d.NH + d.NKV:]])
            layer.update({"attn_q.weight": heads[:d.NH], "attn_k.weight": heads[d.NH:d.NH + d.NKV],
                          "attn_v.weight": heads[d.NH + d.NKV:], "ffn_gate.weight": p["fcw"][l][:d.F],
                          "ffn_up.weight": p["fcw"][l][d.F:]})
            layer.update({"attn_q_norm.weight": p["qnw"][l], "attn_k_norm.weight": p["knw"][l]}
                         if d.qk_norm else {})
            biases = p["qkvb"][l].reshape(-1, d.HS)
            layer.update({"attn_q.bias": biases[:d.NH].ravel(), "attn_v.bias": biases[-d.NKV:].ravel(),
                          "attn_k.bias": biases[d.NH:-d.NKV].ravel()} if d.qkv_bias else {})
        else:
            layer.update({"attn_qkv.weight": p["qkvw"][l], "ffn_up.weight": p["fcw"][l]})
            for theirs, ours in (("attn_norm", "ln1b"), ("attn_qkv", "qkvb"), ("attn_output", "attprojb"),
                                 ("ffn_norm", "ln2b"), ("ffn_up", "fcb"), ("ffn_down", "fcprojb")):
                layer[theirs + ".bias"] = p[ours][l]
        want.update({f"blk.{l}.{name}": x.reshape(-1, x.shape[-1]) if x.ndim == 3 else x
                     for name, x in layer.items()})
    return want


@pytest.mark.parametrize("file_type", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_tensors(kind, file_type):
    dims, params, got, values, types = export(kind, file_type, V=250)
    want = expected(dims, params)
    assert set(got) == set(want) and values["general.file_type"] == TYPES[file_type]
    for name, array in want.items():
        exact = array.ndim == 1 or name == "position_embd.weight"
        right = "F32" if exact else file_type.upper()
        right = "F16" if right == "Q8_0" and array.shape[1] % 32 else right
        assert types[name] == right and got[name].shape == array.shape, name
        # of q8_0, 32 neighbours share a scale, in half precision: the largest is 127
        step = np.abs(array.reshape(-1, 32)).max(-1, keepdims=True) / 127 if right == "Q8_0" else 0
        bound = {"F32": 0, "F16": np.abs(array) * 2.0 ** -11 + 2.0 ** -25,
                 "Q8_0": np.broadcast_to(0.6 * step, (array.size // 32, 32)).reshape(array.shape)
                 if right == "Q8_0" else 0}[right]
        assert (np.abs(got[name] - array) <= bound).all(), name
    assert file_type != "q8_0" or kind != "GPT-2" or "Q8_0" in types.values()


def test_metadata():
    architectures = {"GPT-2": "gpt2", "Llama": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3"}
    for kind in KINDS:
        dims, _, _, got, _ = export(kind, "f32", V=250)
        name = architectures[kind.split()[0]]
        want = {"general.architecture": name, "general.name": "out", "tokenizer.ggml.model": "none",
                "context_length": dims.maxT, "embedding_length": dims.C, "block_count": dims.L,
                "feed_forward_length": dims.F, "attention.head_count": dims.NH, "vocab_size": 250}
        want.update({"attention.layer_norm_epsilon": 1e-5} if kind == "GPT-2" else {
            "attention.head_count_kv": dims.NKV, "attention.key_length": dims.HS,
            "attention.value_length": dims.HS, "rope.dimension_count": dims.HS, "rope.freq_base": dims.theta,
            "attention.layer_norm_rms_epsilon": dims.eps})
        linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0} if kind == "Llama linear" else {}
        assert {key for key in got if "scaling" in key} == {f"{name}.{key}" for key in linear}
        want.update(linear)
        for key, value in want.items():
            key = key if key.startswith(("general.", "tokenizer.")) else f"{name}.{key}"
            assert got[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key


def test_tokenizer():
    values = export("GPT-2", "f16", V=256)[3]
    tokens = values["tokenizer.ggml.tokens"]
    assert (tokens[0], tokens[10], tokens[32], tokens[65]) == ("<|endoftext|>", "\u010a", "\u0120", "A")
    values = export("Llama", "q8_0", V=50257)[3]
    tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    with open(os.path.join(ROOT, "dev/data/gpt2_bpe/vocab.bpe"), encoding="utf-8") as f:
        assert values["tokenizer.ggml.merges"] == f.read().split("\n")[1:-1]
    assert values["tokenizer.ggml.model"] == "gpt2" and values["tokenizer.ggml.pre"] == "gpt-2"
    assert len(tokens) == 50257 and (tokens[0], tokens[262], tokens[50256]) == ("!", "\u0120the",
                                                                               "<|endoftext|>")
    assert [i for i, kind in enumerate(types) if kind != 1] == [50256] and types[50256] == 3
    assert values["tokenizer.ggml.bos_token_id"] == values["tokenizer.ggml.eos_token_id"] == 50256
    assert values["tokenizer.ggml.add_bos_token"] is True


def test_tokenizer_of_an_import():
    """Of ours that went out and came back nothing has changed."""
    want = export("Llama", "f32", V=256)[3]
    for name in ("ours-hf", "models"):
        shutil.rmtree(name, ignore_errors=True)
    to_gguf = ["gguf", "models/ours-hf", "out.gguf", "--type", "f32"]
    for words in (["export", "model.bin", "ours-hf"], ["import", "ours-hf"], to_gguf):
        assert Forked(hf.main, ["hf.py", *words]).end()[0] == 0
    whole = {key: value for key, value in want.items() if key.startswith("tokenizer.")}
    for ends in (None, [], ["x", -1], {}, True):            # the last ones are no tokens
        if ends is not None:
            write("models/ours-hf/generation_config.json", json.dumps({"eos_token_id": ends}))
            write("models/ours-hf/tokenizer_config.json", json.dumps({"eos_token": [ends]}))
            assert Forked(hf.main, ["hf.py", *to_gguf]).end()[0] == 0
        got = {name: field.contents() for name, field in gguf.GGUFReader("out.gguf").fields.items()}
        got = {key: value for key, value in got.items() if key.startswith("tokenizer.")}
        assert got == whole or ends is not None and got["tokenizer.ggml.eos_token_id"] == 0


def test_kinds_of_tokens():
    """llama.cpp writes no CONTROL token, and cuts a text at both kinds."""
    added = [{"content": content, "id": i, "special": special} for i, (content, special) in enumerate(
        [("<pad>", True), ("<tool>", False), ("<end>", True)], 3)]
    vocab = {"a": 0, "b": 1, "c": 2, **{token["content"]: token["id"] for token in added}}
    files = {"tokenizer.json": json.dumps({"added_tokens": added}).encode()}
    out = gguf.GGUFWriter(None, "gpt2")
    export_gguf.add_tokenizer(out, 7, export_hf.Words(vocab, [], 5, files))
    kinds = out.kv_data[0]["tokenizer.ggml.token_type"].value
    normal, control, user_defined, unused = 1, 3, 4, 5          # as llama.cpp numbers them
    assert kinds == [normal, normal, normal, control, user_defined, control, unused]


@pytest.mark.parametrize("shape, said", [
    ("NanoChat", "is a NanoChat, and GGUF has no architecture"), ("softcap", "computes this"),
    ("Mistral", "is a Mistral, and GGUF has no"), ("Qwen3 windows", "reads no window of a Qwen3"),
    ("Qwen2", "has 4 heads of 16, and llama.cpp reads a Qwen2 whose heads are together as wide"),
    *((f"Qwen{n} with Llama 3", f"does not read that of a Qwen{n}") for n in (2, 3)),
    ("parallel", "is not GPT-2"), ("damaged", "does not have the checksum"), (None, "no file 'none.bin'")])
def test_refused(shape, said):
    if shape == "parallel":
        dims = formats.Dims(maxT=8, V=256, L=1, NH=1, C=16, block=1)
        formats.write_checkpoint("none.bin", dims, formats.init_params(dims, 1))
    elif shape == "damaged":
        good = read(wide_model("none.bin", GPT2))
        write("none.bin", good[:1016] + bytes(range(8)) + good[1024:])
    elif shape:
        kind, *more = shape.split(" with ")
        more = FAMILY[more[0]] if more else {}
        family_model("none.bin", **{**FAMILY.get(kind, {"softcap": 30.0}), **more})
    elif os.path.exists("none.bin"):
        os.unlink("none.bin")
    code, _, err = Forked(hf.main, [hf.__file__, "gguf", "none.bin", "no.gguf"]).end()
    assert code == 1 and said in err.splitlines()[0] and len(err.splitlines()) == 2, err
    assert not os.path.exists("no.gguf") and not os.path.exists("no.gguf.part")


# ---- llama.cpp ----

@pytest.fixture(scope="session")
def llama_cpp():
    """A Python that has it; made once, and kept in build/."""
    folder = os.path.join(ROOT, "build/llama_cpp")
    python, log = folder + "/bin/python", folder + ".log"
    if run_program([python, "-c", "import llama_cpp"])[0] if os.path.exists(python) else True:
        with open(write(log, ""), "w", encoding="utf-8") as said:
            for words in ([sys.executable, "-m", "venv", folder], [python, "-m", "pip", "install", PACKAGE]):
                if subprocess.run([*LEASH, *words], stdout=said, stderr=said, timeout=5400,
                                  check=False).returncode:
                    pytest.skip(f"{PACKAGE} cannot be built here: {log} says why")
    return python


def llama_cpp_says(python, tokens, text, count=8):
    """(logits, the text's tokens, `count` that follow them greedily)"""
    write("use.py", USE)
    write("prompt.txt", text)
    code, out, err = run_program([python, "use.py", "out.gguf", json.dumps(tokens), str(count)])
    assert code == 0, err[-2000:]
    return np.load("logits.npy"), *json.loads(out)


def our_logits(dims, tokens):
    """(T,V) of model.bin"""
    head = formats.header_words(formats.MAGIC_TENSORS, 2, 1, len(tokens))
    write("batch.bin", head.tobytes() + np.array([tokens, tokens], "<i4").tobytes())
    test = os.path.join(ROOT, "test_gpt2cpu")
    code, _, err = run_program([test, "dump-grads", "model.bin", "batch.bin", "ours.bin", "1"])
    assert code == 0, err
    return formats.read_tensors("ours.bin", dims)["logits"][0]


def greedy(dims, prompt, count, gap):
    """Prompt and text; the two best logits must not be nearer to each other than `gap`, for rounding."""
    tokens = list(prompt)
    for _ in range(count):
        last = our_logits(dims, tokens)[-1]
        first, second = np.sort(last)[[-1, -2]]
        assert first - second > gap
        tokens.append(int(last.argmax()))
    return tokens


@pytest.mark.slow
@pytest.mark.timeout(5600)
@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp(kind, llama_cpp):
    dims, *_ = export(kind, "f32")
    tokens = np.random.default_rng(5).integers(0, 256, dims.maxT).tolist()
    want = our_logits(dims, tokens)
    got, prompt, said = llama_cpp_says(llama_cpp, tokens, "ab")
    worst = np.abs(got - want).max()
    print(f"{kind}: logits off by {worst:.1e}, rms {want.std():.2f}")
    bound = 5e-3 if kind == "GPT-2" else 1e-4       # it takes GPT-2's GELU from a table in half precision
    assert worst <= bound * max(1.0, want.std())
    assert prompt == [0, *b"ab"] and prompt + said == greedy(dims, prompt, 8, gap=2 * bound)
    for file_type, bound in (("f16", 0.02), ("q8_0", 0.2)):
        export(kind, file_type)
        worst = np.abs(llama_cpp_says(llama_cpp, tokens, "ab")[0] - want).max()
        print(f"{kind} {file_type}: logits off by {worst:.1e}")
        assert worst <= bound * max(1.0, want.std())


@pytest.mark.slow
@pytest.mark.timeout(5600)
def test_llama_cpp_tokens(llama_cpp):
    """GPT-2's tokenizer, of the fixture's text."""
    export("GPT-2", "f16", V=50257)
    fixture = os.path.join(ROOT, "dev/test/fixtures/tokenizer")
    with open(fixture + ".txt", encoding="utf-8", newline="") as f:
        got = llama_cpp_says(llama_cpp, [50256], f.read(), 0)[1]
    assert got == [50256, *np.fromfile(fixture + ".ids", "<u2").tolist()]


TOKENIZE = """
import json, sys
from llama_cpp import Llama
model = Llama(sys.argv[1], vocab_only=True, verbose=False)
texts = json.load(open("texts.json"))
print(json.dumps([[model.tokenize(text.encode(), add_bos=first) for text in texts]
                  for first in (False, True)]))
"""


@pytest.mark.slow
@pytest.mark.timeout(5600)
@pytest.mark.parametrize("family", PUBLISHED)
def test_llama_cpp_families(family, llama_cpp):
    """Of each text, with and without what begins one, the tokenizer's own."""
    tokenizers = pytest.importorskip("tokenizers")
    for name in ("source", "models"):
        shutil.rmtree(name, ignore_errors=True)
    folder(family, "source")
    config = json.loads(read("source/config.json"))
    write("source/config.json", json.dumps({**config, "sliding_window": None}))
    for words in (["import", "source"], ["gguf", "models/source", "out.gguf"]):
        assert Forked(hf.main, ["hf.py", *words]).end()[0] == 0
    texts = [text for text in TEXTS if PUBLISHED[family][0] != "first" or not text.startswith(" ")]
    write("texts.json", json.dumps(texts))
    write("use.py", TOKENIZE)
    code, out, err = run_program([llama_cpp, "use.py", "out.gguf"])
    assert code == 0, err[-2000:]
    tokenizer = tokenizers.Tokenizer.from_file("source/tokenizer.json")
    for with_first, got in zip((False, True), json.loads(out)):
        assert got == [tokenizer.encode(text, add_special_tokens=with_first).ids for text in texts]
