"""dev/eval: models to Hugging Face's files, and the trainer on these files, held against names and shapes
spelled out here. dev/reference/compare.py holds exports against transformers on a machine that has it;
here test_transformers does what that leaves (CI has neither torch nor transformers). The family of Llama is
held against a forward in NumPy, and, where they are, against transformers' classes.
"""
import hashlib
import json
import math
import os
import shutil
import signal
import struct
import sys

import pytest

from checks import ROOT, read, run_program, write
from forked import Forked
from trainer import Result, check_ran, log_lines, model_path, run_ok, snapshot
import trainer
from twins import FAMILY, family_logits, family_model, formats, greedy, np, softmax, wide_model, windows

sys.path.insert(0, os.path.join(ROOT, "dev/eval"))
import export_hf                                    # noqa: E402

pytestmark = pytest.mark.cpu_only
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


def tool(*words, limit=None, meanwhile=None):
    """meanwhile(): happens when the weights are to be written."""
    def main():
        if meanwhile:
            export_hf.write_safetensors = lambda *_: meanwhile()
        return export_hf.main()
    return Result(*Forked(main, ["export", *words], limit=limit).end(), ["export", *map(str, words)])


def tool_ok(*words):
    return check_ran(tool(*words))


def refused(*words, said, **more):
    """Exit code 1, one sentence and perhaps a hint, nothing on the disk changed."""
    before, result = snapshot(), tool(*words, **more)
    lines = result.err.splitlines()
    assert result.code == 1 and len(lines) in (1, 2) and lines[0].startswith("error: "), result.err
    assert lines[1:] == [line for line in lines[1:] if line.startswith("hint: ")], result.err
    assert said in result.err
    assert snapshot() == before


def takes(folder, want):
    """-e takes the folder as it is: an update at the rate 0 leaves the weights of `want`, to the bit."""
    run_ok({"-e": folder, "-t": 8, "-x": 1, "-l": 0, "-o": "taken", "-n": None})
    got, want = read("taken/model_00000001.bin"), read(want)
    assert got[:32] == want[:32] and got[1024:] == want[1024:]
    shutil.rmtree("taken")


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
    """A file, its export and what the trainer makes of it."""
    for version in (5, 3):
        dims, params = formats.read_checkpoint(wide_model("m.bin", text, version))
        formats.write_checkpoint("want.bin", dims, params)
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
    for source, dtype, said in (("wide.bin", "bf16", "bfloat16"), ("narrow.bin", "fp32", "float32")):
        tool_ok(source, dtype, "--dtype", dtype)
        takes(dtype, "rounded.bin")
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
    (config(quantization_config={"bits": 4}), "config.bits is 4"),
    # sizes
    (config(vocab_size=2000000), "V=2000000: at most 1048576 tokens"),
    (config(n_layer=None), "lacks a whole number"),
    (config(n_embd=36, n_head=2), "C=36 is not a multiple of 8"), (config(n_embd=24.0), "lacks a whole"),
    (config(n_head=5), "C=24 is not a multiple of NH=5"), (config(n_head=0), "at least 1"),
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
    trainer.refused({"-e": "other/model.safetensors", "-t": 4}, said)


def test_damaged_folders():
    changed_folder("other")
    path = "other/model.safetensors"
    for raw in (b"", b"{", b"[]"):
        write("other/config.json", raw)
        trainer.refused({"-e": path}, "is not a JSON object")
    os.unlink("other/config.json")
    for path, said in ((path, f"'{path}' has no config.json beside it"), ("none.safetensors", "'none.safe"),
                       ("/dev/null/x.safetensors", "x.safetensors")):
        trainer.refused({"-e": path}, said)


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
    ("--help", "", 0, ""), ("", "", 1, "--help"), ("plain.bin x", "numpy", 1, "pip install numpy"),
    ("plain.bin x", "xxhash", 1, "pip install xxhash")])
