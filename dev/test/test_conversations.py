"""Conversations: get.py answers makes shards and masks of them, models that were trained on these say so, and
`chat` and the exports go by it.

What a shard must hold is spelled out here: a conversation's text as chat template 1 has it. With --bytes the
end-of-text token is 0, and a byte is a token.
"""
import array
import csv
import datetime
import glob
import importlib.util
import json
import os
import random
import re
import sys
import types

import pytest

from checks import ROOT, read, run_program, write
from forked import Forked
from trainer import ALONE, USUAL, run, run_ok, sentences, write_shard
from twins import constant_model, doubles

sys.path[1:1] = [os.path.join(ROOT, "dev/data"), os.path.join(ROOT, "dev/eval")]
import export_hf                        # noqa: E402
import get                              # noqa: E402
import tokenizer_files                  # noqa: E402
from any_tokenizer import any_tokenizer, draw_key       # noqa: E402

GET = os.path.join(ROOT, "dev/data/get.py")
TOOL = os.path.join(ROOT, "build/tokenize")
MODEL_CHAT, SHARD_CHAT, SHARD_ROW = 252, 8, 9       # words of the headers
pytestmark = [pytest.mark.cpu_only,
              pytest.mark.skipif(not os.access(TOOL, os.X_OK), reason="no build/tokenize: make tokenize")]


def run_get(*words):
    """(exit code, stdout, stderr)"""
    return Forked(get.main, [GET, *words]).end()


def get_answers(*words, origin="qa.jsonl", out="qa", kind=("--bytes",)):
    return run_get("answers", "--from", origin, "--out", out, *kind, *words)


def makes(*words, **more):
    code, out, err = get_answers(*words, **more)
    assert code == 0, err
    return out


def refused(*said, words=(), **more):
    code, _, err = get_answers(*words, out="refused", **more)
    assert code == 1 and err.startswith("error: ") and "Traceback" not in err, err
    assert not [text for text in said if text not in err], err


def messages(*pairs):
    return [{"role": {"s": "system", "u": "user", "a": "assistant", "t": "tool"}[role], "content": text}
            for role, text in pairs]


def some_conversations(seed, count, longest=30):
    rng, found = random.Random(seed), []
    for number in range(count):
        said = [("s", "Be é brief.\n")] * rng.randrange(2) + [("u", f"No. {number}"), ("a", "Ok!")]
        for _ in range(rng.randrange(1, 4)):
            said += [("u", " " + "q" * rng.randrange(longest) + "?"),
                     ("a", "a" * rng.randrange(longest) + " ")]
        found.append(said)
    return found


def expected(said):
    """(tokens, mask): 0 stands before a conversation and behind each answer."""
    tokens, mask = b"\0", b"\0"
    for role, text in said:
        text = text.strip().encode()
        if role == "a":
            tokens, mask = tokens + b"Assistant:", mask + bytes(10)
            tokens, mask = tokens + b" " + text + b"\0", mask + b"\1" * (len(text) + 2)
        else:
            part = {"s": b"System: ", "u": b"User: ", "t": b"Tool: "}[role] + text + b"\n\n"
            tokens, mask = tokens + part, mask + bytes(len(part))
    return tokens, mask


def write_rows(said, path="qa.jsonl"):
    write(path, "".join(json.dumps({"id": 7, "messages": messages(*some)}) + "\n" for some in said))


def shards(split, out="qa", tokenizer=2):
    """[(tokens, mask)] of each shard, whose headers must be right."""
    found = []
    for path in sorted(glob.glob(f"{out}/{out}_{split}_*.bin")):
        data = read(path)
        head, tokens = array.array("i", data[:1024]), array.array("H", data[1024:])
        assert list(head[:4]) == [20240520, 1, len(tokens), tokenizer] and head[SHARD_CHAT] == 1
        assert sum(map(bool, head)) == 6 and head[SHARD_ROW] > 0
        found.append((tokens, read(path.removesuffix(".bin") + ".mask")))
        assert len(found[-1][1]) == len(tokens)
    return found


def check(said, T, out="qa", least=0.0):
    """Each conversation is in one place, whole in a row or from a row's begin on, and all else is 0."""
    wanted = sorted(map(expected, said))
    got, tokens_of_rows = [], 0
    for split in ("val", "train"):
        for tokens, mask in shards(split, out):
            data, at, rows = bytes(list(tokens)), 0, len(tokens) // T
            assert len(tokens) == rows * T + 1
            tokens_of_rows += len(tokens)
            while at < len(data):
                found = next((pair for pair in wanted if data.startswith(pair[0], at)
                              and mask.startswith(pair[1], at) and pair not in got), None)
                if found:
                    size = len(found[0])
                    assert at // T == (at + size - 1) // T or at % T == 0, "cut by a row's end"
                    got.append(found)
                    at += size
                else:
                    assert data[at] == mask[at] == 0
                    at += 1
    assert sorted(got) == wanted
    assert sum(len(tokens) for tokens, _ in wanted) >= least * tokens_of_rows


# ---- shards ----

