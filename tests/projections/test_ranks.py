"""Ranks per layer: the first pattern counts."""

import pytest

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.projections import ranks_for

NAMES = [
    f"roberta.encoder.layer.{layer}.{module}.weight"
    for layer in (1, 10)
    for module in ("attention.self.query", "attention.output.dense", "output.dense")
]
SHAPES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(NAMES, (8, 32)),
    "roberta.encoder.layer.1.output.dense.bias": (8,),
}


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
def test_a_pattern_matches_names_modules_and_whole_parts_of_their_paths(
    pattern: str, matched: list[str]
) -> None:
    expected = {name: 3 if name in matched else 5 for name in NAMES}
    assert ranks_for(SHAPES, 5, {pattern: 3}) == expected


def test_the_first_pattern_counts() -> None:
    ranks = ranks_for(SHAPES, 1, {"layer.1.attention": 2, "layer.1": 3, "attention": 4})
    assert list(ranks.values()) == [2, 2, 3, 4, 4, 1]
    assert ranks_for(SHAPES, 7, {}) == dict.fromkeys(NAMES, 7)


@pytest.mark.parametrize(
    ("rank", "patterns", "message"),
    [
        (4, {"quer": 2}, "'quer': this pattern matches none .*layer.1.attention.self.query.weight"),
        (4, {"query": 2, "Attention": 2}, "'Attention': this pattern matches none"),
        (4, {"attention": 2, "query": 3}, "'query': all that .* put the narrower pattern first"),
        (4, {"*.bias": 2}, "matches none"),
    ],
)
def test_a_pattern_that_would_have_no_effect_is_refused(
    rank: int, patterns: dict[str, int], message: str
) -> None:
    with pytest.raises(PrivacyError, match=message):
        ranks_for(SHAPES, rank, patterns)


def test_not_all_names_of_a_large_model_are_listed() -> None:
    with pytest.raises(PrivacyError, match=r"layer\.19\.weight and 80 more\."):
        ranks_for({f"layer.{i}.weight": (8, 8) for i in range(100)}, 4, {"nothing": 2})
