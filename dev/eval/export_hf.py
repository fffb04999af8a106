"""dev/hf.py export: a trained model for transformers, lm-eval and others. GPT-2 becomes a GPT2LMHeadModel;
the family of Llama, by its shape, a Llama-, Mistral-, Qwen2-, Qwen3- or NanoChatForCausalLM.

    python3 dev/hf.py export runs/mine gpt2-mine                # a run's last model
    python3 dev/hf.py export model_00019073.bin gpt2-mine --dtype fp32

The folder has model.safetensors, config.json, generation_config.json, a model card (README.md) and the
tokenizer, by tokenizer.json and tokenizer_config.json: that of the run's folder, else GPT-2's (V=50257 or
50304) or bytes' (V=256), these also by vocab.json and merges.txt. What an imported model brought along,
generation_config.json with its end tokens, too, goes out as it came. Nothing is downloaded. The weights keep
their bits unless --dtype names another type. It appears whole or not at all. Needs numpy and xxhash, neither
torch nor transformers.
"""
import contextlib
import html
import json
import math
import os
import re
import stat
import sys
import tempfile
from collections import namedtuple
from dataclasses import dataclass, field

sys.path[1:1] = [os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", *more)
                 for more in ((), ("reference",), ("data",))]
from outputs import shown                           # noqa: E402
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
    from formats import (LLAMA_FLAGS, MLPS, NAMES, PARAMS, chat_template_of, param_shape, read_checkpoint,
                         read_checkpoint_header, to_bf16_bits)
except ImportError as error:    # .venv, which setup.sh has filled, has it: the program starts again with it
    take_the_venv()
    die(f"no {error.name} in this Python\n"
        f"hint: scripts/setup.sh installs it into .venv; or pip install {error.name}, in a venv of yours")

from fetch import Problem                           # noqa: E402
from tokenizer_files import (END_OF_TEXT, GPT2_MERGES, MERGES_NONE, byte_characters,     # noqa: E402
                             for_chats, gpt2_vocabulary, id_of, merges_of, read_head, settings_of,
                             TEMPLATE_1, token_ids, tokenizer_bin, tokenizer_config, tokenizer_json)

OWN_NAMES = "tokenizer.json", "tokenizer.bin"       # as get.py has put them beside the shards
KEPT_NAMES = "tokenizer_config.json", "chat_template.jinja", "generation_config.json"   # of an imported model
TOKEN_IDS = "bos_token_id", "eos_token_id", "pad_token_id"
MARKS = "{# marks #}"
ROLES = ("{% elif part.text or message['role'] not in ['system', 'developer'] %}{% set part.text = ("
         "'System: ' if message['role'] in ['system', 'developer'] else "
         "'Tool: ' if message['role'] == 'tool' else 'User: ') ~ part.text ~ '\\n\\n' %}{% endif %}")
ROLES_0_1 = ("{% elif part.text or message['role'] != 'system' %}{% set part.text = "         # of release 0.1
             "('System: ' if message['role'] == 'system' else 'User: ') ~ part.text ~ '\\n\\n' %}{% endif %}")
CHAT_TEMPLATES = {0: None, 1: (                     # as llmc/data/chat_template.h writes conversations
    TEMPLATE_1 + "text=message['content'].strip(' \\n\\t\v\f\\r')) %}"
    "{% if message['role'] == 'assistant' %}{% set part.text = 'Assistant: ' ~ part.text %}" + ROLES + MARKS +
    "{{ part.text }}{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}")}
DTYPES = {"fp32": "F32", "bf16": "BF16"}            # --dtype, and safetensors' word for it
DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16"}
# names of tensors there, a layer's number for {}; GPT-2's without "transformer." and ".weight" or ".bias"
GPT2_NAMES = {"wte": "wte", "wpe": "wpe", "ln1": "h.{}.ln_1", "qkv": "h.{}.attn.c_attn",
              "attproj": "h.{}.attn.c_proj", "ln2": "h.{}.ln_2", "fc": "h.{}.mlp.c_fc",
              "fcproj": "h.{}.mlp.c_proj", "lnf": "ln_f"}
