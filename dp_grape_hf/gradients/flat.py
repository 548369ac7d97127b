"""The layout of one vector with the coordinates of most trained parameters.

A few operations on one matrix, with a row for each sample, replace operations on hundreds of
parameters. The vector leaves out large matrices that are not projected, and embedding tables: a
row of them for each sample would take too much memory.

Shapes: B samples in the physical batch, D coordinates, m x n a weight as stored, r rank.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from functools import cache
from math import prod
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from dp_grape_hf.gradients.forms import Dense, PerSampleGradient
from dp_grape_hf.projections import Projector, Side

MOST = 2**16  # the most numbers of an unprojected matrix, or of a table, in the vector


class Piece(NamedTuple):
    """A part of the vector, and the shape that its numbers have in memory."""

    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """The position at which the next piece begins."""
        return self.start + prod(self.shape)


class Place(NamedTuple):
    """The position of one parameter's coordinates in the vector.

    Coordinates of shape (m, r), of a right-side projection, are stored as (r, m), because matrix
    products of that shape are twice as fast.
    """

    start: int
    stored: tuple[int, ...]
    transposed: bool

    @property
    def stop(self) -> int:
        """The position at which the next parameter begins."""
        return self.start + prod(self.stored)

    @property
    def piece(self) -> Piece:
        """The same part of the vector, in the shape in memory."""
        return Piece(self.start, self.stored)

    def of(self, flat: Tensor) -> Tensor:
        """Return this parameter's part of (..., D), as a view in the shape of its coordinates."""
        if flat.dim() == 1 and flat.is_contiguous():  # a single call, for speed
            shape, strides = _strided(self.stored, self.transposed)
            return flat.as_strided(shape, strides, flat.storage_offset() + self.start)
        size = prod(self.stored)
        part = flat.narrow(-1, self.start, size).view((*flat.shape[:-1], *self.stored))
        return part.mT if self.transposed else part


@cache
def _strided(stored: tuple[int, ...], transposed: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and the strides of coordinates in memory."""
    view = torch.empty(stored, device="meta")
    view = view.mT if transposed else view
    return tuple(view.shape), view.stride()


class Layout:
    """The parameters in the vector, and their positions.

    Args:
        weights: name -> trained parameter.
        projectors: name -> projector, for the projected parameters.
        tables: names of the weights of embedding tables.

    Attributes:
        size: D.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        projectors: Mapping[str, Projector],
        tables: Iterable[str] = (),
    ) -> None:
        self.places: dict[str, Place] = {}
        tables, start = frozenset(tables), 0
        for name, weight in weights.items():
            projector = projectors.get(name)
            shape = tuple(weight.shape)
            if projector is not None:
                shape = projector.coordinate_shape(weight.shape)
            row_each = weight.dim() < 2 or (projector is not None and name not in tables)
            if not row_each and prod(shape) > MOST:
                continue
            transposed = projector is not None and projector.side is Side.RIGHT
            stored = shape[::-1] if transposed else shape
            self.places[name] = Place(start, stored, transposed)
            start = self.places[name].stop
        self.size = start

    def __contains__(self, name: str) -> bool:
        """Return whether a parameter is in the vector."""
        return name in self.places

    def join(self, parts: Mapping[Piece, Tensor], batch_size: int, like: Tensor) -> Tensor:
        """Return the matrix (B, D) of some parts; overlapping parts add up, the rest is zero.

        Args:
            parts: piece -> its values, (B, *piece.shape).
            batch_size: B.
            like: a tensor on the device of the parts.
        """
        ordered = sorted(parts, key=lambda piece: piece.start)
        ends = [0, *(piece.stop for piece in ordered)]
        if parts and [*(piece.start for piece in ordered), self.size] == ends:
            return torch.cat([parts[piece].reshape(batch_size, -1) for piece in ordered], 1)
        joined = like.new_zeros(batch_size, self.size, dtype=torch.float32)
        for piece, part in parts.items():
            joined[:, piece.start : piece.stop] += part.reshape(batch_size, -1)
        return joined


class Runs:
    """The longest parts of the vector in which all parameters have the same key.

    Args:
        key: returns the key of a parameter's name, which must not change.
    """

    def __init__(self, key: Callable[[str], Hashable]) -> None:
        self._key = key
        self._of: tuple[Layout, dict[str, slice]] | None = None

    def of(self, layout: Layout) -> dict[str, slice]:
        """Return the range of each part, by the name of its first parameter."""
        if self._of is None or self._of[0] is not layout:
            runs: dict[str, slice] = {}
            first = None
            for name, place in layout.places.items():
                if first is None or self._key(name) != self._key(first):
                    first = name
                    runs[first] = slice(place.start, place.stop)
                runs[first] = slice(runs[first].start, place.stop)
            self._of = layout, runs
        return self._of[1]


V = TypeVar("V")


class _Flat(Mapping[str, V]):
    """Values by parameter name; most of them are views of one tensor.

    Args:
        layout: the parameters and their parts of the tensor.
        flat: the tensor, (D,) or (B, D), float32.
        others: the values of all other parameters.
        order: the names of all parameters.
    """

    def __init__(
        self, layout: Layout, flat: Tensor, others: Mapping[str, V], order: Collection[str]
    ) -> None:
        self.layout, self.flat, self.others = layout, flat, dict(others)
        self._order = order

    def _value(self, view: Tensor) -> V:
        raise NotImplementedError

    def __getitem__(self, name: str) -> V:
        place = self.layout.places.get(name)
        return self.others[name] if place is None else self._value(place.of(self.flat))

    def __iter__(self) -> Iterator[str]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self.layout.places) + len(self.others)

    def in_runs(self, runs: Runs) -> dict[str, V]:
        """Return one value for each run, by the name of its first parameter, and all others."""
        parts = runs.of(self.layout).items()
        return {name: self._value(self.flat[..., part]) for name, part in parts} | self.others


class FlatGradients(_Flat[PerSampleGradient]):
    """Per-sample gradients by parameter name; most of them are views of one matrix (B, D)."""

    def _value(self, view: Tensor) -> PerSampleGradient:
        return Dense(view)


class FlatTensors(_Flat[Tensor]):
    """Tensors by parameter name; most of them are views of one vector (D,)."""

    def _value(self, view: Tensor) -> Tensor:
        return view


def tables_of(model: nn.Module, names: Mapping[int, str]) -> frozenset[str]:
    """Return the names of the weights of embedding tables.

    Args:
        model: the model.
        names: id of a parameter -> its name.
    """
    weights = (m.weight for m in model.modules() if isinstance(m, nn.Embedding))
    return frozenset(names[id(weight)] for weight in weights if id(weight) in names)
