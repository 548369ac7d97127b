"""``dp-grape card``: write the model card of a saved model from its ledger."""

import argparse
from dataclasses import fields
from pathlib import Path

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.ledger import CARD_NAME, LEDGER_NAME, Ledger
from dp_grape_hf.publishing import ADAPTER_CONFIG, CardDetails, json_of, render, renewed


def run(args: argparse.Namespace) -> str:
    """Return the card, or with ``--write`` a message with its path."""
    folder: Path = args.folder
    names = {field.name for field in fields(CardDetails)} - {"tags"}
    details = CardDetails(
        **{name: value for name, value in vars(args).items() if name in names},
        tags=tuple(args.tags),
        adapter=(folder / ADAPTER_CONFIG).exists(),
        metrics=dict(_metric(text) for text in args.metric),
        metrics_are_public=args.metrics_data and args.metrics_data == "public",
        model_class=_class_in(folder),
    )
    card = render(Ledger.load(folder / LEDGER_NAME), details)
    if not args.write:
        return card
    path = folder / CARD_NAME
    if path.exists():
        card = _renewed(path, card, details)
    path.write_text(card, encoding="utf-8")
    return f"Wrote {path}.\n"


def _renewed(path: Path, card: str, details: CardDetails) -> str:
    """Return the existing card with a new statement and new metadata."""
    if details.metrics and not details.metrics_are_public:
        raise PrivacyError(
            f"metrics={dict(details.metrics)!r} of private data cannot be added to the existing "
            f"card {path}. Write them there yourself, and say that epsilon does not cover them."
        )
    written = path.read_text(encoding="utf-8")
    options = ("base_model", "language", "license", "pipeline_tag", "datasets")
    declared = {name for name in options if getattr(details, name) is not None}
    try:
        return renewed(written, card, declared | ({"model-index"} if details.metrics else set()))
    except PrivacyError as error:
        raise PrivacyError(
            f"{path}: {error}. The command replaces only the text between the marks of a card. "
            "Move the file away, write the card again, and add your text below the second mark."
        ) from error


def _class_in(folder: Path) -> str | None:
    """Return the name of the model's class, from its config; None if it has none."""
    config = json_of(folder / "config.json")
    names = config.get("architectures") if isinstance(config, dict) else None
    return names[0] if names else None


def _metric(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    try:
        if name.strip():
            return name.strip(), float(value)
    except ValueError:
        pass
    raise PrivacyError(f"--metric {text!r} must be name=value, for example accuracy=0.908.")
