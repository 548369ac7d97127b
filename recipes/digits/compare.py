"""Every method on the same data, at the same budgets and numbers of steps: accuracy, time, memory.

    python -m recipes.digits.compare --output_dir runs/compare --jobs 2

What is run stands in ``recipes/digits/compare.yaml``, and in ``chosen.yaml`` (``--config``) a row
for which nothing is searched. For each row a small grid of learning rates, if it has one, is
searched once, at one budget and with a seed of its own, on a part of the training data
that is held out; the final runs train on all of it and are tested once. The search is not covered
by epsilon: its cost in runs is printed. Each finished run is a line of ``runs.jsonl``; started
again, the recipe goes on where it was stopped. Hardware: two CPU cores, half an hour.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from sklearn.model_selection import train_test_split
from tqdm import tqdm
from transformers import set_seed
from transformers.utils import logging

from dp_grape_hf import METHODS, DPGrapeTrainer, DPGrapeTrainingArguments
from recipes.common.markdown import mean_and_error
from recipes.common.plots import Panels, logarithmic
from recipes.common.provenance import versions, with_adapter
from recipes.common.runs import append_line, read_lines
from recipes.digits.train import DigitsArguments, accuracy_of, build_model, load_data

CONFIG = Path(__file__).with_name("compare.yaml")
HELD_OUT = 0.2  # of the training data, for the search
LORA_RANK = 16


@dataclass(frozen=True)
class Run:
    """One training run: a row of the configuration, a budget (None: not private) and a seed."""

    row: str
    learning_rate: float | None
    epsilon: float | None
    seed: int
    tuning: bool

    @property
    def key(self) -> str:
        """What tells runs of one configuration apart."""
        return json.dumps(asdict(self), sort_keys=True)

    def options(self, config: dict[str, Any]) -> dict[str, Any]:
        """Returns the trainer's arguments that the configuration has for this run."""
        row = {k: v for k, v in config["rows"][self.row].items() if k != "grid"}
        return config["shared"] | row


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what is missing, and writes the table and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, default=CONFIG, help="what is run")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/compare"))
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    options = parser.parse_args(argv)
    config = yaml.safe_load(options.config.read_text(encoding="utf-8"))
    options.output_dir.mkdir(parents=True, exist_ok=True)
    log = options.output_dir / "runs.jsonl"
    tuned = _complete(log, config, list(_search(config)), options.jobs)
    best = best_rates(config, tuned)
    results = _complete(log, config, list(_final(config, best)), options.jobs)
    record = summary(config, best, results)
    text = table(config, record)
    (options.output_dir / "compare.json").write_text(json.dumps(record, indent=1) + "\n")
    (options.output_dir / "compare.md").write_text(text, encoding="utf-8")
    plot(config, record, options.output_dir / "compare.png")
    sys.stdout.write(text)


# ---- What is run ----


def _private(config: dict[str, Any], row: str) -> bool:
    return METHODS[config["rows"][row]["method"]].private


def _search(config: dict[str, Any]) -> Iterator[Run]:
    epsilon, seed = config["tuning"]["epsilon"], config["tuning"]["seed"]
    for row, options in config["rows"].items():
        for rate in options.get("grid", ()):
            yield Run(row, rate, epsilon if _private(config, row) else None, seed, tuning=True)


def _final(config: dict[str, Any], best: dict[str, float | None]) -> Iterator[Run]:
    for row in config["rows"]:
        for epsilon in config["epsilons"] if _private(config, row) else (None,):
            for seed in config["seeds"]:
                yield Run(row, best[row], epsilon, seed, tuning=False)


def best_rates(config: dict[str, Any], tuned: dict[str, dict[str, Any]]) -> dict[str, float | None]:
    """Returns for each row the learning rate that was best in the search, if it had one."""
    best: dict[str, tuple[float, float | None]] = dict.fromkeys(config["rows"], (-1.0, None))
    for run in _search(config):
        accuracy = tuned[run.key]["accuracy"]
        if accuracy > best[run.row][0]:
            best[run.row] = accuracy, run.learning_rate
    return {row: rate for row, (_, rate) in best.items()}


