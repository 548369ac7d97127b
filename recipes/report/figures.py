"""Figures of results: the paper's seven, and scores of any sweep.

    python -m recipes.report.figures
    python -m recipes.report.figures --results runs/sweep --output_dir runs/figures

Without ``--results`` the paper's figures are drawn from the committed results. With it, scores at
the budgets of each sweep below the folders, or over the numbers of examples.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from recipes.common.plots import Panels, logarithmic
from recipes.report.paper_figures import FIGURES, RESULTS


def main(argv: Sequence[str] | None = None) -> None:
    """Draws what there are data for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, nargs="+", default=[], help="folders of sweeps")
    parser.add_argument("--output_dir", type=Path, default=RESULTS / "figures")
    options = parser.parse_args(argv)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    for wanted in () if options.results else FIGURES:
        drawn = wanted.drawn(Path())
        for ending in ("svg", "png"):
            _save(drawn, options.output_dir / f"{wanted.stem}.{ending}")
    paths = [path for folder in options.results for path in sorted(folder.rglob("*.json"))]
    for path in dict.fromkeys(paths):
        found = json.loads(path.read_text(encoding="utf-8"))
        if path.name == "sweep.json":
            name = path.parent.name
            figure, stem = accuracy_against_epsilon(found, name), f"accuracy_against_epsilon-{name}"
            if numbers_of_examples(found):
                figure, stem = accuracy_against_examples(found, name), f"accuracy_against_n-{name}"
        else:
            continue
        _save(figure, options.output_dir / f"{_slug(stem)}.png")


def _save(figure: Figure, path: Path) -> None:
    with rc_context({"svg.hashsalt": "figures"}):  # the same results are the same file
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else {})
    sys.stdout.write(f"{path}\n")


def accuracy_against_epsilon(summary: Mapping[str, Any], name: str) -> Figure:
    """Returns the score that each budget buys (fig:vit_results), by row, a panel for each task.

    What is not private is a line across.
    """
    picture = Panels(list(summary["tasks"]), f"{name}: scores at a budget")
    for panel, rows in zip(picture.axes, summary["tasks"].values(), strict=True):
        for row, found in rows.items():
            scores = {float(budget): tuple(score) for budget, score in found["scores"].items()}
            if float("inf") in scores:
                picture.across(panel, row, scores[float("inf")][0])
            elif scores:
                picture.line(panel, row, scores)
        logarithmic(panel, summary["config"]["final"]["epsilons"])
    return picture.finished("ε", "test score, %")


def numbers_of_examples(summary: Mapping[str, Any]) -> dict[str, int] | None:
    """Returns on how many examples each task trains, if the tasks differ in that."""
    tasks = summary["config"].get("tasks", {"": {}})
    found = {task: settings.get("train_examples") for task, settings in tasks.items()}
    return found if None not in found.values() else None


def accuracy_against_examples(summary: Mapping[str, Any], name: str) -> Figure:
    """Returns the score that N examples buy, a line for each budget and a panel for each row."""
    numbers, by_row = numbers_of_examples(summary) or {}, dict[str, dict[str, Any]]()
    for task, rows in summary["tasks"].items():
        for row, found in rows.items():
            for budget, score in found["scores"].items():
                points = by_row.setdefault(row, {}).setdefault(f"ε = {float(budget):g}", {})
                points[float(numbers[task])] = tuple(score)
    picture = Panels(list(by_row), f"{name}: scores over the number of examples")
    for panel, lines in zip(picture.axes, by_row.values(), strict=True):
        for budget, points in lines.items():
            picture.line(panel, budget, points)
        logarithmic(panel, sorted(numbers.values()))
    return picture.finished("examples", "test score, %")


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9_.]+", "-", text.lower()).strip("-")


if __name__ == "__main__":
    main()
