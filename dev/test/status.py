#!/usr/bin/env python3
"""What ran on GPUs, as one table: suites of gpu-results.txt, and by-hand.txt for the rest.

    python3 dev/test/status.py              # the table; CURRENT or STALE: did the suites run today's sources?
    python3 dev/test/status.py --write      # puts the table into docs/performance.md

The table on the page depends on these two files alone: a change of the sources changes no page. A test in
test_harness.py compares the two.
"""
import os
import re
import sys

import gpus
from checks import ROOT, read, write

PAGE = os.path.join(ROOT, "docs/performance.md")
BY_HAND = os.path.join(ROOT, "dev/test/by-hand.txt")
BEGIN, END = "<!-- dev/test/status.py writes this table -->\n", "<!-- its end -->\n"


def suites(fields):
    """{suite: ["BF16 5/0/1", ...]}: passed, failed, skipped."""
    rows = {}
    for name, counts in gpus.suite_rows(fields).items():
        if found := re.fullmatch(r"(.*) (BF16|FP16|FP32)(.*)", name):
            rows.setdefault(found[1] + found[3], []).append(f"{found[2]} {'/'.join(map(str, counts))}")
    return rows


def table(results=gpus.RESULTS, by_hand=BY_HAND):
    fields = gpus.read_results(results)
    rows = [("what", "result, of suites passed/failed/skipped", "date", "GPUs", "command"), ["---"] * 5]
    rows += [(suite, ", ".join(sorted(counts)), fields["date"], fields["gpu"].removeprefix("NVIDIA "),
              "`make test-gpu`") for suite, counts in sorted(suites(fields).items())]
    for line in read(by_hand).decode().splitlines()[1:]:
        *words, command = line.split(" | ")
        rows.append((*words, f"`{command}`"))
    said = f"The suites ran CUDA sources of the hash {fields.get('sha256', 'none')[:12]}.\n\n"
    return said + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def with_table(text, new):
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    return before + begin + new + end + after


def write_page():
    write(PAGE, with_table(read(PAGE).decode(), table()))


def main():
    if "--write" in sys.argv:
        write_page()
        return
    current = gpus.read_results().get("sha256") == gpus.cuda_hash()
    print(table() + ("CURRENT" if current else "STALE: the CUDA sources have changed since"))


if __name__ == "__main__":
    main()
