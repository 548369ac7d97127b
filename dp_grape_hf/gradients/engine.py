"""The interface of an engine, which computes the losses and per-sample gradients of a batch.

For each trainable weight W and sample i, an engine computes ``d loss_i / d Z_i`` at Z_i = 0, where
the sample's weight is ``W + lift(Z_i)``. For an unprojected parameter, ``lift`` is the identity.
There are two engines: ``layerwise`` (the default) and ``functorch`` (an independent implementation,
which checks it). ``by_name`` lists them.

The output of an engine is sensitive. Engines neither clip nor add noise.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dp_grape_hf.errors import Choice, PrivacyError, UnsupportedModelError
from dp_grape_hf.gradients.checks.guards import configs_of, evaluating, keeping_configs
from dp_grape_hf.gradients.checks.sketches import computes_in_16_bits, tolerance_for
from dp_grape_hf.gradients.flat import FlatGradients, Layout, Piece, tables_of
from dp_grape_hf.gradients.forms import Dense, PerSampleGradient, Single, add
from dp_grape_hf.gradients.losses.losses import (
    HeadLoss,
    LabelledPositions,
    LossFunction,
    checked,
    loss_for,
    losses_of,
    split,
)
from dp_grape_hf.gradients.rows import batch_size_of, first_two
from dp_grape_hf.gradients.rules import refuse_coupling
from dp_grape_hf.phases import FORWARD, Observer, advance
from dp_grape_hf.projections import Projector

Inputs = Mapping[str, Any]
Gradients = Mapping[str, PerSampleGradient]
ROUNDING = 1e-4  # absolute error of a loss in float32


class GradSampleMode(Choice):
    """The representation of per-sample gradients of unprojected weights.

    The private updates are the same in both modes, up to rounding. ``auto`` keeps for each weight
    the form with the fewest numbers: the gradient, or the factors of a matrix or the rows of a
    table, as book-keeping does (Bu et al. 2023). ``materialise`` keeps one gradient of every
    weight for every sample, as Opacus does with hooks.
    """

    AUTO = "auto"
    MATERIALISE = "materialise"


class PerSampleEngine(ABC):
    """Compute per-sample gradients of one model.

    Args:
        model: the model; parameters with ``requires_grad`` are trainable.
        loss: ``(outputs, labels) -> (B,)``; None for the loss of the model's head.
        grad_sample_mode: see ``GradSampleMode``.

    Raises:
        UnsupportedModelError: if a layer couples the samples, or the loss of the head is not known.
        PrivacyError: if no parameter is trainable, or there is no such mode.
    """

    grad_sample_mode: str = GradSampleMode.AUTO

    skips_unlabelled = False
    """Whether vocabulary heads are evaluated only at positions with a label. The number of these
    positions depends on values, so an engine that vectorises over samples cannot do it."""

    reseeds_host = False
    """Whether a pass has seeded the global random numbers of numpy or Python."""

    observer = Observer()
    """The observer of the passes."""

    in_step = False
    """Whether every call runs the model exactly once, as in other processes (``stay_in_step``)."""

    restarts = 0
    """How often a pass was begun again, after a call that had to be learnt."""

    simulated = False
    """Whether passes run on fake tensors, whose values cannot be compared."""

    isolates_samples = False
    """Whether each sample runs through the model separately."""

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction | None = None,
        grad_sample_mode: str = GradSampleMode.AUTO,
    ) -> None:
        if grad_sample_mode not in {*GradSampleMode}:
            raise PrivacyError(
                f"{grad_sample_mode=} does not exist. Choose one of: {', '.join(GradSampleMode)}."
            )
        self.grad_sample_mode = grad_sample_mode
        self.model = model
        self.trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not self.trainable:
            raise PrivacyError(
                "The model has no parameter with requires_grad=True, so there is nothing to train. "
                "Call requires_grad_(True) on the parameters to train."
            )
        keep_laid_out_for_training(model)
        refuse_modules(model)
        self._configs = configs_of(model)
        self.loss: LossFunction = loss_for(model) if loss is None else loss
        self._names = {id(parameter): name for name, parameter in self.trainable.items()}
        self._tables = tables_of(model, self._names)
        self._laid_out: tuple[Mapping[str, Projector], Layout] | None = None
        self._examined: dict[bool, int] = {}  # training mode -> rows of the examined batch, up to 2

    @abstractmethod
    def __call__(
        self, inputs: Inputs, projectors: Mapping[str, Projector]
    ) -> tuple[Tensor, FlatGradients]:
        """Return losses (B,) and per-sample gradients by parameter name (sensitive).

        Args:
            inputs: the model's keyword arguments; every tensor has the B samples in dimension 0.
            projectors: parameter name -> projector, for the projected parameters.
        """

    def examine(self, inputs: Inputs, projectors: Mapping[str, Projector]) -> bool:
        """Refuse a model if a row has another gradient in the batch than alone.

        A call of the engine does this automatically, if no batch was examined in the current mode
        of the model, or only a batch of one row.

        Args:
            inputs: a batch.
            projectors: as in a call.

        Returns:
            Whether a row has a gradient that is not zero; otherwise the batch shows nothing.
        """
        rows, training = min(batch_size_of(inputs), 2), self.model.training
        conclusive = self._examine(inputs, projectors)
        if conclusive:
            self._examined[training] = rows
        return conclusive

    def _examine(self, inputs: Inputs, projectors: Mapping[str, Projector]) -> bool:
        raise NotImplementedError

    def _examine_once(self, inputs: Inputs, projectors: Mapping[str, Projector]) -> None:
        """Examine a batch, unless one with as many rows (up to 2) was examined in this mode."""
        rows, training = min(batch_size_of(inputs), 2), self.model.training
        if self._examined.get(training, 0) < rows:
            self.examine(inputs, projectors)

    def unchecked(
        self, inputs: Inputs, projectors: Mapping[str, Projector]
    ) -> tuple[Tensor, FlatGradients]:
        """Return the results of a call without an examination before it; arguments as in a call."""
        raise NotImplementedError

    def assume_examined(self, inputs: Inputs) -> None:
        """Prepare the engine for a simulation on fake tensors, without checks."""
        self._examined, self.simulated = {True: 2, False: 2}, True

    def stay_in_step(self, inputs: Inputs, projectors: Mapping[str, Projector]) -> None:
        """Make every later call run the model exactly once, whatever the samples are.

        Args:
            inputs: a batch that was examined, the same in all processes.
            projectors: as in a call.

        Raises:
            UnsupportedModelError: if this engine does not support it.
        """
        raise UnsupportedModelError(
            f"{type(self).__name__} does not support a model whose weights are sharded. Use "
            "engine='layerwise', or remove fsdp."
        )

    def layout(self, projectors: Mapping[str, Projector]) -> Layout:
        """Return the layout of gradients in one matrix.

        Args:
            projectors: as in a call. Pass another mapping object whenever projectors change.
        """
        if self._laid_out is None or self._laid_out[0] is not projectors:
            self._laid_out = projectors, Layout(self.trainable, projectors, self._tables)
        return self._laid_out[1]

    def add_branches(self, branches: Mapping[nn.Module, Any]) -> None:  # noqa: B027 - optional
        """Receive the branches that add ``lift(Z)`` to the weights of layers.

        Args:
            branches: layer -> its branch, which an engine may compute together with the layer.
        """

    def check_next(self) -> None:  # noqa: B027 - optional
        """Check the next physical batch: the model or the loss may have changed."""

    def use(self, step: int) -> None:  # noqa: B027 - optional
        """Receive the number of the logical step, from 0, before its physical batches."""

    def in_form(self, gradient: Single) -> Single:
        """Return the gradient of one use of an unprojected weight in the form of the mode."""
        materialises = self.grad_sample_mode == GradSampleMode.MATERIALISE
        return gradient.dense() if materialises else gradient.cheapest()

    def losses(self, inputs: Inputs, run: Callable[..., Any] | None = None) -> Tensor:
        """Run the model without labels, and return the per-sample losses (B,).

        Without labels, the model does not compute a loss over the batch.

        Args:
            inputs: as in a call.
            run: runs the model; None for the model itself.
        """
        advance()
        with self.observer.phase(FORWARD), keeping_configs(self._configs):
            return self._losses(inputs, self.model if run is None else run)

    def _losses(self, inputs: Inputs, run: Callable[..., Any]) -> Tensor:
        batch_size = batch_size_of(inputs)
        given, labels = split(self.loss, inputs) if self.skips_unlabelled else ({}, None)
        if isinstance(self.loss, HeadLoss) and labels is not None:
            with LabelledPositions(self.loss, labels) as labelled:
                outputs = run(**given)
            losses = labelled.losses(outputs)
            if losses is not None:
                return checked(losses, batch_size)
            if self.in_step:
                raise UnsupportedModelError(
                    f"{type(self.model).__name__} uses its output embeddings in another way than "
                    "in earlier batches. It would have to run once more than in other processes. "
                    "Remove fsdp."
                )
            self.skips_unlabelled = False  # the logits do not fit to the given positions
        return losses_of(run, self.loss, inputs)

    def rounding_of_losses(self, inputs: Inputs) -> float:
        """Return the absolute error of a loss that rounding explains.

        Outputs in 16 bits have an error of up to 2^-7 of their size, and so has the loss. Two
        samples are run to find the size of the outputs. The result is at most ``Tolerance.loss``.
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

    def refuse_unused(self, used: Container[str], more: str = "") -> None:
        """Refuse trainable parameters that are not in ``used``, the parameters of the loss.

        Args:
            used: names of parameters.
            more: a further sentence of the error.
        """
        if unused := [name for name in self.trainable if name not in used]:
            raise UnsupportedModelError(
                f"These trainable parameters take no part in the loss: {', '.join(unused)}. Noise "
                f"alone would train them. Freeze them with requires_grad_(False).{more}"
            )

    def used_by_value(self) -> set[str]:
        """Return the parameters that a batch may leave out depending on its values (experts)."""
        return set()

    def laid_out(
        self,
        parts: Mapping[Piece, Tensor],
        captured: dict[str, list[Single]],
        projectors: Mapping[str, Projector],
        like: Tensor,
    ) -> FlatGradients:
        """Return gradients in the layout, with zeros for parameters that a pass left out.

        Args:
            parts: parts of the matrix; see ``Layout.join``.
            captured: parameter name -> the gradients of its uses, which are added up. They are
                moved out.
            projectors: as in a call.
            like: (B,), on the device of the gradients.
        """
        layout, size = self.layout(projectors), len(like)
        matrix = layout.join(parts, size, like)
        for name in [name for name in captured if name in layout]:
            for gradient in captured.pop(name):
                layout.places[name].of(matrix).add_(gradient.dense().values)
        others = {name: add(captured.pop(name)) for name in list(captured)}
        for name in self.trainable.keys() - layout.places.keys() - others.keys():
            shape = self.coordinate_shape(name, projectors)
            others[name] = Dense(like.new_zeros(()).expand(size, *shape))
        return FlatGradients(layout, matrix, others, self.trainable)

    @property
    def device(self) -> torch.device:
        """The device of the trainable parameters."""
        return next(iter(self.trainable.values())).device

    def released_shapes(self, projectors: Mapping[str, Projector]) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of a release: one sample's gradients, by parameter name."""
        return {name: self.coordinate_shape(name, projectors) for name in self.trainable}

    def coordinate_shape(self, name: str, projectors: Mapping[str, Projector]) -> tuple[int, ...]:
        """Return the shape of one sample's gradient of a parameter."""
        shape = self.trainable[name].shape
        return projectors[name].coordinate_shape(shape) if name in projectors else tuple(shape)


