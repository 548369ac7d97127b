"""The phases of a step, an observer of them, and a progress bar for work before the first step.

The memory simulation, timers and tests refer to the parts of a step by these names. In the
simulation, the CPU stands for a GPU.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from tqdm import tqdm

REDRAW, FORWARD, BACKWARD = "redraw", "forward", "backward"
PROJECT, GRADIENTS = "project", "gradients"
CLIP, RELEASE, RECORD, UPDATE = "clip", "release", "record", "update"
"""The phases. ``project`` and ``gradients`` (of a layer, by its rule) are inside ``forward`` and
``backward``, ``record`` (in the ledger) is inside ``release``, and ``clip`` is inside ``backward``
if gradients are handed out layer by layer. ``update`` passes the release to the optimizer."""

PROJECTORS, PER_SAMPLE, RELEASED = "projectors", "per-sample gradients", "release"
"""The values that a step reports to an observer: mappings from parameter names."""


class Observer:
    """Observe a step without changing it; this base class does nothing.

    Values before a release are sensitive: nothing that an observer keeps may leave the process.
    """

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return the context that a phase runs in."""
        return _NOTHING

    def computed(self, name: str, values: Any) -> None:
        """Receive values that the step has computed, before it uses them."""


_NOTHING = nullcontext()

# ---- The device of a step ----

_is_simulated: ContextVar[bool] = ContextVar("is_simulated", default=False)


def is_cpu(device: Any) -> bool:
    """Return whether a ``torch.device`` is a CPU that does not stand for a GPU."""
    return device.type == "cpu" and not _is_simulated.get()


@contextmanager
def simulated_gpu() -> Iterator[None]:
    """Let the CPU stand for a GPU: code that chooses by ``is_cpu`` does what it does on a GPU."""
    token = _is_simulated.set(True)
    try:
        yield
    finally:
        _is_simulated.reset(token)


# ---- Before the first step ----

_QUIET = 0.5  # seconds before a progress bar is shown
_bar: ContextVar[Any] = ContextVar("bar", default=None)


@contextmanager
def progress(doing: str, shown: bool | None = None, unit: str = "passes") -> Iterator[None]:
    """Show a progress bar if the work takes more than half a second.

    Args:
        doing: description of the work.
        shown: whether a bar may be shown; by default, if this runs inside a shown bar.
        unit: the unit that is counted.
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
    """Count one unit in the innermost progress bar, if there is one.

    Args:
        of: the total number of units, if it is known by now.
    """
    bar = _bar.get()
    if bar is not None:
        bar.total = of or bar.total
        bar.update()
