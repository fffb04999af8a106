"""Folders as the families' authors publish them: the keys and settings of config.json,
generation_config.json, tokenizer_config.json and tokenizer.json, with small sizes, a small vocabulary and
random weights.

    dims, params = folder("Qwen2.5-0.5B-Instruct", "qwen-hf")
"""
import functools
import json
import os
import sys

from checks import ROOT, write
from twins import family_model

sys.path[1:1] = [os.path.join(ROOT, "dev"), os.path.join(ROOT, "dev/eval"), os.path.join(ROOT, "dev/data")]
import export_gguf                      # noqa: E402  gives: how the families cut texts
import export_hf                        # noqa: E402
import import_hf                        # noqa: E402

TEXT = os.path.join(ROOT, "LICENSE")            # it does not change
TEXTS = [" the Software  is provided\n\n\n as is", "It isn't WE'LL 1234567 x=3;  y\t\n z",
         "日本語 naïve \U0001f600", "", " ", "  ", "a\n", "THE SOFTWARE IS PROVIDED \"AS IS\"",
         "merge, publish, distribute"]
SIZES = {"max_position_embeddings": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 96}
LLAMA = {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
         "hidden_act": "silu", "initializer_range": 0.02, "mlp_bias": False, "model_type": "llama",
         "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0,
         "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.45.0",
         "use_cache": True}
MISTRAL = {"architectures": ["MistralForCausalLM"], "hidden_act": "silu", "initializer_range": 0.02,
           "model_type": "mistral", "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 9,
           "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0",
           "use_cache": True}
SPM_SETTINGS = {"add_bos_token": True, "add_eos_token": False, "additional_special_tokens": [],
                "bos_token": "<s>", "clean_up_tokenization_spaces": False, "eos_token": "</s>",
                "legacy": True, "model_max_length": 1000000000000000019884624838656, "pad_token": None,
                "sp_model_kwargs": {}, "spaces_between_special_tokens": False,
                "tokenizer_class": "LlamaTokenizer", "unk_token": "<unk>", "use_default_system_prompt": False}
LLAMA3_TEMPLATE = (
    "{{- bos_token }}\n{%- if not date_string is defined %}\n    {%- if strftime_now is defined %}\n"
    "        {%- set date_string = strftime_now(\"%d %b %Y\") %}\n    {%- else %}\n"
    "        {%- set date_string = \"26 Jul 2024\" %}\n    {%- endif %}\n{%- endif %}\n"
    "{{- \"<|start_header_id|>system<|end_header_id|>\\n\\n\" }}\n"
    "{{- \"Today Date: \" + date_string + \"\\n\\n\" }}\n{{- \"<|eot_id|>\" }}\n"
    "{%- for message in messages %}\n"
    "    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim "
    "+ '<|eot_id|>' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n{%- endif %}\n")
CHATML = ("{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
          "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
          "{% endif %}")
ZEPHYR = ("{% for message in messages %}\n{{ '<|' + message['role'] + '|>\n' + message['content'] + "
          "eos_token }}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n"
          "{% endfor %}")
