"""Which files of a folder are weights, and their digests."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from dp_grape_hf.entries import LEDGER_NAME

_SUFFIXES = (
    *(".safetensors", ".bin", ".pt", ".pth", ".pkl", ".ckpt", ".h5", ".msgpack", ".gguf"),
    *(".onnx", ".npz"),
    ".index.json",  # says in which file a weight is, where there are several
)
# What the Trainer and accelerate save beside weights; it stays on the machine that trains.
_OTHERS = re.compile(
    r"(training_args|(optimizer|scheduler|scaler|rng_state|random_states)(_\d+)?)\."
)

PATTERNS = tuple(f"*{suffix}" for suffix in _SUFFIXES)
"""What weight files are called, as `fnmatch` patterns."""


def is_weights(name: str) -> bool:
    """Whether a file of that name is weights, and not what a trainer keeps beside them."""
    lower = name.lower()
    return lower.endswith(_SUFFIXES) and not _OTHERS.match(lower)


def weight_files(folder: Path) -> list[str]:
    """Returns the names of the weight files of a folder, relative to it, in order.

    Named PEFT adapters lie in folders of their own, which count; other folders do not, and neither
    does one with a ledger, as that speaks of it.
    """
    return sorted(path.relative_to(folder).as_posix() for path in _weight_files(folder))


def digests(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 in hex of each weight file of a folder, by name.

    Takes about a second for each GiB.
    """
    found = {}
    for name in weight_files(folder):
        with open(folder / name, "rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _weight_files(folder: Path) -> Iterator[Path]:
    adapters = [path.parent for path in folder.glob("*/adapter_config.json")]
    for place in (folder, *(one for one in adapters if not (one / LEDGER_NAME).exists())):
        for path in place.iterdir():
            if is_weights(path.name) and path.is_file():
                yield path
