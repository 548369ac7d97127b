"""The paper's tables with our results beside the paper's, in Markdown.

    python -m recipes.report.tables --results runs/results runs/sweep

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

from recipes.common.markdown import (
    BLANK,
    NOT_RUN,
    Score,
    beside,
    budget,
    bullets,
    counted,
    difference,
    header,
    headings,
    row,
    shown,
)
from recipes.report.findings import (
    Findings,
    Line,
    RunResult,
    collect,
    groups_of,
    lines_of,
    partition,
    title_of,
)
from recipes.report.paper_match import (
    Spec,
    belongs,
    column_of,
    read_paper,
    reasons,
    tasks_of,
    unlike,
    variant,
)
from recipes.report.tables_gpu import memory, timings

PLACE = ("task", "model_name_or_path")  # what is in one column
BEST_EPOCH = ", best epoch, chosen on the test data"

Scores = dict[str, Score]
"""By column."""


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the tables, and prints them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, nargs="+", required=True, help="folders")
    parser.add_argument("--output_dir", type=Path, default=Path("recipes/paper/results"))
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
        "Rendered by `make tables`. Ours are means ± standard errors over runs, whose number is in "
        "brackets, and how far they are above the paper's; one run has no error. No ε covers what "
        "was chosen on a dev split.",
    ]
    for name, spec in paper["tables"].items():
        own = [run for run in rest if belongs(run, spec)]
        rest = [run for run in rest if not belongs(run, spec)]
        lines += ["", *table(own, spec), "", *settings_beside(own, spec, paper["settings"][name])]
        others = [run for run in own if unlike(run, spec)]
        for model, apart in partition(others, lambda run: run.model).items():
            lines += ["", *stand_in(model, apart, spec)]
    lines += ["", *timings(findings, paper), "", *memory(findings, paper)]
    families = ", ".join(dict.fromkeys(f"{run.family} on {run.task}" for run in rest))
    left_out = {
        f"{len(rest)} belong to no table of the paper: {families}.": len(rest),
        f"{untested} have no test score: what they score was held out of the training data, to "
        "choose settings by, or as the authors' code for ViT does in its final runs.": untested,
    }
    if any(left_out.values()):
        lines += ["", "## Results that are not shown", ""]
        lines += bullets(said for said, count in left_out.items() if count)
    return "\n".join(lines) + "\n"


def _same(runs: Iterable[RunResult], spec: Spec) -> list[RunResult]:
    return [run for run in runs if not unlike(run, spec)]


# ---- Results ----


def table(runs: Sequence[RunResult], spec: Spec) -> Iterator[str]:
    """Yields a table of the paper, with the runs of the same experiment beside it."""
    same, columns = _same(runs, spec), list(spec["columns"])
    yield from (f"## {spec['title']}", "", f"The paper's `{spec['label']}`.", "")
    yield from header(["Method", "ε", *headings(columns)])
    printed = {(row["method"], row.get("epsilon")): row["values"] for row in spec["rows"]}
    by_row = partition(same, _row_of)
    for method, epsilon in [*printed, *sorted(by_row.keys() - printed.keys(), key=_order)]:
        values = printed.get((method, epsilon), [None] * len(columns))
        theirs = [shown(v) for v in values]
        variants = partition(by_row.get((method, epsilon), []), lambda run: _options(run, spec))
        for options, own in {BLANK: [], **variants}.items():  # the paper's method is the first
            if not own:
                ours = [NOT_RUN] * len(columns)
                yield row([title_of(method), budget(epsilon), *beside(theirs, ours)])
            for line in lines_of(groups_of(own), PLACE):
                label = ", ".join(filter(None, [line.label, options]))
                blank, nothing = [BLANK] * len(columns), [None] * len(columns)
                paper, numbers = (blank, nothing) if options else (theirs, values)
                for ending, found in _scores(line, spec, lambda run: str(column_of(run, spec))):
                    ours = [
                        shown(score := found.get(name), NOT_RUN) + difference(value, score)
                        for name, value in zip(columns, numbers, strict=True)
                    ]
                    yield row([label + ending, budget(epsilon), *beside(paper, ours)])
                    paper, numbers = blank, nothing
    yield ""
    yield from bullets([*spec["notes"], *origin(same)])


def stand_in(model: str, runs: Sequence[RunResult], spec: Spec) -> Iterator[str]:
    """Yields a table of runs that are not the paper's experiment, and what sets them apart."""
    tasks = [task for task in tasks_of(spec) if any(run.task == task for run in runs)]
    yield from (f"### The same experiment on stand-ins: {model}", "")
    yield from header(["Method", "ε", *tasks])
    by_row = partition(runs, _row_of)
    for method, epsilon in sorted(by_row, key=_order):
        for line in lines_of(groups_of(by_row[method, epsilon]), PLACE):
            for ending, found in _scores(line, spec, lambda run: run.task):
                cells = [shown(found.get(task), NOT_RUN) for task in tasks]
                yield row([line.label + ending, budget(epsilon), *cells])
    yield from ("", "What is not the paper's:", "")
    yield from bullets([*reasons(runs, spec), *origin(runs)])


def _row_of(run: RunResult) -> tuple[str, float | None]:
    return run.method, run.epsilon


def _order(row_of: tuple[str, float | None]) -> tuple[str, float]:
    method, epsilon = row_of
    return title_of(method), -(epsilon or 0.0)  # as in the paper: the largest first


def _options(run: RunResult, spec: Spec) -> str:
    """Returns the options that make a run a variant of the paper's method."""
    return ", ".join(f"{name} = {value}" for name, value in variant(run, spec).items())


def _scores(
    line: Line, spec: Spec, column: Callable[[RunResult], str]
) -> Iterator[tuple[str, Scores]]:
    """Yields how a label ends, and the scores: those of the last step, those of the best."""
    yield BLANK, {column(group[0]): group.score() for group in line.groups}
    if spec.get("best_epoch"):
        best = {column(group[0]): group.best() for group in line.groups}
        if found := {name: score for name, score in best.items() if score is not None}:
            yield BEST_EPOCH, found


def origin(runs: Sequence[RunResult]) -> list[str]:
    """Returns where results come from, what their settings cost, and what they say themselves."""
    if not runs:
        return []
    seeds = sorted({run.seed for run in runs})
    results = [run.result for run in runs]
    cost = sorted({result["script"]["selection_runs"] for result in results})
    facts = {
        "Ours": f"{counted(len(runs), 'run')} with seed{'s' * (len(seeds) > 1)} {_listed(seeds)}",
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


# ---- Settings ----


def settings_beside(runs: Sequence[RunResult], spec: Spec, chosen: Spec) -> Iterator[str]:
    """Yields the clipping bounds and learning rates of a table, the paper's and ours."""
    columns, by_column = (
        list(spec["columns"]),
        partition(_same(runs, spec), lambda run: column_of(run, spec)),
    )
    said = f"Settings behind it; the paper's are of: {chosen['label']}; ours, of all rows above."
    yield from (said, "")
    yield from header(["Method", "Setting", *headings(columns)])
    for line in chosen["rows"]:
        method, name = line["method"], line["setting"]
        ours = [_values(by_column.get(column, []), method, name) for column in columns]
        theirs = ["n/a" if value is None else f"{value:g}" for value in line["values"]]
        yield row([title_of(method), name, *beside(theirs, ours)])


def _values(runs: Iterable[RunResult], method: str, name: str) -> str:
    found = sorted({run.facts[name] for run in runs if run.method == method and name in run.facts})
    return " / ".join(f"{value:g}" for value in found) or NOT_RUN


if __name__ == "__main__":
    main()
