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
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import urllib.parse

import pytest

from checks import ROOT, check, skip

GET = os.path.join(ROOT, "dev/data/get.py")
TOOL = os.path.join(ROOT, "build/tokenize")
pytestmark = pytest.mark.skipif(not os.access(TOOL, os.X_OK), reason="no build/tokenize: make tokenize")
sys.path.insert(0, os.path.join(ROOT, "dev/data"))
import debian                                       # noqa: E402
import get                                          # noqa: E402
import shards as made                               # noqa: E402

LIMIT_S = 600                                       # only a hang meets it


@pytest.fixture(autouse=True)
def in_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(path, data):
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "wb") as f:
        f.write(data if isinstance(data, bytes) else data.encode())


def read(path):
    with open(path, "rb") as f:
        return f.read()


def start(*words, **env):
    env = {**os.environ, "NO_PROXY": "*", "no_proxy": "*", **env}
    return subprocess.Popen([sys.executable, GET, *map(str, words)], env=env, stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def call(*words, **env):
    """(exit code, stdout, stderr)"""
    child = start(*words, **env)
    try:
        out, err = child.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        raise
    return child.returncode, out, err


def works(what, *words, **env):
    code, out, err = call(*words, **env)
    check(code == 0, f"{what}: exit code {code}: {err}")
    return out


def with_row(name, change, *words):
    """(exit code, stderr) of get.py with a row of its table changed."""
    program = (f"import sys; sys.path.insert(0, {os.path.dirname(GET)!r}); import get\n"
               f"next(d for d in get.DATASETS if d.name == {name!r}).{change}\nsys.exit(get.main())")
    p = subprocess.run([sys.executable, "-c", program, name, *map(str, words)], check=False, text=True,
                       env={**os.environ, "NO_PROXY": "*"}, capture_output=True, timeout=LIMIT_S)
    return p.returncode, p.stderr


def refused(what, *words, said=(), **env):
    """Exit code 1, an error and its hint, and every text of `said` in them."""
    code, _, err = call(*words, **env)
    lines = err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    good = code == 1 and len(errors) == 1 and "Traceback" not in err and len(lines) <= 3
    check(good and all(text in err for text in said), f"{what}: exit code {code}, wanted {said}: {err}")


def shard(path, tokenizer=2):
    """The tokens of a shard, whose header must be right."""
    data = read(path)
    head, tokens = array.array("i", data[:1024]), array.array("H", data[1024:])
    check(list(head[:4]) == [20240520, 1, len(tokens), tokenizer] and not any(head[4:]),
          f"{path}: header {list(head[:6])}, {len(tokens)} tokens")
    return list(tokens)


def shards(out, split, tokenizer=2):
    paths = sorted(glob.glob(f"{out}/*_{split}_*.bin"))
    first = 0 if split == "val" else 1
    numbers = [path[-10:-4] for path in paths]
    check(numbers == [f"{n:06d}" for n in range(first, first + len(paths))], f"{split}: {numbers}")
    return [shard(path, tokenizer) for path in paths]


def flat(lists):
    return [token for some in lists for token in some]


def byte_tokens(documents):
    return flat([0, *text] for text in documents if text)


def contents(out):
    """Every finished file; nothing half made may be among them."""
    names = sorted(os.listdir(out))
    check(not [name for name in names if name.endswith((".part", ".new"))], f"{out}: {names}")
    return {name: read(os.path.join(out, name)) for name in names if name.endswith(".bin")}


def check_set(what, out, documents, val, size, first=False):
    """Documents became a validation shard of `val` tokens, drawn or the first ones, and training shards of
    `size`, the last shorter."""
    wanted = byte_tokens(documents)
    starts = [i for i, token in enumerate(wanted) if token == 0]
    behind = next((i for i in starts if i >= val), None)
    spans = [(0, behind)] if first else made.draw_validation(starts, len(wanted), val)
    edges = [0, *(edge for span in spans for edge in span), len(wanted)]
    wanted_val = flat(wanted[a:b] for a, b in spans)
    wanted = flat(wanted[a:b] for a, b in zip(edges[::2], edges[1::2]))
    got_val, got = shards(out, "val"), shards(out, "train")
    check(flat(got_val) == wanted_val, f"{what}: validation differs")
    check(flat(got) == wanted, f"{what}: training differs: {flat(got)[:20]}, not {wanted[:20]}")
    check(flat(got)[0] == 0, f"{what}: training does not begin with a document")
    check([len(part) for part in got[:-1]] == [size] * (len(got) - 1) and 0 < len(got[-1]) <= size,
          f"{what}: lengths {[len(part) for part in got]}")
    check(not os.path.exists(f"{out}/.work"), f"{what}: .work is left")


def files(origin, out):
    return "files", "--from", origin, "--out", out


def jsonl(texts, field="text"):
    return "".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts)


def some_texts(seed, n):
    rng = random.Random(seed)
    words = ["tree", " ", "\n", "é", "是", "!", "house ", "<|endoftext|>", "\n<|endoftext|>\n", "42"]
    return ["".join(rng.choices(words, k=rng.randrange(60))) for _ in range(n)]


# ---- a hub on this machine ----

