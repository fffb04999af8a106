"""dev/hf.py llama2c: a model file of ours from one of llama2.c, such as stories260K.bin or stories15M.bin.

    python3 dev/hf.py llama2c stories15M.bin model.bin
    ./train_gpt2cu -e model.bin ...

Reads llama2.c's first format (export version 0): seven int32, then fp32 tensors. llama2.c rotates neighbours
of a head, 2j with 2j + 1; here j goes with j + HS/2, so the rows of q and k change places. The program wants
heads of 16, 32, ... and an MLP of 8, 16, ...: smaller ones get zeros, which change no logit. The tokenizer
(SentencePiece) does not come along. Needs numpy.
"""
import math
import os
import stat

from export_hf import die, mode, np         # np from there: it restarts the program where numpy is elsewhere
from formats import NAMES, Llama, param_shape, write_checkpoint


def read_llama2c(path):
    """({"C": .., "F": .., "L": .., "NH": .., "NKV": .., "V": .., "T": ..}, {name: float32 array}). Without an
    own head there is no `head`."""
    if not stat.S_ISREG(mode(path)):
        die(f"no file '{path}'\nhint: give a llama2.c model, such as stories260K.bin")
    with open(path, "rb") as f:
        header = np.fromfile(f, "<i4", 7)
        data = np.fromfile(f, "<f4")
    s = dict(zip(("C", "F", "L", "NH", "NKV", "V", "T"), header.tolist()))
    untied = s.get("V", 0) < 0                          # a negative vocabulary says so
    s["V"] = abs(s.get("V", 0))
    if len(header) < 7 or min(s.values()) < 1 or s["NH"] % s["NKV"] or s["C"] % (2 * s["NH"]):
        die(f"'{path}' is not a llama2.c model of export version 0: it begins with {header.tolist()}\n"
            "hint: the seven numbers are dim, hidden_dim, layers, heads, kv heads, vocabulary, positions")
    C, F, L, V = (s[name] for name in "CFLV")
    HS, kv = C // s["NH"], C // s["NH"] * s["NKV"]
    shapes = {"wte": (V, C), "ln1": (L, C), "q": (L, C, C), "k": (L, kv, C), "v": (L, kv, C), "o": (L, C, C),
              "ln2": (L, C), "gate": (L, F, C), "down": (L, C, F), "up": (L, F, C), "lnf": (C,),
              "cos": (s["T"], HS // 2), "sin": (s["T"], HS // 2), **({"head": (V, C)} if untied else {})}
    sizes = [math.prod(shape) for shape in shapes.values()]
    if os.path.getsize(path) != 28 + 4 * sum(sizes):
        die(f"'{path}' has {os.path.getsize(path)} bytes, expected {28 + 4 * sum(sizes)} for {s}")
    parts = np.split(data, np.cumsum(sizes)[:-1])
    return s, {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts)}


def converted(s, w):
    """(dims, {name: array} as formats.write_checkpoint takes them) of what read_llama2c gives."""
    narrow, NH, NKV = s["C"] // s["NH"], s["NH"], s["NKV"]
    HS, F = math.lcm(narrow, 16), -(-s["F"] // 8) * 8
    dims = Llama(maxT=s["T"], V=s["V"], L=s["L"], NH=NH, C=s["C"], NKV=NKV, HS=HS, F=F, tied="head" not in w)
    # A head as wide as `wider` narrow ones turns its pair wider * j by the angle of a narrow one's pair j.
    wider, element = HS // narrow, np.arange(narrow)
    place = element % 2 * (HS // 2) + wider * (element // 2)

    def spread(rows, heads):                            # (L, heads * narrow, C) -> (L, heads * HS, C)
        out = np.zeros((dims.L, heads, HS, dims.C), np.float32)
        out[:, :, place] = rows.reshape(dims.L, heads, narrow, dims.C)
        return out.reshape(dims.L, heads * HS, dims.C)

    def padded(array, axis, size):
        return np.pad(array, [(0, size - n if i == axis else 0) for i, n in enumerate(array.shape)])

    # The scores are divided by sqrt(HS), where llama2.c divides by sqrt(narrow).
    q = w["q"] * np.float32(math.sqrt(wider))
    params = {
        "wte": padded(w["wte"], 0, dims.Vp), "ln1w": w["ln1"], "ln2w": w["ln2"], "lnfw": w["lnf"],
        "qkvw": np.concatenate([spread(q, NH), spread(w["k"], NKV), spread(w["v"], NKV)], axis=1),
        "attprojw": spread(w["o"].swapaxes(1, 2), NH).swapaxes(1, 2),
        "fcw": np.concatenate([padded(w["gate"], 1, F), padded(w["up"], 1, F)], axis=1),
        "fcprojw": padded(w["down"], 2, F)}
    if not dims.tied:
        params["headw"] = padded(w["head"], 0, dims.Vp)
    absent = {name: np.zeros(param_shape(dims, name), np.float32) for name in NAMES if name not in params}
    return dims, {**params, **absent}


def run(args):
    dims, params = converted(*read_llama2c(args.model))
    write_checkpoint(args.out, dims, params)
    print(f"wrote {args.out}: {dims.text()}")


if __name__ == "__main__":
    die("this program is `python3 dev/hf.py llama2c` now, with the same words behind it")
