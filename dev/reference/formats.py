"""The reference without PyTorch: shapes, the parameter table, random numbers, data order, files.

An independent second reading of what the C++ side does (llmc/rand.h, dataloader.h, the file formats), in
numpy: where the two disagree, one of them is wrong. Nothing here is shared with the C++ code. dev/hf.py reads
and writes models with it.

    dims = parse_model("L2,NH2,C40,T33,V509")          # GPT-2; "llama:..." is the second family
    params = init_params(dims, seed=1337)              # {"wte": (Vp,C), "qkvw": (L,3C,C), ...} float32
    write_checkpoint("model.bin", dims, params)        # version 3 (fp32); version=5 writes bf16
    loader = Loader("tiny_shakespeare_train.bin", B=4, T=64, shuffle=True, seed=1337)
    x, y = loader.next()                               # (B,T) int64 each
"""
import glob
import math
import os
import re
import sys
from dataclasses import dataclass, fields, replace

import numpy as np
import xxhash

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from outputs import whole_file               # noqa: E402

MAGIC_SHARD, MAGIC_MODEL, MAGIC_TENSORS = 20240520, 20240326, 20240327
MAGIC_WIDE_SHARD, WIDE_SHARD_VERSION = 20240801, 7                      # tokens of 32 bits, as llm.c's
RAND_INIT, RAND_SHUFFLE, RAND_DROPOUT = 1, 3, 6                          # enum RandPurpose


# ---- shapes and the parameter table ----
@dataclass(frozen=True)
class Mlp:
    """An activation."""
    number: int             # in model files
    gated: bool             # it takes gate and up, twice as many columns as it gives
    hf: str                 # in config.json: hidden_act, of GPT-2 activation_function


# By their words in descriptors, as MODEL_MLPS in llmc/ops/op_types.h has them.
MLPS = {"gelu": Mlp(0, False, "gelu_new"), "swiglu": Mlp(1, True, "silu"), "relu2": Mlp(2, False, "relu2")}


