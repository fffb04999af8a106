"""Sources -> parts -> shards, in an order that a kill does not disturb: what get.py makes data sets with.

A source is what is tokenized at one time: a downloaded file, or some of your own. Its tokens are a part, a
file in OUT/.work. All parts in a row are cut into shards of equal length, so the shards do not depend on
where the sources begin and end, nor on how often the work was interrupted. OUT/.work/state.json says which
parts are done and how far they are cut, and only what it says counts: it is replaced when a file that it
speaks of is in its place, and a file goes when it no longer speaks of it.
"""
import contextlib
import fcntl
import json
import os
import shutil
import struct
import subprocess

from documents import blocks, documents, kind_of
from fetch import Problem, write_all, write_or_tell

MAGIC, VERSION = 20240520, 1
HEADER_BYTES = 1024
COPY = 1 << 22


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
    flags = ["--bytes", "1"] if as_bytes else []
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


# ---- parts and shards ----

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
            with open(self.path("state.json"), encoding="utf-8") as f:
                self.state = json.load(f)
            changed = [key for key, value in self.recipe.items() if self.state["recipe"].get(key) != value]
            if not self.state["cut"] and set(changed) <= {"val_tokens", "shard_tokens"}:
                self.state["recipe"], changed = self.recipe, []     # no shard was cut by them yet
            if changed:
                raise Problem(f"'{self.out}' was begun with another {', '.join(changed)}",
                              "the same options go on with it; --restart begins anew; or another --out")
            return
        if self.shards():
            raise Problem(f"'{self.out}' holds {self.shards()[0]}, which another program wrote",
                          "choose another --out, or --restart, which removes them")
        self.state = {"recipe": self.recipe, "sources": sources(), "parts": [], "cut": {}}
        self.save()

    def save(self):
        text = json.dumps(self.state, indent=1, ensure_ascii=False)
        replace_file(self.path("state.json"), [text.encode("utf-8", "surrogateescape")])

    def part_path(self, number):
        return self.path(f"part_{number:06d}.bin")

    def add_part(self, split, made):
        """made: the file with the tokens of the next source, or nothing if it has none."""
        number = len(self.state["parts"])
        tokens = 0
        if os.path.exists(made):
            tokens = shard_tokens(made)[0]
            os.replace(made, self.part_path(number))
        self.state["parts"].append({"split": split, "tokens": tokens})
        self.save()

    def tokens(self, split):
        return sum(part["tokens"] for part in self.state["parts"] if part["split"] == split)

    def own_val(self):
        """How many sources are for validation alone; if none is, the beginning of the text is taken."""
        return sum(source["split"] == "val" for source in self.state["sources"])

    def next_cut(self, split):
        """(name of the shard, its first token, the one behind its last) of this stream's next shard."""
        number, size = self.state["cut"].get(split, 0), self.recipe["shard_tokens"]
        if split == "val":
            return self.shard_path("val", 0), 0 if number == 0 else self.tokens("val"), self.tokens("val")
        val = 0 if self.own_val() else self.recipe["val_tokens"]
        if val and number == 0:
            return self.shard_path("val", 0), 0, val
        number += 0 if val else 1
        return self.shard_path("train", number), val + (number - 1) * size, val + number * size

    def train_shards(self):
        cut = self.state["cut"].get("train", 0)
        return cut - (1 if cut and not self.own_val() and self.recipe["val_tokens"] else 0)

    def cut(self, limit, last):
        """Writes the shards that are complete, at most `limit` of training (0: all); last: and the rest."""
        there = self.tokens("train")
        if last and not self.own_val() and there <= self.recipe["val_tokens"]:
            raise Problem(f"the text has {there} tokens, --val-tokens {self.recipe['val_tokens']} leaves "
                          "none to train on", f"--val-tokens {there // 10} is a tenth of it")
        for split in ("val", "train"):
            total = self.tokens(split)
            whole = last or (split == "val" and len(self.state["parts"]) >= self.own_val())
            while not (split == "train" and limit and self.train_shards() >= limit):
                path, begin, end = self.next_cut(split)
                if begin >= total or (not whole and (end > total or split == "val")):
                    break
                end = min(end, total)
                replace_file(path, self.shard_bytes(split, begin, end))
                print(f"{path}: {end - begin} tokens", flush=True)
                self.state["cut"][split] = self.state["cut"].get(split, 0) + 1
                self.save()
        self.drop_parts()

    def spans(self, split):
        """(path, first token, the one behind its last) of each part of this stream"""
        begin = 0
        for number, part in enumerate(self.state["parts"]):
            if part["split"] == split:
                yield self.part_path(number), begin, begin + part["tokens"]
                begin += part["tokens"]

    def shard_bytes(self, split, begin, end):
        fields = (MAGIC, VERSION, (end - begin + 2**31) % 2**32 - 2**31, 2 if self.recipe["bytes"] else 1)
        yield struct.pack("<256i", *fields, *[0] * (256 - len(fields)))
        for path, first, behind in self.spans(split):
            if behind <= begin or first >= end:
                continue
            with open(path, "rb") as f:
                f.seek(HEADER_BYTES + 2 * (max(begin, first) - first))
                left = 2 * (min(end, behind) - max(begin, first))
                while left:
                    block = f.read(min(left, COPY))
                    if not block:
                        raise Problem(f"'{path}' is cut short", "--restart begins anew")
                    left -= len(block)
                    yield block

    def drop_parts(self):
        for split in ("val", "train"):
            _, begin, _ = self.next_cut(split)
            for path, first, behind in self.spans(split):
                if behind <= begin and behind > first and os.path.exists(path):
                    os.unlink(path)

    def finish(self, facts):
        """Nothing is left to do: what this is, and no .work any more."""
        replace_file(os.path.join(self.out, "dataset.json"),
                     [(json.dumps(facts, indent=1, ensure_ascii=False) + "\n").encode(
                         "utf-8", "surrogateescape")])
        shutil.rmtree(self.folder)
