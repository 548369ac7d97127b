"""The accountants: what many releases cost together, each answer an upper bound on ε.

They are interchangeable; to add one, subclass `Accountant` in this file. `calibration` is
where they are asked: it checks the arguments and searches for the noise that a budget buys;
`composition` takes the least of their answers.
"""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.fft import next_fast_len
from scipy.special import gammaln, logsumexp, ndtr

from dp_grape_hf.accounting import replace_one

ACCOUNTANTS: dict[str, type["Accountant"]] = {}
"""Every accountant by name; subclasses of `Accountant` enter themselves."""

LEAST, LAST_RESORT = "least", "rdp"
"""What to ask for to get the least answer of those installed, and the one that always answers."""

ONCE = ((1.0, 1.0),)
"""The sensitivity of the plain mechanism: that of one clipped contribution, for certain."""


class Block(NamedTuple):
    """What equal releases have in common.

    Each is a Poisson subsampled Gaussian that reveals its sensitivity. ``sensitivities`` is the
    law of it, as (probability, sensitivity in units of the clipping norm) from the smallest to the
    largest: see `estimated_norms`. Where it is infinite, nothing is hidden
    if the example is drawn. With ``replaces``, neighbours replace one example: see `replace_one`.
    """

    noise_multiplier: float
    sample_rate: float
    sensitivities: tuple[tuple[float, float], ...] = ONCE
    replaces: bool = False

    def parts(self) -> list[tuple[float, float]]:
        """Returns the mixture a release is: (probability, noise multiplier), none impossible."""
        return [(p, self.noise_multiplier / size) for p, size in self.sensitivities if p > 0]

    def up_to(self, limit: float) -> tuple["Block", float]:
        """Leaves out the releases that include the example at a sensitivity above ``limit``.

        Returns:
            What a release is given that it is none of those, and the probability that it is one.
            The smallest sensitivity always stays.
        """
        smallest = self.sensitivities[0]
        rest = tuple(part for part in self.sensitivities[1:] if part[1] <= limit)
        rare = sum(p for p, size in self.sensitivities[1:] if size > limit)
        if not rare:
            return self, 0.0
        # Of the larger ones, those that do not include the example stay. They cost nothing, so
        # they may be taken for the smallest; each of the others grows a little more likely.
        rest = tuple((p / (1 - rare * self.sample_rate), size) for p, size in rest)
        least = (max(0.0, 1 - math.fsum(p for p, _ in rest)), smallest[1])
        return self._replace(sensitivities=(least, *rest)), rare * self.sample_rate


class AccountantFailure(Exception):
    """An accountant cannot answer this question; the others are asked instead."""


class Accountant(ABC):
    """Bounds ε of ``counts[i]`` releases of ``blocks[i]``, all of them with noise.

    A subclass names itself, ``class Mine(Accountant, name="mine")``, may name an optional module
    it ``requires`` (the extra to install bears the accountant's name), and raises
    `AccountantFailure` rather than hang or return anything that is not an upper bound.
    """

    requires: ClassVar[str | None] = None

    def __init_subclass__(cls, *, name: str) -> None:
        assert name not in ACCOUNTANTS, f"two accountants are called {name!r}"
        ACCOUNTANTS[name] = cls

    @abstractmethod
    def __init__(self, blocks: Sequence[Block], max_counts: Sequence[int], delta: float) -> None:
        """Prepares for up to ``max_counts[i]`` > 0 releases of ``blocks[i]``."""

    @abstractmethod
    def epsilon(self, counts: Sequence[int]) -> float:
        """Returns an upper bound on ε, where ``0 < counts[i] <= max_counts[i]``."""


def is_installed(accountant: str) -> bool:
    """Whether the optional module an accountant needs, if any, can be imported."""
    module = ACCOUNTANTS[accountant].requires
    return module is None or find_spec(module) is not None