def test_rows():
    """Whole conversations fill rows; longer ones begin one; shards and masks go together."""
    said = some_conversations(1, 120)
    assert len({expected(some) for some in said}) == 120
    write_rows(said)
    out = makes("--row-tokens", 256, "--val-tokens", 0, "--restart")
    masks = b"".join(mask for _, mask in map(expected, said))
    assert f"{sum(masks)} of {len(masks)} tokens count" in out and not shards("val")
    check(said, 256, least=0.9)
    assert "is complete" in makes("--row-tokens", 256, "--val-tokens", 0)
    for T, size in ((16, 200), (100, 1), (256, 2000)):
        makes("--row-tokens", T, "--shard-tokens", size, "--restart")
        check(said, T)
        assert len(shards("train")) > 3 and len(glob.glob("qa/*.mask")) == len(glob.glob("qa/*.bin"))
        drawn = sum(sum(mask) > 0 for _, mask in shards("val"))
        assert drawn == 1
    code, _, err = get_answers("--row-tokens", 32)
    assert code == 1 and "row_tokens 256 and not 32" in err, err


def test_validation():
    """As many drawn conversations as so many tokens hold, but one at least, and one is left to train on."""
    said = some_conversations(2, 30)
    sizes = [len(expected(some)[0]) for some in said]
    order = sorted(range(30), key=draw_key)
    three, all_of = sum(sizes[i] for i in order[:3]), sum(sizes)
    write_rows(said)
    for wanted, count in ((1, 1), (sizes[order[0]], 1), (three - 1, 2), (three, 3), (all_of - 1, 29)):
        makes("--row-tokens", 64, "--val-tokens", wanted, "--restart")
        found = b"".join(bytes(list(tokens)) for tokens, _ in shards("val"))
        drawn = [i for i in range(30) if expected(said[i])[0] in found]
        assert drawn == sorted(order[:count]), wanted
        check(said, 64)
    refused("leaves none to train on", words=("--val-tokens", all_of))
    write_rows(said[:1])
    makes("--row-tokens", 64, "--restart")
    assert not shards("val") and len(shards("train")) == 1


def test_text_of_a_conversation():
    said = [[("s", " S "), ("u", "Q"), ("a", "A"), ("u", "R"), ("u", "T"), ("a", ""), ("a", "B")],
            [("u", "open"), ("a", "yes"), ("u", "dropped")]]
    write_rows(said)
    makes("--row-tokens", 200, "--val-tokens", 0, "--restart")
    tokens, mask = shards("train")[0]
    text = bytes(list(tokens)).replace(b"\0", b"|").decode()
    one = "|System: S\n\nUser: Q\n\nAssistant: A|User: R\n\nUser: T\n\nAssistant: |Assistant: B|"
    two = "|User: open\n\nAssistant: yes|"
    assert text.rstrip("|") == (one + two).rstrip("|")
    counted = "".join(letter for letter, bit in zip(text, mask) if bit)
    assert counted == " A| | B| yes|"


def test_gpt2_tokens():
    """Parts are encoded by themselves, as `chat` encodes a question; tokenizer.json makes the same shards."""
    said = some_conversations(3, 40)
    for number, one in enumerate(said):             # where a part's end and the next one's begin might merge
        ends = "(x)", "'s", "...", "7", "\n\n x", "Assistant:", "é"
        one[-1] = "a", random.Random(number).choice(ends) * 2
    write_rows(said)
    makes("--row-tokens", 64, out="ours", kind=())
    tokens, mask = shards("train", "ours", 1)[0]
    assert 50256 in tokens and 0 < sum(mask) < len(mask)
    pytest.importorskip("tokenizers")
    sys.path.insert(0, os.path.join(ROOT, "dev/eval"))
    import types                                    # pylint: disable=C0415
    import export_hf                                # pylint: disable=C0415
    words = export_hf.words_of(50257, "")
    write("gpt2.json", export_hf.tokenizer_files(types.SimpleNamespace(maxT=8), words)["tokenizer.json"])
    makes("--row-tokens", 64, "--tokenizer", "gpt2.json", out="theirs", kind=())
    from tokenizers import Tokenizer                # pylint: disable=C0415
    tokens = " ".join(str(token) for split in ("val", "train") for some, _ in shards(split, "ours", 1)
                      for token in some)
    whole = Tokenizer.from_file("gpt2.json")
    for one in said:                                # a whole conversation's tokens are those of its parts
        text = expected(one)[0].decode().replace("\0", "<|endoftext|>")
        assert " ".join(map(str, whole.encode(text).ids)) in tokens
    for path in glob.glob("ours/ours_*"):           # but for the tokenizer's number
        other = read(path.replace("ours", "theirs"))
        want = read(path)
        assert other[:12] + other[16:] == want[:12] + want[16:], path


def test_lists_alone():
    """A line may be the list of messages itself, as nanochat writes it."""
    said = some_conversations(4, 20)
    write_rows(said)
    makes("--row-tokens", 64, out="rows")
    for of_form in messages, lambda *some: speakers(some):
        write("lists.jsonl", "".join(json.dumps(of_form(*some)) + "\n" for some in said))
        makes("--row-tokens", 64, "--restart", out="lists", origin="lists.jsonl")
        for path in glob.glob("rows/rows_*"):
            assert read(path) == read(path.replace("rows", "lists"))


