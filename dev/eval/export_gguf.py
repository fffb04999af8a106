"""dev/hf.py gguf: a trained model as one file for llama.cpp, ollama and others: GPT-2 and, of the family of
Llama, what is a Llama, a Qwen2 or a Qwen3 to Hugging Face. GGUF names no architecture with NanoChat's ReLU^2.

    python3 dev/hf.py gguf runs/mine mine.gguf                         # a run's last model
    python3 dev/hf.py gguf model_00019073.bin mine.gguf --type q8_0

Matrices are f32, f16 or q8_0; vectors and positions always f32, and rows that are no multiple of 32 f16 in
place of q8_0. The tokenizer goes into the file, GPT-2's (V=50257 or 50304), bytes' (V=256), or the run's own:
one that cuts text as GPT-2's, Llama 3's, Qwen2's or SmolLM's does, or SentencePiece's. It says that
<|endoftext|> goes before each text, or what the tokenizer of an imported model says. Needs numpy and gguf,
which .venv has.
"""
import json
import os
import stat

from export_hf import (CHAT_TEMPLATES, chat_template_of, class_of, count_parameters, die, kept_ids,
                       last_model, mode, np, read_model, take_the_venv, words_of)
from formats import rope_divisors
from outputs import whole_file
from tokenizer_files import DROP_MARK, merges_of

try:
    import gguf
except ImportError:
    take_the_venv()
    die("no gguf in this Python\n"
        "hint: scripts/setup.sh tests installs it into .venv; or pip install gguf, in a venv of yours")

TYPES = {"f32": ("F32", "ALL_F32"), "f16": ("F16", "MOSTLY_F16"), "q8_0": ("Q8_0", "MOSTLY_Q8_0")}
ARCHITECTURES = {"GPT-2": "gpt2", "Llama": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3"}     # without windows
# how a tokenizer.json cuts text, by GGUF's name for it: its normalizers and pre-tokenizers
WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
         r"\s*[\r\n]+|\s+(?!\S)|\s+")
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}


def split_by(digits):
    return [{"type": "Split", "pattern": {"Regex": WORDS % digits}, "behavior": "Isolated", "invert": False},
            BYTES]


GPT2_PIECES = {**BYTES, "use_regex": True}
CUTS = {"gpt-2": ([], [GPT2_PIECES]), "llama-bpe": ([], split_by("{1,3}")),
        "qwen2": ([{"type": "NFC"}], split_by("")),
        "smollm": ([], [{"type": "Digits", "individual_digits": True}, GPT2_PIECES])}
BLANK = "\u2581"                                # SentencePiece's, in place of a space
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}
METASPACE = {"type": "Metaspace", "replacement": BLANK, "split": False}
PREPENDS = [([{"type": "Prepend", "prepend": BLANK}, SPACES], []),          # a blank in front of a text
            ([], [{**METASPACE, "prepend_scheme": "first"}]),
            ([], [{**METASPACE, "prepend_scheme": "always"}])]
SENTENCEPIECE = [*PREPENDS, ([SPACES], []), ([], [{**METASPACE, "prepend_scheme": "never"}])]
BYTE_NAMES = {f"<0x{b:02X}>" for b in range(256)}
LAYER = {"ln1": "attn_norm", "qkv": "attn_qkv", "attproj": "attn_output", "ln2": "ffn_norm", "fc": "ffn_up",
         "fcproj": "ffn_down", "qn": "attn_q_norm", "kn": "attn_k_norm"}


# ---- tensors ----

def tensors(d, params):
    """{GGUF's name: array}, matrices as ours (out, in). Rows of the vocabulary's padding are left out."""
    found = {"token_embd.weight": params["wte"][:d.V], "position_embd.weight": params["wpe"],
             "output_norm.weight": params["lnfw"], "output_norm.bias": params["lnfb"],
             "output.weight": params["headw"][:0 if d.tied else d.V]}
    for l in range(d.L):
        layer = {f"{theirs}.{kind}": params[ours + kind[0]][l] for ours, theirs in LAYER.items()
                 for kind in ("weight", "bias") if ours + kind[0] in params}
        if d.is_llama:
            ends = [d.NH * d.HS, (d.NH + d.NKV) * d.HS]
            q, k, v = np.split(layer.pop("attn_qkv.weight"), ends)
            biases = np.split(layer.pop("attn_qkv.bias"), ends)             # of a Qwen2; else empty
            layer.update({f"attn_{x}.bias": bias for x, bias in zip("qkv", biases)})
            gate, up = np.split(layer.pop("ffn_up.weight"), 2)
            layer.update({"attn_q.weight": paired(d, q), "attn_k.weight": paired(d, k), "attn_v.weight": v,
                          "ffn_gate.weight": gate, "ffn_up.weight": up})
        found.update({f"blk.{l}.{name}": array for name, array in layer.items()})
    if d.is_llama and d.rope_original:
        found["rope_freqs.weight"] = rope_divisors(d)
    return {name: array for name, array in found.items() if array.size}


