"""When tensor memory is allocated and freed, and what for; and what is sent to other processes."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
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
"""Of what memory is used for. Summed gradients are clipped sums, or the gradients of plain AdamW;
activations that gradient checkpointing computes a second time count as temporary."""

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

_BLOCK = 512  # bytes that CUDA's allocator rounds a tensor up to a multiple of


@dataclass(frozen=True)
class Peak:
    """The most memory that a step has allocated at one time, in bytes, and what for."""

    kinds: Mapping[str, int]  # every one of ``KINDS``
    phase: str  # of the step: redraw, forward, backward, clip, release or update
    phases: Mapping[str, int] = field(default_factory=dict, compare=False)  # the most in each

    @property
    def total(self) -> int:
        """The sum over the kinds, in bytes."""
        return sum(self.kinds.values())


@dataclass(eq=False, slots=True)
class _Allocation:
    size: int  # bytes that were asked for
    born: str  # phase
    kind: str | None = None
    died: str | None = None  # phase; None: alive to the end


@dataclass(eq=False, slots=True)
class _Event:
    allocation: _Allocation
    before: int  # bytes that were asked for
    after: int
    phase: str

    @property
    def change(self) -> int:
        """Bytes, in whole blocks."""
        return _blocks(self.after) - _blocks(self.before)


class Timeline(TorchDispatchMode):
    """Records every allocation and release of tensor memory while it is active.

    What a tensor is for may become known after its memory was allocated, a per-sample gradient's
    for example; ``label`` then says so for its whole life. Views share their storage's memory.

    Attributes:
        phase: of the step that is going on; ``setup`` before it.
        flops: of matrix products, convolutions and attention since ``setup``.
        sent: collective -> bytes that this process sends since ``setup``, if all processes stand in
            a ring, each of which passes on what it has received: of a tensor that is N bytes as a
            whole, N (W - 1) / W in a gather or a scatter, and twice that in an all-reduce.
        kernels: (phase, operator) -> how often the operator was handed to the device. Those that
            return a view or reserve memory launch nothing, and are left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = "setup"
        self.flops = 0
        self.sent = dict.fromkeys(COLLECTIVES, 0)
        self.kernels: Counter[tuple[str, str]] = Counter()
        self._events: list[_Event] = []
        self._known = WeakIdKeyDictionary()  # storage -> _Allocation
        self._references: set[weakref.ref[torch.UntypedStorage]] = set()

    def label(self, kind: str, tensors: Any) -> None:
        """Says what the memory of tensors is for, which may have been allocated before."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                self._allocation(tensor).kind = kind

    def resized(self, tensor: Tensor) -> None:
        """Notes that the memory of a tensor was taken or freed, while the tensor lives on."""
        allocation, size = self._allocation(tensor), tensor.untyped_storage().nbytes()
        self._events.append(_Event(allocation, allocation.size, size, self.phase))
        allocation.size, allocation.kind = size, TEMPORARY

    def peak(self) -> Peak:
        """Returns the most that was allocated since the phase ``setup`` ended."""
        now, most, at = 0, -1, -1
        phases: dict[str, int] = {}
        for index, event in enumerate(self._events):
            now += event.change
            phases[event.phase] = max(now, phases.get(event.phase, 0))
            if event.phase != "setup" and now > most:
                most, at = now, index
        kinds: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        for event in self._events[: at + 1]:
            kinds[_kind(event.allocation)] += event.change
        phases.pop("setup", None)
        return Peak(dict(kinds), self._events[at].phase, phases)

    def most(self, *kinds: str) -> int:
        """Returns the most bytes of these kinds together at one time since ``setup`` ended."""
        now, most = 0, 0
        for event in self._events:
            now += event.change if _kind(event.allocation) in kinds else 0
            if event.phase != "setup":
                most = max(most, now)
        return most

    def kept(self, kind: str) -> int:
        """Returns the bytes of a kind that are allocated now."""
        return sum(e.change for e in self._events if _kind(e.allocation) == kind)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.phase != "setup" and func.overloadpacket in flop_registry:
            count = flop_registry[func.overloadpacket]
            self.flops += count(*args, **(kwargs or {}), out_val=output)
        name = func.overloadpacket.__name__
        if func.namespace != "prim" and name not in _NO_KERNEL and not _is_view(func._schema):
            self.kernels[self.phase, name] += 1
        if self.phase != "setup" and func.namespace == "c10d":
            self._note_message(name, args)
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self._allocation(tensor)
        return output

    def _note_message(self, operator: str, args: tuple[Any, ...]) -> None:
        if (collective := _SENT_AS.get(operator)) is not None:
            rounds, size = 2 if collective == ALL_REDUCE else 1, dist.get_world_size()
            self.sent[collective] += rounds * _whole(args) * (size - 1) // size

    def _allocation(self, tensor: Tensor) -> _Allocation:
        tensor = local(tensor)
        storage = tensor.untyped_storage()
        known: _Allocation | None = self._known.get(storage)
        if known is not None:
            return known
        allocation = _Allocation(storage.nbytes(), self.phase)
        self._known[storage] = allocation
        self._events.append(_Event(allocation, 0, allocation.size, self.phase))
        self._references.add(weakref.ref(storage, partial(self._freed, allocation)))
        return allocation

    def _freed(self, allocation: _Allocation, reference: weakref.ref[torch.UntypedStorage]) -> None:
        self._references.discard(reference)
        allocation.died = self.phase
        self._events.append(_Event(allocation, allocation.size, 0, self.phase))


def _whole(args: tuple[Any, ...]) -> int:
    """Returns the bytes of what all processes of a collective call have together."""
    sizes = [[x.nbytes for x in tree_leaves(arg) if isinstance(x, Tensor)] for arg in args[:2]]
    return max(map(sum, sizes))


def _is_view(schema: Any) -> bool:
    """Whether what an operator returns is memory of an argument, which it does not write."""
    returned = [value.alias_info for value in schema.returns]
    return bool(returned) and all(info is not None and not info.is_write for info in returned)


def _blocks(size: int) -> int:
    """Returns bytes, rounded up to whole blocks."""
    return -(-size // _BLOCK) * _BLOCK


def _kind(allocation: _Allocation) -> str:
    if allocation.kind is not None:
        return allocation.kind
    survives = allocation.born == "forward" and allocation.died != "forward"
    return ACTIVATIONS if survives else TEMPORARY
