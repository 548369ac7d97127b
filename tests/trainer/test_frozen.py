"""A model as it comes trains, with what takes no part in its loss frozen and named."""

from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import BertConfig, BertForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutput

from dp_grape_hf.errors import UnsupportedModelError
from tests.models.zoo import BERT, build, texts
from tests.support.models import row
from tests.support.trainers import Examples, assert_refused, make_trainer, trained_in, weights_of

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # vmap

LOGGER = "dp_grape_hf.gradients.checks.unused"


def as_it_comes(entry):
    model = entry.model()
    for name, parameter in model.named_parameters():
        if any(part in name for part in entry.family.without_part):
            parameter.requires_grad_(True)
    return model


def examples(entry, count=12):
    batch = entry.batch(count)
    return Examples([{name: value[i] for name, value in batch.items()} for i in range(count)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "frozen", "method"),
    [
        ("DINOv2, image classification", "dinov2.embeddings.mask_token", "dp_grape"),
        ("Wav2Vec2, classification of waves", "wav2vec2.masked_spec_embed", "dp_adam"),
    ],
)
def test_a_model_with_a_mask_token_trains_as_it_comes(name, frozen, method, tmp_path, caplog):
    entry = row(name)
    model = as_it_comes(entry)
    before = weights_of(model)
    trainer = trained_in(
        tmp_path, model=model, train_dataset=examples(entry), method=method, max_steps=2
    )
    told = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert len(told) == 1
    assert told[0].endswith(f"frozen: {frozen}. Noise alone would have trained them.")
    assert frozen not in trainer.private_run.trainable
    after = weights_of(model)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == before.keys() - {frozen} - {
        name for name, p in model.named_parameters() if not p.requires_grad
    }


SIDE = 2  # numbers


class SideForSequenceClassification(BertForSequenceClassification):
    """Adds something it makes of ``side``, which an example need not have."""

    def __init__(self, config):
        super().__init__(config)
        self.side = nn.Linear(SIDE, config.num_labels)

    def forward(self, input_ids, attention_mask=None, side=None, labels=None):
        logits = super().forward(input_ids, attention_mask=attention_mask).logits
        if side is not None:
            logits = logits + self.side(side)
        loss = None if labels is None else functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def some_with_side(which, seed=0, count=12):
    batch = texts(count, seed=seed, target="class")
    found = [{name: value[i] for name, value in batch.items()} for i in range(count)]
    for i in which:
        found[i]["side"] = torch.ones(SIDE)
    return Examples(found)


def stacked(examples):
    names = {name for example in examples for name in example}
    none = {"side": torch.zeros(SIDE)}
    return {name: torch.stack([(none | e)[name] for e in examples]) for name in sorted(names)}


@pytest.mark.slow
@pytest.mark.parametrize(("public", "size"), [(None, 1), ((0,), 4)])
def test_trained_parameters_do_not_depend_on_optional_inputs_of_examples(public, size, tmp_path):
    """None, the first or all of the rows: the same is trained, or the run refused."""
    settings = {"projection": "principal", "projection_update_steps": None}
    if public is not None:
        settings["public_dataset"] = some_with_side(public, seed=1, count=4)
    ran = 0
    for number, which in enumerate(((), (0,), range(12))):
        model = build(SideForSequenceClassification, BertConfig, BERT)
        before = weights_of(model)
        trainer = make_trainer(
            tmp_path / str(number),
            model=model,
            train_dataset=some_with_side(which),
            data_collator=stacked,
            per_device_train_batch_size=size,
            max_steps=2,
            **settings,
        )
        assert trainer.private_run.trainable.keys() == before.keys()
        with suppress(UnsupportedModelError):  # what the rows that are tried do not use
            trainer.train()
            ran += 1
            moved = {n for n, p in weights_of(model).items() if not torch.equal(before[n], p)}
            assert moved == before.keys()
    assert ran


@pytest.mark.slow
def test_parameters_of_an_absent_input_are_frozen_by_hand(tmp_path):
    model = build(SideForSequenceClassification, BertConfig, BERT)
    settings = {"model": model, "train_dataset": some_with_side(()), "data_collator": stacked}
    with pytest.raises(UnsupportedModelError, match=r"side\.weight, side\.bias\. Noise alone"):
        make_trainer(tmp_path, **settings).train()
    model.side.requires_grad_(False)
    make_trainer(tmp_path, **settings).train()


def test_data_with_an_input_unknown_to_forward_are_refused(tmp_path):
    """Masked positions reach the mask token, which nothing public tells."""
    entry = row("DINOv2, image classification")
    data = examples(entry)
    for example in data.examples:
        example["bool_masked_pos"] = torch.tensor([True, False, False, True])
    trainer = make_trainer(
        tmp_path, model=as_it_comes(entry), train_dataset=data, remove_unused_columns=False
    )
    assert_refused(trainer, "mask_token was frozen")
