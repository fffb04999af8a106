"""serve RUN, which draws tokens for other programs, and dev/serve.py: the page, OpenAI's API, the terminal.
"""
import subprocess

import pytest

from trainer import ALONE, Program, T, run_ok
from twins import constant_model, trained

PROMPT = [0, *b"tak "]


def line_of(name, tokens=PROMPT, **settings):
    words = [f"{key.replace('_', '-')}={value}" for key, value in settings.items()]
    return " ".join([f"id={name}", "tokens=" + ",".join(map(str, tokens)), *words]) + "\n"


def answers(lines, **flags):
    """{id: what it got}"""
    out = run_ok({**ALONE, "serve": trained(), **flags}, input=lines.encode()).out.splitlines()
    assert out.pop(0).startswith(f"ready V=256 T={T} chat=0 model=")
    got = {}
    for line in out:
        name, said = line.split(" ", 1)
        got.setdefault(name, []).append(said)
    return got


@pytest.mark.numeric
def test_requests():
    """A text is that of `sample` with the same numbers, whatever was drawn before it."""
    many = {"sample_tokens": 30}
    cases = [{}, {"seed": 5}, {"temperature": 0, "sample_tokens": T + 9}, {"top_k": 2, **many},
             {"temperature": 0.7, "top_p": 0.5, **many}, {"seed": 5, **many}]
    got = answers("".join(line_of(i, **case) for i, case in enumerate(cases)), **{"-g": 20})
    for i, case in enumerate(cases):
        flags = {f"--{key.replace('_', '-')}": value for key, value in case.items()}
        text = run_ok({**ALONE, "sample": trained(), "--prompt": "tak ", "-g": 20, "--verbose": -1, **flags,
                       **({"-g": None} if "sample_tokens" in case else {})}).out[:-1]
        *tokens, end = got[str(i)]
        assert "".join(map(chr, map(int, tokens))) == text and end == "end length"
    ends = got["2"][9]
    stopped = answers(line_of("a", temperature=0, sample_tokens=99, stop=f"255,{ends}"))["a"]
    assert stopped == got["2"][:got["2"].index(ends) + 1] + ["end stop"]


@pytest.mark.cpu_only
def test_wrong_requests():
    wrong = [("sample-tokens=0", "at least 1|1 to 16777216"), ("temperature=101", "0 to 100"),
             ("temperature=nan", "0 to 100"), ("top-k=1.5", "0 to 1048576"), ("top-p=-0.1", "0 to 1"),
             ("seed=-1", "0 to 9000000000000000"), ("tokens=256", "no id from 0 to 255"),
             ("stop=-1", "no id"), ("tokens=1,x", "no id"), ("best-of=3", "has no 'best-of=3'"),
             ("train-data=x", "has no 'train-data=x'"), ("tokens=" + "1," * T + "1", "1 to 32")]
    lines = "".join(line_of(i, [1], x=1).replace(" x=1", " " + words) for i, (words, _) in enumerate(wrong))
    got = answers(lines + "id=none\n" + line_of("fine", sample_tokens=2))
    for i, (words, said) in enumerate(wrong):
        [answer] = got[str(i)]
        assert answer.startswith("error ") and any(part in answer for part in said.split("|")), (words, answer)
    assert got["none"] == [f"error the prompt has 0 tokens; allowed are 1 to {T}"]
    assert got["fine"][-1] == "end length"


@pytest.mark.numeric
def test_cancel():
    """A text ends between two tokens, and one that waits is never begun."""
    model = constant_model("endless.bin", {ord("a"): 5})
    p = subprocess.Popen(Program.command({**ALONE, "serve": model}), stdin=subprocess.PIPE, bufsize=0,
                         stdout=subprocess.PIPE, env=Program.environment(1))
    with p:
        p.stdin.write("".join(line_of(i, sample_tokens=1 << 24) for i in "abc").encode())
        assert p.stdout.readline().startswith(b"ready ")
        for name in ("a", "c"):
            assert all(p.stdout.readline().startswith(name.encode() + b" ") for _ in range(50))
            p.stdin.write(f"cancel=b\ncancel={name}\n".encode())
            said = p.stdout.readline()
            while said.split()[1].isdigit():
                said = p.stdout.readline()
            assert said == f"{name} end cancel\n".encode()
            if name == "a":
                assert p.stdout.readline() == b"b end cancel\n"
        p.stdin.write(line_of("d", sample_tokens=1, temperature=0).encode())
        assert p.stdout.readline() == b"d 97\n"
        p.stdin.close()
        assert p.stdout.read() == b"d end length\n" and p.wait() == 0
