"""Runs of the training program: what each flag changes, what a run says and leaves behind, and folders.
"""
import functools
import glob
import json
import math
import os
import random
import re
import resource
import shlex
import shutil
import struct
import subprocess
import time

import pytest

from checks import ROOT, read, run_program, write
from jobs import STOPPING, TERM, UNREAD, Job
from trainer import (ALONE, B, LIMIT_S, LOG_LINE, MODEL_MAGIC, T, TINY, USUAL, Program, Result, assert_close,
                     flags_of, log_columns, log_lines, logged_steps, metrics, model_path, need_fp8, on_cpu,
                     read_shard, refused, run, run_ok, sentences, settings_of, tolerance, write_questions,
                     write_shard)

FIXTURE = os.path.join(ROOT, "dev/reference/fixture")

# ---- what each flag changes ----

def observe(flags, name):
    """Everything a run says and leaves, by kind."""
    result = run_ok({**flags, "-o": name})
    columns, losses = log_columns(name), result.val_losses()
    samples = re.findall(r"^sample (\d+ at step \d+:\n.*?)\n---$", result.out, re.M | re.S)
    return {"loss of step 1": columns["trl"][:1], "norm of step 1": columns["norm"][:1],
            "later losses": columns["trl"][1:] + columns["norm"][1:], "rates": columns["lr"],
            "weights": read(sorted(glob.glob(name + "/model_*.bin"))[-1]),
            "memory": re.findall(r"^memory: .*$", result.out, re.M),
            "first validation": losses[:1], "later validations": losses[1:], "samples": samples}


OBSERVED = {"-e": "L2,NH2,C16,T16,V256", "-x": 5, "-l": "1e-2", "-v": 3, "-s": 3, "-g": 12, "-m": 2,
            "--eps": "1e-4", "--verbose": 1}


@functools.cache
def observed(optimizer):
    return observe({**OBSERVED, "--optimizer": optimizer}, "flags_" + optimizer)


FIRST = {"loss of step 1", "norm of step 1"}
LEARNED = {"weights", "later losses"}
SHOWN = {"later validations", "samples"}            # follow the weights: may change, or be too small to see
ROWS = FIRST | LEARNED | {"memory", "first validation", "later validations"}
ALL_NUMBERS = FIRST | LEARNED | SHOWN | {"first validation"}
LOW = "where the build has 16 bits: "               # and nothing in FP32
CUDA = "on a GPU: "
# Flags, what must change, what may; all else stays as it is, to the byte.
CHANGES = [
    ("", set(), set()),
    ("-b 2", ROWS, {"samples"}), ("-t 8", ROWS, {"samples"}), ("-z 192", FIRST | LEARNED, SHOWN),
    *[(flag, LEARNED | {"rates"}, SHOWN) for flag in ("-l 2e-2", "-k linear", "-k constant", "-k wsd", "-u 3",
                                                      "-k wsd --cooldown 0.6", "-q 0.5")],
    *[(flag, LEARNED, SHOWN) for flag in ("-c 1", "--beta1 0.5", "--beta2 0.5", "--eps 1e-2",
                                          "--grad-clip 0.01")],
    ("--embedding-rate 2", LEARNED, SHOWN),
    ("--optimizer muon", LEARNED | {"memory"}, SHOWN),
    *[("--optimizer muon " + flag, LEARNED, SHOWN)
      for flag in ("--muon-lr 0.05", "--muon-momentum 0.5", "--muon-warmup 3", "--muon-decay 5")],
    ("-sl 1", set(), set()), ("-sg 1", set(), set()),   # fewer than 128 steps judge nothing
    ("--seed 7", ALL_NUMBERS, set()),
    ("--shuffle 0", FIRST | LEARNED, SHOWN), ("-a 1", FIRST | LEARNED, SHOWN),
    ("-v 1", {"later validations"}, set()), ("-m 1", {"first validation", "later validations"}, set()),
    *[(flag, {"samples"}, set()) for flag in ("-s 1", "-g 3", "--prompt ab", "--num-samples 2",
                                              "--temperature 0.1", "--top-k 2", "--top-p 0.5")],
    ("-r 1", {"memory"}, set()), ("-r 2", {"memory"}, set()), ("-r 3", {"memory"}, set()),
    ("--head-chunks 2", set(), set()),          # a part has 64 rows or more
    ("--block parallel", ALL_NUMBERS | {"memory"}, SHOWN),
    ("--block parallel-tied", ALL_NUMBERS | {"memory"}, SHOWN),
    ("--norm rmsnorm", ALL_NUMBERS, SHOWN | {"memory"}),
    ("--dropout 0.1", FIRST | LEARNED | {"memory"}, SHOWN),
    ("--kernels portable", set(), {CUDA + kind for kind in ALL_NUMBERS}),
    ("-f 1", set(), {CUDA + kind for kind in ALL_NUMBERS}),
    ("-w 0", {LOW + "memory", LOW + "weights"}, {LOW + kind for kind in LEARNED | SHOWN}),
    ("--grad-dtype bf16", {CUDA + "memory"}, {CUDA + kind for kind in LEARNED | SHOWN | FIRST}),
    ("--state-dtype bf16", LEARNED | {"memory"}, SHOWN),
    # the first step multiplies as without FP8
    ("--matmul-dtype fp8", LEARNED | {"memory"}, SHOWN),
    ("--matmul-dtype fp8-head", LEARNED | {"memory"}, SHOWN),
    *[(flag, set(), set()) for flag in ("-n 2", "-nk 1", "-nm 1", "-y 1", "--log-every 3")],
]


