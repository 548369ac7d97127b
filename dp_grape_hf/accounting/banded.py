"""Noise that is correlated over steps: how many bands, with which coefficients, and what it gains.

Independent noise releases ``g_t + z_t``. Banded noise releases ``g_t + (C^-1 z)_t``, where C is a
lower triangular Toeplitz matrix of b bands, c_0 ... c_(b-1): later noise takes back a part of
earlier noise, and less of it is left in what the steps add up to (Choquette-Choo et al. 2023,
arXiv 2306.08153).

Guarantee:
    To see ``g_t + (C^-1 z)_t`` is to see ``C g + z``. An example that contributes to step t alone
    moves C g by its gradient times column t of C, of length 1 or less, in the rows t ... t + b - 1.
    If it takes part at most once in any b steps, its columns have no row in common. So T steps are
    ceil(T / b) releases of the Gaussian mechanism with the same noise multiplier, and where each
    example has one step in b at which it is drawn, with probability b q, these are Poisson
    subsampled at that rate. The draws are q N examples on average, as without bands.

    The coefficients are functions of public numbers, and epsilon is the same for all of them.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import scipy  # whose stats and signal are imported when they are used: they take a second
from numpy.typing import ArrayLike, NDArray

from dp_grape_hf.accounting.accountants import DEFAULT, ROUGH
from dp_grape_hf.accounting.calibration import find_noise_multiplier
from dp_grape_hf.accounting.releases import Releases
from dp_grape_hf.errors import PrivacyError

_Numbers = NDArray[np.float64]
_MOST = 512
_LONG = 4 * _MOST  # steps; in longer runs the best coefficients are nearly the same
_LOOKS = 12  # at the weights on the way
_NEAR = 0.02  # a gain that fewer bands are preferred to, or none
_RATIO = 1.2  # between numbers of bands that are tried
_EACH = 8  # up to here every one is
_PATIENCE = 3  # so many in a row without a gain


class Bands(NamedTuple):
    """Correlated noise that keeps a budget; one band is independent noise."""

    coefficients: tuple[float, ...]  # c_0 ... c_(b-1), of length 1
    noise_multiplier: float
    left: float  # in the weights at the end, over what independent noise of that epsilon leaves


def what_arrives(schedule: ArrayLike, inertia: float = 0.0, period: int | None = None) -> _Numbers:
    """Returns what the weights have at the end of each release: (periods, T).

    A release is added to a running sum, ``u = inertia * u + release``, and the weights move by the
    rate times u. Where the projection is made anew, what weights get before and after lies in other
    directions, and does not cancel.

    Args:
        schedule: what the rate is multiplied by at each step, (T,).
        inertia: 0 for SGD; the factor of momentum, or of Adam's first moment.
        period: after how many steps the projection is made anew; never, if None.

    >>> what_arrives([1.0, 1.0, 0.5], inertia=0.5).tolist()
    [[1.625, 1.25, 0.5]]
    """
    rates = np.asarray(schedule, dtype=np.float64)
    of_period = np.arange(len(rates)) // (period or max(1, len(rates)))
    split = (of_period == np.arange(of_period[-1] + 1)[:, None]) * rates
    return _transposed_inverse(np.array([1.0, -inertia]), split)


def noise_left(coefficients: Sequence[float], arrives: _Numbers) -> float:
    """Returns the root mean square of what noise of variance 1 adds to the weights by the end.

    Args:
        coefficients: of the bands.
        arrives: as of ``what_arrives``.

    >>> noise_left([1.0], np.ones((1, 4)))
    2.0
    """
    left = _transposed_inverse(np.asarray(coefficients), arrives)
    return float(np.sqrt(np.square(left).sum()))


def released_noise(coefficients: Sequence[float], steps: int) -> _Numbers:
    """Returns the standard deviation of the noise in each release, for z of variance 1: (steps,).

    >>> released_noise([0.8, 0.6], 2).tolist()
    [1.25, 1.5625]
    """
    impulse = np.zeros(steps)
    impulse[:1] = 1.0
    return np.sqrt(np.square(correlated(coefficients, impulse)).cumsum())


def correlated(coefficients: Sequence[float], noise: _Numbers) -> _Numbers:
    """Returns ``C^-1 z`` for noise z, (T, ...)."""
    found: _Numbers = scipy.signal.lfilter([1.0], np.asarray(coefficients), noise, axis=0)
    return found


def _transposed_inverse(coefficients: _Numbers, arrives: _Numbers) -> _Numbers:
    found: _Numbers = scipy.signal.lfilter([1.0], coefficients, arrives[:, ::-1])[:, ::-1]
    return found


def best_coefficients(bands: int, arrives: _Numbers) -> tuple[float, ...]:
    """Returns coefficients of length 1 that leave the least noise in the weights at the end.

    A local minimum, found by L-BFGS (scipy) from the coefficients of the root of a running sum,
    which are optimal for many bands without inertia (Fichtenberger et al. 2023). They are exact to
    what the search leaves, and any others would have the same epsilon.

    Args:
        bands: b, at most T.
        arrives: as of ``what_arrives``.
    """
    if bands == 1:
        return (1.0,)
    scale = np.square(arrives).sum()

    def loss(tail: _Numbers) -> tuple[float, _Numbers]:
        """Returns the logarithm of |c|^2 |C^-T a|^2, which c may be scaled in, and its gradient."""
        c = np.concatenate([[1.0], tail])
        left = _transposed_inverse(c, arrives)
        squared, length = np.square(left).sum() / scale, c @ c
        if not squared < 1e9:  # far out, where C^-1 explodes
            return 1e3 + length, 2 * tail
        back = scipy.signal.lfilter([1.0], c, left)
        slope = [np.vdot(left[:, j:], back[:, :-j]) for j in range(1, bands)]
        gradient = 2 * tail / length - 2 * np.array(slope) / (squared * scale)
        return math.log(length) + math.log(squared), gradient

    numbers = np.arange(1, bands)
    with np.errstate(over="ignore", invalid="ignore"):
        found = scipy.optimize.minimize(
            loss, np.cumprod((numbers - 0.5) / numbers), jac=True, method="L-BFGS-B"
        )
    c = np.concatenate([[1.0], found.x])
    return tuple((c / np.sqrt(c @ c)).tolist())


def find_bands(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    schedule: ArrayLike,
    inertia: float = 0.0,
    period: int | None = None,
    most: int | None = None,
    accountant: str = DEFAULT,
    earlier: Sequence[Releases] = (),
    **variant: Any,
) -> Bands:
    """Returns the noise that leaves least in the weights, within a budget.

    What counts is what the weights hold at the end, and on the way, on average: the sum of both
    squares. For the end alone, coefficients let each release have ten times the noise and more,
    which all goes again, but not before gradients were taken in its midst: Fashion-MNIST at epsilon
    2, SGD from scratch, 20 % against 77.

    Among numbers of bands that leave within 2 % of the least, the smallest: each costs a buffer of
    the size of a release, and a run that is interrupted may lose as many steps.

    The arguments are those of ``find_noise_multiplier`` and of ``what_arrives``; ``most`` is how
    many bands memory allows.

    Raises:
        PrivacyError: as ``find_noise_multiplier``.
    """

    def sigma(bands: int, by: str, guess: float = 1.0) -> float:
        return find_noise_multiplier(
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            sample_rate=sample_rate,
            steps=steps,
            accountant=by,
            earlier=earlier,
            bands=bands,
            guess=guess,
            **variant,
        )

    alone = sigma(1, accountant)
    independent = Bands((1.0,), alone, 1.0)
    end = what_arrives(schedule, inertia, period)
    short = _shortened(schedule)
    held = np.concatenate(
        [what_arrives(short, inertia, period), _on_the_way(short, inertia, period)]
    )
    try:
        tried: dict[int, tuple[float, tuple[float, ...]]] = {}
        last = sigma(1, ROUGH, alone)
        tried[1] = (last * noise_left((1.0,), held), (1.0,))
        for bands in _numbers_of_bands(steps, sample_rate, most or _MOST):
            own = best_coefficients(bands, held)
            last = sigma(bands, ROUGH, last)
            tried[bands] = last * noise_left(own, held), own
            least = min(tried, key=lambda b: tried[b][0])
            if list(tried).index(least) < len(tried) - _PATIENCE:
                break
    except PrivacyError:  # of an accountant that only ranks
        return independent
    least_error = min(error for error, _ in tried.values())
    bands = min(b for b, (error, _) in tried.items() if error <= (1 + _NEAR) * least_error)
    if bands == 1:
        return independent
    own = tried[bands][1]
    noise_multiplier = sigma(bands, accountant, last)
    gains = noise_multiplier * noise_left(own, held) < alone * noise_left((1.0,), held)
    ratio = noise_multiplier * noise_left(own, end) / (alone * noise_left((1.0,), end))
    return Bands(own, noise_multiplier, ratio) if gains else independent


def _shortened(schedule: ArrayLike) -> _Numbers:
    """Returns a schedule of the same shape and of steps enough to find coefficients by."""
    rates = np.asarray(schedule, dtype=np.float64)
    places = np.linspace(0, len(rates) - 1, min(len(rates), _LONG))
    return np.interp(places, np.arange(len(rates)), rates)


def _on_the_way(schedule: ArrayLike, inertia: float, period: int | None) -> _Numbers:
    """Returns what weights have of each release at some steps, scaled to a mean: (rows, T).

    At a random step of each of some equal parts of the run: regular ones would not see noise that
    comes and goes as regularly.
    """
    rates = np.asarray(schedule, dtype=np.float64)
    steps = len(rates)
    parts = max(2, _LOOKS // math.ceil(steps / (period or steps)))
    random = np.random.default_rng(0)
    edges = np.linspace(0, steps, parts + 1)
    looks = [int(random.uniform(low, high)) for low, high in pairwise(edges)]
    rows = [what_arrives(rates * (np.arange(steps) <= at), inertia, period) for at in looks]
    return np.concatenate(rows) / math.sqrt(parts)


def _numbers_of_bands(steps: int, sample_rate: float, most: int) -> Iterator[int]:
    """Yields numbers above 1, each the least that makes its number of releases of T steps."""
    most, last = min(most, steps, math.floor(1 / sample_rate * (1 + 1e-9))), 1
    all_of_them = [b for b in range(2, most + 1) if b == math.ceil(steps / math.ceil(steps / b))]
    for bands in all_of_them:
        if bands >= _RATIO * last or last < _EACH or bands == all_of_them[-1]:
            yield bands
            last = bands
