"""Random numbers that a model draws: seeing them, giving them to rows, and whose they are.

Shapes: B rows in a batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._pytree import tree_leaves

from dp_grape_hf.gradients.checks.guards import TorchDraws, same_state, seed_torch, torch_streams
from dp_grape_hf.gradients.rows import row_alone
from dp_grape_hf.projections import is_public

Values = tuple[Tensor, ...]
"""The numbers of one draw, in the tensors that it filled."""

_EACH = {
    *("rand", "rand_like", "uniform", "randn", "randn_like", "normal", "bernoulli", "randint"),
    *("randint_like", "random", "exponential", "geometric", "cauchy", "log_normal", "poisson"),
    *("binomial", "_standard_gamma", "native_dropout", "rrelu_with_noise", "multinomial"),
}
"""Operations that draw each number, or row, independently of the others; ``randperm`` does not."""

_UNIFORM = {"rand", "rand_like", "uniform", "bernoulli"}
"""Operations whose numbers have two bounds, at which all shows that they can decide."""

SHARED = _UNIFORM
"""Operations that may draw once for all rows, if that changes nothing."""


class Draw(NamedTuple):
    """The result of one operation that draws random numbers."""

    operation: str
    module: str  # the class of the module that ran
    row: int | None  # of which an engine ran that module alone
    shapes: tuple[torch.Size, ...]
    values: Values  # empty if they were not kept
    bounds: tuple[float, float] | None

    def __str__(self) -> str:
        return f"{self.operation} in {self.module}" if self.module else self.operation


class Owner(NamedTuple):
    """The rows that have the numbers of one draw of a batch; all share them if both are None."""

    number: int  # which of the draws of a row alone this is
    dims: tuple[int, ...] | None = None  # the dimension of each tensor in which rows follow rows
    row: int | None = None  # the one row that has them

    @property
    def shared(self) -> bool:
        """Whether all rows have the same numbers."""
        return self.dims is None and self.row is None


class Draws(TorchDraws):
    """Records what a pass draws from torch's global streams, and gives rows their numbers.

    Draw k begins with the streams in the state ``start + k``. So a draw that is repeated, where
    activations are recomputed, is known by its state and gives the same again.

    Args:
        start: the state of the streams at the beginning.
        keep: whether to keep the numbers.
        owners: whose each draw is; as drawn if there is none.
        given: for each row, the draws that it gets, or None if it gets what is drawn.
        shared: the numbers of draws that all rows share, by ``Owner.number``.
        silent: whether nothing is to be drawn, so that operations need not be looked at. Some code
            computes something else then (quantised layers under vmap).
    """

    def __init__(
        self,
        start: int,
        keep: bool = False,
        owners: Sequence[Owner] = (),
        given: Sequence[Sequence[Values | None] | None] = (),
        shared: Mapping[int, Values] | None = None,
        silent: bool = False,
    ) -> None:
        super().__init__()
        self._start, self._keep, self._owners, self._given = start, keep, owners, given
        self._shared, self._silent = shared or {}, silent
        self._before: Any = None  # the state of the streams
        self._running: list[str] = []  # the classes of the modules that run
        self._hooks: list[Any] = []
        self.made: list[Draw] = []
        self.foreign = False  # whether the model drew from a generator of its own
        self.seeded = False  # whether it set the streams, or put them back
        self.drew = False  # whether anything was drawn

    def __enter__(self) -> Draws:
        seed_torch(self._start)
        if self._silent:
            self._before = torch_streams()
            return self

        def enter(module: nn.Module, args: Any) -> None:
            ours = type(module).__module__.startswith("dp_grape_hf.")  # around another module
            within = self._running[-1] if self._running else ""
            self._running.append(within if ours else type(module).__name__)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._running.pop()

        self._hooks = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._silent:
            self.drew = not all(map(same_state, self._before, torch_streams()))
            return
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
        """Records a draw, and writes into its tensors what rows get."""
        number = torch.initial_seed() - self._start
        if not 0 <= number <= len(self.made):
            self.seeded = True
            return result
        tensors = _filled(func, args, result)
        operation = func._schema.name.rpartition("::")[2].rstrip("_")
        if number < len(self._owners):
            self._give(self._owners[number], tensors)
            if operation == "native_dropout":  # the first of its results is no number
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

    def _give(self, owner: Owner, tensors: Sequence[Tensor]) -> None:
        if owner.row is not None:
            _copy(tensors, self._values(owner.row, owner.number))
        elif owner.dims is None:
            _copy(tensors, self._shared.get(owner.number))
        else:
            size = len(self._given)
            pairs = zip(tensors, owner.dims, strict=True)
            if any(tensor.shape[dim] % size for tensor, dim in pairs):
                return  # ``owners_of`` says afterwards that these are not the rows' numbers
            for row in range(size):
                parts = [
                    in_rows(t, dim, size)[row] for t, dim in zip(tensors, owner.dims, strict=True)
                ]
                _copy(parts, self._values(row, owner.number))

    def _values(self, row: int, number: int) -> Values | None:
        given = self._given[row]
        return None if given is None else given[number]


def _copy(tensors: Sequence[Tensor], values: Values | None) -> None:
    """Writes values into tensors, unless these are not those that the values were drawn for."""
    for tensor, value in zip(tensors, values or (), strict=False):
        if tensor.numel() == value.numel():
            tensor.copy_(value.view_as(tensor))


def in_rows(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Returns a view (B, ...) of a tensor in which the numbers of rows follow each other."""
    return tensor.detach().unflatten(dim, (size, -1)).movedim(dim, 0)


def _is_global(generator: Any) -> bool:
    on_gpus = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return generator._cdata in {g._cdata for g in (torch.default_generator, *on_gpus)}


def _filled(func: Any, args: Sequence[Any], result: Any) -> list[Tensor]:
    """Returns the tensors that a draw can be seen in: those it returns, and those it writes to."""
    given = zip(args, func._schema.arguments, strict=False)
    written = [x for x, argument in given if argument.is_write]
    tensors = [x for x in (*tree_leaves(result), *written) if isinstance(x, Tensor)]
    return [x for i, x in enumerate(tensors) if not any(x is y for y in tensors[:i])]


def _bounds(operation: str, args: Sequence[Any], dtype: torch.dtype) -> tuple[float, float] | None:
    """Returns the least number of a uniform draw that has a logarithm, and the largest."""
    if operation not in _UNIFORM:
        return None
    if operation == "bernoulli":
        return 0.0, 1.0
    low, high = (*args[1:3], *(0.0, 1.0)[len(args[1:3]) :]) if operation == "uniform" else (0, 1)
    return low + (high - low) * 2**-24, high - (high - low) * torch.finfo(dtype).eps


# ---- Whose a draw is ----


def owners_of(alone: Sequence[Draw], together: Sequence[Draw], size: int) -> list[Owner] | Draw:
    """Returns whose the draws of a batch are, or a draw that is no row's and not always there.

    Args:
        alone: the draws of a row that runs alone.
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
        own = alone[number]
        if draw.row is not None and own.shapes == draw.shapes:
            owners.append(Owner(number, row=draw.row))
        elif len(rows) == size and (dims := _grown(own, draw, size)) is not None:
            owners.append(Owner(number, dims))
        elif own.shapes != draw.shapes:
            return draw
        elif many[kind(draw)] == size * few[kind(own)] and size > 1:
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
    """Returns the dimensions in which a draw has B times as many numbers, if they are each's."""
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
