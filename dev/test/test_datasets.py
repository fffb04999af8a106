"""dev/data/get.py as a user meets it: data sets from files and from a hub of the test's own on localhost,
with downloads that break off, lie and stop, kills, and full disks.

Standard library only; with pyarrow parquet is tested, too. What a shard must hold is computed here: with
--bytes a document is a 0 and its bytes. build/tokenize must be there.
"""
import array
import bz2
import contextlib
import glob
import gzip
import hashlib
import http.server
import io
import json
import lzma
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import urllib.parse

import pytest

from checks import ROOT, read, write
from forked import Forked

GET = os.path.join(ROOT, "dev/data/get.py")
TOOL = os.path.join(ROOT, "build/tokenize")
pytestmark = [pytest.mark.skipif(not os.access(TOOL, os.X_OK), reason="no build/tokenize: make tokenize"),
              pytest.mark.usefixtures("own_folder")]
sys.path.insert(0, os.path.join(ROOT, "dev/data"))
import debian                                       # noqa: E402
import get                                          # noqa: E402
import shards as made                               # noqa: E402


def start(*words, prepare=lambda: None, limit=None, **env):
    """prepare(): changes something in get.py's process before it begins."""
    return Forked(lambda: prepare() or get.main(), [GET, *words], {"NO_PROXY": "*", "no_proxy": "*", **env},
                  limit)


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
    lines = err.splitlines()
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


def draw_key(number):
    mask = (1 << 64) - 1
    z = (number + 1) * 0x9E3779B97F4A7C15 & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return z ^ z >> 31


def drawn(tokens, wanted, eot=0):
    """[(begin, end)] of the documents that the tool draws: the first that does not fit is the last; if less
    than half is full then, its end is taken."""
    starts = [i for i, token in enumerate(tokens) if token == eot]
    spans, left = [], wanted
    for i in sorted(range(len(starts)), key=draw_key):
        begin, end = starts[i], [*starts, len(tokens)][i + 1]
        if end - begin > left:
            spans += [(end - left, end)] * (2 * left > wanted)
            break
        spans.append((begin, end))
        left -= end - begin
    return sorted(spans)


def check_set(out, sources, val, size=10**8):
    """sources: documents, of each source its own. Those drawn of the first became a validation shard of at
    most `val` tokens; what else a source has, training shards of `size`, the last shorter."""
    texts = [byte_tokens(documents) for documents in sources]
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

class Hub(http.server.BaseHTTPRequestHandler):
    SETTINGS = {"cut": {},              # path: at most so many bytes an answer
                "stop": None,           # (end of a path, what is called before its answer)
                "ranges": True,
                "following": "",        # site of a listing's next page, if not this one
                "errors": []}           # what is answered instead, one after the other
    files = {}                          # path in the repository: bytes
    seen = []                           # (path, first byte) of every file asked for

    def log_message(self, *_):
        pass

    def answer(self, code, data, **headers):
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        with contextlib.suppress(OSError):          # who asked may have been killed
            self.wfile.write(data)

    def listing(self, folder):
        """A page of it, that is one entry."""
        entries = [{"type": "directory", "path": folder + "x", "size": 0, "oid": "0"}]
        for name in sorted(name for name in self.files if name.startswith(folder)):
            digest = hashlib.sha256(self.files[name]).hexdigest()
            entries.append({"type": "file", "path": name, "oid": "0", "lfs": {"oid": digest},
                            "size": len(self.files[name])})
        page = int(self.path.partition("cursor=")[2] or 0)
        site, path = Hub.following or f'http://{self.headers["Host"]}', self.path.partition("?")[0]
        more = {"Link": f'<{site}{path}?cursor={page + 1}>; rel="next"'} if page + 1 < len(entries) else {}
        return self.answer(200, json.dumps(entries[page:page + 1]).encode(), **more)

    def do_GET(self):
        if Hub.errors:
            return self.answer(Hub.errors.pop(0), b"")
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        if path.startswith("/api/datasets/o/n/tree/main"):
            return self.listing(path[len("/api/datasets/o/n/tree/main"):].lstrip("/"))
        if path.startswith("/datasets/o/n/resolve/main/"):          # as the real one sends on to its storage
            return self.answer(302, b"", Location="/cdn/" + urllib.parse.quote(path.split("/main/", 1)[1]))
        name = path.removeprefix("/cdn/")
        if name not in self.files:
            return self.answer(404, b"nothing")
        if Hub.stop and name.endswith(Hub.stop[0]):
            Hub.stop[1]()
        data, wanted = self.files[name], self.headers.get("Range", "")
        first = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and Hub.ranges else 0
        self.seen.append((name, first))
        more = {"Content_Range": f"bytes {first}-{len(data) - 1}/{len(data)}"} if first else {}
        return self.answer(206 if first else 200, data[first:][:Hub.cut.get(name, len(data))],
                           Content_Length=str(len(data) - first), **more)


