#!/usr/bin/env python3
"""A GPT-2 of Hugging Face as model.bin, which the trainer takes with -e.

    python3 dev/eval/import_hf.py gpt2-mine mine.bin            # a folder, of export_hf.py or transformers
    python3 dev/eval/import_hf.py gpt2 gpt2_124M.bin            # a name: needs pip install huggingface_hub
    ./train_gpt2cu sample gpt2_124M.bin --prompt "Once upon a time"

A folder wins over a name. A name is looked for in Hugging Face's cache on this machine, then downloaded
into it. No other file appears but the output, and that whole or not at all. Reads model.safetensors, in one
file or several, and where torch is installed pytorch_model.bin. The type stays bf16 if all weights are, else
it is fp32. What is not plain GPT-2 (another activation, a head of its own, ...) is refused.
"""
import contextlib
import json
import os
import re

from model_files import (DTYPES, STORAGE, Dims, Parser, Tensor, beside, count_parameters, die, dims_error,
                         entries, np, read_safetensors, run_main, synced_file, write_bin)

INDEX = ".index.json"
# What GPT-2 is. transformers' defaults stand first: a config.json without the key means them.
PLAIN = {
    "model_type": ["gpt2"],
    "activation_function": ["gelu_new", "gelu_pytorch_tanh"],       # two names of one function
    "layer_norm_epsilon": [1e-5],
    "scale_attn_weights": [True],
    "scale_attn_by_inverse_layer_idx": [False],
    "reorder_and_upcast_attn": [False],
    "add_cross_attention": [False],
    "quantization_config": [None],
}


# ---- finding it ----

def find_folder(name):
    """A folder on this machine; downloads into Hugging Face's own cache if there is none."""
    if os.path.isdir(name):
        return name
    if os.path.exists(name):
        die(f"'{name}' is a file\nhint: give the folder with config.json and model.safetensors")
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        die(f"'{name}' is neither a folder nor a name such as gpt2 or distilbert/distilgpt2")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        die(f"no folder '{name}', and fetching a model of this name needs huggingface_hub, which this Python "
            "does not have\nhint: pip install huggingface_hub, in a venv of yours")
    patterns = [["config.json", "model.safetensors", "model-*.safetensors", "model.safetensors" + INDEX],
                ["config.json", "pytorch_model.bin", "pytorch_model-*.bin", "pytorch_model.bin" + INDEX]]
    reason = "no reason given"
    for local in (True, False):
        for wanted in patterns:
            try:
                folder = snapshot_download(name, allow_patterns=wanted, local_files_only=local)
            except Exception as e:              # of the hub, of requests, of the disk: one kind per version
                reason = (str(e).strip() or type(e).__name__).split("\n")[0]
                continue
            if weight_files(folder):
                return folder
    die(f"no model '{name}' in the cache on this machine, and none could be downloaded: {reason[:200]}\n"
        f"hint: with a network: hf download {name} config.json model.safetensors")


