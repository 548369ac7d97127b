"""Entries of a ledger bound together by digests, so that an edit of one shows in all after it.

The digest of an entry is the SHA-256 of the digest before it (of 64 zeros for the first), a line
feed, and the entry as JSON with sorted keys, no spaces, ASCII only and numbers as Python writes
them. So an entry that is changed, moved, put in or taken out spoils all digests from there on.

Equal releases in a row are one entry, whose count grows: for run-length coding it is the only one
that is ever replaced, and only while it is the last. Whoever knows the digest before it can tell
the digest that the chain had at any smaller count, so what was a head once remains checkable.

Guarantee:
    A chain shows edits, not lies. Entries cut off the end leave a valid chain, which only a head
    noted elsewhere, or weights whose digest is then missing, give away; and whoever rewrites an
    entry and all digests after it has made a new chain, which nothing inside it can tell from an
    honest one.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from dp_grape_hf.entries import KIND_OF, Entry, encoded
from dp_grape_hf.mechanism import Release

_GENESIS = "0" * 64


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


def with_releases(links: Sequence[Link], release: Release) -> tuple[Link, ...]:
    """Returns a chain with releases added, to the last entry if that counts the same."""
    last = links[-1].entry if links else None
    if isinstance(last, Release) and replace(last, count=release.count) == release:
        return extended(links[:-1], replace(last, count=last.count + release.count))
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


def is_prefix(links: Sequence[Link], whole: Sequence[Link]) -> bool:
    """Whether a chain has been what another one is now, at some time or now."""
    if not links:
        return True
    *sealed, (last, digest) = links
    at = len(sealed)
    if len(whole) <= at or list(whole[:at]) != sealed:
        return False
    now = whole[at].entry
    if isinstance(last, Release) and isinstance(now, Release):
        return last.count <= now.count and replace(last, count=now.count) == now
    return whole[at] == (last, digest)


def beyond(links: Sequence[Link], whole: Sequence[Link]) -> Sequence[Link]:
    """Returns the links from the first on that another chain does not hold just so."""
    pairs = enumerate(zip(links, whole, strict=False))
    return links[next((n for n, (one, other) in pairs if one != other), len(whole)) :]


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
