r"""Truncated Poisson sampling: what a hard cap on the logical batch costs.

The mechanism draws each example with probability q. If more than ``max_batch_size`` = B examples
are drawn, a uniformly random subset of exactly B of them is kept. The noise is scaled as ever.

Guarantee:
    A release of it is dominated by a Poisson subsampled Gaussian whose sensitivity is 2C instead
    of C with probability ``doubling_probability`` = P[Binomial(N, q) >= B], independently in
    every step. `accounting` composes exactly this mixture, so ε is an upper bound for every B,
    every noise multiplier and every accountant; there is no term that is merely assumed small.

Why. Let D' hold the N examples of D and one more, x, and let A of the examples of D be drawn. The
law of A is the same under D and D', so a bound may reveal whether A >= B, and condition on it:

* A < B: the cap binds neither D nor D'. The sums differ by the clipped gradient of x, at most C,
  if x is drawn, with probability q: the Poisson subsampled Gaussian.
* A >= B: the cap binds both, and D keeps a uniform B-subset S. Under D', x is kept with
  probability q B / (A + 1) < q, and with it a uniform (B - 1)-subset, which is S less a uniform
  element s of S; otherwise a uniform B-subset, as under D. Given S and s the sums differ by
  g(x) - g(s), at most 2C, with probability below q: a Poisson subsampled Gaussian again, of half
  the noise multiplier. S does not depend on A, and joint convexity of the hockey-stick
  divergence removes the conditions on S and s.

The pair of a step does not depend on what earlier steps released, so the steps compose
adaptively, as those of plain Poisson sampling do. Fewer examples make A >= B rarer: the bound for
N holds between N and N + 1 examples, and between any two adjacent data sets below. Hence any upper
bound on the size will do for N, and only a cap above N is no cap at all.

Bounds that charge the binding cap to δ outright are wider: T (1 + e^ε) P[Binomial(N, q) > B] for
T steps by coupling each run with an uncapped one, as Chua et al. (2024), "Scalable DP-SGD:
shuffling vs. Poisson subsampling", and T q P[Binomial(N, q) >= B] by the argument above. For a
mean of 64 out of 1024, B = 96 and T = 1000 even the latter is 0.004: no use.

The mixture is the analysis of Ganesh (2025), "Tighter privacy analysis for truncated Poisson
sampling" (arXiv:2508.15089), which dp_accounting has as ``TruncatedSubsampledGaussianDpEvent``.
It bounds the second case by a replace-one pair of half the noise, whose means lie up to 4C apart,
at the mean of q B / (A + 1); we by the pair above, at q. The two agree where the cap binds
rarely, and neither is always the smaller.

Percent that a cap adds to the noise multiplier at δ = 1e-5, by the PRV accountant (0: below
1e-3), for caps of 1.25, 1.5 and 2 times the mean, and what `smallest_batch_cap` says:

=====  ====  =====  ===  =====  ====  ====  ====  ===============
    N  mean  steps    ε  sigma  1.25   1.5     2  free of charge
=====  ====  =====  ===  =====  ====  ====  ====  ===============
 1024    64   1000    2   4.07   4.5  0.01     0   1.9 x the mean
 1024    64   1000    6   1.70   8.3  0.03     0              1.9
 2560    64   1000    6   0.92    30   1.3     0              1.9
50000    64   5000    6   0.48    64    22     0              1.8
 1000     8   2000    6   0.66    75    62    37              3.9
50000   256   5000    6   0.65   7.7     0     0              1.4
50000  1024   2000    2   2.00     0     0     0              1.2
=====  ====  =====  ===  =====  ====  ====  ====  ===============

A release of half the noise, however rare, is dear where sigma is below one, and a draw of 1.5
times a small mean is not that rare. From a mean of 256 on, 1.5 times was free in all we tried.
"""

import scipy  # whose stats and signal are imported when they are used: they take a second

from dp_grape_hf.errors import PrivacyError


def doubling_probability(sample_rate: float, num_samples: int, max_batch_size: int) -> float:
    """Returns an upper bound on the probability that a release has sensitivity 2C, not C.

    Args:
        sample_rate: q, in (0, 1].
        num_samples: N, the number of examples, or any upper bound on it.
        max_batch_size: B, the most examples that one logical batch keeps.

    Returns:
        P[Binomial(N, q) >= B]; exactly zero for B > N, which is plain Poisson sampling.

    Raises:
        PrivacyError: The cap lies below the mean batch size q N, where most draws would lose
            examples.

    >>> f"{doubling_probability(64 / 1024, 1024, 96):.1e}"
    '6.6e-05'
    """
    mean = sample_rate * num_samples
    # A mean that was itself computed as a quotient may exceed the whole number it stands for.
    if max_batch_size < mean * (1 - 1e-9):
        raise PrivacyError(
            f"{max_batch_size=} is below the mean batch size sample_rate * num_samples = {mean:g}, "
            f"so most draws would lose examples; choose about 1.5 times the mean, {1.5 * mean:.0f},"
            " or ask smallest_batch_cap for a cap that costs nothing."
        )
    return float(scipy.stats.binom.sf(max_batch_size - 1, num_samples, sample_rate))
