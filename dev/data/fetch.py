"""Files from the network, whole or not at all: what get.py downloads with.

A file grows as PATH.part and is renamed when it has its size and, where a listing gave one, its sha256. With
a sha256 a part that was cut off is continued (a wrong continuation would be noticed), else it begins anew.
Standard library only; proxies are taken from the environment, as everywhere (https_proxy).
"""
import fnmatch
import hashlib
import http.client
import json
import os
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import asdict, dataclass

HUB = "https://huggingface.co"
TIMEOUT_S = 60              # without a byte
BLOCK = 1 << 20


class Problem(Exception):
    """What went wrong, in one sentence for the user, and what to do. No sentence: it was said already."""

    def __init__(self, what, hint=""):
        super().__init__(what, hint)            # both, so that it can come from another process
        self.what, self.hint = what, hint


class Broken(Exception):
    """A download that may work another time."""


@dataclass
class File:
    """A file of a data set: at a URL, or here (path)."""
    name: str
    url: str = ""
    path: str = ""
    size: int = -1          # -1: not known
    sha256: str = ""        # "": not known

    def facts(self):
        return asdict(self)


def megabytes(n):
    return f"{n / 1e6:.1f} MB"


# ---- one request ----

def is_url(text):
    return text.startswith(("http://", "https://"))


def site_of(url):
    return "{0.scheme}://{0.netloc}".format(urllib.parse.urlsplit(url))


def ask(url, first=0):
    """The answer to a GET, from byte `first` on if the server can. HF_TOKEN goes to the hub and nowhere else,
    also not where the hub sends us on. file: and the like, which urllib would open, are no addresses."""
    if not is_url(url):
        raise Problem(f"'{url[:200]}' is no URL", "--from takes a folder, a pattern or http://HOST")
    request = urllib.request.Request(url, headers={"User-Agent": "get.py"})
    if first:
        request.add_header("Range", f"bytes={first}-")
    token = os.environ.get("HF_TOKEN")
    if token and site_of(url) == HUB:
        request.add_unredirected_header("Authorization", "Bearer " + token)
    try:
        return urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code in (408, 429) or error.code >= 500:
            raise Broken(f"{site_of(url)} answers {error.code} {error.reason}") from error
        hint = {401: "a data set that is not public takes a token: HF_TOKEN=hf_...",
                403: "a data set that is not public takes a token: HF_TOKEN=hf_..."}.get(
                    error.code, "it may have moved: --from FOLDER takes files that you fetched elsewhere")
        raise Problem(f"{url}: {error.code} {error.reason}", hint) from error
    except (OSError, http.client.HTTPException) as error:       # URLError is an OSError
        raise Broken(f"cannot reach {site_of(url)}: {getattr(error, 'reason', error)}") from error
    except ValueError as error:
        raise Problem(f"'{url}' is no URL: {error}", "--from takes a folder, a pattern or http://HOST") \
            from error


def with_retries(work, retries, progress=lambda: 0):
    """work() until it is not Broken any more: `retries` times without any progress() is too often."""
    failed, before = 0, progress()
    while True:
        try:
            return work()
        except Broken as error:
            now = progress()
            failed, before = (0 if now > before else failed + 1), max(now, before)
            if failed > retries:
                raise Problem(str(error), "the same command goes on from here; without a network fetch the "
                              "files elsewhere: --from FOLDER") from error
            print(f"{error}; trying again", file=sys.stderr, flush=True)
            time.sleep(min(2 ** failed - 1, 60))


# ---- a file ----

def size_of(path):
    return os.path.getsize(path) if os.path.exists(path) else 0


def write_all(f, data):
    """To a file without a buffer of Python's, which may take less at a time."""
    view = memoryview(data)
    while view:
        view = view[f.write(view):]


def write_or_tell(f, data, path):
    try:
        write_all(f, data)
    except OSError as error:
        raise Problem(f"cannot write '{path}': {error.strerror}",
                      "free some space; then the same command goes on from here") from error


