"""The file of a ledger: strict JSON, written whole or not at all, by one process at a time."""

import json
import logging
import os
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

from dp_grape_hf.errors import PrivacyError, require
from dp_grape_hf.ledger.entries import (
    SCHEMA_VERSION,
    Link,
    decoded,
    encoded,
    is_digest,
    require_keys,
)

logger = logging.getLogger(__name__)

_HELD: "weakref.WeakValueDictionary[Path, RunLock]" = weakref.WeakValueDictionary()


def read_links(path: str | Path) -> tuple[Link, ...]:
    """Reads the entries of a ledger, and the digests that they claim to have, fitting or not.

    Raises:
        PrivacyError: The file is missing, is not JSON, has another schema or holds no such entries.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        # NaN and Infinity are not JSON: they become texts, which no number may be.
        content = json.loads(text, parse_constant=repr, object_pairs_hook=_object)
        version: Any = content.get("schema_version") if isinstance(content, dict) else None
        require(
            type(version) is int and version == SCHEMA_VERSION,
            f"schema_version={version!r} is not {SCHEMA_VERSION}, the only one that is read here. "
            "Read the file with the version of dp_grape_hf that wrote it.",
        )
        require_keys(content, {"schema_version", "entries"}, "ledger")
        entries = content["entries"]
        require(isinstance(entries, list), f"entries={entries!r} must be a list.")
        return tuple(_link(entry, number) for number, entry in enumerate(entries, 1))
    except PrivacyError:
        raise
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        raise PrivacyError(f"{error}") from error


def to_text(links: Sequence[Link], known: dict[str, str]) -> str:
    """Returns the file that a chain is written as.

    Texts of entries are ``known`` by their digests, and used again when the chain has grown.
    """
    *sealed, last = links
    for link in sealed:
        if link.digest not in known:
            known[link.digest] = _text_of(link)
    entries = ",\n".join([*(known[link.digest] for link in sealed), _text_of(last)])
    return f'{{\n  "schema_version": {SCHEMA_VERSION},\n  "entries": [\n{entries}\n  ]\n}}\n'


def write_text(path: Path, text: str) -> None:
    """Writes a file, whole or not at all, even if the power fails, and its folder if need be."""
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


def _text_of(link: Link) -> str:
    content = encoded(link.entry) | {"digest": link.digest}
    return indent(json.dumps(content, indent=2, allow_nan=False), "    ")


def _link(content: Any, number: int) -> Link:
    digest = content.pop("digest", None) if isinstance(content, dict) else None
    entry = decoded(content, number)
    require(is_digest(digest), f"entry {number}: digest={digest!r} must be a SHA-256 in hex.")
    return Link(entry, str(digest))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    require(len(content) == len(pairs), f"a name occurs twice in {[name for name, _ in pairs]}.")
    return content


# ---- The lock of a run ----


class RunLock:
    """What `hold` returns. The process gives the lock up when nothing refers to this any more.

    A copy by pickling, in another process, is ``None``: locks do not travel.
    """

    def __init__(self, descriptor: int) -> None:
        self.process = os.getpid()
        weakref.finalize(self, os.close, descriptor)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def hold(path: Path) -> RunLock | None:
    """Locks the live ledger at ``path``, for this process and all runs in it.

    The lock is on the hidden file ``.<name>.lock`` beside it, which stays there and means nothing
    by itself. Where files cannot be locked (not POSIX, some network folders), nothing is held.

    Raises:
        PrivacyError: another process that is still running holds it.
    """
    path = Path(os.path.realpath(path))
    held = _HELD.get(path)
    if held is not None and held.process == os.getpid():
        return held
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        logger.info("%s cannot be locked: %s", path, error)
        return None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        os.close(descriptor)
        raise PrivacyError(
            f"{path} belongs to a run of another process that has not ended: both would count "
            "only their own releases. Give each run an output_dir of its own, or end that process."
        ) from error
    except OSError as error:
        os.close(descriptor)
        logger.info("%s cannot be locked: %s", path, error)
        return None
    lock = _HELD[path] = RunLock(descriptor)
    return lock
