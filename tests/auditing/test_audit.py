"""The one-run audit: its bound against all mechanisms that there are, and real runs against it."""

import itertools
import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from scipy.sparse import coo_array
from scipy.stats import binom, norm

from dp_grape_hf.auditing import (
    AuditSettings,
    audit,
    epsilon_lower_bound,
    evidence_of,
    guess,
    log_likelihood_ratio,
    p_value,
)
from dp_grape_hf.cli.main import main
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.mechanism import banded, release
from dp_grape_hf.mechanism.noise import add_noise_
from tests.mutation.saboteurs import SABOTEURS
from tests.support.marks import slow_but


def most_likely_success(m, k, v, epsilon, delta):
    """Returns the largest P[v of k guesses are correct, or more] of a private run.

    A mechanism is a table: for each of the ``2**m`` ways that the coins fall, the probabilities of
    all guesses of k canaries. What it can reach is a linear program, with one variable for every
    entry and one for the excess over e^epsilon of each entry, neighbour by neighbour.
    """
    coins = list(itertools.product((-1, 1), repeat=m))
    guesses = [g for g in itertools.product((-1, 0, 1), repeat=m) if sum(map(abs, g)) == k]
    entries = {pair: i for i, pair in enumerate(itertools.product(coins, guesses))}
    neighbours = [
        (s, (*s[:i], -s[i], *s[i + 1 :])) for s in coins for i in range(m)
    ]  # in both orders
    size = len(entries)
    rows, columns, values, most = [], [], [], []

    def at_most(terms, bound):
        for column, value in terms:
            rows.append(len(most))
            columns.append(column)
            values.append(value)
        most.append(bound)

    for s, t in neighbours:
        excess = range(size, size + len(guesses))
        size += len(guesses)
        for g, column in zip(guesses, excess, strict=True):
            at_most([(entries[s, g], 1.0), (entries[t, g], -math.exp(epsilon)), (column, -1.0)], 0)
        at_most([(column, 1.0) for column in excess], delta)
    gain = np.zeros(size)
    for (s, g), column in entries.items():
        gain[column] = -(sum(a * b > 0 for a, b in zip(s, g, strict=True)) >= v) / len(coins)
    sums = np.zeros((len(coins), size))
    for i, s in enumerate(coins):
        sums[i, [entries[s, g] for g in guesses]] = 1
    found = linprog(
        gain,
        A_ub=coo_array((values, (rows, columns)), shape=(len(most), size)),
        b_ub=most,
        A_eq=sums,
        b_eq=np.ones(len(coins)),
    )
    assert found.status == 0, found.message
    return float(-found.fun)


CASES = [(m, k, v) for m in (1, 2, 3) for k in range(1, m + 1) for v in range(1, k + 1)]


@pytest.mark.parametrize(("m", "k", "v"), CASES)
def test_the_bound_is_what_the_best_private_mechanism_reaches(m, k, v):
    for epsilon, delta in itertools.product((0.0, 0.5, 2.0), (0.0, 1e-3, 0.02, 0.1)):
        best = most_likely_success(m, k, v, epsilon, delta)
        bound = p_value(v, k, m, epsilon, delta)
        assert best <= bound + 1e-7, (epsilon, delta)
        if delta <= 0.02:  # so small that the best table has no negative entry
            assert best == pytest.approx(bound, abs=1e-7), (epsilon, delta)


def test_delta_counts_for_all_canaries_and_not_only_guessed_ones():
    plain, few, many = (
        p_value(45, 50, m, 1.0, delta) for m, delta in ((50, 0.0), (50, 1e-4), (5000, 1e-4))
    )
    assert plain == pytest.approx(binom.sf(44, 50, 1 / (1 + math.exp(-1))))
    assert plain < few
    assert many - plain == pytest.approx(100 * (few - plain), rel=1e-6)


def test_the_bound_refutes_all_smaller_epsilons_and_no_larger_ones():
    bound = epsilon_lower_bound(180, 200, 1000, 1e-5, 0.95)
    assert p_value(180, 200, 1000, bound, 1e-5) <= 0.05
    assert p_value(180, 200, 1000, bound + 1e-3, 1e-5) > 0.05
    smaller = [p_value(180, 200, 1000, e, 1e-5) for e in np.linspace(0, bound, 50)]
    assert max(smaller) <= 0.05


def test_more_correct_guesses_and_less_confidence_show_more():
    bounds = [epsilon_lower_bound(correct, 200, 1000, 1e-5) for correct in range(100, 201, 10)]
    assert bounds == sorted(bounds)
    assert bounds[0] == 0 < bounds[-1] < 6
    assert epsilon_lower_bound(150, 200, 1000, 1e-5, 0.99) < epsilon_lower_bound(
        150, 200, 1000, 1e-5, 0.9
    )


