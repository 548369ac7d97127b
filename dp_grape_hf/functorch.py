"""The functorch engine: the loss of one sample, vectorised over the samples by ``torch.func.vmap``.

This is the definition of a per-sample gradient, written out: every sample has coordinates of its
own, the whole model runs under vmap, and one backward pass of the sum of the losses differentiates
each loss in its own sample's coordinates. No sample can reach another's loss, whatever the model
does. It shares nothing with the layer rules, so it checks them, and it serves models that the
layerwise engine refuses. The model's code must be traceable by vmap.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.func import vmap

from dp_grape_hf.coordinates import call_in_coordinates, zero_coordinates
from dp_grape_hf.errors import UnsupportedModelError
from dp_grape_hf.per_sample import (
    Gradients,
    GradSampleMode,
    Inputs,
    PerSampleEngine,
    batch_size_of,
)
from dp_grape_hf.probing import copies_of_first, evaluating, first_two
from dp_grape_hf.projections import Projector
from dp_grape_hf.representations import Dense, Single, add
from dp_grape_hf.vectorise import Batching, refusing_dynamic_code, vmap_safe


class FunctorchEngine(PerSampleEngine):
    """Vectorises one sample's loss over the samples. See the module's docstring."""

    grad_sample_modes = (GradSampleMode.AUTO, GradSampleMode.MATERIALISE)
    isolates_samples = True
    _probed = False

    def __call__(
        self, inputs: Inputs, projectors: Mapping[str, Projector]
    ) -> tuple[Tensor, Gradients]:
        """Returns losses (B,) and per-sample gradients by parameter name (sensitive)."""
        batch_size_of(inputs)  # refuses inputs that do not tell the samples apart
        if not self._probed:
            self._probe(inputs, projectors)
            self._probed = True
        self._examine(inputs, lambda batch: self._pass(batch, projectors))
        losses, found = self._pass(inputs, projectors)
        left_out = self.trainable.keys() - found.keys()
        found |= self.zero_gradients(left_out, losses, projectors)
        return losses, {name: found[name] for name in self.trainable}

    def assume_probed(self, inputs: Inputs) -> None:
        """Checks nothing, and has nothing to learn."""
        super().assume_probed(inputs)
        self._probed = True

    def _pass(
        self, inputs: Inputs, projectors: Mapping[str, Projector]
    ) -> tuple[Tensor, Gradients]:
        """Returns losses (B,) and the gradients of the parameters that the pass used."""
        batch_size = batch_size_of(inputs)
        samples = {key: value for key, value in inputs.items() if isinstance(value, Tensor)}
        constants = {key: value for key, value in inputs.items() if key not in samples}
        captured: dict[str, list[Single]] = defaultdict(list)
        coordinates = {
            name: zero_coordinates(weight, projectors.get(name), batch_size)
            for name, weight in self.trainable.items()
        }

        def one(coordinates: dict[str, Tensor], sample: dict[str, Tensor]) -> Tensor:
            batch = {**{key: value[None] for key, value in sample.items()}, **constants}
            with Batching(next(iter(coordinates.values()))):
                return call_in_coordinates(
                    self.model,
                    lambda: self.losses(self.model, batch, 1)[0],
                    coordinates,
                    projectors,
                    lambda name, gradient: captured[name].append(self.in_form(gradient)),
                )

        label = f"the model ({type(self.model).__name__})"
        plain = partial(self.losses, self.model, inputs, batch_size)
        with torch.enable_grad():
            with refusing_dynamic_code(label, plain), vmap_safe(self.model):
                losses = vmap(one, randomness="different")(coordinates, samples)
            with self._refusing_checkpointing():
                leaves = list(coordinates.values())
                gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
        for name, gradient in zip(coordinates, gradients, strict=True):
            if gradient is not None:
                captured[name].append(Dense(gradient))
        return losses.detach(), {name: add(uses) for name, uses in captured.items()}

    @contextlib.contextmanager
    def _refusing_checkpointing(self) -> Iterator[None]:
        """Turns the error of a forward pass that is repeated outside vmap into a clear one."""
        try:
            yield
        except RuntimeError as error:
            if "escaped from inside a function being vmapped" not in str(error):
                raise
            raise UnsupportedModelError(
                f"{type(self.model).__name__} repeats parts of its forward pass during the "
                "backward pass (gradient checkpointing), which is outside vmap. Switch it off "
                '(gradient_checkpointing=False), or use engine="layerwise".'
            ) from error

    def _probe(self, inputs: Inputs, projectors: Mapping[str, Projector]) -> None:
        """Refuses parameters without part in the loss or with a part that is not seen.

        It also refuses a model that computes something else under vmap than without.
        """
        two = first_two(inputs)
        first, second = (copies_of_first(two, 1, sample=i) for i in (0, 1))
        weights, rounding = list(self.trainable.values()), self._rounding()
        with evaluating(self.model), torch.enable_grad():
            loss = self.losses(self.model, first, 1)
            expected = (
                torch.autograd.grad(loss.sum(), weights, allow_unused=True)
                if loss.requires_grad
                else ()
            )
            used = {n: g for n, g in zip(self.trainable, expected, strict=False) if g is not None}
            self.refuse_unused(used)
            with torch.no_grad():
                plain = torch.cat([loss.detach(), self.losses(self.model, second, 1)])
            losses, found = self._pass(two, projectors)
        if unseen := [name for name in self.trainable if name not in found]:
            raise UnsupportedModelError(
                f"The model uses {', '.join(unseen)} through code that does not take another "
                "tensor in the place of the parameter (an LSTM's flat weights, a custom "
                "autograd.Function), so the functorch engine does not see its gradient. Freeze it "
                'with requires_grad_(False), or use engine="layerwise".'
            )
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            self._refuse_another_loss(losses, plain, rounding)
            if bool(loss.abs() > rounding.small):
                self._refuse_other_gradients(found, used, projectors, rounding)

    def _refuse_another_loss(self, losses: Tensor, plain: Tensor, rounding: _Rounding) -> None:
        """Refuses losses (B,) under vmap that are not what they are without."""
        allowed = rounding.loss * plain.abs() + rounding.small
        same = (losses - plain).abs() <= allowed
        if not (same | ~plain.isfinite()).all():  # a sample with NaN values says nothing
            raise UnsupportedModelError(self._differs("another loss"))

    def _refuse_other_gradients(
        self,
        found: Gradients,
        expected: Mapping[str, Tensor],
        projectors: Mapping[str, Projector],
        rounding: _Rounding,
    ) -> None:
        """Refuses gradients of the first of two samples that are not what autograd says."""
        squares = torch.zeros(2)  # of the error, and of the gradient
        for name, own in expected.items():
            one_hot = torch.tensor([1.0, 0.0], device=own.device)
            projector, own = projectors.get(name), own.float()
            own = projector.project(own) if projector else own
            error = found[name].weighted_sum(one_hot) - own
            squares += torch.stack([error.norm(), own.norm()]).cpu().square()
        error, norm = squares.sqrt().tolist()
        same = error <= rounding.gradient * norm + rounding.small
        if math.isfinite(norm) and not same:
            raise UnsupportedModelError(self._differs("other gradients"))

    def _rounding(self) -> _Rounding:
        low = torch.is_autocast_enabled(self.device.type) or any(
            not p.is_floating_point() or torch.finfo(p.dtype).bits < 32  # or a quantised one
            for p in self.model.parameters()
        )
        return _LOW if low else _FULL

    def _differs(self, what: str) -> str:
        return (
            f"{type(self.model).__name__} computes {what} of one example under torch.func.vmap "
            "than without it: its code asks how it is run, or draws random numbers in evaluation "
            'mode. Use engine="layerwise", or another attn_implementation.'
        )


@dataclass(frozen=True)
class _Rounding:
    """How far rounding alone may set apart what a model computes under vmap and without."""

    loss: float  # relative
    gradient: float  # of all parameters together, relative
    small: float  # absolute, of either; the gradient of a loss below this is rounding


_FULL = _Rounding(loss=1e-3, gradient=1e-2, small=1e-4)
_LOW = _Rounding(loss=5e-2, gradient=0.5, small=1e-2)
