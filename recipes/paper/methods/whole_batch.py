"""Methods that are not private, on the gradient of a whole batch: Adam and LoRA.

One row stands for all samples of a physical batch, which is neither clipped nor noised. A private
method cannot use this engine: it is no ``QueryEngine``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dp_grape_hf.arguments import Method, Update
from dp_grape_hf.distributed import group_size, sum_over_processes_
from dp_grape_hf.gradients import Dense, Gradients, Inputs, LossFunction, PerSampleEngine
from dp_grape_hf.phases import BACKWARD
from dp_grape_hf.projections import Projector


class BatchEngine(PerSampleEngine):
    """Computes the gradient of the summed loss of a physical batch, as a single row.

    Attributes:
        count: how many samples this process had since ``use``.
    """

    count = 0

    @classmethod
    def of(cls, args: Any, model: nn.Module, loss: LossFunction | None) -> BatchEngine:
        """Returns the engine of a run."""
        return cls(model, loss)

    def use(self, step: int) -> None:
        """Begins a logical batch."""
        self.count = 0

    def __call__(
        self, inputs: Inputs, projectors: Mapping[str, Projector]
    ) -> tuple[Tensor, Gradients]:
        """Returns losses (B,), and the gradient of their sum by parameter name, of one row."""
        losses = self.losses(inputs)
        with self.observer.phase(BACKWARD):
            weights = list(self.trainable.values())
            found = torch.autograd.grad(losses.sum(), weights, allow_unused=True)
        self.count += len(losses)
        gradients = zip(self.trainable, found, strict=True)
        return losses.detach(), {name: Dense(g[None]) for name, g in gradients if g is not None}


def scale_to_mean(
    gradients: Mapping[str, Tensor], engine: BatchEngine, expected_batch_size: int
) -> dict[str, Tensor]:
    """Returns gradients of the mean loss of the samples that were drawn; a collective call.

    Args:
        gradients: summed over the samples, and divided by the expected batch size.
        engine: counted the samples.
        expected_batch_size: what they were divided by.
    """
    count = torch.tensor([float(engine.count)], device=engine.device)
    if group_size() > 1:
        sum_over_processes_([count])
    factor = expected_batch_size / count.clamp(min=1)
    return {name: gradient.mul_(factor) for name, gradient in gradients.items()}


class _Mean(Update):
    """Hands the optimizer the gradient of the mean loss."""

    def __init__(self, args: Any, engine: PerSampleEngine) -> None:
        assert isinstance(engine, BatchEngine)
        self._engine, self._expected = engine, args.expected_batch_size

    def hand_over(self, optimizer: Any, step: int, private_grads: Mapping[str, Tensor]) -> None:
        gradients = scale_to_mean(private_grads, self._engine, self._expected)
        optimizer.receive({self._engine.trainable[n]: g for n, g in gradients.items()}, {})


_OPTIONS: dict[str, Any] = {"private": False, "query": BatchEngine.of, "update": _Mean}

ROWS = {
    "adam": Method("Adam", "Kingma and Ba 2014", **_OPTIONS),
    "lora": Method("LoRA", "Hu et al. 2021", adapter=True, **_OPTIONS),
}
