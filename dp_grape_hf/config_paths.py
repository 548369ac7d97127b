"""Places on this machine that a config names, and the same config without them."""

import os
import re
from collections.abc import Callable
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

OnHub = Callable[[str], bool]

_PLACE = re.compile(r"(name_or_path|_file|_path|_dir|^path|^dir|^file)$")
# Wherever it is written.
_PATH = re.compile(r"~\w*[/\\]|\.\.?/|(file|local):/|[A-Za-z]:[\\/]|\\\\\w|/[^/]+/[^/]")
_TEMPLATE = "chat_template"  # a text that may well begin with a slash


def is_hub_name(name: str) -> bool:
    """Whether a model's name can be one on the Hub: no path, and nothing that lies here."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not os.path.exists(name)


def without_paths(content: Any, on_hub: OnHub = is_hub_name, key: str = "") -> Any:
    """Returns the content of a config without the entries that name places on this machine.

    Args:
        content: what JSON holds.
        on_hub: whether a name can be one on the Hub.
        key: under which the content stands.
    """
    if isinstance(content, dict):
        items = [item for item in content.items() if not _is_place(*item, on_hub)]
        return {name: without_paths(value, on_hub, name) for name, value in items}
    if isinstance(content, list):
        return [without_paths(i, on_hub, key) for i in content if not _is_place(key, i, on_hub)]
    return content


def _is_place(key: str, value: Any, on_hub: OnHub) -> bool:
    """Whether a value is a path on this machine, or could be one of another, or its key is."""
    if _PATH.match(key):
        return True
    if not isinstance(value, str) or len(value) < 2 or key == _TEMPLATE:
        return False
    named = bool(_PLACE.search(key)) and not on_hub(value)
    return named or bool(_PATH.match(value)) or (os.path.isabs(value) and os.path.exists(value))