@pytest.mark.numeric
@pytest.mark.parametrize("words, must, may", CHANGES, ids=[row[0] or "same" for row in CHANGES])
def test_flag_changes(words, must, may):
    """Each flag changes what it names and nothing else."""
    cuda, low = not on_cpu(), Program.precision != "FP32"
    if not cuda and words == "--grad-dtype bf16":
        pytest.skip("the CUDA program's")
    if "fp8" in words:
        need_fp8()

    def here(kinds):
        return {kind.removeprefix(LOW).removeprefix(CUDA) for kind in kinds
                if (low or LOW not in kind) and (cuda or CUDA not in kind)}
    flags = flags_of(words)
    base = observed("muon" if "--optimizer" in flags and len(flags) > 1 else "adamw")
    got = observe({**OBSERVED, **flags}, "flags" + words.replace(" ", ""))
    changed = {kind for kind in base if got[kind] != base[kind]}
    assert here(must) <= changed <= here(must) | here(may)


@pytest.mark.cpu_only
def test_automate():
    """docs/automate.md names the fields of metrics.jsonl and of run.json, each in its kind of lines, and no
    others."""
    write_questions("choices.bin", [([1, 2], [[3], [4]])] * 2, [0, 1])
    write_questions("words.bin", [([1, 2], [[3]])] * 2, [0, 0])
    shutil.copy("val.bin", "other.bin")
    rows, _, others = read(f"{ROOT}/docs/automate.md").decode().partition("## metrics.jsonl")[2].partition(
        "## Other JSON files")
    told = [(set(re.findall(r"`(\w+)`", names)), kind) for names, kind in re.findall(
        r"^\| (`.*?) \| (.*?) \|", rows, re.M)]
    wanted, got = {}, {}
    for names, kind in told:
        for key in ("a training step", "a validation", "questions") if kind == "all" else (kind,):
            wanted.setdefault(key, set()).update(name for name in names if name[:4] != "gpu_")
    for questions in ("choices.bin", "words.bin"):
        run_ok({"-e": "L2,NH2,C32,T32,V256", "-b": 2, "-t": 16, "-x": 1, "-v": 1, "-m": 1, "-h": 1,
                "-j": "val.bin:0.5,other.bin:0.5", "--eval-data": questions, "--matmul-dtype": "fp8",
                "-o": "told"})
        for row in metrics("told"):
            kinds = {"loss": "a training step", "val_loss": "a validation", "eval_loss": "questions"}
            [kind] = [kind for name, kind in kinds.items() if name in row]
            got.setdefault(kind, set()).update(row)
        shutil.move("told/run.json", "run.json")
        shutil.rmtree("told")
    assert got == wanted
    run_json, = re.findall(r"^\| `run.json` in .*", others, re.M)
    assert json.loads(read("run.json")).keys() == set(re.findall("`([^`]+)`", run_json)) - {"run.json"}


@pytest.mark.cpu_only
def test_every_flag_has_a_row():
    """In --help all with its default, in run.json, and in CHANGES or tests of its own."""
    text = run_ok(ALONE, extra=["--help", "all"]).out
    entries = re.split(r"^(?= -\S+ {1,7}--| {1,7}--)", text, flags=re.M)[1:]
    rows = {re.search(r"--(\S+)", entry)[1]: entry for entry in entries}
    assert len(rows) == len(entries), "a flag is shown twice"
    run_ok({"-o": "settings", "-x": 1})
    names = set(settings_of("settings"))
    assert sorted(rows) == sorted([*names, "help", "version"]) and len(names) >= 30
    assert not [name for name in names if "(default " not in " ".join(rows[name].split())]
    known = {"train-data", "val-data", "model", "output-dir", "max-steps"}  # files and lengths
    known |= {"evaluate", "eval-data", "eval-every", "log-gpu", "verbose"}  # tests of their own
    known |= {"plan", "price", "like"}              # so, too; and test_head_rate, test_documents.py
    known |= {"head-rate", "document-mask"}
    known |= {"gpus", "zero-stage", "lanes", "process-init", "process-server",
              "process-folder", "processes", "process-rank", "gpus-per-node"}
    flags = {row[0].split()[-2] for row in CHANGES if row[0]}
    known |= {name for name, row in rows.items() if flags & {*re.split("[ ,]", row.strip()), "--" + name}}
    assert not names - known, "flags that no row is about"


