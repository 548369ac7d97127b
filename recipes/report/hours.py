"""The hours that sweeps of the paper's experiments take on one H100.

The hours of a run are its steps times its batch over a throughput. ``gpu_report`` measured the
throughput in float32 for the model and the method, or the paper prints it. A method without either
has the throughput of a similar one (``LIKE``). Loading and scoring take additional time.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from recipes.common.markdown import table
from recipes.common.sweep import Cell, Sweep
from recipes.paper.experiment import preset_for, preset_path
from recipes.paper.sweep import title_of
from recipes.report.tables_gpu import Measured, Spec

LIKE = {"mezo": "dpzero", "lora": "adam", "dp_lora": "dp_adam"}
"""Of which method the throughput is taken where a method has none: never a faster one."""
MEASURED, ESTIMATED = "measured ", ", estimated as "


@dataclass(frozen=True)
class Cost:
    """The hours of a row of a sweep."""

    sweep: str  # the file of the sweep
    row: str  # its name there
    hours: tuple[float, ...]  # of each run
    source: str  # of the throughput


_preset = cache(preset_for)


class Plan(Sweep):
    """All runs of a sweep: whatever the search may choose takes as long as what comes first."""

    def chosen(self, name: str, task: str) -> tuple[dict[str, Any] | None, int]:
        return next(self.grid(name), {}), 0


def costs(measured: Measured, paper: Spec, sweeps: Mapping[str, Any]) -> Iterator[Cost]:
    """Yields what each row takes of the sweeps, whose configs are given by name."""
    for name, config in sweeps.items():
        plan = Plan(config, Path())
        cells = [*plan.search(), *plan.final()]
        for row in config["rows"]:
            own = [cell for cell in cells if cell.row == row]
            found = [_hours(cell, config["recipe"], measured, paper) for cell in own]
            yield Cost(name, row, tuple(hours for hours, _ in found), found[0][1])


def _hours(cell: Cell, recipe: str, measured: Measured, paper: Spec) -> tuple[float, str]:
    """Returns the hours of a run, and where its throughput is from."""
    given = dict(cell.settings)
    task, method = given.get("task", cell.task), given["method"]
    if given.get("zero_shot"):
        return 0.0, "minutes"
    path = preset_path(recipe, given["config"])
    model = {**_preset(path, method, task), **given}["model_name_or_path"].split("/")[-1]
    options = {**_preset(path, method, task, model), **given}
    steps, batch = options.get("max_steps"), options["expected_batch_size"]
    if steps is None:
        columns = [c for spec in paper["tables"].values() for c in spec["columns"].values()]
        examples = next(c["examples"] for c in columns if c["task"] == task)
        steps = options["num_train_epochs"] * examples / batch
    timing = next(spec for spec in paper["timings"] if model in spec["names"])
    rate, source = _throughput(method, timing, measured)
    return steps * batch * options.get("n_directions", 1) / rate / 3600, source


def _throughput(method: str, timing: Spec, measured: Measured) -> tuple[float, str]:
    for name in dict.fromkeys((method, LIKE.get(method, method))):
        like = "" if name == method else f"{ESTIMATED}{title_of(name)}"
        if rate := measured.step(timing, name).get("samples_per_second"):
            return rate, f"{MEASURED}{rate:.1f}{like}"
        for line in timing["rows"]:
            if line["method"] == name and line["samples_per_second"] != "OOM":
                rate = line["samples_per_second"]
                return rate, f"the paper's {rate}{like}"
    raise ValueError(f"{method} has no throughput on {timing['model']}: add one to its timings.")


def by_row(found: Sequence[Cost]) -> str:
    """Returns a table with a line for each row of each sweep."""
    rows = []
    for cost in found:
        each = " to ".join(dict.fromkeys(f"{h:.2f}" for h in (min(cost.hours), max(cost.hours))))
        total = f"{sum(cost.hours):.1f}"
        rows.append([cost.sweep, cost.row, str(len(cost.hours)), each, total, cost.source])
    head = ["Sweep", "Row", "runs", "hours of a run", "hours of all", "examples in a second"]
    return table(head, rows)


def by_sweep(found: Sequence[Cost]) -> str:
    """Returns a table with a line for each sweep, and how much of its hours was measured."""
    rows = []
    for name in dict.fromkeys(cost.sweep for cost in found):
        own = [cost for cost in found if cost.sweep == name]
        hours = {cost: sum(cost.hours) for cost in own}
        sure = sum(
            hours[cost]
            for cost in own
            if cost.source.startswith(MEASURED) and ESTIMATED not in cost.source
        )
        whole = sum(hours.values())
        runs = str(sum(len(cost.hours) for cost in own))
        rows.append([f"`{name}.yaml`", runs, f"{whole:.0f}", f"{sure / whole:.0%}"])
    return table(["Sweep", "runs", "H100 hours", "of them at a measured throughput"], rows)
