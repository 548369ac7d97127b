"""The kinds of entries a ledger is made of, what they say together, as JSON, and their chain.

The digests of a chain bind its entries together, so that an edit of one shows in all after it.
The digest of an entry is the SHA-256 of the digest before it (of 64 zeros for the first), a line
feed, and the entry as JSON with sorted keys, no spaces, ASCII only and numbers as Python writes
them. So an entry that is changed, moved, put in or taken out spoils all digests from there on.

Equal releases in a row are one entry, whose count grows: it is the only one that is ever replaced,
and only while it is the last. Whoever knows the digest before it can tell
the digest that the chain had at any smaller count, so what was a head once remains checkable.

Guarantee:
    A chain shows edits, not lies. Entries cut off the end leave a valid chain, which only a head
    noted elsewhere, or weights whose digest is then missing, give away; and whoever rewrites an
    entry and all digests after it has made a new chain, which nothing inside it can tell from an
    honest one.
"""

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from importlib import metadata
from typing import Any, NamedTuple

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

_HEX = frozenset("0123456789abcdef")
_GENESIS = "0" * 64


def is_digest(value: Any) -> bool:
    """Whether a value is a SHA-256 digest in lower-case hex."""
    return isinstance(value, str) and len(value) == 64 and set(value) <= _HEX


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


# ---- The kinds of entries: those after a start are about its run ----


@dataclass(frozen=True)
class Start(Record):
    """A run begins. ``schema`` is the version of what a mechanism is written as.

    Its releases add up with those of all runs before it in the chain if ``continues`` is
    `SAME_DATA`, and with none if it is `OTHER_DATA`; the first run continues none.
    """

    run_id: str
    at: str
    versions: dict[str, str] = field(metadata=_TEXT_BY_KEY)
    mechanism: Mechanism
    schema: int = field(default=SCHEMA_VERSION, metadata=_SCHEMA)
    continues: str | None = field(default=None, metadata=_TERMS)


@dataclass(frozen=True)
class Weights(Record):
    """Weights were saved that contain ``updates`` updates: SHA-256 by file name."""

    updates: int = field(metadata=_COUNT)
    files: dict[str, str] = field(metadata=_FILES)


@dataclass(frozen=True)
class Resume(Record):
    """The run goes on from weights with ``updates`` updates; ``changes`` are of its mechanism.

    ``session`` is random: two branches of one run differ from here on, whatever the clocks say.
    """

    session: str
    updates: int = field(metadata=_COUNT)
    at: str
    versions: dict[str, str] = field(metadata=_TEXT_BY_KEY)
    changes: dict[str, str] = field(metadata=_CHANGES)


@dataclass(frozen=True)
class Projection(Record):
    """What per-sample gradients meet from here on: the SHA-256 of a P that no seed makes again."""

    sha256: str = field(metadata={"valid": ("a SHA-256 in hex", is_digest)})


@dataclass(frozen=True)
class NotPrivate(Record):
    """The run has no guarantee, for good, and why."""

    reason: str


Entry = Start | Release | Weights | Resume | Projection | NotPrivate

KINDS: dict[str, type[Any]] = {
    "start": Start,
    "releases": Release,
    "weights": Weights,
    "resume": Resume,
    "projection": Projection,
    "not_private": NotPrivate,
}
KIND_OF = {cls: kind for kind, cls in KINDS.items()}


# ---- What is noted when a run starts or resumes ----

_PACKAGES = ("dp_grape_hf", "torch", "transformers", "prv-accountant", "dp-accounting")


