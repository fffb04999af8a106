#!/usr/bin/env python3
"""Writes llmc/data/unicode_tables.h: which code points are letters, numbers and white space.

GPT-2 cuts text with a regular expression that asks for \\p{L}, \\p{N} and \\s, so the table must be of the
Unicode version of the regex engine we want to agree with. tiktoken 0.12 and 0.14 answer from Unicode 16.0.0.
This script takes the general categories from Python's own unicodedata where that is 16.0.0 (Python 3.14),
else from `pip install unicodedata2==16.0.0`.

    python3 dev/data/gen_unicode_tables.py            # writes llmc/data/unicode_tables.h

dev/test/test_tiktoken.py compares every code point with tiktoken.
"""
import os
import sys
import textwrap

UNICODE_VERSION = "16.0.0"
HEADER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "llmc", "data",
                      "unicode_tables.h")
SPACES = [range(0x09, 0x0E), range(0x20, 0x21), range(0x85, 0x86), range(0xA0, 0xA1), range(0x1680, 0x1681),
          range(0x2000, 0x200B), range(0x2028, 0x202A), range(0x202F, 0x2030), range(0x205F, 0x2060),
          range(0x3000, 0x3001)]    # the property White_Space: no Python module has it; unchanged since 6.3
OTHER, LETTER, NUMBER, SPACE = range(4)
TABLES = {LETTER: "kLetters", NUMBER: "kNumbers", SPACE: "kSpaces"}
TOP = """/*
Character classes of Unicode {version} as ranges of code points; what is in no range is CHAR_OTHER.
Made by dev/data/gen_unicode_tables.py: edit that, not this.

A range is two numbers in hexadecimal, both of them in it, or one: 41-5A AA. See tokenizer_build.
*/
#pragma once

// \\p{{L}}, \\p{{N}}, \\s of regular expressions, and the rest
enum CharClass {{ CHAR_OTHER = 0, CHAR_LETTER = 1, CHAR_NUMBER = 2, CHAR_SPACE = 3 }};
"""


def database():
    """The module whose categories are of UNICODE_VERSION."""
    import unicodedata
    if unicodedata.unidata_version == UNICODE_VERSION:
        return unicodedata
    try:
        import unicodedata2
    except ImportError:
        unicodedata2 = None
    if unicodedata2 is None or unicodedata2.unidata_version != UNICODE_VERSION:
        sys.exit(f"error: this needs Unicode {UNICODE_VERSION}, Python has {unicodedata.unidata_version}\n"
                 f"hint: pip install unicodedata2=={UNICODE_VERSION}")
    return unicodedata2


def classes_from_database(db):
    kinds = bytearray(0x110000)
    for cp in range(0x110000):
        kinds[cp] = {"L": LETTER, "N": NUMBER}.get(db.category(chr(cp))[0], OTHER)
    for run in SPACES:
        for cp in run:
            kinds[cp] = SPACE
    return kinds


def header_text(kinds):
    ranges, first = {kind: [] for kind in TABLES}, 0
    for cp in range(1, 0x110001):
        if cp == 0x110000 or kinds[cp] != kinds[first]:
            if kinds[first] != OTHER:
                ranges[kinds[first]].append(f"{first:X}" if first == cp - 1 else f"{first:X}-{cp - 1:X}")
            first = cp
    text = TOP.format(version=UNICODE_VERSION)
    for kind, table in TABLES.items():
        lines = textwrap.fill(" ".join(ranges[kind]) + ')";', 110, initial_indent="    ",
                              subsequent_indent="    ", break_on_hyphens=False)
        text += f'\nstatic const char {table}[] = R"(\n{lines}\n'
    return text


if __name__ == "__main__":
    made = header_text(classes_from_database(database()))
    with open(HEADER, "w") as f:
        f.write(made)
    print(f"wrote {os.path.normpath(HEADER)}")
