"""Tables in Markdown, with the paper's numbers and ours side by side."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

NOT_RUN, BLANK = "not run", ""


def header(cells: Sequence[str]) -> list[str]:
    """Returns the first two lines of a table."""
    return [row(cells), "|---" * len(cells) + "|"]


def row(cells: Iterable[str]) -> str:
    """Returns a line of a table."""
    return "| " + " | ".join(map(plain, cells)) + " |"


def table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns a table, a line each."""
    return "\n".join([*header(head), *map(row, rows)]) + "\n"


def bullets(texts: Iterable[str]) -> list[str]:
    """Returns a list."""
    return [f"* {plain(text)}" for text in texts]


def plain(text: str) -> str:
    r"""Returns text in which patterns are no Markdown.

    >>> plain(".*query|key")
    '.\\*query\\|key'
    """
    return re.sub(r"[\\*|<]", r"\\\g<0>", text)


def beside(paper: Sequence[str], ours: Sequence[str]) -> list[str]:
    """Returns the cells of the paper, each in front of ours."""
    return [cell for pair in zip(paper, ours, strict=True) for cell in pair]


def difference(paper: Any, ours: Score | None) -> str:
    """Returns how far our mean is above the paper's, in brackets; nothing if one is missing."""
    value = paper[0] if isinstance(paper, list) else paper
    if ours is None or not isinstance(value, (int, float)):
        return BLANK
    return f" ({ours[0] - value:+.1f})"


def headings(columns: Sequence[str]) -> list[str]:
    """Returns the names of columns that have the paper's and ours."""
    return beside([f"{name}, paper" for name in columns], ["ours"] * len(columns))


def budget(epsilon: float | None) -> str:
    """Returns an epsilon, which is infinite if there is none."""
    return "∞" if epsilon is None else f"{epsilon:g}"


def counted(number: int, what: str) -> str:
    """Returns how many of a thing there are."""
    return f"{number} {what}" + "s" * (number != 1)


Score = tuple[float, float | None, int]
"""A mean, its standard error (None of one value) and the number of values."""


def mean_and_error(values: Sequence[float]) -> Score:
    """Returns the mean, its error and the number of values."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return statistics.mean(values), error, len(values)


def score_text(found: Sequence[Any] | None) -> str:
    """Returns a mean, its error and their number."""
    if found is None:
        return NOT_RUN
    mean, error, count = found
    return f"{mean:.1f} [1]" if count == 1 else f"{mean:.1f} ± {error:.1f} [{count}]"


def shown(value: Any, missing: str = "n/a") -> str:
    """Returns a cell: nothing, a number or a word, mean and error, or those of so many runs."""
    if value is None:
        return missing
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return f"{value[0]} ± {value[1]}"
    if isinstance(value, tuple):
        return score_text(value)
    return str(value)
