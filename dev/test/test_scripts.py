"""The scripts as a user meets them, with stand-ins for what takes long or changes the machine: quickstart.sh,
the recipes run_*.sh, setup.sh, `make test` on a bare machine, plot_log.py.

Standard library only. Every test works in a folder of its own; nothing is installed.
"""
import glob
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time

import pytest

from checks import ROOT, check, has_module, session_stats, skip
import break_all
import check_docs

sys.path.insert(1, os.path.join(ROOT, "dev", "data"))
import get                                          # noqa: E402

LIMIT_S = 600                                       # only a hang meets it


@pytest.fixture(autouse=True)
def in_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(path, text, executable=False):
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)
    os.chmod(path, 0o755 if executable else 0o644)


def read(path):
    with open(path, encoding="utf-8") as f:
        return f.read()


def call(command, path=None, **env):
    """(exit code, stdout, stderr); path: what PATH is, or stands before the usual one."""
    env = {**os.environ, **env}
    for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL"):
        env.pop(name, None)                         # of the make that may have started this
    if path:
        env["PATH"] = path
    p = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=env, check=False,
                       stdin=subprocess.DEVNULL)
    return p.returncode, p.stdout, p.stderr


def copy(*paths):
    """Files of the repository into this test's folder."""
    for path in paths:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        shutil.copy(os.path.join(ROOT, path), path)


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
echo "s:0 tel:5.579" >"$out/main.log"
[ "$MODE" = killed ] && kill -9 $$
[ "$MODE" = interrupted ] && exit 0
echo "s:$steps tel:${LAST:-1.023}" >>"$out/main.log"
echo "$MARK" >"$out/model_$(printf %08d "$steps").bin"
"""
TOKENIZE = '#!/bin/sh\necho shard >"$3_train.bin"\necho "$3_train.bin: 3 tokens"\n'
STORIES = '#!/bin/sh\necho "a story" >"$6"\n'


def quickstart_tree():
    copy("scripts/quickstart.sh", "dev/data/plot_log.py", "dev/venv_python.py")
    write("scripts/setup.sh", "#!/bin/sh\n", True)
    write("train_gpt2cpu", TRAINER, True)
    write("build/tokenize", TOKENIZE, True)
    write("build/stories", STORIES, True)
    write("build/bigram", "#!/bin/sh\necho 'bigram val loss 2.326 nats'\n", True)
    write("bin/make", '#!/bin/sh\n[ "$MODE" != "no build" ]\n', True)
    write("bin/nvidia-smi", "#!/bin/sh\nexit 1\n", True)        # a machine without a GPU


def quickstart(mode, **env):
    path = os.path.abspath("bin") + ":" + os.environ["PATH"]
    return call(["bash", "scripts/quickstart.sh"], path, MODE=mode, **env)


def test_quickstart_ends_well():
    quickstart_tree()
    code, out, err = quickstart("works", MARK="first")
    check(code == 0, f"exit code {code}: {err}")
    val, last = out.splitlines()[-2:]
    data = ("train", "held_out")
    check([f"dev/data/stories/gpt2/{part}.bin: 3 tokens" in out for part in data] == [True, True] and
          "_train" not in out, f"it names the files of its data: {out}")
    check("make train_gpt2cpu\n" in out, f"it says what it builds: {out}")
    check("nobody sees" not in out, "the trainer's stdout is the script's")
    check(val == "val loss 5.579 at the start, 1.023 at the end; a bigram model has 2.326", f"losses: {val}")
    prompt = "Once there was a little"
    samples = read("runs/quickstart/samples.txt")
    check(samples == f"{prompt} girl\n\nMore\n---\n{prompt} boy\n", f"samples: {samples}")
    for word in ("runs/quickstart: ", "`./train_gpt2cpu -e runs/quickstart -x 0`", "--prompt",
                 "`python3 dev/data/plot_log.py runs/quickstart`"):
        check(word in last, f"the last line lacks {word}: {last}")


def test_quickstart_twice_loses_nothing():
    quickstart_tree()
    for mark in ("first", "second", "third"):
        code, _, err = quickstart("works", MARK=mark)
        check(code == 0, f"{mark} run: exit code {code}: {err}")
    model = "model_00001350.bin"
    marks = [read(path).strip() for path in
             (f"runs/quickstart.1/{model}", f"runs/quickstart.2/{model}", f"runs/quickstart/{model}")
             if os.path.exists(path)]
    check(marks == ["first", "second", "third"], f"the three runs' models: {marks}")


def test_quickstart_tells_of_failure():
    for mode, expected in (("fails", 3), ("killed", 137), ("interrupted", 1)):
        shutil.rmtree("runs", ignore_errors=True)
        quickstart_tree()
        code, out, err = quickstart(mode)
        check(code == expected, f"{mode}: exit code {code}, expected {expected}")
        check("at the end" not in out, f"{mode}: speaks of a loss at the end: {out[-100:]!r}")
        check("== samples" not in out, f"{mode}: goes on to sample")
        last = err.rstrip().split("\n")[-2:]        # before them the trainer's own, or the shell's of a kill
        check(last[0].startswith("error: ./train_gpt2cpu ") and last[-1].startswith("hint: "),
              f"{mode}: {err!r}")


def test_quickstart_keeps_the_run_if_it_cannot_build():
    quickstart_tree()
    quickstart("works", MARK="first")
    code, _, _ = quickstart("no build")
    check(code != 0, "exit code 0 without a build")
    check(read("runs/quickstart/model_00001350.bin") == "first\n", "the run before is where it was")


def test_quickstart_checks_its_promise():
    quickstart_tree()
    code, out, _ = quickstart("works", LAST="5.1")
    check(code == 1 and "5.100 at the end" in out, f"nothing learned: exit code {code}")


# ---- run_*.sh: the recipes ----

GPU_TRAINER = '#!/bin/sh\nfor word; do echo "$word"; done\n'
RECIPES = sorted(os.path.basename(path) for path in glob.glob(os.path.join(ROOT, "scripts/run_*.sh")))


def recipe(name, *words, gpus=1, **env):
    """(exit code, {flag: value}, stderr) of a recipe where there are so many GPUs, and a stand-in trainer."""
    write("bin/nvidia-smi", "#!/bin/sh\n" + "".join(f"echo 'GPU {i}: H'\n" for i in range(gpus)), True)
    path = os.path.abspath("bin") + ":" + os.environ["PATH"]
    code, out, err = call(["bash", "scripts/" + name, *words], path, **env)
    lines = out.splitlines()
    return code, dict(zip(lines[::2], lines[1::2])), err


def recipes_tree():
    copy("scripts/pretrain.sh", *("scripts/" + name for name in RECIPES))
    write("train_gpt2cu", GPU_TRAINER, True)
    write("dev/data/hellaswag/hellaswag_val.bin", "")


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


def arithmetic(text, flags):
    """What is wrong in a recipe's comment, from its flags."""
    said = {name: re.search(form, text) for name, form in {
        "parameters": r"([\d,]+): (\d+) layers, \d+ heads, C=(\d+), T=(\d+), V=50,257",
        "tokens": r"tokens +([\d,]+) steps x ([\d,]+) = ([\d.]+e9)",
        "warm-up": r"warm-up +(\d+) steps, ([\d.]+e9) tokens",
        "flop": r"([\d.]+e\d\d)\s*(?:#\s*)?flop"}.items()}
    if None in said.values():
        return f"there is no {[name for name in said if not said[name]]}"

    def number(name, group):
        return float(said[name][group].replace(",", ""))
    parameters, L, C, T = (number("parameters", i) for i in (1, 2, 3, 4))
    batch = float(flags["--total-batch"])
    total = float(flags["--max-steps"]) * batch
    facts = {"parameters": parameters == 12 * L * C * C + (50257 + T) * C + 13 * L * C + 2 * C,
             "T": T == float(flags["--sequence-length"]),
             "steps": said["tokens"][1].replace(",", "") == flags["--max-steps"],
             "batch": number("tokens", 2) == batch,
             "tokens": said["tokens"][3] == f"{total / 1e9:.2f}e9",
             "warm-up": said["warm-up"][1] == flags["--warmup"],
             "warm-up's tokens": said["warm-up"][2] == f"{number('warm-up', 1) * batch / 1e9:.2f}e9",
             "flop": said["flop"][1] == f"{6 * parameters * total:.1e}".replace("e+", "e")}
    times = re.findall(r"([\d.]+e9) / \(?(?:8 x )?([\d.,]+)K.*? = ([\d.]+) (hours|days)", text)
    for tokens, speed, time_, unit in times:
        gpus = 8 if f"8 x {speed}K" in text else 1
        seconds = float(tokens) / (float(speed.replace(",", "")) * 1e3 * gpus)
        wanted = seconds / {"hours": 3600, "days": 86400}[unit]
        digits = len(time_.partition(".")[2])
        facts[f"{time_} {unit}"] = time_ == f"{wanted:.{digits}f}" and float(tokens) == round(total, -7)
    facts["two times"] = len(times) == 2
    return ", ".join(name for name, right in facts.items() if not right)


