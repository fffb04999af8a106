"""English documentation out of Debian's packages: a corpus that anyone can make again with apt.

apt-get download needs no root. debian-docs.versions has the versions of Debian 12's packages, of which
docs/data.md says what they make. Where the archive has them no more, others come, and a line says so. The
documents (HTML, text, POD, reStructuredText) come in the order of their sha256, which is as good as a
shuffle. A document that two packages share comes once.
"""
import concurrent.futures.process
import gzip
import hashlib
import html.parser
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import tarfile
import threading
import zlib

from fetch import Problem
from shards import replace_file

# Whole names, as regular expressions: versions differ between releases; what a release lacks is left out, and
# of several versions all but the last. The RFCs are in non-free, which apt's sources need not have.
PACKAGES = r"""
    debian-(reference-en|handbook|policy|faq|history|kernel-handbook|edu-doc-en) developers-reference
    linux-doc-[0-9.]+ python3\.[0-9]+-doc python-(django|sqlalchemy|pandas|numpy|scipy|matplotlib|flask)-doc
    postgresql-doc-[0-9]+ sqlite3-doc git-doc perl-doc apache2-doc nodejs-doc cmake-doc octave-doc maxima-doc
    golang-[0-9.]+-doc rust-doc erlang-doc gimp-help-en samba-doc aptitude-doc-en zsh-doc vim-doc gnuplot-doc
    libboost[0-9.]+-doc r-doc-html sbcl-doc gap-doc mercurial-common subversion-doc
    installation-guide-amd64 debmake-doc maint-guide live-manual-html jargon-text docutils-doc sphinx-doc
    bind9-doc kea-doc postfix-doc exim4-doc-html haproxy-doc varnish-doc icinga2-doc frr-doc ntpsec-doc
    krb5-doc slurm-wlm-doc openvswitch-doc dpdk-doc ganeti-doc lava-server-doc mailman3-doc buildbot-doc
    borgbackup2-doc snakemake-doc (nova|neutron|cinder|ironic|keystone|heat|swift|octavia|manila)-doc
    llvm-[0-9]+-doc clang-[0-9]+-doc c\+\+-annotations-html cppreference-doc-en-html emscripten-doc nim-doc
    swi-prolog-doc mit-scheme-doc ruby[0-9.]+-doc racket-doc imagemagick-[0-9]+-doc postgis-doc weechat-doc
    python-(astropy|dask|distributed|celery|pytest|sklearn|sympy|statsmodels|biopython)-doc numba-doc
    twisted-doc doc-rfc-(std|fyi-bcp|experimental)
    """.split()
ENDINGS = re.compile(r"\.(html?|xhtml|html\.en|txt|text|md|pod|rst)(\.gz)?$")
LEFT_OUT = re.compile(r"/(_sources|_static|changelog[^/]*|copyright|NEWS[^/]*|genindex[^/]*|search\.html|"
                      r"(?!en[-_])[a-z]{2}[-_][a-z]{2}|"                 # fr-FR, half translated
                      r"rfc\d+\.html(\.gz)?)(/|$)", re.I)               # an RFC is there as text, too
PAGE_BREAK = re.compile(r"(?m)^[^\n]*\[Page \w+\](?:\s*\n)?(?:[^\S\n]*(RFC)[^\n]*\n+)?")   # foot, next head
VERSIONS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "debian-docs.versions")
SMALLEST, LARGEST = 400, 2_000_000          # bytes of a document: less says little, more is a table or a log
UNREAD = 10 * LARGEST                       # a larger file has no document of this size
COMMON = frozenset("the of and to a in is that for it as be are with this on or not can if you by".split())


# ---- packages ----

