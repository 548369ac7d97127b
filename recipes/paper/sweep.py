"""Runs a recipe over a grid of settings, tasks, budgets and seeds, and goes on where it stopped.

    python -m recipes.paper.sweep --config sweep.yaml --output_dir runs/sweep --jobs 2

The file defines the runs:

    recipe: roberta
    arguments: {config: reference_code, model_name_or_path: ./model}  # of every run
    tasks:                                                            # and the arguments of each
      SST-2: {dataset_path: data/sst2}
      Reviews: {task: SST-2, dataset_path: data/reviews}              # which is made like SST-2
    search: {epsilon: 6, seed: 100, arguments: {k: 256}}              # arguments may be left out
    final: {epsilons: [2, 6], seeds: [13, 21, 42]}
    rows:
      DP-GRAPE:
        arguments: {method: dp_grape}
        grid: {learning_rate: [1.0e-4, 5.0e-4], max_grad_norm: [0.5, 1]}
        search: {max_steps: 100}                                      # of this row's search only
        tasks: {Reviews: {weight_decay: 0.1}}                         # of this row on that task

``recipes.common.sweep`` documents the search of a grid. No epsilon covers the search: every result
gives the number of its runs, including the runs of a grid that was changed since.

Each run is a process with a separate folder, which holds its command, its log and its result. The
result is also a line of ``runs.jsonl``. A run with a line is not run again. A run that fails is
named at the end, and tried again the next time. A result whose preset was changed since stops the
sweep, so that results are not mixed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from recipes.common import markdown
from recipes.common.markdown import counted, score_text
from recipes.common.provenance import recorded, write
from recipes.common.sweep import RUNS, Cell, Sweep, has_budget
from recipes.paper.experiment import parse
from recipes.paper.methods import METHODS

FOR_THE_RECORD = ("selection_runs", "scored_splits")
"""What results may differ in: how their settings were found, and which other splits they scored."""
KEYS = {"recipe", "arguments", "tasks", "search", "final", "rows"}
ZERO_SHOT = "zero_shot"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is missing, and writes the summary; returns 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, required=True, help="the file of the sweep")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/sweep"))
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    options = parser.parse_args(argv)
    sweep = Experiments(read(options.config), options.output_dir, options.jobs)
    sweep.refuse_changed([*sweep.search(), *sweep.final()])
    write_summary(sweep)  # so that what is there can be shown before all is
    failed = sweep.complete(sweep.search())
    write_summary(sweep)
    final = [*sweep.final()]  # the search may have chosen others
    sweep.refuse_changed(final)
    failed += sweep.complete(final)
    summary = write_summary(sweep)
    text = as_markdown(summary)
    (options.output_dir / "sweep.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    for cell in failed:
        sys.stderr.write(f"failed: see {sweep.folder / cell.folder / 'log.txt'}\n")
    return 1 if failed else 0


def read(path: Path) -> dict[str, Any]:
    """Reads the file of a sweep."""
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    if set(config) != KEYS:
        raise ValueError(f"{path} has the parts {sorted(config)}, and needs {sorted(KEYS)}.")
    if not isinstance(config["tasks"], dict):
        raise ValueError(f"{path}: tasks={config['tasks']!r} must map names to arguments, or {{}}.")
    for name, own in config["rows"].items():
        method = own["arguments"].get("method")
        if method not in METHODS:
            raise ValueError(f"{path}: method={method!r} of row {name!r} is not known.")
    return config


def place_of(cell: Cell) -> tuple[str, str, str, float | None]:
    """Return the method of a run, its task, the model that its row names, if any, and its budget.

    Several directions make another method of a zeroth-order one: it has the name of its row.
    """
    options = dict(cell.settings)
    model = str(options.get("model_name_or_path", "")).rpartition("/")[2]
    if options.get(ZERO_SHOT):
        return ZERO_SHOT, cell.task, model, None
    method = cell.row if options.get("n_directions", 1) > 1 else options["method"]
    return method, cell.task, model, cell.epsilon


def title_of(method: str) -> str:
    """Return what people call a method; the name of a row that is no method."""
    if method == ZERO_SHOT:
        return "Zero-shot"
    if method not in METHODS:
        return method
    title = METHODS[method].title
    return title if METHODS[method].private else f"{title} (non-private)"


class Experiments(Sweep):
    """Runs of a recipe, each by a separate command, in a process."""

    def command(self, cell: Cell) -> list[str]:
        """Returns the command of a run."""
        folder = self.folder / cell.folder
        options: dict[str, Any] = {
            "task": cell.task,  # but for one that has another name here
            **dict(cell.settings),
            "seed": cell.seed,
            "selection_runs": cell.selection_runs,
            "scored_splits": cell.scored,
            "result_dir": folder,
            "output_dir": folder / "run",
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        if cell.epsilon is not None:
            options["target_epsilon"] = cell.epsilon
        words = [f"--{name}={value}" for name, value in options.items()]
        return [sys.executable, "-m", f"recipes.paper.{self.config['recipe']}", *words]

    def run(self, cell: Cell) -> dict[str, Any] | None:
        """Runs the command in the folder of the run, which keeps it, and its log."""
        folder = self.folder / cell.folder
        shutil.rmtree(folder, ignore_errors=True)  # what a run left that did not end
        folder.mkdir(parents=True)
        command = self.command(cell)
        (folder / "command.txt").write_text(" ".join(command) + "\n")
        threads = max(1, (os.cpu_count() or 1) // self.jobs)
        environment = {"OMP_NUM_THREADS": str(threads)} | os.environ
        with (folder / "log.txt").open("w") as log:
            done = subprocess.run(command, stdout=log, stderr=log, env=environment, check=False)
        shutil.rmtree(folder / "run", ignore_errors=True)  # the result is what is wanted
        if done.returncode != 0:
            return None
        (path,) = folder.glob("*.json")
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return result

    def refuse_changed(self, cells: Iterable[Cell]) -> None:
        """Refuses results that were made with other settings than their runs would have today.

        The file of the sweep identifies a line; the preset does not.
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
        words = self.command(cell)[3:]
        family = import_module(f"recipes.paper.{self.config['recipe']}").FAMILY
        script, args = parse(family, [*words, "--use_cpu=True"])  # no device is needed to compare
        today = json.loads(json.dumps({"script": asdict(script), "settings": recorded(args)}))
        return [
            f"{name} was {was!r} and is {today[part][name]!r} now"
            for part in today
            for name, was in result[part].items()
            if name in today[part] and name not in FOR_THE_RECORD and was != today[part][name]
        ]


