"""The scripts as a user meets them, with stand-ins for what takes long or changes the machine: quickstart.sh,
the recipes run_*.sh, setup.sh, `make test` on a bare machine, what the Makefile finds.
"""
import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys

import pytest

from checks import ROOT, read, run_program, write
from trainer import JOB_VARIABLE

sys.path.insert(1, os.path.join(ROOT, "dev", "data"))
import get                                          # noqa: E402


pytestmark = pytest.mark.usefixtures("own_folder")


def stand_in(name, text=""):
    """A program in bin that stands before others of its name."""
    write("bin/" + name, "#!/bin/sh\n" + text)


# What the Makefile, the scripts and the stand-ins take from the environment; a machine may have some of it.
SETTINGS = "CXX CAPS FIRST GPUS ID LACKS LAST MODE OFFLINE PNG RUN RUNS TEXT data gpus hosts launch".split()
SETTINGS += ["SAVES", "model", "questions", "val"]
SETTINGS += ["MAKEFLAGS", "MFLAGS", "MAKELEVEL"]            # of the make that may have started this
SETTINGS += re.findall(r"^(\w+) \?=", read(os.path.join(ROOT, "Makefile")).decode(), re.M)


def call(command, path=None, **env):
    """(exit code, stdout, stderr), without this machine's settings; path: what PATH is, if not bin and the
    usual one."""
    theirs = {name: None for name in os.environ if name in SETTINGS or JOB_VARIABLE.match(name)}
    env = {"PATH": path or os.path.abspath("bin") + ":" + os.environ["PATH"], **env}
    return run_program(command, **{**theirs, **env})


def copy(*paths):
    """Files of the repository into this test's folder."""
    for path in paths:
        write(path, read(os.path.join(ROOT, path)))


def called():
    """What stand-ins were called with, line by line."""
    return read("called.log").decode() if os.path.exists("called.log") else ""


# nvidia-smi: GPUS, how many there are; CAPS: what each prints as its compute capability
GPUS = """i=0
while [ $i -lt ${GPUS:-0} ]; do
    case $* in *compute_cap*) printf '%s\\n' ${CAPS:-9.0} ;; *) echo "GPU $i: H" ;; esac
    i=$((i + 1))
done
[ $i != 0 ]
"""

# ---- quickstart.sh ----

TRAINER = r"""#!/bin/sh
while [ $# -gt 0 ]; do
    case $1 in --output-dir) out=$2 ;; --max-steps) steps=$2 ;; esac
    shift
done
[ "$steps" = 0 ] && { printf ' girl\n\nMore\n---\n boy\n'; exit 0; }
[ /proc/$$/fd/1 -ef /proc/$PPID/fd/1 ] || echo "through a pipe nobody sees its progress"
[ "$MODE" = fails ] && { echo "error: no memory" >&2; exit 3; }
mkdir -p "$out"
echo "s:0 tel:${FIRST:-5.579}" >"$out/main.log"
[ "$MODE" = killed ] && kill -9 $$
[ "$MODE" = interrupted ] && { [ -z "$SAVES" ] || echo >"$out/state_00000007_0000.bin"; exit 0; }
echo "s:$steps tel:${LAST:-1.023}" >>"$out/main.log"
echo "$MODE" >"$out/model_$(printf %08d "$steps").bin"
"""


def quickstart(mode, **env):
    copy("scripts/quickstart.sh")
    for path, text in (("scripts/setup.sh", ""), ("build/stories", 'echo "a story" >"$6"'),
                       ("build/tokenize", 'echo shard >"$3_train.bin"\necho "$3_train.bin: 3 tokens"'),
                       ("build/bigram", "echo 'bigram val loss 2.326 nats'")):
        write(path, "#!/bin/sh\n" + text + "\n")
    write("train_gpt2cpu", TRAINER)
    stand_in("make", '[ "$MODE" != "no build" ]\n')
    stand_in("nvidia-smi", GPUS)
    stand_in("python3", 'echo "python3 $*" >>called.log\n')
    return call(["bash", "scripts/quickstart.sh"], MODE=mode, **env)


def test_quickstart():
    """It ends well, and again; what was there is kept, whatever happens."""
    for mode in ("first", "second", "third"):
        code, out, err = quickstart(mode)
        assert code == 0, err
    assert [read(f"runs/quickstart{n}/model_00001350.bin") for n in (".1", ".2", "")] == \
        [b"first\n", b"second\n", b"third\n"] and len(glob.glob("runs/*")) == 3
    for said in ("dev/data/stories/gpt2/train.bin: 3 tokens", "dev/data/stories/gpt2/held_out.bin: 3 tokens",
                 "make train_gpt2cpu  # trains"):
        assert said in out
    assert "_train" not in out, "the files of its data have their new names"
    assert "nobody sees" not in out, "the trainer's stdout is the script's"
    assert out.splitlines()[-1] == "val loss 5.579 at the start, 1.023 at the end; a bigram model has 2.326"
    assert "plot_log.py runs/quickstart --line 2.326 bigram model\n" in called()
    prompt = "Once there was a little"
    assert read("runs/quickstart/samples.txt").decode() == f"{prompt} girl\n\nMore\n---\n{prompt} boy\n"
    assert quickstart("no build")[0] != 0
    assert read("runs/quickstart/model_00001350.bin") == b"third\n", "the run before is where it was"


