"""Tells whether a run is the paper's experiment, a variant of its method, or something else.

What the paper prints, and what a run must have to stand beside it, is in ``paper_tables.yaml``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from dp_grape_hf import METHODS
from dp_grape_hf.arguments import DPGrapeArguments
from recipes.findings import MACHINE, PRIVACY, TUNED, ZERO_SHOT, Run, is_private, title_of

PAPER = Path(__file__).with_name("paper_tables.yaml")

Spec = Mapping[str, Any]
"""A part of the file."""


def read_paper() -> Spec:
    """Returns what the paper prints; each table also has the ``usual`` of all."""
    paper = yaml.safe_load(PAPER.read_text(encoding="utf-8"))
    for spec in paper["tables"].values():
        spec["usual"] = {"all": paper["usual"], **spec["usual"]}
    return paper


def belongs(run: Run, spec: Spec) -> bool:
    """Returns whether a run is of the experiment of a table, or stands in for it."""
    return run.family == spec["family"] and run.task in tasks_of(spec)


def tasks_of(spec: Spec) -> list[str]:
    """Returns the tasks of a table, in its order; at the end those that stand in for one."""
    tasks = [column["task"] for column in spec["columns"].values()]
    return list(dict.fromkeys([*tasks, *spec.get("also", ())]))


def column_of(run: Run, spec: Spec) -> str | None:
    """Returns the column that a run belongs in, or comes nearest to; None if there is none."""
    return _placed(run, spec)[0]


def unlike(run: Run, spec: Spec) -> dict[str, str]:
    """Returns what keeps a run from standing beside the paper's number; nothing if it may."""
    return _placed(run, spec)[1]


def _placed(run: Run, spec: Spec) -> tuple[str | None, dict[str, str]]:
    found: list[tuple[str, dict[str, str]]] = []
    for name, column in spec["columns"].items():
        if column["task"] == run.task:
            apart = _differences(run, {**spec["same"], **column.get("same", {})})
            for split, size in column["sizes"].items():
                ours = run.result["splits"].get(split)
                if ours != size:
                    apart[f"{split} examples of {run.task}"] = f"{ours}; the paper: {size}"
            found.append((name, apart))
    if not found:
        return None, {"task": f"{run.task}; the paper does not have it"}
    return min(found, key=lambda item: len(item[1]))


def _differences(run: Run, wanted: Spec) -> dict[str, str]:
    silent = set() if is_private(run.method) else set(PRIVACY)
    if run.method == ZERO_SHOT:
        silent |= wanted.keys() - run.result["script"].keys()
    return {
        name: f"{run.facts.get(name)}; the paper: {' or '.join(map(str, _offered(value)))}"
        for name, value in wanted.items()
        if name not in silent and run.facts.get(name) not in _offered(value)
    }


def _offered(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def variant(run: Run, spec: Spec) -> dict[str, Any]:
    """Returns the options by which a run differs from the method as the paper has it."""
    if run.method == ZERO_SHOT:
        return {}
    row, column = METHODS[run.method], column_of(run, spec)
    wanted = {f.name: f.default for f in fields(DPGrapeArguments)}
    wanted |= {"update_rule": row.update_rule, "projection": row.projection}
    levels: Sequence[Spec] = (spec, {} if column is None else spec["columns"][column])
    for level in levels:
        usual = level.get("usual", {})
        wanted |= usual.get("all", {}) | usual.get(run.method, {})
    silent = {*MACHINE, *PRIVACY, *TUNED, *spec["same"], "method"}
    return {
        name: run.facts[name]
        for name, value in wanted.items()
        if name in run.facts and name not in silent and run.facts[name] not in _offered(value)
    }


def reasons(runs: Sequence[Run], spec: Spec) -> list[str]:
    """Returns what is not the paper's in some runs, a line for each thing."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        for name, value in unlike(run, spec).items():
            found.setdefault(name, {})[value] = None
        for name, value in variant(run, spec).items():
            found.setdefault(name, {})[f"{value} of {title_of(run.method)}"] = None
    return [f"{name}: {', '.join(values)}" for name, values in found.items()]
