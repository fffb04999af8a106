"""make bench and make profile without a GPU: what they read of the programs' output, and the tables.

    pytest dev/test/test_bench.py
"""
import argparse
import glob
import itertools
import json
import os
import re
import sys

import pytest

from checks import ROOT, read, run_program, write

sys.path.insert(0, os.path.join(ROOT, "dev/bench"))
import bench                                        # noqa: E402
import muon                                         # noqa: E402
import small_card                                   # noqa: E402

PROFILED = """NVIDIA H200, d12, B=64, T=1024, BF16
step 106.000 ms, of it its matrix products alone 74.200 ms
ceilings: 655 TFLOP/s, copy 4228 GB/s
op                                   calls        ms   share    GB/s  TFLOP/s   of ceiling
matmul_forward 768x3072                 12    10.000   9.4 %     500      600       90.0 %
classifier                               1     3.500   3.3 %    3742        0       89.0 %
all                                     13    13.500  12.7 %    1000      400       90.0 %
"""


def trains(ms, more=""):
    """A program that prints steps for ever."""
    return f"#!/bin/sh\nwhile :; do echo 'step 1/9 | loss 1.0 | lr 3e-04 | norm 1.0 | {ms} ms{more}'; done\n"


def test_step_times():
    lines = ["device: H200\n", *(f"step {i}/9 | loss 1.0 | {ms} ms | 5 tok/s | MFU {i}.0% |\n"
                                 for i, ms in enumerate((900, 500, 300, 400, 350, 100)))]
    assert bench.step_times(lines, 0.75, warm=1.4) == ([300, 400, 350], 4.0)
    assert bench.step_times(["step 1 | 5.0 ms | x\n"], 1) == ([], None)


def test_ncu(monkeypatch):
    """Launches of an op together, shares weighted by time; without ncu one sentence."""
    names = ["ID", "Kernel Name", *bench.NCU_METRICS]
    rows = [names, ["", "", "ns", "%", "%"], ["0", "classifier", "1,000,000", "80", "0"],
            ["1", "matmul_forward 768x3072", "9000000", "30", "70"],
            ["2", "classifier", "3000000", "40", "4"]]
    text = "==PROF== Connected\n" + "".join(",".join(f'"{word}"' for word in row) + "\n" for row in rows)
    assert bench.ncu_rows(text) == {"classifier": [2, 4.0, 50.0, 3.0],
                                    "matmul_forward 768x3072": [1, 9.0, 30.0, 70.0]}
    _, *lines = bench.profile_table(PROFILED + text).splitlines()
    assert [line.split()[::len(line.split()) - 1] for line in lines] == [
        ["matmul_forward", "9.000"], ["classifier", "3.115"], ["all", "13.000"]]
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="^ncu gives no counters .*make bench-ops"):
        bench.profile(argparse.Namespace(flags=""))


def test_ops():
    assert bench.ceilings(PROFILED) == {"gemm_ms": 74.2, "gemm_tflops": 655, "copy_gb_s": 4228}
    floors = bench.op_floors(PROFILED)
    assert floors == {"matmul_forward 768x3072": 9.0, "classifier": pytest.approx(3.115), "all": 12.15}


def test_sizes():
    assert bench.size_of("d12:64") == ("d12", 64, 1024)
    assert bench.size_of("qwen3:0.6B:8x2048") == ("qwen3:0.6B", 8, 2048)
    for command in bench.contestants("m12:4x512", ["pytorch"], None, [], "x.bin").values():
        assert command[command.index("-t") + 1] == "512" and command[command.index("-b") + 1] == "4"
    with pytest.raises(SystemExit, match="MODEL:B"):
        bench.size_of("qwen3:0.6B")


