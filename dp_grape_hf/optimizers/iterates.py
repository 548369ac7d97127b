"""Which weights are released after training: the last, or an average.

The accountant bounds the release of all private gradients of a run together, so every iterate, and
whatever is computed from them, is post-processing and costs no privacy. An average takes out noise
that the last steps left in the weights.

Use: ``update`` after each step of the optimizer; ``released`` around what is to see the released
weights; ``release_`` when training is over. An optimizer with ``float32_updates`` may hold a part
of the weights apart from the parameters: call its ``merge_`` before each of the three.

To add one, subclass ``Iterate`` and register it with ``@iterate("name")``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dp_grape_hf.sharding import gathered, spread


class Iterate(ABC):
    """Sees the weights after every step, and puts those to release into the model.

    Args:
        parameters: name -> parameter, of those that are trained.
    """

    name: ClassVar[str]

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self._values: dict[str, Tensor] = {}  # of all parameters or, before it is needed, of none
        self._updates = 0
        self._swapped = False

    @torch.no_grad()
    def update(self) -> None:
        """Takes note of the weights after a step; on every rank."""
        self._refuse_if_swapped("update()")
        self._updates += 1
        self._see(self._updates)

    @abstractmethod
    def _see(self, count: int) -> None:
        """Brings ``_values`` up to date with the weights after step ``count``, from 1."""

    @contextmanager
    def released(self) -> Iterator[None]:
        """Has the released weights in the model, and afterwards those of training, unchanged.

        Meanwhile the weights of training are kept in a copy.

        Raises:
            ValueError: if it is entered twice, or before the first ``update``.
        """
        self._refuse_if_swapped("released()")
        kept = {name: self._parameters[name].detach().clone() for name in self._values_to_write()}
        self._swapped = True
        try:
            self._write(self._values)
            yield
        finally:
            self._write(kept)
            self._swapped = False

    def release_(self) -> None:
        """Puts the released weights into the model for good.

        Raises:
            ValueError: inside of ``released``, or before the first ``update``.
        """
        self._refuse_if_swapped("release_()")
        self._write(self._values_to_write())

    def _values_to_write(self) -> dict[str, Tensor]:
        if self._updates == 0:
            raise ValueError(
                "There are no weights to release: update() was not called after any step."
            )
        return self._values

    @torch.no_grad()
    def _write(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self._parameters[name].copy_(value)

    def _refuse_if_swapped(self, call: str) -> None:
        if self._swapped:
            raise ValueError(f"{call} inside of released(): the model has other weights than it.")

    # ---- State ----

    def state_dict(self) -> dict[str, Any]:
        """Returns the count of updates and what is kept; the tensors are not copied.

        A collective call where weights are sharded.
        """
        return {"iterate": self.name, "updates": self._updates, "values": gathered(self._values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state that was saved.

        Raises:
            ValueError: if it is that of another iterate, or of other parameters.
        """
        if state["iterate"] != self.name:
            raise ValueError(
                f"The state was saved with iterate={state['iterate']!r}, and this is {self.name!r}."
            )
        values = state["values"]
        found = {name: tuple(value.shape) for name, value in values.items()}
        needed = {name: tuple(value.shape) for name, value in self._parameters.items()}
        if values and found != needed:
            wrong = sorted(n for n in found | needed if found.get(n) != needed.get(n))
            raise ValueError(
                f"The state is that of other parameters; {len(wrong)} differ in name or shape, "
                f"the first is {wrong[0]}. Resume with the model and the frozen parameters of "
                "the run that saved it."
            )
        self._updates = int(state["updates"])
        self._values = {
            name: spread(value.to(like.device, self._kept_as(name), copy=True), like)
            for name, value in values.items()
            for like in [self._parameters[name]]
        }

    def _kept_as(self, name: str) -> torch.dtype:
        return self._parameters[name].dtype


ITERATES: dict[str, type[Iterate]] = {}


def iterate(name: str) -> Callable[[type[Iterate]], type[Iterate]]:
    """Registers an iterate under the name that arguments use."""

    def register(cls: type[Iterate]) -> type[Iterate]:
        if name in ITERATES:
            raise ValueError(f"iterate {name!r} is registered twice")
        cls.name = name
        ITERATES[name] = cls
        return cls

    return register


@iterate("last")
class LastIterate(Iterate):
    """The weights as training left them."""

    def _see(self, count: int) -> None:
        pass


@iterate("average")
class AverageOfIterates(Iterate):
    """The exponential moving average of the weights after each step, float32.

    The weights after step i of n have the share ``decay**(n - i) * (1 - decay) / (1 - decay**n)``:
    the shares sum to one from the first step on, so those at which training started have no part
    in it, however slowly it decays.

    Args:
        parameters: name -> parameter, of those that are trained.
        decay: from 0, the last iterate, to 1, the plain mean of all.

    Raises:
        ValueError: for a decay out of range.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        if not 0 <= decay <= 1:
            raise ValueError(f"{decay=} must be from 0, the last iterate, to 1, the plain mean.")
        super().__init__(parameters)
        self._decay = decay

    def _see(self, count: int) -> None:
        if not self._values:
            self._values = {
                name: torch.zeros_like(parameter.detach(), dtype=torch.float32)
                for name, parameter in self._parameters.items()
            }
        share = _newest_share(self._decay, count)
        for name, value in self._values.items():
            value.lerp_(self._parameters[name].detach().float(), share)

    def _kept_as(self, name: str) -> torch.dtype:
        return torch.float32


def _newest_share(decay: float, count: int) -> float:
    """Returns ``(1 - decay) / (1 - decay**count)``, and its limits at 0 and 1."""
    if decay in (0, 1):
        return 1 / count if decay else 1.0
    return (1 - decay) / -math.expm1(count * math.log(decay))
