"""Which dimension of a weight is projected, and by how many columns.

A weight of shape m x n is projected along one of its dimensions, of d numbers: a P of shape d x r
takes its place by r. By default that is the smaller dimension (of a square weight the one of the
layer's input), so that a projected gradient keeps r x max(m, n) numbers (paper, Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from dp_grape_hf.errors import Choice, require


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
        PrivacyError: for an unknown side or dimension.
    """
    _require_side(side)
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
    _require_side(side)
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


def _require_side(side: str) -> None:
    known = list(ProjectionSide)
    require(side in known, f"projection_side={side!r} must be one of {known}.")
