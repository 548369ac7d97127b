"""A loss of one's own: used where it is made of losses of single examples, refused elsewhere.

The model's own loss is held against the package's as well, in the engines themselves.
"""

import logging
from contextlib import nullcontext

import pytest
import torch
from peft import AdaLoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional

from dp_grape_hf import DPGrapeTrainer, PrivacyError, UnsupportedModelError, per_sample_gradients
from dp_grape_hf.mechanism import Streams
from tests.gradients.functions import TinyFunctionForSequenceClassification, plain
from tests.support.models import only
from tests.support.trainers import (
    TinyForSequenceClassification,
    assert_refused,
    assert_same_weights,
    examples_of,
    make_trainer,
    points,
    trained_in,
    weights_of,
)

logger = logging.getLogger(__name__)
EQUAL = {"atol": 1e-6, "rtol": 1e-5}
WEIGHTS = torch.tensor([1.0, 5.0, 0.2])


class Squared(DPGrapeTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        one_hot = functional.one_hot(labels, outputs["logits"].shape[-1])
        loss = (outputs["logits"] - one_hot).square().mean()
        return (loss, outputs) if return_outputs else loss


def squared(outputs, labels):
    logits = outputs["logits"]
    return (logits - functional.one_hot(labels, logits.shape[-1])).square().mean(1)


class ClassWeights(DPGrapeTrainer):
    """The commonest: divides by the sum of the weights of the batch."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        labels = inputs.pop("labels")
        return functional.cross_entropy(model(**inputs)["logits"], labels, weight=WEIGHTS)


class Passes(DPGrapeTrainer):
    factor = 1.0

    def compute_loss(self, model, inputs, *args, **kwargs):
        logger.warning("called")  # a counter would be something that the loss remembers
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return self.factor * loss if isinstance(loss, Tensor) else loss


class CallsTwice(DPGrapeTrainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        labels = inputs.pop("labels")
        first, second = model(**inputs)["logits"], model(**inputs)["logits"]
        return functional.cross_entropy(first, labels) + (first - second).square().mean()


class Unasked(DPGrapeTrainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        labels = inputs.pop("labels")
        return functional.cross_entropy(self.model(**inputs)["logits"], labels)


def trained(tmp_path, cls, **settings):
    return trained_in(tmp_path, cls=cls, known_streams=Streams.seeded(), **settings)


class Shrinks(Passes):
    factor = 0.01  # what makes gradients longer than the bound changes nothing


def shrunk(outputs, labels):
    return 0.01 * functional.cross_entropy(outputs["logits"], labels, reduction="none")


@pytest.mark.parametrize(("cls", "loss"), [(Squared, squared), (Shrinks, shrunk)])
def test_a_loss_of_the_trainers_own_is_what_is_trained(cls, loss, tmp_path):
    class Tiny(TinyForSequenceClassification):
        """Has no suffix that tells its loss."""

    own = trained(tmp_path / "own", cls)
    given = trained(tmp_path / "given", DPGrapeTrainer, compute_loss_func=loss)
    plain = trained(tmp_path / "plain", DPGrapeTrainer)
    assert_same_weights(weights_of(own.model), weights_of(given.model), **EQUAL)
    if cls is Squared:  # which does not use the model's loss
        unknown = trained(tmp_path / "unknown", cls, model=Tiny())
        assert_same_weights(weights_of(unknown.model), weights_of(own.model), **EQUAL)
    with pytest.raises(AssertionError):
        assert_same_weights(weights_of(own.model), weights_of(plain.model), **EQUAL)
    assert own.evaluate(points(seed=1))["eval_loss"] > 0


@pytest.mark.slow
def test_a_language_models_own_divisor_is_left_to_the_package(tmp_path, caplog):
    """Its loss of a batch is a mean over tokens, not of texts; a subclass that keeps it may be."""
    own = trained(tmp_path / "own", Passes, model=only("gpt2").model(), train_dataset=TEXTS)
    plain = trained(
        tmp_path / "plain", DPGrapeTrainer, model=only("gpt2").model(), train_dataset=TEXTS
    )
    assert "called" in caplog.text
    assert_same_weights(weights_of(own.model), weights_of(plain.model), atol=1e-6, rtol=1e-4)
    with pytest.raises(PrivacyError, match="divides by a count over the batch"):
        trained(tmp_path / "no", CountsTokens, model=only("gpt2").model(), train_dataset=TEXTS)


class CountsTokens(DPGrapeTrainer):
    """Writes out what a language model computes, divisor included."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        labels = inputs.pop("labels")[:, 1:]
        logits = model(**inputs)["logits"][:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def unequal_texts():
    texts = examples_of("gpt2")
    for number, example in enumerate(texts.examples):
        example["labels"] = example["labels"].clone()
        example["labels"][: number % 4] = -100
    return texts


TEXTS = unequal_texts()


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (ClassWeights, "weighs examples by class"),
        (CallsTwice, "calls the model 2 times.* If an example is a pair"),
        (Unasked, "does not call the model that it receives"),
    ],
)
def test_a_loss_that_cannot_be_taken_apart_is_refused(cls, message, tmp_path):
    trainer = make_trainer(tmp_path, cls=cls)
    with pytest.raises(PrivacyError, match=message) as error:
        trainer.train()
    assert "compute_loss_func=f" in str(error.value)
    assert trainer.ledger.steps == 0


