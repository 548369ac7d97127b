"""The layerwise engine: per-sample gradients from one forward and one backward pass of the batch.

Every layer with a rule runs with its weights detached and an extra autograd node at its output.
When that node receives the output's gradient it applies the rule, with the projection, so the
gradient of a weight never exists and ``p.grad`` stays None. Gradient checkpointing works because
the forward pass is simply re-run; a module that runs twice is recorded twice. A module without a
rule runs under ``torch.func.vmap`` with parameters ``p + lift(tap_i)``, one copy per sample.

Shapes: B samples in the physical batch; a module may see them flattened with positions, (B * k,
...).
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call, vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from dp_grape_hf.errors import UnsupportedModelError
from dp_grape_hf.layer_rules import LayerRule, rule_for
from dp_grape_hf.losses import LossFunction
from dp_grape_hf.per_sample import (
    Gradients,
    Inputs,
    PerSampleEngine,
    batch_size_of,
    engine,
)
from dp_grape_hf.probing import (
    Selections,
    carries_batch,
    copies_of_first,
    evaluating,
    first_two,
    keeping_random_state,
    leading_sizes,
    refuse_coupled_losses,
    refuse_shared_gradients,
)
from dp_grape_hf.projection import Projector, Side
from dp_grape_hf.representations import Dense, Factored, Single, SparseRows, add

Forward = Callable[..., Any]


@dataclass
class _Site:
    """A module that the engine runs itself, and which of its tensors carry the batch."""

    path: str
    module: nn.Module
    rule: LayerRule | None  # None: the generic functorch rule
    parameters: dict[str, str]  # name inside the module -> name in the model, trainable only
    inputs: list[bool] | None = None  # per tensor argument; None: the module was not called
    outputs: list[bool] | None = None

    @property
    def carried(self) -> bool:
        return bool(self.inputs and self.inputs[0])

    @property
    def label(self) -> str:
        return f"{self.path or 'the model'} ({type(self.module).__name__})"


@dataclass
class _Pass:
    """What one forward and backward pass collects.

    ``anchor`` is a zero that requires grad: it keeps a layer's node in the graph where the layer's
    input does not require grad (an embedding), and lets ``autograd.grad`` reach the node.
    """

    batch_size: int
    projectors: Mapping[str, Projector]
    anchor: Tensor
    taps: dict[str, Tensor] = field(default_factory=dict)  # name -> (B, *coordinates), zeros
    captured: dict[str, list[Single]] = field(default_factory=lambda: defaultdict(list))


class _Capture(torch.autograd.Function):
    """The identity on a layer's output; its backward hands the output's gradient to ``record``."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, saved: Tensor, anchor: Tensor, record: Any) -> Tensor:
        ctx.save_for_backward(saved)
        ctx.record = record
        return output.detach()  # an alias but no autograd view: in-place operations may follow

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.record(ctx.saved_tensors[0], grad_output)
        return grad_output, None, None, None