class OuterEngine(PerSampleEngine):
    """Base class of wrappers that delegate to another engine.

    Args:
        examples: the other engine, which computes losses and gradients of examples.
    """

    def __init__(self, examples: PerSampleEngine) -> None:  # without the checks of the model
        self.examples = examples
        self.model, self.loss = examples.model, examples.loss
        self.trainable = examples.trainable

    @property
    def observer(self) -> Observer:  # type: ignore[override]
        return self.examples.observer

    @property
    def reseeds_host(self) -> bool:  # type: ignore[override]
        return self.examples.reseeds_host

    def check_next(self) -> None:
        self.examples.check_next()

    def layout(self, projectors: Mapping[str, Projector]) -> Layout:
        return self.examples.layout(projectors)

    def released_shapes(self, projectors: Mapping[str, Projector]) -> dict[str, tuple[int, ...]]:
        return self.examples.released_shapes(projectors)


def refuse_modules(model: nn.Module) -> None:
    """Refuse a model with an unsupported module, before it runs.

    Raises:
        UnsupportedModelError: naming the module and the remedy.
    """
    for path, module in model.named_modules():
        refuse_coupling(path, module)
        config: Any = getattr(module, "config", None)
        attention = getattr(config, "_attn_implementation", None)
        if attention == "flex_attention":
            raise UnsupportedModelError(
                f"{path or 'the model'} ({type(module).__name__}) has {attention=}, which runs "
                "under no dispatch mode, so the engine cannot examine it. Load the model with "
                "attn_implementation='sdpa' or 'eager', or call "
                "model.set_attn_implementation('sdpa'). Both compute the same."
            )
        if _is_compiled(module):
            raise UnsupportedModelError(
                f"{path or 'the model'} ({type(module).__name__}) went through torch.compile. Its "
                "compiled code would not call the forwards that the engine replaces. Pass the "
                "model without torch.compile, and set torch_compile=True in the arguments."
            )


def _is_compiled(module: nn.Module) -> bool:
    """Return whether the module went through ``torch.compile``, as a wrapper or in place.

    The wrapper's class is looked up among the imported modules, because its import takes seconds.
    """
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    wrapped = compiler is not None and isinstance(module, compiler.OptimizedModule)
    return wrapped or module._compiled_call_impl is not None


def keep_laid_out_for_training(model: nn.Module) -> None:
    """Keep 4-bit weights of bitsandbytes in the memory layout for training.

    On some CPUs, a pass in evaluation mode without gradients changes them to a layout for
    inference. From then on these layers have no backward pass.
    """
    switch = "support_avx512bf16_for_cpu"
    layers = [module for module in model.modules() if getattr(module, switch, False)]
    for layer in layers:
        setattr(layer, switch, False)
        layer.state_dict()  # restores the layout for training


_NAMED = 5  # the most names in a list of an error or a warning


def listed(names: Sequence[str]) -> str:
    """Return the first names, and the number of further ones, as text."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