def test_recipes_say_what_they_do():
    recipes_tree()
    check(len(RECIPES) == 5, f"recipes: {RECIPES}")
    for name in RECIPES:
        text = read("scripts/" + name)
        shutil.rmtree("dev/data/fineweb100B-shards", ignore_errors=True)        # several recipes'
        code, _, err = recipe(name)
        wanted = re.search(r"hint: (python3 dev/data/get.py (\S+)(?: --shards (\d+))?) ", err)
        check(code == 1 and wanted and wanted[1] in text, f"{name} without data: {code}, {err}")
        known = {d.name: d for d in get.DATASETS}.get(wanted[2])
        check(known is not None, f"{name}: get.py does not know {wanted[2]}")
        shards("dev/data/" + wanted[2])
        code, flags, err = recipe(name)
        check(code == 0 and flag_error(flags) == "", f"{name}: {code}, {flag_error(flags)}")
        check(flags["--resume"] == "1" and flags["--output-dir"] == "runs/" + name[4:-3] and
              flags["--evaluate"] == "1" and "--gpus" not in flags, f"{name}: {flags}")
        check(arithmetic(text, flags) == "", f"{name}: {arithmetic(text, flags)}")
        tokens = float(flags["--max-steps"]) * float(flags["--total-batch"])
        check(tokens <= 1e8 * int(wanted[3] or 1e9), f"{name}: fewer shards than it trains on")
        code, flags, err = recipe(name, gpus=8)
        rows = int(flags["--micro-batch"]) * int(flags["--sequence-length"]) * 8
        check(code == 0 and flag_error(flags) == "" and flags["--gpus"] == "8" and
              flags["--zero-stage"] == "1" and int(flags["--total-batch"]) % rows == 0, f"{name}: {flags}")