# a family: how it cuts text; special tokens, the first of which are the first of its vocabulary or the last;
# config.json, where a token is the id of its text; the same of generation_config.json; tokenizer_config.json
PUBLISHED = {
    "Llama-3.2-1B-Instruct": (
        "llama-bpe", ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
                      "<|eom_id|>", "<|eot_id|>"],
        {**LLAMA, "bos_token_id": "<|begin_of_text|>", "head_dim": 32, "rope_theta": 500000.0,
         "eos_token_id": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], "tie_word_embeddings": True,
         "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                          "original_max_position_embeddings": 48, "rope_type": "llama3"}},
        {"bos_token_id": "<|begin_of_text|>", "do_sample": True, "temperature": 0.6, "top_p": 0.9,
         "eos_token_id": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], "transformers_version": "4.45.0"},
        {"bos_token": "<|begin_of_text|>", "chat_template": LLAMA3_TEMPLATE, "model_max_length": 131072,
         "clean_up_tokenization_spaces": True, "eos_token": "<|eot_id|>",
         "model_input_names": ["input_ids", "attention_mask"], "tokenizer_class": "PreTrainedTokenizerFast"}),
    "Qwen2.5-0.5B-Instruct": (
        "qwen2", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        {"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": "<|endoftext|>",
         "eos_token_id": "<|im_end|>", "hidden_act": "silu", "initializer_range": 0.02,
         "max_window_layers": 21, "model_type": "qwen2", "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
         "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
         "transformers_version": "4.43.1", "use_cache": True, "use_sliding_window": False},
        {"bos_token_id": "<|endoftext|>", "pad_token_id": "<|endoftext|>", "do_sample": True,
         "eos_token_id": ["<|im_end|>", "<|endoftext|>"], "repetition_penalty": 1.1, "temperature": 0.7,
         "top_p": 0.8, "top_k": 20, "transformers_version": "4.37.0"},
        {"add_bos_token": False, "add_prefix_space": False, "bos_token": None, "chat_template": CHATML,
         "additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "clean_up_tokenization_spaces": False,
         "eos_token": "<|im_end|>", "errors": "replace", "model_max_length": 131072,
         "pad_token": "<|endoftext|>", "split_special_tokens": False, "tokenizer_class": "Qwen2Tokenizer",
         "unk_token": None}),
    "SmolLM2-135M-Instruct": (
        "smollm", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        {**LLAMA, "bos_token_id": "<|im_start|>", "eos_token_id": "<|im_end|>", "is_llama_config": True,
         "pad_token_id": "<|im_end|>", "rope_interleaved": False, "rope_theta": 100000,
         "tie_word_embeddings": True, "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
        {"_from_model_config": True, "bos_token_id": "<|im_start|>", "eos_token_id": "<|im_end|>",
         "pad_token_id": "<|im_end|>", "transformers_version": "4.42.3"},
        {"add_prefix_space": False, "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
         "bos_token": "<|im_start|>", "chat_template": CHATML, "clean_up_tokenization_spaces": False,
         "eos_token": "<|im_end|>", "model_max_length": 8192, "pad_token": "<|im_end|>",
         "tokenizer_class": "GPT2Tokenizer", "unk_token": "<|endoftext|>", "vocab_size": 49152}),
    "Mistral-7B-v0.1": (
        "prepend", ["<unk>", "<s>", "</s>"], {**MISTRAL, "bos_token_id": "<s>", "eos_token_id": "</s>"},
        {"_from_model_config": True, "bos_token_id": "<s>", "eos_token_id": "</s>",
         "transformers_version": "4.34.0.dev0"}, SPM_SETTINGS),
    "Mistral-7B-v0.3": (
        "first", ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"],
        {**MISTRAL, "bos_token_id": "<s>", "eos_token_id": "</s>", "attention_dropout": 0.0,
         "rope_theta": 1000000.0, "sliding_window": None},
        {"_from_model_config": True, "bos_token_id": "<s>", "eos_token_id": "</s>",
         "transformers_version": "4.42.0.dev0"}, {**SPM_SETTINGS, "add_prefix_space": None, "legacy": False}),
    "TinyLlama-1.1B-Chat-v1.0": (
        "prepend", ["<unk>", "<s>", "</s>"], {**LLAMA, "bos_token_id": "<s>", "eos_token_id": "</s>"},
        {"bos_token_id": "<s>", "eos_token_id": "</s>", "max_length": 2048, "pad_token_id": 0,
         "transformers_version": "4.35.0"},
        {**SPM_SETTINGS, "chat_template": ZEPHYR, "legacy": False, "model_max_length": 2048,
         "pad_token": "</s>", "padding_side": "right"})}


