"""What a model card states of its ledger, one sentence and one table: written, and read again.

``model_card`` writes them at the top of a card; ``verify`` derives them from the ledger, compares
them word for word, and looks for other statements in the rest of the card.
"""

import html
import math
import re
import unicodedata
from dataclasses import dataclass

from dp_grape_hf.accountants import rounded_up
from dp_grape_hf.accounting import REPLACE_ONE
from dp_grape_hf.ledger import Ledger
from dp_grape_hf.mechanism import EXAMPLE, Mechanism

EPSILON_ROW = "ε spent (upper bound)"
ROWS_OF_SOME = ("Noise", "Chosen among trials", "Earlier runs on the same data")
_NOISE, _TRIALS, _RUNS = ROWS_OF_SOME
ANY = "\0"
"""Stands for a number that is read and not compared as text."""

NUMBER = r"[-+]?\d*\.?\d+(?:e[-+]?\d+)?|inf|∞"
_GAP = r"(?:\W?\b(?:is|of|was|below|under|at most|about|up to|only|just)\b|[\s=:≈≤<>~()*_`$|{}\\])*"
_EPSILON, _DELTA = r"(?:[εɛ]|epsilons?|\beps\b)", r"(?:δ|\bdeltas?\b)"
_PHRASE = "trained with differential privacy"
_MARKUP = r"[ \t>*_~`|]*"

_SPLIT = {"per_layer": ", split over the layers", "automatic": ", to which all are scaled"}
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

    Args:
        ledger: that of the weights.
        spent: epsilon as the card writes it, or `ANY`.
        reasons: why there is no guarantee; empty if there is one.
    """
    claim = _claim(ledger.mechanism, spent, reasons)
    rows = [f"| {name} | {cell} |" for name, cell in rows_of(ledger, spent).items()]
    return "\n".join([claim, "", "## Privacy", "", "| Quantity | Value |", "|---|---|", *rows])


def _claim(mechanism: Mechanism, spent: str, reasons: list[str]) -> str:
    if reasons:
        return f"**This model has no privacy guarantee** (ε = ∞): {'; '.join(map(plain, reasons))}."
    change = "replacing" if mechanism.adjacency == REPLACE_ONE else "adding or removing"
    return (
        f"This model was {_PHRASE}: **ε = {spent}** at δ = {_delta(mechanism)}, for {change} one "
        f"{unit_of(mechanism)} of the training data."
    )


def _delta(mechanism: Mechanism) -> str:
    return "-" if mechanism.target_delta is None else f"{mechanism.target_delta:g}"


def rows_of(ledger: Ledger, spent: str) -> dict[str, str]:
    """Returns the table: name -> cell."""
    mechanism = ledger.mechanism
    projection, seed = mechanism.projection, mechanism.projection_seed
    if mechanism.projection_rank is not None:
        projection += f", r = {mechanism.projection_rank}, F = {mechanism.projection_update_steps}"
    cap, known = mechanism.max_batch_size, mechanism.norm_directions
    most, package = mechanism.max_examples_per_unit, _MADE_BY.get(mechanism.accountant)
    version = ledger.versions.get(package or "", "version not recorded")
    unit = unit_of(mechanism)
    rows = {
        EPSILON_ROW: spent,
        "δ": _delta(mechanism),
        "Adjacency": mechanism.adjacency.replace("_", " "),
        "Privacy unit": unit if most is None else f"{unit}, at most {most} in a step",
        "Sampling": f"{mechanism.sampling}, rate q = {mechanism.sample_rate:.6g}"
        + ("" if cap is None else f", at most {cap} at a time"),
        "Dataset size N, as declared": f"{mechanism.num_samples}",
        "Expected batch size q N": f"{mechanism.expected_batch_size:g}",
        "Noise multiplier sigma": f"{mechanism.noise_multiplier:.6g}",
        "Clipping norm C": f"{mechanism.max_grad_norm:g}{_SPLIT.get(mechanism.clipping, '')}",
        "Norms": "exact" if known is None else f"estimated from {known} random directions",
        "Releases": f"{ledger.steps}",
        "Projection": projection,
        "Projection seed (public)": "-" if seed is None else f"{seed}",
        "Method": mechanism.method,
        "Accountant": mechanism.accountant,
        "Accountant's software": "-" if package is None else f"{package} {version}",
    }
    if mechanism.noise is not None:
        rows[_NOISE] = f"{mechanism.noise}, four float64 draws for each number"
    if mechanism.trials is not None:
        each = f"of {mechanism.steps_of_trial} releases each"
        rows[_TRIALS] = f"{mechanism.trials}, {each}, counted in ε"
    if earlier := ledger.composed_runs[:-1]:
        releases = sum(run.accounted[2] for run in earlier)
        rows[_RUNS] = f"{len(earlier)}, with {releases} releases, counted in ε"
    return {name: plain(value) for name, value in rows.items()} | {EPSILON_ROW: spent}


def plain(text: str) -> str:
    """Returns a text that stays in its cell: a ledger's texts must not write the card."""
    known = text.encode(errors="replace").decode()
    one_line = re.sub(r"[\s\x00-\x1f\x7f]+", " ", known)
    return one_line.replace("|", "\\|").replace("<", "&lt;").strip()


