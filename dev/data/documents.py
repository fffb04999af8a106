"""Documents out of text, JSONL and parquet files, as the tokenize tool's pipe wants them: a byte 0 ends each.

In a text file a line <|endoftext|> ends a document, and so does its end. The others hold one document a row.
"""
import bz2
import codecs
import contextlib
import gzip
import json
import lzma
import os
import zlib

from fetch import Problem

KINDS = {".txt": "text", ".text": "text", ".md": "text", ".rst": "text",
         ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
SEPARATORS = (b"<|endoftext|>\n", b"<|endoftext|>\r\n", b"<|endoftext|>")
OPENERS = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}


def kind_of(path):
    """"text", "jsonl", "parquet" or "" for a name that says nothing"""
    base, ending = os.path.splitext(path.lower())
    return KINDS.get(os.path.splitext(base)[1] if ending in OPENERS else ending, "")


def open_any(path):
    return OPENERS.get(os.path.splitext(path.lower())[1], open)(path, "rb")


@contextlib.contextmanager
def reading(path):
    """What can be wrong with a file, in one sentence."""
    try:
        yield
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise Problem(f"'{path}' is damaged: {error}", "fetch it again") from error
    except OSError as error:
        raise Problem(f"cannot read '{path}': {error.strerror or error}", "is the file whole?") from error


def jsonl_rows(path, field):
    with open_any(path) as f:
        for number, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise Problem(f"'{path}' line {number} is no JSON: {error}",
                              "one object a line; is the file whole?") from error
            if not isinstance(row, (dict, str)):
                raise Problem(f"'{path}' line {number} is neither an object nor a text")
            if isinstance(row, dict) and field not in row:
                raise Problem(f"'{path}' line {number} has no '{field}', but {', '.join(map(repr, row))}",
                              "--text-field NAME says where the text is")
            yield number, row if isinstance(row, str) else row[field]


def parquet_rows(path, field):
    import pyarrow
    import pyarrow.parquet as parquet
    try:
        with parquet.ParquetFile(path) as f:
            if field not in f.schema_arrow.names:
                raise Problem(f"'{path}' has no column '{field}', but "
                              f"{', '.join(map(repr, f.schema_arrow.names))}",
                              "--text-field NAME says where the text is")
            number = 0
            for batch in f.iter_batches(batch_size=1024, columns=[field]):
                for text in batch.column(0).to_pylist():
                    number += 1
                    yield number, text
    except pyarrow.ArrowException as error:
        raise Problem(f"'{path}' is no whole parquet file: {str(error).splitlines()[0]}",
                      "fetch it again") from error


def rows(path, field):
    """The texts of a JSONL or parquet file as bytes. A byte 0, which would end a document, is left out."""
    for number, text in (parquet_rows if kind_of(path) == "parquet" else jsonl_rows)(path, field):
        if isinstance(text, str):
            yield text.encode("utf-8", "replace").replace(b"\0", b"") + b"\0"
        elif text is not None:
            raise Problem(f"'{path}' row {number}: '{field}' is no text, but {type(text).__name__}",
                          "--text-field NAME says where the text is")


def lines(path):
    """Of a text file, many at a time."""
    with open_any(path) as f:       # of UTF-16, half the bytes would end documents
        if f.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise Problem(f"'{path}' is UTF-16", "iconv -f UTF-16 -t UTF-8 OLD > NEW converts it")
        while some := f.readlines(1 << 20):
            yield b"".join(b"\0" if line in SEPARATORS else line for line in some)
    yield b"\0"


def texts(paths, field):
    """All documents of these files."""
    for path in paths:
        with reading(path):
            yield from rows(path, field) if kind_of(path) in ("jsonl", "parquet") else lines(path)
