"""Banded matrix factorization (BandMF): noise that is correlated over steps.

Independent noise releases ``g_t + z_t``. Banded noise releases ``g_t + (C^-1 z)_t``, where C is a
lower triangular Toeplitz matrix with b bands, c_0 ... c_(b-1). The noise of later steps cancels a
part of the noise of earlier steps, so less noise is left in the sum over steps. Source:
Choquette-Choo et al. 2023, arXiv 2306.08153.

Guarantee:
    ``g_t + (C^-1 z)_t`` for all t and ``C g + z`` contain the same information. An example that
    contributes to step t changes C g by its gradient times column t of C. This column has a norm
    of at most 1, and is zero outside of the rows t ... t + b - 1. If the example contributes at
    most once in any b steps, its columns have no row in common. So T steps count as ceil(T / b)
    releases of the Gaussian mechanism with the same noise multiplier. If each example can be
    sampled in one step of every b steps, with probability b q, these releases are
    Poisson-subsampled at rate b q. A batch has q N examples on average, as without bands.

    The coefficients depend on public numbers only. Epsilon is the same for all coefficients.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import scipy  # scipy.signal and scipy.optimize are imported at their first use, to save a second
from numpy.typing import ArrayLike, NDArray

from dp_grape_hf.accounting.accountants import DEFAULT, ROUGH
from dp_grape_hf.accounting.calibration import find_noise_multiplier
from dp_grape_hf.errors import PrivacyError

_Numbers = NDArray[np.float64]
_MOST = 512  # bands
_LONG = 4 * _MOST  # steps of a shortened schedule; the coefficients hardly depend on more
_NUM_CHECKPOINTS = 12  # intermediate weights at which the error is evaluated
_NEAR = 0.02  # relative gain for which more bands are not worth their memory
_RATIO = 1.2  # between successive numbers of bands in the search
_EACH = 8  # up to this number of bands, each number is tried
_PATIENCE = 3  # the search stops after this many numbers without a gain


class Bands(NamedTuple):
    """Correlated noise that keeps a budget. One band is independent noise."""

    coefficients: tuple[float, ...]  # c_0 ... c_(b-1), with an L2 norm of 1
    noise_multiplier: float
    left: float  # noise in the final weights, relative to independent noise of the same epsilon


def release_weights(
    schedule: ArrayLike, inertia: float = 0.0, period: int | None = None
) -> _Numbers:
    """Return the factor by which each release enters the final weights: (periods, T).

    The optimizer is modelled as ``u = inertia * u + release``, followed by an update of the weights
    by the learning rate times u. Updates before and after a redraw of the projection have different
    directions and do not cancel, so each projection period has a separate row.

    Args:
        schedule: the factor of the learning rate at each step, (T,).
        inertia: 0 for SGD; the factor of momentum, or of Adam's first moment.
        period: number of steps between two redraws of the projection; None for no redraws.

    >>> release_weights([1.0, 1.0, 0.5], inertia=0.5).tolist()
    [[1.625, 1.25, 0.5]]
    """
    rates = np.asarray(schedule, dtype=np.float64)
    of_period = np.arange(len(rates)) // (period or max(1, len(rates)))
    split = (of_period == np.arange(of_period[-1] + 1)[:, None]) * rates
    return _transposed_inverse(np.array([1.0, -inertia]), split)


def noise_left(coefficients: Sequence[float], weights: _Numbers) -> float:
    """Return the standard deviation of the noise in the final weights, for z of variance 1.

    Args:
        coefficients: c_0 ... c_(b-1).
        weights: the result of ``release_weights``.

    >>> noise_left([1.0], np.ones((1, 4)))
    2.0
    """
    left = _transposed_inverse(np.asarray(coefficients), weights)
    return float(np.sqrt(np.square(left).sum()))


def released_noise(coefficients: Sequence[float], steps: int) -> _Numbers:
    """Return the standard deviation of the noise in each release, for z of variance 1: (steps,).

    >>> released_noise([0.8, 0.6], 2).tolist()
    [1.25, 1.5625]
    """
    impulse = np.zeros(steps)
    impulse[:1] = 1.0
    return np.sqrt(np.square(correlated(coefficients, impulse)).cumsum())


def correlated(coefficients: Sequence[float], noise: _Numbers) -> _Numbers:
    """Return ``C^-1 z`` for noise z, (T, ...)."""
    result: _Numbers = scipy.signal.lfilter([1.0], np.asarray(coefficients), noise, axis=0)
    return result


def _transposed_inverse(coefficients: _Numbers, weights: _Numbers) -> _Numbers:
    result: _Numbers = scipy.signal.lfilter([1.0], coefficients, weights[:, ::-1])[:, ::-1]
    return result


def best_coefficients(bands: int, weights: _Numbers) -> tuple[float, ...]:
    """Return coefficients with an L2 norm of 1 that minimise the noise in the final weights.

    This is a local minimum, found by L-BFGS (scipy). The search starts at the coefficients of the
    square root of a running sum, which are optimal for many bands without inertia (Fichtenberger et
    al. 2023). Epsilon does not depend on the coefficients.

    Args:
        bands: b, at most T.
        weights: the result of ``release_weights``.
    """
    if bands == 1:
        return (1.0,)
    scale = np.square(weights).sum()

    def loss(tail: _Numbers) -> tuple[float, _Numbers]:
        """Return log(|c|^2 |C^-T a|^2), which the scale of c does not change, and its gradient."""
        c = np.concatenate([[1.0], tail])
        left = _transposed_inverse(c, weights)
        squared, length = np.square(left).sum() / scale, c @ c
        if not squared < 1e9:  # C^-1 diverges for these coefficients
            return 1e3 + length, 2 * tail
        back = scipy.signal.lfilter([1.0], c, left)
        slope = [np.vdot(left[:, j:], back[:, :-j]) for j in range(1, bands)]
        gradient = 2 * tail / length - 2 * np.array(slope) / (squared * scale)
        return math.log(length) + math.log(squared), gradient

    numbers = np.arange(1, bands)
    with np.errstate(over="ignore", invalid="ignore"):
        minimum = scipy.optimize.minimize(
            loss, np.cumprod((numbers - 0.5) / numbers), jac=True, method="L-BFGS-B"
        )
    c = np.concatenate([[1.0], minimum.x])
    return tuple((c / np.sqrt(c @ c)).tolist())


def find_bands(
    *,
    sample_rate: float,
    steps: int,
    schedule: ArrayLike,
    inertia: float = 0.0,
    period: int | None = None,
    most: int | None = None,
    accountant: str = DEFAULT,
    **budget: Any,
) -> Bands:
    """Return the noise within a budget that leaves the least noise in the weights.

    The criterion is the squared noise in the final weights plus the mean squared noise in the
    weights of intermediate steps, at which gradients are computed. The result has the smallest
    number of bands whose noise is within 2 % of the least. Each band takes memory of the size of a
    release, and an interrupted run may lose one step per band.

    ``find_noise_multiplier`` and ``release_weights`` document the other arguments.

    Args:
        most: the largest number of bands; None for 512.
        **budget: ``target_epsilon``, ``target_delta`` and other arguments of
            ``find_noise_multiplier``.

    Raises:
        PrivacyError: as ``find_noise_multiplier``.
    """
    budget |= {"sample_rate": sample_rate, "steps": steps}

    def sigma(bands: int, by: str, guess: float | None = None) -> float:
        return find_noise_multiplier(**budget, accountant=by, bands=bands, guess=guess)

    alone = sigma(1, accountant)
    independent = Bands((1.0,), alone, 1.0)
    end = release_weights(schedule, inertia, period)
    short = _shortened(schedule)
    held = np.concatenate(
        [release_weights(short, inertia, period), _at_checkpoints(short, inertia, period)]
    )
    try:
        tried: dict[int, tuple[float, float, tuple[float, ...]]] = {}
        last = rough_alone = sigma(1, ROUGH, alone)
        tried[1] = last * noise_left((1.0,), held), last, (1.0,)
        for bands in _numbers_of_bands(steps, sample_rate, most or _MOST):
            coefficients = best_coefficients(bands, held)
            last = sigma(bands, ROUGH, last)
            tried[bands] = last * noise_left(coefficients, held), last, coefficients
            least = min(tried, key=lambda b: tried[b][0])
            if list(tried).index(least) < len(tried) - _PATIENCE:
                break
    except PrivacyError:  # RDP, which only ranks the candidates, finds no noise for the budget
        return independent
    least_error = min(error for error, *_ in tried.values())
    bands = min(b for b, (error, *_) in tried.items() if error <= (1 + _NEAR) * least_error)
    if bands == 1:
        return independent
    _, rough, coefficients = tried[bands]
    noise_multiplier = sigma(bands, accountant, rough * alone / rough_alone)
    gains = noise_multiplier * noise_left(coefficients, held) < alone * noise_left((1.0,), held)
    ratio = noise_multiplier * noise_left(coefficients, end) / (alone * noise_left((1.0,), end))
    return Bands(coefficients, noise_multiplier, ratio) if gains else independent


def _shortened(schedule: ArrayLike) -> _Numbers:
    """Return a schedule of the same form with at most ``_LONG`` steps."""
    rates = np.asarray(schedule, dtype=np.float64)
    places = np.linspace(0, len(rates) - 1, min(len(rates), _LONG))
    return np.interp(places, np.arange(len(rates)), rates)


def _at_checkpoints(schedule: ArrayLike, inertia: float, period: int | None) -> _Numbers:
    """Return the factors of each release in the weights of some steps, scaled to a mean: (rows, T).

    The run is split into equal parts, and a random step of each part is used. Equidistant steps
    would miss noise with the same period.
    """
    rates = np.asarray(schedule, dtype=np.float64)
    steps = len(rates)
    parts = max(2, _NUM_CHECKPOINTS // math.ceil(steps / (period or steps)))
    random = np.random.default_rng(0)
    edges = np.linspace(0, steps, parts + 1)
    chosen = [int(random.uniform(low, high)) for low, high in pairwise(edges)]
    rows = [release_weights(rates * (np.arange(steps) <= at), inertia, period) for at in chosen]
    return np.concatenate(rows) / math.sqrt(parts)


def _numbers_of_bands(steps: int, sample_rate: float, most: int) -> Iterator[int]:
    """Yield numbers of bands b > 1; each is the smallest b with its ceil(T / b) releases."""
    most, last = min(most, steps, math.floor(1 / sample_rate * (1 + 1e-9))), 1
    all_of_them = [b for b in range(2, most + 1) if b == math.ceil(steps / math.ceil(steps / b))]
    for bands in all_of_them:
        if bands >= _RATIO * last or last < _EACH or bands == all_of_them[-1]:
            yield bands
            last = bands
