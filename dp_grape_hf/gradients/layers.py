"""Which modules the layerwise engine runs itself, and what it learns about them by running them.

A *site* is a module whose parameters' gradients the engine computes, by the closed-form rule of its
type or by the generic functorch rule. A module whose own parameters have one row for all samples
(the class token and the positions of a vision transformer) is run with a row for each sample, if
its code lets it; the layers inside are sites by themselves. Which of a site's tensors carry the
batch cannot be read off shapes, so the model is run with two batch sizes. A site whose calls do not
tell the samples apart (a table of relative positions, which is looked up once for all samples)
gives way to the module around it, which runs under the generic rule. How many rows a tensor has for
each sample is learnt as well: what is seen once must be so again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
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

# ---- Changing how modules run, for a while ----

Forward = Callable[..., Any]


def first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Returns the first tensor that a module is called with, or None."""
    return next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)


@contextlib.contextmanager
def replaced_forwards(
    modules: Sequence[nn.Module], make: Callable[[int, Forward], Forward]
) -> Iterator[None]:
    """Replaces the forward of each module by ``make(its number, its forward)`` for a while."""
    before = [vars(module).get("forward") for module in modules]
    try:
        for i, module in enumerate(modules):
            vars(module)["forward"] = make(i, module.forward)  # what a module's setter does, slowly
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            if forward is None:
                vars(module).pop("forward", None)
            else:
                vars(module)["forward"] = forward


@contextlib.contextmanager
def detached(module: nn.Module) -> Iterator[None]:
    """Runs a module without tracking its own weights: their gradients come from its rule."""
    tracked = [p for p in module.parameters(recurse=False) if p.requires_grad]
    try:
        for parameter in tracked:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in tracked:
            parameter.requires_grad_(True)


class LookUps(TorchFunctionMode):
    """Hands every look-up in one table to a function, also inside a subclass of Embedding.

    ``only`` tells whether the table was used in no other way while the mode was on.
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


# ---- How many rows a tensor has for each sample ----

Key = tuple[str, int]
"""A tensor in a nest of containers: the structure of the nest, and the number of its leaf."""


Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Names of the model's inputs, and what their shapes are for one sample."""


class Rows:
    """How many leading rows a tensor has (per sample, if it carries the batch), and why so many.

    One always; or as many as a dimension of the model's inputs counts, positions say; or as many as
    were seen for inputs of the same shapes. A number that fits in no other way may depend on the
    values of the inputs (padding that is taken out), and would then not be the same for each
    sample.
    """

    def __init__(self) -> None:
        self.carries: bool | None = None  # the batch; None: not seen yet
        self._seen: dict[Shapes, int] = {}
        self._dims: set[tuple[str, int]] | None = None

    @property
    def one_each(self) -> bool:
        """Whether there was never another number of rows than one."""
        return set(self._seen.values()) == {1}

    def learn(self, two: int, three: int, shapes: Shapes) -> str | None:
        """Stores the leading sizes of 2 and of 3 samples; returns why they contradict earlier ones.

        What carries the batch grows in proportion.
        """
        carries = two * 3 == three * 2 > 0
        if self.carries not in (None, carries):
            return "is called in different ways, with and without the batch."
        self.carries = carries
        rows = two // 2 if carries else two
        dims = {(n, d) for n, shape in shapes for d, size in enumerate(shape) if size == rows}
        self._dims = dims if self._dims is None else self._dims & dims
        if self._seen.setdefault(shapes, rows) != rows:
            return "has a number of rows that depends on the inputs' values."
        return None

    def fit(self, leading: int, batch_size: int, shapes: Shapes) -> bool:
        """Returns whether a tensor should have that leading size for inputs of these shapes."""
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
    """Returns the shapes of the model's inputs for one sample."""
    tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    return tuple((name, tuple(tensors[name].shape[1:])) for name in sorted(tensors))


def leading_sizes(tree: Any) -> dict[Key, int]:
    """Returns the leading sizes of all tensors with dimensions in a nest of containers."""
    leaves, spec = tree_flatten(tree)
    structure = repr(spec)
    return {(structure, i): leaf.shape[0] for i, leaf in enumerate(leaves) if has_rows(leaf)}


