"""Renders the cards in ``model_cards`` from the ledgers next to them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dp_grape_hf.ledger import LEDGER_NAME, Ledger
from dp_grape_hf.publishing import CardDetails, render

CARDS = Path("model_cards")
_DEMO = CardDetails(
    model_class="ViTForImageClassification",
    hyperparameters={
        "Learning rate": "3.21 (body), 3.21 (head)",
        "Schedule": "linear",
        "Update rule": "sgd",
        "Weight decay": "0",
        "Autocast": "none",
        "Weights": "float32",
    },
)
DETAILS: Mapping[str, CardDetails] = {
    "digits": _DEMO,
    "digits_described": CardDetails(
        repo_id="user/digits-vit-dp",
        model_name="A small Vision Transformer for handwritten digits, from a demo",
        language=["en"],
        license="apache-2.0",
        pipeline_tag="image-classification",
        metrics={"test accuracy": 0.936},
        metrics_are_public=True,
    ),
    "digits_not_private": CardDetails(
        model_class=_DEMO.model_class,
        hyperparameters={
            **_DEMO.hyperparameters,
            **{"Learning rate": "5e-05", "Update rule": "adam"},
        },
    ),
    "trec_adapter": CardDetails(
        model_name="A LoRA adapter for questions of six classes, from a demo",
        base_model="sentence-transformers/all-MiniLM-L6-v2",
        adapter=True,
        language=["en"],
        datasets=["CogComp/trec"],
        metrics={"test accuracy": 0.454},
        metrics_are_public=True,
    ),
}
"""By folder, what the cards say that is not in the ledgers."""


def card(root: Path, folder: str) -> str:
    """Return the card of a folder in ``CARDS``."""
    return render(Ledger.load(root / CARDS / folder / LEDGER_NAME), DETAILS[folder])
