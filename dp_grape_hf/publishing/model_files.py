"""The files of a saved model: what they are called, which are weights, whether they are whole."""

import hashlib
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from dp_grape_hf.ledger import LEDGER_NAME

MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"

_LOADED = re.compile(rf"model(-\d+-of-\d+)?\.safetensors|{re.escape(ADAPTER)}")
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
# How files of tensors begin: zip archives, as of torch; pickles, GGUF, HDF5 and numpy.
_BEGINNINGS = (b"PK\x03\x04", b"\x80", b"GGUF", b"\x89HDF", b"\x93NUMPY")


class Tree(NamedTuple):
    """What a folder holds, with the folders in it.

    Attributes:
        files: plain files. Those of folders with a ledger are not among them.
        links: links, which are not followed, and what is neither file nor folder.
        others: the folders in it that have a ledger, which speaks of them.
    """

    files: list[Path]
    links: list[Path]
    others: list[Path]


def is_weights(name: str) -> bool:
    """Whether a file of that name is weights, and not what a trainer keeps beside them."""
    lower = name.lower()
    return lower.endswith(_SUFFIXES) and not _OTHERS.fullmatch(lower)


def may_be_weights(path: Path) -> bool:
    """Whether a file is weights by its name, or holds what could be, whatever its name.

    The exception is what a trainer keeps beside weights.
    """
    if _OTHERS.fullmatch(path.name.lower()):
        return False
    return is_weights(path.name) or _holds_tensors(path)


def tree(folder: Path) -> Tree:
    """Returns what a folder holds, in order.

    In the cache of the Hub's client, a link into its own store counts as the file itself.
    """
    found, places = Tree([], [], []), [folder]
    while places:
        for path in sorted(places.pop().iterdir()):
            if path.is_symlink() and not _is_of_the_cache(path, folder):
                found.links.append(path)
            elif path.is_dir():
                own = (path / LEDGER_NAME).is_file()
                (found.others if own else places).append(path)
            else:
                (found.files if path.is_file() else found.links).append(path)
    return found


def weight_files(folder: Path) -> list[str]:
    """Returns the names of the files that saving a model into a folder wrote its weights to.

    They are relative to it, and in order. Named PEFT adapters lie in folders of their own, which
    count; other folders do not, and neither does one with a ledger, as that speaks of it.
    """
    adapters = [one for one in adapter_folders(folder) if not (one / LEDGER_NAME).exists()]
    return sorted(
        path.relative_to(folder).as_posix()
        for place in (folder, *adapters)
        for path in place.iterdir()
        if is_weights(path.name) and path.is_file()
    )


def digests(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 in hex of each of a folder's `weight_files`, by name.

    With an adapter goes its config, without which its numbers mean nothing: see `config_digest`.
    Takes about a second for each GiB.
    """
    found = {name: digest(folder / name) for name in weight_files(folder)}
    for weights in map(PurePosixPath, [*found]):
        config = weights.with_name(ADAPTER_CONFIG)
        if weights.name == ADAPTER and (folder / config).is_file():
            found[f"{config}"] = config_digest(folder / config)
    return found


def config_digest(path: Path) -> str:
    """Returns the SHA-256 in hex of what an adapter's config says, whatever its layout.

    But for the name of its base: a path on this machine is taken out of what is published.
    """
    content = json_of(path)
    if content is None:
        return digest(path)
    if isinstance(content, dict):
        content.pop("base_model_name_or_path", None)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def json_of(path: Path) -> Any:
    """Returns what a file holds as JSON; ``None`` if it cannot be read as that."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def digest(path: Path) -> str:
    """Returns the SHA-256 in hex of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def adapter_folders(folder: Path) -> list[Path]:
    """Returns the folders in a folder that PEFT saved named adapters to, in order."""
    return sorted(path.parent for path in folder.glob(f"*/{ADAPTER_CONFIG}"))


def is_loaded(name: str) -> bool:
    """Whether loaders take tensors from a file of that name: a model, its parts or an adapter."""
    return _LOADED.fullmatch(name) is not None


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


def notes_of(path: Path) -> dict[str, str]:
    """Returns what a file of safetensors, whose length is that of its header, holds beside tensors.

    Raises:
        SafetensorError: it is no such file, or not whole.
        OSError: it cannot be read.
    """
    with safe_open(path, framework="pt") as file:
        return file.metadata() or {}


def files_of_index(content: Any) -> set[str]:
    """Returns the names of the files that the content of an index says weights are in.

    Raises:
        ValueError: it is no index.
    """
    named = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise ValueError("no file name for each weight")
    return set(named.values())


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
    ".safetensors": notes_of,
    ".json": _check_json,
    ".bin": _check_archive,
    ".pt": _check_archive,
}


def _holds_tensors(path: Path) -> bool:
    with open(path, "rb") as file:
        begin = file.read(9)
    if begin.startswith(_BEGINNINGS):
        return True
    if begin[8:] != b"{":  # safetensors: the length of a JSON object, and the object
        return False
    try:
        notes_of(path)
        return True
    except (SafetensorError, OSError):
        return False


def _is_of_the_cache(link: Path, folder: Path) -> bool:
    root = folder.resolve().parent
    return root.name == "snapshots" and link.resolve().parent == root.parent / "blobs"
