"""The table of transformers' own tests of its Trainer, which ``python -m tests.host`` runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from recipes.common.markdown import table


def as_markdown(record: Mapping[str, Any]) -> str:
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
