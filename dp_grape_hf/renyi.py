"""Renyi moments of the Poisson subsampled Gaussian, for the accountant that never fails.

Mironov, Talwar and Zhang (2019), "Renyi differential privacy of the sampled Gaussian mechanism":
integer orders by its binomial sum, fractional orders by quadrature of the defining integral.
"""

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln, logsumexp

_FRACTIONAL = 1 + np.geomspace(0.03, 9, 60)
_INTEGER = np.unique(np.concatenate([np.arange(2, 24), np.geomspace(24, 1024, 40).round()]))
ORDERS = np.concatenate([_FRACTIONAL, _INTEGER])


@lru_cache(maxsize=64)
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
