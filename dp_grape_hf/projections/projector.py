"""Random projections: how P is drawn, projects and lifts.

A weight of shape m x n is projected along one of its dimensions, of size d, by a P of shape d x r;
``placement`` determines which one. P is public: it is drawn from a seed in the ledger. It never
uses the stream of noise or sampling, and never depends on gradients, which are not private yet
when P projects them.

Shapes: m x n the weight as stored, d the size of its projected dimension, r the rank.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dp_grape_hf.projections.placement import Side

BLOCK_ROWS = 1024  # rows of P in a block; blocks are drawn separately, so ranks can draw some only

_ALL_ROWS = slice(None)

# ---- Families ----


def gaussian(rows: int, rank: int, generator: torch.Generator) -> Tensor:
    """Return independent entries N(0, 1/r), with ``E[P P^T] = I`` (paper, Algorithm 1)."""
    return torch.randn(rows, rank, generator=generator) / rank**0.5


def gaussian_over_r(rows: int, rank: int, generator: torch.Generator) -> Tensor:
    """Return independent entries N(0, 1/r^2), as in the code of the paper's authors.

    ``E[P P^T] = I / r``: projected gradients are shorter by sqrt(r), compared with gradients of
    unprojected weights. This allows a comparison with results of that code.
    """
    return torch.randn(rows, rank, generator=generator) / rank


Draw = Callable[[int, int, torch.Generator], Tensor]
"""A function that draws a block (rows, rank) of P, float32 on the CPU, with independent rows."""

PROJECTIONS: Mapping[str, Draw | None] = {
    "identity": None,  # nothing is projected
    "gaussian": gaussian,
    "gaussian_over_r": gaussian_over_r,
}
"""The random families, by the names that arguments and ledger use."""

PRINCIPAL = "principal"  # computed by the module `principal`, not random

# ---- P in use ----


@dataclass(frozen=True, eq=False)
class Projector:
    """A matrix P and the side of the gradient that it multiplies."""

    matrix: Tensor  # (d, r), where d is m on the left and n on the right side
    side: Side

    @property
    def rank(self) -> int:
        """The rank r."""
        return self.matrix.shape[1]

    def project(self, gradient: Tensor) -> Tensor:
        """Return ``P^T G`` (r, n) or ``G P`` (m, r); leading batch dimensions are kept."""
        matrix = self.matrix.to(gradient.dtype)
        return matrix.T @ gradient if self.side is Side.LEFT else gradient @ matrix

    def lift(self, coordinates: Tensor) -> Tensor:
        """Return ``P Z`` or ``Z P^T``, (m, n); leading batch dimensions are kept."""
        left, right = self.factors(coordinates)
        return left @ right

    def factors(self, coordinates: Tensor) -> tuple[Tensor, Tensor]:
        """Return (m, r) and (r, n), ``P, Z`` or ``Z, P^T``, whose product is the lifted Z."""
        matrix = self.matrix.to(coordinates.dtype)
        return (matrix, coordinates) if self.side is Side.LEFT else (coordinates, matrix.T)

    def add_lifted_(
        self, weight: Tensor, coordinates: Tensor, decay: float = 1.0, rows: slice = _ALL_ROWS
    ) -> None:
        """Set a weight to ``decay * W + lift(coordinates)`` in place, without an m x n temporary.

        Args:
            weight: (m, n), or the rows that ``rows`` selects.
            coordinates: Z of the full weight, (r, n) or (m, r).
            decay: the factor of the weight.
            rows: the rows of the lifted coordinates to add.
        """
        left, right = self.factors(coordinates.to(weight.dtype))
        weight.addmm_(left[rows], right, beta=decay)

    def coordinate_shape(self, shape: torch.Size) -> tuple[int, int]:
        """Return the shape of the projected gradient of an m x n weight."""
        return (self.rank, shape[1]) if self.side is Side.LEFT else (shape[0], self.rank)
