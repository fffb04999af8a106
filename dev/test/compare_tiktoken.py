#!/usr/bin/env python3
"""Our tokenizer against tiktoken, live. Needs `pip install tiktoken` (no network after that: the encoding is
built from the committed list of merges); without it everything is skipped, and test_tokenizer's fixture has
to do.

    python3 dev/test/compare_tiktoken.py                                    # a few MB, in `make test-all`
    python3 dev/test/compare_tiktoken.py --mb 60 --text big.txt             # more generated text, and files
    python3 dev/test/compare_tiktoken.py --speed big.txt --threads 1 2      # MB/s of both, and the ratio
    python3 dev/test/compare_tiktoken.py --write-fixture                    # fixtures/tokenizer.{txt,ids}
"""
import argparse
import os
import random
import re
import struct
import subprocess
import sys
import tempfile
import time
from array import array

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
VOCAB = os.path.join(ROOT, "dev", "data", "gpt2_bpe", "vocab.bpe")
FIXTURE = os.path.join(ROOT, "dev", "test", "fixtures", "tokenizer")
PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
EOT = 50256
SHARD_HEADER = 1024


def gpt2_ranks(path):
    """Token bytes -> id, from the list of merges: first the bytes (printable ones first), then the merges."""
    printable = [b for b in range(256) if 0x20 < b < 0x7F or 0xA0 < b and b != 0xAD]
    order = printable + [b for b in range(256) if b not in printable]
    byte_of = {chr(b): b for b in printable}
    byte_of.update({chr(256 + i): b for i, b in enumerate(order[len(printable):])})
    ranks = {bytes([b]): i for i, b in enumerate(order)}
    with open(path, encoding="utf-8") as f:
        for line in f.read().split("\n")[1:-1]:
            ranks[bytes(byte_of[c] for c in line.replace(" ", ""))] = len(ranks)
    return ranks


def ids_of_tool(tool, data):
    """The ids our program writes for these bytes taken as one text."""
    with tempfile.TemporaryDirectory() as folder:
        with open(folder + "/in.txt", "wb") as f:
            f.write(data)
        command = [tool, folder + "/in.txt", "-o", folder + "/out", "--separators", "0", "--val-tokens", "0",
                   "--vocab", VOCAB]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with open(folder + "/out_train.bin", "rb") as f:
            return array("H", f.read()[SHARD_HEADER:])


def text_of_tool(tool, ids):
    """The bytes our program prints for these ids."""
    with tempfile.TemporaryDirectory() as folder:
        with open(folder + "/in.bin", "wb") as f:
            f.write(struct.pack("<256i", 20240520, 1, len(ids), *[0] * 253) + ids.tobytes())
        return subprocess.run([tool, "--decode", folder + "/in.bin", "--separators", "0", "--vocab", VOCAB],
                              check=True, stdout=subprocess.PIPE).stdout


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
EMOJI = ["😀", "👍🏽", "👩‍👩‍👧‍👦", "🇫🇷", "❤️", "🏳️‍🌈", "🧑🏿‍🚀", "✨", "©", "™️", "5️⃣", "\U0001fae0"]
MARKS = list(".,;:!?-_()[]{}<>/\\|@#$%^&*+=~`\"'")
MARKS += ["...", "--", "->", "==", "!=", "://", "'''", "\"\"\"", "<|endoftext|>",
          "—", "…", "“", "”", "’s", "«", "»", "•", "₿", "\u0301", "\u20dd"]
NUMBERS = ["0", "7", "42", "1234567890", "3.14159", "1e-5", "0x7fff", "²", "½", "Ⅷ",
           "٣٤", "४२", "①②", "100,000"]


def random_char(rng):
    top = rng.choice([0x80, 0x100, 0x250, 0x3000, 0x10000, 0x20000, 0x110000])
    cp = rng.randrange(top)
    return chr(cp) if not 0xD800 <= cp < 0xE000 else "\ufffd"