class _LookUps(TorchFunctionMode):
    """Hands every look-up in one table to ``capture``, also inside a subclass of "
    "``nn.Embedding``."""

    def __init__(self, weight: Tensor, capture: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self._weight, self._capture = weight, capture

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is functional.embedding and args[1] is self._weight:
            return self._capture(args[0], output)
        return output


@engine("layerwise")
class LayerwiseEngine(PerSampleEngine):
    """One forward, one backward, one rule per layer type. See the module's docstring."""

    def __init__(self, model: nn.Module, loss: LossFunction | None = None) -> None:
        super().__init__(model, loss)
        self._names = {id(p): name for name, p in self.trainable.items()}
        self._sites: list[_Site] = []
        self._find_sites("", model, set())
        self._probed = 0  # how many different samples the probe has seen, up to 2

    def __call__(
        self, inputs: Inputs, projectors: Mapping[str, Projector]
    ) -> tuple[Tensor, Gradients]:
        """Returns losses (B,) and per-sample gradients by parameter name (sensitive)."""
        batch_size = batch_size_of(inputs)
        if self._probed < min(batch_size, 2):
            self._probe(inputs, projectors)
            self._probed = min(batch_size, 2)
        losses, found = self._pass(inputs, projectors)
        for name in self.trainable.keys() - found.keys():  # skipped in this pass, by layer drop say
            shape = self.coordinate_shape(name, projectors)
            found[name] = Dense(losses.new_zeros(()).expand(batch_size, *shape))
        return losses, {name: found[name] for name in self.trainable}

    def _pass(
        self, inputs: Inputs, projectors: Mapping[str, Projector], only: int | None = None
    ) -> tuple[Tensor, Gradients]:
        """Returns losses (B,) and the gradients of their sum, or of the loss of one sample only."""
        batch_size = batch_size_of(inputs)
        device = next(iter(self.trainable.values())).device
        run = _Pass(batch_size, projectors, torch.zeros((), device=device, requires_grad=True))
        with self._installed(lambda site, original: partial(self._run, site, original, run)):
            losses = self.losses(self.model, inputs, batch_size)
            leaves = [run.anchor, *run.taps.values()]
            total = (losses.sum() if only is None else losses[only]) + run.anchor
            gradients = torch.autograd.grad(total, leaves, allow_unused=True)
        for name, gradient in zip(run.taps, gradients[1:], strict=True):
            if gradient is not None:
                run.captured[name].append(Dense(gradient))
        return losses.detach(), {name: add(uses) for name, uses in run.captured.items()}

    # ---- Which modules, which rule ----

    def _find_sites(self, path: str, module: nn.Module, seen: set[nn.Module]) -> None:
        if module in seen:
            return
        seen.add(module)
        rule = None
        if self._own(module, recurse=False):
            rule = rule_for(module)
            self._sites.append(_Site(path, module, rule, self._own(module, recurse=rule is None)))
            if rule is None:
                return  # the generic rule covers the children
        for name, child in module.named_children():
            self._find_sites(f"{path}.{name}" if path else name, child, seen)

    def _own(self, module: nn.Module, recurse: bool) -> dict[str, str]:
        parameters = module.named_parameters(recurse=recurse)
        return {local: self._names[id(p)] for local, p in parameters if id(p) in self._names}

    @contextlib.contextmanager
    def _installed(self, make: Callable[[_Site, Forward], Forward]) -> Iterator[None]:
        """Replaces the forward of every site, and puts the old ones back whatever happens."""
        before = [vars(site.module).get("forward") for site in self._sites]
        try:
            for site in self._sites:
                site.module.forward = make(site, site.module.forward)
            yield
        finally:
            for site, forward in zip(self._sites, before, strict=True):
                vars(site.module).pop("forward", None)
                if forward is not None:
                    site.module.forward = forward

    # ---- Which tensors carry the batch: two batch sizes are run, shapes are never compared ----

    def _probe(self, inputs: Inputs, projectors: Mapping[str, Projector]) -> None:
        calls: dict[str, list[tuple[list[int], list[int]]]] = {}

        def observe(site: _Site, original: Forward, *args: Any, **kwargs: Any) -> Any:
            looked_up: list[int] = []

            def look_up(indices: Tensor, output: Tensor) -> Tensor:
                looked_up.extend(leading_sizes(indices))
                return output

            with _detached(site.module, recurse=site.rule is None), _look_ups(site, look_up):
                output = original(*args, **kwargs)
            sizes = looked_up or leading_sizes((args, kwargs))
            calls.setdefault(site.path, []).append((sizes, leading_sizes(output)))
            return output

        runs = []
        with (
            evaluating(self.model),
            Selections() as selections,
            self._installed(lambda site, original: partial(observe, site, original)),
        ):
            for size in (2, 3):
                calls = {}
                losses = self.losses(self.model, copies_of_first(inputs, size), size)
                runs.append((calls, losses))
            self._refuse_uses_outside_modules(runs[0][1])
        (calls2, losses2), (calls3, losses3) = runs
        refuse_coupled_losses(losses2.detach(), losses3.detach())
        for site in self._sites:
            two, three = calls2.get(site.path, []), calls3.get(site.path, [])
            for sizes in zip(two, three, strict=True):
                self._learn(site, *sizes)
                if selections.seen and site.carried and sizes[0][0][0] != 2:
                    raise UnsupportedModelError(
                        f"{site.label} is given positions without their samples, in a model that "
                        "selects positions by value (nonzero, a boolean mask): it is not known "
                        'which sample a position belongs to. Use engine="functorch".'
                    )
        two_samples = first_two(inputs)
        with evaluating(self.model):
            together = self.losses(self.model, two_samples, 2).detach()
            second = self.losses(self.model, copies_of_first(two_samples, 2, sample=1), 2).detach()
        refuse_coupled_losses(losses2.detach()[:1], together[:1])
        refuse_coupled_losses(second[:1], together[1:])
        for only in (0, 1):
            with evaluating(self.model):
                _, found = self._pass(two_samples, projectors, only)
            self.refuse_unused(found)
            refuse_shared_gradients(found, 1 - only)
            with keeping_random_state():  # mixing may happen in training mode only
                _, found = self._pass(two_samples, projectors, only)
            refuse_shared_gradients(found, 1 - only)

    def _learn(
        self, site: _Site, two: tuple[list[int], list[int]], three: tuple[list[int], list[int]]
    ) -> None:
        inputs, outputs = (carries_batch(a, b) for a, b in zip(two, three, strict=True))
        if site.inputs not in (None, inputs) or site.outputs not in (None, outputs):
            raise UnsupportedModelError(
                f"{site.label} is called in different ways in one pass, so it is not known which "
                'of its inputs carry the batch. Use engine="functorch".'
            )
        site.inputs, site.outputs = inputs, outputs
        first = two[0][0] if two[0] else 0
        if site.rule is not None and not site.carried and first != 1:
            raise UnsupportedModelError(
                f"{site.label} has an input of leading size {first} that does not follow the batch "
                "size, so its calls do not tell the samples apart. Freeze it with "
                'requires_grad_(False), or use engine="functorch".'
            )

    def _refuse_uses_outside_modules(self, losses: Tensor) -> None:
        if not losses.requires_grad:
            return
        found = torch.autograd.grad(losses.sum(), list(self.trainable.values()), allow_unused=True)
        if names := [n for n, g in zip(self.trainable, found, strict=True) if g is not None]:
            raise UnsupportedModelError(
                f"The model uses {', '.join(names)} outside the forward of the module that owns "
                "it, where the layerwise engine does not see its gradient. Freeze it with "
                'requires_grad_(False), or use engine="functorch".'
            )

    # ---- Running a site ----

    def _run(self, site: _Site, original: Forward, run: _Pass, *args: Any, **kwargs: Any) -> Any:
        if site.rule is None:
            return self._run_generic(site, original, run, args, kwargs)
        if isinstance(site.module, nn.Embedding):

            def capture(indices: Tensor, output: Tensor) -> Tensor:
                return self._capture(site, run, self._save(site, run, indices), output)

            with _detached(site.module, recurse=False), _look_ups(site, capture):
                return original(*args, **kwargs)
        layer_input = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        saved = self._save(site, run, layer_input)  # first, while the input is in the cache
        with _detached(site.module, recurse=False):
            output = original(*args, **kwargs)
        return self._capture(site, run, saved, output)

    def _save(self, site: _Site, run: _Pass, layer_input: Tensor) -> Tensor:
        """Returns what of a layer's input must survive until the backward pass."""
        rule, batch_size = site.rule, run.batch_size
        assert rule is not None
        if not site.carried:  # broadcast position ids: one row for all samples
            layer_input = layer_input.expand(batch_size, *layer_input.shape[1:])
        elif layer_input.shape[0] % batch_size:
            raise UnsupportedModelError(
                f"{site.label} was given a leading size {layer_input.shape[0]} in a batch of "
                f"{batch_size}: it does not carry the batch as it did in the first batch."
            )
        saved = rule.save(site.module, layer_input.detach(), batch_size)
        projector = self._early(site, run)
        return projector.project(saved) if projector else saved  # only (B, T, r) survives

    def _early(self, site: _Site, run: _Pass) -> Projector | None:
        """Returns the projector that acts on the saved columns of the weight's gradient."""
        projector = run.projectors.get(site.parameters.get("weight", ""))
        saves_columns = site.rule is not None and site.rule.saves_columns
        right = projector is not None and projector.side is Side.RIGHT
        return projector if saves_columns and right else None

    def _capture(self, site: _Site, run: _Pass, saved: Tensor, output: Tensor) -> Tensor:
        """Adds the node that records the layer's gradients when its output's gradient arrives."""
        rule, module, batch_size = site.rule, site.module, run.batch_size
        assert rule is not None
        early = self._early(site, run) is not None
        if not site.carried:
            output = output.expand(batch_size, *output.shape[1:])

        def record(saved: Tensor, grad_output: Tensor) -> None:
            gradients = rule.gradients(module, saved, grad_output, batch_size)
            for local, name in site.parameters.items():
                done = early and local == "weight"
                gradient = _project(gradients[local], run.projectors.get(name), done)
                shape = self.trainable[name].shape
                if len(shape) > 2:  # a convolution's weight, whose rule takes it for a matrix
                    dense = gradient.dense() if isinstance(gradient, Factored) else gradient
                    assert isinstance(dense, Dense)
                    gradient = Dense(dense.values.reshape(batch_size, *shape))
                run.captured[name].append(gradient)

        return _Capture.apply(output, saved, run.anchor, record)

    def _run_generic(
        self, site: _Site, original: Forward, run: _Pass, args: Any, kwargs: Any
    ) -> Any:
        """Runs a module under vmap with parameters ``p + lift(tap_i)``, one copy per sample."""
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.dim() > 0]
        batched = [i for i, carries in zip(tensors, site.inputs or [], strict=True) if carries]
        samples = [leaves[i].unflatten(0, (run.batch_size, -1)) for i in batched]  # (B, k, ...)
        taps = {local: self._tap(name, run) for local, name in site.parameters.items()}
        structure: list[Any] = []

        def one(taps: dict[str, Tensor], *sample: Tensor) -> list[Tensor]:
            parameters = {}
            for local, name in site.parameters.items():
                weight, projector = self.trainable[name].detach(), run.projectors.get(name)
                delta = projector.lift(taps[local]) if projector else taps[local]
                parameters[local] = weight + delta.to(weight.dtype)
            filled = list(leaves)
            for i, leaf in zip(batched, sample, strict=True):
                filled[i] = leaf
            output = functional_call(site.module, parameters, *tree_unflatten(filled, spec))
            structure[:] = tree_flatten(output)
            return [value for value in structure[0] if isinstance(value, Tensor)]

        wrapper = site.module.forward
        try:
            site.module.forward = original
            with sdpa_kernel(SDPBackend.MATH):  # the others have no rule for vmap
                outputs = vmap(one, randomness="different")(taps, *samples)
        finally:
            site.module.forward = wrapper
        carries = iter(site.outputs or [])
        merged = (_merge(site, x, x.dim() > 1 and next(carries)) for x in outputs)
        values = [next(merged) if isinstance(x, Tensor) else x for x in structure[0]]
        return tree_unflatten(values, structure[1])

    def _tap(self, name: str, run: _Pass) -> Tensor:
        """Returns the zero coordinates of a parameter, (B, ...), which take no memory."""
        if name not in run.taps:
            zero = torch.zeros((), device=self.trainable[name].device)
            shape = self.coordinate_shape(name, run.projectors)
            run.taps[name] = zero.expand(run.batch_size, *shape).requires_grad_()
        return run.taps[name]