class PRV(Accountant, name="prv"):
    """Composition of privacy random variables (Gopi et al., 2021): the upper bound.

    It includes the method's own error, in ε 0.2 % of the answer for all steps where that takes no
    more than ``max_cells``, and δ/1000 in δ. Sensitivities that are rarer than δ/10000 in all are
    charged to δ.

    Why it is one. Every loss is cut off at L, rounded to a grid of width h, and moved by less than
    h so that its mean stays; k of them are added modulo 2L. The sum is then off by more than
    h sqrt(k/2 log(12/δ_error)) with probability δ_error/6 at most (Hoeffding), the cuts change
    anything with δ_error/6 if each of the k losses exceeds L with δ_error/6k, and the sum wraps
    round with δ_error/3 if without all that it comes within that error of L with δ_error/3. These
    are theorem 5.5 and its proof. How likely a loss exceeds L follows from any ε(δ) of both
    directions: it exceeds ε + t with at most δ(ε) / (1 - e^-t), and falls below -ε - t as rarely.
    """

    relative_error = 0.002
    coarsest = 0.05  # an answer with a larger share of error is none
    max_cells = 1_000_000  # about a second and a quarter of a GB

    def __init__(self, blocks: Sequence[Block], max_counts: Sequence[int], delta: float) -> None:
        # Here, as it takes the second that all else of the package takes to import.
        from prv_accountant.composers import Heterogeneous
        from prv_accountant.domain import Domain

        blocks, delta = _for_convolution(blocks, max_counts, delta, np.longdouble)
        self._steps, self._delta = sum(max_counts), delta
        self._delta_error = delta / 1000
        rough = max(1e-3, RDP(blocks, max_counts, delta).epsilon(max_counts))
        beyond = min(2.0, rough / 4)
        rarity = self._delta_error / 6 * -math.expm1(-beyond) / 2
        tails = [RDP([block], [1], rarity / self._steps).epsilon([1]) for block in blocks]
        reach = max(RDP(blocks, max_counts, 2 * rarity).epsilon(max_counts), *tails) + beyond
        errors = math.sqrt(self._steps / 2 * math.log(12 / self._delta_error))  # per mesh width
        finest = 2 * errors * reach / (self.max_cells - 2 * errors)
        if not 0 < finest <= self.coarsest * rough:
            cells = 2 * errors * (1 + reach / (self.coarsest * rough))
            raise AccountantFailure(f"it needs {cells:.1e} cells, more than {self.max_cells:.0e}")
        while True:
            self._error = max(min(0.01, self.relative_error * rough), finest)
            mesh = self._error / errors
            half = next_fast_len(math.ceil((reach + self._error) / mesh) + 1)
            domain = Domain((1 - half) * mesh, half * mesh, 2 * half)
            with _quiet():
                self._composer = Heterogeneous([_rounded_loss(block, domain) for block in blocks])
            answer = self.epsilon(max_counts)
            if not self._error > max(1.5 * self.relative_error * answer, finest):
                return
            rough = answer

    def epsilon(self, counts: Sequence[int]) -> float:
        error = self._error * math.sqrt(sum(counts) / self._steps)
        with _quiet():
            sums = self._composer.compute_composition(list(counts))
            _, _, upper = sums.compute_epsilon(self._delta, self._delta_error, error)
        return float(upper)


class PLD(Accountant, name="pld"):
    """Privacy loss distributions of dp-accounting, rounded pessimistically, in both directions.

    What rounding adds to k releases grows with k times the square of the interval, so that is
    chosen by ε / sqrt(k): it adds less than 0.1 % in all. Sensitivities that are rarer than δ/10000
    in all are charged to δ.
    """

    requires = "dp_accounting"
    intervals = 1e-5, 1e-3
    max_epsilon = 1000.0  # about 10 s

    def __init__(self, blocks: Sequence[Block], max_counts: Sequence[int], delta: float) -> None:
        blocks, delta = _for_convolution(blocks, max_counts, delta, np.float64)
        steps, self._delta = sum(max_counts), delta
        rough = RDP(blocks, max_counts, delta).epsilon(max_counts)
        if not rough <= self.max_epsilon:
            raise AccountantFailure(f"epsilon may reach {rough:.3g}, above {self.max_epsilon:g}")
        interval = float(np.clip(rough / math.sqrt(steps) / 100, *self.intervals))
        with _quiet():
            self._losses = [_loss_distribution(block, interval) for block in blocks]

    def epsilon(self, counts: Sequence[int]) -> float:
        with _quiet():
            first, *others = (
                loss.self_compose(count) for loss, count in zip(self._losses, counts, strict=True)
            )
            for other in others:
                first = first.compose(other)
            return float(first.get_epsilon_for_delta(self._delta))


