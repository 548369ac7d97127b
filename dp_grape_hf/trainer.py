"""``DPGrapeTrainer``: ``transformers.Trainer`` with private training; see ``mixin`` for how."""

from transformers import Trainer

from dp_grape_hf.disclosure import TestGenerators
from dp_grape_hf.mixin import DPGrapeMixin

__all__ = ["DPGrapeTrainer", "TestGenerators"]


class DPGrapeTrainer(DPGrapeMixin, Trainer):
    """A ``transformers.Trainer`` whose training is differentially private.

    Arguments, guarantee and errors are those of ``DPGrapeMixin``; ``args`` is a
    ``DPGrapeTrainingArguments``.
    """
