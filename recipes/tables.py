"""The paper's tables with our results beside the paper's, in Markdown.

    python -m recipes.tables --results runs/results runs/sweep

Below the folders lie results of recipes, sweeps, and reports of ``gpu_report``. What the paper
prints is in ``paper_tables.yaml``. A run with another model, on other data or under another
protocol than the paper's is not shown beside its numbers, but in a table of its own. Every number
of ours is computed from results here and now; where there is none, it says ``not run``.

Writes ``paper_tables.md``. Takes a second, without a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dp_grape_hf.memory import ADAMW
from recipes.findings import (
    TUNED,
    ZERO_SHOT,
    Findings,
    Line,
    Run,
    collect,
    groups_of,
    is_private,
    lines_of,
    partition,
    title_of,
)
from recipes.paper_match import (
    Spec,
    belongs,
    column_of,
    read_paper,
    reasons,
    tasks_of,
    unlike,
    variant,
)
from recipes.sweep import score_text

NOT_RUN, BLANK = "not run", ""
PLACE = ("task", "model_name_or_path")  # what is in one column
BEST_EPOCH = ", best epoch, chosen on the test data"

Scores = dict[str, tuple[float, float, int]]
"""Mean, standard error and number of runs, by column."""


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the tables, and prints them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, nargs="+", required=True, help="folders")
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(argv)
    text = render(collect(options.results), read_paper())
    options.output_dir.mkdir(parents=True, exist_ok=True)
    (options.output_dir / "paper_tables.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)


def render(findings: Findings, paper: Spec) -> str:
    """Returns all tables."""
    rest = [run for run in findings.runs if "test" in run.result["metrics"]]
    untested = len(findings.runs) - len(rest)
    lines = [
        "# The paper's tables, and ours",
        "",
        "Rendered by `python -m recipes.tables`. Ours are means ± standard errors over runs, whose "
        "number is in brackets; one run has no error. No ε covers what was chosen on a dev split.",
    ]
    for name, spec in paper["tables"].items():
        own = [run for run in rest if belongs(run, spec)]
        rest = [run for run in rest if not belongs(run, spec)]
        lines += ["", *table(own, spec), "", *settings_beside(own, spec, paper["settings"][name])]
        for model, apart in partition(_apart(own, spec), lambda run: run.model).items():
            lines += ["", *stand_in(model, apart, spec)]
    lines += ["", *timings(findings, paper), "", *memory(paper["memory"])]
    families = ", ".join(dict.fromkeys(f"{run.family} on {run.task}" for run in rest))
    left_out = {
        f"{len(rest)} belong to no table of the paper: {families}.": len(rest),
        f"{untested} have no test score: settings were chosen from them.": untested,
        f"{len(findings.left_out)} are of sweeps without a `sweep.json`, so that it is not known "
        "which of their runs only chose settings.": len(findings.left_out),
    }
    if any(left_out.values()):
        lines += ["", "## Results that are not shown", ""]
        lines += [f"* {said}" for said, count in left_out.items() if count]
    return "\n".join(lines) + "\n"


def _apart(runs: Iterable[Run], spec: Spec) -> list[Run]:
    return [run for run in runs if unlike(run, spec)]


def _same(runs: Iterable[Run], spec: Spec) -> list[Run]:
    return [run for run in runs if not unlike(run, spec)]


# ---- Results ----


def table(runs: Sequence[Run], spec: Spec) -> Iterator[str]:
    """Yields a table of the paper, with the runs of the same experiment beside it."""
    same, columns = _same(runs, spec), list(spec["columns"])
    yield from (f"## {spec['title']}", "", f"The paper's `{spec['label']}`.", "")
    yield from header(["Method", "ε", *_headings(columns)])
    printed = {(row["method"], row.get("epsilon")): row["values"] for row in spec["rows"]}
    by_row = partition(same, _row_of)
    for method, epsilon in [*printed, *sorted(by_row.keys() - printed.keys(), key=_order)]:
        theirs = [shown(v) for v in printed.get((method, epsilon), [None] * len(columns))]
        lines = lines_of(groups_of(by_row.get((method, epsilon), [])), PLACE, loose=True)
        options = [_options(line, spec) for line in lines]
        if all(options):
            ours = [NOT_RUN] * len(columns)
            yield row([title_of(method), budget(epsilon), *_beside(theirs, ours)])
        for line, own in zip(lines, options, strict=True):
            label = ", ".join([line.label, *(o for o in own if o not in line.label)])
            paper = [BLANK] * len(columns) if own else theirs
            for ending, found in _scores(line, spec, lambda run: str(column_of(run, spec))):
                ours = [shown(found.get(name), NOT_RUN) for name in columns]
                yield row([label + ending, budget(epsilon), *_beside(paper, ours)])
                paper = [BLANK] * len(columns)
    yield ""
    yield from (f"* {said}" for said in [*spec["notes"], *origin(same)])


def stand_in(model: str, runs: Sequence[Run], spec: Spec) -> Iterator[str]:
    """Yields a table of runs that are not the paper's experiment, and what sets them apart."""
    tasks = [task for task in tasks_of(spec) if any(run.task == task for run in runs)]
    yield from (f"### The same experiment on stand-ins: {model}", "")
    yield from header(["Method", "ε", *tasks])
    by_row = partition(runs, _row_of)
    for method, epsilon in sorted(by_row, key=_order):
        for line in lines_of(groups_of(by_row[method, epsilon]), PLACE, loose=True):
            for ending, found in _scores(line, spec, lambda run: run.task):
                cells = [shown(found.get(task), NOT_RUN) for task in tasks]
                yield row([line.label + ending, budget(epsilon), *cells])
    yield from ("", "What is not the paper's:", "")
    yield from (f"* {said}" for said in [*reasons(runs, spec), *origin(runs)])
    yield from ("", "Settings behind it:", "", *header(["Method", "Setting", *tasks]))
    by_task = partition(runs, lambda run: run.task)
    for method in dict.fromkeys(method for method, _ in by_row if method != ZERO_SHOT):
        for name in TUNED if is_private(method) else TUNED[:1]:
            values = [_values(by_task[task], method, name) for task in tasks]
            yield row([title_of(method), name, *values])