@dataclass(frozen=True)
class Dims:
    maxT: int
    V: int
    L: int
    NH: int
    C: int
    block: int = 0          # 0 sequential, 1 parallel, 2 parallel-tied: other than 0, it is not GPT-2
    norm: int = 0           # 0 layernorm, 1 rmsnorm: likewise
    window: int = 0         # a layer of an S sees itself and the window - 1 tokens before; 0: no windows
    pattern: str = ""       # of S and L, which sees all before it; repeated over the layers
    document_end: int = -1  # a run's, not the model's: the token at which a document begins; -1: a row is one

    is_llama, mlp, qk_norm, norm_weights, tied, qkv_bias = False, "gelu", False, True, True, True
    value_embed = False
    NKV = property(lambda self: self.NH)
    HS = property(lambda self: self.C // self.NH)
    F = property(lambda self: 4 * self.C)
    gated = property(lambda self: MLPS[self.mlp].gated)

    @property
    def Vp(self):
        return (self.V + 127) // 128 * 128

    def window_of(self, l):
        return self.window if self.window and self.pattern[l % len(self.pattern)] == "S" else 0

    def windows(self):
        """Those of all layers, as long as one hides something."""
        found = [self.window_of(l) for l in range(self.L)]
        return found if any(0 < window < self.maxT for window in found) else []

    def window_text(self):
        return f",window={self.window},pattern={self.pattern}" if self.window else ""

    def text(self):
        return f"L{self.L},NH{self.NH},C{self.C},T{self.maxT},V{self.V}" + self.window_text()


@dataclass(frozen=True)
class Llama(Dims):
    """The second family: rotary positions, RMSNorm, no other biases than qkv_bias. What GPT-2 fixes above, it
    chooses."""
    norm: int = 1
    NKV: int = 0                # heads of keys and values: NH / NKV heads of queries read one
    HS: int = 0                 # NH * HS need not be C
    F: int = 0                  # width of the MLP
    mlp: str = "swiglu"         # or another of MLPS
    qk_norm: bool = False
    norm_weights: bool = True
    embed_norm: bool = False
    tied: bool = False
    qkv_bias: bool = False
    value_embed: bool = False   # odd layers add a row by token to v, times a gate a head
    theta: float = 10000.0
    eps: float = 1e-5
    softcap: float = 0.0        # 0: none
    rope_factor: float = 0.0    # of rotary positions for longer texts; 0: none, and the other three are 0
    rope_low: float = 0.0       # all 0: every frequency is divided by the factor, else as rope_divisors says
    rope_high: float = 0.0
    rope_original: float = 0.0

    is_llama = True

    def text(self):
        """What parse_model takes; names of defaults are left out."""
        words = [f"{key}{getattr(self, name)}" for key, name in LLAMA_SIZES.items()]
        words += [word for word, (name, value) in LLAMA_WORDS.items()
                  if getattr(self, name) == value != getattr(Llama, name)]
        return "llama:" + ",".join(words + [f"{f.name}={getattr(self, f.name):g}" for f in fields(self)
                                            if f.type is float and getattr(self, f.name) != f.default]) \
            + self.window_text()


LLAMA_SIZES = {"L": "L", "NH": "NH", "NKV": "NKV", "HS": "HS", "C": "C", "F": "F", "T": "maxT", "V": "V"}
LLAMA_FLAGS = {f.name: f.default for f in fields(Llama) if f.type is bool}      # in the order of file bits
LLAMA_FLOATS = [f.name for f in fields(Llama) if f.type is float]
LLAMA_WORDS = {**{word: ("mlp", word) for word in MLPS},
               **{"no_" * default + name: (name, not default) for name, default in LLAMA_FLAGS.items()}}
LLAMA_NAMES = {     # published shapes, 2048 positions at most; smollm2 and tinyllama have GPT-2's vocabulary
    "smollm2:135M": "llama:L30,NH9,NKV3,HS64,C576,F1536,T2048,V50257,tied,theta=100000",
    "smollm2:360M": "llama:L32,NH15,NKV5,HS64,C960,F2560,T2048,V50257,tied,theta=100000",
    "qwen3:0.6B": "llama:L28,NH16,NKV8,HS128,C1024,F3072,T2048,V151936,qk_norm,tied,theta=1e6,eps=1e-6",
    "qwen3:1.7B": "llama:L28,NH16,NKV8,HS128,C2048,F6144,T2048,V151936,qk_norm,tied,theta=1e6,eps=1e-6",
    "tinyllama:1.1B": "llama:L22,NH32,NKV4,HS64,C2048,F5632,T2048,V50257"}


def with_windows(dims, text):
    """dims with what stands behind a descriptor: "window=256,pattern=SSSL"; without a pattern all are S."""
    m = re.fullmatch(r"window=(\d{1,8})(?:,pattern=([SL]{1,128}))?", text)
    if not m or not 1 <= int(m[1]) <= 2**24 or len(m[2] or "S") > dims.L:
        raise SystemExit(f"error: '{text}': windows are window=256 or window=256,pattern=SSSL: 1 to 2^24 "
                         f"tokens, and S or L for each layer, {min(dims.L, 128)} at most")
    return replace(dims, window=int(m[1]), pattern=m[2] or "S")


def parse_llama(text):
    """Llama of llama:L12,NH6,NKV6,HS128,C768,F2048,T1024,V50257 with optional words behind, each once."""
    found = {}
    for word in text.removeprefix("llama:").split(","):
        size = re.fullmatch(r"([A-Z]+)(\d+)", word)
        number = re.fullmatch(rf"({'|'.join(LLAMA_FLOATS)})=(\d[\d.]*(?:e[+-]?\d+)?)", word)
        if word in LLAMA_WORDS:
            name, value = LLAMA_WORDS[word]
        elif size and size[1] in LLAMA_SIZES:
            name, value = LLAMA_SIZES[size[1]], int(size[2])
        elif number:
            name, value = number[1], float(number[2])
        else:
            raise SystemExit(f"error: model '{text}': '{word}' is neither a size such as NH6, nor one of "
                             f"{' '.join(LLAMA_WORDS)}, nor {'=, '.join(LLAMA_FLOATS)}= with a number")
        if name in found:
            raise SystemExit(f"error: model '{text}': '{word}' is the second of its kind")
        found[name] = value
    missing = [key for key, name in LLAMA_SIZES.items() if name not in found]
    if missing:
        raise SystemExit(f"error: model '{text}' lacks {' '.join(missing)}")
    dims = Llama(**found)
    if min(getattr(dims, name) for name in LLAMA_SIZES.values()) < 1 or dims.NH % dims.NKV or dims.HS % 2:
        raise SystemExit(f"error: model '{text}': sizes must be positive, NH a multiple of NKV, HS even")
    if not (dims.theta > 0 and dims.eps > 0):
        raise SystemExit(f"error: model '{text}': theta and eps must be positive")
    if not rope_fits(dims):
        raise SystemExit(f"error: model '{text}': {ROPE_RULE}")
    return dims


ROPE_RULE = ("rope_factor is 1 to 1e6, alone or with the other three: rope_low above 0, rope_high above it, "
             "rope_original at least 1")


def rope_fits(d):
    others = d.rope_low, d.rope_high, d.rope_original
    if d.rope_factor and any(others):
        return 1 <= d.rope_factor <= 1e6 and 0 < d.rope_low < d.rope_high and d.rope_original >= 1
    return not any(others) and (d.rope_factor == 0 or 1 <= d.rope_factor <= 1e6)


def rope_divisors(dims):
    """(HS/2) what the frequencies theta^(-2i/HS) are divided by. Llama 3.1 keeps those that turn rope_high
    times or more in rope_original tokens, divides those that turn rope_low times or less, and blends between.
    """
    turns = dims.rope_original * dims.theta ** (-2 * np.arange(dims.HS // 2) / dims.HS) / (2 * math.pi)
    kept = np.clip((turns - dims.rope_low) / (dims.rope_high - dims.rope_low or 1), 0, 1)
    return 1 / ((1 - kept) / (dims.rope_factor or 1) + kept)


def modern(depth, value_embed):
    """The dial m12, m24: Qwen3's form, as wide as 64 x its depth. v12, v24 have value embeddings."""
    C = 64 * depth
    return Llama(maxT=1024, V=50257, L=depth, NH=C // 128, NKV=C // 128, HS=128, C=C,
                 F=-(-8 * C // (3 * 128)) * 128, qk_norm=True, value_embed=value_embed)


GPT2_SIZES = {12: (12, 768), 24: (16, 1024), 36: (20, 1280), 48: (25, 1600)}             # depth: (NH, C)
GPT3_SIZES = {384: (6, 6), 768: (12, 12), 1024: (24, 16), 1536: (24, 16), 2048: (24, 16),
              2560: (32, 32), 4096: (32, 32), 12288: (96, 96)}                           # C: (L, NH)


def parse_model(text):
    """Dims of d12, gpt3:c768, L4,NH4,C128,T128,V256 or of a checkpoint file; Llama of the other family."""
    if os.path.isfile(text):
        return read_checkpoint_header(text)[0]
    if "," in text and (at := re.search(",(window|pattern)=", text)):
        return with_windows(parse_model(text[:at.start()]), text[at.start() + 1:])
    if text.startswith("llama:") or text in LLAMA_NAMES:
        return parse_llama(LLAMA_NAMES.get(text, text))
    if (m := re.fullmatch(r"([mv])(\d+)", text)) and int(m[2]) % 2 == 0 and int(m[2]) > 0:
        return modern(int(m[2]), m[1] == "v")
    m = re.fullmatch(r"d(\d+)", text)
    if m and int(m[1]) in GPT2_SIZES:
        NH, C = GPT2_SIZES[int(m[1])]
        return Dims(maxT=1024, V=50257, L=int(m[1]), NH=NH, C=C)
    m = re.fullmatch(r"gpt3:c(\d+)", text)
    if m and int(m[1]) in GPT3_SIZES:
        L, NH = GPT3_SIZES[int(m[1])]
        return Dims(maxT=2048, V=50257, L=L, NH=NH, C=int(m[1]))
    fields = dict(re.findall(r"(L|NH|C|T|V)(\d+)(?:,|$)", text))
    if set(fields) == {"L", "NH", "C", "T", "V"}:
        L, NH, C, T, V = (int(fields[k]) for k in ("L", "NH", "C", "T", "V"))
        dims = Dims(maxT=T, V=V, L=L, NH=NH, C=C)
        if min(dims.maxT, dims.V, dims.L, dims.NH, dims.C) < 1 or dims.C % dims.NH:
            raise SystemExit(f"error: model '{text}': sizes must be positive and C a multiple of NH")
        return dims
    raise SystemExit(f"error: model '{text}' is neither a file nor d12 d24 d36 d48, gpt3:cN, "
                     f"L4,NH4,C128,T128,V256, m12, v12 (or another even depth), {' '.join(LLAMA_NAMES)}, "
                     "llama:L12,NH6,NKV6,HS128,C768,F2048,T1024,V50257")


GATE_CHANNELS = 12      # that the gate of a value embedding reads


def value_layers(dims):
    return range(1, dims.L, 2) if dims.value_embed else ()


# name, one per layer (or a function: the layers that have one), shape, init, weight decay; in file order. A
# row's index is its RNG id. A row without elements is one that the model lacks. "resid": a projection onto
# the residual stream.
PARAMS = [
    ("wte",      False, lambda d: (d.Vp, d.C),                              "normal", True),
    ("wpe",      False, lambda d: (d.maxT * (not d.is_llama), d.C),         "normal", True),
    ("ln1w",     True,  lambda d: (d.C * d.norm_weights,),                  "one",    False),
    ("ln1b",     True,  lambda d: (d.C * (d.norm == 0),),                   "zero",   False),
    ("qkvw",     True,  lambda d: ((d.NH + 2 * d.NKV) * d.HS, d.C),         "normal", True),
    ("qkvb",     True,  lambda d: ((d.NH + 2 * d.NKV) * d.HS * d.qkv_bias,), "zero",  False),
    ("attprojw", True,  lambda d: (d.C, d.NH * d.HS),                       "resid",  True),
    ("attprojb", True,  lambda d: (d.C * (not d.is_llama),),                "zero",   False),
    ("ln2w",     True,  lambda d: (d.C * (d.block < 2) * d.norm_weights,),  "one",    False),
    ("ln2b",     True,  lambda d: (d.C * (d.block < 2) * (d.norm == 0),),   "zero",   False),
    ("fcw",      True,  lambda d: (d.F * (1 + d.gated), d.C),   "normal", True),
    ("fcb",      True,  lambda d: (d.F * (not d.is_llama),),                "zero",   False),
    ("fcprojw",  True,  lambda d: (d.C, d.F),                               "resid",  True),
    ("fcprojb",  True,  lambda d: (d.C * (not d.is_llama),),                "zero",   False),
    ("lnfw",     False, lambda d: (d.C * d.norm_weights,),                  "one",    False),
    ("lnfb",     False, lambda d: (d.C * (d.norm == 0),),                   "zero",   False),
    ("qnw",      True,  lambda d: (d.HS * (d.qk_norm and d.norm_weights),), "one",    False),
    ("knw",      True,  lambda d: (d.HS * (d.qk_norm and d.norm_weights),), "one",    False),
    ("headw",    False, lambda d: (d.Vp * (not d.tied), d.C),               "zero",   True),
    ("vew",      value_layers, lambda d: (d.Vp * d.value_embed, d.NKV * d.HS), "normal", False),
    ("vegw",     value_layers, lambda d: (d.NKV * d.value_embed, GATE_CHANNELS), "zero", False),
]
BY_TOKEN = "wte", "headw", "vew"        # with a row for each token, and padding behind
NAMES = [row[0] for row in PARAMS]


def param_shape(dims, name):
    """Shape of a whole table row: layers come first."""
    _, layers, shape, _, _ = PARAMS[NAMES.index(name)]
    return ((len(layers_of(dims, name)),) if layers else ()) + shape(dims)


def layers_of(dims, name):
    """The layers that have a copy of a table row; (0,) of a row that is not one per layer."""
    layers = PARAMS[NAMES.index(name)][1]
    return layers(dims) if callable(layers) else range(dims.L) if layers else (0,)


# ---- random numbers: Philox 4x32-10, vectorised over blocks ----
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Counter words: scalars or arrays of one shape; key: scalars. Four arrays of uint32 held in uint64."""
    low = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(c, dtype=np.uint64) for c in (c0, c1, c2, c3)))
    k0, k1 = int(k0), int(k1)
    for _ in range(10):
        p0 = c0 * np.uint64(0xD2511F53)
        p1 = c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = ((p1 >> shift) ^ c1 ^ np.uint64(k0), p1 & low,
                          (p0 >> shift) ^ c3 ^ np.uint64(k1), p0 & low)
        k0 = (k0 + 0x9E3779B9) & 0xFFFFFFFF
        k1 = (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def rand_block(seed, purpose, stream, block):
    block = np.asarray(block, dtype=np.uint64)
    return philox4x32(block & np.uint64(0xFFFFFFFF), block >> np.uint64(32), stream, purpose,
                      seed & 0xFFFFFFFF, seed >> 32)


def dropout_factors(seed, step, place, first_row, rows, C, p):
    """(rows,C): 0, or what keeps the mean. A block of 128 bits draws for 8 neighbours of a row, 16 each."""
    mask = 0xFFFFFFFF
    row = np.arange(first_row, first_row + rows, dtype=np.uint64)[:, None]
    words = philox4x32(np.arange((C + 7) // 8, dtype=np.uint64)[None], row & np.uint64(mask),
                       np.uint64(place) | (row >> np.uint64(32)) << np.uint64(16), RAND_DROPOUT,
                       (seed & mask) ^ (step * 0x9E3779B1 & mask), ((seed >> 32) + step) & mask)
    draws = np.stack([w >> np.uint64(16 * half) & np.uint64(0xFFFF) for w in words for half in (0, 1)], -1)
    dropped = min(max(int(p * 65536 + 0.5), 1), 65535)
    return np.where(draws.reshape(rows, -1)[:, :C] < dropped, 0.0, np.float32(65536 / (65536 - dropped)))


def rand_permuted(seed, stream, n, i):
    """Elements i (an array) of the random order (seed, stream) of 0 .. n-1: Feistel rounds, cycle walking."""
    bits = max(6, (n - 1).bit_length())
    low_bits = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64(2 ** (bits // 2) - 1), np.uint64(2 ** (bits - bits // 2) - 1)
    i = np.array(i, dtype=np.uint64)
    out = np.ones(i.shape, dtype=bool)
    while out.any():
        low, high = i[out] & low_mask, i[out] >> low_bits
        for r in range(0, 8, 2):
            word = rand_block(seed, RAND_SHUFFLE, stream, low | np.uint64(r << 32))[0]
            high = (high + word) & high_mask
            word = rand_block(seed, RAND_SHUFFLE, stream, high | np.uint64((r + 1) << 32))[0]
            low = (low + word) & low_mask
        i[out] = high << low_bits | low
        out = i >= n
    return i.astype(np.int64)


def rand_unit(seed, purpose, stream, count):
    """Numbers 0..count-1 of a stream, in [0, 1)."""
    words = rand_block(seed, purpose, stream, np.arange((count + 3) // 4, dtype=np.uint64))
    return np.stack(words, axis=-1).reshape(-1)[:count].astype(np.float64) / 2.0 ** 32


def normal_exact(w0, w1, odd):
    """One value through the C library, as the C++ code computes it."""
    radius = math.sqrt(-2.0 * math.log((w0 + 1.0) * (1.0 / 4294967296.0)))
    phi = w1 * (6.283185307179586476925286766559 / 4294967296.0)
    return radius * (math.sin(phi) if odd else math.cos(phi))


def rand_normal(seed, tensor, count, first=0):
    """Elements first..first+count-1 (first % 4 == 0) of N(0,1) of a tensor, bit for bit those of C++.

    numpy's log, sin and cos may differ from the C library's in the last bits of the double. That matters only
    where the double lies next to a boundary between two floats, a few in 1e7: those are computed again."""
    assert first % 4 == 0
    out = np.empty((count + 3) // 4 * 4, dtype=np.float32)
    chunk = 1 << 16
    for start in range(0, len(out) // 4, chunk):
        blocks = np.arange(start, min(start + chunk, len(out) // 4), dtype=np.uint64) + np.uint64(first // 4)
        words = rand_block(seed, RAND_INIT, tensor, blocks)
        part = np.empty((len(blocks), 4), dtype=np.float64)
        for pair in (0, 1):
            w0, w1 = words[2 * pair].astype(np.float64), words[2 * pair + 1].astype(np.float64)
            radius = np.sqrt(-2.0 * np.log((w0 + 1.0) * (1.0 / 4294967296.0)))
            phi = w1 * (6.283185307179586476925286766559 / 4294967296.0)
            part[:, 2 * pair] = radius * np.cos(phi)
            part[:, 2 * pair + 1] = radius * np.sin(phi)
        near = (part * (1 - 1e-14)).astype(np.float32) != (part * (1 + 1e-14)).astype(np.float32)
        for row, col in zip(*np.nonzero(near)):
            w0, w1 = (float(words[col // 2 * 2 + k][row]) for k in (0, 1))
            part[row, col] = normal_exact(w0, w1, col % 2)
        out[4 * start:4 * start + part.size] = part.reshape(-1).astype(np.float32)
    return out[:count]


def init_params(dims, seed, kind="gpt2"):
    """Initial weights: {name: float32 array}, layers stacked in front, rows of wte beyond V zero. Llama's
    projections onto the residual stream are zero as its head is: each layer begins as the identity.

    kind "wide-positions": the same with wpe from N(0,1), PyTorch's default for an embedding. Normalising a
    residual stream of 0.03 multiplies gradients by 30 at the start; from N(0,1) the first norms are 2."""
    params = {}
    for tensor, (name, _, _, init, _) in enumerate(PARAMS):
        shape = param_shape(dims, name)
        if init in ("one", "zero") or init == "resid" and dims.is_llama or not math.prod(shape):
            params[name] = np.full(shape, 1.0 if init == "one" else 0.0, dtype=np.float32)
            continue
        std = np.float32(0.02 if init == "normal" else 0.02 / math.sqrt(2.0 * dims.L))
        if name == "wpe" and kind == "wide-positions":
            std = np.float32(1.0)
        params[name] = np.zeros(shape, dtype=np.float32)
        layers = layers_of(dims, name)
        for l, copy in zip(layers, params[name].reshape(len(layers), -1), strict=True):
            live = len(copy) // dims.Vp * dims.V if name in BY_TOKEN else len(copy)
            copy[:live] = rand_normal(seed, tensor, live, l * live) * std       # numbered by layer
    return params


# ---- bf16 in numpy ----
def to_bf16_bits(x):
    """Round to nearest, ties to even. A NaN stays one: rounding could carry it into -0."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.where(np.isnan(x), bits | np.uint32(0x400000), bits + half)
    return (rounded >> np.uint32(16)).astype(np.uint16)


def from_bf16_bits(bits):
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def round_params(params, kind):
    """A copy whose values are exact in bfloat16 or float16, still held as float32."""
    if kind == "bfloat16":
        return {k: from_bf16_bits(to_bf16_bits(v)).reshape(v.shape) for k, v in params.items()}
    return {k: v.astype(np.float16).astype(np.float32) for k, v in params.items()}


# ---- files ----
class FileError(SystemExit):
    def __init__(self, path, text):
        super().__init__(f"error: '{path}': {text}")


def open_checked(path):
    try:
        return open(path, "rb")
    except OSError as e:
        raise FileError(path, e.strerror)


def read_header(f, path, magic):
    head = f.read(1024)
    if len(head) != 1024:
        raise FileError(path, "shorter than its 1024-byte header")
    header = np.frombuffer(head, dtype="<i4")
    if header[0] != magic:
        raise FileError(path, f"starts with {header[0]}, expected {magic}")
    return header


def read_array(f, path, dtype, shape):
    count = math.prod(shape)
    data = np.fromfile(f, dtype=dtype, count=count)
    if data.size != count:
        raise FileError(path, f"truncated: wanted {count} values, found {data.size}")
    return data.reshape(shape)



FLOAT_WORDS = [16, 17, 18, 52, 53, 54, 55]          # of a header: LLAMA_FLOATS' bits


def llama_to_header(dims, header):
    """Words 10 to 15, the family, sizes, the MLP and bits, and the floats."""
    bits = sum(getattr(dims, name) << i for i, name in enumerate(LLAMA_FLAGS))
    header[10:16] = 1, dims.NKV, dims.HS, dims.F, MLPS[dims.mlp].number, bits
    header[FLOAT_WORDS] = np.array([getattr(dims, name) for name in LLAMA_FLOATS], dtype="<f4").view("<i4")


def has_later_words(dims):
    """Words that model files of the first versions do not have."""
    return dims.is_llama and (dims.qkv_bias or dims.value_embed or dims.rope_factor != 0)


WINDOW_WORD, PATTERN_WORDS = 19, slice(20, 52)      # of a header; a pattern's letters are bytes, then zeros


def windows_of_header(path, header, L):
    window = int(header[WINDOW_WORD])
    pattern = header[PATTERN_WORDS].tobytes().rstrip(b"\0").decode("latin1")
    if not 1 <= window <= 2**24 or not re.fullmatch("[SL]{1,128}", pattern) or len(pattern) > L:
        raise FileError(path, f"window {window}, pattern {pattern!r}: not windows of {L} layers")
    return {"window": window, "pattern": pattern}


def llama_of_header(path, header, **sizes):
    family, NKV, HS, F, mlp, bits = (int(v) for v in header[10:16])
    floats = {name: float(str(v))                               # 1e-05, not 9.99e-06
              for name, v in zip(LLAMA_FLOATS, header[FLOAT_WORDS].view("<f4"))}
    words = {row.number: word for word, row in MLPS.items()}
    fits = family == 1 and mlp in words and min(NKV, HS, F) >= 1 and sizes["NH"] % NKV == 0
    flags = {name: bool(bits >> i & 1) for i, name in enumerate(LLAMA_FLAGS)}
    if bits >> len(LLAMA_FLAGS):
        raise FileError(path, f"words of its shape, {bits}, are not all known")
    dims = Llama(**sizes, NKV=NKV, HS=HS, F=F, mlp=words.get(mlp), **floats, **flags)
    if not fits or HS % 2 or not (dims.theta > 0 and dims.eps > 0 and dims.softcap >= 0 and rope_fits(dims)):
        raise FileError(path, f"family {family}, NKV {NKV}, HS {HS}, F {F}, mlp {mlp}, "
                        + ", ".join(f"{name} {value}" for name, value in floats.items())
                        + ": not of family llama")
    return dims


def file_shape(dims, name, Vp):
    """As param_shape, in a file that pads V to Vp."""
    shape = param_shape(dims, name)
    return (*shape[:-2], Vp, shape[-1]) if name in BY_TOKEN and math.prod(shape) else shape


def read_checkpoint_header(path):
    """(dims, version, padded V) of a model file; version is 3 or 5, of what is not GPT-2, too. Other programs
    may have padded V to another multiple than Dims.Vp."""
    with open_checked(path) as f:
        header = read_header(f, path, MAGIC_MODEL)
    version, maxT, V, L, NH, C, Vp = (int(v) for v in header[1:8])
    windows, version = version >= 1000, version % 1000
    known = version % 100 in (3, 5) and version // 100 in (0, 1, 2, 3)
    if header[1] != version + 1000 * windows or not known:
        raise FileError(path, f"version {header[1]}; 3 (fp32) and 5 (bf16) can be read, or 100, 200 or 300 "
                              "more, and 1000 more with windows")
    block, norm = (int(v) for v in header[8:10]) if version >= 100 else (0, 0)
    sizes = {"maxT": maxT, "V": V, "L": L, "NH": NH, "C": C}
    sizes.update(windows_of_header(path, header, L) if windows else {})
    if version >= 200:
        dims = llama_of_header(path, header, **sizes)
        if has_later_words(dims) != (version >= 300):
            raise FileError(path, f"version {header[1]} does not go with {dims.text()}")
    else:
        dims = Dims(**sizes, block=block, norm=norm)
    version %= 100
    fits = min(maxT, V, L, NH, C) >= 1 and (dims.is_llama or C % NH == 0)
    if not fits or Vp < V or block not in (0, 1, 2) or norm not in (0, 1):
        raise FileError(path, f"impossible sizes: {dims.text()}, V padded to {Vp}, block {block} norm {norm}")
    count = sum(math.prod(file_shape(dims, name, Vp)) for name in NAMES)
    expected = 1024 + count * (4 if version == 3 else 2)
    if os.path.getsize(path) != expected:
        raise FileError(path, f"{os.path.getsize(path)} bytes, expected {expected}")
    return dims, version, Vp


def chat_template_of(path):
    """What a model file's header names: the number of a chat template, or 0: it knows no conversations."""
    with open_checked(path) as f:
        return int(read_header(f, path, MAGIC_MODEL)[252])


def check_checksum(path):
    """The last two words of a header are the file's checksum, for which they count as 0. In files of other
    programs they are 0."""
    with open_checked(path) as f:
        header = f.read(1024)
        digest = xxhash.xxh64(header[:1016] + bytes(8))
        for block in iter(lambda: f.read(1 << 20), b""):
            digest.update(block)
        if int.from_bytes(header[1016:], "little") not in (0, digest.intdigest()):
            raise FileError(path, "damaged: it does not have the checksum in its header\n"
                                  "hint: take an earlier one")


def read_checkpoint(path):
    """(dims, params as float32 whatever the version)."""
    dims, version, Vp = read_checkpoint_header(path)
    check_checksum(path)
    params = {}
    with open_checked(path) as f:
        f.seek(1024)
        for name in NAMES:
            data = read_array(f, path, "<f4" if version == 3 else "<u2", file_shape(dims, name, Vp))
            params[name] = data if version == 3 else from_bf16_bits(data)
    for name in BY_TOKEN:
        if Vp != dims.Vp and params[name].size:
            live = params[name][..., :dims.V, :]
            params[name] = np.pad(live, [*[(0, 0)] * (live.ndim - 2), (0, dims.Vp - dims.V), (0, 0)])
    return dims, params


def header_words(*values):
    header = np.zeros(256, dtype="<i4")
    header[:len(values)] = values
    return header


def checkpoint_header(dims, version):
    """What is not GPT-2 has versions of its own."""
    own = 300 if has_later_words(dims) else 200 if dims.is_llama else 100 if dims.block or dims.norm else 0
    own += 1000 if dims.window else 0
    header = header_words(MAGIC_MODEL, own + version, dims.maxT, dims.V, dims.L, dims.NH, dims.C, dims.Vp,
                          dims.block, dims.norm)
    if dims.is_llama:
        llama_to_header(dims, header)
    header[WINDOW_WORD] = dims.window
    header[PATTERN_WORDS] = np.frombuffer(dims.pattern.encode().ljust(128, b"\0"), "<i4")
    return header


def write_checkpoint(path, dims, params, version=3):
    with whole_file(path) as f:
        checkpoint_header(dims, version).tofile(f)
        for name in NAMES:
            data = params[name]
            assert data.shape == param_shape(dims, name), name
            (data.astype("<f4") if version == 3 else to_bf16_bits(data).astype("<u2")).tofile(f)


def write_tensors(path, dims, x, y, logits, loss, grads):
    """Reference tensors: x, y, logits over the V live columns, the loss, every gradient in table order."""
    B, T = x.shape
    assert logits.shape == (B, T, dims.V)
    with whole_file(path) as f:
        header_words(MAGIC_TENSORS, 2, B, T).tofile(f)
        x.astype("<i4").tofile(f)
        y.astype("<i4").tofile(f)
        logits.astype("<f4").tofile(f)
        np.array([loss], dtype="<f4").tofile(f)
        for name in NAMES:
            assert grads[name].shape == param_shape(dims, name), name
            grads[name].astype("<f4").tofile(f)


def read_tensors(path, dims):
    """{"x", "y", "logits", "loss", "grads": {name: array}}; the file has only B and T of the shapes."""
    with open_checked(path) as f:
        header = read_header(f, path, MAGIC_TENSORS)
        if header[1] != 2:
            raise FileError(path, f"version {header[1]}, expected 2")
        B, T = int(header[2]), int(header[3])
        count = 2 * B * T + B * T * dims.V + 1 + sum(math.prod(param_shape(dims, name)) for name in NAMES)
        if os.path.getsize(path) != 1024 + 4 * count:
            size = os.path.getsize(path)
            raise FileError(path, f"{size} bytes, expected {1024 + 4 * count} for {dims.text()}")
        return {
            "x": read_array(f, path, "<i4", (B, T)), "y": read_array(f, path, "<i4", (B, T)),
            "logits": read_array(f, path, "<f4", (B, T, dims.V)),
            "loss": float(read_array(f, path, "<f4", (1,))[0]),
            "grads": {name: read_array(f, path, "<f4", param_shape(dims, name)) for name in NAMES},
        }


def write_shard(path, tokens, wide=False):
    with whole_file(path) as f:
        kind = (MAGIC_WIDE_SHARD, WIDE_SHARD_VERSION) if wide else (MAGIC_SHARD, 1)
        header_words(*kind, len(tokens)).tofile(f)
        np.asarray(tokens, dtype="<u4" if wide else "<u2").tofile(f)


# ---- data order ----
class Loader:
    """Windows of T tokens from shards, in the order of dataloader.h: a function of (seed, sample)."""

    def __init__(self, pattern, B, T, shuffle=True, seed=1337, vocab=None):
        paths = sorted(glob.glob(pattern))
        if not paths:
            raise SystemExit(f"error: no file matches '{pattern}'\nhint: make tinyshakespeare")
        self.B, self.T, self.shuffle, self.seed, self.position = B, T, shuffle, seed, 0
        self.shards = [self._open(path, vocab) for path in paths]
        self.masks = [self._mask(path, len(tokens)) for path, tokens in zip(paths, self.shards)]
        windows = [(len(tokens) - 1) // T for tokens in self.shards]
        self.first_window = np.cumsum([0] + windows[:-1])           # of each shard, among all windows
        self.samples_per_epoch = sum(windows)
        if self.samples_per_epoch < 1:
            raise SystemExit(f"error: '{pattern}' has no window of {T} + 1 tokens")

    @staticmethod
    def _open(path, vocab):
        with open_checked(path) as f:
            wide = f.read(4) == MAGIC_WIDE_SHARD.to_bytes(4, "little")
            f.seek(0)
            read_header(f, path, MAGIC_WIDE_SHARD if wide else MAGIC_SHARD)
        if os.path.getsize(path) % (4 if wide else 2) or os.path.getsize(path) <= 1024:
            raise FileError(path, "no tokens, or half a token")
        tokens = np.memmap(path, dtype="<u4" if wide else "<u2", mode="r", offset=1024)
        if vocab and int(tokens.max()) >= vocab:
            raise FileError(path, f"token {tokens.max()} does not fit the model's vocabulary of {vocab}")
        return tokens

    @staticmethod
    def _mask(path, tokens):
        """1 for each token that the loss counts, in the file beside the shard; None: it counts all."""
        path = path.removesuffix(".bin") + ".mask"
        mask = np.fromfile(path, dtype="u1") if os.path.exists(path) else None
        if mask is not None and (len(mask) != tokens or mask.max() > 1):
            raise FileError(path, f"not {tokens} bytes that are 0 or 1")
        return mask

    def windows(self, samples):
        """Which window, of those of all shards one after another, each sample is."""
        epochs, windows = np.divmod(np.asarray(samples, dtype=np.int64), self.samples_per_epoch)
        if self.shuffle:
            for epoch in np.unique(epochs):
                here = epochs == epoch
                windows[here] = rand_permuted(self.seed, int(epoch) & 0xFFFFFFFF, self.samples_per_epoch,
                                              windows[here])
        return windows

    def row(self, window):
        s = int(np.searchsorted(self.first_window, window, side="right")) - 1
        start = (int(window) - int(self.first_window[s])) * self.T
        span = slice(start, start + self.T + 1)
        tokens = self.shards[s][span].astype(np.int64)
        counted = tokens if self.masks[s] is None else np.where(self.masks[s][span] == 1, tokens, -1)
        return tokens[:-1], counted[1:]

    def next(self):
        """Inputs and targets; a target that is not counted is -1."""
        rows = [self.row(w) for w in self.windows(self.position + np.arange(self.B))]
        self.position += self.B
        return tuple(np.stack(side) for side in zip(*rows))
