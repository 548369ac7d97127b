"""Losses and (projected) per-sample gradients of one physical batch: what an engine is.

An engine gives each trainable weight per-sample coordinates at zero, ``W_i = W + lift(Z_i)``, and
returns ``d loss_i / d Z_i``, where ``lift`` is the identity for an unprojected parameter. There are
two, in ``layerwise`` (the default) and in ``functorch`` (independent of it: the cross-check);
``by_name`` lists them.

An engine's output is sensitive. Nothing here clips or adds noise.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dp_grape_hf.errors import Choice, PrivacyError, UnsupportedModelError
from dp_grape_hf.gradients.checks.guards import configs_of, evaluating, keeping_configs
from dp_grape_hf.gradients.checks.sketches import Prints, computes_in_16_bits, tolerance_for
from dp_grape_hf.gradients.flat import Layout
from dp_grape_hf.gradients.forms import Dense, PerSampleGradient, Single
from dp_grape_hf.gradients.losses.losses import (
    HeadLoss,
    LabelledPositions,
    LossFunction,
    checked,
    loss_for,
    split,
)
from dp_grape_hf.gradients.losses.own_loss import OwnLoss
from dp_grape_hf.gradients.rows import batch_size_of, first_two
from dp_grape_hf.gradients.rules import refuse_coupling
from dp_grape_hf.phases import FORWARD, Observer, advance
from dp_grape_hf.projections import Projector
from dp_grape_hf.sharding import is_sharded, whole

Inputs = Mapping[str, Any]
Gradients = Mapping[str, PerSampleGradient]
ROUNDING = 1e-4  # of a loss, absolute
Consume = Callable[[Gradients], None]
"""Takes the gradients of one group of parameters, which are not kept afterwards."""


class GradSampleMode(Choice):
    """How clipping sees the gradients of unprojected weights. All release the same, up to rounding.

    ``auto`` keeps for each weight the form with the fewest numbers. ``book_keeping`` keeps the
    factors of every matrix and the rows of every table (Bu et al. 2023), ``materialise`` one
    gradient of every weight for every sample, as Opacus' hooks do. ``ghost`` keeps none (Li et al.
    2021): a first backward pass measures, and a second one over the same graph adds up.
    """

    AUTO = "auto"
    GHOST = "ghost"
    BOOK_KEEPING = "book_keeping"
    MATERIALISE = "materialise"


class PerSampleEngine(ABC):
    """Computes per-sample gradients of one model.

    Args:
        model: the model; parameters with ``requires_grad`` are the trainable ones.
        loss: ``(outputs, labels) -> (B,)``; chosen by the model's head if None.
        grad_sample_mode: one of ``grad_sample_modes``; see ``GradSampleMode``.

    Raises:
        UnsupportedModelError: if a layer couples the samples, or the head's loss is not known.
        PrivacyError: if nothing is trainable, or the engine does not have that mode.
    """

    grad_sample_modes: ClassVar[tuple[str, ...]] = (GradSampleMode.AUTO,)
    grad_sample_mode: str = GradSampleMode.AUTO

    skips_unlabelled = False
    """Whether vocabulary heads are evaluated only at positions with a label. How many there are is
    read from the labels, so an engine that vectorises over samples cannot."""

    reseeds_host = False
    """Whether passes were seen to set the global random numbers of numpy or Python."""

    observer = Observer()
    """Looks on at the passes."""

    in_step = False
    """Whether every call runs the model once, as in the other processes; see ``stay_in_step``."""

    simulated = False
    """Whether passes are a simulation, in which numbers have no values to be compared."""

    isolates_samples = False
    """Whether each sample runs through the model by itself, whatever the model does to a batch."""

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction | None = None,
        grad_sample_mode: str = GradSampleMode.AUTO,
    ) -> None:
        if grad_sample_mode not in self.grad_sample_modes:
            raise PrivacyError(
                f"{grad_sample_mode=} is not a mode of {type(self).__name__}; choose one of: "
                f"{', '.join(self.grad_sample_modes)}."
            )
        self.grad_sample_mode = grad_sample_mode
        self.model = model
        self.trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not self.trainable:
            raise PrivacyError("The model has no parameter with requires_grad=True to train.")
        keep_laid_out_for_training(model)
        refuse_modules(model)
        self._configs = configs_of(model)
        self.loss: LossFunction = loss_for(model) if loss is None else loss
        self.groups = _groups(model, self.trainable)
        self._examined: dict[bool, int] = {}  # by mode, how many rows a batch had, up to 2

    @abstractmethod
    def __call__(
        self, inputs: Inputs, projectors: Mapping[str, Projector]
    ) -> tuple[Tensor, Gradients]:
        """Returns losses (B,) and per-sample gradients by parameter name (sensitive).

        Args:
            inputs: the model's keyword arguments; every tensor has the B samples in dimension 0.
            projectors: parameter name -> projector, for the projected parameters.
        """

    def examine(self, inputs: Inputs, projectors: Mapping[str, Projector]) -> bool:
        """Refuses a model or a loss by which a row contributes other gradients than alone.

        A call does this by itself where it has not been done in the mode of the model, or with one
        row only.

        Args:
            inputs: a batch.
            projectors: as in a call.

        Returns:
            Whether a row has a gradient, so that the batch shows anything.
        """
        rows, training = min(batch_size_of(inputs), 2), self.model.training
        told = self._examine(inputs, projectors)
        if told:
            self._examined[training] = rows
        return told

    def _examine(self, inputs: Inputs, projectors: Mapping[str, Projector]) -> bool:
        raise NotImplementedError

    def _examine_once(self, inputs: Inputs, projectors: Mapping[str, Projector]) -> None:
        """Examines a batch if none was in this mode, or none with more than one row."""
        rows, training = min(batch_size_of(inputs), 2), self.model.training
        if self._examined.get(training, 0) < rows:
            self.examine(inputs, projectors)

    def marked(self, inputs: Inputs, projectors: Mapping[str, Projector], prints: Prints) -> Tensor:
        """Marks the gradients of a pass in which nothing is examined; returns losses (B,)."""
        raise NotImplementedError

    def assume_probed(self, inputs: Inputs) -> None:
        """Learns what it must from a first batch, and checks nothing: for a simulation."""
        self._examined, self.simulated = {True: 2, False: 2}, True

    def stay_in_step(self, inputs: Inputs, projectors: Mapping[str, Projector]) -> None:
        """Runs the model from now on once for each call, whatever the samples are, or refuses.

        Args:
            inputs: a batch, the same in all processes, on which all was tried.
            projectors: as in a call.

        Raises:
            UnsupportedModelError: if this engine cannot.
        """
        raise UnsupportedModelError(
            f"{type(self).__name__} does not run a model whose weights are sharded. Leave "
            "engine at 'layerwise', or fsdp out."
        )

    def layout(self, projectors: Mapping[str, Projector]) -> Layout | None:
        """Returns how gradients share one matrix, if a call returns ``FlatGradients``."""
        return None

    def add_branches(self, branches: Mapping[nn.Module, Any]) -> None:  # noqa: B027 - most run them
        """Is told what adds to the weights of layers while these run.

        Args:
            branches: layer -> its branch, which an engine may compute together with the layer.
        """

    def copies_of_projections(self) -> list[Tensor]:
        """Returns the tensors that are kept from pass to pass, beside the projectors."""
        return []

    def use(self, step: int) -> None:  # noqa: B027 - most engines have no use for it
        """Is told the number of the logical step, from 0, before its physical batches."""

    def stream(
        self, inputs: Inputs, projectors: Mapping[str, Projector], *consumers: Consume
    ) -> Tensor:
        """Hands out the gradients of one group of ``self.groups`` after another; returns losses.

        A group is what one module owns; modules that share a parameter make one group. Each group
        is handed out once, and may be freed before the next one is complete. A further consumer is
        handed all groups again, after the one before it has had the last.
        """
        losses, gradients = self(inputs, projectors)
        for consume in consumers:
            for group in self.groups:
                consume({name: gradients[name] for name in group})
        return losses

    def in_form(self, gradient: Single) -> Single:
        """Returns the gradient of one use of an unprojected weight as ``grad_sample_mode`` has it.

        For ``ghost`` that is what the layer gave: to form it would take more than to measure it.
        """
        if self.grad_sample_mode == GradSampleMode.AUTO:
            return gradient.cheapest()
        return gradient.dense() if self.grad_sample_mode == GradSampleMode.MATERIALISE else gradient

    def losses(self, inputs: Inputs, run: Callable[..., Any] | None = None) -> Tensor:
        """Runs the model without labels, so that it computes no batch-wide loss of its own.

        Args:
            inputs: as in a call.
            run: runs the model; the model itself if None.
        """
        advance()
        with self.observer.phase(FORWARD), keeping_configs(self._configs):
            return self._losses(inputs, self.model if run is None else run)

    def _losses(self, inputs: Inputs, run: Callable[..., Any]) -> Tensor:
        batch_size = batch_size_of(inputs)
        if isinstance(self.loss, OwnLoss):
            return self.loss.each(run, inputs)
        inputs, labels = split(self.loss, inputs)
        if self.skips_unlabelled and isinstance(self.loss, HeadLoss) and labels is not None:
            with LabelledPositions(self.loss, labels) as labelled:
                outputs = run(**inputs)
            losses = labelled.losses(outputs)
            if losses is not None:
                return checked(losses, batch_size)
            if self.in_step:
                raise UnsupportedModelError(
                    f"{type(self.model).__name__} uses its output embeddings otherwise than in the "
                    "batches before, and would have to be run again, out of step with the other "
                    "processes. Leave fsdp out."
                )
            self.skips_unlabelled = False  # the logits are not one row per position given: rerun
        return checked(self.loss(run(**inputs), labels), batch_size)

    def rounding_of_losses(self, inputs: Inputs) -> float:
        """Returns how far two computations of one loss may be apart by rounding, absolute.

        Outputs that are rounded to 16 bits are known up to 2^-7 of their size, and so is the
        loss: that of a confident prediction may be all rounding. Two samples are run to see the
        size. A loss below ``Tolerance.loss`` says nothing, so the result is no larger.
        """
        if not computes_in_16_bits(self.model):
            return ROUNDING
        given, _ = split(self.loss, first_two(inputs))
        with evaluating(self.model), torch.no_grad():
            outputs = self.model(**given)
        outputs = getattr(outputs, "logits", outputs)
        floats = [
            t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.is_floating_point()
        ]
        size = max((t.abs().nan_to_num().max().item() for t in floats if t.numel()), default=0.0)
        return min(max(ROUNDING, 2**-7 * size), tolerance_for(self.model).loss)

    def by_autograd(self, loss: Tensor, projectors: Mapping[str, Projector]) -> Prints:
        """Returns the marks of the gradient of one sample's loss, a scalar, by plain autograd.

        Each parameter's is projected, marked and freed as soon as autograd has it.
        """
        names = {parameter: name for name, parameter in self.trainable.items()}
        prints = Prints()

        def receive(parameter: Tensor) -> None:
            assert isinstance(parameter, nn.Parameter)
            assert parameter.grad is not None
            name, gradient = names[parameter], parameter.grad.float()
            parameter.grad = None
            gradient = whole(gradient)  # a mean over processes, which all look at this sample
            projector = projectors.get(name)
            with torch.no_grad(), torch.autocast(gradient.device.type, enabled=False):
                found = projector.project(gradient) if projector else gradient
            prints({name: Dense(found[None])})

        hooks = [p.register_post_accumulate_grad_hook(receive) for p in names]
        try:
            if loss.requires_grad:
                reached = None if is_sharded(self.model) else list(names)
                torch.autograd.backward(loss, inputs=reached)
        finally:
            for hook in hooks:
                hook.remove()
        return prints

    def refuse_unused(self, used: Container[str], more: str = "") -> None:
        """Refuses trainable parameters that are not among those the loss depends on."""
        if unused := [name for name in self.trainable if name not in used]:
            raise UnsupportedModelError(
                f"These trainable parameters take no part in the loss: {', '.join(unused)}. Noise "
                f"alone would train them. Freeze them with requires_grad_(False).{more}"
            )

    def used_by_value(self) -> set[str]:
        """Returns the parameters that a batch may leave out, by its values: experts, say."""
        return set()

    def zero_gradients(
        self, names: Iterable[str], losses: Tensor, projectors: Mapping[str, Projector]
    ) -> Gradients:
        """Returns gradients of zero, for parameters that a pass left out, by layer drop say."""
        zero = losses.new_zeros(())
        return {
            name: Dense(zero.expand(len(losses), *self.coordinate_shape(name, projectors)))
            for name in names
        }

    @property
    def device(self) -> torch.device:
        """Where the trainable parameters are."""
        return next(iter(self.trainable.values())).device

    def released_shapes(self, projectors: Mapping[str, Projector]) -> dict[str, tuple[int, ...]]:
        """Returns the names and shapes of a release: one sample's gradients, by parameter name."""
        return {name: self.coordinate_shape(name, projectors) for name in self.trainable}

    def coordinate_shape(self, name: str, projectors: Mapping[str, Projector]) -> tuple[int, ...]:
        """Returns the shape of one sample's gradient of a parameter."""
        shape = self.trainable[name].shape
        return projectors[name].coordinate_shape(shape) if name in projectors else tuple(shape)