@pytest.mark.cpu_only
def test_version():
    """Before anything else is looked at."""
    for words in (["--version"], ["--version", "-b", "0"]):
        code, out, err = run_program([Program.path, *words])
        assert (code, err) == (0, "")
        assert re.fullmatch(r"samebits \d+\.\d+, commit (unknown|[0-9a-f]{7,}(-dirty)?)\nFP32, CPU.*\n"
                            r"compiler .+\n", out), out


@pytest.mark.cpu_only
@pytest.mark.parametrize("path", ["train_gpt2cpu", "build/tokenize", "build/stories", "build/bigram"])
def test_no_spelling_of_a_flag_comes_twice(path):
    if not os.access(f"{ROOT}/{path}", os.X_OK):
        pytest.skip(f"no {path}: make {os.path.basename(path)}")
    text = run_program([f"{ROOT}/{path}", "--help", "all"])[1]
    spelled = []
    for entry in re.split(r"^(?= -\S+ {1,7}--| {1,7}--)", text, flags=re.M)[1:]:
        letters, name = re.match(r" (-\S+)? *(--\S+)", entry).groups()
        spelled += [*(letters.split(",") if letters else []), name]
        spelled += ["-" + other for other in re.findall(r"; or -(-[\w-]+)", " ".join(entry.split()))]
    assert len(spelled) > 2 and len(spelled) == len(set(spelled)), sorted(spelled)


# ---- what a run says ----

@pytest.fixture(name="parts")
def data_in_parts():
    for i, length in enumerate((1000, 77, 16)):             # 31 rows of 32, 2 and none
        write_shard(f"part_{i}.bin", sentences(i, length))
    write_shard("row.bin", sentences(7, T + 1))


# FLAGS => KIND: what. Kinds: out and err match a regular expression, no does not match stdout; the numbers of
# steps, val losses and samples.
SAID = r"""
-x 2 -s 1 -u 1 -g 31 -o said      => no: no -o|samples: | steps: 2 | samples: 2
-x 1                              => out: ^no -o: nothing of this run will be saved$ | no: -x 0
-x 0                              => no: no -o|settings | out: ^evaluating | vals: 1
-x 2 -u 2                         => err: ^warning: .*-u 2.*at the last step only
-x 2 -u 3                         => err: ^warning: .*-u 3.*never
-x 1 -s 1 -g 33                   => out: samples: after 32 of 33 tokens all T=32 positions are taken
-x 0 --prompt tak -g 32 --verbose -1 => err: ^note: samples: after 29 of 32 tokens all T=32 | no: all T
-x 0 --prompt tak -g 29 --verbose -1 => no: all T
-x 0 --prompt tak -g 9 --num-samples 3 => err: ^note: 27 tokens, the first after [\d.]+ s, then \d+ tokens/s$
-x 2 -l 1e-3                      => out: lr 1.00e-03
-x 2 -l 2e-3 -k linear -u 1       => out: ^schedule: 2 steps, \S+ epochs; lr 0.002, linear, warm-up 1 steps$
-x 2 --lr 1e-3                    => out: lr 1.00e-03
-x 3                 => out: ^step 3/3 \| loss \d+\.\d{6} \| lr \S+ \| norm \S+ +\| .* ETA 0:00:00$
-x 1 -b 2                         => out: ^settings: [^:]*micro-batch=2, | no: defaults|beta1|the largest
-x 1 --verbose 1                  => out: ^defaults: [^:]*beta1=0.9, | no: quiet
-e L1,NH4,C16,T33,V300 -x 1 --verbose 1 => out: ^8400 with weight decay, 240 without; .* 384 rows$
-e llama:L2,NH1,NKV1,HS16,C16,F16,T33,V300,value_embed -x 1 --verbose 1 => out: ^13184 with .*, 4892 without
-x 1 --matmul-dtype fp8-head => out: ^matrix products: FP8, also the LM head's$
-x 4 -v 2      => out: ^end: loss \d+\.\d{6}, best validation loss \d+\.\d{6} @4\n512 tokens in
-i part_*.bin -x epoch            => out: ^data: 1093 training tokens \(33 rows of 32\)$ | steps: 8
-i part_*.bin -x NONE             => steps: 8
-i part_*.bin -x 12               => steps: 12
-i part_*.bin -x epoch -t 7  => out: \(154 rows of 7\)\n.*a step: 1\n.*: 38 steps, 0.987 epochs | steps: 38
-i part_*.bin -x epoch -z 256 => out: ^batch: 256 tok.* micro-steps a step: 2\nschedule: 4 steps, | steps: 4
-i part_*.bin -x epoch -z 5120    => out: micro-steps a step: 40\nschedule: 1 steps, 4.85 epochs | steps: 1
-i part_*.bin -x epoch -b 1       => steps: 33
-i row.bin -x epoch -o row        => steps: 1 | out: ^output: row, with a checkpoint at the end$
-i row.bin -j part_1.bin -v 1 -m 1000 -b 16 -x 3 => steps: 3 | vals: 4
-j row.bin -v 1 -x 1              => vals: 2
-b 1 -t 1 -z 3 -x 2               => out: micro-steps a step: 3 | steps: 2
-b 3 -t 1 -z 3 -x 2               => out: micro-steps a step: 1 | steps: 2
-t 31 -x 2 -v 1 -s 2              => steps: 2 | vals: 3 | samples: 1
-x 3 -v 0 -s 0                    => vals: 0 | samples: 0
-x 4 -v 9 -s 9                    => vals: 2 | samples: 1
-x 4 -v 4 -s 4                    => vals: 2 | samples: 1
-x 3 -v 1 -s 1                    => vals: 4 | samples: 3
""".strip().splitlines()


