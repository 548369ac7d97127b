"""Memory and messages of steps as `dp-grape memory --json` simulates them, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dp_grape_hf.memory import COLLECTIVES
from recipes.common.markdown import header, row

GIB = 2**30
KINDS = ("weights", "optimizer state", "projections", "saved activations")
TITLES = {"adamw": "AdamW", "dp_grape": "DP-GRAPE"}
MAKING = "redraw"  # the phase in which P is made


def as_markdown(reports: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table in GiB: a row for each method of each report."""
    lines = header(["Model, batch", "Step", *KINDS, "peak", "while P is made"])
    for report in reports:
        millions = f"{report['parameters'] / 1e6:,.0f} million parameters"
        batch = f"B = {report['batch_size']}, {report['length']}"
        model = f"{report['model']}, {millions}, {batch}"
        for method, found in report["methods"].items():
            title, made = TITLES.get(method, method), ""
            if found["kinds"]["projections"]:
                title += f", {report['projection'] or 'gaussian'}, r = {report['rank']}"
                made = _gib(found["phases"][MAKING])
            kinds = [_gib(found["kinds"][kind]) for kind in KINDS]
            lines.append(row([model, title, *kinds, _gib(found["peak"]), made]))
    return "\n".join(lines) + "\n"


def by_processes(reports: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table in GiB of one process: a row for each model and method, sharers beside."""
    counts = sorted({report["processes"] for report in reports})
    titles = ["1 process", *(f"1 of {count}" for count in counts[1:])]
    peaks: dict[tuple[str, str], dict[int, str]] = {}
    for report in reports:
        model = _model(report)
        for method, found in report["methods"].items():
            title = TITLES.get(method, method)
            if found["kinds"]["projections"]:
                title += f", r = {report['rank']}"
            peaks.setdefault((model, title), {})[report["processes"]] = f"{_gib(found['peak'])}"
    lines = header(["Model", "Step", *titles])
    for names, found in peaks.items():
        lines.append(row([*names, *(found.get(count, "") for count in counts)]))
    return "\n".join(lines) + "\n"


def messages(reports: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table of GiB that a process sends: a row for each model, method and number."""
    lines = header(["Model", "Processes", "Step", *COLLECTIVES])
    for report in reports:
        for method, found in report["methods"].items():
            if (sent := found["sent"]) is not None:
                cells = [_model(report), str(report["processes"]), TITLES.get(method, method)]
                lines.append(row([*cells, *(_gib(sent[kind]) for kind in COLLECTIVES)]))
    return "\n".join(lines) + "\n"


def of_few_bits(reports: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table in GiB: a row for each quantised model, smallest first."""
    kinds = ("weights", "optimizer state", "saved activations", "temporary")
    lines = header(["Model", "bits", "r", *kinds, "peak"])
    for report in sorted(reports, key=lambda report: report["parameters"]):
        (found,) = report["methods"].values()
        cells = [_gib(found["kinds"][kind]) for kind in kinds]
        names = [_model(report), f"{report['bits']}", f"{report['rank']}"]
        lines.append(row([*names, *cells, _gib(found["peak"])]))
    return "\n".join(lines) + "\n"


def _model(report: Mapping[str, Any]) -> str:
    return f"{report['model']}, {report['parameters'] / 1e9:.1f} billion parameters"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
