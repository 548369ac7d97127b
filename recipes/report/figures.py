"""The paper's figures from our results.

    python -m recipes.report.figures --results runs/results runs/sweep

Scores at the budgets of each sweep, and what ``singular_values`` writes, found below the folders. A
figure that has no data is not drawn. Of the paper's own curves no numbers are printed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from recipes.common.plots import Panels, logarithmic


def main(argv: Sequence[str] | None = None) -> None:
    """Draws what there are data for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, nargs="+", required=True, help="folders")
    parser.add_argument("--output_dir", type=Path, default=Path("recipes/paper/results"))
    options = parser.parse_args(argv)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    paths = [path for folder in options.results for path in sorted(folder.rglob("*.json"))]
    for path in dict.fromkeys(paths):
        found = json.loads(path.read_text(encoding="utf-8"))
        if path.name == "sweep.json":
            name = path.parent.name
            figure, stem = accuracy_against_epsilon(found, name), f"accuracy_against_epsilon-{name}"
            if numbers_of_examples(found):
                figure, stem = accuracy_against_examples(found, name), f"accuracy_against_n-{name}"
        elif "spectra" in found:
            figure, stem = singular_values(found), path.stem
        else:
            continue
        picture = options.output_dir / f"{_slug(stem)}.png"
        figure.savefig(picture, dpi=130)
        sys.stdout.write(f"{picture}\n")


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


def singular_values(found: Mapping[str, Any]) -> Figure:
    """Returns singular values of gradients before and after clipping and noise (fig:vit-svals).

    A panel is a bound C; the gradient that is neither clipped nor noised is in all of them.
    """
    entries, script = found["spectra"], found["script"]
    bounds = sorted({entry["C"] for entry in entries} - {None})
    model = Path(script["model_name_or_path"]).name
    title = f"{model} on {script['task']}: singular values of the gradient of the first step"
    picture = Panels([f"C = {bound:g}" for bound in bounds], title)
    for panel, bound in zip(picture.axes, bounds, strict=True):
        for entry in entries:
            if entry["C"] in (None, bound):
                values = enumerate(entry["singular_values"], 1)
                points = {float(place): (value, None, 1) for place, value in values}
                picture.line(panel, _noise(entry), points)
        panel.set_yscale("log")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    return picture.finished("place, from the largest on", "singular value, mean over layers")


def _noise(entry: Mapping[str, Any]) -> str:
    if entry["C"] is None:
        return "neither clipped nor noised"
    return rf"$\sigma$ = {entry['sigma']:g}" if entry["sigma"] else "clipped, without noise"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9_.]+", "-", text.lower()).strip("-")


if __name__ == "__main__":
    main()
