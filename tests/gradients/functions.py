"""Modules and losses that are a line long."""

from collections.abc import Callable

from torch import Tensor, nn


class Function(nn.Module):
    def __init__(self, compute: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.compute = compute

    def forward(self, x: Tensor, **more: Tensor) -> Tensor:
        return self.compute(self, x, **more)


def mean_output(outputs: Tensor, labels: Tensor | None) -> Tensor:
    return outputs.flatten(1).sin().mean(1)


def squares(outputs: Tensor, labels: Tensor | None) -> Tensor:
    return (outputs - 1).square().sum(1)
