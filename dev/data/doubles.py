"""Documents that a set has already, word for word: training must hold none that is in validation, too. They
are known by a hash. A file beside the set's work has those of finished sources, for a run that goes on.
"""
import hashlib
import os
import sqlite3
import tempfile

from documents import BLOCK
from fetch import Problem

IN_MEMORY = 64 << 20        # of a document; a longer one waits on the disk for its end


class Known:
    """source: the number of the one that comes; before: how many documents those before it have. doubles: how
    many of its documents were left out."""

    def __init__(self, path, source, before):
        self.path, self.source, self.doubles = path, source, 0
        self.db = sqlite3.connect(path)
        self.db.execute("CREATE TABLE IF NOT EXISTS known (hash BLOB PRIMARY KEY, source) WITHOUT ROWID")
        self.db.execute("DELETE FROM known WHERE source >= ?", [source])    # dataset.json did not count it
        if self.count() != before:
            raise Problem(f"'{path}' has {self.count()} of {before} documents", "--restart begins anew")

    def save(self):
        self.db.commit()
        self.db.close()

    def count(self):
        return self.db.execute("SELECT COUNT(*) FROM known").fetchone()[0]

    def is_new(self, digest):
        found = self.db.execute("INSERT OR IGNORE INTO known VALUES (?, ?)", [digest, self.source])
        self.doubles += not found.rowcount
        return found.rowcount

    def first_ones(self, texts, one_each):
        """What documents.Reader yields, without later copies and empty documents. one_each: a text is one
        document, whatever bytes 0 it has."""
        with tempfile.SpooledTemporaryFile(IN_MEMORY, dir=os.path.dirname(self.path)) as document:
            hashed = hashlib.blake2b(digest_size=16)
            for text in texts:
                begin = 0
                while begin < len(text):
                    end = len(text) if one_each else text.find(b"\0", begin) + 1 or len(text)
                    document.write(text[begin:end])
                    hashed.update(text[begin:end])
                    begin = end
                    if text[end - 1] == 0:
                        if document.tell() > 1 and self.is_new(hashed.digest()):
                            document.seek(0)
                            yield from iter(lambda: document.read(BLOCK), b"")
                        document.seek(0)
                        document.truncate()
                        hashed = hashlib.blake2b(digest_size=16)
