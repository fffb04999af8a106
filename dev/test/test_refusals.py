"""What is refused before anything is written: exit code 1, one sentence, the disk unchanged.

    pytest dev/test/test_refusals.py -k shard

Each line of a table is a command line and words of the sentence. What numbers and flags look like at all is
test_host.cpp's, shards' bytes are test_dataloader.cpp's, questions' test_evalloader.cpp's.
"""
import os
import shlex
import struct
import subprocess
import sys

import pytest

from checks import ROOT
from trainer import (MODEL_MAGIC, SHARD_MAGIC, T, Program, model_path, read_bytes, refused, run, run_ok,
                     sentences, without_checksum, write_bytes, write_questions, write_shard)

pytestmark = pytest.mark.cpu_only
NO_TEXT = "L2,NH2,C32,T32,V300"         # no tokenizer has 300 tokens


def table(text):
    """[(flags, words)] of lines `FLAGS => words | words`; FLAG NONE: without it."""
    rows = []
    for line in text.strip().splitlines():
        flags, said = line.split(" => ")
        words = [None if word == "NONE" else word for word in shlex.split(flags)]
        rows.append(pytest.param(dict(zip(words[::2], words[1::2])), said.split(" | "), id=flags.strip()))
    return rows


@pytest.fixture(autouse=True)
def files():
    """What the tables name; made once."""
    if os.path.exists("q_256.bin"):
        return
    run_ok({"-o": "held", "-x": 1})
    os.rename(model_path("held"), "good.bin")
    run_ok({"-o": "rms", "-x": 1, "--block": "parallel", "--norm": "rmsnorm"})
    os.rename(model_path("rms"), "rms.bin")
    run_ok({"-o": "run", "-x": 1})
    write_bytes("plain", b"x")
    os.mkdir("no_models")
    os.mkfifo("fifo.bin")                       # nobody will ever write to it
    whole = read_bytes(write_shard("tokens_256.bin", [1] * 40 + [256] * 4000))
    write_bytes("magic.bin", struct.pack("<i", 20240521) + whole[4:])
    question = [1, 2], [[3], [4, 5], [6], [7]]
    write_questions("q_gpt2.bin", [question] * 3, [0, 1, 2], tokenizer=1)
    write_questions("q_label.bin", [question] * 3, [0, 1, 4])
    write_questions("q_256.bin", [question, ([1, 256], question[1])], [0, 1])


# ---- flags, alone and together ----

FLAGS = table(f"""
-b 0                        => -b | '0' | 65536
-b 65537                    => 65537
-b 1e1                      => 1e1 | 10
-b 10000000000000000000     => -b | 10000000000000000000
-l -1                       => -l | -1
-q 2                        => -q | '2'
-k cosin                    => cosin | cosine | wsd
-x -1                       => -x | -1
-x 1e5                      => -x | digits only: 100000
-x ''                       => -x
-x +2                       => '+2'
-x epochs                   => epochs
-r 3                        => -r | 3
-f 2                        => -f | 2
-a yes                      => yes
-v -1                       => -v | -1
-m 0                        => -m | '0'
-g 0                        => -g | '0'
-u -1                       => -u | -1
-c -0.1                     => -0.1
-ge 3                       => -ge | 3
-n -1                       => -n | '-1'
-nk -1                      => -nk | '-1'
-lg -1                      => -lg | '-1'
--log-every -1              => --log-every | at least 0
--num-samples 0             => --num-samples | '0'
--temperature -1            => --temperature | -1
--top-k -1                  => --top-k | -1
--top-p 1.5                 => --top-p | 1.5
--beta1 1                   => --beta1 | '1'
--eps 0                     => --eps | '0'
--seed -1                   => -1
--grad-clip -1              => --grad-clip | -1
--muon-steps 0              => --muon-steps | '0'
--grad-dtype fp8            => fp8 | bf16
--block serial              => serial | parallel-tied
--norm layer                => layer | rmsnorm
--dropout 1                 => --dropout | 0.95
--foo 1                     => --foo
-Z 1                        => -Z
--muon-lr 0.05              => --muon-lr is for --optimizer muon
--muon-momentum 0.5         => --muon-momentum is for --optimizer muon
--muon-steps 4              => --muon-steps is for --optimizer muon
--muon-decay 5              => --muon-decay is for --optimizer muon
-z 130                      => 130 | use -z 128
-z 100                      => 100 | 128
-z 1                        => -z 1 | -zs
-z 0                        => -z 0 | -zs
-z 3                        => -z 3 | -zs
-z 2 -b 1 -t 4              => -z 2 | -zs
-z 0 -b 1 -t 1              => -z 0 | -zs
-z 1000000000000000         => 1000000000000000
-t {T + 1}                  => {T + 1} | longest sequence, {T}
-ge 1 -r 1                  => -ge 1 | -r 0
-x 0                        => -x 0 | refused
-y 1 -o ''                  => -y 1 needs -o
--on-bad-loss rewind -o ''  => --on-bad-loss rewind needs -o
--chat 1                    => --chat | -x 0
--chat 1 -x 0 -o '' -e {NO_TEXT} => --chat | V=300
--prompt hi -x 0 -o '' -e {NO_TEXT} => --prompt | 300
--prompt hi -s 5 -x 10 -e {NO_TEXT} => --prompt | 300
--prompt {'a' * T} -x 0 -o ''   => {T} | {T - 2}
--prompt {'a' * T} -s 5 -x 10   => {T} | {T - 2}
--prompt aaaaaaa -t 8 -x 0 -o '' => 7 | 6
--prompt hi -i NONE -x NONE => hint: -x 0
""")


