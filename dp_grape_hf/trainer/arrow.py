"""Digests of the rows of a ``datasets.Dataset``, computed from its Arrow columns.

No row becomes a Python object, and no image is decoded.

Shapes: N rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Numbers = NDArray[Any]

_ROWS, _BYTES = 1024, 2**26  # largest block of rows
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd: of the digest to which another one is added


class UnknownStorageError(Exception):
    """Error if a column has an unknown type, or a file cannot be read."""


def is_stored(dataset: Any) -> bool:
    """Return whether an object is a ``datasets.Dataset``, whose columns Arrow holds."""
    return hasattr(dataset, "select_columns") and hasattr(dataset, "data")


def stored_digests(
    dataset: Any, rows: Numbers, names: Sequence[str], advance: Callable[[int], Any]
) -> Numbers:
    """Return the digests of rows, (N,) uint64; 0 for a row that is empty under all names.

    Rows with the same contents have the same digest, also if one holds int32 and the other int64.
    An image or a sound counts as its encoded bytes, or as the bytes of its file.

    Args:
        dataset: a ``datasets.Dataset``.
        rows: (N,), which of its rows.
        names: columns that are read.
        advance: receives how many rows are done since it was called before.

    Raises:
        UnknownStorageError: the digests cannot be computed from the columns.
    """
    table = dataset.data.table.select(list(names))
    if (indices := getattr(dataset, "_indices", None)) is not None:  # the data set is a selection
        rows = indices.column(0).to_numpy()[rows]
    order = np.argsort(rows, kind="stable")
    wanted, found, begin = rows[order], np.zeros(len(rows), np.uint64), 0
    size = max(1, min(_ROWS, _BYTES * len(table) // max(1, table.nbytes)))
    for block in table.to_batches(max_chunksize=size):
        start, stop = np.searchsorted(wanted, [begin, begin + len(block)])
        if start < stop:
            part = block.take(pa.array(wanted[start:stop] - begin))
            found[order[start:stop]] = _digests(part)
            advance(int(stop - start))
        begin += len(block)
    return found


def _digests(block: pa.RecordBatch) -> Numbers:
    total, held = np.zeros(len(block), np.uint64), np.zeros(len(block), bool)
    for column in block.columns:
        for data, ends in _buffers(column, np.arange(len(block) + 1), top=True):
            bounds, view = pairwise(ends.tolist()), memoryview(data)
            each = np.fromiter((hash(bytes(view[a:b])) for a, b in bounds), np.int64, len(block))
            total = total * _MULTIPLIER + each.astype(np.uint64)
            held |= np.diff(ends) > 0
    return np.where(held, total, 0)


def _buffers(array: Any, ends: Numbers, *, top: bool = False) -> Iterator[tuple[Any, Numbers]]:
    """Yield the buffers of a column, each with the bounds of the rows in it, (N + 1,).

    Args:
        array: a column, or an array that is nested in one.
        ends: (N + 1,), the bounds of the rows in ``array``.
        top: whether each element is a row.
    """
    kind, is_a = array.type, pa.types
    if isinstance(kind, pa.BaseExtensionType):
        yield from _buffers(array.storage, ends, top=top)
    elif is_a.is_struct(kind):
        names, parts = [field.name for field in kind], array.flatten()
        if sorted(names) == ["bytes", "path"]:  # an image or a sound
            parts = [_encoded(parts[names.index("bytes")], parts[names.index("path")])]
        for part in parts:
            yield from _buffers(part, ends, top=top)
    elif is_a.is_list(kind) or is_a.is_large_list(kind) or is_a.is_fixed_size_list(kind):
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy().astype(np.int64)
        if not top:
            yield lengths.view(np.uint8), 8 * ends
        yield from _buffers(array.flatten(), _ends(lengths)[ends])
    elif is_a.is_boolean(kind) or is_a.is_integer(kind) or is_a.is_floating(kind):
        wide = np.float32 if is_a.is_floating(kind) else np.int64
        values = pc.fill_null(pc.cast(array, pa.from_numpy_dtype(wide), safe=False), 0).to_numpy()
        if top:  # zero says nothing
            ends, values = _ends(values != 0), values[values != 0]
        yield np.ascontiguousarray(values).view(np.uint8), values.itemsize * ends
    elif not is_a.is_null(kind):
        try:
            binary = pc.fill_null(pc.cast(array, pa.large_binary()), b"")
        except pa.ArrowNotImplementedError as error:
            raise UnknownStorageError(str(kind)) from error
        offsets = np.frombuffer(binary.buffers()[1], np.int64)
        offsets = offsets[binary.offset : binary.offset + len(binary) + 1]
        if not top:
            yield np.diff(offsets).view(np.uint8), 8 * ends
        yield binary.buffers()[2] or b"", offsets[ends]


def _ends(lengths: Numbers) -> Numbers:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _encoded(contents: Any, paths: Any) -> Any:
    """Return the contents of files; read a file if only its path is stored."""
    if not contents.null_count:
        return contents
    pairs = zip(contents.to_pylist(), paths.to_pylist(), strict=True)
    try:
        read = [Path(p).read_bytes() if c is None and p is not None else c for c, p in pairs]
    except OSError as error:  # an address, say
        raise UnknownStorageError("a file that is not here") from error
    return pa.array(read, pa.large_binary())
