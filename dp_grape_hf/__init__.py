"""DP-GRAPE for Hugging Face: private training for less than the price of non-private training.

Read in this order: ``arguments`` says what is promised, ``trainer`` adapts the Hugging Face loop
and has the order of a step, ``mechanism`` keeps the promise, ``ledger`` writes down that it was
kept, ``publishing`` shows only what the ledger says. Below them, ``gradients`` computes the
gradients of each example, ``projections`` and ``optimizers`` work in coordinates, and
``accounting`` says what a release costs. ``memory``, ``auditing`` and ``cli`` look from outside.

A name is imported when it is asked for, so that the command line starts without torch.
The trainers of TRL and their configs (SFT, DPO, Reward) need ``pip install 'dp_grape_hf[sft]'``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dp_grape_hf.arguments import METHODS, DPGrapeTrainingArguments, PrivacySpent
    from dp_grape_hf.errors import PrivacyError, UnsupportedModelError
    from dp_grape_hf.gradients import per_sample_gradients
    from dp_grape_hf.ledger import Ledger
    from dp_grape_hf.optimizers import ProjectedAdam, ProjectedOptimizer
    from dp_grape_hf.publishing import Publisher
    from dp_grape_hf.trainer import (  # noqa: F401  (some need TRL)
        DPGrapeDPOConfig,
        DPGrapeDPOTrainer,
        DPGrapeRewardConfig,
        DPGrapeRewardTrainer,
        DPGrapeSeq2SeqTrainer,
        DPGrapeSeq2SeqTrainingArguments,
        DPGrapeSFTConfig,
        DPGrapeSFTTrainer,
        DPGrapeTrainer,
        principal_adapter,
    )

__version__ = "0.2.0.dev0"

__all__ = [
    "METHODS",
    "DPGrapeSeq2SeqTrainer",
    "DPGrapeSeq2SeqTrainingArguments",
    "DPGrapeTrainer",
    "DPGrapeTrainingArguments",
    "Ledger",
    "PrivacyError",
    "PrivacySpent",
    "ProjectedAdam",
    "ProjectedOptimizer",
    "Publisher",
    "UnsupportedModelError",
    "per_sample_gradients",
    "principal_adapter",
]

_ROOM_OF = {
    "METHODS": "arguments",
    "DPGrapeDPOConfig": "trainer",
    "DPGrapeDPOTrainer": "trainer",
    "DPGrapeRewardConfig": "trainer",
    "DPGrapeRewardTrainer": "trainer",
    "DPGrapeSFTConfig": "trainer",
    "DPGrapeSFTTrainer": "trainer",
    "DPGrapeSeq2SeqTrainer": "trainer",
    "DPGrapeSeq2SeqTrainingArguments": "trainer",
    "DPGrapeTrainer": "trainer",
    "DPGrapeTrainingArguments": "arguments",
    "Ledger": "ledger",
    "PrivacyError": "errors",
    "PrivacySpent": "arguments",
    "ProjectedAdam": "optimizers",
    "ProjectedOptimizer": "optimizers",
    "Publisher": "publishing",
    "UnsupportedModelError": "errors",
    "per_sample_gradients": "gradients",
    "principal_adapter": "trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOM_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOM_OF})
