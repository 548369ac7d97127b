"""Rows of a batch: their number, batches of some rows, and a row that runs alone."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from dp_grape_hf.errors import PrivacyError


def batch_size_of(inputs: Mapping[str, Any]) -> int:
    """Return B, the number of rows of all tensors of a batch.

    Raises:
        PrivacyError: if there is no tensor, if the numbers of rows differ, or if an input is a
            number or a container. Such an input may be computed from the whole batch.
    """
    for name, value in inputs.items():
        if not (value is None or isinstance(value, Tensor | bool | str)):
            raise PrivacyError(
                f"The batch holds {name!r} of type {type(value).__name__}, which has no sample "
                "dimension, so it may depend on several samples. Pass it to the model's "
                "constructor, or make it a tensor with one row per sample."
            )
    sizes = {k: v.shape[0] if v.dim() else 0 for k, v in inputs.items() if isinstance(v, Tensor)}
    if not sizes:
        raise PrivacyError(
            "The batch holds no tensor, so its samples are not known. Return at least one tensor "
            "with one row per sample from the data collator."
        )
    name, size = next(iter(sizes.items()))
    if others := [other for other in sizes if sizes[other] != size]:
        of_patches = ""
        if {"image_grid_thw", "video_grid_thw"} & sizes.keys():
            of_patches = (
                " Give patches one row per example too: pixel_values (B, P, d), of images of one "
                "size, and image_grid_thw (B, n, 3). In a batch of one example, images may have "
                "any size."
            )
        raise PrivacyError(
            "All tensors of a batch must have the samples in dimension 0. "
            f"{', '.join(map(repr, others))} and {name!r} have other leading sizes.{of_patches}"
        )
    return size


def rows_of(inputs: Mapping[str, Any], rows: Any) -> dict[str, Any]:
    """Return the batch of some rows of another batch.

    Args:
        inputs: a batch.
        rows: numbers of rows, a slice or a mask.
    """
    return {key: v[rows] if isinstance(v, Tensor) else v for key, v in inputs.items()}


def copies_of(inputs: Mapping[str, Any], size: int, sample: int = 0) -> dict[str, Any]:
    """Return a batch of copies of one sample."""
    return rows_of(inputs, [sample] * size)


def first_two(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch of the first two samples; a single sample is used twice."""
    return rows_of(inputs, [0, min(1, batch_size_of(inputs) - 1)])


_row_alone: ContextVar[int | None] = ContextVar("row_alone", default=None)


def row_alone() -> int | None:
    """Return the row that a module runs for alone; None if it runs for the batch."""
    return _row_alone.get()


@contextmanager
def running_alone(row: int) -> Iterator[None]:
    """Set ``row_alone`` inside."""
    token = _row_alone.set(row)
    try:
        yield
    finally:
        _row_alone.reset(token)
