"""What remembers examples, or knows their random numbers, releases nothing."""

import json
import random
from functools import wraps
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import TrainerCallback, set_seed

from dp_grape_hf import DPGrapeTrainer, PrivacyError
from dp_grape_hf.ledger import LEDGER_NAME, Ledger
from tests.support.models import only
from tests.support.trainers import (
    Examples,
    TinyForSequenceClassification,
    assert_refused,
    examples_of,
    make_trainer,
    points,
    spy_releases,
    trained_in,
)


def bert(**changes):
    return only("bert-classifier").model(num_hidden_layers=1, **changes)


def stacked(examples):
    return {name: torch.stack([e[name] for e in examples]) for name in ("x", "labels")}


class Noising:
    def __init__(self):
        self.generator = np.random.default_rng(0)

    def __call__(self, examples):
        batch = stacked(examples)
        noise = torch.from_numpy(self.generator.normal(size=batch["x"].shape)).float()
        return batch | {"x": batch["x"] + noise}


class Scaling:
    def __init__(self, largest=0.0):
        self.largest = largest

    def __call__(self, examples):
        batch = stacked(examples)
        self.largest = max(self.largest, float(batch["x"].abs().max()))
        return batch | {"x": batch["x"] / self.largest}


class Augmented(Examples):
    def __init__(self, examples):
        super().__init__(examples)
        self.generator = random.Random(0)

    def __getitem__(self, index):
        example = self.examples[index]
        return example | {"x": example["x"] * self.generator.choice([-1, 1])}


class InitialisedForSequenceClassification(TinyForSequenceClassification):
    def __init__(self):
        super().__init__()
        self.started = False

    def forward(self, x, labels=None):
        if self.training and not self.started:
            self.started = True
            self.head.bias.data.fill_(float(x.mean()))
        return super().forward(x, labels)


class LargestForSequenceClassification(TinyForSequenceClassification):
    def __init__(self):
        super().__init__()
        self.largest = 10.0

    def forward(self, x, labels=None):
        if self.training:
            self.largest = max(self.largest, float(x.detach().abs().max()))
        return super().forward(x / self.largest, labels)


class SelfPaced:
    """Leaves out easy examples, by a running mean."""

    def __init__(self):
        self.mean = 1.0

    def __call__(self, outputs, labels, num_items_in_batch=None):
        losses = nn.functional.cross_entropy(outputs["logits"], labels, reduction="none")
        hard = losses.detach() > self.mean
        self.mean = 0.99 * self.mean + 0.01 * float(losses.detach().mean())
        return losses * hard


class Averaging(DPGrapeTrainer):
    mean = 1.0

    def compute_loss(self, model, inputs, *args, **kwargs):
        labels = inputs.pop("labels")
        loss = nn.functional.cross_entropy(model(**inputs)["logits"], labels)
        self.mean = 0.9 * self.mean + 0.1 * float(loss.detach())
        return loss


def with_large(place):
    """Returns points of which one is large; the last is not among those that are tried first."""
    examples = points(24).examples
    examples[place] = examples[place] | {"x": examples[place]["x"] * 1000}
    return Examples(examples)


def augmented():
    return Augmented([example | {"user": i} for i, example in enumerate(points().examples)])


ONE = {"per_device_train_batch_size": 1, "expected_batch_size": 24}
UNITS = {"privacy_unit_column": "user", "expected_batch_size": 4}
REMEMBERING = {
    "noising": (lambda: {"data_collator": Noising()}, r"of the data collator \(Noising\)"),
    "scaling": (lambda: {"data_collator": Scaling()}, r"of the data collator \(Scaling\)"),
    "scaling by one example": (
        lambda: {"data_collator": Scaling(10.0), "train_dataset": with_large(-1), **ONE},
        "largest of the data collator",
    ),
    "augmented": (
        lambda: {"train_dataset": augmented(), "data_collator": stacked},
        r"generator of the train dataset \(Augmented\)",
    ),
    "augmented units": (
        lambda: {"train_dataset": augmented(), "data_collator": stacked, **UNITS},
        r"generator of the train dataset \(Augmented\)",
    ),
    "initialised": (
        lambda: {"model": InitialisedForSequenceClassification(), "noise_multiplier": 50.0},
        r"head\.bias of the model",
    ),
    "largest at first": (
        lambda: {"model": LargestForSequenceClassification(), "train_dataset": with_large(0)} | ONE,
        "largest of the model",
    ),
    "largest later": (
        lambda: (
            {"model": LargestForSequenceClassification(), "train_dataset": with_large(-1)} | ONE
        ),
        "largest of the model",
    ),
    "loss function": (lambda: {"compute_loss_func": SelfPaced()}, "mean of the loss"),
    "compute_loss": (lambda: {"cls": Averaging}, "mean of the loss"),
}


@pytest.mark.parametrize("what", REMEMBERING)
def test_what_remembers_examples_releases_nothing_of_them(what, tmp_path):
    settings, reason = REMEMBERING[what]
    assert_refused(make_trainer(tmp_path, **settings()), reason)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["noising", "scaling", "scaling by one example"])
def test_what_remembers_in_another_process_releases_nothing(what, tmp_path):
    settings, reason = REMEMBERING[what]
    assert_refused(make_trainer(tmp_path, dataloader_num_workers=1, **settings()), reason)


