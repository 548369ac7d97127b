"""Short marks of per-sample gradients, by which two computations of one gradient are compared.

The mark of a gradient G is its norm and its inner products with a few fixed directions, for each
parameter. A direction is a product of one Gaussian vector for each dimension, so that it takes
little memory. Another gradient has another mark, also if only its sign differs, or if its rows are
multiples of each other: a head with two classes has the rows g and -g, and a direction of signs may
add them up to zero.

Shapes: B samples, P parameters, k directions.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dp_grape_hf.gradients.forms import PerSampleGradient
from dp_grape_hf.projections import is_short, public_generator


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


FULL = Tolerance(error=2e-3, floor=1e-3, loss=1e-4, change=1e-3)
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


_DIRECTIONS = 4  # one alone is nearly orthogonal to an error once in 20 times
_ALONG = 3  # an error counts along a direction, whose inner product varies, if as many times larger


class Prints:
    """Collects the marks of a batch: a consumer of what an engine hands out.

    Args:
        samples: which of them to mark; all if None.
    """

    def __init__(self, samples: list[int] | None = None) -> None:
        self._samples = None if samples is None else torch.tensor(samples)
        self._marks: dict[str, Tensor] = {}  # name -> (B, 1 + k): norm, and along directions

    def __call__(self, gradients: Mapping[str, PerSampleGradient]) -> None:
        """Marks the gradients of some parameters."""
        for name, found in gradients.items():
            device = found.squared_norm().device
            gradient = found if self._samples is None else found.select(self._samples.to(device))
            with torch.no_grad(), torch.autocast(device.type, enabled=False):
                norm = gradient.squared_norm().clamp(min=0).sqrt()[:, None]
                sizes = enumerate(gradient.shape)
                along = gradient.products([_vectors(name, *size).to(device) for size in sizes])
                marks = torch.cat([norm, along.expand(-1, _DIRECTIONS)], 1)
                self._marks[name] = marks.float()

    @property
    def names(self) -> list[str]:
        """The parameters that were marked."""
        return list(self._marks)

    def marks(self, names: Sequence[str]) -> Tensor:
        """Returns marks (B, P, 1 + k), on the CPU; zero for a parameter without a gradient."""
        zero = torch.zeros_like(next(iter(self._marks.values()), torch.zeros(1, 1 + _DIRECTIONS)))
        return torch.stack([self._marks.get(name, zero).cpu() for name in names], 1).double()


@functools.lru_cache(maxsize=2**14)
def _vectors(name: str, dim: int, size: int) -> Tensor:
    """Returns the vectors (k, size) of one dimension of the directions, of mean square 1."""
    generator = public_generator(zlib.crc32(f"{name} {dim}".encode()))
    vectors = torch.randn(_DIRECTIONS, size, generator=generator)
    return vectors / vectors.square().mean(1, keepdim=True).sqrt()


def differing(left: Tensor, right: Tensor, tolerance: Tolerance) -> Tensor:
    """Returns which parameters of which samples have other gradients, (B, P).

    Args:
        left: marks (B, P, 1 + k); a sample in which a number is not finite says nothing, as
            clipping leaves it out.
        right: likewise.
        tolerance: of rounding.
    """
    norms = torch.maximum(left[..., 0], right[..., 0])
    known = norms.isfinite().all(1, keepdim=True) & left.isfinite().all(2).all(1, keepdim=True)
    totals = norms.norm(dim=1, keepdim=True)
    totals = totals.maximum(tolerance.floor * totals[known].max()) if known.any() else totals
    allowed = tolerance.error * norms.maximum(tolerance.floor * totals)
    error = (left - right).abs()
    error[..., 1:] /= _ALONG
    return (error.amax(2) > allowed) & known


def joint_error(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Returns how far the gradients of one sample are apart over all parameters, and their norm.

    Args:
        left: marks (1, P, 1 + k); what is not finite makes both zero.
        right: likewise.
    """
    error = (left - right)[..., 1:].square().mean(-1).sum().sqrt()
    norm = torch.maximum(left[..., 0].norm(), right[..., 0].norm())
    finite = left.isfinite().all() & right.isfinite().all()
    return torch.where(finite, error, 0.0), torch.where(finite, norm, 0.0)
