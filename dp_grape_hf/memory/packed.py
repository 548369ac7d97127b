"""Linear layers of few bits, as far as memory goes: whole only while they multiply."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_BLOCK = 64  # numbers that share a scale in float32, as in bitsandbytes


class PackedLinear(nn.Linear):
    """A frozen linear layer whose weight is unpacked for each product, forward and backward.

    Args:
        layer: what it takes the place of.
        bits: of a number; a divisor of 8.
    """

    def __init__(self, layer: nn.Linear, bits: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        numbers, place = layer.weight.numel(), layer.weight.device
        packed = layer.weight.new_empty(-(-numbers * bits // 8), dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.register_buffer("scales", torch.empty(-(-numbers // _BLOCK), device=place))
        self.bias = layer.bias
        self._dtype = layer.weight.dtype

    def unpacked(self) -> Tensor:
        """Returns the weight, (m, n)."""
        shape = self.out_features, self.in_features
        return torch.empty(shape, dtype=self._dtype, device=self.weight.device)

    def forward(self, input: Tensor) -> Tensor:
        """Returns ``input W^T + b``."""
        output: Tensor = _Product.apply(input, self)
        return output if self.bias is None else output + self.bias


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, layer: PackedLinear) -> Tensor:
        ctx.layer = layer
        weight: Tensor = layer.unpacked()
        return functional.linear(input, weight.to(input.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        weight: Tensor = ctx.layer.unpacked()
        return grad @ weight.to(grad.dtype), None


def pack_(model: Any, bits: int) -> None:
    """Packs the linear layers of a model, but for its output's, in place."""
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear and child is not output:
                setattr(module, name, PackedLinear(child, bits))
