"""dev/hf.py export and import: models to Hugging Face's files and back, held against names and shapes spelled
out here. dev/reference/compare.py holds exports against transformers on a machine that has it;
here the tests of transformers do what that leaves (CI has neither torch nor transformers).
"""
import hashlib
import json
import math
import os
import re
import shutil
import signal
import struct
import sys
import types

import pytest

from checks import ROOT, read, run_program, write
from forked import Forked
from trainer import Result, check_ran, log_lines, model_path, run_ok, snapshot
import trainer
from twins import FAMILY, constant_model, family_model, formats, np, wide_model, windows

sys.path.insert(0, os.path.join(ROOT, "dev"))
import hf                                           # noqa: E402
import export_hf                                    # noqa: E402
import import_hf                                    # noqa: E402
import tokenizer_files                              # noqa: E402

pytestmark = pytest.mark.cpu_only
END = "<|endoftext|>"
SHAPES = ["L2,NH4,C64,T32,V256", "L1,NH1,C24,T17,V300", "L3,NH2,C40,T48,V509"]     # V=256 needs no padding
HF_NAMES = {"wte": "wte.weight", "wpe": "wpe.weight", "lnfw": "ln_f.weight", "lnfb": "ln_f.bias"}
for ours, theirs in (("ln1", "ln_1"), ("qkv", "attn.c_attn"), ("attproj", "attn.c_proj"), ("ln2", "ln_2"),
                     ("fc", "mlp.c_fc"), ("fcproj", "mlp.c_proj")):
    HF_NAMES.update({ours + kind[0]: f"h.{{}}.{theirs}.{kind}" for kind in ("weight", "bias")})


@pytest.fixture(autouse=True)
def in_its_own_folder(in_its_folder, tmp_path, monkeypatch):
    """With a model `plain.bin`, and its export in the folder `plain`."""
    if not os.path.isdir("plain"):
        tool_ok(wide_model("plain.bin", SHAPES[1]), "plain")
    for name in ("train.bin", "val.bin", "plain.bin"):
        shutil.copy(name, tmp_path)
    shutil.copytree("plain", tmp_path / "plain")
    monkeypatch.chdir(tmp_path)


def tool(*words, command="export", limit=None, meanwhile=None, prepare=None):
    """meanwhile(): happens when the weights are to be written; prepare(): before the program begins."""
    def main():
        if meanwhile:
            export_hf.write_safetensors = import_hf.write_model = lambda *_: meanwhile()
        if prepare:
            prepare()
        return hf.main()
    line = ["hf.py", command, *map(str, words)]
    return Result(*Forked(main, line, limit=limit).end(), line)


def tool_ok(*words, **more):
    return check_ran(tool(*words, **more))


def imported(folder, out="taken"):
    """The model's file."""
    shutil.rmtree(out, ignore_errors=True)
    tool_ok(folder, "--out", out, command="import")
    return out + "/model_00000000.bin"


def refused(*words, said, **more):
    """Exit code 1, one sentence and perhaps a hint, nothing on the disk changed."""
    before, result = snapshot(), tool(*words, **more)
    lines = result.err.splitlines()
    assert result.code == 1 and len(lines) in (1, 2) and lines[0].startswith("error: "), result.err
    assert lines[1:] == [line for line in lines[1:] if line.startswith("hint: ")], result.err
    assert said in result.err
    assert snapshot() == before


def not_imported(folder, said, **more):
    refused(folder, "--out", "taken", said=said, command="import", **more)


def takes(folder, want):
    """Import makes the file `want` of it, to the bit, with a checksum."""
    path = imported(folder)
    formats.check_checksum(path)
    got, want = read(path), read(want)
    assert any(got[1016:1024]) and got[:1016] == want[:1016] and got[1024:] == want[1024:]


# ---- models and files, by a few lines of our own ----

