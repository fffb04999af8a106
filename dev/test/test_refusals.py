"""What is refused before anything is written: exit code 1, one sentence, the disk unchanged.

What numbers and flags look like at all is test_host.cpp's, shards' bytes and weights of mixtures are
test_dataloader.cpp's, questions' test_evalloader.cpp's, how ranks are started test_comm.cpp's.
"""
import os
import struct

import pytest

from checks import read, write
from trainer import (ALONE, MODEL_MAGIC, SHARD_MAGIC, T, flags_of, model_path, refused, run, run_ok,
                     without_checksum, write_questions, write_shard)

pytestmark = pytest.mark.cpu_only
NO_TEXT = "L2,NH2,C32,T32,V300"         # no tokenizer has 300 tokens

# FLAG: values that it does not take. The sentence has both.
VALUES = """
-b 0 65537 1e1 10000000000000000000 | -t -1 | -z 1000000000000000 | -l -1 | -q 2 | -k cosin
-x -1 +2 epochs | -u -1 | -c -0.1 | -v -1 | -m 0 | -s -1 | -g 0 | -n -1 | -nk -1 | -nm -1 | -lg -1
--log-every -1 | -r 4 | -f 2 | -a yes | -w 2 | -y 2 | -h 2 | -sl -1 | -sg -1 | --seed -1
--grad-clip -1 | --beta1 1 | --beta2 1 | --eps 0 | --optimizer sgd | --muon-lr -1 | --muon-momentum 1
--muon-decay -1 | --shuffle 2 | --eval-every -1 | --num-samples 0 | --temperature -1
--top-k -1 | --top-p 1.5 | --verbose 2 | --block serial | --norm layer
--dropout 1 | --kernels fast | --grad-dtype fp8 | --gpus 65 | -zs 2 | --lanes -1
--head-chunks 0 | --state-dtype fp8 | --matmul-dtype fp16 | -pi udp | -pn 4097
-pg -1 | --cooldown 1.1 | --muon-warmup -1
"""


@pytest.mark.parametrize("row", VALUES.replace("\n", "|").strip("|").split("|"), ids=str.strip)
def test_value(row):
    flag, *values = row.split()
    for value in values:
        said = refused({flag: value}, flag).err
        assert f"not '{value}'" in said or f"{flag} {value} " in said, said