@pytest.mark.parametrize("sizes, matrices, expected", [
    ("L=12 NH=12 C=768 T=1024 V=50257", 12 * 12 * 768**2, 12 * 60 * 768**3),
    ("llama:L12,NH6,NKV6,HS128,C768,F2048,T1024,V50257,qk_norm", 12 * (4 * 768**2 + 3 * 768 * 2048),
     12 * (24 + 3 * (4 * 2048 / 768 + 2)) * 768**3),
    ("llama:L2,NH4,NKV1,HS8,C16,F8,T64,V256,relu2", 2 * (2 * 16 * 32 + 2 * 16 * 8 + 2 * 16 * 8),
     2 * (2 * (4 * 16 * 16 * 32 + 2 * 16**3) + (2 + 2) * (4 * 8 * 8 * 16 + 2 * 8**3)))])
def test_products_of_muon(sizes, matrices, expected):
    printed = f"model: {sizes}, 9 parameters\noptimizer: Muon for {matrices} parameters, the layers'\n"
    assert muon.products(printed) == round(expected)


@pytest.mark.parametrize("command, said", [
    ("dev/bench/attention.py 1,1,1,8", "no PyTorch of 2.5"), ("dev/reference/train_gpt2.py", "no PyTorch in"),
    ("dev/bench/muon.py cost --program ./nothing", "there is no program ./nothing")])
def test_what_is_not_here(command, said):
    write("torch.py", "raise ImportError\n")
    file, *words = command.split()
    code, out, err = run_program([sys.executable, os.path.join(ROOT, file), *words], PYTHONPATH=os.getcwd())
    assert (code, out) == (1, "") and err.startswith(f"error: {said}") and "\nhint: " in err, err


def test_contestants():
    """PyTorch with one attention is one row; llm.c, which has no other shapes, takes its turn at GPT-2's."""
    who = ["pytorch:flash", "pytorch", "llm.c", "./train_gpt2cu -r 1"]
    for model, programs in (("d12", ["llm.c"]), ("m12,window=256,pattern=SSSL", [])):
        found = bench.contestants(f"{model}:4", who, "llmc", ["--kernels", "portable"], "x.bin")
        assert list(found) == ["ours", "PyTorch, flash", *bench.KINDS, *programs, who[3]]
        assert found["ours"][-2:] == ["--kernels", "portable"] and found[who[3]][1:3] == ["-r", "1"]
        assert found["PyTorch, flash"][-3:] == ["bfloat16", "--attention", "flash"]
        assert all("--attention" not in found[kind] for kind in bench.KINDS)
        assert all(command[command.index("-e") + 1] == model for command in found.values())


def test_turns(monkeypatch, capsys):
    """The whole of `make bench`, with programs that only print."""
    monkeypatch.setattr(bench, "ROOT", os.getcwd())
    monkeypatch.setattr(bench, "made_up_shard", lambda path: write(path, b""))
    used = itertools.cycle(["1024", "4096"])        # MiB, before a program and during it
    monkeypatch.setattr(bench, "smi", lambda fields: next(used) if "memory" in fields else "")
    source = {**bench.provenance(None), "PyTorch": ""}
    monkeypatch.setattr(bench, "provenance", lambda llmc: source)
    write("train_gpt2cu", trains("100.0", " | 1 tok/s | MFU 46.0% | ETA 1 s"))
    write("profile_gpt2cu", f"#!/bin/sh\ncat <<'E'\n{PROFILED}E\n")
    write("llmc", trains("110.00", " | 40.0% bf16 MFU |"))
    write("other", trains("125.0", " | 1 tok/s"))
    write("pytorch.sh", "#!/bin/sh\necho no GPU here >&2\nexit 1\n")
    monkeypatch.setenv("PATH", os.getcwd(), prepend=os.pathsep)
    bench.step(argparse.Namespace(sizes="d12:64", who="pytorch:flash, llm.c, ./other, pytorch.sh, pytorch",
                                  llmc="llmc", flags="", data="", seconds=1, turns=1, json="bench.json"))
    out = capsys.readouterr().out
    assert "PyTorch is not here" in out and "no GPU here" in out
    runs = json.loads(read("bench.json"))["sizes"]["d12:64"]["runs"]
    assert [name for name, _ in bench.in_turns({"a": 1, "b": 2, "c": 3}, 2)] == [*"abacabaca"]
    assert [run["who"] for run in runs] == ["ours", "llm.c", "ours", "./other", "ours", "pytorch.sh", "ours"]
    assert runs[5] == {"who": "pytorch.sh", "error": "no GPU here"}
    rows = bench.table(bench.merged(["bench.json"])).splitlines()
    assert rows[2] == ("| 124M, B=64 | 655K, 3.0 | 46 % | 74.2 of 100.0 ms, 74 %; 655 TFLOP/s "
                       "| 596K (1.10), 3.0 | 524K (1.25), 3.0 | - |")
    twice = bench.merged(["bench.json", "bench.json"])
    assert len(twice["sizes"]["d12:64"]["runs"]) == 14 and bench.table(twice).splitlines() == rows