def test_recipes_take_words():
    recipes_tree()
    name = "run_gpt2_124M.sh"
    shards("elsewhere")
    os.remove("dev/data/hellaswag/hellaswag_val.bin")
    code, flags, err = recipe(name, "--output-dir", "runs/short", "--log-every", "5", gpus=8,
                              data="elsewhere")
    check(code == 0 and flags["--train-data"] == "elsewhere/*_train_*.bin" and "--evaluate" not in flags and
          "get.py hellaswag" in err, f"{code}, {flags}, {err}")
    code, out, err = call(["bash", "scripts/" + name, "--max-steps=20", "--output-dir", "runs/short"],
                          data="elsewhere", gpus="4")
    words = out.splitlines()
    check(words.count("--output-dir") == 1 and "runs/short" in words and "--max-steps" not in words and
          "--max-steps=20" in words and words[words.index("--gpus") + 1] == "4", f"{words}{err}")
    for gpus in ("0", "two"):
        code, _, err = call(["bash", "scripts/" + name], data="elsewhere", gpus=gpus)
        check(code == 1 and f"error: gpus={gpus}: " in err and "\nhint: " in err, f"{gpus}: {code}, {err}")
    code, _, err = recipe(name, gpus=0, data="elsewhere")
    check(code == 1 and "error: gpus=0: " in err, f"no GPU: {code}, {err}")
    os.remove("train_gpt2cu")
    code, _, err = recipe(name, data="elsewhere")
    check(code == 1 and err.endswith("hint: make train_gpt2cu\n"), f"no program: {code}, {err}")


# ---- lint ----
LINTED = {
    "good.py": ("import os\nprint(os.sep)\n", ""),
    "undefined.py": ("print(tempfile.gettempdir())\n", "undefined name 'tempfile'"),
    "star.py": ("from os import *\nprint(sep)\n", "unable to detect undefined names"),
    "unused.py": ("import os\n", "'os' imported but unused"),
    "no_python.py": ("print(\n", "was never closed"),
    "tab.py": ("if 1:\n\tprint()\n", "a tab"),
    "launch.cu": ("kernel<<<1, f(2, 3), 0>>>();\nkernel<<<1, 2, 0, stream>>>();\n", "without a stream"),
}


def test_lint():
    if not has_module("pyflakes"):
        skip(len(LINTED) + 1, "no pyflakes")
        return
    copy("dev/test/lint.py", "dev/venv_python.py")
    for name, (text, _) in LINTED.items():
        write(name, text)
    subprocess.run(["git", "init", "-q"], check=True)
    code, out, err = call([sys.executable, "dev/test/lint.py"])
    check(code == 1 and f"{len(LINTED) - 1} failed, 0 skipped" in out, f"exit code {code}: {out}{err}")
    for name, (_, wanted) in LINTED.items():
        said = [line for line in out.splitlines() if name + ":" in line]
        check(wanted in said[0] if wanted and said else not wanted and not said, f"{name}: {said}")