def has_rows(leaf: Any) -> TypeGuard[Tensor]:
    """Returns whether something is a tensor with a leading dimension."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0


# ---- Sites ----

RunModel = Callable[[int], Tensor]
"""Runs the model on a batch of that many copies of one sample; returns its losses."""


@dataclass(eq=False)
class Site:
    """A module that the engine runs itself, and which of its tensors carry the batch."""

    path: str
    module: nn.Module
    rule: LayerRule | None  # None: the generic functorch rule
    parameters: dict[str, str]  # name inside the module -> name in the model, trainable only
    reason: str = ""  # why a module with a rule inside had to give way to this one
    rows: Rows = field(default_factory=Rows)  # of the first input, which the rule is about
    tensors: dict[Key, Rows] = field(default_factory=dict)  # without rule: of all of them
    calls: int = 0  # in one pass
    loops: str = ""  # without rule: why it runs for one sample after another, and not under vmap
    by_rows: bool = False  # without rule: whether its parameters get a row for each sample
    broadcast: bool = False  # whether it computes something once for all samples

    @property
    def label(self) -> str:
        """How error messages name the site."""
        return f"{self.path or 'the model'} ({type(self.module).__name__})"

    @contextlib.contextmanager
    def looping_next_time(self) -> Iterator[None]:
        """Notes if vmap cannot run the code inside."""
        try:
            yield
        except NotVectorisedError as error:
            self.loops = f"{error}".partition(": ")[2].partition(". ")[0]
            raise

    @property
    def carried(self) -> bool:
        """Whether the first input, which the rule is about, carries the batch."""
        return bool(self.rows.carries)

    @property
    def is_table(self) -> bool:
        """Whether the rule is about look-ups, wherever in the module's forward they are."""
        return self.rule is not None and isinstance(self.module, nn.Embedding)

    def has_several_tensors(self, args: Any, kwargs: Any) -> bool:
        """Returns whether a module with a rule is given more than the tensor that it is about.

        A table's rule is about its look-ups, whatever the module is given.
        """
        only_one = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        if only_one or self.rule is None or self.is_table:
            return False
        return sum(isinstance(x, Tensor) for x in tree_leaves((args, kwargs))) > 1

    def check(self, leading: int, batch_size: int, shapes: Shapes) -> None:
        """Refuses a first input whose leading size does not follow the batch as it did before.

        Raises:
            UnknownTensorError: if it is not known how many rows it should have.
        """
        if not self.rows.fit(leading, batch_size, shapes):
            raise UnknownTensorError(
                f"{self.label} was given a leading size {leading} in a batch of {batch_size}: it "
                "does not carry the batch as it did in the batches before."
            )

    def carrying(
        self, leaves: Sequence[Any], structure: str, batch_size: int, shapes: Shapes
    ) -> list[int]:
        """Returns which of the leaves of an input carry the batch.

        Raises:
            UnknownTensorError: if that is not known: a mask that the first samples did not need.
        """
        found = []
        for i, leaf in enumerate(leaves):
            if not has_rows(leaf):
                continue
            rows = self.tensors.get((structure, i), Rows())
            if not rows.fit(leaf.shape[0], batch_size, shapes):
                raise UnknownTensorError(
                    f"{self.label} was given, or returned, a tensor of leading size "
                    f"{leaf.shape[0]} in a batch of {batch_size} that it was not seen with before."
                )
            if rows.carries:
                found.append(i)
        return found


@dataclass(frozen=True)
class _Call:
    given: dict[Key, int]  # leading sizes of inputs
    sizes: dict[Key, int]  # of inputs and outputs
    leading: list[int]  # leading sizes of what the rule is about: the first input, or the look-ups
    differentiable: list[int]  # leading sizes of the outputs that require grad
    selected: set[Key]  # inputs that hold positions which were selected by their values


class UnknownTensorError(Exception):
    """A module was given, or returned, a tensor that it was not seen with when it was learnt."""


@dataclass(frozen=True)
class _Misfit:
    """A site that cannot be run as it is, and why."""

    site: Site
    reason: str