@contextlib.contextmanager
def serving(files, **settings):
    """The hub with these files, for as long as the block lasts; what it is called is its URL."""
    Hub.files = {name: data if isinstance(data, bytes) else data.encode() for name, data in files.items()}
    Hub.seen = []
    for name, value in {**Hub.SETTINGS, **settings}.items():
        setattr(Hub, name, value)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


HUB = ["hub", "--repo", "o/n", "--pattern", "data/*.jsonl", "--out", "out", *in_bytes(100, 1000)]


def hub_files(n=5):
    """{path: JSONL}, and the documents in each"""
    texts = [some_texts(seed, 40) for seed in range(n)]
    return ({f"data/{i:03d}.jsonl": jsonl(some) for i, some in enumerate(texts)},
            [[text.encode() for text in some] for some in texts])


def hub_makes(documents, *words, **env):
    """Goes on with `out` or begins it; ends with the whole set, which is removed."""
    works(*HUB, *words, **env)
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
            "g.png": "no text", "h.jsonl": jsonl(["x" * 150000] * 4),    # more than a pipe takes at a time
            "sub/h.ndjson": '{"text": "\\ud800 alone"}\n', "z.txt": ""}.items():
        write("in/" + name, data)
    documents = [b"one\n", b"two", b"three\n", *(text.encode() for text in texts), b"four\n", b"five\n",
                 b"six", b"seven", b" eight\n", b"9", *[b"x" * 150000] * 4, b"? alone"]
    again = [*files("in", "out"), *in_bytes(500, 200000)]
    _, out, err = call(*again)
    assert "g.png" in err and len(err.splitlines()) == 1 and "'out/out_train_*.bin'" in out
    check_set("out", [documents], 500, 200000)
    facts = json.loads(read("out/dataset.json"))
    assert facts["tokens"] == len(byte_tokens(documents)) and facts["shards"] == {"val": 1, "train": 4}
    makes("in/[ab].*", "two", documents[:3], 0)
    write("x.log", "a log")                             # who names a file means it
    makes("x.log", "three", [b"a log"], 1)
    assert "complete" in works(*again) and not os.path.exists("out/.work")
    before = contents("out")
    refused(*again, "--val-tokens", 7, said=("val_tokens 500 and not 7", "--restart"))
    for name, text in (("new.md", "new"), ("b.md", "x")):
        write("in/" + name, text)
        refused(*again, said=("other files", f"'{name}' of {len(text)} bytes is new", "--restart"))
        os.unlink("in/" + name)
    refused(*again, said=("other files", "some are missing"))
    assert contents("out") == before, "what was refused changed the shards"
    makes("in/[ab].*", "out", documents[:2], 0, "--restart")


@pytest.mark.parametrize("lengths, val", [
    ([100], 30), ([50, 50], 50), ([40, 60], 10), ([1], 0), (range(1, 900), 40000)], ids=str)
def test_draw(lengths, val):
    """Whole documents, from all over the text, half of what is asked for at least, or a long one's end."""
    documents = [b"x" * (n - 1) or b"y" for n in lengths]
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
    write("x.txt", "\n<|endoftext|>\n".join("x" * rng.randrange(1, 180) for _ in range(count)))
    said = subprocess.run([TOOL, "x.txt", "-o", "x", f"--bytes={len(words)}"], capture_output=True,
                          text=True, check=True).stdout
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
    ("files --from in/c.jsonl --out o", ["row 1", "int"]),
    ("files --from in/d.txt.gz --out o", ["d.txt.gz' is damaged"]),
    ("files --from in/empty.txt --out o", ["no text"]),
    ("files --from in/e.txt --out o --bytes --val-tokens 6", ["--val-tokens 6",
                                                              "hint: --val-tokens 0 is a tenth"]),
    ("files --from none* --out o", ["none*"]), ("files --from pictures --out o", ["pictures"]),
    ("files --out o", ["--from"]), ("files --from in/e.txt", ["--out"]),
    ("fineweb", ["'fineweb'", "fineweb10B"]), ("hub --out o", ["--repo"]),
    ("files --from in --out o --shard-tokens 0", ["--shard-tokens 0"]),
    ("files --from in --out o --tokenize none", ["'none'"]),
    ("tinystories --from in --out o --val-tokens 5", ["--val-tokens"]),
    (f"tinyshakespeare --from {GET} --out o", ["is not tinyshakespeare"])])
