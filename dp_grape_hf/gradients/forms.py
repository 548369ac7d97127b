"""Exact representations of the per-sample gradients of a weight.

Clipping needs the squared norm of each sample's gradient and a weighted sum over samples. So a
gradient need not be stored as one dense tensor per sample:

* ``Dense``: the gradient itself, for small or projected parameters.
* ``Factored``: ``rows[b].T @ cols[b]``, for large unprojected matrices with few positions. Norms
  come from Gram matrices (ghost clipping, Li et al. 2021; book-keeping, Bu et al. 2023).
* ``SparseRows``: a table in which only the rows that sample b looked up are not zero, for
  embeddings.

The gradient of a weight with several uses (tied, or in a module that runs twice) is the sum over
its uses (``add``). ``GradientSum`` represents the sum of the two forms that are not dense.

Shapes: B samples in the physical batch, T positions sharing the weight, m x n the weight as a
matrix. All results are float32, for any dtype of the factors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from dp_grape_hf.projections import Projector, Side

_CHUNK = 4096  # numbers whose squares are added up in one float32 sum
_LARGE = 2**23  # numbers of a matrix above which no dense gradient per sample is formed

# The unit roundoff of a float32 matrix product, by torch's setting of its precision. The first row
# has the names of torch's newer interface, the second those of the older one.
_ROUNDOFF = {
    **{"ieee": 2**-24, "none": 2**-24, "tf32": 2**-11, "bf16": 2**-8},
    **{"highest": 2**-24, "high": 2**-11, "medium": 2**-8},
}


class PerSampleGradient(ABC):
    """The gradients of one parameter for the samples of a batch, in any form."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """The shape of one sample's gradient."""

    @abstractmethod
    def squared_norm(self) -> Tensor:
        """Return the squared Frobenius norms, (B,)."""

    @abstractmethod
    def add_weighted_sum_(self, total: Tensor, factors: Tensor) -> None:
        """Add ``sum_b factors[b] * gradient_b``, factors (B,), to a float32 ``total``."""

    @abstractmethod
    def products(self, factors: Sequence[Tensor]) -> Tensor:
        """Return the inner products (B, k) of each gradient with k outer products of vectors.

        Args:
            factors: for each dimension of the gradient, k vectors (k, size).
        """

    @abstractmethod
    def select(self, samples: Tensor | slice) -> PerSampleGradient:
        """Return the gradients of the given samples only."""

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Return ``sum_b factors[b] * gradient_b``, of the gradient's shape."""
        total = torch.zeros(self.shape, dtype=torch.float32, device=factors.device)
        self.add_weighted_sum_(total, factors)
        return total


@dataclass(frozen=True)
class Dense(PerSampleGradient):
    """One gradient tensor per sample."""

    values: Tensor  # (B, *shape)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape[1:]

    def squared_norm(self) -> Tensor:
        return self.magnitude().square()

    def magnitude(self) -> Tensor:
        """Return the Frobenius norms, (B,)."""
        flat = self._flat()
        whole = flat.shape[1] - flat.shape[1] % _CHUNK  # a longer sum would be less precise
        if not whole:
            return torch.linalg.vector_norm(flat, dim=1)
        norms = torch.linalg.vector_norm(flat[:, :whole].unflatten(1, (-1, _CHUNK)), dim=2)
        if whole < flat.shape[1]:
            rest = torch.linalg.vector_norm(flat[:, whole:], dim=1, keepdim=True)
            norms = torch.cat([norms, rest], 1)
        return torch.linalg.vector_norm(norms, dim=1)

    def add_weighted_sum_(self, total: Tensor, factors: Tensor) -> None:
        flat = self._flat()
        if self._is_transposed():
            total.add_((factors @ flat).view(self.shape[::-1]).T)
        else:
            total.view(-1).addmv_(flat.T, factors)

    def products(self, factors: Sequence[Tensor]) -> Tensor:
        values = self.values.float()
        if not factors:
            return values[:, None]
        result = values @ factors[-1].T  # (B, ..., k)
        for vectors in reversed(factors[:-1]):
            result = (result * vectors.T).sum(-2)
        return result

    def cheapest(self) -> Dense:
        return self

    def dense(self) -> Dense:
        return self

    def _is_transposed(self) -> bool:
        return self.values.dim() == 3 and self.values.stride(1) < self.values.stride(2)

    def _flat(self) -> Tensor:
        """Return one row of numbers per sample, in memory order."""
        values = self.values.mT if self._is_transposed() else self.values
        return values.float().flatten(1) if values.dim() > 1 else values.float()[:, None]

    def select(self, samples: Tensor | slice) -> Dense:
        return Dense(self.values[samples])


