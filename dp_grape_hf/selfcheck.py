"""What is checked before the first release, and at the first updates.

Before: that collator and model make no example depend on another, at the size of a physical batch
too, and that gradients are those of plain autograd. The engine's own probe (``probing``) finds
samples that are coupled in pairs. Whether each layer's rule is right for this model is a different
question, which only the definition answers: the gradient of one example's loss, by ordinary
autograd, through the model as it is. After: that weights move.

Shapes: B samples in a batch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader
from transformers.trainer_utils import RemoveColumnsCollator

from dp_grape_hf.coins import keeping_random_state, refuse_shared_collation
from dp_grape_hf.errors import PrivacyError, UnsupportedModelError
from dp_grape_hf.losses import LossFunction, ModelLoss, checked, split
from dp_grape_hf.per_sample import Gradients, PerSampleEngine, batch_size_of
from dp_grape_hf.probing import (
    copies_of_first,
    evaluating,
    first_two,
    refuse_coupled_batch,
    refuse_coupled_losses,
    refuse_mixing_collator,
    refuse_padding_dependence,
    refuse_reordering_collator,
    refusing_changed_weights,
    shortest_and_longest,
)
from dp_grape_hf.projection import Projector
from dp_grape_hf.representations import PerSampleGradient
from dp_grape_hf.sampling import LogicalBatchCollator
from dp_grape_hf.trainer_loss import OTHERWISE, TrainerLoss

logger = logging.getLogger(__name__)

_APART = 1e-3  # of two ways to compute the same loss, relative
_NAMED = 5  # parameters that an error names, at most
_SLICE = 2**22  # numbers of a weight that are looked at in double precision at once
_PATIENCE = 10  # updates after which a tensor that rounding may hold is no longer watched
_VISIBLE = 16  # roundings that an update must be worth to be expected to show


EXAMINED = 16  # examples that the data collator is tried on before training
ORDERED = 64  # examples that it must keep in order, where that matters


# ---- The collator ----


def collated_examples(loader: DataLoader[Any], count: int) -> Any:
    """Returns a batch of examples from all over the data set of a training loader."""
    with keeping_random_state():
        return _collator_of(loader)(_examples_of(loader, count))


def examine_collator(
    losses: Callable[[Any], Tensor],
    loader: DataLoader[Any],
    low_precision: bool,
    units: bool = False,
) -> None:
    """Tries the collator on a few examples: it must not make examples depend on each other.

    Args:
        losses: a batch -> one loss per sample, (B,), without dropout.
        loader: the training loader.
        low_precision: whether weights or matrix products are rounded to 16 bits.
        units: whether several examples are one privacy unit, so that their order matters.

    Raises:
        PrivacyError: if an example shows in another's row, the loss depends on padding, or the
            collator has a seed of its own.
    """
    examples, collate = _examples_of(loader, EXAMINED), _collator_of(loader)
    own: Any = collate
    own = own.data_collator if isinstance(own, RemoveColumnsCollator) else own
    if (seed := getattr(own, "seed", None)) is not None:
        raise PrivacyError(
            f"The data collator {type(own).__name__} draws its random numbers from {seed=}. "
            "Whoever knows them knows which draws went before, and so who was drawn. Leave the "
            "collator's seed at None: it then uses the stream that is seeded in secret."
        )
    if len(examples) >= 3:
        refuse_mixing_collator(collate, examples)
    refuse_shared_collation(collate, *shortest_and_longest(collate, examples))
    if units:
        refuse_reordering_collator(collate, _examples_of(loader, ORDERED))
    tolerance = 5e-2 if low_precision else 1e-3
    refuse_padding_dependence(losses, collate, examples, tolerance=tolerance)


def _examples_of(loader: DataLoader[Any], count: int) -> list[Any]:
    dataset: Any = loader.dataset
    step = max(1, len(dataset) // count)
    return [dataset[i] for i in range(0, len(dataset), step)][:count]


def _collator_of(loader: DataLoader[Any]) -> Callable[[list[Any]], Any]:
    assert isinstance(loader.collate_fn, LogicalBatchCollator)
    return loader.collate_fn.collator


# ---- The first batch ----


def examine_batch(
    engine: PerSampleEngine,
    inputs: Mapping[str, Any],
    projectors: Mapping[str, Projector],
    low_precision: bool,
) -> None:
    """Tries losses and gradients on as many different examples as a physical batch holds.

    Args:
        engine: computes per-sample gradients of its model, which is in training mode.
        inputs: a batch of the model's keyword arguments.
        projectors: parameter name -> projector.
        low_precision: whether weights or matrix products are rounded to 16 bits.

    Raises:
        PrivacyError: if a loss depends on the others of the batch, or no example has a gradient.
    """
    size = batch_size_of(inputs)
    if size > 1 and not engine.isolates_samples:
        model = engine.model
        refuse_coupled_batch(
            lambda batch: engine.losses(model, batch, batch_size_of(batch)),
            inputs,
            tolerance=5e-2 if low_precision else 1e-3,
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
    rows = torch.arange(max(4, batch_size_of(inputs))) % batch_size_of(inputs)
    several = {k: v[rows.to(v.device)] if isinstance(v, Tensor) else v for k, v in inputs.items()}
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


@dataclass(frozen=True)
class Tolerance:
    """How far two computations of one gradient may be apart, by rounding alone.

    Args:
        error: of a parameter's gradient, relative to its norm.
        floor: a parameter's norm counts as at least this part of the sample's total: the gradient
            of a key's bias is zero but for rounding.
        loss: a loss below this says nothing: its gradient is rounding.
        change: of a loss, relative, that is not looked at more closely.
    """

    error: float
    floor: float
    loss: float
    change: float


FULL = Tolerance(error=1e-2, floor=1e-3, loss=1e-4, change=0.0)
LOW = Tolerance(error=0.1, floor=5e-2, loss=1e-1, change=5e-2)


def check_gradients(
    engine: PerSampleEngine,
    inputs: Mapping[str, Any],
    projectors: Mapping[str, Projector],
    low_precision: bool = False,
) -> None:
    """Compares an engine on the first two samples of a batch with autograd on each alone.

    Dropout is off. One sample's gradient is never kept as a whole: each parameter's is projected,
    compared and freed as soon as autograd has it.

    Args:
        engine: computes per-sample gradients of its model.
        inputs: a batch of the model's keyword arguments; of a single sample, two copies are taken.
        projectors: parameter name -> projector.
        low_precision: whether weights or matrix products are rounded to 16 bits.

    Raises:
        UnsupportedModelError: if a gradient is not what autograd says, with the parameter's name.
        PrivacyError: if a sample's loss is not what it is alone.
    """
    two, model = first_two(inputs), engine.model
    tolerance = LOW if low_precision else FULL
    with keeping_random_state(), refusing_changed_weights(model, thorough=True):
        engine(two, projectors)  # an engine looks at its first batch in training mode
    with evaluating(model):
        losses, gradients = engine(two, projectors)
        wrong: list[str] = []
        for i in (0, 1):
            one = copies_of_first(two, 1, sample=i)
            loss, errors = _compare(engine, one, projectors, gradients, i, tolerance)
            if (losses[i] - loss).abs() > tolerance.change * loss.abs():
                refuse_coupled_losses(losses[i : i + 1], loss)
            wrong += [name for name in errors if name not in wrong]
    if wrong:
        raise UnsupportedModelError(_difference(engine, wrong, tolerance))


def _compare(
    engine: PerSampleEngine,
    one: Mapping[str, Any],
    projectors: Mapping[str, Projector],
    gradients: Mapping[str, PerSampleGradient],
    sample: int,
    tolerance: Tolerance,
) -> tuple[Tensor, list[str]]:
    """Returns the loss (1,) of one sample alone, and the parameters whose gradient differs."""
    names = {parameter: name for name, parameter in engine.trainable.items()}
    found: dict[str, tuple[Tensor, Tensor]] = {}  # name -> norms of error and gradient

    def compare(name: str, expected: Tensor | None) -> None:
        gradient = gradients[name]
        factors = torch.zeros(2, device=engine.trainable[name].device)
        factors[sample] = 1.0
        actual = gradient.weighted_sum(factors)
        if expected is None:
            expected = torch.zeros_like(actual)
        found[name] = ((actual - expected).norm(), expected.norm())

    def receive(parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        name, gradient = names[parameter], parameter.grad.float()
        parameter.grad = None
        projector = projectors.get(name)
        with torch.no_grad(), torch.autocast(gradient.device.type, enabled=False):
            compare(name, projector.project(gradient) if projector else gradient)

    hooks = [p.register_post_accumulate_grad_hook(receive) for p in names]
    try:
        loss = _loss_alone(engine, one)
        torch.autograd.backward(loss.sum(), inputs=list(names))
    finally:
        for hook in hooks:
            hook.remove()
    for name in engine.trainable.keys() - found.keys():
        with torch.no_grad():
            compare(name, None)
    loss = loss.detach()
    enough = bool(loss.abs() > tolerance.loss) and bool(loss.isfinite())
    return loss, _too_far(found, tolerance) if enough else []


def _loss_alone(engine: PerSampleEngine, one: Mapping[str, Any]) -> Tensor:
    """Returns the loss (1,) of one sample by itself: what the model says, where it says one."""
    if isinstance(engine.loss, ModelLoss):
        own = engine.loss.of_batch(engine.model, one)
        if own is not None and own.isfinite():
            return own[None]
    outputs, labels = _outputs_and_labels(engine.loss, engine.model, one)
    return checked(engine.loss(outputs, labels), 1)


def _too_far(found: Mapping[str, tuple[Tensor, Tensor]], tolerance: Tolerance) -> list[str]:
    errors, norms = torch.stack([torch.stack(pair).cpu() for pair in found.values()]).double().T
    total = norms.norm()
    if not total.isfinite() or not errors.isfinite().all():
        return []  # a sample with NaN values says nothing, and clipping leaves it out
    allowed = tolerance.error * norms.clamp(min=tolerance.floor * float(total))
    return [name for name, bad in zip(found, errors > allowed, strict=True) if bad]


def _difference(engine: PerSampleEngine, names: Iterable[str], tolerance: Tolerance) -> str:
    owned = []
    for name in names:
        path = name.rpartition(".")[0]
        kind = type(engine.model.get_submodule(path)).__name__
        owned.append(f"{name} (of {path or 'the model'}, a {kind})")
    more = f" and {len(owned) - _NAMED} more" if len(owned) > _NAMED else ""
    return (
        f"Per-sample gradients differ by more than {tolerance.error:g} of their norm from those of "
        f"plain autograd on one example at a time, for {', '.join(owned[:_NAMED])}{more}. "
        f"{type(engine).__name__} computes them wrongly for this model, or the model computes "
        "something else for one example than for two. Choose the other engine (engine="
        '"functorch" or "layerwise"), or freeze these parameters with requires_grad_(False). '
        "Nothing was released. self_check=False trains all the same, on gradients that are wrong."
    )


# ---- Movement ----


@dataclass(frozen=True)
class Fingerprint:
    """What is kept of a tensor to see whether it has changed: two sums, in double precision."""

    total: float
    squares: float
    size: int

    @classmethod
    @torch.no_grad()
    def of(cls, tensor: Tensor) -> Fingerprint:
        """Returns the fingerprint of a tensor, without a copy of it."""
        sums = torch.zeros(2, dtype=torch.float64, device=tensor.device)
        for part in tensor.reshape(-1).split(_SLICE):
            double = part.double()
            sums += torch.stack([double.sum(), double.square().sum()])
        total, squares = sums.tolist()
        return cls(total, squares, tensor.numel())

    @property
    def spacing(self) -> float:
        """The root mean square of the numbers, which their rounding is relative to."""
        return math.sqrt(self.squares / max(self.size, 1))


class Movement:
    """Watches the first updates until each trainable tensor was seen to move.

    A tensor is expected to move once the update that Adam makes of its private gradient is worth
    several roundings of its numbers. Until then (a learning rate in warm-up, weights of 16 bits) it
    stays under watch, for a while.

    Args:
        trainable: parameter name -> parameter.
        held: whether the weights themselves are updated later, so that only the optimizer's state
            tells (``float32_updates``).
    """

    def __init__(self, trainable: Mapping[str, nn.Parameter], held: bool = False) -> None:
        self._pending = dict(trainable)
        self._held = held
        self._before: dict[str, Fingerprint] = {}
        self._updates = 0

    @property
    def done(self) -> bool:
        """Whether nothing is left to watch."""
        return not self._pending

    def before_update(self) -> None:
        """Takes the fingerprints of what is still watched."""
        if not self._held:
            self._before = {name: Fingerprint.of(p) for name, p in self._pending.items()}

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Looks what has moved.

        Raises:
            PrivacyError: if the optimizer leaves out a tensor, or its update had no effect.
        """
        groups = {p: group for group in optimizer.param_groups for p in group["params"]}
        rates = [float(group["lr"]) for group in groups.values()]
        if not any(rate > 0 for rate in rates):
            return
        self._updates += 1
        stateless = not optimizer.state  # a zeroth-order method keeps nothing
        for name, parameter in list(self._pending.items()):
            state = optimizer.state.get(parameter, {})
            if parameter not in groups or not (stateless or state):
                raise PrivacyError(_unmoved(name, "the optimizer does not have it"))
            if self._held:
                del self._pending[name]
                continue
            before = self._before[name]
            if Fingerprint.of(parameter) != before:
                del self._pending[name]
                continue
            update = _typical_update(groups[parameter], state)
            eps = torch.finfo(parameter.dtype).eps
            if update > _VISIBLE * eps * before.spacing:
                raise PrivacyError(_unmoved(name, "the optimizer's update left it as it was"))
        if self._updates >= _PATIENCE:
            self._give_up()

    def _give_up(self) -> None:
        small = [n for n, p in self._pending.items() if torch.finfo(p.dtype).bits < 32]
        if small:
            more = f" and {len(small) - _NAMED} more" if len(small) > _NAMED else ""
            logger.warning(
                "The first %d updates of %s%s were lost to rounding: their numbers have 16 bits. "
                "Load the model in float32, or raise the learning rate.",
                self._updates,
                ", ".join(small[:_NAMED]),
                more,
            )
        self._pending = {}


def _typical_update(group: Mapping[str, Any], state: Mapping[str, Any]) -> float:
    """Returns the size of one number's update, as Adam makes it of its moments; else 0."""
    if "exp_avg" not in state:
        return 0.0
    first, second = state["exp_avg"], state["exp_avg_sq"]
    if not torch.count_nonzero(first):
        return 0.0
    root = float(second.sum().sqrt())
    ratio = float(first.norm()) / (root + group["eps"] * math.sqrt(first.numel()))
    return float(group["lr"]) * min(1.0, ratio)


def _unmoved(name: str, why: str) -> str:
    return (
        f"{name} is trainable, but the first update did not move it: {why}. Its share of the "
        "privacy budget would buy nothing. Freeze it with requires_grad_(False), or give it to "
        "the optimizer. The releases made so far stay in the ledger."
    )
