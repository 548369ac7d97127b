"""An extension of mkdocstrings: public names of subpackages, and examples in docstrings."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> (?:.+\n?)+", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Format all examples as code, and leave out ``__post_init__``."""

    def on_module_members(self, *, mod: griffe.Module, **kwargs: Any) -> None:
        """Take what a subpackage imports from its modules as public, if it has no ``__all__``."""
        if mod.is_init_module and not mod.exports:
            inside = f"{mod.path}."
            aliases = (m for m in mod.members.values() if isinstance(m, griffe.Alias))
            mod.exports = [m.name for m in aliases if m.target_path.startswith(inside)]

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Put code fences around examples outside of an ``Examples`` section."""
        if obj.name == "__post_init__":
            obj.docstring = None  # objects without a docstring are not shown
        if obj.docstring:
            obj.docstring.value = _EXAMPLE.sub(
                lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", obj.docstring.value
            )
