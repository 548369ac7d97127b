"""The functorch engine: the loss of one sample, vectorised over the samples by ``torch.func.vmap``.

This engine follows the definition of a per-sample gradient: each sample has separate coordinates,
the whole model runs under vmap, and one backward pass of the sum of the losses differentiates each
loss in the coordinates of its sample. No sample can influence another's loss, whatever the model
does. The engine does not use the layer rules, so it is an independent check of them. It also
supports models that the layerwise engine does not. vmap must be able to trace the model's code; the
second half of this module makes the code of transformers traceable.
"""

import contextlib
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from dp_grape_hf.errors import ERRORS, PrivacyError, UnsupportedModelError
from dp_grape_hf.gradients import replay
from dp_grape_hf.gradients.checks.guards import configs_of, fails, without_checkpointing
from dp_grape_hf.gradients.engine import Inputs, PerSampleEngine
from dp_grape_hf.gradients.flat import FlatGradients
from dp_grape_hf.gradients.forms import Dense, Single
from dp_grape_hf.gradients.losses.model_loss import ReturnedLoss
from dp_grape_hf.gradients.rows import batch_size_of, rows_of, running_alone
from dp_grape_hf.gradients.stand_ins import (
    call_for_one,
    call_in_coordinates,
    outside_vmap,
    zero_coordinates,
)
from dp_grape_hf.projections import Projector

logger = logging.getLogger(__name__)


class NotVectorisedError(UnsupportedModelError):
    """Code that runs without ``torch.func.vmap`` fails under it."""


class FunctorchEngine(PerSampleEngine):
    """The engine that vectorises one sample's loss over the samples; see the module's docstring."""

    isolates_samples = True
    _loops = False  # whether the model runs for one sample after another

    def __call__(
        self, inputs: Inputs, projectors: Mapping[str, Projector]
    ) -> tuple[Tensor, FlatGradients]:
        self._examine_once(inputs, projectors)
        return self.unchecked(inputs, projectors)

    def _examine(self, inputs: Inputs, projectors: Mapping[str, Projector]) -> bool:
        return replay.examine(self, inputs, projectors)

    def unchecked(
        self, inputs: Inputs, projectors: Mapping[str, Projector]
    ) -> tuple[Tensor, FlatGradients]:
        batch_size = batch_size_of(inputs)
        captured: dict[str, list[Single]] = defaultdict(list)
        coordinates = {
            name: zero_coordinates(weight, projectors.get(name), batch_size)
            for name, weight in self.trainable.items()
        }
        with torch.enable_grad():
            losses = self._losses_at(coordinates, inputs, projectors, captured)
            leaves = list(coordinates.values())
            try:
                gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
            except RuntimeError as error:
                if "escaped from inside a function being vmapped" not in str(error):
                    raise
                raise UnsupportedModelError(
                    f"{type(self.model).__name__} repeats parts of its forward pass during the "
                    "backward pass (gradient checkpointing). vmap does not support that. Set "
                    'gradient_checkpointing=False, or use engine="layerwise".'
                ) from error
        for name, gradient in zip(coordinates, gradients, strict=True):
            if gradient is not None:
                captured[name].append(Dense(gradient))
        losses = losses.detach()
        return losses, self.laid_out({}, captured, projectors, losses)

    def _losses_at(
        self,
        coordinates: dict[str, Tensor],
        inputs: Inputs,
        projectors: Mapping[str, Projector],
        captured: dict[str, list[Single]],
    ) -> Tensor:
        """Return the losses (B,) as functions of the coordinates of each sample.

        The backward pass adds gradients in other forms, such as factors, to ``captured``.
        """
        if not self._loops:
            try:
                return self._vectorised(coordinates, inputs, projectors, captured)
            except NotVectorisedError as error:
                if not isinstance(self.loss, ReturnedLoss):  # the other engine may run it
                    raise
                self._loops = True
                logger.warning(
                    "%s. It runs for one example after another instead. The gradients are exact, "
                    "but a physical batch of B examples takes about B times as long.",
                    f"{error}".partition(". ")[0],
                )
        losses = []
        by_sample = zip(*(z.unbind() for z in coordinates.values()), strict=True)
        for row, of_sample in enumerate(by_sample):
            one = dict(zip(coordinates, of_sample, strict=True))
            run = partial(self.losses, rows_of(inputs, slice(row, row + 1)))
            with running_alone(row):
                losses.append(call_for_one(self.model, run, one, projectors, (), {}))
        return torch.cat(losses)

    def _vectorised(
        self,
        coordinates: dict[str, Tensor],
        inputs: Inputs,
        projectors: Mapping[str, Projector],
        captured: dict[str, list[Single]],
    ) -> Tensor:
        """Return the losses of ``_losses_at`` from one pass under ``torch.func.vmap``."""
        samples = {key: value for key, value in inputs.items() if isinstance(value, Tensor)}
        constants = {key: value for key, value in inputs.items() if key not in samples}

        def one(coordinates: dict[str, Tensor], sample: dict[str, Tensor]) -> Tensor:
            batch = {**{key: value[None] for key, value in sample.items()}, **constants}
            with Batching(next(iter(coordinates.values()))):
                return call_in_coordinates(
                    self.model,
                    lambda: self.losses(batch)[0],
                    coordinates,
                    projectors,
                    lambda name, gradient: captured[name].append(self.in_form(gradient)),
                )

        label = f"the model ({type(self.model).__name__})"
        plain = partial(self.losses, inputs)
        with refusing_dynamic_code(label, plain), vmap_safe(self.model):
            return vmap(one, randomness="different")(coordinates, samples)


