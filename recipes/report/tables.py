"""The paper's tables with our results next to the paper's, in Markdown.

The paper's numbers are in ``paper_tables.yaml``. Ours are the final runs of the committed sweeps
that have the paper's settings (``SWEEPS``), from folders of the same names in
``recipes/paper/results``. A cell without a run is ``not run``. Runs of other settings are
not among them: the studies show those.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from recipes.common.markdown import (
    BLANK,
    NOT_RUN,
    Score,
    beside,
    budget,
    bullets,
    counted,
    difference,
    headings,
    mean_and_error,
    shown,
    table,
)
from recipes.common.sweep import Sweep, first_score
from recipes.paper import sweep
from recipes.paper.sweep import title_of
from recipes.report.hours import Plan
from recipes.report.tables_gpu import Measured, memory, timings

CONFIGS = Path(sweep.__file__).parent / "configs" / "sweeps"
SWEEPS = (*sorted(CONFIGS.glob("printed_*.yaml")), CONFIGS / "aggzo.yaml")
"""What fills the paper's tables: its own cells, and a method that was published since."""
RANKS = "printed_roberta_rank"
"""Other ranks than those of the tables; of a figure."""
BEST_EPOCH = ", best epoch, chosen on the test data"

FORMULAS = {
    "tab:alg-comp": "a comparison in words; what runs here is in [methods](#methods)",
    "tab:memory-usage-comp": "formulas; `python -m recipes.paper.memory` computes them for a model",
}
"""The tables without measurements."""

Spec = Mapping[str, Any]
"""A part of ``paper_tables.yaml``."""
Runs = Sequence[Mapping[str, Any]]
Cells = Mapping[tuple[str, str, str, float | None], list[Mapping[str, Any]]]
"""Results by method, task, model (where a table has several) and budget; none of planned cells."""


def read_paper() -> Spec:
    """Return what the paper prints."""
    path = Path(__file__).with_name("paper_tables.yaml")
    paper: Spec = yaml.safe_load(path.read_text(encoding="utf-8"))
    return paper


def our_cells(results: Path) -> Cells:
    """Return our runs of the paper's cells, from the folders of the sweeps."""
    found: dict[tuple[str, str, str, float | None], list[Mapping[str, Any]]] = {}
    for path in SWEEPS:
        folder, config = results / path.stem, sweep.read(path)
        made = folder / "sweep.json"
        if made.exists() and json.loads(made.read_text(encoding="utf-8"))["config"] != config:
            raise ValueError(
                f"{folder} has results of another sweep than {path}: they are not the paper's "
                "cells. Move the folder, or run the sweep as it is."
            )
        runs = Sweep(config, folder)
        if path.stem == RANKS:
            continue
        for cell in Plan(config, folder).final():
            found.setdefault(sweep.place_of(cell), [])
        for cell in runs.final():
            if (result := runs.result(cell)) is not None:
                found[sweep.place_of(cell)].append(result)
    return found


def render(ours: Cells, measured: Measured, paper: Spec) -> str:
    """Return all tables."""
    parts = [
        "# The paper's tables, and ours\n\nRendered by `make tables`. Ours are means ± standard "
        "errors over runs, whose number is in brackets, and how far they are above the paper's; "
        "one run has no error. No ε covers what was chosen on a dev split.\n",
    ]
    for name, spec in paper["tables"].items():
        parts += [scores(spec, ours), settings(spec, ours, paper["settings"][name])]
    return "\n".join([*parts, timings(measured, paper), memory(measured, paper)])


def places_of(spec: Spec) -> list[tuple[str, str]]:
    """Return the task and the model of each column."""
    return [(column["task"], column.get("model", "")) for column in spec["columns"].values()]