def weight_files(folder):
    """Paths of the files that hold the tensors, in one piece or several; none if there are none."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if os.path.exists(os.path.join(folder, name)):
            return [os.path.join(folder, name)]
        index = os.path.join(folder, name + INDEX)
        if os.path.exists(index):
            places = read_json(index).get("weight_map")
            if not isinstance(places, dict) or not all(isinstance(p, str) and os.path.basename(p) == p
                                                       for p in places.values()):
                die(f"'{index}' has no weight_map of file names beside it")
            return [os.path.join(folder, part) for part in sorted(set(places.values()))]
    return []


def read_json(path):
    try:
        with open(path, encoding="utf-8") as f:
            found = json.load(f)
    except FileNotFoundError:
        die(f"no file '{path}'\nhint: give the folder with config.json and model.safetensors")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        die(f"'{path}' is not a JSON object")
    return found


# ---- reading it ----

def read_config(path):
    """(dims, whether the head is wte) of a config.json, or a sentence why it is no plain GPT-2."""
    config = read_json(path)
    for key, allowed in PLAIN.items():
        if config.get(key, allowed[0]) not in allowed:
            die(f"'{path}': {key} is {config[key]!r}; GPT-2 has {allowed[0]!r}, nothing else is built")
    sizes = [config.get(key) for key in ("n_positions", "vocab_size", "n_layer", "n_head", "n_embd")]
    if not all(type(size) is int for size in sizes):
        die(f"'{path}' lacks a whole number for n_positions, vocab_size, n_layer, n_head or n_embd")
    dims = Dims(*sizes)
    if dims_error(dims):
        die(f"'{path}': {dims_error(dims)}")
    if config.get("n_inner") not in (None, 4 * dims.C):
        die(f"'{path}': n_inner is {config['n_inner']}; GPT-2 has 4 x n_embd, {4 * dims.C}")
    return dims, config.get("tie_word_embeddings", True)


def read_pytorch(path):
    try:
        import torch
    except ImportError:
        die(f"'{path}' is PyTorch's own format, and this Python has no torch\nhint: pip install torch, in a "
            "venv of yours, or take a model with model.safetensors")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:                      # pickle's, zip's, torch's own
        die(f"'{path}' cannot be read by torch: {str(e).strip().split(chr(10))[0][:200]}")
    names = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        die(f"'{path}' holds something else than named tensors")
    tensors = {}
    for name, value in found.items():
        dtype = names.get(value.dtype, str(value.dtype))
        bits = {"F32": torch.int32, "F16": torch.int16, "BF16": torch.int16}.get(dtype)
        array = value.detach().contiguous().view(bits).numpy().view(STORAGE[dtype]) if bits else None
        tensors[name] = Tensor(dtype, array)
    return tensors


def read_tensors(paths):
    tensors = {}
    for path in paths:
        part = read_safetensors(path) if path.endswith(".safetensors") else read_pytorch(path)
        # older files name the inner model's tensors alone, and carry its attention masks
        for name, tensor in part.items():
            inner = name.startswith("transformer.") or name == "lm_head.weight"
            if not re.search(r"\.attn\.(masked_)?bias$", name):
                tensors[name if inner else "transformer." + name] = tensor
    return tensors


def check_tensors(where, dims, tied, tensors):
    """Each tensor of the table, in its shape and in a type of floats, and none besides."""
    head = tensors.pop("lm_head.weight", None)
    for name, row in entries(dims):
        if name not in tensors:
            die(f"'{where}' lacks the tensor {name}")
        dtype, array = tensors[name]
        if dtype not in STORAGE:
            die(f"'{where}': {name} is of type {dtype}; F32, F16 and BF16 are read")
        if array.shape != row.shape(dims):
            die(f"'{where}': {name} has the shape {array.shape}, config.json means {row.shape(dims)}")
    extra = sorted(set(tensors) - {name for name, _ in entries(dims)})
    if extra:
        die(f"'{where}' has {extra[0]}, which a GPT-2 of {dims.L} layers has not")
    wte = tensors["transformer.wte.weight"]
    if head is None and not tied:
        die(f"'{where}' lacks the tensor lm_head.weight, and its config.json says that it is not wte")
    if head is not None and (head.dtype != wte.dtype
                             or not np.array_equal(head.array.view(np.uint8), wte.array.view(np.uint8))):
        die(f"'{where}': lm_head.weight differs from wte.weight; GPT-2's head is its embedding")


def main():
    parser = Parser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", help="folder with config.json and the weights, or a name such as gpt2")
    parser.add_argument("output", help="model.bin to write")
    parser.add_argument("--dtype", choices=DTYPES, help="type of the file (default: the weights')")
    parser.add_argument("--force", action="store_true", help="replace the output if it exists")
    args = parser.parse_args()
    if os.path.isdir(args.output):
        die(f"'{args.output}' is a folder\nhint: give a file in it: {os.path.join(args.output, 'model.bin')}")
    if os.path.lexists(args.output) and not args.force:
        die(f"'{args.output}' exists\nhint: --force replaces it")
    folder = find_folder(args.model)
    dims, tied = read_config(os.path.join(folder, "config.json"))
    paths = weight_files(folder)
    if not paths:
        die(f"no weights in '{folder}': neither model.safetensors nor pytorch_model.bin")
    tensors = read_tensors(paths)
    check_tensors(folder, dims, tied, tensors)
    all_bf16 = all(tensor.dtype == "BF16" for tensor in tensors.values())
    dtype = DTYPES[args.dtype] if args.dtype else "BF16" if all_bf16 else "F32"
    output = os.path.realpath(args.output)
    os.makedirs(os.path.dirname(output), exist_ok=True)
    made = beside(output)
    try:
        with synced_file(made) as f:
            write_bin(f, dims, tensors, dtype)
        os.replace(made, output)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(made)
    print(f"wrote {args.output}: L={dims.L} NH={dims.NH} C={dims.C} T={dims.maxT} V={dims.V}, "
          f"{count_parameters(dims):,} parameters, {dtype}")


if __name__ == "__main__":
    run_main(main)
