"""The forward and backward pass through ``torch.compile``.

Each trained layer has a forward that ``torch.compile`` can trace, the same in every pass. A layer
with a plan runs by its autograd function. To the output of any other layer (an embedding table),
zeros are added, which take no memory. The gradient of the zeros is the gradient of the output. From
it, the layer's rule computes the gradients of the parameters, as in a pass without compilation.

The model is compiled as one graph (``fullgraph``) for each shape of a batch. So the model's code
cannot depend on values of the data, and the shapes inside the model are the same for all batches of
one shape. A first pass without compilation shows them. The forward of a module whose parameters
have a row for each sample is not replaced.

Shapes: B samples, of R >= B rows that the model is compiled for.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dp_grape_hf.gradients.flat import Piece
from dp_grape_hf.gradients.layers import Forward, Shapes, Site, Sites, holding, replaced_forwards
from dp_grape_hf.gradients.passes import Pass
from dp_grape_hf.gradients.plans import Plan, Plans
from dp_grape_hf.gradients.rows import rows_of

logger = logging.getLogger(__name__)

_MOST_SHAPES = 64  # the most shapes for which the model is compiled


@dataclass(frozen=True)
class Compilation:
    """The settings of compilation.

    Args:
        rows: R, the most samples of a physical batch.
        backend: as in ``torch.compile``.
        mode: as in ``torch.compile``.
    """

    rows: int = 1
    backend: str | None = None
    mode: str | None = None


@dataclass(eq=False)
class _Layer:
    """The state that the forward of a layer reads and writes when it is traced."""

    site: Site
    original: Forward
    plan: Plan | None = None
    rows: int = 1
    matrix: Tensor | None = None  # P, if it projects the saved tensor
    zeros: Tensor | None = None
    saved: Tensor | None = None

    def run_planned(self, x: Tensor) -> Tensor:
        """Run a layer by its autograd function."""
        assert self.plan is not None
        return self.plan.run(x)

    def run_table(self, *args: Any, **kwargs: Any) -> Any:
        """Run an embedding table; ``_look_up`` captures its look-ups."""
        _looking_up.layer, table = self, self.site.module
        output = type(table).forward(table, *args, **kwargs)
        _looking_up.layer = None
        return output

    def run_with_zeros(self, x: Tensor) -> Tensor:
        """Run a layer that has a rule and no plan."""
        return self.add(x, self.original(x))

    def add(self, given: Tensor, output: Tensor) -> Tensor:
        """Save the rule's tensor of the input, and return the output with zeros added to it."""
        assert self.site.rule is not None
        assert self.zeros is not None
        if not self.site.carried:
            given = given.expand(self.rows, *given.shape[1:])
            output = output.expand(self.rows, *output.shape[1:])
        saved = self.site.rule.save(self.site.module, given.detach(), self.rows)
        self.saved = saved if self.matrix is None else saved @ self.matrix.to(saved.dtype)
        return output + self.zeros


@dataclass
class _LookingUp:
    """The embedding table whose forward is running."""

    layer: _Layer | None = None  # always an attribute of the instance, to avoid recompilation


_looking_up = _LookingUp()
_forward = nn.Embedding.forward


def _look_up(module: nn.Embedding, indices: Tensor) -> Tensor:
    """Replace ``nn.Embedding.forward`` while a model is traced.

    The tracer does not always see a replacement of ``functional.embedding``.
    """
    output, layer = _forward(module, indices), _looking_up.layer
    if layer is None or module is not layer.site.module:
        return output
    return layer.add(indices, output)


class NotCompiledError(RuntimeError):
    """The model, or this batch, must run without ``torch.compile``."""