def paired(d, rows):
    """In a Llama's head llama.cpp rotates neighbours, 2j and 2j + 1; in a Qwen's j and j + HS/2, as here."""
    if class_of(d) != "Llama":
        return rows
    return rows.reshape(-1, 2, d.HS // 2, d.C).swapaxes(1, 2).reshape(rows.shape)


def stored(name, array, kind):
    """(array as it lies in the file, its type)"""
    if array.ndim == 1 or name == "position_embd.weight":
        kind = "F32"
    elif kind == "Q8_0" and array.shape[1] % 32:
        kind = "F16"
    kind = gguf.GGMLQuantizationType[kind]
    return gguf.quantize(np.ascontiguousarray(array, np.float32), kind), kind


# ---- what is not weights ----

def add_shape(out, d):
    out.add_context_length(d.maxT)
    out.add_embedding_length(d.C)
    out.add_block_count(d.L)
    out.add_feed_forward_length(d.F)
    out.add_head_count(d.NH)
    out.add_vocab_size(d.V)
    if not d.is_llama:
        out.add_layer_norm_eps(1e-5)
        return
    out.add_head_count_kv(d.NKV)
    out.add_key_length(d.HS)
    out.add_value_length(d.HS)
    out.add_rope_dimension_count(d.HS)
    out.add_rope_freq_base(d.theta)
    out.add_layer_norm_rms_eps(d.eps)
    if d.rope_factor and not d.rope_original:
        out.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        out.add_rope_scaling_factor(d.rope_factor)


def steps_of(fast, name, parts):
    """A tokenizer.json's normalizers or pre-tokenizers, without what does not change the tokens."""
    steps = fast.get(name) or {parts: []}
    return [{key: value for key, value in step.items() if key != "trim_offsets"}
            for step in steps.get(parts, [steps]) if step != DROP_MARK]


def how_of(fast):
    return steps_of(fast, "normalizer", "normalizers"), steps_of(fast, "pre_tokenizer", "pretokenizers")


def cut_of(words):
    """GGUF's name for how the tokenizer cuts text; None: it has none."""
    if words.merges is not None or not words.vocab:
        return "gpt-2" if words.vocab else None
    fast, model, how = words.fast, words.fast["model"], how_of(words.fast)
    others = {*model} - {"type", "vocab", "merges", "unk_token", "fuse_unk", "dropout", "byte_fallback",
                         "ignore_merges"}
    if model["type"] != "BPE" or any(model[name] for name in others):
        return None
    if model.get("byte_fallback"):
        ranks = [model["vocab"][merge.replace(" ", "")] for merge in merges_of(fast)]
        return "sentencepiece" if how in SENTENCEPIECE and ranks == sorted(ranks) else None
    fits = [name for name, cut in CUTS.items() if how == cut and
            bool(model.get("ignore_merges")) == (name == "llama-bpe")]
    return fits[0] if fits else None


def add_pieces(out, words, tokens, types):
    """SentencePiece's merges are by score, the highest first, and its ids by falling score."""
    kinds, unknown = gguf.TokenType, words.fast["model"].get("unk_token")
    for i, token in enumerate(tokens):
        if token == unknown:
            types[i] = kinds.UNKNOWN
            out.add_unk_token_id(i)
        elif types[i] == kinds.NORMAL and token in BYTE_NAMES:
            types[i] = kinds.BYTE
    first = types.index(kinds.NORMAL)
    out.add_token_scores([float(first - i) if kind == kinds.NORMAL else 0.0 for i, kind in enumerate(types)])
    out.add_add_space_prefix(how_of(words.fast) in PREPENDS)


def begins_texts(words):
    """Does a text begin with a token of its own? Others' tokenizers say it; ours all do, which do not list
    their special tokens, and GPT-2's as we use it."""
    settings = json.loads(words.kept.get("tokenizer_config.json", "{}"))
    if "add_bos_token" in settings or "added_tokens_decoder" not in settings:
        return bool(settings.get("add_bos_token", settings.get("bos_token", "") is not None))
    last = words.fast.get("post_processor") or {}
    return any(step["type"] == "TemplateProcessing" and "SpecialToken" in step["single"][0]
               for step in last.get("processors", [last] if last else []))


def end_of_text(words):
    """The token that ends one: an imported model's first; of ours that which begins one, too."""
    token = json.loads(words.kept.get("tokenizer_config.json", "{}")).get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    ends = kept_ids(words).get("eos_token_id", words.end)
    ends = ends[0] if isinstance(ends, list) else ends
    return words.vocab.get(token, ends) if isinstance(token, str) else ends


def add_tokenizer(out, V, words, chat_template=None):
    """Ids that the model has and the tokenizer lacks are padding."""
    cut = cut_of(words)
    if not cut:
        out.add_tokenizer_model("none")
        return
    tokens, kinds = [f"[PAD{i}]" for i in range(V)], gguf.TokenType
    types = [kinds.UNUSED] * V
    for token, i in words.vocab.items():
        tokens[i], types[i] = token, kinds.NORMAL
    types[words.end] = kinds.CONTROL
    for token in json.loads(words.files.get("tokenizer.json", '{"added_tokens": []}'))["added_tokens"]:
        types[words.vocab[token["content"]]] = kinds.CONTROL if token["special"] else kinds.USER_DEFINED
    pieces = cut == "sentencepiece"
    out.add_tokenizer_model("llama" if pieces else "gpt2")
    out.add_tokenizer_pre("default" if pieces else cut)
    out.add_token_list(tokens)
    if pieces:
        add_pieces(out, words, tokens, types)
    else:
        # llama.cpp insists on a list of merges, and gguf writes no empty one: byte 0, U+0100, is in no text
        merges = words.merges if words.merges is not None else merges_of(words.fast)
        out.add_token_merges(merges or ["\u0100 \u0100"])
    out.add_token_types(types)
    out.add_bos_token_id(words.end)
    out.add_eos_token_id(end_of_text(words))
    out.add_add_bos_token(begins_texts(words))
    if chat_template:
        out.add_chat_template(chat_template)


def kept_template(words):
    """The chat template of an imported model, or None."""
    text = words.kept.get("chat_template.jinja", b"").decode()
    text = text or json.loads(words.kept.get("tokenizer_config.json", "{}")).get("chat_template")
    return text if isinstance(text, str) else None


def write(path, name, d, params, kind, words, chat_template=None):
    gguf_type, file_type = TYPES[kind]
    out = gguf.GGUFWriter(path, ARCHITECTURES[class_of(d)])
    out.add_name(name)
    out.add_file_type(gguf.LlamaFileType[file_type])
    out.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_shape(out, d)
    add_tokenizer(out, d.V, words, chat_template)
    for tensor, array in tensors(d, params).items():
        data, raw = stored(tensor, array, gguf_type)
        out.add_tensor(tensor, data, raw_dtype=raw)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def run(args):
    source = last_model(args.model) if stat.S_ISDIR(mode(args.model)) else args.model
    dims, params, _ = read_model(source)
    if class_of(dims) not in ARCHITECTURES:
        die(f"'{source}' is a {class_of(dims)}, and GGUF has no architecture that computes it\n"
            "hint: dev/hf.py export writes it for transformers")
    if dims.windows():
        die(f"'{source}' has windows ({dims.window_text()[1:]}), and llama.cpp reads no window of a "
            f"{class_of(dims)}\nhint: dev/hf.py export writes it for transformers")
    if dims.is_llama and dims.rope_original and class_of(dims) != "Llama":
        die(f"'{source}' scales positions as Llama 3 does, and llama.cpp does not read that of a "
            f"{class_of(dims)}\nhint: dev/hf.py export writes it for transformers")
    if dims.is_llama and dims.qkv_bias and dims.NH * dims.HS != dims.C:
        die(f"'{source}' has {dims.NH} heads of {dims.HS}, and llama.cpp reads a Qwen2 whose heads are "
            f"together as wide as it is, C={dims.C}\nhint: dev/hf.py export writes it for transformers")
    name = os.path.basename(args.out).removesuffix(".gguf")
    words, template = words_of(dims.V, os.path.dirname(source)), CHAT_TEMPLATES.get(chat_template_of(source))
    if template:
        words.kept = {}                     # its conversations end otherwise
    else:
        template = kept_template(words)
    with whole_file(args.out) as f:
        write(f.name, name, dims, params, args.type, words, template)
    print(f"wrote {args.out}: {os.path.basename(source)}, {count_parameters(dims):,} parameters, {args.type}"
          + ("" if cut_of(words) else f"; no tokenizer: there is none for V={dims.V}" if not words.vocab else
             f"; no tokenizer: GGUF takes those that cut text as {', '.join(CUTS)} or SentencePiece"))


if __name__ == "__main__":
    die("this program is `python3 dev/hf.py gguf` now, with the same words behind it")
