"""Run a grid of settings, tasks, budgets and seeds once each, and resume an interrupted sweep.

For each task and row, the search runs all combinations of the row's grid, with one budget and one
seed. The combination with the best score on the dev split then runs at every budget with every
seed. A row without a grid skips the search.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
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
    """One run: a row, a task, a budget (None: not private), a seed and settings.

    A run of the search scores the dev split only, any other run the test split only.
    """

    row: str
    task: str
    epsilon: float | None
    seed: int
    settings: tuple[tuple[str, Any], ...]
    selection_runs: int = 0
    scored: str = "test"

    @property
    def key(self) -> str:
        """The unique key of the run in a sweep, without ``selection_runs`` and ``scored``."""
        return _key(self.entry())

    def entry(self) -> dict[str, Any]:
        """Return the line of the run without its result."""
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
        """The folder of the run's files, relative to the folder of the sweep."""
        digest = hashlib.sha256(json.dumps(self.settings).encode()).hexdigest()[:8]
        budget = "plain" if self.epsilon is None else f"eps{self.epsilon:g}"
        row = re.sub(r"[^a-z0-9]+", "-", self.row.lower()).strip("-")
        stage = "final" if self.selection_runs else "run"
        return Path(self.task) / row / f"{budget}-seed{self.seed}-{stage}-{digest}"


def has_budget(row: Mapping[str, Any]) -> bool:
    """Return whether a row runs at each epsilon: it is private, and sets no noise multiplier."""
    arguments = row["arguments"]
    return METHODS[arguments["method"]].private and "noise_multiplier" not in arguments


class Sweep:
    """The runs of a sweep.

    Args:
        config: a mapping with ``arguments`` of every run; ``tasks`` with further arguments of each
            task; ``search`` with ``epsilon``, ``seed`` and optional ``arguments``; ``final`` with
            ``epsilons`` and ``seeds``; and ``rows`` with ``arguments``, an optional ``grid`` of
            values, optional arguments of the row's ``search``, and optional arguments of the row
            for some ``tasks``.
        folder: the folder of the sweep.
        jobs: the number of simultaneous runs.
    """

    def __init__(self, config: Mapping[str, Any], folder: Path, jobs: int = 1) -> None:
        self.config, self.folder, self.jobs = config, folder, jobs
        self._runs = {_key(line): line for line in read_lines(folder / RUNS)}
        self._writing = Lock()

    def search(self) -> Iterator[Cell]:
        """Yield the runs of the search."""
        for task, name in product(self.config["tasks"], self.config["rows"]):
            for settings in self.grid(name):
                yield self._searched(name, task, settings)

    def final(self) -> Iterator[Cell]:
        """Yield the runs with the chosen settings; none if the search has no result."""
        where = self.config["final"]
        for task, name in product(self.config["tasks"], self.config["rows"]):
            settings, cost = self.chosen(name, task)
            if settings is None:
                continue
            budgets = where["epsilons"] if has_budget(self.config["rows"][name]) else (None,)
            for epsilon, seed in product(budgets, where["seeds"]):
                cell = self._cell(name, task, epsilon, seed, settings)
                yield replace(cell, selection_runs=cost)

    def chosen(self, name: str, task: str) -> tuple[dict[str, Any] | None, int]:
        """Return the best settings of the grid on the dev split, and the number of runs used.

        The number includes runs of earlier grids of this row and task, because a grid may have been
        changed after looking at them. Failed runs do not count.
        """
        found = [
            (first_score(result, "dev"), settings)
            for settings in self.grid(name)
            if (result := self.result(self._searched(name, task, settings))) is not None
        ]
        if not found:
            return (None if self.config["rows"][name].get("grid") else {}), 0
        searched = [run for run in self._runs.values() if not run["final"]]
        cost = sum((run["row"], run["task"]) == (name, task) for run in searched)
        return max(found, key=lambda scored: scored[0])[1], cost

    def grid(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the combinations of a row's grid."""
        grid = self.config["rows"][name].get("grid")
        for values in product(*grid.values()) if grid else ():
            yield dict(zip(grid, values, strict=True))

    def _searched(self, name: str, task: str, settings: Mapping[str, Any]) -> Cell:
        where = self.config["search"]
        epsilon = where["epsilon"] if has_budget(self.config["rows"][name]) else None
        row = self.config["rows"][name].get("search", {})
        options = {**settings, **where.get("arguments", {}), **row}
        cell = self._cell(name, task, epsilon, where["seed"], options)
        return replace(cell, scored="dev")

    def _cell(self, name: str, task: str, epsilon: float | None, seed: int, own: Any) -> Cell:
        row = self.config["rows"][name]
        of_row = row["arguments"] | row.get("tasks", {}).get(task, {})
        of_task = self.config["tasks"][task]
        options = {**self.config["arguments"], **of_task, **of_row, **own}
        return Cell(name, task, epsilon, seed, tuple(options.items()))

    # ---- Running ----

    def run(self, cell: Cell) -> Mapping[str, Any] | None:
        """Run a cell; return its result, with ``metrics`` by split, or None if it failed."""
        raise NotImplementedError

    def complete(self, cells: Iterable[Cell]) -> list[Cell]:
        """Run the cells without a result; return the cells that failed."""
        missing = [cell for cell in cells if self.result(cell) is None]

        def run(cell: Cell) -> None:
            if (result := self.run(cell)) is not None:
                self.add(cell, result)

        with ThreadPoolExecutor(self.jobs) as pool:
            waiting = [pool.submit(run, cell) for cell in missing]
            for future in tqdm(as_completed(waiting), "runs", len(missing), disable=None):
                future.result()
        return [cell for cell in missing if self.result(cell) is None]

    def add(self, cell: Cell, result: Mapping[str, Any]) -> None:
        """Append the result of a finished run to the file of runs."""
        line = cell.entry() | {"result": result}
        with self._writing:
            self.folder.mkdir(parents=True, exist_ok=True)
            append_line(self.folder / RUNS, line)
            self._runs[cell.key] = line

    def result(self, cell: Cell) -> dict[str, Any] | None:
        """Return the result of a run; None if it has none."""
        line = self._runs.get(cell.key)
        return None if line is None else line["result"]

    # ---- Results ----

    def summary(self) -> dict[str, Any]:
        """Return means and standard errors of the test score over seeds, by task, row, budget."""
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
        """Return the dev score of each combination of the search; None for missing runs."""
        scores = []
        for name in self.config["rows"]:
            for settings in self.grid(name):
                by_task = {}
                for task in self.config["tasks"]:
                    result = self.result(self._searched(name, task, settings))
                    by_task[task] = None if result is None else first_score(result, "dev")
                scores.append({"row": name, "settings": settings, "scores": by_task})
        return scores


def _key(entry: Mapping[str, Any]) -> str:
    return json.dumps({k: v for k, v in entry.items() if k != "result"}, sort_keys=True)


def first_score(result: Mapping[str, Any], split: str) -> float:
    """Return the first metric of a split, which is the one that counts."""
    return float(next(iter(result["metrics"][split].values())))
