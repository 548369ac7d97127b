"""Clips gradients to C: their norms, measured or estimated, their factors, and the clipped sum.

A norm runs over all parameters of a sample jointly, and gradients may arrive one group of
parameters after another. Both kinds of norms add up over groups: squares, or inner products.

An estimate (Bu et al. 2021, DP-SGD-JL) takes the place of a norm:

    M_i = sqrt(1/k sum_j <R_i, v_j>^2),    v_j ~ N(0, I) over all parameters, j = 1 ... k

``k M_i^2 / |R_i|^2`` is chi-squared with k degrees of freedom. A sample that is clipped by M_i
contributes at most ``C |R_i| / M_i``, which exceeds C where M_i came out too small. The accountant
knows that distribution, as long as the directions are independent of the data.

A parameter with a gradient factor f has ``f g_i`` in ``R_i``, for its gradient ``g_i``. Norms are
those of ``f g_i``; what is added up is ``g_i``, and the release multiplies the sum.

The parameters of one module may be clipped apart from all others, each part to ``C / sqrt(2)``, so
that neither takes C from the other (group-wise clipping; McMahan et al. 2018, He et al. 2023).

Shapes: B samples in the physical batch, k directions.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from dp_grape_hf.distributed import from_first
from dp_grape_hf.gradients import Dense, FlatGradients, Gradients, PerSampleGradient
from dp_grape_hf.mechanism.streams import SecretGenerator, derived_generator
from dp_grape_hf.projections import first_matches

_SMALL = 2**12  # numbers of a gradient that is treated together with others of its kind
_KEY_BYTES = 32
_AT_ONCE = 2**23  # numbers of directions in memory, unless a single one has more
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


class NormDirections:
    """Random directions over all parameters, the same for a whole logical batch on all ranks.

    They are drawn when they are used, a few at a time, and again for the next physical batch: no
    more than ``2**23`` numbers, or one direction of one parameter, is in memory.

    Args:
        count: k.
        source: the secret stream of the noise, on the device of the gradients. If it is a
            ``SecretGenerator``, the key of the directions is entropy of the operating system; if
            it is any other, a test's, the key is drawn from it.
        shared: whether the ranks of the default process group share the first one's key; making
            it is then a collective call.

    Guarantee:
        To who does not know the key, which never leaves the processes, directions of different
        logical batches and parameters are independent of each other and of the data. On all ranks
        they are the same: one sample more may move others to another rank, and their factors must
        not change by that.
    """

    def __init__(self, count: int, source: torch.Generator, shared: bool = False) -> None:
        self.count = count
        self._device = source.device
        self._key = from_first(partial(_fresh_key, source)) if shared else _fresh_key(source)
        self._drawn = 0  # logical batches

    def redraw(self) -> None:
        """Begins a logical batch, whose directions are independent of all before."""
        self._drawn += 1

    def of(self, name: str, shape: torch.Size) -> Iterator[Tensor]:
        """Yields the directions of a parameter, (some of k, *shape), all k together."""
        generator = derived_generator(self._key, f"{self._drawn} {name}", self._device)
        most = max(1, _AT_ONCE // max(1, shape.numel()))
        for first in range(0, self.count, most):
            some = min(most, self.count - first)
            yield torch.randn(some, *shape, generator=generator, device=self._device)


def _fresh_key(source: torch.Generator) -> bytes:
    if isinstance(source, SecretGenerator):
        return os.urandom(_KEY_BYTES)
    numbers = torch.randint(256, (_KEY_BYTES,), generator=source, device=source.device)
    return bytes(numbers.tolist())


class EstimatedNorms:
    """Estimates M_i of the norms, from k random directions, in the place of ``ExactNorms``.

    Guarantee:
        Not too small by rounding: the error of the inner products is added.
    """

    def __init__(
        self, directions: NormDirections, gradient_factors: Mapping[str, float] = _NONE
    ) -> None:
        self._gradient_factors, self._directions = gradient_factors, directions
        self._products: Tensor | float = 0.0  # (B, k)
        self._squared_rounding: Tensor | float = 0.0  # (B,)

    def add(self, per_sample_grads: Gradients) -> None:
        """Adds the inner products of a group."""
        for name, gradient in per_sample_grads.items():
            drawn = self._directions.of(name, gradient.shape)
            factor = self._gradient_factors.get(name, 1.0)
            products = torch.cat([gradient.inner_products(some) for some in drawn], 1)
            self._products = self._products + _scaled(products, factor)
            squared = _scaled(gradient.rounding().square(), factor**2)
            self._squared_rounding = self._squared_rounding + squared

    def by_part(self) -> ByPart:
        """Returns the estimates, of all parameters jointly."""
        products, rounding = map(torch.as_tensor, (self._products, self._squared_rounding))
        return {False: products.square().mean(1).sqrt() + rounding.sqrt()}


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
