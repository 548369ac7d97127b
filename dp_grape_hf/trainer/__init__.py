"""The Trainer of transformers, private.

``mixin`` is the loop: every override of the host, top to bottom. ``run`` has the parts of a run,
made once, and the one step that they take together. ``trainers`` and ``sft`` name the classes.
The two of ``sft`` need TRL and are imported when they are asked for.
"""

from typing import TYPE_CHECKING, Any

from dp_grape_hf.trainer.callbacks import PrivacyProgress
from dp_grape_hf.trainer.run import Run
from dp_grape_hf.trainer.trainers import (
    DPGrapeSeq2SeqTrainer,
    DPGrapeSeq2SeqTrainingArguments,
    DPGrapeTrainer,
)

if TYPE_CHECKING:
    from dp_grape_hf.trainer.sft import DPGrapeSFTConfig, DPGrapeSFTTrainer  # noqa: F401

__all__ = [
    "DPGrapeSeq2SeqTrainer",
    "DPGrapeSeq2SeqTrainingArguments",
    "DPGrapeTrainer",
    "PrivacyProgress",
    "Run",
]


def __getattr__(name: str) -> Any:
    if name not in ("DPGrapeSFTConfig", "DPGrapeSFTTrainer"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dp_grape_hf.trainer import sft

    return getattr(sft, name)
