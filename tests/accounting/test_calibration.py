"""Accounting: every ε is an upper bound, every noise multiplier the smallest that meets its budget.

The oracles are the privacy loss distributions of dp-accounting, the closed form of the Gaussian
mechanism (Balle and Wang, 2018) and direct quadrature; each knows nothing of the code under test.
"""

import logging
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import norm

from dp_grape_hf.accounting import (
    ACCOUNTANTS,
    LEAST,
    AccountantFailure,
    EpsilonCurve,
    Releases,
    accountants,
    compose_epsilon,
    compute_epsilon,
    expected_steps_per_epoch,
    find_noise_multiplier,
)
from dp_grape_hf.accounting.accountants import PLD, PRV, Block
from dp_grape_hf.errors import PrivacyError
from tests.support.marks import slow_but

# (num_samples, batch size, steps, epsilon): the tight noise multiplier at delta = 1e-5.
TIGHT = {
    (1024, 64, 1000, 2.0): 4.0503,
    (2646, 64, 1000, 6.0): 0.8997,
    (1000, 8, 2000, 6.0): 0.6583,
}

# (noise_multiplier, sample_rate, steps, delta), from one step to many, rare to full batches.
MECHANISMS = [
    (0.8, 0.01, 500, 1e-6),
    (0.5, 1e-3, 1, 1e-5),
    (0.6, 1e-6, 1000, 1e-8),
    (20.0, 1.0, 100, 1e-5),
]

VALID: dict[str, Any] = {
    "noise_multiplier": 1.0,
    "sample_rate": 0.1,
    "steps": 10,
    "delta": 1e-5,
    "accountant": "rdp",
}
VALID_TARGET: dict[str, Any] = {
    "target_epsilon": 2.0,
    "target_delta": 1e-5,
    "sample_rate": 0.1,
    "steps": 10,
    "accountant": "rdp",
}


@lru_cache
def epsilon_of(sigma: float, q: float, steps: int, delta: float, accountant: str) -> float:
    return compute_epsilon(
        noise_multiplier=sigma, sample_rate=q, steps=steps, delta=delta, accountant=accountant
    )


@lru_cache
def tight_epsilon(
    sigma: float, q: float, steps: int, delta: float, pessimistic: bool = True
) -> float:
    """ε by privacy loss distributions on a grid so fine that rounding hardly shows."""
    rough = epsilon_of(sigma, q, steps, delta, "pld")
    losses = from_gaussian_mechanism(
        sigma,
        pessimistic_estimate=pessimistic,
        value_discretization_interval=max(1e-6, min(1e-4, rough / math.sqrt(steps) / 300)),
        sampling_prob=q,
    )
    return float(losses.self_compose(steps).get_epsilon_for_delta(delta))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """ε of the Gaussian mechanism with sensitivity / noise std = mu (Balle and Wang, 2018)."""

    def excess(epsilon: float) -> float:
        below = norm.cdf(mu / 2 - epsilon / mu)
        return float(below - np.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu)) - delta)

    return float(brentq(excess, 0, 500))


# ---- Calibration ----


@pytest.mark.slow
@pytest.mark.parametrize("case", TIGHT, ids=str)
def test_calibration_is_within_a_percent_above_the_tight_noise(
    case: tuple[int, int, int, float],
) -> None:
    num_samples, batch, steps, epsilon = case
    for accountant in (LEAST, "prv"):
        found = find_noise_multiplier(
            target_epsilon=epsilon,
            target_delta=1e-5,
            sample_rate=batch / num_samples,
            steps=steps,
            accountant=accountant,
        )
        assert TIGHT[case] * 0.9999 <= found <= 1.003 * TIGHT[case]


@pytest.mark.parametrize(
    "changes",
    [
        *({"accountant": name, "sample_rate": 0.025, "steps": 1000} for name in ACCOUNTANTS),
        {"adjacency": "replace_one"},
    ],
    ids=str,
)
def test_calibration_inverts_accounting(changes: dict[str, Any]) -> None:
    found = find_noise_multiplier(**VALID_TARGET | changes)
    assert compute_epsilon(**VALID | changes | {"noise_multiplier": found}) <= 2.0
    assert compute_epsilon(**VALID | changes | {"noise_multiplier": 0.99 * found}) > 2.0