class Hub(http.server.BaseHTTPRequestHandler):
    files = {}              # path in the repository: bytes
    seen = []               # (path, first byte) of every file asked for
    cut = {}                # path: at most so many bytes an answer
    stop = None             # called before the answer to a path that has it as its end: (end, function)
    ranges, lies, pages, sizeless = True, False, False, False
    status, times = 0, 10**9        # what is answered instead, so many times

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
        names = sorted(name for name in self.files if name.startswith(folder))
        entries = [{"type": "directory", "path": folder + "x", "size": 0, "oid": "0"}]
        for name in names:
            data = self.files[name]
            digest = hashlib.sha256(b"other" if Hub.lies else data).hexdigest()
            entries.append({"type": "file", "path": name, "size": len(data), "oid": "0",
                            "lfs": {"oid": digest, "size": len(data), "pointerSize": 1}})
        for entry in entries if Hub.sizeless else ():
            del entry["size"]
        if not Hub.pages:
            return self.answer(200, json.dumps(entries).encode())
        page = int(urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query).get("cursor", ["0"])[0])
        site = f'http://{self.headers["Host"]}' if Hub.pages is True else Hub.pages
        link = {} if page + 1 >= len(entries) else {
            "Link": f'<{site}{self.path.split("?")[0]}?cursor={page + 1}>; rel="next"'}
        return self.answer(200, json.dumps(entries[page:page + 1]).encode(), **link)

    def do_GET(self):
        if Hub.status and Hub.times > 0:
            Hub.times -= 1
            return self.answer(Hub.status, b"")
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        if path.startswith("/api/datasets/o/n/tree/main"):
            return self.listing(path[len("/api/datasets/o/n/tree/main"):].lstrip("/"))
        name = path.removeprefix("/cdn/")
        if path.startswith("/datasets/o/n/resolve/main/"):          # as the real one sends on to its storage
            return self.answer(302, b"", Location="/cdn/" + urllib.parse.quote(path.split("/main/", 1)[1]))
        if name not in self.files:
            return self.answer(404, b"nothing")
        if Hub.stop and name.endswith(Hub.stop[0]):
            Hub.stop[1]()
        data, first = self.files[name], 0
        wanted = self.headers.get("Range", "")
        if wanted and Hub.ranges:
            first = int(wanted.removeprefix("bytes=").rstrip("-"))
        self.seen.append((name, first))
        more = {"Content_Range": f"bytes {first}-{len(data) - 1}/{len(data)}"} if first else {}
        return self.answer(206 if first else 200, data[first:][:self.cut.get(name, len(data))],
                           Content_Length=str(len(data) - first), **more)


class Serving:
    """The hub with these files, for as long as the block lasts; what it is called is its URL."""

    def __init__(self, files, **settings):
        Hub.files = {name: data if isinstance(data, bytes) else data.encode() for name, data in files.items()}
        Hub.seen, Hub.cut, Hub.stop, Hub.status, Hub.times = [], {}, None, 0, 10**9
        Hub.ranges, Hub.lies, Hub.pages, Hub.sizeless = True, False, False, False
        for name, value in settings.items():
            setattr(Hub, name, value)

    def __enter__(self):
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


HUB = ["hub", "--repo", "o/n", "--pattern", "data/*.jsonl", "--out", "out", "--bytes", "--val-tokens", 100,
       "--shard-tokens", 1000]


def hub_files(n=5):
    """{path: JSONL}, and the documents in them"""
    texts = [some_texts(seed, 40) for seed in range(n)]
    return ({f"data/{i:03d}.jsonl": jsonl(some) for i, some in enumerate(texts)},
            [text.encode() for some in texts for text in some])


# ---- your own files ----

