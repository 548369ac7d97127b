"""The entries of a ledger: their kinds, their meaning, their JSON form, and their hash chain.

The digest of an entry is the SHA-256 of the digest before it (64 zeros for the first entry), a line
feed, and the entry as JSON with sorted keys, no spaces, ASCII only and numbers as Python writes
them. So if an entry is changed, moved, inserted or removed, all digests from there on are wrong.

Consecutive equal releases are one entry with a count. Only this entry is ever replaced, and only
while it is the last one. The digest at a smaller count can be computed from the digest before the
entry. So every digest that was once the last one of the chain can still be checked.

Guarantee:
    The chain shows edits of entries. It does not show that the last entries were removed: only a
    digest noted elsewhere, or weights whose digest is then missing, show this. It also does not
    show that an entry and all digests after it were rewritten.
"""

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from importlib import metadata
from typing import Any, NamedTuple, get_args

from dp_grape_hf import accounting
from dp_grape_hf.errors import PrivacyError, require
from dp_grape_hf.ledger.record import (
    LEFT_OUT_IF_NONE,
    MAY_CHANGE_ON_RESUME,
    Mechanism,
    Record,
    Release,
    kinds_of,
)

LEDGER_NAME, CARD_NAME = "privacy_ledger.json", "README.md"
SCHEMA_VERSION = 1
SAME_DATA, OTHER_DATA = "same data", "other data"

_GENESIS = "0" * 64