def speakers(said):
    return [{"from": {"s": "system", "u": "human", "a": "gpt", "t": "observation"}[role], "value": text}
            for role, text in said]


def in_parts(said):
    return [{**message, "content": [{"type": "text", "text": text}
                                    for text in message["content"].partition("e")]}
            for message in messages(*said)]


def alpaca(said):
    """Two texts of a question are the instruction and the input."""
    system = {"system": said[0][1]} if said[0][0] == "s" else {}
    (_, question), (_, answer) = said[-2:]
    instruction, _, more = question.partition("\n\n")
    return {**system, "instruction": instruction, "input": more, "output": answer}


def developer(said):
    return [{**m, "role": m["role"].replace("system", "developer")} for m in messages(*said)]


# of each form: what makes a row of a conversation, and whether it holds one question alone
FORMS = {
    "messages": (lambda said: {"messages": messages(*said)}, False),
    "share": (lambda said: {"conversations": speakers(said), "system": None, "id": 1}, False),
    "system": (lambda said: {"conversations": speakers(said[said[0][0] == "s":]),
                             "system": said[0][1] if said[0][0] == "s" else ""}, False),
    "parts": (lambda said: {"messages": in_parts(said)}, False),
    "roles": (lambda said: {"messages": developer(said)}, False),
    "json": (lambda said: {"messages": json.dumps(messages(*said)), "prompt": "x", "completion": "y"}, False),
    "alpaca": (alpaca, True),
    "lists": (lambda said: {"prompt": messages(*said[:-1]), "completion": messages(said[-1])}, True),
    "prompt": (lambda said: {"prompt": said[-2][1], "completion": said[-1][1], "id": 7}, True)}


@pytest.mark.parametrize("kind", FORMS)
def test_forms(kind):
    """Each form's rows are the same conversations, also in parquet and, of texts, in a table."""
    row_of, one_question = FORMS[kind]
    more = [] if one_question else [("t", "as I am"), ("u", " Ever?\n"), ("a", " one é ")]
    said = [[*[("s", "Be brief.")] * (i % 2), ("u", f"{i} Where?" + "\n\nHere?" * (i % 3)),
             ("a", f"there {i}"), *more] for i in range(12)]
    if kind == "prompt":
        said = [some[-2:] for some in said]
    rows = list(map(row_of, said))
    write("rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    made = ["rows.jsonl"]
    if all(isinstance(value, (str, int)) for row in rows for value in row.values()):
        with open("rows.csv", "w", encoding="utf-8", newline="") as f:
            names = dict.fromkeys(name for row in rows for name in row)
            csv.DictWriter(f, names).writerows([{name: name for name in names}, *rows])
        made.append("rows.csv")
    if importlib.util.find_spec("pyarrow"):
        import pyarrow.parquet                      # pylint: disable=C0415
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: [row.get(name) for row in rows] for name in names}
        pyarrow.parquet.write_table(pyarrow.table(columns), "rows.parquet")
        made.append("rows.parquet")
    for origin in made:
        makes("--row-tokens", 64, "--restart", origin=origin)
        check(said, 64)


def test_prompts_of_messages():
    """Answers in a prompt do not count."""
    said = messages(("u", "Q"), ("a", "A"), ("u", "R"), ("a", "B"))
    write("qa.jsonl", json.dumps({"prompt": said[:3], "completion": said[3:]}) + "\n")
    makes("--row-tokens", 64, "--val-tokens", 0, "--restart")
    tokens, mask = shards("train")[0]
    assert bytes(token for token, bit in zip(tokens, mask) if bit) == b" B\0"


def test_what_counts():
    """Not an answer, nor the end behind it, whose message says so; of questions it does not matter."""
    off = [{"weight": 0}, {"train": False}, {"weight": 0.0, "train": True}, {"weight": 1, "train": 0}]
    on = [{}, {"weight": 1}, {"train": True}, {"weight": None, "train": None}, {"weight": 1.0, "train": 1}]
    for flags, counts in [(flags, False) for flags in off] + [(flags, True) for flags in on]:
        said = messages(("u", "Q"), ("a", "A"), ("u", "R"), ("a", "B"))
        said[1].update(flags)
        said[0].update(flags)
        write("qa.jsonl", json.dumps({"messages": said}) + "\n")
        makes("--row-tokens", 64, "--val-tokens", 0, "--restart")
        tokens, mask = shards("train")[0]
        text = bytes(list(tokens)).replace(b"\0", b"|").decode()
        assert text.rstrip("|") == "|User: Q\n\nAssistant: A|User: R\n\nAssistant: B"
        counted = "".join(letter for letter, bit in zip(text, mask) if bit)
        assert counted == " A|" * counts + " B|", flags
    for last, counted in (({}, " B|"), ({"weight": 0}, "")):
        said = [*messages(("u", "Q"), ("a", "A"), ("u", "R")), {**messages(("a", "B"))[0], **last}]
        write("qa.jsonl", json.dumps({"messages": said}) + "\n" + json.dumps({"messages": said[:2]}))
        makes("--row-tokens", 64, "--val-tokens", 0, "--restart", "--last-answer")
        tokens, mask = shards("train")[0]
        text = bytes(token for token, bit in zip(tokens, mask) if bit).replace(b"\0", b"|").decode()
        assert text == counted + " A|", text
    code, _, err = get_answers("--row-tokens", 64, "--val-tokens", 0)
    assert code == 1 and "last_answer True and not None" in err, err
    for flags, what in (({"weight": 0.5}, "[0.5]"), ({"train": "no"}, "['no']"), ({"weight": 2}, "[2]")):
        write("bad.jsonl", json.dumps([*messages(("u", "Q")), messages(("a", "A"))[0] | flags]) + "\n")
        refused(f"line 1: message 2 has weight and train {what}", "1 or 0", origin="bad.jsonl")


