"""A trained model in a folder, with the ledger and the card that speak for it, and on the Hub."""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import CommitInfo
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.ledger import CARD_NAME, LEDGER_NAME, Ledger, beside_its_ledger
from dp_grape_hf.publishing.adapter import Adapter, adapters_of
from dp_grape_hf.publishing.card import CardDetails, render
from dp_grape_hf.publishing.configs import clean_configs, is_hub_name
from dp_grape_hf.publishing.hub import Repository
from dp_grape_hf.publishing.model_files import INDEX, MODEL, digests, files_in

# The whole of a model, its parts and their index: what a save replaces.
_PART = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


class Publisher:
    """Saves the model of a private run with its ledger and its card, and publishes the three.

    The trainers have one, and a loop of one's own makes one. With several processes only the first
    saves and publishes.

    Args:
        ledger: of the run; None as long as there is none, and then nothing is saved or published.
        folder: where the model is saved.
        model: a model of transformers or PEFT is saved with its config; of another model, only
            the tensors are saved.
        processing_class: its tokenizer or processor, which is saved with it.
        adapter: as which the model is saved, made before training; None for the whole model.
        details: what the card says beside the ledger.

    Attributes:
        repository: on the Hub; None before ``open``.

    ``ledger``, ``adapter`` and ``details`` may be set at any time.
    """

    def __init__(
        self,
        ledger: Ledger | None,
        folder: str | Path,
        model: Any,
        processing_class: Any = None,
        *,
        adapter: Adapter | None = None,
        details: CardDetails | None = None,
    ) -> None:
        self.ledger, self.folder = ledger, Path(folder)
        self.processing_class = processing_class
        self.adapter, self.details = adapter, details or CardDetails()
        self.repository: Repository | None = None
        self._on_hub: dict[str, bool] = {}
        self.use(model)

    def use(self, model: Any) -> None:
        """Takes another model, and notes whether what it was loaded from is on the Hub.

        Now, as a folder that it was loaded from may be gone when something is published.
        """
        self.model = model
        self._on_hub = {name: is_hub_name(name) for name in _base_names(model)} | self._on_hub

    # ---- In a folder ----

    def save(
        self,
        updates: int,
        folder: Path | None = None,
        *,
        changes: Mapping[str, tuple[Tensor, Tensor]] | None = None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Save the model or its adapter, its tokenizer or processor, the ledger and the card.

        All are written to an empty folder first, and replace the files of their names when they
        are whole. A crash before that leaves what was saved before.

        Args:
            updates: how many updates the weights contain.
            folder: instead of the publisher's.
            changes: what was added to projected weights (``Run.changes``). With them the adapter is
                saved, without them the whole model.
            weights: the tensors of the model, instead of those of its ``state_dict``.

        Raises:
            PrivacyError: there is no ledger, or it has fewer releases than the weights have
                updates; or the adapter does not fit (``Adapter.save``).
        """
        self._require_ledger()
        folder = self.folder if folder is None else folder
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".saving-", dir=folder) as fresh:
            self._save_into(Path(fresh), updates, changes, weights, public=False)
            _put_in_place(Path(fresh), folder)

    def _save_into(
        self,
        folder: Path,
        updates: int,
        changes: Mapping[str, tuple[Tensor, Tensor]] | None,
        weights: Mapping[str, Tensor] | None,
        *,
        public: bool,
    ) -> None:
        """Save everything into an empty folder, and record the digest of each file."""
        ledger, model = self._require_ledger(), self.model
        tensors = model.state_dict() if weights is None else weights
        if changes is not None:
            if self.adapter is None:
                raise PrivacyError(
                    "changes are those of an adapter, and this publisher has none. Pass adapter=, "
                    "or leave changes out to save the whole model."
                )
            self.adapter.save(tensors, changes, folder)
        elif isinstance(model, PreTrainedModel) or adapters_of(model):
            with beside_its_ledger(model):
                model.save_pretrained(folder, state_dict=weights)
        else:
            save_file({**tensors}, folder / MODEL, metadata={"format": "pt"})
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        if public:
            clean_configs(folder, self._is_on_hub)
        card = self._card(updates, adapter=changes is not None)
        (folder / CARD_NAME).write_text(card, encoding="utf-8")
        ledger.snapshot(updates, digests(folder)).save(folder / LEDGER_NAME)

    def write_card(self, updates: int | None = None) -> None:
        """Write the card anew, when ``details`` have changed.

        Args:
            updates: how many updates the weights contain, if the model was not saved yet.

        Raises:
            PrivacyError: there is no ledger, or it speaks for no weights (``card.render``).
        """
        card = self._card(updates, adapter=self.adapter is not None)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / CARD_NAME).write_text(card, encoding="utf-8")

    def _card(self, updates: int | None, *, adapter: bool) -> str:
        """Return the card of the ledger, and of what is known of the model without its data."""
        names = (n for n in _base_names(self.model) if self._is_on_hub(n))  # a path is ours alone
        details = replace(
            self.details,
            base_model=self.details.base_model or next(names, None),
            adapter=adapter or bool(adapters_of(self.model)),
            repo_id=self.details.repo_id if self.repository is None else self.repository.repo_id,
            model_class=self.details.model_class or _class_of(self.model),
        )
        return render(self._require_ledger(), details, updates=updates)

    def _is_on_hub(self, name: str) -> bool:
        return self._on_hub[name] if name in self._on_hub else is_hub_name(name)

    def _require_ledger(self) -> Ledger:
        if self.ledger is None:
            raise PrivacyError(
                "ledger=None: without a ledger no card can say what was spent. Train first, or "
                "pass the ledger that the releases were recorded in."
            )
        return self.ledger

    # ---- On the Hub ----

    def open(self, name: str, *, token: str | None = None, private: bool | None = None) -> str:
        """Makes or opens a repository, and returns its whole name.

        Args:
            name: ``user/model``, or ``model`` for one of the user that the token belongs to.
            token: a token that may write; None takes the one that ``hf auth login`` saved.
            private: whether a repository that is created is private; None leaves it to the Hub.

        Raises:
            Exception: what ``huggingface_hub`` raises, with a note that says what it means here.
        """
        self.repository = Repository(name, token=token, private=private)
        return self.repository.repo_id

    def push(
        self,
        updates: int,
        message: str = "End of training",
        *,
        changes: Mapping[str, tuple[Tensor, Tensor]] | None = None,
        weights: Mapping[str, Tensor] | None = None,
        copies: tuple[str, ...] = (),
        token: str | None = None,
        revision: str | None = None,
        background: bool = False,
    ) -> CommitInfo | Future[CommitInfo]:
        """Save into an empty folder, and publish exactly this folder in one commit.

        It has the files that ``save`` writes, and no other. Local paths are taken out of the
        configs. A run without a guarantee is published as such. The model may change once this
        has returned.

        Args:
            updates: how many updates the weights contain.
            message: the commit's.
            changes: as for ``save``.
            weights: as for ``save``.
            copies: folders in the repository that receive the same files.
            token: another than the repository's.
            revision: the branch, which must exist; None is the main one.
            background: whether to return once the model is saved, with a future. Pushes are made
                one by one.

        Raises:
            PrivacyError: no repository is open, it holds weights of another origin, a config names
                other weights, or as ``save``.
            Exception: what ``huggingface_hub`` raises, with a note that says what is published.
        """
        if self.repository is None:
            raise PrivacyError(
                "push() before open(): say first which repository is to receive the model, by "
                "open('user/model')."
            )
        return self.repository.publish(
            lambda folder: self._save_into(folder, updates, changes, weights, public=True),
            workspace=self.folder,
            message=message,
            places=("", *copies),
            token=token,
            revision=revision,
            background=background,
        )

    @property
    def busy(self) -> bool:
        """Whether a push in the background is not done."""
        return self.repository is not None and self.repository.busy

    def wait(self) -> None:
        """Waits for the pushes in the background. A failed one has been logged when it failed."""
        if self.repository is not None:
            self.repository.wait()


def _class_of(model: Any) -> str | None:
    """Returns the name of the class that the model is loaded by; None if it is no model of
    transformers.
    """
    base = model.get_base_model() if adapters_of(model) and hasattr(model, "base_model") else model
    return type(base).__name__ if type(base).__module__.startswith("transformers.") else None


def _base_names(model: Any) -> list[str]:
    """Returns where a model was loaded from: names on the Hub, or paths."""
    names = [config.base_model_name_or_path for config in adapters_of(model).values()]
    names.append(getattr(getattr(model, "config", None), "_name_or_path", None))
    return [name for name in names if name]


def _put_in_place(fresh: Path, folder: Path) -> None:
    """Move what was saved from one folder to another, each file whole, and the ledger last."""
    files, _ = files_in(fresh)
    for name in sorted(files, key=lambda name: name == LEDGER_NAME):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        files[name].replace(folder / name)
    if {MODEL, INDEX} & files.keys():  # parts of an earlier model would be loaded beside this one
        for path in folder.iterdir():
            if _PART.fullmatch(path.name) and path.name not in files:
                path.unlink()
