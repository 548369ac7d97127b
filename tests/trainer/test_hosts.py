"""What holds of the trainers of all hosts, those of transformers and those of TRL."""

from functools import partial

import datasets
import pytest
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainingArguments

from dp_grape_hf import DPGrapeSeq2SeqTrainer, DPGrapeTrainer, PrivacyError
from tests.support.marks import slow_but
from tests.support.seq2seq import bart, sentences, seq2seq
from tests.support.sft import QUIET, llama, on_pairs, pairs, policy, prompts, sft, tokenizer
from tests.support.trainers import EXACT, OF_HOST, Examples, Watch, assert_same_weights, weights_of

trl = pytest.importorskip("trl", reason="TRL is an optional extra")

from dp_grape_hf import DPGrapeDPOTrainer, DPGrapeRewardTrainer, DPGrapeSFTTrainer  # noqa: E402
from dp_grape_hf.trainer import preferences, sft as of_sft  # noqa: E402

HOSTS = {
    "seq2seq": seq2seq,
    "sft": sft,
    "dpo": partial(on_pairs, "dpo"),
    "reward": partial(on_pairs, "reward"),
}
"""What makes a private trainer in a folder, with some changes."""


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setattr("trl.trainer.base_trainer.send_telemetry", lambda **kwargs: None)  # of TRL


def _of_pairs(kind):
    reference = {"ref_model": policy(kind, seed=1)} if kind == "dpo" else {}
    return {"model": policy(kind), "train_dataset": pairs(), **reference}


ORIGINALS = {
    "seq2seq": (
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        lambda: {"model": bart(), "train_dataset": sentences()},
    ),
    "sft": (
        trl.SFTTrainer,
        trl.SFTConfig,
        lambda: {"model": llama(), "train_dataset": prompts(words=3)},
    ),
    "dpo": (trl.DPOTrainer, trl.DPOConfig, partial(_of_pairs, "dpo")),
    "reward": (trl.RewardTrainer, trl.RewardConfig, partial(_of_pairs, "reward")),
}
"""A host, its arguments, and what it trains.

A host divides by the words of a batch: all texts to learn have as many.
"""


@pytest.mark.parametrize("host", slow_but(("seq2seq",), ORIGINALS))
def test_without_noise_and_projection_it_trains_as_the_original(host, tmp_path):
    cls, arguments, parts = ORIGINALS[host]
    own = parts()
    settings = {"max_steps": 3, "per_device_train_batch_size": len(own["train_dataset"])} | QUIET
    settings |= {"adam_epsilon": 1e-5}  # or a gradient of rounding errors is blown up
    args = arguments(str(tmp_path / "plain"), max_grad_norm=0.0, **OF_HOST, **settings)
    reading = {} if host == "seq2seq" else {"processing_class": tokenizer()}
    plain = cls(args=args, **own, **reading)
    plain.train()
    exact = EXACT | settings
    private = HOSTS[host](tmp_path / "private", projection="identity", **parts() | exact)
    private.train()
    expected = weights_of(plain.model)
    assert_same_weights(weights_of(private.model), expected, atol=2e-4, rtol=1e-3)


METRICS = {
    "sft": "eval_mean_token_accuracy",
    "dpo": "eval_rewards/accuracies",
    "reward": "eval_accuracy",
}
"""What a host says of evaluation data."""


@pytest.mark.parametrize("host", slow_but(("sft", "reward"), METRICS))
def test_a_run_counts_its_examples_and_logs_nothing_of_them(host, tmp_path):
    watch = Watch()
    held = prompts(6, seed=1) if host == "sft" else pairs(4, seed=7)
    evaluating = {"eval_dataset": held, "eval_strategy": "steps", "eval_steps": 2}
    trainer = HOSTS[host](tmp_path, callbacks=[watch], **evaluating)
    assert trainer.plan.mechanism.num_samples == len(trainer.train_dataset)
    before = weights_of(trainer.model)
    reference = weights_of(trainer.ref_model) if host == "dpo" else {}
    trainer.train()
    assert trainer.ledger.steps == 4
    allowed = {"grad_norm", "learning_rate", "epsilon", "epoch", "train_runtime"}
    groups = ["", *(f"_{group.name}" for group in trainer.rates.groups)]
    allowed |= {f"noise{of}" for of in groups}
    measurable = {f"signal{of}" for of in groups}
    allowed |= {"train_samples_per_second", "train_steps_per_second"}
    names = {name for logs in watch.logs for name in logs}
    of_training = {name for name in names if not name.startswith("eval_")}
    assert of_training - measurable == allowed
    assert {"eval_loss", METRICS[host]} <= names
    assert not any(trainer._metrics["train"].values())
    after = weights_of(trainer.model)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    if host == "dpo":
        assert_same_weights(weights_of(trainer.ref_model), reference)


