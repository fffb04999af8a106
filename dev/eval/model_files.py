"""Both kinds of file that export_hf.py knows, and the names of their tensors.

    dims, tensors = read_bin("model_00000010.bin")          # {"transformer.h.0.ln_1.weight": Tensor, ...}
    write_safetensors(f, dims, tensors, "BF16")             # f: a file that is open for writing

A Tensor is a piece of a mapped file: what is in memory besides the file's own pages is the tensor that is
being written, one layer's. Both sides are in Hugging Face's names and shapes: its linear layers are (in,
out), those of model_*.bin (out, in). bf16 is held as uint16, since numpy has no such type.

safetensors is written here, not by its package: a file is a length, a JSON table and the bytes, and
.venv, which tests and plots live in, stays as it is.
"""
import argparse
import contextlib
import json
import math
import os
import re
import secrets
import signal
import sys
from collections import namedtuple

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from venv_python import take_the_venv               # noqa: E402


def die(message):
    sys.exit("error: " + message)


try:
    import numpy as np
except ImportError:             # .venv, which setup.sh has filled, has one: the program starts again with it
    take_the_venv()
    die("no numpy in this Python\n"
        "hint: scripts/setup.sh installs it into .venv; or pip install numpy, in a venv of yours")

MODEL_MAGIC, HEADER_BYTES = 20240326, 1024
VERSIONS = {3: "F32", 5: "BF16"}                            # of model_*.bin, in safetensors' words
STORAGE = {"F32": np.dtype("<f4"), "BF16": np.dtype("<u2")}
DTYPES = {"fp32": "F32", "bf16": "BF16"}                    # --dtype

Dims = namedtuple("Dims", "maxT V L NH C")
Tensor = namedtuple("Tensor", "dtype array")                # array: of STORAGE[dtype]
# name, and whether there is one per layer; shape here, that is Hugging Face's; whether model_*.bin has it
# transposed. In the order of model_*.bin.
Row = namedtuple("Row", "name per_layer shape transposed")
TABLE = [
    Row("wte.weight", False, lambda d: (d.V, d.C), False),
    Row("wpe.weight", False, lambda d: (d.maxT, d.C), False),
    Row("ln_1.weight", True, lambda d: (d.C,), False),
    Row("ln_1.bias", True, lambda d: (d.C,), False),
    Row("attn.c_attn.weight", True, lambda d: (d.C, 3 * d.C), True),
    Row("attn.c_attn.bias", True, lambda d: (3 * d.C,), False),
    Row("attn.c_proj.weight", True, lambda d: (d.C, d.C), True),
    Row("attn.c_proj.bias", True, lambda d: (d.C,), False),
    Row("ln_2.weight", True, lambda d: (d.C,), False),
    Row("ln_2.bias", True, lambda d: (d.C,), False),
    Row("mlp.c_fc.weight", True, lambda d: (d.C, 4 * d.C), True),
    Row("mlp.c_fc.bias", True, lambda d: (4 * d.C,), False),
    Row("mlp.c_proj.weight", True, lambda d: (4 * d.C, d.C), True),
    Row("mlp.c_proj.bias", True, lambda d: (d.C,), False),
    Row("ln_f.weight", False, lambda d: (d.C,), False),
    Row("ln_f.bias", False, lambda d: (d.C,), False),
]


def entries(dims):
    """(name, row) of every tensor in the order of model_*.bin; a Block's row gives one name per layer."""
    for row in TABLE:
        for layer in range(dims.L) if row.per_layer else [None]:
            yield "transformer." + (f"h.{layer}." if row.per_layer else "") + row.name, row


def count_parameters(dims):
    return sum(math.prod(row.shape(dims)) for _, row in entries(dims))


def dims_error(d):
    """The trainer's own conditions for a model, or "" if it takes this one."""
    if min(d.maxT, d.L, d.NH, d.C) < 1 or not 2 <= d.V <= 65536:
        return f"T={d.maxT} V={d.V} L={d.L} NH={d.NH} C={d.C}: each must be at least 1, V from 2 to 65536"
    if d.L > 10000 or d.C > 1 << 20 or d.maxT > 1 << 24:
        return f"L={d.L} C={d.C} T={d.maxT}: at most 10000 layers, 2^20 channels, 2^24 positions"
    if d.C % d.NH:
        return f"C={d.C} is not a multiple of NH={d.NH}"
    return f"C={d.C} is not a multiple of 8" if d.C % 8 else ""


# ---- types ----

def convert(array, source, target):
    """An array of STORAGE[source] as one of STORAGE[target]; equal types keep every bit."""
    if source == target:
        return array
    if source == "BF16":
        wide = (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        wide = array.astype(np.float32)
    if target == "F32":
        return wide
    # To nearest, ties to even. A NaN keeps its upper half and stays one, which adding might carry into -0.
    bits = np.ascontiguousarray(wide).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(wide), bits >> np.uint32(16) | np.uint32(0x40), rounded).astype("<u2")


