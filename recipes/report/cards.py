"""Renders the cards in ``model_cards`` from the ledgers next to them."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import yaml

from dp_grape_hf.ledger import LEDGER_NAME, Ledger
from dp_grape_hf.publishing import CardDetails, render

CARDS = Path("model_cards")
_DECLARED = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
DETAILS: Mapping[str, CardDetails] = {
    folder: CardDetails(**declared) for folder, declared in _DECLARED.items()
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
