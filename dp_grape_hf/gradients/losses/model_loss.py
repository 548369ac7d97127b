"""``ModelLoss``: the base class of losses that decide which inputs the model receives.

``ReturnedLoss`` is the loss that a model itself returns, for one example at a time. Most models
that users write return the mean loss of a batch. For a batch of one example, this is the loss of
the example. So the model runs on one example at a time, and its loss need not be known.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dp_grape_hf.errors import UnsupportedModelError
from dp_grape_hf.gradients.losses.heads import Inputs
from dp_grape_hf.gradients.rows import batch_size_of, copies_of

_TARGETS = {"y", "target", "targets"}


class ModelLoss(ABC):
    """A per-sample loss that decides which inputs of a batch the model receives."""

    name: ClassVar[str]
    """The name of the loss in error messages."""

    @property
    def regresses(self) -> bool:
        """True if the loss is a regression; otherwise the outputs are logits."""
        return False

    @abstractmethod
    def split(self, inputs: Mapping[str, Any]) -> tuple[Inputs, Any]:
        """Return the inputs to run the model with, and the labels for ``__call__``."""

    @abstractmethod
    def __call__(self, outputs: Any, labels: Any) -> Tensor:
        """Return the losses (B,)."""

    @abstractmethod
    def of_batch(self, model: Callable[..., Any], inputs: Mapping[str, Any]) -> Tensor | None:
        """Return the loss of ordinary training without privacy, a scalar; None without one."""


class ReturnedLoss(ModelLoss):
    """The loss that a model returns for a batch of one example, ``(outputs, None) -> (1,)``.

    Args:
        model: the model. It returns a mapping with ``loss``. If its forward takes labels, it may
            also return a tuple that begins with the loss, or the loss.
    """

    name: ClassVar[str] = "the model, which returns its own loss,"

    def __init__(self, model: nn.Module) -> None:
        self._name = type(model).__name__
        self._takes_labels = any(map(is_target, signature(model.forward).parameters))

    def split(self, inputs: Mapping[str, Any]) -> tuple[Inputs, None]:
        """Return all inputs, including labels, which the model needs for its loss."""
        return dict(inputs), None

    def __call__(self, outputs: Any, labels: Tensor | None = None) -> Tensor:
        """Return the loss of a batch of one, (1,), float32.

        Raises:
            UnsupportedModelError: if the model returns no scalar loss.
        """
        if isinstance(outputs, Mapping):
            loss = outputs.get("loss")
        elif self._takes_labels:
            loss = outputs[0] if isinstance(outputs, tuple) and outputs else outputs
        else:  # a number may be a prediction
            loss = None
        if loss is None and not self._takes_labels:
            raise UnsupportedModelError(
                f"The loss of {self._name} is not known per sample: its forward takes no labels, "
                "and it returned no mapping with 'loss' for one example. Pass compute_loss_func=f "
                "where f(outputs, labels) returns one loss per sample, of shape (B,), each "
                "computed from that sample alone, or return {'loss': ..., 'logits': ...}."
            )
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            raise UnsupportedModelError(
                f"{self._name} received one example with its labels, and returned no loss: neither "
                "a mapping with 'loss', nor a tuple that begins with it. Clipping needs the loss "
                "of each example. Return {'loss': ..., 'logits': ...}, or pass compute_loss_func=f "
                "where f(outputs, labels) returns one loss per sample, of shape (B,)."
            )
        return loss.float().reshape(1)

    def each(self, run: Callable[..., Any], inputs: Mapping[str, Any]) -> Tensor:
        """Run the model on one example after the other; return the losses (B,)."""
        size = batch_size_of(inputs)
        rows = (copies_of(inputs, 1, row) for row in range(size)) if size > 1 else [inputs]
        return torch.cat([self(run(**row)) for row in rows])

    def of_batch(self, model: Callable[..., Any], inputs: Mapping[str, Any]) -> Tensor:
        """Return the mean of the losses of single examples, a scalar."""
        return self.each(model, inputs).mean()


def is_target(name: str) -> bool:
    """Return whether an argument of a forward is a label, by its name."""
    return "label" in name or name in _TARGETS


def returns_its_loss(model: nn.Module) -> bool:
    """Return whether a forward is not defined in transformers, and so may return its own loss."""
    module = getattr(model.forward, "__module__", None) or ""
    return module.partition(".")[0] != "transformers"
