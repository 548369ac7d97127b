"""Poisson sampling of logical batches, and their split into physical batches.

Each step includes each example independently with probability q; these examples are the logical
batch, which the accountant assumes. A physical batch is a part of it that fits into memory; it has
no influence on privacy. With

    DataLoader(
        EmptyDrawDataset(dataset),
        batch_sampler=PoissonBatchSampler(...),
        collate_fn=LogicalBatchCollator(collator, physical_batch_size),
    )

a data loader yields one ``LogicalBatch`` per step.

With a column of privacy units (``units``), Poisson sampling samples units. All examples of a
sampled unit are in the same physical batch, whose entry ``UNIT_OF_ROW`` has the unit of each row.
``gradients.units`` sums the gradients of each unit.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.data import Dataset, Sampler
from torch.utils.data._utils.pin_memory import pin_memory

from dp_grape_hf.errors import require
from dp_grape_hf.gradients import UNIT_OF_ROW, StateGuard
from dp_grape_hf.mechanism.banded import Groups, Turn, Turns
from dp_grape_hf.mechanism.collation import (
    Grid,
    RowCollator,
    Seeds,
    secret_seeds,
    stacked,
    with_separate_seeds,
)
from dp_grape_hf.mechanism.units import Units, refuse_large_unit

_NUMBERS_AT_ONCE = 2**20  # uniform numbers per call; bounds the memory of sampling at 8 MiB
Drawn = TypeVar("Drawn")
Made = TypeVar("Made")


class PoissonBatchSampler(Sampler[list[Any]]):
    """Sampler that yields one sampled batch per step, or this rank's share.

    A batch contains indices of examples. With ``units``, it contains a list of indices for each
    sampled unit, and the guarantee holds for units: all examples of a unit are on one rank.

    Args:
        num_samples: number of examples of the data set, or of its units.
        sample_rate: q, the probability that a batch includes a given example, in (0, 1].
        steps: number of batches that one iteration yields.
        generator: secret CPU generator. With several ranks its state must be the same on all of
            them (``streams.shared_sampling_generator``).
        rank: index of this process among those that share each batch.
        world_size: number of these processes.
        turns: returns the groups of the run and its number of releases, when an iteration begins.
            By default there is one group.
        units: the examples of each privacy unit; None if each example is a unit.
        max_examples_per_unit: the most examples of a unit that a batch uses; None for all. A unit
            with more examples enters with a uniformly random subset of that size, which is chosen
            again in each batch by the same generator.

    Guarantee:
        Each batch includes each example independently with probability q, exact to 2**-53, and
        independently of all other batches. No example occurs twice in a batch. Batches are never
        merged, dropped, padded or truncated. A batch may be empty, and so may a rank's share of it.
        The shares of the ranks are disjoint, their union is the batch, their sizes differ by at
        most one, and every rank yields ``steps`` of them.
        With b groups (``banded.Groups``), the batch of release t includes each example of group
        t mod b with probability b q, and no other example. An iteration that stops early does not
        change this.
        Random numbers are never used twice: a second iteration continues where the first stopped.
        The workers of a data loader may sample a few batches ahead. If an iteration stops early,
        these batches are discarded.

    Raises:
        PrivacyError: if an argument is out of range.
    """

    def __init__(
        self,
        num_samples: int,
        sample_rate: float,
        steps: int,
        generator: torch.Generator,
        rank: int = 0,
        world_size: int = 1,
        turns: Callable[[], Turns] = Turns,
        units: Units | None = None,
        max_examples_per_unit: int | None = None,
    ) -> None:
        on_cpu = generator.device.type == "cpu"
        count = num_samples if units is None else len(units)
        for holds, message in (
            (num_samples >= 1, f"{num_samples=} must be at least 1."),
            (num_samples == count, "num_samples must be the number of units."),
            (0.0 < sample_rate <= 1.0, f"{sample_rate=} must lie in (0, 1]."),
            (steps >= 0, f"{steps=} must not be negative."),
            (0 <= rank < world_size, f"{rank=} must lie in 0 ... {world_size=} - 1."),
            (on_cpu, f"{generator.device=} must be the CPU, where all ranks draw the same."),
        ):
            require(holds, message)
        self.num_samples = num_samples
        self.sample_rate = sample_rate
        self.steps = steps
        self.generator = generator
        self.rank = rank
        self.world_size = world_size
        self._turns, self._units, self._most = turns, units, max_examples_per_unit

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator["Share[Any]"]:
        """Yield this rank's shares of ``steps`` new batches, each in increasing order."""
        for drawn in self.draws():
            items: list[Any] = drawn
            if self._units is not None:
                # Every rank chooses the subsets of all units, to use the same random numbers.
                items = [self._examples_of(self._units, unit) for unit in drawn]
            yield Share(items[self.rank :: self.world_size], drawn.turn)

    def _examples_of(self, units: Units, unit: int) -> list[int]:
        examples = units.examples(unit)
        if self._most is not None and len(examples) > self._most:
            uniform = torch.rand(len(examples), dtype=torch.float64, generator=self.generator)
            examples = examples[uniform.topk(self._most, largest=False).indices.sort().values]
        indices: list[int] = examples.tolist()
        return indices

    def draws(self) -> Iterator["Share[int]"]:
        """Yield ``steps`` batches with the examples or units of all ranks, in increasing order.

        Every rank must call this, so that all ranks use the same random numbers.
        """
        turns = self._turns()
        groups, first = turns.groups(self.num_samples, self.generator), turns.releases
        for number in range(first, first + self.steps):
            drawn = self.draw() if groups is None else self._draw_of_group(groups, number)
            yield Share(drawn, Turn(turns.bands, number))

    def _draw_of_group(self, groups: Groups, number: int) -> list[int]:
        members = groups.members(number)
        uniform = torch.rand(len(members), dtype=torch.float64, generator=self.generator)
        drawn: list[int] = members[uniform < groups.count * self.sample_rate].tolist()
        return drawn

    def draw(self) -> list[int]:
        """Return one batch with the examples of all ranks; every rank must call this."""
        draw: list[int] = []
        for start in range(0, self.num_samples, _NUMBERS_AT_ONCE):
            size = min(_NUMBERS_AT_ONCE, self.num_samples - start)
            uniform = torch.rand(size, dtype=torch.float64, generator=self.generator)
            draw += ((uniform < self.sample_rate).nonzero().flatten() + start).tolist()
        return draw


