"""Collation of each example alone, so that no row depends on other examples.

A collator that receives a batch may use all of it. For instance, it pads to the longest example,
drops a column that is missing in the first, or uses one random crop for all. So a collator never
receives a batch here. Each example (or each privacy unit with all its examples) is collated
separately, with separately seeded random numbers. Rows of equal form are stacked into physical
batches.

Rows would rarely have equal forms if each kept its own length. Only the collator knows how it pads.
So it receives the example together with a companion: the same example, with its sequences repeated
up to the next length of a public grid. The companion's row is dropped. The length of a row is then
a function of the example's length.

Shapes: k rows of an example (1) or of a privacy unit.
"""

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
"""The collated rows of one example or unit: name -> tensor (k, ...), or another object."""


@dataclass(frozen=True)
class Grid:
    """The lengths to which sequences are padded: a public function of the sequence's length.

    Args:
        longest: number of positions of the model; None if it has no limit.
        parts: number of equal parts between two powers of 2. More parts mean less padding and more
            physical batches per step.

    >>> [Grid()(n) for n in (3, 8, 9, 13, 17, 33, 65, 129, 300, 512)]
    [8, 8, 12, 16, 24, 48, 96, 192, 384, 512]
    >>> [Grid(longest=500, parts=1)(n) for n in (8, 9, 17, 65, 300, 512)]
    [8, 16, 32, 128, 500, 512]
    """

    longest: int | None = None
    parts: int = 2

    def __call__(self, length: int) -> int:
        """Return the next length of the grid: a multiple of 4, or ``longest``.

        A length beyond ``longest`` is padded as if there was no limit.
        """
        step = max(4, 2 ** (length - 1).bit_length() // 2 // self.parts)
        padded = max(8, -(-length // step) * step)
        return padded if self.fits(padded) or not self.fits(length) else self.longest or padded

    def fits(self, length: int) -> bool:
        """Return whether the model has at least ``length`` positions."""
        return self.longest is None or length <= self.longest


@dataclass(frozen=True)
class RowCollator:
    """Collate one example, or the examples of one privacy unit, without any other example.

    Args:
        collator: the user's collator; makes a batch of a list of examples.
        grid: the lengths to which sequences are padded.

    Guarantee:
        Names, types, shapes and contents of the rows are a function of these examples, the
        collator, the grid and the global random numbers.

    Raises:
        PrivacyError: when called, if the collator does not return one row for each example.
    """

    collator: Callable[[list[Any]], Any]
    grid: Grid = Grid()

    def __call__(self, examples: Sequence[Any]) -> Rows:
        """Return the rows (k, ...) of k examples."""
        for companion in _companions(examples, self.grid):
            try:
                batch = self.collator([*map(_copy, examples), companion])
                rows = _first(batch, len(examples), of=len(examples) + 1)
            except Exception:  # for instance, the collator pads no labels, and they need none
                continue
            if self.grid.fits(_positions(rows)):
                return rows
        return _first(self.collator([*map(_copy, examples)]), len(examples), of=len(examples))


def _first(batch: Any, count: int, of: int) -> Rows:
    """Return the first ``count`` rows of a batch that was made of ``of`` examples.

    Raises:
        PrivacyError: if the batch is no mapping, or does not have ``of`` rows.
    """
    if not isinstance(batch, Mapping):
        raise PrivacyError(
            f"The data collator returned a {type(batch).__name__}. Return a mapping of the names "
            "of the model's inputs to tensors with one row for each example."
        )
    if others := [n for n, v in batch.items() if isinstance(v, Tensor) and v.shape[:1] != (of,)]:
        raise PrivacyError(
            f"The data collator receives one example at a time, and returned {others[0]!r} with "
            f"{'no row' if batch[others[0]].dim() == 0 else 'another number of rows'}. {OTHER_ROWS}"
        )
    return rows_of(batch, slice(count))


OTHER_ROWS = (
    "A row is then not an example, so clipping a row does not bound an example. Turn packing off, "
    "and return one row for each example, with all its patches or parts. For pairs of texts (a "
    "chosen and a rejected answer) return (B, 2, T), and use a model that reads both, such as "
    "those ForMultipleChoice."
)


def _positions(rows: Rows) -> int:
    """Return the largest size of the integer tensors (tokens), apart from the number of rows."""
    tokens = (v for v in rows.values() if isinstance(v, Tensor) and not v.is_floating_point())
    return max((size for value in tokens for size in value.shape[1:]), default=0)


def _copy(example: Any) -> Any:
    """Return a copy of an example: some collators remove labels from it."""
    return dict(example) if isinstance(example, dict) else example


# ---- Companions ----


def _companions(examples: Sequence[Any], grid: Grid) -> Iterator[dict[str, Any]]:
    """Yield the first example with longer sequences: first with longer labels, then without."""
    if not all(isinstance(example, Mapping) for example in examples):
        return
    each = [_sequences(example) for example in examples]
    targets = {
        name: grid(max(found[name].length for found in each if name in found)) for name in each[0]
    }
    longer = frozenset(name for name, target in targets.items() if target > each[0][name].length)
    unlabelled = frozenset(name for name in longer if not _is_label(name))
    for names in dict.fromkeys((longer, unlabelled)):
        if names:
            yield {
                n: _longer(v, targets[n], each[0][n].has_options) if n in names else v
                for n, v in examples[0].items()
            }


def _is_label(name: str) -> bool:
    return "label" in name


def _is_sequence(name: str, value: Any) -> bool:
    """Return whether a value may be a sequence of positions, judged by its name.

    Labels of floating-point numbers are none: there is one for each class.
    """
    named = name.endswith(("_ids", "_mask", "_masks", "labels", "bbox", "input_values"))
    return named and not (_is_label(name) and isinstance(_number(value), float))


def _number(value: Any) -> Any:
    """Return the first number of a nested sequence, or 0 of a tensor's type; None without one."""
    while isinstance(value, list | tuple):
        value = value[0] if value else None
    if isinstance(value, Tensor | np.ndarray):
        return 0.0 if torch.as_tensor(value).is_floating_point() else 0
    return value if isinstance(value, int | float) else None


def _depth(value: Any) -> int:
    if isinstance(value, Tensor | np.ndarray):
        return value.ndim
    return 1 + _depth(value[0]) if isinstance(value, list | tuple) and value else 0


class _Sequence(NamedTuple):
    length: int  # of the longest of several options
    has_options: bool


def _sequences(example: Mapping[str, Any]) -> dict[str, _Sequence]:
    """Return the sequences of an example by name, without empty ones."""
    values = {name: value for name, value in example.items() if _is_sequence(name, value)}
    tokens = {len(value) for value in values.values() if _depth(value) == 1}
    found = {}
    for name, value in values.items():
        # Otherwise there is a number for each token, or a box.
        has_options = _depth(value) == 2 and len(value) not in tokens
        if _depth(value) in (1, 2) and _number(value) is not None:
            length = max(map(len, value)) if has_options else len(value)
            found[name] = _Sequence(length, has_options)
    return {name: sequence for name, sequence in found.items() if sequence.length}


def _longer(value: Any, length: int, has_options: bool) -> Any:
    """Repeat a sequence, or each of several options, up to a length."""
    if has_options:
        if isinstance(value, Tensor | np.ndarray):
            return value[:, np.arange(length) % value.shape[1]]
        return [_longer(part, length, False) if len(part) else part for part in value]
    if isinstance(value, Tensor | np.ndarray):
        return value[np.arange(length) % len(value)]
    return (list(value) * (-(-length // len(value))))[:length]


# ---- Random numbers of each example ----


Seeds = Callable[[int], list[list[int]]]
"""A function that returns three seeds below 2**63 for each of ``count`` items."""


def secret_seeds(count: int) -> list[list[int]]:
    """Return seeds from the entropy of the operating system, independent of any seed set before."""
    words = np.frombuffer(os.urandom(24 * count), dtype=np.uint64) >> 1
    seeds: list[list[int]] = words.reshape(count, 3).tolist()
    return seeds


def repeatable_seeds(count: int) -> list[list[int]]:
    """Return seeds from torch's global stream, for a run that a test repeats."""
    seeds: list[list[int]] = torch.randint(2**63 - 1, (count, 3)).tolist()
    return seeds


def with_separate_seeds(
    function: Callable[[Item], Made], items: Iterable[Item], seeds: Seeds = secret_seeds
) -> list[Made]:
    """Apply a function to each item, with separately seeded global random numbers.

    The global streams of the host (torch's on the CPU, numpy's, Python's) are seeded anew for each
    item, and restored at the end. So the random numbers that a collator or a data set draws or
    seeds for one example influence neither the next example nor the model.

    Args:
        function: computes the result of one item.
        items: the items of a sampled batch.
        seeds: makes the seeds. They must be secret: anyone who knows them knows the random numbers
            that an item would have had if another item had not been sampled.

    Returns:
        The results, in the order of the items.
    """
    items = list(items)
    results = []
    with keeping_random_state():
        each = zip(items, seeds(len(items)), strict=True)
        for item, (of_torch, of_python, of_numpy) in each:
            torch.default_generator.manual_seed(of_torch)
            random.seed(of_python)
            np.random.seed([of_numpy % 2**32, of_numpy >> 32])
            results.append(function(item))
    return results


# ---- Physical batches ----


class Stack(NamedTuple):
    """Rows of several examples or units, stacked into one physical batch."""

    batch: Rows
    members: list[int]  # numbers of the examples or units, in the order of the rows


def stacked(
    rows: Sequence[Rows], pack: Callable[[list[int]], Iterable[list[int]]]
) -> Iterator[Stack]:
    """Stack rows of equal form into physical batches, the largest rows first.

    Args:
        rows: the rows of each example or unit.
        pack: splits the numbers of examples or units of equal form into physical batches.
    """
    by_form: dict[Hashable, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        by_form[_form(row)].append(number)
    for members in sorted(by_form.values(), key=lambda one: _size(rows[one[0]]), reverse=True):
        for rows_of_batch in pack(members):
            batch = {
                name: torch.cat([rows[i][name] for i in rows_of_batch])
                if isinstance(v, Tensor)
                else v
                for name, v in rows[rows_of_batch[0]].items()
            }
            yield Stack(batch, rows_of_batch)


def _form(rows: Rows) -> Hashable:
    """Return everything about rows except the contents and number of rows of their tensors."""
    return tuple(
        (name, v.dtype, v.shape[1:]) if isinstance(v, Tensor) else (name, type(v), repr(v))
        for name, v in sorted(rows.items())
    )


def _size(rows: Rows) -> int:
    """Return how many numbers the first row has."""
    return sum(v[0].numel() for v in rows.values() if isinstance(v, Tensor))
