#!/usr/bin/env python3
"""Models of other programs: Hugging Face's to here and back, GGUF, llama2.c.

    python3 dev/hf.py import gpt2                   # a name on the hub, or a folder: writes models/gpt2
    python3 dev/hf.py export runs/mine mine-hf      # a folder for transformers, of a run's last model
    python3 dev/hf.py gguf runs/mine mine.gguf      # a file for llama.cpp and ollama
    python3 dev/hf.py llama2c stories15M.bin mine.bin

The work is done by dev/eval/import_hf.py, export_hf.py, export_gguf.py and import_llama2c.py.
"""
import argparse
import importlib
import os
import signal
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[1:1] = [HERE, os.path.join(HERE, "data"), os.path.join(HERE, "eval")]
from fetch import Problem                           # noqa: E402
from outputs import guard_terminals                 # noqa: E402

MODULES = {"import": "import_hf", "export": "export_hf", "gguf": "export_gguf", "llama2c": "import_llama2c"}
RUN = "model_*.bin, or the folder of a run (its last model)"


def die(message):
    sys.exit("error: " + message)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        die(f"{message}\nhint: {self.prog} --help")


def arguments():
    parser = Parser(description=__doc__.split("\n", maxsplit=1)[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name, text):
        return commands.add_parser(name, help=text, description=text)

    words = command("import", "a model of transformers as a folder for --model")
    words.add_argument("model", help="a name on Hugging Face's hub, such as gpt2, or a folder")
    words.add_argument("--out", help="folder to write (default: models/NAME)")
    words.add_argument("--revision", help="branch, tag or commit on the hub (default: main)")
    words = command("export", "a trained model as a folder for transformers")
    words.add_argument("model", help=RUN)
    words.add_argument("out", metavar="folder", help="folder to write")
    words.add_argument("--dtype", choices=["fp32", "bf16"], help="type of the weights (default: the file's)")
    words = command("gguf", "a trained model as a file for llama.cpp and ollama")
    words.add_argument("model", help=RUN)
    words.add_argument("out", metavar="file", help="file to write")
    words.add_argument("--type", choices=["f32", "f16", "q8_0"], default="f16",
                       help="type of the matrices (default: f16)")
    words = command("llama2c", "a model file of llama2.c as one of ours")
    words.add_argument("model", help="llama2.c's file, of export version 0")
    words.add_argument("out", help="model file to write")
    return parser.parse_args()


def main():
    guard_terminals()
    for number in (signal.SIGINT, signal.SIGTERM):          # what was begun is removed
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    args = arguments()
    try:
        importlib.import_module(MODULES[args.command]).run(args)
    except Problem as problem:
        die("\nhint: ".join(filter(None, (problem.what, problem.hint))))
    except OSError as e:
        die(f"'{e.filename2 or e.filename or args.out}': {e.strerror}")


if __name__ == "__main__":
    main()