# ---- Running the code of transformers models under vmap over the samples ----

MaskFunction = Callable[..., Tensor | None]


def _in_full(build: MaskFunction) -> MaskFunction:
    """Return a mask function that always builds the mask.

    The decision to leave a mask out would read the values of each sample, which vmap cannot do.
    """

    def build_in_full(*args: Any, **kwargs: Any) -> Tensor | None:
        kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        return build(*args, **kwargs)

    return build_in_full


@contextlib.contextmanager
def vmap_safe(model: nn.Module) -> Iterator[None]:
    """Make transformers models usable under vmap.

    Inside, attention masks are built in full. Torch's attention function replaces kernels that vmap
    cannot run (flash and flex attention). Other attention implementations keep their names, because
    models read them. Gradient checkpointing is off, because it would repeat the forward pass
    outside vmap.

    Raises:
        UnsupportedModelError: if the model has stored a sample's tensor in a buffer.
    """
    configs = [
        config
        for config in configs_of(model)
        if re.search("flash|flex", getattr(config, "_attn_implementation", None) or "")
    ]
    before = [config._attn_implementation for config in configs]
    masks = ALL_MASK_ATTENTION_FUNCTIONS._local_mapping  # takes precedence over registered ones
    masks_before = dict(masks)
    full = {name: _in_full(build) for name, build in ALL_MASK_ATTENTION_FUNCTIONS.items()}
    try:
        for config in configs:  # the property would set inner configurations as well
            config._attn_implementation_internal = "sdpa"
        masks.update(full)
        with without_checkpointing(model):
            yield
    finally:
        masks.clear()
        masks.update(masks_before)
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation_internal = implementation
    for name, buffer in model.named_buffers():
        if torch._C._functorch.is_functorch_wrapped_tensor(buffer):
            raise UnsupportedModelError(
                f"{type(model).__name__} stores values of the samples in its buffer {name}. Under "
                "torch.func.vmap they have no value after the pass, so this model cannot be used "
                'further. Create it without that buffer, or use engine="layerwise".'
            )


class Batching(TorchFunctionMode):
    """Run operations outside vmap that vmap does not support: fused attention and shared draws.

    Args:
        batched: any tensor of vmap's samples.
    """

    def __init__(self, batched: Tensor) -> None:
        super().__init__()
        self._batched = batched

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func is torch.rand and args in ((), ([],), ((),)) and not kwargs.get("size"):
            # One draw for the whole batch, as in an ordinary pass, because branches read it (layer
            # drop). ``replay`` refuses the model if the draw has an influence.
            return outside_vmap(self._batched, lambda: (torch.rand(*args, **kwargs), None))
        if func is Tensor.requires_grad_:  # models call it for checkpointing, which is off
            return args[0]
        if func is functional.multi_head_attention_forward:  # its inner calls are not intercepted
            with sdpa_kernel(SDPBackend.MATH):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        def attend(
            query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
        ) -> tuple[Tensor, int]:
            """Reshape (B, b, heads, T, d) to (B * b, heads, T, d), which kernels support."""
            if mask is not None:  # its dimensions match the last ones of a sample's query
                mask = mask[(slice(None), *[None] * (query.dim() - mask.dim()))]
            if query.dim() < 5:  # no batch dimension within a sample: nothing may be merged
                output = functional.scaled_dot_product_attention(
                    query, key, value, mask, *args, **kwargs
                )
                return output, 0
            size = query.shape[:2]
            mask = None if mask is None else mask.expand(*size, *mask.shape[2:]).flatten(0, 1)
            query, key, value = (x.flatten(0, 1) for x in (query, key, value))
            output = functional.scaled_dot_product_attention(
                query, key, value, mask, *args, **kwargs
            )
            return output.unflatten(0, size), 0

        return outside_vmap(self._batched, attend, query, key, value, attn_mask)


@contextlib.contextmanager
def refusing_dynamic_code(label: str, plain: Callable[[], Any]) -> Iterator[None]:
    """Replace an error that occurs only under vmap by one that names the module.

    Args:
        label: the name of the module in error messages.
        plain: runs the module without vmap. An error that occurs there too (bad data) is raised
            unchanged, and so is a lack of memory.

    Raises:
        NotVectorisedError: if only vmap fails.
    """
    try:
        yield
    except (PrivacyError, torch.OutOfMemoryError):
        raise
    except ERRORS as error:
        if re.search(r"\b(vmap|functorch|Batching rule)\b", str(error)):
            reason = _first_sentence(error)
        elif fails(plain):
            raise
        else:
            reason = (
                f"one sample raises {type(error).__name__}, and the batch does not: "
                f"{_first_sentence(error)!r}"
            )
        raise NotVectorisedError(
            f"{label} cannot be vectorised over samples: {reason}. Freeze its parameters with "
            "requires_grad_(False), use an implementation that does not branch on values (for a "
            "mixture of experts, experts_implementation='batched_mm'), or use the other engine: "
            'engine="layerwise" vectorises only modules whose layers have no rule.'
        ) from error


def _first_sentence(error: BaseException) -> str:
    return str(error).strip().split(". ")[0].split("\n")[0]
