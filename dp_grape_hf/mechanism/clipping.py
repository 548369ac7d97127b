"""Clip per-sample gradients to C: their norms, the clipping factors and the clipped sum.

A norm runs over all parameters of a sample jointly. Gradients may arrive one group of parameters
after another: the squared norms of the groups are added up.

A parameter with a gradient factor f and gradient ``g_i`` enters the norm as ``f g_i``. The sum adds
up ``g_i``, and the release multiplies the sum by f.

Per-group clipping clips the parameters of one module and all other parameters separately, each part
to ``C / sqrt(2)`` (McMahan et al. 2018, He et al. 2023). Then neither part reduces the other.

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

_SMALL = 2**12  # numbers of a gradient below which it is concatenated with other small ones
_NONE: Mapping[str, float] = {}
_T = TypeVar("_T")


def factors_by_name(
    option: str, patterns: Mapping[str, float], names: Iterable[str]
) -> dict[str, float]:
    """Return the factor of each parameter that a pattern matches; the first match counts.

    Args:
        option: name of the option that the patterns come from, for an error.
        patterns: name pattern -> factor, in the order in which they are tried.
        names: names of all trained parameters.

    Raises:
        PrivacyError: if a pattern is not the first match of any parameter.
    """
    first = first_matches(list(names), patterns, option, "the parameters that are trained")
    return {name: patterns[match] for name, match in first.items() if match is not None}


@dataclass(frozen=True)
class Gathered:
    """The gradients of one batch, with the small ones concatenated.

    A model has many biases and norms. A few calls for all of them take less time than a few calls
    for each.
    """

    large: dict[str, PerSampleGradient]
    shapes: dict[str, torch.Size]  # shapes of the small gradients, in their order
    small: Dense | None

    @classmethod
    def of(cls, per_sample_grads: dict[str, PerSampleGradient]) -> Gathered:
        """Move the small gradients out of the dictionary, which then holds the others."""
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
        """Return the squared norms over all gradients jointly, (B,), float32.

        Args:
            gradient_factors: parameter name -> f; the norm is of f g. Missing factors are 1.
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
"""Part -> values (B,). True is the module that is clipped separately, False the rest."""


def take(gradients: Gradients) -> dict[str, PerSampleGradient]:
    """Move gradients into a new dictionary, so that each is freed once it is added up."""
    moved = dict(gradients)
    if isinstance(gradients, FlatGradients):
        gradients.others.clear()
    elif isinstance(gradients, dict):
        gradients.clear()
    return moved


def in_parts(by_name: dict[str, _T], clipped_apart: str | None) -> dict[bool, dict[str, _T]]:
    """Split values of parameters into the parts that are clipped separately.

    Args:
        by_name: parameter name -> value. Values of ``clipped_apart`` are removed from it.
        clipped_apart: name of the module that is clipped separately; None for one part.

    Returns:
        Part -> its values by parameter name, without empty parts; True is the module's part.
    """
    of_module = [
        n for n in by_name if clipped_apart is not None and n.startswith(f"{clipped_apart}.")
    ]
    moved = {name: by_name.pop(name) for name in of_module}
    return {part: some for part, some in ((False, by_name), (True, moved)) if some}


class ExactNorms:
    """The gradient norms of a physical batch, added up over groups of parameters.

    Args:
        gradient_factors: as in ``Gathered.squared_norm``.
        clipped_apart: name of a module that is clipped separately; None for one part.
    """

    def __init__(
        self, gradient_factors: Mapping[str, float] = _NONE, clipped_apart: str | None = None
    ) -> None:
        self._gradient_factors, self._clipped_apart = gradient_factors, clipped_apart
        self._squared: ByPart = {}

    def add(self, per_sample_grads: Gradients) -> None:
        """Add the norms of a group of parameters; groups have no parameter in common."""
        for part, some in in_parts(dict(per_sample_grads), self._clipped_apart).items():
            squared = Gathered.of(some).squared_norm(self._gradient_factors)
            self._squared[part] = self._squared.get(part, 0.0) + squared

    def by_part(self) -> ByPart:
        """Return the norms (B,) of each part, float32; not finite if a gradient has NaN or Inf."""
        return {part: squared.sqrt() for part, squared in self._squared.items()}