# ---- setup.sh, and make test on a bare machine ----

TOOLS = ("bash sh env sed awk cat tail head mktemp rm mkdir dirname chmod ln make cmp tr sort uname grep "
         "nproc true").split()


def bare_machine(root):
    """PATH of a machine without compiler; apt-get brings one."""
    for tool in TOOLS:
        if shutil.which(tool):
            os.makedirs("bin", exist_ok=True)
            os.symlink(shutil.which(tool), "bin/" + tool)
    write("bin/id", f"#!/bin/sh\necho {0 if root else 1000}\n", True)
    write("bin/python3", '#!/bin/sh\necho "python3 $*" >>order.log\n', True)
    write("bin/git", "#!/bin/sh\n", True)
    write("bin/apt-get", """#!/bin/sh
echo "apt-get $*" >>order.log
case "$*" in *g++*) printf '#!/bin/sh\\n' >bin/g++; chmod +x bin/g++ ;; esac
""", True)
    return os.path.abspath("bin")


def bare_tree():
    copy("scripts/setup.sh", "dev/requirements.txt", "Makefile")
    sources = [f"{name}_gpt2.cu" for name in ("train", "test", "profile")]
    sources += [f"dev/data/{name}.cpp" for name in ("tokenize", "stories", "bigram")]
    sources += [f"dev/test/test_{name}.cpp" for name in ("comm", "dataloader", "host", "checkpoints")]
    for name in sources + ["dev/tools/checkpoint.cpp"]:
        write(name, "")


def order():
    """What was called, line by line."""
    return read("order.log") if os.path.exists("order.log") else ""


def test_setup_as_user_says_the_command():
    copy("scripts/setup.sh", "dev/requirements.txt")
    code, out, err = call(["scripts/setup.sh"], bare_machine(root=False))
    check(code == 1 and "g++" in err and "sudo sh -c 'apt-get update && apt-get install" in err,
          f"exit code {code}, {out}{err}")
    check("apt-get" not in order(), "installs without being root")


def test_make_test_installs_first():
    start = os.getcwd()
    for goal in ("test", "test-gpu", "test-all"):
        os.makedirs(os.path.join(start, goal))
        os.chdir(os.path.join(start, goal))
        bare_tree()
        code, out, err = call(["make", goal, "NVCC=true"], bare_machine(root=True))
        said = out + err
        check(code == 0 and "No such file" not in said and "not found" not in said, f"{goal}: {code}, {said}")
        lines = order().splitlines()
        installs = [i for i, line in enumerate(lines) if "install" in line and "g++" in line]
        runs = [i for i, line in enumerate(lines) if line.startswith("python3 -m pytest")]
        check(installs and runs and installs[0] < runs[0], f"{goal}: not installed, then run: {lines}")
        check("libopenmpi-dev openmpi-bin" in order(), f"{goal}: without MPI: {lines}")
        check(any("install" in line and line.endswith(" clang libclang-rt-dev") for line in lines),
              f"{goal}: without clang, or it together with what any release has: {lines}")


def test_make_test_as_user_says_the_command():
    bare_tree()
    code, out, err = call(["make", "test"], bare_machine(root=False))
    check(code != 0 and "sudo sh -c" in err and "No such file" not in out + err, f"{code}: {out}{err}")
    check("-m pytest" not in order(), "runs tests without a compiler")


def test_make_test_without_a_build():
    bare_tree()
    os.unlink("dev/tools/checkpoint.cpp")
    code, out, _ = call(["make", "-s", "test", "NVCC=true"], bare_machine(root=True))
    check(code != 0 and out.endswith("\n0 passed, 1 failed, 0 skipped\n"), f"{code}: {out}")
    check("-m pytest" not in order(), "runs tests without their programs")


# ---- Makefile: what it finds on a machine ----

