"""What a training run costs in ε, and the noise multiplier that a budget buys.

Every number returned here is an *upper* bound on ε. The accountants are interchangeable; to add
one, subclass `Accountant` in this file.

Guarantee:
    The mechanism accounted is the Poisson subsampled Gaussian: in every step each example is
    drawn independently with probability ``sample_rate``, its contribution has L2 norm at most C,
    and noise of standard deviation ``noise_multiplier * C`` per coordinate is added to the
    *sum* of the contributions. Two datasets are adjacent if one has a single example more than
    the other, so the sum has sensitivity C. A step counts even when nobody was drawn.
"""

import logging
import math
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import ClassVar

import numpy as np
from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.renyi import ORDERS, log_moments

logger = logging.getLogger(__name__)

ADJACENCY = "add_or_remove_one"
"""The adjacency of every ε in this package: one example added or removed, sensitivity C."""

ACCOUNTANTS: dict[str, type["Accountant"]] = {}
"""Every accountant by name; subclasses of `Accountant` enter themselves."""

Release = tuple[float, float, int]
"""Equal releases, run-length coded: ``(noise_multiplier, sample_rate, count)``."""

Block = tuple[float, float]
"""What equal releases have in common: ``(noise_multiplier, sample_rate)``."""


def compute_epsilon(
    *,
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    delta: float,
    accountant: str = "prv",
) -> float:
    """Returns an upper bound on ε after ``steps`` equal releases.

    No steps cost nothing, whatever the noise; without noise, ε is infinite.

    >>> compute_epsilon(noise_multiplier=0.0, sample_rate=0.01, steps=10, delta=1e-5)
    inf
    >>> round(compute_epsilon(noise_multiplier=4.0, sample_rate=1 / 16, steps=1000, delta=1e-5), 2)
    2.04
    """
    _check_steps("steps", steps)
    return EpsilonCurve(noise_multiplier, sample_rate, delta, steps, accountant).epsilon(steps)


def compose_epsilon(releases: Sequence[Release], *, delta: float, accountant: str = "prv") -> float:
    """Returns an upper bound on ε of all ``releases`` together, in any order.

    Equal blocks are merged; blocks of count zero cost nothing, even without noise.

    >>> round(compose_epsilon([(4.0, 0.05, 500), (3.0, 0.02, 100)], delta=1e-5), 2)
    1.13
    """
    _check_delta("delta", delta)
    _check_accountant(accountant)
    counts: Counter[Block] = Counter()
    for noise_multiplier, sample_rate, count in releases:
        _check_mechanism(noise_multiplier, sample_rate)
        _check_steps("count", count)
        counts[float(noise_multiplier), float(sample_rate)] += int(count)
    blocks = [block for block in counts if counts[block]]
    numbers = [counts[block] for block in blocks]
    return _Composition(blocks, numbers, delta, accountant).epsilon(numbers) if blocks else 0.0


def find_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    accountant: str = "prv",
) -> float:
    """Returns the smallest noise multiplier whose ε is at most ``target_epsilon``.

    `compute_epsilon` of the result never exceeds the target and is within 0.05 % of it (or the
    result within 0.05 % of the smallest). ``steps`` must be positive: a run that releases nothing
    meets every target, and answering 0 would let a run that does take steps start without noise.
    """
    if not 0 < target_epsilon < math.inf:
        raise PrivacyError(
            f"{target_epsilon=} must be positive and finite; state the budget, for example 6.0."
        )
    _check_delta("target_delta", target_delta)
    _check_mechanism(1.0, sample_rate)
    _check_steps("steps", steps)
    if steps == 0:
        raise PrivacyError(
            f"{steps=} releases nothing, so every noise multiplier meets {target_epsilon=}; give "
            "the number of steps the run will take."
        )
    _check_accountant(accountant)

    def epsilon(noise_multiplier: float, name: str) -> float:
        curve = EpsilonCurve(noise_multiplier, sample_rate, target_delta, steps, name)
        return curve.epsilon(steps)

    # RDP answers in milliseconds and asks for a few percent too much: a start from above.
    guess = _smallest(lambda sigma: epsilon(sigma, "rdp"), target_epsilon, guess=1.0) or 1.0
    sigma = _smallest(lambda sigma: epsilon(sigma, accountant), target_epsilon, guess)
    if sigma is None:
        raise PrivacyError(
            f"{target_epsilon=} is below what accountant={accountant!r} can certify at "
            f"{target_delta=}, however large the noise; choose a larger target_epsilon."
        )
    return sigma