def write_tensors(path, tensors):
    table, at = {}, 0
    for name, (dtype, array) in tensors.items():
        table[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(table).encode()           # of any length: the format asks for no alignment
    return write(path, struct.pack("<Q", len(text)) + text +
                       b"".join(array.tobytes() for _, array in tensors.values()))


def read_json(path):
    return json.loads(read(path))


def write_json(path, value):
    return write(path, json.dumps(value).encode())


def changed_folder(name, tensors=None, **config):
    """A copy of the folder `plain` with another config (None takes a key away) or other tensors."""
    shutil.copytree("plain", name, dirs_exist_ok=True)
    old = {**read_json("plain/config.json"), **config}
    write_json(name + "/config.json", {k: v for k, v in old.items() if v is not None or k == "n_inner"})
    if tensors:
        write_tensors(name + "/model.safetensors", tensors)
    return name


def read_tensors(path):
    """{name: (type, array)}"""
    raw = read(path)
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    table, types = json.loads(raw[8:end]), {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
    return {name: (t["dtype"], np.frombuffer(raw, types[t["dtype"]], math.prod(t["shape"]),
                                             end + t["data_offsets"][0]).reshape(t["shape"]))
            for name, t in table.items() if name != "__metadata__"}


def plain():
    return read_tensors("plain/model.safetensors")


# ---- tests ----

def exported(dims, params):
    """{transformers' name: array}: without padding, one for each layer, linear layers (in, out)."""
    tensors = {}
    for name, theirs in HF_NAMES.items():
        values, layered = params[name][:dims.V if name == "wte" else None], "{}" in theirs
        for layer, array in enumerate(values if layered else [values]):
            tensors["transformer." + theirs.format(layer)] = array.T if layered else array
    return tensors


@pytest.mark.parametrize("text", SHAPES)
def test_round_trip(text):
    """A file, its export and what is imported of that."""
    for version in (5, 3):
        dims, params = formats.read_checkpoint(wide_model("m.bin", text, version))
        formats.write_checkpoint("want.bin", dims, params, version)
        tool_ok("m.bin", f"hf{version}")
        takes(f"hf{version}", "want.bin")
    got, want = read_tensors("hf3/model.safetensors"), exported(dims, params)
    assert set(got) == set(want), "the head is the embedding"
    for name, array in want.items():
        assert got[name][0] == "F32" and np.array_equal(got[name][1], array), name


def test_other_padding():
    """llm.c's files need not pad to a multiple of 128: what the file says stays."""
    data, C = read("plain.bin"), 24
    write("304.bin", data[:28] + struct.pack("<i", 304) + data[32:1024 + 4 * 304 * C] +
                data[1024 + 4 * 384 * C:])
    tool_ok("304.bin", "hf")
    assert read("hf/model.safetensors") == read("plain/model.safetensors")


def test_types():
    """fp32 becomes bf16 as formats.py rounds it, on both ways; bf16 becomes fp32 without loss."""
    dims, params = formats.read_checkpoint(wide_model("wide.bin", SHAPES[2]))
    rounded = formats.round_params(params, "bfloat16")
    for version, name in ((5, "narrow.bin"), (3, "rounded.bin")):
        formats.write_checkpoint(name, dims, rounded, version)
    for source, dtype, said, want in (("wide.bin", "bf16", "bfloat16", "narrow.bin"),
                                      ("narrow.bin", "fp32", "float32", "rounded.bin")):
        tool_ok(source, dtype, "--dtype", dtype)
        takes(dtype, want)
        assert read_json(dtype + "/config.json")["torch_dtype"] == said
    # a NaN, infinities, the largest number, ties, a denormal
    bits = [0x7FFFFFFF, 0xFFC00000, 0x7F800001, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x3F808000, 0x3F818000, 1]
    hard = np.zeros(24, "<u4")
    hard[:len(bits)] = bits
    write("hard.bin", read("plain.bin")[:-96] + hard.tobytes())
    tool_ok("hard.bin", "hard", "--dtype", "bf16")
    got = read_tensors("hard/model.safetensors")[LNFB][1].tolist()[:len(bits)]
    assert all(half & 0x7F80 == 0x7F80 and half & 0x7F for half in got[:3]), "a NaN stays one"
    assert got[3:] == [0x7F80, 0xFF80, 0x7F80, 0x3F80, 0x3F82, 0]
    assert read(imported("hard"))[-48:] == np.array(got + [0] * 15, "<u2").tobytes()


def test_run_folder():
    """The last model of a run, with its loss; what the trainer wrote comes back."""
    run_ok({"-o": "run", "-x": 6, "-v": 3, "-n": None})
    shutil.copy(model_path("run"), "run/model_00000005.bin")    # an older one, and what is no model
    write("run/model_99999999.bin.part", b"")
    log = read("run/main.log")                    # a run that went back says a step again
    write("run/main.log", b"s:6 tel:9.9\n" + log)
    tool_ok("run", "deep/er/mine")
    takes("deep/er/mine", "run/model_00000006.bin")
    card = read("deep/er/mine/README.md").decode()
    loss = log_lines("run", "tel")[-1].split("tel:")[1].strip()
    assert "model_00000006.bin" in card and f"validation loss {loss}" in card and "tokenizer" in card
    assert "# mine\n" in card and os.getcwd() not in card, "the card names the folder, not its place"
    os.mkdir("empty_run")
    refused("empty_run", "out", said="no model_*.bin in 'empty_run'")


def test_config():
    want = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 300, "n_positions": 17,
            "n_embd": 24, "n_layer": 1, "n_head": 1, "n_inner": None, "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "attn_pdrop": 0.0, "bos_token_id": None}
    config = read_json("plain/config.json")
    assert {key: config[key] for key in want} == want
    names = ["README.md", "config.json", "generation_config.json", "model.safetensors"]
    assert sorted(os.listdir("plain")) == names, "no tokenizer for V=300"
    assert b"ids" not in read("plain/README.md"), "nor a word of it on the card"
    assert set(read_json("plain/generation_config.json").values()) == {None}
    out = tool_ok("plain.bin", "plain2").out
    assert "no tokenizer" in out and f"{(300 + 17) * 24 + (12 * 24 + 13) * 24 + 48:,} parameters" in out
    weights = read("plain/model.safetensors")
    length = struct.unpack("<Q", weights[:8])[0]
    assert length % 8 == 0, "its bytes begin at a multiple of 8"
    assert json.loads(weights[8:8 + length])["__metadata__"] == {"format": "pt"}, "what PyTorch asks for"


def test_gpt2_tokenizer():
    """GPT-2's encoder.json has a published hash; json.dumps happens to write it as OpenAI did."""
    tool_ok(wide_model("gpt2.bin", "L1,NH1,C8,T4,V50257"), "hf")
    vocab, fast = read_json("hf/vocab.json"), read_json("hf/tokenizer.json")
    assert hashlib.sha256(json.dumps(vocab).encode()).hexdigest() == \
        "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
    merges = read(os.path.join(ROOT, "dev/data/gpt2_bpe/vocab.bpe"))
    assert read("hf/merges.txt") == merges
    assert fast["model"]["vocab"] == vocab
    assert fast["model"]["merges"] == merges.decode().split("\n")[1:-1]
    assert [(t["id"], t["content"]) for t in fast["added_tokens"]] == [(50256, "<|endoftext|>")]
    assert read_json("hf/tokenizer_config.json")["model_max_length"] == 4
    assert read_json("hf/config.json")["eos_token_id"] == 50256
    assert set(read_json("hf/generation_config.json").values()) == {50256}, "begin, end and padding"


def test_byte_tokenizer():
    tool_ok(wide_model("bytes.bin", SHAPES[0]), "hf")
    vocab = read_json("hf/vocab.json")
    want = {0: "<|endoftext|>", 10: "\u010a", 32: "\u0120", 65: "A", 173: "\u0143", 174: "\u00ae"}
    assert {i: token for token, i in vocab.items() if i in want} == want
    assert sorted(vocab.values()) == list(range(256)), "each once"
    assert read_json("hf/tokenizer.json")["model"]["merges"] == [], "and nothing merges"
    assert read_json("hf/config.json")["eos_token_id"] == 0


def test_foreign_files():
    """What other programs write: names without a prefix, masks, fp16, a head that is wte."""
    tensors = plain()
    old = {name.replace("transformer.", ""): value for name, value in tensors.items()}
    old["h.0.attn.bias"] = "U8", np.ones((1, 1, 17, 17), "u1")
    old["h.0.attn.masked_bias"] = "F32", np.array(-1e4, "<f4")
    takes(changed_folder("old", old), "plain.bin")
    tied = {**tensors, "lm_head.weight": tensors["transformer.wte.weight"]}
    takes(changed_folder("tied", tied, tie_word_embeddings=False), "plain.bin")
    changed_folder("short")                     # a config.json that leaves the defaults out
    config = read_json("plain/config.json")
    sizes = "model_type", "vocab_size", "n_positions", "n_embd", "n_layer", "n_head"
    write_json("short/config.json", {key: config[key] for key in sizes})
    takes("short", "plain.bin")
    halves = {name: ("F16", array.astype("<f2")) for name, (_, array) in tensors.items()}
    dims, params = formats.read_checkpoint("plain.bin")
    formats.write_checkpoint("want.bin", dims, formats.round_params(params, "float16"))
    takes(changed_folder("halves", halves, torch_dtype="float16"), "want.bin")
    # one tensor in fp32 is enough for the file to be fp32
    tool_ok("plain.bin", "narrow", "--dtype", "bf16")
    name = "transformer.wte.weight"
    changed_folder("mixed", {**read_tensors("narrow/model.safetensors"), name: tensors[name]})
    rounded = {**formats.round_params(params, "bfloat16"), "wte": params["wte"]}
    formats.write_checkpoint("want.bin", dims, rounded)
    takes("mixed", "want.bin")
    table(lambda rows: json.dumps({**rows, MASK: {                      # empty, between two tensors
        "dtype": "I64", "shape": [0], "data_offsets": rows[LNFB]["data_offsets"][:1] * 2}}))()
    takes("other", "plain.bin")


# ---- the folder `other` is like `plain`, but for ----

def config(**keys):
    return lambda: changed_folder("other", **keys)


def tensor(name, value=None):
    """value(all tensors): what it is instead; None: it is not there."""
    def make():
        tensors = plain()
        new = {name: value(tensors)} if value else {}
        changed_folder("other", {**{n: old for n, old in tensors.items() if n != name}, **new})
    return make


def data(change):
    def make():
        changed_folder("other")
        write("other/model.safetensors", change(read("plain/model.safetensors")))
    return make


def table(change):
    """change(the table of tensors): the text of another one."""
    def changed(good):
        length = struct.unpack("<Q", good[:8])[0]
        text = change(json.loads(good[8:8 + length])).encode()
        return struct.pack("<Q", len(text)) + text + good[8 + length:]
    return data(changed)


def one_row_more(name="a", **change):
    """In the table of tensors: like that of ln_f.bias but for the change."""
    return table(lambda rows: json.dumps({**rows, name: {**rows[LNFB], **change}}))


def long_table(length):
    """The table of tensors with blanks behind it."""
    def changed(good):
        end = 8 + struct.unpack("<Q", good[:8])[0]
        return struct.pack("<Q", length) + good[8:end].ljust(length) + good[end:]
    return changed


def floats(*shape):
    return lambda tensors: ("F32", np.ones(shape, "<f4"))


def integers(*shape):
    return lambda tensors: ("I32", np.ones(shape, "<i4"))


WTE, HEAD, LNFB = "transformer.wte.weight", "lm_head.weight", "transformer.ln_f.bias"
LNFW, MASK = "transformer.ln_f.weight", "h.0.attn.bias"             # a mask is not read
SQUARE, FC = "transformer.h.0.attn.c_proj.weight", "transformer.h.0.mlp.c_fc.weight"
UNREADABLE = "cannot be read"
OTHERS = [
    # what looks like GPT-2 and computes something else
    *[(config(**{key: value}), f"{key} is {json.dumps(value)}".replace('"', ""))
      for key, value in (("model_type", "gpt_neo"), ("activation_function", "gelu"), ("n_inner", 95),
                         ("activation_function", "relu"), ("layer_norm_epsilon", 1e-6),
                         ("scale_attn_weights", False), ("scale_attn_by_inverse_layer_idx", True),
                         ("reorder_and_upcast_attn", True), ("add_cross_attention", True))],
    (config(quantization_config={"bits": 4}), "the model is quantised"),
    # sizes
    (config(vocab_size=2000000), "V=2000000 T=17 L=1 NH=1 C=24: C must be"),
    (config(n_layer=None), "lacks a whole number"),
    (config(n_embd=36, n_head=2), "C=36: C must be a multiple of 8"), (config(n_embd=24.0), "lacks a whole"),
    (config(n_head=5), "NH=5 C=24: C must be a multiple of 8 up to 12288, and of NH"),
    (config(n_head=0), "NH=0 C=24"), (config(n_embd=-24), "C=-24: C must"),
    (config(n_head=True), "lacks a whole number for n_head"),
    (config(n_positions=16), "wpe.weight has the shape (17, 24), config.json means (16, 24)"),
    (config(n_layer=2), "lacks the tensor transformer.h.1.ln_1.weight"),
    # tensors
    (config(tie_word_embeddings=False), "lacks the tensor lm_head.weight"),
    (tensor(HEAD, lambda t: ("F32", t[WTE][1] + np.float32(1e-6))), HEAD + " differs"),
    (tensor(HEAD, lambda t: ("F32", t[WTE][1][:-1])), HEAD + " has the shape"),
    (tensor(HEAD, lambda t: ("F16", t[WTE][1].astype("<f2"))), HEAD + " differs"),
    (tensor(HEAD, integers(300, 24)), HEAD + " is of type I32"),
    (tensor("transformer.h.1.ln_1.weight", floats(24)),
     "has transformer.h.1.ln_1.weight, which a GPT-2 of 1 layers has not"),
    (tensor(FC, lambda t: ("F32", t[FC][1].T.copy())), "shape (96, 24)"),
    (tensor(SQUARE, floats(24 * 24)), "shape (576"), (tensor(SQUARE, integers(24, 24)), "is of type I32"),
    (tensor(SQUARE), f"lacks the tensor {SQUARE}"), (tensor(LNFB), f"lacks the tensor {LNFB}"),
    # damaged files
    (data(lambda good: b""), "truncated one: 0 bytes"), (data(lambda good: good[:7]), "one: 7 bytes"),
    (data(lambda good: good[:len(good) // 2]), "is truncated or damaged"),
    (data(lambda good: good[:-1]), "is truncated"), (data(lambda good: good + b"x"), "is truncated"),
    (data(long_table(2**20 + 1)), "has a table of 1048577 bytes"),
    (data(lambda good: long_table(2**20)(good) + b"x"), "is truncated"),
    (data(lambda good: struct.pack("<Q", 2**63) + good[8:]), "truncated one"),
    (data(lambda good: struct.pack("<Q", 8) + b"[1, 2,3]" + good[8:]), UNREADABLE),
    (data(lambda good: good[:8] + b"x" + good[9:]), UNREADABLE),
    (one_row_more(data_offsets=None), UNREADABLE), (one_row_more(shape=[25]), "is damaged"),
    (one_row_more(shape=[-4, -6]), UNREADABLE), (one_row_more(data_offsets=[96, 0]), UNREADABLE),
    (one_row_more(data_offsets=[-96, 0]), UNREADABLE), (one_row_more(LNFB, shape={"1": 24}), UNREADABLE),
    (table(lambda rows: f'{{"{LNFB}": {json.dumps(rows[LNFB])}, ' + json.dumps(rows)[1:]), UNREADABLE),
    # tensors that share bytes, and bytes of no tensor
    (one_row_more(LNFW), "of the tensors, and those before it end at"),
    (one_row_more(MASK, dtype="I64"), f"is damaged: {LNFB} begins at byte"),
    (one_row_more(MASK, dtype="I64", data_offsets=[4, 4]), f"is damaged: {MASK} begins at byte"),
    (table(lambda rows: json.dumps({name: row for name, row in rows.items() if name != LNFW})),
     f"is damaged: {LNFB} begins at byte")]


@pytest.mark.parametrize("make, said", OTHERS, ids=[said for _, said in OTHERS])
def test_refused(make, said):
    make()
    not_imported("other", said)


def test_damaged_folders():
    changed_folder("other")
    for raw in (b"", b"{", b"[]", b'{"n_layer": 1, "n_layer": 1}', b'{"x": NaN}', b"\xff", b"[" * 10**5,
                b'{"n_layer": 1' + b"0" * 5000 + b"}"):
        write("other/config.json", raw)
        not_imported("other", "'other/config.json' is not a JSON object")
    os.unlink("other/config.json")
    not_imported("other", "'other/config.json': No such file")
    for path in ("plain.bin", "none/of/them", "/dev/null/x", "../x", "./x", "", "x y", "a/.."):
        not_imported(path, "is no folder, nor a name on the hub")
    refused("plain", "--revision", "main", command="import", said="--revision is for names on the hub")


@pytest.mark.parametrize("name, said", [
    ("pytorch_model.bin", "PyTorch pickles them"),
    ("pytorch_model-00001-of-00002.bin", "PyTorch pickles them"),
    ("adapter_config.json", "is an adapter (LoRA)"), ("adapter_model.safetensors", "is an adapter (LoRA)"),
    ("m-q8_0.gguf", "has GGUF"), ("model_00000005.bin", "--model takes"),
    ("x.safetensors", "neither model.safetensors nor")])
def test_other_folders(name, said):
    """Named as what they are."""
    changed_folder("other")
    os.rename("other/model.safetensors", "other/" + name)
    not_imported("other", said)


@pytest.mark.parametrize("change, said", [
    (lambda good: b"", "shorter than"), (lambda good: good[:1], "shorter"),
    (lambda good: good[:512], "shorter than its 1024-byte header"),
    (lambda good: read("val.bin"), "starts with 20240520, expected 20240326"),
    (lambda good: good[:-1], "bytes, expected"), (lambda good: good + b"x", "bytes, expected"),
    (lambda good: good[:4] + b"\4" + good[5:], "version 4"),
    (lambda good: good[:4] + b"\147" + good[5:32] + b"\1" + good[33:], "not GPT-2: its block is parallel"),
    (lambda good: good[:20] + bytes(4) + good[24:], "impossible sizes"),
    (lambda good: good[:20] + b"\5" + good[21:], "NH5,C24"),
    (lambda good: good[:28] + bytes(4) + good[32:], "V300, V padded to 0")])
def test_damaged_models(change, said):
    write("bad.bin", change(read("plain.bin")))
    refused("bad.bin", "x", said=said)


def test_checksum():
    """Each byte of a model file counts, the header's free words, too. Other programs' have no checksum."""
    run_ok({"-o": "run", "-x": 1, "-n": None})
    good = read(model_path("run"))
    for at in (36, 1000, 1016, 1023, 1024, len(good) // 2, len(good) - 1):
        write("bad.bin", good[:at] + bytes([good[at] ^ 1]) + good[at + 1:])
        refused("bad.bin", "x", said="'bad.bin': damaged: it does not have the checksum in its header")
    tool_ok(write("other.bin", good[:1016] + bytes(8) + good[1024:]), "other")
    tool_ok("run", "whole")
    assert read("other/model.safetensors") == read("whole/model.safetensors")


def test_foreign_text_on_the_card():
    """None of it is HTML to who renders the card, or moves the cursor of who prints it."""
    bad = "a<img src=x onerror=f()>`\x1b[2J\x9b\udcff"
    words = export_hf.Words({bad: 0, "b": 1}, [], 0, {})
    run_ok({"-o": "run", "-x": 1, "-v": 1, "-n": None})
    os.rename("run", bad)
    for line in ("s:1 tel:<img>", "s:1 tel:\x1b[2J", "s:1 tel:1.5`<img>", "s:1 tel:2.5\x1b[2J", "s:1 tel:"):
        write(bad + "/main.log", line + "\n")
        tool_ok(bad, bad + ".hf")
        dims = formats.parse_model(SHAPES[0])
        for card in (read(bad + ".hf/README.md").decode(),
                     export_hf.model_card(bad, dims, "F32", f"{bad}/{bad}.bin", words)):
            assert not [c for c in card if not c.isprintable() and c != "\n"] and "<" not in card, card
            assert "validation loss" not in card, "of no number"
        shutil.rmtree(bad + ".hf")


class FromFiles:
    """In the place of transformers' AutoTokenizer; the package tokenizers does its work."""
    def __init__(self, folder):
        package = pytest.importorskip("tokenizers")
        self.inner = package.Tokenizer.from_file(folder + "/tokenizer.json")
        self.bos_token_id = self.inner.token_to_id(read_json(folder + "/tokenizer_config.json")["bos_token"])

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": self.inner.encode(text, add_special_tokens=add_special_tokens).ids}


def around(*pieces):
    """A post_processor that puts tokens around each text; "$A" is the text."""
    single = [{"Sequence": {"id": "A", "type_id": 0}} if piece == "$A" else
              {"SpecialToken": {"id": piece, "type_id": 0}} for piece in pieces]
    special = {piece: {"id": piece, "ids": [0], "tokens": [piece]} for piece in pieces if piece != "$A"}
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, *single],
            "special_tokens": special}


@pytest.mark.parametrize("added", [None, around("<|endoftext|>", "$A"), around("$A", "<|endoftext|>"),
                                   {"type": "RobertaProcessing", "sep": ["b", 1], "cls": ["a", 0],
                                    "trim_offsets": False, "add_prefix_space": False}],
                         ids=["nothing", "before", "behind", "around"])
def test_the_card_encodes_as_get_py(added):
    """Its lines make of a text what shards have, whatever the tokenizer adds by itself."""
    tool_ok(wide_model("bytes.bin", SHAPES[0]), "hf")
    write_json("hf/tokenizer.json", {**read_json("hf/tokenizer.json"), "post_processor": added})
    lines = read("hf/README.md").decode().split("```")[1].splitlines()[1:]
    known = {"folder": "hf", "tokenizer": FromFiles("hf")}
    exec("\n".join(line for line in lines if "from" not in line), known)        # pylint: disable=W0122
    assert known["ids"] == [0, *b"Once upon a time"]
    assert "add" not in read("hf/README.md").decode().split("```")[2], "what some tokenizers do by themselves"


def test_outputs():
    """What is there already stays; an empty folder is nobody's."""
    os.mkfifo("pipe")
    os.symlink("nowhere", "dangling")
    os.symlink("loop", "loop")                          # leads to itself: what cannot be looked at
    os.mkdir("logged")
    shutil.copy("plain.bin", "logged/model_00000001.bin")
    os.symlink("main.log", "logged/main.log")
    for line, said in (("plain.bin plain", "'plain' exists and is not empty"), ("pipe x", "no file 'pipe'"),
                       ("plain.bin plain.bin", "is not a folder"), ("none.bin x", "no file 'none.bin'"),
                       ("plain.bin dangling", "'dangling' exists and is not a folder"),
                       ("loop x", "'loop': Too many levels"), ("plain.bin loop/x", "'loop/x': Too many"),
                       ("logged x", "'logged/main.log': Too many"),
                       ("plain.bin x --dtype fp8", "fp8")):
        refused(*line.split(), said=said)
    refused("plain.bin", "", said="no name")            # not the current folder
    os.mkdir("empty")
    os.symlink("empty", "link")
    tool_ok("plain.bin", "link")
    assert os.path.islink("link"), "a link to a folder stays one"
    takes("link", "plain.bin")
    assert not [name for name in os.listdir(".") if name.endswith(".tmp")], "nothing is left beside"


def test_broken_off():
    """By a full disk, Ctrl-C, an end from outside, another's files: nothing is left, nothing is lost."""
    refused("plain.bin", "new", said="File too large", limit=20000)
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        before = snapshot()
        result = tool("plain.bin", "new", meanwhile=lambda number=number: os.kill(os.getpid(), number))
        assert (result.code, result.err, snapshot()) == (code, "", before)
    result = tool("plain.bin", "new", meanwhile=lambda: write("new/notes.txt", "mine"))
    assert result.code == 1 and "not empty" in result.err and os.listdir("new") == ["notes.txt"]


@pytest.mark.parametrize("words, stubs, code, said", [
    ("--help", "numpy", 0, ""), ("", "", 1, "--help"), ("export", "", 1, "hf.py export --help"),
    ("export plain.bin x", "numpy", 1, "pip install numpy"),
    ("export plain.bin x", "xxhash", 1, "pip install xxhash")])
def test_command(words, stubs, code, said):
    """As a user starts it, in a process of its own; without a package as well."""
    if stubs:
        write(f"{stubs}/{stubs}.py", f"raise ImportError(name={stubs!r})\n".encode())
    got, _, err = run_program([sys.executable, hf.__file__, *words.split()], PYTHONPATH=stubs,
                              PYTHONDONTWRITEBYTECODE="1")
    assert (got, said in err, len(err.splitlines())) == (code, True, 2 * code), err


@pytest.mark.parametrize("name, now", [("export_hf", "export"), ("export_gguf", "gguf"),
                                       ("import_llama2c", "llama2c")])
def test_former_programs(name, now):
    code, _, err = run_program([sys.executable, os.path.join(ROOT, f"dev/eval/{name}.py"), "plain.bin", "x"])
    assert code == 1 and (f"`python3 dev/hf.py {now}`" in err or "no gguf" in err) and not os.path.exists("x")


def test_transformers():
    """What the real ones write: a model of ours, and one of theirs."""
    theirs = pytest.importorskip("transformers")
    tool_ok(wide_model("mine.bin", SHAPES[2]), "mine")
    model = theirs.GPT2LMHeadModel.from_pretrained("mine").eval()
    assert model.generation_config.pad_token_id is None, "V=509 has no token for padding"
    model.save_pretrained("theirs")
    takes("theirs", "mine.bin")
    config = theirs.GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=8, vocab_size=50257)
    theirs.GPT2LMHeadModel(config).save_pretrained("fresh")
    run_ok({"-e": imported("fresh"), "-t": 8, "-x": 1})


# ---- the imported folder ----

def test_imported_folder():
    """It trains, samples, chats and is exported again, with the tokenizer and the chat template."""
    tokens = formats.parse_model("L1,NH1,C16,T64,V256")
    model = constant_model("said.bin", {98: 0.0})
    head = bytearray(read(model))
    head[4 * 252] = 1                                   # the chat template that it knows
    write("said.bin", head)
    tool_ok("said.bin", "mine-hf")
    out = tool_ok("mine-hf/", command="import").out
    assert out == f"wrote models/mine-hf: GPT-2, {tokens.text()}, 8,432 parameters\n"
    names = ["chat_template.jinja", "generation_config.json", "model_00000000.bin", "source.json",
             "tokenizer.bin", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(os.listdir("models/mine-hf")) == names and os.listdir("models") == ["mine-hf"]
    got, want = read("models/mine-hf/model_00000000.bin"), read("said.bin")
    assert got[:1016] == want[:1016] and got[1024:] == want[1024:]
    settings = read_json("mine-hf/tokenizer_config.json")
    assert read("models/mine-hf/chat_template.jinja").decode() == settings["chat_template"]
    assert read_json("models/mine-hf/source.json")["source"] == os.path.abspath("mine-hf")
    there = {"-e": "models/mine-hf", "-t": 8}
    run_ok({**there, "-x": 1, "-o": "run", "-n": 1})
    assert run_ok({**there, "-x": 0, "--prompt": "a", "-g": 3, "-s": 1}).samples() == ["abbb"]
    chat = {**dict.fromkeys(trainer.USUAL), "chat": "models/mine-hf", "-g": 3, "--verbose": -1}
    assert run_ok({**chat, "--temperature": 0}, input=b"Hi\n").out == "bbb\n"
    tool_ok("models/mine-hf", "again")
    assert "chat_template" in read_json("again/tokenizer_config.json")
    older = settings["chat_template"].replace(export_hf.ROLES, export_hf.ROLES_0_1)
    write_json("mine-hf/tokenizer_config.json", {**settings, "chat_template": older})
    assert older != settings["chat_template"] and formats.chat_template_of(imported("mine-hf")) == 1
    write_json("mine-hf/tokenizer_config.json", {**settings, "chat_template": "{{ another }}"})
    assert formats.chat_template_of(imported("mine-hf")) == 0
    assert read("taken/chat_template.jinja") == b"{{ another }}"


def test_the_trainer_names_the_command():
    split(changed_folder("sharded"))
    for path, folder in (("plain", "plain"), ("./plain/", "./plain"), ("plain/model.safetensors", "plain"),
                         ("sharded", "sharded"), ("none/x.safetensors", "none"), ("x.safetensors", "FOLDER"),
                         ("sharded/model.safetensors.index.json", "sharded")):
        command = f"python3 dev/hf.py import {folder}`, then -e models/{folder.removeprefix('./')}"
        trainer.refused({"-e": path}, "of transformers", command)


def test_imported_tokenizers():
    """GPT-2's, with its number; of another one the token in front of texts; what cannot be used is said."""
    tool_ok(wide_model("gpt2.bin", "L1,NH1,C8,T4,V50257"), "hf")
    for there, number in ((True, tokenizer_files.GPT2_ID), (False, 0)):
        imported("hf")
        found = tokenizer_files.read_head("taken/tokenizer.bin")
        assert (found and (found.V, found.eot, found.id)) == ((50257, 50256, number) if there else None)
        os.unlink("hf/tokenizer.json") if there else None
    tool_ok(wide_model("own.bin", "L1,NH1,C8,T4,V700"), "hf700")
    fast = read_json(os.path.join(ROOT, "dev/test/fixtures/own.json"))
    like = fast["added_tokens"][0]
    fast["added_tokens"] += [{**like, "id": 650 + i, "content": f"<{i}>"} for i in range(3)]
    write_json("hf700/tokenizer.json", fast)
    config, ends = read_json("hf700/config.json"), {"eos_token": "<2>"}
    for settings, numbers, first in (
            ({}, {}, END), ({"bos_token": "<0>", **ends}, {}, 650),
            ({"bos_token": {"content": "<1>"}}, {}, 651),
            (ends, {"bos_token_id": 652}, 652), ({"bos_token": ["<0>"]}, {"bos_token_id": [650]}, END),
            ({"bos_token": "<none>"}, {"bos_token_id": 699}, END)):
        write_json("hf700/tokenizer_config.json", settings)
        write_json("hf700/config.json", {**config, **numbers})
        imported("hf700")
        head = tokenizer_files.read_head("taken/tokenizer.bin")
        want = next(t["id"] for t in fast["added_tokens"] if t["content"] == END) if first == END else first
        assert head.eot == want and head.id == tokenizer_files.tokenizer_id(read("hf700/tokenizer.json"))
    for change, said in (({"decoder": None}, "texts are token ids"), ({"added_tokens": [
            {**fast["added_tokens"][0], "id": 700}]}, "ids up to 700, and the model 700 tokens")):
        write_json("hf700/tokenizer.json", {**fast, **change})
        shutil.rmtree("taken")
        assert said in tool_ok("hf700", "--out", "taken", command="import").out
        assert not os.path.exists("taken/tokenizer.bin")
    write_json("hf700/tokenizer.json", fast)
    write_json("hf700/tokenizer_config.json", {"chat_template": "\ud800"})
    tool_ok("hf700", "--out", "odd", command="import")
    assert read("odd/chat_template.jinja") == b"?"
    write("hf700/chat_template.jinja", "{{ messages }}")
    for text in ("[]", "{", '{"model": {}}', json.dumps({**fast, "normalizer": 1.5})):
        write("hf700/tokenizer.json", text)
        shutil.rmtree("taken", ignore_errors=True)
        not_imported("hf700", "'hf700/tokenizer.json' is no tokenizer.json to be used")


def test_import_is_whole():
    """By a full disk, Ctrl-C, another's files: nothing is left, nothing is lost. What is there stays."""
    not_imported("plain", "File too large", limit=20000)
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        before = snapshot()
        result = tool("plain", "--out", "new", command="import",
                      meanwhile=lambda number=number: os.kill(os.getpid(), number))
        assert (result.code, result.err, snapshot()) == (code, "", before)
    result = tool("plain", "--out", "new", command="import", meanwhile=lambda: write("new/notes", "mine"))
    assert result.code == 1 and "not empty" in result.err and os.listdir("new") == ["notes"]
    not_there = "--out", "new"
    refused("plain", *not_there, command="import", said="'new' exists and is not empty")
    refused("plain", "--out", "plain.bin", command="import", said="is not a folder")
    imported("plain")
    before = snapshot()
    assert "taken is there already" in tool_ok("plain", "--out", "taken", command="import").out
    assert snapshot() == before
    changed_folder("other", torch_dtype="other")
    not_imported("other", "'taken' exists and is of another revision, sha256:")


def test_damaged_bytes():
    """Whatever some bytes of the table are: refused in a sentence, or each tensor can be read."""
    good, rng = read("plain/model.safetensors"), np.random.default_rng(1)
    end = 8 + struct.unpack("<Q", good[:8])[0]
    taken, hard = 0, b'0123456789,:"{}[]-. e\\u\0\xff'
    for _ in range(400):
        raw = bytearray(good)
        for at in rng.integers(0, end, rng.integers(1, 4)):
            raw[at] = hard[rng.integers(len(hard))]
        write("x.safetensors", raw)
        try:
            found = import_hf.read_table("x.safetensors")
        except SystemExit as error:
            assert str(error).startswith("error: 'x.safetensors' ") and len(str(error).splitlines()) == 1
            continue
        taken += 1
        for tensor in found.values():
            known = tensor.dtype in import_hf.NUMPY
            assert tensor.begin >= end and (not known or import_hf.read_tensor(tensor).shape == tensor.shape)
    assert 20 < taken < 380, "both happen"


class Hub:
    """In the place of huggingface_hub."""
    def __init__(self, files, commit="c0ffee", broken=(), sums=()):
        self.files, self.commit, self.broken, self.sums, self.came = files, commit, broken, sums, []

    def prepare(self):
        sys.modules["huggingface_hub"] = self

    def HfApi(self, endpoint, token):
        assert (endpoint, token) == ("https://huggingface.co", None)
        return self

    def model_info(self, repo, revision):
        assert repo == "o/tiny.x"
        return types.SimpleNamespace(sha=revision or self.commit)

    def list_repo_tree(self, repo, folder, recursive, repo_type, revision):
        assert (repo, folder, recursive, repo_type) == ("o/tiny.x", None, True, "model") and revision
        lfs = {name: types.SimpleNamespace(sha256=sum_) for name, sum_ in dict(self.sums).items()}
        return [types.SimpleNamespace(path=name, size=len(data), lfs=lfs.get(name))
                for name, data in self.files.items()]

    def hf_hub_download(self, repo, name, repo_type, local_dir, endpoint, token, revision):
        if name in self.broken:
            raise OSError(f"cannot send {name}\nand more")
        print("came:", name)
        return write(f"{local_dir}/{name}", self.files[name])


def test_hub():
    """A name: what is needed of it comes, by its commit, and becomes what its folder would become."""
    tool_ok(wide_model("own.bin", SHAPES[0]), "hf")
    split("hf")
    files = {name: read("hf/" + name) for name in os.listdir("hf")}
    shard = "model-00001-of-00003.safetensors"
    more = {"pytorch_model.bin": b"x", "onnx/model.onnx": b"x", "README.md": b"x"}
    words = {"command": "import"}

    def refuse(said, changed=(), **how):
        result = tool("o/tiny.x", **words, prepare=Hub({**files, **more, **dict(changed)}, **how).prepare)
        lines = result.err.splitlines()
        assert result.code == 1 and len(lines) < 3, lines
        assert lines[0].startswith("error: ") and said in lines[0], lines
        assert not os.path.exists("models/tiny.x")

    refuse(f"cannot send {shard}", broken=[shard])
    refuse("is not " + shard, sums={shard: "0" * 64})
    refuse("the hub lists '../../x'", {"../../x": b"x"})
    refuse("the hub lists '/x'", {"/x": b"x"})
    refuse("model_type is gpt_neo", {"config.json": b'{"model_type": "gpt_neo"}'}, broken=[shard])
    refuse("../x.safetensors is not the name",
           {"model.safetensors.index.json": b'{"weight_map": {"x": "../x.safetensors"}}'})
    refuse("has no file 'x.safetensors'",
           {"model.safetensors.index.json": b'{"weight_map": {"x": "x.safetensors"}}'})
    hub = Hub({**files, **more}, sums={shard: hashlib.sha256(files[shard]).hexdigest()})
    said = tool_ok("o/tiny.x", **words, prepare=hub.prepare).out
    assert sorted(re.findall("came: (.*)", said)) == sorted(
        {*files} - {"README.md", "vocab.json", "merges.txt"})
    assert os.listdir("models") == ["tiny.x"], "what came is removed"
    assert read_json("models/tiny.x/source.json") == {"source": "o/tiny.x", "revision": "c0ffee"}
    assert read("models/tiny.x/model_00000000.bin") == read(imported("hf"))
    assert "came" not in tool_ok("o/tiny.x", **words, prepare=hub.prepare).out, "it is there already"
    refused("o/tiny.x", "--revision", "beef", **words, prepare=hub.prepare,
            said="'models/tiny.x' exists and is of another revision, c0ffee, not beef")
    refused("x/../y", **words, prepare=hub.prepare, said="is no folder, nor a name on the hub")


# ---- several files ----

def split(folder, count=3, **weight_map):
    """The folder's model.safetensors as `count` files and their index, in which weight_map changes names."""
    tensors, where = read_tensors(folder + "/model.safetensors"), {}
    for i in range(count):
        name = f"model-{i + 1:05}-of-{count:05}.safetensors"
        part = dict(list(tensors.items())[i::count])
        write_tensors(f"{folder}/{name}", part)
        where.update(dict.fromkeys(part, name))
    os.unlink(folder + "/model.safetensors")
    where = {name: at for name, at in {**where, **weight_map}.items() if at}
    write_json(folder + "/model.safetensors.index.json", {"metadata": {"total_size": 1}, "weight_map": where})
    return folder


def test_several_files():
    """Also with what wrappers of modules put in front of names."""
    takes(split(changed_folder("sharded")), "plain.bin")
    fronts = "_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."
    names = [fronts[i % 4] + (name if i % 2 else name.replace("transformer.", "")) for i, name in
             enumerate(plain())]
    takes(split(changed_folder("wrapped", dict(zip(names, plain().values())))), "plain.bin")


@pytest.mark.parametrize("weight_map, said", [
    ({"x": "../x.safetensors"}, "../x.safetensors is not the name"), ({"x": "x.bin"}, "x.bin is not the"),
    ({"x": "/x.safetensors"}, "/x.safetensors is not"), ({"x": "\0.safetensors"}, "is not the name"),
    ({"x": ["x.safetensors"]}, "is not the name"), ({"x": "x.safetensors"}, "'other/x.safetensors'"),
    ({"x": "all.safetensors"}, "transformer.wte.weight twice")])
def test_damaged_index(weight_map, said):
    path = split(changed_folder("other"), **weight_map) + "/model.safetensors.index.json"
    shutil.copy("plain/model.safetensors", "other/all.safetensors")
    not_imported("other", said)
    for raw, complaint in ((b"[]", "is not a JSON object"), (b'{"weight_map": {}}', "has no weight_map"),
                           (b'{"weight_map": [1]}', "has no weight_map"),
                           (b'{"weight_map": {"x": "model-00001-of-00003.safetensors"}}', "lacks the")):
        write(path, raw)
        not_imported("other", complaint)


# ---- the family of Llama ----

def test_family_file():
    """Both types, every shape; what is no such file."""
    for version in (203, 205):
        for shape in FAMILY.values():
            dims, params = family_model("m.bin", version, V=250, **shape)
            got_dims, got = formats.read_checkpoint("m.bin")
            assert got_dims == dims and list(got) == list(params)
            assert all(np.array_equal(got[name], params[name]) for name in got)
    good = read("m.bin")
    for at, word, said in ((4, 204, "version 204"), (40, 2, "family 2,"), (44, 3, "NKV 3,"),
                           (56, len(formats.MLPS), f"mlp {len(formats.MLPS)},"), (68, 0, "eps 0.0,"),
                           (52, 80, "bytes, exp")):
        write("bad.bin", good[:at] + struct.pack("<i", word) + good[at + 4:])
        refused("bad.bin", "x", said=said)


ROPE = {"Llama linear": {"rope_type": "linear", "factor": 4.0},
        "Llama 3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 40}}


@pytest.mark.parametrize("kind", FAMILY)
def test_family(kind):
    """Each class's names and configuration."""
    dims, params = family_model("m.bin", **FAMILY[kind])
    out = tool_ok("m.bin", "hf").out
    assert f"{sum(x.size for x in params.values()):,} parameters" in out
    name, config = kind.split()[0], read_json("hf/config.json")
    want = {"architectures": [name + "ForCausalLM"], "model_type": name.lower(), "vocab_size": 256,
            "hidden_size": 40, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 21, "rms_norm_eps": dims.eps,
            "rope_theta": dims.theta, "rope_parameters": {**ROPE.get(kind, {"rope_type": "default"}),
                                                          "rope_theta": dims.theta},
            "tie_word_embeddings": dims.tied, "hidden_act": "relu2" if name == "NanoChat" else "silu",
            "bos_token_id": 0, "eos_token_id": 0}
    assert {key: config[key] for key in want} == want
    assert config.get("final_logit_softcapping") == (dims.softcap or None)
    assert config.get("rope_scaling") == ROPE.get(kind)             # transformers before 5
    tensors = read_tensors("hf/model.safetensors")
    layer = ["self_attn." + x for x in ("q_proj", "k_proj", "v_proj", "o_proj")]
    layer += ["mlp.fc1", "mlp.fc2"] if name == "NanoChat" else \
        ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
    types = ["sliding_attention", "full_attention"]
    windows = {"Mistral": (6, None), "Qwen3 windows": (5, types)}.get(kind, (None, None))
    assert (config.get("sliding_window"), config.get("layer_types")) == windows
    layer += ["self_attn.q_norm", "self_attn.k_norm"] if name == "Qwen3" else []
    names = ["model.embed_tokens"] + ["model.norm"] * (name != "NanoChat") + ["lm_head"] * (not dims.tied) + \
        [f"model.layers.{l}.{x}" for l in range(2) for x in layer]
    biases = [f"model.layers.{l}.self_attn.{x}_proj.bias" for l in range(2) for x in "qkv" if name == "Qwen2"]
    assert set(tensors) == {*(x + ".weight" for x in names), *biases}
    assert not biases or np.array_equal(tensors[biases[4]][1], params["qkvb"][1, 64:96])
    assert tensors["model.layers.1.self_attn.k_proj.weight"][1].shape == (32, 40)
    assert name + " with" in read("hf/README.md").decode()


@pytest.mark.parametrize("kind", FAMILY)
def test_family_round_trip(kind):
    """A file, its export and what is imported of that, to the bit."""
    for version in (203, 205):
        family_model("m.bin", version, V=250, **FAMILY[kind])
        tool_ok("m.bin", f"hf{version}")
        takes(f"hf{version}", "m.bin")


def test_family_types():
    """bf16, fp16, several files, wrapped names, a head that is the embedding, keys that are not there."""
    family_model("m.bin", 205, qk_norm=True, tied=True, V=250)
    tool_ok("m.bin", "hf")
    tensors = read_tensors("hf/model.safetensors")
    assert {dtype for dtype, _ in tensors.values()} == {"BF16"}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = "F32", np.ones(8, "<f4")
    write_tensors("hf/model.safetensors", {"_orig_mod." + name: t for name, t in tensors.items()})
    split("hf")
    takes("hf", "m.bin")
    dims, params = family_model("m.bin", HS=16, NH=3, NKV=3, C=48, eps=1e-6)
    formats.write_checkpoint("want.bin", dims, formats.round_params(params, "float16"))
    tool_ok("m.bin", "halves")
    write_tensors("halves/model.safetensors", {name: ("F16", array.astype("<f2")) for name, (_, array) in
                                               read_tensors("halves/model.safetensors").items()})
    optional = ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_parameters",
                "tie_word_embeddings", "hidden_act", "attention_bias", "mlp_bias")
    config = read_json("halves/config.json")
    write_json("halves/config.json", {key: value for key, value in config.items() if key not in optional})
    takes("halves", "want.bin")
    nothing = dict.fromkeys(("rope_parameters", "rope_scaling", "head_dim"))
    write_json("halves/config.json", {**config, **nothing})
    takes("halves", "want.bin")


# what the classes of transformers take where config.json lacks the key
DEFAULTS = {"num_key_value_heads": 4, "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
            "tie_word_embeddings": False, "attention_bias": False, "hidden_act": "silu"}
CLASS_DEFAULTS = {
    "Llama": {**DEFAULTS, "mlp_bias": False},
    "Qwen3": {**DEFAULTS, "num_key_value_heads": 32, "head_dim": 128, "use_sliding_window": False},
    "Mistral": {**{key: value for key, value in DEFAULTS.items() if key != "attention_bias"},
                "num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2": {**{key: value for key, value in DEFAULTS.items() if key != "attention_bias"},
              "num_key_value_heads": 32, "use_sliding_window": False},
    "NanoChat": {**DEFAULTS, "hidden_act": "relu2", "final_logit_softcapping": 15.0}}


def by_default(kind):
    """(dims, params, config without any key that has a default) of m.bin and hf."""
    sizes = {"Llama": {}, "Qwen3": {"NH": 64, "C": 8, "F": 8}, "NanoChat": {}, "Qwen2": {"NH": 64, "C": 1024},
             "Mistral": {"NH": 8, "C": 128, "maxT": 4097, "window": 4096}}[kind]
    defaults = CLASS_DEFAULTS[kind]
    dims, params = family_model("m.bin", **{
        **FAMILY[kind], "C": 64, "eps": 1e-6, "theta": 1e4, "NKV": defaults["num_key_value_heads"],
        "HS": defaults["head_dim"], "softcap": defaults.get("final_logit_softcapping", 0.0), "V": 250,
        **sizes})
    tool_ok("m.bin", "hf")
    config, optional = read_json("hf/config.json"), {*defaults, "rope_parameters"}
    return dims, params, {key: value for key, value in config.items() if key not in optional}


@pytest.mark.parametrize("kind", CLASS_DEFAULTS)
def test_defaults(kind):
    """A config.json may lack what is as its class has it."""
    dims, _, config = by_default(kind)
    for more in ({}, {"rope_parameters": None, "rope_scaling": None, "layer_types": None}):
        write_json("hf/config.json", {**config, **more})
        assert formats.read_checkpoint_header(imported("hf"))[0] == dims


@pytest.mark.parametrize("kind", CLASS_DEFAULTS)
def test_defaults_of_transformers(kind):
    """The table is what the classes have, and exports leave nothing to them."""
    theirs = pytest.importorskip("transformers")
    dims, _, config = by_default(kind)
    sizes = {key: config[key] for key in config.keys() - {"architectures", "torch_dtype", "model_type"}}
    has = getattr(theirs, kind + "Config")(**sizes)
    rope = {"rope_theta": has.rope_parameters["rope_theta"]} if hasattr(has, "rope_parameters") else {}
    for key, value in CLASS_DEFAULTS[kind].items():
        found = rope.get(key, getattr(has, key, 16 if key == "head_dim" else None))
        assert found == value, key
    exported = export_hf.model_config(dims, "F32", 0)
    silent = set(has.to_dict()) - set(theirs.PretrainedConfig().to_dict()) - set(exported)
    assert silent <= {"pretraining_tp", "sliding_window", "max_window_layers", "layer_types"}, silent


LLAMA_OTHERS = [
    ("Llama", {"rope_scaling": {"rope_type": "llama3"}}, "default, rope_scaling.rope_type is llama3"),
    ("Llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "default, rope_scaling.type is linear"),
    ("Llama 3", {"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "factor is 8.0, rope_scaling.factor"),
    *((kind, {"rope_parameters": {"rope_type": by}, "rope_scaling": None}, f"rope_type is {by}; default,")
      for kind in ("Llama", "Qwen2", "Qwen3", "Mistral") for by in ("yarn", "dynamic", "longrope")),
    ("Qwen2", {"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 4}}, "rope_type is yarn"),
    ("Llama", {"rope_parameters": {"type": "linear", "factor": 0.5}}, "scaled by rope_factor=0.5 (factor)"),
    ("Llama", {"rope_parameters": {"rope_type": "linear"}}, "lacks a number for rope_parameters.factor"),
    ("Llama 3", {"rope_scaling": None, "rope_parameters": {
        **ROPE["Llama 3"], "high_freq_factor": 1.0}}, "rope_high=1 (high_freq_factor)"),
    ("Llama", {"rope_parameters": {**ROPE["Llama 3"], "attention_factor": 1.0}}, "attention_factor is 1.0"),
    ("Llama", {"rope_parameters": {"rope_type": 3}}, "lacks a word for rope_parameters.rope_type"),
    ("Llama", {"rope_parameters": {"rope_type": "default", "factor": 4.0}}, "rope_parameters.factor is 4.0"),
    ("Qwen2", {"attention_bias": True}, "attention_bias is true; Qwen2 has false"),
    ("Qwen2", {"model_type": "llama"}, "k_proj.bias, which a Llama of 2 layers has not"),
    ("Llama", {"model_type": "qwen2"}, "lacks the tensor model.layers.0.self_attn.q_proj.bias"),
    ("Llama", {"rope_parameters": [1]}, "rope_parameters is [1], and whether"),
    ("Llama", {"rope_parameters": {"rope_theta": {}}}, "lacks a number for rope_parameters.rope_theta"),
    ("Llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "factor is 0.5; Llama has 1"),
    ("Llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0, and whether it changes"),
    ("Qwen3", {"auto_map": {"x": "y"}}, "auto_map is {x: y}, and"),
    ("Llama", {"no_rope": False}, "no_rope is false, and"),
    ("Llama", {"layer_types": 3}, "layer_types is 3"),
    ("Llama", {"pretraining_tp": 2}, "pretraining_tp is 2"),
    ("Llama", {"tie_word_embeddings": "no"}, "lacks true or false for tie_word"),
    ("Llama", {"attention_bias": True}, "attention_bias is true; Llama has false"),
    ("Llama", {"mlp_bias": True}, "mlp_bias is true"),
    ("Llama", {"hidden_act": "gelu"}, "hidden_act is gelu; Llama has silu"),
    ("NanoChat", {"hidden_act": "silu"}, "hidden_act is silu; NanoChat has relu2"),
    ("Llama", {"use_sliding_window": True}, "use_sliding_window is true; Llama has false"),
    ("Mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is [full_attention,"),
    ("Mistral", {"sliding_window": -1}, "a window of -1 tokens"),
    ("Qwen3 windows", {"layer_types": ["sliding_attention"]}, "layer_types is [sliding_attention]"),
    ("Qwen3 windows", {"layer_types": ["sliding_attention", "linear_attention"]}, "layer_types is [sliding_"),
    ("Qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is [full_attention, sl"),
    ("Llama", {"model_type": "gemma"}, "is gemma; gpt2, llama, mistral, qwen2, qwen3, nanochat are"),
    ("Llama", {"vocab_size": 1048577}, "V=1048577 T="),
    ("Llama", {"num_key_value_heads": 3}, "NH=4 NKV=3"), ("Llama", {"head_dim": 12}, "HS=12 F=72: NH must"),
    ("Llama", {"intermediate_size": 12}, "F=12: NH must"), ("Llama", {"rms_norm_eps": 0}, "eps above 0"),
    ("Llama", {"rope_theta": -1.0, "rope_parameters": None}, "theta and eps above 0"),
    ("Llama", {"num_attention_heads": 0}, "NH=0"),
    ("Llama", {"rope_theta": 10**400, "rope_parameters": None}, "is not a JSON object"),
    ("Qwen3 windows", {"num_hidden_layers": 0}, "layer_types is [sliding_attention, full_"),
    ("Llama", {"rms_norm_eps": "x"}, "lacks a number for rms_norm_eps"),
    ("Llama", {"hidden_size": None}, "lacks a whole number for hidden_size"),
    ("Llama", {"quantization_config": {"bits": 4}}, "the model is quantised"),
    ("Llama", {"head_dim": 32}, "q_proj.weight has the shape (64, 40), config.json means (128, 40)"),
    ("Qwen3", {"model_type": "llama"}, "k_norm.weight, which a Llama of 2 layers has not"),
    ("Llama", {"model_type": "qwen3"}, "lacks the tensor model.layers.0.self_attn.q_norm.weight"),
    ("Llama tied", {"tie_word_embeddings": False}, "lacks the tensor lm_head.weight"),
    ("Llama", {"tie_word_embeddings": True}, "differs from the embedding")]


@pytest.mark.parametrize("kind, change, said", LLAMA_OTHERS, ids=[said for _, _, said in LLAMA_OTHERS])
def test_family_refused(kind, change, said):
    family_model("m.bin", **FAMILY[kind])
    tool_ok("m.bin", "hf")
    write_json("hf/config.json", {**read_json("hf/config.json"), **change})
    not_imported("hf", said)


@pytest.mark.parametrize("shape, said", [
    ({"qk_norm": True, "norm_weights": False}, "no class of transformers computes this: swiglu, qk_norm 1"),
    ({"softcap": 30.0}, "softcap 30"), ({"mlp": "relu2"}, "computes this: relu2"),
    ({"embed_norm": True}, "embed_norm 1"), ({"qk_norm": True, "value_embed": True}, "value_embed 1"),
    ({"qk_norm": True, "qkv_bias": True}, "qkv_bias 1"),
    ({**FAMILY["NanoChat"], "rope_factor": 2.0}, "rope_factor 2"),
    ({"NH": 3, "NKV": 1}, "C=40 is not a multiple of NH=3"),
    ({"window": 4, "pattern": "SL"}, "computes this with windows (window=4,pattern=SL)"),
    ({**FAMILY["NanoChat"], "window": 4, "pattern": "S"}, "computes this with windows")])
def test_family_not_exported(shape, said):
    family_model("m.bin", **shape)
    refused("m.bin", "x", said=said)


@pytest.mark.parametrize("kind", FAMILY)
def test_family_in_transformers(kind):
    """Its loss of a text is the program's. What save_pretrained makes of it comes back."""
    theirs, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    dims, _ = family_model("m.bin", **FAMILY[kind])
    tool_ok("m.bin", "hf")
    model, wrong = theirs.AutoModelForCausalLM.from_pretrained("hf", output_loading_info=True)
    assert type(model).__name__ == kind.split()[0] + "ForCausalLM"
    assert not any(wrong.values()), wrong
    tokens = np.random.default_rng(5).integers(1, 256, 3 * dims.maxT + 1)
    rows = torch.from_numpy(windows(tokens, dims.maxT))
    logits = model(rows[:, :-1]).logits.flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, rows[:, 1:].flatten()).item()
    shard = trainer.write_shard("tokens.bin", tokens.tolist())
    got = run_ok({"-e": "m.bin", "-j": shard, "-t": dims.maxT, "-x": 0, "-v": 1}).val_losses()
    assert abs(got[0] - loss) <= 3e-6
    text = theirs.AutoTokenizer.from_pretrained("hf")("<|endoftext|>ab")
    assert text["input_ids"] == [0, *b"ab"]
    model.save_pretrained("theirs", max_shard_size="20KB")
    assert os.path.exists("theirs/model.safetensors.index.json")
    takes("theirs", "m.bin")
