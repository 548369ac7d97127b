"""What the paper measured on its GPU, and what it compares methods by, beside our measurements.

Ours are cells of ``gpu_report``, whose names are model, batch size and way to train. A way that
projects stands beside the paper's number only if its rank is the paper's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dp_grape_hf.memory import ADAMW
from recipes.common.markdown import (
    BLANK,
    NOT_RUN,
    beside,
    bullets,
    counted,
    header,
    headings,
    row,
    shown,
)
from recipes.gpu_report.table import GIB, title_of_way
from recipes.paper.methods import METHODS
from recipes.report.findings import Findings, partition, title_of
from recipes.report.paper_match import Spec

GB = 1e9  # bytes, as in the paper

Cells = Mapping[str, Any]


# ---- Throughput ----


def timings(findings: Findings, paper: Spec) -> Iterator[str]:
    """Yields throughput and hours, ours from reports of ``gpu_report``."""
    yield from ("## Throughput and hours", "")
    yield from header(["Model", "Method", *headings(["samples/s", "hours"]), "measured with"])
    for model in paper["timings"]:
        for line in model["rows"]:
            said = [f"{model['model']} (`{model['label']}`)", _title(line, "samples_per_second")]
            theirs = [shown(line.get(name), BLANK) for name in ("samples_per_second", "hours")]
            speeds = [
                found
                for report in findings.reports.values()
                if (found := speed(report["cells"], model, line)) is not None
            ]
            for key, device, rate in speeds or [(BLANK, BLANK, None)]:
                ours = [NOT_RUN, NOT_RUN]
                if key:
                    ours = ["OOM", "OOM"]
                if rate is not None:
                    hours = line["steps"] * model["batch_size"] / rate / 3600
                    ours = [f"{rate:.1f}", f"{hours:.2g}"]
                yield row([*said, *beside(theirs, ours), f"{key}; {device}" if key else BLANK])
    yield ""
    yield from bullets(paper["timing_notes"])


def speed(cells: Cells, model: Spec, line: Spec) -> tuple[str, str, float | None] | None:
    """Returns cell, device and samples per second of the largest batch that fits.

    The number is None if memory sufficed for none; all is None if none was tried.
    """
    tried = None
    for size in range(model["batch_size"], 0, -1):
        key, cell = cell_of(cells, model, size, line)
        if "samples_per_second" in cell:
            return key, cell["device"], cell["samples_per_second"]
        if "out_of_memory" in cell:
            tried = key, cell["device"], None
    return tried


def cell_of(cells: Cells, model: Spec, batch_size: int, line: Spec) -> tuple[str, Cells]:
    """Returns the name of the cell that belongs beside a line of the paper, and what is in it.

    Nothing is in it if it was not run, or with another rank than the paper's.
    """
    way = way_of(line)
    key = f"{model['shape']}, B={batch_size}, {way}"
    if not _projects(way):
        return key, cells.get(key, {})
    ranked = f"{key} r={model['rank']}"
    for name in (key, ranked):
        if cells.get(name, {}).get("rank") == model["rank"]:
            return name, cells[name]
    return key, {}


def way_of(line: Spec) -> str:
    """Returns what ``gpu_report`` calls the way to train of a line."""
    return str(line.get("way", ADAMW if line["method"] == "adam" else line["method"]))


def _projects(way: str) -> bool:
    return way in METHODS and METHODS[way].projected


def _title(line: Spec, number: str) -> str:
    """Returns the name of a line; one for which the paper has no such number is only ours."""
    title = title_of_way(line["way"]) if "way" in line else title_of(line["method"])
    return title if number in line else f"{title}, ours"


# ---- Memory ----


def memory(findings: Findings, paper: Spec) -> Iterator[str]:
    """Yields the paper's formulas and its measurements, these beside ours."""
    spec = paper["memory"]
    yield from ("## Memory", "", f"The paper's `{spec['label']}`.", "")
    yield from header(["Method", *spec["columns"]])
    for line in spec["rows"]:
        yield row([title_of(line["method"]), *map(str, line["values"])])
    yield from ("", "Measured, of all that a method takes:", "")
    columns = ["GB", "saved against DP-Adam"]
    yield from header(["Model", "Method", "B", *headings(columns), "GiB", "measured with"])
    for model in paper["memory_measured"]:
        for line in model["rows"]:
            said = [model["model"], _title(line, "gb"), str(line["batch_size"])]
            theirs = [shown(line.get("gb"), BLANK), shown(line.get("saved"), BLANK)]
            found = [
                ours
                for report in findings.reports.values()
                if (ours := reserved(report["cells"], model, line)) is not None
            ]
            for gb, saved, gib, where in found or [(NOT_RUN, NOT_RUN, BLANK, BLANK)]:
                yield row([*said, *beside(theirs, [gb, saved]), gib, where])
    yield ""
    yield from bullets(spec["notes"])
    yield (
        "* What it takes of another model, `python -m recipes.paper.memory` shows, simulated, "
        "beside these formulas."
    )


def reserved(cells: Cells, model: Spec, line: Spec) -> tuple[str, str, str, str] | None:
    """Returns what the allocator reserved, GB, % saved and GiB, and where; None if not measured.

    What is saved is against DP-Adam as the paper has it, which forms the gradients, with the same
    batch; it is blank where that was not measured.
    """
    key, cell = cell_of(cells, model, line["batch_size"], line)
    if "out_of_memory" in cell:
        return "OOM", BLANK, BLANK, f"{key}; {cell['device']}"
    if "reserved" not in cell:
        return None
    size, saved = cell["reserved"], BLANK
    other = {"method": "dp_adam", "way": "dp_adam_materialise"}
    whole = cell_of(cells, model, line["batch_size"], other)[1]
    if "reserved" in whole and "out_of_memory" not in whole and way_of(line) != other["way"]:
        saved = f"{1 - size / whole['reserved']:.1%}"
    return f"{size / GB:.1f}", saved, f"{size / GIB:.1f}", f"{key}; {cell['device']}"


# ---- What methods are compared by ----


def comparison(findings: Findings, spec: Spec) -> Iterator[str]:
    """Yields what the paper says of methods that save memory, and what of them was run here."""
    yield from (f"## {spec['title']}", "", f"The paper's `{spec['label']}`.", "")
    yield from header(["Method", *spec["columns"], "here", "what was run"])
    for line in spec["rows"]:
        here = ", ".join(f"`{option}`" for option in _options(line)) or "-"
        values = [shown(value, "none") for value in line["values"]]
        yield row([line["name"], *values, here, _run_of(findings, line) or NOT_RUN])


def _options(line: Spec) -> list[str]:
    mode = f" --grad_sample_mode {line['mode']}" if "mode" in line else ""
    return [f"--method {method}{mode}" for method in line["methods"]]


def _run_of(findings: Findings, line: Spec) -> str:
    methods, mode = line["methods"], line.get("mode")
    runs = [
        run
        for run in findings.runs
        if run.method in methods
        and (mode is None or run.result["settings"].get("grad_sample_mode") == mode)
    ]
    kinds = partition(runs, lambda run: f"{run.model} on {run.task}")
    said = [f"{counted(len(own), 'run')} of {kind}" for kind, own in kinds.items()]
    ways = {method if mode is None else f"{method}_{mode}" for method in methods}
    cells = [
        key
        for report in findings.reports.values()
        for key, cell in report["cells"].items()
        if "seconds" in cell and key.rsplit(", ", 1)[1].split(" ")[0] in ways
    ]
    return "; ".join(said + ([f"{counted(len(cells), 'cell')} of `gpu_report`"] if cells else []))
