"""Rows of the training data that are not examples: parts of one, or blocks of several.

Whose a row is is not written in it, so that this is a warning, of signs. Not seen are rows that
were made of a selection of a split and are fewer than the whole of it, and data that are no
``datasets.Dataset``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

logger = logging.getLogger(__name__)

_LOOKED_AT = 64  # rows, at most, that must all look like blocks
_TELLING = 8  # rows, at least: fewer may have one length by chance
_TOKENS = {"input_ids", "attention_mask", "token_type_ids", "special_tokens_mask", "labels"}
_ID, _MAPPING = "example_id", "overflow_to_sample_mapping"


def warn_of_rows(dataset: Any) -> None:
    """Warns of training data of which each row counts as an example and does not look like one.

    Args:
        dataset: of a ``datasets.Dataset`` columns and the first rows are read, without its
            transform; nothing else is looked at.
    """
    if not (hasattr(dataset, "column_names") and hasattr(dataset, "with_format")):
        return
    plain = dataset.with_format(None)
    if sign := _sign_of_parts(plain):
        logger.warning(
            "train_dataset %s: one example may be several rows, and epsilon protects a row. To "
            "protect the whole example, %sset privacy_unit_column='%s', and expected_batch_size to "
            "a number of examples.",
            sign,
            "" if _ID in plain.column_names else _KEEP,
            _ID,
        )
    elif _looks_packed(plain):
        logger.warning(
            "The first rows of train_dataset have one length, no padding, and begin in the middle "
            "of something: texts that were packed into blocks. A row then mixes texts of several "
            "people, and epsilon protects a row and nobody's text. Give each text a row of its own "
            "(truncation=True and no packing), or pack only what belongs to one person and keep "
            "who that is in a column, and set privacy_unit_column to its name. If each row is one "
            "example, nothing is wrong."
        )


_KEEP = (
    "keep its id where the rows are made, tokenized['example_id'] = [examples['id'][i] for i in "
    "tokenized['overflow_to_sample_mapping']], "
)


def _sign_of_parts(dataset: Any) -> str | None:
    """Says by what it shows that an example is several rows; None if nothing shows it.

    The numbers of a mapping begin anew with each batch that was tokenized, so that only neighbours
    can be compared.
    """
    columns = dataset.column_names
    if _ID in columns and len(dataset.unique(_ID)) < len(dataset):
        return f"has a column {_ID!r} with values that several rows share"
    if _MAPPING in columns and any(one == next_ for one, next_ in pairwise(dataset[_MAPPING])):
        return f"has a column {_MAPPING!r} that is the same in rows next to each other"
    source = _rows_of_source(dataset)
    if source is not None and source < len(dataset):
        return "has more rows than the split that it was made from"
    return None


def _rows_of_source(dataset: Any) -> int | None:
    """Returns how many rows the split had as it was loaded, if that is known."""
    split = (dataset.info.splits or {}).get(str(dataset.split))
    return None if split is None else split.num_examples


def _looks_packed(dataset: Any) -> bool:
    """Whether the first rows are those of a language model, in blocks of one length.

    Texts that were cut at one length begin alike, if their tokenizer marks the beginning, or are as
    many as there were; and what they are padded with is masked.
    """
    columns = set(dataset.column_names)
    if not {"input_ids"} <= columns <= _TOKENS or _rows_of_source(dataset) == len(dataset):
        return False
    rows: Mapping[str, list[Any]] = dataset[:_LOOKED_AT]
    ids = rows["input_ids"]
    if rows.get("labels", ids) != ids or len(ids) < _TELLING:
        return False
    masks = rows.get("attention_mask", [])
    return (
        len({len(row) for row in ids}) == 1
        and len({tuple(row[:1]) for row in ids}) > 1
        and all(all(mask) for mask in masks)
    )
