"""The engines by name, and one of them as a function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.gradients.definition import FunctorchEngine
from dp_grape_hf.gradients.engine import (
    Gradients,
    GradSampleMode,
    Inputs,
    PerSampleEngine,
    refuse_modules,
)
from dp_grape_hf.gradients.layerwise import LayerwiseEngine
from dp_grape_hf.gradients.losses.losses import LossFunction, loss_for
from dp_grape_hf.gradients.losses.own_loss import OwnLoss
from dp_grape_hf.projections import Projector

ENGINES: dict[str, type[PerSampleEngine]] = {
    "functorch": FunctorchEngine,
    "layerwise": LayerwiseEngine,
}
"""Every engine, by the name that arguments and ledger use."""

OF_SINGLE_EXAMPLES = "functorch"
"""The engine of models that return their own loss."""


def make_engine(
    name: str,
    model: nn.Module,
    loss: LossFunction | None = None,
    grad_sample_mode: str = GradSampleMode.AUTO,
    **options: Any,
) -> PerSampleEngine:
    """Returns the engine of that name for a model; ``options`` are its own.

    A loss that a model returns itself is that of a batch of one example, which only ``functorch``
    runs the model on. It then takes the place of the other.

    Raises:
        PrivacyError: if there is no such engine, or it does not have that mode.
        UnsupportedModelError: if a module is refused, or the loss is not known.
    """
    if name not in ENGINES:
        raise PrivacyError(f"engine={name!r} is not known; choose one of: {', '.join(ENGINES)}.")
    refuse_modules(model)  # before its loss is looked up by the name of its class
    loss = loss_for(model) if loss is None else loss
    if isinstance(loss, OwnLoss):
        name, options = OF_SINGLE_EXAMPLES, {}
    return ENGINES[name](model, loss, grad_sample_mode=grad_sample_mode, **options)


def per_sample_gradients(
    model: nn.Module,
    inputs: Inputs,
    *,
    projections: Mapping[str, Projector] | None = None,
    engine: str = "layerwise",
    loss: LossFunction | None = None,
    grad_sample_mode: str = GradSampleMode.AUTO,
) -> tuple[Tensor, Gradients]:
    """Returns per-sample losses (B,) and per-sample gradients by parameter name.

    Args:
        model: any model with a supported head, or any module with ``loss`` given.
        inputs: keyword arguments of the model, ``labels`` included; batch in dimension 0.
        projections: parameter name -> ``Projector``; parameters not named are not projected.
        engine: ``layerwise`` or ``functorch``.
        loss: ``(outputs, labels) -> (B,)``, if not the model's own head.
        grad_sample_mode: in what form gradients are returned; see ``GradSampleMode``.

    Raises:
        UnsupportedModelError: if a gradient cannot be computed exactly; the message names the
            module.
    """
    return make_engine(engine, model, loss, grad_sample_mode)(inputs, projections or {})