def _row_of(run: Run) -> tuple[str, float | None]:
    return run.method, run.epsilon


def _order(row_of: tuple[str, float | None]) -> tuple[str, float]:
    method, epsilon = row_of
    return title_of(method), -(epsilon or 0.0)  # as in the paper: the largest first


def _headings(columns: Sequence[str]) -> list[str]:
    return _beside([f"{name}, paper" for name in columns], ["ours"] * len(columns))


def _beside(paper: Sequence[str], ours: Sequence[str]) -> list[str]:
    return [cell for pair in zip(paper, ours, strict=True) for cell in pair]


def _options(line: Line, spec: Spec) -> list[str]:
    """Returns the options that make a line a variant of the paper's method."""
    found = [variant(group[0], spec) for group in line.groups]
    return list(dict.fromkeys(f"{k} = {v}" for options in found for k, v in options.items()))


def _scores(line: Line, spec: Spec, column: Callable[[Run], str]) -> Iterator[tuple[str, Scores]]:
    """Yields how a label ends, and the scores: those of the last step, those of the best."""
    yield BLANK, {column(group[0]): group.score() for group in line.groups}
    if spec.get("best_epoch"):
        best = {column(group[0]): group.best() for group in line.groups}
        if found := {name: score for name, score in best.items() if score is not None}:
            yield BEST_EPOCH, found


def origin(runs: Sequence[Run]) -> list[str]:
    """Returns where results come from, what their settings cost, and what they say themselves."""
    if not runs:
        return []
    seeds = sorted({run.seed for run in runs})
    results = [run.result for run in runs]
    cost = sorted({result["script"]["selection_runs"] for result in results})
    facts = {
        "Ours": f"{len(runs)} runs with seeds {_listed(seeds)}",
        "data from": _listed({run.facts.get("dataset_path", "the Hub") for run in runs}),
        "on": _listed({result["device"] for result in results}),
        "torch": _listed({result["versions"]["torch"] for result in results}),
        "transformers": _listed({result["versions"]["transformers"] for result in results}),
        "code": _listed({result["git_commit"] or "outside git" for result in results}),
        "settings chosen from": f"{' or '.join(map(str, cost))} runs for each task"
        if any(cost)
        else "no runs",
    }
    notes: dict[str, set[str]] = {}
    for run in runs:
        for note in run.result["notes"]:
            notes.setdefault(note, set()).add(run.task)
    said = [f"{note} ({_listed(tasks)})" for note, tasks in notes.items()]
    return ["; ".join(f"{name} {value}" for name, value in facts.items()) + ".", *said]


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(str(value) for value in sorted(values))


