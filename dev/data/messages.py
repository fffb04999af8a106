"""Rows of conversations, in the forms that others write them in, as messages: a list of {"role": ...,
"content": TEXT}. A message's other fields stay as they are.

    FORMS                                       # which fields a row may have
    form = form_of("messages", row)             # the first that fits, or None
    said = [as_message(message) for message in form.messages(row)]
"""
import json
from collections import namedtuple

# needs: fields that make a row one of this form; may: others that it may have
Form = namedtuple("Form", "needs may messages")
SPEAKERS = {"human": "user", "gpt": "assistant", "observation": "tool"}         # ShareGPT's words for roles
KNOWN_FORMS = ("forms are messages, with role and content; conversations, with from and value; prompt and "
               "completion; instruction, input and output")


def parsed(messages):
    """A list; also one that is written as JSON."""
    if isinstance(messages, str):
        try:
            return json.loads(messages)
        except (ValueError, RecursionError):
            pass                                # whoever wants a list refuses it
    return messages


def said(role, content):
    return [{"role": role, "content": content}] if content else []


def sharegpt(row):
    messages = parsed(row["conversations"])
    return said("system", row.get("system")) + messages if isinstance(messages, list) else messages


def alpaca(row):
    question = row["instruction"]
    if row.get("input"):
        question = [question, "\n\n", row["input"]]
    return [*said("system", row.get("system")), {"role": "user", "content": question},
            {"role": "assistant", "content": row["output"]}]


def completion(row):
    """Either may be a list of messages. Of these only the completion's answers count."""
    prompt, answer = ([{"role": role, "content": row[name]}] if isinstance(row[name], str) else row[name]
                      for role, name in (("user", "prompt"), ("assistant", "completion")))
    if not isinstance(prompt, list) or not isinstance(answer, list):
        return answer if isinstance(prompt, list) else prompt
    silent = [{**message, "train": False} if isinstance(message, dict) else message for message in prompt]
    return silent + answer


def named(field):
    return Form((field,), (), lambda row: parsed(row[field]))


FORMS = [named("messages"), Form(("conversations",), ("system",), sharegpt),
         Form(("prompt", "completion"), (), completion),
         Form(("instruction", "output"), ("input", "system"), alpaca)]


def form_of(field, names):
    """field: "messages" stands for all forms, another one for the list in this field."""
    forms = FORMS if field == "messages" else [named(field)]
    return next((form for form in forms if {*form.needs} <= {*names}), None)


def as_message(message):
    """Of what is no message, the role or the content is no text."""
    if not isinstance(message, dict):
        return {}
    if message.get("role") is None and "from" in message:
        rest = {name: value for name, value in message.items() if name not in ("from", "value")}
        speaker = message["from"]
        role = SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else speaker
        message = {**rest, "role": role, "content": message.get("value")}
    if isinstance(content := message.get("content"), list):
        texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
                 for part in content]
        if all(isinstance(text, str) for text in texts):
            message = {**message, "content": "".join(texts)}
    return message


def kind_of(content):
    """What it is, for whoever must change it."""
    if not isinstance(content, list):
        return type(content).__name__
    kinds = [repr(part.get("type")) if isinstance(part, dict) else type(part).__name__ for part in content]
    return f"a list of {', '.join(kinds)}"
