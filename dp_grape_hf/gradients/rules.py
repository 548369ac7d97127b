"""Rules for the per-sample gradients of layer types, as factors.

A rule contains the mathematics of a layer type, without projection, clipping or noise. ``save``
returns the tensor to keep until the backward pass. ``gradients`` computes the gradients of the
layer's parameters from this tensor and the gradient of the output. A rule is used for one call of
one layer, whose input and output have the B samples in the leading dimension, possibly flattened
with positions.

To add a layer type, write a ``LayerRule`` under ``@layer_rule(TheType)``. Any other module with
trainable parameters gets the generic rule of ``passes``: it runs under ``torch.func.vmap``.

Shapes: B samples, T positions sharing the weight, m x n the weight as stored.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import activations
from transformers.pytorch_utils import Conv1D

from dp_grape_hf.errors import UnsupportedModelError
from dp_grape_hf.gradients.forms import Dense, Factored, Single, SparseRows
from dp_grape_hf.gradients.functions import by_sample, of_kernels
from dp_grape_hf.gradients.stand_ins import call_with

RECOMPUTABLE = {
    *(nn.GELU, nn.SiLU, nn.Mish),
    *(activations.GELUActivation, activations.NewGELUActivation, activations.FastGELUActivation),
    *(activations.QuickGELUActivation, activations.GELUTanh, activations.SiLUActivation),
}
"""Cheap activation functions for which autograd stores the input. A layer behind one may compute
its own input again instead of storing it. ReLU and tanh are left out, because autograd stores their
output."""


class LayerRule:
    """The per-sample gradients of one layer type's parameters."""

    saves: ClassVar[str | None] = None
    """The factor of the weight's ``Factored`` gradient that ``save`` returns: ``rows`` or ``cols``.
    If this factor is projected, only its projection (B, T, r) is kept until the backward pass."""

    def applies(self, layer: Any) -> bool:
        """Return whether the rule is exact for this layer, as configured."""
        return True

    def save(self, layer: Any, layer_input: Tensor, batch_size: int) -> Tensor:
        """Return the tensor to keep until the backward pass; by default the layer's input."""
        return layer_input

    def gradients(
        self, layer: Any, saved: Tensor, grad_output: Tensor, batch_size: int
    ) -> dict[str, Single]:
        """Return the gradient of each parameter, by its name in the layer.

        Args:
            layer: the layer.
            saved: the result of ``save``.
            grad_output: the gradient of the layer's output.
            batch_size: B.
        """
        raise NotImplementedError


RULES: dict[type[nn.Module], LayerRule] = {}


def layer_rule(*types: type[nn.Module]) -> Callable[[type[LayerRule]], type[LayerRule]]:
    """Register a rule for layer types (exact types: a subclass may compute something else)."""

    def register(rule: type[LayerRule]) -> type[LayerRule]:
        for layer_type in types:
            if layer_type in RULES:
                raise ValueError(
                    f"{layer_type.__name__} has a rule already. Register one rule for each type."
                )
            RULES[layer_type] = rule()
        return rule

    return register


def rule_for(layer: nn.Module) -> LayerRule | None:
    """Return the closed-form rule of a layer; None if only the generic rule is exact."""
    if not {name for name, _ in layer.named_parameters(recurse=False)} <= {"weight", "bias"}:
        return None  # the layer has a further parameter, which the rule does not support
    rule = RULES.get(type(layer))
    if rule is None and type(layer).forward is nn.Linear.forward:
        rule = RULES[nn.Linear]
    if rule is None and isinstance(layer, nn.Embedding):
        rule = RULES[nn.Embedding]  # applies to each call of functional.embedding
    if rule is None and type(layer).__name__.endswith(("RMSNorm", "LayerNorm")):
        rule = RULES[nn.RMSNorm]  # T5's LayerNorm is an RMSNorm; ``applies`` tests the formula
    return rule if rule is not None and rule.applies(layer) else None


