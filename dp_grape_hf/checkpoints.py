"""Which checkpoints can be resumed from, and what to do where one could not be saved."""

from __future__ import annotations

import json
import logging
import os
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import sort_checkpoints

from dp_grape_hf.entries import LEDGER_NAME
from dp_grape_hf.errors import PrivacyError

logger = logging.getLogger(__name__)


def last_whole_checkpoint(output_dir: str) -> str | None:
    """Returns the last checkpoint of a run that is whole; None if it has none at all.

    Those after it are left out with a warning. Releases made after it stay counted: the live
    ledger is not in a checkpoint.

    Raises:
        PrivacyError: if there are checkpoints, and none of them is whole.
    """
    folders = sort_checkpoints(output_dir) if os.path.isdir(output_dir) else []
    faults = []
    for folder in reversed(folders):
        fault = fault_of_checkpoint(folder)
        if not fault:
            return folder
        logger.warning("%s is not whole and is left out: %s", folder, fault)
        faults.append(f"{folder}: {fault}")
    if faults:
        raise PrivacyError(
            f"No checkpoint in {output_dir} is whole. {' '.join(faults)} Restore one of them from "
            "a copy, or start a new run in another folder: the budget of this one stays spent."
        )
    return None


def require_whole_checkpoint(folder: str | Path) -> None:
    """Refuses to resume from a checkpoint that is not whole."""
    fault = fault_of_checkpoint(folder)
    if fault:
        raise PrivacyError(
            f"resume_from_checkpoint={str(folder)!r} is not whole: {fault} Resume from another "
            "one, or pass True for the last that is whole."
        )


def fault_of_checkpoint(folder: str | Path) -> str:
    """Says why a checkpoint cannot be resumed from; empty if it is whole.

    Files that end early, or are no files, are recognised by their own tables of contents, without
    reading what is in them. The ledger is left to ``Ledger.resume``.
    """
    folder = Path(folder)
    try:
        # Saved last of all: where it is missing, a run was killed, or had no space left.
        TrainerState.load_from_json(os.path.join(folder, TRAINER_STATE_NAME))
    except (OSError, ValueError, TypeError) as error:
        return f"{TRAINER_STATE_NAME} cannot be read ({error})."
    weights = 0
    for path in sorted(folder.rglob("*")):
        check = _CHECKS.get(path.suffix)
        if check is None or path.name in _NOT_NEEDED:
            continue
        try:
            check(path)
        except (OSError, ValueError, LookupError, TypeError, zipfile.BadZipFile) as error:
            return f"{path.name} is damaged or cut short ({error})."
        weights += path.name.startswith(_WEIGHTS)
    return "" if weights else "it has no file of weights."


@contextmanager
def saving_a_checkpoint(output_dir: str) -> Iterator[None]:
    """Saves in it: the newest checkpoint stays the newest, and a failure says what to do.

    What ``save_total_limit`` deletes is what was changed longest ago. After the clock was set
    back, that would be what is just saved: so checkpoints of the future are dated back before.

    Raises:
        PrivacyError: in place of the error of the library that wrote, where there is no space, say.
    """
    folders, now = sort_checkpoints(output_dir) if os.path.isdir(output_dir) else [], time.time()
    if any(os.path.getmtime(folder) > now for folder in folders):
        for age, folder in enumerate(reversed(folders), start=1):
            os.utime(folder, (now - 2 * age, now - 2 * age))
    try:
        yield
    except PrivacyError:
        raise
    except Exception as error:  # torch and safetensors have kinds of their own
        raise PrivacyError(
            f"A checkpoint in {output_dir} could not be saved ({type(error).__name__}: {error}). "
            "Those saved before are whole, and the ledger counts every release. Make room there, "
            "then go on with train(resume_from_checkpoint=True)."
        ) from error


_NOT_NEEDED = {"training_args.bin", LEDGER_NAME}
_WEIGHTS = ("model", "pytorch_model", "adapter_model")


def _check_safetensors(path: Path) -> None:
    """Compares the length of a file with what its header says."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = path.stat().st_size
        if not 0 < length <= size - 8:
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        header = dict(json.loads(file.read(length)))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    needed = 8 + length + max(ends, default=0)
    if size != needed:
        raise ValueError(f"{size} bytes of {needed}")


def _check_json(path: Path) -> None:
    """Reads a file, and looks for those that an index names."""
    content = json.loads(path.read_text(encoding="utf-8"))
    named = content.get("weight_map", {}) if isinstance(content, dict) else {}
    for name in sorted(set(named.values())):
        if not (path.parent / name).is_file():
            raise ValueError(f"{name} is missing")


def _check_archive(path: Path) -> None:
    """Reads the table of contents, which is at the end of what ``torch.save`` writes."""
    zipfile.ZipFile(path).close()


_CHECKS: dict[str, Callable[[Path], None]] = {
    ".safetensors": _check_safetensors,
    ".json": _check_json,
    ".bin": _check_archive,
    ".pt": _check_archive,
    ".pth": _check_archive,
}
