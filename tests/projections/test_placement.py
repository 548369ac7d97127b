"""Which dimension of a weight is projected, where nothing is; and patterns of names."""

import pytest

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.projections import Placement, Side, first_matches, placements

LEFT, RIGHT = Side.LEFT, Side.RIGHT


def projected_side(shape, rank, input_dim=1, of_input=False):
    found = placements({"w": shape}, rank, {"w": input_dim}, of_input=of_input)
    return found["w"].side if found else None


@pytest.mark.parametrize(
    ("shape", "input_dim", "expected"),
    [  # the smaller dimension, that of the input
        ((8, 32), 1, (LEFT, RIGHT)),
        ((32, 8), 1, (RIGHT, RIGHT)),
        ((8, 8), 1, (RIGHT, RIGHT)),
        ((8, 32), 0, (LEFT, LEFT)),  # Conv1D stores (in, out)
        ((32, 8), 0, (RIGHT, LEFT)),  # an embedding: words are its input
        ((8, 8), 0, (LEFT, LEFT)),
    ],
)
def test_the_side_is_the_smaller_dimension_or_the_input(shape, input_dim, expected):
    found = (projected_side(shape, 3, input_dim, of_input) for of_input in (False, True))
    assert tuple(found) == expected


@pytest.mark.parametrize("rank", [1, 7, 8, 9, 31, 32])
@pytest.mark.parametrize("of_input", [False, True])
@pytest.mark.parametrize("shape", [(8, 32), (32, 8), (8, 8)])
def test_a_rank_that_would_save_nothing_leaves_the_weight_unprojected(shape, of_input, rank):
    dimension = shape[1] if of_input else min(shape)
    assert (projected_side(shape, rank, of_input=of_input) is None) == (rank >= dimension)


@pytest.mark.parametrize("shape", [(), (100,), (100, 100, 3, 3)])
def test_only_matrices_are_projected(shape):
    assert placements({"w": shape}, 1) == {}


def test_a_placement_says_side_and_shape_of_p():
    shapes = {"wide": (8, 32), "tall": (32, 8), "small": (3, 40), "bias": (9,)}
    assert placements(shapes, 3) == {"wide": Placement(LEFT, 8, 3), "tall": Placement(RIGHT, 8, 3)}
    assert placements(shapes, 7, {"tall": 0, "elsewhere": 0}, of_input=True) == {
        "wide": Placement(RIGHT, 32, 7),
        "tall": Placement(LEFT, 32, 7),
        "small": Placement(RIGHT, 40, 7),
    }


NAMES = [
    f"roberta.encoder.layer.{layer}.{module}.weight"
    for layer in (1, 10)
    for module in ("attention.self.query", "attention.output.dense", "output.dense")
]


def firsts(names, *patterns):
    return first_matches(names, patterns, "option", "the weights")


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("*", NAMES),
        ("*.attention.*", [n for n in NAMES if "attention" in n]),
        ("attention", [n for n in NAMES if "attention" in n]),
        ("query", [n for n in NAMES if "query" in n]),
        ("qu?ry", [n for n in NAMES if "query" in n]),
        ("output.dense", [n for n in NAMES if "output" in n]),
        ("layer.[0-9]", NAMES[:3]),
        ("layer.1", NAMES[:3]),
        ("roberta.encoder.layer.10", NAMES[3:]),
        ("roberta.encoder.layer.1.*", NAMES[:3]),
        (NAMES[2], [NAMES[2]]),
        (NAMES[2].removesuffix(".weight"), [NAMES[2]]),
    ],
)
def test_a_pattern_matches_names_modules_and_parts_of_paths(pattern, matched):
    expected = {name: pattern if name in matched else None for name in NAMES}
    assert firsts(NAMES, pattern) == expected


def test_the_first_pattern_counts():
    one, two, three = patterns = "layer.1.attention", "layer.1", "attention"
    assert list(firsts(NAMES, *patterns).values()) == [one, one, two, three, three, None]
    assert firsts(NAMES) == dict.fromkeys(NAMES)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["quer"], "'quer': this pattern matches none .*layer.1.attention.self.query.weight"),
        (["query", "Attention"], "'Attention': this pattern matches none"),
        (["attention", "query"], "'query': earlier patterns .* put the narrower pattern first"),
    ],
)
def test_a_pattern_that_would_have_no_effect_is_refused(patterns, message):
    with pytest.raises(PrivacyError, match=message):
        firsts(NAMES, *patterns)


def test_not_all_names_of_a_large_model_are_listed():
    with pytest.raises(PrivacyError, match=r"layer\.19\.weight and 80 more\."):
        firsts([f"layer.{i}.weight" for i in range(100)], "nothing")
