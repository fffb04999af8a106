#!/usr/bin/env python3
"""A trained model for Hugging Face: a folder for transformers, lm-eval and others. GPT-2 becomes a
GPT2LMHeadModel; the family of Llama, by its shape, a Llama-, Qwen3- or NanoChatForCausalLM.

    python3 dev/eval/export_hf.py runs/mine gpt2-mine               # a run's last model
    python3 dev/eval/export_hf.py model_00019073.bin gpt2-mine --dtype fp32

The folder has model.safetensors, config.json, generation_config.json, a model card (README.md) and the
tokenizer, by tokenizer.json and tokenizer_config.json: that of the run's folder, else GPT-2's (V=50257 or
50304) or bytes' (V=256), these also by vocab.json and merges.txt. Nothing is downloaded. The weights keep
their bits unless --dtype names another type. It appears whole or not at all. Needs numpy and xxhash, neither
torch nor transformers.
"""
import argparse
import html
import json
import math
import os
import re
import signal
import stat
import sys
import tempfile
from dataclasses import dataclass

sys.path[1:1] = [os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", *more)
                 for more in ((), ("reference",), ("data",))]
from outputs import guard_terminals, shown          # noqa: E402
from venv_python import take_the_venv               # noqa: E402


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
    from formats import (MLPS, NAMES, chat_template_of, param_shape, read_checkpoint, read_checkpoint_header,
                         to_bf16_bits)
except ImportError as error:    # .venv, which setup.sh has filled, has it: the program starts again with it
    take_the_venv()
    die(f"no {error.name} in this Python\n"
        f"hint: scripts/setup.sh installs it into .venv; or pip install {error.name}, in a venv of yours")

from fetch import Problem                           # noqa: E402
from tokenizer_files import (END_OF_TEXT, GPT2_MERGES, MERGES_NONE, byte_characters,     # noqa: E402
                             for_chats, gpt2_vocabulary, id_of, merges_of, read_head, settings_of,
                             token_ids, tokenizer_bin, tokenizer_config, tokenizer_json)

OWN_NAMES = "tokenizer.json", "tokenizer.bin"       # as get.py has put them beside the shards
MARKS = "{# marks #}"
CHAT_TEMPLATES = {0: None, 1: (                     # as llmc/data/chat_template.h writes conversations
    "{{ eos_token }}{% for message in messages %}"
    "{% set part = namespace(text=message['content'].strip(' \\n\\t\v\f\\r')) %}"
    "{% if message['role'] == 'assistant' %}{% set part.text = 'Assistant: ' ~ part.text %}"
    "{% elif part.text or message['role'] != 'system' %}{% set part.text = "
    "('System: ' if message['role'] == 'system' else 'User: ') ~ part.text ~ '\\n\\n' %}{% endif %}" + MARKS +
    "{{ part.text }}{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}")}
DTYPES = {"fp32": "F32", "bf16": "BF16"}            # --dtype, and safetensors' word for it
DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16"}
LAYER = {"ln1": "ln_1", "qkv": "attn.c_attn", "attproj": "attn.c_proj", "ln2": "ln_2", "fc": "mlp.c_fc",
         "fcproj": "mlp.c_proj"}
LLAMA_NORMS = {"ln1w": "input_layernorm", "ln2w": "post_attention_layernorm", "qnw": "self_attn.q_norm",
               "knw": "self_attn.k_norm"}


# ---- weights ----

def weights(dims, params):
    """{transformers' name: array}: no padding, one for each layer."""
    return llama_weights(dims, params) if dims.is_llama else gpt2_weights(dims, params)


def gpt2_weights(dims, params):
    """Linear layers are (in, out)."""
    tensors = {"wte.weight": params["wte"][:dims.V], "wpe.weight": params["wpe"]}
    for layer in range(dims.L):
        for ours, theirs in LAYER.items():
            tensors[f"h.{layer}.{theirs}.weight"] = params[ours + "w"][layer].T
            tensors[f"h.{layer}.{theirs}.bias"] = params[ours + "b"][layer]
    tensors.update({"ln_f.weight": params["lnfw"], "ln_f.bias": params["lnfb"]})
    return {"transformer." + name: array for name, array in tensors.items()}