# ---- Settings, timings, memory ----


def settings_beside(runs: Sequence[Run], spec: Spec, chosen: Spec) -> Iterator[str]:
    """Yields the clipping bounds and learning rates of a table, the paper's and ours."""
    columns, by_column = (
        list(spec["columns"]),
        partition(_same(runs, spec), lambda run: column_of(run, spec)),
    )
    yield from (f"Settings behind it; the paper's are of: {chosen['label']}.", "")
    yield from header(["Method", "Setting", *_headings(columns)])
    for line in chosen["rows"]:
        method, name = line["method"], line["setting"]
        ours = [_values(by_column.get(column, []), method, name) for column in columns]
        theirs = ["n/a" if value is None else f"{value:g}" for value in line["values"]]
        yield row([title_of(method), name, *_beside(theirs, ours)])


def _values(runs: Iterable[Run], method: str, name: str) -> str:
    found = sorted({run.facts[name] for run in runs if run.method == method and name in run.facts})
    return " / ".join(f"{value:g}" for value in found) or NOT_RUN


def timings(findings: Findings, paper: Spec) -> Iterator[str]:
    """Yields throughput and hours, ours from reports of ``gpu_report``."""
    yield from ("## Throughput and hours", "")
    columns = ["Model", "Method", *_headings(["samples/s", "hours"]), "measured with"]
    yield from header(columns)
    for model in paper["timings"]:
        for line in model["rows"]:
            said = [f"{model['model']} (`{model['label']}`)", title_of(line["method"])]
            theirs = [shown(line["samples_per_second"]), shown(line["hours"])]
            speeds = [
                found
                for report in findings.reports.values()
                if (found := speed(report["cells"], model, line["method"])) is not None
            ]
            for key, device, rate in speeds or [(BLANK, BLANK, None)]:
                ours = [NOT_RUN, NOT_RUN]
                if key:
                    ours = ["OOM", "OOM"]
                if rate is not None:
                    hours = line["steps"] * model["batch_size"] / rate / 3600
                    ours = [f"{rate:.1f}", f"{hours:.2g}"]
                yield row([*said, *_beside(theirs, ours), f"{key}; {device}" if key else BLANK])
    yield ""
    yield from (f"* {said}" for said in paper["timing_notes"])


def speed(cells: Spec, model: Spec, method: str) -> tuple[str, str, float | None] | None:
    """Returns cell, device and samples per second of the largest batch that fits.

    The number is None if memory sufficed for none; all is None if none was tried.
    """
    name = ADAMW if method == "adam" else method
    tried = None
    for size in range(model["batch_size"], 0, -1):
        key = f"{model['shape']}, B={size}, {name}"
        cell = cells.get(key, {})
        if "samples_per_second" in cell:
            return key, cell["device"], cell["samples_per_second"]
        if "out_of_memory" in cell:
            tried = key, cell["device"], None
    return tried


def memory(spec: Spec) -> Iterator[str]:
    """Yields the paper's formulas, and where to get numbers for a model."""
    yield from ("## Memory", "", f"The paper's `{spec['label']}`.", "")
    yield from header(["Method", *spec["columns"]])
    for line in spec["rows"]:
        yield row([title_of(line["method"]), *map(str, line["values"])])
    yield ""
    yield from (f"* {said}" for said in spec["notes"])
    yield (
        "* Ours depends on the model: `dp-grape plan --all_methods` shows it for one, simulated, "
        "beside these formulas."
    )


# ---- Markdown ----


def header(cells: Sequence[str]) -> list[str]:
    """Returns the first two lines of a table."""
    return [row(cells), "|---" * len(cells) + "|"]


def row(cells: Sequence[str]) -> str:
    """Returns a line of a table."""
    return "| " + " | ".join(cells) + " |"


def budget(epsilon: float | None) -> str:
    """Returns an epsilon, which is infinite if there is none."""
    return "∞" if epsilon is None else f"{epsilon:g}"


def shown(value: Any, missing: str = "n/a") -> str:
    """Returns a cell: nothing, a number or a word, mean and error, or those of so many runs."""
    if value is None:
        return missing
    if isinstance(value, list):
        return f"{value[0]} ± {value[1]}"
    if isinstance(value, tuple):
        return score_text(value)
    return str(value)


if __name__ == "__main__":
    main()
