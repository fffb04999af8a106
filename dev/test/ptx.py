#!/usr/bin/env python3
"""Did a change of the sources change a kernel? Compares the PTX of train_gpt2.cu's kernels, without a GPU.

    python3 dev/test/ptx.py                                     # each kernel's hash, and how many there are
    python3 dev/test/ptx.py --against main~3                    # those that differ from that commit's
    python3 dev/test/ptx.py --against HEAD --precision FP32 --arch compute_80

A tree takes nvcc a minute. Equal hashes: the change moved nothing on the GPU. A hash is of the kernel's text
and of the module's variables and functions that it names. Exit code: 0 if no kernel differs, else 1.
"""
import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile

from checks import ROOT

ENTRY = re.compile(r"^(?:\.\w+ )*\.(entry|func)\s+(?:\(.*?\)\s*)?([\w$]+)", re.M)
VARIABLE = re.compile(r"^(?:\.\w+ )*\.(?:global|const|shared)\b.*?([\w$]+)(?:\[\d*\])*(?: = .*)?;$", re.M)


def compiled(folder, precision, arch):
    """The PTX of a tree, without comments."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    with tempfile.TemporaryDirectory() as at:
        words = [nvcc, "-std=c++17", "-ptx", "-arch", arch, "-DENABLE_" + precision, "-I.", "train_gpt2.cu"]
        if subprocess.run([*words, "-o", at + "/ptx"], cwd=folder, check=False).returncode:
            sys.exit(f"error: {folder} does not compile: {' '.join(words)}")
        with open(at + "/ptx", encoding="utf-8") as f:
            return re.sub(r"//.*", "", f.read())


def hashes(ptx):
    """{kernel: hash}, without numbers that count the module's functions, without the kernel's own name."""
    texts, kernels, parts = {match[1]: match[0] for match in VARIABLE.finditer(ptx)}, [], ENTRY.split(ptx)
    for kind, name, text in zip(parts[1::3], parts[2::3], parts[3::3]):
        texts[name] = re.sub(r"(\$L__BB|__local_depot)\d+", r"\1", text).replace(name[1:], "kernel").strip()
        kernels += [name] if kind == "entry" else []

    def add(name, seen):
        seen[name] = texts[name]
        for word in sorted(set(re.findall(r"[\w$]+", texts[name])) & set(texts) - set(seen)):
            add(word, seen)
        return "\n".join(seen.values())
    plain = subprocess.check_output(["c++filt", *kernels], text=True).split("\n")
    return {name: hashlib.sha256(add(kernel, {}).encode()).hexdigest()[:16]
            for name, kernel in zip(plain, kernels)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--against", metavar="COMMIT", help="print what differs from this commit")
    parser.add_argument("--precision", default="BF16", choices=["BF16", "FP32", "FP16"])
    parser.add_argument("--arch", default="compute_90a")
    args = parser.parse_args()
    new = hashes(compiled(ROOT, args.precision, args.arch))
    if not args.against:
        print("\n".join(f"{h} {name}" for name, h in sorted(new.items())) + f"\n{len(new)} kernels")
        return 0
    with tempfile.TemporaryDirectory() as at:
        git = ["git", "-C", ROOT, "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", at + "/tree", args.against], check=True)
        try:
            old = hashes(compiled(at + "/tree", args.precision, args.arch))
        finally:
            subprocess.run([*git, "remove", "--force", at + "/tree"], check=True)
    differ = [("changed" if name in old else "appeared", name) for name in new if new[name] != old.get(name)]
    differ += [("vanished", name) for name in old if name not in new]
    print("\n".join([f"{what} {name}" for what, name in sorted(differ)] +
                    [f"{len(new)} kernels, {len(old)} before; {len(differ)} differ"]))
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
