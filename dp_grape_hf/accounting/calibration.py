"""Compute the ε of a training run, and the noise multiplier for a budget.

Every ε returned here is an *upper* bound, from one of the `accountants`.

Guarantee:
    The mechanism is the Poisson-subsampled Gaussian: in every step, each example is included
    independently with probability ``sample_rate``, its contribution has an L2 norm of at most C,
    and noise of standard deviation ``noise_multiplier * C`` per coordinate is added to the
    *sum* of the contributions. Two datasets are adjacent if one contains one example more than
    the other, so the sum has sensitivity C. A step counts even if its batch is empty.

    With ``adjacency="replace_one"``, two datasets are adjacent if they have the same size and
    differ in one example. The contribution then changes by up to 2C. A step is dominated by the
    pair P = (1 - q) N(0, sigma^2) + q N(1, sigma^2), Q = (1 - q) N(0, sigma^2) + q N(-1, sigma^2),
    in units of C, and two gradients of opposite directions attain it. The proof is in the README of
    this subpackage. dp_accounting composes the same pair (``NeighborRel.REPLACE_ONE``).

    With ``bands`` b > 1, noise is correlated over b steps. Each example can be sampled in one of b
    successive steps, with probability b q; see `banded`.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from dp_grape_hf.accounting.accountants import ACCOUNTANTS, DEFAULT, INSTEAD, ROUGH
from dp_grape_hf.accounting.rdp import Accountant, AccountantFailure, Block
from dp_grape_hf.accounting.releases import Releases
from dp_grape_hf.errors import PrivacyError, require
from dp_grape_hf.phases import advance

logger = logging.getLogger(__name__)


def compute_epsilon(
    *,
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    delta: float,
    accountant: str = DEFAULT,
    **variant: Any,
) -> float:
    """Return an upper bound on ε after ``steps`` equal releases.

    ε is 0 for no steps, with any noise. Otherwise it is infinite without noise.

    Args:
        noise_multiplier: sigma, the noise standard deviation divided by the clipping norm.
        sample_rate: q, the probability with which a step includes an example.
        steps: Number of releases.
        delta: δ of the guarantee.
        accountant: A name in `ACCOUNTANTS`.
        variant: ``adjacency`` and ``bands`` of `Releases`.

    Raises:
        PrivacyError: An argument is out of range, or replace-one adjacency is combined with bands.

    >>> compute_epsilon(noise_multiplier=0.0, sample_rate=0.01, steps=10, delta=1e-5)
    inf
    >>> round(compute_epsilon(noise_multiplier=4.0, sample_rate=1 / 16, steps=1000, delta=1e-5), 2)
    2.03
    >>> round(compute_epsilon(noise_multiplier=4.0, sample_rate=1 / 16, steps=1000, delta=1e-5,
    ...                       adjacency="replace_one"), 2)
    4.31
    """
    releases = Releases(noise_multiplier, sample_rate, steps, **variant)
    return EpsilonCurve(releases, delta, accountant).epsilon(steps)


def compose_epsilon(
    releases: Sequence[Releases], *, delta: float, accountant: str = DEFAULT
) -> float:
    """Return an upper bound on ε for the composition of ``releases``, in any order.

    Releases of no steps have no cost, even without noise. All must have the same adjacency.

    >>> both = [Releases(4.0, 0.05, 500), Releases(3.0, 0.02, 100)]
    >>> round(compose_epsilon(both, delta=1e-5), 2)
    1.12
    """
    _check_delta("delta", delta)
    if not releases:
        return 0.0
    *others, last = releases
    return EpsilonCurve(last, delta, accountant, others).epsilon(last.steps)


def blocks_of(releases: Sequence[Releases]) -> tuple[list[Block], list[int]]:
    """Return the distinct blocks of releases, and the number of releases of each, above 0."""
    counts: Counter[Block] = Counter()
    for equal in releases:
        counts[equal.block()] += equal.counted
    pairs = [(block, count) for block, count in counts.items() if count]
    if len({block.replaces for block, _ in pairs}) > 1:
        raise PrivacyError(
            f"{releases=} have different neighbours, so their epsilons do not add up. Give all of "
            "them the same adjacency."
        )
    return [block for block, _ in pairs], [count for _, count in pairs]


def find_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    accountant: str = DEFAULT,
    earlier: Sequence[Releases] = (),
    guess: float | None = None,
    **variant: Any,
) -> float:
    """Return the smallest noise multiplier whose ε is at most ``target_epsilon``.

    `compute_epsilon` of the result never exceeds the target. It is within 0.05 % of the target, or
    the result is within 0.05 % of the smallest noise multiplier.

    Args:
        target_epsilon: the budget; the ``earlier`` releases are a part of it.
        target_delta: δ of the guarantee.
        sample_rate: q, the probability with which a step includes an example.
        steps: number of releases, at least 1. For 0 steps the result would be no noise.
        accountant: a name in `ACCOUNTANTS`.
        earlier: releases of earlier runs on the same data.
        guess: the noise multiplier at which the search starts; None for a rough search before.
        variant: ``adjacency`` and ``bands`` of `Releases`.

    Raises:
        PrivacyError: an argument is out of range, ``earlier`` releases have spent the budget, or
            no noise suffices.
    """
    if not 0 < target_epsilon < math.inf:
        raise PrivacyError(
            f"{target_epsilon=} must be positive and finite. Pass the budget, for example 6.0."
        )
    _check_delta("target_delta", target_delta)
    with_noise_1 = Releases(1.0, sample_rate, steps, **variant)
    with_noise_1.block()  # refuses values out of range
    if steps == 0:
        raise PrivacyError(
            f"{steps=} releases nothing, so every noise multiplier meets {target_epsilon=}. Pass "
            "the number of steps of the run."
        )
    used = compose_epsilon(earlier, delta=target_delta, accountant=accountant)
    if used >= target_epsilon:
        raise PrivacyError(
            f"{target_epsilon=} is spent already: earlier releases on the same data spent epsilon "
            f"{used:.4g} at {target_delta=}. Choose a larger target_epsilon, as the budget of all "
            "runs."
        )

    def curve(noise_multiplier: float, name: str) -> EpsilonCurve:
        releases = replace(with_noise_1, noise_multiplier=noise_multiplier)
        return EpsilonCurve(releases, target_delta, name, earlier)

    @cache
    def rough(sigma: float) -> float:
        return curve(sigma, ROUGH).epsilon(steps)

    if guess is None:  # RDP takes milliseconds
        guess = (_smallest(rough, target_epsilon, 1.0) or 1.0) * _OF_RDP
    ends = rough(guess), rough(guess * _NEARBY)
    straight = 0 < min(ends) and max(ends) < math.inf
    slope = math.log(ends[1] / ends[0]) / math.log(_NEARBY) if straight else -1.0
    start = curve(guess, accountant)
    start.epsilon(steps)  # decides which accountant is used

    def epsilon(sigma: float) -> float:
        if start.accountant == ROUGH:
            return rough(sigma)
        return (start if sigma == guess else curve(sigma, start.accountant)).epsilon(steps)

    sigma = _smallest(epsilon, target_epsilon, guess, slope)
    if sigma is None:
        raise PrivacyError(
            f"{target_epsilon=} is too small: accountant={accountant!r} cannot certify it at "
            f"{target_delta=} with any noise"
            + (f", as earlier releases spent {used:.4g}" if used else "")
            + ". Choose a larger target_epsilon."
        )
    return sigma


class EpsilonCurve:
    """ε as a function of the number of steps, for repeated calls in a training loop.

    The accountant is built at the first call, for all steps of ``releases``. It is built again only
    if a run exceeds these steps. Answers are cached. Every answer includes the ``earlier`` releases
    of runs on the same data.

    Attributes:
        accountant: the name of the accountant in use: the selected one, or its fallback if it
            failed.

    >>> curve = EpsilonCurve(Releases(4.0, 64 / 1024, 1000), 1e-5, accountant="rdp")
    >>> [round(curve.epsilon(steps), 2) for steps in (0, 10, 1000)]
    [0.0, 0.21, 2.21]
    """

    def __init__(
        self,
        releases: Releases,
        delta: float,
        accountant: str = DEFAULT,
        earlier: Sequence[Releases] = (),
    ) -> None:
        _check_delta("delta", delta)
        # Older ledgers may name the accountant ``least``, which is gone.
        self.accountant = DEFAULT if accountant == "least" else accountant
        if self.accountant not in ACCOUNTANTS:
            raise PrivacyError(f"{accountant=} is unknown. Choose one of {[*ACCOUNTANTS]}.")
        self._releases, self._delta, self._earlier = releases, delta, list(earlier)
        self._built: Accountant | None = None
        self._answers: dict[tuple[int, ...], float] = {}
        self._blocks(releases.steps)  # refuses values out of range

    def _blocks(self, steps: int) -> tuple[list[Block], list[int]]:
        return blocks_of([replace(self._releases, steps=steps), *self._earlier])

    def epsilon(self, steps: int) -> float:
        """Return an upper bound on ε after ``steps`` steps."""
        if steps > self._releases.steps:
            more = max(int(steps), 2 * self._releases.steps)
            self._releases, self._built = replace(self._releases, steps=more), None
        advance()
        if steps == 0:
            return compose_epsilon(self._earlier, delta=self._delta, accountant=self.accountant)
        blocks, counts = self._blocks(steps)
        if any(block.noise_multiplier == 0 for block in blocks):
            return math.inf
        key = tuple(counts)
        while key not in self._answers:
            try:
                if self._built is None:
                    most = self._blocks(self._releases.steps)
                    self._built = ACCOUNTANTS[self.accountant](*most, self._delta)
                answer = self._built.epsilon(counts)
                if not math.isfinite(answer) and self.accountant in INSTEAD:
                    raise AccountantFailure(f"it returned {answer}")
                self._answers[key] = max(0.0, answer)
            except AccountantFailure as failure:
                if self.accountant not in INSTEAD:
                    raise
                instead = INSTEAD[self.accountant]
                logger.warning(
                    f"The accountant {self.accountant} cannot bound epsilon here ({failure}); "
                    f"using {instead} instead, which is an upper bound too."
                )
                self.accountant, self._built = instead, None
        return self._answers[key]


def refuse_large_delta(delta: float, num_samples: int, unit: str = "example") -> None:
    """Refuse a δ so large that publishing one random unit in ``num_samples`` would satisfy it.

    Raises:
        PrivacyError: ``delta`` is not below 1 / ``num_samples``.
    """
    require(
        delta < 1 / num_samples,
        f"target_delta={delta:g} is not below 1/{num_samples}: publishing one random {unit} would "
        f"satisfy it. Choose a smaller one, for example {0.01 / num_samples:.0e}.",
    )


def expected_steps_per_epoch(sample_rate: float) -> int:
    """Return the number of steps that sample each example once in expectation.

    This is 1 / q rounded up. Rounding errors of q are ignored.

    Raises:
        PrivacyError: ``sample_rate`` is not in (0, 1].

    >>> expected_steps_per_epoch(64 / 1000), expected_steps_per_epoch(1 / 49)
    (16, 49)
    """
    require(0.0 < sample_rate <= 1.0, f"{sample_rate=} must lie in (0, 1].")
    steps = 1.0 / sample_rate
    nearest = round(steps)
    return nearest if math.isclose(steps, nearest, rel_tol=1e-9) else math.ceil(steps)


def usual_batch_size(num_samples: int, epochs: float, steps: int | None = None) -> int:
    """Return the expected batch size B that a run of so many epochs chooses.

    B is 0.8 sqrt(epochs N). If the number of steps T is given, B is epochs N / T, but at most the
    larger of N / 10 and that default, so that a test run of a few steps has no huge batches.
    """
    sampled = num_samples * epochs
    size = 0.8 * math.sqrt(sampled)
    if steps:
        size = min(sampled / steps, max(size, 0.1 * num_samples))
    return min(max(1, round(size)), num_samples)


# ---- Calibration ----


_OF_RDP = 0.93  # factor of RDP's noise multiplier that the exact one usually has, within 1 %
_NEARBY = 1.1  # factor of a noise multiplier, over which the slope of ε is computed


def _smallest(
    epsilon: Callable[[float], float], target: float, guess: float, slope: float = -1.0
) -> float | None:
    """Return sigma with ``epsilon(sigma)`` just below ``target``; None if no noise suffices.

    ``slope`` is an estimate of the slope of log ε over log sigma at ``guess``.
    """
    tolerance = 5e-4
    aim = target * (1 - tolerance / 2)
    low, high = 0.0, math.inf  # epsilon(low) > target >= epsilon(high)
    sigma, slope = guess, min(slope, -0.3)
    last: tuple[float, float] | None = None
    for attempt in range(100):
        value = epsilon(sigma)
        if value > target:
            low = max(low, sigma)
        else:
            high = min(high, sigma)
        if target * (1 - tolerance) <= value <= target or high <= low * (1 + tolerance):
            return high
        if low > 1e6 * max(guess, 1.0):
            return None
        # A secant step of at most 4x in logarithms, in which the curve is nearly a line. Bisect if
        # the step leaves the bracket, or if the search does not converge.
        error = math.log(min(max(value / aim, 1e-3), 1e3))
        if last is not None and last[0] != sigma and last[1] != error:
            slope = min((error - last[1]) / math.log(sigma / last[0]), -0.3)
        last = sigma, error
        sigma *= math.exp(min(max(-error / slope, -1.4), 1.4))
        if attempt > 12 and high == math.inf:  # flat curve: earlier releases spent nearly all
            sigma = 4 * low
        if (attempt > 12 or not low < sigma < high) and 0 < low and high < math.inf:
            sigma = math.sqrt(low * high)
    return high


# ---- Refusals ----


def _check_delta(name: str, delta: float) -> None:
    if not 0 < delta < 1:
        raise PrivacyError(
            f"{name}={delta!r} must lie strictly between 0 and 1. Choose one far below "
            "1 / num_samples, for example 1e-5."
        )
