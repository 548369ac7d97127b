"""Runs whose P has principal directions: of what it is a function, and what becomes of it."""

import copy

import pytest
import torch

from dp_grape_hf import PrivacyError, UnsupportedModelError
from dp_grape_hf.ledger import CARD_NAME, LEDGER_NAME, Ledger
from dp_grape_hf.ledger.entries import Projection
from dp_grape_hf.projections import default_targets, principal_directions, synthetic_batches
from dp_grape_hf.trainer.data import refuse_public_dataset
from tests.support.models import only
from tests.support.trainers import Examples, Watch, examples_of, make_args, make_trainer

BERT = "bert-classifier"
SETTINGS = {"projection": "principal", "projection_update_steps": None}


def trainer_of(folder, **changes):
    settings = {"model": only(BERT).model(), "train_dataset": examples_of(BERT, 24)} | SETTINGS
    return make_trainer(folder, **settings | changes)


def matrices(trainer):
    return {name: p.matrix for name, p in trainer.private_run.projectors.items()}


def digests(folder):
    entries = (link.entry for link in Ledger.load(folder / LEDGER_NAME).links)
    return [entry.sha256 for entry in entries if isinstance(entry, Projection)]


@pytest.mark.slow
def test_p_does_not_depend_on_the_training_data(tmp_path):
    fewer = {"train_dataset": examples_of(BERT, 8, seed=5), "num_samples": 24, "max_grad_norm": 0.1}
    one, other = trainer_of(tmp_path / "one"), trainer_of(tmp_path / "other", **fewer)
    for trainer in (one, other):
        trainer.train()
    assert set(matrices(one)) == set(default_targets(one.model))
    assert all(torch.equal(matrices(one)[name], p) for name, p in matrices(other).items())
    assert digests(tmp_path / "one") == digests(tmp_path / "other")
    assert len(digests(tmp_path / "one")) == 1


@pytest.mark.slow
def test_p_depends_only_on_initial_weights_and_synthetic_inputs(tmp_path):
    """Another seed is another sample of the same inputs."""
    model = only(BERT).model()
    expected = principal_directions(
        model.eval(), dict.fromkeys(default_targets(model), 2), lambda: synthetic_batches(model)
    )
    one, other = (trainer_of(tmp_path / str(seed), projection_seed=seed) for seed in (0, 1))
    for trainer in (one, other):
        trainer.train()
    for name, p in matrices(one).items():
        assert torch.equal(p, expected[name].directions)
        assert not torch.equal(p, matrices(other)[name])
        assert torch.linalg.svdvals(p.T @ matrices(other)[name])[0] > 0.9


@pytest.mark.slow
def test_directions_of_current_weights_are_measured_every_f_steps(tmp_path):
    trainer_of(tmp_path, projection_update_steps=2, learning_rate=0.3, max_steps=5).train()
    found = digests(tmp_path)
    assert len(found) == len(set(found)) == 3


@pytest.mark.slow
def test_another_p_than_the_ledger_has_is_refused(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer_of(tmp_path, callbacks=[Watch(stop_at=2)], **settings).train()
    path = tmp_path / "checkpoint-2" / "optimizer.pt"
    state = torch.load(path, weights_only=True)
    for matrix in state["projection"]["matrices"].values():
        matrix.neg_()
    torch.save(state, path)
    with pytest.raises(PrivacyError, match="The projection has the digest"):
        trainer_of(tmp_path, **settings).train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_a_public_dataset_is_measured_on_and_named(tmp_path):
    public = examples_of(BERT, 10, seed=9)
    trainer = trainer_of(tmp_path, public_dataset=public, eval_strategy="no")
    trainer.train()
    trainer.save_model()
    rows = {key: torch.stack([row[key] for row in public.examples]) for key in public[0]}
    rows.pop("labels")
    expected = principal_directions(
        only(BERT).model().eval(), dict.fromkeys(matrices(trainer), 2), lambda: [rows]
    )
    for name, p in matrices(trainer).items():
        assert torch.linalg.svdvals(p.T @ expected[name].directions).min() > 0.999
    assert Ledger.load(tmp_path / LEDGER_NAME).mechanism.public_dataset == "Examples, 10 examples"
    card = (tmp_path / CARD_NAME).read_text()
    assert "| Not protected, as declared public | Examples, 10 examples |" in card


def test_rows_of_the_training_data_are_not_public(tmp_path):
    """Of those that are measured on; which rows are the same is in ``test_held_out``."""
    data, other = examples_of(BERT, 24), examples_of(BERT, 511, seed=9)
    without = [{k: v for k, v in row.items() if k != "labels"} for row in data.examples]
    for copied in (data, copy.deepcopy(data), Examples([*other.examples, without[23]])):
        with pytest.raises(PrivacyError, match=r"public_dataset\[(0|511)\] has the contents"):
            trainer_of(tmp_path, train_dataset=data, public_dataset=copied)
    trainer_of(tmp_path, train_dataset=data, public_dataset=other)


def test_what_is_shared_is_not_quoted():
    rows = [{"text": "my secret"}]
    with pytest.raises(PrivacyError, match=r"public_dataset\[0\]") as caught:
        refuse_public_dataset(rows, [*rows, {"text": "more"}], make_args("unused", **SETTINGS))
    assert "secret" not in str(caught.value)


def test_a_public_dataset_that_nothing_looks_at_is_refused(tmp_path):
    with pytest.raises(PrivacyError, match="projection='gaussian' does not use it"):
        trainer_of(tmp_path, projection="gaussian", public_dataset=examples_of(BERT, 4))


def test_a_model_failing_on_synthetic_inputs_is_refused_with_cause(tmp_path):
    model = only(BERT).model()
    model.bert.register_forward_pre_hook(_needs_more, with_kwargs=True)
    with pytest.raises(UnsupportedModelError, match="where is token_type_ids"):
        trainer_of(tmp_path, model=model).train()


def _needs_more(module, args, kwargs):
    if "token_type_ids" not in kwargs:
        raise ValueError("where is token_type_ids")
