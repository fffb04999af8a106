"""Texts that the program writes: prompts, samples in training, chat.

Models that leave no doubt tell samples apart. What is drawn from given logits is for test_host.cpp, texts
beyond T against whole forwards for test_gpt2, greedy texts against the judge for test_training.py.
"""
import fcntl
import os
import re
import subprocess
import termios

import pytest

from jobs import Terminal
from trainer import ALONE, T, run, run_ok, snapshot, write_shard
from twins import constant_model, formats, hand_made, np, trained


def texts(flags, **more):
    return run_ok({"-x": 0, "--prompt": "tak ", **flags, **more}).samples()


@pytest.mark.numeric
def test_prompt():
    model = {"-e": trained(), "-i": "nothing.bin", "-j": "nothing.bin"}
    before, greedy = snapshot(), {"--temperature": 0}
    one = run_ok({**model, "-x": 0, "--prompt": "tak "})
    text = one.samples()
    assert len(text) == 1 and text[0].startswith("tak ") and len(text[0]) > 4
    assert not one.val_losses() and not one.losses() and snapshot() == before
    assert texts(model) == text != texts({**model, "--seed": 5})
    likeliest = texts({**model, **greedy})
    for same in ({**greedy, "--seed": 5}, {"--top-k": 1}, {"--top-k": 1, "--seed": 9}):
        assert texts({**model, **same}) == likeliest
    assert [len(texts({**model, **greedy, "-g": n})[0]) for n in (1, 5)] == [5, 9]
    far = texts({**model, **greedy, "-g": 1000})[0]
    assert len(far) == 1004 and far.startswith(likeliest[0])
    assert T - 1 <= len(texts({**model, "--prompt": "a" * (T - 2), "-g": 5})[0]) <= T + 3
    assert len(texts({**model, "--prompt": "", "-g": 5})) == 1
    odd = "\u00e9\u00df\u4e16"
    assert texts({**model, "--prompt": odd})[0].startswith(odd.encode().decode("latin-1"))


@pytest.mark.numeric
def test_several_samples():
    """A text is the same whatever is written beside it, across the end of T."""
    flags = {"-e": trained(), "-g": T + 9, "--verbose": -1}
    many = texts({**flags, "--num-samples": 70})        # more than are written at once
    assert (len(many), len(set(many))) == (70, 70)
    assert texts({**flags, "--num-samples": 3}) == many[:3] and texts(flags) == many[:1]


@pytest.mark.numeric
def test_documents():
    """A document ends where the model says so, and without a prompt a new one begins."""
    document = "once upon a time"
    write_shard("documents.bin", b"\0once upon a time" * 150)
    model = trained({"-e": "L2,NH2,C32,T32,V256", "-i": "documents.bin", "-b": 4}, "documents", 200)
    flags = {"-e": model, "--temperature": 0, "-g": 30}
    for prompt in ("once upon", document[:-1]):
        assert texts({**flags, "--prompt": prompt}) == [document]
    in_training = run_ok({**flags, "-i": "documents.bin", "-l": 0, "-x": 2, "-s": 2})
    assert in_training.samples() == [document]


@pytest.mark.numeric
def test_gpt2_vocabulary():
    """Where the vocabulary is GPT-2's, text begins after token 50256 and ends with it."""
    dims = formats.Dims(maxT=16, V=50257, L=1, NH=1, C=16)
    wte = np.zeros((dims.Vp, dims.C), np.float32)
    end, the, zero = 50256, 262, 0                      # " the" is 262; 0 is "!"
    # what stands in row 0 of a model without layers points to one token: the end to " the", 0 to "?" (30)
    for token, at, size in ((end, 0, 1), (the, 0, 9), (zero, 4, 1), (30, 4, 9)):
        wte[token, at], wte[token, at + 1] = size, -size
    start = {"-e": hand_made("start.bin", dims, wte=wte), "-b": 1, "-g": 4, "--temperature": 0}
    assert run_ok({**start, "-x": 1, "-l": 0, "-s": 1}).samples() == [" the" * 4]
    assert texts({**start, "--prompt": "!"}) == ["!????"]
    for name, says, text in (("ends", {end: 1, 11: 0}, "Hello"), ("commas", {end: 0, 11: 1}, "Hello,,,,")):
        model = constant_model(name + ".bin", says, V=50257, length=16)
        assert texts({**start, "-e": model, "--prompt": "Hello"}) == [text]


@pytest.mark.numeric
@pytest.mark.parametrize("flags, times, samples", [
    ({"-g": 5}, 5, 1), ({"-g": 7, "--num-samples": 3}, 7, 3),
    ({"-g": 5, "--top-k": 3, "--temperature": 2}, 5, 1), ({"-g": 1000}, 1000, 1), ({}, 64, 1),
    ({"-t": 9}, 64, 1), ({"-t": 3}, 64, 1), ({"-g": 3, "--num-samples": 150}, 3, 150)], ids=str)