def generate(rng, size):
    """Valid text of about size bytes: words in many scripts, code, blanks, emoji, any code points, runs."""
    parts, length = [], 0
    while length < size:
        kind = rng.random()
        if kind < 0.50:
            part = "".join(rng.choice(WORDS) + rng.choice(SPACES) for _ in range(rng.randrange(1, 30)))
        elif kind < 0.60:
            part = "".join(rng.choice(MARKS + NUMBERS + SPACES + WORDS) for _ in range(rng.randrange(1, 30)))
        elif kind < 0.68:
            part = "".join(rng.choice(EMOJI + SPACES[:6] + MARKS[:8]) for _ in range(rng.randrange(1, 12)))
        elif kind < 0.78:
            part = "".join(random_char(rng) for _ in range(rng.randrange(1, 40)))
        elif kind < 0.86:
            part = "".join(rng.choice(SPACES) for _ in range(rng.randrange(1, 12)))
        elif kind < 0.92:
            part = "".join(chr(rng.randrange(128)) for _ in range(rng.randrange(1, 60)))
        elif kind < 0.97:
            part = "".join(rng.choice("etaoinshrdlucmf") for _ in range(rng.randrange(1, 90)))
            part += rng.choice(SPACES)
        else:
            unit = rng.choice(["a", " ", "\n", "=", "-", "0", "ab", "=-", "é", "日", "😀", "\u00a0"])
            part = unit * rng.randrange(1, 300)
        parts.append(part)
        length += len(part.encode())
    return "".join(parts)


