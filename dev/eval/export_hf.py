#!/usr/bin/env python3
"""A trained model as Hugging Face's GPT2LMHeadModel: a folder for transformers, lm-eval and others.

    python3 dev/eval/export_hf.py runs/mine gpt2-mine               # a run's last model
    python3 dev/eval/export_hf.py model_00019073.bin gpt2-mine --dtype fp32

The folder has model.safetensors, config.json, generation_config.json, a model card (README.md) and, where
the vocabulary is GPT-2's (V=50257) or single bytes (V=256), tokenizer.json, tokenizer_config.json, vocab.json
and merges.txt, made from dev/data/gpt2_bpe: nothing is downloaded. The weights keep their bits unless --dtype
names another type. It appears whole or not at all. Needs numpy, neither torch nor transformers.
"""
import argparse
import json
import os
import re
import shutil
import signal
import stat
import sys

sys.path[1:1] = [os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", *more)
                 for more in ((), ("reference",))]
from venv_python import ROOT, take_the_venv         # noqa: E402


def die(message):
    sys.exit("error: " + message)


def mode(path):
    """What os.stat says it is; 0: nothing is there. Any other error is raised, unlike by os.path.exists."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


try:
    import numpy as np
except ImportError:             # .venv, which setup.sh has filled, has one: the program starts again with it
    take_the_venv()
    die("no numpy in this Python\n"
        "hint: scripts/setup.sh installs it into .venv; or pip install numpy, in a venv of yours")

from formats import read_checkpoint, read_checkpoint_header, to_bf16_bits       # noqa: E402

MERGES = os.path.join(ROOT, "dev/data/gpt2_bpe/vocab.bpe")
END_OF_TEXT = "<|endoftext|>"
TOKENIZER_NAMES = ["tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"]
DTYPES = {"fp32": "F32", "bf16": "BF16"}            # --dtype, and safetensors' word for it
LAYER = {"ln1": "ln_1", "qkv": "attn.c_attn", "attproj": "attn.c_proj", "ln2": "ln_2", "fc": "mlp.c_fc",
         "fcproj": "mlp.c_proj"}


# ---- weights ----

def weights(dims, params):
    """{transformers' name: array}: no padding, one for each layer, linear layers (in, out)."""
    tensors = {"wte.weight": params["wte"][:dims.V], "wpe.weight": params["wpe"]}
    for layer in range(dims.L):
        for ours, theirs in LAYER.items():
            tensors[f"h.{layer}.{theirs}.weight"] = params[ours + "w"][layer].T
            tensors[f"h.{layer}.{theirs}.bias"] = params[ours + "b"][layer]
    tensors.update({"ln_f.weight": params["lnfw"], "ln_f.bias": params["lnfb"]})
    return {"transformer." + name: array for name, array in tensors.items()}


def write_safetensors(path, tensors, dtype):
    """The length of a table, the table, the bytes. The package of this name has no bf16 without PyTorch."""
    table, at, width = {"__metadata__": {"format": "pt"}}, 0, 4 if dtype == "F32" else 2
    for name, array in tensors.items():
        table[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [at, at + width * array.size]}
        at += width * array.size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)                         # what follows is aligned for readers that map it
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            f.write(np.ascontiguousarray(array if dtype == "F32" else to_bf16_bits(array)))


def count_parameters(dims):
    return (dims.V + dims.maxT) * dims.C + dims.L * (12 * dims.C + 13) * dims.C + 2 * dims.C


def last_model(folder):
    """The newest model_*.bin of a run."""
    steps = [int(m[1]) for m in (re.fullmatch(r"model_(\d{8,})\.bin", n) for n in os.listdir(folder)) if m]
    if not steps:
        die(f"no model_*.bin in '{folder}'\nhint: give a model_*.bin, or the folder of a run that saved one")
    return os.path.join(folder, f"model_{max(steps):08d}.bin")


