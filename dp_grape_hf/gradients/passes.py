"""One forward and backward pass of the layerwise engine: running sites and capturing gradients.

A *site* (``layers.Site``) is a module with trained parameters, whose forward a pass replaces. It is
*carried* if its input has a sample dimension. The *layout* (``flat.Layout``) gives a parameter its
*place* in the matrix (B, D) of gradients; a *piece* is this part in its shape in memory.

Every weight has zero coordinates for each sample, a leaf (*tap*) that takes no memory. A layer with
a rule runs with its weights detached and an extra autograd node at its output. When the node
receives the output's gradient, it applies the rule and the projection, and returns the gradients of
the coordinates. So the gradient of a weight is never formed, and ``p.grad`` stays None. Gradients
that are too large for a row for each sample are captured in another form (``forms``). Gradient
checkpointing works because it runs the forward pass again. The gradients of a module that runs
twice add up. A module without a rule runs under ``torch.func.vmap``, with weights
``W + lift(tap_i)`` for sample i; if vmap cannot run its code, it runs once for each sample.

Shapes: B samples in the physical batch, D coordinates in the layout; a module may see the samples
flattened with their k positions, (B * k, ...).
"""

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
from dp_grape_hf.gradients.definition import Batching, refusing_dynamic_code, vmap_safe
from dp_grape_hf.gradients.flat import Piece
from dp_grape_hf.gradients.forms import Dense, Factored, Single, projected
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
    version: int  # version of the output; an in-place operation increases it

    def gave(self, tensor: Tensor) -> bool:
        """Return whether a tensor is the output, and unchanged."""
        return (
            tensor is self.output
            and tensor is not self.argument
            and tensor._version == self.version
        )


