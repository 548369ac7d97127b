"""Compute the memory of a step on quantised linear layers, as ``dp-grape memory --json``.

    python -m recipes.benchmark.packed --model_name_or_path FOLDER --bits 4 > packed.json

Linear layers are packed as in bitsandbytes. Each has an adapter with a frozen A and a trained B, as
in ``principal_adapter``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dp_grape_hf.memory import ModelOfConfig, Setting, plan, prepared, read_config

METHOD = "dp_lora"
_BLOCK = 64  # elements that share a float32 scale, as in bitsandbytes


class PackedLinear(nn.Linear):
    """A frozen linear layer of few bits, whose weight is unpacked for each product."""

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
        """Return the weight, (m, n), without its contents."""
        shape = self.out_features, self.in_features
        return torch.empty(shape, dtype=self._dtype, device=self.weight.device)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input W^T + b``."""
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


class PackedModel(ModelOfConfig):
    """A model whose linear layers, except the output layer, are packed and have an adapter."""

    def __init__(self, config: Any, seq_len: int, bits: int, rank: int) -> None:
        self._bits: int | None = None  # while the parameters of the model are counted
        super().__init__(config, None, seq_len)
        self._bits, self._rank = bits, rank

    def build(self, dtype: torch.dtype) -> nn.Module:
        """Return the model, in which only B of each adapter is trainable."""
        model: Any = super().build(dtype)
        if self._bits is None:
            return model
        output = model.get_output_embeddings()
        for module in list(model.modules()):
            for name, child in module.named_children():
                if type(child) is nn.Linear and child is not output:
                    setattr(module, name, PackedLinear(child, self._bits))
        adapted = prepared(model, Setting(METHOD, rank=self._rank))
        for name, weight in adapted.named_parameters():
            weight.requires_grad_("lora_B" in name)
        return adapted


def main(words: Sequence[str] | None = None) -> None:
    """Print the memory as JSON."""
    parser = argparse.ArgumentParser(description="The memory of a step on packed weights.")
    parser.add_argument("--model_name_or_path", required=True, help="folder or file of a config")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seq_len", type=int, default=512, help="tokens; of one sample")
    args = parser.parse_args(words)
    config = read_config("model_name_or_path", args.model_name_or_path, None)
    model = PackedModel(config, args.seq_len, args.bits, args.rank)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "gradient_checkpointing": True}
    report = plan(model, Setting(rank=args.rank, **options), [METHOD])
    figures = json.loads(report.as_json()) | {"bits": args.bits}
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
