"""What --tokenizer names: a folder by `get.py tokenizer`, by which build/tokenize encodes, or any
tokenizer.json, such as Qwen3's or Llama 3's. By such a file the package tokenizers encodes, and shards are
made here. Those of a vocabulary above 65,536 have 32-bit tokens.

    tokenizer = any_tokenizer("Qwen3-0.6B/tokenizer.json", "<|endoftext|>")     # or a folder that has one
    lines = tokenizer.write_shards("data/qwen", 100000, 0, texts)       # qwen_train.bin, qwen_val.bin
    text = train(["some.txt"], 32768)                                   # a new tokenizer.json
"""
import itertools
import json
import os
import struct
import sys
import tempfile
from array import array

from documents import size_of
from fetch import Problem, need
from shards import KINDS, replace_file
from tokenizer_files import (END_OF_TEXT, GPT2_ID, MERGES_LISTED, for_chats, id_of, read_head, settings_of,
                             token_ids, tokenizer_bin, tokenizer_json, vocabulary)

NAMES = "tokenizer.json", "tokenizer.bin"
TOKEN_BYTES = 128           # of the longest token that is learned, as of GPT-2's
AT_ONCE = 1000              # documents that the package encodes side by side


def read(path):
    try:
        if os.path.exists(path):
            size_of(path)                       # a pipe would be waited for
        with open(path, "rb") as f:
            return f.read()
    except OSError as error:
        raise Problem(f"'{path}': {error.strerror}", "--tokenizer takes a tokenizer.json, or its folder") \
            from error


def any_tokenizer(path, first, by_package=False):
    """OwnTokenizer, but not if by_package, or AnyTokenizer. first: the token in front of each document; None:
    that of the folder's tokenizer.bin, else <|endoftext|>."""
    if not os.path.isdir(path):
        return AnyTokenizer(path, first or END_OF_TEXT)
    file, head = os.path.join(path, NAMES[0]), read_head(os.path.join(path, NAMES[1]))
    number = id_of(file, text := read(file), head)
    ends = [token for token, i in token_ids(json.loads(text)).items() if head and i == head.eot]
    first = first or (ends or [END_OF_TEXT])[0]
    if head and head.merges == MERGES_LISTED and first == END_OF_TEXT and not by_package:
        settings_of(file, text)                     # says which of them the tool does not have
        return OwnTokenizer(path, head)
    return AnyTokenizer(file, first, number)


class OwnTokenizer:
    """A folder whose tokenizer.bin build/tokenize encodes by."""
    by_tool = True

    def __init__(self, folder, head):
        self.id, self.first, self.V, self.kind = head.id, head.eot, head.V, KINDS[0]
        self.first_text = END_OF_TEXT
        self.files = {name: read(os.path.join(folder, name)) for name in NAMES}
        self.flags = ["--vocab", os.path.join(folder, NAMES[1])]


