"""Finds the results of experiments below folders, and tells which runs repeat each other.

A result counts if it is one of a sweep's final runs, or lies outside sweeps. The runs that a sweep
chose its settings from do not: they were looked at. Runs of a sweep that differ in nothing but the
seed, and others that differ in that and in what only a machine notices, repeat each other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from recipes.common.markdown import Score, mean_and_error
from recipes.common.sweep import Sweep, first_score
from recipes.paper.methods import METHODS, OPTIONS, ZEROTH_ORDER

T = TypeVar("T")

ZERO_SHOT = "zero_shot"
TUNED = ("learning_rate", "max_grad_norm")
"""What searches choose: it may vary along a line of a table."""

MACHINE = frozenset(
    {
        *("per_device_train_batch_size", "world_size", "gradient_checkpointing", "engine"),
        "grad_sample_mode",
        *("eval_data_is_public", "save_as"),
        *("result_dir", "selection_runs", "curve_steps", "config", ZERO_SHOT),
    }
)
"""What has no influence on a score but that of rounding, or says nothing of how it came about."""

PROJECTION = frozenset(
    {
        *("projection", "projection_rank", "projection_update_steps"),
        *("optim_target_modules", "public_dataset"),
    }
)
ADAPTER = frozenset({"lora_rank", "lora_init"})
DIRECTIONS = frozenset(OPTIONS)
"""What means nothing without projections, adapters or random directions."""

PRIVACY = frozenset(
    {
        *("target_epsilon", "target_delta", "accountant", "adjacency", "max_grad_norm"),
        *("noise_multiplier", "gradient_factors"),
    }
)
"""What means nothing without privacy."""


@dataclass(frozen=True, eq=False)
class RunResult:
    """One result of an experiment.

    Args:
        result: what the recipe wrote.
        row: the name that its sweep has for it, if any.
        cell: what the sweep ran, but for the seed.
    """

    result: Mapping[str, Any]
    row: str = ""
    cell: str = ""

    @property
    def family(self) -> str:
        """The name of the recipe."""
        return str(self.result["family"])

    @property
    def task(self) -> str:
        """The name of the task."""
        return str(self.result["script"]["task"])

    @property
    def model(self) -> str:
        """The last part of the model's name or path."""
        return Path(self.result["script"]["model_name_or_path"]).name

    @property
    def method(self) -> str:
        """A name in ``METHODS``, or ``zero_shot``."""
        if self.result["script"][ZERO_SHOT]:
            return ZERO_SHOT
        return str(self.result["settings"]["method"])

    @property
    def epsilon(self) -> float | None:
        """The budget, or what was spent if none was given; None of what is not private."""
        if not is_private(self.method):
            return None
        asked = self.result["settings"]["target_epsilon"]
        return float(asked or round(self.result["privacy"]["epsilon"], 2))

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.result["settings"]["seed"])

    @cached_property
    def silent(self) -> frozenset[str]:
        """The names of options that the score does not depend on, or on their seed alone."""
        script, settings = self.result["script"], self.result["settings"]
        seeds = {name for name in (*script, *settings) if name.endswith("seed")}
        if self.method == ZERO_SHOT:
            return MACHINE | seeds | settings.keys() | ADAPTER | {"frozen"}
        row, silent = METHODS[self.method], MACHINE | seeds
        silent |= frozenset() if row.private else PRIVACY
        silent |= frozenset() if row.projected else PROJECTION
        silent |= frozenset() if self.method in ZEROTH_ORDER else DIRECTIONS
        return silent | (frozenset() if row.adapter else ADAPTER)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What the score depends on, but for the seed."""
        script, settings = self.result["script"], self.result["settings"]
        data = script["dataset_path"]
        found = {
            **script,
            **settings,
            "family": self.family,
            "model_name_or_path": self.model,
            "dataset_path": None if data is None else Path(data).name,
            "examples": [self.result["splits"].get(split) for split in ("train", "test")],
        }
        silent = self.silent
        found = {k: v for k, v in found.items() if v is not None and k not in silent}
        return found | {"method": self.method}


class Group(tuple[RunResult, ...]):
    """Runs that repeat each other."""

    __slots__ = ()

    def score(self, split: str = "test") -> Score:
        """Returns the mean, its standard error and the number of runs."""
        return mean_and_error([first_score(run.result, split) for run in self])

    def best(self) -> Score | None:
        """Returns the same of the best score of a run, its last or one of its curve.

        None if a run has no curve. It is biased: whatever the curve scores has chosen the step.
        """
        scores = []
        for run in self:
            metric, points = next(iter(run.result["metrics"]["test"])), run.result["curve"]
            if not points:
                return None
            last = first_score(run.result, "test")
            scores.append(max(last, *(point[metric] for point in points)))
        return mean_and_error(scores)


@dataclass(frozen=True)
class Line:
    """Groups that belong together, with a name: a line of a table."""

    label: str
    groups: tuple[Group, ...]


@dataclass
class Findings:
    """What was found below some folders.

    Args:
        runs: the results of experiments, each once.
        reports: rows of ``gpu_report``, by path.
        curves: simulated peaks in bytes, by model, method and batch size.
    """

    runs: list[RunResult] = field(default_factory=list)
    reports: dict[Path, list[dict[str, Any]]] = field(default_factory=dict)
    curves: dict[str, Mapping[str, Mapping[str, int]]] = field(default_factory=dict)


def is_private(method: str) -> bool:
    """Returns whether a method has a budget."""
    return method != ZERO_SHOT and METHODS[method].private


def title_of(method: str) -> str:
    """Returns what people call a method."""
    if method == ZERO_SHOT:
        return "Zero-shot"
    title = METHODS[method].title
    return title if METHODS[method].private else f"{title} (non-private)"


# ---- Files ----


def collect(folders: Iterable[Path]) -> Findings:
    """Returns what lies below folders; what is no result is passed over.

    Raises:
        FileNotFoundError: if there is no such folder.
        ValueError: if a file is no JSON.
    """
    findings = Findings()
    runs: dict[str, RunResult] = {}
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"--results {folder} is no folder.")
        sweeps = {path.parent: _load(path) for path in sorted(folder.rglob("sweep.json"))}
        for where, summary in sweeps.items():
            for run in _final_runs(where, summary):
                runs[_key(run.result)] = run  # before the same file is found as one of its own
        for path in sorted(folder.rglob("*.json")):
            if sweeps.keys() & {*path.parents}:
                continue
            found = _load(path)
            if isinstance(found, list) and found and "precision" in found[0]:
                findings.reports[path] = found
            if not isinstance(found, dict):
                continue
            if "memory_curves" in found:
                findings.curves[found["model"]] = found["memory_curves"]
            if {"family", "script", "settings", "metrics"} <= found.keys():
                runs.setdefault(_key(found), RunResult(found))
    findings.runs = list(runs.values())
    return findings


def _final_runs(folder: Path, summary: Mapping[str, Any]) -> Iterator[RunResult]:
    sweep = Sweep(summary["config"], folder)
    for cell in sweep.final():
        result = sweep.result(cell)
        if result is not None:
            yield RunResult(result, cell.row, _key(cell.entry() | {"seed": None}))


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}. Move it, or make it again.") from error


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


# ---- Order among runs ----


def groups_of(runs: Iterable[RunResult]) -> list[Group]:
    """Returns the runs, those together that repeat each other."""
    found = partition(runs, lambda run: run.cell or _key(run.facts))
    return [Group(sorted(own, key=lambda run: run.seed)) for own in found.values()]


def lines_of(groups: Sequence[Group], along: Sequence[str]) -> list[Line]:
    """Returns the groups as lines, none of which has two groups at the same place.

    Args:
        groups: what is to be shown together.
        along: the facts that vary along a line, as a task does, and others with it. Neither they
            nor what was tuned make another line, unless nothing else tells two groups apart.
    """
    lines = []
    for label, own in partition(groups, lambda g: g[0].row or title_of(g[0].method)).items():
        places = partition(own, lambda group: _values(group, along)).values()
        names = dict.fromkeys(n for same in places for n in _differing(same, {*along, *TUNED}))
        found = partition(own, lambda group, names=names: _values(group, names)).values()
        if any(len({_values(group, along) for group in line}) < len(line) for line in found):
            tuned = [n for same in places for n in _differing(same, along) if n in TUNED]
            names |= dict.fromkeys(tuned)
            found = partition(own, lambda group, names=names: _values(group, names)).values()
        for line in found:
            parts = [f"{name} = {line[0][0].facts.get(name)}" for name in names]
            lines.append(Line(", ".join([label, *parts]), tuple(line)))
    return sorted(lines, key=lambda line: line.label)


def _values(group: Group, names: Iterable[str]) -> str:
    return _key([group[0].facts.get(name) for name in names])


def _differing(groups: Sequence[Group], ignoring: Container[str]) -> list[str]:
    """Returns the names of the facts that are not the same in all groups."""
    names = dict.fromkeys(name for group in groups for name in group[0].facts)
    return [
        name
        for name in names
        if name not in ignoring and len({_values(group, [name]) for group in groups}) > 1
    ]


def partition(items: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """Returns what is to be grouped by what a function says of each, in order of appearance."""
    found: dict[Any, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found
