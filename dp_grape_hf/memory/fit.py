"""Which batch fits a card, and what would make a larger one fit: found by simulating, each time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from dp_grape_hf.arguments import METHODS
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.memory.step import Setting
from dp_grape_hf.memory.timeline import Peak, Trace, interpolated

MOST_SAMPLES = 2**16

# ---- The largest batch ----


def largest_batch(simulate: Callable[[int], Trace], limit: int, start: int) -> int:
    """Returns the largest batch size whose peak is at most ``limit`` bytes; 0 if there is none.

    Sizes are tried until one fits and another does not; what lies between those follows from their
    traces, or else is simulated too.

    Args:
        simulate: returns the trace of a batch size, whose peak must not fall as the size grows.
        limit: bytes.
        start: the size to try first.
    """
    traces: dict[int, Trace] = {}

    def peak(size: int) -> int:
        below, above = [n for n in traces if n < size], [n for n in traces if n > size]
        if below and above:
            few, many = max(below), min(above)
            between = interpolated((few, traces[few]), (many, traces[many]), size)
            if between is not None:
                return between.total()
        traces[size] = simulate(size)
        return traces[size].total()

    low, high = 0, MOST_SAMPLES + 1  # low fits, high does not, as far as it matters
    size = min(start, MOST_SAMPLES)
    while high - low > 1:
        low, high = (size, high) if peak(size) <= limit else (low, size)
        if high > MOST_SAMPLES:
            size = min(8 * low, MOST_SAMPLES)
        elif low == 0:
            size = max(1, high // 8)
        else:
            size = (low + high) // 2
    return low


# ---- What would make a larger one fit ----


class Knob(NamedTuple):
    """A change of setting that takes less memory, and what it costs."""

    name: str
    option: str  # of ``dp-grape memory``
    cost: str
    turn: Callable[[Setting], Setting]  # which leaves a setting as it is where it does not apply


def _smaller_rank(setting: Setting) -> Setting:
    method = METHODS.get(setting.method)  # None for torch's own AdamW
    if method is None or method.projection == "identity":
        return setting
    return replace(setting, rank=max(1, setting.rank // 4))


KNOBS = (
    Knob(
        "gradient checkpointing",
        "--gradient_checkpointing",
        "one more forward pass",
        lambda s: replace(s, gradient_checkpointing=True),
    ),
    Knob(
        "bfloat16 weights",
        "--dtype bfloat16",
        "weights of 8 significant bits",
        lambda s: replace(s, dtype=torch.bfloat16),
    ),
    Knob("a quarter of the rank", "--rank {rank}", "coarser updates", _smaller_rank),
)


@dataclass(frozen=True)
class Turned:
    """What one knob does to the peak."""

    knob: Knob
    setting: Setting  # with this knob alone
    peak: Peak

    @property
    def option(self) -> str:
        """How ``dp-grape memory`` is told to turn it."""
        return self.knob.option.format(rank=self.setting.rank)


@dataclass(frozen=True)
class Fit:
    """What to turn so that a step fits, and the peak with all of it."""

    options: list[str]  # in the order of ``KNOBS``
    peak: Peak
    fits: bool


def turn_each(simulate: Callable[[Setting], Peak], setting: Setting) -> list[Turned]:
    """Returns what each applicable knob does alone, at the batch size of the setting."""
    found = []
    for knob in KNOBS:
        changed = knob.turn(setting)
        if changed == setting:
            continue
        try:
            found.append(Turned(knob, changed, simulate(changed)))
        except PrivacyError:
            continue  # a combination that no run can have
    return found


def turn_until_it_fits(
    simulate: Callable[[Setting], Peak], setting: Setting, limit: int, alone: list[Turned]
) -> Fit:
    """Turns one knob after another, what saves most alone first, until the step fits.

    Args:
        simulate: returns the peak of a setting.
        setting: what does not fit.
        limit: bytes.
        alone: what ``turn_each`` returned for the setting.
    """
    peak = simulate(setting)
    turned = []
    for one in sorted(alone, key=lambda one: one.peak.total):
        if peak.total <= limit:
            break
        changed = one.knob.turn(setting)
        with_it = simulate(changed)
        if with_it.total < peak.total:
            setting, peak = changed, with_it
            turned.append(one)
    return Fit([one.option for one in alone if one in turned], peak, peak.total <= limit)
