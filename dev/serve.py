#!/usr/bin/env python3
"""A page to talk to a run's model, and the API that tools expect: OpenAI's completions and chat.

    python3 dev/serve.py runs/mine                      # http://127.0.0.1:8000/
    python3 dev/serve.py runs/mine --terminal           # the same without a browser
    python3 dev/serve.py models/qwen --host 0.0.0.0     # for others, who need the key that it prints

The trainer draws the tokens, one request after the other (llmc/run/requests.h); here texts become tokens. The
server is the standard library's: one model answers one client at a time, so threads that wait are enough, and
a package would leave limits, deadlines, who may ask and OpenAI's form of errors to us.
"""
import codecs
import contextlib
import http.server
import io
import itertools
import json
import os
import queue
import random
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[1:1] = [HERE, *(os.path.join(HERE, name) for name in ("data", "eval", "reference"))]
from answers import checked                         # noqa: E402
from chat_templates import ChatTemplate, template_text      # noqa: E402
from documents import reading                       # noqa: E402
from export_hf import CHAT_TEMPLATES, kept_ids, words_of    # noqa: E402
from fetch import Problem, need                     # noqa: E402
from hf import Parser, die                          # noqa: E402
from outputs import guard_terminals                 # noqa: E402
from tokenizer_files import decoded, for_chats, tokenizer_json      # noqa: E402

MOST_BYTES = 4 << 20        # of a request
MOST_WAITING = 256          # requests
MOST_CLIENTS = 512          # at once: each has a thread and an open file, of which 1024 are usual
SILENCE_S, REQUEST_S = 20, 60       # that a client neither sends nor takes; until all of a request has come
LOCAL = "127.0.0.1", "localhost"
SETTINGS = {                # type, least, most, default, help
    "temperature": (float, 0, 100, 1.0, "0: always the likeliest token"),
    "top_k": (int, 0, 1 << 20, 0, "draw among the k likeliest tokens; 0: among all"),
    "top_p": (float, 0, 1, 1.0, "of these among the likeliest that have this part of the probability"),
    "seed": (int, 0, 9 * 10**15, None, "the same seed gives the same text (default: drawn anew for each)"),
    "max_tokens": (int, 1, 1 << 24, 256, "most tokens of a text; T ends it, too")}
# OpenAI's fields that would change a text, and their values that do not
UNSUPPORTED = {"n": 1, "best_of": 1, "echo": False, "suffix": "", "logprobs": False, "top_logprobs": 0,
               "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "tools": [], "functions": [],
               "response_format": {"type": "text"}}
ENDED = "the program that draws the tokens has ended"


class Refused(Exception):
    """An answer in OpenAI's form of errors."""

    def __init__(self, what, status=400):
        super().__init__(what)
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.status = status
        self.body = {"error": {"message": what, "type": kind, "param": None, "code": None}}


def number(name, value):
    """The value of a setting."""
    kind, least, most, *_ = SETTINGS[name]
    if not isinstance(value, (int, kind)) or isinstance(value, bool) or not least <= value <= most:
        raise Refused(f"{name} is {json.dumps(value)[:60]}; allowed are {'whole ' * (kind is int)}numbers "
                      f"from {least} to {most}")
    return value


# ---- the model ----

class Program:
    """What draws the tokens."""

    def __init__(self, path, run):
        self.boxes, self.names = {}, itertools.count(1)         # what has come for whom
        self.lock, self.has_ended = threading.Lock(), False
        try:                                # a session of its own: Ctrl-C is for us
            self.process = subprocess.Popen([path, "serve", run], stdin=subprocess.PIPE, text=True,
                                            stdout=subprocess.PIPE, errors="surrogateescape",
                                            start_new_session=True)
        except OSError as error:
            raise Problem(f"--program {path}: {error.strerror}") from error
        ready = re.fullmatch(r"ready V=(\d+) T=(\d+) chat=(\d+) model=(.*)\n", self.process.stdout.readline())
        if not ready:
            sys.exit(self.process.wait() or 1)              # it has said why
        self.V, self.T, self.chat = map(int, ready.groups()[:3])
        self.folder = os.path.dirname(ready[4])
        threading.Thread(target=self.sort, daemon=True).start()

    def sort(self):
        """Each line goes to who has asked."""
        for line in self.process.stdout:
            name, said = line.rstrip("\n").split(" ", 1)
            if box := self.boxes.get(name):
                box.put(said)
        self.has_ended = True
        for box in list(self.boxes.values()):
            box.put("error " + ENDED)

    def say(self, words):
        with self.lock, contextlib.suppress(BrokenPipeError):       # then sort() says that it has ended
            self.process.stdin.write(" ".join(words) + "\n")
            self.process.stdin.flush()

    def tokens(self, request, is_there):
        """Yields each token, and at last "stop" or "length". Who stops asking frees the place."""
        if self.has_ended or len(self.boxes) >= MOST_WAITING:
            raise Refused(ENDED if self.has_ended else "too many requests wait: try again later", 503)
        name = str(next(self.names))
        box, said = self.boxes.setdefault(name, queue.SimpleQueue()), ""
        lists = {"stop": request.ends, "tokens": request.prompt}
        try:
            self.say([f"id={name}", *(f"{key}={value}" for key, value in request.numbers.items()),
                      *(key + "=" + ",".join(map(str, ids)) for key, ids in lists.items())])
            while not said.startswith(("end ", "error ")):
                if not is_there():
                    raise ConnectionAbortedError
                with contextlib.suppress(queue.Empty):
                    if (said := box.get(timeout=0.2)).isdigit():
                        yield int(said)
        finally:
            del self.boxes[name]
            if not said.startswith(("end ", "error ")):
                self.say([f"cancel={name}"])
        kind, what = said.split(" ", 1)
        if kind == "error":
            raise Refused(what, 500)
        yield what


