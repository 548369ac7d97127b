"""The files of a saved model: their names, their digests, which are weights, which are whole."""

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

# What a Trainer writes, ours included.
_WRITTEN = re.compile(
    r"(?:(model|pytorch_model|adapter_model)|adapter_config|optimizer|scheduler|scaler|config"
    r"|generation_config|tokenizer|tokenizer_config|trainer_state|run_choices)"
    r"(-\d+-of-\d+)?(\.\w+)*\.(safetensors|json|bin|pt)"
)
_SUFFIXES = (
    *(".safetensors", ".bin", ".pt", ".pth", ".pkl", ".ckpt", ".h5", ".msgpack", ".gguf"),
    *(".onnx", ".npz", ".distcp"),
    ".index.json",  # says in which file a weight is, where there are several
)
# What the Trainer and accelerate save beside weights; it stays on the machine that trains. No
# loader takes a file of these names, unless an index sends it there, which `verify` looks into.
_OTHERS = re.compile(
    r"training_args\.bin|(optimizer|scheduler|scaler|rng_state|random_states)(_\d+)?\.(bin|pkl|pth?)"
)


def is_weights(name: str) -> bool:
    """Whether a file of that name is weights, and not what a trainer keeps beside them."""
    lower = name.lower()
    return lower.endswith(_SUFFIXES) and not _OTHERS.fullmatch(lower)


def files_in(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Return the files in a folder and in the folders in it, by name.

    Returns:
        The files, with names relative to the folder and in order; and the names of the folders that
        have a ledger, which speaks of their files. Links to folders are not followed.
    """
    files: dict[str, Path] = {}
    others: list[str] = []
    for place, folders, names in os.walk(folder):
        own = [name for name in folders if Path(place, name, LEDGER_NAME).is_file()]
        folders[:] = sorted({*folders} - {*own})
        others += [Path(place, name).relative_to(folder).as_posix() for name in own]
        paths = [path for path in (Path(place, name) for name in names) if path.is_file()]
        files |= {path.relative_to(folder).as_posix(): path for path in paths}
    return dict(sorted(files.items())), sorted(others)


def digests(folder: Path) -> dict[str, str]:
    """Return the digest of each file of a model that was just saved in a folder, by its name.

    The name is relative to the folder, which holds nothing but the model and, maybe, its ledger
    and its card. Takes about a second for each GiB.
    """
    files, _ = files_in(folder)
    return {n: digest(files[n]) for n in files if n not in (LEDGER_NAME, CARD_NAME)}


def digest(path: Path) -> str:
    """Return the SHA-256 in hex of a file.

    For an adapter's config, the digest is of its content without the name of the base, whatever
    the layout of the file: a path to the base on this machine is not published.
    """
    content = json_of(path) if path.name == ADAPTER_CONFIG else None
    if isinstance(content, dict):
        content.pop(BASE, None)
    if content is not None:
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def adapter_folders(folder: Path) -> list[Path]:
    """Returns the folders in a folder that PEFT saved named adapters to, in order."""
    return sorted(path.parent for path in folder.glob(f"*/{ADAPTER_CONFIG}"))


# ---- Whether they are whole ----


def damage(path: Path) -> str:
    """Says why a file that a Trainer wrote cannot be read; empty if it is whole.

    Files that end early, or are no files, are recognised by their own tables of contents, without
    reading what is in them. Files of names that no Trainer writes are their owner's.
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
    """Whether a Trainer writes weights, in whole or in part, to a file of that name."""
    written = _WRITTEN.fullmatch(name)
    return written is not None and written[1] is not None and not name.endswith(".json")


def files_of_index(content: Any) -> set[str]:
    """Returns the names of the files that the content of an index says weights are in.

    Raises:
        ValueError: it is no index.
    """
    named = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise ValueError("no file name for each weight")
    return set(named.values())


def _check_tensors(path: Path) -> None:
    """Reads the header, which gives the length of the file."""
    with safe_open(path, framework="pt"):
        pass


def _check_json(path: Path) -> None:
    """Reads a file, and looks for those that an index names."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if not path.name.endswith(".index.json"):
        return
    for name in sorted(files_of_index(content)):
        if not (path.parent / name).is_file():
            raise ValueError(f"{name} is missing")


def _check_archive(path: Path) -> None:
    """Reads the table of contents, which is at the end of what ``torch.save`` writes.

    What torch before 1.6 wrote is a pickle, and has none.
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
