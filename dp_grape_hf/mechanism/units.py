"""Privacy units of several examples: their assignment, sampling and collation.

If ``privacy_unit_column`` names a column, such as ``user_id``, all examples with the same value in
it are one privacy unit. Differential privacy then hides whether the unit took part at all, and
Poisson sampling samples units. With

    DataLoader(
        UnitDataset(dataset, column),
        batch_sampler=UnitBatchSampler(PoissonBatchSampler(len(units), ...), units),
        collate_fn=UnitCollator(collator, physical_batch_size),
    )

a data loader yields one ``LogicalBatch`` per step. All examples of a sampled unit are in the same
physical batch, whose entry ``UNIT_OF_ROW`` has the unit of each row. ``gradients.units`` sums the
gradients of each unit.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from dp_grape_hf.errors import PrivacyError, require
from dp_grape_hf.gradients import UNIT_OF_ROW
from dp_grape_hf.mechanism.collation import Seeds, secret_seeds, stacked
from dp_grape_hf.mechanism.sampling import (
    Each,
    LogicalBatch,
    LogicalBatchCollator,
    PoissonBatchSampler,
    Share,
)

_KINDS = (str, int, float, bytes, date)  # types whose values are equal if they look the same
_AT_ONCE = 2**14  # examples of which the column is in memory at one time


# ---- The units of a data set ----


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


# ---- Sampling and collation ----


class UnitBatchSampler(Sampler[list[list[int]]]):
    """Yield the examples of the units of one sampled batch per step, or this rank's share of them.

    Args:
        draws: samples the numbers of units, and knows the rank of this process.
        units: the examples of each unit.
        max_examples_per_unit: the most examples of a unit that a batch uses; None for all.

    Guarantee:
        As of ``PoissonBatchSampler``, for units: each batch includes each unit independently, with
        all its examples on one rank. A unit with more than ``max_examples_per_unit`` examples
        enters with a uniformly random subset of that size, chosen again in each batch. The subset
        is drawn from the shared sampling stream, so it is the same on every rank.

    Raises:
        PrivacyError: if ``draws`` does not sample these units.
    """

    def __init__(
        self, draws: PoissonBatchSampler, units: Units, max_examples_per_unit: int | None = None
    ) -> None:
        require(
            draws.num_samples == len(units),
            "draws.num_samples must be the number of units.",
        )
        self.draws = draws
        self.units = units
        self.max_examples_per_unit = max_examples_per_unit

    def __len__(self) -> int:
        return len(self.draws)

    def __iter__(self) -> Iterator[list[list[int]]]:
        """Yield this rank's units of new batches, each as the indices of its examples."""
        for batch in self.draws.draws():
            # Every rank chooses the subsets of all units, to use the same random numbers.
            drawn = [self._some_of(self.units.examples(unit)) for unit in batch]
            yield self.draws.share(drawn, batch.turn)

    def _some_of(self, examples: Tensor) -> list[int]:
        most = self.max_examples_per_unit
        if most is not None and len(examples) > most:
            uniform = torch.rand(len(examples), dtype=torch.float64, generator=self.draws.generator)
            examples = examples[uniform.topk(most, largest=False).indices.sort().values]
        indices: list[int] = examples.tolist()
        return indices


class UnitDataset(Dataset[Any]):
    """Wrapper of a map-style data set that reads all examples of a unit, without the unit's name.

    Args:
        dataset: a data set with ``__getitem__`` and ``__len__``.
        column: the column of the units, which is removed from each example.
        seeds: as in ``with_separate_seeds``.

    Raises:
        PrivacyError: when read, if the data set's state changes.
    """

    def __init__(self, dataset: Any, column: str, seeds: Seeds = secret_seeds) -> None:
        self.dataset = dataset
        self.column = column
        self._each = Each(seeds, train_dataset=dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return {n: value for n, value in self.dataset[index].items() if n != self.column}

    def __getitems__(self, units: list[list[int]]) -> Share[list[Any]]:
        """Return the examples of each unit of a share, as ``EmptyDrawDataset`` does."""
        return self._each(lambda unit: [self[index] for index in unit], units)


class UnitCollator(LogicalBatchCollator):
    """Collate each unit of a share alone, and stack units into physical batches.

    The units of a physical batch are numbered from 0, larger units first. The rows of a unit are
    next to each other.

    Guarantee:
        As of ``LogicalBatchCollator``, for units.

    Raises:
        PrivacyError: ``physical_batch_size`` is not positive, or smaller than a unit.
    """

    def __call__(self, units: list[list[Any]]) -> LogicalBatch:
        """Collate each unit of a share alone, and stack rows of equal form."""
        for unit in units:
            refuse_large_unit(len(unit), self.physical_batch_size)
        rows = self._each(self.collate_rows, units)
        batches, sizes = [], []
        for batch, members in stacked(rows, partial(self._packed, [len(unit) for unit in units])):
            unit_of_row = [number for number, i in enumerate(members) for _ in units[i]]
            batches.append({**batch, UNIT_OF_ROW: torch.tensor(unit_of_row)})
            sizes.append(len(unit_of_row))
        return LogicalBatch(batches, sizes, rows.turn)

    def _packed(self, sizes: list[int], members: list[int]) -> list[list[int]]:
        """Split units into physical batches: the largest first, each into the first with room."""
        packed: list[list[int]] = []
        room: dict[int, int] = {}  # number of a batch that is not full -> examples that still fit
        for unit in sorted(members, key=sizes.__getitem__, reverse=True):
            number = next((n for n, left in room.items() if left >= sizes[unit]), len(packed))
            if number == len(packed):
                packed.append([])
                room[number] = self.physical_batch_size
            packed[number].append(unit)
            room[number] -= sizes[unit]
            if not room[number]:
                del room[number]
        return packed


def refuse_large_unit(size: int, physical_batch_size: int) -> None:
    """Refuse a unit with more examples than a physical batch holds."""
    require(
        size <= physical_batch_size,
        "A privacy unit has more examples than a physical batch holds, "
        f"per_device_train_batch_size={physical_batch_size}. A unit is clipped as one gradient, so "
        "it must fit. Raise per_device_train_batch_size, or set max_examples_per_unit.",
    )
