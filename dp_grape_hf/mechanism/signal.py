"""The part of releases that is more than noise: free to see, as releases are private.

A release is the sum of a signal s and of noise n, and its norm is mostly noise: a run that learns
nothing logs the same norm as one that does. But the size of the noise is known. Over d numbers with
noise of standard deviation std, E |s + n|^2 = |s|^2 + d std^2, so subtracting d std^2 leaves the
energy of the signal. It is measurable once it is larger than the spread of |n|^2.

The mean of T releases keeps what they agree on, and its noise is smaller: by sqrt(T) if the noise
of each is independent, by more if noise is correlated over steps. So a signal that no single
release shows becomes measurable as a run goes on.
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
_LONGEST = 100  # updates in a mean, at most: the signal changes during training


class Strength(NamedTuple):
    """Norms of the two parts of releases, or of their mean."""

    signal: float  # 0 if it is not measurable
    noise: float


class Window(NamedTuple):
    """The releases between two log lines."""

    releases: int
    strengths: dict[str, Strength]  # group -> strength; "" for all groups


class _Energy:
    """The energy of some releases, and of the noise in them."""

    noise = variance = 0.0
    energy: Tensor | float = 0.0

    @classmethod
    def sum(cls, parts: Iterable[_Energy], weight: int = 1) -> _Energy:
        """Return the energy of all parts together, so many times."""
        total = cls()
        for part in parts:
            total.energy = total.energy + part.energy * weight
            total.noise += part.noise * weight
            total.variance += part.variance * weight**2
        return total

    def expect(self, size: int, std: float) -> None:
        """Add the energy of noise in so many numbers, and its variance."""
        self.noise += size * std**2
        self.variance += 2 * size * std**4

    def strength(self, count: int) -> Strength:
        """Return the root mean squares over so many releases."""
        beyond = float(self.energy) - self.noise
        sure = beyond > _SURE * math.sqrt(self.variance)
        return Strength(*(math.sqrt(e / count) for e in (beyond if sure else 0.0, self.noise)))


class _Mean:
    """The mean of some releases in a row.

    Args:
        bands: the coefficients of the noise.
        first: the number of the first release.
    """

    def __init__(self, bands: Sequence[float], first: int) -> None:
        self._bands, self._first, self.count = bands, first, 0
        self.sums: dict[str, Tensor] = {}

    @property
    def next(self) -> _Mean:
        """An empty mean, of the releases that follow."""
        return _Mean(self._bands, self._first + self.count)

    def add(self, parts: Mapping[str, Tensor]) -> None:
        """Add a release."""
        self.count += 1
        for name, part in parts.items():
            earlier = self.sums.get(name)
            self.sums[name] = part.clone() if earlier is None else earlier.add_(part)

    def energies(self, groups: Mapping[str, str], stds: Mapping[str, float]) -> dict[str, _Energy]:
        """Return the energies of the mean, by group."""
        window = np.zeros((1, self._first + self.count))
        window[0, self._first :] = 1.0 / self.count
        left = noise_left(self._bands, window)
        by_group: defaultdict[str, _Energy] = defaultdict(_Energy)
        for name, total in self.sums.items():
            energy = by_group[groups.get(name, "")]
            energy.energy = energy.energy + total.double().square().sum() / self.count**2
            energy.expect(total.numel(), stds[name] * left)
        return by_group


class Signal:
    """Estimator of signal and noise in the mean of private updates.

    Args:
        bands: the coefficients of the noise.

    Attributes:
        groups: parameter name -> the group that it is also counted in.
        windows: signal and noise of the updates between two log lines, for each window: root mean
            squares; with correlated noise, norms of the window's mean.

    Guarantee:
        A function of releases and of public numbers alone.
    """

    def __init__(self, bands: Sequence[float] = (1.0,)) -> None:
        self.groups: Mapping[str, str] = {}
        self.windows: list[Window] = []
        self._correlated = len(bands) > 1
        self._runs: Runs | None = None
        self._stds: dict[str, float] = {}
        self._mean, self._window = _Mean(bands, 0), _Mean(bands, 0)
        self._energies: dict[str, _Energy] = defaultdict(_Energy)  # releases of this window
        self._earlier: dict[str, _Energy] = {}  # earlier means, weighted by their releases
        self._releases = 0  # number of releases in earlier means

    @property
    def buffers(self) -> list[Tensor]:
        """The tensors that hold sums of releases."""
        return [*self._mean.sums.values(), *self._window.sums.values()]

    def add(
        self, private_grads: Mapping[str, Tensor], std: float, factors: Mapping[str, float]
    ) -> Tensor:
        """Add a private update, and return its L2 norm, a scalar.

        Args:
            private_grads: the private update, by parameter name. If most of it is one vector,
                only the vector is added up, to save memory.
            std: the standard deviation of independent noise in each entry, without factors.
            factors: parameter name -> gradient factor, by which the std is divided.
        """
        summed: Mapping[str, Tensor] = private_grads
        if isinstance(private_grads, FlatTensors):
            if self._runs is None:
                self._runs = Runs(lambda name: (self.groups.get(name, ""), factors.get(name, 1.0)))
            others = private_grads.others
            private_grads = private_grads.in_runs(self._runs)
            summed = {n: part for n, part in private_grads.items() if n not in others}
        parts: defaultdict[str, list[str]] = defaultdict(list)
        for name in private_grads:
            parts[self.groups.get(name, "")].append(name)
        total: Tensor | float = 0.0
        for group, names in parts.items():
            norm = torch.nn.utils.get_total_norm([private_grads[n] for n in names])
            square = norm.detach().double().square()
            total = total + square
            self._stds |= {n: std / factors.get(n, 1.0) for n in names}
            energy = self._energies[group]
            energy.energy = energy.energy + square
            for n in names:
                energy.expect(private_grads[n].numel(), self._stds[n])
        if self._mean.count == _LONGEST:
            self.begin_anew()
        self._mean.add(summed)
        self._window.add(summed if self._correlated else {})
        return torch.as_tensor(total).sqrt().float()

    def begin_anew(self) -> None:
        """Begin another mean, because a redraw of P changes the meaning of coordinates."""
        mean = self._mean
        if mean.count:
            self._earlier, self._releases = self._all(), self._releases + mean.count
            self._mean = mean.next

    def take(self) -> dict[str, Strength]:
        """Return the strength of all releases so far: by group, and "" for all.

        Norms of the mean release; if there are several means, their root mean square. Ends a
        window. Empty if there was no release since the last call.
        """
        window = self._window
        if not window.count:
            return {}
        energies = window.energies(self.groups, self._stds) if self._correlated else self._energies
        count = 1 if self._correlated else window.count
        self.windows.append(Window(window.count, _strengths(energies, count)))
        self._window, self._energies = window.next, defaultdict(_Energy)
        return _strengths(self._all(), self._releases + self._mean.count)

    def _all(self) -> dict[str, _Energy]:
        """Return the energies of all means, each as often as it has releases."""
        mean, earlier = self._mean, self._earlier
        by_group = mean.energies(self.groups, self._stds) if mean.count else {}
        every = {
            name: _Energy.sum([energy], weight=mean.count) for name, energy in by_group.items()
        }
        return {
            name: _Energy.sum(part[name] for part in (earlier, every) if name in part)
            for name in dict.fromkeys([*earlier, *every])
        }


def _strengths(energies: Mapping[str, _Energy], count: int) -> dict[str, Strength]:
    """Return the strength of each group, and of all together if there is any."""
    over_all = {"": _Energy.sum(energies.values())} if energies else {}
    return {name: energy.strength(count) for name, energy in {**energies, **over_all}.items()}
