"""The files of a saved model: their names and their digests."""

import hashlib
import json
import os
import re
from pathlib import Path

from dp_grape_hf.ledger import CARD_NAME, LEDGER_NAME
from dp_grape_hf.publishing.configs import BASE, json_of

MODEL, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"

_SUFFIXES = (
    *(".safetensors", ".bin", ".pt", ".pth", ".pkl", ".ckpt", ".h5", ".msgpack", ".gguf"),
    *(".onnx", ".npz", ".distcp"),
    ".index.json",  # maps weights to files, if there are several files
)
# State of the training that the Trainer and accelerate save next to the weights. It is not
# published. Loaders do not read files of these names, unless an index names them; `verify` checks
# indices.
_OTHERS = re.compile(
    r"training_args\.bin|(optimizer|scheduler|scaler|rng_state|random_states)(_\d+)?\.(bin|pkl|pth?)"
)


def is_weights(name: str) -> bool:
    """Return whether a file name is a name of weights, and not of a trainer's state."""
    lower = name.lower()
    return lower.endswith(_SUFFIXES) and not _OTHERS.fullmatch(lower)


def files_in(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Return the files in a folder and in the folders in it, by name.

    Returns:
        The files, with names relative to the folder and in order; and the names of the folders that
        have a separate ledger. Links to folders are not followed.
    """
    files: dict[str, Path] = {}
    others: list[str] = []
    for place, folders, names in os.walk(folder):
        separate = [name for name in folders if Path(place, name, LEDGER_NAME).is_file()]
        folders[:] = sorted({*folders} - {*separate})
        others += [Path(place, name).relative_to(folder).as_posix() for name in separate]
        paths = [path for path in (Path(place, name) for name in names) if path.is_file()]
        files |= {path.relative_to(folder).as_posix(): path for path in paths}
    return dict(sorted(files.items())), sorted(others)


def digests(folder: Path) -> dict[str, str]:
    """Return file name -> digest of a model that was just saved in a folder.

    Names are relative to the folder. The ledger and the card are left out. Takes about a second for
    each GiB.
    """
    files, _ = files_in(folder)
    return {n: digest(files[n]) for n in files if n not in (LEDGER_NAME, CARD_NAME)}


def digest(path: Path) -> str:
    """Return the SHA-256 in hex of a file.

    The digest of an adapter's config is computed from its content without the name of the base
    model: a local path to the base model is not published.
    """
    content = json_of(path) if path.name == ADAPTER_CONFIG else None
    if isinstance(content, dict):
        content.pop(BASE, None)
    if content is not None:
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
