"""One process at a time writes a live ledger: a lock that its run holds, and loses when it dies."""

import logging
import os
import sys
import weakref
from pathlib import Path
from typing import Any

from dp_grape_hf.errors import PrivacyError

logger = logging.getLogger(__name__)

_HELD: "weakref.WeakValueDictionary[Path, RunLock]" = weakref.WeakValueDictionary()


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
