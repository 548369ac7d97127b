"""Privacy units of several examples: whose an example is, and how a unit's examples stay together.

Where ``privacy_unit_column`` names a column, ``user_id`` say, all examples with the same value in
it are one unit, and what differential privacy hides is whether that unit was there at all. Poisson
sampling then draws units. With

    DataLoader(
        UnitDataset(dataset, column),
        batch_sampler=UnitBatchSampler(PoissonBatchSampler(len(units), ...), units),
        collate_fn=UnitCollator(collator, physical_batch_size),
    )

a data loader yields one ``LogicalBatch`` per step, of whose physical batches each holds whole units
and tells under ``UNIT_OF_ROW`` which rows belong together. ``gradients.units`` sums their
gradients.
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

_KINDS = (str, int, float, bytes, date)  # equal wherever they look the same, unlike other objects
_AT_ONCE = 2**14  # examples whose column is in memory while it is read


# ---- Who owns what ----


@dataclass(frozen=True)
class Units:
    """Which examples belong to each privacy unit; units are numbered by their first example.

    The values of the column are not kept: whose a unit is cannot be told from it.
    """

    order: Tensor  # (examples,), integer: their indices, those of a unit next to each other
    offsets: Tensor  # (units + 1,), integer: where in ``order`` each unit starts and the last ends

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def largest(self) -> int:
        """Number of examples of the largest unit. Sensitive."""
        return int(self.offsets.diff().max())

    @property
    def checksum(self) -> int:
        """A number that differs where the units do, for processes to compare."""
        return zlib.crc32(self.offsets.numpy().data, zlib.crc32(self.order.numpy().data))

    def examples(self, unit: int) -> Tensor:
        """Returns the indices of a unit's examples, in increasing order."""
        return self.order[int(self.offsets[unit]) : int(self.offsets[unit + 1])]


def read_units(dataset: Any, column: str) -> Units:
    """Reads a column of a data set once, and groups the examples by its values.

    Args:
        dataset: a ``datasets.Dataset``, of which only that column is read, or any map-style data
            set of mappings, each of which is fetched.
        column: the name of the column.

    Guarantee:
        Two examples are of one unit if and only if their values are equal. A value for which that
        question has no certain answer is refused.

    Raises:
        PrivacyError: if there is no such column, or a value in it is missing, not a number (NaN),
            not of a plain type, or of another type than the first.

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
                    f"train_dataset[{index}][{column!r}] is a {type(value).__name__}, and those "
                    f"before it are of type {first.__name__}: one unit written in two ways would "
                    f"count as two. Make all values of privacy_unit_column={column!r} of one type."
                )
            yield numbers.setdefault(value, len(numbers))

    unit_of = torch.from_numpy(np.fromiter(numbered(), dtype=np.int64, count=len(dataset)))
    counts = torch.bincount(unit_of, minlength=len(numbers))
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return Units(unit_of.argsort(stable=True), offsets)


def _column(dataset: Any, column: str) -> Iterator[Any]:
    """Yields the values of a column, in the order of the examples."""
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
                f"train_dataset[{index}] is a {type(example).__name__}, which has no columns, but "
                f"privacy_unit_column={column!r} was given. Make each example a dictionary."
            )
        _refuse_missing(column, example, f"train_dataset[{index}]")
        yield example[column]


def _refuse_missing(column: str, names: Collection[str], where: str) -> None:
    if column not in names:
        raise PrivacyError(
            f"privacy_unit_column={column!r} is not in {where}, which has {', '.join(names)}. Name "
            "a column of the data as it reaches training: what prepares the data must keep it."
        )


def _plain(value: Any, where: str) -> Any:
    """Returns a value that is equal to another one if and only if both name the same unit."""
    if isinstance(value, Tensor | np.ndarray | np.generic) and value.ndim == 0:
        value = value.item()  # tensors are equal to themselves only
    if value is None or (isinstance(value, _KINDS) and value != value):
        raise PrivacyError(
            f"{where} is {value!r}: whose that example is is not known, and so not which unit "
            "protects it. Leave such examples out, or give each a value of its own."
        )
    if not isinstance(value, _KINDS):
        raise PrivacyError(
            f"{where} is a {type(value).__name__}, which cannot be told from another of the same "
            "contents. Make the column one of text or whole numbers."
        )
    return value


# ---- Draws ----


class UnitBatchSampler(Sampler[list[list[int]]]):
    """Yields the examples of the units of one Poisson draw per step, or this rank's share of them.

    Args:
        draws: draws units, by number, and says which rank this is.
        units: which examples they have.
        max_examples_per_unit: most examples that a draw uses of a unit; None for all.

    Guarantee:
        That of ``PoissonBatchSampler``, for units: each enters a draw by a coin of its own, as a
        whole, on one rank. A unit with more than ``max_examples_per_unit`` examples enters with a
        uniformly random subset of that size, chosen anew in each draw, from the stream of the
        coins and so alike on every rank.

    Raises:
        PrivacyError: An argument is out of range.
    """

    def __init__(
        self, draws: PoissonBatchSampler, units: Units, max_examples_per_unit: int | None = None
    ) -> None:
        require(
            draws.num_samples == len(units),
            "draws.num_samples must be the number of units, of which it draws.",
        )
        require(
            max_examples_per_unit is None or max_examples_per_unit >= 1,
            f"{max_examples_per_unit=} must be at least 1, or None for all of a unit's examples.",
        )
        self.draws = draws
        self.units = units
        self.max_examples_per_unit = max_examples_per_unit

    def __len__(self) -> int:
        return len(self.draws)

    def __iter__(self) -> Iterator[list[list[int]]]:
        """Yields this rank's units of fresh draws, each as the indices of its examples."""
        for whole in self.draws.draws():
            # Of all units, not of the share alone: ranks would go on with different coins.
            drawn = [self._some_of(self.units.examples(unit)) for unit in whole]
            yield self.draws.share(drawn, whole.turn)

    def _some_of(self, examples: Tensor) -> list[int]:
        most = self.max_examples_per_unit
        if most is not None and len(examples) > most:
            coins = torch.rand(len(examples), dtype=torch.float64, generator=self.draws.generator)
            examples = examples[coins.topk(most, largest=False).indices.sort().values]
        indices: list[int] = examples.tolist()
        return indices


