"""Render the results of `dp-grape memory --json` as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recipes.common.markdown import table

GIB = 2**30
KINDS = ("weights", "optimizer state", "projections", "saved activations", "temporary")
TITLES = {"adamw": "AdamW", "dp_grape": "DP-GRAPE", "dp_lora": "DP-LoRA"}


def as_markdown(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return a table in GiB: a row for each method of each report, smaller models first."""
    rows = []
    for report in sorted(reports, key=lambda report: report["parameters"]):
        model = f"{report['model']}, {report['parameters'] / 1e6:,.0f} million parameters"
        bits, processes = report.get("bits"), report.get("processes", 1)
        for method, found in report["methods"].items():
            title = TITLES.get(method, method)
            if found["kinds"]["projections"]:
                title += ", principal" * (report["projection"] == "principal")
            if method != "adamw":
                title += f", r = {report['rank']}"
            title += f", {bits} bits" * bool(bits)
            title += f", one of {processes} processes" * (processes > 1)
            sizes = [*(found["kinds"][kind] for kind in KINDS), found["peak"]]
            batch = f"B = {report['batch_size']}, {report['length']}"
            rows.append([model, batch, title, *(f"{size / GIB:.2f}" for size in sizes)])
    return table(["Model", "Batch", "Step", *KINDS, "peak"], rows)
