"""dev/hf.py gguf: a trained model as one file for llama.cpp, ollama and others: GPT-2 and, of the family of
Llama, what is a Llama or a Qwen3 to Hugging Face. GGUF names no architecture with NanoChat's ReLU^2.

    python3 dev/hf.py gguf runs/mine mine.gguf                         # a run's last model
    python3 dev/hf.py gguf model_00019073.bin mine.gguf --type q8_0

Matrices are f32, f16 or q8_0; vectors and positions always f32, and rows that are no multiple of 32 f16 in
place of q8_0. The tokenizer goes into the file, GPT-2's (V=50257 or 50304), bytes' (V=256), or the run's own,
and says that <|endoftext|> goes before each text. Needs numpy and gguf, which .venv has.
"""
import json
import os
import stat

from export_hf import (CHAT_TEMPLATES, chat_template_of, class_of, count_parameters, die,
                       last_model, mode, np, read_model, take_the_venv, words_of)
from outputs import whole_file

try:
    import gguf
except ImportError:
    take_the_venv()
    die("no gguf in this Python\n"
        "hint: scripts/setup.sh tests installs it into .venv; or pip install gguf, in a venv of yours")

TYPES = {"f32": ("F32", "ALL_F32"), "f16": ("F16", "MOSTLY_F16"), "q8_0": ("Q8_0", "MOSTLY_Q8_0")}
ARCHITECTURES = {"GPT-2": "gpt2", "Llama": "llama", "Qwen3": "qwen3"}     # none with windows
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
            q, k, v = np.split(layer.pop("attn_qkv.weight"), [d.NH * d.HS, (d.NH + d.NKV) * d.HS])
            gate, up = np.split(layer.pop("ffn_up.weight"), 2)
            layer.update({"attn_q.weight": paired(d, q), "attn_k.weight": paired(d, k), "attn_v.weight": v,
                          "ffn_gate.weight": gate, "ffn_up.weight": up})
        found.update({f"blk.{l}.{name}": array for name, array in layer.items()})
    return {name: array for name, array in found.items() if array.size}


def paired(d, rows):
    """In a Llama's head llama.cpp rotates neighbours, 2j and 2j + 1; in a Qwen3's j and j + HS/2, as here."""
    if d.qk_norm:
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


def add_tokenizer(out, V, words, chat_template=None):
    """Ids that the model has and the tokenizer lacks are padding."""
    if words.merges is None:
        out.add_tokenizer_model("none")
        return
    tokens, kinds = [f"[PAD{i}]" for i in range(V)], gguf.TokenType
    types = [kinds.UNUSED] * V
    for token, i in words.vocab.items():
        tokens[i], types[i] = token, kinds.NORMAL
    types[words.end] = kinds.CONTROL
    for token in json.loads(words.files.get("tokenizer.json", '{"added_tokens": []}'))["added_tokens"]:
        types[words.vocab[token["content"]]] = kinds.CONTROL if token["special"] else kinds.USER_DEFINED
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list(tokens)
    out.add_token_types(types)
    # llama.cpp insists on a list of merges, and gguf writes no empty one: byte 0, U+0100, is in no text
    out.add_token_merges(words.merges or ["\u0100 \u0100"])
    out.add_bos_token_id(words.end)
    out.add_eos_token_id(words.end)
    out.add_add_bos_token(True)
    if chat_template:
        out.add_chat_template(chat_template)


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
    name = os.path.basename(args.out).removesuffix(".gguf")
    words = words_of(dims.V, os.path.dirname(source))
    with whole_file(args.out) as f:
        write(f.name, name, dims, params, args.type, words, CHAT_TEMPLATES.get(chat_template_of(source)))
    print(f"wrote {args.out}: {os.path.basename(source)}, {count_parameters(dims):,} parameters, {args.type}"
          + ("" if words.merges is not None else f"; no tokenizer: there is none for V={dims.V}"
             if not words.vocab else "; no tokenizer: GGUF takes one that cuts text by GPT-2's pattern"))


if __name__ == "__main__":
    die("this program is `python3 dev/hf.py gguf` now, with the same words behind it")