@pytest.mark.parametrize("caps, trainer", [("9.0", "train_gpt2cu"), ("7.5", "train_gpt2cpu"),
                                           ("7.5 8.0", "train_gpt2cu"), ("10.0", "train_gpt2cu")])
def test_quickstart_takes_what_works(caps, trainer):
    write("train_gpt2cu", TRAINER)
    stand_in("nvcc")
    code, out, err = quickstart("first", GPUS="1", CAPS=caps)
    assert code == 0 and f"make {trainer}  # trains" in out, err
    assert ("note: this GPU has compute capability 7.5, and 8.0 is needed, so the CPU trains\n" in out) == \
        (caps == "7.5")


@pytest.mark.parametrize("mode, env, expected, said", [
    ("fails", {}, 3, "error: ./train_gpt2cpu "), ("killed", {}, 137, "error: ./train_gpt2cpu "),
    ("interrupted", {}, 1, "hint: what it printed is above"),
    ("interrupted", {"SAVES": "1"}, 1, "hint: ./train_gpt2cpu --resume 1 --output-dir runs/quickstart goes"),
    ("learned nothing", {"LAST": "2.4"}, 1, "error: it should be"),
    ("learned nothing", {"FIRST": "1.9"}, 1, "error: it should be"),
    ("learned nothing", {"LAST": "x"}, 1, "error: it should be")])
def test_quickstart_fails(mode, env, expected, said):
    code, out, err = quickstart(mode, **env)
    learned = mode == "learned nothing"
    assert code == expected and said in err and ("at the end" in out) == learned
    assert learned or "hint: " in err.splitlines()[-1]


# ---- run_*.sh: the recipes ----

RECIPES = sorted(os.path.basename(path) for path in glob.glob(os.path.join(ROOT, "scripts/run_*.sh")))
NUMBERS = {"parameters": r"([\d,]+): (\d+) layers, \d+ heads, C=(\d+), (?:F=(\d+), )?T=(\d+), V=50,257",
           "tokens": r"tokens +([\d,]+) steps x ([\d,]+) = ([\d.]+)e(\d)",
           "warm-up": r"warm-up +(\d+) steps, ([\d.]+)e(\d) tokens", "flop": r"([\d.]+e\d\d)\s*(?:#\s*)?flop"}


@pytest.fixture
def recipes():
    copy("scripts/pretrain.sh", *("scripts/" + name for name in RECIPES))
    write("train_gpt2cu", '#!/bin/sh\n[ $1 != eval ] || echo "questions: 100, 400 rows in 2 batches\n'
          'eval acc_norm 0.250000 +- 0.0433 | acc 0.360000 +- 0.0480"\nfor word; do echo "$word"; done\n')
    write("dev/data/hellaswag/hellaswag_val.bin", "")
    for run in ("m12", "v12", "d12"):
        for name in ("main.log", "model_00000001.bin", "model_00000002.bin"):       # the trainer would write
            write(f"runs/{run}_9min/{name}", run + name)
    stand_in("python3", 'echo "python3 $*" >>called.log\n')
    stand_in("nvidia-smi", GPUS)


def recipe(name, *words, **env):
    """(exit code, {flag: value}, stderr) of a recipe, with one GPU if GPUS does not say another number."""
    code, out, err = call(["bash", "scripts/" + name, *words], **{"GPUS": "1", **env})
    lines = out.partition("== scores\n")[0].splitlines()
    return code, dict(zip(lines[::2], lines[1::2])), err


def shards(folder):
    for part in ("val_000000", "train_000001"):
        write(f"{folder}/x_{part}.bin", "")


def flag_error(flags):
    """What the trainer says against these flags and values. --help comes last: it is reached if all is well.
    A model's longest row is told where it is too short; no memory is taken before."""
    trainer = os.path.join(ROOT, "train_gpt2cpu")
    code, _, err = call([trainer, *(word for pair in flags.items() for word in pair), "--help"])
    if code != 0:
        return err
    _, _, err = call([trainer, "--model", flags["--model"], "--sequence-length", "16777216"])
    return "" if f"longest sequence, {flags['--sequence-length']}\n" in err else err


