"""Documents out of text, JSON, parquet, CSV and TSV files, as the tokenize tool's pipe wants them: a
byte 0 ends each.

In a text file a line <|endoftext|> ends a document, and so does its end. The others hold one document a row.
A file's first bytes say whether it is packed, parquet or JSON rows; its name may also say JSON. A table, CSV
or TSV, is one by its name alone.
"""
import bz2
import codecs
import contextlib
import csv
import gzip
import io
import itertools
import json
import lzma
import os
import re
import stat
import sys
import zlib

from fetch import Problem, all_of, need

KINDS = {".txt": "text", ".text": "text", ".md": "text", ".rst": "text", ".parquet": "parquet",
         ".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "table", ".tsv": "table"}
PACKED = (".gz", ".xz", ".bz2", ".zst")
PARQUET = b"PAR1"
JSON_ROWS = re.compile(r'\s*(?:\{[ \t]*|\[\s*\{\s*)"(?:[^"\\\n]|\\.)*"\s*:')      # lines, or one list of them
JSON_LIST = re.compile(r'\s*\[\s*[{"]')          # in a .json; a text may begin like this
SEPARATOR = re.compile(r"<\|endoftext\|>(?<=^.{13})(?:\r?\n|\Z)", re.M)
NO_TEXT = [(codecs.BOM_UTF32_LE, "UTF-32", "--encoding utf-32 converts it"),     # the next begins like this
           (codecs.BOM_UTF16_LE, "UTF-16", "--encoding utf-16 converts it"),
           (codecs.BOM_UTF16_BE, "UTF-16", "--encoding utf-16 converts it"),
           (b"PK\3\4", "a zip archive", "unpack it"), (b"%PDF-", "a PDF", "pdftotext makes text of it"),
           (PARQUET, "packed parquet", "unpack it"),
           (b"ARROW1", "an Arrow file", "pyarrow makes parquet or JSON lines of it")]
REPLACE = "--errors replace takes U+FFFD for such bytes and counts them"
AS_TEXT = "build/tokenize - < FILE takes a file as it is, JSON or not"
CURE = "--encoding NAME converts, for instance utf-16-le or cp1252; " + REPLACE
BLOCK = 1 << 20


def ending(path):
    """Of what is packed, the inner one."""
    base, end = os.path.splitext(path.lower())
    return os.path.splitext(base)[1] if end in PACKED else end


def kind_of(path):
    """"text", "json", "parquet", "table" or "" for a name that says nothing"""
    return KINDS.get(ending(path), "")


def need_pyarrow():
    need("pyarrow.parquet", "parquet and zstd files cannot be read", "pyarrow")


def first_line(error):
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


@contextlib.contextmanager
def reading(path):
    """What can be wrong with a file, in one sentence, foreseen here or not."""
    try:
        yield
    except Problem:
        raise
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise Problem(f"'{path}' is damaged: {error}", "fetch it again") from error
    except OSError as error:
        if "too much memory for decoding" in str(error):        # pyarrow, of zstd
            raise Problem(f"'{path}' was packed with a longer window than 128 MiB",
                          "zstd -dc --long=31 FILE unpacks it") from error
        raise Problem(f"cannot read '{path}': {error.strerror or error}", "is the file whole?") from error
    except MemoryError as error:
        raise Problem(f"cannot read '{path}': there is no memory for a row, or a line, of it",
                      "split its longest rows") from error
    except Exception as error:
        raise Problem(f"cannot read '{path}': {first_line(error)}", "is the file whole?") from error


def exists(path):
    """os.path.exists also says no where it may not look."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise Problem(f"cannot look at '{path}': {error.strerror}", "who may read its folder?") from error
    return True


def size_of(path):
    """Of a file or a link to one: a pipe or a device might be read for ever."""
    if os.path.islink(path) and not exists(path):
        raise Problem(f"'{path}' is a link to nothing")
    with reading(path):
        found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        kinds = {stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket", stat.S_IFDIR: "folder"}
        what = kinds.get(stat.S_IFMT(found.st_mode), "device")
        raise Problem(f"cannot read '{path}': it is a {what}, not a regular file", "put its text into a file")
    return found.st_size


def first_bytes(path):
    with open(path, "rb") as f:
        return f.read(6)


def streams(f, decoder):
    """What streams of xz or bzip2 hold that follow each other. Python's own readers take xz's padding, and
    damage where a later stream begins, for the file's end."""
    packed = f.read(BLOCK)
    while packed:
        stream = decoder()
        while not stream.eof:
            if not packed and stream.needs_input:
                raise EOFError("it ends within a stream")
            yield stream.decompress(packed, BLOCK)
            packed = f.read(BLOCK) if stream.needs_input and not stream.eof else b""
        packed = stream.unused_data or f.read(BLOCK)
        while decoder is lzma.LZMADecompressor and packed.startswith(bytes(4)):     # padding
            zeros = len(packed) - len(packed.lstrip(b"\0"))
            packed = packed[zeros - zeros % 4:] or f.read(BLOCK)


def unpacked(path):
    """A file's bytes, a BLOCK or more at a time, the last ones fewer."""
    head, block = first_bytes(path), bytearray()
    with open(path, "rb") as f:
        reader = f
        if head.startswith(b"\x1f\x8b"):
            reader = gzip.open(f)
        elif head.startswith(b"\x28\xb5\x2f\xfd") or head[1:4] == b"\x2a\x4d\x18":    # the second: pzstd's
            need_pyarrow()
            import pyarrow
            reader = pyarrow.CompressedInputStream(f, "zstd")
        parts = iter(lambda: reader.read(BLOCK), b"")
        if head.startswith(b"\xfd7zXZ\0"):
            parts = streams(f, lzma.LZMADecompressor)
        elif re.match(rb"BZh[1-9](1A|\x17r)", head):            # the second begins an empty stream
            parts = streams(f, bz2.BZ2Decompressor)
        for part in parts:
            block += part
            if len(block) >= BLOCK:
                yield bytes(block)
                block.clear()
    if block:
        yield bytes(block)


def parse(text, where):
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Problem(f"{where} is no JSON: {error}",
                      "one object a line, or one list of them; is the file whole?") from error


def is_conversation(line):
    """A line that is a list of messages, as nanochat writes conversations."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(row, list) and row != [] and all(
        isinstance(m, dict) and ("role" in m or {"from", "value"} <= {*m}) for m in row)


def json_rows(path, pieces):
    """(where, row) of each line that is not empty, or of each item of a file that is one list"""
    first = next(pieces, "")
    pieces = itertools.chain([first], pieces)
    if first.lstrip().startswith("[") and not is_conversation(first.lstrip().split("\n", 1)[0]):
        for number, row in enumerate(parse("".join(pieces), f"'{path}'"), 1):
            yield f"'{path}' row {number}", row
        return
    lines = (line for piece in pieces for line in piece.removesuffix("\n").split("\n"))
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"'{path}' line {number}"
            yield where, parse(line, where)


class Reader:
    """How texts are read. field: where rows have theirs, None: not said, "text" but of no table; encoding: of
    texts, JSON and tables; errors: "replace" makes U+FFFD of each byte that the encoding does not allow, and
    counts it, "strict" refuses the file."""

    rows, no_field = (str,), "--text-field NAME says where the text is"     # rows: of files without fields

    def __init__(self, field=None, encoding="utf-8", errors="strict"):
        self.field, self.field_said, self.encoding, self.replaced = field or "text", bool(field), encoding, 0
        self.errors = f"count{id(self)}" if errors == "replace" else "strict"
        codecs.register_error(f"count{id(self)}", self.replace)     # all readers share these names

    def replace(self, error):
        self.replaced += error.end - error.start
        mark = "\ufffd" if isinstance(error, UnicodeDecodeError) else "\ufffd".encode()
        return mark * (error.end - error.start), error.end

    def encoding_of(self, path, begin):
        """Of the text that begins so; what is no text at all is refused by its name."""
        if begin[257:262] == b"ustar":
            raise Problem(f"'{path}' is a tar archive", "unpack it")
        for known, what, hint in NO_TEXT:
            if begin.startswith(known) and (what[:3] != "UTF" or self.encoding == "utf-8"):
                raise Problem(f"'{path}' is {what}", hint)
        return "utf-8" if begin.startswith(codecs.BOM_UTF8) else self.encoding

    def pieces(self, path):
        """A file's text, many whole lines at a time."""
        at, kept, decoder = 0, [], None
        for block in itertools.chain(unpacked(path), [b""]):
            if not decoder:
                encoding = self.encoding_of(path, block)
                decoder = codecs.getincrementaldecoder(encoding)(self.errors)
            try:
                text = decoder.decode(block, not block)
            except UnicodeDecodeError as error:
                number = at + len(block) - len(error.object) + error.start
                raise Problem(f"'{path}' is not {encoding.upper()}: byte {number} is "
                              f"0x{error.object[error.start]:02x}", CURE) from error
            if "\0" in text:            # it would end a document; UTF-16 looks like UTF-8 with bytes 0
                if self.errors == "strict":
                    where = f"byte {at + block.find(0)} is 0" if encoding == "utf-8" else "it holds a NUL"
                    raise Problem(f"'{path}' is no text in {encoding.upper()}: {where}", CURE)
                self.replaced += text.count("\0")
                text = text.replace("\0", "\ufffd")
            text = text if at else text.removeprefix("\ufeff")      # a byte order mark
            at += len(block)
            cut = text.rfind("\n") + 1 if len(block) >= BLOCK else 0        # a small file is one piece
            if cut:
                yield "".join(kept) + text[:cut]
                kept = []
            kept.append(text[cut:])
        if last := "".join(kept):
            yield last

    def columns(self, where, names):
        """Which of a row's fields text_of() reads, out of those that it has."""
        if self.field not in names:
            raise Problem(f"{where} has no '{self.field}', but {', '.join(map(repr, names))}", self.no_field)
        return [self.field]

    def text_of(self, row):
        return row[self.field]

    def row_texts(self, path, pieces):
        for where, row in json_rows(path, pieces):
            if not isinstance(row, (dict, *self.rows)):
                raise Problem(f"{where} is neither an object nor a text")
            if isinstance(row, dict):
                self.columns(where, row)
                row = self.text_of(row)
            yield where, row

    def table_texts(self, path, pieces):
        lines = (line for piece in pieces for line in io.StringIO(piece, newline="\n"))
        csv.field_size_limit(sys.maxsize)
        rows = csv.reader(lines, delimiter="\t" if ending(path) == ".tsv" else ",", strict=True)
        quotes = "a text with quotes, separators or line ends has quotes around it, and its own ones twice"
        try:
            names = next(rows, [])
            if names and not self.field_said:
                raise Problem(f"'{path}' is a table, with the columns {', '.join(map(repr, names))}",
                              "--text-field NAME says which of them is the text")
            if names:
                self.columns(f"'{path}'", names)
            for number, values in enumerate(filter(None, rows), 1):
                where = f"'{path}' row {number}"
                if len(values) != len(names):
                    raise Problem(f"{where} has {len(values)} columns, and its table {len(names)}", quotes)
                yield where, self.text_of(dict(zip(names, values)))
        except csv.Error as error:
            raise Problem(f"'{path}' line {rows.line_num} is no row of a table: {error}", quotes) from error

    def parquet_texts(self, path):
        need_pyarrow()
        import pyarrow
        import pyarrow.parquet as parquet
        number = 0
        try:
            # by pages: a group of rows may be larger than memory
            with parquet.ParquetFile(path, buffer_size=BLOCK, pre_buffer=False) as f:
                for batch in f.iter_batches(1024, columns=self.columns(f"'{path}'", f.schema_arrow.names)):
                    texts = [field.name for field in batch.schema
                             if field.type in (pyarrow.string(), pyarrow.large_string())]
                    columns = [(column.cast("large_binary") if name in texts else column).to_pylist()
                               for name, column in zip(batch.schema.names, batch.columns)]
                    for values in zip(*columns):
                        number += 1
                        row = dict(zip(batch.schema.names, values))
                        for name in texts:
                            if row[name] is not None:
                                row[name] = row[name].decode("utf-8", self.errors)
                        yield f"'{path}' row {number}", self.text_of(row)
        except MemoryError:                     # pyarrow's is both
            raise
        except pyarrow.ArrowException as error:
            raise Problem(f"'{path}' is no whole parquet file: {str(error).splitlines()[0]}",
                          "fetch it again") from error
        except UnicodeDecodeError as error:
            where = f"row {number}: '{name}'" if number else "a column's name"
            raise Problem(f"'{path}' {where} is not UTF-8: its byte {error.start} is "
                          f"0x{error.object[error.start]:02x}", REPLACE) from error

    def in_bytes(self, rows):
        """A byte 0 in a row's text would end the document: it is left out."""
        for where, text in rows:
            if isinstance(text, str):
                try:
                    data = text.encode("utf-8", self.errors)
                except UnicodeEncodeError as error:
                    raise Problem(f"{where}: '{self.field}' holds half a character, "
                                  f"\\u{ord(text[error.start]):04x}", REPLACE) from error
                yield data.replace(b"\0", b"") + b"\0"
            elif text is not None:
                raise Problem(f"{where}: '{self.field}' is no text, but {type(text).__name__}",
                              "--text-field NAME says where the text is")

    def documents(self, path):
        """Of one file."""
        size, kind = size_of(path), kind_of(path)
        with reading(path):
            if size == 0 and (kind == "parquet" or path.lower().endswith(PACKED)):
                raise Problem(f"'{path}' is empty", "fetch it again")
            if first_bytes(path).startswith(PARQUET):
                yield from self.in_bytes(self.parquet_texts(path))
                return
            if kind == "parquet":
                hint = "unpack it" if next(unpacked(path), b"").startswith(PARQUET) else "fetch it again"
                raise Problem(f"'{path}' is no parquet file: it does not begin with PAR1", hint)
            pieces = self.pieces(path)
            first = next(pieces, "")
            pieces = itertools.chain([first], pieces)
            if kind == "table":
                yield from self.in_bytes(self.table_texts(path, pieces))
                return
            if kind == "json" or JSON_ROWS.match(first):
                try:
                    yield from self.in_bytes(self.row_texts(path, pieces))
                except Problem as problem:
                    if kind == "json" or problem.hint in (CURE, REPLACE):
                        raise
                    raise Problem(problem.what, "; ".join(filter(None, (problem.hint, AS_TEXT)))) from problem
                return
            if str not in self.rows:
                raise Problem(f"'{path}' is text, not rows of messages", self.no_field)
            for piece in pieces:
                yield SEPARATOR.sub("\0", piece).encode()
            yield b"\0"

    def look(self, path):
        """Its size, once its beginning is known to hold texts."""
        next(self.documents(path), None)
        return size_of(path)

    def texts(self, paths):
        """All documents of these files. What is refused comes in one list: after the first such file the
        others are only checked."""
        refused = []
        for path in paths:
            try:
                for text in self.documents(path):
                    if not refused:
                        yield text
            except Problem as problem:
                refused.append(problem)
        all_of(refused)


LOOKER = Reader(errors="replace")


def looks_like_texts(path):
    """Of a file in a folder. A .json may also hold settings, and a table anything."""
    if ending(path) != ".json":
        return kind_of(path) not in ("", "table")
    try:
        with reading(path):
            size_of(path)
            first = next(LOOKER.pieces(path), "")
            return bool(JSON_ROWS.match(first) or JSON_LIST.match(first))
    except Problem:
        return True                             # Reader.look says what is wrong with it
