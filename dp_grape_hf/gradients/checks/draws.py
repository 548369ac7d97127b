"""Random draws of a model: record them, assign them to rows, and replay them.

Shapes: B rows in a batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from dp_grape_hf.gradients.checks.guards import DrawInterceptor, seed_torch
from dp_grape_hf.gradients.rows import row_alone
from dp_grape_hf.projections import is_public

Values = tuple[Tensor, ...]
"""The numbers of one draw: the tensors that it filled."""

_EACH = {
    *("rand", "rand_like", "uniform", "randn", "randn_like", "normal", "bernoulli", "randint"),
    *("randint_like", "random", "exponential", "geometric", "cauchy", "log_normal", "poisson"),
    *("binomial", "_standard_gamma", "native_dropout", "rrelu_with_noise", "multinomial"),
}
"""Operations that draw each number, or row, independently; ``randperm`` does not."""

_UNIFORM = {"rand", "rand_like", "uniform", "bernoulli"}
"""Operations with bounded numbers. A threshold event occurs at a bound if it occurs at all."""

SHARED = _UNIFORM
"""Operations that may draw once for all rows, if the drawn number changes nothing."""


class Draw(NamedTuple):
    """The result of one operation that draws random numbers."""

    operation: str
    module: str  # class name of the module that ran
    row: int | None  # the row, if an engine ran that module for one row alone
    shapes: tuple[torch.Size, ...]
    values: Values  # empty if they were not kept
    bounds: tuple[float, float] | None  # of a uniform draw

    def __str__(self) -> str:
        return f"{self.operation} in {self.module}" if self.module else self.operation


class Owner(NamedTuple):
    """The rows that use one draw of a batch; all rows share it if ``dims`` and ``row`` are None."""

    number: int  # index of the same draw in a pass of one row alone
    dims: tuple[int, ...] | None = None  # the dimension of each tensor that contains the rows
    row: int | None = None  # the only row that uses the draw

    @property
    def shared(self) -> bool:
        """True if all rows use the same numbers."""
        return self.dims is None and self.row is None

    def part(self, tensors: Values, row: int, size: int) -> Values:
        """Return the numbers of one row of B = ``size`` in the tensors of a draw, as views."""
        if self.dims is None:
            return tensors
        pairs = zip(tensors, self.dims, strict=True)
        return tuple(in_rows(tensor, dim, size)[row] for tensor, dim in pairs)


class DrawRecorder(DrawInterceptor):
    """Record the random draws of a pass from torch's global streams, and replace some of them.

    Draw k begins with the streams seeded by ``start + k``. So a draw that is repeated, when
    activations are recomputed, is recognised by its seed and has the same numbers again.

    Args:
        start: the seed of the first draw.
        keep: whether to keep the numbers.
        owners: the owner of each draw; draws without an owner are not replaced.
        given: for each row, the numbers of its draws; None leaves them as drawn.
        shared: the numbers of draws that all rows share, by ``Owner.number``.

    Attributes:
        made: the draws, in order.
        foreign: whether the model drew from its own, not public generator.
        seeded: whether it seeded the streams, or restored an earlier state.
    """

    def __init__(
        self,
        start: int,
        keep: bool = False,
        owners: Sequence[Owner] = (),
        given: Sequence[Sequence[Values | None]] = (),
        shared: Mapping[int, Values] | None = None,
    ) -> None:
        super().__init__()
        self._start, self._keep, self._owners, self._given = start, keep, owners, given
        self._shared = shared or {}
        self.made: list[Draw] = []
        self.foreign = self.seeded = False
        self._running: list[str] = []  # the classes of the modules that run
        self._hooks: list[Any] = []

    def __enter__(self) -> DrawRecorder:
        self.made, self.foreign, self.seeded = [], False, False
        seed_torch(self._start)

        def enter(module: nn.Module, args: Any) -> None:
            wrapper = type(module).__module__.startswith("dp_grape_hf.")
            outer = self._running[-1] if self._running else ""
            self._running.append(outer if wrapper else type(module).__name__)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._running.pop()

        self._hooks = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()
        self.seeded |= torch.initial_seed() != self._start + len(self.made)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        generator = (kwargs or {}).get("generator")
        if generator is not None and not _is_global(generator):
            self.foreign |= not is_public(generator)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def drawn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Record a draw, and write the given numbers of rows into its tensors."""
        number = torch.initial_seed() - self._start
        if not 0 <= number <= len(self.made):
            self.seeded = True
            return result
        tensors = _filled(func, args, result)
        operation = func._schema.name.rpartition("::")[2].rstrip("_")
        if number < len(self._owners):
            self._give(self._owners[number], tensors)
            if operation == "native_dropout":  # its first result is the output, not the mask
                tensors[0].copy_(args[0] * tensors[1] / ((1 - args[1]) or 1.0))
            elif operation == "rrelu_with_noise":
                tensors[0].copy_(args[0] * tensors[1])
        if number == len(self.made):
            module = self._running[-1] if self._running else ""
            shapes = tuple(tensor.shape for tensor in tensors)
            values = tuple(t.detach().clone() for t in tensors) if self._keep else ()
            bounds = _bounds(operation, args, tensors[0].dtype)
            self.made.append(Draw(operation, module, row_alone(), shapes, values, bounds))
        seed_torch(self._start + number + 1)
        return result

    def _give(self, owner: Owner, tensors: Values) -> None:
        if owner.shared:
            _copy(tensors, self._shared.get(owner.number))
            return
        size = len(self._given)
        if any(t.shape[dim] % size for t, dim in zip(tensors, owner.dims or (), strict=False)):
            return  # the pass is refused afterwards, by ``owners_of``
        for row in range(size) if owner.row is None else [owner.row]:
            _copy(owner.part(tensors, row, size), self._given[row][owner.number])


