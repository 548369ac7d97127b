"""Collation by construction: what a row holds is made of one example, and of coins of its own.

A collator that is given a batch may look at all of it: it pads to the longest, drops a column that
is missing in the first, crops by one coin. So none is given a batch here. Each example (or each
privacy unit, whose examples belong together) is collated by itself, under random numbers of its
own, and rows that came out alike are stacked into physical batches. What others there are has no
way to reach a row.

Rows would rarely be alike if each had its own length. Only the collator knows how it pads; so it is
given a companion beside the example, the same example with its sequences repeated up to the next
length of a public grid, and the companion's row is dropped. The length of a row is then a function
of the example's own length.

Shapes: k rows of an example (1) or of a privacy unit.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.gradients import keeping_random_state, rows_of

Item = TypeVar("Item")
Made = TypeVar("Made")
Rows = dict[str, Any]
"""What a collator made of one example or unit: tensors (k, ...), and what is no tensor."""


@dataclass(frozen=True)
class Grid:
    """The lengths to which sequences are padded: of each, a public function of its own.

    Args:
        longest: how many positions the model has; None if it has no limit.
        parts: into how many equal parts the lengths between two powers of 2 are split. More leave
            less padding, and make more physical batches of a draw.

    >>> [Grid()(n) for n in (3, 8, 9, 13, 17, 33, 65, 129, 300, 512)]
    [8, 8, 12, 16, 24, 48, 96, 192, 384, 512]
    >>> [Grid(longest=500, parts=1)(n) for n in (8, 9, 17, 65, 300, 512)]
    [8, 16, 32, 128, 500, 512]
    """

    longest: int | None = None
    parts: int = 2

    def __call__(self, length: int) -> int:
        """Returns the next length, which is a multiple of 4 unless it is the longest."""
        step = max(4, 2 ** (length - 1).bit_length() // 2 // self.parts)
        padded = max(8, -(-length // step) * step)
        return padded if self.fits(padded) or not self.fits(length) else self.longest or padded

    def fits(self, length: int) -> bool:
        """Whether a model has as many positions."""
        return self.longest is None or length <= self.longest


@dataclass(frozen=True)
class OwnRows:
    """Makes the rows of one example, or of the examples of one unit, of nothing else.

    Args:
        collator: of the user; makes a batch of a list of examples.
        grid: the lengths that are padded to.

    Guarantee:
        Names, types, shapes and contents of the rows are a function of these examples, the
        collator, the grid and the global random numbers.

    Raises:
        PrivacyError: when called, if there is not one row for each example.
    """

    collator: Callable[[list[Any]], Any]
    grid: Grid = Grid()

    def __call__(self, examples: Sequence[Any]) -> Rows:
        """Returns the rows (k, ...) of k examples."""
        for companion in _companions(examples, self.grid):
            try:
                batch = self.collator([*map(_copy, examples), companion])
                rows = _first(batch, len(examples), of=len(examples) + 1)
            except Exception:  # it pads no labels, say: then they have one length anyway
                continue
            if self.grid.fits(_positions(rows)):
                return rows
        return _first(self.collator([*map(_copy, examples)]), len(examples), of=len(examples))


def _first(batch: Any, count: int, of: int) -> Rows:
    """Returns the first rows of a batch.

    Raises:
        PrivacyError: it has not as many rows as it was made of examples.
    """
    if not isinstance(batch, Mapping):
        raise PrivacyError(
            f"The data collator returned a {type(batch).__name__}. Return a mapping of the names "
            "of the model's inputs to tensors with one row for each example."
        )
    if others := [n for n, v in batch.items() if isinstance(v, Tensor) and v.shape[:1] != (of,)]:
        raise PrivacyError(
            f"The data collator, which is given one example at a time, made {others[0]!r} of it "
            f"with {'no row' if batch[others[0]].dim() == 0 else 'another number of rows'}. "
            f"{OTHER_ROWS}"
        )
    return rows_of(batch, slice(count))


OTHER_ROWS = (
    "A row is then not an example and its clipping bounds nothing. Turn packing off; of examples "
    "that are pairs (a chosen and a rejected answer), make one row each, (B, 2, T), for a model "
    "that sees both at once, as those ForMultipleChoice do; of patches and other parts too, one "
    "row for each example."
)


def _positions(rows: Rows) -> int:
    """Returns the largest size of whole numbers, which tokens are, beside that of the rows."""
    tokens = (v for v in rows.values() if isinstance(v, Tensor) and not v.is_floating_point())
    return max((size for value in tokens for size in value.shape[1:]), default=0)


def _copy(example: Any) -> Any:
    """Returns an example that a collator may change: some take labels out of it."""
    return dict(example) if isinstance(example, dict) else example


# ---- Companions ----


def _companions(examples: Sequence[Any], grid: Grid) -> Iterator[dict[str, Any]]:
    """Yields the first example with longer sequences, with labels among them and without."""
    if not all(isinstance(example, Mapping) for example in examples):
        return
    found: dict[str, int] = {}
    for example in examples:
        for name, length in _lengths(example).items():
            found[name] = max(length, found.get(name, 0))
    targets = {name: grid(length) for name, length in found.items()}
    first = dict(examples[0])
    own = _lengths(first)
    longer = {n: t for n, t in targets.items() if n in own and t > own[n]}
    tokens, unlabelled = _token_lengths(first), [name for name in longer if not _is_label(name)]
    for names in dict.fromkeys((frozenset(longer), frozenset(unlabelled))):
        if names:
            yield {n: _longer(v, longer[n], tokens) if n in names else v for n, v in first.items()}


def _is_label(name: str) -> bool:
    return "label" in name


def _is_sequence(name: str, value: Any) -> bool:
    """Whether this may be a sequence of positions, by the names that such things have.

    Numbers with a fraction are sound, or labels, of which there is one for each class.
    """
    named = name.endswith(("_ids", "_mask", "_masks", "labels", "bbox", "input_values"))
    return named and not (_is_label(name) and isinstance(_number(value), float))


def _number(value: Any) -> Any:
    """Returns a number of a nested sequence, or of a tensor, as Python has it; None without one."""
    while isinstance(value, list | tuple):
        value = value[0] if value else None
    if isinstance(value, Tensor | np.ndarray):
        return 0.0 if torch.as_tensor(value).is_floating_point() else 0
    return value if isinstance(value, int | float) else None


def _depth(value: Any) -> int:
    if isinstance(value, Tensor | np.ndarray):
        return value.ndim
    return 1 + _depth(value[0]) if isinstance(value, list | tuple) and value else 0


def _token_lengths(example: Mapping[str, Any]) -> set[int]:
    """Returns the lengths of its plain sequences of tokens."""
    return {
        len(value)
        for name, value in example.items()
        if _is_sequence(name, value) and _depth(value) == 1
    }


def _lengths(example: Mapping[str, Any]) -> dict[str, int]:
    """Returns how long the sequences of an example are, by name; of several in one, the longest."""
    tokens = _token_lengths(example)
    found = {}
    for name, value in example.items():
        if not _is_sequence(name, value) or _number(value) is None:
            continue
        depth = _depth(value)
        if depth == 1 or (depth == 2 and len(value) in tokens):  # a token each, or a box for each
            found[name] = len(value)
        elif depth == 2:  # the options of a question
            found[name] = max(map(len, value))
    return {name: length for name, length in found.items() if length}


def _longer(value: Any, length: int, tokens: set[int]) -> Any:
    """Repeats a sequence up to a length; of several in one, each."""
    if _depth(value) == 2 and len(value) not in tokens:
        if isinstance(value, Tensor | np.ndarray):
            return value[:, np.arange(length) % value.shape[1]]
        return [_longer(part, length, tokens) if len(part) else part for part in value]
    if isinstance(value, Tensor | np.ndarray):
        return value[np.arange(length) % len(value)]
    return (list(value) * (-(-length // len(value))))[:length]


# ---- Coins ----


Seeds = Callable[[int], list[list[int]]]
"""Returns three seeds, below 2**63, for each of so many items."""


def secret_seeds(count: int) -> list[list[int]]:
    """Return seeds from the entropy of the operating system; no seed of a script matters."""
    words = np.frombuffer(os.urandom(24 * count), dtype=np.uint64) >> 1
    seeds: list[list[int]] = words.reshape(count, 3).tolist()
    return seeds


def repeatable_seeds(count: int) -> list[list[int]]:
    """Returns seeds that torch's global stream has next, for a run that a test repeats."""
    seeds: list[list[int]] = torch.randint(2**63 - 1, (count, 3)).tolist()
    return seeds


