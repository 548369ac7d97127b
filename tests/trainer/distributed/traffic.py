"""What a block of code sends to the other processes, counted below all of torch.distributed."""

from contextlib import contextmanager
from unittest.mock import patch

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Traffic(TorchDispatchMode):
    """Counts the bytes that this process hands to each kind of collective operation.

    Every collective, that of an object or of DistributedDataParallel included, ends in an operator
    of ``torch.ops.c10d``; those without tensors (``barrier``) count as empty messages.
    """

    def __init__(self):
        super().__init__()
        self.messages = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor)]
            self.messages.append((func._schema.name, sum(tensor.nbytes for tensor in tensors)))
        return func(*args, **(kwargs or {}))


@contextmanager
def per_call(cls, name, log):
    """Appends what each call of a method of ``cls`` sends to ``log``."""
    original = getattr(cls, name)

    def counted(*args, **kwargs):
        with Traffic() as traffic:
            result = original(*args, **kwargs)
        log.append(traffic.messages)
        return result

    with patch.object(cls, name, counted):
        yield
