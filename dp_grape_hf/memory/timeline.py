"""Record when tensor memory is allocated and freed, its purpose, and the messages of processes."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from dp_grape_hf.sharding import local

WEIGHTS, OPTIMIZER, PROJECTIONS = "weights", "optimizer state", "projections"
ACTIVATIONS, PER_SAMPLE, SUMS = "saved activations", "per-sample gradients", "summed gradients"
TEMPORARY = "temporary"
KINDS = (WEIGHTS, OPTIMIZER, PROJECTIONS, ACTIVATIONS, PER_SAMPLE, SUMS, TEMPORARY)
"""What memory is used for. Summed gradients are clipped sums, or the gradients of plain AdamW.
Activations that gradient checkpointing computes a second time are temporary."""

SETUP = "setup"
"""The phase before the step, which is not measured."""

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"
COLLECTIVES = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)
# Operators of torch.ops.c10d, in which collective calls end. Broadcasts are no part of a step.
_SENT_AS = {
    "_allgather_base_": ALL_GATHER,
    "_reduce_scatter_base_": REDUCE_SCATTER,
    "allreduce_": ALL_REDUCE,
}

_NO_KERNEL = (
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "is_pinned"),
    *("lift_fresh", "_unsafe_view", "_reshape_alias", "detach", "set_", "resize_", "record_stream"),
    *("_record_function_enter_new", "_record_function_exit"),
)

_BLOCK = 512  # bytes; CUDA's allocator rounds the size of a tensor up to whole blocks


@dataclass(frozen=True)
class Footprint:
    """The memory (in bytes), products and messages of a step."""

    kinds: Mapping[str, int]  # memory at the peak, for every one of ``KINDS``
    phase: str  # phase of the peak: redraw, forward, backward, clip, release or update
    phases: Mapping[str, int]  # phase -> its peak
    at_end: Mapping[str, int]  # memory that is still allocated at the end, for every kind
    gradients: int  # the most per-sample and summed gradients together
    flops: int  # operations of matrix products, convolutions and attention
    sent: Mapping[str, int]  # collective -> bytes that this process sends

    @property
    def total(self) -> int:
        """The peak."""
        return sum(self.kinds.values())

    @property
    def optimizer(self) -> int:
        """Memory of the optimizer's state."""
        return self.at_end[OPTIMIZER]

    @property
    def projectors(self) -> int:
        """Memory of the projections that are kept for the next step."""
        return self.at_end[PROJECTIONS]


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
        flops: of matrix products, convolutions and attention since the setup.
        sent: collective -> bytes that this process sends since the setup, for a ring of processes:
            for a tensor of N bytes in W processes, N (W - 1) / W in a gather or a scatter, and
            twice as many in an all-reduce.
        kernels: (phase, operator) -> number of calls that launch a kernel. Operators that return a
            view or reserve memory launch none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = SETUP
        self.flops = 0
        self.sent = dict.fromkeys(COLLECTIVES, 0)
        self.kernels: Counter[tuple[str, str]] = Counter()
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

    def resized(self, tensor: Tensor) -> None:
        """Note that the memory of a tensor was allocated or freed while the tensor lives on."""
        allocation = self._allocation(tensor)
        allocation.kind = TEMPORARY
        self._resize(allocation, tensor.untyped_storage().nbytes())

    def peak(self) -> Footprint:
        """Return the largest memory that was allocated since the setup ended."""
        now = dict.fromkeys(KINDS, 0)
        total, most, gradients = 0, -1, 0
        kinds, phase, phases = dict(now), SETUP, dict[str, int]()
        for allocation, change, at in self._changes:
            now[allocation.known_kind] += change
            total += change
            if at == SETUP:
                continue
            phases[at] = max(total, phases.get(at, 0))
            gradients = max(gradients, now[PER_SAMPLE] + now[SUMS])
            if total > most:
                most, kinds, phase = total, dict(now), at
        return Footprint(kinds, phase, phases, now, gradients, self.flops, dict(self.sent))

    def at_end(self, kind: str) -> int:
        """Return the bytes of a kind that are allocated now."""
        return self.peak().at_end[kind]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if func.namespace != "prim" and name not in _NO_KERNEL and not _is_view(func._schema):
            self.kernels[self.phase, name] += 1
        if self.phase != SETUP:
            if (count := flop_registry.get(func.overloadpacket)) is not None:
                self.flops += count(*args, **kwargs, out_val=output)
            if func.namespace == "c10d" and name in _SENT_AS:
                rounds, size = 2 if name == "allreduce_" else 1, dist.get_world_size()
                self.sent[_SENT_AS[name]] += rounds * _size_in_bytes(args) * (size - 1) // size
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self._allocation(tensor)
        return output

    def _allocation(self, tensor: Tensor) -> _Allocation:
        storage = local(tensor).untyped_storage()
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


def _size_in_bytes(args: tuple[Any, ...]) -> int:
    """Return the bytes of a collective call's tensor, as all processes hold it together."""
    sizes = [[x.nbytes for x in tree_leaves(arg) if isinstance(x, Tensor)] for arg in args[:2]]
    return max(map(sum, sizes))


def _is_view(schema: Any) -> bool:
    """Return whether an operator returns memory of an argument, which it does not write."""
    returned = [value.alias_info for value in schema.returns]
    return bool(returned) and all(info is not None and not info.is_write for info in returned)


def _in_blocks(size: int) -> int:
    """Return bytes, rounded up to whole blocks."""
    return -(-size // _BLOCK) * _BLOCK