# FLAGS => words of the sentence; FLAG NONE: without it
REFUSED = f"""
--foo 1                     => --foo' | hint: --help all
--all 1                     => '--all' | hint: `eval RUN --all`
--n 5                       => did you mean -n (--checkpoint-every)?
--run runs/mine             => hint: -o RUN | `eval RUN` | --like RUN
--wandb 1                   => docs/monitoring.md | Weights & Biases
-Z 1                        => -Z
-ge 0                       => unknown flag '-ge' | hint: leave it out | by itself
--gelu-fusion=2 1           => unknown flag '--gelu-fusion' | hint: leave it out
--batch_size 12             => unknown flag '--batch_size' | hint: -b (--micro-batch)
--block_size=1024 1         => unknown flag '--block_size' | hint: -t (--sequence-length)
--n_layer 12                => '--n_layer' | hint: the model's shape is -e
--init_from gpt2            => '--init_from' | hint: -e (--model) | -y 1 -o RUN
--epochs 3                  => '--epochs' | hint: -x (--max-steps)
--device cuda               => '--device' | train_gpt2cu | train_gpt2cpu
--grad-accum 8              => '--grad-accum' | hint: -z (--total-batch)
--learning_rate -1          => -l (--learning-rate) wants a number | not '-1'
--weight_decay=11 1         => -c (--weight-decay) wants | not '11'
--learning-rate auto --lr 2  => given twice: '--learning-rate' and '--lr'
--beta1 auto                => --beta1 wants a number | not 'auto'
--learning-rate auto        => --learning-rate auto: beside letters, as -b | hint: write all flags
-d 524288 -z 1              => given twice | -z and -d are both the total batch | ZeRO stage is -zs
--matmul-dtype fp8-head --head-chunks 2 => --head-chunks 2 is not for --matmul-dtype fp8-head
-l 1 --lr 2                 => given twice: '-l' and '--lr' | hint: keep one of them
-x ''                       => -x
-x 0                        => -x 0 | refused
-e ''                       => -e
--cooldown 0.6              => --cooldown is for -k wsd | -k cosine
--muon-lr 0.05              => --muon-lr is for --optimizer muon
--muon-momentum 0.5         => --muon-momentum is for --optimizer muon
--muon-warmup 9             => --muon-warmup is for --optimizer muon
--muon-decay 5              => --muon-decay is for --optimizer muon
-z 130                      => 130 | use -z 128
-z 100                      => 100 | 128
-z 1                        => -z 1 | -zs
-z 0                        => -z 0 | -zs
-z 2 -b 1 -t 4              => -z 2 | -zs
-z 0 -b 1 -t 1              => -z 0 | -zs
-t {T + 1}                  => {T + 1} | longest sequence, {T}
--grad-dtype bf16           => --grad-dtype bf16 needs the CUDA program
--matmul-dtype fp8 -b 1 -t 8 => multiples of 16: -b 1 x -t 8 = 8 tokens
--matmul-dtype fp8 -e L2,NH1,C24,T32,V256 => multiples of 16 | C = 24
-y 1 -o ''                  => -y 1 needs -o
--on-bad-loss rewind           => unknown flag '--on-bad-loss' | leave it out | -y 1
--prompt hi -x 0 -o '' -e {NO_TEXT} => --prompt | 300
--prompt hi -s 5 -x 10 -e {NO_TEXT} => --prompt | 300
--prompt {'a' * T} -x 0 -o ''   => {T} | {T - 2}
--prompt {'a' * T} -s 5 -x 10   => {T} | {T - 2}
--prompt aaaaaaa -t 8 -x 0 -o '' => 7 | 6
--prompt hi -i NONE -x NONE => hint: -x 0

-i no/such.bin           => no/such.bin
-v 1 -j such.bin         => such.bin
-i train.bin:0.7,val.bin => 'val.bin' has no weight | hint: | web_*.bin:0.7
-v 1 -j val.bin:1,train.bin:1 => train.bin' is both training data
-i no_models             => 'no_models' is a folder | hint: | 'no_models/*_train*.bin'
-v 1 -j no_models/       => 'no_models/' is a folder | 'no_models/*_val*.bin'
-v 1 -j tokens_256.bin   => tokens_256.bin | 256
-v 1 -j train.bin        => train.bin
-o plain/run             => plain/run
-o plain                 => plain
-o /proc/nowhere/run     => /proc/nowhere
-o {'n' * 300}           => {'n' * 60}
-o {'./' * 2025}         => 4050 bytes | at most | hint:
-o run                   => -o run | already holds a run | (its checkpoints) | -y 1
-o logged                => -o logged | already holds a run (main.log) | -y 1
-e run -o run            => -e run | -y 1
-e run/ -o run           => -e run | -y 1
-e run -o run -x 0       => run
-e run.json_is_cut -x 0 -o NONE -i NONE -j NONE => run.json_is_cut/run.json | JSON
-e no_models/            => -e no_models: | no model_*.bin
-e no/model.bin          => no/model.bin | No such file | hint: -e takes a model_*.bin
-e gpt2_124M_bf16.bin    => gpt2_124M_bf16.bin | No such file | hint: | dev/hf.py import gpt2 | -e models/gpt2
-e gpt2                  => -e gpt2: | dev/hf.py import gpt2 | -e models/gpt2 | -e d12
-e Some/Model-1B         => Some/Model-1B | hf.py import Some/Model-1B | -e models/Model-1B
-e run/typo              => 'run/typo' | hint: -e takes
-e model_00000001.bin    => model_00000001.bin
-e fifo.bin              => fifo.bin | regular file
-e plain                 => plain
-e rms.bin --block parallel-tied => --block parallel-tied | has parallel
-e rms.bin --norm layernorm      => --norm layernorm | has rmsnorm
-h 1                             => hellaswag_val.bin | get.py hellaswag
-h 1 --eval-data q_gpt2.bin      => q_gpt2.bin | GPT-2 | bytes
-h 1 --eval-data q_label.bin -x 0 -o '' => question 2

-e d13          => d13 | d12
-e m7           => -e m7 | even number from 2 to 192
-e m194         => -e m194 | even number from 2 to 192
--like no/run   => --like no/run | no run.json | hint: --like takes the folder of a run
--like train.bin => --like train.bin | it is a file | hint: | a run, or a model_*.bin there
--like no_json/model_00000001.bin => no run.json beside this model
--like run.json_is_cut => run.json_is_cut/run.json | JSON
--like run -x 0 -o '' => --like is for training
-e d4294967302  => d4294967302 | no such size
-e gpt3:c4294968064                  => no such size
-e L2,NH2,C32,T32,V4294967552        => V | 4294967552
-e L-2,NH2,C32,T32,V256              => L-2 | 1 to
-e L2,NH3,C32,T32,V256               => C=32 | NH=3
-e L2,NH2,C36,T32,V256               => C=36 is not a multiple of 8
-e L2,NH2,C32,T32,V1                 => V=1 | at least 2
-e L2,NH2,C32,T32,V1048577           => 1048577 | at most 1048576
-e L10001,NH2,C32,T32,V256           => 10001 | 10000
-e L2,NH2,C32,T16777217,V256         => 16777217
-e L2,NH1,C12296,T32,V256            => C=12296 | at most | 12288 channels
-e L10000,NH1,C12288,T32,V256                => GiB | free
-e L100,NH1,C12288,T32,V256 -b 65536         => GiB | free
-e L10000,NH12288,C12288,T16777216,V1048576 -b 127   => GiB | free
-e L2,NH2,C32,T16777216,V256 -b 65536        => 65536 | 16777216
-e L2,NH2,C32,T2048,V256 -b 65536            => 65536 | GiB

--gpus 2 -b 1 -z 160          => -z 160 | use -z 128
--gpus 2 -b 1 -z 32           => -z 32 | use -z 64
--gpus 4 -b 1 -z 416          => -z 416 | use -z 384
--gpus 2 -b 1 -z 256 --lanes 3  => --lanes 3
--gpus 2 -b 1 -z 256 --lanes 16 => --lanes 16
--gpus 2 -b 1 -z 256 --lanes 1  => --lanes 1
--gpus 4 -b 1 -z 256 --lanes 2  => --lanes 2
--gpus 3 -b 1 -z 768 --lanes 8  => --lanes 8
--gpus 1 -b 1 -z 768 --lanes 6  => --lanes 6
--gpus 1 -b 1 -z 768 --lanes 5  => --lanes 5
--gpus 3 -i no/such.bin       => no/such.bin
--gpus 2 -v 1 -j no_val.bin   => no_val.bin
--gpus 3 -e val.bin           => val.bin
--gpus 2 -o val.bin/run       => val.bin/run
--gpus 3 -s 1 --prompt {'a' * 99} => 99
"""


