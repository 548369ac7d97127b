"""Tables in Markdown, with the paper's numbers and ours side by side."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

NOT_RUN, BLANK = "not run", ""


def table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table."""
    first, *others = ["| " + " | ".join(map(plain, cells)) + " |\n" for cells in (head, *rows)]
    return "".join([first, "|---" * len(head) + "|\n", *others])


def bullets(texts: Iterable[str]) -> str:
    """Return a list."""
    return "".join(f"* {plain(text)}\n" for text in texts)


def plain(text: str) -> str:
    r"""Return text with Markdown characters escaped.

    >>> plain(".*query|key")
    '.\\*query\\|key'
    """
    return re.sub(r"[\\*|<]", r"\\\g<0>", text)


def beside(paper: Sequence[str], ours: Sequence[str]) -> list[str]:
    """Return cells that alternate between the paper's values and ours."""
    return [cell for pair in zip(paper, ours, strict=True) for cell in pair]


def difference(paper: Any, ours: Score | None) -> str:
    """Return how far our mean is above the paper's, in brackets; nothing if one is missing."""
    value = paper[0] if isinstance(paper, list) else paper
    if ours is None or not isinstance(value, (int, float)):
        return BLANK
    return f" ({ours[0] - value:+.1f})"


def headings(columns: Sequence[str]) -> list[str]:
    """Return the names of columns that alternate between the paper's values and ours."""
    return beside([f"{name}, paper" for name in columns], ["ours"] * len(columns))


def budget(epsilon: float | None) -> str:
    """Return an epsilon as text; ∞ for None."""
    return "∞" if epsilon is None else f"{epsilon:g}"


def counted(number: int, what: str) -> str:
    """Return a number and a noun, in the plural if needed."""
    return f"{number} {what}" + "s" * (number != 1)


Score = tuple[float, float | None, int]
"""A mean, its standard error (None of one value) and the number of values."""


def mean_and_error(values: Sequence[float]) -> Score:
    """Return the mean, its error and the number of values."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return statistics.mean(values), error, len(values)


def score_text(score: Sequence[Any] | None) -> str:
    """Return a mean, its standard error and the number of values as text."""
    if score is None:
        return NOT_RUN
    mean, error, count = score
    return f"{mean:.1f} [1]" if count == 1 else f"{mean:.1f} ± {error:.1f} [{count}]"


def shown(value: Any, missing: str = "n/a") -> str:
    """Return a value as a cell: None, a number, a text, a pair of mean and error, or a score."""
    if value is None:
        return missing
    if isinstance(value, list):
        return f"{value[0]} ± {value[1]}"
    if isinstance(value, tuple):
        return score_text(value)
    return str(value)
