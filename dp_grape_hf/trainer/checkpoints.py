"""Checkpoints that can be resumed from, and the way out where one could not be saved."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import sort_checkpoints

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.publishing import adapter_folders, damage, is_of_a_model

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


def logged(output_dir: str | Path) -> list[dict[str, float]]:
    """Returns what a run logged: of the end of training, or of its last checkpoint.

    Raises:
        PrivacyError: if there is none of both.
    """
    places = [Path(output_dir)]
    if places[0].is_dir():
        places += map(Path, reversed(sort_checkpoints(str(output_dir))))
    for place in places:
        if (path := place / TRAINER_STATE_NAME).is_file():
            return TrainerState.load_from_json(str(path)).log_history
    raise PrivacyError(
        f"{output_dir} holds no {TRAINER_STATE_NAME}, where what a run logged stands. It is "
        "written when training ends, and into checkpoints."
    )


def require_whole_checkpoint(folder: str | Path) -> None:
    """Refuses to resume from a checkpoint that is not whole."""
    fault = fault_of_checkpoint(folder)
    if fault:
        raise PrivacyError(
            f"resume_from_checkpoint={str(folder)!r} is not whole: {fault} Resume from another "
            "one, or pass True for the last that is whole."
        )


def refuse_longer_run(folder: str | Path, steps: int) -> None:
    """Refuses to resume a run with a budget for more steps than its noise was calibrated for."""
    planned = TrainerState.load_from_json(os.path.join(folder, TRAINER_STATE_NAME)).max_steps
    if steps > planned:
        raise PrivacyError(
            f"This run would take {steps} steps (max_steps, or num_train_epochs), and the one in "
            f"{folder} was begun for {planned}: with its noise more steps would spend more than "
            f"target_epsilon. Resume with max_steps={planned}; or make a new run from its weights, "
            "with a larger target_epsilon and earlier_data='same'."
        )


def fault_of_checkpoint(folder: str | Path) -> str:
    """Says why a checkpoint cannot be resumed from; empty if it is whole.

    Its files are looked at as `damage` does, and the ledger is left to ``Ledger.resume``.
    """
    folder = Path(folder)
    try:
        # Saved last of all: where it is missing, a run was killed, or had no space left.
        TrainerState.load_from_json(os.path.join(folder, TRAINER_STATE_NAME))
    except (OSError, ValueError, TypeError) as error:
        return f"{TRAINER_STATE_NAME} cannot be read ({error})."
    places = (folder, *adapter_folders(folder))
    paths = [path for place in places for path in sorted(place.iterdir())]
    fault = next(filter(None, map(damage, paths)), "")
    weights = any(is_of_a_model(path.name) for path in paths)
    return fault or ("" if weights else "it has no file of weights.")


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


_OF_WRITING = re.compile("PytorchStreamWriter|inline_container|iostream|basic_ios|unexpected pos")
