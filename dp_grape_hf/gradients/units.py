"""Gradients of privacy units: the sums of the gradients of each unit's examples, before clipping.

A wrapper of an engine. The inner engine computes the gradients of examples, and the wrapper returns
the gradients of units, so the mechanism sees a batch of units. Nothing is approximated: the norm of
the sum of a unit's gradients is exact, for all representations of gradients.

Shapes: B examples in the physical batch, U units, whose rows are next to each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.gradients.engine import Inputs, OuterEngine
from dp_grape_hf.gradients.flat import FlatGradients
from dp_grape_hf.gradients.forms import Dense, Factored, GradientSum, PerSampleGradient, SparseRows
from dp_grape_hf.gradients.rows import batch_size_of
from dp_grape_hf.projections import Projector

UNIT_OF_ROW = "privacy_unit_of_row"
"""The name of the entry of a physical batch that has the number of each row's unit, (B,)."""


def summed(examples: PerSampleGradient, sizes: Sequence[int]) -> PerSampleGradient:
    """Return the gradients of U units, each the sum of the gradients of consecutive examples.

    Sums of factored and sparse gradients are not materialised: the positions of a unit's examples
    become positions of one sample. A smaller unit is filled up with positions of zeros.

    Args:
        examples: the gradients of B examples.
        sizes: (U,), number of examples of each unit; the sum is B.
    """

    def joined(positions: Tensor) -> Tensor:  # (B, T, ...) -> (U, most examples * T, ...)
        return pad_sequence(positions.split([*sizes]), batch_first=True).flatten(1, 2)

    match examples:
        case Dense(values):
            total = values.new_zeros(len(sizes), *values.shape[1:], dtype=torch.float32)
            return Dense(total.index_add_(0, _units(sizes, values.device), values.float()))
        case Factored(rows, cols):
            return Factored(joined(rows), joined(cols))
        case SparseRows(indices, values, num_rows):
            return SparseRows(joined(indices), joined(values), num_rows)
        case GradientSum(factored, sparse):
            both = summed(factored, sizes), summed(sparse, sizes)
            return GradientSum(*both)  # type: ignore[arg-type]
    raise AssertionError(type(examples))


def _units(sizes: Sequence[int], device: torch.device) -> Tensor:
    """Return the number of the unit of each example, (B,)."""
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).to(device)


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
    flat = rows.new_zeros(len(sizes), rows.shape[1])
    flat.index_add_(0, _units(sizes, rows.device), rows)
    of_units = {name: summed(others.pop(name), sizes) for name in list(others)}
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