def test_what_a_pass_writes_into_the_config_is_taken_back(tmp_path, monkeypatch):
    model = bert()
    plain = type(model).forward

    @wraps(plain)
    def noting(self, input_ids, **inputs):
        self.config.longest = input_ids.shape[1]
        return plain(self, input_ids, **inputs)

    monkeypatch.setattr(type(model), "forward", noting)
    trainer = trained_in(tmp_path, model=model, train_dataset=examples_of("bert-classifier", 24))
    trainer.save_model()
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "longest" not in saved
    assert saved.get("problem_type") is None  # which the model's own loss notes


class Seeding(TrainerCallback):
    def on_event(self, *args, **kwargs):
        set_seed(0)

    on_train_begin = on_epoch_begin = on_step_begin = on_step_end = on_log = on_event


def test_masks_are_secret_whatever_a_callback_seeds(tmp_path, monkeypatch):
    """Dropout is the only chance in these runs but the noise, which is nearly none."""
    data, found = examples_of("bert-classifier", 8), []
    monkeypatch.setattr("dp_grape_hf.mechanism.sampling.torch.rand", _zeros)
    for number in range(2):
        torch.manual_seed(0)
        model = bert(hidden_dropout_prob=0.4)
        released = spy_releases(monkeypatch)
        trained_in(
            tmp_path / f"{number}",
            model=model,
            train_dataset=data,
            method="dp_sgd",
            noise_multiplier=1e-9,
            max_steps=2,
            callbacks=[Seeding()],
        )
        found.append(released)
    for first, second in zip(*found, strict=True):
        assert any((first[name] - second[name]).abs().max() > 1e-4 for name in first)


def _zeros(*size, generator=None, **kwargs):
    return torch.zeros(*size, **kwargs)


@pytest.mark.parametrize(
    ("declared", "sizes", "batches", "parts", "compiled"),
    [
        (16, (15, 16, 17), 4, 2, False),
        (256, (255, 256), 4, 2, False),
        (12, (12,), 2, 1, False),
        (16, (16,), 4, 1, True),
    ],
)
def test_lengths_follow_from_the_declared_number_alone(
    declared, sizes, batches, parts, compiled, tmp_path
):
    """Few physical batches have few lengths, and so have compiled runs."""
    grids = set()
    for size in sizes:
        trainer = make_trainer(
            tmp_path,
            train_dataset=points(size),
            num_samples=declared,
            expected_batch_size=declared,
            per_device_train_batch_size=declared // batches,
            torch_compile=compiled,
        )
        grids.add(trainer.get_train_dataloader().collate_fn.collate_rows.grid)
    assert [grid.parts for grid in grids] == [parts]


def _loaded(folder):
    return type(bert()).from_pretrained(folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    trainer = _again(tmp_path_factory.mktemp("run"), bert())
    trainer.train()
    return trainer


def _again(folder, model, **changes):
    data = examples_of("bert-classifier", 24)
    return make_trainer(folder, model=model, train_dataset=data, **changes)


def test_a_model_saved_without_its_ledger_says_what_was_spent(trained, tmp_path):
    trained.model.save_pretrained(tmp_path / "saved")
    note = json.loads((tmp_path / "saved" / "config.json").read_text())["dp_grape"]
    assert float(note["epsilon"]) == pytest.approx(trained.privacy_spent().epsilon, rel=1e-4)
    assert float(note["epsilon"]) >= trained.privacy_spent().epsilon
    assert note["delta"] == 1e-3
    assert note["ledger"] == trained.ledger.head
    with pytest.raises(PrivacyError, match=rf"epsilon {note['epsilon']}.*earlier_data='other'"):
        _again(tmp_path / "again", _loaded(tmp_path / "saved"))


def test_runs_compose_if_the_first_ledger_is_given(trained, tmp_path):
    trained.model.save_pretrained(tmp_path / "saved")
    live = Path(trained.args.output_dir) / LEDGER_NAME
    for changes in ({"earlier_data": "same"}, {"earlier_ledger": str(live)}):
        with pytest.raises(PrivacyError, match="earlier_"):
            _again(tmp_path / "again", _loaded(tmp_path / "saved"), **changes)
    given = {"earlier_data": "same", "earlier_ledger": str(live)}
    again = _again(tmp_path / "again", _loaded(tmp_path / "saved"), **given)
    assert again.privacy_spent().epsilon == pytest.approx(Ledger.load(live).epsilon())
    assert _again(tmp_path / "other", _loaded(tmp_path / "saved"), earlier_data="other")


def test_the_ledger_of_another_run_does_not_stand_in(trained, tmp_path):
    other = _again(tmp_path / "other", bert())
    other.train()
    other.save_model()
    trained.model.save_pretrained(tmp_path / "other")
    with pytest.raises(PrivacyError, match="says that it was trained privately"):
        _again(tmp_path / "again", _loaded(tmp_path / "other"))
    model = type(other.model)(other.model.config)
    assert _again(tmp_path / "new", model), "new weights with the config are new"


def test_a_note_is_there_from_the_first_step_on(tmp_path):
    class Saves(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                kwargs["model"].save_pretrained(tmp_path / "saved")

    trainer = _again(tmp_path / "run", bert(), callbacks=[Saves()])
    trainer.train()
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert "dp_grape" in saved
    assert float(saved["dp_grape"]["epsilon"]) >= trainer.privacy_spent().epsilon, (
        "of the whole run"
    )


def test_beside_a_ledger_no_digest_is_saved(trained, tmp_path):
    trained.save_model(tmp_path / "saved")
    note = json.loads((tmp_path / "saved" / "config.json").read_text())["dp_grape"]
    assert note.keys() == {"epsilon", "delta"}
    assert "ledger" in trained.model.config.dp_grape
