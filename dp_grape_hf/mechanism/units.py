"""Privacy units of several examples: which examples belong to each unit.

If ``privacy_unit_column`` names a column, such as ``user_id``, all examples with the same value in
it are one privacy unit. Differential privacy then hides whether the unit took part at all.
"""

import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dp_grape_hf.errors import PrivacyError, require

_KINDS = (str, int, float, bytes, date)  # types whose values are equal if they look the same
_AT_ONCE = 2**14  # examples of which the column is in memory at one time


@dataclass(frozen=True)
class Units:
    """The examples of each privacy unit; units are numbered in the order of their first example.

    The values of the column are not kept, so this object does not identify a person.
    """

    order: Tensor  # (examples,), integer: indices of examples, sorted by unit
    offsets: Tensor  # (units + 1,), integer: start of each unit in ``order``, and the end of all

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def largest(self) -> int:
        """Number of examples of the largest unit. Sensitive."""
        return int(self.offsets.diff().max())

    @property
    def checksum(self) -> int:
        """A checksum of the units, for processes to compare."""
        return zlib.crc32(self.offsets.numpy().data, zlib.crc32(self.order.numpy().data))

    def examples(self, unit: int) -> Tensor:
        """Return the indices of a unit's examples, in increasing order."""
        return self.order[int(self.offsets[unit]) : int(self.offsets[unit + 1])]


def read_units(dataset: Any, column: str) -> Units:
    """Read a column of a data set once, and group the examples by its values.

    Args:
        dataset: a ``datasets.Dataset``, of which only that column is read; or any map-style data
            set of mappings, of which all examples are read.
        column: the name of the column.

    Guarantee:
        Two examples are of one unit if and only if their values are equal. Values that cannot be
        compared with certainty raise an error.

    Raises:
        PrivacyError: if there is no such column, or a value in it is missing, NaN, not of a plain
            type, or of another type than the first.

    >>> units = read_units([{"user": name} for name in "abca"], "user")
    >>> [units.examples(unit).tolist() for unit in range(len(units))]
    [[0, 3], [1], [2]]
    """
    numbers: dict[Any, int] = {}

    def numbered() -> Iterator[int]:
        first: type | None = None
        for index, value in enumerate(_column(dataset, column)):
            value = _plain(value, f"train_dataset[{index}][{column!r}]")
            first = first or type(value)
            if type(value) is not first:
                raise PrivacyError(
                    f"train_dataset[{index}][{column!r}] is a {type(value).__name__}, and earlier "
                    f"values are of type {first.__name__}. One unit with values of two types would "
                    f"count as two units. Convert privacy_unit_column={column!r} to one type."
                )
            yield numbers.setdefault(value, len(numbers))

    unit_of = torch.from_numpy(np.fromiter(numbered(), dtype=np.int64, count=len(dataset)))
    counts = torch.bincount(unit_of, minlength=len(numbers))
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return Units(unit_of.argsort(stable=True), offsets)


def _column(dataset: Any, column: str) -> Iterator[Any]:
    """Yield the values of a column, in the order of the examples."""
    if hasattr(dataset, "column_names") and hasattr(dataset, "with_format"):  # datasets.Dataset
        _refuse_missing(column, dataset.column_names, "train_dataset")
        alone = dataset.with_format(None).select_columns([column])
        for batch in alone.iter(batch_size=_AT_ONCE):
            yield from batch[column]
        return
    for index in range(len(dataset)):
        example = dataset[index]
        if not isinstance(example, Mapping):
            raise PrivacyError(
                f"train_dataset[{index}] is a {type(example).__name__}, which has no columns. "
                f"privacy_unit_column={column!r} needs one. Make each example a dictionary."
            )
        _refuse_missing(column, example, f"train_dataset[{index}]")
        yield example[column]


def _refuse_missing(column: str, names: Collection[str], where: str) -> None:
    if column not in names:
        raise PrivacyError(
            f"privacy_unit_column={column!r} is not in {where}, which has {', '.join(names)}. Name "
            "a column of the data set that is passed to the trainer, and keep it in preprocessing."
        )


def _plain(value: Any, where: str) -> Any:
    """Return a value of a plain type, which equals another if and only if both name one unit."""
    if isinstance(value, Tensor | np.ndarray | np.generic) and value.ndim == 0:
        value = value.item()  # two tensors of one value are different dictionary keys
    if value is None or (isinstance(value, _KINDS) and value != value):
        raise PrivacyError(
            f"{where} is {value!r}. The privacy unit of that example is not known. Leave such "
            "examples out, or give each a different value."
        )
    if not isinstance(value, _KINDS):
        raise PrivacyError(
            f"{where} is a {type(value).__name__}. Such values cannot be compared with certainty. "
            "Make the column one of text or whole numbers."
        )
    return value


def refuse_large_unit(size: int, physical_batch_size: int) -> None:
    """Refuse a unit with more examples than a physical batch holds."""
    require(
        size <= physical_batch_size,
        "A privacy unit has more examples than a physical batch holds, "
        f"per_device_train_batch_size={physical_batch_size}. A unit is clipped as one gradient, so "
        "it must fit. Raise per_device_train_batch_size, or set max_examples_per_unit.",
    )
