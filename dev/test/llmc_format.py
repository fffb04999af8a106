#!/usr/bin/env python3
"""llm.c's token shards and checkpoints, written and read by themselves: nothing here knows our code.

    python3 dev/test/llmc_format.py write-shard x.bin --tokens 1000 --vocab 256 --seed 1
    python3 dev/test/llmc_format.py read-shard x.bin
    python3 dev/test/llmc_format.py write-model m.bin --L 2 --NH 4 --C 64 --T 32 --V 250 --Vp 256 --version 5
    python3 dev/test/llmc_format.py read-model m.bin

A file is right if this reads what ours wrote, ours reads what this wrote, and the sums agree; this itself is
held against facts from elsewhere by test_llmc_format.py. The model commands print one line per tensor: name,
values, sum, crc32 of the values as little-endian fp32; so a bf16 checkpoint that is loaded and saved as fp32
keeps its crc32s. Standard library only; an error is one line and exit code 1.
"""
import argparse
import array
import math
import os
import random
import struct
import sys
import zlib

SHARD_MAGIC, SHARD_VERSION = 20240520, 1
MODEL_MAGIC = 20240326
VALUE_BYTES = {3: 4, 5: 2}      # version 3: fp32, version 5: bf16
HEADER_BYTES = 256 * 4


def die(message):
    sys.exit("error: " + message)


def little(values):
    """An array's bytes in the files' order, whatever this machine's is."""
    if sys.byteorder == "big":
        values = array.array(values.typecode, values)
        values.byteswap()
    return values.tobytes()


def from_little(typecode, data):
    values = array.array(typecode)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def header(*fields):
    return struct.pack("<256i", *fields, *[0] * (256 - len(fields)))


def read_header(f, path):
    data = f.read(HEADER_BYTES)
    if len(data) != HEADER_BYTES:
        die(f"{path}: {len(data)} bytes, the header alone has {HEADER_BYTES}")
    return struct.unpack("<256i", data)


# ---- token shards: header {magic, version, tokens}, then uint16 ----

def write_shard(args):
    rng = random.Random(args.seed)
    tokens = array.array("H", (rng.randrange(args.vocab) for _ in range(args.tokens)))
    with open(args.file, "wb") as f:
        f.write(header(SHARD_MAGIC, SHARD_VERSION, len(tokens)) + little(tokens))
    print_shard(tokens)


def read_shard(args):
    with open(args.file, "rb") as f:
        magic, version, count, tokenizer, *rest = read_header(f, args.file)
        tokens_in_file, odd = divmod(os.path.getsize(args.file) - HEADER_BYTES, 2)
        if magic != SHARD_MAGIC or version != SHARD_VERSION:
            die(f"{args.file}: magic {magic} version {version}, expected {SHARD_MAGIC} and {SHARD_VERSION}")
        # beyond int32 the field holds the count modulo 2^32
        expected = tokens_in_file % 2**32 if tokens_in_file > 2**31 - 1 else tokens_in_file
        if odd or (count % 2**32 if tokens_in_file > 2**31 - 1 else count) != expected:
            die(f"{args.file}: the header says {count} tokens, the file's size {tokens_in_file}")
        if tokenizer not in (0, 1, 2) or any(rest):         # llm.c does not look: not said, GPT-2, bytes
            die(f"{args.file}: tokenizer {tokenizer}, or the rest of the header is not zero")
        print_shard(from_little("H", f.read()))


def print_shard(tokens):
    print(f"tokens {len(tokens)} largest {max(tokens, default=0)} sum {sum(tokens)} "
          f"crc32 {zlib.crc32(little(tokens)):08x}")


# ---- checkpoints: header {magic, version, maxT, V, L, NH, C, Vp}, then the tensors ----

def shapes(T, V, L, NH, C, Vp):
    """Names and shapes in the order of the file; a layer's matrix is stored (outputs, inputs)."""
    return [("wte", (Vp, C)), ("wpe", (T, C)), ("ln1w", (L, C)), ("ln1b", (L, C)), ("qkvw", (L, 3 * C, C)),
            ("qkvb", (L, 3 * C)), ("attprojw", (L, C, C)), ("attprojb", (L, C)), ("ln2w", (L, C)),
            ("ln2b", (L, C)), ("fcw", (L, 4 * C, C)), ("fcb", (L, 4 * C)), ("fcprojw", (L, C, 4 * C)),
            ("fcprojb", (L, C)), ("lnfw", (C,)), ("lnfb", (C,))]