def test_fields_that_are_not_written():
    """Those with text in them are said, with their number in all files; numbers and empty ones are not."""
    more = {"reasoning_content": "Hm.", "tool_calls": [{"name": "f"}], "name": "", "id": 7, "audio": None,
            "prefix": True, "calls": []}
    for name in "a", "b":
        said = [{**message, **more} for message in messages(("u", name), ("a", "A"))]
        write(f"fields/{name}.jsonl", (json.dumps({"messages": said}) + "\n") * 3)
    code, _, err = get_answers("--row-tokens", 64, origin="fields", out="fielded")
    assert code == 0 and err == "note: 12 messages have 'reasoning_content', which is not written\n" \
        "note: 12 messages have 'tool_calls', which is not written\n", err


def test_refused():
    write("a.txt", "Only text.\n")
    refused("'a.txt' is text, not rows of messages", origin="a.txt")
    for row, said in (({"text": "x"}, ["line 1 has no 'messages', but 'text'", "or this list alone"]),
                      ({"messages": "x"}, ["is no list of messages, but str"]),
                      ({"messages": []}, ["no list of messages"]),
                      ({"messages": messages(("u", "x"))}, ["no message of the role assistant"]),
                      ({"messages": [{"role": "human", "content": "x"}]}, ["message 1", "'human'"]),
                      ({"messages": messages(("u", "x"), ("a", None))}, ["message 2", "NoneType"]),
                      ({"messages": messages(("u", "\ud800"), ("a", "x"))}, ["half a character"]),
                      ({"question": "x"}, ["no 'messages', but 'question'", "from and value", "completion"]),
                      ({"instruction": 1, "output": "x"}, ["message 1", "as its content int"]),
                      ({"instruction": "x", "input": [1], "output": "x"}, ["1 ", "a list of str, str, list"]),
                      ({"prompt": None, "completion": "x"}, ["no list of messages, but NoneType"]),
                      ({"conversations": [{"from": "bing", "value": "x"}]}, ["message 1", "'bing'", "human"]),
                      ({"conversations": [{"from": ["gpt"], "value": "x"}]}, ["message 1", "['gpt']"]),
                      ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
                       ["message 1", "'image_url'", "texts"])):
        write("bad.jsonl", json.dumps({"messages": messages(("u", "a"), ("a", "b"))}) + "\n")
        write("bad.jsonl", json.dumps(row) + "\n")
        refused(*said, origin="bad.jsonl")
    write_rows(some_conversations(5, 3))
    refused("--row-tokens 0", words=("--row-tokens", 0))
    refused("leaves none to train on", words=("--val-tokens", 10**6))
    code, _, err = run_get("files", "--from", "a.txt", "--out", "x", "--row-tokens", 8)
    assert code == 1 and "--row-tokens 8: it belongs to answers" in err
    code, _, err = run_get("files", "--from", "a.txt", "--out", "x", "--last-answer")
    assert code == 1 and "--last-answer belongs to answers" in err


# ---- models ----

def word(path, number):
    return array.array("i", read(path)[:1024])[number]


