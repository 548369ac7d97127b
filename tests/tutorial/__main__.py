"""Run the notebooks of recipes/tutorial, and write into them what they show.

    python -m tests.tutorial
    python -m tests.tutorial --only 3

Needs the extras ``tutorial`` and ``sft``. A notebook takes two or three minutes on one core of a
CPU. What it writes lies in a temporary folder.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import nbformat

from tests.tutorial.notebooks import NOTEBOOKS, PICTURES, execute, load, pictures


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    numbers = [int(path.name[0]) for path in NOTEBOOKS]
    parser.add_argument("--only", type=int, choices=numbers, help="the notebook of this number")
    only = parser.parse_args(argv).only
    PICTURES.mkdir(exist_ok=True)
    for number, path in zip(numbers, NOTEBOOKS, strict=True):
        if only in (None, number):
            start, notebook = time.perf_counter(), load(path)
            with tempfile.TemporaryDirectory() as folder:
                execute(notebook, Path(folder))
            for old in PICTURES.glob(f"{path.stem}_*.png"):
                old.unlink()
            for name, content in pictures(path, notebook):
                (PICTURES / name).write_bytes(content)
            nbformat.write(notebook, path)
            sys.stdout.write(f"{path.name}: {time.perf_counter() - start:.0f} seconds\n")


if __name__ == "__main__":
    main()