class Sites:
    """The sites of a model.

    Args:
        model: the model.
        names: id of a trainable parameter -> its name in the model.
    """

    def __init__(self, model: nn.Module, names: Mapping[int, str]) -> None:
        self._model = model
        self._names = names
        self.all: list[Site] = []
        self._mixing: set[Site] = set()  # which did not run with a row for each sample
        self._find("", model, set())

    def __iter__(self) -> Iterator[Site]:
        return iter(self.all)

    def learn(self, run_model: RunModel, shapes: Shapes) -> None:
        """Runs the model until every site is understood.

        Args:
            run_model: runs the model on so many samples.
            shapes: of these samples.

        Raises:
            UnsupportedModelError: if a parameter's uses cannot be told apart by sample.
        """
        while True:
            losses, plain = zip(*(self._observe(run_model, size) for size in (2, 3)), strict=True)
            if self._cover_mixing():
                continue
            calls = plain
            drafts = {site: replace(site, rows=Rows(), tensors={}) for site in self.all}
            misfits = self._used_elsewhere(losses[0]) + _misfits(drafts, calls, shapes)
            broadcast = [site for site in self.all if drafts[site].broadcast]
            if broadcast and not misfits:  # learn what passes will be like for the sites behind
                expanded = [self._expanded(run_model, broadcast, some) for some in losses]
                calls = tuple(some for some in expanded if some is not None)
                if len(calls) < 2:
                    misfits = self._not_expandable(run_model, broadcast, losses[1])
            if not misfits:
                misfits = _misfits({site: site for site in self.all}, calls, shapes)
            if not misfits:
                self._refuse_units_inside()
                return
            for misfit in misfits:
                first = plain[0].get(misfit.site.path, [])[:1]
                if misfit.site.is_table and first and not first[0].leading:
                    misfit.site.rule = None  # it may do under the generic rule
                else:
                    self._give_way(misfit)

    def installed(self, make: Callable[[Site, Forward], Forward]) -> AbstractContextManager[None]:
        """Replaces the forward of every site, and puts the old ones back whatever happens."""
        modules = [site.module for site in self.all]
        return replaced_forwards(modules, lambda i, forward: make(self.all[i], forward))

    def _refuse_units_inside(self) -> None:
        """Refuses a module whose gradients are captured and that gathers its own weights."""
        for site in self.all:
            if any(isinstance(m, FSDPModule) for m in site.module.modules()):
                raise UnsupportedModelError(
                    f"{site.label} has weights of its own, so fsdp must gather them with those of "
                    "a larger layer. Name other classes by fsdp_config="
                    '{"transformer_layer_cls_to_wrap": [...]}: none that is, or is inside of, '
                    f"{plain_type(site.module).__name__}."
                )

    # ---- Which modules, which rule ----

    def _find(self, path: str, module: nn.Module, seen: set[nn.Module]) -> None:
        if module in seen:
            return
        seen.add(module)
        if own := self._own(module, recurse=False) | self._own_of_containers(module):
            rule = rule_for(module)
            by_rows = rule is None and _has_one_row_each(module, own)
            if rule is None and not by_rows:  # the generic rule covers the children
                self.all.append(Site(path, module, None, self._own(module, recurse=True)))
                return
            self.all.append(Site(path, module, rule, own, by_rows=by_rows))
        for name, child in module.named_children():
            self._find(f"{path}.{name}" if path else name, child, seen)

    def _own(self, module: nn.Module, recurse: bool) -> dict[str, str]:
        """Returns a module's trainable parameters.

        Without its children's: what a child owns as well (a tied bias) is left to the child; if the
        module used it itself, that would show.
        """
        children = module.children() if not recurse else ()
        below = {id(p) for child in children for p in child.parameters()}
        return {
            local: self._names[id(p)]
            for local, p in module.named_parameters(recurse=recurse)
            if id(p) in self._names and id(p) not in below
        }

    def _own_of_containers(self, module: nn.Module) -> dict[str, str]:
        """Returns the parameters in a module's dictionaries and lists, which it uses itself."""
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
        """Puts the module around a site in its place, under the generic rule."""
        if misfit.site not in self.all:  # another one has covered it by now
            return
        path, reason = misfit.site.path, misfit.site.reason or misfit.reason
        if not path:
            raise UnsupportedModelError(
                f"{reason} No module around it tells the samples apart either. Freeze what it "
                'trains with requires_grad_(False), or use engine="functorch".'
            )
        self._cover(path.rpartition(".")[0], reason)

    def _cover(self, path: str, reason: str) -> None:
        """Puts a module under the generic rule, in the place of all sites inside."""
        around = self._model.get_submodule(path)
        covered = set(around.modules())
        first = next(i for i, site in enumerate(self.all) if site.module in covered)
        self.all = [site for site in self.all if site.module not in covered]
        parameters = self._own(around, recurse=True)
        self.all.insert(first, Site(path, around, None, parameters, reason))

    def _cover_mixing(self) -> bool:
        """Puts modules under the generic rule that do not run with a row for each sample."""
        mixing = [site for site in self.all if site in self._mixing]
        for site in mixing:
            self._cover(site.path, site.reason)
        self._mixing.clear()
        return bool(mixing)

    def _used_elsewhere(self, losses: Tensor) -> list[_Misfit]:
        """Returns the sites whose parameters are used outside the forward of their module."""
        if not losses.requires_grad:
            return []
        parameters = parameters_in_passes(self._model)
        tracked = {name: parameters[name] for site in self.all for name in site.parameters.values()}
        found = torch.autograd.grad(losses.sum(), list(tracked.values()), allow_unused=True)
        used = {name for name, g in zip(tracked, found, strict=True) if g is not None}
        return [
            _Misfit(
                site,
                f"The model uses {', '.join(sorted(used & {*site.parameters.values()}))} outside "
                f"the forward of {site.label}, where the layerwise engine does not see its "
                "gradient.",
            )
            for site in self.all
            if used & {*site.parameters.values()}
        ]

    # ---- Which tensors carry the batch: two batch sizes are run, shapes are never compared ----

    def _not_expandable(
        self, run_model: RunModel, sites: Sequence[Site], losses: Tensor
    ) -> list[_Misfit]:
        """Returns the sites with an output of leading size 1 that the model takes no other for.

        What is computed once for all samples (from broadcast position ids) must have one row for
        each, which the engine gives it. A model may object: it repeats the row itself, or has more
        rows than samples. That is found out by trying.
        """
        alone = [site for site in sites if self._expanded(run_model, [site], losses) is None]
        return [
            _Misfit(
                site,
                f"{site.label} computes once what all samples share, and the model does not take "
                "one row per sample in its place, so its calls do not tell the samples apart.",
            )
            for site in alone or sites
        ]

    def _expanded(
        self, run_model: RunModel, sites: Sequence[Site], losses: Tensor
    ) -> dict[str, list[_Call]] | None:
        """Returns the calls where these sites give a row per sample; None if the model objects."""
        try:
            found, calls = self._observe(run_model, len(losses), sites)
        except (RuntimeError, ValueError, IndexError):
            return None
        return calls if found.shape == losses.shape else None

    def _observe(
        self, run_model: RunModel, size: int, expanded: Sequence[Site] = ()
    ) -> tuple[Tensor, dict[str, list[_Call]]]:
        """Runs the model; ``expanded`` sites give one row per sample where they had one for all."""
        calls: dict[str, list[_Call]] = {}

        def observe(site: Site, original: Forward, *args: Any, **kwargs: Any) -> Any:
            looked_up: list[int] = []
            leaves, spec = tree_flatten((args, kwargs))
            selected = {(repr(spec), i) for i, x in enumerate(leaves) if selections.reach(x)}

            def look_up(indices: Tensor, output: Tensor) -> Tensor:
                looked_up.append(indices.shape[0] if indices.dim() else 0)
                return output

            if site.has_several_tensors(args, kwargs):  # its rule is about one
                site.rule = None
            output = None
            if site.by_rows and site not in self._mixing:
                output = _with_own_rows(site, original, args, kwargs, size)
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
            return tree_map(partial(_expand, size), output) if site in expanded else output

        running = self.installed(lambda site, original: partial(observe, site, original))
        with running, Selections() as selections:
            return run_model(size), calls