@dataclass
class CompiledModel:
    """A model with a compiled forward and backward pass.

    Args:
        model: the model.
        sites: the sites of its trained layers.
        options: how to compile it.

    Attributes:
        refused: why the model cannot be compiled; empty if it can.
    """

    model: nn.Module
    sites: Sites
    options: Compilation
    refused: str = ""
    _outputs: dict[Shapes, dict[Site, tuple[torch.Size, torch.dtype]]] = field(default_factory=dict)
    _compiled: set[Any] = field(default_factory=set)  # (shapes, training mode) compiled so far
    _layers: list[_Layer] = field(default_factory=list)
    _run: Callable[..., Any] | None = None

    def learn(self, shapes: Shapes, run: Pass) -> None:
        """Store the shapes of outputs of layers in a pass without compilation.

        Args:
            shapes: of the model's inputs.
            run: the finished pass.
        """
        if self.refused or shapes in self._outputs:
            return
        of_sites = {}
        for site, outputs in run.outputs.items():
            (shape, dtype), *others = outputs
            if others:
                self._refuse(f"{site.label} runs more than once")
            rows = shape[0] // run.batch_size * self.options.rows
            of_sites[site] = torch.Size([rows, *shape[1:]]), dtype
        self._outputs[shapes] = of_sites

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        logger.warning("torch_compile=True: %s. The model runs without compilation.", reason)

    def differentiate(
        self,
        inputs: Mapping[str, Any],
        shapes: Shapes,
        run: Pass,
        plans: Plans,
        losses_of: Callable[[Mapping[str, Any], Callable[..., Any]], Tensor],
    ) -> tuple[Tensor, dict[Piece, Tensor]]:
        """Return losses (B,) and the gradients of pieces of the layout; ``run`` has the others.

        Args:
            inputs: B samples.
            shapes: the shapes of one sample.
            run: computes gradients by the rules of layers.
            plans: the plans of ``run``.
            losses_of: computes the losses of inputs, with a function that runs the model.

        Raises:
            NotCompiledError: if this batch must run without compilation.
        """
        size, rows = run.batch_size, self.options.rows
        if size > rows or shapes not in self._outputs:
            raise NotCompiledError
        if torch._C._len_torch_dispatch_stack() > 0:  # a dispatch mode, of a spot check for example
            raise NotCompiledError
        self._connect(plans, run, shapes)
        padded = rows_of(inputs, [*range(size), *[0] * (rows - size)])
        plans.ready(run.anchor.device, rows)
        with self._traceable(run):
            losses = losses_of(padded, self._compile(shapes))[:size]
        added = [layer for layer in self._layers if layer.zeros is not None]
        planned = [layer.plan for layer in self._layers if layer.plan is not None]
        used = {piece for plan in planned for piece in (plan.piece, plan.bias)}
        pieces = {piece: tap for piece, tap in plans.taps.items() if piece in used}
        zeros = [layer.zeros for layer in added if layer.zeros is not None]
        leaves = [*pieces.values(), *zeros, *run.rows.values()]
        gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
        if any(gradient is None for gradient in gradients):  # None here does not mean zero
            self._refuse("the gradient of a layer was not traced")
            raise NotCompiledError
        parts = {p: gradient[:size] for p, gradient in zip(pieces, gradients, strict=False)}
        for name, gradient in zip(run.rows, gradients[len(pieces) + len(zeros) :], strict=True):
            run.take_rows(name, gradient[:size])
        for layer, gradient in zip(added, gradients[len(pieces) :], strict=False):
            saved, layer.saved = layer.saved, None
            if saved is None:
                self._refuse(f"the input of {layer.site.label} was not traced")
                raise NotCompiledError
            saved = saved[: len(saved) // rows * size].detach()
            gradient = gradient[: len(gradient) // rows * size]
            early = layer.matrix is not None
            for name, part in run.take(layer.site, saved, gradient, early).items():
                piece = plans.layout.places[name].piece
                parts[piece] = parts[piece] + part if piece in parts else part
        return losses.detach(), parts

    def _connect(self, plans: Plans, run: Pass, shapes: Shapes) -> None:
        """Prepare the layers for these projections and shapes of samples."""
        if [layer.site for layer in self._layers] != self.sites.all:
            self._layers = [self._layer(site) for site in self.sites]
        outputs = self._outputs[shapes]
        for layer in self._layers:
            plan = plans.of(layer.site, layer.original)
            if plan is not None:
                if layer.plan is not None and plan is not layer.plan:
                    plan.prepare_like(layer.plan)
                layer.plan, layer.zeros = plan, None
                continue
            layer.plan, layer.rows, layer.zeros = None, self.options.rows, None
            projector = run.early(layer.site)
            layer.matrix = None if projector is None else projector.matrix
            if layer.site in outputs:
                shape, dtype = outputs[layer.site]
                zero = torch.zeros((), dtype=dtype, device=run.anchor.device)
                layer.zeros = zero.expand(shape).requires_grad_()

    def _layer(self, site: Site) -> _Layer:
        if site.rule is None and not site.by_rows:
            self._refuse(f"{site.label} has no rule and runs under vmap")
            raise NotCompiledError
        if "forward" in vars(site.module):
            self._refuse(f"the forward of {site.label} was replaced")
            raise NotCompiledError
        return _Layer(site, site.module.forward)

    @contextmanager
    def _traceable(self, run: Pass) -> Iterator[None]:
        """Replace the forwards of the layers by ones that can be traced, inside."""
        by_rows = [layer.site for layer in self._layers if layer.site.by_rows]
        forwards = [
            layer.run_planned
            if layer.plan is not None
            else layer.run_table
            if layer.site.is_table
            else layer.original
            if layer.site.by_rows
            else layer.run_with_zeros
            for layer in self._layers
        ]
        modules = [layer.site.module for layer in self._layers]
        trained = [p for p in self.model.parameters() if p.requires_grad]
        nn.Embedding.forward = _look_up  # type: ignore[method-assign,assignment]
        try:
            for parameter in trained:
                parameter.requires_grad_(False)
            with ExitStack() as stack:
                for site in by_rows:
                    stack.enter_context(holding(site.module, run.rows_of(site, self.options.rows)))
                stack.enter_context(replaced_forwards(modules, lambda i, _: forwards[i]))
                yield
        finally:
            nn.Embedding.forward, _looking_up.layer = _forward, None  # type: ignore[method-assign]
            for parameter in trained:
                parameter.requires_grad_(True)

    def _compile(self, shapes: Shapes) -> Callable[..., Any]:
        """Return a function that runs the compiled model."""
        if self._run is None:
            settings: dict[str, Any] = {"fullgraph": True, "dynamic": False}
            settings["backend"] = self.options.backend or "inductor"
            model = self.model

            def run_model(*args: Any, **kwargs: Any) -> Any:  # compile() adds attributes to a model
                return model(*args, **kwargs)

            self._run = torch.compile(run_model, mode=self.options.mode, **settings)
        compiled, key = self._run, (shapes, self.model.training)  # one graph for each key
        config: Any = sys.modules["torch._dynamo"].config  # torch.compile has imported it
        limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"

        def run(*args: Any, **kwargs: Any) -> Any:
            if key not in self._compiled:
                text = ", ".join(f"{name} {(self.options.rows, *shape)}" for name, shape in shapes)
                logger.warning("Compiling the model for %s. This can take some minutes.", text)
            try:
                with config.patch({limit: _MOST_SHAPES}):
                    outputs = compiled(*args, **kwargs)
            except Exception as error:
                if not _is_of_compiler(error):
                    raise
                first = f"{error}".strip().partition("\n")[0]
                self._refuse(f"{type(self.model).__name__} cannot be compiled ({first})")
                raise NotCompiledError from error
            self._compiled.add(key)
            return outputs

        return run


def _is_of_compiler(error: BaseException) -> bool:
    """Return whether an error comes from the compiler, and not from the model."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "torch.fx"))
