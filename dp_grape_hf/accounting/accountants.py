"""The accountants: upper bounds on ε for the composition of many releases.

The default is PLD. RDP starts searches and is a fallback if the selected accountant fails. The
choice depends only on the public numbers of the releases, never on data.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from scipy.fft import next_fast_len
from scipy.special import ndtri

from dp_grape_hf.accounting.rdp import RDP, Accountant, AccountantFailure, Block, renyi_epsilon


class PLD(Accountant):
    """Privacy loss distributions of dp-accounting, rounded pessimistically, in both directions.

    Rounding k releases to a grid of interval h adds an error to ε that grows with k h^2. With h at
    most 3 % of ε / sqrt(k), this error is below 0.2 % of ε. Losses rarer than δ/10^6 in all count
    as infinite.
    """

    intervals = 1e-6, 1e-3
    max_cells = 100_000  # grid points of the loss of one release, about three seconds
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
        self._answers: dict[tuple[int, ...], float] = {}
        rare = self._delta / 1e6 / self._steps
        reach = max(_largest_loss(block, rare) for block in self._blocks)
        interval = float(np.clip(rough / math.sqrt(self._steps) / 100, *self.intervals))
        interval = max(interval, reach / self.max_cells)
        with _quiet():
            self._losses = [_loss_distribution(block, interval, rare) for block in self._blocks]

    def epsilon(self, counts: Sequence[int]) -> float:
        key = tuple(counts)
        if key not in self._answers:
            self._answers[key] = self._epsilon(counts)
        return self._answers[key]

    def _epsilon(self, counts: Sequence[int]) -> float:
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
    """Return a loss exceeded with probability ``rare``; with replace-one, up to twice as large."""
    sigma, q, _ = block
    drawn = -ndtri(rare) / sigma + 0.5 / sigma**2
    with np.errstate(divide="ignore"):  # log 0 at q = 1
        return float(np.logaddexp(np.log1p(-q), math.log(q) + drawn))


def _loss_distribution(block: Block, interval: float, rare: float) -> Any:
    """Return the loss of one release, as a ``PrivacyLossDistribution`` of dp-accounting."""
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
    """The upper bound of prv-accountant, by privacy random variables (Gopi et al. 2021).

    It is not available for replace-one adjacency.

    The bound includes a numerical error of 0.2 % of ε, or more if that would take more than
    ``max_cells``, and an error of δ/1000 in δ.

    prv-accountant truncates every loss at L, rounds it to a grid of width h that keeps the mean,
    and adds k losses modulo 2L. Theorem 5.5 bounds the probabilities of its errors:

    * at most δ_error/6 that rounding changes the sum by over h sqrt(k/2 log(12/δ_error));
    * at most δ_error/6 for a truncation, if each loss exceeds L with probability δ_error/6k;
    * at most δ_error/3 that the sum wraps around, if it exceeds L minus this rounding error with
      probability δ_error/3.

    Any ε(δ) bounds the tails: the loss exceeds ε + t, or is below -ε - t, with a probability of at
    most δ(ε) / (1 - e^-t) each.
    """

    relative_error = 0.002
    coarsest = 0.05  # largest accepted error, relative to ε
    max_cells = 1_000_000  # grid points, about a second and a quarter of a GB
    quadrature_error = 1.5e-8  # tolerance of the means, which scipy's quad integrates in 11 pieces

    def __init__(self, blocks: Sequence[Block], max_counts: Sequence[int], delta: float) -> None:
        if any(block.replaces for block in blocks):
            raise AccountantFailure("it does not compute replace-one adjacency")
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
            from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant  # a second

            losses = [PoissonSubsampledGaussianMechanism(q, sigma) for sigma, q, _ in blocks]
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
                    eps_max=(half - 1.5) * mesh,  # it rounds this up to half - 1 cells
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


ACCOUNTANTS: dict[str, type[Accountant]] = {"pld": PLD, "prv": PRV, "rdp": RDP}
"""All accountants by name."""

DEFAULT, ROUGH = "pld", "rdp"
"""The default accountant, and the accountant that starts searches."""

INSTEAD = {"prv": "pld", "pld": "rdp"}
"""The accountant that replaces one which fails. All bound the same true ε from above."""


def rounded_up(value: float, digits: int = 4) -> float:
    """Round an upper bound up to some decimals, so that the printed number is a bound too."""
    return math.ceil(value * 10**digits) / 10**digits if math.isfinite(value) else value


def _delta_left(
    blocks: Sequence[Block], steps: int, delta: float, number: type[np.floating[Any]]
) -> float:
    """Return δ minus the rounding error of a numerical convolution.

    The error is less than one machine epsilon of ``number`` for each release.
    """
    least = min(block.noise_multiplier for block in blocks)
    if least < 0.1:  # a numerical convolution would take minutes, for an epsilon in the hundreds
        raise AccountantFailure(f"noise_multiplier={least:g} is below 0.1")
    error = steps * float(np.finfo(number).eps)
    if error > delta / 100:
        raise AccountantFailure(f"delta={delta:.1e} is lost in the rounding of {steps} releases")
    return delta - error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings of a library, and raise its errors as `AccountantFailure`.

    An integral that misses its tolerance counts as an error.
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
