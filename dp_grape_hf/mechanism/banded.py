"""Noise that is correlated over steps, and which examples may take part in a step.

What it costs and why is in ``accounting.banded``: each unit has a group, a coin of its own decides
which, and the groups take turns. So a unit takes part at most once in as many steps as there are
bands.
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
    release: int  # its number since the run was started or resumed, from 0


class Turns:
    """The groups of examples of one run, which take turns, and the number of its releases.

    The groups belong to the run and not to a loader: noise goes on where another loader begins, so
    the groups must be the same ones.

    Args:
        bands: b, how many groups take turns; 1 for independent noise.

    Attributes:
        made: how many releases were made.
    """

    def __init__(self, bands: int = 1) -> None:
        self.bands, self.made = bands, 0
        self._groups: Groups | None = None

    def groups(self, num_samples: int, generator: torch.Generator) -> Groups | None:
        """Returns the groups, which are formed at the first call; None if there is one group.

        Args:
            num_samples: how many units there are.
            generator: of coins that are secret.
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
            self.bands == 1 or turn in (None, Turn(self.bands, self.made)),
            f"This batch was sampled for {turn}, and Turn(bands={self.bands}, release="
            f"{self.made}) is next. With correlated noise an example may take part once in as "
            "many steps as there are bands, so the batches of a run are used in order, each of "
            "them once. Call train() or start() first, take batches from one iterator of "
            "trainer.get_train_dataloader(), and make a new one only when you leave that.",
        )


_PART = 2**18  # numbers of each earlier noise that are read at once


class BandedNoise:
    """Adds ``w = C^-1 z`` to sums, step by step: ``w_t = (z_t - sum_j c_j w_(t-j)) / c_0``.

    Args:
        coefficients: c_0 ... c_(b-1), of length 1 or less.

    Attributes:
        made: how often it added noise.

    Guarantee:
        Every z is drawn anew. The last b - 1 w, which say what later noise will take back, are
        kept in this object alone, which refuses to be pickled or copied: a run that is resumed has
        no memory of them.
    """

    def __init__(self, coefficients: Sequence[float]) -> None:
        self._first, *self._others = coefficients
        self._ring: Tensor | None = None  # (b - 1, numbers): the last w, each over the oldest
        self.made = 0

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise PrivacyError(
            "the noise of earlier steps cannot be pickled or copied: whoever holds it knows what "
            "is added to later ones. Leave it out of what you save."
        )

    @property
    def kept(self) -> list[Tensor]:
        """The tensors that hold the noise of earlier steps; secret."""
        return [] if self._ring is None else [self._ring]

    def add_(
        self,
        values: Sequence[Tensor],
        std: float,
        generator: torch.Generator,
        divisor: float,
        at_once: int | None = None,
    ) -> None:
        """Makes each value ``(value + w) / divisor`` in place; as ``add_noise_``, where z has std.

        The values have the same shapes each time.
        """
        self.made += 1
        if std:
            flat = [value.view(-1) for value in values]
            sizes = [len(value) for value in flat]
            if self._ring is None:
                self._ring = flat[0].new_zeros(len(self._others), sum(sizes))
            noise = self._next(self._ring, std, generator, at_once)
            torch._foreach_add_(flat, list(noise.split(sizes)))
        torch._foreach_div_(list(values), divisor)

    def _next(
        self, ring: Tensor, std: float, generator: torch.Generator, at_once: int | None
    ) -> Tensor:
        """Returns w in the memory of the oldest one, which is needed no longer."""
        oldest = self.made % len(ring)
        ages = [(oldest - row - 1) % len(ring) for row in range(len(ring))]  # 0 of the newest
        taken_back = ring.new_tensor([-self._others[age] / self._first for age in ages])
        for part in ring.split(_PART, dim=1):
            part[oldest] = taken_back @ part
        add_noise_([ring[oldest]], std / self._first, generator, 1.0, at_once)
        return ring[oldest]


class Groups:
    """Which units may be drawn at a step.

    Args:
        num_samples: how many units there are.
        bands: how many groups.
        generator: of coins that are secret.

    Guarantee:
        The group of a unit is a coin of its own: uniform, independent of all others, and of which
        other units there are. It stays until the object goes. That nobody knows it matters: units
        are told apart by their number, and taking one out renumbers those behind it. To who does
        not know the coins their groups are as likely as before.
    """

    def __init__(self, num_samples: int, bands: int, generator: torch.Generator) -> None:
        coins = torch.rand(num_samples, dtype=torch.float64, generator=generator)
        group = (coins * bands).long().clamp_(max=bands - 1)
        self._order = group.argsort(stable=True)
        self._ends = torch.bincount(group, minlength=bands).cumsum(0).tolist()
        self.count = bands

    def members(self, number: int) -> Tensor:
        """Returns the units whose turn it is at a step, in increasing order."""
        group = number % self.count
        return self._order[self._ends[group - 1] if group else 0 : self._ends[group]]
