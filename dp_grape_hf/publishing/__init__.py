"""What leaves the machine, and how to check it.

``publisher`` saves a model with its ledger and its card into an empty folder, which replaces what a
folder of this machine held, or which ``hub`` uploads as one commit. ``statement`` says what a
ledger allows to claim, ``card`` puts it into a model card, and ``configs`` takes local paths out of
what was saved. ``verification`` compares card, files and ledger with each other. ``adapter`` saves
what a run changed as an adapter of PEFT, and ``model_files`` knows the files of a model.
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
    "is_of_a_model",
    "json_of",
    "render",
    "renewed",
    "verify",
]
