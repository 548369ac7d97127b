"""The paper's figures from our results.

    python -m recipes.report.figures --results runs/results runs/sweep

Scores at the budgets of sweeps, and what ``singular_values`` writes, found below the folders. A
figure is a PNG for each model, whose name is in the title; one that has no data is not drawn, and
named. Of the paper's own curves no numbers are printed.

Lines join runs that differ in nothing but what is on the axis, in what was searched (learning rate
and clipping bound), and in seeds: points are means, with standard errors.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from recipes.common.plots import Panels, logarithmic
from recipes.report.findings import (
    Findings,
    Run,
    collect,
    groups_of,
    is_private,
    lines_of,
    natural,
    partition,
)

Drawing = tuple[str, Figure]
"""The name of a file, without its ending, and what goes into it."""


def main(argv: Sequence[str] | None = None) -> None:
    """Draws what there are data for, and says what there are none for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, nargs="+", required=True, help="folders")
    parser.add_argument("--output_dir", type=Path, default=Path("recipes/paper/results"))
    options = parser.parse_args(argv)
    findings = collect(options.results)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    written: set[Path] = set()
    for name, draw in FIGURES.items():
        before = len(written)
        for stem, figure in draw(findings):
            path = options.output_dir / f"{stem}.png"
            if path in written:
                path = path.with_stem(f"{stem}-{len(written)}")
            figure.savefig(path, dpi=130)
            written.add(path)
            sys.stdout.write(f"{path}\n")
        if len(written) == before:
            sys.stdout.write(f"{name}: not run\n")


# ---- Scores ----


def accuracy_against_epsilon(findings: Findings) -> Iterator[Drawing]:
    """Yields the utility that each budget buys (fig:vit_results), by method, a panel for each task.

    What is not private is a line across.
    """
    for (family, model), runs in _by_model(findings):
        panels = _panels(runs, lambda run: run.task)
        panels = {t: own for t, own in panels.items() if len({r.epsilon for r in own} - {None}) > 1}
        if not panels:
            continue
        picture = Panels(list(panels), f"{model}: scores at a budget")
        for panel, own in zip(picture.axes, panels.values(), strict=True):
            for line in lines_of(groups_of(own), ["target_epsilon"]):
                if is_private(line.groups[0][0].method):
                    scores = {float(g[0].epsilon or 0): g.score() for g in line.groups}
                    picture.line(panel, line.label, scores)
                else:
                    picture.across(panel, line.label, line.groups[0].score()[0])
            logarithmic(panel, [*{run.epsilon for run in own if run.epsilon}])
        deltas = {run.facts["target_delta"] for run in runs if run.epsilon}
        across = "ε, at δ = " + " or ".join(f"{delta:g}" for delta in sorted(deltas))
        figure = picture.finished(across, f"test {_metric(runs)}, %")
        yield _stem("accuracy_against_epsilon", family, model), figure


# ---- Spectra ----


def singular_values(findings: Findings) -> Iterator[Drawing]:
    """Yields singular values of gradients before and after clipping and noise (fig:vit-svals).

    A panel is a bound C; the gradient that is neither clipped nor noised is in all of them.
    """
    for found in findings.spectra:
        entries = found["spectra"]
        plain = [entry for entry in entries if entry["C"] is None]
        bounds = sorted({entry["C"] for entry in entries} - {None})
        script = found["script"]
        model = Path(script["model_name_or_path"]).name
        title = f"{model} on {script['task']}: singular values of the gradient of the first step"
        picture = Panels([f"C = {bound:g}" for bound in bounds], title)
        for panel, bound in zip(picture.axes, bounds, strict=True):
            for entry in [*plain, *(entry for entry in entries if entry["C"] == bound)]:
                values = enumerate(entry["singular_values"], 1)
                points = {float(place): (value, None, 1) for place, value in values}
                picture.line(panel, _noise(entry), points)
            panel.set_yscale("log")
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure = picture.finished("place, from the largest on", "singular value, mean over layers")
        yield _stem("singular_values", model, script["task"]), figure


def _noise(entry: Mapping[str, Any]) -> str:
    if entry["C"] is None:
        return "neither clipped nor noised"
    return rf"$\sigma$ = {entry['sigma']:g}" if entry["sigma"] else "clipped, without noise"


# ---- What the figures share ----


def _by_model(findings: Findings) -> list[tuple[tuple[str, str], list[Run]]]:
    tested = [run for run in findings.runs if "test" in run.result["metrics"]]
    return list(partition(tested, lambda run: (run.family, run.model)).items())


def _panels(runs: Sequence[Run], title: Callable[[Run], str]) -> dict[str, list[Run]]:
    found = partition(runs, title)
    return {name: found[name] for name in sorted(found, key=natural)}


def _metric(runs: Sequence[Run]) -> str:
    """Returns what is measured: accuracy, or on other tasks f1."""
    return " or ".join(dict.fromkeys(next(iter(r.result["metrics"]["test"])) for r in runs))


def _stem(*parts: str) -> str:
    return "-".join(re.sub(r"[^a-z0-9_.]+", "-", part.lower()).strip("-") for part in parts)


FIGURES: Mapping[str, Callable[[Findings], Iterator[Drawing]]] = {
    "accuracy against epsilon": accuracy_against_epsilon,
    "singular values": singular_values,
}


if __name__ == "__main__":
    main()