def refuse_coupling(path: str, layer: nn.Module) -> None:
    """Refuse a layer in which one sample's output depends on another sample."""
    kind = type(layer).__name__
    name = f"{path or 'the model'}: {kind}"
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        raise UnsupportedModelError(
            f"{name} mixes samples through batch statistics, so a per-sample gradient does not "
            "exist. Replace it with GroupNorm or LayerNorm."
        )
    if isinstance(layer, nn.Embedding) and (layer.max_norm or layer.scale_grad_by_freq):
        raise UnsupportedModelError(
            f"{name} with {layer.max_norm=} and {layer.scale_grad_by_freq=} changes its weight or "
            "its gradient with the contents of the whole batch. Set max_norm=None and "
            "scale_grad_by_freq=False."
        )
    if kind == "NystromformerSelfAttention" and layer.num_landmarks != layer.seq_len:
        raise UnsupportedModelError(
            f"{name} with {layer.num_landmarks=} of {layer.seq_len=} positions inverts a matrix "
            "iteratively. The first iterate is divided by a maximum over the whole batch. Set "
            "num_landmarks to segment_means_seq_len in the config: the layer then computes the "
            "exact attention that landmarks approximate, with the same weights."
        )


@layer_rule(nn.Linear)
class LinearRule(LayerRule):
    """``y = x W^T + b``: rows are the output's gradient, columns the input."""

    saves = "cols"

    def save(self, layer: Any, layer_input: Tensor, batch_size: int) -> Tensor:
        return by_sample(layer_input, batch_size)  # (B, T, n)

    def gradients(
        self, layer: Any, saved: Tensor, grad_output: Tensor, batch_size: int
    ) -> dict[str, Single]:
        rows = by_sample(grad_output, batch_size)  # (B, T, m)
        return {"weight": Factored(rows, saved), "bias": Dense(rows.sum(1, dtype=torch.float32))}


@layer_rule(Conv1D)
class Conv1DRule(LinearRule):
    """``y = x W + b`` with W stored as (in, out) (GPT-2): a linear layer with swapped factors."""

    saves = "rows"

    def gradients(
        self, layer: Any, saved: Tensor, grad_output: Tensor, batch_size: int
    ) -> dict[str, Single]:
        cols = by_sample(grad_output, batch_size)  # (B, T, n)
        return {"weight": Factored(saved, cols), "bias": Dense(cols.sum(1, dtype=torch.float32))}


@layer_rule(nn.Embedding)
class EmbeddingRule(LayerRule):
    """An embedding table: only the rows that were looked up have a gradient."""

    def save(self, layer: Any, layer_input: Tensor, batch_size: int) -> Tensor:
        return layer_input.reshape(batch_size, -1)  # (B, T)

    def gradients(
        self, layer: Any, saved: Tensor, grad_output: Tensor, batch_size: int
    ) -> dict[str, Single]:
        values = by_sample(grad_output, batch_size)  # (B, T, n)
        if layer.padding_idx is not None:  # this row is a constant, as in autograd
            values = values.masked_fill((saved == layer.padding_idx)[:, :, None], 0)
        return {"weight": SparseRows(saved, values, layer.num_embeddings)}


@layer_rule(nn.LayerNorm)
class LayerNormRule(LayerRule):
    """Rule of ``y = normalised(x) * w + b``. Only x is kept; the normalised input is recomputed."""

    def normalised(self, layer: Any, layer_input: Tensor) -> Tensor:
        """Return the normalised input, of the input's shape, float32, as a new tensor."""
        return functional.layer_norm(layer_input.float(), layer.normalized_shape, eps=layer.eps)

    def gradients(
        self, layer: Any, saved: Tensor, grad_output: Tensor, batch_size: int
    ) -> dict[str, Single]:
        shape = (batch_size, -1, *layer.weight.shape)
        grad = grad_output.float().reshape(shape)
        factor = self.normalised(layer, saved).reshape(shape)
        return {"weight": Dense(factor.mul_(grad).sum(1)), "bias": Dense(grad.sum(1))}


