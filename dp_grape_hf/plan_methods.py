"""Every method beside every other: time and memory of a step, next to the paper's formulas.

Memory is simulated. Time is measured on this machine, with random weights: each method is built
anew in every round, and the rounds go through the methods from another one on each time, so that a
busy moment of the machine does not hit one of them alone.

Shapes: m_l x n_l a weight, m_l its dimension that is projected; r rank, B samples in the batch.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.fakes import fake_tensors
from dp_grape_hf.memory import (
    ADAMW,
    METHODS,
    Footprint,
    Setting,
    Step,
    cast,
    footprint,
    prepared,
)
from dp_grape_hf.memory_report import GIB
from dp_grape_hf.methods import METHODS as ROWS
from dp_grape_hf.methods import Method
from dp_grape_hf.per_sample import AUTO, GRAD_SAMPLE_MODES, Inputs
from dp_grape_hf.placement import Placement, placements
from dp_grape_hf.targets import input_dimensions, projection_targets
from dp_grape_hf.timeline import Timeline

NUMBER = 4  # bytes of a float32
ROUNDS, TIMED = 3, 2  # steps timed in a round, after one that is not
UPDATE_STEPS = 100  # F, as far as time goes

Build = Callable[[torch.dtype], nn.Module]
Batch = Callable[[int], Inputs]


# ---- The paper's formulas ----


class Sizes(NamedTuple):
    """What the formulas of the paper's table on memory are made of, in numbers.

    Parameters that are not projected count as they do in DP-Adam (paper, Algorithm 1): all their
    numbers are a part of both sums that weights have.
    """

    batch: int  # B
    full: int  # sum_l m_l n_l
    coordinates: int  # r sum_l n_l
    projections: int  # r sum_l m_l
    largest: int  # r max_l m_l


class Formula(NamedTuple):
    """An entry of the table: how it is written, and its value."""

    text: str
    value: Callable[[Sizes], int]


class Formulas(NamedTuple):
    """A row of the table."""

    gradients: Formula
    optimizer: Formula
    projectors: Formula

    def bytes(self, sizes: Sizes) -> dict[str, int]:
        """Returns the values, by name, for numbers of four bytes."""
        return {name: NUMBER * formula.value(sizes) for name, formula in self._asdict().items()}


_SUMMED = Formula("sum m n", lambda s: s.full)
_PER_SAMPLE = Formula("B sum m n", lambda s: s.batch * s.full)
_MOMENTS = Formula("2 sum m n", lambda s: 2 * s.full)
_PROJECTED_MOMENTS = Formula("2 r sum n", lambda s: 2 * s.coordinates)
_NONE = Formula("-", lambda s: 0)
_KEPT = Formula("r sum m", lambda s: s.projections)

FORMULAS: Mapping[str, Formulas] = {
    "adam": Formulas(_SUMMED, _MOMENTS, _NONE),
    "galore": Formulas(_SUMMED, _PROJECTED_MOMENTS, _KEPT),
    "dp_adam": Formulas(_PER_SAMPLE, _MOMENTS, _NONE),
    "dp_galore": Formulas(_PER_SAMPLE, _PROJECTED_MOMENTS, _KEPT),
    "dp_grape": Formulas(
        Formula("B r sum n", lambda s: s.batch * s.coordinates),
        _PROJECTED_MOMENTS,
        Formula("r max m", lambda s: s.largest),
    ),
}
"""The paper's table ``memory-usage-comp``, by the names of ``methods.METHODS``."""


