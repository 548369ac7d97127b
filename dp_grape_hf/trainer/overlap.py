"""Rows that two data sets share, determined by digests of their contents, and repeated rows.

Shapes: N rows.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Subset

from dp_grape_hf.arguments import DPGrapeArguments
from dp_grape_hf.errors import require
from dp_grape_hf.gradients import keeping_random_state
from dp_grape_hf.phases import advance, progress
from dp_grape_hf.trainer.bad_data import explaining_bad_data

Numbers = NDArray[Any]

_SAMPLED = 64  # rows, at most, that show which columns have contents
_READ = 512  # rows read at once
_REMEMBERED = 64  # data sets that were compared


class TrainingRows:
    """The rows of a training data set, for comparison with other data sets. It is read once.

    Args:
        data: the training data set.
        args: the arguments of the run.

    Attributes:
        disjoint: data sets that were compared, and that have no training rows; for the caller.
    """

    def __init__(self, data: Any, args: DPGrapeArguments) -> None:
        self.data = data
        self.disjoint: deque[Any] = deque(maxlen=_REMEMBERED)
        self._pieces = _pieces_of(data)
        self._unit_column, self._shown = args.privacy_unit_column, not args.disable_tqdm
        self._digests: dict[Any, Numbers] = {}

    def shared_with(self, dataset: Any, what: str, most: int | None = None) -> Numbers:
        """Return which rows of a data set are training rows, in order.

        A row is a training row if both are the same element of the same object (``elements_of``),
        or if both have the same contents. Of two ``datasets.Dataset``, stored columns that both
        have are compared; otherwise the rows that the data sets return. Labels and single numbers
        do not count as contents.

        Args:
            dataset: another data set with a length.
            what: its name in messages.
            most: compare at most this many first rows; all if None.
        """
        shared = self.elements_of(dataset, most)
        if len(shared):
            return shared
        others, doing = _pieces_of(dataset, most), f"Comparing it with {what}"
        with keeping_random_state():  # data sets may draw random numbers
            return np.unique(self._with_equal_contents(others, doing))

    def elements_of(self, dataset: Any, most: int | None = None) -> Numbers:
        """Return which rows of a data set are elements of the training data set's objects.

        They are compared through ``Subset`` and ``ConcatDataset``.

        Args:
            dataset: as for ``shared_with``.
            most: as for ``shared_with``.
        """
        pairs = product(self._pieces, _pieces_of(dataset, most))
        shared = [o.at[np.isin(o.rows, p.rows)] for p, o in pairs if p.data is o.data]
        return np.unique(np.concatenate([np.zeros(0, np.int64), *shared]))

    def _with_equal_contents(self, others: list[_Piece], doing: str) -> Numbers:
        can_be_stored = all(hasattr(p.data, "select_columns") for p in (*self._pieces, *others))
        for stored in (True, False) if can_be_stored else (False,):
            sample = [row for piece in others for row in _examples(piece.sample(), stored)]
            with explaining_bad_data(self.data, doing):
                first = next(_examples(self._pieces[0].sample(1), stored), {})
            if names := _contents(sample, [n for n in first if n != self._unit_column]):
                found = self._digest_rows(others, names, stored, doing)
                if (key := (*names, stored)) not in self._digests:
                    with explaining_bad_data(self.data, doing):
                        self._digests[key] = self._digest_rows(self._pieces, names, stored, doing)
                shared = np.isin(found, self._digests[key]) & (found != 0)
                return np.concatenate([piece.at for piece in others])[shared]
        return np.zeros(0, np.int64)

    def _digest_rows(
        self, pieces: list[_Piece], names: list[Any], stored: bool, doing: str
    ) -> Numbers:
        """Return hashes of 64 bits of the rows, 0 without contents; arguments of ``_examples``."""
        digests = np.zeros(sum(len(piece.rows) for piece in pieces), np.int64)
        rows = (row for piece in pieces for row in _examples(piece, stored, names))
        with progress(doing, self._shown, "rows"):
            for n, row in enumerate(rows):
                held = [_canonical(row.get(name)) for name in names]
                # of the text, as Python's hash of -1 is that of -2
                digests[n] = hash(repr(held)) if any(held) else 0
                advance(len(digests))
        return digests


def refuse_repeated(dataset: Any) -> None:
    """Refuse training data with one element of a data set in several rows.

    Elements are compared by their index, through ``Subset`` and ``ConcatDataset``. The rows of a
    ``datasets.Dataset`` are compared by their place in memory, which the results of ``select`` and
    ``concatenate_datasets`` share.

    Raises:
        PrivacyError: there is such an element.
    """
    buffers: dict[int, int] = {}
    groups: dict[Any, list[list[Numbers]]] = {}
    for piece in _pieces_of(dataset):
        stored = hasattr(piece.data, "select_columns") and hasattr(piece.data, "_indices")
        key = tuple(piece.data.column_names) if stored else id(piece.data)
        places = _places_of(piece, buffers) if stored else [piece.rows]
        groups.setdefault(key, []).append(places)
    for pieces in groups.values():
        columns = [np.concatenate(column) for column in zip(*pieces, strict=True)]
        require(
            any(len(np.unique(column)) == len(column) for column in columns)
            or np.unique(np.stack(columns), axis=1).shape[1] == len(columns[0]),
            "train_dataset has an element of a data set in several rows (by Subset, ConcatDataset, "
            "select or concatenate_datasets). Epsilon protects a row, so it would not protect that "
            "element. List each element once, and weigh its loss if it should count more; or set "
            "privacy_unit_column.",
        )


def _places_of(piece: _Piece, buffers: dict[int, int]) -> list[Numbers]:
    """Return the places in memory of rows of a ``datasets.Dataset``: numbers for each column.

    Args:
        piece: the rows.
        buffers: the address of each buffer that was found so far -> its number.
    """
    table, indices, columns = piece.data.data, piece.data._indices, []
    rows = piece.rows if indices is None else indices.column(0).to_numpy()[piece.rows]
    for column in table.itercolumns():
        starts = np.cumsum([0, *map(len, column.chunks)])
        first = []
        for chunk in column.chunks:
            address = next((b.address for b in chunk.buffers() if b is not None), id(chunk))
            first.append(buffers.setdefault(address, len(buffers)) * 2**40 + chunk.offset)
        of_row = np.searchsorted(starts, rows, side="right") - 1
        columns.append(np.asarray(first)[of_row] + rows - starts[of_row])
    return columns


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


def _pieces_of(data: Any, most: int | None = None) -> list[_Piece]:
    """Return the objects that make up the first rows of a data set, without empty ones."""
    rows = np.arange(len(data))[:most]
    return [piece for piece in _pieces(data, rows, rows) if len(piece.rows)]


def _examples(
    piece: _Piece, stored: bool, names: list[Any] | None = None
) -> Iterator[Mapping[Any, Any]]:
    """Yield rows by name.

    Args:
        piece: the rows.
        stored: whether to read the stored columns of a ``datasets.Dataset``, without its transform
            and without decoding images and sounds.
        names: the stored columns that are read; all if None.
    """
    data = piece.data
    if stored:
        data = data.with_format(None)
        data = data if names is None else data.select_columns(names)
        for name, kind in data.features.items():
            if getattr(kind, "decode", False):
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


def _canonical(value: Any) -> Any:
    """Return a value in a form that does not depend on a library; None if it is empty."""
    if isinstance(value, str | bytes | None):
        return value or None
    if isinstance(value, Mapping):
        if value.keys() == {"bytes", "path"}:  # an image or a sound as it is stored
            with suppress(OSError, TypeError):  # the path may be an address, or None
                return value["bytes"] or Path(value["path"]).read_bytes()
            return value["path"]
        items = ((str(key), _canonical(value[key])) for key in sorted(value, key=str))
        return tuple(item for item in items if item[1] is not None) or None
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value  # NumPy has no bfloat16
    try:
        array = np.asarray(value)
    except (RuntimeError, TypeError, ValueError):  # for instance, rows of several lengths
        array = np.asarray(None)
    if array.dtype.kind in "bui":
        array = array.astype(np.int64)
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
