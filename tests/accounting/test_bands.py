"""Noise that is correlated over steps: what is left of it, what it costs, and what is chosen.

Oracles: dense matrices; a composition of Poisson subsampled Gaussians by dp-accounting's own
events; jax-privacy's account of amplified banded factorisation, which makes the same event.
"""

import math

import numpy as np
import pytest
from scipy.linalg import toeplitz

from dp_grape_hf.accounting import (
    Releases,
    compose_epsilon,
    compute_epsilon,
    correlated,
    find_bands,
    find_noise_multiplier,
    noise_left,
    release_weights,
    released_noise,
)
from dp_grape_hf.accounting.banded import best_coefficients
from dp_grape_hf.errors import PrivacyError

COEFFICIENTS = (0.8, 0.48, 0.36)


def _linear(steps):
    return 1 - np.arange(steps) / steps


def test_release_weights_are_the_sums_of_an_update_rule():
    rates, inertia = np.array([1.0, 0.5, 0.25, 2.0]), 0.9
    for step in range(4):
        running, weight = 0.0, 0.0
        for number, rate in enumerate(rates):
            running = inertia * running + (number == step)
            weight += rate * running
        assert release_weights(rates, inertia)[0, step] == pytest.approx(weight)


def test_release_weights_after_a_redraw_are_separate():
    """Momentum carries a release over the redraw; what weights get there lies elsewhere."""
    split = release_weights(np.ones(6), 0.5, period=4)
    assert split.shape == (2, 6)
    np.testing.assert_allclose(split.sum(0), release_weights(np.ones(6), 0.5)[0])
    np.testing.assert_allclose(split[1], [0.09375, 0.1875, 0.375, 0.75, 1.5, 1.0])


def test_noise_is_that_of_the_inverse_matrix():
    weights = release_weights(_linear(20), 0.9, period=7)
    column = np.pad(COEFFICIENTS, (0, 20 - len(COEFFICIENTS)))
    inverse = np.linalg.inv(np.tril(toeplitz(column)))
    noise = np.random.default_rng(0).normal(size=(20, 4))
    np.testing.assert_allclose(correlated(COEFFICIENTS, noise), inverse @ noise)
    np.testing.assert_allclose(released_noise(COEFFICIENTS, 20), np.linalg.norm(inverse, axis=1))
    left = noise_left(COEFFICIENTS, weights)
    assert left == pytest.approx(float(np.linalg.norm(weights @ inverse)))


@pytest.mark.parametrize(("bands", "inertia"), [(2, 0.0), (16, 0.9)])
def test_coefficients_have_length_one_and_no_small_change_improves_them(bands, inertia):
    weights = release_weights(_linear(60), inertia)
    best = best_coefficients(bands, weights)
    assert math.fsum(c * c for c in best) == pytest.approx(1, abs=1e-12)
    least = noise_left(best, weights)
    random = np.random.default_rng(1)
    for _ in range(50):
        other = np.array(best) + 0.02 * random.normal(size=bands)
        other /= np.linalg.norm(other)
        assert noise_left(tuple(other), weights) >= least * (1 - 1e-4)


def test_coefficients_are_those_of_another_library():
    """What jax_privacy 2.0 finds for a running sum of 200 steps, in the mean over steps."""
    theirs = (0.6480137370, 0.4924985721, 0.4358909506, 0.3840864906)
    found = best_coefficients(len(theirs), np.tril(np.ones((200, 200))))
    np.testing.assert_allclose(found, theirs, atol=1e-5)


@pytest.mark.parametrize(("bands", "steps"), [(4, 200), (8, 203)])
def test_epsilon_equals_a_bth_of_the_steps_at_b_q(bands, steps):
    budget = {"noise_multiplier": 2.0, "delta": 1e-5, "accountant": "rdp"}
    banded = compute_epsilon(sample_rate=0.02, steps=steps, bands=bands, **budget)
    releases = math.ceil(steps / bands)
    assert banded == compute_epsilon(sample_rate=0.02 * bands, steps=releases, **budget)


