"""Sketches of per-sample gradients, to compare two computations of one gradient.

A sketch of a gradient contains, for each parameter, its norm and its inner products with k fixed
directions. A direction is the outer product of one Gaussian vector for each dimension, so it takes
little memory. Two gradients that differ have different sketches, even if they differ only in sign.
Gaussian vectors are used because vectors of signs may add up the rows g and -g of a head with two
classes to zero.

Shapes: B samples, P parameters, k directions.
"""

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
    """The largest differences of two computations of one gradient that rounding explains.

    Args:
        error: error of a parameter's gradient, relative to its norm.
        floor: a parameter's norm counts as at least this part of the sample's total norm, and the
            total as at least this part of the batch's largest. Some gradients consist of rounding
            errors: the gradient of a key's bias, or all gradients of a pair of equal texts.
        loss: smallest loss whose gradient is compared; below it, the gradient may be rounding.
        change: error of a loss, relative.
    """

    error: float
    floor: float
    loss: float
    change: float


FULL = Tolerance(error=2e-3, floor=1e-3, loss=1e-4, change=1e-3)
LOW = Tolerance(error=0.1, floor=5e-2, loss=1e-1, change=5e-2)


def computes_in_16_bits(model: nn.Module) -> bool:
    """Return whether weights or matrix products are rounded to 16 bits or fewer.

    Autocast may be on around the model, or inside its forward method if accelerate put it there.
    """
    weights = list(model.parameters())
    short = any(not w.is_floating_point() or is_short(w) for w in weights)
    inside = "_original_forward" in vars(model)  # accelerate sets it only for mixed precision
    return short or inside or torch.is_autocast_enabled(weights[0].device.type)


def tolerance_for(model: nn.Module) -> Tolerance:
    """Return the tolerance between two computations of a gradient of this model, by its dtypes."""
    return LOW if computes_in_16_bits(model) else FULL


_DIRECTIONS = 4  # k; a single direction is nearly orthogonal to an error once in 20 times
_ALONG = 3  # factor of the tolerance for inner products with a direction, which vary


class Sketches:
    """The sketches of a batch; call it with per-sample gradients of some parameters.

    Args:
        device: the device of the gradients.
        samples: the samples to sketch; None for all.
    """

    def __init__(self, device: torch.device, samples: list[int] | None = None) -> None:
        self._device = device
        self._samples = None if samples is None else torch.tensor(samples, device=device)
        self._sketches: dict[str, Tensor] = {}  # name -> (B, 1 + k): norm, and along directions

    @torch.no_grad()
    def __call__(self, gradients: Mapping[str, PerSampleGradient]) -> None:
        """Add the sketches of the gradients of some parameters."""
        with torch.autocast(self._device.type, enabled=False):
            for name, gradient in gradients.items():
                if self._samples is not None:
                    gradient = gradient.select(self._samples)
                norm = gradient.squared_norm().clamp(min=0).sqrt()[:, None]
                sizes = enumerate(gradient.shape)
                along = gradient.products([_vectors(name, *s).to(self._device) for s in sizes])
                self._sketches[name] = torch.cat([norm, along.expand(-1, _DIRECTIONS)], 1).float()

    @property
    def names(self) -> list[str]:
        """The parameters that have sketches."""
        return list(self._sketches)

    def of(self, names: Sequence[str]) -> Tensor:
        """Return sketches (B, P, 1 + k), on the CPU; zero for a parameter without a gradient."""
        zero = torch.zeros_like(
            next(iter(self._sketches.values()), torch.zeros(1, 1 + _DIRECTIONS))
        )
        return torch.stack([self._sketches.get(name, zero).cpu() for name in names], 1).double()


@functools.lru_cache(maxsize=2**14)
def _vectors(name: str, dim: int, size: int) -> Tensor:
    """Return the vectors (k, size) of one dimension of the directions, with mean square 1."""
    generator = public_generator(zlib.crc32(f"{name} {dim}".encode()))
    vectors = torch.randn(_DIRECTIONS, size, generator=generator)
    return vectors / vectors.square().mean(1, keepdim=True).sqrt()


def differing(left: Tensor, right: Tensor, tolerance: Tolerance, bounds: bool = False) -> Tensor:
    """Return a mask (B, P) of the samples and parameters whose gradients differ.

    A sample with a number that is not finite does not count, because clipping leaves it out.

    Args:
        left: sketches (B, P, 1 + k).
        right: sketches (B, P, 1 + k).
        tolerance: of rounding.
        bounds: whether the norms of ``left`` are upper bounds (``forms``), which exceed the
            norms where terms cancel: the directions show whether the gradients are the same.
    """
    norms = right[..., 0] if bounds else torch.maximum(left[..., 0], right[..., 0])
    finite = norms.isfinite().all(1, keepdim=True) & left.isfinite().all(2).all(1, keepdim=True)
    totals = norms.norm(dim=1, keepdim=True)
    totals = totals.maximum(tolerance.floor * totals[finite].max()) if finite.any() else totals
    allowed = tolerance.error * norms.maximum(tolerance.floor * totals)
    error = (left - right).abs()
    if bounds:
        error[..., 0] = (right - left)[..., 0].clamp(min=0)
    error[..., 1:] /= _ALONG
    return (error.amax(2) > allowed) & finite


def joint_error(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return the difference of two gradients of one sample over all parameters, and their norm.

    Both results are zero if a number is not finite.

    Args:
        left: sketches (1, P, 1 + k).
        right: sketches (1, P, 1 + k).
    """
    error = (left - right)[..., 1:].square().mean(-1).sum().sqrt()
    norm = torch.maximum(left[..., 0].norm(), right[..., 0].norm())
    finite = left.isfinite().all() & right.isfinite().all()
    return torch.where(finite, error, 0.0), torch.where(finite, norm, 0.0)
