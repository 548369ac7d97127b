"""Ways in which one example reaches another's gradient, each refused or harmless."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import default_data_collator

from dp_grape_hf import PrivacyError, per_sample_gradients
from tests.gradients.functions import squares
from tests.support.trainers import (
    TinyForSequenceClassification,
    assert_refused,
    make_trainer,
    points,
    trained_in,
)


class Small(nn.Module):
    """Two layers, with room for whatever couples between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 2)

    def between(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(self, x: Tensor, scale: Any = None) -> Tensor:
        return self.second(self.between(self.first(x)).relu())


class MixesInTraining(Small):
    def between(self, hidden: Tensor) -> Tensor:
        return hidden + 0.5 * hidden.flip(0) if self.training else hidden


class ScalesByTheBatch(Small):
    def between(self, hidden: Tensor) -> Tensor:
        return hidden / hidden.detach().abs().max()


@pytest.mark.parametrize("model", [MixesInTraining, ScalesByTheBatch])
def test_mixing_in_training_or_without_a_gradient_is_refused(model: type[Small]) -> None:
    inputs = {"x": torch.randn(1, 4) * torch.tensor([1.0, 50.0, 1.0, 1.0])[:, None]}
    with pytest.raises(PrivacyError, match="couples samples"):
        per_sample_gradients(model().train(), inputs, loss=squares)


@pytest.mark.parametrize("extra", [0.5, [1, 2], {"a": torch.ones(4)}], ids=str)
def test_an_input_without_samples_is_refused(extra: Any) -> None:
    inputs = {"x": torch.randn(4, 4), "scale": extra}
    with pytest.raises(PrivacyError, match="'scale'"):
        per_sample_gradients(Small(), inputs, loss=squares)


def plain(outputs: Any, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs["logits"], labels, reduction="none")


def mined(outputs: Any, labels: Tensor) -> Tensor:
    losses = plain(outputs, labels)
    return losses * (losses >= losses.median())


def weighted_by_rank(outputs: Any, labels: Tensor) -> Tensor:
    losses = plain(outputs, labels)
    return losses * (1 + losses.argsort().argsort() / len(losses))


@pytest.mark.parametrize(("size", "loss"), [(4, mined), (7, weighted_by_rank)])
def test_a_loss_that_ranks_the_batch_is_refused(loss: Any, size: int, tmp_path: Path) -> None:
    """Two or three samples do not show it: the lower of two medians keeps both."""
    trainer = make_trainer(tmp_path, compute_loss_func=loss, per_device_train_batch_size=size)
    assert_refused(trainer, "changes with the number or the contents")


class ScalesLargeBatches(TinyForSequenceClassification):
    def __init__(self, in_training: bool) -> None:
        super().__init__()
        self.in_training = in_training

    def forward(self, x: Tensor, labels: Tensor | None = None, id: Any = None) -> Any:
        outputs = super().forward(nn.functional.dropout(x, 0.3, self.training))
        if len(x) > 3 and (self.training or not self.in_training):
            outputs["logits"] = 1.3 * outputs["logits"]
        return outputs


@pytest.mark.parametrize("in_training", [True, False])
def test_an_output_that_depends_on_batch_size_is_refused(in_training: bool, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, model=ScalesLargeBatches(in_training), compute_loss_func=plain)
    with pytest.raises(PrivacyError, match="changes with the number or the contents"):
        trainer.train()


class Normalised(TinyForSequenceClassification):
    """Normalises over the batch: over one sample, which functorch runs by itself, that is zero."""

    def forward(self, x: Tensor, labels: Tensor | None = None, id: Any = None) -> Any:
        outputs = super().forward(x)
        return {"logits": outputs["logits"] - outputs["logits"].mean(0)}


class Broken(TinyForSequenceClassification):
    def forward(self, x: Tensor, labels: Tensor | None = None, id: Any = None) -> Any:
        return {"logits": super().forward(x)["logits"] * float("nan")}


@pytest.mark.parametrize(("model", "engine"), [(Normalised, "functorch"), (Broken, "layerwise")])
def test_a_run_without_any_gradient_is_refused(
    model: type[nn.Module], engine: str, tmp_path: Path
) -> None:
    settings = {"engine": engine, "compute_loss_func": plain}
    trainer = make_trainer(tmp_path, model=model(), **settings)
    assert_refused(trainer, "No example that was tried has a gradient")


class SeededCollator:
    """Draws from a seed of its own, as collators of transformers may."""

    def __init__(self, seed: int | None) -> None:
        self.seed = seed

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        return default_data_collator(examples)


def test_a_collator_with_a_seed_of_its_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PrivacyError, match=r"SeededCollator.*seed=3"):
        make_trainer(tmp_path, data_collator=SeededCollator(3)).train()
    make_trainer(tmp_path, data_collator=SeededCollator(None)).train()


def test_a_schedule_set_by_hand_may_not_follow_evaluation_data(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    optimizer = trainer.create_optimizer()
    trainer.lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(PrivacyError, match="ReduceLROnPlateau"):
        trainer.train()


def with_a_third(outputs: Any, labels: Tensor, num_items_in_batch: Any) -> Tensor:
    assert num_items_in_batch is None or not outputs["logits"].requires_grad  # evaluation
    return plain(outputs, labels)


@pytest.mark.parametrize("loss", [plain, with_a_third])
def test_a_loss_may_take_two_arguments_or_three(loss: Any, tmp_path: Path) -> None:
    trainer = trained_in(tmp_path, compute_loss_func=loss)
    assert trainer.evaluate(points(seed=1))["eval_loss"] > 0