@pytest.mark.cpu_only
@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("line", SAID, ids=lambda line: line.split(" =>")[0].strip())
def test_said(line):
    flags, wants = line.split(" => ")
    result = run(flags_of(flags))
    assert result.code == 0 and len(result.err.splitlines()) == wants.count("err: "), result.err
    counts = {"steps": result.losses(), "vals": result.val_losses(), "samples": result.samples()}
    for kind, want in re.findall(r"(\w+): (.*?)(?: \| (?=[a-z]+: )|$)", wants):
        if kind in counts:
            assert len(counts[kind]) == int(want), kind
        else:
            text = result.err if kind == "err" else result.out
            assert (re.search(want, text, re.M) is None) == (kind == "no"), f"{want} in {text}"
    assert all(4.5 < x < 7.0 for x in result.losses())


# a command by long names alone
NAMED = {**ALONE, "--model": USUAL["-e"], "--train-data": "train.bin", "--val-data": "val.bin", "--tf32": 0,
         "--micro-batch": B, "--sample-every": 0}


@pytest.mark.cpu_only
def test_auto():
    """What the program chooses does what the same values do beside letters; a run that goes on keeps it."""
    words = {"--learning-rate": "auto", "--warmup": "auto"}     # as if they were not there
    out = run_ok({**NAMED, **words, "--max-steps": 12, "--output-dir": "auto"}).out
    chosen = {"learning-rate": 3e-3, "warmup": 2, "weight-decay": 0.1, "val-every": 2}
    assert {name: settings_of("auto")[name] for name in chosen} == chosen
    assert re.search(r"learning-rate=0.003\s+\(auto: C=32,\s+steps\s+of\s+128\s+tokens\)", out)
    run_ok({"-x": 12, "-l": 3e-3, "-u": 2, "-c": 0.1, "-v": 2, "-o": "letters"})
    assert read("auto/main.log") == read("letters/main.log")
    again = run_ok({**ALONE, **words, "--resume": 1, "--max-steps": 14, "--output-dir": "auto"})
    assert {name: settings_of("auto")[name] for name in chosen} == chosen and "auto:" not in again.out
    alone = run_ok({**NAMED, "--val-data": None, "--max-steps": 1})
    assert "val-every=0 (auto:" in " ".join(alone.out.split())


@pytest.mark.cpu_only
def test_like():
    """Another run's settings, and its data; flags say otherwise; a run that goes on keeps its own."""
    run_ok({"-x": 3, "-l": 2e-3, "-k": "linear", "-t": 16, "-o": "model_run", "--seed": 5})
    os.makedirs("aside", exist_ok=True)
    out = run_ok({**ALONE, "--like": "../model_run", "--output-dir": "same"}, cwd="aside").out
    assert read("aside/same/main.log") == read("model_run/main.log")
    assert "learning-rate=0.002 (like ../model_run)" in " ".join(out.split())
    run_ok({**ALONE, "--like": "model_run/model_00000003.bin", "--seed": 6, "--output-dir": "other"})
    assert read("other/main.log") != read("model_run/main.log")
    names = {name for name, value in settings_of("other").items() if value != settings_of("model_run")[name]}
    assert names == {"like", "seed", "output-dir"}
    run_ok({**ALONE, "--like": "model_00000003.bin", "--output-dir": "../inside"}, cwd="model_run")
    assert read("inside/main.log") == read("model_run/main.log")
    run_ok({"-x": 3, "-l": 1e-3, "-o": "own"})
    run_ok({**ALONE, "--like": "model_run", "--resume": 1, "--max-steps": 4, "--output-dir": "own"})
    assert settings_of("own")["learning-rate"] == 1e-3 and settings_of("own")["seed"] == 1337