def sizes_of(
    shapes: Mapping[str, tuple[int, ...]], placed: Mapping[str, Placement], batch_size: int
) -> Sizes:
    """Returns the sizes of a model.

    >>> sizes_of({"w": (8, 32), "b": (8,)}, placements({"w": (8, 32)}, 2), 5)
    Sizes(batch=5, full=264, coordinates=72, projections=16, largest=16)

    Args:
        shapes: of all trainable parameters, by name.
        placed: those that are projected, and where.
        batch_size: B.
    """
    numbers = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    kept = {name: place.rank * numbers[name] // place.rows for name, place in placed.items()}
    projections = [place.rank * place.rows for place in placed.values()]
    return Sizes(
        batch_size,
        sum(numbers.values()),
        sum(kept.get(name, size) for name, size in numbers.items()),
        sum(projections),
        max(projections, default=0),
    )


def sizes_of_model(build: Build, setting: Setting) -> Sizes:
    """Returns the sizes of the model that is built, as a setting projects it."""
    with fake_tensors():
        model = build(setting.dtype)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    shapes = {name: tuple(parameter.shape) for name, parameter in trainable.items()}
    names = projection_targets(model, trainable, None, setting.project_embeddings)
    matrices = {name: shapes[name] for name in names}
    placed = placements(matrices, setting.rank, input_dims=input_dimensions(model))
    return sizes_of(shapes, placed, setting.batch_size)


# ---- Every method ----


@dataclass
class Compared:
    """A method, and what was found out about it.

    Args:
        title: what people call it, with the way it clips where there are several.
        setting: what was run.
        footprint: what a step takes; None if there can be no such run.
        refused: why there can be none.
        seconds: of a step, the median; None if it was not timed.
        redraw: by how many seconds a step takes longer if the projection is redrawn.
        skipped: why it was not timed.
    """

    title: str
    setting: Setting
    footprint: Footprint | None = None
    refused: str = ""
    seconds: float | None = None
    redraw: float | None = None
    skipped: str = ""
    times: list[float] = field(default_factory=list)
    redraw_times: list[float] = field(default_factory=list)

    @property
    def formulas(self) -> Formulas | None:
        """The method's row in the paper's table."""
        name = "adam" if self.setting.method == ADAMW else self.setting.method
        return FORMULAS.get(name)


def every_method(setting: Setting) -> list[Compared]:
    """Returns AdamW and all rows of the table of methods, some with each way to clip."""
    found = [Compared(METHODS[ADAMW], replace(setting, method=ADAMW))]
    for name, row in ROWS.items():
        for mode in GRAD_SAMPLE_MODES if _has_modes(row) else (setting.grad_sample_mode,):
            title = f"{row.title} {mode}" if _has_modes(row) else row.title
            found.append(Compared(title, replace(setting, method=name, grad_sample_mode=mode)))
    return found


def _has_modes(row: Method) -> bool:
    """Whether the full gradient of every weight is clipped."""
    other = row.projected or row.adapter or row.zeroth_order or row.norm_estimates
    return row.private and not other


def simulate_all(
    build: Build, batch: Batch, rows: list[Compared], tick: Callable[[], object]
) -> None:
    """Fills in the footprints, and why there can be none; ``tick`` is called after each."""
    for row in rows:
        try:
            row.footprint = footprint(build, batch, row.setting)
        except PrivacyError as error:
            row.refused = str(error)
        tick()


# ---- Time ----


def time_all(
    build: Build,
    batch: Batch,
    rows: list[Compared],
    device: torch.device,
    tick: Callable[[], object],
    at_hand: float | None = None,
) -> None:
    """Fills in the times of the methods whose step fits the memory of the device.

    Args:
        build: returns the model with weights of that dtype.
        batch: returns a batch of that size.
        rows: with their footprints.
        device: where they run.
        tick: called ``ROUNDS + 1`` times for each row.
        at_hand: bytes that a step may take; None for what ``memory_at_hand`` says.
    """
    limit = memory_at_hand(device) if at_hand is None else at_hand
    for row in rows:
        row.skipped = _why_not(build, batch, row, limit, device)
        tick()
    for number in range(ROUNDS):
        first = number * len(rows) // ROUNDS
        for row in rows[first:] + rows[:first]:
            if not row.skipped:
                _time_round(build, batch, row, device)
            tick()
    for row in rows:
        if row.times:
            row.seconds = statistics.median(row.times)
        if row.redraw_times and row.seconds is not None:
            row.redraw = max(0.0, statistics.median(row.redraw_times) - row.seconds)


def memory_at_hand(device: torch.device) -> float:
    """Returns the bytes that are free on a device; infinite where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(
        _number("/proc/meminfo", r"MemAvailable: +(\d+) kB", 2**10),
        _number("/sys/fs/cgroup/memory.max", r"(\d+)", 1),  # of a container
    )


def _number(path: str, pattern: str, unit: int) -> float:
    try:
        found = re.search(pattern, Path(path).read_text(encoding="ascii"))
    except OSError:
        return math.inf
    return math.inf if found is None else unit * int(found[1])


def _why_not(build: Build, batch: Batch, row: Compared, limit: float, device: torch.device) -> str:
    """Returns why a method cannot be timed here; empty if it can."""
    if row.footprint is None:
        return "refused"
    gpu = device.type == "cuda"
    needed = (row.footprint if gpu else footprint(build, batch, row.setting, gpu=False)).peak.total
    return "" if needed <= limit else f"needs {needed / GIB:.1f} GiB of {limit / GIB:.1f}"


def _time_round(build: Build, batch: Batch, row: Compared, device: torch.device) -> None:
    setting = row.setting
    model = prepared(build(setting.dtype), setting).to(device)
    inputs = {
        name: value.to(device)
        for name, value in cast(batch(setting.batch_size), setting.dtype).items()
    }
    unwatched = Timeline(recording=False)
    step = Step(model, inputs, setting, timeline=unwatched, update_steps=UPDATE_STEPS)
    step.run()
    row.times += [_seconds(step, device) for _ in range(TIMED)]
    if row.footprint is not None and row.footprint.projectors:
        step.number = UPDATE_STEPS  # when the next redraw is due
        row.redraw_times.append(_seconds(step, device))


def _seconds(step: Step, device: torch.device) -> float:
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else _nothing
    wait()
    start = time.perf_counter()
    step.run()
    wait()
    return time.perf_counter() - start


def _nothing() -> None:
    pass


# ---- The cost rule ----


@dataclass(frozen=True)
class Choice:
    """How ``grad_sample_mode=auto`` of a method compares with the other modes.

    Args:
        method: a name in ``methods.METHODS``.
        same_as: the mode that is here the same step, by peak and products; empty if none is.
        smallest: the mode with the smallest peak, ``auto`` where it is one of them.
        fastest: the mode with the shortest step, likewise; empty if not all were timed.
        peak: of ``auto``, divided by the smallest.
        time: of ``auto``, divided by the shortest; None if not all were timed.
    """

    method: str
    same_as: str
    smallest: str
    fastest: str
    peak: float
    time: float | None


def choices(rows: list[Compared]) -> list[Choice]:
    """Returns how the cost rule chose, for each method of which all modes were simulated."""
    found = []
    for method in dict.fromkeys(row.setting.method for row in rows):
        modes = {r.setting.grad_sample_mode: r for r in rows if r.setting.method == method}
        peaks = {mode: r.footprint.peak.total for mode, r in modes.items() if r.footprint}
        times = {mode: r.seconds for mode, r in modes.items() if r.seconds is not None}
        if len(peaks) < len(GRAD_SAMPLE_MODES):
            continue
        steps = {
            mode: (r.footprint.peak, r.footprint.flops) for mode, r in modes.items() if r.footprint
        }
        same = [mode for mode in modes if mode != AUTO and steps[mode] == steps[AUTO]]
        smallest = min(peaks, key=peaks.__getitem__)  # the first of equals, which is auto
        timed = len(times) == len(modes)
        fastest = min(times, key=times.__getitem__) if timed else ""
        found.append(
            Choice(
                method,
                same[0] if same else "",
                smallest,
                fastest,
                peaks[AUTO] / peaks[smallest],
                times[AUTO] / times[fastest] if timed else None,
            )
        )
    return found
