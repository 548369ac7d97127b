"""The phases of a step, and who looks on: memory, timers and tests see a step by these names.

What takes longer before the first step shows a progress bar.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from tqdm import tqdm

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

# ---- Before the first step ----

_QUIET = 2.0  # seconds before a progress bar is shown
_bar: ContextVar[Any] = ContextVar("bar", default=None)


@contextmanager
def progress(doing: str, shown: bool | None = None, unit: str = "passes") -> Iterator[None]:
    """Shows a progress bar if what runs inside takes longer than two seconds.

    Args:
        doing: what takes the time, in words.
        shown: whether a bar may be shown; by default if this runs inside of another one that may.
        unit: what is counted.
    """
    outer = _bar.get()
    if shown is None:
        shown = outer is not None and not outer.disable
    with tqdm(desc=doing, unit=f" {unit}", delay=_QUIET, leave=False, disable=not shown) as bar:
        token = _bar.set(bar)
        try:
            yield
        finally:
            _bar.reset(token)


def advance(of: int | None = None) -> None:
    """Counts one more in the innermost progress bar, if there is one: a pass of the model, say.

    Args:
        of: how many there will be, if that is known by now.
    """
    bar = _bar.get()
    if bar is not None:
        bar.total = of or bar.total
        bar.update()
