"""Run the notebooks of the tutorial, and make of what they show what is committed."""

import ast
import base64
import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

_ROOT = Path(__file__).parents[2]
FOLDER = _ROOT / "recipes" / "tutorial"
NOTEBOOKS = tuple(sorted(FOLDER.glob("[0-9]_*.ipynb")))
PICTURES = FOLDER / "pictures"
_PATIENCE = 600  # seconds for a cell, on a machine that is busy


def load(path):
    return nbformat.read(path, as_version=4)


def execute(notebook, folder):
    """Runs all cells in a folder, which takes what they write, and keeps their tidied outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
        ValueError: an output names the folder or this clone, which mean nothing elsewhere.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    # A kernel starts in the folder, from where neither `recipes` nor `dp-grape` would be found.
    env = os.environ | {"PYTHONPATH": str(_ROOT), "PATH": path, "HF_HUB_OFFLINE": "1"}
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=_PATIENCE, resources=resources).execute(env=env)
    for cell in code_cells(notebook):
        cell.outputs = _tidied(cell.outputs)
        cell.metadata.pop("execution", None)  # when it ran
    notebook.metadata.pop("language_info", None)  # the version of Python that ran it
    for place in (folder.resolve(), _ROOT):
        if str(place) in nbformat.writes(notebook):
            raise ValueError(f"An output names a path of this machine: {place}")


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _tidied(outputs):
    """Returns outputs without what libraries say on stderr, and with a stream in one piece."""
    kept = []
    for output in outputs:
        if output.output_type == "stream":
            if output.name == "stderr":
                continue
            if kept and kept[-1].output_type == "stream":
                kept[-1].text += output.text
                continue
        kept.append(output)
    return kept


def found(notebook):
    (output,) = code_cells(notebook)[-1].outputs
    return ast.literal_eval(output.data["text/plain"])


def text_of(notebook):
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return "".join(output.text for output in outputs if output.output_type == "stream")


def pictures(path, notebook):
    """Yields name and content of each picture that a notebook shows, in order."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    shown = [data["image/png"] for o in outputs if "image/png" in (data := o.get("data", {}))]
    for number, content in enumerate(shown, start=1):
        yield f"{path.stem}_{number}.png", base64.b64decode(content)
