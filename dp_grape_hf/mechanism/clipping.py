"""Clips gradients to C: their norms, their factors, and the clipped sum.

A norm runs over all parameters of a sample jointly, and gradients may arrive one group of
parameters after another: squares of norms add up over groups.

A parameter with a gradient factor f has ``f g_i`` in ``R_i``, for its gradient ``g_i``. Norms are
those of ``f g_i``; what is added up is ``g_i``, and the release multiplies the sum.

The parameters of one module may be clipped apart from all others, each part to ``C / sqrt(2)``, so
that neither takes C from the other (group-wise clipping; McMahan et al. 2018, He et al. 2023).

Shapes: B samples in the physical batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from dp_grape_hf.gradients import Dense, FlatGradients, Gradients, PerSampleGradient
from dp_grape_hf.projections import first_matches

_SMALL = 2**12  # numbers of a gradient that is treated together with others of its kind
_NONE: Mapping[str, float] = {}
_T = TypeVar("_T")


def factors_by_name(
    option: str, patterns: Mapping[str, float], names: Iterable[str]
) -> dict[str, float]:
    """Returns the factor of each parameter that a pattern matches; the first that does counts.

    Args:
        option: what the patterns were given for, in an error.
        patterns: name pattern -> factor, in the order in which they are tried.
        names: of all parameters that are trained.

    Raises:
        PrivacyError: for a pattern that is never the first to match.
    """
    first = first_matches(list(names), patterns, option, "the parameters that are trained")
    return {name: patterns[match] for name, match in first.items() if match is not None}


@dataclass(frozen=True)
class Gathered:
    """The gradients of one batch, those that are small side by side.

    A model has many biases and norms, and a few calls for all take less time than a few for each.
    """

    large: dict[str, PerSampleGradient]
    shapes: dict[str, torch.Size]  # of the small ones, in their order
    small: Dense | None

    @classmethod
    def of(cls, per_sample_grads: dict[str, PerSampleGradient]) -> Gathered:
        """Takes the small gradients out of the dictionary, which is used from then on."""
        shapes = {
            name: gradient.shape
            for name, gradient in per_sample_grads.items()
            if isinstance(gradient, Dense) and gradient.shape.numel() <= _SMALL
        }
        rows = []
        for name, shape in shapes.items():
            gradient = per_sample_grads.pop(name)
            assert isinstance(gradient, Dense)
            values = gradient.values.float()
            rows.append(values.reshape(len(values), shape.numel()))
        return cls(per_sample_grads, shapes, Dense(torch.cat(rows, 1)) if rows else None)

    def squared_norm(self, gradient_factors: Mapping[str, float] = _NONE) -> Tensor:
        """Returns the squared norms over all of them jointly, (B,), float32.

        Args:
            gradient_factors: what is measured in place of g: parameter name -> f, of f g.
        """
        squared = [
            _scaled(gradient.squared_norm().float(), gradient_factors.get(name, 1.0) ** 2)
            for name, gradient in self.large.items()
        ]
        if self.small:
            squared.append(self._small_times(self.small, gradient_factors).squared_norm().float())
        return torch.stack(squared).sum(0)

    def _small_times(self, small: Dense, gradient_factors: Mapping[str, float]) -> Dense:
        if not any(name in gradient_factors for name in self.shapes):
            return small
        factors = [
            small.values.new_full((shape.numel(),), gradient_factors.get(name, 1.0))
            for name, shape in self.shapes.items()
        ]
        return Dense(small.values * torch.cat(factors))


def _scaled(values: Tensor, factor: float) -> Tensor:
    return values if factor == 1 else values * factor


# ---- Norms ----


ByPart = dict[bool, Tensor]
"""(B,), of what is clipped together; True is the part of the module that is clipped apart."""


def take(gradients: Gradients) -> dict[str, PerSampleGradient]:
    """Moves gradients out of what holds them, so that each is freed once it is added up."""
    taken = dict(gradients)
    if isinstance(gradients, FlatGradients):
        gradients.others.clear()
    elif isinstance(gradients, dict):
        gradients.clear()
    return taken


def in_parts(by_name: dict[str, _T], apart: str | None) -> dict[bool, dict[str, _T]]:
    """Returns what is of parameters as these are clipped, in one part or two.

    What is of ``apart`` is moved.
    """
    own = [n for n in by_name if apart is not None and n.startswith(f"{apart}.")]
    moved = {name: by_name.pop(name) for name in own}
    return {part: some for part, some in ((False, by_name), (True, moved)) if some}


class ExactNorms:
    """The norms of the samples of a physical batch, from one group of parameters after another.

    Args:
        gradient_factors: as in ``Gathered.squared_norm``.
        apart: name of a module whose parameters are clipped apart.
    """

    def __init__(
        self, gradient_factors: Mapping[str, float] = _NONE, apart: str | None = None
    ) -> None:
        self._gradient_factors, self._apart = gradient_factors, apart
        self._squared: ByPart = {}

    def add(self, per_sample_grads: Gradients) -> None:
        """Takes a group of parameters into account; groups have no parameter in common."""
        for part, some in in_parts(dict(per_sample_grads), self._apart).items():
            found = Gathered.of(some).squared_norm(self._gradient_factors)
            self._squared[part] = self._squared.get(part, 0.0) + found

    def by_part(self) -> ByPart:
        """Returns the norms over all groups of each part, float32; not finite for NaN and Inf."""
        return {part: squared.sqrt() for part, squared in self._squared.items()}


# ---- Factors, and the sum ----

STABILITY = 0.01  # gamma of automatic clipping, as its authors recommend


def add_clipped_sum_(
    total: dict[str, Tensor],
    per_sample_grads: Gradients,
    max_grad_norm: float,
    automatic: bool = False,
    gradient_factors: Mapping[str, float] = _NONE,
    apart: str | None = None,
) -> None:
    """Adds ``sum_i clip(f g_i, C) / f`` to ``total``, where missing parameters count as zero.

    The dictionary of gradients is emptied: each is freed as soon as it is summed. ``automatic``
    clipping also scales up what is shorter than C. ``gradient_factors`` are f, by parameter name,
    and 1 for those without. ``apart`` is the name of a module whose parameters are clipped apart.

    Sensitivity:
        What one sample adds, times f, has an L2 norm of at most C, over all parameters jointly; a
        sample with a norm that is not finite adds nothing.
    """
    taken = take(per_sample_grads)
    parts = {part: Gathered.of(some) for part, some in in_parts(taken, apart).items()}
    norms = {part: own.squared_norm(gradient_factors).sqrt() for part, own in parts.items()}
    factors = factors_of_parts(norms, max_grad_norm, automatic, apart)
    for part, gathered in parts.items():
        add_weighted_sum_(total, gathered, factors[part])


_KNOWN_AT_ONCE = {"cpu"}
"""Devices that answer a question without waiting for what was launched before."""


@dataclass(frozen=True)
class Factors:
    """What the gradients of samples are multiplied by."""

    values: Tensor  # of the samples that contribute; of all samples if ``of_all``
    contributing: Tensor | None  # (B,), a mask; None if all samples contribute
    of_all: bool = False  # then they are zero for those that do not contribute

    def select(self, gradient: PerSampleGradient) -> tuple[PerSampleGradient, Tensor]:
        """Returns gradients, and a factor for each; what does not contribute is not among them.

        Dense ones may be set to zero instead, in place: 0 * NaN is NaN.
        """
        if self.contributing is None:
            return gradient, self.values
        if self.of_all and isinstance(gradient, Dense):
            values = gradient.values
            lost = ~self.contributing.view(-1, *[1] * (values.dim() - 1))
            return Dense(values.masked_fill_(lost, 0)), self.values
        if self.of_all and bool(self.contributing.all()):
            return gradient, self.values
        values = self.values[self.contributing] if self.of_all else self.values
        return gradient.select(self.contributing), values


def bound_of_part(max_grad_norm: float, apart: str | None) -> float:
    """Returns what each part is clipped to: C, or C / sqrt(2) where a module is clipped apart."""
    return max_grad_norm if apart is None else max_grad_norm * math.sqrt(0.5)


def factors_of_parts(
    norms: ByPart, max_grad_norm: float, automatic: bool, apart: str | None
) -> dict[bool, Factors]:
    """Returns what clips each part, so that both together have a norm of at most C.

    A sample with a norm that is not finite is out of both.
    """
    bound = bound_of_part(max_grad_norm, apart)
    lost = ~torch.stack([own.isfinite() for own in norms.values()]).all(0)
    return {
        part: clip_factors(own.masked_fill(lost, math.inf), bound, automatic)
        for part, own in norms.items()
    }


def clip_factors(norms: Tensor, max_grad_norm: float, automatic: bool) -> Factors:
    """Returns what clips gradients of these norms (B,) to C; those that are not finite are out."""
    finite = norms.isfinite()
    asks = norms.device.type in _KNOWN_AT_ONCE
    whole = asks and bool(finite.all())
    if asks and not whole:  # 0 * NaN is NaN: such a sample must not enter the sum at all
        norms = norms[finite]
    if automatic:
        values = max_grad_norm / (norms + STABILITY)
    else:
        values = (max_grad_norm / norms).clamp(max=1.0)  # C / 0 is inf and clamps to 1
    if not asks:
        return Factors(values.masked_fill(~finite, 0), finite, of_all=True)
    return Factors(values, None if whole else finite)


def add_weighted_sum_(total: dict[str, Tensor], gathered: Gathered, factors: Factors) -> None:
    """Adds the weighted gradients to ``total``; each is freed as soon as it is summed."""
    for name in list(gathered.large):
        gradient = gathered.large.pop(name)
        if name not in total:
            shape, device = gradient.shape, factors.values.device
            total[name] = torch.zeros(shape, dtype=torch.float32, device=device)
        part, values = factors.select(gradient)
        part.add_weighted_sum_(total[name], values)
    if gathered.small:
        part, values = factors.select(gathered.small)
        small = part.weighted_sum(values)
        sizes = [shape.numel() for shape in gathered.shapes.values()]
        for (name, shape), own in zip(gathered.shapes.items(), small.split(sizes), strict=True):
            own = own.view(shape)
            total[name] = total[name].add_(own) if name in total else own