@pytest.mark.cpu_only
@pytest.mark.usefixtures("parts")
def test_many_epochs():
    for steps, said in ((4, 0), (5, 1)):            # of one row of 32 tokens, four of which are a step
        flags = {**NAMED, "--train-data": "row.bin", "--val-data": None, "--micro-batch": 1}
        result = run({**flags, "--max-steps": steps})
        warned = re.findall(r"^warning: 5 epochs: .*\nhint: fewer steps \(--max-steps 4\)", result.err, re.M)
        assert result.code == 0 and len(warned) == said, result.err
    run_ok({"-i": "row.bin", "-b": 1, "-x": 9})     # beside letters nothing is said


def test_order_of_lines():
    """Validations and samples stand behind the steps they are of; the model is on disk before the last."""
    result = run_ok({"-x": 5, "-v": 2, "-s": 2, "--num-samples": 2, "-g": 2, "-o": "order"})
    lines = re.findall(r"^(step \d|val|sample \d at step \d|saved \S+)", result.out, re.M)
    texts = [[f"sample {n} at step {step}" for n in (1, 2)] for step in range(6)]
    assert lines == ["val", "step 1", "step 2", "val", *texts[2], "step 3", "step 4", "val", *texts[4],
                     "step 5", f"saved {model_path('order')}", "val", *texts[5]]


@pytest.mark.cpu_only
def test_quiet():
    """--verbose -1: results alone on stdout, and the same ones."""
    flags = {"-x": 2, "-v": 1, "-s": 1, "-g": T - 1, "--prompt": "\n"}
    loud, quiet = (run_ok({**flags, "-o": f"quiet{n}", "--verbose": -n}) for n in (0, 1))
    settings = re.compile("^settings|^device|^model|^memory|^data|^output|^mean|^end|^`", re.M)
    assert settings.search(loud.out) and not settings.search(quiet.out)
    for what in (Result.losses, Result.val_losses, Result.samples):
        assert what(quiet) == what(loud)
    kinds = "step [12]/2 |val loss |sample |saved |---$"
    assert re.match(kinds, quiet.out) and re.match(kinds, quiet.out.splitlines()[-1])
    assert read("quiet0/main.log") == read("quiet1/main.log")
    loss = run_ok({"-x": 0}).val_losses()[0]
    said = re.escape(f"val loss {loss:.6f} | ppl {math.exp(loss):.2f}") + r" \| bpb \d\.\d{4}\n"
    assert re.fullmatch(said, run_ok({"-x": 0, "--verbose": -1}).out)


@pytest.mark.cpu_only
@pytest.mark.parametrize("folder", ["runs/last", "runs/la'st $x", "runs/la\n7st' \\ \x1b[31m"])
def test_last_line(folder):
    """The commands that evaluate, sample and plot the run; they work."""
    def shell(command):
        return subprocess.run(["bash", "-c", command], capture_output=True, check=True, timeout=LIMIT_S,
                              env=Program.environment(1))
    out = run_ok({"-o": folder, "-x": 2}).out
    assert not re.search("[\0-\x09\x0b-\x1f\x7f]", out), "control characters of the name"
    evaluates, samples, draws = re.findall("^`(.*)` ", "\n".join(out.splitlines()[-3:]), re.M)
    assert b"val loss " in shell(evaluates).stdout and not shell(evaluates).stderr
    assert b"val loss " not in shell(samples + " --prompt tak -g 3").stdout + shell(samples + " -g 3").stdout
    assert shell(f"printf '%s|' {draws}").stdout.decode() == f"python3|dev/data/plot_log.py|{folder}|"


def test_clock():
    """What lines and metrics.jsonl say of time agrees with itself and with a clock outside."""
    batch, began = 3 * B * T, time.monotonic()
    out = stopped({"-x": 10**8, "-z": batch, "-o": "clock"}, "step 20/").out
    wall_ms, records = (time.monotonic() - began) * 1e3, metrics("clock")
    ms = [r["ms"] for r in records]
    assert 0 < sum(ms) <= wall_ms
    assert [r["tokens"] for r in records] == [batch * (i + 1) for i in range(len(ms))]
    assert_close([r["tokens_per_s"] * r["ms"] / (batch * 1e3) for r in records], [1] * len(ms), 1e-6, "speed")
    rows = re.findall(r"^step \d+/.*\| (\S+) ms \| (\d+) tok/s(?: \||$)", out, re.M)
    assert_close([float(row[0]) for row in rows], ms, 0.0501, "ms on the lines")
    assert_close([int(row[1]) for row in rows], [r["tokens_per_s"] for r in records], 0.51, "speed")
    mean, speed, count = re.search(r"^mean step time (\S+) ms, (\d+) tokens/s over (\d+) steps$", out,
                                   re.M).groups()
    usual = sum(ms[1:]) / (len(ms) - 1)                     # the first step also loads kernels
    assert int(count) == len(ms) - 1 and abs(float(mean) - usual) <= 0.0501
    assert abs(int(speed) / (batch / usual * 1e3) - 1) <= 1e-3


