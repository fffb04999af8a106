#!/usr/bin/env python3
"""Writes dev/fuzz/seeds: small inputs of every target, good ones and wrong ones (dev/fuzz/fuzz.cpp says what
their first bytes mean). What fuzzing finds goes there by hand, as found-SOMETHING, and stays.

    python3 dev/fuzz/seeds.py
"""
import os
import struct

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "seeds")


def write(target, name, data):
    path = os.path.join(FOLDER, target, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as f:
        f.write(data)


def header(*numbers):
    return struct.pack("<256i", *numbers, *[0] * (256 - len(numbers)))


def shard(T, V, tokens, *numbers):
    return struct.pack("<BHB", T - 1, V - 1, 0) + header(*numbers) + struct.pack(f"<{len(tokens)}H", *tokens)


def question(number, label, *texts):
    words = [number, label, len(texts) - 1] + [word for text in texts for word in (len(text), *text)]
    return struct.pack(f"<{2 + len(words)}H", 65535, 4 + 2 * len(words), *words)


def questions(B, T, V, body, *numbers, fit=0):
    return struct.pack("<BBHB", B - 1, T - 1, V - 1, fit) + header(*numbers) + body


def model(version, T, V, L, NH, C, Vp):
    count = (Vp + T + 2) * C + L * (13 * C + 12 * C * C)
    values = [(i * 37 % 101 - 50) / 64 for i in range(count)]
    raw = struct.pack(f"<{count}f", *values)
    if version == 5:
        raw = b"".join(raw[i + 2:i + 4] for i in range(0, len(raw), 4))
    return b"\0" + header(20240326, version, T, V, L, NH, C, Vp) + raw


def state_row(name, kind, rows, cols, begin, count):
    return struct.pack("<64s16s6Q", name.encode(), kind.encode(), rows, cols, begin, count, 0, 0)


def state(rows, facts, data_bytes):
    numbers = struct.pack("<8s2I6Q", b"GPT2STAT", 1, len(rows), len(facts), 64 + 128 * len(rows) + len(facts)
                          + data_bytes, 0, 0, 0, 0)
    return numbers + b"".join(rows) + facts + bytes(i % 256 for i in range(data_bytes))


def words(ranks, *texts):
    return bytes([ranks - 1]) + b"".join(text.encode() + b"\0" for text in texts)


def main():
    tokens = list(range(20))
    write("shard", "good", shard(4, 256, tokens, 20240520, 1, 20))
    write("shard", "id-too-large", shard(3, 10, tokens, 20240520, 1, 20))
    write("shard", "short", shard(4, 256, tokens[:3], 20240520, 1, 20))
    write("shard", "negative", shard(4, 256, tokens[:3], 20240520, 1, -3))
    write("shard", "version", shard(4, 256, tokens[:3], 20240520, 7, 3))
    write("shard", "text", b"\3\xff\0\0To be, or not to be\n")

    body = question(0, 3, tokens, [1], [2], [3, 4], [5]) + question(1, 0, [9], [1] * 40, [2], [3], [5])
    write("questions", "good", questions(2, 64, 256, body, 20240522, 1, 2, 114, 1))
    write("questions", "fit", questions(3, 5, 256, body, 20240522, 1, fit=1))
    write("questions", "id-too-large", questions(1, 8, 10, body, 20240522, 1, fit=1))
    write("questions", "label", questions(1, 8, 256, body[:6] + b"\4" + body[7:], 20240522, 1, fit=1))
    write("questions", "three", questions(1, 8, 256, question(0, 1, [1], [2], [3], [4]), 20240522, 1, fit=1))
    write("questions", "cut", questions(1, 8, 256, body[:-3], 20240522, 1, 2, 114))
    write("questions", "huge", questions(1, 8, 256, body, 20240522, 1, 2**31 - 1, 65534))

    write("model", "fp32", model(3, 2, 3, 1, 1, 2, 8))
    write("model", "bf16", model(5, 1, 8, 2, 2, 2, 8))
    write("model", "one-channel", b"\1" + model(3, 1, 2, 1, 1, 1, 8)[1:])
    write("model", "checksum", b"\2" + model(3, 2, 3, 1, 1, 2, 8)[1:])
    write("model", "cut", model(3, 2, 3, 1, 1, 2, 8)[:-5])
    write("model", "huge", b"\0" + header(20240326, 3, 1024, 50257, 2**31 - 1, 12, 768, 50304))
    write("model", "a-shard", b"\0" + header(20240520, 1, 0))

    rows = [state_row("params.wte", "f32", 4, 2, 0, 8), state_row("m.qkvw.3", "bf16", 4, 6, 3, 5)]
    facts = b"step=12\ntext=two\\nlines, a \\\\\n"
    write("state", "good", b"\3" + state(rows, facts, 4 * 8 + 2 * 5))
    write("state", "bare", b"\3" + state([], b"", 0))
    write("state", "bad-checksum", b"\1" + state(rows, facts, 4 * 8 + 2 * 5))
    write("state", "bad-size", b"\0" + state(rows, facts, 7))
    write("state", "bad-facts", b"\3" + state(rows[:1], b"step12\n", 32))
    write("state", "bad-type", b"\3" + state([state_row("a", "f64", 1, 1, 0, 1)], facts, 8))
    write("state", "bad-count", b"\3" + state([state_row("a", "f16", 2**40, 2**40, 2**63, 4)], facts, 8))

    text = "It's 3 o'clock, isn't it?  We'll see;\n\n\n I've\t12345 caf\u00e9 \u4f60\u597d \U0001f600 "
    write("tokens", "bpe", b"\1" + text.encode())
    write("tokens", "bytes", b"\0" + text.encode())
    write("tokens", "broken-utf8", b"\1a\xc3 \xe2\x82 \xf0\x9f\x98 \xed\xa0\x80 \xc0\x80 \xff\xfe")
    write("tokens", "long-piece", b"\1" + b"abcabcabd" * 40)
    write("tokens", "blanks", b"\1" + b" " * 150 + b"x" + b"\n " * 60)

    merges = (b"ab", b"abc", b"bc", b" a", b"12", b"  ", b"\n\n", b"eot")
    merged = b"".join(bytes([len(token)]) + token for token in merges)
    whole = header(20240328, 2, 258, 257) + b"".join(bytes([1, b]) for b in range(256)) + b"\2ab\3eot"
    write("vocab", "merges", b"\2" + merged)
    write("vocab", "file", b"\0" + whole)
    write("vocab", "same-twice", b"\2\2ab\2ab\3eot")
    write("vocab", "no-byte", b"\0" + whole.replace(b"\1\x41", b"\2A!"))
    write("vocab", "merge-list", b"\1#version: 0.2\n\xc4\xa0 t\n\xc4\xa0 a\nh e\ni n\n")

    usual = "-e d12 -b 64 -t 1024 -z 524288 -l 6e-4 -u 700 -q 0 -c 0.1 -x 19073 -v 250 -o runs/d12"
    write("flags", "usual", words(1, *usual.split()))
    write("flags", "equals", words(2, "--micro-batch=2", "--model=L4,NH4,C128,T128,V256", "-zs=1",
                                   "--prompt=-b", "-x=epoch", "--lanes=4", "-z=4096", "--reduction=tree"))
    write("flags", "enums", words(1, "-k", "linear", "--kernels", "portable",
                                  "--grad-dtype", "fp32", "-pi", "tcp", "-ps", "host:80", "--seed", "7"))
    write("flags", "unknown", words(1, "--micro-bach", "3"))
    write("flags", "twice", words(1, "-z", "4096", "-d", "4096"))
    write("flags", "wrong", words(1, "-b", "1e5"))
    write("flags", "missing", words(1, "-b", "-t", "64"))
    write("flags", "floats", words(3, "--beta1", ".9", "--beta2=0.95", "--eps", "1E-8", "--temperature", "5.",
                                   "--grad-clip", "1e30", "-f", "0", "-r", "2", "-ge", "0"))

    for text in ("d12", "d48", "d13", "gpt3:c768", "gpt3:c1", "L4,NH4,C128,T128,V256", "L4,NH4,C128,T0,V256",
                 "V65536,T16777216,C8,NH1,L9", "L4,L4,C128,T128,V256", "L4,NH3,C128,T128,V256", "d-12", "",
                 "L2147483648,NH4,C128,T128,V256"):
        write("descriptor", text.replace(":", "_") or "empty", text.encode())

    write("json", "text", 'a "quoted" \\ word\n\t\x7f caf\u00e9 \U0001f600'.encode())
    write("json", "not-utf8", b"a\xff\xc3 \xe2\x82 \xed\xa0\x80 \xf4\x90\x80\x80 \xc0\x80 \xf0\x80\x80\x80")
    write("json", "number", struct.pack("<f", 0.1))
    write("json", "infinite", struct.pack("<f", float("inf")))
    write("json", "tensors", b'{"__metadata__": {"format": "pt"}, "a.b": {"dtype": "F32", "shape": [2, 2], '
          b'"data_offsets": [0, 16]}, "c": {"dtype": "BF16", "shape": [4], "data_offsets": [16, 24]}}')
    write("json", "object", b'{"a": {"b": -0.5e+3, "c": true, "d": {}}, "e": "\\u20ac \\ud83d\\ude42\\n"}')


if __name__ == "__main__":
    main()
