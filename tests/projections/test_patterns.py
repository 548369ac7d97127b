"""Patterns of names: the first that matches counts."""

import pytest

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.projections import first_matches

NAMES = [
    f"roberta.encoder.layer.{layer}.{module}.weight"
    for layer in (1, 10)
    for module in ("attention.self.query", "attention.output.dense", "output.dense")
]


def firsts(names: list[str], *patterns: str) -> dict[str, str | None]:
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
def test_a_pattern_matches_names_modules_and_parts_of_paths(
    pattern: str, matched: list[str]
) -> None:
    expected = {name: pattern if name in matched else None for name in NAMES}
    assert firsts(NAMES, pattern) == expected


def test_the_first_pattern_counts() -> None:
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
def test_a_pattern_that_would_have_no_effect_is_refused(patterns: list[str], message: str) -> None:
    with pytest.raises(PrivacyError, match=message):
        firsts(NAMES, *patterns)


def test_not_all_names_of_a_large_model_are_listed() -> None:
    with pytest.raises(PrivacyError, match=r"layer\.19\.weight and 80 more\."):
        firsts([f"layer.{i}.weight" for i in range(100)], "nothing")