def with_own_coins(
    function: Callable[[Item], Made], items: Iterable[Item], seeds: Seeds = secret_seeds
) -> list[Made]:
    """Returns what a function makes of each item, under global random numbers of the item's own.

    The host's streams (torch's on the CPU, numpy's, Python's) are seeded anew for each item, and
    put back at the end. So what a collator or a data set draws, seeds or rewinds for one example is
    nothing to the next, nor to the model.

    Args:
        function: makes something of one item.
        items: of a draw.
        seeds: makes the seeds. They must be secret: who knows them knows which numbers an item
            would have had if another item had not been drawn.
    """
    items = list(items)
    made = []
    with keeping_random_state():
        each = zip(items, seeds(len(items)), strict=True)
        for item, (of_torch, of_python, of_numpy) in each:
            torch.default_generator.manual_seed(of_torch)
            random.seed(of_python)
            np.random.seed([of_numpy % 2**32, of_numpy >> 32])
            made.append(function(item))
    return made


# ---- Physical batches ----


class Stack(NamedTuple):
    """Rows of several examples or units that go into one physical batch."""

    batch: Rows
    members: list[int]  # whose they are, by their number


def stacked(
    rows: Sequence[Rows], pack: Callable[[list[int]], Iterable[list[int]]]
) -> Iterator[Stack]:
    """Stacks rows that are alike, the largest first.

    Args:
        rows: of each example or unit.
        pack: splits the numbers of some that are alike into those of one physical batch each.
    """
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for number, own in enumerate(rows):
        alike[_form(own)].append(number)
    for members in sorted(alike.values(), key=lambda one: _size(rows[one[0]]), reverse=True):
        for some in pack(members):
            batch = {
                name: torch.cat([rows[i][name] for i in some]) if isinstance(v, Tensor) else v
                for name, v in rows[some[0]].items()
            }
            yield Stack(batch, some)


def _form(rows: Rows) -> Hashable:
    """Returns what rows that are stacked have in common: all but the contents of tensors."""
    return tuple(
        (name, v.dtype, v.shape[1:]) if isinstance(v, Tensor) else (name, type(v), repr(v))
        for name, v in sorted(rows.items())
    )


def _size(rows: Rows) -> int:
    """Returns how many numbers one row has."""
    return sum(v[0].numel() for v in rows.values() if isinstance(v, Tensor))
