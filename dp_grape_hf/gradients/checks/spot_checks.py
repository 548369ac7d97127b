"""While a run goes on: rows' contributions are computed alone and compared.

``replay`` examines one batch, and a model as it was then. Later data may show what these did not,
and a model may remember what it was given before. So a secret coin chooses one physical batch in
100, and one row of it, whose gradient is computed once more, from that row alone, with the random
numbers that it had among the others. If that gives another gradient, the run stops before anything
of that step is released.

That a run stops depends on the data then, as do all refusals.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.gradients.checks.draws import in_rows
from dp_grape_hf.gradients.checks.guards import TorchDraws, keeping_random_state
from dp_grape_hf.gradients.checks.sketches import Prints, Tolerance, joint_error
from dp_grape_hf.gradients.engine import Consume, Gradients, Inputs, OuterEngine, PerSampleEngine
from dp_grape_hf.gradients.rows import batch_size_of, rows_of
from dp_grape_hf.phases import Observer
from dp_grape_hf.projections import Projector

SHARE = 1 / 100
"""Of the physical batches, how many are watched, whatever is in them, as processes with sharded
weights must run the model equally often. That takes a hundredth of the time where a batch has one
row."""

_ROUNDED = 1e-2  # error of a gradient, relative, where products are rounded to TF32


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

    def __call__(
        self, inputs: Inputs, projectors: Mapping[str, Projector]
    ) -> tuple[Tensor, Gradients]:
        row = self._chosen(inputs)
        if row is None:
            return self.examples(inputs, projectors)
        found = Prints([row])
        with NotedDraws(batch_size_of(inputs), row) as draws:
            losses, gradients = self.examples(inputs, projectors)
        found(gradients)
        self._compare(inputs, projectors, row, losses, found, draws)
        return losses, gradients

    def stream(
        self, inputs: Inputs, projectors: Mapping[str, Projector], *consumers: Consume
    ) -> Tensor:
        row = self._chosen(inputs)
        if row is None:
            return self.examples.stream(inputs, projectors, *consumers)
        found = Prints([row])

        def marking(gradients: Gradients) -> None:
            found(gradients)
            consumers[0](gradients)

        with NotedDraws(batch_size_of(inputs), row) as draws:
            losses = self.examples.stream(inputs, projectors, marking, *consumers[1:])
        self._compare(inputs, projectors, row, losses, found, draws)
        return losses

    def _chosen(self, inputs: Inputs) -> int | None:
        """Returns which row to compare, if any."""
        # Processes that share weights run the model equally often, whatever is in their batches.
        one, other = self._coins.random(), self._coins.random()
        if one >= SHARE or self.examples.simulated:
            return None
        return int(other * batch_size_of(inputs))

    def _compare(
        self,
        inputs: Inputs,
        projectors: Mapping[str, Projector],
        row: int,
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
        alone = Prints()
        with keeping_random_state(), GivenDraws(draws) as given:
            self._run_aside(rows_of(inputs, slice(row, row + 1)), projectors, alone)
        if not again and given.known and losses[row].abs() > self._tolerance.loss:
            self._refuse_other(found, alone)

    def _run_aside(
        self, inputs: Inputs, projectors: Mapping[str, Projector], consume: Consume
    ) -> None:
        """Hands out the gradients of a pass that is no part of the step."""
        observer, self.examples.observer = self.examples.observer, Observer()
        try:
            self.examples.stream(inputs, projectors, consume)
        finally:
            self.examples.observer = observer

    def _refuse_other(self, found: Prints, alone: Prints) -> None:
        """Refuses a row whose gradient is another one among others than alone."""
        for part in self._parts:
            factors = torch.tensor([*part.values()], dtype=torch.float64)[:, None]
            among = found.marks([*part]) * factors
            error, norm = map(float, joint_error(among, alone.marks([*part]) * factors))
            if error > max(self._tolerance.error, _ROUNDED) * max(norm, self._shortest):
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
    """Keeps what is drawn for one row of a batch.

    Args:
        size: B.
        row: which of its rows.
    """

    def __init__(self, size: int, row: int) -> None:
        super().__init__()
        self._size, self._row = size, row
        self.made: list[tuple[Any, Tensor | None]] = []  # operations, and values if known

    def drawn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Notes the row's part, a block of the leading dimension."""
        values = _values(func, result)
        if values is not None and values.dim() and len(values) % self._size == 0:
            values = in_rows(values, 0, self._size)[self._row].clone()
        elif self._size > 1:
            values = None  # of several rows, or of none
        self.made.append((func, values))
        return result


class GivenDraws(TorchDraws):
    """Gives a row alone what was drawn for it.

    Args:
        noted: what that was.
    """

    def __init__(self, noted: NotedDraws) -> None:
        super().__init__()
        self._left = list(noted.made)
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
