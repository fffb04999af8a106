"""dev/bench/ladder.py: which settings end at a lower loss, on a tiny model.

    pytest dev/test/test_ladder.py
"""
import glob
import json
import math
import os
import shlex
import sys

import pytest

from checks import ROOT, read, write
from trainer import ALONE, Program, run_ok, sentences, write_shard

sys.path.insert(0, os.path.join(ROOT, "dev/bench"))
import ladder                                       # noqa: E402

pytestmark = pytest.mark.cpu_only
TABLE = """
want: gap 0.05                              # what is asked for
all: -e L1,NH1,C16,T16,V256 -b 2 -x 4 -v 2 -m 2 -l 1e-2
adamw: -c 0.1
    still: -l 0
    as it is: -u 0
muon: --optimizer muon
    refused: -l -1
"""


def climb(monkeypatch, capsys, *words):
    """(exit code, what is printed, runs in the file) of the ladder; two seeds, two runs at a time."""
    monkeypatch.setattr(sys, "argv", shlex.split(
        f"ladder table.txt --data d --results runs.jsonl --program {Program.path} --seeds 2 --jobs 2")
        + list(words))
    with pytest.raises(SystemExit) as end:
        ladder.main()
    lines = read("runs.jsonl").decode().splitlines() if os.path.exists("runs.jsonl") else []
    return end.value.code, capsys.readouterr().out, [json.loads(line) for line in lines]


@pytest.fixture
def table(own_folder):
    write("table.txt", TABLE)
    for i, part in enumerate(("train", "val")):
        write_shard(f"d_{part}_000000.bin", sentences(i, 400))


def test_table():
    want, settings = ladder.read_table(TABLE)
    assert want == ("gap", 0.05)
    assert [(s.base, s.name) for s in settings] == [
        ("adamw", "adamw"), ("adamw", "still"), ("adamw", "as it is"), ("muon", "muon"), ("muon", "refused")]
    assert settings[1].flags == {**settings[0].flags, "-l": "0"} and settings[0].flags["-l"] == "1e-2"
    for broken in ("  below: -l 1", "no colon", "all: -l"):
        with pytest.raises(SystemExit, match="not '"):
            ladder.read_table(broken)


@pytest.mark.parametrize("path", glob.glob(os.path.join(ROOT, "dev/bench/*.txt")), ids=os.path.basename)
def test_flags(path):
    """The trainer takes every setting of a table for GPUs."""
    for setting in ladder.read_table(read(path).decode())[1]:
        run_ok({**ALONE, **setting.flags, "--plan": "H200"})


def test_ladder(table, monkeypatch, capsys):
    """Pairs are of one seed; a run that is there is not repeated, and one that fails is not kept."""
    code, out, runs = climb(monkeypatch, capsys)
    assert (code, len(runs), out.count("failed: error: ")) == (1, 8, 2)
    assert all(len(run["losses"]) == 4 and [at for at, _ in run["vals"]] == [0, 2, 4] for run in runs)
    assert all(run["train"] == pytest.approx(sum(run["losses"]) / 4) for run in runs)
    assert len({run["losses"][0] for run in runs}) == 2, "the seeds' first losses"
    rows = {row.split(" | ")[0].strip("| "): row.strip("| ").split(" | ") for row in out.splitlines()
            if row.startswith("| ")}
    assert list(rows) == ["setting", "adamw", "still", "as it is", "muon"]
    assert rows["as it is"][1:5] == ["2", rows["adamw"][2], "+0.0000 ± 0.0000", "+0.0000 ± 0.0000"]
    assert rows["as it is"][7] == "stays" and rows["muon"][-1] == "base"
    assert float(rows["still"][3].split()[0]) < 0 and rows["still"][5] == "nan (0 of 2)"
    write("ends_early", f"#!/bin/sh\n{Program.path} \"$@\" | grep -v '^step 4/4'\n")
    code, out_early, runs_early = climb(monkeypatch, capsys, "--program", "./ends_early", "--seeds", "3")
    assert (code, runs_early, out_early.count("it was broken off")) == (1, runs, 4)
    write("skips", f"#!/bin/sh\necho 'step 2: x: update skipped' >&2\n{Program.path} \"$@\"\n")
    code, out_skips, skips = climb(monkeypatch, capsys, "--program", "./skips", "--results", "skips.jsonl")
    assert code == 1 and out_skips.count(", 1 updates skipped\n") == 8 and not any(r["skipped"] for r in runs)
    assert climb(monkeypatch, capsys, "--flags", "-v 0")[1].count("failed: it validates nothing") == 8
    again, out_again, runs_again = climb(monkeypatch, capsys)
    assert again == 1 and runs_again == runs and out_again.endswith(out[out.index("| setting"):])
    write("runs.jsonl", read("runs.jsonl") + b'{"flags": "-b')
    with pytest.raises(SystemExit, match="runs.jsonl line 9 is no run"):
        ladder.main()


def test_fewer_runs(table, monkeypatch, capsys):
    """--first leaves out a hopeless setting's further seeds, --minutes what would not end in time."""
    write("table.txt", TABLE.replace("refused: -l -1", "as it is, too: -u 0"))
    assert climb(monkeypatch, capsys, "--minutes", "0")[2] == []
    code, _, runs = climb(monkeypatch, capsys, "--first", "0")
    still = [run["flags"].split()[-3] for run in runs if "-l 0 " in run["flags"]]
    assert (code, len(runs), still) == (0, 9, ["1337"])


def test_numbers():
    run = {"vals": [(0, 5.0), (2, 3.0), (4, 2.5)], "ms": [1000, 500, 250, 250]}
    assert [ladder.reached(run, loss) for loss in (2.0, 2.5, 3.5)] == [None, (4, 2.0), (2, 1.5)]
    assert ladder.standard_error([1.0, 3.0]) == 1.0 and ladder.standard_error([1.0]) == math.inf
    gains, losses = [0.02, 0.04], [-0.002, -0.004]      # 0.03 ± 0.01, -0.003 ± 0.001
    assert [ladder.verdict(("gain", x), gains) for x in (0.009, 0.011, 0.051)] == ["stays", "open", "goes"]
    assert [ladder.verdict(("gap", x), losses) for x in (0.0051, 0.0049, 0.0009)] == ["stays", "open", "goes"]
    assert ladder.verdict(("gain", 0.0), [1.0]) == "open"