def _complete(
    log: Path, config: dict[str, Any], runs: list[Run], jobs: int
) -> dict[str, dict[str, Any]]:
    """Returns the result of every run, after running those that the log does not have.

    What the log has of other options under the same name does not count.
    """
    logged = {(e["run"], _as_text(e["options"])): e["result"] for e in read_lines(log)}
    known, missing = {}, []
    for run in runs:
        result = logged.get((run.key, _as_text(run.options(config))))
        if result is None:
            missing.append(run)
        else:
            known[run.key] = result
    for run, result in tqdm(_trained(config, missing, jobs), "runs", len(missing), disable=None):
        known[run.key] = result
        append_line(log, {"run": run.key, "options": run.options(config), "result": result})
    return known


def _as_text(options: dict[str, Any]) -> str:
    return json.dumps(options, sort_keys=True)


def _trained(
    config: dict[str, Any], runs: list[Run], jobs: int
) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Yields the results of runs as they are finished, each in a process if there are several."""
    if jobs == 1:
        yield from ((run, train(config, run)) for run in runs)
        return
    threads = max(1, torch.get_num_threads() // jobs)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _start, (threads,)) as pool:
        waiting = {pool.submit(train, config, run): run for run in runs}
        for future in as_completed(waiting):
            yield waiting[future], future.result()


def _start(threads: int) -> None:
    torch.set_num_threads(threads)
    logging.set_verbosity_error()


def train(config: dict[str, Any], run: Run) -> dict[str, Any]:
    """Trains once; returns accuracy, epsilon spent, seconds and bytes."""
    options = run.options(config)
    examples, test = load_data(split_seed=0)
    if run.tuning:
        examples, test = train_test_split(examples, test_size=HELD_OUT, random_state=run.seed)
    set_seed(run.seed)
    model = with_adapter(
        build_model(DigitsArguments()), options["method"], LORA_RANK, head=["classifier"]
    )
    with tempfile.TemporaryDirectory() as folder:
        args = DPGrapeTrainingArguments(
            **options,
            output_dir=folder,
            learning_rate=run.learning_rate,
            target_epsilon=run.epsilon,
            seed=run.seed,
            projection_seed=run.seed,
        )
        trainer = DPGrapeTrainer(model, args, train_dataset=examples)
        start = time.process_time()  # so that runs side by side do not count each other's time
        trainer.train()
        seconds = time.process_time() - start
    spent = trainer.privacy_spent()
    run = trainer.private_run
    shapes = run.per_sample.released_shapes(run.projectors_at(0))
    return {
        "accuracy": accuracy_of(trainer.model, test),
        "epsilon": None if math.isinf(spent.epsilon) else spent.epsilon,
        "noise_multiplier": spent.mechanism.noise_multiplier,
        "seconds": seconds,
        "release_bytes": 4 * sum(math.prod(shape) for shape in shapes.values()),
        "state_bytes": trainer.optimizer.optimizer.state_bytes(),
    }


# ---- Rendering ----


def summary(
    config: dict[str, Any], best: dict[str, float | None], results: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Returns what was found by row and budget: means, and standard errors over the seeds."""
    rows: dict[str, Any] = {}
    for run in _final(config, best):
        cell = rows.setdefault(run.row, {"learning_rate": best[run.row], "cells": {}})
        key = "inf" if run.epsilon is None else f"{run.epsilon:g}"
        cell["cells"].setdefault(key, []).append(results[run.key])
    for row in rows.values():
        found = [result for results in row["cells"].values() for result in results]
        row["seconds"] = statistics.median(result["seconds"] for result in found)
        row["release_bytes"], row["state_bytes"] = (
            found[0][name] for name in ("release_bytes", "state_bytes")
        )
        row["accuracy"] = {
            key: mean_and_error([result["accuracy"] for result in results])[:2]
            for key, results in row.pop("cells").items()
        }
    searched = len(list(_search(config)))
    return {
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "config": config,
        "runs": {"search": searched, "final": len(list(_final(config, best)))},
        "rows": rows,
    }