def found_machine(mpi="", nccl=""):
    """A folder with a trainer and stand-ins for mpicc and nvcc; mpi, nccl: what stands in their headers."""
    copy("Makefile")
    here = os.getcwd()
    write("train_gpt2.cu", "")
    write("mpi/mpi.h", "static inline int MPI_Init(int*, char***) { return 0; }\n" + mpi)
    write("cuda/include/nccl.h", "static inline int ncclMemAlloc(void**, int) { return 0; }\n" + nccl)
    write("cuda/lib/libnccl.a", "!<arch>\n")
    write("bin/mpicc", f"""#!/bin/sh
[ "$1" = -show ] && echo "cc -O9 -flto=auto -I{here}/mpi -L{here}/mpi -Wl,-rpath,/there -pthread"
""", True)
    write("bin/nvcc", f"""#!/bin/sh
case $1 in
    -dryrun) printf '#$ INCLUDES="-I{here}/cuda/include"  \\n#$ LIBRARIES=  "-L{here}/cuda/lib"\\n' >&2 ;;
    --list-gpu-code) printf 'sm_80\\nsm_90a\\n' ;;
esac
""", True)
    write("bin/nvidia-smi", "#!/bin/sh\nexit 1\n", True)


def made(*words):
    """(exit code, the line that would make the trainer, stderr)"""
    path = os.path.abspath("bin") + ":" + os.environ["PATH"]
    code, out, err = call(["make", "-n", "NVCC=" + os.path.abspath("bin/nvcc"), *words], path)
    lines = [line for line in out.replace("\\\n", "").split("\n") if "train_gpt2.cu" in line]
    return code, (lines or [""])[-1], err


def has_neither(line):
    return line and not any(word in line for word in ("USE_MPI", "USE_NCCL", "-lnccl", "-rpath"))


def test_make_finds_mpi_and_nccl():
    found_machine()
    here = os.getcwd()
    for words in ([], ["MPI=1", "NCCL=1"]):
        code, line, err = made("train_gpt2cpu", *words)
        check(code == 0 and "-DUSE_MPI -D" in line and f"-I{here}/mpi " in line, f"{words}: {line}{err}")
        check("-o train_gpt2cpu" in line and line.endswith(f"-L{here}/mpi -Wl,-rpath,/there"), line)
        check("-flto" not in line and "-O9" not in line and "NCCL" not in line, line)
        for target in ("train_gpt2cu", "build/check/train_gpt2.BF16", "build/ptx/train_gpt2.FP32"):
            code, line, err = made(target, *words)
            check(code == 0 and "-DUSE_NCCL -DUSE_MPI" in line, f"{target} {words}: {line}{err}")
            check(line.endswith(f"-lnccl -L{here}/mpi -Xlinker -rpath,/there"), line)
    for words in (["train_gpt2cpu", "MPI=0"], ["train_gpt2cu", "MPI=0", "NCCL=0"],
                  ["build/plain/train_gpt2cpu"], ["build/plain/train_gpt2.BF16"]):
        code, line, err = made(*words)
        check(code == 0 and has_neither(line), f"{words}: {line}{err}")
    code, line, err = made("train_gpt2cu", "MPI=0")
    check(code == 0 and "USE_NCCL" in line and "USE_MPI" not in line, f"NCCL alone: {line}{err}")
    code, out, _ = call(["make", "help"])
    check(code == 0 and "NCCL=auto|0|1 MPI=auto|0|1" in out, out)


def test_setup_and_mpi_and_nccl():
    copy("scripts/setup.sh", "dev/requirements.txt")
    for mpi, gpus, words, wanted in (
            ("", 1, ["tests"], (False, False)), ("", 2, ["tests"], (False, False)),
            ("#error\n", 1, ["tests"], (True, False)), ("#error\n", 2, [], (False, True))):
        found_machine(mpi=mpi, nccl=mpi)
        write("bin/id", "#!/bin/sh\necho 0\n", True)
        for tool in ("python3", "mpirun"):
            write("bin/" + tool, "#!/bin/sh\n", True)
        write("bin/apt-get", '#!/bin/sh\necho "apt-get $*" >>order.log\n', True)
        write("bin/nvidia-smi", "#!/bin/sh\n" + "".join(f"echo 'GPU {i}: H'\n" for i in range(gpus)), True)
        write("order.log", "")
        code, out, err = call(["scripts/setup.sh", *words], os.path.abspath("bin") + ":" + os.environ["PATH"],
                              NVCC=os.path.abspath("bin/nvcc"))
        got = ("libopenmpi-dev openmpi-bin" in order(), "libnccl-dev" in err)
        check(code == 0 and got == wanted, f"{mpi!r}, {gpus} GPUs, {words}: {code}, {order()}{out}{err}")


