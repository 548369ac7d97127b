"""While a run goes on: rows' contributions are computed alone and compared.

What is tried before the first step are copies of a few examples and a model as it was then. A model
may treat a row by its place in the batch, later data may show what these did not, and a model may
remember what it was given before. So the gradients of some rows are computed once more, from each
row alone, with the random numbers that it had among the others. That is done with up to eight rows
of the first physical batch, and of each that is larger than all before, and with one row of batches
that a secret coin chooses. If a gradient is another one, the run stops before anything of that step
is released.

That a run stops depends on the data then, as do all refusals.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.gradients.checks.coupling import rows_of
from dp_grape_hf.gradients.checks.guards import TorchDraws, keeping_random_state
from dp_grape_hf.gradients.checks.sketches import Prints, Tolerance, joint_error
from dp_grape_hf.gradients.engine import (
    Consume,
    Gradients,
    Inputs,
    OuterEngine,
    PerSampleEngine,
    batch_size_of,
)
from dp_grape_hf.phases import Observer
from dp_grape_hf.projections import Projector

ROWS = 8
"""How many rows are watched of a physical batch that is larger than all before: its first, its last
and others by secret coins; fewer if it has no more."""

SHARE = 1 / 100
"""Of the physical batches, how many are watched, whatever is in them, as processes with sharded
weights must run the model equally often. That takes a hundredth of the time where a batch has one
row."""


class WatchedEngine(OuterEngine):
    """Computes what another engine does, and compares single rows with themselves alone.

    Args:
        examples: computes losses and gradients.
        tolerance: of rounding.
        parts: the parameters that are clipped together, by name, with what their gradients are
            multiplied by before that. Each part is compared by itself, as a short one is scaled up
            as much as a long one.
        shortest: norm from which a part contributes in full: what is shorter may differ by as much.
            So a gradient that is nothing but rounding is no other one.
        coins: says which rows, secret; the same in all processes if the weights are sharded, as
            then every process must run the model equally often.

    Raises:
        PrivacyError: when called, if a row's gradient is another one alone.
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
        self._largest = 1  # rows of a batch

    def __call__(
        self, inputs: Inputs, projectors: Mapping[str, Projector]
    ) -> tuple[Tensor, Gradients]:
        rows = self._chosen(inputs, projectors)
        if not rows:
            return self.examples(inputs, projectors)
        found = Prints(rows)
        with NotedDraws(batch_size_of(inputs), rows) as draws:
            losses, gradients = self.examples(inputs, projectors)
        found(gradients)
        self._compare(inputs, projectors, rows, losses, found, draws)
        return losses, gradients

    def stream(
        self, inputs: Inputs, projectors: Mapping[str, Projector], *consumers: Consume
    ) -> Tensor:
        rows = self._chosen(inputs, projectors)
        if not rows:
            return self.examples.stream(inputs, projectors, *consumers)
        found = Prints(rows)

        def marking(gradients: Gradients) -> None:
            found(gradients)
            consumers[0](gradients)

        with NotedDraws(batch_size_of(inputs), rows) as draws:
            losses = self.examples.stream(inputs, projectors, marking, *consumers[1:])
        self._compare(inputs, projectors, rows, losses, found, draws)
        return losses

    def _chosen(self, inputs: Inputs, projectors: Mapping[str, Projector]) -> list[int]:
        """Returns which rows to compare, if any."""
        one, other, size = self._coins.random(), self._coins.random(), batch_size_of(inputs)
        engine = self.examples
        if engine.simulated:
            return []
        # Processes that share weights run the model equally often, whatever is in their batches.
        if size > self._largest and not (engine.in_step or engine.isolates_samples):
            self._largest = size
            # What is examined at first draws numbers that are no row's.
            self._run_aside(inputs, projectors, lambda found: None)
            between = self._coins.sample(range(1, size - 1), min(size, ROWS) - 2)
            return [0, *sorted(between), size - 1]
        return [int(other * size)] if one < SHARE else []

    def _compare(
        self,
        inputs: Inputs,
        projectors: Mapping[str, Projector],
        rows: list[int],
        losses: Tensor,
        found: Prints,
        draws: NotedDraws,
    ) -> None:
        """Refuses a gradient that is another one alone.

        Not compared is what rounding says (hardly any loss), and what had random numbers of which
        it is not known which were the row's: those inside of a fused kernel, or drawn once more for
        activations that are recomputed.
        """
        again = draws.made and any(
            getattr(m, "gradient_checkpointing", False) for m in self.model.modules()
        )
        for index, row in enumerate(rows):
            alone = Prints()
            with keeping_random_state(), GivenDraws(draws, index) as given:
                self._run_aside(rows_of(inputs, slice(row, row + 1)), projectors, alone)
            if not again and given.known and losses[row].abs() > self._tolerance.loss:
                self._refuse_other(found, alone, index)

    def _run_aside(
        self, inputs: Inputs, projectors: Mapping[str, Projector], consume: Consume
    ) -> None:
        """Hands out the gradients of a pass that is no part of the step."""
        observer, self.examples.observer = self.examples.observer, Observer()
        try:
            self.examples.stream(inputs, projectors, consume)
        finally:
            self.examples.observer = observer

    def _refuse_other(self, found: Prints, alone: Prints, index: int) -> None:
        """Refuses a row whose gradient is another one among others than alone."""
        for part in self._parts:
            factors = torch.tensor([*part.values()], dtype=torch.float64)[:, None]
            among = found.marks([*part])[index : index + 1] * factors
            error, norm = map(float, joint_error(among, alone.marks([*part]) * factors))
            if error > self._tolerance.error * max(norm, self._shortest):
                raise PrivacyError(
                    "The gradient of an example is another one among others than alone, by "
                    f"{error / norm:.2g} of its norm: the model mixes the rows of a batch, treats "
                    "a row by its place in the batch, or remembers rows that it was given before "
                    "(a memory bank, a running average that is not saved). The run stops, and "
                    "nothing of this step was released; what was released before is counted, and "
                    "its guarantee may not hold. Take out of the model what couples examples."
                )


