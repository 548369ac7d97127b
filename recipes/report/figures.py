"""Draw the paper's seven figures (``figures.yaml``) from the committed results.

    python -m recipes.report.figures

They are vectors and PNG, on white, so that they can be read on dark pages too. A panel without
results says that it was not run.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from matplotlib import rc_context
from matplotlib.figure import Figure

from recipes.common.markdown import NOT_RUN, mean_and_error, table
from recipes.common.plots import Lines, Points, draw
from recipes.common.runs import read_lines
from recipes.common.sweep import RUNS
from recipes.paper.sweep import title_of
from recipes.report.tables import read_paper

RESULTS = Path("recipes/paper/results")
GB = 1e9  # bytes, as in the paper
PAPER = "the paper: "

Spec = Mapping[str, Any]
"""A figure of ``figures.yaml``."""
FIGURES: Sequence[Spec] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)


def main() -> None:
    """Draw what there are data for."""
    for wanted in FIGURES:
        for ending in ("svg", "png"):
            _save(drawn(wanted, Path()), RESULTS / "figures" / f"{wanted['stem']}.{ending}")


def _save(figure: Figure, path: Path) -> None:
    with rc_context({"svg.hashsalt": "figures"}):  # the same results are the same file
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else {})
    sys.stdout.write(f"{path}\n")


def _read(path: Path) -> Any:
    """Return what a file says; an empty mapping if it does not exist."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _scores(rows: Mapping[str, Any]) -> Lines:
    found = {row: {float(e): score for e, score in v["scores"].items()} for row, v in rows.items()}
    return {row: points for row, points in found.items() if points}


def drawn(wanted: Spec, root: Path) -> Figure:
    """Return a figure from results below a root, with a mark on cells without a run."""
    panels = PANELS[wanted["panels"]](root / RESULTS, wanted)
    marks = {
        title: wanted.get("mark", "") if _ours(lines) else f"ours: {NOT_RUN}" if lines else NOT_RUN
        for title, lines in panels.items()
    }
    scale = wanted.get("scale", ("linear", "linear"))
    return draw(panels, wanted["title"], wanted["axes"], scale, marks)


def state(wanted: Spec, root: Path) -> str:
    """Return how many panels of a figure have lines of ours."""
    panels = PANELS[wanted["panels"]](root / RESULTS, wanted)
    here = sum(map(_ours, panels.values()))
    said = [f"{here} of {len(panels)} panels", wanted.get("mark")]
    return ", ".join(filter(None, said)) if here else NOT_RUN


def as_markdown(root: Path) -> str:
    """Return a line for each figure of the paper: the picture, and its state."""
    rows = (
        [f"`{f['label']}`", f"[{f['title']}](results/figures/{f['stem']}.svg)", state(f, root)]
        for f in FIGURES
    )
    return table(["The paper's", "What", "State"], rows)


def _ours(lines: Lines) -> bool:
    """Return whether there is a line that is not of the paper's numbers."""
    return any(not label.startswith(PAPER) for label in lines)


def _spectra(folder: Path, wanted: Spec) -> dict[str, Lines]:
    panels: dict[str, Lines] = {}
    for model, name in (("ViT-Base", "vit-*"), ("OPT-1.3B", "opt-*")):
        paths = sorted((folder / "singular_values").glob(f"singular_values-{name}.json"))
        for entries in (_read(path)["spectra"] for path in paths):
            for bound in sorted({entry["C"] for entry in entries} - {None}):
                panels[f"{model}, C = {bound:g}"] = {
                    _noise(entry): _points(dict(enumerate(entry["singular_values"], 1)))
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


def _points(values: Mapping[Any, float]) -> Points:
    return {float(place): (value, None, 1) for place, value in values.items()}


def _vit(folder: Path, wanted: Spec) -> dict[str, Lines]:
    spec, panels = read_paper()["tables"]["vit-full"], dict[str, Lines]()
    ours = _read(folder / "printed_vit" / "sweep.json").get("tasks", {})
    for at, (name, column) in enumerate(spec["columns"].items()):
        printed: dict[str, dict[float, float]] = {}
        for row in spec["rows"]:
            line = printed.setdefault(PAPER + title_of(row["method"]), {})
            line[row["epsilon"]] = row["values"][at]
        lines = {label: _points(values) for label, values in printed.items()}
        panels[name] = lines | dict(_scores(ours.get(column["task"], {})))
    return panels


def _memory(folder: Path, wanted: Spec) -> dict[str, Lines]:
    panels = {}
    for title, (name, *labels) in wanted["lines"].items():
        curves = _read(folder / "memory" / f"{name}.json").get("memory_curves", {})
        panels[title] = {
            label: _points({size: peak / GB for size, peak in curves[label].items()})
            for label in labels
            if label in curves
        }
    return panels


def _rank(folder: Path, wanted: Spec) -> dict[str, Lines]:
    panels: dict[str, dict[str, dict[float, Any]]] = {"SST-2": {}, "SNLI": {}, "TREC": {}}
    for name in ("printed_roberta_rank", "printed_roberta"):
        tasks = _read(folder / name / "sweep.json").get("tasks", {})
        for task, lines in panels.items():
            for title, found in tasks.get(task, {}).items():
                rank = "16" if title == "DP-GRAPE" else title.removeprefix("r = ")
                if rank.isdigit():
                    for epsilon, score in found["scores"].items():
                        lines.setdefault(f"ε = {epsilon}", {})[float(rank)] = score
    return dict(panels)


def _convergence(folder: Path, wanted: Spec) -> dict[str, Lines]:
    lines = {}
    for sweep, row in (("printed_roberta", "DP-GRAPE"), ("printed_roberta_quoted", "DPZero")):
        scores: dict[float, list[float]] = {}
        for line in read_lines(folder / sweep / RUNS):
            if (line["row"], line["task"], line["epsilon"]) == (row, "SST-2", 6.0):
                for point in line["result"]["curve"]:
                    scores.setdefault(float(point["step"]), []).append(point["accuracy"])
        if scores:
            lines[row] = {step: mean_and_error(values) for step, values in scores.items()}
    return {"SST-2, ε = 6": lines}


PANELS: Mapping[str, Callable[[Path, Spec], Mapping[str, Lines]]] = {
    "spectra": _spectra,
    "vit": _vit,
    "memory": _memory,
    "rank": _rank,
    "convergence": _convergence,
}
"""What makes the panels of a figure from the folder of results, by name."""

if __name__ == "__main__":
    main()
