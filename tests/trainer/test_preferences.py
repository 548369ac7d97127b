"""TRL's training on preferences made private: a pair of texts is one example."""

import datasets
import pytest
import torch

from dp_grape_hf import PrivacyError, UnsupportedModelError
from dp_grape_hf.gradients import PREFERENCES, functions, make_engine
from dp_grape_hf.gradients.losses.pairs import by_halves, side_by_side
from tests.models.matrix import dense, projectors_for
from tests.support.marks import slow_but
from tests.support.oracles import relative_error
from tests.support.sft import on_pairs, pairs, send_nothing
from tests.support.trainers import assert_refused

pytest.importorskip("trl", reason="TRL is an optional extra")
peft = pytest.importorskip("peft")

each_kind = pytest.mark.parametrize("kind", ["dpo", "reward"])


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    send_nothing(monkeypatch)


def batch_of(trainer, rows=(0, 1, 2, 5)):
    collated = trainer.data_collator([trainer.train_dataset[i] for i in rows])
    return trainer._prepare_inputs(side_by_side(collated, len(rows)))


def one_by_one(trainer, batch):
    model, losses = trainer.model, []
    found = {n: [] for n in trainer.private_run.trainable}
    for i in range(len(batch["input_ids"])):
        own = trainer.private_run.per_sample.loss.of_batch
        loss = own(model, {name: value[i : i + 1] for name, value in batch.items()})
        losses.append(loss.detach())
        weights = [model.get_parameter(name) for name in found]
        for name, gradient in zip(found, torch.autograd.grad(loss, weights), strict=True):
            found[name].append(gradient)
    return torch.stack(losses), {name: torch.stack(values) for name, values in found.items()}


@pytest.mark.parametrize(
    ("kind", "engine", "rank"),
    [("dpo", "layerwise", 2), ("dpo", "functorch", None), ("reward", "layerwise", None)],
)
def test_a_pairs_gradient_equals_the_gradient_of_trls_loss(kind, engine, rank, tmp_path):
    trainer = on_pairs(kind, tmp_path)
    batch, model = batch_of(trainer), trainer.model.eval()
    losses, expected = one_by_one(trainer, batch)
    projectors = projectors_for(model, rank)
    for name, projector in projectors.items():
        expected[name] = torch.stack([projector.project(g) for g in expected[name]])
    per_sample = make_engine(engine, model, trainer.private_run.per_sample.loss)
    found_losses, found = per_sample(batch, projectors)
    torch.testing.assert_close(found_losses, losses, rtol=1e-4, atol=1e-5)
    assert relative_error(dense(found, 4), expected) < 1e-4


def some_equal(which):
    rows = pairs().to_list()
    for i in which:
        rows[i]["rejected"] = rows[i]["chosen"]
    return datasets.Dataset.from_list(rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "which", "size", "low"),
    [
        ("dpo", (0,), 1, False),
        ("dpo", (0, 1, 2, 3), 4, True),
        ("reward", (1,), 4, False),
        ("reward", (0, 1), 1, True),
    ],
)
def test_a_pair_of_equal_texts_trains_wherever_it_stands(kind, which, size, low, tmp_path):
    """Its gradient is zero but for rounding, which no two computations have alike."""
    settings = {"per_device_train_batch_size": size, "bf16": low, "max_steps": 2}
    trainer = on_pairs(kind, tmp_path, train_dataset=some_equal(which), **settings)
    trainer.train()
    assert trainer.ledger.steps == 2


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size"), [("dpo", 4), ("reward", 1)])
def test_a_wrong_rule_is_found_despite_pairs_of_equal_texts(kind, size, monkeypatch, tmp_path):
    right = functions.product
    monkeypatch.setattr(functions, "product", lambda *factors: 1.1 * right(*factors))
    settings = {"per_device_train_batch_size": size}
    trainer = on_pairs(kind, tmp_path, train_dataset=some_equal((0,)), **settings)
    assert_refused(trainer, r"q_proj\.weight", UnsupportedModelError)


SCALED = {"beta": 0.3, "label_smoothing": 0.2, "discopop_tau": 0.1}
LOSSES = {
    **{name: ("dpo", {"loss_type": [name], **SCALED}) for name in PREFERENCES},
    "sum": ("dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.5, 2.0], **SCALED}),
    "reward": ("reward", {}),
    "margins": ("reward", {"center_rewards_coefficient": 0.4}),
}


@pytest.mark.parametrize(
    "name", slow_but(("robust", "apo_zero", "sum", "reward", "margins"), LOSSES)
)
def test_every_loss_is_that_of_trl_for_each_pair(name, tmp_path):
    kind, settings = LOSSES[name]
    columns = {"margin": [0.1 * i for i in range(12)]} if name == "margins" else {}
    trainer = on_pairs(kind, tmp_path, train_dataset=pairs(12, **columns), **settings)
    batch = batch_of(trainer)
    assert ("margin" in batch) == bool(columns)
    trainer.model.eval()
    with torch.no_grad():
        found = trainer.private_run.per_sample.losses(batch)
    torch.testing.assert_close(found, one_by_one(trainer, batch)[0], rtol=1e-4, atol=1e-5)
    assert len(found.unique()) == 4


@pytest.mark.slow
def test_an_adapter_is_compared_with_the_model_without_it(tmp_path):
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = on_pairs("dpo", tmp_path, peft_config=lora)
    assert trainer.ref_model is None
    with torch.no_grad():
        for name, weight in trainer.model.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    batch = batch_of(trainer)
    trainer.model.eval()
    losses, _ = one_by_one(trainer, batch)
    found = trainer.private_run.per_sample.losses(batch)
    torch.testing.assert_close(found, losses, rtol=1e-4, atol=1e-5)
    assert len(losses.unique()) == 4  # the adapter makes a difference
    trainer.train()
    assert trainer.ledger.steps == 4


def test_pairs_train_with_the_default_of_gradient_checkpointing(tmp_path):
    trainer = on_pairs("dpo", tmp_path, gradient_checkpointing=True, max_steps=2)
    trainer.train()
    assert trainer.ledger.steps == 2
    assert any(getattr(m, "gradient_checkpointing", False) for m in trainer.model.modules())


def test_what_the_reference_says_may_be_computed_before(tmp_path):
    settings = {"precompute_ref_log_probs": True}
    before = on_pairs("dpo", tmp_path / "before", **settings)
    batch, expected = batch_of(before), batch_of(on_pairs("dpo", tmp_path / "then"))
    assert batch.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(batch[name], value, rtol=1e-4, atol=1e-4)


def test_pairs_lie_side_by_side_and_back_in_halves(tmp_path):
    trainer = on_pairs("reward", tmp_path, train_dataset=pairs(12, margin=[0.5] * 12))
    rows = trainer.data_collator([trainer.train_dataset[i] for i in range(3)])
    found = side_by_side(rows, 3)
    assert found["input_ids"].shape[:2] == (3, 2)
    assert found["margin"].shape == (3,)
    torch.testing.assert_close(by_halves(found), rows, rtol=0, atol=0)
    with pytest.raises(PrivacyError, match="of 3 pairs with 4 rows"):
        side_by_side({"input_ids": torch.zeros(4, 5)}, 3)


@each_kind
def test_another_loss_or_public_data_are_refused(kind, tmp_path):
    with pytest.raises(PrivacyError, match="defines its own loss"):
        on_pairs(kind, tmp_path, compute_loss_func=lambda outputs, labels: outputs)
    with pytest.raises(PrivacyError, match="public_dataset was passed"):
        on_pairs(kind, tmp_path, public_dataset=pairs(4, seed=9), projection="principal")
