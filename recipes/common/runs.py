"""Files with one JSON object per finished run, which survive a crash while a line is written."""

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a file; none if the file does not exist.

    A last line without a line end, left by a crash, is skipped with a warning.
    """
    if not path.exists():
        return []
    *lines, rest = path.read_bytes().split(b"\n")
    if rest:
        warnings.warn(
            f"{path} ends with an incomplete line. The line is ignored, and its run is repeated.",
            stacklevel=2,
        )
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}, is not JSON: {error}. Delete it.") from error
    return entries


def append_line(path: Path, entry: Mapping[str, Any]) -> None:
    """Append a line, replacing an incomplete last line, and wait until it is on the disk."""
    line = json.dumps(entry).encode() + b"\n"
    with path.open("a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
