"""Renders what ``gpu_report`` found as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dp_grape_hf.memory import ADAMW
from recipes.benchmark.methods import COMPILED, CORRELATED, MEASURED, PRINCIPAL
from recipes.common.markdown import table
from recipes.paper.methods import METHODS

GIB = 2**30
CLOSE = 0.1  # how far a simulation may be off, relative

TITLES = {
    ADAMW: "AdamW",
    COMPILED: "AdamW, torch_compile",
    "dp_grape": METHODS["dp_grape"].title,
    PRINCIPAL: f"{METHODS['dp_grape'].title}, principal",
    CORRELATED: f"{METHODS['dp_grape'].title}, principal, correlated noise",
    "dp_adam": METHODS["dp_adam"].title,
    "dp_adam_ghost": "DP-Adam, ghost",
    "dp_adam_materialise": "DP-Adam, materialised",
    **{name: METHODS[name].title for name in ("dp_galore", "dpzero")},
}
"""What trains, by the names of ``gpu_report``, which a rank may follow: ``dp_grape r=64``."""

MEASURED_HEAD = [
    *("B", "method", "allocated GiB", "reserved", "first step", "simulated"),
    *("measured / simulated", "ms per step", "samples/s", "speed of AdamW"),
]

Parts = Mapping[str, Mapping[str, Any]]


def render(parts: Parts) -> str:
    """Returns the report: where it is from, the checks, and a table per model."""
    lines = ["# Private training on a GPU", "", "Rendered by `python -m recipes.gpu_report`.", ""]
    lines += _origin(parts)
    if parts.get("quick"):
        lines += ["", "## A step", "", *_steps(parts["quick"])]
    if parts["checks"]:
        lines += ["", "## Correctness", "", *_checks(parts["checks"])]
    if parts["cells"] or parts["simulations"]:
        lines += ["", "## Memory and throughput", "", *_cells(parts)]
    return "\n".join(lines) + "\n"


def _origin(parts: Parts) -> list[str]:
    origins = dict.fromkeys(
        (
            entry["device"],
            ", ".join(f"{name} {version}" for name, version in entry["versions"].items()),
        )
        for part in ("quick", "checks", "cells")
        for entry in parts.get(part, {}).values()
    )
    entries = [entry for part in parts.values() for entry in part.values()]
    dates = sorted({entry["date"] for entry in entries})
    commits = dict.fromkeys(entry["git_commit"] or "unknown" for entry in entries)
    lines = [f"* {device}; {versions}" for device, versions in origins]
    when = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else ""
    return lines + ([f"* {when}; commit {', '.join(commits)}"] if dates else [])


STEP_HEAD = [
    *("Model", "trained by", "TF32", "ms per step", "ms to launch it", "ms of kernels"),
    *("kernels", "waits", "GiB", "speed of AdamW"),
]


def _steps(entries: Mapping[str, Any]) -> list[str]:
    """Returns the rows of ``quick``; AdamW's row of a model comes before the private one."""
    rows, baseline = [], dict[str, float]()
    for key, entry in entries.items():
        model, _, name = key.partition(": ")
        if "seconds" not in entry:
            why = entry.get("failed") or "out of memory"
            rows.append([model, name, *[""] * 7, why])
            continue
        if name == "AdamW":
            baseline[model] = entry["seconds"]
        times = [f"{1e3 * entry[k]:.1f}" for k in ("seconds", "host_seconds")]
        kernels = [""] * 4
        if "kernels" in entry:
            kernels = [f"{1e3 * entry['kernel_seconds']:.1f}", f"{entry['kernels']:,}"]
            kernels += [f"{entry['waits']}", f"{entry['allocated'] / GIB:.2f}"]
        speed = f"{baseline[model] / entry['seconds']:.2f}x" if model in baseline else ""
        rows.append([model, name, "yes" if entry["tf32"] else "", *times, *kernels, speed])
    return table(STEP_HEAD, rows).splitlines()


def title_of_way(method: str) -> str:
    """Returns what people call what trains."""
    name, _, rank = method.partition(" ")
    return f"{TITLES[name]}, {rank}" if rank else TITLES[name]


def _order(method: str) -> tuple[int, int]:
    name, _, rank = method.partition(" ")
    return [*TITLES].index(name), int(rank.removeprefix("r=") or 0)


def _checks(entries: Mapping[str, Any]) -> list[str]:
    rows, failed, skipped = [], [], {}
    for kind in dict.fromkeys(key.split(": ")[0] for key in entries):
        own = {key: e for key, e in entries.items() if key.split(": ")[0] == kind}
        done = [e for e in own.values() if "error" in e]
        passed = [e for e in done if "failed" not in e]
        failed += [f"* {key} failed: {e['failed']}" for key, e in own.items() if "failed" in e]
        reasons = [e["skipped"] for e in own.values() if "skipped" in e]
        skipped.update(dict.fromkeys(reasons))
        worst = f"{max(e['error'] for e in done):.0e}" if done else ""
        limit = f"{max(e['limit'] for e in done):.0e}" if done else ""
        counts = f"{len(own)}", f"{len(passed)}"
        rows.append([kind, *counts, worst, limit, f"{len(reasons) or ''}"])
    head = ["what", "checks", "passed", "largest relative error", "allowed", "skipped"]
    lines = [table(head, rows).rstrip("\n")]
    lines += ["", *failed] if failed else []
    return lines + (["", f"Skipped: {'; '.join(skipped)}."] if skipped else [])


