"""How much of the paper was reproduced: its tables and figures, and stand-ins on small models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from recipes.common.markdown import BLANK, NOT_RUN, Score, budget, score_text, table
from recipes.report.tables import Cells, places_of
from recipes.report.tables_gpu import Measured, Spec

FORMULAS = {
    "tab:alg-comp": "a comparison in words; what runs here is in [methods](#methods)",
    "tab:memory-usage-comp": "formulas; `python -m recipes.paper.memory` computes them for a model",
}
"""The tables without measurements."""

SHOWN: Mapping[str, Any] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)
TODAY: Sequence[str] = SHOWN["today"]
Summaries = Callable[[str], Mapping[str, Any]]
"""Returns the summary of a sweep of the studies, by its name."""


def of_tables(ours: Cells, measured: Measured, paper: Spec) -> str:
    """Returns a line for each table of the paper: how many of its numbers we have, too."""
    rows = [[f"`{label}`", BLANK, said] for label, said in FORMULAS.items()]
    for name, spec in paper["tables"].items():
        places = places_of(spec)
        wanted = {(r["method"], *p, r.get("epsilon")) for r, p in product(spec["rows"], places)}
        found = len(wanted & ours.keys())
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


def of_nothing_set(summaries: Summaries, digits: Sequence[Mapping[str, Any]]) -> str:
    """Return the scores with nothing searched, before and today, by task and budget.

    Args:
        summaries: of the studies.
        digits: the records of ``recipes.digits.compare``, before and today.
    """
    rows = []
    for task, sweeps in SHOWN["before"].items():
        cells = []
        for epsilon, names in product(("2", "8"), (sweeps, TODAY)):
            cells.append(score_text(_most(summaries, names, task, ("DP-GRAPE",), epsilon)))
        rows.append([task, *cells])
    cells = []
    for epsilon, record in product(("2", "8"), digits):
        found = record["rows"]["DP-GRAPE, nothing searched"]["accuracy"].get(epsilon)
        seeds = len(record["config"]["seeds"])
        cells.append(score_text(found and (100 * found[0], 100 * found[1], seeds)))
    rows.append(["digits", *cells])
    titles = [f"ε = {epsilon}, {when}" for epsilon in (2, 8) for when in ("before", "today")]
    return table(["Task", *titles], rows)


def of_stand_ins(summaries: Summaries) -> str:
    """Returns the scores of all-MiniLM-L6-v2 at the paper's budgets, by task.

    Where several sweeps have a cell, it shows the one with the most seeds.

    Args:
        summaries: of the studies.
    """
    rows, spec = [], SHOWN["stand_ins"]
    for task, chosen in spec["ours"].items():
        for epsilon in (2, 6):
            cells = []
            for title, names in spec["columns"].items():
                sweeps = chosen if title.startswith("ours") else spec["searched"][task]
                sweeps = sweeps + chosen * title.startswith("DP-")
                sweeps = sweeps + spec["presets"] * title.startswith("P of")
                sweeps = sweeps + spec["plain"] * (title == "AdamW")
                key = "inf" if title == "AdamW" else f"{epsilon}"
                cells.append(score_text(_most(summaries, sweeps, task, names, key)))
            rows.append([task, budget(epsilon), *cells])
    return table(["Task", "ε", *spec["columns"]], rows)


def _most(
    summaries: Summaries,
    sweeps: Iterable[str],
    task: str,
    names: Iterable[str],
    budget: str,
) -> Score | None:
    """Return the score with the most seeds of those that some sweeps have; None without one."""
    scores = [
        summaries(sweep)["tasks"].get(task, {}).get(name, {}).get("scores", {}).get(budget)
        for sweep, name in product(sweeps, names)
    ]
    return max(filter(None, scores), key=lambda score: score[-1], default=None)