def test_command(words, stubs, code, said):
    """As a user starts it, in a process of its own; without a package as well."""
    if stubs:
        write(f"{stubs}/{stubs}.py", f"raise ImportError(name={stubs!r})\n".encode())
    got, _, err = run_program([sys.executable, export_hf.__file__, *words.split()], PYTHONPATH=stubs,
                              PYTHONDONTWRITEBYTECODE="1")
    assert (got, said in err, len(err.splitlines())) == (code, True, 2 * code), err


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
    run_ok({"-e": "fresh/model.safetensors", "-t": 8, "-x": 1})


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
    ({"x": "../x.safetensors"}, "'../x.safetensors' is not the name"), ({"x": "x.bin"}, "'x.bin' is not the"),
    ({"x": "x.safetensors"}, "'other/x.safetensors'"),
    ({"x": "all.safetensors"}, "attn.c_proj.weight twice")])
def test_damaged_index(weight_map, said):
    path = split(changed_folder("other"), **weight_map) + "/model.safetensors.index.json"
    shutil.copy("plain/model.safetensors", "other/all.safetensors")
    trainer.refused({"-e": path}, said)
    for raw, complaint in ((b"[]", "is not a JSON object"), (b'{"weight_map": {}}', "has no weight_map"),
                           (b'{"weight_map": {"x": "model-00001-of-00003.safetensors"}}', "lacks the")):
        write(path, raw)
        trainer.refused({"-e": "other"}, complaint)


# ---- the family of Llama ----

def computes(folder, dims, params):
    """The program's loss of a shard is that of these weights."""
    tokens = np.random.default_rng(3).integers(1, dims.V, 6 * dims.maxT + 1).tolist()
    rows = windows(tokens, dims.maxT)
    right = softmax(family_logits(dims, params, rows[:, :-1]))
    want = -np.log(np.take_along_axis(right, rows[:, 1:, None], -1)).mean()
    shard = trainer.write_shard("tokens.bin", tokens)
    got = run_ok({"-e": folder, "-j": shard, "-t": dims.maxT, "-x": 0, "-v": 1})
    assert abs(got.val_losses()[0] - want) <= 3e-6, f"{got.val_losses()[0]}, expected {want}"


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


@pytest.mark.parametrize("kind", FAMILY)
def test_family(kind):
    """Each class's names and configuration, and what the program computes with them."""
    dims, params = family_model("m.bin", **FAMILY[kind])
    out = tool_ok("m.bin", "hf").out
    assert f"{sum(x.size for x in params.values()):,} parameters" in out
    name, config = kind.split()[0], read_json("hf/config.json")
    want = {"architectures": [name + "ForCausalLM"], "model_type": name.lower(), "vocab_size": 256,
            "hidden_size": 40, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 21, "rms_norm_eps": dims.eps,
            "rope_theta": dims.theta, "rope_parameters": {"rope_type": "default", "rope_theta": dims.theta},
            "tie_word_embeddings": dims.tied, "hidden_act": "relu2" if name == "NanoChat" else "silu",
            "bos_token_id": 0, "eos_token_id": 0}
    assert {key: config[key] for key in want} == want
    assert config.get("final_logit_softcapping") == (dims.softcap or None)
    tensors = read_tensors("hf/model.safetensors")
    layer = ["self_attn." + x for x in ("q_proj", "k_proj", "v_proj", "o_proj")]
    layer += ["mlp.fc1", "mlp.fc2"] if name == "NanoChat" else \
        ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
    layer += ["self_attn.q_norm", "self_attn.k_norm"] if name == "Qwen3" else []
    names = ["model.embed_tokens"] + ["model.norm"] * (name != "NanoChat") + ["lm_head"] * (not dims.tied) + \
        [f"model.layers.{l}.{x}" for l in range(2) for x in layer]
    assert set(tensors) == {x + ".weight" for x in names}
    assert tensors["model.layers.1.self_attn.k_proj.weight"][1].shape == (32, 40)
    assert name + " with" in read("hf/README.md").decode()
    computes("hf", dims, params)
    text = bytes(greedy(dims, params, [0, *b"ab"], 8)[3:]).split(b"\0")[0].decode("latin-1")
    said = run_ok({"-e": "hf", "-x": 0, "--prompt": "ab", "--temperature": 0, "--sample-tokens": 8, "-s": 1,
                   "-t": dims.maxT}).out
    assert text + "\n" in said


