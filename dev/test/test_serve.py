"""serve RUN, which draws tokens for other programs, and dev/serve.py: the page, OpenAI's API, the terminal.
"""
import concurrent.futures
import contextlib
import http.client
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from checks import LEASH, ROOT, read, run_program, write
from test_conversations import CHATML, own_template, tokenizer_files
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
        assert answer.startswith("error ") and any(map(answer.__contains__, said.split("|"))), (words, answer)
    assert got["none"] == [f"error the prompt has 0 tokens; allowed are 1 to {T}"]
    assert got["fine"][-1] == "end length"


@pytest.mark.numeric
def test_cancel():
    """A text ends between two tokens, and one that waits is never begun."""
    model = constant_model("endless.bin", {ord("a"): 5})
    p = subprocess.Popen(Program.command({**ALONE, "serve": model}), stdin=subprocess.PIPE, bufsize=0,
                         stdout=subprocess.PIPE, env=Program.environment(1))
    with p:
        p.stdin.write("".join(line_of(i, sample_tokens=20000) for i in "abc").encode())
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


# ---- dev/serve.py ----

SERVE = [sys.executable, os.path.join(ROOT, "dev/serve.py")]
FAKE = f"""#!{sys.executable}
import json, os, queue, sys, threading, time
ready, said, pause = json.load(open(sys.argv[2]))
asked, gone = queue.Queue(), set()
def read():
    for line in sys.stdin:
        with open("asked.txt", "a") as f:
            f.write(line)
        words = dict(word.split("=") for word in line.split())
        gone.add(words.get("cancel"))
        asked.put(words)
    asked.put(None)
threading.Thread(target=read).start()
print(ready, flush=True)
while words := asked.get():
    for token in said[:int(words.get("sample-tokens", 0))]:
        if token < 0:
            os._exit(3)
        time.sleep(pause)
        if words["id"] in gone:
            break
        print(words["id"], token, flush=True)
    if "id" in words:
        print(words["id"], "end length", flush=True)
"""


def faked(said, folder=".", V=256, T=T, chat=0, pause=0):       # pylint: disable=W0621
    """What makes serve.py run a program that always draws these tokens, and writes down what it is asked."""
    write("fake.py", FAKE)
    write("fake.json", json.dumps([f"ready V={V} T={T} chat={chat} model={folder}/m.bin", list(said), pause]))
    write("asked.txt", b"")
    return ["fake.json", "--program", "./fake.py"]


def asked_for(words):
    """Waits until the program has been asked for this."""
    end = time.monotonic() + 30
    while words not in read("asked.txt").decode():
        assert time.monotonic() < end, words
        time.sleep(0.02)


class Client:
    """dev/serve.py on a port of its own, until the `with` ends. err: how what it has to say begins."""
    err = ""

    def __init__(self, *words, serve=SERVE):        # pylint: disable=W0102
        pytest.importorskip("jinja2")
        pytest.importorskip("tokenizers")
        self.p = subprocess.Popen([*LEASH, *serve, "--port", "0", *words], stdout=subprocess.PIPE, text=True,
                                  stderr=subprocess.PIPE, env=Program.environment(1))
        self.said = self.p.stdout.readline()
        assert self.said, self.p.stderr.read()
        self.port = int(re.search(r":(\d+)/", self.said)[1])

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.p.terminate()
        err = self.p.communicate(timeout=60)[1]
        assert kind or self.p.returncode == 128 + signal.SIGTERM and bool(err) == bool(self.err), err
        assert kind or err.startswith(self.err), err

    def ask(self, path, fields=None, method="POST", **headers):
        """(status, what came)"""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        body = fields if isinstance(fields, (bytes, type(None))) else json.dumps(fields)
        connection.request(method, path, body, headers)
        with contextlib.closing(connection):
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def complete(self, prompt="tak ", **fields):
        """The text, of a stream put together again."""
        status, text = self.ask("/v1/completions", {"prompt": prompt, **fields})
        assert status == 200, text
        if not fields.get("stream"):
            return json.loads(text)["choices"][0]["text"]
        events = [part.removeprefix("data: ") for part in text.split("\n\n")]
        assert events[-2:] == ["[DONE]", ""]
        return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-2])


