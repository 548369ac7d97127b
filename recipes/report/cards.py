"""Renders the cards in ``model_cards`` from the ledgers next to them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dp_grape_hf.ledger import LEDGER_NAME, Ledger
from dp_grape_hf.publishing import CardDetails, render

CARDS = Path("model_cards")
DETAILS: Mapping[str, CardDetails] = {
    "digits": CardDetails(model_class="ViTForImageClassification"),
    "digits_described": CardDetails(
        repo_id="user/digits-vit-dp",
        model_name="A small Vision Transformer for handwritten digits, from a demo",
        language=["en"],
        license="apache-2.0",
        pipeline_tag="image-classification",
        metrics={"test accuracy": 0.936},
        metrics_are_public=True,
    ),
    "digits_not_private": CardDetails(model_class="ViTForImageClassification"),
    "trec_adapter": CardDetails(
        model_name="A LoRA adapter for questions of six classes, from a demo",
        base_model="sentence-transformers/all-MiniLM-L6-v2",
        adapter=True,
        language=["en"],
        datasets=["CogComp/trec"],
        metrics={"test accuracy": 0.454},
        metrics_are_public=True,
        model_class="BertForSequenceClassification",
        num_labels=6,
    ),
}
"""By folder, what the publisher of a card declares."""
_TABLE = re.compile(r"^## Hyperparameters\n\n.*\n.*\n((?:\|.*\n)+)", re.MULTILINE)
_ROW = re.compile(r"^\| (.+) \| (.+) \|$", re.MULTILINE)


def card(root: Path, folder: str) -> str:
    """Return the card of a folder in ``CARDS``.

    The ledger has no hyperparameters. They stay as the run saved them on the card.
    """
    place = root / CARDS / folder
    saved = _TABLE.search((place / "README.md").read_text(encoding="utf-8"))
    listed = dict(_ROW.findall(saved[1])) if saved else {}
    return render(
        Ledger.load(place / LEDGER_NAME), replace(DETAILS[folder], hyperparameters=listed)
    )