@pytest.mark.parametrize("flags, said", FLAGS)
def test_flags(flags, said):
    refused(flags, *said)


@pytest.mark.parametrize("words, said", [
    (["--micro-batch", "4"], ("twice", "-b", "--micro-batch")), (["-z", "128", "-d", "128"], ("twice", "-d")),
    (["-u"], ("-u", "value")), (["-u", "-c", "0"], ("-u", "value")), (["--seed="], ("--seed", "''")),
    (["stray"], ("stray",)), (["-h"], ("-h", "--help")), (["\x1b[31m\n\n\n\n"], ("unexpected",)),
    (["--" + "long" * 3000, "1"], ("longlong",))], ids=lambda x: x[0][:10])
def test_words(words, said):
    refused({}, *said, extra=words)


CUDA_ONLY = table("""
--grad-dtype bf16 => --grad-dtype bf16 needs the CUDA program
-ge 1             => -ge 1 needs the CUDA program
""")


@pytest.mark.parametrize("flags, said", CUDA_ONLY)
def test_flags_of_the_cuda_program(flags, said):
    refused(flags, *said)


# ---- data, folders, questions ----

DATA = table(f"""
-i no/such.bin           => no/such.bin
-v 1 -j such.bin         => such.bin
-v 1 -j magic.bin        => magic.bin | 20240521
-v 1 -j tokens_256.bin   => tokens_256.bin | 256
-v 1 -j train.bin        => train.bin
-o plain/run             => plain/run
-o plain                 => plain
-o /proc/nowhere/run     => /proc/nowhere
-o {'n' * 300}           => {'n' * 60}
-o {'./' * 2025}         => 4050 bytes | at most | hint:
-o run                   => -o run | already holds a run | (its checkpoints) | -y 1
-e run -o run            => -e run | -y 1
-e run/ -o run           => -e run | -y 1
-e run -o run -x 0       => run
-e no_models/            => -e no_models: | no model_*.bin
-e no/model.bin          => no/model.bin
-e model_00000001.bin    => model_00000001.bin
-e fifo.bin              => fifo.bin | regular file
-e plain                 => plain
-e rms.bin --block parallel-tied => --block parallel-tied | has parallel
-e rms.bin --norm layernorm      => --norm layernorm | has rmsnorm
-h 1                             => hellaswag_val.bin | get.py hellaswag
-h 1 --eval-data none.bin        => no evaluation data | none.bin | get.py
-h 1 --eval-data val.bin         => val.bin | {SHARD_MAGIC}
-h 1 --eval-data q_gpt2.bin      => q_gpt2.bin | GPT-2 | bytes
-h 1 --eval-data q_label.bin     => question 2 | answer 4 | 0..3
-h 1 --eval-data q_label.bin -x 0 -o '' => question 2
-h 1 --eval-data q_256.bin       => question 1 | token id 256 | 0..255
""")


