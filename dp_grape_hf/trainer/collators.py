"""Checks of the data collator before the first update: an example must not depend on others.

The collator receives one example at a time (``mechanism.collation``), so it cannot mix examples. A
collator that is made to mix them, as for mixup, would not do what its user expects, so it raises an
error.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers.trainer_utils import RemoveColumnsCollator

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.gradients import StateGuard, keeping_random_state, seed_all
from dp_grape_hf.mechanism import LogicalBatchCollator, RowCollator

_TRIED = 16  # examples on which the data collator is tried
_LOOKED_AT = 4  # examples read for each example of the physical batch


def batch_to_try(loader: DataLoader[Any], size: int) -> Any:
    """Return a physical batch of examples that are spread over the data set of a training loader.

    Args:
        loader: the training loader.
        size: the number of rows. The batch has fewer if fewer examples have rows of equal shape.
    """
    row_collator = _row_collator(loader)
    collator = LogicalBatchCollator(row_collator.collator, size, row_collator.grid)
    with keeping_random_state():
        seed_all(0)  # the same seed in all processes
        batches = collator(_examples_of(loader, _LOOKED_AT * size))
    return batches[max(range(len(batches)), key=batches.sizes.__getitem__)]


def examine_collator(loader: DataLoader[Any]) -> None:
    """Check that the collator's row of an example does not depend on other examples.

    Raises:
        PrivacyError: the row depends on other examples, or the collator has a seed.
    """
    row_collator = _row_collator(loader)
    collator: Any = row_collator.collator
    collator = collator.data_collator if isinstance(collator, RemoveColumnsCollator) else collator
    if (seed := getattr(collator, "seed", None)) is not None:
        raise PrivacyError(
            f"The data collator {type(collator).__name__} draws its random numbers from {seed=}. "
            "Someone who knows the seed can tell which examples were sampled. Leave the "
            "collator's seed at None: it then uses the secret random stream."
        )
    refuse_other_rows(row_collator, _examples_of(loader, _TRIED))


def state_of(loader: DataLoader[Any]) -> StateGuard:
    """Return a guard of the state of data set and collator of a training loader."""
    dataset: Any = loader.dataset
    return StateGuard(train_dataset=dataset.dataset, data_collator=_row_collator(loader).collator)


def _row_collator(loader: DataLoader[Any]) -> RowCollator:
    assert isinstance(loader.collate_fn, LogicalBatchCollator)
    return loader.collate_fn.collate_rows


def _examples_of(loader: DataLoader[Any], count: int) -> list[Any]:
    dataset: Any = loader.dataset
    step = max(1, len(dataset) // count)
    return [dataset[i] for i in range(0, len(dataset), step)][:count]


def refuse_other_rows(row_collator: RowCollator, examples: Sequence[Any]) -> None:
    """Refuse a collator whose row of an example depends on other examples, except for padding.

    Entries that contain random numbers are not compared.

    Args:
        row_collator: collates each example alone.
        examples: some examples.

    Raises:
        PrivacyError: the collator mixes or sorts examples, for instance.
    """
    collator = row_collator.collator
    for one, other in zip(examples, [*examples[1:], *examples[:1]], strict=True):
        row, again = (_row(row_collator, [one], seed=seed) for seed in (0, 1))
        rows = [_row(collator, [one])]
        with suppress(Exception):  # for instance, the two cannot be stacked, and need not be
            rows += [_row(collator, [one, other]), _row(collator, [other, one], 1)]
        for name, value in row.items():
            others = [other_row[name] for other_row in rows if name in other_row]
            fixed = name in again and _equal(value, again[name])
            if fixed and not all(_equal_but_for_padding(value, x) for x in others):
                raise PrivacyError(
                    f"The data collator computes {name!r} of an example from other examples too: "
                    "it mixes examples (as mixup does), sorts them, or fits them to each other. "
                    "A private run collates each example alone. Use a collator that transforms "
                    "examples one by one, keeps their order, and pads shorter ones."
                )


def _row(
    collate: Callable[[list[Any]], Mapping[str, Any]],
    examples: list[Any],
    index: int = 0,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Return one row of a collated batch, with a fixed seed."""
    given = [dict(example) if isinstance(example, dict) else example for example in examples]
    with keeping_random_state():
        seed_all(seed)
        batch = collate(given)
    tensors = {name: v for name, v in batch.items() if isinstance(v, Tensor)}
    return {name: v[index] for name, v in tensors.items() if v.shape[:1] == (len(examples),)}


def _equal(left: Tensor, right: Tensor) -> bool:
    same = left.shape == right.shape
    return same and torch.allclose(left.double(), right.double(), rtol=0, atol=0, equal_nan=True)


def _equal_but_for_padding(left: Tensor, right: Tensor) -> bool:
    """Return whether two rows agree except for padding at the end or at the beginning."""
    if left.dim() != right.dim():
        return False
    common = [min(sizes) for sizes in zip(left.shape, right.shape, strict=True)]
    beginning = tuple(slice(0, n) for n in common)
    end = tuple(slice(-n, None) for n in common)
    return any(_equal(left[part], right[part]) for part in (beginning, end))
