"""The phases of a step, and who looks on: memory, timers and tests see a step by these names."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

REDRAW, FORWARD, BACKWARD = "redraw", "forward", "backward"
PROJECT, GRADIENTS = "project", "gradients"
CLIP, RELEASE, RECORD, UPDATE = "clip", "release", "record", "update"
"""The phases. ``project`` and ``gradients`` (of a layer, by its rule) lie inside ``forward`` and
``backward``, ``record`` (in the ledger) inside ``release``, and ``clip`` inside ``backward`` where
gradients are handed out layer by layer. ``update`` hands the release to the optimizer."""

PROJECTORS, PER_SAMPLE, RELEASED = "projectors", "per-sample gradients", "release"
"""What a step makes: mappings from parameter names."""


class Observer:
    """Looks on while a step runs, and changes nothing; this one sees nothing.

    Nothing that it keeps may leave the process: what is made before a release is sensitive.
    """

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Returns what a phase runs inside of."""
        return _NOTHING

    def made(self, what: str, values: Any) -> None:
        """Is shown what was made, before it is used."""


_NOTHING = nullcontext()
