"""The statement of a model card, one sentence and one table, as its ledger supports it.

``card`` writes it between two marks below the title; ``verify`` takes it out from between
them, and compares it with what the ledger supports. All else on a card is its author's.

Guarantee:
    Who reads a card with `statement_in` sees just one statement, and above it no more than metadata
    and a title, so it stands in no comment and in no block of code. What the text outside the marks
    says is not read: it may contradict the statement, or look like another one.
"""

import math
import re
from typing import Any

from huggingface_hub import ModelCard

from dp_grape_hf.accounting import Adjacency, rounded_up
from dp_grape_hf.errors import require
from dp_grape_hf.ledger import EXAMPLE, Clipping, Ledger, Mechanism

BEGIN = (
    "<!-- dp-grape: from here to the mark below, privacy_ledger.json says what stands here, and "
    "dp-grape verify compares it; the rest of this card is its author's -->"
)
END = "<!-- dp-grape: end of what the ledger says -->"
TAG = "differential-privacy"
"""The Hub's tag of models with a guarantee."""
METADATA = "differential_privacy"
"""The key of a card's metadata under which programs find the claim."""

_EPSILON_ROW = "ε spent (upper bound)"
LAST_DIGITS = 1e-6  # in which processors differ
# Metadata, as the Hub finds them, and a title without HTML. Neither can hide what comes below.
_ABOVE = re.compile(r"(?>---\n.*?\n---[ \t]*\n)?\n*(?:#[ ][^\n<]*\n)?\n*", re.DOTALL)
_MADE_BY = {"prv": "prv-accountant", "pld": "dp-accounting", "rdp": "dp_grape_hf"}


def without_guarantee(ledger: Ledger, epsilon: float) -> list[str]:
    """Returns why a ledger that spent ``epsilon`` supports no claim of privacy; empty: it does."""
    reasons = list(ledger.not_private_reasons)
    if math.isinf(epsilon) and not reasons:
        name = ledger.mechanism.accountant
        reasons = [f"the accountant {name} finds no finite ε for these releases"]
    return reasons


def epsilon_text(epsilon: float) -> str:
    """Writes an upper bound so that it does not shrink on its way to the reader."""
    return "∞" if math.isinf(epsilon) else f"{rounded_up(epsilon, 3):.3f}"


def unit_of(mechanism: Mechanism) -> str:
    """Names what is protected, without an article."""
    if mechanism.privacy_unit == EXAMPLE:
        return EXAMPLE
    return f"`{plain(mechanism.privacy_unit)}` with all its examples"


def statement_of(ledger: Ledger, spent: str, reasons: list[str]) -> str:
    """Returns what stands under the title of a card: the claim, and the table.

    Epsilon ``spent`` is as the card writes it; without ``reasons`` there is a guarantee.
    """
    claim = _claim(ledger.mechanism, spent, reasons)
    rows = [f"| {name} | {cell} |" for name, cell in _rows(ledger, spent).items()]
    return "\n".join([claim, "", "## Privacy", "", "| Quantity | Value |", "|---|---|", *rows])


def metadata_of(ledger: Ledger, spent: str) -> dict[str, float | str | None]:
    """Returns the claim of a card for programs to read: what stands under `METADATA`.

    Epsilon ``spent`` is as the card writes it; what is no number stays a text.
    """
    mechanism, epsilon = ledger.mechanism, number_in(spent)
    return {
        "epsilon": spent if epsilon is None else epsilon,
        "delta": mechanism.target_delta,
        "unit": unit_of(mechanism).replace("`", ""),
        "adjacency": str(mechanism.adjacency),
        "accountant": mechanism.accountant,
    }


def _claim(mechanism: Mechanism, spent: str, reasons: list[str]) -> str:
    if reasons:
        return f"**This model has no privacy guarantee** (ε = ∞): {'; '.join(map(plain, reasons))}."
    change = "replacing" if mechanism.adjacency == Adjacency.REPLACE_ONE else "adding or removing"
    return (
        f"This model was trained with differential privacy: **ε = {spent}** at "
        f"δ = {_delta(mechanism)}, for {change} one {unit_of(mechanism)} of the training data."
    )


def _delta(mechanism: Mechanism) -> str:
    return "-" if mechanism.target_delta is None else f"{mechanism.target_delta:g}"


