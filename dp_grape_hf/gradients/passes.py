"""One forward and backward pass of the layerwise engine: how a site is run, and what it leaves.

Every weight has coordinates of each sample, a leaf of zeros that takes no memory. A layer with a
rule runs with its weights detached and an extra autograd node at its output. When that node
receives the output's gradient it applies the rule, with the projection, and returns the gradients
of the coordinates; so the gradient of a weight never exists and ``p.grad`` stays None. What has too
many numbers for a row for each sample is recorded in a form of its own instead. Gradient
checkpointing works because the forward pass is simply re-run; what a module that runs twice gives
adds up. A module without a rule runs under ``torch.func.vmap``, each sample with weights
``W + lift(tap_i)`` of its own; or, if vmap cannot run its code, once for each sample.

Shapes: B samples in the physical batch; a module may see them flattened with positions, (B * k,
...).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from dp_grape_hf.errors import ERRORS, PrivacyError, UnsupportedModelError
from dp_grape_hf.gradients.definition import (
    Batching,
    refusing_dynamic_code,
    vmap_safe,
)
from dp_grape_hf.gradients.engine import Consume
from dp_grape_hf.gradients.flat import Piece
from dp_grape_hf.gradients.forms import (
    Dense,
    Factored,
    PerSampleGradient,
    Single,
    SparseRows,
    add,
)
from dp_grape_hf.gradients.layers import (
    Forward,
    Key,
    LookUps,
    Shapes,
    Site,
    UnknownTensorError,
    detached,
    first_tensor,
    holding,
    row_each,
)
from dp_grape_hf.gradients.plans import LinearPlan, Plan, Plans
from dp_grape_hf.gradients.rows import running_alone
from dp_grape_hf.gradients.stand_ins import (
    AtZero,
    call_for_one,
    call_in_coordinates,
    zero_coordinates,
)
from dp_grape_hf.phases import GRADIENTS, PROJECT, Observer
from dp_grape_hf.projections import Projector, Side


@dataclass(frozen=True)
class _Activation:
    """A call of an activation function."""

    function: Callable[[Tensor], Tensor]
    argument: Tensor
    output: Tensor
    version: int  # of the output, which an in-place operation counts up

    def gave(self, tensor: Tensor) -> bool:
        """Returns whether a tensor is the output, as it was."""
        return (
            tensor is self.output
            and tensor is not self.argument
            and tensor._version == self.version
        )


@dataclass(frozen=True)
class Stream:
    """Takes the gradients of a group of parameters as soon as they are complete."""

    consume: Consume
    awaited: dict[str, int]  # name -> uses still to come; below 0 if a tap collects its uses
    group_of: Mapping[str, tuple[str, ...]]


class Pass:
    """What one forward and backward pass collects.

    Args:
        trainable: name -> weight.
        projectors: name -> projector, of the projected weights.
        plans: of what has a row for each sample in one matrix; None if nothing has.
        batch_size: B.
        shapes: of the model's inputs, for one sample.
        in_form: gives the gradient of one use of an unprojected weight the form that is kept.
        observer: looks on.

    ``anchor`` is a zero that requires grad: it keeps a layer's node in the graph where the layer's
    input does not require grad (an embedding), and lets ``autograd.grad`` reach the node.
    """

    def __init__(
        self,
        trainable: Mapping[str, Tensor],
        projectors: Mapping[str, Projector],
        plans: Plans | None,
        batch_size: int,
        shapes: Shapes,
        in_form: Callable[[Single], Single],
        observer: Observer,
    ) -> None:
        self._trainable, self._projectors, self.batch_size = trainable, projectors, batch_size
        self._shapes, self._observer = shapes, observer
        self._plans = plans
        self._places = {} if plans is None else plans.layout.places
        self._in_form = in_form
        self._stream: Stream | None = None
        device = next(iter(trainable.values())).device
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        if plans is not None:
            plans.ready(device, batch_size)
        self._taps: dict[str, Tensor] = {}  # of what has no plan: name -> (B, *coordinates), zeros
        self.rows: dict[str, Tensor] = {}
        """Of parameters that have a row for each sample while a module runs."""
        self._captured: dict[str, list[Single]] = defaultdict(list)
        self.outputs: dict[Site, list[tuple[torch.Size, torch.dtype]]] = defaultdict(list)
        """The shapes and types of the outputs of layers that have a rule and no plan."""
        self._activation: _Activation | None = None  # the last call, until a layer was run

    def differentiate(
        self, loss: Tensor, stream: Stream | None = None, again: bool = False
    ) -> dict[str, PerSampleGradient]:
        """Differentiates the sum of the losses; returns what was not streamed, of what was used.

        Args:
            loss: the sum.
            stream: what to do with gradients that are complete; they are collected if None.
            again: whether the same graph will be differentiated once more, so that it is kept.
        """
        parts = self._parts(loss, stream, again)
        if self._plans is not None:
            for name, part in self._plans.layout.named(parts):
                self._captured[name].append(Dense(part))
        return {name: add(self._captured.pop(name)) for name in list(self._captured)}

    def differentiate_flat(self, loss: Tensor) -> tuple[Tensor, dict[str, PerSampleGradient]]:
        """Differentiates the sum of the losses; returns (B, D) and what is not in the layout."""
        return self.together(self._parts(loss))

    def together(self, parts: dict[Piece, Tensor]) -> tuple[Tensor, dict[str, PerSampleGradient]]:
        """Returns (B, D) of the gradients of parts of it, and what is not in the layout."""
        assert self._plans is not None
        layout = self._plans.layout
        flat = layout.join(parts, self.batch_size, self.anchor.detach())
        for name in [name for name in self._captured if name in layout]:
            for gradient in self._captured.pop(name):  # of a module that runs under vmap
                self._places[name].of(flat).add_(gradient.dense().values)
        return flat, {name: add(self._captured.pop(name)) for name in list(self._captured)}

    def _parts(
        self, loss: Tensor, stream: Stream | None = None, again: bool = False
    ) -> dict[Piece, Tensor]:
        """Runs the backward pass; returns the gradients of the coordinates in the layout."""
        self._stream = stream
        pieces = {} if self._plans is None else self._plans.taps
        leaves = [self.anchor, *pieces.values(), *self._taps.values(), *self.rows.values()]
        _, *gradients = torch.autograd.grad(
            loss + self.anchor, leaves, retain_graph=again, allow_unused=True
        )
        others, of_rows = gradients[len(pieces) :], gradients[len(pieces) + len(self._taps) :]
        for name, gradient in zip(self._taps, others, strict=False):
            if gradient is not None:
                self._captured[name].append(Dense(gradient))
        for name, gradient in zip(self.rows, of_rows, strict=True):
            if gradient is not None:
                self.take_rows(name, gradient)
        found = zip(pieces, gradients, strict=False)
        return {piece: gradient for piece, gradient in found if gradient is not None}

    def _known_as(self, name: str, stored: Tensor) -> Tensor:
        """Returns coordinates, (B, *stored), in the shape that they have elsewhere."""
        return stored.mT if name in self._places and self._places[name].transposed else stored

    def remember(self, function: Callable[[Tensor], Tensor], argument: Tensor) -> Tensor:
        """Runs an activation function; the layer behind it may compute its output anew."""
        output = function(argument)
        self._activation = _Activation(function, argument, output, output._version)
        return output

    def forward_of(self, site: Site, original: Forward) -> Forward:
        """Returns what runs a site in place of its own forward."""
        if self._plans is not None and site in self._plans:
            plan = self._plans.of(site, original)
            if plan is not None:
                return partial(self._run_planned, plan, site, original)
        # A plan is made when the site runs: only then are weights there that fsdp has spread.
        return partial(self._run, site, original)

    def _run(self, site: Site, original: Forward, *args: Any, **kwargs: Any) -> Any:
        if site.by_rows:
            return self._run_by_rows(site, original, args, kwargs)
        if site.rule is None:
            return self._run_generic(site, original, args, kwargs)
        if site.is_table:

            def capture(indices: Tensor, output: Tensor) -> Tensor:
                return self._capture(site, self._save(site, indices), output)

            with detached(site.module), LookUps(site.module.weight, capture):
                return original(*args, **kwargs)
        plan = None if self._plans is None else self._plans.of(site, original)
        if plan is not None:
            return self._run_planned(plan, site, original, *args, **kwargs)
        return self._run_by_rule(site, original, args, kwargs)

    def _run_by_rule(
        self, site: Site, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a layer by its code, and takes its gradients by its rule."""
        if site.has_several_tensors(args, kwargs):
            raise UnknownTensorError(f"{site.label} was given a tensor that it was not seen with.")
        layer_input = first_tensor(args, kwargs)
        assert layer_input is not None
        activation, self._activation = self._activation, None
        if activation and activation.gave(layer_input) and self.early(site) is None:
            saved, again = activation.argument.detach(), activation.function
            self._check_carried(site, layer_input)
        else:
            saved, again = self._save(site, layer_input), None  # while it is in the cache
        with detached(site.module):
            output = original(*args, **kwargs)
        return self._capture(site, saved, output, again)

    def _run_planned(
        self, plan: Plan, site: Site, original: Forward, *args: Any, **kwargs: Any
    ) -> Any:
        """Runs a layer by its autograd function, which is about one input."""
        if len(args) + len(kwargs) != 1:
            return self._run_by_rule(site, original, args, kwargs)
        (layer_input,) = args or kwargs.values()
        activation, self._activation = self._activation, None
        site.check(layer_input.shape[0], self.batch_size, self._shapes)
        with self._observer.phase(PROJECT):
            if not isinstance(plan, LinearPlan):
                return plan.run(layer_input)
            if activation and activation.gave(layer_input) and plan.keeps_input:
                return plan.run(layer_input, activation.function, activation.argument.detach())
            return plan.run(layer_input)

    def _save(self, site: Site, layer_input: Tensor) -> Tensor:
        """Returns what of a layer's input must survive until the backward pass."""
        assert site.rule is not None
        with self._observer.phase(PROJECT):
            layer_input = self._check_carried(site, layer_input)
            saved = site.rule.save(site.module, layer_input.detach(), self.batch_size)
            projector = self.early(site)
            if projector is None:
                return saved
            return saved @ projector.matrix.to(saved.dtype)  # only (B, T, r) survives

    def _check_carried(self, site: Site, layer_input: Tensor) -> Tensor:
        """Returns the input with the batch in its leading dimension."""
        site.check(layer_input.shape[0], self.batch_size, self._shapes)
        if not site.carried:  # broadcast position ids: one row for all samples
            return layer_input.expand(self.batch_size, *layer_input.shape[1:])
        return layer_input

    def early(self, site: Site) -> Projector | None:
        """Returns the projector that acts on the saved factor of the weight's gradient."""
        projector = self._projectors.get(site.parameters.get("weight", ""))
        if projector is None or site.rule is None:
            return None
        acts_on = "cols" if projector.side is Side.RIGHT else "rows"
        return projector if site.rule.saves == acts_on else None

    def _capture(
        self,
        site: Site,
        saved: Tensor,
        output: Tensor,
        again: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Adds the node that records the layer's gradients when its output's gradient arrives.

        ``again`` computes the layer's input from what was saved instead.
        """
        rule, module, batch_size = site.rule, site.module, self.batch_size
        assert rule is not None
        early = self.early(site) is not None
        if not site.carried:
            output = output.expand(batch_size, *output.shape[1:])

        self.outputs[site].append((output.shape, output.dtype))
        taps = [self._tap(name) for name in site.parameters.values() if name in self._places]

        def derivative(grad_output: Tensor, saved: Tensor) -> tuple[Tensor | None, ...]:
            with self._observer.phase(GRADIENTS):
                if again is not None:
                    layer_input = self._check_carried(site, again(saved))
                    saved = rule.save(module, layer_input, batch_size)
                of_taps = self.take(site, saved, grad_output, early)
            if self._stream is not None:
                for name in site.parameters.values():
                    self._hand_out(name, self._stream)
            return None, *of_taps.values()  # the first is of the anchor

        return AtZero.apply(output, saved, derivative, self.anchor, *taps)

    def take(
        self, site: Site, saved: Tensor, grad_output: Tensor, early: bool
    ) -> dict[str, Tensor]:
        """Takes the gradients of a layer's parameters; returns those in the layout, as stored.

        Args:
            site: the layer.
            saved: what its rule saved of the input.
            grad_output: the gradient of its output.
            early: whether what was saved is projected.
        """
        assert site.rule is not None
        gradients = site.rule.gradients(site.module, saved, grad_output, self.batch_size)
        found = {}
        for local, name in site.parameters.items():
            done = early and local == "weight"
            projector = self._projectors.get(name)
            with self._observer.phase(GRADIENTS if projector is None else PROJECT):
                gradient = _project(gradients[local], projector, done, self._in_form)
            shape = self._trainable[name].shape
            if len(shape) > 2:  # a convolution's weight, whose rule takes it for a matrix
                dense = gradient.dense() if isinstance(gradient, Factored) else gradient
                assert isinstance(dense, Dense)
                gradient = Dense(dense.values.reshape(self.batch_size, *shape))
            if name in self._places:
                found[name] = self._known_as(name, gradient.dense().values)
            else:
                self._captured[name].append(gradient)
        return found

    def _run_by_rows(self, site: Site, original: Forward, args: Any, kwargs: Any) -> Any:
        """Runs a module with a row of its parameters for each sample."""
        leaves, spec = tree_flatten((args, kwargs))
        site.carrying(leaves, repr(spec), self.batch_size, self._shapes)
        with holding(site.module, self.rows_of(site, self.batch_size)):
            output = original(*args, **kwargs)
        leaves, spec = tree_flatten(output)
        site.carrying(leaves, repr(spec), self.batch_size, self._shapes)
        return output

    def rows_of(self, site: Site, batch_size: int) -> dict[str, Tensor]:
        """Returns a row of each parameter for each sample, which take no memory."""
        found = {}
        for local, name in site.parameters.items():
            if name not in self.rows:
                self.rows[name] = row_each(site.module, local, batch_size)
            found[local] = self.rows[name]
        return found

    def take_rows(self, name: str, gradient: Tensor) -> None:
        """Takes the gradient of the rows that a parameter has for each sample."""
        found = Dense(gradient[:, None].float())
        self._captured[name].append(_project(found, self._projectors.get(name), False, _as_it_is))

    def _run_generic(self, site: Site, original: Forward, args: Any, kwargs: Any) -> Any:
        """Runs a module with weights ``W + lift(tap_i)`` for sample i: under vmap, or in a loop."""
        leaves, spec = tree_flatten((args, kwargs))
        batched = site.carrying(leaves, repr(spec), self.batch_size, self._shapes)
        samples = [leaves[i].unflatten(0, (self.batch_size, -1)) for i in batched]  # (B, k, ...)
        taps = {
            local: self._known_as(name, self._tap(name)) for local, name in site.parameters.items()
        }
        projectors = {
            local: self._projectors[name]
            for local, name in site.parameters.items()
            if name in self._projectors
        }
        structure: list[tuple[list[Any], TreeSpec]] = []

        def record(local: str, gradient: Single) -> None:
            self._captured[site.parameters[local]].append(self._in_form(gradient))

        def one(taps: dict[str, Tensor], *sample: Tensor) -> list[Tensor]:
            filled = list(leaves)
            for i, leaf in zip(batched, sample, strict=True):
                filled[i] = leaf
            own_args, own_kwargs = tree_unflatten(filled, spec)
            call = (site.module, original, taps, projectors)
            if site.loops:
                output = call_for_one(*call, own_args, own_kwargs)
            else:
                with Batching(next(iter(taps.values()))):
                    output = call_in_coordinates(*call, record, own_args, own_kwargs)
            structure[:] = [tree_flatten(output)]
            return [leaf for leaf in structure[0][0] if isinstance(leaf, Tensor)]

        if site.loops:
            outputs = self._one_by_one(site, one, taps, samples)
        else:
            plain = partial(original, *args, **kwargs)
            with (
                site.looping_next_time(),
                refusing_dynamic_code(site.label, plain),
                vmap_safe(site.module),
            ):
                outputs = vmap(one, randomness="different")(taps, *samples)
        leaves, spec = structure[0]
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for i, output in zip(places, outputs, strict=True):
            leaves[i] = _merge(site, output, (repr(spec), i), self._shapes)
        return tree_unflatten(leaves, spec)

    def _one_by_one(
        self,
        site: Site,
        one: Callable[..., list[Tensor]],
        taps: Mapping[str, Tensor],
        samples: list[Tensor],
    ) -> list[Tensor]:
        """Returns what vmap would, for code that it cannot run."""
        own_taps = {local: tap.unbind() for local, tap in taps.items()}
        before, found = _state_of(site), []
        try:
            for i in range(self.batch_size):
                own = {local: taps[i] for local, taps in own_taps.items()}
                with running_alone(i):
                    found.append(one(own, *(sample[i] for sample in samples)))
            if changed := before ^ _state_of(site):
                raise UnsupportedModelError(
                    f"{site.label} cannot be vectorised over samples ({site.loops}), and changes "
                    f"its buffer {min(changed)[0]!r} when it runs, so that one sample after "
                    "another would see what is left of those before it. Freeze it with "
                    "requires_grad_(False)."
                )
            return [torch.stack(outputs) for outputs in zip(*found, strict=True)]
        except (PrivacyError, torch.OutOfMemoryError):
            raise
        except ERRORS as error:
            raise UnsupportedModelError(
                f"{site.label} cannot be vectorised over samples ({site.loops}), and fails for one "
                f"sample after another: {type(error).__name__}: {error}. Freeze it with "
                "requires_grad_(False)."
            ) from error

    def _tap(self, name: str) -> Tensor:
        """Returns the zero coordinates of a parameter, (B, ...), one tensor for all its uses."""
        if self._plans is not None and name in self._places:
            return self._plans.tap(self._places[name].piece)
        if name not in self._taps:
            weight, projector = self._trainable[name], self._projectors.get(name)
            self._taps[name] = zero_coordinates(weight, projector, self.batch_size)
        return self._taps[name]

    def _hand_out(self, name: str, stream: Stream) -> None:
        """Counts a use, and consumes the parameter's group when no other use is to come."""
        if stream.awaited[name] == 0:
            raise PrivacyError(
                f"{name} is used more often than in the first batch, after its clipped gradient "
                "was added up; its clipping would bound nothing. Use grad_sample_mode='auto', "
                "not grad_sample_mode='ghost'."
            )
        stream.awaited[name] -= 1
        group = stream.group_of[name]
        if all(stream.awaited[other] == 0 for other in group):
            stream.consume({other: add(self._captured.pop(other)) for other in group})


def _as_it_is(gradient: Single) -> Single:
    return gradient


def _project(
    gradient: Single,
    projector: Projector | None,
    done: bool,
    in_form: Callable[[Single], Single],
) -> Single:
    """Returns ``P^T G`` or ``G P`` from the factors of G, which is never formed.

    ``done`` says that the factor which meets P met it when it was saved. What stays a matrix, or a
    table, gets the form that is kept.
    """
    if projector is None:
        return in_form(gradient)
    left = projector.side is Side.LEFT
    match gradient:
        case Factored() if done:
            return gradient.dense()
        case Factored(rows, cols) if left:
            return Factored(rows @ projector.matrix.to(rows.dtype), cols).dense()
        case Factored(rows, cols):
            return Factored(rows, projector.project(cols)).dense()
        case SparseRows(indices, values, _) if left:  # the rows of G are one-hot: P^T picks from P
            return Factored(projector.matrix.to(values.dtype)[indices], values).dense()
        case SparseRows(indices, values, num_rows):
            return in_form(SparseRows(indices, projector.project(values), num_rows))
        case Dense(values):
            return Dense(projector.project(values))


def _state_of(site: Site) -> set[tuple[str, int, int]]:
    """Returns the buffers of a module, and which version of them there is."""
    return {(name, id(b), b._version) for name, b in site.module.named_buffers()}


def _merge(site: Site, output: Tensor, key: Key, shapes: Shapes) -> Tensor:
    """Returns (B, k, ...) as (B * k, ...), or one sample's share of what all samples share."""
    if output.dim() < 2:
        carries, first = False, 0
    elif key not in site.tensors:
        raise UnknownTensorError(f"{site.label} returned a tensor that it did not return before.")
    else:
        carries, first = bool(site.tensors[key].carries), output.shape[1]
        if carries and not site.tensors[key].fit(len(output) * first, len(output), shapes):
            raise UnknownTensorError(
                f"{site.label} returned a tensor with {first} rows for one sample, which is not "
                "what it has in a batch (it is told the batch size as a number, say)."
            )
    if carries or (output.requires_grad and first == 1):
        return output.flatten(0, 1)
    if output.requires_grad:  # one row for each sample is needed to tell their gradients apart
        raise UnsupportedModelError(
            f"{site.label} computes a tensor that all samples share, so it does not tell their "
            'gradients apart. Freeze it with requires_grad_(False), or use engine="functorch".'
        )
    return output[0]