def llama_weights(d, params):
    """NanoChat turns heads the other way. With the second halves of q's and k's rows negated the products are
    the same, and its norms, which have no weights, do not see the sign."""
    def turned(rows):
        halves = rows.reshape(-1, 2, d.HS // 2, d.C)
        return (halves * np.array([1, -1], "f4")[:, None, None]).reshape(rows.shape) if nanochat else rows

    nanochat = d.mlp == "relu2"
    tensors = {"model.embed_tokens": params["wte"][:d.V]}
    for l in range(d.L):
        q, k, v = np.split(params["qkvw"][l], [d.NH * d.HS, (d.NH + d.NKV) * d.HS])
        layer = {"self_attn.q_proj": turned(q), "self_attn.k_proj": turned(k), "self_attn.v_proj": v,
                 "self_attn.o_proj": params["attprojw"][l]}
        if nanochat:
            layer.update({"mlp.fc1": params["fcw"][l], "mlp.fc2": params["fcprojw"][l]})
        else:
            gate, up = np.split(params["fcw"][l], 2)
            layer.update({"mlp.gate_proj": gate, "mlp.up_proj": up})
            layer["mlp.down_proj"] = params["fcprojw"][l]
        for ours, theirs in LLAMA_NORMS.items():
            if params[ours].size:
                layer[theirs] = params[ours][l]
        tensors.update({f"model.layers.{l}.{name}": array for name, array in layer.items()})
    if params["lnfw"].size:
        tensors["model.norm"] = params["lnfw"]
    if not d.tied:
        tensors["lm_head"] = params["headw"][:d.V]
    return {name + ".weight": array for name, array in tensors.items()}


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
    if dims.is_llama:
        padding = (dims.Vp - dims.V) * dims.C * (1 if dims.tied else 2)
        return sum(math.prod(param_shape(dims, name)) for name in NAMES) - padding
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
    if dims.is_llama:
        class_of(dims, path)
    elif dims.block or dims.norm:
        kinds = ("sequential", "parallel", "parallel-tied")[dims.block], ("layernorm", "rmsnorm")[dims.norm]
        die(f"'{path}' is not GPT-2: its block is {kinds[0]} and its norm {kinds[1]}, which "
            "transformers' GPT-2 does not compute\nhint: such a model runs here alone: train_gpt2cu -e FILE")
    return dims, read_checkpoint(path)[1], {3: "F32", 5: "BF16"}[version]


# ---- the configuration ----

def class_of(dims, path=None):
    """What transformers' classes begin with. Dies if none of them computes this model."""
    if not dims.is_llama:
        return "GPT-2"
    shape = dims.mlp, dims.norm_weights, dims.embed_norm, dims.softcap > 0
    if shape == ("swiglu", True, False, False):
        if not dims.qk_norm and dims.C % dims.NH:
            die(f"'{path}': C={dims.C} is not a multiple of NH={dims.NH}, as transformers' Llama wants it\n"
                "hint: such a model runs here alone: train_gpt2cu -e FILE")
        return "Qwen3" if dims.qk_norm else "Llama"
    if shape[:3] == ("relu2", False, True) and dims.qk_norm:
        return "NanoChat"
    die(f"'{path}': no class of transformers computes this: {dims.mlp}, "
        + ", ".join(f"{name} {getattr(dims, name):g}"
                    for name in ("qk_norm", "norm_weights", "embed_norm", "softcap"))
        + "\nhint: Llama and Qwen3 have swiglu and norms with weights, no embed_norm and no softcap; "
          "NanoChat has relu2, qk_norm and embed_norm, and norms without weights")


def llama_config(d, dtype, end):
    """As model_config. Versions of transformers before 5 read rope_theta, the others rope_parameters."""
    kind = class_of(d)
    config = {
        "architectures": [kind + "ForCausalLM"], "model_type": kind.lower(), "vocab_size": d.V,
        "max_position_embeddings": d.maxT, "hidden_size": d.C, "num_hidden_layers": d.L,
        "num_attention_heads": d.NH, "num_key_value_heads": d.NKV, "head_dim": d.HS,
        "intermediate_size": d.F,
        "hidden_act": MLPS[d.mlp].hf, "rms_norm_eps": shortest(d.eps),
        "rope_theta": shortest(d.theta),
        "rope_parameters": {"rope_type": "default", "rope_theta": shortest(d.theta)},
        "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True,
        "tie_word_embeddings": d.tied, "bos_token_id": end, "eos_token_id": end, "pad_token_id": None,
        "torch_dtype": DTYPE_NAMES[dtype],
    }
    if kind == "NanoChat":
        config["final_logit_softcapping"] = shortest(d.softcap) if d.softcap else None
    elif kind == "Llama":
        config["mlp_bias"] = False
    else:
        config["use_sliding_window"] = False
    return config


def shortest(x):
    """1e-05 and not 9.999999747378752e-06: the shortest number that is the same as a float."""
    return float(str(np.float32(x)))


def model_config(dims, dtype, end):
    """What transformers must be told; whatever it could take otherwise by default is spelled out. end: the
    token between documents."""
    if dims.is_llama:
        return llama_config(dims, dtype, end)
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2",
        "vocab_size": dims.V, "n_positions": dims.maxT, "n_ctx": dims.maxT,
        "n_embd": dims.C, "n_layer": dims.L, "n_head": dims.NH, "n_inner": None,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "initializer_range": 0.02,
        "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False, "tie_word_embeddings": True, "use_cache": True,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,       # dropout is no part of a model file
        "bos_token_id": end, "eos_token_id": end,
        "torch_dtype": DTYPE_NAMES[dtype],
    }