def _loss_distribution(block: Block, interval: float) -> Any:
    from dp_accounting.pld import privacy_loss_distribution as losses

    adjacency = "REPLACE_ONE" if block.replaces else "ADD_OR_REMOVE_ONE"
    mixture, total = None, 0.0
    for weight, sigma in block.parts():
        part = losses.from_gaussian_mechanism(
            standard_deviation=sigma,
            value_discretization_interval=interval,
            sampling_prob=block.sample_rate,
            neighboring_relation=losses.NeighborRel[adjacency],
        )
        total += weight
        mixture = part if mixture is None else part.compute_mixture(mixture, weight / total)
    return mixture


class RDP(Accountant, name="rdp"):
    """Rényi differential privacy (Mironov et al., 2019): a few percent loose, never fails.

    Converted to (ε, δ) by theorem 21 of Balle et al. (2020). Rare releases of large sensitivity
    weigh heavily in high moments; where the smaller, they are charged to δ instead.
    """

    def __init__(self, blocks: Sequence[Block], max_counts: Sequence[int], delta: float) -> None:
        self._blocks, self._delta = blocks, delta

    def epsilon(self, counts: Sequence[int]) -> float:
        bounds = []
        for limit in _limits(self._blocks):
            blocks, ever = _charged(self._blocks, counts, limit)
            if ever < self._delta:
                moments = [
                    n * _log_moments_of_mixture(block)
                    for block, n in zip(blocks, counts, strict=True)
                ]
                bounds.append(_convert(moments, _what_is_left(self._delta, ever)))
        return min(bounds, default=math.inf)


# ---- What is charged to δ ----


def _limits(blocks: Sequence[Block]) -> list[float]:
    """Returns the finite sensitivities that occur, from the smallest to the largest."""
    return sorted({size for block in blocks for _, size in block.sensitivities} - {math.inf})


def _charged(
    blocks: Sequence[Block], counts: Sequence[int], limit: float
) -> tuple[list[Block], float]:
    """Returns the releases without those above ``limit``, and how probable any of those are.

    Whether a release includes the example at a sensitivity above the limit is as likely with the
    example as without it, if coins are thrown for it nevertheless. So if p is the probability that
    any does, δ(ε) <= p + (1 - p) δ'(ε), δ' being that of the others.
    """
    left, rare = zip(*(block.up_to(limit) for block in blocks), strict=True)
    with np.errstate(divide="ignore"):  # a certain event leaves log(0)
        never = np.log1p(-np.array(rare))
    return list(left), -math.expm1(float(np.dot(counts, never)))


def _what_is_left(delta: float, ever: float) -> float:
    """Returns the δ' with ``delta = ever + (1 - ever) δ'``."""
    return (delta - ever) / (1 - ever)


def _for_convolution(
    blocks: Sequence[Block], counts: Sequence[int], delta: float, number: type[np.floating[Any]]
) -> tuple[list[Block], float]:
    """Charges to δ the largest sensitivities that are hardly ever met, and what rounding may err.

    That is less than one rounding of 1 a release, in the numbers that are convolved.

    Returns:
        The releases without those sensitivities, and the δ that is left for them.
    """
    for limit in _limits(blocks):
        left, ever = _charged(blocks, counts, limit)
        if ever <= delta / 10000:
            break
    else:
        raise AccountantFailure(f"unbounded sensitivities are likelier than {delta / 10000:.0e}")
    least = min(sigma for block in left for _, sigma in block.parts())
    if least < 0.1:  # numerical convolution would take minutes to find an epsilon in the hundreds
        reach = max(size for block in left for _, size in block.sensitivities)
        at = f" at {reach:.3g} times the sensitivity" if reach > 1 else ""
        raise AccountantFailure(f"noise_multiplier={least:g}{at} is below 0.1")
    delta, steps = _what_is_left(delta, ever), sum(counts)
    error = steps * float(np.finfo(number).eps)
    if error > delta / 1000:
        raise AccountantFailure(f"delta={delta:.1e} is lost in the rounding of {steps} releases")
    return left, delta - error


# ---- What the accountants share ----