def test_refused(words, said):
    cut = gzip.compress(bytes(range(256)) * 100)[:-20]
    for name, text in (("a.jsonl", '{"text": "good"}\n{"text": "bad"\n'), ("b.jsonl", '{"body": "text"}\n'),
                       ("c.jsonl", '{"text": 7}\n'), ("d.txt.gz", cut), ("e.txt", "short"),
                       ("empty.txt", ""), ("../pictures/f.png", "x")):
        write("in/" + name, text)
    refused(*words.split(), said=said)
    assert not contents("o")


def test_second_thoughts():
    """A source that could not be read may get other options; a folder of others is left alone."""
    write("a.jsonl", '{"body": "good"}\n{"body": "bad"\n')
    words = [*files("a.jsonl", "out"), "--text-field", "body"]
    refused(*words, said=("a.jsonl' line 2",))
    write("a.jsonl", '{"body": "good"}\n')
    write("out/.work/tokens_train_000007.bin", "of a run that was killed")
    makes("a.jsonl", "out", [b"good"], 2, "--text-field", "body")
    write("theirs/theirs_train_000001.bin", "x")
    refused(*files("a.jsonl", "theirs"), said=("theirs_train_000001.bin",))
    makes("a.jsonl", "theirs", [b"good"], 0, "--text-field", "body", "--restart")


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
    with serving({"sample/10BT/000.parquet": read("in/a.parquet"), "sample/100BT/x.parquet": b"",
                  "README.md": b""}) as url:
        works("hub", "--repo", "o/n", "--pattern", row("fineweb10B").train, "--out", "o4", "--from", url,
              *in_bytes(999, 9999))
        assert [name for name, _ in Hub.seen] == ["sample/10BT/000.parquet"]
    check_set("o4", [documents], 999, 9999)


# ---- the hub ----

def test_hub():
    hub, documents = hub_files(2)
    hub["data/005 é#.jsonl"] = jsonl(["last"])
    documents.append([b"last"])
    with serving({**hub, "data/x.txt": "no", "other/y.jsonl": "no"}) as url:
        hub_makes(documents, "--from", url)
        assert sorted(name for name, _ in Hub.seen) == sorted(hub)
        hub_makes(documents, HF_ENDPOINT=url)
        Hub.following = "file:///tmp"
        refused(*HUB, "--from", url, said=("'file:///tmp", "no URL"))
        Hub.following = ""
        works(*HUB, "--from", url)
    assert "complete" in works(*HUB, "--from", url), "who has all needs no network"
    shutil.rmtree("out")
    for name, data in hub.items():
        write("copy/" + name, data)
    hub_makes(documents, "--from", "copy")
    assert len(glob.glob("copy/data/*")) == len(hub), "the user's own files are gone"


def test_first_shards():
    hub, documents = hub_files()
    with serving(hub) as url:
        works(*HUB, "--from", url, "--shards", 2)
        assert len(shards("out", "train")) >= 2 and len(Hub.seen) == 1, "more files than it takes"
        assert not glob.glob("out/.work/0*"), "what was downloaded for shards that are made stays"
        refused(*HUB, "--from", url, "--val-tokens", 50, said=("val_tokens 100 and not 50", "--restart"))
        hub_makes(documents, "--from", url)
        assert len(Hub.seen) == len(hub), "files were fetched twice"


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
    hub, documents = hub_files(3)
    name = "data/001.jsonl"
    with serving(hub, cut={name: 1000}) as url:         # goes on as long as something comes
        hub_makes(documents, "--from", url)
        firsts = [first for path, first in Hub.seen if path == name]
        assert firsts == list(range(0, len(hub[name].encode()), 1000))
    with serving(hub, cut={name: 0}) as url:
        refused(*HUB, "--from", url, "--retries", 0, said=(name, "goes on from here"))
        Hub.cut, Hub.ranges = {}, False
        write("out/.work/000001_001.jsonl.part", b"rest")
        hub_makes(documents, "--from", url)
        assert [path for path, _ in Hub.seen].count("data/000.jsonl") == 1, "a finished file came again"
    with serving(hub) as url:
        refused(*HUB, "--from", url, "--pattern", "data/x*", said=("data/x*",))
        write("out/.work/000000_000.jsonl.part", b"x" * 500)
        refused(*HUB, "--from", url, said=("sha256",))
        hub_makes(documents, "--from", url)


