"""dev/hf.py import: a model as Hugging Face's transformers save it, as a folder for --model.

    python3 dev/hf.py import gpt2               # a name on the hub, or a folder: writes models/gpt2
    ./train_gpt2cu sample models/gpt2 --prompt "Once upon a time"

The classes are GPT2LMHeadModel and, of the family of Llama, LlamaForCausalLM, MistralForCausalLM,
Qwen2ForCausalLM, Qwen3ForCausalLM and NanoChatForCausalLM. models/gpt2 gets model_00000000.bin (bf16 if all
weights are, else fp32), the tokenizer with its settings, the chat template, generation_config.json, and
source.json, which names the source and its revision. It appears whole or not at all.

A key of config.json that is neither read here nor known to leave the results alone is refused. One tensor at
a time is in memory. The package safetensors is not used: it reads no bf16 without PyTorch. A folder needs
numpy and xxhash; a name on the hub needs huggingface_hub, too.
"""
import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections import namedtuple

from export_hf import (CHAT_TEMPLATES, KEPT_NAMES, ROLES, ROLES_0_1, TOKEN_IDS, byte_vocabulary,
                       check_folder, count_parameters, die, files_in, marked_template, mode, np, parts_of,
                       turned, whole_folder, write_files)
from fetch import Problem, asking, hub_download, hub_files, place, same_contents, sha256_of
from formats import (ROPE_RULE, Dims, Llama, checkpoint_header, from_bf16_bits, rope_fits, to_bf16_bits,
                     xxhash)
from outputs import shown
from tokenizer_files import BYTES_ID, END_OF_TEXT, id_of, read_head, token_ids, tokenizer_bin

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
BESIDE = ["config.json", "tokenizer.json", "tokenizer.bin", *KEPT_NAMES]
CONVERT = ("\nhint: transformers makes what is read here: "
           "AutoModelForCausalLM.from_pretrained(NAME).save_pretrained(FOLDER)")
OTHER_FILES = [         # a file's name, and what a folder is that has it and none of the two above
    (r"adapter_(config\.json|model\..*)", "is an adapter (LoRA), no model: merge it into its model first"),
    (r".*\.gguf", "has GGUF, which is for llama.cpp: weights are read from .safetensors"),
    (r"model_\d{8,}\.bin", "has a model_*.bin, which --model takes as it is"),
    (r"pytorch_model.*\.bin|.*\.pth?", "has weights as PyTorch pickles them, which may run code" + CONVERT)]

CLASSES = {"gpt2": "GPT-2", "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3",
           "nanochat": "NanoChat"}
HEADS = {"qwen2": 32, "qwen3": 32, "mistral": 8}    # of keys, by default; else as many as of queries
LETTERS = {"sliding_attention": "S", "full_attention": "L"}
GPT2_SIZES = {"V": "vocab_size", "maxT": "n_positions", "L": "n_layer", "NH": "n_head", "C": "n_embd"}
LLAMA_SIZES = {"V": "vocab_size", "maxT": "max_position_embeddings", "L": "num_hidden_layers",
               "NH": "num_attention_heads", "C": "hidden_size", "F": "intermediate_size"}
# the values that are built, of keys of config.json that have others
GPT2_FIXED = {"activation_function": ["gelu_new", "gelu_pytorch_tanh"], "layer_norm_epsilon": [1e-5],
              "scale_attn_weights": [True], "scale_attn_by_inverse_layer_idx": [False],
              "reorder_and_upcast_attn": [False], "add_cross_attention": [False]}
LLAMA_FIXED = {"hidden_act": ["silu"], "attention_bias": [False], "mlp_bias": [False], "pretraining_tp": [1],
               "use_sliding_window": [False], "rope_interleaved": [False], "partial_rotary_factor": [1],
               "rope_parameters.partial_rotary_factor": [1]}
# of how positions are scaled, by rope_type: our numbers, and their keys
SCALINGS = {"default": {}, "linear": {"rope_factor": "factor"},
            "llama3": {"rope_factor": "factor", "rope_low": "low_freq_factor",
                       "rope_high": "high_freq_factor", "rope_original": "original_max_position_embeddings"}}
