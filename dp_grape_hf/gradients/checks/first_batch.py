"""What is checked before the first release.

That collator and model make no example depend on another, at the size of a physical batch too, that
gradients are those of plain autograd, and that the optimizer has what is trained. The engine's own
probe (``coupling``) finds samples that are coupled in pairs. Whether each layer's rule is right for
this model is a different question, which only the definition answers: the gradient of one example's
loss, by ordinary autograd, through the model as it is.

Shapes: B samples in a batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dp_grape_hf.errors import PrivacyError, UnsupportedModelError
from dp_grape_hf.gradients.checks.coupling import (
    copies_of,
    evaluating,
    first_two,
    listed,
    refuse_coupled_batch,
    refuse_coupled_losses,
    rows_of,
)
from dp_grape_hf.gradients.checks.guards import keeping_random_state
from dp_grape_hf.gradients.checks.sketches import (
    Prints,
    Tolerance,
    differing,
    joint_error,
    tolerance_for,
)
from dp_grape_hf.gradients.engine import Gradients, PerSampleEngine, batch_size_of
from dp_grape_hf.gradients.losses.losses import ModelLoss, checked, split
from dp_grape_hf.gradients.losses.trainer_loss import OTHERWISE, TrainerLoss
from dp_grape_hf.projections import Projector

_APART = 1e-3  # of two ways to compute the same loss, relative
_LEAST_CHANGE = 1e-2  # of a loss, relative, that is a change where batches have other shapes


# ---- The first batch ----


def examine_batch(
    engine: PerSampleEngine,
    inputs: Mapping[str, Any],
    projectors: Mapping[str, Projector],
) -> None:
    """Tries losses and gradients on as many different examples as a physical batch holds.

    Args:
        engine: computes per-sample gradients of its model, which is in training mode.
        inputs: a batch of the model's keyword arguments.
        projectors: parameter name -> projector.

    Raises:
        PrivacyError: if a loss depends on the others of the batch, or no example has a gradient.
    """
    size = batch_size_of(inputs)
    engine.refuse_noise(inputs)
    if size > 1 and not engine.isolates_samples:
        change, rounding = tolerance_for(engine.model).change, engine.rounding_of_losses(inputs)
        refuse_coupled_batch(engine.losses, inputs, change, rounding)
    squared = torch.zeros(size, device=engine.device)

    def measure(gradients: Gradients) -> None:
        squared.add_(sum(gradient.squared_norm().float() for gradient in gradients.values()))

    with keeping_random_state():
        engine.stream(inputs, projectors, measure)
    if not ((squared > 0) & squared.isfinite()).any():
        raise PrivacyError(
            "No example that was tried has a gradient: all are zero, or hold NaN or infinite "
            "numbers, so that noise alone would train the model. Look at the labels (all ignored?) "
            "and the weights (NaN?), and for statistics over a batch, which engine='functorch' "
            "takes over batches of one sample."
        )


def examine_trainer_loss(
    engine: PerSampleEngine, loss: TrainerLoss, inputs: Mapping[str, Any]
) -> None:
    """Refuses a Trainer's own loss that is not the mean of what it is for single examples.

    Values may be equal by accident, before anything was learnt. So the gradient in the outputs of
    the model is compared as well.

    Args:
        engine: computes losses with ``loss``.
        loss: made of the Trainer's ``compute_loss``.
        inputs: a batch of the model's keyword arguments.

    Raises:
        PrivacyError: it is a weighted mean, say, or divides by a count over the batch.
    """
    size = batch_size_of(inputs)
    several = rows_of(inputs, [row % size for row in range(max(4, size))])
    with evaluating(engine.model):
        with torch.no_grad():
            given, asked = loss.split(several)
            outputs = engine.model(**given)
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


# ---- Gradients ----


def check_gradients(
    engine: PerSampleEngine,
    inputs: Mapping[str, Any],
    projectors: Mapping[str, Projector],
) -> None:
    """Compares an engine with autograd on each sample alone, and with itself in other orders.

    All samples of the batch are compared, with masks of attention that leave each another length,
    since a model may bring rows into an order of its own; then permuted and reversed. Two samples
    are compared as they are. Dropout is off. Of gradients only marks are kept (``sketches``).

    Args:
        engine: computes per-sample gradients of its model.
        inputs: a batch of the model's keyword arguments; of a single sample, copies are taken.
        projectors: parameter name -> projector.

    Raises:
        UnsupportedModelError: if a gradient is not what autograd says, with the parameter's name,
            or changes with the order of the samples.
        PrivacyError: if a sample's loss is not what it is alone.
    """
    rounding = engine.rounding_of_losses(inputs)
    compare = _Comparison(engine, projectors, tolerance_for(engine.model), rounding)
    with evaluating(engine.model):
        compare.with_autograd(first_two(inputs))
        several = _of_other_lengths(engine, inputs)
        losses, marks = compare.with_autograd(several)
        for order in (torch.arange(len(losses)).flip(0), torch.randperm(len(losses))):
            rows = order.tolist()
            compare.with_another_order(rows_of(several, rows), losses[rows], marks[rows])


def _of_other_lengths(engine: PerSampleEngine, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns at least two samples, of which each masks more of its positions than the next does.

    They stay as they are if the model has no masks of attention, or cannot run with these.
    """
    size = max(2, batch_size_of(inputs))
    several = rows_of(inputs, [row % batch_size_of(inputs) for row in range(size)])
    shorter = dict(several)
    for name, mask in several.items():
        if name.endswith("attention_mask") and isinstance(mask, Tensor) and mask.dim() == 2:
            seen = mask.long().cumsum(1)  # how many positions there were up to each
            most = seen[:, -1:]
            number = torch.arange(size, device=mask.device)[:, None]
            left = most // 2 + 1 + number % (most - most // 2).clamp(min=1)
            shorter[name] = torch.where(seen > left, 0, mask)
    try:
        with torch.no_grad():
            engine.losses(shorter)
    except Exception:  # what a model asks of its inputs is not known; the masks may be no masks
        return several
    return shorter


