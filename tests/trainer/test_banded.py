"""Runs with correlated noise: what their weights hold, what they count, and how they resume."""

import math
from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch import nn

from dp_grape_hf import PrivacyError
from dp_grape_hf.accounting import compute_epsilon, noise_left, release_weights, released_noise
from dp_grape_hf.arguments import PrivacyPlan
from dp_grape_hf.ledger import LEDGER_NAME, Ledger
from dp_grape_hf.publishing import verify
from tests.support.marks import slow_but
from tests.support.models import only
from tests.support.trainers import (
    CLASSES,
    FEATURES,
    RecordingTrainer,
    TinyForSequenceClassification,
    Watch,
    assert_turns,
    examples_of,
    make_trainer,
    no_loss,
    owned,
    points,
    trained_in,
)

BANDED = {
    "noise": "banded",
    "target_epsilon": 8.0,
    "target_delta": 1e-4,
    "expected_batch_size": 10,
    "max_steps": 24,
}
MANY = 120  # examples


def _trainer(folder, **changes):
    data = points(MANY)
    return make_trainer(folder, train_dataset=data, **{**BANDED, **changes})


def test_a_banded_runs_ledger_and_card_state_its_turns(tmp_path):
    watch = Watch()
    trainer = _trainer(tmp_path, cls=RecordingTrainer, callbacks=[watch])
    trainer.train()
    trainer.save_model()
    own, ledger = trainer.plan.mechanism, Ledger.load(tmp_path / LEDGER_NAME)
    bands = len(own.bands)
    assert bands > 1
    assert ledger.mechanism == own
    assert own.noise == "banded"
    assert ledger.steps == 24
    assert ledger.composed[0].counted == math.ceil(24 / bands)
    assert ledger.epsilon() == trainer.privacy_spent().epsilon
    assert ledger.epsilon() == compute_epsilon(
        noise_multiplier=own.noise_multiplier,
        sample_rate=bands * 10 / MANY,
        steps=math.ceil(24 / bands),
        delta=1e-4,
        accountant=own.accountant,
    )
    assert 0.98 * 8.0 < ledger.epsilon() <= 8.0
    spent = [line["epsilon"] for line in watch.logs if "epsilon" in line][:24]
    for number in range(1, 24):
        assert (spent[number] > spent[number - 1]) == (number % bands == 0)
    assert len(assert_turns(trainer.draws, bands)) > MANY / 2
    checks = verify(tmp_path)
    assert all(check.status != "MISMATCH" for check in checks), checks
    found = {check.what: check.found for check in checks}[f"epsilon by {own.accountant}"]
    accounted = f"{math.ceil(24 / bands)} releases at sampling rate {bands * 10 / MANY:.6g} with"
    assert f"| Accounted as | {accounted}" in (tmp_path / "README.md").read_text()
    assert f"accounted as {accounted}" in found


def test_a_new_loader_has_the_groups_of_the_run(tmp_path):
    """In a loop that asks for one in each epoch, also in the middle of a round of groups."""
    trainer = _trainer(tmp_path)
    model, draws = trainer.start(), []
    bands = len(trainer.plan.mechanism.bands)
    assert bands > 1
    for steps in (bands - 1, bands + 2, 24 - 2 * bands - 1):
        for batch in islice(trainer.get_train_dataloader(), steps):
            draws.append([int(i) for physical in batch for i in physical["id"]])
            trainer.training_step(model, batch)
    assert len(draws) == trainer.ledger.steps > 2 * bands
    assert_turns(draws, bands)


@pytest.mark.parametrize("how", ["twice", "two loaders", "before the start"])
def test_a_batch_out_of_order_is_refused(how, tmp_path):
    trainer = _trainer(tmp_path, max_steps=24)
    early = next(iter(trainer.get_train_dataloader()))
    model = trainer.start()
    batch, other = (next(iter(trainer.get_train_dataloader())) for _ in range(2))
    if how != "before the start":
        trainer.training_step(model, batch)
    late = {"twice": batch, "two loaders": other, "before the start": early}[how]
    with pytest.raises(PrivacyError, match="use the batches of a run in order"):
        trainer.training_step(model, late)


