"""``Seq2SeqTrainer`` made private: the same releases, and generation metrics in evaluation."""

from pathlib import Path
from typing import Any

import pytest
from transformers import (
    EvalPrediction,
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from dp_grape_hf import (
    DPGrapeSeq2SeqTrainer,
    DPGrapeSeq2SeqTrainingArguments,
    DPGrapeTrainer,
    PrivacyError,
)
from dp_grape_hf.mechanism import Streams
from tests.support.seq2seq import (
    END,
    bart,
    sentences,
    seq2seq,
)
from tests.support.trainers import (
    EXACT,
    Watch,
    assert_same_weights,
    make_args,
    make_trainer,
    weights_of,
)


def word_accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """How many words of the labels were generated at their place; no package is needed for it."""
    generated, labels = prediction.predictions, prediction.label_ids
    assert generated.dtype == labels.dtype  # words, not logits
    width = labels.shape[1]
    right = generated[:, 1 : 1 + width][:, :width] == labels[:, : generated.shape[1] - 1]
    return {"word_accuracy": float(right.mean())}


# ---- Training ----


@pytest.mark.slow
def test_releases_are_those_of_the_plain_private_trainer(tmp_path: Path) -> None:
    runs = []
    for cls, arguments in (
        (DPGrapeTrainer, None),
        (DPGrapeSeq2SeqTrainer, DPGrapeSeq2SeqTrainingArguments),
    ):
        extra = {"arguments": arguments} if arguments else {}
        trainer = make_trainer(
            tmp_path / cls.__name__,
            cls=cls,
            model=bart(),
            train_dataset=sentences(),
            known_streams=Streams.known(),
            **extra,
        )
        trainer.train()
        assert trainer.ledger.steps == 4
        runs.append(weights_of(trainer.model))
    assert_same_weights(runs[1], runs[0])


@pytest.mark.slow
def test_without_noise_and_projection_it_trains_as_the_original(tmp_path: Path) -> None:
    """All sentences have as many words, so that the mean over words is the mean of the means."""
    examples, model = sentences(), bart()
    settings: dict[str, Any] = {"max_steps": 3, "learning_rate": 1e-2, "report_to": "none"}
    settings |= {"save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    plain = Seq2SeqTrainer(
        model,
        Seq2SeqTrainingArguments(
            str(tmp_path / "plain"),
            per_device_train_batch_size=24,
            max_grad_norm=0.0,
            dataloader_pin_memory=False,
            **settings,
        ),
        train_dataset=examples,
    )
    plain.train()
    private = seq2seq(tmp_path, projection="identity", **EXACT | settings)
    private.train()
    assert_same_weights(weights_of(private.model), weights_of(model), atol=2e-4, rtol=1e-3)


# ---- Evaluation ----


@pytest.mark.slow
def test_generation_metrics_work_during_training_and_after(tmp_path: Path) -> None:
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


def test_a_generation_config_of_the_arguments_is_used(tmp_path: Path) -> None:
    trainer = seq2seq(tmp_path, generation_config=GenerationConfig(max_length=9, eos_token_id=END))
    assert trainer.model.generation_config.max_length == 9


# ---- Arguments ----


def test_short_names_work(tmp_path: Path) -> None:
    quiet = {"output_dir": str(tmp_path), "report_to": "none", "use_cpu": True}
    args = DPGrapeSeq2SeqTrainingArguments(**quiet, eps=3.0, delta=1e-5, r=4, F=7)
    assert (args.target_epsilon, args.projection_rank, args.projection_update_steps) == (3.0, 4, 7)
    with pytest.raises(PrivacyError, match="same quantity"):
        DPGrapeSeq2SeqTrainingArguments(**quiet, eps=3.0, target_epsilon=2.0)


@pytest.mark.parametrize("option", ["sortish_sampler", "fp16", "auto_find_batch_size"])
def test_options_that_void_the_guarantee_are_refused(option: str, tmp_path: Path) -> None:
    with pytest.raises(PrivacyError, match=f"{option}=True"):
        make_args(tmp_path, DPGrapeSeq2SeqTrainingArguments, **{option: True})


def test_arguments_of_another_trainer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PrivacyError, match="pass a DPGrapeSeq2SeqTrainingArguments"):
        DPGrapeSeq2SeqTrainer(bart(), make_args(tmp_path), train_dataset=sentences())
