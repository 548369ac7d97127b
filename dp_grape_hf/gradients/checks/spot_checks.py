"""Spot checks during a run: compare gradients of rows in a batch with gradients of rows alone.

``replay`` examines one batch before the first step. Later batches may show a defect that this one
does not show, and a model may remember earlier examples. So 1 % of the physical batches, and one
row of each, are chosen at random and in secret. The gradient of this row is computed again from the
row alone, with the random numbers that the row had in the batch. If the two gradients differ, the
run stops before this step's release. A batch is always chosen if code outside of the passes, such
as a callback, changed the model or the loss since the last step.

Whether a run stops depends on the data, as for all refusals.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.gradients.checks.draws import in_rows
from dp_grape_hf.gradients.checks.guards import DrawInterceptor, keeping_random_state
from dp_grape_hf.gradients.checks.sketches import Sketches, Tolerance, joint_error
from dp_grape_hf.gradients.engine import Inputs, OuterEngine, PerSampleEngine
from dp_grape_hf.gradients.flat import FlatGradients
from dp_grape_hf.gradients.rows import batch_size_of, rows_of
from dp_grape_hf.phases import Observer
from dp_grape_hf.projections import Projector

SHARE = 1 / 100
"""The probability that a physical batch is checked. It does not depend on the batch, because
processes with sharded weights must run the model equally often. With batches of one row, the checks
take 1 % of the time."""

_ROUNDED = 1e-2  # relative error of a gradient if matrix products are rounded to TF32


class SpotCheckedEngine(OuterEngine):
    """Wrapper of an engine that compares gradients of rows in a batch with gradients of rows alone.

    Args:
        examples: the engine, which computes losses and gradients.
        tolerance: of rounding.
        parts: for each part that is clipped separately, parameter name -> gradient factor. Parts
            are compared separately, because clipping scales each of them.
        shortest: gradient norms below this count as this. So a gradient that consists of rounding
            errors raises no alarm.
        coins: secret generator that chooses batches and rows. It is the same in all processes,
            because processes with sharded weights must run the model equally often.

    Raises:
        PrivacyError: when called, if a row has another gradient alone than in the batch.
    """

    def __init__(
        self,
        examples: PerSampleEngine,
        tolerance: Tolerance,
        parts: Iterable[Mapping[str, float]],
        shortest: float,
        coins: random.Random,
    ) -> None:
        super().__init__(examples)
        self._tolerance, self._shortest, self._coins = tolerance, shortest, coins
        self._parts = list(parts)
        self._due = False  # whether the next batch of several rows is checked

    def check_next(self) -> None:
        self._due = not self.examples.in_step  # other processes may have no batch

    def __call__(
        self, inputs: Inputs, projectors: Mapping[str, Projector]
    ) -> tuple[Tensor, FlatGradients]:
        row = self._chosen(inputs)
        if row is None:
            return self.examples(inputs, projectors)
        among_rows, alone = Sketches(self.device, [row]), Sketches(self.device)
        with RowDraws(batch_size_of(inputs), row) as draws:
            losses, gradients = self.examples(inputs, projectors)
        among_rows(gradients)
        observer, self.examples.observer = self.examples.observer, Observer()  # not of the step
        try:
            with keeping_random_state(), RowDraws(recorded=draws) as given:
                alone(self.examples(rows_of(inputs, slice(row, row + 1)), projectors)[1])
        finally:
            self.examples.observer = observer
        # The row's numbers are not known inside a fused kernel, or if recomputed layers draw again.
        known = given.known and len(given.made) == len(draws.made)
        again = draws.made and any(
            getattr(m, "gradient_checkpointing", False) for m in self.model.modules()
        )
        if known and not again and losses[row].abs() > self._tolerance.loss:  # else, rounding
            self._refuse_other(among_rows, alone)
        return losses, gradients

    def _chosen(self, inputs: Inputs) -> int | None:
        """Return the row to compare; None for no check."""
        # Every call draws two numbers, so that the generators of all processes stay equal.
        one, other = self._coins.random(), self._coins.random()
        rows = batch_size_of(inputs)
        due = self._due and rows > 1
        self._due = self._due and not due
        if self.examples.simulated or (one >= SHARE and not due):
            return None
        return int(other * rows)

    def _refuse_other(self, among_rows: Sketches, alone: Sketches) -> None:
        """Refuse a row whose gradient in the batch differs from its gradient alone."""
        for part in self._parts:
            factors = torch.tensor([*part.values()], dtype=torch.float64)[:, None]
            among = among_rows.of([*part]) * factors
            error, norm = map(float, joint_error(among, alone.of([*part]) * factors))
            if error > max(self._tolerance.error, _ROUNDED) * max(norm, self._shortest):
                raise PrivacyError(
                    "The gradient of an example in a batch differs from its gradient alone by "
                    f"{error / norm:.2g} of its norm. The model mixes the rows of a batch, treats "
                    "a row by its position, or remembers earlier rows (a memory bank, a running "
                    "average that is not saved). Nothing of this step was released; the guarantee "
                    "of earlier steps may not hold. Remove the code that couples examples."
                )


# ---- Random numbers of one row ----


class RowDraws(DrawInterceptor):
    """Record the random numbers of one row of a batch, or give them to the row when it runs alone.

    Args:
        size: B.
        row: number of the row.
        recorded: the numbers to give; None to record.

    Attributes:
        made: operations, and the row's numbers if they are known.
        known: whether all numbers were replaced, if numbers are given.
    """

    def __init__(self, size: int = 1, row: int = 0, recorded: RowDraws | None = None) -> None:
        super().__init__()
        self._size, self._row = size, row
        self._left = None if recorded is None else iter(recorded.made)
        self.made: list[tuple[Any, Tensor | None]] = []
        self.known = True

    def drawn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Record the row's part, a block of the leading dimension, or replace it."""
        dropout = func is torch.ops.aten.native_dropout.default
        values = result[1] if dropout else result if isinstance(result, Tensor) else None
        if values is not None and values.dim() and len(values) % self._size == 0:
            values = in_rows(values, 0, self._size)[self._row]
        elif self._size > 1:
            values = None  # it is not known which numbers belong to the row
        if self._left is None:
            self.made.append((func, None if values is None else values.clone()))
            return result
        self.made.append((func, None))
        operation, kept = next(self._left, (None, None))
        if values is None or kept is None or operation is not func or kept.shape != values.shape:
            self.known = False
            return result
        values.copy_(kept)
        return (args[0] * result[1] / ((1 - args[1]) or 1.0), result[1]) if dropout else result