def test_files():
    """Each kind, packed or not, in the order of names; a file ends a document; texts stay as they are."""
    texts = some_texts(1, 300)
    write("in/a.txt", "one\n<|endoftext|>\ntwo")
    write("in/b.md", "three\n")
    write("in/c.jsonl", jsonl(texts))
    write("in/d.txt.gz", gzip.compress(b"four\n<|endoftext|>\nfive\n"))
    write("in/e.txt.xz", lzma.compress(b"six"))
    write("in/f.jsonl.bz2", bz2.compress(b'{"text": "seven"}\n\n{"text": null}\n'
                                         b'{"text": " eig\\u0000ht\\n"}\n"9"\n'))
    write("in/g.png", "no text")
    write("in/h.jsonl", jsonl(["x" * 150000] * 4))       # more than goes into the pipe at a time
    write("in/sub/h.ndjson", '{"text": "\\ud800 alone"}\n')
    write("in/z.txt", "")
    documents = [b"one\n", b"two", b"three\n", *(text.encode() for text in texts), b"four\n", b"five\n",
                 b"six", b"seven", b" eight\n", b"9", *[b"x" * 150000] * 4, b"? alone"]
    _, out, err = call(*files("in", "out"), "--bytes", "--val-tokens", 500, "--shard-tokens",
                       200000)
    check("g.png" in err and len(err.splitlines()) == 1, f"what is left out is said: {err}")
    check("'out/out_train_*.bin'" in out, out)
    check_set("a folder", "out", documents, 500, 200000)
    works("a pattern", *files("in/[ab].*", "two"), "--bytes", "--val-tokens", 0)
    check_set("a pattern", "two", documents[:3], 0, 10**8)
    write("x.log", "a log")
    works("a file", *files("x.log", "three"), "--bytes", "--val-tokens", 1)
    check_set("a file without a known ending", "three", [b"a log"], 1, 10**8)
    works("GPT-2", *files("in/c.jsonl", "gpt2"), "--val-tokens", 500)
    works("GPT-2, all", *files("in/c.jsonl", "whole"), "--val-tokens", 0)
    tokens = flat(shards("whole", "train", 1))
    check(tokens.count(50256) == sum(map(bool, texts)), "an end of text before each document")
    p = subprocess.run([TOOL, "--decode", glob.glob("gpt2/*_val_*.bin")[0], "--separators", "0"],
                       capture_output=True, check=False)
    starts = [i for i, token in enumerate(tokens) if token == 50256]
    drawn = [starts.index(begin) for begin, _ in made.draw_validation(starts, len(tokens), 500)]
    want = "".join("<|endoftext|>" + [text for text in texts if text][i] for i in drawn).encode()
    check(p.stdout == want, f"{p.stdout[:80]}, expected {want[:80]}")
    facts = json.loads(read("out/dataset.json"))
    check(facts["tokens"] == len(byte_tokens(documents)) and facts["shards"] == list(contents("out")), facts)
    again = [*files("in", "out"), "--bytes", "--shard-tokens", 200000]
    check("complete" in works("again", *again, "--val-tokens", 500), "a data set is made twice")
    before = contents("out")
    refused("another length", *again, "--val-tokens", 7, said=("val_tokens 500 and not 7", "--restart"))
    for name, text, said in (("in/new.md", "new", "'new.md' is new"), ("in/b.md", "x", "of 6 bytes, is")):
        write(name, text)
        refused(said, *again, "--val-tokens", 500, said=(said, "--restart"))
        os.unlink(name)
    refused("a file less", *again, "--val-tokens", 500, said=("'b.md' is missing",))
    os.rename("in", "moved")
    refused("another folder", *files("moved/sub", "out"), *again[5:], "--val-tokens", 500, said=("missing",))
    check(contents("out") == before, "what was refused changed the shards")


