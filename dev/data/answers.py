"""Conversations as token shards, and which of their tokens the loss counts: those of the answers.

A row, of JSON lines, parquet or a table, has `messages`: [{"role": "user", "content": "..."}, {"role":
"assistant", "content": "..."}, ...], and may begin with one of the role "system"; messages.py has other
forms. Chat template 1, of which llmc/data/chat_template.h tells why, makes of it, with END for the
end-of-text token:

    END System: ...\n\nUser: ...\n\nAssistant: ...END User: ...\n\nAssistant: ...END

With a tokenizer that brings its own chat template (chat_templates.py), END and what that template writes.

An empty message of the system is left out. A developer's is one of the system, a tool's begins with "Tool: ".

Counted are each answer, with the space in front of it, and the END behind it; not one whose message has
"weight": 0 or "train": false, and with --last-answer only a conversation's last one. STEM.mask beside
STEM.bin has a byte for each token: 1, counted, or 0. Of the --row-tokens tokens of a row, as many are
conversations as fit, whole ones, and the rest is END, not counted. One that is longer than a row begins a row
and fills the next.
"""
import bisect
import collections
import struct
import sys
from array import array

from any_tokenizer import batches, draw_key, split
from documents import Reader
from fetch import Problem
from messages import KNOWN_FORMS, SPEAKERS, as_message, form_of, kind_of
from shards import KINDS, replace_file, tool_documents
from tokenizer_files import BYTES_ID, GPT2_ID

CHAT_TEMPLATE, CHAT_WORD = 1, 8         # its number, and where a shard's header has it
ROW_WORD = 9                            # where it has the number of tokens in a row
ROLES = {"system": "System: ", "developer": "System: ", "user": "User: ", "tool": "Tool: ",
         "assistant": "Assistant:"}
WHITE = " \t\n\v\f\r"                   # what chat_template.h takes from a message's ends
FLAGS = "weight", "train"               # of a message: whether its answer counts
ROW = 'a row is {"messages": [{"role": "user", "content": "..."}, ...]}, or this list alone; ' + KNOWN_FORMS
AT_ONCE = 1000                          # conversations among which one is looked for that fits a row
# The first byte of a part: it stands before an answer, or is one that counts, or one that does not.
BEFORE, COUNTS, SILENT = "012"
PART = b"\xff"                          # behind each part: UTF-8 has no such byte


def checked(where, messages):
    """[(message, whether it counts if it is an answer)]"""
    if not isinstance(messages, list) or not messages:
        raise Problem(f"{where} is no list of messages, but {type(messages).__name__}", ROW)
    found = []
    for number, message in enumerate(map(as_message, messages), 1):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or role not in ROLES or not isinstance(content, str):
            raise Problem(f"{where}: message {number} has the role {role!r} and as its content "
                          f"{kind_of(content)}",
                          f"roles are {', '.join(ROLES)}, and of 'from' also {', '.join(SPEAKERS)}; contents "
                          'are texts, or lists of {"type": "text", "text": "..."}')
        flags = [message[name] for name in FLAGS if message.get(name) is not None]
        if any(flag not in (0, 1) for flag in flags):
            raise Problem(f"{where}: message {number} has {' and '.join(FLAGS)} {flags}",
                          "an answer counts or does not: 1 or 0, true or false")
        found.append((message, all(flags)))
    if not any(message["role"] == "assistant" for message, _ in found):
        raise Problem(f"{where}: there is no message of the role assistant", "the loss counts only answers")
    return found


def parts(messages, unwritten):
    """What stands before an answer, the answer, what stands before the next ... unwritten[name]: messages
    that have more to say by this name."""
    found, before = [], BEFORE
    for message, counts in messages:
        role, content = message["role"], message["content"]
        unwritten.update(name for name, value in message.items() if name not in ("role", "content", *FLAGS)
                         and isinstance(value, (str, list, dict)) and value)
        if role == "assistant":
            found += [before + ROLES[role], (COUNTS if counts else SILENT) + " " + content.strip(WHITE)]
            before = BEFORE
        elif ROLES[role] != ROLES["system"] or content.strip(WHITE):
            before += ROLES[role] + content.strip(WHITE) + "\n\n"
    return found                        # a question without an answer, at the end, is left out


class Conversations(Reader):
    """Reads rows of messages as documents.py reads texts. A document is a conversation's parts."""
    rows, no_field = (list,), ROW

    def __init__(self, *args, last_answer=False, template=None):
        super().__init__(*args)
        self.unwritten, self.last_answer, self.template = collections.Counter(), last_answer, template

    def columns(self, where, names):
        form = form_of(self.field, names)
        return [*form.needs, *{*form.may} & {*names}] if form else super().columns(where, names)

    def text_of(self, row):
        return form_of(self.field, row).messages(row)

    def in_bytes(self, rows):
        for where, messages in rows:
            messages = checked(where, messages)
            if self.last_answer:
                last = max(i for i, (message, _) in enumerate(messages) if message["role"] == "assistant")
                messages = [(message, counts and i == last) for i, (message, counts) in enumerate(messages)]
            if self.template:
                kinds = [COUNTS if counts else SILENT for message, counts in messages
                         if message["role"] == "assistant"]
                kinds = [kind for one in kinds for kind in (BEFORE, one)] + [BEFORE]
                pieces = self.template.pieces(where, [message for message, _ in messages])
                found = [kind + piece for kind, piece in zip(kinds, pieces)]
            else:
                found = parts(messages, self.unwritten)
            texts = ((where, text) for text in found)
            yield b"".join(super().in_bytes(texts)).replace(b"\0", PART) + b"\0"

    def texts(self, paths):
        self.unwritten.clear()                      # what a look at the files counted
        yield from super().texts(paths)
        for name, count in sorted(self.unwritten.items()):
            print(f"note: {count} messages have '{name}', which is not written", file=sys.stderr)