class AnyTokenizer:
    """first: the token that goes in front of each document."""
    by_tool = False

    def __init__(self, path, first, number=None):
        self.package = need("tokenizers", "no tokenizer.json can be read", "tokenizers").Tokenizer
        text = read(path)
        self.id, self.first_text = number or id_of(path, text), first
        self.settings = settings_of(path, text)
        try:
            self.tokenizer = self.package.from_str(json.dumps(self.settings))
            self.tokenizer.encode_special_tokens = True         # in a text they are text
        except Exception as error:                  # pylint: disable=W0718
            raise Problem(f"'{path}' is no tokenizer.json: {error}") from error
        self.first = self.tokenizer.token_to_id(first)
        if self.first is None:
            raise Problem(f"'{path}' has no token '{first}' to begin a document",
                          "--document-token TEXT names another one")
        self.V = 1 + max(self.tokenizer.get_vocab().values())
        self.kind = next(kind for kind in KINDS if self.V <= kind.most)
        flat = tokenizer_bin(text, first, self.id)
        self.files = {} if self.id == GPT2_ID else dict(zip(NAMES, [text, flat] if flat else [text]))
        if not flat:
            print(f"note: samples will be token ids: how '{path}' decodes is not known here", file=sys.stderr)

    def encode(self, texts):
        """The ids of each text, alone."""
        encodings = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def chat_encoder(self):
        """(the package's tokenizer for conversations, what for_chats() returns)"""
        marked = for_chats(self.settings, self.first_text)
        return self.package.from_str(json.dumps(self.settings)), marked

    def documents(self, texts):
        """The tokens of each that is not empty."""
        for some in batches(split(texts), AT_ONCE):
            for ids in self.encode(map(bytes.decode, some)):
                yield array(self.kind.code, [self.first, *ids])

    def write_shards(self, prefix, val_tokens, shard_tokens, texts):
        """As the tool does with `texts`, bytes of which a 0 ends a document; returns what it prints."""
        with tempfile.TemporaryFile(dir=os.path.dirname(prefix) or ".") as waiting:
            starts, total = [], 0
            for tokens in self.documents(texts):
                starts.append(total)
                total += len(tokens)
                tokens.tofile(waiting)
            wanted = min(100_000, total // 10) if val_tokens == "auto" else val_tokens
            if wanted >= total:
                raise Problem(f"the text has {total} tokens, --val-tokens {wanted} leaves none to train on",
                              f"--val-tokens {total // 10} is a tenth of it")
            drawn = draw(starts, total, wanted)
            edges = [0, *(edge for span in drawn for edge in span), total]
            self.put(f"{prefix}_val", 0, drawn, waiting)
            self.put(f"{prefix}_train", shard_tokens, list(zip(edges[::2], edges[1::2])), waiting)
        count = sum(end - begin for begin, end in drawn)
        said = f"validation: {count} of {total} tokens, {len(drawn)} of {len(starts)} documents"
        return [said] if wanted else []

    def put(self, stem, shard_tokens, spans, waiting):
        """Spans of the tokens that wait, one behind the other, as STEM.bin or STEM_000000.bin and so on."""
        total = sum(end - begin for begin, end in spans)
        for number, at in enumerate(range(0, total, shard_tokens or max(total, 1))):
            count = min(shard_tokens or total, total - at)
            replace_file(f"{stem}_{number:06d}.bin" if shard_tokens else f"{stem}.bin",
                         self.blocks(spans, at, count, waiting))

    def blocks(self, spans, at, count, waiting):
        """A shard's bytes: its header, and `count` tokens from `at` on of the spans' tokens."""
        yield struct.pack("<256I", self.kind.magic, self.kind.version, count % 2**32, self.id, *[0] * 252)
        for begin, end in spans:
            skipped = min(at, end - begin)
            at, begin = at - skipped, begin + skipped
            while begin < end and count:
                some = min(end - begin, count, 1 << 20)
                waiting.seek(self.kind.bytes * begin)
                yield waiting.read(self.kind.bytes * some)
                begin, count = begin + some, count - some


def train(texts, size):
    """The tokenizer.json of a byte-level BPE with GPT-2's pattern, of at most `size` tokens."""
    tokenizers = need("tokenizers", "no tokenizer can be made", "tokenizers")
    bytes_as_characters = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = bytes_as_characters
    tokenizer.train_from_iterator(map(bytes.decode, split(texts)), tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END_OF_TEXT], initial_alphabet=bytes_as_characters.alphabet(),
        max_token_length=TOKEN_BYTES, show_progress=sys.stderr.isatty()))
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return tokenizer_json(*vocabulary(" ".join(merge) if isinstance(merge, list) else merge
                                      for merge in merges))


def batches(items, size):
    items = iter(items)
    while some := list(itertools.islice(items, size)):
        yield some


def split(texts):
    """The documents that are not empty. In the pieces each has a byte 0 behind it."""
    kept = []
    for piece in texts:
        *ends, rest = piece.split(b"\0")
        for end in ends:
            if document := b"".join([*kept, end]):
                yield document
            kept = []
        kept.append(rest)
    if rest := b"".join(kept):
        yield rest


def draw(starts, total, wanted):
    """[(begin, end)] of the documents for validation: those that build/tokenize draws."""
    spans, left = [], wanted
    for i in sorted(range(len(starts)), key=draw_key) if wanted else ():
        begin, end = starts[i], starts[i + 1] if i + 1 < len(starts) else total
        if end - begin > left:
            spans += [(end - left, end)] * (2 * left > wanted)
            break
        spans.append((begin, end))
        left -= end - begin
    return sorted(spans)


def draw_key(number):
    """splitmix64, as in tokenize.cpp."""
    mask = 2**64 - 1
    z = (number + 1) * 0x9E3779B97F4A7C15 & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return z ^ z >> 31