class EpsilonCurve:
    """ε as a function of the steps taken, for a loop that asks again and again.

    The accountant is built once, on the first question, for ``max_steps`` steps, and again only
    if a run outgrows them; answers are remembered.

    >>> curve = EpsilonCurve(4.0, 64 / 1024, delta=1e-5, max_steps=1000, accountant="rdp")
    >>> [round(curve.epsilon(steps), 2) for steps in (0, 10, 1000)]
    [0.0, 0.21, 2.21]
    """

    def __init__(
        self,
        noise_multiplier: float,
        sample_rate: float,
        delta: float,
        max_steps: int,
        accountant: str = "prv",
    ) -> None:
        _check_mechanism(noise_multiplier, sample_rate)
        _check_delta("delta", delta)
        _check_steps("max_steps", max_steps)
        _check_accountant(accountant)
        self._block = float(noise_multiplier), float(sample_rate)
        self._delta, self._max_steps = delta, int(max_steps)
        self._composition = _Composition([self._block], [self._max_steps], delta, accountant)
        self._answers = {0: 0.0}

    @property
    def accountant(self) -> str:
        """The accountant in use, which differs from the one asked for after a fallback."""
        return self._composition.accountant

    def epsilon(self, steps: int) -> float:
        """Returns an upper bound on ε after ``steps`` steps."""
        _check_steps("steps", steps)
        if steps > self._max_steps:
            most = self._max_steps = max(int(steps), 2 * self._max_steps)
            self._composition = _Composition([self._block], [most], self._delta, self.accountant)
        if steps not in self._answers:
            self._answers[steps] = self._composition.epsilon([int(steps)])
        return self._answers[steps]


# ---- Accountants ----


class AccountantFailure(Exception):
    """An accountant cannot answer this question; its fallback is asked instead."""


class Accountant(ABC):
    """Bounds ε of ``counts[i]`` releases of ``blocks[i]``, all of them with noise.

    A subclass names itself, ``class Mine(Accountant, name="mine")``, may name an optional module
    it ``requires`` (the extra to install bears the accountant's name), and raises
    `AccountantFailure` rather than hang or return anything that is not an upper bound.
    """

    requires: ClassVar[str | None] = None
    fallback: ClassVar[str] = "rdp"

    def __init_subclass__(cls, *, name: str) -> None:
        assert name not in ACCOUNTANTS, f"two accountants are called {name!r}"
        ACCOUNTANTS[name] = cls

    @abstractmethod
    def __init__(self, blocks: Sequence[Block], max_counts: Sequence[int], delta: float) -> None:
        """Prepares for up to ``max_counts[i]`` > 0 releases of ``blocks[i]``."""

    @abstractmethod
    def epsilon(self, counts: Sequence[int]) -> float:
        """Returns an upper bound on ε, where ``0 < counts[i] <= max_counts[i]``."""


class PRV(Accountant, name="prv"):
    """Composition of privacy random variables (Gopi et al., 2021): the upper bound.

    It includes the method's own error, 0.01 in ε and δ/1000 in δ.
    """

    fallback = "pld"
    epsilon_error = 0.01
    max_cells = 3_000_000  # about 5 s and half a GB

    def __init__(self, blocks: Sequence[Block], max_counts: Sequence[int], delta: float) -> None:
        _refuse_little_noise(blocks)
        self._delta, delta_error, steps = delta, delta / 1000, sum(max_counts)
        # The domain of Gopi et al., remark 5.6, from our RDP: the library's own may not return.
        tails = [RDP([block], [1], delta_error / (8 * steps)).epsilon([1]) for block in blocks]
        whole = RDP(blocks, max_counts, delta_error / 4).epsilon(max_counts)
        half_width = max(whole, *tails, self.epsilon_error) + 3
        mesh = self.epsilon_error / math.sqrt(steps / 2 * math.log(12 / delta_error))
        if not (cells := 2 * half_width / mesh) <= self.max_cells:
            raise AccountantFailure(f"it needs {cells:.1e} cells, more than {self.max_cells:.0e}")
        with _quiet():
            self._accountant = PRVAccountant(
                prvs=[PoissonSubsampledGaussianMechanism(q, sigma) for sigma, q in blocks],
                max_self_compositions=list(max_counts),
                eps_error=self.epsilon_error,
                delta_error=delta_error,
                eps_max=half_width,
            )

    def epsilon(self, counts: Sequence[int]) -> float:
        with _quiet():
            _, _, upper = self._accountant.compute_epsilon(self._delta, list(counts))
        return float(upper)


class PLD(Accountant, name="pld"):
    """Privacy loss distributions of dp-accounting, rounded pessimistically, in both directions."""

    requires = "dp_accounting"
    interval = 1e-4
    max_epsilon = 1000.0  # about 10 s

    def __init__(self, blocks: Sequence[Block], max_counts: Sequence[int], delta: float) -> None:
        _refuse_little_noise(blocks)
        rough = RDP(blocks, max_counts, delta).epsilon(max_counts)
        if not rough <= self.max_epsilon:
            raise AccountantFailure(f"epsilon may reach {rough:.3g}, above {self.max_epsilon:g}")
        self._blocks, self._delta = blocks, delta

    def epsilon(self, counts: Sequence[int]) -> float:
        with _quiet():
            from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
            from dp_accounting.pld import PLDAccountant

            accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE, self.interval)
            for (sigma, q), count in zip(self._blocks, counts, strict=True):
                accountant.compose(PoissonSampledDpEvent(q, GaussianDpEvent(sigma)), count)
            return float(accountant.get_epsilon(self._delta))


