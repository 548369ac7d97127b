"""Text tables that commands and runs print."""

import textwrap
from collections.abc import Iterable, Sequence
from itertools import zip_longest

WIDTH = 100  # characters of a line
_LEAST = 24  # least width of the last column, in characters


def table(rows: Iterable[Sequence[str]], align: str = "<", most: Sequence[int] = ()) -> str:
    """Return aligned lines, with two spaces between columns; long cells are wrapped.

    >>> table([["a", "1"], ["bcd", "10"]], "<>")
    'a     1\\nbcd  10\\n'

    Args:
        rows: the cells; all rows have the same number of cells.
        align: ``<`` or ``>`` for each column; the last one is repeated for further columns.
        most: the largest widths of the first columns, in characters. The last column gets the rest
            of ``WIDTH``.
    """
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[: len(most)] = map(min, widths, most)
    left = WIDTH - sum(widths[:-1]) - 2 * (len(widths) - 1)
    widths[-1] = min(widths[-1], max(left, _LEAST))
    sides = align.ljust(len(widths), align[-1])
    text = ""
    for row in rows:
        cells = [textwrap.wrap(c, w) or [""] for c, w in zip(row, widths, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            padded = (f"{p:{s}{w}}" for p, s, w in zip(parts, sides, widths, strict=True))
            text += "  ".join(padded).rstrip() + "\n"
    return text
