"""llmc_format.py against facts from elsewhere: files spelled out by hand, what is published about llm.c's own
files, and dev/reference/formats.py, which another reading of the formats wrote with numpy.
"""
import math
import os
import struct
import subprocess
import sys
import zlib

import pytest

from checks import ROOT, check

TOOL = os.path.join(ROOT, "dev/test/llmc_format.py")
sys.path[:0] = [os.path.join(ROOT, "dev/test"), os.path.join(ROOT, "dev/reference")]
import llmc_format                                  # noqa: E402  the one under test


def tool(*words):
    p = subprocess.run([sys.executable, TOOL, *map(str, words)], capture_output=True, text=True, check=False)
    return p.returncode, p.stdout, p.stderr


def write(path, data):
    with open(path, "wb") as f:
        f.write(data)


def header(*fields):
    return b"".join(struct.pack("<i", n) for n in fields) + bytes(1024 - 4 * len(fields))


# Tensors of a checkpoint in the order of the file, and their values for T=1, V=1, L=1, NH=1, C=1, Vp=2.
HAND = [("wte", 2), ("wpe", 1), ("ln1w", 1), ("ln1b", 1), ("qkvw", 3), ("qkvb", 3), ("attprojw", 1),
        ("attprojb", 1), ("ln2w", 1), ("ln2b", 1), ("fcw", 4), ("fcb", 4), ("fcprojw", 4), ("fcprojb", 1),
        ("lnfw", 1), ("lnfb", 1)]


def test_model_by_hand():
    """Values 1, 0 (padding), 2, 3, ...: exact in fp32 and in bf16, where the upper half of fp32 is stored."""
    values, at = [1.0, 0.0] + [float(n) for n in range(2, 30)], 0
    expected = []
    for name, size in HAND:
        part = values[at:at + size]
        at += size
        crc = zlib.crc32(struct.pack(f"<{size}f", *part))
        expected.append(f"{name} {size} sum {sum(part):.9e} crc32 {crc:08x}")
    check(at == len(values), f"{at} values")
    words = [struct.unpack("<I", struct.pack("<f", value))[0] for value in values]
    bodies = {3: struct.pack("<30f", *values), 5: struct.pack("<30H", *(word >> 16 for word in words))}
    for version, body in bodies.items():
        write("hand.bin", header(20240326, version, 1, 1, 1, 1, 1, 2) + body)
        code, out, err = tool("read-model", "hand.bin")
        check((code, out.splitlines()[1:]) == (0, expected), f"version {version}: {out}{err}")
        write("short.bin", header(20240326, version, 1, 1, 1, 1, 1, 2) + body[:-1])
        check(tool("read-model", "short.bin")[0] == 1, f"version {version}, a byte short, is taken")
    write("padded.bin", header(20240326, 3, 1, 1, 1, 1, 1, 2) + struct.pack("<30f", *range(1, 31)))
    check(tool("read-model", "padded.bin")[0] == 1, "values in the vocabulary's padding are taken")
    for fields in ((20240327, 3, 1, 1), (20240326, 4, 1, 1), (20240326, 3, 1, 3)):     # V = 3 beyond Vp = 2
        write("bad.bin", header(*fields, 1, 1, 1, 2) + bodies[3])
        check(tool("read-model", "bad.bin")[0] == 1, f"header {fields} is taken")


def test_shard_by_hand():
    tokens = [0, 1, 50256, 65535]
    body = b"\x00\x00\x01\x00\x50\xc4\xff\xff"
    write("hand.bin", header(20240520, 1, 4) + body)
    code, out, _ = tool("read-shard", "hand.bin")
    expected = f"tokens 4 largest 65535 sum {sum(tokens)} crc32 {zlib.crc32(body):08x}\n"
    check((code, out) == (0, expected), f"{out} expected {expected}")
    for name, fields, end in (("count", (20240520, 1, 5), b""), ("magic", (20240521, 1, 4), b""),
                              ("version", (20240520, 2, 4), b""), ("odd size", (20240520, 1, 4), b"x"),
                              ("rest of its header", (20240520, 1, 4, 0, 7), b"")):
        write("bad.bin", header(*fields) + body + end)
        check(tool("read-shard", "bad.bin")[0] == 1, f"a shard with a wrong {name} is taken")


def test_rounding():
    """To nearest, ties to even: bf16 has 8 bits of mantissa, so its steps next to 1 are 2^-7."""
    for value, half in ((1.0, 0x3F80), (-2.0, 0xC000), (1 + 2**-8, 0x3F80), (1 + 3 * 2**-8, 0x3F82),
                        (1 + 2**-8 + 2**-20, 0x3F81), (0.0, 0x0000), (33 * 2**-133, 0x0021),
                        (1 - 2**-9, 0x3F80)):
        got = llmc_format.to_bf16(llmc_format.array.array("f", [value]))[0]
        check(got == half, f"{value!r} becomes {got:#06x}, expected {half:#06x}")


def test_published_sizes():
    """GPT-2's sizes: 124,439,808 parameters with 50,257 tokens, 124,475,904 values with 50,304 rows."""
    for Vp, values in ((50257, 124439808), (50304, 124475904)):
        total = sum(math.prod(shape) for _, shape in llmc_format.shapes(1024, 50257, 12, 12, 768, Vp))
        check(total == values, f"124M with {Vp} rows: {total} values, {values} are published")
    total = sum(math.prod(shape) for _, shape in llmc_format.shapes(1024, 50257, 48, 25, 1600, 50257))
    check(total == 1557611200, f"1558M: {total} values")


def test_against_numpy():
    """dev/reference/formats.py reads what this writes, and this the files of dev/reference/fixture."""
    try:
        import formats
    except ImportError:
        pytest.skip("no numpy")

    def rows(path):
        dims, params = formats.read_checkpoint(path)
        yield f"T {dims.maxT} V {dims.V} L {dims.L} NH {dims.NH} C {dims.C} Vp {dims.Vp}"
        for name in formats.NAMES:
            data = params[name].astype("<f4").tobytes()
            yield f"{name} {params[name].size} crc32 {zlib.crc32(data):08x}"

    def brief(text):
        first, *rest = text.splitlines()
        words = [line.split() for line in rest]
        return [first.split(" ", 2)[2]] + [f"{w[0]} {w[1]} {w[4]} {w[5]}" for w in words]

    for name in ("ugly", "head64"):
        path = os.path.join(ROOT, f"dev/reference/fixture/{name}_model.bin")
        code, out, err = tool("read-model", path)
        check(code == 0, err)
        check(brief(out) == list(rows(path)), f"{name}: {out}")
    for version in (3, 5):
        code, out, err = tool("write-model", "ours.bin", "--L", 2, "--NH", 3, "--C", 12, "--T", 7, "--V", 11,
                              "--Vp", 128, "--version", version)
        check(code == 0, err)
        check(brief(out) == list(rows("ours.bin")), f"version {version}: {out}")