def is_digest(value: Any) -> bool:
    """Return whether a value is a SHA-256 digest in lower-case hex."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


_COUNT = {"valid": ("at least 0", lambda x: x >= 0)}
_SCHEMA = {"valid": (f"{SCHEMA_VERSION}", lambda x: x == SCHEMA_VERSION)}
_TERMS = {"valid": (f"{SAME_DATA!r} or {OTHER_DATA!r}", lambda x: x in (SAME_DATA, OTHER_DATA))}
_TEXT_BY_KEY = {"valid": ("non-empty texts", lambda x: all(type(t) is str for t in x.values()))}
_CHANGES = {
    "valid": (
        f"texts by one of {', '.join(MAY_CHANGE_ON_RESUME)}",
        lambda x: all(k in MAY_CHANGE_ON_RESUME and type(t) is str and t for k, t in x.items()),
    )
}
_FILES = {
    "valid": ("a SHA-256 in hex by file name", lambda x: all(k and is_digest(x[k]) for k in x))
}


# ---- The kinds of entries. The entries after a start belong to its run ----


@dataclass(frozen=True)
class Start(Record):
    """The entry that a run begins.

    With ``continues=SAME_DATA``, the releases of all runs before it in the chain add up with the
    run's releases. With `OTHER_DATA`, they do not. The first run has ``continues=None``.

    Args:
        run_id: the unique identifier of the run.
        at: the time in UTC.
        versions: package -> version of the software.
        mechanism: the public parameters of the run.
        schema: the version of the format of a mechanism.
        continues: how the releases of earlier runs count; see above.
    """

    run_id: str
    at: str
    versions: dict[str, str] = field(metadata=_TEXT_BY_KEY)
    mechanism: Mechanism
    schema: int = field(default=SCHEMA_VERSION, metadata=_SCHEMA)
    continues: str | None = field(default=None, metadata=_TERMS)


@dataclass(frozen=True)
class Weights(Record):
    """The entry that weights were saved.

    Args:
        updates: the number of private updates in the weights.
        files: file name -> SHA-256 digest, in hex.
    """

    updates: int = field(metadata=_COUNT)
    files: dict[str, str] = field(metadata=_FILES)


@dataclass(frozen=True)
class Resume(Record):
    """The entry that a run resumes from saved weights.

    Args:
        session: random hex digits, so that two branches of a run have different digests from here.
        updates: the number of private updates in the weights.
        at: the time in UTC.
        versions: package -> version of the software.
        changes: option -> new value, for parameters of the mechanism that changed.
    """

    session: str
    updates: int = field(metadata=_COUNT)
    at: str
    versions: dict[str, str] = field(metadata=_TEXT_BY_KEY)
    changes: dict[str, str] = field(metadata=_CHANGES)


@dataclass(frozen=True)
class Projection(Record):
    """The SHA-256 of the P used from here on, if P cannot be drawn again from a seed."""

    sha256: str = field(metadata={"valid": ("a SHA-256 in hex", is_digest)})


@dataclass(frozen=True)
class NotPrivate(Record):
    """The entry that a run has no guarantee, and cannot get one later.

    Args:
        reason: the reason, as a sentence.
    """

    reason: str


Entry = Start | Release | Weights | Resume | Projection | NotPrivate

_NAMES = ("start", "releases", "weights", "resume", "projection", "not_private")
KINDS: dict[str, type[Any]] = dict(zip(_NAMES, get_args(Entry), strict=True))
KIND_OF = {cls: kind for kind, cls in KINDS.items()}


# ---- The time and the software versions of a start or a resumption ----

_PACKAGES = ("dp_grape_hf", "torch", "transformers", "prv-accountant", "dp-accounting")


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def software_versions() -> dict[str, str]:
    """Return the versions of the software that releases depend on, by package."""
    versions = dict.fromkeys(_PACKAGES, "not installed")
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


# ---- The runs that the entries describe ----


@dataclass
class RecordedRun:
    """One run: a summary of the entries from its start to the next start."""

    start: Start
    mechanism: Mechanism
    sessions: list[int] = field(default_factory=lambda: [0])  # releases of each session
    updates: int | None = None
    projection: str | None = None
    reasons: list[str] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """The number of releases of the run."""
        return sum(self.sessions)

    @property
    def accounted(self) -> accounting.Releases:
        """The releases that the accountant counts for the run."""
        return self.mechanism.releases(self.mechanism.counted(self.sessions))

    @property
    def accounted_in_words(self) -> str:
        """The inputs of the accountant as text: number of releases, sampling rate, sigma."""
        of = self.accounted
        text = (
            f"{of.counted} releases at sampling rate {of.counted_rate:.6g} "
            f"with sigma {of.noise_multiplier:.6g}"
        )
        if of.bands > 1:
            terms = " + ".join(f"ceil({steps} / {of.bands})" for steps in self.sessions)
            text += f", ceil(steps / bands) of each session: {terms}"
        return text


def released(runs: Iterable[RecordedRun]) -> list[accounting.Releases]:
    """Return the releases of several runs, as input for `accounting`."""
    return [run.accounted for run in runs if run.steps]


def runs_of(entries: Iterable[Entry]) -> tuple[RecordedRun, ...]:
    """Return the runs that a chain records, oldest first.

    Raises:
        PrivacyError: The entries contradict each other.
    """
    runs: list[RecordedRun] = []
    for entry in entries:
        if not isinstance(entry, Start):
            require(bool(runs), f"entries: {KIND_OF[type(entry)]!r} comes before any 'start'.")
            _read(entry, runs[-1])
            continue
        require(
            (entry.continues is not None) == bool(runs),
            f"start: continues={entry.continues!r}, but {len(runs)} runs come before it.",
        )
        require(
            all(run.start.run_id != entry.run_id for run in runs),
            f"start: run_id={entry.run_id!r} is that of a run before it.",
        )
        if entry.continues == SAME_DATA:
            require_same_neighbours(entry.mechanism, runs)
        reasons = entry.mechanism.reasons_not_private()
        runs.append(RecordedRun(entry, entry.mechanism, reasons=reasons))
    require(bool(runs), "entries=[] must begin with a 'start'.")
    return tuple(runs)


def require_same_neighbours(mechanism: Mechanism, before: Iterable[RecordedRun]) -> None:
    """Refuse a run whose adjacency or privacy unit differs from earlier runs on the same data.

    Runs without a guarantee have no finite epsilon, so they are not compared.
    """
    for run in before if not mechanism.reasons_not_private() else ():
        for name in ("adjacency", "privacy_unit"):
            ours, theirs = getattr(mechanism, name), getattr(run.mechanism, name)
            require(
                ours == theirs or bool(run.reasons),
                f"{name}={ours!r}, but run {run.start.run_id} on the same data has {theirs!r}: "
                f"their epsilons protect different things and do not add up. Use {theirs!r}.",
            )


def _read(entry: Entry, run: RecordedRun) -> None:
    if isinstance(entry, Release):
        for name in ("noise_multiplier", "sample_rate"):
            ours, theirs = getattr(run.mechanism, name), getattr(entry, name)
            require(ours == theirs, f"releases: {name}={theirs!r}, but the mechanism: {ours!r}.")
        run.sessions[-1] += entry.count
    elif isinstance(entry, Weights | Resume):
        require(
            entry.updates <= run.steps,
            f"updates={entry.updates} must be a number from 0 to the {run.steps} releases.",
        )
        run.updates = entry.updates
        if isinstance(entry, Resume):
            run.sessions.append(0)
            changes: dict[str, Any] = dict(entry.changes)
            run.mechanism = replace(run.mechanism, **changes)
    elif isinstance(entry, Projection):
        run.projection = entry.sha256
    elif isinstance(entry, NotPrivate) and entry.reason not in run.reasons:
        run.reasons.append(entry.reason)


# ---- As JSON ----


def encoded(entry: Entry) -> dict[str, Any]:
    """Return an entry as JSON data, without fields that are ``None``.

    Of a mechanism, only the fields in ``LEFT_OUT_IF_NONE`` are left out.
    """
    content = {name: value for name, value in asdict(entry).items() if value is not None}
    if isinstance(entry, Start):
        content["mechanism"] = {
            name: "Infinity" if value == math.inf else value
            for name, value in content["mechanism"].items()
            if value is not None or name not in LEFT_OUT_IF_NONE
        }
    return {"kind": KIND_OF[type(entry)]} | content


def decoded(content: Any, number: int) -> Entry:
    """Return the entry that JSON data describe. ``number`` is its position, from 1, for errors.

    Raises:
        PrivacyError: The data do not describe an entry.
    """
    where = f"entry {number}"
    require(isinstance(content, dict), f"{where}: {content!r} must be an object.")
    content = dict(content)
    kind = content.pop("kind", None)
    is_known = isinstance(kind, str) and kind in KINDS
    require(is_known, f"{where}: kind={kind!r} must be one of {', '.join(KINDS)}.")
    cls, where = KINDS[kind], f"{where}, {kind}"
    if cls is Start:
        mechanism = content.get("mechanism")
        content["mechanism"] = _built(Mechanism, mechanism, "mechanism", may_miss=LEFT_OUT_IF_NONE)
    entry: Entry = _built(cls, content, where, may_miss=("continues",))
    return entry


def _built(cls: type[Any], content: Any, where: str, may_miss: Collection[str]) -> Any:
    """Build a record from JSON data that have exactly its fields.

    The fields in ``may_miss`` may be missing and are then ``None``. Errors begin with ``where``.
    """
    names = {f.name for f in fields(cls)}
    require(isinstance(content, dict), f"{where}={content!r} must be an object.")
    for name in sorted(content.keys() ^ names):
        if name in content:
            raise PrivacyError(
                f"{where}: this version does not know {name}={content[name]!r}, and cannot count "
                "it. Read the file with the version of dp_grape_hf that wrote it."
            )
        require(name in may_miss, f"{where}: {name} is missing.")
    content = dict.fromkeys(names.intersection(may_miss)) | content
    for f in fields(cls):
        if content[f.name] == "Infinity" and float in kinds_of(f):
            content[f.name] = math.inf
    try:
        return cls(**content)
    except PrivacyError as error:
        raise PrivacyError(f"{where}: {error}") from error


# ---- The chain of entries ----


class Link(NamedTuple):
    """An entry and its digest."""

    entry: Entry
    digest: str


def extended(links: Sequence[Link], *entries: Entry) -> tuple[Link, ...]:
    """Return a chain with entries added to its end."""
    chain = list(links)
    for entry in entries:
        chain.append(Link(entry, digest_of(entry, chain[-1].digest if chain else _GENESIS)))
    return tuple(chain)


def counts_on(before: Entry, entry: Entry) -> bool:
    """Return whether ``entry`` is the release ``before`` with a larger count."""
    return (
        isinstance(before, Release)
        and isinstance(entry, Release)
        and replace(before, count=entry.count) == entry
        and before.count < entry.count
    )


def with_releases(links: Sequence[Link], mechanism: Mechanism, steps: int = 1) -> tuple[Link, ...]:
    """Return a chain with releases added; a last entry with the same parameters is extended."""
    release = Release(mechanism.noise_multiplier, mechanism.sample_rate, steps)
    last = links[-1].entry
    if isinstance(last, Release):
        more = replace(release, count=last.count + steps)
        if counts_on(last, more):
            return extended(links[:-1], more)
    return extended(links, release)


def digest_of(entry: Entry, before: str) -> str:
    """Return the digest of an entry, given the digest of the entry before it."""
    text = json.dumps(encoded(entry), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(f"{before}\n{text}".encode("ascii")).hexdigest()


def broken(links: Sequence[Link]) -> str | None:
    """Return a message about the first entry whose digest is wrong, or ``None``."""
    before = _GENESIS
    for number, (entry, digest) in enumerate(links, 1):
        if digest_of(entry, before) != digest:
            which = f"entry {number} of {len(links)} ({KIND_OF[type(entry)]})"
            return (
                f"{which} does not fit its digest {digest[:12]}: it or an earlier entry was edited"
            )
        before = digest
    return None


def has_been_head(digest: str, links: Sequence[Link]) -> bool:
    """Return whether a digest is, or once was, the digest of the last entry of a chain."""
    before = _GENESIS
    for entry, now in links:
        if now == digest:
            return True
        if isinstance(entry, Release):
            counts = range(1, entry.count)
            if any(digest_of(replace(entry, count=n), before) == digest for n in counts):
                return True
        before = now
    return False
