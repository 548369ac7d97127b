"""Runs whose privacy unit is named by a column, against the plain definition and plain runs."""

import datasets
import pytest
import torch
from torch.nn import functional

from dp_grape_hf import PrivacyError
from dp_grape_hf.mechanism import Streams
from tests.support.trainers import (
    SIZES,
    Examples,
    RecordingTrainer,
    TinyForSequenceClassification,
    Watch,
    assert_same_weights,
    make_trainer,
    owned,
    points,
    trained_in,
)

OWNED = {
    "privacy_unit_column": "user",
    "expected_batch_size": 3,
    "per_device_train_batch_size": 8,
    "max_steps": 4,
}


def _run(folder, **settings):
    watch = Watch()
    settings = {"train_dataset": owned(), "known_streams": Streams.seeded()} | settings
    trainer = trained_in(folder, callbacks=[watch], **OWNED | settings)
    return trainer, watch


def _of_user(weights, examples):
    """Returns the gradient of the sum of the losses of a user's examples, by plain autograd."""
    model = TinyForSequenceClassification()
    model.load_state_dict(weights)
    x, labels = (torch.stack([example[name] for example in examples]) for name in ("x", "labels"))
    functional.cross_entropy(model(x)["logits"], labels, reduction="sum").backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_a_release_is_the_clipped_sum_over_users(tmp_path, releases):
    rows = owned().examples
    listed = [{**r, "x": r["x"].tolist(), "labels": int(r["labels"])} for r in rows]
    trainer, watch = _run(
        tmp_path,
        cls=RecordingTrainer,
        train_dataset=datasets.Dataset.from_list(listed),
        method="dp_adam",
        noise_multiplier=0,
        max_grad_norm=2.0,
    )
    by_id, clipped = {row["id"]: row for row in rows}, []
    for weights, drawn, release in zip(watch.weights, trainer.draws, releases, strict=False):
        users = {by_id[i]["user"] for i in drawn}
        expected = {name: torch.zeros_like(value) for name, value in weights.items()}
        for user in users:
            own = [row for row in rows if row["user"] == user]
            assert {row["id"] for row in own} <= set(drawn)  # whole
            gradient = _of_user(weights, own)
            norm = torch.stack([value.square().sum() for value in gradient.values()]).sum().sqrt()
            clipped.append(bool(norm > 2.0))
            for name, value in gradient.items():
                expected[name] += value * min(1.0, 2.0 / norm.item()) / 3
        assert_same_weights(release, expected, atol=1e-6, rtol=1e-5)
    assert {True, False} == set(clipped)
    assert trainer.plan.mechanism.num_samples == len(SIZES)
    assert trainer.plan.mechanism.sample_rate == 3 / len(SIZES)


def test_declared_numbers_are_of_units(tmp_path):
    """An epoch has 1/q steps, rounded up; the divisor is of units, too."""
    settings = {"max_examples_per_unit": 2, "cls": RecordingTrainer, "max_steps": -1}
    trainer, _ = _run(tmp_path, num_samples=10, num_train_epochs=2, **settings)
    assert trainer.plan.mechanism.sample_rate == 0.3
    assert trainer.plan.mechanism.expected_batch_size == 3
    assert trainer.state.global_step == trainer.ledger.steps == 2 * 4
    users = {row["id"]: row["user"] for row in trainer.train_dataset.examples}
    for drawn in trainer.draws:
        owners = [users[i] for i in drawn]
        assert all(owners.count(user) <= 2 for user in owners)
    assert any(trainer.draws)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"privacy_unit_column": "owner"}, "privacy_unit_column='owner' is not in train_dataset"),
        ({"per_device_train_batch_size": 6}, "has more examples.*per_device_train_batch_size=6"),
        ({"per_device_train_batch_size": 2, "max_examples_per_unit": 3}, "has more examples"),
        ({"expected_batch_size": 9}, "expected batch size 9 is larger than the 8"),
        ({"target_delta": 0.2}, "not below 1/8"),
        ({"train_dataset": iter(())}, "without random access"),
    ],
)
def test_what_cannot_be_kept_is_refused_at_construction(settings, reason, tmp_path):
    with pytest.raises(PrivacyError, match=reason):
        make_trainer(tmp_path, **OWNED | {"train_dataset": owned()} | settings)


def test_other_data_are_read_again(tmp_path):
    rows = owned().examples
    trainer = make_trainer(tmp_path, **OWNED, train_dataset=Examples(rows))
    trainer.train_dataset = Examples([row | {"user": row["user"] + "!"} for row in rows[:-1]])
    assert len(trainer._units.order) == len(rows) - 1
    trainer.train_dataset = Examples(rows)
    assert len(trainer._units.order) == len(rows)


@pytest.mark.parametrize(
    "change",
    [list.reverse, lambda rows: rows.append(points(1).examples[0] | {"user": "late"})],
    ids=["moved", "longer"],
)
def test_data_that_changed_in_place_are_refused(change, tmp_path):
    rows = list(owned().examples)
    trainer = make_trainer(tmp_path, **OWNED, train_dataset=Examples(rows))
    change(rows)
    with pytest.raises(PrivacyError, match="in train_dataset have changed"):
        trainer.train()


def _collate(examples):
    return {name: torch.stack([e[name] for e in examples]) for name in ("x", "labels")}


def _sorted(examples):
    """The first example of the data always comes first, so that no pair with it shows anything."""
    first = owned().examples[0]["x"]
    return _collate(sorted(examples, key=lambda example: float((example["x"] - first).norm())))


def test_a_collator_that_sorts_is_refused(tmp_path):
    """It would give the row of a longer companion for that of an example."""
    with pytest.raises(PrivacyError, match="keeps their order"):
        _run(tmp_path, data_collator=_sorted)
