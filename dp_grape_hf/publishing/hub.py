"""Upload a saved model, with its ledger and its card, as one commit to the Hub.

The Hub shows all files of a commit or none. So weights never appear without their ledger and card,
and a failed push does not change the repository.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path, PurePosixPath

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.ledger import LEDGER_NAME, Ledger
from dp_grape_hf.publishing.model_files import ADAPTER_CONFIG, digests, files_in, is_weights

logger = logging.getLogger(__name__)


class Repository:
    """A model repository on the Hub, which is created if it does not exist.

    `Publisher.open` documents the arguments.
    """

    def __init__(self, name: str, *, token: str | None = None, private: bool | None = None) -> None:
        self._api = HfApi(library_name="dp_grape_hf")
        self._token = token
        self._pushes: list[Future[CommitInfo]] = []
        try:
            url = self._api.create_repo(name, token=token, private=private, exist_ok=True)
        except Exception as error:
            error.add_note(f"The repository {name} cannot be created or opened. {_advice(error)}")
            raise
        self.repo_id = url.repo_id

    @property
    def busy(self) -> bool:
        """True while a push runs in the background."""
        return any(not push.done() for push in self._pushes)

    def wait(self) -> None:
        """Wait for the pushes in the background. Failed pushes are logged."""
        wait(self._pushes)
        self._pushes.clear()

    def publish(
        self,
        save: Callable[[Path], None],
        *,
        workspace: Path,
        message: str,
        places: Sequence[str] = ("",),
        token: str | None = None,
        revision: str | None = None,
        background: bool = False,
    ) -> CommitInfo | Future[CommitInfo]:
        """Save a model into an empty folder, and publish this folder in one commit.

        Args:
            save: saves the model with its ledger and its card in the given folder.
            workspace: the folder in which the empty folder is created. The empty folder is
                removed when the push is done.
            places: the folders of the repository that receive the files.
            message, token, revision, background: as in `Publisher.push`.

        Raises:
            PrivacyError: the repository contains weights of another origin, or the files changed
                after they were saved.
            Exception: an error of ``save``, or of ``huggingface_hub`` with a note about the state
                of the repository.
        """
        workspace.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".publishing-", dir=workspace))
        try:
            save(folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        rest = folder, tuple(places), message, token or self._token, revision
        if not background:
            return self._send(*rest)
        push: Future[CommitInfo] = self._api.run_as_future(self._send, *rest)
        push.add_done_callback(self._report)
        self._pushes = [*(p for p in self._pushes if not p.done()), push]
        return push

    def _report(self, push: Future[CommitInfo]) -> None:
        if not push.cancelled() and (error := push.exception()) is not None:
            notes = " ".join(getattr(error, "__notes__", ()))
            logger.error("A push to %s failed: %s %s", self.repo_id, error, notes)

    def _send(
        self,
        folder: Path,
        places: tuple[str, ...],
        message: str,
        token: str | None,
        revision: str | None,
    ) -> CommitInfo:
        try:
            _require_as_saved(folder)
            files, _ = files_in(folder)
            targets = {
                PurePosixPath(place, name): files[name] for place in places for name in files
            }
            self._refuse_foreign_weights(targets, token, revision)
            adds = [CommitOperationAdd(str(to), file) for to, file in targets.items()]
            return self._api.create_commit(
                self.repo_id, adds, commit_message=message, token=token, revision=revision
            )
        except PrivacyError:
            raise
        except Exception as error:
            error.add_note(
                f"{self.repo_id} shows no file of this push, or all of them if only the Hub's "
                f"answer was lost. Other files there were not changed. {_advice(error)}"
            )
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _refuse_foreign_weights(
        self, targets: dict[PurePosixPath, Path], token: str | None, revision: str | None
    ) -> None:
        there = self._api.list_repo_files(self.repo_id, token=token, revision=revision)
        places = {target.parent for target in targets}
        others = {path for name in there if (path := PurePosixPath(name)).parent in places}
        unsaved = others - targets.keys()
        if foreign := sorted(
            str(p) for p in unsaved if is_weights(p.name) or p.name.lower() == ADAPTER_CONFIG
        ):
            raise PrivacyError(
                f"{self.repo_id} contains {', '.join(foreign)}, which this run did not make. The "
                "card and the ledger would seem to describe them. Delete these files there, or "
                "publish under another hub_model_id."
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
