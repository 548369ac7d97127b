"""The tables of supported models, which ``python -m tests.models.matrix`` computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recipes.common.markdown import table

EXACT = ("full", "projected")
"""Conditions of the summary: those in float32 that every row has."""
ENGINES = ("layerwise", "functorch")  # the default one first

Line = Mapping[str, Any]
"""A model and a head, and its cells by condition and engine."""


def render(matrix: Sequence[Line]) -> str:
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


def summarise(matrix: Sequence[Line]) -> str:
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
