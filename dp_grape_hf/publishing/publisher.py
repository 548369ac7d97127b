"""Save a trained model with its ledger and its card in a folder, and publish them on the Hub."""

import logging
import re
import shutil
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.ledger import CARD_NAME, LEDGER_NAME, Ledger, beside_its_ledger
from dp_grape_hf.publishing.card import CardDetails, render
from dp_grape_hf.publishing.configs import clean_configs, is_hub_name
from dp_grape_hf.publishing.model_files import (
    ADAPTER_CONFIG,
    INDEX,
    MODEL,
    digests,
    files_in,
    is_weights,
)

logger = logging.getLogger(__name__)

# Weight files and their index, which a save replaces.
_PART = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


class Publisher:
    """Writer of a private run's model with ledger and card, to a folder or to the Hub.

    The trainers have a publisher, and you can make one for your own loop. With several processes,
    only the first one saves and publishes.

    Args:
        ledger: the ledger of the run. While it is None, nothing can be saved or published.
        folder: the folder in which the model is saved.
        model: the model. A model of transformers or PEFT is saved with its config; of other models,
            only the tensors are saved.
        processing_class: the tokenizer or processor to save with the model.
        details: information for the card that is not in the ledger.

    Attributes:
        repo_id: the full name of the repository on the Hub; None before ``open``.

    You may set ``ledger`` and ``details`` at any time.
    """

    def __init__(
        self,
        ledger: Ledger | None,
        folder: str | Path,
        model: Any,
        processing_class: Any = None,
        *,
        details: CardDetails | None = None,
    ) -> None:
        self.ledger, self.folder = ledger, Path(folder)
        self.processing_class = processing_class
        self.details = details or CardDetails()
        self._api = HfApi(library_name="dp_grape_hf")
        self.repo_id: str | None = None
        self._token: str | None = None
        self._pushes: list[Future[CommitInfo]] = []
        self._on_hub: dict[str, bool] = {}
        self.set_model(model)

    def set_model(self, model: Any) -> None:
        """Use another model, and store whether its base model is on the Hub.

        This is looked up here, because a local folder may be gone when the model is published.
        """
        self.model = model
        self._on_hub = {name: is_hub_name(name) for name in _base_names(model)} | self._on_hub

    # ---- In a folder ----

    def save(
        self,
        updates: int,
        folder: Path | None = None,
        *,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Save the model, its tokenizer or processor, the ledger and the card.

        All files are written to an empty folder first. When they are complete, they replace the
        files of the same names. A crash before that does not change the earlier files.

        Args:
            updates: the number of updates in the weights.
            folder: the folder; None for the publisher's folder.
            weights: the tensors to save; None for the model's ``state_dict``.

        Raises:
            PrivacyError: there is no ledger, or it has fewer releases than ``updates``.
        """
        self._require_ledger()
        folder = self.folder if folder is None else folder
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as fresh:
            self._save_into(Path(fresh), updates, weights, public=False)
            _put_in_place(Path(fresh), folder)

    def _save_into(
        self, folder: Path, updates: int, weights: Mapping[str, Tensor] | None, *, public: bool
    ) -> None:
        """Save everything into an empty folder, and record the digest of each file."""
        ledger, model = self._require_ledger(), self.model
        if isinstance(model, PreTrainedModel) or adapters_of(model):
            with beside_its_ledger(model):
                model.save_pretrained(folder, state_dict=weights)
        else:
            tensors = model.state_dict() if weights is None else dict(weights)
            save_file(tensors, folder / MODEL, metadata={"format": "pt"})
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        if public:
            clean_configs(folder, self._is_on_hub)
        (folder / CARD_NAME).write_text(self._card(updates), encoding="utf-8")
        ledger.snapshot(updates, digests(folder)).save(folder / LEDGER_NAME)

    def write_card(self, updates: int | None = None) -> None:
        """Write the card again, for instance after you changed ``details``.

        Args:
            updates: the number of updates in the weights, if the model was not saved yet.

        Raises:
            PrivacyError: there is no ledger, or it records no saved weights (``card.render``).
        """
        card = self._card(updates)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / CARD_NAME).write_text(card, encoding="utf-8")

    def _card(self, updates: int | None) -> str:
        """Return the card, with the base model and the class of the model filled in."""
        names = (n for n in _base_names(self.model) if self._is_on_hub(n))  # no local paths
        details = replace(
            self.details,
            base_model=self.details.base_model or next(names, None),
            adapter=bool(adapters_of(self.model)),
            repo_id=self.repo_id or self.details.repo_id,
            model_class=self.details.model_class or _class_of(self.model),
            num_labels=self.details.num_labels or _labels_of(self.model),
        )
        return render(self._require_ledger(), details, updates=updates)

    def _is_on_hub(self, name: str) -> bool:
        return self._on_hub[name] if name in self._on_hub else is_hub_name(name)

    def _require_ledger(self) -> Ledger:
        if self.ledger is None:
            raise PrivacyError(
                "ledger=None: without a ledger, the epsilon spent is unknown. Train first, or pass "
                "the ledger that recorded the releases."
            )
        return self.ledger

    # ---- On the Hub ----

    def open(self, name: str, *, token: str | None = None, private: bool | None = None) -> str:
        """Create or open a repository, and return its full name.

        Args:
            name: ``user/model``, or ``model`` for a repository of the token's user.
            token: a token that may write; None for the token that ``hf auth login`` saved.
            private: whether a new repository is private; None for the Hub's default.

        Raises:
            Exception: an error of ``huggingface_hub``, with a note that says what to do.
        """
        try:
            opened = self._api.create_repo(name, token=token, private=private, exist_ok=True)
        except Exception as error:
            error.add_note(f"The repository {name} cannot be created or opened. {_advice(error)}")
            raise
        self.repo_id, self._token = opened.repo_id, token
        return self.repo_id

    def push(
        self,
        updates: int,
        message: str = "End of training",
        *,
        weights: Mapping[str, Tensor] | None = None,
        copies: tuple[str, ...] = (),
        token: str | None = None,
        revision: str | None = None,
        background: bool = False,
    ) -> CommitInfo | Future[CommitInfo]:
        """Save into an empty folder, and publish exactly this folder in one commit.

        The Hub shows all files of a commit or none. So weights never appear without their ledger
        and card, and a failed push does not change the repository. The folder contains only the
        files that ``save`` writes. Local paths are removed from the configs. The card of a run
        without a guarantee says so. You may change the model after this method has returned.

        Args:
            updates: the number of updates in the weights.
            message: the message of the commit.
            weights: as for ``save``.
            copies: folders in the repository that receive the same files.
            token: a token that may write; None for the repository's token.
            revision: the branch, which must exist; None for the main branch.
            background: whether to return a future as soon as the model is saved. Pushes are made
                one after the other.

        Raises:
            PrivacyError: no repository is open, the repository contains weights of another origin,
                the files changed after they were saved, or a config names other weights; or an
                error of ``save``.
            Exception: an error of ``huggingface_hub``, with a note about the state of the
                repository.
        """
        if self.repo_id is None:
            raise PrivacyError(
                "push() was called before open(), so there is no repository to push to. Call "
                "open('user/model') first."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=".publishing-", dir=self.folder))
        try:
            self._save_into(fresh, updates, weights, public=True)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        access = {"token": token or self._token, "revision": revision}
        rest = fresh, self.repo_id, ("", *copies), message, access
        if not background:
            return self._send(*rest)
        push: Future[CommitInfo] = self._api.run_as_future(self._send, *rest)
        push.add_done_callback(self._report)
        self._pushes = [*(p for p in self._pushes if not p.done()), push]
        return push

    def _send(
        self, folder: Path, repo_id: str, places: tuple[str, ...], message: str, access: Any
    ) -> CommitInfo:
        """Publish exactly the files of a folder in one commit, and remove the folder.

        ``places`` are the folders of the repository that receive the files.
        """
        try:
            _require_as_saved(folder)
            files, _ = files_in(folder)
            targets = {
                PurePosixPath(place, name): files[name] for place in places for name in files
            }
            there = self._api.list_repo_files(repo_id, **access)
            _refuse_foreign_weights(repo_id, set(map(PurePosixPath, there)), set(targets))
            adds = [CommitOperationAdd(str(target), file) for target, file in targets.items()]
            return self._api.create_commit(repo_id, adds, commit_message=message, **access)
        except PrivacyError:
            raise
        except Exception as error:
            error.add_note(
                f"{repo_id} shows no file of this push, or all of them if only the Hub's answer "
                f"was lost. Other files there were not changed. {_advice(error)}"
            )
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def busy(self) -> bool:
        """True while a push runs in the background."""
        return any(not push.done() for push in self._pushes)

    def wait(self) -> None:
        """Wait for the pushes in the background. Failed pushes are logged."""
        wait(self._pushes)
        self._pushes.clear()

    def _report(self, push: Future[CommitInfo]) -> None:
        if not push.cancelled() and (error := push.exception()) is not None:
            notes = " ".join(getattr(error, "__notes__", ()))
            logger.error("A push to %s failed: %s %s", self.repo_id, error, notes)


def adapters_of(model: Any) -> Mapping[str, Any]:
    """Return the configs of a model's PEFT adapters, by the names of the adapters."""
    configs: Mapping[str, Any] = getattr(model, "peft_config", {})
    return configs


def _class_of(model: Any) -> str | None:
    """Return the name of the model's class; None if it is not a class of transformers."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return type(base).__name__ if type(base).__module__.startswith("transformers.") else None


def _labels_of(model: Any) -> int | None:
    """Return the number of labels of a classifier of transformers; None for other models."""
    labels = getattr(getattr(model, "config", None), "num_labels", None)
    name = _class_of(model) or ""
    return labels if name.endswith("Classification") and isinstance(labels, int) else None


def _base_names(model: Any) -> list[str]:
    """Return the names on the Hub, or paths, that a model was loaded from."""
    names = [config.base_model_name_or_path for config in adapters_of(model).values()]
    names.append(getattr(getattr(model, "config", None), "_name_or_path", None))
    return [name for name in names if name]


def _put_in_place(fresh: Path, folder: Path) -> None:
    """Move the saved files from one folder to another, each atomically, and the ledger last."""
    files, _ = files_in(fresh)
    for name in sorted(files, key=lambda name: name == LEDGER_NAME):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        files[name].replace(folder / name)
    if {MODEL, INDEX} & files.keys():  # remove weight files of an earlier model
        for path in folder.iterdir():
            if _PART.fullmatch(path.name) and path.name not in files:
                path.unlink()


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
    return (
        "A model that is saved on this machine can be sent later: push again with "
        "trainer.push_to_hub(). Leave out push_to_hub=True to train without the Hub."
    )