def _cells(parts: Parts) -> list[str]:
    measured, simulated = parts["cells"], parts["simulations"]
    keys = list(dict.fromkeys([*measured, *simulated]))
    shapes: dict[str, list[tuple[int, str, str]]] = {}
    for key in keys:
        shape, batch, method = key.rsplit(", ", 2)
        shapes.setdefault(shape, []).append((int(batch.removeprefix("B=")), method, key))
    lines: list[str] = []
    for shape, cells in shapes.items():
        plain_keys = [key for _, method, key in cells if method in TITLES]
        found = [part[key] for part in (measured, simulated) for key in plain_keys if key in part]
        ranks = sorted({f"r={entry['rank']}" for entry in found if "rank" in entry})
        rows = []
        for size, method, key in sorted(cells, key=lambda cell: (cell[0], _order(cell[1]))):
            plain = measured.get(f"{shape}, B={size}, {ADAMW}", {})
            values = _row(measured.get(key, {}), simulated.get(key, {}), plain)
            rows.append([f"{size}", title_of_way(method), *values])
        lines += [f"### {shape}", ""]
        if ranks:
            lines += [f"Projections have {' or '.join(ranks)} where no other is named.", ""]
        lines.append(table(MEASURED_HEAD, rows))
    ratios = [r for key in keys if (r := ratio(measured.get(key, {}), simulated.get(key, {})))]
    if ratios:
        close = sum(abs(r - 1) <= CLOSE for r in ratios)
        lines.append(
            f"The simulation is within {CLOSE:.0%} of the measured peak in {close} of "
            f"{len(ratios)} cells; measured / simulated is between {min(ratios):.3f} and "
            f"{max(ratios):.3f}. The first step is apart: it also checks gradients against plain "
            "autograd, and makes the optimizer's state."
        )
    return lines


_SMALL = f"r={MEASURED['projection_rank']}"
SHORT = (ADAMW, "dp_grape", f"{PRINCIPAL} {_SMALL}", f"{CORRELATED} {_SMALL}", "dp_adam")
"""What the short table has, by the names of cells."""


def summary(parts: Parts) -> str:
    """Returns the short table: peak, samples in a second, and speed beside AdamW, by batch."""
    measured = parts["cells"]
    batches = dict.fromkeys(key.rsplit(", ", 1)[0] for key in measured)
    rows = []
    for batch in batches:
        plain = measured.get(f"{batch}, {ADAMW}", {})
        rows.append([batch, *(short(measured.get(f"{batch}, {way}", {}), plain) for way in SHORT)])
    return table(["Model, batch", *map(title_of_way, SHORT)], rows)


def short(found: Mapping[str, Any], plain: Mapping[str, Any]) -> str:
    """Returns peak memory, samples in a second and speed relative to AdamW of a cell."""
    if "out_of_memory" in found:
        return "out of memory"
    if "seconds" not in found:
        return "not run"
    speed = _speed(found, plain)
    beside = f" ({speed})" if speed else ""
    return f"{found['allocated'] / GIB:.1f} GiB, {found['samples_per_second']:.3g}/s{beside}"


def _speed(found: Mapping[str, Any], plain: Mapping[str, Any]) -> str:
    """Returns the speed beside AdamW; "" if that was not measured."""
    return f"{plain['seconds'] / found['seconds']:.2f}x" if "seconds" in plain else ""


def ratio(found: Mapping[str, Any], simulated: Mapping[str, Any]) -> float | None:
    """Returns the measured peak over the simulated one, if there are both."""
    if "allocated" not in found or "allocated" not in simulated or "out_of_memory" in found:
        return None
    return found["allocated"] / simulated["allocated"]


def _row(
    found: Mapping[str, Any], simulated: Mapping[str, Any], plain: Mapping[str, Any]
) -> list[str]:
    simulation = _gib(simulated.get("allocated"))
    if "out_of_memory" in found:
        return [f"out of memory in {found['out_of_memory']}", "", "", simulation, "", "", "", ""]
    if "seconds" not in found:
        return [found.get("failed", ""), "", "", simulation, "", "", "", ""]
    off = ratio(found, simulated)
    return [
        _gib(found["allocated"]),
        _gib(found.get("reserved")),
        _gib(found["first_step"]["allocated"]),
        simulation,
        "" if off is None else f"{off:.3f}",
        f"{1000 * found['seconds']:.1f}",
        f"{found['samples_per_second']:.1f}",
        _speed(found, plain),
    ]


def _gib(size: int | None) -> str:
    return "" if size is None else f"{size / GIB:.4g}"
