"""The dimension of a weight that is projected, and the number of columns of P.

A weight of shape m x n is projected along one of its dimensions, of size d, by a P of shape d x r,
which replaces d by r. A random P acts on the smaller dimension (for a square weight, on the
dimension of the layer's input), so a projected gradient has r x max(m, n) elements (paper,
Algorithm 1). Principal directions act on the dimension of the layer's input.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from fnmatch import fnmatchcase
from itertools import combinations
from typing import NamedTuple

from dp_grape_hf.errors import PrivacyError

_MOST_LISTED = 20  # largest number of names in an error message


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
    """Return parameter name -> ``Placement``, for parameters whose projection saves memory.

    A parameter is not projected if it is not a matrix, or if the rank is not below the dimension
    that would be projected.

    Args:
        shapes: parameter name -> shape as stored.
        rank: r.
        input_dims: parameter name -> the dimension of the layer's input. It is 0 for transformers'
            ``Conv1D`` and for an embedding, whose input is a word. By default it is 1, as for
            ``nn.Linear``, which stores (out, in).
        of_input: whether to project the dimension of the input, instead of the smaller one.

    >>> found = placements({"a": (8, 32), "b": (32, 8), "c": (8, 4), "d": (8,)}, 4)
    >>> {name: (place.side.value, place.rows) for name, place in found.items()}
    {'a': ('left', 8), 'b': ('right', 8)}
    """
    placed = {}
    for name, shape in shapes.items():
        if len(shape) != 2:
            continue
        by_input = of_input or shape[0] == shape[1]
        dimension = (input_dims or {}).get(name, 1) if by_input else int(shape[0] > shape[1])
        if rank < shape[dimension]:
            side = Side.RIGHT if dimension else Side.LEFT
            placed[name] = Placement(side, shape[dimension], rank)
    return placed


# ---- Patterns of names ----


def first_matches(
    names: Sequence[str], patterns: Iterable[str], option: str, what: str
) -> dict[str, str | None]:
    """Return the first pattern that matches each name, or None.

    A pattern is a shell pattern (``*``, ``?``, ``[...]``; ``*`` also matches dots). It must match
    the full parameter name, or a sequence of its dotted parts. So ``query`` and ``attention.self``
    match ``encoder.layer.1.attention.self.query.weight``, but ``layer.1`` does not match
    ``layer.10``.

    >>> first_matches(["h.0.attn.weight", "h.0.mlp.weight"], ["attn"], "option", "the weights")
    {'h.0.attn.weight': 'attn', 'h.0.mlp.weight': None}

    Args:
        names: the names of parameters.
        patterns: the patterns, in the order in which they are tried.
        option: the name of the option that has the patterns, for errors.
        what: a description of the parameters, for errors.

    Raises:
        PrivacyError: if a pattern is never the first to match.
    """
    patterns = list(patterns)
    first = {name: next((p for p in patterns if _matches(name, p)), None) for name in names}
    for pattern in (pattern for pattern in patterns if pattern not in first.values()):
        if any(_matches(name, pattern) for name in names):
            raise PrivacyError(
                f"{option}={pattern!r}: earlier patterns match everything that this pattern "
                "matches. The first match counts, so put the narrower pattern first."
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