def to_bf16(values):
    """The upper halves of the fp32 values, rounded to nearest, ties to even."""
    words = from_little("I", little(values))
    return array.array("H", ((w + 0x7FFF + (w >> 16 & 1)) >> 16 for w in words))


def from_bf16(halves):
    return from_little("f", little(array.array("I", (h << 16 for h in halves))))


def write_model(args):
    if args.C % args.NH != 0 or args.Vp < args.V:
        die(f"C = {args.C} must be a multiple of NH = {args.NH}, and Vp = {args.Vp} at least V = {args.V}")
    rng = random.Random(args.seed)
    fields = (args.T, args.V, args.L, args.NH, args.C, args.Vp)
    with open(args.file, "wb") as f:
        f.write(header(MODEL_MAGIC, args.version, *fields))
        print_header(args.version, *fields)
        for name, shape in shapes(*fields):
            centre = 1.0 if name in ("ln1w", "ln2w", "lnfw") else 0.0
            values = array.array("f", (centre + rng.uniform(-0.1, 0.1) for _ in range(math.prod(shape))))
            if name == "wte":       # the rows that pad the vocabulary
                padding = (args.Vp - args.V) * args.C
                values[len(values) - padding:] = array.array("f", bytes(4 * padding))
            if args.version == 5:
                halves = to_bf16(values)
                f.write(little(halves))
                values = from_bf16(halves)
            else:
                f.write(little(values))
            print_tensor(name, values)


def read_model(args):
    with open(args.file, "rb") as f:
        magic, version, T, V, L, NH, C, Vp, *rest = read_header(f, args.file)
        if magic != MODEL_MAGIC or version not in VALUE_BYTES:
            die(f"{args.file}: magic {magic} version {version}, expected {MODEL_MAGIC} and 3 or 5")
        # the last two words may hold a checksum; llm.c does not look at what comes after Vp
        if min(T, V, L, NH, C) < 1 or C % NH != 0 or Vp < V or any(rest[:-2]):
            die(f"{args.file}: impossible header: T {T} V {V} L {L} NH {NH} C {C} Vp {Vp}")
        table = shapes(T, V, L, NH, C, Vp)
        size, expected = os.path.getsize(args.file), HEADER_BYTES
        expected += VALUE_BYTES[version] * sum(math.prod(shape) for _, shape in table)
        if size != expected:
            die(f"{args.file}: {size} bytes, its header asks for {expected}")
        print_header(version, T, V, L, NH, C, Vp)
        for name, shape in table:
            data = f.read(VALUE_BYTES[version] * math.prod(shape))
            values = from_little("f", data) if version == 3 else from_bf16(from_little("H", data))
            if name == "wte" and any(values[V * C:]):
                die(f"{args.file}: the rows of wte beyond the vocabulary are not zero")
            print_tensor(name, values)


def print_header(version, T, V, L, NH, C, Vp):
    print(f"version {version} T {T} V {V} L {L} NH {NH} C {C} Vp {Vp}")


def print_tensor(name, values):
    print(f"{name} {len(values)} sum {math.fsum(values):.9e} crc32 {zlib.crc32(little(values)):08x}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for command, function in (("write-shard", write_shard), ("read-shard", read_shard),
                              ("write-model", write_model), ("read-model", read_model)):
        sub = commands.add_parser(command)
        sub.add_argument("file")
        sub.set_defaults(function=function)
        if command == "write-shard":
            sub.add_argument("--tokens", type=int, required=True)
            sub.add_argument("--vocab", type=int, default=50257)
        if command == "write-model":
            for name in "L", "NH", "C", "T", "V", "Vp":
                sub.add_argument("--" + name, type=int, required=True)
            sub.add_argument("--version", type=int, choices=sorted(VALUE_BYTES), default=3)
        if command.startswith("write"):
            sub.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    try:
        args.function(args)
    except OSError as e:
        die(f"{e.strerror}: '{e.filename}'")


if __name__ == "__main__":
    main()