def test_the_model_knows():
    """Its file says so, after a resume and after other data, too; `chat` and the exports go by that."""
    write_rows(some_conversations(6, 60))
    makes("--row-tokens", 64, "--restart")
    flags = {**USUAL, "-e": "L1,NH2,C16,T64,V256", "-t": 64, "-b": 2, "-n": 2}
    conversations = {"-i": "qa/qa_train_*.bin", "-j": "qa/qa_val_*.bin", "-v": 2}
    assert " chat taught` asks it" in run_ok({**flags, **conversations, "-x": 2, "-o": "taught"}).out
    assert word("taught/model_00000002.bin", MODEL_CHAT) == 1
    cut = run({**flags, **conversations, "-t": 32, "-x": 1})
    assert cut.code == 0 and "rows of 64 tokens, and -t 32 cuts them" in cut.err
    run_ok({**ALONE, "-y": 1, "-o": "taught", "-x": 4})
    assert word("taught/model_00000004.bin", MODEL_CHAT) == 1
    write_shard("text.bin", sentences(8, 2000))
    run_ok({**flags, "-i": "text.bin", "-e": "taught", "-x": 1, "-o": "more"})
    run_ok({**flags, "-i": "text.bin", "-x": 1, "-o": "plain"})
    assert word("more/model_00000001.bin", MODEL_CHAT) == 1 and doubles("more/model_00000001.bin")
    assert word("plain/model_00000001.bin", MODEL_CHAT) == 0
    for folder, knows in (("more", True), ("plain", False)):
        code, _, err = run_program([sys.executable, os.path.join(ROOT, "dev/hf.py"), "export", folder,
                                    folder + "-hf"])
        assert code == 0, err
        settings = json.loads(read(folder + "-hf/tokenizer_config.json"))
        assert ("chat_template" in settings) == knows
    if importlib.util.find_spec("gguf"):
        code, _, err = run_program([sys.executable, os.path.join(ROOT, "dev/hf.py"), "gguf", "more",
                                    "more.gguf"])
        assert code == 0 and b"add_generation_prompt" in read("more.gguf"), err
    llama = {"-e": "llama:L1,NH2,NKV1,HS16,C32,F32,T64,V256"}
    run_ok({**flags, **conversations, **llama, "-x": 2, "-o": "llama"})
    run_ok({**ALONE, "-y": 1, "-o": "llama", "-x": 3})
    assert word("llama/model_00000003.bin", MODEL_CHAT) == 1
    # on other data the run itself must remember it
    for folder in "taught", "llama":
        run_ok({**flags, "-i": "text.bin", "-e": folder, "-x": 1, "-n": 1, "-o": folder + "-on"})
        run_ok({**ALONE, "-y": 1, "-o": folder + "-on", "-x": 2})
        assert word(folder + "-on/model_00000002.bin", MODEL_CHAT) == 1


def test_chat():
    """A model that says spaces alone: the first one of an answer is the template's."""
    constant_model("spaces.bin", {32: 0.0})
    flags = {**ALONE, "chat": "spaces.bin", "-g": 5, "--verbose": -1, "--temperature": 0}
    assert run_ok(flags, input=b"Hi\n\n").out == "     \n     \n"
    head = bytearray(read("spaces.bin"))
    head[4 * MODEL_CHAT] = 1
    write("spaces.bin", bytes(head))
    assert run_ok(flags, input=b"Hi\n\n").out == "    \n     \n"
    assert run_ok({**flags, "--prompt": "Be brief."}, input=b"Hi\n").out == "    \n"
    head[4 * MODEL_CHAT] = 9
    write("spaces.bin", bytes(head))
    result = run(flags, input=b"Hi\n")
    assert result.code == 1 and "chat template 9 is not known" in result.err, result.err


def test_template():
    """Jinja writes what get.py writes: see expected()."""
    jinja2 = pytest.importorskip("jinja2")
    sys.path.insert(0, os.path.join(ROOT, "dev/eval"))
    import export_hf                                # pylint: disable=C0415
    template = jinja2.Environment().from_string(export_hf.CHAT_TEMPLATES[1])
    assert "System" not in template.render(messages=messages(("s", " \t"), ("u", "Q")), eos_token="|")
    tool = [("s", "S"), ("u", "Q"), ("t", " 7 "), ("a", "A")]
    for said in [*some_conversations(9, 30), tool]:
        for some in messages(*said), developer(said):
            assert template.render(messages=some, eos_token="\0").encode() == expected(said)[0]
    asked = template.render(messages=messages(("s", "S "), ("u", "Q")), eos_token="|",
                            add_generation_prompt=True)
    assert asked == "|System: S\n\nUser: Q\n\nAssistant:"


# ---- the same tokens everywhere ----

END = "<|endoftext|>"
SAID = [[("s", ""), ("u", " Hi "), ("a", "so so")],
        [("s", "\n Be é brief.\t"), ("u", "a" + END + END + "b <" + END), ("a", END), ("u", "x"), ("a", "")],
        [("u", "\u3000日本\u00a0"), ("a", "\u00a0x\u3000"), ("u", "'s"), ("a", "'s <mask>"), ("u", "\v\f1"),
         ("a", "\x1c2")],
        [("u", "Assistant: I"), ("a", "\n\nUser: you " + END[1:]), ("a", "  two  spaces ")],
        [("u", "\1"), ("a", "\1"), ("a", "\1")], [("u", "x"), ("t", " so\n"), ("a", "x")]]


def spaced(pre_tokenizer=None, normalizer=None):
    """A tokenizer of SentencePiece's form, as bytes; <mask> and the end are special, and looked for late."""
    from tokenizers import Tokenizer, models, trainers                              # pylint: disable=C0415
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.normalizer = pre_tokenizer, normalizer
    texts = [word for said in SAID for _, text in said for word in ("User:", "Assistant:", *text.split())]
    tokenizer.train_from_iterator([text for text in texts * 3 if END not in text], trainers.BpeTrainer(
        vocab_size=250, special_tokens=["<unk>", END, "<mask>"], show_progress=False,
        initial_alphabet=["\u2581", *sorted({*"".join(texts), *"\n\t \x1c\u3000\u00a0"})]))
    fast = json.loads(tokenizer.to_str())
    for token in fast["added_tokens"]:
        token["normalized"] = normalizer is None
    fast["post_processor"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                              "use_regex": True}
    fast["decoder"] = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"}]}
    return json.dumps(fast).encode()


