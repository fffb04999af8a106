"""Tokenizers beside GPT-2's: those that `get.py tokenizer` makes, and other people's tokenizer.json.

The fixture own.txt is Japanese and code. own.json is a tokenizer made of it, and own.ids are its tokens by
the package tokenizers, without which most tests do:

    python3 dev/test/test_own_tokenizer.py          # writes fixtures/own.{json,ids} anew; takes the package
"""
import json
import os
import random
import re
import shutil
import subprocess
import sys
import types
from array import array

import pytest

from checks import ROOT, has_module, read, run_program, write
from trainer import ALONE, read_shard, refused, run, run_ok
from twins import constant_model

FIXTURE = os.path.join(ROOT, "dev/test/fixtures/own")
GET, TOOL = os.path.join(ROOT, "dev/data/get.py"), os.path.join(ROOT, "build/tokenize")
V = 700
END = "<|endoftext|>"
USUAL = {"-e": f"L2,NH2,C32,T32,V{V}", "-i": "own/own_train_*.bin", "-j": "own/own_val_*.bin", "-b": 2,
         "-x": 2, "-m": 2, "-v": 2}
pytestmark = [pytest.mark.cpu_only,
              pytest.mark.skipif(not os.access(TOOL, os.X_OK), reason="no build/tokenize: make tokenize")]
sys.path[1:1] = [os.path.join(ROOT, "dev/data"), os.path.join(ROOT, "dev/eval")]
import any_tokenizer                                # noqa: E402
import tokenizer_files                              # noqa: E402


def package():
    return pytest.importorskip("tokenizers")


def get(*words):
    """get.py's stdout; or, if it fails, its stderr."""
    code, out, err = run_program([sys.executable, GET, *map(str, words)])
    assert code == 0, err
    return out


def get_refused(*words, said):
    code, _, err = run_program([sys.executable, GET, *map(str, words)])
    assert code == 1 and err.startswith("error: ") and said in err, err


def folder_of(name, text):
    """A folder as get.py makes it, of a tokenizer.json's bytes."""
    write(name + "/tokenizer.json", text)
    write(name + "/tokenizer.bin", tokenizer_files.tokenizer_bin(text, END))
    return name


def own():
    """The fixture's folder; its shards are in own/, where each line of the text is a document."""
    if not os.path.exists("own"):
        folder_of("own-tok", read(FIXTURE + ".json"))
        rows = [line for line in read(FIXTURE + ".txt").decode().split("\n") if line]
        write("rows.jsonl", "".join(json.dumps({"text": row}) + "\n" for row in rows * 4))
        get("files", "--from", "rows.jsonl", "--out", "own", "--tokenizer", "own-tok")
    return "own-tok"


def id_of(folder):
    return tokenizer_files.read_head(folder + "/tokenizer.bin").id


def tokens(text, folder):
    """By build/tokenize, which must give the text back."""
    command = [TOOL, "--separators", "0", "--vocab", folder + "/tokenizer.bin"]
    # through a pipe, where a text that begins as JSON does is taken as it is
    subprocess.run([*command, "-", "-o", "out", "--val-tokens", "0"], input=text, check=True,
                   capture_output=True)
    back = subprocess.run([*command, "--decode", "out_train.bin"], check=True, capture_output=True)
    assert back.stdout == text, "decoded"
    assert array("I", read("out_train.bin")[12:16])[0] == id_of(folder)
    return list(read_shard("out_train.bin"))


# ---- the C++ encoder ----

def test_tool():
    """Tokens of Japanese and code are those of the package."""
    assert tokens(read(FIXTURE + ".txt"), own()) == list(array("H", read(FIXTURE + ".ids")))
    shard = read("own/own_train_000001.bin")
    assert array("I", shard[12:16])[0] == id_of("own-tok") > 2
    for name in any_tokenizer.NAMES:
        assert read("own/" + name) == read("own-tok/" + name)
    code, text, _ = run_program([TOOL, "--decode", "own/own_val_000000.bin"])
    documents = text.split(END + "\n")[1:]
    rows = read(FIXTURE + ".txt").decode().split("\n")
    assert code == 0 and documents and all(document.rstrip("\n") in rows for document in documents)


def unsealed(data):
    """As older programs wrote it, without a checksum."""
    return data[:1016] + bytes(8) + data[1024:]


def changing(data, at, value):
    return data[:at] + bytes([value]) + data[at + 1:]