def test_setup_and_a_venv_that_is_there():
    """It gets what later versions of the list ask for, and stays where that fails."""
    copy("scripts/setup.sh", "dev/requirements.txt")
    bare_machine(root=True)
    write("bin/python3", """#!/bin/sh
case "$*" in *pytest*) exit 1 ;; esac
""", True)
    write(".venv/bin/pip", '#!/bin/sh\necho "pip $*" >>order.log\n[ -z "$OFFLINE" ]\n', True)
    write(".venv/bin/python", """#!/bin/sh
case "$*" in *pytest*) [ -n "$HAVE" ] ;; esac
""", True)
    for words, env, wanted in ((["tests"], {}, True), (["tests"], {"HAVE": "1"}, False), ([], {}, False),
                               (["tests"], {"OFFLINE": "1"}, True)):
        write("order.log", "")
        code, out, err = call(["scripts/setup.sh", *words], os.path.abspath("bin"), **env)
        got = (code, "pip install -r dev/requirements.txt" in order(), os.path.exists(".venv/bin/pip"))
        check(got == (0, wanted, True), f"{words} {env}: {code}, {order()}{out}{err}")


def test_setup_and_extras():
    """Installed only when asked for, and only where missing; failing to get it is an error then."""
    copy("scripts/setup.sh", "dev/requirements.txt")
    bare_machine(root=True)
    pip = '#!/bin/sh\necho "pip $*" >>order.log\n[ -z "$OFFLINE" ]\n'
    write("pip", pip, True)
    write("bin/python3", """#!/bin/sh
case "$*" in
    *"import pyarrow"*|*"import tensorboard"*) [ -n "$HAVE" ] ;;
    "-m venv .venv") mkdir -p .venv/bin && ln -s ../../pip .venv/bin/pip ;;
esac
""", True)
    for word, package in (("data", "pyarrow"), ("tensorboard", "tensorboard==")):
        for words, env, wanted in (([word], {}, (0, True)), ([word], {"HAVE": "1"}, (0, False)),
                                   ([], {}, (0, False)), ([word], {"OFFLINE": "1"}, (1, True))):
            shutil.rmtree(".venv", ignore_errors=True)
            write("order.log", "")
            code, out, err = call(["scripts/setup.sh", *words], os.path.abspath("bin"), **env)
            got = (code, "pip install " + package in order())
            check(got == wanted, f"{words} {env}: {code}, {order()}{out}{err}")
            check(("hint: " in err) == (code == 1), f"{words} {env}: {err}")


def test_make_without_mpi_and_nccl():
    found_machine(mpi="#error broken\n", nccl="#error broken\n")
    for target in ("train_gpt2cpu", "train_gpt2cu"):
        code, line, err = made(target)
        check(code == 0 and has_neither(line) and not err, f"{line}{err}")
        code, _, err = made(target, "MPI=1")
        check(code == 2 and "MPI=1, but" in err and "libopenmpi-dev" in err and "NCCL" not in err, err)
    code, _, err = made("train_gpt2cu", "NCCL=1")
    check(code == 2 and "NCCL=1, but" in err and "libnccl-dev" in err and "MPI" not in err, err)
    check(made("train_gpt2cpu", "NCCL=1")[0] == 0, "the CPU program has no use for NCCL")
    for setting in ("NCCL", "MPI"):
        code, _, err = made("train_gpt2cpu", setting + "=yes")
        check(code == 2 and f"{setting}=yes: choose one of auto 0 1" in err, err)
    write("bin/mpicc", "#!/bin/sh\nexit 1\n", True)          # as where there is none
    write("bin/nvcc", "#!/bin/sh\n[ $1 != -dryrun ] || exit 1\necho sm_80\n", True)
    for target in ("train_gpt2cpu", "train_gpt2cu"):
        code, line, err = made(target, "ARCH=80")
        check(code == 0 and "USE_MPI" not in line and not err, f"{line}{err}")


# ---- plot_log.py ----

def test_plot_takes_the_venv():
    copy("dev/data/plot_log.py", "dev/venv_python.py")
    write("runs/mine/main.log", "s:0 tel:5.5\ns:1 trl:5.4 lr:1e-3 norm:2\n")
    write("none/matplotlib.py", "raise ImportError\n")
    plot = [sys.executable, "dev/data/plot_log.py", "runs/mine"]
    code, _, err = call(plot, PYTHONPATH=os.path.abspath("none"))
    check(code == 1 and "scripts/setup.sh" in err, f"without .venv: {code}, {err}")
    write(".venv/bin/python", '#!/bin/sh\necho "venv $*"\n', True)
    code, out, err = call(plot, PYTHONPATH=os.path.abspath("none"))
    check((code, out) == (0, "venv dev/data/plot_log.py runs/mine\n"), f"with .venv: {code}, {out}{err}")


