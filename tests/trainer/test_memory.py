"""What remembers examples, or knows their random numbers, releases nothing."""

import json
import random
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import TrainerCallback, set_seed

from dp_grape_hf import DPGrapeTrainer, PrivacyError
from dp_grape_hf.ledger import LEDGER_NAME, Ledger
from tests.support.marks import slow_but
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

Batch = dict[str, Tensor]


def bert(**changes: Any) -> Any:
    return only("bert-classifier").model(num_hidden_layers=1, **changes)


def stacked(examples: list[Any]) -> Batch:
    return {name: torch.stack([e[name] for e in examples]) for name in ("x", "labels")}


# ---- Collators and data sets ----


class Noising:
    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __call__(self, examples: list[Any]) -> Batch:
        batch = stacked(examples)
        noise = torch.from_numpy(self.generator.normal(size=batch["x"].shape)).float()
        return batch | {"x": batch["x"] + noise}


class Scaling:
    def __init__(self, largest: float = 0.0) -> None:
        self.largest = largest

    def __call__(self, examples: list[Any]) -> Batch:
        batch = stacked(examples)
        self.largest = max(self.largest, float(batch["x"].abs().max()))
        return batch | {"x": batch["x"] / self.largest}


class Augmented(Examples):
    def __init__(self, examples: list[Any]) -> None:
        super().__init__(examples)
        self.generator = random.Random(0)

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = self.examples[index]
        return example | {"x": example["x"] * self.generator.choice([-1, 1])}


@pytest.mark.parametrize("workers", slow_but(("0",), [0, 1]))
@pytest.mark.parametrize("collator", [Noising, Scaling])
def test_a_collator_that_remembers_releases_nothing(
    collator: Any, workers: int, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, data_collator=collator(), dataloader_num_workers=workers)
    assert_refused(trainer, rf"of the data collator \({collator.__name__}\)")


@pytest.mark.parametrize("workers", slow_but(("0",), [0, 1]))
def test_a_collator_that_remembers_one_example_is_stopped_by_it(
    workers: int, tmp_path: Path
) -> None:
    examples = points(24).examples
    examples[-1] = examples[-1] | {"x": examples[-1]["x"] * 1000}  # is not among those tried first
    trainer = make_trainer(
        tmp_path,
        data_collator=Scaling(10.0),  # which one example alone exceeds
        train_dataset=Examples(examples),
        dataloader_num_workers=workers,
        per_device_train_batch_size=1,
        expected_batch_size=24,
    )
    assert_refused(trainer, "largest of the data collator")


@pytest.mark.parametrize("unit", [None, "user"])
def test_a_data_set_that_remembers_releases_nothing(unit: str | None, tmp_path: Path) -> None:
    rows = [example | {"user": number} for number, example in enumerate(points().examples)]
    units: Any = {"privacy_unit_column": unit, "expected_batch_size": 4} if unit else {}
    data = Augmented(rows)
    trainer = make_trainer(tmp_path, train_dataset=data, data_collator=stacked, **units)
    assert_refused(trainer, r"generator of the train dataset \(Augmented\)")


# ---- Models and losses ----


class InitialisedForSequenceClassification(TinyForSequenceClassification):
    def __init__(self) -> None:
        super().__init__()
        self.started = False

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        if self.training and not self.started:
            self.started = True
            self.head.bias.data.fill_(float(x.mean()))
        return super().forward(x, labels)


class LargestForSequenceClassification(TinyForSequenceClassification):
    def __init__(self) -> None:
        super().__init__()
        self.largest = 10.0

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        if self.training:
            self.largest = max(self.largest, float(x.detach().abs().max()))
        return super().forward(x / self.largest, labels)


class SelfPaced:
    """Leaves out easy examples, by a running mean."""

    def __init__(self) -> None:
        self.mean = 1.0

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        losses = nn.functional.cross_entropy(outputs["logits"], labels, reduction="none")
        hard = losses.detach() > self.mean
        self.mean = 0.99 * self.mean + 0.01 * float(losses.detach().mean())
        return losses * hard


def test_a_model_that_its_first_batch_initialises_is_refused(tmp_path: Path) -> None:
    model = InitialisedForSequenceClassification()
    trainer = make_trainer(tmp_path, model=model, noise_multiplier=50.0)
    assert_refused(trainer, r"head\.bias of the model")


@pytest.mark.parametrize("first", [True, False])
def test_a_model_that_remembers_in_an_attribute_is_stopped(first: bool, tmp_path: Path) -> None:
    """Before the first step, or by the example that changes it."""
    examples = points(24).examples
    place = 0 if first else -1
    examples[place] = examples[place] | {"x": examples[place]["x"] * 1000}
    trainer = make_trainer(
        tmp_path,
        model=LargestForSequenceClassification(),
        train_dataset=Examples(examples),
        per_device_train_batch_size=1,
        expected_batch_size=24,
    )
    assert_refused(trainer, "largest of the model")


class Averaging(DPGrapeTrainer):
    mean = 1.0

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        loss = nn.functional.cross_entropy(model(**inputs)["logits"], labels)
        self.mean = 0.9 * self.mean + 0.1 * float(loss.detach())
        return loss