def tokenizer_of(kind):
    """get.py's words for it. "first" puts a blank in front of a whole text alone."""
    if kind in ("bytes", "gpt2"):
        return ["--bytes"] if kind == "bytes" else []
    from tokenizers import normalizers, pre_tokenizers      # pylint: disable=C0415
    makes_text = {"own": lambda: read(os.path.join(ROOT, "dev/test/fixtures/own.json")),
                  "first": lambda: spaced(pre_tokenizers.Metaspace(prepend_scheme="first")),
                  "always": lambda: spaced(pre_tokenizers.Metaspace(prepend_scheme="always")),
                  "each": lambda: spaced(None, normalizers.Sequence([
                      normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]))}
    write(f"{kind}-tok/tokenizer.json", text := makes_text[kind.removesuffix("-package")]())
    write(f"{kind}-tok/tokenizer.bin", tokenizer_files.tokenizer_bin(text, END))
    return ["--tokenizer", f"{kind}-tok" + "/tokenizer.json" * (kind != "own")]


@pytest.mark.parametrize("kind", ["bytes", "gpt2", "own", "own-package", "first", "always", "each"])
def test_same_tokens(kind):
    """What is trained on is what the exported files make of these messages, and what comes before an answer
    begins it. An end in a text is text."""
    jinja2, tokenizers = pytest.importorskip("jinja2.sandbox"), pytest.importorskip("tokenizers")
    words, folder = tokenizer_of(kind), "same-" + kind
    write_rows(SAID)
    makes("--row-tokens", 4096, "--val-tokens", 0, out=folder, kind=words)
    path, = glob.glob(folder + "/*_train_*.bin")
    tokens, mask = array.array("H", read(path)[1024:]).tolist(), read(path.removesuffix(".bin") + ".mask")
    V = {"bytes": 256, "gpt2": 50257}.get(kind, 700)
    files = export_hf.tokenizer_files(types.SimpleNamespace(maxT=8), export_hf.words_of(V, folder),
                                      export_hf.CHAT_TEMPLATES[1])
    assert kind != "gpt2" or tokenizer_files.tokenizer_id(files["tokenizer.json"]) == tokenizer_files.GPT2_ID
    encoder = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    template = jinja2.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(
        json.loads(files["tokenizer_config.json"])["chat_template"])

    def rendered(said, **more):
        text = template.render(messages=messages(*said), eos_token=END, **more)
        return encoder.encode(text, add_special_tokens=False).ids

    end = encoder.token_to_id(END)
    for said in SAID:
        want = rendered(said)
        at = next(i for i in range(len(tokens)) if tokens[i:i + len(want)] == want)
        counted = mask[at:at + len(want)]
        assert want.count(end) == 1 + sum(role == "a" for role, _ in said) and want[0] == end
        begins = [i for i in range(1, len(want)) if counted[i] and (not counted[i - 1] or want[i - 1] == end)]
        asked = [rendered(said[:i], add_generation_prompt=True) for i, (role, _) in enumerate(said)
                 if role == "a"]
        assert [want[:i] for i in begins] == asked
        assert all(counted[i] for i in range(1, len(want)) if want[i] == end) and not counted[0]
        tokens[at:at + len(want)] = [-1] * len(want)
    assert set(tokens) <= {-1, end}


# Chat templates in the manner of ChatML, Llama 3, Zephyr, Mistral and Qwen3, and what they make of OWN_SAID;
# between \1 and \2 is what counts.
OWN_SAID = [("s", "S "), ("u", " Q"), ("a", "A "), ("u", "<|im_end|>"), ("a", "B</s>")]
ASKS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
          "{% generation %}{{ m.content + '<|im_end|>' }}{%- endgeneration %}{{ '\\n' }}{% endfor %}" + ASKS)
OWN_TEMPLATES = {
    CHATML: "<|im_start|>system\nS <|im_end|>\n<|im_start|>user\n Q<|im_end|>\n<|im_start|>assistant\n"
            "\1A <|im_end|>\2\n<|im_start|>user\n{im_end}<|im_end|>\n<|im_start|>assistant\n"
            "\1B{eos}<|im_end|>\2\n",
    "{{ bos_token -}}\n{% for m in messages %}\n    {% if m.role == 'system' %}\n{% continue %}{% endif %}"
    "{{ m.role + ':' + m.content | trim + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}":
            "<s>user:Q</s>assistant:\1A</s>\2user:{im_end}</s>assistant:\1B{eos}</s>\2",
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' ~ m.content ~ '[/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' ~ m.content ~ eos_token }}{% endif %}{% endfor %}":
            "[INST] Q[/INST]\1 A </s>\2[INST]{im_end}[/INST]\1 B{eos}</s>\2",
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if loop.last and m.role == 'assistant' %}"
    "{{ '<think></think>' }}{% endif %}{{ m.content + '<|im_end|>' }}{% endfor %}" + ASKS:
            "<|im_start|>system\nS <|im_end|><|im_start|>user\n Q<|im_end|><|im_start|>assistant\n"
            "\1A <|im_end|>\2<|im_start|>user\n{im_end}<|im_end|><|im_start|>assistant\n"
            "\1<think></think>B{eos}<|im_end|>\2"}
