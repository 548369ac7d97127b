"""Modules and losses that are a line long."""

from torch import Tensor, nn

from tests.support.trainers import TinyForSequenceClassification


class Function(nn.Module):
    """Computes a function of itself and its inputs; its parts are layers, or tensors to train."""

    def __init__(self, compute, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)
        self.compute = compute

    def forward(self, x, *more, **others):
        return self.compute(self, x, *more, **others)


def mean_output(outputs, labels):
    return outputs.flatten(1).sin().mean(1)


def squares(outputs, labels):
    return (outputs - 1).square().sum(1)


class TinyFunctionForSequenceClassification(TinyForSequenceClassification):
    """The tiny model, whose outputs are a function of itself, its inputs and labels."""

    def __init__(self, compute):
        super().__init__()
        self.compute = compute

    def forward(self, x, labels=None, id=None):
        return self.compute(self, x, labels)


plain = TinyForSequenceClassification.forward
"""The outputs of the tiny model: ``(model, x, labels) -> {"logits": ..., "loss": ...}``."""


def cross_entropies(outputs, labels):
    return nn.functional.cross_entropy(outputs["logits"], labels, reduction="none")