def check_plan(text, *runs):
    """A speed in a recipe's comment that was not measured is what --plan says of its flags on one GPU, and on
    eight."""
    said = re.findall(r"e9 / ([\d.,]+)K tokens/s( \(measured)?", text)
    assert len(said) == len(runs)
    for (speed, measured), flags in zip(said, runs):
        words = [word for pair in flags.items() if pair[0] != "--resume" for word in pair]
        _, out, err = call([os.path.join(ROOT, "train_gpt2cpu"), *words, "--plan", "H200"])
        planned = re.search(r"^speed: .* (\d+) tok/s", out, re.M)
        assert measured or (speed == f"{float(planned[1]) / 1e3:,.0f}" and "`--plan H200` says" in text), err


def check_arithmetic(text, flags):
    """A recipe's comment says what its flags make."""
    said = {name: re.search(form, text) for name, form in NUMBERS.items()}
    parameters, L, C, F, T, steps, batch, warmup = (
        float((said[name][group] or "0").replace(",", "")) for name, group in
        [("parameters", i) for i in (1, 2, 3, 4, 5)] + [("tokens", 1), ("tokens", 2), ("warm-up", 1)])
    assert parameters == (2 * 50257 * C + C + L * (4 * C * C + 3 * C * F + 2 * C + 2 * 128) if F else
                          12 * L * C * C + (50257 + T) * C + 13 * L * C + 2 * C)
    names = ("--sequence-length", "--max-steps", "--total-batch", "--warmup")
    assert [float(flags[name]) for name in names] == [T, steps, batch, warmup]
    total = steps * batch
    for name, group, tokens in (("tokens", 3, total), ("warm-up", 2, warmup * batch)):
        assert said[name][group] == f"{tokens / 10 ** int(said[name][group + 1]):.2f}"
    assert said["flop"][1] == f"{6 * parameters * total:.1e}".replace("e+", "e")
    times = re.findall(r"([\d.]+e9) / \(?(8 x )?([\d.,]+)K.*? = ([\d.]+) (hours|days)", text)
    assert len(times) == (0 if "9min" in text else 2)
    for tokens, eight, speed, time, unit in times:
        seconds = float(tokens) / (float(speed.replace(",", "")) * 1e3 * (8 if eight else 1))
        wanted = seconds / {"hours": 3600, "days": 86400}[unit]
        assert time == f"{wanted:.{len(time.partition('.')[2])}f}" and float(tokens) == round(total, -7)


@pytest.mark.parametrize("name", RECIPES)
def test_recipe(recipes, name):
    text = read("scripts/" + name).decode()
    code, _, err = recipe(name)
    wanted = re.search(r"hint: (python3 dev/data/get.py (\S+)(?: --shards (\d+))?) ", err)
    assert code == 1 and wanted[1] in text, "without data"
    assert wanted[2] in [d.name for d in get.DATASETS]
    shards("dev/data/" + wanted[2])
    code, flags, err = recipe(name)
    assert code == 0 and flag_error(flags) == ""
    assert flags["--resume"] == "1" and flags["--output-dir"] == "runs/" + name[4:-3]
    assert flags["--evaluate"] == ("0" if "9min" in name else "1") and "--gpus" not in flags
    check_arithmetic(text, flags)
    tokens = float(flags["--max-steps"]) * float(flags["--total-batch"])
    assert tokens <= 1e8 * int(wanted[3] or 1e9), "fewer shards than it trains on"
    if "9min" in name:
        return                                          # one GPU's, and test_nine_minutes looks at the rest
    alone = flags
    code, flags, err = recipe(name, GPUS="8")
    check_plan(text, alone, flags)
    rows = int(flags["--micro-batch"]) * int(flags["--sequence-length"]) * 8
    assert code == 0 and (flags["--gpus"], flags["--zero-stage"]) == ("8", "1")
    assert flag_error(flags) == "" and int(flags["--total-batch"]) % rows == 0


def test_recipes_take_words(recipes):
    assert len(RECIPES) == 8
    name = "run_gpt2_124M.sh"
    shards("elsewhere")
    os.remove("dev/data/hellaswag/hellaswag_val.bin")
    code, flags, err = recipe(name, "--output-dir", "runs/short", data="elsewhere", GPUS="8")
    assert code == 0 and flags["--train-data"] == "elsewhere/*_train_*.bin" and "--evaluate" not in flags
    assert "get.py hellaswag" in err
    code, out, err = call(["bash", "scripts/" + name, "--max-steps=20", "--output-dir", "runs/short"],
                          data="elsewhere", gpus="2")
    words = out.splitlines()
    assert words.count("--output-dir") == 1 and "runs/short" in words and "--max-steps" not in words
    assert "--max-steps=20" in words and words[words.index("--gpus") + 1] == "2"
    _, flags, _ = recipe(name, data="elsewhere", GPUS="2", CAPS="7.5 8.0")
    assert flags["--gpus"] == "2", "those that the program can use"
    for env, said in (({"gpus": "0"}, "gpus=0"), ({"gpus": "two"}, "gpus=two"), ({"GPUS": "0"}, "gpus=0"),
                      ({"CAPS": "7.5"}, "gpus=0")):
        code, _, err = recipe(name, data="elsewhere", **env)
        assert code == 1 and f"error: {said}: " in err and "\nhint: " in err
    os.remove("train_gpt2cu")
    code, _, err = recipe(name, data="elsewhere")
    assert code == 1 and err.endswith("hint: make train_gpt2cu\n")