class RDP(Accountant, name="rdp"):
    """Rényi differential privacy (Mironov et al., 2019): a few percent loose, never fails.

    Converted to (ε, δ) by theorem 21 of Balle et al. (2020).
    """

    def __init__(self, blocks: Sequence[Block], max_counts: Sequence[int], delta: float) -> None:
        self._log_moments = [log_moments(sigma, q) for sigma, q in blocks]
        self._delta = delta

    def epsilon(self, counts: Sequence[int]) -> float:
        total = sum(n * moments for n, moments in zip(counts, self._log_moments, strict=True))
        bounds = (total - math.log(self._delta) - np.log(ORDERS)) / (ORDERS - 1)
        bounds = bounds + np.log1p(-1 / ORDERS)
        return max(0.0, float(np.where(np.isnan(bounds), np.inf, bounds).min()))


class _Composition:
    """An accountant that is built when first asked and, if it fails, replaced with a notice."""

    def __init__(
        self, blocks: Sequence[Block], max_counts: Sequence[int], delta: float, accountant: str
    ) -> None:
        self.accountant = accountant
        self._arguments = blocks, max_counts, delta
        self._noiseless = any(sigma == 0 for sigma, _ in blocks)
        self._built: Accountant | None = None

    def epsilon(self, counts: Sequence[int]) -> float:
        if self._noiseless:
            return math.inf
        while True:
            try:
                if self._built is None:
                    self._built = ACCOUNTANTS[self.accountant](*self._arguments)
                epsilon = self._built.epsilon(counts)
                if not math.isfinite(epsilon) and self._built.fallback != self.accountant:
                    raise AccountantFailure(f"it returned {epsilon}")
                return max(0.0, epsilon)
            except AccountantFailure as failure:
                failed, self._built = self.accountant, None
                self.accountant = ACCOUNTANTS[failed].fallback
                while not _is_installed(self.accountant):
                    self.accountant = ACCOUNTANTS[self.accountant].fallback
                if self.accountant == failed:
                    raise
                logger.warning(
                    f"The {failed} accountant cannot bound epsilon here ({failure}); using "
                    f"{self.accountant} instead, which is an upper bound too."
                )


# ---- Calibration ----


def _smallest(epsilon: Callable[[float], float], target: float, guess: float) -> float | None:
    """Returns sigma with ``epsilon(sigma)`` just below ``target``; None if no noise suffices."""
    tolerance = 5e-4
    aim = target * (1 - tolerance / 2)
    low, high = 0.0, math.inf  # epsilon(low) > target >= epsilon(high)
    sigma, slope = guess, -1.0
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
        if (attempt > 12 or not low < sigma < high) and 0 < low and high < math.inf:
            sigma = math.sqrt(low * high)
    return high


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the warnings of a library and turns its errors into `AccountantFailure`."""
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            yield
    except (RuntimeError, ValueError, AssertionError, ArithmeticError, MemoryError) as error:
        raise AccountantFailure(f"{type(error).__name__}: {error}") from error


# ---- Refusals ----


def _refuse_little_noise(blocks: Sequence[Block]) -> None:
    least = min(sigma for sigma, _ in blocks)
    if least < 0.1:  # numerical convolution would take minutes to find an epsilon in the hundreds
        raise AccountantFailure(f"noise_multiplier={least:g} is below 0.1")


def _is_installed(accountant: str) -> bool:
    module = ACCOUNTANTS[accountant].requires
    return module is None or find_spec(module) is not None


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


def _check_delta(name: str, delta: float) -> None:
    if not 0 < delta < 1:
        raise PrivacyError(
            f"{name}={delta!r} must lie strictly between 0 and 1; choose one far below "
            "1 / num_samples, for example 1e-5."
        )


def _check_steps(name: str, steps: int) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int | np.integer) or steps < 0:
        raise PrivacyError(f"{name}={steps!r} must be a whole number of steps, not negative.")


def _check_accountant(accountant: str) -> None:
    if accountant not in ACCOUNTANTS:
        raise PrivacyError(f"{accountant=} is unknown; choose one of {sorted(ACCOUNTANTS)}.")
    if not _is_installed(accountant):
        raise PrivacyError(
            f"{accountant=} needs {ACCOUNTANTS[accountant].requires}, which is not installed; "
            f"run `pip install dp_grape_hf[{accountant}]` or choose accountant='prv'."
        )
