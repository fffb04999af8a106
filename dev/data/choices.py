"""HellaSwag and MMLU as files for the trainer's evaluation, in llm.c's format.

256 int32 {20240522, 1, examples, longest example in bytes, 1 for GPT-2's tokens, 0...}, then each example as
uint16: 65535, bytes of this example (all of it), its index, its label, how many completions, then the context
and each completion, either as a count and so many tokens. The model's choice is the completion that it finds
likeliest.
"""
import array
import csv
import io
import json
import os
import struct
import tarfile

from documents import reading
from fetch import Problem
from shards import EOT, HEADER_BYTES, replace_file, run_tool

MAGIC, VERSION, START = 20240522, 1, 65535
GPT2 = 1                        # whose ids they are, as shards say it; other readers skip this number


# ---- what is asked: (context, completions, label) ----

def hellaswag(path):
    """One object a line. An ending continues its context behind a blank."""
    with reading(path), open(path, encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            try:
                row = json.loads(line)
                yield row["ctx"], [" " + ending for ending in row["endings"]], int(row["label"])
            except (ValueError, KeyError, TypeError) as error:
                raise Problem(f"'{path}' line {number} is no question of HellaSwag: {error!r}",
                              "remove it and run again") from error


def mmlu(path):
    """An archive of tables without a head: question, four answers, the letter of the right one. The answers
    themselves are compared, without examples before them: a small model does not answer by letters."""
    with reading(path):
        with open(path, "rb") as f:             # tarfile takes an archive that is cut between files for whole
            f.seek(-min(1024, os.path.getsize(path)), os.SEEK_END)
            if f.read().strip(b"\0"):
                raise Problem(f"'{path}' ends before its end", "remove it and run again")
        try:
            with tarfile.open(path) as archive:
                names = sorted(name for name in archive.getnames()
                               if "/test/" in "/" + name and name.endswith("_test.csv"))
                for name in names:
                    text = io.TextIOWrapper(archive.extractfile(name), encoding="utf-8", newline="")
                    for number, row in enumerate(csv.reader(text), 1):
                        if len(row) != 6 or row[5] not in tuple("ABCD"):
                            raise Problem(f"'{path}': {name} row {number} is no question of MMLU: {row}",
                                          "remove it and run again")
                        yield (f"Question: {row[0]}\n\nAnswer:", [" " + answer for answer in row[1:5]],
                               "ABCD".index(row[5]))
        except (tarfile.TarError, UnicodeDecodeError) as error:
            raise Problem(f"'{path}' is damaged: {error}", "remove it and run again") from error


READERS = {"hellaswag": hellaswag, "mmlu": mmlu}


# ---- files ----

def encode(tool, prefix, texts):
    """The tokens of each text, by the tokenize tool: one document each."""
    run_tool(tool, prefix, ["--val-tokens", 0], (text + b"\0" for text in texts))
    tokens = array.array("H")
    with open(prefix + "_train.bin", "rb") as f:
        f.seek(HEADER_BYTES)
        tokens.frombytes(f.read())
    os.unlink(prefix + "_train.bin")
    encoded = []
    for token in tokens:
        if token == EOT:
            encoded.append([])
        else:
            encoded[-1].append(token)
    if len(encoded) != len(texts):
        raise Problem(f"{len(texts)} texts became {len(encoded)}: one of them is empty")
    return encoded


def example(index, label, parts):
    words = [START, 0, index, label, len(parts) - 1]
    for tokens in parts:
        words += [len(tokens), *tokens]
    words[1] = 2 * len(words)
    if words[1] > 65535 or index > 65535:
        raise Problem(f"question {index} has {words[1]} bytes: the format ends at 65535 of either")
    return struct.pack(f"<{len(words)}H", *words)


def write_choices(name, source, path, tool, prefix):
    """Returns how many questions the file has."""
    rows = [(context.replace("\0", ""), [c.replace("\0", "") for c in completions], label)
            for context, completions, label in READERS[name](source)]
    if not rows:
        raise Problem(f"'{source}' has no questions of {name}", "remove it and run again")
    texts = [text.encode("utf-8", "replace") for context, completions, _ in rows
             for text in (context, *completions)]
    encoded = iter(encode(tool, prefix, texts))
    examples = []
    for index, (_, completions, label) in enumerate(rows):
        if not 0 <= label < len(completions):
            raise Problem(f"'{source}': question {index} has the answer {label} of {len(completions)}")
        examples.append(example(index, label, [next(encoded) for _ in range(1 + len(completions))]))
    header = struct.pack("<256i", MAGIC, VERSION, len(examples), max(map(len, examples)), GPT2,
                         *[0] * 251)
    replace_file(path, [header, *examples])
    return len(examples)
