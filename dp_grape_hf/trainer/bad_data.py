"""Notes about the training data, added to errors of other libraries.

The error itself does not change. A note describes examples by names and types only: errors reach
logs, where values and sizes of private data must not appear.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from dp_grape_hf.errors import PrivacyError

_COMPARED = 64  # examples, at most, that are compared with the first
_OF_DATA = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError)
_OF_THE_MACHINE = ("not enough memory", "out of memory", "cuda error")


@contextmanager
def explaining_bad_data(dataset: Any, doing: str) -> Iterator[None]:
    """Context that adds a note about the training data to an error of data, collator or model.

    The note describes the first example, the first one with another form, and what to do. Errors of
    files, of devices, of memory and of missing implementations get no note, and errors of this
    package only if labels are text.

    Args:
        dataset: the training data.
        doing: the beginning of the note, such as "Fetching a batch".
    """
    try:
        yield
    except PrivacyError as error:
        if _has_text_labels(_first(dataset)):
            error.add_note(_OF_TEXT_LABELS)
        raise
    except (NotImplementedError, torch.OutOfMemoryError):
        raise
    except _OF_DATA as error:
        said = str(error)
        if not any(words in said.lower() for words in _OF_THE_MACHINE):
            known = (note for words, note in _NOTES.items() if re.search(words, said))
            error.add_note(f"{doing} failed. {next(known, None) or _advice(dataset)}")
        raise


_NOTES = {
    r"DataLoader worker.*exited": (
        "A process that fetched examples died: it had too little memory, or the data set ended it. "
        "The ledger counts every release. Resume from the last checkpoint with "
        "resume_from_checkpoint=True, perhaps with dataloader_num_workers=0."
    ),
    r"\b0 elements|\bsize:? 0\b": (
        "An example has an empty input, such as a text without tokens, and the model cannot run "
        "it. Remove such examples from train_dataset, for instance by "
        "train_dataset.filter(lambda row: len(row['input_ids']) > 0), or give each of them one "
        "token, for instance the one that ends a text."
    ),
    r"^'(?!input_ids)\w+'$": (  # a KeyError
        "An example or a batch lacks a column. If train_dataset has it, set "
        "remove_unused_columns=False: the trainer removes columns that the model does not take, "
        "before a transform or the data collator reads them."
    ),
    r"Target -?\d+ is out of bounds": (
        "A label is not one of the model's classes, which count from 0. Load the model with the "
        "number of classes of the data, for instance by "
        "AutoModelForSequenceClassification.from_pretrained(name, num_labels=6)."
    ),
}
"""Pattern of an error -> the note."""

_OF_TEXT_LABELS = (
    "The labels of train_dataset are text. Number them, for instance by "
    "train_dataset.class_encode_column('label') of the library datasets."
)


def _first(dataset: Any) -> Mapping[str, Any]:
    """Return the first example; an empty mapping if it cannot be fetched."""
    try:
        example = dataset[0]
    except Exception:
        return {}
    return example if isinstance(example, Mapping) else {}


def _has_text_labels(example: Mapping[str, Any]) -> bool:
    return any(isinstance(example.get(name), str) for name in ("label", "labels"))


def _advice(dataset: Any) -> str:
    first = _first(dataset)
    if "input_ids" not in first and any(isinstance(value, str) for value in first.values()):
        return (
            f"{described(dataset)} Its texts are not tokenized. Tokenize them first, for instance "
            "by train_dataset.map(lambda row: tokenizer(row['text'], truncation=True))."
        )
    if _has_text_labels(first):
        return _OF_TEXT_LABELS
    return (
        f"{described(dataset)} Each example must be a mapping with the names of the model's inputs "
        "and its labels, all of one form or padded by the data collator."
    )


def described(dataset: Any) -> str:
    """Return the form of the first example, and of the first of 64 with another form, as text.

    >>> described([{"x": [0.5, 1.5], "labels": 1}, {"x": [0.5]}])
    'train_dataset[0] is {x: list, labels: int}, and train_dataset[1] is {x: list}.'
    >>> described([{"x": [0.5, 1.5]}, {"x": [0.5]}])
    'train_dataset[0] is {x: list}, and train_dataset[1] has x of another size.'
    """
    said, sizes = _looked_at(dataset, 0)
    for index in range(1, min(len(dataset), _COMPARED)):
        other, others = _looked_at(dataset, index)
        if other == said and others != sizes:
            names = ", ".join(name for name in sizes if sizes[name] != others[name])
            other = f"has {names} of another size"
        elif other == said:
            continue
        return f"train_dataset[0] {said}, and train_dataset[{index}] {other}."
    return f"train_dataset[0] {said}."


def _looked_at(dataset: Any, index: int) -> tuple[str, dict[str, Any]]:
    """Return the form of an example as text, and the sizes in it, for comparison only."""
    try:
        example = dataset[index]
        if not isinstance(example, Mapping):
            return f"is {_form(example)}", {"items": _size(example)}
        forms = ", ".join(f"{name}: {_form(item)}" for name, item in example.items())
        return f"is {{{forms}}}", {str(name): _size(item) for name, item in example.items()}
    except Exception as error:
        return f"cannot be fetched ({type(error).__name__})", {}  # its text may contain values


def _form(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dim()}-dimensional {value.dtype}"
    return type(value).__name__


def _size(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    return len(value) if isinstance(value, list | tuple | Mapping) else None
