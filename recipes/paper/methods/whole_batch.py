"""Methods that are not private, on the gradient of a whole batch: Adam and LoRA.

One row stands for all samples of a physical batch, which is neither clipped nor noised. The sum is
divided by the expected batch size, as in every method. A private method cannot use this engine: it
is no ``QueryEngine``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dp_grape_hf.arguments import Method
from dp_grape_hf.gradients import Dense, FlatGradients, Inputs, LossFunction, PerSampleEngine
from dp_grape_hf.phases import BACKWARD
from dp_grape_hf.projections import Projector


class BatchEngine(PerSampleEngine):
    """Computes the gradient of the summed loss of a physical batch, as a single row."""

    @classmethod
    def of(cls, args: Any, model: nn.Module, loss: LossFunction | None) -> BatchEngine:
        """Returns the engine of a run."""
        return cls(model, loss)

    def __call__(
        self, inputs: Inputs, projectors: Mapping[str, Projector]
    ) -> tuple[Tensor, FlatGradients]:
        """Returns losses (B,), and the gradient of their sum by parameter name, of one row."""
        losses = self.losses(inputs)
        with self.observer.phase(BACKWARD):
            weights = list(self.trainable.values())
            found = torch.autograd.grad(losses.sum(), weights, allow_unused=True)
        gradients = zip(self.trainable, found, strict=True)
        rows = {name: [Dense(g[None])] for name, g in gradients if g is not None}
        losses = losses.detach()
        return losses, self.laid_out({}, rows, projectors, losses[:1])


_OPTIONS: dict[str, Any] = {"private": False, "query": BatchEngine.of}

ROWS = {
    "adam": Method("Adam", "Kingma and Ba 2014", **_OPTIONS),
    "lora": Method("LoRA", "Hu et al. 2021", adapter=True, **_OPTIONS),
}
