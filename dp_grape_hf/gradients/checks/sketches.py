"""Short marks of per-sample gradients, by which two computations of one gradient are compared.

The mark of a gradient G is its norm and its inner product with a fixed direction v, for each
parameter. The entries of v have random signs and sizes from 1/2 to 3/2, no two of them the same,
each a product of one factor for each dimension. So what changes a gradient changes its mark, be it
only its sign, and also where its rows are a multiple of each other: those of a head with two
classes are g and -g, and equal factors would add them up to zero.

Shapes: B samples, P parameters.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dp_grape_hf.gradients.forms import PerSampleGradient
from dp_grape_hf.projections import is_short


@dataclass(frozen=True)
class Tolerance:
    """How far two computations of one gradient may be apart, by rounding alone.

    Args:
        error: of a parameter's gradient, relative to its norm.
        floor: a parameter's norm counts as at least this part of the sample's total, and that of at
            least this part of the batch's largest: the gradient of a key's bias is zero but for
            rounding, and so is all of it for a pair of equal texts.
        loss: a loss below this says nothing: its gradient is rounding.
        change: of a loss, relative.
    """

    error: float
    floor: float
    loss: float
    change: float


FULL = Tolerance(error=1e-2, floor=1e-3, loss=1e-4, change=1e-3)
LOW = Tolerance(error=0.1, floor=5e-2, loss=1e-1, change=5e-2)


def computes_in_16_bits(model: nn.Module) -> bool:
    """Returns whether weights or products of matrices are rounded to 16 bits or fewer.

    Autocast may be on around the model, or within its forward method, where accelerate has it.
    """
    weights = list(model.parameters())
    short = any(not w.is_floating_point() or is_short(w) for w in weights)
    within = "_original_forward" in vars(model)  # only mixed precision makes accelerate keep it
    return short or within or torch.is_autocast_enabled(weights[0].device.type)


def tolerance_for(model: nn.Module) -> Tolerance:
    """Returns how far two computations of a gradient of a model may be apart."""
    return LOW if computes_in_16_bits(model) else FULL


_ALONG = 3  # an error counts along a direction, whose inner product varies, if as many times larger


class Prints:
    """Collects the marks of a batch: a consumer of what an engine hands out.

    Args:
        samples: which of them to mark; all if None.
    """

    def __init__(self, samples: list[int] | None = None) -> None:
        self._samples = None if samples is None else torch.tensor(samples)
        self._marks: dict[str, Tensor] = {}  # name -> (B, 2): along the direction, and norm

    def __call__(self, gradients: Mapping[str, PerSampleGradient]) -> None:
        """Marks the gradients of some parameters."""
        for name, found in gradients.items():
            device = found.squared_norm().device
            gradient = found if self._samples is None else found.select(self._samples.to(device))
            with torch.no_grad(), torch.autocast(device.type, enabled=False):
                along = gradient.inner_products(_direction(name, gradient.shape, device))[:, 0]
                norm = gradient.squared_norm().clamp(min=0).sqrt()
                self._marks[name] = torch.stack([along.float(), norm.float()], 1)

    @property
    def names(self) -> list[str]:
        """The parameters that were marked."""
        return list(self._marks)

    def marks(self, names: Sequence[str]) -> Tensor:
        """Returns marks (B, P, 2) of parameters, on the CPU; zero if it was not handed out."""
        zero = torch.zeros_like(next(iter(self._marks.values()), torch.zeros(1, 2)))
        return torch.stack([self._marks.get(name, zero).cpu() for name in names], 1).double()


def _direction(name: str, shape: Sequence[int], device: torch.device) -> Tensor:
    """Returns a direction (1, *shape) that depends on name and shape alone."""
    factors = [_factors(name, dim, size).to(device) for dim, size in enumerate(shape)]
    if not factors:
        return torch.ones(1, device=device)
    return functools.reduce(lambda whole, own: whole[..., None] * own, factors)[None]


@functools.lru_cache(maxsize=2**14)
def _factors(name: str, dim: int, size: int) -> Tensor:
    """Returns signs times sizes, whose mean square is 1."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {dim}".encode()))
    signs = torch.randint(2, (size,), generator=generator).mul_(2).sub_(1)
    sizes = torch.linspace(0.5, 1.5, size)[torch.randperm(size, generator=generator)]
    return signs * sizes / sizes.square().mean().sqrt()


def differing(left: Tensor, right: Tensor, tolerance: Tolerance) -> Tensor:
    """Returns which parameters of which samples have other gradients, (B, P).

    Args:
        left: marks (B, P, 2); a sample in which a number is not finite says nothing, as clipping
            leaves it out.
        right: likewise.
        tolerance: of rounding.
    """
    norms = torch.maximum(left[..., 1], right[..., 1])
    known = norms.isfinite().all(1, keepdim=True) & left.isfinite().all(2).all(1, keepdim=True)
    totals = norms.norm(dim=1, keepdim=True)
    totals = totals.maximum(tolerance.floor * totals[known].max()) if known.any() else totals
    allowed = tolerance.error * norms.maximum(tolerance.floor * totals)
    error = (left - right).abs() / torch.tensor([_ALONG, 1.0], dtype=left.dtype)
    return (error.amax(2) > allowed) & known


def joint_error(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Returns how far the gradients of one sample are apart over all parameters, and their norm.

    Args:
        left: marks (1, P, 2); what is not finite makes both zero.
        right: likewise.
    """
    error = (left - right)[..., 0].norm()
    norm = torch.maximum(left[..., 1].norm(), right[..., 1].norm())
    finite = left.isfinite().all() & right.isfinite().all()
    return torch.where(finite, error, 0.0), torch.where(finite, norm, 0.0)