def test_nine_minutes(recipes):
    """Two passes through English, and minutes by measured ms a step, for both models; then their scores."""
    name = "run_m12_9min.sh"
    text = read("scripts/" + name).decode()
    shards("dev/data/english")
    assert "9 minutes" not in text
    for model, steps, ms, minutes in re.findall(
            r"(one H200|d12) +([\d,]+) (?:steps )?x ([\d.]+) ms \(.*?\) = ([\d.]+) minutes", text):
        env = {"model": "d12"} if model == "d12" else {}
        code, flags, err = recipe(name, **env)
        assert code == 0 and flag_error(flags) == "", err
        assert flags["--max-steps"] == steps.replace(",", "")
        tokens = int(steps.replace(",", "")) * int(flags["--total-batch"])
        assert f"{int(steps.replace(',', '')) * float(ms) / 60e3:.1f}" == minutes and float(minutes) < 9
        assert tokens <= 2 * 133_612_633 and f"{tokens / 1e6:.2f}e6" in text, "no text more than twice"
        assert flags["--output-dir"] == f"runs/{env.get('model', 'm12')}_9min"
        sources = re.findall(r"dev/data/english/english_(\w+)_val_\*.bin:(\d+)", flags["--val-data"])
        assert sources == [("wikipedia", "65"), ("simple", "16"), ("novels", "13"), ("wikinews", "5")]
    scores = b"hellaswag: acc_norm 0.250000 +- 0.0433 | acc 0.360000 +- 0.0480\n"
    files = [f"runs/{model}_9min/{kind}.txt" for model in ("m12", "d12") for kind in ("scores", "untrained")]
    assert [read(path) for path in files] == [scores] * 4
    files = [f"runs/d12_9min/{name}" for name in ("main.log", "model_00000002.bin")]
    assert read("runs/d12_9min/sha256.txt").decode().split() == [
        word for path in files for word in (hashlib.sha256(read(path)).hexdigest(), os.path.basename(path))]
    assert err.count("python3 dev/data/get.py lambada makes it") == 2 and "hf.py export runs/d12" in called()
    code, flags, _ = recipe(name, model="v12")
    assert code == 0 and (flags["--model"], flags["--max-steps"], flag_error(flags)) == ("v12", "4070", "")
    assert "hf.py export runs/v12" not in called() and "plot_log.py runs/v12_9min" in called()
    code, flags, err = recipe(name, gpus="8")
    parts = [flags[flag] for flag in ("--gpus", "--micro-batch", "--val-batches", "--total-batch")]
    assert code == 0 and flag_error(flags) == "" and parts == ["8", "8", "80", "65536"], "rows among the GPUs"
    for env, said in (({"model": "d13"}, "model=d13: m12, v12 or d12"), ({"gpus": "3"}, "gpus=3: 1, 2, 4, "),
                      ({"gpus": "two"}, "gpus=two: 1, 2")):
        code, _, err = recipe(name, **env)
        assert code == 1 and f"error: {said}" in err and "\nhint: " in err


MULTI_NODE = sorted(os.path.basename(path) for path in glob.glob(os.path.join(ROOT, "scripts/multi_node/*")))


@pytest.mark.parametrize("name", MULTI_NODE)
def test_multi_node(recipes, name):
    """The recipe of one host, but for what starts the ranks and how they meet."""
    copy("scripts/multi_node/" + name)
    shards("dev/data/fineweb10B-shards")
    _, alone, _ = recipe("run_gpt2_124M.sh", GPUS="8")
    for starter in ("srun", "mpirun"):
        stand_in(starter, 'while [ "$1" != ./train_gpt2cu ]; do shift; done\nexec "$@"\n')
    code, out, err = call(["bash", "scripts/multi_node/" + name, "--max-steps", "20"], SLURM_SUBMIT_DIR=".",
                          hosts="node1:8,node2:8")
    lines = out.splitlines()
    flags = dict(zip(lines[::2], lines[1::2]))
    assert code == 0 and flag_error(flags) == "", err
    other = {flag for flag in {**alone, **flags} if alone.get(flag) != flags.get(flag)}
    assert other - {"--process-init", "--process-folder"} == {"--gpus", "--micro-batch", "--max-steps"}
    starter = "mpirun --host node1:8,node2:8 --bind-to none" if "mpi" in name else "srun --kill-on-bad-exit=1"
    assert f"+ exec {starter} ./train_gpt2cu " in err
    assert int(flags["--total-batch"]) == 16 * int(flags["--micro-batch"]) * int(flags["--sequence-length"])


