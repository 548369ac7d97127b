"""Tracking of tensors that depend on positions which were selected by value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Selections(TorchDispatchMode):
    """Track the tensors of a pass that depend on positions which were selected by value.

    The number of selected positions depends on the values, and so does the sample that a row of
    such a tensor belongs to. After the program has read a number or the size of such a tensor,
    every tensor may depend on it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._memory: dict[int, StorageWeakRef] = {}  # storages of the tracked tensors
        self._everything = False
        self._reads = _Reads(self)

    def __enter__(self) -> Selections:
        self._reads.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._reads.__exit__(*error)

    def reach(self, value: Any) -> bool:
        """Return whether a value may depend on selected positions."""
        if self._everything or not isinstance(value, Tensor):
            return self._everything
        if value.layout is not torch.strided:  # it has no single storage
            return True
        storage = self._memory.get(value.untyped_storage()._cdata)
        return storage is not None and not storage.expired()

    def note_read(self, value: Any) -> None:
        """Record that the program has read numbers of a tensor."""
        self._everything |= self.reach(value)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result, aten = func(*args, **(kwargs or {})), torch.ops.aten
        selects = func in (aten.nonzero.default, aten.masked_select.default)
        if func is aten.index.Tensor:
            selects = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        if func is aten._local_scalar_dense.default:
            self.note_read(args[0])
        elif selects or any(map(self.reach, tree_leaves((args, kwargs)))):
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                    storage = StorageWeakRef(leaf.untyped_storage())
                    self._memory[storage.cdata] = storage
        return result


class _Reads(TorchFunctionMode):
    """Record reads that dispatch does not show: conversion to a list or an array, and sizes."""

    def __init__(self, selections: Selections) -> None:
        super().__init__()
        self._selections = selections

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _READ:
            self._selections.note_read(args[0])
        return func(*args, **(kwargs or {}))


_READ = {
    *(Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__iter__, Tensor.__len__),
    *(Tensor.size, Tensor.numel, Tensor.nelement, torch.numel),
    vars(Tensor.__base__)["shape"].__get__,
}