# ---- What was found ----


def write_summary(sweep: Sweep) -> dict[str, Any]:
    """Writes ``sweep.json``, and returns what is in it."""
    summary = sweep.summary()
    write(sweep.folder / "sweep.json", summary)
    return summary


def as_markdown(summary: Mapping[str, Any]) -> str:
    """Return the text of ``sweep.md``: the scores, and the scores of the search."""
    rows = [row for rows in summary["tasks"].values() for row in rows.values()]
    if not any(row["scores"] for row in rows):
        return search_table(summary)
    cost = sum(row["search_runs"] for row in rows)
    origin = "are those of the sweep's file, without a search"
    if cost:
        origin = f"were chosen on the dev split from {counted(cost, 'run')}, which no ε here covers"
    text = (
        f"{wide_table(summary)}\nTest score, mean ± standard error over the seeds, whose number is "
        f"in brackets. The settings {origin}.\n"
    )
    return "\n".join(filter(None, (text, search_table(summary))))


def wide_table(summary: Mapping[str, Any]) -> str:
    """Returns the scores in Markdown: a line for each task and row, a column for each epsilon."""
    config, several = summary["config"], len(summary["config"]["tasks"]) > 1
    private = {name: has_budget(own) for name, own in config["rows"].items()}
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
    rows = []
    for task, name in product(config["tasks"], config["rows"]):
        scores = summary["tasks"].get(task, {}).get(name, {"scores": {}})["scores"]
        cells = [
            score_text(scores.get(budget)) if private[name] is (budget != "inf") else ""
            for budget in budgets
        ]
        found = best.get((task, name))
        seen = "" if found is None else f"{found:.1f}"
        rows.append([*[task] * several, name, *cells, *([seen] if best else [])])
    return markdown.table([*titles, *([searched] if best else [])], rows)


def search_table(summary: Mapping[str, Any]) -> str:
    """Returns what the search saw as a table in Markdown: a line for each combination, if any."""
    if not summary["search"]:
        return ""
    config, where = summary["config"], summary["config"]["search"]
    rows = []
    for cell in summary["search"]:
        scores = [
            "not run" if score is None else f"{score:.1f}" for score in cell["scores"].values()
        ]
        rows.append([cell["row"], _settings_text(cell["settings"]), *scores])
    about = f"The search: dev score at ε = {where['epsilon']:g} (if private), seed {where['seed']}."
    for name, own in config["rows"].items():
        if "search" in own:
            about += f" {name} was searched with {_settings_text(own['search'])}."
    return f"{markdown.table(['Method', 'Settings', *config['tasks']], rows)}\n{about}\n"


def _settings_text(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in settings.items())


if __name__ == "__main__":
    sys.exit(main())