def receive(file, part, show):
    have = size_of(part) if file.sha256 else 0
    if file.size >= 0 and have >= file.size:
        if have == file.size:
            return
        have = 0
    with ask(file.url, have) as answer:
        if have and not answer.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            have = 0                            # a server without ranges sends the whole
        length = answer.headers.get("Content-Length")
        total = file.size if file.size >= 0 else have + int(length) if length else -1
        try:
            f = open(part, "r+b" if have else "wb", buffering=0)
        except OSError as error:
            raise Problem(f"cannot create '{part}': {error.strerror}") from error
        with f:
            f.seek(have)
            while True:
                try:
                    block = answer.read(BLOCK)
                except (OSError, http.client.HTTPException) as error:
                    raise Broken(f"{file.name}: broken off after {have} bytes: {error}") from error
                if not block:
                    break
                write_or_tell(f, block, part)
                have += len(block)
                show(have, total)
            f.truncate(have)
            os.fsync(f.fileno())
    if total >= 0 and have < total:
        raise Broken(f"{file.name}: broken off after {have} of {total} bytes")
    if total >= 0 and have > total:
        os.unlink(part)
        raise Problem(f"{file.name} has {have} bytes, its listing says {total}", "run again: the listing is "
                      "read anew")


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def progress_line(name):
    began, shown = time.monotonic(), [0.0]

    def show(have, total):
        now = time.monotonic()
        if not sys.stderr.isatty() or (now - shown[0] < 0.2 and have != total):
            return
        shown[0] = now
        of = f" of {megabytes(total)}" if total >= 0 else ""
        end = "\n" if have == total else ""
        print(f"\r{name}: {megabytes(have)}{of}, {have / 1e6 / max(now - began, 1e-3):.1f} MB/s   ",
              file=sys.stderr, end=end, flush=True)
    return show


def download(file, path, retries):
    """The file at `path`; at once if it is there already."""
    if os.path.exists(path) and (file.size < 0 or os.path.getsize(path) == file.size):
        return
    part = path + ".part"
    show = progress_line(file.name)
    with_retries(lambda: receive(file, part, show), retries, lambda: size_of(part) if file.sha256 else 0)
    if file.sha256 and sha256_of(part) != file.sha256:
        os.unlink(part)
        raise Problem(f"{file.name}: what came is not what its listing announces (sha256)",
                      "it was removed; run again")
    os.replace(part, path)


# ---- the hub's listing of a repository ----

def hub_files(site, repo, pattern, retries):
    """[File] of a data set on the hub whose path matches the pattern, by name."""
    folder = re.split(r"[*?\[]", pattern)[0].rpartition("/")[0]
    inside = pattern[len(folder):].lstrip("/")
    url = f"{site}/api/datasets/{repo}/tree/main" + (f"/{folder}" if folder else "")
    url += "?recursive=true" if "/" in inside else ""
    found = []
    while url:
        def listing(url=url):
            with ask(url) as answer:
                try:
                    return json.load(answer), answer.headers.get("Link", "")
                except (ValueError, OSError, http.client.HTTPException) as error:
                    raise Broken(f"{site} sends no listing of {repo}: {error}") from error
        page, link = with_retries(listing, retries)
        for entry in page:
            if entry.get("type") == "file" and fnmatch.fnmatchcase(entry["path"], pattern):
                where = f"{site}/datasets/{repo}/resolve/main/{urllib.parse.quote(entry['path'])}"
                found.append(File(entry["path"], where, "", entry.get("size", -1),
                                  (entry.get("lfs") or {}).get("oid", "")))
        following = re.search(r'<([^>]+)>; *rel="next"', link)      # long listings come in pages
        url = urllib.parse.urljoin(url, following[1]) if following else ""
    if not found:
        raise Problem(f"{repo} on {site} has no file '{pattern}'", "see its page for the files that it has")
    return sorted(found, key=lambda file: file.name)
