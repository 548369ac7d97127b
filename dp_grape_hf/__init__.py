"""DP-GRAPE for Hugging Face: private training for less than the price of non-private training.

Read in this order: ``arguments`` says what is promised, ``trainer`` adapts the Hugging Face loop,
``engine`` keeps the promise in one readable function, ``ledger`` writes down that it was kept,
``model_card`` publishes only what the ledger says. Below them, ``per_sample`` with ``layerwise``,
``functorch``, ``layer_rules``, ``losses`` and ``representations`` computes per-sample gradients;
``projection`` and ``optimizer`` work in coordinates, ``sampling``, ``accounting`` and
``randomness`` are what the guarantee rests on.
"""

from dp_grape_hf import functorch, layerwise  # noqa: F401  (they register the engines)
from dp_grape_hf.arguments import DPGrapeTrainingArguments
from dp_grape_hf.errors import PrivacyError, UnsupportedModelError
from dp_grape_hf.ledger import Ledger
from dp_grape_hf.optimizer import ProjectedAdam
from dp_grape_hf.per_sample import per_sample_gradients
from dp_grape_hf.plan import PrivacySpent
from dp_grape_hf.trainer import DPGrapeTrainer

__version__ = "0.1.0"

__all__ = [
    "DPGrapeTrainer",
    "DPGrapeTrainingArguments",
    "Ledger",
    "PrivacyError",
    "PrivacySpent",
    "ProjectedAdam",
    "UnsupportedModelError",
    "per_sample_gradients",
]
