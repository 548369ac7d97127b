"""What leaves a private run: reports, metrics, files, uploads.

The half of ``DPGrapeMixin`` that keeps un-noised functions of the training data from going out. The
sections follow ``transformers.Trainer``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import Trainer

from dp_grape_hf.arguments import DPGrapeArguments
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.ledger import LEDGER_NAME, Ledger
from dp_grape_hf.low_rank import LowRankUpdates
from dp_grape_hf.model_card import render
from dp_grape_hf.plan import PrivacyPlan, PrivacySpent
from dp_grape_hf.sampling import LogicalBatch

if TYPE_CHECKING:
    _Host = Trainer
else:  # the host is the other base of the class that is made
    _Host = object

_UNNOISED = ("loss", "train_loss", "total_flos", "num_input_tokens_seen", "train_tokens_per_second")


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
    _given_train_dataset: Any = None  # before the host made something else of it
    _low_rank: LowRankUpdates | None = None  # while training with float32_updates
    _private_norm: Tensor = torch.zeros(())
    _test_generators: TestGenerators | None = None

    # ---- Training Utilities ----

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

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluates as the original does, but not on the training data: metrics are logged."""
        training_data = [self._given_train_dataset, self.train_dataset]
        refuse_training_data(eval_dataset, training_data, self.args)
        return super().evaluate(eval_dataset, *args, **kwargs)

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
        if self._low_rank is not None:
            self._low_rank.merge_()
        super().save_model(*args, **kwargs)

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        """Saves as the original does, with the ledger and the card beside the weights."""
        super()._save(output_dir, state_dict)
        if self.args.should_save and self.ledger is not None:
            folder = Path(str(self.args.output_dir) if output_dir is None else output_dir)
            self.ledger.snapshot(self.state.global_step).save(folder / LEDGER_NAME)
            self._write_card(folder)

    def _write_card(self, folder: Path) -> None:
        assert self.ledger is not None
        base = getattr(getattr(self.model, "config", None), "_name_or_path", "") or None
        if base is not None and os.path.exists(base):
            base = None  # a local path is nobody else's business
        (folder / "README.md").write_text(render(self.ledger, base), encoding="utf-8")

    # ---- Logging & Metrics ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds epsilon, and drops what is an un-noised function of the training data."""
        if not self.args.log_unnoised_statistics:
            for name in _UNNOISED:
                logs.pop(name, None)
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

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Writes our card; the original has a column of training losses."""
        if self.is_world_process_zero() and self.ledger is not None:
            self._write_card(Path(str(self.args.output_dir)))

    def push_to_hub(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses: the original uploads the whole folder, logs and optimizer state included."""
        raise PrivacyError(
            "push_to_hub() is refused: it would upload optimizer state and logs with the weights. "
            "Upload the weights, config, tokenizer, privacy_ledger.json and README.md of "
            f"{self.args.output_dir} with huggingface_hub's upload_folder(allow_patterns=...)."
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
