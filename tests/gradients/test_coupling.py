"""Ways in which one example reaches another's gradient, each refused or harmless."""

import pytest
import torch
from torch import nn
from transformers import default_data_collator

from dp_grape_hf import PrivacyError, per_sample_gradients
from tests.gradients.functions import (
    Function,
    TinyFunctionForSequenceClassification,
    cross_entropies,
    plain,
    squares,
)
from tests.support.trainers import assert_refused, make_trainer, points, trained_in


def unmixed(m, hidden):
    return hidden


def small(between=unmixed):
    def compute(m, x, scale=None):
        return m.second(nn.functional.softplus(between(m, m.first(x))))  # no unit is dead

    return Function(compute, first=nn.Linear(4, 5), second=nn.Linear(5, 2))


def mixes_in_training(m, hidden):
    return hidden + 0.5 * hidden.flip(0) if m.training else hidden


def scales_by_the_batch(m, hidden):
    return hidden / hidden.detach().abs().max()


def token_mean(outputs, labels):
    """What ``num_items_in_batch`` does: each sample's sum, divided by a count over the batch."""
    return outputs.flatten(1).sum(1) / outputs.numel()


def centred(outputs, labels):
    """Zero for copies of one sample, however many."""
    return (outputs - outputs.mean(0)).flatten(1).square().sum(1)


def neighbours(outputs, labels):
    """The same for copies of one sample, however many."""
    return outputs.flatten(1).square().sum(1) + outputs.roll(1, 0).flatten(1).sum(1)


@pytest.mark.parametrize(
    ("between", "loss"),
    [
        *((between, squares) for between in (mixes_in_training, scales_by_the_batch)),
        *((unmixed, loss) for loss in (token_mean, centred, neighbours)),
    ],
)
def test_a_model_or_a_loss_that_mixes_samples_is_refused(between, loss):
    torch.manual_seed(0)
    model = small(between)
    inputs = {"x": torch.randn(1, 4) * torch.tensor([1.0, 50.0, 1.0, 1.0])[:, None]}
    with pytest.raises(PrivacyError, match="couples samples"):
        per_sample_gradients(model.train(), inputs, loss=loss)


@pytest.mark.parametrize("extra", [0.5, [1, 2], {"a": torch.ones(4)}], ids=str)
def test_an_input_without_samples_is_refused(extra):
    inputs = {"x": torch.randn(4, 4), "scale": extra}
    with pytest.raises(PrivacyError, match="'scale'"):
        per_sample_gradients(small(), inputs, loss=squares)


def mined(outputs, labels):
    losses = cross_entropies(outputs, labels)
    return losses * (losses >= losses.median())


def weighted_by_rank(outputs, labels):
    losses = cross_entropies(outputs, labels)
    return losses * (1 + losses.argsort().argsort() / len(losses))


@pytest.mark.parametrize(("size", "loss"), [(4, mined), (7, weighted_by_rank)])
def test_a_loss_that_ranks_the_batch_is_refused(loss, size, tmp_path):
    """Two or three samples do not show it: the lower of two medians keeps both."""
    trainer = make_trainer(tmp_path, compute_loss_func=loss, per_device_train_batch_size=size)
    assert_refused(trainer, "changes with the number or the contents")


@pytest.mark.parametrize("in_training", [True, False])
def test_an_output_that_depends_on_batch_size_is_refused(in_training, tmp_path):
    def scales(m, x, labels):
        outputs = plain(m, nn.functional.dropout(x, 0.3, m.training))
        if len(x) > 3 and (m.training or not in_training):
            outputs["logits"] = 1.3 * outputs["logits"]
        return outputs

    model = TinyFunctionForSequenceClassification(scales)
    trainer = make_trainer(tmp_path, model=model, compute_loss_func=cross_entropies)
    assert_refused(trainer, "changes with the number or the contents")


def normalised(m, x, labels):
    """Normalises over the batch: over one sample, which functorch runs by itself, that is zero."""
    logits = plain(m, x)["logits"]
    return {"logits": logits - logits.mean(0)}


def broken(m, x, labels):
    return {"logits": plain(m, x)["logits"] * float("nan")}


@pytest.mark.parametrize(("compute", "engine"), [(normalised, "functorch"), (broken, "layerwise")])
def test_a_run_without_any_gradient_is_refused(compute, engine, tmp_path):
    settings = {"engine": engine, "compute_loss_func": cross_entropies}
    trainer = make_trainer(
        tmp_path, model=TinyFunctionForSequenceClassification(compute), **settings
    )
    assert_refused(trainer, "No example that was tried has a gradient")


class SeededCollator:
    """Draws from a seed of its own, as collators of transformers may."""

    def __init__(self, seed):
        self.seed = seed

    def __call__(self, examples):
        return default_data_collator(examples)


def test_a_collator_with_a_seed_of_its_own_is_refused(tmp_path):
    with pytest.raises(PrivacyError, match=r"SeededCollator.*seed=3"):
        make_trainer(tmp_path, data_collator=SeededCollator(3)).train()
    make_trainer(tmp_path, data_collator=SeededCollator(None)).train()


def test_a_schedule_set_by_hand_may_not_follow_evaluation_data(tmp_path):
    trainer = make_trainer(tmp_path)
    optimizer = trainer.create_optimizer()
    trainer.lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(PrivacyError, match="ReduceLROnPlateau"):
        trainer.train()


def with_a_third(outputs, labels, num_items_in_batch):
    assert num_items_in_batch is None or not outputs["logits"].requires_grad  # evaluation
    return cross_entropies(outputs, labels)


@pytest.mark.parametrize("loss", [cross_entropies, with_a_third])
def test_a_loss_may_take_two_arguments_or_three(loss, tmp_path):
    trainer = trained_in(tmp_path, compute_loss_func=loss)
    assert trainer.evaluate(points(seed=1))["eval_loss"] > 0
