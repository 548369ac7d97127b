"""A model as it comes trains, with what takes no part in its loss frozen and named."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from dp_grape_hf.errors import UnsupportedModelError
from recipes.models.zoo import Row, rows
from recipes.models.zoo_wide import WIDE
from tests.support.trainers import Examples, make_trainer, weights_of

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # vmap

LOGGER = "dp_grape_hf.per_sample.unused"


def row(name: str) -> Row:
    return next(entry for entry in rows(WIDE) if str(entry) == name)


def as_it_comes(entry: Row) -> Any:
    model = entry.model()
    for name, parameter in model.named_parameters():
        if any(part in name for part in entry.family.without_part):
            parameter.requires_grad_(True)
    return model


def examples(entry: Row, count: int = 12) -> Examples:
    batch = entry.batch(count)
    return Examples([{name: value[i] for name, value in batch.items()} for i in range(count)])


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        ("DINOv2, image classification", "dinov2.embeddings.mask_token"),
        ("Wav2Vec2, classification of waves", "wav2vec2.masked_spec_embed"),
    ],
)
@pytest.mark.parametrize("method", ["dp_adam", "dp_grape"])
def test_a_model_with_a_mask_token_trains_as_it_comes(
    name: str, frozen: str, method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry = row(name)
    model = as_it_comes(entry)
    before = weights_of(model)
    with caplog.at_level(logging.WARNING, LOGGER):
        trainer = make_trainer(
            tmp_path, model=model, train_dataset=examples(entry), method=method, max_steps=2
        )
        trainer.train()
    told = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert len(told) == 1
    assert told[0].endswith(f"train them: {frozen}.")
    assert frozen not in trainer.private_run.trainable
    after = weights_of(model)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == before.keys() - {frozen} - {
        name for name, p in model.named_parameters() if not p.requires_grad
    }


def test_what_is_frozen_does_not_depend_on_the_examples(tmp_path: Path) -> None:
    """Whatever they hold, and in what order; the names of the model's inputs count."""
    entry, found = row("DINOv2, image classification"), []
    for value in (0.0, 1e3, float("nan")):
        data = examples(entry)
        for example in data.examples:
            example["pixel_values"] = torch.full_like(example["pixel_values"], value)
        trainer = make_trainer(tmp_path, model=as_it_comes(entry), train_dataset=data)
        found.append([*trainer.private_run.trainable])
    assert found[0] == found[1] == found[2]
    assert "dinov2.embeddings.mask_token" not in found[0]


def test_an_input_that_is_not_known_leaves_all_as_it_was(tmp_path: Path) -> None:
    """Masked positions reach the mask token, which nobody can tell before they are there."""
    entry = row("DINOv2, image classification")
    data = examples(entry)
    for example in data.examples:
        example["bool_masked_pos"] = torch.tensor([True, False, False, True])
    trainer = make_trainer(
        tmp_path, model=as_it_comes(entry), train_dataset=data, remove_unused_columns=False
    )
    assert "dinov2.embeddings.mask_token" in trainer.private_run.trainable


def test_examples_that_reach_what_was_frozen_end_the_run_before_a_release(
    tmp_path: Path,
) -> None:
    entry = row("DINOv2, image classification")
    model = as_it_comes(entry)
    trainer = make_trainer(tmp_path, model=model, train_dataset=examples(entry))
    trainer._frozen += ("classifier.weight",)
    with pytest.raises(UnsupportedModelError, match=r"classifier\.weight was frozen"):
        trainer.train()
    assert trainer.ledger.steps == 0