def map_file(path):
    """The bytes of a file; only what is looked at is read."""
    if not os.path.isfile(path):
        die(f"'{path}' is not a regular file" if os.path.exists(path) else f"no file '{path}'")
    if os.path.getsize(path) == 0:
        return np.zeros(0, np.uint8)
    return np.memmap(path, np.uint8, "r")


# ---- model_*.bin: 256 int32 {magic, version, maxT, V, L, NH, C, Vp, 0...}, then the tensors ----

def read_bin(path):
    data = map_file(path)
    head = data[:HEADER_BYTES].tobytes()
    words = np.frombuffer(head[:len(head) // 4 * 4], "<i4").tolist()
    if words[:1] != [MODEL_MAGIC]:
        die(f"'{path}' is not a model checkpoint\nhint: give a model_*.bin, or the folder of a run")
    if len(data) < HEADER_BYTES:
        die(f"'{path}' is truncated: {len(data)} bytes, the header alone has {HEADER_BYTES}")
    if words[1] - 100 in VERSIONS:              # train_gpt2's own: two more words say what it is
        kinds = [names[k] if 0 <= k < len(names) else f"{k}" for names, k in
                 zip((("sequential", "parallel", "parallel-tied"), ("layernorm", "rmsnorm")), words[8:10])]
        die(f"'{path}' is not GPT-2: its block is {kinds[0]} and its norm {kinds[1]}, which "
            "transformers' GPT-2 does not compute\nhint: such a model runs here alone: train_gpt2cu -e FILE")
    if words[1] not in VERSIONS:
        die(f"'{path}' has checkpoint version {words[1]}; 3 (fp32) and 5 (bf16) are GPT-2")
    dims, Vp, dtype = Dims(*words[2:7]), words[7], VERSIONS[words[1]]
    error = dims_error(dims)
    if error or Vp < dims.V:
        die(f"'{path}' has a bad header: " + (error or f"V={dims.V}, padded to {Vp}"))
    size = STORAGE[dtype].itemsize
    expected = HEADER_BYTES + (count_parameters(dims) + (Vp - dims.V) * dims.C) * size
    if len(data) != expected:
        die(f"'{path}' has {len(data)} bytes, its header (L={dims.L} NH={dims.NH} C={dims.C} T={dims.maxT} "
            f"V={dims.V}, padded {Vp}, {dtype}) means {expected}")
    tensors, at = {}, HEADER_BYTES
    for name, row in entries(dims):
        shape = row.shape(dims)
        stored = shape[::-1] if row.transposed else shape
        array = np.frombuffer(data, STORAGE[dtype], math.prod(shape), at).reshape(stored)
        tensors[name] = Tensor(dtype, array.T if row.transposed else array)
        at += array.nbytes + (size * (Vp - dims.V) * dims.C if row.name == "wte.weight" else 0)
    return dims, tensors


# ---- safetensors: length of the table, the table, the tensors' bytes ----

def write_safetensors(f, dims, tensors, dtype):
    table, at = {"__metadata__": {"format": "pt"}}, 0
    for name, row in entries(dims):
        size = math.prod(row.shape(dims)) * STORAGE[dtype].itemsize
        table[name] = {"dtype": dtype, "shape": row.shape(dims), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)                         # what follows is aligned for readers that map it
    f.write(len(text).to_bytes(8, "little") + text)
    for name in list(table)[1:]:
        tensor = tensors[name]
        f.write(np.ascontiguousarray(convert(tensor.array, tensor.dtype, dtype)))


# ---- outputs that appear whole or not at all ----

def beside(path):
    return f"{path}.{secrets.token_hex(4)}.tmp"


@contextlib.contextmanager
def synced_file(path):
    """A new file for writing, on the disk when its block ends."""
    with open(path, "xb") as f:
        yield f
        f.flush()
        os.fsync(f.fileno())


class Parser(argparse.ArgumentParser):
    def error(self, message):
        die(f"{message}\nhint: {self.prog} --help")


def run_main(main):
    """Errors of the system and signals end in one sentence, after what was begun has been removed."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as e:
        die(f"'{e.filename}': {e.strerror}" if e.filename else f"{e.strerror or e}")
    except MemoryError:
        die("out of memory")


def last_model(folder):
    """The newest model_*.bin of a run."""
    steps = [int(m[1]) for m in (re.fullmatch(r"model_(\d{8,})\.bin", n) for n in os.listdir(folder)) if m]
    if not steps:
        die(f"no model_*.bin in '{folder}'\nhint: give a model_*.bin, or the folder of a run that saved one")
    return os.path.join(folder, f"model_{max(steps):08d}.bin")
