"""Replace-one neighbours: no pair of contributions is worse than the one that is composed.

The oracles integrate the outputs of the subsampled mechanism on a grid, in two dimensions and over
two steps, for contributions of all angles and lengths; and Rényi's integral by quadrature.
"""

import math
from itertools import product

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from dp_grape_hf.accounting import Adjacency, Releases, compose_epsilon, compute_epsilon
from dp_grape_hf.accounting.rdp import ORDERS, log_moments_of_replacement
from dp_grape_hf.arguments import PrivacyPlan
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.ledger import Ledger
from tests.support.trainers import make_args

REPLACE_ONE = Adjacency.REPLACE_ONE
VALID = {
    "noise_multiplier": 2.0,
    "sample_rate": 0.1,
    "steps": 10,
    "delta": 1e-5,
    "accountant": "pld",
    "adjacency": REPLACE_ONE,
}


def densities(z, shift, sigma, q):
    """The density of (1 - q) N(0) + q N(shift) on the square of ``z``."""
    still, moved = (
        np.multiply.outer(*(norm.pdf(z, loc=x, scale=sigma) for x in at))
        for at in ((0.0, 0.0), shift)
    )
    return np.asarray((1 - q) * still + q * moved)


@pytest.mark.parametrize(("sigma", "q"), [(0.5, 0.1), (0.7, 1.0)])
def test_no_pair_of_contributions_is_worse_than_opposite_ones(sigma, q):
    generator = np.random.default_rng(0)
    z, cell = np.linspace(-1 - 9 * sigma, 1 + 9 * sigma, 301, retstep=True)
    ends = []
    for _ in range(24):
        angles, lengths = generator.uniform(0, 2 * math.pi, 2), generator.uniform(0, 1, 2) ** 0.3
        lengths = np.where(generator.random(2) < 0.4, 1.0, lengths)
        ends.append(
            [(r * math.cos(a), r * math.sin(a)) for a, r in zip(angles, lengths, strict=True)]
        )
    worst = [densities(z, end, sigma, q) for end in ((1.0, 0.0), (-1.0, 0.0))]
    for epsilon in (-2.0, -0.1, 0.0, 0.2, 1.0, 3.0):
        order = math.exp(epsilon)
        bound = np.maximum(worst[0] - order * worst[1], 0).sum() * cell**2
        for u, v in ends:
            p, r = densities(z, u, sigma, q), densities(z, v, sigma, q)
            assert np.maximum(p - order * r, 0).sum() * cell**2 <= bound * (1 + 5e-3) + 1e-6


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_epsilon_bounds_the_exact_divergence(steps, accountant):
    sigma, q = 2.0, 0.2
    z, cell = np.linspace(-1 - 9 * sigma, 1 + 9 * sigma, 801, retstep=True)

    def outputs(contributions):
        one, *others = (
            (1 - q) * norm.pdf(z, scale=sigma) + q * norm.pdf(z, loc=each, scale=sigma)
            for each in contributions
        )
        return np.multiply.outer(one, others[0]) if others else np.asarray(one)

    for delta in (1e-2, 1e-4):
        question = {"noise_multiplier": sigma, "sample_rate": q, "steps": steps, "delta": delta}
        epsilon = compute_epsilon(**VALID | question | {"accountant": accountant})
        for u, v in product(product((1.0, 0.6, -1.0), repeat=steps), repeat=2):
            excess = np.maximum(outputs(u) - math.exp(epsilon) * outputs(v), 0)
            assert excess.sum() * cell**steps <= delta * (1 + 1e-3)
        if accountant == "pld":  # and no smaller bound would do
            least = math.exp(epsilon - 0.03)
            excess = np.maximum(outputs((1.0,) * steps) - least * outputs((-1.0,) * steps), 0)
            assert excess.sum() * cell**steps > delta


@pytest.mark.parametrize(("sigma", "q"), [(0.5, 0.1), (8.0, 0.99)])
def test_moments_are_those_of_renyi_s_integral(sigma, q):
    def log_density(z, end):
        still, moved = norm.logpdf(z, 0, sigma), norm.logpdf(z, end, sigma)
        return float(np.logaddexp(math.log1p(-q) + still, math.log(q) + moved))

    moments = log_moments_of_replacement(sigma, q)
    for i in (0, 20, 59, 62, 75):
        order = float(ORDERS[i])
        moment, _ = quad(
            lambda z, a=order: math.exp(a * log_density(z, 1) + (1 - a) * log_density(z, -1)),
            -1 - 12 * sigma,
            2 * order + 12 * sigma,
            points=[0, 1, order, 2 * order - 1],
            limit=500,
            epsabs=0,
            epsrel=1e-11,
        )
        assert math.exp(moments[i]) == pytest.approx(moment, rel=1e-8)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_full_batches_have_twice_the_sensitivity(accountant):
    question = {"accountant": accountant, "sample_rate": 1.0, "noise_multiplier": 20.0}
    halved = {"noise_multiplier": 10.0, "adjacency": "add_or_remove_one"}
    assert compute_epsilon(**VALID | question) == pytest.approx(
        compute_epsilon(**VALID | question | halved), abs=1e-5
    )


def test_releases_about_different_neighbours_do_not_compose():
    with pytest.raises(PrivacyError, match="have different neighbours"):
        compose_epsilon(
            [Releases(2.0, 0.1, 5), Releases(2.0, 0.1, 5, adjacency=REPLACE_ONE)], delta=1e-5
        )


def test_a_run_says_which_neighbours_its_epsilon_is_about(tmp_path):
    args = make_args(
        tmp_path,
        adjacency=REPLACE_ONE,
        noise_multiplier=None,
        target_epsilon=2.0,
        max_steps=9,
        target_delta=1e-5,
    )
    plan = PrivacyPlan(args, 1000)
    ledger = Ledger.start(plan.mechanism)
    assert ledger.private
    ledger.record(9)
    spent = plan.spent(ledger)
    assert (spent.mechanism.adjacency, ledger.mechanism.adjacency) == (REPLACE_ONE, REPLACE_ONE)
    assert ledger.epsilon() == spent.epsilon <= args.target_epsilon
    nominal = compose_epsilon(
        [Releases(plan.mechanism.noise_multiplier, plan.mechanism.sample_rate, 9)], delta=1e-5
    )
    assert nominal < 0.9 * spent.epsilon
