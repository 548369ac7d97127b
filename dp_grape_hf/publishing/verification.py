"""Compare a saved model with its ledger and its card: ``dp-grape verify``.

Everything is computed again from the ledger: epsilon with two accountants, the statement of the
card, the digests of the chain and of the files.

Guarantee:
    A change of one part alone is noticed. The parts are an entry of the ledger, a file that was
    saved with the model, the statement of the card, the claim in its metadata, and its tag. Each
    other file with a name of weights, anywhere in the folder, is reported too. So is each config
    that makes a loader read files whose digests are not in the ledger, or run code. Folders with a
    separate ledger are not checked. The statement is compared byte for byte, except for line ends.
    The rest of the card and the name of an adapter's base model are not checked. Ledgers of version
    0.1 have digests of the weights and an adapter's config only, so other files are not checked.
    A consistent change of all parts is not noticed: a new ledger with new digests, a new card and
    new weights. A ``head`` that was noted elsewhere shows such a change too.
"""

import json
import re
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from dp_grape_hf.accounting import DEFAULT, AccountantFailure, rounded_up
from dp_grape_hf.errors import PrivacyError, require
from dp_grape_hf.ledger import CARD_NAME, LEDGER_NAME, Ledger, Weights
from dp_grape_hf.publishing import statement
from dp_grape_hf.publishing.configs import BASE, CODE, WEIGHTS, json_of, sent_elsewhere
from dp_grape_hf.publishing.model_files import (
    ADAPTER_CONFIG,
    CONFIG,
    digest,
    files_in,
    is_weights,
)

OK, MISMATCH, ABSENT = "ok", "MISMATCH", "absent"

# Relative and absolute tolerance. The bounds of two accountants differ by less, and claims of older
# versions may be 0.01 higher.
_BETWEEN_ACCOUNTANTS = 0.02

SECOND_OPINION = "(second opinion)"
"""Marks a bound on epsilon by an accountant that is not the ledger's accountant."""


class Check(NamedTuple):
    """One comparison of a stated value with the value found.

    ``status`` is `OK`, `MISMATCH`, or `ABSENT` if there is nothing to compare.
    """

    what: str
    status: str
    stated: str
    found: str


def verify(place: Path, *, delta: float | None = None, head: str | None = None) -> list[Check]:
    """Check a ledger, and compare it with the card and the weights in its folder.

    Args:
        place: a folder with a ledger, or the file of a ledger. For a file, only the chain and
            epsilon are checked.
        delta: the delta at which epsilon is computed; ``None`` for the ledger's delta.
        head: a digest of the last entry of the ledger that was noted earlier, if any.

    Returns:
        The comparisons, in the order of the chain, epsilon, the card and the weights.

    Raises:
        PrivacyError: there is no ledger, or ``delta`` or ``head`` is invalid.
    """
    path = place / LEDGER_NAME if place.is_dir() else place
    require(
        path.is_file(),
        f"{path} does not exist: without a ledger there is nothing to verify. Give the folder that "
        "a run saved to.",
    )
    try:
        ledger = Ledger.read(path)
    except PrivacyError as error:
        return [Check("ledger", MISMATCH, "-", f"{error}")]
    folder = path.parent if place.is_dir() else None
    card, spent = _card(folder), ledger.known_epsilon()
    reasons = statement.without_guarantee(ledger, 0.0 if spent is None else spent)
    return [
        *_of_the_chain(ledger, head),
        *_of_the_live_ledger(ledger, folder),
        _of_the_guarantee(card, reasons),
        *_of_epsilon(ledger, delta, card, spent),
        _of_the_card(ledger, card, spent, reasons),
        *_of_the_files(ledger, folder),
        *_of_the_updates(ledger, folder),
    ]


# ---- The chain ----


def _of_the_chain(ledger: Ledger, head: str | None) -> Iterator[Check]:
    fault = ledger.fault
    found = f"head {ledger.head[:12]}" if fault is None else fault
    yield Check("chain", MISMATCH if fault else OK, f"{len(ledger.links)} entries", found)
    if head is not None:
        has_head = ledger.has_ended_with(head)
        text = "in the chain" if has_head else "never was the end of this chain"
        yield Check("head noted before", OK if has_head else MISMATCH, head[:12], text)


def _of_the_live_ledger(ledger: Ledger, folder: Path | None) -> Iterator[Check]:
    """Compare the copy in a checkpoint with the ledger of the run in the folder above, if any."""
    path = None if folder is None else folder.resolve().parent / LEDGER_NAME
    if path is None or not path.is_file():
        return
    try:
        live = Ledger.read(path)
    except PrivacyError as error:
        yield Check("ledger of the run", MISMATCH, f"{ledger.steps} releases", f"{error}")
        return
    if live.run_id == ledger.run_id:
        agrees = live.goes_on_from(ledger) and live.fault is None
        copy = f"{ledger.steps} releases"
        text = f"{live.steps} releases" + ("" if agrees else ", but not those of the copy")
        yield Check("ledger of the run", OK if agrees else MISMATCH, copy, text)


