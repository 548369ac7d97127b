"""The Trainer of transformers, private.

``mixin`` is the loop: every override of the host, top to bottom. ``run`` has the parts of a run,
made once, and the one step that they take together. ``trainers`` and ``sft`` name the classes.
The two of ``sft`` need TRL and are imported when they are asked for.
"""

from dp_grape_hf.trainer.callbacks import PrivacyProgress
from dp_grape_hf.trainer.run import Run
from dp_grape_hf.trainer.sft import DPGrapeSFTConfig, DPGrapeSFTTrainer
from dp_grape_hf.trainer.trainers import (
    DPGrapeSeq2SeqTrainer,
    DPGrapeSeq2SeqTrainingArguments,
    DPGrapeTrainer,
)

__all__ = [
    "DPGrapeSFTConfig",
    "DPGrapeSFTTrainer",
    "DPGrapeSeq2SeqTrainer",
    "DPGrapeSeq2SeqTrainingArguments",
    "DPGrapeTrainer",
    "PrivacyProgress",
    "Run",
]
