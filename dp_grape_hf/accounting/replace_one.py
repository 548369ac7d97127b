r"""Replace-one adjacency: the worst pair of output distributions under Poisson sampling.

Two data sets of the same size are neighbours if they differ in one example, x in one and y in the
other. If this example is sampled, the sums differ by u - v, where u and v are the clipped gradients
of x and y. Their norms are at most C each, so they are up to 2C apart.

Guarantee:
    A step is dominated by the pair

        P = (1 - q) N(0, sigma^2) + q N(1, sigma^2),
        Q = (1 - q) N(0, sigma^2) + q N(-1, sigma^2)

    in units of C. `accounting` composes exactly this pair, so ε is an upper bound. It is tight: two
    gradients of opposite directions attain the pair. For q = 1 it is the Gaussian mechanism of
    sensitivity 2C. The proof is in the README of this subpackage.

dp_accounting composes the same pair (``NeighborRel.REPLACE_ONE``).
"""

import math

import numpy as np
import numpy.typing as npt


@np.errstate(over="ignore", divide="ignore")
def output_of_loss(
    t: npt.NDArray[np.float64], sigma: npt.NDArray[np.float64], q: float
) -> npt.NDArray[np.float64]:
    """Return the output z at which the privacy loss log P(z) / Q(z) of the pair is t.

    The loss increases with z, and z(-t) = -z(t). With y = e^(z / sigma^2), z solves the quadratic
    equation 1 - q + q c y = e^t (1 - q + q c / y), where c = e^(-1 / (2 sigma^2)).

    Args:
        t: Privacy losses.
        sigma: Noise multiplier, which broadcasts with ``t``.
        q: Sampling rate, in (0, 1].

    >>> float(output_of_loss(np.array(3.0), np.array(2.0), 1.0))  # a Gaussian: 2 z / sigma^2 = 3
    6.0
    """
    if q == 1:
        return np.asarray(sigma**2 * t / 2)
    # y = e^(t / 2 + asinh(s)), s = (1 - q) / q / c sinh(t / 2), which may overflow.
    size = np.abs(t) / 2
    log_s = math.log((1 - q) / q) + 0.5 / sigma**2 + size
    log_s = log_s + np.log(-np.expm1(-2 * size) / 2)
    asinh = np.where(log_s > 20, log_s + math.log(2), np.arcsinh(np.exp(log_s)))
    return np.asarray(sigma**2 * np.sign(t) * (size + asinh))
