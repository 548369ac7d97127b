"""Gradients of privacy units: the sums of the gradients of each unit's examples, before clipping.

A wrapper of an engine. The inner engine computes the gradients of examples, and the wrapper returns
the gradients of units, so the mechanism sees a batch of units. Nothing is approximated: the norm of
the sum of a unit's gradients is exact, for all representations of gradients.

Shapes: B examples in the physical batch, U units, whose rows are next to each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.gradients.engine import Inputs, OuterEngine
from dp_grape_hf.gradients.flat import FlatGradients
from dp_grape_hf.gradients.forms import (
    Dense,
    Factored,
    GradientSum,
    PerSampleGradient,
    Single,
    SparseRows,
    add,
)
from dp_grape_hf.gradients.rows import batch_size_of
from dp_grape_hf.projections import Projector

UNIT_OF_ROW = "privacy_unit_of_row"
"""The name of the entry of a physical batch that has the number of each row's unit, (B,)."""


@dataclass(frozen=True)
class UnitSum(PerSampleGradient):
    """The gradients of units, each the sum of the gradients of consecutive examples.

    The sums are not materialised: the positions of a unit's examples count as positions of one
    sample, so factored and sparse gradients keep their form.
    """

    examples: PerSampleGradient  # the gradients of B examples
    sizes: tuple[int, ...]  # (U,), number of examples of each unit; the sum is B

    @property
    def shape(self) -> torch.Size:
        return self.examples.shape

    def squared_norm(self) -> Tensor:
        return torch.cat([summed.squared_norm() for summed in self._sums()])

    def add_weighted_sum_(self, total: Tensor, factors: Tensor) -> None:
        """Add ``sum_u factors[u] * gradient_u`` to ``total``: a unit's examples share a factor."""
        sizes = torch.tensor(self.sizes, dtype=torch.long, device=factors.device)
        of_examples = factors.repeat_interleave(sizes, output_size=sum(self.sizes))
        self.examples.add_weighted_sum_(total, of_examples)

    def products(self, factors: Sequence[Tensor]) -> Tensor:
        return torch.cat([summed.products(factors) for summed in self._sums()])

    def select(self, samples: Tensor | slice) -> UnitSum:
        """Return the gradients of the units that a mask or a slice chooses."""
        sizes = torch.tensor(self.sizes)
        chosen = torch.zeros(len(self.sizes), dtype=torch.bool)
        chosen[samples.cpu() if isinstance(samples, Tensor) else samples] = True
        rows = chosen.repeat_interleave(sizes).nonzero().flatten()
        return UnitSum(self.examples.select(rows), tuple(sizes[chosen].tolist()))

    def cheapest(self) -> Dense | UnitSum:
        """Return the sums of dense gradients; other forms are returned unchanged."""
        if not isinstance(self.examples, Dense):
            return self
        sums = [summed.values for summed in self._sums() if isinstance(summed, Dense)]
        return Dense(sums[0] if len(sums) == 1 else torch.cat(sums))

    def _sums(self) -> Iterator[PerSampleGradient]:
        """Yield the sums of consecutive units of equal size, without copies of factors."""
        first = 0
        for size, group in groupby(self.sizes):
            last = first + sum(group)
            yield _summed(self.examples.select(slice(first, last)), size)
            first = last


def _summed(examples: PerSampleGradient, size: int) -> PerSampleGradient:
    """Return the sum of every ``size`` consecutive gradients, in the form that they have."""
    if isinstance(examples, GradientSum):
        return add([_summed_single(part, size) for part in examples.parts])
    assert isinstance(examples, Single)
    return _summed_single(examples, size)


def _summed_single(examples: Single, size: int) -> Single:
    def joined(positions: Tensor) -> Tensor:  # (B, T, ...) -> (U, size T, ...)
        return positions.unflatten(0, (-1, size)).flatten(1, 2)

    match examples:
        case Dense(values):
            return Dense(values.float().unflatten(0, (-1, size)).sum(1))
        case Factored(rows, cols):
            return Factored(joined(rows), joined(cols))
        case SparseRows(indices, values, num_rows):
            return SparseRows(joined(indices), joined(values), num_rows)


class UnitEngine(OuterEngine):
    """Wrapper of an engine that returns the gradients of privacy units.

    Its batches contain ``UNIT_OF_ROW``, the unit of each row. It returns the losses of examples.

    Args:
        examples: the engine, which computes losses and gradients of examples.

    Raises:
        PrivacyError: when called, if a batch has no units of its rows, or a row is not an example.
    """

    def __call__(
        self, inputs: Inputs, projectors: Mapping[str, Projector]
    ) -> tuple[Tensor, FlatGradients]:
        """Return losses (B,) of examples and gradients of units by parameter name (sensitive)."""
        examples, sizes = _split(inputs)
        losses, gradients = self.examples(examples, projectors)
        return losses, _of_units(gradients, sizes)


def _of_units(gradients: FlatGradients, sizes: tuple[int, ...]) -> FlatGradients:
    """Return the gradients of units, and free the gradients of examples one by one."""
    if all(size == 1 for size in sizes):
        return gradients
    rows, order, others = gradients.flat, list(gradients), gradients.others
    of_row = torch.tensor([unit for unit, size in enumerate(sizes) for _ in range(size)])
    flat = rows.new_zeros(len(sizes), rows.shape[1])
    flat.index_add_(0, of_row.to(rows.device), rows)
    of_units = {name: UnitSum(others.pop(name), sizes).cheapest() for name in list(others)}
    return FlatGradients(gradients.layout, flat, of_units, order)


def _split(inputs: Inputs) -> tuple[Inputs, tuple[int, ...]]:
    """Return a batch without ``UNIT_OF_ROW``, and the number of rows of each unit."""
    if UNIT_OF_ROW not in inputs:
        raise PrivacyError(
            f"The batch has no {UNIT_OF_ROW!r}, so the unit of each row is not known. Collate it "
            "with LogicalBatchCollator(of_units=True)."
        )
    groups = [(unit, len(list(rows))) for unit, rows in groupby(inputs[UNIT_OF_ROW].tolist())]
    if [unit for unit, _ in groups] != list(range(len(groups))):
        raise PrivacyError(
            f"The batch's {UNIT_OF_ROW!r} does not count up from 0. If the rows of a unit were not "
            "next to each other, one unit would be clipped as several. Collate it with "
            "LogicalBatchCollator(of_units=True)."
        )
    sizes = tuple(size for _, size in groups)
    examples = {name: value for name, value in inputs.items() if name != UNIT_OF_ROW}
    if batch_size_of(examples) != sum(sizes):
        raise PrivacyError(
            "The data collator did not return one row for each example, so the unit of each row is "
            "not known, and clipping would not bound a unit. Turn packing off."
        )
    return examples, sizes
