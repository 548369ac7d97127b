"""Follow what a pass computes of positions that it selects by their values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Selections(TorchDispatchMode):
    """Follows what a pass computes of positions that it selects by their values.

    How many they are varies with the values, and so does what a row of such a tensor belongs to.
    Once the program reads a number or the size of such a tensor, it may use that anywhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self._memory: dict[int, StorageWeakRef] = {}  # which outlives no tensor
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
        """Returns whether a tensor was, or may have been, computed of selected positions."""
        if self._everything or not isinstance(value, Tensor):
            return self._everything
        if value.layout is not torch.strided:  # it has no memory of one piece
            return True
        known = self._memory.get(value.untyped_storage()._cdata)
        return known is not None and not known.expired()

    def note_read(self, value: Any) -> None:
        """Notes that the program has seen the numbers of a tensor."""
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
    """Notices what dispatch does not show: a list or an array of a tensor, and how large it is."""

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
