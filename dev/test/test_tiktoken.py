"""Our tokenizer against tiktoken. The encoding is built from the committed list of merges, without a network.
`make test` compares the fixture alone, which test_tokenizer.cpp holds our tokens against; the rest is slow.

    python3 dev/test/test_tiktoken.py                   # writes fixtures/tokenizer.{txt,ids} anew
"""
import functools
import os
import random
import subprocess
from array import array

import pytest

from checks import ROOT, read, write

tiktoken = pytest.importorskip("tiktoken")
TOOL = os.path.join(ROOT, "build/tokenize")
VOCAB = os.path.join(ROOT, "dev/data/gpt2_bpe/vocab.bpe")
FIXTURE = os.path.join(ROOT, "dev/test/fixtures/tokenizer")
PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
EOT = 50256


def gpt2_ranks(path):
    """Token bytes -> id, from the list of merges: first the bytes (printable ones first), then the merges."""
    printable = [b for b in range(256) if 0x20 < b < 0x7F or 0xA0 < b and b != 0xAD]
    order = printable + [b for b in range(256) if b not in printable]
    byte_of = {chr(b): b for b in printable}
    byte_of.update({chr(256 + i): b for i, b in enumerate(order[len(printable):])})
    ranks = {bytes([b]): i for i, b in enumerate(order)}
    for line in read(path).decode().split("\n")[1:-1]:
        ranks[bytes(byte_of[c] for c in line.replace(" ", ""))] = len(ranks)
    return ranks


@functools.cache
def gpt2():
    return tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=gpt2_ranks(VOCAB),
                             special_tokens={"<|endoftext|>": EOT})


def run_tool(*words):
    return subprocess.run([TOOL, *words, "--vocab", VOCAB], check=True, stdout=subprocess.PIPE).stdout


def check(data, theirs):
    """Our program's ids of these bytes, taken as one text, are theirs, and decode to the bytes."""
    write("in.txt", data)
    run_tool("in.txt", "-o", "out", "--separators", "0", "--val-tokens", "0")
    ours, theirs = array("H", read("out_train.bin")[1024:]), array("H", theirs)
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
    near = gpt2().decode_bytes(theirs[max(0, at - 8):at + 4])
    assert ours == theirs, f"token {at} of {len(theirs)}, near {near!r}"
    assert run_tool("--decode", "out_train.bin", "--separators", "0") == data


# ---- texts ----

WORDS = ("the of and to in a is that for it as was with be by on not he this are or his from at which but "
         "have an had they you were their one all we can her has there been if more when will would who so "
         "no GPU trainer token gradient Embedding HTTP float16 naïve café Übergröße façade señor Łódź "
         "привет мир слово данные здравствуйте "
         "γλώσσα αλφάβητο שלום עולם مرحبا العالم हिन्दी भाषा ภาษาไทย 日本語 テキスト 中文分词 漢字 한국어 문장 ქართული አማርኛ "
         "I'm you're it's they've we'll he'd can't don't I'M YOU'RE O'Reilly rock'n'roll 'tis s's 's't "
         "'ll've").split()
SPACES = [" ", " ", " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", " \n", "\n ", "\u00a0", "\u2003", "\u3000",
          "\u0085", "\u2028", "\u200b", "\x1c", "\x0b", "\x0c", " \u00a0", "\u00a0 ", "\t\t\t", "        "]
EMOJI = "😀 👍🏽 👩‍👩‍👧‍👦 🇫🇷 ❤️ 🏳️‍🌈 🧑🏿‍🚀 ✨ © ™️ 5️⃣ \U0001fae0".split()
MARKS = list(".,;:!?-_()[]{}<>/\\|@#$%^&*+=~`\"'")
MARKS += ["...", "--", "->", "==", "!=", "://", "'''", "\"\"\"", "<|endoftext|>", *"—…“”’«»•₿\u0301\u20dd"]
NUMBERS = "0 7 42 1234567890 3.14159 1e-5 0x7fff ² ½ Ⅷ ٣٤ ४२ ①② 100,000".split()


def generate(rng, size):
    """Valid text of about size bytes: words in many scripts, code, blanks, emoji, any code points, runs."""
    pools = [WORDS + SPACES * 3, WORDS + SPACES * 3, MARKS + NUMBERS + SPACES + WORDS, SPACES,
             EMOJI + SPACES[:6] + MARKS[:8], [chr(c) for c in range(128)], list("etaoinshrdlucmf") + [" "],
             [chr(rng.randrange(top)) for top in (0x250, 0x3000, 0xD800, 0xD800) * 100],
             [chr(rng.randrange(0x10000, 0x110000)) for _ in range(100)]]
    parts, length = [], 0
    while length < size:
        part = "".join(rng.choices(rng.choice(pools), k=rng.randrange(1, 60)))
        parts.append(part if rng.random() < 0.95 else part[:2] * rng.randrange(1, 300))
        length += len(parts[-1].encode())
    return "".join(parts)


def every_code_point(before, after):
    """Side by side, 700,000 that stand for nothing would be one piece, over which tiktoken spends a minute.
    Each 512 end it then, with a mark that belongs to it only if they are no letters, numbers or spaces."""
    ends = {511: "!\n"} if not before + after else {}
    return "".join(before + chr(cp) + after + ends.get(cp % 512, "") for cp in range(1, 0x110000)
                   if not 0xD800 <= cp < 0xE000)


# ---- tests ----

def test_fixture():
    text, ids = read(FIXTURE + ".txt").decode(), read(FIXTURE + ".ids")
    assert array("H", gpt2().encode_ordinary(text)).tobytes() == ids


@pytest.mark.slow
@pytest.mark.parametrize("before, after", [("", ""), (" ", "x"), ("a", "b "), ("1", "2"), ("!", "?\n"),
                                           ("  ", " "), ("'", "s"), ("\n", "\n x")])
def test_every_code_point(before, after):
    text = every_code_point(before, after)
    check(text.encode(), gpt2().encode_ordinary(text))


@pytest.mark.slow
def test_texts():
    text = generate(random.Random(1), 1000000).replace("\0", "")
    check(text.encode(), gpt2().encode_ordinary(text))


if __name__ == "__main__":
    fixture = " ".join(WORDS) + "\n" + generate(random.Random(1), 40000)
    write(FIXTURE + ".txt", fixture)
    write(FIXTURE + ".ids", array("H", gpt2().encode_ordinary(fixture)).tobytes())
