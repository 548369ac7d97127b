"""Runs a recipe over a grid of settings, tasks, budgets and seeds, and goes on where it stopped.

    python -m recipes.paper.sweep --config sweep.yaml --output_dir runs/sweep --jobs 2

The file says what is run:

    recipe: roberta
    arguments: {config: ours, model_name_or_path: ./roberta-large}    # of every run
    tasks:                                                            # and what each has besides
      SST-2: {dataset_path: data/sst2}
      RTE: {}
    search: {epsilon: 6, seed: 100, arguments: {k: 256}}              # arguments may be left out
    final: {epsilons: [2, 6], seeds: [13, 21, 42]}
    rows:
      DP-GRAPE:
        arguments: {method: dp_grape}
        grid: {learning_rate: [1.0e-4, 5.0e-4], max_grad_norm: [0.5, 1]}
      AdamW:
        arguments: {method: adam}
        grid: {learning_rate: [1.0e-5, 5.0e-5]}
        search: {max_steps: 100}                                      # of this row's search only

For each task and row all combinations of the grid are run at the budget and with the seed of the
search; the one with the best score on the dev split is run at every budget with every seed. A row
without a grid is run as it is. The search is not covered by any epsilon: every result says how many
runs it cost, those of a grid that was changed since included.

Each run is a process with a folder of its own, which holds its command and its log. When it ends,
its result is a line of ``runs.jsonl``. A run that has a line is not run again; one that fails is
named at the end, and tried again the next time. A result whose preset was changed since stops the
sweep, before anything is mixed. ``sweep.json`` and ``sweep.md`` have the means and standard errors
of what is there, and the scores of the search.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import product
from pathlib import Path
from threading import Lock
from typing import Any

import yaml
from tqdm import tqdm

from dp_grape_hf import METHODS
from recipes.common import markdown
from recipes.common.markdown import counted, mean_and_error, score_text
from recipes.common.provenance import recorded
from recipes.common.runs import append_line, read_lines
from recipes.paper.experiment import parse

KEYS = {"recipe", "arguments", "tasks", "search", "final", "rows"}
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

    def command(self, recipe: str, folder: Path) -> list[str]:
        """Returns the command of the run."""
        options = dict(self.settings) | {
            "task": self.task,
            "seed": self.seed,
            "selection_runs": self.selection_runs,
            "result_dir": folder,
            "output_dir": folder / "run",
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        if self.epsilon is not None:
            options["target_epsilon"] = self.epsilon
        words = [f"--{name}={value}" for name, value in options.items()]
        return [sys.executable, "-m", f"recipes.paper.{recipe}", *words]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is missing, and writes the summary; returns 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, required=True, help="the file of the sweep")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/sweep"))
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    options = parser.parse_args(argv)
    sweep = Sweep(read(options.config), options.output_dir, options.jobs)
    sweep.refuse_changed([*sweep.search(), *sweep.final()])
    failed = []
    for stage in (sweep.search, sweep.final):
        sweep.write_summary()  # so that what is there can be shown before all is
        failed += sweep.complete(stage())
    summary = sweep.write_summary()
    text = as_markdown(summary)
    (options.output_dir / "sweep.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    for folder in failed:
        sys.stderr.write(f"failed: see {folder / 'log.txt'}\n")
    return 1 if failed else 0


def read(path: Path) -> dict[str, Any]:
    """Reads the file of a sweep.

    Raises:
        ValueError: if a part is missing, or there is one too many.
    """
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    if set(config) != KEYS:
        raise ValueError(f"{path} has the parts {sorted(config)}, and needs {sorted(KEYS)}.")
    if not isinstance(config["tasks"], dict):
        raise ValueError(f"{path}: tasks={config['tasks']!r} must map names to arguments, or {{}}.")
    for name, row in config["rows"].items():
        method = row["arguments"].get("method")
        if method not in METHODS:
            raise ValueError(f"{path}: method={method!r} of row {name!r} is not known.")
    return config


class Sweep:
    """The runs of a sweep.

    Args:
        config: what ``read`` returned.
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
            for settings in self._grid(name):
                yield self._searched(name, task, settings)

    def final(self) -> Iterator[Cell]:
        """Yields the runs with the settings that were chosen; none where the search has no run."""
        where = self.config["final"]
        for task, name in product(self.config["tasks"], self.config["rows"]):
            settings, cost = self.chosen(name, task)
            if settings is None:
                continue
            budgets = where["epsilons"] if self._private(name) else (None,)
            for epsilon, seed in product(budgets, where["seeds"]):
                yield self._cell(name, task, epsilon, seed, settings, cost)

    def chosen(self, name: str, task: str) -> tuple[dict[str, Any] | None, int]:
        """Returns the best settings of the grid on the dev split, and how many runs they cost.

        Whoever changes a grid has looked at what it gave before: all runs of searches count that
        this row has results of for the task, and not those that have failed.
        """
        best = None
        for settings in self._grid(name):
            cell = self._searched(name, task, settings)
            result = self.result(cell)
            if result is not None:
                score = first_score(result, "dev")
                if best is None or score > best[0]:
                    best = score, settings
        if best is None:
            return (None if self.config["rows"][name].get("grid") else {}), 0
        looked_at = [run for run in self._runs.values() if not run["final"]]
        return best[1], sum((run["row"], run["task"]) == (name, task) for run in looked_at)

    def _searched(self, name: str, task: str, settings: Mapping[str, Any]) -> Cell:
        where = self.config["search"]
        epsilon = where["epsilon"] if self._private(name) else None
        row = self.config["rows"][name].get("search", {})
        own = {**settings, **where.get("arguments", {}), **row}
        return self._cell(name, task, epsilon, where["seed"], own)

    def _grid(self, name: str) -> Iterator[dict[str, Any]]:
        grid = self.config["rows"][name].get("grid") or {}
        if grid:
            for values in product(*grid.values()):
                yield dict(zip(grid, values, strict=True))

    def _private(self, name: str) -> bool:
        return METHODS[self.config["rows"][name]["arguments"]["method"]].private

    def _cell(
        self,
        name: str,
        task: str,
        epsilon: float | None,
        seed: int,
        settings: Mapping[str, Any],
        cost: int = 0,
    ) -> Cell:
        own = self.config["rows"][name]["arguments"]
        of_task = self.config["tasks"][task]
        options = {**self.config["arguments"], **of_task, **own, **settings}
        return Cell(name, task, epsilon, seed, tuple(options.items()), cost)

    # ---- Running ----

    def refuse_changed(self, cells: Iterable[Cell]) -> None:
        """Refuses results that were made with other settings than their runs would have today.

        A line is known by what the file of the sweep says, and not by what a preset does.

        Raises:
            ValueError: if there are any.
        """
        found = [(cell, self.result(cell)) for cell in cells]
        wrong = [
            f"{cell.folder}: {', '.join(changes)}"
            for cell, result in found
            if result is not None and (changes := self._changes(cell, result))
        ]
        if wrong:
            raise ValueError(
                "Results would be mixed that were made with different settings. What was changed, "
                "in a preset or in a default, since these were made:\n  "
                + "\n  ".join(wrong)
                + f"\nUndo the change, or delete their lines in {self.folder / RUNS} so that they "
                "are run again, or give another --output_dir."
            )

    def _changes(self, cell: Cell, result: Mapping[str, Any]) -> list[str]:
        """Returns the settings of a result that its command would no longer have."""
        words = cell.command(self.config["recipe"], self.folder / cell.folder)[3:]
        family = import_module(f"recipes.paper.{self.config['recipe']}").FAMILY
        script, args = parse(family, [*words, "--use_cpu=True"])  # no device is needed to compare
        today = json.loads(json.dumps({"script": asdict(script), "settings": recorded(args)}))
        return [
            f"{name} was {was!r} and is {today[part][name]!r} now"
            for part in today
            for name, was in result[part].items()
            if name in today[part] and name != "selection_runs" and was != today[part][name]
        ]

    def complete(self, cells: Iterable[Cell]) -> list[Path]:
        """Runs what has no result yet; returns the folders of the runs that failed."""
        cells = list(cells)
        self.refuse_changed(cells)
        missing = [cell for cell in cells if self.result(cell) is None]
        failed = []
        with ThreadPoolExecutor(self.jobs) as pool:
            waiting = {pool.submit(self._run, cell): cell for cell in missing}
            bar = tqdm(as_completed(waiting), "runs", len(missing), disable=None)
            for future in bar:
                cell = waiting[future]
                bar.set_postfix_str(f"{cell.row} on {cell.task}")
                if future.result() != 0:
                    failed.append(self.folder / cell.folder)
        return failed

    def _run(self, cell: Cell) -> int:
        folder = self.folder / cell.folder
        shutil.rmtree(folder, ignore_errors=True)  # what a run left that did not end
        folder.mkdir(parents=True)
        command = cell.command(self.config["recipe"], folder)
        (folder / "command.txt").write_text(" ".join(command) + "\n")
        threads = max(1, (os.cpu_count() or 1) // self.jobs)
        environment = {"OMP_NUM_THREADS": str(threads)} | os.environ
        with (folder / "log.txt").open("w") as log:
            done = subprocess.run(command, stdout=log, stderr=log, env=environment, check=False)
        shutil.rmtree(folder / "run", ignore_errors=True)  # the result is what is wanted
        if done.returncode != 0:
            return done.returncode
        (path,) = folder.glob("*.json")
        self.add(cell, json.loads(path.read_text(encoding="utf-8")))
        path.unlink()
        return 0

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

    def write_summary(self) -> dict[str, Any]:
        """Writes ``sweep.json``, and returns what is in it."""
        summary = self.summary()
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "sweep.json").write_text(as_json(summary))
        return summary

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
                row["scores"] = {k: _finite(mean_and_error(v)) for k, v in row["scores"].items()}
        return {"config": dict(self.config), "tasks": tasks, "search": self._search_scores()}

    def _search_scores(self) -> list[dict[str, Any]]:
        """Returns the dev score of each combination that was searched, None where it is not run."""
        scores = []
        for name in self.config["rows"]:
            for settings in self._grid(name):
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


