"""Per-sample losses from a Trainer's own ``compute_loss``.

A subclass of ``Trainer`` may define ``compute_loss(model, inputs)``, which returns one number for a
batch. This number does not show the loss of each sample. So the model runs once, for all samples,
and then the function is called for each sample, with a stand-in for the model that returns this
sample's part of the outputs. So the result cannot depend on other samples. ``examine_trainer_loss``
checks that the loss of a batch is the mean of these losses.

Shapes: B samples in the batch.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
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
    "sample, of shape (B,), each computed from that sample alone (reduction='none'; class weights "
    "then multiply each sample's loss). It replaces compute_loss() in training."
)


_Asked = tuple[Inputs, Tensor | None]
"""The inputs of ``compute_loss``, and the labels if it uses the model's loss."""


class _Called(BaseException):
    """Exception that leaves ``compute_loss`` with the inputs of its call of the model."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs


class _StandIn:
    """A stand-in for a model: a call returns an answer, and it has the model's attributes.

    Args:
        model: the model.
        answer: the result of a call; None to leave by ``_Called``.
    """

    def __init__(self, model: nn.Module, answer: Any = None) -> None:
        self._model, self._answer = model, answer
        self.calls = 0

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        self.calls += 1
        if args:
            raise PrivacyError(
                f"compute_loss() calls the model with positional arguments. Pass them by name. "
                f"{OTHERWISE}"
            )
        if self._answer is None:
            raise _Called(inputs)
        return self._answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class TrainerLoss(ModelLoss):
    """The per-sample loss of a Trainer that has its own ``compute_loss``.

    Args:
        model: the model, with PEFT's wrapper or without.
        compute_loss: ``(model, inputs) -> loss`` of a batch; the bound method of the trainer.
    """

    name = "compute_loss(), called for each sample with its part of the outputs,"

    def __init__(self, model: nn.Module, compute_loss: Callable[..., Any]) -> None:
        self._model, self._compute_loss = model, compute_loss
        takes = signature(compute_loss).parameters
        self._arguments = {"num_items_in_batch": None} if "num_items_in_batch" in takes else {}
        self._head: HeadLoss | None = None  # the model's per-sample loss, if it is known
        with suppress(UnsupportedModelError):
            loss = loss_for(model)
            self._head = loss if isinstance(loss, HeadLoss) else None

    def split(self, inputs: Mapping[str, Any]) -> tuple[Inputs, _Asked]:
        """Return the inputs with which ``compute_loss`` runs the model, and its own inputs."""
        try:
            self.of_batch(_StandIn(self._model), inputs)
        except _Called as called:
            given = called.inputs
        else:
            raise PrivacyError(
                f"compute_loss() does not call the model that it receives, so its loss cannot be "
                f"split by samples. {OTHERWISE}"
            )
        given, labels = (given, None) if self._head is None else self._head.split(given)
        return given, (dict(inputs), labels)

    def __call__(self, outputs: Any, asked: Any) -> Tensor:
        """Return the losses (B,).

        Raises:
            PrivacyError: if the function calls the model more than once, or returns no number.
        """
        inputs, _ = asked
        size = next(len(v) for v in inputs.values() if isinstance(v, Tensor))
        own, losses = self._of_model(outputs, asked), []
        for i in range(size):
            model = _StandIn(self._model, _with_loss(_part(outputs, i, size), own, i))
            losses.append(self.of_batch(model, _part(inputs, i, size)))
            if model.calls != 1:
                raise PrivacyError(
                    f"compute_loss() calls the model {model.calls} times, but one call is needed. "
                    "If an example is a pair (a chosen and a rejected answer), make it one row, "
                    "(B, 2, T), and use a model that reads both and returns (B, 2) rewards. "
                    f"{OTHERWISE}"
                )
        return torch.stack(losses)

    def together(self, outputs: Any, asked: _Asked) -> Tensor:
        """Return ``compute_loss`` of all samples together, a scalar.

        If it uses the model's loss, that is the mean of the per-sample losses.
        """
        own = self._of_model(outputs, asked)
        own = None if own is None else own.mean()[None]
        return self.of_batch(_StandIn(self._model, _with_loss(outputs, own, 0)), asked[0])

    def _of_model(self, outputs: Any, asked: _Asked) -> Tensor | None:
        """Return the model's per-sample losses (B,), if ``compute_loss`` uses the model's loss."""
        _, labels = asked
        return None if self._head is None or labels is None else self._head(outputs, labels)

    def of_batch(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        """Return ``compute_loss`` of a batch, a scalar."""
        loss = self._compute_loss(model, dict(inputs), **self._arguments)
        loss = loss[0] if isinstance(loss, tuple) else loss
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise PrivacyError(f"compute_loss() does not return one number. {OTHERWISE}")
        return loss.reshape(())


def _part(value: Any, sample: int, size: int) -> Any:
    """Return one sample's part of inputs or outputs, without tensors of other leading sizes."""
    if isinstance(value, Tensor):
        return value[sample : sample + 1] if value.dim() and len(value) == size else None
    if isinstance(value, Mapping):
        parts = {k: _part(v, sample, size) for k, v in value.items()}
        kept = {k: v for k, v in parts.items() if v is not None}
        return type(value)(**kept) if isinstance(value, dict) else kept
    if isinstance(value, tuple):
        return tuple(_part(item, sample, size) for item in value)
    return value if isinstance(value, bool | int | float | str) else None


def _with_loss(outputs: Any, losses: Tensor | None, sample: int) -> Any:
    """Return outputs with the loss of one sample, if there are losses."""
    if losses is None:
        return outputs
    if isinstance(outputs, tuple):
        return (losses[sample], *outputs)
    return type(outputs)(**{**outputs, "loss": losses[sample]})


_TOLERANCE = 1e-3  # relative difference of two computations of the same loss


def examine_trainer_loss(model: nn.Module, loss: TrainerLoss, inputs: Inputs) -> None:
    """Refuse a Trainer's loss of a batch that is not the mean of its losses of single examples.

    Values may be equal by accident before training, so gradients in the model's outputs are
    compared as well.

    Args:
        model: the model.
        loss: the loss made of the Trainer's ``compute_loss``.
        inputs: a batch of the model's keyword arguments.

    Raises:
        PrivacyError: if the loss is, for instance, a weighted mean, or divides by a count over the
            batch.
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
    small = _TOLERANCE
    if any((whole - parts).norm() > small * parts.norm() + small**2 for whole, parts in pairs):
        raise PrivacyError(
            "compute_loss() of this trainer is not the mean over a batch of what it returns for "
            "each example alone. For example, it weighs examples by class and divides by the sum "
            "of the weights, or divides by a count over the batch. So it cannot be split by "
            f"samples. {OTHERWISE}"
        )


def _all_classes(outputs: Any, labels: Any) -> Tensor | None:
    """Return labels that contain all classes in turn; None if labels are not one class each.

    The labels of a small batch may all be equal, which would hide a weighted mean.
    """
    if not isinstance(labels, Tensor) or labels.dim() != 1 or labels.is_floating_point():
        return None
    scores = [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.dim() == 2]
    if not scores:
        return None
    classes = min(score.shape[1] for score in scores)
    return torch.arange(len(labels), device=labels.device).to(labels.dtype) % classes
