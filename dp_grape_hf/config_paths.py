"""What a config names: places on this machine, weights that are not beside it, and code."""

import json
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

OnHub = Callable[[str], bool]

_PLACE = re.compile(r"(name_or_path|_file|_path|_dir|^path|^dir|^file)$")
# Wherever it is written.
_PATH = re.compile(r"~\w*[/\\]|\.\.?/|(file|local):/|[A-Za-z]:[\\/]|\\\\\w|/[^/]+/[^/]")
# What transformers and PEFT read other weights, or another config, from.
_WEIGHTS = {"transformers_weights", "configuration_files", "prompt_tuning_init_state_dict_path"}
_CODE = {"auto_map", "custom_pipelines"}
_KERNEL = "_implementation"  # a repository with code, if it has a slash
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


def weights_named(content: Any) -> Iterator[tuple[str, Any]]:
    """Yields the entries of a config that send loaders to weights of another name."""
    return _entries(content, lambda key, value: key in _WEIGHTS)


def code_named(content: Any) -> Iterator[tuple[str, Any]]:
    """Yields the entries of a config that have loaders run code which is not their library's."""
    return _entries(
        content,
        lambda key, value: key in _CODE or (key.endswith(_KERNEL) and "/" in json.dumps(value)),
    )


def _entries(content: Any, wanted: Callable[[str, Any], bool]) -> Iterator[tuple[str, Any]]:
    pairs = content.items() if isinstance(content, dict) else ()
    for key, value in pairs:
        if value and wanted(key, value):
            yield key, value
    for value in content if isinstance(content, list) else (value for _, value in pairs):
        yield from _entries(value, wanted)


def _is_place(key: str, value: Any, on_hub: OnHub) -> bool:
    """Whether a value is a path on this machine, or could be one of another, or its key is."""
    if _PATH.match(key):
        return True
    if not isinstance(value, str) or len(value) < 2 or key == _TEMPLATE:
        return False
    named = bool(_PLACE.search(key)) and not on_hub(value)
    return named or bool(_PATH.match(value)) or (os.path.isabs(value) and os.path.exists(value))
