"""Files that appear whole or not at all, token shards, the tokenize tool: what get.py makes data sets with.
"""
import contextlib
import json
import os
import struct
import subprocess
import tempfile
from array import array
from dataclasses import dataclass

from fetch import Problem
from outputs import whole_file

HEADER_BYTES = 1024
EOT = 50256                 # of GPT-2's tokens; 0 of bytes


@dataclass(frozen=True)
class Kind:
    """Of a shard: how its header begins, how array calls its tokens and how many bytes each has, and the
    largest vocabulary that fits."""
    magic: int
    version: int
    code: str
    bytes: int
    most: int


KINDS = (Kind(20240520, 1, "H", 2, 2**16), Kind(20240801, 7, "I", 4, 2**32))


def replace_file(path, blocks_of_bytes):
    """The file appears whole, or not at all."""
    try:
        with whole_file(path) as f:
            f.writelines(blocks_of_bytes)
    except OSError as error:
        raise Problem(f"cannot write '{path}': {error.strerror}",
                      "free some space, or choose another --out") from error


def write_facts(path, facts):
    text = json.dumps(facts, indent=1, ensure_ascii=False) + "\n"
    replace_file(path, [text.encode("utf-8", "surrogateescape")])


def read_facts(path):
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as f:
            facts = json.load(f)
        if isinstance(facts, dict):
            return facts
    except ValueError:
        pass
    raise Problem(f"'{path}' is damaged", "--restart begins anew")


def shard_tokens(path):
    """(tokens, tokenizer) of a shard whose header and size agree."""
    with open(path, "rb") as f:
        head = f.read(HEADER_BYTES)
    size = os.path.getsize(path)
    fields = struct.unpack("<256i", head) if len(head) == HEADER_BYTES else (0, 0)
    kind = next((kind for kind in KINDS if fields[:2] == (kind.magic, kind.version)), None)
    if not kind:
        raise Problem(f"'{path}' is no token shard: it begins {fields[0]} {fields[1]}, expected "
                      + " or ".join(f"{kind.magic} {kind.version}" for kind in KINDS),
                      "remove it and run again")
    stored = (size - HEADER_BYTES) // kind.bytes
    if size % kind.bytes or fields[2] % 2**32 != stored % 2**32:
        raise Problem(f"'{path}' has {size} bytes, its header announces {fields[2]} tokens",
                      "remove it and run again")
    return stored, fields[3]


# ---- the tokenize tool ----

def run_tool(tool, prefix, flags, texts):
    """PREFIX_train.bin and so on of texts, bytes of which a 0 ends a document. Returns what the tool prints.
    What is wrong with the texts it says itself."""
    command = [tool, "-o", prefix, "--separators", "nul", *map(str, flags), "-"]
    with tempfile.TemporaryFile() as said, \
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=said, bufsize=1 << 18) as child:
        try:
            with contextlib.suppress(BrokenPipeError):          # then it has ended: its exit code tells
                for text in texts:
                    child.stdin.write(text)
        except BaseException:                   # before its pipe closes: it must not take this for the end
            child.kill()
            raise
        finally:
            with contextlib.suppress(OSError):
                child.stdin.close()
        child.wait()
        said.seek(0)
        lines = said.read().decode(errors="replace").splitlines()
    if child.returncode < 0:
        raise Problem(f"{tool} was ended by signal {-child.returncode}", "the same command goes on from here")
    if child.returncode:
        raise Problem("")
    return lines


def tool_documents(tool, prefix, flags, texts):
    """Encodes all texts; then an iterator over the tokens of each document, the end of text in front."""
    run_tool(tool, prefix, [*flags, "--val-tokens", 0, "--shard-tokens", 0], texts)
    with open(prefix + "_train.bin", "rb") as f:
        f.seek(HEADER_BYTES)
        tokens = array("H", f.read())
    os.unlink(prefix + "_train.bin")
    begins = [i for i, token in enumerate(tokens) if token == tokens[0]]
    return (tokens[begin:end] for begin, end in zip(begins, [*begins[1:], len(tokens)]))
