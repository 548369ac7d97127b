"""The trainers of transformers, made private; ``sft`` has the trainers of TRL.

Arguments, guarantee and errors are those of ``DPGrapeMixin``. Generation happens in evaluation
only, outside the private path: its metrics are functions of the evaluation data and of private
weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

from dp_grape_hf.arguments import DPGrapeArguments, accepts_short_names
from dp_grape_hf.trainer.mixin import DPGrapeMixin


class DPGrapeTrainer(DPGrapeMixin, Trainer):
    """A ``transformers.Trainer`` whose training is differentially private.

    Model, data set, collator, metrics and callbacks are those of the host. Its own are:

    * ``train()``: draws batches, clips the gradient of each example, adds noise, and records each
      release before it is made. Stops where the budget ends.
    * ``suggestion()``: a table of what the run would choose, and what is wrong with it; trains
      nothing.
    * ``privacy_spent()``: epsilon so far, an upper bound, at which delta, in how many releases.
    * ``releases_left()``: how many more the budget allows.
    * ``save_model()``, ``push_to_hub()``: weights with ledger and model card; ``dp-grape verify``
      compares them.

    Args:
        model: ``torch.nn.Module``; parameters with ``requires_grad`` are trained. Its loss is known
            for all heads of transformers; for others, give ``compute_loss_func``.
        args: ``DPGrapeTrainingArguments``: epsilon, delta, passes, and what you want otherwise.
        train_dataset: map-style, with a length: each example is drawn by its index.
        compute_loss_func: ``f(outputs, labels)``, which returns one loss per sample, (B,).
        public_dataset: examples that nobody needs to protect, which principal directions and rates
            are measured on instead of synthetic inputs.
        **kwargs: everything else that ``transformers.Trainer`` takes, but ``optimizers``.

    Raises:
        PrivacyError: if arguments, model and data together cannot keep the promise; before any data
            is touched where that can be told.

    The guarantee in full is in ``DPGrapeMixin``, and in the page of ``dp_grape_hf/mechanism``.
    """


@accepts_short_names
@dataclass(repr=False)
class DPGrapeSeq2SeqTrainingArguments(DPGrapeArguments, Seq2SeqTrainingArguments):
    """``Seq2SeqTrainingArguments`` of a differentially private run; see ``DPGrapeArguments``.

    Raises:
        PrivacyError: also for ``sortish_sampler``.
    """

    refused_if_set = DPGrapeArguments.refused_if_set | {
        "sortish_sampler": "batches are Poisson draws, in which each example enters independently; "
        "leave it at False",
    }


class DPGrapeSeq2SeqTrainer(DPGrapeMixin, Seq2SeqTrainer):
    """A ``transformers.Seq2SeqTrainer`` whose training is differentially private.

    ``args`` is a ``DPGrapeSeq2SeqTrainingArguments``.
    """

    arguments_class: ClassVar[type[Any]] = DPGrapeSeq2SeqTrainingArguments
