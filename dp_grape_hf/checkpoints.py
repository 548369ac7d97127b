"""Which checkpoints can be resumed from, and what to do where one could not be saved."""

from __future__ import annotations

import json
import logging
import os
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import sort_checkpoints

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

    Files that a Trainer writes, and that end early or are no files, are recognised by their own
    tables of contents, without reading what is in them. Other files are their owner's, whatever
    they are, and the ledger is left to ``Ledger.resume``.
    """
    folder = Path(folder)
    try:
        # Saved last of all: where it is missing, a run was killed, or had no space left.
        TrainerState.load_from_json(os.path.join(folder, TRAINER_STATE_NAME))
    except (OSError, ValueError, TypeError) as error:
        return f"{TRAINER_STATE_NAME} cannot be read ({error})."
    weights = 0
    adapters = sorted(path.parent for path in folder.glob("*/adapter_config.json"))
    for path in (path for place in (folder, *adapters) for path in sorted(place.iterdir())):
        if not _WRITTEN.fullmatch(path.name):
            continue
        try:
            _CHECKS[path.suffix](path)
        except (*_DAMAGE, zipfile.BadZipFile) as error:
            return f"{path.name} is damaged or cut short ({error})."
        weights += path.name.startswith(_WEIGHTS) and path.suffix != ".json"
    return "" if weights else "it has no file of weights."


@contextmanager
def saving_a_checkpoint(output_dir: str) -> Iterator[None]:
    """Saves in it: a failure says what to do.

    Raises:
        PrivacyError: in place of the error of the library that wrote, where there is no space, say.
            Errors of other kinds are of code that is not ours, and stay as they are.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _OF_WRITING.search(str(error)):
            raise
        raise PrivacyError(
            f"A checkpoint in {output_dir} could not be saved ({type(error).__name__}: {error}). "
            "Those saved before are whole, and the ledger counts every release. Make room there, "
            "then go on with train(resume_from_checkpoint=True)."
        ) from error


_DAMAGE = (OSError, ValueError, LookupError, TypeError, SafetensorError)
_OF_WRITING = re.compile("PytorchStreamWriter|inline_container|iostream|basic_ios|unexpected pos")
_WRITTEN = re.compile(
    r"(model|pytorch_model|adapter_model|adapter_config|optimizer|scheduler|scaler|config"
    r"|generation_config|tokenizer|tokenizer_config|trainer_state)"
    r"(-\d+-of-\d+)?(\.\w+)*\.(safetensors|json|bin|pt)"
)
_WEIGHTS = ("model", "pytorch_model", "adapter_model")


def _check_safetensors(path: Path) -> None:
    """Opens a file, which compares its length with what its header says."""
    with safe_open(path, framework="pt"):
        pass


def _check_json(path: Path) -> None:
    """Reads a file, and looks for those that an index names."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if not path.name.endswith(".index.json"):
        return
    named = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise ValueError("no file name for each weight")
    for name in sorted(set(named.values())):
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


_CHECKS: dict[str, Callable[[Path], None]] = {
    ".safetensors": _check_safetensors,
    ".json": _check_json,
    ".bin": _check_archive,
    ".pt": _check_archive,
}
