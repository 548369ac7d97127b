"""The trainers: those of transformers, trained privately; ``sft`` has TRL's.

Arguments, guarantee and errors are those of ``DPGrapeMixin``. Generation happens in evaluation
only, outside the private path: its metrics are functions of the evaluation data and of private
weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

from dp_grape_hf.arguments import DPGrapeArguments, accepts_short_names
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.trainer.mixin import DPGrapeMixin


class DPGrapeTrainer(DPGrapeMixin, Trainer):
    """A ``transformers.Trainer`` whose training is differentially private.

    ``args`` is a ``DPGrapeTrainingArguments``.
    """


@accepts_short_names
@dataclass(repr=False)
class DPGrapeSeq2SeqTrainingArguments(DPGrapeArguments, Seq2SeqTrainingArguments):
    """``Seq2SeqTrainingArguments`` of a differentially private run; see ``DPGrapeArguments``.

    Raises:
        PrivacyError: also for ``sortish_sampler``.
    """

    def __post_init__(self) -> None:
        """Refuses what belongs to this host, and then what belongs to all."""
        if self.sortish_sampler:
            raise PrivacyError(
                f"sortish_sampler={self.sortish_sampler!r} is refused: batches are Poisson draws, "
                "in which each example enters independently. Leave it at False."
            )
        super().__post_init__()


class DPGrapeSeq2SeqTrainer(DPGrapeMixin, Seq2SeqTrainer):
    """A ``transformers.Seq2SeqTrainer`` whose training is differentially private.

    ``args`` is a ``DPGrapeSeq2SeqTrainingArguments``.
    """

    arguments_class: ClassVar[type[Any]] = DPGrapeSeq2SeqTrainingArguments