def test_make_plot():
    """Which runs make hands on, and how: blanks and quotes in a name are the name's."""
    copy("Makefile")
    write("bin/python3", '#!/bin/sh\nprintf "<%s>" "$@"\n', True)
    path = os.path.abspath("bin") + ":" + os.environ["PATH"]
    script = "<dev/data/plot_log.py>"
    for words, wanted in ((["RUN=a"], "<a>"), (["RUN=a b", "RUN2=it's", "RUN3=x;y"], "<a b><it's><x;y>"),
                          (["RUNS=a b"], "<a><b>"), (["RUN=a", "GPT2=0"], "<a>"),
                          (["RUN=a", "PNG=c d.png", "GPT2=1"], "<a><-o><c d.png><--gpt2>")):
        code, out, err = call(["make", "plot", *words], path)
        check((code, out) == (0, script + wanted), f"make plot {words}: {code}, {out}{err}")
    code, out, err = call(["make", "plot"], path)
    check(code == 2 and "RUN=dir" in err and "<" not in out, f"make plot: {code}, {out}{err}")


# ---- programs that find their files ----

def test_any_working_directory():
    code, out, err = call([os.path.join(ROOT, "build/tokenize"), "--write-vocab", "vocab.bin"])
    check(code == 0 and os.path.getsize("vocab.bin") > 300000, f"tokenize elsewhere: {code}, {out}{err}")


# ---- dev/reference/train_gpt2.py, as the converter of Hugging Face weights ----

# As much of torch and transformers as a conversion looks at; a GPT-2 of L=1, NH=1, C=8, T=4, V=10.
STUBS = {
    "torch/__init__.py": """
        __version__ = "stub"
        class cuda:
            is_available = staticmethod(lambda: False)
        """,
    "torch/nn/__init__.py": "class Module: pass",
    "torch/nn/functional.py": "",
    "transformers.py": """
        import numpy as np
        class Tensor:
            def __init__(self, *shape): self.shape = shape
            def float(self): return self
            def numpy(self): return np.arange(np.prod(self.shape), dtype=np.float32).reshape(self.shape)
        C, names = 8, {}
        for ln in ("ln_f", "h.0.ln_1", "h.0.ln_2"):
            names[ln + ".weight"] = names[ln + ".bias"] = (C,)
        linears = {"attn.c_attn": (C, 3 * C), "attn.c_proj": (C, C), "mlp.c_fc": (C, 4 * C),
                   "mlp.c_proj": (4 * C, C)}
        for name, shape in linears.items():
            names[f"h.0.{name}.weight"], names[f"h.0.{name}.bias"] = shape, shape[1:]
        names.update({"wte.weight": (10, C), "wpe.weight": (4, C)})
        class config: n_positions, vocab_size, n_layer, n_head, n_embd = 4, 10, 1, 1, C
        class GPT2LMHeadModel:
            config = config
            @staticmethod
            def from_pretrained(name, local_files_only):
                if name != "gpt2": raise OSError("a long story\\n" * 40)
                return GPT2LMHeadModel()
            def state_dict(self):
                return {"transformer." + name: Tensor(*shape) for name, shape in names.items()}
        """,
}


def test_hugging_face_recipe():
    if not has_module("numpy"):
        skip(1, "no numpy")
        return
    for name, text in STUBS.items():
        write("stubs/" + name, textwrap.dedent(text))
    os.makedirs("clone")
    os.chdir("clone")                               # without any shard
    twin = [sys.executable, os.path.join(ROOT, "dev/reference/train_gpt2.py"), "--num_iterations", "0",
            "--write_model", "gpt2_124M.bin", "--model"]
    stubs = os.path.abspath("../stubs")
    code, _, err = call(twin + ["hf:gpt2"], PYTHONPATH=stubs)
    check((code, err) == (0, ""), f"exit code {code}: {err[-300:]}")
    check(os.listdir(".") == ["gpt2_124M.bin"], f"files: {os.listdir('.')}")
    tool = [sys.executable, os.path.join(ROOT, "dev/test/llmc_format.py"), "read-model", "gpt2_124M.bin"]
    code, out, err = call(tool)
    header = out.split("\n", 1)[0]
    check((code, header) == (0, "version 3 T 4 V 10 L 1 NH 1 C 8 Vp 128"), f"the file: {header}{err}")
    code, _, err = call(twin + ["hf:other"], PYTHONPATH=stubs)
    check(code == 1 and "hf download other" in err and err.count("\n") <= 3, f"not downloaded: {code}, {err}")
    os.remove("../stubs/transformers.py")
    write("../stubs/transformers.py", "raise ImportError")
    code, _, err = call(twin + ["hf:gpt2"], PYTHONPATH=stubs)
    check(code == 1 and "pip install transformers" in err, f"no transformers: {code}, {err}")


