"""What tools write: files that appear whole or not at all, and words on a terminal. Standard library only.

    with whole_file("model.gguf") as f:         # nothing has this name, or a regular file
        f.write(data)
    guard_terminals()           # a program's first line: a pipe or a file gets what is printed as it is
    print(shown(name))          # its control characters as \\x1b and so on
"""
import contextlib
import errno
import fcntl
import os
import re
import stat
import sys

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")      # and what is no UTF-8 in a file's name


@contextlib.contextmanager
def whole_file(path):
    """As in llmc/atomic_files.h: PATH.PID.0.part, new and locked, gets the name when it is whole. A device, a
    pipe or a link that has the name stays: behind it there may be anything."""
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError(errno.EEXIST, "an output must be a regular file or new, and this is neither", path)
    remove_stale(path)
    part = f"{path}.{os.getpid()}.0.part"
    with open(part, "xb") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX)
            yield f
            f.flush()
            os.fsync(f.fileno())
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise


def remove_stale(path):
    """Removes what programs that were killed have left: nobody holds its lock."""
    folder, name = os.path.split(path)
    with contextlib.suppress(PermissionError):          # a folder that cannot be listed keeps it
        for found in os.listdir(folder or os.curdir):
            if re.fullmatch(re.escape(name) + r"\.\d+\.\d+\.part", found):
                part, how = os.path.join(folder, found), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
                with contextlib.suppress(OSError), open(os.open(part, how), "rb") as f:
                    fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(part)


def shown(text, kept=""):
    return CONTROL.sub(
        lambda found: found[0] if found[0] in kept else found[0].encode("unicode_escape").decode(), text)


class Terminal:
    """In the place of sys.stdout or sys.stderr: a terminal obeys an escape character in a file's name or in
    other people's text. It has no fileno, so argparse colours nothing."""

    def __init__(self, stream):
        self.stream, self.flush, self.isatty = stream, stream.flush, stream.isatty

    def write(self, text):
        return self.stream.write(shown(text, "\t\n"))


def guard_terminals():
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w", encoding="utf-8")     # it began closed
        stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, Terminal(stream) if stream.isatty() else stream)