def test_a_budget_finer_than_the_accountant_is_refused() -> None:
    with pytest.raises(PrivacyError, match=r"target_epsilon=0\.003 .*accountant='rdp'.*larger"):
        find_noise_multiplier(**VALID_TARGET | {"target_epsilon": 0.003})
    assert find_noise_multiplier(**VALID_TARGET | {"target_epsilon": 0.003, "accountant": LEAST})


def test_no_steps_cannot_be_calibrated() -> None:
    with pytest.raises(PrivacyError, match="steps=0 releases nothing"):
        find_noise_multiplier(**VALID_TARGET | {"steps": 0})


# ---- Upper bounds ----


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_rdp_is_an_upper_bound_and_close_after_many_steps(
    mechanism: tuple[float, float, int, float],
) -> None:
    tight = epsilon_of(*mechanism, "pld")
    loose = epsilon_of(*mechanism, "rdp")
    _, _, steps, _ = mechanism
    assert tight - 5e-4 <= loose
    if steps >= 100 and tight > 0.1:
        assert loose <= 1.25 * tight


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize(("sigma", "steps"), [(20.0, 100), (1.0, 1)])
def test_full_batches_bound_the_closed_form_of_the_gaussian(
    accountant: str, sigma: float, steps: int
) -> None:
    exact = gaussian_epsilon(math.sqrt(steps) / sigma, 1e-5)
    bound = epsilon_of(sigma, 1.0, steps, 1e-5, accountant)
    assert exact - 1e-6 <= bound <= exact * (1.1 if accountant == "rdp" else 1) + 0.0125


@pytest.mark.parametrize(("sigma", "q"), [(0.66, 0.008), (0.06, 0.1), (100.0, 0.5), (1.0, 1.0)])
def test_renyi_moments_match_direct_quadrature(sigma: float, q: float) -> None:
    orders = accountants.ORDERS
    moments = accountants.log_moments(sigma, q)
    for index in (0, 20, 45, 59, 62, 80):
        order = orders[index]

        def integrand(z: float, order: float = order, shift: float = moments[index]) -> float:
            weight = math.log1p(-q) if q < 1 else -math.inf
            ratio = np.logaddexp(weight, math.log(q) + (2 * z - 1) / (2 * sigma**2))
            return float(np.exp(norm.logpdf(z, scale=sigma) + order * ratio - shift))

        peaks = [0.0, 1.0, float(order)]
        area, _ = quad(
            integrand, -12 * sigma, order + 12 * sigma, points=peaks, limit=500, epsabs=1e-12
        )
        assert area == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(("sigma", "q"), [(1.0, 0.01), (0.051, 0.1), (0.01, 0.1), (1e3, 1e-9)])
def test_renyi_moments_are_convex_in_the_order(sigma: float, q: float) -> None:
    by_order = np.argsort(accountants.ORDERS, kind="stable")
    orders = accountants.ORDERS[by_order]
    moments = accountants.log_moments(sigma, q)[by_order]
    distinct = np.diff(orders, prepend=0) > 1e-9
    slopes = np.diff(moments[distinct]) / np.diff(orders[distinct])
    assert (np.diff(slopes) >= -1e-9 * np.abs(slopes[1:]) - 1e-12).all()


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_epsilon_falls_with_noise_and_grows_with_steps_and_sample_rate(accountant: str) -> None:
    def epsilons(**varied: Sequence[float]) -> list[float]:
        ((name, values),) = varied.items()
        base = VALID | {"accountant": accountant}
        return [compute_epsilon(**base | {name: value}) for value in values]

    falling = epsilons(noise_multiplier=[1.0, 2.0, 8.0])
    assert falling == sorted(falling, reverse=True)
    for growing in (
        epsilons(steps=[0, 1, 5, 100]),
        epsilons(sample_rate=[1e-9, 0.01, 0.5, 1.0]),
    ):
        assert growing == sorted(growing)
        assert growing[0] < growing[-1]


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_no_steps_cost_nothing_and_no_noise_costs_everything(accountant: str) -> None:
    base = VALID | {"accountant": accountant}
    assert compute_epsilon(**base | {"steps": 0}) == 0.0
    assert compute_epsilon(**base | {"steps": 0, "noise_multiplier": 0.0}) == 0.0
    assert compute_epsilon(**base | {"noise_multiplier": 0.0}) == math.inf


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_epsilon_is_never_negative(accountant: str) -> None:
    assert epsilon_of(50.0, 0.01, 1, 0.3, accountant) == 0.0