@pytest.mark.cpu_only
def test_refused():
    """OpenAI's form of errors, and nothing else happens."""
    long = b"{" + b" " * 10**8
    with Client(trained(), "--program", Program.path) as client:
        local, name = f"http://127.0.0.1:{client.port}", os.path.basename(trained())
        cases = [("/v1/completions", fields, 400, said) for fields, said in (
            (b'{"prompt": "a', "no JSON"), (b"[" * 10**5, "no JSON"), (b'{"prompt": "\xff"}', "no JSON"),
            ([], "no object"), ({}, "prompt must be"), ({"prompt": [256]}, "from 0 to 255"),
            ({"prompt": "a" * T}, f"has {T + 1} tokens, and the model takes {T} "),
            ({"prompt": ["a" * T]}, f"has {T + 1} tokens"), ({"prompt": [[256]]}, "from 0 to 255"),
            ({"prompt": "a" * 1000}, "has 1000 characters, and the model takes"),
            ({"prompt": ["a", "a"]}, "prompt must be"),
            ({"prompt": "a", "tools": [1]}, "tools other than [] is not supported"),
            *(({"prompt": "a", key: value}, f"{key} ") for key, value in (
                ("temperature", -1), ("temperature", float("nan")), ("top_p", "1"), ("top_k", 1.5),
                ("top_k", True), ("seed", -1), ("seed", 10**99), ("max_tokens", 0), ("n", 2), ("echo", True),
                ("stop", [1]), ("stop", [""]),
                ("stop", ["a"] * 17))))]
        cases += [("/v1/chat/completions", {"messages": []}, 400, "no chat template"),
                  ("/v1/completions", long, 413, f"{len(long)} bytes"),
                  ("/../../etc/passwd", None, 404, "there is"), ("/serve.html", None, 404, "there is"),
                  ("/v1/models", {}, 405, "there is")]
        for path, fields, status, said in cases:
            got, text = client.ask(path, fields)
            error = json.loads(text)["error"]
            assert got == status and said in error["message"], text
            assert error["type"] == "invalid_request_error"
        evil = f"evil.example:{client.port}"
        for headers, status in (({"Host": "evil.example"}, 403), ({"Host": evil}, 403),
                                ({"Origin": "http://evil.example"}, 403), ({"Origin": "null"}, 403),
                                ({"Origin": local}, 200), ({"Host": "localhost:1"}, 200)):
            assert client.ask("/v1/models", method="GET", **headers)[0] == status, headers
        for sent, status in ((b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                              b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b" 411 "),
                             (b"BREW / HTTP/1.1\r\n\r\n", b" 501 "), (b"\x16\x03\x01\n", b"")):
            with socket.create_connection(("127.0.0.1", client.port)) as s:
                s.sendall(sent)
                assert status in s.recv(1 << 16)
        assert client.ask(f"/v1/models/{name}", method="GET")[0] == 200 and client.complete(max_tokens=1)
    with Client(trained(), "--program", Program.path, "--host", "0.0.0.0") as client:
        key = re.search(r"/#(\S+)\n", client.said)[1]
        for headers, status in (({}, 401), ({"Authorization": "Bearer x"}, 401),
                                ({"Authorization": "Bearer " + key, "Host": "other.example"}, 200)):
            assert client.ask("/v1/models", method="GET", **headers)[0] == status, headers


