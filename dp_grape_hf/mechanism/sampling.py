"""Poisson sampling: which examples a step uses, and how they are split to fit into memory.

The logical batch is what the accountant knows: each example enters it by a coin of its own. The
physical batch is what fits into memory and has no meaning for privacy. With

    DataLoader(
        EmptyDrawDataset(dataset),
        batch_sampler=PoissonBatchSampler(...),
        collate_fn=LogicalBatchCollator(collator, physical_batch_size),
    )

a data loader yields one ``LogicalBatch`` per step.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, TypeVar

import torch
from torch.utils.data import Dataset, Sampler
from torch.utils.data._utils.pin_memory import pin_memory

from dp_grape_hf.errors import PrivacyError, require
from dp_grape_hf.gradients import StateGuard
from dp_grape_hf.mechanism.banded import Groups, Turn, Turns
from dp_grape_hf.mechanism.collation import (
    Grid,
    OwnRows,
    Seeds,
    secret_seeds,
    stacked,
    with_own_coins,
)

_COINS_AT_ONCE = 2**20  # bounds the memory of a draw (8 MiB) whatever the number of examples
Drawn = TypeVar("Drawn")
Made = TypeVar("Made")


class PoissonBatchSampler(Sampler[list[int]]):
    """Yields the indices of one Poisson draw per step, or this rank's share of them.

    Args:
        num_samples: Number of examples the data set holds.
        sample_rate: q, the probability with which each example enters a draw, in (0, 1].
        steps: Number of draws one pass yields.
        generator: CPU generator of the coins. With several ranks its state must be the same on
            all of them (``streams.shared_sampling_generator``).
        rank: Index of this process among those that share each draw.
        world_size: Number of these processes.
        turns: Returns, when a pass begins, which groups of examples the run has, and how many
            releases it has made. By default there is one group.

    Guarantee:
        In every draw each example is included independently with probability q, exact to 2**-53,
        and independently of all other draws. No example occurs twice in a draw. Draws are never
        merged, dropped, padded or truncated: a draw may be empty, and so may be a rank's share of
        it. The shares of the ranks are disjoint, their union is the draw, their sizes differ by one
        at most, and every rank yields ``steps`` of them.
        With b groups (``banded.Groups``) each example is included with probability b q in every
        b-th draw, and in no other: that of release t is of group t mod b, also where a pass was
        left early.
        Coins are never replayed: a second pass goes on where the first stopped. A pass that is
        left early may have drawn a few steps ahead (the workers of a data loader do); their
        coins are discarded unused.

    Raises:
        PrivacyError: An argument is out of range.
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
    ) -> None:
        require(num_samples >= 1, f"{num_samples=} must be at least 1: there is nothing to draw.")
        require(
            0.0 < sample_rate <= 1.0,
            f"{sample_rate=} must lie in (0, 1]: it is the expected batch size divided by the "
            "number of examples. Choose a smaller expected batch size.",
        )
        require(steps >= 0, f"{steps=} must not be negative.")
        require(
            0 <= rank < world_size,
            f"{rank=} must lie in 0 ... {world_size=} - 1, or examples would be left out.",
        )
        require(
            generator.device.type == "cpu",
            f"{generator.device=} must be the CPU, where every rank tosses the same coins.",
        )
        self.num_samples = num_samples
        self.sample_rate = sample_rate
        self.steps = steps
        self.generator = generator
        self.rank = rank
        self.world_size = world_size
        self._turns = turns

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        """Yields this rank's share of ``steps`` fresh draws, each in increasing order."""
        return (self.share(drawn, drawn.turn) for drawn in self.draws())

    def draws(self) -> Iterator["Share[int]"]:
        """Yields ``steps`` whole draws, each in increasing order; every rank has to make them."""
        turns = self._turns()
        groups, first = turns.groups(self.num_samples, self.generator), turns.made
        for number in range(first, first + self.steps):
            drawn = self.draw() if groups is None else self._draw_of_group(groups, number)
            yield Share(drawn, Turn(turns.bands, number))

    def _draw_of_group(self, groups: Groups, number: int) -> list[int]:
        members = groups.members(number)
        coins = torch.rand(len(members), dtype=torch.float64, generator=self.generator)
        drawn: list[int] = members[coins < groups.count * self.sample_rate].tolist()
        return drawn

    def share(self, drawn: list[Drawn], turn: Turn | None) -> "Share[Drawn]":
        """Returns what this rank has of a draw, given all that was drawn, in the order drawn."""
        return Share(drawn[self.rank :: self.world_size], turn)

    def draw(self) -> list[int]:
        """Returns a whole draw, in increasing order; every rank has to make it."""
        draw: list[int] = []
        for start in range(0, self.num_samples, _COINS_AT_ONCE):
            size = min(_COINS_AT_ONCE, self.num_samples - start)
            coins = torch.rand(size, dtype=torch.float64, generator=self.generator)
            draw += ((coins < self.sample_rate).nonzero().flatten() + start).tolist()
        return draw