class Pass:
    """The gradients that one forward and backward pass captures.

    Args:
        trainable: name -> weight.
        projectors: name -> projector, for the projected weights.
        plans: the plans for the parameters in the flat layout.
        batch_size: B.
        shapes: the shapes of the model's inputs for one sample.
        in_form: returns the gradient of one use of an unprojected weight in the form to keep.
        observer: observes the phases.

    Attributes:
        anchor: a zero that requires grad. It keeps a layer's node in the graph if the layer's input
            does not require grad (an embedding), so that ``autograd.grad`` reaches the node.
        captured: name -> gradients of uses of parameters that the layout or a piece lacks.
        rows: name -> (B, ...), parameters that have a row for each sample while a module runs.
        outputs: site -> shapes and dtypes of its outputs, for layers with a rule and no plan.
    """

    def __init__(
        self,
        trainable: Mapping[str, Tensor],
        projectors: Mapping[str, Projector],
        plans: Plans,
        batch_size: int,
        shapes: Shapes,
        in_form: Callable[[Single], Single],
        observer: Observer,
    ) -> None:
        self._trainable, self._projectors, self.batch_size = trainable, projectors, batch_size
        self._shapes, self._observer = shapes, observer
        self._plans, self._places = plans, plans.layout.places
        self._in_form = in_form
        device = next(iter(trainable.values())).device
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        plans.ready(device, batch_size)
        self._taps: dict[str, Tensor] = {}  # name -> zeros (B, *coordinates), outside the layout
        self.rows: dict[str, Tensor] = {}
        self.captured: dict[str, list[Single]] = defaultdict(list)
        self.outputs: dict[Site, list[tuple[torch.Size, torch.dtype]]] = defaultdict(list)
        self._activation: _Activation | None = None  # the last call, until a layer runs

    def differentiate(self, loss: Tensor) -> dict[Piece, Tensor]:
        """Differentiate the sum of the losses; return the gradients of pieces of the layout."""
        pieces = self._plans.taps
        leaves = [self.anchor, *pieces.values(), *self._taps.values(), *self.rows.values()]
        _, *gradients = torch.autograd.grad(loss + self.anchor, leaves, allow_unused=True)
        others, of_rows = gradients[len(pieces) :], gradients[len(pieces) + len(self._taps) :]
        for name, gradient in zip(self._taps, others, strict=False):
            if gradient is not None:
                self.captured[name].append(Dense(gradient))
        for name, gradient in zip(self.rows, of_rows, strict=True):
            if gradient is not None:
                self.take_rows(name, gradient)
        of_pieces = zip(pieces, gradients, strict=False)
        return {piece: part for piece, part in of_pieces if part is not None}

    def _transposed(self, name: str, coordinates: Tensor) -> Tensor:
        """Convert coordinates between their shape and the shape in which the layout stores them."""
        transposed = name in self._places and self._places[name].transposed
        return coordinates.mT if transposed else coordinates

    def remember(self, function: Callable[[Tensor], Tensor], argument: Tensor) -> Tensor:
        """Run an activation function, whose output the next layer may compute again."""
        output = function(argument)
        self._activation = _Activation(function, argument, output, output._version)
        return output

    def forward_of(self, site: Site, original: Forward) -> Forward:
        """Return the function that replaces the forward of a site."""
        if site in self._plans:
            plan = self._plans.of(site, original)
            if plan is not None:
                return partial(self._run_planned, plan, site, original)
        # A plan is made when the site runs: only then are sharded weights gathered.
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
        plan = self._plans.of(site, original)
        if plan is not None:
            return self._run_planned(plan, site, original, *args, **kwargs)
        return self._run_by_rule(site, original, args, kwargs)

    def _run_by_rule(
        self, site: Site, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a layer by its code, and take its gradients by its rule."""
        if site.has_several_tensors(args, kwargs):
            raise UnknownTensorError(
                f"{site.label} received a further tensor, which no earlier batch had."
            )
        layer_input = first_tensor(args, kwargs)
        assert layer_input is not None
        activation, self._activation = self._activation, None
        if activation and activation.gave(layer_input) and self.early(site) is None:
            saved, again = activation.argument.detach(), activation.function
            self._check_carried(site, layer_input)
        else:
            saved, again = self._save(site, layer_input), None  # before the layer, for the cache
        with detached(site.module):
            output = original(*args, **kwargs)
        return self._capture(site, saved, output, again)

    def _run_planned(
        self, plan: Plan, site: Site, original: Forward, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a layer by its autograd function, which has one input."""
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
        """Return the tensor that the backward pass needs of a layer's input."""
        assert site.rule is not None
        with self._observer.phase(PROJECT):
            layer_input = self._check_carried(site, layer_input)
            saved = site.rule.save(site.module, layer_input.detach(), self.batch_size)
            projector = self.early(site)
            if projector is None:
                return saved
            return saved @ projector.matrix.to(saved.dtype)  # (B, T, r) is stored, not the input

    def _check_carried(self, site: Site, layer_input: Tensor) -> Tensor:
        """Return the input with the batch in its leading dimension."""
        site.check(layer_input.shape[0], self.batch_size, self._shapes)
        if not site.carried:  # broadcast position ids: one row for all samples
            return layer_input.expand(self.batch_size, *layer_input.shape[1:])
        return layer_input

    def early(self, site: Site) -> Projector | None:
        """Return the projector that acts on the saved factor of the weight's gradient."""
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
        """Add the node that captures the layer's gradients when its output's gradient arrives.

        Args:
            site: the layer.
            saved: the saved tensor of its input, or the argument of ``again``.
            output: its output.
            again: computes the layer's input from ``saved``; None if ``saved`` is of the input.
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
            return None, *of_taps.values()  # the anchor has no gradient

        return AtZero.apply(output, saved, derivative, self.anchor, *taps)

    def take(
        self, site: Site, saved: Tensor, grad_output: Tensor, early: bool
    ) -> dict[str, Tensor]:
        """Compute the gradients of a layer's parameters, and capture those outside the layout.

        Args:
            site: the layer.
            saved: the tensor that its rule saved of the input.
            grad_output: the gradient of its output.
            early: whether ``saved`` is projected.

        Returns:
            The gradients in the layout, by parameter name, in the shape in memory.
        """
        assert site.rule is not None
        gradients = site.rule.gradients(site.module, saved, grad_output, self.batch_size)
        in_layout = {}
        for local, name in site.parameters.items():
            done = early and local == "weight"
            projector = self._projectors.get(name)
            with self._observer.phase(GRADIENTS if projector is None else PROJECT):
                gradient = self._in_form(projected(gradients[local], projector, done))
            shape = self._trainable[name].shape
            if len(shape) > 2:  # the weight of a convolution, which its rule treats as a matrix
                dense = gradient.dense() if isinstance(gradient, Factored) else gradient
                assert isinstance(dense, Dense)
                gradient = Dense(dense.values.reshape(self.batch_size, *shape))
            if name in self._places:
                in_layout[name] = self._transposed(name, gradient.dense().values)
            else:
                self.captured[name].append(gradient)
        return in_layout

    def _run_by_rows(self, site: Site, original: Forward, args: Any, kwargs: Any) -> Any:
        """Run a module with a row of its parameters for each sample."""
        leaves, spec = tree_flatten((args, kwargs))
        site.carrying(leaves, repr(spec), self.batch_size, self._shapes)
        with holding(site.module, self.rows_of(site, self.batch_size)):
            output = original(*args, **kwargs)
        leaves, spec = tree_flatten(output)
        site.carrying(leaves, repr(spec), self.batch_size, self._shapes)
        return output

    def rows_of(self, site: Site, batch_size: int) -> dict[str, Tensor]:
        """Return the parameters of a site with a row for each sample, which takes no memory."""
        rows = {}
        for local, name in site.parameters.items():
            if name not in self.rows:
                self.rows[name] = row_each(site.module, local, batch_size)
            rows[local] = self.rows[name]
        return rows

    def take_rows(self, name: str, gradient: Tensor) -> None:
        """Capture the gradient (B, ...) of a parameter that has a row for each sample."""
        dense = Dense(gradient[:, None].float())
        self.captured[name].append(projected(dense, self._projectors.get(name)))

    def _run_generic(self, site: Site, original: Forward, args: Any, kwargs: Any) -> Any:
        """Run a module with weights ``W + lift(tap_i)`` for sample i: under vmap, or in a loop."""
        leaves, spec = tree_flatten((args, kwargs))
        batched = site.carrying(leaves, repr(spec), self.batch_size, self._shapes)
        samples = [leaves[i].unflatten(0, (self.batch_size, -1)) for i in batched]  # (B, k, ...)
        taps = {
            local: self._transposed(name, self._tap(name))
            for local, name in site.parameters.items()
        }
        projectors = {
            local: self._projectors[name]
            for local, name in site.parameters.items()
            if name in self._projectors
        }
        structure: list[tuple[list[Any], TreeSpec]] = []

        def record(local: str, gradient: Single) -> None:
            self.captured[site.parameters[local]].append(self._in_form(gradient))

        def one(taps: dict[str, Tensor], *sample: Tensor) -> list[Tensor]:
            filled = list(leaves)
            for i, leaf in zip(batched, sample, strict=True):
                filled[i] = leaf
            args, kwargs = tree_unflatten(filled, spec)
            call = (site.module, original, taps, projectors)
            if site.loops:
                output = call_for_one(*call, args, kwargs)
            else:
                with Batching(next(iter(taps.values()))):
                    output = call_in_coordinates(*call, record, args, kwargs)
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
        """Run ``one`` for one sample after another, and stack the outputs as vmap does."""
        by_sample = {local: tap.unbind() for local, tap in taps.items()}
        before, results = _state_of(site), []
        try:
            for i in range(self.batch_size):
                of_sample = {local: taps[i] for local, taps in by_sample.items()}
                with running_alone(i):
                    results.append(one(of_sample, *(sample[i] for sample in samples)))
            if changed := before ^ _state_of(site):
                raise UnsupportedModelError(
                    f"{site.label} cannot be vectorised over samples ({site.loops}), and changes "
                    f"its buffer {min(changed)[0]!r} when it runs. If it ran for one sample after "
                    "another, a sample would depend on earlier ones. Freeze it with "
                    "requires_grad_(False)."
                )
            return [torch.stack(outputs) for outputs in zip(*results, strict=True)]
        except (PrivacyError, torch.OutOfMemoryError):
            raise
        except ERRORS as error:
            raise UnsupportedModelError(
                f"{site.label} cannot be vectorised over samples ({site.loops}), and fails for one "
                f"sample after another: {type(error).__name__}: {error}. Freeze it with "
                "requires_grad_(False)."
            ) from error

    def _tap(self, name: str) -> Tensor:
        """Return the zero coordinates of a parameter, (B, ...): one tensor for all its uses."""
        if name in self._places:
            return self._plans.tap(self._places[name].piece)
        if name not in self._taps:
            weight, projector = self._trainable[name], self._projectors.get(name)
            self._taps[name] = zero_coordinates(weight, projector, self.batch_size)
        return self._taps[name]


def _state_of(site: Site) -> set[tuple[str, int, int]]:
    """Return the buffers of a module: names, identities and versions."""
    return {(name, id(b), b._version) for name, b in site.module.named_buffers()}


def _merge(site: Site, output: Tensor, key: Key, shapes: Shapes) -> Tensor:
    """Reshape an output (B, k, ...) to (B * k, ...); return one row of an output without samples.

    Raises:
        UnknownTensorError: if the number of rows differs from earlier passes.
        UnsupportedModelError: if all samples share an output that requires grad.
    """
    if output.dim() < 2:
        carries, first = False, 0
    elif key not in site.tensors:
        raise UnknownTensorError(f"{site.label} returned a tensor that no earlier batch had.")
    else:
        carries, first = bool(site.tensors[key].carries), output.shape[1]
        if carries and not site.tensors[key].fit(len(output) * first, len(output), shapes):
            raise UnknownTensorError(
                f"{site.label} returned a tensor with {first} rows for one sample alone, and "
                "another number in a batch (it may receive the batch size as a number)."
            )
    if carries or (output.requires_grad and first == 1):
        return output.flatten(0, 1)
    if output.requires_grad:  # gradients can be separated only if each sample has a row
        raise UnsupportedModelError(
            f"{site.label} computes a tensor that all samples share, so their gradients cannot be "
            'separated. Freeze it with requires_grad_(False), or use engine="functorch".'
        )
    return output[0]
