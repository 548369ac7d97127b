"""Every method beside every other: the memory of a step, simulated, next to the paper's formulas.

Shapes: m_l x n_l a weight, m_l its dimension that is projected; r rank, B samples in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from dp_grape_hf.arguments import METHODS, Method
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.memory.fakes import fake_tensors
from dp_grape_hf.memory.step import ADAMW, DP_ADAM, DP_ADAM_DENSE, Footprint, Setting, footprint
from dp_grape_hf.per_sample import GradSampleMode, Inputs
from dp_grape_hf.projections import Placement, input_dimensions, placements, projection_targets

NUMBER = 4  # bytes of a float32

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
    names = projection_targets(model, trainable)
    matrices = {name: shapes[name] for name in names}
    placed = placements(matrices, setting.rank, input_dims=input_dimensions(model))
    return sizes_of(shapes, placed, setting.batch_size)


# ---- Every method ----

TITLES: Mapping[str, str] = {
    **{name: row.title for name, row in METHODS.items()},
    ADAMW: "AdamW",
    DP_ADAM_DENSE: f"{METHODS[DP_ADAM].title} dense",
}
"""What people call each method that is compared."""


@dataclass
class Compared:
    """A method, and what was found out about it.

    Args:
        title: what people call it, with the way it clips where there are several.
        setting: what was run.
        footprint: what a step takes; None if there can be no such run.
        refused: why there can be none.
    """

    title: str
    setting: Setting
    footprint: Footprint | None = None
    refused: str = ""

    @property
    def formulas(self) -> Formulas | None:
        """The method's row in the paper's table."""
        name = "adam" if self.setting.method == ADAMW else self.setting.method
        return FORMULAS.get(name)


def every_method(setting: Setting) -> list[Compared]:
    """Returns AdamW and all rows of the table of methods, some with each way to clip."""
    found = [Compared(TITLES[ADAMW], replace(setting, method=ADAMW))]
    for name, row in METHODS.items():
        for mode in GradSampleMode if _has_modes(row) else (setting.grad_sample_mode,):
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


# ---- The cost rule ----


@dataclass(frozen=True)
class Choice:
    """How ``grad_sample_mode=auto`` of a method compares with the other modes.

    Args:
        method: a name in ``methods.METHODS``.
        same_as: the mode that is here the same step, by peak and products; empty if none is.
        smallest: the mode with the smallest peak, ``auto`` where it is one of them.
        peak: of ``auto``, divided by the smallest.
    """

    method: str
    same_as: str
    smallest: str
    peak: float


def choices(rows: list[Compared]) -> list[Choice]:
    """Returns how the cost rule chose, for each method of which all modes were simulated."""
    found = []
    for method in dict.fromkeys(row.setting.method for row in rows):
        modes = {r.setting.grad_sample_mode: r for r in rows if r.setting.method == method}
        peaks = {mode: r.footprint.peak.total for mode, r in modes.items() if r.footprint}
        if len(peaks) < len(GradSampleMode):
            continue
        steps = {
            mode: (r.footprint.peak, r.footprint.flops) for mode, r in modes.items() if r.footprint
        }
        auto = GradSampleMode.AUTO.value
        same = [mode for mode in modes if mode != auto and steps[mode] == steps[auto]]
        smallest = min(peaks, key=peaks.__getitem__)  # the first of equals, which is auto
        ratio = peaks[auto] / peaks[smallest]
        found.append(Choice(method, same[0] if same else "", smallest, ratio))
    return found
