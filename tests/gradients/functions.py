"""Modules and losses that are a line long."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tests.support.trainers import TinyForSequenceClassification


class Function(nn.Module):
    """Computes a function of itself and its inputs; its parts are layers, or tensors to train."""

    def __init__(self, compute: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)
        self.compute = compute

    def forward(self, x: Tensor, *more: Any, **others: Any) -> Any:
        return self.compute(self, x, *more, **others)


def mean_output(outputs: Tensor, labels: Tensor | None) -> Tensor:
    return outputs.flatten(1).sin().mean(1)


def squares(outputs: Tensor, labels: Tensor | None) -> Tensor:
    return (outputs - 1).square().sum(1)


class TinyFunctionForSequenceClassification(TinyForSequenceClassification):
    """The tiny model, whose outputs are a function of itself, its inputs and labels."""

    def __init__(self, compute: Callable[..., dict[str, Tensor]]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: Tensor, labels: Any = None, id: Any = None) -> dict[str, Tensor]:
        return self.compute(self, x, labels)


plain = TinyForSequenceClassification.forward
"""The outputs of the tiny model: ``(model, x, labels) -> {"logits": ..., "loss": ...}``."""


def cross_entropies(outputs: Any, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs["logits"], labels, reduction="none")
