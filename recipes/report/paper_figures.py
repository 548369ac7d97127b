"""The paper's seven figures, from the committed results; what has none is marked as not run.

``recipes.report.figures`` without ``--results`` draws them, as vectors and as PNG, on white,
so that they can be read on dark pages, too. Memory is simulated, and marked as such.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from recipes.common.markdown import NOT_RUN, Score, mean_and_error, table
from recipes.common.plots import Panels, Points, logarithmic
from recipes.common.runs import read_lines
from recipes.common.sweep import RUNS
from recipes.paper.sweep import title_of
from recipes.report.tables import read_paper

RESULTS = Path("recipes/paper/results")
SIMULATED = "simulated"
GB = 1e9  # bytes, as in the paper

Lines = Mapping[str, Points]
"""What a panel shows, by the label of the line."""


@dataclass(frozen=True)
class Wanted:
    """A figure of the paper.

    Args:
        label: the paper's.
        stem: of the name of the picture.
        title: what it shows.
        axes: the names of the axes.
        panels: the lines of each panel, by its title, from the folder of results.
        scale: of the axes, of matplotlib's names.
        mark: what is said across panels that have lines.
    """

    label: str
    stem: str
    title: str
    axes: tuple[str, str]
    panels: Callable[[Path], Mapping[str, Lines]]
    scale: tuple[str, str] = ("linear", "linear")
    mark: str = ""

    def drawn(self, root: Path) -> Figure:
        """Returns the picture from results below a root, with a mark on empty panels."""
        found = self.panels(root / RESULTS)
        picture = Panels([*found], self.title)
        for panel, lines in zip(picture.axes, found.values(), strict=True):
            for label, points in lines.items():
                picture.line(panel, label, points)
            if not lines:
                panel.set_xticks([])
                panel.set_yticks([])
            ours = self.mark if _ours(lines) else f"ours: {NOT_RUN}"
            picture.mark(panel, ours if lines else NOT_RUN)
            places = sorted({place for points in lines.values() for place in points})
            if self.scale[0] == "log" and places:
                logarithmic(panel, places)
            if lines:
                panel.set_yscale(self.scale[1])
        return picture.finished(*self.axes)

    def state(self, root: Path) -> str:
        """Returns how many panels have lines of ours."""
        found = self.panels(root / RESULTS)
        here = sum(map(_ours, found.values()))
        said = f"{here} of {len(found)} panels"
        return f"{said}, {self.mark}" if self.mark and here else said if here else NOT_RUN


def as_markdown(root: Path) -> str:
    """Returns a line for each figure of the paper: the picture, and its state."""
    rows = (
        [
            f"`{found.label}`",
            f"[{found.title}](results/figures/{found.stem}.svg)",
            found.state(root),
        ]
        for found in FIGURES
    )
    return table(["The paper's", "What", "State"], rows)


# ---- What is shown ----

PAPER = "the paper: "


def _ours(lines: Lines) -> bool:
    """Returns whether there is a line that is not of the paper's numbers."""
    return any(not label.startswith(PAPER) for label in lines)


def _sweep(folder: Path, name: str) -> dict[str, Any]:
    """Returns the scores of a sweep by task, row and budget; nothing where it was not run."""
    path = folder / name / "sweep.json"
    return json.loads(path.read_text(encoding="utf-8"))["tasks"] if path.exists() else {}


def _spectra(folder: Path) -> dict[str, Lines]:
    panels: dict[str, dict[str, Points]] = {}
    for model, name in (("ViT-Base", "vit-*"), ("OPT-1.3B", "opt-*")):
        paths = sorted((folder / "singular_values").glob(f"singular_values-{name}.json"))
        for path in paths:
            entries = json.loads(path.read_text(encoding="utf-8"))["spectra"]
            for bound in sorted({entry["C"] for entry in entries} - {None}):
                panels[f"{model}, C = {bound:g}"] = {
                    _noise(entry): _places(entry["singular_values"])
                    for entry in entries
                    if entry["C"] in (None, bound)
                }
        if not paths:
            panels[model] = {}
    return panels


def _noise(entry: Mapping[str, Any]) -> str:
    if entry["C"] is None:
        return "neither clipped nor noised"
    return rf"$\sigma$ = {entry['sigma']:g}" if entry["sigma"] else "clipped, without noise"


def _places(values: Sequence[float]) -> Points:
    return {float(place): (value, None, 1) for place, value in enumerate(values, 1)}


def _vit(folder: Path) -> dict[str, Lines]:
    spec, ours = read_paper()["tables"]["vit-full"], _sweep(folder, "printed_vit")
    panels: dict[str, dict[str, dict[float, Score]]] = {}
    for at, (name, column) in enumerate(spec["columns"].items()):
        lines = panels.setdefault(name, {})
        for row in spec["rows"]:
            line = lines.setdefault(PAPER + title_of(row["method"]), {})
            line[row["epsilon"]] = row["values"][at], None, 1
        for title, found in ours.get(column["task"], {}).items():
            lines[title] = {float(e): tuple(score) for e, score in found["scores"].items()}
    return panels


