"""The accountants: upper bounds on ε of many releases together.

PLD answers unless another accountant is selected by name. RDP starts searches, gives a second
opinion, and answers where the selected accountant cannot. The choice depends on the public numbers
of the releases alone, never on data.
"""

import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.fft import next_fast_len
from scipy.special import ndtr, ndtri

from dp_grape_hf.accounting.rdp import RDP, Accountant, AccountantFailure, Block, renyi_epsilon
from dp_grape_hf.accounting.replace_one import output_of_loss

logger = logging.getLogger(__name__)


class PLD(Accountant):
    """Privacy loss distributions of dp-accounting, rounded pessimistically, in both directions.

    Rounding k releases to a grid of interval h adds an error to ε that grows with k h^2. With h at
    most 3 % of ε / sqrt(k), this error is below 0.2 % of ε. Losses rarer than δ/10^6 in all count
    as infinite.
    """

    intervals = 1e-6, 1e-3
    max_cells = 100_000  # of the loss of one release: about three seconds
    max_epsilon = 700.0  # dp-accounting multiplies by e^-ε, which is inexact above 708

    def __init__(self, blocks: Sequence[Block], max_counts: Sequence[int], delta: float) -> None:
        self._blocks, self._steps = blocks, sum(max_counts)
        self._delta = _delta_left(blocks, self._steps, delta, np.float64)
        rough = renyi_epsilon(self._blocks, max_counts, self._delta)
        if not rough <= self.max_epsilon:
            raise AccountantFailure(f"epsilon may reach {rough:.3g}, above {self.max_epsilon:g}")
        self._discretize(rough)
        answer = self.epsilon(max_counts)
        if 0 < answer < rough / 3:  # RDP is far from tight for small sampling rates
            self._discretize(3 * answer)

    def _discretize(self, rough: float) -> None:
        rare = self._delta / 1e6 / self._steps
        reach = max(_largest_loss(block, rare) for block in self._blocks)
        interval = float(np.clip(rough / math.sqrt(self._steps) / 100, *self.intervals))
        interval = max(interval, reach / self.max_cells)
        with _quiet():
            self._losses = [_loss_distribution(block, interval, rare) for block in self._blocks]

    def epsilon(self, counts: Sequence[int]) -> float:
        rare = self._delta / 1e6 / len(counts)
        with _quiet():
            first, *others = (
                loss.self_compose(count, tail_mass_truncation=rare)
                for loss, count in zip(self._losses, counts, strict=True)
            )
            for other in others:
                first = first.compose(other, tail_mass_truncation=0)  # to truncate is slow
            return float(first.get_epsilon_for_delta(self._delta))


def _largest_loss(block: Block, rare: float) -> float:
    """Returns the privacy loss of probability ``rare``; a replacement's is up to twice as large."""
    sigma, q, _ = block
    drawn = -ndtri(rare) / sigma + 0.5 / sigma**2
    with np.errstate(divide="ignore"):  # at q = 1
        return float(np.logaddexp(np.log1p(-q), math.log(q) + drawn))


def _loss_distribution(block: Block, interval: float, rare: float) -> Any:
    """Returns the loss of one release, a ``PrivacyLossDistribution`` of dp-accounting."""
    from dp_accounting.pld import privacy_loss_distribution as losses  # takes two seconds

    adjacency = "REPLACE_ONE" if block.replaces else "ADD_OR_REMOVE_ONE"
    return losses.from_gaussian_mechanism(
        standard_deviation=block.noise_multiplier,
        value_discretization_interval=interval,
        log_mass_truncation_bound=math.log(rare),
        sampling_prob=block.sample_rate,
        neighboring_relation=losses.NeighborRel[adjacency],
    )


class PRV(Accountant):
    """Privacy random variables (Gopi et al. 2021) of prv-accountant: its upper bound.

    The bound includes the method's error of 0.2 % of ε, or more where that would take more than
    ``max_cells``, and δ/1000 in δ.

    prv-accountant cuts every loss off at L, rounds it to a grid of width h, shifts the grid so that
    the mean stays, and adds k losses modulo 2L. The sum is off by more than h sqrt(k/2
    log(12/δ_error)) with probability δ_error/6 at most (Hoeffding). The cuts change anything with
    δ_error/6 if each of the k losses exceeds L with δ_error/6k. The sum wraps round with δ_error/3
    if it comes within that error of L with δ_error/3. These are theorem 5.5 and its proof. Any ε(δ)
    of both directions bounds the tails: the loss exceeds ε + t with at most δ(ε) / (1 - e^-t), and
    falls below -ε - t as rarely.
    """

    relative_error = 0.002
    coarsest = 0.05  # a bound with a larger share of error is not used
    max_cells = 1_000_000  # about a second and a quarter of a GB
    quadrature_error = 1.5e-8  # tolerance of the means, which scipy's quad integrates on 11 pieces

    def __init__(self, blocks: Sequence[Block], max_counts: Sequence[int], delta: float) -> None:
        self._steps = sum(max_counts)
        self._delta = delta = _delta_left(blocks, self._steps, delta, np.longdouble)
        self._delta_error = delta / 1000
        rough = max(1e-3, renyi_epsilon(blocks, max_counts, delta))
        beyond = min(2.0, rough / 4)
        rarity = self._delta_error / 6 * -math.expm1(-beyond) / 2
        tails = [renyi_epsilon([block], [1], rarity / self._steps) for block in blocks]
        reach = max(renyi_epsilon(blocks, max_counts, 2 * rarity), *tails) + beyond
        errors = math.sqrt(self._steps / 2 * math.log(12 / self._delta_error))  # per mesh width
        of_means = self._steps * self.quadrature_error * (11 + reach)
        if not of_means <= self.coarsest * rough / 2:
            raise AccountantFailure(f"quadrature may shift {self._steps} means by {of_means:.1e}")
        finest = of_means + 2 * errors * reach / (self.max_cells - 2 * errors)
        if not of_means < finest <= self.coarsest * rough:
            cells = 2 * errors * (1 + reach / (self.coarsest * rough - of_means))
            raise AccountantFailure(f"it needs {cells:.1e} cells, more than {self.max_cells:.0e}")
        with _quiet():
            from prv_accountant import PRVAccountant  # takes a second

            losses = [_random_variable(block) for block in blocks]
            while True:
                self._error = max(min(0.01, self.relative_error * rough), finest)
                rounding = self._error - of_means
                mesh = rounding / errors
                half = next_fast_len(math.ceil((reach + self._error) / mesh) + 1)
                self._accountant = PRVAccountant(
                    losses,
                    eps_error=rounding,
                    delta_error=self._delta_error,
                    max_self_compositions=list(max_counts),
                    eps_max=(half - 1.5) * mesh,  # which it rounds up to half - 1 cells
                )
                answer = self.epsilon(max_counts)
                if not self._error > max(1.5 * self.relative_error * answer, finest):
                    return
                rough = answer

    def epsilon(self, counts: Sequence[int]) -> float:
        error = self._error * math.sqrt(sum(counts) / self._steps)
        with _quiet():
            total = self._accountant.compute_composition(list(counts))
            _, _, upper = total.compute_epsilon(self._delta, self._delta_error, error)
        return float(upper)