def _rows(ledger: Ledger, spent: str) -> dict[str, str]:
    """Returns the table: name -> cell."""
    mechanism = ledger.mechanism
    seed = mechanism.projection_seed
    package = _MADE_BY.get(mechanism.accountant)
    version = ledger.versions.get(package or "", "version not recorded")
    unit = unit_of(mechanism)
    scaled = ", to which all are scaled" if mechanism.clipping == Clipping.AUTOMATIC else ""
    own = ledger.runs[-1]
    accounted = {"Accounted as": own.accounted_in_words} if own.accounted.bands > 1 else {}
    rows = {
        _EPSILON_ROW: spent,
        "δ": _delta(mechanism),
        "Adjacency": mechanism.adjacency.replace("_", " "),
        "Privacy unit": f"{unit}{_declared(mechanism)}",
        "Sampling": mechanism.sampling_in_words,
        "Dataset size N, as declared": f"{mechanism.num_samples}",
        "Expected batch size q N": f"{mechanism.expected_batch_size:g}",
        "Noise multiplier sigma": f"{mechanism.noise_multiplier:.6g}",
        "Clipping norm C": f"{mechanism.max_grad_norm:g}{scaled}",
        "Norms": "exact",
        "Releases": f"{ledger.steps}",
        **accounted,
        "Projection": mechanism.projection_in_words,
        "Projection seed (public)": "-" if seed is None else f"{seed}",
        "Method": mechanism.method,
        "Accountant": mechanism.accountant,
        "Accountant's software": "-" if package is None else f"{package} {version}",
        **mechanism.remarks,
    }
    if earlier := ledger.composed_runs[:-1]:
        releases = sum(run.steps for run in earlier)
        each = "; ".join(run.accounted_in_words for run in earlier)
        rows["Earlier runs on the same data"] = (
            f"{len(earlier)}, with {releases} releases, counted in ε as {each}"
        )
    return {name: plain(value) for name, value in rows.items()} | {_EPSILON_ROW: spent}


def _declared(mechanism: Mechanism) -> str:
    """Says how examples make a unit; that a row is one is a declaration, which nothing checks."""
    if mechanism.privacy_unit == EXAMPLE:
        return " (a row is an example: declared by the user)"
    most = mechanism.max_examples_per_unit
    return "" if most is None else f", at most {most} in a step"


def plain(text: str) -> str:
    """Returns a text that stays in its cell: a ledger's texts must not write the card."""
    known = text.encode(errors="replace").decode()
    one_line = re.sub(r"[\s\x00-\x1f\x7f]+", " ", known)
    return one_line.replace("|", "\\|").replace("<", "&lt;").strip()


# ---- On a card ----


def marked(statement: str) -> str:
    """Returns a statement as it stands on a card."""
    return f"{BEGIN}\n\n{statement}\n\n{END}"


def statement_in(card: str) -> str:
    """Returns the statement of a card, whatever it says.

    Raises:
        PrivacyError: there is not one pair of marks, or not right below the title.
    """
    begins, ends = card.count(BEGIN), card.count(END)
    require(
        begins == ends == 1,
        f"{begins} marks of a beginning and {ends} of an end, where one of each belongs; write the "
        "card again with dp-grape card",
    )
    above, begin, rest = card.partition(f"{BEGIN}\n\n")
    statement, end, _ = rest.partition(f"\n\n{END}")
    require(
        bool(begin and end),
        "the mark of the beginning belongs above that of the end, and a blank line next to each",
    )
    require(
        _ABOVE.fullmatch(above) is not None,
        "more than metadata and a title without HTML stands above the marks, and could hide what "
        "is between them",
    )
    return statement


def epsilon_in(statement: str) -> str:
    """Returns what the table of a statement gives as epsilon; empty if nothing."""
    return statement.partition(f"| {_EPSILON_ROW} | ")[2].partition(" |")[0]


def number_in(spent: str) -> float | None:
    """Returns epsilon as a card writes it, as a number; ``None`` if it is none."""
    try:
        return float(spent.replace("∞", "inf"))
    except ValueError:
        return None


def is_written_so(spent: str, epsilon: float) -> bool:
    """Whether a text is what `epsilon_text` writes, on some processor, for an epsilon."""
    near = (max(0.0, epsilon + by) for by in (-LAST_DIGITS, 0.0, LAST_DIGITS))
    return spent in map(epsilon_text, near)


def is_tag(tag: str) -> bool:
    """Whether the Hub would take a tag for `TAG`."""
    return re.sub(r"[\s_]+", "-", tag.strip().lower()) == TAG


def is_tagged(card: str) -> bool:
    """Whether a card's metadata has `TAG`, or cannot be read."""
    data = read_metadata(card)
    return data is None or any(is_tag(f"{tag}") for tag in data.get("tags") or [])


def read_metadata(card: str) -> dict[str, Any] | None:
    """Returns a card's metadata; None if they cannot be read."""
    if not card.lstrip().startswith("---"):
        return {}
    try:
        return ModelCard(card, ignore_metadata_errors=True).data.to_dict()
    except Exception:  # of YAML, or of what the Hub's client makes of it
        return None
