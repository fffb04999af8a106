"""Does what README.md and docs/ tell users to type work?

    pytest dev/test/test_docs.py            # files, make targets and flags exist
    make check-docs                         # runs its commands, too, in a copy of the repository

A command is a line of an indented block, or several of which all but the last end in a backslash; what one
prints stands between fences. They run in their order, README's first. SMALLER says what is changed so that
each takes seconds; NOT_HERE, which commands this machine cannot run, and why: they are told. On a GPU
train_gpt2cu is what its name says; elsewhere it is train_gpt2cpu under that name, with a tiny model. The data
sets are made of the built-in stories, so that nothing is downloaded.
"""
import contextlib
import glob
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time

import pytest

from checks import ROOT, has_module, read, run_program, write
from gpus import list_gpus

TINY = "L2,NH2,C32,T32,V50257"
LIMIT_S = 900                           # of a command; only a hang meets it
NAMELESS = "dev/data/NAME", "dev/test/test_X.cpp"      # paths that stand for others
PROGRAMS = "cd docker pip hf lm_eval llama-completion ollama echo mpirun srun torchrun git ncu"
TRAINER = r"(^|&& |-np \d+ |-node \d+ )\./train_gpt2c[up]u?\b"

# pattern, what stands there on a CPU, and on a GPU (None: what it is)
SMALLER = [
    (r"--nnodes 2 --nproc-per-node 8 \.\.\.", "--nproc-per-node 2", "--nproc-per-node {gpus}"),
    (r"(-x|--max-steps) \d+ \.\.\.", "-x 8 -v 0 -s 0", "-x 8 -v 0 -s 0"),
    (r"(--max-steps|-x) (600000|19073|1000|500|400|100|50)\b", r"\1 6", r"\1 6"),
    (r"--max-steps 30000", "--max-steps 8", "--max-steps 8"),
    (r"model_00019073", "model_00000008", "model_00000008"),
    (r"(-u|--warmup) \d+", r"\1 2", r"\1 2"),
    (r" \.\.\.", " -x 8 -v 0 -s 0", " -x 8 -v 0 -s 0"),
    (r"(tensorboard_log.py \S+) --follow & .*", r"\1", r"\1"),        # the two go on until they are stopped
    (r"(-b|--micro-batch) \d+", r"\1 2", None),
    (r"(-t|--sequence-length) \d+", r"\1 32", None),
    (r"(-z|--total-batch) \d+", r"\1 512", None),
    (r"(-e|--model) d(12|48)(?= )", r"\1 " + TINY, None),
    (r"(-e|--model) d12,V32768", r"\1 " + TINY.replace("50257", "32768"), None),
    (r"-e d12,window=256,pattern=SSSL", f"-e {TINY},window=9,pattern=SL", None),
    (r"-e (m12|llama:L12\S+)", "-e llama:L2,NH2,NKV2,HS16,C32,F64,T32,V50257,qk_norm", None),
    (r"--gpus 8", "--gpus 2", "--gpus {gpus}"),
    # mpirun wants an ssh to be there (else exit code 243), if only on other machines it would need one
    (r"mpirun -np 16", "mpirun --allow-run-as-root --mca plm_rsh_agent sh --oversubscribe -np 2",
     "mpirun --allow-run-as-root --mca plm_rsh_agent sh -np {gpus}"),
    (r"make train_gpt2cu\b[^&]*", "make train_gpt2cpu && ln -sf train_gpt2cpu train_gpt2cu ", None),
    (r"dev/data/(get.py hellaswag\b)", r"made/\1 --from made/hellaswag", r"made/\1 --from made/hellaswag"),
    (r"(get.py (tinystories|fineweb10B-shards)\b)", r"\1 --from made/\2", r"\1 --from made/\2"),
    (r"scripts/run_gpt2_124M.sh", f"gpus=1 scripts/run_gpt2_124M.sh --max-steps 4 --warmup 2 --model {TINY} "
     "--sequence-length 32 --micro-batch 2 --total-batch 512 --val-batches 2",
     "scripts/run_gpt2_124M.sh --max-steps 4 --warmup 2 --val-batches 2"),
]
def has_llama():
    return all(map(has_module, ("tokenizers", "gguf", "jinja2")))


