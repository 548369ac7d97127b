"""Save and publish a private model with its ledger and model card, and verify them.

``publisher`` saves a model with its ledger and its card into an empty folder. The files then
replace the files of a local folder, or ``hub`` uploads them as one commit. ``statement`` writes the
privacy claim that a ledger supports, ``card`` writes the model card around it, and ``configs``
removes local paths from the saved configs. ``verification`` compares card, files and ledger.
``adapter`` saves the change of a run as a PEFT adapter, and ``model_files`` lists the files of a
model.
"""

from dp_grape_hf.publishing.adapter import Adapter, adapters_of
from dp_grape_hf.publishing.card import CardDetails, declare, render, renewed
from dp_grape_hf.publishing.configs import json_of
from dp_grape_hf.publishing.file_checks import ABSENT, MISMATCH
from dp_grape_hf.publishing.model_files import (
    ADAPTER_CONFIG,
    adapter_folders,
    damage,
    is_of_a_model,
)
from dp_grape_hf.publishing.publisher import Publisher
from dp_grape_hf.publishing.statement import epsilon_text, metadata_of
from dp_grape_hf.publishing.verification import SECOND_OPINION, verify

__all__ = [
    "ABSENT",
    "ADAPTER_CONFIG",
    "MISMATCH",
    "SECOND_OPINION",
    "Adapter",
    "CardDetails",
    "Publisher",
    "adapter_folders",
    "adapters_of",
    "damage",
    "declare",
    "epsilon_text",
    "is_of_a_model",
    "json_of",
    "metadata_of",
    "render",
    "renewed",
    "verify",
]
