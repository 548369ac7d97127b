"""Checks of checkpoints before a run resumes."""

import logging
import os
import zipfile
from pathlib import Path

from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import sort_checkpoints

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.ledger import LEDGER_NAME, Ledger
from dp_grape_hf.publishing import digest
from dp_grape_hf.trainer.chosen import CHOICES_NAME, Choices

logger = logging.getLogger(__name__)


def last_whole_checkpoint(output_dir: str) -> str | None:
    """Return the last complete checkpoint of a run; None if there are no checkpoints.

    Damaged later checkpoints are skipped with a warning. The ledger of the run still counts the
    private updates after the returned checkpoint.

    Raises:
        PrivacyError: there are checkpoints, and none is complete.
    """
    folders = sort_checkpoints(output_dir) if os.path.isdir(output_dir) else []
    faults = []
    for folder in reversed(folders):
        fault = fault_of_checkpoint(folder)
        if not fault:
            return folder
        logger.warning("%s is not complete and is skipped: %s", folder, fault)
        faults.append(f"{folder}: {fault}")
    if faults:
        raise PrivacyError(
            f"No checkpoint in {output_dir} is complete. {' '.join(faults)} Restore one from a "
            "copy, or start a new run in another folder. The budget of this run stays spent."
        )
    return None


def logged(output_dir: str | Path) -> list[dict[str, float]]:
    """Return the log lines of a run, from the end of training or from its last checkpoint.

    Raises:
        PrivacyError: there is no file with logs.
    """
    places = [Path(output_dir)]
    if places[0].is_dir():
        places += map(Path, reversed(sort_checkpoints(str(output_dir))))
    for place in places:
        if (path := place / TRAINER_STATE_NAME).is_file():
            return TrainerState.load_from_json(str(path)).log_history
    raise PrivacyError(
        f"{output_dir} has no {TRAINER_STATE_NAME}, which contains the logs of a run. The trainer "
        "writes it at the end of training, and into checkpoints."
    )


def require_whole_checkpoint(folder: str | Path) -> None:
    """Raise ``PrivacyError`` if a checkpoint is not complete."""
    fault = fault_of_checkpoint(folder)
    if fault:
        raise PrivacyError(
            f"resume_from_checkpoint={str(folder)!r} is not complete: {fault} Resume from another "
            "one, or pass True (not the text 'True') for the last complete one."
        )


def refuse_longer_run(folder: str | Path, steps: int) -> None:
    """Raise ``PrivacyError`` for more steps than the noise was calibrated for."""
    planned = TrainerState.load_from_json(os.path.join(folder, TRAINER_STATE_NAME)).max_steps
    if steps > planned:
        raise PrivacyError(
            f"This run would take {steps} steps (max_steps, or num_train_epochs). The run in "
            f"{folder} began with {planned}, and with its noise more steps would exceed "
            f"target_epsilon. Resume with max_steps={planned}; or start a new run from its "
            "weights, with a larger target_epsilon and earlier_data='same'."
        )


def fault_of_checkpoint(folder: str | Path) -> str:
    """Return why a checkpoint is not complete; empty if it is complete.

    The files of the model must have the digests that the checkpoint's ledger recorded. A ledger
    that is damaged, or of another run, counts as complete: ``Ledger.resume`` refuses it.
    """
    folder = Path(folder)
    try:
        # The host saves this file last: without it, the run was killed, or the disk was full.
        TrainerState.load_from_json(os.path.join(folder, TRAINER_STATE_NAME))
    except (OSError, ValueError, TypeError) as error:
        return f"{TRAINER_STATE_NAME} cannot be read ({error})."
    try:
        ledger, live = Ledger.load(folder / LEDGER_NAME), folder.parent / LEDGER_NAME
        if live.is_file() and Ledger.load(live).run_id != ledger.run_id:
            return ""
    except PrivacyError:  # not skipped, because an older checkpoint would not count its releases
        return ""
    saved = ledger.saved
    name = CHOICES_NAME
    try:
        Choices.load(folder)
        for name, recorded in saved[-1].files.items() if saved else ():
            if digest(folder / name) != recorded:
                return f"{name} has another digest than when it was saved."
        for name in (OPTIMIZER_NAME, SCHEDULER_NAME):
            if (folder / name).exists():
                zipfile.ZipFile(folder / name).close()  # its table of contents is at its end
    except (OSError, ValueError, LookupError, TypeError, zipfile.BadZipFile) as error:
        return f"{name} is damaged or cut short ({error})."
    return ""