def _project(gradient: Single, projector: Projector | None, columns_done: bool) -> Single:
    """Returns ``P^T G`` or ``G P`` from the factors of G, which is never formed."""
    if projector is None:
        return gradient.cheapest() if isinstance(gradient, Factored) else gradient
    left = projector.side is Side.LEFT
    match gradient:
        case Factored(rows, cols) if left:
            return Factored(rows @ projector.matrix.to(rows.dtype), cols).dense()
        case Factored(rows, cols):
            return Factored(rows, cols if columns_done else projector.project(cols)).dense()
        case SparseRows(indices, values, _) if left:  # the rows of G are one-hot: P^T picks from P
            return Factored(projector.matrix.to(values.dtype)[indices], values).dense()
        case SparseRows(indices, values, num_rows):
            return SparseRows(indices, projector.project(values), num_rows)
        case Dense(values):
            return Dense(projector.project(values))


def _merge(site: _Site, output: Tensor, carries: bool) -> Tensor:
    """Returns (B, k, ...) as (B * k, ...), or one sample's share where all samples have the "
    "same."""
    if carries or (output.requires_grad and output.dim() > 1 and output.shape[1] == 1):
        return output.flatten(0, 1)
    if output.requires_grad:  # one row for each sample is needed to tell their gradients apart
        raise UnsupportedModelError(
            f"{site.label} computes a tensor of shape {tuple(output.shape[1:])} that all samples "
            "share, so it does not tell their gradients apart. Freeze it with "
            'requires_grad_(False), or use engine="functorch".'
        )
    return output[0]


def _look_ups(
    site: _Site, capture: Callable[[Tensor, Tensor], Tensor]
) -> contextlib.AbstractContextManager[Any]:
    if isinstance(site.module, nn.Embedding) and site.rule is not None:
        return _LookUps(site.module.weight, capture)
    return contextlib.nullcontext()


@contextlib.contextmanager
def _detached(module: nn.Module, recurse: bool) -> Iterator[None]:
    """Runs a module without tracking its own weights: their gradients come from its rule."""
    tracked = [p for p in module.parameters(recurse=recurse) if p.requires_grad]
    try:
        for parameter in tracked:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in tracked:
            parameter.requires_grad_(True)
