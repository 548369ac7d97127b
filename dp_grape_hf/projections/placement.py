"""The dimension of a weight that is projected, and the number of columns of P.

A weight of shape m x n is projected along one of its dimensions, of d numbers: a P of shape d x r
takes its place by r. Of a random P that is the smaller dimension (of a square weight the one of the
layer's input), so that a projected gradient keeps r x max(m, n) numbers (paper, Algorithm 1).
Principal directions are those of the layer's input.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from fnmatch import fnmatchcase
from itertools import combinations
from typing import NamedTuple

from dp_grape_hf.errors import PrivacyError, require

_MOST_LISTED = 20  # names in an error message


class Side(Enum):
    """The side of a gradient G (m x n) that P multiplies."""

    LEFT = "left"  # P^T G, (r, n): rows are projected
    RIGHT = "right"  # G P, (m, r): columns are projected


class Placement(NamedTuple):
    """The side on which the P of one weight acts, and its shape (rows, rank)."""

    side: Side
    rows: int
    rank: int


def placements(
    shapes: Mapping[str, tuple[int, ...]],
    rank: int,
    input_dims: Mapping[str, int] | None = None,
    *,
    of_input: bool = False,
) -> dict[str, Placement]:
    """Return parameter name -> ``Placement``, of those whose projection saves something.

    Nothing is saved where the rank is not below the dimension that would be projected, and of what
    is not a matrix.

    Args:
        shapes: parameter name -> shape as stored.
        rank: r.
        input_dims: parameter name -> its dimension that is the layer's input: 0 for transformers'
            ``Conv1D`` and for an embedding, whose input is a word; 1 if not named, as of
            ``nn.Linear``, which stores (out, in).
        of_input: whether the dimension of the input is projected, and not the smaller one.

    Raises:
        PrivacyError: for a rank below 1.

    >>> found = placements({"a": (8, 32), "b": (32, 8), "c": (8, 4), "d": (8,)}, 4)
    >>> {name: (place.side.value, place.rows) for name, place in found.items()}
    {'a': ('left', 8), 'b': ('right', 8)}
    """
    require(rank >= 1, f"projection_rank={rank} must be at least 1.")
    found = {}
    for name, shape in shapes.items():
        if len(shape) != 2:
            continue
        by_input = of_input or shape[0] == shape[1]
        dimension = (input_dims or {}).get(name, 1) if by_input else int(shape[0] > shape[1])
        if rank < shape[dimension]:
            side = Side.RIGHT if dimension else Side.LEFT
            found[name] = Placement(side, shape[dimension], rank)
    return found


# ---- Patterns of names ----


def first_matches(
    names: Sequence[str], patterns: Iterable[str], option: str, what: str
) -> dict[str, str | None]:
    """Return the first pattern that matches each name, or None.

    A pattern is a shell pattern (``*``, ``?``, ``[...]``; ``*`` also matches dots). It is tried on
    the parameter's whole name, and on every run of the name's dotted parts, so that a module's path
    or any whole part of it is enough: ``query`` and ``attention.self`` match
    ``encoder.layer.1.attention.self.query.weight``, and ``layer.1`` does not match ``layer.10``.

    >>> first_matches(["h.0.attn.weight", "h.0.mlp.weight"], ["attn"], "option", "the weights")
    {'h.0.attn.weight': 'attn', 'h.0.mlp.weight': None}

    Args:
        names: of parameters.
        patterns: in the order in which they are tried.
        option: what the patterns were given for, in an error.
        what: the parameters are, in an error.

    Raises:
        PrivacyError: for a pattern that is never the first to match.
    """
    patterns = list(patterns)
    first = {name: next((p for p in patterns if _matches(name, p)), None) for name in names}
    for pattern in (pattern for pattern in patterns if pattern not in first.values()):
        if any(_matches(name, pattern) for name in names):
            raise PrivacyError(
                f"{option}={pattern!r}: all that this pattern matches is matched by one "
                "before it. The first match counts: put the narrower pattern first."
            )
        listed = ", ".join(names[:_MOST_LISTED])
        more = len(names) - _MOST_LISTED
        raise PrivacyError(
            f"{option}={pattern!r}: this pattern matches none of {what}: "
            f"{listed}{f' and {more} more' if more > 0 else ''}."
        )
    return first


def _matches(name: str, pattern: str) -> bool:
    parts = name.split(".")
    return any(
        fnmatchcase(".".join(parts[start:stop]), pattern)
        for start, stop in combinations(range(len(parts) + 1), 2)
    )