@dataclass
class Request:
    prompt: list                # tokens
    chats: bool
    numbers: dict               # the program's words for SETTINGS
    ends: set                   # tokens that end the text
    stops: list                 # texts that end it
    drawn: int = 0              # tokens so far


class Model:
    """The program with words: the tokenizer of the model's folder, or that of its vocabulary."""

    def __init__(self, program, name, template):
        self.program, self.name = program, name
        folder, words = program.folder, words_of(program.V, program.folder)
        if not words.vocab:
            raise Problem(f"'{folder}' has no tokenizer.bin, and for V={program.V} none is known (256: "
                          "bytes; 50257, 50304: GPT-2)", "copy it and tokenizer.json from beside the shards")
        fast = words.fast or json.loads(tokenizer_json(words.vocab, words.merges))
        self.end, end = words.end, words.end_text()
        package = need("tokenizers", "no text becomes tokens", "tokenizers")
        with reading(os.path.join(folder, "tokenizer.json")):
            special = {token["id"] for token in fast["added_tokens"] if token["special"]}
            to_bytes = decoded(fast)
            self.bytes = {i: b"" if i in special else to_bytes(token) for token, i in words.vocab.items()}
            marks = for_chats(fast, end)
            self.tokenizer = package.Tokenizer.from_str(json.dumps(fast))
        listed = kept_ids(words).get("eos_token_id", [])    # an imported model's
        listed = listed if isinstance(listed, list) else [listed]
        self.ends = {self.end, *(i for i in listed if i < program.V)}
        self.longest = max(map(len, words.vocab))           # characters that a token may have
        self.chats, tokens = False, {"eos_token": end}
        self.template = ChatTemplate("", folder, marks, tokens)
        try:
            own = template or not program.chat
            text = template_text(template or folder) if own else CHAT_TEMPLATES[program.chat]
            if template and not text:
                raise Problem(f"--template {template}: there is no chat template", "it is a folder with "
                              "chat_template.jinja, or with one in tokenizer_config.json")
            if text:
                own = ChatTemplate(text, template or folder, marks, None if own else tokens)
                self.learn(own, words.vocab)
        except Problem as problem:
            if template:
                raise
            print(f"note: it goes on with texts alone: {problem.what}", file=sys.stderr)

    def learn(self, template, vocab):
        """A conversation shows what ends an answer."""
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        answer = template.pieces("a first conversation", messages)[1]
        names = template.special.findall(answer)[-1], template.tokens.get("eos_token")
        self.ends |= {vocab[name] for name in names if name in vocab}
        self.template, self.chats = template, True

    def encode(self, text):
        """Behind the token that begins a document. No document has a byte 0."""
        text = text.replace("\0", "").encode("utf-8", "replace").decode()
        if len(text) > self.longest * self.program.T:       # millions of tokens would take a gigabyte
            raise self.too_long(f"{len(text)} characters")
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids if ids[:1] == [self.end] else [self.end, *ids]

    def too_long(self, size):
        return Refused(f"the prompt has {size}, and the model takes {self.program.T} tokens at most: begin a "
                       "new conversation, or shorten the text")

    def prompt(self, text):
        if isinstance(text, list) and len(text) == 1 and isinstance(text[0], (str, list)):
            text = text[0]                      # a list of prompts, as some tools send one
        if isinstance(text, str):
            return self.encode(self.template.plain(text))
        ids, V = text if isinstance(text, list) else [], self.program.V
        if not ids or not all(type(i) is int and 0 <= i < V for i in ids):
            raise Refused(f"prompt must be a text, or a list of token ids from 0 to {V - 1}")
        return ids

    def prompt_of(self, messages):
        if not self.chats:
            raise Refused("this model has no chat template: it goes on with texts, by /v1/completions")
        if not isinstance(messages, list) or not messages:
            raise Refused('messages must be a list such as [{"role": "user", "content": "Hello"}]')
        try:                                # as in training, where an answer is the last
            messages = checked("messages", [*messages, {"role": "assistant", "content": ""}])[:-1]
            return self.encode(self.template.asked("messages", [message for message, _ in messages]))
        except Problem as problem:
            raise Refused("; ".join(filter(None, (problem.what, problem.hint)))) from problem

    def request(self, asked, chats, defaults):
        """asked: fields of OpenAI's."""
        for name, harmless in UNSUPPORTED.items():
            if asked.get(name) not in (None, harmless):
                raise Refused(f"{name} other than {json.dumps(harmless)} is not supported")
        given = {name.replace("completion_", ""): value for name, value in asked.items() if value is not None}
        numbers = {name: number(name, given.get(name, default))
                   for name, default in {"seed": random.randrange(1 << 31), **defaults}.items()}
        stops = asked.get("stop") or []
        stops = [stops] if isinstance(stops, str) else stops
        if not isinstance(stops, list) or len(stops) > 16 or \
                not all(isinstance(stop, str) and stop for stop in stops):
            raise Refused("stop must be a text or a list of texts, 16 at most")
        prompt = self.prompt_of(asked.get("messages")) if chats else self.prompt(asked.get("prompt"))
        if (room := self.program.T + 1 - len(prompt)) < 1:
            raise self.too_long(f"{len(prompt)} tokens")
        numbers["sample_tokens"] = min(numbers.pop("max_tokens"), room)
        numbers = {name.replace("_", "-"): value for name, value in numbers.items()}
        return Request(prompt, chats, numbers, self.ends, stops)

    def texts(self, request, is_there=lambda: True):
        """Yields (text, None), in whole characters, and at last (text, "stop" or "length")."""
        decoder, kept, begun = codecs.getincrementaldecoder("utf-8")("replace"), "", not request.chats
        for said in self.program.tokens(request, is_there):
            reason = said if isinstance(said, str) else None
            request.drawn += not reason
            data = b"" if reason or said in request.ends else self.bytes.get(said, b"")
            kept += decoder.decode(data, bool(reason))
            kept = kept if begun else kept.lstrip()         # the blank in front of an answer
            if found := [at for at in map(kept.find, request.stops) if at >= 0]:
                kept, reason = kept[:min(found)], "stop"
            begins = [n for stop in request.stops for n in range(1, min(len(stop), len(kept) + 1))
                      if kept.endswith(stop[:n])]
            cut = len(kept) - (0 if reason else max(begins, default=0))
            begun = begun or cut > 0
            yield kept[:cut], reason
            kept = kept[cut:]
            if reason:
                return


