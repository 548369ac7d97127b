"""``ModelLoss``: the base class of losses that decide which inputs the model receives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from dp_grape_hf.gradients.losses.heads import Inputs


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
