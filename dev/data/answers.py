"""Conversations as token shards, and which of their tokens the loss counts: those of the answers.

A row, of JSON lines or of parquet, has `messages`: [{"role": "user", "content": "..."}, {"role": "assistant",
"content": "..."}, ...], and may begin with one of the role "system". Chat template 1, of which
llmc/data/chat_template.h tells why, makes of it, with END for the end-of-text token:

    END System: ...\n\nUser: ...\n\nAssistant: ...END User: ...\n\nAssistant: ...END

Counted are each answer, with the space in front of it, and the END behind it. STEM.mask beside STEM.bin has a
byte for each token: 1, counted, or 0. Of the --row-tokens tokens of a row, as many are conversations as fit,
whole ones, and the rest is END, not counted. One that is longer than a row begins a row and fills the next.
"""
import bisect
import os
import struct
from array import array

from any_tokenizer import batches, draw_key
from documents import Reader
from fetch import Problem
from shards import HEADER_BYTES, KINDS, replace_file, run_tool

CHAT_TEMPLATE, CHAT_WORD = 1, 8         # its number, and where a shard's header has it
ROW_WORD = 9                            # where it has the number of tokens in a row
ROLES = {"system": "System: ", "user": "User: ", "assistant": "Assistant:"}
ROW = 'a row is {"messages": [{"role": "user", "content": "..."}, ...]}, or this list alone'
AT_ONCE = 1000                          # conversations among which one is looked for that fits a row
BEGIN = "\1"                            # a document of its own in front of each conversation's parts


def parts(where, messages):
    """What is encoded by itself: what stands before an answer, the answer, what stands before the next ..."""
    if not isinstance(messages, list) or not messages:
        raise Problem(f"{where}: 'messages' is no list of messages, but {type(messages).__name__}",
                      ROW)
    found, before = [], ""
    for number, message in enumerate(messages, 1):
        message = message if isinstance(message, dict) else {}
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or role not in ROLES or not isinstance(content, str):
            raise Problem(f"{where}: message {number} has the role {role!r} and as its content "
                          f"{type(content).__name__}",
                          "roles are system, user and assistant; contents are texts")
        if role == "assistant":
            found += [before + ROLES[role], " " + content.strip()]
            before = ""
        else:
            before += ROLES[role] + content.strip() + "\n\n"
    if not found:
        raise Problem(f"{where}: there is no message of the role assistant", "the loss counts only answers")
    return found                        # a question without an answer, at the end, is left out


class Conversations(Reader):
    """Reads rows of messages as documents.py reads texts. Each part of a conversation is a document, which
    the tokenizer then encodes by itself, and so is BEGIN in front of them."""
    rows, no_field = (list,), ROW

    def in_bytes(self, rows):
        for where, messages in rows:
            texts = ((where, text) for text in (BEGIN, *parts(where, messages)))
            yield b"".join(super().in_bytes(texts))

    def documents(self, path):
        for text in super().documents(path):
            if not text.startswith(BEGIN.encode()):
                raise Problem(f"'{path}' is text, not rows of messages",
                              ROW)
            yield text


# ---- tokens ----

def tool_tokens(tool, prefix, flags, texts):
    """(all tokens of the texts, the tokenizer's number); END is in front of each document."""
    run_tool(tool, prefix, [*flags, "--val-tokens", 0, "--shard-tokens", 0], texts)
    path = prefix + "_train.bin"
    with open(path, "rb") as f:
        tokenizer = struct.unpack("<4I", f.read(HEADER_BYTES)[:16])[3]
        tokens = array("H", f.read())
    os.unlink(path)
    return tokens, tokenizer


def documents_of(tokens):
    """Pieces of the tokens, which each begin with the first of them, END."""
    end, begin = tokens[0], 0
    while begin < len(tokens):
        try:
            next_one = tokens.index(end, begin + 1)
        except ValueError:
            next_one = len(tokens)
        yield tokens[begin:next_one]
        begin = next_one