# ---- the server ----

class Incoming(socket.SocketIO):
    """What a client sends, until REQUEST_S are over: it may send a byte now and then for ever."""

    def __init__(self, connection):
        super().__init__(connection, "r")
        self.until = time.monotonic() + REQUEST_S

    def readinto(self, buffer):
        if time.monotonic() > self.until:
            raise TimeoutError
        return super().readinto(buffer)


class Handler(http.server.BaseHTTPRequestHandler):
    """A connection has one request."""
    protocol_version, server_version, sys_version, timeout = "HTTP/1.1", "samebits", "", SILENCE_S
    unread = False

    def setup(self):
        super().setup()
        self.rfile = io.BufferedReader(Incoming(self.connection))

    def log_message(self, *_):
        pass

    def head(self, status, kind, more=()):
        self.send_response(status)
        for name, value in (("Content-Type", kind), ("Connection", "close"), ("Cache-Control", "no-store"),
                            ("X-Content-Type-Options", "nosniff"), *more):
            self.send_header(name, value)
        self.end_headers()

    def give(self, value, status=200):
        data = json.dumps(value).encode()
        self.head(status, "application/json", [("Content-Length", len(data))])
        self.wfile.write(data)

    def send_error(self, code, message=None, explain=None):
        """Also what the library refuses by itself."""
        self.unread = True
        with contextlib.suppress(OSError):
            self.give(Refused(message or "this is no request", code).body, code)

    def do_GET(self):
        about = self.server.about
        gives = {"/": self.page, "/v1/models": lambda: self.give({"object": "list", "data": [about]}),
                 "/v1/models/" + about["id"]: lambda: self.give(about)}
        takes = {"/v1/completions": False, "/v1/chat/completions": True}
        path = self.path.partition("?")[0]
        try:
            self.check(path)
            if self.command == "GET" and path in gives:
                gives[path]()
            elif self.command == "POST" and path in takes:
                self.answer(self.body(), takes[path])
            else:
                raise Refused(f"there is GET {', '.join(gives)} and POST {', '.join(takes)}, but not "
                              f"{self.command} {path[:60]}", 405 if path in {**gives, **takes} else 404)
        except Refused as refused:
            self.send_error(refused.status, str(refused))

    do_POST = do_PUT = do_DELETE = do_OPTIONS = do_GET

    def check(self, path):
        """A page of another site may send a browser here, also by a name of its own for this address."""
        host, origin, key = self.headers.get("Host", ""), self.headers.get("Origin"), self.server.key
        if not key and re.sub(r":\d+$", "", host).lower() not in LOCAL:
            raise Refused(f"this is {LOCAL[0]}, and the request is for '{host[:60]}'", 403)
        if origin is not None and origin.partition("://")[2] != host:
            raise Refused(f"a page of '{origin[:60]}' may not ask here", 403)
        given = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if key and path != "/" and not secrets.compare_digest(given, b"Bearer " + key.encode()):
            raise Refused("the key is missing or wrong: Authorization: Bearer KEY", 401)

    def page(self):
        """Its script alone runs there, and speaks to us alone."""
        nonce = secrets.token_hex(16)
        data = self.server.page.replace(b"<script", f'<script nonce="{nonce}"'.encode())
        policy = (f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; "
                  "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
        self.head(200, "text/html; charset=utf-8", [("Content-Security-Policy", policy),
                                                    ("Content-Length", len(data))])
        self.wfile.write(data)

    def body(self):
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]+", length):
            raise Refused("a request needs a Content-Length", 411)
        if len(length) > 9 or int(length) > MOST_BYTES:
            raise Refused(f"the body has {length[:20]} bytes; allowed are {MOST_BYTES}", 413)
        data = b""
        while len(data) < int(length):
            part = self.rfile.read1(int(length) - len(data))
            if not part:
                raise Refused(f"of {length} bytes of the body {len(data)} have come", 408)
            data += part
        try:
            asked = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise Refused(f"the body is no JSON: {error}"[:200]) from error
        if not isinstance(asked, dict):
            raise Refused("the body is JSON, but no object")
        return asked

    def is_there(self):
        poll = select.poll()
        poll.register(self.connection, select.POLLRDHUP)
        return not poll.poll(0)

    def answer(self, asked, chats):
        model = self.server.model
        request = model.request(asked, chats, self.server.defaults)
        kind, streams = "chat.completion" if chats else "text_completion", asked.get("stream")
        base = {"id": secrets.token_hex(12), "object": kind + ".chunk" * bool(chats and streams),
                "created": int(time.time()), "model": model.name}

        def choices(text, reason, first=True):
            role = {"role": "assistant"} if first else {}
            message = {"delta" if streams else "message": {**role, "content": text}}
            content = message if chats else {"text": text}
            return {**base, "choices": [{"index": 0, **content, "logprobs": None, "finish_reason": reason}]}

        def usage():
            count = len(request.prompt)
            return {"prompt_tokens": count, "completion_tokens": request.drawn,
                    "total_tokens": count + request.drawn}

        def send(value):
            self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")

        pieces = model.texts(request, self.is_there)
        if not streams:
            found = list(pieces)
            text = "".join(piece for piece, _ in found)
            return self.give({**choices(text, found[-1][1]), "usage": usage()})
        self.head(200, "text/event-stream")
        try:
            for number, (piece, reason) in enumerate(pieces):
                send(choices(piece, reason, number == 0))
            options = asked.get("stream_options")
            if isinstance(options, dict) and options.get("include_usage"):
                send({**base, "choices": [], "usage": usage()})
        except Refused as refused:
            send(refused.body)
        self.wfile.write(b"data: [DONE]\n\n")
        return None

    def finish(self):
        """A connection that is closed while a body comes, which was refused, loses the answer."""
        super().finish()
        until = time.monotonic() + SILENCE_S
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            while self.unread and time.monotonic() < until and self.connection.recv(1 << 16):
                pass


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = MOST_WAITING

    def __init__(self, host, port, model, defaults, key):
        self.model, self.defaults, self.key = model, defaults, key
        with open(os.path.join(HERE, "serve.html"), "rb") as f:
            self.page = f.read()
        self.about = {"id": model.name, "object": "model", "created": int(time.time()), "owned_by": "user",
                      "chats": model.chats, "max_model_len": model.program.T, "defaults": defaults}
        super().__init__((host, port), Handler)

    def process_request(self, request, client_address):
        if threading.active_count() < MOST_CLIENTS:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], OSError):      # the client has gone
            super().handle_error(request, client_address)