def test_draw():
    """Whole documents, from all over the text, half of what is asked for at least, or a long one's end."""
    rng = random.Random(4)
    starts = [0, *sorted(rng.sample(range(1, 10**6), 3000))]
    spans = made.draw_validation(starts, 10**6, 100_000)
    ends = dict(zip(starts, [*starts[1:], 10**6]))
    check(all(ends[begin] == end for begin, end in spans), "a document is cut")
    check(90_000 < sum(end - begin for begin, end in spans) <= 100_000, f"{len(spans)} documents")
    tenths = [sum(begin // 10**5 == i for begin, _ in spans) for i in range(10)]
    check(min(tenths) > 10 and spans == sorted(spans), f"they are not spread: {tenths}")
    for starts, wanted, got in (([0], 30, [(70, 100)]), ([0], 0, []), ([], 0, []), ([0, 50], 50, [(50, 100)]),
                                ([0, 40], 10, [(90, 100)])):
        check(made.draw_validation(starts, 100, wanted) == got, f"{starts}, {wanted}: {got}")


def test_draw_as_the_tool():
    """By default the smaller of 100,000 and a tenth; both programs draw the same, and say so."""
    for name, count, wanted in (("small", 500, 2000), ("large", 12000, 100_000)):
        rng = random.Random(count)
        text = "\n<|endoftext|>\n".join("x" * rng.randrange(1, 180) for _ in range(count))
        write(f"{name}.txt", text)
        p = subprocess.run([TOOL, f"{name}.txt", "-o", name, "--bytes", "1"], capture_output=True, text=True,
                           check=False)
        out = works(name, *files(f"{name}.txt", f"out/{name}"), "--bytes")
        said = [line for line in out.splitlines() if line.startswith("validation: ")]
        check(said and said[0] in p.stdout, f"{said}, {p.stdout}")
        drawn = shard(f"{name}_val.bin")
        check([drawn, shard(f"{name}_train.bin")] == [flat(shards(f"out/{name}", split))
                                                      for split in ("val", "train")], f"{name}: they differ")
        tenth = (len(drawn) + len(shard(f"{name}_train.bin"))) // 10
        target = min(100_000, tenth)
        check(target - 200 < len(drawn) <= target and (tenth > 100_000) == (name == "large"), f"{len(drawn)}")


def test_shard_is_synced():
    """Its bytes are on the disk before its name is."""
    calls, before = [], (os.fsync, os.replace)
    try:
        os.fsync = lambda fd: calls.append(("fsync", os.fstat(fd).st_size))
        os.replace = lambda old, new: calls.append(("replace", new))
        made.replace_file("a.bin", [b"one", b"two"])
    finally:
        os.fsync, os.replace = before
    check(calls == [("fsync", 6), ("replace", "a.bin")], calls)


def test_files_refused():
    write("in/a.jsonl", '{"text": "good"}\n{"text": "bad"\n')
    write("in/b.jsonl", '{"body": "text"}\n')
    write("in/c.jsonl", '{"text": 7}\n')
    write("in/d.txt.gz", gzip.compress(bytes(range(256)) * 100)[:-20])
    write("in/e.txt", "short")
    write("pictures/f.png", "x")
    refused("bad JSON", *files("in/a.jsonl", "out"), said=("a.jsonl' line 2",))
    refused("other options", *files("in/a.jsonl", "out"), "--bytes", said=("bytes False and not True",
                                                                           "--restart"))
    refused("a missing field", *files("in/b.jsonl", "o2"), said=("'text'", "'body'", "--text-field"))
    works("another field", *files("in/b.jsonl", "o3"), "--text-field", "body", "--bytes",
          "--val-tokens", 0)
    check_set("another field", "o3", [b"text"], 0, 10**8)
    refused("a number", *files("in/c.jsonl", "o4"), said=("row 1", "int"))
    refused("a cut gzip", *files("in/d.txt.gz", "o5"), said=("d.txt.gz' is damaged",))
    write("in/empty.txt", "")
    refused("no text", *files("in/empty.txt", "o6"), said=("no text",))
    refused("too short", *files("in/e.txt", "o11"), "--bytes", "--val-tokens", 6,
            said=("--val-tokens 6", "hint: --val-tokens 0 is a tenth"))
    works("then fewer", *files("in/e.txt", "o11"), "--bytes", "--val-tokens", 2)
    check_set("then fewer", "o11", [b"short"], 2, 10**8)
    refused("nothing there", *files("none*", "o7"), said=("none*",))
    refused("no text there", *files("pictures", "o8"), said=("pictures",))
    refused("no --from", "files", "--out", "o9", said=("--from",))
    refused("no --out", "files", "--from", "in/e.txt", said=("--out",))
    refused("a name", "fineweb", said=("'fineweb'", "fineweb10B"))
    refused("a number below", *files("in", "o"), "--shard-tokens", 0, said=("--shard-tokens 0",))
    refused("no tool", *files("in", "o"), "--tokenize", "none", said=("'none'",))
    refused("a hub without --repo", "hub", "--out", "o", said=("--repo",))
    for out in ("out", "o2", "o4", "o5", "o6", "o7", "o8"):
        check(not os.path.exists(out) or not contents(out), f"{out} has shards")
    write("in/a.jsonl", '{"text": "good"}\n')
    refused("other files than before", *files("in/a.jsonl", "out"), said=("other files", "a.jsonl' was",
                                                                          "--restart"))
    write("theirs/theirs_train_000001.bin", "x")
    refused("shards of others", *files("in/e.txt", "theirs"), said=("theirs_train_000001.bin",))
    works("--restart", *files("in/e.txt", "theirs"), "--restart", "--bytes", "--val-tokens", 0)
    check_set("--restart", "theirs", [b"short"], 0, 10**8)


def test_parquet():
    write("in/bad.parquet", "PAR1 no parquet")
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        skip(8, "no pyarrow: `scripts/setup.sh data`")
        refused("parquet without pyarrow", *files("in/bad.parquet", "no"), said=("pyarrow",))
        return
    texts = some_texts(5, 3000) + [None, "nul\0nul"]
    parquet.write_table(pyarrow.table({"id": list(range(len(texts))), "text": texts}), "in/a.parquet",
                        row_group_size=700)
    works("parquet", *files("in/a.parquet", "out"), "--bytes", "--val-tokens", 999,
          "--shard-tokens", 9999)
    check_set("parquet", "out", [(text or "").replace("\0", "").encode() for text in texts], 999, 9999)
    refused("no parquet", *files("in/bad.parquet", "o2"), said=("bad.parquet",))
    refused("no column", *files("in/a.parquet", "o3"), "--text-field", "body",
            said=("'body'", "'text'"))
    refused("no text", *files("in/a.parquet", "o3"), "--text-field", "id", "--restart", said=("'id'", "int"))
    parquet.write_table(pyarrow.table({"text": pyarrow.array(["", None, "one", "", "two"], "large_string")}),
                        "in/l.parquet")
    works("large strings", *files("in/l.parquet", "o5"), "--bytes", "--val-tokens", 0)
    check_set("large strings", "o5", [b"one", b"two"], 0, 10**8)
    with Serving({"sample/10BT/000.parquet": read("in/a.parquet"), "sample/100BT/x.parquet": b"",
                  "README.md": b""}) as url:
        row = next(d for d in get.DATASETS if d.name == "fineweb10B")
        works("as FineWeb is", "hub", "--repo", "o/n", "--pattern", row.train, "--out", "o4", "--bytes",
              "--val-tokens", 999, "--shard-tokens", 9999, "--from", url)
        check([name for name, _ in Hub.seen] == ["sample/10BT/000.parquet"], f"asked for {Hub.seen}")
    check_set("as FineWeb is", "o4", [(text or "").replace("\0", "").encode() for text in texts], 999, 9999,
              first=True)


# ---- the hub ----

def test_hub():
    hub, documents = hub_files()
    hub["data/005 é#.jsonl"] = jsonl(["last"])
    documents.append(b"last")
    with Serving({**hub, "data/x.txt": "no", "other/y.jsonl": "no"}, pages=True) as url:
        works("a mirror", *HUB, "--from", url)
        check_set("a mirror", "out", documents, 100, 1000, first=True)
        check(sorted(name for name, _ in Hub.seen) == sorted(hub), f"asked for {Hub.seen}")
        shutil.rmtree("out")
        works("HF_ENDPOINT", *HUB, HF_ENDPOINT=url)
        check_set("HF_ENDPOINT", "out", documents, 100, 1000, first=True)
    shutil.rmtree("out")
    with Serving(hub, sizeless=True) as url:
        works("a listing without sizes", *HUB, "--from", url)
        check_set("a listing without sizes", "out", documents, 100, 1000, first=True)
    with Serving(hub, pages="file:///tmp") as url:
        refused("a page that is no page", *HUB, "--out", "no", "--from", url, said=("'file:///tmp", "no URL"))
    for name, data in hub.items():
        write("copy/" + name, data)
    words = [word if word != "out" else "local" for word in HUB]
    works("a folder", *words, "--from", "copy")
    check(list(contents("local").values()) == list(contents("out").values()), "from a folder it is another")
    check(len(glob.glob("copy/data/*")) == len(hub), "the user's own files are gone")


def test_first_shards():
    hub, documents = hub_files()
    with Serving(hub) as url:
        works("the first three", *HUB, "--from", url, "--shards", 3)
        wanted = byte_tokens(documents)
        end = wanted.index(0, 100)
        check(flat(shards("out", "val")) == wanted[:end] and
              flat(shards("out", "train")) == wanted[end:end + 3000], "the first three shards differ")
        check(len(Hub.seen) < len(hub), f"all files were asked for: {Hub.seen}")
        works("then all", *HUB, "--from", url)
        check_set("then all", "out", documents, 100, 1000, first=True)
        check(len(Hub.seen) == len(hub), f"files were fetched twice: {Hub.seen}")
    with Serving({"data/0.jsonl": jsonl(["x" * 500])}) as url:          # nowhere to cut: the end is taken
        works("one document", *HUB, "--out", "one", "--from", url)
    got = shards("one", "val"), shards("one", "train")
    check(got == ([[120] * 100], [[0] + [120] * 400]), f"one document: {got}")


def test_validation_of_its_own():
    """As TinyStories has it: all of it is one shard, whatever --shard-tokens says."""
    stories = [f"story {i}\n" for i in range(400)]
    text = "<|endoftext|>\n".join
    write("copy/TinyStoriesV2-GPT4-train.txt", text(stories[:300]))
    write("copy/TinyStoriesV2-GPT4-valid.txt", text(stories[300:]))
    copy = ["tinystories", "--from", "copy", "--shard-tokens", 700, "--bytes"]
    works("all", *copy, "--out", "out")
    bytes_of = [story.encode() for story in stories]
    check(shards("out", "val") == [byte_tokens(bytes_of[300:])], "validation")
    got = shards("out", "train")
    check(flat(got) == byte_tokens(bytes_of[:300]) and len(got) > 2, "training")
    for letter in "bc":                         # more files than two shards take
        write(f"copy/{letter}-train.txt", text(stories))
    got = with_row("tinystories", "train = '*-train.txt'", *copy[1:], "--out", "two", "--shards", 2)
    check(got == (0, "") and flat(shards("two", "val")) == byte_tokens(bytes_of[300:])
          and len(shards("two", "train")) == 2, f"two shards come with all of the validation: {got}")
    check(os.path.exists("two/.work"), "and it is not complete")
    refused("--val-tokens", *copy, "--out", "x", "--val-tokens", 5, said=("--val-tokens",))


def test_broken_downloads():
    hub, documents = hub_files(3)
    name = "data/001.jsonl"
    with Serving(hub, cut={name: 1000}) as url:       # goes on as long as something comes
        works("cut connections", *HUB, "--from", url)
        check_set("cut connections", "out", documents, 100, 1000, first=True)
        firsts = [first for path, first in Hub.seen if path == name]
        check(firsts == list(range(0, len(hub[name].encode()), 1000)), f"from {firsts}")
    shutil.rmtree("out")
    with Serving(hub, cut={name: 0}) as url:
        refused("nothing comes", *HUB, "--from", url, "--retries", 0, said=(name, "goes on from here"))
        Hub.cut = {}
        Hub.ranges = False
        write("out/.work/files/000001_001.jsonl.part", b"rest")
        works("no ranges", *HUB, "--from", url)
        check_set("no ranges", "out", documents, 100, 1000, first=True)
        check([path for path, _ in Hub.seen].count("data/000.jsonl") == 1, "a finished file came again")
    shutil.rmtree("out")
    with Serving(hub) as url:
        refused("another file's part", *HUB, "--from", url, "--pattern", "data/x*", said=("data/x*",))
        write("out/.work/files/000000_000.jsonl.part", b"x" * 500)
        refused("another file's part", *HUB, "--from", url, said=("sha256",))
        works("then anew", *HUB, "--from", url)
        check_set("then anew", "out", documents, 100, 1000, first=True)
    shutil.rmtree("out")
    with Serving(hub, lies=True) as url:
        refused("other bytes than announced", *HUB, "--from", url, said=("data/000.jsonl", "sha256"))
    for status, said in ((404, "404"), (401, "HF_TOKEN"), (503, "503")):
        shutil.rmtree("out", ignore_errors=True)
        with Serving(hub, status=status) as url:
            refused(f"status {status}", *HUB, "--from", url, "--retries", 0, said=(said, "hint: "))
    refused("no network", *HUB, "--from", url, "--retries", 0, said=("cannot reach " + url, "--from FOLDER"))
    check(not contents("out"), "a download that failed left shards")


def test_another_place():
    """Begun from a hub that then stops, goes on from a folder or from another hub."""
    hub, documents = hub_files(3)
    for name, data in hub.items():
        write("copy/" + name, data)
    for how in ("folder", "mirror"):
        shutil.rmtree("out", ignore_errors=True)
        with Serving(hub, cut={"data/001.jsonl": 0}) as url:
            refused("the first", *HUB, "--from", url, "--retries", 0, said=("data/001.jsonl",))
        if how == "folder":
            write("short/001.jsonl", "x")
            refused("another file", *HUB, "--from", "short", said=("short/001.jsonl' has 1 bytes",))
            works("a folder", *HUB, "--from", "copy")
        else:
            with Serving(hub) as other:
                works("a mirror", *HUB, "--from", other)
        check_set(how, "out", documents, 100, 1000, first=True)


def test_retries():
    hub, documents = hub_files(1)
    with Serving(hub, status=503, times=2) as url:
        code, _, err = call(*HUB, "--from", url)
        check(code == 0 and "503" in err and "trying again" in err, f"exit code {code}: {err}")
        check_set("after a while", "out", documents, 100, 1000, first=True)


def test_kills():
    """Killed before each of the files comes, then called again: equal bytes, no finished file comes again."""
    hub, documents = hub_files()
    with Serving(hub) as url:
        for number, name in enumerate(hub):
            for how in (signal.SIGKILL, signal.SIGTERM) if number == 2 else (signal.SIGKILL,):
                shutil.rmtree("out", ignore_errors=True)
                Hub.seen.clear()
                child = start(*HUB, "--from", url)
                Hub.stop = (name, lambda child=child, how=how: (os.kill(child.pid, how), time.sleep(0.1)))
                code = (child.communicate(timeout=LIMIT_S), child.returncode)[1]
                check(code == (-9 if how == signal.SIGKILL else 130), f"{name}: exit code {code}")
                Hub.stop = None
                contents("out")
                works(f"after signal {how}", *HUB, "--from", url)
                check_set(f"after signal {how}", "out", documents, 100, 1000, first=True)
                again = [path for path, _ in Hub.seen if path in list(hub)[:number]]
                check(len(again) == number, f"fetched again: {Hub.seen}")


def test_kill_while_tokenizing():
    """A tool that waits to be killed, with its reader: what it leaves does not count."""
    hub, documents = hub_files(2)
    write("slow", '#!/bin/sh\n[ -e go ] || touch at_work\nwhile [ ! -e go ]; do sleep 0.05; done\n'
          f'exec {TOOL} "$@"\n')
    os.chmod("slow", 0o755)
    write("pipe.jsonl", jsonl(["x" * 1000] * 1000))
    with Serving(hub) as url:
        child = start(*HUB, "--from", url, "--tokenize", "./slow")
        while not os.path.exists("at_work") and child.poll() is None:
            time.sleep(0.01)
        for _ in range(6000):                       # the next file comes while this one is tokenized
            if "data/001.jsonl" in [name for name, _ in Hub.seen]:
                break
            time.sleep(0.01)
        check("data/001.jsonl" in [name for name, _ in Hub.seen], f"ahead: {Hub.seen}")
        refused("two at once", *HUB, "--from", url, said=("another get.py",))
        os.kill(child.pid, signal.SIGKILL)
        write("go", "")                             # now it takes what it was fed for the whole
        child.communicate(timeout=LIMIT_S)
        works("after a kill", *HUB, "--from", url)
        check_set("after a kill", "out", documents, 100, 1000, first=True)
    write("dies", "#!/bin/sh\nkill -9 $$\n")
    os.chmod("dies", 0o755)
    refused("a tool that is killed", *files("pipe.jsonl", "o2"), "--tokenize", "./dies",
            said=("signal 9",))


def test_full_disk():
    """As `ulimit -f` makes it: the shard that does not fit is not there, and with room it goes on."""
    documents = [b"one " * 6000, b"two " * 6000, b"three " * 4000]     # a part each, of 48 KB
    for name, document in zip(("a.jsonl", "b.txt", "c.jsonl"), documents):
        write("in/" + name, document if name == "b.txt" else jsonl([document.decode()]))
    words = [*files("in", "out"), "--bytes", "--val-tokens", 10, "--shard-tokens", 40000]
    for limit, said in ((70, "cannot write 'out/out_train_000001.bin': "), (30, "File too large")):     # KB
        command = ["bash", "-c", f'ulimit -f {limit}; exec "$@"', "-", sys.executable, GET, *map(str, words)]
        p = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        check(p.returncode == 1 and p.stderr.startswith("error: ") and said in p.stderr
              and len(p.stderr.splitlines()) <= 3, f"limit {limit}: exit code {p.returncode}: {p.stderr}")
        check(list(contents("out")) == (["out_val_000000.bin"] if limit == 70 else []),
              f"limit {limit}: {list(contents('out'))}")
        os.rename("out", f"begun{limit}")
    os.rename("begun70", "out")
    works("with room", *words)
    check_set("with room", "out", documents, 10, 40000)


def test_room():
    """Too small a disk is told before the work."""
    program = (f"import sys, shutil; sys.path.insert(0, {os.path.dirname(GET)!r}); import get\n"
               "sys.argv = ['get.py', 'fineweb10B', '--from', 'copy', '--out', 'out']\n"
               "get.need_pyarrow = lambda: None\n"
               "shutil.disk_usage = lambda path: type('', (), {'free': 5e9})\nsys.exit(get.main())")
    write("copy/sample/10BT/0.parquet", "x")
    p = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    check(p.returncode == 1 and "5.0 GB" in p.stderr and "20.8 GB" in p.stderr and "--shards" in p.stderr,
          p.stderr)


# ---- published shards ----

def published(tokens, header=()):
    head = array.array("i", [20240520, 1, len(tokens), 0] + [0] * 252)
    for at, value in header:
        head[at] = value
    return head.tobytes() + array.array("H", tokens).tobytes()


def test_published():
    row_files = {f"fineweb_{split}_{n:06d}.bin": published(list(range(n, n + 50)))
                 for split, n in (("val", 0), ("train", 1), ("train", 2), ("train", 3))}

    def fetch(*words):
        return with_row("fineweb10B-shards", "source = 'o/n'", "--out", "out", *words)
    with Serving({**row_files, "README.md": "no"}) as url:
        check(fetch("--from", url, "--shards", 2) == (0, ""), "two of them")
        check(contents("out") == {name: data for name, data in row_files.items() if "3" not in name},
              f"{list(contents('out'))}")
        check(fetch("--from", url) == (0, "") and contents("out") == row_files, "all of them")
        check(len(Hub.seen) == 4, f"fetched twice: {Hub.seen}")
        for what, data in (("cut", row_files["fineweb_train_000002.bin"][:-2]), ("text", b"<html>" * 300),
                           ("byte tokens", published([1, 2], [(3, 2)])),
                           ("count", published([1, 2], [(2, 3)]))):
            os.unlink("out/fineweb_train_000002.bin")
            Hub.files["fineweb_train_000002.bin"] = data
            code, err = fetch("--from", url)
            check(code == 1 and err.startswith("error: ") and "000002" in err, f"{what}: {code}, {err}")
            check("fineweb_train_000002.bin" not in contents("out"), f"{what}: it was taken")
            write("out/fineweb_train_000002.bin", "x")
        os.unlink("out/fineweb_train_000002.bin")
    for name, data in row_files.items():
        write("copy/" + name, data)
    check(fetch("--from", "copy") == (0, "") and contents("out") == row_files, "from a folder")


# ---- questions ----

def decode(texts):
    """[text] of [[token]], in one call of the tool"""
    write("decode.bin", published(flat([50256, *tokens] for tokens in texts)))
    p = subprocess.run([TOOL, "--decode", "decode.bin", "--separators", "0"], capture_output=True, text=True,
                       check=False)
    return p.stdout.split("<|endoftext|>")[1:]


def questions(path):
    """[(index, label, [texts])] of a file, whose every length must be right."""
    data = read(path)
    head, words = array.array("i", data[:1024]), array.array("H", data[1024:])
    check(list(head[:2]) == [20240522, 1] and head[4] == 1 and not any(head[5:]),
          f"header {list(head[:6])}")
    found, texts, at, longest = [], [], 0, 0
    while at < len(words):
        start_word, size, index, label, completions = words[at:at + 5]
        begin, at = at, at + 5
        for _ in range(1 + completions):
            texts.append(words[at + 1:at + 1 + words[at]].tolist())
            at += 1 + words[at]
        check(start_word == 65535 and size == 2 * (at - begin), f"question {index} has {size} bytes")
        longest = max(longest, size)
        found.append((index, label, 1 + completions))
    check(head[2] == len(found) and head[3] == longest, f"{head[2]} questions of at most {head[3]} bytes")
    decoded = iter(decode(texts))
    return [(index, label, [next(decoded) for _ in range(n)]) for index, label, n in found]


def test_hellaswag():
    rows = [{"ind": 7, "ctx": f"A man {i} sits. He", "label": i % 4,
             "endings": [f"does {i}{k}." for k in range(4)]} for i in range(6)]
    rows += [{"ctx": "é是\nx", "label": "2", "endings": ["a", " b", "", "d\n"]}]
    write("copy/hellaswag_val.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    works("from a folder", "hellaswag", "--from", "copy", "--out", "out")
    wanted = [(i, int(row["label"]), [row["ctx"]] + [" " + text for text in row["endings"]])
              for i, row in enumerate(rows)]
    got = questions("out/hellaswag_val.bin")
    check(got == wanted, f"{got[-1]}, expected {wanted[-1]}")
    path = "/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
    with Serving({path: read("copy/hellaswag_val.jsonl")}) as url:
        works("from a mirror", "hellaswag", "--from", url, "--out", "net")
        check(read("net/hellaswag_val.bin") == read("out/hellaswag_val.bin"), "from a mirror it is another")
        first = json.loads(read("net/dataset.json"))["sha256"]
        check(first == hashlib.sha256(read("copy/hellaswag_val.jsonl")).hexdigest(), f"sha256 {first}")
        Hub.files[path] = read("copy/hellaswag_val.jsonl") + b"\n"
        os.unlink("net/hellaswag_val.jsonl")
        refused("another file", "hellaswag", "--from", url, "--out", "net", said=(first, "--restart"))
        Hub.cut = {path: 100}
        refused("cut", "hellaswag", "--from", url, "--out", "cut", "--retries", 0, said=("broken off",))
        check(os.listdir("cut") == ["hellaswag_val.jsonl.part"], f"{os.listdir('cut')}")
    for what, line in (("no JSON", "{"), ("no endings", '{"ctx": "x", "label": 0}'),
                       ("label", '{"ctx": "x", "label": 4, "endings": ["a", "b", "c", "d"]}')):
        write("bad/hellaswag_val.jsonl", line + "\n")
        refused(what, "hellaswag", "--from", "bad", "--out", "o2", said=("hellaswag_val.jsonl",))
    check(not contents("o2"), "bad questions became a file")


def archive(files):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return packed.getvalue()


def test_mmlu():
    write("copy/data.tar", archive({
        "data/test/zoology_test.csv": b'"Why, ""x""?",a,b,c,"d,\ne",D\n',
        "data/test/art_test.csv": "What is é?,one,two,3,None,A\nWho?,w,x,y,z,C\n".encode(),
        "data/dev/art_dev.csv": b"no,a,b,c,d,A\n", "data/README.txt": b"x"}))
    works("an archive", "mmlu", "--from", "copy", "--out", "out")
    wanted = [(0, 0, ["Question: What is é?\n\nAnswer:", " one", " two", " 3", " None"]),
              (1, 2, ["Question: Who?\n\nAnswer:", " w", " x", " y", " z"]),
              (2, 3, ['Question: Why, "x"?\n\nAnswer:', " a", " b", " c", " d,\ne"])]
    got = questions("out/mmlu_test.bin")
    check(got == wanted, f"{got}")
    write("cut/data.tar", read("copy/data.tar")[:1500])
    refused("a cut archive", "mmlu", "--from", "cut", "--out", "o2", said=("data.tar",))
    write("bad/data.tar", archive({"data/test/a_test.csv": b"q,a,b,c,d,E\n"}))
    refused("no letter", "mmlu", "--from", "bad", "--out", "o2", said=("a_test.csv row 1",))
    write("none/data.tar", archive({"data/x": b""}))
    refused("no questions", "mmlu", "--from", "none", "--out", "o2", said=("no questions",))
    check(not contents("o2"), "bad questions became a file")


# ---- Debian's packages ----

PROSE = "It is known that the best of all the things in a house is the one that is not for sale; it can be "
PAGE = f"""<html><head><title>gone</title></head><body><div class="sphinxsidebar"><div>gone</div>gone</div>
<h1>Head &amp; tail</h1><p>{PROSE}
seen.</p><pre>  two  blanks
line</pre><ul><li>{PROSE * 3}</li></ul><script>gone()</script></body></html>"""


def test_html():
    text = debian.plain("a.html", PAGE.encode())
    check(text.startswith("Head & tail\n\nIt is known"), text[:60])
    check("gone" not in text, text)
    check("can be seen.\n" in text and "\n  two  blanks\nline\n" in text and "\n- It is" in text, text)
    check(debian.plain("a.txt", b"a\t\r\n\n\n\n\nb\0 ") == "a\n\nb\n", "plain text")
    check(debian.is_prose(PROSE * 3) and not debian.is_prose("int main void return " * 50), "what is prose")


def test_newest_packages():
    names = ["linux-doc-6.1", "linux-doc-6.12", "linux-doc-6.9", "git-doc", "python3.9-doc", "python3.11-doc"]
    check(debian.newest(names) == ["git-doc", "linux-doc-6.12", "python3.11-doc"], debian.newest(names))


def test_debian():
    if not shutil.which("dpkg-deb"):
        skip(4, "no dpkg-deb")
        return
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
        p = subprocess.run(["dpkg-deb", "--root-owner-group", "-b", name, f"debs/{name}-doc.deb"],
                           capture_output=True, text=True, check=False)
        check(p.returncode == 0, p.stderr)
    words = ["debian-docs", "--from", "debs", "--bytes", "--val-tokens", 100, "--out"]
    works("packages", *words, "out")
    wanted = [debian.plain(name, text.encode()) for name, text in (("a.txt", PROSE * 5), ("a.txt", PROSE * 6),
                                                                   ("a.html", PAGE))]
    wanted = sorted((text.encode() for text in wanted), key=lambda data: hashlib.sha256(data).digest())
    check_set("packages", "out", wanted, 100, 10**8, first=True)
    write("debs/two-doc.deb", read("debs/two-doc.deb")[:-400])
    refused("a damaged package", *words, "o2", said=("two-doc.deb",))
    os.makedirs("empty")
    refused("no packages", "debian-docs", "--from", "empty", "--out", "o3", said=("empty",))


# ---- the table ----

def test_table():
    out = works("the table")
    for row in get.DATASETS:
        check(row.name in out and row.licence and row.what and row.source, f"{row.name}: {row}")
        check(row.kind in ("script", "text", "shards", "debian", "files", "choices"), row)
    names = [row.name for row in get.DATASETS]
    check(len(set(names)) == len(names), "a name stands twice")
    refused("tinyshakespeare of another text", "tinyshakespeare", "--from", GET, "--out", "out",
            said=("is not tinyshakespeare",))