def now() -> str:
    """Returns the time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def software_versions() -> dict[str, str]:
    """Returns the versions of the software that releases depend on, by package."""
    return {package: _version(package) for package in _PACKAGES}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


# ---- What the entries say together ----


@dataclass
class Run:
    """What the entries from one start to the next say: all of it follows from them."""

    start: Start
    mechanism: Mechanism
    sessions: list[int] = field(default_factory=lambda: [0])  # releases from one resumption on
    updates: int | None = None
    projection: str | None = None
    reasons: list[str] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """How many releases it made."""
        return sum(self.sessions)

    @property
    def accounted(self) -> accounting.Releases:
        """What the run may have cost."""
        return self.mechanism.releases(self.mechanism.counted(self.sessions))

    @property
    def accounted_in_words(self) -> str:
        """The numbers that epsilon is computed from: how many releases, sampling rate, sigma."""
        of = self.accounted
        said = (
            f"{of.counted} releases at sampling rate {of.counted_rate:.6g} "
            f"with sigma {of.noise_multiplier:.6g}"
        )
        if of.bands > 1:
            terms = " + ".join(f"ceil({steps} / {of.bands})" for steps in self.sessions)
            said += f", ceil(steps / bands) of each session: {terms}"
        return said


def released(runs: Iterable[Run]) -> list[accounting.Releases]:
    """What runs may have cost together, as `accounting` wants it."""
    return [run.accounted for run in runs if run.steps]


def runs_of(entries: Iterable[Entry]) -> tuple[Run, ...]:
    """Returns the runs that a chain records, oldest first.

    Raises:
        PrivacyError: The entries contradict each other.
    """
    runs: list[Run] = []
    for entry in entries:
        if isinstance(entry, Start):
            _check_start(entry, runs)
            runs.append(Run(entry, entry.mechanism, reasons=entry.mechanism.reasons_not_private()))
            continue
        require(bool(runs), f"entries: {KIND_OF[type(entry)]!r} comes before any 'start'.")
        _read(entry, runs[-1])
    require(bool(runs), "entries=[] must begin with a 'start'.")
    return tuple(runs)


def _check_start(start: Start, before: Sequence[Run]) -> None:
    require(
        (start.continues is not None) == bool(before),
        f"start: continues={start.continues!r}, but {len(before)} runs come before it.",
    )
    require(
        all(run.start.run_id != start.run_id for run in before),
        f"start: run_id={start.run_id!r} is that of a run before it.",
    )
    if start.continues == SAME_DATA:
        require_same_neighbours(start.mechanism, before)


def require_same_neighbours(mechanism: Mechanism, before: Iterable[Run]) -> None:
    """Refuses a run about other neighbours than those before it on the same data.

    Runs without a guarantee have no epsilon that could be about anything.
    """
    for run in before if not mechanism.reasons_not_private() else ():
        for name in ("adjacency", "privacy_unit"):
            ours, theirs = getattr(mechanism, name), getattr(run.mechanism, name)
            require(
                ours == theirs or bool(run.reasons),
                f"{name}={ours!r}, but run {run.start.run_id} on the same data has {theirs!r}: "
                f"their epsilons are about different things and do not add up. Use {theirs!r}.",
            )


def _read(entry: Entry, run: Run) -> None:
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
    """Returns an entry as JSON data; what is ``None`` is left out, but for a mechanism's own."""
    content = {name: value for name, value in asdict(entry).items() if value is not None}
    if isinstance(entry, Start):
        content["mechanism"] = {
            name: "Infinity" if value == math.inf else value
            for name, value in content["mechanism"].items()
            if not (name in LEFT_OUT_IF_NONE and value is None)
        }
    return {"kind": KIND_OF[type(entry)]} | content


def decoded(content: Any, number: int) -> Entry:
    """Returns an entry that was read as JSON, of that number from 1 up.

    Raises:
        PrivacyError: It is no entry.
    """
    where = f"entry {number}"
    require(isinstance(content, dict), f"{where}: {content!r} must be an object.")
    content = dict(content)
    kind = content.pop("kind", None)
    known = isinstance(kind, str) and kind in KINDS
    require(known, f"{where}: kind={kind!r} must be one of {', '.join(KINDS)}.")
    cls, where = KINDS[kind], f"{where}, {kind}"
    if cls is Start:
        mechanism = content.get("mechanism")
        content["mechanism"] = _built(Mechanism, mechanism, "mechanism", may_miss=LEFT_OUT_IF_NONE)
    entry: Entry = _built(cls, content, where, may_miss=("continues",))
    return entry


