"""What a step of several methods takes, beside a card: figures, and how they are shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

from dp_grape_hf.arguments import METHODS
from dp_grape_hf.memory.from_config import ModelOfConfig
from dp_grape_hf.memory.step import (
    ADAMW,
    COMPARED,
    DP_ADAM,
    DP_ADAM_DENSE,
    Footprint,
    Setting,
    compared,
    simulate,
)
from dp_grape_hf.memory.timeline import COLLECTIVES, KINDS
from dp_grape_hf.tables import table

_GIB = 2**30

TITLES: Mapping[str, str] = {
    **{name: row.title for name, row in METHODS.items()},
    ADAMW: "AdamW",
    DP_ADAM_DENSE: f"{METHODS[DP_ADAM].title} dense",
}
"""What people call each method that is compared."""


class Card(NamedTuple):
    """A GPU: its memory, and how much of it is not for tensors, in GiB."""

    memory: float
    reserve: float

    @property
    def limit(self) -> int:
        """What is for tensors, in bytes."""
        return int((self.memory - self.reserve) * _GIB)


@dataclass
class Report:
    """What is asked of a model: text has tables in GiB, JSON the figures in bytes.

    Args:
        model: the model.
        setting: what was asked for; its method does not count.
    """

    model: ModelOfConfig
    setting: Setting

    def request(self) -> dict[str, object]:
        """Returns what was asked for, by the names of ``Setting``."""
        return {
            "model": self.model.name,
            "parameters": self.model.parameters,
            "batch_size": self.setting.batch_size,
            "length": self.model.length,
            "dtype": str(self.setting.dtype).removeprefix("torch."),
            "projection": self.setting.projection,
            "rank": self.setting.rank,
            "bits": self.setting.bits,
            "processes": self.setting.processes,
        }

    def heading(self) -> str:
        """Returns the model, the batch and the options, in words."""
        setting = self.setting
        options = (
            f"{str(setting.dtype).removeprefix('torch.')} weights, rank {setting.rank}",
            "" if setting.projection == "gaussian" else f"{setting.projection} projections",
            "gradient checkpointing" if setting.gradient_checkpointing else "",
            f"linear layers in {setting.bits} bits" if setting.bits else "",
            f"one of {setting.processes} processes" if setting.processes > 1 else "",
        )
        return (
            f"{self.model.name}, {self.model.parameters / 1e6:,.0f} million parameters\n"
            f"batch {setting.batch_size}, {self.model.length}, {', '.join(filter(None, options))}\n"
        )


@dataclass
class Plan(Report):
    """What was found out about a step.

    Args:
        footprints: method -> what its step takes.
        card: what the step is to fit, if there is one.
        largest: method -> the largest batch that fits the card; empty without one.
    """

    footprints: Mapping[str, Footprint]
    card: Card | None = None
    largest: Mapping[str, int] = field(default_factory=dict)

    def as_json(self) -> str:
        """Returns the figures."""
        methods = {
            method: {
                "peak": taken.total,
                "reached_in": taken.phase,
                "kinds": taken.kinds,
                "phases": taken.phases,
                "sent": taken.sent if self.setting.processes > 1 else None,
                "largest_batch": self.largest.get(method),
            }
            for method, taken in self.footprints.items()
        }
        result = {
            **self.request(),
            "gpu_memory_and_reserve_gib": self.card,
            "methods": methods,
        }
        return json.dumps(result, indent=2) + "\n"

    def as_text(self) -> str:
        """Returns the tables."""
        parts = [self.heading(), self._peaks()]
        if self.setting.processes > 1:
            parts.append(self._sent())
        if self.card is not None:
            parts.append(self._card(self.card))
        return "\n".join(parts)

    def _peaks(self) -> str:
        peaks = self.footprints.values()
        rows = [["peak memory, GiB", *(TITLES[method] for method in self.footprints)]]
        for kind in KINDS:
            rows.append([kind, *(_gib(peak.kinds[kind]) for peak in peaks)])
        rows.append(["total", *(_gib(peak.total) for peak in peaks)])
        rows.append(["reached in", *(peak.phase for peak in peaks)])
        return table(rows, "<>")

    def _sent(self) -> str:
        rows = [["sent by a process in a step, GiB", *(TITLES[name] for name in self.footprints)]]
        for kind in COLLECTIVES:
            rows.append([kind, *(_gib(taken.sent[kind]) for taken in self.footprints.values())])
        return table(rows, "<>")

    def _card(self, card: Card) -> str:
        rows = []
        for method, largest in self.largest.items():
            fits = f"fits up to B={largest}" if largest else "does not fit, even B=1"
            rows.append([TITLES[method], fits + (" or more" if largest >= MOST_SAMPLES else "")])
        heading = f"On a {card.memory:g} GiB card, {card.reserve:g} GiB of it left to CUDA:\n"
        return heading + table(rows)


def plan(
    model: ModelOfConfig,
    setting: Setting,
    methods: Sequence[str] = COMPARED,
    card: Card | None = None,
    tick: Callable[[], object] = lambda: None,
) -> Plan:
    """Simulates a step by each of some methods, and the largest batch that fits a card.

    Args:
        model: the model.
        setting: what to run, by whatever method.
        methods: names as ``compared`` takes them.
        card: also find the largest batch of each method that fits it.
        tick: called after each simulation.

    Raises:
        PrivacyError: for a combination that no run can have.
    """

    @cache
    def simulated(setting: Setting) -> Footprint:
        found = simulate(model.build, model.batch, setting)
        tick()
        return found

    def largest(setting: Setting, limit: int) -> int:
        return largest_batch(
            lambda size: simulated(replace(setting, batch_size=size)).total,
            limit,
            setting.batch_size,
        )

    settings = {name: compared(name, setting) for name in methods}
    found = Plan(model, setting, {name: simulated(own) for name, own in settings.items()}, card)
    if card is not None:
        found.largest = {method: largest(own, card.limit) for method, own in settings.items()}
    return found


MOST_SAMPLES = 2**16


def largest_batch(peak: Callable[[int], int], limit: int, start: int) -> int:
    """Returns the largest batch size whose peak is at most ``limit`` bytes; 0 if there is none.

    A peak is nearly a constant and so many bytes for each sample. So sizes are tried where the line
    through two known sizes meets the limit, just above the largest that fits, and in the middle.

    Args:
        peak: returns the peak of a batch size, which must not fall as the size grows.
        limit: bytes.
        start: the size to try first.
    """
    low, high = 0, MOST_SAMPLES + 1  # low fits, high does not, as far as it matters
    peaks, turns = {0: 0}, 0
    size = min(start, MOST_SAMPLES)
    while high - low > 1:
        peaks[size] = peak(size)
        low, high = (size, high) if peaks[size] <= limit else (low, size)
        if high not in peaks:
            size = min(8 * low, MOST_SAMPLES)
        elif low == 0:
            size = max(1, high // 8)
        else:
            met = low + (limit - peaks[low]) * (high - low) // (peaks[high] - peaks[low])
            size = (met, low + 1, (low + high) // 2)[turns % 3]
            size, turns = min(max(size, low + 1), high - 1), turns + 1
    return low


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f}"