def test_page():
    """Each has a place for the table."""
    assert bench.with_table("a\n<!-- make bench -->\nb\n<!-- its end -->\nc\n", "d\n") == (
        "a\n<!-- make bench -->\nd\n<!-- its end -->\nc\n")
    pages = [read(os.path.join(ROOT, page)).decode() for page in bench.PAGES]
    assert all(bench.with_table(page, "") != page for page in pages)


# ---- a smaller card ----

@pytest.mark.parametrize("said, flags", [
    ("-b 4 fits; the largest that fits is -b 6\n", []),
    ("-b 8 does not fit; the largest that fits is -b 6\n-b 8 fits with -r 1\n", ["-r", "1"]),
    ("-b 9 does not fit; the largest that fits is -b 1\n-b 2 fits with -r 1; -b 8 fits with -w 0\n", None),
    ("error: not even -b 1 fits\nhint: -b 4 fits with -r 2 -w 0\n", ["-r", "2", "-w", "0"]),
    ("error: not even -b 1 fits\nhint: choose a smaller model or -t\n", None)])
def test_advised(said, flags):
    assert small_card.advised(said) == flags


def test_small_card(monkeypatch, capsys):
    """With a program that fits with -r 2 and is then a quarter slower."""
    class Held(small_card.Held):
        def __enter__(self):
            print(f"leaves {self.left}")

        def __exit__(self, *_):
            print("all")
    monkeypatch.setattr(small_card, "Held", Held)
    monkeypatch.setattr(bench, "ROOT", os.getcwd())
    monkeypatch.setattr(bench, "WARM_S", 0.0)
    write("card", b"#!/bin/sh\nms=100\ncase \"$*\" in *--plan*) echo '-b 8 fits with -r 2'; exit;; "
                  b"*-r\\ 2*) ms=125;; esac\nwhile :; do echo \"step 1/9 | $ms ms |\"; done\n")
    os.chmod("card", 0o755)
    small_card.main(["--only", "774M", "--program", "./card", "--left", "1"])
    out = capsys.readouterr().out
    assert re.search(r"^leaves 1073741824\n774M, AdamW; -r 2; 262,144 in .*\nall$", out, re.M), out
    line = r"^\| 774M, AdamW \| `-e d36 -b 8 -r 2` \| 262,144 in \S+ GiB \| 0.80 \| 262,144 in .* \| 327,680"
    assert re.search(line, out, re.M), out


def test_readme_figures():
    """README's table has rows of docs/performance.md's, and its counts of lines are right within a tenth."""
    readme, page = (read(os.path.join(ROOT, name)).decode() for name in ("README.md", "docs/performance.md"))
    rows = re.findall(r"^\|.*K \(.*\|$", readme, re.M)
    assert rows and all(row in page.splitlines() for row in rows)
    headers = glob.glob(os.path.join(ROOT, "llmc", "**", "*.h"), recursive=True)
    for pattern, paths in ((r"train_gpt2.cu\), ([\d,]+) lines", [os.path.join(ROOT, "train_gpt2.cu")]),
                           (r"Around it ([\d,]+) lines of headers", headers),
                           (r"([\d,]+) of\s+these are the kernels' twins", [f"{ROOT}/llmc/ops/cpu_ops.h"])):
        said = int(re.search(pattern, readme)[1].replace(",", ""))
        lines = sum(read(path).count(b"\n") for path in paths)
        assert abs(said - lines) < lines / 10, f"README says {said} lines, {lines} are there"