def _built(cls: type[Any], content: Any, where: str, may_miss: Collection[str]) -> Any:
    """Builds a record from JSON data that holds every field and no other.

    Fields that ``may_miss`` are ``None`` where they are missing; errors say ``where`` it is.
    """
    names = {f.name for f in fields(cls)}
    require_keys(content, names, where, may_miss)
    content = dict.fromkeys(names.intersection(may_miss)) | content
    for f in fields(cls):
        if content[f.name] == "Infinity" and float in kinds_of(f):
            content[f.name] = math.inf
    try:
        return cls(**content)
    except PrivacyError as error:
        raise PrivacyError(f"{where}: {error}") from error


def require_keys(content: Any, names: set[str], where: str, may_miss: Collection[str] = ()) -> None:
    """Refuses JSON data that is no object with these names."""
    require(isinstance(content, dict), f"{where}={content!r} must be an object.")
    for name in sorted(content.keys() ^ names):
        if name in content:
            raise PrivacyError(
                f"{where}: {name}={content[name]!r} is unknown to this version, which could not "
                "count it. Read the file with the version of dp_grape_hf that wrote it."
            )
        require(name in may_miss, f"{where}: {name} is missing.")


# ---- Their chain ----


class Link(NamedTuple):
    """An entry and its digest."""

    entry: Entry
    digest: str


def extended(links: Sequence[Link], *entries: Entry) -> tuple[Link, ...]:
    """Returns a chain with entries added to its end."""
    chain = list(links)
    for entry in entries:
        chain.append(Link(entry, digest_of(entry, chain[-1].digest if chain else _GENESIS)))
    return tuple(chain)


def counts_on(before: Entry, entry: Entry) -> bool:
    """Whether an entry is another one whose releases have become more."""
    return (
        isinstance(before, Release)
        and isinstance(entry, Release)
        and replace(before, count=entry.count) == entry
        and before.count < entry.count
    )


def with_releases(links: Sequence[Link], mechanism: Mechanism, steps: int = 1) -> tuple[Link, ...]:
    """Returns a chain with releases added, to the last entry if that counts the same."""
    release = Release(mechanism.noise_multiplier, mechanism.sample_rate, steps)
    last = links[-1].entry
    if isinstance(last, Release):
        more = replace(release, count=last.count + steps)
        if counts_on(last, more):
            return extended(links[:-1], more)
    return extended(links, release)


def digest_of(entry: Entry, before: str) -> str:
    """Returns the digest of an entry, given the one before it."""
    text = json.dumps(encoded(entry), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(f"{before}\n{text}".encode("ascii")).hexdigest()


def broken(links: Sequence[Link]) -> str | None:
    """Says where the digests of a chain first fail to fit its entries, or ``None``."""
    before = _GENESIS
    for number, (entry, digest) in enumerate(links, 1):
        if digest_of(entry, before) != digest:
            which = f"entry {number} of {len(links)} ({KIND_OF[type(entry)]})"
            return (
                f"{which} does not fit its digest {digest[:12]}: it was edited, or what precedes it"
            )
        before = digest
    return None


def goes_on(whole: Sequence[Link], links: Sequence[Link]) -> bool:
    """Whether a chain is what another one has become, or is still."""
    *sealed, (last, digest) = links
    at = len(sealed)
    if len(whole) <= at or list(whole[:at]) != sealed:
        return False
    now = whole[at].entry
    return counts_on(last, now) or whole[at] == (last, digest)


def lacks_releases(whole: Sequence[Link], links: Sequence[Link]) -> bool:
    """Whether another chain has releases from where the two part that this one has not."""
    pairs = enumerate(zip(links, whole, strict=False))
    parted = next((n for n, (one, other) in pairs if one != other), len(whole))
    own = any(isinstance(link.entry, Release) for link in links[parted:])
    return own and not goes_on(whole, links)


def has_been_head(digest: str, links: Sequence[Link]) -> bool:
    """Whether a digest is, or was at some time, that of the last entry of a chain."""
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