@dataclass(frozen=True)
class _Comparison:
    """Holds the losses (B,) and the marks (B, P, 2) of an engine against others."""

    engine: PerSampleEngine
    projectors: Mapping[str, Projector]
    tolerance: Tolerance
    rounding: float  # of losses, absolute

    def with_autograd(self, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Refuses an engine that does not agree with autograd; returns its losses and marks."""
        losses, marks = self._marked(inputs)
        alone = [self._alone(copies_of(inputs, 1, sample)) for sample in range(len(losses))]
        self._refuse_other_losses(losses, torch.cat([loss for loss, _ in alone]))
        expected = torch.cat([own for _, own in alone])
        if wrong := self._wrong(inputs, losses, marks, expected):
            raise UnsupportedModelError(
                f"Per-sample gradients differ by more than {self.tolerance.error:g} of their norm "
                f"from those of plain autograd on one example at a time, for {wrong}. "
                f"{type(self.engine).__name__} computes them wrongly for this model, or the model "
                "computes something else for one example than for several. Choose the other engine "
                '(engine="functorch" or "layerwise"), or freeze these parameters with '
                "requires_grad_(False). Nothing was released."
            )
        return losses, marks

    def with_another_order(
        self, inputs: Mapping[str, Any], losses: Tensor, expected: Tensor
    ) -> None:
        """Refuses an engine whose losses and marks were others when the samples lay elsewhere."""
        again, marks = self._marked(inputs)
        if wrong := self._wrong(inputs, losses, marks, expected):
            raise UnsupportedModelError(
                f"Per-sample gradients of {type(self.engine.model).__name__} change with the order "
                f"of the samples in their batch, for {wrong}: the model sorts its rows (by length, "
                "say), or mixes them, so that a gradient is not known to be its sample's. Leave "
                "the rows in their order, or use engine='functorch', which runs each by itself. "
                "Nothing was released."
            )
        self._refuse_other_losses(again, losses)

    def _refuse_other_losses(self, losses: Tensor, expected: Tensor) -> None:
        change = max(self.tolerance.change, _LEAST_CHANGE)
        refuse_coupled_losses(losses, expected, change, self.rounding)

    def _marked(self, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        prints = Prints()
        losses = self.engine.stream(inputs, self.projectors, prints)
        return losses, prints.marks(list(self.engine.trainable))

    def _alone(self, one: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Returns the loss (1,) of one sample alone, or copies, and its gradient's marks."""
        loss = _loss_alone(self.engine, one)
        prints = self.engine.by_autograd(loss, self.projectors)
        return loss.detach()[None], prints.marks(list(self.engine.trainable))

    def _wrong(
        self, inputs: Mapping[str, Any], losses: Tensor, found: Tensor, expected: Tensor
    ) -> str:
        """Names the parameters of which the gradient of a sample differs, by more than rounding.

        What rounding is plain autograd says, on one copy of the sample and on two: the gradient of
        a pair of equal texts is nothing else.
        """
        telling = (losses.abs() > self.tolerance.loss) & losses.isfinite()
        differ = differing(found, expected, self.tolerance) & telling.cpu()[:, None]
        for sample in differ.any(1).nonzero().flatten().tolist():
            one, two = (self._alone(copies_of(inputs, copies, sample))[1] for copies in (1, 2))
            error, norm = joint_error(one, two)
            differ[sample] &= bool(0 < norm and error <= self.tolerance.error * norm)
        names = [n for n, any_ in zip(self.engine.trainable, differ.any(0), strict=True) if any_]
        return listed([f"{name} (of {_owner(self.engine.model, name)})" for name in names])


def _loss_alone(engine: PerSampleEngine, one: Mapping[str, Any]) -> Tensor:
    """Returns the loss of one sample, or the mean of copies: the model's own, if it has one."""
    if isinstance(engine.loss, ModelLoss):
        own = engine.loss.of_batch(engine.model, one)
        if own is not None and own.isfinite():
            return own
    inputs, labels = split(engine.loss, one)
    return checked(engine.loss(engine.model(**inputs), labels), batch_size_of(one)).mean()


def _owner(model: nn.Module, name: str) -> str:
    path = name.rpartition(".")[0]
    return f"{path or 'the model'}, a {type(model.get_submodule(path)).__name__}"


# ---- The optimizer ----


def require_each_once(
    optimizer: torch.optim.Optimizer, model: nn.Module, trainable: Mapping[str, nn.Parameter]
) -> None:
    """Refuses an optimizer whose groups are not made of the parameters that are trained.

    Args:
        optimizer: as training begins; its user may have made it, or have frozen weights since.
        model: the model that is trained.
        trainable: parameter name -> parameter, of those that are differentiated.

    Raises:
        PrivacyError: if one of them is left out or is there twice, or if another is there.
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    counts = Counter(map(id, held))
    for name, parameter in trainable.items():
        if (count := counts.pop(id(parameter), 0)) == 0:
            raise PrivacyError(
                f"{name} is trainable and not in the optimizer: its share of the privacy budget "
                f"would buy nothing. Freeze it with requires_grad_(False), or {_A_NEW_ONE}"
            )
        if count > 1:
            raise PrivacyError(
                f"{name} is in the optimizer {count} times, and each would move it by what is "
                f"released once: {_A_NEW_ONE}"
            )
    if counts:
        names = {id(p): name for name, p in model.named_parameters()}
        other = next(names.get(key, "A tensor that is none of the model's") for key in counts)
        raise PrivacyError(
            f"{other} is in the optimizer and not trainable, so no gradient of it is released; "
            f"frozen since the optimizer was made, say. Unfreeze it, or {_A_NEW_ONE}"
        )


_A_NEW_ONE = (
    "set trainer.optimizer=None before train(), which then makes one of all that is trainable (and "
    "make a scheduler of your own for that one, by trainer.create_optimizer()). Nothing was "
    "released."
)
