"""The layout of one vector that holds the coordinates of all trained parameters.

A few operations on one matrix, with a row for each sample, take the place of a few on each of
hundreds of parameters. Matrices that are not projected, and tables of words, are too large to have
a row for each sample, so the vector leaves them out.

Shapes: B samples in the physical batch, D coordinates, m x n a weight as stored, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from functools import cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dp_grape_hf.gradients.forms import Dense, PerSampleGradient
from dp_grape_hf.projections import Projector, Side

MOST = 2**16  # numbers of a weight that is not projected, or of a table, for it to be in the vector


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

    On the right side they are stored as (r, m), the transpose of the (m, r) that they are known as:
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
        """The same, for who need not know what it is called."""
        return Piece(self.start, self.stored)

    def of(self, flat: Tensor) -> Tensor:
        """Returns this parameter's part of (..., D), as a view in the shape of its coordinates."""
        if flat.dim() == 1 and flat.is_contiguous():  # one call for each of hundreds of parameters
            shape, strides = _strided(self.stored, self.transposed)
            return flat.as_strided(shape, strides, flat.storage_offset() + self.start)
        size = prod(self.stored)
        part = flat.narrow(-1, self.start, size).view((*flat.shape[:-1], *self.stored))
        return part.mT if self.transposed else part


@cache
def _strided(stored: tuple[int, ...], transposed: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shape and the strides of coordinates in memory."""
    view = torch.empty(stored, device="meta")
    view = view.mT if transposed else view
    return tuple(view.shape), view.stride()


class Layout:
    """The parameters in the vector, and their positions.

    Args:
        weights: name -> parameter, all that are trained.
        projectors: name -> projector, of those that are projected.
        tables: names of the weights of look-up tables.
        most: numbers of a matrix that is not projected, or of a table, for it to be in the vector.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        projectors: Mapping[str, Projector],
        tables: Iterable[str] = (),
        most: int = MOST,
    ) -> None:
        self.places: dict[str, Place] = {}
        tables, start = frozenset(tables), 0
        for name, weight in weights.items():
            projector = projectors.get(name)
            shape = tuple(weight.shape)
            if projector is not None:
                shape = projector.coordinate_shape(weight.shape)
            row_each = weight.dim() < 2 or (projector is not None and name not in tables)
            if not row_each and prod(shape) > most:
                continue
            transposed = projector is not None and projector.side is Side.RIGHT
            stored = shape[::-1] if transposed else shape
            self.places[name] = Place(start, stored, transposed)
            start = self.places[name].stop
        self.size = start
        """D"""
        self._starting = {place.start: name for name, place in self.places.items()}

    def __contains__(self, name: str) -> bool:
        """Returns whether a parameter is in the vector."""
        return name in self.places

    def named(self, parts: Mapping[Piece, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields what parameters have of some parts, (B, *piece.shape), in their own shapes."""
        for piece, part in parts.items():
            rows, start = part.reshape(len(part), -1), piece.start
            while start < piece.stop:
                name = self._starting[start]
                place = self.places[name]
                yield name, place._replace(start=start - piece.start).of(rows)
                start = place.stop

    def join(self, parts: Mapping[Piece, Tensor], batch_size: int, like: Tensor) -> Tensor:
        """Makes (B, D) of parts, (B, *piece.shape); what overlaps adds up, the rest is zero.

        Args:
            parts: what there is.
            batch_size: B.
            like: a tensor on the device of the parts.
        """
        ordered = sorted(parts, key=lambda piece: piece.start)
        ends = [0, *(piece.stop for piece in ordered)]
        if [*(piece.start for piece in ordered), self.size] == ends:
            return torch.cat([parts[piece].reshape(batch_size, -1) for piece in ordered], 1)
        joined = like.new_zeros(batch_size, self.size, dtype=torch.float32)
        for piece, part in parts.items():
            joined[:, piece.start : piece.stop] += part.reshape(batch_size, -1)
        return joined


class Runs:
    """The parts of the vector in which all parameters have the same key.

    Args:
        key: of a parameter's name; it does not change.
    """

    def __init__(self, key: Callable[[str], Hashable]) -> None:
        self._key = key
        self._of: tuple[Layout, dict[str, slice]] | None = None

    def of(self, layout: Layout) -> dict[str, slice]:
        """Returns the name of the first parameter of each part, and where the part is."""
        if self._of is None or self._of[0] is not layout:
            found: dict[str, slice] = {}
            first = None
            for name, place in layout.places.items():
                if first is None or self._key(name) != self._key(first):
                    first = name
                    found[first] = slice(place.start, place.stop)
                found[first] = slice(found[first].start, place.stop)
            self._of = layout, found
        return self._of[1]


class FlatGradients(Mapping[str, PerSampleGradient]):
    """Per-sample gradients by parameter name; most of them are views of one matrix.

    Args:
        layout: who has which columns of it.
        flat: (B, D), float32.
        others: the gradients of all other parameters.
        order: the names of all parameters.
    """

    def __init__(
        self,
        layout: Layout,
        flat: Tensor,
        others: Mapping[str, PerSampleGradient],
        order: Collection[str],
    ) -> None:
        self.layout, self.flat, self.others = layout, flat, dict(others)
        self._order = order

    def __getitem__(self, name: str) -> PerSampleGradient:
        place = self.layout.places.get(name)
        return self.others[name] if place is None else Dense(place.of(self.flat))

    def __iter__(self) -> Iterator[str]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self.layout.places) + len(self.others)

    def in_runs(self, runs: Runs) -> dict[str, PerSampleGradient]:
        """Returns few gradients for many, by the names of the first; the others as they are."""
        parts = runs.of(self.layout).items()
        return {name: Dense(self.flat[:, part]) for name, part in parts} | self.others


class FlatTensors(Mapping[str, Tensor]):
    """Tensors by parameter name; most of them are views of one vector.

    Args:
        layout: who has which part of it; None if it is not there.
        flat: (D,), float32.
        others: the tensors of all other parameters.
        order: the names of all parameters.
    """

    def __init__(
        self,
        layout: Layout | None,
        flat: Tensor | None,
        others: Mapping[str, Tensor],
        order: Collection[str],
    ) -> None:
        self.layout, self.flat, self.others = layout, flat, dict(others)
        self._places = {} if layout is None else layout.places
        self._order = order

    def __getitem__(self, name: str) -> Tensor:
        if name in self._places:
            assert self.flat is not None
            return self._places[name].of(self.flat)
        return self.others[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._places) + len(self.others)

    def in_runs(self, runs: Runs) -> dict[str, Tensor]:
        """Returns few tensors for many, by the names of the first; the others as they are."""
        if self.layout is None or self.flat is None:
            return dict(self)
        flat = self.flat
        return {name: flat[part] for name, part in runs.of(self.layout).items()} | self.others


def tables_of(model: nn.Module, names: Mapping[int, str]) -> frozenset[str]:
    """Returns the names of the weights that the model looks up rows of.

    Args:
        model: the model.
        names: id of a parameter -> its name.
    """
    weights = (m.weight for m in model.modules() if isinstance(m, nn.Embedding))
    return frozenset(names[id(weight)] for weight in weights if id(weight) in names)
