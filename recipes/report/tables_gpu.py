"""Throughput and memory that the paper measured on its GPU, next to rows of ``gpu_report``.

A row stands next to a number of the paper if it has the same model, the same method, whole float32
numbers and, if it projects, the paper's rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recipes.common.markdown import BLANK, NOT_RUN, beside, bullets, headings, shown, table
from recipes.gpu_report.table import ADAMW, MATERIALISED
from recipes.paper.methods import METHODS
from recipes.paper.sweep import title_of

GB = 1e9  # bytes, as in the paper

Spec = Mapping[str, Any]
"""A part of ``paper_tables.yaml``."""


@dataclass(frozen=True)
class Measured:
    """The measurements on a GPU, and the simulated ones."""

    rows: Sequence[Mapping[str, Any]] = ()  # those of ``gpu_report``
    # peaks in bytes, by model, method and batch size (``recipes.paper.memory_curves``)
    curves: Mapping[str, Mapping[str, Mapping[str, int]]] = field(default_factory=dict)

    def row(self, model: Spec, title: str, batch_size: int | None = None) -> Mapping[str, Any]:
        """Return the row of a model by what ``gpu_report`` calls a method; empty if none."""
        for found in self.rows:
            same = (found["model"], found["precision"], found["method"])
            if (
                same == (model["measured"], "float32", title)
                and found.get("rank", model["rank"]) == model["rank"]
                and batch_size in (None, found["batch_size"])
                and "failed" not in found
            ):
                return found
        return {}

    def step(self, model: Spec, method: str) -> Mapping[str, Any]:
        """Return the row of a model of the paper's timings and a method; empty if there is none."""
        return self.row(model, ADAMW if method == "adam" else METHODS[method].title)


def timings(measured: Measured, paper: Spec) -> str:
    """Return throughput and hours, the paper's and ours."""
    rows = []
    for model in paper["timings"]:
        for line in model["rows"]:
            theirs = [shown(line[name], BLANK) for name in ("samples_per_second", "hours")]
            ours, where = [NOT_RUN, NOT_RUN], BLANK
            if found := measured.step(model, line["method"]):
                where = f"B={found['batch_size']}; {found['device']}"
                ours = ["OOM", "OOM"]
                if rate := found.get("samples_per_second"):
                    hours = line["steps"] * model["batch_size"] / rate / 3600
                    ours = [f"{rate:.1f}", f"{hours:.2g}"]
            names = [f"{model['model']} (`{model['label']}`)", title_of(line["method"])]
            rows.append([*names, *beside(theirs, ours), where])
    head = ["Model", "Method", *headings(["samples/s", "hours"]), "measured with"]
    notes = bullets(paper["timing_notes"])
    return f"## Throughput and hours\n\n{table(head, rows)}\n{notes}"


def memory(measured: Measured, paper: Spec) -> str:
    """Return reserved memory and the share saved against DP-Adam: the paper's, ours, simulated."""
    rows = []
    for model in paper["memory_measured"]:
        for line in model["rows"]:
            title, size = line["title"], line["batch_size"]
            theirs = [shown(line.get("gb"), BLANK), shown(line.get("saved"), BLANK)]
            found = measured.row(model, title, size)
            ours, where = [NOT_RUN, NOT_RUN], BLANK
            if found:
                where = found["device"]
                ours = ["OOM", BLANK]
                if reserved := found.get("reserved"):
                    whole = measured.row(model, MATERIALISED, size)
                    ours = [f"{reserved / GB:.1f}", _saved(reserved, whole.get("reserved"))]
            curves = measured.curves.get(model["measured"], {})
            ranked = title if title in curves else f"{title}, r = {model['rank']}"
            peak = curves.get(ranked, {}).get(str(size))
            whole_peak = curves.get(MATERIALISED, {}).get(str(size))
            simulated = [f"{peak / GB:.1f}", _saved(peak, whole_peak)] if peak else [NOT_RUN, BLANK]
            cells = [*beside(theirs, ours), *simulated, where]
            rows.append([model["model"], title, str(size), *cells])
    head = ["Model", "Method", "B", *headings(["GB", "saved against DP-Adam"]), "GB, simulated"]
    found = table([*head, "saved, simulated", "measured with"], rows)
    return f"## Memory\n\nOf all that a method takes:\n\n{found}\n{bullets(paper['memory_notes'])}"


def _saved(size: float, whole: float | None) -> str:
    return BLANK if whole is None or whole == size else f"{1 - size / whole:.1%}"
