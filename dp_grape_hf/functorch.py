"""The functorch engine: ``vmap(grad(loss))`` over samples of the whole model.

This is the definition of a per-sample gradient, written out. It shares nothing with the layer
rules, so it checks them, and it serves models that the layerwise engine refuses. It keeps B copies
of the model's activations in their vmapped form and is slow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dp_grape_hf.losses import LossFunction
from dp_grape_hf.per_sample import (
    Gradients,
    Inputs,
    PerSampleEngine,
    batch_size_of,
    engine,
)
from dp_grape_hf.probing import evaluating
from dp_grape_hf.projection import Projector
from dp_grape_hf.representations import Dense

_VMAP_SAFE = "dp_grape_vmap"


def _full_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Builds the attention mask always: to leave it out, it would have to be read, per sample."""
    kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return sdpa_mask(*args, **kwargs)


AttentionMaskInterface.register(_VMAP_SAFE, _full_mask)
AttentionInterface.register(_VMAP_SAFE, sdpa_attention_forward)


@contextlib.contextmanager
def _vmap_safe(model: nn.Module) -> Iterator[None]:
    """Makes attention of transformers models usable under vmap: full masks, the math kernel."""
    configs = {
        id(config): config
        for module in model.modules()
        if (config := getattr(module, "config", None)) is not None
        and getattr(config, "_attn_implementation", None) is not None
    }.values()
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = _VMAP_SAFE
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation


@engine("functorch")
class FunctorchEngine(PerSampleEngine):
    """Differentiates one sample's loss by its coordinates and vectorises that over the samples.

    Args:
        model: the model; its code must be traceable by vmap.
        loss: as in ``PerSampleEngine``.
        chunk_size: how many samples are vectorised at once; all of them if None.
    """

    def __init__(
        self, model: nn.Module, loss: LossFunction | None = None, chunk_size: int | None = None
    ) -> None:
        super().__init__(model, loss)
        self._chunk_size = chunk_size
        self._probed = False

    def __call__(
        self, inputs: Inputs, projectors: Mapping[str, Projector]
    ) -> tuple[Tensor, Gradients]:
        """Returns losses (B,) and per-sample gradients by parameter name (sensitive)."""
        batch_size_of(inputs)
        if not self._probed:
            self._probe(inputs)
        tensors = {key: value for key, value in inputs.items() if isinstance(value, Tensor)}
        constants = {key: value for key, value in inputs.items() if key not in tensors}
        zeros = {
            name: weight.new_zeros(self.coordinate_shape(name, projectors))
            for name, weight in self.trainable.items()
        }

        def one(coordinates: dict[str, Tensor], sample: dict[str, Tensor]) -> Tensor:
            parameters = {
                name: self.trainable[name].detach()
                + (projectors[name].lift(z) if name in projectors else z)
                for name, z in coordinates.items()
            }

            def model(**kwargs: Any) -> Any:
                return functional_call(self.model, parameters, (), kwargs)

            batch = {**{key: value[None] for key, value in sample.items()}, **constants}
            return self.losses(model, batch, 1)[0]

        differentiate = grad_and_value(one)
        vectorised = vmap(
            differentiate, in_dims=(None, 0), randomness="different", chunk_size=self._chunk_size
        )
        with _vmap_safe(self.model):
            gradients, losses = vectorised(zeros, tensors)
        return losses.detach(), {name: Dense(value.detach()) for name, value in gradients.items()}

    def _probe(self, inputs: Inputs) -> None:
        """Refuses parameters without part in the loss: vmap would call their gradient zero."""
        sample = {k: v[:1] if isinstance(v, Tensor) else v for k, v in inputs.items()}
        with evaluating(self.model):
            loss = self.losses(self.model, sample, 1).sum()
        weights = list(self.trainable.values())
        found = torch.autograd.grad(loss, weights, allow_unused=True) if loss.requires_grad else ()
        self.refuse_unused(
            {n for n, g in zip(self.trainable, found, strict=False) if g is not None}
        )
        self._probed = True
