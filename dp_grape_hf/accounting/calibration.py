"""Compute the ε of a training run, and the noise multiplier for a budget.

Every number returned here is an *upper* bound on ε, from one of the `accountants`.

Guarantee:
    The mechanism accounted is the Poisson subsampled Gaussian: in every step each example is
    drawn independently with probability ``sample_rate``, its contribution has L2 norm at most C,
    and noise of standard deviation ``noise_multiplier * C`` per coordinate is added to the
    *sum* of the contributions. Two datasets are adjacent if one has a single example more than
    the other, so the sum has sensitivity C. A step counts even if it drew no example.

    With ``adjacency="replace_one"`` two datasets are adjacent if they are of one size and differ
    in a single example. Its contribution then moves by up to 2C; see `replace_one`.

    With ``bands`` noise is correlated over so many steps, and each example is drawn at one of them,
    with a probability that is so much larger; see `banded`.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dp_grape_hf.accounting.accountants import ACCOUNTANTS, DEFAULT, ROUGH, Composition
from dp_grape_hf.accounting.rdp import Block
from dp_grape_hf.accounting.releases import Releases
from dp_grape_hf.errors import PrivacyError, require
from dp_grape_hf.phases import advance


def compute_epsilon(
    *,
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    delta: float,
    accountant: str = DEFAULT,
    **variant: Any,
) -> float:
    """Returns an upper bound on ε after ``steps`` equal releases.

    No steps cost nothing, whatever the noise; without noise, ε is infinite.

    Args:
        noise_multiplier: sigma, the noise standard deviation divided by the clipping norm.
        sample_rate: q, the probability with which each example enters a step.
        steps: Number of releases.
        delta: δ of the guarantee.
        accountant: A name in `ACCOUNTANTS`.
        variant: ``adjacency`` and ``bands``, as `Releases` says.

    Raises:
        PrivacyError: An argument is out of range, or replace-one neighbours and bands are asked
            for together.

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
    """Returns an upper bound on ε of all ``releases`` together, in any order.

    Equal blocks are merged; blocks of no steps cost nothing, even without noise. All have to be
    about the same neighbours.

    >>> both = [Releases(4.0, 0.05, 500), Releases(3.0, 0.02, 100)]
    >>> round(compose_epsilon(both, delta=1e-5), 2)
    1.12
    """
    _check_delta("delta", delta)
    accountant = _known(accountant)
    blocks, counts = blocks_of(releases)
    return Composition(blocks, counts, delta, accountant).epsilon(counts) if blocks else 0.0


def blocks_of(releases: Sequence[Releases]) -> tuple[list[Block], list[int]]:
    """Returns the blocks that an accountant is asked about, and the releases of each, above 0."""
    counts: Counter[Block] = Counter()
    for equal in releases:
        counts[equal.block()] += equal.counted
    pairs = [(block, count) for block, count in counts.items() if count]
    if len({block.replaces for block, _ in pairs}) > 1:
        raise PrivacyError(
            f"{releases=} are about different neighbours; give all of them the same adjacency."
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
    guess: float = 1.0,
    **variant: Any,
) -> float:
    """Returns the smallest noise multiplier whose ε is at most ``target_epsilon``.

    `compute_epsilon` of the result never exceeds the target and is within 0.05 % of it (or the
    result within 0.05 % of the smallest). ``steps`` must be positive: a run that releases nothing
    meets every target, and answering 0 would let a run that does take steps start without noise.
    ``variant`` is as in `compute_epsilon`. ``earlier`` releases, of runs on the same data, are
    within the target as well. The search begins at ``guess``.
    """
    if not 0 < target_epsilon < math.inf:
        raise PrivacyError(
            f"{target_epsilon=} must be positive and finite; state the budget, for example 6.0."
        )
    _check_delta("target_delta", target_delta)
    asked = Releases(1.0, sample_rate, steps, **variant)
    asked.block()  # refuses what is out of range
    if steps == 0:
        raise PrivacyError(
            f"{steps=} releases nothing, so every noise multiplier meets {target_epsilon=}; give "
            "the number of steps the run will take."
        )
    used = compose_epsilon(earlier, delta=target_delta, accountant=accountant)
    if used >= target_epsilon:
        raise PrivacyError(
            f"{target_epsilon=} is spent already: earlier releases on the same data took epsilon "
            f"{used:.4g} at {target_delta=}. Choose a larger target_epsilon, which covers them all."
        )

    def curve(noise_multiplier: float, name: str) -> EpsilonCurve:
        releases = replace(asked, noise_multiplier=noise_multiplier)
        return EpsilonCurve(releases, target_delta, name, earlier)

    def rough(sigma: float) -> float:
        return curve(sigma, ROUGH).epsilon(steps)

    # RDP answers in milliseconds with a few percent too much: the search begins there, from above.
    guess = _smallest(rough, target_epsilon, guess) or 1.0
    ends = rough(guess), rough(guess * _NEARBY)
    straight = 0 < min(ends) and max(ends) < math.inf
    slope = math.log(ends[1] / ends[0]) / math.log(_NEARBY) if straight else -1.0
    start = curve(guess, accountant)
    known = {guess: start.epsilon(steps)}  # only then it is known which accountant answers

    def epsilon(sigma: float) -> float:
        found = known.get(sigma)
        return curve(sigma, start.accountant).epsilon(steps) if found is None else found

    sigma = _smallest(epsilon, target_epsilon, guess, slope)
    if sigma is None:
        raise PrivacyError(
            f"{target_epsilon=} is below what accountant={accountant!r} can certify at "
            f"{target_delta=}, however large the noise"
            + (f", where earlier releases took {used:.4g}" if used else "")
            + "; choose a larger target_epsilon."
        )
    return sigma


