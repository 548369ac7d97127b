"""The best of a random number of runs: the bound against exact divergences, and its uses."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from safetensors.torch import save_file
from scipy.special import gammaln, logsumexp
from scipy.stats import geom, logser, poisson

from dp_grape_hf.accounting import (
    AccountantFailure,
    EpsilonCurve,
    Releases,
    Trials,
    TrialsDistribution,
    compose_epsilon,
    compute_epsilon,
    find_noise_multiplier,
)
from dp_grape_hf.accounting.accountants import ORDERS
from dp_grape_hf.arguments import DPGrapeTrainingArguments, PrivacyPlan
from dp_grape_hf.cli.main import main
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.ledger import CARD_NAME, LEDGER_NAME, Ledger
from dp_grape_hf.publishing import ABSENT, MISMATCH, render, verify
from dp_grape_hf.publishing.model_files import digests
from dp_grape_hf.publishing.verification import OK
from tests.support.ledgers import MECHANISM, edit
from tests.support.trainers import make_args, make_trainer

GEOMETRIC, LOGARITHMIC, POISSON = TrialsDistribution
Array = npt.NDArray[np.float64]
MEANS = [1.0, 1.5, 4.0, 10.0, 100.0]
TUNED = replace(MECHANISM, num_trials=10.0, trials_distribution=GEOMETRIC, steps_of_trial=100)


# ---- The bound, against mechanisms whose best outcome is computed exactly ----


def _weights(trials: Trials, most: int = 40_000) -> Array:
    """P[K = 0], P[K = 1], ..., written down from the definition."""
    k = np.arange(most)
    if trials.distribution == POISSON:
        return np.asarray(np.exp(-trials.mean + k * math.log(trials.mean) - gammaln(k + 1)))
    weights, g = np.zeros(most), trials.gamma
    if g == 1:
        weights[1] = 1.0
    elif trials.distribution == GEOMETRIC:
        weights[1:] = g * (1 - g) ** (k[1:] - 1)
    else:
        weights[1:] = (1 - g) ** k[1:] / k[1:] / math.log(1 / g)
    return weights


def _best(outcome: Array, trials: Trials) -> Array:
    """The law of the best of K outcomes, the last being the best; first that there was no run."""
    weights = _weights(trials)
    below = np.concatenate([[0.0], np.cumsum(outcome)])
    below[-1] = 1.0
    at_most = np.array([float(np.sum(weights * p ** np.arange(len(weights)))) for p in below])
    return np.concatenate([at_most[:1], np.diff(at_most)])


def _log_moment(p: Array, q: Array, order: float) -> float:
    some = p > 0
    return float(logsumexp(order * np.log(p[some]) + (1 - order) * np.log(q[some])))


def _pairs() -> list[tuple[Array, Array]]:
    generator = np.random.default_rng(0)
    response = np.array([0.7, 0.3])
    found = [(response, response[::-1])]
    steps = np.arange(-8, 9)
    for shift in (0.3, 1.0):
        found.append(tuple(np.exp(-((steps - s) ** 2) / 8) for s in (0.0, shift)))  # type: ignore[arg-type]
    # Nearly the worst case of geometric numbers: the middle outcome's ratio is close to e^3.
    found.append((np.array([0.94728, 0.00272, 0.05]), np.array([0.863, 0.001, 0.136])))
    rare = np.array([1e-6, 0.5 - 1e-6, 0.5])
    found.append((rare, np.array([1e-4, 0.5, 0.5 - 1e-4])))
    for _ in range(4):
        p = generator.dirichlet(np.ones(4))
        found.append((p, p * np.exp(generator.uniform(-0.5, 0.5, 4))))
    return [(p / p.sum(), q / q.sum()) for p, q in found]


PAIRS = _pairs()


@pytest.mark.slow
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("distribution", TrialsDistribution)
def test_the_best_outcome_is_never_further_apart_than_the_bound(
    distribution: str, mean: float
) -> None:
    trials, closest = Trials(mean, distribution), math.inf
    for one, other in PAIRS:
        for p, q in ((one, other), (one[::-1], other[::-1])):
            moments = [max(_log_moment(p, q, a), _log_moment(q, p, a)) for a in ORDERS]
            bound = trials.log_moments(np.array(moments), ORDERS)
            best, neighbour = _best(p, trials), _best(q, trials)
            assert best.sum() == pytest.approx(1, abs=1e-9)
            for i in range(0, len(ORDERS), 9):
                if ORDERS[i] > 64:
                    continue
                exact = max(
                    _log_moment(best, neighbour, ORDERS[i]), _log_moment(neighbour, best, ORDERS[i])
                )
                assert exact <= bound[i] * (1 + 1e-8) + 1e-9
                closest = min(closest, (bound[i] - exact) / (ORDERS[i] - 1))
    assert closest < 1.0 + math.log(mean), "a bound that says nothing would pass, too"


@pytest.mark.parametrize("distribution", [GEOMETRIC, LOGARITHMIC])
def test_one_trial_for_certain_costs_nothing(distribution: str) -> None:
    moments = 0.3 * ORDERS * (ORDERS - 1)
    assert (Trials(1.0, distribution).log_moments(moments, ORDERS) == moments).all()
    given: Any = {"noise_multiplier": 2.0, "sample_rate": 0.1, "steps": 50, "delta": 1e-5}
    plain = compute_epsilon(**given, accountant="rdp")
    tuned = compute_epsilon(**given, num_trials=1, trials_distribution=distribution)
    assert tuned == pytest.approx(plain, rel=1e-12)


def test_a_pure_guarantee_grows_as_the_paper_says() -> None:
    """Corollary 3 of the paper: (2 + eta) eps for truncated negative binomials, whatever K."""
    orders = np.geomspace(1.5, 1e7, 2000)
    epsilon = 0.7
    for distribution, factor in ((GEOMETRIC, 3), (LOGARITHMIC, 2)):
        bound = Trials(1000.0, distribution).log_moments((orders - 1) * epsilon, orders)
        assert bound[-1] / (orders[-1] - 1) == pytest.approx(factor * epsilon, rel=1e-4)


def test_concentrated_privacy_grows_as_the_square_root() -> None:
    """With divergences rho a the best order b of theorem 2 is sqrt(log(1 / gamma) / rho)."""
    rho, orders = 0.01, np.linspace(1.0001, 300, 300_000)
    trials = Trials(50.0, GEOMETRIC)
    bound = trials.log_moments(rho * orders * (orders - 1), orders)
    added = (bound - rho * orders * (orders - 1) - math.log(50)) / (orders - 1)
    best = 2 * (2 * math.sqrt(rho * math.log(50)) - rho)
    np.testing.assert_allclose(added, best, rtol=1e-5)


@pytest.mark.parametrize("mean", [1.5, 10.0, 100.0])
@pytest.mark.parametrize("distribution", TrialsDistribution)
def test_another_library_finds_the_same(distribution: str, mean: float) -> None:
    """Of the Gaussian mechanism without sampling, whose divergences both have exactly."""
    shape = {GEOMETRIC: 1.0, LOGARITHMIC: 0.0, POISSON: math.inf}[distribution]
    run = dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(20.0), 100)
    accountant = RdpAccountant([1.0, *ORDERS])
    accountant.compose(dp_event.RepeatAndSelectDpEvent(run, mean, shape))
    theirs = accountant.get_epsilon(1e-5)
    ours = compute_epsilon(
        noise_multiplier=20.0,
        sample_rate=1.0,
        steps=100,
        delta=1e-5,
        num_trials=mean,
        trials_distribution=distribution,
    )
    # Ours counts that a Poisson number may be 0, and theirs rounds gamma.
    assert ours == pytest.approx(theirs, rel=1e-2 if distribution == POISSON and mean < 2 else 1e-6)
    assert ours >= theirs * (1 - 1e-6)


def test_a_small_poisson_mean_is_not_below_nothing() -> None:
    nothing = np.zeros_like(ORDERS)
    bound = Trials(0.1, POISSON).log_moments(nothing, ORDERS)
    assert (bound >= 0).all(), "theorem 6 as it stands would be negative"


# ---- How many trials ----


@pytest.mark.slow
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("distribution", TrialsDistribution)
def test_the_number_of_trials_has_the_law_it_is_accounted_for(
    distribution: str, mean: float
) -> None:
    """False alarms: 5 standard errors of the mean and of P[K <= mean], 15 cases, about 2e-5."""
    trials, n = Trials(mean, distribution), 20_000
    if distribution == POISSON:
        law: Any = poisson(mean)
    elif mean == 1:
        assert {trials.draw() for _ in range(100)} == {1}
        return
    else:
        law = geom(1 / mean) if distribution == GEOMETRIC else logser(1 - trials.gamma)
    assert law.mean() == pytest.approx(mean, rel=1e-6)
    drawn = np.array([trials.draw() for _ in range(n)])
    assert abs(drawn.mean() - mean) <= 5 * law.std() / math.sqrt(n)
    p = law.cdf(mean)
    assert abs((drawn <= mean).mean() - p) <= 5 * math.sqrt(p * (1 - p) / n) + 1e-12
    assert drawn.min() >= (0 if distribution == POISSON else 1)


def test_draws_cannot_be_repeated_by_a_seed() -> None:
    """Two draws of 20 numbers agree with a probability far below 1e-9."""
    trials, rows = Trials(1000.0), []
    for _ in range(2):
        np.random.seed(0)
        torch.manual_seed(0)
        rows.append([trials.draw() for _ in range(20)])
    assert rows[0] != rows[1]


@pytest.mark.parametrize("mean", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("distribution", TrialsDistribution)
def test_a_number_that_is_no_mean_is_refused(distribution: str, mean: float) -> None:
    with pytest.raises(PrivacyError, match=f"num_trials={mean}"):
        Trials(mean, distribution)


def test_only_poisson_numbers_may_be_fewer_than_one_on_average() -> None:
    Trials(0.5, POISSON)
    with pytest.raises(PrivacyError, match="at least 1"):
        Trials(0.5, GEOMETRIC)
    with pytest.raises(PrivacyError, match="trials_distribution='fixed' is unknown"):
        Trials(5, "fixed")


# ---- In the accountants ----


def test_noise_from_a_budget_inverts_the_bound() -> None:
    given: Any = {"sample_rate": 0.05, "steps": 200, "num_trials": 20}
    sigma = find_noise_multiplier(target_epsilon=3.0, target_delta=1e-5, **given)
    found = compute_epsilon(noise_multiplier=sigma, delta=1e-5, **given)
    assert 3.0 * (1 - 1e-3) <= found <= 3.0


@pytest.mark.parametrize(
    "variant",
    [
        {"max_batch_size": 30, "num_samples": 200},
        {"norm_directions": 16},
        {"adjacency": "replace_one"},
    ],
)
def test_every_variant_can_be_tuned(variant: dict[str, Any]) -> None:
    given: Any = {"noise_multiplier": 3.0, "sample_rate": 0.1, "steps": 50, "delta": 1e-5}
    one = compute_epsilon(**given, **variant, accountant="rdp")
    plain = compute_epsilon(**given, num_trials=5)
    best = compute_epsilon(**given, **variant, num_trials=5)
    assert best > one
    assert best > plain
    assert math.isfinite(best)


def test_rare_events_are_charged_for_every_trial() -> None:
    """A cap that is almost free for one run has to cover the trials on average."""
    given: Any = {"noise_multiplier": 3.0, "sample_rate": 0.1, "steps": 50, "delta": 1e-5}
    cap = {"max_batch_size": 44, "num_samples": 200}
    ratios = []
    for mean in (1.0, 1000.0):
        plain = compute_epsilon(**given, num_trials=mean)
        ratios.append(compute_epsilon(**given, **cap, num_trials=mean) / plain)
    assert ratios[1] > ratios[0] + 1e-4


def test_each_choice_among_trials_costs_on_its_own() -> None:
    run, whole = (Releases(3.0, 0.05, steps, num_trials=10.0) for steps in (50, 100))
    plain = replace(run, num_trials=None)
    twice = compose_epsilon([run, run], delta=1e-5)
    assert twice > compose_epsilon([whole], delta=1e-5)
    assert twice > compose_epsilon([run, plain], delta=1e-5) > compose_epsilon([run], delta=1e-5)


def test_accountants_without_a_theorem_do_not_answer() -> None:
    ledger = Ledger.start(TUNED)
    ledger.record(100)
    for name in ("prv", "pld"):
        with pytest.raises(AccountantFailure, match="geometric number of trials"):
            ledger.epsilon_by(name, 1e-5)
    assert ledger.epsilon_by("rdp", 1e-5) == pytest.approx(ledger.epsilon())
    curve = EpsilonCurve(Releases(1.5, 0.0625, 100, num_trials=10.0), 1e-5, "prv")
    assert curve.epsilon(100) == pytest.approx(ledger.epsilon())
    assert curve.accountant == "rdp"


def test_a_distribution_needs_its_mean() -> None:
    with pytest.raises(PrivacyError, match="trials_distribution='poisson' needs num_trials"):
        compute_epsilon(
            noise_multiplier=1.0, sample_rate=0.1, steps=1, delta=1e-5, trials_distribution=POISSON
        )


# ---- In the ledger, the card and verify ----


def test_a_trial_that_stopped_early_counts_as_long_as_the_others_may_be() -> None:
    short, whole = Ledger.start(TUNED), Ledger.start(TUNED)
    short.record(3)
    whole.record(100)
    assert short.steps == 3
    assert short.epsilon() == whole.epsilon() == Ledger.start(TUNED).epsilon() > 0
    longer = Ledger.start(TUNED)
    longer.record(150)
    assert longer.epsilon() > whole.epsilon()


def test_a_run_without_trials_is_written_as_it_always_was(tmp_path: Path) -> None:
    Ledger.start(MECHANISM).save(tmp_path / "plain.json")
    assert "trial" not in (tmp_path / "plain.json").read_text()
    Ledger.start(TUNED).save(tmp_path / "tuned.json")
    assert Ledger.load(tmp_path / "tuned.json").mechanism == TUNED


@pytest.mark.parametrize("name", ["num_trials", "trials_distribution", "steps_of_trial"])
def test_a_tuned_mechanism_is_whole(name: str, tmp_path: Path) -> None:
    with pytest.raises(PrivacyError, match="go together"):
        replace(TUNED, **{name: None})
    Ledger.start(TUNED).save(tmp_path / LEDGER_NAME)
    edit(tmp_path / LEDGER_NAME, lambda c: c["entries"][0]["mechanism"].pop(name))
    with pytest.raises(PrivacyError, match="go together"):
        Ledger.load(tmp_path / LEDGER_NAME)


def _saved(folder: Path) -> Ledger:
    save_file({"a": torch.zeros(3)}, folder / "model.safetensors")
    ledger = Ledger.start(replace(TUNED, accountant="rdp"))
    ledger.record(100)
    ledger.snapshot(100, digests(folder)).save(folder / LEDGER_NAME)
    (folder / CARD_NAME).write_text(render(ledger), encoding="utf-8")
    return ledger


def test_the_card_says_so_and_verify_finds_it_true(tmp_path: Path) -> None:
    ledger = _saved(tmp_path)
    card = (tmp_path / CARD_NAME).read_text()
    row = "| Chosen among trials | the best of a geometric number of trials, 10 on average, of 100 "
    assert row in card
    assert "runs other than those trials" in card
    assert f"{math.ceil(ledger.epsilon() * 1000) / 1000:.3f}" in card
    status = {check.what: check.status for check in verify(tmp_path)}
    assert set(status.values()) == {OK, ABSENT}
    assert status["epsilon by prv"] == status["epsilon by pld"] == ABSENT
    assert status["epsilon by rdp"] == status["card: statement"] == OK


@pytest.mark.parametrize("change", ["missing", "fewer"])
def test_a_card_without_its_trials_is_found(change: str, tmp_path: Path) -> None:
    _saved(tmp_path)
    path = tmp_path / CARD_NAME
    lines = path.read_text().splitlines(keepends=True)
    if change == "missing":
        lines = [line for line in lines if not line.startswith("| Chosen among trials")]
    else:
        lines = [line.replace("10 on average", "2 on average") for line in lines]
    path.write_text("".join(lines))
    wrong = [check.what for check in verify(tmp_path) if check.status == MISMATCH]
    assert wrong == ["card: statement"]


# ---- In a run ----


def test_a_plan_buys_the_noise_that_choosing_takes(tmp_path: Path) -> None:
    given: Any = {"target_epsilon": 3.0, "target_delta": 1e-5, "max_steps": 50}
    plain = PrivacyPlan(make_args(tmp_path, **given), 1000)
    tuned = PrivacyPlan(make_args(tmp_path, **given, num_trials=10), 1000)
    assert tuned.mechanism.noise_multiplier > plain.mechanism.noise_multiplier
    mechanism = tuned.mechanism
    assert (mechanism.num_trials, mechanism.trials_distribution) == (10, GEOMETRIC)
    assert (mechanism.steps_of_trial, mechanism.accountant) == (50, "rdp")
    ledger = Ledger.start(mechanism)
    ledger.record(2)
    spent = tuned.spent(ledger)
    assert spent.epsilon == pytest.approx(ledger.epsilon())
    assert 3.0 * (1 - 1e-3) <= spent.epsilon <= 3.0
    assert tuned.releases_left(ledger) == 48


def test_a_trained_trial_records_what_it_is(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, target_epsilon=50.0, num_trials=4, trials_distribution=POISSON)
    trainer.train()
    trainer.save_model()
    ledger = Ledger.load(tmp_path / LEDGER_NAME)
    assert str(ledger.mechanism.trials) == str(Trials(4.0, POISSON))
    assert ledger.epsilon() == pytest.approx(trainer.privacy_spent().epsilon)
    assert MISMATCH not in {check.status for check in verify(tmp_path)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_trials": 0.5}, "num_trials=0.5"),
        ({"num_trials": "many"}, "num_trials='many' must be a number"),
        ({"num_trials": 5, "trials_distribution": "fixed"}, "trials_distribution='fixed'"),
        ({"num_trials": 5, "noise_multiplier": 0}, "num_trials=5.0 with noise_multiplier=0"),
    ],
)
def test_arguments_that_mean_no_trials_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    given = {"target_epsilon": 1.0} if "noise_multiplier" not in changes else {}
    with pytest.raises(PrivacyError, match=message):
        DPGrapeTrainingArguments(
            output_dir=str(tmp_path), target_delta=1e-5, use_cpu=True, **given | changes
        )


# ---- On the command line ----

PLAN = "calibrate --num_samples 1000 --expected_batch_size 100 --max_steps 50 --delta 1e-5"


def _printed(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(command.split()) == 0
    return capsys.readouterr().out


def test_calibrate_shows_one_run_and_the_best_of_several(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given: Any = {"noise_multiplier": 2.0, "sample_rate": 0.1, "steps": 50, "delta": 1e-5}
    text = _printed(f"{PLAN} --noise_multiplier 2 --num_trials 8 --json", capsys)
    (row,) = json.loads(text)["rows"]
    assert row["epsilon_of_one_run"] == pytest.approx(compute_epsilon(**given))
    assert row["epsilon"] == pytest.approx(compute_epsilon(**given, num_trials=8))
    text = _printed(f"{PLAN} --eps 3 --num_trials 8 --trials_distribution poisson", capsys)
    assert "the best of a poisson number of trials, 8 on average" in text
    (sigma,) = [float(line.split()[1]) for line in text.splitlines() if line.split()[:1] == ["3"]]
    given |= {"noise_multiplier": sigma, "num_trials": 8, "trials_distribution": POISSON}
    assert compute_epsilon(**given) <= 3
    assert "Secret" not in text


def test_a_number_of_trials_is_drawn_only_when_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = f"{PLAN} --noise_multiplier 2 --accountant rdp --num_trials 500"
    assert "num_trials_drawn" not in json.loads(_printed(f"{command} --json", capsys))
    drawn = [
        json.loads(_printed(f"{command} --json --draw_num_trials", capsys))["num_trials_drawn"]
        for _ in range(8)
    ]
    assert min(drawn) >= 1
    assert len(set(drawn)) > 1, "all 8 agree with a probability below 1e-15"
    assert "Secret number of runs to make: " in _printed(f"{command} --draw_num_trials", capsys)
    for option in ("--draw_num_trials", "--trials_distribution poisson"):
        assert main(f"{PLAN} --eps 3 {option}".split()) == 2
        assert "give --num_trials" in capsys.readouterr().err