@pytest.mark.parametrize("kind", FAMILY)
def test_family_round_trip(kind):
    """A file, its export and what the trainer makes of it, to the bit."""
    for version, name in ((203, "m3.bin"), (205, "m5.bin")):
        dims, params = family_model(name, version, V=250, **FAMILY[kind])
        formats.write_checkpoint("want.bin", dims, params)
        tool_ok(name, f"hf{version}")
        run_ok({"-e": f"hf{version}", "-t": 8, "-x": 1, "-l": 0, "-o": "taken", "-n": None})
        got, want = read(model_path("taken")), read("want.bin")
        assert got[:76] == want[:76] and got[1024:] == want[1024:]
        shutil.rmtree("taken")


def test_family_types():
    """bf16, fp16, several files, wrapped names, a head that is the embedding, keys that are not there."""
    dims, params = family_model("m.bin", 205, qk_norm=True, tied=True, V=250)
    tool_ok("m.bin", "hf")
    tensors = read_tensors("hf/model.safetensors")
    assert {dtype for dtype, _ in tensors.values()} == {"BF16"}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = "F32", np.ones(8, "<f4")
    write_tensors("hf/model.safetensors", {"_orig_mod." + name: t for name, t in tensors.items()})
    split("hf")
    computes("hf", dims, params)
    dims, params = family_model("m.bin", HS=16, NH=3, NKV=3, C=48, eps=1e-6)
    params = formats.round_params(params, "float16")
    tool_ok("m.bin", "halves")
    write_tensors("halves/model.safetensors", {name: ("F16", array.astype("<f2")) for name, (_, array) in
                                               read_tensors("halves/model.safetensors").items()})
    optional = ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_parameters",
                "tie_word_embeddings", "hidden_act", "attention_bias", "mlp_bias")
    config = read_json("halves/config.json")
    write_json("halves/config.json", {key: value for key, value in config.items() if key not in optional})
    computes("halves", dims, params)
    nothing = dict.fromkeys(("rope_parameters", "rope_scaling", "head_dim"))
    write_json("halves/config.json", {**config, **nothing})
    computes("halves", dims, params)


# what the classes of transformers take where config.json lacks the key
DEFAULTS = {"num_key_value_heads": 4, "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
            "tie_word_embeddings": False, "attention_bias": False, "hidden_act": "silu"}
CLASS_DEFAULTS = {
    "Llama": {**DEFAULTS, "mlp_bias": False},
    "Qwen3": {**DEFAULTS, "num_key_value_heads": 32, "head_dim": 128, "use_sliding_window": False},
    "NanoChat": {**DEFAULTS, "hidden_act": "relu2", "final_logit_softcapping": 15.0}}