@pytest.mark.slow
def test_units_take_turns(tmp_path):
    owners = [f"u{number}" for number in range(60) for _ in range(2)]
    trainer = trained_in(
        tmp_path,
        train_dataset=owned(owners),
        cls=RecordingTrainer,
        privacy_unit_column="user",
        **BANDED | {"expected_batch_size": 4},
    )
    bands = len(trainer.plan.mechanism.bands)
    assert bands > 1
    assert assert_turns([{owners[n] for n in draw} for draw in trainer.draws], bands)


def test_a_projection_that_is_redrawn_is_told(caplog, tmp_path):
    _trainer(tmp_path, projection="gaussian", projection_update_steps=6)
    assert "cancels only between two redraws" in caplog.text


def test_rates_are_chosen_for_what_is_left(tmp_path):
    """Less noise in the weights for a rate, so larger rates for the same noise."""
    rates = {}
    for noise in ("independent", "banded"):
        trainer = make_trainer(
            tmp_path / noise,
            model=only("bert-classifier").model(),
            train_dataset=examples_of("bert-classifier", 120),
            learning_rate=None,
            projection="principal",
            projection_update_steps=None,
            **BANDED | {"noise": noise},
        )
        trainer.suggestion()
        assert trainer.rates is not None
        rates[noise] = trainer.rates.body.rate
    own = trainer.plan.mechanism
    args = replace(trainer.args, noise="independent")
    alone = PrivacyPlan(args, MANY).mechanism.noise_multiplier
    weights = release_weights(**trainer.plan._workload())
    error = own.noise_multiplier * noise_left(own.bands, weights)
    error /= alone * noise_left((1.0,), weights)
    assert rates["banded"] > rates["independent"]
    assert rates["independent"] / rates["banded"] == pytest.approx(error, rel=0.2)


class WideForSequenceClassification(TinyForSequenceClassification):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(FEATURES, 500)
        self.head = nn.Linear(500, CLASSES)


SAVING = {"save_strategy": "steps", "save_steps": 5}


@pytest.mark.slow
def test_a_resumed_run_is_a_new_block_within_the_budget(caplog, tmp_path):
    stopped = _trainer(tmp_path, callbacks=[Watch(stop_at=5)], **SAVING)
    stopped.train()
    resumed = _trainer(tmp_path, cls=RecordingTrainer, **SAVING)
    resumed.train(resume_from_checkpoint=True)
    assert "of the 19 remaining steps" in caplog.text
    bands = len(resumed.plan.mechanism.bands)
    assert 5 % bands, "or nothing is lost"
    whole = math.ceil(24 / bands)
    left = (whole - math.ceil(5 / bands)) * bands
    ledger = Ledger.load(tmp_path / LEDGER_NAME)
    assert ledger.runs[-1].sessions == [5, min(19, left)]
    assert ledger.composed[0].counted == whole
    assert ledger.epsilon() == stopped.plan._curve.epsilon(24) <= 8.0
    assert resumed.privacy_spent().epsilon == ledger.epsilon()
    assert ledger.mechanism.coefficients == stopped.plan.mechanism.coefficients
    assert assert_turns(resumed.draws, bands)


@pytest.mark.parametrize(
    ("changes", "advised"),
    [
        ({"save_steps": 5}, True),
        ({"save_steps": 0.2}, True),  # of 24 steps
        ({"save_steps": 3}, False),
        ({"save_steps": 500}, False),
        ({"save_steps": 5, "save_strategy": "no"}, False),
        ({"save_steps": 5, "noise": "independent"}, False),
    ],
)
def test_unfavourable_save_steps_are_reported_when_a_run_starts(changes, advised, caplog, tmp_path):
    _trainer(tmp_path, **SAVING | changes).start()
    assert caplog.text.count("another multiple of 3") == advised
    assert caplog.text.count("save_steps=") == 2 * advised


