"""``dp-grape ledger``: show the entries of a ledger, and the epsilon spent."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from dp_grape_hf.accounting import AccountantFailure, rounded_up
from dp_grape_hf.errors import require
from dp_grape_hf.ledger import (
    KIND_OF,
    LEDGER_NAME,
    Entry,
    Ledger,
    Link,
    NotPrivate,
    Projection,
    Release,
    Resume,
    Start,
    Weights,
)
from dp_grape_hf.publishing import rows_of
from dp_grape_hf.tables import table


def run(args: argparse.Namespace) -> str:
    """Return a ledger as text."""
    place: Path = args.place
    ledger = Ledger.load(place / LEDGER_NAME if place.is_dir() else place)
    delta = ledger.mechanism.target_delta if args.target_delta is None else args.target_delta
    return in_words(ledger, delta)


def in_words(ledger: Ledger, delta: float | None) -> str:
    """Return the mechanism and the entries of a ledger, and the epsilon spent at a delta."""
    target = ledger.mechanism.target_epsilon
    budget = "none" if target is None else f"epsilon {target:g}"
    return "\n".join(
        [
            f"run {ledger.run_id}, started {ledger.runs[-1].start.at}",
            "software: " + ", ".join(f"{k} {v}" for k, v in sorted(ledger.versions.items())),
            "",
            table({"Budget": budget, **rows_of(ledger)}.items()),
            _entries(ledger.links),
            *_spent(ledger, delta),
            "",
        ]
    )


def _entries(links: Sequence[Link]) -> str:
    rows, total = [("#", "entry", "releases", "digest", "content")], 0
    for n, (entry, digest) in enumerate(links, 1):
        total = 0 if isinstance(entry, Start) else total
        total += entry.count if isinstance(entry, Release) else 0
        rows.append((f"{n}", KIND_OF[type(entry)], f"{total}", digest[:12], _says(entry)))
    return f"{table(rows, '><><')}head {links[-1].digest}\n"


def _says(entry: Entry) -> str:
    if isinstance(entry, Start):
        terms = "" if entry.continues is None else f", continues the run above, {entry.continues}"
        return f"run {entry.run_id[:12]} at {entry.at}{terms}"
    if isinstance(entry, Release):
        return f"{entry.count} with sigma {entry.noise_multiplier:.6g}, q {entry.sample_rate:.6g}"
    if isinstance(entry, Weights):
        files = ", ".join(f"{name} {digest[:12]}" for name, digest in sorted(entry.files.items()))
        return f"after {entry.updates} updates: {files or 'no digests'}"
    if isinstance(entry, Resume):
        changes = "".join(f", {name} is now {value}" for name, value in entry.changes.items())
        return f"from {entry.updates} updates at {entry.at}{changes}"
    if isinstance(entry, Projection):
        return f"P with digest {entry.sha256[:12]}"
    assert isinstance(entry, NotPrivate)
    return entry.reason


def _spent(ledger: Ledger, delta: float | None) -> Iterator[str]:
    runs = len(ledger.composed_runs)
    steps = sum(run.steps for run in ledger.composed_runs)
    of = f"{steps} releases" + (f" of {runs} runs on the same data" if runs > 1 else "")
    yield table(("accounted as", run.accounted_in_words) for run in ledger.composed_runs).rstrip()
    if not ledger.private:
        yield f"epsilon after {of} is infinite: {'; '.join(ledger.not_private_reasons)}"
    elif delta is None:
        yield f"epsilon after {of} needs a delta: pass --delta"
    else:
        require(0 < delta < 1, f"{delta=} must lie strictly between 0 and 1, for example 1e-5.")
        yield f"epsilon after {of}, at delta {delta:g}:"
        for name in ("prv", "pld", "rdp"):
            try:
                epsilon = f"{rounded_up(ledger.epsilon_by(name, delta)):.4f}"
            except AccountantFailure as failure:
                epsilon = f"not applicable: {failure}"
            is_claim = name == ledger.mechanism.accountant
            yield f"  {name}  {epsilon}" + ", by the run's accountant: the claim" * is_claim
        yield "Each is a valid upper bound. They differ by their numerical errors."
