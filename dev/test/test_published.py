"""Other people's models, from folders as they publish them (published.py), to here and back: what is kept,
the numbers, what a run and GGUF make of it. Where transformers is, it reads them, too.
"""
import json
import os
import shutil

import pytest

tokenizers = pytest.importorskip("tokenizers")
gguf = pytest.importorskip("gguf")
np = pytest.importorskip("numpy")

from checks import ROOT, read, run_program, write           # noqa: E402
from forked import Forked                                   # noqa: E402
from published import PUBLISHED, TEXTS, export_gguf, folder      # noqa: E402
import get                                                  # noqa: E402
import hf                                                   # noqa: E402
import tokenizer_files                                      # noqa: E402
from test_hf import read_json, read_tensors                 # noqa: E402
from trainer import USUAL, run_ok                               # noqa: E402
from twins import formats, windows                          # noqa: E402

pytestmark = pytest.mark.cpu_only
KEPT = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
MESSAGES = [{"role": "user", "content": " What may I do?"}, {"role": "assistant", "content": "Use, copy."},
            {"role": "user", "content": "And <s>?"}, {"role": "assistant", "content": "merge it"}]


@pytest.fixture(autouse=True)
def in_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def tool_ok(*words):
    code, out, err = Forked(hf.main, ["hf.py", *words]).end()
    assert code == 0 and not err, err
    return out


def get_ok(*words):
    code, _, err = Forked(get.main, ["get.py", *words]).end()
    assert code == 0, err


@pytest.mark.parametrize("family", PUBLISHED)
def test_there_and_back(family):
    """Values keep their bits in the stored type, other files all bytes, and config.json what it says of the
    results and of the end tokens. A run passes everything on."""
    for version in (205, 203):
        source = f"published-{version}"
        dims, params = folder(family, source, version)
        tool_ok("import", source)
        taken = f"models/{source}"
        got_dims, got = formats.read_checkpoint(taken + "/model_00000000.bin")
        assert got_dims == dims and all(np.array_equal(got[name], params[name]) for name in params)
        tool_ok("export", taken, source + "-again")
        for back in (taken, source + "-again"):
            assert {name: read(f"{back}/{name}") for name in KEPT} == \
                {name: read(f"{source}/{name}") for name in KEPT}
        ours, theirs = (read_tensors(f + "/model.safetensors") for f in (source + "-again", source))
        assert {name: (dtype, array.tobytes()) for name, (dtype, array) in ours.items()} == \
            {name: (dtype, array.tobytes()) for name, (dtype, array) in theirs.items()}
    want, config = read_json("published-203/config.json"), read_json("published-203-again/config.json")
    generation = read_json("published-203/generation_config.json")
    want.update({name: value for name, value in generation.items() if name.endswith("_token_id")})
    silent = {"torch_dtype", "transformers_version", "pretraining_tp", "is_llama_config", "rope_interleaved",
              "transformers.js_config", "rope_scaling", "sliding_window", "max_window_layers"}
    if not dims.window and family.startswith("Mistral"):            # without windows it is a Llama
        want.update(model_type="llama", architectures=["LlamaForCausalLM"])
    assert {key: config.get(key) for key in want.keys() - silent} == \
        {key: want[key] for key in want.keys() - silent}
    assert config.get("rope_scaling") == want.get("rope_scaling") or family.startswith("Qwen")
    if family.startswith("Mistral"):
        assert config.get("sliding_window") == want["sliding_window"]
    settings = read_json("published-203/tokenizer_config.json")
    assert os.path.exists(taken + "/chat_template.jinja") == ("chat_template" in settings)

    # shards are made with the imported folder, and a run of two steps has all of it
    write("text.txt", "the Software is provided as is\n" * 40)
    get_ok("files", "--from", "text.txt", "--out", "data", "--tokenizer", taken)
    shard = np.fromfile("data/data_train_000001.bin", "<u2", offset=1024)
    assert shard[0] == read_json(source + "/config.json")["bos_token_id"]
    run_ok({"-e": taken, "-i": "data/data_train_*.bin", "-j": None, "-v": 0, "-t": 32, "-b": 1, "-z": None,
            "-x": 2, "-n": 2, "-o": "run", "--lanes": None})
    tool_ok("export", "run", "tuned")
    assert {name: read(f"tuned/{name}") for name in KEPT} == {name: read(f"{source}/{name}") for name in KEPT}
    assert read_json("tuned/config.json")["eos_token_id"] == generation["eos_token_id"]


