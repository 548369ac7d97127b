"""Which files of a folder are weights, or may be, and their digests."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from dp_grape_hf.entries import LEDGER_NAME

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
    return sorted(path.relative_to(folder).as_posix() for path in _weight_files(folder))


def digests(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 in hex of each of a folder's `weight_files`, by name.

    Takes about a second for each GiB.
    """
    return {name: digest(folder / name) for name in weight_files(folder)}


def digest(path: Path) -> str:
    """Returns the SHA-256 in hex of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _weight_files(folder: Path) -> Iterator[Path]:
    adapters = [path.parent for path in folder.glob("*/adapter_config.json")]
    for place in (folder, *(one for one in adapters if not (one / LEDGER_NAME).exists())):
        for path in place.iterdir():
            if is_weights(path.name) and path.is_file():
                yield path


def _holds_tensors(path: Path) -> bool:
    with open(path, "rb") as file:
        begin = file.read(9)
    if begin.startswith(_BEGINNINGS):
        return True
    if begin[8:] != b"{":  # safetensors: the length of a JSON object, and the object
        return False
    try:
        with safe_open(path, framework="pt"):
            return True
    except (SafetensorError, OSError):
        return False


def _is_of_the_cache(link: Path, folder: Path) -> bool:
    root = folder.resolve().parent
    return root.name == "snapshots" and link.resolve().parent == root.parent / "blobs"