# ---- The least ----

# (noise_multiplier, sample_rate, steps, delta) with a tight epsilon from 0.05 to 10.
TO_BE_TIGHT = [
    *((4.0, 1 / 16, 1000, 1e-5), (30.0, 0.01, 5000, 1e-5), (20.0, 1.0, 1, 1e-5)),
    *((0.5, 1e-3, 1, 1e-5), (100.0, 0.01, 100_000, 1e-5), (0.4, 1e-3, 300, 1e-8)),
]


@pytest.mark.parametrize("accountant", [LEAST, "prv"])
@pytest.mark.parametrize("mechanism", slow_but({str(m) for m in TO_BE_TIGHT[:2]}, TO_BE_TIGHT))
def test_epsilon_is_within_half_a_percent_above_the_tight_one(
    mechanism: tuple[float, float, int, float], accountant: str
) -> None:
    tight = tight_epsilon(*mechanism)
    assert 0.05 < tight < 10
    below = tight_epsilon(*mechanism, pessimistic=False)
    assert below <= epsilon_of(*mechanism, accountant) <= 1.005 * tight


def test_a_small_epsilon_is_not_drowned_in_an_error_of_prv() -> None:
    # PRV said 0.0130 and 0.2236 while it added 0.01 to every answer.
    for mechanism, limit in (((40.0, 0.05, 1, 1e-5), 0.0027), ((10.0, 0.05, 165, 1e-5), 0.2142)):
        for accountant in (LEAST, "prv"):
            assert epsilon_of(*mechanism, accountant) < limit


@pytest.mark.parametrize("mechanism", [MECHANISMS[0], MECHANISMS[3]], ids=str)
def test_the_least_of_all_is_returned_and_its_owner_named(
    mechanism: tuple[float, float, int, float], caplog: pytest.LogCaptureFixture
) -> None:
    sigma, q, steps, delta = mechanism
    alone = {name: epsilon_of(*mechanism, name) for name in ACCOUNTANTS}
    curve = EpsilonCurve(Releases(sigma, q, steps), delta)
    assert curve.epsilon(steps) == min(alone.values()) == alone[curve.accountant]
    assert caplog.messages == []


