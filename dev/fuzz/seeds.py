"""The seeds of every fuzz target: small inputs, from which libFuzzer makes wrong ones (dev/fuzz/fuzz.cpp says
what their first bytes mean). What fuzzing finds becomes one of them, as found-SOMETHING, when it is mended.

    SEEDS["shard"]["good"]                  # bytes
"""
import struct


# ---- files of the trainer, in a few lines each ----

def header(*numbers):
    return struct.pack("<256i", *numbers, *[0] * (256 - len(numbers)))


def shard(T, V, tokens, *numbers, code="H"):
    return struct.pack("<BHB", T - 1, V - 1, 0) + header(*numbers) + \
        struct.pack(f"<{len(tokens)}{code}", *tokens)


def question(number, label, *texts, code="H"):
    words = [number, label, len(texts) - 1] + [word for text in texts for word in (len(text), *text)]
    return struct.pack(f"<{2 + len(words)}{code}", 65535, struct.calcsize(code) * (2 + len(words)), *words)


def questions(B, T, V, body, *more, fit=0, version=1):
    return struct.pack("<BBHB", B - 1, T - 1, V - 1, fit) + header(20240522, version, *more) + body


def model(version, T, V, L, NH, C, Vp, first=b"\0"):
    values = [(i * 37 % 101 - 50) / 64 for i in range((Vp + T + 2) * C + L * (13 * C + 12 * C * C))]
    floats = [struct.pack("<f", value) for value in values]
    raw = b"".join(value[2:] if version == 5 else value for value in floats)
    return first + header(20240326, version, T, V, L, NH, C, Vp) + raw


def row(name, kind, rows, cols, begin, count):
    return struct.pack("<64s16s6Q", name.encode(), kind.encode(), rows, cols, begin, count, 0, 0)


def state(rows, facts, data_bytes, first=b"\3"):
    size = 64 + 128 * len(rows) + len(facts) + data_bytes
    head = struct.pack("<8s2I6Q", b"GPT2STAT", 1, len(rows), len(facts), size, 0, 0, 0, 0)
    return first + head + b"".join(rows) + facts + bytes(i % 256 for i in range(data_bytes))


def flags(ranks, text):
    return bytes([ranks - 1]) + b"".join(word.encode() + b"\0" for word in text.split())


# ---- the seeds ----

TOKENS = list(range(20))
BODY = question(0, 3, TOKENS, [1], [2], [3, 4], [5]) + question(1, 0, [9], [1] * 40, [2], [3], [5])
WIDE_BODY = question(0, 1, TOKENS, [1], [2, 3], code="I") + question(1, 0, [9], [1] * 40, [2], code="I")
ROWS = [row("params.wte", "f32", 4, 2, 0, 8), row("m.qkvw.3", "bf16", 4, 6, 3, 5)]
FACTS = b"step=12\ntext=two\\nlines, a \\\\\n"
TEXT = "It's 3 o'clock, isn't it?  We'll see;\n\n\n I've\t12345 caf\u00e9 \u4f60\u597d \U0001f600 ".encode()
MERGES = b"".join(bytes([len(token)]) + token for token in
                  (b"ab", b"abc", b"bc", b" a", b"12", b"  ", b"\n\n", b"eot"))
VOCAB = header(20240328, 2, 258, 257) + b"".join(bytes([1, b]) for b in range(256)) + b"\2ab\3eot"
DESCRIPTORS = ["d12", "gpt3:c768", "L4,NH4,C128,T128,V256", "V65536,T16777216,C8,NH1,L9"]
SEEDS = {
    "shard": {
        "good": shard(4, 256, TOKENS, 20240520, 1, 20),
        "wide": shard(4, 256, TOKENS, 20240801, 7, 20, code="I"),
        "id-too-large": shard(3, 10, TOKENS, 20240520, 1, 20)},
    "questions": {
        "good": questions(2, 64, 256, BODY, 2, 114, 1),
        "wide": questions(2, 64, 256, WIDE_BODY, 2, 200, 1, version=2),
        "fit": questions(3, 5, 256, BODY, fit=1),
        "few": questions(2, 4, 256, question(0, 0, [9], [1, 2]) + question(1, 1, [3], [1], [2]), 2, 22, 1, 1),
        "cut": questions(1, 8, 256, BODY[:-3], 2, 114)},
    "model": {
        "fp32": model(3, 2, 3, 1, 1, 2, 8),
        "bf16": model(5, 1, 8, 2, 2, 2, 8),
        "one-channel": model(3, 1, 2, 1, 1, 1, 8, b"\1"),
        "checksum": model(3, 2, 3, 1, 1, 2, 8, b"\2")},
    "state": {
        "good": state(ROWS, FACTS, 4 * 8 + 2 * 5),
        "bare": state([], b"", 0),
        "bad-checksum": state(ROWS, FACTS, 4 * 8 + 2 * 5, b"\1")},
    "tokens": {
        "bpe": b"\1" + TEXT,
        "bytes": b"\0" + TEXT,
        "broken-utf8": b"\1a\xc3 \xe2\x82 \xf0\x9f\x98 \xed\xa0\x80 \xc0\x80 \xff\xfe",
        "long-piece": b"\1" + b"abcabcabd" * 40,
        "blanks": b"\1" + b" " * 150 + b"x" + b"\n " * 60},
    "vocab": {
        "merges": b"\2" + MERGES,
        "file": b"\0" + VOCAB,
        "merge-list": b"\1#version: 0.2\n\xc4\xa0 t\n\xc4\xa0 a\nh e\ni n\n"},
    "flags": {
        "usual": flags(1, "-e d12 -b 64 -t 1024 -z 524288 -l 6e-4 -u 700 -q 0 -c 0.1 -x 19073 -v 250 "
                       "-o runs/d12"),
        "equals": flags(2, "--micro-batch=2 --model=L4,NH4,C128,T128,V256 -zs=1 --prompt=-b -x=epoch "
                        "--lanes=4 -z=4096 --matmul-dtype=bf16"),
        "enums": flags(1, "-k linear --kernels portable --grad-dtype fp32 -pi tcp -ps host:80 --seed 7"),
        "floats": flags(3, "--beta1 .9 --beta2=0.95 --eps 1E-8 --temperature 5. --grad-clip 1e30 -f 0 -r 2 "
                        "-w 0")},
    "descriptor": {text.replace(":", "_"): text.encode() for text in DESCRIPTORS},
    "json": {
        "text": 'a "quoted" \\ word\n\t\x7f caf\u00e9 \U0001f600'.encode(),
        "not-utf8": b"a\xff\xc3 \xe2\x82 \xed\xa0\x80 \xf4\x90\x80\x80 \xc0\x80 \xf0\x80\x80\x80",
        "number": struct.pack("<f", 0.1),
        "infinite": struct.pack("<f", float("inf")),
        "object": b'{"a": {"b": -0.5e+3, "c": true, "d": {}}, "e": "\\u20ac \\ud83d\\ude42\\n"}'},
}
