"""Clipping by estimated norms (Bu et al. 2021, DP-SGD-JL): what the chance in the estimate costs.

The mechanism draws k directions v_1 ... v_k with independent standard normal entries over all
trainable coordinates jointly, and estimates the norm of the gradient g of a sample by

    M = sqrt(1/k sum_j <g, v_j>^2), which is distributed as |g| sqrt(chi2_k / k).

The sample contributes min(1, C / M) g, and the noise is scaled to C as ever.

Guarantee:
    A step is dominated by a Poisson subsampled Gaussian whose sensitivity is rho C, where
    rho = sqrt(k / chi2_k) is drawn anew, and revealed, in every step. `accounting` composes this
    mixture, with the law of rho moved to a grid, upwards in what it costs; a rho above the grid may
    reveal everything, and its probability is charged to δ. So ε is an upper bound for every k and
    every accountant.

    It needs directions that are independent of the data, of the weights and of all earlier
    releases: fresh in every step, and from a seed that nobody could know when the data was fixed,
    since data made orthogonal to known directions would never be clipped. And it needs the same
    directions for the whole step, in all physical batches and on all ranks.

Why. Let D' hold one example x more than D, and let the weights be given, which is to say all
earlier releases. Show the directions V to the adversary, which can only help it. Given V, every
other sample contributes the same under D and D' if it is drawn: its factor is a function of V and
of its own gradient. (Here one V per step matters: x may move other samples to another physical
batch or rank.) If x is drawn, with probability q, the sum differs by a vector of norm

    |g| min(1, C / M) <= C |g| / M = C rho(V),

so given V the two are a Poisson subsampled Gaussian of noise multiplier at least sigma / rho(V),
whose divergence grows with rho. The law of V is the same under D and D', so the hockey-stick
divergence of (V, output) is the mean over V of those given V; and whatever direction g has, rho(V)
has the one law of sqrt(k / chi2_k), since V is isotropic. Hence one pair, rho and a subsampled
Gaussian given rho, dominates the step for every x, every V, every data set and every past, in both
directions, and domination survives adaptive composition (Zhu et al. 2022, theorem 10).

The other forms of the factor only lower the contribution: automatic clipping, C / (M + gamma); a
cut at 1; zero where M is no finite number. A zero gradient contributes zero. A replaced example
would need two values of rho that are not independent, and is refused.

The grid. The divergence of the pair, at any order, is q times that of N(rho, sigma^2) from
N(0, sigma^2) at another order e^L, or does not depend on rho. With s = rho / sigma the latter has
the derivative phi(s / 2 - L / s) in s (Black and Scholes know it as vega), hence in -s^-p one
proportional to s^(p + 1) phi(s / 2 - L / s), whose logarithm grows in log s at the rate

    p + 1 - s^2 / 4 + L^2 / s^2,  not below 0 for s <= 2 sqrt(p + 1).

So the divergence is convex in -rho^-p between points a and b of the grid, if p is at least
(b / 2 sigma)^2 - 1; and to replace a rho between them by a or b, at random and with the mean of
-rho^-p kept, can only raise it. (For large p this is to round up.) A rho below the grid is rounded
up; one above may reveal everything. Let t be the probability that in some step rho exceeds the grid
and x is drawn. Without that event a step is one of the others or, with x not drawn, no release of x
at all; so δ(ε) <= t + (1 - t) δ'(ε), δ' being that of the others.

No k is too small for a bound; but moments of 1 / chi2_k exist up to order k / 2 only, and what is
charged to delta then takes much noise.

Percent that estimates add to the noise multiplier at δ = 1e-5, by the PRV accountant, the
grid included:

=====  ====  =====  ===  =====  =======  ======  =====  =====  =====
    N  mean  steps    ε  sigma  k = 256     128     64     32     16
=====  ====  =====  ===  =====  =======  ======  =====  =====  =====
 1024    64   1000    2   4.07     0.48    0.91    1.8    3.6    7.6
50000  1024   2000    2   2.00     0.54    1.02    2.0    4.1    9.3
 1024    64   1000    6   1.70     0.58    1.08    2.1    4.4   10.0
 2560    64   1000    6   0.92     0.95    1.81    3.7    8.4   27.6
 1000     8   2000    6   0.66     1.54    2.95    6.2   15.0   48.8
=====  ====  =====  ===  =====  =======  ======  =====  =====  =====

Where the noise is small, a rare estimate that is far too low costs most of it.
"""

import math
from functools import lru_cache
from itertools import pairwise

import numpy as np
import scipy  # whose stats and signal are imported when they are used: they take a second
from scipy.special import gammaln

Sensitivities = tuple[tuple[float, float], ...]
"""(probability, sensitivity in units of the clipping norm), by growing sensitivity."""

_BULK, _TAIL = 0.05, 0.25  # how much larger the next point of the grid is, where rho is rare
_LEFT, _RIGHT = 1e-3, 1e-30  # probabilities of a rho below the grid and above it


@lru_cache
def sensitivities(norm_directions: int, noise_multiplier: float) -> Sensitivities:
    """Returns a law on a grid that costs at least what rho = sqrt(k / chi2_k) costs.

    Args:
        norm_directions: k, at least 1.
        noise_multiplier: sigma.

    Returns:
        (probability, rho) by growing rho, the last of which is infinite. The probabilities sum
        to 1.

    >>> law = sensitivities(64, 1.0)
    >>> round(sum(p for p, _ in law), 12), round(sum(p for p, rho in law if rho > 1.5), 5)
    (1.0, 2e-05)
    """
    k = norm_directions
    lowest, highest = (math.sqrt(k / scipy.stats.chi2.ppf(p, k)) for p in (1 - _LEFT, _RIGHT))
    grid = [lowest]
    while grid[-1] < highest:
        grid.append(grid[-1] * (1 + min(_TAIL, _BULK * max(1.0, grid[-1]))))
    above = scipy.stats.chi2.cdf(k / np.square(grid), k)  # P[rho > point], falling
    law = [1.0 - float(above[0])] + [0.0] * (len(grid) - 1)
    for i, (a, b) in enumerate(pairwise(grid)):
        mass = float(above[i] - above[i + 1])
        upper = mass * _share_of_larger(a, b, k, noise_multiplier)
        law[i] += mass - upper
        law[i + 1] += upper
    return *zip(law, grid, strict=True), (float(above[-1]), math.inf)


def _share_of_larger(a: float, b: float, k: int, sigma: float) -> float:
    """Returns with which probability a rho in (a, b] counts as b; else it counts as a."""
    least = b / (2 * sigma) if sigma > 0 else math.inf
    power = max(1.0, least * least - 1)
    if power > 50:
        return 1.0
    mass, moment = (
        scipy.stats.chi2.cdf(k / a**2, n) - scipy.stats.chi2.cdf(k / b**2, n)
        for n in (k, k + power)
    )
    if not min(mass, moment) > 1e-300:
        return 1.0
    # The mean of (rho / a)^-power, which is the power of a chi-squared variable.
    log_mean = gammaln((k + power) / 2) - gammaln(k / 2) + power / 2 * math.log(2 / k)
    mean = math.exp(log_mean + power * math.log(a)) * moment / mass
    # A little more, for the rounding of both; more is always allowed.
    return min(1.0, float((1 - mean) / (1 - (a / b) ** power)) + 1e-9)
