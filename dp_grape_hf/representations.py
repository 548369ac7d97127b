"""The gradients of a weight for the samples of a batch, whatever it is used for.

The gradient of one use of a weight has one of three ``forms``: ``Dense``, ``Factored`` or
``SparseRows``. A weight with several uses (tied, or in a module that runs twice) has the sum of its
uses as gradient; ``GradientSum`` holds that sum and counts the cross terms in the norm.

Shapes: B samples in the physical batch, k directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from dp_grape_hf.forms import (
    Dense,
    Factored,
    PerSampleGradient,
    Single,
    SparseRows,
    bound,
    inner,
)

__all__ = [
    "Dense",
    "Factored",
    "GradientSum",
    "PerSampleGradient",
    "Single",
    "SparseRows",
    "add",
    "inner",
]


@dataclass(frozen=True)
class GradientSum(PerSampleGradient):
    """The sum of gradients of different forms that share one weight."""

    parts: tuple[Single, ...]

    @property
    def shape(self) -> torch.Size:
        """The shape of one sample's gradient."""
        return self.parts[0].shape

    def squared_norm(self) -> Tensor:
        """Returns the squared norms of the sum, (B,): the parts' own norms and all cross terms.

        Guarantee:
            Not too small: the rounding error of a sum whose terms cancel is added.
        """
        if self._is_converted() and self._samples() > 1:
            ones = [slice(i, i + 1) for i in range(self._samples())]
            return torch.cat([self.select(one).squared_norm() for one in ones])
        total = reduce(torch.add, (inner(part, part) for part in self.parts))
        for i, left in enumerate(self.parts):
            for right in self.parts[i + 1 :]:
                total = total + 2 * inner(left, right)
        return bound(total, reduce(torch.add, (p.magnitude() for p in self.parts)), *self.parts)

    def _is_converted(self) -> bool:
        """Returns whether norms take float32 copies, which are made of one sample at a time."""
        return any(
            isinstance(p, Factored) and p.rows.dtype is not torch.float32 for p in self.parts
        )

    def _samples(self) -> int:
        first = self.parts[0]
        return len(first.rows if isinstance(first, Factored) else first.values)

    def add_weighted_sum_(self, total: Tensor, factors: Tensor) -> None:
        """Adds ``sum_b factors[b] * gradient_b`` to ``total``, of the weight's shape."""
        for part in self.parts:
            part.add_weighted_sum_(total, factors)

    def inner_products(self, directions: Tensor) -> Tensor:
        """Returns the inner products with directions (k, *shape), as (B, k)."""
        return reduce(torch.add, (part.inner_products(directions) for part in self.parts))

    def rounding(self) -> Tensor:
        """Returns the rounding error of an inner product with a direction of N(0, I), (B,)."""
        return reduce(torch.add, (part.rounding() for part in self.parts))

    def select(self, samples: Tensor | slice) -> GradientSum:
        """Returns the gradients of the given samples only."""
        return GradientSum(tuple(part.select(samples) for part in self.parts))


def add(uses: Sequence[Single]) -> PerSampleGradient:
    """Returns the gradient of a weight from the gradients of its uses.

    Uses of one form merge into one representation of that form (positions are concatenated, dense
    values are added); different forms stay side by side in a ``GradientSum``.
    """
    merged: list[Single] = []
    dense = [use.values for use in uses if isinstance(use, Dense)]
    factored = [use for use in uses if isinstance(use, Factored)]
    sparse = [use for use in uses if isinstance(use, SparseRows)]
    if dense:
        merged.append(Dense(reduce(torch.add, dense)))
    if len(factored) > 1:
        rows, cols = (torch.cat([getattr(u, x) for u in factored], 1) for x in ("rows", "cols"))
        factored = [Factored(rows, cols)]
    if len(sparse) > 1:
        indices, values = (
            torch.cat([getattr(u, x) for u in sparse], 1) for x in ("indices", "values")
        )
        sparse = [SparseRows(indices, values, sparse[0].num_rows)]
    merged.extend(factored)
    merged.extend(sparse)
    return merged[0] if len(merged) == 1 else GradientSum(tuple(merged))