def test_constant_model(flags, times, samples):
    """What a model is certain of is written, in its letter and as often as asked."""
    model = constant_model("a.bin", {ord("a"): 0})
    assert texts({"-e": model, "--prompt": "x", **flags}) == ["x" + times * "a"] * samples


@pytest.mark.numeric
def test_no_letters():
    """Where there is no tokenizer, ids are written; and nothing where the text ends at once."""
    model = constant_model("ids.bin", {299: 0}, V=300)
    result = run_ok({"-e": model, "-x": 2, "-l": 0, "-s": 1, "-g": 3, "--num-samples": 2})
    assert result.samples() == ["299 299 299 "] * 4
    assert texts({"-e": constant_model("end.bin", {0: 0})}) == ["tak "]


def test_other_steps_and_seeds():
    model = constant_model("four.bin", {ord("a"): 2, ord("b"): 1, ord("c"): 0, ord("d"): -1})
    flags = {"-e": model, "-x": 3, "-l": 0, "-s": 1, "-g": 30, "-b": 1}
    assert len({*run_ok(flags).samples(), *run_ok({**flags, "--seed": 4}).samples()}) == 6


# ---- on a terminal, and chat ----

@pytest.mark.cpu_only
@pytest.mark.parametrize("text", ["\u20ac".encode(), b"\xe2\x82", b"\xff\x80a"],
                         ids=["whole", "begun", "none"])
def test_characters(text):
    """What goes to the terminal ends with whole characters, and bytes that are none come out at the end. A
    control character commands no terminal."""
    period, name = bytes([1]) + text, "characters" + text.hex()
    write_shard("characters.bin", period * 400)
    trained({"-e": "L1,NH2,C32,T32,V256", "-i": "characters.bin", "-j": "characters.bin", "-b": 2}, name, 100)
    flags = {**ALONE, "-e": name, "-x": 0, "--prompt": "\x01", "-g": 2 * len(period) - 1, "--temperature": 0}
    code, shown = Terminal(flags, stderr=subprocess.DEVNULL).end()
    assert (code, shown) == (0, period.replace(b"\x01", rb"\x01") * 2 + b"\r\n")


@pytest.mark.cpu_only
def test_chat():
    """Lines are answered through a pipe, as one text that goes on: what was said before counts."""
    flags = {**ALONE, "-e": trained(), "-x": 0, "--temperature": 0, "-g": 5, "--verbose": -1}

    def chat(lines, **more):
        result = run({**flags, "-e": None, "-x": None, "chat": trained(), **more}, input=lines)
        assert (result.code, result.err) == (0, "")
        return result.out

    history, wanted = "", ""
    for line in ("tak", "lorin ba", "", "m"):           # an empty line lets the text go on
        history += ("\n" if history and line else "") + line
        answer = run_ok({**flags, "--prompt": history}).out[:-1]
        assert len(answer) == 5
        history, wanted = history + answer, wanted + answer + "\n"
    assert chat(b"tak\nlorin ba\n\nm") == wanted and chat(b"") == ""
    assert chat(b"tak " * 100 + b"\n")[-1] == "\n"      # a line longer than T
    text = ("tak " * T)[:T - 2]                         # and the document's beginning: T - 1 tokens
    text += run_ok({**flags, "--prompt": text, "-g": 3}).out[:-1]
    for length in (T - 1, T, T + 1):
        assert chat(text[:length - 1].encode(), **{"-g": 1}) == text[length - 1] + "\n"
    long = chat(b"tak", **{"-g": None, "--temperature": 1})[:-1]            # a sentence is not broken off
    assert 64 <= len(long) < 256 and long[-1] in ".!?\n" and not re.search("[.!?\n]", long[63:-1])


@pytest.mark.cpu_only
def test_chat_on_a_terminal():
    """Ctrl-C ends a text, then a line that is being typed, and Ctrl-D ends the program."""
    def take_terminal():
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    terminal = Terminal({**ALONE, "chat": trained(), "-g": 1 << 24}, stderr=subprocess.PIPE,
                        preexec_fn=take_terminal)

    def until(text, keys):
        """Types these keys where the text has come."""
        assert terminal.until(lambda shown: shown.endswith(text)), terminal.shown[-100:]
        terminal.shown = b""
        os.write(terminal.ours, keys)

    until(b"> ", b"tak\n")
    assert terminal.until(lambda shown: len(shown) >= 300), "a text without an end"
    assert terminal.shown[:8] == b"tak\r\ntak", "what is typed, and the text that goes on from it"
    os.write(terminal.ours, b"\x03")
    until(b"\r\n> ", b"lor")
    until(b"lor", b"\x03")
    until(b"> ", b"\x04")
    assert terminal.end()[0] == 0
    notes = terminal.p.stderr.read().decode()
    assert re.search(r"^note: \S+ goes on from each line by 16777216 tokens .*Ctrl-D.*\n"
                     r"note: \d+ tokens, the first after .* tokens/s\n\Z", notes, re.M), notes
    terminal.p.stderr.close()