SPECIAL = "<s>", "</s>", "<|im_start|>", "<|im_end|>"


def own_template(template, folder="tok", settings=True):
    """A tokenizer of bytes with four special tokens more. Those in messages are text."""
    vocab, _ = tokenizer_files.vocabulary([])
    fast = json.loads(tokenizer_files.tokenizer_json(vocab, []))
    fast["added_tokens"] += [{**fast["added_tokens"][0], "id": 257 + i, "content": text}
                             for i, text in enumerate(SPECIAL)]
    write(folder + "/tokenizer.json", json.dumps(fast))
    write(folder + "/tokenizer.bin", tokenizer_files.tokenizer_bin(json.dumps(fast).encode(), END))
    if settings:
        write(folder + "/tokenizer_config.json", json.dumps(
            {"chat_template": template, "bos_token": "<s>", "eos_token": {"content": "</s>"}, "x_token": 0}))
    else:
        write(folder + "/chat_template.jinja", template)
    return folder


@pytest.mark.parametrize("template", OWN_TEMPLATES)
def test_own_template(template):
    """A conversation's tokens are those of what its tokenizer's template writes; its answers count, each with
    its end."""
    pytest.importorskip("jinja2")
    package = pytest.importorskip("tokenizers").Tokenizer
    write_rows([OWN_SAID])
    words = ["--tokenizer", own_template(template)]
    out = makes("--row-tokens", 300, "--val-tokens", 0, "--restart", kind=words)
    assert "written by the chat template of 'tok'" in out
    encoder, ids, counted = package.from_file("tok/tokenizer.json"), [256], [0]
    for part in OWN_TEMPLATES[template].replace("\2", "\1\2").split("\1"):
        in_answer, part = not part.startswith("\2") and len(ids) > 1, part.removeprefix("\2")
        for text in re.split(r"({\w+})", part):      # a special token in a message is text
            encoder.encode_special_tokens = text.startswith("{")
            text = {"{im_end}": "<|im_end|>", "{eos}": "</s>"}.get(text, text)
            found = encoder.encode(text, add_special_tokens=False).ids
            ids, counted = ids + found, counted + [int(in_answer)] * len(found)
    path, = glob.glob("qa/qa_train_*.bin")
    tokens, mask = array.array("H", read(path)[1024:]).tolist(), list(read("qa/qa_train_000001.mask"))
    assert tokens[:len(ids)] == ids and mask[:len(ids)] == counted
    assert set(tokens[len(ids):]) == {256} and not any(mask[len(ids):])
    assert array.array("i", read(path)[:1024])[SHARD_CHAT] == 0
    makes("--row-tokens", 300, "--val-tokens", 0, "--restart", "--last-answer", kind=words)
    last = len(ids) - 1 - counted[::-1].index(0, counted[::-1].index(1))
    assert list(read("qa/qa_train_000001.mask"))[:len(ids)] == [0] * (last + 1) + counted[last + 1:]


# As Llama 3.2's begins, and asks for an answer
DATED = ("{{- bos_token }}\n{%- if not date_string is defined %}\n    {%- if strftime_now is defined %}\n"
         "        {%- set date_string = strftime_now(\"%d %b %Y\") %}\n    {%- else %}\n"
         "        {%- set date_string = \"26 Jul 2024\" %}\n    {%- endif %}\n{%- endif %}\n"
         "{{- 'Today Date: ' + date_string + '\n' }}{%- for m in messages %}"
         "{{- '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>' }}{%- endfor %}"
         "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}")


def test_day(monkeypatch):
    """A template writes today's date, as transformers lets it; a set has one day."""
    pytest.importorskip("jinja2")
    package = pytest.importorskip("tokenizers").Tokenizer
    write_rows([OWN_SAID])
    words = ["--row-tokens", 300, "--val-tokens", 0]
    kind = ["--tokenizer", own_template(DATED)]
    for epoch, date, more in (("1764374400", "29 Nov 2025", []), (None, "%d %b %Y", ["--restart"])):
        monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
        before = datetime.date.today()
        if epoch:
            monkeypatch.setenv("SOURCE_DATE_EPOCH", epoch)
        makes(*words, *more, out="dated", kind=kind)
        path, = glob.glob("dated/dated_train_*.bin")
        tokens = array.array("H", read(path)[1024:]).tolist()
        text = package.from_file("tok/tokenizer.json").decode(tokens, skip_special_tokens=False)
        days = {f"{day:{date}}" for day in (before, datetime.date.today())}         # it may be midnight
        assert any(text.startswith(END + "<s>Today Date: " + day + "\n<|im_start|>system\nS<|im_end|>")
                   for day in days), text[:80]
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1764374400")
    code, _, err = get_answers(*words, out="dated", kind=kind)
    assert code == 1 and "error: 'dated' was begun with day '20" in err and "'2025-11-29'" in err, err


