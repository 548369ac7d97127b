"""Saving and publishing of the model of a private run."""

import logging
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import HubStrategy

from dp_grape_hf.arguments import DPGrapeArguments
from dp_grape_hf.choosing import Rates
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.ledger import Ledger
from dp_grape_hf.publishing import Publisher, declare
from dp_grape_hf.sharding import gathered_weights, is_sharded
from dp_grape_hf.trainer.chosen import Choices, Parts, schedule_name
from dp_grape_hf.trainer.override_checks import Host
from dp_grape_hf.trainer.run import PrivateRun

logger = logging.getLogger(__name__)


class SavingMixin(Host):
    """Overrides that save and publish only the private results of a run."""

    args: DPGrapeArguments
    model: nn.Module
    private_run: PrivateRun
    ledger: Ledger | None = None  # made when training starts
    rates: Rates | None = None
    """Learning rates by parameter name, and the effect of noise alone at these rates."""
    _parts: Parts | None = None  # the choices about the model
    _resumed: Choices | None = None  # the choices of the checkpoint from which this run resumes
    _refused: bool = False  # whether the last train() raised an error before any update

    @cached_property
    def publisher(self) -> Publisher:
        """The object that saves and publishes the model, with its ledger and its card."""
        texts = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        return Publisher(self.ledger, str(self.args.output_dir), self.model, texts)

    # ---- Saving & Serialization ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Merge updates that are kept separately into the weights first, in every process.

        Raises:
            PrivacyError: ``train()`` raised an error before its first update. The saved files then
                stay unchanged.
        """
        if self._refused:
            raise PrivacyError(
                "save_model() after train() raised a PrivacyError: nothing was trained, and an "
                "earlier saved model would be overwritten. Train first."
            )
        self.private_run.merge_()
        self._save(output_dir, self._whole_weights())
        choices = self._choices if self.ledger is not None and self.args.should_save else None
        if choices is not None and _internal_call and output_dir is not None:  # a checkpoint
            choices.save(Path(output_dir))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        """Save with ledger and card, if there is a ledger."""
        if not self.args.should_save:
            return
        folder = self.publisher.folder if output_dir is None else Path(output_dir)
        if self.ledger is None:  # nothing was trained
            super()._save(str(folder), state_dict)
            return
        self._declare_hyperparameters()
        self.publisher.save(self.state.global_step, folder, weights=state_dict)
        torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _whole_weights(self) -> dict[str, Any] | None:
        """Return the weights on the CPU, if saving needs them so; a collective call."""
        return gathered_weights(self.model) if is_sharded(self.model) else None

    @property
    def _choices(self) -> Choices | None:
        """The choices of this run, from its start; None if learning_rate was given."""
        if self._resumed is not None or self._parts is None or self.rates is None:
            return self._resumed
        factors: Any = self.args.learning_rate_factors
        return Choices(self.args.chosen_options, factors, self._parts, self.rates)

    # ---- Hub Integration ----

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create or open the repository on the Hub.

        Args:
            token: an access token; by default ``args.hub_token``.
            private: the visibility of a new repository; by default ``args.hub_private_repo``.
        """
        if not self.is_world_process_zero():
            return
        args = self.args
        self.hub_model_id = self.publisher.open(  # type: ignore[assignment]
            args.hub_model_id or self.publisher.folder.absolute().name,
            token=token if token is not None else args.hub_token,
            private=private if private is not None else args.hub_private_repo,
        )
        self.push_in_progress = None  # an attribute of the host, which must not push

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the model card of this package; the host's has a column of training losses.

        Args:
            *args: as for the host.
            **kwargs: as for the host, and ``metrics`` (``publishing.declare``). They are also used
                for later cards of this trainer.
        """
        public = self.args.eval_data_is_public
        self.publisher.details = declare(self.publisher.details, public, *args, **kwargs)
        if self.is_world_process_zero() and self.ledger is not None:
            self._declare_hyperparameters()
            self.publisher.write_card(self.state.global_step)

    def _declare_hyperparameters(self) -> None:
        """List settings on the card that are not in the ledger."""
        args, publisher = self.args, self.publisher
        groups = [] if self.rates is None else self.rates.groups
        rates = ", ".join(f"{group.rate:.4g} ({group.name})" for group in groups)
        settings = {
            "Learning rate": rates or f"{args.learning_rate:g}",
            "Schedule": schedule_name(args),
            "Update rule": args.update_rule,
            "Weight decay": f"{args.weight_decay:g}",
            "Autocast": "bfloat16" if args.bf16 else "float16" if args.fp16 else "none",
            "Weights": f"{next(self.model.parameters()).dtype}".removeprefix("torch."),
        }
        listed = {name: value for name, value in settings.items() if value is not None}
        publisher.details = replace(publisher.details, hyperparameters=listed)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model, and publish it with ledger and card; the host would upload the folder.

        Takes the arguments of the host, and of ``create_model_card``.

        Returns:
            The commit, or a future of it unless ``blocking``; None in all processes but the first.

        Raises:
            PrivacyError: nothing was trained, or as ``Publisher.push``.
            Exception: an error of ``huggingface_hub``, with a note that says what is published.
        """
        if self.ledger is None:
            raise PrivacyError(
                "push_to_hub() before train(): there is no ledger yet, so no card could state "
                "epsilon. Train first."
            )
        # on_push_begin is not called, because a tracker of the host would upload its log.
        if self.publisher.repo_id is None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        weights = self._whole_weights()
        if not self.is_world_process_zero():
            return None
        self.create_model_card(**kwargs)
        self._finish_current_push()
        return self.publisher.push(
            self.state.global_step,
            commit_message or "End of training",
            weights=weights,
            token=token,
            revision=revision if revision is not None else self.args.hub_revision,
            background=not blocking,
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Publish the model of a checkpoint; optimizer, schedule and trainer state stay here.

        With ``hub_strategy`` "checkpoint", the commit also has the files in ``last-checkpoint``;
        with "all_checkpoints", in a folder with the checkpoint's name. If it fails, the error is
        logged, and training goes on.
        """
        strategy, folder = HubStrategy(self.args.hub_strategy), Path(checkpoint_folder)
        if strategy is HubStrategy.END:
            return
        weights = self._whole_weights()
        if not self.is_world_process_zero():
            return
        copies = {
            HubStrategy.CHECKPOINT: ("last-checkpoint",),
            HubStrategy.ALL_CHECKPOINTS: (folder.name,),
        }
        try:
            if self.publisher.repo_id is None:
                self.init_hf_repo()
            if self.publisher.busy and not self.args.hub_always_push:
                return
            self.publisher.push(
                self.state.global_step,
                f"Training in progress, step {self.state.global_step}",
                weights=weights,
                copies=copies.get(strategy, ()),
                revision=self.args.hub_revision,
                background=True,
            )
        except Exception as error:
            advice = "The checkpoint is saved and training goes on. Call push_to_hub() later."
            logger.exception("%s was not published (%r). %s", folder, error, advice)

    def _finish_current_push(self) -> None:
        """Wait for the uploads in the background."""
        self.publisher.wait()