class OuterEngine(PerSampleEngine):
    """An engine around an engine, whose model, loss and parameters are its.

    Args:
        examples: computes losses and gradients of examples.
    """

    def __init__(self, examples: PerSampleEngine) -> None:  # which has checked the model
        self.examples = examples
        self.model, self.loss = examples.model, examples.loss
        self.trainable, self.groups = examples.trainable, examples.groups
        self.grad_sample_mode = examples.grad_sample_mode

    @property
    def observer(self) -> Observer:  # type: ignore[override]
        return self.examples.observer

    @property
    def reseeds_host(self) -> bool:  # type: ignore[override]
        return self.examples.reseeds_host

    def layout(self, projectors: Mapping[str, Projector]) -> Layout | None:
        return self.examples.layout(projectors)

    def released_shapes(self, projectors: Mapping[str, Projector]) -> dict[str, tuple[int, ...]]:
        return self.examples.released_shapes(projectors)


def refuse_modules(model: nn.Module) -> None:
    """Refuses a model for what it is made of, before it runs.

    Raises:
        UnsupportedModelError: with the module and what to do.
    """
    for path, module in model.named_modules():
        refuse_coupling(path, module)
        config: Any = getattr(module, "config", None)
        attention = getattr(config, "_attn_implementation", None)
        if attention == "flex_attention":
            raise UnsupportedModelError(
                f"{path or 'the model'} ({type(module).__name__}) has {attention=}, which runs "
                "under no mode of dispatch, and so cannot be examined. Load the model with "
                "attn_implementation='sdpa' or 'eager', or call "
                "model.set_attn_implementation('sdpa'): both compute the same."
            )
        if _is_compiled(module):
            raise UnsupportedModelError(
                f"{path or 'the model'} ({type(module).__name__}) went through torch.compile, "
                "whose compiled code would not call the forwards that the engine puts in "
                "their place. Pass the model as it was before torch.compile."
            )


