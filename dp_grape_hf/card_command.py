"""``dp-grape card``: the model card of a folder that a run saved, from its ledger."""

from __future__ import annotations

import argparse
from pathlib import Path

from dp_grape_hf.entries import CARD_NAME, LEDGER_NAME
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.ledger import Ledger
from dp_grape_hf.model_card import CardDetails, render
from dp_grape_hf.weight_files import ADAPTER_CONFIG

_DESCRIPTION = """\
Print the model card of a saved model, or write it beside the weights.

Every number comes from the folder's privacy_ledger.json. What the ledger cannot know (license,
language, metrics) is what you declare here, and metrics appear only with a word on whether the
data they were computed on is public.
"""

_EXAMPLES = """\
  $ dp-grape card runs/digits --license apache-2.0 --metric "test accuracy=0.908" \\
      --metrics_data public --write
"""


def add_card(parser: argparse.ArgumentParser) -> None:
    """Adds ``dp-grape card``: the model card from the ledger."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.set_defaults(run=_card)
    parser.add_argument("folder", type=Path, help=f"where weights and {LEDGER_NAME} lie")
    parser.add_argument("--repo_id", metavar="user/model", help="where it is published")
    parser.add_argument("--model_name", help="the title (default: Model card)")
    parser.add_argument("--base_model", metavar="user/model", help="what training started from")
    parser.add_argument("--license", help="the Hub's name of a licence, such as apache-2.0")
    parser.add_argument("--language", nargs="+", metavar="code")
    parser.add_argument("--pipeline_tag", help="the Hub's name of the task")
    parser.add_argument("--datasets", nargs="+", metavar="name", help="names on the Hub")
    parser.add_argument("--tags", nargs="+", default=[], metavar="tag")
    parser.add_argument(
        "--metric", action="append", default=[], metavar="name=value", help="may be repeated"
    )
    parser.add_argument(
        "--metrics_data",
        choices=("public", "private"),
        help="what the metrics were computed on; needed with --metric",
    )
    parser.add_argument("--write", action="store_true", help=f"write FOLDER/{CARD_NAME} instead")


def _card(args: argparse.Namespace) -> str:
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
