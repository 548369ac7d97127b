"""Trials of the data collator before the first release: it must collate each example alone.

It is given one example at a time (``mechanism.collation``), so that nothing it does can make one
example depend on another. A collator that was made to do more, as mixup is, would then do something
else than its user expects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers.trainer_utils import RemoveColumnsCollator

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.gradients import StateGuard, keeping_random_state, seed_all
from dp_grape_hf.mechanism import LogicalBatchCollator, RowCollator

_TRIED = 16  # examples that the data collator is tried on
_LOOKED_AT = 4  # examples, for each that a physical batch holds, of which one is put together


def batch_to_try(loader: DataLoader[Any], size: int) -> Any:
    """Returns a physical batch of examples from all over the data set of a training loader.

    Args:
        loader: the training loader.
        size: of a physical batch. Fewer are returned where not so many examples have like rows.
    """
    own_rows = _own_rows(loader)
    collator = LogicalBatchCollator(own_rows.collator, size, own_rows.grid)
    with keeping_random_state():
        seed_all(0)  # as in the other processes
        batches = collator(_examples_of(loader, _LOOKED_AT * size))
    return batches[max(range(len(batches)), key=batches.sizes.__getitem__)]


def examine_collator(loader: DataLoader[Any]) -> None:
    """Tries whether the collator makes of one example alone what it makes of it among others.

    Raises:
        PrivacyError: if it does not, or has a seed of its own.
    """
    own_rows = _own_rows(loader)
    own: Any = own_rows.collator
    own = own.data_collator if isinstance(own, RemoveColumnsCollator) else own
    if (seed := getattr(own, "seed", None)) is not None:
        raise PrivacyError(
            f"The data collator {type(own).__name__} draws its random numbers from {seed=}. "
            "Whoever knows them knows which draws went before, and so who was drawn. Leave the "
            "collator's seed at None: it then uses the stream that is seeded in secret."
        )
    refuse_other_rows(own_rows, _examples_of(loader, _TRIED))


def state_of(loader: DataLoader[Any]) -> StateGuard:
    """Returns what compares the state of data set and collator of a training loader."""
    dataset: Any = loader.dataset
    return StateGuard(train_dataset=dataset.dataset, data_collator=_own_rows(loader).collator)


def _own_rows(loader: DataLoader[Any]) -> RowCollator:
    assert isinstance(loader.collate_fn, LogicalBatchCollator)
    return loader.collate_fn.collate_rows


def _examples_of(loader: DataLoader[Any], count: int) -> list[Any]:
    dataset: Any = loader.dataset
    step = max(1, len(dataset) // count)
    return [dataset[i] for i in range(0, len(dataset), step)][:count]


def refuse_other_rows(own_rows: RowCollator, examples: Sequence[Any]) -> None:
    """Refuses a collator whose row of an example is another one, but for padding, among others.

    Its random numbers are not compared.

    Args:
        own_rows: collates an example by itself.
        examples: some examples.

    Raises:
        PrivacyError: it mixes examples or sorts them, say.
    """
    for one, other in zip(examples, [*examples[1:], *examples[:1]], strict=True):
        row, again = (_row(own_rows, [one], seed=seed) for seed in (0, 1))
        among = [_row(own_rows.collator, [one])]
        try:
            pairs = [
                _row(own_rows.collator, [one, other]),
                _row(own_rows.collator, [other, one], 1),
            ]
        except Exception:  # it cannot stack the two, say, and need not
            pairs = []
        for name, value in row.items():
            others = [found[name] for found in (*among, *pairs) if name in found]
            if _equal(value, again.get(name)) and any(_other_contents(value, x) for x in others):
                raise PrivacyError(
                    f"The data collator makes {name!r} of an example otherwise among others than "
                    "of that example alone: it mixes examples (mixup, say), sorts them, or fits "
                    "one to the other. Here each is collated by itself, so that nobody else's data "
                    "reach its row, and the collator would not do what it was made for. Transform "
                    "examples one by one, leave them in their order, and pad what is shorter."
                )


def _row(
    collate: Callable[[list[Any]], Mapping[str, Any]],
    examples: list[Any],
    index: int = 0,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Returns one row of what is made with given random numbers."""
    given = [dict(example) if isinstance(example, dict) else example for example in examples]
    with keeping_random_state():
        seed_all(seed)
        batch = collate(given)
    tensors = {name: v for name, v in batch.items() if isinstance(v, Tensor)}
    return {name: v[index] for name, v in tensors.items() if v.shape[:1] == (len(examples),)}


def _equal(left: Tensor, right: Tensor | None) -> bool:
    return right is not None and left.shape == right.shape and not _differ(left, right)


def _differ(left: Tensor, right: Tensor) -> bool:
    return not torch.allclose(left.double(), right.double(), rtol=0, atol=0, equal_nan=True)


def _other_contents(left: Tensor, right: Tensor) -> bool:
    """Whether two rows are not one and the same up to padding, at the end or at the beginning."""
    if left.dim() != right.dim():
        return True
    common = [min(sizes) for sizes in zip(left.shape, right.shape, strict=True)]
    parts = [
        tuple(
            slice(0, n) if ends else slice(size - n, size)
            for n, size in zip(common, x.shape, strict=True)
        )
        for ends in (True, False)
        for x in (left, right)
    ]
    return _differ(left[parts[0]], right[parts[1]]) and _differ(left[parts[2]], right[parts[3]])