# ---- what a run leaves ----

def test_files():
    flags = {"-o": "deep/er/files", "-x": 4, "-v": 2, "-s": 2, "--prompt": 'a "quoted\\ \u00e9 prompt'}
    result, folder = run_ok(flags), flags["-o"]
    assert sorted(os.listdir(folder)) == ["DONE_00000004", "main.log", "metrics.jsonl", "model_00000004.bin",
                                          "run.json", "state_00000004_00000.bin"]
    lines = read(folder + "/main.log").decode("ascii").splitlines()
    assert all(LOG_LINE.fullmatch(line) for line in lines)
    assert [line[:7] for line in lines] == [f"s:{k} {kind}" for k, kind in (
        (0, "tel"), (0, "trl"), (1, "trl"), (2, "tel"), (2, "trl"), (3, "trl"), (4, "tel"))]
    assert json.loads(read(folder + "/run.json"))["precision"] == Program.precision
    assert settings_of(folder)["prompt"] == flags["--prompt"]
    # a step has one number on the terminal, in metrics.jsonl and in names of files: how many are done then;
    # main.log is llm.c's, which counts from 0
    steps, columns = logged_steps(folder), log_columns(folder)
    assert [r["step"] for r in steps] == [1, 2, 3, 4] and columns["step"] == [0, 1, 2, 3]
    assert re.findall(r"^step (\d+)/4 ", result.out, re.M) == ["1", "2", "3", "4"]
    assert [r["step"] for r in metrics(folder) if "val_loss" in r] == [0, 2, 4]
    assert result.losses() == columns["trl"] == [float(f"{r['loss']:.6f}") for r in steps]
    assert_close([r["val_loss"] for r in metrics(folder) if "val_loss" in r], result.val_losses(), 1e-6,
                 "val losses")


def test_failed_start():
    """A folder without the line of a step is no run; nor is one in which nothing could be written."""
    write("failed/main.log", b"s:0 tel:5.545\n")
    write("failed/metrics.jsonl", b"")
    run_ok({"-o": "failed", "-x": 2})
    assert (len(log_lines("failed")), log_lines("failed", "tel"), len(metrics("failed"))) == (2, [], 2)
    full = run({"-o": "full"}, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1)))
    assert full.code == 1
    run_ok({"-o": "full", "-x": 1})


# ---- runs that are stopped ----

def stopped(flags, until, wait=0.0):
    """A run that gets SIGTERM once it has printed that, or for how long it waits then."""
    job = Job(flags)
    assert job.when(lambda: until in job.out()), job.err()
    time.sleep(wait)
    result = job.signal(TERM).result()
    assert (result.code, result.err) == (0, STOPPING)
    return result


@pytest.mark.cpu_only
@pytest.mark.parametrize("where, flags, until, steps", [
    ("validation", {"-v": 1, "-b": 1, "-t": 1, "-j": "long_val.bin", "-m": 10**6}, "micro-steps a step", 0),
    ("evaluation", {"-h": 1, "--eval-data": "many.bin", "--eval-every": 1, "-b": 1}, "micro-steps a step", 0),
    ("samples", {"-s": 3, "-x": 6, "--num-samples": 10**5}, "sample 2 at step 3", 3),
    ("micro-steps", {"-z": 2 * B * T * 10**6}, "micro-steps a step", 0)])
def test_stopped_inside(where, flags, until, steps):
    """On two ranks. What was begun is not finished; without a step there is no run, and its folder may be
    used again."""
    write_shard("long_val.bin", [0, 1] * 500000)
    write_questions("many.bin", [([1] * 20, [[2, 3], [4], [5, 6, 7], [8]])] * 40000, [0] * 40000)
    out = stopped({"--gpus": 2, "-x": 10, "-o": "inside_" + where, **flags}, until,
                  wait=0.2 * (steps == 0)).out
    assert (out.count("val loss"), out.count("eval acc"), out.count("\nstep ")) == (0, 0, steps)
    assert out.count("\nsample ") < 10**5 and f"stopped by a signal after step {steps}\n" in out
    assert len(glob.glob(f"inside_{where}/model_*")) == (steps > 0)
    if steps == 0:
        assert "no step was completed: nothing is saved" in out
        run_ok({"-o": "inside_" + where, "-x": 1})


def test_reader_goes_away():
    """(| head, or tee at Ctrl-C) It stops the run as a signal does: it is saved."""
    job = Job({"-x": 10**6, "-o": "closed"}, pipe=True)
    while job.p.stdout.readline()[:7] not in (b"step 2/", b""):
        pass
    job.p.stdout.close()
    assert job.gone() and (job.err(), job.p.returncode) == (UNREAD, 0)
    assert int(model_path("closed")[-12:-4]) == len(log_lines("closed"))


