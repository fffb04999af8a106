"""Packages that scripts/setup.sh installs lie in .venv, and not every Python has them. Standard library only.

    try:
        import numpy
    except ImportError:
        take_the_venv()         # starts again with .venv's Python; returns if that cannot help
"""
import os
import sys

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))


def take_the_venv():
    python = os.path.join(ROOT, ".venv", "bin", "python")
    if os.access(python, os.X_OK) and os.path.realpath(sys.prefix) != os.path.realpath(ROOT + "/.venv"):
        os.execv(python, [python] + sys.argv)
