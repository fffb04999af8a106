"""A tokenizer's files: tokenizer.json, which Hugging Face's libraries read, and tokenizer.bin, which the C++
programs read (llmc/data/tokenizer.h). The second is made from the first, and names it by a number of its
contents. Shards, questions and runs carry this number.

    vocab, merges = vocabulary(["t h", "th e"])         # of a byte-level BPE
    text = tokenizer_json(vocab, merges)
    data = tokenizer_bin(text.encode(), "<|endoftext|>")
    head = read_head("my-tok/tokenizer.bin")            # or None
"""
import hashlib
import json
import os
import struct
from collections import namedtuple

END_OF_TEXT = "<|endoftext|>"
MAGIC, VERSION = 20240328, 2            # llm.c's gpt2_tokenizer.bin
MERGES_LISTED, MERGES_NONE = 1, 2       # its text is cut by GPT-2's pattern, or otherwise
LONGEST = 255                           # bytes of a token, for its length byte
GPT2_ID = 1
GPT2_MERGES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "gpt2_bpe", "vocab.bpe")
GPT2_PATTERN = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}

Head = namedtuple("Head", "V eot id merges")


def byte_characters():
    """{byte: character} in the order of GPT-2's ids. It writes every byte as a visible character: those of
    Latin-1 as they are, the others from U+0100 on."""
    visible = [b for b in range(256) if 0x21 <= b <= 0x7E or b >= 0xA1 and b != 0xAD]
    hidden = [b for b in range(256) if b not in visible]
    return {**{b: chr(b) for b in visible}, **{b: chr(0x100 + i) for i, b in enumerate(hidden)}}


def vocabulary(merges):
    """({token: id}, merges): the bytes, then a token of each merge, then the end of text. A merge whose token
    another one forms already is left out."""
    vocab = {character: i for i, character in enumerate(byte_characters().values())}
    taken = []
    for merge in merges:
        token = merge.replace(" ", "")
        if token not in vocab and token != END_OF_TEXT:
            vocab[token] = len(vocab)
            taken.append(merge)
    vocab[END_OF_TEXT] = len(vocab)
    return vocab, taken


def gpt2_vocabulary():
    with open(GPT2_MERGES, encoding="utf-8") as f:
        return vocabulary(f.read().split("\n")[1:-1])


def tokenizer_json(vocab, merges):
    special = {"content": END_OF_TEXT, "single_word": False, "lstrip": False, "rstrip": False,
               "normalized": False, "special": True}
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": vocab[END_OF_TEXT], **special}],
        "normalizer": None, "pre_tokenizer": GPT2_PATTERN, "post_processor": GPT2_PATTERN,
        "decoder": GPT2_PATTERN,
        "model": {"type": "BPE", "dropout": None, "unk_token": END_OF_TEXT, "continuing_subword_prefix": "",
                  "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "vocab": vocab,
                  "merges": merges},
    }, ensure_ascii=False)


def tokenizer_config(kind, end, longest, chat_template=None):
    """tokenizer_config.json. kind: transformers' class. longest: tokens of a text, None: not known."""
    known = {"model_max_length": longest} if longest else {}
    if chat_template:
        known["chat_template"] = chat_template
    return json.dumps({"tokenizer_class": kind, **known, "add_prefix_space": False, "bos_token": end,
                       "eos_token": end, "unk_token": end, "clean_up_tokenization_spaces": False},
                      indent=2) + "\n"


# ---- tokenizer.bin ----

def tokenizer_id(text):
    """Of a tokenizer.json's bytes. GPT-2's has the number that all programs know; 0 and 2 are taken, too: not
    known, bytes."""
    fast = json.loads(text)
    if cuts_as_gpt2(fast) and (fast["model"]["vocab"], merges_of(fast)) == gpt2_vocabulary():
        return GPT2_ID
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "little") >> 2 | 1 << 30


def token_ids(fast):
    """{token: id} of a tokenizer.json, with those that the model does not know."""
    return {**fast["model"]["vocab"], **{token["content"]: token["id"] for token in fast["added_tokens"]}}


def merges_of(fast):
    """["left right"]; a file may have them as two texts each."""
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in fast["model"]["merges"]]


def decoded(fast):
    """A function from a token to its bytes, or None for a decoder that is not known here."""
    decoder = fast.get("decoder") or {"type": "none"}
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        byte_of = {character: b for b, character in byte_characters().items()}
        return lambda token: bytes(byte_of[c] for c in token) if byte_of.keys() >= set(token) else \
            token.encode()
    replaced = [(step["pattern"].get("String"), step["content"]) for step in steps
                if step["type"] == "Replace"]
    if "ByteFallback" not in kinds or not kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"} or \
            any(old is None for old, _ in replaced):                # a regular expression
        return None
    named = {f"<0x{b:02X}>": bytes([b]) for b in range(256)}        # as SentencePiece writes them

    def to_bytes(token):
        for old, new in replaced:
            token = token.replace(old, new)
        return named.get(token, token.encode())
    return to_bytes


def cuts_as_gpt2(fast):
    """A BPE that does with a text what GPT-2's does."""
    model = fast["model"]
    pattern = {"use_regex": True, **(fast.get("pre_tokenizer") or {}), "trim_offsets": True}
    odd = "dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges"
    return model["type"] == "BPE" and pattern == GPT2_PATTERN and not fast.get("normalizer") and \
        not any(model.get(name) for name in odd) and all(token["special"] for token in fast["added_tokens"])


def lefts_of(fast, tokens, to_bytes):
    """How many bytes of each token are its left part's; 0: it is no merge. None: C++ cannot encode by it."""
    if not cuts_as_gpt2(fast):
        return None
    made = [fast["model"]["vocab"][merge.replace(" ", "")] for merge in merges_of(fast)]
    if made != sorted(set(made)) or not set(tokens) >= {bytes([b]) for b in range(256)} or \
            not 256 <= len(tokens) <= 2**16 or len(set(tokens)) < len(tokens):
        return None
    lefts = bytearray(len(tokens))
    for token, merge in zip(made, merges_of(fast)):
        lefts[token] = len(to_bytes(merge.split(" ")[0]))
    return bytes(lefts)


def tokenizer_bin(text, document_token):
    """The file's bytes for a tokenizer.json's, or None where this cannot be: for a decoder that is not known,
    or tokens that are too long."""
    fast = json.loads(text)
    to_bytes, vocab = decoded(fast), fast["model"]["vocab"]
    if not to_bytes or not isinstance(vocab, dict):
        return None
    ids = token_ids(fast)
    tokens = [b""] * (1 + max(ids.values()))
    for token, i in ids.items():
        tokens[i] = to_bytes(token)
    if max(map(len, tokens)) > LONGEST:
        return None
    lefts = lefts_of(fast, tokens, to_bytes)
    head = struct.pack("<6I", MAGIC, VERSION, len(tokens), ids[document_token], tokenizer_id(text),
                       MERGES_NONE if lefts is None else MERGES_LISTED).ljust(1024, b"\0")
    return head + b"".join(bytes([len(token)]) + token for token in tokens) + (lefts or b"")


def read_head(path):
    """Head, or None if there is no such file, or one without an id, as llm.c's."""
    if not os.path.isfile(path):
        return None
    with open(path, "rb") as f:
        words = struct.unpack("<6I", f.read(24).ljust(24, b"\0"))
    return Head(*words[2:]) if words[:2] == (MAGIC, VERSION) and words[4] else None
