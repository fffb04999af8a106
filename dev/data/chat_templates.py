"""A tokenizer's own chat template, for get.py answers and serve.py, rendered by Jinja as transformers renders
it. Llama 3.2's writes today's date, by strftime_now. A set has one day, that of the environment's
SOURCE_DATE_EPOCH if there is one, and dataset.json names it.

    text = template_text("Qwen3-0.6B")          # its folder, or its tokenizer.json; None: chat template 1
    template = ChatTemplate(text, "Qwen3-0.6B", marks)
    template.pieces(where, messages)            # what stands before an answer, the answer, ..., the rest
    template.asked(where, messages)             # all that stands before the next answer
"""
import functools
import hashlib
import json
import os
import re
from datetime import datetime, timezone

from documents import reading
from fetch import Problem, need
from tokenizer_files import TEMPLATE_1

CURE = "a tokenizer.json in a folder of its own gets chat template 1"
GENERATION = re.compile(r"({%-?\s*)(end)?generation(\s*-?%})")      # marks an answer, and writes nothing


def beside(path, name):
    """The text of this file of the tokenizer's folder, or "" """
    file = os.path.join(path if os.path.isdir(path) else os.path.dirname(path), name)
    if not os.path.isfile(file):
        return ""
    with reading(file), open(file, encoding="utf-8") as f:
        return f.read()


def settings_of(path):
    with reading(name := "tokenizer_config.json"):
        settings = json.loads(beside(path, name) or "{}")
        if not isinstance(settings, dict):
            raise Problem(f"'{path}': tokenizer_config.json is not a JSON object", CURE)
        return settings


def template_text(path):
    text = beside(path, "chat_template.jinja") or settings_of(path).get("chat_template")
    if isinstance(text, list):                  # several, by names
        named = [one for one in text if isinstance(one, dict)]
        text = next((one.get("template") for one in named if one.get("name") == "default"), None)
    if text and not isinstance(text, str):
        raise Problem(f"'{path}': the chat template in tokenizer_config.json is no text", CURE)
    return None if not text or text.startswith(TEMPLATE_1) else text


def now():
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    return datetime.fromtimestamp(int(epoch), timezone.utc) if epoch.isdigit() else datetime.now()


class ChatTemplate:
    def __init__(self, text, path, marks, tokens=None):
        """marks: as for_chats() returns them, {special token: what it is in a message}. tokens: {"eos_token":
        "</s>", ...}; None: as tokenizer_config.json has them."""
        need("jinja2", "no chat template can be rendered", "jinja2")
        from jinja2 import ext, meta, sandbox
        self.marks = marks
        self.special = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or r"(?!)")
        found = {name: value.get("content") if isinstance(value, dict) else value
                 for name, value in (tokens or settings_of(path)).items() if name.endswith("_token")}
        self.tokens = {name: value for name, value in found.items() if isinstance(value, str)}
        self.sha256 = hashlib.sha256(json.dumps([text, self.tokens]).encode()).hexdigest()
        jinja = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                      extensions=[ext.loopcontrols])
        jinja.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
        jinja.globals["raise_exception"] = self.refuse
        self.now = now()
        self.day = f"{self.now:%Y-%m-%d}" if "strftime_now" in text else None       # None: it does not matter
        jinja.globals["strftime_now"] = self.now.strftime
        text = GENERATION.sub(lambda tag: tag[1] + ("endif" if tag[2] else "if true") + tag[3], text)
        self.template = self.tried(f"'{path}'", jinja.from_string, text)
        names = meta.find_undeclared_variables(jinja.parse(text))
        unknown = [name for name in names if name.endswith("_token")]
        if unknown and not tokens and not beside(path, "tokenizer_config.json"):
            raise Problem(f"'{path}' has no tokenizer_config.json, which says what {min(unknown)} is",
                          "copy it from where the tokenizer is from; its chat template writes it")

    def refuse(self, why):
        raise ValueError(why)

    def tried(self, where, function, *args, **more):
        try:
            return function(*args, **more)
        except Exception as error:              # a template is a program: it may do anything wrong
            raise Problem(f"{where}: the tokenizer's chat template fails: {error}",
                          CURE) from error

    def plain(self, text):
        """As a text in which no token is special."""
        return self.special.sub(lambda found: self.marks[found[0]], text)

    def marked(self, message):
        """Without what is None: parquet gives each message the fields of all."""
        return {name: self.plain(value) if isinstance(value, str) else value
                for name, value in message.items() if value is not None}

    def rendered(self, where, messages, asks):
        """asks: with what asks for an answer behind them."""
        return self.tried(where, self.template.render, messages=messages, tools=None, documents=None,
                          add_generation_prompt=asks, **self.tokens)

    def asked(self, where, messages):
        return self.rendered(where, list(map(self.marked, messages)), True)

    def pieces(self, where, messages):
        messages = list(map(self.marked, messages))
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        whole, found, at = self.rendered(where, messages[:answers[-1] + 1], False), [], 0
        for i in answers:
            asked, text = self.rendered(where, messages[:i], True), messages[i]["content"].strip()
            end = self.special.search(whole, len(asked))
            answer = whole[len(asked):end.start()].strip() if end else ""
            if not end or len(asked) < at or not whole.startswith(asked) or bool(text) != bool(answer) or \
                    not (text.endswith(answer) or answer.endswith(text)):
                raise Problem(f"{where}: message {i + 1}, an answer, is not found in what the tokenizer's "
                              "chat template writes",
                              "it must follow what asks for it, and a special token must end it; " + CURE)
            found += [whole[at:len(asked)], whole[len(asked):end.end()]]
            at = end.end()
        return [*found, whole[at:]]
