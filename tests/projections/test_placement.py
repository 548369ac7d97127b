"""Which dimension of a weight is projected, and where nothing is."""

from typing import Any

import pytest

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.projections import Placement, ProjectionSide, Side, placements
from dp_grape_hf.projections.placement import projected_side

LEFT, RIGHT = Side.LEFT, Side.RIGHT


@pytest.mark.parametrize(
    ("shape", "input_dim", "expected"),
    [  # smaller, larger, input, output
        ((8, 32), 1, (LEFT, RIGHT, RIGHT, LEFT)),
        ((32, 8), 1, (RIGHT, LEFT, RIGHT, LEFT)),
        ((8, 8), 1, (RIGHT, RIGHT, RIGHT, LEFT)),
        ((8, 32), 0, (LEFT, RIGHT, LEFT, RIGHT)),  # Conv1D stores (in, out)
        ((32, 8), 0, (RIGHT, LEFT, LEFT, RIGHT)),  # an embedding: words are its input
        ((8, 8), 0, (LEFT, LEFT, LEFT, RIGHT)),
    ],
)
def test_the_side_is_the_one_that_was_asked_for(
    shape: tuple[int, int], input_dim: int, expected: tuple[Side, ...]
) -> None:
    assert tuple(projected_side(shape, 3, side, input_dim) for side in ProjectionSide) == expected


@pytest.mark.parametrize("rank", [1, 7, 8, 9, 31, 32])
@pytest.mark.parametrize("side", ProjectionSide)
@pytest.mark.parametrize("shape", [(8, 32), (32, 8), (8, 8)])
def test_a_rank_that_would_save_nothing_leaves_the_weight_unprojected(
    shape: tuple[int, int], side: str, rank: int
) -> None:
    dimension = {
        "smaller": min(shape),
        "larger": max(shape),
        "input": shape[1],
        "output": shape[0],
    }[side]
    assert (projected_side(shape, rank, side) is None) == (rank >= dimension)


@pytest.mark.parametrize("shape", [(), (100,), (100, 100, 3, 3)])
def test_only_matrices_are_projected(shape: tuple[int, ...]) -> None:
    assert projected_side(shape, 1) is None
    assert placements({"w": shape}, {}) == {}


def test_a_placement_says_side_and_shape_of_p() -> None:
    shapes = {"wide": (8, 32), "tall": (32, 8), "small": (3, 40), "bias": (9,)}
    assert placements(shapes, 3) == {
        "wide": Placement(LEFT, 8, 3),
        "tall": Placement(RIGHT, 8, 3),
    }
    ranks = {"wide": 5, "tall": 8, "small": 39}
    assert placements(shapes, ranks, "input", {"tall": 0, "elsewhere": 0}) == {
        "wide": Placement(RIGHT, 32, 5),
        "tall": Placement(LEFT, 32, 8),
        "small": Placement(RIGHT, 40, 39),
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "projection_rank=0 must be at least 1"),
        (({"a": 2, "b": 0},), "projection_rank=0 of 'b' must be at least 1"),
        (({"a": 2},), "projection_rank has no rank for b"),
        (({"a": 2, "b": 2, "c": 2},), "projection_rank names c, which is not to be projected"),
        ((2, "right"), "projection_side='right' must be one of .'smaller', 'larger', 'in"),
        ((2, "input", {"b": -1}), "input_dim=-1 must be 0 or 1"),
    ],
)
def test_a_bad_argument_is_refused_with_its_name_and_value(
    arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(PrivacyError, match=message):
        placements({"a": (8, 9), "b": (9, 8)}, *arguments)


def test_an_unknown_side_is_refused_where_there_is_nothing_to_project() -> None:
    with pytest.raises(PrivacyError, match="projection_side=''"):
        placements({}, 2, "")