def _rounded_loss(block: Block, domain: Any) -> Any:
    """Returns the privacy loss log P/Q of one release, as P has it, on the nodes of a domain.

    P includes the example. What lies outside is left out, the rest is rounded, its mean kept.

    Args:
        block: that the release is of.
        domain: the nodes, a ``Domain`` of prv_accountant.

    Returns:
        The loss, a ``DiscretePrivacyRandomVariable`` of prv_accountant.
    """
    from prv_accountant.discrete_privacy_random_variable import DiscretePrivacyRandomVariable

    nodes, mesh = domain.ts(), domain.dt()
    edges = np.append(nodes - mesh / 2, nodes[-1]).astype(np.float64)
    edges[0] = nodes[0]
    masses, mean = _losses_between(block, edges)
    whole = masses.sum(dtype=nodes.dtype)
    masses = masses.astype(nodes.dtype) / whole
    shift = float(mean / whole - np.dot(nodes, masses))
    if not abs(shift) <= mesh:
        raise AccountantFailure(f"a mean is off by {shift:.1e}, at a mesh of {mesh:.1e}")
    return DiscretePrivacyRandomVariable(masses, domain.shift_right(shift))


def _losses_between(
    block: Block, edges: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], float]:
    """Returns how probable the losses between successive edges are, and their partial mean.

    The mean is an integral over the outputs, of which the loss is an analytic function within
    pi sigma^2 of the real line: by the rule of Gauss and Legendre, on pieces.
    """
    q, masses, mean = block.sample_rate, np.zeros(len(edges) - 1), 0.0
    points, weights = np.polynomial.legendre.leggauss(12)
    log_ratio = _log_ratio_of_loss(edges, q)
    for part, sigma in block.parts():
        z = 0.5 + sigma**2 * log_ratio
        if block.replaces:
            z = replace_one.output_of_loss(edges, np.array(sigma), q)
        drawn, left = _normal_between((z - 1) / sigma), _normal_between(z / sigma)
        masses += part * (q * drawn + (1 - q) * left)
        start, end = np.clip(z[[0, -1]], -12 * sigma, 1 + 12 * sigma)
        pieces = math.ceil((end - start) / min(sigma, sigma**2)) or 1
        half = (end - start) / pieces / 2
        z = start + half * (2 * np.arange(pieces)[:, None] + 1 + points)
        up, down = (
            np.logaddexp(np.log1p(-q), math.log(q) + (sign * z - 0.5) / sigma**2)
            for sign in (1, -1)
        )
        losses = up - down if block.replaces else up
        density = np.exp(up - (z / sigma) ** 2 / 2) / sigma / math.sqrt(2 * math.pi)
        mean += part * half * float((density * losses).sum(axis=0) @ weights)
    return masses, mean


