"""An extension of mkdocstrings that formats the examples in docstrings."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> (?:.+\n?)+", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Format all examples as code, and leave out ``__post_init__``."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Put code fences around examples outside of an ``Examples`` section."""
        if obj.name == "__post_init__":
            obj.docstring = None  # objects without a docstring are not shown
        if obj.docstring:
            obj.docstring.value = _EXAMPLE.sub(
                lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", obj.docstring.value
            )