@pytest.mark.cpu_only
def test_many_clients():
    """A seed has one text: that of `sample`, alone and among others, of whom some leave and some hang."""
    def sampled(seed):
        flags = {**ALONE, "sample": trained(), "--prompt": "tak ", "-g": 28, "--seed": seed, "--verbose": -1}
        return run_ok(flags).out[:-1].encode("latin-1").decode("utf-8", "replace")

    def memory():
        return int(re.search(r"VmRSS:\s+(\d+) kB", read(f"/proc/{client.p.pid}/status").decode())[1])

    body = json.dumps({"prompt": "tak ", "max_tokens": 27, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    with Client(trained(), "--program", Program.path) as client, \
            concurrent.futures.ThreadPoolExecutor(64) as pool, contextlib.ExitStack() as hanging:
        for sent in (b"", b"GET / HT", head, head + body):
            for _ in range(4):
                s = hanging.enter_context(socket.create_connection(("127.0.0.1", client.port)))
                s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
                s.sendall(sent)

        def one(i):
            if i % 8:
                return client.complete(seed=i % 3, max_tokens=99, stream=bool(i % 2))
            with socket.create_connection(("127.0.0.1", client.port)) as s:
                s.sendall(head + body)
                return s.recv(10)

        wanted, used = list(map(sampled, range(3))), []
        for _ in range(5):                      # more than may wait at once
            got = list(pool.map(one, range(64)))
            assert all(got[i] == wanted[i % 3] for i in range(64) if i % 8)
            used.append(memory())
        assert used[-1] < used[0] + 4096, used


@pytest.mark.cpu_only
def test_characters_and_stops():
    """No part of a stream ends inside a character, or has what may become a text of `stop`."""
    said = "\u20ac<b>\U0001f600 end".encode() + b"\xe2\x82"
    with Client(*faked(said)) as client:
        whole = said.decode("utf-8", "replace")
        assert client.complete() == client.complete(stream=True) == whole
        for stops in (["> "], ["<b>"], ["b>\U0001f601", " en"], ["nd", "b>"], ["\u20ac"], whole[-1]):
            want = min((whole.split(stop)[0] for stop in stops), key=len)
            assert client.complete(stop=stops) == client.complete(stop=stops, stream=True) == want

    def asked(words, fields):
        with Client(*faked([]), *words) as client:
            assert client.complete(**fields) == ""
        return set(read("asked.txt").decode().split()[1:])

    assert asked(["--seed", "3"], {"prompt": "", "top_k": 7}) == {
        "temperature=1.0", "top-k=7", "top-p=1.0", "seed=3", f"sample-tokens={T}", "stop=0", "tokens=0"}
    fields = {"prompt": "a\0b\ud800", "seed": 4, "temperature": 0, "max_tokens": 5}
    assert asked(["--top-p", "0.5", "--seed", "3"], fields) == {
        "temperature=0", "top-k=0", "top-p=0.5", "seed=4", "sample-tokens=5", "stop=0", "tokens=0,97,98,63"}


@pytest.mark.cpu_only
def test_chat():
    """By the chat template of the model's file, or of its folder. Special tokens in messages are text."""
    said = [("system", "Be brief."), ("user", " Hi<|endoftext|></s>"), ("assistant", "Yes"), ("user", "?")]
    asked = {"messages": [{"role": role, "content": [{"type": "text", "text": content}]}
                          for role, content in said]}
    folder = own_template("{{ bos_token }}" + CHATML, "with-template")
    write(f"{folder}/generation_config.json",           # more ends, and what is no token
          '{"eos_token_id": [7, 261, -1, true, "x", null, {}]}')
    ids = {byte: i for i, byte in enumerate(tokenizer_files.byte_characters())}
    end, bos, eos, start, stop = range(256, 261)            # END, and SPECIAL of test_conversations.py
    chatml = [end, bos]
    for role, content in (*said, ("assistant", "")):
        chatml += [start, *map(ids.get, f"{role}\n{content}".encode())]
        chatml += [stop, ids[ord("\n")]] * (role != "assistant" or content != "")
    ours = b"System: Be brief.\n\nUser: Hi<|endoftext|></s>\n\nAssistant: Yes\0User: ?\n\nAssistant:"
    for flags, prompt, stops, answer in (({"chat": 1}, [0, *ours], {0}, [*b" \nOK ", 0]),
                                         ({"folder": folder, "V": 261}, chatml, {7, end, eos, stop},
                                          [*map(ids.get, b"OK "), start, stop])):
        with Client(*faked(answer, T=len(prompt) + len(answer) - 1, **flags)) as client:
            status, got = client.ask("/v1/chat/completions", asked)
            assert (status, json.loads(got)["choices"][0]["message"]) == (200, {"role": "assistant",
                                                                                "content": "OK "})
            streamed = client.ask("/v1/chat/completions", {**asked, "stream": True})[1]
            deltas = [json.loads(event[6:])["choices"][0]["delta"] for event in streamed.split("\n\n")[:-2]]
            counted = {"include_usage": True, "include_obfuscation": False}
            fields = {**asked, "stream": True, "stream_options": counted}
            streamed = client.ask("/v1/chat/completions", fields)[1]
            assert '"usage": {"prompt_tokens": %d' % len(prompt) in streamed
            assert "".join(delta["content"] for delta in deltas) == "OK " and deltas[0]["role"] == "assistant"
            words = dict(word.split("=") for word in read("asked.txt").decode().splitlines()[0].split())
            assert list(map(int, words["tokens"].split(","))) == prompt
            assert words["sample-tokens"] == str(len(answer))
            assert set(map(int, words["stop"].split(","))) == stops
            plain = client.ask("/v1/completions", {"prompt": "<|endoftext|></s>"})
            last = read("asked.txt").decode().splitlines()[-1].split("tokens=")[-1].split(",")
            assert plain[0] == 200 and len(last) == 1 + len("<|endoftext|></s>") and last[0] == str(prompt[0])
            more = {"messages": [*asked["messages"], {"role": "user", "content": "?"}]}
            for fields, why in ((more, "begin a new conversation"), ({"messages": []}, "must be a list"),
                                ({"messages": [{"role": "me", "content": "a"}]}, "the role 'me'"),
                                ({"messages": [{"role": "user", "content": 1}]}, "int")):
                status, got = client.ask("/v1/chat/completions", fields)
                assert status == 400 and why in json.loads(got)["error"]["message"], got


@pytest.mark.cpu_only
def test_templates():
    """One that cannot be used is named, and the model goes on with texts; --template must be usable."""
    odd = own_template([5, {"name": "default", "template": 5}], "odd")
    good, bad = own_template(CHATML, "good"), own_template("{{ bos_token }}" + CHATML, "bad", settings=False)
    for words, model, err, status in (([], bad, "note: it goes on with texts alone: 'bad' has no tok", 400),
                                      ([], odd, "note: it goes on with texts alone: 'odd': the chat", 400),
                                      (["--template", good], bad, "", 200)):
        with Client(*faked([], folder=model, V=261, T=400), *words) as client:
            fields = {"messages": [{"role": "user", "content": "Hi"}]}
            assert client.ask("/v1/chat/completions", fields)[0] == status
            assert client.complete("Hi") == ""
            client.err = err
    code, _, err = run_program([*SERVE, *faked([], folder=good, V=261), "--template", bad])
    assert code == 1 and err.startswith("error: 'bad' has no tokenizer_config.json, which says")
    write("good/tokenizer_config.json", "[]")
    code, _, err = run_program([*SERVE, *faked([], V=261, folder="odd"), "--template", "good"])
    assert code == 1 and err.startswith("error: 'good': tokenizer_config.json is not a JSON object")
    text = read("odd/tokenizer.json").decode().replace('"lstrip": false', '"lstrip": 5')
    write("odd/tokenizer.json", text)
    write("odd/tokenizer.bin", tokenizer_files.tokenizer_bin(text.encode(), "<|endoftext|>"))
    code, _, err = run_program([*SERVE, *faked([], V=261, folder="odd")])
    assert code == 1 and err.startswith("error: cannot read 'odd/tokenizer.json': ") and "hint" in err
    os.remove("bad/tokenizer.json")
    code, _, err = run_program([*SERVE, *faked([], folder="bad", V=261)])
    assert code == 1 and err == "error: 'bad/tokenizer.json': No such file or directory\n"


@pytest.mark.cpu_only
def test_who_leaves_frees_the_place():
    """Between two tokens, streaming or not; and who waits while the program ends is told."""
    with Client(*faked([97] * 10000, T=20000, pause=0.01), "--max-tokens", "9999") as client:
        for streams in (True, False):
            body = json.dumps({"prompt": "a", "stream": streams}).encode()
            with socket.create_connection(("127.0.0.1", client.port)) as s:
                s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"
                          % (len(body), body))
                s.recv(10) if streams else time.sleep(0.1)
            asked_for(f"cancel={2 - streams}\n")
    client = Client(*faked([97, -1], pause=0.2))
    for streams in (True, False):
        status, got = client.ask("/v1/completions", {"prompt": "a", "stream": streams})
        assert status == (200 if streams else 503) and "the program that draws the tokens has ended" in got
    assert client.p.wait(60) == 1 and client.p.stderr.read().startswith("error: the program that draws")


@pytest.mark.cpu_only
def test_bounds():
    """A client that sends a byte now and then is dropped, and so is one too many; neither leaves a trace."""
    serve = [sys.executable, "-c", f"import sys; sys.path.insert(0, {os.path.join(ROOT, 'dev')!r})\n"
             "import serve; serve.REQUEST_S, serve.MOST_CLIENTS = 1, 8; serve.main()"]
    length = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999\r\n\r\n"
    with Client(*faked(b"xy"), serve=serve) as client:
        def connected():
            return socket.create_connection(("127.0.0.1", client.port), timeout=0.1)

        for sent in (b"G", length):
            with connected() as s:
                end, came = time.monotonic() + 10, None
                while came is None and time.monotonic() < end:
                    with contextlib.suppress(TimeoutError):
                        s.sendall(sent)
                        sent, came = b"a", s.recv(9)
            assert came == b""
        with contextlib.ExitStack() as many:
            clients = [many.enter_context(connected()) for _ in range(12)]
            clients[-1].settimeout(10)
            assert clients[-1].recv(9) == b""
        end, text = time.monotonic() + 10, ""
        while not text and time.monotonic() < end:      # until the others' end has been seen
            with contextlib.suppress(ConnectionError, http.client.HTTPException):
                text = client.complete()
        assert text == "xy"


@pytest.mark.cpu_only
def test_on_the_terminal():
    """Lines are gone on from, an empty one begins anew, Ctrl-C ends a text alone."""
    def talk(words, lines):
        p = subprocess.run([*SERVE, *words, "--terminal"], input=lines, capture_output=True, timeout=60,
                           env=Program.environment(1, PYTHONIOENCODING="utf-8"), check=False)
        return p.returncode, p.stdout.decode(), p.stderr.decode()

    assert talk(faked(b"xy"), b"a\n\nb\n\xff\n") == (0, "xy\n" * 3, "")
    prompts = [line.split("tokens=")[-1] for line in read("asked.txt").decode().splitlines()]
    assert prompts == [",".join(map(str, [0, *text])) for text in (b"a", b"b", "bxy\n\ufffd".encode())]
    code, out, err = talk(faked(b"xy"), b"a" * T + b"\na")
    assert (code, out) == (0, "xy\n") and err.startswith(f"error: the prompt has {T + 1} tokens")
    words = [*faked(b"x" * 10000, T=20000, pause=0.01), "--terminal", "--max-tokens", "9999"]
    p = subprocess.Popen([*LEASH, *SERVE, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
                         env=Program.environment(1), start_new_session=True)
    with p, contextlib.ExitStack() as ends:
        (hangs := threading.Timer(60, p.kill)).start()
        ends.callback(hangs.cancel)
        for number in (1, 2):
            p.stdin.write(b"a\n")
            assert p.stdout.read(1) == b"x"
            os.killpg(p.pid, signal.SIGINT)     # as a terminal's Ctrl-C
            asked_for(f"cancel={number}\n")
            assert set(p.stdout.readline()) <= {*b"x\n"}
        p.stdin.close()
        assert p.stdout.read() == b"" and p.wait(60) == 0
    write("reads.py", f"#!{sys.executable}\nimport sys\n"
          "open('asked.txt', 'w').write('reads')\nsys.stdin.read()")
    os.chmod("reads.py", 0o755)
    for words, lines, number, said in (
            (["fake.json", "--program", "./reads.py"], b"", signal.SIGINT, (b"", 130)),
            (faked(b"xy"), b"a\n" * 9, 0, (b"error: 'standard output': Broken pipe\n", 1))):
        with subprocess.Popen([*LEASH, *SERVE, *words, "--terminal"], stdin=subprocess.PIPE, bufsize=0,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as p:
            if number:                          # while the model is read
                asked_for("reads")
                os.killpg(p.pid, number)
            p.stdout.close()
            p.stdin.write(lines)
            p.stdin.close()
            assert (p.stderr.read(), p.wait(60)) == said


@pytest.mark.cpu_only
@pytest.mark.parametrize("words, said", [
    ("none --program ./train", "error: --program ./train: No such file"),
    ("./none", "error: cannot open './none'"), ("./none --temperature -1", "temperature is -1.0; allowed"),
    ("fake.json --program ./fake.py --template .", "error: --template .: there is no chat template"),
    ("fake.json --program ./fake.py --key a/b", "error: --key: letters, digits"),
    ("fake.json --program ./fake.py --port 99999", "error: --host 127.0.0.1 --port 99999")])
def test_wrong_words(words, said):
    faked(b"")
    program = [] if "--program" in words else ["--program", Program.path]
    code, out, err = run_program([*SERVE, *words.split(), *program])
    assert (code, out) == (1, "") and said in err and "Traceback" not in err


# ---- the page ----

class Browser:
    """A page in headless Chromium, which takes commands at one pipe and answers at another."""

    def __init__(self, url):
        path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        if not path:
            pytest.skip("no Chromium is here")
        (theirs, self.commands), (self.answers, told) = os.pipe(), os.pipe()

        def as_3_and_4():
            for i, pipe in enumerate([os.dup(theirs), os.dup(told)]):
                os.dup2(pipe, 3 + i)

        self.p = subprocess.Popen(
            [*LEASH, path, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
             "--user-data-dir=" + os.path.abspath("chromium"), "about:blank"], preexec_fn=as_3_and_4,
            pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(theirs)
        os.close(told)
        self.rest, self.numbers, self.session = b"", itertools.count(), {}
        target = self.call("Target.createTarget", url=url)["targetId"]
        answer = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = {"sessionId": answer["sessionId"]}

    def call(self, method, **params):
        number = next(self.numbers)
        command = {"id": number, "method": method, "params": params, **self.session}
        os.write(self.commands, json.dumps(command).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                self.rest += os.read(self.answers, 1 << 16) or pytest.fail("Chromium has ended")
            answer, self.rest = self.rest.split(b"\0", 1)
            answer = json.loads(answer)
            if answer.get("id") == number:
                return answer["result"]

    def value(self, script):
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def until(self, script):
        end = time.monotonic() + 60
        while not (value := self.value(script)):
            assert time.monotonic() < end, (script, self.value("document.body.innerText"))
            time.sleep(0.02)
        return value


@pytest.mark.cpu_only
def test_page():
    """A browser sends a text and sees it grow, stops it, begins anew. What the model writes is never HTML."""
    said = b"<img src=x onerror=document.title='HTML'>&amp;<script>document.title='HTML'</script>"
    with Client(*faked([*said, *b"." * 10000], T=20000, pause=0.005), "--max-tokens", "9999") as client:
        browser = Browser(f"http://127.0.0.1:{client.port}/")
        browser.until("typeof at !== 'undefined' && at('name').textContent.includes('goes on')")
        browser.value("at('text').value = 'Once', at('seed').value = 7, at('send').click()")
        browser.until("at('talk').textContent.length > 8")
        length = browser.value("at('talk').textContent.length")
        browser.until(f"at('talk').textContent.length > {max(length, 4 + len(said))}")
        assert browser.value("at('talk').textContent").startswith("Once" + said.decode())
        assert browser.value("at('talk').querySelectorAll('*:not(p)').length") == 0
        browser.value("at('stop').click()")
        browser.until("at('told').textContent.endsWith('seed 7, stopped')")
        assert re.match(r"\d+ tokens, \d+ a second", browser.value("at('told').textContent"))
        shown = browser.value("at('talk').textContent")
        browser.value("at('text').value = 'more', at('send').click()")
        browser.until(f"at('talk').textContent.length > {len(shown) + 6}")
        browser.value("at('anew').click()")
        browser.until("!at('talk').textContent && !at('send').disabled")
        assert browser.value("document.title") == "samebits"
        asked = [line for line in read("asked.txt").decode().splitlines() if "tokens=" in line]
        assert "seed=7 " in asked[0] and asked[1].endswith(",".join(map(str, f"{shown}\nmore".encode())))
        asked_for("cancel=1\n")
        asked_for("cancel=2\n")
        browser.p.kill()
        browser.p.wait()
