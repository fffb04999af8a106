"""Tokens that other programs have written, as token shards.

nanoGPT's train.bin and val.bin are uint16 without a header. build-nanogpt's .npy are numpy's files of one row
of uint16. In nanoGPT's the end-of-text token stands behind each document, in ours before it, so that only the
first document begins without one.
"""
import array
import ast
import struct

from documents import first_bytes, reading, size_of
from fetch import Problem
from shards import EOT, HEADER_BYTES, KINDS, replace_file

NPY = b"\x93NUMPY"
GPT2, UNKNOWN = 1, 0            # whose tokens they are, as a shard's header says it
BLOCK = 1 << 22


def npy_begin(path):
    """(where the tokens of a .npy begin, how many)"""
    with open(path, "rb") as f:
        version = f.read(8)[6]
        length = struct.unpack("<H" if version == 1 else "<I", f.read(2 if version == 1 else 4))[0]
        says = ast.literal_eval(f.read(min(length, 10000)).decode("latin-1"))     # as numpy limits it
        if says["descr"] != "<u2" or len(says["shape"]) != 1:
            raise Problem(f"'{path}' holds {says['descr']} of shape {says['shape']}, not one row of uint16",
                          "numpy converts it: tokens.astype(numpy.uint16).ravel()")
        return f.tell(), says["shape"][0]


def token_blocks(path):
    """The tokens of a file as bytes, some at a time."""
    size, begin, count = size_of(path), 0, None
    if first_bytes(path) == NPY:
        begin, count = npy_begin(path)
    elif first_bytes(path)[:4] in [struct.pack("<I", kind.magic) for kind in KINDS]:
        raise Problem(f"'{path}' is a token shard already", "the trainer's -i and -j take it as it is")
    if size == begin or (size - begin) % 2 or count not in (None, (size - begin) // 2):
        raise Problem(f"'{path}' has {size - begin} bytes of tokens, which are not whole numbers of 2 bytes"
                      + (f", or not {count} of them" if count else ""), "is the file whole?")
    with open(path, "rb") as f:
        f.seek(begin)
        while block := f.read(BLOCK):
            yield block


def write_token_shard(source, path):
    """Returns how many tokens, and whether they are GPT-2's: their largest is its end of text."""
    with reading(source):
        tokens = largest = 0
        for block in token_blocks(source):
            tokens += len(block) // 2
            largest = max(largest, max(array.array("H", block)))
        tokenizer = GPT2 if largest == EOT else UNKNOWN
    words = KINDS[0].magic, KINDS[0].version, tokens % 2**32, tokenizer
    header = struct.pack("<4I", *words).ljust(HEADER_BYTES, b"\0")
    replace_file(path, (block for blocks in ([header], token_blocks(source)) for block in blocks))
    return tokens, tokenizer == GPT2
