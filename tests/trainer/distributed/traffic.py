"""What a block of code sends to the other processes, counted below all of torch.distributed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Traffic(TorchDispatchMode):
    """Counts the bytes that this process hands to each kind of collective operation.

    Every collective, that of an object or of DistributedDataParallel included, ends in an operator
    of ``torch.ops.c10d``; those without tensors (``barrier``) count as empty messages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor)]
            self.messages.append((func._schema.name, sum(tensor.nbytes for tensor in tensors)))
        return func(*args, **(kwargs or {}))


@contextmanager
def per_call(cls: type, name: str, log: list[list[tuple[str, int]]]) -> Iterator[None]:
    """Appends what each call of a method of ``cls`` sends to ``log``."""
    original = getattr(cls, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        with Traffic() as traffic:
            result = original(*args, **kwargs)
        log.append(traffic.messages)
        return result

    with patch.object(cls, name, counted):
        yield