IN_LAYER = "model.layers.{}."                       # without ".weight"; several lie one below the other here
LLAMA_NAMES = {
    "wte": ["model.embed_tokens"], "lnfw": ["model.norm"], "headw": ["lm_head"],
    "ln1w": [IN_LAYER + "input_layernorm"], "ln2w": [IN_LAYER + "post_attention_layernorm"],
    "qkvw": [IN_LAYER + f"self_attn.{x}_proj" for x in "qkv"], "attprojw": [IN_LAYER + "self_attn.o_proj"],
    "qkvb": [IN_LAYER + f"self_attn.{x}_proj" for x in "qkv"],
    "qnw": [IN_LAYER + "self_attn.q_norm"], "knw": [IN_LAYER + "self_attn.k_norm"],
    "fcw": [IN_LAYER + "mlp.gate_proj", IN_LAYER + "mlp.up_proj"], "fcprojw": [IN_LAYER + "mlp.down_proj"]}
NANOCHAT_NAMES = {**LLAMA_NAMES, "fcw": [IN_LAYER + "mlp.fc1"], "fcprojw": [IN_LAYER + "mlp.fc2"]}


# ---- weights ----

# A tensor of theirs. shape: it has there; rows: that it has of ours; how: "transposed", "turned" or "".
Part = namedtuple("Part", "name shape rows how")


def names_of(d, ours):
    kind = "bias" if ours.endswith("b") else "weight"
    if d.is_llama:
        return [f"{name}.{kind}" for name in (NANOCHAT_NAMES if d.mlp == "relu2" else LLAMA_NAMES)[ours]]
    name = GPT2_NAMES.get(ours) or GPT2_NAMES[ours[:-1]]
    return [f"transformer.{name}.{kind}"]


def how_of(d, name, shape):
    """GPT-2's linear layers are (in, out) there. NanoChat turns heads the other way."""
    if not d.is_llama:
        return "transposed" if ".h." in name and len(shape) == 2 else ""
    return "turned" if d.mlp == "relu2" and name.endswith(("q_proj.weight", "k_proj.weight")) else ""


def parts_of(d):
    """(tensor of ours, layer or None, [Part]) of all, in the order of our files. Rows that pad the vocabulary
    are in no part."""
    heights = {"wte": [d.V], "headw": [d.V]}
    if d.is_llama:
        heights["qkvw"] = heights["qkvb"] = [d.NH * d.HS, d.NKV * d.HS, d.NKV * d.HS]
        heights["fcw"] = [d.F] * len(names_of(d, "fcw"))
    for ours, in_layers, shape_of, _, _ in PARAMS:
        shape = shape_of(d)
        if math.prod(shape) == 0:
            continue
        for l in range(d.L) if in_layers else [None]:
            parts, at = [], 0
            for name, rows in zip(names_of(d, ours), heights.get(ours, shape[:1])):
                how, size = how_of(d, name, shape), (rows, *shape[1:])
                parts.append(Part(name.format(l), size[::-1] if how == "transposed" else size,
                                  slice(at, at + rows), how))
                at += rows
            yield ours, l, parts


