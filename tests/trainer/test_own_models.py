"""Models of the user's own: any module trains with nothing set but the budget."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cosine_similarity, cross_entropy

from dp_grape_hf import DPGrapeTrainer, PrivacyError
from dp_grape_hf.trainer.inputs_by_form import Form, InputsByForm
from tests.support.models import row
from tests.support.trainers import Examples, make_trainer, trained_in, weights_of

ROWS, FEATURES, WORDS = 40, 6, 11


def answer(logits, labels):
    if labels is None:
        return {"logits": logits}
    return {"loss": cross_entropy(logits, labels), "logits": logits}


def module(name, forward, **layers):
    """Returns a module of a class of that name, with this forward and these layers."""
    made = type(name, (nn.Module,), {"forward": forward})()
    for layer, value in layers.items():
        made.add_module(layer, value)
    return made


def table(labels_needed=False):
    """Numbers and categories; the categories have a length that the model insists on."""

    def forward(self, x, kind, labels=None):
        if labels_needed and labels is None:
            raise ValueError("labels must be given")
        return answer(self.net(torch.cat([x, self.kinds(kind).flatten(1)], 1)), labels)

    layers = {"kinds": nn.Embedding(WORDS, 4), "net": nn.Linear(FEATURES + 8, 2)}
    return module("Table", forward, **layers, unused=nn.Linear(3, 3))


def words():
    def forward(self, ids, mask, labels=None):
        mask = mask[..., None].float()
        mean = (self.table(ids) * mask).sum(1) / mask.sum(1)
        return answer(self.head(self.body(mean).relu()), labels)

    layers = {"table": nn.Embedding(WORDS, 16), "body": nn.Linear(16, 16)}
    return module("Words", forward, **layers, head=nn.Linear(16, 2))


def recurrent():
    """Reads a text by an LSTM, whose kernel ``vmap`` does not support."""

    def forward(self, ids, labels=None):
        return answer(self.head(self.cells(self.table(ids))[0].mean(1)), labels)

    layers = {"table": nn.Embedding(WORDS, 8), "cells": nn.LSTM(8, 8, batch_first=True)}
    return module("Recurrent", forward, **layers, head=nn.Linear(8, 2))


def towers():
    def forward(self, a, b, labels=None):
        return {"similarity": cosine_similarity(self.left(a), self.right(b))}

    return module("Towers", forward, left=nn.Linear(FEATURES, 5), right=nn.Linear(FEATURES, 5))


def deep(inverting=False):
    def forward(self, x, labels=None):
        if inverting:
            square = self.hidden.weight.detach().T @ self.hidden.weight.detach()
            x = x * torch.linalg.inv(square).trace().tanh()
        hidden = self.first(2 * x.flatten(1) - 1).relu()
        return answer(self.last(self.hidden(hidden).relu()), labels)

    layers = {"first": nn.Linear(48, 8), "hidden": nn.Linear(8, 8), "last": nn.Linear(8, 2)}
    return module("Deep", forward, **layers)


def of_towers(outputs, labels, num_items_in_batch=None):
    return (outputs["similarity"] - labels).square()


def table_row(i):
    generator = torch.Generator().manual_seed(i)
    x = torch.randn(FEATURES, generator=generator)
    kind = torch.randint(WORDS, (2,), generator=generator)
    return {"x": x, "kind": kind, "labels": int(x[0] > 0)}


def numbers_row(i):
    return {"x": torch.randn(48, generator=torch.Generator().manual_seed(i)), "labels": i % 2}


def pixels_row(i):
    return {"x": numbers_row(i)["x"].view(3, 4, 4), "labels": i % 2}


def words_row(i, length=7):
    ids = (torch.arange(length) * (i + 1)) % WORDS
    return {"ids": ids, "mask": torch.ones(length, dtype=torch.long), "labels": i % 2}


def ids_row(i):
    return {name: value for name, value in words_row(i).items() if name != "mask"}


def towers_row(i):
    x = table_row(i)["x"]
    return {"a": x, "b": x.flip(0), "labels": float(i % 2)}


def trainer_of(folder, model, row, **more):
    rows = [row(i) for i in range(ROWS)]
    settings = {"max_steps": 2, "model": model, "train_dataset": rows} | more
    return make_trainer(folder, chooses=True, **settings)


@pytest.mark.parametrize(
    ("model", "row", "loss"),
    [
        (table, table_row, None),
        (words, words_row, None),
        (recurrent, ids_row, None),
        (towers, towers_row, of_towers),
    ],
)
def test_a_module_trains_with_nothing_set(model, row, loss, tmp_path, caplog):
    trainer = trainer_of(tmp_path, model(), row, compute_loss_func=loss)
    before = weights_of(trainer.model)
    trainer.train()
    after = weights_of(trainer.model)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name for name in before if not name.startswith("unused")} == moved
    assert all(weight.isfinite().all() for weight in after.values())
    assert trainer.args.projection == "principal"
    assert trainer.args.engine == ("functorch" if loss is None else "layerwise")
    assert (trainer.rates.head is None) == (model is towers)
    notices = [r.getMessage() for r in caplog.records if r.name.startswith("dp_grape_hf")]
    told = {table: ["unused"], recurrent: ["one example after another"]}.get(model, [])
    assert all(words in notice for words, notice in zip(told, notices, strict=True)), notices


def test_of_examples_neither_values_nor_lengths_reach_what_is_measured(tmp_path):
    found = []
    for length, first in ((7, 0), (9, 3)):
        torch.manual_seed(0)
        trainer = trainer_of(
            tmp_path, words(), lambda i, n=length, k=first: words_row(i + k, n), max_steps=1
        )
        trainer._make_ready()
        batches = list(trainer._public_inputs()())
        found.append((batches, trainer.rates))
    (ours, rates), (theirs, others) = found
    assert rates == others
    assert len({batch["ids"].shape[1] for batch in ours}) > 1
    for one, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def denoiser():
    """A UNet in small, without linear layers; its forward takes no labels."""

    def forward(self, pixels):
        noise = torch.randn_like(pixels)
        predicted = self.up(torch.relu(self.down(pixels + noise)))
        return {"loss": (predicted - noise).square().mean()}

    down, up = nn.Conv2d(1, 4, 3, padding=1, stride=2), nn.ConvTranspose2d(4, 1, 2, stride=2)
    return module("Denoiser", forward, down=down, up=up)


def image_row(i):
    return {"pixels": torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(i))}


def test_a_denoiser_that_takes_no_labels_trains(tmp_path, caplog):
    trainer = trainer_of(tmp_path, denoiser(), image_row)
    trainer.train()
    assert 0 < trainer.privacy_spent().epsilon <= trainer.args.target_epsilon
    assert "has no linear layer" in caplog.text


def predicts():
    def forward(self, pixels):
        return self.layer(pixels.reshape(-1, 8, 8).mean(1))

    return module("Predicts", forward, layer=nn.Linear(8, 1))


@pytest.mark.parametrize(
    ("model", "row", "loss", "message"),
    [
        (towers, towers_row, {}, r"no loss.*compute_loss_func=f"),
        (predicts, image_row, {}, "loss of Predicts is not known per sample"),
        (denoiser, image_row, {"loss": nn.MSELoss()}, "SentenceTransformerTrainer"),
    ],
)
def test_a_module_of_unknown_loss_is_refused_with_remedy(model, row, loss, message, tmp_path):
    with pytest.raises(PrivacyError, match=message):
        trainer_of(tmp_path, model(), row, **loss)


def test_a_given_loss_gets_labels_that_forward_ignores(tmp_path):
    rows = [{"input": torch.randn(FEATURES), "labels": i % 2} for i in range(ROWS)]
    model = nn.Sequential(nn.Linear(FEATURES, 4), nn.Linear(4, 2))

    def loss(outputs, labels):
        return cross_entropy(outputs, labels, reduction="none")

    trainer = trained_in(
        tmp_path, model=model, train_dataset=Examples(rows), compute_loss_func=loss
    )
    assert trainer.evaluate(Examples([{**row, "input": -row["input"]} for row in rows[:4]]))


class Remembers(Examples):
    def __init__(self, examples):
        super().__init__(examples)
        self.reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


def test_data_that_remember_the_first_example_are_refused(tmp_path):
    trainer = trainer_of(tmp_path, words(), words_row)
    trainer.train_dataset = Remembers([words_row(i) for i in range(ROWS)])
    trainer._inputs = None
    with pytest.raises(PrivacyError, match="reads"):
        trainer._public_inputs()


def test_synthetic_tokens_are_in_the_vocabulary_and_masks_are_ones():
    integers = torch.long
    forms = {
        "ids": Form((7,), integers),
        "mask": Form((7,), integers),
        "labels": Form((), integers),
    }
    for batch in InputsByForm(words(), forms, 0)():
        assert batch.keys() == {"ids", "mask"}
        assert int(batch["ids"].max()) == WORDS - 1
        assert (batch["mask"] == 1).all()
    kinds = {"x": Form((FEATURES,), torch.float32), "kind": Form((2,), integers)}
    assert {batch["kind"].shape[1] for batch in InputsByForm(table(), kinds, 0)()} == {2}


def test_a_public_example_is_read_instead_of_the_first(tmp_path):
    example = {**table_row(0), "x": torch.zeros(FEATURES, dtype=torch.float64)}
    trainer = trainer_of(tmp_path, table(), table_row, public_example=table_row(1))
    assert next(iter(trainer._public_inputs()()))["x"].dtype == torch.float32
    with pytest.raises(PrivacyError, match="projection='principal'"):
        trainer_of(tmp_path, table(), table_row, public_example=example, projection="principal")


@pytest.mark.parametrize(
    ("model", "row", "more", "projected"),
    [
        (table, table_row, {}, []),  # the layer reads numbers beside embeddings
        (words, words_row, {}, ["body"]),
        (towers, towers_row, {"compute_loss_func": of_towers}, []),
        (deep, numbers_row, {}, ["hidden"]),
        (deep, pixels_row, {}, ["hidden"]),
        (deep, numbers_row, {"public_dataset": [numbers_row(-1)] * 8}, ["first", "hidden"]),
        (deep, numbers_row, {"optim_target_modules": ["first", "last"]}, ["first", "last"]),
    ],
)
def test_heads_and_layers_that_read_numbers_are_not_projected(
    model, row, more, projected, tmp_path
):
    trainer = trainer_of(tmp_path, model(), row, projection_rank=2, **more)
    trainer.start()
    assert [*trainer.private_run.ranks] == [f"{name}.weight" for name in projected]


def test_a_module_that_fails_with_zero_weights_can_be_trained(tmp_path):
    torch.manual_seed(0)
    trainer = trainer_of(tmp_path, deep(inverting=True), numbers_row, projection_rank=2)
    trainer.train()
    assert "first.weight" in trainer.private_run.ranks


def test_a_module_that_cannot_be_measured_trains_by_norms(tmp_path, caplog):
    trainer = trainer_of(tmp_path, table(labels_needed=True), table_row)
    (notice,) = [r.getMessage() for r in caplog.records if r.name.startswith("dp_grape_hf.trainer")]
    assert "labels must be given" in notice
    assert "gaussian" in notice
    assert "public_example=" in notice
    trainer.model.unused.requires_grad_(False)
    trainer.train()
    assert trainer.ledger.mechanism.projection == "gaussian"
    assert trainer.rates.body.changes == "weights"


def test_integer_labels_of_several_classes_are_refused_before_any_choice(tmp_path, monkeypatch):
    model = row("BERT, multi-label classification").model()
    monkeypatch.setattr(DPGrapeTrainer, "_make_parts", lambda self: pytest.fail("it chose"))
    rows = [{"input_ids": [1, 2, 3], "labels": [0, 1, 1]}] * ROWS
    with pytest.raises(PrivacyError, match=r"labels are int64.*labels float"):
        trainer_of(tmp_path, model, rows.__getitem__)


class Weighted(DPGrapeTrainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        labels = inputs.pop("labels")
        logits = model(**inputs)["logits"]
        return cross_entropy(logits, labels, weight=torch.tensor([1.0, 5.0]))


def test_class_weights_and_used_folders_are_refused_before_any_choice(tmp_path, monkeypatch):
    make_trainer(tmp_path / "used", max_steps=1).train()
    used = make_trainer(tmp_path / "used")
    weighted = trainer_of(tmp_path / "new", words(), words_row, cls=Weighted)
    for early in ("_make_ready", "_try_one_example"):
        monkeypatch.setattr(DPGrapeTrainer, early, lambda self: pytest.fail("it chose"))
    with pytest.raises(PrivacyError, match="belongs to another run"):
        used.train()
    with pytest.raises(PrivacyError, match="belongs to another run"):
        make_trainer(tmp_path / "used", do_train=True)
    with pytest.raises(PrivacyError, match="not the mean over a batch"):
        weighted.train()