def test_bad_hubs():
    with serving(hub_files(1)[0], errors=[404, 401]) as url:
        refused(*HUB, "--from", url, said=("404", "hint: "))
        refused(*HUB, "--from", url, said=("401", "HF_TOKEN", "hint: "))
    refused(*HUB, "--retries", 0, "--from", "http://127.0.0.1:1",
            said=("cannot reach http://127.0.0.1:1", "--from FOLDER"))
    assert not contents("out")


def test_retries():
    hub, documents = hub_files(1)
    waits = {"prepare": lambda: setattr(time, "sleep", lambda seconds: print(f"waits {seconds} s"))}
    with serving(hub, errors=[503] * 4) as url:
        refused(*HUB, "--from", url, "--retries", 1, said=("503",), **waits)
        code, out, err = call(*HUB, "--from", url, "--retries", 2, **waits)
    assert code == 0 and "503" in err and "trying again" in err
    assert re.findall("waits (.*)", out) == ["1 s", "3 s"]
    check_set("out", documents, 100, 1000)


def test_another_place():
    """Begun from a hub that then stops, goes on from a folder or from another hub."""
    hub, documents = hub_files(3)
    for name, data in hub.items():
        write("copy/" + name, data)
    write("short/001.jsonl", "x")
    with serving(hub) as other:
        for place in ("copy", other):
            with serving(hub, cut={"data/001.jsonl": 0}) as url:
                refused(*HUB, "--from", url, "--retries", 0, said=("data/001.jsonl",))
                refused(*HUB, "--from", "short", said=("'001.jsonl' of 1 bytes is new",))
            Hub.cut = {}
            hub_makes(documents, "--from", place)


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def test_kills():
    """Killed before a file comes, then called again: equal bytes, no finished file comes again."""
    hub, documents = hub_files(4)
    for number, how in ((0, signal.SIGKILL), (2, signal.SIGTERM), (3, signal.SIGKILL)):
        with serving(hub) as url:
            pids = []

            def kill():
                wait_for(lambda: pids)
                os.kill(pids[0], how)
                time.sleep(0.1)
            Hub.stop = (f"{number}.jsonl", kill)
            child = start(*HUB, "--from", url)
            pids.append(child.pid)
            assert child.end()[0] == (-9 if how == signal.SIGKILL else 130)
            Hub.stop = None
            contents("out")
            hub_makes(documents, "--from", url)
            assert len([path for path, _ in Hub.seen if path in list(hub)[:number]]) == number


def test_kill_while_tokenizing():
    """A tool that waits to be killed, with its reader: what it leaves does not count."""
    hub, documents = hub_files(2)
    write("slow", "#!/bin/sh\ntouch at_work\nwhile kill -0 $PPID 2>/dev/null; do sleep 0.05; done\n"
          f'exec {TOOL} "$@"\n')
    with serving(hub) as url:
        child = start(*HUB, "--from", url, "--tokenize", "./slow")
        wait_for(lambda: os.path.exists("at_work"))
        refused(*HUB, "--from", url, said=("another get.py",))
        os.kill(child.pid, signal.SIGKILL)
        child.end()                                     # now the tool takes what it was fed for the whole
        hub_makes(documents, "--from", url)
    write("dies", "#!/bin/sh\nkill -9 $$\n")
    write("pipe.jsonl", jsonl(["x" * 1000] * 1000))
    refused(*files("pipe.jsonl", "o2"), "--tokenize", "./dies", said=("signal 9",))


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


