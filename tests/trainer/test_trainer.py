import json
from functools import partial

import datasets
import pytest
import torch
from transformers import EarlyStoppingCallback, TrainerCallback

from dp_grape_hf import DPGrapeTrainer, PrivacyError
from dp_grape_hf.ledger import LEDGER_NAME
from dp_grape_hf.projections import projection_targets
from tests.support.methods import plain_trainer
from tests.support.models import only
from tests.support.trainers import (
    EXACT,
    Examples,
    TinyForSequenceClassification,
    Watch,
    assert_same_weights,
    examples_of,
    make_args,
    make_trainer,
    points,
    trained_in,
    weights_of,
)


def small(name, **changes):
    return only(name).model(num_hidden_layers=1, **changes), examples_of(name)


@pytest.mark.parametrize(
    ("name", "projection"),
    [
        ("vit", {"projection": "identity"}),
        ("bert-classifier", {"projection": "gaussian", "projection_rank": 32}),
    ],
)
def test_without_noise_and_projection_training_equals_the_plain_trainer(name, projection, tmp_path):
    """Step for step, with weight decay, warm-up and a schedule; min(m, n) <= 32 everywhere."""
    settings = {
        "learning_rate": 2e-3,
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "adam_beta2": 0.99,
        "adam_epsilon": 1e-5,  # so that a gradient of rounding errors is not blown up
    }
    examples, plain, watch = examples_of(name), Watch(), Watch()
    plain_trainer(tmp_path / "plain", only(name).model(), 6, examples, plain, **settings)
    make_trainer(
        tmp_path / "private",
        model=only(name).model(),
        train_dataset=examples,
        callbacks=[watch],
        max_steps=6,
        **EXACT | {"per_device_train_batch_size": 4, "expected_batch_size": 12},
        **settings | projection,
    ).train()
    assert len(watch.weights) == len(plain.weights) == 7
    for actual, expected in zip(watch.weights, plain.weights, strict=True):
        assert_same_weights(actual, expected, atol=5e-6, rtol=1e-4)
    moved = max((plain.weights[-1][k] - v).abs().max() for k, v in plain.weights[0].items())
    assert moved > 1e-3
    for key in ("learning_rate", "epoch"):
        ours, theirs = ([logs[key] for logs in w.logs if key in logs] for w in (watch, plain))
        assert ours == pytest.approx(theirs)


def _accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def test_evaluate_predict_and_metrics_work_before_during_and_after_training(tmp_path):
    watch = Watch()
    trainer = make_trainer(
        tmp_path,
        callbacks=[watch],
        eval_dataset=points(10, seed=1),
        compute_metrics=_accuracy,
        eval_strategy="steps",
        eval_steps=2,
        eval_on_start=True,
    )
    before = trainer.evaluate()
    assert 0 <= before["eval_accuracy"] <= 1
    assert before["eval_loss"] > 0
    trainer.train()
    assert watch.events.count("evaluate") == 1 + 1 + 2
    evaluations = [logs for logs in trainer.state.log_history if "eval_accuracy" in logs]
    assert [logs["step"] for logs in evaluations] == [0, 2, 4]
    prediction = trainer.predict(points(7, seed=2))
    assert prediction.predictions.shape == (7, 3)
    assert "test_accuracy" in prediction.metrics
    assert trainer.ledger.steps == 4


def test_evaluation_does_not_change_what_is_trained(tmp_path):
    weights = []
    for strategy in ("no", "steps"):
        evaluating = {"eval_dataset": points(5, seed=1), "eval_strategy": strategy, "eval_steps": 1}
        trainer = trained_in(tmp_path / strategy, **evaluating, **EXACT)
        weights.append(weights_of(trainer.model))
    assert_same_weights(weights[0], weights[1])


def _smoothed(outputs, labels, num_items_in_batch=None):
    return torch.nn.functional.cross_entropy(
        outputs["logits"], labels, reduction="none", label_smoothing=0.1
    )


@pytest.mark.parametrize(
    "loss",
    [{"compute_loss_func": _smoothed}, {"label_smoothing_factor": 0.1}],
    ids=["function", "option"],
)
def test_another_loss_trains_each_sample_and_evaluates(loss, tmp_path):
    model, examples = small("bert-classifier")
    held = examples_of("bert-classifier", 5, seed=1)
    batch = only("bert-classifier").batch(5, seed=1)
    parts = {"model": model, "train_dataset": examples, "eval_dataset": held}
    trainer = trained_in(tmp_path, **parts, **loss)
    assert trainer.state.global_step == 4
    with torch.no_grad():
        expected = _smoothed(model.eval()(**batch), batch["labels"])
        found = trainer.private_run.per_sample.losses(batch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.mean().item(), rel=1e-5)