def _misfits(
    learners: Mapping[Site, Site], calls: Sequence[Mapping[str, Sequence[_Call]]], shapes: Shapes
) -> list[_Misfit]:
    """Returns the sites for which what learns in their place cannot, from batches of 2 and 3."""
    found = []
    for site, learner in learners.items():
        two, three = (some.get(site.path, []) for some in calls)
        if reason := _learn(learner, two, three, shapes):
            found.append(_Misfit(site, reason))
    return found


def _learn(site: Site, two: Sequence[_Call], three: Sequence[_Call], shapes: Shapes) -> str | None:
    """Stores what the calls of a site with batches of 2 and of 3 say; returns why they do not."""
    if not two and site.reason:  # a mere container: its own parent may tell the samples apart
        return site.reason
    for a, b in zip(two, three, strict=True):
        if site.rule is None:
            for key in a.sizes.keys() & b.sizes.keys():
                rows = site.tensors.setdefault(key, Rows())
                if reason := rows.learn(a.sizes[key], b.sizes[key], shapes):
                    return f"{site.label} {reason}"
            if not _all_own(a.differentiable, b.differentiable):
                return (
                    f"{site.label} computes a tensor that all samples share, so it does not tell "
                    "their gradients apart."
                )
            if any(_without_samples(site.tensors.get(key)) for key in a.selected):
                return f"{site.label} {_POSITIONS_ALONE}"
            site.broadcast = 1 in a.differentiable
            carries = any(rows.carries for key, rows in site.tensors.items() if key in a.given)
            if a.differentiable != b.differentiable and not carries:
                return (
                    f"{site.label} is told the number of samples and given none of their tensors, "
                    "so its calls do not tell them apart."
                )
            continue
        if not a.leading:
            return f"{site.label} does not use its weight in a known way."
        for size, of_three in zip(a.leading, b.leading, strict=True):
            if reason := site.rows.learn(size, of_three, shapes):
                return f"{site.label} {reason}"
            site.broadcast = not site.carried
            if site.broadcast and size != 1:
                return (
                    f"{site.label} has an input of leading size {size} that does not follow the "
                    "batch size, so its calls do not tell the samples apart."
                )
        if a.selected and _without_samples(site.rows):
            return f"{site.label} {_POSITIONS_ALONE}"
    site.calls = len(two)
    return None


