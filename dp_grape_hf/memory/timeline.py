"""Record when tensor memory is allocated and freed, and its purpose."""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

WEIGHTS, OPTIMIZER, PROJECTIONS = "weights", "optimizer state", "projections"
ACTIVATIONS, PER_SAMPLE, SUMS = "saved activations", "per-sample gradients", "summed gradients"
TEMPORARY = "temporary"
KINDS = (WEIGHTS, OPTIMIZER, PROJECTIONS, ACTIVATIONS, PER_SAMPLE, SUMS, TEMPORARY)
"""What memory is used for. Summed gradients are clipped sums, or the gradients of plain AdamW.
Activations that gradient checkpointing computes a second time are temporary."""

SETUP = "setup"
"""The phase before the step, which is not measured."""

_BLOCK = 512  # bytes; CUDA's allocator rounds the size of a tensor up to whole blocks


@dataclass(frozen=True)
class Footprint:
    """The memory of a step, in bytes."""

    kinds: Mapping[str, int]  # memory at the peak, for every one of ``KINDS``
    phase: str  # phase of the peak: redraw, forward, backward, clip, release or update
    at_end: Mapping[str, int]  # memory that is still allocated at the end, for every kind
    gradients: int  # the most per-sample and summed gradients together

    @property
    def total(self) -> int:
        """The peak."""
        return sum(self.kinds.values())


@dataclass(eq=False, slots=True)
class _Allocation:
    size: int  # bytes, as requested
    born: str  # phase
    kind: str | None = None
    died: str | None = None  # phase; None if alive

    @property
    def known_kind(self) -> str:
        if self.kind is not None:
            return self.kind
        survives = self.born == "forward" and self.died != "forward"
        return ACTIVATIONS if survives else TEMPORARY


class Timeline(TorchDispatchMode):
    """Record every allocation and release of tensor memory while it is active.

    The purpose of a tensor may become known after its allocation, a per-sample gradient's for
    example. ``label`` sets the kind for the whole life of a tensor. Views share the memory of their
    storage.

    Attributes:
        phase: current phase of the step; ``SETUP`` before it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = SETUP
        self._changes: list[tuple[_Allocation, int, str]] = []  # change in bytes, and phase
        self._allocations = WeakIdKeyDictionary()  # storage -> _Allocation
        self._references: set[weakref.ref[torch.UntypedStorage]] = set()

    def label(self, kind: str, tensors: Any) -> None:
        """Set the purpose of the memory of tensors, whether it was allocated before or not.

        Args:
            kind: a purpose, such as ``WEIGHTS``.
            tensors: tensors, in any nesting of containers.
        """
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                self._allocation(tensor).kind = kind

    def peak(self) -> Footprint:
        """Return the largest memory that was allocated since the setup ended."""
        now = dict.fromkeys(KINDS, 0)
        total, most, gradients = 0, -1, 0
        kinds, phase = dict(now), SETUP
        for allocation, change, at in self._changes:
            now[allocation.known_kind] += change
            total += change
            if at == SETUP:
                continue
            gradients = max(gradients, now[PER_SAMPLE] + now[SUMS])
            if total > most:
                most, kinds, phase = total, dict(now), at
        return Footprint(kinds, phase, now, gradients)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self._allocation(tensor)
        return output

    def _allocation(self, tensor: Tensor) -> _Allocation:
        storage = tensor.untyped_storage()
        allocation: _Allocation | None = self._allocations.get(storage)
        if allocation is None:
            allocation = self._allocations[storage] = _Allocation(0, self.phase)
            self._resize(allocation, storage.nbytes())
            self._references.add(weakref.ref(storage, partial(self._freed, allocation)))
        return allocation

    def _resize(self, allocation: _Allocation, size: int) -> None:
        change = _in_blocks(size) - _in_blocks(allocation.size)
        self._changes.append((allocation, change, self.phase))
        allocation.size = size

    def _freed(self, allocation: _Allocation, reference: weakref.ref[torch.UntypedStorage]) -> None:
        self._references.discard(reference)
        allocation.died = self.phase
        self._resize(allocation, 0)


def _in_blocks(size: int) -> int:
    """Return bytes, rounded up to whole blocks."""
    return -(-size // _BLOCK) * _BLOCK