def read_model(path):
    """(dims, {name: array}, its type)"""
    if not stat.S_ISREG(mode(path)):
        die(f"no file '{path}'\nhint: give a model_*.bin, or the folder of a run")
    dims, version, _ = read_checkpoint_header(path)
    if dims.block or dims.norm:
        kinds = ("sequential", "parallel", "parallel-tied")[dims.block], ("layernorm", "rmsnorm")[dims.norm]
        die(f"'{path}' is not GPT-2: its block is {kinds[0]} and its norm {kinds[1]}, which "
            "transformers' GPT-2 does not compute\nhint: such a model runs here alone: train_gpt2cu -e FILE")
    return dims, read_checkpoint(path)[1], {3: "F32", 5: "BF16"}[version]


# ---- the configuration ----

def model_config(dims, dtype):
    """What transformers must be told; whatever it could take otherwise by default is spelled out."""
    end = end_of_text(dims.V)
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2",
        "vocab_size": dims.V, "n_positions": dims.maxT, "n_ctx": dims.maxT,
        "n_embd": dims.C, "n_layer": dims.L, "n_head": dims.NH, "n_inner": None,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "initializer_range": 0.02,
        "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False, "tie_word_embeddings": True, "use_cache": True,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,       # dropout is no part of a model file
        "bos_token_id": end, "eos_token_id": end,
        "torch_dtype": {"F32": "float32", "BF16": "bfloat16"}[dtype],
    }


# ---- the tokenizer ----

def end_of_text(V):
    """The token between documents, or None where the vocabulary is neither GPT-2's nor bytes."""
    return {50257: 50256, 256: 0}.get(V)


def byte_characters():
    """{byte: character} in the order of GPT-2's ids. It writes every byte as a visible character: those of
    Latin-1 as they are, the others from U+0100 on."""
    visible = [b for b in range(256) if 0x21 <= b <= 0x7E or b >= 0xA1 and b != 0xAD]
    hidden = [b for b in range(256) if b not in visible]
    return {**{b: chr(b) for b in visible}, **{b: chr(0x100 + i) for i, b in enumerate(hidden)}}


def vocabulary(V):
    """({token: id}, merges). Token 0 of a byte model is the end of a text, and no text has such a byte."""
    characters = byte_characters()
    if V == 256:
        return {END_OF_TEXT if b == 0 else characters[b]: b for b in range(256)}, []
    with open(MERGES, encoding="utf-8") as f:
        merges = f.read().split("\n")[1:-1]
    tokens = [*characters.values(), *(merge.replace(" ", "") for merge in merges), END_OF_TEXT]
    if len(set(tokens)) != V or len(tokens) != V:
        die(f"'{MERGES}' is damaged: {len(tokens)} tokens, expected {V}\nhint: git checkout {MERGES}")
    return {token: i for i, token in enumerate(tokens)}, merges


def tokenizer_files(dims):
    """{file name: text}"""
    if end_of_text(dims.V) is None:
        return {}
    vocab, merges = vocabulary(dims.V)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    special = {"content": END_OF_TEXT, "single_word": False, "lstrip": False, "rstrip": False,
               "normalized": False, "special": True}
    fast = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": vocab[END_OF_TEXT], **special}],
        "normalizer": None, "pre_tokenizer": byte_level, "post_processor": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": END_OF_TEXT, "continuing_subword_prefix": "",
                  "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "vocab": vocab,
                  "merges": merges},
    }
    settings = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": dims.maxT, "add_prefix_space": False,
                "bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "unk_token": END_OF_TEXT,
                "clean_up_tokenization_spaces": False}
    texts = json.dumps(fast, ensure_ascii=False), json.dumps(settings, indent=2) + "\n", \
        json.dumps(vocab, ensure_ascii=False), "\n".join(["#version: 0.2", *merges]) + "\n"
    return dict(zip(TOKENIZER_NAMES, texts))


# ---- the folder ----