def _finite(values: Iterable[float]) -> list[float | None]:
    """Returns the values, with None for what JSON has no number for."""
    return [value if math.isfinite(value) else None for value in values]


def as_json(summary: Mapping[str, Any]) -> str:
    """Returns what ``sweep.json`` holds."""
    return json.dumps(summary, indent=1) + "\n"


def as_markdown(summary: Mapping[str, Any]) -> str:
    """Returns what ``sweep.md`` says: the scores, and those of the search."""
    return "\n".join(filter(None, (table(summary), search_table(summary))))


def table(summary: Mapping[str, Any]) -> str:
    """Returns the scores as a table in Markdown, if any: a line for each row and budget."""
    config = summary["config"]
    budgets = [f"{epsilon:g}" for epsilon in config["final"]["epsilons"]] + ["inf"]
    lines = ["| Method | ε | " + " | ".join(config["tasks"]) + " |"]
    lines.append("|---" * (2 + len(config["tasks"])) + "|")
    for budget, name in product(budgets, config["rows"]):
        found = [
            summary["tasks"].get(task, {}).get(name, {"scores": {}})["scores"].get(budget)
            for task in config["tasks"]
        ]
        if any(found):
            shown = budget.replace("inf", "∞")
            lines.append(f"| {name} | {shown} | " + " | ".join(map(score_text, found)) + " |")
    if len(lines) == 2:
        return ""
    cost = sum(row["search_runs"] for rows in summary["tasks"].values() for row in rows.values())
    origin = "are those of the sweep's file, without a search"
    if cost:
        origin = f"were chosen on the dev split from {counted(cost, 'run')}, which no ε here covers"
    return "\n".join(
        [
            *lines,
            "",
            "Test score, mean ± standard error over the seeds, whose number is in brackets. The "
            f"settings {origin}.",
            "",
        ]
    )


