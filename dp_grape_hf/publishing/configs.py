"""Find and remove config entries that name local paths, other weights or code.

A config is a JSON file that is saved with the weights. Libraries write into it where a model was
loaded from. An entry can make a loader read weights of another name, or run code.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from dp_grape_hf.errors import PrivacyError

BASE = "base_model_name_or_path"
"""The entry of an adapter's config that names its base, by which PEFT finds it."""

WEIGHTS, CODE = "weights", "code"
OnHub = Callable[[str], bool]

_PLACE = re.compile(r"(name_or_path|_file|_path|_dir|^path|^dir|^file)$")
# Text that is a path, under any key.
_PATH = re.compile(r"~\w*[/\\]|\.\.?/|(file|local):/|[A-Za-z]:[\\/]|\\\\\w|/[^/]+/[^/]")
# Entries from which transformers and PEFT read other weights, or another config.
_WEIGHTS = {"transformers_weights", "configuration_files", "prompt_tuning_init_state_dict_path"}
_CODE = {"auto_map", "custom_pipelines"}
_KERNEL = "_implementation"  # a repository with code, if it has a slash
# Keys of tokenizer texts, which may look like a path.
_TEXTS = re.compile(r"chat_template|.*_tokens?|added_tokens_decoder")


def json_of(path: Path) -> Any:
    """Return what a file holds as JSON; ``None`` if it cannot be read as that."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def is_hub_name(name: str) -> bool:
    """Return whether a name can be a model on the Hub: it is valid there, and no local path."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not os.path.exists(name)


def clean_configs(folder: Path, on_hub: OnHub) -> None:
    """Remove local paths from the configs of a saved model's folder, before it is published.

    ``on_hub`` returns whether a name in a config can be a model on the Hub.

    Raises:
        PrivacyError: a config makes loaders read other weights.
    """
    for path in sorted(folder.rglob("*config.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        clean = without_paths(content, on_hub)
        for key, value in ((k, v) for k, v, to in sent_elsewhere(clean) if to == WEIGHTS):
            raise PrivacyError(
                f"{path.name} says {key}={value!r}, so loaders would read weights that are not in "
                "the ledger. Remove that entry from the model's config, and publish again."
            )
        if clean != content:
            path.write_text(f"{json.dumps(clean, indent=2, ensure_ascii=False)}\n", "utf-8")


def without_paths(content: Any, on_hub: OnHub = is_hub_name, key: str = "") -> Any:
    """Return the content of a config without entries that name local paths.

    ``key`` is the key of this content. ``on_hub`` returns whether a name can be one on the Hub.
    """
    if _TEXTS.fullmatch(key):
        return content
    if isinstance(content, dict):
        items = [item for item in content.items() if not _is_place(*item, on_hub)]
        return {name: without_paths(value, on_hub, name) for name, value in items}
    if isinstance(content, list):
        return [without_paths(i, on_hub, key) for i in content if not _is_place(key, i, on_hub)]
    return content


def sent_elsewhere(content: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield key, value and kind of the entries that make loaders read other `WEIGHTS` or `CODE`.

    Such weights have another name than loaders expect. Such code is not a part of the library.
    """
    pairs = content.items() if isinstance(content, dict) else ()
    for key, value in pairs:
        if value and key in _WEIGHTS:
            yield key, value, WEIGHTS
        elif value and (key in _CODE or (key.endswith(_KERNEL) and "/" in json.dumps(value))):
            yield key, value, CODE
    for value in content if isinstance(content, list) else (value for _, value in pairs):
        yield from sent_elsewhere(value)


def _is_place(key: str, value: Any, on_hub: OnHub) -> bool:
    """Return whether a key or a value is a path, or names something that is not on the Hub."""
    if _PATH.match(key):
        return True
    if not isinstance(value, str) or len(value) < 2 or _TEXTS.fullmatch(key):
        return False
    named = bool(_PLACE.search(key)) and not on_hub(value)
    return named or bool(_PATH.match(value)) or (os.path.isabs(value) and os.path.exists(value))
