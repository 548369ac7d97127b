"""What is checked before the first release.

That collator and model make no example depend on another, at the size of a physical batch too, that
gradients are those of plain autograd, and that the optimizer has what is trained. The engine's own
probe (``probing``) finds samples that are coupled in pairs. Whether each layer's rule is right for
this model is a different question, which only the definition answers: the gradient of one example's
loss, by ordinary autograd, through the model as it is.

Shapes: B samples in a batch.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dp_grape_hf.errors import PrivacyError, UnsupportedModelError
from dp_grape_hf.per_sample.engine import Gradients, PerSampleEngine, batch_size_of
from dp_grape_hf.per_sample.guards import keeping_random_state, refusing_changed_weights
from dp_grape_hf.per_sample.losses.losses import LossFunction, ModelLoss, checked, split
from dp_grape_hf.per_sample.losses.trainer_loss import OTHERWISE, TrainerLoss
from dp_grape_hf.per_sample.prints import (
    Prints,
    Tolerance,
    computes_in_16_bits,
    differing,
    joint_error,
    tolerance_for,
)
from dp_grape_hf.per_sample.probing import (
    copies_of_first,
    evaluating,
    first_two,
    refuse_coupled_batch,
    refuse_coupled_losses,
    rows_of,
)
from dp_grape_hf.projections import Projector
from dp_grape_hf.sharding import is_sharded, local, whole

logger = logging.getLogger(__name__)

_APART = 1e-3  # of two ways to compute the same loss, relative
# Of a sample's loss alone and among others, relative, by whether there are numbers of 16 bits.
_IN_COMPANY = {False: 1e-3, True: 5e-2}
_NAMED = 5  # parameters that an error or a warning names, at most


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
        model = engine.model
        refuse_coupled_batch(
            lambda batch: engine.losses(model, batch, batch_size_of(batch)),
            inputs,
            tolerance=_IN_COMPANY[computes_in_16_bits(model)],
        )
    squared = torch.zeros(size, device=engine.device)

    def measure(gradients: Gradients) -> None:
        squared.add_(sum(gradient.squared_norm().float() for gradient in gradients.values()))

    with keeping_random_state(), refusing_changed_weights(engine.model, thorough=True):
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
            outputs, asked = _outputs_and_labels(loss, engine.model, several)
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


def _outputs_and_labels(
    loss: LossFunction, model: nn.Module, inputs: Mapping[str, Any]
) -> tuple[Any, Any]:
    rest, labels = split(loss, inputs)
    return model(**rest), labels


# ---- Gradients ----


def check_gradients(
    engine: PerSampleEngine,
    inputs: Mapping[str, Any],
    projectors: Mapping[str, Projector],
) -> None:
    """Compares an engine with autograd on each sample alone, and with itself in other orders.

    All samples of the batch are compared, with masks of attention that leave each another length,
    since a model may bring rows into an order of its own; then permuted and reversed. Two samples
    are compared as they are. Dropout is off. Of gradients only marks are kept (``prints``).

    Args:
        engine: computes per-sample gradients of its model.
        inputs: a batch of the model's keyword arguments; of a single sample, copies are taken.
        projectors: parameter name -> projector.

    Raises:
        UnsupportedModelError: if a gradient is not what autograd says, with the parameter's name,
            or changes with the order of the samples.
        PrivacyError: if a sample's loss is not what it is alone.
    """
    two, model = first_two(inputs), engine.model
    tolerance = tolerance_for(model)
    with keeping_random_state(), refusing_changed_weights(model, thorough=True):
        engine(two, projectors)  # an engine looks at its first batch in training mode
    with evaluating(model):
        _compare_with_autograd(engine, two, projectors, tolerance)
        several = _of_other_lengths(engine, inputs)
        losses, marks = _compare_with_autograd(engine, several, projectors, tolerance)
        size = batch_size_of(several)
        for order in (torch.arange(size).flip(0), torch.randperm(size)):
            rows = order.tolist()
            permuted, before = rows_of(several, rows), losses[rows]
            again, found = _marked(engine, permuted, projectors)
            expected = marks[order]
            if wrong := _wrong(engine, permuted, projectors, before, found, expected, tolerance):
                raise UnsupportedModelError(
                    f"Per-sample gradients of {type(model).__name__} change with the order of the "
                    f"samples in their batch, for {_listed(engine, wrong)}: the model sorts its "
                    "rows (by length, say), or mixes them, so that a gradient is not known to be "
                    "its sample's. Leave the rows in their order, or use engine='functorch', which "
                    "runs each by itself. Nothing was released."
                )
            if (again - before).abs().gt(tolerance.change * before.abs()).any():
                refuse_coupled_losses(again, before)


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
            engine.losses(engine.model, shorter, size)
    except Exception:  # what a model asks of its inputs is not known; the masks may be no masks
        return several
    return shorter


def _compare_with_autograd(
    engine: PerSampleEngine,
    inputs: Mapping[str, Any],
    projectors: Mapping[str, Projector],
    tolerance: Tolerance,
) -> tuple[Tensor, Tensor]:
    """Refuses an engine that does not agree with autograd; returns losses (B,) and marks."""
    losses, marks = _marked(engine, inputs, projectors)
    alone = []
    for sample in range(len(losses)):
        one = copies_of_first(inputs, 1, sample=sample)
        loss, own = _alone(engine, one, projectors)
        if (losses[sample] - loss).abs() > tolerance.change * loss.abs():
            refuse_coupled_losses(losses[sample : sample + 1], loss)
        alone.append(own)
    if wrong := _wrong(engine, inputs, projectors, losses, marks, torch.cat(alone), tolerance):
        raise UnsupportedModelError(
            f"Per-sample gradients differ by more than {tolerance.error:g} of their norm from "
            f"those of plain autograd on one example at a time, for {_listed(engine, wrong)}. "
            f"{type(engine).__name__} computes them wrongly for this model, or the model computes "
            "something else for one example than for several. Choose the other engine (engine="
            '"functorch" or "layerwise"), or freeze these parameters with requires_grad_(False). '
            "Nothing was released. self_check=False trains all the same, on gradients that are "
            "wrong."
        )
    return losses, marks


def _marked(
    engine: PerSampleEngine, inputs: Mapping[str, Any], projectors: Mapping[str, Projector]
) -> tuple[Tensor, Tensor]:
    """Returns losses (B,) and the marks (B, P, 2) of an engine's gradients."""
    prints = Prints()
    losses = engine.stream(inputs, projectors, prints)
    return losses, prints.marks(list(engine.trainable))