@pytest.mark.parametrize("best", ACCOUNTANTS)
def test_whichever_has_the_least_answers_for_all_steps(
    best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is built again only when it is outgrown, for twice the steps, and remembers answers."""
    asked: list[tuple[str, int]] = []
    built: list[tuple[str, int]] = []
    for name, accountant in ACCOUNTANTS.items():

        def build(_: object, __: object, most: Sequence[int], ___: float, name: str = name) -> None:
            built.append((name, *most))

        def epsilon(_: object, counts: Sequence[int], name: str = name) -> float:
            asked.append((name, *counts))
            return counts[0] * (1.0 if name == best else 2.0)

        monkeypatch.setattr(accountant, "__init__", build)
        monkeypatch.setattr(accountant, "epsilon", epsilon)
    curve = EpsilonCurve(Releases(1.0, 0.1, 10), 1e-5)
    assert built == []
    assert [curve.epsilon(steps) for steps in (1, 5, 10, 5, 12, 20)] == [1, 5, 10, 5, 12, 20]
    assert curve.accountant == best
    assert sorted(built[:3]) == sorted((name, 10) for name in ACCOUNTANTS)
    assert built[3:] == [(best, 20)]
    assert sorted(asked[:3]) == sorted((name, 10) for name in ACCOUNTANTS)
    assert asked[3:] == [(best, 1), (best, 5), (best, 20), (best, 12)]


def test_without_the_extra_the_least_is_found_among_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accountants, "find_spec", lambda _: None)
    curve = EpsilonCurve(Releases(4.0, 1 / 16, 100), 1e-5)
    assert curve.epsilon(100) == min(epsilon_of(4.0, 1 / 16, 100, 1e-5, a) for a in ("prv", "rdp"))
    assert curve.accountant == "prv"


@pytest.mark.slow
@pytest.mark.parametrize("accountant", [LEAST, "prv", "pld"])
def test_epsilon_grows_with_every_step(accountant: str) -> None:
    sigma, q, steps = 1.0, 1e-3, 3000
    curve = EpsilonCurve(Releases(sigma, q, steps), 1e-5, accountant)
    shown = [curve.epsilon(n) for n in (1, 2, 3, *range(steps // 6, steps + 1, steps // 6))]
    assert shown == sorted(shown)
    for n in (steps // 6, steps // 2):  # and is close to tight on the way
        assert curve.epsilon(n) <= 1.005 * tight_epsilon(sigma, q, n, 1e-5) + 2e-4


@pytest.mark.slow
@pytest.mark.parametrize("delta", [1e-7, 1e-10, 1e-14])
def test_rounding_does_not_take_a_small_delta_for_more_than_it_is(delta: float) -> None:
    """By its convolutions alone, PLD was 5 % below the truth at 50,000 steps."""
    sigma, steps = 300.0, 50_000
    exact = gaussian_epsilon(math.sqrt(steps) / sigma, delta)
    for accountant in (PRV, PLD):
        try:
            answer = accountant([Block(sigma, 1.0)], [steps], delta).epsilon([steps])
        except AccountantFailure:
            assert delta < 1e-8
        else:
            assert exact <= answer <= 1.005 * exact


# ---- Composition and curves ----


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_equal_blocks_compose_to_one_run(accountant: str) -> None:
    split = compose_epsilon(
        [
            Releases(4.0, 1 / 16, 600),
            Releases(2.0, 0.5, 0),
            Releases(4.0, 1 / 16, 400),
            Releases(0.0, 0.1, 0),
        ],
        delta=1e-5,
        accountant=accountant,
    )
    assert split == epsilon_of(4.0, 1 / 16, 1000, 1e-5, accountant)


@pytest.mark.slow
@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_unequal_blocks_compose_as_the_oracle_says_in_any_order(accountant: str) -> None:
    releases = [
        Releases(4.0, 1 / 16, 500),
        Releases(30.0, 1.0, 5),
        Releases(2.0, 0.01, 100),
        Releases(1.0, 1e-5, 7),
    ]
    bound = compose_epsilon(releases, delta=1e-5, accountant=accountant)
    assert bound == pytest.approx(
        compose_epsilon(releases[::-1], delta=1e-5, accountant=accountant), abs=1e-6
    )
    tight = compose_epsilon(releases, delta=1e-5, accountant="pld")
    assert tight - 5e-4 <= bound <= tight * (1.15 if accountant == "rdp" else 1) + 0.0125
    assert bound > epsilon_of(4.0, 1 / 16, 500, 1e-5, accountant)


def test_one_noiseless_block_costs_everything_and_no_blocks_nothing() -> None:
    assert compose_epsilon([Releases(1.0, 0.1, 10), Releases(0.0, 0.1, 1)], delta=1e-5) == math.inf
    assert compose_epsilon([], delta=1e-5) == 0.0


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_a_curve_agrees_with_single_answers_before_and_after_it_is_outgrown(
    accountant: str,
) -> None:
    curve = EpsilonCurve(Releases(2.0, 0.05, 40), 1e-5, accountant=accountant)
    for steps in (0, 1, 39, 40, 41, 200, 7):
        single = epsilon_of(2.0, 0.05, steps, 1e-5, accountant)
        assert curve.epsilon(steps) == pytest.approx(single, abs=2e-3)
    assert curve.accountant == accountant


# ---- Fallbacks ----


@pytest.mark.parametrize(
    ("sigma", "delta", "reason"),
    [(0.05, 1e-5, "noise_multiplier=0.05 is below"), (4.0, 1e-17, "delta=1.0e-17 is lost")],
)
def test_too_little_noise_or_delta_falls_back_at_once_and_says_so(
    sigma: float, delta: float, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert 4 < epsilon_of.__wrapped__(sigma, 1 / 16, 1000, delta, "prv") < math.inf
    (message,) = caplog.messages
    assert f"cannot be bounded here by prv ({reason}" in message
    assert "using rdp instead" in message


@pytest.mark.parametrize(
    ("error", "installed"),
    [(RuntimeError("Discrete mean differs"), True), (MemoryError(), False)],
)
def test_a_failing_prv_is_replaced_with_a_notice(
    error: Exception,
    installed: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("prv_accountant.composers.Heterogeneous", fail)
    if not installed:
        monkeypatch.setattr(accountants, "find_spec", lambda _: None)
    replacement = "pld" if installed else "rdp"
    curve = EpsilonCurve(Releases(2.0, 0.05, 40), 1e-5, "prv")
    assert [curve.epsilon(steps) for steps in (10, 40)] == [
        EpsilonCurve(Releases(2.0, 0.05, 40), 1e-5, replacement).epsilon(steps)
        for steps in (10, 40)
    ]
    assert curve.accountant == replacement
    (record,) = caplog.records  # one notice for the whole curve
    assert record.levelno == logging.WARNING
    message = record.getMessage()
    assert "prv" in message
    assert type(error).__name__ in message
    assert f"using {replacement} instead" in message


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_answer_that_is_not_finite_is_replaced(
    value: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ACCOUNTANTS["prv"], "epsilon", lambda *_: value)
    assert 0 < compute_epsilon(**VALID | {"accountant": "prv"}) < math.inf
    assert str(value) in caplog.text


@pytest.mark.parametrize("variant", [{}, {"adjacency": "replace_one"}], ids=str)
@pytest.mark.parametrize("sigma", [1e-200, 0.05, 1e200])
@pytest.mark.parametrize("q", [1e-300, 1 - 1e-12, 1.0])
def test_rdp_never_fails(sigma: float, q: float, variant: dict[str, Any]) -> None:
    question = {"noise_multiplier": sigma, "sample_rate": q, "steps": 10**6}
    assert compute_epsilon(**VALID | question | variant) >= 0


def test_an_absent_extra_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accountants, "find_spec", lambda _: None)
    with pytest.raises(PrivacyError, match=r"dp_accounting.*pip install dp_grape_hf\[pld\]"):
        compute_epsilon(**VALID | {"accountant": "pld"})
    assert compute_epsilon(**VALID | {"accountant": "prv"}) > 0


def test_a_failure_of_the_last_resort_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> float:
        raise AccountantFailure("broken")

    monkeypatch.setattr(ACCOUNTANTS["rdp"], "epsilon", fail)
    with pytest.raises(AccountantFailure, match="broken"):
        compute_epsilon(**VALID)


# ---- Refusals ----


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("noise_multiplier", -1.0),
        ("noise_multiplier", math.inf),
        ("sample_rate", 0.0),
        ("sample_rate", 1.5),
        ("sample_rate", math.nan),
        ("steps", -1),
        ("steps", 1.5),
        ("steps", True),
        ("delta", 0.0),
        ("delta", 1.0),
        ("accountant", "moments"),
        ("target_epsilon", 0.0),
        ("target_epsilon", math.inf),
        ("target_delta", 2.0),
    ],
)
def test_a_bad_argument_is_named_with_its_value(name: str, value: object) -> None:
    for asked, valid in ((compute_epsilon, VALID), (find_noise_multiplier, VALID_TARGET)):
        if name in valid:
            with pytest.raises(PrivacyError) as refusal:
                asked(**valid | {name: value})
            assert f"{name}={value!r}" in str(refusal.value)


def test_a_bad_block_is_refused_even_if_it_is_empty() -> None:
    with pytest.raises(PrivacyError, match=r"sample_rate=2\.0"):
        compose_epsilon([Releases(1.0, 0.1, 5), Releases(1.0, 2.0, 0)], delta=1e-5)
    with pytest.raises(PrivacyError, match=r"delta=0\.0"):
        compose_epsilon([], delta=0.0)


def test_an_epoch_is_one_over_q_steps_rounded_up() -> None:
    for steps in range(1, 3000):
        assert expected_steps_per_epoch(1 / steps) == steps
    assert expected_steps_per_epoch(0.3) == 4
    assert expected_steps_per_epoch(0.7) == 2
    assert expected_steps_per_epoch(1 / (1000 + 1e-3)) == 1001
    for wrong in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(PrivacyError, match="sample_rate="):
            expected_steps_per_epoch(wrong)