def scores(spec: Spec, ours: Cells) -> str:
    """Return a table of the paper, with our runs of the same cells next to it."""
    places, nothing = places_of(spec), [None] * len(spec["columns"])
    printed = {(line["method"], line.get("epsilon")): line["values"] for line in spec["rows"]}
    own = {place: runs for place, runs in ours.items() if place[1:3] in places}
    for name, _, _, epsilon in own:
        printed.setdefault((name, epsilon), nothing)  # behind the paper's own
    lines = []
    for (name, epsilon), values in printed.items():
        runs = [own.get((name, *place, epsilon), []) for place in places]
        found = [_mean(some, lambda result: first_score(result, "test")) for some in runs]
        cells = [
            shown(mean, NOT_RUN) + difference(value, mean)
            for value, mean in zip(values, found, strict=True)
        ]
        theirs = [shown(value) for value in values]
        lines.append([title_of(name), budget(epsilon), *beside(theirs, cells)])
        if spec.get("best_epoch") and any(runs):
            best = [shown(_mean(some, _best), NOT_RUN) for some in runs]
            blank = [BLANK] * len(best)
            lines.append([title_of(name) + BEST_EPOCH, budget(epsilon), *beside(blank, best)])
    text = table(["Method", "ε", *headings(list(spec["columns"]))], lines)
    notes = bullets([*spec["notes"], *origin([run for runs in own.values() for run in runs])])
    return f"## {spec['title']}\n\nThe paper's `{spec['label']}`.\n\n{text}\n{notes}"


def _mean(runs: Runs, score: Callable[[Mapping[str, Any]], float]) -> Score | None:
    return mean_and_error([score(result) for result in runs]) if runs else None


def _best(result: Mapping[str, Any]) -> float:
    """Return the best score of a run, its last or one of its curve: the step is chosen by it."""
    metric = next(iter(result["metrics"]["test"]))
    return max(first_score(result, "test"), *(point[metric] for point in result["curve"]), 0.0)


def origin(runs: Runs) -> list[str]:
    """Return the origin of results, and their remarks."""
    if not runs:
        return []
    seeds = _listed(result["settings"]["seed"] for result in runs)
    facts = {
        "Ours": f"{counted(len(runs), 'run')} with the seeds {seeds}",
        "on": _listed(result["device"] for result in runs),
        "torch": _listed(result["versions"]["torch"] for result in runs),
        "transformers": _listed(result["versions"]["transformers"] for result in runs),
        "code": _listed(result["git_commit"] or "outside git" for result in runs),
    }
    said = dict.fromkeys(note for result in runs for note in result["notes"])
    return ["; ".join(f"{name} {value}" for name, value in facts.items()) + ".", *said]


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(str(value) for value in sorted({*values}))


def settings(spec: Spec, ours: Cells, chosen: Spec) -> str:
    """Return the clipping bounds and learning rates of a table, the paper's and ours."""
    lines = []
    for line in chosen["rows"]:
        method, name, cells = line["method"], line["setting"], []
        for place in places_of(spec):
            runs = [r for key, some in ours.items() for r in some if key[:3] == (method, *place)]
            found = sorted({result["settings"][name] for result in runs})
            cells.append(" / ".join(f"{value:g}" for value in found) or NOT_RUN)
        theirs = ["n/a" if value is None else f"{value:g}" for value in line["values"]]
        lines.append([title_of(method), name, *beside(theirs, cells)])
    found = table(["Method", "Setting", *headings(list(spec["columns"]))], lines)
    return f"Settings behind it; the paper's are of: {chosen['label']}.\n\n{found}"


def state(ours: Cells, measured: Measured, paper: Spec) -> str:
    """Returns a line for each table of the paper: how many of its numbers we have, too."""
    rows = [[f"`{label}`", BLANK, said] for label, said in FORMULAS.items()]
    for name, spec in paper["tables"].items():
        places = places_of(spec)
        wanted = {(r["method"], *p, r.get("epsilon")) for r, p in product(spec["rows"], places)}
        found = sum(bool(ours.get(place)) for place in wanted)
        cells = f"{NOT_RUN}: " * (not found) + f"{found} of {len(wanted)} cells"
        rows.append([f"`{spec['label']}`", spec["title"], cells])
        label = paper["settings"][name]["label"]
        if label.startswith("tab:"):
            rows.append([f"`{label}`", "settings behind it", "in the printed sweeps"])
    for label in dict.fromkeys(spec["label"] for spec in paper["timings"]):
        own = [
            measured.step(spec, line["method"])
            for spec in paper["timings"]
            for line in spec["rows"]
            if spec["label"] == label
        ]
        here = sum(map(bool, own))
        rows.append([f"`{label}`", "throughput and hours", f"{here} of {len(own)} rows measured"])
    unique = {row[0]: row for row in rows}
    return table(["The paper's", "What", "State"], unique.values())