@pytest.mark.slow
def test_a_resumed_run_has_no_memory_of_noise(releases, tmp_path):
    """Its first release is as that of a run that begins, and has nothing of those before it.

    5,000 numbers of noise alone: standard deviations within five of theirs, and correlations.
    """
    wide = {"method": "dp_adam", "compute_loss_func": no_loss, **SAVING}
    for stop_at, again in ((5, False), (8, True)):
        trainer = _trainer(
            tmp_path, model=WideForSequenceClassification(), callbacks=[Watch(stop_at)], **wide
        )
        trainer.train(resume_from_checkpoint=again)
    own = trainer.plan.mechanism
    factors = released_noise(own.bands, 5) * own.noise_multiplier / own.expected_batch_size
    noise = torch.stack([torch.cat([v.flatten() for v in r.values()]) for r in releases])
    count = noise.shape[1]
    for number, factor in enumerate([*factors, *factors[:3]]):
        assert float(noise[number].std()) == pytest.approx(factor, rel=5 / math.sqrt(2 * count))
    between = torch.corrcoef(noise)[5:, :5].abs()
    assert float(between.max()) < 5 / math.sqrt(count)


@pytest.mark.slow
def test_a_checkpoint_holds_no_noise(tmp_path):
    """Its files are those of a run with independent noise, and as large."""
    sizes = []
    for noise in ("independent", "banded"):
        _trainer(tmp_path / noise, noise=noise, **SAVING).train()
        folder = tmp_path / noise / "checkpoint-20"
        sizes.append({p.name: p.stat().st_size for p in folder.iterdir()})
    assert sizes[0].keys() == sizes[1].keys()
    assert sizes[0]["optimizer.pt"] == pytest.approx(sizes[1]["optimizer.pt"], abs=64)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_epsilon": None, "noise_multiplier": 1.0}, "Pass target_epsilon"),
        ({"method": "dpzero"}, "its private updates are not gradients"),
        ({"adjacency": "replace_one"}, "cannot compute epsilon for this"),
        ({"secure_noise": True}, "secure_noise"),
        ({"noise": "correlated"}, "one of"),
    ],
)
def test_what_does_not_go_with_it_is_refused(changes, words, tmp_path):
    with pytest.raises(PrivacyError, match=words):
        _trainer(tmp_path, **changes)


CHOSEN = {
    "learning_rate": None,
    "projection": "principal",
    "projection_update_steps": None,
    "noise": None,
}


def _chosen(folder, *, pretrained=True, **changes):
    model = only("bert-classifier").model()
    for name, weight in model.named_parameters():
        if "LayerNorm.weight" in name:  # which training moves
            nn.init.normal_(weight, 1.0, 0.1 if pretrained else 0.0)
    return make_trainer(
        folder,
        model=model,
        train_dataset=examples_of("bert-classifier", MANY),
        **BANDED | CHOSEN | changes,
    )


def test_noise_is_correlated_where_rates_are_chosen(tmp_path):
    """In as much memory as half of the weights take, which for this model is not much."""
    trainer = _chosen(tmp_path)
    bands = len(trainer.plan.mechanism.bands)
    assert 1 < bands <= trainer.private_run.bands_at_most()
    numbers = sum(
        math.prod(shape)
        for shape in trainer.private_run.per_sample.released_shapes(
            trainer.private_run.projectors_at(0)
        ).values()
    )
    weights = sum(p.numel() for p in trainer.model.parameters())
    most = trainer.private_run.bands_at_most()
    assert most * numbers <= weights / 2 < (most + 1) * numbers


INDEPENDENT = [
    {"update_rule": "adam"},
    {"learning_rate": 1e-2},
    {"target_epsilon": None, "noise_multiplier": 1.0},
    {"adjacency": "replace_one"},
    {"secure_noise": True},
    {"method": "dp_adam", "projection": "identity"},
    {"noise": "independent"},
    {"pretrained": False},
]


@pytest.mark.parametrize("changes", slow_but([str(own) for own in INDEPENDENT[:3]], INDEPENDENT))
def test_otherwise_it_is_independent(changes, tmp_path):
    """Also where one buffer of all the weights would be more than half of them."""
    trainer = _chosen(tmp_path, **changes)
    assert trainer.plan.mechanism.noise in (None, "secure")
    assert trainer.plan.mechanism.bands == (1.0,)