# ---- the terminal ----

def talk(model, defaults):
    """Answers lines of stdin, or goes on from them."""
    by_hand, text, messages = sys.stdin.isatty(), "", []
    sys.stdin.reconfigure(errors="replace")

    def note(words):
        if by_hand:
            print("note: " + words, file=sys.stderr)

    note(f"{model.name} {'answers' if model.chats else 'goes on from'} each line; an empty line begins anew, "
         "Ctrl-C ends a text, Ctrl-D the program")
    while True:
        try:
            line = input("> " if by_hand else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
            continue
        if not line.strip():
            text, messages = "", []
            continue
        begun, said = time.monotonic(), ""
        asked = {"prompt": text + "\n" * bool(text) + line,
                 "messages": [*messages, {"role": "user", "content": line}]}
        try:
            request = model.request(asked, model.chats, defaults)
            for piece, _ in model.texts(request):
                print(piece, end="", flush=True)
                said += piece
        except Refused as refused:
            print(f"error: {refused}", file=sys.stderr)
            continue
        except KeyboardInterrupt:
            pass
        print()
        note(f"{request.drawn} tokens, {request.drawn / (time.monotonic() - begun):.0f} tokens/s, seed "
             f"{request.numbers['seed']}")
        text += asked["prompt"][len(text):] + said
        messages = [*asked["messages"], {"role": "assistant", "content": said}]


def arguments():
    parser = Parser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("run", metavar="RUN",
                        help="a run's folder, one by dev/hf.py import, or a model_*.bin")
    parser.add_argument("--terminal", action="store_true", help="answer lines of stdin, without a server")
    parser.add_argument("--host", default=LOCAL[0], help="address to listen at (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0: any (default: %(default)s)")
    parser.add_argument("--key", help="clients must show it (default: none; with --host a new one)")
    parser.add_argument("--template", metavar="FOLDER", help="of a tokenizer, whose chat template the model "
                        "has learned, where its own folder has none")
    parser.add_argument("--program", help="the trainer (default: train_gpt2cu, else train_gpt2cpu)")
    for name, (kind, _, _, default, text) in SETTINGS.items():
        parser.add_argument("--" + name.replace("_", "-"), type=kind, default=default, help=text +
                            ("" if default is None else " (default: %(default)s)"))
    return parser.parse_args()


def run(args):
    given = {name: getattr(args, name) for name in SETTINGS}
    defaults = {name: number(name, value) for name, value in given.items() if value is not None}
    if not re.fullmatch(r"[\w.~-]*", args.key or "", re.ASCII):
        raise Problem("--key: letters, digits and . _ ~ - are allowed", "the page's address ends with it")
    programs = [os.path.join(ROOT, name) for name in ("train_gpt2cu", "train_gpt2cpu")]
    path = args.program or next(filter(os.path.exists, programs), None)
    if not path:
        raise Problem("no program is built", "make train_gpt2cu, or without a GPU make train_gpt2cpu")
    model = Model(Program(path, args.run), os.path.basename(os.path.realpath(args.run)), args.template)
    if args.terminal:
        return talk(model, defaults)
    key = args.key or ("" if args.host in LOCAL else secrets.token_urlsafe(16))
    try:
        server = Server(args.host, args.port, model, defaults, key)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise Problem(f"--host {args.host} --port {args.port}: {why}") from error
    address = f"http://{args.host}:{server.server_port}/"
    print(f"{model.name} {'answers' if model.chats else 'goes on with texts'}: {address}{key and '#' + key}\n"
          f"for tools: {address}v1{key and ', the key is ' + key}", flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while model.program.process.poll() is None:     # a signal just before a wait without end would be lost
        time.sleep(0.5)
    time.sleep(1)                           # those who wait are told
    raise Problem(ENDED)


def main():
    guard_terminals()
    args = arguments()
    if not args.terminal:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        run(args)
    except Refused as refused:
        die(str(refused))
    except Problem as problem:
        die("\nhint: ".join(filter(None, (problem.what, problem.hint))))
    except OSError as error:
        die(f"'{error.filename or 'standard output'}': {error.strerror}")
    except KeyboardInterrupt:               # on the terminal, while the model is read
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
