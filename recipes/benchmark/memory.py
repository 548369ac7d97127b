"""Memory and messages of steps as `dp-grape memory --json` simulates them, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dp_grape_hf.memory import COLLECTIVES
from recipes.common.markdown import table

GIB = 2**30
KINDS = ("weights", "optimizer state", "projections", "saved activations")
TITLES = {"adamw": "AdamW", "dp_grape": "DP-GRAPE"}
MAKING = "redraw"  # the phase in which P is made


def as_markdown(reports: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table in GiB: a row for each method of each report."""
    rows = []
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
            rows.append([model, title, *kinds, _gib(found["peak"]), made])
    return table(["Model, batch", "Step", *KINDS, "peak", "while P is made"], rows)


def by_processes(reports: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table in GiB of one process: a row for each model and method, sharers beside."""
    counts = sorted({report["processes"] for report in reports})
    titles = ["1 process", *(f"1 of {count}" for count in counts[1:])]
    peaks: dict[tuple[str, str], dict[int, str]] = {}
    for report in reports:
        for method, found in report["methods"].items():
            title = TITLES.get(method, method)
            if found["kinds"]["projections"]:
                title += f", r = {report['rank']}"
            of_model = peaks.setdefault((_model(report), title), {})
            of_model[report["processes"]] = _gib(found["peak"])
    return table(
        ["Model", "Step", *titles],
        ([*names, *(found.get(n, "") for n in counts)] for names, found in peaks.items()),
    )


def messages(reports: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table of GiB that a process sends: a row for each model, method and number."""
    rows = []
    for report in reports:
        for method, found in report["methods"].items():
            if (sent := found["sent"]) is not None:
                cells = [_model(report), str(report["processes"]), TITLES.get(method, method)]
                rows.append([*cells, *(_gib(sent[kind]) for kind in COLLECTIVES)])
    return table(["Model", "Processes", "Step", *COLLECTIVES], rows)


def of_few_bits(reports: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table in GiB: a row for each quantised model, smallest first."""
    kinds = ("weights", "optimizer state", "saved activations", "temporary")
    rows = []
    for report in sorted(reports, key=lambda report: report["parameters"]):
        (found,) = report["methods"].values()
        cells = [_gib(found["kinds"][kind]) for kind in kinds]
        names = [_model(report), f"{report['bits']}", f"{report['rank']}"]
        rows.append([*names, *cells, _gib(found["peak"])])
    return table(["Model", "bits", "r", *kinds, "peak"], rows)


def _model(report: Mapping[str, Any]) -> str:
    return f"{report['model']}, {report['parameters'] / 1e9:.1f} billion parameters"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
