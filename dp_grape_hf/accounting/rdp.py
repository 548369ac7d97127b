"""Rényi differential privacy: a fast upper bound on ε that is always available, but looser.

Source: Mironov, Talwar and Zhang (2019), "Rényi differential privacy of the sampled Gaussian
mechanism". Integer orders are computed by its binomial sum, fractional orders by quadrature of the
integral. All orders for replace-one adjacency (`calibration`) are computed by quadrature.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln, logsumexp


class Block(NamedTuple):
    """The parameters of equal releases of the Poisson-subsampled Gaussian mechanism.

    With ``replaces``, neighbours replace one example; see `calibration`.
    """

    noise_multiplier: float
    sample_rate: float
    replaces: bool = False


class AccountantFailure(Exception):
    """Error if an accountant cannot bound ε for some releases; its fallback is then used."""


class Accountant(ABC):
    """Base class of accountants, for ``counts[i]`` releases of ``blocks[i]`` with noise.

    If a subclass cannot compute an upper bound in reasonable time, it raises `AccountantFailure`.
    """

    @abstractmethod
    def __init__(self, blocks: Sequence[Block], max_counts: Sequence[int], delta: float) -> None:
        """Prepare for up to ``max_counts[i]`` > 0 releases of ``blocks[i]``."""

    @abstractmethod
    def epsilon(self, counts: Sequence[int]) -> float:
        """Return an upper bound on ε, for ``0 < counts[i] <= max_counts[i]``."""


_FRACTIONAL = 1 + np.geomspace(0.03, 9, 60)
_INTEGER = np.unique(np.concatenate([np.arange(2, 24), np.geomspace(24, 1024, 40).round()]))
ORDERS = np.concatenate([_FRACTIONAL, _INTEGER])
_MAX_POINTS = 60_000  # points of a quadrature; only high orders at little noise need more


@cache
def _log_binomials() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return log C(order, k) for k >= 2, -inf for k > order, and order - k, at least 0."""
    k, order = np.arange(2, _INTEGER[-1] + 1), _INTEGER[:, None]
    rest = np.maximum(order - k, 0)
    logs = gammaln(order + 1) - gammaln(k + 1) - gammaln(rest + 1)
    return np.where(k <= order, logs, -np.inf), rest


@lru_cache(maxsize=1024)
@np.errstate(all="ignore")  # an infinite moment is a valid bound
def log_moments(sigma: float, q: float) -> npt.NDArray[np.float64]:
    """Return log E[(density with the example / density without)^order] for all `ORDERS`."""
    if q == 1.0:
        return np.asarray(ORDERS * (ORDERS - 1) / 2 / sigma / sigma)
    # Integer orders: the binomial weights sum to one, and the terms k = 0, 1 do not depend on the
    # noise. So the moment minus one is a sum of positive terms, without cancellation for small q.
    k, (binomials, rest) = np.arange(2, _INTEGER[-1] + 1), _log_binomials()
    exponent = k * (k - 1) / 2 / sigma / sigma
    of_k = k * math.log(q) + exponent + np.log(-np.expm1(-exponent))
    terms = binomials + rest * math.log1p(-q) + of_k
    integer = np.logaddexp(0, logsumexp(terms, axis=1))
    if sigma < 0.05:  # too sharp for quadrature; log moments are convex, and zero at order 1
        chords = np.interp(_FRACTIONAL, [1.0, *_INTEGER], [0.0, *integer])
        return np.concatenate([chords, integer])
    # Fractional orders: the integrand is analytic within pi * sigma^2 of the real line, so the
    # trapezoidal rule is exact up to rounding, which 1e-14 covers.
    step = min(sigma, sigma * sigma) / 2
    z = np.arange(-12 * sigma, _FRACTIONAL[-1] + 12 * sigma, step)
    log_ratio = np.logaddexp(math.log1p(-q), math.log(q) + (z - 0.5) / sigma / sigma)
    log_density = -((z / sigma) ** 2) / 2 - math.log(sigma * math.sqrt(2 * math.pi))
    fractional = logsumexp(_FRACTIONAL[:, None] * log_ratio + log_density, axis=1)
    return np.concatenate([fractional + math.log(step) + 1e-14, integer])


@lru_cache(maxsize=1024)
@np.errstate(all="ignore")
def log_moments_of_replacement(sigma: float, q: float) -> npt.NDArray[np.float64]:
    """Return log E_Q[(P / Q)^order] for all `ORDERS`, of the worst pair P, Q of `calibration`."""
    # A bound by joint convexity: sensitivity 2C with probability q, and 0 otherwise.
    doubled = 2 * ORDERS * (ORDERS - 1) / sigma / sigma
    if q == 1.0:
        return np.asarray(doubled)
    bounds = np.logaddexp(math.log1p(-q), math.log(q) + doubled)
    for i, order in enumerate(ORDERS):
        # The integrand is analytic within pi * sigma^2 of the real line. There, powers of P and Q
        # grow with the order. With this step, the trapezoidal rule is exact up to rounding.
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


def renyi_epsilon(blocks: Sequence[Block], counts: Sequence[int], delta: float) -> float:
    """Return an upper bound on ε by Rényi moments; infinite if all moments are infinite.

    Moments are converted by theorem 21 of Balle et al. (2020).
    """
    moments = np.zeros_like(ORDERS)
    for (sigma, q, replaces), count in zip(blocks, counts, strict=True):
        moments += count * (log_moments_of_replacement if replaces else log_moments)(sigma, q)
    bounds = (moments - math.log(delta) - np.log(ORDERS)) / (ORDERS - 1) + np.log1p(-1 / ORDERS)
    return max(0.0, float(np.where(np.isnan(bounds), np.inf, bounds).min()))


class RDP(Accountant):
    """The bound of `renyi_epsilon`, as an accountant."""

    def __init__(self, blocks: Sequence[Block], max_counts: Sequence[int], delta: float) -> None:
        self._blocks, self._delta = blocks, delta

    def epsilon(self, counts: Sequence[int]) -> float:
        return renyi_epsilon(self._blocks, counts, self._delta)
