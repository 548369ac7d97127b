"""How much of what was released is more than noise: free to see, as releases are private.

The norm of a private gradient is that of its noise, nearly: a run that learns nothing logs the same
numbers as one that does. But the noise of a release n is known in size. With s what it was added
to, E |s + n|^2 = |s|^2 + d std^2 over d numbers, so the energy beyond the noise is that of s. Over
several releases it stands out of the spread of |n|^2.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

_SURE = 2.0  # standard deviations


class Strength(NamedTuple):
    """Norms of a private gradient, root mean square over some releases."""

    signal: float  # without the noise; 0 if it cannot be told from none
    noise: float


class _Energy:
    """Of some parameters' releases, and of the noise in these."""

    noise = variance = 0.0
    found: Tensor | float = 0.0

    @classmethod
    def sum(cls, parts: Iterable[_Energy]) -> _Energy:
        """Returns that of all together."""
        whole = cls()
        for part in parts:
            whole.found = whole.found + part.found
            whole.noise += part.noise
            whole.variance += part.variance
        return whole

    def strength(self, count: int) -> Strength:
        """Returns what so many releases held."""
        beyond = float(self.found) - self.noise
        sure = beyond > _SURE * math.sqrt(self.variance)
        return Strength(*(math.sqrt(e / count) for e in (beyond if sure else 0.0, self.noise)))


class Signal:
    """Adds up the energy of releases, and of their noise.

    Attributes:
        groups: parameter name -> the group that it is also counted in.

    Guarantee:
        A function of releases and of public numbers alone.
    """

    def __init__(self) -> None:
        self.groups: Mapping[str, str] = {}
        self._forget()

    def _forget(self) -> None:
        self._count = 0
        self._energies: dict[str, _Energy] = defaultdict(_Energy)

    def add(
        self, private_grads: Mapping[str, Tensor], std: float, factors: Mapping[str, float]
    ) -> Tensor:
        """Takes note of a release; returns its L2 norm, a scalar.

        Args:
            private_grads: by name, the release.
            std: of the noise in each of its numbers, where no factor divides it.
            factors: parameter name -> what divides it.
        """
        self._count += 1
        parts: defaultdict[str, list[str]] = defaultdict(list)
        for name in private_grads:
            parts[self.groups.get(name, "")].append(name)
        total: Tensor | float = 0.0
        for group, names in parts.items():
            norm = torch.nn.utils.get_total_norm([private_grads[n] for n in names])
            square = norm.detach().double().square()
            total = total + square
            energy = self._energies[group]
            energy.found += square
            for n in names:
                variance = (std / factors.get(n, 1.0)) ** 2
                energy.noise += private_grads[n].numel() * variance
                energy.variance += 2 * private_grads[n].numel() * variance**2
        return torch.as_tensor(total).sqrt().float()

    def take(self) -> dict[str, Strength]:
        """Returns what the releases since the last call held: by group, and "" for all.

        Empty if there were none.
        """
        energies = self._energies
        if energies:
            energies = {**energies, "": _Energy.sum(energies.values())}
        found = {name: own.strength(self._count) for name, own in energies.items()}
        self._forget()
        return found