def endless(rng, size):
    """Texts that are one piece, with the kind of each."""
    def runs(letters):
        return "".join(rng.choice(letters) * rng.randrange(1, 300) for _ in range(size // 150))
    yield "random letters", "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=size))
    yield "random digits", "".join(rng.choices("0123456789", k=size))
    yield "runs of punctuation", runs("-=*_#.")
    yield "runs of blanks", runs(" \n\t\u3000")
    yield "runs of letters", runs("aeno\u00c2\u00c3\u3042")
    for unit in ("a", " ", "-", "\u00c3\u00c2"):
        yield f"nothing but {unit!r}", unit * (size // len(unit.encode()))


def every_code_point(before, after):
    """Side by side, 700,000 that stand for nothing would be one piece, over which tiktoken spends a minute.
    Each 512 end it then, with a mark that belongs to it only if they are no letters, numbers or spaces."""
    ends = {511: "!\n"} if not before + after else {}
    return "".join(before + chr(cp) + after + ends.get(cp % 512, "") for cp in range(0x110000)
                   if not 0xD800 <= cp < 0xE000)


def broken_bytes(rng, size):
    """Text with pieces of UTF-8 that are not well formed."""
    bad = [b"\x80", b"\xbf", b"\xc0\x80", b"\xc3", b"\xe2\x82", b"\xed\xa0\x80", b"\xf0\x9f\x98",
           b"\xf4\x90\x80\x80", b"\xf5", b"\xff", b"\xfe\xff", b"\xe0\x80\xaf", b"\xc2",
           b"\xf0\x80\x80\x80", b"\xe2\x28\xa1"]
    out = bytearray()
    while len(out) < size:
        out += rng.choice(bad) if rng.random() < 0.4 else rng.choice(WORDS + SPACES + MARKS + EMOJI).encode()
    return bytes(out)


# ---- checks ----

class Results:
    def __init__(self):
        self.passed = self.failed = self.skipped = 0

    def check(self, name, ok, detail=""):
        self.passed, self.failed = self.passed + bool(ok), self.failed + (not ok)
        print(f"{'ok' if ok else 'FAIL'}: {name}{': ' + detail if detail else ''}", flush=True)

    def close(self):
        print(f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped")
        sys.exit(1 if self.failed else 0)


def first_difference(ours, theirs, token_bytes):
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
    context = b"".join(token_bytes[t] for t in theirs[max(0, at - 8):at + 4])
    return (f"token {at} of {len(theirs)}: ours {list(ours[at:at + 6])}, tiktoken {list(theirs[at:at + 6])}, "
            f"near {context!r}")


def compare(results, tool, encoding, token_bytes, name, text, one_piece=False):
    data = text.encode()
    if one_piece:                       # tiktoken's regular expression runs out of stack in such texts
        theirs = array("H", encoding._core_bpe.encode_single_piece(data))
    else:
        theirs = array("H", encoding.encode_ordinary(text))
    ours = ids_of_tool(tool, data)
    same = ours == theirs
    results.check(f"{name}, {len(data) / 1e6:.1f} MB, {len(theirs)} tokens", same,
                  "" if same else first_difference(ours, theirs, token_bytes))
    results.check(f"{name}: decodes to the same bytes", text_of_tool(tool, ours) == data)


def compare_broken(results, tool, encoding, token_bytes, data):
    """tiktoken takes no broken text, so cut it with the same pattern in Python, each bad byte as a character
    of its own that is no letter, number or space, and let tiktoken merge every piece."""
    import regex
    pieces = regex.findall(PATTERN, data.decode("utf-8", "surrogateescape"))
    raw = [p.encode("utf-8", "surrogateescape") for p in pieces]
    theirs = array("H", [t for p in raw for t in encoding._core_bpe.encode_single_piece(p)])
    ours = ids_of_tool(tool, data)
    same = ours == theirs
    results.check(f"broken UTF-8, {len(data)} bytes", same,
                  "" if same else first_difference(ours, theirs, token_bytes))
    results.check("broken UTF-8: decodes to the same bytes", text_of_tool(tool, ours) == data)


def compare_speed(results, tool, encoding, path, threads):
    with open(path, "rb") as f:
        data = f.read()
    documents = re.split(r"(?m)^<\|endoftext\|>\n", data.decode("utf-8", "replace"))
    for n in threads:
        theirs = ours = float("inf")
        for _ in range(2):
            start = time.perf_counter()
            encoding.encode_ordinary_batch(documents, num_threads=n)
            theirs = min(theirs, time.perf_counter() - start)
            with tempfile.TemporaryDirectory() as folder:
                out = subprocess.run([tool, path, "-o", folder + "/out", "-j", str(n), "--val-tokens", "0",
                                      "--vocab", VOCAB],
                                     check=True, stdout=subprocess.PIPE, text=True).stdout
            took = re.search(r"tokens in ([0-9.]+) s", out).group(1)        # reading and writing included
            ours = min(ours, float(took))
        mb = len(data) / 1e6
        results.check(f"at least 3x tiktoken's speed with {n} thread(s)", theirs >= 3 * ours,
                      f"ours {mb / ours:.1f} MB/s, tiktoken {mb / theirs:.1f}, ratio {theirs / ours:.1f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tool", help="our program (default: build/tokenize)")
    parser.add_argument("--mb", type=float, default=1, help="MB of generated text")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--text", nargs="*", default=[], help="files to compare as well")
    parser.add_argument("--speed", help="only time both on this file")
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--write-fixture", action="store_true", help="only write the fixture")
    args = parser.parse_args()
    results = Results()
    try:
        import tiktoken
    except ImportError:
        results.skipped = 1
        print("SKIP: no tiktoken\nhint: pip install tiktoken")
        results.close()
    ranks = gpt2_ranks(VOCAB)
    token_bytes = {i: b for b, i in ranks.items()}
    encoding = tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks,
                                 special_tokens={"<|endoftext|>": EOT})
    rng = random.Random(args.seed)

    if args.write_fixture:
        text = " ".join(WORDS) + "\n" + generate(rng, 40000)
        with open(FIXTURE + ".txt", "wb") as f:
            f.write(text.encode())
        with open(FIXTURE + ".ids", "wb") as f:
            array("H", encoding.encode_ordinary(text)).tofile(f)
        print(f"wrote {FIXTURE}.txt and .ids with tiktoken {tiktoken.__version__}")
        return

    tool = os.path.abspath(args.tool or os.path.join(ROOT, "build", "tokenize"))
    if not os.path.exists(tool):
        sys.exit(f"error: there is no {tool}\nhint: make tokenize, or --tool PATH")
    if args.speed:
        compare_speed(results, tool, encoding, args.speed, args.threads)
        results.close()

    with tempfile.NamedTemporaryFile() as f:
        subprocess.run([tool, "--write-vocab", f.name, "--vocab", VOCAB], check=True)
        with open(f.name, "rb") as g:
            table = g.read()
        want = struct.pack("<256i", 20240328, 2, EOT + 1, EOT, *[0] * 252)
        for token in map(encoding.decode_single_token_bytes, range(EOT + 1)):
            want += bytes([len(token)]) + token
        results.check("gpt2_tokenizer.bin holds tiktoken's tokens", table == want)
    with open(FIXTURE + ".txt", "rb") as f, open(FIXTURE + ".ids", "rb") as g:
        results.check("the fixture is what tiktoken says today",
                      array("H", encoding.encode_ordinary(f.read().decode())).tobytes() == g.read())
    for before, after in (("", ""), (" ", "x"), ("a", "b "), ("1", "2"), ("!", "?\n"), ("  ", " "),
                          ("'", "s"), ("\n", "\n x")):
        compare(results, tool, encoding, token_bytes, f"every code point between {before!r} and {after!r}",
                every_code_point(before, after))
    for name, text in endless(rng, 20000):
        compare(results, tool, encoding, token_bytes, name, text, one_piece=True)
    size = args.mb
    while size > 0:                                     # in parts, so that a difference is easy to see
        text = generate(rng, int(min(size, 10) * 1e6))
        compare(results, tool, encoding, token_bytes, "generated text", text)
        size -= 10
    compare_broken(results, tool, encoding, token_bytes, broken_bytes(rng, 300000))
    for path in args.text:
        with open(path, "rb") as f:
            text = f.read().decode("utf-8", "replace")
        compare(results, tool, encoding, token_bytes, os.path.basename(path), text)
    results.close()


if __name__ == "__main__":
    main()
