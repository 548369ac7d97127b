"""The files of a saved model: their names, their digests, and checks for damaged files."""

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from dp_grape_hf.ledger import CARD_NAME, LEDGER_NAME
from dp_grape_hf.publishing.configs import BASE, json_of

MODEL, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"

# Files that a Trainer writes.
_WRITTEN = re.compile(
    r"(?:(model|pytorch_model|adapter_model)|adapter_config|optimizer|scheduler|scaler|config"
    r"|generation_config|tokenizer|tokenizer_config|trainer_state|run_choices)"
    r"(-\d+-of-\d+)?(\.\w+)*\.(safetensors|json|bin|pt)"
)
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


def adapter_folders(folder: Path) -> list[Path]:
    """Return the folders in a folder that PEFT saved named adapters to, in order."""
    return sorted(path.parent for path in folder.glob(f"*/{ADAPTER_CONFIG}"))


# ---- Damaged files ----


def damage(path: Path) -> str:
    """Return why a file that a Trainer wrote cannot be read; empty if it is complete.

    Only the table of contents of a file is read, which shows whether the file was cut short. Files
    with a name that no Trainer writes are not checked.
    """
    if not _WRITTEN.fullmatch(path.name):
        return ""
    try:
        _CHECKS[path.suffix](path)
    except (
        *(OSError, ValueError, LookupError, TypeError, SafetensorError),
        zipfile.BadZipFile,
    ) as error:
        return f"{path.name} is damaged or cut short ({error})."
    return ""


def is_of_a_model(name: str) -> bool:
    """Return whether a Trainer writes weights, or a part of them, to a file of that name."""
    written = _WRITTEN.fullmatch(name)
    return written is not None and written[1] is not None and not name.endswith(".json")


def files_of_index(content: Any) -> set[str]:
    """Return the names of the weight files in the content of an index.

    Raises:
        ValueError: the content is not an index.
    """
    named = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise ValueError("no file name for each weight")
    return set(named.values())


def _check_tensors(path: Path) -> None:
    """Read the header, which contains the length of the file."""
    with safe_open(path, framework="pt"):
        pass


def _check_json(path: Path) -> None:
    """Read a JSON file; of an index, check that the files exist that it names."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if not path.name.endswith(".index.json"):
        return
    for name in sorted(files_of_index(content)):
        if not (path.parent / name).is_file():
            raise ValueError(f"{name} is missing")


def _check_archive(path: Path) -> None:
    """Read the table of contents at the end of a file of ``torch.save``.

    Files of torch before 1.6 are pickles and have no table of contents.
    """
    with open(path, "rb") as file:
        begin = file.read(2)
    if begin[:1] != b"\x80" or len(begin) < 2:
        zipfile.ZipFile(path).close()


_CHECKS: dict[str, Callable[[Path], object]] = {
    ".safetensors": _check_tensors,
    ".json": _check_json,
    ".bin": _check_archive,
    ".pt": _check_archive,
}
