"""Render the measured shares as a table and as a figure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from recipes.common import plots
from recipes.common.markdown import table
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
    panels = {
        _title(record): {
            SOURCES[source]: {float(r): (100 * v["together"], None, 1) for r, v in shares.items()}
            for source, shares in record["shares"].items()
            if shares
        }
        for record in records
    }
    title, axes = "Per-sample gradient energy that P keeps", ("rank r", "% of all layers together")
    return plots.draw(panels, title, axes, ("log", "linear"))