# ---- README's commands ----

# what is wrong in a line, and what is said of it
WRONG = {"    make nothing": "no target nothing", "    make plot RUM=x": "no setting RUM",
         "    make test && make nothing": "no target", "    ./train_gpt2cu -zz 3": "unknown flag '-zz'",
         "    mpirun -np 2 ./train_gpt2cu ... -zs 7": "0 to 2, not '7'", "see `make nothing`": "nothing",
         "    python3 dev/data/none.py": "no dev/data/none.py", "see [x](none.md)": "no none.md",
         "    python3 dev/data/get.py tinystories --nonsense": "knows no --nonsense",
         "    python3 dev/data/get.py tinystories --shard 3": "knows no --shard",      # a piece of --shards
         "    scripts/run_none.sh": "no scripts/run_none.sh", "see `dev/none.py`": "no dev/none.py",
         "    build/none runs/x": "no target none", "    foo bar": "foo is neither",
         "    a=1 make \\\n      nothing": "no target nothing"}


def test_readme_commands():
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as f:
        seen = check_docs.look(f.read())
    for what, error in seen:
        check(error == "", f"{what}: {error}")
    for text, wanted in WRONG.items():
        seen = check_docs.look(text + "\n")
        check(len(seen) == 1 and wanted in seen[0][1], f"{text}: {seen}")


def test_what_readme_writes_is_ignored():
    if call(["git", "-C", ROOT, "rev-parse"])[0] != 0:
        skip(1, "git does not know this folder")
        return
    paths = ["data/mine/mine_train_000001.bin", "both.png", "runs/d12", "d12-hf/config.json", "gpt2_124M.bin"]
    _, out, _ = call(["git", "-C", ROOT, "check-ignore", *paths])
    check(out.split() == paths, f"ignored are {out.split()}")


def test_readme_command_without_end():
    """It fails with what it said, and all that it began ends with it."""
    before = check_docs.LIMIT_S
    try:
        for limit in (2, 20, 200):                  # in which a shell on a busy machine may not even begin
            check_docs.LIMIT_S = limit
            code, said = check_docs.run_line("echo $$; sleep 1000 & sleep 1000")
            if said:
                break
    finally:
        check_docs.LIMIT_S = before
    check(code == f"none: no end after {limit} s" and said.strip().isdigit(), f"{code}, {said!r}")
    end = time.monotonic() + 10                     # the system takes a moment

    def left():
        return [pid for pid, fields in session_stats(int(said)) if fields[0] != "Z"]
    while left() and time.monotonic() < end:
        time.sleep(0.05)
    check(not left(), f"processes are left: {left()}")
    check(check_docs.run_line("false | cat") == (1, ""), "the first of a pipeline fails")


# ---- break_all.py ----

def breaking(device, **said):
    """Its exit code and closing line for a program that answers `--break NAME` with said[NAME]."""
    lines = "".join(f"{name}) echo '{text}' ;;\n" for name, text in said.items())
    write("program", f"""#!/bin/sh
[ "$1" = --list ] && {{ echo {' '.join(said)}; exit; }}
echo 'device: {device}, precision FP32'
case $2 in
{lines}esac
echo '1 passed, 1 failed, 0 skipped'
exit 1
""", True)
    code, out, _ = call([sys.executable, os.path.join(ROOT, "dev/test/break_all.py"), "./program"])
    return code, out.rstrip().split("\n")[-1]


def test_break_all_knows_its_skips():
    known = sorted(break_all.NOT_COMPUTED["CPU"])[0]
    code, out = breaking("CPU (2 threads)", out="")
    check((code, out) == (0, "1 passed, 0 failed, 0 skipped"), f"a break that is noticed: {code}, {out}")
    code, out = breaking("CPU (2 threads)", out="", dead="note: dead was not computed in this run")
    check((code, out) == (1, "1 passed, 1 failed, 0 skipped"), f"a dead path: {code}, {out}")
    note = f"note: {known} was not computed in this run"
    code, out = breaking("CPU (2 threads)", out="", **{known: note})
    check((code, out) == (0, "1 passed, 0 failed, 1 skipped"), f"left out by the CPU build: {code}, {out}")
    code, out = breaking("NVIDIA H200", out="", **{known: note})
    check((code, out) == (1, "1 passed, 1 failed, 0 skipped"), f"left out on a GPU as well: {code}, {out}")
    code, out = breaking("CPU (2 threads)", out="", **{known: ""})
    check((code, out) == (1, "1 passed, 1 failed, 0 skipped"), f"listed, but computed: {code}, {out}")
