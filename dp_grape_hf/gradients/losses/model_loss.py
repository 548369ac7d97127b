"""``ModelLoss``: what a loss has to say that knows how a model is run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from dp_grape_hf.gradients.losses.heads import Inputs


class ModelLoss(ABC):
    """A loss that says itself what of a batch the model is run with."""

    name: ClassVar[str]
    """What errors call it."""

    @property
    def regresses(self) -> bool:
        """Whether outputs are to be near labels that are numbers; else they are logits."""
        return False

    @abstractmethod
    def split(self, inputs: Mapping[str, Any]) -> tuple[Inputs, Any]:
        """Returns what the model is run with, and what the losses are computed of beside."""

    @abstractmethod
    def __call__(self, outputs: Any, labels: Any) -> Tensor:
        """Returns the losses (B,)."""

    @abstractmethod
    def of_batch(self, model: Callable[..., Any], inputs: Mapping[str, Any]) -> Tensor | None:
        """Returns the loss that is minimised without privacy, a scalar, or None if it has none."""