# keys that no logit depends on: of training, saving and sampling, and of windows that the class has not
HARMLESS = set("""
    model_type architectures torch_dtype dtype transformers_version name_or_path _name_or_path use_cache
    bos_token_id eos_token_id pad_token_id initializer_range attn_pdrop resid_pdrop embd_pdrop n_ctx
    attention_dropout task_specific_params summary_activation summary_first_dropout summary_proj_to_labels
    summary_type summary_use_proj id2label label2id _num_labels is_llama_config transformers.js_config
    sliding_window max_window_layers gradient_checkpointing output_past output_hidden_states output_attentions
    return_dict _attn_implementation_autoset""".split())

LONGEST_TABLE = 1 << 20         # bytes of a file's table of tensors; a tensor takes about 120
HEAD = "lm_head.weight"
COMPUTED = ".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"        # older programs saved these
NUMPY = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
Tensor = namedtuple("Tensor", "path dtype shape begin")


# ---- config.json ----

def json_object(text):
    """ValueError also if a key comes twice, of NaN, and of a whole number that is too large for a float."""
    def object_of(pairs):
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key comes twice")
        return dict(pairs)

    def no_number(word):
        raise ValueError(word)

    try:
        value = json.loads(text, object_pairs_hook=object_of, parse_constant=no_number,
                           parse_int=lambda digits: int(digits) if len(digits) < 300 else no_number(digits))
    except RecursionError as error:
        raise ValueError("too deep") from error
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value


def read_json(path):
    with open(path, "rb") as f:
        try:
            return json_object(f.read())
        except ValueError:
            die(f"'{path}' is not a JSON object")


def said(value):
    return json.dumps(value).replace('"', "")


