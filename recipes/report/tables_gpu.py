"""Throughput and memory that the paper measured on its GPU, next to rows of ``gpu_report``.

A row stands next to a number of the paper if it has the same model, the same method, whole float32
numbers and, if it projects, the paper's rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from recipes.common.markdown import (
    BLANK,
    NOT_RUN,
    beside,
    bullets,
    header,
    headings,
    row,
    shown,
)
from recipes.gpu_report.table import ADAMW, GIB
from recipes.report.findings import Findings, title_of
from recipes.report.paper_match import Spec

GB = 1e9  # bytes, as in the paper


def timings(findings: Findings, paper: Spec) -> Iterator[str]:
    """Yield throughput and hours, the paper's and ours."""
    yield from ("## Throughput and hours", "")
    yield from header(["Model", "Method", *headings(["samples/s", "hours"]), "measured with"])
    for model in paper["timings"]:
        for line in model["rows"]:
            theirs = [shown(line[name], BLANK) for name in ("samples_per_second", "hours")]
            ours, where = [NOT_RUN, NOT_RUN], BLANK
            if found := measured(findings, model, line["method"]):
                where = f"B={found['batch_size']}; {found['device']}"
                ours = ["OOM", "OOM"]
                if rate := found.get("samples_per_second"):
                    hours = line["steps"] * model["batch_size"] / rate / 3600
                    ours = [f"{rate:.1f}", f"{hours:.2g}"]
            names = [f"{model['model']} (`{model['label']}`)", title_of(line["method"])]
            yield row([*names, *beside(theirs, ours), where])
    yield ""
    yield from bullets(paper["timing_notes"])


def memory(findings: Findings, paper: Spec) -> Iterator[str]:
    """Yield reserved memory and the share saved against DP-Adam, the paper's and ours."""
    yield from ("## Memory", "", "Of all that a method takes:", "")
    columns = ["GB", "saved against DP-Adam"]
    yield from header(["Model", "Method", "B", *headings(columns), "GiB", "measured with"])
    for model in paper["memory_measured"]:
        for line in model["rows"]:
            theirs = [shown(line["gb"], BLANK), shown(line.get("saved"), BLANK)]
            found = measured(findings, model, line["method"], line["batch_size"])
            whole = measured(findings, model, "dp_adam", line["batch_size"])
            ours, gib, where = [NOT_RUN, NOT_RUN], BLANK, BLANK
            if found:
                where = found["device"]
                ours = ["OOM", BLANK]
                if size := found.get("reserved"):
                    saved = BLANK
                    if whole and "reserved" in whole and whole is not found:
                        saved = f"{1 - size / whole['reserved']:.1%}"
                    ours, gib = [f"{size / GB:.1f}", saved], f"{size / GIB:.1f}"
            names = [model["model"], title_of(line["method"]), str(line["batch_size"])]
            yield row([*names, *beside(theirs, ours), gib, where])
    yield ""
    yield from bullets(paper["memory_notes"])
    yield (
        "* `python -m recipes.paper.memory` simulates what a step of any model takes, and compares "
        "it with the paper's formulas (`tab:memory-usage-comp`)."
    )


def measured(
    findings: Findings, model: Spec, method: str, batch_size: int | None = None
) -> Mapping[str, Any] | None:
    """Return the row of a report for a model, a method and a batch size, if there is one.

    Args:
        findings: with the reports.
        model: a part of the paper's timings or memory, with ``measured`` and ``rank``.
        method: a name in ``METHODS``.
        batch_size: that the row must have; None for any.
    """
    title = ADAMW if method == "adam" else title_of(method)
    for report in findings.reports.values():
        for found in report:
            same = (found["model"], found["precision"], found["method"])
            if (
                same == (model["measured"], "float32", title)
                and found.get("rank", model["rank"]) == model["rank"]
                and batch_size in (None, found["batch_size"])
                and "failed" not in found
            ):
                return found
    return None