@pytest.mark.slow
@pytest.mark.parametrize("host", ["seq2seq", "sft"])
def test_what_a_host_prepares_keeps_the_column_of_units(host, tmp_path):
    texts = ORIGINALS[host][2]()["train_dataset"]
    rows = [row | {"user": i % 3} for i, row in enumerate(texts)]
    trainer = HOSTS[host](
        tmp_path,
        train_dataset=datasets.Dataset.from_list(rows) if host == "sft" else Examples(rows),
        privacy_unit_column="user",
        expected_batch_size=2,
        per_device_train_batch_size=8,
        max_steps=2,
    )
    trainer.train()
    assert (trainer.plan.mechanism.num_samples, trainer.ledger.steps) == (3, 2)
    assert [row["user"] for row in trainer.train_dataset] == [row["user"] for row in rows]


@pytest.mark.parametrize("host", ["sft", "dpo", "reward"])
def test_the_loss_of_the_host_is_refused_on_training_batches(host, tmp_path):
    trainer = HOSTS[host](tmp_path)
    batch = trainer.data_collator([trainer.train_dataset[0]])
    trainer.model.train()
    with pytest.raises(PrivacyError, match="training mode"):
        trainer.compute_loss(trainer.model, batch)
    if host == "sft":  # of pairs it wants what the reference says
        assert trainer.compute_loss(trainer.model.eval(), batch) > 0


def word_accuracy(prediction):
    """How many words of the labels were generated at their place; no package is needed for it."""
    generated, labels = prediction.predictions, prediction.label_ids
    assert generated.dtype == labels.dtype  # words, not logits
    width = labels.shape[1]
    right = generated[:, 1 : 1 + width][:, :width] == labels[:, : generated.shape[1] - 1]
    return {"word_accuracy": float(right.mean())}


@pytest.mark.slow
def test_generation_metrics_work_during_training_and_after(tmp_path):
    watch = Watch()
    trainer = seq2seq(
        tmp_path,
        callbacks=[watch],
        eval_dataset=sentences(6, seed=1),
        compute_metrics=word_accuracy,
        predict_with_generate=True,
        generation_max_length=7,
        generation_num_beams=2,
        eval_strategy="steps",
        eval_steps=2,
    )
    trainer.train()
    found = [logs["eval_word_accuracy"] for logs in watch.logs if "eval_word_accuracy" in logs]
    assert len(found) == 2
    assert all(0 <= value <= 1 for value in found)
    assert trainer.evaluate(max_length=5)["eval_loss"] > 0
    prediction = trainer.predict(sentences(5, seed=2), max_length=6)
    assert prediction.predictions.shape[0] == 5
    assert trainer.ledger.steps == 4


@pytest.mark.parametrize(
    ("cls", "other"),
    [
        (DPGrapeTrainer, TrainingArguments),
        (DPGrapeSeq2SeqTrainer, DPGrapeTrainer.arguments_class),
        (DPGrapeSFTTrainer, trl.SFTConfig),
        (DPGrapeDPOTrainer, trl.DPOConfig),
        (DPGrapeRewardTrainer, trl.RewardConfig),
    ],
)
def test_each_trainer_takes_its_own_arguments_by_short_names(cls, other, tmp_path):
    own = cls.arguments_class
    settings = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    settings |= QUIET
    args = own(**settings, eps=3.0, delta=1e-5, r=4, F=7)
    assert (args.target_epsilon, args.projection_rank, args.projection_update_steps) == (3.0, 4, 7)
    budget = {"eps": 3.0, "delta": 1e-5} if "DPGrape" in other.__name__ else {}
    with pytest.raises(PrivacyError, match=f"{other.__name__}; pass a {own.__name__}"):
        cls(args=other(**settings, **budget))


NUMBERS = ("label_smoothing_factor", "router_aux_loss_coef", "ld_alpha")
REFUSED = {
    "seq2seq": [(name, True) for name in ("sortish_sampler", "fp16", "auto_find_batch_size")],
    "sft": [
        *((name, 0.1 if name in NUMBERS else True) for name in of_sft.REFUSED_IF_SET),
        ("loss_type", "dft"),
        ("use_liger_kernel", True),
        ("fp16", True),
        ("train_sampling_strategy", "batch_rebalance"),
        ("neftune_noise_alpha", 5.0),
    ],
    "dpo": [
        *((name, 0.1 if name in NUMBERS else True) for name in preferences.REFUSED_OF_DPO),
        ("loss_type", ["aot_unpaired"]),
        ("f_divergence_type", "js_divergence"),
    ],
    "reward": [(name, 0.1 if name in NUMBERS else True) for name in preferences.REFUSED_OF_REWARDS],
}


@pytest.mark.parametrize("host", REFUSED)
def test_options_that_void_the_guarantee_are_refused(host, tmp_path):
    for option, value in REFUSED[host]:
        with pytest.raises(PrivacyError) as refusal:
            HOSTS[host](tmp_path, **{option: value})
        assert f"{option}={value!r} is " in str(refusal.value)
