"""How much of what was released is more than noise: free to see, as releases are private.

The norm of a private gradient is that of its noise, nearly: a run that learns nothing logs the same
numbers as one that does. But the noise of a release n is known in size. With s what it was added
to, E |s + n|^2 = |s|^2 + d std^2 over d numbers, so the energy beyond the noise is that of s. Over
several releases it stands out of the spread of |n|^2.

Where noise is correlated over steps, most of what a release has of it is taken back by the next
ones. There the releases are added up, and their sum is looked at: what they agree on, beyond the
noise that is left in it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dp_grape_hf.accounting import noise_left
from dp_grape_hf.gradients import FlatTensors, Runs

_SURE = 2.0  # standard deviations


class Strength(NamedTuple):
    """Norms of a private gradient, root mean square over some releases; or of their mean."""

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
    """Adds up the energy of releases, and of their noise; or releases, if noise is correlated.

    Args:
        bands: the coefficients of the noise.

    Attributes:
        groups: parameter name -> the group that it is also counted in.

    Guarantee:
        A function of releases and of public numbers alone.
    """

    def __init__(self, bands: Sequence[float] = (1.0,)) -> None:
        self.groups: Mapping[str, str] = {}
        self._bands, self._before = bands, 0
        self._runs: Runs | None = None
        self._forget()

    def _forget(self) -> None:
        self._count = 0
        self._energies: dict[str, _Energy] = defaultdict(_Energy)
        self._sums: dict[str, Tensor] = {}
        self._stds: dict[str, float] = {}

    @property
    def kept(self) -> list[Tensor]:
        """The tensors that hold the sum of releases, where noise is correlated."""
        return list(self._sums.values())

    def add(
        self, private_grads: Mapping[str, Tensor], std: float, factors: Mapping[str, float]
    ) -> Tensor:
        """Takes note of a release; returns its L2 norm, a scalar.

        Args:
            private_grads: by name, the release.
            std: of the noise in each of its numbers, where no factor divides it, and before it
                was correlated.
            factors: parameter name -> what divides it.
        """
        self._count += 1
        if isinstance(private_grads, FlatTensors):
            if self._runs is None:
                self._runs = Runs(lambda name: (self.groups.get(name, ""), factors.get(name, 1.0)))
            private_grads = private_grads.in_runs(self._runs)
        parts: defaultdict[str, list[str]] = defaultdict(list)
        for name in private_grads:
            parts[self.groups.get(name, "")].append(name)
        total: Tensor | float = 0.0
        for group, names in parts.items():
            norm = torch.nn.utils.get_total_norm([private_grads[n] for n in names])
            square = norm.detach().double().square()
            total = total + square
            self._stds |= {n: std / factors.get(n, 1.0) for n in names}
            if len(self._bands) > 1:
                for n in names:
                    known = self._sums.get(n)
                    self._sums[n] = (
                        private_grads[n].clone() if known is None else known.add_(private_grads[n])
                    )
                continue
            self._energies[group].found += square
            for n in names:
                self._expect(group, private_grads[n], self._stds[n])
        return torch.as_tensor(total).sqrt().float()

    def _expect(self, group: str, values: Tensor, std: float) -> None:
        """Counts the energy that noise has in values, and how far it strays."""
        energy, variance = self._energies[group], std**2
        energy.noise += values.numel() * variance
        energy.variance += 2 * values.numel() * variance**2

    def _look_at_sums(self) -> None:
        """Takes the mean of the releases for one."""
        made, count = self._before + self._count, self._count
        window = np.zeros((1, made))
        window[0, self._before :] = 1.0 / count
        left = noise_left(self._bands, window)
        for n, total in self._sums.items():
            group = self.groups.get(n, "")
            self._energies[group].found += total.double().square().sum() / count**2
            self._expect(group, total, self._stds[n] * left)
        self._before, self._count = made, 1

    def take(self) -> dict[str, Strength]:
        """Returns what the releases since the last call held: by group, and "" for all.

        Empty if there were none.
        """
        if self._sums:
            self._look_at_sums()
        energies = self._energies
        if energies:
            energies = {**energies, "": _Energy.sum(energies.values())}
        found = {name: own.strength(self._count) for name, own in energies.items()}
        self._forget()
        return found
