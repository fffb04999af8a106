"""Names of files and other people's text are printed by these programs, and a terminal obeys what is in them:
an escape character begins commands that move the cursor, colour, or change the window's title.

    guard_terminals()           # a program's first line: a pipe or a file gets what is printed as it is
"""
import re
import sys

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")     # all but tab and line feed


class Terminal:
    """In the place of sys.stdout or sys.stderr. It has no fileno, so argparse colours nothing."""

    def __init__(self, stream):
        self.stream, self.flush, self.isatty = stream, stream.flush, stream.isatty

    def write(self, text):
        return self.stream.write(CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text))


def guard_terminals():
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        stream.reconfigure(errors="backslashreplace")       # a file's name may have bytes that are no UTF-8
        if stream.isatty():
            setattr(sys, name, Terminal(stream))