def _memory(*wanted: tuple[str, str, tuple[str, ...]]) -> Callable[[Path], dict[str, Lines]]:
    """Returns what makes a panel for each (title, file, labels) of simulated curves."""

    def panels(folder: Path) -> dict[str, Lines]:
        found = {}
        for title, name, labels in wanted:
            path = folder / "memory" / f"{name}.json"
            curves = json.loads(path.read_text())["memory_curves"] if path.exists() else {}
            found[title] = {
                label: {float(size): (peak / GB, None, 1) for size, peak in curves[label].items()}
                for label in labels
                if label in curves
            }
        return found

    return panels


def _rank(folder: Path) -> dict[str, Lines]:
    panels: dict[str, dict[str, dict[float, Score]]] = {"SST-2": {}, "SNLI": {}, "TREC": {}}
    sweeps = _sweep(folder, "printed_roberta_rank"), _sweep(folder, "printed_roberta")
    for task, lines in panels.items():
        for rows in (sweep.get(task, {}) for sweep in sweeps):
            for title, found in rows.items():
                rank = title.removeprefix("r = ") if title.startswith("r = ") else "16"
                if title == "DP-GRAPE" or rank != "16":
                    for epsilon, score in found["scores"].items():
                        lines.setdefault(f"ε = {epsilon}", {})[float(rank)] = tuple(score)
    return panels


def _convergence(folder: Path) -> dict[str, Lines]:
    lines: dict[str, Points] = {}
    for sweep, row in (("printed_roberta", "DP-GRAPE"), ("printed_roberta_quoted", "DPZero")):
        scores: dict[float, list[float]] = {}
        for step, score in _curves(folder / sweep / RUNS, row):
            scores.setdefault(step, []).append(score)
        if scores:
            lines[row] = {step: mean_and_error(values) for step, values in scores.items()}
    return {"SST-2, ε = 6": lines}


def _curves(path: Path, row: str) -> Iterator[tuple[float, float]]:
    for line in read_lines(path):
        if (line["row"], line["task"], line["epsilon"]) == (row, "SST-2", 6.0):
            for point in line["result"]["curve"]:
                yield float(point["step"]), float(point["accuracy"])


_STEP = ("examples at once", "peak memory, GB")
_OTHERS = ("AdamW", "DP-Adam, materialised", "DPZero")
FIGURES = (
    Wanted(
        "fig:vit-svals",
        "singular_values",
        "Singular values of the gradient of the first step",
        ("place, from the largest on", "singular value, mean over layers"),
        _spectra,
        ("linear", "log"),
    ),
    Wanted(
        "fig:vit_results, accuracy",
        "vit_accuracy",
        "ViT-Base from random weights: accuracy at a budget",
        ("ε", "test accuracy, %"),
        _vit,
        ("log", "linear"),
    ),
    Wanted(
        "fig:vit_results, memory",
        "vit_memory",
        "ViT-Base: memory of a step",
        _STEP,
        _memory(("ViT-Base", "vit-base", (*_OTHERS[:2], "DP-GRAPE, r = 64"))),
        mark=SIMULATED,
    ),
    Wanted(
        "fig:roberta-opt-memory-usage",
        "roberta_opt_memory",
        "RoBERTa-large and OPT: memory of a step",
        _STEP,
        _memory(
            ("RoBERTa-large, 128 tokens", "roberta-large", (*_OTHERS, "DP-GRAPE, r = 16")),
            ("OPT-1.3B, 512 tokens", "opt-1.3b", (*_OTHERS, "DP-GRAPE, r = 16")),
            ("OPT-2.7B, 512 tokens", "opt-2.7b", (*_OTHERS, "DP-GRAPE, r = 32")),
            ("OPT-6.7B, 512 tokens", "opt-6.7b", (*_OTHERS, "DP-GRAPE, r = 64")),
        ),
        mark=SIMULATED,
    ),
    Wanted(
        "fig:roberta-memory-varied-r",
        "roberta_memory_rank",
        "RoBERTa-large: memory of a step by rank",
        _STEP,
        _memory(
            (
                "RoBERTa-large, 128 tokens",
                "roberta-large",
                (*_OTHERS, *(f"DP-GRAPE, r = {rank}" for rank in (4, 16, 64, 256))),
            )
        ),
        mark=SIMULATED,
    ),
    Wanted(
        "fig:roberta-r-ablation",
        "roberta_rank",
        "RoBERTa-large: accuracy by rank",
        ("rank r", "test accuracy, %"),
        _rank,
        ("log", "linear"),
    ),
    Wanted(
        "fig:roberta-convergence",
        "roberta_convergence",
        "RoBERTa-large: accuracy on the dev split while training",
        ("step", "dev accuracy, %"),
        _convergence,
    ),
)
"""The seven figures; the paper's fig:vit_results has two."""
