"""What mkdocstrings is told of docstrings beside what is in them."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> (?:.+\n?)+", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Shows examples as code wherever they stand, and leaves out what nobody calls."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Puts fences around examples: only those in a section of their own have any."""
        if obj.name == "__post_init__":
            obj.docstring = None  # what has none is not shown
        if obj.docstring:
            obj.docstring.value = _EXAMPLE.sub(
                lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", obj.docstring.value
            )