# ---- lint ----

LINTED = {
    "good.py": ("import os\nprint(os.sep)\n", None),
    "undefined.py": ("print(tempfile.gettempdir())\n", "undefined name 'tempfile'"),
    "no_python.py": ("print(\n", "was never closed"),
    "tab.py": ("if 1:\n\tprint()\n", "a tab"),
    "docs/good.md": ("# What's `it`?\n[x](#whats-it) [y](good.md) [z](https://none)\n", None),
    "docs/file.md": ("[x](none.md)\n", "there is no docs/none.md"),
    "docs/heading.md": ("[x](good.md#none)\n", "docs/good.md has no heading #none"),
    "docs/long.md": ("| " + "x" * 111 + "\n" + "x" * 111 + "\n", "long.md:2: 111 columns"),
    "launch.cu": ("kernel<<<1, f(2, 3), 0>>>();\nkernel<<<1, 2, 0, stream>>>();\n", "without a stream"),
}


@pytest.mark.skipif(not shutil.which("git"), reason="no git")
def test_lint():
    pytest.importorskip("pyflakes")
    copy("dev/test/lint.py", "dev/venv_python.py")
    for name, (text, _) in LINTED.items():
        write(name, text)
    subprocess.run(["git", "init", "-q"], check=True)
    code, out, err = call([sys.executable, "dev/test/lint.py"])
    failed = sum(wanted is not None for _, wanted in LINTED.values())
    assert code == 1 and f"{failed} failed, 0 skipped" in out
    for name, (_, wanted) in LINTED.items():
        said = [line for line in out.splitlines() if name + ":" in line]
        assert wanted in said[0] if wanted else not said


# ---- setup.sh, and make test on a bare machine ----

TOOLS = ("bash sh env sed awk cat tail head mktemp rm mkdir dirname chmod ln cmp tr sort uname grep nproc "
         "true sleep").split()
LOG = 'echo "${0##*/} $*" >>called.log\n'
PYTHON = 'case "$*" in *"import "*) ! echo "$*" | grep -qE "${LACKS:-nothing}" ;; *) ' + LOG.strip() + \
         '\n[ "$*" != "-m venv .venv" ] || { mkdir -p .venv/bin; ln -sf ../../bin/pip .venv/bin; } ;; esac\n'


def bare_machine(make=None):
    """PATH of a machine without compiler; apt-get brings one. make: what `make` says; None: it is the real"""
    copy("scripts/setup.sh", "dev/requirements.txt", "Makefile")
    os.makedirs("bin", exist_ok=True)
    for tool in TOOLS + (["make"] if make is None else []):
        if shutil.which(tool) and not os.path.exists("bin/" + tool):
            os.symlink(shutil.which(tool), "bin/" + tool)
    if make is not None:
        stand_in("make", f"echo '{make}'\n")
        stand_in("mpirun")
    stand_in("id", "echo ${ID:-0}\n")
    stand_in("nvidia-smi", GPUS)
    stand_in("git")
    stand_in("python3", PYTHON)
    stand_in("pip", LOG + '[ -z "$OFFLINE" ]\n')
    stand_in("apt-get", LOG + 'case "$*" in *g++*) echo "#!/bin/sh" >bin/g++; chmod +x bin/g++ ;; esac\n')
    return os.path.abspath("bin")


MPI, CLANG = "libopenmpi-dev openmpi-bin", "recommends clang libclang-rt-dev\n"     # apart: other releases
SYSTEM = "apt-get install"
PIP, BOTH = "pip install -r dev/requirements.txt", "-DUSE_MPI -DUSE_NCCL"


SETUPS = [
    ("tests", "", {}, [MPI, CLANG], [PIP], ""),
    ("tests", "", {"GPUS": "2"}, [MPI], [], "libnccl-dev"),
    ("tests", "", {"GPUS": "1"}, [MPI], [], ""),
    ("", None, {"GPUS": "2", "CAPS": "7.5"}, [], [], ""),
    ("tests", BOTH, {"GPUS": "2"}, [CLANG], [MPI], ""),
    ("", "", {"GPUS": "2"}, [], [MPI, "clang", "pip"], "libnccl-dev"),
    ("tests", BOTH, {"LACKS": "pytest"}, [PIP], [], ""),
    ("", BOTH, {"LACKS": "pytest"}, [], ["pip"], ""),
    ("", BOTH, {"LACKS": "numpy"}, [PIP], [], ""),
    ("tests", BOTH, {"LACKS": "pytest", "OFFLINE": "1"}, [PIP], [], "warning: not all Python packages"),
    *[(word, BOTH, env, calls, [PIP], said)
      for word, calls in (("data", ["pip install pyarrow=="]), ("tensorboard", ["pip install tensorboard=="]))
      for env, calls, said in (({"LACKS": "arrow|tens"}, calls, ""), ({}, [], ""),
                               ({"LACKS": "arrow|tens", "OFFLINE": "1"}, calls, "error: no"))],
    ("", BOTH, {"LACKS": "arrow|tens"}, [], ["pip"], ""),
    ("quick", "", {"LACKS": "pytest"}, [PIP], [MPI, "clang"], ""),
    ("tensorboard", "", {"LACKS": "numpy|tens"}, ["pip install tensorboard=="], [PIP, SYSTEM], "")]


