"""Names of files and other people's text are printed by these programs, and a terminal obeys what is in them:
an escape character begins commands that move the cursor, colour, or change the window's title.

    guard_terminals()           # a program's first line: a pipe or a file gets what is printed as it is
    print(shown(name))          # its control characters as \\x1b and so on
"""
import os
import re
import sys


CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")      # and what is no UTF-8 in a file's name


def shown(text, kept=""):
    return CONTROL.sub(
        lambda found: found[0] if found[0] in kept else found[0].encode("unicode_escape").decode(), text)


class Terminal:
    """In the place of sys.stdout or sys.stderr. It has no fileno, so argparse colours nothing."""

    def __init__(self, stream):
        self.stream, self.flush, self.isatty = stream, stream.flush, stream.isatty

    def write(self, text):
        return self.stream.write(shown(text, "\t\n"))


def guard_terminals():
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w", encoding="utf-8")     # it began closed
        stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, Terminal(stream) if stream.isatty() else stream)