def test_callbacks_see_every_step_once_and_no_gradient(tmp_path):
    """Parameters have none that a callback could read or log."""

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            assert all(p.grad is None for p in kwargs["model"].parameters())

        on_optimizer_step = on_step_end = on_pre_optimizer_step

    watch = Watch()
    trainer = trained_in(tmp_path, callbacks=[watch, Look()], logging_steps=3, max_steps=7)
    logged = [logs["step"] for logs in trainer.state.log_history if "grad_norm" in logs]
    assert logged == [3, 6]
    assert watch.events[0] == "train_begin"
    assert watch.events.count("step_end") == 7
    assert watch.events.count("epoch_end") == 2
    trainer.remove_callback(watch)
    assert watch not in trainer.callback_handler.callbacks


EVALUATING = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "eval_dataset": points(8, seed=1),
}


def test_choices_by_metrics_need_the_word_that_data_are_public(tmp_path):
    with pytest.raises(PrivacyError, match="hyperparameter_search"):
        make_trainer(tmp_path).hyperparameter_search()
    settings = EVALUATING | {"metric_for_best_model": "loss", "greater_is_better": True}
    with pytest.raises(PrivacyError, match="eval_data_is_public"):
        make_trainer(tmp_path, callbacks=[EarlyStoppingCallback(1)], **settings)
    trainer = make_trainer(tmp_path, **settings)
    trainer.add_callback(EarlyStoppingCallback(1))
    with pytest.raises(PrivacyError, match="eval_data_is_public"):
        trainer.train()


def test_early_stopping_on_public_data_accounts_for_the_steps_done(tmp_path):
    trainer = trained_in(
        tmp_path,
        callbacks=[EarlyStoppingCallback(1, early_stopping_threshold=1e6)],
        metric_for_best_model="loss",
        load_best_model_at_end=True,
        eval_data_is_public=True,
        **EVALUATING,
    )
    spent = trainer.privacy_spent()
    assert trainer.state.global_step == trainer.ledger.steps == spent.steps == 2
    assert repr(spent) == f"PrivacySpent(epsilon={spent.epsilon}, delta={spent.delta}, steps=2)"


def test_checkpoints_are_rotated_and_complete(tmp_path):
    make_trainer(tmp_path, save_total_limit=2, save_strategy="steps", save_steps=1).train()
    folders = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert folders == ["checkpoint-3", "checkpoint-4"]
    names = {path.name for path in (tmp_path / "checkpoint-4").iterdir()}
    assert {"model.safetensors", LEDGER_NAME, "README.md", "optimizer.pt", "scheduler.pt"} <= names
    assert "rng_state.pth" not in names

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    state = (tmp_path / "checkpoint-4" / "trainer_state.json").read_text()
    assert json.loads(state, parse_constant=refuse)["global_step"] == 4


def test_what_the_examples_of_transformers_call_after_training_passes(tmp_path):
    trainer = make_trainer(tmp_path)
    result = trainer.train()
    trainer.save_model()
    metrics = result.metrics | {"train_samples": 10, "train_loss": result.training_loss}
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    words = {"tasks": "text-classification", "finetuned_from": "user/base", "language": "en"}
    glue = {"dataset_tags": "glue", "dataset_args": "sst2", "dataset": "GLUE SST2"}
    trainer.create_model_card(**words, **glue)
    text = (tmp_path / "README.md").read_text()
    assert "Training Loss" not in text
    assert "\ndatasets: glue\n" in text
    assert "SST2" not in text


