"""Files from the network: of Hugging Face's hub by its own library, others from their URLs.

What is common to get.py and its parts is here, too: a sentence for the user, and a file of a data set.
"""
import contextlib
import fnmatch
import hashlib
import http.client
import importlib
import os
import re
import shutil
import sys
import urllib.request
from dataclasses import dataclass

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from outputs import whole_file                      # noqa: E402
from venv_python import take_the_venv               # noqa: E402

TIMEOUT_S = 60              # without a byte


class Problem(Exception):
    """What went wrong, in one sentence for the user, and what to do. No sentence: it was said already."""

    def __init__(self, what, hint=""):
        super().__init__(what, hint)
        self.what, self.hint = what, hint


def all_of(problems):
    """Raises them as one."""
    if problems:
        whats = [problem.what for problem in problems[:20]]
        if len(problems) > len(whats):
            whats.append(f"and {len(problems) - len(whats)} more")
        hints = dict.fromkeys(problem.hint for problem in problems if problem.hint)
        raise Problem("\n       ".join(whats), "; ".join(hints))


def of_each(function, items):
    """[function(item)]; what it refuses, it refuses of all at once."""
    results, problems = [], []
    for item in items:
        try:
            results.append(function(item))
        except Problem as problem:
            problems.append(problem)
    all_of(problems)
    return results


@dataclass
class File:
    """A file of a data set: here (path), or on the hub."""
    name: str
    size: int
    path: str = ""
    sha256: str = ""        # as its source says; "": it says none


def is_url(text):
    return text.startswith(("http://", "https://"))


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def same_contents(file, path, known):
    """known: {name: sha256}, of the first time that each file came. Later ones must have it."""
    sha256 = sha256_of(path)
    if file.sha256 not in ("", sha256):
        raise Problem(f"'{path}' is not {file.name}: its sha256 is {sha256}, not {file.sha256}",
                      "remove it and run again")
    first = known.setdefault(file.name, sha256)
    if first != sha256:
        raise Problem(f"'{path}' is another file than at first: its sha256 is {sha256}, it was {first}",
                      "remove it and run again; or --restart takes it as it is")


def download(url, path):
    """The whole file at `path`; at once if it is there already."""
    if os.path.exists(path):
        return
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer, whole_file(path) as f:
            shutil.copyfileobj(answer, f)
            length = int(answer.headers.get("Content-Length") or f.tell())
            if f.tell() != length:
                raise OSError(f"broken off after {f.tell()} of {length} bytes")
    except (OSError, http.client.HTTPException, ValueError) as error:       # HTTPError is an OSError
        raise Problem(f"{url}: {error}",
                      "run again; without a network fetch the file elsewhere: --from FOLDER") from error


# ---- the hub ----

def need(module, what, packages):
    """Before the work begins; .venv may have what this Python lacks."""
    try:
        return importlib.import_module(module)
    except ImportError:
        take_the_venv()
        raise Problem(f"{what} without {packages}", f"scripts/setup.sh data, or: pip install {packages}") \
            from None


@contextlib.contextmanager
def asking(what):
    """The library has tried again when it fails; in one sentence."""
    try:
        library = need("huggingface_hub", "nothing can be fetched from the hub", "huggingface_hub")
        with contextlib.redirect_stderr(sys.__stderr__):        # its progress moves a terminal's cursor
            yield library
    except Problem:
        raise
    except Exception as error:
        said = (str(error).strip() or repr(error)).splitlines()[0]
        raise Problem(f"{what}: {said}", "the same command goes on from here; HF_TOKEN=hf_... is for what is "
                      "not public; files from elsewhere are taken, too (get.py: --from FOLDER)") from error


HUB = "https://huggingface.co"


def place(site):
    """How the library is told where to ask. site: a mirror's URL, or None. A token is for the hub alone."""
    endpoint = (site or os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")
    return {"endpoint": endpoint, "token": None if endpoint == HUB else False}


def inside(name):
    """The name of a repository's file, which becomes a path below a folder here."""
    if re.search(r"[\x00-\x1f\x7f-\x9f\\]", name) or {"", ".", ".."} & set(name.split("/")):
        raise Problem(f"the hub lists {name!r}, which is no path inside a folder", "tell its owner")
    return name


def hub_files(site, repo, pattern, repo_type="dataset", **revision):
    """[File] of a repository whose path matches the pattern, by name."""
    folder = re.split(r"[*?\[]", pattern)[0].rpartition("/")[0]
    with asking(f"{repo} on the hub") as library:
        entries = library.HfApi(**place(site)).list_repo_tree(repo, folder or None, recursive=True,
                                                              repo_type=repo_type, **revision)
        found = [File(inside(entry.path), entry.size, "", entry.lfs.sha256 if entry.lfs else "")
                 for entry in entries if hasattr(entry, "size") and fnmatch.fnmatchcase(entry.path, pattern)]
    if not found:
        raise Problem(f"{repo} has no file '{pattern}'", "see its page for the files that it has")
    return sorted(found, key=lambda file: file.name)


def hub_download(site, repo, name, folder, repo_type="dataset", **revision):
    """Where it lies below the folder then."""
    with asking(name) as library:
        return library.hf_hub_download(repo, name, repo_type=repo_type, local_dir=folder, **place(site),
                                       **revision)