def added(content, i, special=True):
    return {"id": i, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": special}


def byte_level(tokenizers, cut, special):
    """A byte-level BPE. Published vocabularies have the special tokens last, but SmolLM's."""
    normalizers, steps = export_gguf.CUTS[cut]
    steps = [{**step, "trim_offsets": cut != "qwen2"} if step["type"] == "ByteLevel" else step
             for step in steps]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    fast = json.loads(tokenizer.to_str())
    fast["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(fast))
    tokenizer.train([TEXT], tokenizers.trainers.BpeTrainer(
        vocab_size=500, show_progress=False, special_tokens=list(special) if cut == "smollm" else [],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    fast = json.loads(tokenizer.to_str())
    first = 0 if cut == "smollm" else len(fast["model"]["vocab"])
    ids = {text: first + i for i, text in enumerate(special)}
    fast["added_tokens"] = [added(text, i) for text, i in ids.items()]
    fast["normalizer"] = normalizers[0] if normalizers else None
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": cut != "qwen2", "use_regex": True}
    fast["decoder"] = last
    fast["post_processor"] = {"type": "Sequence", "processors": [
        last, begins_with(special[0], ids[special[0]])]} if cut == "llama-bpe" else last
    fast["model"]["ignore_merges"] = cut == "llama-bpe"
    return fast, ids


def begins_with(token, i):
    single = [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, *(
        {kind: {**value, "type_id": 1} for kind, value in step.items()} for step in single)],
            "special_tokens": {token: {"id": token, "ids": [i], "tokens": [token]}}}


def pieces(tokenizers, cut, special):
    """SentencePiece's BPE as it is converted: special tokens, bytes, merged pieces by score, characters."""
    how = {"prepend": export_gguf.PREPENDS[0], "first": export_gguf.PREPENDS[1]}[cut]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.train([TEXT], tokenizers.trainers.BpeTrainer(vocab_size=500, show_progress=False))
    model = json.loads(tokenizer.to_str())["model"]
    merged = list(dict.fromkeys("".join(merge) if isinstance(merge, list) else merge.replace(" ", "")
                                for merge in model["merges"]))
    characters = [token for token in model["vocab"] if len(token) == 1]
    tokens = [*special, *sorted(export_gguf.BYTE_NAMES), *merged, *characters]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [f"{token[:n]} {token[n:]}" for token in merged for n in range(1, len(token))
              if token[:n] in vocab and token[n:] in vocab]
    ids = {text: i for i, text in enumerate(special)}
    normalizers, steps = how
    return {"version": "1.0", "truncation": None, "padding": None,
            "added_tokens": [added(text, i) for text, i in ids.items()],
            "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers else None,
            "pre_tokenizer": steps[0] if steps else None, "post_processor": begins_with("<s>", ids["<s>"]),
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
            "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True,
                      "ignore_merges": False, "vocab": vocab, "merges": merges}}, ids


@functools.lru_cache
def tokenizer_of(cut, *special):
    """(tokenizer.json as text, {special token: id}, how many ids there are)"""
    tokenizers = __import__("tokenizers")
    fast, ids = (byte_level if cut in export_gguf.CUTS else pieces)(tokenizers, cut, special)
    count = 1 + max(*fast["model"]["vocab"].values(), *ids.values())
    return json.dumps(fast, ensure_ascii=False), ids, count


def with_ids(value, ids):
    """Texts of tokens become ids."""
    return {**value, **{key: [ids[text] for text in token] if isinstance(token, list) else
                        ids.get(token, token) for key, token in value.items() if key.endswith("_id")}}


def folder(family, path, version=205, **sizes):
    """(dims, params) of what is written there: bf16 if the version is 205, else fp32."""
    cut, special, config, generation, settings = PUBLISHED[family]
    text, ids, count = tokenizer_of(cut, *special)
    rows = [added(token, i) for token, i in ids.items()]
    os.makedirs(path)
    for name, value in (("config", with_ids({**SIZES, **config, "vocab_size": count, **sizes}, ids)),
                        ("generation_config", with_ids(generation, ids)),
                        ("tokenizer_config", {"added_tokens_decoder": {row.pop("id"): row for row in rows},
                                              **settings})):
        write(f"{path}/{name}.json", json.dumps(value, indent=2))
    write(path + "/tokenizer.json", text)
    dims, _, _ = import_hf.read_config(path + "/config.json")
    dims, params = family_model(path + ".bin", version, **vars(dims))
    export_hf.write_safetensors(path + "/model.safetensors", export_hf.weights(dims, params),
                                "BF16" if version == 205 else "F32")
    return dims, params
