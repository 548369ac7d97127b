"""Which batch fits a card, and what would make a larger one fit: found by simulating, each time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from dp_grape_hf.arguments import METHODS
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.memory.step import Setting
from dp_grape_hf.memory.timeline import Peak

Simulate = Callable[[Setting], Peak]
Foresee = Callable[[int, int, int], int | None]
"""Two batch sizes that were simulated and a third -> the peak of the third in bytes, or None."""
GIB = 2**30

MOST_SAMPLES = 2**16


@dataclass(frozen=True)
class Knob:
    """A change of setting that takes less memory, and what it costs."""

    name: str
    option: str  # of ``dp-grape memory``
    cost: str
    turn: Callable[[Setting], Setting]
    projected_only: bool = False


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
        "small updates are rounded away unless float32_updates=True",
        lambda s: replace(s, dtype=torch.bfloat16),
    ),
    Knob(
        "a quarter of the rank",
        "--rank r/4",
        "coarser updates",
        lambda s: replace(s, rank=max(1, s.rank // 4)),
        projected_only=True,
    ),
)


@dataclass(frozen=True)
class Turned:
    """What one knob does to the peak, and whether it is part of the way to fit."""

    knob: Knob
    setting: Setting  # with this knob alone
    peak: Peak


@dataclass(frozen=True)
class Fit:
    """What to turn so that a step fits: the knobs in order, and the peak with all of them."""

    knobs: tuple[Knob, ...]
    peak: Peak
    fits: bool


def turn_each(simulate: Simulate, setting: Setting) -> list[Turned]:
    """Returns what each applicable knob does alone, at the batch size of the setting."""
    found = []
    for knob in KNOBS:
        changed = knob.turn(setting)
        if changed == setting or not _applies(knob, setting):
            continue
        try:
            found.append(Turned(knob, changed, simulate(changed)))
        except PrivacyError:
            continue  # a combination that no run can have
    return found


def turn_until_it_fits(
    simulate: Simulate, setting: Setting, limit: int, alone: list[Turned]
) -> Fit:
    """Returns the first knobs, those that save most alone first, with which the step fits.

    Args:
        simulate: returns the peak of a setting.
        setting: what does not fit.
        limit: bytes.
        alone: what ``turn_each`` returned for the setting.
    """
    peak = simulate(setting)
    turned: list[Knob] = []
    for one in sorted(alone, key=lambda one: one.peak.total):
        if peak.total <= limit:
            break
        changed = one.knob.turn(setting)
        with_it = simulate(changed)
        if with_it.total < peak.total:
            setting, peak = changed, with_it
            turned.append(one.knob)
    return Fit(tuple(turned), peak, peak.total <= limit)


def largest_batch(
    total: Callable[[int], int], limit: int, start: int = 1, foresee: Foresee | None = None
) -> int:
    """Returns the largest batch size whose peak is at most ``limit`` bytes; 0 if there is none.

    The peak grows with the batch size, nearly along a line, so the next size to try is where the
    line through the two nearest known points meets the limit. What is returned was simulated, and
    so was the next size, unless it is ``MOST_SAMPLES``. Where peaks can be foreseen, a smaller and
    a larger size were simulated, and those in between follow from their allocations.

    >>> largest_batch(lambda size: 100 + 7 * size, 150)
    7
    >>> largest_batch(lambda size: 200, 150)
    0

    Args:
        total: batch size -> peak in bytes; it must not fall as the size grows.
        limit: bytes.
        start: the size to try first.
        foresee: from two sizes, what ``total`` would return for one between them; None if that
            does not follow.
    """
    tried: list[int] = []  # what was simulated
    known: dict[int, int] = {}

    def peak(size: int) -> int:
        below, above = [n for n in tried if n < size], [n for n in tried if n > size]
        if foresee is not None and below and above:
            if (foreseen := foresee(max(below), min(above), size)) is not None:
                return foreseen
        tried.append(size)
        return total(size)

    low, high = 0, MOST_SAMPLES + 1  # low fits, high does not, as far as it matters
    guess = start
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        known[guess] = peak(guess)
        low, high = (guess, high) if known[guess] <= limit else (low, guess)
        if high > MOST_SAMPLES:
            guess = 8 * low if len(known) == 1 else _crossing(known, limit)
        elif len(known) % 2 == 0:  # a line from one side alone can be long in coming nearer
            guess = (low + high) // 2
        else:
            guess = _crossing(known, limit, low, high)
    return low


def _crossing(known: dict[int, int], limit: int, *ends: int) -> int:
    """Returns where the line through two known points meets the limit."""
    sizes = sorted(known)
    if len(sizes) == 1:
        return sizes[0] * limit // known[sizes[0]]
    a, b = ends if ends and set(ends) <= set(sizes) else sizes[-2:] if not ends else sizes[:2]
    slope = (known[b] - known[a]) / (b - a)
    furthest = 8 * sizes[-1]
    return min(int(a + (limit - known[a]) / slope), furthest) if slope > 0 else furthest


def _applies(knob: Knob, setting: Setting) -> bool:
    row = METHODS.get(setting.method)  # None for torch's own AdamW
    return not knob.projected_only or (row is not None and row.projection != "identity")
