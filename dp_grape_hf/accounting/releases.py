"""The public numbers that describe releases, checked, and the block that accountants compose."""

import math
from dataclasses import dataclass

import numpy as np

from dp_grape_hf.accounting.rdp import Block
from dp_grape_hf.errors import Choice, require

_ROUNDING = 1e-9


class Adjacency(Choice):
    """The neighbours an ε can be about: one example added or removed, or one replaced."""

    ADD_OR_REMOVE_ONE = "add_or_remove_one"
    REPLACE_ONE = "replace_one"


@dataclass(frozen=True)
class Releases:
    """Equal releases of ``steps`` steps.

    The plain release is a Poisson-subsampled Gaussian of noise multiplier ``noise_multiplier``
    (sigma) and sampling rate ``sample_rate`` (q). ``adjacency`` is one of `Adjacency`. With
    ``bands``, noise is correlated over this many steps, and each of them samples from another group
    of the examples; see `banded`.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int
    adjacency: str = Adjacency.ADD_OR_REMOVE_ONE.value
    bands: int = 1

    @property
    def counted(self) -> int:
        """The number of releases that the steps are accounted as: the steps of one example."""
        return -(-int(self.steps) // self.bands)

    @property
    def counted_rate(self) -> float:
        """The sampling rate that each of these is accounted at: b q, or q for independent noise."""
        return min(1.0, float(self.sample_rate) * self.bands)

    def block(self) -> Block:
        """Checks all values, and returns the block that accountants compose.

        Raises:
            PrivacyError: A value is out of range, or values do not go together.
        """
        require(
            0 <= self.noise_multiplier < math.inf,
            f"noise_multiplier={self.noise_multiplier!r} must be finite and not negative; it is "
            "the noise standard deviation divided by the clipping norm, for example 1.0.",
        )
        require(
            0 < self.sample_rate <= 1,
            f"sample_rate={self.sample_rate!r} must lie in (0, 1]; it is expected_batch_size / "
            "num_samples, for example 64 / 1024.",
        )
        require(
            _is_whole(self.steps, 0),
            f"steps={self.steps!r} must be a whole number, not negative.",
        )
        require(
            _is_whole(self.bands, 1),
            f"bands={self.bands!r} must be a whole number, at least 1.",
        )
        require(
            self.adjacency in Adjacency,
            f"adjacency={self.adjacency!r} must be one of {list(Adjacency)}.",
        )
        replaces = self.adjacency == Adjacency.REPLACE_ONE
        require(
            not (replaces and self.bands > 1),
            f"adjacency={self.adjacency!r} and bands={self.bands!r} have no joint analysis: use "
            "adjacency='replace_one' or bands (noise='banded'), not both.",
        )
        require(
            self.sample_rate * self.bands <= 1 + _ROUNDING,
            f"bands={self.bands!r} groups of which one is drawn from need a sample_rate of at "
            f"most 1/{self.bands}; got {self.sample_rate!r}.",
        )
        return Block(float(self.noise_multiplier), self.counted_rate, replaces)


def _is_whole(number: object, least: int) -> bool:
    whole = isinstance(number, int | np.integer) and not isinstance(number, bool)
    return whole and number >= least  # type: ignore[operator]