def test_epsilon_is_that_of_the_event_of_amplified_banded_factorisation():
    """Within 0.1 %, as dp-accounting composes the event itself.

    jax-privacy's ``amplified_bandmf_event`` is this one.
    """
    sigma, rate, bands, steps = 2.36, 256 / 2644, 10, 100
    dp_event = pytest.importorskip("dp_accounting.dp_event")
    pld = pytest.importorskip("dp_accounting.pld.pld_privacy_accountant")
    event = dp_event.SelfComposedDpEvent(
        dp_event.PoissonSampledDpEvent(bands * rate, dp_event.GaussianDpEvent(sigma)),
        math.ceil(steps / bands),
    )
    theirs = pld.PLDAccountant().compose(event).get_epsilon(1e-5)
    ours = compute_epsilon(
        noise_multiplier=sigma, sample_rate=rate, steps=steps, bands=bands, delta=1e-5
    )
    assert theirs * (1 - 1e-3) <= ours <= theirs * (1 + 1e-3)


def test_epsilon_is_not_below_that_of_its_own_composition():
    """The hockey-stick divergence of a mixture, one release an example, by quadrature."""
    sigma, rate, bands = 1.3, 0.05, 10
    epsilon = compute_epsilon(
        noise_multiplier=sigma, sample_rate=rate, steps=10, bands=bands, delta=1e-5
    )
    x = np.linspace(-30, 30, 2_000_001)
    plain = np.exp(-(x**2) / (2 * sigma**2))
    moved = np.exp(-((x - 1) ** 2) / (2 * sigma**2))
    mixed = (1 - bands * rate) * plain + bands * rate * moved
    scale = (x[1] - x[0]) / (sigma * math.sqrt(2 * math.pi))

    def delta(epsilon):
        both = [(mixed, plain), (plain, mixed)]
        return max(np.clip(p - math.exp(epsilon) * r, 0, None).sum() * scale for p, r in both)

    assert delta(epsilon) <= 1e-5
    assert delta(epsilon * (1 - 1e-3)) >= 1e-5


def test_bands_compose_with_what_was_released_before():
    both = [Releases(2.0, 0.02, 200, bands=8), Releases(2.0, 0.16, 25)]
    merged = [Releases(2.0, 0.16, 50)]
    assert compose_epsilon(both, delta=1e-5) == compose_epsilon(merged, delta=1e-5)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"bands": 0}, "bands=0"),
        ({"bands": 60}, "at most 1/60"),
        ({"bands": 4, "adjacency": "replace_one"}, "cannot compute epsilon for both"),
    ],
)
def test_what_has_no_analysis_is_refused(changed, words):
    with pytest.raises(PrivacyError, match=words):
        Releases(1.0, 0.02, 100, **changed).block()


@pytest.mark.parametrize(
    ("size", "batch", "steps", "epsilon", "most"),
    [
        (1024, 64, 200, 1.0, 1.0),
        pytest.param(2644, 256, 100, 8.0, 0.69, marks=pytest.mark.slow),
        pytest.param(50_000, 1024, 2000, 6.0, 0.77, marks=pytest.mark.slow),
    ],
)
def test_bands_gain_what_they_can(size, batch, steps, epsilon, most):
    rates = _linear(steps)
    weights = release_weights(rates, 0.9)
    budget = {"target_epsilon": epsilon, "target_delta": 1e-5, "sample_rate": batch / size}
    found = find_bands(**budget, steps=steps, schedule=rates, inertia=0.9)
    assert found.left <= most
    bands = len(found.coefficients)
    assert bands * batch <= size
    spent = compute_epsilon(
        noise_multiplier=found.noise_multiplier,
        sample_rate=batch / size,
        steps=steps,
        bands=bands,
        delta=1e-5,
    )
    assert spent <= epsilon
    alone = find_noise_multiplier(**budget, steps=steps)
    left = found.noise_multiplier * noise_left(found.coefficients, weights)
    assert found.left == pytest.approx(left / (alone * noise_left((1.0,), weights)), rel=1e-9)


def test_where_nothing_is_gained_noise_is_independent():
    """With q = 1 each example is in all draws, and no group could have turns."""
    budget = {"target_epsilon": 2.0, "target_delta": 1e-5, "sample_rate": 1.0, "steps": 20}
    found = find_bands(**budget, schedule=_linear(20), inertia=0.9)
    assert found.coefficients == (1.0,)
    assert found.left == 1.0
    assert found.noise_multiplier == find_noise_multiplier(**budget)