class UnitDataset(Dataset[Any]):
    """A map-style data set that fetches whole units, and keeps to itself whose they are.

    Args:
        dataset: has ``__getitem__`` and ``__len__``.
        column: the column of the units, which is taken out of each example.
        seeds: as in ``with_own_coins``.

    Raises:
        PrivacyError: when read from, if the data set remembers what was read.
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
        """Returns the examples of each unit of a share, as ``EmptyDrawDataset`` does."""
        return self._each(lambda unit: [self[index] for index in unit], units)


class UnitCollator(LogicalBatchCollator):
    """Makes physical batches of whole units, each of which is collated by itself.

    The units of a physical batch are numbered from 0, larger ones first, and the rows of a unit
    lie next to each other.

    Guarantee:
        That of ``LogicalBatchCollator``, for units.

    Raises:
        PrivacyError: ``physical_batch_size`` is not positive, or smaller than a unit.
    """

    def __call__(self, units: list[list[Any]]) -> LogicalBatch:
        """Collates each unit of a share by itself, and stacks what is alike."""
        for unit in units:
            refuse_large_unit(len(unit), self.physical_batch_size)
        rows = self._each(self.own_rows, units)
        batches, sizes = [], []
        for batch, members in stacked(rows, partial(self._packed, [len(unit) for unit in units])):
            whose = [number for number, i in enumerate(members) for _ in units[i]]
            batches.append({**batch, UNIT_OF_ROW: torch.tensor(whose)})
            sizes.append(len(whose))
        return LogicalBatch(batches, sizes, rows.turn)

    def _packed(self, sizes: list[int], members: list[int]) -> list[list[int]]:
        """Returns units that fit into one physical batch each: the first that has room, by size."""
        packed: list[list[int]] = []
        room: dict[int, int] = {}  # number of a batch that is not full -> examples that fit in
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
    """Refuses a unit of so many examples that no physical batch holds it."""
    require(
        size <= physical_batch_size,
        "A privacy unit has more examples than a physical batch holds, "
        f"per_device_train_batch_size={physical_batch_size}; a unit is clipped as a whole, so it "
        "must fit into one. Raise per_device_train_batch_size, or set max_examples_per_unit.",
    )
