"""A trained model in a folder, with the ledger and the card that speak for it, and on the Hub."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo
from torch import Tensor
from transformers import PreTrainedModel

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.ledger import CARD_NAME, LEDGER_NAME, Ledger
from dp_grape_hf.publishing.adapter import Adapter, adapters_of
from dp_grape_hf.publishing.card import CardDetails, render
from dp_grape_hf.publishing.hub import Repository
from dp_grape_hf.publishing.model_files import digests
from dp_grape_hf.publishing.staging import is_hub_name


class Publisher:
    """Saves the model of a private run with its ledger and its card, and publishes the three.

    The trainers have one, and a loop of one's own makes one. With several processes only the first
    saves and publishes.

    Args:
        ledger: of the run; None as long as there is none, and then nothing is saved or published.
        folder: where the model is saved.
        model: it has ``save_pretrained``, as those of transformers and of PEFT have.
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
        """Saves the model or its adapter, what it reads by, the ledger and the card.

        Args:
            updates: how many updates the weights contain.
            folder: instead of the publisher's.
            changes: of an adapter: what was added to projected weights (``Run.changes``).
            weights: of an adapter: the tensors of the model, instead of those of its
                ``state_dict``.

        Raises:
            PrivacyError: there is no ledger, or it has fewer releases than the weights have
                updates; or the adapter does not fit (``Adapter.save``).
        """
        folder = self.folder if folder is None else folder
        self._require_ledger()
        if self.adapter is None:
            self.model.save_pretrained(folder)
        else:
            if changes is None:
                raise PrivacyError(
                    "changes=None: an adapter is saved of what training changed. Pass the changes "
                    "of the run: Run.changes()."
                )
            tensors = self.model.state_dict() if weights is None else weights
            self.adapter.save(tensors, changes, folder)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        self.record(updates, folder, adapter=self.adapter is not None)

    def record(self, updates: int, folder: Path | None = None, *, adapter: bool = False) -> None:
        """Writes the ledger and the card of a model that was saved in a folder just now.

        Args:
            updates: how many updates the weights contain.
            folder: instead of the publisher's.
            adapter: whether it was saved as the publisher's adapter.

        Raises:
            PrivacyError: there is no ledger, or it has fewer releases than the weights have
                updates.
        """
        folder = self.folder if folder is None else folder
        ledger = self._require_ledger().snapshot(updates, digests(folder))
        ledger.save(folder / LEDGER_NAME)
        self._write(folder, self.card(ledger, adapter=adapter))

    def write_card(self, updates: int | None = None) -> None:
        """Writes the card anew, when ``details`` have changed.

        Args:
            updates: how many updates the weights contain, if the model was not saved yet.

        Raises:
            PrivacyError: there is no ledger, or it speaks for no weights (``card.render``).
        """
        self._write(self.folder, self.card(self._require_ledger(), updates))

    def _write(self, folder: Path, card: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CARD_NAME).write_text(card, encoding="utf-8")

    def card(
        self, ledger: Ledger, updates: int | None = None, *, adapter: bool | None = None
    ) -> str:
        """Returns the card of a ledger, and of what is known of the model without its data.

        Args:
            ledger: saved with the weights, or the publisher's own.
            updates: how many updates the weights contain, if the ledger was not saved with any.
            adapter: whether these are an adapter's; if None, whether the publisher has one.

        Raises:
            PrivacyError: the ledger speaks for no weights (``card.render``).
        """
        adapter = self.adapter is not None if adapter is None else adapter
        names = (n for n in _base_names(self.model) if self._is_on_hub(n))  # a path is ours alone
        details = self.details
        details = replace(
            details,
            base_model=details.base_model or next(names, None),
            adapter=adapter or bool(adapters_of(self.model)),
            repo_id=details.repo_id if self.repository is None else self.repository.repo_id,
        )
        return render(ledger, details, updates=updates)

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

    def require_one_adapter(self) -> None:
        """Refuses a model whose adapter PEFT saves where it is not published from.

        Raises:
            PrivacyError: PEFT would save the adapter in a folder of its own.
        """
        adapters = list(adapters_of(self.model))
        own_format = not isinstance(self.model, PreTrainedModel)  # PEFT's, not that of transformers
        if adapters and own_format and "default" not in adapters:
            raise PrivacyError(
                f"The model's adapters are {adapters}, and only one named 'default' is published, "
                "as PEFT saves the others in folders of their own. Make it by get_peft_model() "
                "without adapter_name, or turn push_to_hub off."
            )

    def open(self, name: str, *, token: str | None = None, private: bool | None = None) -> str:
        """Makes or opens a repository, and returns its whole name.

        Args:
            name: ``user/model``, or ``model`` for one of the user that the token belongs to.
            token: a token that may write; None takes the one that ``hf auth login`` saved.
            private: whether a repository that is created is private; None leaves it to the Hub.

        Raises:
            PrivacyError: as ``require_one_adapter``.
            Exception: what ``huggingface_hub`` raises, with a note that says what it means here.
        """
        self.require_one_adapter()
        self.repository = Repository(name, token=token, private=private)
        return self.repository.repo_id

    def push(
        self,
        message: str = "End of training",
        folder: Path | None = None,
        *,
        copies: tuple[str, ...] = (),
        token: str | None = None,
        revision: str | None = None,
        background: bool = False,
    ) -> CommitInfo | Future[CommitInfo]:
        """Publishes what was saved in one commit; the folder may change once this has returned.

        What is sent is on the list in `staging.ALLOWED`: weights, configs, tokenizer or
        processor, ledger and card. A run without a guarantee is published as such.

        Args:
            message: the commit's.
            folder: instead of the publisher's.
            copies: folders in the repository that receive the same files.
            token: another than the repository's.
            revision: the branch, which must exist; None is the main one.
            background: whether to return at once, with a future. Pushes are made one by one.

        Raises:
            PrivacyError: no repository is open, it holds weights of another origin, or what was
                saved may not be published.
            Exception: what ``huggingface_hub`` raises, with a note that says what is published.
        """
        if self.repository is None:
            raise PrivacyError(
                "push() before open(): say first which repository is to receive the model, by "
                "open('user/model')."
            )
        return self.repository.publish(
            self.folder if folder is None else folder,
            self.card,
            workspace=self.folder,
            message=message,
            places=("", *copies),
            token=token,
            revision=revision,
            background=background,
            on_hub=self._is_on_hub,
        )

    @property
    def busy(self) -> bool:
        """Whether a push in the background is not done."""
        return self.repository is not None and self.repository.busy

    def wait(self) -> None:
        """Waits for the pushes in the background. A failed one has been logged when it failed."""
        if self.repository is not None:
            self.repository.wait()


def _base_names(model: Any) -> list[str]:
    """Returns where a model was loaded from: names on the Hub, or paths."""
    names = [config.base_model_name_or_path for config in adapters_of(model).values()]
    names.append(getattr(getattr(model, "config", None), "_name_or_path", None))
    return [name for name in names if name]
