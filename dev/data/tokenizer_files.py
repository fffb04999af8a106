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
import sys
from collections import namedtuple

from fetch import Problem, need

END_OF_TEXT = "<|endoftext|>"
MAGIC, VERSION = 20240328, 2            # llm.c's gpt2_tokenizer.bin
MERGES_LISTED, MERGES_NONE = 1, 2       # its text is cut by GPT-2's pattern, or otherwise
LONGEST = 255                           # bytes of a token, for its length byte
MOST_TOKENS = 1 << 20                   # of a model's vocabulary
COPY = "copy the tokenizer's two files anew, from beside the shards"
GPT2_ID, BYTES_ID = 1, 2                 # what C++ and shards know them by
GPT2_MERGES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "gpt2_bpe", "vocab.bpe")
GPT2_PATTERN = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
TEMPLATE_1 = "{{ eos_token }}{% for message in messages %}{% set part = namespace("     # how its Jinja begins
MARK = "\ufdd0"                         # no character: Unicode keeps it for a program's own use
DROP_MARK = {"type": "Replace", "pattern": {"String": MARK}, "content": ""}

Head = namedtuple("Head", "V eot id merges exported")   # exported: the number of what hf.py export made of it


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


def tokenizer_config(kind, end, longest, chat_template=None, has_blank=False):
    """tokenizer_config.json. kind: transformers' class. longest: tokens of a text, None: not known.
    has_blank: tokenizer.json puts one in front of a text, and transformers goes by what is said here."""
    known = {"model_max_length": longest} if longest else {}
    if chat_template:
        known["chat_template"] = chat_template
    return json.dumps({"tokenizer_class": kind, **known, "add_prefix_space": has_blank, "bos_token": end,
                       "eos_token": end, "unk_token": end, "clean_up_tokenization_spaces": False},
                      indent=2) + "\n"


# ---- what a tokenizer.json says ----

def tokenizer_id(text):
    """Of a tokenizer.json's bytes. GPT-2's has the number that all programs know; 0 and 2 are taken, too: not
    known, bytes."""
    fast = json.loads(text)
    token_ids(fast)                     # as a check
    if cuts_as_gpt2(fast) and (fast["model"]["vocab"], merges_of(fast)) == gpt2_vocabulary():
        return GPT2_ID
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "little") >> 2 | 1 << 30


def token_ids(fast):
    """{token: id} of a tokenizer.json, with those that the model does not know."""
    vocab = fast["model"]["vocab"]
    if isinstance(vocab, list):                             # Unigram's: each with its score
        vocab = {token: i for i, (token, _) in enumerate(vocab)}
    ids = {**vocab, **{token["content"]: token["id"] for token in fast["added_tokens"]}}
    for token, i in ids.items():
        if not isinstance(i, int) or not 0 <= i < MOST_TOKENS:
            raise ValueError(f"the token {token!r} has the id {i}; allowed are 0 to {MOST_TOKENS - 1}")
    return ids


def settings_of(path, text):
    """A tokenizer.json's, without those that are meant for another use and would cut a text, fill it, or
    encode it by chance. These are named."""
    fast = json.loads(text)
    for settings, name in ((fast, "truncation"), (fast, "padding"), (fast["model"], "dropout")):
        if settings.get(name):
            settings[name] = None
            print(f"note: '{path}' sets {name}, for another use: here it is off", file=sys.stderr)
    return fast


def for_chats(fast, end):
    """Makes its normalizer drop MARK: "<MARK|endoftext|>" then has the tokens of a text, "<|endoftext|>" is
    the token. So special tokens must be looked for before that. Returns {token: text} of those that a
    conversation's texts may not become, with a MARK behind the first character."""
    old = fast.get("normalizer") or {"normalizers": []}
    if DROP_MARK not in (steps := old.get("normalizers", [old])):
        fast["normalizer"] = {"type": "Sequence", "normalizers": [DROP_MARK, *steps]}
    for token in fast["added_tokens"]:
        token["normalized"] = token["normalized"] and not token["special"]
    return {token["content"]: token["content"][0] + MARK + token["content"][1:]
            for token in fast["added_tokens"]
            if (token["special"] or token["content"] == end) and len(token["content"]) > 1}


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
    known = {"type", "vocab", "merges", "unk_token", "fuse_unk", "dropout"}     # each byte has a token
    return model["type"] == "BPE" and pattern == GPT2_PATTERN and \
        fast.get("normalizer") in (None, {"type": "Sequence", "normalizers": [DROP_MARK]}) and \
        not any(model[name] for name in {*model} - known) and \
        all(token["special"] for token in fast["added_tokens"])


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


# ---- tokenizer.bin ----

def tokenizer_bin(text, document_token, number=None):
    """The file's bytes for a tokenizer.json's, or None where this cannot be: for a decoder that is not known,
    or tokens that are too long. number: of the tokenizer.json that export_hf.py made this one of, which
    shards and runs go by."""
    fast = json.loads(text)
    to_bytes, ids, own = decoded(fast), token_ids(fast), tokenizer_id(text)
    if not to_bytes or not isinstance(fast["model"]["vocab"], dict):
        return None
    tokens = [b""] * (1 + max(ids.values()))
    for token, i in ids.items():
        tokens[i] = to_bytes(token)
    if max(map(len, tokens)) > LONGEST:
        return None
    lefts = lefts_of(fast, tokens, to_bytes)
    merges = MERGES_NONE if lefts is None else MERGES_LISTED
    exported = 0 if number in (None, own) else own
    head = struct.pack("<7I", MAGIC, VERSION, len(tokens), ids[document_token], number or own, merges,
                       exported)
    words = b"".join(bytes([len(token)]) + token for token in tokens)
    return sealed(head.ljust(1024, b"\0") + words + (lefts or b""))


def sealed(data):
    """With its checksum: as of model files, in the last two words of the header, which count as 0."""
    xxhash = need("xxhash", "no checksum of a tokenizer.bin can be computed", "xxhash")
    data = data[:1016] + bytes(8) + data[1024:]
    return data[:1016] + struct.pack("<Q", xxhash.xxh64_intdigest(data)) + data[1024:]


def read_head(path):
    """Head, or None if there is no such file, or one without an id, as llm.c's."""
    if not os.path.isfile(path):
        return None
    with open(path, "rb") as f:
        data = f.read()
    words = struct.unpack("<7I", data[:28].ljust(28, b"\0"))
    if words[0] != MAGIC and words[1] != VERSION:           # one alone is damage
        return None
    if any(data[1016:1024]) and data != sealed(data):
        raise Problem(f"'{path}' is damaged: it does not have the checksum in its header", COPY)
    return Head(*words[2:]) if words[:2] == (MAGIC, VERSION) and words[4] else None


def id_of(path, text, head=None):
    """The number of a tokenizer.json. head: of the tokenizer.bin beside it, which has the same number."""
    try:
        number = tokenizer_id(text)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        why = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise Problem(f"'{path}' is no tokenizer.json to be used: {why}", COPY if head else "") from error
    if head and number not in (head.id, head.exported):
        raise Problem(f"'{path}' is tokenizer {number}, the tokenizer.bin beside it is of {head.id}", COPY)
    return head.id if head else number
