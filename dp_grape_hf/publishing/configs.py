"""Places on this machine, other weights and code that the configs of a saved model name.

A config is a JSON file that is saved with the weights. The library that saves it notes in it where
a model was loaded from. An entry of it can send a loader to weights of another name, or to code.
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
# Text that is a path, whatever its key.
_PATH = re.compile(r"~\w*[/\\]|\.\.?/|(file|local):/|[A-Za-z]:[\\/]|\\\\\w|/[^/]+/[^/]")
# Entries from which transformers and PEFT read other weights, or another config.
_WEIGHTS = {"transformers_weights", "configuration_files", "prompt_tuning_init_state_dict_path"}
_CODE = {"auto_map", "custom_pipelines"}
_KERNEL = "_implementation"  # a repository with code, if it has a slash
# Texts of a tokenizer, which may look like a path.
_TEXTS = re.compile(r"chat_template|.*_tokens?|added_tokens_decoder")


def json_of(path: Path) -> Any:
    """Return what a file holds as JSON; ``None`` if it cannot be read as that."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def is_hub_name(name: str) -> bool:
    """Whether a model's name can be one on the Hub: no path, and nothing that lies here."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not os.path.exists(name)


def clean_configs(folder: Path, on_hub: OnHub) -> None:
    """Take the places on this machine out of the configs that were just saved to be published.

    Args:
        folder: holds what was saved, and nothing else.
        on_hub: whether a name in a config can be one on the Hub.

    Raises:
        PrivacyError: a config sends loaders to other weights.
    """
    for path in sorted(folder.rglob("*config.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        clean = without_paths(content, on_hub)
        for key, value in ((k, v) for k, v, to in sent_elsewhere(clean) if to == WEIGHTS):
            raise PrivacyError(
                f"{path.name} says {key}={value!r}, so loaders would take weights that the ledger "
                "does not speak for. Take that entry out of the model's config, and publish again."
            )
        if clean != content:
            path.write_text(f"{json.dumps(clean, indent=2, ensure_ascii=False)}\n", "utf-8")


def without_paths(content: Any, on_hub: OnHub = is_hub_name, key: str = "") -> Any:
    """Return the content of a config without the entries that name places on this machine.

    It stands under a ``key``; ``on_hub`` says whether a name can be one on the Hub.
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
    """Yield key, value and kind of the entries that send loaders to `WEIGHTS` or `CODE` elsewhere.

    Weights have another name than loaders expect; code is not of their library.
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
    """Whether a value is a path on this machine, or could be one of another, or its key is."""
    if _PATH.match(key):
        return True
    if not isinstance(value, str) or len(value) < 2 or _TEXTS.fullmatch(key):
        return False
    named = bool(_PLACE.search(key)) and not on_hub(value)
    return named or bool(_PATH.match(value)) or (os.path.isabs(value) and os.path.exists(value))