# ---- Factors, and the sum ----

STABILITY = 0.01  # gamma of automatic clipping (Bu et al. 2023 recommend this value)


def add_clipped_sum_(
    total: dict[str, Tensor],
    per_sample_grads: Gradients,
    max_grad_norm: float,
    automatic: bool = False,
    gradient_factors: Mapping[str, float] = _NONE,
    clipped_apart: str | None = None,
) -> None:
    """Add ``sum_i clip(f g_i, C) / f`` to ``total``, where missing parameters count as zero.

    Args:
        total: parameter name -> sum, float32; changed in place.
        per_sample_grads: the gradients g_i. They are moved out, and each is freed once it is added.
        max_grad_norm: C.
        automatic: whether gradients shorter than C are scaled up (automatic clipping).
        gradient_factors: parameter name -> f; missing factors are 1.
        clipped_apart: name of a module that is clipped separately; None for one part.

    Sensitivity:
        The contribution of one sample, times f, has an L2 norm of at most C over all parameters
        jointly. A sample with a norm that is not finite adds nothing.
    """
    gradients = take(per_sample_grads)
    parts = {part: Gathered.of(some) for part, some in in_parts(gradients, clipped_apart).items()}
    norms = {part: some.squared_norm(gradient_factors).sqrt() for part, some in parts.items()}
    factors = factors_of_parts(norms, max_grad_norm, automatic, clipped_apart)
    for part, gathered in parts.items():
        add_weighted_sum_(total, gathered, factors[part])


_SYNCHRONOUS = {"cpu"}
"""Devices on which reading a value does not wait for earlier kernels."""


@dataclass(frozen=True)
class Factors:
    """The clipping factors by which the gradients of samples are multiplied."""

    values: Tensor  # factors of the samples that contribute; of all samples if ``of_all``
    contributing: Tensor | None  # (B,), a mask; None if all samples contribute
    of_all: bool = False  # then samples that do not contribute have factor 0

    def select(self, gradient: PerSampleGradient) -> tuple[PerSampleGradient, Tensor]:
        """Return the gradients that contribute, and the factor of each.

        Dense gradients that do not contribute may be set to zero instead, in place, because
        0 * NaN is NaN.
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


def bound_of_part(max_grad_norm: float, clipped_apart: str | None) -> float:
    """Return the clipping norm of each part: C, or C / sqrt(2) with a ``clipped_apart`` module."""
    return max_grad_norm if clipped_apart is None else max_grad_norm * math.sqrt(0.5)


def factors_of_parts(
    norms: ByPart, max_grad_norm: float, automatic: bool, clipped_apart: str | None
) -> dict[bool, Factors]:
    """Return the clipping factors of each part, so that both together have a norm of at most C.

    A sample with a norm that is not finite in one part is left out of both.
    """
    bound = bound_of_part(max_grad_norm, clipped_apart)
    lost = ~torch.stack([some.isfinite() for some in norms.values()]).all(0)
    return {
        part: clip_factors(some.masked_fill(lost, math.inf), bound, automatic)
        for part, some in norms.items()
    }


def clip_factors(norms: Tensor, max_grad_norm: float, automatic: bool) -> Factors:
    """Return the factors that clip gradients of these norms (B,) to C.

    Samples with a norm that is not finite are left out.
    """
    finite = norms.isfinite()
    reads = norms.device.type in _SYNCHRONOUS
    all_finite = reads and bool(finite.all())
    if reads and not all_finite:  # 0 * NaN is NaN: such a sample must not enter the sum
        norms = norms[finite]
    if automatic:
        values = max_grad_norm / (norms + STABILITY)
    else:
        values = (max_grad_norm / norms).clamp(max=1.0)  # C / 0 is inf and clamps to 1
    if not reads:
        return Factors(values.masked_fill(~finite, 0), finite, of_all=True)
    return Factors(values, None if all_finite else finite)


def add_weighted_sum_(total: dict[str, Tensor], gathered: Gathered, factors: Factors) -> None:
    """Add the weighted gradients to ``total``; each large one is freed once it is added."""
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
        for (name, shape), value in zip(gathered.shapes.items(), small.split(sizes), strict=True):
            value = value.view(shape)
            total[name] = total[name].add_(value) if name in total else value
