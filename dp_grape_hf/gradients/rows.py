"""Rows of a batch: how many there are, batches of some of them, and a row that runs alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from dp_grape_hf.errors import PrivacyError


def batch_size_of(inputs: Mapping[str, Any]) -> int:
    """Returns B, and refuses inputs that do not tell the samples apart.

    Raises:
        PrivacyError: if tensors disagree about B, or if there is a number or a container among
            the inputs: computed from the batch, it would carry one sample into another's loss.
    """
    for name, value in inputs.items():
        if not (value is None or isinstance(value, Tensor | bool | str)):
            raise PrivacyError(
                f"The batch holds {name!r} of type {type(value).__name__}, which has no dimension "
                "of samples. Hand it to the model at construction, or make it a tensor with one "
                "row per sample."
            )
    sizes = {k: v.shape[0] if v.dim() else 0 for k, v in inputs.items() if isinstance(v, Tensor)}
    if not sizes:
        raise PrivacyError("The batch holds no tensor, so it has no samples to tell apart.")
    name, size = next(iter(sizes.items()))
    if others := [other for other in sizes if sizes[other] != size]:
        of_patches = ""
        if {"image_grid_thw", "video_grid_thw"} & sizes.keys():
            of_patches = (
                " Patches go by example too: pixel_values (B, P, d), of images of one size, and "
                "image_grid_thw (B, n, 3); in a batch of one example they may be of any size."
            )
        raise PrivacyError(
            "All tensors of a batch must have the samples in dimension 0; "
            f"{', '.join(map(repr, others))} and {name!r} have other leading sizes.{of_patches}"
        )
    return size


def rows_of(inputs: Mapping[str, Any], rows: Any) -> dict[str, Any]:
    """Returns the batch of these rows of another: numbers, a slice or a mask."""
    return {key: v[rows] if isinstance(v, Tensor) else v for key, v in inputs.items()}


def copies_of(inputs: Mapping[str, Any], size: int, sample: int = 0) -> dict[str, Any]:
    """Returns a batch of copies of one sample."""
    return rows_of(inputs, [sample] * size)


def first_two(inputs: Mapping[str, Any], first: int = 0) -> dict[str, Any]:
    """Returns a batch of two samples, the first two or those from ``first``; one is taken twice."""
    size = batch_size_of(inputs)
    return rows_of(inputs, [first, min(first + 1, size - 1)])


_row_alone: ContextVar[int | None] = ContextVar("row_alone", default=None)


def row_alone() -> int | None:
    """Returns which row of a batch a module runs alone for, if one does."""
    return _row_alone.get()


@contextmanager
def running_alone(row: int) -> Iterator[None]:
    """Says that a module runs for one row of the batch inside."""
    token = _row_alone.set(row)
    try:
        yield
    finally:
        _row_alone.reset(token)