@pytest.mark.slow
def test_the_bound_holds_for_gaussian_mechanisms_with_the_stated_confidence():
    """2000 audits of N(bit, sigma^2): the bound may exceed the true epsilon in 5 % of them.

    For the smallest true epsilon, 0, so that the bound is not idle: scores say nothing at all.
    """
    generator, exceeded = torch.Generator().manual_seed(0), 0
    for _ in range(2000):
        coins = torch.rand(200, generator=generator) < 0.5
        guessed, says = guess(torch.randn(200, generator=generator), 50)
        correct = int((coins[guessed] == says).sum())
        exceeded += epsilon_lower_bound(correct, 50, 200, 0.0) > 0
    assert 40 <= exceeded <= 100  # of a binomial tail just below 5 %


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"correct": 11}, "correct=11, guesses=10 and canaries=20 must satisfy"),
        ({"guesses": 21}, "guesses=21 and canaries=20"),
        ({"correct": 0, "guesses": 0}, "at least one guess"),
        ({"delta": 1.0}, "delta=1.0 must lie in"),
        ({"confidence": 1.0}, "confidence=1.0 must lie in"),
    ],
    ids=str,
)
def test_counts_and_levels_that_make_no_sense_are_refused(changes, message):
    given = {"correct": 5, "guesses": 10, "canaries": 20, "delta": 1e-3, "confidence": 0.9}
    with pytest.raises(PrivacyError, match=message):
        epsilon_lower_bound(**given | changes)


@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_the_evidence_is_the_likelihood_ratio_of_the_two_worlds(rate):
    seen = np.linspace(-2, 3, 11)
    out = norm.pdf(seen, 0, 0.7)
    inside = rate * norm.pdf(seen, 1, 0.7) + (1 - rate) * out
    found = log_likelihood_ratio(torch.from_numpy(seen), 0.7, rate)
    np.testing.assert_allclose(found.numpy(), np.log(inside / out), rtol=1e-9, atol=1e-12)


def test_a_guess_is_made_where_the_evidence_is_strongest():
    guessed, says_in = guess(torch.tensor([0.1, -5.0, 3.0, -0.2]), 2)
    assert guessed.tolist() == [1, 2]
    assert says_in.tolist() == [False, True]


FACTORS = {"body": 0.25, "tables.1": 8.0}


@pytest.mark.slow
@pytest.mark.parametrize("factors", [None, FACTORS], ids=["plain", "factors"])
@pytest.mark.parametrize("clipping", ["flat", "automatic"])
@pytest.mark.parametrize(
    ("method", "projection"),
    [("dp_grape", None), ("dp_grape", "principal"), ("dp_sgd", None)],
    ids=["dp_grape", "principal", "dp_sgd"],
)
def test_each_included_canary_is_seen_with_length_C(
    method, projection, clipping, factors, monkeypatch
):
    """Without noise, three steps show 1 for a canary that is in and 0 for the others."""
    found = []

    def keep(seen, noise_multiplier, sample_rate):
        found.append(seen)
        return log_likelihood_ratio(seen, noise_multiplier, sample_rate)

    monkeypatch.setattr("dp_grape_hf.auditing.log_likelihood_ratio", keep)
    result = audit(
        AuditSettings(
            method=method,
            projection=projection,
            clipping=clipping,
            gradient_factors=factors,
            noise_multiplier=0.0,
            canaries=60,
            guesses=60,
            steps=3,
        )
    )
    (all_seen,) = found
    assert len(all_seen) == 3
    for seen in all_seen:
        inside = seen > 0.5
        assert int(inside.sum()) == result.included
        torch.testing.assert_close(seen, inside.float(), atol=1e-3, rtol=0)
    assert result.correct == 60
    assert result.claimed_epsilon == math.inf
    assert result.passed


ATTACKED = [
    {"method": "dp_grape", "steps": 2},
    {"method": "dp_sgd", "sample_rate": 0.2, "steps": 20},
    {"method": "dp_grape", "clipping": "automatic", "steps": 1, "noise_multiplier": 1.0},
    {"projection": "principal", "steps": 2, "gradient_factors": FACTORS},
    {"projection": "gaussian", "steps": 2, "gradient_factors": {"body": 8}},
    {"noise": "banded", "target_epsilon": 4.0, "sample_rate": 0.25, "steps": 4},
]


@pytest.mark.parametrize("changes", slow_but({str(ATTACKED[0])}, ATTACKED))
def test_what_an_attack_shows_stays_below_the_claim(changes):
    """Of 30,000 simulated attacks with these numbers, none failed (with 20 guesses: a quarter)."""
    result = audit(AuditSettings(canaries=3000, guesses=150, **changes))
    assert 0 < result.lower_bound < result.claimed_epsilon < 5
    assert result.correct > 0.55 * result.settings.number_of_guesses


def less_noise(times, values, std, *rest):
    add_noise_(values, std / times, *rest)