def config_token(source, settings):
    """The token in front of a text."""
    ids = read_json(source + "/config.json")["bos_token_id"]
    return settings["added_tokens_decoder"][str(ids)]["content"]


def scored_merges(text, pieces, scores, prefix):
    """SentencePiece's way, as llama.cpp goes it: of all neighbours that make a piece those with the highest
    score are merged, the first ones first. What is no piece becomes bytes."""
    parts = list((" " * prefix + text if text else "").replace(" ", "\u2581"))
    while True:
        pairs = [(scores[pieces[a + b]], -i) for i, (a, b) in enumerate(zip(parts, parts[1:]))
                 if a + b in pieces]
        if not pairs:
            break
        i = -max(pairs)[1]
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return [i for part in parts for i in ([pieces[part]] if part in pieces else
                                          [pieces[f"<0x{b:02X}>"] for b in part.encode()])]


@pytest.mark.parametrize("family", PUBLISHED)
def test_gguf(family):
    """The tokenizer, its special tokens and its template, by the package gguf."""
    cut, special, *_ = PUBLISHED[family]
    dims, _ = folder(family, "source")
    tool_ok("import", "source")
    if dims.windows():
        code, _, err = Forked(hf.main, ["hf.py", "gguf", "models/source", "out.gguf"]).end()
        assert code == 1 and "is a Mistral, and GGUF has no architecture" in err
        config = read_json("source/config.json")
        write("source/config.json", json.dumps({**config, "sliding_window": 4096}))       # it hides nothing
        shutil.rmtree("models")
        tool_ok("import", "source")
    out = tool_ok("gguf", "models/source", "out.gguf", "--type", "f32")
    assert "no tokenizer" not in out
    reader = gguf.GGUFReader("out.gguf")
    values = {name: field.contents() for name, field in reader.fields.items() if name[:5] != "GGUF."}
    has = {name.removeprefix("tokenizer.ggml."): value for name, value in values.items()}
    fast, settings = read_json("source/tokenizer.json"), read_json("source/tokenizer_config.json")
    ids = {token["content"]: token["id"] for token in fast["added_tokens"]}
    vocab = {**fast["model"]["vocab"], **ids}
    pieces = fast["model"]["byte_fallback"]
    assert values["general.architecture"] == ("qwen2" if "Qwen" in family else "llama")
    assert (has["model"], has["pre"]) == (("llama", "default") if pieces else ("gpt2", cut))
    assert all(has["tokens"][i] == token for token, i in vocab.items()) and len(has["tokens"]) == dims.V
    normal, unknown, control, byte = 1, 2, 3, 6                     # as llama.cpp numbers them
    assert all(kind == (unknown if token == "<unk>" else control if token in ids else
                        byte if token in export_gguf.BYTE_NAMES else normal)
               for token, kind in zip(has["tokens"], has["token_type"]))
    begins = settings.get("add_bos_token", "Llama-3" in family)
    assert has["bos_token_id"] == ids[config_token("source", settings)] and has["add_bos_token"] == begins
    assert has["eos_token_id"] == ids[settings["eos_token"]]
    assert values.get("tokenizer.chat_template") == settings.get("chat_template")
    if pieces:
        tokenizer = tokenizers.Tokenizer.from_file("source/tokenizer.json")
        assert has["add_space_prefix"] and has["unknown_token_id"] == 0
        for text in TEXTS:
            if cut == "first" and text.startswith(" "):     # there llama.cpp adds a blank, as SentencePiece
                continue
            want = tokenizer.encode(text, add_special_tokens=False).ids
            assert scored_merges(text, vocab, has["scores"], has["add_space_prefix"]) == want, text
    else:
        assert has["merges"] == [m if isinstance(m, str) else " ".join(m) for m in fast["model"]["merges"]]
        assert "scores" not in has
    freqs = {t.name: t for t in reader.tensors}.get("rope_freqs.weight")
    assert (freqs is not None) == ("Llama-3" in family)
    if freqs is not None:
        assert freqs.data.dtype == np.float32 and np.allclose(freqs.data, formats.rope_divisors(dims))