def download_packages(patterns, folder):
    """The .deb files of all packages that there are, in `folder`."""
    for tool in ("apt-cache", "apt-get", "dpkg-deb"):
        if not shutil.which(tool):
            raise Problem(f"no {tool} here: this takes Debian, Ubuntu or a container of one of them",
                          "--from FOLDER takes .deb files")
    names = "^(" + "|".join(patterns) + ")$"
    listed = subprocess.run(["apt-cache", "search", "--names-only", names], capture_output=True, text=True,
                            check=False)
    found = [line.split(" ", 1)[0] for line in listed.stdout.splitlines()]
    packages = newest(name for name in found if re.fullmatch(names, name))  # apt also finds what provides it
    if not packages:
        raise Problem("apt knows none of the documentation packages", "apt-get update, as root")
    os.makedirs(folder, exist_ok=True)
    with open(VERSIONS, encoding="ascii") as f:
        pinned = dict(line.split("=", 1) for line in f.read().split())
    others = 0
    for package in packages:
        if os.path.exists(os.path.join(folder, package + ".done")):
            continue
        print(f"apt-get download {package}", flush=True)
        for version in [f"={pinned[package]}"] * (package in pinned) + [""]:
            got = subprocess.run(["apt-get", "download", "-q", package + version], cwd=folder,
                                 capture_output=True, text=True, check=False)
            if not got.returncode:
                others += not version
                break
        else:
            said = (got.stderr.strip() or "it failed").splitlines()[-1]
            raise Problem(f"apt-get download {package}: {said}",
                          "apt-get update, as root; the same command goes on from here")
        with open(os.path.join(folder, package + ".done"), "w", encoding="ascii"):
            pass                                # apt verifies what it downloads before it ends
    if others or len(packages) < len(pinned):
        print(f"note: of {len(pinned)} packages apt has {len(packages)}, {others} of them in versions that "
              "debian-docs.versions does not name: so the tokens are others")
    return deb_files(folder)


def newest(names):
    """Of names that differ in their numbers only the one with the highest."""
    def numbers(name):
        return [int(digits) for digits in re.findall("[0-9]+", name)]
    best = {}
    for name in names:
        key = re.sub("[0-9.]+", "", name)
        best[key] = max(best.get(key, name), name, key=numbers)
    return sorted(best.values())


def deb_files(folder):
    found = sorted(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".deb"))
    if not found:
        raise Problem(f"there is no .deb file in '{folder}'")
    return found


def package_files(deb):
    """(name, bytes) of the files in a package that may be documents"""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", deb], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as child:
        try:
            with tarfile.open(fileobj=child.stdout, mode="r|") as archive:
                for member in archive:
                    if not member.isfile() or not ENDINGS.search(member.name) or LEFT_OUT.search(member.name):
                        continue
                    f = archive.extractfile(member)
                    data = (gzip.GzipFile(fileobj=f) if member.name.endswith(".gz") else f).read(UNREAD + 1)
                    if len(data) <= UNREAD:
                        yield member.name, data
            while child.stdout.read(1 << 16):
                pass
        except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
            child.kill()
            raise Problem(f"'{deb}' is damaged: {error}", "remove it and run again") from error
        except BaseException:
            child.kill()
            raise
    if child.returncode:
        raise Problem(f"dpkg-deb cannot read '{deb}'", "remove it and run again")


# ---- text ----