@pytest.mark.slow
def test_correlated_noise_of_an_eighth_of_its_size_is_refuted(monkeypatch):
    """Four bands, in which each canary that is in has one turn, and takes it."""
    monkeypatch.setattr(banded, "add_noise_", partial(less_noise, 8))
    settings = {"noise": "banded", "target_epsilon": 4.0, "sample_rate": 0.25, "steps": 4}
    result = audit(AuditSettings(canaries=4000, guesses=400, method="dp_sgd", **settings))
    assert not result.passed


def test_evidence_under_correlated_noise_is_the_likelihood_ratio():
    """Against the densities of all releases together, for each group and each set of draws."""
    bands, sigma, rate, steps = (0.8, 0.6), 1.3, 0.3, 5
    seen = torch.randn(steps, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix = torch.diag(torch.full((steps,), 0.8)) + torch.diag(torch.full((steps - 1,), 0.6), -1)
    matrix = matrix.double()

    def log_density(drawn):
        return -((matrix @ (seen - drawn[:, None])).square().sum(0)) / (2 * sigma**2)

    inside = []
    for group in (0, 1):
        turns = range(group, steps, 2)
        for coins in itertools.product((0, 1), repeat=len(turns)):
            drawn = torch.zeros(steps, dtype=torch.float64)
            drawn[list(turns)] = torch.tensor(coins, dtype=torch.float64)
            chance = math.prod(2 * rate if coin else 1 - 2 * rate for coin in coins) / 2
            inside.append(log_density(drawn) + math.log(chance))
    expected = torch.stack(inside).logsumexp(0) - log_density(torch.zeros(steps).double())
    torch.testing.assert_close(evidence_of(seen, sigma, rate, bands), expected)


@pytest.mark.slow
@pytest.mark.parametrize("projection", ["gaussian", "principal"])
@pytest.mark.parametrize(
    ("sabotage", "factors"),
    [
        ("less noise", None),
        ("less noise", {"body": 4}),
        ("nothing is clipped", {"body": 4}),
        ("gradient factors do not count in the norm", {"body": 16}),
        ("gradient factors do not meet the noise", {"*": 0.125}),
    ],
    ids=str,
)
def test_a_claim_that_is_not_kept_is_refuted(sabotage, factors, projection, monkeypatch):
    if sabotage == "less noise":
        monkeypatch.setattr(release, "add_noise_", partial(less_noise, 4))
    else:
        (saboteur,) = (s for s in SABOTEURS if s.name == sabotage)
        saboteur.apply(monkeypatch)
    settings = {"projection": projection, "gradient_factors": factors}
    result = audit(AuditSettings(steps=1, canaries=4000, **settings))
    assert not result.passed
    assert result.lower_bound > result.claimed_epsilon


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "adam"}, "method='adam' cannot be audited"),
        ({"canaries": 3}, "canaries=3 must be at least 4"),
        ({"guesses": 0}, "guesses=0 must lie in"),
        ({"canaries": 10, "guesses": 11}, "guesses=11 must lie in"),
        ({"projection_rank": 4}, "projection_rank=4 must lie in 1"),
        ({"sample_rate": 0.0}, "sample_rate=0.0 must lie in"),
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"tables": 0}, "tables=0 must be at least 1"),
        ({"confidence": 0.0}, "confidence=0.0 must lie in"),
        ({"gradient_factors": {"head": 4}}, "gradient_factors='head': this pattern matches none"),
    ],
    ids=str,
)
def test_what_cannot_be_audited_is_refused(changes, message):
    with pytest.raises(PrivacyError, match=message):
        audit(AuditSettings(**{"canaries": 60} | changes))


SMALL = ["audit", "--canaries", "2000", "--guesses", "200", "--max_steps", "1"]


def test_the_command_prints_claim_and_bound(capsys):
    """Of 20,000 simulated attacks with 200 guesses none failed; with 50 guesses three did."""
    assert main([*SMALL, "--noise_multiplier", "2"]) == 0
    printed = capsys.readouterr().out
    assert "guesses          200, fixed in advance" in printed
    assert "epsilon claimed  1.993" in printed  # the closed form of one Gaussian: 1.99309
    assert "The attack does not contradict the claim." in printed


@pytest.mark.slow
def test_the_command_names_the_projection_and_the_factors(capsys):
    factors = '{"body": 4}'
    assert main([*SMALL, "--projection", "principal", "--gradient_factors", factors]) == 0
    printed = capsys.readouterr().out
    assert "projection        principal\n" in printed
    assert f"gradient factors  {factors}\n" in printed
    assert main([*SMALL, "--gradient_factors", "4"]) == 2
    assert "must be a mapping of name patterns to factors" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_fails_where_the_claim_is_refuted(monkeypatch, capsys):
    command = ["audit", "--canaries", "4000", "--guesses", "400", "--max_steps", "1", "--eps", "1"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"]
    assert found["claimed_epsilon"] == pytest.approx(1.0, abs=1e-3)
    monkeypatch.setattr(release, "add_noise_", partial(less_noise, 4))
    assert main(command) == 1
    assert "NOT AS PRIVATE AS IT CLAIMS" in capsys.readouterr().out
