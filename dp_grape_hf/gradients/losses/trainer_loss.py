"""A Trainer's own ``compute_loss``, as a loss of one sample after another.

Who subclasses ``Trainer`` to change the loss writes ``compute_loss(model, inputs)``, which returns
one number for a batch. Of such a number it is not known what each sample has in it. So the model
runs once, for all samples, and then the function is called for each of them, with a stand-in for
the model that answers with that sample's part of the outputs: what it returns can depend on no
other. Whether the loss of a batch is the mean of these is for ``examine_trainer_loss`` to find out.

Shapes: B samples in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dp_grape_hf.errors import PrivacyError, UnsupportedModelError
from dp_grape_hf.gradients.checks.guards import evaluating
from dp_grape_hf.gradients.losses.heads import Inputs
from dp_grape_hf.gradients.losses.losses import HeadLoss, loss_for
from dp_grape_hf.gradients.losses.model_loss import ModelLoss
from dp_grape_hf.gradients.rows import batch_size_of, rows_of

OTHERWISE = (
    "Pass compute_loss_func=f to the trainer, where f(outputs, labels) returns one loss per "
    "sample, of shape (B,), each computed from that sample alone (reduction='none'; class weights, "
    "for example, then multiply each sample's loss): it takes the place of compute_loss() in "
    "training."
)


@dataclass(frozen=True)
class _Asked:
    """What ``compute_loss`` was given, and the labels if it leaves the loss to the model."""

    inputs: Inputs
    labels: Tensor | None


class _Called(BaseException):
    """Carries what the model was called with past the code that called it."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs


