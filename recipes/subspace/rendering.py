"""Render the measured shares as a table and as a figure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from recipes.common.markdown import table
from recipes.common.plots import Panels, logarithmic
from recipes.subspace.energies import SOURCES

Record = Mapping[str, Any]


def read_results(folder: Path) -> list[Record]:
    """Return the records in the files of a folder, sorted by model and data."""
    paths = sorted(folder.glob("*.json"), key=lambda path: path.name.lower())
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def as_markdown(records: Sequence[Record]) -> str:
    """Return a table: all layers together, and in brackets median, minimum and maximum."""
    records = sorted(records, key=lambda record: _title(record).lower())
    ranks = sorted({int(rank) for record in records for rank in record["layers"]})
    return table(
        ["Model, data", "P from", *(f"r = {rank}" for rank in ranks)],
        (
            [_title(record), SOURCES[source], *(_cell(shares.get(str(rank))) for rank in ranks)]
            for record in records
            for source, shares in record["shares"].items()
        ),
    )


def _title(record: Record) -> str:
    return f"{record['model']}, {record['data']}"


def _cell(share: Mapping[str, float] | None) -> str:
    if share is None:
        return ""
    among = f"{share['median']:.0%}, {share['min']:.0%} to {share['max']:.0%}"
    return f"{share['together']:.0%} ({among})"


def draw(records: Sequence[Record]) -> Figure:
    """Return a plot of the shares of all layers together against r, a panel for each record."""
    panels = Panels(
        [_title(record) for record in records], "Per-sample gradient energy that P keeps"
    )
    for panel, record in zip(panels.axes, records, strict=True):
        for source, shares in record["shares"].items():
            points = {float(r): (100 * share["together"], None, 1) for r, share in shares.items()}
            if points:
                panels.line(panel, SOURCES[source], points)
        logarithmic(panel, [float(rank) for rank in record["layers"]])
        panel.set_ylim(0, 100)
    return panels.finished("rank r", "% of all layers together")
