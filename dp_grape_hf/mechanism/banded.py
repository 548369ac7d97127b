"""Noise that is correlated over steps (banded matrix factorization), and the groups it needs.

Each unit is assigned to one of b groups at random, and step t samples from group t mod b. So a unit
takes part at most once in any b steps, where b is the number of bands. ``accounting.banded``
computes epsilon.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from dp_grape_hf.errors import PrivacyError, require
from dp_grape_hf.mechanism.noise import add_noise_


class Turn(NamedTuple):
    """The step that a batch was sampled for."""

    bands: int
    release: int  # number of the release since the run was started or resumed, from 0


class Turns:
    """The groups of units of one run, which take turns, and the number of its releases.

    The groups belong to the run and not to a data loader: correlated noise continues when the run
    makes another loader, so the groups must stay the same.

    Args:
        bands: b, the number of groups; 1 for independent noise.

    Attributes:
        releases: number of releases so far.
    """

    def __init__(self, bands: int = 1) -> None:
        self.bands, self.releases = bands, 0
        self._groups: Groups | None = None

    def groups(self, num_samples: int, generator: torch.Generator) -> Groups | None:
        """Return the groups, which are formed at the first call; None if there is one group.

        Args:
            num_samples: number of units.
            generator: secret CPU generator that assigns units to groups.
        """
        if self.bands == 1:
            return None
        if self._groups is None:
            self._groups = Groups(num_samples, self.bands, generator)
        return self._groups

    def require_next(self, turn: Turn | None) -> None:
        """Refuse a batch that was not sampled for the next release, if groups take turns.

        Args:
            turn: the step that the batch was sampled for; None if no sampler made it.
        """
        require(
            self.bands == 1 or turn in (None, Turn(self.bands, self.releases)),
            f"This batch was sampled for {turn}, and Turn(bands={self.bands}, release="
            f"{self.releases}) is next. With correlated noise, an example may take part only once "
            f"in {self.bands} steps, so use the batches of a run in order, each of them once. Call "
            "train() or start() first, take batches from one iterator of "
            "trainer.get_train_dataloader(), and make a new iterator only when you stop using it.",
        )


_PART = 2**18  # numbers of each earlier noise vector that are read at once


class BandedNoise:
    """Correlated noise ``w = C^-1 z``, one step after another.

    Step t adds ``w_t = (z_t - sum_j c_j w_(t-j)) / c_0``, where z is independent noise.

    Args:
        coefficients: c_0 ... c_(b-1), with an L2 norm of at most 1.

    Attributes:
        steps: number of calls of ``add_``.

    Guarantee:
        Every z is drawn anew. This object alone keeps the last b - 1 noise vectors w, which
        determine how later noise cancels earlier noise. It cannot be pickled or copied, so a
        resumed run starts without them.
    """

    def __init__(self, coefficients: Sequence[float]) -> None:
        self._first, *self._others = coefficients
        self._ring: Tensor | None = None  # (b - 1, numbers): the last w; each replaces the oldest
        self.steps = 0

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise PrivacyError(
            "The noise of earlier steps cannot be pickled or copied. Anyone who has it knows a "
            "part of later noise. Leave this object out of the files that you save."
        )

    def add_(
        self, values: Sequence[Tensor], std: float, generator: torch.Generator, divisor: float
    ) -> None:
        """Make each value ``(value + w) / divisor`` in place.

        Args:
            values: as in ``add_noise_``, with the same shapes in each call.
            std: standard deviation of z, before the division; 0 adds no noise.
            generator: as in ``add_noise_``.
            divisor: a constant.
        """
        self.steps += 1
        if std:
            flat = [value.view(-1) for value in values]
            sizes = [len(value) for value in flat]
            if self._ring is None:
                self._ring = flat[0].new_zeros(len(self._others), sum(sizes))
            noise = self._next(self._ring, std, generator)
            torch._foreach_add_(flat, list(noise.split(sizes)))
        torch._foreach_div_(list(values), divisor)

    def _next(self, ring: Tensor, std: float, generator: torch.Generator) -> Tensor:
        """Return the next w; it overwrites the oldest w, which no later step needs."""
        oldest = self.steps % len(ring)
        ages = [(oldest - row - 1) % len(ring) for row in range(len(ring))]  # 0 of the newest
        weights = ring.new_tensor([-self._others[age] / self._first for age in ages])
        for part in ring.split(_PART, dim=1):
            part[oldest] = weights @ part
        add_noise_([ring[oldest]], std / self._first, generator)
        return ring[oldest]


class Groups:
    """A random assignment of units to groups; step t may sample units of group t mod ``bands``.

    Args:
        num_samples: number of units.
        bands: number of groups.
        generator: secret CPU generator.

    Guarantee:
        The group of each unit is uniform, and independent of the groups of all other units and of
        which other units exist. It does not change. The groups must stay secret: units are known by
        their number, and removing a unit renumbers the units after it. While the groups are
        secret, these units have the same distribution of groups as before.
    """

    def __init__(self, num_samples: int, bands: int, generator: torch.Generator) -> None:
        uniform = torch.rand(num_samples, dtype=torch.float64, generator=generator)
        group = (uniform * bands).long().clamp_(max=bands - 1)
        self._order = group.argsort(stable=True)
        self._ends = torch.bincount(group, minlength=bands).cumsum(0).tolist()
        self.count = bands

    def members(self, number: int) -> Tensor:
        """Return the units that step ``number`` may sample: indices (k,), int64, increasing."""
        group = number % self.count
        return self._order[self._ends[group - 1] if group else 0 : self._ends[group]]
