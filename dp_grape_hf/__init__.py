"""DP-GRAPE for Hugging Face: differentially private training with the ``Trainer``.

Read the subpackages in this order. ``arguments`` checks the options and computes the noise.
``trainer`` adapts the Hugging Face loop and defines the order of a step. ``mechanism`` samples,
clips and adds noise. ``ledger`` records each private update, and ``publishing`` writes the model
card from the ledger. ``gradients`` computes per-sample gradients, ``projections`` and
``optimizers`` work in the projected space, and ``accounting`` computes epsilon. ``memory``,
``auditing`` and ``cli`` are tools around a run.

Names are imported at their first use, so that the command line starts without torch. The trainers
of TRL and their configs (SFT, DPO, Reward) need ``pip install 'dp_grape_hf[sft]'``.
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

_NAMES_IN = {
    "arguments": "METHODS DPGrapeTrainingArguments PrivacySpent",
    "errors": "PrivacyError UnsupportedModelError",
    "gradients": "per_sample_gradients",
    "ledger": "Ledger",
    "optimizers": "ProjectedAdam ProjectedOptimizer",
    "publishing": "Publisher",
    "trainer": "DPGrapeTrainer DPGrapeSeq2SeqTrainer DPGrapeSeq2SeqTrainingArguments "
    "DPGrapeSFTTrainer DPGrapeSFTConfig DPGrapeDPOTrainer DPGrapeDPOConfig "
    "DPGrapeRewardTrainer DPGrapeRewardConfig principal_adapter",
}
_SUBPACKAGE_OF = {name: package for package, names in _NAMES_IN.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _SUBPACKAGE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_SUBPACKAGE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBPACKAGE_OF})
