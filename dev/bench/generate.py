#!/usr/bin/env python3
"""Tokens a second of text that is written with kept keys and values: d12 with random weights.

    python3 dev/bench/generate.py [./train_gpt2cu] [--model d24] [--tokens 256] [--rows 1 8 64]

Each line: texts at once, tokens of each, seconds until the first step's tokens are there (start-up of the
program not counted), tokens/s of all texts together from there on.
"""
import argparse
import re
import subprocess
import sys


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("program", nargs="?", default="./train_gpt2cu")
    parser.add_argument("--model", default="d12")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--repeat", type=int, default=2)
    args = parser.parse_args()
    print("texts  tokens  first after  tokens/s  how")
    ways = {"": [], "top-k 40, top-p 0.9": ["--top-k", "40", "--top-p", "0.9"],
            "greedy": ["--temperature", "0"]}
    for rows in args.rows:
        for how, flags in ways.items():
            for _ in range(args.repeat if not flags else 1):
                p = subprocess.run([args.program, "-e", args.model, "-x", "0", "--prompt", "Once upon a time",
                                    "-g", str(args.tokens), "--num-samples", str(rows), *flags],
                                   capture_output=True, check=False)
                said = re.search(rb"(\d+) tokens, the first after ([\d.]+) s, then (\d+) tokens/s", p.stderr)
                if p.returncode != 0 or not said:
                    sys.exit(f"{' '.join(p.args)}: exit code {p.returncode}\n{p.stderr.decode()}")
                print(f"{rows:5}  {args.tokens:6}  {float(said[2]):9.3f} s  {int(said[3]):8}  {how}",
                      flush=True)


if __name__ == "__main__":
    main()