@pytest.mark.parametrize("words, make, env, calls, never, said, venv", [
    (*row, venv) for row in SETUPS for venv in ([False, True] if "LACKS" in row[2] else [False])])
def test_setup(words, make, env, calls, never, said, venv):
    """What is called, and said. Only where an extra is asked for and cannot be had, that is an error; a .venv
    that was there stays."""
    path = bare_machine(make)
    stand_in("g++")
    if venv:
        stand_in("../.venv/bin/python", PYTHON)
        stand_in("../.venv/bin/pip", LOG + '[ -z "$OFFLINE" ]\n')
    code, out, err = call(["scripts/setup.sh", *words.split()], path, **env)
    assert code == (1 if said.startswith("error") else 0)
    assert all(text in called() for text in calls) and not any(text in called() for text in never)
    assert called().count("apt-get update") == ("apt-get" in called())
    assert out.count("installing (a dot every five seconds): ") == len(re.findall(" install ", called()))
    assert said in err and ("libnccl" in said or "libnccl" not in err)
    assert ("hint: " in err) == ("OFFLINE" in env)
    assert ("\nnext: " in "\n" + out) == (code == 0 and words not in ("tests", "quick")), "what comes next"
    assert os.path.exists(".venv") == (venv or "OFFLINE" not in env and "pip" in called() or code == 1)


def test_pins():
    """Every Python package that is installed has one version, the same wherever it is named."""
    setup, listed = (read(os.path.join(ROOT, name)).decode()
                     for name in ("scripts/setup.sh", "dev/requirements.txt"))
    wanted = [line.partition(";")[0] for line in listed.splitlines() if line[0] != "#"]
    for quoted, plain in re.findall(r"\bextra=(?:'([^']+)'|(\w\S*))", setup):
        wanted += (quoted or plain).split()
    pins = {}
    for name, version in (re.fullmatch(r"([\w-]+)==([\d.]+)", text).groups() for text in wanted):
        pins.setdefault(name, set()).add(version)
    assert {"huggingface_hub", "pyarrow", "tensorboard", "tokenizers", "pytest"} <= pins.keys()
    assert {name for name, versions in pins.items() if len(versions) > 1} == {"numpy"}  # by Python


@pytest.mark.parametrize("command", ["scripts/setup.sh", "make test"])
def test_setup_as_user_says_the_command(command):
    path = bare_machine()
    code, out, err = call(command.split(), path, ID="1000")
    assert code != 0 and "g++" in err and "sudo sh -c 'apt-get update && apt-get install" in err
    assert "No such file" not in out + err and called() == "", "it installs without being root, or goes on"


@pytest.mark.parametrize("goal", ["test", "test-gpu", "test-all", "test without a source"])
def test_make_test_installs_first(goal, monkeypatch):
    monkeypatch.setenv("CXX", "none")                       # as some machines have one
    names = [f"{name}_gpt2.cu" for name in ("train", "test", "profile")] + ["dev/tools/checkpoint.cpp"]
    names += [f"dev/data/{name}.cpp" for name in ("tokenize", "stories", "bigram")]
    names += [f"dev/test/test_{name}.cpp" for name in ("comm", "dataloader", "host", "checkpoints")]
    whole = "without" not in goal
    for name in names:
        if whole or "checkpoint.cpp" not in name:
            write(name, "")
    code, out, err = call(["make", "-s", goal.split()[0], "NVCC=true"], bare_machine())
    lines = called().splitlines()
    installs = [i for i, line in enumerate(lines) if "install" in line and "g++" in line]
    runs = [i for i, line in enumerate(lines) if line.startswith("python3 -m pytest")]
    if whole:
        assert code == 0 and "No such file" not in out + err and "not found" not in out + err
        assert installs and runs and installs[0] < runs[0] and MPI in called()
        said = [line.split(" ")[0].strip(":;") for line in out.splitlines()]
        assert said.index("installing") < said.index("building") < said.index("testing")
        assert "building train_gpt2cpu" in out or goal == "test-gpu"
    else:
        assert code != 0 and out.endswith("\n0 passed, 1 failed, 0 skipped\n") and not runs