# ---- a run's folder: -e FOLDER ----

@pytest.fixture(name="folder")
def folder_run():
    """Three checkpoints of a run whose data, rows, T and -m are not the usual ones."""
    if not os.path.exists("runs/folder"):
        write_shard("own_val.bin", sentences(5, 4000))
        run_ok({"-o": "runs/folder", "-j": "own_val.bin", "-b": 3, "-t": 24, "-m": 7, "-x": 6, "-v": 6,
                "-n": 2, "-nk": 0, "-l": "1e-2", "-f": None})
    return "runs/folder"


def evaluate(folder, flags=None, **popen):
    """(the model that was taken, its val loss, stderr) of -x 0 with no other flag than these."""
    result = run({**ALONE, "-e": folder, "-x": 0, **(flags or {})}, **popen)
    taken = re.search(r"^evaluating (\S+) on ", result.out, re.M)
    return taken and taken[1], result.val_losses(), result.err


def test_folder(folder):
    """It is its newest whole model, run as the run did."""
    model = f"{folder}/model_%08d.bin"

    def loss_of(step, data="own_val.bin", rows=3 * 7, length=24):
        tokens = read_shard(data)[:rows * length + 1]       # a set that ends where the run's validation does
        own = {"-j": write_shard("first.bin", tokens), "-b": 3, "-t": length, "-f": None}
        return run_ok({**own, "-e": model % step, "-x": 0}).val_losses()

    losses = {k: loss_of(k) for k in (2, 4, 6)}
    assert len({str(loss) for loss in losses.values()}) == 3
    assert evaluate(folder + "//") == (model % 6, losses[6], "")
    last = log_lines(folder, "tel")[-1].split("tel:")[1]
    assert_close(losses[6], [float(last)], tolerance(0, 1e-2), "the run's last validation loss")
    for flag, value, want in (("-j", "val.bin", loss_of(6, data="val.bin")), ("-t", 8, loss_of(6, length=8)),
                              ("-m", 3, loss_of(6, rows=3 * 3))):                   # stronger than the run's
        assert evaluate(folder, {flag: value})[1] == want != losses[6]
    for rows in (1, 2, 8, 16):                          # -b does not choose what is read
        assert_close(evaluate(folder, {"-b": rows})[1], losses[6], tolerance(1e-6, 1e-3), f"-b {rows}")
    os.mkdir("elsewhere")
    assert evaluate("../" + folder, cwd="elsewhere")[1:] == (losses[6], "")
    assert evaluate(os.path.abspath(folder), {"--verbose": -1}, cwd="elsewhere")[1] == losses[6]

    shutil.copytree(folder, "runs/damaged")
    damaged = "runs/damaged/model_%08d.bin"
    data = bytearray(read(damaged % 6))
    data[5000] ^= 1
    write(damaged % 6, data)
    taken, loss, err = evaluate("runs/damaged")
    assert (taken, loss) == (damaged % 4, losses[4]) and damaged % 6 in err and err.count("\n") == 1
    shutil.copy(damaged % 2, damaged % 9)
    assert evaluate("runs/damaged")[0] == damaged % 4, "checkpoints come before a model alone"
    write("runs/damaged/model_99.bin", b"nobody's")
    for path in glob.glob("runs/damaged/DONE_*") + glob.glob("runs/damaged/state_*"):
        os.remove(path)
    assert evaluate("runs/damaged") == (damaged % 9, losses[2], "")
    os.remove("runs/damaged/run.json")
    _, loss, err = evaluate("runs/damaged", {"-j": "first.bin", "-t": 24, "-f": None, "-b": 3})
    assert "run.json is not there" in err and loss == run_ok(
        {"-e": damaged % 9, "-j": "first.bin", "-t": 24, "-f": None, "-b": 3, "-x": 0}).val_losses()
    for path in glob.glob("runs/damaged/model_*"):
        os.truncate(path, 0)
    refused({"-e": "runs/damaged"}, "no whole model_*.bin")


