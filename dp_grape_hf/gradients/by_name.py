"""The engines by name, and a function that computes per-sample gradients."""

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
from dp_grape_hf.gradients.losses.model_loss import ReturnedLoss
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
    """Return the engine of that name for a model.

    A model that returns its own loss must run on batches of one example, which only ``functorch``
    does. So ``functorch`` is used for it, whatever ``name`` is.

    Args:
        name: a name in ``ENGINES``.
        model: the model.
        loss: ``(outputs, labels) -> (B,)``; None for the loss of the model's head.
        grad_sample_mode: see ``GradSampleMode``.
        **options: further arguments of the engine's class.

    Raises:
        PrivacyError: if there is no such engine, or it does not have that mode.
        UnsupportedModelError: if a module is not supported, or the loss is not known.
    """
    if name not in ENGINES:
        raise PrivacyError(f"engine={name!r} does not exist. Use one of: {', '.join(ENGINES)}.")
    refuse_modules(model)  # before its loss is looked up by the name of its class
    loss = loss_for(model) if loss is None else loss
    if isinstance(loss, ReturnedLoss):
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
    """Return per-sample losses (B,) and per-sample gradients by parameter name.

    Args:
        model: any model with a supported head, or any module with ``loss`` given.
        inputs: keyword arguments of the model, ``labels`` included; batch in dimension 0.
        projections: parameter name -> ``Projector``; other parameters are not projected.
        engine: ``layerwise`` or ``functorch``.
        loss: ``(outputs, labels) -> (B,)``; None for the loss of the model's head.
        grad_sample_mode: the representation of gradients; see ``GradSampleMode``.

    Raises:
        UnsupportedModelError: if a gradient cannot be computed exactly. The message names the
            module.
    """
    return make_engine(engine, model, loss, grad_sample_mode)(inputs, projections or {})