# ---- Epsilon ----


def _of_the_guarantee(card: str | None, reasons: list[str]) -> Check:
    found = f"none: {'; '.join(reasons)}" if reasons else "private"
    if card is None:
        return Check("guarantee", ABSENT, "-", found)
    tagged = statement.is_tagged(card)
    stated = f"tagged {statement.TAG}" if tagged else "not tagged"
    return Check("guarantee", MISMATCH if tagged and reasons else OK, stated, found)


def _of_epsilon(
    ledger: Ledger, delta: float | None, card: str | None, spent: float | None
) -> Iterator[Check]:
    mechanism, target = ledger.mechanism, ledger.mechanism.target_epsilon
    delta = mechanism.target_delta if delta is None else delta
    if delta is None:
        yield Check("epsilon", ABSENT, "-", "the ledger has no delta; pass one")
        return
    require(0 < delta < 1, f"{delta=} must lie strictly between 0 and 1, for example 1e-5.")
    claim, source, promised = None, "card", delta == mechanism.target_delta
    if promised and card is not None:
        claim = _claimed(card)
    if promised and claim is None and (claim := target) is not None:
        source = "asked for"
    bounds, at = [] if spent is None else [spent], f"at delta {delta:g}"
    if any(releases.bands > 1 for releases in ledger.composed):
        each = (run.accounted_in_words for run in ledger.composed_runs)
        at += f", accounted as {'; '.join(each)}"
    # Older ledgers may name the accountant "least", which is gone: the default takes its place.
    first = DEFAULT if mechanism.accountant == "least" else mechanism.accountant
    for name in dict.fromkeys((first, "pld", "prv")):
        what = f"epsilon by {name}"
        stated = "-" if claim is None else f"{claim:g} ({source})"
        try:
            epsilon = ledger.epsilon_by(name, delta)
        except (AccountantFailure, PrivacyError) as failure:
            yield Check(what, ABSENT, stated, f"not applicable: {failure}")
            continue
        bounds.append(epsilon)
        same = source == "card" and name == mechanism.accountant
        slack = statement.LAST_DIGITS if same else _BETWEEN_ACCOUNTANTS
        fits = claim is None or epsilon <= claim * (1 + slack) + slack or not ledger.private
        role = at if name == mechanism.accountant else SECOND_OPINION
        found = f"{_up(epsilon)} {role}"
        yield Check(what, OK if fits else MISMATCH, stated, found)
    if source == "card" and promised and target is not None and bounds:
        best = min(bounds)  # a resumed run may have changed the accountant
        fits = best <= target * (1 + _BETWEEN_ACCOUNTANTS) or not ledger.private
        yield Check("budget", OK if fits else MISMATCH, f"{target:g} (asked for)", _up(best))


def _up(epsilon: float) -> str:
    return f"{rounded_up(epsilon):.4f}"


# ---- The card ----


def _card(folder: Path | None) -> str | None:
    path = None if folder is None else folder / CARD_NAME
    if path is None or not path.is_file():
        return None
    return path.read_text(encoding="utf-8-sig", errors="replace")


def _claimed(card: str) -> float | None:
    try:
        return statement.number_in(statement.epsilon_in(statement.statement_in(card)))
    except PrivacyError:
        return None


def _of_the_card(
    ledger: Ledger, card: str | None, spent: float | None, reasons: list[str]
) -> Check:
    """Compare the statement of a card with the statement of its ledger, byte for byte.

    The claim in the card's metadata, if any, must agree with the statement.
    """
    what = "card: statement"
    if card is None:
        return Check(what, ABSENT, "-", f"no {CARD_NAME} next to the ledger")
    try:
        stated = statement.statement_in(card)
    except PrivacyError as error:
        return Check(what, MISMATCH, "not readable", f"{error}")
    epsilon = statement.epsilon_in(stated)
    near = statement.number_in(epsilon) if spent is None else spent
    if near is None or not statement.is_written_so(epsilon, near):
        epsilon = "not known here" if spent is None else statement.epsilon_text(spent)
    expected = statement.statement_of(ledger, epsilon, reasons)
    for ours, theirs in zip_longest(stated.split("\n"), expected.split("\n")):
        if ours != theirs:
            return Check(what, MISMATCH, ours or "no such line", theirs or "no such line")
    data = statement.read_metadata(card) or {}
    claim = None if reasons else statement.metadata_of(ledger, epsilon)
    if statement.METADATA in data and data[statement.METADATA] != claim:
        return Check(
            what,
            MISMATCH,
            f"{statement.METADATA}: {data[statement.METADATA]}",
            f"{claim or 'no guarantee'}",
        )
    if spent is None:
        return Check(what, ABSENT, f"ε = {epsilon}", "not known here, see above; all else agrees")
    return Check(what, OK, f"ε = {epsilon}", "byte for byte; the rest of the card is not checked")


