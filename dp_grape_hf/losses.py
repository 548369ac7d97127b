"""Per-sample losses: sample i's loss is the mean over sample i's own targets and nothing else.

The loss that a Hugging Face model returns divides by a count over the whole batch. That couples the
samples: one sample's gradient then depends on how many tokens its batch-mates have, and clipping no
longer bounds what one sample contributes. So the model is run without labels, and the loss of each
head type is computed here from its logits.

To add a head type, write a function ``(logits, labels, config) -> (B,)`` under ``@head("ForX")``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dp_grape_hf.errors import PrivacyError, UnsupportedModelError

IGNORE_INDEX = -100

HeadLoss = Callable[[Tensor, Tensor, Any], Tensor]
LossFunction = Callable[[Any, Tensor | None], Tensor]
"""``(model outputs, labels) -> (B,)``: the type of a user's ``compute_loss_func``."""

HEADS: dict[str, HeadLoss] = {}


def head(*suffixes: str) -> Callable[[HeadLoss], HeadLoss]:
    """Registers the loss of the models whose class name ends with one of the suffixes."""

    def register(loss: HeadLoss) -> HeadLoss:
        HEADS.update(dict.fromkeys(suffixes, loss))
        return loss

    return register


@head("ForSequenceClassification", "ForImageClassification")
def classification(logits: Tensor, labels: Tensor, config: Any) -> Tensor:
    """Cross-entropy, or what ``config.problem_type`` asks for; (B, labels) -> (B,)."""
    problem = getattr(config, "problem_type", None)
    if problem == "regression" or (problem is None and logits.shape[-1] == 1):
        return (logits - labels.view_as(logits)).square().flatten(1).mean(1)
    if problem == "multi_label_classification" or labels.is_floating_point():
        targets = labels.to(logits.dtype)
        return functional.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(
            1
        )
    return functional.cross_entropy(logits, labels.view(-1), reduction="none")


@head("ForMaskedLM")
def masked_language_modelling(logits: Tensor, labels: Tensor, config: Any) -> Tensor:
    """Mean cross-entropy over the sample's own masked tokens; (B, T, V), (B, T) -> (B,)."""
    losses = functional.cross_entropy(
        logits.transpose(1, 2), labels, reduction="none", ignore_index=IGNORE_INDEX
    )  # (B, T), zero at ignored positions
    targets = (labels != IGNORE_INDEX).sum(1)
    return losses.sum(1) / targets.clamp(min=1)


@head("ForCausalLM", "LMHeadModel")
def causal_language_modelling(logits: Tensor, labels: Tensor, config: Any) -> Tensor:
    """Mean cross-entropy over the sample's own next tokens; (B, T, V), (B, T) -> (B,)."""
    return masked_language_modelling(logits[:, :-1], labels[:, 1:], config)


def loss_for(model: nn.Module) -> LossFunction:
    """Returns the per-sample loss of a model, chosen by its class name.

    Raises:
        UnsupportedModelError: if the loss of this head is not known per sample.
    """
    base: Any = model
    if hasattr(base, "get_base_model"):  # PEFT
        base = base.get_base_model()
    name = type(base).__name__
    found = next((loss for suffix, loss in HEADS.items() if name.endswith(suffix)), None)
    if found is None:
        raise UnsupportedModelError(
            f"The loss of {name} is not known per sample; known heads end with "
            f"{', '.join(sorted(HEADS))}. Pass compute_loss_func=f where f(outputs, labels) "
            "returns one loss per sample, of shape (B,), each computed from that sample alone."
        )
    config = getattr(base, "config", None)

    def loss(outputs: Any, labels: Tensor | None) -> Tensor:
        if labels is None:
            raise PrivacyError(
                f"The batch has no 'labels', which {name} needs for its loss. Add a 'labels' "
                "column or a data collator that makes labels."
            )
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
        return found(logits.float(), labels, config)

    return loss


def with_three_arguments(function: Callable[..., Tensor] | None) -> Any:
    """Returns a user's loss as the Trainer calls it, also if it takes outputs and labels only."""
    if function is None or "num_items_in_batch" in signature(function).parameters:
        return function
    if any(p.kind is p.VAR_KEYWORD for p in signature(function).parameters.values()):
        return function

    def called(outputs: Any, labels: Tensor | None, num_items_in_batch: Any = None) -> Tensor:
        return function(outputs, labels)

    return called


def checked(loss: Tensor, batch_size: int) -> Tensor:
    """Returns the losses if there is one per sample.

    Raises:
        PrivacyError: for any other shape; a batch mean cannot be split into per-sample losses.
    """
    if not isinstance(loss, torch.Tensor) or loss.shape != (batch_size,):
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise PrivacyError(
            f"The loss has shape {shape}; one loss per sample, shape ({batch_size},), is needed. "
            "Return losses without reducing over the batch (reduction='none', then a mean over "
            "each sample's own tokens)."
        )
    return loss