class _StandIn:
    """Answers in place of a model when it is called, and is the model otherwise."""

    def __init__(self, model: nn.Module, answer: Callable[[Inputs], Any]) -> None:
        self._model, self._answer = model, answer
        self.calls = 0

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        self.calls += 1
        if args:
            raise PrivacyError(
                f"compute_loss() calls the model with positional arguments; give them by name. "
                f"{OTHERWISE}"
            )
        return self._answer(inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class TrainerLoss(ModelLoss):
    """The per-sample loss of a Trainer that has its own ``compute_loss``.

    Args:
        model: the model, with PEFT around it or without.
        compute_loss: ``(model, inputs) -> loss`` of a batch; the method, bound to its trainer.
    """

    name = "compute_loss(), called for each sample with its part of the outputs,"

    def __init__(self, model: nn.Module, compute_loss: Callable[..., Any]) -> None:
        self._model, self._compute_loss = model, compute_loss
        takes = signature(compute_loss).parameters
        self._arguments = {"num_items_in_batch": None} if "num_items_in_batch" in takes else {}
        self._head: HeadLoss | None = None  # where the model's own loss is known per sample
        with suppress(UnsupportedModelError):
            found = loss_for(model)
            self._head = found if isinstance(found, HeadLoss) else None

    def split(self, inputs: Mapping[str, Any]) -> tuple[Inputs, Any]:
        """Returns what ``compute_loss`` runs the model with, and what the losses are made of."""

        def interrupt(given: Inputs) -> None:
            raise _Called(given)

        try:
            self.of_batch(_StandIn(self._model, interrupt), inputs)
        except _Called as called:
            given = called.inputs
        else:
            raise PrivacyError(
                f"compute_loss() does not call the model that it is given, so its loss cannot be "
                f"taken apart by samples. {OTHERWISE}"
            )
        labels = None
        if self._head is not None:
            given, labels = self._head.split(given)
        return given, _Asked(dict(inputs), labels)

    def __call__(self, outputs: Any, asked: Any) -> Tensor:
        """Returns the losses (B,).

        Raises:
            PrivacyError: if the function calls the model more than once, or returns no number.
        """
        size = next(len(v) for v in asked.inputs.values() if isinstance(v, Tensor))
        own = self._of_model(outputs, asked)
        losses = []
        for i in range(size):
            part = _part(outputs, i, size)
            if own is not None:
                part = _with_loss(part, own[i])
            model = _StandIn(self._model, partial(_always, part))
            losses.append(self.of_batch(model, _part(asked.inputs, i, size)))
            if model.calls != 1:
                raise PrivacyError(
                    f"compute_loss() calls the model {model.calls} times, and it is run once for "
                    "all. Where an example is a pair (a chosen and a rejected answer), make it one "
                    "row, (B, 2, T), of a model that sees both at once and returns (B, 2) rewards. "
                    f"{OTHERWISE}"
                )
        return torch.stack(losses)

    def together(self, outputs: Any, asked: Any) -> Tensor:
        """Returns what ``compute_loss`` makes of all samples at once, a scalar.

        A loss that it leaves to the model is the mean of the samples' own.
        """
        own = self._of_model(outputs, asked)
        answer = outputs if own is None else _with_loss(outputs, own.mean())
        return self.of_batch(_StandIn(self._model, partial(_always, answer)), asked.inputs)

    def _of_model(self, outputs: Any, asked: Any) -> Tensor | None:
        """Returns the model's own losses (B,), if ``compute_loss`` asks the model for them."""
        if asked.labels is None:
            return None
        assert self._head is not None
        return self._head(outputs, asked.labels)

    def of_batch(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        """Returns what ``compute_loss`` makes of a batch, a scalar."""
        loss = self._compute_loss(model, dict(inputs), **self._arguments)
        loss = loss[0] if isinstance(loss, tuple) else loss
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise PrivacyError(f"compute_loss() does not return one number. {OTHERWISE}")
        return loss.reshape(())


def _always(answer: Any, inputs: Inputs) -> Any:
    return answer


def _part(value: Any, sample: int, size: int) -> Any:
    """Returns one sample's part of inputs or outputs; what does not count samples is left out."""
    if isinstance(value, Tensor):
        return value[sample : sample + 1] if value.dim() and len(value) == size else None
    if isinstance(value, Mapping):
        parts = {k: _part(v, sample, size) for k, v in value.items()}
        kept = {k: v for k, v in parts.items() if v is not None}
        return type(value)(**kept) if isinstance(value, dict) else kept
    if isinstance(value, tuple):
        return tuple(_part(item, sample, size) for item in value)
    return value if isinstance(value, bool | int | float | str) else None


def _with_loss(outputs: Any, loss: Tensor) -> Any:
    """Returns outputs with the model's own loss, where a model puts it."""
    if isinstance(outputs, tuple):
        return (loss, *outputs)
    return type(outputs)(**{**outputs, "loss": loss})


_APART = 1e-3  # of two ways to compute the same loss, relative


def examine_trainer_loss(model: nn.Module, loss: TrainerLoss, inputs: Inputs) -> None:
    """Refuses a Trainer's own loss that is not the mean of what it is for single examples.

    Values may be equal by accident, before anything was learnt. So the gradient in the outputs of
    the model is compared as well.

    Args:
        model: the model.
        loss: made of the Trainer's ``compute_loss``.
        inputs: a batch of the model's keyword arguments.

    Raises:
        PrivacyError: it is a weighted mean, say, or divides by a count over the batch.
    """
    size = batch_size_of(inputs)
    several = rows_of(inputs, [row % size for row in range(max(4, size))])
    with evaluating(model):
        with torch.no_grad():
            given, asked = loss.split(several)
            outputs = model(**given)
        if (labels := _all_classes(outputs, several.get("labels"))) is not None:
            _, asked = loss.split({**several, "labels": labels})

        def shown(made: Callable[[Any, Any], Tensor]) -> list[Tensor]:
            leaves: list[Tensor] = []

            def leaf(value: Any) -> Any:
                if not isinstance(value, Tensor) or not value.is_floating_point():
                    return value
                leaves.append(value.detach().requires_grad_())
                return leaves[-1].clone()

            value = made(tree_map(leaf, outputs), asked).mean()
            found = torch.autograd.grad(value, leaves, materialize_grads=True)
            return [value.detach(), *found]

        pairs = list(zip(shown(loss.together), shown(loss), strict=True))
    if any((whole - parts).norm() > _APART * parts.norm() + _APART**2 for whole, parts in pairs):
        raise PrivacyError(
            "compute_loss() of this trainer is not the mean over a batch of what it returns for "
            "each example alone: it weighs examples by class and divides by the sum of the "
            "weights, say, or divides by a count over the batch. So it cannot be taken apart by "
            f"samples. {OTHERWISE}"
        )


def _all_classes(outputs: Any, labels: Any) -> Tensor | None:
    """Returns labels of all classes in turn, where each sample has one: a few may be alike."""
    if not isinstance(labels, Tensor) or labels.dim() != 1 or labels.is_floating_point():
        return None
    scores = [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.dim() == 2]
    if not scores:
        return None
    classes = min(score.shape[1] for score in scores)
    return torch.arange(len(labels), device=labels.device).to(labels.dtype) % classes
