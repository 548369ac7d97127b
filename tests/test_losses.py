"""Per-sample losses against what the models themselves compute for one sample."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dp_grape_hf.errors import PrivacyError, UnsupportedModelError
from dp_grape_hf.losses import HEADS, checked, loss_for
from tests.models import CASES, LABELS, Batch, Case, only

B = 4
classifier = only("roberta-classifier")

# Per problem type: the configuration, and labels for B samples.
PROBLEMS: dict[str, tuple[dict[str, Any], Tensor]] = {
    "single_label_classification": ({}, torch.tensor([0, 2, 1, 2])),
    "declared single label": (
        {"problem_type": "single_label_classification"},
        torch.tensor([0, 2, 1, 2]),
    ),
    "multi_label_classification": (
        {"problem_type": "multi_label_classification"},
        torch.tensor([[0.0, 1, 1], [0, 0, 0], [1, 1, 1], [1, 0, 0]]),
    ),
    "multi label by float labels": ({}, torch.eye(LABELS)[[0, 1, 2, 1]]),
    "regression": ({"num_labels": 1}, torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "regression with column labels": (
        {"num_labels": 1},
        torch.tensor([[0.5], [-1.0], [2.0], [0.0]]),
    ),
    "declared regression": (
        {"problem_type": "regression", "num_labels": LABELS},
        torch.tensor([[0.5, 1, -1], [2, 0, 0], [0, 0, 0.25], [1, 1, 1]]),
    ),
    "declared regression of one number": (
        {"problem_type": "regression", "num_labels": 1},
        torch.tensor([0.5, -1.0, 2.0, 0.0]),
    ),
}


def per_sample(model: nn.Module, inputs: Batch) -> Tensor:
    labels = inputs["labels"]
    outputs = model(**{key: value for key, value in inputs.items() if key != "labels"})
    return loss_for(model)(outputs, labels)


def own(model: nn.Module, inputs: Batch) -> Tensor:
    """The model's own loss of each sample in a batch of one."""
    return torch.stack(
        [model(**{k: v[i : i + 1] for k, v in inputs.items()}).loss for i in range(B)]
    )


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("padding", ["right", "left"])
def test_each_loss_equals_the_models_own_for_a_batch_of_one(case: Case, padding: str) -> None:
    model, inputs = case.model(), case.batch(B, case.positions, padding=padding)
    losses = per_sample(model, inputs)
    assert losses.shape == (B,)
    torch.testing.assert_close(losses, own(model, inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_problem_type_equals_the_models_own_loss(problem: str) -> None:
    settings, labels = PROBLEMS[problem]
    inputs = {**classifier.batch(B), "labels": labels}
    losses = per_sample(classifier.model(**settings), inputs)
    # A model without a declared problem type fixes it at its first loss: a fresh one.
    expected = own(classifier.model(**settings), inputs)
    assert losses.shape == (B,)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)


def test_the_models_own_batch_loss_is_not_the_mean_over_samples_and_ours_is_per_sample() -> None:
    case = only("llama")
    model, inputs = case.model(), case.batch(B)
    assert not torch.allclose(model(**inputs).loss, per_sample(model, inputs).mean(), rtol=1e-4)


@pytest.mark.parametrize("name", ["roberta-masked-lm", "gpt2"])
def test_the_mean_runs_over_a_samples_own_targets_and_is_zero_without_any(name: str) -> None:
    case = only(name)
    model, inputs = case.model(), case.batch(B)
    before = per_sample(model, inputs).detach()
    inputs["labels"][2] = -100
    losses = per_sample(model, inputs)
    assert losses[2] == 0
    torch.testing.assert_close(losses[[0, 1, 3]], before[[0, 1, 3]])
    (gradient,) = torch.autograd.grad(losses[2], model.get_input_embeddings().weight)
    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_a_causal_loss_does_not_predict_the_first_token() -> None:
    model, inputs = only("gpt2").model(), only("gpt2").batch(B)
    before = per_sample(model, inputs)
    inputs["labels"][:, 0] = 7
    assert torch.equal(per_sample(model, inputs), before)


def test_losses_are_float32_for_a_half_precision_model() -> None:
    model = classifier.model().to(torch.bfloat16)
    assert per_sample(model, classifier.batch(B)).dtype is torch.float32


@pytest.mark.parametrize("outputs", [tuple, dict, SimpleNamespace])
def test_outputs_may_be_a_tuple_or_a_mapping(outputs: Any) -> None:
    class ToyForImageClassification(nn.Module):
        pass

    logits, labels = torch.randn(B, 3), torch.tensor([0, 1, 2, 0])
    given: Any = (logits, "more") if outputs is tuple else {"logits": logits}
    losses = loss_for(ToyForImageClassification())(given, labels)
    expected = nn.functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(losses, expected)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_a_peft_model_has_the_loss_of_the_model_inside() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        classifier.model(), peft.LoraConfig(target_modules=["query"], task_type="SEQ_CLS")
    )
    inputs = classifier.batch(B)
    torch.testing.assert_close(per_sample(model, inputs), own(model, inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        "ToyForTokenClassification",
        "ToyForQuestionAnswering",
        "ToyForConditionalGeneration",
        "ToyModel",
    ],
)
def test_an_unknown_head_is_refused_with_the_known_ones_and_what_to_do(name: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        loss_for(type(name, (nn.Module,), {})())
    message = str(error.value)
    assert f"The loss of {name} is not known" in message
    assert "compute_loss_func" in message
    assert all(suffix in message for suffix in HEADS)


@pytest.mark.parametrize("shape", [(), (1,), (3, 1), (3, 5), (4,)])
def test_a_loss_of_any_shape_but_one_per_sample_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(PrivacyError) as error:
        checked(torch.zeros(shape), 3)
    assert str(shape) in str(error.value)
    assert "shape (3,)" in str(error.value)
    assert torch.equal(checked(torch.zeros(3), 3), torch.zeros(3))


def test_missing_labels_are_refused() -> None:
    model = classifier.model()
    with pytest.raises(PrivacyError, match="no 'labels'"):
        loss_for(model)({"logits": torch.zeros(B, LABELS)}, None)
