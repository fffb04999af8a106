"""Model files of family Llama: versions 203 (fp32) and 205 (bf16), in NumPy. formats.py has GPT-2's.

    dims, version, Vp = read_llama_header("model.bin")
    dims, params = read_llama("model.bin")              # {"wte": (Vp,C), "qkvw": (L,QKVC,C), ...} as float32
    write_llama("model.bin", dims, params)              # version=205 writes bf16

Words 2 to 7 of the header are GPT-2's, words 10 to 18 the family's shape. Tensors follow in the order of
GPT2_PARAMS; those that a model lacks are left out.
"""
import math
import os
from dataclasses import dataclass

import numpy as np

from formats import (MAGIC_MODEL, AtomicWriter, FileError, from_bf16_bits, header_words, open_checked,
                     read_array, read_header, to_bf16_bits)

FAMILY, RMS, MLPS = 1, 1, {1: "swiglu", 2: "relu2"}
BITS = ("qk_norm", "norm_weights", "embed_norm", "tied")         # of word 15, the first one lowest
TYPES = {203: "<f4", 205: "<u2"}


@dataclass(frozen=True)
class Llama:
    maxT: int
    V: int
    L: int
    NH: int
    C: int
    NKV: int                    # heads of keys and values: NH / NKV heads of queries read one
    HS: int                     # NH * HS need not be C
    F: int
    mlp: str = "swiglu"         # or relu2
    qk_norm: bool = False
    norm_weights: bool = True
    embed_norm: bool = False
    tied: bool = False
    theta: float = 10000.0
    eps: float = 1e-5
    softcap: float = 0.0        # 0: none

    @property
    def Vp(self):
        return (self.V + 127) // 128 * 128


def llama_shapes(d, Vp=None):
    """{name: shape} in file order; layers come first. Vp: as a file pads V, if not as Dims.Vp."""
    weights, qk = int(d.norm_weights), int(d.qk_norm and d.norm_weights)
    shapes = {"wte": (Vp or d.Vp, d.C), "ln1w": (d.L, d.C * weights),
              "qkvw": (d.L, (d.NH + 2 * d.NKV) * d.HS, d.C), "attprojw": (d.L, d.C, d.NH * d.HS),
              "ln2w": (d.L, d.C * weights), "fcw": (d.L, d.F * (2 if d.mlp == "swiglu" else 1), d.C),
              "fcprojw": (d.L, d.C, d.F), "lnfw": (d.C * weights,), "qnw": (d.L, d.HS * qk),
              "knw": (d.L, d.HS * qk), "headw": ((Vp or d.Vp) * (not d.tied), d.C)}
    return {name: shape for name, shape in shapes.items() if math.prod(shape)}


def read_llama_header(path):
    """(dims, version, padded V), or None: a model file of another family."""
    with open_checked(path) as f:
        header = read_header(f, path, MAGIC_MODEL)
    version, maxT, V, L, NH, C, Vp = (int(v) for v in header[1:8])
    if version < 200:
        return None
    if version not in TYPES or header[10] != FAMILY:
        raise FileError(path, f"version {version} of family {header[10]}; 203 (fp32) and 205 (bf16) of "
                              "family 1 can be read")
    NKV, HS, F, mlp, bits = (int(v) for v in header[11:16])
    theta, eps, softcap = (float(v) for v in header[16:19].view("<f4"))
    if min(maxT, V, L, NH, C, NKV, HS, F) < 1 or NH % NKV or HS % 2 or Vp < V or mlp not in MLPS or \
            header[8] != 0 or header[9] != RMS or not (theta > 0 and eps > 0 and softcap >= 0):
        raise FileError(path, f"impossible sizes: {header[1:19].tolist()}")
    flags = {name: bool(bits >> i & 1) for i, name in enumerate(BITS)}
    dims = Llama(maxT, V, L, NH, C, NKV, HS, F, MLPS[mlp], **flags, theta=theta, eps=eps, softcap=softcap)
    count = sum(math.prod(shape) for shape in llama_shapes(dims, Vp).values())
    expected = 1024 + count * np.dtype(TYPES[version]).itemsize
    if os.path.getsize(path) != expected:
        raise FileError(path, f"{os.path.getsize(path)} bytes, expected {expected}")
    return dims, version, Vp


def read_llama(path):
    """(dims, params as float32 whatever the version)."""
    dims, version, Vp = read_llama_header(path)
    params = {}
    with open_checked(path) as f:
        f.seek(1024)
        for name, shape in llama_shapes(dims, Vp).items():
            data = read_array(f, path, TYPES[version], shape)
            params[name] = data if version == 203 else from_bf16_bits(data)
    for name in params.keys() & {"wte", "headw"} if Vp != dims.Vp else ():
        params[name] = np.pad(params[name][:dims.V], ((0, dims.Vp - dims.V), (0, 0)))
    return dims, params


def write_llama(path, dims, params, version=203):
    bits = sum(getattr(dims, name) << i for i, name in enumerate(BITS))
    mlp = next(number for number, name in MLPS.items() if name == dims.mlp)
    header = header_words(MAGIC_MODEL, version, dims.maxT, dims.V, dims.L, dims.NH, dims.C, dims.Vp, 0, RMS,
                          FAMILY, dims.NKV, dims.HS, dims.F, mlp, bits)
    header[16:19] = np.array([dims.theta, dims.eps, dims.softcap], "<f4").view("<i4")
    with AtomicWriter(path) as f:
        header.tofile(f)
        for name, shape in llama_shapes(dims).items():
            assert params[name].shape == shape, name
            (params[name].astype("<f4") if version == 203 else to_bf16_bits(params[name])).tofile(f)