@layer_rule(nn.RMSNorm)
class RMSNormRule(LayerNormRule):
    """``y = x / rms(x) * w``, or ``* (1 + w)``, over the last dimension.

    Transformers defines such a class for each model family. They are recognised by name. The rule
    applies only if the layer equals the formula on inputs of two scales.
    """

    def applies(self, layer: Any) -> bool:
        return self.offset(layer, layer.forward) is not None

    def offset(self, layer: Any, forward: Callable[..., Any]) -> float | None:
        """Return the constant that the layer adds to w, 0 or 1; None if the formula does not fit.

        Args:
            layer: the layer.
            forward: its forward, which is evaluated on test inputs.
        """
        parameters = dict(layer.named_parameters(recurse=False))
        if set(parameters) != {"weight"} or layer.weight.dim() != 1:
            return None
        if "variance_epsilon" not in vars(layer) and "eps" not in vars(layer):
            return None
        eps = vars(layer).get("variance_epsilon", vars(layer).get("eps")) or 1e-6
        line = torch.linspace(-1, 1, 2 * layer.weight.numel(), device=layer.weight.device)
        rows = line.reshape(2, -1)
        probe = torch.cat([rows, eps**0.5 * rows]).to(layer.weight.dtype)  # the last two test eps
        weight = rows[1].to(layer.weight.dtype) + 0.5  # the layer's weight may be all zeros
        with torch.no_grad():
            try:
                output = call_with(layer, forward, {id(layer.weight): weight}, (probe,), {})
            except TypeError:  # the layer needs a further argument, such as a gate
                return None
            factor, weight = self.normalised(layer, probe), weight.float()
        tolerance = {"rtol": 2 * torch.finfo(probe.dtype).eps ** 0.75, "atol": 1e-6}
        for offset in (0.0, 1.0):
            expected = factor * (offset + weight)
            if isinstance(output, Tensor) and torch.allclose(output.float(), expected, **tolerance):
                return offset
        return None

    def eps(self, layer: Any, dtype: torch.dtype) -> float:
        """Return the constant that is added to the mean square of an input of that dtype."""
        eps: float | None = vars(layer).get("variance_epsilon", vars(layer).get("eps"))
        if eps is None:  # torch's RMSNorm uses the machine epsilon of the dtype it computes in
            return torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        return eps

    def normalised(self, layer: Any, layer_input: Tensor) -> Tensor:
        """Return ``x / rms(x)``, of the input's shape, float32, as a new tensor."""
        x, eps = layer_input.float(), self.eps(layer, layer_input.dtype)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


@layer_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class ConvolutionRule(LayerRule):
    """A convolution, as a linear layer over patches or by one backward convolution.

    A 2-d convolution with patches that do not overlap and one group (the embedding of a vision
    transformer) is a linear layer over patches (n = in * kh * kw). In general the patches would
    take kh * kw times the input's memory. Then the gradients of all samples come from one backward
    convolution, in which every sample is a group.
    """

    def applies(self, layer: Any) -> bool:
        """Return whether the layer pads with zeros."""
        return layer.padding_mode == "zeros"

    def gradients(
        self, layer: Any, saved: Tensor, grad_output: Tensor, batch_size: int
    ) -> dict[str, Single]:
        dims = len(layer.kernel_size)
        rows = grad_output.flatten(-dims).transpose(1, 2)  # (b, places, m)
        rows = rows.reshape(batch_size, -1, rows.shape[-1])
        weight = (
            Factored(rows, self._patches(layer, saved, batch_size))
            if dims == 2 and layer.groups == 1 and layer.stride == layer.kernel_size
            else Dense(self._dense(layer, saved, grad_output, batch_size))
        )
        return {"weight": weight, "bias": Dense(rows.sum(1, dtype=torch.float32))}

    def _patches(self, layer: Any, saved: Tensor, batch_size: int) -> Tensor:
        """Return the patches of each sample, (B, places, n)."""
        padding = 0 if isinstance(layer.padding, str) else layer.padding  # "same" allows no stride
        patches = functional.unfold(
            saved, layer.kernel_size, layer.dilation, padding, layer.stride
        )  # (b, n, places)
        return patches.transpose(1, 2).reshape(batch_size, -1, patches.shape[1])

    def _dense(self, layer: Any, saved: Tensor, grad_output: Tensor, batch_size: int) -> Tensor:
        """Return the weight's gradient of each sample, (B, *weight), from one convolution."""
        padding = layer.padding
        if isinstance(padding, str):  # pad the input explicitly
            saved = functional.pad(saved, layer._reversed_padding_repeated_twice)
            padding = (0,) * len(layer.kernel_size)
        shapes = layer.weight.shape, layer.groups, batch_size
        return of_kernels(saved, grad_output, *shapes, layer.stride, padding, layer.dilation)
