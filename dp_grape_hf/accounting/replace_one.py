r"""Replacing one example: the worst pair of outputs under Poisson sampling, in closed form.

Two data sets of the same size are neighbours if they differ in one example, x in the one and y in
the other. Their sums differ by u or v if it is drawn, the clipped gradients of x and y: of norm
at most C each, and up to 2C apart.

Guarantee:
    A step is dominated by the pair

        P = (1 - q) N(0, sigma^2) + q N(1, sigma^2),
        Q = (1 - q) N(0, sigma^2) + q N(-1, sigma^2)

    in units of C. `accounting` composes exactly it, so ε is an upper bound, and a tight one: the
    pair is attained by gradients that point in opposite directions. For q = 1 it is the Gaussian
    mechanism of sensitivity 2C.

Why. Given the contributions of the others, which are drawn by the same coins, the outputs are
P = (1 - q) N(0) + q N(u) and Q = (1 - q) N(0) + q N(v). For alpha >= 1 let

    F(u, v) = sup_A P(A) - alpha Q(A)
            = ∫ [q φ(z - u) - (1 - q)(alpha - 1) φ(z) - alpha q φ(z - v)]_+ dz,

φ being the density of N(0, sigma^2 I). The integrand is positive on

    A = {z : a e^{-<z, u> / sigma^2} + b e^{<z, v - u> / sigma^2} < q},   a, b >= 0,

where a and b do not depend on z. Both exponentials fall along any w with <w, u> >= 0 and
<w, v - u> <= 0, so z in A implies z + w in A. Hence the integral I(w) of <z - m, w> φ(z - m) over
A is not negative, whatever m is: along w the variable is centred and A holds all beyond some
point. The derivatives of F are integrals over A alone:

* Turn v away from u, at fixed lengths: F changes by alpha q / sigma^2 times I(w) at m = v, w being
  normal to v, in the plane of u and v and on the side of u (with one coordinate only, add a second
  that holds nothing but noise). <w, u> >= 0 and <w, v - u> = -<w, u> <= 0: F does not fall. So let
  u = s e and v = -t e for a unit vector e, s and t in [0, 1].
* Lengthen v: alpha q / sigma^2 times I(e) at m = v. Lengthen u: q / sigma^2 times I(e) at m = u.
  Both are not negative, since <e, u> = s >= 0 and <e, v - u> = -(s + t) <= 0. So s = t = 1.

For alpha < 1, sup_A P(A) - alpha Q(A) = 1 - alpha + alpha sup_A (Q(A) - P(A) / alpha), the case of
1 / alpha with the two exchanged, and the worst pair is its own mirror image. So it dominates at
every alpha, for every u and v, every choice of the others and every past, and domination survives
adaptive composition (Zhu et al. 2022, theorem 10).

dp_accounting composes the same pair (``NeighborRel.REPLACE_ONE``).

The noise multiplier it takes, and times that of add-or-remove-one, at δ = 1e-5 by the PRV
accountant:

=====  ====  =====  ===  =====  =====
    N  mean  steps    ε  sigma  times
=====  ====  =====  ===  =====  =====
 1024    64   1000    2   7.92   1.95
 1024    64   1000    6   3.02   1.78
 2560    64   1000    6   1.24   1.35
50000  1024   2000    2   3.67   1.84
 1000     8   2000    6   0.72   1.10
50000   256   5000    6   0.72   1.11
=====  ====  =====  ===  =====  =====
"""

import math

import numpy as np
import numpy.typing as npt


@np.errstate(over="ignore", divide="ignore")
def output_of_loss(
    t: npt.NDArray[np.float64], sigma: npt.NDArray[np.float64], q: float
) -> npt.NDArray[np.float64]:
    """Returns the output z at which the privacy loss log P(z) / Q(z) of the pair is t.

    The loss grows with z, and z(-t) = -z(t). With y = e^(z / sigma^2) it is the quadratic equation
    1 - q + q c y = e^t (1 - q + q c / y), where c = e^(-1 / (2 sigma^2)).

    Args:
        t: Privacy losses.
        sigma: Noise multiplier, of a shape that broadcasts with ``t``.
        q: Sample rate, in (0, 1].

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