def table(config: dict[str, Any], record: dict[str, Any]) -> str:
    """Returns the comparison as a table in Markdown, with what it cost."""
    budgets = [f"{epsilon:g}" for epsilon in config["epsilons"]] + ["inf"]
    titles = [f"ε = {b}".replace("inf", "∞") for b in budgets]
    lines = [
        "| Method | Learning rate | " + " | ".join(titles) + " | Release | State | Seconds |",
        "|---|---|" + "---|" * (len(budgets) + 3),
    ]
    for name, row in record["rows"].items():
        cells = [row["accuracy"].get(budget) for budget in budgets]
        shown = ["" if c is None else f"{100 * c[0]:.1f} ± {100 * c[1]:.1f}" for c in cells]
        rate = row["learning_rate"]
        lines.append(
            f"| {name} | {'chosen' if rate is None else f'{rate:g}'} | {' | '.join(shown)} | "
            f"{row['release_bytes'] / 1024:.1f} KiB | {row['state_bytes'] / 1024:.1f} KiB | "
            f"{row['seconds']:.1f} |"
        )
    shared, runs = config["shared"], record["runs"]
    return "\n".join(
        [
            *lines,
            "",
            f"Test accuracy in percent, mean and standard error over {len(config['seeds'])} seeds; "
            f"{_length(shared)}, δ = {shared['target_delta']:g}. Release: numbers that "
            "noise is added to. State: the optimizer's. Seconds: of a processor, median of the "
            f"runs. The search cost {runs['search']} runs at ε = {config['tuning']['epsilon']:g} "
            "on held-out training data, which no ε here covers; the final ones are "
            f"{runs['final']}. {record['date']}, torch {record['versions']['torch']}.",
            "",
        ]
    )


def _length(shared: dict[str, Any]) -> str:
    if "max_steps" not in shared:
        return f"{shared['num_train_epochs']} passes"
    size, rank = shared["expected_batch_size"], shared["projection_rank"]
    return f"{shared['max_steps']} steps, expected batch {size}, r = {rank}"


def panels_of(rows: Sequence[str]) -> dict[str, list[str]]:
    """Returns the rows of each panel: the methods, and the variants of those that have some.

    A variant is called "method, what differs".
    """
    bases = Counter(row.split(",")[0] for row in rows)
    varied = [base for base, count in bases.items() if count > 2 and base in rows]
    methods = [row for row in rows if row in varied or row.split(",")[0] not in varied]
    variants = {
        f"variants of {base}": [row for row in rows if row.split(",")[0] == base] for base in varied
    }
    return {"methods": methods, **variants}


def plot(config: dict[str, Any], record: dict[str, Any], path: Path) -> None:
    """Draws accuracy against epsilon; what is not private is a line across."""
    panels, seeds = panels_of(list(record["rows"])), len(config["seeds"])
    picture = Panels(list(panels), "Handwritten digits")
    for panel, rows in zip(picture.axes, panels.values(), strict=True):
        for name in rows:
            cells = {float(key): value for key, value in record["rows"][name]["accuracy"].items()}
            if math.inf in cells:
                picture.across(panel, name, 100 * cells[math.inf][0])
            else:
                points = {e: (100 * mean, 100 * error, seeds) for e, (mean, error) in cells.items()}
                picture.line(panel, name, points)
        logarithmic(panel, config["epsilons"])
    delta = config["shared"]["target_delta"]
    picture.finished(f"ε at δ = {delta:g}", "test accuracy, %").savefig(path, dpi=120)


if __name__ == "__main__":
    main()