@pytest.mark.parametrize("change, said", [
    (lambda d: d[:-1], "tokens end after"), (lambda d: changing(d, 20, 3), "no tokenizer file"),
    (lambda d: changing(d, 8, 0), "has 512 tokens"), (lambda d: changing(d, 20, 2), "tokens end after"),
    (lambda d: changing(d, 1024 + 2 * 255, 1 + d[1024 + 2 * 255]), "")],
    ids=["short", "kind", "count", "not all", "length"])
def test_damaged(change, said):
    own()
    write("bad.bin", change(unsealed(read("own-tok/tokenizer.bin"))))
    write("in.txt", "a b")
    code, _, err = run_program([TOOL, "in.txt", "-o", "bad", "--vocab", "bad.bin"])
    assert code == 1 and err.startswith("error: 'bad.bin'") and said in err


def japanese(rng, size):
    """Sentences of a small grammar."""
    subjects = "私 彼女 先生 子どもたち 東京の会社 あの古い機械 新しいモデル 隣の猫".split()
    objects = "本 手紙 日本語の文章 データ 朝ごはん 二千二十六年の計画 トークン カタカナの名前".split()
    verbs = "を読みました を書いています を忘れないでください を食べたいです を学習させる を分けられなかった".split()
    text = []
    while sum(map(len, text)) < size:
        text.append(rng.choice(subjects) + rng.choice("はがも") + rng.choice(objects) + rng.choice(verbs)
                    + rng.choice(["。", "。", "！", "か？\n", "、しかし"]))
    return "".join(text)


def code(rng, size):
    """Lines of this project, in any order."""
    lines = read(os.path.join(ROOT, "llmc/run/flags.h")).decode().split("\n")
    lines += read(os.path.join(ROOT, "dev/data/get.py")).decode().split("\n")
    rng.shuffle(lines)
    return "\n".join(lines)[:size]


def letters(rng, size):
    """Of three letters, so that most tokens are formed by more than one pair: only one of them merges."""
    return "".join(rng.choice("aaabbc") + " " * (rng.random() < 0.1) for _ in range(size))[:size]


@pytest.mark.parametrize("language", [japanese, code, letters])
def test_made(language):
    """The package and the C++ encoder agree, on other texts, too; twice get.py makes the same."""
    package()
    rng, name = random.Random(3), language.__name__
    write(f"{name}/a.txt", language(rng, 40000))
    out = get("tokenizer", "--from", name, "--vocab", 900, "--out", name + "-tok")
    assert "900 tokens" in out and f"tokenizer {id_of(name + '-tok')}" in out
    get("tokenizer", "--from", name, "--vocab", 900, "--out", "again")
    assert all(read(f"again/{file}") == read(f"{name}-tok/{file}") for file in os.listdir("again"))
    shutil.rmtree("again")
    theirs = any_tokenizer.AnyTokenizer(name + "-tok/tokenizer.json", END)
    for text in (language(rng, 20000), japanese(rng, 9000), code(rng, 9000), letters(rng, 9000),
                 "".join(rng.choice("aab \n'sé日😀") for _ in range(9000)), END + " a" + END):
        assert tokens(text.encode(), name + "-tok") == theirs.encode([text])[0]
    bytes_a_token = len(read(f"{name}/a.txt")) / len(tokens(read(f"{name}/a.txt"), name + "-tok"))
    assert bytes_a_token > 2.5, bytes_a_token
    get_refused("tokenizer", "--from", name, "--out", name + "-tok", said="holds tokenizer.json")


def test_small_text():
    package()
    write("small/a.txt", "abab abab")
    assert "260 tokens" in get("tokenizer", "--from", "small", "--out", "small-tok")


def test_shards_by_both():
    """By build/tokenize and by the package, the same shards."""
    package()
    own()
    get("files", "--from", "rows.jsonl", "--out", "theirs", "--tokenizer", "own-tok/tokenizer.json")
    for split in "train_000001", "val_000000":
        assert read(f"theirs/theirs_{split}.bin") == read(f"own/own_{split}.bin")
    assert read("theirs/tokenizer.bin") == read("own/tokenizer.bin")


@pytest.mark.parametrize("words, said", [
    (["--vocab", 257], "--vocab 257"), (["--vocab", 65537], "65537"), (["--bytes"], "--bytes"),
    (["--tokenizer", "own-tok"], "--tokenizer"), (["--from", "none"], "none")])
def test_refused_by_get(words, said):
    own()
    get_refused("tokenizer", "--from", "rows.jsonl", "--out", "new", *words, said=said)
    assert not os.path.exists("new")