@pytest.fixture(autouse=True)
def files():
    """What the table names; made once."""
    if os.path.exists("q_label.bin"):
        return
    for name, flags in {"good": {}, "rms": {"--block": "parallel", "--norm": "rmsnorm"}, "run": {}}.items():
        run_ok({"-o": name, "-x": 1, **flags})
        write(name + ".bin", read(model_path(name)))
    write("plain", b"x")
    os.mkdir("no_models")
    write("logged/main.log", b"s:0 trl:5.5 lr:1e-3 norm:1.0\n")
    write("run.json_is_cut/model_00000001.bin", read("good.bin"))
    write("no_json/model_00000001.bin", read("good.bin"))
    write("run.json_is_cut/run.json", b'{"settings": {"a": 1}')
    os.mkfifo("fifo.bin")                       # nobody will ever write to it
    write_shard("tokens_256.bin", [1] * 40 + [256] * 4000)
    question = [1, 2], [[3], [4, 5], [6], [7]]
    write_questions("q_gpt2.bin", [question] * 3, [0, 1, 2], tokenizer=1)
    write_questions("q_label.bin", [question] * 3, [0, 1, 4])


@pytest.mark.parametrize("line", [line for line in REFUSED.splitlines() if line],
                         ids=lambda line: line.split(" =>")[0].strip())