class Share(list[Drawn]):
    """One rank's share of one draw: indices, or the examples that were fetched for them.

    Args:
        items: of this rank.
        turn: what the draw is for.
    """

    def __init__(self, items: Iterable[Drawn] = (), turn: Turn | None = None) -> None:
        super().__init__(items)
        self.turn = turn


class Each:
    """Applies a function to each item of a share alone, by objects that must not remember any.

    Args:
        seeds: as in ``with_own_coins``.
        **objects: the objects that the function uses, as in ``StateGuard``.

    Raises:
        PrivacyError: when called, if one of the objects remembers something of the items.
    """

    def __init__(self, seeds: Seeds, **objects: Any) -> None:
        self._state, self._seeds = StateGuard(**objects), seeds

    def __call__(self, function: Callable[[Any], Made], share: list[Any]) -> Share[Made]:
        """Return the results, for the step that the share was sampled for."""
        with self._state.unchanged():
            made = with_own_coins(function, share, self._seeds)
        return Share(made, getattr(share, "turn", None))


class LogicalBatch(list[Any]):
    """One rank's share of one draw: a list of physical batches, empty if the share is.

    The type survives the workers and the memory pinning of a data loader.

    Args:
        batches: The physical batches.
        sizes: Number of examples in each of them. Sensitive, as is their sum.
        turn: what it was sampled for; None if no sampler made it.
    """

    def __init__(
        self, batches: Iterable[Any], sizes: Sequence[int], turn: Turn | None = None
    ) -> None:
        super().__init__(batches)
        self.sizes = tuple(sizes)
        self.turn = turn

    @property
    def num_examples(self) -> int:
        """Number of examples in this share of the draw. Sensitive: never log or save it."""
        return sum(self.sizes)

    def pin_memory(self) -> "LogicalBatch":
        """Returns a copy whose tensors lie in pinned memory; data loaders call this."""
        return LogicalBatch([pin_memory(batch) for batch in self], self.sizes, self.turn)


class LogicalBatchCollator:
    """Makes the physical batches of a share of a draw, of rows that were collated one by one.

    Every example lands in exactly one physical batch. None of them is empty: an empty share
    gives an empty ``LogicalBatch``, and the collator is not called.

    Args:
        collator: Makes a batch, a mapping, of a list of examples.
        physical_batch_size: Most examples in a physical batch. Affects memory, never privacy.
        grid: As in ``OwnRows``.
        seeds: As in ``with_own_coins``.

    Guarantee:
        A row is a function of its example and of coins of its own (``collation``), whatever the
        collator does. Rows of like shapes share physical batches, those of most numbers first; a
        sum over a draw does not depend on how it was split.

    Raises:
        PrivacyError: ``physical_batch_size`` is not positive; when called, if the collator
            remembers something of the examples.
    """

    def __init__(
        self,
        collator: Callable[[list[Any]], Any],
        physical_batch_size: int,
        grid: Grid = OwnRows.grid,
        seeds: Seeds = secret_seeds,
    ) -> None:
        require(physical_batch_size >= 1, f"{physical_batch_size=} must be at least 1.")
        self.own_rows = OwnRows(collator, grid)
        self.physical_batch_size = physical_batch_size
        self._each = Each(seeds, data_collator=collator)

    def __call__(self, examples: list[Any]) -> LogicalBatch:
        """Collates each example of a share by itself, and stacks what is alike."""
        rows = self._each(lambda example: self.own_rows([example]), examples)
        stacks = list(stacked(rows, self._chunks))
        sizes = [len(stack.members) for stack in stacks]
        return LogicalBatch([stack.batch for stack in stacks], sizes, rows.turn)

    def _chunks(self, members: list[int]) -> list[list[int]]:
        size = self.physical_batch_size
        return [members[start : start + size] for start in range(0, len(members), size)]


class EmptyDrawDataset(Dataset[Any]):
    """A map-style data set that answers an empty draw itself, which others need not support.

    Args:
        dataset: has ``__getitem__`` and ``__len__``.
        seeds: as in ``with_own_coins``.

    Raises:
        PrivacyError: it has no length; when read from, if it remembers what was read.
    """

    def __init__(self, dataset: Any, seeds: Seeds = secret_seeds) -> None:
        if not isinstance(dataset, Sized):
            raise PrivacyError(
                f"{type(dataset).__name__} has no length. Poisson sampling needs a map-style data "
                "set with __len__ and __getitem__; load a streamed one into memory."
            )
        self.dataset: Any = dataset
        self._each = Each(seeds, train_dataset=dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: list[int]) -> Share[Any]:
        """Returns the examples of one share, each fetched by itself and under coins of its own.

        A batched access, or a transform of the data set, could make one example depend on others.
        """
        return self._each(self.dataset.__getitem__, indices)