def test_class_weights_are_noticed_even_if_examples_share_a_class(tmp_path):
    same = points()
    for example in same.examples:
        example["labels"] = torch.tensor(1)
    for size in (1, 4):
        trainer = make_trainer(
            tmp_path, cls=ClassWeights, train_dataset=same, per_device_train_batch_size=size
        )
        with pytest.raises(PrivacyError, match="weighs examples by class"):
            trainer.train()


def adds_a_term(m, x, labels):
    outputs = plain(m, x, labels)
    if labels is not None:
        outputs["loss"] = outputs["loss"] + 1e-3 * m.head.weight.square().sum()
    return outputs


@pytest.mark.parametrize("engine", ["layerwise", "functorch"])
def test_a_term_added_to_the_models_loss_is_refused(engine, tmp_path):
    model = TinyFunctionForSequenceClassification(adds_a_term)
    trainer = make_trainer(tmp_path, model=model, engine=engine)
    assert_refused(trainer, "adds a term to its loss", UnsupportedModelError)


def rounds(m, x, labels):
    """Rounds log-probabilities to 16 bits, as torch does on a GPU under autocast."""
    outputs = plain(m, x, labels)
    if labels is not None:
        rounded = outputs["logits"].float().log_softmax(-1).bfloat16()
        outputs["loss"] = functional.nll_loss(rounded.float(), labels)
    return outputs


@pytest.mark.parametrize("bf16", [True, False])
def test_a_loss_rounded_to_16_bits_passes_only_under_autocast(bf16, tmp_path):
    trainer = make_trainer(tmp_path, model=TinyFunctionForSequenceClassification(rounds), bf16=bf16)
    with nullcontext() if bf16 else pytest.raises(UnsupportedModelError, match="adds a term"):
        trainer.train()


def test_adaloras_orthogonality_is_refused(tmp_path):
    config = AdaLoraConfig(
        task_type="SEQ_CLS",  # only models for a task pass through what adds the term
        target_modules=["query", "value"],
        total_step=10,
        init_r=4,
        target_r=2,
    )
    model = get_peft_model(only("bert-classifier").model(), config)
    trainer = make_trainer(tmp_path, model=model, train_dataset=examples_of("bert-classifier"))
    with pytest.raises(UnsupportedModelError, match=r"AdaLoRA.*supported: LoRA, .* tokens\.$"):
        trainer.train()


def test_looking_at_the_models_own_loss_leaves_its_config_alone():
    model = only("bert-classifier").model()
    model.config.problem_type = None
    per_sample_gradients(model, only("bert-classifier").batch(2))
    assert model.config.problem_type is None


def test_a_model_without_a_loss_is_accepted():
    class ForSequenceClassification(nn.Linear):
        def forward(self, x):
            return {"logits": super().forward(x)}

    inputs = {"x": torch.randn(3, 4), "labels": torch.tensor([0, 1, 2])}
    losses, _ = per_sample_gradients(ForSequenceClassification(4, 3), inputs)
    assert losses.shape == (3,)