class Text(html.parser.HTMLParser):
    """The running text of a page: paragraphs, lists and code, without its frame of links."""
    BLOCKS = frozenset("p div br h1 h2 h3 h4 h5 h6 li dt dd tr table ul ol dl pre blockquote section article "
                       "hr title".split())
    APART = frozenset("p h1 h2 h3 h4 h5 h6 pre blockquote table ul ol dl".split())
    FRAME_TAGS = frozenset("script style nav footer head select button svg".split())
    FRAME = frozenset("sphinxsidebar related footer navheader navfooter navigation headerlink toc "
                      "toctree-wrapper rst-footer-buttons wy-nav-side headertop topmenu".split())

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.out, self.pre, self.skipped, self.depth = [], 0, "", 0

    def handle_starttag(self, tag, attrs):
        if self.skipped:
            self.depth += tag == self.skipped
            return
        values = dict(attrs)
        named = set((values.get("class") or "").split()) | {values.get("id"), values.get("role")}
        if tag in self.FRAME_TAGS or (tag in ("div", "a", "table", "ul") and named & self.FRAME):
            self.skipped, self.depth = tag, 1
            return
        self.pre += tag == "pre"
        self.edge(tag)
        if tag == "li":
            self.out.append("- ")

    def handle_endtag(self, tag):
        if self.skipped:
            self.depth -= tag == self.skipped
            if not self.depth:
                self.skipped = ""
            return
        self.pre = max(self.pre - (tag == "pre"), 0)
        self.edge(tag)

    def edge(self, tag):
        if tag in self.BLOCKS:
            self.out.append("\n\n" if tag in self.APART else "\n")
        elif tag in ("td", "th"):
            self.out.append(" ")

    def handle_data(self, data):
        if not self.skipped:
            self.out.append(data if self.pre else re.sub(r"\s+", " ", data))


def without_pages(text):
    """An RFC in one piece: a paragraph goes on over the end of a page. Text begins in the first column."""
    whole, *rest = PAGE_BREAK.split(text)
    parts = [whole.rstrip("\n")]
    for head, page in zip(rest[::2], rest[1::2]):
        goes_on = parts[-1][-1:] not in ".:;" and page.lstrip()[:1].islower()
        parts += ["\n" if goes_on else "\n\n", (page if head else page.lstrip()).rstrip("\n")]
    return re.sub(r"(?m)^   ", "", "".join(parts))


def plain(name, data):
    text = data.decode("utf-8", "replace")
    if re.search(r"/rfc\d+\.txt", name):
        text = without_pages(text)
    if re.search(r"\.x?html?(\.en)?(\.gz)?$", name):
        page = Text()
        page.feed(text)
        page.close()
        text = "".join(page.out)
    text = "\n".join(line.rstrip(" \t\r\f\v\xa0") for line in text.replace("\0", "").split("\n"))
    text = re.sub(r"(?m)^ (?! )", "", text)     # what a line break in the HTML left before a word
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def is_prose(text):
    """English, and more than an index: one word in eight is among the commonest."""
    words = re.findall(r"[a-z]+", text.lower())
    return len(words) > 50 and sum(word in COMMON for word in words) * 8 > len(words)


def package_documents(deb):
    found = []
    for name, data in package_files(deb):
        text = plain(name, data)
        if SMALLEST <= len(text.encode()) <= LARGEST and is_prose(text):
            found.append(re.sub(r"(?m)^<\|endoftext\|>$", "<endoftext>", text))
    return found


def be_worker():
    """Ctrl-C is the parent's, which then ends this process; so does the parent's end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=end_with, args=[multiprocessing.parent_process()], daemon=True).start()


def end_with(process):
    process.join()
    os._exit(1)


def write_documents(debs, path):
    """All documents of these packages into one text, a line <|endoftext|> before each. Returns how many."""
    documents = {}
    pool = concurrent.futures.ProcessPoolExecutor(initializer=be_worker)
    try:
        for deb, texts in zip(debs, pool.map(package_documents, debs)):
            print(f"{os.path.basename(deb)}: {len(texts)} documents", flush=True)
            documents.update((hashlib.sha256(text.encode()).digest(), text) for text in texts)
    except concurrent.futures.process.BrokenProcessPool as error:
        raise Problem("a process that reads packages was ended",
                      "the same command goes on from here") from error
    finally:
        for worker in multiprocessing.active_children():
            worker.kill()                       # else shutdown waits for packages that nobody wants
        pool.shutdown(cancel_futures=True)
    if not documents:
        raise Problem("there is no English document in " + ", ".join(map(os.path.basename, debs[:5])))
    replace_file(path, (b"<|endoftext|>\n" + text.encode() for _, text in sorted(documents.items())))
    return len(documents)
