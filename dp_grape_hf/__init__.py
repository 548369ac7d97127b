"""DP-GRAPE for Hugging Face: private training for less than the price of non-private training.

Read in this order: ``arguments`` says what is promised, ``mixin`` and ``disclosure`` adapt the
Hugging Face loop (``trainer``, ``seq2seq`` and ``sft`` name the trainers that are made of them),
``engine`` keeps the promise in one readable function, ``ledger`` writes down that it was kept,
``model_card`` publishes only what the ledger says. Below them, ``per_sample`` with ``layerwise``,
``functorch``, ``layer_rules``, ``losses``, ``forms`` and ``representations`` computes per-sample
gradients, ``norms`` says how long they are, ``unit_engine`` adds up those of a privacy unit, and
``selfcheck`` checks them at the first step; ``projection`` and ``optimizer`` work in
coordinates, ``sampling``, ``accounting`` and ``randomness`` are what the guarantee rests on.
``methods`` is the table of what else trains this way, and ``assembly`` puts the parts together.

``DPGrapeSFTTrainer`` and ``DPGrapeSFTConfig`` need TRL (``pip install 'dp_grape_hf[sft]'``), which
is imported when one of them is asked for.
"""

from typing import Any

from dp_grape_hf import functorch, layerwise  # noqa: F401  (they register the engines)
from dp_grape_hf.arguments import DPGrapeTrainingArguments
from dp_grape_hf.errors import PrivacyError, UnsupportedModelError
from dp_grape_hf.ledger import Ledger
from dp_grape_hf.methods import METHODS
from dp_grape_hf.optimizer import ProjectedAdam, ProjectedOptimizer
from dp_grape_hf.per_sample import per_sample_gradients
from dp_grape_hf.plan import PrivacySpent
from dp_grape_hf.seq2seq import DPGrapeSeq2SeqTrainer, DPGrapeSeq2SeqTrainingArguments
from dp_grape_hf.trainer import DPGrapeTrainer

__version__ = "0.1.1"

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
    "UnsupportedModelError",
    "per_sample_gradients",
]

_NEEDS_TRL = ("DPGrapeSFTConfig", "DPGrapeSFTTrainer")


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TRL:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dp_grape_hf import sft

    return getattr(sft, name)