def test_make_says_what_is_missing():
    """No compiler; llm.c's names of programs."""
    copy("Makefile")
    write("train_gpt2.cu", "")
    for words, *said in ((["train_gpt2cpu", "CXX=none"], "no none: scripts/setup.sh"),
                         (["build/tokenize", "CXX=none"], "no none: scripts/setup.sh"),
                         (["train_gpt2"], "no target train_gpt2: make train_gpt2cu", "make train_gpt2cpu"),
                         (["train_gpt2fp32cu"], "no target train_gpt2fp32cu: make", "PRECISION=FP32")):
        write("dev/data/tokenize.cpp", "")
        code, _, err = call(["make", *words])
        assert code == 2 and not [text for text in said if text not in err] and err.count("\n") == 1, err


# ---- Makefile: what it finds on a machine ----

def found_machine(mpi="", nccl=""):
    """A folder with a trainer and stand-ins for mpicc and nvcc; mpi, nccl: what stands in their headers."""
    copy("Makefile")
    here = os.getcwd()
    write("train_gpt2.cu", "")
    write("mpi/mpi.h", "static inline int MPI_Init(int*, char***) { return 0; }\n" + mpi)
    write("cuda/include/nccl.h", "static inline int ncclMemAlloc(void**, int) { return 0; }\n" + nccl)
    write("cuda/lib/libnccl.a", "!<arch>\n")
    stand_in("mpicc", '[ "$1" = -show ] && '
             f'echo "cc -O9 -flto=auto -I{here}/mpi -L{here}/mpi -Wl,-rpath,/there -pthread"\n')
    stand_in("nvcc", f"""case $1 in
    -dryrun) printf '#$ INCLUDES="-I{here}/cuda/include"  \\n#$ LIBRARIES=  "-L{here}/cuda/lib"\\n' >&2 ;;
    --list-gpu-code) printf 'sm_%s\\n' 70 75 80 90 120 ;;
esac
""")
    stand_in("nvidia-smi", "exit 1\n")


def made(*words):
    """(exit code, the lines that would make trainers, in the order of `words`, stderr)"""
    nvcc = "NVCC=" + os.path.abspath("bin/nvcc")
    code, out, err = call(["make", "-n", "OPENMP=", "OPENBLAS=", nvcc, *words])
    lines = out.replace("\\\n", "").split("\n")
    return code, [line for line in lines if "train_gpt2.cu" in line and " -o " in line], err


def libraries(line):
    """What it would use, both to compile and to link."""
    compiled = re.findall("-DUSE_(MPI|NCCL)", line)
    assert ("NCCL" in compiled, "MPI" in compiled) == ("-lnccl" in line, "-rpath" in line)
    return " ".join(sorted(compiled))


def test_make_finds_mpi_and_nccl():
    found_machine()
    here, both = os.getcwd(), "MPI NCCL"
    targets = ["train_gpt2cpu", "train_gpt2cu", "build/check/train_gpt2.BF16", "build/ptx/train_gpt2.FP32",
               "build/plain/train_gpt2cpu", "build/plain/train_gpt2.BF16"]
    code, lines, err = made(*targets)
    assert (code, [libraries(line) for line in lines]) == (0, ["MPI", both, both, both, "", ""]), err
    assert f"-I{here}/mpi " in lines[0] and lines[0].endswith(f"-L{here}/mpi -Wl,-rpath,/there")
    assert not any(word in lines[0] for word in ("-flto", "-O9")), "what mpicc would compile with besides"
    assert all(line.endswith(f"-lnccl -L{here}/mpi -Xlinker -rpath,/there") for line in lines[1:4])
    assert made(*targets, "MPI=1", "NCCL=1") == (0, lines, "")
    for words, wanted in ((["MPI=0"], ["", "NCCL"]), (["MPI=0", "NCCL=0"], ["", ""])):
        assert [libraries(line) for line in made("train_gpt2cpu", "train_gpt2cu", *words)[1]] == wanted


def test_make_without_mpi_and_nccl():
    found_machine(mpi="#error broken\n", nccl="#error broken\n")
    code, lines, err = made("train_gpt2cpu", "train_gpt2cu")
    assert (code, [libraries(line) for line in lines], err) == (0, ["", ""], "")
    for words, said in ((["MPI=1"], "MPI=1, but a program with MPI does not .* install libopenmpi-dev"),
                        (["NCCL=1"], "NCCL=1, but a program with NCCL .* install libnccl-dev"),
                        (["MPI=yes"], "MPI=yes: choose one of auto 0 1"),
                        (["NCCL=yes"], "NCCL=yes: choose one of auto 0 1"),
                        (["NVCC="], "no nvcc: install the CUDA toolkit, .* make train_gpt2cpu")):
        code, _, err = made("train_gpt2cu", *words)
        assert code == 2 and re.fullmatch(rf"Makefile:\d+: \*\*\* {said}\.  Stop\.\n", err), err
    assert made("train_gpt2cpu", "NCCL=1")[0] == 0, "the CPU program has no use for NCCL"
    stand_in("mpicc", "exit 1\n")                           # as where there is none
    stand_in("nvcc", "[ $1 != -dryrun ] || exit 1\necho sm_80\n")
    code, lines, err = made("train_gpt2cpu", "train_gpt2cu", "ARCH=80")
    assert (code, err) == (0, "") and not any("MPI" in libraries(line) for line in lines)
    assert "NCCL=auto|0|1 MPI=auto|0|1" in call(["make", "help"])[1]


