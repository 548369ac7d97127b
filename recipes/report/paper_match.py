"""Tells whether a run is the paper's experiment, a variant of its method, or something else.

What the paper prints, and what a run must have to stand beside it, is in ``paper_tables.yaml``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from dp_grape_hf.arguments import DPGrapeArguments
from dp_grape_hf.ledger import Clipping
from dp_grape_hf.projections import PRINCIPAL
from recipes.paper.methods import METHODS, OPTIONS
from recipes.report.findings import TUNED, ZERO_SHOT, RunResult, title_of

PAPER = Path(__file__).with_name("paper_tables.yaml")
UNKNOWN = "unknown"
"""What the file has for an option that the paper does not tell: every run says what it had."""

PLACED = ("method", "target_epsilon", *TUNED)
"""What says in which row a run belongs, or is shown below it."""

Spec = Mapping[str, Any]
"""A part of the file."""


def read_paper() -> Spec:
    """Returns what the paper prints; each table also has the ``usual`` of all."""
    paper = yaml.safe_load(PAPER.read_text(encoding="utf-8"))
    for spec in paper["tables"].values():
        usual = spec["usual"]
        spec["usual"] = {**usual, "all": paper["usual"] | usual.get("all", {})}
    return paper


def belongs(run: RunResult, spec: Spec) -> bool:
    """Returns whether a run is of the experiment of a table, or stands in for it."""
    return run.family == spec["family"] and run.task in tasks_of(spec)


def tasks_of(spec: Spec) -> list[str]:
    """Returns the tasks of a table, in its order; at the end those that stand in for one."""
    tasks = [column["task"] for column in spec["columns"].values()]
    return list(dict.fromkeys([*tasks, *spec.get("also", ())]))


def column_of(run: RunResult, spec: Spec) -> str | None:
    """Returns the column that a run belongs in, or comes nearest to; None if there is none."""
    return _placed(run, spec)[0]


def unlike(run: RunResult, spec: Spec) -> dict[str, str]:
    """Returns what keeps a run from standing beside the paper's number; nothing if it may."""
    return _placed(run, spec)[1]


def _placed(run: RunResult, spec: Spec) -> tuple[str | None, dict[str, str]]:
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


def _differences(run: RunResult, wanted: Spec) -> dict[str, str]:
    return {
        name: f"{run.facts.get(name)}; the paper: {' or '.join(map(str, _offered(value)))}"
        for name, value in wanted.items()
        if name not in run.silent and run.facts.get(name) not in _offered(value)
    }


def _offered(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def variant(run: RunResult, spec: Spec) -> dict[str, Any]:
    """Returns the options by which a run differs from the method as the paper has it.

    An option that the paper does not tell is one of them, whatever its value. Those that are not
    in the result are not: they are newer than the run, and what it did is their default.
    """
    column = _column(run, spec)
    recorded = {*run.result["script"], *run.result["settings"]}
    silent = {*run.silent, *PLACED, *spec["same"], *column.get("same", {})}
    return {
        name: run.facts.get(name)
        for name, value in _usual(run, spec).items()
        if name in recorded - silent and run.facts.get(name) not in _offered(value)
    }


def _usual(run: RunResult, spec: Spec) -> dict[str, Any]:
    wanted = {f.name: f.default for f in fields(DPGrapeArguments)} | OPTIONS
    # Where a rate is given, and P is random
    wanted |= {"clipping": Clipping.FLAT.value, "projection_rank": 16, "noise": "independent"}
    wanted |= {"projection_update_steps": 100}
    if run.method != ZERO_SHOT:
        row = METHODS[run.method]
        family = "gaussian" if row.projected and row.projection == PRINCIPAL else row.projection
        wanted |= {"update_rule": row.update_rule, "projection": family}
    for level in (spec, _column(run, spec)):
        usual = level.get("usual", {})
        wanted |= usual.get("all", {}) | usual.get(run.method, {})
    return wanted


def _column(run: RunResult, spec: Spec) -> Spec:
    column = column_of(run, spec)
    return {} if column is None else spec["columns"][column]


def reasons(runs: Sequence[RunResult], spec: Spec) -> list[str]:
    """Returns what is not the paper's in some runs, a line for each thing."""
    apart: dict[str, dict[str, None]] = {}
    variants: dict[str, dict[tuple[str, str], dict[str, None]]] = {}  # titles of methods
    for run in runs:
        for name, value in unlike(run, spec).items():
            apart.setdefault(name, {})[value] = None
        for name, value in variant(run, spec).items():
            told = UNKNOWN not in _offered(_usual(run, spec)[name])
            ending = "" if told else " (the paper does not say)"
            titles = variants.setdefault(name, {}).setdefault((str(value), ending), {})
            titles[title_of(run.method)] = None
    for name, values in variants.items():
        for (value, ending), titles in values.items():
            apart.setdefault(name, {})[f"{value} of {', '.join(titles)}{ending}"] = None
    return [f"{name}: {'; '.join(values)}" for name, values in apart.items()]