def test_room():
    """Too small a disk is told before the work."""
    def small():
        get.need_pyarrow = lambda: None
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
    words = ["fineweb10B-shards", "--out", "out", "--from"]
    theirs = {"prepare": lambda: setattr(row("fineweb10B-shards"), "source", "o/n")}
    with serving({**row_files, "README.md": "no"}) as url:
        works(*words, url, "--shards", 2, **theirs)
        assert contents("out") == {name: data for name, data in row_files.items() if "3" not in name}
        works(*words, url, **theirs)
        assert contents("out") == row_files and len(Hub.seen) == 4, "fetched twice"
        name = "fineweb_train_000002.bin"
        for data in (row_files[name][:-2], b"<html>" * 300, published([1, 2], [(3, 2)]),
                     published([1, 2], [(2, 3)])):      # cut, a text, tokens of bytes, another count
            os.unlink("out/" + name)
            Hub.files[name] = data
            refused(*words, url, said=("000002",), **theirs)
            assert name not in contents("out")
            write("out/" + name, "x")
        os.unlink("out/" + name)
    for name, data in row_files.items():
        write("copy/" + name, data)
    works(*words, "copy")
    assert contents("out") == row_files


# ---- tinyshakespeare ----

def test_tinyshakespeare():
    text = "To be, or not to be: that is the question.\n" * 4000
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    known = {"prepare": lambda: setattr(get, "SHAKESPEARE_SHA256", sha256)}
    path = "/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
    with serving({path: text}) as url:
        refused("tinyshakespeare", "--from", url, "--out", "no", said=("sha256",))
        works("tinyshakespeare", "--from", url, "--out", "out", **known)
    everything = shard("out/tiny_shakespeare_all.bin", 1)
    assert len(everything) > 40000 and 50256 not in everything
    parts = [shard(f"out/tiny_shakespeare_{part}.bin", 1) for part in ("val", "train")]
    assert flat(parts) == everything and len(parts[0]) == 32768


# ---- questions ----

def questions(path):
    """[(index, label, [texts])] of a file, whose every length must be right."""
    data = read(path)
    head, words = array.array("i", data[:1024]), array.array("H", data[1024:])
    assert list(head[:2]) == [20240522, 1] and head[4] == 1 and not any(head[5:])
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
    text = subprocess.run([TOOL, "--decode", "decode.bin", "--separators", "0"], capture_output=True,
                          check=True).stdout.decode()
    decoded = iter(text.split("<|endoftext|>")[1:])
    return [(index, label, [next(decoded) for _ in range(n)]) for index, label, n in found]