def test_refused(line):
    flags, said = line.split(" => ")
    refused(flags_of(flags), *said.strip().split(" | "))


@pytest.mark.parametrize("text", """nonsense d12x d+6 gpt3:c100 L4 L2,NH2,C32,T32 L2,NH2,C32,T32,V+256
    _L2,NH2,C32,T32,V256 L,NH2,C32,T32,V256 L2,NH2,C32,T32,V256, L2,L2,NH2,C32,T32,V256
    L2,NH2,C32,T32,V256,V256 L2,NH2,C32,T32,V256,X1 L2,NH2,C32,T32,V256x
    L99999999999999999999,NH2,C32,T32,V256""".split())
def test_descriptor(text):
    text = text.replace("_", " ")
    refused({"-e": text}, f"-e '{text}'", "hint: -e takes")


def test_flag_without_value():
    refused({}, "-h", "--help", extra=["-h"])
    refused({}, "unknown flag '-ge'", "hint: leave it out", extra=["-ge"])
    refused({**ALONE, "sample": "run"}, "sample takes no -x", "hint: leave it out", extra=["-x", "5"])


# ---- models ----

FIELDS = ["magic", "version", "T", "V", "L", "NH", "C", "Vp", "block", "norm"]
HEADERS = f"""
magic=20240325     => 20240325 | {MODEL_MAGIC}
version=1          => version 1 | 3 | 5
version=5          => has SIZE bytes
version=203        => 203
L=-1               => -1
C=36               => C=36 is not a multiple of 8
NH=0               => NH=0
V=257              => 257 | 256
V=2147483647,Vp=2147483647 => 2147483647
Vp=-256            => -256
Vp=2147483640      => 2147483640
residual=2         => residual stream 2
version=103,block=3 => block 3
version=103,norm=-1 => norm -1
"""


@pytest.mark.parametrize("line", HEADERS.strip().splitlines(), ids=lambda line: line.split(" ")[0])
def test_model_header(line):
    good = bytes(without_checksum(read("good.bin")))
    words = list(struct.unpack("<256i", good[:1024]))
    changes, said = line.replace("SIZE", str(len(good))).split(" => ")
    for change in changes.strip().split(","):
        field, value = change.split("=")
        words[253 if field == "residual" else FIELDS.index(field)] = int(value)
    write("bad_model.bin", struct.pack("<256i", *words) + good[1024:])
    refused({"-e": "bad_model.bin"}, "bad_model.bin", *said.split(" | "))


def test_model_files():
    """What is no model, or not all of it."""
    good = read("good.bin")
    flipped = bytearray(good)
    flipped[5000] ^= 1
    for data, *said in ((b"", "empty"), (good[:100], "truncated", "100"), (good[:1024], "1024", len(good)),
                        (good[:-4], len(good) - 4, len(good)), (good + b"\0", len(good) + 1, len(good)),
                        (flipped, "checksum"), (read("train.bin"), "a token shard", SHARD_MAGIC),
                        (b'{"settings": 1}\n', "text"), (b"to be or not to be\n" * 100, "text"),
                        (bytes(range(256)) * 8, "not a model checkpoint")):
        write("bad_model.bin", data)
        refused({"-e": "bad_model.bin"}, "bad_model.bin", *said)


def test_chat_without_a_tokenizer():
    refused({**ALONE, "chat": NO_TEXT, "-o": None}, "error: chat needs a tokenizer", "V=300")


def test_model_beside_a_bad_run_json():
    run_ok({"-e": "run.json_is_cut/model_00000001.bin", "-x": 0})


def test_nothing_can_be_written():
    """Text that could not be written is an error; a model is saved all the same."""
    for flags in ({"-x": 0}, {"-e": "good.bin", "-x": 0, "--prompt": "tak "}, {"-x": 2, "-o": "unheard"}):
        with open("/dev/full", "wb") as full:
            result = run(flags, stdout=full)
        assert result.code == 1 and result.err.count("\n") == 1
        assert result.err.startswith("error: cannot write to standard output")
    assert model_path("unheard")
