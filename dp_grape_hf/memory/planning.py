"""What a step of several methods takes, beside a card: figures, and how they are shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

from dp_grape_hf.arguments import METHODS
from dp_grape_hf.memory.fit import (
    MOST_SAMPLES,
    Fit,
    Turned,
    largest_batch,
    turn_each,
    turn_until_it_fits,
)
from dp_grape_hf.memory.from_config import ModelOfConfig
from dp_grape_hf.memory.step import (
    ADAMW,
    COMPARED,
    DP_ADAM,
    DP_ADAM_DENSE,
    DP_GRAPE,
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
        chosen: the method that the knobs are turned for, if they are.
        turned: what each knob does.
        fit: what makes the chosen method fit, if it does not.
    """

    footprints: Mapping[str, Footprint]
    card: Card | None = None
    largest: Mapping[str, int] = field(default_factory=dict)
    chosen: str | None = None
    turned: list[Turned] = field(default_factory=list)
    fit: Fit | None = None

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
        knobs = [
            {"name": t.knob.name, "option": t.option, "peak": t.peak.total, "cost": t.knob.cost}
            for t in self.turned
        ]
        fit = self.fit and {
            "options": self.fit.options,
            "peak": self.fit.peak.total,
            "fits": self.fit.fits,
        }
        result = {
            **self.request(),
            "gpu_memory_and_reserve_gib": self.card,
            "methods": methods,
            "knobs_for": self.chosen,
            "knobs": knobs,
            "fit": fit,
        }
        return json.dumps(result, indent=2) + "\n"

    def as_text(self) -> str:
        """Returns the tables."""
        parts = [self.heading(), self._peaks()]
        if self.setting.processes > 1:
            parts.append(self._sent())
        if self.card is not None:
            parts.append(self._card(self.card))
        if self.chosen is not None:
            parts.append(self._knobs(self.chosen))
        if self.card and self.chosen and self.fit:
            parts.append(self._way(self.card, self.chosen, self.fit))
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

    def _knobs(self, chosen: str) -> str:
        if not self.turned:
            return f"Nothing is left to turn for {TITLES[chosen]}.\n"
        before = self.footprints[chosen].total
        rows = [["", "GiB", "saves", "", "costs"]]
        rows += [
            [t.knob.name, _gib(t.peak.total), _gib(before - t.peak.total), t.option, t.knob.cost]
            for t in self.turned
        ]
        size = self.setting.batch_size
        heading = f"What saves memory for {TITLES[chosen]} at B={size}, each alone:\n"
        return heading + table(rows, "<>><")

    def _way(self, card: Card, chosen: str, fit: Fit) -> str:
        verb = "fits" if fit.fits else "still does not fit"
        return (
            f"{TITLES[chosen]} at B={self.setting.batch_size} {verb} a {card.memory:g} GiB card "
            f"with: {' '.join(fit.options) or '(nothing helps)'} ({_gib(fit.peak.total)} GiB)\n"
        )


def plan(
    model: ModelOfConfig,
    setting: Setting,
    methods: Sequence[str] = COMPARED,
    card: Card | None = None,
    knobs: bool = False,
    tick: Callable[[], object] = lambda: None,
) -> Plan:
    """Simulates a step by each of some methods, and what makes it fit a card.

    Args:
        model: the model.
        setting: what to run, by whatever method.
        methods: names as ``compared`` takes them.
        card: also find the largest batch of each method that fits it.
        knobs: also find what saves memory where the batch fits.
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
            lambda size: simulated(replace(setting, batch_size=size)).trace,
            limit,
            setting.batch_size,
        )

    settings = {name: compared(name, setting) for name in methods}
    found = Plan(model, setting, {name: simulated(own) for name, own in settings.items()}, card)
    name = DP_GRAPE if DP_GRAPE in settings else methods[0]
    own, too_large = settings[name], False
    if card is not None:
        found.largest = {method: largest(own, card.limit) for method, own in settings.items()}
        too_large = simulated(own).total > card.limit
    if knobs or too_large:
        found.chosen, found.turned = name, turn_each(simulated, own)
    if card is not None and too_large:
        found.fit = turn_until_it_fits(simulated, own, card.limit, found.turned)
    return found


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f}"
