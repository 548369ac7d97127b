"""Warnings about rows of the training data that may not be examples.

A row may be a part of an example, or a block of several examples. The data do not say so, so these
are warnings, based on signs. They are written to the terminal only, because they depend on the data
without noise. Some cases are not recognised: windows in random order, rows that were made from a
selection of a split and are fewer than the split, texts that were joined without a separator, and
data that are not a ``datasets.Dataset``.
"""

import logging
from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import Any

from torch.utils.data import Dataset

from dp_grape_hf.errors import PrivacyError

logger = logging.getLogger(__name__)

_LOOKED_AT = 64  # rows, at most
_LEAST_ROWS = 8  # rows, at least: fewer may have equal lengths by chance
_TOKENS = {"input_ids", "attention_mask", "token_type_ids", "special_tokens_mask", "labels"}
_ID, _MAPPING = "example_id", "overflow_to_sample_mapping"
_LENGTHS, _POSITIONS = "seq_lengths", "position_ids"
_COMPARED = 512  # rows, at most, whose neighbours are compared
_END = 512  # tokens at the beginning and at the end of a row that are compared
_PASSAGE = 8  # tokens
_WINDOWS = 32  # rows of one text, at most; what more rows have is a template
_SHARE, _FEW = 0.1, 3  # smallest share and number of rows


class Unseen(Dataset[Any]):
    """A data set with a length and without examples, to choose options before there are data.

    Args:
        rows: the number of examples.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> Any:
        raise PrivacyError(
            f"Row {row} does not exist: Unseen has only a number of rows, {self.rows}."
        )


def warn_of_rows(dataset: Any, tokenizer: Any = None) -> None:
    """Warn of training data whose rows do not look like examples.

    Args:
        dataset: the training data. Of a ``datasets.Dataset``, columns and first rows are read,
            without its transform; other data sets are not read.
        tokenizer: the tokenizer of the rows, or a processor or a collator that has one. It knows
            the tokens at the ends of a text. None if there is none.
    """
    if not (hasattr(dataset, "column_names") and hasattr(dataset, "with_format")):
        return
    plain = dataset.with_format(None)
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if sign := _sign_of_parts(plain):
        advice = _OF_PARTS if _ID in plain.column_names else _KEEP + _OF_PARTS
    elif sign := _sign_of_overlap(plain):
        advice = _OF_OVERLAP
    elif sign := _sign_of_packing(plain, tokenizer):
        advice = _OF_PACKING
    else:
        return
    logger.warning("train_dataset %s. Epsilon protects a row. %s", sign, advice)


_KEEP = (
    "Add the id of its example to each row, tokenized['example_id'] = [examples['id'][i] for i in "
    "tokenized['overflow_to_sample_mapping']]. "
)
_OF_PARTS = (
    "If an example is several rows, set privacy_unit_column='example_id' to protect whole "
    "examples, and expected_batch_size to a number of examples."
)
_ADD_PERSONS = (
    "add a column with the person of each row, and set privacy_unit_column to its name. If each "
    "row is one example, nothing is wrong."
)
_OF_OVERLAP = (
    "If rows are windows of one text, or questions about it, epsilon does not protect a whole text "
    f"or person: {_ADD_PERSONS}"
)
_OF_PACKING = (
    "If texts are packed into blocks, a row mixes texts of several people, and epsilon protects no "
    "person. Give each text a separate row (truncation=True and no packing), or pack texts of one "
    f"person only, {_ADD_PERSONS}"
)


def _sign_of_parts(dataset: Any) -> str | None:
    """Return the sign that an example is several rows; None if there is none.

    The numbers of a mapping start again with each tokenized batch, so only adjacent rows are
    compared.
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
    """Return the number of rows of the loaded split; None if it is unknown."""
    split = (dataset.info.splits or {}).get(str(dataset.split))
    return None if split is None else split.num_examples


def _sign_of_packing(dataset: Any, tokenizer: Any) -> str | None:
    """Return the sign that rows contain several texts; None if there is none."""
    columns = set(dataset.column_names)
    rows = dataset.select(range(min(_LOOKED_AT, len(dataset))))
    if _LENGTHS in columns and any(isinstance(x, list) and len(x) > 1 for x in rows[_LENGTHS]):
        return f"has a column {_LENGTHS!r} with several lengths in a row"
    positions = rows[_POSITIONS] if _POSITIONS in columns else []
    if any(isinstance(x, list) and list(pairwise(x)).count((0, 1)) > 1 for x in positions):
        return f"has a column {_POSITIONS!r} that begins again within a row"
    if not {"input_ids"} <= columns <= _TOKENS or _rows_of_source(dataset) == len(dataset):
        return None
    ids = list(rows["input_ids"])
    labels = list(rows["labels"]) if "labels" in columns else ids
    if labels != ids or len(ids) < _LEAST_ROWS or len(set(map(len, ids))) > 1:
        return None
    # Conversations contain ends of texts as well, but their lengths differ.
    if not any(_ends_inside(row, tokenizer) for row in ids):
        return None
    return "has rows of one length with the token in them that begins or ends a text"


def _ends_inside(ids: Sequence[int], tokenizer: Any) -> bool:
    """Return whether a token that begins or ends a text is inside a row, without padding."""
    names = ("bos_token_id", "cls_token_id", "eos_token_id")
    ends = {getattr(tokenizer, name, None) for name in names} - {None}
    outside = ends | {getattr(tokenizer, "pad_token_id", None)}
    inside = [place for place, token in enumerate(ids) if token not in outside]
    return bool(inside) and not ends.isdisjoint(ids[inside[0] : inside[-1]])


def _sign_of_overlap(dataset: Any) -> str | None:
    """Return the sign that adjacent rows share a passage; None if they do not.

    A passage that distant rows share as well is a template or a prompt, and is not a sign.
    """
    if "input_ids" not in dataset.column_names:
        return None
    rows = dataset.select(range(min(_COMPARED, len(dataset))))["input_ids"]
    rows_with: dict[int, list[int]] = {}
    for number, ids in enumerate(rows):
        for passage in _passages(ids):
            rows_with.setdefault(passage, []).append(number)
    adjacent = (found for found in rows_with.values() if found[-1] - found[0] == len(found) - 1)
    most = min(_WINDOWS, len(rows) // 2)
    shared = {number for found in adjacent if len(found) <= most for number in found[1:]}
    if len(shared) < max(_FEW, _SHARE * len(rows)):
        return None
    return "has rows that overlap: many have a passage of the row before them"


def _passages(ids: Any) -> set[int]:
    """Return hashes of the passages at the ends of a row, without padding."""
    if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
        return set()
    padding = sum(1 for _ in takewhile(lambda token: token == ids[-1], reversed(ids)))
    ids = ids[: len(ids) - padding]
    found = set()
    for part in (ids[:_END], ids[max(_END, len(ids) - _END) :]):
        runs = zip(*(part[start:] for start in range(_PASSAGE)), strict=False)
        found |= {hash(run) for run in runs if len(set(run)) > _PASSAGE // 2}
    return found
