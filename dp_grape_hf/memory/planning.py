"""Compare the memory of several methods, and find the largest batch that fits a card."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

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
        f"one of {setting.processes} processes" if setting.processes > 1 else "",
    )
    return (
        f"{model.name}, {model.parameters / 1e6:,.0f} million parameters\n"
        f"batch {setting.batch_size}, {model.length}, {', '.join(filter(None, options))}\n"
    )


@dataclass
class Plan:
    """The memory of a step by several methods. Text is in GiB, JSON in bytes.

    Args:
        model: the model.
        setting: the setting of the step; its method is ignored.
        footprints: method -> footprint of its step.
        gpu_memory: of a card, in GiB; None if the step need not fit one.
        largest: method -> the largest batch that fits the card; empty without a card.
    """

    model: ModelOfConfig
    setting: Setting
    footprints: Mapping[str, Footprint]
    gpu_memory: float | None = None
    largest: Mapping[str, int] = field(default_factory=dict)

    def as_json(self) -> str:
        """Return the figures."""
        methods = {
            method: {
                "peak": footprint.total,
                "reached_in": footprint.phase,
                "kinds": footprint.kinds,
                "largest_batch": self.largest.get(method),
            }
            for method, footprint in self.footprints.items()
        }
        result = {
            "model": self.model.name,
            "parameters": self.model.parameters,
            "batch_size": self.setting.batch_size,
            "length": self.model.length,
            "dtype": _name(self.setting.dtype),
            "projection": self.setting.projection,
            "rank": self.setting.rank,
            "processes": self.setting.processes,
            "gpu_memory_gib": self.gpu_memory,
            "methods": methods,
        }
        return json.dumps(result, indent=2) + "\n"

    def as_text(self) -> str:
        """Return the tables."""
        footprints = self.footprints.values()
        rows = [["peak memory, GiB", *(TITLES[method] for method in self.footprints)]]
        rows += [[kind, *(_gib(found.kinds[kind]) for found in footprints)] for kind in KINDS]
        rows.append(["total", *(_gib(found.total) for found in footprints)])
        rows.append(["reached in", *(found.phase for found in footprints)])
        parts = [heading(self.model, self.setting), table(rows, "<>")]
        if self.gpu_memory is not None:
            title = f"On a {self.gpu_memory:g} GiB card, {RESERVE:g} GiB of it left to CUDA:\n"
            parts.append(title + table([[TITLES[n], _fits(b)] for n, b in self.largest.items()]))
        return "\n".join(parts)


def plan(
    model: ModelOfConfig,
    setting: Setting,
    methods: Sequence[str] = COMPARED,
    gpu_memory: float | None = None,
    tick: Callable[[], object] = lambda: None,
) -> Plan:
    """Simulate a step by each of some methods, and find the largest batch that fits a card.

    Args:
        model: the model.
        setting: the setting of the step; its method is ignored.
        methods: names as ``compared`` takes them.
        gpu_memory: of the card in GiB, of which CUDA needs ``RESERVE``; None for no card.
        tick: called after each simulation.

    Raises:
        PrivacyError: for a combination that no run can have.
    """

    @cache
    def simulated(setting: Setting) -> Footprint:
        footprint = simulate(model.build, model.batch, setting)
        tick()
        return footprint

    settings = {name: compared(name, setting) for name in methods}
    result = Plan(model, setting, {n: simulated(s) for n, s in settings.items()}, gpu_memory)
    if gpu_memory is not None:
        limit = int((gpu_memory - RESERVE) * _GIB)

        def largest(setting: Setting) -> int:
            def peak(size: int) -> int:
                return simulated(replace(setting, batch_size=size)).total

            return largest_batch(peak, limit, setting.batch_size)

        result.largest = {method: largest(setting) for method, setting in settings.items()}
    return result


def largest_batch(peak: Callable[[int], int], limit: int, start: int) -> int:
    """Return the largest batch size whose peak is at most ``limit`` bytes; 0 if there is none.

    Sizes are doubled from ``start`` until one does not fit, and then bisected.

    Args:
        peak: returns the peak of a batch size, which must not fall as the size grows.
        limit: bytes.
        start: the size to try first.
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