# ---- the tokenizer ----

@dataclass
class Words:
    """What a model's tokens are."""
    vocab: dict             # {token: id}, as tokenizer.json has them; empty: not known
    merges: list            # None: text is not cut by GPT-2's pattern
    end: int                # the token between documents, or None
    files: dict             # {name: bytes} of the run's own tokenizer
    fast: dict = None       # its tokenizer.json, but for settings that are off here
    number: int = 0         # its id

    def end_text(self):
        return next((token for token, i in self.vocab.items() if i == self.end), "")


def words_of(V, folder):
    """The tokenizer in the model's folder, else the vocabulary's: 256 are bytes, of which 0 ends a text;
    50257 are GPT-2's, and 50304 those and padding."""
    try:
        if head := read_head(os.path.join(folder, "tokenizer.bin")):
            files, path = {}, os.path.join(folder, "tokenizer.json")
            for name in OWN_NAMES:
                with open(os.path.join(folder, name), "rb") as f:
                    files[name] = f.read()
            id_of(path, files["tokenizer.json"], head)
            fast = settings_of(path, files["tokenizer.json"])
            vocab = dict(sorted(token_ids(fast).items(), key=lambda item: item[1]))
            if (most := max(vocab.values())) >= V:
                raise Problem(f"'{path}' has ids up to {most}, and the model's vocabulary is {V}")
            merges = None if head.merges == MERGES_NONE else merges_of(fast)
            return Words(vocab, merges, head.eot, files, fast, head.id)
    except Problem as problem:
        die("\nhint: ".join(filter(None, (problem.what, problem.hint))))
    if V == 256:
        characters = byte_characters()
        return Words({END_OF_TEXT if b == 0 else characters[b]: b for b in range(256)}, [], 0, {})
    if V not in (50257, 50304):
        return Words({}, None, None, {})
    vocab, merges = gpt2_vocabulary()
    if len(vocab) != 50257:
        die(f"'{GPT2_MERGES}' is damaged: {len(vocab)} tokens, expected 50257")
    return Words(vocab, merges, 50256, {})


def tokenizer_files(dims, words, chat_template=None):
    """{file name: bytes}"""
    if not words.vocab:
        return {}
    kind = "PreTrainedTokenizerFast" if words.files or chat_template else "GPT2Tokenizer"
    fast, end = words.fast or json.loads(tokenizer_json(words.vocab, words.merges)), words.end_text()
    if chat_template:
        marked = json.dumps(list(for_chats(fast, end).items()), ensure_ascii=False)
        chat_template = chat_template.replace(
            MARKS, f"{{% for token, other in {marked} %}}"
            "{% set part.text = part.text.replace(token, other) %}{% endfor %}")
    has_blank = (fast.get("pre_tokenizer") or {}).get("add_prefix_space", False)
    config = tokenizer_config(kind, end, dims.maxT, chat_template, has_blank)
    files = {"tokenizer.json": json.dumps(fast, ensure_ascii=False).encode(),
             "tokenizer_config.json": config.encode()}
    if words.files and fast == json.loads(words.files["tokenizer.json"]):
        return {**files, **words.files}
    if words.files:
        return {**files, "tokenizer.bin": tokenizer_bin(files["tokenizer.json"], end, words.number)}
    return {**files, "vocab.json": json.dumps(words.vocab, ensure_ascii=False).encode(),
            "merges.txt": "\n".join(["#version: 0.2", *words.merges, ""]).encode()}


