"""Render the tables of checks: models, transformers' own tests, and its example scripts.

``python -m tests.models.matrix`` and ``tests.host`` write the first two.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from recipes.common.markdown import plain, table

EXACT = ("full", "projected")
"""Conditions of the summary: those in float32 that every row has."""
ENGINES = ("layerwise", "functorch")  # the default one first
TRAINED = "trained"  # outcome of a script
EXAMPLE = "example"  # the unit of a run in which each row is one
_HEADS = re.compile(r"; known heads end with [^.]*| Known are the heads [^.]*\.")  # long lists

Line = Mapping[str, Any]
"""A model and a head, and its cells by condition and engine."""


def model_matrix(matrix: Sequence[Line]) -> str:
    """Returns the table as Markdown, one row per model and head, with the reasons below it."""
    reasons: list[str] = []

    def text(value: float | str | None) -> str:
        if isinstance(value, str):
            outcome, _, reason = value.partition(": ")
            if reason not in reasons:
                reasons.append(reason)
            return f"{outcome} ({reasons.index(reason) + 1})"
        return "" if value is None else f"{value:.0e}"

    lines = table(
        ["model", "head", *matrix[0]["cells"]],
        ([found["model"], found["head"], *map(text, found["cells"].values())] for found in matrix),
    )
    below = [f"{i}. {reason}" for i, reason in enumerate(reasons, start=1)]
    return "\n".join([lines, *below]).rstrip() + "\n"


def model_families(matrix: Sequence[Line]) -> str:
    """Returns one row per family: its heads, and its worst error with all weights and projected."""
    families: dict[str, list[Line]] = {}
    for found in matrix:
        families.setdefault(found["model"], []).append(found)

    def text(family: Sequence[Line], engine: str) -> str:
        columns = [f"{condition}, {engine}" for condition in EXACT]
        of_head = {found["head"]: [found["cells"][c] for c in columns] for found in family}
        refused = [
            head for head, found in of_head.items() if any(isinstance(v, str) for v in found)
        ]
        errors = [v for found in of_head.values() for v in found if isinstance(v, float)]
        worst = [f"{max(errors):.0e}"] if errors else []
        some = [f"refused: {', '.join(refused)}"] if refused else []
        return "; ".join(worst + some)

    return table(
        ["model", "heads", *ENGINES],
        (
            [name, ", ".join(found["head"] for found in family)]
            + [text(family, engine) for engine in ENGINES]
            for name, family in families.items()
        ),
    )


def host_tests(record: Mapping[str, Any]) -> str:
    """Return as a table what became of the tests that pass with the plain Trainer."""
    reasons = Counter(found["why"] for found in record["tests"].values())
    used = f"transformers {record['versions']['transformers']}, {record['date']}"
    title = f"Tests of transformers {record['checkout']} that pass with the `Trainer` of {used}"
    counts = {
        "all": sum(record["private"].values()),
        "pass with `DPGrapeTrainer`": record["private"]["passed"],
        **dict(reasons.most_common()),
    }
    return table([title, "tests"], ([what, str(number)] for what, number in counts.items()))


def converted_scripts(scripts: Sequence[Mapping[str, Any]]) -> str:
    """Returns a row for each script, and below the table what was said of some."""
    rows, said = [], list[str]()

    def marked(texts: Sequence[str]) -> str:
        said.extend(text for text in texts if text not in said)
        return "".join(f" [{said.index(text) + 1}]" for text in texts)

    for found in scripts:
        before, after = found["as_it_is"], found["private"]
        out, put_in = after["lines"]
        reasons = [run["reason"] for run in (before, after) if run["reason"]]
        result = after["outcome"]
        if result == TRAINED:
            what = "rows" if after["privacy_unit"] == EXAMPLE else "units"
            result = f"ε = {after['epsilon']:.3f} for {after['units']} {what}"
        rows.append(
            [
                found["script"],
                f"-{out} +{put_in}",
                before["outcome"] + marked(reasons[:1] if before["reason"] else []),
                result + marked([text for text in (after["reason"], *after["warnings"]) if text]),
                ", ".join(sorted({*before["provided"], *after["provided"]})),
            ]
        )
    notes = [f"{number}. {plain(_HEADS.sub('', text))}\n" for number, text in enumerate(said, 1)]
    found = table(["Script", "Lines", "As it is", "Converted", "Provided"], rows)
    return found + "".join(["\n" * bool(notes), *notes])