def read_config(path):
    """(dims, name of the class, is the head the embedding?). A key that is not there has the class's default.
    A null counts as no key, but of NanoChat's softcap (none) and a Qwen3's num_key_value_heads (all)."""
    config = read_json(path)
    kind = config.get("model_type")
    if kind not in list(CLASSES):
        die(f"'{path}': model_type is {said(kind)}; {', '.join(CLASSES)} are built, nothing else")
    if config.get("quantization_config") is not None:
        die(f"'{path}' has quantization_config: the model is quantised; fp32, fp16 and bf16 are read")
    for name in "rope_parameters", "rope_scaling":
        if isinstance(config.get(name), dict):
            config.update({f"{name}.{key}": value for key, value in config.pop(name).items()})
    left = {key: value for key, value in config.items() if value is not None}
    whole, real, flag = (int, "a whole number"), ((int, float), "a number"), (bool, "true or false")
    words = str, "a word"

    def take(key, kind, default=None):
        value = left.pop(key, default)
        if not isinstance(value, kind[0]) or isinstance(value, bool) != (kind is flag):
            die(f"'{path}' lacks {kind[1]} for {key}")
        return value

    def check_fixed(table):
        for key, allowed in table.items():
            value = left.pop(key, allowed[0])
            if value not in allowed:
                die(f"'{path}': {key} is {said(value)}; {CLASSES[kind]} has {said(allowed[0])}, nothing else "
                    "is built")

    def rope(kind, default, *keys):
        """Of rope_parameters, and of rope_scaling, as transformers before 5 has it. default: None if the key
        must be there."""
        names = [f"{where}.{key}" for where in ("rope_parameters", "rope_scaling") for key in keys]
        values = {name: take(name, kind) for name in names if name in left}
        if len({*values.values()}) > 1:
            die(f"'{path}': " + ", ".join(f"{name} is {said(value)}" for name, value in values.items()))
        return next(iter(values.values()), default) if values or default else take(names[0], kind)

    def scaling():
        by_type = rope(words, "default", "rope_type", "type")
        if by_type not in SCALINGS:
            die(f"'{path}': rope_type is {said(by_type)}; {', '.join(SCALINGS)} are built, nothing else")
        return {ours: float(rope(real, None, theirs)) for ours, theirs in SCALINGS[by_type].items()}

    def windows(L):
        """All of a Mistral's layers have one, and a Qwen's that layer_types or max_window_layers name."""
        takes = kind == "mistral" or (qwen and config.get("use_sliding_window"))
        window = take("sliding_window", whole, 0 if "sliding_window" in config else 4096) if takes else 0
        first = take("max_window_layers", whole, 28) if qwen else 0
        usual = "".join("S" if window and l >= first else "L" for l in range(L))
        types = left.pop("layer_types", None)
        letters = [LETTERS.get(str(t), "?") for t in (types if isinstance(types, list) else "?")]
        pattern = usual if types is None else "".join(letters)
        may_differ = window and qwen
        if len(pattern) != L or "?" in pattern or (pattern != usual and not may_differ):
            left["layer_types"] = types                     # it is refused below
        if "S" not in pattern:
            return {}
        length = len(pattern)
        period = next(n for n in range(1, 1 + length) if (pattern[:n] * length)[:length] == pattern)
        return {"window": window, "pattern": pattern[:period]}

    nanochat, qwen3, qwen = kind == "nanochat", kind == "qwen3", kind in ("qwen2", "qwen3")
    tied = take("tie_word_embeddings", flag, kind == "gpt2")
    d = {name: take(key, whole) for name, key in (GPT2_SIZES if kind == "gpt2" else LLAMA_SIZES).items()}
    if kind == "gpt2":
        check_fixed({**GPT2_FIXED, "n_inner": [4 * d["C"]]})
        dims = Dims(**d)
    else:
        check_fixed({**LLAMA_FIXED, **({"hidden_act": ["relu2"]} if nanochat else {}),
                     **({"use_sliding_window": [False, True]} if qwen else {})})
        theta = rope(real, take("rope_theta", real, 1e4), "rope_theta")
        cap = 15 if "final_logit_softcapping" not in config else 0
        dims = Llama(
            **d, **windows(min(d["L"], 10000)), **scaling(),
            NKV=take("num_key_value_heads", whole,
                     d["NH"] if "num_key_value_heads" in config or kind not in HEADS else HEADS[kind]),
            HS=take("head_dim", whole, 128 if qwen3 else d["C"] // max(d["NH"], 1)),
            mlp="relu2" if nanochat else "swiglu", qk_norm=nanochat or qwen3, norm_weights=not nanochat,
            embed_norm=nanochat, tied=tied, qkv_bias=kind == "qwen2", theta=float(theta),
            eps=float(take("rms_norm_eps", real, 1e-6)),
            softcap=float(take("final_logit_softcapping", real, cap)) if nanochat else 0.0)
    for key in sorted(left.keys() - HARMLESS):
        die(f"'{path}': {key} is {said(left[key])}, and whether it changes the results is not known here\n"
            "hint: if it does not, import a folder whose config.json lacks it")
    check_dims(path, dims)
    return dims, CLASSES[kind], tied


def check_dims(path, d):
    """As config_error in model_config.h: what the trainer refuses is not written."""
    sizes = f"V={d.V} T={d.maxT} L={d.L} NH={d.NH} C={d.C}"
    fits = min(d.maxT, d.L, d.NH, d.C) >= 1 and 2 <= d.V <= 2**20 and d.L <= 10000 and d.maxT <= 2**24 and \
        d.C in range(8, 12289, 8) and (d.is_llama or d.C % d.NH == 0)
    if not fits:
        die(f"'{path}': {sizes}: C must be a multiple of 8 up to 12288{'' if d.is_llama else ', and of NH'}; "
            "V 2 to 1048576, L 1 to 10000, T 1 to 2^24")
    if not 0 <= d.window <= 2**24 or len(d.pattern) > 128:
        die(f"'{path}': a window of {d.window} tokens, in a pattern of {len(d.pattern)} layers: a window has "
            "1 to 2^24 tokens, and a pattern repeats itself after at most 128 layers")
    fits = not d.is_llama or (
        d.NKV >= 1 and d.NH % d.NKV == 0 and d.NH <= 4096 and d.HS in range(16, 257, 16) and
        d.F in range(8, 2**20 + 1, 8) and 1e-38 < min(d.theta, d.eps) and d.softcap >= 0 and
        max(d.theta, d.eps, d.softcap) < 1e38)
    if not fits:
        die(f"'{path}': NH={d.NH} NKV={d.NKV} HS={d.HS} F={d.F}: NH must be a multiple of NKV up to 4096, HS "
            "one of 16, 32, ... 256, F a multiple of 8 up to 2^20, and theta and eps above 0")
    if d.is_llama and not rope_fits(d):
        die(f"'{path}': positions are scaled by " + ", ".join(
            f"{ours}={getattr(d, ours):g} ({theirs})" for ours, theirs in SCALINGS["llama3"].items())
            + ": " + ROPE_RULE)


# ---- tensors ----

def row_of(name, row):
    """(begin, end, shape, name, dtype) of a table's row."""
    (begin, end), shape, dtype = row["data_offsets"], row["shape"], row["dtype"]
    numbers = [begin, end, *shape]
    if not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in numbers):   # True is none
        raise ValueError("no type, or no whole numbers")
    if begin > end:
        raise ValueError("it ends before it begins")
    return begin, end, tuple(shape), name, dtype


