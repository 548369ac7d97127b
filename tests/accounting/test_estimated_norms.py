"""Clipping by estimated norms: ε bounds the exact divergence of the mechanism.

The oracles integrate over the law of the estimate itself: the divergence of one step, the steps of
a small data set whose samples are all clipped by the same directions, and simulated runs.
"""

import math
from itertools import pairwise, product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import chi2, norm

from dp_grape_hf.accounting import (
    ACCOUNTANTS,
    AccountantFailure,
    EpsilonCurve,
    Releases,
    compose_epsilon,
    compute_epsilon,
)
from dp_grape_hf.accounting.accountants import Block
from dp_grape_hf.accounting.estimated_norms import sensitivities
from dp_grape_hf.errors import PrivacyError

VALID: dict[str, Any] = {
    "noise_multiplier": 2.0,
    "sample_rate": 0.1,
    "steps": 10,
    "delta": 1e-5,
    "accountant": "rdp",
    "norm_directions": 16,
}


def law_of_estimates(k: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Values of chi2_k / k and their probabilities, fine enough to integrate over."""
    edges = k * np.geomspace(chi2.ppf(1e-16, k) / k, chi2.isf(1e-16, k) / k, 4001)
    return np.sqrt(edges[1:] * edges[:-1]) / k, np.diff(chi2.cdf(edges, k))


def divergence(
    order: float, rho: npt.NDArray[np.float64], sigma: float, q: float, removed: bool
) -> npt.NDArray[np.float64]:
    """The hockey-stick divergence of a subsampled Gaussian of sensitivity rho, in closed form."""
    if not removed:
        return 1 - order + order * divergence(1 / order, rho, sigma, q, removed=True)
    odds = (order - 1 + q) / q
    if odds <= 0:
        return np.full_like(rho, 1 - order)
    reach, far = rho / sigma / 2, math.log(odds) / rho * sigma
    return np.asarray(q * (norm.cdf(reach - far) - odds * norm.cdf(-reach - far)))


# ---- The law on a grid ----


@pytest.mark.parametrize(("k", "sigma"), [(1, 0.5), (16, 2.0), (64, 0.05), (1000, 50.0)])
def test_the_grid_costs_more_than_the_estimate_at_every_order(k: int, sigma: float) -> None:
    law = sensitivities(k, sigma)
    probabilities, sizes = (np.array(each) for each in zip(*law, strict=True))
    assert probabilities.min() >= 0
    assert probabilities.sum() == pytest.approx(1, abs=1e-12)
    assert all(a < b for a, b in pairwise(sizes))
    assert law[-1][1] == math.inf
    assert law[-1][0] <= 1e-30
    estimates, weights = law_of_estimates(k)
    for q, epsilon, removed in product((0.01, 1.0), (-1.0, 0.0, 0.1, 1.0, 5.0), (True, False)):
        order = math.exp(epsilon)
        exact = weights @ divergence(order, 1 / np.sqrt(estimates), sigma, q, removed)
        bound = probabilities[:-1] @ divergence(order, sizes[:-1], sigma, q, removed)
        assert exact <= bound * (1 + 1e-6) + 1e-12


@pytest.mark.parametrize("k", [16, 256])
def test_the_grid_loses_less_than_a_percent_of_the_noise(k: int) -> None:
    probabilities, sizes = (
        np.array(each)[:-1] for each in zip(*sensitivities(k, 2.0), strict=True)
    )
    estimates, weights = law_of_estimates(k)
    for epsilon in (0.0, 0.5, 1.5):
        order = math.exp(epsilon)
        nearer = weights @ divergence(order, 1.01 / np.sqrt(estimates), 2.0, 0.1, True)
        assert probabilities @ divergence(order, sizes, 2.0, 0.1, True) <= nearer


# ---- The mechanism itself ----


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_one_step_is_as_private_as_promised(accountant: str) -> None:
    """A data set in one dimension: all samples are clipped by estimates from one draw."""
    k, sigma, q = 8, 2.0, 0.3
    estimates, weights = law_of_estimates(k)
    estimates, weights = estimates[::20], weights.reshape(-1, 20).sum(1)
    z, cell = np.linspace(-40 * sigma, 40 * sigma, 4001, retstep=True)

    def contribution(gradient: float) -> npt.NDArray[np.float64]:
        return gradient * np.minimum(1.0, 1 / (abs(gradient) * np.sqrt(estimates)))

    def density(gradients: tuple[float, ...]) -> npt.NDArray[np.float64]:
        total = np.zeros((len(estimates), len(z)))
        for coins in product((0, 1), repeat=len(gradients)):
            mean = sum(coin * contribution(g) for coin, g in zip(coins, gradients, strict=True))
            chance = math.prod(q if coin else 1 - q for coin in coins)
            total += chance * norm.pdf(z, loc=np.reshape(mean, (-1, 1)), scale=sigma)
        return total

    less, more = density((0.4, -7.0)), density((0.4, -7.0, 1e6))
    for delta in (1e-2, 1e-4):
        question = {"noise_multiplier": sigma, "sample_rate": q, "steps": 1, "delta": delta}
        question |= {"accountant": accountant, "norm_directions": k}
        order = math.exp(compute_epsilon(**VALID | question))
        for p, r in ((more, less), (less, more)):
            assert weights @ np.maximum(p - order * r, 0).sum(1) * cell <= delta * (1 + 1e-2)


def test_simulated_runs_lose_no_more_than_promised() -> None:
    """False alarm once in ten thousand: four standard deviations of the estimate."""
    generator, n, steps, sigma, q, delta = np.random.default_rng(1), 200_000, 8, 2.0, 0.2, 1e-2
    k = 8
    loss = np.zeros(n)
    for _ in range(steps):
        rho = np.sqrt(k / generator.chisquare(k, n))
        z = sigma * generator.standard_normal(n) + rho * (generator.random(n) < q)
        loss += np.log1p(q * np.expm1((rho * z - rho**2 / 2) / sigma**2))
    question = {"noise_multiplier": sigma, "sample_rate": q, "steps": steps, "delta": delta}
    question |= {"accountant": "prv", "norm_directions": k}
    epsilon = compute_epsilon(**VALID | question)
    excess = np.maximum(-np.expm1(epsilon - loss), 0)
    assert excess.mean() <= delta + 4 * excess.std() / math.sqrt(n)
    lower = np.maximum(-np.expm1(0.93 * epsilon - loss), 0)  # and the bound is not far off
    assert lower.mean() - 4 * lower.std() / math.sqrt(n) > delta


# ---- The accountants ----


@pytest.mark.slow
def test_the_accountants_agree() -> None:
    tight, prv, rdp = (
        compute_epsilon(**VALID | {"accountant": name, "steps": 100})
        for name in ("pld", "prv", "rdp")
    )
    assert tight - 1e-3 <= prv <= tight + 0.0125
    assert tight <= rdp <= 1.6 * tight


def test_more_directions_cost_less_and_very_many_nothing() -> None:
    epsilons = [compute_epsilon(**VALID | {"norm_directions": k}) for k in (12, 16, 64, 256, 10**6)]
    plain = compute_epsilon(**VALID | {"norm_directions": None})
    assert epsilons == sorted(epsilons, reverse=True)
    assert plain < epsilons[-1] < 1.01 * plain


@pytest.mark.slow
@pytest.mark.parametrize(("k", "sigma"), [(1, 1.0), (2, 1e-200), (16, 1e200)])
def test_rdp_never_fails(k: int, sigma: float) -> None:
    question = {"noise_multiplier": sigma, "norm_directions": k, "steps": 1000}
    assert compute_epsilon(**VALID | question) >= 0


def test_few_directions_and_little_noise_fall_back_to_rdp() -> None:
    curve = EpsilonCurve(Releases(0.3, 0.1, 10, norm_directions=4), 1e-5, "prv")
    assert curve.epsilon(10) == compute_epsilon(
        **VALID | {"noise_multiplier": 0.3, "norm_directions": 4}
    )
    assert curve.accountant == "rdp"


def test_what_is_left_out_is_counted() -> None:
    block = Block(2.0, 0.25, ((0.5, 1.0), (0.25, 2.0), (0.125, 3.0), (0.125, math.inf)))
    left, rare = block.up_to(2.0)
    assert rare == 0.25 * 0.25
    # Of the steps that are left, a share of 1 / (1 - 1/16) times 1/4 has sensitivity 2.
    assert left.sensitivities == (pytest.approx((11 / 15, 1.0)), pytest.approx((4 / 15, 2.0)))
    assert block.up_to(math.inf) == (block, 0.0)
    assert block.up_to(0.0) == (Block(2.0, 0.25), (1 - 0.5) * 0.25)


def test_a_likely_disclosure_has_no_bound() -> None:
    """Charged to δ it must be, or answered with infinity: never dropped."""
    disclosed = Block(2.0, 1.0, ((1 - 1e-4, 1.0), (1e-4, math.inf)))
    assert ACCOUNTANTS["rdp"]([disclosed], [1], 1e-5).epsilon([1]) == math.inf
    assert ACCOUNTANTS["rdp"]([disclosed], [1], 1e-3).epsilon([1]) < math.inf
    for name in ("prv", "pld"):
        with pytest.raises(AccountantFailure, match="unbounded sensitivities are likelier"):
            ACCOUNTANTS[name]([disclosed], [1], 1e-5)


@pytest.mark.slow
def test_exact_and_estimated_norms_compose() -> None:
    estimated = compose_epsilon([Releases(2.0, 0.1, 10, norm_directions=16)], delta=1e-5)
    mixed = compose_epsilon(
        [Releases(2.0, 0.1, 5), Releases(2.0, 0.1, 5, norm_directions=16)], delta=1e-5
    )
    assert compose_epsilon([Releases(2.0, 0.1, 10)], delta=1e-5) < mixed < estimated


# ---- Refusals ----


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"norm_directions": 0}, "norm_directions=0 must be a whole number, at least 1"),
        ({"norm_directions": 1.5}, r"norm_directions=1\.5"),
        ({"norm_directions": True}, "norm_directions=True"),
        ({"adjacency": "replace_one"}, "adjacency='replace_one' have no joint analysis"),
    ],
    ids=str,
)
def test_what_has_no_analysis_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(PrivacyError, match=message):
        compute_epsilon(**VALID | wrong)