@pytest.mark.slow
def test_a_checkpoint_holds_the_updates_that_are_kept_in_float32(tmp_path):
    """Saved in the middle of a projection period, it computes what the model in training does."""
    model, examples = small("opt")
    inputs = {"input_ids": only("opt").batch(2)["input_ids"]}
    found = []

    class Compare(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            saved = type(model).from_pretrained(tmp_path / f"checkpoint-{state.global_step}")
            with torch.no_grad():
                found.append([m.eval()(**inputs).logits for m in (saved, kwargs["model"])])

    trained_in(
        tmp_path,
        model=model.bfloat16(),
        train_dataset=examples,
        projection_update_steps=10,
        save_strategy="steps",
        save_steps=2,
        callbacks=[Compare()],
    )
    assert len(found) == 2
    for saved, live in found:
        torch.testing.assert_close(saved, live, atol=0.0, rtol=0.0)


@pytest.mark.parametrize(
    ("wanted", "rank", "expected"),
    [
        (None, 2, {"body.weight", "head.weight"}),
        (["bo.*"], 2, {"body.weight"}),
        (r"^head$", 2, {"head.weight"}),
        ("all-linear", 2, {"body.weight", "head.weight"}),
        ("all-linear", 6, set()),  # which would save nothing
    ],
)
def test_target_modules_say_what_is_projected(wanted, rank, expected, tmp_path):
    trainer = trained_in(tmp_path, optim_target_modules=wanted, projection_rank=rank, max_steps=1)
    names = {p: n for n, p in trainer.model.named_parameters()}
    moments = {p: state["exp_avg"] for p, state in trainer.optimizer.optimizer.state.items()}
    assert {names[p] for p, moment in moments.items() if moment.shape != p.shape} == expected


@pytest.mark.parametrize("tied", [True, False])
def test_targets_name_each_weight_once(tied):
    model = only("llama").model(tie_word_embeddings=tied)
    trainable = dict(model.named_parameters())
    names = projection_targets(model, trainable, ["q_proj", "embed_tokens", "lm_head"])
    layers = [f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1)]
    tables = ["model.embed_tokens.weight", *([] if tied else ["lm_head.weight"])]
    assert sorted(names) == sorted([*layers, *tables])


ADAM = torch.optim.Adam(TinyForSequenceClassification().parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1"),  # without a config
        ({"label_smoothing_factor": 0.1, "compute_loss_func": _smoothed}, "and a compute_loss"),
        ({"optim_target_modules": ["nowhere"]}, "nowhere"),
        ({"optimizers": (ADAM, None)}, "ProjectedOptimizer"),
        (
            {"cls": partial(DPGrapeTrainer, optimizer_cls_and_kwargs=(torch.optim.Adam, {}))},
            "ProjectedOptimizer",
        ),
        (
            {"train_dataset": datasets.Dataset.from_dict({"x": [1.0]}).to_iterable_dataset()},
            "IterableDataset",
        ),
        ({"expected_batch_size": 25}, "expected batch size 25 is larger than the 24"),
        ({"num_samples": 3}, "expected batch size 4 is larger than the 3"),
        ({"target_delta": 1 / 24}, "not below 1/24"),
        ({"model": TinyForSequenceClassification().requires_grad_(False)}, "requires_grad"),
    ],
)
def test_what_contradicts_a_private_run_is_refused_at_construction(changes, message, tmp_path):
    with pytest.raises(PrivacyError, match=message):
        make_trainer(tmp_path, **changes)


def test_noise_is_calibrated_at_construction_before_data_is_touched(tmp_path):
    class Untouchable(Examples):
        def __getitem__(self, index):
            raise AssertionError("an example was read")

    trainer = make_trainer(tmp_path, train_dataset=Untouchable([{}] * 24), target_epsilon=2.0)
    assert trainer.plan.mechanism.noise_multiplier > 0.5
    assert trainer.plan.steps == 4
    assert trainer.privacy_spent().epsilon == 0


def test_a_scheduler_of_the_user_sets_the_learning_rate(tmp_path):
    """It is made for the optimizer in use, which the trainer makes when asked."""
    watch = Watch()
    trainer = make_trainer(tmp_path, callbacks=[watch], learning_rate=0.5)
    optimizer = trainer.create_optimizer()
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    trainer.train()
    assert [x["learning_rate"] for x in watch.logs[:4]] == [0.5, 0.25, 0.125, 0.0625]
    assert trainer.optimizer.param_groups[0]["lr"] == 0.03125


def test_training_without_a_training_set_is_refused_and_evaluation_works(tmp_path):
    trainer = DPGrapeTrainer(
        TinyForSequenceClassification(), make_args(tmp_path), eval_dataset=points(8)
    )
    assert trainer.evaluate()["eval_loss"] > 0
    with pytest.raises(ValueError, match="requires a train_dataset"):
        trainer.train()
