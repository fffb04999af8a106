"""dev/eval: models to Hugging Face's files and back, held against the trainer's own loss, against files
spelled out here, and against transformers where this Python has it (with torch; CI has neither).

    python3 dev/test/test_hf.py ./train_gpt2cpu          # -k WORD: only tests whose name contains it

The forward pass here is written from transformers' names and shapes, in double, and knows nothing of ours: a
tensor that is not transposed, or changed for another, gives another loss than the trainer's.
"""
import glob
import hashlib
import json
import os
import resource
import runpy
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import traceback

import pytest

from checks import ROOT
from trainer import (LIMIT_S, Result, check, check_close, check_equal, check_ran, check_refused, log_lines,
                     model_path, read_bytes, read_model, run_ok, shorten, skip, snapshot, write_bytes)

try:
    import numpy as np
    sys.path.insert(0, os.path.join(ROOT, "dev/reference"))
    import formats
except ImportError:
    pytest.skip("no numpy", allow_module_level=True)

pytestmark = pytest.mark.cpu_only

EXPORT, IMPORT = (os.path.join(ROOT, f"dev/eval/{name}_hf.py") for name in ("export", "import"))
SHAPES = ["L2,NH4,C64,T32,V256", "L1,NH1,C24,T17,V300", "L3,NH2,C40,T48,V509"]     # V=256 needs no padding


def tool(script, *words, **more):
    """Runs it in a fork of this process, which has numpy already: a hundred starts of Python would take
    longer than all the rest."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            code = 70
            try:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                code = run_forked([script, *map(str, words)], **more)
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said = []
        for f in (out, err):
            f.seek(0)
            said.append(f.read().decode())
    return Result(code, *said, [os.path.basename(script), *map(str, words)])


def run_forked(argv, stubs=None, limit=None, interrupt=None):
    """stubs: a folder of modules that stand before installed ones; limit: the most bytes of a file;
    interrupt: the signal that comes when the first file has been written."""
    signal.alarm(LIMIT_S)
    signal.signal(signal.SIGINT, signal.default_int_handler)        # which a shell's background jobs ignore
    sys.argv, sys.stdout, sys.stderr = argv, open(1, "w", encoding="utf-8"), open(2, "w", encoding="utf-8")
    sys.dont_write_bytecode = True
    sys.path[:0] = ([os.path.abspath(stubs)] if stubs else []) + [os.path.dirname(argv[0])]
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if interrupt:
        os.fsync = lambda fd: os.kill(os.getpid(), interrupt)
    code = 0
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as e:                     # as Python itself ends with it
        code = e.code if isinstance(e.code, int) else 1 if e.code else 0
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def tool_ok(script, *words, **more):
    return check_ran(tool(script, *words, **more))


def refused(what, script, *words, said, **more):
    """Exit code 1, one sentence and perhaps a hint, nothing on the disk changed; where the folder `other` is
    imported, by the trainer too, in the same words or in `ours`."""
    ours = more.pop("ours", said)
    before, result = snapshot(), tool(script, *words, **more)
    lines = result.err.splitlines()
    right = result.code == 1 and 1 <= len(lines) <= 2 and lines[0].startswith("error: ") \
        and all(line.startswith("hint: ") for line in lines[1:])
    if not check(right, f"{what}: exit code {result.code}: {shorten(result.err)}"):
        return
    check(said in result.err, f"{what}: '{said}' is not in: {result.err.strip()}")
    check(snapshot() == before, f"{what}: the disk has changed")
    weights = os.path.join(words[0], "model.safetensors")
    if words[0] == "other" and os.path.isfile(weights) and ours:
        check_refused(what, {"-e": weights, "-t": 4}, ours)


def same_in_the_trainer(folder):
    """-e takes such a file as it is: an update at the rate 0 leaves the import's weights, to the bit."""
    tool_ok(IMPORT, folder, "imported.bin", "--dtype", "fp32", "--force")
    run_ok({"-e": folder + "/model.safetensors", "-t": 8, "-x": 1, "-l": 0, "-o": "taken", "-n": None})
    want, got = read_bytes("imported.bin"), read_bytes("taken/model_00000001.bin")
    check(got[:32] == want[:32] and got[1024:] == want[1024:], f"-e {folder}/model.safetensors")
    shutil.rmtree("taken")


# ---- models and files, by a few lines of our own ----

