"""The table of what ``gpu_report`` measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from recipes.common.markdown import table

ADAMW, DP_GRAPE, PRINCIPAL, DP_ADAM = "AdamW", "DP-GRAPE", "DP-GRAPE, principal", "DP-Adam"
MATERIALISED = "DP-Adam, materialised"
"""The paper's DP-Adam: the whole gradient of every sample is kept, and not factors of it."""
GIB = 2**30
HEAD = [
    *("Model", "Precision", "Trained by", "ms per step", "ms to launch it", "ms of kernels"),
    *("kernels", "waits", "GiB", "samples/s", "speed of AdamW"),
]


def as_markdown(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a table; speeds are relative to AdamW in the same setting."""
    cells = []
    for row in results:
        model = f"{row['model']}, B={row['batch_size']}"
        rank = f", r={row['rank']}" if "rank" in row else ""
        names = [model, row["precision"], row["method"] + rank]
        if "seconds" not in row:
            cells.append([*names, *[""] * 7, row.get("failed") or "out of memory"])
            continue
        baseline = beside(results, row, ADAMW)
        speed = "" if baseline is None else f"{baseline['seconds'] / row['seconds']:.2f}x"
        cells.append(
            [
                *names,
                *(_number(row, key, "{:.1f}", 1e3) for key in ("seconds", "host_seconds")),
                _number(row, "kernel_seconds", "{:.1f}", 1e3),
                *(_number(row, key, "{:,.0f}") for key in ("kernels", "waits")),
                _number(row, "allocated", "{:.1f}", 1 / GIB),
                f"{row['samples_per_second']:.3g}",
                speed,
            ]
        )
    return table(HEAD, cells)


def beside(
    results: Sequence[Mapping[str, Any]], row: Mapping[str, Any], method: str
) -> Mapping[str, Any] | None:
    """Return the row of another method with the same model, batch and precision, if it ran."""
    same = ("model", "batch_size", "precision")
    found = (other for other in results if other["method"] == method and "seconds" in other)
    return next((other for other in found if all(other[n] == row[n] for n in same)), None)


def _number(row: Mapping[str, Any], key: str, form: str, scale: float = 1.0) -> str:
    return form.format(scale * row[key]) if key in row else ""
