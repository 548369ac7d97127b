"""What it costs to publish the best of a random number of private runs.

Papernot and Steinke (2022), "Hyperparameter tuning with Renyi differential privacy": if K is drawn
secretly from a `TrialsDistribution`, K runs are made independently of each other, and nothing
leaves but the best of them (its hyper-parameters included), then choosing costs little more than
one run, however large K turns out.

Guarantee:
    The bounds hold if
    * K is drawn once, as `draw` does, and neither published nor drawn again;
    * all runs are worth the same: equal noise, sampling rate and number of steps. What else
      differs between them (learning rate, clipping norm, rank) is drawn at random, or fixed before,
      and never chosen after looking at another run;
    * the score that decides is a function of a run's weights, its ledger and public data.
"""

import math
import secrets
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq

from dp_grape_hf.errors import Choice, PrivacyError, require

Moments = npt.NDArray[np.float64]


class TrialsDistribution(Choice):
    """Of K: the truncated negative binomial with eta = 1 or 0 (definition 1), or Poisson's."""

    GEOMETRIC = "geometric"
    LOGARITHMIC = "logarithmic"
    POISSON = "poisson"


_ETA: dict[str, float] = {TrialsDistribution.GEOMETRIC: 1.0, TrialsDistribution.LOGARITHMIC: 0.0}
_MOST = 1e6


@dataclass(frozen=True)
class Trials:
    """How many runs the published one is the best of: ``mean`` on average over K.

    Geometric and logarithmic numbers are at least 1. Poisson's may be 0; then there is nothing to
    publish, or something that does not depend on the data.

    Raises:
        PrivacyError: there is no such distribution, or it has no such mean.
    """

    mean: float
    distribution: str = TrialsDistribution.GEOMETRIC

    def __post_init__(self) -> None:
        require(
            self.distribution in TrialsDistribution,
            f"trials_distribution={self.distribution!r} is unknown; choose one of "
            f"{', '.join(TrialsDistribution)}.",
        )
        least = 0.0 if self.distribution == TrialsDistribution.POISSON else 1.0
        if not (least <= self.mean <= _MOST and self.mean > 0):
            raise PrivacyError(
                f"num_trials={self.mean!r} is no mean of a {self.distribution} number of trials: "
                + ("it must be positive" if least == 0 else "it must be at least 1")
                + f" and at most {_MOST:g}."
            )

    @property
    def gamma(self) -> float:
        """The parameter of a truncated negative binomial with this mean, in (0, 1]."""
        require(self.distribution in _ETA, f"{self.distribution} has no gamma.")
        if self.mean == 1:
            return 1.0
        if self.distribution == TrialsDistribution.GEOMETRIC:
            return 1 / self.mean

        def excess(x: float) -> float:  # the mean is (e^x - 1) / x, where x = log(1 / gamma)
            return math.expm1(x) / x - max(self.mean, 1 + 1e-9)

        x: float = brentq(excess, 1e-12, 2 * math.log(self.mean) + 2, xtol=1e-14)
        return math.exp(-x * (1 + 1e-9))  # rounded down, where the bound is larger

    def log_moments(self, log_moments: Moments, orders: Moments) -> Moments:
        """Returns log moments of the best of K runs, from those of one run.

        Args:
            log_moments: (a - 1) times an upper bound on the Renyi divergence of order a between the
                outputs of one run on neighbouring data, either way round, for each a in ``orders``.
            orders: above 1.

        Returns:
            The same of the published run: theorem 2 for truncated negative binomials, theorem 6 for
            Poisson. To theorem 6 the outcome that there was no run is added, which is as likely
            with one data set as with the other; it is what keeps the bound above 0 for small means.
        """
        if self.distribution == TrialsDistribution.POISSON:
            # Order a asks for the delta of one run at epsilon = log(1 + 1 / (a - 1)).
            deltas = _delta(np.log1p(1 / (orders - 1)), log_moments, orders)
            any_run = log_moments + (orders - 1) * self.mean * deltas + math.log(self.mean)
            return np.asarray(np.logaddexp(-self.mean, any_run))
        gamma, eta = self.gamma, _ETA[self.distribution]
        # (1 - 1/b) times the divergence of order b is the log moment over b; at b = 1 it is 0.
        best = min(-math.log(gamma), _least((log_moments - math.log(gamma)) / orders))
        return log_moments + (orders - 1) * (1 + eta) * best + math.log(self.mean)

    def draw(self) -> int:
        """Returns a secret K, from the operating system's entropy.

        The bounds are about the first number drawn. Whoever draws until one suits has none.
        """
        generator = np.random.default_rng(secrets.randbits(256))
        if self.distribution == TrialsDistribution.POISSON:
            return int(generator.poisson(self.mean))
        if self.mean == 1:
            return 1
        if self.distribution == TrialsDistribution.GEOMETRIC:
            return int(generator.geometric(self.gamma))
        return int(generator.logseries(1 - self.gamma))

    def __str__(self) -> str:
        return f"the best of a {self.distribution} number of trials, {self.mean:g} on average"


def _delta(epsilon: Moments, log_moments: Moments, orders: Moments) -> Moments:
    """Returns the least delta for each epsilon (Balle et al., 2020, theorem 21), at most 1."""
    logs = (
        log_moments + (orders - 1) * (np.log1p(-1 / orders) - epsilon[:, None]) - np.log(orders)
    )  # (an epsilon, an order)
    logs = np.where(np.isnan(logs), 0.0, logs)
    return np.asarray(np.exp(np.minimum(logs.min(axis=1), 0.0)))


def _least(values: Moments) -> float:
    return float(np.where(np.isnan(values), np.inf, values).min())
