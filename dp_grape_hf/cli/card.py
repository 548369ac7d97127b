"""``dp-grape card``: the model card of a folder that a run saved, from its ledger."""

from __future__ import annotations

import argparse
from pathlib import Path

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.ledger import CARD_NAME, LEDGER_NAME, Ledger
from dp_grape_hf.publishing import ADAPTER_CONFIG, CardDetails, render


def run(args: argparse.Namespace) -> str:
    """Returns the card, or where it was written."""
    folder: Path = args.folder
    details = CardDetails(
        repo_id=args.repo_id,
        model_name=args.model_name,
        base_model=args.base_model,
        adapter=(folder / ADAPTER_CONFIG).exists(),
        language=args.language,
        license=args.license,
        pipeline_tag=args.pipeline_tag,
        datasets=args.datasets,
        tags=tuple(args.tags),
        metrics=dict(_metric(text) for text in args.metric),
        metrics_are_public=args.metrics_data and args.metrics_data == "public",
    )
    card = render(Ledger.load(folder / LEDGER_NAME), details)
    if not args.write:
        return card
    (folder / CARD_NAME).write_text(card, encoding="utf-8")
    return f"Wrote {folder / CARD_NAME}.\n"


def _metric(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    try:
        if name.strip():
            return name.strip(), float(value)
    except ValueError:
        pass
    raise PrivacyError(f"--metric {text!r} must be name=value, for example accuracy=0.908.")