@pytest.mark.parametrize("where", [{"compute_loss_func": SelfPaced()}, {"cls": Averaging}])
def test_a_loss_that_remembers_is_refused(where: dict[str, Any], tmp_path: Path) -> None:
    assert_refused(make_trainer(tmp_path, **where), "mean of the loss")


def test_what_a_pass_writes_into_the_config_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bert()
    plain = type(model).forward

    @wraps(plain)
    def noting(self: Any, input_ids: Tensor, **inputs: Any) -> Any:
        self.config.longest = input_ids.shape[1]
        return plain(self, input_ids, **inputs)

    monkeypatch.setattr(type(model), "forward", noting)
    trainer = trained_in(tmp_path, model=model, train_dataset=examples_of("bert-classifier", 24))
    trainer.save_model()
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "longest" not in saved
    assert saved.get("problem_type") is None  # which the model's own loss notes


class Seeding(TrainerCallback):
    def on_event(self, *args: Any, **kwargs: Any) -> None:
        set_seed(0)

    on_train_begin = on_epoch_begin = on_step_begin = on_step_end = on_log = on_event


def test_masks_are_secret_whatever_a_callback_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def _zeros(*size: Any, generator: Any = None, **kwargs: Any) -> Tensor:
    return torch.zeros(*size, **kwargs)


@pytest.mark.parametrize(("declared", "sizes"), [(16, (15, 16, 17)), (256, (255, 256))])
def test_lengths_follow_from_the_declared_number_alone(
    declared: int, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    grids = set()
    for size in sizes:
        trainer = make_trainer(
            tmp_path,
            train_dataset=points(size),
            num_samples=declared,
            expected_batch_size=declared,
            per_device_train_batch_size=declared // 4,
        )
        grids.add(trainer.get_train_dataloader().collate_fn.collate_rows.grid)
    assert len(grids) == 1


# ---- What a model was trained with ----


def _loaded(folder: Path) -> Any:
    return type(bert()).from_pretrained(folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    trainer = _again(tmp_path_factory.mktemp("run"), bert())
    trainer.train()
    return trainer


def _again(folder: Path, model: Any, **changes: Any) -> Any:
    data = examples_of("bert-classifier", 24)
    return make_trainer(folder, model=model, train_dataset=data, **changes)


def test_a_model_saved_without_its_ledger_says_what_was_spent(trained: Any, tmp_path: Path) -> None:
    trained.model.save_pretrained(tmp_path / "saved")
    note = json.loads((tmp_path / "saved" / "config.json").read_text())["dp_grape"]
    assert float(note["epsilon"]) == pytest.approx(trained.privacy_spent().epsilon, rel=1e-4)
    assert float(note["epsilon"]) >= trained.privacy_spent().epsilon
    assert note["delta"] == 1e-3
    assert note["ledger"] == trained.ledger.head
    with pytest.raises(PrivacyError, match=rf"epsilon {note['epsilon']}.*earlier_data='other'"):
        _again(tmp_path / "again", _loaded(tmp_path / "saved"))


def test_runs_compose_if_the_first_ledger_is_given(trained: Any, tmp_path: Path) -> None:
    trained.model.save_pretrained(tmp_path / "saved")
    live = Path(trained.args.output_dir) / LEDGER_NAME
    for changes in ({"earlier_data": "same"}, {"earlier_ledger": str(live)}):
        with pytest.raises(PrivacyError, match="earlier_"):
            _again(tmp_path / "again", _loaded(tmp_path / "saved"), **changes)
    given: Any = {"earlier_data": "same", "earlier_ledger": str(live)}
    again = _again(tmp_path / "again", _loaded(tmp_path / "saved"), **given)
    assert again.privacy_spent().epsilon == pytest.approx(Ledger.load(live).epsilon())
    assert _again(tmp_path / "other", _loaded(tmp_path / "saved"), earlier_data="other")


def test_the_ledger_of_another_run_does_not_stand_in(trained: Any, tmp_path: Path) -> None:
    other = _again(tmp_path / "other", bert())
    other.train()
    other.save_model()
    trained.model.save_pretrained(tmp_path / "other")
    with pytest.raises(PrivacyError, match="says that it was trained privately"):
        _again(tmp_path / "again", _loaded(tmp_path / "other"))


def test_a_note_is_there_from_the_first_step_on(tmp_path: Path) -> None:
    class Saves(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                kwargs["model"].save_pretrained(tmp_path / "saved")

    trainer = _again(tmp_path / "run", bert(), callbacks=[Saves()])
    trainer.train()
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert "dp_grape" in saved
    assert float(saved["dp_grape"]["epsilon"]) >= trainer.privacy_spent().epsilon, (
        "of the whole run"
    )


def test_a_new_model_with_a_trained_models_config_is_new(tmp_path: Path) -> None:
    model = bert()
    _again(tmp_path / "first", model).train()
    assert _again(tmp_path / "second", type(model)(model.config))


def test_beside_a_ledger_no_digest_is_saved(trained: Any, tmp_path: Path) -> None:
    trained.save_model(tmp_path / "saved")
    note = json.loads((tmp_path / "saved" / "config.json").read_text())["dp_grape"]
    assert note.keys() == {"epsilon", "delta"}
    assert "ledger" in trained.model.config.dp_grape