@pytest.mark.parametrize("caps, words, codes", [
    ("9.0", "", "sm_90a"), ("8.0", "", "sm_80"), ("8.0 9.0", "", "sm_80 sm_90a"), ("7.5 8.0", "", "sm_80"),
    ("13.7", "", "sm_90a compute_80"), ("8.0 13.7", "", "sm_80 compute_80"), ("", "", "sm_90a compute_80"),
    ("NVIDIA-SMI has failed", "", "sm_90a compute_80"), ("7.5", "ARCH=90", "sm_90a"),
    ("7.5", "", "this GPU has compute capability 7.5, and 8.0 is needed: make train_gpt2cpu"),
    ("9.0", "ARCH=70", "ARCH=70: choose auto or 80 90 120 90a"),
    ("", "ARCH=75", "ARCH=75: choose auto or 80 90 120 90a")])
def test_make_finds_gpus(caps, words, codes):
    """What the CUDA program is compiled for; a GPU below 8.0 counts as none, and alone it ends make."""
    found_machine()
    stand_in("nvidia-smi", f"printf '%s\\n' {caps}\n" if caps else "exit 1\n")
    code, lines, err = made("train_gpt2cu", "NCCL=0", "MPI=0", *words.split())
    if code == 0:
        assert " ".join(re.findall(r"code=(\w+)", lines[0])) == codes
    else:
        assert re.fullmatch(rf"Makefile:\d+: \*\*\* {codes}\.  Stop\.\n", err), err
    # tests are compiled for the same GPUs, for two kinds if nvcc does not know one; nvcc looks at both
    write("test_gpt2.cu", "")
    nothing = "OPENMP= OPENBLAS= has_fuzzer= NCCL=0 MPI=0".split()
    _, out, _ = call(["make", "-kn", "built-test", *nothing, "NVCC=" + os.path.abspath("bin/nvcc")])
    two = 'sm_90a \\"sm_80,compute_80\\"'
    built = [(path, " ".join(re.findall(r"code=(\S+)", line)))
             for line in out.split("\n") for path in re.findall(r" -o build/(\S+)\.BF16 ", line)]
    known = codes if code == 0 and "compute" not in codes else "sm_90a" if caps == "9.0" else two
    usable = re.search(r"(^| )([89]|1\d)\.\d", caps)
    assert sorted(built) == [(f"check/{name}_gpt2", known) for name in ("test", "train") if usable] + [
        ("look/check/train_gpt2", two)]


def test_make_plot():
    """Which runs make hands on, and how: blanks and quotes in a name are the name's."""
    copy("Makefile")
    stand_in("python3", 'printf "<%s>" "$@"\n')
    for words, wanted in ((["RUN=it's a;b", "PNG=c d.png"], "<it's a;b><-o><c d.png>"),
                          (["RUNS=a b"], "<a><b>")):
        assert call(["make", "plot", *words])[:2] == (0, "<dev/data/plot_log.py>" + wanted)
    code, out, err = call(["make", "plot"])
    assert code == 2 and "RUN=dir" in err and "<" not in out


def test_plot_takes_the_venv():
    copy("dev/data/plot_log.py", "dev/outputs.py", "dev/venv_python.py")
    write("runs/mine/main.log", "s:0 tel:5.5\ns:1 trl:5.4 lr:1e-3 norm:2\n")
    write("none/matplotlib.py", "raise ImportError\n")
    plot = [sys.executable, "dev/data/plot_log.py", "runs/mine"]
    code, _, err = call(plot, PYTHONPATH=os.path.abspath("none"))
    assert code == 1 and "scripts/setup.sh" in err
    write(".venv/bin/python", '#!/bin/sh\necho "venv $*"\n')
    code, out, err = call(plot, PYTHONPATH=os.path.abspath("none"))
    assert (code, out) == (0, "venv dev/data/plot_log.py runs/mine\n")


def test_what_readme_writes_is_ignored():
    if not shutil.which("git") or call(["git", "-C", ROOT, "rev-parse"])[0] != 0:
        pytest.skip("git does not know this folder")
    paths = ["data/mine/mine_train_000001.bin", "both.png", "runs/d12", "d12-hf/config.json", "gpt2_124M.bin",
             "models/gpt2/source.json"]
    assert call(["git", "-C", ROOT, "check-ignore", *paths])[1].split() == paths
