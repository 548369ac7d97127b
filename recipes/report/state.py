"""How much of the paper's tables was reproduced."""

from __future__ import annotations

from itertools import product

from recipes.common.markdown import BLANK, NOT_RUN, table
from recipes.report.tables import Cells, places_of
from recipes.report.tables_gpu import Measured, Spec

FORMULAS = {
    "tab:alg-comp": "a comparison in words; what runs here is in [methods](#methods)",
    "tab:memory-usage-comp": "formulas; `python -m recipes.paper.memory` computes them for a model",
}
"""The tables without measurements."""


def of_tables(ours: Cells, measured: Measured, paper: Spec) -> str:
    """Returns a line for each table of the paper: how many of its numbers we have, too."""
    rows = [[f"`{label}`", BLANK, said] for label, said in FORMULAS.items()]
    for name, spec in paper["tables"].items():
        places = places_of(spec)
        wanted = {(r["method"], *p, r.get("epsilon")) for r, p in product(spec["rows"], places)}
        found = len(wanted & ours.keys())
        cells = f"{NOT_RUN}: " * (not found) + f"{found} of {len(wanted)} cells"
        rows.append([f"`{spec['label']}`", spec["title"], cells])
        label = paper["settings"][name]["label"]
        if label.startswith("tab:"):
            rows.append([f"`{label}`", "settings behind it", "in the printed sweeps"])
    for label in dict.fromkeys(spec["label"] for spec in paper["timings"]):
        own = [
            measured.step(spec, line["method"])
            for spec in paper["timings"]
            for line in spec["rows"]
            if spec["label"] == label
        ]
        here = sum(map(bool, own))
        rows.append([f"`{label}`", "throughput and hours", f"{here} of {len(own)} rows measured"])
    unique = {row[0]: row for row in rows}
    return table(["The paper's", "What", "State"], unique.values())