class Share(list[Drawn]):
    """One rank's share of one sampled batch: indices, or the examples that they refer to.

    Args:
        items: the items of this rank.
        turn: the step that the batch was sampled for; None if no sampler made it.
    """

    def __init__(self, items: Iterable[Drawn] = (), turn: Turn | None = None) -> None:
        super().__init__(items)
        self.turn = turn


class Each:
    """Apply a function to each item of a share, and check that no object's state changes.

    Args:
        seeds: as in ``with_separate_seeds``.
        **objects: the objects that the function uses, as in ``StateGuard``.

    Raises:
        PrivacyError: when called, if the state of one of the objects changes.
    """

    def __init__(self, seeds: Seeds, **objects: Any) -> None:
        self._state, self._seeds = StateGuard(**objects), seeds

    def __call__(self, function: Callable[[Any], Made], share: list[Any]) -> Share[Made]:
        """Return the results, for the step that the share was sampled for."""
        with self._state.unchanged():
            results = with_separate_seeds(function, share, self._seeds)
        return Share(results, getattr(share, "turn", None))


class LogicalBatch(list[Any]):
    """One rank's share of one sampled batch: a list of physical batches, empty if the share is.

    The workers and the memory pinning of a data loader keep this type.

    Args:
        batches: the physical batches.
        sizes: number of examples of each physical batch. Sensitive, as is their sum.
        turn: the step that the batch was sampled for; None if no sampler made it.
    """

    def __init__(
        self, batches: Iterable[Any], sizes: Sequence[int], turn: Turn | None = None
    ) -> None:
        super().__init__(batches)
        self.sizes = tuple(sizes)
        self.turn = turn

    @property
    def num_examples(self) -> int:
        """Number of examples in this share. Sensitive: never log or save it."""
        return sum(self.sizes)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the physical batches, in order."""
        return [v for batch in self for v in batch.values() if isinstance(v, torch.Tensor)]

    def pin_memory(self) -> "LogicalBatch":
        """Return a copy whose tensors lie in pinned memory; data loaders call this."""
        return LogicalBatch([pin_memory(batch) for batch in self], self.sizes, self.turn)


class LogicalBatchCollator:
    """Collate each example or unit of a share alone, and stack the rows into physical batches.

    Every example is in exactly one physical batch, and no physical batch is empty. For an empty
    share the result is an empty ``LogicalBatch``, and the collator is not called. The units of a
    physical batch are numbered from 0, larger units first. The rows of a unit are next to each
    other.

    Args:
        collator: makes a batch, a mapping, of a list of examples.
        physical_batch_size: the most examples in a physical batch. Affects memory, never privacy.
        grid: as in ``RowCollator``.
        seeds: as in ``with_separate_seeds``.
        of_units: whether a share contains a list of examples for each unit, instead of examples.

    Guarantee:
        A row is a function of its example (or unit) and of separate random numbers
        (``collation``), whatever the collator does. Rows of equal form share physical batches, the
        largest rows first. A sum over a sampled batch does not depend on the split.

    Raises:
        PrivacyError: if ``physical_batch_size`` is not positive; when called, if it is smaller than
            a unit, or if the collator's state changes.
    """

    def __init__(
        self,
        collator: Callable[[list[Any]], Any],
        physical_batch_size: int,
        grid: Grid = RowCollator.grid,
        seeds: Seeds = secret_seeds,
        of_units: bool = False,
    ) -> None:
        require(
            physical_batch_size >= 1,
            f"{physical_batch_size=} must be at least 1, because it is the largest number of "
            "examples in memory. Pass a larger number.",
        )
        self.collate_rows = RowCollator(collator, grid)
        self.physical_batch_size, self._of_units = physical_batch_size, of_units
        self._each = Each(seeds, data_collator=collator)

    def __call__(self, share: list[Any]) -> LogicalBatch:
        """Collate each example or unit of a share alone, and stack rows of equal form."""
        sizes = [len(unit) if self._of_units else 1 for unit in share]
        refuse_large_unit(max(sizes, default=0), self.physical_batch_size)
        rows = self._each(lambda x: self.collate_rows(x if self._of_units else [x]), share)
        batches, counts = [], []
        for batch, members in stacked(rows, partial(self._packed, sizes)):
            unit_of_row = [number for number, i in enumerate(members) for _ in range(sizes[i])]
            if self._of_units:
                batch[UNIT_OF_ROW] = torch.tensor(unit_of_row)
            batches.append(batch)
            counts.append(len(unit_of_row))
        return LogicalBatch(batches, counts, rows.turn)

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


class EmptyDrawDataset(Dataset[Any]):
    """Wrapper of a map-style data set that reads each example alone and supports empty batches.

    Args:
        dataset: a data set with ``__getitem__`` and ``__len__``.
        seeds: as in ``with_separate_seeds``.
        unit_column: the column of the privacy units, which is removed from each example; None if
            each example is a unit.

    Raises:
        PrivacyError: when read, if the data set's state changes.
    """

    def __init__(
        self, dataset: Any, seeds: Seeds = secret_seeds, unit_column: str | None = None
    ) -> None:
        self.dataset: Any = dataset
        self._column = unit_column
        self._each = Each(seeds, train_dataset=dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        example, column = self.dataset[index], self._column
        return example if column is None else {n: v for n, v in example.items() if n != column}

    def __getitems__(self, share: list[Any]) -> Share[Any]:
        """Return each example of a share, or a list of all examples of each unit.

        Each example or unit has separate random numbers. Examples are read one at a time: with
        batched access, a transform of the data set could make an example depend on others.
        """
        if self._column is None:
            return self._each(self.__getitem__, share)
        return self._each(lambda unit: [self[index] for index in unit], share)