@pytest.mark.parametrize("text", [b'{"model": ', b"[]"])
def test_damaged_json(text):
    own()
    folder_of("damaged-tok", read(FIXTURE + ".json"))
    write("damaged-tok/tokenizer.json", text)
    get_refused("files", "--from", "rows.jsonl", "--out", "new", "--tokenizer", "damaged-tok",
                said="no tokenizer.json")


def test_vocab_of_others():
    own()
    get_refused("files", "--from", "rows.jsonl", "--out", "new", "--vocab", 300, said="--vocab")


# ---- runs ----

def spoken(model, folder, **flags):
    """A model that always says one token, with a tokenizer beside it: what sample and chat print."""
    write(os.path.dirname(model) + "/tokenizer.bin", read(folder + "/tokenizer.bin"))
    return run_ok({**ALONE, "sample": model, "-g": 3, "--verbose": -1, **flags}).out


def latin(text):
    """As a program's output is read here."""
    return text.encode().decode("latin-1")


def token_of(folder, text):
    return tokens(text.encode(), folder)


def test_texts():
    """Samples and chat take the tokenizer beside the model, which may have more rows."""
    own()
    said, = token_of("own-tok", "です")
    for size in (V, V + 61):
        os.makedirs(f"says{size}", exist_ok=True)
        model = constant_model(f"says{size}/model.bin", {said: 0}, V=size)
        assert spoken(model, "own-tok", **{"--prompt": "日本"}) == latin("ですですです\n")
        chat = run({**ALONE, "chat": model, "-g": 2, "--verbose": -1}, input="日本\n".encode())
        assert (chat.code, chat.out) == (0, latin("ですです\n"))
    padding = constant_model("says761/padding.bin", {V + 60: 0}, V=V + 61)
    assert spoken(padding, "own-tok") == "\n"


def test_listed_ends():
    """Samples and chat end at each end token of the generation_config.json beside the model."""
    own()
    said, = token_of("own-tok", "です")
    os.makedirs("ends", exist_ok=True)
    model = constant_model("ends/model.bin", {said: 0}, V=V)
    for listed, wanted in ((f"[1, {said}]", ""), (said, ""), ("[1, true, -3, null, {}]", "ですです"),
                           ((1 << 32) + said, "ですです"), (f"-{said}", "ですです"), (f"{said}, [", "ですです")):
        write("ends/generation_config.json", f'{{"do_sample": true, "eos_token_id": {listed}}}')
        write("ends/tokenizer.bin", read("own-tok/tokenizer.bin"))
        for form in ("sample", "chat"):
            got = run({**ALONE, form: model, "-g": 2, "--verbose": -1}, input="日本\n".encode())
            assert (got.code, got.out) == (0, latin(wanted + "\n")), f"{form}, {listed}"
            assert ("ends/generation_config.json is not" in got.err) == (str(listed)[-1] == "["), got.err


def test_run():
    """A run remembers its tokenizer, and hands it on."""
    own()
    first = run_ok({"-o": "run", "-s": 2, "-g": 5})
    assert "token" not in first.err and not re.search(r"^(\d+ ){5}$", first.samples()[0])
    for name in any_tokenizer.NAMES:
        assert read("run/" + name) == read("own/" + name)
    run_ok({**ALONE, "eval": "run"})
    run_ok({"-o": "run", "-y": 1, "-e": None, "-x": 4})
    run_ok({"-o": "tuned", "-e": model_path_of("run", 4)})
    assert read("tuned/tokenizer.bin") == read("own/tokenizer.bin")
    shutil.rmtree("tuned")


def model_path_of(folder, step):
    return f"{folder}/model_{step:08d}.bin"


def shards_of(name, number):
    """A copy of the own shards that names another tokenizer."""
    data = read("own/own_train_000001.bin")
    return write(name, data[:12] + array("I", [number]).tobytes() + data[16:])


