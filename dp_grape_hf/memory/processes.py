"""The first of several processes that share weights, of which the others are not there.

What is sent arrives nowhere, and what is received has no contents, as nothing of a simulation has.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _meta_registrations as made_up
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

from dp_grape_hf.memory.fakes import replaced
from dp_grape_hf.sharding import mesh_of


@contextmanager
def first_of(processes: int, resized: Callable[[Tensor], None]) -> Iterator[DeviceMesh | None]:
    """Makes this process the first of several, for as long as it lasts.

    Args:
        processes: how many; with 1 nothing happens.
        resized: is told when FSDP takes or frees the memory of a gathered weight, which is no
            operation that a dispatch mode sees.

    Yields:
        The mesh for ``shard_``; None for one process.
    """
    if processes == 1:
        yield None
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore  # which takes a while

    def telling(resize: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        def changed(tensor: Tensor) -> None:
            before = tensor.untyped_storage().nbytes()
            resize(tensor)
            if tensor.untyped_storage().nbytes() != before:
                resized(tensor)

        return changed

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # as OPT's do
        stack.callback(dist.destroy_process_group)
        for name in ("alloc_storage", "free_storage"):
            function = telling(getattr(_fsdp_param, name))
            for module in (_fsdp_param, _fsdp_param_group):
                if hasattr(module, name):
                    stack.enter_context(replaced(module, name, function))
        if hasattr(made_up, "generate_unique_id"):  # draws from Python's stream, as no model may
            stack.enter_context(replaced(made_up, "generate_unique_id", lambda: 0))
        host = logging.getLogger("transformers.training_args")  # says that no launcher started this
        stack.callback(host.setLevel, host.level)
        host.setLevel(logging.ERROR)
        yield mesh_of(torch.device("cpu"))