def turned(d, part, array):
    """From ours to theirs, or back. With the second halves of NanoChat's q and k negated the products are the
    same, and its norms, which have no weights, do not see the sign."""
    if part.how == "turned":
        halves = array.reshape(-1, 2, d.HS // 2, d.C)
        return (halves * np.array([1, -1], "f4")[:, None, None]).reshape(array.shape)
    return array.T if part.how == "transposed" else array


def weights(d, params):
    """{transformers' name: array}: no padding, one for each layer."""
    return {part.name: turned(d, part, (params[ours] if l is None else params[ours][l])[part.rows])
            for ours, l, parts in parts_of(d) for part in parts}


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
    class_of(dims, path)
    if dims.block or (dims.norm and not dims.is_llama):
        kinds = ("sequential", "parallel", "parallel-tied")[dims.block], ("layernorm", "rmsnorm")[dims.norm]
        die(f"'{path}' is not GPT-2: its block is {kinds[0]} and its norm {kinds[1]}, which "
            "transformers' GPT-2 does not compute\nhint: such a model runs here alone: train_gpt2cu -e FILE")
    return dims, read_checkpoint(path)[1], {3: "F32", 5: "BF16"}[version]


# ---- the configuration ----

def class_of(dims, path=None):
    """What transformers' classes begin with. Dies if none of them computes this model."""
    windows = dims.windows()
    if not dims.is_llama and not windows:
        return "GPT-2"
    flags = {name for name in LLAMA_FLAGS if getattr(dims, name)} - {"tied"}
    qwen = {"qkv_bias": "Qwen2", "qk_norm": "Qwen3"}.get("".join(flags - {"norm_weights"}))
    if dims.mlp == "swiglu" and "norm_weights" in flags and (qwen or len(flags) == 1) and not dims.softcap:
        if not qwen and dims.C % dims.NH:
            die(f"'{path}': C={dims.C} is not a multiple of NH={dims.NH}, as transformers' Llama wants it\n"
                "hint: such a model runs here alone: train_gpt2cu -e FILE")
        if qwen or not windows or all(windows):
            return qwen or ("Mistral" if windows else "Llama")
    if dims.mlp == "relu2" and flags == {"qk_norm", "embed_norm"} and not windows and not dims.rope_factor:
        return "NanoChat"
    if windows:
        die(f"'{path}': no class of transformers computes this with windows ({dims.window_text()[1:]})\n"
            "hint: a Qwen has them in any of its layers, and what would be a Llama in all, as a Mistral")
    die(f"'{path}': no class of transformers computes this: {dims.mlp}, "
        + ", ".join(f"{name} {getattr(dims, name):g}" for name in (*LLAMA_FLAGS, "softcap", "rope_factor"))
        + "\nhint: Llama, Qwen2 (qkv_bias) and Qwen3 (qk_norm) have swiglu and norms with weights, no "
          "embed_norm, value_embed or softcap; NanoChat has relu2, qk_norm and embed_norm, and norms without "
          "weights")


def rope_scaling(d):
    """What config.json says of how positions are scaled."""
    if not d.rope_factor:
        return {"rope_type": "default"}
    scaling = {"rope_type": "llama3" if d.rope_original else "linear", "factor": shortest(d.rope_factor)}
    return {**scaling, "low_freq_factor": shortest(d.rope_low), "high_freq_factor": shortest(d.rope_high),
            "original_max_position_embeddings": int(d.rope_original)} if d.rope_original else scaling


def llama_config(d, dtype, end):
    """As model_config. Versions of transformers before 5 read rope_theta and rope_scaling, the others
    rope_parameters."""
    kind = class_of(d)
    config = {
        "architectures": [kind + "ForCausalLM"], "model_type": kind.lower(), "vocab_size": d.V,
        "max_position_embeddings": d.maxT, "hidden_size": d.C, "num_hidden_layers": d.L,
        "num_attention_heads": d.NH, "num_key_value_heads": d.NKV, "head_dim": d.HS,
        "intermediate_size": d.F,
        "hidden_act": MLPS[d.mlp].hf, "rms_norm_eps": shortest(d.eps),
        "rope_theta": shortest(d.theta),
        "rope_parameters": {**rope_scaling(d), "rope_theta": shortest(d.theta)},
        "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True,
        "tie_word_embeddings": d.tied, "bos_token_id": end, "eos_token_id": end, "pad_token_id": None,
        "torch_dtype": DTYPE_NAMES[dtype],
    }
    if d.rope_factor:
        config["rope_scaling"] = rope_scaling(d)
    if kind not in ("Qwen2", "Mistral"):                # whose biases are as the class has them
        config["attention_bias"] = False
    if kind == "NanoChat":
        config["final_logit_softcapping"] = shortest(d.softcap) if d.softcap else None
    elif kind == "Llama":
        config["mlp_bias"] = False
    elif kind == "Mistral":
        config["sliding_window"] = d.window
    else:
        config["use_sliding_window"] = False
    if kind.startswith("Qwen") and (windows := d.windows()):
        types = ["sliding_attention" if window else "full_attention" for window in windows]
        config.update({"use_sliding_window": True, "sliding_window": d.window, "layer_types": types,
                       "max_window_layers": types.index("sliding_attention")})
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
    kept: dict = field(default_factory=dict)        # {name: bytes} of what an imported model brought along
    fast: dict = None       # its tokenizer.json, but for settings that are off here
    number: int = 0         # its id

    def end_text(self):
        return next((token for token, i in self.vocab.items() if i == self.end), "")


def byte_vocabulary():
    return {END_OF_TEXT if b == 0 else character: b for b, character in sorted(byte_characters().items())}


def words_of(V, folder):
    """The tokenizer in the model's folder, else the vocabulary's: 256 are bytes, of which 0 ends a text;
    50257 are GPT-2's, and 50304 those and padding."""
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
        return Words(vocab, merges, head.eot, files, kept_in(folder), fast, head.id)
    if V == 256:
        return Words(byte_vocabulary(), [], 0, {})
    if V not in (50257, 50304):
        return Words({}, None, None, {})
    vocab, merges = gpt2_vocabulary()
    if len(vocab) != 50257:
        die(f"'{GPT2_MERGES}' is damaged: {len(vocab)} tokens, expected 50257")
    return Words(vocab, merges, 50256, {})


def files_in(folder, names):
    """{name: bytes} of those that are there."""
    files = {}
    for name in names:
        if stat.S_ISREG(mode(path := os.path.join(folder, name))):
            with open(path, "rb") as f:
                files[name] = f.read()
    return files


def kept_in(folder):
    """{name: bytes} of what an imported model brought along."""
    kept = files_in(folder, KEPT_NAMES)
    for name, text in kept.items():
        path = os.path.join(folder, name)
        if name.endswith(".json") and not isinstance(json_of(path, text), dict):
            die(f"'{path}' is not a JSON object\nhint: remove it, and nothing is taken of it")
    return kept


def json_of(path, text):
    try:
        return json.loads(text)
    except ValueError as error:
        die(f"'{path}' is no JSON: {error}\nhint: remove it, and nothing is taken of it")


def kept_ids(words):
    """{name in config.json: id, or a list of ids}. What is none is left out."""
    known, found = json.loads(words.kept.get("generation_config.json", "{}")), {}
    for name in TOKEN_IDS:
        value = known.get(name)
        ids = [i for i in (value if isinstance(value, list) else [value]) if type(i) is int and i >= 0]
        if ids:
            found[name] = ids if isinstance(value, list) else ids[0]
    return found


def marked_template(template, fast, end):
    """The template for this tokenizer.json, which for_chats() changes."""
    marked = json.dumps(list(for_chats(fast, end).items()), ensure_ascii=False)
    return template.replace(MARKS, f"{{% for token, other in {marked} %}}"
                            "{% set part.text = part.text.replace(token, other) %}{% endfor %}")


def tokenizer_files(dims, words, chat_template=None):
    """{file name: bytes}"""
    if not words.vocab:
        return {}
    kind = "PreTrainedTokenizerFast" if words.files or chat_template else "GPT2Tokenizer"
    fast, end = words.fast or json.loads(tokenizer_json(words.vocab, words.merges)), words.end_text()
    if chat_template:
        chat_template = marked_template(chat_template, fast, end)
    has_blank = (fast.get("pre_tokenizer") or {}).get("add_prefix_space", False)
    config = tokenizer_config(kind, end, dims.maxT, chat_template, has_blank)
    files = {"tokenizer.json": json.dumps(fast, ensure_ascii=False).encode(),
             "tokenizer_config.json": config.encode(), **words.kept}
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
    first = words.end if words.kept else "tokenizer.bos_token_id"
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
             f"ids = [{first}] + ids", "```", "",
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


@contextlib.contextmanager
def whole_folder(folder):
    """A new folder, which gets the name when it is whole. A link to a folder stays a link."""
    folder = os.path.realpath(folder)
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    with tempfile.TemporaryDirectory(dir=os.path.dirname(folder), suffix=".tmp") as parent:
        made = os.path.join(parent, "made")
        os.mkdir(made)
        yield made
        os.rename(made, folder)             # fails if others have written into the folder since


def write_files(folder, files):
    """files: {name: bytes}"""
    for name, data in files.items():
        with open(os.path.join(folder, name), "wb") as f:
            f.write(data)


def run(args):
    source = last_model(args.model) if stat.S_ISDIR(mode(args.model)) else args.model
    dims, params, dtype = read_model(source)
    dtype = DTYPES.get(args.dtype, dtype)
    check_folder(args.out)
    words, template = words_of(dims.V, os.path.dirname(source)), CHAT_TEMPLATES.get(chat_template_of(source))
    if template:
        words.kept = {}                     # its conversations end otherwise
    config = {**model_config(dims, dtype, words.end), **kept_ids(words)}
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
    generation["pad_token_id"] = config["eos_token_id"]
    name = os.path.basename(os.path.realpath(args.out))
    texts = {"config.json": json.dumps(config, indent=2) + "\n",
             "generation_config.json": json.dumps(generation, indent=2) + "\n",
             "README.md": model_card(name, dims, dtype, source, words)}
    with whole_folder(args.out) as made:
        write_files(made, {**{name: text.encode() for name, text in texts.items()},
                           **tokenizer_files(dims, words, template)})
        write_safetensors(os.path.join(made, "model.safetensors"), weights(dims, params), dtype)
    print(f"wrote {args.out}: {os.path.basename(source)}, {count_parameters(dims):,} parameters, {dtype}"
          + ("" if words.vocab else
             f"; no tokenizer: there is none for V={dims.V} (50257, 50304: GPT-2, 256: bytes)"))


if __name__ == "__main__":
    die("this program is `python3 dev/hf.py export` now, with the same words behind it")