def _wrong(
    engine: PerSampleEngine,
    inputs: Mapping[str, Any],
    projectors: Mapping[str, Projector],
    losses: Tensor,
    found: Tensor,
    expected: Tensor,
    tolerance: Tolerance,
) -> list[str]:
    """Returns the parameters of which the gradient of a sample differs, by more than rounding.

    What rounding is plain autograd says, on one copy of the sample and on two: the gradient of a
    pair of equal texts is nothing else.
    """
    telling = (losses.abs() > tolerance.loss) & losses.isfinite()
    differ = differing(found, expected, tolerance) & telling.cpu()[:, None]
    for sample in differ.any(1).nonzero().flatten().tolist():
        one, two = (
            _alone(engine, copies_of_first(inputs, copies, sample=sample), projectors)[1]
            for copies in (1, 2)
        )
        error, norm = joint_error(one, two)
        differ[sample] &= bool(0 < norm and error <= tolerance.error * norm)
    return [name for name, any_ in zip(engine.trainable, differ.any(0), strict=True) if any_]


def _alone(
    engine: PerSampleEngine, one: Mapping[str, Any], projectors: Mapping[str, Projector]
) -> tuple[Tensor, Tensor]:
    """Returns the loss (1,) of one sample alone, or copies, and its gradient's marks (1, P, 2).

    Each parameter's gradient is projected, marked and freed as soon as autograd has it.
    """
    names = {parameter: name for name, parameter in engine.trainable.items()}
    prints = Prints()

    def receive(parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        name, gradient = names[parameter], parameter.grad.float()
        parameter.grad = None
        gradient = whole(gradient)  # a mean over processes, which all look at this sample
        projector = projectors.get(name)
        with torch.no_grad(), torch.autocast(gradient.device.type, enabled=False):
            prints.add(name, projector.project(gradient) if projector else gradient)

    hooks = [p.register_post_accumulate_grad_hook(receive) for p in names]
    try:
        loss = _loss_alone(engine, one)
        reached = None if is_sharded(engine.model) else list(names)
        torch.autograd.backward(loss.sum(), inputs=reached)
    finally:
        for hook in hooks:
            hook.remove()
    return loss.detach(), prints.marks(list(engine.trainable))


def _loss_alone(engine: PerSampleEngine, one: Mapping[str, Any]) -> Tensor:
    """Returns the loss (1,) of one sample, or copies: what the model says, where it says one."""
    if isinstance(engine.loss, ModelLoss):
        own = engine.loss.of_batch(engine.model, one)
        if own is not None and own.isfinite():
            return own[None]
    outputs, labels = _outputs_and_labels(engine.loss, engine.model, one)
    return checked(engine.loss(outputs, labels), batch_size_of(one)).mean()[None]


def _listed(engine: PerSampleEngine, names: Sequence[str]) -> str:
    owned = []
    for name in names[:_NAMED]:
        path = name.rpartition(".")[0]
        kind = type(engine.model.get_submodule(path)).__name__
        owned.append(f"{name} (of {path or 'the model'}, a {kind})")
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(owned) + more


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


@torch.no_grad()
def warn_of_lost_updates(
    optimizer: torch.optim.Optimizer, trainable: Mapping[str, nn.Parameter]
) -> None:
    """Warns of weights of 16 bits whose updates may be lost to rounding.

    That is where the learning rate, about which Adam moves a number at most, is below the distance
    between numbers of their typical size. Nothing of the training data is looked at.

    Args:
        optimizer: made without ``float32_updates``, once its schedule is made.
        trainable: parameter name -> parameter.
    """
    names = {id(p): name for name, p in trainable.items()}
    lost: list[str] = []
    for group in optimizer.param_groups:
        rate = float(group.get("initial_lr", group["lr"]))  # the first is that after a warm-up
        for parameter in group["params"]:
            number = torch.finfo(parameter.dtype)
            if number.bits < 32:
                here = local(parameter)
                norm = float(torch.linalg.vector_norm(here, dtype=torch.float32))
                typical = norm / math.sqrt(max(here.numel(), 1))
                if 0 < rate < number.eps * typical:
                    lost.append(names[id(parameter)])
    if lost:
        more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
        logger.warning(
            "Updates of %s%s may be lost to rounding: their numbers have 16 bits, and the learning "
            "rate is below the distance from one to the next. Load the model in float32, set "
            "float32_updates=True, or raise the learning rate.",
            ", ".join(lost[:_NAMED]),
            more,
        )