# ---- tokens ----

def parts_of(texts):
    """[(kind, text)] of each conversation"""
    for text in split(texts):
        yield [(part[0], part[1:]) for part in map(bytes.decode, text.split(PART)[:-1])]


def by_tool(tool, prefix, flags, texts):
    """Yields (tokens, mask) of each conversation. The tool encodes its parts as documents. GPT-2's pattern
    begins a piece with the space of an answer, so the tokens are those of the whole."""
    kinds = []

    def documents():
        for found in parts_of(texts):
            kinds.append("".join(kind for kind, _ in found))
            yield "".join(part + "\0" for _, part in found).encode()

    encoded = tool_documents(tool, prefix, flags, documents())
    for kinds_of_one in kinds:
        ids, mask = array("H"), bytearray(1)
        for kind, document in zip(kinds_of_one, encoded):
            end = document[:1]
            ids += document[bool(ids):] + end * (kind != BEFORE)
            mask.extend(bytes([kind == COUNTS]) * (len(ids) - len(mask)))
        yield ids, mask


def by_package(tokenizer, texts, template):
    """Yields (tokens, mask) of each conversation. All of it is one text, as an exported chat template has it;
    those tokens count that begin in an answer which does, or are the END behind it. What a template of the
    tokenizer's own wrote is encoded as it is, behind an END, which it may begin with itself."""
    encoder, in_place = tokenizer.chat_encoder()
    end = "" if template else tokenizer.first_text
    for found in parts_of(texts):
        whole = end
        mask = bytearray(len(whole))
        for kind, part in found:
            for token, other in () if template else in_place.items():
                part = part.replace(token, other)
            whole += part + end * (kind != BEFORE)
            mask.extend(bytes([kind == COUNTS]) * (len(whole) - len(mask)))
        encoding = encoder.encode(whole, add_special_tokens=False)
        if encoding.ids.count(tokenizer.first) != whole.count(tokenizer.first_text):
            raise Problem(f"'{tokenizer.first_text}' between two texts is no token by this tokenizer",
                          "its tokenizer.json must have it in added_tokens, without single_word")
        ids, counted = encoding.ids, bytes(mask[begin] for begin, _ in encoding.offsets)
        missing = ids[0] != tokenizer.first
        yield [tokenizer.first] * missing + ids, bytes(missing) + counted


class Set:
    """tokens and counted: of all conversations, one behind the other; starts: where each begins."""

    def __init__(self, code, conversations):
        self.tokens, self.counted, self.starts = array(code), bytearray(), [0]
        for tokens, counted in conversations:
            self.tokens.extend(tokens)
            self.counted.extend(counted)
            self.starts.append(len(self.tokens))

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
            tokens.extend(self.tokens[:1] * (-len(tokens) % T))         # END begins each conversation
            counted.extend(bytes(len(tokens) - len(counted)))
        tokens.append(self.tokens[0])
        return tokens, counted + b"\0"


def put(stem, conversations, numbers, T, shard_tokens, tokenizer, template):
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
        header[CHAT_WORD], header[ROW_WORD] = template, T
        path = f"{stem}_{number:06d}"
        replace_file(path + ".mask", [counted])
        replace_file(path + ".bin", [struct.pack("<256I", *header), tokens.tobytes()])
        rows, number = rows[count:], number + 1


def write_shards(prefix, args, val_tokens, texts, tool):
    """PREFIX_val_000000.bin, PREFIX_train_000000.bin and so on. texts: what Conversations reads."""
    own = args.tokenizer
    number = own.id if own else BYTES_ID if args.bytes else GPT2_ID
    flags = own.flags if own and own.by_tool else ["--bytes", int(args.bytes)]
    by_own = own and not own.by_tool
    found = by_package(own, texts, args.template) if by_own else by_tool(tool, prefix, flags, texts)
    conversations = Set(own.kind.code if own else "H", found)
    total, T = len(conversations.tokens), args.row_tokens
    template = 0 if args.template else CHAT_TEMPLATE        # C++ knows no others
    wanted = min(100_000, total // 10) if val_tokens == "auto" else val_tokens
    if wanted >= total:
        raise Problem(f"the conversations have {total} tokens, --val-tokens {wanted} leaves none to train on",
                      f"--val-tokens {total // 10} is a tenth of them")
    drawn = conversations.drawn(wanted) if wanted else set()
    put(prefix + "_val", conversations, sorted(drawn), T, 0, number, template)
    rest = (number for number in range(len(conversations)) if number not in drawn)
    put(prefix + "_train", conversations, rest, T, args.shard_tokens, number, template)
    count = sum(map(conversations.length, drawn))
    said = [f"validation: {count} of {total} tokens, {len(drawn)} of {len(conversations)} conversations"]
    return [f"{sum(conversations.counted)} of {total} tokens count", *said * bool(wanted)]