class EpsilonCurve:
    """ε as a function of the steps taken, for a loop that asks again and again.

    The accountant is built once, on the first question, for all steps of ``releases``, and again
    only if a run exceeds them. Answers are remembered. Every answer includes the ``earlier``
    releases, of runs on the same data.

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
        self._own, self._earlier = releases, list(earlier)
        _check_delta("delta", delta)
        self._delta = delta
        self._composition = self._compose(_known(accountant))

    def _all(self, steps: int) -> tuple[list[Block], list[int]]:
        return blocks_of([replace(self._own, steps=steps), *self._earlier])

    def _compose(self, accountant: str) -> Composition:
        return Composition(*self._all(self._own.steps), self._delta, accountant)

    @property
    def accountant(self) -> str:
        """The accountant that answers: the selected one, or another one if that has failed."""
        return self._composition.accountant

    def epsilon(self, steps: int) -> float:
        """Returns an upper bound on ε after ``steps`` steps."""
        if steps > self._own.steps:
            self._own = replace(self._own, steps=max(int(steps), 2 * self._own.steps))
            self._composition = self._compose(self.accountant)
        advance()
        if steps == 0:
            return compose_epsilon(self._earlier, delta=self._delta, accountant=self.accountant)
        return self._composition.epsilon(self._all(steps)[1])


def refuse_large_delta(delta: float, num_samples: int, unit: str = "example") -> None:
    """Refuses a δ at which one unit in ``num_samples`` might be published as it is.

    Raises:
        PrivacyError: ``delta`` is not below 1 / ``num_samples``.
    """
    require(
        delta < 1 / num_samples,
        f"target_delta={delta:g} is not below 1/{num_samples}: publishing one random {unit} "
        f"outright would satisfy it; choose a smaller one, for example {0.01 / num_samples:.0e}.",
    )


def expected_steps_per_epoch(sample_rate: float) -> int:
    """Returns the number of steps after which each example was drawn once in expectation.

    This is 1 / q rounded up, so that an epoch never falls short; the rounding error of a q that
    was computed as a quotient does not count as a step.

    Raises:
        PrivacyError: ``sample_rate`` is not in (0, 1].

    >>> expected_steps_per_epoch(64 / 1000), expected_steps_per_epoch(1 / 49)
    (16, 49)
    """
    require(0.0 < sample_rate <= 1.0, f"{sample_rate=} must lie in (0, 1].")
    steps = 1.0 / sample_rate
    nearest = round(steps)
    return nearest if math.isclose(steps, nearest, rel_tol=1e-9) else math.ceil(steps)


# ---- Calibration ----


_NEARBY = 1.1  # times a noise multiplier: where the slope of ε is taken


def _smallest(
    epsilon: Callable[[float], float], target: float, guess: float, slope: float = -1.0
) -> float | None:
    """Returns sigma with ``epsilon(sigma)`` just below ``target``; None if no noise suffices.

    ``slope`` is about that of log ε over log sigma at ``guess``.
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
        # A secant step in logarithms, where the curve is nearly straight, of at most 4x; bisect
        # if it leaves the bracket or does not settle.
        error = math.log(min(max(value / aim, 1e-3), 1e3))
        if last is not None and last[0] != sigma and last[1] != error:
            slope = min((error - last[1]) / math.log(sigma / last[0]), -0.3)
        last = sigma, error
        sigma *= math.exp(min(max(-error / slope, -1.4), 1.4))
        if attempt > 12 and high == math.inf:  # flat: earlier releases take nearly all of it
            sigma = 4 * low
        if (attempt > 12 or not low < sigma < high) and 0 < low and high < math.inf:
            sigma = math.sqrt(low * high)
    return high


# ---- Refusals ----


def _check_delta(name: str, delta: float) -> None:
    if not 0 < delta < 1:
        raise PrivacyError(
            f"{name}={delta!r} must lie strictly between 0 and 1; choose one far below "
            "1 / num_samples, for example 1e-5."
        )


def _known(accountant: str) -> str:
    """Returns the name of an accountant, or of the default for the default of older ledgers."""
    name = DEFAULT if accountant == "least" else accountant
    if name not in ACCOUNTANTS:
        raise PrivacyError(f"{accountant=} is unknown; choose one of {[*ACCOUNTANTS]}.")
    return name
