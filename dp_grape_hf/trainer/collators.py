"""What is tried on the data collator before the first release.

Clipping bounds what a row contributes. So a row must be one example and hold nothing of the others
in its batch, its loss must not depend on how far the batch is padded, and where several rows are
one privacy unit, they must stay in order. Random numbers that rows share are found in
``per_sample``.

Shapes: B samples in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from transformers.trainer_utils import RemoveColumnsCollator

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.mechanism import LogicalBatchCollator
from dp_grape_hf.per_sample import (
    IN_COMPANY,
    keeping_random_state,
    refuse_shared_collation,
    seed_all,
)

EXAMINED = 16  # examples that the data collator is tried on before training
ORDERED = 64  # examples that it must keep in order, where that matters


OTHER_ROWS = (
    "The data collator made other rows than it was given examples, so a row is not an example and "
    "its clipping bounds nothing. Turn packing off; of examples that are pairs (a chosen and a "
    "rejected answer), make one row each, (B, 2, T), for a model that sees both at once, as those "
    "ForMultipleChoice do."
)


def collated_examples(loader: DataLoader[Any], count: int) -> Any:
    """Returns a batch of examples from all over the data set of a training loader."""
    with keeping_random_state():
        return _collator_of(loader)(_examples_of(loader, count))


def examine_collator(
    losses: Callable[[Any], Tensor],
    loader: DataLoader[Any],
    low_precision: bool,
    units: bool = False,
) -> None:
    """Tries the collator on a few examples: it must not make examples depend on each other.

    Args:
        losses: a batch -> one loss per sample, (B,), without dropout.
        loader: the training loader.
        low_precision: whether weights or matrix products are rounded to 16 bits.
        units: whether several examples are one privacy unit, so that their order matters.

    Raises:
        PrivacyError: if an example shows in another's row, the loss depends on padding, or the
            collator has a seed of its own.
    """
    examples, collate = _examples_of(loader, EXAMINED), _collator_of(loader)
    own: Any = collate
    own = own.data_collator if isinstance(own, RemoveColumnsCollator) else own
    if (seed := getattr(own, "seed", None)) is not None:
        raise PrivacyError(
            f"The data collator {type(own).__name__} draws its random numbers from {seed=}. "
            "Whoever knows them knows which draws went before, and so who was drawn. Leave the "
            "collator's seed at None: it then uses the stream that is seeded in secret."
        )
    if len(examples) >= 3:
        refuse_mixing_collator(collate, examples)
    refuse_shared_collation(collate, *shortest_and_longest(collate, examples))
    if units:
        refuse_reordering_collator(collate, _examples_of(loader, ORDERED))
    tolerance = IN_COMPANY[low_precision]
    refuse_padding_dependence(losses, collate, examples, tolerance=tolerance)


def _examples_of(loader: DataLoader[Any], count: int) -> list[Any]:
    dataset: Any = loader.dataset
    step = max(1, len(dataset) // count)
    return [dataset[i] for i in range(0, len(dataset), step)][:count]


def _collator_of(loader: DataLoader[Any]) -> Callable[[list[Any]], Any]:
    assert isinstance(loader.collate_fn, LogicalBatchCollator)
    return loader.collate_fn.collator


# ---- What it may not do ----

Collator = Callable[[list[Any]], Mapping[str, Any]]


def refuse_mixing_collator(collate: Collator, examples: Sequence[Any]) -> None:
    """Refuses a collator that puts one example into another's row, as mixup does.

    Args:
        collate: the data collator.
        examples: at least three examples.
    """
    first, second, third = examples[:3]
    with_second, with_third = (_collate(collate, [first, other]) for other in (second, third))
    for key, left in with_second.items():
        right = with_third.get(key)
        if not (isinstance(left, Tensor) and isinstance(right, Tensor)) or left.dim() == 0:
            continue
        if len(left) != 2:
            raise PrivacyError(OTHER_ROWS)
        # Equal numbers; NaN, which is not equal to itself, is no sign of mixing.
        if left.shape == right.shape and not torch.allclose(
            left[0], right[0], rtol=0, atol=0, equal_nan=True
        ):
            raise PrivacyError(
                f"The data collator makes {key!r} of one example depend on the other examples of "
                "its batch (mixup, say). An example would then contribute to several rows, and "
                "clipping rows would not bound it. Transform examples one by one."
            )


def refuse_reordering_collator(collate: Collator, examples: Sequence[Any]) -> None:
    """Refuses a collator whose rows are not in the order of its examples, or may not be.

    Where several rows are one privacy unit, they are told by their places.

    Args:
        collate: the data collator.
        examples: some examples, as different as the data has them; nothing is shown by one.
    """
    if len(examples) < 2:
        return
    rows, again = (_collate(collate, list(examples), seed=seed) for seed in (0, 1))
    backwards = _collate(collate, list(examples)[::-1])
    shown = False
    for key, value in rows.items():
        if not isinstance(value, Tensor) or value.dim() == 0 or not torch.equal(value, again[key]):
            continue  # of no sample, or drawn at random
        if not torch.equal(value.flip(0), backwards[key]):
            raise PrivacyError(
                f"The data collator gives {key!r} its rows in another order than that of the "
                "examples (sorted by length, say), so it is not known which of them are one "
                "privacy unit. Leave the order as it is."
            )
        shown |= not torch.equal(value, value.flip(0))
    if not shown:
        raise PrivacyError(
            "The data collator's rows are random, or alike for all examples that it was tried on, "
            "so it is not known whether they keep the order of the examples, and which of them are "
            "one privacy unit. Move what is random (masking, say) into the data set, or into the "
            "model."
        )


def refuse_padding_dependence(
    losses: Callable[[Mapping[str, Any]], Tensor],
    collate: Collator,
    examples: Sequence[Any],
    tolerance: float,
) -> None:
    """Refuses a model for which an example's loss depends on how far its batch is padded.

    The length of a batch is that of its longest example, so such a loss depends on batch-mates:
    with padding on the left and absolute positions, for example, or where padding is not masked.
    A collator that draws random numbers (it masks tokens, say) cannot be examined.

    Args:
        losses: a batch -> one loss per sample, (B,), without dropout.
        collate: the data collator.
        examples: some examples, of different lengths if there are any.
        tolerance: relative, for the comparison of two losses.
    """
    short, long = shortest_and_longest(collate, examples)
    alone, again = _collate(collate, [short]), _collate(collate, [short], seed=1)
    padded = _collate(collate, [short, long])
    tensors = {k: v for k, v in alone.items() if isinstance(v, Tensor) and v.dim() > 0}
    draws = any(not torch.equal(value, again[key]) for key, value in tensors.items())
    if draws or all(value.shape[1:] == padded[key].shape[1:] for key, value in tensors.items()):
        return
    by_itself, in_company = losses(alone)[0].float(), losses(padded)[0].float()
    if not torch.allclose(by_itself, in_company, rtol=tolerance, atol=0.1 * tolerance):
        raise PrivacyError(
            "The loss of an example changes when its batch is padded to the length of a longer "
            "example, so it depends on its batch-mates and clipping bounds nothing. Pad every "
            "example to one fixed length (padding='max_length'; for question answering there is no "
            "other way, as its softmax runs over the padding too), or pad on the right and give "
            "the model an attention_mask."
        )


def shortest_and_longest(collate: Collator, examples: Sequence[Any]) -> tuple[Any, Any]:
    """Returns two of some examples, by the size of what the collator makes of each alone."""

    def size(example: Any) -> int:
        leaves = tree_leaves(dict(_collate(collate, [example])))
        return max((t.numel() for t in leaves if isinstance(t, Tensor)), default=0)

    ordered = sorted(examples, key=size)
    return ordered[0], ordered[-1]


def _collate(collate: Collator, examples: list[Any], seed: int = 0) -> Mapping[str, Any]:
    """Collates with given random numbers, and leaves the random state as it was."""
    with keeping_random_state():
        seed_all(seed)
        return collate(examples)