# ---- the folder ----

def model_card(name, dims, dtype, source, words):
    """Short: what the files are; what it was trained on, its maker has to say. Only names in it are not ours.
    It encodes a text as get.py does: some tokenizers put tokens around it by themselves."""
    loss = validation_loss(source)
    name, file = (html.escape(shown(text), quote=False) for text in (name, os.path.basename(source)))
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation", "---", f"# {name}", "",
             f"{class_of(dims)} with {count_parameters(dims):,} parameters: {dims.L} layers, "
             f"{dims.NH} heads, {dims.C} channels, {dims.maxT} positions, {dims.V} tokens, "
             f"{'fp32' if dtype == 'F32' else 'bf16'}. Exported from `{file}`"
             + (f", validation loss {loss}" if loss else "") + ".", "",
             "```python", "from transformers import AutoModelForCausalLM, AutoTokenizer",
             "model = AutoModelForCausalLM.from_pretrained(folder)",
             "tokenizer = AutoTokenizer.from_pretrained(folder)",
             'ids = tokenizer("Once upon a time", add_special_tokens=False)["input_ids"]',
             "ids = [tokenizer.bos_token_id] + ids", "```", "",
             "Each text that it was trained on begins with this first id, and so must a prompt.", "",
             "Training data and licence: to be filled in by who publishes it."]
    if not words.vocab:
        lines[-8:-2] = ["```", "", "Its tokenizer is not known, and none is here."]
    return "\n".join(lines) + "\n"


def validation_loss(path):
    """What the run's main.log says of this step, if it lies beside the model."""
    step = re.fullmatch(r"model_(\d+)\.bin", os.path.basename(path))
    log = os.path.join(os.path.dirname(path), "main.log")
    if not step or not stat.S_ISREG(mode(log)):
        return None
    with open(log, encoding="utf-8", errors="replace") as f:
        found = re.findall(rf"^s:{int(step[1])} tel:(-?[0-9.]+|-?nan|-?inf)$", f.read(), re.M)
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
    guard_terminals()
    for number in (signal.SIGINT, signal.SIGTERM):          # what was begun is removed
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.error = lambda message: die(f"{message}\nhint: {parser.prog} --help")
    parser.add_argument("model", help="model_*.bin, or the folder of a run (its last model)")
    parser.add_argument("folder", help="folder to write")
    parser.add_argument("--dtype", choices=DTYPES, help="type of the weights (default: the file's)")
    args = parser.parse_args()
    folder = os.path.realpath(args.folder)              # a link to a folder stays a link
    try:
        source = last_model(args.model) if stat.S_ISDIR(mode(args.model)) else args.model
        dims, params, dtype = read_model(source)
        dtype = DTYPES.get(args.dtype, dtype)
        check_folder(args.folder)
        words = words_of(dims.V, os.path.dirname(source))
        config = model_config(dims, dtype, words.end)
        generation = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
        generation["pad_token_id"] = config["eos_token_id"]
        texts = {"config.json": json.dumps(config, indent=2) + "\n",
                 "generation_config.json": json.dumps(generation, indent=2) + "\n",
                 "README.md": model_card(os.path.basename(folder), dims, dtype, source, words)}
        files = {**{name: text.encode() for name, text in texts.items()},
                 **tokenizer_files(dims, words, CHAT_TEMPLATES.get(chat_template_of(source)))}
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        with tempfile.TemporaryDirectory(dir=os.path.dirname(folder), suffix=".tmp") as parent:
            made = os.path.join(parent, "made")
            os.mkdir(made)
            for name, data in files.items():
                with open(os.path.join(made, name), "wb") as f:
                    f.write(data)
            write_safetensors(os.path.join(made, "model.safetensors"), weights(dims, params), dtype)
            os.rename(made, folder)             # fails if others have written into the folder since
    except OSError as e:
        die(f"'{e.filename2 or e.filename or folder}': {e.strerror}")
    print(f"wrote {args.folder}: {os.path.basename(source)}, {count_parameters(dims):,} parameters, {dtype}"
          + ("" if words.vocab else
             f"; no tokenizer: there is none for V={dims.V} (50257, 50304: GPT-2, 256: bytes)"))


if __name__ == "__main__":
    main()
