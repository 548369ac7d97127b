"""The file of a ledger: JSON Lines, written by one process at a time."""

from __future__ import annotations

import json
import logging
import os
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dp_grape_hf.errors import PrivacyError, require
from dp_grape_hf.ledger.entries import (
    Link,
    counts_on,
    decoded,
    encoded,
    is_digest,
    runs_of,
    with_releases,
)

logger = logging.getLogger(__name__)

_HELD: weakref.WeakValueDictionary[Path, RunLock] = weakref.WeakValueDictionary()


FILE_VERSION = 2
"""Version of the JSON Lines file. Version 1, of dp_grape_hf 0.1, was one JSON object."""

_FIRST_LINE = json.dumps({"schema_version": FILE_VERSION}).encode()

# ---- Reading ----


def read_links(path: str | Path) -> tuple[Link, ...]:
    """Read the entries of a ledger with their stated digests. The digests are not checked.

    The first line of a file contains its version, and each other line an entry. Consecutive equal
    releases have one line each, which contains the count up to there; the last line is the entry.
    A last line without a line end was cut by a crash while a release was recorded. It counts as a
    release if it is the beginning of the line of a release.

    Raises:
        PrivacyError: The file is missing, is not JSON, has an unknown version or invalid entries.
    """
    try:
        content = Path(path).read_bytes()
        first, *lines = content.split(b"\n")
        if first != _FIRST_LINE:
            return _of_version_1(content.decode("utf-8"))
        require(bool(lines), "it ends after its first line.")
        *complete, torn = lines
        links: list[Link] = []
        for number, line in enumerate(complete, 1):
            link = _link(_STRICT.decode(line.decode("utf-8")), number)
            if links and counts_on(links[-1].entry, link.entry):
                links.pop()
            links.append(link)
        return _with_torn(links, torn) if torn else tuple(links)
    except PrivacyError:
        raise
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        raise PrivacyError(f"{error}.") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    require(len(content) == len(pairs), f"a name occurs twice in {[name for name, _ in pairs]}.")
    return content


_STRICT = json.JSONDecoder(parse_constant=repr, object_pairs_hook=_object)
"""NaN and Infinity become texts, which no number accepts."""


def _with_torn(links: Sequence[Link], torn: bytes) -> tuple[Link, ...]:
    extended = with_releases(links, runs_of(link.entry for link in links)[-1].mechanism)
    written = torn.rstrip(b"\0")  # a file may end with zeros after a power failure
    require(
        line_of(extended[-1]).encode().startswith(written),
        f"its last line, {written[:80]!r}, is neither complete nor the beginning of a release.",
    )
    return extended


def _of_version_1(text: str) -> tuple[Link, ...]:
    content, end = _STRICT.raw_decode(text)  # of another version, perhaps only the first line
    version = content.get("schema_version") if isinstance(content, dict) else None
    require(
        type(version) is int and version == 1,
        f"schema_version={version!r} is unknown; this version reads 1 and {FILE_VERSION}. "
        "Read the file with the version of dp_grape_hf that wrote it.",
    )
    require(not text[end:].strip(), f"{text[end:].strip()[:80]!r} follows its end.")
    entries = content.get("entries")
    require(isinstance(entries, list), f"entries={entries!r} must be a list.")
    return tuple(_link(entry, number) for number, entry in enumerate(entries, 1))


def _link(content: Any, number: int) -> Link:
    digest = content.pop("digest", None) if isinstance(content, dict) else None
    entry = decoded(content, number)
    require(is_digest(digest), f"entry {number}: digest={digest!r} must be a SHA-256 in hex.")
    return Link(entry, str(digest))


# ---- Writing ----


def line_of(link: Link) -> str:
    """Return the line of an entry."""
    return json.dumps(encoded(link.entry) | {"digest": link.digest}, allow_nan=False) + "\n"


def to_text(links: Sequence[Link]) -> str:
    """Return the text of the file for a chain."""
    return "".join([f"{_FIRST_LINE.decode()}\n", *map(line_of, links)])


class LiveFile:
    """The file of a run that trains. Only this process writes it, and it locks the file.

    Raises:
        PrivacyError: a run of another process uses the file.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._lock = path, hold(path)
        self._end: bytes | None = None  # after the last write
        self._complete = False  # False before the first write, and after a write that failed

    def write(self, links: Sequence[Link], *, anew: bool) -> None:
        """Append the line of the last entry, or write the whole file, and wait for the disk.

        The whole file is written with ``anew``, and if a line may have been written in part.

        Raises:
            PrivacyError: the file cannot be written, or changed since the last write.
        """
        exists = self.path.exists()
        require(
            not exists or self._end is None or self._end == self._read_end(),
            f"{self.path} changed since this run last wrote it: another run was started in its "
            "folder, or the file was edited. Give each run a separate output_dir.",
        )
        complete, self._complete = self._complete and exists, False
        try:
            if complete and not anew:
                append_line(self.path, line_of(links[-1]))
            else:
                write_text(self.path, to_text(links))
            self._complete = True
        except OSError as error:
            raise PrivacyError(
                f"{self.path} cannot be written: {error}. The private update that was to be "
                "recorded, if any, was not made. Free disk space, then resume with "
                "resume_from_checkpoint."
            ) from error
        finally:
            with suppress(OSError):
                self._end = self._read_end()

    def _read_end(self) -> bytes:
        """Return the end of the file: some lines, whose digests depend on all lines before."""
        with open(self.path, "rb") as file:
            file.seek(max(0, self.path.stat().st_size - 1024))
            return file.read()


def append_line(path: Path, line: str) -> None:
    """Append a line to a file, and wait until it is on the disk."""
    with open(path, "ab") as file:
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def write_text(path: Path, text: str) -> None:
    """Write a file completely or not at all, even if the power fails; create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # elsewhere a folder cannot be opened
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


# ---- The lock of a run ----


class RunLock:
    """A lock made by `hold`. It is released when no object refers to it any more.

    Pickling it gives ``None``: another process does not hold the lock.
    """

    def __init__(self, descriptor: int) -> None:
        self.process = os.getpid()
        weakref.finalize(self, os.close, descriptor)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def hold(path: Path) -> RunLock | None:
    """Lock the live ledger at ``path`` for this process and all its runs.

    The lock is on the hidden file ``.<name>.lock`` in the same folder. This file stays there and
    has no meaning without a lock. Returns ``None`` if the system cannot lock the file (Windows,
    some network folders).

    Raises:
        PrivacyError: Another running process holds the lock.
    """
    path = Path(os.path.realpath(path))
    held = _HELD.get(path)
    if held is not None and held.process == os.getpid():
        return held
    if sys.platform == "win32":
        return None
    import fcntl

    descriptor = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if descriptor is not None:
            os.close(descriptor)
            if isinstance(error, BlockingIOError | PermissionError):
                raise PrivacyError(
                    f"{path} belongs to a run of another process that still runs. Both runs would "
                    "count only their own releases. Give each run a separate output_dir, or end "
                    "that process."
                ) from error
        logger.info("%s cannot be locked: %s", path, error)
        return None
    lock = _HELD[path] = RunLock(descriptor)
    return lock