# ---- Random numbers of one row ----


class NotedDraws(TorchDraws):
    """Keeps what is drawn for some rows of a batch.

    Args:
        size: B.
        rows: which of its rows.
    """

    def __init__(self, size: int, rows: list[int]) -> None:
        super().__init__()
        self._size, self._rows = size, rows
        self.made: list[tuple[Any, Tensor | None]] = []  # operations, and values if known

    def drawn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Notes the rows' parts, each of which is a block of the leading dimension."""
        values = _values(func, result)
        if values is not None and values.dim() and len(values) % self._size == 0:
            values = values.unflatten(0, (self._size, -1))[self._rows]
            values = values.cpu() if len(self._rows) > 1 else values  # memory may be short
        elif self._size > 1:
            values = None  # of several rows, or of none
        elif values is not None:
            values = values[None]
        self.made.append((func, values))
        return result


class GivenDraws(TorchDraws):
    """Gives a row alone what was drawn for it.

    Args:
        noted: what that was.
        index: which of the rows.
    """

    def __init__(self, noted: NotedDraws, index: int) -> None:
        super().__init__()
        self._left = [(f, None if rows is None else rows[index]) for f, rows in noted.made]
        self._known = True

    @property
    def known(self) -> bool:
        """Whether all that was drawn inside was given, and all that was noted."""
        return self._known and not self._left

    def drawn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Puts the noted values in the place of what was drawn."""
        values = _values(func, result)
        operation, noted = self._left.pop(0) if self._left else (None, None)
        if values is None or noted is None or operation is not func or noted.shape != values.shape:
            self._known = False
            return result
        values.copy_(noted)
        if func is torch.ops.aten.native_dropout.default:
            return args[0] * values / ((1 - args[1]) or 1.0), values
        return result


def _values(func: Any, result: Any) -> Tensor | None:
    """Returns the numbers that were drawn; None where they are inside of something larger."""
    if func is torch.ops.aten.native_dropout.default:
        return result[1]
    return result if isinstance(result, Tensor) else None