def model_card(name, dims, dtype, source):
    """Short: what the files are; what it was trained on, its maker has to say."""
    loss = validation_loss(source)
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation", "---", f"# {name}", "",
             f"GPT-2 with {count_parameters(dims):,} parameters: {dims.L} layers, {dims.NH} heads, "
             f"{dims.C} channels, {dims.maxT} positions, {dims.V} tokens, "
             f"{'fp32' if dtype == 'F32' else 'bf16'}. Exported from `{os.path.basename(source)}`"
             + (f", validation loss {loss}" if loss else "") + ".", "",
             "```python", "from transformers import AutoModelForCausalLM, AutoTokenizer",
             "model = AutoModelForCausalLM.from_pretrained(folder)",
             "tokenizer = AutoTokenizer.from_pretrained(folder)", "```", "",
             f"The trainer begins each text with `{END_OF_TEXT}`, which the tokenizer does not add: "
             "put it in front of a prompt.", "",
             "Training data and licence: to be filled in by who publishes it."]
    if end_of_text(dims.V) is None:
        lines[-6:-2] = ["```", "", "Its tokenizer is not known, and none is here."]
    return "\n".join(lines) + "\n"


def validation_loss(path):
    """What the run's main.log says of this step, if it lies beside the model."""
    step = re.fullmatch(r"model_(\d+)\.bin", os.path.basename(path))
    log = os.path.join(os.path.dirname(path), "main.log")
    if not step or not stat.S_ISREG(mode(log)):
        return None
    with open(log, encoding="utf-8", errors="replace") as f:
        found = re.findall(rf"^s:{int(step[1])} tel:(\S+)$", f.read(), re.M)
    return found[-1] if found else None


def check_folder(folder):
    """What is there already must be an empty folder."""
    if not folder:
        die("the folder to write has no name")          # as a path, it would be the current folder
    if os.path.lexists(folder) and not os.path.isdir(folder):
        die(f"'{folder}' exists and is not a folder")
    if mode(folder) and os.listdir(folder):
        die(f"'{folder}' exists and is not empty\nhint: give another folder, or remove this one")


def main():
    for number in (signal.SIGINT, signal.SIGTERM):          # what was begun is removed
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.error = lambda message: die(f"{message}\nhint: {parser.prog} --help")
    parser.add_argument("model", help="model_*.bin, or the folder of a run (its last model)")
    parser.add_argument("folder", help="folder to write")
    parser.add_argument("--dtype", choices=DTYPES, help="type of the weights (default: the file's)")
    args = parser.parse_args()
    folder = os.path.realpath(args.folder)              # a link to a folder stays a link
    made = f"{folder}.{os.getpid()}.tmp"
    try:
        source = last_model(args.model) if stat.S_ISDIR(mode(args.model)) else args.model
        dims, params, dtype = read_model(source)
        dtype = DTYPES.get(args.dtype, dtype)
        check_folder(args.folder)
        config = model_config(dims, dtype)
        generation = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
        generation["pad_token_id"] = config["eos_token_id"]
        texts = {"config.json": json.dumps(config, indent=2) + "\n",
                 "generation_config.json": json.dumps(generation, indent=2) + "\n",
                 "README.md": model_card(os.path.basename(folder), dims, dtype, source),
                 **tokenizer_files(dims)}
        os.makedirs(made)
        for name, text in texts.items():
            with open(os.path.join(made, name), "w", encoding="utf-8") as f:
                f.write(text)
        write_safetensors(os.path.join(made, "model.safetensors"), weights(dims, params), dtype)
        os.rename(made, folder)                 # fails if others have written into the folder since
    except OSError as e:
        die(f"'{e.filename or made}': {e.strerror}")
    finally:
        shutil.rmtree(made, ignore_errors=True)
    print(f"wrote {args.folder}: {os.path.basename(source)}, {count_parameters(dims):,} parameters, {dtype}"
          + ("" if end_of_text(dims.V) is not None else
             f"; no tokenizer: there is none for V={dims.V} (50257: GPT-2, 256: bytes)"))


if __name__ == "__main__":
    main()
