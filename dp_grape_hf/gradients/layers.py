"""The modules that the layerwise engine runs, and how it learns to call them.

A *site* is a module for whose parameters the engine computes gradients, by the closed-form rule of
its type or by the generic rule (functorch). If a module's own parameters have one row for all
samples (the class token and the positions of a vision transformer), it runs with a row for each
sample if its code allows that, and the layers inside it are separate sites. Shapes alone do not
show which tensors of a site have a sample dimension, so the engine runs the model with two batch
sizes. If the calls of a site do not separate the samples (a table of relative positions that is
looked up once for all samples), the enclosing module replaces it, under the generic rule. The
engine also learns how many rows a tensor has for each sample; later passes must have the same.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from dp_grape_hf.errors import UnsupportedModelError
from dp_grape_hf.gradients.definition import NotVectorisedError
from dp_grape_hf.gradients.rules import LayerRule, rule_for
from dp_grape_hf.gradients.selections import Selections
from dp_grape_hf.gradients.stand_ins import call_with
from dp_grape_hf.sharding import parameters_in_passes, plain_type

# ---- Replacing the forward of modules temporarily ----

Forward = Callable[..., Any]


def first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the first tensor among the arguments of a call, or None."""
    return next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)


@contextlib.contextmanager
def replaced_forwards(
    modules: Sequence[nn.Module], make: Callable[[int, Forward], Forward]
) -> Iterator[None]:
    """Replace the forward of module i by ``make(i, forward)`` inside, and restore it afterwards."""
    before = [vars(module).get("forward") for module in modules]
    try:
        for i, module in enumerate(modules):
            vars(module)["forward"] = make(i, module.forward)  # faster than the module's setter
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            if forward is None:
                vars(module).pop("forward", None)
            else:
                vars(module)["forward"] = forward


@contextlib.contextmanager
def detached(module: nn.Module) -> Iterator[None]:
    """Disable autograd for a module's own weights inside; its rule computes their gradients."""
    tracked = [p for p in module.parameters(recurse=False) if p.requires_grad]
    try:
        for parameter in tracked:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in tracked:
            parameter.requires_grad_(True)