def _is_compiled(module: nn.Module) -> bool:
    """Whether the module went through ``torch.compile``, as a wrapper or in place.

    Where one has been wrapped, the wrapper's class has been imported. To import it here would take
    seconds of every start, so it is looked up only.
    """
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    wrapped = compiler is not None and isinstance(module, compiler.OptimizedModule)
    return wrapped or module._compiled_call_impl is not None


def _groups(model: nn.Module, trainable: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
    """Returns the names of the trainable parameters, by the modules that own them."""
    names = {id(p): name for name, p in trainable.items()}
    group_of: dict[str, list[str]] = {}
    for module in model.modules():
        own = [names[id(p)] for p in module.parameters(recurse=False) if id(p) in names]
        known = [group_of[name] for name in own if name in group_of]
        merged = list(dict.fromkeys([n for group in known for n in group] + own))
        group_of.update(dict.fromkeys(merged, merged))
    groups = {id(group): group for name in trainable for group in [group_of[name]]}
    return [tuple(group) for group in groups.values()]


def keep_laid_out_for_training(model: nn.Module) -> None:
    """Has 4-bit weights pass on gradients in evaluation mode.

    On some CPUs bitsandbytes lays them out for inference where a pass in evaluation mode needs no
    gradient of its input, and from then on they pass on none at all.
    """
    switch = "support_avx512bf16_for_cpu"
    layers = [module for module in model.modules() if getattr(module, switch, False)]
    for layer in layers:
        setattr(layer, switch, False)
        layer.state_dict()  # which undoes that layout


_NAMED = 5  # of parameters, at most, where an error or a warning lists them


def listed(names: Sequence[str]) -> str:
    """Returns the first names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
