"""Tables of text, as commands and runs print them."""

import textwrap
from collections.abc import Iterable, Sequence
from itertools import zip_longest

WIDTH = 100  # characters of a line
_LEAST = 24  # of the last column, however wide the others are


def table(rows: Iterable[Sequence[str]], align: str = "<", most: Sequence[int] = ()) -> str:
    """Returns aligned lines, two spaces between columns; what does not fit goes on below its cell.

    >>> table([["a", "1"], ["bcd", "10"]], "<>")
    'a     1\\nbcd  10\\n'

    Args:
        rows: the cells, equally many in each row.
        align: ``<`` or ``>`` for each column; the last one holds for all columns that follow.
        most: how many characters wide the first columns may be; the last column may be as wide as
            ``WIDTH`` leaves it.
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
