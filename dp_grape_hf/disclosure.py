"""What leaves a private run: reports, metrics, files, uploads.

The half of ``DPGrapeMixin`` that keeps un-noised functions of the training data from going out. The
sections follow ``transformers.Trainer``.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from huggingface_hub import CommitInfo
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import HubStrategy, PredictionOutput

from dp_grape_hf.arguments import DPGrapeArguments
from dp_grape_hf.callbacks import OnlyPrivateLogs
from dp_grape_hf.entries import CARD_NAME, LEDGER_NAME
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.hub import Repository
from dp_grape_hf.ledger import Ledger
from dp_grape_hf.model_card import CardDetails, declare, render
from dp_grape_hf.plan import PrivacyPlan, PrivacySpent
from dp_grape_hf.run import Run
from dp_grape_hf.sampling import LogicalBatch
from dp_grape_hf.seams import require_seams
from dp_grape_hf.staging import is_hub_name
from dp_grape_hf.weight_files import digests

if TYPE_CHECKING:
    _Host = Trainer
else:  # the host is the other base of the class that is made
    _Host = object

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TestGenerators:
    """Seeded streams for tests. Whoever knows them can subtract the noise: nothing is private."""

    sampling: torch.Generator
    noise: torch.Generator


class DisclosureMixin(_Host):
    """Lets only private quantities out of a run, and says what was spent on them."""

    args: DPGrapeArguments
    model: nn.Module
    plan: PrivacyPlan
    ledger: Ledger | None = None  # made when training starts
    _card_details: CardDetails = CardDetails()
    _given_train_dataset: Any = None  # before the host made something else of it
    private_run: Run
    _prefixes: tuple[str, ...] = ("eval",)  # of metrics of evaluation data
    _private_norm: Tensor = torch.zeros(())
    _repository: Repository | None = None  # once something is to be published
    _test_generators: TestGenerators | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        require_seams(super())
        super().__init__(*args, **kwargs)
        if not self.args.log_unnoised_statistics:
            me = weakref.proxy(self)  # a cycle would keep the model alive after the trainer
            self.callback_handler.callbacks.insert(0, OnlyPrivateLogs(lambda: me._prefixes))
        # Now, as a folder that the model was loaded from may be gone when something is published.
        self._on_hub = {name: is_hub_name(name) for name in self._base_names()}

    # ---- Training Utilities ----

    @contextmanager
    def _keeping_state(self, resumes: bool) -> Iterator[None]:
        """Keeps the state that belongs to the weights where a run is refused before it starts."""
        ledger, model, state = self.ledger, self.model, self.state
        try:
            yield
        except BaseException:
            if self.ledger is ledger and self.model is model and not resumes:
                self.state = state
            raise

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Reports the norm of the private gradient; clipping again would be wrong."""
        return self._private_norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Tensor:
        """Reports the norm of the private gradient, as ``_clip_grad_norm`` does."""
        return self._private_norm

    def _track_num_input_tokens(self, inputs: LogicalBatch) -> None:
        """Counts tokens of drawn batches only if un-noised statistics are asked for."""
        for physical in inputs if self.args.log_unnoised_statistics else ():
            super()._track_num_input_tokens(physical)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Returns the expected size of a draw, which throughput is reported for."""
        return self.args.logical_batch_size

    # ---- Evaluation & Prediction ----

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **kwargs: Any,
    ) -> dict[str, float]:
        """Evaluates as the original does, but not on the training data: metrics are logged."""
        training_data = [self._given_train_dataset, self.train_dataset]
        refuse_training_data(eval_dataset, training_data, self.args)
        with self._logging(metric_key_prefix):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix, **kwargs)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **kwargs: Any,
    ) -> PredictionOutput:
        """Predicts as the original does; what is logged under the prefix meanwhile is let pass."""
        with self._logging(metric_key_prefix):
            return super().predict(test_dataset, ignore_keys, metric_key_prefix, **kwargs)

    @contextmanager
    def _logging(self, prefix: str) -> Iterator[None]:
        """Has metrics of that prefix logged, as they are of evaluation data."""
        before = self._prefixes
        self._prefixes = (*before, prefix)
        try:
            yield
        finally:
            self._prefixes = before

    # ---- Checkpoint Saving, Checkpoint Resuming ----

    def _save_rng_state(self, output_dir: str) -> None:
        """Saves no random state: dropout masks are secret (``randomness.forget_the_seed``)."""
        if self._test_generators is not None:
            super()._save_rng_state(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Loads no random state, for the same reason."""
        if self._test_generators is not None:
            super()._load_rng_state(checkpoint)

    # ---- Saving & Serialization ----

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Moves what is kept beside the weights into them first, in every process."""
        self.private_run.merge_()
        super().save_model(*args, **kwargs)

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        """Saves as the original does, with the ledger and the card beside the weights."""
        super()._save(output_dir, state_dict)
        if self.args.should_save and self.ledger is not None:
            folder = Path(str(self.args.output_dir) if output_dir is None else output_dir)
            saved = digests(folder)
            self.ledger.snapshot(self.state.global_step, saved).save(folder / LEDGER_NAME)
            self._write_card(folder)

    def _write_card(self, folder: Path) -> None:
        assert self.ledger is not None
        (folder / CARD_NAME).write_text(self._card(self.ledger), encoding="utf-8")

    def _card(self, ledger: Ledger) -> str:
        """Writes the card of a ledger, and of what is known of the model without its data."""
        details = self._card_details
        names = (n for n in self._base_names() if self._is_on_hub(n))  # a path is ours alone
        details = replace(
            details,
            base_model=details.base_model or next(names, None),
            adapter=bool(getattr(self.model, "peft_config", {})),
            repo_id=self.hub_model_id if self._repository is not None else None,
        )
        return render(ledger, details, updates=self.state.global_step)

    def _base_names(self) -> list[str]:
        """Returns where the model was loaded from: names on the Hub, or paths."""
        configs = getattr(self.model, "peft_config", {}).values()
        names = [config.base_model_name_or_path for config in configs]
        names.append(getattr(getattr(self.model, "config", None), "_name_or_path", None))
        return [name for name in names if name]

    def _is_on_hub(self, name: str) -> bool:
        return self._on_hub[name] if name in self._on_hub else is_hub_name(name)

    # ---- Logging & Metrics ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds epsilon; ``OnlyPrivateLogs`` then takes out what is not known to be private."""
        if self.is_in_train and self.ledger is not None and self.args.private:
            logs["epsilon"] = self.privacy_spent().epsilon
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: LogicalBatch) -> int:  # type: ignore[override]
        """Returns 0 unless un-noised statistics are asked for: the count tells the drawn sizes."""
        batches = inputs if self.args.log_unnoised_statistics else ()
        count = super().floating_point_ops
        return sum(count(physical) for physical in batches)

    def privacy_spent(self) -> PrivacySpent:
        """Returns epsilon so far, an upper bound, and all it depends on."""
        if self.train_dataset is None:
            raise PrivacyError("train_dataset=None: nothing is trained, so nothing is spent.")
        return self.plan.spent(self.ledger)

    def releases_left(self) -> float:
        """Returns how many more releases the budget allows; infinite without a target epsilon."""
        return self.plan.releases_left(self.ledger)

    # ---- Hub Integration ----

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Makes or opens the repository, which only ``hub`` uploads to.

        Raises:
            PrivacyError: PEFT would save the adapter in a folder of its own, where it is not
                published from.
        """
        adapters = list(getattr(self.model, "peft_config", {}))
        own_format = not isinstance(self.model, PreTrainedModel)  # PEFT's, not that of transformers
        if adapters and own_format and "default" not in adapters:
            raise PrivacyError(
                f"The model's adapters are {adapters}, and only one named 'default' is published, "
                "as PEFT saves the others in folders of their own. Make it by get_peft_model() "
                "without adapter_name, or turn push_to_hub off."
            )
        if not self.is_world_process_zero():
            return
        args = self.args
        self._repository = Repository(
            args.hub_model_id or Path(str(args.output_dir)).absolute().name,
            token=token if token is not None else args.hub_token,
            private=private if private is not None else args.hub_private_repo,
        )
        self.hub_model_id = self._repository.repo_id  # type: ignore[assignment]
        self.push_in_progress = None  # of the original, which has nothing to push

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Writes our card; the original has a column of training losses.

        Takes what ``model_card.declare`` takes, which is kept for later cards of this trainer:
        most arguments of the original, and ``metrics``, which appear with a word on whether their
        data is public (``eval_data_is_public``).
        """
        public = self.args.eval_data_is_public
        self._card_details = declare(self._card_details, public, *args, **kwargs)
        if self.is_world_process_zero() and self.ledger is not None:
            self._write_card(Path(str(self.args.output_dir)))

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Saves the model and publishes it; the original uploads the whole folder.

        What is sent is on the list in `staging.ALLOWED`: weights, configs, tokenizer or
        processor, ledger and card. A run without a guarantee is published as such.

        Args:
            commit_message: as for the original, and so are the next four.
            blocking: whether to wait for the upload.
            token: instead of ``hub_token``.
            revision: instead of ``hub_revision``.
            private: instead of ``hub_private_repo``.
            **kwargs: what ``create_model_card`` takes.

        Returns:
            The commit, or a future of it unless ``blocking``; None in all processes but the first.

        Raises:
            PrivacyError: nothing was trained, or what was saved may not be published.
            Exception: what ``huggingface_hub`` raises, with a note that says what is published.
        """
        if self.ledger is None:
            raise PrivacyError(
                "push_to_hub() before train(): there is no ledger yet, so no card could say what "
                "was spent. Train first."
            )
        # on_push_begin is not called: a tracker of the host's uploads its log then.
        if self._repository is None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self.create_model_card(**kwargs)
        self._finish_current_push()
        folder = Path(str(self.args.output_dir))
        message = commit_message or "End of training"
        return self._publish(folder, message, token=token, revision=revision, wait=blocking)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Publishes a checkpoint; optimizer, schedule and trainer state stay in its folder.

        With ``hub_strategy`` "checkpoint" the files go into ``last-checkpoint`` as well, and with
        "all_checkpoints" into a folder of the checkpoint's name: all in one commit. Where that
        fails, the error is logged, and training goes on.
        """
        strategy, folder = HubStrategy(self.args.hub_strategy), Path(checkpoint_folder)
        if not self.is_world_process_zero() or strategy is HubStrategy.END:
            return
        copies = {
            HubStrategy.CHECKPOINT: ("last-checkpoint",),
            HubStrategy.ALL_CHECKPOINTS: (folder.name,),
        }
        message = f"Training in progress, step {self.state.global_step}"
        try:
            if self._repository is None:
                self.init_hf_repo()
            assert self._repository is not None
            if self._repository.busy and not self.args.hub_always_push:
                return
            self._publish(folder, message, copies.get(strategy, ()), wait=False)
        except Exception as error:
            advice = "The checkpoint is whole and training goes on; publish by push_to_hub() later."
            logger.exception("%s was not published (%r). %s", folder, error, advice)

    def _finish_current_push(self) -> None:
        """Waits for the uploads in the background."""
        if self._repository is not None:
            self._repository.wait()

    def _publish(
        self,
        folder: Path,
        message: str,
        copies: tuple[str, ...] = (),
        *,
        token: str | None = None,
        revision: str | None = None,
        wait: bool,
    ) -> CommitInfo | Future[CommitInfo]:
        assert self._repository is not None
        return self._repository.publish(
            folder,
            self._card,
            workspace=Path(str(self.args.output_dir)),
            message=message,
            places=("", *copies),
            token=token,
            revision=revision if revision is not None else self.args.hub_revision,
            background=not wait,
            on_hub=self._is_on_hub,
        )

    # ---- Hyperparameter Search ----

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses: choosing the best of several private runs is not covered by any one ledger."""
        raise PrivacyError(
            "hyperparameter_search() chooses among runs by their results, which the epsilon of one "
            "run does not cover. Tune on public data, or account for every run and add them up."
        )


def refuse_training_data(
    dataset: Any, training_data: Iterable[Any], args: DPGrapeArguments
) -> None:
    """Refuses to evaluate on the training data, whose metrics would be logged as they are.

    Args:
        dataset: an evaluation data set, or several by name.
        training_data: the training data set, as it was passed and as it is.
        args: the arguments of the run.

    Raises:
        PrivacyError: if they share an object that is neither declared public nor given up.
    """
    datasets = dataset.values() if isinstance(dataset, dict) else [dataset]
    ours = {id(data) for data in training_data if data is not None}
    if any(id(data) in ours for data in datasets) and not (
        args.eval_data_is_public or args.log_unnoised_statistics
    ):
        raise PrivacyError(
            "eval_dataset is the train_dataset: its metrics, which are logged, are un-noised "
            "functions of the training data. Hold out other examples. If all of the data is "
            "public, set eval_data_is_public=True."
        )