@dataclass(frozen=True)
class Factored(PerSampleGradient):
    """The gradient of sample b is ``rows[b].T @ cols[b]``; it is not materialised."""

    rows: Tensor  # (B, T, m)
    cols: Tensor  # (B, T, n)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.rows.shape[2], self.cols.shape[2]))

    def squared_norm(self) -> Tensor:
        """Return the squared Frobenius norms, (B,).

        They come from two T x T Gram matrices per sample. For samples with many positions they come
        from the dense gradient of one sample at a time, if that is cheaper.

        Guarantee:
            Not too small: the rounding error of a sum whose terms cancel is added.
        """
        if not self._is_short():
            each = zip(self.rows.split(1), self.cols.split(1), strict=True)
            dense = (Factored(rows.float(), cols.float()).dense() for rows, cols in each)
            norms = torch.cat([one.magnitude() for one in dense])
            return (norms + _rounding(self.rows.shape[1]) * self.magnitude()).square()
        if self.rows.dtype is not torch.float32 and len(self.rows) > 1:
            # One sample at a time: the float32 copy of a vocabulary's logits is not small.
            each = zip(self.rows.split(1), self.cols.split(1), strict=True)
            return torch.cat([Factored(*factors).squared_norm() for factors in each])
        grams = (torch.bmm(x.float(), x.float().mT) for x in (self.rows, self.cols))  # (B, T, T)
        return _bound(reduce(torch.mul, grams).sum((1, 2)), self.magnitude(), self.terms)

    @property
    def terms(self) -> int:
        """The number of terms that a Gram matrix's entry and the norm add up."""
        return self.rows.shape[1] ** 2 + self.rows.shape[2] + self.cols.shape[2]

    def magnitude(self) -> Tensor:
        """Return the sum over positions of the norms of their outer products, (B,)."""
        rows, cols = (
            torch.linalg.vector_norm(x, dim=2, dtype=torch.promote_types(x.dtype, torch.float32))
            for x in (self.rows, self.cols)
        )
        return (rows * cols).sum(1).float()

    def add_weighted_sum_(self, total: Tensor, factors: Tensor) -> None:
        """Add ``sum_b factors[b] * rows[b].T @ cols[b]`` to ``total``, m x n, in one product."""
        rows, cols = self.rows, self.cols
        matrix, weights = total.view(rows.shape[2], -1), factors[:, None, None]
        if rows.numel() > cols.numel():  # the smaller factor is weighted
            cols = cols * weights
        else:
            rows = rows * weights
        # A factor that is not float32 is converted one sample at a time.
        step = len(rows) if rows.dtype is cols.dtype is torch.float32 else 1
        for some_rows, some_cols in zip(rows.split(step), cols.split(step), strict=True):
            matrix.addmm_(some_rows.float().flatten(0, 1).T, some_cols.float().flatten(0, 1))

    def products(self, factors: Sequence[Tensor]) -> Tensor:
        left, right = factors
        return ((self.rows.float() @ left.T) * (self.cols.float() @ right.T)).sum(1)

    def select(self, samples: Tensor | slice) -> Factored:
        return Factored(self.rows[samples], self.cols[samples])

    def dense(self) -> Dense:
        """Materialise the gradients, (B, m, n)."""
        rows, cols = self.rows, self.cols.to(self.rows.dtype)
        if cols.shape[2] < rows.shape[2]:  # a wide product is faster than a tall one
            return Dense(torch.bmm(cols.mT, rows).mT)
        return Dense(torch.bmm(rows.mT, cols))

    def cheapest(self) -> Dense | Factored:
        """Return the form with fewer numbers, whose norm is also cheaper.

        The norm takes T^2 (m + n) operations from the factors, and T m n from the dense form. A
        matrix of the size of a vocabulary stays factored for any T.
        """
        m, n = self.rows.shape[2], self.cols.shape[2]
        return self if self._is_short() or m * n > _LARGE else self.dense()

    def _is_short(self) -> bool:
        positions, m, n = self.rows.shape[1], self.rows.shape[2], self.cols.shape[2]
        return positions * (m + n) < m * n