class LookUps(TorchFunctionMode):
    """Pass every look-up in one table to a function, also inside a subclass of ``nn.Embedding``.

    Args:
        weight: the table.
        capture: receives indices and output of a look-up, and returns the output to use.

    Attributes:
        only: whether the table was used for look-ups only.
    """

    def __init__(self, weight: Any, capture: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self._weight, self._capture = weight, capture
        self.only = True

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is functional.embedding and args[1] is self._weight:
            return self._capture(args[0], output)
        if isinstance(output, Tensor) and any(
            leaf is self._weight for leaf in tree_leaves((args, kwargs))
        ):
            self.only = False
        return output


# ---- The number of rows of a tensor for each sample ----

Key = tuple[str, int]
"""A tensor in nested containers: the structure of the containers, and the number of the leaf."""


Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Names of the model's inputs, and their shapes for one sample."""


class Rows:
    """The leading size of a tensor (per sample, if the leading dimension contains the batch).

    The number of rows must be one in all passes, or the size of a dimension of the model's inputs
    (such as positions), or the number of an earlier pass with inputs of the same shapes. Any other
    number may depend on the values of the inputs (removed padding), and may then differ between
    samples.
    """

    def __init__(self) -> None:
        self.carries: bool | None = None  # whether it contains the batch; None if not seen yet
        self._seen: dict[Shapes, int] = {}
        self._dims: set[tuple[str, int]] | None = None

    @property
    def one_each(self) -> bool:
        """True if the number of rows was one in all passes."""
        return set(self._seen.values()) == {1}

    def learn(self, two: int, three: int, shapes: Shapes) -> str | None:
        """Store the leading sizes for 2 and 3 samples; return a reason if they are inconsistent.

        A leading dimension that contains the batch grows in proportion to it.

        Args:
            two: the leading size for 2 samples.
            three: the leading size for 3 samples.
            shapes: of the model's inputs.
        """
        carries = two * 3 == three * 2 > 0
        if self.carries not in (None, carries):
            return "is called in two ways, with and without a sample dimension."
        self.carries = carries
        rows = two // 2 if carries else two
        dims = {(n, d) for n, shape in shapes for d, size in enumerate(shape) if size == rows}
        self._dims = dims if self._dims is None else self._dims & dims
        if self._seen.setdefault(shapes, rows) != rows:
            return "has a number of rows that depends on the inputs' values."
        return None

    def fit(self, leading: int, batch_size: int, shapes: Shapes) -> bool:
        """Return whether a leading size fits earlier passes, for inputs of these shapes."""
        rows, rest = divmod(leading, batch_size) if self.carries else (leading, 0)
        if rest:
            return False
        if shapes in self._seen:
            return self._seen[shapes] == rows
        if self.one_each:
            return rows == 1
        sizes = {
            size
            for name, shape in shapes
            for d, size in enumerate(shape)
            if (name, d) in (self._dims or ())
        }
        return sizes == {rows}


def shapes_of(inputs: Mapping[str, Any]) -> Shapes:
    """Return the shapes of the model's inputs for one sample."""
    tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    return tuple((name, tuple(tensors[name].shape[1:])) for name in sorted(tensors))


def leading_sizes(tree: Any) -> dict[Key, int]:
    """Return the leading sizes of all tensors with dimensions in nested containers."""
    leaves, spec = tree_flatten(tree)
    structure = repr(spec)
    return {(structure, i): leaf.shape[0] for i, leaf in enumerate(leaves) if has_rows(leaf)}


def has_rows(leaf: Any) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor with a leading dimension."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0


# ---- Sites ----

RunModel = Callable[[int], Tensor]
"""A function that runs the model on a batch of that many samples, and returns its losses."""


@dataclass(eq=False)
class Site:
    """A module with trained parameters that the engine runs, and its tensors' sample dimensions."""

    path: str
    module: nn.Module
    rule: LayerRule | None  # None for the generic rule
    parameters: dict[str, str]  # name inside the module -> name in the model, trainable only
    reason: str = ""  # why this module replaced a site inside it
    rows: Rows = field(default_factory=Rows)  # of the first input (with a rule)
    tensors: dict[Key, Rows] = field(default_factory=dict)  # of all tensors (without a rule)
    loops: str = ""  # why it runs sample by sample, and not under vmap (without a rule)
    by_rows: bool = False  # whether its parameters get a row for each sample (without a rule)

    @property
    def label(self) -> str:
        """The name of the site in error messages."""
        return f"{self.path or 'the model'} ({type(self.module).__name__})"

    @contextlib.contextmanager
    def looping_next_time(self) -> Iterator[None]:
        """Set ``loops`` if vmap cannot run the code inside."""
        try:
            yield
        except NotVectorisedError as error:
            self.loops = f"{error}".partition(": ")[2].partition(". ")[0]
            raise

    @property
    def carried(self) -> bool:
        """True if the first input has a sample dimension."""
        return bool(self.rows.carries)

    @property
    def is_table(self) -> bool:
        """True if the rule applies to look-ups anywhere in the module's forward."""
        return self.rule is not None and isinstance(self.module, nn.Embedding)

    def has_several_tensors(self, args: Any, kwargs: Any) -> bool:
        """Return whether a module with a rule receives more tensors than the one input of the rule.

        The rule of a table applies to its look-ups, so the arguments do not matter.
        """
        only_one = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        if only_one or self.rule is None or self.is_table:
            return False
        return sum(isinstance(x, Tensor) for x in tree_leaves((args, kwargs))) > 1

    def check(self, leading: int, batch_size: int, shapes: Shapes) -> None:
        """Check that the leading size of the first input is consistent with earlier passes.

        Raises:
            UnknownTensorError: if it is not.
        """
        if not self.rows.fit(leading, batch_size, shapes):
            raise UnknownTensorError(
                f"{self.label} received an input of leading size {leading} in a batch of "
                f"{batch_size}. Earlier batches do not show which rows belong to which sample."
            )

    def carrying(
        self, leaves: Sequence[Any], structure: str, batch_size: int, shapes: Shapes
    ) -> list[int]:
        """Return the numbers of the leaves that have a sample dimension.

        Raises:
            UnknownTensorError: if a tensor is new, such as a mask that the first samples did not
                need.
        """
        carrying = []
        for i, leaf in enumerate(leaves):
            if not has_rows(leaf):
                continue
            rows = self.tensors.get((structure, i), Rows())
            if not rows.fit(leaf.shape[0], batch_size, shapes):
                raise UnknownTensorError(
                    f"{self.label} received or returned a tensor of leading size {leaf.shape[0]} "
                    f"in a batch of {batch_size}, which no earlier batch had."
                )
            if rows.carries:
                carrying.append(i)
        return carrying


@dataclass(frozen=True)
class _Call:
    given: dict[Key, int]  # leading sizes of inputs
    sizes: dict[Key, int]  # leading sizes of inputs and outputs
    leading: list[int]  # leading sizes of the rule's inputs: the first input, or the look-ups
    differentiable: list[int]  # leading sizes of the outputs that require grad
    selected: set[Key]  # inputs that contain positions which were selected by value


class UnknownTensorError(Exception):
    """A module received or returned a tensor that the engine has not learnt about."""


@dataclass(frozen=True)
class _Misfit:
    """A site that must be replaced by its enclosing module, and the reason."""

    site: Site
    reason: str


class Sites:
    """The sites of a model: the modules that the engine runs, with their sample dimensions.

    Args:
        model: the model.
        names: id of a trainable parameter -> its name in the model.
    """

    def __init__(self, model: nn.Module, names: Mapping[int, str]) -> None:
        self._model = model
        self._names = names
        self.all: list[Site] = []
        self._mixing: set[Site] = set()  # sites that do not run with a row for each sample
        self._expanded: list[Site] = []  # sites with an output for all samples, in a pass
        self._find("", model, set())

    def __iter__(self) -> Iterator[Site]:
        return iter(self.all)

    def learn(self, run_model: RunModel, shapes: Shapes) -> None:
        """Run the model until the sample dimensions of every site are known.

        Args:
            run_model: runs the model on that many samples.
            shapes: the shapes of these samples.

        Raises:
            UnsupportedModelError: if the gradient of a parameter cannot be separated by sample.
        """
        while True:
            self._expanded.clear()
            try:
                (losses, two), (_, three) = (self._observe(run_model, size) for size in (2, 3))
            except (RuntimeError, ValueError, IndexError):
                if not self._cover_mixing():
                    if not self._expanded:
                        raise
                    last = self._expanded[-1]
                    self._give_way(_Misfit(last, f"{last.label} {_NOT_EXPANDABLE}"))
                continue
            if self._cover_mixing():
                continue
            misfits = self._used_elsewhere(losses)
            for site in self.all:
                if reason := _learn(site, two.get(site.path, []), three.get(site.path, []), shapes):
                    misfits.append(_Misfit(site, reason))
            if not misfits:
                self._refuse_units_inside()
                return
            for misfit in misfits:
                first = two.get(misfit.site.path, [])[:1]
                if misfit.site.is_table and first and not first[0].leading:
                    misfit.site.rule = None  # try the generic rule first
                else:
                    self._give_way(misfit)

    def installed(self, make: Callable[[Site, Forward], Forward]) -> AbstractContextManager[None]:
        """Replace the forward of every site inside, and restore it afterwards."""
        modules = [site.module for site in self.all]
        return replaced_forwards(modules, lambda i, forward: make(self.all[i], forward))

    def _refuse_units_inside(self) -> None:
        """Refuse a site that FSDP shards separately."""
        for site in self.all:
            if any(isinstance(m, FSDPModule) for m in site.module.modules()):
                raise UnsupportedModelError(
                    f"{site.label} is sharded separately, so its weights are gathered too late. "
                    "fsdp must shard it with a larger layer. Name other classes by fsdp_config="
                    '{"transformer_layer_cls_to_wrap": [...]}: none that is, or is inside of, '
                    f"{plain_type(site.module).__name__}."
                )

    # ---- The sites and their rules ----

    def _find(self, path: str, module: nn.Module, seen: set[nn.Module]) -> None:
        if module in seen:
            return
        seen.add(module)
        if direct := self._own(module, recurse=False) | self._own_of_containers(module):
            rule = rule_for(module)
            by_rows = rule is None and _has_one_row_each(module, direct)
            if rule is None and not by_rows:  # the generic rule covers the children
                self.all.append(Site(path, module, None, self._own(module, recurse=True)))
                return
            self.all.append(Site(path, module, rule, direct, by_rows=by_rows))
        for name, child in module.named_children():
            self._find(f"{path}.{name}" if path else name, child, seen)

    def _own(self, module: nn.Module, recurse: bool) -> dict[str, str]:
        """Return a module's trainable parameters, with those of its children if ``recurse``.

        Without ``recurse``, a parameter that a child owns too (a tied bias) belongs to the child.
        ``_used_elsewhere`` finds it if the module uses it.
        """
        children = module.children() if not recurse else ()
        below = {id(p) for child in children for p in child.parameters()}
        return {
            local: self._names[id(p)]
            for local, p in module.named_parameters(recurse=recurse)
            if id(p) in self._names and id(p) not in below
        }

    def _own_of_containers(self, module: nn.Module) -> dict[str, str]:
        """Return the trainable parameters in a module's ParameterDicts and ParameterLists."""
        containers = (nn.ParameterDict, nn.ParameterList)
        if isinstance(module, containers):
            return {}
        return {
            f"{child}.{local}": name
            for child, container in module.named_children()
            if isinstance(container, containers)
            for local, name in self._own(container, recurse=True).items()
        }

    def _give_way(self, misfit: _Misfit) -> None:
        """Replace a site by its enclosing module, under the generic rule."""
        if misfit.site not in self.all:  # an enclosing module has replaced it already
            return
        path, reason = misfit.site.path, misfit.site.reason or misfit.reason
        if not path:
            raise UnsupportedModelError(
                f"{reason} No enclosing module separates the samples either. Freeze its parameters "
                'with requires_grad_(False), or use engine="functorch".'
            )
        self._cover(path.rpartition(".")[0], reason)

    def _cover(self, path: str, reason: str) -> None:
        """Replace all sites inside a module by the module, under the generic rule."""
        module = self._model.get_submodule(path)
        covered = set(module.modules())
        first = next(i for i, site in enumerate(self.all) if site.module in covered)
        self.all = [site for site in self.all if site.module not in covered]
        parameters = self._own(module, recurse=True)
        self.all.insert(first, Site(path, module, None, parameters, reason))

    def _cover_mixing(self) -> bool:
        """Use the generic rule for modules that do not run with a row for each sample."""
        mixing = [site for site in self.all if site in self._mixing]
        for site in mixing:
            self._cover(site.path, site.reason)
        self._mixing.clear()
        return bool(mixing)

    def _used_elsewhere(self, losses: Tensor) -> list[_Misfit]:
        """Return the sites whose parameters are used outside the forward of their module."""
        if not losses.requires_grad:
            return []
        parameters = parameters_in_passes(self._model)
        tracked = {name: parameters[name] for site in self.all for name in site.parameters.values()}
        gradients = torch.autograd.grad(losses.sum(), list(tracked.values()), allow_unused=True)
        used = {name for name, g in zip(tracked, gradients, strict=True) if g is not None}
        return [
            _Misfit(
                site,
                f"The model uses {', '.join(sorted(used & {*site.parameters.values()}))} outside "
                f"the forward of {site.label}, where the layerwise engine cannot capture the "
                "gradient.",
            )
            for site in self.all
            if used & {*site.parameters.values()}
        ]

    # ---- Sample dimensions, learnt from passes with two batch sizes ----

    def _observe(self, run_model: RunModel, size: int) -> tuple[Tensor, dict[str, list[_Call]]]:
        """Run the model; return its losses and the calls of each site, by path.

        An output that is computed once for all samples (from broadcast position ids) must have a
        row for each sample, so it is expanded. Some models fail with such an output, because they
        repeat the row themselves or expect other shapes.

        Args:
            run_model: runs the model.
            size: number of samples.
        """
        calls: dict[str, list[_Call]] = {}

        def observe(site: Site, original: Forward, *args: Any, **kwargs: Any) -> Any:
            looked_up: list[int] = []
            leaves, spec = tree_flatten((args, kwargs))
            selected = {(repr(spec), i) for i, x in enumerate(leaves) if selections.reach(x)}

            def look_up(indices: Tensor, output: Tensor) -> Tensor:
                looked_up.append(indices.shape[0] if indices.dim() else 0)
                return output

            if site.has_several_tensors(args, kwargs):  # the rule supports one input
                site.rule = None
            output = None
            if site.by_rows and site not in self._mixing:
                output = _with_row_each(site, original, args, kwargs, size)
                if output is None:
                    self._mixing.add(site)
            if output is None and site.rule is None:
                output = _with_fresh_weights(site, original, args, kwargs)
            elif site.rule is not None:
                seen = LookUps(site.module.weight, look_up) if site.is_table else None
                with detached(site.module), seen or nullcontext():
                    output = original(*args, **kwargs)
                if seen is not None and not seen.only:
                    looked_up.clear()
            first = first_tensor(args, kwargs)
            given = leading_sizes((args, kwargs))
            call = _Call(
                given=given,
                sizes=given | leading_sizes(output),
                leading=looked_up if site.is_table else [first.shape[0]] if has_rows(first) else [],
                differentiable=_differentiable(output),
                selected=selected,
            )
            calls.setdefault(site.path, []).append(call)
            if 1 not in (call.differentiable if site.rule is None else call.leading):
                return output
            self._expanded.append(site)
            return tree_map(partial(_expand, size), output)

        running = self.installed(lambda site, original: partial(observe, site, original))
        with running, Selections() as selections:
            return run_model(size), calls


def _learn(site: Site, two: Sequence[_Call], three: Sequence[_Call], shapes: Shapes) -> str | None:
    """Learn from the calls of a site with 2 and 3 samples; return a reason if they do not fit."""
    if not two and site.reason:  # a container that is not called; its parent may fit
        return site.reason
    for a, b in zip(two, three, strict=True):
        if site.rule is None:
            for key in a.sizes.keys() & b.sizes.keys():
                rows = site.tensors.setdefault(key, Rows())
                if reason := rows.learn(a.sizes[key], b.sizes[key], shapes):
                    return f"{site.label} {reason}"
            if not _separable(a.differentiable, b.differentiable):
                return (
                    f"{site.label} computes a tensor that all samples share, so their gradients "
                    "cannot be separated."
                )
            if any(_without_samples(site.tensors.get(key)) for key in a.selected):
                return f"{site.label} {_POSITIONS_ALONE}"
            carries = any(rows.carries for key, rows in site.tensors.items() if key in a.given)
            if a.differentiable != b.differentiable and not carries:
                return (
                    f"{site.label} receives the number of samples and none of their tensors, so "
                    "its calls do not separate the samples."
                )
            continue
        if not a.leading:
            return f"{site.label} does not use its weight as the rule of its type expects."
        for size, of_three in zip(a.leading, b.leading, strict=True):
            if reason := site.rows.learn(size, of_three, shapes):
                return f"{site.label} {reason}"
            if not site.carried and size != 1:
                return (
                    f"{site.label} has an input of leading size {size} that does not change with "
                    "the batch size, so its calls do not separate the samples."
                )
        if a.selected and _without_samples(site.rows):
            return f"{site.label} {_POSITIONS_ALONE}"
    return None


_NOT_EXPANDABLE = (
    "computes an output once for all samples, and the model does not accept one row per sample in "
    "its place, so its calls do not separate the samples."
)

_POSITIONS_ALONE = (
    "receives positions that were selected by value (nonzero, a boolean mask), so the sample of "
    "each position is not known."
)


def _without_samples(rows: Rows | None) -> bool:
    """Return whether a tensor has a sample dimension with more than one row for a sample."""
    return rows is not None and bool(rows.carries) and not rows.one_each


def _expand(size: int, output: Any) -> Any:
    if isinstance(output, Tensor) and output.dim() and len(output) == 1:
        return output.expand(size, *output.shape[1:])
    return output


def _with_fresh_weights(site: Site, forward: Forward, args: Any, kwargs: Any) -> Any:
    """Run a module with copies of its weights, so that outputs that depend on them require grad.

    A gradient that reaches the weights themselves then comes from a use outside the module.
    """
    weights = dict(site.module.named_parameters())
    trained = [weights[local] for local in site.parameters]
    fresh = {id(weight): weight.detach().requires_grad_() for weight in trained}
    return call_with(site.module, forward, fresh, args, kwargs)


def _has_one_row_each(module: nn.Module, direct: Mapping[str, str]) -> bool:
    """Return whether all of a module's direct parameters have the shape (1, ..., features)."""
    parameters = [module._parameters.get(local) for local in direct]
    return all(p is not None and p.dim() > 2 and len(p) == 1 for p in parameters)


@contextlib.contextmanager
def holding(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace some parameters of a module by other tensors inside."""
    try:
        vars(module).update(tensors)
        yield
    finally:
        for name in tensors:
            vars(module).pop(name, None)


def row_each(module: nn.Module, local: str, size: int) -> Tensor:
    """Return a parameter of one row, expanded to a row for each sample, which takes no memory."""
    weight = module._parameters[local]
    assert weight is not None
    return weight.detach().expand(size, *weight.shape[1:]).requires_grad_()


def _with_row_each(site: Site, forward: Forward, args: Any, kwargs: Any, size: int) -> Any | None:
    """Run a module with a row of its parameters for each sample.

    Returns:
        Its output; None if its code fails, or if the output of a sample depends on the rows of
        other samples.
    """
    rows = {local: row_each(site.module, local, size) for local in site.parameters}
    try:
        with holding(site.module, rows):
            output = forward(*args, **kwargs)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None
    for leaf in tree_leaves(output):
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            continue
        if not leaf.dim() or len(leaf) % size:
            return None
        for sample, part in enumerate(leaf.chunk(size)):
            direction = torch.arange(part.numel(), device=part.device).cos().view_as(part)
            of_rows = torch.autograd.grad(
                *(part, list(rows.values()), direction.to(part.dtype)),
                retain_graph=True,
                allow_unused=True,
            )
            if any(
                g is not None and g.count_nonzero() > g[sample].count_nonzero() for g in of_rows
            ):
                return None
    return output


def _differentiable(output: Any) -> list[int]:
    """Return the leading sizes of the tensors that require grad; 0 for a scalar."""
    tensors = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    return [x.shape[0] if x.dim() else 0 for x in tensors]


def _separable(two: list[int], three: list[int]) -> bool:
    """Return whether each sample can have a separate output.

    The generic rule computes one output per sample. It stacks them in the sample dimension, or in a
    leading dimension of size 1. Other tensors that all samples share have no such dimension.

    Args:
        two: leading sizes of outputs for 2 samples.
        three: leading sizes of outputs for 3 samples.
    """
    return len(two) == len(three) and all(
        a == 1 or a * 3 == b * 2 > 0 for a, b in zip(two, three, strict=True)
    )