def test_hellaswag():
    rows = [{"ind": 7, "ctx": f"A man {i} sits. He", "label": i % 4,
             "endings": [f"does {i}{k}." for k in range(4)]} for i in range(6)]
    rows += [{"ctx": "é是\nx", "label": "2", "endings": ["a", " b", "", "d\n"]}]
    write("copy/hellaswag_val.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    works("hellaswag", "--from", "copy", "--out", "out")
    assert questions("out/hellaswag_val.bin") == [
        (i, int(row["label"]), [row["ctx"]] + [" " + text for text in row["endings"]])
        for i, row in enumerate(rows)]
    path = "/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
    with serving({path: read("copy/hellaswag_val.jsonl")}) as url:
        net = ["hellaswag", "--from", url, "--out"]
        works(*net, "net")
        assert read("net/hellaswag_val.bin") == read("out/hellaswag_val.bin")
        first = json.loads(read("net/dataset.json"))["sha256"]
        assert first == hashlib.sha256(read("copy/hellaswag_val.jsonl")).hexdigest()
        Hub.files[path] = read("copy/hellaswag_val.jsonl") + b"\n"
        os.unlink("net/hellaswag_val.jsonl")
        refused(*net, "net", said=(first, "--restart"))
        Hub.cut = {path: 100}
        refused(*net, "cut", "--retries", 0, said=("broken off",))
        assert os.listdir("cut") == ["hellaswag_val.jsonl.part"]


def archive(files):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return packed.getvalue()


MMLU = archive({"data/test/zoology_test.csv": b'"Why, ""x""?",a,b,c,"d,\ne",D\n',
                "data/test/art_test.csv": "What is é?,one,two,3,None,A\nWho?,w,x,y,z,C\n".encode(),
                "data/dev/art_dev.csv": b"no,a,b,c,d,A\n", "data/README.txt": b"x"})


def test_mmlu():
    write("copy/data.tar", MMLU)
    works("mmlu", "--from", "copy", "--out", "out")
    assert questions("out/mmlu_test.bin") == [
        (0, 0, ["Question: What is é?\n\nAnswer:", " one", " two", " 3", " None"]),
        (1, 2, ["Question: Who?\n\nAnswer:", " w", " x", " y", " z"]),
        (2, 3, ['Question: Why, "x"?\n\nAnswer:', " a", " b", " c", " d,\ne"])]


@pytest.mark.parametrize("name, data, said", [
    ("hellaswag", "{\n", "hellaswag_val.jsonl"), ("hellaswag", '{"ctx": "x", "label": 0}\n', "_val.jsonl"),
    ("hellaswag", '{"ctx": "x", "label": 4, "endings": ["a", "b", "c", "d"]}\n', "hellaswag_val.jsonl"),
    ("mmlu", MMLU[:1500], "data.tar"), ("mmlu", archive({"data/x": b""}), "no questions"),
    ("mmlu", archive({"data/test/a_test.csv": b"q,a,b,c,d,E\n"}), "a_test.csv row 1")],
    ids=["no JSON", "no endings", "label", "cut", "no questions", "no letter"])
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
    assert debian.is_prose(PROSE * 3) and not debian.is_prose("int main void return " * 50)
    names = ["linux-doc-6.1", "linux-doc-6.12", "linux-doc-6.9", "git-doc", "python3.9-doc", "python3.11-doc"]
    assert debian.newest(names) == ["git-doc", "linux-doc-6.12", "python3.11-doc"]


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="no dpkg-deb")
def test_debian():
    os.makedirs("debs")
    packages = {"one": {"a.html": PAGE, "b.txt.gz": PROSE * 5, "copyright": PROSE * 9, "c.png": "x"},
                "two": {"same.html": PAGE, "fr-FR/a.txt": PROSE * 7, "d.txt": PROSE * 6,
                        "code.txt": "int x; " * 200}}
    for name, members in packages.items():
        for member, text in members.items():
            data = gzip.compress(text.encode()) if member.endswith(".gz") else text
            write(f"{name}/usr/share/doc/{name}/{member}", data)
        write(f"{name}/DEBIAN/control", f"Package: {name}-doc\nVersion: 1\nArchitecture: all\n"
              "Maintainer: a <a@b>\nDescription: x\n")
        subprocess.run(["dpkg-deb", "--root-owner-group", "-Znone", "-b", name, f"debs/{name}-doc.deb"],
                       capture_output=True, check=True)
    words = ["debian-docs", "--from", "debs", *in_bytes(100), "--out"]
    works(*words, "out")
    wanted = [debian.plain(name, text.encode()).encode() for name, text in (
        ("a.txt", PROSE * 5), ("a.txt", PROSE * 6), ("a.html", PAGE))]
    in_order = [sorted(wanted, key=lambda data: hashlib.sha256(data).digest())]
    check_set("out", in_order, 100)
    at = os.getcwd()                                    # apt has one of them at first, then both
    write("bin/apt-cache", "#!/bin/sh\nprintf '%s - x\\n' git-doc python3.9-doc python3.11-doc no-doc\n")
    write("bin/apt-get", f"#!/bin/sh\necho $3 >> {at}/asked\n"
          f"case $3 in git-doc) cp {at}/debs/one-doc.deb .;; *) cp {at}/later/two-doc.deb .;; esac\n")
    by_apt = ["debian-docs", *in_bytes(100), "--out", "apt"]
    path = f"{at}/bin:{os.environ['PATH']}"
    refused(*by_apt, PATH=path, said=("apt-get download python3.11-doc: cp: ",))
    shutil.copytree("debs", "later")
    works(*by_apt, PATH=path)
    check_set("apt", in_order, 100)
    assert read("asked").split() == [b"git-doc", b"python3.11-doc", b"python3.11-doc"]
    write("debs/two-doc.deb", read("debs/two-doc.deb")[:-400])
    refused(*words, "o2", said=("two-doc.deb",))
    os.makedirs("empty")
    refused("debian-docs", "--from", "empty", "--out", "o3", said=("empty",))


# ---- the table ----

def test_table():
    """As a user starts it, in a process of its own, and looks at its beginning alone."""
    out = subprocess.run([sys.executable, GET], capture_output=True, text=True, check=True).stdout
    for d in get.DATASETS:
        assert d.name in out and d.licence and d.what and d.source
        assert d.kind in ("text", "shards", "debian", "files", "choices", "plays")
    names = [d.name for d in get.DATASETS]
    assert len(set(names)) == len(names)
    reader, pipe = os.pipe()
    os.close(reader)
    ended = subprocess.run([sys.executable, GET], stdout=pipe, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, b"")