# pattern, can it run here?, why not
NOT_HERE = [
    (r"make test\b", lambda: False, "runs this very check"),
    (r"get.py (fineweb10B( |$)|fineweb-edu|hub )|make tinyshakespeare$|--from pypi", lambda: False,
     "needs the network"),
    (r"get.py (debian-docs|english)", lambda: False, "asks apt for 99 packages, GitHub for 660 files"),
    (r"run_m12_9min", lambda: False, "takes minutes of a GPU"),
    (r"git clone ADDRESS", lambda: False, "ADDRESS stands for where you found it"),
    (r"import gpt2|models/gpt2|sample runs/tuned", lambda: False, "GPT-2's weights are the hub's"),
    (r"pip install|hf download", lambda: False, "installs or downloads"),
    (r"pytest|build/(asan/)?test_|setup.sh", lambda: False, "installs, or runs this very check"),
    (r"make (bench|profile)", lambda: False, "takes minutes of a GPU"),
    (r"bench/multi.sh", lambda: False, "takes minutes of several GPUs"),
    (r"dev/gpu.sh|make build/check/", lambda: False, "takes minutes of a GPU, and of nvcc"),
    (r"reference/compare|muon.py pytorch", lambda: False, "needs PyTorch, and takes minutes"),
    (r"mmlu_test.bin", lambda: False, "MMLU is not made here"),
    (r"HOST:PORT", lambda: False, "HOST stands for one of yours"),
    (r"serve.py [^-]*$", lambda: False, "goes on until it is stopped"),
    (r"docker ", lambda: False, "builds and runs a container"),
    (r"mpirun", lambda: shutil.which("mpirun"), "no mpirun"),
    (r"srun", lambda: shutil.which("srun"), "no SLURM"),
    (r"torchrun|dev/reference/train_gpt2.py", lambda: has_module("torch"), "no PyTorch"),
    (r"hf.py gguf", lambda: has_module("gguf"), "no gguf"),
    (r"llama-completion|ollama", lambda: False, "needs llama.cpp, ollama"),
    (r"get.py tokenizer|my-tok|[a-z]+/own\b", lambda: has_module("tokenizers"), "no tokenizers"),
    (r"Llama-3.2|(eval|export) runs/llama", has_llama, "no tokenizers, gguf or jinja2"),
    (r"qwen3/", lambda: False, "needs a tokenizer of the hub's"),
    (r"hf.py llama2c", lambda: False, "no model of llama2.c is here"),
    (r"lm_eval", lambda: shutil.which("lm_eval"), "no lm-eval"),
    (r"tensorboard_log.py", lambda: has_module("tensorboard"), "no tensorboard"),
]


# ---- the text ----

def all_text():
    return "\n".join(read(path).decode() for path in
                     [f"{ROOT}/README.md", *sorted(glob.glob(f"{ROOT}/docs/*.md"))])