@pytest.mark.cpu_only
def test_folder_name(folder):
    """A descriptor is one where there is a folder of that name, too; what is odd in a path is no pattern."""
    shutil.copytree(folder, "odd, [x]*/d12")
    write_shard("odd, [x]*/own_1.bin", sentences(5, 4000))
    inside = {"cwd": "odd, [x]*"}
    run_ok({"-e": TINY, "-i": "../train.bin", "-j": "own_?.bin", "-x": 1, "-m": 1000, "-o": "second"},
           **inside)
    want = run_ok({"-e": "second/model_00000001.bin", "-j": "own_?.bin", "-x": 0}, **inside).val_losses()
    assert evaluate("odd, [x]*/second")[1:] == (want, "")
    err = run({"-e": "d12", "-x": 0, "-t": 1025}, **inside).err         # GPT-2's T is 1024, the folder's 32
    assert "longest sequence, 1024" in err
    assert evaluate("./d12", {"-j": "own_1.bin"}, **inside)[0] == "./d12/model_00000006.bin"
    shutil.copytree(folder, "gone")
    write("gone/run.json", read("gone/run.json").replace(b'"own_val.bin"', b'"gone.bin"'))
    refused({**ALONE, "-o": None, "-e": "gone", "-x": 0}, "'gone.bin'")


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", ["-dash", "d6"])
def test_folder_that_reads_otherwise(name):
    """A run's last lines name it so that they work: as no flag and no descriptor."""
    out = run_ok({"-o": None, "-x": 1}, extra=["-o", name]).out
    [command] = re.findall("^`(.*)` evaluates this run$", out, re.M)
    code, said, err = run_program(shlex.split(command))
    assert code == 0 and f"evaluating ./{name}/model_00000001.bin" in said, said + err


@pytest.mark.cpu_only
def test_folder_trains(folder):
    """It is where another run begins, which -y 1 finds again."""
    flags = {"-e": folder, "-b": 3, "-t": 24, "-x": 3, "-n": 1, "-o": "runs/tuned"}
    run_ok(flags)
    run_ok({**flags, "-e": f"{folder}/model_00000006.bin", "-o": "runs/tuned2"})
    assert log_lines("runs/tuned") == log_lines("runs/tuned2")
    run_ok({**flags, "-x": 4, "-y": 1})
    assert len(log_lines("runs/tuned")) == 4


@pytest.mark.cpu_only
def test_folder_writes(folder):
    """Text from a folder needs neither data nor flags, and stdout has nothing else."""
    flags = {**ALONE, "-e": folder, "-x": 0, "--prompt": "tak ", "-g": 9, "--temperature": 0}
    result = run_ok(flags)
    assert 0 < len(result.out) <= 10 and result.out[-1] == "\n"
    assert run_ok({**flags, "--num-samples": 3}).out == "---\n".join([result.out] * 3)
    trained = run_ok({"-e": f"{folder}/model_00000006.bin", "-x": 1, "-t": 24, "-s": 1, "-l": 0,
                      "--prompt": "tak ", "-g": 9, "--temperature": 0, "-f": None})
    assert trained.samples() == result.samples()


# ---- against other programs ----

@pytest.mark.numeric
def test_pytorch_run():
    """12 steps with accumulation, warm-up, decay and clipping, two shards, as PyTorch in fp32 did them."""
    reference = json.loads(read(FIXTURE + "/run.json"))
    words = reference["our_flags"].split()
    run_ok({**dict(zip(words[::2], words[1::2])), "-i": os.path.join(FIXTURE, reference["shards"]),
            "-o": "pytorch"})
    columns = log_columns("pytorch")
    assert_close(columns["trl"], reference["losses"], tolerance(2e-5, 3e-2), "losses")
    assert_close(columns["norm"], reference["norms"], tolerance(2e-4, 5e-2), "norms")
    assert_close(columns["lr"], reference["learning_rates"], 1e-8, "learning rates")


@pytest.mark.numeric
@pytest.mark.parametrize("version, sizes", [(3, (2, 4, 64, 250, 256)), (5, (2, 4, 64, 250, 256)),
                                            (3, (1, 2, 32, 300, 304))])
def test_llmc_format(version, sizes):
    """A checkpoint as llm.c writes it, by hand, loads here and is saved again, value for value. Padded to a
    multiple of 8 that is not one of 128: the file says what the padding is."""
    L, NH, C, vocabulary, padded = sizes
    fields, rng = (32, vocabulary, L, NH, C, padded), random.Random(1)
    count = (padded + 32) * C + L * (12 * C * C + 13 * C) + 2 * C
    values = [rng.randrange(-8, 9) / 64 for _ in range(count)]
    values[vocabulary * C:padded * C] = [0] * ((padded - vocabulary) * C)
    fp32 = struct.pack(f"<{count}f", *values)
    kinds = {3: fp32, 5: b"".join(fp32[at + 2:at + 4] for at in range(0, len(fp32), 4))}    # exact in bf16
    model, folder = f"theirs_{version}_{padded}.bin", f"theirs_{version}_{padded}"
    write(model, struct.pack("<256i", MODEL_MAGIC, version, *fields, *[0] * 248) + kinds[version])
    result = run_ok({"-e": model, "-v": 1, "-m": 1000, "-l": 0, "-x": 1, "-o": folder})
    saved = read(model_path(folder))
    header = struct.unpack("<8i", saved[:32])
    assert header[2:] == fields and saved[1024:] == kinds[header[1]]
    evaluated = run_ok({"-e": model, "-x": 0}).val_losses()
    assert_close(evaluated, result.val_losses()[:1], tolerance(0, 1e-2), "val loss of their model")


