"""The trainers of transformers, made private; ``sft`` has the trainers of TRL.

Arguments, guarantee and errors are as in ``DPGrapeMixin``. Generation happens in evaluation
only, outside the private path: its metrics are functions of the evaluation data and of private
weights.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

from dp_grape_hf.arguments import DPGrapeArguments, accepts_short_names
from dp_grape_hf.trainer.mixin import DPGrapeMixin


class DPGrapeTrainer(DPGrapeMixin, Trainer):
    """A ``transformers.Trainer`` whose training is differentially private.

    Model, data set, collator, metrics and callbacks work as in the host. It adds:

    * ``train()``: samples batches, clips the gradient of each example, adds noise, and records each
      private update before it is made. It stops when the budget is spent.
    * ``suggestion()``: a table of the options that the run would choose, with warnings. Trains
      nothing.
    * ``privacy_spent()``: an upper bound on epsilon so far, with delta and the number of updates.
    * ``releases_left()``: how many more private updates the budget allows.
    * ``save_model()``, ``push_to_hub()``: save or publish weights with ledger and model card;
      ``dp-grape verify`` compares them.

    Arguments, guarantee and errors are as in ``DPGrapeMixin``; ``args`` is a
    ``DPGrapeTrainingArguments``. The page of ``dp_grape_hf/mechanism`` explains the guarantee.
    """


@accepts_short_names
@dataclass(repr=False)
class DPGrapeSeq2SeqTrainingArguments(DPGrapeArguments, Seq2SeqTrainingArguments):
    """``Seq2SeqTrainingArguments`` of a differentially private run; see ``DPGrapeArguments``.

    Raises:
        PrivacyError: also for ``sortish_sampler``.
    """

    refused_if_set = DPGrapeArguments.refused_if_set | {
        "sortish_sampler": "Poisson sampling includes each example independently; leave it at False"
    }


class DPGrapeSeq2SeqTrainer(DPGrapeMixin, Seq2SeqTrainer):
    """A ``transformers.Seq2SeqTrainer`` whose training is differentially private.

    ``args`` is a ``DPGrapeSeq2SeqTrainingArguments``.
    """

    arguments_class: ClassVar[type[Any]] = DPGrapeSeq2SeqTrainingArguments