def _random_variable(block: Block) -> Any:
    """Returns the loss of one release, a ``PrivacyRandomVariable`` of prv-accountant."""
    from prv_accountant import PoissonSubsampledGaussianMechanism, PrivacyRandomVariable

    sigma, q, replaces = block
    if not replaces:
        return PoissonSubsampledGaussianMechanism(q, sigma)

    class Replacement(PrivacyRandomVariable):
        def cdf(self, t: npt.ArrayLike) -> npt.NDArray[np.longdouble]:
            z = output_of_loss(np.asarray(t, dtype=np.float64), np.array(sigma), q)
            above = q * ndtr((1 - z) / sigma) + (1 - q) * ndtr(-z / sigma)
            return 1 - above.astype(np.longdouble)

    return Replacement()


ACCOUNTANTS: dict[str, type[Accountant]] = {"pld": PLD, "prv": PRV, "rdp": RDP}
"""All accountants by name."""

DEFAULT, ROUGH = "pld", "rdp"
"""The accountant of a run that selects none, and the one that starts searches."""

_INSTEAD = {"prv": "pld", "pld": "rdp"}


class Composition:
    """Bounds ε of one composition by the selected accountant, or another one where that fails.

    All accountants bound the same true ε from above, so each answer is valid. ``accountant`` is the
    name of the one that answers. Answers are remembered.
    """

    def __init__(
        self, blocks: Sequence[Block], max_counts: Sequence[int], delta: float, accountant: str
    ) -> None:
        self.accountant = accountant
        self._arguments = blocks, max_counts, delta
        self._noiseless = any(block.noise_multiplier == 0 for block in blocks)
        self._built: Accountant | None = None
        self._answers: dict[tuple[int, ...], float] = {}

    def epsilon(self, counts: Sequence[int]) -> float:
        """Returns the bound on ``counts[i]`` releases of block i, each above 0."""
        if self._noiseless:
            return math.inf
        key = tuple(counts)
        while key not in self._answers:
            try:
                if self._built is None:
                    self._built = ACCOUNTANTS[self.accountant](*self._arguments)
                answer = self._built.epsilon(counts)
                if not math.isfinite(answer) and self.accountant in _INSTEAD:
                    raise AccountantFailure(f"it returned {answer}")
                self._answers[key] = max(0.0, answer)
            except AccountantFailure as failure:
                if self.accountant not in _INSTEAD:
                    raise
                instead = _INSTEAD[self.accountant]
                logger.warning(
                    f"Epsilon cannot be bounded here by {self.accountant} ({failure}); using "
                    f"{instead} instead, which is an upper bound too."
                )
                self.accountant, self._built = instead, None
        return self._answers[key]


def rounded_up(value: float, digits: int = 4) -> float:
    """Rounds an upper bound for print, never down: what is printed keeps the promise."""
    return math.ceil(value * 10**digits) / 10**digits if math.isfinite(value) else value


def _delta_left(
    blocks: Sequence[Block], steps: int, delta: float, number: type[np.floating[Any]]
) -> float:
    """Returns the δ that is left after the rounding errors of a numerical convolution.

    It errs by less than one machine epsilon of ``number`` for each release.
    """
    least = min(block.noise_multiplier for block in blocks)
    if least < 0.1:  # numerical convolution would take minutes to find an epsilon in the hundreds
        raise AccountantFailure(f"noise_multiplier={least:g} is below 0.1")
    error = steps * float(np.finfo(number).eps)
    if error > delta / 100:
        raise AccountantFailure(f"delta={delta:.1e} is lost in the rounding of {steps} releases")
    return delta - error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the warnings of a library and turns its errors into `AccountantFailure`.

    An integral that misses its tolerance is an error.
    """
    from scipy.integrate import IntegrationWarning  # slow to import, and loaded by the libraries

    errors = (RuntimeError, ValueError, AssertionError, ArithmeticError, MemoryError)
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", IntegrationWarning)
            yield
    except (*errors, IntegrationWarning) as error:
        raise AccountantFailure(f"{type(error).__name__}: {error}") from error
