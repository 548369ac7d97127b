"""How much of what was released is more than noise: free to see, as releases are private.

The norm of a private gradient is that of its noise, nearly: a run that learns nothing logs the same
numbers as one that does. But the noise of a release n is known in size. With s what it was added
to, E |s + n|^2 = |s|^2 + d std^2 over d numbers, so the energy beyond the noise is that of s. Over
several releases it stands out of the spread of |n|^2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

_SURE = 2.0  # standard deviations


class Strength(NamedTuple):
    """Norms of a private gradient, root mean square over some releases."""

    signal: float  # without the noise; 0 if it cannot be told from none
    noise: float


class Signal:
    """Adds up the energy of releases, and of their noise.

    Guarantee:
        A function of releases and of public numbers alone.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._count = 0
        self._noise = self._variance = 0.0
        self._energy: Tensor | float = 0.0

    def add(
        self, private_grads: Mapping[str, Tensor], std: float, factors: Mapping[str, float]
    ) -> Tensor:
        """Takes note of a release; returns its L2 norm, a scalar.

        Args:
            private_grads: by name, the release.
            std: of the noise in each of its numbers, where no factor divides it.
            factors: parameter name -> what divides it.
        """
        norm = torch.nn.utils.get_total_norm(list(private_grads.values()))
        self._count += 1
        self._energy += norm.detach().double().square()
        for name, value in private_grads.items():
            variance = (std / factors.get(name, 1.0)) ** 2
            self._noise += value.numel() * variance
            self._variance += 2 * value.numel() * variance**2
        return norm

    def take(self) -> Strength | None:
        """Returns what the releases held since the last call, or None if there were none."""
        if not self._count:
            return None
        found = float(self._energy) - self._noise
        sure = found > _SURE * math.sqrt(self._variance)
        squares = (found if sure else 0.0, self._noise)
        strength = Strength(*(math.sqrt(square / self._count) for square in squares))
        self._forget()
        return strength
