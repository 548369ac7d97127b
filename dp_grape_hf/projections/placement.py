"""Which dimension of a weight is projected, and by how many columns.

A weight of shape m x n is projected along one of its dimensions, of d numbers: a P of shape d x r
takes its place by r. By default that is the smaller dimension (of a square weight the one of the
layer's input), so that a projected gradient keeps r x max(m, n) numbers (paper, Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from fnmatch import fnmatchcase
from typing import NamedTuple

from dp_grape_hf.errors import Choice, PrivacyError, require

_MOST_LISTED = 20  # names in an error message


class ProjectionSide(Choice):
    """Which dimension of a matrix an argument may ask for, by its size or its part in the layer."""

    SMALLER = "smaller"
    LARGER = "larger"
    INPUT = "input"
    OUTPUT = "output"


class Side(Enum):
    """Which side of a gradient G (m x n) meets P."""

    LEFT = "left"  # P^T G, (r, n): rows are projected
    RIGHT = "right"  # G P, (m, r): columns are projected


def projected_dimension(
    shape: tuple[int, ...], side: str = ProjectionSide.SMALLER, input_dim: int = 1
) -> int:
    """Returns which dimension of a matrix is projected, 0 or 1.

    Args:
        shape: (m, n) as stored.
        side: ``smaller`` or ``larger`` dimension, of a square the input; or ``input``, ``output``.
        input_dim: which dimension is the input of the layer: 1 for ``nn.Linear``, which stores
            (out, in); 0 for transformers' ``Conv1D`` and for an embedding, whose input is a word.

    Raises:
        PrivacyError: for another ``input_dim``.
    """
    require(input_dim in (0, 1), f"{input_dim=} must be 0 or 1, a dimension of a matrix.")
    if side == ProjectionSide.OUTPUT:
        return 1 - input_dim
    if side == ProjectionSide.INPUT or shape[0] == shape[1]:
        return input_dim
    return int((shape[0] > shape[1]) == (side == ProjectionSide.SMALLER))


def projected_side(
    shape: tuple[int, ...], rank: int, side: str = ProjectionSide.SMALLER, input_dim: int = 1
) -> Side | None:
    """Returns the side to project, or None where projecting would save nothing.

    That is where the rank is not below the dimension that would be projected, as
    ``projected_dimension`` says, and of all that is not a matrix.

    >>> projected_side((8, 32), 4), projected_side((32, 8), 4), projected_side((8, 8), 4)
    (<Side.LEFT: 'left'>, <Side.RIGHT: 'right'>, <Side.RIGHT: 'right'>)
    >>> projected_side((8, 4), 4) is None
    True
    >>> projected_side((8, 4), 4, "larger")
    <Side.LEFT: 'left'>
    """
    if len(shape) != 2:
        return None
    dimension = projected_dimension(shape, side, input_dim)
    if shape[dimension] <= rank:
        return None
    return Side.RIGHT if dimension else Side.LEFT


class Placement(NamedTuple):
    """Where the P of one weight acts, and its shape (rows, rank)."""

    side: Side
    rows: int
    rank: int


def placements(
    shapes: Mapping[str, tuple[int, ...]],
    rank: int | Mapping[str, int],
    side: str = ProjectionSide.SMALLER,
    input_dims: Mapping[str, int] | None = None,
) -> dict[str, Placement]:
    """Returns parameter name -> ``Placement``, of those whose projection saves something.

    Args:
        shapes: parameter name -> shape.
        rank: r, or parameter name -> r for every matrix in ``shapes``.
        side: a name in ``ProjectionSide``.
        input_dims: parameter name -> its dimension that is the layer's input; 1 if not named.

    Raises:
        PrivacyError: for an unknown side or dimension, a rank below 1, and ranks that name other
            parameters or leave out a matrix.
    """
    known = list(ProjectionSide)
    require(side in known, f"projection_side={side!r} must be one of {known}.")
    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    if isinstance(rank, Mapping):
        missing, unknown = set(matrices) - rank.keys(), rank.keys() - shapes.keys()
        require(not missing, f"projection_rank has no rank for {', '.join(sorted(missing))}.")
        require(
            not unknown,
            f"projection_rank names {', '.join(sorted(unknown))}, which is not to be projected.",
        )
        for name, value in rank.items():
            require(value >= 1, f"projection_rank={value} of {name!r} must be at least 1.")
        ranks = dict(rank)
    else:
        require(rank >= 1, f"projection_rank={rank} must be at least 1.")
        ranks = dict.fromkeys(matrices, rank)
    found = {}
    for name in matrices:
        chosen = projected_side(shapes[name], ranks[name], side, (input_dims or {}).get(name, 1))
        if chosen is not None:
            rows = shapes[name][0 if chosen is Side.LEFT else 1]
            found[name] = Placement(chosen, rows, ranks[name])
    return found


# ---- How many columns each projection has: given by name patterns ----
#
# Ranks are public: made of names and numbers that the user gave, never of data.


def ranks_for(
    shapes: Mapping[str, tuple[int, ...]], rank: int, patterns: Mapping[str, int]
) -> dict[str, int]:
    """Returns the rank of every matrix: that of the first pattern which matches its name.

    A pattern is a shell pattern (``*``, ``?``, ``[...]``; ``*`` also matches dots). It is tried on
    the parameter's whole name, and on every run of the name's dotted parts, so that a module's path
    or any whole part of it is enough: ``query`` and ``attention.self`` match
    ``encoder.layer.1.attention.self.query.weight``, and ``layer.1`` does not match ``layer.10``.

    >>> shapes = {"h.0.attn.weight": (8, 8), "h.0.mlp.weight": (8, 32), "h.0.mlp.bias": (8,)}
    >>> ranks_for(shapes, 4, {"attn": 2})
    {'h.0.attn.weight': 2, 'h.0.mlp.weight': 4}

    Args:
        shapes: parameter name -> shape, of the parameters to project; only matrices get a rank.
        rank: r of those that no pattern matches.
        patterns: pattern -> r, in the order in which they are tried.

    Raises:
        PrivacyError: for a pattern that is never the first to match.
    """
    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    first = first_matches(matrices, patterns, "projection_rank", "the projected weights")
    return {name: rank if match is None else patterns[match] for name, match in first.items()}


def first_matches(
    names: Sequence[str], patterns: Iterable[str], option: str, what: str
) -> dict[str, str | None]:
    """Returns the first pattern that matches each name, as ``ranks_for`` matches them, or None.

    Args:
        names: of parameters.
        patterns: in the order in which they are tried.
        option: what the patterns were given for, in an error.
        what: the parameters are, in an error.

    Raises:
        PrivacyError: for a pattern that is never the first to match.
    """
    patterns = list(patterns)
    first = {name: _first_match(name, patterns) for name in names}
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


def _first_match(name: str, patterns: Iterable[str]) -> str | None:
    return next((pattern for pattern in patterns if _matches(name, pattern)), None)


def _matches(name: str, pattern: str) -> bool:
    return any(fnmatchcase(part, pattern) for part in _runs(name))


def _runs(name: str) -> Iterator[str]:
    parts = name.split(".")
    for start in range(len(parts)):
        for stop in range(start + 1, len(parts) + 1):
            yield ".".join(parts[start:stop])