@dataclass(frozen=True)
class SparseRows(PerSampleGradient):
    """The gradient of sample b adds ``values[b, t]`` to row ``indices[b, t]`` of an m x n table."""

    indices: Tensor  # (B, T), integer
    values: Tensor  # (B, T, n)
    num_rows: int  # m

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.num_rows, self.values.shape[2]))

    def squared_norm(self) -> Tensor:
        """Return the squared Frobenius norms, (B,); values of equal indices are added up first.

        Guarantee:
            Not too small: the rounding error of a sum whose terms cancel is added.
        """
        positions = self.indices.shape[1]
        norm = self._summed(self._places(), positions).magnitude()
        return (norm + 2**-24 * positions * self.magnitude()).square()  # float32 sums, no products

    def _places(self) -> Tensor:
        """Return (B, T): for each position a number below T, equal for equal indices."""
        ordered, order = self.indices.sort(1)
        steps = torch.zeros_like(ordered)
        steps[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        return torch.empty_like(order).scatter_(1, order, steps.cumsum(1))

    def _summed(self, places: Tensor, count: int) -> Dense:
        """Return (B, count, n): the sums of the values with the same place in a sample."""
        batch_size, _, n = self.values.shape
        first = count * torch.arange(batch_size, device=places.device)[:, None]
        sums = torch.zeros(batch_size * count, n, dtype=torch.float32, device=places.device)
        sums.index_add_(0, (first + places).flatten(), self.values.float().flatten(0, 1))
        return Dense(sums.view(batch_size, count, n))

    def dense(self) -> Dense:
        """Materialise the gradients, (B, m, n)."""
        return self._summed(self.indices, self.num_rows)

    def cheapest(self) -> Dense | SparseRows:
        """Return the form with fewer numbers: dense for a table with at most T rows."""
        return self.dense() if self.num_rows <= self.indices.shape[1] else self

    def magnitude(self) -> Tensor:
        """Return the sum over positions of the norms of their terms, (B,)."""
        return self.values.float().norm(dim=2).sum(1)

    def add_weighted_sum_(self, total: Tensor, factors: Tensor) -> None:
        values = self.values.float() * factors[:, None, None]
        total.index_add_(0, self.indices.flatten(), values.flatten(0, 1))

    def products(self, factors: Sequence[Tensor]) -> Tensor:
        left, right = factors
        return (left.T[self.indices] * (self.values.float() @ right.T)).sum(1)

    def select(self, samples: Tensor | slice) -> SparseRows:
        return SparseRows(self.indices[samples], self.values[samples], self.num_rows)


Single = Dense | Factored | SparseRows


def _bound(squared: Tensor, magnitude: Tensor, terms: int) -> Tensor:
    """Return computed squared norms plus their rounding error, so that no sample exceeds C.

    With a norm that is too small, a sample could contribute more than C. By Cauchy-Schwarz, the
    error of ``sum_tt' <r_t, r_t'> <c_t, c_t'>`` is at most (unit roundoff) x (growth factor) x
    ``(sum_t |r_t| |c_t|)^2``. For a sum of k terms, sqrt(k) is used as growth factor.

    Args:
        squared: the computed squared norms, (B,).
        magnitude: ``sum_t |r_t| |c_t|``, (B,).
        terms: k.
    """
    return squared.clamp(min=0) + _rounding(terms) * magnitude**2


def _rounding(terms: int) -> float:
    """Return the relative rounding error of a float32 matrix product that sums that many terms."""
    settings = [matmul.fp32_precision for matmul, _ in _matmuls()]
    settings = settings or [torch.get_float32_matmul_precision()]
    return max(_ROUNDOFF[setting] for setting in settings) * terms**0.5


@contextmanager
def exact_products() -> Iterator[None]:
    """Compute float32 matrix products in full precision inside, whatever the process has set."""
    matmuls = _matmuls()
    if not matmuls:
        older = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(older)
        return
    before = []
    for matmul, common in matmuls:
        setting = matmul.fp32_precision
        if _ROUNDOFF[setting] > _ROUNDOFF["ieee"]:
            before.append((matmul, "none" if setting in common else setting))  # none: as common
            matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        for matmul, setting in before:
            matmul.fp32_precision = setting


def _matmuls() -> list[tuple[Any, list[str]]]:
    """Return torch's precision settings by device, each with the more general setting.

    Versions of torch without that interface have none.
    """
    found = []
    for backend in (torch.backends.cuda, torch.backends.mkldnn):
        matmul = getattr(backend, "matmul", None)
        if hasattr(matmul, "fp32_precision"):
            both = torch.backends, backend
            found.append((matmul, [getattr(x, "fp32_precision", "none") for x in both]))
    return found


def projected(gradient: Single, projector: Projector | None, done: bool = False) -> Single:
    """Return ``P^T G`` or ``G P``, computed from the factors of a gradient G.

    Args:
        gradient: G.
        projector: P; None for an unprojected weight.
        done: whether a factor of G is projected already.
    """
    if projector is None:
        return gradient
    left = projector.side is Side.LEFT
    match gradient:
        case Factored() if done:
            return gradient.dense()
        case Factored(rows, cols) if left:
            return Factored(rows @ projector.matrix.to(rows.dtype), cols).dense()
        case Factored(rows, cols):
            return Factored(rows, projector.project(cols)).dense()
        case SparseRows(indices, values, _) if left:  # P^T G is a look-up of rows of P
            return Factored(projector.matrix.to(values.dtype)[indices], values).dense()
        case SparseRows(indices, values, num_rows):
            return SparseRows(indices, projector.project(values), num_rows)
        case Dense(values):
            return Dense(projector.project(values))


# ---- Several uses of one weight ----


@dataclass(frozen=True)
class GradientSum(PerSampleGradient):
    """The gradient of a table that is looked up and multiplied by, as tied output embeddings."""

    factored: Factored
    sparse: SparseRows

    @property
    def parts(self) -> tuple[Factored, SparseRows]:
        """Both terms of the sum."""
        return self.factored, self.sparse

    @property
    def shape(self) -> torch.Size:
        return self.sparse.shape

    def squared_norm(self) -> Tensor:
        """Return the squared norms of the sum, (B,): of both terms, and their cross terms.

        Guarantee:
            Not too small: the rounding error of a sum whose terms cancel is added.
        """
        rows, cols, indices = self.factored.rows, self.factored.cols, self.sparse.indices
        picked = rows.gather(2, indices[:, None, :].expand(-1, rows.shape[1], -1)).float()
        cross = (picked * torch.bmm(cols.float(), self.sparse.values.float().mT)).sum((1, 2))
        squared = reduce(torch.add, (part.squared_norm() for part in self.parts)) + 2 * cross
        terms = self.factored.terms + indices.shape[1] ** 2
        return _bound(squared, self.factored.magnitude() + self.sparse.magnitude(), terms)

    def add_weighted_sum_(self, total: Tensor, factors: Tensor) -> None:
        for part in self.parts:
            part.add_weighted_sum_(total, factors)

    def products(self, factors: Sequence[Tensor]) -> Tensor:
        return reduce(torch.add, (part.products(factors) for part in self.parts))

    def select(self, samples: Tensor | slice) -> GradientSum:
        return GradientSum(self.factored.select(samples), self.sparse.select(samples))


def add(uses: Sequence[Single]) -> Dense | Factored | SparseRows | GradientSum:
    """Return the gradient of a weight, the sum of the gradients of its uses.

    If one of them is dense, so is the sum. Otherwise positions are concatenated.
    """
    if len(uses) == 1:
        return uses[0]
    factored = [use for use in uses if isinstance(use, Factored)]
    sparse = [use for use in uses if isinstance(use, SparseRows)]
    if len(factored) + len(sparse) < len(uses):
        exact = (Factored(use.rows.float(), use.cols.float()) for use in factored)
        others = (use for use in uses if not isinstance(use, Factored))
        return Dense(reduce(torch.add, (use.dense().values.float() for use in (*others, *exact))))
    merged: list[Factored | SparseRows] = []
    if factored:
        rows, cols = (torch.cat([getattr(u, x) for u in factored], 1) for x in ("rows", "cols"))
        merged.append(Factored(rows, cols))
    if sparse:
        where, values = (
            torch.cat([getattr(u, x) for u in sparse], 1) for x in ("indices", "values")
        )
        merged.append(SparseRows(where, values, sparse[0].num_rows))
    match merged:
        case [Factored() as product, SparseRows() as look_up]:
            return GradientSum(product, look_up)
    return merged[0]