def _copy(tensors: Values, values: Values | None) -> None:
    """Write values into tensors that have as many numbers."""
    for tensor, value in zip(tensors, values or (), strict=False):
        if tensor.numel() == value.numel():
            tensor.copy_(value.view_as(tensor))


def in_rows(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Return a view (B, ...) of a tensor whose dimension ``dim`` contains the rows."""
    return tensor.detach().unflatten(dim, (size, -1)).movedim(dim, 0)


def _is_global(generator: Any) -> bool:
    on_gpus = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return generator._cdata in {g._cdata for g in (torch.default_generator, *on_gpus)}


def _filled(func: Any, args: Sequence[Any], result: Any) -> Values:
    """Return the tensors that a draw fills: those it returns, and those it writes to."""
    given = zip(args, func._schema.arguments, strict=False)
    written = [x for x, argument in given if argument.is_write]
    tensors = [x for x in (*tree_leaves(result), *written) if isinstance(x, Tensor)]
    return tuple(x for i, x in enumerate(tensors) if not any(x is y for y in tensors[:i]))


def _bounds(operation: str, args: Sequence[Any], dtype: torch.dtype) -> tuple[float, float] | None:
    """Return the smallest number above the lower bound of a uniform draw, and the largest number.

    A number at the lower bound itself might have no logarithm.
    """
    if operation not in _UNIFORM:
        return None
    if operation == "bernoulli":
        return 0.0, 1.0
    low, high = (*args[1:3], *(0.0, 1.0)[len(args[1:3]) :]) if operation == "uniform" else (0, 1)
    return low + (high - low) * 2**-24, high - (high - low) * torch.finfo(dtype).eps


# ---- The rows of a draw ----


def owners_of(alone: Sequence[Draw], together: Sequence[Draw], size: int) -> list[Owner] | Draw:
    """Return the owner of each draw of a batch, or the first draw that fits no row.

    Args:
        alone: the draws of one row alone.
        together: the draws of a batch.
        size: B.
    """

    def kind(draw: Draw) -> Any:
        return draw.operation, draw.shapes

    few, many = (Counter(map(kind, draws)) for draws in (alone, together))
    next_of = [0] * size  # the number of the next draw of each row
    owners: list[Owner] = []
    for draw in together:
        rows = range(size) if draw.row is None else range(draw.row, draw.row + 1)
        number = next_of[rows[0]]
        if number >= len(alone) or any(next_of[row] != number for row in rows):
            number = min(next_of)  # in a loop over rows
            rows = range(next_of.index(number), next_of.index(number) + 1)
        if number >= len(alone) or alone[number].operation != draw.operation:
            return draw
        single = alone[number]
        if draw.row is not None and single.shapes == draw.shapes:
            owners.append(Owner(number, row=draw.row))
        elif len(rows) == size and (dims := _grown(single, draw, size)) is not None:
            owners.append(Owner(number, dims))
        elif single.shapes != draw.shapes:
            return draw
        elif many[kind(draw)] == size * few[kind(single)] and size > 1:
            rows = rows[:1]
            owners.append(Owner(number, row=rows[0]))
        elif len(rows) == size:
            owners.append(Owner(number))
        else:
            return draw
        for row in rows:
            next_of[row] += 1
    if any(number < len(alone) for number in next_of):
        return alone[min(next_of)]
    return owners


def _grown(one: Draw, many: Draw, size: int) -> tuple[int, ...] | None:
    """Return the dimensions in which a draw has B times as many numbers, one part per row.

    None if a dimension does not grow by B, or the numbers of rows are not independent.
    """
    if many.operation not in _EACH or (many.operation == "multinomial" and len(one.shapes[0]) < 2):
        return None
    dims = []
    for few, all_of in zip(one.shapes, many.shapes, strict=True):
        if all_of == (size, *few):  # under vmap
            dims.append(0)
            continue
        grown = [dim for dim, (a, b) in enumerate(zip(few, all_of, strict=False)) if a != b]
        if len(few) != len(all_of) or len(grown) != 1 or all_of[grown[0]] != size * few[grown[0]]:
            return None
        dims += grown
    return tuple(dims)
