"""SGD along the random directions of a step, by the private number that each of them got.

``gradients.zeroth_order`` says what these numbers are. The directions come from
``projections.directions``, a block of rows at a time.

Shapes: K directions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.projections import (
    DIRECTION,
    Directions,
    is_short,
    round_at_random,
    rounding_generator,
)


class ZerothOrderSGD(torch.optim.Optimizer):
    """Moves the weights along the directions of a step, by the private scalars of its release.

    ``W -= lr / K * sum_k g_k z_k`` with decoupled weight decay. It has no state: the directions
    are drawn anew. It is post-processing: it sees private numbers only, and costs no privacy. A
    bfloat16 or float16 weight is rounded at random at every step, without bias, so that updates
    below its precision count on average.

    Args:
        params: parameters or parameter groups, which may set ``lr`` and ``weight_decay``.
        directions: those of the engine whose release it receives.
        lr: the learning rate; by default that of DPZero's and MeZO's experiments.
        weight_decay: decoupled; a step multiplies the weight by ``1 - lr * weight_decay``.
        rounding_seed: the public seed of the rounding.
    """

    def __init__(
        self,
        params: Iterable[Any],
        directions: Directions,
        lr: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        rounding_seed: int = 0,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}={value} is out of range: it must be at least 0.")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.directions = directions
        self._rounding_seed = rounding_seed
        self._received: tuple[list[float], int] | None = None

    def receive(self, private_scalars: Tensor, step: int) -> None:
        """Takes the private scalars (K,) of a release, and the step whose directions they are of.

        Raises:
            PrivacyError: if there is not one scalar per direction.
        """
        if private_scalars.shape != (self.directions.count,):
            raise PrivacyError(
                f"The private scalars have shape {tuple(private_scalars.shape)}, and a step has "
                f"{self.directions.count} directions. Hand over the release under {DIRECTION!r}."
            )
        self._received = private_scalars.tolist(), step

    def state_bytes(self) -> int:
        """Returns 0: nothing is kept from step to step."""
        return 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates the parameters from the scalars received, once.

        Raises:
            PrivacyError: if nothing was received since the last step: there was no release.
        """
        if closure is not None:
            raise PrivacyError("A closure would evaluate without noise; it is not supported.")
        if self._received is None:
            raise PrivacyError("step() without receive(): there is no private scalar to apply.")
        (scalars, step), self._received = self._received, None
        rounded = 0
        for group in self.param_groups:
            lr = float(group["lr"])
            decay = 1 - lr * group["weight_decay"]
            coefficients = [-lr * scalar / len(scalars) for scalar in scalars]
            for weight in group["params"]:
                if self.directions.name_of(weight) is None:
                    continue
                for rows, update in self.directions.combined(weight, step, coefficients):
                    if is_short(weight):
                        number = (step << 32) + rounded
                        coins = rounding_generator(self._rounding_seed, number, weight.device)
                        total = weight[rows].float().mul_(decay).add_(update)
                        weight[rows] = round_at_random(total, weight.dtype, coins)
                        rounded += 1
                    else:
                        weight[rows].mul_(decay).add_(update)
