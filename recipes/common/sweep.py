"""A grid of settings, tasks, budgets and seeds, each run once, that goes on where it stopped.

For each task and row all combinations of the row's grid are run at the budget and with the seed of
the search; the one with the best score on the dev split is run at every budget with every seed. A
row without a grid is run as it is.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from threading import Lock
from typing import Any

from tqdm import tqdm

from recipes.common.markdown import mean_and_error
from recipes.common.runs import append_line, read_lines
from recipes.paper.methods import METHODS

RUNS = "runs.jsonl"


@dataclass(frozen=True)
class Cell:
    """One run: a row on a task, at a budget (None: not private), with a seed and settings."""

    row: str
    task: str
    epsilon: float | None
    seed: int
    settings: tuple[tuple[str, Any], ...]
    selection_runs: int = 0

    @property
    def key(self) -> str:
        """What tells runs of one sweep apart: all but how many runs the settings cost."""
        return _key(self.entry())

    def entry(self) -> dict[str, Any]:
        """Returns the line of the run, but for its result."""
        return {
            "row": self.row,
            "task": self.task,
            "epsilon": None if self.epsilon is None else float(self.epsilon),
            "seed": self.seed,
            "final": self.selection_runs > 0,
            "settings": dict(self.settings),
        }

    @property
    def folder(self) -> Path:
        """Where the run keeps what it makes, below the folder of the sweep."""
        digest = hashlib.sha256(json.dumps(self.settings).encode()).hexdigest()[:8]
        budget = "plain" if self.epsilon is None else f"eps{self.epsilon:g}"
        row = re.sub(r"[^a-z0-9]+", "-", self.row.lower()).strip("-")
        stage = "final" if self.selection_runs else "run"
        return Path(self.task) / row / f"{budget}-seed{self.seed}-{stage}-{digest}"


def has_budget(row: Mapping[str, Any]) -> bool:
    """Returns whether a row is run at each epsilon: it is private, and sets no noise itself."""
    own = row["arguments"]
    return METHODS[own["method"]].private and "noise_multiplier" not in own


class Sweep:
    """The runs of a sweep.

    Args:
        config: ``arguments`` of every run; ``tasks`` and the arguments that each has besides;
            ``search``, with ``epsilon``, ``seed`` and perhaps ``arguments``; ``final``, with
            ``epsilons`` and ``seeds``; and ``rows``, with ``arguments``, and perhaps a ``grid`` of
            values, arguments of the row's own ``search``, and those that it has on some ``tasks``.
        folder: where everything is kept.
        jobs: how many runs go on at the same time.
    """

    def __init__(self, config: Mapping[str, Any], folder: Path, jobs: int = 1) -> None:
        self.config, self.folder, self.jobs = config, folder, jobs
        self._runs = {_key(line): line for line in read_lines(folder / RUNS)}
        self._writing = Lock()

    def search(self) -> Iterator[Cell]:
        """Yields the runs that settings are chosen from."""
        for task, name in product(self.config["tasks"], self.config["rows"]):
            for settings in self.grid(name):
                yield self._searched(name, task, settings)

    def final(self) -> Iterator[Cell]:
        """Yields the runs with the settings that were chosen; none where the search has no run."""
        where = self.config["final"]
        for task, name in product(self.config["tasks"], self.config["rows"]):
            settings, cost = self.chosen(name, task)
            if settings is None:
                continue
            budgets = where["epsilons"] if has_budget(self.config["rows"][name]) else (None,)
            for epsilon, seed in product(budgets, where["seeds"]):
                yield self._cell(name, task, epsilon, seed, settings, cost)

    def chosen(self, name: str, task: str) -> tuple[dict[str, Any] | None, int]:
        """Returns the best settings of the grid on the dev split, and how many runs they cost.

        Whoever changes a grid has looked at what it gave before: all runs of searches count that
        this row has results of for the task, and not those that have failed.
        """
        best = None
        for settings in self.grid(name):
            result = self.result(self._searched(name, task, settings))
            if result is not None:
                score = first_score(result, "dev")
                if best is None or score > best[0]:
                    best = score, settings
        if best is None:
            return (None if self.config["rows"][name].get("grid") else {}), 0
        looked_at = [run for run in self._runs.values() if not run["final"]]
        return best[1], sum((run["row"], run["task"]) == (name, task) for run in looked_at)

    def grid(self, name: str) -> Iterator[dict[str, Any]]:
        """Yields the combinations of a row's grid."""
        grid = self.config["rows"][name].get("grid") or {}
        if grid:
            for values in product(*grid.values()):
                yield dict(zip(grid, values, strict=True))

    def _searched(self, name: str, task: str, settings: Mapping[str, Any]) -> Cell:
        where = self.config["search"]
        epsilon = where["epsilon"] if has_budget(self.config["rows"][name]) else None
        row = self.config["rows"][name].get("search", {})
        own = {**settings, **where.get("arguments", {}), **row}
        return self._cell(name, task, epsilon, where["seed"], own)

    def _cell(
        self,
        name: str,
        task: str,
        epsilon: float | None,
        seed: int,
        settings: Mapping[str, Any],
        cost: int = 0,
    ) -> Cell:
        row = self.config["rows"][name]
        own = row["arguments"] | row.get("tasks", {}).get(task, {})
        of_task = self.config["tasks"][task]
        options = {**self.config["arguments"], **of_task, **own, **settings}
        return Cell(name, task, epsilon, seed, tuple(options.items()), cost)

    # ---- Running ----

    def run(self, cell: Cell) -> Mapping[str, Any] | None:
        """Makes a run; returns its result, with ``metrics`` by split, or None if it failed."""
        raise NotImplementedError

    def complete(self, cells: Iterable[Cell]) -> list[Cell]:
        """Runs what has no result yet; returns the runs that failed."""
        missing = [cell for cell in cells if self.result(cell) is None]
        failed = []
        with ThreadPoolExecutor(self.jobs) as pool:
            waiting = {pool.submit(self._complete, cell): cell for cell in missing}
            bar = tqdm(as_completed(waiting), "runs", len(missing), disable=None)
            for future in bar:
                cell = waiting[future]
                bar.set_postfix_str(f"{cell.row} on {cell.task}")
                if not future.result():
                    failed.append(cell)
        return failed

    def _complete(self, cell: Cell) -> bool:
        result = self.run(cell)
        if result is not None:
            self.add(cell, result)
        return result is not None

    def add(self, cell: Cell, result: Mapping[str, Any]) -> None:
        """Writes the result of a run that has ended, as a line of its own."""
        line = cell.entry() | {"result": result}
        with self._writing:
            self.folder.mkdir(parents=True, exist_ok=True)
            append_line(self.folder / RUNS, line)
            self._runs[cell.key] = line

    def result(self, cell: Cell) -> dict[str, Any] | None:
        """Returns the result of a run; None if it has none."""
        line = self._runs.get(cell.key)
        return None if line is None else line["result"]

    # ---- What was found ----

    def summary(self) -> dict[str, Any]:
        """Returns means and standard errors of the test score over seeds, by task, row, budget."""
        tasks: dict[str, Any] = {}
        for cell in self.final():
            rows = tasks.setdefault(cell.task, {})
            settings, cost = self.chosen(cell.row, cell.task)
            row = rows.setdefault(
                cell.row, {"settings": settings, "search_runs": cost, "scores": {}}
            )
            if (result := self.result(cell)) is not None:
                budget = "inf" if cell.epsilon is None else f"{cell.epsilon:g}"
                row["scores"].setdefault(budget, []).append(first_score(result, "test"))
        for rows in tasks.values():
            for row in rows.values():
                row["scores"] = {k: mean_and_error(v) for k, v in row["scores"].items()}
        return {"config": dict(self.config), "tasks": tasks, "search": self._search_scores()}

    def _search_scores(self) -> list[dict[str, Any]]:
        """Returns the dev score of each combination that was searched, None where it is not run."""
        scores = []
        for name in self.config["rows"]:
            for settings in self.grid(name):
                found = {}
                for task in self.config["tasks"]:
                    result = self.result(self._searched(name, task, settings))
                    found[task] = None if result is None else first_score(result, "dev")
                scores.append({"row": name, "settings": settings, "scores": found})
        return scores


def _key(entry: Mapping[str, Any]) -> str:
    return json.dumps({k: v for k, v in entry.items() if k != "result"}, sort_keys=True)


def first_score(result: Mapping[str, Any], split: str) -> float:
    """Returns the metric that counts, the first, of a split."""
    return float(next(iter(result["metrics"][split].values())))