def random_model(path, text, version=3, seed=1):
    """Weights so wide that every one of them moves the loss."""
    dims, rng = formats.parse_model(text), np.random.default_rng(seed)
    params = {}
    for name in formats.NAMES:
        shape = formats.param_shape(dims, name)
        centre = 1 if name in ("ln1w", "ln2w", "lnfw") else 0
        params[name] = (centre + rng.standard_normal(shape) * 0.25).astype(np.float32)
    params["wte"][dims.V:] = 0
    formats.write_checkpoint(path, dims, params, version)
    return path


def read_tensors(path):
    """{name: (dtype, array)}; bf16 as uint16."""
    data = read_bytes(path)
    length = struct.unpack("<Q", data[:8])[0]
    check(length % 8 == 0, f"{path}: its bytes begin at a multiple of 8")
    table = json.loads(data[8:8 + length])
    check_equal(table.pop("__metadata__"), {"format": "pt"}, "what PyTorch's readers ask for")
    types, tensors = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}, {}
    for name, t in table.items():
        begin, end = t["data_offsets"]
        part = np.frombuffer(data[8 + length + begin:8 + length + end], types[t["dtype"]])
        tensors[name] = t["dtype"], part.reshape(t["shape"])
    return tensors


def write_tensors(path, tensors):
    table, at = {}, 0
    for name, (dtype, array) in tensors.items():
        table[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(table).encode()           # of any length: the format asks for no alignment
    body = b"".join(array.tobytes() for _, array in tensors.values())
    return write_bytes(path, struct.pack("<Q", len(text)) + text + body)


def read_json(path):
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def write_json(path, value):
    return write_bytes(path, json.dumps(value).encode())


def changed_folder(name, tensors=None, **config):
    """A copy of the folder `plain` with another config (None takes a key away) or other tensors."""
    shutil.rmtree(name, ignore_errors=True)
    shutil.copytree("plain", name)
    old = read_json("plain/config.json")
    write_json(name + "/config.json", {k: v for k, v in {**old, **config}.items() if v is not None})
    if tensors:
        write_tensors(name + "/model.safetensors", tensors)
    return name


def plain():
    """A model, its export, and the tensors in it."""
    if not os.path.isdir("plain"):
        random_model("plain.bin", SHAPES[1])
        tool_ok(EXPORT, "plain.bin", "plain")
    return read_tensors("plain/model.safetensors")


# ---- GPT-2 as transformers names it, in double ----

def layer_norm(x, w, b):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w + b


def logits_of(folder, x):
    config, stored = read_json(folder + "/config.json"), read_tensors(folder + "/model.safetensors")
    p = {name: (a.astype("<u4") << 16).view("<f4").astype(np.float64) if dtype == "BF16" else
         a.astype(np.float64) for name, (dtype, a) in stored.items()}
    (B, T), C, NH = x.shape, config["n_embd"], config["n_head"]

    def linear(x, name):
        return x @ p[name + ".weight"] + p[name + ".bias"]

    def norm(x, name):
        return layer_norm(x, p[name + ".weight"], p[name + ".bias"])

    h = p["transformer.wte.weight"][x] + p["transformer.wpe.weight"][:T]
    for layer in range(config["n_layer"]):
        at = f"transformer.h.{layer}."
        q, k, v = (part.reshape(B, T, NH, C // NH).transpose(0, 2, 1, 3) for part in
                   np.split(linear(norm(h, at + "ln_1"), at + "attn.c_attn"), 3, axis=-1))
        scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(C // NH)
        scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        attended = weights / weights.sum(-1, keepdims=True) @ v
        h = h + linear(attended.transpose(0, 2, 1, 3).reshape(B, T, C), at + "attn.c_proj")
        wide = linear(norm(h, at + "ln_2"), at + "mlp.c_fc")
        wide = 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
        h = h + linear(wide, at + "mlp.c_proj")
    return norm(h, "transformer.ln_f") @ p["transformer.wte.weight"].T


def rows(T):
    """Inputs and targets of val.bin's first 16 rows."""
    tokens = np.frombuffer(read_bytes("val.bin")[1024:], "<u2").astype(np.int64)
    starts = T * np.arange(16)[:, None]
    return tokens[starts + np.arange(T)], tokens[starts + np.arange(1, T + 1)]


def mean_loss(logits, y):
    top = logits.max(-1, keepdims=True)
    log_sum = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    return float((log_sum - np.take_along_axis(logits, y[..., None], -1)[..., 0]).mean())


# ---- tests ----

def test_round_trip():
    for i, text in enumerate(SHAPES):
        for version in (3, 5):
            source = random_model(f"m{i}_{version}.bin", text, version)
            tool_ok(EXPORT, source, f"hf{i}_{version}")
            tool_ok(IMPORT, f"hf{i}_{version}", f"back{i}_{version}.bin")
            check(read_bytes(f"back{i}_{version}.bin") == read_bytes(source), f"{text}, version {version}")
            same_in_the_trainer(f"hf{i}_{version}")
    tensors = read_tensors("hf1_3/model.safetensors")
    check_equal(tensors["transformer.wte.weight"][1].shape, (300, 24), "the padding is not exported")
    check_equal(tensors["transformer.h.0.mlp.c_proj.weight"][1].shape, (96, 24), "linear: (in, out)")
    check("lm_head.weight" not in tensors, "the head is the embedding")


def test_types():
    """fp32 becomes bf16 as formats.py rounds it, on both ways; bf16 becomes fp32 without loss."""
    dims, params = formats.read_checkpoint(random_model("wide.bin", SHAPES[2]))
    rounded = formats.round_params(params, "bfloat16")
    for version, name in ((5, "narrow.bin"), (3, "rounded.bin")):
        formats.write_checkpoint(name, dims, rounded, version)
    tool_ok(EXPORT, "wide.bin", "as_bf16", "--dtype", "bf16")
    tool_ok(IMPORT, "as_bf16", "a.bin")
    check(read_bytes("a.bin") == read_bytes("narrow.bin"), "export --dtype bf16")
    tool_ok(EXPORT, "wide.bin", "as_fp32")
    tool_ok(IMPORT, "as_fp32", "b.bin", "--dtype", "bf16")
    check(read_bytes("b.bin") == read_bytes("narrow.bin"), "import --dtype bf16")
    tool_ok(EXPORT, "narrow.bin", "as_wide", "--dtype", "fp32")
    tool_ok(IMPORT, "as_wide", "c.bin")
    check(read_bytes("c.bin") == read_bytes("rounded.bin"), "export --dtype fp32")
    for folder, said in (("as_bf16", "bfloat16"), ("as_wide", "float32")):
        check_equal(read_json(folder + "/config.json")["torch_dtype"], said, "the type in config.json")
    # a NaN, infinities, the largest number, ties, a denormal
    bits = [0x7FFFFFFF, 0xFFC00000, 0x7F800001, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x3F808000, 0x3F818000, 1]
    plain_tensors = plain()
    hard = np.zeros(24, "<u4")
    hard[:len(bits)] = bits
    plain_tensors["transformer.ln_f.bias"] = "F32", hard.view("<f4")
    tool_ok(IMPORT, changed_folder("hard", plain_tensors), "hard.bin", "--dtype", "bf16")
    got = np.frombuffer(read_bytes("hard.bin")[-48:], "<u2").tolist()[:len(bits)]
    nans = [half & 0x7F80 == 0x7F80 and half & 0x7F != 0 for half in got[:3]]
    check_equal(nans + got[3:], [True] * 3 + [0x7F80, 0xFF80, 0x7F80, 0x3F80, 0x3F82, 0], "rounding to bf16")


def test_loss():
    """The trainer's validation loss of a file, and that of its export, read as transformers does."""
    for i, text in enumerate(SHAPES):
        for version in (3, 5):
            source = random_model("m.bin", text, version, seed=7 + i)
            T = min(32, formats.parse_model(text).maxT)
            ours = run_ok({"-e": source, "-x": 0, "-b": 4, "-m": 4, "-t": T}).val_losses()
            tool_ok(EXPORT, source, "hf", "--force")
            x, y = rows(T)
            check_close(ours, [mean_loss(logits_of("hf", x), y)], 1e-5, f"{text}, version {version}: loss")


def test_run_folder():
    """The last model of a run, with its loss; what the trainer wrote comes back."""
    run_ok({"-o": "run", "-x": 6, "-v": 3, "-n": None})
    shutil.copy(model_path("run"), "run/model_00000005.bin")    # an older one, and what is no model
    write_bytes("run/model_99999999.bin.part", b"")
    tool_ok(EXPORT, "run", "deep/er/mine")
    tool_ok(IMPORT, "deep/er/mine", "deep/back.bin")
    mine, back = read_bytes("run/model_00000006.bin"), read_bytes("deep/back.bin")
    check(mine[:32] == back[:32] and mine[1024:] == back[1024:], "the trainer's file comes back")
    check_equal(run_ok({"-e": "deep/back.bin", "-x": 0}).val_losses(),
                run_ok({"-e": "run/model_00000006.bin", "-x": 0}).val_losses(), "its loss")
    with open("deep/er/mine/README.md", encoding="utf-8") as f:
        card = f.read()
    tel = log_lines("run", "tel")[-1].split("tel:")[1].strip()
    check("model_00000006.bin" in card and f"validation loss {tel}" in card, f"the card: {card}")
    check("`<|endoftext|>`" in card, f"the card says how texts begin: {card}")
    check("# mine\n" in card and os.getcwd() not in card, "the card names the folder, not its place")
    os.mkdir("empty_run")
    refused("a run without a model", EXPORT, "empty_run", "out", said="no model_*.bin in 'empty_run'")


def test_config():
    plain()
    want = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 300, "n_positions": 17,
            "n_embd": 24, "n_layer": 1, "n_head": 1, "n_inner": None, "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "attn_pdrop": 0.0, "bos_token_id": None}
    config = read_json("plain/config.json")
    check_equal({key: config[key] for key in want}, want, "config.json")
    check_equal(sorted(os.listdir("plain")), ["README.md", "config.json", "generation_config.json",
                                              "model.safetensors"], "no tokenizer for V=300")
    check(b"endoftext" not in read_bytes("plain/README.md"), "nor a word of it on the card")
    check("no tokenizer" in tool_ok(EXPORT, "plain.bin", "plain2").out, "which is said")


def test_tokenizer():
    """GPT-2's encoder.json has a published hash; json.dumps happens to write it as OpenAI did."""
    tool_ok(EXPORT, random_model("gpt2.bin", "L1,NH1,C8,T4,V50257"), "gpt2_hf")
    vocab, fast = read_json("gpt2_hf/vocab.json"), read_json("gpt2_hf/tokenizer.json")
    check_equal(hashlib.sha256(json.dumps(vocab).encode()).hexdigest(),
                "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783", "encoder.json")
    with open(os.path.join(ROOT, "dev/data/gpt2_bpe/vocab.bpe"), "rb") as f:
        merges = f.read()
    check(read_bytes("gpt2_hf/merges.txt") == merges, "merges.txt is vocab.bpe")
    check_equal(fast["model"]["vocab"] == vocab, True, "tokenizer.json's vocabulary is vocab.json")
    check_equal(fast["model"]["merges"] == merges.decode().split("\n")[1:-1], True, "and its merges")
    special = [(token["id"], token["content"]) for token in fast["added_tokens"]]
    check_equal(special, [(50256, "<|endoftext|>")], "the only special token")
    check_equal(read_json("gpt2_hf/tokenizer_config.json")["model_max_length"], 4, "longest text")
    for name in ("config", "generation_config"):
        check_equal(read_json(f"gpt2_hf/{name}.json")["eos_token_id"], 50256, f"{name}: end of text")

    tool_ok(EXPORT, random_model("bytes.bin", SHAPES[0]), "bytes")
    vocab = read_json("bytes/vocab.json")
    want = {0: "<|endoftext|>", 10: "\u010a", 32: "\u0120", 65: "A", 173: "\u0143", 174: "\u00ae"}
    check_equal({i: token for token, i in vocab.items() if i in want}, want, "bytes are tokens")
    check_equal(sorted(vocab.values()), list(range(256)), "each once")
    check_equal(read_json("bytes/tokenizer.json")["model"]["merges"], [], "and nothing merges")
    check_equal(read_json("bytes/config.json")["eos_token_id"], 0, "end of a text of bytes")


def test_foreign_files():
    """What other programs write: names without a prefix, masks, several files, fp16, a head that is wte."""
    tensors, wanted = plain(), read_bytes("plain.bin")
    old = {name.replace("transformer.", ""): value for name, value in tensors.items()}
    old["h.0.attn.bias"] = "U8", np.ones((1, 1, 17, 17), "u1")
    old["h.0.attn.masked_bias"] = "F32", np.array(-1e4, "<f4")
    tool_ok(IMPORT, changed_folder("old", old), "old.bin")
    check(read_bytes("old.bin") == wanted, "names and masks as in the first files")
    same_in_the_trainer("old")
    tied = {**tensors, "lm_head.weight": tensors["transformer.wte.weight"]}
    tool_ok(IMPORT, changed_folder("tied", tied, tie_word_embeddings=False), "tied.bin")
    check(read_bytes("tied.bin") == wanted, "a head equal to wte")
    same_in_the_trainer("tied")

    names = list(tensors)
    changed_folder("parts")
    os.unlink("parts/model.safetensors")
    parts = {"model-00001-of-00002.safetensors": names[5:], "model-00002-of-00002.safetensors": names[:5]}
    for file, part in parts.items():
        write_tensors("parts/" + file, {name: tensors[name] for name in part})
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    write_json("parts/model.safetensors.index.json", index)
    tool_ok(IMPORT, "parts", "parts.bin")
    check(read_bytes("parts.bin") == wanted, "several files")
    os.unlink("parts/model-00001-of-00002.safetensors")
    refused("a part is missing", IMPORT, "parts", "x.bin", said="no file 'parts/model-00001-of-00002.safe")
    for weight_map in ({"a": "../plain/model.safetensors"}, {"a": 3}, [], None):
        write_json("parts/model.safetensors.index.json", {"weight_map": weight_map})
        refused(f"weight_map {weight_map}", IMPORT, "parts", "x.bin", said="has no weight_map")

    halves = {name: ("F16", array.astype("<f2")) for name, (_, array) in tensors.items()}
    tool_ok(IMPORT, changed_folder("halves", halves, torch_dtype="float16"), "halves.bin")
    dims, params = formats.read_checkpoint("plain.bin")
    formats.write_checkpoint("want.bin", dims, formats.round_params(params, "float16"))
    check(read_bytes("halves.bin") == read_bytes("want.bin"), "fp16 becomes fp32")
    same_in_the_trainer("halves")
    # one tensor in fp32 is enough for the file to be fp32
    tool_ok(EXPORT, "plain.bin", "narrow", "--dtype", "bf16")
    mixed = {**read_tensors("narrow/model.safetensors"), names[0]: tensors[names[0]]}
    tool_ok(IMPORT, changed_folder("mixed", mixed), "mixed.bin")
    check_equal(struct.unpack("<2i", read_bytes("mixed.bin")[:8]), (20240326, 3), "mixed types: the version")
    same_in_the_trainer("mixed")
    config = read_json("plain/config.json")
    sizes = ("model_type", "vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
    write_json("plain2.json", {key: config[key] for key in sizes})
    changed_folder("short")
    os.replace("plain2.json", "short/config.json")
    tool_ok(IMPORT, "short", "short.bin")
    check(read_bytes("short.bin") == wanted, "a config.json that leaves the defaults out")
    same_in_the_trainer("short")


def test_other_models():
    """What looks like GPT-2 and computes something else."""
    for key, value in (("model_type", "gpt_neo"), ("activation_function", "gelu"), ("n_inner", 95),
                       ("activation_function", "relu"), ("layer_norm_epsilon", 1e-6),
                       ("scale_attn_weights", False), ("scale_attn_by_inverse_layer_idx", True),
                       ("reorder_and_upcast_attn", True), ("add_cross_attention", True),
                       ("quantization_config", {"bits": 4})):
        plain()
        ours = f"{key}.bits is 4" if key == "quantization_config" else \
            f"{key} is {json.dumps(value)}".replace('"', "")
        refused(f"{key} {value}", IMPORT, changed_folder("other", **{key: value}), "x.bin",
                said=f"{key} is {value!r}", ours=ours)
    refused("V 70000", IMPORT, changed_folder("other", vocab_size=70000), "x.bin", said="V from 2 to 65536",
            ours="V is at most 65536")
    refused("C 36", IMPORT, changed_folder("other", n_embd=36, n_head=2), "x.bin",
            said="C=36 is not a multiple of 8")
    refused("a text for L", IMPORT, changed_folder("other", n_layer="1"), "x.bin",
            said="lacks a whole number", ours="")           # the trainer does not tell texts from numbers
    for key, value, said in (
            ("n_layer", None, "lacks a whole number"),
            ("n_embd", 24.0, "lacks a whole number"),
            ("n_head", 5, "C=24 is not a multiple of NH=5"), ("n_head", 0, "at least 1"),
            ("n_positions", 16, "wpe.weight has the shape (17, 24), config.json means (16, 24)"),
            ("n_layer", 2, "lacks the tensor transformer.h.1.ln_1.weight"),
            ("tie_word_embeddings", False, "lacks the tensor lm_head.weight")):
        refused(f"{key} {value}", IMPORT, changed_folder("other", **{key: value}), "x.bin", said=said)


def test_other_tensors():
    tensors = plain()
    wte = tensors["transformer.wte.weight"][1]
    almost = wte.copy()
    almost[-1, -1] += 1e-3
    differs, head = "lm_head.weight differs", "lm_head.weight"
    square, fc = "transformer.h.0.attn.c_proj.weight", "transformer.h.0.mlp.c_fc.weight"
    for what, other, said, *ours in (
            ("a head of its own", {head: ("F32", almost)}, differs),
            ("a longer head", {head: ("F32", wte[:-1])}, differs, head + " has the shape"),
            ("a head of another type", {head: ("F16", wte.astype("<f2"))}, differs),
            ("a head of whole numbers", {head: ("I32", np.ones(wte.shape, "<i4"))}, differs,
             head + " is of type I32"),
            ("another layer", {"transformer.h.1.ln_1.weight": ("F32", np.ones(24, "<f4"))},
             "has transformer.h.1.ln_1.weight, which a GPT-2 of 1 layers has not"),
            ("a transposed matrix", {fc: ("F32", tensors[fc][1].T.copy())}, "shape (96, 24)"),
            ("a vector for a matrix", {square: ("F32", np.ones(24 * 24, "<f4"))}, "shape (576"),
            ("whole numbers", {square: ("I32", np.ones((24, 24), "<i4"))}, f"{square} is of type I32")):
        refused(what, IMPORT, changed_folder("other", {**tensors, **other}), "x.bin", said=said,
                ours=(ours or [said])[0])
    for name in (square, "transformer.ln_f.bias"):
        fewer = {n: value for n, value in tensors.items() if n != name}
        refused("without " + name, IMPORT, changed_folder("other", fewer), "x.bin",
                said=f"lacks the tensor {name}")


def test_damaged_files():
    plain()
    good, weights = read_bytes("plain/model.safetensors"), "other/model.safetensors"
    length = struct.unpack("<Q", good[:8])[0]
    table = json.loads(good[8:8 + length])

    def with_table(**change):
        text = json.dumps({**table, **change}).encode()
        return struct.pack("<Q", len(text)) + text + good[8 + length:]

    norm = table["transformer.ln_f.bias"]
    for what, data, said, *ours in (
            ("empty", b"", "truncated one: 0 bytes"), ("7 bytes", good[:7], "truncated one: 7 bytes"),
            ("half", good[:len(good) // 2], "is truncated or damaged"),
            ("a byte short", good[:-1], "is truncated"), ("a byte more", good + b"x", "is truncated"),
            ("a long table", struct.pack("<Q", 2**63) + good[8:], "truncated one"),
            ("no table", struct.pack("<Q", 8) + b"[1, 2,3]" + good[8 + length:], "cannot be read"),
            ("no JSON", good[:8] + b"x" + good[9:], "cannot be read"),
            ("no offsets", with_table(a={"dtype": "F32", "shape": [1]}), "cannot be read"),
            ("a wrong shape", with_table(a={**norm, "shape": [25]}), "is damaged"),
            ("a negative shape", with_table(a={**norm, "shape": [-4, -6]}), "is damaged", "cannot be read"),
            ("turned offsets", with_table(a={**norm, "data_offsets": norm["data_offsets"][::-1]}), "damaged",
             "cannot be read"),
            ("offsets before it", with_table(a={**norm, "data_offsets": [-96, 0]}), "is damaged",
             "cannot be read")):
        changed_folder("other")
        write_bytes(weights, data)
        refused(what, IMPORT, "other", "x.bin", said=said, ours=(ours or [said])[0])
    for data in (b"", b"{", b"[]"):
        changed_folder("other")
        write_bytes("other/config.json", data)
        refused(f"config {data}", IMPORT, "other", "x.bin", said="is not a JSON object")
    os.unlink("other/config.json")
    refused("no config", IMPORT, "other", "x.bin", said="no file 'other/config.json'",
            ours="'other/model.safetensors' has no config.json beside it")
    tool_ok(EXPORT, random_model("heads.bin", "L2,NH2,C128,T16,V256"), "heads")
    check_refused("its folder", {"-e": "heads"}, "hint: -e heads/model.safetensors")
    check_refused("none there", {"-e": "none.safetensors"}, "none.safetensors")
    check_refused("a pipe", {"-e": "/dev/null/x.safetensors"}, "x.safetensors")
    changed_folder("other")
    os.unlink(weights)
    refused("no weights", IMPORT, "other", "x.bin", said="no weights in 'other'")

    good = read_bytes("plain.bin")
    for what, data, said in (
            ("empty", b"", "is not a model checkpoint"), ("text", b"once upon a time", "is not a model"),
            ("a shard", read_bytes("val.bin"), "is not a model"),
            ("its magic", good[:5], "is truncated: 5 bytes"),
            ("half a header", good[:512], "is truncated: 512 bytes"), ("a byte short", good[:-1], "means"),
            ("a byte more", good + b"x", "means"), ("version 4", good[:4] + b"\4" + good[5:], "version 4"),
            ("no heads", good[:20] + bytes(4) + good[24:], "has a bad header"),
            ("5 heads", good[:20] + b"\5" + good[21:], "C=24 is not a multiple of NH=5"),
            ("no padding", good[:28] + bytes(4) + good[32:], "V=300, padded to 0")):
        write_bytes("bad.bin", data)
        refused(what, EXPORT, "bad.bin", "x", said=said)


def test_outputs():
    """What is there already stays, unless --force says otherwise and it is an export."""
    plain()
    random_model("second.bin", SHAPES[1], seed=2)
    refused("export over an export", EXPORT, "second.bin", "plain", said="'plain' exists and is not empty")
    refused("export over a file", EXPORT, "second.bin", "plain.bin", "--force", said="is not a folder")
    refused("import over a file", IMPORT, "plain", "second.bin", said="'second.bin' exists")
    refused("import over a folder", IMPORT, "plain", "plain", "--force", said="'plain' is a folder")
    os.makedirs("mine")
    write_bytes("mine/notes.txt", b"of mine")
    refused("export over notes", EXPORT, "plain.bin", "mine", "--force", said="('notes.txt' is in it)")
    changed_folder("mine/export")
    write_bytes("mine/export/notes.txt", b"of mine")
    refused("notes in an export", EXPORT, "plain.bin", "mine/export", "--force",
            said="('notes.txt' is in it)")
    refused("no model", EXPORT, "none.bin", "x", said="no file 'none.bin'")
    refused("a file as the import's folder", IMPORT, "plain/model.safetensors", "x.bin", said="is a file")
    refused("--dtype", EXPORT, "plain.bin", "x", "--dtype", "fp8", said="fp8")
    os.mkfifo("pipe")
    for script, words in ((EXPORT, ("pipe", "x")), (IMPORT, ("pipe", "x.bin"))):
        refused("a pipe", script, *words, said="'pipe' is")
    os.unlink("pipe")
    os.mkdir("empty")
    tool_ok(EXPORT, "plain.bin", "empty")               # an empty folder is nobody's
    os.symlink("empty", "link")
    tool_ok(EXPORT, "second.bin", "link", "--force")
    check(os.path.islink("link"), "a link to an export stays one")
    tool_ok(IMPORT, "link", "plain2.bin")
    tool_ok(IMPORT, "link", "plain2.bin", "--force")
    check(read_bytes("plain2.bin") == read_bytes("second.bin"), "--force replaces")
    check_equal([name for name in os.listdir(".") if name.endswith(".tmp")], [], "nothing is left beside")


def test_full_disk():
    """A write that fails half way leaves what was there, and nothing more."""
    plain()
    random_model("second.bin", SHAPES[1], seed=2)
    shutil.copy("second.bin", "kept.bin")
    for script, words in ((EXPORT, ("second.bin", "new")), (EXPORT, ("second.bin", "plain", "--force")),
                          (IMPORT, ("plain", "new.bin")), (IMPORT, ("plain", "kept.bin", "--force"))):
        refused(" ".join(words), script, *words, said="File too large", limit=20000)


def test_interrupted():
    """Ctrl-C and an end from outside: nothing is left, nothing is lost."""
    plain()
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        for script, words in ((EXPORT, ("plain.bin", "new")), (EXPORT, ("plain.bin", "plain", "--force")),
                              (IMPORT, ("plain", "new.bin")), (IMPORT, ("plain", "plain.bin", "--force"))):
            before, result = snapshot(), tool(script, *words, interrupt=number)
            check_equal((result.code, result.err), (code, ""), f"{number.name}, {' '.join(words)}")
            check(snapshot() == before, f"{number.name}, {' '.join(words)}: the disk has changed")


def test_names():
    """Models by name, and packages that are not there, with stand-ins for the packages."""
    plain()
    os.makedirs("none")
    for module in ("huggingface_hub", "torch"):
        write_bytes(f"none/{module}.py", b"raise ImportError\n")
    refused("no huggingface_hub", IMPORT, "gpt2", "x.bin", stubs="none", said="pip install huggingface_hub")
    refused("no name", IMPORT, "../gpt2", "x.bin", stubs="none", said="neither a folder nor a name")
    changed_folder("pickled")
    os.replace("pickled/model.safetensors", "pickled/pytorch_model.bin")
    refused("no torch", IMPORT, "pickled", "x.bin", stubs="none", said="pip install torch")
    os.makedirs("hub")
    text = """
        def snapshot_download(name, allow_patterns, local_files_only):
            if name == "cached" and local_files_only or name == "far" and not local_files_only:
                return "plain"
            raise ValueError("no route to the hub\\nand a long story")
        """
    write_bytes("hub/huggingface_hub.py", "\n".join(line[8:] for line in text.split("\n")).encode())
    for name in ("cached", "far"):
        tool_ok(IMPORT, name, name + ".bin", stubs="hub")
        check(read_bytes(name + ".bin") == read_bytes("plain.bin"), f"model {name}")
    refused("no network", IMPORT, "other/model", "x.bin", stubs="hub",
            said="downloaded: no route to the hub\n")


def test_command():
    """As a user starts it, in a process of its own; without numpy as well."""
    plain()
    os.makedirs("bare")
    write_bytes("bare/numpy.py", b"raise ImportError\n")
    for words, stubs, code, said in (([EXPORT, "--help"], "", 0, ""), ([IMPORT], "", 1, "--help"),
                                     ([IMPORT, "plain", "command.bin"], "", 0, ""),
                                     ([IMPORT, "plain", "x.bin"], "bare", 1, "pip install numpy")):
        env = {**os.environ, "PYTHONPATH": stubs, "PYTHONDONTWRITEBYTECODE": "1"}
        p = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=LIMIT_S, env=env,
                           check=False)
        check((p.returncode, said in p.stderr, len(p.stderr.splitlines())) == (code, True, 2 * code),
              f"{words} {stubs}: {p.returncode}, {p.stderr}")
    check(read_bytes("command.bin") == read_bytes("plain.bin"), "the import's file")


TRANSFORMERS_CHECKS = 32


def test_transformers():
    """The real ones: logits, both ways, their own files, their tokenizer."""
    try:
        import torch
        from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel
    except ImportError as e:
        skip(f"{e}", TRANSFORMERS_CHECKS)
        return
    for i, text in enumerate(SHAPES):
        tool_ok(EXPORT, random_model(f"t{i}.bin", text), f"t{i}")
        model = GPT2LMHeadModel.from_pretrained(f"t{i}").eval()
        x, _ = rows(min(32, formats.parse_model(text).maxT))
        theirs = model(torch.from_numpy(x.copy())).logits.detach().numpy().astype(np.float64)
        wide = logits_of(f"t{i}", x)
        error = np.abs(theirs - wide).max() / np.sqrt((wide**2).mean())
        check(error <= 2e-5, f"{text}: logits differ by {error:.3g} of their rms")
        model.save_pretrained(f"theirs{i}", max_shard_size="100KB")
        tool_ok(IMPORT, f"theirs{i}", f"theirs{i}.bin")
        check(read_bytes(f"theirs{i}.bin") == read_bytes(f"t{i}.bin"), f"{text}: save_pretrained comes back")
    check(os.path.exists("theirs2/model.safetensors.index.json"), "several files were tried")
    check_equal(model.generation_config.pad_token_id, None, "V=509 has no token for padding")
    for dtype in (torch.float32, torch.bfloat16):
        torch.save(model.to(dtype).state_dict(), "theirs2/pytorch_model.bin")
        for name in glob.glob("theirs2/*.safetensors*"):
            os.unlink(name)
        tool_ok(IMPORT, "theirs2", "pickled.bin", "--force")
        check_equal(read_model("pickled.bin")[0][1], 3 if dtype == torch.float32 else 5, "its version")
    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=8, vocab_size=50257)
    GPT2LMHeadModel(config).save_pretrained("fresh")
    tool_ok(IMPORT, "fresh", "fresh.bin")
    same_in_the_trainer("fresh")
    tool_ok(EXPORT, "fresh.bin", "gpt2_again")
    text = "It's 12345 <|endoftext|>  na\u00efve\n\n\t\u6f22\u5b57"
    ids = AutoTokenizer.from_pretrained("gpt2_again")(text)["input_ids"]
    check_equal(ids[:5] + ids[-1:], [1026, 338, 17031, 2231, 220, 245], "GPT-2's ids")