def test_by_a_model():
    """get.py answers --model RUN has the tokenizer that RUN's shards have, and rows of its length."""
    own()
    write("chats.jsonl", json.dumps({"prompt": "a b", "completion": "c"}) + "\n")
    ended = json.loads(read(FIXTURE + ".json"))
    ended["added_tokens"].append({**ended["added_tokens"][0], "id": V, "content": "</s>"})
    ended = json.dumps(ended).encode()
    write("ended/tokenizer.json", ended)
    write("ended/tokenizer.bin", tokenizer_files.tokenizer_bin(ended, "</s>"))
    cases = [("own_run", V, "own-tok", ["--tokenizer", "own-tok"]), ("bytes_run", 256, "", ["--bytes"]),
             ("padded_run", 50304, "", [])]
    if has_module("tokenizers"):            # what begins a document is the model's, too
        cases.append(("ended_run", V + 1, "ended", ["--tokenizer", "ended", "--document-token", "</s>"]))
    for run_of, vocabulary, beside, same in cases:
        os.makedirs(run_of)
        if beside:
            shutil.copytree(beside, run_of, dirs_exist_ok=True)
        path = constant_model(f"{run_of}/model_00000007.bin", {}, V=vocabulary, length=48)
        made = []
        named = path if vocabulary == 256 else run_of
        for named, words in ((named, ["--model", named]), ("RUN", ["--row-tokens", 48, *same])):
            shutil.rmtree("by_model", ignore_errors=True)
            out = get("answers", "--from", "chats.jsonl", "--out", "by_model", *words)
            assert f" --model {named} --sequence-length 48 " in out
            made.append(read("by_model/by_model_train_000001.bin"))
        assert made[0] == made[1], run_of
    os.makedirs("nameless")
    constant_model("nameless/model_00000001.bin", {}, V=999)
    for words, said in ((["own-tok"], "there is no model"), (["nameless"], "999 tokens of no known"),
                        (["own_run", "--bytes"], "--model and --bytes"), (["none"], "there is no model"),
                        (["own_run", "--tokenizer", "own-tok"], "--model and --tokenizer")):
        get_refused("answers", "--from", "chats.jsonl", "--out", "no", "--model", *words, said=said)


def test_mismatches():
    own()
    if not os.path.exists("run"):
        run_ok({"-o": "run"})
    model = max(name for name in os.listdir("run") if name.startswith("model_"))
    number = id_of("own-tok")
    other = shards_of("other.bin", number + 1)
    refused({"-j": other}, "'own/own_train_*.bin' is of tokenizer", f"'{other}' of tokenizer {number + 1}",
            "hint: a run has one tokenizer")
    gpt2 = shards_of("gpt2.bin", 1)
    refused({"-e": "run/" + model, "-i": gpt2}, f"'run/tokenizer.bin' is of tokenizer {number}",
            "'gpt2.bin' of GPT-2's tokenizer")
    lone = constant_model("gpt2-model.bin", {0: 0}, V=50257)
    refused({"-e": lone}, f"tokens of tokenizer {number}", "those of GPT-2's tokenizer", "its tokenizer.bin")
    lost = run({"-i": other, "-j": other, "-v": 0, "-s": 2, "-g": 4, "-o": None})
    assert lost.code == 0 and f"no tokenizer.bin of tokenizer {number + 1} beside" in lost.err
    assert re.fullmatch(r"(\d+ )*", lost.samples()[0])
    wide = run({"-e": "L2,NH2,C32,T32,V900", "-o": None})
    assert wide.code == 0 and "has 700 tokens" in wide.err and "d12,V700" in wide.err


def test_padded_gpt2():
    """50304 are GPT-2's tokens and padding."""
    for name, says, text in (("the", {262: 0}, "Hello the the the"), ("pad", {50300: 0}, "Hello")):
        model = constant_model(name + ".bin", says, V=50304, length=16)
        said = run_ok({**ALONE, "-e": model, "-x": 0, "--prompt": "Hello", "-g": 3})
        assert said.samples() == [text]


# ---- other people's ----