@pytest.mark.parametrize("flags, said", DATA)
def test_files(flags, said):
    refused(flags, *said)


@pytest.mark.parametrize("name", ["main.log", "metrics.jsonl", "run.json"])
def test_fifo_among_the_logs(name):
    os.makedirs("pipes_" + name)
    os.mkfifo(f"pipes_{name}/{name}")
    refused({"-o": "pipes_" + name}, name, "regular file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_without_permission():
    os.mkdir("locked", 0o555)
    refused({"-o": "locked"}, "locked")


def test_folder_with_a_step():
    """One without the line of a step is no run."""
    write_bytes(os.makedirs("began") or "began/main.log", b"s:0 tel:5.545\n")
    run_ok({"-o": "began", "-x": 1})
    for name in os.listdir("began"):
        if "_" in name:
            os.remove("began/" + name)
    refused({"-o": "began"}, "began", "already holds a run (main.log)", "-y 1")


def test_run_json():
    """What is wrong with a folder's run.json is said with its name; a model alone does without it."""
    os.makedirs("broken")
    write_bytes("broken/model_00000001.bin", read_bytes("good.bin"))
    write_bytes("broken/run.json", b'{"settings": {"a": 1}')
    refused({"-o": None, "-e": "broken", "-x": 0, "-i": None, "-j": None}, "broken/run.json", "JSON")
    run_ok({"-e": "broken/model_00000001.bin", "-x": 0})


# ---- models ----

DESCRIPTORS = table("""
-e nonsense     => nonsense
-e d13          => d13 | d12
-e d12x         => d12x
-e d+6          => d+6
-e d4294967302  => d4294967302 | no such size
-e gpt3:c100    => gpt3:c100
-e gpt3:c4294968064                  => no such size
-e L4                                => L4
-e L2,NH2,C32,T32                    => L2,NH2,C32,T32
-e L2,NH2,C32,T32,V+256              => V+256
-e ' L2,NH2,C32,T32,V256'            => ' L2
-e L,NH2,C32,T32,V256                => 'L,
-e L2,NH2,C32,T32,V256,              => V256,
-e L2,L2,NH2,C32,T32,V256            => L2,L2
-e L2,NH2,C32,T32,V256,V256          => V256,V
-e L2,NH2,C32,T32,V256,X1            => X1
-e L2,NH2,C32,T32,V256x              => V256x
-e L2,NH2,C32,T32,V4294967552        => V | 4294967552
-e L2,NH2,C2147483648,T32,V256       => 2147483648
-e L-2,NH2,C32,T32,V256              => L-2
-e L2,NH3,C32,T32,V256               => C=32 | NH=3
-e L2,NH2,C36,T32,V256               => C=36 is not a multiple of 8
-e L2,NH2,C32,T32,V1                 => V=1
-e L2,NH2,C32,T32,V70000             => 70000 | 65536
-e L10001,NH2,C32,T32,V256           => 10001
-e L2,NH2,C32,T16777217,V256         => 16777217
-e L2,NH1,C1048584,T32,V256          => 1048584
-e L99999999999999999999,NH2,C32,T32,V256 => 99999999999
-e ''                                => -e
""")


@pytest.mark.parametrize("flags, said", DESCRIPTORS)
def test_descriptors(flags, said):
    refused(flags, *said)


HUGE = table("""
-e L10000,NH1,C1048576,T32,V256              => GiB | free
-e L100,NH1,C65536,T32,V256 -b 65536         => GiB | free
-e L10000,NH1,C1048576,T32767,V256 -b 65536  => tensor ' | elements: too many
-e L2,NH2,C32,T16777216,V256 -b 65536        => 65536 | 16777216
-e L2,NH2,C32,T2048,V256 -b 65536            => 65536 | GiB
""")


@pytest.mark.parametrize("flags, said", HUGE)
def test_models_too_large(flags, said):
    refused(flags, *said)


FIELDS = ["magic", "version", "T", "V", "L", "NH", "C", "Vp", "block", "norm"]
HEADERS = """
magic=20240325     => 20240325 | {MODEL_MAGIC}
version=1          => version 1 | 3 | 5
version={other}    => {size}
version=203        => 203
L=1073741824       => 1073741824
L=-1               => -1
C=0                => C=0
C=-32              => -32
C=2147483647,NH=1  => 2147483647
C=36               => C=36 is not a multiple of 8
NH=0               => NH=0
NH=3               => 32 | 3
V=257              => 257 | 256
V=2147483647,Vp=2147483647 => 2147483647
Vp=-256            => -256
Vp=2147483640      => 2147483640
T=0                => T=0
T=2147483647       => 2147483647
L=10000,C=1048576,T=16777216 => 1048576
residual=2         => residual stream 2
version={kind},block=3 => block 3
version={kind},norm=-1 => norm -1
"""


@pytest.mark.parametrize("line", HEADERS.strip().splitlines(), ids=lambda line: line.split(" ")[0])
def test_model_headers(line):
    good = bytes(without_checksum(read_bytes("good.bin")))
    words = list(struct.unpack("<256i", good[:1024]))
    line = line.format(MODEL_MAGIC=MODEL_MAGIC, size=len(good), other=8 - words[1], kind=100 + words[1])
    changes, said = line.split(" => ")
    for change in changes.strip().split(","):
        field, value = change.split("=")
        words[253 if field == "residual" else FIELDS.index(field)] = int(value)
    write_bytes("bad_model.bin", struct.pack("<256i", *words) + good[1024:])
    refused({"-e": "bad_model.bin"}, "bad_model.bin", *said.split(" | "))


def test_model_files():
    """What is no model, or not all of it."""
    good = read_bytes("good.bin")
    flipped = bytearray(good)
    flipped[5000] ^= 1
    for data, *said in ((b"", "empty"), (good[:100], "truncated", "100"), (good[:1024], "1024", len(good)),
                        (good[:-4], len(good) - 4, len(good)), (good + b"\0", len(good) + 1, len(good)),
                        (flipped, "checksum"), (read_bytes("train.bin"), "a token shard", SHARD_MAGIC),
                        (b'{"settings": 1}\n', "text"), (b"to be or not to be\n" * 100, "text"),
                        (bytes(range(256)) * 8, "not a model checkpoint")):
        write_bytes("bad_model.bin", data)
        refused({"-e": "bad_model.bin"}, "bad_model.bin", *said)


def test_export_of_another_kind():
    tool = os.path.join(ROOT, "dev/eval/export_hf.py")
    p = subprocess.run([sys.executable, tool, "rms.bin", "hf"], capture_output=True, text=True, check=False)
    assert p.returncode == 1 and "not GPT-2" in p.stderr and "parallel" in p.stderr
    assert p.stderr.count("\n") <= 3 and not os.path.exists("hf")


# ---- later, but before it is too late ----

def test_wrong_token_far_into_the_data():
    """It stops the run when it is reached, with a sentence and no checkpoint."""
    tokens = list(sentences(3, 3000))
    tokens[2000] = 256
    write_shard("late.bin", tokens)
    result = run({"-i": "late.bin", "-x": "epoch", "--shuffle": 0, "-o": "late"})
    assert result.code == 1 and len(result.err.splitlines()) <= 3
    assert "256" in result.err and "late.bin" in result.err
    assert not [name for name in os.listdir("late") if name.startswith("model_")]
    assert read_bytes("late/main.log").count(b" trl:") >= 10


def test_nothing_can_be_written():
    """Text that could not be written is an error; a model is saved all the same."""
    for flags in ({"-x": 0}, {"-e": "good.bin", "-x": 0, "--prompt": "tak "}, {"-x": 2, "-o": "unheard"}):
        with open("/dev/full", "wb") as full:
            p = subprocess.run(Program.command(flags), stdout=full, stderr=subprocess.PIPE, check=False,
                               env=Program.environment(1))
        assert p.returncode == 1 and p.stderr.startswith(b"error: cannot write to standard output")
        assert p.stderr.count(b"\n") == 1
    assert model_path("unheard")