def read_table(path):
    """{name: Tensor} of a safetensors file: the length of a table (8 bytes), the table, {name: {"dtype":
    "F32", "shape": [2, 3], "data_offsets": [0, 24]}}, the tensors' bytes. Gaps and overlaps are damage."""
    size = os.path.getsize(path)
    with open(path, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > size - 8:
            die(f"'{path}' is no safetensors file, or a truncated one: {size} bytes")
        if length > LONGEST_TABLE:
            die(f"'{path}' has a table of {length} bytes; {LONGEST_TABLE} are the most that is read")
        text = f.read(length)
    try:
        rows = json_object(text)
        rows.pop("__metadata__", None)
        places = sorted(row_of(name, row) for name, row in rows.items())
    except (ValueError, LookupError, TypeError):
        die(f"'{path}' is no safetensors file: its table of tensors cannot be read")
    at, start = 0, 8 + length
    for begin, end, shape, name, dtype in places:
        if begin != at:
            die(f"'{path}' is damaged: {name} begins at byte {begin} of the tensors, and those before it end "
                f"at {at}")
        if dtype in NUMPY and math.prod(shape) * np.dtype(NUMPY[dtype]).itemsize != end - begin:
            die(f"'{path}' is damaged: the place of {name} does not fit its shape")
        at = end
    if at != size - start:
        die(f"'{path}' is truncated or damaged: {size - start} bytes of tensors, its table means {at}")
    return {name: Tensor(path, dtype, shape, start + begin) for begin, _, shape, name, dtype in places}


def read_tensor(tensor):
    """As float32."""
    values = np.fromfile(tensor.path, NUMPY[tensor.dtype], math.prod(tensor.shape), offset=tensor.begin)
    values = from_bf16_bits(values) if tensor.dtype == "BF16" else values.astype("<f4", copy=False)
    return values.reshape(tensor.shape)


def weight_files(folder, names):
    """Which of the folder's files have the weights. Dies if none, and says what the folder is."""
    if SINGLE in names:
        return [SINGLE]
    if INDEX in names:
        path = os.path.join(folder, INDEX)
        where = read_json(path).get("weight_map")
        if not isinstance(where, dict) or not where:
            die(f"'{path}' has no weight_map, which names the tensors' files")
        for name in where.values():
            if not isinstance(name, str) or not re.fullmatch(r"[^/\\\x00-\x1f]+\.safetensors", name):
                die(f"'{path}': {said(name)} is not the name of a .safetensors beside it")
        return sorted(set(where.values()))
    for pattern, what in OTHER_FILES:
        if any(re.fullmatch(pattern, name) for name in names):
            die(f"'{folder}' {what}")
    die(f"'{folder}' has neither {SINGLE} nor {INDEX}\n"
        "hint: import takes a folder that save_pretrained of transformers wrote, or a name on the hub")


def checked_tensors(folder, files, d, kind, tied):
    """{name: Tensor}: each of the class is there once, in its shape, as floats, and no others. Names are
    without what torch.compile and DataParallel put in front, and with what bare models lack there."""
    front, tensors = "model." if d.is_llama else "transformer.", {}
    for path in (os.path.join(folder, file) for file in files):
        for name, tensor in read_table(path).items():
            name = re.sub(r"^(module\.)?(_orig_mod\.)?(module\.)?", "", name)
            name = name if name == HEAD or name.startswith(front) else front + name
            if name in tensors:
                die(f"'{path}' has {name} twice")
            if not name.endswith(COMPUTED):
                tensors[name] = tensor
    wanted = {part.name: part.shape for _, _, parts in parts_of(d) for part in parts}
    if d.tied and (HEAD in tensors or not tied):
        wanted[HEAD] = (d.V, d.C)
    for name, shape in wanted.items():
        if name not in tensors:
            die(f"'{folder}' lacks the tensor {name}")
        tensor = tensors[name]
        if tensor.dtype not in NUMPY:
            die(f"'{tensor.path}': {name} is of type {tensor.dtype}; F32, F16 and BF16 are read")
        if tensor.shape != shape:
            die(f"'{tensor.path}': {name} has the shape {tensor.shape}, config.json means {shape}")
    for name in sorted(tensors.keys() - wanted.keys()):
        die(f"'{tensors[name].path}' has {name}, which a {kind} of {d.L} layers has not")
    return tensors


def write_model(path, d, tensors, chat):
    """Tensor after tensor. The last two words of the header are the checksum, for which they count as 0."""
    is_bf16 = {tensor.dtype for tensor in tensors.values()} == {"BF16"}
    header = checkpoint_header(d, 5 if is_bf16 else 3)
    header[252] = chat
    digest = xxhash.xxh64(header)
    with open(path, "wb") as f:
        def put(values):
            data = np.ascontiguousarray(to_bf16_bits(values) if is_bf16 else values)
            digest.update(data)
            f.write(data)

        f.write(header)
        for ours, _, parts in parts_of(d):
            for part in parts:
                values = read_tensor(tensors[part.name])
                put(turned(d, part, values))
                if ours == "wte" and d.tied and HEAD in tensors:
                    head = read_tensor(tensors[HEAD])
                    if not np.array_equal(head.view("u4"), values.view("u4")):
                        die(f"'{tensors[HEAD].path}': {HEAD} differs from the embedding, which is the head "
                            "of this model")
            if ours in ("wte", "headw"):
                put(np.zeros((d.Vp - d.V, d.C), "<f4"))
        f.seek(1016)
        f.write(digest.intdigest().to_bytes(8, "little"))


# ---- the tokenizer ----

def first_token(ids, settings, config):
    """The token in front of each text, which also ends one: of tokenizer_config.json, else of config.json."""
    by_id = {i: token for token, i in ids.items()}
    for key in "bos_token", "eos_token":
        token, number = settings.get(key), config.get(key + "_id")
        token = token.get("content") if isinstance(token, dict) else token
        for text in token, by_id.get(number) if isinstance(number, int) else None, END_OF_TEXT:
            if isinstance(text, str) and text in ids:
                return text
    return None


def generation_of(folder, files):
    """generation_config.json: the end tokens, of which there may be several, and how to sample. Without one
    config.json has the tokens."""
    name = "generation_config.json"
    if name in files:
        read_json(os.path.join(folder, name))               # as a check
        return {name: files[name]}
    ids = {key: value for key, value in read_json(os.path.join(folder, "config.json")).items()
           if key in TOKEN_IDS and value is not None}
    return {name: (json.dumps(ids, indent=2) + "\n").encode()} if ids else {}


def tokenizer_of(folder, d):
    """({name: bytes}, the chat template's number, what is to be said): tokenizer.json, tokenizer.bin, their
    settings and the chat template."""
    files, path = files_in(folder, BESIDE), os.path.join(folder, "tokenizer.json")
    if "tokenizer.json" not in files:
        return {}, 0, "; no tokenizer: there is no tokenizer.json"
    text, head = files["tokenizer.json"], read_head(os.path.join(folder, "tokenizer.bin"))
    number, fast = id_of(path, text, head), json.loads(text)
    ids = token_ids(fast)
    if (most := max(ids.values(), default=0)) >= d.V:
        return {}, 0, f"; no tokenizer: tokenizer.json has ids up to {most}, and the model {d.V} tokens"
    settings = read_json(path.replace(".json", "_config.json")) if "tokenizer_config.json" in files else {}
    first = first_token(ids, settings, read_json(os.path.join(folder, "config.json")))
    number = BYTES_ID if ids == byte_vocabulary() else number
    template = files.get("chat_template.jinja", b"").decode(errors="replace") or settings.get("chat_template")
    is_text = isinstance(template, str)
    try:
        flat = files["tokenizer.bin"] if head else tokenizer_bin(text, first, number) if first else None
        ours = [number for number, known in CHAT_TEMPLATES.items()
                if known and first and is_text and template in (
                    marked_template(one, fast, first) for one in (known, known.replace(ROLES, ROLES_0_1)))]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Problem(f"'{path}' is no tokenizer.json to be used: {type(error).__name__}: {error}") from error
    no_text = "" if flat else "; texts are token ids: how tokenizer.json decodes or ends them is not known"
    kept = {"tokenizer.json": text, **({"tokenizer.bin": flat} if flat else {}),
            **{name: files[name] for name in KEPT_NAMES[:1] if name in files}, **generation_of(folder, files)}
    if not is_text:
        return kept, 0, no_text
    return {**kept, "chat_template.jinja": template.encode(errors="replace")}, ours[0] if ours else 0, no_text


# ---- the folder ----

def revision_of(folder):
    """A folder has no commit: a hash of what is read of it."""
    names = sorted({*weight_files(folder, os.listdir(folder)), *files_in(folder, BESIDE)})
    lines = [f"{name} {sha256_of(os.path.join(folder, name))}\n" for name in names]
    return "sha256:" + hashlib.sha256("".join(lines).encode()).hexdigest()


def commit_of(repo, revision):
    with asking(f"{repo} on the hub") as library:
        return library.HfApi(**place(None)).model_info(repo, revision=revision).sha


def fetch(repo, commit, folder):
    """What is wanted of a repository. The library goes on where it was broken off."""
    at = {"repo_type": "model", "revision": commit}
    listed = {file.name: file for file in hub_files(None, repo, "*", **at)}

    def get(names):
        for name in names:
            if name not in listed:
                die(f"{repo} has no file '{name}'")
            same_contents(listed[name], hub_download(None, repo, name, folder, **at), {})

    get(["config.json", *(name for name in [*BESIDE[1:], INDEX] if name in listed)])
    read_config(os.path.join(folder, "config.json"))        # before hours of downloading
    get(weight_files(folder, list(listed)))


def is_there(out, revision):
    """Dies if something else is there."""
    if not stat.S_ISREG(mode(os.path.join(out, "source.json"))):
        check_folder(out)
        return False
    found = read_json(os.path.join(out, "source.json")).get("revision")
    if found != revision:
        die(f"'{out}' exists and is of another revision, {shown(said(found))}, not {revision}\n"
            "hint: --out names another folder; or remove this one")
    return True


def make_folder(out, folder, source, revision):
    files = weight_files(folder, os.listdir(folder))
    d, kind, tied = read_config(os.path.join(folder, "config.json"))
    tensors = checked_tensors(folder, files, d, kind, tied)
    kept, chat, no_text = tokenizer_of(folder, d)
    about = json.dumps({"source": source, "revision": revision}, indent=2) + "\n"
    with whole_folder(out) as made:
        write_files(made, {**kept, "source.json": about.encode()})
        write_model(os.path.join(made, "model_00000000.bin"), d, tensors, chat)
    print(f"wrote {out}: {kind}, {d.text()}, {count_parameters(d):,} parameters{no_text}")


def run(args):
    source = args.model.rstrip("/") or args.model
    is_folder, is_name = os.path.isdir(source), re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", source, re.ASCII)
    if not is_folder and (os.path.lexists(source) or not is_name):
        die(f"'{source}' is no folder, nor a name on the hub\n"
            "hint: import takes the folder that has config.json and the weights, or a name such as gpt2")
    if is_folder and args.revision:
        die(f"--revision is for names on the hub, and '{source}' is a folder")
    out = args.out or os.path.join("models", os.path.basename(os.path.realpath(source)))
    revision = revision_of(source) if is_folder else commit_of(source, args.revision)
    if is_there(out, revision):
        print(f"{out} is there already, of this revision: {revision}")
    elif is_folder:
        make_folder(out, source, os.path.abspath(source), revision)
    else:
        fetched = os.path.normpath(out) + ".download"
        fetch(source, revision, fetched)
        make_folder(out, fetched, source, revision)
        shutil.rmtree(fetched)
