"""Clip per-sample gradients to C: their norms, the clipping factors and the clipped sum.

A norm runs over all parameters of a sample jointly.

A parameter with a gradient factor f and gradient ``g_i`` enters the norm as ``f g_i``. The sum adds
up ``g_i``, and the release multiplies the sum by f.

Per-group clipping clips the parameters of one module and all other parameters separately, each part
to ``C / sqrt(2)`` (McMahan et al. 2018, He et al. 2023). Then neither part reduces the other.

Shapes: B samples in the physical batch.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from dp_grape_hf.gradients import Dense, PerSampleGradient
from dp_grape_hf.projections import first_matches

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


# ---- Factors, and the sum ----

STABILITY = 0.01  # gamma of automatic clipping (Bu et al. 2023 recommend this value)


def add_clipped_sum_(
    total: dict[str, Tensor],
    per_sample_grads: dict[str, PerSampleGradient],
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
        jointly. A sample with a norm that is not finite adds nothing, also if only the norm over
        one part is not finite.
    """
    parts = in_parts(per_sample_grads, clipped_apart)
    norms = {part: norms_of(some, gradient_factors) for part, some in parts.items()}
    lost = ~torch.stack([some.isfinite() for some in norms.values()]).all(0)
    bound = bound_of_part(max_grad_norm, clipped_apart)
    for part, gradients in parts.items():
        factors = clip_factors(norms[part].masked_fill(lost, math.inf), bound, automatic)
        add_weighted_sum_(total, gradients, factors)


def norms_of(
    gradients: Mapping[str, PerSampleGradient], gradient_factors: Mapping[str, float] = _NONE
) -> Tensor:
    """Return the norms over all gradients jointly, (B,), float32.

    Args:
        gradients: parameter name -> gradient g.
        gradient_factors: parameter name -> f; the norm is of f g. Missing factors are 1.
    """
    squared = [
        gradient.squared_norm().float() * gradient_factors.get(name, 1.0) ** 2
        for name, gradient in gradients.items()
    ]
    return torch.stack(squared).sum(0).sqrt()


_SYNCHRONOUS = {"cpu"}
"""Devices on which reading a value does not wait for earlier kernels."""


@dataclass(frozen=True)
class Factors:
    """The clipping factors by which the gradients of samples are multiplied."""

    values: Tensor  # (B,); 0 for samples that do not contribute
    contributing: Tensor | None  # (B,), a mask; None if all samples are known to contribute

    def select(self, gradient: PerSampleGradient) -> tuple[PerSampleGradient, Tensor]:
        """Return the gradients that contribute, and the factor of each.

        Dense gradients that do not contribute are set to zero instead, in place if possible:
        0 * NaN is NaN.
        """
        if self.contributing is None:
            return gradient, self.values
        if isinstance(gradient, Dense):
            values = gradient.values
            lost = ~self.contributing.view(-1, *[1] * (values.dim() - 1))
            if 0 in values.stride():  # expanded: several numbers share their memory
                return Dense(values.masked_fill(lost, 0)), self.values
            return Dense(values.masked_fill_(lost, 0)), self.values
        if bool(self.contributing.all()):
            return gradient, self.values
        return gradient.select(self.contributing), self.values[self.contributing]


def bound_of_part(max_grad_norm: float, clipped_apart: str | None) -> float:
    """Return the clipping norm of each part: C, or C / sqrt(2) with a ``clipped_apart`` module."""
    return max_grad_norm if clipped_apart is None else max_grad_norm * math.sqrt(0.5)


def clip_factors(norms: Tensor, max_grad_norm: float, automatic: bool) -> Factors:
    """Return the factors that clip gradients of these norms (B,) to C.

    Samples with a norm that is not finite are left out.
    """
    finite = norms.isfinite()
    if automatic:
        values = max_grad_norm / (norms + STABILITY)
    else:
        values = (max_grad_norm / norms).clamp(max=1.0)  # C / 0 is inf and clamps to 1
    all_known = norms.device.type in _SYNCHRONOUS and bool(finite.all())
    return Factors(values.masked_fill(~finite, 0), None if all_known else finite)


def add_weighted_sum_(
    total: dict[str, Tensor], gradients: dict[str, PerSampleGradient], factors: Factors
) -> None:
    """Add the weighted gradients to ``total``; each is freed once it is added."""
    for name in list(gradients):
        gradient = gradients.pop(name)
        if name not in total:
            shape, device = gradient.shape, factors.values.device
            total[name] = torch.zeros(shape, dtype=torch.float32, device=device)
        part, values = factors.select(gradient)
        part.add_weighted_sum_(total[name], values)
