"""Documents that a set has already, word for word: training must hold none that is in validation, too. They
are known by a hash. A file beside the set's work has those of finished sources, for a run that goes on.
"""
import hashlib
import os
import re
import sqlite3
import tempfile

from documents import BLOCK
from fetch import Problem

IN_MEMORY = 64 << 20        # of a document; a longer one waits on the disk for its end


class Known:
    """source: the number of the one that comes; before: how many documents those before it have. documents:
    of all; doubles: how many of its documents were left out."""

    def __init__(self, path, source, before):
        self.path, self.source, self.documents, self.doubles = path, source, before, 0
        self.db = sqlite3.connect(path)
        self.execute("CREATE TABLE IF NOT EXISTS known (hash BLOB PRIMARY KEY, source) WITHOUT ROWID")
        self.execute("DELETE FROM known WHERE source >= ?", [source])    # dataset.json did not count it
        count, = self.execute("SELECT COUNT(*) FROM known").fetchone()
        if count != before:
            raise Problem(f"'{path}' has {count} of {before} documents", "--restart begins anew")

    def execute(self, *statement):
        try:
            return self.db.execute(*statement)
        except sqlite3.Error as error:
            raise Problem(f"cannot use '{self.path}': {error}",
                          "free some space; or --restart begins anew") from error

    def save(self):
        self.execute("COMMIT")
        self.db.close()

    def is_new(self, digest):
        new = self.execute("INSERT OR IGNORE INTO known VALUES (?, ?)", [digest, self.source]).rowcount
        self.documents += new
        self.doubles += not new
        return new

    def first_ones(self, texts):
        """What documents.Reader yields, without later copies and empty documents."""
        with tempfile.SpooledTemporaryFile(IN_MEMORY, dir=os.path.dirname(self.path)) as document:
            hashed = hashlib.blake2b(digest_size=16)
            for text in texts:
                for part in re.findall(rb"[^\0]*\0|[^\0]+", text):
                    document.write(part)
                    hashed.update(part)
                    if part.endswith(b"\0"):
                        if document.tell() > 1 and self.is_new(hashed.digest()):
                            document.seek(0)
                            yield from iter(lambda: document.read(BLOCK), b"")
                        document.seek(0)
                        document.truncate()
                        hashed = hashlib.blake2b(digest_size=16)