# ---- The files ----

_CONFIG = re.compile(r"config.*\.json$|\.index\.json$")
_ELSEWHERE = {
    CODE: "code, which may load anything and is not in the ledger",
    WEIGHTS: "makes loaders read a file that is not in the ledger",
}
_GENERATE = "custom_generate/generate.py"  # transformers runs it if trust_remote_code is set


def _of_the_files(ledger: Ledger, folder: Path | None) -> Iterator[Check]:
    """Compare the files of a folder with the digests in its ledger."""
    if folder is None:
        yield Check("weights", ABSENT, "-", "a file was given, not a folder")
        return
    files, others = files_in(folder)
    saved = ledger.saved
    recorded = saved[-1].files if saved else {}
    files |= {name: folder / name for name in recorded if (folder / name).is_file()}  # linked files
    yield from _of_the_digests(saved, recorded, files)
    if CONFIG in files and CONFIG not in recorded:
        found = "not in the ledger; version 0.1 recorded digests of weights only"
        yield Check(CONFIG, ABSENT, "-", found)
    for name, path in files.items():
        if _CONFIG.search(path.name):
            yield from _of_a_config(PurePosixPath(name), json_of(path), recorded)
    if _GENERATE in files:
        yield Check(_GENERATE, MISMATCH, "-", "code, which is not in the ledger")
    if others:
        found = "each has a separate ledger: verify it by its path"
        yield Check("other folders", ABSENT, ", ".join(others), found)


def _of_the_digests(
    saved: list[Weights], recorded: Mapping[str, str], files: Mapping[str, Path]
) -> Iterator[Check]:
    now = {n: digest(files[n]) for n in files if n in recorded or is_weights(n)}
    places = {PurePosixPath(name).parent for name in now if is_weights(name)}
    # Two saves of the same model may differ: a published one has no local paths.
    saves = [entry.files for entry in saved if entry.updates == saved[-1].updates]
    for name in sorted(recorded.keys() | now.keys()):
        weights = is_weights(name)
        what = f"weights: {name}" if weights else name
        stated = recorded[name][:12] if name in recorded else "unknown to the ledger"
        if name not in now:
            part = weights and PurePosixPath(name).parent in places  # other weights are here
            yield Check(what, MISMATCH if part else ABSENT, stated, "no such file here")
        elif any(files_then.get(name) == now[name] for files_then in saves):
            yield Check(what, OK, now[name][:12], now[name][:12])
        else:
            yield Check(what, MISMATCH, stated, now[name][:12])
    if not any(map(is_weights, {**recorded, **now})):
        yield Check("weights", ABSENT, "-", "no weight files, and none recorded")


def _of_a_config(path: PurePosixPath, content: Any, recorded: Mapping[str, str]) -> Iterator[Check]:
    """Report the entries of a config that make a loader read other weights or run code."""
    entries = content if isinstance(content, dict) else {}
    for key, value, to in sent_elsewhere(content):
        yield Check(f"{path}: {key}", MISMATCH, _short(value), _ELSEWHERE[to])
    if "weight_map" in entries:
        sent = entries["weight_map"]
        parts = sent.values() if isinstance(sent, dict) else [sent]
        other = {str(part) for part in parts if f"{path.parent / str(part)}" not in recorded}
        if other:
            found = "not among the weights of the ledger"
            yield Check(f"{path}: weight_map", MISMATCH, _short(sorted(other)), found)
    if path.name == ADAPTER_CONFIG:
        same_folder = [n for n in map(PurePosixPath, recorded) if n.parent == path.parent]
        if not any("adapter_model." in known.name for known in same_folder):
            found = "makes loaders load an adapter"
            yield Check(f"{path}", MISMATCH, "unknown to the ledger", found)
        found = "the ledger records the adapter, and not the weights of its base model"
        yield Check(f"{path}: base", ABSENT, _short(entries.get(BASE)), found)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# ---- The trainer ----


def _of_the_updates(ledger: Ledger, folder: Path | None) -> Iterator[Check]:
    """Compare with the state of the trainer in a checkpoint, to notice removed last entries."""
    state = None if folder is None else json_of(folder / "trainer_state.json")
    if isinstance(state, dict) and "global_step" in state:
        ours, theirs = ledger.updates, state["global_step"]
        status = OK if ours == theirs else MISMATCH
        yield Check("updates", status, f"{ours}", f"{theirs} by the trainer")