def by_default(kind):
    """(dims, params, config without any key that has a default) of m.bin and hf."""
    sizes = {"Llama": {}, "Qwen3": {"NH": 64, "C": 8, "F": 8}, "NanoChat": {}}[kind]
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
        run_ok({"-e": "hf", "-t": 8, "-x": 1, "-l": 0, "-o": "taken", "-n": None})
        assert formats.read_checkpoint_header(model_path("taken"))[0] == dims
        shutil.rmtree("taken")


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
    ("Llama", {"rope_scaling": {"rope_type": "llama3"}}, "rope_type is llama3; Llama has default"),
    ("Llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type is linear"),
    ("Qwen3", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type is yarn"),
    ("Llama", {"attention_bias": True}, "attention_bias is true; Llama has false"),
    ("Llama", {"mlp_bias": True}, "mlp_bias is true"), ("Llama", {"hidden_act": "gelu"}, "Llama has silu"),
    ("NanoChat", {"hidden_act": "silu"}, "hidden_act is silu; NanoChat has relu2"),
    ("Qwen3", {"use_sliding_window": True}, "use_sliding_window is true; Qwen3 has false"),
    ("Qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types.1 is sliding_attention"),
    ("Llama", {"model_type": "mistral"}, "model_type is mistral; gpt2, llama, qwen3 and nanochat are built"),
    ("Llama", {"vocab_size": 1048577}, "V=1048577: at most 1048576"),
    ("Llama", {"num_key_value_heads": 3}, "NKV=3"),
    ("Llama", {"rms_norm_eps": "x"}, "lacks a number for rms_norm_eps"),
    ("Llama", {"hidden_size": None}, "lacks a whole number for hidden_size"),
    ("Llama", {"quantization_config": {"bits": 4}}, "quantization_config.bits is 4"),
    ("Llama", {"head_dim": 32}, "q_proj.weight has the shape (64, 40), config.json means (128, 40)"),
    ("Qwen3", {"model_type": "llama"}, "k_norm.weight, which a Llama of 2 layers has not"),
    ("Llama", {"model_type": "qwen3"}, "lacks the tensor model.layers.0.self_attn.q_norm.weight"),
    ("Llama tied", {"tie_word_embeddings": False}, "lacks the tensor lm_head.weight"),
    ("Llama", {"tie_word_embeddings": True}, "differs from the embedding, which is the head of this Llama")]


@pytest.mark.parametrize("kind, change, said", LLAMA_OTHERS, ids=[said for _, _, said in LLAMA_OTHERS])
def test_family_refused(kind, change, said):
    family_model("m.bin", **FAMILY[kind])
    tool_ok("m.bin", "hf")
    write_json("hf/config.json", {**read_json("hf/config.json"), **change})
    trainer.refused({"-e": "hf", "-t": 8}, said)


@pytest.mark.parametrize("shape, said", [
    ({"qk_norm": True, "norm_weights": False}, "no class of transformers computes this: swiglu, qk_norm 1"),
    ({"softcap": 30.0}, "softcap 30"), ({"mlp": "relu2"}, "computes this: relu2"),
    ({"embed_norm": True}, "embed_norm 1"),
    ({"NH": 3, "NKV": 1}, "C=40 is not a multiple of NH=3")])
def test_family_not_exported(shape, said):
    family_model("m.bin", **shape)
    refused("m.bin", "x", said=said)


@pytest.mark.parametrize("kind", FAMILY)
def test_family_in_transformers(kind):
    """Logits, greedy text, and what save_pretrained makes of it."""
    theirs, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    dims, params = family_model("m.bin", **FAMILY[kind])
    tool_ok("m.bin", "hf")
    model, wrong = theirs.AutoModelForCausalLM.from_pretrained("hf", output_loading_info=True)
    assert type(model).__name__ == kind.split()[0] + "ForCausalLM"
    assert not any(wrong.values()), wrong
    tokens = np.random.default_rng(5).integers(0, 256, (3, dims.maxT))
    want = family_logits(dims, params, tokens)
    got = model(torch.from_numpy(tokens)).logits.detach().numpy()
    worst = np.abs(got - want).max()
    print(f"{kind}: logits off by {worst:.1e}, rms {want.std():.2f}")
    assert worst <= 2e-5 * max(1.0, want.std())
    text = theirs.AutoTokenizer.from_pretrained("hf")("<|endoftext|>ab", return_tensors="pt")
    said = model.generate(**text, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert said[0].tolist() == greedy(dims, params, [0, *b"ab"], 8)
    model.save_pretrained("theirs", max_shard_size="20KB")
    assert os.path.exists("theirs/model.safetensors.index.json")
    computes("theirs", dims, params)
