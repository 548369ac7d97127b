"""The public parameters of releases, with their checks."""

import math
from dataclasses import dataclass

import numpy as np

from dp_grape_hf.accounting.rdp import Block
from dp_grape_hf.errors import Choice, require

_ROUNDING = 1e-9


class Adjacency(Choice):
    """The neighbouring datasets: one example is added or removed, or one example is replaced."""

    ADD_OR_REMOVE_ONE = "add_or_remove_one"
    REPLACE_ONE = "replace_one"


@dataclass(frozen=True)
class Releases:
    """Equal releases of ``steps`` steps.

    Each is a Poisson-subsampled Gaussian with the noise multiplier ``noise_multiplier`` (sigma) and
    the sampling rate ``sample_rate`` (q). ``adjacency`` is one of `Adjacency`. ``bands`` is the
    number of steps over which noise is correlated. With several bands, each of these steps samples
    from another group of the examples; see `banded`.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int
    adjacency: str = Adjacency.ADD_OR_REMOVE_ONE.value
    bands: int = 1

    @property
    def counted(self) -> int:
        """The number of releases to account for: the steps that can sample a given example."""
        return -(-int(self.steps) // self.bands)

    @property
    def counted_rate(self) -> float:
        """The sampling rate of these releases: b q, or q for independent noise."""
        return min(1.0, float(self.sample_rate) * self.bands)

    def block(self) -> Block:
        """Check all values, and return the block that accountants compose.

        Raises:
            PrivacyError: A value is out of range, or two values contradict each other.
        """
        require(
            0 <= self.noise_multiplier < math.inf,
            f"noise_multiplier={self.noise_multiplier!r} must be finite and not negative. It is "
            "the noise standard deviation divided by the clipping norm, for example 1.0.",
        )
        require(
            0 < self.sample_rate <= 1,
            f"sample_rate={self.sample_rate!r} must lie in (0, 1]. It is expected_batch_size / "
            "num_samples, for example 64 / 1024.",
        )
        require(
            _is_whole(self.steps, 0), f"steps={self.steps!r} must be a whole number, not negative."
        )
        require(
            _is_whole(self.bands, 1), f"bands={self.bands!r} must be a whole number, at least 1."
        )
        require(
            self.adjacency in Adjacency,
            f"adjacency={self.adjacency!r} must be one of {list(Adjacency)}.",
        )
        replaces = self.adjacency == Adjacency.REPLACE_ONE
        require(
            not (replaces and self.bands > 1),
            f"adjacency={self.adjacency!r} and bands={self.bands!r}: the accountants cannot "
            "compute epsilon for both. Use adjacency='replace_one' or bands (noise='banded').",
        )
        require(
            self.sample_rate * self.bands <= 1 + _ROUNDING,
            f"bands={self.bands!r}: each step samples from one of {self.bands} groups, so "
            f"sample_rate={self.sample_rate!r} must be at most 1/{self.bands}. Lower one of them.",
        )
        return Block(float(self.noise_multiplier), self.counted_rate, replaces)


def _is_whole(number: object, least: int) -> bool:
    is_integer = isinstance(number, int | np.integer) and not isinstance(number, bool)
    return is_integer and number >= least  # type: ignore[operator]