_POSITIONS_ALONE = (
    "is given positions without their samples, which were selected by value (nonzero, a boolean "
    "mask), so that it is not known which sample a position belongs to."
)


def _without_samples(rows: Rows | None) -> bool:
    """Returns whether a tensor carries the batch, and has other rows than one for each sample."""
    return rows is not None and bool(rows.carries) and not rows.one_each


def _expand(size: int, output: Any) -> Any:
    if isinstance(output, Tensor) and output.dim() and len(output) == 1:
        return output.expand(size, *output.shape[1:])
    return output


def _with_fresh_weights(site: Site, forward: Forward, args: Any, kwargs: Any) -> Any:
    """Runs a module with copies of its weights, so that what depends on them requires grad.

    The weights themselves take no part: gradients that reach them come from elsewhere.
    """
    weights = dict(site.module.named_parameters())
    own = [weights[local] for local in site.parameters]
    fresh = {id(weight): weight.detach().requires_grad_() for weight in own}
    return call_with(site.module, forward, fresh, args, kwargs)


def _has_one_row_each(module: nn.Module, own: Mapping[str, str]) -> bool:
    """Returns whether all of a module's own parameters are of the shape (1, ..., features)."""
    parameters = [module._parameters.get(local) for local in own]
    return all(p is not None and p.dim() > 2 and len(p) == 1 for p in parameters)


@contextlib.contextmanager
def holding(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Lets a module's code see other tensors for some of its own parameters."""
    try:
        vars(module).update(tensors)
        yield
    finally:
        for name in tensors:
            vars(module).pop(name, None)


def row_each(module: nn.Module, local: str, size: int) -> Tensor:
    """Returns a parameter of one row with a row for each sample, which take no memory."""
    weight = module._parameters[local]
    assert weight is not None
    return weight.detach().expand(size, *weight.shape[1:]).requires_grad_()


def _with_own_rows(site: Site, forward: Forward, args: Any, kwargs: Any, size: int) -> Any | None:
    """Runs a module with a row of its parameters for each sample.

    Returns:
        Its output; None if its code fails with these, or if what it computes for a sample depends
        on the rows of others.
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
            found = torch.autograd.grad(
                *(part, list(rows.values()), direction.to(part.dtype)),
                retain_graph=True,
                allow_unused=True,
            )
            if any(g is not None and g.count_nonzero() > g[sample].count_nonzero() for g in found):
                return None
    return output


def _differentiable(output: Any) -> list[int]:
    """Returns the leading sizes of the tensors that require grad, 0 for one without dimensions."""
    tensors = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    return [x.shape[0] if x.dim() else 0 for x in tensors]


def _all_own(two: list[int], three: list[int]) -> bool:
    """Returns whether each sample can be given an output of its own.

    The generic rule computes one per sample, and puts them where the batch is, or in the place of a
    leading size of 1. A tensor that all samples share has no such place.
    """
    return len(two) == len(three) and all(
        a == 1 or a * 3 == b * 2 > 0 for a, b in zip(two, three, strict=True)
    )