class Set:
    """tokens and counted: of all conversations, one behind the other; starts: where each begins."""

    def __init__(self, code, documents):
        self.tokens, self.counted, self.starts = array(code), bytearray(), []
        mark = is_answer = None
        for ids in documents:
            mark = mark or ids
            end = ids[:1]
            if ids == mark:
                self.starts.append(len(self.tokens))
                self.add(end, False)
                is_answer = False
                continue
            self.add(ids[1:] + end if is_answer else ids[1:], is_answer)
            is_answer = not is_answer
        self.end = mark[0]
        self.starts.append(len(self.tokens))

    def add(self, ids, counts):
        self.tokens.extend(ids)
        self.counted.extend((b"\1" if counts else b"\0") * len(ids))

    def __len__(self):
        return len(self.starts) - 1

    def length(self, number):
        return self.starts[number + 1] - self.starts[number]

    def drawn(self, wanted):
        """The numbers of those for validation: all that `wanted` tokens hold, one at least, one left over."""
        found = set()
        for number in sorted(range(len(self)), key=draw_key)[:-1]:
            wanted -= self.length(number)
            if wanted < 0 and found:
                break
            found.add(number)
        return found

    def rows(self, numbers, T):
        """Lists of conversations that fill T tokens, or a multiple of T, as well as possible."""
        for some in batches(numbers, AT_ONCE):
            waiting = sorted((self.length(number), number) for number in some)
            while waiting:
                length, number = waiting.pop()
                row, room = [number], -length % T
                while (i := bisect.bisect(waiting, (room, len(self)))) > 0:
                    length, number = waiting.pop(i - 1)
                    row.append(number)
                    room -= length
                yield row

    def shard(self, rows, T):
        """(tokens, mask) of these rows, and an END behind them, the last target."""
        tokens, counted = array(self.tokens.typecode), bytearray()
        for row in rows:
            for number in row:
                tokens.extend(self.tokens[self.starts[number]:self.starts[number + 1]])
                counted.extend(self.counted[self.starts[number]:self.starts[number + 1]])
            tokens.extend(array(tokens.typecode, [self.end]) * (-len(tokens) % T))
            counted.extend(bytes(len(tokens) - len(counted)))
        tokens.append(self.end)
        return tokens, counted + b"\0"


def put(stem, conversations, numbers, T, shard_tokens, tokenizer):
    """STEM_000000.bin and .mask and so on, each of about shard_tokens tokens."""
    rows, number = list(conversations.rows(numbers, T)), 0
    while rows:
        count, length = 0, 0
        while count < len(rows) and (length == 0 or length < (shard_tokens or length + 1)):
            length += -(-sum(map(conversations.length, rows[count])) // T) * T
            count += 1
        tokens, counted = conversations.shard(rows[:count], T)
        kind = next(kind for kind in KINDS if kind.code == tokens.typecode)
        header = [kind.magic, kind.version, len(tokens) % 2**32, tokenizer, *[0] * 252]
        header[CHAT_WORD], header[ROW_WORD] = CHAT_TEMPLATE, T
        path = f"{stem}_{number:06d}"
        replace_file(path + ".mask", [counted])
        replace_file(path + ".bin", [struct.pack("<256I", *header), tokens.tobytes()])
        rows, number = rows[count:], number + 1


def write_shards(prefix, args, val_tokens, texts, tool):
    """PREFIX_val_000000.bin, PREFIX_train_000000.bin and so on. texts: what Conversations reads."""
    if args.tokenizer and not args.tokenizer.by_tool:
        tokenizer = args.tokenizer.id
        conversations = Set(args.tokenizer.kind.code, args.tokenizer.documents(texts))
    else:
        flags = args.tokenizer.flags if args.tokenizer else ["--bytes", int(args.bytes)]
        tokens, tokenizer = tool_tokens(tool, prefix, flags, texts)
        conversations = Set("H", documents_of(tokens))
    total, T = len(conversations.tokens), args.row_tokens
    wanted = min(100_000, total // 10) if val_tokens == "auto" else val_tokens
    if wanted >= total:
        raise Problem(f"the conversations have {total} tokens, --val-tokens {wanted} leaves none to train on",
                      f"--val-tokens {total // 10} is a tenth of them")
    drawn = conversations.drawn(wanted) if wanted else set()
    put(prefix + "_val", conversations, sorted(drawn), T, 0, tokenizer)
    rest = (number for number in range(len(conversations)) if number not in drawn)
    put(prefix + "_train", conversations, rest, T, args.shard_tokens, tokenizer)
    count = sum(map(conversations.length, drawn))
    said = [f"validation: {count} of {total} tokens, {len(drawn)} of {len(conversations)} conversations"]
    return [f"{sum(conversations.counted)} of {total} tokens count", *said * bool(wanted)]