def test_own_template_refused():
    pytest.importorskip("jinja2")
    pytest.importorskip("tokenizers")
    write_rows([OWN_SAID])
    missing, fails = "message 3, an answer, is not found", "the tokenizer's chat template fails"
    for template, said in (("{% for m in messages %}{{ m.content + '\n' }}{% endfor %}", missing),  # no end
                           (CHATML.replace("messages %}", "messages[::-1] %}"), missing),
                           (CHATML.replace("m.content +", "m.content | upper + 'x' +"), missing),
                           (CHATML.replace("m.content", "'no'"), missing),
                           ("{{ raise_exception('Roles must') }}", f"line 1: {fails}: Roles must"),
                           ("{{ messages.clear() }}", fails), ("{{ strftime_now(3) }}", fails),
                           ("{% for %}", f"'tok': {fails}")):
        refused(said, kind=["--tokenizer", own_template(template)])
    words = ["--tokenizer", own_template("{{ bos_token }}" + CHATML, "bare", settings=False)]
    refused("'bare' has no tokenizer_config.json, which says what bos_token", kind=words)


@pytest.mark.parametrize("change", [lambda added: added[0].update(single_word=True), list.clear])
def test_an_end_that_is_no_token(change):
    """Between two texts it would be other tokens: no shards are better."""
    pytest.importorskip("tokenizers")
    fast = json.loads(read(os.path.join(ROOT, "dev/test/fixtures/own.json")))
    change(fast["added_tokens"])
    write("no-end.json", json.dumps(fast))
    write_rows(SAID)
    code, _, err = get_answers(out="no-end", kind=["--tokenizer", "no-end.json"])
    assert code == 1 and f"error: '{END}' between two texts is no token by this tokenizer" in err, err


def test_questions():
    """Each part's tokens are those that it has in the whole text, also where a part alone gets a blank."""
    tokenizers, choices = pytest.importorskip("tokenizers"), __import__("choices")
    path = tokenizer_of("always")[1]
    ours, theirs = any_tokenizer(path, END), tokenizers.Tokenizer.from_file(path)
    for last in False, True:
        rows = [("so so", [" so x", " Hi", "2"], 0)] if not last else [(" so x", ["so Hi", "so 2"], 0)]
        parts = iter(choices.encode_wholes(ours, rows, last))
        for context, completions, _ in rows:
            common, others = next(parts), [next(parts) for _ in completions]
            for text, other in zip(completions, others):
                whole, tokens = (text + context, other + common) if last else (context + text, common + other)
                assert tokens == theirs.encode(whole, add_special_tokens=False).ids
        assert next(parts, None) is None


def test_stale_tokenizer():
    """A set that is made anew by a tokenizer without a tokenizer.bin keeps none of another."""
    pytest.importorskip("tokenizers")
    write("stale.txt", "so so Hi\n" * 40)
    fast = json.loads(read(tokenizer_of("always")[1]))
    write("fuse.json", json.dumps({**fast, "decoder": None}))
    for name, there in (("always-tok", True), ("fuse.json", False)):
        words = "--out", "stale", "--tokenizer", name, "--restart"
        code, _, err = run_get("files", "--from", "stale.txt", *words)
        assert code == 0 and os.path.exists("stale/tokenizer.bin") == there, err


def test_exported_folder():
    """Its tokenizer.json drops marks, and is still the run's tokenizer, for shards, runs, exports."""
    pytest.importorskip("tokenizers")
    tokenizer_of("own")
    write_rows(SAID)
    makes("--row-tokens", 64, out="chats", kind=["--tokenizer", "own-tok"])
    flags = {**USUAL, "-e": "L1,NH2,C16,T64,V700", "-t": 64, "-b": 1, "-x": 1, "-n": 1, "-v": 0}
    run_ok({**flags, "-i": "chats/chats_train_*.bin", "-o": "chatty"})
    program = [sys.executable, os.path.join(ROOT, "dev/hf.py")]
    run_export = [*program, "export"]
    assert run_program([*run_export, "chatty", "chatty-hf"])[0] == 0
    assert run_program([*program, "import", "chatty-hf"])[0] == 0
    assert read("chatty-hf/tokenizer.json") != read("chatty/tokenizer.json")
    number, *exported = (tokenizer_files.read_head(f + "/tokenizer.bin") for f in ("chatty", "chatty-hf"))
    assert exported[0]._replace(exported=0) == number and not number.exported
    write("plain.txt", "日本語です。 a\n" * 30)
    for name, tokenizer in (("by-run", "chatty"), ("by-export", "chatty-hf")):
        code, _, err = run_get("files", "--from", "plain.txt", "--out", name, "--tokenizer", tokenizer)
        assert code == 0 and not err, err
    assert read("by-run/by-run_train_000001.bin") == read("by-export/by-export_train_000001.bin")
    run_ok({**flags, "-e": "models/chatty-hf", "-i": "by-export/by-export_train_*.bin", "-o": "again"})
    assert run_program([*run_export, "again", "again-hf"])[0] == 0
    assert read("again-hf/tokenizer.json") == read("chatty-hf/tokenizer.json")
    package = __import__("tokenizers").Tokenizer
    plain, marks = (package.from_file(f + "/tokenizer.json") for f in ("chatty", "chatty-hf"))
    for text in ("日本語です。 a\n b", END + " a" + END, read(os.path.join(ROOT, "README.md")).decode()):
        assert plain.encode(text).ids == marks.encode(text).ids
