"""The statement of a model card, one sentence and one table, written from the ledger.

``card`` writes the statement between two marks below the title. ``verify`` reads it there, and
compares it with the statement of the ledger.

Guarantee:
    A card that `statement_in` accepts has exactly one statement. Above it are only metadata and a
    title, so the statement is not in a comment or a code block. The text outside of the marks is
    not read: it may contradict the statement, or look like another one.
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
"""The tag of models with a guarantee on the Hub."""
METADATA = "differential_privacy"
"""The key of the claim in a card's metadata."""

_EPSILON_ROW = "ε spent (upper bound)"
LAST_DIGITS = 1e-6  # relative: epsilon may differ by it between processors
# Metadata, as the Hub finds them, and a title without HTML. Neither can hide the text below.
_ABOVE = re.compile(r"(?>---\n.*?\n---[ \t]*\n)?\n*(?:#[ ][^\n<]*\n)?\n*", re.DOTALL)
_MADE_BY = {"prv": "prv-accountant", "pld": "dp-accounting", "rdp": "dp_grape_hf"}


def without_guarantee(ledger: Ledger, epsilon: float) -> list[str]:
    """Return why a ledger that spent ``epsilon`` has no privacy guarantee; empty if it has one."""
    reasons = list(ledger.not_private_reasons)
    if math.isinf(epsilon) and not reasons:
        name = ledger.mechanism.accountant
        reasons = [f"the accountant {name} finds no finite ε for these releases"]
    return reasons


def epsilon_text(epsilon: float) -> str:
    """Return epsilon as text, rounded up to three decimals."""
    return "∞" if math.isinf(epsilon) else f"{rounded_up(epsilon, 3):.3f}"


def unit_of(mechanism: Mechanism) -> str:
    """Return the name of the privacy unit, without an article."""
    if mechanism.privacy_unit == EXAMPLE:
        return EXAMPLE
    return f"`{plain(mechanism.privacy_unit)}` with all its examples"


def statement_of(ledger: Ledger, spent: str, reasons: list[str]) -> str:
    """Return the statement: the claim and the table.

    ``spent`` is epsilon as text. ``reasons`` say why there is no guarantee; empty if there is one.
    """
    claim = _claim(ledger.mechanism, spent, reasons)
    cells = {name: plain(cell) for name, cell in rows_of(ledger).items()}
    rows = [f"| {name} | {cell} |" for name, cell in {_EPSILON_ROW: spent, **cells}.items()]
    return "\n".join([claim, "", "## Privacy", "", "| Quantity | Value |", "|---|---|", *rows])


def metadata_of(ledger: Ledger, spent: str) -> dict[str, float | str | None]:
    """Return the claim for programs to read, which the card's metadata have under `METADATA`.

    ``spent`` is epsilon as text, which is returned as a number if it is one.
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


def rows_of(ledger: Ledger) -> dict[str, str]:
    """Return the facts of a ledger, without epsilon: name -> text, in the order of the table."""
    mechanism = ledger.mechanism
    seed = mechanism.projection_seed
    package = _MADE_BY.get(mechanism.accountant)
    version = ledger.versions.get(package or "", "version not recorded")
    declared = ""
    if mechanism.privacy_unit == EXAMPLE:
        declared = " (a row is an example: declared by the user)"
    elif mechanism.max_examples_per_unit is not None:
        declared = f", at most {mechanism.max_examples_per_unit} in a step"
    scaled = ", to which all are scaled" if mechanism.clipping == Clipping.AUTOMATIC else ""
    run = ledger.runs[-1]
    accounted = {"Accounted as": run.accounted_in_words} if run.accounted.bands > 1 else {}
    rows = {
        "δ": _delta(mechanism),
        "Adjacency": mechanism.adjacency.replace("_", " "),
        "Privacy unit": f"{unit_of(mechanism)}{declared}",
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
    return rows


def plain(text: str) -> str:
    """Return a text of the ledger, escaped so that it cannot leave its cell of the table."""
    encodable = text.encode(errors="replace").decode()
    one_line = re.sub(r"[\s\x00-\x1f\x7f]+", " ", encodable)
    return one_line.replace("|", "\\|").replace("<", "&lt;").strip()


# ---- On a card ----


def marked(statement: str) -> str:
    """Return a statement with its two marks."""
    return f"{BEGIN}\n\n{statement}\n\n{END}"


def statement_in(card: str) -> str:
    """Return the statement of a card, without checking its content.

    Raises:
        PrivacyError: the card does not have exactly one pair of marks, right below the title.
    """
    begins, ends = card.count(BEGIN), card.count(END)
    require(
        begins == ends == 1,
        f"the card has {begins} begin marks and {ends} end marks instead of one each. Write the "
        "card again with dp-grape card",
    )
    above, begin, rest = card.partition(f"{BEGIN}\n\n")
    statement, end, _ = rest.partition(f"\n\n{END}")
    require(
        bool(begin and end),
        "the begin mark must be above the end mark, with a blank line between each mark and the "
        "statement",
    )
    require(
        _ABOVE.fullmatch(above) is not None,
        "there is more above the marks than metadata and a title without HTML, which could hide "
        "the statement",
    )
    return statement


def epsilon_in(statement: str) -> str:
    """Return epsilon as the table of a statement has it; empty if it has none."""
    return statement.partition(f"| {_EPSILON_ROW} | ")[2].partition(" |")[0]


def number_in(spent: str) -> float | None:
    """Return the number of an epsilon text of a card; ``None`` if it is not a number."""
    try:
        return float(spent.replace("∞", "inf"))
    except ValueError:
        return None


def is_written_so(spent: str, epsilon: float) -> bool:
    """Return whether `epsilon_text` can write this text for an epsilon, on any processor."""
    near = (max(0.0, epsilon + by) for by in (-LAST_DIGITS, 0.0, LAST_DIGITS))
    return spent in map(epsilon_text, near)


def is_tag(tag: str) -> bool:
    """Return whether the Hub treats a tag as `TAG`."""
    return re.sub(r"[\s_]+", "-", tag.strip().lower()) == TAG


def is_tagged(card: str) -> bool:
    """Return whether a card's metadata have `TAG`, or cannot be read."""
    data = read_metadata(card)
    return data is None or any(is_tag(f"{tag}") for tag in data.get("tags") or [])


def read_metadata(card: str) -> dict[str, Any] | None:
    """Return a card's metadata; None if they cannot be read."""
    if not card.lstrip().startswith("---"):
        return {}
    try:
        return ModelCard(card, ignore_metadata_errors=True).data.to_dict()
    except Exception:  # from YAML, or from the Hub's client
        return None