# ---- Reading a card ----


@dataclass(frozen=True)
class Reading:
    """What a card says, as far as it can be held against a ledger.

    ``whole`` if sentence and table stand at the top as they were written, up to epsilon.
    ``cells`` has what stands beside the name of each row, there and elsewhere. ``epsilons`` and
    ``deltas`` are those of sentence, table and text. ``claims`` if privacy is claimed at all, and
    ``again`` if it is claimed besides that sentence.
    """

    whole: bool
    cells: dict[str, list[str]]
    epsilons: list[str]
    deltas: list[str]
    claims: bool
    again: bool


def read(card: str, ledger: Ledger, reasons: list[str]) -> Reading:
    """Reads a card that should state what a ledger supports; ``reasons`` as for `statement_of`."""
    text = re.sub(r"[ \t]+$", "", "\n".join(card.removeprefix("\ufeff").splitlines()), flags=re.M)
    metadata = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    body = text[metadata.end() :] if metadata else text
    tag = r"[\s\[,]['\"]?differential-privacy['\"]?(?:[\s,\]]|$)"
    tagged = metadata is not None and re.search(tag, metadata[1]) is not None
    parts = statement_of(ledger, ANY, reasons).split(ANY)
    whole = re.match(
        rf"(\s*(?:# [^\n]*\n+)?){f'({NUMBER})'.join(map(re.escape, parts))}(?=\n\n|\s*\Z)", body
    )
    rest = body if whole is None else whole[1] + body[whole.end() :]
    if ledger.mechanism.privacy_unit != EXAMPLE:
        rest = rest.replace(unit_of(ledger.mechanism), "")  # a column's name may be anything
    names = [*rows_of(ledger, ANY), *ROWS_OF_SOME]
    cells = {name: _cells(rest, re.escape(name)) for name in names}
    if whole is not None:
        for name, cell in rows_of(ledger, whole[whole.lastindex or 0]).items():
            cells[name].append(cell)
    epsilons = [] if whole is None else list(whole.groups()[1:])
    epsilons += _cells(rest, rf"[^|\n]*{_EPSILON}[^|\n]*") + numbers_after(_EPSILON, rest)
    sentences = _plainly(rest).count(_PHRASE)
    return Reading(
        whole is not None,
        cells,
        epsilons,
        numbers_after(_DELTA, rest),
        bool(tagged or sentences)
        or any(number_in(cell) not in (None, math.inf) for cell in epsilons),
        again=sentences > (whole is None),
    )


def states_privacy(text: str) -> bool:
    """Whether a text that is to stand on a card would be read as a statement of a guarantee."""
    found = numbers_after(_EPSILON, text) or numbers_after(_DELTA, text)
    return bool(found) or _PHRASE in _plainly(text)


def number_in(text: str) -> float | None:
    """Returns the number that a text is; ``None`` if it says anything else."""
    return float(text.replace("∞", "inf")) if re.fullmatch(NUMBER, text) else None


def numbers_after(name: str, text: str) -> list[str]:
    """Returns the numbers that a text gives for a name, however it words and writes that."""
    return re.findall(rf"{name}{_GAP}({NUMBER})", _plainly(text), re.IGNORECASE)


def _plainly(text: str) -> str:
    """Returns a text in the letters that a reader sees, without what nobody sees."""
    visible = re.sub("[\u200b-\u200f\u2060\ufeff\u00ad]", "", html.unescape(text))
    return unicodedata.normalize("NFKC", visible)


def _cells(text: str, name: str) -> list[str]:
    """Returns what stands beside a name in tables, with or without outer pipes and markup."""
    cell = rf"{_MARKUP}{name}{_MARKUP}\|{_MARKUP}(.*?){_MARKUP}"
    return re.findall(rf"^{cell}$", text, re.MULTILINE | re.IGNORECASE)
