"""The first of several processes that share weights, without the others.

Messages that it sends arrive nowhere, and messages that it receives have no contents.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _meta_registrations
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

from dp_grape_hf.memory.fakes import replaced
from dp_grape_hf.sharding import mesh_of


@contextmanager
def first_of(processes: int, resized: Callable[[Tensor], None]) -> Iterator[DeviceMesh | None]:
    """Make this process the first of several inside the context.

    Args:
        processes: how many; with 1 nothing happens.
        resized: called when FSDP allocates or frees the memory of a gathered weight, which no
            dispatch mode sees.

    Yields:
        The mesh for ``shard_``; None for one process.
    """
    if processes == 1:
        yield None
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore  # a slow import

    def reporting(resize: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        def changed(tensor: Tensor) -> None:
            before = tensor.untyped_storage().nbytes()
            resize(tensor)
            if tensor.untyped_storage().nbytes() != before:
                resized(tensor)

        return changed

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # OPT
        stack.callback(dist.destroy_process_group)
        for name in ("alloc_storage", "free_storage"):
            function = reporting(getattr(_fsdp_param, name))
            for module in (_fsdp_param, _fsdp_param_group):
                if hasattr(module, name):
                    stack.enter_context(replaced(module, name, function))
        # A communicator's name comes from Python's random numbers, which no model may draw from.
        stack.enter_context(replaced(_meta_registrations, "generate_unique_id", lambda: 0))
        logger = logging.getLogger(
            "transformers.training_args"
        )  # reports that there is no launcher
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
        yield mesh_of(torch.device("cpu"))