def _normal_between(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Returns how probable a normal number between successive ``x`` is, exact in both tails."""
    above = -np.diff(ndtr(-x))
    return np.asarray(np.where(x[:-1] > 0, above, np.diff(ndtr(x))))


@np.errstate(over="ignore", divide="ignore")
def _log_ratio_of_loss(t: npt.NDArray[np.float64], q: float) -> npt.NDArray[np.float64]:
    """Returns x where the loss of the add-or-remove-one pair, log(1 - q + q e^x), is t.

    At an output z it is x = (z - 1/2) / sigma^2. No loss is below log(1 - q); there x is -inf.
    """
    small = np.log1p(np.maximum(np.expm1(np.minimum(t, 1.0)) / q, -1.0))
    large = t - math.log(q) + np.log1p((q - 1) * np.exp(-np.maximum(t, 1.0)))
    return np.where(t < 1, small, large)


# ---- Renyi moments of the Poisson subsampled Gaussian ----
#
# Mironov, Talwar and Zhang (2019), "Renyi differential privacy of the sampled Gaussian mechanism":
# integer orders by its binomial sum, fractional orders by quadrature of the defining integral. So
# are all orders of the pair that replacing one example makes (`replace_one`).

_FRACTIONAL = 1 + np.geomspace(0.03, 9, 60)
_INTEGER = np.unique(np.concatenate([np.arange(2, 24), np.geomspace(24, 1024, 40).round()]))
ORDERS = np.concatenate([_FRACTIONAL, _INTEGER])
_MAX_POINTS = 60_000  # of a quadrature: high orders at little noise, which no epsilon needs


@lru_cache(maxsize=1024)
@np.errstate(all="ignore")  # an infinite moment is a valid bound
def log_moments(sigma: float, q: float) -> npt.NDArray[np.float64]:
    """Returns log E[(density with the example / density without)^order] for all `ORDERS`."""
    if q == 1.0:
        return np.asarray(ORDERS * (ORDERS - 1) / 2 / sigma / sigma)
    # Integer orders: the binomial coefficients sum to one and the terms k = 0, 1 depend on no
    # noise, so the excess over one is a sum of positive terms; nothing cancels for small q.
    k, order = np.arange(2, _INTEGER[-1] + 1), _INTEGER[:, None]
    exponent = k * (k - 1) / 2 / sigma / sigma
    rest = np.maximum(order - k, 0)
    terms = gammaln(order + 1) - gammaln(k + 1) - gammaln(rest + 1)
    terms = terms + k * math.log(q) + rest * math.log1p(-q)
    terms = terms + exponent + np.log(-np.expm1(-exponent))
    integer = np.logaddexp(0, logsumexp(np.where(k <= order, terms, -np.inf), axis=1))
    if sigma < 0.05:  # too sharp for the quadrature; log moments are convex and zero at order 1
        chords = np.interp(_FRACTIONAL, [1.0, *_INTEGER], [0.0, *integer])
        return np.concatenate([chords, integer])
    # Fractional orders: the trapezoidal rule is exact up to rounding (which 1e-14 covers) for
    # this integrand, analytic within pi * sigma^2 of the real line.
    step = min(sigma, sigma * sigma) / 2
    z = np.arange(-12 * sigma, _FRACTIONAL[-1] + 12 * sigma, step)
    log_ratio = np.logaddexp(math.log1p(-q), math.log(q) + (z - 0.5) / sigma / sigma)
    log_density = -((z / sigma) ** 2) / 2 - math.log(sigma * math.sqrt(2 * math.pi))
    fractional = logsumexp(_FRACTIONAL[:, None] * log_ratio + log_density, axis=1)
    return np.concatenate([fractional + math.log(step) + 1e-14, integer])


@lru_cache(maxsize=1024)
@np.errstate(all="ignore")
def log_moments_of_replacement(sigma: float, q: float) -> npt.NDArray[np.float64]:
    """Returns log E_Q[(P / Q)^order] for all `ORDERS`, of the worst pair P, Q of `replace_one`."""
    # Joint convexity: of all releases, a share of q has twice the sensitivity, the rest has none.
    doubled = 2 * ORDERS * (ORDERS - 1) / sigma / sigma
    if q == 1.0:
        return np.asarray(doubled)
    bounds = np.logaddexp(math.log1p(-q), math.log(q) + doubled)
    for i, order in enumerate(ORDERS):
        # The integrand is analytic within pi * sigma^2 of the real line, where powers of P and Q
        # grow with the order. This step keeps the trapezoidal rule exact up to rounding.
        step = min(sigma, sigma * sigma) / (6 + order / 40)
        end = 2 * order - 1 + 12 * sigma
        if not (end + 1 + 12 * sigma) / step <= _MAX_POINTS:
            continue
        z = np.arange(-1 - 12 * sigma, end, step)
        up, down = (
            np.logaddexp(math.log1p(-q), math.log(q) + (sign * z - 0.5) / sigma / sigma)
            for sign in (1, -1)
        )
        log_density = -((z / sigma) ** 2) / 2 - math.log(sigma * math.sqrt(2 * math.pi))
        exact = logsumexp(order * (up - down) + down + log_density) + math.log(step)
        bounds[i] = min(bounds[i], exact + 1e-14 * order)
    return bounds


def _log_moments_of_mixture(block: Block) -> npt.NDArray[np.float64]:
    of_pair = log_moments_of_replacement if block.replaces else log_moments
    moments = [
        math.log(weight) + of_pair(sigma, block.sample_rate) for weight, sigma in block.parts()
    ]
    return np.asarray(np.logaddexp.reduce(moments))


def _convert(moments: Sequence[npt.NDArray[np.float64]], delta: float) -> float:
    """Returns ε at ``delta`` for runs with these log moments."""
    total = sum(moments, np.zeros_like(ORDERS))
    bounds = (total - math.log(delta) - np.log(ORDERS)) / (ORDERS - 1)
    bounds = bounds + np.log1p(-1 / ORDERS)
    return max(0.0, float(np.where(np.isnan(bounds), np.inf, bounds).min()))


def rounded_up(value: float, digits: int = 4) -> float:
    """Rounds an upper bound for print, never down: what is printed keeps the promise."""
    return math.ceil(value * 10**digits) / 10**digits if math.isfinite(value) else value


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the warnings of a library and turns its errors into `AccountantFailure`."""
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            yield
    except (RuntimeError, ValueError, AssertionError, ArithmeticError, MemoryError) as error:
        raise AccountantFailure(f"{type(error).__name__}: {error}") from error
