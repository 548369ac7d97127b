"""``Seq2SeqTrainer`` made private: generation metrics in evaluation."""

from pathlib import Path

import pytest
from transformers import EvalPrediction

from tests.support.seq2seq import sentences, seq2seq
from tests.support.trainers import Watch


def word_accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """How many words of the labels were generated at their place; no package is needed for it."""
    generated, labels = prediction.predictions, prediction.label_ids
    assert generated.dtype == labels.dtype  # words, not logits
    width = labels.shape[1]
    right = generated[:, 1 : 1 + width][:, :width] == labels[:, : generated.shape[1] - 1]
    return {"word_accuracy": float(right.mean())}


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