def gpt4_json():
    """The fixture's tokens under GPT-4's pattern, with a token of more than the model knows."""
    fast = json.loads(read(FIXTURE + ".json"))
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"
    fast["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]}
    fast["added_tokens"].append({**fast["added_tokens"][0], "id": V + 2, "content": "<|im start|>"})
    return json.dumps(fast, ensure_ascii=False).encode()


def test_others():
    """Samples are decoded; a prompt, and chat, get a sentence."""
    own()
    folder_of("gpt4", gpt4_json())
    head = tokenizer_files.read_head("gpt4/tokenizer.bin")
    assert head == (V + 3, V - 1, tokenizer_files.tokenizer_id(gpt4_json()), tokenizer_files.MERGES_NONE, 0)
    said, = token_of("own-tok", "です")
    for token, text in ((said, latin("ですですです")), (V + 2, "<|im start|>" * 3), (V, "")):
        os.makedirs("theirs-says", exist_ok=True)
        model = constant_model("theirs-says/model.bin", {token: 0}, V=V + 10)
        assert spoken(model, "gpt4") == text + "\n"
    for task in ({"sample": model, "--prompt": "a"}, {"chat": model}):
        refused({**ALONE, **task, "-o": None}, "cuts text by GPT-2's pattern")
    code, _, err = run_program([TOOL, FIXTURE + ".txt", "-o", "x", "--vocab", "gpt4/tokenizer.bin"])
    assert code == 1 and "error: 'gpt4/tokenizer.bin' only decodes" in err


def sentencepiece_json():
    """As Llama 2's: blanks are U+2581, and bytes that no token has are <0x..>."""
    vocab = {"<unk>": 0, END: 1, **{f"<0x{b:02X}>": 2 + b for b in range(256)}, "\u2581": 258, "a": 259,
             "b": 260, "\u2581a": 261, "ab": 262}
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "pre_tokenizer": None, "post_processor": None, "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
                  "vocab": vocab, "merges": ["\u2581 a", "a b"]}}).encode()


def bin_tokens(data):
    """[bytes] of a tokenizer.bin"""
    found, at = [], 1024
    for _ in range(array("I", data[8:12])[0]):
        found.append(data[at + 1:at + 1 + data[at]])
        at += 1 + data[at]
    return found


@pytest.mark.parametrize("text", [gpt4_json, sentencepiece_json])
def test_decoded_as_by_the_package(text):
    tokenizers = package()
    theirs = tokenizers.Tokenizer.from_buffer(text())
    flat = bin_tokens(tokenizer_files.tokenizer_bin(text(), END))
    for row in ("a b ab  ba\né日本語です", read(FIXTURE + ".txt").decode()[:900]):
        ids = theirs.encode(row, add_special_tokens=False).ids
        assert b"".join(flat[i] for i in ids).decode() == row == theirs.decode(ids, skip_special_tokens=False)


def test_no_bytes():
    """A decoder that is not known here, or a token that is too long: no tokenizer.bin."""
    fast = json.loads(read(FIXTURE + ".json"))
    by_pattern = [{"type": "Replace", "pattern": {"Regex": "_+"}, "content": " "}, {"type": "ByteFallback"}]
    for decoder in None, {"type": "Sequence", "decoders": by_pattern}:
        assert tokenizer_files.tokenizer_bin(json.dumps({**fast, "decoder": decoder}).encode(), END) is None
    fast["added_tokens"].append({**fast["added_tokens"][0], "id": V, "content": "x" * 256})
    assert tokenizer_files.tokenizer_bin(json.dumps(fast).encode(), END) is None


@pytest.mark.parametrize("change", [
    {"normalizer": {"type": "NFC"}}, {"pre_tokenizer": None},
    {"pre_tokenizer": {**tokenizer_files.GPT2_PATTERN, "add_prefix_space": True}}],
    ids=["normalizer", "none", "blank"])
def test_other_patterns_only_decode(change):
    fast = {**json.loads(read(FIXTURE + ".json")), **change}
    data = tokenizer_files.tokenizer_bin(json.dumps(fast).encode(), END)
    assert array("I", data[20:24])[0] == tokenizer_files.MERGES_NONE


# ---- each setting of a tokenizer.json ----

def full_json():
    """With each key that the package writes for a byte-level BPE."""
    return json.loads(package().Tokenizer.from_file(FIXTURE + ".json").to_str())


def one(**change):
    return lambda fast: fast.update(change)


def of_model(**change):
    return lambda fast: fast["model"].update(change)


def of_token(**change):
    return lambda fast: fast["added_tokens"].append({
        **fast["added_tokens"][0], "id": V, "content": "abc", "special": False, **change})


