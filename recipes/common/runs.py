"""Files of finished runs, a JSON object a line, that survive a crash while a line is written."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns what the lines hold; nothing if there is no file.

    Warns of a last line without an end, which a crash has left, and passes over it.

    Raises:
        ValueError: if another line is no JSON.
    """
    if not path.exists():
        return []
    *lines, rest = path.read_bytes().split(b"\n")
    if rest:
        warnings.warn(
            f"{path} ends in half a line, which is ignored: its run will be made again.",
            stacklevel=2,
        )
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}, is no JSON: {error}. Delete it.") from error
    return found


def append_line(path: Path, entry: Mapping[str, Any]) -> None:
    """Adds a line, in the place of half a line if there is one, and waits until it is on disk."""
    line = json.dumps(entry).encode() + b"\n"
    with path.open("a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