def commands(text):
    """Those of indented blocks, one string each, without what follows a `#`."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    lines = iter(line[4:].rstrip() for line in text.split("\n") if line.startswith("    "))
    for line in lines:
        while line.endswith("\\"):
            line = line[:-1] + next(lines, "").lstrip()
        yield re.sub(r"\s+# .*", "", line)


# ---- looking ----

def make_error(words):
    text = read(f"{ROOT}/Makefile").decode()
    lines = re.findall(r"^(?:\.PHONY: (.*)|([\w. /%$()-]+?):(?!=))", text, re.M)
    targets = {name for line in lines for name in "".join(line).split()}
    settings = set(re.findall(r"(?:\$\(|\$\(value |\"\$\$)(\w+)", text))
    for word in words:
        name, setting, _ = word.partition("=")
        if name not in (settings if setting else targets) and not word.startswith("build/"):
            return f"make knows no {'setting' if setting else 'target'} {name}"
    return ""


def trainer_error(words):
    """The program itself parses the flags; --help comes last, and is reached if all of them are known."""
    words = [{"RANK": "0"}.get(word, word) for word in words if word != "..."]
    code, _, err = run_program([ROOT + "/train_gpt2cpu", *words, "--help"])
    return err.strip() or (f"exit code {code}" if code else "")


def path_error(path):
    return "" if os.path.exists(os.path.join(ROOT, path)) else f"there is no {path}"


def script_error(path, words):
    if path_error(path):
        return path_error(path)
    source = read(os.path.join(ROOT, path)).decode()
    names = [word.partition("=")[0] for word in words if word.startswith("--")]
    unknown = [name for name in names if not re.search(re.escape(name) + r"(?![\w-])", source)]
    return f"{path} knows no {unknown[0]}" if unknown else ""


def command_error(line):
    """What is wrong in one of the commands that && and & join."""
    words = shlex.split(line)
    while words and re.fullmatch(r"\w+=\S*", words[0]):         # settings of the environment
        words = words[1:]
    trainer = [i for i, word in enumerate(words) if word.startswith("./train_gpt2")]
    if trainer:
        return trainer_error(words[trainer[0] + 1:])
    if words[0] == "make":
        return make_error(words[1:])
    if words[0] in ("python", "python3", ".venv/bin/python"):
        return script_error(words[1], words[2:])
    if words[0].startswith("build/"):
        return make_error([words[0] if words[0].count("/") > 1 else words[0][6:]])
    if "/" in words[0] and not words[0].startswith(".venv/"):
        return script_error(words[0], [])
    known = words[0] in PROGRAMS.split() or "/" in words[0]
    return "" if known else f"{words[0]} is neither a known command nor fenced output"


def look(text):
    """[(command or word, what is wrong with it or "")]"""
    def errors(line):
        return "; ".join(filter(None, map(command_error, re.split(r" && | & ", line))))
    seen = [(line, errors(line)) for line in commands(text)]
    for word in re.findall(r"`([^`\n]+)`", text):
        if word.startswith(("make ", "./train_gpt2", "python3 dev/")):
            seen.append((word, errors(word)))
        elif re.fullmatch(r"(dev|llmc|scripts)/[\w./-]*", word) and word not in NAMELESS:
            seen.append((word, path_error(word)))
    return seen


# ---- running ----

def prepare(folder):
    """A copy of the repository with what its commands take as given: texts of yours, downloads."""
    git = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                         capture_output=True, text=True, check=False)
    if git.returncode != 0:
        pytest.skip("git does not know this folder")
    for path in git.stdout.split("\0")[:-1]:
        if os.path.isfile(os.path.join(ROOT, path)):            # else it is removed, not committed yet
            os.makedirs(os.path.join(folder, os.path.dirname(path)), exist_ok=True)
            shutil.copy(os.path.join(ROOT, path), os.path.join(folder, path))
    os.chdir(folder)
    if os.path.exists(os.path.join(ROOT, ".venv")):
        os.symlink(os.path.join(ROOT, ".venv"), ".venv")
    subprocess.run(["make", "-s", "stories", "tokenize"], check=True)
    for path, size in (("made/stories.txt", 3000000), ("my/texts/mine.txt", 800000),
                       ("made/tinystories/TinyStoriesV2-GPT4-train.txt", 300000),
                       ("made/tinystories/TinyStoriesV2-GPT4-valid.txt", 100000)):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        subprocess.run(["build/stories", "--seed", str(size), "--bytes", str(size), "-o", path], check=True)
    words = ["made/stories.txt", "-o", "made/stories", "--val-tokens", "100000"]
    subprocess.run(["build/tokenize", *words], check=True)
    for stem, train, val in (("made/fineweb10B-shards/fineweb", "train_000001", "val_000000"),
                             ("dev/data/fineweb10B/fineweb", "train_000001", "val_000000"),
                             ("dev/data/tinyshakespeare/tiny_shakespeare", "train", "val")):
        write(f"{stem}_{train}.bin", read("made/stories_train.bin"))
        write(f"{stem}_{val}.bin", read("made/stories_val.bin"))
    for part in ("train", "val"):
        write(f"my/nanoGPT/data/openwebtext/{part}.bin", read("made/stories_val.bin")[1024:])
    write("my/chats.jsonl", "".join(json.dumps({"messages": [
        {"role": "user", "content": f"How many are {i} and {i % 7}?"},
        {"role": "assistant", "content": f"They are {i + i % 7}."}]}) + "\n" for i in range(300)))
    if has_llama():
        from published import folder as published                       # pylint: disable=C0415
        published("Llama-3.2-1B-Instruct", "Llama-3.2-1B-Instruct", max_position_embeddings=512)
    endings = ["she went home.", "it rained.", "all was well.", "he sang."]
    write("made/hellaswag/hellaswag_val.jsonl", "".join(
        json.dumps({"ctx": f"Mei counted to {i}, and then", "label": i % 4, "endings": endings}) + "\n"
        for i in range(20)))
    write("made/get.py", "import sys\nsys.path.insert(0, 'dev/data')\nimport get\n"       # of 20 questions
          "for dataset in get.DATASETS:\n    dataset.questions = 20\nsys.exit(get.main())\n")


def smaller(line, gpus):
    for pattern, on_cpu, on_gpu in SMALLER:
        instead = on_gpu if gpus else on_cpu
        if instead is not None:
            line = re.sub(pattern, instead.replace("{gpus}", str(gpus)), line, count=1)
    begins = re.search(TRAINER, line) and not re.search(
        r" (-e|--model) | (eval|sample|chat) |(-y|--resume) 1 (-o|--output-dir) \S+$", line)
    return line + " -e " + TINY if begins and not gpus else line


def run_line(line, limit=LIMIT_S):
    """(exit code, what it said). A session of its own: whatever it starts ends with it, whyever this does."""
    with subprocess.Popen(["bash", "-eo", "pipefail", "-c", line], stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True) as child:
        try:
            said, _ = child.communicate(timeout=limit)
            return child.returncode, said.decode("utf-8", "replace")
        except subprocess.TimeoutExpired as e:
            return f"none: no end after {limit} s", (e.stdout or b"").decode("utf-8", "replace")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


# ---- tests ----

def test_commands_exist():
    seen = look(all_text())
    assert seen and not [(what, error) for what, error in seen if error]


def test_other_trainers():
    """A name of nanoGPT's and nanochat's in the table is one of ours, or is answered; ours exist."""
    page = read(f"{ROOT}/docs/coming-from-nanogpt.md").decode()
    rows = [line.strip("|").split("|") for line in page.splitlines() if re.match(r"\| (\| )?`--", line)]
    assert len(rows) > 15
    for *theirs, ours in rows:
        for name in re.findall(r"--[\w-]+", " ".join(theirs)):
            _, _, err = run_program([ROOT + "/train_gpt2cpu", name, "..."])
            assert "--help all" not in err, f"{name} is not answered"
        for name in re.findall(r"--[\w-]+", ours):
            assert "unknown flag" not in run_program([ROOT + "/train_gpt2cpu", name, "x"])[2], name


def test_table_of_rates():
    """docs/train.md's is the program's."""
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| ([\d.e-]+) \| (\d+) \|",
                      read(f"{ROOT}/docs/train.md").decode(), re.M)
    source = read(f"{ROOT}/llmc/run/run_config.h").decode()
    table = re.search(r"kAutoRates\[\] = \{(.*?)\};", source, re.S)[1]
    most = re.search(r"kMaxC = (\d+)", read(f"{ROOT}/llmc/ops/op_types.h").decode())[1]
    wanted = [tuple(row.replace("kMaxC", most).split(", ")) for row in re.findall("{(.*?)}", table)]
    assert rows == wanted and len(rows) > 9


# a line, and what is wrong with it
@pytest.mark.parametrize("text, wanted", [
    ("    make nothing", "no target nothing"), ("    make plot RUM=x", "no setting RUM"),
    ("    make test && make nothing", "no target"), ("    ./train_gpt2cu -zz 3", "unknown flag '-zz'"),
    ("    mpirun -np 2 ./train_gpt2cu ... -zs 7", "0 to 1, not '7'"), ("see `make nothing`", "nothing"),
    ("    python3 dev/data/none.py", "no dev/data/none.py"),
    ("    python3 dev/data/get.py tinystories --nonsense", "knows no --nonsense"),
    ("    python3 dev/data/get.py tinystories --shard 3", "knows no --shard"),      # a piece of --shards
    ("    scripts/run_none.sh", "no scripts/run_none.sh"), ("see `dev/none.py`", "no dev/none.py"),
    ("    build/none runs/x", "no target none"), ("    foo bar", "foo is neither"),
    ("    a=1 make \\\n      nothing", "no target nothing")])
def test_wrong_commands(text, wanted):
    (_, error), = look(text + "\n")
    assert wanted in error


def test_command_without_end():
    """It fails with what it said, and all that it began ends with it."""
    for limit in (1, 20, 200):                      # in which a shell on a busy machine may not even begin
        code, said = run_line("echo began; (while sleep 0.05; do date >alive; done) & sleep 1000", limit)
        if said:
            break
    assert (code, said) == (f"none: no end after {limit} s", "began\n")
    time.sleep(0.5)
    write("alive", "no")
    time.sleep(0.5)
    assert read("alive") == b"no", "what it began goes on"
    assert run_line("false | cat") == (1, ""), "the first of a pipeline fails"


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_commands_run(tmp_path):
    gpus, failed = len(list_gpus()), []
    prepare(tmp_path)
    for line in commands(all_text()):
        whys = [why for pattern, here, why in NOT_HERE if re.search(pattern, line) and not here()]
        if whys:
            print(f"not run ({whys[0]}): {line}")
            continue
        run = smaller(line, gpus)
        code, said = run_line(run)
        if code != 0:
            failed.append(f"{run}\nexit code {code}: " + "\n".join(said.rstrip().split("\n")[-8:]))
    assert not failed, "\n".join(failed)