@pytest.mark.parametrize("change, said", [
    (lambda fast: fast["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex=r"\w+"), "no tokenizer"),
    (lambda fast: fast["model"].update(ignore_merges=True), "no tokenizer"),
    (lambda fast: fast.update(normalizer={"type": "Lowercase"}), "no tokenizer")])
def test_other_tokenizers(change, said):
    """GGUF knows how a tokenizer cuts by its name. One that cuts otherwise is not given that name."""
    folder("Qwen2.5-0.5B-Instruct", "source")
    fast = read_json("source/tokenizer.json")
    change(fast)
    write("source/tokenizer.json", json.dumps(fast))
    tool_ok("import", "source")
    assert said in tool_ok("gguf", "models/source", "out.gguf")


@pytest.mark.parametrize("family", PUBLISHED)
def test_in_transformers(family):
    """Of the same folder and of its export, logits are ours to 1e-5, and greedy text is the same."""
    theirs, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    dims, _ = folder(family, "source", 203)
    tool_ok("import", "source")
    tool_ok("export", "models/source", "back")
    tokens = np.random.default_rng(3).integers(5, dims.V, 2 * dims.maxT + 1)
    rows = windows(tokens, dims.maxT)
    x, y = np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])
    head = formats.header_words(formats.MAGIC_TENSORS, 2, *x.shape)
    write("batch.bin", head.tobytes() + x.astype("<i4").tobytes() + y.astype("<i4").tobytes())
    code, _, err = run_program([ROOT + "/test_gpt2cpu", "dump-grads", "models/source/model_00000000.bin",
                                "batch.bin", "ours.bin", "1"])
    assert code == 0, err
    ours = formats.read_tensors("ours.bin", dims)["logits"]
    end = read_json("source/config.json")["bos_token_id"]
    fast = read_json("source/tokenizer.json")
    to_bytes = tokenizer_files.decoded(fast)
    token_of = {i: token for token, i in tokenizer_files.token_ids(fast).items()}
    text = run_ok({**dict.fromkeys(USUAL), "sample": "models/source", "-g": 24, "--temperature": 0,
                   "--verbose": -1}).out
    for name in ("source", "back"):
        model, wrong = theirs.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32,
                                                                   output_loading_info=True)
        assert not any(wrong.values()), wrong
        with torch.no_grad():
            logits = model(torch.from_numpy(x.astype(np.int64)), use_cache=False).logits.numpy()
        rms = float(np.sqrt((logits ** 2).mean()))
        worst = float(np.abs(logits - ours).max())
        print(f"{name}: logits off by {worst:.1e}, rms {rms:.2f}")
        assert worst <= 1e-5 * max(rms, 1)
        start = torch.tensor([[end]])
        made = model.generate(start, attention_mask=torch.ones_like(start), do_sample=False,
                              max_new_tokens=24, eos_token_id=[], pad_token_id=0, repetition_penalty=1.0)
        said = b"".join(to_bytes(token_of[i]) for i in made[0, 1:].tolist())
        assert said.strip() == text.encode("latin-1").strip()
        ends = read_json("source/generation_config.json")["eos_token_id"]
        assert model.generation_config.eos_token_id == ends
        kept = theirs.AutoTokenizer.from_pretrained(name)
        plain = tokenizers.Tokenizer.from_file("source/tokenizer.json")
        assert kept("It isn't 1234", add_special_tokens=False)["input_ids"] == \
            plain.encode("It isn't 1234", add_special_tokens=False).ids
    if not kept.chat_template:
        return
    # a special token in a message is text in a shard, and a token to transformers: here there is none
    said = [{**message, "content": message["content"].replace("<s>", "then")} for message in MESSAGES]
    write("chats.jsonl", json.dumps({"messages": said}) + "\n")
    get_ok("answers", "--from", "chats.jsonl", "--out", "qa", "--tokenizer", "models/source", "--val-tokens",
           "0", "--row-tokens", "256")
    shard = np.fromfile("qa/qa_train_000001.bin", "<u2", offset=1024).tolist()
    want = plain.encode(kept.apply_chat_template(said, tokenize=False), add_special_tokens=False).ids
    # transformers 5 cuts a Llama's text by rules of its own, and not by this tokenizer.json's
    assert PUBLISHED[family][0] == "prepend" or want == kept.apply_chat_template(said, return_dict=False)
    want = [end] * (want[0] != end) + want
    assert shard[:len(want)] == want and set(shard[len(want):]) <= {end}
    counted = np.flatnonzero(np.fromfile("qa/qa_train_000001.mask", "u1"))
    answers = kept.decode([shard[i] for i in counted])
    assert [text.strip() for text in answers.split(kept.eos_token)] == ["Use, copy.", "merge it", ""]