BOTH = {"stride": 0, "direction": "Right", "strategy": "LongestFirst"}
SETTINGS = {
    "truncation": one(truncation={**BOTH, "max_length": 3}),
    "padding": one(padding={"strategy": {"Fixed": 2000}, "direction": "Right", "pad_to_multiple_of": None,
                            "pad_id": 0, "pad_type_id": 0, "pad_token": "!"}),
    "model.dropout": of_model(dropout=0.5),
    "normalizer": one(normalizer={"type": "Lowercase"}),
    "normalizer of chats": one(normalizer={"type": "Sequence", "normalizers": [tokenizer_files.DROP_MARK]}),
    "pre_tokenizer": one(pre_tokenizer={**tokenizer_files.GPT2_PATTERN, "add_prefix_space": True}),
    "post_processor": one(post_processor={
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": END, "type_id": 0}},
                                                 {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {END: {"id": END, "ids": [V - 1], "tokens": [END]}}}),
    "decoder": one(decoder={"type": "Fuse"}), "version": lambda fast: fast.pop("version"),
    "model.type": of_model(type="WordLevel", unk_token="a"), "model.unk_token": of_model(unk_token="a"),
    "model.continuing_subword_prefix": of_model(continuing_subword_prefix="e", merges=[]),
    "model.end_of_word_suffix": of_model(end_of_word_suffix="e"),
    "model.fuse_unk": of_model(fuse_unk=True), "model.byte_fallback": of_model(byte_fallback=True),
    "model.ignore_merges": of_model(ignore_merges=True), "model.merges": of_model(merges=[]),
    "model.vocab": lambda fast: fast["model"]["vocab"].update({"xyz": V}),
    "model.unheard": of_model(unheard=True), "unheard": one(unheard=True),
    "added_tokens.content": of_token(), "added_tokens.id": of_token(id=V + 7),
    **{f"added_tokens.{flag} {special}": of_token(**{flag: True, "special": special})
       for flag in ("lstrip", "rstrip", "single_word", "normalized") for special in (True, False)},
    "added_tokens.special": of_token(special=True)}
FOR_ANOTHER_USE = "truncation", "padding", "model.dropout"
SETTING_TEXTS = ["abc  Abc xabcx xyz abc\tabc, é" + END + "e the\n\n", "日本語の文章です。" * 9, "for (i = 0;"]


def test_settings_are_all():
    """A key that a new version of the package writes must come into the table."""
    fast, known = full_json(), {name.split()[0] for name in SETTINGS}
    keys = {*fast, *("model." + key for key in fast["model"]),
            *("added_tokens." + key for key in fast["added_tokens"][0])} - {"model", "added_tokens"}
    assert keys <= known, keys - known


@pytest.mark.parametrize("name", SETTINGS)
def test_setting(name, capfd):
    """It has the effect that it has in the package, on shards and in C++, or is off and named, or refused."""
    plain, fast = full_json(), full_json()
    SETTINGS[name](fast)
    write("setting.json", json.dumps(fast))
    try:
        ours = any_tokenizer.AnyTokenizer("setting.json", END)
    except any_tokenizer.Problem as problem:
        assert "'setting.json'" in problem.what and name == "unheard", problem.what
        return
    off = name in FOR_ANOTHER_USE
    assert (f"sets {name.removeprefix('model.')}," in capfd.readouterr().err) == off
    theirs = package().Tokenizer.from_str(json.dumps(plain if off else fast))
    theirs.encode_special_tokens = True
    want = [theirs.encode(text, add_special_tokens=False).ids for text in SETTING_TEXTS]
    assert ours.encode(SETTING_TEXTS) == want
    data = tokenizer_files.tokenizer_bin(read("setting.json"), END)
    if data and array("I", data[20:24])[0] == tokenizer_files.MERGES_LISTED:
        write("listed/tokenizer.bin", data)
        assert [tokens(text.encode(), "listed") for text in SETTING_TEXTS] == want


# ---- files that do not belong together ----

def exports():
    """The commands, but for the model and what they write."""
    names = ["export"] + ["gguf"] * has_module("gguf")
    return [[sys.executable, os.path.join(ROOT, "dev/hf.py"), name] for name in names]


def flipped(data, bit):
    return changing(data, bit // 8, data[bit // 8] ^ 1 << bit % 8)


def test_flipped_bits():
    """No program takes a tokenizer.bin of which a bit is another; C++'s reader is test_tokenizer.cpp's."""
    shutil.copytree(own(), "flipped")
    good = read("own-tok/tokenizer.bin")
    model = constant_model("flipped/model_00000001.bin", {1: 0}, V=V)
    for bit in [*range(0, 8 * 28, 5), 8 * 500, 8 * 1023 + 7, *range(8 * 1024, 8 * len(good), 5001)]:
        write("flipped/tokenizer.bin", flipped(good, bit))
        with pytest.raises(tokenizer_files.Problem, match="'flipped/tokenizer.bin' is damaged"):
            any_tokenizer.any_tokenizer("flipped", END)
    damaged = "error: 'flipped/tokenizer.bin' is damaged: it does not have the checksum in its header"
    get_it = [sys.executable, GET, "files", "--from", "rows.jsonl", "--tokenizer", "flipped", "--out", "x"]
    for command in (get_it, [TOOL, FIXTURE + ".txt", "-o", "x", "--vocab", "flipped/tokenizer.bin"],
                    *([*export, model, "x"] for export in exports())):
        code, _, err = run_program(command)
        assert code == 1 and err.startswith(damaged) and not os.path.exists("x"), err
    refused({**ALONE, "sample": model, "-o": None}, damaged)
    write("flipped/tokenizer.bin", unsealed(good))
    assert any_tokenizer.any_tokenizer("flipped", END).by_tool


def test_another_json():
    """The tokenizer.json beside a tokenizer.bin is its own, for get.py and the exports."""
    shutil.copytree(own(), "another")
    write("another/tokenizer.json", gpt4_json())
    model = constant_model("another/model_00000001.bin", {1: 0}, V=V + 3)
    number = tokenizer_files.tokenizer_id(gpt4_json())
    said = f"'another/tokenizer.json' is tokenizer {number}, the tokenizer.bin beside it is of"
    get_refused("files", "--from", "rows.jsonl", "--out", "x", "--tokenizer", "another", said=said)
    for export in exports():
        code, _, err = run_program([*export, model, "x"])
        assert code == 1 and said in err and "Traceback" not in err and not os.path.exists("x"), err


@pytest.mark.parametrize("number", [2**20, 3 * 10**8, 4 * 10**9, 2**40, -1, 1.5])
def test_ids_beyond_a_vocabulary(number):
    """Refused before anything of this size is made."""
    fast = json.loads(read(FIXTURE + ".json"))
    fast["added_tokens"].append({**fast["added_tokens"][0], "id": number, "content": "<far>"})
    write("far/tokenizer.json", text := json.dumps(fast).encode())
    own()
    said = re.escape(f"the token '<far>' has the id {number}; allowed are 0 to 1048575")
    for path in "far", "far/tokenizer.json":
        with pytest.raises(tokenizer_files.Problem, match=said):
            any_tokenizer.any_tokenizer(path, END)
    with pytest.raises(ValueError, match="has the id"):
        tokenizer_files.tokenizer_bin(text, END)
    import export_hf                                # pylint: disable=C0415
    write("far/tokenizer.bin", read("own-tok/tokenizer.bin"))
    said = "'far/tokenizer.json' is no tokenizer.json.*has the id"
    with pytest.raises(tokenizer_files.Problem, match=said):
        export_hf.words_of(V, "far")


def test_exports_need_its_rows():
    """A tokenizer of more tokens than the model has."""
    import export_hf                                # pylint: disable=C0415
    said = f"ids up to {V - 1}, and the model's vocabulary is {V - 1}"
    with pytest.raises(tokenizer_files.Problem, match=said):
        export_hf.words_of(V - 1, own())


# ---- exports ----

def exported(name, model, *words):
    code, out, err = run_program([sys.executable, os.path.join(ROOT, "dev/hf.py"), name, model, *words])
    assert code == 0, err
    return out


def test_export_hf():
    own()
    said, = token_of("own-tok", "です")
    os.makedirs("exported", exist_ok=True)
    model = constant_model("exported/model_00000001.bin", {said: 0}, V=V + 4)
    for name in any_tokenizer.NAMES:
        write("exported/" + name, read("own-tok/" + name))
    assert "no tokenizer" not in exported("export", "exported", "hf")
    assert all(read("hf/" + name) == read("own-tok/" + name) for name in any_tokenizer.NAMES)
    config, settings = (json.loads(read("hf/" + name)) for name in ("config.json", "tokenizer_config.json"))
    assert config["eos_token_id"] == V - 1 and config["vocab_size"] == V + 4
    assert settings["eos_token"] == END and not os.path.exists("hf/vocab.json")
    exported("import", "hf", "--out", "imported")
    assert all(read("imported/" + name) == read("own-tok/" + name) for name in any_tokenizer.NAMES)
    said = run_ok({**ALONE, "-e": "imported", "-x": 0, "--prompt": "日本", "-g": 3})
    assert said.samples() == [latin("日本ですですです")]
    if has_module("transformers"):
        from transformers import AutoTokenizer      # pylint: disable=C0415
        ids = AutoTokenizer.from_pretrained("hf")(read(FIXTURE + ".txt").decode())["input_ids"]
        assert ids == list(array("H", read(FIXTURE + ".ids")))
    shutil.rmtree("hf")
    shutil.rmtree("imported")
    assert model == "exported/model_00000001.bin"


@pytest.mark.parametrize("name", ["truncation", "model.dropout", "pre_tokenizer", "added_tokens.id"])
def test_exported_settings(name):
    """What is off in training is off in the exported file; transformers 4 believes the other one."""
    import export_hf                                # pylint: disable=C0415
    fast = full_json()
    SETTINGS["padding"](fast)                       # so the exported file is another
    SETTINGS[name](fast)
    folder_of("set", text := json.dumps(fast).encode())
    files = export_hf.tokenizer_files(types.SimpleNamespace(maxT=8), export_hf.words_of(V + 8, "set"))
    settings = json.loads(files["tokenizer_config.json"])
    assert settings["add_prefix_space"] == (name == "pre_tokenizer")
    theirs = package().Tokenizer.from_buffer(files["tokenizer.json"])
    theirs.encode_special_tokens = True
    ours = any_tokenizer.AnyTokenizer("set/tokenizer.json", END).encode(SETTING_TEXTS)
    assert [encoding.ids for encoding in theirs.encode_batch(SETTING_TEXTS, add_special_tokens=False)] == ours
    assert files["tokenizer.json"] != text
    for folder in "set-hf", "set-shards":           # as it was exported, and as get.py puts it beside shards
        for file in any_tokenizer.NAMES:
            write(f"{folder}/{file}", files[file])
        found = any_tokenizer.any_tokenizer(folder, END)
        assert found.id == tokenizer_files.tokenizer_id(text)
        files = found.files


def test_export_hf_of_padded_gpt2():
    constant_model("padded.bin", {262: 0}, V=50304, length=16)
    exported("export", "padded.bin", "hf50304")
    assert len(json.loads(read("hf50304/vocab.json"))) == 50257
    assert json.loads(read("hf50304/config.json"))["eos_token_id"] == 50256


class Recorder:
    """Of gguf's writer: what it is told."""
    def __init__(self):
        self.told = {}

    def __getattr__(self, name):
        return lambda value: self.told.update({name.removeprefix("add_"): value})


def test_export_gguf():
    """The tokenizer's parts, with padding; a file with a run's own is test_gguf.py's otherwise."""
    pytest.importorskip("gguf")
    import export_gguf                              # pylint: disable=C0415
    own()
    folder_of("gpt4", gpt4_json())
    for folder, size, known in (("own-tok", V + 4, V), ("", 50304, 50257)):
        out = Recorder()
        export_gguf.add_tokenizer(out, size, export_gguf.words_of(size, folder))
        assert out.told["tokenizer_model"] == "gpt2" and len(out.told["token_merges"]) == known - 257
        words, kinds = out.told["token_list"], out.told["token_types"]
        assert len(words) == len(kinds) == size and words[known - 1:known + 1] == [END, f"[PAD{known}]"]
        assert kinds[known - 1:known + 1] == [3, 5] and set(kinds[:known - 1]) == {1}
        assert out.told["bos_token_id"] == out.told["eos_token_id"] == known - 1
    words, out = export_gguf.words_of(V, "own-tok"), Recorder()
    words.vocab = {token: i + (i >= 300) for token, i in words.vocab.items()}      # no token has the id 300
    words.end = V
    export_gguf.add_tokenizer(out, V + 1, words)
    assert out.told["token_list"][300] == "[PAD300]" and out.told["token_types"][300] == 5
    assert all(out.told["token_list"][i] == token for token, i in words.vocab.items())
    constant_model("gpt4/model.bin", {1: 0}, V=V + 4)
    assert "GGUF takes those that cut text as gpt-2" in exported("gguf", "gpt4/model.bin", "gpt4.gguf")
    constant_model("own-tok/model.bin", {1: 0}, V=V + 4)
    assert "no tokenizer" not in exported("gguf", "own-tok/model.bin", "own.gguf")


if __name__ == "__main__":
    with open(FIXTURE + ".txt", "rb") as source:
        document = source.read()
    made = any_tokenizer.train([document + b"\0"], V)
    with open(FIXTURE + ".json", "w", encoding="utf-8") as to:
        to.write(made)
    with open(FIXTURE + ".ids", "wb") as to:
        theirs_made = any_tokenizer.AnyTokenizer(FIXTURE + ".json", END)
        array("H", theirs_made.encode([document.decode()])[0]).tofile(to)
