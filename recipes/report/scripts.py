"""The table of converted scripts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from recipes.common.markdown import plain, table

_HEADS = re.compile(r"; known heads end with [^.]*| Known are the heads [^.]*\.")  # long lists
TRAINED, REFUSED, FAILED = "trained", "refused", "failed"
EXAMPLE = "example"  # the unit of a run in which each row is one


def as_markdown(scripts: Sequence[Mapping[str, Any]]) -> str:
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
