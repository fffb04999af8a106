"""Sources -> parts -> shards, in an order that a kill does not disturb: what get.py makes data sets with.

A source is what is tokenized at one time: a downloaded file, or some of your own. Its tokens are a part, a
file in OUT/.work. All parts in a row are one text. Some of its documents are for validation, the rest is cut
into shards of equal length: they do not depend on where sources end, nor on how often this was interrupted.
OUT/.work/state.json says which parts are done and how far they are cut, and only what it says counts: it is
replaced when a file that it speaks of is in its place, and a file goes when it no longer speaks of it.
"""
import contextlib
import fcntl
import json
import mmap
import os
import shutil
import struct
import subprocess

from documents import blocks, documents, kind_of
from fetch import Problem, write_all, write_or_tell

MAGIC, VERSION = 20240520, 1
HEADER_BYTES = 1024
COPY = 1 << 22
EOT = 50256                 # of GPT-2's tokens; 0 of bytes


def replace_file(path, blocks_of_bytes):
    """The file appears whole, or not at all."""
    part = path + ".part"
    try:
        with open(part, "wb", buffering=0) as f:
            for block in blocks_of_bytes:
                write_or_tell(f, block, path)
            os.fsync(f.fileno())
        os.replace(part, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(part)
        if isinstance(error, OSError):
            raise Problem(f"cannot write '{path}': {error.strerror}", "choose another --out") from error
        raise


def write_facts(path, facts):
    text = json.dumps(facts, indent=1, ensure_ascii=False) + "\n"
    replace_file(path, [text.encode("utf-8", "surrogateescape")])


def read_facts(path):
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def shard_tokens(path):
    """(tokens, tokenizer) of a shard whose header and size agree."""
    with open(path, "rb") as f:
        head = f.read(HEADER_BYTES)
    size = os.path.getsize(path)
    fields = struct.unpack("<256i", head) if len(head) == HEADER_BYTES else (0, 0)
    if fields[:2] != (MAGIC, VERSION):
        raise Problem(f"'{path}' is no token shard: it begins {fields[0]} {fields[1]}, expected {MAGIC} "
                      f"{VERSION}", "remove it and run again")
    stored = (size - HEADER_BYTES) // 2
    if size % 2 or fields[2] % 2**32 != stored % 2**32:
        raise Problem(f"'{path}' has {size} bytes, its header announces {fields[2]} tokens",
                      "remove it and run again")
    return stored, fields[3]


# ---- the tokenize tool ----

def run_tool(tool, prefix, flags, files=None, feed=None):
    """PREFIX_train.bin of the files, or of what feed yields. The tool says itself what is wrong with them."""
    command = [tool, "-o", prefix, *flags, "--", *(files or ["-"])]
    with subprocess.Popen(command, stdin=subprocess.PIPE if feed else subprocess.DEVNULL,
                          stdout=subprocess.DEVNULL, bufsize=0) as child:
        try:
            with contextlib.suppress(BrokenPipeError):          # then it has ended: its exit code tells
                for block in feed or ():
                    write_all(child.stdin, block)
                if feed:
                    child.stdin.close()
            child.wait()
        except BaseException:                   # before its pipe closes: it must not take this for the end
            child.kill()
            raise
    if child.returncode < 0:
        raise Problem(f"{tool} was ended by signal {-child.returncode}", "the same command goes on from here")
    if child.returncode:
        raise Problem("")


def joined(texts):
    """Documents with a byte 0 between two, in blocks that are worth a write."""
    pending, size = [], 0
    for text in texts:
        pending.append(text)
        size += len(text) + 1
        if size > 1 << 18:
            yield b"\0".join(pending) + b"\0"
            pending, size = [], 0
    if pending:
        yield b"\0".join(pending)


def tokenize(tool, prefix, paths, field, as_bytes):
    """The tokens of one source, files of one kind: PREFIX_train.bin, or nothing if there is no text."""
    flags = ["--val-tokens", "0"] + (["--bytes", "1"] if as_bytes else [])
    kind, compressed = kind_of(paths[0])
    if kind in ("jsonl", "parquet"):
        rows = (text for path in paths for text in documents(path, field) if text)
        first = next(rows, None)
        if first is not None:
            texts = (text for some in ([first], rows) for text in some)
            run_tool(tool, prefix, flags + ["--separators", "nul"], feed=joined(texts))
    elif compressed:
        run_tool(tool, prefix, flags, feed=blocks(paths[0]))
    elif any(os.path.getsize(path) for path in paths):
        run_tool(tool, prefix, flags, files=paths)


# ---- validation ----

def draw_key(number):
    """splitmix64: the order in which documents are drawn, as in tokenize.cpp."""
    mask = (1 << 64) - 1
    z = (number + 1) * 0x9E3779B97F4A7C15 & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return z ^ z >> 31


def draw_validation(starts, total, wanted):
    """[(first token, the one behind the last)] of documents drawn over the text, `wanted` tokens at most. The
    first that does not fit is the last; if less than half is full then, its end is taken. What is left for
    training so begins with a document. starts: of the documents among `total` tokens."""
    drawn, left = [], wanted
    for i in sorted(range(len(starts)), key=draw_key):
        begin, end = starts[i], starts[i + 1] if i + 1 < len(starts) else total
        if end - begin > left:
            if 2 * left > wanted:
                drawn.append((end - left, end))
            break
        drawn.append((begin, end))
        left -= end - begin
    return sorted(drawn)


# ---- parts and shards ----

def changes(before, now):
    """What differs between two recipes, in words."""
    return ", ".join(f"{key} {before.get(key)!r} and not {value!r}" for key, value in now.items()
                     if before.get(key) != value)


class Work:
    """A data set that is being made in the folder `out`; `recipe` is what its bytes depend on."""

    def __init__(self, out, recipe):
        self.out, self.folder = out, os.path.join(out, ".work")
        self.recipe, self.state = recipe, None
        try:
            os.makedirs(self.folder, exist_ok=True)
            self.lock = open(os.path.join(self.folder, "lock"), "w", encoding="ascii")
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Problem(f"another get.py is at work in '{out}'", "wait for it, or choose another --out") \
                from None
        except OSError as error:
            raise Problem(f"cannot write to the folder '{out}': {error.strerror}",
                          "choose another --out") from error

    def path(self, name):
        return os.path.join(self.folder, name)

    def shard_path(self, split, number):
        return os.path.join(self.out, f"{self.recipe['stem']}_{split}_{number:06d}.bin")

    def shards(self):
        stem = self.recipe["stem"]
        return sorted(name for name in os.listdir(self.out) if name.endswith(".bin")
                      and name.startswith((stem + "_train_", stem + "_val_")))

    def restart(self):
        for name in self.shards():
            os.unlink(os.path.join(self.out, name))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.out, "dataset.json"))
        shutil.rmtree(self.path("files"), ignore_errors=True)
        for name in os.listdir(self.folder):
            if name not in ("lock", "files"):
                os.unlink(self.path(name))

    def load(self, sources):
        """Goes on with what is there, or begins. sources(): what they are, asked for only then. Those for
        validation come first."""
        for name in os.listdir(self.folder):
            if name.startswith("tmp."):         # of a run that was killed
                os.unlink(self.path(name))
        if os.path.exists(self.path("state.json")):
            self.state = read_facts(self.path("state.json"))
            if not self.state["cut"]:           # no shard was cut by these yet
                self.state["recipe"].update((key, self.recipe[key]) for key in ("val_tokens", "shard_tokens"))
                self.state.pop("val", None)
            if changed := changes(self.state["recipe"], self.recipe):
                raise Problem(f"'{self.out}' was begun with {changed}",
                              "the same options go on with it; --restart begins anew; or another --out")
            return
        if self.shards():
            raise Problem(f"'{self.out}' holds {self.shards()[0]}, which another program wrote",
                          "choose another --out, or --restart, which removes them")
        self.state = {"recipe": self.recipe, "sources": sources(), "parts": [], "cut": {}}
        self.save()

    def save(self):
        write_facts(self.path("state.json"), self.state)

    def part_path(self, number):
        return self.path(f"part_{number:06d}.bin")

    def add_part(self, made):
        """made: the file with the tokens of the next source, or nothing if it has none."""
        number = len(self.state["parts"])
        tokens = 0
        if os.path.exists(made):
            tokens = shard_tokens(made)[0]
            os.replace(made, self.part_path(number))
        self.state["parts"].append({"tokens": tokens})
        self.save()

    def tokens(self):
        return sum(part["tokens"] for part in self.state["parts"])

    def document_starts(self, first=0):
        """The tokens at which documents begin, from this one on."""
        eot, position = struct.pack("<H", 0 if self.recipe["bytes"] else EOT), 0
        for number, part in enumerate(self.state["parts"]):
            if max(first, position) < position + part["tokens"]:
                with open(self.part_path(number), "rb") as f, \
                        mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as words:
                    at = HEADER_BYTES + 2 * max(first - position, 0)
                    while (at := words.find(eot, at)) >= 0:
                        if at % 2 == 0:
                            yield position + (at - HEADER_BYTES) // 2
                        at += 1
            position += part["tokens"]

    def validation(self, last):
        """Spans of the text; None: more of it must come first. A set has sources for it, which are the first;
        or it is drawn from the whole text; or, where that is too long to wait for, it is the beginning."""
        own = sum(source["split"] == "val" for source in self.state["sources"])
        if own:
            end = sum(part["tokens"] for part in self.state["parts"][:own])
            return [(0, end)] if len(self.state["parts"]) >= own else None
        wanted, total = self.recipe["val_tokens"], self.tokens()
        if last and total == 0:
            raise Problem(f"there is no text in the files of '{self.out}'")
        if last and wanted != "auto" and wanted >= total:
            raise Problem(f"the text has {total} tokens, --val-tokens {wanted} leaves none to train on",
                          f"--val-tokens {total // 10} is a tenth of it")
        if self.recipe["validation"] == "drawn":
            if not last:
                return None
            starts = list(self.document_starts())
            spans = draw_validation(starts, total, min(100_000, total // 10) if wanted == "auto" else wanted)
            print(f"validation: {sum(end - begin for begin, end in spans)} of {total} tokens, "
                  f"{len(spans)} of {len(starts)} documents", flush=True)
            return spans
        end = next(self.document_starts(wanted), None) if wanted else 0
        if end is None:                         # the text ends with a long document: of that the end
            return [(total - wanted, total)] if last else None
        return [(0, end)]

    def spans(self, split):
        """Which tokens of the text, so far, are this split's."""
        if split == "val":
            return self.state["val"]
        edges = [0, *(edge for span in self.state["val"] for edge in span), self.tokens()]
        return list(zip(edges[::2], edges[1::2]))

    def done(self, split):
        """How many of its shards there are."""
        return self.state["cut"].get(split, 0)

    def enough(self, limit):
        return limit and self.done("train") >= limit

    def left(self, split):
        """(tokens that are in no shard yet, tokens of the next whole shard)"""
        there = sum(end - begin for begin, end in self.spans(split))
        size = there if split == "val" else self.recipe["shard_tokens"]
        return there - self.done(split) * size, size

    def cut(self, limit, last):
        """Writes the shards that are complete, at most `limit` of training (0: all); last: and the rest."""
        if "val" not in self.state:
            found = self.validation(last)
            if found is None:
                return
            self.state["val"] = found
        for split in ("val", "train"):
            while not (split == "train" and self.enough(limit)):
                left, size = self.left(split)
                if left <= 0 or (left < size and not last):
                    break
                number = self.done(split)
                path = self.shard_path(split, number + (split == "train"))
                count = min(left, size)
                replace_file(path, self.shard_bytes(split, number * size, count))
                print(f"{path}: {count} tokens", flush=True)
                self.state["cut"][split] = number + 1
                self.save()
        self.drop_parts()

    def shard_bytes(self, split, skip, count):
        fields = (MAGIC, VERSION, (count + 2**31) % 2**32 - 2**31, 2 if self.recipe["bytes"] else 1)
        yield struct.pack("<256i", *fields, *[0] * (256 - len(fields)))
        for begin, end in self.spans(split):
            first, behind = begin + skip, min(end, begin + skip + count)
            skip = max(first - end, 0)
            if first < behind:
                count -= behind - first
                yield from self.token_bytes(first, behind)

    def token_bytes(self, first, behind):
        position = 0
        for number, part in enumerate(self.state["parts"]):
            begin, end = max(first - position, 0), min(behind - position, part["tokens"])
            position += part["tokens"]
            if begin >= end:
                continue
            with open(self.part_path(number), "rb") as f:
                f.seek(HEADER_BYTES + 2 * begin)
                left = 2 * (end - begin)
                while left:
                    block = f.read(min(left, COPY))
                    if not block:
                        raise Problem(f"'{f.name}' is cut short", "--restart begins anew")
                    left -= len(block)
                    yield block

    def drop_parts(self):
        """Those whose tokens are all in shards: validation is always cut first."""
        skip, position = self.done("train") * self.recipe["shard_tokens"], 0
        done = self.tokens()
        for begin, end in self.spans("train"):
            if skip < end - begin:
                done = begin + skip
                break
            skip -= end - begin
        for number, part in enumerate(self.state["parts"]):
            position += part["tokens"]
            if position <= done and os.path.exists(self.part_path(number)):
                os.unlink(self.part_path(number))

    def finish(self, facts):
        """Nothing is left to do: what this is, and no .work any more."""
        write_facts(os.path.join(self.out, "dataset.json"), facts)
        shutil.rmtree(self.folder)
