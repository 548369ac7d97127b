"""Compare the memory of several methods, and find the largest batch that fits a card."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from dp_grape_hf.arguments import METHODS
from dp_grape_hf.memory.from_config import ModelOfConfig
from dp_grape_hf.memory.step import (
    ADAMW,
    COMPARED,
    DP_ADAM,
    DP_ADAM_DENSE,
    Setting,
    compared,
    simulate,
)
from dp_grape_hf.memory.timeline import KINDS, Footprint
from dp_grape_hf.tables import table

_GIB = 2**30

RESERVE = 1.0  # GiB of a card that CUDA needs in addition to tensors
MOST_SAMPLES = 2**16  # the largest batch that is tried

TITLES: Mapping[str, str] = {
    **{name: row.title for name, row in METHODS.items()},
    ADAMW: "AdamW",
    DP_ADAM_DENSE: f"{METHODS[DP_ADAM].title} dense",
}
"""Name -> usual name of each method that can be compared."""


def heading(model: ModelOfConfig, setting: Setting) -> str:
    """Return a model, its batch and the options of a step, in words."""
    options = (
        f"{_name(setting.dtype)} weights, rank {setting.rank}",
        "" if setting.projection == "gaussian" else f"{setting.projection} projections",
        "gradient checkpointing" if setting.gradient_checkpointing else "",
    )
    return (
        f"{model.name}, {model.parameters / 1e6:,.0f} million parameters\n"
        f"batch {setting.batch_size}, {model.length}, {', '.join(filter(None, options))}\n"
    )


def plan(
    model: ModelOfConfig,
    setting: Setting,
    methods: Sequence[str] = COMPARED,
    gpu_memory: float | None = None,
    tick: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Simulate a step by each of some methods, and find the largest batch that fits a card.

    Args:
        model: the model.
        setting: the setting of the step; its method is ignored.
        methods: names as ``compared`` takes them.
        gpu_memory: of the card in GiB, of which CUDA needs ``RESERVE``; None for no card.
        tick: called after each simulation.

    Returns:
        The figures as JSON data, for each method and in bytes.

    Raises:
        PrivacyError: for a combination that no run can have.
    """

    @cache
    def simulated(setting: Setting) -> Footprint:
        footprint = simulate(model.build, model.batch, setting)
        tick()
        return footprint

    def figures(setting: Setting) -> dict[str, Any]:
        def peak(size: int) -> int:
            return simulated(replace(setting, batch_size=size)).total

        found, largest = simulated(setting), None
        if gpu_memory is not None:
            limit = int((gpu_memory - RESERVE) * _GIB)
            largest = largest_batch(peak, limit, setting.batch_size)
        result = {"peak": found.total, "reached_in": found.phase, "kinds": found.kinds}
        return result | {"largest_batch": largest}

    return {
        "model": model.name,
        "parameters": model.parameters,
        "batch_size": setting.batch_size,
        "length": model.length,
        "dtype": _name(setting.dtype),
        "projection": setting.projection,
        "rank": setting.rank,
        "gpu_memory_gib": gpu_memory,
        "methods": {name: figures(compared(name, setting)) for name in methods},
    }


def as_text(planned: Mapping[str, Any]) -> str:
    """Return the result of ``plan`` as tables, in GiB."""
    methods = planned["methods"]
    rows = [["peak memory, GiB", *(TITLES[name] for name in methods)]]
    rows += [[kind, *(_gib(found["kinds"][kind]) for found in methods.values())] for kind in KINDS]
    rows.append(["total", *(_gib(found["peak"]) for found in methods.values())])
    rows.append(["reached in", *(found["reached_in"] for found in methods.values())])
    if (card := planned["gpu_memory_gib"]) is None:
        return table(rows, "<>")
    fits = [[TITLES[name], _fits(found["largest_batch"])] for name, found in methods.items()]
    title = f"On a {card:g} GiB card, {RESERVE:g} GiB of it left to CUDA:\n"
    return f"{table(rows, '<>')}\n{title}{table(fits)}"


def largest_batch(peak: Callable[[int], int], limit: int, start: int) -> int:
    """Return the largest batch size whose peak is at most ``limit`` bytes; 0 if there is none.

    Sizes are doubled from ``start`` until one does not fit, and then bisected. ``peak`` returns the
    peak of a batch size, which must not fall as the size grows.
    """
    fits, size = 0, min(start, MOST_SAMPLES)
    while fits < size and peak(size) <= limit:
        fits, size = size, min(2 * size, MOST_SAMPLES)
    return bisect_right(range(size), limit, lo=fits + 1, key=peak) - 1


def _fits(largest: int) -> str:
    if largest == 0:
        return "does not fit, even B=1"
    return f"fits up to B={largest}" + (" or more" if largest >= MOST_SAMPLES else "")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f}"
