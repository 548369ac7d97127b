"""Upload a saved model, with its ledger and its card, as one commit to the Hub.

The Hub shows all files of a commit or none. So weights never appear without their ledger and card,
and a failed push does not change the repository.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.ledger import LEDGER_NAME, Ledger
from dp_grape_hf.publishing.model_files import ADAPTER_CONFIG, digests, files_in, is_weights


def open_repository(api: HfApi, name: str, token: str | None, private: bool | None) -> str:
    """Create or open a repository, and return its full name; see `Publisher.open`."""
    try:
        return api.create_repo(name, token=token, private=private, exist_ok=True).repo_id
    except Exception as error:
        error.add_note(f"The repository {name} cannot be created or opened. {_advice(error)}")
        raise


def send(
    api: HfApi,
    folder: Path,
    repo_id: str,
    places: Sequence[str],
    message: str,
    token: str | None,
    revision: str | None,
) -> CommitInfo:
    """Publish exactly the files of a folder in one commit, and remove the folder.

    Args:
        api: the Hub's client.
        folder: contains a saved model with its ledger, and nothing else.
        repo_id: the full name of the repository.
        places: the folders of the repository that receive the files.
        message, token, revision: as in `Publisher.push`.

    Raises:
        PrivacyError: the repository contains weights of another origin, or the files changed after
            they were saved.
        Exception: an error of ``huggingface_hub``, with a note about the state of the repository.
    """
    try:
        _require_as_saved(folder)
        files, _ = files_in(folder)
        targets = {PurePosixPath(place, name): files[name] for place in places for name in files}
        there = api.list_repo_files(repo_id, token=token, revision=revision)
        _refuse_foreign_weights(repo_id, set(map(PurePosixPath, there)), set(targets))
        adds = [CommitOperationAdd(str(target), file) for target, file in targets.items()]
        return api.create_commit(
            repo_id, adds, commit_message=message, token=token, revision=revision
        )
    except PrivacyError:
        raise
    except Exception as error:
        error.add_note(
            f"{repo_id} shows no file of this push, or all of them if only the Hub's answer was "
            f"lost. Other files there were not changed. {_advice(error)}"
        )
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _refuse_foreign_weights(
    repo_id: str, there: set[PurePosixPath], targets: set[PurePosixPath]
) -> None:
    places = {target.parent for target in targets}
    if foreign := sorted(
        str(path)
        for path in there - targets
        if path.parent in places and (is_weights(path.name) or path.name.lower() == ADAPTER_CONFIG)
    ):
        raise PrivacyError(
            f"{repo_id} contains {', '.join(foreign)}, which this run did not make. The card and "
            "the ledger would seem to describe them. Delete these files there, or publish under "
            "another hub_model_id."
        )


def _require_as_saved(folder: Path) -> None:
    """Refuse a folder whose files differ from the digests in its ledger."""
    saved = Ledger.load(folder / LEDGER_NAME).saved
    recorded, digests_now = saved[-1].files if saved else {}, digests(folder)
    if other := sorted(
        n for n in recorded.keys() | digests_now if recorded.get(n) != digests_now.get(n)
    ):
        raise PrivacyError(
            f"{', '.join(other)} in {folder} changed after the model was saved there, so the "
            "ledger does not describe it. Nothing was sent. Find the program that writes there, "
            "and push again."
        )


def _advice(error: Exception) -> str:
    if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
        return (
            "The token was refused: pass one that may write to this repository as hub_token, or "
            "log in with hf auth login."
        )
    return "The model is saved on this machine; push again with trainer.push_to_hub()."
