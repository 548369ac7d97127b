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
from collections.abc import Mapping, Sequence
from functools import reduce
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


class _Energy(NamedTuple):
    """The energy of some releases, the energy of the noise in them, and its variance."""

    energy: Tensor | float = 0.0
    noise: float = 0.0
    variance: float = 0.0

    def plus(self, other: _Energy, weight: int = 1) -> _Energy:
        """Return the sum with another energy, which counts ``weight`` times."""
        return _Energy(
            self.energy + other.energy * weight,
            self.noise + other.noise * weight,
            self.variance + other.variance * weight**2,
        )

    def strength(self, count: int) -> Strength:
        """Return the root mean squares over so many releases."""
        beyond = float(self.energy) - self.noise
        sure = beyond > _SURE * math.sqrt(self.variance)
        return Strength(*(math.sqrt(e / count) for e in (beyond if sure else 0.0, self.noise)))


_Energies = dict[str, _Energy]  # by group


class _Mean:
    """The mean of successive releases, of which the first has the number ``first``."""

    def __init__(self, first: int) -> None:
        self.first, self.count = first, 0
        self.sums: dict[str, Tensor] = {}

    @property
    def next(self) -> _Mean:
        """An empty mean, of the releases that follow."""
        return _Mean(self.first + self.count)

    def add(self, parts: Mapping[str, Tensor]) -> None:
        """Add a release."""
        self.count += 1
        for name, part in parts.items():
            earlier = self.sums.get(name)
            self.sums[name] = part.clone() if earlier is None else earlier.add_(part)


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
        self._bands, self._correlated = bands, len(bands) > 1
        self._runs: Runs | None = None
        self._stds: dict[str, float] = {}
        self._mean, self._window = _Mean(0), _Mean(0)
        self._of_window: _Energies = {}  # of the releases of this window
        self._earlier: _Energies = {}  # earlier means, weighted by their releases
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
        self._stds |= {n: std / factors.get(n, 1.0) for n in private_grads}
        energies = self._energies(private_grads)
        self._of_window = _added(self._of_window, energies)
        if self._mean.count == _LONGEST:
            self.begin_anew()
        self._mean.add(summed)
        self._window.add(summed if self._correlated else {})
        return torch.as_tensor(sum(energy.energy for energy in energies.values())).sqrt().float()

    def begin_anew(self) -> None:
        """Begin another mean, because a redraw of P changes the meaning of coordinates."""
        if self._mean.count:
            self._earlier, self._releases = self._all(), self._releases + self._mean.count
            self._mean = self._mean.next

    def take(self) -> dict[str, Strength]:
        """Return the strength of all releases so far: by group, and "" for all.

        Norms of the mean release; if there are several means, their root mean square. Ends a
        window. Empty if there was no release since the last call.
        """
        window = self._window
        if not window.count:
            return {}
        energies = self._of_mean(window) if self._correlated else self._of_window
        count = 1 if self._correlated else window.count
        self.windows.append(Window(window.count, _strengths(energies, count)))
        self._window, self._of_window = window.next, {}
        return _strengths(self._all(), self._releases + self._mean.count)

    def _all(self) -> _Energies:
        """Return the energies of all means, each as often as it has releases."""
        mean = self._mean
        return _added(self._earlier, self._of_mean(mean) if mean.count else {}, mean.count)

    def _of_mean(self, mean: _Mean) -> _Energies:
        window = np.zeros((1, mean.first + mean.count))
        window[0, mean.first :] = 1.0 / mean.count
        return self._energies(mean.sums, 1.0 / mean.count, noise_left(self._bands, window))

    def _energies(
        self, tensors: Mapping[str, Tensor], scale: float = 1.0, left: float = 1.0
    ) -> _Energies:
        """Return the energies of tensors times ``scale``, with noise of ``left`` times its std."""
        names_of: defaultdict[str, list[str]] = defaultdict(list)
        for name in tensors:
            names_of[self.groups.get(name, "")].append(name)
        found = {}
        for group, names in names_of.items():
            norm = torch.nn.utils.get_total_norm([tensors[n] for n in names]).detach().double()
            parts = [(tensors[n].numel(), (self._stds[n] * left) ** 2) for n in names]
            noise, variance = sum(d * v for d, v in parts), sum(2 * d * v**2 for d, v in parts)
            found[group] = _Energy((norm * scale).square(), noise, variance)
        return found


def _added(one: _Energies, other: _Energies, weight: int = 1) -> _Energies:
    """Return the sums of energies by group, of which the others count ``weight`` times."""
    none = _Energy()
    names = dict.fromkeys([*one, *other])
    return {n: one.get(n, none).plus(other.get(n, none), weight) for n in names}


def _strengths(energies: _Energies, count: int) -> dict[str, Strength]:
    """Return the strength of each group, and of all together if there is any."""
    every = reduce(_Energy.plus, energies.values(), _Energy())
    over_all = {"": every} if energies else {}
    return {name: energy.strength(count) for name, energy in {**energies, **over_all}.items()}
