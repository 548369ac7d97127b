"""What a release is: the numbers that say it, checked, and what the accountants know of it."""

import math
from typing import TypedDict

import numpy as np

from dp_grape_hf.accountants import ONCE, Block
from dp_grape_hf.errors import Choice, PrivacyError
from dp_grape_hf.estimated_norms import Sensitivities, sensitivities
from dp_grape_hf.truncated import doubling_probability
from dp_grape_hf.tuning import Trials, TrialsDistribution


class Adjacency(Choice):
    """The neighbours an ε can be about: one example added or removed, or one replaced."""

    ADD_OR_REMOVE_ONE = "add_or_remove_one"
    REPLACE_ONE = "replace_one"


class Variant(TypedDict, total=False):
    """In what a release differs from the plain Poisson subsampled Gaussian; all may be left out.

    ``max_batch_size`` is the most examples that a logical batch keeps, and needs ``num_samples``,
    the number of examples or an upper bound on it. ``norm_directions`` is the number of random
    directions that norms are estimated from. ``adjacency`` is one of `Adjacency`. ``num_trials``
    is given where the releases are those of one run, and what is published is the best of a random
    number of such runs, of that mean, distributed as ``trials_distribution``, a
    `TrialsDistribution`, says: see `tuning`.
    """

    max_batch_size: int | None
    num_samples: int | None
    norm_directions: int | None
    adjacency: str
    num_trials: float | None
    trials_distribution: str | None


Release = tuple[float, float, int] | tuple[float, float, int, Variant]
"""Equal releases, run-length coded: ``(noise_multiplier, sample_rate, count)``, and what is unusual
about them, if anything."""


def block_of(
    noise_multiplier: float,
    sample_rate: float,
    max_batch_size: int | None = None,
    num_samples: int | None = None,
    norm_directions: int | None = None,
    adjacency: str = Adjacency.ADD_OR_REMOVE_ONE,
    num_trials: float | None = None,
    trials_distribution: str | None = None,
) -> Block:
    """Checks one mechanism and returns what the accountants know of it.

    Raises:
        PrivacyError: An argument is out of range, or the arguments do not go together.
    """
    _check_mechanism(noise_multiplier, sample_rate)
    _check_whole("num_samples", num_samples, "examples")
    _check_whole("max_batch_size", max_batch_size, "examples")
    _check_whole("norm_directions", norm_directions, "directions")
    if adjacency not in Adjacency:
        raise PrivacyError(f"{adjacency=} is unknown; choose one of {list(Adjacency)}.")
    replaces = adjacency == Adjacency.REPLACE_ONE
    unusual = [
        f"{name}={value!r}"
        for name, value, given in (
            ("max_batch_size", max_batch_size, max_batch_size is not None),
            ("norm_directions", norm_directions, norm_directions is not None),
            ("adjacency", adjacency, replaces),
        )
        if given
    ]
    if len(unusual) > 1:
        raise PrivacyError(
            f"{' and '.join(unusual)} have no joint analysis: use at most one of a cap (sampling="
            "'truncated_poisson'), estimated norms (method='dp_jl') and adjacency='replace_one'."
        )
    law: Sensitivities = ONCE
    if max_batch_size is not None:
        if num_samples is None:
            raise PrivacyError(
                f"{max_batch_size=} needs num_samples, got None: what a cap costs depends on the "
                "number of examples, or an upper bound on it."
            )
        doubling = doubling_probability(sample_rate, int(num_samples), int(max_batch_size))
        law = ((1.0 - doubling, 1.0), (doubling, 2.0)) if doubling else ONCE
    if norm_directions is not None:
        law = sensitivities(int(norm_directions), float(noise_multiplier))
    trials = None
    if num_trials is not None:
        trials = Trials(float(num_trials), trials_distribution or TrialsDistribution.GEOMETRIC)
    elif trials_distribution is not None:
        raise PrivacyError(f"{trials_distribution=} needs num_trials, their mean; got None.")
    return Block(float(noise_multiplier), float(sample_rate), law, replaces, trials)


def _check_mechanism(noise_multiplier: float, sample_rate: float) -> None:
    if not 0 <= noise_multiplier < math.inf:
        raise PrivacyError(
            f"{noise_multiplier=} must be finite and not negative; it is the noise standard "
            "deviation divided by the clipping norm, for example 1.0."
        )
    if not 0 < sample_rate <= 1:
        raise PrivacyError(
            f"{sample_rate=} must lie in (0, 1]; it is expected_batch_size / num_samples, for "
            "example 64 / 1024."
        )


def _check_whole(name: str, number: int | None, what: str) -> None:
    whole = isinstance(number, int | np.integer) and not isinstance(number, bool)
    if number is not None and not (whole and number >= 1):
        raise PrivacyError(f"{name}={number!r} must be a whole number of {what}, at least 1.")
