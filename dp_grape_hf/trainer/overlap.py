"""Rows that two data sets share, determined by digests of their contents.

Shapes: N rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Subset
from tqdm import tqdm

from dp_grape_hf.arguments import DPGrapeArguments
from dp_grape_hf.gradients import keeping_random_state
from dp_grape_hf.trainer.bad_data import explaining_bad_data

Numbers = NDArray[Any]

_SAMPLED = 64  # rows, at most, that show which columns have contents
_READ = 512  # rows read at once
_QUIET = 2.0  # seconds before a progress bar is shown


class TrainingRows:
    """The rows of a training data set, for comparison with other data sets. It is read once.

    Args:
        data: the training data set.
        args: the arguments of the run.
    """

    def __init__(self, data: Any, args: DPGrapeArguments) -> None:
        self.data = data
        rows = np.arange(len(data))
        self._pieces = [piece for piece in _pieces(data, rows, rows) if len(piece.rows)]
        self._unit_column, self._no_bar = args.privacy_unit_column, bool(args.disable_tqdm)
        self._digests: dict[Any, Numbers] = {}

    def shared_with(self, dataset: Any, what: str, most: int | None = None) -> Numbers:
        """Return which rows of a data set are training rows, in order.

        A row is a training row if both are the same element of the same object, through
        ``Subset`` and ``ConcatDataset``, or if both have the same contents. Contents are compared
        as they are stored, or as they are read if no stored column is in both data sets. Labels
        and single numbers do not count as contents.

        Args:
            dataset: another data set with a length.
            what: its name in messages.
            most: compare at most this many first rows; all if None.
        """
        rows = np.arange(len(dataset))[:most]
        others = [*_pieces(dataset, rows, rows)]
        shared = self._elements_in(others)
        if not len(shared):
            with keeping_random_state():  # data sets may draw random numbers
                shared = np.unique(self._with_equal_contents(others, f"Comparing it with {what}"))
        return shared

    def elements_of(self, dataset: Any) -> Numbers:
        """Return which rows of a data set are elements of the training data set's objects.

        Args:
            dataset: as for ``shared_with``.
        """
        rows = np.arange(len(dataset))
        return self._elements_in([*_pieces(dataset, rows, rows)])

    def _elements_in(self, others: list[_Piece]) -> Numbers:
        pairs = [(p, other) for p in self._pieces for other in others if p.data is other.data]
        shared = [other.at[np.isin(other.rows, p.rows)] for p, other in pairs]
        return np.unique(np.concatenate([np.zeros(0, np.int64), *shared]))

    def _with_equal_contents(self, others: list[_Piece], doing: str) -> Numbers:
        for stored in (True, False):
            sample = [row for piece in others for row in _examples(piece.sample(), stored)]
            with explaining_bad_data(self.data, doing):
                first = next(_examples(self._pieces[0].sample(1), stored), {})
            if not (names := _contents(sample, [n for n in first if n != self._unit_column])):
                continue
            decode = not (stored and _stored_alike([*self._pieces, *others], names))
            found = self._digest_rows(others, names, stored, decode, doing)
            if (key := (*names, stored, decode)) not in self._digests:
                with explaining_bad_data(self.data, doing):
                    self._digests[key] = self._digest_rows(
                        self._pieces, names, stored, decode, doing
                    )
            shared = np.isin(found, self._digests[key]) & (found != 0)
            return np.concatenate([piece.at for piece in others])[shared]
        return np.zeros(0, np.int64)

    def _digest_rows(
        self, pieces: list[_Piece], names: list[Any], stored: bool, decode: bool, doing: str
    ) -> Numbers:
        """Return the digests of the rows of some pieces; with the arguments of ``_examples``."""
        total = sum(len(piece.rows) for piece in pieces)
        digests = np.zeros(total, np.int64)
        with tqdm(total=total, desc=doing, delay=_QUIET, disable=self._no_bar) as bar:
            rows = (row for piece in pieces for row in _examples(piece, stored, names, decode))
            for n, row in enumerate(rows):
                digests[n] = _digest(row, names)
                bar.update()
        return digests


@dataclass
class _Piece:
    """Some rows of one object, and their indices in a data set that contains the object."""

    data: Any
    rows: Numbers
    at: Numbers

    def sample(self, most: int = _SAMPLED) -> _Piece:
        """Return a piece of this one with few rows."""
        some = np.linspace(0, len(self.rows) - 1, min(most, len(self.rows))).astype(np.int64)
        return _Piece(self.data, self.rows[some], self.at[some])


def _pieces(data: Any, rows: Numbers, at: Numbers) -> Iterator[_Piece]:
    """Yield the objects that make up a data set, through ``Subset`` and ``ConcatDataset``.

    Args:
        data: a data set.
        rows: (N,), the indices of some of its rows.
        at: (N,), the indices of these rows in the outermost data set.
    """
    if isinstance(data, Subset):
        inner = np.asarray(data.indices, np.int64)[rows]
        yield from _pieces(data.dataset, inner % len(data.dataset), at)  # type: ignore[arg-type]
    elif isinstance(data, ConcatDataset):
        begin = 0
        for part in data.datasets:
            inside = (rows >= begin) & (rows < begin + len(part))  # type: ignore[arg-type]
            yield from _pieces(part, rows[inside] - begin, at[inside])
            begin += len(part)  # type: ignore[arg-type]
    else:
        yield _Piece(data, rows, at)


def _stored_alike(pieces: Sequence[_Piece], names: Sequence[Any]) -> bool:
    """Return whether all pieces have stored columns of these names, each of one type."""
    if not all(hasattr(piece.data, "select_columns") for piece in pieces):
        return False
    kinds = [[type(piece.data.features.get(name)) for name in names] for piece in pieces]
    return all(kind == kinds[0] for kind in kinds)


def _examples(
    piece: _Piece, stored: bool, names: list[Any] | None = None, decode: bool = False
) -> Iterator[Mapping[Any, Any]]:
    """Yield rows by name; if ``stored``, a ``datasets.Dataset`` gives its columns untransformed.

    Args:
        piece: the rows.
        stored: whether to read stored columns, without the transform.
        names: the columns that are read; all if None.
        decode: whether to decode the images of stored columns.
    """
    data = piece.data
    if stored and hasattr(data, "select_columns"):
        data = data.with_format(None)
        data = data if names is None else data.select_columns(names)
        for name, kind in data.features.items():
            image = type(kind).__name__ == "Image"  # others are sounds and films
            if getattr(kind, "decode", False) and not (image and decode):
                data = data.cast_column(name, replace(kind, decode=False))
        data = data.select(piece.rows)
        for start in range(0, len(data), _READ):
            batch = data[start : start + _READ]
            for row in zip(*batch.values(), strict=True):
                yield dict(zip(batch, row, strict=True))
    else:
        for example in (data[row] for row in piece.rows.tolist()):
            named = example if hasattr(example, "keys") else getattr(example, "__dict__", None)
            yield dict(enumerate(example)) if named is None else named


_NO_CONTENTS = re.compile("label|_mask$|token_type_ids$|position_ids$")  # equal in many rows


def _contents(rows: Sequence[Mapping[Any, Any]], names: Sequence[Any]) -> list[Any]:
    """Return the names of columns that distinguish rows: those with more than single numbers.

    Labels are used only without other columns; single numbers only if some have fractions.
    """
    inputs = [name for name in names if not _NO_CONTENTS.search(str(name))]
    labels = [name for name in names if "label" in str(name)]
    held = {name: [_canonical(row.get(name)) for row in rows] for name in (*inputs, *labels)}
    for some in (inputs, labels):
        if rich := [n for n in some if any(x and not isinstance(x, int | float) for x in held[n])]:
            return rich
    return inputs if any(isinstance(x, float) for n in inputs for x in held[n]) else []


def _digest(row: Mapping[Any, Any], names: Sequence[Any]) -> int:
    """Return a hash of 64 bits of the values of a row under these names; 0 if there are none."""
    held = [_canonical(row.get(name)) for name in names]
    return hash(repr(held)) if any(held) else 0  # of the text, as Python's hash of -1 is that of -2


def _canonical(value: Any) -> Any:
    """Return a value in a form that does not depend on a library; None if it is empty."""
    if isinstance(value, str | bytes | None):
        return value or None
    if isinstance(value, Mapping):
        if value.keys() == {"bytes", "path"}:  # an image or a sound as it is stored
            return _content_of_file(value["bytes"], value["path"])
        items = ((str(key), _canonical(value[key])) for key in sorted(value, key=str))
        return tuple(item for item in items if item[1] is not None) or None
    if isinstance(value, list) and {*map(type, value)} == {int}:
        return tuple(value)
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value  # NumPy has no bfloat16
    try:
        array = np.asarray(value)
    except (RuntimeError, TypeError, ValueError):  # for instance, rows of several lengths
        array = np.asarray(None)
    if array.dtype.kind in "bui":
        array = array.astype(np.int64)
        if array.ndim == 1:
            return tuple(array.tolist()) or None
    elif array.dtype.kind == "f":
        with np.errstate(over="ignore"):
            array = np.nan_to_num(array.astype(np.float32), nan=-np.inf)  # NaN is equal to nothing
    elif isinstance(value, list | tuple) or array.ndim:
        return tuple(_canonical(item) for item in value) or None
    else:
        return repr(value)
    if array.ndim == 0:
        return array.item()
    return (array.shape, hash(array.tobytes())) if array.size else None


def _content_of_file(content: bytes | None, path: str | None) -> bytes | str | None:
    """Return the bytes of a file; its path, if it is not stored here."""
    if content is None and path is not None:
        try:
            return Path(path).read_bytes()
        except OSError:  # an address, say
            return path
    return content