def wide_table(summary: Mapping[str, Any]) -> str:
    """Returns the scores as a table in Markdown: a line for each task and row, budgets beside."""
    config, several = summary["config"], len(summary["config"]["tasks"]) > 1
    private = {
        name: METHODS[row["arguments"]["method"]].private for name, row in config["rows"].items()
    }
    budgets = [f"{epsilon:g}" for epsilon in config["final"]["epsilons"]]
    budgets += ["inf"] * (not all(private.values()))
    searched = f"search, dev, at ε = {config['search']['epsilon']:g}"
    titles = ["Task"] * several + ["Method"] + [f"ε = {b}".replace("inf", "∞") for b in budgets]
    best: dict[tuple[str, str], float] = {}
    for cell in summary["search"]:
        for task, score in cell["scores"].items():
            if score is not None:
                key = task, cell["row"]
                best[key] = max(score, best.get(key, score))
    lines = markdown.header([*titles, *([searched] if best else [])])
    for task, name in product(config["tasks"], config["rows"]):
        scores = summary["tasks"].get(task, {}).get(name, {"scores": {}})["scores"]
        cells = [
            score_text(scores.get(budget)) if private[name] is (budget != "inf") else ""
            for budget in budgets
        ]
        found = best.get((task, name))
        seen = "" if found is None else f"{found:.1f}"
        lines.append(markdown.row([*[task] * several, name, *cells, *([seen] if best else [])]))
    return "\n".join(lines) + "\n"


def search_table(summary: Mapping[str, Any]) -> str:
    """Returns what the search saw as a table in Markdown: a line for each combination, if any."""
    if not summary["search"]:
        return ""
    config, where = summary["config"], summary["config"]["search"]
    lines = ["| Method | Settings | " + " | ".join(config["tasks"]) + " |"]
    lines.append("|---" * (2 + len(config["tasks"])) + "|")
    for cell in summary["search"]:
        scores = [
            "not run" if score is None else f"{score:.1f}" for score in cell["scores"].values()
        ]
        settings = _settings_text(cell["settings"])
        lines.append(f"| {cell['row']} | {settings} | " + " | ".join(scores) + " |")
    about = f"The search: dev score at ε = {where['epsilon']:g} (if private), seed {where['seed']}."
    for name, row in config["rows"].items():
        if "search" in row:
            about += f" {name} was searched with {_settings_text(row['search'])}."
    return "\n".join([*lines, "", about, ""])


def _settings_text(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in settings.items())


if __name__ == "__main__":
    sys.exit(main())
